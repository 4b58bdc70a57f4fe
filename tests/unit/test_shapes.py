"""Arrays against the layout that they are registered for: dtype and shape, where the layout says enough."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvxfer.errors import InvalidLayout
from kvxfer.layout import CacheLayout, Record
from kvxfer.layout.records import latent_record
from kvxfer.layout.shapes import check_arrays
from kvxfer.layout.tensors import TensorGroup

BLOCKS, TOKENS, HEADS, DIM = 6, 16, 4, 32
NHD, HND = (BLOCKS, 2, TOKENS, HEADS, DIM), (BLOCKS, 2, HEADS, TOKENS, DIM)


def paged(dtype="float16", order="NHD"):
    return CacheLayout.paged(
        layers=["l"], num_blocks=BLOCKS, block_tokens=TOKENS, kv_heads=HEADS, head_dim=DIM, dtype=dtype, order=order
    )


def check(layout, shape, dtype="float16", itemsize=None):
    size = np.dtype(dtype).itemsize if itemsize is None else itemsize
    check_arrays(layout, [(layout.regions[0].name, dtype, size, shape)])


@pytest.mark.parametrize(
    ("layout", "held", "itemsize"),
    [
        ("float16", "float16", 2),
        ("float16", "int16", 2),  # bits
        ("bfloat16", "void16", 2),
        ("bfloat16", "bfloat16", 2),
        ("bfloat16", "uint16", 2),
        ("float32", "float32", 4),
        ("float32", "int32", 4),
        ("float8_e4m3fn", "float8_e4m3fn", 1),
        ("float8_e4m3fn", "uint8", 1),
        ("int8", "int8", 1),
        ("uint8", "float8_e4m3fn", 1),
        ("uint16", "bfloat16", 2),
    ],
)
def test_the_same_dtype_or_its_bits(layout, held, itemsize):
    check(paged(layout), NHD, held, itemsize)


@pytest.mark.parametrize(
    ("layout", "held", "itemsize"),
    [
        ("float16", "float32", 4),
        ("float16", "bfloat16", 2),
        ("bfloat16", "float16", 2),
        ("float16", "int32", 4),
        ("float32", "float64", 8),
        ("float32", "complex64", 8),
        ("float8_e4m3fn", "float8_e4m3fnuz", 1),
        ("float8_e4m3fn", "float8_e5m2", 1),
        ("uint16", "float32", 4),
    ],
)
@pytest.mark.parametrize("shape", [NHD, (10**6,)])
def test_another_dtype_is_refused_by_name(layout, held, itemsize, shape):
    with pytest.raises(InvalidLayout, match=rf"region 'l'.*planes hold {layout} .*, the array {held} \({itemsize} "):
        check(paged(layout), shape, held, itemsize)


@pytest.mark.parametrize(
    ("order", "shape"),
    [
        ("NHD", NHD),
        ("NHD", (BLOCKS, 2 * TOKENS, HEADS, DIM)),
        ("NHD", (2 * BLOCKS, TOKENS, HEADS, DIM)),
        ("NHD", (BLOCKS, 2, TOKENS, HEADS * DIM)),
        ("NHD", (BLOCKS, 2 * TOKENS * HEADS * DIM)),
        ("NHD", (BLOCKS * 2 * TOKENS * HEADS * DIM,)),
        ("NHD", (1, BLOCKS, 2, TOKENS, 1, HEADS, DIM)),
        ("HND", HND),
        ("HND", (BLOCKS, 2 * HEADS, TOKENS, DIM)),
    ],
)
def test_axes_of_the_layout_of_which_neighbours_may_be_one(order, shape):
    check(paged(order=order), shape)


@pytest.mark.parametrize(
    ("order", "shape", "axis"),
    [
        ("NHD", (BLOCKS, 2, TOKENS, 2 * HEADS, DIM // 2), 3),
        ("NHD", (2 * BLOCKS, 2, TOKENS // 2, HEADS, DIM), 1),
        ("NHD", HND, 2),
        ("HND", NHD, 2),
        ("NHD", (2, TOKENS, HEADS, DIM, BLOCKS), 1),
    ],
)
def test_other_axes_are_refused(order, shape, axis):
    with pytest.raises(InvalidLayout, match=rf"region 'l': axis {axis} of .*nothing in the layout.* {BLOCKS} blocks"):
        check(paged(order=order), shape)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("shape", [(BLOCKS, 7, 3), (999,), (2, 4096)])
def test_bytes_have_any_shape(dtype, shape):
    check(paged(), shape, dtype)


@pytest.mark.parametrize(
    ("shape", "axes", "order"),
    [
        ((BLOCKS, 2, TOKENS, HEADS, DIM), "B2NHC", range(5)),
        ((2, BLOCKS, TOKENS, HEADS, DIM), "2BNHC", range(5)),
        ((BLOCKS, HEADS, TOKENS, 2 * DIM), "BHNC", range(4)),
        ((BLOCKS, TOKENS, HEADS, 2 * DIM), "BHNC", (0, 2, 1, 3)),
        ((BLOCKS, TOKENS, 576), "BNC", range(3)),
    ],
)
def test_the_arrays_of_from_tensors_fit_its_layout(shape, axes, order):
    array = np.zeros(shape, np.float16)
    layout = CacheLayout.from_tensors({"l": array.transpose(order)}, groups=TensorGroup(axes=axes))
    check(layout, shape)
    with pytest.raises(InvalidLayout, match="planes hold float16"):
        check(layout, shape, "float32")


@pytest.mark.parametrize("shape", [(3, BLOCKS, 2, TOKENS, HEADS, DIM), (BLOCKS, 3, 2, TOKENS, HEADS, DIM)])
def test_layers_in_one_array(shape):
    whole = np.zeros(shape, np.float16)
    layers = {f"l{i}": np.moveaxis(whole, shape.index(3), 0)[i] for i in range(3)}
    layout = CacheLayout.from_tensors(layers)
    assert len(layout.regions) == 1
    check(layout, shape)
    with pytest.raises(InvalidLayout, match="nothing in the layout has"):
        check(layout, (*shape[:-2], 2 * HEADS, DIM // 2))


def test_several_dtypes_in_one_region():
    record = latent_record("v32.fp8_ds_mla.656", entries=TOKENS)  # e4m3, fp32 and bf16
    whole = np.zeros((BLOCKS, record.nbytes), np.uint8)
    layout = CacheLayout.from_tensors({"l": whole}, groups=TensorGroup(axes="B", record=record))
    check(layout, (BLOCKS, TOKENS, 656), "float8_e4m3fn", 1)
    check(layout, (BLOCKS, TOKENS, 164), "float32")
    with pytest.raises(InvalidLayout, match=r"planes hold bfloat16 .*, float32 .*, float8_e4m3fn"):
        check(layout, (BLOCKS, TOKENS, 328), "float16")


def test_of_an_opaque_record_only_its_blocks_are_known():
    record = Record(tag="opaque", nbytes=10496)
    whole = np.zeros((BLOCKS, record.nbytes), np.uint8)
    layout = CacheLayout.from_tensors({"l": whole}, groups=TensorGroup(axes="B", record=record, block_tokens=TOKENS))
    check(layout, (BLOCKS, TOKENS, 328), "float16")
    check(layout, (BLOCKS, 41, 64), "float32")
    with pytest.raises(InvalidLayout, match="nothing in the layout has"):
        check(layout, (2, BLOCKS // 2, 3 * record.nbytes // 4), "float16")


def test_unknown_names_of_dtypes_are_not_compared():
    layout = paged()
    planes = tuple(msgspec.structs.replace(plane, dtype="float16.t4") for plane in layout.records[0].planes)
    record = msgspec.structs.replace(layout.records[0], planes=planes)
    check(msgspec.structs.replace(layout, records=(record,)), NHD, "float32", 2)
