#include "cuda/convert_choice.h"

#include "cuda/convert_pieces.h"

namespace kvxfer::cuda {
namespace {

bool is_half(const Codec& codec) {
  return codec.element == Element::float16 || codec.element == Element::bfloat16;
}

// Values that share a scale; a vector shorter than a block is one.
std::uint32_t block_of(const Codec& codec, std::uint32_t dim) {
  return codec.scale != Scale::none && codec.block < dim ? codec.block : dim;
}

// The fast conversion between halves and this codec, or `vectors`.
Conversion fast(const Codec& codec, bool encode) {
  if (codec.rotation) return Conversion::vectors;
  if (codec.element == Element::e2m1 && codec.scale == Scale::e4m3 && codec.block == 16) {
    if (encode && codec.rule == Rule::four_over_six) return Conversion::encode_four_over_six;
    return encode ? Conversion::encode_nvfp4 : Conversion::decode_nvfp4;
  }
  if (codec.element == Element::e2m1 && codec.scale == Scale::e8m0) {
    return encode ? Conversion::encode_mxfp4 : Conversion::decode_mxfp4;
  }
  if (codec.element == Element::e4m3) return encode ? Conversion::encode_e4m3 : Conversion::decode_e4m3;
  return Conversion::vectors;
}

// log2 of the pieces of `values` values in a block; false where lanes of a warp cannot share its scale.
bool shift_of(const VectorForm& form, std::uint32_t dim, std::uint32_t values, std::uint32_t& shift) {
  shift = 0;
  if (form.codec.scale == Scale::none) return dim % values == 0;
  const std::uint32_t block = block_of(form.codec, dim);
  if (block % values || dim % block) return false;
  while ((values << shift) < block) ++shift;
  return values << shift == block && shift <= 5;
}

}  // namespace

VectorForm form_of(const Codec& codec, std::uint32_t dim) {
  const auto narrow = [](std::uint64_t bytes) { return static_cast<std::uint32_t>(bytes); };
  return {codec, narrow(code_bytes(codec, dim)), narrow(scale_bytes(codec, dim)), narrow(element_bits(codec.element)),
          narrow(scale_size(codec.scale))};
}

Alignment alignment_in_cache(const ConvertSide& side, bool whole, std::uint32_t heads) {
  std::uint64_t codes = side.codes | side.block_stride, scales = side.scales | side.scale_block_stride;
  if (!whole) {
    codes |= side.entry_stride;
    scales |= side.scale_entry_stride;
  }
  if (heads > 1) {
    codes |= side.head_stride;
    scales |= side.scale_head_stride;
  }
  return {codes & (~codes + 1), scales & (~scales + 1)};
}

Alignment alignment_on_wire(const VectorForm& form) {
  const std::uint64_t codes = form.code_bytes | 16, scales = form.scale_bytes | 16;
  return {codes & (~codes + 1), scales & (~scales + 1)};
}

bool dense_codes(const ConvertSide& side, const VectorForm& form) { return side.head_stride == form.code_bytes; }

bool dense_scales(const ConvertSide& side, const VectorForm& form) {
  return form.scale_bytes == 0 || side.scale_head_stride == form.scale_bytes;
}

bool linear(const ConvertSide& side) { return side.channels <= 1 && side.scale_order == ScaleOrder::linear; }

void choose_conversion(ConvertGroup& group, const ConvertSide* src, const ConvertSide* dst) {
  group.conversion = Conversion::vectors;
  if ((src && !linear(*src)) || (dst && !linear(*dst))) return;
  const bool encode = is_half(group.from.codec) && !is_half(group.to.codec);
  if (!encode && !is_half(group.to.codec)) return;
  const VectorForm& coded = encode ? group.to : group.from;
  const Codec& halves = encode ? group.from.codec : group.to.codec;
  const Conversion found = fast(coded.codec, encode);
  std::uint32_t shift = 0;
  if (!shift_of(coded, group.dim, encode ? kEncodeValues : kDecodeValues, shift)) return;
  // Below, the bound of a small block may have no float16 near it.
  const bool to_nvfp4 = found == Conversion::encode_nvfp4 || found == Conversion::encode_four_over_six;
  if (to_nvfp4 && halves.element == Element::float16 &&
      coded.codec.global_scale < 0.000244140625f) {
    return;
  }
  const auto alignment = [&](const ConvertSide* side, const VectorForm& form) {
    return side ? alignment_in_cache(*side, group.whole, group.heads) : alignment_on_wire(form);
  };
  const Alignment of_src = alignment(src, group.from), of_dst = alignment(dst, group.to);
  // Of `codes` that lie at address 0 the alignment is 0: of every kind.
  const auto divides = [](std::uint64_t wanted, std::uint64_t given) { return given % wanted == 0; };
  const std::uint64_t piece = (encode ? kEncodeValues : kDecodeValues) * coded.bits / 8;
  const Alignment& of_codes = encode ? of_dst : of_src;
  if (!divides(16, encode ? of_src.codes : of_dst.codes) || !divides(piece, of_codes.codes)) return;
  if (coded.scale_size && !divides(coded.scale_size, of_codes.scales)) return;
  group.conversion = found;
  group.block_shift = found == Conversion::vectors ? 0 : shift;
}

}  // namespace kvxfer::cuda
