// torch's tensors as the kernels take them. Included by the files that register ops, never by a kernel's.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "layout.h"

namespace capt {

using torch::stable::Tensor;

inline ScalarType accumulator(ScalarType dtype) { return dtype == ScalarType::Double ? dtype : ScalarType::Float; }

// Uninitialised, contiguous, on the CPU.
inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  const int32_t type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      sizes.size(), sizes.data(), strides.data(), type, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// The elements of a row must be neighbours; rows may lie anywhere.
inline Tensor with_dense_rows(const Tensor& tensor) {
  const int64_t dim = tensor.dim();
  if (dim > 3 && !tensor.is_contiguous()) return torch::stable::contiguous(tensor);
  if (dim == 0 || tensor.size(dim - 1) <= 1 || tensor.stride(dim - 1) == 1) return tensor;
  return torch::stable::contiguous(tensor);
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

// How rows_of counts the rows of a tensor.
struct Shape {
  int64_t batch, rows, width;
};

inline Shape shape_of(const Tensor& tensor) {
  const int64_t dim = tensor.dim(), width = tensor.size(dim - 1);
  if (dim == 3) return {tensor.size(0), tensor.size(1), width};
  int64_t rows = 1;
  for (int64_t i = 0; i < dim - 1; ++i) rows *= tensor.size(i);
  return {1, rows, width};
}

// [B, T, D] or [R, D], or any [..., D] that is contiguous, as rows; see with_dense_rows.
inline Rows rows_of(const Tensor& tensor) {
  const int64_t dim = tensor.dim();
  const int64_t width = tensor.size(dim - 1);
  Rows rows{const_cast<void*>(tensor.const_data_ptr()), 0, width};
  if (dim == 2 || dim == 3) rows.row_stride = tensor.stride(dim - 2);
  if (dim == 3) rows.batch_stride = tensor.stride(0);
  return rows;
}

}  // namespace capt
