// Paged attention: cuts the query rows into tiles, the tiles of long sequences into spans of keys,
// and shares them out among threads. Which cut was made changes no bit of the result.
#include "paged.h"

#include <algorithm>

#define HR_BODY "paged_rows.inl"
#include "each_target.inl"

namespace headrace {
namespace {

constexpr int64_t kTileRows = 384;   // query rows that share what is loaded of a chunk of keys
constexpr int64_t kSplitRows = 16;  // with more rows than this, one sequence has tiles enough
constexpr int64_t kShares = 8;      // that a thread should have at least, so that all end together
constexpr int64_t kGrain = 1 << 18;  // cost that is worth waking another thread

size_t partial_size(const Paged& a, int64_t rows) {
  Arena measure{0};
  Partial::take(a, rows, measure);
  return measure.at;
}

Partial partial_at(const Paged& a, char* shared, int64_t place) {
  Arena arena{reinterpret_cast<uintptr_t>(shared) +
              static_cast<uintptr_t>(place) * partial_size(a, kSplitRows)};
  return Partial::take(a, kSplitRows, arena);
}

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

PagedKernels paged_kernels(int level, int dtype) {
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

bool PagedWork::plan(const Paged& a, const int32_t* tables, const int64_t* starts,
                     const int64_t* counts, int64_t n, int64_t N, int64_t B, int64_t Hkv) {
  if (!tables_hold(tables, starts, counts, n, N, B, a.P)) return false;
  const int64_t step = std::max<int64_t>(1, kTileRows / a.group);
  heads_ = Hkv;
  int64_t row = 0;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t t = 0; t < counts[i]; t += step) {
      PagedTile tile{tables + i * B, row + t, std::min(step, counts[i] - t), starts[i] + t, 0};
      for (; tile.head < Hkv; tile.head++) add(a, tile);
    }
    row += counts[i];
  }
  return true;
}

void PagedWork::add(const Paged& a, const PagedTile& tile) {
  const int64_t rows = tile.rows(a), spans = (tile.end() + kSpan - 1) / kSpan;
  const int64_t number = static_cast<int64_t>(tiles_.size());
  const bool split = spans > 1 && rows <= kSplitRows;
  tiles_.push_back(tile);
  if (split) split_.emplace_back(number, shared_);
  for (int64_t first = 0; first < spans; first += split ? 1 : spans) {
    const int64_t last = split ? first + 1 : spans;
    const int64_t keys = std::min(last * kSpan, tile.end()) - first * kSpan;
    const int64_t cost = keys * a.d * (rows + 4);
    items_.push_back({number, first, last, split ? shared_++ : -1, cost});
    cost_ += cost;
  }
  most_rows_ = std::max(most_rows_, rows);
}

void PagedWork::sort() {
  std::stable_sort(items_.begin(), items_.end(),
                   [](const Item& x, const Item& y) { return x.cost > y.cost; });
}

size_t PagedWork::shared_size(const Paged& a) const {
  return static_cast<size_t>(shared_) * partial_size(a, kSplitRows);
}

size_t PagedWork::own_size(const Paged& a, const PagedKernels& kernels) const {
  return 2 * partial_size(a, most_rows_) + kernels.scratch(a, most_rows_);
}

void PagedWork::compute(const Paged& a, const PagedKernels& kernels, int threads, Claims& claims,
                        char* shared, char* own) const {
  // The heads of a sequence lie side by side: where there is plenty, one thread takes all of them.
  const int64_t together = std::max<int64_t>(1, std::min(heads_, pieces() / (threads * kShares)));
  const auto claim = [&] { return claims.next.fetch_add(together, std::memory_order_relaxed); };
  for (int64_t first = claim(); first < pieces();) {
    const int64_t last = std::min(first + together, pieces()), then = claim();
    for (int64_t piece = first; piece < last; piece++) {
      const int64_t after = piece + 1 < last ? piece + 1 : then;
      Upcoming upcoming;
      if (after < pieces()) upcoming = {&tiles_[items_[after].tile], items_[after].first};
      compute_piece(a, kernels, items_[piece], upcoming, shared, own);
    }
    first = then;
  }
}

void PagedWork::compute_piece(const Paged& a, const PagedKernels& kernels, const Item& item,
                              const Upcoming& upcoming, char* shared, char* own) const {
  const PagedTile& tile = tiles_[item.tile];
  Arena arena{reinterpret_cast<uintptr_t>(own)};
  const Partial sum = Partial::take(a, most_rows_, arena);
  const Partial next = Partial::take(a, most_rows_, arena);
  if (item.shared >= 0) {
    kernels.span(a, tile, item.first, upcoming, partial_at(a, shared, item.shared), arena);
    return;
  }
  for (int64_t span = item.first; span < item.last; span++) {
    const Upcoming here = span + 1 < item.last ? Upcoming{&tile, span + 1} : upcoming;
    kernels.span(a, tile, span, here, span == item.first ? sum : next, arena);
    if (span > item.first) kernels.merge(a, tile, span, sum, next);
  }
  kernels.finish(a, tile, sum);
}

void PagedWork::join(const Paged& a, const PagedKernels& kernels, int64_t joint,
                     char* shared) const {
  const PagedTile& tile = tiles_[split_[joint].first];
  const int64_t first = split_[joint].second;
  const Partial whole = partial_at(a, shared, first);
  for (int64_t span = 1; span * kSpan < tile.end(); span++)
    kernels.merge(a, tile, span, whole, partial_at(a, shared, first + span));
  kernels.finish(a, tile, whole);
}

}  // namespace headrace

using namespace headrace;

// q and out [S,H,d]; keys and values N blocks of [Hkv,P,d], blocks and heads so many elements
// apart; tables [n,B]; starts and counts [n].
extern "C" HR_EXPORT int headrace_paged_attention(
    int level, int threads, int dtype, const void* q, const void* keys, const void* values,
    const int32_t* tables, const int64_t* starts, const int64_t* counts, int64_t n, int64_t N,
    int64_t B, int64_t H, int64_t Hkv, int64_t P, int64_t d, int64_t key_block, int64_t key_head,
    int64_t value_block, int64_t value_head, float scale, void* out) {
  const Paged a{q, keys, values, out, H, H / Hkv, P, d, {key_block, key_head},
                {value_block, value_head}, scale};
  const PagedKernels kernels = paged_kernels(level, dtype);
  PagedWork work;
  if (!work.plan(a, tables, starts, counts, n, N, B, Hkv)) return kBadIndex;
  const int64_t useful = std::min(work.pieces(), 1 + work.cost() / kGrain);
  const int workers = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(threads, useful)));
  if (workers > 1) work.sort();
  Block shared(work.shared_size(a));
  if (shared.data == nullptr) return kNoMemory;
  const size_t own_size = work.own_size(a, kernels);
  bool full = false;
  Claims claims;
#pragma omp parallel num_threads(workers) reduction(|| : full) if (workers > 1)
  {
    Block own(own_size);
    full = own.data == nullptr;
    if (!full) work.compute(a, kernels, workers, claims, shared.data, own.data);
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t i = 0; i < work.joints(); i++) work.join(a, kernels, i, shared.data);
  }
  return full ? kNoMemory : kOk;
}
