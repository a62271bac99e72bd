// Tile matrix products in bf16 with fp32 sums, and the data layouts they read.
//
// A tile holds 16 rows of 64 bytes. C[16,16] += A[16,32] B[32,16]: A is row-major bf16; B is
// "paired": its row r holds for each column the elements 2r and 2r+1 side by side.
// GCC's tile intrinsics do not tell the compiler that they read memory, hence the barriers.
#pragma once

#include "common.h"

#if HR_X86
#define HR_AMX \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,amx-tile,amx-bf16,"        \
                        "amx-int8,fma")))
#define HR_BARRIER() asm volatile("" ::: "memory")

namespace headrace::amx {

// Four neighbouring column tiles of C += A B over `steps` of 32. Strides in bytes; B's columns of
// one tile are 64 bytes apart, its steps `b_step`.
HR_AMX static HR_INLINE void tiles_1x4(const void* a, int64_t a_row, int64_t a_step, const void* b,
                                       int64_t b_row, int64_t b_step, float* c, int64_t c_row,
                                       int64_t steps, bool add) {
  const char* left = static_cast<const char*>(a);
  const char* right = static_cast<const char*>(b);
  HR_BARRIER();
  if (add) {
    _tile_loadd(0, c, c_row);
    _tile_loadd(1, c + 16, c_row);
    _tile_loadd(2, c + 32, c_row);
    _tile_loadd(3, c + 48, c_row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t i = 0; i < steps; i++, left += a_step, right += b_step) {
    _tile_loadd(4, left, a_row);
    _tile_loadd(5, right, b_row);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, right + 64, b_row);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, right + 128, b_row);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, right + 192, b_row);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, c, c_row);
  _tile_stored(1, c + 16, c_row);
  _tile_stored(2, c + 32, c_row);
  _tile_stored(3, c + 48, c_row);
  HR_BARRIER();
}

// As above, two column tiles.
HR_AMX static HR_INLINE void tiles_1x2(const void* a, int64_t a_row, int64_t a_step, const void* b,
                                       int64_t b_row, int64_t b_step, float* c, int64_t c_row,
                                       int64_t steps, bool add) {
  const char* left = static_cast<const char*>(a);
  const char* right = static_cast<const char*>(b);
  HR_BARRIER();
  if (add) {
    _tile_loadd(0, c, c_row);
    _tile_loadd(1, c + 16, c_row);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  for (int64_t i = 0; i < steps; i++, left += a_step, right += b_step) {
    _tile_loadd(4, left, a_row);
    _tile_loadd(5, right, b_row);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, right + 64, b_row);
    _tile_dpbf16ps(1, 4, 6);
  }
  _tile_stored(0, c, c_row);
  _tile_stored(1, c + 16, c_row);
  HR_BARRIER();
}

// C[16, columns] (+)= A B; `columns` is a multiple of 32.
HR_AMX static HR_INLINE void tiles_row(const void* a, int64_t a_row, int64_t a_step, const void* b,
                                       int64_t b_row, int64_t b_step, float* c, int64_t c_row,
                                       int64_t steps, int64_t columns, bool add) {
  const char* right = static_cast<const char*>(b);
  int64_t n = 0;
  for (; n + 64 <= columns; n += 64)
    tiles_1x4(a, a_row, a_step, right + n * 4, b_row, b_step, c + n, c_row, steps, add);
  if (n < columns)
    tiles_1x2(a, a_row, a_step, right + n * 4, b_row, b_step, c + n, c_row, steps, add);
}

