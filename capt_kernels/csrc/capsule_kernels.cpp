// The capsule ops, as what they do with a row and with a slot; pool.h walks over them.
#include "capsule.h"

#include <cmath>

#include "pool.h"

namespace capt {
namespace CPU_CAPABILITY {
namespace {

template <typename T>
void capsule_forward_typed(const CapsuleForward& op) {
  using acc_t = Accumulator<T>;
  const auto row = [&](const Sequence& sequence, int64_t t, acc_t* sum) -> const T* {
    const T* from = op.hidden.at<const T>(sequence.batch, sequence.begin + t);
    T* to = op.out.at<T>(sequence.batch, sequence.out_row(t));
    std::memcpy(static_cast<void*>(to), from, op.width * sizeof(T));
    if (sum != nullptr) add_row(from, sum, op.width);
    return from;
  };
  const auto slot = [&](const Sequence& sequence, int64_t k, const acc_t* value) {
    T* to = op.out.at<T>(sequence.batch, sequence.slot_row(k));
    along<acc_t>(op.width, [&](int64_t d, auto n) { store(to + d, load(value + d, n), n); });
  };
  pool_rows<T>(op.plan, op.prompt, op.width, row, slot);
}

template <typename T>
void capsule_backward_typed(const CapsuleBackward& op) {
  using acc_t = Accumulator<T>;
  const auto slot_grad = [&](const Sequence& sequence, int64_t k, acc_t* gradient) {
    const T* from = op.grad.at<const T>(sequence.batch, sequence.slot_row(k));
    along<acc_t>(op.width, [&](int64_t d, auto n) { store(gradient + d, load(from + d, n), n); });
  };
  const auto row_grad = [&](const Sequence& sequence, int64_t t, const acc_t* spread) {
    T* to = op.grad_hidden.at<T>(sequence.batch, sequence.begin + t);
    if (op.plan.layout.is_slot(sequence, t)) return write_spread(to, spread, op.width);
    const T* from = op.grad.at<const T>(sequence.batch, sequence.out_row(t));
    if (spread == nullptr) {
      std::memcpy(static_cast<void*>(to), from, op.width * sizeof(T));
    } else {
      along<acc_t>(op.width, [&](int64_t d, auto n) { store(to + d, load(from + d, n) + load(spread + d, n), n); });
    }
  };
  spread_rows(op.plan, op.width, static_cast<acc_t*>(op.grad_slots), !op.grad_hidden, slot_grad, row_grad);
}

template <typename T, typename acc_t = Accumulator<T>>
inline acc_t normalise(const T* x, acc_t squares, double eps, const acc_t* weight, T* to, int64_t width) {
  const acc_t rstd = acc_t(1) / std::sqrt(squares / static_cast<acc_t>(width) + static_cast<acc_t>(eps));
  const Vector<acc_t> scale(rstd);
  along<acc_t>(width, [&](int64_t d, auto n) { store(to + d, load(x + d, n) * scale * load(weight + d, n), n); });
  return rstd;
}

template <typename T, bool kBranch, bool kTotal>
void add_rms_norm_typed(const AddRMSNormForward& op) {
  using acc_t = Accumulator<T>;
  const int64_t width = op.width;
  const std::unique_ptr<acc_t[]> weight(new acc_t[width]);
  read(op.weight, 0, 0, width, weight.get());

  const auto row = [&](const Sequence& sequence, int64_t t, acc_t* sum) -> const T* {
    const int64_t batch = sequence.batch, at = sequence.begin + t;
    const T* residual = op.residual.at<const T>(batch, at);
    const T* branch = kBranch ? op.branch.at<const T>(batch, at) : nullptr;
    T* total = kTotal ? op.total.at<T>(batch, at) : nullptr;
    Vector<acc_t> squares(acc_t(0));
    with_flag(sum != nullptr, [&](auto pooled) {
      along<acc_t>(width, [&](int64_t d, auto n) {
        Vector<acc_t> x = load(residual + d, n);
        if constexpr (kBranch) x = rounded<T>(x + load(branch + d, n));
        if constexpr (kTotal) store(total + d, x, n);
        if constexpr (pooled.value) store(sum + d, load(sum + d, n) + x, n);
        squares = at::vec::fmadd(x, x, squares);
      });
    });
    const T* x = kTotal ? total : residual;
    *op.rstd.at<acc_t>(batch, at) =
        normalise(x, horizontal_sum(squares), op.eps, weight.get(), op.normed.at<T>(batch, at), width);
    return x;
  };
  const auto slot = [&](const Sequence& sequence, int64_t k, const acc_t* value) {
    const int64_t batch = sequence.batch, at = sequence.slot_row(k);
    T* total = op.total.at<T>(batch, at);
    Vector<acc_t> squares(acc_t(0));
    along<acc_t>(width, [&](int64_t d, auto n) {
      const Vector<acc_t> x = rounded<T>(load(value + d, n));
      store(total + d, x, n);
      squares = at::vec::fmadd(x, x, squares);
    });
    *op.rstd.at<acc_t>(batch, at) = normalise(
        static_cast<const T*>(total), horizontal_sum(squares), op.eps, weight.get(), op.normed.at<T>(batch, at), width);
  };
  pool_rows<T>(op.plan, op.prompt, width, row, slot);
}

template <typename T, bool kNormed, bool kTotal>
void add_rms_norm_backward_typed(const AddRMSNormBackward& op) {
  using acc_t = Accumulator<T>;
  const int64_t width = op.width;
  const std::unique_ptr<acc_t[]> weight(new acc_t[width]);
  if (kNormed) read(op.weight, 0, 0, width, weight.get());

  // The gradient of row `at` of the sum: that of the norm's input, and what came along the residual stream.
  const auto gradient = [&](int64_t batch, int64_t at, auto* to, const acc_t* spread) {
    const T* grad_normed = kNormed ? op.grad_normed.at<const T>(batch, at) : nullptr;
    const T* grad_total = kTotal ? op.grad_total.at<const T>(batch, at) : nullptr;
    const T* total = op.total.at<const T>(batch, at);
    Vector<acc_t> scale, along_x;
    if constexpr (kNormed) {
      Vector<acc_t> product(acc_t(0));
      along<acc_t>(width, [&](int64_t d, auto n) {
        product = at::vec::fmadd(load(grad_normed + d, n) * load(weight.get() + d, n), load(total + d, n), product);
      });
      const acc_t rstd = *op.rstd.at<const acc_t>(batch, at);
      scale = Vector<acc_t>(rstd);
      along_x = Vector<acc_t>(-rstd * rstd * rstd * horizontal_sum(product) / static_cast<acc_t>(width));
    }
    with_flag(spread != nullptr, [&](auto pooled) {
      along<acc_t>(width, [&](int64_t d, auto n) {
        Vector<acc_t> g(acc_t(0));
        if constexpr (kTotal) g = load(grad_total + d, n);
        if constexpr (pooled.value) g = g + load(spread + d, n);
        if constexpr (kNormed) {
          g = at::vec::fmadd(load(grad_normed + d, n) * load(weight.get() + d, n), scale, g);
          g = at::vec::fmadd(load(total + d, n), along_x, g);
        }
        store(to + d, g, n);
      });
    });
  };
  const auto slot_grad = [&](const Sequence& sequence, int64_t k, acc_t* to) {
    gradient(sequence.batch, sequence.slot_row(k), to, nullptr);
  };
  const auto row_grad = [&](const Sequence& sequence, int64_t t, const acc_t* spread) {
    const int64_t at = sequence.begin + t;
    T* to = op.grad.at<T>(sequence.batch, at);
    if (op.plan.layout.is_slot(sequence, t)) return write_spread(to, spread, width);
    gradient(sequence.batch, at, to, spread);
  };
  spread_rows(op.plan, width, static_cast<acc_t*>(op.grad_slots), !op.grad, slot_grad, row_grad);
}

}  // namespace

void capsule_forward_kernel(const CapsuleForward& op) {
  with_type(op.dtype, [&](auto type) { capsule_forward_typed<typename decltype(type)::type>(op); });
}

void capsule_backward_kernel(const CapsuleBackward& op) {
  with_type(op.dtype, [&](auto type) { capsule_backward_typed<typename decltype(type)::type>(op); });
}

void add_rms_norm_forward_kernel(const AddRMSNormForward& op) {
  with_type(op.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    if (op.branch) {
      add_rms_norm_typed<T, true, true>(op);
    } else if (op.total) {
      add_rms_norm_typed<T, false, true>(op);
    } else {
      add_rms_norm_typed<T, false, false>(op);
    }
  });
}

void add_rms_norm_backward_kernel(const AddRMSNormBackward& op) {
  with_type(op.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    with_flag(bool(op.grad_normed), [&](auto normed) {
      with_flag(bool(op.grad_total), [&](auto total) {
        add_rms_norm_backward_typed<T, normed.value, total.value>(op);
      });
    });
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace capt
