// Attention over packed rows on the CPU: a block of queries at a time, against all keys that it sees.
//
// The scores of a block are a matrix of kQueries rows, in cache; nothing of T x T is in memory. What its queries do not
// see is left out by tiles. A worker takes a sequence and a key head, so that the keys are laid out once for all query
// heads of the group, and every sum is formed in one order whatever the number of threads is. The backward forms the
// scores again, from q, k and the log-sum-exp.
#include <limits>

#include "attention_dropout.h"
#include "attention_rows.h"
#include "attention_softmax.h"

namespace capt {
namespace CPU_CAPABILITY {
namespace {

// `rows` rows of sums as T, times factor(row).
template <typename T, typename Factor, typename acc_t = Accumulator<T>>
void write_rows(const HeadRows& to, int64_t first, int64_t head, const acc_t* from, int64_t padded, int64_t rows,
                int64_t width, Factor&& factor) {
  for (int64_t i = 0; i < rows; ++i) {
    const Vector<acc_t> scale(factor(i));
    T* row = to.at<T>(first + i, head);
    along<acc_t>(width, [&](int64_t d, auto n) { store(row + d, load(from + i * padded + d, n) * scale, n); });
  }
}

// Rows past the last sequence are 0.
template <typename T>
void clear_rest(const HeadRows& to, int64_t first, int64_t rows, int64_t heads, int64_t width) {
  if (to && first < rows) std::fill_n(to.at<T>(first, 0), (rows - first) * heads * width, T(0));
}

// What both directions hold: a sequence's keys, and the scores of a block of queries with them.
template <typename T, typename Op>
class Worker {
 public:
  using acc_t = Accumulator<T>;

  explicit Worker(const Op& op)
      : op_(op), width_(op.width), padded_(round_up(op.width, Register<acc_t>::size())),
        group_(op.heads / op.key_heads), bias_(op, scratch_) {
    int64_t keys = 0;
    for (int64_t index = 0; index < op.batch; ++index) keys = std::max(keys, Span(op, index).m);
    most_ = round_up(keys, std::max(kTileColumns<acc_t>, Whole<acc_t>::value));
    // Off the powers of 2, whose rows would all fall on the same few sets of a cache; zeros have room past a row.
    stride_ = most_ + round_up(kTileRows, Whole<acc_t>::value);
    queries_copy_ = scratch_.take(kQueries * padded_);
    keys_copy_ = scratch_.take(most_ * padded_);
    values_copy_ = scratch_.take(most_ * padded_);
    key_panels_ = scratch_.take(most_ * width_);
    products_ = scratch_.take(kQueries * stride_);
    sums_ = scratch_.take(kTileRows * padded_);
    if (op.dropout) factors_ = scratch_.take(most_);
  }

 protected:
  Left<acc_t> rows_of(const HeadRows& from, int64_t first, int64_t head, int64_t rows, acc_t* copy) const {
    return head_matrix(from.at<const T>(first, head), from.row_stride, rows, width_, copy);
  }

  void lay_out_keys(const Span& span, int64_t key_head) {
    keys_ = rows_of(op_.k, span.k_begin, key_head, span.m, keys_copy_);
    values_ = rows_of(op_.v, span.k_begin, key_head, span.m, values_copy_);
    panels_ = panels(keys_, span.m, width_, key_panels_);
  }

  // Of a block of queries, or a tile of one: the keys [low, high) that one of them sees, and as columns, whole vectors.
  struct Block {
    int64_t first, rows, low, high, columns;
  };

  Block block_of(const Span& span, int64_t first, int64_t rows, int64_t low) const {
    const int64_t high = std::max(span.high(op_, first + rows - 1), low);
    return {first, rows, low, high, round_up(high - low, Whole<acc_t>::value)};
  }

  Block block_of(const Span& span, int64_t first, int64_t rows) const {
    return block_of(span, first, rows, span.low(op_, first) / kTileColumns<acc_t> * kTileColumns<acc_t>);
  }

