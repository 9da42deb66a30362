// The two passes over rows that all capsule ops are: one that pools rows into slots, one that spreads a slot's gradient
// over the rows it came from. Each touches a row once, whatever else the op does with it at that moment.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>

#include "dispatch.h"
#include "layout.h"
#include "vector.h"

namespace capt {
namespace CPU_CAPABILITY {

inline int64_t chunk_grain(const Plan& plan, int64_t width) {
  const int64_t chunks = static_cast<int64_t>(plan.chunks.size());
  int64_t rows = plan.layout.rows * (plan.layout.cu_seqlens == nullptr ? plan.layout.batch : 1);
  return std::max<int64_t>(1, kGrain * chunks / std::max<int64_t>(1, rows * width));
}

template <typename T, typename acc_t = Accumulator<T>>
inline void add_row(const T* row, acc_t* sum, int64_t width) {
  along<acc_t>(width, [&](int64_t d, auto n) { store(sum + d, load(sum + d, n) + load(row + d, n), n); });
}

// Calls row(sequence, t, sum) for every row, which writes it, adds what enters the pool to `sum` unless that is null,
// and returns it; and slot(sequence, k, value) for every slot once its sequence is summed, with value = prompt + pool.
//
// The chunk that finishes a sequence last, on whichever thread, sums its chunks in order: no value is added atomically.
template <typename T, typename Row, typename Slot>
void pool_rows(const Plan& plan, const Vectors& prompt, int64_t width, Row&& row, Slot&& slot) {
  using acc_t = Accumulator<T>;
  const Layout& layout = plan.layout;
  const Sequence* sequences = plan.sequences.data();
  const Chunk* chunks = plan.chunks.data();
  const std::unique_ptr<acc_t[]> partials(new acc_t[plan.partials * width]);
  const std::unique_ptr<std::atomic<int64_t>[]> unfinished(new std::atomic<int64_t>[plan.sequences.size()]);
  for (size_t i = 0; i < plan.sequences.size(); ++i) {
    unfinished[i].store(sequences[i].chunks_end - sequences[i].chunks_begin, std::memory_order_relaxed);
  }

  const auto sum_chunk = [&](const Sequence& sequence, const Chunk& chunk) {
    acc_t* sums = partials.get() + chunk.partial * width;
    std::fill_n(sums, (chunk.bin_end - chunk.bin_begin) * width, acc_t(0));
    int64_t rank = chunk.rank;
    for (int64_t t = chunk.begin; t < chunk.end; ++t) {
      if (!layout.member(sequence, t)) {
        row(sequence, t, static_cast<acc_t*>(nullptr));
        continue;
      }
      const int64_t at = layout.is_slot(sequence, t) ? t - sequence.first : rank++;
      const Bins bins = bins_of(at, sequence.members, layout.slots);
      acc_t* sum = sums + (bins.begin - chunk.bin_begin) * width;
      const T* pooled = row(sequence, t, sum);
      for (int64_t bin = bins.begin + 1; bin < bins.end; ++bin) add_row(pooled, sum += width, width);
    }
  };

  const auto finish = [&](const Sequence& sequence, int64_t index, acc_t* value) {
    for (int64_t k = 0; k < layout.slots; ++k) {
      read(prompt, index, k, width, value);
      if (sequence.members > 0) {
        acc_t* sum = nullptr;
        for (int64_t c = sequence.chunks_begin; c < sequence.chunks_end; ++c) {
          if (k < chunks[c].bin_begin || k >= chunks[c].bin_end) continue;
          acc_t* part = partials.get() + (chunks[c].partial + k - chunks[c].bin_begin) * width;
          if (sum == nullptr) {
            sum = part;
          } else {
            add_row(part, sum, width);
          }
        }
        const Vector<acc_t> size(static_cast<acc_t>(bin_size(k, sequence.members, layout.slots)));
        along<acc_t>(width, [&](int64_t d, auto n) {
          store(value + d, load(value + d, n) + load(sum + d, n) / size, n);
        });
      }
      slot(sequence, k, static_cast<const acc_t*>(value));
    }
  };

  parallel_for(plan.chunks.size(), chunk_grain(plan, width), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<acc_t[]> value(new acc_t[width]);
    for (int64_t c = begin; c < end; ++c) {
      const int64_t index = chunks[c].sequence;
      const Sequence& sequence = sequences[index];
      sum_chunk(sequence, chunks[c]);
      const bool last = unfinished[index].fetch_sub(1, std::memory_order_acq_rel) == 1;
      if (last && sequence.first >= 0) finish(sequence, index, value.get());
    }
  });
}

// Calls slot_grad(sequence, k, g) for the gradient of every slot, which goes to grad_slots [B, K, D], and, unless
// `slots_only`, row_grad(sequence, t, spread) for every row of the input, where spread is the part that the pools hand
// it, or null. A row that is a slot has nothing but its spread.
template <typename acc_t, typename SlotGrad, typename RowGrad>
void spread_rows(
    const Plan& plan, int64_t width, acc_t* grad_slots, bool slots_only, SlotGrad&& slot_grad, RowGrad&& row_grad) {
  const Layout& layout = plan.layout;
  const int64_t slots = layout.slots;
  const Sequence* sequences = plan.sequences.data();
  const Chunk* chunks = plan.chunks.data();

  const auto form = [&](const Sequence& sequence, acc_t* gradients) {
    if (sequence.first < 0) {
      std::fill_n(gradients, slots * width, acc_t(0));
      return;
    }
    for (int64_t k = 0; k < slots; ++k) slot_grad(sequence, k, gradients + k * width);
  };

  if (slots_only) {
    const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, slots * width));
    parallel_for(layout.batch, grain, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) form(sequences[b], grad_slots + b * slots * width);
    });
    return;
  }

  parallel_for(plan.chunks.size(), chunk_grain(plan, width), [&](int64_t begin, int64_t end) {
    // A thread forms a sequence's slot gradients itself when it comes to it: cheaper than waiting for another's.
    const std::unique_ptr<acc_t[]> gradients(new acc_t[(slots + 1) * width]);
    acc_t* const sum = gradients.get() + slots * width;
    int64_t formed = -1;
    for (int64_t c = begin; c < end; ++c) {
      const Chunk& chunk = chunks[c];
      const Sequence& sequence = sequences[chunk.sequence];
      const bool writes = c == sequence.chunks_begin && chunk.sequence < layout.batch;
      if (formed != chunk.sequence && (writes || sequence.members > 0)) {
        form(sequence, gradients.get());
        if (writes) std::copy_n(gradients.get(), slots * width, grad_slots + chunk.sequence * slots * width);
        for (int64_t k = 0; k < slots && sequence.members > 0; ++k) {
          acc_t* gradient = gradients.get() + k * width;
          const Vector<acc_t> size(static_cast<acc_t>(bin_size(k, sequence.members, slots)));
          along<acc_t>(width, [&](int64_t d, auto n) { store(gradient + d, load(gradient + d, n) / size, n); });
        }
        formed = chunk.sequence;
      }
      int64_t rank = chunk.rank;
      for (int64_t t = chunk.begin; t < chunk.end; ++t) {
        if (!layout.member(sequence, t)) {
          row_grad(sequence, t, static_cast<const acc_t*>(nullptr));
          continue;
        }
        const int64_t at = layout.is_slot(sequence, t) ? t - sequence.first : rank++;
        const Bins bins = bins_of(at, sequence.members, slots);
        const acc_t* spread = gradients.get() + bins.begin * width;
        if (bins.end - bins.begin > 1) {
          std::copy_n(spread, width, sum);
          for (int64_t bin = bins.begin + 1; bin < bins.end; ++bin) {
            add_row(gradients.get() + bin * width, sum, width);
          }
          spread = sum;
        }
        row_grad(sequence, t, spread);
      }
    }
  });
}

// The gradient of a row that is nothing but the pool's.
template <typename T, typename acc_t = Accumulator<T>>
inline void write_spread(T* to, const acc_t* spread, int64_t width) {
  if (spread == nullptr) {
    std::memset(static_cast<void*>(to), 0, width * sizeof(T));
  } else {
    along<acc_t>(width, [&](int64_t d, auto n) { store(to + d, load(spread + d, n), n); });
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace capt
