// Arguments of sparse latent attention, shared by its driver and its row kernels.
#pragma once

#include "common.h"

namespace headrace {

// q [S,H,C], kv [T,C], out and out_grad [S,H,V], lse [S,H], mass [S,K] or null, dq [S,H,C].
struct Latent {
  const void* q;
  const void* kv;
  void* out;
  float* lse;
  float* mass;
  const void* out_grad;
  void* dq;
  int64_t S, T, H, C, V, K;
  float scale;
};

// The selection of one query: `n` valid key rows and their places among its K entries.
struct Picks {
  const int32_t* rows;
  const int32_t* places;
  int64_t n;
};

// Where one worker adds gradients of gathered rows: row r lies at base + (r - first) * stride.
struct RowSums {
  float* base;
  int64_t first;
  int64_t stride;
  float* row(int64_t r) const { return base + (r - first) * stride; }
};

using ForwardRow = void (*)(const Latent&, int64_t row, const Picks&, Arena scratch);
using BackwardRow = void (*)(const Latent&, int64_t row, const Picks&, const RowSums&,
                             Arena scratch);
using ScratchSize = size_t (*)(const Latent&);

#if HR_X86
namespace amx {
size_t latent_forward_scratch(const Latent& a);
size_t latent_backward_scratch(const Latent& a);
void latent_forward_row(const Latent& a, int64_t row, const Picks& picks, Arena scratch);
void latent_backward_row(const Latent& a, int64_t row, const Picks& picks, const RowSums& sums,
                         Arena scratch);
void begin_tiles();
void end_tiles();
}  // namespace amx
#endif

}  // namespace headrace
