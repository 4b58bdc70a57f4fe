#include "cpu/requests.h"

#include <algorithm>
#include <cstring>

#include "cpu/block_ids.h"

namespace kvxfer::cpu {
namespace {

using std::int32_t;
using std::int64_t;
using std::size_t;
using std::uint8_t;

// Reads the few kinds of msgpack values that a record consists of. Every read says whether it succeeded.
class Reader {
 public:
  Reader(const uint8_t* data, size_t nbytes) : at_(data), end_(data + nbytes) {}

  bool array_of_two() { return byte() == 0x92; }
  bool unsigned_integer() {
    const int kind = byte();
    if (kind >= 0 && kind < 0x80) return true;
    return kind >= 0xCC && kind <= 0xCF && skip(size_t{1} << (kind - 0xCC));
  }
  bool map(size_t& entries) {
    const int kind = byte();
    if (kind >= 0x80 && kind < 0x90) return entries = static_cast<size_t>(kind & 0x0F), true;
    return kind == 0xDE && length(2, entries);
  }
  bool text(const uint8_t*& start, size_t& nbytes) {
    const int kind = byte();
    if (kind >= 0xA0 && kind < 0xC0) return bytes_of(static_cast<size_t>(kind & 0x1F), start, nbytes);
    return counted(kind - 0xD9, start, nbytes);
  }
  bool binary(const uint8_t*& start, size_t& nbytes) { return counted(byte() - 0xC4, start, nbytes); }
  bool at_end() const { return at_ == end_; }

 private:
  int byte() { return at_ == end_ ? -1 : *at_++; }
  bool skip(size_t nbytes) {
    if (static_cast<size_t>(end_ - at_) < nbytes) return false;
    at_ += nbytes;
    return true;
  }
  bool length(size_t width, size_t& value) {  // big endian
    value = 0;
    for (size_t i = 0; i < width; ++i) {
      const int next = byte();
      if (next < 0) return false;
      value = value << 8 | static_cast<size_t>(next);
    }
    return true;
  }
  bool bytes_of(size_t count, const uint8_t*& start, size_t& nbytes) {
    start = at_;
    nbytes = count;
    return skip(count);
  }
  // The length takes 1, 2 or 4 bytes.
  bool counted(int size, const uint8_t*& start, size_t& nbytes) {
    size_t count = 0;
    return size >= 0 && size <= 2 && length(size_t{1} << size, count) && bytes_of(count, start, nbytes);
  }

  const uint8_t* at_;
  const uint8_t* end_;
};

struct Given {
  const uint8_t* name;
  size_t name_bytes;
  const uint8_t* ids;
  size_t id_bytes;

