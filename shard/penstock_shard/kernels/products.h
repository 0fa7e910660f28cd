/* Products of rows of activations with columns of weights, of keys or of values.
 *
 * acc[r][16 v + lane] (+)= sum over i < k of x[r][i] * w[v][i][lane], for a tile of R rows and NV
 * vectors of columns that stays in registers; one loop for all kinds of weights. One product serves linear layers (w: panels of packed
 * weights), scores (w: tiles of keys) and sums of values (w: rows of values).
 */

/* How weights lie. A unit is as many values of k as lie side by side: of activations it has 4 bytes,
 * and of the weights of a lane 4, or 2 in float16. */
enum { FLOAT32, FLOAT16, BFLOAT16, INT8, KINDS };
static const struct { int unit, bytes; } LAYOUTS[KINDS] = {{1, 4}, {1, 2}, {2, 4}, {4, 4}};
#define UNIT_BYTES 4

struct product {
    const float *x;        /* units: floats, pairs of bfloat16, or four steps of int8 */
    const void *const *w;  /* for each piece of w, one after the other: a pointer per 16 columns */
    float *acc;            /* floats, or int32 */
    int64_t ldx, step, ld; /* row strides, in units of x, elements of w, elements of acc */
    int64_t k, piece;      /* units of w in all, and in a piece */
    int64_t skip;          /* units of the first piece to leave out */
    int64_t pointers;      /* number of pointers for a piece */
    int64_t next;          /* distance in `w` from a pointer to the one to prefetch */
    int kind, resume;      /* add to the sums in acc */
};

#define MAX_ROWS (PENSTOCK_LEVEL == 2 ? 12 : PENSTOCK_LEVEL == 1 ? 6 : 4)

INLINE int is_float(const int kind) { return kind == FLOAT32 || kind == FLOAT16; }

/* sum + x times a unit of 16 columns, of pairs of bfloat16 or of four int8. */
INLINE v16 dot(const int kind, v16 sum, const float *x, const void *w) {
    return kind == INT8 ? v_dot_int8(sum, x, w) : v_dot_bfloat(sum, x, w);
}

INLINE void tile(const int R, const int NV, const int kind, const struct product *p) {
    v16 sum[MAX_ROWS][4];
    /* A pointer for every third row: one instruction can address base + ldx and base + 2 ldx. */
    const float *x[4] = {p->x, p->x + 3 * p->ldx, p->x + 6 * p->ldx, p->x + 9 * p->ldx};
    const void *const *pointers = p->w;
    int64_t ldx = p->ldx, bytes = p->step * LAYOUTS[kind].bytes, skip = p->skip, count;
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
                if (is_float(kind))
                    column[v] = kind == FLOAT16 ? v_load_half((const void *)(w[v] + i * bytes))
                                                : v_load((const void *)(w[v] + i * bytes));
            }
            /* Floats broadcast a value of a row once; dot products read a unit of columns once. */
            if (is_float(kind))
                UNROLL for (int r = 0; r < R; r++) {
                    v16 each = v_all(x[r / 3][r % 3 * ldx]);
                    UNROLL for (int v = 0; v < NV; v++)
                        sum[r][v] = v_fma(each, column[v], sum[r][v]);
                }
            else
                UNROLL for (int v = 0; v < NV; v++)
                    UNROLL for (int r = 0; r < R; r++)
                        sum[r][v] = dot(kind, sum[r][v], x[r / 3] + r % 3 * ldx, w[v] + i * bytes);
            UNROLL for (int j = 0; j < (R + 2) / 3; j++) x[j]++;
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < NV; v++) v_store(p->acc + r * p->ld + LANES * v, sum[r][v]);
}

typedef void (*tile_fn)(const struct product *p);
#define TILE(R, NV) \
    static void float_##R##_##NV(const struct product *p) { tile(R, NV, FLOAT32, p); } \
    static void half_##R##_##NV(const struct product *p) { tile(R, NV, FLOAT16, p); } \
    static void bfloat_##R##_##NV(const struct product *p) { tile(R, NV, BFLOAT16, p); } \
    static void int8_##R##_##NV(const struct product *p) { tile(R, NV, INT8, p); }
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
                                                      TABLE(int8)};

/* The product of at most MAX_ROWS rows and any number of vectors of columns. */
static void multiply(int64_t rows, int64_t vectors, struct product p) {
    unsigned arithmetic = 0;
    if (FLUSHES && p.kind == BFLOAT16) arithmetic = flushing_arithmetic();
    for (int64_t left = vectors; left > 0;) {
        int width = left >= 4 ? 2 : left >= 2 ? 1 : 0;
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
