// Sparse latent attention of one query row on bf16 tiles: the selected rows are gathered once per
// chunk of keys, in the two layouts that the products need, and every product runs on tiles.
#include "amx.h"
#include "latent.h"

#if HR_X86
namespace headrace::amx {
namespace {

constexpr int64_t kChunk = 256;  // gathered keys stay in the second-level cache

struct Sizes {
  int64_t H, C, V, tiles, Cp, Vp, c_steps, v_steps, key_row, p_row;
  explicit Sizes(const Latent& a)
      : H(a.H),
        C(a.C),
        V(a.V),
        tiles((a.H + 15) / 16),
        Cp(round_up(a.C, 32)),
        Vp(round_up(a.V, 32)),
        c_steps(Cp / 32),
        v_steps(Vp / 32),
        key_row(odd_lines(Cp * 2)),
        p_row(odd_lines(kChunk * 2)) {}
};

struct Forward {
  char *q, *keys, *pairs, *p;
  float *scores, *sums, *high, *total, *all;
  int64_t pair_row, sum_row;
  Forward(const Latent& a, const Sizes& z, Arena& arena) {
    pair_row = odd_lines(z.Vp * 4);
    sum_row = z.Vp + 16;
    q = arena.take<char>(z.tiles * z.c_steps * 1024);
    keys = arena.take<char>(kChunk * z.key_row);
    pairs = arena.take<char>(kChunk / 2 * pair_row);
    p = arena.take<char>(16 * z.p_row);
    scores = arena.take<float>(kChunk * 16);
    sums = arena.take<float>(z.tiles * 16 * sum_row);
    high = arena.take<float>(z.tiles * 16);
    total = arena.take<float>(z.tiles * 16);
    all = a.mass == nullptr ? nullptr : arena.take<float>(z.tiles * a.K * 16);
  }
};

struct Backward {
  char *q, *og, *stacked, *keys, *pairs, *ds, *both;
  float *scores, *dp, *dk, *dq, *lse, *delta;
  int64_t pair_row, stack_row, both_row, sum_row;
  Backward(const Sizes& z, Arena& arena) {
    pair_row = odd_lines(z.Cp * 4);
    stack_row = odd_lines(z.Cp * 4);
    both_row = odd_lines(z.tiles * 64);
    sum_row = z.Cp + 16;
    q = arena.take<char>(z.tiles * z.c_steps * 1024);
    og = arena.take<char>(z.tiles * z.v_steps * 1024);
    stacked = arena.take<char>(z.tiles * 16 * stack_row);
    keys = arena.take<char>(kChunk * z.key_row);
    pairs = arena.take<char>(kChunk / 2 * pair_row);
    ds = arena.take<char>(16 * z.p_row);
    both = arena.take<char>(kChunk * both_row);
    scores = arena.take<float>(kChunk * 16);
    dp = arena.take<float>(kChunk * 16);
    dk = arena.take<float>(16 * sum_row);
    dq = arena.take<float>(z.tiles * 16 * sum_row);
    lse = arena.take<float>(z.tiles * 16);
    delta = arena.take<float>(z.tiles * 16);
  }
};

// x [H, n] bf16 as right-hand tiles: per 16 heads and 32 columns one [n-pairs, heads] tile.
HR_AMX void pack_right(const Bf16* x, int64_t H, int64_t n, char* out) {
  for (int64_t head = 0; head < H; head += 16)
    for (int64_t c = 0; c < n; c += 32, out += 1024) {
      __m512i r[16];
#pragma GCC unroll 16
      for (int h = 0; h < 16; h++)
        r[h] = head + h < H ? load_part(x + (head + h) * n + c, n - c) : _mm512_setzero_si512();
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) _mm512_store_si512(out + 64 * i, r[i]);
    }
}

// Gathers `n` rows, zero-filled to a multiple of 32: whole rows into `keys`, and the first
// `pair_columns` columns of each two rows side by side into `pairs`. Inside each 32 columns the
// pairs come in the order of unpack instructions; `ordered` undoes it on results.
HR_AMX HR_INLINE void gather(const Bf16* kv, const int32_t* rows, int64_t n, int64_t C,
                             int64_t pair_columns, char* keys, int64_t key_row, char* pairs,
                             int64_t pair_row) {
  const int64_t padded = round_up(n, 32);
  for (int64_t j = 0; j < padded; j += 2) {
    if (j + 16 < n) prefetch(kv + rows[j + 16] * C, C * 2);
    if (j + 17 < n) prefetch(kv + rows[j + 17] * C, C * 2);
    const Bf16* first = j < n ? kv + rows[j] * C : nullptr;
    const Bf16* second = j + 1 < n ? kv + rows[j + 1] * C : nullptr;
    char* key = keys + j * key_row;
    char* pair = pairs + j / 2 * pair_row;
    for (int64_t c = 0; c < C; c += 32) {
      const __m512i x = first != nullptr ? load_part(first + c, C - c) : _mm512_setzero_si512();
      const __m512i y = second != nullptr ? load_part(second + c, C - c) : _mm512_setzero_si512();
      _mm512_store_si512(key + c * 2, x);
      _mm512_store_si512(key + key_row + c * 2, y);
      if (c < pair_columns) {
        _mm512_store_si512(pair + c * 4, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(pair + c * 4 + 64, _mm512_unpackhi_epi16(x, y));
      }
    }
  }
}

// [32 keys, 16 heads] fp32 -> [16 heads, 32 keys] bf16.
HR_AMX HR_INLINE void store_transposed(const float* from, char* to, int64_t to_row) {
  alignas(64) static const uint16_t kSide[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,
                                                 21, 6, 22, 7, 23, 8,  24, 9,  25, 10, 26,
                                                 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i side = _mm512_load_si512(kSide);
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++)
    r[i] = _mm512_permutexvar_epi16(
        side, (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(from + 32 * i + 16),
                                           _mm512_load_ps(from + 32 * i)));
  transpose(r);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * to_row, r[i]);
}

}  // namespace

