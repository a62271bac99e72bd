// Draws from, and log-probabilities of, a range of rows: a row's numbers depend on that row alone.
// Weights are e^(logit - largest), summed in float over blocks and in double over these.
#include "lanes.inl"

// e^x for x <= 0, and nothing at all below -87: what is ruled out by -inf must not be drawn.
HR_FN static HR_INLINE F16 weights(F16 x) {
  return x < splat(-87.0f) ? F16{} : exponential(x);
}

// load_some with -inf behind the end.
HR_FN static HR_INLINE F16 logits_at(const float* p, int64_t n) {
  if (n >= 16) return load(p);
  float some[16];
  for (int64_t i = 0; i < 16; i++) some[i] = i < n ? p[i] : -INFINITY;
  return load(some);
}

HR_FN static float largest(const float* z, int64_t V) {
  F16 best[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
  int64_t i = 0;
  for (; i + 64 <= V; i += 64)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) best[v] = larger(best[v], load(z + i + 16 * v));
  for (; i < V; i += 16) best[0] = larger(best[0], logits_at(z + i, V - i));
  const F16 all = larger(larger(best[0], best[1]), larger(best[2], best[3]));
  float out = all[0];
  for (int v = 1; v < 16; v++) out = all[v] > out ? all[v] : out;
  return out;
}

// Weight of one vector of logits at a temperature, which 1 leaves alone to the bit.
HR_FN static HR_INLINE F16 weights_at(F16 z, F16 top, F16 temperature) {
  return weights(z / temperature - top);
}

// Sum of all weights; `blocks` (may be null) gets those of each block.
HR_FN static double sum_weights(const float* z, int64_t V, float temperature, float top,
                                double* blocks) {
  const F16 high = splat(top), divisor = splat(temperature);
  const bool plain = temperature == 1.0f;
  double total = 0;
  for (int64_t first = 0; first < V; first += kDrawBlock) {
    F16 sum[2] = {};
    if (first + kDrawBlock <= V) {
      for (int64_t i = first; i < first + kDrawBlock; i += 32)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
          const F16 x = load(z + i + 16 * v);
          sum[v] += plain ? weights(x - high) : weights_at(x, high, divisor);
        }
    } else {
      for (int64_t i = first; i < V; i += 16)
        sum[(i - first) >> 4 & 1] += weights_at(logits_at(z + i, V - i), high, divisor);
    }
    const double part = sum_lanes(sum[0] + sum[1]);
    if (blocks != nullptr) blocks[first / kDrawBlock] = part;
    total += part;
  }
  return total;
}

// First index whose cumulative weight exceeds `draw` times the total.
HR_FN static int64_t invert(const float* z, int64_t V, float temperature, float top,
                            const double* blocks, double target) {
  const int64_t count = (V + kDrawBlock - 1) / kDrawBlock;
  double before = 0;
  int64_t block = -1;
  for (int64_t b = 0; b < count; b++) {
    if (!(blocks[b] > 0)) continue;
    if (block >= 0) before += blocks[block];
    block = b;
    if (before + blocks[b] > target) break;
  }
  if (block < 0) return 0;  // not a number
  const int64_t first = block * kDrawBlock;
  const int64_t n = V - first < kDrawBlock ? V - first : kDrawBlock;
  float weight[kDrawBlock];
  double sum = 0;
  for (int64_t i = 0; i < n; i += 16)
    store(weight + i, weights_at(logits_at(z + first + i, n - i), splat(top), splat(temperature)));
  for (int64_t i = 0; i < n; i++) sum += weight[i];
  // The block was summed in another order: the draw keeps its share of it.
  double left = (target - before) / blocks[block];
  left = (left < 0 ? 0 : left) * sum;
  int64_t found = first;
  double passed = 0;
  for (int64_t i = 0; i < n; i++) {
    if (!(weight[i] > 0)) continue;
    found = first + i;
    passed += weight[i];
    if (passed > left) break;
  }
  return found;
}

HR_FN static void draw_rows(const Draws& a, int64_t begin, int64_t end, double* blocks) {
  for (int64_t n = begin; n < end; n++) {
    const float* z = a.logits + n * a.V;
    const float high = largest(z, a.V);
    const float temperature = a.temperature[n] == 0.0f ? 1.0f : a.temperature[n];
    const float top = high / temperature;
    const double total = sum_weights(z, a.V, temperature, top, blocks);
    int64_t id = 0;
    if (a.temperature[n] == 0.0f) {
      while (id < a.V - 1 && !(z[id] == high)) id++;
    } else {
      id = invert(z, a.V, temperature, top, blocks, a.draws[n] * total);
    }
    a.ids[n] = id;
    const double logprob = static_cast<double>(z[id] / temperature) - top - log(total);
    a.logprobs[n] = static_cast<float>(logprob);
    if (temperature == 1.0f) {
      a.raw_logprobs[n] = a.logprobs[n];
    } else {
      const double all = sum_weights(z, a.V, 1.0f, high, nullptr);
      a.raw_logprobs[n] = static_cast<float>(static_cast<double>(z[id]) - high - log(all));
    }
  }
}

HR_FN static void score_rows(const Draws& a, int64_t begin, int64_t end, double*) {
  for (int64_t n = begin; n < end; n++) {
    const float* z = a.logits + n * a.V;
    const float high = largest(z, a.V);
    const double all = log(sum_weights(z, a.V, 1.0f, high, nullptr));
    for (int64_t j = n * a.m; j < (n + 1) * a.m; j++)
      a.logprobs[j] = static_cast<float>(static_cast<double>(z[a.ids[j]]) - high - all);
  }
}
