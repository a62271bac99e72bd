// Sparse latent attention: loops over queries, picks the row kernel for the processor.
#include "latent.h"

#include "selections.h"

#define HR_BODY "latent_rows.inl"
#include "each_target.inl"

namespace headrace {
namespace {

struct Kernels {
  ForwardRow forward;
  ScratchSize forward_scratch;
  BackwardRow backward;
  ScratchSize backward_scratch;
  bool tiles;
};

Kernels choose(int level, int dtype) {
#if HR_X86
  if (level >= kAmx && dtype == kBfloat16)
    return {amx::latent_forward_row, amx::latent_forward_scratch, amx::latent_backward_row,
            amx::latent_backward_scratch, true};
#endif
  Kernels k;
  k.forward_scratch = HR_PICK(level, latent_forward_scratch);
  k.backward_scratch = HR_PICK(level, latent_backward_scratch);
  k.tiles = false;
  if (dtype == kBfloat16) {
    k.forward = HR_PICK(level, latent_forward_row<Bf16>);
    k.backward = HR_PICK(level, latent_backward_row<Bf16>);
  } else {
    k.forward = HR_PICK(level, latent_forward_row<float>);
    k.backward = HR_PICK(level, latent_backward_row<float>);
  }
  return k;
}

void begin(const Kernels& kernels) {
#if HR_X86
  if (kernels.tiles) amx::begin_tiles();
#endif
  (void)kernels;
}

void end(const Kernels& kernels) {
#if HR_X86
  if (kernels.tiles) amx::end_tiles();
#endif
  (void)kernels;
}

}  // namespace
}  // namespace headrace

using namespace headrace;

extern "C" HR_EXPORT int headrace_latent_forward(int level, int threads, int dtype, const void* q,
                                       const void* kv, const int32_t* indices, int64_t S, int64_t T,
                                       int64_t H, int64_t C, int64_t V, int64_t K, float scale,
                                       void* out, float* lse, float* mass) {
  const Latent a{q, kv, out, lse, mass, nullptr, nullptr, S, T, H, C, V, K, scale};
  const Kernels kernels = choose(level, dtype);
  const size_t size = kernels.forward_scratch(a);
  bool bad = false, full = false;
#pragma omp parallel num_threads(threads) reduction(|| : bad, full)
  {
    Block memory(size + 2 * round_up(K * 4, 64));
    full = memory.data == nullptr;
    Arena arena{reinterpret_cast<uintptr_t>(memory.data)};
    int32_t* rows = arena.take<int32_t>(K);
    int32_t* places = arena.take<int32_t>(K);
    begin(kernels);
#pragma omp for schedule(dynamic, 8)
    for (int64_t s = 0; s < S; s++) {
      if (full) continue;
      const int64_t n = compact(indices + s * K, K, T, rows, places, bad);
      kernels.forward(a, s, Picks{rows, places, n}, arena);
    }
    end(kernels);
  }
  return bad ? kBadIndex : full ? kNoMemory : kOk;
}

extern "C" HR_EXPORT int headrace_latent_backward(int level, int threads, int dtype, const void* q,
                                        const void* kv, const int32_t* indices, const void* out,
                                        float* lse, const void* out_grad, int64_t S, int64_t T,
                                        int64_t H, int64_t C, int64_t V, int64_t K, float scale,
                                        void* dq, void* dkv) {
  const Latent a{q, kv, const_cast<void*>(out), lse, nullptr, out_grad, dq, S, T, H, C, V, K,
                 scale};
  const Kernels kernels = choose(level, dtype);
  const size_t size = kernels.backward_scratch(a);
  SplitSums split(indices, S, K, T, C, threads);
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
    begin(kernels);
    for (int64_t s = share.begin; s < share.end; s++) {
      const int64_t n = compact(indices + s * K, K, T, rows, places, bad);
      kernels.backward(a, s, Picks{rows, places, n}, sums, arena);
    }
    end(kernels);
  }
  if (full) return kNoMemory;
  if (dtype == kBfloat16)
    split.finish(static_cast<Bf16*>(dkv), C, threads);
  else
    split.finish(static_cast<float*>(dkv), C, threads);
  return kOk;
}
