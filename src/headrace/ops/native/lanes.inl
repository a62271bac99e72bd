// 16-lane building blocks, included inside one namespace per instruction set (each_target.inl).

HR_FN static HR_INLINE F16 load(const float* p) { return *reinterpret_cast<const F16Any*>(p); }
HR_FN static HR_INLINE void store(float* p, F16 v) { *reinterpret_cast<F16Any*>(p) = v; }
HR_FN static HR_INLINE F16 splat(float x) {
  return F16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
HR_FN static HR_INLINE F16 load(const Bf16* p) {
  U16 wide = __builtin_convertvector(*reinterpret_cast<const H16Any*>(p), U16) << 16;
  F16 out;
  memcpy(&out, &wide, 64);
  return out;
}
HR_FN static HR_INLINE void store(Bf16* p, F16 v) {
  U16 bits;
  memcpy(&bits, &v, 64);
  const U16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U16 nan = U16{} + 0x7fc0u;
  const U16 out = (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
  *reinterpret_cast<H16Any*>(p) = __builtin_convertvector(out, H16);
}

// Up to 16 elements, zeros behind them: tails run the code of whole vectors.
template <class In>
HR_FN static HR_INLINE F16 load_some(const In* p, int64_t n) {
  if (n >= 16) return load(p);
  In some[16] = {};
  for (int64_t i = 0; i < n; i++) some[i] = p[i];
  return load(some);
}

template <class Out>
HR_FN static HR_INLINE void store_some(Out* p, F16 v, int64_t n) {
  if (n >= 16) return store(p, v);
  Out some[16];
  store(some, v);
  for (int64_t i = 0; i < n; i++) p[i] = some[i];
}

HR_FN static HR_INLINE F16 larger(F16 a, F16 b) { return a > b ? a : b; }

// e^x for x <= 0 (below -87: e^-87, which no fp32 sum notices); NaN stays NaN.
HR_FN static HR_INLINE F16 exponential(F16 x) {
  x = x < splat(-87.0f) ? splat(-87.0f) : x;
  const F16 shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F16 shifted = x * splat(1.44269504f) + shift;
  const F16 whole = shifted - shift;
  const F16 f = x * splat(1.44269504f) - whole;  // in [-1/2, 1/2]
  F16 p = splat(1.535336188e-4f);  // 2^f, as in Cephes' exp2f
  p = p * f + splat(1.339887440e-3f);
  p = p * f + splat(9.618437357e-3f);
  p = p * f + splat(5.550332471e-2f);
  p = p * f + splat(2.402264791e-1f);
  p = p * f + splat(6.931472029e-1f);
  p = p * f + splat(1.0f);
  I16 exponent, offset, bits;
  memcpy(&exponent, &shifted, 64);
  memcpy(&offset, &shift, 64);
  memcpy(&bits, &p, 64);
  bits += (exponent - offset) << 23;
  F16 out;
  memcpy(&out, &bits, 64);
  return out;
}

HR_FN static HR_INLINE float sum_lanes(F16 v) {
  float total = 0;
  for (int i = 0; i < 16; i++) total += v[i];
  return total;
}

// C[M, 16*NV] (+)= A[M, k] B[k, 16*NV]; A is read as single floats at a[m*a_row + p*a_col].
// Every element is one chain over p, so its bits do not depend on where in a block it falls.
template <int M, int NV>
HR_FN static HR_INLINE void product_block(const float* a, int64_t a_row, int64_t a_col,
                                          const float* b, int64_t b_row, float* c, int64_t c_row,
                                          int64_t k, bool add) {
  F16 sum[M][NV];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) sum[m][v] = add ? load(c + m * c_row + 16 * v) : F16{};
  for (int64_t p = 0; p < k; p++) {
    F16 right[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) right[v] = load(b + p * b_row + 16 * v);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const F16 left = splat(a[m * a_row + p * a_col]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; v++) sum[m][v] += left * right[v];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) store(c + m * c_row + 16 * v, sum[m][v]);
}

template <int NV>
HR_FN static void product_columns(int64_t rows, const float* a, int64_t a_row, int64_t a_col,
                                  const float* b, int64_t b_row, float* c, int64_t c_row, int64_t k,
                                  bool add) {
  int64_t m = 0;
  for (; m + HR_MR <= rows; m += HR_MR)
    product_block<HR_MR, NV>(a + m * a_row, a_row, a_col, b, b_row, c + m * c_row, c_row, k, add);
  for (; m < rows; m++)
    product_block<1, NV>(a + m * a_row, a_row, a_col, b, b_row, c + m * c_row, c_row, k, add);
}

// C[rows, columns] (+)= A[rows, k] B[k, columns]; `columns` is a multiple of 16.
HR_FN static void product(int64_t rows, int64_t columns, int64_t k, const float* a, int64_t a_row,
                          int64_t a_col, const float* b, int64_t b_row, float* c, int64_t c_row,
                          bool add) {
  int64_t n = 0;
  for (; n + 16 * HR_NV <= columns; n += 16 * HR_NV)
    product_columns<HR_NV>(rows, a, a_row, a_col, b + n, b_row, c + n, c_row, k, add);
  for (; n < columns; n += 16)
    product_columns<1>(rows, a, a_row, a_col, b + n, b_row, c + n, c_row, k, add);
}

// Widens `n` elements; what lies behind them in `out` is left alone.
template <class In>
HR_FN static HR_INLINE void widen_row(const In* in, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store(out + i, load(in + i));
  for (; i < n; i++) out[i] = widen(in[i]);
}

// out[c * out_row + r] = in[r * columns + c]
template <class In>
HR_FN static void widen_transposed(const In* in, int64_t rows, int64_t columns, float* out,
                                   int64_t out_row) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) out[c * out_row + r] = widen(in[r * columns + c]);
}

// into[i] += from[i]; both padded to whole vectors.
HR_FN static HR_INLINE void add_row(float* into, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) store(into + i, load(into + i) + load(from + i));
}
