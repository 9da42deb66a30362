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
    bool pool, bool held) {
  STD_TORCH_CHECK(slots >= 0 && lead >= 0, "slots and lead must not be negative, got ", slots, " and ", lead);
  STD_TORCH_CHECK(shape.rows >= 0, "the gradient has too few rows for the slots that its op put in");
  Layout layout;
  layout.batch = shape.batch;
  layout.rows = shape.rows;
  layout.slots = slots;
  layout.held = held;
  layout.lead = lead;
  layout.pool = pool && slots > 0;
  if (cu_seqlens) {
    check_dim("cu_seqlens", *cu_seqlens, 1, 1);
    check_dtype("cu_seqlens", *cu_seqlens, ScalarType::Int);
    STD_TORCH_CHECK(cu_seqlens->numel() > 0, "cu_seqlens must have shape [B+1], got [0]");
    layout.batch = cu_seqlens->size(0) - 1;
    layout.cu_seqlens = static_cast<const int32_t*>(cu_seqlens->const_data_ptr());
    layout.cu_stride = cu_seqlens->stride(0);
  }
  if (pooled && layout.pool) {
    check_dtype("pooled", *pooled, ScalarType::Bool);
    const int64_t tokens = shape.rows - (held ? slots : 0);
    check_sizes(
        "pooled", *pooled, cu_seqlens ? std::vector<int64_t>{shape.rows} : std::vector<int64_t>{shape.batch, tokens});
    layout.pooled = static_cast<const bool*>(pooled->const_data_ptr());
    layout.pooled_row_stride = pooled->stride(pooled->dim() - 1);
    layout.pooled_batch_stride = pooled->dim() == 2 ? pooled->stride(0) : 0;
  }
  return layout;
}

// [R, D] packed, [B, T, D] padded.
void check_rows(const char* name, const Tensor& tensor, const OptionalTensor& cu_seqlens) {
  check_floating(name, tensor);
  check_dim(name, tensor, cu_seqlens ? 2 : 3, cu_seqlens ? 2 : 3);
}

Vectors prompt_of(const Tensor& prompt, const Layout& layout, int64_t width) {
  check_floating("prompt", prompt);
  check_sizes("prompt", prompt, {layout.batch, layout.slots, width});
  return {prompt.const_data_ptr(), prompt.scalar_type(), {prompt.stride(0), prompt.stride(1), prompt.stride(2)}};
}

Vectors weight_of(const Tensor& weight, int64_t width) {
  check_floating("weight", weight);
  check_sizes("weight", weight, {width});
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
  check_rows("hidden", hidden, cu_seqlens);
  check_dim("prompt", prompt, 3, 3);
  const Tensor rows = with_dense_rows(hidden);
  const Shape shape = shape_of(rows);
  const Layout layout = layout_of(shape, prompt.size(1), pooled, cu_seqlens, lead, pool, held);
  const Vectors prompts = prompt_of(prompt, layout, shape.width);
  const int64_t more = held ? 0 : layout.slots * (cu_seqlens ? layout.batch : 1);
  Tensor out = empty(with_rows(rows, more), rows.scalar_type());
  const Plan plan(layout);
  capsule_forward_kernel(
      CapsuleForward{plan, rows.scalar_type(), shape.width, rows_of(rows), prompts, rows_of(out)});
  return out;
}