HR_AMX void begin_tiles() { configure_tiles(); }
HR_AMX void end_tiles() { _tile_release(); }

size_t latent_forward_scratch(const Latent& a) {
  Arena arena{0};
  Forward(a, Sizes(a), arena);
  return arena.at;
}

HR_AMX void latent_forward_row(const Latent& a, int64_t row, const Picks& picks, Arena arena) {
  const Sizes z(a);
  const Forward s(a, z, arena);
  Bf16* out = static_cast<Bf16*>(a.out) + row * z.H * z.V;
  float* lse = a.lse + row * z.H;
  if (a.mass != nullptr) memset(a.mass + row * a.K, 0, a.K * sizeof(float));
  if (picks.n == 0) {
    memset(out, 0, z.H * z.V * sizeof(Bf16));
    for (int64_t h = 0; h < z.H; h++) lse[h] = -INFINITY;
    return;
  }
  pack_right(static_cast<const Bf16*>(a.q) + row * z.H * z.C, z.H, z.C, s.q);
  const __m512 scale = _mm512_set1_ps(a.scale);
  for (int64_t begin = 0; begin < picks.n; begin += kChunk) {
    const int64_t n = picks.n - begin < kChunk ? picks.n - begin : kChunk;
    const int64_t padded = round_up(n, 32);
    gather(static_cast<const Bf16*>(a.kv), picks.rows + begin, n, z.C, z.Vp, s.keys, z.key_row,
           s.pairs, s.pair_row);
    for (int64_t tile = 0; tile < z.tiles; tile++) {
      tiles_column(s.keys, z.key_row, s.q + tile * z.c_steps * 1024, s.scores, z.c_steps, padded);
      const __m512 old =
          begin == 0 ? _mm512_set1_ps(-INFINITY) : _mm512_load_ps(s.high + 16 * tile);
      __m512 high = old;
      for (int64_t j = 0; j < n; j++) {
        const __m512 x = _mm512_mul_ps(_mm512_load_ps(s.scores + j * 16), scale);
        _mm512_store_ps(s.scores + j * 16, x);
        if (s.all != nullptr) _mm512_store_ps(s.all + (tile * a.K + begin + j) * 16, x);
        high = _mm512_max_ps(high, x);
      }
      __m512 total = _mm512_setzero_ps();
      if (begin != 0) {
        const __m512 shrink = exponential(_mm512_sub_ps(old, high));
        total = _mm512_mul_ps(_mm512_load_ps(s.total + 16 * tile), shrink);
        alignas(64) float factors[16];
        _mm512_store_ps(factors, shrink);
        for (int h = 0; h < 16; h++) {
          if (factors[h] == 1.0f) continue;
          float* sums = s.sums + (tile * 16 + h) * s.sum_row;
          const __m512 factor = _mm512_set1_ps(factors[h]);
          for (int64_t d = 0; d < z.Vp; d += 16)
            _mm512_store_ps(sums + d, _mm512_mul_ps(_mm512_load_ps(sums + d), factor));
        }
      }
      for (int64_t j = 0; j < n; j++) {
        const __m512 p = exponential(_mm512_sub_ps(_mm512_load_ps(s.scores + j * 16), high));
        total = _mm512_add_ps(total, p);
        _mm512_store_ps(s.scores + j * 16, p);
      }
      for (int64_t j = n; j < padded; j++)
        _mm512_store_ps(s.scores + j * 16, _mm512_setzero_ps());
      for (int64_t j = 0; j < padded; j += 32)
        store_transposed(s.scores + j * 16, s.p + j * 2, z.p_row);
      _mm512_store_ps(s.high + 16 * tile, high);
      _mm512_store_ps(s.total + 16 * tile, total);
      tiles_row(s.p, z.p_row, 64, s.pairs, s.pair_row, 16 * s.pair_row,
                s.sums + tile * 16 * s.sum_row, s.sum_row * 4, padded / 32, z.Vp, begin != 0);
    }
  }
  for (int64_t h = 0; h < z.H; h++) {
    const float inverse = 1.0f / s.total[h];
    for (int64_t d = 0; d < z.V; d += 32)
      write_ordered(s.sums + h * s.sum_row + d, inverse, out + h * z.V + d, z.V - d);
    lse[h] = s.high[h] + logf(s.total[h]);
    s.high[h] = lse[h];
  }
  if (a.mass == nullptr) return;
  float* mass = a.mass + row * a.K;
  for (int64_t tile = 0; tile < z.tiles; tile++) {
    const int64_t heads = z.H - tile * 16 < 16 ? z.H - tile * 16 : 16;
    const __mmask16 real = static_cast<__mmask16>((1u << heads) - 1u);
    const __m512 norm = _mm512_load_ps(s.high + 16 * tile);
    for (int64_t j = 0; j < picks.n; j++)
      mass[picks.places[j]] += _mm512_mask_reduce_add_ps(
          real,
          exponential(_mm512_sub_ps(_mm512_load_ps(s.all + (tile * a.K + j) * 16), norm)));
  }
}

