// act(gate) * up and its backward, which recomputes the activation from the gate.
//
// at::vec takes exp and erf from SLEEF, which libtorch_cpu exports for the code that torch.compile generates.
#include "glu.h"

#include <algorithm>

#include "vector.h"

namespace capt {
namespace CPU_CAPABILITY {
namespace {

// An activation and its derivative at one point.
template <typename acc_t>
struct Slope {
  Vector<acc_t> value, derivative;
};

template <typename acc_t>
inline Vector<acc_t> constant(double value) {
  return Vector<acc_t>(static_cast<acc_t>(value));
}

template <typename acc_t>
inline Vector<acc_t> sigmoid(const Vector<acc_t>& x) {
  const Vector<acc_t> one = constant<acc_t>(1);
  return one / (one + (constant<acc_t>(0) - x).exp());
}

struct SiLU {
  template <typename acc_t>
  static Vector<acc_t> value(const Vector<acc_t>& x) {
    return x * sigmoid(x);
  }

  template <typename acc_t>
  static Slope<acc_t> slope(const Vector<acc_t>& x) {
    const Vector<acc_t> s = sigmoid(x);
    return {x * s, s + x * s * (constant<acc_t>(1) - s)};
  }
};

struct GELU {
  template <typename acc_t>
  static Vector<acc_t> distribution(const Vector<acc_t>& x) {
    return constant<acc_t>(0.5) * (constant<acc_t>(1) + (x * constant<acc_t>(0.70710678118654752440)).erf());
  }

  template <typename acc_t>
  static Vector<acc_t> value(const Vector<acc_t>& x) {
    return x * distribution(x);
  }

  template <typename acc_t>
  static Slope<acc_t> slope(const Vector<acc_t>& x) {
    const Vector<acc_t> density = constant<acc_t>(0.39894228040143267794) * (constant<acc_t>(-0.5) * x * x).exp();
    const Vector<acc_t> area = distribution(x);
    return {x * area, area + x * density};
  }
};

// (1 + tanh(u)) / 2 is the sigmoid of 2u, with u = sqrt(2/pi) (x + 0.044715 x^3).
struct GELUTanh {
  template <typename acc_t>
  static Vector<acc_t> gate(const Vector<acc_t>& x) {
    const Vector<acc_t> inner = x + constant<acc_t>(0.044715) * x * x * x;
    return sigmoid(constant<acc_t>(2 * 0.79788456080286535588) * inner);
  }

  template <typename acc_t>
  static Vector<acc_t> value(const Vector<acc_t>& x) {
    return x * gate(x);
  }

  template <typename acc_t>
  static Slope<acc_t> slope(const Vector<acc_t>& x) {
    const Vector<acc_t> s = gate(x);
    const Vector<acc_t> inner_slope = constant<acc_t>(1) + constant<acc_t>(3 * 0.044715) * x * x;
    const Vector<acc_t> inner = constant<acc_t>(2 * 0.79788456080286535588) * inner_slope;
    return {x * s, s + x * s * (constant<acc_t>(1) - s) * inner};
  }
};

struct ReLU {
  template <typename acc_t>
  static Vector<acc_t> value(const Vector<acc_t>& x) {
    return at::vec::maximum(x, constant<acc_t>(0));
  }

  template <typename acc_t>
  static Slope<acc_t> slope(const Vector<acc_t>& x) {
    return {value(x), Vector<acc_t>::blendv(constant<acc_t>(1), constant<acc_t>(0), x <= constant<acc_t>(0))};
  }
};

template <typename Body>
void with_activation(Activation kind, Body&& body) {
  switch (kind) {
    case Activation::SiLU: return body(SiLU{});
    case Activation::GELU: return body(GELU{});
    case Activation::GELUTanh: return body(GELUTanh{});
    case Activation::ReLU: return body(ReLU{});
  }
}

// Calls body(batch, row) for every row. An exponential costs as much as several loads, hence the smaller grain.
template <typename Body>
void each_row(int64_t batch, int64_t rows, int64_t width, Body&& body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / 4 / std::max<int64_t>(1, width));
  parallel_for(batch * rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i / rows, i % rows);
  });
}

template <typename T, typename Kind>
void forward_typed(const GatedForward& op) {
  using acc_t = Accumulator<T>;
  each_row(op.batch, op.rows, op.width, [&](int64_t b, int64_t t) {
    const T *gate = op.gate.at<const T>(b, t), *up = op.up.at<const T>(b, t);
    T* out = op.out.at<T>(b, t);
    along<acc_t>(op.width, [&](int64_t d, auto n) {
      store(out + d, Kind::value(load(gate + d, n)) * load(up + d, n), n);
    });
  });
}

template <typename T, typename Kind, bool kGate, bool kUp>
void backward_typed(const GatedBackward& op) {
  using acc_t = Accumulator<T>;
  each_row(op.batch, op.rows, op.width, [&](int64_t b, int64_t t) {
    const T *grad = op.grad.at<const T>(b, t), *gate = op.gate.at<const T>(b, t), *up = op.up.at<const T>(b, t);
    T* grad_gate = kGate ? op.grad_gate.at<T>(b, t) : nullptr;
    T* grad_up = kUp ? op.grad_up.at<T>(b, t) : nullptr;
    along<acc_t>(op.width, [&](int64_t d, auto n) {
      const Vector<acc_t> g = load(grad + d, n);
      if constexpr (kGate) {
        const auto slope = Kind::slope(load(gate + d, n));
        store(grad_gate + d, g * load(up + d, n) * slope.derivative, n);
        if constexpr (kUp) store(grad_up + d, g * slope.value, n);
      } else {
        store(grad_up + d, g * Kind::value(load(gate + d, n)), n);
      }
    });
  });
}

}  // namespace

void gated_activation_kernel(const GatedForward& op) {
  with_type(op.dtype, [&](auto type) {
    with_activation(op.kind, [&](auto kind) { forward_typed<typename decltype(type)::type, decltype(kind)>(op); });
  });
}

void gated_activation_backward_kernel(const GatedBackward& op) {
  with_type(op.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_activation(op.kind, [&](auto kind) {
      if (op.grad_gate && op.grad_up) {
        backward_typed<T, decltype(kind), true, true>(op);
      } else if (op.grad_gate) {
        backward_typed<T, decltype(kind), true, false>(op);
      } else if (op.grad_up) {
        backward_typed<T, decltype(kind), false, true>(op);
      }
    });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace capt
