// Arguments of draws from rows of logits, shared by the driver and its kernels.
#pragma once

#include "common.h"

namespace headrace {

constexpr int64_t kDrawBlock = 128;  // logits whose weights are summed in float

// logits [n, V]. Drawing: temperature, draws and every result [n]; a temperature of 0 takes the
// largest logit. Scoring: ids and out [n, m].
struct Draws {
  const float* logits;
  const float* temperature;
  const double* draws;
  int64_t* ids;
  float* logprobs;
  float* raw_logprobs;
  int64_t V, m;
};

using DrawRows = void (*)(const Draws&, int64_t begin, int64_t end, double* blocks);

}  // namespace headrace
