// Which instruction set the kernels run on, chosen when the library is first used, and how they are threaded.
//
// Every *_kernels.cpp is compiled once an instruction set (see CMakeLists.txt), each time into the namespace that the
// macro CPU_CAPABILITY names, as ATen does with its own kernels. Nothing else is compiled with AVX flags, so that the
// library loads on any CPU.
#pragma once

#include <cstdint>
#include <type_traits>

namespace capt {

enum class Capability { Default, AVX2, AVX512 };

// The best that this CPU runs, or what CAPT_KERNELS_CPU_CAPABILITY asks for (default, avx2 or avx512).
Capability capability();

#ifdef CAPT_BUILDS_AVX
#define CAPT_DECLARE_KERNEL(name, Arguments)                  \
  namespace DEFAULT { void name(const Arguments&); }          \
  namespace AVX2 { void name(const Arguments&); }             \
  namespace AVX512 { void name(const Arguments&); }           \
  inline void name(const Arguments& arguments) {              \
    switch (capability()) {                                   \
      case Capability::AVX512: return AVX512::name(arguments); \
      case Capability::AVX2: return AVX2::name(arguments);    \
      case Capability::Default: return DEFAULT::name(arguments); \
    }                                                         \
  }
#else
#define CAPT_DECLARE_KERNEL(name, Arguments)         \
  namespace DEFAULT { void name(const Arguments&); } \
  inline void name(const Arguments& arguments) { DEFAULT::name(arguments); }
#endif

using Range = void (*)(int64_t begin, int64_t end, void* context);

// at::parallel_for. A plain function, so that a kernel's file needs no header of torch but at::vec's.
void parallel_for(int64_t size, int64_t grain, Range range, void* context);

template <typename F>
void parallel_for(int64_t size, int64_t grain, F&& body) {
  parallel_for(
      size, grain,
      [](int64_t begin, int64_t end, void* context) {
        (*static_cast<std::remove_reference_t<F>*>(context))(begin, end);
      },
      &body);
}

// Elements below which a thread is not worth waking.
constexpr int64_t kGrain = 32768;

}  // namespace capt
