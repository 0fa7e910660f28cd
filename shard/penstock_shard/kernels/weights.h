/* Weights in the layouts that products read, and packing into them.
 *
 * 16 outputs make a panel, 4 panels a group (the last is filled with zeros). A panel lies as units
 * [k / unit][16][unit], so that a product reads it in one stream: of bfloat16 two k of an output side
 * by side, of codes of 8 bits four, as the dot-product instructions want them, else one. Codes of 4
 * bits lie as two units of 8, one in the lower halves of the bytes and one in the higher.
 *
 * A weight of codes is scale * (code - zero) - minimum, with a scale, and a minimum if there are any,
 * for each output and each piece of `piece` values of k. A panel begins with these, [16] scales and
 * [16] minimums of each piece; its codes begin at a whole cache line.
 */

#define GROUP 4
#define SEGMENT 32 /* values of k that are packed at a time */

enum { SOURCE_FLOAT32, SOURCE_FLOAT16, SOURCE_BFLOAT16, SOURCE_CODES };

struct weight {
    int64_t n, k, kind;
    void *data;
    int64_t piece, zero, header; /* of codes */
};

/* Floats of any strides; or codes, rows of k bytes, with the scales and minimums [rows, pieces]. */
struct source {
    const void *data;
    int64_t type, row_stride, column_stride; /* in elements */
    const float *scales, *minimums;
};

struct pack {
    const struct weight *weight;
    struct source source;
    int64_t first_row, rows;
    _Atomic int64_t *bad; /* lowest index of a value that the kind cannot hold */
};

