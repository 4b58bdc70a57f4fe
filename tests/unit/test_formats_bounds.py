"""The table of error bounds in docs/formats.md, restated here from its text and tried on blocks of all magnitudes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import formats, kernels
from kvxfer.errors import InvalidRequest
from kvxfer.formats import elements, reference
from kvxfer.layout import CacheLayout

DIM = 128
LARGEST = float(np.finfo(np.float32).max)
HALF = 65504.0
FORMATS = {
    "fp8_e4m3": 0,  # values a block; 0: the vector
    "fp8_e4m3:per_128": 128,
    "fp8_e4m3:tensor": 0,
    "fp8_e4m3:tensor,scale=0.25": 0,
    "mxfp8": 32,
    "mxfp8:floor": 32,
    "mxfp8:even": 32,
    "mxfp4": 32,
    "mxfp4:ceil": 32,
    "mxfp4:even": 32,
    "nvfp4": 16,
    "nvfp4:scale=0.01": 16,
    "nvfp4:four_over_six": 16,
    "int4": 64,
    "int4:32": 32,
    "int4:128": 128,
    "int4:asym": 64,
    "int4:asym,32": 32,
}
ROTATED = ("mxfp4:hadamard", "mxfp4:even,hadamard", "int4:hadamard", "int4:asym,hadamard")


def bound(name: str, x: np.ndarray) -> np.ndarray:
    """What docs/formats.md allows as error of each value of the blocks ``[n, block]``, in float64."""
    wide = np.abs(x)
    amax, low, r = wide.max(-1, keepdims=True), x.min(-1, keepdims=True), np.ptp(x, axis=-1, keepdims=True)
    g = float(np.float32(name.partition("scale=")[2] or 1))
    if name.startswith("fp8_e4m3:tensor"):
        return np.maximum(np.maximum(wide / 16, g / 1024), wide - 448 * g)
    if name.startswith("fp8_e4m3"):
        return np.where(amax < 448 * 2.0**-126, wide, np.maximum(wide / 16, amax / 448 / 1024))
    if name == "mxfp8":
        return np.where(
            amax > 448 * 2.0**119, amax / 8, np.maximum(np.maximum(wide / 16, amax / 2**17), 2.0**-129)
        )
    if name.startswith("mxfp"):
        allowed = np.maximum(amax / 8, 2.0**-129) if "mxfp8" in name else np.maximum(amax / 4, 2.0**-128)
        return np.broadcast_to(allowed, x.shape)
    if name.startswith("nvfp4"):
        inside = np.where(
            amax < 6 * g / 64,
            np.maximum(amax / 6 + g / 1024, 6 * g / 1024),
            np.minimum(amax, 2688 * g) * 17 / 96,
        )
        return np.maximum(inside, wide - 2688 * g)
    if "asym" not in name:
        kept = np.minimum(amax, 7 * HALF)
        return kept / 14 + kept / 2048 + 2.0**-22 + np.maximum(wide - 7 * HALF, 0)
    inside = r / 30 + (np.abs(low) + r) / 2048 + 2.0**-21
    z, s = np.clip(low, -HALF, HALF), np.minimum(r / 15, HALF)
    away = np.abs(x - np.clip(x, z, z + 15 * s))  # from the nearest of z .. z + 15 s, which is s / 2 apart at most
    outside = away + s / 2 + (np.abs(z) + 15 * s) / 2048
    return np.where((np.abs(low) <= HALF) & (r <= 15 * HALF), inside, outside)


def round_trip(name: str, x: np.ndarray) -> np.ndarray:
    codec = formats.parse(name).codec("k", x.shape[-1])
    y = codec.unpack(*codec.pack(x))
    assert np.isfinite(y).all()
    return y.astype(np.float64)


def check(name: str, x: np.ndarray) -> None:
    block = FORMATS[name] or x.shape[-1]
    wide = x.astype(np.float64).reshape(-1, block)
    error = np.abs(round_trip(name, x).reshape(-1, block) - wide)
    allowed = bound(name, wide) * (1 + 1e-5)
    worst = np.unravel_index(np.argmax(error - allowed), error.shape)
    assert (error <= allowed).all(), (name, wide[worst[0]], worst[1], error[worst], allowed[worst])


@st.composite
def vectors(draw) -> np.ndarray:
    """Four vectors of one random magnitude each, some with outliers, an offset, or values of all magnitudes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = draw(st.one_of(st.floats(-149, 128), st.sampled_from([-126.0, -24.0, -17.0, 0.0, 9.0, 16.0, 19.0, 128.0])))
    x = rng.standard_normal((4, DIM))
    shape = draw(st.sampled_from(["normal", "ends", "offset", "outliers", "wide", "few"]))
    if shape == "ends":
        x = rng.choice([-1.0, 1.0], x.shape)
    elif shape == "offset":
        x = x * 2.0 ** draw(st.integers(-12, 0)) + rng.choice([-1.0, 1.0], (4, 1))
    elif shape == "outliers":
        x[:, ::24] *= 2.0 ** draw(st.integers(0, 30))
    elif shape == "wide":
        x *= np.exp2(rng.uniform(-60, 0, x.shape))
    elif shape == "few":
        x[rng.random(x.shape) < 0.9] = 0
    x *= 2.0**top / max(np.abs(x).max(), 2.0**-200)
    return np.clip(x, -LARGEST, LARGEST).astype(np.float32)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=120, deadline=None)
