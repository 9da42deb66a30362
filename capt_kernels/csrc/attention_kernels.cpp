// Attention over packed rows on the CPU: a block of queries at a time, against all keys that it sees.
//
// The scores of a block are a matrix of kQueries rows, in cache; nothing of T x T is in memory. A worker takes a sequence
// and a key head, so that the keys are laid out once for all query heads of the group, and every sum is formed in one
// order whatever the number of threads is. The backward forms the scores again, from q, k and the log-sum-exp.
#include <cmath>

#include "attention_dropout.h"
#include "attention_rows.h"

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
    // Off the powers of 2, whose rows would all fall on the same few sets of a cache.
    stride_ = most_ + Whole<acc_t>::value;
    queries_copy_ = scratch_.take(kQueries * padded_);
    keys_copy_ = scratch_.take(most_ * padded_);
    values_copy_ = scratch_.take(most_ * padded_);
    key_panels_ = scratch_.take(most_ * width_);
    products_ = scratch_.take(kQueries * stride_);
    sums_ = scratch_.take(kQueries * padded_);
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

  // Of a block of queries: the keys [low, high) that one of them sees, and their products with these.
  struct Block {
    int64_t first, rows, low, high, columns;
  };

  Block multiply_keys(const Span& span, const Left<acc_t>& q, int64_t first, int64_t rows) {
    const int64_t low = span.low(op_, first) / kTileColumns<acc_t> * kTileColumns<acc_t>;
    const int64_t high = std::max(span.high(op_, first + rows - 1), low);
    const Block block{first, rows, low, high, round_up(high - low, Whole<acc_t>::value)};
    multiply(q, panel(panels_, low), products_, stride_, rows, block.columns, width_);
    return block;
  }

  // Panels from key `low` on, a multiple of their width.
  Right<acc_t> panel(const Right<acc_t>& from, int64_t low) const { return {from.data + low * width_, from.row, from.tile}; }

  Right<acc_t> right(const Left<acc_t>& rows, int64_t first = 0) const {
    return {rows.data + first * rows.row, rows.row, kTileColumns<acc_t>};
  }

  // Scores of query i of a block less `pivot`, -inf where it does not see the key.
  acc_t* score(const Span& span, const Block& block, int64_t i, acc_t pivot) {
    acc_t* row = products_ + i * stride_;
    const int64_t query = block.first + i;
    const auto column = [&](int64_t key) { return std::clamp<int64_t>(key - block.low, 0, block.high - block.low); };
    const int64_t end = column(span.high(op_, query));
    score_row(row, std::min(column(span.low(op_, query)), end), end, block.columns, acc_t(op_.scale),
              bias_.at(span, query, block.low), pivot);
    return row;
  }

  // What dropout multiplies the weights of query i of a block with; null without dropout.
  const acc_t* factors(const Span& span, const Block& block, int64_t i, int64_t head) {
    if (factors_ != nullptr) {
      dropout_row(op_.dropout, head, span.q_begin + block.first + i, block.low, block.columns, factors_);
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
        const int64_t rows = std::min(kQueries, item.end - first);
        const auto q = this->rows_of(op_.q, span.q_begin + first, head, rows, this->queries_copy_);
        const auto block = this->multiply_keys(span, q, first, rows);
        acc_t* lse = static_cast<acc_t*>(op_.lse) + head * op_.rows + span.q_begin + first;
        acc_t shares[kQueries];
        for (int64_t i = 0; i < rows; ++i) {
          acc_t* row = this->score(span, block, i, 0);
          lse[i] = weigh(row, block.columns, shares[i]);
          if (const acc_t* factors = this->factors(span, block, i, head)) drop(row, factors, block.columns);
        }
        multiply({this->products_, this->stride_, 1}, this->right(this->values_, block.low), this->sums_, this->padded_,
                 rows, this->padded_, block.high - block.low);
        write_rows<T>(op_.out, span.q_begin + first, head, this->sums_, this->padded_, rows, this->width_,
                      [&](int64_t i) { return shares[i]; });
      }
    }
  }

 private:
  // Scores become weights that sum to 1 (or to 0, where all are -inf) once times `share`, which is left to the output,
  // being shorter. Returns their log-sum-exp in base 2.
  static acc_t weigh(acc_t* row, int64_t columns, acc_t& share) {
    const acc_t nothing = -std::numeric_limits<acc_t>::infinity();
    Vector<acc_t> highest(nothing), sum(acc_t(0));
    for (int64_t j = 0; j < columns; j += Whole<acc_t>::value) highest = maximum(highest, load(row + j, Whole<acc_t>{}));
    const acc_t peak = horizontal_maximum(highest);
    // A query that sees no key has no peak, and -inf - -inf is NaN.
    const Vector<acc_t> shift(peak == nothing ? acc_t(0) : peak);
    for (int64_t j = 0; j < columns; j += Whole<acc_t>::value) {
      const Vector<acc_t> weight = (load(row + j, Whole<acc_t>{}) - shift).exp();
      sum = sum + weight;
      store(row + j, weight, Whole<acc_t>{});
    }
    share = 1;
    if (peak == nothing) return nothing;
    const acc_t total = horizontal_sum<acc_t>(sum);
    share = 1 / total;
    return (peak + std::log(total)) * acc_t(kLog2E);
  }

  static void drop(acc_t* row, const acc_t* factors, int64_t columns) {
    for (int64_t j = 0; j < columns; j += Whole<acc_t>::value) {
      store(row + j, load(row + j, Whole<acc_t>{}) * load(factors + j, Whole<acc_t>{}), Whole<acc_t>{});
    }
  }
};

