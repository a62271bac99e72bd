// Products of rows with packed panels in fp32 vectors, and what every level shares: the preparation
// of rows (also as tiles) and the end of a result.
#include "lanes.inl"

typedef int8_t B16 __attribute__((vector_size(16)));

// -- rows ---------------------------------------------------------------------------------------

// The step between a row's int8 values: its largest magnitude over 127. NaN where it holds anything
// that is not finite.
template <class In>
HR_FN static float quantisation_scale(const In* x, int64_t D) {
  I16 most = {};
  for (int64_t i = 0; i < D; i += 16) {
    const F16 value = load_some(x + i, D - i);
    I16 bits;
    memcpy(&bits, &value, 64);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;  // magnitudes are ordered as integers, NaN above infinity
  }
  int32_t top = 0;
  for (int i = 0; i < 16; i++) top = most[i] > top ? most[i] : top;
  if (top >= 0x7f800000) return NAN;
  float largest;
  memcpy(&largest, &top, 4);
  return largest / 127.0f;
}

// x / scale to the nearest integer, halves to even, within -127 .. 127.
HR_FN static HR_INLINE I16 quantise(F16 x, F16 scale) {
  x = x / scale;
  x = x > splat(127.0f) ? splat(127.0f) : x;
  x = x < splat(-127.0f) ? splat(-127.0f) : x;
  const F16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F16 shifted = x + shift;
  I16 bits, zero;
  memcpy(&bits, &shifted, 64);
  memcpy(&zero, &shift, 64);
  return bits - zero;
}

// Elements i .. i + 16 of a row as the matrix' kind takes them: rounded to bf16, or to int8.
template <class In, int kKind>
HR_FN static HR_INLINE F16 take(const In* x, int64_t i, int64_t D, float scale) {
  const F16 value = load_some(x + i, D - i);
  if (kKind == kQuads)
    return scale > 0 ? __builtin_convertvector(quantise(value, splat(scale)), F16) : F16{};
  if (kKind == kPairs && sizeof(In) == 4) {
    Bf16 rounded[16];
    store(rounded, value);
    return load(rounded);
  }
  return value;
}

template <class In, int kKind>
HR_FN static void prepare_floats(const Packed& a, const Activations& rows, int64_t begin,
                                 int64_t end) {
  for (int64_t r = begin; r < end; r++) {
    const In* x = static_cast<const In*>(a.x) + (rows.first + r) * a.x_row;
    float* to = reinterpret_cast<float*>(rows.data) + r * rows.width;
    float scale = 0;
    if (kKind == kQuads) rows.scales[r] = scale = quantisation_scale(x, a.D);
    for (int64_t i = 0; i < rows.width; i += 16) store(to + i, take<In, kKind>(x, i, a.D, scale));
  }
}

template <class In, int kKind>
HR_FN static void prepare_tiles(const Packed& a, const Activations& rows, int64_t begin,
                                int64_t end) {
  constexpr int64_t kSize = kKind == kQuads ? 1 : 2;
  for (int64_t r = begin; r < end; r++) {
    const In* x = static_cast<const In*>(a.x) + (rows.first + r) * a.x_row;
    char* tile = rows.data + r / kTileRows * a.steps * kTileBytes + r % kTileRows * 64;
    float scale = 0;
    if (kKind == kQuads) rows.scales[r] = scale = quantisation_scale(x, a.D);
    for (int64_t step = 0; step < a.steps; step++, tile += kTileBytes)
      for (int64_t byte = 0; byte < 64; byte += 16 * kSize) {
        const int64_t i = (step * 64 + byte) / kSize;
        if (kKind == kQuads) {
          I16 value = {};
          if (scale > 0) value = quantise(load_some(x + i, a.D - i), splat(scale));
          const B16 narrow_value = __builtin_convertvector(value, B16);
          memcpy(tile + byte, &narrow_value, 16);
        } else if (sizeof(In) == 2 && i + 16 <= a.D) {
          memcpy(tile + byte, x + i, 32);
        } else {
          store(reinterpret_cast<Bf16*>(tile + byte), load_some(x + i, a.D - i));
        }
      }
  }
  // The rest of the last tile, where the rows are more than one tile.
  if (end < rows.count || end % kTileRows == 0 || rows.count < kTileRows) return;
  char* tile = rows.data + end / kTileRows * a.steps * kTileBytes;
  for (int64_t step = 0; step < a.steps; step++, tile += kTileBytes)
    memset(tile + end % kTileRows * 64, 0, static_cast<size_t>(kTileRows - end % kTileRows) * 64);
}

