// Index scores at selected keys: loops over queries, picks the row kernel for the processor.
#include "indexer.h"

#include "selections.h"

#define HR_BODY "indexer_rows.inl"
#include "each_target.inl"

using namespace headrace;

extern "C" HR_EXPORT int headrace_indexer_forward(int level, int threads, int dtype, const void* q,
                                                  const float* weights, const void* k,
                                                  const int32_t* indices, int64_t S, int64_t T,
                                                  int64_t HI, int64_t D, int64_t K,
                                                  float* scores) {
  const Indexer a{q, weights, k, scores, nullptr, nullptr, nullptr, S, T, HI, D, K};
  const IndexerForwardRow forward = dtype == kBfloat16
                                        ? HR_PICK(level, indexer_forward_row<Bf16>)
                                        : HR_PICK(level, indexer_forward_row<float>);
  const size_t size = HR_PICK(level, indexer_scratch)(a);
  bool bad = false, full = false;
#pragma omp parallel num_threads(threads) reduction(|| : bad, full)
  {
    Block memory(size + 2 * round_up(K * 4, 64));
    full = memory.data == nullptr;
    Arena arena{reinterpret_cast<uintptr_t>(memory.data)};
    int32_t* rows = arena.take<int32_t>(K);
    int32_t* places = arena.take<int32_t>(K);
#pragma omp for schedule(dynamic, 8)
    for (int64_t s = 0; s < S; s++) {
      if (full) continue;
      const int64_t n = compact(indices + s * K, K, T, rows, places, bad);
      forward(a, s, Picks{rows, places, n}, arena);
    }
  }
  return bad ? kBadIndex : full ? kNoMemory : kOk;
}

extern "C" HR_EXPORT int headrace_indexer_backward(int level, int threads, int dtype, const void* q,
                                                   const float* weights, const void* k,
                                                   const int32_t* indices, const float* score_grad,
                                                   int64_t S, int64_t T, int64_t HI, int64_t D,
                                                   int64_t K, void* dq, float* dweights,
                                                   void* dk) {
  const Indexer a{q, weights, k, nullptr, score_grad, dq, dweights, S, T, HI, D, K};
  const IndexerBackwardRow backward = dtype == kBfloat16
                                          ? HR_PICK(level, indexer_backward_row<Bf16>)
                                          : HR_PICK(level, indexer_backward_row<float>);
  const size_t size = HR_PICK(level, indexer_scratch)(a);
  SplitSums split(indices, S, K, T, D, threads);
  if (split.bad()) return kBadIndex;
  bool full = false;
#pragma omp parallel for num_threads(split.workers()) schedule(static, 1) reduction(|| : full)
  for (int w = 0; w < split.workers(); w++) {
    Block memory(size + 2 * round_up(K * 4, 64));
    if (memory.data == nullptr || !split.allocate(w)) {
      full = true;
      continue;
    }
    Arena arena{reinterpret_cast<uintptr_t>(memory.data)};
    int32_t* rows = arena.take<int32_t>(K);
    int32_t* places = arena.take<int32_t>(K);
    const SplitSums::Share& share = split.share(w);
    const RowSums sums{share.sums(), share.first, split.stride()};
    bool bad = false;
    for (int64_t s = share.begin; s < share.end; s++) {
      const int64_t n = compact(indices + s * K, K, T, rows, places, bad);
      backward(a, s, Picks{rows, places, n}, sums, arena);
    }
  }
  if (full) return kNoMemory;
  if (dtype == kBfloat16)
    split.finish(static_cast<Bf16*>(dk), D, threads);
  else
    split.finish(static_cast<float*>(dk), D, threads);
  return kOk;
}
