// Registers packing for the CPU key. Rows are copied as bytes, whatever their dtype.
#include <algorithm>
#include <cstring>

#include "dispatch.h"
#include "tensors.h"

namespace capt {
namespace {

// What follows the first `leading` dimensions as one dense stretch of bytes.
struct Stretch {
  Tensor tensor;
  int64_t bytes;
};

Stretch dense_after(const Tensor& tensor, int64_t leading) {
  int64_t elements = 1;
  bool dense = true;
  for (int64_t i = tensor.dim() - 1; i >= leading; --i) {
    dense = dense && (tensor.stride(i) == elements || tensor.size(i) <= 1);
    elements *= tensor.size(i);
  }
  return {dense ? tensor : torch::stable::contiguous(tensor), elements * static_cast<int64_t>(tensor.element_size())};
}

Tensor dense_indices(const Tensor& indices) {
  check_dim("indices", indices, 1, 1);
  check_dtype("indices", indices, ScalarType::Long);
  return torch::stable::contiguous(indices);
}

int64_t grain(int64_t bytes) { return std::max<int64_t>(1, 4 * kGrain / std::max<int64_t>(1, bytes)); }

Tensor pack(const Tensor& hidden, const Tensor& indices) {
  STD_TORCH_CHECK(hidden.dim() >= 2, "hidden must have shape [B, T, ...], got ", spelled(sizes_of(hidden)));
  const Tensor order = dense_indices(indices);
  const Stretch rows = dense_after(hidden, 2);
  const int64_t length = hidden.size(1), positions = hidden.size(0) * length, count = order.numel(), size = rows.bytes;
  const int64_t* index = static_cast<const int64_t*>(order.const_data_ptr());
  for (int64_t i = 0; i < count; ++i) {  // each is a place to read from
    STD_TORCH_CHECK(
        index[i] >= 0 && index[i] < positions, "indices must lie within ", positions, " positions, got ", index[i]);
  }
  const int64_t element = static_cast<int64_t>(hidden.element_size());
  const int64_t across = rows.tensor.stride(0) * element, down = rows.tensor.stride(1) * element;
  std::vector<int64_t> sizes = sizes_of(hidden);
  sizes.erase(sizes.begin());
  sizes[0] = count;
  Tensor out = empty(sizes, hidden.scalar_type());
  const char* from = static_cast<const char*>(rows.tensor.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  parallel_for(count, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(to + i * size, from + index[i] / length * across + index[i] % length * down, size);
    }
  });
  return out;
}

Tensor unpack(const Tensor& rows, const Tensor& indices, int64_t batch, int64_t length) {
  STD_TORCH_CHECK(rows.dim() >= 1, "rows must have shape [N, ...], got a scalar");
  STD_TORCH_CHECK(batch >= 0 && length >= 0, "batch and length must not be negative, got ", batch, " and ", length);
  const Tensor order = dense_indices(indices);
  check_sizes("indices", order, {rows.size(0)});
  const Stretch packed = dense_after(rows, 1);
  const int64_t positions = batch * length, size = packed.bytes, down = packed.tensor.stride(0) * rows.element_size();
  // That they rise is for the caller to see to: whatever they are, no more than `rows` is read and `out` written.
  const int64_t* index = static_cast<const int64_t*>(order.const_data_ptr());
  const int64_t* last = index + order.numel();
  std::vector<int64_t> sizes = sizes_of(rows);
  sizes[0] = length;
  sizes.insert(sizes.begin(), batch);
  Tensor out = empty(sizes, rows.scalar_type());
  const char* from = static_cast<const char*>(packed.tensor.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  parallel_for(positions, grain(size), [&](int64_t begin, int64_t end) {
    const int64_t* next = std::lower_bound(index, last, begin);
    for (int64_t at = begin; at < end; ++at) {
      if (next != last && *next == at) {
        std::memcpy(to + at * size, from + (next++ - index) * down, size);
      } else {
        std::memset(to + at * size, 0, size);
      }
    }
  });
  return out;
}

}  // namespace
}  // namespace capt

STABLE_TORCH_LIBRARY_IMPL(capt_kernels, CPU, library) {
  library.impl("pack", TORCH_BOX(&capt::pack));
  library.impl("unpack", TORCH_BOX(&capt::unpack));
}