INLINE int64_t num_groups(const struct weight *w) { return ceil_div(w->n, GROUP * LANES); }
INLINE int64_t num_units(const struct weight *w) { return ceil_div(w->k, LAYOUTS[w->kind].unit); }
INLINE int64_t num_pieces(const struct weight *w) {
    return is_codes((int)w->kind) ? ceil_div(w->k, w->piece) : 0;
}
/* Where in a panel codes begin. */
INLINE int64_t codes_at(const struct weight *w) {
    return ceil_div(num_pieces(w) * HEADER_BYTES(w->header), 64) * 64;
}
INLINE int64_t panel_bytes(const struct weight *w) {
    return num_units(w) * LANES * LAYOUTS[w->kind].bytes + codes_at(w);
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

/* x / scale rounded to nearest even, clamped to [least, most]. */
INLINE int32_t quantized(float x, float scale, float least, float most) {
    float q = x / scale;
    q = q > most ? most : q;
    q = q < least ? least : q;
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

/* Where the scale (which = 0) or the minimum (1) of a piece of an output is. */
INLINE char *number_of(const struct weight *w, int64_t output, int64_t piece, int which) {
    return (char *)w->data + output / LANES * panel_bytes(w) + piece * HEADER_BYTES(w->header)
           + (which * LANES + output % LANES) * NUMBER_BYTES(w->header);
}

static void store_number(const struct weight *w, int64_t output, int64_t piece, int which,
                         float value) {
    uint16_t half = float_to_half(value);
    char *to = number_of(w, output, piece, which);
    if (w->header & IN_HALVES) memcpy(to, &half, 2);
    else memcpy(to, &value, 4);
}

static float load_number(const struct weight *w, int64_t output, int64_t piece, int which) {
    const char *at = number_of(w, output, piece, which);
    uint16_t half;
    memcpy(&half, at, 2);
    return w->header & IN_HALVES ? half_to_float(half) : float_of(load_unit(at));
}

/* Where the codes of a piece of an output begin. */
INLINE uint8_t *piece_of(const struct weight *w, int64_t output, int64_t piece) {
    const int64_t bytes = w->piece / LAYOUTS[w->kind].unit * LANES * LAYOUTS[w->kind].bytes;
    return (uint8_t *)w->data + output / LANES * panel_bytes(w) + codes_at(w) + piece * bytes
           + output % LANES * 4;
}

/* Store the codes i and on of a piece, in order; zeros up to the end of the last unit. */
static void store_codes(const struct weight *w, uint8_t *to, int64_t i, int64_t count,
                        const uint8_t *codes) {
    int unit = LAYOUTS[w->kind].unit;
    for (int64_t end = i + ceil_div(count, unit) * unit, last = i + count; i < end; i++) {
        uint8_t code = i < last ? *codes++ : 0, *byte = to + i / unit * LANES * 4 + i % 4;
        if (i % unit < 4) *byte = code;
        else *byte |= (uint8_t)(code << 4);
    }
}

/* The scale for values [start, end) of a row: of 8 bits the largest magnitude is 127 steps, of 4
 * bits it is code 0, 8 below the zero. */
static float find_scale(const struct pack *p, int64_t row, int64_t start, int64_t end) {
    float values[SEGMENT], most = 0;
    for (int64_t k = start; k < end; k += SEGMENT) {
        int64_t count = min_of(SEGMENT, end - k);
        read_source(&p->source, row, k, count, values);
        for (int64_t i = 0; i < count; i++) {
            if (!(fabsf(values[i]) < INFINITY)) report_bad(p, row * p->weight->k + k + i);
            if (fabsf(values[i]) > fabsf(most)) most = values[i];
        }
    }
    float scale = p->weight->kind == CODES8 ? fabsf(most) / 127.0f : most / -8.0f;
    return p->weight->header & IN_HALVES ? half_to_float(float_to_half(scale)) : scale;
}

/* Quantize a piece of a row, and store it. */
static void round_piece(const struct pack *p, int64_t row, int64_t output, int64_t piece) {
    const struct weight *w = p->weight;
    int64_t start = piece * w->piece, end = min_of(start + w->piece, w->k);
    float scale = find_scale(p, row, start, end), zero = (float)w->zero, values[SEGMENT];
    float least = w->kind == CODES8 ? -127.0f : -8.0f, most = w->kind == CODES8 ? 127.0f : 7.0f;
    uint8_t *to = piece_of(w, output, piece);
    store_number(w, output, piece, 0, scale);
    for (int64_t k = start; k < end; k += SEGMENT) {
        uint8_t codes[SEGMENT];
        int64_t count = min_of(SEGMENT, end - k);
        read_source(&p->source, row, k, count, values);
        for (int64_t i = 0; i < count; i++)
            codes[i] = (uint8_t)(zero + (scale != 0 ? quantized(values[i], scale, least, most) : 0));
        store_codes(w, to, k - start, count, codes);
    }
}

/* Store a piece of a row of codes. */
static void copy_piece(const struct pack *p, int64_t row, int64_t output, int64_t piece) {
    const struct weight *w = p->weight;
    int64_t start = piece * w->piece, at = row * num_pieces(w) + piece;
    store_number(w, output, piece, 0, p->source.scales[at]);
    if (w->header & HAS_MINIMUMS) store_number(w, output, piece, 1, p->source.minimums[at]);
    store_codes(w, piece_of(w, output, piece), 0, min_of(w->piece, w->k - start),
                (const uint8_t *)p->source.data + row * w->k + start);
}

/* Zeros past the last output, which count nothing: their scales are 0 too. */
static void clear_piece(const struct pack *p, int64_t output, int64_t piece) {
    const struct weight *w = p->weight;
    int64_t bytes = ceil_div(min_of(w->piece, w->k - piece * w->piece), LAYOUTS[w->kind].unit);
    uint8_t *to = piece_of(w, output, piece);
    store_number(w, output, piece, 0, 0);
    if (w->header & HAS_MINIMUMS) store_number(w, output, piece, 1, 0);
    for (int64_t i = 0; i < bytes; i++) memset(to + i * LANES * 4, 0, 4);
}

/* Pack one panel, or the part of it that this source has; zeros after the last output. */
static void pack_task(const void *args, int64_t index, int thread) {
    (void)thread;
    const struct pack *p = args;
    const struct weight *w = p->weight;
    int64_t panel = p->first_row / LANES + index, last = p->first_row + p->rows;
    int64_t first = max_of(panel * LANES, p->first_row);
    int64_t end = last == w->n ? (panel + 1) * LANES : min_of((panel + 1) * LANES, last);
    for (int64_t piece = 0; piece < num_pieces(w); piece++)
        for (int64_t output = first; output < end; output++) {
            int64_t row = output - p->first_row;
            if (output >= last) clear_piece(p, output, piece);
            else if (p->source.type == SOURCE_CODES) copy_piece(p, row, output, piece);
            else round_piece(p, row, output, piece);
        }
    if (is_codes((int)w->kind)) return;
    for (int64_t k = 0; k < w->k; k += SEGMENT)
        for (int64_t output = first; output < end; output++) {
            float values[SEGMENT] = {0};
            int64_t count = min_of(SEGMENT, w->k - k), row = output - p->first_row;
            if (output < last) read_source(&p->source, row, k, count, values);
            pack_floats(p, row, output, k, count, values);
        }
}

/* Packs a source of `rows` rows as outputs first_row and on; codes have their scales and minimums,
 * and their rows lie one behind the other. Returns -1, or the index, row by row, of a value that the
 * kind cannot hold. */
int64_t penstock_pack(const struct weight *weight, int64_t first_row, int64_t rows,
                      const void *data, int64_t type, int64_t row_stride, int64_t column_stride,
                      const float *scales, const float *minimums) {
    _Atomic int64_t bad = -1;
    struct source source = {data, type, row_stride, column_stride, scales, minimums};
    struct pack p = {weight, source, first_row, rows, &bad};
    int64_t end = first_row + rows;
    if (end == weight->n) end = num_groups(weight) * GROUP * LANES;
    unsigned arithmetic = enter();
    run_region(pack_task, &p, ceil_div(end, LANES) - first_row / LANES, LANES * weight->k);
    leave(arithmetic);
    return bad;
}

struct lookup {
    const struct weight *weight;
    const int64_t *ids;
    float *out;
};

/* The value of an output at k; `panel` is where its panel begins. */
static float weight_value(const struct weight *w, const char *panel, int64_t lane, int64_t k) {
    int64_t unit = LAYOUTS[w->kind].unit, at = (k / unit * LANES + lane) * unit + k % unit;
    if (w->kind == FLOAT32) return ((const float *)panel)[at];
    uint16_t bits = ((const uint16_t *)panel)[at];
    return w->kind == FLOAT16 ? half_to_float(bits) : float_of((uint32_t)bits << 16);
}

static float code_value(const struct weight *w, int64_t output, int64_t k) {
    int64_t piece = k / w->piece, i = k % w->piece, unit = LAYOUTS[w->kind].unit;
    int byte = piece_of(w, output, piece)[i / unit * LANES * 4 + i % 4];
    int code = w->kind == CODES8 ? byte : i % unit < 4 ? byte & 15 : byte >> 4;
    float value = (float)(code - w->zero) * load_number(w, output, piece, 0);
    return w->header & HAS_MINIMUMS ? value - load_number(w, output, piece, 1) : value;
}

static void lookup_task(const void *args, int64_t index, int thread) {
    (void)thread;
    const struct lookup *l = args;
    const struct weight *w = l->weight;
    int64_t output = l->ids[index], lane = output % LANES;
    const char *panel = (const char *)w->data + output / LANES * panel_bytes(w);
    float *out = l->out + index * w->k;
    for (int64_t k = 0; k < w->k; k++)
        out[k] = is_codes((int)w->kind) ? code_value(w, output, k)
                                        : weight_value(w, panel, lane, k);
}

/* The outputs of these numbers as rows [count, k]. */
int64_t penstock_rows(const struct weight *weight, const int64_t *ids, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= weight->n) return BAD_ROW;
    struct lookup l = {weight, ids, out};
    unsigned arithmetic = enter();
    run_region(lookup_task, &l, count, 8 * weight->k);
    leave(arithmetic);
    return DONE;
}

struct table {
    const void *data;
    int64_t type, width;
    const int64_t *ids;
    float *out;
};

static void look_up_task(const void *args, int64_t index, int thread) {
    (void)thread;
    const struct table *t = args;
    struct source source = {t->data, t->type, t->width, 1, NULL, NULL};
    read_source(&source, t->ids[index], 0, t->width, t->out + index * t->width);
}

/* Rows of a table [size, width] at these numbers, [count, width]. */
int64_t penstock_look_up(const void *data, int64_t type, int64_t size, int64_t width,
                         const int64_t *ids, int64_t count, float *out) {
    struct table t = {data, type, width, ids, out};
    if (!in_bounds(ids, count, 0, size)) return BAD_ROW;
    unsigned arithmetic = enter();
    run_region(look_up_task, &t, count, width);
    leave(arithmetic);
    return DONE;
}
