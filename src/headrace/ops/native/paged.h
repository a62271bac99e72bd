// Arguments of paged attention, shared by its driver and its kernels.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "common.h"

namespace headrace {

// Positions whose softmax is one piece of work. Pieces of a sequence are put together in ascending
// order, whoever computed them: a row has the same bits at any number of threads. A multiple of the
// keys that any kernel handles at a time.
constexpr int64_t kSpan = 2048;

// Elements between two blocks and between two heads of keys or of values.
struct PagedStrides {
  int64_t block, head;

  int64_t at(int64_t of_block, int64_t of_head) const { return of_block * block + of_head * head; }
};

// q and out [S,H,d]; keys and values are blocks of [Hkv,P,d]. H = Hkv * group.
struct Paged {
  const void* q;
  const void* keys;
  const void* values;
  void* out;
  int64_t H, group, P, d;
  PagedStrides key_strides, value_strides;
  float scale;

  int64_t sum_row() const { return round_up(d, 32) + 16; }  // no power of two: spreads over sets
  template <class In>
  const In* key(int64_t block, int64_t head, int64_t place) const {
    return static_cast<const In*>(keys) + key_strides.at(block, head) + place * d;
  }
  template <class In>
  const In* value(int64_t block, int64_t head, int64_t place) const {
    return static_cast<const In*>(values) + value_strides.at(block, head) + place * d;
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

// What will be read next, and may be fetched meanwhile: a tile from a span on, or nothing.
struct Upcoming {
  const PagedTile* tile = nullptr;
  int64_t span = 0;
};

using PagedSpan = void (*)(const Paged&, const PagedTile&, int64_t span, const Upcoming&,
                           const Partial& out, Arena scratch);
using PagedMerge = void (*)(const Paged&, const PagedTile&, int64_t span, const Partial& into,
                            const Partial& from);
using PagedFinish = void (*)(const Paged&, const PagedTile&, const Partial&);
using PagedScratchSize = size_t (*)(const Paged&, int64_t rows);

struct PagedKernels {
  PagedSpan span;
  PagedMerge merge;
  PagedFinish finish;
  PagedScratchSize scratch;
};

PagedKernels paged_kernels(int level, int dtype);

// The next piece that nobody has claimed.
struct alignas(64) Claims {
  std::atomic<int64_t> next{0};
};

// A call cut into pieces that any threads may compute in any order, and then joints, where the
// pieces of a long sequence come together. The cut depends on lengths only: one serves all layers.
class PagedWork {
 public:
  // tables [n,B] of blocks below N; starts and counts [n]. False where a table holds no block for a
  // position that is needed.
  bool plan(const Paged& a, const int32_t* tables, const int64_t* starts, const int64_t* counts,
            int64_t n, int64_t N, int64_t B, int64_t Hkv);
  // The longest pieces first, so that no thread is left with one at the end.
  void sort();

  int64_t pieces() const { return static_cast<int64_t>(items_.size()); }
  int64_t joints() const { return static_cast<int64_t>(split_.size()); }
  int64_t cost() const { return cost_; }
  // Bytes that all threads share, and that each of them needs for itself.
  size_t shared_size(const Paged& a) const;
  size_t own_size(const Paged& a, const PagedKernels& kernels) const;

  // Computes pieces that nobody has claimed until there are none; called by each of `threads`.
  void compute(const Paged& a, const PagedKernels& kernels, int threads, Claims& claims,
               char* shared, char* own) const;
  // Only when all pieces are done.
  void join(const Paged& a, const PagedKernels& kernels, int64_t joint, char* shared) const;

 private:
  // Spans first .. last - 1 of a tile. With `shared` >= 0 there is one span only, and its softmax
  // goes to that place of the shared memory, to be put together later.
  struct Item {
    int64_t tile, first, last, shared, cost;
  };
  void add(const Paged& a, const PagedTile& tile);
  void compute_piece(const Paged& a, const PagedKernels& kernels, const Item& item,
                     const Upcoming& upcoming, char* shared, char* own) const;

  std::vector<PagedTile> tiles_;
  std::vector<Item> items_;
  std::vector<std::pair<int64_t, int64_t>> split_;  // tile, and its first shared place
  int64_t shared_ = 0, cost_ = 0, most_rows_ = 0, heads_ = 1;
};

#if HR_X86
namespace amx {
size_t paged_scratch_size(const Paged& a, int64_t rows);
void paged_span(const Paged& a, const PagedTile& tile, int64_t span, const Upcoming& upcoming,
                const Partial& out, Arena scratch);
void paged_finish(const Paged& a, const PagedTile& tile, const Partial& part);
}  // namespace amx
#endif

}  // namespace headrace
