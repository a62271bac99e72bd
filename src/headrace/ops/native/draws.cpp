// Draws from rows of logits and log-probabilities of given ids: splits rows over threads.
#include "draws.h"

#include <vector>

#define HR_BODY "draws_rows.inl"
#include "each_target.inl"

using namespace headrace;

namespace {

constexpr int64_t kGrain = 1 << 15;  // logits that are worth waking another thread

void run(DrawRows rows, const Draws& a, int64_t n, int threads) {
  int64_t workers = n * a.V / kGrain < threads ? n * a.V / kGrain : threads;
  workers = workers < n ? workers : n;
  const size_t blocks = static_cast<size_t>((a.V + kDrawBlock - 1) / kDrawBlock);
  if (workers <= 1) {
    std::vector<double> sums(blocks);
    rows(a, 0, n, sums.data());
    return;
  }
#pragma omp parallel for num_threads(static_cast<int>(workers)) schedule(static, 1)
  for (int64_t w = 0; w < workers; w++) {
    std::vector<double> sums(blocks);
    rows(a, n * w / workers, n * (w + 1) / workers, sums.data());
  }
}

}  // namespace

extern "C" HR_EXPORT int headrace_draw_tokens(int level, int threads, int, const float* logits,
                                              const float* temperature, const double* draws,
                                              int64_t n, int64_t V, int64_t* ids, float* logprobs,
                                              float* raw_logprobs) {
  const Draws a{logits, temperature, draws, ids, logprobs, raw_logprobs, V, 0};
  run(HR_PICK(level, draw_rows), a, n, threads);
  return kOk;
}

extern "C" HR_EXPORT int headrace_token_logprobs(int level, int threads, int, const float* logits,
                                                 int64_t* ids, int64_t n, int64_t V, int64_t m,
                                                 float* out) {
  for (int64_t j = 0; j < n * m; j++)
    if (ids[j] < 0 || ids[j] >= V) return kBadIndex;
  const Draws a{logits, nullptr, nullptr, ids, out, nullptr, V, m};
  run(HR_PICK(level, score_rows), a, n, threads);
  return kOk;
}
