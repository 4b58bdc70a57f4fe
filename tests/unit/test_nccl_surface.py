"""What the NCCL backend uses of nccl4py, checked against the installed package; no GPU is needed for that.

Communicators cannot be made without one: the states are tested on a fake (test_nccl_channel.py), the whole on GPUs
(tests/gpu).
"""

from __future__ import annotations

import re
import sys

import pytest

from kvxfer import cuda
from kvxfer.backends import nccl_library
from kvxfer.backends.nccl_library import Library
from kvxfer.errors import BackendError
from tests import nccl_fake

bindings = pytest.importorskip("nccl.bindings.nccl")

SIGNATURES = {
    "get_version": "",
    "get_library_path": "",
    "get_unique_id": "",
    "comm_init_rank_scalable": "nranks, myrank, n_id, comm_ids, config",
    "comm_get_async_error": "comm",
    "comm_abort": "comm",
    "send": "sendbuff, count, datatype, peer, comm, stream",
    "recv": "recvbuff, count, datatype, peer, comm, stream",
    "comm_window_register": "comm, buff, size, win_flags",
    "put_signal": "localbuff, count, datatype, peer, peer_win, peer_win_offset, sig_idx, ctx, flags, comm, stream",
    "wait_signal": "n_desc, signal_descs, comm, stream",
    "mem_alloc": "size",
    "mem_free": "ptr",
    "get_last_error": "comm",
}


def arguments(function: str) -> str:
    """Names of a binding's arguments, out of the first line of its documentation."""
    listed = re.match(r"\w+\((.*?)\)", getattr(bindings, function).__doc__)[1]
    return ", ".join(argument.split()[-1] for argument in listed.split(",") if argument)


@pytest.mark.parametrize("function", SIGNATURES)
def test_signatures(function):
    assert arguments(function) == SIGNATURES[function]


@pytest.mark.parametrize("function", SIGNATURES)
def test_the_fake_has_the_same_functions(function):
    found = getattr(nccl_fake.FakeNccl, function)
    assert found.__code__.co_argcount - 1 == len([name for name in SIGNATURES[function].split(", ") if name])


def test_statuses_and_structures():
    assert (int(bindings.Result.Success), int(bindings.Result.InProgress), int(bindings.DataType.Uint8)) == (0, 7, 1)
    for kind in (nccl_fake.Result, nccl_fake.DataType):
        real = getattr(bindings, kind.__name__)
        assert all(int(real[member.name]) == member.value for member in kind)
    bindings.check_status(int(bindings.Result.InProgress))  # is no error: non-blocking calls return it
    with pytest.raises(bindings.NCCLError):
        bindings.check_status(int(bindings.Result.SystemError))
    config = bindings.Config()
    config.blocking, config.max_ctas = 0, 5
    assert (config.blocking, config.max_ctas) == (0, 5) and config.ptr
    real, fake = bindings.WaitSignalDesc(), nccl_fake.WaitSignalDesc()
    for wanted in (real, fake):
        wanted.op_cnt, wanted.peer, wanted.sig_idx, wanted.ctx = 1, 2, 3, 4
    assert bytes(real) == bytes(fake)
    assert not bindings.Window()  # what a window is while it is being made


def test_the_library_names_itself_and_what_it_lacks():
    library = Library()
    assert re.fullmatch(r"2\.\d+\.\d+", library.version) and library.path in str(library)
    new_enough = tuple(int(part) for part in library.version.split(".")) >= (2, 29)
    assert (library.missing == ()) == new_enough


def test_without_a_gpu_a_communicator_is_refused_with_nccls_reason():
    if cuda.available():
        pytest.skip("there is a GPU")
    library = Library()
    unique_id = library.unique_id()
    assert len(unique_id) == 128
    with pytest.raises(BackendError, match="NCCL makes no communicator"):
        library.communicator(unique_id, 0, max_ctas=4)


def test_a_missing_libnccl_is_named(monkeypatch):
    class WithoutLibrary:
        NCCLError = bindings.NCCLError

        @staticmethod
        def get_version():
            raise RuntimeError("libnccl.so.2 was not found")

    with pytest.raises(BackendError, match=r"finds no libnccl.*nvidia-nccl"):
        Library(WithoutLibrary)


def test_a_function_that_is_missing_is_an_error_of_ours():
    class Old(nccl_fake.FakeNccl):
        def mem_alloc(self, nbytes):
            raise bindings.NCCLError(4)

        def get_unique_id(self):
            raise RuntimeError("function ncclGetUniqueId is not found")

    old = Old(nccl_fake._DEFAULTS, nccl_fake.FakeGpus("g", 1))
    with pytest.raises(BackendError, match="ncclGetUniqueId"):
        Library(old).unique_id()
    assert "nccl" in sys.modules and nccl_library._bindings() is bindings
