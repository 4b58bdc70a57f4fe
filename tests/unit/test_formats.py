"""The rules of the wire formats, as the NumPy reference states them: rounding, bounds, what is not finite."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer import formats
from kvxfer.errors import InvalidRequest, NonFiniteValue, UnknownWireFormat
from kvxfer.formats import elements, fp8, int4, mx, nvfp4
from kvxfer.formats.codec import Rule

CODECS = {
    "fp8_e4m3:tensor": fp8.PER_TENSOR,
    "fp8_e4m3": fp8.PER_TOKEN_HEAD,
    "fp8_e4m3:per_128": fp8.PER_128,
    "nvfp4": nvfp4.PLAIN,
    "nvfp4:scale": nvfp4.Nvfp4(global_scale=0.3),
    "nvfp4:four_over_six": nvfp4.Nvfp4(rule=Rule.FOUR_OVER_SIX),
    "mxfp4:floor": mx.mxfp4(),
    "mxfp4:ceil": mx.mxfp4("ceil"),
    "mxfp4:even": mx.mxfp4("even"),
    "mxfp4:hadamard": mx.mxfp4(hadamard=True),
    "mxfp8:ceil": mx.mxfp8(),
    "mxfp8:floor": mx.mxfp8("floor"),
    "mxfp8:even": mx.mxfp8("even"),
    "int4:32": int4.int4(group=32),
    "int4:128": int4.int4(group=128),
    "int4:asym": int4.int4(asymmetric=True, group=32),
    "int4:hadamard": int4.int4(hadamard=True),
    "int4:asym,hadamard": int4.int4(asymmetric=True, hadamard=True),
}


def every_codec(test):
    return pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())(test)


def adversarial(dim: int = 128) -> np.ndarray:
    """Vectors that break careless code; all finite."""
    rng = np.random.default_rng(7)
    normal = rng.standard_normal(dim)
    one_huge = normal.copy()
    one_huge[5] = 1e30
    ties = np.resize([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], dim)
    return np.stack(
        [
            np.zeros(dim),
            -np.zeros(dim),
            np.full(dim, 3.7),
            np.full(dim, -3.7),
            one_huge,
            -one_huge,
            normal * 1e-41,  # denormal
            np.full(dim, 1e-45),
            normal * 1e-38,
            normal * 1e-20,
            normal * 1e20,
            np.where(np.arange(dim) % 2, -1.0, 1.0) * 3e35,
            np.where(np.arange(dim) % 2, -1.0, 1.0) * float(elements.FLOAT32_MAX),
            np.full(dim, float(elements.FLOAT32_MAX)),
            np.clip(normal * 3e38, -3.4e38, 3.4e38),
            np.linspace(-3.4e38, 3.4e38, dim),
            np.where(np.arange(dim) % 16, 5e5, 1e6),
            normal * 1e5,
            normal * 1e-6,
            np.where(np.arange(dim) % 2, -1.0, 1.0),
            np.exp2(np.linspace(-149, 127.99, dim)),
            ties,
            -ties,
            np.nextafter(ties.astype(np.float32), np.float32(0)),
            np.nextafter(ties.astype(np.float32), np.float32(9)),
            np.resize([1, 0, 0, 0, 0, 0, 0, -2], dim),
            np.resize([7.99, 4.0, 3.99, 6.01], dim),
            np.arange(dim),
            normal + 1000,
        ]
    ).astype(np.float32)


def vectors(dim: int = 128, count: int = 500) -> np.ndarray:
    """Random vectors of unlike scales with outliers, then the adversarial ones."""
    rng = np.random.default_rng(3)
    x = rng.standard_normal((count, dim)) * np.exp2(rng.integers(-20, 20, (count, 1)))
    x[:, 3] *= 12
    return np.concatenate([x.astype(np.float32), adversarial(dim)])


# --- elements ---


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0.25, 0),
        (0.75, 2),
        (1.25, 2),
        (1.75, 4),
        (2.5, 4),
        (3.5, 6),
        (5.0, 6),
        (6.0, 7),
        (99.0, 7),
        (0.26, 1),
    ],
)
def test_e2m1_ties_go_to_the_even_code_and_large_values_saturate(x, code):
    assert elements.to_e2m1(np.float32([x, -x])).tolist() == [code, code | 8]


@pytest.mark.parametrize(
    ("x", "code"),
    [(448, 0x7E), (464, 0x7E), (1e9, 0x7E), (2**-9, 1), (2**-10, 0), (3 * 2**-10, 2), (1.0, 0x38)],
)
def test_e4m3_saturates_at_448_and_keeps_subnormals(x, code):
    assert elements.to_e4m3(np.float32([x, -x])).tolist() == [code, code | 0x80]


def test_codes_survive_decoding_and_encoding():
    e2m1, e4m3 = np.arange(16, dtype=np.uint8), np.arange(256, dtype=np.uint8)
    numbers = (e4m3 & 127) != 127
    assert (elements.to_e2m1(elements.from_e2m1(e2m1)) == e2m1).all()
    assert (elements.to_e4m3(elements.from_e4m3(e4m3[numbers])) == e4m3[numbers]).all()
    assert np.isnan(elements.from_e4m3(e4m3[~numbers])).all()
    halves = np.arange(65536, dtype=np.uint16)
    for to, back in ((elements.to_bf16, elements.from_bf16), (elements.to_fp16, elements.from_fp16)):
        values = back(halves)
        keep = ~np.isnan(values)
        assert (to(values[keep]) == halves[keep]).all()


@pytest.mark.parametrize(
    ("rule", "amax", "exponent"),
    [
        ("floor", 7.99, 0),
        ("floor", 8.0, 1),
        ("ceil", 6.0, 0),
        ("ceil", 6.001, 1),
        ("even", 6.99, 0),
        ("even", 7.0, 1),
        ("floor", 0.0, -127),
        ("ceil", 0.0, -127),
        ("floor", 3.4e38, 125),
        ("ceil", 3.4e38, 125),  # not 126, where the largest code would be beyond float32
        ("even", 3.4e38, 125),
    ],
)
def test_e8m0_scale_rules(rule, amax, exponent):
    code = elements.e8m0_scale(np.float32([amax]), rule=rule, largest=6.0, emax=2, mantissa_bits=1)
    assert code.tolist() == [exponent + 127]


def test_nibble_order():
    assert elements.pack_nibbles(np.uint8([[1, 2, 3, 4]])).tolist() == [[0x21, 0x43]]


@pytest.mark.parametrize("size", [16, 64, 128])
def test_hadamard_is_its_own_inverse_and_keeps_energy(size):
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    y = elements.hadamard(x, size)
    np.testing.assert_allclose(elements.hadamard(y, size), x, atol=2e-6)
    np.testing.assert_allclose(np.square(y).sum(), np.square(x).sum(), rtol=1e-5)


# --- codecs ---


@every_codec
@pytest.mark.parametrize("dim", [128, 64, 80, 16, 576])
def test_sizes_and_error_bound(codec, dim):
    x = vectors(dim, 100)
    codes, scales = codec.pack(x)
    assert codes.shape == (len(x), codec.code_bytes(dim)) and codes.dtype == np.uint8
    assert scales.shape == (len(x), codec.scale_bytes(dim)) and scales.dtype == np.uint8
    y = codec.unpack(codes, scales)
    assert y.shape == x.shape and y.dtype == np.float32 and np.isfinite(y).all()
    error = np.abs(y.astype(np.float64) - x)
    bound = codec.error_bound(x)
    worst = np.unravel_index(np.argmax(error - bound), error.shape)
    assert (error <= bound).all(), (worst, x[worst], y[worst], bound[worst])


@every_codec
def test_packing_what_was_unpacked_changes_nothing_more_than_the_bound(codec):
    x = vectors()
    y = codec.unpack(*codec.pack(x))
    assert (np.abs(codec.unpack(*codec.pack(y)) - y) <= codec.error_bound(y)).all()


@every_codec
def test_zeros_stay_zero(codec):
    x = np.zeros((2, 128), np.float32)
    assert (codec.unpack(*codec.pack(x)) == 0).all()


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_an_error_or_saturates(codec, bad):
    x = vectors(128, 4)
    x[1, 20] = bad
    with pytest.raises(NonFiniteValue, match=r"index 148.*wire='raw'"):
        codec.pack(x)
    codes, scales = codec.pack(x, check=False)
    y = codec.unpack(codes, scales)
    assert np.isfinite(y).all()
    others = np.delete(np.arange(len(x)), 1)
    assert (y[others] == codec.unpack(*codec.pack(x[others]))).all()
    largest = np.float32(-elements.FLOAT32_MAX if bad == -np.inf else elements.FLOAT32_MAX)
    x[1, 20] = largest
    for ours, theirs in zip(codec.pack(x), (codes, scales), strict=True):
        assert (ours == theirs).all()


def test_four_over_six_is_never_worse_and_its_decoder_is_the_same():
    x = np.random.default_rng(0).standard_normal((500, 128)).astype(np.float32)
    plain, tried = nvfp4.PLAIN, nvfp4.Nvfp4(rule=Rule.FOUR_OVER_SIX)
    assert plain.stored == tried.stored
    errors = [
        np.square(c.unpack(*c.pack(x)).astype(np.float64) - x).reshape(-1, 16).sum(axis=1) for c in (plain, tried)
    ]
    assert (errors[1] <= errors[0] * (1 + 1e-6)).all() and errors[1].sum() < 0.9 * errors[0].sum()


def sqnr(codec, x) -> float:
    y = codec.unpack(*codec.pack(x))
    return 10 * np.log10(np.square(x.astype(np.float64)).sum() / np.square(y.astype(np.float64) - x).sum())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp8_e4m3:tensor", 31.5),
        ("fp8_e4m3", 31.8),
        ("mxfp8:ceil", 31.5),
        ("nvfp4", 20.4),
        ("nvfp4:four_over_six", 21.2),
        ("mxfp4:floor", 18.8),
        ("mxfp4:even", 19.0),
        ("mxfp4:hadamard", 18.8),
        ("int4:32", 20.3),
        ("int4:asym", 22.1),
    ],
)
def test_error_on_gaussian_values(name, expected):
    x = np.random.default_rng(0).standard_normal((4096, 128)).astype(np.float32)
    x = elements.from_bf16(elements.to_bf16(x))
    assert sqnr(CODECS[name], x) == pytest.approx(expected, abs=0.1)


def test_rotation_rescues_wide_groups_from_outliers():
    x = np.random.default_rng(0).standard_normal((512, 128)).astype(np.float32)
    x[:, :4] *= 12
    for plain, rotated in (("mxfp4:floor", "mxfp4:hadamard"), ("int4:32", "int4:hadamard")):
        assert sqnr(CODECS[rotated], x) > sqnr(CODECS[plain], x) + 0.5


def test_nan_on_the_wire_stays_nan():
    codes, scales = mx.mxfp8().pack(np.ones((1, 64), np.float32))
    scales[0, 1] = 255
    codes[0, 0] = 0x7F
    y = mx.mxfp8().unpack(codes, scales)
    assert np.isnan(y[0, 0]) and np.isnan(y[0, 32:]).all() and (y[0, 1:32] == 1).all()


def test_a_global_scale_must_be_usable():
    with pytest.raises(InvalidRequest, match="global scale"):
        nvfp4.Nvfp4(global_scale=0.0)


# --- names ---


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("raw", "raw"),
        ("nvfp4", "nvfp4"),
        ("fp8_e4m3:token_head", "fp8_e4m3"),
        ("fp8_e4m3:scale=0.25,tensor", "fp8_e4m3:tensor,scale=0.25"),
        ("mxfp4: hadamard, ceil", "mxfp4:ceil,hadamard"),
        ("int4:asym,64,first=4,last=128", "int4:asym,first=4,last=128"),
        ("mixed:four_over_six", "mixed:four_over_six"),
        ("mla:rope=fp8,scale=2", "mla:scale=2.0,rope=fp8"),
    ],
)
def test_names(name, canonical):
    wire = formats.parse(name)
    assert str(wire) == canonical and formats.parse(canonical) == wire and formats.parse(wire) is wire


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fp5", "known are raw, fp8_e4m3, nvfp4, mxfp4, mxfp8, int4, mixed, mla"),
        ("nvfp4:fast", "known are four_over_six, scale=N, first=N, last=N"),
        ("int4:32,64", "one of"),
        ("nvfp4:scale=x", "not a number"),
        ("nvfp4:first=-1", "not a number"),
        ("nvfp4:first=1,first=2", "twice"),
        ("raw:first=4", "no option"),
        ("n" * 200, "no wire format"),
        (4, "string"),
    ],
)
def test_unknown_names_say_what_is_known(name, message):
    with pytest.raises(UnknownWireFormat, match=message):
        formats.parse(name)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("raw", 16),
        ("fp8_e4m3:tensor", 8),
        ("fp8_e4m3", 8.25),
        ("mxfp8", 8.25),
        ("nvfp4", 4.5),
        ("mxfp4", 4.25),
        ("int4:32", 4.5),
        ("int4:asym,64", 4.5),
        ("int4:asym,32", 5.0),
    ],
)
def test_bits_a_value(name, bits):
    wire = formats.parse(name)
    assert wire.packed_bytes(163_840, dim=128) * 8 / 163_840 == bits


def test_mixed_and_mla_sizes():
    mixed = formats.parse("mixed")
    assert (mixed.packed_bytes(128, plane="k") + mixed.packed_bytes(128, plane="v")) * 8 / 256 == 6.375
    for name, expected in (("mla:rope=fp8", 352), ("mla", 416)):
        mla = formats.parse(name)
        latent = mla.packed_bytes(512, dim=512, plane="latent")
        assert latent + mla.packed_bytes(64, dim=64, plane="rope") == expected
    with pytest.raises(InvalidRequest, match="no whole number"):
        mixed.packed_bytes(100)
