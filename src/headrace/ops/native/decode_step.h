// Arguments of the decode step; the engine fills in the same structures.
#pragma once

#include "common.h"

namespace headrace {

// A packed matrix (packed.h). scales are those of int8, bias fp32 [outputs]; either may be null.
struct StepMatrix {
  const void* panels;
  const float* scales;
  const float* bias;
  int64_t kind, inputs, outputs;
};

// Weights of the norms, [hidden] or [d]; q_norm and k_norm are both null without such norms. keys
// and values are blocks of [Hkv,P,d].
struct StepLayer {
  const void *attention_norm, *q_norm, *k_norm, *feed_forward_norm;
  void *keys, *values;
  StepMatrix qkv, output, gate_up, down;
};

// New tokens of some sequences of a grouped-query decoder with SwiGLU: n rows, sequence after sequence.
// Everything is of one dtype but for matrices, biases and logits, which are fp32. embedding
// [vocab,hidden]; cosine and sine [longest or more, d]; ids, positions and owners [n]: each row's
// token, where it goes, and whose it is; starts and counts [sequences]: position of each one's first
// row, and its rows; tables [sequences,table_width], the blocks of each sequence, which are below
// `blocks` and lie `block_stride` elements apart, heads `head_stride`; asked [num_asked], rows whose
// logits [num_asked,vocab] are wanted, ascending.
struct Step {
  const StepLayer* layers;
  const void *embedding, *final_norm, *cosine, *sine;
  StepMatrix head;
  const int64_t *ids, *positions, *owners, *starts, *counts, *asked;
  const int32_t* tables;
  void* logits;
  int64_t n, sequences, num_asked, num_layers, hidden, inner, heads, kv_heads, dim, vocab, longest,
      blocks, table_width, block_tokens, block_stride, head_stride, interleaved;
  float epsilon, scale;
};

}  // namespace headrace
