// The softmax of attention: a query's products with keys become weights, and in the backward gradients of scores.
// Included by kernels alone, like vector.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "vector.h"

namespace capt {
namespace CPU_CAPABILITY {

constexpr double kLog2E = 1.4426950408889634;

// The products of a query with keys, `columns` of them in whole vectors. It sees [begin, end), others may be anything.
// `bias` is null without one, and readable for all columns.
template <typename acc_t>
struct ScoreRow {
  acc_t* data;
  int64_t begin, end, columns;
  acc_t scale;
  const acc_t* bias;
};

// Calls each(j, scores) with the scores less `pivot`, -inf of keys that are not seen.
template <typename acc_t, typename Each>
inline void score_row(const ScoreRow<acc_t>& row, acc_t pivot, Each&& each) {
  const auto [data, begin, end, columns, factor, bias] = row;
  const Vector<acc_t> scale(factor), shift(pivot), nothing(-std::numeric_limits<acc_t>::infinity());
  // Seen is what is nearer than `reach` to the middle of [begin, end): one comparison, and no branch.
  const Vector<acc_t> reach(acc_t(end - begin) / 2), step(acc_t(Whole<acc_t>::value));
  Vector<acc_t> distance = Vector<acc_t>::arange(-acc_t(begin + end - 1) / 2, acc_t(1));
  for (int64_t j = 0; j < columns; j += Whole<acc_t>::value) {
    Vector<acc_t> score = load(data + j, Whole<acc_t>{}) * scale;
    if (bias != nullptr) score = score + load(bias + j, Whole<acc_t>{});
    each(j, Vector<acc_t>::blendv(nothing, score - shift, distance.abs() < reach));
    distance = distance + step;
  }
}

// Products become weights that sum to 1 (or to 0, where all scores are -inf) once times `inverse_sum`, which is left to
// the output, being shorter. Returns the scores' log-sum-exp in base 2.
template <typename acc_t>
inline acc_t softmax_row(const ScoreRow<acc_t>& row, acc_t& inverse_sum) {
  acc_t* const data = row.data;
  const acc_t infinity = std::numeric_limits<acc_t>::infinity();
  Vector<acc_t> highest(-infinity), sum(acc_t(0));
  score_row(row, acc_t(0), [&](int64_t j, const Vector<acc_t>& score) {
    highest = maximum(highest, score);
    store(data + j, score, Whole<acc_t>{});
  });
  const acc_t peak = horizontal_maximum(highest);
  // A query that sees no key has no peak, and -inf - -inf is NaN.
  const Vector<acc_t> shift(peak == -infinity ? acc_t(0) : peak);
  for (int64_t j = 0; j < row.columns; j += Whole<acc_t>::value) {
    const Vector<acc_t> weight = (load(data + j, Whole<acc_t>{}) - shift).exp_u20();
    sum = sum + weight;
    store(data + j, weight, Whole<acc_t>{});
  }
  inverse_sum = 1;
  // Less +inf, every score of such a query comes back as a weight of 0 in the backward.
  if (peak == -infinity) return infinity;
  // exp_u20 takes NaN for a number, so that the sum has to be told of it: peak - peak is 0 or NaN.
  const acc_t total = horizontal_sum<acc_t>(sum) + (peak - peak);
  inverse_sum = 1 / total;
  return (peak + std::log(total)) * acc_t(kLog2E);
}

// Weights times what dropout gives for each.
template <typename acc_t>
inline void drop_row(const ScoreRow<acc_t>& row, const acc_t* factors) {
  for (int64_t j = 0; j < row.columns; j += Whole<acc_t>::value) {
    store(row.data + j, load(row.data + j, Whole<acc_t>{}) * load(factors + j, Whole<acc_t>{}), Whole<acc_t>{});
  }
}

// Products become weights P again, and a row of dP becomes dS = P * (dP - delta), delta being sum(dO * O). With factors
// M of dropout, which are null without, what O was made of is P * M, and dP is M times what it is without.
template <typename acc_t>
inline void softmax_backward_row(
    const ScoreRow<acc_t>& row, acc_t* grads, const acc_t* factors, acc_t lse, const Vector<acc_t>& delta) {
  const acc_t pivot = lse / acc_t(kLog2E);
  score_row(row, pivot, [&](int64_t j, const Vector<acc_t>& score) { store(row.data + j, score, Whole<acc_t>{}); });
  with_flag(factors != nullptr, [&](auto drops) {
    for (int64_t j = 0; j < row.columns; j += Whole<acc_t>::value) {
      const Vector<acc_t> weight = load(row.data + j, Whole<acc_t>{}).exp_u20();
      Vector<acc_t> used = weight, grad_weight = load(grads + j, Whole<acc_t>{});
      if constexpr (decltype(drops)::value) {
        const Vector<acc_t> factor = load(factors + j, Whole<acc_t>{});
        used = used * factor;
        grad_weight = grad_weight * factor;
      }
      store(row.data + j, used, Whole<acc_t>{});
      store(grads + j, weight * (grad_weight - delta), Whole<acc_t>{});
    }
  });
  if (std::isnan(lse)) std::fill(row.data + row.begin, row.data + row.end, lse);  // exp_u20 takes NaN for a number
}

}  // namespace CPU_CAPABILITY
}  // namespace capt
