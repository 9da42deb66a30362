// Registers attention for the CPU key.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "tensors.h"

namespace capt {
namespace {

HeadRows heads_of(const Tensor& tensor) {
  return {const_cast<void*>(tensor.const_data_ptr()), tensor.stride(0), tensor.stride(1)};
}

// Offsets of as many sequences as the queries' are; they may be the queries' own.
Tensor offsets_of(const char* name, const Tensor& offsets, int64_t count) {
  check_dim(name, offsets, 1, 1);
  check_dtype(name, offsets, ScalarType::Int);
  check_sizes(name, offsets, {count});
  return torch::stable::contiguous(offsets);
}

Dropout dropout_of(double p, const std::optional<Tensor>& seed) {
  STD_TORCH_CHECK(p >= 0 && p < 1, "dropout_p must be from 0 up to, but not, 1, got ", p);
  STD_TORCH_CHECK((p > 0) == seed.has_value(), "seed must be given where dropout_p is not 0, and only there");
  if (!seed) return {};
  check_sizes("seed", *seed, {});
  check_dtype("seed", *seed, ScalarType::Long);
  const double words = std::min(std::nearbyint(std::ldexp(p, 32)), std::ldexp(1.0, 32) - 1);
  const int64_t threshold = static_cast<int64_t>(words) + std::numeric_limits<int32_t>::min();
  return {static_cast<uint64_t>(*static_cast<const int64_t*>(seed->const_data_ptr())), static_cast<int32_t>(threshold),
          1 / (1 - p)};
}

// A call's tensors, laid out as the kernels take them and kept until these are done.
struct Call {
  Tensor q, k, v, cu_seqlens, cu_seqlens_k;
  std::optional<Tensor> bias;

  Call(const Tensor& given_q, const Tensor& given_k, const Tensor& given_v, const Tensor& offsets,
       const std::optional<Tensor>& offsets_k, const std::optional<Tensor>& bias_table)
      : q(given_q), k(given_k), v(given_v) {
    check_floating("q", q);
    check_dim("q", q, 3, 3);
    check_dim("k", k, 3, 3);
    check_dtype("k", k, q.scalar_type());
    check_like("v", v, k);
    check_sizes("k", k, {k.size(0), k.size(1), q.size(2)});
    STD_TORCH_CHECK(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "q's heads must be a multiple of k's");
    check_dim("cu_seqlens", offsets, 1, 1);
    STD_TORCH_CHECK(offsets.numel() > 0, "cu_seqlens must have shape [B+1], got []");
    STD_TORCH_CHECK(offsets_k || k.size(0) == q.size(0), "k must have q's rows without cu_seqlens_k");
    cu_seqlens = offsets_of("cu_seqlens", offsets, offsets.numel());
    cu_seqlens_k = offsets_k ? offsets_of("cu_seqlens_k", *offsets_k, offsets.numel()) : cu_seqlens;
    if (bias_table) {
      check_floating("bias_table", *bias_table);
      check_dim("bias_table", *bias_table, 2, 2);
      check_sizes("bias_table", *bias_table, {q.size(1), bias_table->size(1)});
      STD_TORCH_CHECK(
          bias_table->size(1) % 2 == 1, "bias_table must have shape [H, 2*Tmax-1], got ", spelled(sizes_of(*bias_table)));
      bias = *bias_table;
    }
    for (Tensor* rows : {&q, &k, &v}) *rows = with_dense_rows(*rows);
  }

  Attention describe(bool causal, double scale, std::optional<int64_t> window, const Dropout& dropout) const {
    const int32_t* offsets = static_cast<const int32_t*>(cu_seqlens.const_data_ptr());
    const int32_t* offsets_k = static_cast<const int32_t*>(cu_seqlens_k.const_data_ptr());
    Attention op{q.scalar_type(), cu_seqlens.numel() - 1, q.size(0), k.size(0), q.size(1), k.size(1), q.size(2),
                 offsets, offsets_k, causal, window.value_or(0), scale, dropout, {}, 0,
                 heads_of(q), heads_of(k), heads_of(v)};
    if (!bias) return op;
    op.bias = {bias->const_data_ptr(), bias->scalar_type(), {0, bias->stride(0), bias->stride(1)}};
    op.reach = (bias->size(1) + 1) / 2;
    for (int64_t i = 0; i < op.batch; ++i) {
      // Offsets may be anything, and in 32 bits a difference of two would wrap.
      const auto length = [&](const int32_t* given) { return int64_t(given[i + 1]) - given[i]; };
      const int64_t longest = std::max(length(offsets), length(offsets_k));
      STD_TORCH_CHECK(longest <= op.reach, "bias_table must reach Tmax = ", longest, ", got one for ", op.reach);
    }
    return op;
  }
};

std::tuple<Tensor, Tensor> attention_forward(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
    const std::optional<Tensor>& cu_seqlens_k, bool causal, double scale, const std::optional<Tensor>& bias_table,
    std::optional<int64_t> window, double dropout_p, const std::optional<Tensor>& seed) {
  const Call call(q, k, v, cu_seqlens, cu_seqlens_k, bias_table);
  Tensor out = empty(sizes_of(q), q.scalar_type());
  Tensor lse = empty({q.size(1), q.size(0)}, accumulator(q.scalar_type()));
  attention_kernel(
      {call.describe(causal, scale, window, dropout_of(dropout_p, seed)), heads_of(out), lse.mutable_data_ptr()});
  return {out, lse};
}

std::tuple<Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
    const Tensor& cu_seqlens, const std::optional<Tensor>& cu_seqlens_k, bool causal, double scale,
    const std::optional<Tensor>& bias_table, std::optional<int64_t> window, bool need_q, bool need_keys,
    double dropout_p, const std::optional<Tensor>& seed) {
  const Call call(q, k, v, cu_seqlens, cu_seqlens_k, bias_table);
  check_like("grad", grad, q);
  check_like("out", out, q);
  check_sizes("lse", lse, {q.size(1), q.size(0)});
  check_dtype("lse", lse, accumulator(q.scalar_type()));
  const Tensor grads = with_dense_rows(grad), outs = with_dense_rows(out), sums = torch::stable::contiguous(lse);
  const std::vector<int64_t> none = {0};
  Tensor grad_q = empty(need_q ? sizes_of(q) : none, q.scalar_type());
  Tensor grad_k = empty(need_keys ? sizes_of(k) : none, q.scalar_type());
  Tensor grad_v = empty(need_keys ? sizes_of(v) : none, q.scalar_type());
  attention_backward_kernel({call.describe(causal, scale, window, dropout_of(dropout_p, seed)), heads_of(grads),
                             heads_of(outs), sums.const_data_ptr(), need_q ? heads_of(grad_q) : HeadRows{},
                             need_keys ? heads_of(grad_k) : HeadRows{}, need_keys ? heads_of(grad_v) : HeadRows{}});
  return {grad_q, grad_k, grad_v};
}

}  // namespace
}  // namespace capt

STABLE_TORCH_LIBRARY_IMPL(capt_kernels, CPU, library) {
  library.impl("attention_forward", TORCH_BOX(&capt::attention_forward));
  library.impl("attention_backward", TORCH_BOX(&capt::attention_backward));
}
