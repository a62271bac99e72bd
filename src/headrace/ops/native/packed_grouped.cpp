// Products of groups of rows with a packed matrix each: shares out the groups, or one group's panels.
#include "packed.h"

using namespace headrace;

extern "C" int headrace_packed_linear(int level, int threads, int dtype, const void* x,
                                      int64_t x_row, const void* panels, const float* scales,
                                      const float* bias, int kind, int64_t S, int64_t D, int64_t O,
                                      void* out);

namespace {

constexpr int64_t kGrain = 128 << 10;  // bytes of weights that are worth waking another thread

}  // namespace

// x [N, D] and out [N, O], group after group; counts [E] sum to N. The matrices lie
// `matrix_bytes` apart, their scales (of kQuads only) as many as outputs rounded up to panels.
extern "C" HR_EXPORT int headrace_packed_grouped(int level, int threads, int dtype, const void* x,
                                                 const void* panels, const float* scales, int kind,
                                                 const int64_t* counts, int64_t E, int64_t D,
                                                 int64_t O, int64_t matrix_bytes, void* out) {
  const int64_t size = dtype == kBfloat16 ? 2 : 4, matrix_scales = round_up(O, kPanel);
  int64_t busy = 0, rows = 0, work = 0;
  for (int64_t e = 0; e < E; e++) {
    busy += counts[e] > 0;
    rows += counts[e];
    if (counts[e] > 0) work += matrix_bytes * (1 + counts[e] / 16);
  }
  if (rows == 0) return kOk;
  struct Group {
    int64_t matrix, first, count;
  };
  Block memory(static_cast<size_t>(busy) * sizeof(Group));
  if (memory.data == nullptr) return kNoMemory;
  Group* groups = reinterpret_cast<Group*>(memory.data);
  for (int64_t e = 0, first = 0, next = 0; e < E; first += counts[e], e++)
    if (counts[e] > 0) groups[next++] = Group{e, first, counts[e]};

  const auto compute = [&](const Group& group, int workers) {
    return headrace_packed_linear(
        level, workers, dtype, static_cast<const char*>(x) + group.first * D * size, D,
        static_cast<const char*>(panels) + group.matrix * matrix_bytes,
        scales == nullptr ? nullptr : scales + group.matrix * matrix_scales, nullptr, kind,
        group.count, D, O, static_cast<char*>(out) + group.first * O * size);
  };
  const int64_t workers = work / kGrain < threads ? work / kGrain : threads;
  bool full = false;
  if (workers <= 1 || busy < 2 * workers) {
    for (int64_t i = 0; i < busy; i++)
      full = compute(groups[i], workers <= 1 ? 1 : threads) != kOk || full;
  } else {
#pragma omp parallel for num_threads(static_cast<int>(workers)) schedule(dynamic) \
    reduction(|| : full)
    for (int64_t i = 0; i < busy; i++) full = compute(groups[i], 1) != kOk || full;
  }
  return full ? kNoMemory : kOk;
}
