#pragma once

#include "dispatch.h"
#include "layout.h"

namespace capt {

// [rows, heads, width], elements of a head being neighbours. Strides are in elements.
struct HeadRows {
  void* data = nullptr;
  int64_t row_stride = 0, head_stride = 0;

  explicit operator bool() const { return data != nullptr; }

  template <typename T>
  T* at(int64_t row, int64_t head) const {
    return static_cast<T*>(data) + row * row_stride + head * head_stride;
  }
};

// Of the weights: each is dropped with probability 1 - 1 / rescale, by capt_kernels/attention/dropout.py.
struct Dropout {
  uint64_t seed = 0;
  int32_t threshold = 0;  // of the signed words of weights that are kept
  double rescale = 1;     // of these weights; 1 where none is dropped

  explicit operator bool() const { return rescale != 1; }
};

// What forward and backward share. Query i of n stands at key position i + m - n of m keys.
struct Attention {
  ScalarType dtype;
  int64_t batch, rows, key_rows, heads, key_heads, width;
  const int32_t* cu_seqlens;    // [batch + 1]
  const int32_t* cu_seqlens_k;  // [batch + 1]
  bool causal;
  int64_t window;  // keys that a query sees up to its own; 0 for all
  double scale;
  Dropout dropout;
  Vectors bias;   // [heads, 2 * reach - 1], or null data
  int64_t reach;  // the longest sequence that the bias serves
  HeadRows q, k, v;
};

// The log-sum-exp is in base 2 and [heads, rows], as the dtype that sums are formed in.
struct AttentionForward : Attention {
  HeadRows out;
  void* lse;
};

struct AttentionBackward : Attention {
  HeadRows grad, out;
  const void* lse;
  HeadRows grad_q, grad_k, grad_v;  // null when not asked for; those of k and v come together
};

CAPT_DECLARE_KERNEL(attention_kernel, AttentionForward)
CAPT_DECLARE_KERNEL(attention_backward_kernel, AttentionBackward)

}  // namespace capt
