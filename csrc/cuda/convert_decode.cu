#include "cuda/convert.h"
#include "cuda/convert_kernels.cuh"

namespace kvxfer::cuda {
namespace {

template <Conversion C>
const void* kernel_to(Element element) {
  return element == Element::bfloat16 ? reinterpret_cast<const void*>(&decode_pieces<C, Element::bfloat16>)
                                      : reinterpret_cast<const void*>(&decode_pieces<C, Element::float16>);
}

}  // namespace

const void* decode_kernel(const ConvertGroup& group) {
  const Element element = group.to.codec.element;
  if (group.conversion == Conversion::decode_nvfp4) return kernel_to<Conversion::decode_nvfp4>(element);
  if (group.conversion == Conversion::decode_mxfp4) return kernel_to<Conversion::decode_mxfp4>(element);
  return kernel_to<Conversion::decode_e4m3>(element);
}

const void* copy_kernel(const ConvertGroup& group) {
  switch (group.vector_bytes) {
    case 16:
      return reinterpret_cast<const void*>(&copy_pieces<uint4>);
    case 8:
      return reinterpret_cast<const void*>(&copy_pieces<uint2>);
    case 4:
      return reinterpret_cast<const void*>(&copy_pieces<std::uint32_t>);
    case 2:
      return reinterpret_cast<const void*>(&copy_pieces<std::uint16_t>);
    default:
      return reinterpret_cast<const void*>(&copy_pieces<Byte>);
  }
}

}  // namespace kvxfer::cuda