  // The tile of a block's rows from row i on. Its columns begin with the block's.
  Block tile_of(const Span& span, const Block& block, int64_t i) const {
    return block_of(span, block.first + i, std::min(kTileRows, block.rows - i), block.low);
  }

  // Products of a block's rows with its keys, which lie in panels: some columns at a time, without the tiles of rows
  // that see none of these.
  void multiply_keys(const Span& span, const Block& block, const Left<acc_t>& rows, const Right<acc_t>& panels,
                     acc_t* products) const {
    const int64_t seen_by_all = span.high(op_, block.first) - block.low;
    const int64_t diagonal = block.first + span.m - span.n - block.low;  // the column of the first row's own key
    const auto blind = [&](int64_t column) {
      return column < seen_by_all ? 0 : (column - diagonal) / kTileRows * kTileRows;
    };
    for (int64_t column = 0, count; column < block.columns; column += count) {
      const int64_t skipped = blind(column);
      count = std::min(kTileColumns<acc_t> - column % kTileColumns<acc_t>, block.columns - column);
      if (blind(column + Whole<acc_t>::value) > skipped) count = Whole<acc_t>::value;
      multiply(from_row(rows, skipped), panel(panels, block.low + column), products + skipped * stride_ + column,
               stride_, block.rows - skipped, count, width_);
    }
  }

  // Panels from key `low` on, a multiple of whole vectors, as far as that key's own panel goes.
  Right<acc_t> panel(const Right<acc_t>& from, int64_t low) const {
    const int64_t inside = low % kTileColumns<acc_t>;
    return {from.data + (low - inside) * width_ + inside, from.row, from.tile};
  }

  Right<acc_t> right(const Left<acc_t>& rows, int64_t first = 0) const {
    return {rows.data + first * rows.row, rows.row, kTileColumns<acc_t>};
  }

  // Of query i of a tile, whose products with the tile's keys are `products`.
  ScoreRow<acc_t> row_of(const Span& span, const Block& tile, int64_t i, acc_t* products) const {
    const int64_t query = tile.first + i;
    const auto column = [&](int64_t key) { return std::clamp<int64_t>(key - tile.low, 0, tile.high - tile.low); };
    const int64_t end = column(span.high(op_, query)), begin = std::min(column(span.low(op_, query)), end);
    return {products, begin, end, tile.columns, acc_t(op_.scale), bias_.at(span, query, tile.low)};
  }

  // What dropout multiplies the weights of query i of a tile with; null without dropout.
  const acc_t* factors(const Span& span, const Block& tile, int64_t i, int64_t head) {
    if (factors_ != nullptr) {
      dropout_row(op_.dropout, head, span.q_begin + tile.first + i, tile.low, tile.columns, factors_);
    }
    return factors_;
  }

  const Op& op_;
  Scratch<acc_t> scratch_;
  const int64_t width_, padded_, group_;
  int64_t most_, stride_;
  BiasRow<acc_t> bias_;
  acc_t *queries_copy_, *keys_copy_, *values_copy_, *key_panels_, *products_, *sums_, *factors_ = nullptr;
  Left<acc_t> keys_, values_;
  Right<acc_t> panels_;
};

template <typename T>
class Forward : Worker<T, AttentionForward> {
  using Base = Worker<T, AttentionForward>;
  using typename Base::acc_t;
  using typename Base::Block;
  using Base::op_;

 public:
  explicit Forward(const AttentionForward& op) : Base(op) {}

