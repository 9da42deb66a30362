#include "dispatch.h"

#include <cstdlib>
#include <string>

#include "tensors.h"

namespace capt {
namespace {

const char* const kNames[] = {"default", "avx2", "avx512"};

Capability supported() {
#ifdef CAPT_BUILDS_AVX
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return avx512 ? Capability::AVX512 : Capability::AVX2;
  }
#endif
  return Capability::Default;
}

Capability choose() {
  const Capability best = supported();
  const char* asked = std::getenv("CAPT_KERNELS_CPU_CAPABILITY");
  if (asked == nullptr) return best;
  for (int level = 0; level <= static_cast<int>(best); ++level) {
    if (std::string(asked) == kNames[level]) return static_cast<Capability>(level);
  }
  STD_TORCH_CHECK(
      false, "CAPT_KERNELS_CPU_CAPABILITY must be default, avx2 or avx512 and run on this CPU, whose best is ",
      kNames[static_cast<int>(best)], ", got ", asked);
}

std::string cpu_capability() { return kNames[static_cast<int>(capability())]; }

}  // namespace

Capability capability() {
  static const Capability chosen = choose();
  return chosen;
}

void parallel_for(int64_t size, int64_t grain, Range range, void* context) {
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, size, grain, range, context));
}

}  // namespace capt

STABLE_TORCH_LIBRARY_FRAGMENT(capt_kernels, library) { library.def("cpu_capability() -> str"); }

STABLE_TORCH_LIBRARY_IMPL(capt_kernels, CompositeExplicitAutograd, library) {
  library.impl("cpu_capability", TORCH_BOX(&capt::cpu_capability));
}
