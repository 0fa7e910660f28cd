/* Attention over the paged cache.
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
    const int32_t *bidirectional;    /* [sequences]: whether queries see later ones; or NULL */
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
                        .kind = a->cache->keys && a->cache->half ? FLOAT16 : FLOAT32};
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
        .kind = a->cache->half ? FLOAT16 : FLOAT32, .resume = 1});
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
 * `origin`; they see keys before `later` too, where that is not 0. */
static void attend(const struct attention *a, struct rows *s, int64_t first, int64_t count,
                   int64_t origin, int64_t later) {
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
        if (later) s->high[r] = later;
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
           a->lengths[low] - queries - start,
           a->bidirectional && a->bidirectional[low] ? a->lengths[low] : 0);
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
                           float softcap, const float *sinks, const int32_t *bidirectional,
                           float *out) {
    struct attention a = {query, sinks, cache, starts, lengths, table, bidirectional, out,
                          sequences, columns, heads, window, scale, softcap, 0, NULL};
    if (!blocks_in_bounds(&a, rows)) return BAD_BLOCK;
    a.queries_per_task = max_of(1, TASK_ROWS / (heads / cache->kv_heads));
    unsigned arithmetic = enter();
    int64_t status = compute_attention(&a);
    leave(arithmetic);
    return status;
}
