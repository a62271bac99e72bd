// One pass of a grouped-query decoder over a token of each sequence, or some of a prompt, from token
// ids to logits, by one team of threads.
//
// It calls the kernels that the single ops call, in the decoder's order, with their roundings, so
// that its results are theirs to the bit; what it saves is the way into each op and the fork. Work
// goes to the team in phases with a barrier behind each: rows (norms, gates, rotations, what a
// product wants prepared), panels of a product, pieces of attention.
#include "decode_step.h"

#include <algorithm>

#include "elementwise.h"
#include "packed.h"
#include "paged.h"
#include "team.h"

namespace headrace {
namespace {

// A product of all rows with one matrix; prepared rows of all blocks exist at once.
struct Product {
  Packed a;
  PackedPlan plan;
  char* memory;

  void prepare(int64_t begin, int64_t end) const {
    for (int64_t first = 0; first < end; first += plan.block) {
      const Activations r = rows(first);
      const int64_t from = begin > first ? begin - first : 0;
      const int64_t to = end - first < r.count ? end - first : r.count;
      if (from < to) plan.prepare(a, r, from, to);
    }
  }
  void multiply(const Member& me) const {
    const int64_t begin = me.begin(plan.panels), end = me.end(plan.panels);
    if (begin == end) return;
    for (int64_t first = 0; first < a.S; first += plan.block)
      plan.products(a, rows(first), begin, end, plan.finish);
  }

 private:
  Activations rows(int64_t first) const {
    Activations r = plan.rows(a, first, a.S, memory);
    r.data += plan.data_bytes(first);
    r.scales += first;
    return r;
  }
};

class StepRun {
 public:
  StepRun(const Step& s, int level, int dtype)
      : s_(s),
        level_(level),
        dtype_(dtype),
        size_(dtype == kBfloat16 ? 2 : 4),
        qkv_width_((s.heads + 2 * s.kv_heads) * s.dim),
        q_width_(s.heads * s.dim),
        norm_(pick_rms_norm(level, dtype, dtype)),
        gate_(pick_gate(level, dtype)),
        rotation_(pick_rotation(level, dtype, dtype, dtype)),
        add_(pick_add(level, dtype)),
        paged_(paged_kernels(level, dtype)) {}

  int run(int threads, Workspace& space) {
    if (!rows_hold() ||
        !work_.plan(attention(0), s_.tables, s_.starts, s_.counts, s_.sequences, s_.blocks,
                    s_.table_width, s_.kv_heads))
      return kBadIndex;
    if (threads > 1) work_.sort();
    own_size_ = work_.own_size(attention(0), paged_);
    Arena measure{0};
    place(measure, threads);
    char* memory = space.reserve(measure.at);
    if (memory == nullptr) return kNoMemory;
    Arena arena{reinterpret_cast<uintptr_t>(memory)};
    place(arena, threads);
    for (int64_t l = 0; l < s_.num_layers; l++) new (claims_ + l) Claims;
    run_team(threads, [this](const Member& me) { compute(me); });
    return kOk;
  }

 private:
  // Whether every row is a token that exists at its sequence's next position.
  bool rows_hold() const {
    int64_t row = 0;
    for (int64_t i = 0; i < s_.sequences; i++)
      for (int64_t t = 0; t < s_.counts[i]; t++, row++)
        if (row >= s_.n || s_.owners[row] != i || s_.positions[row] != s_.starts[i] + t ||
            s_.positions[row] >= s_.longest || s_.ids[row] < 0 || s_.ids[row] >= s_.vocab)
          return false;
    if (row != s_.n) return false;
    for (int64_t j = 0; j < s_.num_asked; j++)
      if (s_.asked[j] < (j > 0 ? s_.asked[j - 1] + 1 : 0) || s_.asked[j] >= s_.n) return false;
    return true;
  }