  bool is(const std::string& wanted) const {
    return name_bytes == wanted.size() && std::memcmp(name, wanted.data(), name_bytes) == 0;
  }
};

int64_t ceil_div(int64_t value, int64_t by) { return value / by + (value % by != 0); }

}  // namespace

int64_t Group::blocks_for(int64_t tokens) const {
  return kind == GroupKind::ring || kind == GroupKind::state ? 1 : ceil_div(tokens, block_tokens);
}

int64_t Group::first_needed_token(int64_t tokens) const {
  return kind == GroupKind::sliding ? std::max<int64_t>(0, tokens - window) : 0;
}

bool Group::needed(int64_t tokens) const {
  return tokens > 0 && !(compression_ratio && tokens % compression_ratio == 0);
}

void BlockLists::add(const int32_t* ids, int64_t count) {
  ids_.insert(ids_.end(), ids, ids + count);
  ends_.push_back(static_cast<int64_t>(ids_.size()));
}

int32_t* BlockLists::add(int64_t count) {
  ids_.resize(ids_.size() + static_cast<size_t>(count));
  ends_.push_back(static_cast<int64_t>(ids_.size()));
  return ids_.data() + ids_.size() - count;
}

void BlockLists::drop_front(size_t group, int64_t count) {
  const auto first = ids_.begin() + begin(group);
  ids_.erase(first, first + count);
  ends_[group] -= count;
}

bool Groups::check_last(BlockLists& lists, size_t index, int64_t tokens, bool destination) const {
  const Group& group = groups[index];
  const int64_t needed = group.blocks_for(tokens);
  if (lists.count(index) > needed) return false;
  if (lists.count(index) > group.tail_blocks) lists.drop_front(index, lists.count(index) - group.tail_blocks);
  const int64_t count = lists.count(index);
  if (!destination && (count || group.needed(tokens))) {
    const int64_t first = group.block_tokens ? group.first_needed_token(tokens) / group.block_tokens : 0;
    if (count < (group.kind == GroupKind::sliding ? needed - first : needed)) return false;
  }
  int64_t where = 0;
  return check_block_ids(lists.ids(index), count, group.num_blocks, destination, where) == IdProblem::none;
}

bool Groups::check_together(const BlockLists& lists) const {
  if (overlays == Overlays::none || groups.size() < 2) return true;
  if (overlays == Overlays::others) return false;
  int64_t limit = 0, where = 0;
  for (const Group& group : groups) limit = std::max(limit, group.num_blocks);
  const auto count = static_cast<int64_t>(lists.all().size());
  return check_block_ids(lists.all().data(), count, limit, true, where) == IdProblem::none;
}

SharedLists Groups::read_record(const uint8_t* data, size_t nbytes, int64_t tokens) const {
  Reader reader(data, nbytes);
  size_t entries = 0;
  if (!reader.array_of_two() || !reader.unsigned_integer() || !reader.map(entries) || entries != groups.size()) {
    return nullptr;
  }
  std::vector<Given> given(entries);
  for (Given& list : given) {
    if (!reader.text(list.name, list.name_bytes) || !reader.binary(list.ids, list.id_bytes)) return nullptr;
    if (list.id_bytes % sizeof(int32_t)) return nullptr;
  }
  if (!reader.at_end()) return nullptr;
  auto lists = std::make_shared<BlockLists>(entries);
  for (size_t g = 0; g < entries; ++g) {
    const auto found = std::find_if(given.begin(), given.end(), [&](const Given& list) { return list.is(groups[g].name); });
    if (found == given.end()) return nullptr;
    int32_t* ids = lists->add(static_cast<int64_t>(found->id_bytes / sizeof(int32_t)));
    if (found->id_bytes) std::memcpy(ids, found->ids, found->id_bytes);
    if (!check_last(*lists, g, tokens, false)) return nullptr;
  }
  return lists;
}

std::unique_ptr<Request> Pairing::pair(SharedLists src, SharedLists dst, int64_t tokens) const {
  auto request = std::make_unique<Request>();
  for (size_t p = 0; p < parts_.size(); ++p) {
    PairedPart paired{static_cast<int64_t>(p), 0, nullptr, nullptr};
    if (!pair_part(parts_[p], *src, *dst, tokens, paired)) return nullptr;
    if (!paired.count) continue;
    request->parts_.push_back(paired);
    request->nbytes_ += paired.count * parts_[p].nbytes;
    request->copies_ += paired.count * static_cast<int64_t>(parts_[p].rows.size());
  }
  request->table_ = {request->parts_.data(), static_cast<int64_t>(request->parts_.size())};
  request->pairing_ = shared_from_this();
  request->src_ = std::move(src);
  request->dst_ = std::move(dst);
  return request;
}

// The whole-block case of plan/segments.py.
bool Pairing::pair_part(const Part& part, const BlockLists& src, const BlockLists& dst, int64_t tokens,
                        PairedPart& paired) const {
  const Group &src_group = src_->groups[part.src_group], &dst_group = dst_->groups[part.dst_group];
  const int64_t given = src.count(part.src_group), wanted = dst.count(part.dst_group);
  if (!wanted || (!given && !src_group.needed(tokens))) return true;
  if (dst_group.kind == GroupKind::full || dst_group.kind == GroupKind::sliding) {
    const int64_t src_first = std::max<int64_t>(0, src_group.blocks_for(tokens) - given) * src_group.block_tokens;
    const int64_t start = std::max<int64_t>(0, dst_group.blocks_for(tokens) - wanted) * dst_group.block_tokens;
    if (src_first > std::max(start, dst_group.first_needed_token(tokens))) return false;
  } else if (given != wanted) {
    return false;
  }
  paired.count = std::min(given, wanted);
  paired.src_block = src.ids(part.src_group) + (given - paired.count);
  paired.dst_block = dst.ids(part.dst_group) + (wanted - paired.count);
  return true;
}

int64_t Request::copy(const std::uint64_t* src_bases, const std::uint64_t* dst_bases, int64_t max_bytes, int threads) {
  int64_t copied = 0;
  while (next_part_ < parts_.size()) {
    const PairedPart& paired = parts_[next_part_];
    const Pairing::Part& part = pairing_->parts()[static_cast<size_t>(paired.part)];
    const int64_t room = (max_bytes - copied) / part.nbytes;
    if (copied && room < 1) break;
    const int64_t count = std::min(paired.count - next_pair_, std::max<int64_t>(1, room));
    const Segments segments{paired.src_block, paired.dst_block, nullptr, nullptr, nullptr, nullptr, part.nbytes};
    cpu::copy({part.rows.data(), static_cast<int64_t>(part.rows.size()), segments, next_pair_, count}, src_bases,
              dst_bases, threads);
    copied += count * part.nbytes;
    next_pair_ += count;
    if (next_pair_ == paired.count) {
      ++next_part_;
      next_pair_ = 0;
    }
  }
  return copied;
}

}  // namespace kvxfer::cpu