// C[rows, 16] = A[rows, 32 steps] B, four row tiles at a time; `rows` is a multiple of 32. A's rows
// are `a_row` bytes apart; B is a sequence of whole tiles; C's rows are 64 bytes.
HR_AMX static HR_INLINE void tiles_column(const void* a, int64_t a_row, const void* b, float* c,
                                          int64_t steps, int64_t rows) {
  const char* left = static_cast<const char*>(a);
  const char* right = static_cast<const char*>(b);
  int64_t m = 0;
  HR_BARRIER();
  for (; m + 64 <= rows; m += 64) {
    const char* from = left + m * a_row;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < steps; i++, from += 64) {
      _tile_loadd(4, right + i * 1024, 64);
      _tile_loadd(5, from, a_row);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, from + 16 * a_row, a_row);
      _tile_dpbf16ps(1, 6, 4);
      _tile_loadd(7, from + 32 * a_row, a_row);
      _tile_dpbf16ps(2, 7, 4);
      _tile_loadd(5, from + 48 * a_row, a_row);
      _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, c + m * 16, 64);
    _tile_stored(1, c + (m + 16) * 16, 64);
    _tile_stored(2, c + (m + 32) * 16, 64);
    _tile_stored(3, c + (m + 48) * 16, 64);
  }
  if (m < rows) {
    const char* from = left + m * a_row;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < steps; i++, from += 64) {
      _tile_loadd(4, right + i * 1024, 64);
      _tile_loadd(5, from, a_row);
      _tile_dpbf16ps(0, 5, 4);
      _tile_loadd(6, from + 16 * a_row, a_row);
      _tile_dpbf16ps(1, 6, 4);
    }
    _tile_stored(0, c + m * 16, 64);
    _tile_stored(1, c + (m + 16) * 16, 64);
  }
  HR_BARRIER();
}

// All eight tiles 16 rows of 64 bytes; tiles 0 .. 5 with `rows` of them.
HR_AMX static HR_INLINE void configure_tiles(int rows = 16) {
  alignas(64) uint8_t config[64] = {1};
  for (int tile = 0; tile < 8; tile++) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = tile < 6 ? static_cast<uint8_t>(rows) : 16;
  }
  HR_BARRIER();
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

// Transposes 16 x 16 dwords in registers.
HR_AMX static HR_INLINE void transpose(__m512i r[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Up to 32 bf16 at `p`, zeros behind the first `n`.
HR_AMX static HR_INLINE __m512i load_part(const Bf16* p, int64_t n) {
  if (n >= 32) return _mm512_loadu_si512(p);
  if (n <= 0) return _mm512_setzero_si512();
  return _mm512_maskz_loadu_epi16((1u << n) - 1u, p);
}

// Row strides, in bytes, that are an odd number of cache lines: 16 rows then lie in 16 sets.
static HR_INLINE int64_t odd_lines(int64_t bytes) {
  const int64_t lines = (bytes + 63) / 64;
  return (lines | 1) * 64;
}

// e^x for x <= 0, as `exponential` in lanes.inl.
HR_AMX static HR_INLINE __m512 exponential(__m512 x) {
  // The operand order keeps NaN.
  x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
  const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_fmsub_ps(x, _mm512_set1_ps(1.44269504f), whole);
  __m512 p = _mm512_set1_ps(1.535336188e-4f);
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.339887440e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.618437357e-3f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550332471e-2f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402264791e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931472029e-1f));
  p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, whole);
}

HR_AMX static HR_INLINE void prefetch(const void* from, int64_t bytes) {
  const char* line = static_cast<const char*>(from);
  for (int64_t b = 0; b < bytes; b += 64) _mm_prefetch(line + b, _MM_HINT_T0);
}

// 32 results in the order in which unpack instructions pair rows, times `factor`, to at most `n`
// bf16 in true order.
HR_AMX static HR_INLINE void write_ordered(const float* from, float factor, Bf16* to, int64_t n) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512 x = _mm512_loadu_ps(from), y = _mm512_loadu_ps(from + 16);
  const __m512 scale = _mm512_set1_ps(factor);
  const __m512 low = _mm512_mul_ps(_mm512_permutex2var_ps(x, first, y), scale);
  const __m512 high = _mm512_mul_ps(
      _mm512_permutex2var_ps(x, _mm512_add_epi32(first, _mm512_set1_epi32(8)), y), scale);
  const __m512i packed = (__m512i)_mm512_cvtne2ps_pbh(high, low);
  if (n >= 32)
    _mm512_storeu_si512(to, packed);
  else
    _mm512_mask_storeu_epi16(to, (1u << n) - 1u, packed);
}

}  // namespace headrace::amx
#endif