size_t latent_backward_scratch(const Latent& a) {
  Arena arena{0};
  Backward(Sizes(a), arena);
  return arena.at;
}

HR_AMX void latent_backward_row(const Latent& a, int64_t row, const Picks& picks,
                                const RowSums& sums, Arena arena) {
  const Sizes z(a);
  const Backward s(z, arena);
  const int64_t H = z.H, C = z.C, V = z.V;
  Bf16* dq = static_cast<Bf16*>(a.dq) + row * H * C;
  if (picks.n == 0) {
    memset(dq, 0, H * C * sizeof(Bf16));
    return;
  }
  const Bf16* q = static_cast<const Bf16*>(a.q) + row * H * C;
  const Bf16* out = static_cast<const Bf16*>(a.out) + row * H * V;
  const Bf16* out_grad = static_cast<const Bf16*>(a.out_grad) + row * H * V;
  pack_right(q, H, C, s.q);
  pack_right(out_grad, H, V, s.og);
  // Right-hand side of the key gradients: 16 rows of q, then 16 rows of out_grad, as pairs.
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 16; i++) {
    order[2 * i] = static_cast<uint16_t>(i);
    order[2 * i + 1] = static_cast<uint16_t>(32 + i);
  }
  HR_BARRIER();
  const __m512i low = _mm512_load_si512(order);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int64_t h = 0; h < z.tiles * 16; h += 2)
    for (int side = 0; side < 2; side++) {
      const Bf16* from = side == 0 ? q : out_grad;
      const int64_t width = side == 0 ? C : V;
      char* to = s.stacked + (h / 16 * 16 + side * 8 + h % 16 / 2) * s.stack_row;
      for (int64_t c = 0; c < z.Cp; c += 32) {
        const __m512i x =
            h < H ? load_part(from + h * width + c, width - c) : _mm512_setzero_si512();
        const __m512i y =
            h + 1 < H ? load_part(from + (h + 1) * width + c, width - c) : _mm512_setzero_si512();
        _mm512_store_si512(to + c * 4, _mm512_permutex2var_epi16(x, low, y));
        _mm512_store_si512(to + c * 4 + 64, _mm512_permutex2var_epi16(x, high, y));
      }
    }
  for (int64_t h = 0; h < z.tiles * 16; h++) {
    s.lse[h] = h < H ? a.lse[row * H + h] : INFINITY;  // no probability in padding heads
    __m512 delta = _mm512_setzero_ps();
    for (int64_t d = 0; h < H && d < V; d += 32)
      delta = _mm512_dpbf16_ps(delta, (__m512bh)load_part(out + h * V + d, V - d),
                               (__m512bh)load_part(out_grad + h * V + d, V - d));
    s.delta[h] = _mm512_reduce_add_ps(delta);
  }
  const __m512 scale = _mm512_set1_ps(a.scale);
  for (int64_t begin = 0; begin < picks.n; begin += kChunk) {
    const int64_t n = picks.n - begin < kChunk ? picks.n - begin : kChunk;
    const int64_t padded = round_up(n, 32);
    gather(static_cast<const Bf16*>(a.kv), picks.rows + begin, n, C, z.Cp, s.keys, z.key_row,
           s.pairs, s.pair_row);
    for (int64_t tile = 0; tile < z.tiles; tile++) {
      tiles_column(s.keys, z.key_row, s.q + tile * z.c_steps * 1024, s.scores, z.c_steps, padded);
      tiles_column(s.keys, z.key_row, s.og + tile * z.v_steps * 1024, s.dp, z.v_steps, padded);
      const __m512 lse = _mm512_load_ps(s.lse + 16 * tile);
      const __m512 delta = _mm512_load_ps(s.delta + 16 * tile);
      char* both = s.both + tile * 64;
      for (int64_t j = 0; j < n; j++) {
        if (tile == 0) prefetch(sums.row(picks.rows[begin + j]), C * 4);
        const __m512 p =
            exponential(_mm512_fmsub_ps(_mm512_load_ps(s.scores + j * 16), scale, lse));
        const __m512 ds = _mm512_mul_ps(
            _mm512_mul_ps(p, scale), _mm512_sub_ps(_mm512_load_ps(s.dp + j * 16), delta));
        _mm512_store_ps(s.dp + j * 16, ds);
        _mm512_store_si512(both + j * s.both_row, (__m512i)_mm512_cvtne2ps_pbh(p, ds));
      }
      for (int64_t j = n; j < padded; j++) {
        _mm512_store_ps(s.dp + j * 16, _mm512_setzero_ps());
        _mm512_store_si512(both + j * s.both_row, _mm512_setzero_si512());
      }
      for (int64_t j = 0; j < padded; j += 32)
        store_transposed(s.dp + j * 16, s.ds + j * 2, z.p_row);
      tiles_row(s.ds, z.p_row, 64, s.pairs, s.pair_row, 16 * s.pair_row,
                s.dq + tile * 16 * s.sum_row, s.sum_row * 4, padded / 32, z.Cp, begin != 0);
    }
    for (int64_t j = 0; j < n; j += 16) {
      tiles_row(s.both + j * s.both_row, s.both_row, 64, s.stacked, s.stack_row,
                16 * s.stack_row, s.dk, s.sum_row * 4, z.tiles, z.Cp, false);
      for (int64_t i = j; i < n && i < j + 16; i++) {
        float* to = sums.row(picks.rows[begin + i]);
        const float* from = s.dk + (i - j) * s.sum_row;
        for (int64_t c = 0; c < C; c += 16)
          _mm512_store_ps(to + c, _mm512_add_ps(_mm512_load_ps(to + c), _mm512_load_ps(from + c)));
      }
    }
  }
  for (int64_t h = 0; h < H; h++)
    for (int64_t c = 0; c < C; c += 32)
      write_ordered(s.dq + h * s.sum_row + c, 1.0f, dq + h * C + c, C - c);
}

}  // namespace headrace::amx
#endif
