// Rows of any dtype as vectors of the dtype that sums are formed in: fp32, or fp64 for fp64.
// Included by kernels alone: everything here is compiled once an instruction set, into a namespace of its own.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cstring>
#include <type_traits>

#include "layout.h"

namespace capt {
namespace CPU_CAPABILITY {

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Two registers: what one register of a 16-bit dtype widens to.
template <typename acc_t>
using Vector = at::vec::VectorizedN<acc_t, 2>;

// How many elements a step takes: all of a vector, known to the compiler, or the few that are left of a row.
template <typename acc_t>
using Whole = std::integral_constant<int64_t, Vector<acc_t>::size()>;

template <typename T>
constexpr int kRegisters = sizeof(T) == 2 ? 1 : 2;

template <typename T, typename acc_t = Accumulator<T>>
inline Vector<acc_t> load(const T* from, Whole<acc_t>) {
  return at::vec::convert<acc_t, 2, T, kRegisters<T>>(at::vec::VectorizedN<T, kRegisters<T>>::loadu(from));
}

template <typename T, typename acc_t = Accumulator<T>>
inline Vector<acc_t> load(const T* from, int64_t count) {
  alignas(64) T padded[Whole<acc_t>::value];
  std::memset(padded, 0, sizeof(padded));
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded, Whole<acc_t>{});
}

template <typename T, typename acc_t = Accumulator<T>>
inline void store(T* to, const Vector<acc_t>& value, Whole<acc_t>) {
  at::vec::convert<T, kRegisters<T>, acc_t, 2>(value).store(to);
}

template <typename T, typename acc_t = Accumulator<T>>
inline void store(T* to, const Vector<acc_t>& value, int64_t count) {
  alignas(64) T padded[Whole<acc_t>::value];
  store(padded, value, Whole<acc_t>{});
  std::memcpy(to, padded, count * sizeof(T));
}

// Rounds to T, as storing and loading again does.
template <typename T, typename acc_t = Accumulator<T>>
inline Vector<acc_t> rounded(const Vector<acc_t>& value) {
  if constexpr (std::is_same_v<T, acc_t>) {
    return value;
  } else {
    return at::vec::convert<acc_t, 2, T, 1>(at::vec::convert<T, 1, acc_t, 2>(value));
  }
}

template <typename acc_t>
inline acc_t horizontal_sum(const Vector<acc_t>& value) {
  using Register = at::vec::Vectorized<acc_t>;
  return at::vec::vec_reduce_all<acc_t>([](Register a, Register b) { return a + b; }, value[0] + value[1]);
}

template <typename acc_t>
inline acc_t horizontal_maximum(const Vector<acc_t>& value) {
  using Register = at::vec::Vectorized<acc_t>;
  const auto higher = [](Register a, Register b) { return at::vec::maximum(a, b); };
  return at::vec::vec_reduce_all<acc_t>(higher, higher(value[0], value[1]));
}

// Calls step(d, count) along a row.
template <typename acc_t, typename Step>
inline void along(int64_t width, Step&& step) {
  constexpr int64_t whole = Whole<acc_t>::value;
  int64_t d = 0;
  for (; d + whole <= width; d += whole) step(d, Whole<acc_t>{});
  if (d < width) step(d, width - d);
}

template <typename T>
struct Type {
  using type = T;
};

// Calls body(Type<T>) with the C++ type of a dtype.
template <typename Body>
inline void with_type(ScalarType dtype, Body&& body) {
  switch (dtype) {
    case ScalarType::Double: return body(Type<double>{});
    case ScalarType::Half: return body(Type<c10::Half>{});
    case ScalarType::BFloat16: return body(Type<c10::BFloat16>{});
    default: return body(Type<float>{});
  }
}

template <typename Body>
inline void with_flag(bool flag, Body&& body) {
  if (flag) {
    body(std::true_type{});
  } else {
    body(std::false_type{});
  }
}

// One of `vectors`, as the dtype that sums are formed in.
template <typename acc_t>
inline void read(const Vectors& vectors, int64_t i, int64_t j, int64_t width, acc_t* to) {
  with_type(vectors.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const T* from = static_cast<const T*>(vectors.data) + i * vectors.strides[0] + j * vectors.strides[1];
    if constexpr (std::is_same_v<Accumulator<T>, acc_t>) {
      if (vectors.strides[2] == 1) {
        along<acc_t>(width, [&](int64_t d, auto n) { store(to + d, load(from + d, n), n); });
        return;
      }
    }
    for (int64_t d = 0; d < width; ++d) to[d] = static_cast<acc_t>(from[d * vectors.strides[2]]);
  });
}

}  // namespace CPU_CAPABILITY
}  // namespace capt
