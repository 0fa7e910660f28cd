/* Linear layers: products with packed weights, of floats or of int8. */

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
