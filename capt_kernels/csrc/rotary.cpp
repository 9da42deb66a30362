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

Vectors table_of(const char* name, const Tensor& table, const std::vector<int64_t>& sizes) {
  check_floating(name, table);
  check_sizes(name, table, sizes);
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
  check_floating(q ? "q" : "k", given);
  check_dim(q ? "q" : "k", given, 3, 4);
  std::vector<int64_t> position = sizes_of(given);  // of a table: one row for all heads
  position.erase(position.end() - 2);
  STD_TORCH_CHECK(position.back() % 2 == 0, "the head size must be even, got ", position.back());
  if (q && k) {
    std::vector<int64_t> sizes = sizes_of(*q);
    check_dim("k", *k, dim, dim);
    sizes[dim - 2] = k->size(dim - 2);
    check_sizes("k", *k, sizes);
    check_dtype("k", *k, q->scalar_type());
  }
  Rotary op{given.scalar_type(), dim == 4 ? given.size(0) : 1, given.size(dim - 3), given.size(dim - 1), {},
            table_of("cos", cos, position), table_of("sin", sin, position), transposed};
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
