// Packed matrices and products with them: splits panels over threads, picks the kernels.
#include "packed.h"

#define HR_BODY "packed_rows.inl"
#include "each_target.inl"

using namespace headrace;

namespace {

constexpr int64_t kCached = 512 << 10;  // bytes of prepared rows, which all panels read again
constexpr int64_t kGrain = 128 << 10;   // bytes of weights that are worth waking another thread
constexpr int64_t kFewRows = 1 << 15;   // elements that one thread prepares while others would wait

struct Kernels {
  PrepareRows prepare;
  PanelProducts products;
  FinishRows finish;
  bool tiles;
};

template <class X>
Kernels choose(int level, int kind) {
  if (kind == kWide)
    return {HR_PICK(level, prepare_floats<X, kWide>), HR_PICK(level, panel_products<kWide>),
            HR_PICK(level, finish_rows<X, kWide>), false};
  Kernels k;
  k.tiles = HR_X86 && level >= kAmx;
  if (kind == kPairs) {
    k.products = HR_PICK(level, panel_products<kPairs>);
    k.prepare = k.tiles ? HR_PICK(level, prepare_tiles<X, kPairs>)
                        : HR_PICK(level, prepare_floats<X, kPairs>);
    k.finish = HR_PICK(level, finish_rows<X, kPairs>);
  } else {
    k.products = HR_PICK(level, panel_products<kQuads>);
    k.prepare = k.tiles ? HR_PICK(level, prepare_tiles<X, kQuads>)
                        : HR_PICK(level, prepare_floats<X, kQuads>);
    k.finish = HR_PICK(level, finish_rows<X, kQuads>);
  }
#if HR_X86
  if (k.tiles) k.products = kind == kPairs ? amx::pair_products : amx::quad_products;
#endif
  return k;
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

// Working space of the calling thread, kept between calls: fresh pages would cost more than a
// decoding step's product.
char* working_space(size_t bytes) {
  static thread_local Block memory;
  static thread_local size_t size = 0;
  if (bytes > size) {
    memory.reset(bytes);
    size = memory.data == nullptr ? 0 : bytes;
  }
  return memory.data;
}

}  // namespace

extern "C" HR_EXPORT int headrace_packed_linear(int level, int threads, int dtype, const void* x,
                                                int64_t x_row, const void* panels,
                                                const float* scales, const float* bias, int kind,
                                                int64_t S, int64_t D, int64_t O, void* out) {
  if (S == 0) return kOk;
  const Kernels kernels =
      dtype == kBfloat16 ? choose<Bf16>(level, kind) : choose<float>(level, kind);
  const int64_t steps = count_steps(kind, D), panel_bytes = bytes_of_panel(kind, D);
  const int64_t num_panels = (O + kPanel - 1) / kPanel;
  const Packed a{x, x_row, static_cast<const char*>(panels), scales, bias, out, S, D, O, steps,
                 panel_bytes};

  const int64_t width = round_up(D, 16), row_bytes = kernels.tiles ? steps * 64 : width * 4;
  const int64_t fitting = kCached / row_bytes / 32 * 32;
  int64_t block = fitting < 32 ? 32 : fitting < kMostRows ? fitting : kMostRows;
  block = S < block ? S : block;
  const int64_t data_bytes = round_up(block, kTileRows) * row_bytes;
  char* memory = working_space(static_cast<size_t>(data_bytes + round_up(block * 4, 64)));
  if (memory == nullptr) return kNoMemory;

  for (int64_t first = 0; first < S; first += block) {
    const int64_t count = S - first < block ? S - first : block;
    const Activations rows{memory, reinterpret_cast<float*>(memory + data_bytes), first, count,
                           width};
    int64_t workers = num_panels * panel_bytes * (1 + count / 16) / kGrain;
    workers = workers < threads ? workers : threads;
    workers = workers < num_panels ? workers : num_panels;
    if (workers <= 1) {
      kernels.prepare(a, rows, 0, count);
      kernels.products(a, rows, 0, num_panels, kernels.finish);
      continue;
    }
    const bool few = count * D <= kFewRows;
    if (few) kernels.prepare(a, rows, 0, count);
    const int64_t tiles = (count + kTileRows - 1) / kTileRows;
#pragma omp parallel num_threads(static_cast<int>(workers))
    {
      if (!few) {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tiles; t++)
          kernels.prepare(a, rows, t * kTileRows,
                          (t + 1) * kTileRows < count ? (t + 1) * kTileRows : count);
      }
#pragma omp for schedule(static, 1) nowait
      for (int64_t w = 0; w < workers; w++)
        kernels.products(a, rows, num_panels * w / workers, num_panels * (w + 1) / workers,
                         kernels.finish);
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
