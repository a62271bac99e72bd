// Sparse latent attention of one query row in fp32, on any instruction set. bf16 inputs are
// widened while they are gathered, so products are exact and sums are fp32.
#include "lanes.inl"

// Keys handled at a time: their gathered rows stay in the second-level cache.
static constexpr int64_t kChunk = 64;

struct ForwardScratch {
  float *qt, *keys, *scores, *sums, *high, *total, *all;
};

HR_FN static HR_INLINE ForwardScratch forward_scratch(const Latent& a, Arena& arena) {
  const int64_t Hp = round_up(a.H, 16), Cp = round_up(a.C, 16);
  ForwardScratch s;
  s.qt = arena.take<float>(Cp * Hp);
  s.keys = arena.take<float>(kChunk * Cp);
  s.scores = arena.take<float>(kChunk * Hp);
  s.sums = arena.take<float>(Hp * round_up(a.V, 16));
  s.high = arena.take<float>(Hp);
  s.total = arena.take<float>(Hp);
  s.all = a.mass == nullptr ? nullptr : arena.take<float>(a.K * Hp);
  return s;
}

HR_FN static size_t latent_forward_scratch(const Latent& a) {
  Arena arena{0};
  forward_scratch(a, arena);
  return arena.at;
}

// Flash-style: running maximum and total per head, sums rescaled when the maximum rises.
template <class In>
HR_FN static void latent_forward_row(const Latent& a, int64_t row, const Picks& picks,
                                     Arena arena) {
  const ForwardScratch s = forward_scratch(a, arena);
  const int64_t H = a.H, C = a.C, V = a.V;
  const int64_t Hp = round_up(H, 16), Cp = round_up(C, 16), Vp = round_up(V, 16);
  In* out = static_cast<In*>(a.out) + row * H * V;
  float* lse = a.lse + row * H;
  if (a.mass != nullptr) memset(a.mass + row * a.K, 0, a.K * sizeof(float));
  if (picks.n == 0) {
    memset(out, 0, H * V * sizeof(In));
    for (int64_t h = 0; h < H; h++) lse[h] = -INFINITY;
    return;
  }
  const In* kv = static_cast<const In*>(a.kv);
  widen_transposed(static_cast<const In*>(a.q) + row * H * C, H, C, s.qt, Hp);
  for (int64_t h = 0; h < Hp; h += 16) {
    store(s.high + h, splat(-INFINITY));
    store(s.total + h, F16{});
  }
  for (int64_t begin = 0; begin < picks.n; begin += kChunk) {
    const int64_t n = picks.n - begin < kChunk ? picks.n - begin : kChunk;
    for (int64_t j = 0; j < n; j++)
      widen_row(kv + picks.rows[begin + j] * C, C, s.keys + j * Cp);
    product(n, Hp, C, s.keys, Cp, 1, s.qt, Hp, s.scores, Hp, false);
    for (int64_t h = 0; h < Hp; h += 16) {
      const F16 old = load(s.high + h);
      F16 high = old;
      for (int64_t j = 0; j < n; j++) {
        const F16 x = load(s.scores + j * Hp + h) * a.scale;
        if (s.all != nullptr) store(s.all + (begin + j) * Hp + h, x);
        store(s.scores + j * Hp + h, x);
        high = larger(x, high);
      }
      const F16 shrink = begin == 0 ? F16{} : exponential(old - high);
      F16 total = load(s.total + h) * shrink;
      for (int64_t j = 0; j < n; j++) {
        const F16 p = exponential(load(s.scores + j * Hp + h) - high);
        total += p;
        store(s.scores + j * Hp + h, p);
      }
      store(s.high + h, high);
      store(s.total + h, total);
      for (int64_t i = h; begin != 0 && i < h + 16 && i < H; i++) {
        if (shrink[i - h] == 1.0f) continue;
        for (int64_t d = 0; d < Vp; d += 16)
          store(s.sums + i * Vp + d, load(s.sums + i * Vp + d) * shrink[i - h]);
      }
    }
    product(H, Vp, n, s.scores, 1, Hp, s.keys, Cp, s.sums, Vp, begin != 0);
  }
  for (int64_t h = 0; h < H; h++) {
    const float inverse = 1.0f / s.total[h];
    for (int64_t d = 0; d < V; d++) narrow(s.sums[h * Vp + d] * inverse, out + h * V + d);
    lse[h] = s.high[h] + logf(s.total[h]);
    s.high[h] = lse[h];
  }
  if (a.mass == nullptr) return;
  for (int64_t j = 0; j < picks.n; j++) {
    float mass = 0;
    for (int64_t h = 0; h < Hp; h += 16) {
      const F16 p = exponential(load(s.all + j * Hp + h) - load(s.high + h));
      for (int64_t i = h; i < h + 16 && i < H; i++) mass += p[i - h];
    }
    a.mass[row * a.K + picks.places[j]] = mass;
  }
}

