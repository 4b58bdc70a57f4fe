// Which kernel carries out a row: from what its codecs are and where its bytes lie.
#pragma once

#include "cuda/convert_tables.h"

namespace kvxfer::cuda {

VectorForm form_of(const Codec& codec, std::uint32_t dim);

// What every address of a side's codes, and of its scales, is a multiple of, as the lowest bit that is set.
struct Alignment {
  std::uint64_t codes, scales;
};
Alignment alignment_in_cache(const ConvertSide& side, bool whole, std::uint32_t heads);
Alignment alignment_on_wire(const VectorForm& form);

// Whether vectors of neighbouring heads lie one after the other.
bool dense_codes(const ConvertSide& side, const VectorForm& form);
bool dense_scales(const ConvertSide& side, const VectorForm& form);

bool linear(const ConvertSide& side);

// Fills in `conversion` and `block_shift` for a pair of forms that differ. Both sides are given; a null one is the
// packed buffer.
void choose_conversion(ConvertGroup& group, const ConvertSide* src, const ConvertSide* dst);

}  // namespace kvxfer::cuda
