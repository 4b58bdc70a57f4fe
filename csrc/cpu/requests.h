// Block lists of a request, checked and paired without Python: what whole-block transfers need between a ticket and
// their first byte. kvxfer/plan/ says the same for every kind of transfer, and what is wrong with lists that are refused
// here; kvxfer/plan/request.py is the door.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpu/move.h"
#include "plan.h"

namespace kvxfer::cpu {

enum class GroupKind : int { full, sliding, ring, state };

// A group as layout.Group has it.
struct Group {
  std::string name;
  GroupKind kind;
  std::int64_t block_tokens, num_blocks, window, tail_blocks, compression_ratio;

  std::int64_t blocks_for(std::int64_t tokens) const;
  std::int64_t first_needed_token(std::int64_t tokens) const;
  bool needed(std::int64_t tokens) const;
};

// Which bytes groups share: none; those of blocks with the same id; or others, which only Python looks into.
enum class Overlays : int { none, same_ids, others };

// Ids of every group of a layout, in the layout's order. Immutable once filled.
class BlockLists {
 public:
  explicit BlockLists(std::size_t groups) { ends_.reserve(groups); }

  void add(const std::int32_t* ids, std::int64_t count);
  // Room for a list, to be filled before the next one is added.
  std::int32_t* add(std::int64_t count);

  std::size_t groups() const { return ends_.size(); }
  std::int64_t count(std::size_t group) const { return ends_[group] - begin(group); }
  const std::int32_t* ids(std::size_t group) const { return ids_.data() + begin(group); }
  const std::vector<std::int32_t>& all() const { return ids_; }
  void drop_front(std::size_t group, std::int64_t count);  // of the list that was added last

 private:
  std::int64_t begin(std::size_t group) const { return group ? ends_[group - 1] : 0; }

  std::vector<std::int32_t> ids_;
  std::vector<std::int64_t> ends_;
};

using SharedLists = std::shared_ptr<const BlockLists>;

// The groups of one layout.
struct Groups {
  std::vector<Group> groups;
  Overlays overlays;

  // Clips the list that was added last, of groups[group], and checks it. False where it is wrong.
  bool check_last(BlockLists& lists, std::size_t group, std::int64_t tokens, bool destination) const;
  // What all lists together must keep to, or that only Python can tell.
  bool check_together(const BlockLists& lists) const;
  // A lease's record (ticket.Record) as source lists; null for one that does not fit the layout.
  SharedLists read_record(const std::uint8_t* data, std::size_t nbytes, std::int64_t tokens) const;
};

// Requests between two layouts whose records are equal, so that whole blocks are copied.
class Pairing;

// One request: pairs of blocks for each part. Carried out once, by one thread at a time.
class Request {
 public:
  std::int64_t nbytes() const { return nbytes_; }
  std::int64_t copies() const { return copies_; }
  const PairedBlocks& table() const { return table_; }

  // Copies about `max_bytes` more, whole pairs of blocks, and returns how many bytes that were: 0 at the end.
  std::int64_t copy(const std::uint64_t* src_bases, const std::uint64_t* dst_bases, std::int64_t max_bytes, int threads);

 private:
  friend class Pairing;

  std::shared_ptr<const Pairing> pairing_;
  SharedLists src_, dst_;  // kept alive
  std::vector<PairedPart> parts_;
  PairedBlocks table_{};
  std::int64_t nbytes_ = 0, copies_ = 0;
  std::size_t next_part_ = 0;
  std::int64_t next_pair_ = 0;
};

class Pairing : public std::enable_shared_from_this<Pairing> {
 public:
  struct Part {
    std::size_t src_group, dst_group;
    std::vector<Row> rows;
    std::int64_t nbytes;  // of a pair of blocks
  };

  Pairing(std::shared_ptr<const Groups> src, std::shared_ptr<const Groups> dst, std::vector<Part> parts)
      : src_(std::move(src)), dst_(std::move(dst)), parts_(std::move(parts)) {}

  const Groups& src() const { return *src_; }
  const std::vector<Part>& parts() const { return parts_; }

  // Null where the source's lists begin behind what the destination needs.
  std::unique_ptr<Request> pair(SharedLists src, SharedLists dst, std::int64_t tokens) const;

 private:
  bool pair_part(const Part& part, const BlockLists& src, const BlockLists& dst, std::int64_t tokens,
                 PairedPart& paired) const;

  std::shared_ptr<const Groups> src_, dst_;
  std::vector<Part> parts_;
};

}  // namespace kvxfer::cpu
