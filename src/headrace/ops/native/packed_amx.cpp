// Products of rows with packed panels on tiles: bf16 pairs with fp32 sums, int8 quads with int32.
#include "amx.h"
#include "packed.h"

#if HR_X86
namespace headrace::amx {
namespace {

constexpr int64_t kSlice = 9;

#define HR_DOT(c, a, b)          \
  do {                           \
    if constexpr (kInt8)         \
      _tile_dpbssd(c, a, b);     \
    else                         \
      _tile_dpbf16ps(c, a, b);   \
  } while (false)

// Fetches `left` cache lines, a few at each step of the products: what comes next is in the
// second-level cache when it is needed, and memory never rests.
struct Ahead {
  const char* at;
  int64_t left, each;
  HR_AMX HR_INLINE void step() {
    const int64_t n = each < left ? each : left;
    left -= n;
    for (int64_t i = 0; i < n; i++, at += 64) _mm_prefetch(at, _MM_HINT_T1);
  }
};

// dots [16 or 32 rows, 32 outputs] (+)= one or two sequences of tiles, `below` bytes apart, times
// tiles of a panel. An element is summed in the order of the steps whatever the other rows of its
// tile are, and how many; putting sums aside between steps does not change them.
template <bool kInt8, bool kTwo>
HR_AMX HR_INLINE void multiply(const char* left, int64_t below, const char* right, int64_t steps,
                               bool add, Ahead& ahead, float* dots) {
  float* lower = dots + kTileRows * kPanel;
  HR_BARRIER();
  if (add) {
    _tile_loadd(0, dots, kPanel * 4);
    _tile_loadd(1, dots + 16, kPanel * 4);
    if constexpr (kTwo) {
      _tile_loadd(2, lower, kPanel * 4);
      _tile_loadd(3, lower + 16, kPanel * 4);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t i = 0; i < steps; i++, left += kTileBytes, right += 2 * kTileBytes) {
    ahead.step();
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    HR_DOT(0, 4, 6);
    _tile_loadd(7, right + kTileBytes, 64);
    HR_DOT(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, left + below, 64);
      HR_DOT(2, 5, 6);
      HR_DOT(3, 5, 7);
    }
  }
  _tile_stored(0, dots, kPanel * 4);
  _tile_stored(1, dots + 16, kPanel * 4);
  if constexpr (kTwo) {
    _tile_stored(2, lower, kPanel * 4);
    _tile_stored(3, lower + 16, kPanel * 4);
  }
  HR_BARRIER();
}

template <bool kInt8>
HR_AMX HR_INLINE void products(const Packed& a, const Activations& rows, int64_t begin, int64_t end,
                               FinishRows finish) {
  alignas(64) float dots[kMostRows * kPanel];
  configure_tiles(static_cast<int>(rows.count < kTileRows ? rows.count : kTileRows));
  const int64_t groups = (rows.count + 2 * kTileRows - 1) / (2 * kTileRows);
  // With several groups of rows, as many steps at a time as stay in the first-level cache.
  const int64_t slices = groups == 1 ? 1 : (a.steps + kSlice - 1) / kSlice;
  const int64_t tile_row = a.steps * kTileBytes;
  for (int64_t panel = begin; panel < end; panel++) {
    const char* right = a.panels + panel * a.panel_bytes;
    Ahead ahead{right + a.panel_bytes, panel + 1 < end ? a.panel_bytes / 64 : 0,
                (2 * kTileBytes / 64 + groups - 1) / groups};
    for (int64_t slice = 0; slice < slices; slice++) {
      const int64_t from = a.steps * slice / slices, to = a.steps * (slice + 1) / slices;
      for (int64_t r = 0; r < rows.count; r += 2 * kTileRows) {
        const char* left = rows.data + r / kTileRows * tile_row + from * kTileBytes;
        const char* weights = right + from * 2 * kTileBytes;
        const int64_t n = rows.count - r < 2 * kTileRows ? rows.count - r : 2 * kTileRows;
        float* sums = dots + r * kPanel;
        if (n > kTileRows)
          multiply<kInt8, true>(left, tile_row, weights, to - from, slice > 0, ahead, sums);
        else
          multiply<kInt8, false>(left, tile_row, weights, to - from, slice > 0, ahead, sums);
        if (slice + 1 == slices) finish(a, rows, r, n, panel, sums);
      }
    }
  }
  _tile_release();
}

}  // namespace

HR_AMX void pair_products(const Packed& a, const Activations& rows, int64_t begin, int64_t end,
                          FinishRows finish) {
  products<false>(a, rows, begin, end, finish);
}

HR_AMX void quad_products(const Packed& a, const Activations& rows, int64_t begin, int64_t end,
                          FinishRows finish) {
  products<true>(a, rows, begin, end, finish);
}

}  // namespace headrace::amx
#endif