  void run(const Item& item) {
    const Span span(op_, item.sequence);
    if (item.begin == item.end) return;
    this->lay_out_keys(span, item.key_head);
    for (int64_t head = item.key_head * this->group_; head < (item.key_head + 1) * this->group_; ++head) {
      this->bias_.fetch(head);
      for (int64_t first = item.begin; first < item.end; first += kQueries) {
        const int64_t rows = std::min(kQueries, item.end - first), begin = span.q_begin + first;
        const auto block = this->block_of(span, first, rows);
        const auto q = this->rows_of(op_.q, begin, head, rows, this->queries_copy_);
        this->multiply_keys(span, block, q, this->panels_, this->products_);
        for (int64_t i = 0; i < rows; i += kTileRows) {
          const auto tile = this->tile_of(span, block, i);
          acc_t* lse = static_cast<acc_t*>(op_.lse) + head * op_.rows + begin + i;
          acc_t* scores = this->products_ + i * this->stride_;
          acc_t inverse_sums[kTileRows];
          for (int64_t j = 0; j < tile.rows; ++j) {
            const auto row = this->row_of(span, tile, j, scores + j * this->stride_);
            lse[j] = softmax_row(row, inverse_sums[j]);
            if (const acc_t* factors = this->factors(span, tile, j, head)) drop_row(row, factors);
          }
          multiply({scores, this->stride_, 1}, this->right(this->values_, tile.low), this->sums_, this->padded_,
                   tile.rows, this->padded_, tile.high - tile.low);
          write_rows<T>(op_.out, begin + i, head, this->sums_, this->padded_, tile.rows, this->width_,
                        [&](int64_t j) { return inverse_sums[j]; });
        }
      }
    }
  }
};

template <typename T>
class Backward : Worker<T, AttentionBackward> {
  using Base = Worker<T, AttentionBackward>;
  using typename Base::acc_t;
  using typename Base::Block;
  using Base::op_;

 public:
  explicit Backward(const AttentionBackward& op) : Base(op) {
    grad_copy_ = this->scratch_.take(kQueries * this->padded_);
    value_panels_ = this->scratch_.take(this->most_ * this->width_);
    grad_scores_ = this->scratch_.take(kQueries * this->stride_);
    grad_keys_ = this->scratch_.take(this->most_ * this->padded_);
    grad_values_ = this->scratch_.take(this->most_ * this->padded_);
  }

  void run(const Item& item) {
    const Span span(op_, item.sequence);
    const int64_t padded = this->padded_, stride = this->stride_, width = this->width_;
    const auto scale = [&](int64_t) { return acc_t(op_.scale); };
    this->lay_out_keys(span, item.key_head);
    const auto value_panels = panels(this->values_, span.m, width, value_panels_);
    for (acc_t* sums : {grad_keys_, grad_values_}) std::fill_n(sums, span.m * padded, acc_t(0));

    for (int64_t head = item.key_head * this->group_; head < (item.key_head + 1) * this->group_; ++head) {
      this->bias_.fetch(head);
      for (int64_t first = 0; first < span.n; first += kQueries) {
        const int64_t rows = std::min(kQueries, span.n - first), begin = span.q_begin + first;
        const auto q = this->rows_of(op_.q, begin, head, rows, this->queries_copy_);
        const auto grad = this->rows_of(op_.grad, begin, head, rows, grad_copy_);
        const auto block = this->block_of(span, first, rows);
        this->multiply_keys(span, block, q, this->panels_, this->products_);
        this->multiply_keys(span, block, grad, value_panels, grad_scores_);
        for (int64_t i = 0; i < rows; i += kTileRows) {
          const auto tile = this->tile_of(span, block, i);
          for (int64_t j = 0; j < tile.rows; ++j) {
            form_grad_scores(span, tile, j, head, grad.data + (i + j) * grad.row, (i + j) * stride);
          }
          if (op_.grad_q) {
            multiply({grad_scores_ + i * stride, stride, 1}, this->right(this->keys_, tile.low), this->sums_, padded,
                     tile.rows, padded, tile.high - tile.low);
            write_rows<T>(op_.grad_q, begin + i, head, this->sums_, padded, tile.rows, width, scale);
          }
        }
        if (op_.grad_k) add_key_gradients(span, block, q, grad);
      }
    }
    if (op_.grad_k) {
      write_rows<T>(op_.grad_k, span.k_begin, item.key_head, grad_keys_, padded, span.m, width, scale);
      const auto one = [](int64_t) { return acc_t(1); };
      write_rows<T>(op_.grad_v, span.k_begin, item.key_head, grad_values_, padded, span.m, width, one);
    }
  }

