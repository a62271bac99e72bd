// Arguments of the row-wise ops (norm, gate, rotation), shared by the drivers and the row kernels.
#pragma once

#include "common.h"

namespace headrace {

// Rows inside a strided tensor: row n begins at (n / inner) * outer_stride + (n % inner) * stride
// elements. Two levels are what the heads of a slice of a projection need.
struct Strides {
  int64_t inner, outer_stride, stride;
  HR_INLINE int64_t at(int64_t n) const { return n / inner * outer_stride + n % inner * stride; }
};

// x strided rows of D; weight [D]; root [N], 1 / root mean square of each row. Results and `grad`
// are contiguous [N, D]; dx or dweight may be null. dweight is [blocks, D] partial sums.
struct RmsNorm {
  const void* x;
  Strides strides;
  const void* weight;
  const void* grad;
  float* root;
  void* out;
  float* dweight;
  int64_t D;
  float eps;
};

// gate_up and its gradient [N, 2 I], gates first; out and grad [N, I].
struct Gate {
  const void* gate_up;
  const void* grad;
  void* out;
  int64_t I;
};

// x strided rows of d, `heads` per token; cos and sin [tokens, d], used again from the start for
// every further sequence of a batch; out contiguous.
struct Rotation {
  const void* x;
  Strides strides;
  const void* cos;
  const void* sin;
  void* out;
  int64_t heads, tokens, d;
  bool interleaved, inverse;
};

using RmsNormRows = void (*)(const RmsNorm&, int64_t begin, int64_t end);
using RmsNormGradientRows = void (*)(const RmsNorm&, int64_t begin, int64_t end, float* dweight);
using GateRows = void (*)(const Gate&, int64_t begin, int64_t end);
using RotationRows = void (*)(const Rotation&, int64_t begin, int64_t end);
// into[i] += from[i], rounded to their dtype.
using AddRow = void (*)(void* into, const void* from, int64_t n);

RmsNormRows pick_rms_norm(int level, int x_dtype, int weight_dtype);
GateRows pick_gate(int level, int dtype);
RotationRows pick_rotation(int level, int dtype, int table_dtype, int out_dtype);
AddRow pick_add(int level, int dtype);

}  // namespace headrace
