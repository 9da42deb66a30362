// Registers the rotary op for the CPU key.
#include "rotary.h"

#include <tuple>

#include "tensors.h"

namespace capt {
namespace {

// [R, H, d] is a batch of one sequence.
Heads heads_of(const Tensor& from, Tensor& to) {
  const int64_t dim = from.dim();
  Heads heads{from.const_data_ptr(), to.mutable_data_ptr(), from.size(dim - 2), {0, 0, 0}};
  for (int64_t i = 4 - dim; i < 3; ++i) heads.strides[i] = from.stride(i - (4 - dim));
  return heads;
}

Vectors table_of(const Tensor& table) {
  Vectors vectors{table.const_data_ptr(), table.scalar_type(), {0, 0, 0}};
  const int64_t skipped = 3 - table.dim();
  for (int64_t i = skipped; i < 3; ++i) vectors.strides[i] = table.stride(i - skipped);
  return vectors;
}

std::tuple<Tensor, Tensor> rotary(
    const std::optional<Tensor>& q, const std::optional<Tensor>& k, const Tensor& cos, const Tensor& sin,
    bool transposed) {
  STD_TORCH_CHECK(q || k, "rotary wants q, k or both");
  const Tensor& given = q ? *q : *k;
  const int64_t dim = given.dim();
  Rotary op{given.scalar_type(), dim == 4 ? given.size(0) : 1, given.size(dim - 3), given.size(dim - 1), {},
            table_of(cos),       table_of(sin),                transposed};
  Tensor out[2];
  std::optional<Tensor> dense[2];  // kept until the kernel is done
  for (int i = 0; i < 2; ++i) {
    const std::optional<Tensor>& heads = i == 0 ? q : k;
    if (!heads) {
      out[i] = empty({0}, given.scalar_type());
      continue;
    }
    dense[i] = heads->stride(dim - 1) == 1 ? *heads : torch::stable::contiguous(*heads);
    out[i] = empty(sizes_of(*heads), heads->scalar_type());
    op.heads[i] = heads_of(*dense[i], out[i]);
  }
  rotary_kernel(op);
  return {out[0], out[1]};
}

}  // namespace
}  // namespace capt

STABLE_TORCH_LIBRARY_IMPL(capt_kernels, CPU, library) { library.impl("rotary", TORCH_BOX(&capt::rotary)); }
