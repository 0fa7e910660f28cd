/* Products of rows of activations with columns of weights, of keys or of values.
 *
 * acc[r][16 v + lane] (+)= sum over i < k of x[r][i] * w[v][i][lane], for a tile of R rows and NV
 * vectors of columns that stays in registers: one loop for floats of all kinds, and one for codes.
 * One product serves linear layers (w: panels of packed weights), scores (w: tiles of keys) and sums
 * of values (w: rows of values).
 */

/* How weights lie. A unit is as many values of k as lie side by side in `bytes` of each lane, and
 * in `words` of 4 bytes of a row of activations. */
enum { FLOAT32, FLOAT16, BFLOAT16, CODES8, CODES4, KINDS };
static const struct { int unit, bytes, words; } LAYOUTS[KINDS] = {
    {1, 4, 1}, {1, 2, 1}, {2, 4, 1}, {4, 4, 1}, {8, 4, 2}};

/* Codes have a scale, and may have a minimum, for each piece of k: a header has those of 16 columns,
 * in float32 or, where that loses nothing, in float16. In a row of activations a piece begins with
 * what is to be known of it. */
enum { X_SCALE, X_START, X_LOW, X_HEADER };
enum { HAS_MINIMUMS = 1, IN_HALVES = 2 };
#define NUMBER_BYTES(header) ((header) & IN_HALVES ? 2 : 4)
#define HEADER_BYTES(header) (LANES * NUMBER_BYTES(header) << ((header) & HAS_MINIMUMS))

struct product {
    const float *x;        /* units: floats, pairs of bfloat16, or steps of int8 by pieces */
    const void *const *w;  /* for each piece of w, one after the other: a pointer per 16 columns */
    float *acc;
    int64_t ldx, step, ld; /* row strides, in words of x, elements of w, elements of acc */
    int64_t k, piece;      /* units of w in all, and in a piece */
    int64_t skip;          /* units of the first piece to leave out */
    int64_t pointers;      /* number of pointers for a piece; pieces of codes need none */
    int64_t next;          /* distance in `w` from a pointer to the one to prefetch */
    int kind, resume;      /* add to the sums in acc */
    int header;        /* of codes: what headers have */
    int64_t codes_at;  /* and where in a panel codes begin, behind all headers */
};

#define MAX_ROWS (PENSTOCK_LEVEL == 2 ? 12 : PENSTOCK_LEVEL == 1 ? 6 : 4)

INLINE int is_float(const int kind) { return kind == FLOAT32 || kind == FLOAT16; }
INLINE int is_codes(const int kind) { return kind == CODES8 || kind == CODES4; }

INLINE v16 load_column(const int kind, const char *w) {
    return kind == FLOAT16 ? v_load_half((const void *)w) : v_load((const void *)w);
}

INLINE v16 add_product(const int kind, v16 sum, const float *x, v16 column) {
    return is_float(kind) ? v_fma(v_all(*x), column, sum) : v_dot_bfloat(sum, x, column);
}

INLINE void tile(const int R, const int NV, const int kind, const struct product *p) {
    v16 sum[MAX_ROWS][4];
    /* A pointer for every third row: one instruction can address base + ldx and base + 2 ldx. */
    const float *x[4] = {p->x, p->x + 3 * p->ldx, p->x + 6 * p->ldx, p->x + 9 * p->ldx};
    const void *const *pointers = p->w;
    const char *w[4], *next[4];
    int64_t bytes = p->step * LAYOUTS[kind].bytes, skip = p->skip, count;
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < NV; v++)
            sum[r][v] = p->resume ? v_load(p->acc + r * p->ld + LANES * v) : v_all(0.0f);
    for (int64_t left = p->k; left > 0; left -= count, pointers += p->pointers, skip = 0) {
        count = min_of(left, p->piece - skip);
        UNROLL for (int v = 0; v < NV; v++) {
            w[v] = (const char *)pointers[v] + skip * bytes;
            next[v] = pointers[v + p->next];
        }
        for (int64_t i = 0; i < count; i++) {
            v16 column[4];
            UNROLL for (int v = 0; v < NV; v++) {
                __builtin_prefetch(next[v] + i * bytes);
                column[v] = load_column(kind, w[v] + i * bytes);
            }
            UNROLL for (int r = 0; r < R; r++)
                UNROLL for (int v = 0; v < NV; v++)
                    sum[r][v] = add_product(kind, sum[r][v], x[r / 3] + r % 3 * p->ldx, column[v]);
            UNROLL for (int j = 0; j < (R + 2) / 3; j++) x[j]++;
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < NV; v++) v_store(p->acc + r * p->ld + LANES * v, sum[r][v]);
}

INLINE v16i load_codes(const int kind, const char *w, const int word) {
    return kind == CODES8 ? v_load_codes8(w) : v_load_codes4(w, word);
}

INLINE v16i add_codes(const int kind, v16i sum, const float *x, v16i codes) {
    return kind == CODES8 ? v_dot_codes8(sum, x, codes) : v_dot_codes4(sum, x, codes);
}

/* The scales of a header (which = 0), or its minimums (1). */
INLINE v16 load_header(const char *at, int header, int which) {
    if (header & IN_HALVES) return v_load_half((const uint16_t *)at + which * LANES);
    return v_load((const float *)at + which * LANES);
}

