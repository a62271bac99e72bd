// Index scores of bf16 queries and keys on tiles.
#include "amx.h"
#include "select.h"

#if HR_X86
namespace headrace::amx {

// Two right-hand tiles (16 keys each) per 32 columns.
HR_AMX void pack_tile(const Select& a, int64_t tile, char* to) {
  const Bf16* k = static_cast<const Bf16*>(a.k);
  for (int64_t c = 0; c < a.D; c += 32)
    for (int64_t half = 0; half < 2; half++, to += 1024) {
      __m512i r[16];
#pragma GCC unroll 16
      for (int j = 0; j < 16; j++) {
        const int64_t row = tile * kKeyTile + half * 16 + j;
        r[j] = row < a.T ? load_part(k + row * a.D + c, a.D - c) : _mm512_setzero_si512();
      }
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) _mm512_store_si512(to + 64 * i, r[i]);
    }
}

size_t score_scratch(const Select& a, int64_t block_rows) {
  const int64_t rows = round_up(block_rows * a.HI, 32), width = round_up(a.D, 32);
  Arena arena{0};
  arena.take<Bf16>(rows * width);
  arena.take<float>(rows * kKeyTile);
  return arena.at;
}

HR_AMX void score_block(const Select& a, const QueryBlock& block, int64_t from, int64_t to,
                        const char* packed, float* scores, int64_t row_stride, Arena arena) {
  const int64_t used = block.count * a.HI, rows = round_up(used, 32), width = round_up(a.D, 32);
  const int64_t steps = width / 32, tile_bytes = width * 64, q_row = width * 2;
  Bf16* q = arena.take<Bf16>(rows * width);
  float* dots = arena.take<float>(rows * kKeyTile);
  const Bf16* from_q = static_cast<const Bf16*>(a.q) + block.first * a.HI * a.D;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < width; c += 32)
      _mm512_store_si512(q + r * width + c, r < used ? load_part(from_q + r * a.D + c, a.D - c)
                                                     : _mm512_setzero_si512());
  const __m512 zero = _mm512_setzero_ps();
  for (int64_t tile = from; tile < to; tile++) {
    const char* keys = packed + (tile - from) * tile_bytes;
    HR_BARRIER();
    for (int64_t r = 0; r < rows; r += 32) {
      const char* left = reinterpret_cast<const char*>(q + r * width);
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t i = 0; i < steps; i++) {
        _tile_loadd(4, left + 64 * i, q_row);
        _tile_loadd(6, keys + 2048 * i, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, keys + 2048 * i + 1024, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left + 16 * q_row + 64 * i, q_row);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      float* c = dots + r * kKeyTile;
      _tile_stored(0, c, kKeyTile * 4);
      _tile_stored(1, c + 16, kKeyTile * 4);
      _tile_stored(2, c + 16 * kKeyTile, kKeyTile * 4);
      _tile_stored(3, c + 16 * kKeyTile + 16, kKeyTile * 4);
    }
    HR_BARRIER();
    for (int64_t i = 0; i < block.count; i++) {
      const float* weights = a.weights + (block.first + i) * a.HI;
      const float* row = dots + i * a.HI * kKeyTile;
      __m512 x = zero, y = zero;
      for (int64_t h = 0; h < a.HI; h++, row += kKeyTile) {
        const __m512 w = _mm512_set1_ps(weights[h]);
        // max(0, x), in this order: NaN passes.
        x = _mm512_fmadd_ps(w, _mm512_max_ps(zero, _mm512_load_ps(row)), x);
        y = _mm512_fmadd_ps(w, _mm512_max_ps(zero, _mm512_load_ps(row + 16)), y);
      }
      float* out = scores + i * row_stride + (tile - from) * kKeyTile;
      _mm512_storeu_ps(out, x);
      _mm512_storeu_ps(out + 16, y);
    }
  }
}

}  // namespace headrace::amx
#endif
