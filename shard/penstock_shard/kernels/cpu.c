/* CPU kernels of the shard: linear layers, paged attention and what lies between them.
 *
 * Every result has the same bits whatever the number of rows, the number of threads and the level
 * this file is compiled for (see vectors.h; of bfloat16 in tiles see tiles.h). That holds because
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
enum { DONE, BAD_SLOT, BAD_POSITION, BAD_BLOCK, NO_MEMORY, BAD_ROW };

INLINE int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int in_bounds(const int64_t *values, int64_t count, int64_t low, int64_t end) {
    for (int64_t i = 0; i < count; i++)
        if (values[i] < low || values[i] >= end) return 0;
    return 1;
}

#include "products.h"
#include "tiles.h"
#include "weights.h"

#include "linear.h"
#include "rows.h"
#include "attention.h"
#include "recurrent.h"
#include "recorded.h"

#include "instructions.h"
