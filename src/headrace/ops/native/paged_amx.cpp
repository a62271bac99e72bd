// Paged attention of a tile of query rows on bf16 tiles, products in fp32 sums, softmax in fp32.
//
// An element of a tile product depends on its own row and column alone, so the few rows of a
// decoding step and the many of a prompt get the same bits from the same code. Blocks whose shape
// fits are multiplied where they lie; values are copied once per chunk, paired as tiles read them.
#include "amx.h"
#include "paged.h"

#if HR_X86
namespace headrace::amx {
namespace {

// Keys handled at a time, counted from position 0: a row meets the same chunks in any tile.
constexpr int64_t kChunk = 128;
constexpr int64_t kScoreRow = kChunk + 16;

struct Scratch {
  char *q, *keys, *pairs, *weights;
  float *products, *scores, *totals;
  int64_t width, steps, key_row, pair_row, weight_row;
  bool direct;  // keys are read where they lie

  Scratch(const Paged& a, int64_t rows, Arena& arena) {
    const int64_t padded = round_up(rows, 16);
    width = round_up(a.d, 32);
    steps = width / 32;
    direct = a.d % 32 == 0 && a.P % 16 == 0;
    key_row = direct ? a.d * 2 : odd_lines(width * 2);
    pair_row = odd_lines(width * 4);
    weight_row = odd_lines(kChunk * 2);
    q = arena.take<char>(padded / 16 * steps * 1024);
    keys = arena.take<char>(direct ? 0 : kChunk * key_row);
    pairs = arena.take<char>(kChunk / 2 * pair_row);
    weights = arena.take<char>(16 * weight_row);
    products = arena.take<float>(kChunk * 16);
    scores = arena.take<float>(16 * kScoreRow);
    totals = arena.take<float>(padded * 16);
  }
};

// The tile's query rows as right-hand tiles: per 16 rows and 32 columns one [column pairs, rows].
HR_AMX void pack_queries(const Paged& a, const PagedTile& tile, int64_t rows, char* out) {
  const Bf16* q = static_cast<const Bf16*>(a.q);
  for (int64_t first = 0; first < rows; first += 16) {
    const Bf16* row[16];
    for (int64_t r = 0; r < 16; r++)
      row[r] = first + r < rows ? q + tile.at(a, first + r) : nullptr;
    for (int64_t c = 0; c < a.d; c += 32, out += 1024) {
      __m512i x[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; r++)
        x[r] = row[r] != nullptr ? load_part(row[r] + c, a.d - c) : _mm512_setzero_si512();
      transpose(x);
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) _mm512_store_si512(out + 64 * i, x[i]);
    }
  }
}

// Fetches what is read next into the second-level cache while something else is computed, from
// several pieces of memory side by side: `Ahead` in packed_amx.cpp says why.
class Fetch {
 public:
  // The first chunk at or behind position `begin` of a tile's sequence, which ends at `end`.
  Fetch(const Paged& a, const PagedTile* tile, int64_t begin, int64_t end) {
    if (begin + kChunk < end) end = begin + kChunk;
    for (int64_t at = begin; at < end;) {
      const int64_t block = tile->table[at / a.P], place = at % a.P;
      const int64_t n = end - at < a.P - place ? end - at : a.P - place;
      add(a.key<Bf16>(block, tile->head, place), n * a.d * 2);
      add(a.value<Bf16>(block, tile->head, place), n * a.d * 2);
      at += n;
    }
  }
  // Four lines, each of another piece.
  HR_AMX HR_INLINE void some() {
    if (first_ >= count_) return;
    const int64_t to = from_ + 4 < count_ ? from_ + 4 : count_;
    for (int64_t i = from_; i < to; i++)
      if (line_ < bytes_[i]) _mm_prefetch(at_[i] + line_, _MM_HINT_T1);
    from_ += 4;
    if (from_ < first_ + kPieces && from_ < count_) return;
    line_ += 64;
    if (line_ >= longest_) {
      line_ = 0;
      first_ += kPieces;
    }
    from_ = first_;
  }

