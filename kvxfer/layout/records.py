"""The record formats that engines store, as data: which fields, in which sections, and one builder for all.

A *section* is a run of bytes in the page that holds some fields of every entry before the next section
starts. One section is an interleaved record (each entry's fields side by side); several are a segregated one
(all values first, then all scales). Sizes are bytes of one entry and head. Imports layout and errors.

Dtype names say more than the bits: a plane is only ever joined with one of the same dtype name, so scales
that are permuted, packed or in other units carry a name of their own.
"""

from __future__ import annotations

from typing import NamedTuple

from kvxfer.errors import InvalidLayout
from kvxfer.layout.cache_layout import DTYPE_BYTES, Padding, Plane, Record
from kvxfer.layout.typed import integer


class Field(NamedTuple):
    """One quantity of an entry: plane name, dtype name, bytes."""

    name: str
    dtype: str
    nbytes: int


Sections = tuple[tuple[Field, ...], ...]


def paged_record(
    tag: str,
    sections: Sections,
    *,
    entries: int,
    tokens_per_entry: int = 1,
    heads: int = 1,
    order: str = "NHD",
    head_start: int = 0,
    total_heads: int = 0,
    page_multiple: int = 1,
    page_bytes: int = 0,
) -> Record:
    """The record of a page of `entries` entries whose fields lie in `sections`.

    Within a section entries come before heads (NHD) or heads before entries (HND). The page is rounded up to
    `page_multiple` bytes, or to `page_bytes`; what is left over is padding. The geometry is added to `tag`.
    """
    if order not in ("NHD", "HND"):
        raise InvalidLayout(f"order must be 'NHD' or 'HND', got {order!r}")
    entries, heads = integer("entries", entries, least=1), integer("heads", heads, least=1)
    planes = []
    position = 0
    for section in sections:
        content = sum(field.nbytes for field in section)
        entry_stride, head_stride = (heads * content, content) if order == "NHD" else (content, entries * content)
        offset = position
        for field in section:
            planes.append(
                Plane(
                    name=field.name,
                    dtype=field.dtype,
                    offset=offset,
                    entries=entries,
                    entry_stride=entry_stride,
                    heads=heads,
                    head_stride=head_stride if heads > 1 else 0,
                    unit_bytes=field.nbytes,
                    head_start=head_start,
                    total_heads=total_heads,
                    tokens_per_entry=tokens_per_entry,
                )
            )
            offset += field.nbytes
        position += entries * heads * content
    nbytes = max(page_bytes, -(-position // page_multiple) * page_multiple)
    padding = (Padding(name="page", offset=position, nbytes=nbytes - position),) if nbytes > position else ()
    shape = f"{entries}" if heads == 1 and not total_heads else f"{entries}x{heads}.{order.lower()}"
    return Record(tag=f"{tag}/{shape}", nbytes=nbytes, planes=tuple(planes), padding=padding)


def entry_bytes(sections: Sections) -> int:
    """Bytes of one entry and head."""
    return sum(field.nbytes for section in sections for field in section)


# --- keys and values with heads -----------------------------------------------------------------------------

QUANTISED_KV = ("fp8", "fp8_per_token_head", "int8_per_token_head", "nvfp4")


def kv_sections(kv_dtype: str, head_dim: int, *, together: bool) -> Sections:
    """Fields of one token and head. `together`: K and V in one content row, as in vLLM's five-letter layouts.

    `kv_dtype` is a dtype name, or ``fp8`` (per tensor: the scales are model attributes, outside the cache),
    ``fp8_per_token_head`` / ``int8_per_token_head`` (one fp32 after each head's K and V row; vLLM's Triton
    backend), or ``nvfp4`` (within the K and the V part of a page all values, then one e4m3 scale per 16;
    vLLM's FlashInfer backend), which is never one content row.
    """
    if kv_dtype == "nvfp4":
        data, scale = head_dim // 2, head_dim // 16
        return tuple(
            (Field(name, dtype, nbytes),)
            for half in "kv"
            for name, dtype, nbytes in (
                (half, "float4_e2m1fn_x2", data),
                (f"{half}_scale", "float8_e4m3fn", scale),
            )
        )
    if kv_dtype.endswith("_per_token_head"):
        dtype = {"fp8": "float8_e4m3fn", "int8": "int8"}[kv_dtype.removesuffix("_per_token_head")]
        halves = [(Field(n, dtype, head_dim), Field(f"{n}_scale", "float32", 4)) for n in "kv"]
    else:
        dtype = "float8_e4m3fn" if kv_dtype == "fp8" else kv_dtype
        if dtype not in DTYPE_BYTES:
            raise InvalidLayout(f"unknown dtype {dtype!r}; known are {', '.join((*QUANTISED_KV, *DTYPE_BYTES))}")
        halves = [(Field(n, dtype, head_dim * DTYPE_BYTES[dtype]),) for n in "kv"]
    return (halves[0] + halves[1],) if together else (halves[0], halves[1])


def tiled_v_scale_record(
    *,
    block_tokens: int,
    kv_heads: int,
    head_dim: int,
    head_start: int = 0,
    total_heads: int = 0,
    tile_tokens: int = 4,
) -> Record:
    """NVFP4 as TensorRT-LLM's SM100 kernels keep it: HND, and V scales interleaved over tiles of four tokens.

    Scale s of token t of a head lies at ``(t // 4) * 4 * S + s * 4 + t % 4`` with S scales a row, so a tile
    can be moved whole and never cut; an unfinished last tile is moved as it is.
    """
    plain = paged_record(
        "",
        kv_sections("nvfp4", head_dim, together=False),
        entries=block_tokens,
        heads=kv_heads,
        order="HND",
        head_start=head_start,
        total_heads=total_heads,
    )
    scales = head_dim // 16
    last = plain.planes[-1]
    tiles = Plane(
        name=last.name,
        dtype=f"float8_e4m3fn.t{tile_tokens}",
        offset=last.offset,
        entries=block_tokens // tile_tokens,
        entry_stride=tile_tokens * scales,
        heads=kv_heads,
        head_stride=last.head_stride,
        unit_bytes=tile_tokens * scales,
        head_start=head_start,
        total_heads=total_heads,
        tokens_per_entry=tile_tokens,
        tiled=True,
    )
    tag = f"kv.nvfp4.v_scale_t{tile_tokens}/{block_tokens}x{kv_heads}x{head_dim}.hnd"
    return Record(tag=tag, nbytes=plain.nbytes, planes=(*plain.planes[:-1], tiles))


def cpu_attention_record(
    *, block_tokens: int, kv_heads: int, head_dim: int, dtype: str, head_start: int = 0, total_heads: int = 0
) -> Record:
    """vLLM's CPU build: in each (block, head) first K transposed ``[head_dim, token]``, then V ``[token,
    head_dim]``.

    Seen for fp32 and read for bf16 without AMX; AMX packs bf16 otherwise (use an opaque record there).
    """
    size = DTYPE_BYTES[dtype]
    half = block_tokens * head_dim * size
    heads = {"heads": kv_heads, "head_stride": 2 * half, "head_start": head_start, "total_heads": total_heads}
    key = Plane(
        name="k",
        dtype=dtype,
        offset=0,
        entries=block_tokens,
        entry_stride=size,
        unit_bytes=size,
        channels=head_dim,
        channel_stride=block_tokens * size,
        **heads,
    )
    value = Plane(
        name="v",
        dtype=dtype,
        offset=half,
        entries=block_tokens,
        entry_stride=head_dim * size,
        unit_bytes=head_dim * size,
        **heads,
    )
    tag = f"vllm_cpu.{dtype}/{block_tokens}x{kv_heads}x{head_dim}"
    return Record(tag=tag, nbytes=2 * half * kv_heads, planes=(key, value))


# --- latents: one head, alike on every rank -----------------------------------------------------------------

E4M3, E2M1, BF16, F32, UE8M0 = "float8_e4m3fn", "float4_e2m1fn_x2", "bfloat16", "float32", "float8_e8m0fnu"

LATENT: dict[str, Sections] = {
    # DeepSeek-V3: 512 latent channels and 64 of RoPE.
    "mla.bf16": ((Field("latent", BF16, 1024), Field("rope", BF16, 128)),),
    "mla.fp16": ((Field("latent", "float16", 1024), Field("rope", "float16", 128)),),
    "mla.fp32": ((Field("latent", F32, 2048), Field("rope", F32, 256)),),
    "mla.fp8": ((Field("latent", E4M3, 512), Field("rope", E4M3, 64)),),  # per tensor
    # DeepSeek-V3.2 (vLLM flashmla_sparse): scales per 128 channels; per 16 and permuted (s at 8 * (s % 4) + s
    # // 4).
    "v32.fp8_ds_mla.656": ((Field("latent", E4M3, 512), Field("latent_scale", F32, 16), Field("rope", BF16, 128)),),
    "v32.nvfp4_ds_mla.352": (
        (Field("latent", E2M1, 256), Field("rope", E4M3, 64), Field("latent_scale", f"{E4M3}.perm4x8", 32)),
    ),
    # DeepSeek-V4 (vLLM deepseek_v4/common/ops/cache_utils): one scale per 64 channels, seven and a spare
    # byte.
    "v4.fp8_ds_mla.584": (
        (Field("latent", E4M3, 448), Field("rope", BF16, 128)),
        (Field("latent_scale", UE8M0, 8),),
    ),
    # DeepSeek-V4.1: RoPE lies inside the 512 channels. One UE8M0 scale per 32, or one e4m3 scale per 16.
    "v41.fp8_ds_mla.528.segregated": ((Field("latent", E4M3, 512),), (Field("latent_scale", UE8M0, 16),)),
    "v41.fp8_ds_mla.528.interleaved": ((Field("latent", E4M3, 512), Field("latent_scale", UE8M0, 16)),),
    "v41.nvfp4_ds_mla.288.segregated": ((Field("latent", E2M1, 256),), (Field("latent_scale", E4M3, 32),)),
    "v41.nvfp4_ds_mla.288.interleaved": ((Field("latent", E2M1, 256), Field("latent_scale", E4M3, 32)),),
    # Plain rows of FlashInfer on SM100.
    "v4.fp8.512": ((Field("latent", E4M3, 512),),),
    "v4.bf16.1024": ((Field("latent", BF16, 1024),),),
}

INDEXER: dict[str, Sections] = {
    # Segregated in every version: the page's values, then its scales.
    "indexer.fp8.132": ((Field("index_key", E4M3, 128),), (Field("index_scale", F32, 4),)),
    "indexer.fp8_mx.132": ((Field("index_key", E4M3, 128),), (Field("index_scale", f"{UE8M0}.x4", 4),)),
    "indexer.mxfp4.68": ((Field("index_key", E2M1, 64),), (Field("index_scale", UE8M0, 4),)),
}


def latent_record(name: str, *, entries: int, tokens_per_entry: int = 1, page_multiple: int = 1) -> Record:
    """The record called `name` in LATENT or INDEXER; a compressed one has ``.r<ratio>`` in its tag."""
    sections = LATENT.get(name) or INDEXER[name]
    tag = name if tokens_per_entry == 1 else f"{name}.r{tokens_per_entry}"
    return paged_record(tag, sections, entries=entries, tokens_per_entry=tokens_per_entry, page_multiple=page_multiple)


def compressor_state_record(name: str, *, rows: int, row_floats: int, page_multiple: int = 1) -> Record:
    """fp32 rows of an unfinished compressed entry, keys and scores (vLLM deepseek_v4/compressor)."""
    field = Field("pending", f"{F32}.{name}", 4 * row_floats)
    return paged_record(f"state.{name}.{4 * row_floats}", ((field,),), entries=rows, page_multiple=page_multiple)


def gated_delta_record(
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_rows: int,
    dtype: str,
    state_dtype: str,
    tp: int = 1,
    rank: int = 0,
    page_bytes: int = 0,
) -> Record:
    """One request's gated-delta-net state: the convolution's last inputs, then the recurrent matrix.

    Convolution ``[conv_rows, queries | keys | values]`` in `dtype`, recurrent ``[value_heads, key_dim,
    value_dim]`` in `state_dtype` (vLLM mamba_utils.gated_delta_net_state_shape). Ranks hold ranges of heads,
    so each third of the convolution is a plane of its own. Source of the order: vLLM keeps the two states in
    this sequence in a page.
    """
    if key_heads % tp or value_heads % tp:
        raise InvalidLayout(f"{key_heads} key and {value_heads} value heads cannot be divided over {tp} ranks")
    size, state_size = DTYPE_BYTES[dtype], DTYPE_BYTES[state_dtype]
    parts = (
        ("conv_q", key_heads, key_dim),
        ("conv_k", key_heads, key_dim),
        ("conv_v", value_heads, value_dim),
    )
    row = sum(heads // tp * dim * size for _, heads, dim in parts)
    planes, offset = [], 0
    for name, heads, dim in parts:
        local = heads // tp
        planes.append(
            Plane(
                name=name,
                dtype=dtype,
                offset=offset,
                entries=1,
                entry_stride=0,
                heads=local,
                head_stride=dim * size,
                channels=conv_rows,
                channel_stride=row,
                unit_bytes=dim * size,
                head_start=rank * local,
                total_heads=heads,
            )
        )
        offset += local * dim * size
    local = value_heads // tp
    matrix = key_dim * value_dim * state_size
    planes.append(
        Plane(
            name="recurrent",
            dtype=state_dtype,
            offset=row * conv_rows,
            entries=1,
            entry_stride=0,
            heads=local,
            head_stride=matrix,
            unit_bytes=matrix,
            head_start=rank * local,
            total_heads=value_heads,
        )
    )
    used = row * conv_rows + local * matrix
    padding = (Padding(name="page", offset=used, nbytes=page_bytes - used),) if page_bytes > used else ()
    tag = f"gdn.{dtype}.{state_dtype}/{key_heads // tp}+{local}"
    return Record(tag=tag, nbytes=max(used, page_bytes), planes=tuple(planes), padding=padding)