 private:
  // Products of query i of a tile, and of its gradient with the values, become weights and gradients of scores.
  void form_grad_scores(const Span& span, const Block& tile, int64_t i, int64_t head, const acc_t* grad, int64_t at) {
    const int64_t query = span.q_begin + tile.first + i;
    const T* out = op_.out.template at<const T>(query, head);
    Vector<acc_t> product(acc_t(0));
    along<acc_t>(this->width_, [&](int64_t d, auto n) { product = product + load(out + d, n) * load(grad + d, n); });
    acc_t *scores = this->products_ + at, *grad_scores = grad_scores_ + at;
    softmax_backward_row(this->row_of(span, tile, i, scores), grad_scores, this->factors(span, tile, i, head),
                         static_cast<const acc_t*>(op_.lse)[head * op_.rows + query],
                         Vector<acc_t>(horizontal_sum<acc_t>(product)));
    // A tile of keys may begin with the last one that a query sees.
    for (acc_t* rest : {scores, grad_scores}) std::fill_n(rest + tile.columns, kTileRows, acc_t(0));
  }

  // Adds a block of queries to the gradients of its keys: all of it to those of keys that all see, and to those of a
  // tile of others what follows the first query that sees one of them.
  void add_key_gradients(const Span& span, const Block& block, const Left<acc_t>& q, const Left<acc_t>& grad) {
    const int64_t seen_by_all = span.high(op_, block.first);
    for (int64_t key = block.low, count; key < block.high; key += count) {
      const bool all = key < seen_by_all;
      count = all ? seen_by_all - key : std::min(kTileRows, block.high - key);
      const int64_t skipped = all ? 0 : key - (span.m - span.n) - block.first;
      const auto add = [&](const acc_t* scores, const Left<acc_t>& rows, acc_t* sums) {
        const Left<acc_t> seen{scores + skipped * this->stride_ + key - block.low, this->stride_, 1};
        multiply(transposed(seen), this->right(rows, skipped), sums + key * this->padded_, this->padded_, count,
                 this->padded_, block.rows - skipped, true);
      };
      add(grad_scores_, q, grad_keys_);
      add(this->products_, grad, grad_values_);
    }
  }

  acc_t *grad_copy_, *value_panels_, *grad_scores_, *grad_keys_, *grad_values_;
};

}  // namespace

void attention_kernel(const AttentionForward& op) {
  with_type(op.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const int64_t first = Span::offset(op.cu_seqlens, op.batch, op.rows);
    clear_rest<T>(op.out, first, op.rows, op.heads, op.width);
    for (int64_t head = 0; head < op.heads; ++head) {
      Accumulator<T>* lse = static_cast<Accumulator<T>*>(op.lse) + head * op.rows;
      std::fill(lse + first, lse + op.rows, std::numeric_limits<Accumulator<T>>::infinity());
    }
    share<Forward<T>>(op, items_of(op, true));
  });
}

void attention_backward_kernel(const AttentionBackward& op) {
  with_type(op.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    clear_rest<T>(op.grad_q, Span::offset(op.cu_seqlens, op.batch, op.rows), op.rows, op.heads, op.width);
    const int64_t first = Span::offset(op.cu_seqlens_k, op.batch, op.key_rows);
    for (const HeadRows& grads : {op.grad_k, op.grad_v}) clear_rest<T>(grads, first, op.key_rows, op.key_heads, op.width);
    share<Backward<T>>(op, items_of(op, false));
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace capt
