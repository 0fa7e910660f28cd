/* Weights in the layouts that products read, and packing into them.
 *
 * 16 outputs make a panel, 4 panels a group (the last is filled with zeros). A panel lies as units
 * [k / unit][16][unit], so that a product reads it in one stream: of bfloat16 two k of an output side
 * by side, of int8 four, as the dot-product instructions want them, else one.
 */

#define GROUP 4
#define SEGMENT 32 /* values of k that are packed at a time */

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
INLINE int64_t num_units(const struct weight *w) { return ceil_div(w->k, LAYOUTS[w->kind].unit); }
INLINE int64_t panel_bytes(const struct weight *w) {
    return num_units(w) * LANES * LAYOUTS[w->kind].bytes;
}

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

/* Store `count` values of a row, from k on, in its panel. */
static void pack_floats(const struct pack *p, int64_t row, int64_t output, int64_t k, int64_t count,
                        const float *values) {
    const struct weight *w = p->weight;
    char *panel = (char *)w->data + output / LANES * panel_bytes(w);
    int64_t at = k * LANES + output % LANES;
    if (w->kind == FLOAT32) {
        for (int64_t i = 0; i < count; i++) ((float *)panel)[at + i * LANES] = values[i];
        return;
    }
    uint16_t halves[SEGMENT];
    float most = w->kind == FLOAT16 ? 65504.0f : 0x1.fep127f;
    for (int64_t i = 0; i < SEGMENT; i += LANES) v_store_half(halves + i, v_load(values + i));
    for (int64_t i = 0; i < count; i++) {
        if (!(fabsf(values[i]) <= most)) report_bad(p, row * w->k + k + i);
        if (w->kind == FLOAT16) ((uint16_t *)panel)[at + i * LANES] = halves[i];
    }
    /* Zeros after the last of an odd number: `values` has them. */
    for (int64_t i = 0; i < ceil_div(count, 2) * 2 && w->kind == BFLOAT16; i++)
        ((uint16_t *)panel)[((k + i) / 2 * LANES + output % LANES) * 2 + i % 2] =
            float_to_bfloat(values[i]);
}

static void pack_int8(const struct pack *p, int64_t output, int64_t k, int64_t count,
                      const float *values) {
    const struct weight *w = p->weight;
    int8_t *panel = (int8_t *)w->data + output / LANES * panel_bytes(w);
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