// 16 whole sums at `at`, times what one of them is worth.
HR_FN static HR_INLINE F16 scaled(const float* at, F16 output_scale, float row_scale) {
  I16 whole;
  memcpy(&whole, at, 64);
  return __builtin_convertvector(whole, F16) * output_scale * splat(row_scale);
}

template <class Out, int kKind>
HR_FN static void finish_rows(const Packed& a, const Activations& rows, int64_t row, int64_t count,
                              int64_t panel, float* dots) {
  const int64_t column = panel * kPanel, n = a.O - column;
  F16 worth[2] = {}, bias[2] = {};
  if (kKind == kQuads) {
    worth[0] = load(a.scales + column);
    worth[1] = load(a.scales + column + 16);
  }
  if (a.bias != nullptr) {
    bias[0] = load_some(a.bias + column, n);
    bias[1] = load_some(a.bias + column + 16, n - 16);
  }
  if (kKind == kQuads && a.bias != nullptr) {
    for (int64_t r = 0; r < count; r++)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        float* at = dots + r * kPanel + 16 * v;
        store(at, scaled(at, worth[v], rows.scales[row + r]));
      }
    // These products do not fuse with the sum below on any level: all of them give the same bits.
    asm volatile("" ::"r"(dots) : "memory");
  }
  Out* out = static_cast<Out*>(a.out) + (rows.first + row) * a.O + column;
  for (int64_t r = 0; r < count; r++, out += a.O)
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      const float* at = dots + r * kPanel + 16 * v;
      F16 value;
      if (a.bias != nullptr)
        value = load(at) + bias[v];
      else if (kKind == kQuads)
        value = scaled(at, worth[v], rows.scales[row + r]);
      else
        value = load(at);
      store_some(out + 16 * v, value, n - 16 * v);
    }
}

// -- panels -------------------------------------------------------------------------------------

// One dword per output: kGroup neighbouring inputs, widened. `kRun` groups are summed in fp32.
template <int kKind>
struct Weights;

template <>
struct Weights<kWide> {
  static constexpr int kGroup = 1;
  static constexpr int64_t kHalf = 64, kAhead = 2048, kRun = INT64_MAX;
  HR_FN static HR_INLINE int64_t at(int64_t group) { return group * 128; }
  HR_FN static HR_INLINE void widen(const char* p, F16* out) {
    out[0] = load(reinterpret_cast<const float*>(p));
  }
};

template <>
struct Weights<kPairs> {
  static constexpr int kGroup = 2;
  static constexpr int64_t kHalf = kTileBytes, kAhead = 4096, kRun = INT64_MAX;
  HR_FN static HR_INLINE int64_t at(int64_t group) {
    return (group >> 4) * 2 * kTileBytes + (group & 15) * 64;
  }
  HR_FN static HR_INLINE void widen(const char* p, F16* out) {
    U16 bits;
    memcpy(&bits, p, 64);
    const U16 low = bits << 16, high = bits & 0xffff0000u;
    memcpy(out, &low, 64);
    memcpy(out + 1, &high, 64);
  }
};

template <>
struct Weights<kQuads> {
  // Sums of 1024 products of up to 127 * 127 are exact in fp32.
  static constexpr int kGroup = 4;
  static constexpr int64_t kHalf = kTileBytes, kAhead = 4096, kRun = 256;
  HR_FN static HR_INLINE int64_t at(int64_t group) { return Weights<kPairs>::at(group); }
  HR_FN static HR_INLINE void widen(const char* p, F16* out) {
    I16 bits;
    memcpy(&bits, p, 64);
    out[0] = __builtin_convertvector(bits << 24 >> 24, F16);
    out[1] = __builtin_convertvector(bits << 16 >> 24, F16);
    out[2] = __builtin_convertvector(bits << 8 >> 24, F16);
    out[3] = __builtin_convertvector(bits >> 24, F16);
  }
};