std::tuple<Tensor, Tensor> capsule_backward(
    const Tensor& grad, int64_t slots, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens, int64_t lead,
    bool pool, bool need_hidden, bool held) {
  check_rows("grad", grad, cu_seqlens);
  const Tensor rows = with_dense_rows(grad);
  Shape shape = shape_of(rows);
  const int64_t gained = held ? 0 : slots * (cu_seqlens ? cu_seqlens->size(0) - 1 : 1);
  shape.rows -= gained;
  // What the pool hands to the rows is not asked for, so neither is the pool.
  const Layout layout = layout_of(shape, slots, pooled, cu_seqlens, lead, pool && need_hidden, held);
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

// The sum of add_rms_norm, of any shape where it has no slots.
void check_sum(const char* name, const Tensor& tensor, bool has_slots, const OptionalTensor& cu_seqlens) {
  if (has_slots || cu_seqlens) return check_rows(name, tensor, cu_seqlens);
  check_floating(name, tensor);
  STD_TORCH_CHECK(tensor.dim() > 0, name, " must have shape [..., D], got a scalar");
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(
    const OptionalTensor& branch, const Tensor& residual, const Tensor& weight, double eps,
    const OptionalTensor& prompt, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens, int64_t lead,
    bool pool) {
  check_sum("residual", residual, prompt.has_value(), cu_seqlens);
  if (branch) check_like("branch", *branch, residual);
  if (prompt) check_dim("prompt", *prompt, 3, 3);
  const Tensor rows = with_dense_rows(residual);
  const OptionalTensor branch_rows = branch ? OptionalTensor(with_dense_rows(*branch)) : std::nullopt;
  const Rows x = rows_of(rows), added = branch_rows ? rows_of(*branch_rows) : Rows{};
  const ScalarType dtype = rows.scalar_type();
  Shape shape = shape_of(rows);
  if (!prompt && !cu_seqlens) join_sequences(shape, {&x, &added});
  const Layout layout = layout_of(shape, prompt ? prompt->size(1) : 0, pooled, cu_seqlens, lead, pool, true);
  const Vectors prompts = prompt ? prompt_of(*prompt, layout, shape.width) : Vectors{};
  const Plan plan(layout);
  const std::vector<int64_t> sizes = sizes_of(rows);
  const bool writes_total = branch || prompt;  // otherwise the sum is the residual itself
  Tensor normed = empty(sizes, dtype);
  Tensor total = empty(writes_total ? sizes : std::vector<int64_t>{0}, dtype);
  Tensor rstd = empty({sizes.begin(), sizes.end() - 1}, accumulator(dtype));
  add_rms_norm_forward_kernel(AddRMSNormForward{
      plan, dtype, shape.width, added, x, weight_of(weight, shape.width), eps, prompts, rows_of(normed),
      writes_total ? rows_of(total) : Rows{}, Rows{rstd.mutable_data_ptr(), shape.rows, 1}});
  return {normed, total, rstd};
}

std::tuple<Tensor, Tensor> add_rms_norm_backward(
    const OptionalTensor& grad_normed, const OptionalTensor& grad_total, const Tensor& total, const Tensor& weight,
    const Tensor& rstd, int64_t slots, const OptionalTensor& pooled, const OptionalTensor& cu_seqlens, int64_t lead,
    bool pool, bool need_rows) {
  check_sum("total", total, slots > 0, cu_seqlens);
  if (grad_normed) check_like("grad_normed", *grad_normed, total);
  if (grad_total) check_like("grad_total", *grad_total, total);
  check_sizes("rstd", rstd, {total.sizes().begin(), total.sizes().end() - 1});
  check_dtype("rstd", rstd, accumulator(total.scalar_type()));
  const OptionalTensor normed_rows = grad_normed ? OptionalTensor(with_dense_rows(*grad_normed)) : std::nullopt;
  const OptionalTensor grad_rows = grad_total ? OptionalTensor(with_dense_rows(*grad_total)) : std::nullopt;
  const Tensor rows = with_dense_rows(total);
  const Tensor scales = torch::stable::contiguous(rstd);
  const Rows x = rows_of(rows), from_normed = normed_rows ? rows_of(*normed_rows) : Rows{},
             from_total = grad_rows ? rows_of(*grad_rows) : Rows{};
  const ScalarType dtype = rows.scalar_type();
  Shape shape = shape_of(rows);
  if (slots == 0 && !cu_seqlens) join_sequences(shape, {&x, &from_normed, &from_total});
  // What the pool hands to the rows is not asked for, so neither is the pool.
  const Plan plan(layout_of(shape, slots, pooled, cu_seqlens, lead, pool && need_rows, true));
  Tensor grad = empty(need_rows ? sizes_of(rows) : std::vector<int64_t>{0}, dtype);
  // Without an offset the fake kernel counts a sequence for each entry of the first dimension.
  const int64_t sequences = cu_seqlens ? plan.layout.batch : rows.size(0);
  Tensor grad_slots = slot_gradients(rows, sequences, slots, shape.width);
  add_rms_norm_backward_kernel(AddRMSNormBackward{
      plan, dtype, shape.width, from_normed, from_total, x, weight_of(weight, shape.width),
      Rows{const_cast<void*>(scales.const_data_ptr()), shape.rows, 1}, need_rows ? rows_of(grad) : Rows{},
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
