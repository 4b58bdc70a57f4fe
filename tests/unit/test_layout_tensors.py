"""Layouts from what an engine registers: shapes, strides, aliased storage, named padding."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest

from kvxfer.errors import InvalidLayout
from kvxfer.layout import CacheLayout, GroupKind
from kvxfer.layout.records import cpu_attention_record, latent_record
from kvxfer.layout.tensors import TensorGroup
from kvxfer.models import layout_for
from kvxfer.plan import compare, join


def flat(layout: CacheLayout) -> dict[str, list[tuple]]:
    """Every plane with its absolute address, by layer: what a layout means, whatever its names."""
    regions = {region.name: region for region in layout.regions}
    found: dict[str, list[tuple]] = {}
    for group in layout.groups:
        for piece in group.slices:
            for plane in layout.record(piece.record).planes:
                start = regions[piece.region].address + piece.offset + plane.offset
                for head in range(plane.heads):
                    found.setdefault(piece.layer, []).append(
                        (
                            plane.name,
                            plane.head_start + head,
                            start + head * plane.head_stride,
                            plane.entries,
                            plane.entry_stride if plane.entries > 1 else 0,
                            plane.unit_bytes,
                            piece.block_stride,
                        )
                    )
    return {layer: sorted(planes) for layer, planes in found.items()}


def test_one_array_a_layer_equals_paged():
    layers = {f"layers.{i}": np.zeros((5, 2, 16, 3, 8), np.float32) for i in range(3)}
    ours = CacheLayout.from_tensors(layers, fingerprint={"model": "tiny"})
    paged = CacheLayout.paged(
        layers=list(layers), num_blocks=5, block_tokens=16, kv_heads=3, head_dim=8, dtype="float32"
    ).bind({name: array.ctypes.data for name, array in layers.items()})
    assert flat(ours) == flat(paged)
    assert {r.name: r.address for r in ours.regions} == {n: a.ctypes.data for n, a in layers.items()}
    assert ours.group("full").num_blocks == 5 and ours.fingerprint == {"model": "tiny"}
    assert join([ours], paged)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_five_letter_layouts_from_strided_views(order):
    sizes = {"L": 3, "B": 4, "H": 2, "N": 8, "C": 10}
    storage = np.zeros([sizes[axis] for axis in order], np.float16)
    logical = storage.transpose([order.index(axis) for axis in "LBHNC"])
    layers = {f"layers.{i}": logical[i] for i in range(3)}
    layout = CacheLayout.from_tensors(layers, groups=TensorGroup(axes="BHNC"))
    assert len(layout.regions) == 1 and layout.regions[0].nbytes == storage.nbytes
    steps = dict(zip(order, storage.strides, strict=True))
    expected = {
        f"layers.{layer}": sorted(
            (
                name,
                head,
                storage.ctypes.data + layer * steps["L"] + head * steps["H"] + half * 10,
                8,
                steps["N"],
                10,
                steps["B"],
            )
            for half, name in enumerate("kv")
            for head in range(2)
        )
        for layer in range(3)
    }
    assert flat(layout) == expected


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("order", ["".join(order) for order in itertools.permutations("B2NH")])
def test_every_order_in_which_a_blocks_tokens_lie_together(order, heads):
    sizes = {"B": 5, "2": 2, "N": 4, "H": heads, "C": 8}
    storage = np.zeros([sizes[axis] for axis in order + "C"], np.float16)
    groups = TensorGroup(axes=order + "C")
    if order.index("N") < order.index("B"):
        with pytest.raises(InvalidLayout, match="the next block nearer than the next token"):
            CacheLayout.from_tensors({"l": storage}, groups=groups)
        return
    layout = CacheLayout.from_tensors({"l": storage}, groups=groups)
    steps = dict(zip(order, storage.strides, strict=False))
    assert flat(layout)["l"] == sorted(
        (name, head, storage.ctypes.data + half * steps["2"] + head * steps["H"], 4, steps["N"], 16, steps["B"])
        for half, name in enumerate("kv")
        for head in range(heads)
    )


def test_keys_and_values_apart():
    layers = {"a": np.zeros((2, 6, 4, 2, 8), np.float32)}
    layout = CacheLayout.from_tensors(layers, groups=TensorGroup(axes="2BNHC"))
    assert [piece.offset for piece in layout.groups[0].slices] == [0, 6 * 4 * 2 * 8 * 4]
    together = CacheLayout.paged(
        layers=["a"], num_blocks=3, block_tokens=8, kv_heads=2, head_dim=8, dtype="float32"
    )
    assert compare(layout, together, layers=["a"]).refused == () or layout.fingerprint != together.fingerprint
    assert join([layout], together)


def test_torch_tensors_of_one_storage():
    torch = pytest.importorskip("torch")
    storage = torch.zeros(2, 5, 2, 16, 12, dtype=torch.bfloat16)
    layout = CacheLayout.from_tensors({"a": storage[0], "b": storage[1]}, groups=TensorGroup(axes="BHNC"))
    (region,) = layout.regions
    assert (region.address, region.nbytes, region.device) == (storage.data_ptr(), storage.nbytes, "cpu")
    assert layout.records[0].planes[0].dtype == "bfloat16"


def test_groups_that_alias_one_storage():
    storage = np.zeros((4, 2, 16, 2, 8), np.float32)
    layout = CacheLayout.from_tensors(
        {"full": storage, "sliding": storage},
        groups={
            "full": TensorGroup(layers=["full"]),
            "window": TensorGroup(layers=["sliding"], kind=GroupKind.SLIDING, window=20),
        },
    )
    assert len(layout.regions) == 1
    assert layout.group("window").window == 20


def test_bytes_that_nobody_claims_are_named_or_refused():
    slab = np.zeros((6, 1000), np.uint8)
    record = latent_record("v4.fp8_ds_mla.584", entries=1)
    layers = {"a": slab[:, :584]}
    with pytest.raises(InvalidLayout, match=r"nobody claims bytes 584\.\.1000"):
        CacheLayout.from_tensors(layers, groups=TensorGroup(axes="B", record=record))
    layout = CacheLayout.from_tensors(layers, groups=TensorGroup(axes="B", record=record, padding="rest"))
    assert layout.groups[0].padding[0].nbytes == 416
    rows = np.zeros((6, 2, 4, 2, 10), np.float32)[..., :8]
    with pytest.raises(InvalidLayout, match="nobody claims bytes 32"):
        CacheLayout.from_tensors({"a": rows})
    padded = CacheLayout.from_tensors({"a": rows}, groups=TensorGroup(padding="row end"))
    assert (
        sum(p.nbytes for p in padded.records[0].padding) + padded.groups[0].padding[0].nbytes == 2 * 4 * 2 * 8
    )


def test_padding_behind_each_layer_of_its_own():
    arrays = {name: np.zeros((5, 100), np.uint8)[:, :96] for name in "ab"}
    layout = CacheLayout.from_tensors(arrays, groups=TensorGroup(axes="BC", block_tokens=1, padding="tail"))
    assert layout.group("full").slices[0].block_stride == 100
    assert join([layout], layout)[0].plan({"full": [3]}, {"full": [1]}, tokens=1).nbytes in (2 * 96, 96 + 100)


def test_cpu_record_by_name():
    array = np.zeros((4, 2, 16, 16), np.float32)
    record = cpu_attention_record(block_tokens=16, kv_heads=2, head_dim=8, dtype="float32")
    layout = CacheLayout.from_tensors({"a": array}, groups=TensorGroup(axes="BHNC", record=record))
    assert layout.group("full").block_tokens == 16


def test_the_packed_slab_of_v41():
    """Views of one slab give back the layout that was worked out from the model."""
    worked_out = layout_for("DeepSeek-V4.1-Flash", num_blocks=3)
    (region,) = worked_out.regions
    stride = worked_out.groups[0].slices[0].block_stride
    slab = np.zeros((3, stride), np.uint8)
    assert slab.nbytes == region.nbytes
    records = {r.tag: r for r in worked_out.records}
    views, groups = {}, {}
    for group in worked_out.groups:
        for piece in group.slices:
            views[piece.layer] = slab[:, piece.offset : piece.offset + records[piece.record].nbytes]
        groups[group.name] = TensorGroup(
            layers=group.layers,
            axes="B",
            kind=group.kind,
            window=group.window,
            record={piece.layer: records[piece.record] for piece in group.slices},
            compression_ratio=group.compression_ratio,
            padding="unused",
        )
    registered = CacheLayout.from_tensors(views, groups=groups)
    assert len(registered.regions) == 1 and registered.regions[0].address == slab.ctypes.data
    assert [(g.kind, g.block_tokens, g.window, g.padding) for g in registered.groups] == [
        (g.kind, g.block_tokens, g.window, g.padding) for g in worked_out.groups
    ]
    for ours, theirs in zip(registered.groups, worked_out.groups, strict=True):
        assert [msgspec.structs.replace(piece, region="slab") for piece in ours.slices] == list(theirs.slices)


@pytest.mark.parametrize(
    ("tensors", "group", "message"),
    [
        ({}, None, "at least one"),
        ({"a": np.zeros((2, 2, 3))}, None, "must name each dimension"),
        ({"a": object()}, None, "expected an array"),
        ({"a": np.zeros((2, 3, 4, 1, 2))}, None, "axis 2"),
        ({"a": np.zeros((2, 2, 4, 1, 2))}, TensorGroup(layers=["b"]), "no tensor is called"),
        (
            {"a": np.zeros((2, 2, 4, 1, 2)), "b": np.zeros((2, 2, 4, 1, 2))},
            TensorGroup(layers=["a"]),
            "in no group",
        ),
        ({"a": np.zeros((2, 2, 4, 1, 2)), "b": np.zeros((3, 2, 4, 1, 2))}, None, "must agree"),
        ({"a": np.zeros((2, 4, 1, 6))}, TensorGroup(axes="BNHC", content={"k": 2, "v": 2}), "add up"),
    ],
)
def test_what_does_not_fit_is_said(tensors, group, message):
    with pytest.raises(InvalidLayout, match=message):
        CacheLayout.from_tensors(tensors, groups=group)
