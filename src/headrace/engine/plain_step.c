/* One decode step of a grouped-query, SwiGLU decoder on one core, in float.
 *
 * n sequences get one new token each: from embedded tokens to logits, keys and values stored on the
 * way. At this batch the step is bound by reading weights and cache once; run as separate library
 * operations it takes two to three times as long. `plain_step.py` builds this file and checks it
 * against the decoder it mirrors before it is used; the decoder remains the definition.
 *
 * Matrices come packed: panels of `panel_width()` outputs, each [inputs, panel], the last one padded
 * with zeros. A panel is read as one stream, and stays in L1 or L2 for all rows of the batch.
 */

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#define ROWS 8
#else
#define LANES 8
#define ROWS 4
#endif
#define PANEL (2 * LANES)
#define AHEAD 16 /* matrix rows prefetched ahead */
#define LINE 16  /* floats per cache line */

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4)));

typedef struct {
    const float *attention_norm;           /* [hidden] */
    const float *qkv, *qkv_bias;           /* packed hidden -> (H + 2 Hkv) d; bias may be null */
    const float *q_norm, *k_norm;          /* [d], both null without qk norm */
    const float *output, *output_bias;     /* packed H d -> hidden */
    const float *feed_forward_norm;        /* [hidden] */
    const float *gate_up;                  /* packed hidden -> 2 inner */
    const float *down;                     /* packed inner -> hidden */
    float *keys, *values; /* [blocks, Hkv, block_tokens, d], so far apart as Step says */
} Layer;

typedef struct {
    const Layer *layers;
    const float *final_norm;      /* [hidden] */
    const float *head;            /* packed hidden -> vocab */
    const float *cosine, *sine;   /* [positions, d], sine signed */
    const int64_t *positions;     /* [n] */
    const int32_t *tables;        /* [n, table_width], the blocks of each sequence */
    float *x;                     /* [n, hidden]: embedded tokens in, overwritten */
    float *logits;                /* [n, vocab] out */
    float *scratch;               /* scratch_size() floats */
    int64_t n, num_layers, hidden, inner, heads, kv_heads, dim, vocab, longest, table_width, block_tokens,
        block_stride, head_stride, interleaved;
    float epsilon;
} Step;

int64_t panel_width(void) { return PANEL; }

int64_t scratch_size(const Step *s) {
    int64_t width = (s->heads + 2 * s->kv_heads) * s->dim;
    int64_t scores = s->heads / s->kv_heads * s->longest;
    return s->n * (s->hidden + width + s->heads * s->dim + 3 * s->inner) + scores;
}

/* e^x for x <= 0: 2^whole * 2^f, the latter a polynomial on [-0.5, 0.5]. Relative error below 3e-7;
 * NaN stays NaN, anything under -87 becomes 0 to float precision. */
static inline float exp_negative(float x) {
    float t = x * 1.44269504088896341f;
    t = t < -126.0f ? -126.0f : t;
    float whole = __builtin_rintf(t);
    float f = t - whole;
    float p = 1.535336188319500e-4f;
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    int32_t power = ((int32_t)whole + 127) << 23;
    float two;
    memcpy(&two, &power, sizeof two);
    return x != x ? x : p * two;
}

/* y[rows, columns] = (add ? y : 0) + x w + bias for one panel. rows is a constant after inlining. */
static inline __attribute__((always_inline)) void multiply_tile(
    const float *restrict x, int64_t inputs, const float *restrict w, const int rows,
    const float *bias, int add, float *restrict y, int64_t y_row, int64_t columns) {
    Vector sum[ROWS][2];
    for (int m = 0; m < rows; m++) sum[m][0] = sum[m][1] = (Vector){0};
    for (int64_t k = 0; k < inputs; k++, w += PANEL) {
        const Vector left = *(const Vector *)w, right = *(const Vector *)(w + LANES);
        for (int t = 0; t < PANEL; t += LINE) __builtin_prefetch(w + AHEAD * PANEL + t);
        for (int m = 0; m < rows; m++) {
            sum[m][0] += left * x[m * inputs + k];
            sum[m][1] += right * x[m * inputs + k];
        }
    }
    for (int m = 0; m < rows; m++) {
        const float *result = (const float *)sum[m];
        float *target = y + m * y_row;
        for (int64_t c = 0; c < columns; c++)
            target[c] = (add ? target[c] : 0.0f) + result[c] + (bias ? bias[c] : 0.0f);
    }
}

