// y = x * cos + rotate_half(x) * sin for all heads of a position, whose tables are read once.
#include "rotary.h"

#include <algorithm>
#include <memory>

#include "vector.h"

namespace capt {
namespace CPU_CAPABILITY {
namespace {

template <typename T>
void rotary_typed(const Rotary& op) {
  using acc_t = Accumulator<T>;
  const int64_t width = op.width, half = width / 2;
  const int64_t a_position = std::max<int64_t>(1, width * (op.heads[0].count + op.heads[1].count));
  parallel_for(op.batch * op.rows, std::max<int64_t>(1, kGrain / a_position), [&](int64_t begin, int64_t end) {
    const std::unique_ptr<acc_t[]> tables(new acc_t[2 * width]);
    acc_t* const cos = tables.get();
    acc_t* const sin = tables.get() + width;
    for (int64_t position = begin; position < end; ++position) {
      const int64_t b = position / op.rows, t = position % op.rows;
      read(op.cos, b, t, width, cos);
      read(op.sin, b, t, width, sin);
      // What the second half adds to the first, and the first to the second; the transpose swaps them.
      const acc_t* const to_first = op.transposed ? sin + half : sin;
      const acc_t* const to_second = op.transposed ? sin : sin + half;
      const Vector<acc_t> sign(acc_t(op.transposed ? 1 : -1));
      for (const Heads& heads : op.heads) {
        for (int64_t h = 0; h < heads.count; ++h) {
          const T* from =
              static_cast<const T*>(heads.from) + b * heads.strides[0] + t * heads.strides[1] + h * heads.strides[2];
          T* to = static_cast<T*>(heads.to) + (position * heads.count + h) * width;
          along<acc_t>(half, [&](int64_t d, auto n) {
            const Vector<acc_t> first = load(from + d, n), second = load(from + half + d, n);
            store(to + d, first * load(cos + d, n) + sign * second * load(to_first + d, n), n);
            store(to + half + d, second * load(cos + half + d, n) - sign * first * load(to_second + d, n), n);
          });
        }
      }
    }
  });
}

}  // namespace

void rotary_kernel(const Rotary& op) {
  with_type(op.dtype, [&](auto type) { rotary_typed<typename decltype(type)::type>(op); });
}

}  // namespace CPU_CAPABILITY
}  // namespace capt
