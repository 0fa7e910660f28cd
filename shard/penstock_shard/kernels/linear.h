/* Linear layers: products with packed weights. */

#define BLOCK_UNITS 128 /* units in a block that several tiles share: 4 panels fit a cache */
#define MAX_CHUNK 240   /* most rows that one task multiplies with a group of panels */
#define AHEAD 4096      /* bytes to prefetch ahead in a stream of weights */
#define NEAR (1 << 16)  /* a group of so many bytes or less is prefetched whole, before its turn */
#define RUNS 4          /* runs of groups that a thread takes in a product, at least */

struct linear {
    const float *x, *bias;
    const struct weight *weight;
    float *out;
    int64_t rows, stride, chunk, num_chunks; /* stride: of a row of the output */
    /* What products read: x itself, or its rows in bfloat16 or as steps of int8. */
    const float *units;
};

struct block { int64_t row, rows, column; }; /* part of the output, with a group's columns */

/* Words of a row of what products read. */
INLINE int64_t row_words(const struct weight *w) {
    return num_units(w) * LAYOUTS[w->kind].words + num_pieces(w) * X_HEADER;
}

/* Write the results of some rows to the output, with a group's columns, and add the bias. */
static void store_rows(const struct linear *l, struct block b, const float *acc) {
    int64_t columns = min_of(GROUP * LANES, l->weight->n - b.column);
    for (int64_t r = 0; r < b.rows; r++, acc += GROUP * LANES) {
        float *out = l->out + (b.row + r) * l->stride + b.column;
        if (l->bias)
            for (int64_t c = 0; c < columns; c++) out[c] = acc[c] + l->bias[b.column + c];
        else
            memcpy(out, acc, (size_t)columns * 4);
    }
}

/* Multiply a block, and store each tile of rows once its last block of k is summed. */
static void multiply_block(const struct linear *l, struct block b, float *acc) {
    const struct weight *w = l->weight;
    int64_t units = num_units(w), words = row_words(w), row_bytes = LANES * LAYOUTS[w->kind].bytes;
    const char *panels = (const char *)w->data + b.column / LANES * panel_bytes(w);
    /* Prefetch the next cache lines of the stream of weights, or, where several tiles share a block
     * of k, the next block. */
    int codes = is_codes((int)w->kind), whole = b.rows <= MAX_ROWS || codes;
    int64_t piece = codes ? w->piece / LAYOUTS[w->kind].unit : units;
    int tiles = takes_tiles((int)w->kind, piece, b.rows);
    int64_t block = whole ? units : BLOCK_UNITS, ahead = whole ? AHEAD : BLOCK_UNITS * row_bytes;
    if (whole && GROUP * panel_bytes(w) <= NEAR) ahead = GROUP * panel_bytes(w);
    /* Of codes fewer rows and more columns, so that a row's units are read for more products. */
    int64_t most = tiles ? TILE_ROWS : codes ? MAX_ROWS / 2 : MAX_ROWS;
    const void *pointers[2 * GROUP];
    struct product p = {.w = pointers, .ldx = words, .step = LANES, .ld = GROUP * LANES,
                        .next = GROUP, .kind = (int)w->kind,
                        .header = (int)w->header, .codes_at = codes_at(w)};
    for (int64_t start = 0; start < units; start += block) {
        for (int v = 0; v < GROUP; v++) {
            pointers[v] = panels + v * panel_bytes(w) + start * row_bytes;
            pointers[GROUP + v] = (const char *)pointers[v] + ahead;
        }
        p.k = p.piece = min_of(block, units - start);
        if (codes) p.piece = piece;
        p.resume = start > 0;
        for (int64_t r = 0, rows; r < b.rows; r += rows) {
            rows = next_tile(b.rows - r, most);
            p.x = l->units + (b.row + r) * words + start;
            p.acc = acc + (whole ? 0 : r * p.ld);
            if (tiles) multiply_tiles(rows, &p);
            else multiply(rows, GROUP, p);
            if (start + block >= units)
                store_rows(l, (struct block){b.row + r, rows, b.column}, p.acc);
        }
    }
}

/* Quantize `count` values of a row to int8 with the scale max |x| / 127, and write what a piece of
 * activations has: its scale, where sums begin, what minimums are multiplied by, and steps. Values
 * that are not finite get a NaN scale, and so all results of the row are NaN. */
static void quantize_piece(const struct weight *w, const float *x, int64_t count, float *to) {
    uint32_t most = largest_bits(x, count);
    float scale = most < 0x7f800000 ? float_of(most) / 127.0f : NAN;
    int64_t unit = LAYOUTS[w->kind].unit;
    int8_t *steps = (int8_t *)(to + X_HEADER);
    int32_t sum = 0, zero = (int32_t)w->zero - (w->kind == CODES8 ? CODES8_ZERO : 0);
    memset(steps, 0, (size_t)(ceil_div(count, unit) * unit));
    if (scale > 0)
        for (int64_t i = 0; i < count; i++)
            steps[i] = (int8_t)quantized(x[i], scale, -127.0f, 127.0f);
    for (int64_t i = 0; i < count; i++) sum += steps[i];
    to[X_SCALE] = scale;
    to[X_START] = float_of((uint32_t)(-zero * sum));
    to[X_LOW] = -((float)sum * scale);
}

static void quantize_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct linear *l = args;
    const struct weight *w = l->weight;
    float *to = (float *)l->units + row * row_words(w);
    for (int64_t k = 0; k < w->k; k += w->piece) {
        quantize_piece(w, l->x + row * w->k + k, min_of(w->piece, w->k - k), to);
        to += X_HEADER + w->piece / LAYOUTS[w->kind].unit * LAYOUTS[w->kind].words;
    }
}

/* Round a row to bfloat16; a zero after the last of an odd number. */
static void round_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct linear *l = args;
    int64_t k = l->weight->k;
    uint16_t *rounded = (uint16_t *)(l->units + row * row_words(l->weight));
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
    if (!is_float((int)w->kind)) {
        task_fn prepare = w->kind == BFLOAT16 ? round_task : quantize_task;
        int64_t rows = l->rows + (HAS_TILES ? TILE_ROWS - 1 : 0);
        l->units = room(&pool.shared, (size_t)(rows * row_words(w)) * 4);
        if (!l->units) return NO_MEMORY;
        run_region(prepare, l, l->rows, 4 * w->k);
    }
    int64_t count = num_groups(w) * l->num_chunks;
    int64_t grain = 1 + MIN_BATCH / (w->k * GROUP * LANES * l->chunk + 1);
    /* A thread goes on with the group that it has prefetched. */
    run_batches(linear_task, l, count, max_of(grain, count / (RUNS * pool.threads)));
    return DONE;
}

int64_t penstock_linear(const float *x, int64_t rows, const struct weight *weight,
                        const float *bias, float *out, int64_t stride) {
    if (rows == 0) return DONE;
    int64_t chunk = ceil_div(rows, ceil_div(rows, MAX_CHUNK));
    if (chunk > MAX_ROWS) chunk = ceil_div(chunk, MAX_ROWS) * MAX_ROWS;
    struct linear l = {x, bias, weight, out, rows, stride, chunk, ceil_div(rows, chunk), NULL};
    unsigned arithmetic = enter();
    int64_t status = compute_linear(&l);
    leave(arithmetic);
    return status;
}
