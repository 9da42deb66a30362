// What attention's kernels need of one sequence and head: its rows as matrices, which keys a query sees, its bias.
// Included by kernels alone, like vector.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "attention.h"
#include "multiply.h"
#include "vector.h"

namespace capt {
namespace CPU_CAPABILITY {

// Queries whose part of the gradients of keys is formed at once.
constexpr int64_t kQueries = 8 * kTileRows;

// One sequence. Offsets are checked before they come here where that is free; wrong ones must not leave the rows given.
struct Span {
  int64_t q_begin, n, k_begin, m;

  Span(const Attention& op, int64_t index)
      : q_begin(offset(op.cu_seqlens, index, op.rows)),
        n(std::max<int64_t>(offset(op.cu_seqlens, index + 1, op.rows) - q_begin, 0)),
        k_begin(offset(op.cu_seqlens_k, index, op.key_rows)),
        m(std::max<int64_t>(offset(op.cu_seqlens_k, index + 1, op.key_rows) - k_begin, 0)) {}

  static int64_t offset(const int32_t* offsets, int64_t index, int64_t rows) {
    return std::clamp<int64_t>(offsets[index], 0, rows);
  }

  // The keys [low, high) that query i sees; both rise with i.
  int64_t low(const Attention& op, int64_t i) const {
    return op.window > 0 ? std::max<int64_t>(i + m - n - op.window + 1, 0) : 0;
  }
  int64_t high(const Attention& op, int64_t i) const {
    return op.causal ? std::clamp<int64_t>(i + m - n + 1, 0, m) : m;
  }
};

// Uninitialised memory that a thread works in. Rows that meet registers are padded to whole ones.
template <typename acc_t>
class Scratch {
 public:
  acc_t* take(int64_t count) {
    // A line of slack, so that the strides of score rows and panels do not all fall on the same cache sets.
    pieces_.emplace_back(new acc_t[count + 64 / sizeof(acc_t)]);
    return pieces_.back().get();
  }

 private:
  std::vector<std::unique_ptr<acc_t[]>> pieces_;
};

// Rows of one head as a matrix, zero up to whole registers: in place where that is what memory holds already.
template <typename T, typename acc_t = Accumulator<T>>
inline Left<acc_t> head_matrix(const T* from, int64_t row_stride, int64_t rows, int64_t width, acc_t* scratch) {
  const int64_t padded = round_up(width, Register<acc_t>::size());
  if constexpr (std::is_same_v<T, acc_t>) {
    if (padded == width) return {from, row_stride, 1};
  }
  for (int64_t i = 0; i < rows; ++i) {
    along<acc_t>(width, [&](int64_t d, auto n) { store(scratch + i * padded + d, load(from + i * row_stride + d, n), n); });
    std::fill(scratch + i * padded + width, scratch + (i + 1) * padded, acc_t(0));
  }
  return {scratch, padded, 1};
}

template <typename acc_t>
inline Left<acc_t> from_row(const Left<acc_t>& matrix, int64_t first) {
  return {matrix.data + first * matrix.row, matrix.row, matrix.column};
}

template <typename acc_t>
inline Left<acc_t> transposed(const Left<acc_t>& matrix) {
  return {matrix.data, matrix.column, matrix.row};
}

// The transpose of a square of register size. Interleaving the halves of its rows is a rotation of the bits of an
// element's index (row, column) by one, and row and column have changed places after as many as a column has.
template <typename acc_t>
inline void transpose_square(const acc_t* from, int64_t from_row, acc_t* to, int64_t to_row) {
  constexpr int size = Register<acc_t>::size();
  Register<acc_t> rows[size], mixed[size];
#pragma GCC unroll 16
  for (int i = 0; i < size; ++i) rows[i] = Register<acc_t>::loadu(from + i * from_row);
#pragma GCC unroll 4
  for (int round = 1; round < size; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < size / 2; ++i) {
      std::tie(mixed[2 * i], mixed[2 * i + 1]) = at::vec::interleave2(rows[i], rows[i + size / 2]);
    }
    std::swap(rows, mixed);
  }
#pragma GCC unroll 16
  for (int i = 0; i < size; ++i) rows[i].store(to + i * to_row);
}

// The transpose [width, rows] in panels of kTileColumns rows, zero past the last.
template <typename acc_t>
inline Right<acc_t> panels(const Left<acc_t>& matrix, int64_t rows, int64_t width, acc_t* scratch) {
  constexpr int64_t columns = kTileColumns<acc_t>, size = Register<acc_t>::size();
  for (int64_t first = 0; first < round_up(rows, columns); first += size) {
    acc_t* panel = scratch + first / columns * columns * width + first % columns;
    const acc_t* from = matrix.data + first * matrix.row;
    const int64_t count = std::clamp<int64_t>(rows - first, 0, size), squares = count < size ? 0 : width / size * size;
    for (int64_t d = 0; d < squares; d += size) transpose_square(from + d, matrix.row, panel + d * columns, columns);
    for (int64_t d = squares; d < width; ++d) {
      for (int64_t j = 0; j < count; ++j) panel[d * columns + j] = from[j * matrix.row + d];
      std::fill(panel + d * columns + count, panel + d * columns + size, acc_t(0));
    }
  }
  return {scratch, columns, columns * width};
}

// The bias of one head by distance j - i, readable some columns past the keys.
template <typename acc_t>
class BiasRow {
 public:
  BiasRow(const Attention& op, Scratch<acc_t>& scratch) : op_(op), length_(2 * op.reach - 1) {
    if (op.bias.data == nullptr) return;
    data_ = scratch.take(length_ + kMargin);
    std::fill(data_ + length_, data_ + length_ + kMargin, acc_t(0));
  }

