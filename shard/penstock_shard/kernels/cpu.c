/* CPU kernels of the shard: linear layers, paged attention and what lies between them.
 *
 * Every result has the same bits whatever the number of rows, the number of threads and the level
 * this file is compiled for (see vectors.h). That holds because
 *   - an output of a product is one chain of fused multiply-adds in order of k, from 0, however
 *     rows and columns are tiled; its partial sum may lie in memory between two blocks of k;
 *   - a sum over a row has 16 partial sums, one for each index modulo 16, added by one fixed tree;
 *   - exp and tanh are written out in operations that IEEE 754 defines;
 *   - the compiler may neither contract nor reorder (-ffp-contract=off, no -ffast-math).
 *
 * Functions named penstock_* are called by cpu.py, which checks shapes. Calls may come from any
 * thread; one runs at a time.
 */

#include "threads.h"
#include "vectors.h"

/* Return values of calls. */
enum { DONE, BAD_SLOT, BAD_POSITION, BAD_BLOCK, NO_MEMORY };

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* ---- Products ----
 *
 * acc[r][16 v + lane] (+)= sum over i < k of x[r][i] * w[v][i][lane], for a tile of R rows and NV
 * vectors of columns that stays in registers. One product serves linear layers (w: panels of packed
 * weights), scores (w: tiles of keys) and sums of values (w: rows of values).
 */

struct product {
    const float *x;
    const void *const *w; /* for each piece of w, one after the other: a pointer per 16 columns */
    float *acc;
    int64_t ldx, step, ld; /* row strides, in elements: of x, of w, of acc */
    int64_t k, piece;      /* rows of w in all, and in a piece */
    int64_t skip;          /* rows of the first piece to leave out */
    int64_t pointers;      /* number of pointers for a piece */
    int64_t next;          /* distance in `w` from a pointer to the one to prefetch */
    int half, resume;      /* w is float16, else float32; add to the sums in acc */
};

#define MAX_ROWS (PENSTOCK_LEVEL == 2 ? 12 : PENSTOCK_LEVEL == 1 ? 6 : 4)

INLINE v16 v_weight(const void *w, int half) { return half ? v_load_half(w) : v_load(w); }

INLINE void tile(const int R, const int NV, const int half, const struct product *p) {
    v16 sum[MAX_ROWS][4];
    /* A pointer for every third row: one instruction can address base + ldx and base + 2 ldx. */
    const float *x[4] = {p->x, p->x + 3 * p->ldx, p->x + 6 * p->ldx, p->x + 9 * p->ldx};
    const void *const *pointers = p->w;
    int64_t ldx = p->ldx, bytes = p->step * (half ? 2 : 4), skip = p->skip, count;
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < NV; v++)
            sum[r][v] = p->resume ? v_load(p->acc + r * p->ld + LANES * v) : v_all(0.0f);
    for (int64_t left = p->k; left > 0; left -= count, pointers += p->pointers, skip = 0) {
        const char *w[4], *next[4];
        UNROLL for (int v = 0; v < NV; v++) {
            w[v] = (const char *)pointers[v] + skip * bytes;
            next[v] = (const char *)pointers[v + p->next];
        }
        count = min_of(left, p->piece - skip);
        for (int64_t i = 0; i < count; i++) {
            v16 column[4];
            UNROLL for (int v = 0; v < NV; v++) {
                __builtin_prefetch(next[v] + i * bytes);
                column[v] = v_weight(w[v] + i * bytes, half);
            }
            UNROLL for (int r = 0; r < R; r++) {
                v16 each = v_all(x[r / 3][r % 3 * ldx]);
                UNROLL for (int v = 0; v < NV; v++) sum[r][v] = v_fma(each, column[v], sum[r][v]);
            }
            UNROLL for (int j = 0; j < (R + 2) / 3; j++) x[j]++;
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < NV; v++) v_store(p->acc + r * p->ld + LANES * v, sum[r][v]);
}

typedef void (*tile_fn)(const struct product *p);
#define TILE(R, NV) \
    static void float_##R##_##NV(const struct product *p) { tile(R, NV, 0, p); } \
    static void half_##R##_##NV(const struct product *p) { tile(R, NV, 1, p); }
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1)
#define ROWS_4(t, NV) 0, t##_1_##NV, t##_2_##NV, t##_3_##NV, t##_4_##NV
#if PENSTOCK_LEVEL == 0
#define TABLE(t) {{ROWS_4(t, 1)}}
#elif PENSTOCK_LEVEL == 1
TILE(5, 1) TILE(6, 1)
TILE(1, 2) TILE(2, 2) TILE(3, 2)
TILE(1, 4)
#define TABLE(t) {{ROWS_4(t, 1), t##_5_1, t##_6_1}, {0, t##_1_2, t##_2_2, t##_3_2}, {0, t##_1_4}}
#else
TILE(5, 1) TILE(6, 1) TILE(7, 1) TILE(8, 1) TILE(9, 1) TILE(10, 1) TILE(11, 1) TILE(12, 1)
TILE(1, 2) TILE(2, 2) TILE(3, 2) TILE(4, 2) TILE(5, 2) TILE(6, 2)
TILE(7, 2) TILE(8, 2) TILE(9, 2) TILE(10, 2) TILE(11, 2) TILE(12, 2)
TILE(1, 4) TILE(2, 4) TILE(3, 4) TILE(4, 4) TILE(5, 4) TILE(6, 4)
#define ROWS_6(t, NV) ROWS_4(t, NV), t##_5_##NV, t##_6_##NV
#define FROM_7(t, NV) t##_7_##NV, t##_8_##NV, t##_9_##NV, t##_10_##NV, t##_11_##NV, t##_12_##NV
#define TABLE(t) {{ROWS_6(t, 1), FROM_7(t, 1)}, {ROWS_6(t, 2), FROM_7(t, 2)}, {ROWS_6(t, 4)}}
#endif
/* The tiles that fit the registers, indexed by half, log2 of NV, and R. */
static const tile_fn TILES[2][3][MAX_ROWS + 1] = {TABLE(float), TABLE(half)};

