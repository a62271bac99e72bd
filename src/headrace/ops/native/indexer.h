// Arguments of index scores at selected keys, shared by the driver and the row kernels.
#pragma once

#include "latent.h"

namespace headrace {

// q [S,HI,D], weights [S,HI], k [T,D]; scores, score_grad [S,K]; dq [S,HI,D], dweights [S,HI].
struct Indexer {
  const void* q;
  const float* weights;
  const void* k;
  float* scores;
  const float* score_grad;
  void* dq;
  float* dweights;
  int64_t S, T, HI, D, K;
};

using IndexerForwardRow = void (*)(const Indexer&, int64_t row, const Picks&, Arena scratch);
using IndexerBackwardRow = void (*)(const Indexer&, int64_t row, const Picks&, const RowSums&,
                                    Arena scratch);
using IndexerScratch = size_t (*)(const Indexer&);

}  // namespace headrace
