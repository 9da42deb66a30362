#include "layout.h"

#include <algorithm>

namespace capt {
namespace {

constexpr int64_t kChunkRows = 32;

Sequence locate(const Layout& layout, int64_t index) {
  Sequence sequence{};
  if (layout.cu_seqlens == nullptr) {
    sequence.batch = index;
    sequence.length = layout.rows;
  } else {
    // Offsets are checked before they come here where that is free; a wrong one must not leave the rows given.
    const auto offset = [&](int64_t i) {
      return std::clamp<int64_t>(layout.cu_seqlens[i * layout.cu_stride], 0, layout.rows);
    };
    sequence.begin = offset(index);
    sequence.length = std::max<int64_t>((index < layout.batch ? offset(index + 1) : layout.rows) - sequence.begin, 0);
  }
  sequence.first = -1;
  const int64_t real = sequence.length - (layout.held ? layout.slots : 0);
  const bool trailing = index == layout.batch;
  if (layout.slots > 0 && real >= 0 && !trailing) sequence.first = std::min(real, layout.lead);
  if (!layout.held) {
    sequence.shift = trailing ? 0 : layout.slots;
    sequence.out = sequence.begin + (layout.cu_seqlens == nullptr ? 0 : index * layout.slots);
  } else {
    sequence.out = sequence.begin;
  }
  return sequence;
}

int64_t count_members(const Layout& layout, Sequence sequence) {
  if (!layout.pool || sequence.first < 0) return 0;
  if (layout.pooled == nullptr) return sequence.length;
  sequence.members = 1;  // so that the mask is looked at
  int64_t count = 0;
  for (int64_t t = 0; t < sequence.length; ++t) count += layout.member(sequence, t);
  return count;
}

}  // namespace

Plan::Plan(const Layout& layout) : layout(layout) {
  const int64_t count = layout.batch + (layout.cu_seqlens != nullptr ? 1 : 0);
  sequences.reserve(count);
  chunks.reserve(count + layout.rows / kChunkRows * (layout.cu_seqlens != nullptr ? 1 : layout.batch));
  for (int64_t index = 0; index < count; ++index) {
    Sequence sequence = locate(layout, index);
    sequence.members = count_members(layout, sequence);
    int64_t rank = layout.held ? layout.slots : 0;
    int64_t begin = 0;
    sequence.chunks_begin = static_cast<int64_t>(chunks.size());
    do {  // a sequence without rows has a chunk too: its slots are still to be written
      Chunk chunk{index, begin, std::min(begin + kChunkRows, sequence.length), rank, 0, 0, partials};
      if (layout.slots == 1) {
        chunk.bin_end = sequence.members > 0;
      } else if (sequence.members > 0) {
        chunk.bin_begin = layout.slots;
        for (int64_t t = chunk.begin; t < chunk.end; ++t) {
          if (!layout.member(sequence, t)) continue;
          const int64_t at = layout.is_slot(sequence, t) ? t - sequence.first : rank++;
          const Bins bins = bins_of(at, sequence.members, layout.slots);
          chunk.bin_begin = std::min(chunk.bin_begin, bins.begin);
          chunk.bin_end = std::max(chunk.bin_end, bins.end);
        }
        chunk.bin_begin = std::min(chunk.bin_begin, chunk.bin_end);
      }
      partials += chunk.bin_end - chunk.bin_begin;
      chunks.push_back(chunk);
      begin += kChunkRows;
    } while (begin < sequence.length);
    sequence.chunks_end = static_cast<int64_t>(chunks.size());
    sequences.push_back(sequence);
  }
}

}  // namespace capt
