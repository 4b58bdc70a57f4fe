"""What travels to peers has the types that a peer decodes, whoever made it and out of what."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvxfer import checks
from kvxfer.errors import InvalidLayout, InvalidRequest
from kvxfer.layout import CacheLayout, Group, GroupKind, Padding, Plane, Record, Region, Slice
from kvxfer.layout.records import latent_record
from kvxfer.layout.tensors import TensorGroup

PAGED = {
    "layers": ["a", "b"],
    "num_blocks": 4,
    "block_tokens": 8,
    "kv_heads": 2,
    "head_dim": 16,
    "dtype": "float16",
    "head_start": 2,
    "total_heads": 4,
    "fingerprint": {"model": "m"},
}
PLANE = {"name": "k", "dtype": "u8", "offset": 0, "entries": 4, "entry_stride": 8, "unit_bytes": 8}
GROUP = {"name": "g", "block_tokens": 4, "num_blocks": 2, "slices": ()}


def numpy_too(given: dict) -> dict:
    """The same arguments as NumPy has them."""
    kinds = {int: np.int64, str: np.str_}
    return {key: kinds[type(value)](value) if type(value) in kinds else value for key, value in given.items()}


def test_a_layout_made_of_numpy_values_is_the_same_on_the_wire():
    factors = {np.str_("model"): np.str_("m")}
    given = numpy_too(PAGED) | {"layers": np.array(PAGED["layers"]), "fingerprint": factors}
    ours, theirs = CacheLayout.paged(**PAGED), CacheLayout.paged(**given)
    assert ours == theirs
    assert msgspec.msgpack.encode(ours) == msgspec.msgpack.encode(theirs)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(theirs), type=CacheLayout) == ours


@pytest.mark.parametrize(
    "part",
    [
        Plane(**numpy_too(PLANE | {"head_start": 1, "total_heads": 2})),
        Padding(**numpy_too({"name": "p", "offset": 1, "nbytes": 2})),
        Record(**numpy_too({"tag": "r", "nbytes": 32}), planes=[Plane(**PLANE)]),
        Region(**numpy_too({"name": "m", "nbytes": 64}), address=np.uint64(2**47)),
        Slice(**numpy_too({"layer": "a", "region": "m", "offset": 0, "block_stride": 8, "record": "r"})),
        Group(**numpy_too(GROUP | {"window": 3}), kind=GroupKind.SLIDING),
        latent_record("mla.bf16", entries=np.int64(8), tokens_per_entry=np.int8(1)),
    ],
    ids=lambda part: type(part).__name__,
)
def test_parts_made_of_numpy_values_survive_the_handshake(part):
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(part), type=type(part))
    assert decoded == part
    assert hash(decoded) == hash(part)


@pytest.mark.parametrize("value", [None, 1.0, "1", True, -1, 2**70, [1], np.float64(1), np.array([1, 2]), int])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        *((lambda v, f=f: Plane(**PLANE | {f: v}), f"Plane.{f}") for f in ("entries", "offset", "head_start")),
        (lambda v: Padding(name="p", offset=v, nbytes=1), "Padding.offset"),
        (lambda v: Record(tag="r", nbytes=v), "Record.nbytes"),
        (lambda v: Region(name="r", nbytes=v), "Region.nbytes"),
        (lambda v: Slice(layer="l", region="r", offset=0, block_stride=v, record="r"), "Slice.block_stride"),
        *((lambda v, f=f: Group(**GROUP | {f: v}), f"Group.{f}") for f in ("num_blocks", "window")),
        *(
            (lambda v, f=f: CacheLayout.paged(**PAGED | {f: v}), f)
            for f in ("num_blocks", "block_tokens", "kv_heads", "head_dim")
        ),
        (lambda v: latent_record("mla.bf16", entries=v), "entries"),
    ],
)
def test_what_is_no_integer_in_range_is_refused_by_name(make, field, value):
    with pytest.raises(InvalidLayout, match=rf"{field} must be an integer from \d+ to"):
        make(value)


@pytest.mark.parametrize("value", [None, 5, b"x", "\ud800", ["a"]])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda v: Plane(**PLANE | {"name": v}), "Plane.name"),
        (lambda v: Plane(**PLANE | {"dtype": v}), "Plane.dtype"),
        (lambda v: Record(tag=v, nbytes=1), "Record.tag"),
        (lambda v: Region(name="r", nbytes=1, device=v), "Region.device"),
        (lambda v: Slice(layer=v, region="r", offset=0, block_stride=1, record="r"), "Slice.layer"),
        (lambda v: Group(**GROUP | {"name": v}), "Group.name"),
        (lambda v: CacheLayout.paged(**PAGED | {"layers": ["a", v]}), "Slice.layer"),
        (lambda v: CacheLayout.paged(**PAGED | {"group": v}), "Group.name"),
        (lambda v: CacheLayout.paged(**PAGED | {"fingerprint": {"layers": v}}), r"fingerprint\['layers'\]"),
    ],
)
def test_what_is_no_str_is_refused_by_name(make, field, value):
    with pytest.raises(InvalidLayout, match=rf"{field} must be a str"):
        make(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plane(**PLANE, tiled=1), r"Plane.tiled must be a bool, got int"),
        (lambda: Group(**GROUP, kind="full"), r"Group.kind must be a GroupKind, got str"),
        (lambda: Group(**GROUP | {"slices": 5}), r"Group.slices must be a tuple of Slice, got int"),
        (lambda: Group(**GROUP | {"slices": ("a",)}), r"an item of Group.slices must be a Slice, got str"),
        (lambda: CacheLayout.paged(**PAGED | {"fingerprint": 5}), r"fingerprint must be a Mapping, got int"),
        (lambda: CacheLayout.paged(**PAGED | {"fingerprint": {1: "a"}}), r"a name in .*fingerprint must be a str"),
        (lambda: CacheLayout.paged(**PAGED | {"layers": "ab"}), r"layers must be a sequence of names, got 'ab'"),
        (lambda: CacheLayout.paged(**PAGED | {"layers": None}), r"layers must be a sequence of names, got None"),
        (lambda: CacheLayout.paged(**PAGED | {"dtype": ["float16"]}), r"unknown dtype"),
        (lambda: CacheLayout.from_tensors({"a": np.zeros((2, 2, 4, 1, 8))}, groups=5), r"TensorGroup"),
        (lambda: CacheLayout.from_tensors({"a": np.zeros((2, 2, 4, 1, 8))}, groups={"g": 5}), r"TensorGroup"),
        (lambda: CacheLayout.from_tensors({1: np.zeros((2, 2, 4, 1, 8))}), r"Region.name must be a str"),
        (
            lambda: CacheLayout.from_tensors({"a": np.zeros((2, 2, 4, 1, 8))}, groups=TensorGroup(axes=5)),
            r"axes must be a str",
        ),
        (
            lambda: CacheLayout.from_tensors(
                {"a": np.zeros((2, 4, 1, 8))}, groups=TensorGroup(axes="BNHC", content={"k": "4", "v": 4})
            ),
            r"content\['k'\] must be an integer",
        ),
    ],
)
def test_other_types_are_refused_by_name(make, message):
    with pytest.raises(InvalidLayout, match=message):
        make()


@pytest.mark.parametrize("value", [7, np.int8(7), np.uint64(7), np.array(7)])
def test_integers_of_every_kind_become_ints(value):
    assert type(checks.integer("n", value, 0, 9)) is int
    assert checks.integer("n", value, 0, 9) == 7


@pytest.mark.parametrize(
    "value", [True, np.True_, 7.0, np.float32(7), "7", None, np.array([7, 7]), np.array(7.0), 10, -1]
)
def test_what_is_no_integer_is_refused(value):
    with pytest.raises(InvalidRequest, match="n must be an integer from 0 to 9, got"):
        checks.integer("n", value, 0, 9)


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int64(3), np.float64(3)])
def test_numbers_of_every_kind_become_floats(value):
    assert type(checks.seconds("t", value)) is float
    assert checks.seconds("t", value) == 3


@pytest.mark.parametrize("value", [0, -1, "3", None, True, float("nan"), float("inf"), 10**400, -(10**400), 1j, [3]])
def test_what_is_no_positive_number_is_refused(value):
    with pytest.raises(InvalidRequest, match="t must be a number of seconds over 0"):
        checks.seconds("t", value)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("tcp://127.0.0.1:*", "tcp://127.0.0.1:0"),
        ("tcp://[::1]:0", "tcp://[::1]:0"),
        ("tcp://*:5", "tcp://*:5"),
        (np.str_("tcp://host:65535"), "tcp://host:65535"),
        ("ipc:///a/b", "ipc:///a/b"),
    ],
)
def test_endpoints_are_kept_in_one_form(given, kept):
    assert checks.endpoint("listen", given) == kept
    assert type(checks.endpoint("listen", given)) is str


@pytest.mark.parametrize(
    "value",
    ["", None, 5, "127.0.0.1:5", "tcp://h", "tcp://h:65536", "ipc://", "tcp://h:5/x", f"tcp://{'h' * 300}:1"],
)
def test_what_is_no_endpoint_is_refused(value):
    with pytest.raises(InvalidRequest, match="listen must be"):
        checks.endpoint("listen", value)


@pytest.mark.parametrize("value", ["tcp://h:0", "tcp://h:*", "tcp://*:5"])
def test_an_endpoint_that_peers_are_told_has_a_host_and_a_port(value):
    with pytest.raises(InvalidRequest, match="members must be tcp://host:port or ipc"):
        checks.endpoint("members", value, dialled=True)