  void fetch(int64_t head) {
    if (data_ != nullptr) read(op_.bias, 0, head, length_, data_);
  }

  // Of query i, from key j on; null without a bias.
  const acc_t* at(const Span& span, int64_t i, int64_t j) const {
    return data_ == nullptr ? nullptr : data_ + j - (i + span.m - span.n) + op_.reach - 1;
  }

 private:
  static constexpr int64_t kMargin = 2 * kTileColumns<acc_t>;
  const Attention& op_;
  int64_t length_;
  acc_t* data_ = nullptr;
};

// Queries of a piece of the forward: so many that laying out the keys for each does not count.
constexpr int64_t kPiece = 6 * kQueries;

struct Item {
  int64_t sequence, key_head, begin, end;  // queries
  int64_t cost;
};

// The costly ones first, so that threads end together.
inline std::vector<Item> items_of(const Attention& op, bool in_pieces) {
  std::vector<Item> items;
  for (int64_t index = 0; index < op.batch; ++index) {
    const Span span(op, index);
    const int64_t step = in_pieces ? kPiece : std::max<int64_t>(span.n, 1);
    int64_t begin = 0;
    do {  // a sequence without queries is an item too: its keys have gradients, which are 0
      const int64_t end = std::min(begin + step, span.n);
      const int64_t seen = span.high(op, begin) + span.high(op, std::max<int64_t>(end - 1, 0));
      for (int64_t head = 0; head < op.key_heads; ++head) items.push_back({index, head, begin, end, seen * (end - begin)});
      begin = end;
    } while (begin < span.n);
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
  return items;
}

// Every thread has a worker, which takes the next item when it is done with one: sequences are uneven.
template <typename Worker, typename Op, typename Item>
inline void share(const Op& op, const std::vector<Item>& items) {
  const int64_t count = static_cast<int64_t>(items.size());
  std::atomic<int64_t> next{0};
  parallel_for(count, 1, [&](int64_t, int64_t) {
    Worker worker(op);
    for (int64_t index = next++; index < count; index = next++) worker.run(items[index]);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace capt