 private:
  static constexpr int64_t kPieces = 8;

  // Keys and values of a block may lie one behind the other, which makes one piece of them.
  void add(const Bf16* rows, int64_t bytes) {
    const char* from = reinterpret_cast<const char*>(rows);
    if (count_ > 0 && at_[count_ - 1] + bytes_[count_ - 1] == from) {
      bytes_[count_ - 1] += bytes;
    } else {
      at_[count_] = from;
      bytes_[count_++] = bytes;
    }
    const int64_t whole = bytes_[count_ - 1];
    longest_ = whole > longest_ ? whole : longest_;
  }

  const char* at_[2 * kChunk];
  int64_t bytes_[2 * kChunk], count_ = 0, longest_ = 0;
  int64_t first_ = 0, from_ = 0, line_ = 0;  // of the pieces that are fetched now
};

// The rows of a tile's head, from one position on.
class Walk {
 public:
  Walk(const Paged& a, const PagedTile& tile, const void* pool, const PagedStrides& strides,
       int64_t begin)
      : pool_(static_cast<const Bf16*>(pool) + tile.head * strides.head),
        table_(tile.table + begin / a.P),
        stride_(strides.block),
        P_(a.P),
        d_(a.d),
        at_(pool_ + *table_ * stride_ + begin % a.P * a.d),
        left_(a.P - begin % a.P) {}
  // The next row; the one behind the last row of the table is not looked for before it is wanted.
  HR_INLINE const Bf16* next() {
    if (left_ == 0) {
      at_ = pool_ + *++table_ * stride_;
      left_ = P_;
    }
    const Bf16* row = at_;
    at_ += d_;
    left_--;
    return row;
  }

 private:
  const Bf16* pool_;
  const int32_t* table_;
  const int64_t stride_, P_, d_;
  const Bf16* at_;
  int64_t left_;  // rows of the block
};

// Finds `n` keys, 16 to a group, zero-filled to a multiple of 32 where they are copied. What lies
// behind the last one is read only to give scores that nobody looks at.
HR_AMX void group_keys(const Paged& a, const PagedTile& tile, int64_t begin, int64_t n,
                       const Scratch& s, const char* groups[kChunk / 16]) {
  if (s.direct) {
    for (int64_t j = 0; j < n; j += 16)
      groups[j / 16] = reinterpret_cast<const char*>(
          a.key<Bf16>(tile.table[(begin + j) / a.P], tile.head, (begin + j) % a.P));
    return;
  }
  Walk walk(a, tile, a.keys, a.key_strides, begin);
  for (int64_t j = 0; j < round_up(n, 32); j++) {
    char* to = s.keys + j * s.key_row;
    if (j % 16 == 0) groups[j / 16] = to;
    const Bf16* key = j < n ? walk.next() : nullptr;
    for (int64_t c = 0; c < a.d; c += 32)
      _mm512_store_si512(to + c * 2, j < n ? load_part(key + c, a.d - c) : _mm512_setzero_si512());
  }
}

// Pairs `n` values, zero-filled to a multiple of 32.
HR_AMX void pair_values(const Paged& a, const PagedTile& tile, int64_t begin, int64_t n,
                        const Scratch& s, Fetch& fetch) {
  const __m512i zero = _mm512_setzero_si512();
  Walk walk(a, tile, a.values, a.value_strides, begin);
  for (int64_t j = 0; j < round_up(n, 32); j += 2) {
    if (j & 2) fetch.some();
    char* pair = s.pairs + j / 2 * s.pair_row;
    const Bf16* first = j < n ? walk.next() : nullptr;
    const Bf16* second = j + 1 < n ? walk.next() : nullptr;
    for (int64_t c = 0; c < a.d; c += 32) {
      const __m512i x = j < n ? load_part(first + c, a.d - c) : zero;
      const __m512i y = j + 1 < n ? load_part(second + c, a.d - c) : zero;
      _mm512_store_si512(pair + c * 4, _mm512_unpacklo_epi16(x, y));
      _mm512_store_si512(pair + c * 4 + 64, _mm512_unpackhi_epi16(x, y));
    }
  }
}

Fetch upcoming_rows(const Paged& a, const Upcoming& upcoming) {
  if (upcoming.tile == nullptr) return Fetch(a, nullptr, 0, 0);
  const int64_t begin = upcoming.span * kSpan, end = upcoming.tile->end();
  return Fetch(a, upcoming.tile, begin, end < begin + kSpan ? end : begin + kSpan);
}

// products[16 g + i, r] = key i of group g times query row r.
HR_AMX void multiply(const char* const* groups, int64_t count, int64_t key_row, const char* q,
                     int64_t steps, float* products, Fetch& fetch) {
  HR_BARRIER();
  int64_t g = 0;
  for (; g + 4 <= count; g += 4) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < steps; i++) {
      _tile_loadd(4, q + i * 1024, 64);
      _tile_loadd(5, groups[g] + i * 64, key_row);
      _tile_dpbf16ps(0, 5, 4);
      fetch.some();
      fetch.some();
      _tile_loadd(6, groups[g + 1] + i * 64, key_row);
      _tile_dpbf16ps(1, 6, 4);
      fetch.some();
      fetch.some();
      _tile_loadd(7, groups[g + 2] + i * 64, key_row);
      _tile_dpbf16ps(2, 7, 4);
      fetch.some();
      fetch.some();
      _tile_loadd(5, groups[g + 3] + i * 64, key_row);
      _tile_dpbf16ps(3, 5, 4);
      fetch.some();
      fetch.some();
    }
    _tile_stored(0, products + g * 256, 64);
    _tile_stored(1, products + (g + 1) * 256, 64);
    _tile_stored(2, products + (g + 2) * 256, 64);
    _tile_stored(3, products + (g + 3) * 256, 64);
  }
  for (; g < count; g++) {
    _tile_zero(0);
    for (int64_t i = 0; i < steps; i++) {
      _tile_loadd(4, q + i * 1024, 64);
      _tile_loadd(5, groups[g] + i * 64, key_row);
      _tile_dpbf16ps(0, 5, 4);
    }
    _tile_stored(0, products + g * 256, 64);
  }
  HR_BARRIER();
}