template <class In, int kKind>
HR_FN static void pack_panel(const Packing& a, int64_t panel) {
  using W = Weights<kKind>;
  const int64_t first = panel * kPanel, outputs = a.O - first < kPanel ? a.O - first : kPanel;
  const int64_t groups = a.panel_bytes / (kPanel * 4);
  for (int64_t o = 0; o < outputs; o++) {
    const In* weight = static_cast<const In*>(a.weight) + (first + o) * a.row;
    char* to = a.panels + panel * a.panel_bytes + o / 16 * W::kHalf + o % 16 * 4;
    float scale = 0;
    if (kKind == kQuads) a.scales[first + o] = scale = quantisation_scale(weight, a.D);
    for (int64_t g = 0; g < groups;) {
      const F16 value = take<In, kKind>(weight, g * W::kGroup, a.D, scale);
      alignas(64) char words[64];
      if (kKind == kWide) {
        memcpy(words, &value, 64);
      } else if (kKind == kPairs) {
        store(reinterpret_cast<Bf16*>(words), value);
      } else {
        const I16 whole = __builtin_convertvector(value, I16);
        const B16 bytes = __builtin_convertvector(whole, B16);
        memcpy(words, &bytes, 16);
      }
      for (int64_t n = 0; n < 16 / W::kGroup && g < groups; n++, g++)
        memcpy(to + W::at(g), words + 4 * n, 4);
    }
  }
}

// M rows times 16 * NV outputs of a panel, to `dots` with rows of kPanel.
template <int kKind, int M, int NV>
HR_FN static HR_INLINE void panel_block(const float* a, int64_t a_row, const char* panel,
                                        int64_t groups, float* dots) {
  using W = Weights<kKind>;
  F16 sum[M][NV];
  for (int64_t from = 0; from < groups; from += W::kRun) {
    const int64_t to = groups - from < W::kRun ? groups : from + W::kRun;
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) sum[m][v] = F16{};
    for (int64_t g = from; g < to; g++) {
      const char* p = panel + W::at(g);
      F16 right[NV][W::kGroup];
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) {
        __builtin_prefetch(p + W::kAhead + v * W::kHalf);
        W::widen(p + v * W::kHalf, right[v]);
      }
#pragma GCC unroll 4
      for (int j = 0; j < W::kGroup; j++)
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
          const F16 left = splat(a[m * a_row + g * W::kGroup + j]);
#pragma GCC unroll 2
          for (int v = 0; v < NV; v++) sum[m][v] += left * right[v][j];
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int v = 0; v < NV; v++) {
        float* to_dots = dots + m * kPanel + 16 * v;
        if (kKind == kQuads) {
          I16 total = __builtin_convertvector(sum[m][v], I16);
          if (from > 0) {
            I16 before;
            memcpy(&before, to_dots, 64);
            total += before;
          }
          memcpy(to_dots, &total, 64);
        } else {
          store(to_dots, sum[m][v]);
        }
      }
    if (W::kRun == INT64_MAX) break;
  }
}

template <int kKind, int M>
HR_FN static void panel_rows(const Packed& a, const Activations& rows, int64_t row, int64_t panel,
                             FinishRows finish) {
  using W = Weights<kKind>;
  constexpr int NV = M == 1 || HR_NV == 2 ? 2 : 1;
  float dots[M * kPanel];
  const float* left = reinterpret_cast<const float*>(rows.data) + row * rows.width;
  const char* right = a.panels + panel * a.panel_bytes;
  const int64_t groups = (a.D + W::kGroup - 1) / W::kGroup;
  for (int half = 0; half < 2; half += NV)
    panel_block<kKind, M, NV>(left, rows.width, right + half * W::kHalf, groups, dots + 16 * half);
  finish(a, rows, row, M, panel, dots);
}

// Blocks of many rows and of few give every result the same chain of operations.
template <int kKind>
HR_FN static void panel_products(const Packed& a, const Activations& rows, int64_t begin,
                                 int64_t end, FinishRows finish) {
  for (int64_t panel = begin; panel < end; panel++) {
    int64_t r = 0;
    for (; r + HR_MR <= rows.count; r += HR_MR) panel_rows<kKind, HR_MR>(a, rows, r, panel, finish);
#if HR_MR > 4
    for (; r + 4 <= rows.count; r += 4) panel_rows<kKind, 4>(a, rows, r, panel, finish);
#endif
    for (; r + 2 <= rows.count; r += 2) panel_rows<kKind, 2>(a, rows, r, panel, finish);
    if (r < rows.count) panel_rows<kKind, 1>(a, rows, r, panel, finish);
  }
}