/* The product of at most MAX_ROWS rows and any number of vectors of columns. */
static void multiply(int64_t rows, int64_t vectors, struct product p) {
    for (int64_t left = vectors; left > 0;) {
        int width = left >= 4 ? 2 : left >= 2 ? 1 : 0;
        while (!TILES[p.half][width][rows]) width--;
        TILES[p.half][width][rows](&p);
        left -= 1 << width;
        p.w += 1 << width;
        p.acc += LANES << width;
    }
}

/* The size of the next tile when rows are divided into tiles of nearly equal size, since a tile of
 * one row takes as long as one of four. */
INLINE int64_t next_tile(int64_t rows, int64_t most) {
    return ceil_div(rows, ceil_div(rows, most));
}

/* ---- Packed weights ----
 *
 * 16 outputs make a panel, 4 panels a group (the last is filled with zeros). Floats of a panel lie
 * as [k][16], so that a product reads them in one stream; int8 as [k / 4][16][4], four k of an
 * output side by side, as the dot-product instructions want them.
 */

#define GROUP 4
#define SEGMENT 32 /* values of k that are packed at a time */

enum { FLOAT32, FLOAT16, INT8 };
enum { SOURCE_FLOAT32, SOURCE_FLOAT16, SOURCE_BFLOAT16 };

struct weight {
    int64_t n, k, kind;
    void *data;
    float *scales;  /* int8: the scale of each output */
    int32_t *sums;  /* int8: the sum over k of each output */
};

struct source {
    const void *data;
    int64_t type, row_stride, column_stride; /* in elements */
};

struct pack {
    struct weight *weight;
    struct source source;
    int64_t first_row, rows;
    _Atomic int64_t *bad; /* lowest index of a value that the kind cannot hold */
};

INLINE int64_t num_groups(const struct weight *w) { return ceil_div(w->n, GROUP * LANES); }

static float source_value(const struct source *s, int64_t i) {
    if (s->type == SOURCE_FLOAT32) return ((const float *)s->data)[i];
    uint16_t bits = ((const uint16_t *)s->data)[i];
    return s->type == SOURCE_FLOAT16 ? half_to_float(bits) : float_of((uint32_t)bits << 16);
}

/* Read `count` values of a row as floats; fast where they are contiguous. */
static void read_source(const struct source *s, int64_t row, int64_t k, int64_t count, float *to) {
    int64_t start = row * s->row_stride + k * s->column_stride;
    const uint16_t *bits = (const uint16_t *)s->data + start;
    if (s->column_stride != 1)
        for (int64_t i = 0; i < count; i++) to[i] = source_value(s, start + i * s->column_stride);
    else if (s->type == SOURCE_FLOAT32)
        memcpy(to, (const float *)s->data + start, (size_t)count * 4);
    else if (s->type == SOURCE_BFLOAT16)
        for (int64_t i = 0; i < count; i++) to[i] = float_of((uint32_t)bits[i] << 16);
    else {
        int64_t i = 0;
        for (; i + LANES <= count; i += LANES) v_store(to + i, v_load_half(bits + i));
        for (; i < count; i++) to[i] = half_to_float(bits[i]);
    }
}

static void report_bad(const struct pack *p, int64_t index) {
    int64_t seen = atomic_load(p->bad);
    while ((seen < 0 || index < seen) && !atomic_compare_exchange_weak(p->bad, &seen, index)) {}
}

/* The largest magnitude, as bits: these order like the numbers, with infinity and NaN on top. */
INLINE uint32_t largest_bits(const float *x, int64_t n) {
    uint32_t most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = bits_of(x[i]) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    return most;
}

/* x / scale rounded to nearest even, clamped to +-127. */
INLINE int32_t quantized(float x, float scale) {
    float q = x / scale;
    q = q > 127.0f ? 127.0f : q;
    q = q < -127.0f ? -127.0f : q;
    return (int32_t)(bits_of(q + 12582912.0f) - bits_of(12582912.0f));
}

/* Store `count` values of a row, from k on, in a panel, which has LANES elements for each k. */
static void pack_floats(const struct pack *p, int64_t row, int64_t output, int64_t k, int64_t count,
                        const float *values) {
    const struct weight *w = p->weight;
    int64_t at = (output / LANES * w->k + k) * LANES + output % LANES;
    if (w->kind == FLOAT32) {
        for (int64_t i = 0; i < count; i++) ((float *)w->data)[at + i * LANES] = values[i];
        return;
    }
    uint16_t halves[SEGMENT];
    for (int64_t i = 0; i < SEGMENT; i += LANES) v_store_half(halves + i, v_load(values + i));
    for (int64_t i = 0; i < count; i++) {
        if (!(fabsf(values[i]) <= 65504.0f)) report_bad(p, row * w->k + k + i);
        ((uint16_t *)w->data)[at + i * LANES] = halves[i];
    }
}

static void pack_int8(const struct pack *p, int64_t output, int64_t k, int64_t count,
                      const float *values) {
    const struct weight *w = p->weight;
    int8_t *panel = (int8_t *)w->data + output / LANES * ceil_div(w->k, 4) * 4 * LANES;
    float scale = output < w->n ? w->scales[output] : 0;
    for (int64_t i = 0; i < ceil_div(count, 4) * 4; i++) {
        int32_t q = scale > 0 ? quantized(values[i], scale) : 0;
        panel[((k + i) / 4 * LANES + output % LANES) * 4 + i % 4] = (int8_t)q;
        if (output < w->n) w->sums[output] += q;
    }
}

