"""Copies between two GPUs: within one process, and between two that each see only their own GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvxfer import cuda
from tests.gpu import families
from tests.gpu.memory import Region, addresses, need_devices

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]
need_devices(2)

FAMILIES = {"whole": lambda: families.whole([4096, 512]), **families.TOKEN_FAMILIES}


@pytest.mark.parametrize("runs_on", [0, 1], ids=["push", "pull"])
@pytest.mark.parametrize("family", FAMILIES)
def test_between_two_gpus_of_a_process(family, runs_on):
    assert cuda.can_access_peer(0, 1) and cuda.can_access_peer(1, 0)
    cuda.enable_peer_access(runs_on, 1 - runs_on)
    cuda.enable_peer_access(runs_on, 1 - runs_on)  # again: no error
    case = FAMILIES[family]()
    src = [Region(array, device=0) for array in case.src]
    dst = [Region(array, device=1) for array in case.dst]
    with (
        cuda.Stream(device=runs_on) as stream,
        cuda.PreparedCudaPlan(
            case.plan, device=runs_on, src_bases=addresses(src), dst_bases=addresses(dst)
        ) as plan,
    ):
        plan.upload(stream=stream.address)
        for chunk in case.plan.chunks(10_000):
            plan.copy(chunk, stream=stream.address)
        stream.synchronise()
    for region, expected in zip(dst, case.expected, strict=True):
        assert np.array_equal(region.read(), expected)


def test_one_piece_between_devices():
    content = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
    with (
        Region(content, device=0) as src,
        Region(np.zeros_like(content), device=1) as dst,
        cuda.Stream(device=0) as stream,
    ):
        cuda.copy_bytes_peer(dst.address, 1, src.address, 0, src.nbytes, device=0, stream=stream.address)
        stream.synchronise()
        assert np.array_equal(dst.read(), content)


def test_many_pieces_in_one_call():
    content = np.random.default_rng(0).integers(0, 256, (64, 4096), np.uint8)
    order = np.random.default_rng(1).permutation(64).astype(np.uint64)
    with (
        Region(content, device=0) as src,
        Region(np.zeros_like(content), device=1) as dst,
        cuda.Stream(device=0) as stream,
    ):
        at = np.arange(64, dtype=np.uint64) * np.uint64(4096)
        cuda.copy_bytes_batch(
            np.uint64(dst.address) + order * np.uint64(4096),
            np.uint64(src.address) + at,
            np.full(64, 4096, np.uint64),
            device=0,
            stream=stream.address,
        )
        stream.synchronise()
        assert np.array_equal(dst.read().reshape(64, 4096)[order.astype(int)], content)


# --- two processes ------------------------------------------------------------------------------------------


class Process:
    """`ipc_process.py` on one GPU, which is the only one it sees. Verbs go as lines of JSON."""

    def __init__(self, gpu: int) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("ipc_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def __call__(self, verb: str, **arguments: object) -> dict:
        self._popen.stdin.write(json.dumps({"verb": verb, **arguments}) + "\n")
        self._popen.stdin.flush()
        answer = json.loads(self._popen.stdout.readline() or '{"error": "the process is gone"}')
        assert "error" not in answer, answer["error"]
        return answer

    def end(self) -> int:
        self._popen.stdin.close()
        return self._popen.wait(30)

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait()


@pytest.fixture
def pair():
    both = [Process(0), Process(1)]
    yield both
    for process in both:
        process.kill()


@pytest.mark.parametrize("runs_on", [0, 1], ids=["push", "pull"])
@pytest.mark.parametrize("family", ["whole", "blocks of 16 to 24", "NHD to HND"])
@pytest.mark.parametrize("apart", [False, True], ids=["one allocation", "small allocations"])
def test_between_two_processes_that_see_one_gpu_each(apart, family, runs_on, pair):
    sides = ("src", "dst")
    held = [
        process("hold", family=family, side=side, apart=apart)
        for process, side in zip(pair, sides, strict=True)
    ]
    pair[runs_on]("copy", family=family, side=sides[runs_on], peer=held[1 - runs_on]["handles"])
    assert pair[1]("check", family=family) == {"equal": True}
    assert [process.end() for process in pair] == [0, 0]


def test_a_stream_waits_for_an_event_of_the_other_process(pair):
    held = [
        process("hold", family="whole", side=side) for process, side in zip(pair, ("src", "dst"), strict=True)
    ]
    event = pair[0]("overwrite", byte=77)["event"]
    assert pair[1]("first_bytes_after", peer=held[0]["handles"], event=event) == {"bytes": [77]}
    assert [process.end() for process in pair] == [0, 0]


def test_memory_of_a_killed_process_can_be_closed(pair):
    src = pair[0]("hold", family="whole", side="src")
    pair[1]("hold", family="whole", side="dst")
    pair[1]("open", peer=src["handles"])
    pair[0].kill()
    pair[1]("close")
    assert pair[1].end() == 0
