#include "cuda/convert_walk.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/convert_pieces.h"
#include "cuda/convert_vector.h"

namespace kvxfer::cuda {
namespace {

constexpr uint32_t kWarp = 32;

struct HostTeam {
  template <class Phase>
  void each(const Phase& phase) const {
    for (uint32_t lane = 0; lane < kWarp; ++lane) phase(lane);
  }
};

class Walk {
 public:
  Walk(const PreparedPackedPart& part, const ConvertGroup& group, const ConvertCall& call, int sms)
      : columns_(part.columns()),
        group_(group),
        geometry_(convert_geometry(part, group, call, call.first, call.count, sms)) {}

  void all() {
    for (uint32_t warp = 0; warp < geometry_.blocks * geometry_.threads / kWarp; ++warp) {
      const ItemRange range = items_of_warp(geometry_.work, warp);
      for (uint32_t begin = range.begin; begin < range.end; begin += kConvertBatch) {
        batch(begin, std::min(kConvertBatch, range.end - begin));
      }
    }
  }

  std::int64_t misaligned = 0;
  uint32_t nonfinite = 0;

 private:
  template <class T>
  T load(std::uint64_t address) {
    T value;
    misaligned += address % sizeof value != 0;
    std::memcpy(&value, reinterpret_cast<const void*>(address), sizeof value);
    return value;
  }

  template <class T>
  void store(std::uint64_t address, T value) {
    misaligned += address % sizeof value != 0;
    std::memcpy(reinterpret_cast<void*>(address), &value, sizeof value);
  }

  void batch(uint32_t begin, uint32_t count) {
    std::vector<ConvertItem> items;
    for (uint32_t i = 0; i < count; ++i) {
      const ConvertItem item = convert_item_at(columns_, group_, geometry_.work, begin + i);
      if (!item.void_item) items.push_back(item);
    }
    const uint32_t pieces = static_cast<uint32_t>(items.size()) * group_.pieces;
    for (uint32_t from = 0; from < pieces; from += kWarp) {
      const uint32_t lanes = std::min(kWarp, pieces - from);
      switch (group_.conversion) {
        case Conversion::copy:
          for (uint32_t lane = 0; lane < lanes; ++lane) copy(items, from + lane);
          break;
        case Conversion::encode_nvfp4:
        case Conversion::encode_four_over_six:
        case Conversion::encode_mxfp4:
        case Conversion::encode_e4m3:
          if (group_.from.codec.element == Element::bfloat16) {
            encode<Element::bfloat16>(items, from, lanes);
          } else {
            encode<Element::float16>(items, from, lanes);
          }
          break;
        case Conversion::vectors:
          for (uint32_t lane = 0; lane < lanes; ++lane) vector(items[from + lane]);
          break;
        default:
          for (uint32_t lane = 0; lane < lanes; ++lane) {
            if (group_.to.codec.element == Element::bfloat16) {
              decode<Element::bfloat16>(items, from + lane);
            } else {
              decode<Element::float16>(items, from + lane);
            }
          }
      }
    }
  }

  void copy(const std::vector<ConvertItem>& items, uint32_t index) {
    const Place place = place_of(geometry_.work.vectors_per_tile, index, group_.vector_bytes);
    const ConvertItem& item = items[place.item];
    if (place.offset >= item.bytes) return;
    const std::uint64_t src = item.src + place.offset, dst = item.dst + place.offset;
    misaligned += src % group_.vector_bytes != 0 || dst % group_.vector_bytes != 0;
    std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), group_.vector_bytes);
  }