/* x [n, inputs] times packed w -> y [n, outputs]. */
static void multiply(const float *x, int64_t n, int64_t inputs, const float *w, const float *bias,
                     int add, float *y, int64_t outputs) {
    for (int64_t o = 0; o < outputs; o += PANEL, w += inputs * PANEL) {
        const float *b = bias ? bias + o : 0;
        const int64_t columns = outputs - o < PANEL ? outputs - o : PANEL;
#define TILE(COUNT, WIDTH)                                                                         \
    multiply_tile(x + m * inputs, inputs, w, COUNT, b, add, y + m * outputs + o, outputs, WIDTH)
        int64_t m = 0;
        if (columns == PANEL)
            for (; m + ROWS <= n; m += ROWS) TILE(ROWS, PANEL);
        for (; m + 2 <= n; m += 2) TILE(2, columns);
        if (m < n) TILE(1, columns);
#undef TILE
    }
}

/* x / sqrt(mean(x^2) + epsilon) * weight over rows of `width`; y may be x. */
static void normalize(const float *x, int64_t rows, int64_t width, const float *weight,
                      float epsilon, float *y) {
    for (int64_t i = 0; i < rows; i++, x += width, y += width) {
        float squares = 0.0f;
        for (int64_t t = 0; t < width; t++) squares += x[t] * x[t];
        const float scale = 1.0f / __builtin_sqrtf(squares / (float)width + epsilon);
        for (int64_t t = 0; t < width; t++) y[t] = x[t] * scale * weight[t];
    }
}

static void rotate(float *restrict x, const float *restrict cosine, const float *restrict sine,
                   int64_t dim, int interleaved) {
    if (interleaved) {
        for (int64_t t = 0; t < dim; t += 2) {
            const float a = x[t], b = x[t + 1];
            x[t] = a * cosine[t] + b * sine[t];
            x[t + 1] = b * cosine[t + 1] + a * sine[t + 1];
        }
        return;
    }
    const int64_t half = dim / 2;
    for (int64_t t = 0; t < half; t++) {
        const float a = x[t], b = x[t + half];
        x[t] = a * cosine[t] + b * sine[t];
        x[t + half] = b * cosine[t + half] + a * sine[t + half];
    }
}

/* One sequence's group of query heads over its key head, block by block. dim and group are constants
 * after inlining for common sizes, which keeps queries and sums in registers. Each pass prefetches
 * what the next one reads: the pass over keys the values, the pass over values the next head's keys,
 * which follow in the same block. */
