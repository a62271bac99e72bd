// Index scores in fp32 and the exact selection of one row, on any instruction set.
#include "lanes.inl"

template <class In>
HR_FN static void pack_tile(const Select& a, int64_t tile, char* to) {
  float* out = reinterpret_cast<float*>(to);
  const In* k = static_cast<const In*>(a.k);
  for (int64_t j = 0; j < kKeyTile; j++) {
    const int64_t row = tile * kKeyTile + j;
    for (int64_t c = 0; c < a.D; c++)
      out[c * kKeyTile + j] = row < a.T ? widen(k[row * a.D + c]) : 0.0f;
  }
}

HR_FN static size_t score_scratch(const Select& a, int64_t block_rows) {
  Arena arena{0};
  arena.take<float>(block_rows * a.HI * a.D);
  arena.take<float>(a.HI * kKeyTile);
  return arena.at;
}

// A score is one chain of multiply-adds over D per head and one over heads, whatever block or tile
// the pair falls in.
template <class In>
HR_FN static void score_block(const Select& a, const QueryBlock& block, int64_t from, int64_t to,
                              const char* packed, float* scores, int64_t row_stride,
                              Arena arena) {
  float* q = arena.take<float>(block.count * a.HI * a.D);
  float* dots = arena.take<float>(a.HI * kKeyTile);
  const int64_t width = a.HI * a.D;
  widen_row(static_cast<const In*>(a.q) + block.first * width, block.count * width, q);
  for (int64_t tile = from; tile < to; tile++) {
    const float* keys = reinterpret_cast<const float*>(packed) + (tile - from) * kKeyTile * a.D;
    for (int64_t i = 0; i < block.count; i++) {
      product(a.HI, kKeyTile, a.D, q + i * width, a.D, 1, keys, kKeyTile, dots, kKeyTile, false);
      const float* weights = a.weights + (block.first + i) * a.HI;
      for (int64_t v = 0; v < kKeyTile; v += 16) {
        F16 sum = F16{};
        for (int64_t h = 0; h < a.HI; h++) {
          const F16 x = load(dots + h * kKeyTile + v);
          sum += splat(weights[h]) * (x < F16{} ? F16{} : x);  // NaN passes
        }
        store(scores + i * row_stride + (tile - from) * kKeyTile + v, sum);
      }
    }
  }
}

// Order-preserving image of a score: larger score, larger number; NaN as -inf; -0 equals +0.
HR_FN static HR_INLINE uint32_t rank_of(float x) {
  x += 0.0f;
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x007fffffu;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

HR_FN static HR_INLINE float score_of(uint32_t rank) {
  const uint32_t bits = rank & 0x80000000u ? rank & 0x7fffffffu : ~rank;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Scores >= bar and their places, in order; room for n + 16.
HR_FN static int64_t collect(const float* scores, int64_t n, float bar, float* values,
                             int32_t* places) {
  int64_t found = 0;
  int64_t j = 0;
#if HR_LEVEL >= 2
  const __m512 bars = _mm512_set1_ps(bar);
  __m512i place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; j + 16 <= n; j += 16) {
    const __m512 x = _mm512_loadu_ps(scores + j);
    const __mmask16 keep = _mm512_cmp_ps_mask(x, bars, _CMP_GE_OQ);
    if (keep != 0) {
      _mm512_storeu_ps(values + found, _mm512_maskz_compress_ps(keep, x));
      _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi32(keep, place));
      found += __builtin_popcount(keep);
    }
    place = _mm512_add_epi32(place, _mm512_set1_epi32(16));
  }
#endif
  for (; j < n; j++) {
    values[found] = scores[j];
    places[found] = static_cast<int32_t>(j);
    found += scores[j] >= bar;
  }
  return found;
}

static constexpr int64_t kBins = 2048;
static constexpr int64_t kSamples = 1024;

