// Products of small matrices that lie in cache, as attention has them: tens of rows, inner sides of a head's width.
// Included by kernels alone, like vector.h.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace capt {
namespace CPU_CAPABILITY {

template <typename acc_t>
using Register = at::vec::Vectorized<acc_t>;

// The sums of a tile stay in registers: 24 of AVX-512's 32, 12 of AVX2's 16.
constexpr int64_t kTileRows = 6, kStretch = 256;
constexpr int64_t kTileRegisters = Register<float>::size() == 16 ? 4 : 2;

template <typename acc_t>
constexpr int64_t kTileColumns = kTileRegisters * Register<acc_t>::size();

inline int64_t round_up(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

// The left factor: element (i, p) at data[i * row + p * column], so that a transpose is a swap of strides.
template <typename acc_t>
struct Left {
  const acc_t* data;
  int64_t row, column;
};

// The right factor, in column tiles of kTileColumns: element (p, j) of a tile at tile[p * row + j].
template <typename acc_t>
struct Right {
  const acc_t* data;
  int64_t row, tile;
};

template <typename acc_t, int M, int N>
inline void multiply_tile(
    const Left<acc_t>& a, const acc_t* b, int64_t b_row, acc_t* c, int64_t c_row, int64_t inner, bool add) {
  constexpr int64_t size = Register<acc_t>::size();
  Register<acc_t> sums[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) {
      sums[i][j] = add ? Register<acc_t>::loadu(c + i * c_row + j * size) : Register<acc_t>(acc_t(0));
    }
  }
  for (int64_t p = 0; p < inner; ++p) {
    Register<acc_t> right[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) right[j] = Register<acc_t>::loadu(b + p * b_row + j * size);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const Register<acc_t> left(a.data[i * a.row + p * a.column]);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sums[i][j] = at::vec::fmadd(left, right[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) sums[i][j].store(c + i * c_row + j * size);
  }
}

template <typename acc_t, int N>
inline void multiply_rows(
    Left<acc_t> a, const acc_t* b, int64_t b_row, acc_t* c, int64_t c_row, int64_t rows, int64_t inner, bool add) {
  for (; rows >= kTileRows; rows -= kTileRows) {
    multiply_tile<acc_t, kTileRows, N>(a, b, b_row, c, c_row, inner, add);
    a.data += kTileRows * a.row;
    c += kTileRows * c_row;
  }
  switch (rows) {
    case 5: return multiply_tile<acc_t, 5, N>(a, b, b_row, c, c_row, inner, add);
    case 4: return multiply_tile<acc_t, 4, N>(a, b, b_row, c, c_row, inner, add);
    case 3: return multiply_tile<acc_t, 3, N>(a, b, b_row, c, c_row, inner, add);
    case 2: return multiply_tile<acc_t, 2, N>(a, b, b_row, c, c_row, inner, add);
    case 1: return multiply_tile<acc_t, 1, N>(a, b, b_row, c, c_row, inner, add);
    default: return;
  }
}

// Long sums are formed in stretches whose part of the right factor stays in cache from one tile of rows to the next.
template <typename acc_t, int N>
inline void multiply_columns(
    Left<acc_t> a, const acc_t* b, int64_t b_row, acc_t* c, int64_t c_row, int64_t rows, int64_t inner, bool add) {
  int64_t first = 0;
  do {
    const int64_t count = std::min(kStretch, inner - first);
    multiply_rows<acc_t, N>(
        {a.data + first * a.column, a.row, a.column}, b + first * b_row, b_row, c, c_row, rows, count, add || first > 0);
    first += count;
  } while (first < inner);
}

// c[rows, columns] = a[rows, inner] b[inner, columns], or += with `add`. Columns come in whole registers.
template <typename acc_t>
inline void multiply(
    const Left<acc_t>& a, const Right<acc_t>& b, acc_t* c, int64_t c_row, int64_t rows, int64_t columns, int64_t inner,
    bool add = false) {
  constexpr int64_t size = Register<acc_t>::size();
  for (int64_t first = 0; first < columns; first += kTileColumns<acc_t>) {
    const acc_t* tile = b.data + first / kTileColumns<acc_t> * b.tile;
    int64_t left = (columns - first) / size, j = first;
    const auto step = [&](auto registers) {
      constexpr int N = decltype(registers)::value;
      multiply_columns<acc_t, N>(a, tile, b.row, c + j, c_row, rows, inner, add);
      tile += N * size;
      j += N * size;
      left -= N;
    };
    if (left >= kTileRegisters) {
      step(std::integral_constant<int, kTileRegisters>{});
      continue;
    }
    if (left >= 2) step(std::integral_constant<int, 2>{});
    if (left >= 1) step(std::integral_constant<int, 1>{});
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace capt
