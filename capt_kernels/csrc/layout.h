// Where the rows of a sequence are, and how a batch is cut into pieces of work.
//
// A padded call [B, T, D] and a packed call [R, D] look alike from here on: a sequence is a stretch of rows with its
// slots behind `lead` of them. Rows past the last offset of a packed call are one more sequence, without slots or pool.
// Sequences are cut into chunks of a fixed number of rows, so that a long one is shared by all threads and a sum is
// formed in the same order whatever their number is.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace capt {

using torch::headeronly::ScalarType;

// Row t of a batch entry, elements of a row being neighbours. Strides are in elements.
struct Rows {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;

  explicit operator bool() const { return data != nullptr; }

  template <typename T>
  T* at(int64_t batch, int64_t row) const {
    return static_cast<T*>(data) + batch * batch_stride + row * row_stride;
  }
};

// Vectors [i, j, :] of any float dtype and strides: prompts [B, K, D], or a norm's weight [D].
struct Vectors {
  const void* data = nullptr;
  ScalarType dtype = ScalarType::Float;
  int64_t strides[3] = {0, 0, 0};
};

struct Sequence {
  int64_t batch;    // entry of the batch dimension; 0 in a packed call
  int64_t begin;    // its first row there
  int64_t length;   // its rows
  int64_t first;    // the row of its first slot, counted from begin; -1 when it holds none
  int64_t shift;    // what its rows from `first` on move down by in an output that gains slots
  int64_t out;      // its first row in such an output
  int64_t members;  // rows in its pool; 0 when it has none
  int64_t chunks_begin, chunks_end;

  // Where row t of the input, or a slot, is in an output that gains slots. Where rows hold the slots, nothing moves.
  int64_t out_row(int64_t t) const { return out + t + (t >= first ? shift : 0); }
  int64_t slot_row(int64_t slot) const { return out + first + slot; }
};

struct Chunk {
  int64_t sequence;
  int64_t begin, end;            // rows of the sequence
  int64_t rank;                  // rank in the pool of its first member that is not a slot
  int64_t bin_begin, bin_end;    // bins that its members lie in
  int64_t partial;               // its first row among the partial sums
};

// What an op is told about its rows.
struct Layout {
  int64_t batch = 1;             // sequences
  int64_t rows = 0;              // T of a padded call, R of a packed one
  int64_t slots = 0;             // K
  bool held = true;              // the rows hold the slots already
  int64_t lead = 0;
  const int32_t* cu_seqlens = nullptr;  // [batch + 1], or null for a padded call
  int64_t cu_stride = 1;
  bool pool = false;             // slots take the mean of the pool
  const bool* pooled = nullptr;  // rows (slots apart) that may enter it; null for all
  int64_t pooled_batch_stride = 0, pooled_row_stride = 0;

  // Whether row t of the sequence is in its pool.
  bool member(const Sequence& sequence, int64_t t) const {
    if (sequence.members == 0) return false;
    if (pooled == nullptr || is_slot(sequence, t)) return true;
    const int64_t skipped = held && cu_seqlens == nullptr ? slots : 0;  // a padded mask covers the tokens alone
    return pooled[sequence.batch * pooled_batch_stride + (sequence.begin + t - skipped) * pooled_row_stride];
  }

  // Whether row t of the input is one of the slots.
  bool is_slot(const Sequence& sequence, int64_t t) const {
    return held && sequence.first >= 0 && t >= sequence.first && t < sequence.first + slots;
  }
};

// The pool is an adaptive mean pool of `members` rows into `slots` bins, which overlap where it does not come out even.
struct Bins {
  int64_t begin, end;
};

// Bins that the member of this rank lies in.
inline Bins bins_of(int64_t rank, int64_t members, int64_t slots) {
  if (slots == 1) return {0, 1};
  return {rank * slots / members, ((rank + 1) * slots + members - 1) / members};
}

inline int64_t bin_size(int64_t bin, int64_t members, int64_t slots) {
  return ((bin + 1) * members + slots - 1) / slots - bin * members / slots;
}

struct Plan {
  Layout layout;
  std::vector<Sequence> sequences;
  std::vector<Chunk> chunks;
  int64_t partials = 0;  // rows of partial sums

  explicit Plan(const Layout& layout);
};

}  // namespace capt