HR_AMX HR_INLINE __mmask16 visible(int64_t seen, int64_t j) {
  if (seen >= j + 16) return 0xffff;
  return seen <= j ? 0 : static_cast<__mmask16>((1u << (seen - j)) - 1u);
}

// Turns the scores of one row at `padded` positions of a chunk, of which it sees `seen` >= 1, into
// bf16 weights, exactly zero where it sees nothing. Its sums are rescaled when the maximum rises.
HR_AMX HR_INLINE void weigh(float* scores, int64_t padded, int64_t seen, float scale, bool fresh,
                            float& high, float* totals, float* sums, int64_t width, char* weights,
                            Fetch& fetch) {
  const __m512 factor = _mm512_set1_ps(scale), lowest = _mm512_set1_ps(-INFINITY);
  __m512 best = lowest;
  for (int64_t j = 0; j < padded; j += 16) {
    const __m512 x = _mm512_mask_mul_ps(lowest, visible(seen, j), _mm512_load_ps(scores + j),
                                        factor);
    _mm512_store_ps(scores + j, x);
    best = _mm512_max_ps(x, best);
    if (j & 16) fetch.some();
  }
  const float old = high, found = _mm512_reduce_max_ps(best);
  __m512 total = fresh ? _mm512_setzero_ps() : _mm512_load_ps(totals);
  high = !fresh && old > found ? old : found;
  if (!fresh && high != old) {
    const __m512 shrink = exponential(_mm512_set1_ps(old - high));
    total = _mm512_mul_ps(total, shrink);
    for (int64_t i = 0; i < width; i += 16)
      _mm512_store_ps(sums + i, _mm512_mul_ps(_mm512_load_ps(sums + i), shrink));
  }
  const __m512 top = _mm512_set1_ps(high);
  for (int64_t j = 0; j < padded; j += 32) {
    const __m512 x = _mm512_maskz_mov_ps(
        visible(seen, j), exponential(_mm512_sub_ps(_mm512_load_ps(scores + j), top)));
    const __m512 y = _mm512_maskz_mov_ps(
        visible(seen, j + 16), exponential(_mm512_sub_ps(_mm512_load_ps(scores + j + 16), top)));
    total = _mm512_add_ps(_mm512_add_ps(total, x), y);
    fetch.some();
    _mm512_store_si512(weights + j * 2, (__m512i)_mm512_cvtne2ps_pbh(y, x));
  }
  _mm512_store_ps(totals, total);
}

}  // namespace

