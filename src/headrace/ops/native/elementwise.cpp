// Norm, gate and rotation: split rows over threads, pick the row kernels for the processor.
#include "elementwise.h"

#define HR_BODY "elementwise_rows.inl"
#include "each_target.inl"

using namespace headrace;

namespace {

constexpr int64_t kGrain = 1 << 14;  // elements that are worth waking another thread
constexpr int64_t kBlocks = 128;     // most partial sums of a weight's gradient
constexpr int64_t kShortest = 32;    // rows behind one of them, at least

// body(begin, end) over [0, count), which costs `elements` in all.
template <class Body>
void in_parallel(int threads, int64_t count, int64_t elements, const Body& body) {
  int64_t workers = elements / kGrain < threads ? elements / kGrain : threads;
  workers = workers < count ? workers : count;
  if (workers <= 1) {
    body(0, count);
    return;
  }
#pragma omp parallel for num_threads(static_cast<int>(workers)) schedule(static, 1)
  for (int64_t w = 0; w < workers; w++) body(count * w / workers, count * (w + 1) / workers);
}

}  // namespace

namespace headrace {

RmsNormRows pick_rms_norm(int level, int x_dtype, int weight_dtype) {
  if (x_dtype == kFloat32) return HR_PICK(level, rms_norm_rows<float, float>);
  if (weight_dtype == kFloat32) return HR_PICK(level, rms_norm_rows<Bf16, float>);
  return HR_PICK(level, rms_norm_rows<Bf16, Bf16>);
}

GateRows pick_gate(int level, int dtype) {
  return dtype == kBfloat16 ? HR_PICK(level, gate_rows<Bf16>) : HR_PICK(level, gate_rows<float>);
}

RotationRows pick_rotation(int level, int in, int table, int out) {
  if (table == kBfloat16) return HR_PICK(level, rotation_rows<Bf16, Bf16, Bf16>);
  if (in == kBfloat16) return HR_PICK(level, rotation_rows<Bf16, float, float>);
  if (out == kBfloat16) return HR_PICK(level, rotation_rows<float, float, Bf16>);
  return HR_PICK(level, rotation_rows<float, float, float>);
}

AddRow pick_add(int level, int dtype) {
  return dtype == kBfloat16 ? HR_PICK(level, add_to_row<Bf16>) : HR_PICK(level, add_to_row<float>);
}

}  // namespace headrace

extern "C" HR_EXPORT int headrace_rms_norm_forward(int level, int threads, int dtype, const void* x,
                                                   const void* weight, int64_t N, int64_t D,
                                                   int64_t inner, int64_t outer_stride,
                                                   int64_t stride, int weight_dtype, float eps,
                                                   void* out, float* root) {
  const RmsNorm a{x, {inner, outer_stride, stride}, weight, nullptr, root, out, nullptr, D, eps};
  const RmsNormRows rows = pick_rms_norm(level, dtype, weight_dtype);
  in_parallel(threads, N, N * D, [&](int64_t begin, int64_t end) { rows(a, begin, end); });
  return kOk;
}

// dx [N, D] and dweight fp32 [D], each of them null where it is not wanted. The rows are summed in
// blocks that depend on N only, so dweight has the same bits at any number of threads.
extern "C" HR_EXPORT int headrace_rms_norm_backward(int level, int threads, int dtype,
                                                    const void* x, const void* weight, float* root,
                                                    const void* grad, int64_t N, int64_t D,
                                                    int64_t inner, int64_t outer_stride,
                                                    int64_t stride, int weight_dtype, void* dx,
                                                    float* dweight) {
  const RmsNorm a{x, {inner, outer_stride, stride}, weight, grad, root, dx, dweight, D, 0.0f};
  const RmsNormGradientRows rows =
      dtype == kFloat32          ? HR_PICK(level, rms_norm_gradient_rows<float, float>)
      : weight_dtype == kFloat32 ? HR_PICK(level, rms_norm_gradient_rows<Bf16, float>)
                                 : HR_PICK(level, rms_norm_gradient_rows<Bf16, Bf16>);
  if (dweight == nullptr) {
    in_parallel(threads, N, 2 * N * D,
                [&](int64_t begin, int64_t end) { rows(a, begin, end, nullptr); });
    return kOk;
  }
  const int64_t even = (N + kBlocks - 1) / kBlocks;
  const int64_t size = even > kShortest ? even : kShortest, blocks = (N + size - 1) / size;
  const Block memory(static_cast<size_t>(blocks * D) * sizeof(float));
  if (memory.data == nullptr) return kNoMemory;
  float* partial = reinterpret_cast<float*>(memory.data);
  in_parallel(threads, blocks, 2 * N * D, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++)
      rows(a, b * size, (b + 1) * size < N ? (b + 1) * size : N, partial + b * D);
  });
  memset(dweight, 0, static_cast<size_t>(D) * sizeof(float));
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t i = 0; i < D; i++) dweight[i] += partial[b * D + i];
  return kOk;
}

extern "C" HR_EXPORT int headrace_swiglu_forward(int level, int threads, int dtype,
                                                 const void* gate_up, int64_t N, int64_t I,
                                                 void* out) {
  const Gate a{gate_up, nullptr, out, I};
  const GateRows rows = pick_gate(level, dtype);
  in_parallel(threads, N, 2 * N * I, [&](int64_t begin, int64_t end) { rows(a, begin, end); });
  return kOk;
}

extern "C" HR_EXPORT int headrace_swiglu_backward(int level, int threads, int dtype,
                                                  const void* gate_up, const void* grad, int64_t N,
                                                  int64_t I, void* out) {
  const Gate a{gate_up, grad, out, I};
  const GateRows rows = dtype == kBfloat16 ? HR_PICK(level, gate_gradient_rows<Bf16>)
                                           : HR_PICK(level, gate_gradient_rows<float>);
  in_parallel(threads, N, 4 * N * I, [&](int64_t begin, int64_t end) { rows(a, begin, end); });
  return kOk;
}

extern "C" HR_EXPORT int headrace_rotate(int level, int threads, int dtype, const void* x,
                                         const void* cos, const void* sin, int64_t N, int64_t d,
                                         int64_t inner, int64_t outer_stride, int64_t stride,
                                         int64_t heads, int64_t tokens, int table_dtype,
                                         int out_dtype, int interleaved, int inverse, void* out) {
  const Strides strides{inner, outer_stride, stride};
  const Rotation a{x, strides, cos, sin, out, heads, tokens, d, interleaved != 0, inverse != 0};
  const RotationRows rows = pick_rotation(level, dtype, table_dtype, out_dtype);
  in_parallel(threads, N, N * d, [&](int64_t begin, int64_t end) { rows(a, begin, end); });
  return kOk;
}
