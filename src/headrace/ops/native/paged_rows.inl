// Paged attention of a tile of query rows in fp32, on any instruction set. Keys are gathered as
// columns, so that one vector holds the scores of one row at 16 neighbouring positions.
//
// Every number of a row is computed from that row and its keys alone, position by position in one
// order: what is added for positions that only other rows of the tile see is exactly zero.
#include "lanes.inl"

// Keys handled at a time, counted from position 0: a row meets the same chunks in any tile.
static constexpr int64_t kChunk = 64;

struct PagedScratch {
  float *q, *keys, *values, *scores, *totals;
};

HR_FN static HR_INLINE PagedScratch paged_scratch(const Paged& a, int64_t rows, Arena& arena) {
  const int64_t width = round_up(a.d, 16);
  PagedScratch s;
  s.q = arena.take<float>(rows * a.d);
  s.keys = arena.take<float>(width * kChunk);
  s.values = arena.take<float>(kChunk * width);
  s.scores = arena.take<float>(rows * kChunk);
  s.totals = arena.take<float>(rows * 16);
  return s;
}

HR_FN static size_t paged_scratch_size(const Paged& a, int64_t rows) {
  Arena arena{0};
  paged_scratch(a, rows, arena);
  return arena.at;
}

HR_FN static HR_INLINE float largest_lane(F16 v) {
#if HR_LEVEL == 2
  return _mm512_reduce_max_ps((__m512)v);
#else
  float most = v[0];
  for (int i = 1; i < 16; i++) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

#if HR_LEVEL == 2
// Transposes 16 x 16 floats in registers.
HR_FN static HR_INLINE void transpose(F16 r[16]) {
  __m512 t[16], u[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps((__m512)r[i], (__m512)r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps((__m512)r[i], (__m512)r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    u[i] = (__m512)_mm512_unpacklo_pd((__m512d)t[i], (__m512d)t[i + 2]);
    u[i + 1] = (__m512)_mm512_unpackhi_pd((__m512d)t[i], (__m512d)t[i + 2]);
    u[i + 2] = (__m512)_mm512_unpacklo_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
    u[i + 3] = (__m512)_mm512_unpackhi_pd((__m512d)t[i + 1], (__m512d)t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = (F16)_mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = (F16)_mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = (F16)_mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = (F16)_mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}
#endif

// out[c * kChunk + j] = rows[j][c] for the `n` <= 16 rows of `d` elements; zeros for further j.
template <class In>
HR_FN static HR_INLINE void gather_columns(const In* const* rows, int64_t n, int64_t d,
                                           float* out) {
#if HR_LEVEL == 2
  for (int64_t c = 0; c < d; c += 16) {
    F16 r[16];
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) {
      r[j] = F16{};
      if (j >= n) continue;
      if (c + 16 <= d) {
        r[j] = load(rows[j] + c);
      } else {
        In some[16] = {};
        for (int64_t i = c; i < d; i++) some[i - c] = rows[j][i];
        r[j] = load(some);
      }
    }
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) store(out + (c + i) * kChunk, r[i]);
  }
#else
  for (int64_t c = 0; c < d; c++)
    for (int64_t j = 0; j < 16; j++) out[c * kChunk + j] = j < n ? widen(rows[j][c]) : 0.0f;
#endif
}

// Rows of a register block below, and its columns in vectors: 16 sums on AVX-512.
#if HR_LEVEL == 2
#define HR_WIDE 4
static constexpr int kBlockRows = 4;
#else
#define HR_WIDE 1
static constexpr int kBlockRows = HR_MR < 4 ? HR_MR : 4;
#endif

template <int M>
HR_FN static HR_INLINE void product_few(int64_t columns, int64_t k, const float* a, int64_t a_row,
                                        const float* b, int64_t b_row, float* c, int64_t c_row,
                                        bool add) {
  int64_t n = 0;
  for (; n + 16 * HR_WIDE <= columns; n += 16 * HR_WIDE)
    product_block<M, HR_WIDE>(a, a_row, 1, b + n, b_row, c + n, c_row, k, add);
  for (; n < columns; n += 16)
    product_block<M, 1>(a, a_row, 1, b + n, b_row, c + n, c_row, k, add);
}

// As `product` with a_col = 1, and the same bits; also fast for the few rows of a decoding step.
HR_FN static void product_short(int64_t rows, int64_t columns, int64_t k, const float* a,
                                int64_t a_row, const float* b, int64_t b_row, float* c,
                                int64_t c_row, bool add) {
  int64_t m = 0;
  for (; m + kBlockRows <= rows; m += kBlockRows)
    product_few<kBlockRows>(columns, k, a + m * a_row, a_row, b, b_row, c + m * c_row, c_row, add);
  a += m * a_row;
  c += m * c_row;
  if (rows - m == 1) product_few<1>(columns, k, a, a_row, b, b_row, c, c_row, add);
  if (rows - m == 2) product_few<2>(columns, k, a, a_row, b, b_row, c, c_row, add);
  if (rows - m == 3) product_few<3>(columns, k, a, a_row, b, b_row, c, c_row, add);
}

// Turns the scores of one row at the `n` positions of a chunk, of which it sees `seen` >= 1, into
// weights, exactly zero where it sees nothing. Its sums are rescaled when the maximum rises.
HR_FN static HR_INLINE void weigh(float* scores, int64_t n, int64_t seen, bool fresh, float& high,
                                  float* totals, float* sums, int64_t width) {
  const I16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  F16 best = splat(-INFINITY);
  for (int64_t j = 0; j < n; j += 16) {
    const I16 visible = lanes < static_cast<int32_t>(seen - j);
    const F16 x = visible ? load(scores + j) : splat(-INFINITY);
    store(scores + j, x);
    best = larger(x, best);
  }
  const float old = high, found = largest_lane(best);
  F16 total = fresh ? F16{} : load(totals);
  high = !fresh && old > found ? old : found;
  if (!fresh && high != old) {
    const F16 shrink = exponential(splat(old - high));
    total *= shrink;
    for (int64_t i = 0; i < width; i += 16) store(sums + i, load(sums + i) * shrink);
  }
  for (int64_t j = 0; j < n; j += 16) {
    const I16 visible = lanes < static_cast<int32_t>(seen - j);
    const F16 weight = exponential(load(scores + j) - splat(high));
    const F16 kept = visible ? weight : F16{};
    total += kept;
    store(scores + j, kept);
  }
  store(totals, total);
}

template <class In>
HR_FN static void paged_span(const Paged& a, const PagedTile& tile, int64_t span, const Upcoming&,
                             const Partial& part, Arena arena) {
  const int64_t rows = tile.rows(a), d = a.d, width = round_up(d, 16), sum_row = a.sum_row();
  const PagedScratch s = paged_scratch(a, rows, arena);
  for (int64_t r = 0; r < rows; r++) {
    const In* q = static_cast<const In*>(a.q) + tile.at(a, r);
    for (int64_t c = 0; c < d; c++) s.q[r * d + c] = widen(q[c]) * a.scale;
  }
  const int64_t first = span * kSpan;
  const int64_t last = first + kSpan < tile.end() ? first + kSpan : tile.end();
  for (int64_t begin = first; begin < last; begin += kChunk) {
    const int64_t n = last - begin < kChunk ? last - begin : kChunk;
    const In* keys[kChunk];
    int64_t block = begin / a.P, place = begin % a.P;
    for (int64_t j = 0; j < n; j++) {
      keys[j] = a.key<In>(tile.table[block], tile.head, place);
      widen_row(a.value<In>(tile.table[block], tile.head, place), d, s.values + j * width);
      if (++place == a.P) {
        place = 0;
        block++;
      }
    }
    for (int64_t j = 0; j < n; j += 16) gather_columns(keys + j, n - j, d, s.keys + j);
    const int64_t skip = tile.first_row(a, begin);
    product_short(rows - skip, round_up(n, 16), d, s.q + skip * d, d, s.keys, kChunk,
                  s.scores + skip * kChunk, kChunk, false);
    for (int64_t r = skip; r < rows; r++)
      weigh(s.scores + r * kChunk, n, tile.seen(a, r) - begin, begin == first, part.high[r],
            s.totals + r * 16, part.sums + r * sum_row, width);
    product_short(rows - skip, width, n, s.scores + skip * kChunk, kChunk, s.values, width,
                  part.sums + skip * sum_row, sum_row, begin != first);
  }
  for (int64_t r = tile.first_row(a, first); r < rows; r++)
    part.total[r] = sum_lanes(load(s.totals + r * 16));
}

// `into` becomes the softmax over its own keys and those of `span`, which `from` is about.
HR_FN static void paged_merge(const Paged& a, const PagedTile& tile, int64_t span,
                              const Partial& into, const Partial& from) {
  const int64_t sum_row = a.sum_row();
  for (int64_t r = tile.first_row(a, span * kSpan); r < tile.rows(a); r++) {
    const float high = into.high[r] > from.high[r] ? into.high[r] : from.high[r];
    const F16 left = exponential(splat(into.high[r] - high));
    const F16 right = exponential(splat(from.high[r] - high));
    into.high[r] = high;
    into.total[r] = (splat(into.total[r]) * left + splat(from.total[r]) * right)[0];
    float* sums = into.sums + r * sum_row;
    for (int64_t i = 0; i < sum_row - 16; i += 16)
      store(sums + i, load(sums + i) * left + load(from.sums + r * sum_row + i) * right);
  }
}

template <class In>
HR_FN static void paged_finish(const Paged& a, const PagedTile& tile, const Partial& part) {
  for (int64_t r = 0; r < tile.rows(a); r++) {
    In* out = static_cast<In*>(a.out) + tile.at(a, r);
    const float* sums = part.sums + r * a.sum_row();
    const float inverse = 1.0f / part.total[r];
    for (int64_t c = 0; c < a.d; c++) narrow(sums[c] * inverse, out + c);
  }
}

#undef HR_WIDE
