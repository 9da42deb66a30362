// torch's tensors as the kernels take them. Included by the files that register ops, never by a kernel's.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "layout.h"

namespace capt {

using torch::stable::Tensor;

inline ScalarType accumulator(ScalarType dtype) { return dtype == ScalarType::Double ? dtype : ScalarType::Float; }

// Uninitialised, contiguous, on the CPU. Through the dispatcher, as only that obeys
// torch.utils.deterministic.fill_uninitialized_memory.
inline Tensor empty(const std::vector<int64_t>& sizes, ScalarType dtype) { return torch::stable::empty(sizes, dtype); }

// The elements of a row must be neighbours; rows may lie anywhere.
inline Tensor with_dense_rows(const Tensor& tensor) {
  const int64_t dim = tensor.dim();
  if (dim > 3 && !tensor.is_contiguous()) return torch::stable::contiguous(tensor);
  if (dim == 0 || tensor.size(dim - 1) <= 1 || tensor.stride(dim - 1) == 1) return tensor;
  return torch::stable::contiguous(tensor);
}

inline std::vector<int64_t> sizes_of(const Tensor& tensor) { return {tensor.sizes().begin(), tensor.sizes().end()}; }

inline std::string spelled(const std::vector<int64_t>& sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

// What the kernels trust. The Python functions say it better; these stand before memory when an op is called directly.
inline void check_sizes(const char* name, const Tensor& tensor, const std::vector<int64_t>& sizes) {
  const std::vector<int64_t> given = sizes_of(tensor);
  STD_TORCH_CHECK(given == sizes, name, " must have shape ", spelled(sizes), ", got ", spelled(given));
}

inline void check_dtype(const char* name, const Tensor& tensor, ScalarType dtype) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype, name, " must have dtype ", dtype, ", got ", tensor.scalar_type());
}

inline void check_floating(const char* name, const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  STD_TORCH_CHECK(
      dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16 ||
          dtype == ScalarType::Double,
      name, " must be float32, float16, bfloat16 or float64, got ", dtype);
}

inline void check_like(const char* name, const Tensor& tensor, const Tensor& like) {
  check_sizes(name, tensor, sizes_of(like));
  check_dtype(name, tensor, like.scalar_type());
}

inline void check_dim(const char* name, const Tensor& tensor, int64_t least, int64_t most) {
  STD_TORCH_CHECK(
      tensor.dim() >= least && tensor.dim() <= most, name, " has ", tensor.dim(), " dimensions, which are too ",
      tensor.dim() < least ? "few" : "many");
}

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

// Rows of sequences that lie behind one another at one distance, as those of a single sequence. For ops that do not
// care which sequence a row is of: a sequence costs a plan, and [R, H, d] is R of them.
inline void join_sequences(Shape& shape, std::initializer_list<const Rows*> tensors) {
  if (shape.batch <= 1) return;
  for (const Rows* rows : tensors) {
    if (*rows && rows->batch_stride != shape.rows * rows->row_stride) return;
  }
  shape.rows *= shape.batch;
  shape.batch = 1;
}

}  // namespace capt