/* The scale of an int8 output. */
static void find_scale(const struct pack *p, int64_t row, int64_t output) {
    const struct weight *w = p->weight;
    float values[SEGMENT];
    uint32_t most = 0;
    for (int64_t k = 0; k < w->k; k += SEGMENT) {
        int64_t count = min_of(SEGMENT, w->k - k);
        read_source(&p->source, row, k, count, values);
        most = (uint32_t)max_of(most, largest_bits(values, count));
    }
    if (most >= 0x7f800000) report_bad(p, row * w->k);
    w->scales[output] = float_of(most) / 127.0f;
    w->sums[output] = 0;
}

/* Pack one panel, or the part of it that this source has; zeros after the last output. */
static void pack_task(const void *args, int64_t index, int thread) {
    (void)thread;
    const struct pack *p = args;
    const struct weight *w = p->weight;
    int64_t panel = p->first_row / LANES + index, last = p->first_row + p->rows;
    int64_t first = max_of(panel * LANES, p->first_row);
    int64_t end = last == w->n ? (panel + 1) * LANES : min_of((panel + 1) * LANES, last);
    for (int64_t output = first; output < min_of(end, last) && w->kind == INT8; output++)
        find_scale(p, output - p->first_row, output);
    for (int64_t k = 0; k < w->k; k += SEGMENT)
        for (int64_t output = first; output < end; output++) {
            float values[SEGMENT] = {0};
            int64_t count = min_of(SEGMENT, w->k - k), row = output - p->first_row;
            if (output < last) read_source(&p->source, row, k, count, values);
            if (w->kind == INT8) pack_int8(p, output, k, count, values);
            else pack_floats(p, row, output, k, count, values);
        }
}

/* Packs a source of `rows` rows as outputs first_row and on. Returns -1, or the index, row by row,
 * of a value that the kind cannot hold. */
int64_t penstock_pack(struct weight *weight, int64_t first_row, int64_t rows, const void *data,
                      int64_t type, int64_t row_stride, int64_t column_stride) {
    _Atomic int64_t bad = -1;
    struct pack p = {weight, {data, type, row_stride, column_stride}, first_row, rows, &bad};
    int64_t end = first_row + rows;
    if (end == weight->n) end = num_groups(weight) * GROUP * LANES;
    unsigned arithmetic = enter();
    run_region(pack_task, &p, ceil_div(end, LANES) - first_row / LANES, LANES * weight->k);
    leave(arithmetic);
    return bad;
}

/* ---- Linear ---- */

#define BLOCK_K 128   /* values of k in a block that several tiles share: 4 panels fit a cache */
#define MAX_CHUNK 240 /* most rows that one task multiplies with a group of panels */
#define AHEAD 4096    /* bytes to prefetch ahead in a stream of weights */

struct linear {
    const float *x, *bias;
    const struct weight *weight;
    float *out;
    int64_t rows, chunk, num_chunks;
    /* int8: quantized rows, four values of k side by side, and the scale of each row. */
    uint8_t *steps;
    float *scales;
};

struct block { int64_t row, rows, column; }; /* part of the output, with a group's columns */

/* Write the results of a block to the output, and add the bias. */
static void store_block(const struct linear *l, struct block b, const float *acc) {
    int64_t n = l->weight->n, columns = min_of(GROUP * LANES, n - b.column);
    for (int64_t r = 0; r < b.rows; r++) {
        float *out = l->out + (b.row + r) * n + b.column;
        const float *from = acc + r * GROUP * LANES;
        if (l->bias)
            for (int64_t c = 0; c < columns; c++) out[c] = from[c] + l->bias[b.column + c];
        else
            memcpy(out, from, (size_t)columns * 4);
    }
}

static void linear_float(const struct linear *l, struct block b, float *acc) {
    const struct weight *w = l->weight;
    int64_t row_bytes = LANES * (w->kind == FLOAT16 ? 2 : 4), panel_bytes = w->k * row_bytes;
    const char *panels = (const char *)w->data + b.column / LANES * panel_bytes;
    /* Prefetch the next cache lines of the stream of weights, or, where several tiles share a block
     * of k, the next block. */
    int64_t block = b.rows <= MAX_ROWS ? w->k : BLOCK_K;
    int64_t ahead = b.rows <= MAX_ROWS ? AHEAD : BLOCK_K * row_bytes;
    const void *pointers[2 * GROUP];
    struct product p = {.w = pointers, .ldx = w->k, .step = LANES, .ld = GROUP * LANES,
                        .next = GROUP, .half = w->kind == FLOAT16};
    for (int64_t start = 0; start < w->k; start += block) {
        for (int v = 0; v < GROUP; v++) {
            pointers[v] = panels + v * panel_bytes + start * row_bytes;
            pointers[GROUP + v] = (const char *)pointers[v] + ahead;
        }
        p.k = p.piece = min_of(block, w->k - start);
        p.resume = start > 0;
        for (int64_t r = 0, rows; r < b.rows; r += rows) {
            rows = next_tile(b.rows - r, MAX_ROWS);
            p.x = l->x + (b.row + r) * w->k + start;
            p.acc = acc + r * p.ld;
            multiply(rows, GROUP, p);
        }
    }
    store_block(l, b, acc);
}

#if PENSTOCK_LEVEL == 2
#define INT8_ROWS 6
#define INT8_VECTORS 4
#else
#define INT8_ROWS 3
#define INT8_VECTORS 2
#endif

INLINE void int8_tile(const int R, const uint8_t *x, int64_t ldx, const int8_t *w,
                      int64_t panel_bytes, int64_t quads, int32_t *acc) {
    i16 sum[INT8_ROWS][INT8_VECTORS];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < INT8_VECTORS; v++) sum[r][v] = i_zero();
    for (int64_t q = 0; q < quads; q++)
        UNROLL for (int v = 0; v < INT8_VECTORS; v++) {
            const int8_t *column = w + v * panel_bytes + 4 * LANES * q;
            __builtin_prefetch(column + AHEAD);
            UNROLL for (int r = 0; r < R; r++)
                sum[r][v] = i_dot(sum[r][v], x + r * ldx + 4 * q, column);
        }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < INT8_VECTORS; v++)
            i_store(acc + (r * GROUP + v) * LANES, sum[r][v]);
}

