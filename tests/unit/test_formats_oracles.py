"""The reference against libraries that no one here wrote, element for element."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvxfer.formats import elements, mx, nvfp4

EVERY_BF16 = elements.from_bf16(np.arange(65536, dtype=np.uint16))
EVERY_BF16 = EVERY_BF16[np.isfinite(EVERY_BF16)]


def samples() -> np.ndarray:
    rng = np.random.default_rng(1)
    tie = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    ties = np.concatenate([np.nextafter(tie, np.float32(-9)), tie, np.nextafter(tie, np.float32(9))])
    wide = rng.standard_normal(1 << 18) * np.exp2(rng.integers(-14, 10, 1 << 18))
    return np.concatenate([EVERY_BF16, ties, -ties, wide.astype(np.float32)])


def blocks(low: int = -4, high: int = 8) -> np.ndarray:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4096, 64)) * np.exp2(rng.integers(low, high, (4096, 1)))
    return elements.from_bf16(elements.to_bf16(x.astype(np.float32)))


# --- ml_dtypes: the number types ---


def test_ml_dtypes_rounds_as_we_do():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = samples()
    theirs = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert (elements.to_e2m1(x) == theirs).all()
    theirs = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert (elements.to_bf16(x) == theirs).all()
    # Beyond 448 ml_dtypes gives NaN, we saturate: clamp first.
    theirs = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert (elements.to_e4m3(x) == theirs).all()
    assert np.isnan(np.float32(480).astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_ml_dtypes_decodes_as_we_do():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = np.arange(256, dtype=np.uint8)
    for ours, dtype in ((elements.from_e4m3, "float8_e4m3fn"), (elements.from_e8m0, "float8_e8m0fnu")):
        theirs = codes.view(getattr(ml_dtypes, dtype)).astype(np.float32)
        assert np.array_equal(ours(codes), theirs, equal_nan=True)
    theirs = codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(elements.from_e2m1(codes[:16]), theirs)


# --- torchao: MX and NVFP4 ---


@pytest.fixture(scope="module")
def torchao():
    logging.getLogger("torchao").setLevel(logging.ERROR)
    pytest.importorskip("torch")
    pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    return mx_tensor, nvfp4_tensor, ScaleCalculationMode


@pytest.mark.parametrize(("rule", "mode"), [("floor", "FLOOR"), ("ceil", "RCEIL"), ("even", "EVEN")])
@pytest.mark.parametrize("four", [True, False], ids=["mxfp4", "mxfp8"])
def test_torchao_mx(torchao, rule, mode, four):
    """Their RCEIL is our ceil: the least power of two not below amax / largest. Their CEIL is another rule."""
    import torch

    mx_tensor, _, modes = torchao
    x = blocks()
    dtype = torch.float4_e2m1fn_x2 if four else torch.float8_e4m3fn
    scale, codes = mx_tensor.to_mx(torch.from_numpy(x), dtype, 32, modes[mode])
    ours_codes, ours_scale = (mx.mxfp4(rule) if four else mx.mxfp8(rule)).pack(x)
    assert (scale.view(torch.uint8).numpy() == ours_scale).all()
    assert (codes.view(torch.uint8).numpy() == ours_codes).all()


def test_torchao_nvfp4(torchao):
    import torch

    _, nvfp4_tensor, _ = torchao
    x = blocks()
    scale, codes = nvfp4_tensor.nvfp4_quantize(torch.from_numpy(x), 16)
    ours_codes, ours_scale = nvfp4.PLAIN.pack(x)
    # They keep scales at 2**-6 or above, where E4M3 is normal; we use its subnormals, and zero.
    large = elements.from_e4m3(ours_scale) >= 2.0**-6
    assert large.mean() > 0.9
    assert (scale.view(torch.uint8).numpy() == ours_scale)[large].all()
    equal = (codes.numpy() == ours_codes).reshape(*large.shape, 8).all(axis=-1)
    assert equal[large].all()
    small = blocks(-14, -9)
    theirs, _ = nvfp4_tensor.nvfp4_quantize(torch.from_numpy(small), 16)
    ours = nvfp4.PLAIN.pack(small)[1]
    assert theirs.float().min() == 2.0**-6 and (elements.from_e4m3(ours) < 2.0**-6).any()


def test_torchao_nvfp4_with_a_global_scale(torchao):
    """They take amax / 6 / g and x * ((1 / g) / s), we amax / (6 * g) and x * (1 / (s * g)).

    For a power of two there is no difference; else a few values next to a tie fall on its other side.
    """
    import torch

    _, nvfp4_tensor, _ = torchao
    x = blocks()
    scale, codes = nvfp4_tensor.nvfp4_quantize(torch.from_numpy(x), 16, torch.tensor(0.125))
    ours_codes, ours_scale = nvfp4.Nvfp4(global_scale=0.125).pack(x)
    assert (scale.view(torch.uint8).numpy() == ours_scale).all()
    assert (codes.numpy() == ours_codes).all()
    scale, codes = nvfp4_tensor.nvfp4_quantize(torch.from_numpy(x), 16, torch.tensor(0.3))
    ours_codes, ours_scale = nvfp4.Nvfp4(global_scale=0.3).pack(x)
    assert (scale.view(torch.uint8).numpy() == ours_scale).mean() > 0.999
    assert (codes.numpy() == ours_codes).mean() > 0.99


# --- compressed-tensors: NVFP4 ---


def test_compressed_tensors_rounds_e2m1_as_we_do():
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization.utils import fp4_utils

    x = samples()
    with torch.compiler.set_stance("force_eager"):
        theirs = fp4_utils.cast_to_fp4(torch.from_numpy(x)).numpy()
    assert np.array_equal(theirs, elements.from_e2m1(elements.to_e2m1(x)))


def test_compressed_tensors_nvfp4():
    """Their global scale divides to decode; they divide by the scale, where we multiply by its reciprocal."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn"
    )
    x = blocks()
    groups = torch.from_numpy(x).reshape(-1, 16)
    for their_global in (1.0, 8.0):
        scale, _ = calculate_qparams(
            groups.amin(dim=1), groups.amax(dim=1), args, global_scale=torch.tensor([their_global])
        )
        codec = nvfp4.Nvfp4(global_scale=1 / their_global)
        codes, ours = codec.pack(x)
        assert (scale.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(ours.shape) == ours).all()
        quotient = x.reshape(-1, 16) / (scale.float().numpy() / np.float32(their_global))[:, None]
        rounded = elements.from_e2m1(elements.to_e2m1(quotient)).reshape(x.shape)
        # The nibble order is the same. Codes differ at exact ties alone, which a reciprocal can miss by one
        # bit.
        packed = pack_fp4_to_uint8(torch.from_numpy(rounded)).numpy()
        differ = elements.unpack_nibbles(packed) != elements.unpack_nibbles(codes)
        ties = np.isin(np.abs(quotient), [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]).reshape(x.shape)
        assert ties[differ].all() and differ.mean() < 0.01
        values = unpack_fp4_from_uint8(torch.from_numpy(codes), *x.shape, dtype=torch.float32).numpy()
        assert np.array_equal(values, elements.from_e2m1(elements.unpack_nibbles(codes)))