struct BackwardScratch {
  float *q, *qt, *og, *ogt, *keys, *p, *ds, *dk, *dq, *lse, *delta;
};

HR_FN static HR_INLINE BackwardScratch backward_scratch(const Latent& a, Arena& arena) {
  const int64_t Hp = round_up(a.H, 16), Cp = round_up(a.C, 16), Vp = round_up(a.V, 16);
  BackwardScratch s;
  s.q = arena.take<float>(Hp * Cp);
  s.qt = arena.take<float>(Cp * Hp);
  s.og = arena.take<float>(Hp * Vp);
  s.ogt = arena.take<float>(Vp * Hp);
  s.keys = arena.take<float>(kChunk * Cp);
  s.p = arena.take<float>(kChunk * Hp);
  s.ds = arena.take<float>(kChunk * Hp);
  s.dk = arena.take<float>(kChunk * Cp);
  s.dq = arena.take<float>(Hp * Cp);
  s.lse = arena.take<float>(Hp);
  s.delta = arena.take<float>(Hp);
  return s;
}

HR_FN static size_t latent_backward_scratch(const Latent& a) {
  Arena arena{0};
  backward_scratch(a, arena);
  return arena.at;
}

// P = exp(scale q.k - lse); dS = scale P (dP - delta), delta = out.out_grad; dq = dS kv;
// dkv = dS^T q + P^T out_grad (on the value part).
template <class In>
HR_FN static void latent_backward_row(const Latent& a, int64_t row, const Picks& picks,
                                      const RowSums& sums, Arena arena) {
  const BackwardScratch s = backward_scratch(a, arena);
  const int64_t H = a.H, C = a.C, V = a.V;
  const int64_t Hp = round_up(H, 16), Cp = round_up(C, 16), Vp = round_up(V, 16);
  In* dq = static_cast<In*>(a.dq) + row * H * C;
  if (picks.n == 0) {
    memset(dq, 0, H * C * sizeof(In));
    return;
  }
  const In* kv = static_cast<const In*>(a.kv);
  const In* q = static_cast<const In*>(a.q) + row * H * C;
  const In* out = static_cast<const In*>(a.out) + row * H * V;
  const In* out_grad = static_cast<const In*>(a.out_grad) + row * H * V;
  widen_transposed(q, H, C, s.qt, Hp);
  widen_transposed(out_grad, H, V, s.ogt, Hp);
  for (int64_t h = 0; h < H; h++) {
    widen_row(q + h * C, C, s.q + h * Cp);
    widen_row(out_grad + h * V, V, s.og + h * Vp);
    float delta = 0;
    for (int64_t d = 0; d < V; d++) delta += widen(out[h * V + d]) * s.og[h * Vp + d];
    s.delta[h] = delta;
    s.lse[h] = a.lse[row * H + h];
  }
  for (int64_t begin = 0; begin < picks.n; begin += kChunk) {
    const int64_t n = picks.n - begin < kChunk ? picks.n - begin : kChunk;
    for (int64_t j = 0; j < n; j++)
      widen_row(kv + picks.rows[begin + j] * C, C, s.keys + j * Cp);
    product(n, Hp, C, s.keys, Cp, 1, s.qt, Hp, s.p, Hp, false);
    product(n, Hp, V, s.keys, Cp, 1, s.ogt, Hp, s.ds, Hp, false);
    for (int64_t h = 0; h < Hp; h += 16) {
      const F16 lse = load(s.lse + h), delta = load(s.delta + h);
      for (int64_t j = 0; j < n; j++) {
        const F16 p = exponential(load(s.p + j * Hp + h) * a.scale - lse);
        store(s.p + j * Hp + h, p);
        store(s.ds + j * Hp + h, p * (load(s.ds + j * Hp + h) - delta) * a.scale);
      }
    }
    product(H, Cp, n, s.ds, 1, Hp, s.keys, Cp, s.dq, Cp, begin != 0);
    product(n, Cp, H, s.ds, Hp, 1, s.q, Cp, s.dk, Cp, false);
    product(n, Vp, H, s.p, Hp, 1, s.og, Vp, s.dk, Cp, true);
    for (int64_t j = 0; j < n; j++)
      add_row(sums.row(picks.rows[begin + j]), s.dk + j * Cp, Cp);
  }
  for (int64_t h = 0; h < H; h++)
    for (int64_t c = 0; c < C; c++) narrow(s.dq[h * Cp + c], dq + h * C + c);
}