static inline __attribute__((always_inline)) void attend_group(
    const float *restrict q, const float *restrict keys, const float *restrict values,
    const int32_t *restrict table, int64_t block_tokens, int64_t block_stride, int64_t head_stride,
    int64_t length, int64_t stride, float *restrict scores, float *restrict out, const int64_t dim,
    const int64_t group) {
    float query[group * dim], sum[group * dim], total[group];
    const float scale = 1.0f / __builtin_sqrtf((float)dim);
    for (int64_t t = 0; t < group * dim; t++) query[t] = q[t] * scale;
    for (int64_t first = 0; first < length; first += block_tokens) {
        const int64_t base = table[first / block_tokens] * block_stride;
        const int64_t count = length - first < block_tokens ? length - first : block_tokens;
        for (int64_t j = 0; j < count; j++) {
            const float *restrict key = keys + base + j * dim;
            for (int64_t t = 0; t < dim; t += LINE) __builtin_prefetch(values + base + j * dim + t);
            for (int64_t g = 0; g < group; g++) {
                float dot = 0.0f;
                for (int64_t t = 0; t < dim; t++) dot += query[g * dim + t] * key[t];
                scores[g * stride + first + j] = dot;
            }
        }
    }
    for (int64_t g = 0; g < group; g++) {
        float *restrict row = scores + g * stride;
        float best = row[0], all = 0.0f;
        for (int64_t j = 1; j < length; j++) best = row[j] > best ? row[j] : best;
        for (int64_t j = 0; j < length; j++) {
            const float e = exp_negative(row[j] - best);
            row[j] = e;
            all += e;
        }
        total[g] = all;
    }
    memset(sum, 0, sizeof sum);
    for (int64_t first = 0; first < length; first += block_tokens) {
        const int64_t base = table[first / block_tokens] * block_stride;
        const float *next = keys + base + head_stride;
        const int64_t count = length - first < block_tokens ? length - first : block_tokens;
        for (int64_t j = 0; j < count; j++) {
            const float *restrict value = values + base + j * dim;
            for (int64_t t = 0; t < dim; t += LINE) __builtin_prefetch(next + j * dim + t);
            for (int64_t g = 0; g < group; g++)
                for (int64_t t = 0; t < dim; t++)
                    sum[g * dim + t] += scores[g * stride + first + j] * value[t];
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t t = 0; t < dim; t++) out[g * dim + t] = sum[g * dim + t] / total[g];
}

/* Store each row's new key and value, then attend over the row's own length. */
static void attend(const Step *s, const Layer *layer, const float *qkv, float *scores, float *out) {
    const int64_t dim = s->dim, group = s->heads / s->kv_heads;
    const int64_t width = (s->heads + 2 * s->kv_heads) * dim;
    const int64_t block = s->block_tokens;
    const int64_t block_stride = s->block_stride, head_stride = s->head_stride;
    for (int64_t i = 0; i < s->n; i++, qkv += width) {
        const int64_t at = s->positions[i], length = at + 1;
        const int32_t *table = s->tables + i * s->table_width;
        const int64_t last = table[at / block] * block_stride + at % block * dim;
        for (int64_t h = 0; h < s->kv_heads; h++, out += group * dim) {
            float *keys = layer->keys + h * head_stride, *values = layer->values + h * head_stride;
            const float *q = qkv + h * group * dim, *k = qkv + (s->heads + h) * dim;
            memcpy(keys + last, k, dim * sizeof(float));
            memcpy(values + last, k + s->kv_heads * dim, dim * sizeof(float));
#define CASE(DIM, GROUP)                                                                           \
    if (dim == DIM && group == GROUP)                                                              \
        attend_group(q, keys, values, table, block, block_stride, head_stride, length, s->longest, \
                     scores, out, DIM, GROUP);                                                     \
    else
            CASE(32, 1) CASE(32, 2) CASE(32, 3) CASE(64, 1) CASE(64, 2) CASE(64, 3) CASE(64, 4)
            CASE(128, 1) CASE(128, 2)
            attend_group(q, keys, values, table, block, block_stride, head_stride, length,
                         s->longest, scores, out, dim, group);
#undef CASE
        }
    }
}

void decode_step(const Step *s) {
    const int64_t n = s->n, hidden = s->hidden, inner = s->inner, dim = s->dim;
    const int64_t width = (s->heads + 2 * s->kv_heads) * dim;
    float *normed = s->scratch, *qkv = normed + n * hidden, *mixed = qkv + n * width;
    float *gate_up = mixed + n * s->heads * dim, *active = gate_up + n * 2 * inner;
    float *scores = active + n * inner;
    for (int64_t l = 0; l < s->num_layers; l++) {
        const Layer *layer = s->layers + l;
        normalize(s->x, n, hidden, layer->attention_norm, s->epsilon, normed);
        multiply(normed, n, hidden, layer->qkv, layer->qkv_bias, 0, qkv, width);
        for (int64_t i = 0; i < n; i++) {
            float *q = qkv + i * width, *k = q + s->heads * dim;
            const int64_t at = s->positions[i] * dim;
            if (layer->q_norm) {
                normalize(q, s->heads, dim, layer->q_norm, s->epsilon, q);
                normalize(k, s->kv_heads, dim, layer->k_norm, s->epsilon, k);
            }
            for (int64_t h = 0; h < s->heads + s->kv_heads; h++)
                rotate(q + h * dim, s->cosine + at, s->sine + at, dim, (int)s->interleaved);
        }
        attend(s, layer, qkv, scores, mixed);
        multiply(mixed, n, s->heads * dim, layer->output, layer->output_bias, 1, s->x, hidden);
        normalize(s->x, n, hidden, layer->feed_forward_norm, s->epsilon, normed);
        multiply(normed, n, hidden, layer->gate_up, 0, 0, gate_up, 2 * inner);
        for (int64_t i = 0; i < n; i++) {
            const float *gate = gate_up + i * 2 * inner, *up = gate + inner;
            for (int64_t t = 0; t < inner; t++) {
                const float e = exp_negative(gate[t] < 0.0f ? gate[t] : -gate[t]);
                const float sigmoid = (gate[t] < 0.0f ? e : 1.0f) / (1.0f + e);
                active[i * inner + t] = gate[t] * sigmoid * up[t];
            }
        }
        multiply(active, n, inner, layer->down, 0, 1, s->x, hidden);
    }
    normalize(s->x, n, hidden, s->final_norm, s->epsilon, normed);
    multiply(normed, n, hidden, s->head, 0, 0, s->logits, s->vocab);
}
