// Fused index scores and exact top-k: few rows of scores exist at a time. Keys that many queries see
// are packed once for all of them; those of decoding sequences, which one or a few queries see, by
// whoever scores them, a few at a time, and never all at once.
#include "select.h"

#include <algorithm>
#include <functional>
#include <vector>

#define HR_BODY "select_rows.inl"
#include "each_target.inl"

namespace headrace {
namespace {

struct Kernels {
  PackTile pack;
  ScoreBlock score;
  SelectSize scratch;
  int64_t tile_bytes;
  bool tiles;
};

Kernels choose(int level, int dtype, const Select& a) {
#if HR_X86
  if (level >= kAmx && dtype == kBfloat16)
    return {amx::pack_tile, amx::score_block, amx::score_scratch, round_up(a.D, 32) * 64, true};
#endif
  const SelectSize scratch = HR_PICK(level, score_scratch);
  const int64_t bytes = kKeyTile * a.D * 4;
  if (dtype == kBfloat16)
    return {HR_PICK(level, pack_tile<Bf16>), HR_PICK(level, score_block<Bf16>), scratch, bytes,
            false};
  return {HR_PICK(level, pack_tile<float>), HR_PICK(level, score_block<float>), scratch, bytes,
          false};
}

// Blocks of neighbouring queries of one sequence that need scores; all other rows are written.
std::vector<QueryBlock> plan(const Select& a, int64_t block_rows) {
  std::vector<QueryBlock> blocks;
  for (int64_t s = 0; s < a.S; s++) {
    const int64_t begin = a.lower[s], end = a.upper[s];
    if (end - begin <= a.topk) {
      int32_t* out = a.out + s * a.topk;
      for (int64_t i = 0; i < a.topk; i++)
        out[i] = begin + i < end ? static_cast<int32_t>(begin + i) : -1;
      continue;
    }
    if (!blocks.empty()) {
      QueryBlock& last = blocks.back();
      if (last.count < block_rows && last.first + last.count == s && last.begin == begin &&
          end >= last.end && end - last.end <= 1) {
        last.count++;
        last.end = end;
        continue;
      }
    }
    blocks.push_back({s, 1, begin, end});
  }
  return blocks;
}

constexpr int64_t kRun = 8;                   // tiles that one thread packs and scores at a time
constexpr int64_t kMostScores = 64 << 20;     // bytes of scores of all rows at once

// A run of tiles of one block.
struct Piece {
  int64_t block, from, to;
};

struct Call {
  const Select& a;
  const Kernels& kernels;
  const std::vector<QueryBlock>& blocks;
  SelectRow select_row;
  int64_t block_rows, row_stride;
  size_t row_scratch;

  // Writes the selection of one row of a block from its scores, which begin at the block's first tile.
  void select(const QueryBlock& block, int64_t i, const float* scores, const Arena& arena) const {
    const int64_t s = block.first + i, from = block.begin / kKeyTile;
    select_row(scores + (a.lower[s] - from * kKeyTile), a.upper[s] - a.lower[s], a.topk, a.lower[s],
               a.out + s * a.topk, arena);
  }

