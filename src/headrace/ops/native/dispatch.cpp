// Which instructions this processor and operating system let us use.
#include "common.h"

#if HR_X86 && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace headrace {
namespace {

#if HR_X86 && defined(__linux__)
bool amx_usable() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool tiles = (d >> 22 & 1) && (d >> 24 & 1) && (d >> 25 & 1);  // bf16, tiles, int8
  if (!tiles || !__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1)) return false;
  // ARCH_REQ_XCOMP_PERM for XTILEDATA: asked once, it holds for every thread of the process.
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#else
bool amx_usable() { return false; }
#endif

Level detect() {
#if HR_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kPortable;
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!wide) return kAvx2;
  return amx_usable() ? kAmx : kAvx512;
#else
  return kPortable;
#endif
}

}  // namespace
}  // namespace headrace

extern "C" HR_EXPORT int headrace_level() {
  static const int level = headrace::detect();
  return level;
}
