#pragma once

#include "dispatch.h"
#include "layout.h"

namespace capt {

// Heads of `count` at every position (b, t): element (b, t, h, :) is at b*s0 + t*s1 + h*s2.
struct Heads {
  const void* from = nullptr;
  void* to = nullptr;  // contiguous [batch, rows, count, width]
  int64_t count = 0;
  int64_t strides[3] = {0, 0, 0};
};

struct Rotary {
  ScalarType dtype;
  int64_t batch, rows, width;
  Heads heads[2];      // queries and keys; one that is not given has no heads
  Vectors cos, sin;    // [batch, rows, width]
  bool transposed;     // the backward of a rotation
};

CAPT_DECLARE_KERNEL(rotary_kernel, Rotary)

}  // namespace capt