  int many(int threads, const std::vector<char>& needed) const;
  int few(int threads, int64_t rows) const;
};

int Call::many(int threads, const std::vector<char>& needed) const {
  const int64_t num_tiles = static_cast<int64_t>(needed.size());
  Block packed(num_tiles * kernels.tile_bytes);
  if (packed.data == nullptr) return kNoMemory;
  const size_t score_bytes = round_up(block_rows * row_stride * 4, 64);
  const size_t scratch = std::max(kernels.scratch(a, block_rows), row_scratch);
  bool full = false;
#pragma omp parallel num_threads(threads) reduction(|| : full)
  {
    Block memory(score_bytes + scratch);
    full = memory.data == nullptr;
    float* scores = reinterpret_cast<float*>(memory.data);
    const Arena arena{reinterpret_cast<uintptr_t>(memory.data) + score_bytes};
#pragma omp for schedule(static)
    for (int64_t tile = 0; tile < num_tiles; tile++)
      if (needed[tile]) kernels.pack(a, tile, packed.data + tile * kernels.tile_bytes);
#if HR_X86
    if (kernels.tiles) amx::begin_tiles();
#endif
#pragma omp for schedule(dynamic, 1)
    for (size_t b = 0; b < blocks.size(); b++) {
      if (full) continue;
      const QueryBlock& block = blocks[b];
      const int64_t from = block.begin / kKeyTile;
      const int64_t to = (block.end + kKeyTile - 1) / kKeyTile;
      kernels.score(a, block, from, to, packed.data + from * kernels.tile_bytes, scores, row_stride,
                    arena);
      for (int64_t i = 0; i < block.count; i++)
        select(block, i, scores + i * row_stride, arena);
    }
#if HR_X86
    if (kernels.tiles) amx::end_tiles();
#endif
  }
  return full ? kNoMemory : kOk;
}

int Call::few(int threads, int64_t rows) const {
  std::vector<Piece> pieces;
  std::vector<std::pair<int64_t, int64_t>> each;  // block, and row of it
  std::vector<int64_t> first_row;                 // of each block, among all rows of scores
  for (size_t b = 0; b < blocks.size(); b++) {
    const QueryBlock& block = blocks[b];
    const int64_t end = (block.end + kKeyTile - 1) / kKeyTile;
    for (int64_t from = block.begin / kKeyTile; from < end; from += kRun)
      pieces.push_back({static_cast<int64_t>(b), from, std::min(from + kRun, end)});
    first_row.push_back(static_cast<int64_t>(each.size()));
    for (int64_t i = 0; i < block.count; i++) each.emplace_back(b, i);
  }
  static thread_local Workspace score_space;
  float* scores = reinterpret_cast<float*>(score_space.reserve(rows * row_stride * 4));
  if (scores == nullptr) return kNoMemory;
  const size_t packed_bytes = kRun * kernels.tile_bytes;
  const size_t scratch = std::max(packed_bytes + kernels.scratch(a, block_rows), row_scratch);
  const int workers =
      static_cast<int>(std::min<int64_t>(threads, static_cast<int64_t>(pieces.size() + 3) / 4));
  bool full = false;
#pragma omp parallel num_threads(workers) reduction(|| : full) if (workers > 1)
  {
    static thread_local Workspace space;
    char* memory = space.reserve(scratch);
    full = memory == nullptr;
    const Arena after{reinterpret_cast<uintptr_t>(memory) + packed_bytes};
#if HR_X86
    if (kernels.tiles) amx::begin_tiles();
#endif
#pragma omp for schedule(dynamic, 1)
    for (size_t p = 0; p < pieces.size(); p++) {
      if (full) continue;
      const Piece& piece = pieces[p];
      const QueryBlock& block = blocks[piece.block];
      for (int64_t tile = piece.from; tile < piece.to; tile++)
        kernels.pack(a, tile, memory + (tile - piece.from) * kernels.tile_bytes);
      float* to = scores + first_row[piece.block] * row_stride +
                  (piece.from - block.begin / kKeyTile) * kKeyTile;
      kernels.score(a, block, piece.from, piece.to, memory, to, row_stride, after);
    }
#if HR_X86
    if (kernels.tiles) amx::end_tiles();
#endif
#pragma omp for schedule(dynamic, 1)
    for (size_t r = 0; r < each.size(); r++)
      if (!full)
        select(blocks[each[r].first], each[r].second, scores + r * row_stride,
               Arena{reinterpret_cast<uintptr_t>(memory)});
  }
  return full ? kNoMemory : kOk;
}

}  // namespace
}  // namespace headrace

using namespace headrace;

extern "C" HR_EXPORT int headrace_select_topk(int level, int threads, int dtype, const void* q,
                                    const float* weights, const void* k, const int32_t* lower,
                                    const int32_t* upper, int64_t S, int64_t T, int64_t HI,
                                    int64_t D, int64_t topk, int32_t* out) {
  const Select a{q, weights, k, lower, upper, out, S, T, HI, D, topk};
  const Kernels kernels = choose(level, dtype, a);
  const int64_t block_rows = std::min<int64_t>(16, std::max<int64_t>(4, 256 / HI));
  for (int64_t s = 0; s < S; s++)
    if (lower[s] < 0 || upper[s] > T) return kBadIndex;
  std::vector<QueryBlock> blocks = plan(a, block_rows);
  if (blocks.empty()) return kOk;
  // Longest first, so that the threads end together.
  std::stable_sort(blocks.begin(), blocks.end(), [](const QueryBlock& x, const QueryBlock& y) {
    return x.end - x.begin > y.end - y.begin;
  });
  const int64_t num_tiles = (T + kKeyTile - 1) / kKeyTile;
  std::vector<char> needed(num_tiles, 0);
  int64_t longest = 0;
  for (const QueryBlock& block : blocks) {
    longest = std::max(longest, block.end - block.begin);
    const int64_t first = block.begin / kKeyTile, last = (block.end - 1) / kKeyTile;
    // Blocks of one sequence nest: nothing left to mark when both ends are.
    if (needed[first] == 2 && needed[last] != 0) continue;
    std::fill(needed.begin() + first, needed.begin() + last + 1, 1);
    needed[first] = 2;
  }
  int64_t used = 0, rows = 0;
  for (const QueryBlock& block : blocks) {
    used += (block.end + kKeyTile - 1) / kKeyTile - block.begin / kKeyTile;
    rows += block.count;
  }
  const int64_t row_stride = round_up(longest + 2 * kKeyTile, 16) + 16;
  const Call call{a,          kernels,    blocks,  HR_PICK(level, select_row),
                  block_rows, row_stride, HR_PICK(level, select_scratch)(longest)};
  const int64_t kept = std::count_if(needed.begin(), needed.end(), [](char n) { return n != 0; });
  if (used <= 2 * kept && rows * row_stride * 4 <= kMostScores) return call.few(threads, rows);
  return call.many(threads, needed);
}