  template <Element S>
  void encode(const std::vector<ConvertItem>& items, uint32_t from, uint32_t lanes) {
    uint32_t words[kWarp][8], peaks[kWarp] = {};
    Place places[kWarp];
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      places[lane] = place_of(geometry_.work.vectors_per_tile, from + lane, 1);
      const std::uint64_t src = items[places[lane].item].src + places[lane].offset * 32;
      misaligned += src % 16 != 0;
      std::memcpy(words[lane], reinterpret_cast<const void*>(src), 32);
      peaks[lane] = peak_of<S>(words[lane]);
      nonfinite += !finite_peak<S>(peaks[lane]);
    }
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      const uint32_t sharing = 1u << group_.block_shift, first = lane / sharing * sharing;
      const uint32_t peak = *std::max_element(peaks + first, peaks + first + sharing);
      put<S>(items[places[lane].item], places[lane].offset, peak, words[lane]);
    }
  }

  template <Element S>
  void put(const ConvertItem& item, uint32_t piece, uint32_t peak, const uint32_t (&words)[8]) {
    const bool finite = finite_peak<S>(peak), first = piece % (1u << group_.block_shift) == 0;
    const float value = peak_value<S>(peak);
    const Codec& codec = group_.to.codec;
    const std::uint64_t scales = item.dst_scales + (piece >> group_.block_shift) * group_.to.scale_size;
    if (group_.conversion == Conversion::encode_e4m3) {
      const WideScale scale = e4m3_scale(value, codec);
      misaligned += (item.dst + piece * 16) % 16 != 0;
      for (uint32_t i = 0; i < 4; ++i) {
        store(item.dst + piece * 16 + 4 * i, four_e4m3<S>(words + 2 * i, scale.factor, finite));
      }
      if (first && group_.to.scale_size == 4) store(scales, scale.stored);
      if (first && group_.to.scale_size == 1) store(scales, static_cast<std::uint8_t>(scale.stored));
      return;
    }
    BlockScale scale{};
    uint32_t codes[2];
    if (group_.conversion == Conversion::encode_nvfp4 || group_.conversion == Conversion::encode_four_over_six) {
      scale.code = nvfp4_scale(value, codec.global_scale);
      const ScaleEntry entry = scale_entry<S>(scale.code, codec.global_scale);
      scale.factor = entry.factor;
      scale.bound = entry.bound;
    } else {
      scale = mxfp4_scale<S>(value, codec.rule);
    }
    sixteen_e2m1<S>(words, scale.factor, scale.bound, finite, codes);
    if (group_.conversion == Conversion::encode_four_over_six) {
      const uint32_t other = nvfp4_scale_of_four(value, codec.global_scale);
      const ScaleEntry entry = scale_entry<S>(other, codec.global_scale);
      uint32_t other_codes[2];
      sixteen_e2m1<S>(words, entry.factor, entry.bound, finite, other_codes);
      const float step = from_e4m3(scale.code) * codec.global_scale;
      const float other_step = from_e4m3(other) * codec.global_scale;
      if (squared_error<S>(words, other_codes, other_step, finite) < squared_error<S>(words, codes, step, finite)) {
        scale.code = other;
        std::memcpy(codes, other_codes, sizeof codes);
      }
    }
    misaligned += (item.dst + piece * 8) % 8 != 0;
    for (uint32_t i = 0; i < 2; ++i) store(item.dst + piece * 8 + 4 * i, codes[i]);
    if (first) store(scales, static_cast<std::uint8_t>(scale.code));
  }

  template <Element D>
  void decode(const std::vector<ConvertItem>& items, uint32_t index) {
    const Place place = place_of(geometry_.work.vectors_per_tile, index, 1);
    const ConvertItem& item = items[place.item];
    const std::uint64_t scale = item.src_scales + (place.offset >> group_.block_shift) * group_.from.scale_size;
    const Codec& codec = group_.from.codec;
    float step = codec.global_scale;
    if (codec.scale == Scale::float32) step = float_of(load<uint32_t>(scale));
    if (codec.scale == Scale::e8m0) step = from_e8m0<uint32_t>(load<std::uint8_t>(scale));
    if (codec.scale == Scale::e4m3) step = from_e4m3<uint32_t>(load<std::uint8_t>(scale)) * codec.global_scale;
    uint32_t words[4];
    if (group_.conversion == Conversion::decode_e4m3) {
      misaligned += (item.src + place.offset * 8) % 8 != 0;
      const uint32_t codes[2] = {load<uint32_t>(item.src + place.offset * 8),
                                 load<uint32_t>(item.src + place.offset * 8 + 4)};
      eight_from_e4m3<D>(codes, step, words);
    } else {
      eight_from_e2m1<D>(load<uint32_t>(item.src + place.offset * 4), step, words);
    }
    const std::uint64_t dst = item.dst + place.offset * 16;
    misaligned += dst % 16 != 0;
    std::memcpy(reinterpret_cast<void*>(dst), words, 16);
  }

  void vector(const ConvertItem& item) {
    scratch_.resize(group_.scratch_bytes / 16 + 1);
    const ConvertRow& row = group_.rows[item.row];
    const Direction direction = geometry_.work.direction;
    const VectorPlace src{item.src, item.src_scales, direction == Direction::scatter ? nullptr : &row.src,
                          item.src_entry};
    const VectorPlace dst{item.dst, item.dst_scales, direction == Direction::gather ? nullptr : &row.dst,
                          item.dst_entry};
    const VectorScratch scratch =
        VectorScratch::at(reinterpret_cast<std::uint8_t*>(scratch_.data()), group_.scratch_bytes ? group_.dim : 0);
    nonfinite += convert_vector(HostTeam{}, group_, src, dst, scratch);
  }

  struct alignas(16) Sixteen {
    std::uint8_t bytes[16];
  };

  const ConvertColumns columns_;
  const ConvertGroup& group_;
  const ConvertGeometry geometry_;
  std::vector<Sixteen> scratch_;
};

}  // namespace

std::int64_t walk_conversions(const PreparedPackedPart& part, const ConvertCall& call, int sms) {
  std::int64_t misaligned = 0;
  for (const ConvertGroup& group : part.groups(call.direction)) {
    Walk walk(part, group, call, sms);
    walk.all();
    misaligned += walk.misaligned;
    if (call.nonfinite) *reinterpret_cast<uint32_t*>(call.nonfinite) += walk.nonfinite;
  }
  return misaligned;
}

}  // namespace kvxfer::cuda
