// Arguments of the fused scoring and selection, shared by its driver and its kernels.
#pragma once

#include "common.h"

namespace headrace {

constexpr int64_t kKeyTile = 32;  // keys scored together

// q [S,HI,D], weights [S,HI], k [T,D], bounds int32 [S], out int32 [S, topk].
struct Select {
  const void* q;
  const float* weights;
  const void* k;
  const int32_t* lower;
  const int32_t* upper;
  int32_t* out;
  int64_t S, T, HI, D, topk;
};

// Query rows first .. first + count, which see keys begin .. end (the union over the rows).
struct QueryBlock {
  int64_t first, count, begin, end;
};

// Packs the 32 keys of one tile for `score`. Keys beyond T are zero.
using PackTile = void (*)(const Select&, int64_t tile, char* to);
// Writes the scores of a block against the tiles from..to, which lie at `packed`: row i at scores +
// i * row_stride.
using ScoreBlock = void (*)(const Select&, const QueryBlock&, int64_t from, int64_t to,
                            const char* packed, float* scores, int64_t row_stride, Arena scratch);
using SelectSize = size_t (*)(const Select&, int64_t block_rows);
using SelectRow = void (*)(const float* scores, int64_t n, int64_t k, int32_t base, int32_t* out,
                           Arena scratch);

#if HR_X86
namespace amx {
void pack_tile(const Select& a, int64_t tile, char* to);
void score_block(const Select& a, const QueryBlock& block, int64_t from, int64_t to,
                 const char* packed, float* scores, int64_t row_stride, Arena scratch);
size_t score_scratch(const Select& a, int64_t block_rows);
void begin_tiles();
void end_tiles();
}  // namespace amx
#endif

}  // namespace headrace
