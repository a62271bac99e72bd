// Fused index scores and exact top-k: few rows of scores exist at a time.
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
  Block packed(num_tiles * kernels.tile_bytes);
  if (packed.data == nullptr) return kNoMemory;
  const int64_t row_stride = round_up(longest + 2 * kKeyTile, 16) + 16;
  const size_t score_bytes = round_up(block_rows * row_stride * 4, 64);
  const SelectRow select_row = HR_PICK(level, select_row);
  const size_t scratch =
      std::max(kernels.scratch(a, block_rows), HR_PICK(level, select_scratch)(longest));
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
      kernels.score(a, block, from, to, packed.data, scores, row_stride, arena);
      for (int64_t i = 0; i < block.count; i++) {
        const int64_t s = block.first + i;
        select_row(scores + i * row_stride + (lower[s] - from * kKeyTile), upper[s] - lower[s],
                   topk, lower[s], out + s * topk, arena);
      }
    }
#if HR_X86
    if (kernels.tiles) amx::end_tiles();
#endif
  }
  return full ? kNoMemory : kOk;
}
