// Arguments of paged attention, shared by its driver and its kernels.
#pragma once

#include "common.h"

namespace headrace {

// Positions whose softmax is one piece of work. Pieces of a sequence are put together in ascending
// order, whoever computed them: a row has the same bits at any number of threads. A multiple of the
// keys that any kernel handles at a time.
constexpr int64_t kSpan = 2048;

// q and out [S,H,d]; keys and values are blocks of [Hkv,P,d], `key_stride` and `value_stride`
// elements apart. H = Hkv * group.
struct Paged {
  const void* q;
  const void* keys;
  const void* values;
  void* out;
  int64_t H, group, P, d, key_stride, value_stride;
  float scale;

  int64_t sum_row() const { return round_up(d, 32) + 16; }  // no power of two: spreads over sets
  template <class In>
  const In* key(int64_t block, int64_t head, int64_t place) const {
    return static_cast<const In*>(keys) + block * key_stride + (head * P + place) * d;
  }
  template <class In>
  const In* value(int64_t block, int64_t head, int64_t place) const {
    return static_cast<const In*>(values) + block * value_stride + (head * P + place) * d;
  }
};

// Neighbouring query tokens of one sequence, for the query heads that share key head `head`. Row r
// of it is token r / group and head r % group of these; it sees the positions before `seen(r)`.
struct PagedTile {
  const int32_t* table;
  int64_t row;       // of the first token in q
  int64_t tokens;
  int64_t position;  // of the first token in its sequence
  int64_t head;

  int64_t end() const { return position + tokens; }
  int64_t rows(const Paged& a) const { return tokens * a.group; }
  int64_t seen(const Paged& a, int64_t r) const { return position + r / a.group + 1; }
  // Rows before this one see nothing at or behind position `begin`.
  int64_t first_row(const Paged& a, int64_t begin) const {
    return begin > position ? (begin - position) * a.group : 0;
  }
  // Where row r begins in q and out, in elements.
  int64_t at(const Paged& a, int64_t r) const {
    return ((row + r / a.group) * a.H + head * a.group + r % a.group) * a.d;
  }
};

// Softmax of a tile's rows over some keys: maximum, sum of e^(score - maximum), and the sum of
// values with these weights, [rows, sum_row]. Rows that see none of the keys are left undefined.
struct Partial {
  float *high, *total, *sums;

  static Partial take(const Paged& a, int64_t rows, Arena& arena) {
    const int64_t padded = round_up(rows, 16);
    Partial p;
    p.high = arena.take<float>(padded);
    p.total = arena.take<float>(padded);
    p.sums = arena.take<float>(padded * a.sum_row());
    return p;
  }
};

using PagedSpan = void (*)(const Paged&, const PagedTile&, int64_t span, const Partial& out,
                           Arena scratch);
using PagedMerge = void (*)(const Paged&, const PagedTile&, int64_t span, const Partial& into,
                            const Partial& from);
using PagedFinish = void (*)(const Paged&, const PagedTile&, const Partial&);
using PagedScratchSize = size_t (*)(const Paged&, int64_t rows);

#if HR_X86
namespace amx {
size_t paged_scratch_size(const Paged& a, int64_t rows);
void paged_span(const Paged& a, const PagedTile& tile, int64_t span, const Partial& out,
                Arena scratch);
void paged_finish(const Paged& a, const PagedTile& tile, const Partial& part);
}  // namespace amx
#endif

}  // namespace headrace
