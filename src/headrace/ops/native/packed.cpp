// Packed matrices and products with them: splits panels over threads, picks the kernels.
#include "packed.h"

#define HR_BODY "packed_rows.inl"
#include "each_target.inl"

using namespace headrace;

namespace {

constexpr int64_t kCached = 512 << 10;  // bytes of prepared rows, which all panels read again
constexpr int64_t kGrain = 128 << 10;   // bytes of weights that are worth waking another thread
constexpr int64_t kFewRows = 1 << 15;   // elements that one thread prepares while others would wait

bool on_tiles(int level, int kind) { return HR_X86 && level >= kAmx && kind != kWide; }

template <class X>
void choose(int level, int kind, PackedPlan& plan) {
  const bool tiles = on_tiles(level, kind);
  if (kind == kWide) {
    plan.prepare = HR_PICK(level, prepare_floats<X, kWide>);
    plan.products = HR_PICK(level, panel_products<kWide>);
    plan.finish = HR_PICK(level, finish_rows<X, kWide>);
  } else if (kind == kPairs) {
    plan.prepare = tiles ? HR_PICK(level, prepare_tiles<X, kPairs>)
                         : HR_PICK(level, prepare_floats<X, kPairs>);
    plan.products = HR_PICK(level, panel_products<kPairs>);
    plan.finish = HR_PICK(level, finish_rows<X, kPairs>);
  } else {
    plan.prepare = tiles ? HR_PICK(level, prepare_tiles<X, kQuads>)
                         : HR_PICK(level, prepare_floats<X, kQuads>);
    plan.products = HR_PICK(level, panel_products<kQuads>);
    plan.finish = HR_PICK(level, finish_rows<X, kQuads>);
  }
#if HR_X86
  if (tiles) plan.products = kind == kPairs ? amx::pair_products : amx::quad_products;
#endif
}

template <class In>
PackPanel choose_packing(int level, int kind) {
  return kind == kWide    ? HR_PICK(level, pack_panel<In, kWide>)
         : kind == kPairs ? HR_PICK(level, pack_panel<In, kPairs>)
                          : HR_PICK(level, pack_panel<In, kQuads>);
}

// 64-byte steps of the inputs; 0 of kWide.
int64_t count_steps(int kind, int64_t D) {
  return kind == kWide ? 0 : kind == kPairs ? (D + 31) / 32 : (D + 63) / 64;
}

int64_t bytes_of_panel(int kind, int64_t D) {
  return kind == kWide ? D * kPanel * 4 : count_steps(kind, D) * 2 * kTileBytes;
}

}  // namespace

namespace headrace {

PackedPlan packed_plan(int level, int dtype, int kind, int64_t S, int64_t D, int64_t O) {
  PackedPlan plan;
  dtype == kBfloat16 ? choose<Bf16>(level, kind, plan) : choose<float>(level, kind, plan);
  plan.width = round_up(D, 16);
  plan.row_bytes = on_tiles(level, kind) ? count_steps(kind, D) * 64 : plan.width * 4;
  const int64_t fitting = kCached / plan.row_bytes / 32 * 32;
  plan.block = fitting < 32 ? 32 : fitting < kMostRows ? fitting : kMostRows;
  plan.block = S < plan.block ? S : plan.block;
  plan.panels = (O + kPanel - 1) / kPanel;
  return plan;
}

Packed packed_arguments(const void* x, int64_t x_row, const void* panels, const float* scales,
                        const float* bias, int kind, int64_t S, int64_t D, int64_t O, void* out) {
  return {x,   x_row, static_cast<const char*>(panels), scales,
          bias, out,  S,  D, O, count_steps(kind, D), bytes_of_panel(kind, D)};
}

}  // namespace headrace

extern "C" HR_EXPORT int headrace_packed_linear(int level, int threads, int dtype, const void* x,
                                                int64_t x_row, const void* panels,
                                                const float* scales, const float* bias, int kind,
                                                int64_t S, int64_t D, int64_t O, void* out) {
  if (S == 0) return kOk;
  const PackedPlan plan = packed_plan(level, dtype, kind, S, D, O);
  const Packed a = packed_arguments(x, x_row, panels, scales, bias, kind, S, D, O, out);
  static thread_local Workspace space;
  char* memory = space.reserve(plan.size(plan.block));
  if (memory == nullptr) return kNoMemory;

  for (int64_t first = 0; first < S; first += plan.block) {
    const Activations rows = plan.rows(a, first, plan.block, memory);
    const int64_t count = rows.count;
    int64_t workers = plan.panels * a.panel_bytes * (1 + count / 16) / kGrain;
    workers = workers < threads ? workers : threads;
    workers = workers < plan.panels ? workers : plan.panels;
    if (workers <= 1) {
      plan.prepare(a, rows, 0, count);
      plan.products(a, rows, 0, plan.panels, plan.finish);
      continue;
    }
    const bool few = count * D <= kFewRows;
    if (few) plan.prepare(a, rows, 0, count);
    const int64_t tiles = (count + kTileRows - 1) / kTileRows;
#pragma omp parallel num_threads(static_cast<int>(workers))
    {
      if (!few) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++)
          plan.prepare(a, rows, t * kTileRows,
                       (t + 1) * kTileRows < count ? (t + 1) * kTileRows : count);
      }
#pragma omp for schedule(static, 1) nowait
      for (int64_t w = 0; w < workers; w++)
        plan.products(a, rows, plan.panels * w / workers, plan.panels * (w + 1) / workers,
                      plan.finish);
    }
  }
  return kOk;
}

extern "C" HR_EXPORT int headrace_pack_matrix(int level, int threads, int dtype, const void* weight,
                                              int64_t row, int kind, int64_t O, int64_t D,
                                              void* panels, float* scales) {
  const Packing a{weight, row, static_cast<char*>(panels), scales, O, D, bytes_of_panel(kind, D)};
  const PackPanel pack =
      dtype == kBfloat16 ? choose_packing<Bf16>(level, kind) : choose_packing<float>(level, kind);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t panel = 0; panel < (O + kPanel - 1) / kPanel; panel++) pack(a, panel);
  return kOk;
}