static void int8_rows(int64_t rows, const uint8_t *x, int64_t ldx, const int8_t *w,
                      int64_t panel_bytes, int64_t quads, int32_t *acc) {
    switch (rows) {
    case 1: return int8_tile(1, x, ldx, w, panel_bytes, quads, acc);
    case 2: return int8_tile(2, x, ldx, w, panel_bytes, quads, acc);
    case 3: return int8_tile(3, x, ldx, w, panel_bytes, quads, acc);
#if INT8_ROWS > 3
    case 4: return int8_tile(4, x, ldx, w, panel_bytes, quads, acc);
    case 5: return int8_tile(5, x, ldx, w, panel_bytes, quads, acc);
    case 6: return int8_tile(6, x, ldx, w, panel_bytes, quads, acc);
#endif
    }
}

/* Quantize a row to int8 with the scale max |x| / 127. A row that is not finite gets a NaN scale,
 * and so all its results are NaN. */
static void quantize_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct linear *l = args;
    int64_t k = l->weight->k, width = ceil_div(k, 4) * 4;
    const float *x = l->x + row * k;
    uint8_t *steps = l->steps + row * width;
    uint32_t most = largest_bits(x, k);
    float scale = most < 0x7f800000 ? float_of(most) / 127.0f : NAN;
    l->scales[row] = scale;
    memset(steps, OFFSET, (size_t)width);
    if (scale > 0)
        for (int64_t i = 0; i < k; i++) steps[i] = (uint8_t)(quantized(x[i], scale) + OFFSET);
}

static void linear_int8(const struct linear *l, struct block b, int32_t *acc) {
    const struct weight *w = l->weight;
    int64_t quads = ceil_div(w->k, 4), panel_bytes = quads * 4 * LANES;
    int64_t columns = min_of(GROUP * LANES, w->n - b.column);
    for (int64_t r = 0, size; r < b.rows; r += size) {
        int64_t row = b.row + r;
        size = next_tile(b.rows - r, INT8_ROWS);
        for (int v = 0; v < GROUP; v += INT8_VECTORS)
            int8_rows(size, l->steps + row * quads * 4, quads * 4,
                      (const int8_t *)w->data + (b.column / LANES + v) * panel_bytes, panel_bytes,
                      quads, acc + v * LANES);
        for (int64_t i = 0; i < size; i++) {
            float *out = l->out + (row + i) * w->n + b.column, scale = l->scales[row + i];
            for (int64_t c = 0; c < columns; c++) {
                uint32_t sum = (uint32_t)acc[i * GROUP * LANES + c];
                sum -= OFFSET * (uint32_t)w->sums[b.column + c]; /* may wrap: the result fits */
                out[c] = (float)(int32_t)sum * (scale * w->scales[b.column + c]);
                if (l->bias) out[c] = out[c] + l->bias[b.column + c];
            }
        }
    }
}

static void linear_task(const void *args, int64_t index, int thread) {
    const struct linear *l = args;
    int64_t row = index % l->num_chunks * l->chunk, group = index / l->num_chunks;
    struct block b = {row, min_of(l->chunk, l->rows - row), group * GROUP * LANES};
    if (l->weight->kind == INT8) linear_int8(l, b, pool.scratch[thread].data);
    else linear_float(l, b, pool.scratch[thread].data);
}

static int64_t compute_linear(struct linear *l) {
    const struct weight *w = l->weight;
    if (!reserve(MAX_CHUNK * GROUP * LANES * 4)) return NO_MEMORY;
    if (w->kind == INT8) {
        size_t bytes = (size_t)l->rows * (4 + (size_t)ceil_div(w->k, 4) * 4);
        if (!(l->scales = room(&pool.shared, bytes))) return NO_MEMORY;
        l->steps = (uint8_t *)(l->scales + l->rows);
        run_region(quantize_task, l, l->rows, 4 * w->k);
    }
    run_region(linear_task, l, num_groups(w) * l->num_chunks, w->k * GROUP * LANES * l->chunk);
    return DONE;
}

int64_t penstock_linear(const float *x, int64_t rows, const struct weight *weight,
                        const float *bias, float *out) {
    if (rows == 0) return DONE;
    int64_t chunk = ceil_div(rows, ceil_div(rows, MAX_CHUNK));
    if (chunk > MAX_ROWS) chunk = ceil_div(chunk, MAX_ROWS) * MAX_ROWS;
    struct linear l = {x, bias, weight, out, rows, chunk, ceil_div(rows, chunk), NULL, NULL};
    unsigned arithmetic = enter();
    int64_t status = compute_linear(&l);
    leave(arithmetic);
    return status;
}

/* ---- Rows: norm, activation, rotation, cache ---- */

struct norm {
    const float *x, *weight;
    float *residual, *out; /* residual may be NULL: then x itself is normalized */
    int64_t width;
    float eps, weight_offset;
};

/* 1 / sqrt(mean of squares + eps) */
static float inverse_rms(const float *x, int64_t n, float eps) {
    v16 sum = v_all(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        v16 part = v_load(x + i);
        sum = v_fma(part, part, sum);
    }
    v16 rest = v_load_part(x + i, n - i);
    sum = v_fma(rest, rest, sum);
    return 1.0f / sqrtf(v_sum(sum) / (float)n + eps);
}

