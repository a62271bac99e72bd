// Paged attention: cuts the query rows into tiles, the tiles of long sequences into spans of keys,
// and shares them out among threads. Which cut was made changes no bit of the result.
#include "paged.h"

#include <algorithm>
#include <vector>

#define HR_BODY "paged_rows.inl"
#include "each_target.inl"

namespace headrace {
namespace {

constexpr int64_t kTileRows = 64;   // query rows that share what is loaded of a chunk of keys
constexpr int64_t kSplitRows = 16;  // with more rows than this, one sequence has tiles enough
constexpr int64_t kGrain = 1 << 18;  // cost that is worth waking another thread

struct PagedKernels {
  PagedSpan span;
  PagedMerge merge;
  PagedFinish finish;
  PagedScratchSize scratch;
};

PagedKernels choose(int level, int dtype) {
  PagedKernels k;
  k.merge = HR_PICK(level, paged_merge);
#if HR_X86
  if (level >= kAmx && dtype == kBfloat16) {
    k.span = amx::paged_span;
    k.finish = amx::paged_finish;
    k.scratch = amx::paged_scratch_size;
    return k;
  }
#endif
  k.scratch = HR_PICK(level, paged_scratch_size);
  if (dtype == kBfloat16) {
    k.span = HR_PICK(level, paged_span<Bf16>);
    k.finish = HR_PICK(level, paged_finish<Bf16>);
  } else {
    k.span = HR_PICK(level, paged_span<float>);
    k.finish = HR_PICK(level, paged_finish<float>);
  }
  return k;
}

// Spans first .. last - 1 of a tile. With `shared` >= 0 there is one span only, and its softmax
// goes to that place of the memory of the call, to be put together later.
struct Item {
  int64_t tile, first, last, shared, cost;
};

struct Work {
  std::vector<PagedTile> tiles;
  std::vector<Item> items;
  std::vector<std::pair<int64_t, int64_t>> split;  // tile, and its first shared place
  int64_t shared = 0, cost = 0;
};

void add_tile(const Paged& a, const PagedTile& tile, Work& work) {
  const int64_t rows = tile.rows(a), spans = (tile.end() + kSpan - 1) / kSpan;
  const int64_t number = static_cast<int64_t>(work.tiles.size());
  const bool split = spans > 1 && rows <= kSplitRows;
  work.tiles.push_back(tile);
  if (split) work.split.emplace_back(number, work.shared);
  for (int64_t first = 0; first < spans; first += split ? 1 : spans) {
    const int64_t last = split ? first + 1 : spans;
    const int64_t keys = std::min(last * kSpan, tile.end()) - first * kSpan;
    const int64_t cost = keys * a.d * (rows + 4);
    work.items.push_back({number, first, last, split ? work.shared++ : -1, cost});
    work.cost += cost;
  }
}

// False where a table holds no block for a position that is needed.
bool tables_hold(const int32_t* tables, const int64_t* starts, const int64_t* counts, int64_t n,
                 int64_t N, int64_t B, int64_t P) {
  for (int64_t i = 0; i < n; i++) {
    const int64_t blocks = (starts[i] + counts[i] + P - 1) / P;
    if (starts[i] < 0 || counts[i] < 1 || blocks > B) return false;
    for (int64_t b = 0; b < blocks; b++)
      if (tables[i * B + b] < 0 || tables[i * B + b] >= N) return false;
  }
  return true;
}

}  // namespace
}  // namespace headrace

using namespace headrace;

// q and out [S,H,d]; keys and values N blocks of [Hkv,P,d], `key_stride` and `value_stride`
// elements apart; tables [n,B]; starts and counts [n].
extern "C" HR_EXPORT int headrace_paged_attention(
    int level, int threads, int dtype, const void* q, const void* keys, const void* values,
    const int32_t* tables, const int64_t* starts, const int64_t* counts, int64_t n, int64_t N,
    int64_t B, int64_t H, int64_t Hkv, int64_t P, int64_t d, int64_t key_stride,
    int64_t value_stride, float scale, void* out) {
  if (!tables_hold(tables, starts, counts, n, N, B, P)) return kBadIndex;
  const int64_t group = H / Hkv;
  const Paged a{q, keys, values, out, H, group, P, d, key_stride, value_stride, scale};
  const PagedKernels kernels = choose(level, dtype);
  const int64_t step = std::max<int64_t>(1, kTileRows / group);
  Work work;
  int64_t row = 0, most_rows = 0;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t t = 0; t < counts[i]; t += step) {
      PagedTile tile{tables + i * B, row + t, std::min(step, counts[i] - t), starts[i] + t, 0};
      for (; tile.head < Hkv; tile.head++) add_tile(a, tile, work);
      most_rows = std::max(most_rows, tile.rows(a));
    }
    row += counts[i];
  }
  const int64_t count = static_cast<int64_t>(work.items.size());
  const int64_t split = static_cast<int64_t>(work.split.size());
  const int64_t useful = std::min(count, 1 + work.cost / kGrain);
  const int workers = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, useful)));
  // The longest first, so that no thread is left with one at the end.
  if (workers > 1)
    std::stable_sort(work.items.begin(), work.items.end(),
                     [](const Item& x, const Item& y) { return x.cost > y.cost; });
  Arena measure{0};
  Partial::take(a, kSplitRows, measure);
  const int64_t shared_size = static_cast<int64_t>(measure.at);
  Block shared(work.shared * shared_size);
  if (shared.data == nullptr) return kNoMemory;
  const auto shared_at = [&](int64_t place) {
    Arena arena{reinterpret_cast<uintptr_t>(shared.data + place * shared_size)};
    return Partial::take(a, kSplitRows, arena);
  };
  measure.at = 0;
  Partial::take(a, most_rows, measure);
  const size_t size = 2 * measure.at + kernels.scratch(a, most_rows);
  bool full = false;
#pragma omp parallel num_threads(workers) reduction(|| : full) if (workers > 1)
  {
    Block memory(size);
    full = memory.data == nullptr;
    Arena arena{reinterpret_cast<uintptr_t>(memory.data)};
    const Partial sum = Partial::take(a, most_rows, arena);
    const Partial next = Partial::take(a, most_rows, arena);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) {
      if (full) continue;
      const Item& item = work.items[i];
      const PagedTile& tile = work.tiles[item.tile];
      if (item.shared >= 0) {
        kernels.span(a, tile, item.first, shared_at(item.shared), arena);
        continue;
      }
      kernels.span(a, tile, item.first, sum, arena);
      for (int64_t span = item.first + 1; span < item.last; span++) {
        kernels.span(a, tile, span, next, arena);
        kernels.merge(a, tile, span, sum, next);
      }
      kernels.finish(a, tile, sum);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < split; i++) {
      const PagedTile& tile = work.tiles[work.split[i].first];
      const int64_t first = work.split[i].second;
      const Partial whole = shared_at(first);
      for (int64_t span = 1; span * kSpan < tile.end(); span++)
        kernels.merge(a, tile, span, whole, shared_at(first + span));
      kernels.finish(a, tile, whole);
    }
  }
  return full ? kNoMemory : kOk;
}
