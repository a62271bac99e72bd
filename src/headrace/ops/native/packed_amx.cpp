// Products of rows with packed panels on tiles: bf16 pairs with fp32 sums, int8 quads with int32.
#include "amx.h"
#include "packed.h"

#if HR_X86
namespace headrace::amx {
namespace {

constexpr int64_t kAhead = 32 << 10;  // bytes of weights between what is fetched and multiplied

#define HR_DOT(c, a, b)          \
  do {                           \
    if constexpr (kInt8)         \
      _tile_dpbssd(c, a, b);     \
    else                         \
      _tile_dpbf16ps(c, a, b);   \
  } while (false)

// Fetches weights into the second-level cache, some lines between any two products, so that memory
// never rests. It goes through four pages side by side: a line that memory still owes keeps one of
// the few buffers through which tiles come from that cache, too, and the processor, which reads on
// by itself in every page that is being read, is far enough ahead only where each is read slowly.
class Ahead {
 public:
  Ahead(const char* from, const char* end) : end_(end), last_(from) {
    at_ = from - reinterpret_cast<uintptr_t>(from) % (kPages * kPage);
  }
  // No further than to `last`, until the next call.
  void to(const char* last) { last_ = last < end_ ? last : end_; }
  template <int kLines>
  HR_AMX HR_INLINE void some() {
    if (at_ >= last_) return;
#pragma GCC unroll 8
    for (int i = 0; i < kLines; i++)
      _mm_prefetch(at_ + i % kPages * kPage + i / kPages * 64, _MM_HINT_T1);
    at_ += kLines / kPages * 64;
    if (reinterpret_cast<uintptr_t>(at_) % kPage == 0) at_ += (kPages - 1) * kPage;
  }

 private:
  static constexpr int64_t kPage = 4096, kPages = 4;
  const char *at_, *end_, *last_;
};

// dots [16 or 32 rows, 32 outputs] (+)= one or two sequences of tiles, `below` bytes apart, times
// tiles of a panel. An element is summed in the order of the steps whatever the other rows of its
// tile are, and how many; putting sums aside between steps does not change them.
template <bool kInt8, bool kTwo, class Rate>
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
    _tile_loadd(4, left, 64);
    _tile_loadd(6, right, 64);
    ahead.some<Rate::kLines>();
    HR_DOT(0, 4, 6);
    _tile_loadd(7, right + kTileBytes, 64);
    if constexpr (Rate::kTimes == 4) ahead.some<Rate::kLines>();
    HR_DOT(1, 4, 7);
    if constexpr (kTwo) _tile_loadd(5, left + below, 64);
    if constexpr (Rate::kTimes > 1) ahead.some<Rate::kLines>();
    if constexpr (kTwo) HR_DOT(2, 5, 6);
    if constexpr (Rate::kTimes == 4) ahead.some<Rate::kLines>();
    if constexpr (kTwo) HR_DOT(3, 5, 7);
  }
  _tile_stored(0, dots, kPanel * 4);
  _tile_stored(1, dots + 16, kPanel * 4);
  if constexpr (kTwo) {
    _tile_stored(2, lower, kPanel * 4);
    _tile_stored(3, lower + 16, kPanel * 4);
  }
  HR_BARRIER();
}

// Lines fetched at once, and how often per step of each of at least `kGroups` groups of rows: no
// fewer than the step has, while all groups are multiplied by it.
template <int kLeastGroups, int kLinesAtOnce, int kTimesPerStep>
struct FetchRate {
  static constexpr int kGroups = kLeastGroups, kLines = kLinesAtOnce, kTimes = kTimesPerStep;
  static_assert(kGroups * kLines * kTimes * 64 == 2 * kTileBytes);
};

template <bool kInt8, class Rate>
HR_AMX HR_INLINE void products_at(const Packed& a, const Activations& rows, int64_t begin,
                                  int64_t end, FinishRows finish) {
  alignas(64) float dots[kMostRows * kPanel];
  configure_tiles(static_cast<int>(rows.count < kTileRows ? rows.count : kTileRows));
  // With several groups of rows, as many steps at a time as stay in the first-level cache. With few
  // of them memory is what is waited for, and fewer steps leave it more of that cache's buffers.
  constexpr int64_t kSlice = Rate::kGroups < 4 ? 4 : 9;
  const int64_t slices = Rate::kGroups == 1 ? 1 : (a.steps + kSlice - 1) / kSlice;
  const int64_t tile_row = a.steps * kTileBytes;
  const char* right = a.panels + begin * a.panel_bytes;
  Ahead ahead(right + kAhead, a.panels + end * a.panel_bytes);
  for (int64_t panel = begin; panel < end; panel++, right += a.panel_bytes) {
    ahead.to(right + a.panel_bytes + kAhead);
    for (int64_t slice = 0; slice < slices; slice++) {
      const int64_t from = a.steps * slice / slices, to = a.steps * (slice + 1) / slices;
      for (int64_t r = 0; r < rows.count; r += 2 * kTileRows) {
        const char* left = rows.data + r / kTileRows * tile_row + from * kTileBytes;
        const char* weights = right + from * 2 * kTileBytes;
        const int64_t n = rows.count - r < 2 * kTileRows ? rows.count - r : 2 * kTileRows;
        float* sums = dots + r * kPanel;
        if (n > kTileRows)
          multiply<kInt8, true, Rate>(left, tile_row, weights, to - from, slice > 0, ahead, sums);
        else
          multiply<kInt8, false, Rate>(left, tile_row, weights, to - from, slice > 0, ahead, sums);
        if (slice + 1 == slices) finish(a, rows, r, n, panel, sums);
      }
    }
  }
  _tile_release();
}

template <bool kInt8>
HR_AMX HR_INLINE void products(const Packed& a, const Activations& rows, int64_t begin, int64_t end,
                               FinishRows finish) {
  const int64_t groups = (rows.count + 2 * kTileRows - 1) / (2 * kTileRows);
  if (groups == 1)
    products_at<kInt8, FetchRate<1, 8, 4>>(a, rows, begin, end, finish);
  else if (groups < 4)
    products_at<kInt8, FetchRate<2, 4, 4>>(a, rows, begin, end, finish);
  else if (groups < 8)
    products_at<kInt8, FetchRate<4, 4, 2>>(a, rows, begin, end, finish);
  else
    products_at<kInt8, FetchRate<8, 4, 1>>(a, rows, begin, end, finish);
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
