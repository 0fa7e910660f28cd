/* Products with the tile instructions of AMX: 16 rows and 16 columns at once, 16 units of k a time.
 *
 * PENSTOCK_TILES: 1 the instructions, 2 a model of them in C, for machines that lack them; undefined,
 * nothing here is used. Sums of codes are integers, and so have the bits of every other level. Of
 * bfloat16 they have not: an instruction sums the products of first and of second values apart, from
 * 0, and then adds both to the sum so far (Intel, TDPBF16PS). All rows take this path, so that bits
 * still depend on nothing else.
 */

#define TILE_ROWS 16
#define TILE_UNITS 16
#define TILE_BYTES 64 /* of a row */
/* Rows from which tiles of codes are faster than vectors: all of a tile are computed. */
#define LEAST_TILE_ROWS 5

#ifdef PENSTOCK_TILES
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

struct tile { uint32_t at[TILE_ROWS][LANES]; };

/* What an instruction does, by its definition. */
static void dot_tile_codes(struct tile *sum, const struct tile *x, const struct tile *w) {
    for (int r = 0; r < TILE_ROWS; r++)
        for (int k = 0; k < TILE_UNITS; k++)
            for (int c = 0; c < 4 * LANES; c++)
                sum->at[r][c / 4] += (uint32_t)(((const int8_t *)&x->at[r][k])[c % 4]
                                                * ((const uint8_t *)w->at[k])[c]);
}

static void dot_tile_bfloats(struct tile *sum, const struct tile *x, const struct tile *w) {
    for (int r = 0; r < TILE_ROWS; r++)
        for (int c = 0; c < LANES; c++) {
            float first = 0, second = 0;
            for (int k = 0; k < TILE_UNITS; k++) {
                first = fma_flushed(first_of(x->at[r][k]), first_of(w->at[k][c]), first);
                second = fma_flushed(second_of(x->at[r][k]), second_of(w->at[k][c]), second);
            }
            float both = flushed(first + second);
            sum->at[r][c] = bits_of(flushed(flushed(float_of(sum->at[r][c])) + both));
        }
}

#if defined PENSTOCK_TILES && PENSTOCK_TILES == 1

#include <sys/syscall.h>
#include <unistd.h>

/* Ask the system for the state of tiles, once a process. */
static int may_use_tiles(void) { return !syscall(SYS_arch_prctl, 0x1023, 18); }
INLINE void begin_tiles(void) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } config =
        {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = TILE_BYTES, config.rows[i] = TILE_ROWS;
    _tile_loadconfig(&config);
}
#define end_tiles _tile_release
#define load_tile(i, from, stride) _tile_loadd(i, from, stride)
#define store_tile(i, to) _tile_stored(i, to, TILE_BYTES)
#define add_tile_codes(sum, x, w) _tile_dpbsud(sum, x, w)
#define add_tile_bfloats(sum, x, w) _tile_dpbf16ps(sum, x, w)

#else

static _Thread_local struct tile modelled[8];
static int may_use_tiles(void) { return 1; }
INLINE void begin_tiles(void) { memset(modelled, 0, sizeof modelled); }
INLINE void end_tiles(void) {}
INLINE void load_tile(int i, const void *from, int64_t stride) {
    for (int r = 0; r < TILE_ROWS; r++)
        memcpy(modelled[i].at[r], (const char *)from + r * stride, TILE_BYTES);
}
INLINE void store_tile(int i, void *to) { memcpy(to, &modelled[i], sizeof(struct tile)); }
#define add_tile_codes(sum, x, w) dot_tile_codes(modelled + (sum), modelled + (x), modelled + (w))
#define add_tile_bfloats(sum, x, w) dot_tile_bfloats(modelled + (sum), modelled + (x), modelled + (w))

#endif

/* Four sums and the rows that they share take tiles 0 to 4, columns 5 to 7. */
#define EACH_PANEL(DO) DO(0, 5) DO(1, 6) DO(2, 7) DO(3, 5)

/* Add the products of some units, at most TILE_UNITS, of 16 rows and 4 panels. Beyond the last unit
 * stands what belongs to others: zeros take its place. */
