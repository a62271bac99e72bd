// Arguments of products with packed matrices, shared by the driver and its kernels.
//
// A matrix of O outputs and D inputs lies in panels of 32 outputs, each read as one stream. float32:
// [D][32]. The others: steps of 64 bytes of inputs (32 bf16, 64 int8), each step two tiles of 16
// outputs, each tile [16][16 outputs][4 bytes of neighbouring inputs]. Zeros fill the last panel and
// step. Products are sums over the inputs in ascending order, whatever else is computed beside them.
#pragma once

#include "common.h"

namespace headrace {

constexpr int64_t kPanel = 32;       // outputs
constexpr int64_t kTileRows = 16;    // rows of activations in a tile
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kMostRows = 256;  // prepared at a time

enum Kind : int { kWide = 0, kPairs = 1, kQuads = 2 };  // float32, bfloat16, int8

// x [S, D] with rows `x_row` elements apart; scales fp32 [panels * 32], of kQuads only; bias fp32
// [O] or null; out [S, O]. `steps` are those of a panel, 0 for kWide.
struct Packed {
  const void* x;
  int64_t x_row;
  const char* panels;
  const float* scales;
  const float* bias;
  void* out;
  int64_t S, D, O, steps, panel_bytes;
};

// weight [O, D] with rows `row` elements apart, to panels and scales as above, whose padding is zero
// already.
struct Packing {
  const void* weight;
  int64_t row;
  char* panels;
  float* scales;
  int64_t O, D, panel_bytes;
};

// Rows first .. first + count of x as the kernels want them: fp32 rows of `width`, or one sequence
// of `steps` tiles for every 16 rows. `scales` [count] of kQuads.
struct Activations {
  char* data;
  float* scales;
  int64_t first, count, width;
};

// Rows begin .. end (relative to `first`), beginning at a tile.
using PrepareRows = void (*)(const Packed&, const Activations&, int64_t begin, int64_t end);
// Scales, adds the bias to and writes a block of `rows` results, [rows][32] in `dots`: float, or
// int32 of kQuads. `row` is relative to `first`.
using FinishRows = void (*)(const Packed&, const Activations&, int64_t row, int64_t rows,
                            int64_t panel, float* dots);
// All rows times the panels begin .. end.
using PanelProducts = void (*)(const Packed&, const Activations&, int64_t begin, int64_t end,
                               FinishRows finish);

using PackPanel = void (*)(const Packing&, int64_t panel);

// How the products of all S rows of a matrix are computed: `block` rows are prepared and multiplied
// at a time, `row_bytes` each. What is prepared for a block must be whole before it is multiplied;
// beyond that, any rows and panels may go to any thread.
struct PackedPlan {
  PrepareRows prepare;
  PanelProducts products;
  FinishRows finish;
  int64_t block, row_bytes, width, panels;

  // Working space for `count` rows, which are whole blocks or all there are.
  size_t size(int64_t count) const {
    return static_cast<size_t>(data_bytes(count) + round_up(count * 4, 64));
  }
  // The rows from `first` on, a multiple of `block`, prepared at `data`, which has room for `count`.
  Activations rows(const Packed& a, int64_t first, int64_t count, char* data) const {
    float* scales = reinterpret_cast<float*>(data + data_bytes(count));
    return {data, scales, first, a.S - first < block ? a.S - first : block, width};
  }
  int64_t data_bytes(int64_t count) const { return round_up(count, kTileRows) * row_bytes; }
};

// `dtype` is that of x and out.
PackedPlan packed_plan(int level, int dtype, int kind, int64_t S, int64_t D, int64_t O);
// Arguments for a matrix of this kind.
Packed packed_arguments(const void* x, int64_t x_row, const void* panels, const float* scales,
                        const float* bias, int kind, int64_t S, int64_t D, int64_t O, void* out);

#if HR_X86
namespace amx {
void pair_products(const Packed& a, const Activations& rows, int64_t begin, int64_t end,
                   FinishRows finish);
void quad_products(const Packed& a, const Activations& rows, int64_t begin, int64_t end,
                   FinishRows finish);
}  // namespace amx
#endif

}  // namespace headrace