// The k-th largest of n numbers: a histogram finds the few that may be it. `few` has room for n.
HR_FN static uint32_t kth_largest(const uint32_t* ranks, int64_t n, int64_t k, uint32_t* few,
                                  uint32_t* bins) {
  uint32_t low = ranks[0], high = ranks[0];
  for (int64_t i = 0; i < n; i++) {
    low = ranks[i] < low ? ranks[i] : low;
    high = ranks[i] > high ? ranks[i] : high;
  }
  int shift = 0;
  while ((high - low) >> shift >= kBins) shift++;
  memset(bins, 0, kBins * sizeof(uint32_t));
  for (int64_t i = 0; i < n; i++) bins[(ranks[i] - low) >> shift]++;
  int64_t bin = (high - low) >> shift, above = 0;
  while (above + bins[bin] < k) above += bins[bin--];
  if (shift == 0) return low + static_cast<uint32_t>(bin);
  int64_t count = 0;
  for (int64_t i = 0; i < n; i++) {
    few[count] = ranks[i];
    count += (ranks[i] - low) >> shift == static_cast<uint32_t>(bin);
  }
  std::nth_element(few, few + (k - above - 1), few + count, std::greater<uint32_t>());
  return few[k - above - 1];
}

// A bar that about k of the scores reach, from a sample; a little too low rather than too high.
HR_FN static float sampled_bar(const float* scores, int64_t n, int64_t k, uint32_t* sample,
                               uint32_t* few, uint32_t* bins) {
  const double share = static_cast<double>(k) / static_cast<double>(n);
  const double mean = kSamples * share;
  const int64_t at = static_cast<int64_t>(mean + 4 * std::sqrt(mean * (1 - share)) + 2);
  if (at > kSamples) return -INFINITY;
  const uint64_t step = (static_cast<uint64_t>(n) << 16) / kSamples;
  for (int64_t i = 0; i < kSamples; i++) sample[i] = rank_of(scores[i * step >> 16]);
  return score_of(kth_largest(sample, kSamples, at, few, bins));
}

HR_FN static size_t select_scratch(int64_t n) {
  Arena arena{0};
  arena.take<float>(n + 16);
  arena.take<int32_t>(n + 16);
  arena.take<uint32_t>(n + 16);
  arena.take<uint32_t>(n + 16);
  arena.take<uint32_t>(kBins);
  return arena.at;
}

// The k best of n scores, their places + base ascending; ties: lowest place; NaN last.
HR_FN static void select_row(const float* scores, int64_t n, int64_t k, int32_t base, int32_t* out,
                             Arena arena) {
  if (n <= k) {
    for (int64_t i = 0; i < n; i++) out[i] = base + static_cast<int32_t>(i);
    for (int64_t i = n; i < k; i++) out[i] = -1;
    return;
  }
  float* values = arena.take<float>(n + 16);
  int32_t* places = arena.take<int32_t>(n + 16);
  uint32_t* ranks = arena.take<uint32_t>(n + 16);
  uint32_t* few = arena.take<uint32_t>(n + 16);
  uint32_t* bins = arena.take<uint32_t>(kBins);
  int64_t found = 0;
  if (n >= 2 * kSamples && k < n / 2) {
    const float bar = sampled_bar(scores, n, k, ranks, few, bins);
    // The comparison drops NaN, so a bar of -inf would not keep all.
    if (bar > -INFINITY) found = collect(scores, n, bar, values, places);
  }
  if (found < k) {
    found = n;
    for (int64_t i = 0; i < n; i++) {
      values[i] = scores[i];
      places[i] = static_cast<int32_t>(i);
    }
  }
  for (int64_t i = 0; i < found; i++) ranks[i] = rank_of(values[i]);
  const uint32_t last = kth_largest(ranks, found, k, few, bins);
  int64_t above = 0;
  for (int64_t i = 0; i < found; i++) above += ranks[i] > last;
  int64_t ties = k - above;
  int64_t taken = 0;
  for (int64_t i = 0; taken < k; i++) {
    const bool tie = ranks[i] == last;
    out[taken] = base + places[i];
    taken += (ranks[i] > last) | (tie & (ties > 0));
    ties -= tie;
  }
}