static void rms_norm(const float *x, const float *weight, int64_t n, float eps, float offset,
                     float *out) {
    float scale = inverse_rms(x, n, eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * (offset + weight[i]);
}

static void norm_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct norm *a = args;
    const float *x = a->x + row * a->width;
    if (a->residual) {
        float *sum = a->residual + row * a->width;
        for (int64_t i = 0; i < a->width; i++) sum[i] = sum[i] + x[i];
        x = sum;
    }
    rms_norm(x, a->weight, a->width, a->eps, a->weight_offset, a->out + row * a->width);
}

void penstock_add_rms_norm(const float *x, float *residual, const float *weight, int64_t rows,
                           int64_t width, float eps, float weight_offset, float *out) {
    struct norm a = {x, weight, residual, out, width, eps, weight_offset};
    unsigned arithmetic = enter();
    run_region(norm_task, &a, rows, 4 * width);
    leave(arithmetic);
}

enum { SILU, GELU_TANH, SIGMOID };

struct gate {
    const float *gate_up;
    float *out;
    int64_t width, kind;
};

/* x / (1 + e^-u): SiLU for u = x; for this u GELU with its tanh, since (1 + tanh y) / 2 is
 * 1 / (1 + e^-2y), which does not cancel. Sigmoid has 1 in place of x. */
INLINE v16 activated(v16 x, int64_t kind) {
    v16 u = x;
    if (kind == GELU_TANH) {
        v16 cube = v_mul(v_mul(x, x), x);
        u = v_mul(v_all(1.59576912f), v_fma(v_all(0.044715f), cube, x)); /* 2 sqrt(2 / pi) */
    }
    v16 top = kind == SIGMOID ? v_all(1.0f) : x;
    return v_div(top, v_add(v_all(1.0f), v_exp(v_sub(v_all(0.0f), u))));
}

static void gate_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct gate *a = args;
    const float *gate = a->gate_up + row * 2 * a->width, *up = gate + a->width;
    float *out = a->out + row * a->width;
    int64_t i = 0, n = a->width;
    for (; i + LANES <= n; i += LANES)
        v_store(out + i, v_mul(activated(v_load(gate + i), a->kind), v_load(up + i)));
    v16 rest = v_mul(activated(v_load_part(gate + i, n - i), a->kind), v_load_part(up + i, n - i));
    v_store_part(out + i, rest, n - i);
}

void penstock_gated_activation(const float *gate_up, int64_t rows, int64_t width, int64_t kind,
                               float *out) {
    struct gate a = {gate_up, out, width, kind};
    unsigned arithmetic = enter();
    run_region(gate_task, &a, rows, 16 * width);
    leave(arithmetic);
}

/* One layer's cache: keys [block][kv head][block_size / 16][dim][16], 16 keys side by side, so that
 * scores need no sums across lanes; values [block][kv head][block_size][dim_v].
 * Where values are the first dim_v elements of the keys there are no `keys`, and `values` has whole
 * keys as rows: [block][kv head][block_size][dim]. */
struct cache {
    void *keys, *values;
    int64_t num_blocks, block_size, kv_heads, dim, dim_v, half;
};

/* Elements from one token's values to the next's. */
INLINE int64_t value_step(const struct cache *c) { return c->keys ? c->dim_v : c->dim; }

INLINE void *element(void *data, int64_t index, int64_t half) {
    return (char *)data + index * (half ? 2 : 4);
}

/* Store elements `step` apart. */
static void store_strided(const float *x, int64_t n, void *to, int64_t step, int64_t half) {
    for (int64_t i = 0; i < n; i += LANES) {
        uint16_t halves[LANES];
        int64_t count = min_of(LANES, n - i);
        if (half) v_store_half(halves, v_load_part(x + i, count));
        for (int64_t j = 0; j < count; j++) {
            if (half) ((uint16_t *)to)[(i + j) * step] = halves[j];
            else ((float *)to)[(i + j) * step] = x[i + j];
        }
    }
}

static void store_key_value(const struct cache *c, int64_t slot, int64_t head, const float *key,
                            const float *value) {
    int64_t block = slot / c->block_size, offset = slot % c->block_size, half = c->half;
    int64_t token = (block * c->kv_heads + head) * c->block_size;
    int64_t tile = (token + offset / LANES * LANES) * c->dim + offset % LANES;
    if (c->keys) store_strided(key, c->dim, element(c->keys, tile, half), LANES, half);
    else value = key;
    int64_t step = value_step(c);
    store_strided(value, step, element(c->values, (token + offset) * step, half), 1, half);
}

static int in_bounds(const int64_t *values, int64_t count, int64_t low, int64_t end) {
    for (int64_t i = 0; i < count; i++)
        if (values[i] < low || values[i] >= end) return 0;
    return 1;
}

struct store {
    const struct cache *cache;
    const float *key, *value;
    const int64_t *slots;
};

static void store_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct store *a = args;
    const struct cache *c = a->cache;
    for (int64_t h = 0; h < c->kv_heads && a->slots[row] >= 0; h++)
        store_key_value(c, a->slots[row], h, a->key + (row * c->kv_heads + h) * c->dim,
                        a->value + (row * c->kv_heads + h) * c->dim_v);
}

int64_t penstock_write_cache(const struct cache *cache, const float *key, const float *value,
                             const int64_t *slots, int64_t rows) {
    struct store a = {cache, key, value, slots};
    if (!in_bounds(slots, rows, -1, cache->num_blocks * cache->block_size)) return BAD_SLOT;
    unsigned arithmetic = enter();
    run_region(store_task, &a, rows, 8 * cache->kv_heads * (cache->dim + cache->dim_v));
    leave(arithmetic);
    return DONE;
}

struct rope {
    float *qkv, *out;
    const struct cache *cache;
    const int64_t *positions, *slots;
    const float *cos, *sin; /* [max_positions][half_dim] */
    int64_t heads, half_dim;
    const float *q_norm, *k_norm; /* NULL: none */
    float eps, weight_offset;
};