  void place(Arena& arena, int threads) {
    const int64_t n = s_.n;
    x_ = arena.take<char>(n * s_.hidden * size_);
    delta_ = arena.take<char>(n * s_.hidden * size_);
    normed_ = arena.take<char>(n * s_.hidden * size_);
    qkv_ = arena.take<char>(n * qkv_width_ * size_);
    q_ = arena.take<char>(n * q_width_ * size_);
    mixed_ = arena.take<char>(n * q_width_ * size_);
    gate_up_ = arena.take<char>(n * 2 * s_.inner * size_);
    active_ = arena.take<char>(n * s_.inner * size_);
    size_t most = bytes_for(s_.head, s_.num_asked);
    for (int64_t l = 0; l < s_.num_layers; l++) {
      const StepLayer& layer = s_.layers[l];
      for (const StepMatrix* m : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
        most = std::max(most, bytes_for(*m, n));
    }
    prepared_ = arena.take<char>(static_cast<int64_t>(most));
    shared_ = arena.take<char>(static_cast<int64_t>(work_.shared_size(attention(0))));
    own_ = arena.take<char>(threads * round_up(static_cast<int64_t>(own_size_), 64));
    claims_ = arena.take<Claims>(s_.num_layers);
  }

  size_t bytes_for(const StepMatrix& m, int64_t rows) const {
    return packed_plan(level_, dtype_, static_cast<int>(m.kind), rows, m.inputs, m.outputs)
        .size(rows);
  }

  Product product(const StepMatrix& m, const char* x, void* out, int64_t rows) const {
    const int kind = static_cast<int>(m.kind);
    return {packed_arguments(x, m.inputs, m.panels, m.scales, m.bias, kind, rows, m.inputs,
                             m.outputs, out),
            packed_plan(level_, dtype_, kind, rows, m.inputs, m.outputs), prepared_};
  }

  Paged attention(int64_t layer) const {
    const StepLayer& l = s_.layers[layer];
    const PagedStrides strides{s_.block_stride, s_.head_stride};
    return {q_, l.keys, l.values, mixed_, s_.heads, s_.heads / s_.kv_heads, s_.block_tokens, s_.dim,
            strides, strides, s_.scale};
  }

  void compute(const Member& me) const {
    const int64_t begin = me.begin(s_.n), end = me.end(s_.n);
    for (int64_t i = begin; i < end; i++)
      memcpy(at(x_, i, s_.hidden), at(s_.embedding, s_.ids[i], s_.hidden), bytes(s_.hidden));
    for (int64_t l = 0; l < s_.num_layers; l++) {
      const StepLayer& layer = s_.layers[l];

      const Product qkv = product(layer.qkv, normed_, qkv_, s_.n);
      if (l > 0) add(begin, end);
      normalise(layer.attention_norm, begin, end);
      multiply(qkv, me);
      for (int64_t i = begin; i < end; i++) place_token(layer, i);
      me.wait();
      attend(l, me);

      const Product output = product(layer.output, mixed_, delta_, s_.n);
      multiply(output, me);

      const Product gate_up = product(layer.gate_up, normed_, gate_up_, s_.n);
      add(begin, end);
      normalise(layer.feed_forward_norm, begin, end);
      multiply(gate_up, me);

      const Product down = product(layer.down, active_, delta_, s_.n);
      gate_(Gate{gate_up_, nullptr, active_, s_.inner}, begin, end);
      multiply(down, me);
    }
    // Only the rows that were asked for; nobody reads what `normed_` held any more.
    if (s_.num_asked == 0) return;
    const int64_t from = me.begin(s_.num_asked), to = me.end(s_.num_asked);
    for (int64_t j = from; j < to; j++) {
      const int64_t row = s_.asked[j];
      add(row, row + 1);
      norm_(RmsNorm{at(x_, row, s_.hidden), {1, s_.hidden, 0}, s_.final_norm, nullptr, nullptr,
                    at(normed_, j, s_.hidden), nullptr, s_.hidden, s_.epsilon},
            0, 1);
    }
    // Logits stay float whatever the rest is.
    Product head = product(s_.head, normed_, s_.logits, s_.num_asked);
    const int kind = static_cast<int>(s_.head.kind);
    head.plan.finish =
        packed_plan(level_, kFloat32, kind, s_.num_asked, s_.head.inputs, s_.head.outputs).finish;
    multiply(head, me);
  }

  // Begins with the member's own rows, which it has just computed.
  void multiply(const Product& p, const Member& me) const {
    p.prepare(me.begin(p.a.S), me.end(p.a.S));
    me.wait();
    p.multiply(me);
    me.wait();
  }

  void add(int64_t begin, int64_t end) const {
    add_(at(x_, begin, s_.hidden), at(delta_, begin, s_.hidden), (end - begin) * s_.hidden);
  }

  void normalise(const void* weight, int64_t begin, int64_t end) const {
    norm_(RmsNorm{x_, {1, s_.hidden, 0}, weight, nullptr, nullptr, normed_, nullptr, s_.hidden,
                  s_.epsilon},
          begin, end);
  }

  // Norms of the heads, rotation, and the new key and value into their block.
  void place_token(const StepLayer& layer, int64_t i) const {
    const int64_t d = s_.dim, position = s_.positions[i], place = position % s_.block_tokens;
    const int64_t block = s_.tables[s_.owners[i] * s_.table_width + position / s_.block_tokens];
    char* q = at(qkv_, i, qkv_width_);
    char* k = q + bytes(q_width_);
    const char* v = k + bytes(s_.kv_heads * d);
    if (layer.q_norm != nullptr) {
      const Strides rows{1, d, 0};
      norm_(RmsNorm{q, rows, layer.q_norm, nullptr, nullptr, q, nullptr, d, s_.epsilon}, 0,
            s_.heads);
      norm_(RmsNorm{k, rows, layer.k_norm, nullptr, nullptr, k, nullptr, d, s_.epsilon}, 0,
            s_.kv_heads);
    }
    rotate(q, position, s_.heads, at(q_, i, q_width_));
    for (int64_t h = 0; h < s_.kv_heads; h++) {
      const int64_t to = block * s_.block_stride + h * s_.head_stride + place * d;
      rotate(k + bytes(h * d), position, 1, at(layer.keys, to, 1));
      memcpy(at(layer.values, to, 1), v + bytes(h * d), bytes(d));
    }
  }

  void rotate(const char* x, int64_t position, int64_t heads, char* out) const {
    const int64_t d = s_.dim;
    rotation_(Rotation{x, {1, d, 0}, at(s_.cosine, position, d), at(s_.sine, position, d), out,
                       heads, 1, d, s_.interleaved != 0, false},
              0, heads);
  }

  void attend(int64_t l, const Member& me) const {
    const Paged a = attention(l);
    char* own = own_ + me.index * round_up(static_cast<int64_t>(own_size_), 64);
    work_.compute(a, paged_, me.count, claims_[l], shared_, own);
    me.wait();
    if (work_.joints() == 0) return;
    for (int64_t j = me.begin(work_.joints()); j < me.end(work_.joints()); j++)
      work_.join(a, paged_, j, shared_);
    me.wait();
  }

  size_t bytes(int64_t elements) const { return static_cast<size_t>(elements * size_); }
  template <class T>
  char* at(T* rows, int64_t row, int64_t width) const {
    return static_cast<char*>(const_cast<void*>(static_cast<const void*>(rows))) +
           row * width * size_;
  }

  const Step& s_;
  const int level_, dtype_;
  const int64_t size_, qkv_width_, q_width_;
  const RmsNormRows norm_;
  const GateRows gate_;
  const RotationRows rotation_;
  const AddRow add_;
  const PagedKernels paged_;
  PagedWork work_;
  size_t own_size_ = 0;
  char *x_ = nullptr, *delta_, *normed_, *qkv_, *q_ = nullptr, *mixed_ = nullptr, *gate_up_,
       *active_, *prepared_, *shared_, *own_;
  Claims* claims_;
};

}  // namespace
}  // namespace headrace

using namespace headrace;

extern "C" HR_EXPORT int headrace_decode_step(int level, int threads, int dtype, const Step* step) {
  if (step->n == 0) return kOk;
  static thread_local Workspace space;
  return StepRun(*step, level, dtype).run(threads, space);
}