/* total + the sum of a piece of codes, scaled; `x` and `at` are where the piece and its header begin. */
INLINE v16 add_piece(v16 total, v16i sum, const float *x, const char *at, int header) {
    v16 scale = v_mul(v_all(x[X_SCALE]), load_header(at, header, 0));
    total = v_fma(v_of_ints(sum), scale, total);
    if (header & HAS_MINIMUMS) total = v_fma(v_all(x[X_LOW]), load_header(at, header, 1), total);
    return total;
}

/* The same of codes: sums of integers within a piece, which are scaled and added up. */
INLINE void tile_of_codes(const int R, const int NV, const int kind, const struct product *p) {
    v16i sum[MAX_ROWS][4];
    v16 total[MAX_ROWS][4];
    const float *x[4] = {p->x, p->x + 3 * p->ldx, p->x + 6 * p->ldx, p->x + 9 * p->ldx};
    const int words = LAYOUTS[kind].words;
    const int64_t bytes = p->step * LAYOUTS[kind].bytes, ldx = p->ldx;
    const char *at[4], *w[4], *next[4];
    UNROLL for (int v = 0; v < NV; v++) {
        at[v] = p->w[v];
        w[v] = at[v] + p->codes_at;
        next[v] = (const char *)p->w[v + p->next] + p->codes_at;
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < NV; v++) total[r][v] = v_all(0.0f);
    for (int64_t left = p->k, count; left > 0; left -= count) {
        count = min_of(left, p->piece);
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < NV; v++)
                sum[r][v] = v_ints((int32_t)load_unit(x[r / 3] + r % 3 * ldx + X_START));
        UNROLL for (int j = 0; j < (R + 2) / 3; j++) x[j] += X_HEADER;
        for (int64_t i = 0; i < count; i++) {
            UNROLL for (int v = 0; v < NV; v++) __builtin_prefetch(next[v] + i * bytes);
            UNROLL for (int word = 0; word < words; word++) {
                v16i codes[4];
                UNROLL for (int v = 0; v < NV; v++) codes[v] = load_codes(kind, w[v] + i * bytes, word);
                UNROLL for (int r = 0; r < R; r++)
                    UNROLL for (int v = 0; v < NV; v++)
                        sum[r][v] = add_codes(kind, sum[r][v], x[r / 3] + r % 3 * ldx + word,
                                              codes[v]);
            }
            UNROLL for (int j = 0; j < (R + 2) / 3; j++) x[j] += words;
        }
        const int64_t behind = X_HEADER + count * words;
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < NV; v++)
                total[r][v] = add_piece(total[r][v], sum[r][v],
                                        x[r / 3] + r % 3 * ldx - behind, at[v], p->header);
        UNROLL for (int v = 0; v < NV; v++) {
            at[v] += HEADER_BYTES(p->header);
            w[v] += count * bytes;
            next[v] += count * bytes;
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < NV; v++) v_store(p->acc + r * p->ld + LANES * v, total[r][v]);
}

typedef void (*tile_fn)(const struct product *p);
#define TILE(R, NV) \
    static void float_##R##_##NV(const struct product *p) { tile(R, NV, FLOAT32, p); } \
    static void half_##R##_##NV(const struct product *p) { tile(R, NV, FLOAT16, p); } \
    static void bfloat_##R##_##NV(const struct product *p) { tile(R, NV, BFLOAT16, p); } \
    static void codes8_##R##_##NV(const struct product *p) { tile_of_codes(R, NV, CODES8, p); } \
    static void codes4_##R##_##NV(const struct product *p) { tile_of_codes(R, NV, CODES4, p); }
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
/* The tiles that fit the registers, indexed by kind, log2 of NV, and R. */
static const tile_fn TILES[KINDS][3][MAX_ROWS + 1] = {TABLE(float), TABLE(half), TABLE(bfloat),
                                                      TABLE(codes8), TABLE(codes4)};

/* Of codes in several pieces sums of integers and of floats share the registers. */
#define MOST_SUMS (PENSTOCK_LEVEL == 2 ? 12 : 4)

/* The product of at most MAX_ROWS rows and any number of vectors of columns. */
static void multiply(int64_t rows, int64_t vectors, struct product p) {
    unsigned arithmetic = 0;
    int several = is_codes(p.kind) && p.piece < p.k;
    if (FLUSHES && p.kind == BFLOAT16) arithmetic = flushing_arithmetic();
    for (int64_t left = vectors; left > 0;) {
        int width = left >= 4 ? 2 : left >= 2 ? 1 : 0;
        if (several && width == 2 && rows > MOST_SUMS / 4) width = 1;
        if (several && width == 1 && rows > MOST_SUMS / 2) width = 0;
        while (!TILES[p.kind][width][rows]) width--;
        TILES[p.kind][width][rows](&p);
        left -= 1 << width;
        p.w += 1 << width;
        p.acc += LANES << width;
    }
    if (FLUSHES && p.kind == BFLOAT16) restore_arithmetic(arithmetic);
}

/* The size of the next tile when rows are divided into tiles of nearly equal size, since a tile of
 * one row takes as long as one of four. */
INLINE int64_t next_tile(int64_t rows, int64_t most) {
    return ceil_div(rows, ceil_div(rows, most));
}