template <typename T>
class Backward : Worker<T, AttentionBackward> {
  using Base = Worker<T, AttentionBackward>;
  using typename Base::acc_t;
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
        const auto block = this->multiply_keys(span, q, first, rows);
        multiply(grad, this->panel(value_panels, block.low), grad_scores_, stride, rows, block.columns, width);
        for (int64_t i = 0; i < rows; ++i) differentiate(span, block, i, begin, head, grad.data + i * grad.row);

        const int64_t keys = block.high - block.low;
        const Left<acc_t> weights{this->products_, stride, 1}, grad_scores{grad_scores_, stride, 1};
        if (op_.grad_q) {
          multiply(grad_scores, this->right(this->keys_, block.low), this->sums_, padded, rows, padded, keys);
          write_rows<T>(op_.grad_q, begin, head, this->sums_, padded, rows, width, scale);
        }
        if (op_.grad_k) {
          acc_t* grad_keys = grad_keys_ + block.low * padded;
          acc_t* grad_values = grad_values_ + block.low * padded;
          multiply(transposed(grad_scores), this->right(q), grad_keys, padded, keys, padded, rows, true);
          multiply(transposed(weights), this->right(grad), grad_values, padded, keys, padded, rows, true);
        }
      }
    }
    if (op_.grad_k) {
      write_rows<T>(op_.grad_k, span.k_begin, item.key_head, grad_keys_, padded, span.m, width, scale);
      const auto one = [](int64_t) { return acc_t(1); };
      write_rows<T>(op_.grad_v, span.k_begin, item.key_head, grad_values_, padded, span.m, width, one);
    }
  }

 private:
  // A row of scores becomes weights P again, and a row of dP becomes dS = P * (dP - delta), delta being sum(dO * O).
  // With factors M of dropout, what O was made of is P * M, and dP is M times what it is without.
  void differentiate(const Span& span, const typename Base::Block& block, int64_t i, int64_t begin, int64_t head,
                     const acc_t* grad) {
    const T* out = op_.out.template at<const T>(begin + i, head);
    Vector<acc_t> product(acc_t(0));
    along<acc_t>(this->width_, [&](int64_t d, auto n) { product = product + load(out + d, n) * load(grad + d, n); });
    const Vector<acc_t> delta(horizontal_sum<acc_t>(product));
    const acc_t lse = static_cast<const acc_t*>(op_.lse)[head * op_.rows + begin + i] / acc_t(kLog2E);
    acc_t* row = this->score(span, block, i, std::isinf(lse) ? acc_t(0) : lse);
    acc_t* grads = grad_scores_ + i * this->stride_;
    const acc_t* factors = this->factors(span, block, i, head);
    with_flag(factors != nullptr, [&](auto drops) {
      for (int64_t j = 0; j < block.columns; j += Whole<acc_t>::value) {
        const Vector<acc_t> weight = load(row + j, Whole<acc_t>{}).exp();
        Vector<acc_t> used = weight, grad_weight = load(grads + j, Whole<acc_t>{});
        if constexpr (decltype(drops)::value) {
          const Vector<acc_t> factor = load(factors + j, Whole<acc_t>{});
          used = used * factor;
          grad_weight = grad_weight * factor;
        }
        store(row + j, used, Whole<acc_t>{});
        store(grads + j, weight * (grad_weight - delta), Whole<acc_t>{});
      }
    });
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
      std::fill(lse + first, lse + op.rows, -std::numeric_limits<Accumulator<T>>::infinity());
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
