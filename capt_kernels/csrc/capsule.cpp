// Registers the capsule ops for the CPU key. Schemas, and what each argument means, are in capt_kernels/library.py.
#include "capsule.h"

#include <tuple>
#include <vector>

#include "tensors.h"

namespace capt {
namespace {

using OptionalTensor = std::optional<Tensor>;

// The part of a layout that every op is told in the same way. Without slots there is nothing to tell.
Layout layout_of(
    const Shape& shape, int64_t slots, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens, int64_t lead,
    bool pool) {
  Layout layout;
  layout.batch = shape.batch;
  layout.rows = shape.rows;
  layout.slots = slots;
  layout.lead = lead;
  layout.pool = pool && slots > 0;
  if (cu_seqlens) {
    STD_TORCH_CHECK(cu_seqlens->scalar_type() == ScalarType::Int, "cu_seqlens must be int32");
    layout.batch = cu_seqlens->size(0) - 1;
    layout.cu_seqlens = static_cast<const int32_t*>(cu_seqlens->const_data_ptr());
    layout.cu_stride = cu_seqlens->stride(0);
  }
  if (pooled && layout.pool) {
    STD_TORCH_CHECK(pooled->scalar_type() == ScalarType::Bool, "pooled must be bool");
    layout.pooled = static_cast<const bool*>(pooled->const_data_ptr());
    layout.pooled_row_stride = pooled->stride(pooled->dim() - 1);
    layout.pooled_batch_stride = pooled->dim() == 2 ? pooled->stride(0) : 0;
  }
  return layout;
}

Vectors prompt_of(const Tensor& prompt) {
  return {prompt.const_data_ptr(), prompt.scalar_type(), {prompt.stride(0), prompt.stride(1), prompt.stride(2)}};
}

Vectors weight_of(const Tensor& weight) {
  return {weight.const_data_ptr(), weight.scalar_type(), {0, 0, weight.stride(0)}};
}

// The shape of `tensor` with `more` rows.
std::vector<int64_t> with_rows(const Tensor& tensor, int64_t more) {
  std::vector<int64_t> sizes = sizes_of(tensor);
  sizes[sizes.size() - 2] += more;
  return sizes;
}

Tensor slot_gradients(const Tensor& like, int64_t batch, int64_t slots, int64_t width) {
  return empty({batch, slots, width}, accumulator(like.scalar_type()));
}

Tensor capsule_forward(
    const Tensor& hidden, const Tensor& prompt, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens,
    int64_t lead, bool pool, bool held) {
  const Tensor rows = with_dense_rows(hidden);
  Layout layout = layout_of(shape_of(rows), prompt.size(1), pooled, cu_seqlens, lead, pool);
  layout.held = held;
  const int64_t more = held ? 0 : layout.slots * (cu_seqlens ? layout.batch : 1);
  Tensor out = empty(with_rows(rows, more), rows.scalar_type());
  const Plan plan(layout);
  capsule_forward_kernel(CapsuleForward{
      plan, rows.scalar_type(), rows.size(rows.dim() - 1), rows_of(rows), prompt_of(prompt), rows_of(out)});
  return out;
}

std::tuple<Tensor, Tensor> capsule_backward(
    const Tensor& grad, int64_t slots, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens, int64_t lead,
    bool pool, bool need_hidden, bool held) {
  const Tensor rows = with_dense_rows(grad);
  Shape shape = shape_of(rows);
  const int64_t gained = held ? 0 : slots * (cu_seqlens ? cu_seqlens->size(0) - 1 : 1);
  shape.rows -= gained;
  // What the pool hands to the rows is not asked for, so neither is the pool.
  Layout layout = layout_of(shape, slots, pooled, cu_seqlens, lead, pool && need_hidden);
  layout.held = held;
  const std::vector<int64_t> sizes = need_hidden ? with_rows(rows, -gained) : std::vector<int64_t>{0};
  Tensor grad_hidden = empty(sizes, rows.scalar_type());
  Tensor grad_slots = slot_gradients(rows, layout.batch, slots, shape.width);
  const Plan plan(layout);
  capsule_backward_kernel(CapsuleBackward{
      plan, rows.scalar_type(), shape.width, rows_of(rows), need_hidden ? rows_of(grad_hidden) : Rows{},
      grad_slots.mutable_data_ptr()});
  return {grad_hidden, grad_slots};
}

Tensor capsule_prepend(
    const Tensor& hidden, const Tensor& prompt, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens,
    int64_t lead, bool pool) {
  return capsule_forward(hidden, prompt, pooled, cu_seqlens, lead, pool, false);
}

Tensor capsule_refresh(
    const Tensor& hidden, const Tensor& prompt, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens,
    int64_t lead, bool pool) {
  return capsule_forward(hidden, prompt, pooled, cu_seqlens, lead, pool, true);
}

std::tuple<Tensor, Tensor> capsule_prepend_backward(
    const Tensor& grad, int64_t slots, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens, int64_t lead,
    bool pool, bool need_hidden) {
  return capsule_backward(grad, slots, pooled, cu_seqlens, lead, pool, need_hidden, false);
}

std::tuple<Tensor, Tensor> capsule_refresh_backward(
    const Tensor& grad, int64_t slots, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens, int64_t lead,
    bool pool, bool need_hidden) {
  return capsule_backward(grad, slots, pooled, cu_seqlens, lead, pool, need_hidden, true);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(
    const OptionalTensor& branch, const Tensor& residual, const Tensor& weight, double eps,
    const OptionalTensor& prompt, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens, int64_t lead,
    bool pool) {
  const Tensor rows = with_dense_rows(residual);
  const OptionalTensor branch_rows = branch ? OptionalTensor(with_dense_rows(*branch)) : std::nullopt;
  const ScalarType dtype = rows.scalar_type();
  const Shape shape = shape_of(rows);
  const Plan plan(layout_of(shape, prompt ? prompt->size(1) : 0, pooled, cu_seqlens, lead, pool));
  const std::vector<int64_t> sizes = sizes_of(rows);
  const bool writes_total = branch || prompt;  // otherwise the sum is the residual itself
  Tensor normed = empty(sizes, dtype);
  Tensor total = empty(writes_total ? sizes : std::vector<int64_t>{0}, dtype);
  Tensor rstd = empty({sizes.begin(), sizes.end() - 1}, accumulator(dtype));
  add_rms_norm_forward_kernel(AddRMSNormForward{
      plan, dtype, shape.width, branch_rows ? rows_of(*branch_rows) : Rows{}, rows_of(rows), weight_of(weight), eps,
      prompt ? prompt_of(*prompt) : Vectors{}, rows_of(normed), writes_total ? rows_of(total) : Rows{},
      Rows{rstd.mutable_data_ptr(), shape.rows, 1}});
  return {normed, total, rstd};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(
    const OptionalTensor& grad_normed, const OptionalTensor& grad_total, const Tensor& total, const Tensor& weight,
    const Tensor& rstd, int64_t slots, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens, int64_t lead,
    bool pool) {
  const OptionalTensor normed_rows = grad_normed ? OptionalTensor(with_dense_rows(*grad_normed)) : std::nullopt;
  const OptionalTensor grad_rows = grad_total ? OptionalTensor(with_dense_rows(*grad_total)) : std::nullopt;
  const Tensor rows = with_dense_rows(total);
  const Tensor scales = torch::stable::contiguous(rstd);
  const ScalarType dtype = rows.scalar_type();
  const Shape shape = shape_of(rows);
  const Plan plan(layout_of(shape, slots, pooled, cu_seqlens, lead, pool));
  Tensor grad = empty(sizes_of(rows), dtype);
  // Without an offset the fake kernel counts a sequence for each entry of the first dimension.
  const int64_t sequences = cu_seqlens ? plan.layout.batch : rows.size(0);
  Tensor grad_slots = slot_gradients(rows, sequences, slots, shape.width);
  add_rms_norm_backward_kernel(AddRMSNormBackward{
      plan, dtype, shape.width, normed_rows ? rows_of(*normed_rows) : Rows{}, grad_rows ? rows_of(*grad_rows) : Rows{},
      rows_of(rows), weight_of(weight), Rows{const_cast<void*>(scales.const_data_ptr()), shape.rows, 1}, rows_of(grad),
      grad_slots.mutable_data_ptr()});
  return {grad, grad_slots};
}

}  // namespace
}  // namespace capt

STABLE_TORCH_LIBRARY_IMPL(capt_kernels, CPU, library) {
  library.impl("capsule_prepend", TORCH_BOX(&capt::capsule_prepend));
  library.impl("capsule_prepend_backward", TORCH_BOX(&capt::capsule_prepend_backward));
  library.impl("capsule_refresh", TORCH_BOX(&capt::capsule_refresh));
  library.impl("capsule_refresh_backward", TORCH_BOX(&capt::capsule_refresh_backward));
  library.impl("add_rms_norm", TORCH_BOX(&capt::add_rms_norm));
  library.impl("add_rms_norm_backward", TORCH_BOX(&capt::add_rms_norm_backward));
}
