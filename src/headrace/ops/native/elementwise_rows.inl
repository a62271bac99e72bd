// Norm, gate and rotation of a range of rows, forward and backward, in fp32 inside.
#include "lanes.inl"

// -- norm ---------------------------------------------------------------------------------------

template <class X, class W>
HR_FN static void rms_norm_rows(const RmsNorm& a, int64_t begin, int64_t end) {
  const int64_t D = a.D, whole = D / 64 * 64;
  const W* weight = static_cast<const W*>(a.weight);
  for (int64_t n = begin; n < end; n++) {
    const X* x = static_cast<const X*>(a.x) + a.strides.at(n);
    X* out = static_cast<X*>(a.out) + n * D;
    F16 sum[4] = {};
    for (int64_t i = 0; i < whole; i += 64)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) {
        const F16 value = load(x + i + 16 * v);
        sum[v] += value * value;
      }
    for (int64_t i = whole; i < D; i += 16) {
      const F16 value = load_some(x + i, D - i);
      sum[0] += value * value;
    }
    const float square = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    const float root = 1.0f / sqrtf(square / static_cast<float>(D) + a.eps);
    if (a.root != nullptr) a.root[n] = root;
    for (int64_t i = 0; i < D; i += 16) {
      const F16 scaled = load_some(x + i, D - i) * splat(root);
      store_some(out + i, scaled * load_some(weight + i, D - i), D - i);
    }
  }
}

// With y = x root w and g its gradient: dw = sum of g x root over rows, and
// dx = root (g w - x root^2 mean(g w x)).
template <class X, class W>
HR_FN static void rms_norm_gradient_rows(const RmsNorm& a, int64_t begin, int64_t end,
                                         float* dweight) {
  const int64_t D = a.D;
  const W* weight = static_cast<const W*>(a.weight);
  for (int64_t n = begin; n < end; n++) {
    const X* x = static_cast<const X*>(a.x) + a.strides.at(n);
    const X* grad = static_cast<const X*>(a.grad) + n * D;
    const float root = a.root[n];
    if (a.out != nullptr) {
      F16 sum[2] = {};
      for (int64_t i = 0; i < D; i += 16)
        sum[i >> 4 & 1] += load_some(grad + i, D - i) * load_some(weight + i, D - i) *
                           load_some(x + i, D - i);
      const float mean = sum_lanes(sum[0] + sum[1]) / static_cast<float>(D);
      const F16 along = splat(-root * root * root * mean);
      X* dx = static_cast<X*>(a.out) + n * D;
      for (int64_t i = 0; i < D; i += 16) {
        const F16 g = load_some(grad + i, D - i) * load_some(weight + i, D - i);
        store_some(dx + i, g * splat(root) + load_some(x + i, D - i) * along, D - i);
      }
    }
    if (dweight != nullptr)
      for (int64_t i = 0; i < D; i += 16) {
        const F16 g = load_some(grad + i, D - i) * (load_some(x + i, D - i) * splat(root));
        store_some(dweight + i, load_some(dweight + i, D - i) + g, D - i);
      }
  }
}

// -- gate ---------------------------------------------------------------------------------------

HR_FN static HR_INLINE F16 sigmoid(F16 x) {
  const F16 e = exponential(x < splat(0.0f) ? x : -x);
  return (x < splat(0.0f) ? e : splat(1.0f)) / (splat(1.0f) + e);
}

template <class X>
HR_FN static void gate_rows(const Gate& a, int64_t begin, int64_t end) {
  const int64_t I = a.I;
  for (int64_t n = begin; n < end; n++) {
    const X* gate = static_cast<const X*>(a.gate_up) + n * 2 * I;
    const X* up = gate + I;
    X* out = static_cast<X*>(a.out) + n * I;
    for (int64_t i = 0; i < I; i += 16) {
      const F16 g = load_some(gate + i, I - i);
      store_some(out + i, g * sigmoid(g) * load_some(up + i, I - i), I - i);
    }
  }
}

template <class X>
HR_FN static void gate_gradient_rows(const Gate& a, int64_t begin, int64_t end) {
  const int64_t I = a.I;
  for (int64_t n = begin; n < end; n++) {
    const X* gate = static_cast<const X*>(a.gate_up) + n * 2 * I;
    const X* up = gate + I;
    const X* grad = static_cast<const X*>(a.grad) + n * I;
    X* dgate = static_cast<X*>(a.out) + n * 2 * I;
    X* dup = dgate + I;
    for (int64_t i = 0; i < I; i += 16) {
      const F16 g = load_some(gate + i, I - i), d = load_some(grad + i, I - i);
      const F16 s = sigmoid(g);
      const F16 slope = s * (splat(1.0f) + g * (splat(1.0f) - s));
      store_some(dgate + i, d * load_some(up + i, I - i) * slope, I - i);
      store_some(dup + i, d * g * s, I - i);
    }
  }
}

// -- sum ----------------------------------------------------------------------------------------

template <class X>
HR_FN static void add_to_row(void* into, const void* from, int64_t n) {
  X* to = static_cast<X*>(into);
  const X* x = static_cast<const X*>(from);
  for (int64_t i = 0; i < n; i += 16)
    store_some(to + i, load_some(to + i, n - i) + load_some(x + i, n - i), n - i);
}

// -- rotation -----------------------------------------------------------------------------------

HR_FN static HR_INLINE F16 swap_pairs(F16 v) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#else
  return __builtin_shuffle(v, I16{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
#endif
}

// out = x cos + partner(x) sin; the inverse, which is also the gradient, x cos + partner(x sin).
template <class In, class Table, class Out>
HR_FN static void rotation_rows(const Rotation& a, int64_t begin, int64_t end) {
  const int64_t d = a.d, half = d / 2;
  for (int64_t n = begin; n < end; n++) {
    const In* x = static_cast<const In*>(a.x) + a.strides.at(n);
    const int64_t row = n / a.heads % a.tokens * d;
    const Table* cos = static_cast<const Table*>(a.cos) + row;
    const Table* sin = static_cast<const Table*>(a.sin) + row;
    Out* out = static_cast<Out*>(a.out) + n * d;
    if (a.interleaved) {
      for (int64_t i = 0; i < d; i += 16) {
        const F16 value = load_some(x + i, d - i), s = load_some(sin + i, d - i);
        const F16 turned = swap_pairs(value) * (a.inverse ? swap_pairs(s) : s);
        store_some(out + i, value * load_some(cos + i, d - i) + turned, d - i);
      }
      continue;
    }
    for (int64_t i = 0; i < half; i += 16) {
      const int64_t left = half - i, j = i + half;
      const F16 low = load_some(x + i, left), high = load_some(x + j, left);
      const F16 low_sin = load_some(sin + (a.inverse ? j : i), left);
      const F16 high_sin = load_some(sin + (a.inverse ? i : j), left);
      store_some(out + i, low * load_some(cos + i, left) + high * low_sin, left);
      store_some(out + j, high * load_some(cos + j, left) + low * high_sin, left);
    }
  }
}