INLINE void add_units(const int kind, const float *x, int64_t ldx, const char *const *w,
                      int64_t units) {
    struct tile ends[1 + 4] = {{{{0}}}};
    const char *columns[4] = {w[0], w[1], w[2], w[3]};
    if (units < TILE_UNITS) {
        for (int r = 0; r < TILE_ROWS; r++) memcpy(ends[4].at[r], x + r * ldx, (size_t)units * 4);
        for (int v = 0; v < 4; v++) {
            memcpy(&ends[v], w[v], (size_t)units * TILE_BYTES);
            columns[v] = (const char *)&ends[v];
        }
        load_tile(4, &ends[4], TILE_BYTES);
    } else {
        load_tile(4, x, ldx * 4);
    }
#define ADD(sum, column) \
    load_tile(column, columns[sum], TILE_BYTES); \
    if (kind == CODES8) { add_tile_codes(sum, 4, column); } \
    else { add_tile_bfloats(sum, 4, column); }
    EACH_PANEL(ADD)
#undef ADD
}

/* Sums of a piece start from what `p` has of them: of codes, from what their rows say. */
INLINE void start_sums(const int kind, const struct product *p, int64_t rows, const float *x,
                       struct tile *sums) {
    memset(sums, 0, 4 * sizeof *sums);
    for (int v = 0; v < 4; v++)
        for (int64_t r = 0; r < rows; r++) {
            if (kind == CODES8)
                for (int c = 0; c < LANES; c++) sums[v].at[r][c] = load_unit(x + r * p->ldx + X_START);
            else if (p->resume)
                memcpy(sums[v].at[r], p->acc + r * p->ld + v * LANES, TILE_BYTES);
        }
}

INLINE void end_sums(const int kind, const struct product *p, int64_t rows, const float *x,
                     const char *const *at, const struct tile *sums) {
    for (int v = 0; v < 4; v++)
        for (int64_t r = 0; r < rows; r++) {
            float *acc = p->acc + r * p->ld + v * LANES;
            if (kind == CODES8) {
                v16i sum;
                memcpy(&sum, sums[v].at[r], sizeof sum);
                v_store(acc, add_piece(v_load(acc), sum, x + r * p->ldx, at[v], p->header));
            } else {
                memcpy(acc, sums[v].at[r], TILE_BYTES);
            }
        }
}

/* The product of at most TILE_ROWS rows and four vectors of columns. Of `p.x` there are TILE_ROWS
 * rows, whatever the last ones hold. */
INLINE void tile_product(const int kind, int64_t rows, const struct product *p) {
    const int64_t start = kind == CODES8 ? X_HEADER : 0;
    const float *x = p->x;
    const char *at[4], *w[4];
    for (int v = 0; v < 4; v++) at[v] = p->w[v], w[v] = at[v] + p->codes_at;
    struct tile sums[4];
    if (kind == CODES8)
        for (int64_t r = 0; r < rows; r++) memset(p->acc + r * p->ld, 0, 4 * TILE_BYTES);
    begin_tiles();
    for (int64_t left = p->k, count; left > 0; left -= count) {
        count = min_of(left, p->piece);
        start_sums(kind, p, rows, x, sums);
#define LOAD(sum, column) load_tile(sum, &sums[sum], TILE_BYTES);
        EACH_PANEL(LOAD)
#undef LOAD
        for (int64_t i = 0; i < count; i += TILE_UNITS) {
            const char *from[4];
            for (int v = 0; v < 4; v++) from[v] = w[v] + i * TILE_BYTES;
            add_units(kind, x + start + i, p->ldx, from, min_of(TILE_UNITS, count - i));
        }
#define STORE(sum, column) store_tile(sum, &sums[sum]);
        EACH_PANEL(STORE)
#undef STORE
        end_sums(kind, p, rows, x, at, sums);
        x += start + count;
        for (int v = 0; v < 4; v++) at[v] += HEADER_BYTES(p->header), w[v] += count * TILE_BYTES;
    }
    end_tiles();
}

/* Whether products of this kind, in pieces of so many units, are made by tiles. */
INLINE int takes_tiles(int kind, int64_t piece, int64_t rows) {
    if (!HAS_TILES) return 0;
    return kind == BFLOAT16 || (kind == CODES8 && piece >= TILE_UNITS && rows >= LEAST_TILE_ROWS);
}

static void multiply_tiles(int64_t rows, const struct product *p) {
    if (p->kind == CODES8) tile_product(CODES8, rows, p);
    else tile_product(BFLOAT16, rows, p);
}