@given(x=vectors())
def test_the_stated_bounds_hold_for_every_finite_value(name, x):
    check(name, x)


@pytest.mark.parametrize("name", ROTATED)
@settings(max_examples=60, deadline=None)
@given(x=vectors())
def test_rotated_values_are_finite_and_within_their_bound(name, x):
    kept = np.clip(x, -(2.0**118), 2.0**118).astype(np.float32)
    plain = name.replace(",hadamard", "").replace(":hadamard", "")
    rotated = elements.hadamard(kept, DIM).astype(np.float64)
    bounds = bound(plain, rotated.reshape(-1, FORMATS[plain])).reshape(rotated.shape)
    of_float32 = np.linalg.norm(kept.astype(np.float64), axis=-1, keepdims=True) * DIM * 2.0**-22
    allowed = np.linalg.norm(bounds, axis=-1, keepdims=True) * (1 + 1e-5) + of_float32
    assert (np.abs(round_trip(name, x) - kept) <= allowed).all()


@pytest.mark.parametrize(
    ("name", "sent", "arrives"),
    [
        ("mxfp8", [LARGEST, LARGEST / 2], [448 * 2.0**119, LARGEST / 2]),
        ("mxfp4:even", [3e38, 1.5e38], [6 * 2.0**125, 4 * 2.0**125]),
        ("mxfp4:ceil", [-LARGEST, 0.0], [-6 * 2.0**125, 0.0]),
        ("nvfp4", [1e5, 5e4], [2688.0, 2688.0]),
        ("nvfp4:scale=100", [1e5, -5e4], [1e5, -5e4]),
        ("int4", [1e6, 5e5], [7 * HALF, 7 * HALF]),
        ("int4", [2e-7, -1e-7], [0.0, 0.0]),
        ("int4:asym", [1e5, 1e5], [HALF, HALF]),
        ("int4:asym", [-1e5, -1e5], [-HALF, -HALF]),
        ("int4:asym", [2e6, 0.0], [15 * HALF, 0.0]),
        ("fp8_e4m3:tensor", [1e5, -1e5], [448.0, -448.0]),
    ],
)
def test_what_lies_beyond_a_range_saturates_as_stated(name, sent, arrives):
    x = np.full((1, 64), sent[1], np.float32)
    x[0, 0] = sent[0]
    np.testing.assert_allclose(round_trip(name, x)[0, :2], arrives, rtol=0.07)


def _isas() -> list[str]:
    before, found = kernels.cpu_isa(), []
    for isa in ("portable", "avx2", "avx512"):
        try:
            kernels.choose_cpu_isa(isa)
            found.append(isa)
        except InvalidRequest:
            pass
    kernels.choose_cpu_isa(before)
    return found


@pytest.mark.parametrize("name", [*FORMATS, *ROTATED])
@settings(max_examples=25, deadline=None)
@given(x=vectors(), bad=st.sampled_from([None, np.nan, np.inf, -np.inf]))
def test_kernels_pack_all_magnitudes_as_the_reference_does(name, x, bad):
    if bad is not None:
        x[1, 17] = bad
    layout = CacheLayout.paged(
        layers=["0"], num_blocks=1, block_tokens=2, kv_heads=1, head_dim=DIM, dtype="float32"
    )
    (join,) = formats.join_packed([layout], layout, name)
    plan = join.plan({"full": [0]}, {"full": [0]}, tokens=2)
    (chunk,) = plan.chunks(1 << 30)
    source = [np.ascontiguousarray(x).reshape(-1).view(np.uint8)]
    expected = reference.pack(join, plan, chunk, source, check=False)
    theirs = [np.zeros_like(source[0])]
    reference.unpack(join, plan, chunk, expected, theirs)
    assert np.isfinite(theirs[0].view(np.float32)).all()
    before = kernels.cpu_isa()
    try:
        for isa in _isas():
            kernels.choose_cpu_isa(isa)
            prepared = kernels.PreparedPackedPlan(plan)
            wire, ours = np.zeros(chunk.wire_bytes, np.uint8), np.zeros_like(source[0])
            prepared.pack(chunk, kernels.bases([source[0].ctypes.data]), wire.ctypes.data, check=False)
            assert (wire == expected).all(), isa
            prepared.unpack(chunk, wire.ctypes.data, kernels.bases([ours.ctypes.data]))
            assert (ours == theirs[0]).all(), isa
    finally:
        kernels.choose_cpu_isa(before)
