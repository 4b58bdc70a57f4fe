#include "cuda/convert.h"
#include "cuda/convert_kernels.cuh"

namespace kvxfer::cuda {
namespace {

template <Conversion C>
const void* kernel_from(Element element) {
  return element == Element::bfloat16 ? reinterpret_cast<const void*>(&encode_pieces<C, Element::bfloat16>)
                                      : reinterpret_cast<const void*>(&encode_pieces<C, Element::float16>);
}

}  // namespace

const void* encode_kernel(const ConvertGroup& group) {
  const Element element = group.from.codec.element;
  if (group.conversion == Conversion::encode_nvfp4) return kernel_from<Conversion::encode_nvfp4>(element);
  if (group.conversion == Conversion::encode_four_over_six) {
    return kernel_from<Conversion::encode_four_over_six>(element);
  }
  if (group.conversion == Conversion::encode_mxfp4) return kernel_from<Conversion::encode_mxfp4>(element);
  return kernel_from<Conversion::encode_e4m3>(element);
}

}  // namespace kvxfer::cuda
