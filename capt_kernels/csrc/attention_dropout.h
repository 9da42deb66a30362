// Which weights of attention drop out: Philox-4x32 of seven rounds, laid out as capt_kernels/attention/dropout.py says.
// Included by kernels alone, like vector.h.
#pragma once

#include <cstdint>

#include "attention.h"

namespace capt {
namespace CPU_CAPABILITY {

// What the weights of one query are multiplied with, from key `first` on: 0 where they drop out, 1 / (1 - p) elsewhere.
// `first` and `columns` are multiples of 4. The loop over counters has no branch, and an index of 64 bits, which cannot
// wrap around: compilers make it vectors. 0.7 ns a weight on a core with AVX-512, a fifth of a forward at head size 64.
template <typename acc_t>
inline void dropout_row(
    const Dropout& dropout, int64_t head, int64_t row, int64_t first, int64_t columns, acc_t* __restrict factors) {
  const acc_t rescale = acc_t(dropout.rescale);
  const int32_t threshold = dropout.threshold;
  const auto factor = [=](uint32_t word) { return static_cast<int32_t>(word) >= threshold ? rescale : acc_t(0); };
  const uint32_t low = static_cast<uint32_t>(dropout.seed), high = static_cast<uint32_t>(dropout.seed >> 32);
  const uint32_t quad = static_cast<uint32_t>(first / 4), query = static_cast<uint32_t>(row);
  for (int64_t i = 0; i < columns / 4; ++i) {
    uint32_t c0 = quad + static_cast<uint32_t>(i), c1 = query, c2 = static_cast<uint32_t>(head), c3 = 0;
#pragma GCC unroll 7
    for (uint32_t round = 0; round < 7; ++round) {
      const uint64_t one = uint64_t(0xD2511F53u) * c0, two = uint64_t(0xCD9E8D57u) * c2;
      c0 = static_cast<uint32_t>(two >> 32) ^ c1 ^ (low + round * 0x9E3779B9u);
      c2 = static_cast<uint32_t>(one >> 32) ^ c3 ^ (high + round * 0xBB67AE85u);
      c1 = static_cast<uint32_t>(two);
      c3 = static_cast<uint32_t>(one);
    }
    factors[4 * i] = factor(c0);
    factors[4 * i + 1] = factor(c1);
    factors[4 * i + 2] = factor(c2);
    factors[4 * i + 3] = factor(c3);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace capt
