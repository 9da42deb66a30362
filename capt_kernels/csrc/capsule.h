// What the capsule kernels take. Rows that are null were not given, or are not asked for.
#pragma once

#include "dispatch.h"
#include "layout.h"

namespace capt {

// capsule_prepend and capsule_refresh: where the input holds the slots already, they are overwritten.
struct CapsuleForward {
  const Plan& plan;
  ScalarType dtype;
  int64_t width;
  Rows hidden;
  Vectors prompt;
  Rows out;
};

struct CapsuleBackward {
  const Plan& plan;
  ScalarType dtype;
  int64_t width;
  Rows grad;         // of the output
  Rows grad_hidden;
  void* grad_slots;  // [B, K, D]
};

struct AddRMSNormForward {
  const Plan& plan;
  ScalarType dtype;
  int64_t width;
  Rows branch;
  Rows residual;
  Vectors weight;
  double eps;
  Vectors prompt;
  Rows normed;
  Rows total;
  Rows rstd;         // one element a row
};

struct AddRMSNormBackward {
  const Plan& plan;
  ScalarType dtype;
  int64_t width;
  Rows grad_normed;
  Rows grad_total;
  Rows total;
  Vectors weight;
  Rows rstd;
  Rows grad;         // of both terms of the sum
  void* grad_slots;  // [B, K, D]
};

CAPT_DECLARE_KERNEL(capsule_forward_kernel, CapsuleForward)
CAPT_DECLARE_KERNEL(capsule_backward_kernel, CapsuleBackward)
CAPT_DECLARE_KERNEL(add_rms_norm_forward_kernel, AddRMSNormForward)
CAPT_DECLARE_KERNEL(add_rms_norm_backward_kernel, AddRMSNormBackward)

}  // namespace capt
