#pragma once

#include "dispatch.h"
#include "layout.h"

namespace capt {

enum class Activation { SiLU, GELU, GELUTanh, ReLU };

struct GatedForward {
  ScalarType dtype;
  Activation kind;
  int64_t batch, rows, width;
  Rows gate, up, out;
};

struct GatedBackward {
  ScalarType dtype;
  Activation kind;
  int64_t batch, rows, width;
  Rows grad, gate, up;
  Rows grad_gate, grad_up;  // null when not asked for
};

CAPT_DECLARE_KERNEL(gated_activation_kernel, GatedForward)
CAPT_DECLARE_KERNEL(gated_activation_backward_kernel, GatedBackward)

}  // namespace capt