/* Rotate pairs (x[i], x[half + i]) by the angles of a position. */
INLINE void rotate_pairs(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

/* Write head x [dim] at a position to `out`, normalized and rotated. */
static void rotate(const struct rope *a, int64_t position, const float *x, const float *norm,
                   float *out) {
    int64_t dim = a->cache->dim, half = a->half_dim;
    const float *cos = a->cos + position * half, *sin = a->sin + position * half;
    if (norm) rms_norm(x, norm, dim, a->eps, a->weight_offset, out);
    else memcpy(out, x, (size_t)dim * 4);
    rotate_pairs(out, cos, sin, half);
}

static void rope_task(const void *args, int64_t row, int thread) {
    const struct rope *a = args;
    const struct cache *c = a->cache;
    int64_t dim = c->dim, position = a->positions[row];
    const float *x = a->qkv + row * (a->heads + 2 * c->kv_heads) * dim;
    const float *keys = x + a->heads * dim, *values = keys + c->kv_heads * dim;
    float *rotated = pool.scratch[thread].data;
    for (int64_t h = 0; h < a->heads; h++)
        rotate(a, position, x + h * dim, a->q_norm, a->out + (row * a->heads + h) * dim);
    for (int64_t h = 0; h < c->kv_heads && a->slots[row] >= 0; h++) {
        rotate(a, position, keys + h * dim, a->k_norm, rotated);
        store_key_value(c, a->slots[row], h, rotated, values + h * dim);
    }
}

/* half_dim 0: heads are not rotated. */
int64_t penstock_rope_and_cache(float *qkv, int64_t rows, int64_t heads, const struct cache *cache,
                                const int64_t *positions, const int64_t *slots, const float *cos,
                                const float *sin, int64_t max_positions, int64_t half_dim,
                                const float *q_norm, const float *k_norm, float eps,
                                float weight_offset, float *out) {
    struct rope a = {qkv, out, cache, positions, slots, cos, sin, heads, half_dim,
                     q_norm, k_norm, eps, weight_offset};
    if (!in_bounds(slots, rows, -1, cache->num_blocks * cache->block_size)) return BAD_SLOT;
    if (half_dim && !in_bounds(positions, rows, 0, max_positions)) return BAD_POSITION;
    unsigned arithmetic = enter();
    int found = reserve((size_t)cache->dim * 4);
    if (found) run_region(rope_task, &a, rows, 8 * (heads + 2 * cache->kv_heads) * cache->dim);
    leave(arithmetic);
    return found ? DONE : NO_MEMORY;
}

/* ---- Attention ----
 *
 * A task is a KV head and a run of queries of one sequence; its rows are those queries times the
 * query heads that share the KV head. The loop over keys goes in chunks that begin at multiples of
 * CHUNK from the sequence's start, whatever the queries. In a chunk a row updates its maximum,
 * scales its sums by e^(old - new) (exactly 1 if the maximum stays), and adds the keys it sees, one
 * after the other. Keys that it does not see are left out, so stale memory does not matter.
 */

#define CHUNK 256
#define CHUNK_TILES (CHUNK / LANES)
#define MORE_TILES 4 /* tiles to prefetch beyond a chunk: the most that one product takes at once */
#define TASK_ROWS 48

struct attention {
    const float *query, *sinks;
    const struct cache *cache;
    const int32_t *starts, *lengths; /* [sequences + 1], [sequences] */
    const int32_t *table;            /* [sequences][columns] */
    float *out;
    int64_t sequences, columns, heads, window; /* window 0: all keys */
    float scale, softcap; /* softcap 0: none */
    int64_t queries_per_task;
    int64_t *first_task; /* [sequences + 1] */
};

/* One task's rows and their state. */
struct rows {
    int64_t count, width;  /* width: elements in a row of `sum`, dim_v in whole vectors */
    int64_t head;          /* KV head */
    const int32_t *blocks; /* the sequence's blocks */
    int64_t *low, *high;   /* keys that a row sees */
    int64_t end;           /* after the last key that any row sees */
    /* Pointers into a chunk, and a little past it for the prefetch: one for each tile of 16 keys,
     * and for each 16 values as many as a row of values has vectors. */
    const void **tiles, **columns;
    float *query, *scores, *sum, *weights, *most; /* weights: 16 partial sums of a row */
    float *keys; /* the chunk's tiles, where the cache has rows only */
};

/* 16 rows of keys as a tile: to[i][lane] is element i of row `lane`. */
static void transpose_keys(const struct cache *c, int64_t token, float *to) {
    for (int64_t lane = 0; lane < LANES; lane++) {
        const void *row = element(c->values, (token + lane) * c->dim, c->half);
        for (int64_t i = 0; i < c->dim; i += LANES) {
            float part[LANES];
            int64_t count = min_of(LANES, c->dim - i);
            if (c->half) v_store(part, v_load_half((const uint16_t *)row + i));
            else memcpy(part, (const float *)row + i, (size_t)count * 4);
            for (int64_t j = 0; j < count; j++) to[(i + j) * LANES + lane] = part[j];
        }
    }
}

/* Set the pointers to a chunk's tiles, from key `first` on; past the last tile they repeat it. */
static void find_tiles(const struct attention *a, struct rows *s, int64_t chunk, int64_t first) {
    const struct cache *c = a->cache;
    int64_t vectors = s->width / LANES, last = (s->end - 1) / LANES * LANES;
    for (int64_t t = (first - chunk) / LANES; t < CHUNK_TILES + MORE_TILES; t++) {
        int64_t key = min_of(chunk + t * LANES, last);
        int64_t block = s->blocks[key / c->block_size] * c->kv_heads + s->head;
        int64_t token = block * c->block_size + key % c->block_size;
        if (c->keys) s->tiles[t] = element(c->keys, token * c->dim, c->half);
        else s->tiles[t] = s->keys + (key - chunk) * c->dim;
        if (!c->keys && t < CHUNK_TILES && chunk + t * LANES <= last)
            transpose_keys(c, token, s->keys + t * LANES * c->dim);
        for (int64_t v = 0; v < vectors; v++)
            s->columns[t * vectors + v] =
                element(c->values, token * value_step(c) + v * LANES, c->half);
    }
}

/* Compute the products of queries and keys [first, end) of a chunk: scores[row][key - chunk]. */
static void score(const struct attention *a, const struct rows *s, int64_t chunk, int64_t first,
                  int64_t end) {
    int64_t from = (first - chunk) / LANES, count = ceil_div(end - chunk, LANES) - from;
    int64_t dim = a->cache->dim;
    struct product p = {.w = s->tiles + from, .ldx = dim, .step = LANES, .ld = CHUNK, .k = dim,
                        .piece = dim, .next = MORE_TILES,
                        .half = a->cache->keys ? (int)a->cache->half : 0};
    for (int64_t r = 0, size; r < s->count; r += size) {
        size = next_tile(s->count - r, MAX_ROWS);
        p.x = s->query + r * dim;
        p.acc = s->scores + r * CHUNK + from * LANES;
        multiply(size, count, p);
    }
}

/* Turn the scores of keys [first, end) of a chunk into weights, and those of other keys into 0. */
static void soften(const struct attention *a, struct rows *s, int64_t r, int64_t chunk,
                   int64_t first, int64_t end) {
    static const float LANE[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    float *row = s->scores + r * CHUNK - chunk;
    int64_t from = first / LANES * LANES;
    v16 most = v_all(-INFINITY), none = v_all(-INFINITY), lane = v_load(LANE);
    for (int64_t key = from; key < end; key += LANES) {
        v16 x = v_mul(v_load(row + key), v_all(a->scale));
        if (a->softcap > 0)
            x = v_mul(v_tanh(v_div(x, v_all(a->softcap))), v_all(a->softcap));
        x = v_less(lane, v_all((float)(first - key)), none, x);
        x = v_less(lane, v_all((float)(end - key)), x, none);
        v_store(row + key, x);
        most = v_max(most, x);
    }
    float before = s->most[r], now = v_largest(v_max(v_all(before), most));
    v16 weights = v_load(s->weights + r * LANES);
    if (!(now == before)) {
        v16 shrink = v_exp(v_all(before - now));
        float *sum = s->sum + r * s->width;
        weights = v_mul(weights, shrink);
        for (int64_t i = 0; i < s->width; i += LANES)
            v_store(sum + i, v_mul(v_load(sum + i), shrink));
        s->most[r] = now;
    }
    for (int64_t key = from; key < end; key += LANES) {
        v16 x = v_exp(v_sub(v_load(row + key), v_all(now)));
        v_store(row + key, x);
        weights = v_add(weights, x);
    }
    v_store(s->weights + r * LANES, weights);
}

/* Adds weights times values of keys [first, end) of a chunk to rows [r, r + size). */
static void add_values(const struct attention *a, struct rows *s, int64_t r, int64_t size,
                       int64_t chunk, int64_t first, int64_t end) {
    int64_t vectors = s->width / LANES, tile = (first - chunk) / LANES;
    if (first >= end) return;
    multiply(size, vectors, (struct product){
        .x = s->scores + r * CHUNK + first - chunk, .ldx = CHUNK, .w = s->columns + tile * vectors,
        .acc = s->sum + r * s->width, .ld = s->width, .step = value_step(a->cache), .k = end - first,
        .piece = LANES, .skip = first % LANES, .pointers = vectors, .next = MORE_TILES * vectors,
        .half = (int)a->cache->half, .resume = 1});
}

/* The same for rows that do not see the same keys: keys that all rows see are added for all rows
 * together, keys before and after them row by row. */
static void add_visible(const struct attention *a, struct rows *s, int64_t r, int64_t size,
                        int64_t chunk, int64_t first, int64_t end) {
    int64_t low = first, high = end;
    for (int64_t i = r; i < r + size; i++) {
        low = max_of(low, s->low[i]);
        high = min_of(high, s->high[i]);
    }
    if (low >= high) low = high = end;
    for (int64_t i = r; i < r + size; i++)
        add_values(a, s, i, 1, chunk, max_of(first, s->low[i]), min_of(low, s->high[i]));
    add_values(a, s, r, size, chunk, low, high);
    for (int64_t i = r; i < r + size; i++)
        add_values(a, s, i, 1, chunk, high, min_of(end, s->high[i]));
}

static void attend_chunk(const struct attention *a, struct rows *s, int64_t chunk, int64_t first,
                         int64_t end) {
    find_tiles(a, s, chunk, first);
    score(a, s, chunk, first, end);
    for (int64_t r = 0; r < s->count; r++) {
        int64_t low = max_of(s->low[r], first), high = min_of(s->high[r], end);
        if (low < high) soften(a, s, r, chunk, low, high);
    }
    for (int64_t r = 0, size; r < s->count; r += size) {
        size = next_tile(s->count - r, MAX_ROWS);
        add_visible(a, s, r, size, chunk, first, end);
    }
}

/* Attention of the step's queries [first, first + count), of a sequence whose query 0 has position
 * `origin`. */
static void attend(const struct attention *a, struct rows *s, int64_t first, int64_t count,
                   int64_t origin) {
    const struct cache *c = a->cache;
    int64_t group = a->heads / c->kv_heads, low = INT64_MAX;
    s->end = 0;
    s->count = count * group;
    memset(s->sum, 0, (size_t)(s->count * s->width) * 4);
    memset(s->weights, 0, (size_t)(s->count * LANES) * 4);
    for (int64_t r = 0; r < s->count; r++) {
        int64_t token = first + r / group, head = s->head * group + r % group;
        memcpy(s->query + r * c->dim, a->query + (token * a->heads + head) * c->dim,
               (size_t)c->dim * 4);
        s->most[r] = a->sinks ? a->sinks[head] : -INFINITY;
        s->high[r] = origin + token + 1;
        s->low[r] = a->window ? max_of(0, s->high[r] - a->window) : 0;
        low = min_of(low, s->low[r]);
        s->end = max_of(s->end, s->high[r]);
    }
    for (int64_t chunk = low / CHUNK * CHUNK; chunk < s->end; chunk += CHUNK)
        attend_chunk(a, s, chunk, max_of(low, chunk), min_of(s->end, chunk + CHUNK));
    for (int64_t r = 0; r < s->count; r++) {
        int64_t token = first + r / group, head = s->head * group + r % group;
        float weight = v_sum(v_load(s->weights + r * LANES));
        if (a->sinks) weight = weight + exp_of(a->sinks[head] - s->most[r]);
        float *out = a->out + (token * a->heads + head) * c->dim_v;
        for (int64_t i = 0; i < c->dim_v; i++) out[i] = s->sum[r * s->width + i] / weight;
    }
}

static int64_t most_rows(const struct attention *a) {
    return a->queries_per_task * (a->heads / a->cache->kv_heads);
}

static size_t attention_bytes(const struct attention *a) {
    int64_t width = ceil_div(a->cache->dim_v, LANES) * LANES;
    int64_t pointers = (CHUNK_TILES + MORE_TILES) * (1 + width / LANES);
    int64_t floats = most_rows(a) * (CHUNK + a->cache->dim + width + LANES + 1);
    if (!a->cache->keys) floats += CHUNK * a->cache->dim;
    return (size_t)(pointers * 8 + most_rows(a) * 16 + floats * 4);
}

static void attention_task(const void *args, int64_t index, int thread) {
    const struct attention *a = args;
    int64_t low = 0, high = a->sequences;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (a->first_task[middle] <= index) low = middle;
        else high = middle;
    }
    int64_t kv_heads = a->cache->kv_heads, start = a->starts[low];
    int64_t queries = a->starts[low + 1] - start, rows = most_rows(a);
    /* Late queries, which see most keys, first: threads then end at about the same time. */
    int64_t tile = (a->first_task[low + 1] - 1 - index) / kv_heads * a->queries_per_task;
    struct rows s = {.head = (index - a->first_task[low]) % kv_heads,
                     .width = ceil_div(a->cache->dim_v, LANES) * LANES,
                     .blocks = a->table + low * a->columns};
    s.tiles = pool.scratch[thread].data;
    s.columns = s.tiles + CHUNK_TILES + MORE_TILES;
    s.low = (int64_t *)(s.columns + (CHUNK_TILES + MORE_TILES) * (s.width / LANES));
    s.high = s.low + rows;
    s.scores = (float *)(s.high + rows);
    s.query = s.scores + rows * CHUNK;
    s.sum = s.query + rows * a->cache->dim;
    s.weights = s.sum + rows * s.width;
    s.most = s.weights + rows * LANES;
    s.keys = s.most + rows;
    attend(a, &s, start + tile, min_of(a->queries_per_task, queries - tile),
           a->lengths[low] - queries - start);
}

/* Check that every query exists and that every block it sees is one of the cache's. */
static int blocks_in_bounds(const struct attention *a, int64_t rows) {
    int64_t size = a->cache->block_size;
    if (a->starts[0] < 0 || a->starts[a->sequences] > rows) return 0;
    for (int64_t i = 0; i < a->sequences; i++) {
        int64_t queries = a->starts[i + 1] - a->starts[i], length = a->lengths[i];
        if (queries < 0 || length < queries || ceil_div(length, size) > a->columns) return 0;
        int64_t first = a->window ? max_of(0, length - queries + 1 - a->window) : 0;
        for (int64_t b = first / size; queries && b < ceil_div(length, size); b++) {
            int64_t block = a->table[i * a->columns + b];
            if (block < 0 || block >= a->cache->num_blocks) return 0;
        }
    }
    return 1;
}

static int64_t compute_attention(struct attention *a) {
    const struct cache *c = a->cache;
    int64_t keys = 0;
    if (!reserve(attention_bytes(a))) return NO_MEMORY;
    a->first_task = room(&pool.shared, (size_t)(a->sequences + 1) * 8);
    if (!a->first_task) return NO_MEMORY;
    a->first_task[0] = 0;
    for (int64_t i = 0; i < a->sequences; i++) {
        int64_t tiles = ceil_div(a->starts[i + 1] - a->starts[i], a->queries_per_task);
        a->first_task[i + 1] = a->first_task[i] + tiles * c->kv_heads;
        keys += tiles * a->lengths[i];
    }
    int64_t tasks = a->first_task[a->sequences];
    if (tasks)
        run_region(attention_task, a, tasks,
                   keys * c->kv_heads / tasks * (a->heads / c->kv_heads) * (c->dim + c->dim_v));
    return DONE;
}

int64_t penstock_attention(const float *query, int64_t rows, int64_t heads,
                           const struct cache *cache, const int32_t *starts,
                           const int32_t *lengths, const int32_t *table, int64_t sequences,
                           int64_t columns, float scale, int64_t window,
                           float softcap, const float *sinks, float *out) {
    struct attention a = {query, sinks, cache, starts, lengths, table, out, sequences, columns,
                          heads, window, scale, softcap, 0, NULL};
    if (!blocks_in_bounds(&a, rows)) return BAD_BLOCK;
    a.queries_per_task = max_of(1, TASK_ROWS / (heads / cache->kv_heads));
    unsigned arithmetic = enter();
    int64_t status = compute_attention(&a);
    leave(arithmetic);
    return status;
}

#include "recurrent.h"
