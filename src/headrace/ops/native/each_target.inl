// Includes HR_BODY once per instruction set, each time inside a namespace of its own
// (headrace::portable, ::avx2, ::avx512). The body marks every function HR_FN and holds no lambdas,
// which would not inherit the target. HR_MR x HR_NV is the register block of the matrix product.

#define HR_FN
#define HR_LEVEL 0
#define HR_MR 3
#define HR_NV 1
namespace headrace::portable {
#include HR_BODY
}
#undef HR_FN
#undef HR_LEVEL
#undef HR_MR
#undef HR_NV

#if HR_X86
#define HR_FN __attribute__((target("avx2,fma")))
#define HR_LEVEL 1
#define HR_MR 6
#define HR_NV 1
namespace headrace::avx2 {
#include HR_BODY
}
#undef HR_FN
#undef HR_LEVEL
#undef HR_MR
#undef HR_NV

#define HR_FN __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")))
#define HR_LEVEL 2
#define HR_MR 8
#define HR_NV 2
namespace headrace::avx512 {
#include HR_BODY
}
#undef HR_FN
#undef HR_LEVEL
#undef HR_MR
#undef HR_NV
#endif

// HR_PICK(level, name): the function `name`, which may hold commas, of the best namespace not above
// `level`.
#if HR_X86
#define HR_PICK(level, ...)                                         \
  ((level) >= ::headrace::kAvx512 ? ::headrace::avx512::__VA_ARGS__ \
   : (level) >= ::headrace::kAvx2 ? ::headrace::avx2::__VA_ARGS__   \
                                  : ::headrace::portable::__VA_ARGS__)
#else
#define HR_PICK(level, ...) (::headrace::portable::__VA_ARGS__)
#endif
