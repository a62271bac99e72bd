// Index scores of one query at its selected keys, forward and backward, in fp32.
#include "lanes.inl"

static constexpr int64_t kChunk = 128;

struct IndexerBuffers {
  float *q, *qt, *keys, *dots, *ds, *dk, *dq;
};

HR_FN static HR_INLINE IndexerBuffers indexer_buffers(const Indexer& a, Arena& arena) {
  const int64_t Hp = round_up(a.HI, 16), Dp = round_up(a.D, 16);
  IndexerBuffers s;
  s.q = arena.take<float>(Hp * Dp);
  s.qt = arena.take<float>(a.D * Hp);
  s.keys = arena.take<float>(kChunk * Dp);
  s.dots = arena.take<float>(kChunk * Hp);
  s.ds = arena.take<float>(kChunk * Hp);
  s.dk = arena.take<float>(kChunk * Dp);
  s.dq = arena.take<float>(Hp * Dp);
  return s;
}

HR_FN static size_t indexer_scratch(const Indexer& a) {
  Arena arena{0};
  indexer_buffers(a, arena);
  return arena.at;
}

// dots[j, h] = q[h] . k[j] of one chunk of keys.
template <class In>
HR_FN static void indexer_dots(const Indexer& a, const Picks& picks, int64_t begin, int64_t n,
                               const IndexerBuffers& s) {
  const int64_t Hp = round_up(a.HI, 16), Dp = round_up(a.D, 16);
  for (int64_t j = 0; j < n; j++)
    widen_row(static_cast<const In*>(a.k) + picks.rows[begin + j] * a.D, a.D, s.keys + j * Dp);
  product(n, Hp, a.D, s.keys, Dp, 1, s.qt, Hp, s.dots, Hp, false);
}

template <class In>
HR_FN static void indexer_forward_row(const Indexer& a, int64_t row, const Picks& picks,
                                      Arena arena) {
  const IndexerBuffers s = indexer_buffers(a, arena);
  const int64_t HI = a.HI, Hp = round_up(HI, 16);
  const float* weights = a.weights + row * HI;
  float* out = a.scores + row * a.K;
  for (int64_t i = 0; i < a.K; i++) out[i] = -INFINITY;
  widen_transposed(static_cast<const In*>(a.q) + row * HI * a.D, HI, a.D, s.qt, Hp);
  for (int64_t begin = 0; begin < picks.n; begin += kChunk) {
    const int64_t n = picks.n - begin < kChunk ? picks.n - begin : kChunk;
    indexer_dots<In>(a, picks, begin, n, s);
    for (int64_t j = 0; j < n; j++) {
      float sum = 0;
      for (int64_t h = 0; h < HI; h++) {
        const float x = s.dots[j * Hp + h];
        sum += weights[h] * (x < 0 ? 0 : x);
      }
      out[picks.places[begin + j]] = sum;
    }
  }
}

// With g the gradient of a score: dweights = g relu(dot), ds = g weight [dot > 0], dq = ds k,
// dk = ds q.
template <class In>
HR_FN static void indexer_backward_row(const Indexer& a, int64_t row, const Picks& picks,
                                       const RowSums& sums, Arena arena) {
  const IndexerBuffers s = indexer_buffers(a, arena);
  const int64_t HI = a.HI, Hp = round_up(HI, 16), D = a.D, Dp = round_up(D, 16);
  const In* q = static_cast<const In*>(a.q) + row * HI * D;
  const float* weights = a.weights + row * HI;
  const float* grad = a.score_grad + row * a.K;
  float* dweights = a.dweights + row * HI;
  memset(s.dq, 0, HI * Dp * sizeof(float));
  memset(dweights, 0, HI * sizeof(float));
  widen_transposed(q, HI, D, s.qt, Hp);
  for (int64_t h = 0; h < HI; h++) widen_row(q + h * D, D, s.q + h * Dp);
  for (int64_t begin = 0; begin < picks.n; begin += kChunk) {
    const int64_t n = picks.n - begin < kChunk ? picks.n - begin : kChunk;
    indexer_dots<In>(a, picks, begin, n, s);
    for (int64_t j = 0; j < n; j++) {
      const float g = grad[picks.places[begin + j]];
      for (int64_t h = 0; h < HI; h++) {
        const float x = s.dots[j * Hp + h];
        dweights[h] += g * (x < 0 ? 0 : x);
        s.ds[j * Hp + h] = x > 0 ? g * weights[h] : 0.0f;
      }
    }
    product(HI, Dp, n, s.ds, 1, Hp, s.keys, Dp, s.dq, Dp, true);
    product(n, Dp, HI, s.ds, Hp, 1, s.q, Dp, s.dk, Dp, false);
    for (int64_t j = 0; j < n; j++)
      add_row(sums.row(picks.rows[begin + j]), s.dk + j * Dp, Dp);
  }
  In* dq = static_cast<In*>(a.dq) + row * HI * D;
  for (int64_t h = 0; h < HI; h++)
    for (int64_t c = 0; c < D; c++) narrow(s.dq[h * Dp + c], dq + h * D + c);
}