size_t paged_scratch_size(const Paged& a, int64_t rows) {
  Arena arena{0};
  Scratch(a, rows, arena);
  return arena.at;
}

HR_AMX void paged_span(const Paged& a, const PagedTile& tile, int64_t span,
                       const Upcoming& upcoming, const Partial& part, Arena arena) {
  const int64_t rows = tile.rows(a), sum_row = a.sum_row();
  const Scratch s(a, rows, arena);
  pack_queries(a, tile, rows, s.q);
  configure_tiles();
  const int64_t begins = span * kSpan;
  const int64_t ends = begins + kSpan < tile.end() ? begins + kSpan : tile.end();
  for (int64_t begin = begins; begin < ends; begin += kChunk) {
    const int64_t n = ends - begin < kChunk ? ends - begin : kChunk;
    const int64_t after = begin + n;
    Fetch fetch = after < ends ? Fetch(a, &tile, after, ends) : upcoming_rows(a, upcoming);
    const char* groups[kChunk / 16];
    group_keys(a, tile, begin, n, s, groups);
    const int64_t least = tile.first_row(a, begin) / 16 * 16;
    for (int64_t first = least; first < rows; first += 16) {
      const int64_t last = first + 16 < rows ? first + 16 : rows;
      const int64_t most = tile.seen(a, last - 1) - begin;  // later rows see more
      const int64_t keys = most < n ? most : n, padded = round_up(keys, 32);
      multiply(groups, (keys + 15) / 16, s.key_row, s.q + first / 16 * s.steps * 1024, s.steps,
               s.products, fetch);
      // Between the products and who reads them: what was just stored from tiles is not there yet.
      if (first == least) pair_values(a, tile, begin, n, s, fetch);
      for (int64_t j = 0; j < keys; j += 16) {
        for (int i = 0; i < 3; i++) fetch.some();
        __m512i x[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) x[i] = _mm512_load_si512(s.products + (j + i) * 16);
        transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) _mm512_store_si512(s.scores + i * kScoreRow + j, x[i]);
      }
      for (int64_t r = first; r < last; r++) {
        const int64_t seen = tile.seen(a, r) - begin;
        char* weights = s.weights + (r - first) * s.weight_row;
        if (seen > 0)
          weigh(s.scores + (r - first) * kScoreRow, padded, seen, a.scale, begin == begins,
                part.high[r], s.totals + r * 16, part.sums + r * sum_row, s.width, weights, fetch);
        else
          memset(weights, 0, padded * 2);
      }
      tiles_row(s.weights, s.weight_row, 64, s.pairs, s.pair_row, 16 * s.pair_row,
                part.sums + first * sum_row, sum_row * 4, padded / 32, s.width, begin != begins);
    }
  }
  _tile_release();
  for (int64_t r = tile.first_row(a, begins); r < rows; r++)
    part.total[r] = _mm512_reduce_add_ps(_mm512_load_ps(s.totals + r * 16));
}

HR_AMX void paged_finish(const Paged& a, const PagedTile& tile, const Partial& part) {
  for (int64_t r = 0; r < tile.rows(a); r++) {
    Bf16* out = static_cast<Bf16*>(a.out) + tile.at(a, r);
    const float inverse = 1.0f / part.total[r];
    for (int64_t c = 0; c < a.d; c += 32)
      write_ordered(part.sums + r * a.sum_row() + c, inverse, out + c, a.d - c);
  }
}

}  // namespace headrace::amx
#endif
