/* Linear layers: products with packed weights. */

#define BLOCK_UNITS 128 /* units in a block that several tiles share: 4 panels fit a cache */
#define MAX_CHUNK 240   /* most rows that one task multiplies with a group of panels */
#define AHEAD 4096      /* bytes to prefetch ahead in a stream of weights */

struct linear {
    const float *x, *bias;
    const struct weight *weight;
    float *out;
    int64_t rows, chunk, num_chunks;
    /* What products read: x itself, or its rows in bfloat16 or int8; and the scale of each of those
     * of int8. */
    const float *units;
    float *scales;
};

struct block { int64_t row, rows, column; }; /* part of the output, with a group's columns */

/* The results of a row of a product of int8, in place of its sums of steps. */
static void scale_row(const struct linear *l, int64_t row, int64_t column, int64_t columns,
                      float *acc) {
    const struct weight *w = l->weight;
    for (int64_t c = 0; c < columns; c++) {
        uint32_t sum = bits_of(acc[c]) - OFFSET * (uint32_t)w->sums[column + c];
        acc[c] = (float)(int32_t)sum * (l->scales[row] * w->scales[column + c]);
    }
}

/* Write the results of some rows to the output, with a group's columns, and add the bias. */
static void store_rows(const struct linear *l, struct block b, float *acc) {
    int64_t n = l->weight->n, columns = min_of(GROUP * LANES, n - b.column);
    for (int64_t r = 0; r < b.rows; r++, acc += GROUP * LANES) {
        float *out = l->out + (b.row + r) * n + b.column;
        if (l->weight->kind == INT8) scale_row(l, b.row + r, b.column, columns, acc);
        if (l->bias)
            for (int64_t c = 0; c < columns; c++) out[c] = acc[c] + l->bias[b.column + c];
        else
            memcpy(out, acc, (size_t)columns * 4);
    }
}

/* Multiply a block, and store each tile of rows once its last block of k is summed. */
static void multiply_block(const struct linear *l, struct block b, float *acc) {
    const struct weight *w = l->weight;
    int64_t units = num_units(w), row_bytes = LANES * LAYOUTS[w->kind].bytes;
    const char *panels = (const char *)w->data + b.column / LANES * panel_bytes(w);
    /* Prefetch the next cache lines of the stream of weights, or, where several tiles share a block
     * of k, the next block. */
    int whole = b.rows <= MAX_ROWS || w->kind == INT8;
    int64_t block = whole ? units : BLOCK_UNITS, ahead = whole ? AHEAD : BLOCK_UNITS * row_bytes;
    /* Of int8 fewer rows and more columns, so that a row's units are read for more products. */
    int64_t most = w->kind == INT8 ? MAX_ROWS / 2 : MAX_ROWS;
    const void *pointers[2 * GROUP];
    struct product p = {.w = pointers, .ldx = units, .step = LANES, .ld = GROUP * LANES,
                        .next = GROUP, .kind = (int)w->kind};
    for (int64_t start = 0; start < units; start += block) {
        for (int v = 0; v < GROUP; v++) {
            pointers[v] = panels + v * panel_bytes(w) + start * row_bytes;
            pointers[GROUP + v] = (const char *)pointers[v] + ahead;
        }
        p.k = p.piece = min_of(block, units - start);
        p.resume = start > 0;
        for (int64_t r = 0, rows; r < b.rows; r += rows) {
            rows = next_tile(b.rows - r, most);
            p.x = l->units + (b.row + r) * units + start;
            p.acc = acc + (whole ? 0 : r * p.ld);
            multiply(rows, GROUP, p);
            if (start + block >= units)
                store_rows(l, (struct block){b.row + r, rows, b.column}, p.acc);
        }
    }
}

/* Quantize a row to int8 with the scale max |x| / 127. A row that is not finite gets a NaN scale,
 * and so all its results are NaN. */
static void quantize_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct linear *l = args;
    int64_t k = l->weight->k, units = num_units(l->weight);
    const float *x = l->x + row * k;
    uint8_t *steps = (uint8_t *)(l->units + row * units);
    uint32_t most = largest_bits(x, k);
    float scale = most < 0x7f800000 ? float_of(most) / 127.0f : NAN;
    l->scales[row] = scale;
    memset(steps, OFFSET, (size_t)(units * UNIT_BYTES));
    if (scale > 0)
        for (int64_t i = 0; i < k; i++) steps[i] = (uint8_t)(quantized(x[i], scale) + OFFSET);
}

/* Round a row to bfloat16; a zero after the last of an odd number. */
static void round_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct linear *l = args;
    int64_t k = l->weight->k;
    uint16_t *rounded = (uint16_t *)(l->units + row * num_units(l->weight));
    for (int64_t i = 0; i < k; i++) rounded[i] = float_to_bfloat(l->x[row * k + i]);
    if (k % 2) rounded[k] = 0;
}

static void linear_task(const void *args, int64_t index, int thread) {
    const struct linear *l = args;
    int64_t row = index % l->num_chunks * l->chunk, group = index / l->num_chunks;
    struct block b = {row, min_of(l->chunk, l->rows - row), group * GROUP * LANES};
    multiply_block(l, b, pool.scratch[thread].data);
}

static int64_t compute_linear(struct linear *l) {
    const struct weight *w = l->weight;
    if (!reserve(MAX_CHUNK * GROUP * LANES * 4)) return NO_MEMORY;
    l->units = l->x;
    if (w->kind == INT8 || w->kind == BFLOAT16) {
        size_t bytes = (size_t)l->rows * (4 + (size_t)num_units(w) * UNIT_BYTES);
        if (!(l->scales = room(&pool.shared, bytes))) return NO_MEMORY;
        l->units = l->scales + l->rows;
        run_region(w->kind == INT8 ? quantize_task : round_task, l, l->rows, 4 * w->k);
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
