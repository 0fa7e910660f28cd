/* What lies between products, row by row: norms, activations, rotation, and writing the cache. */

struct norm {
    const float *x, *weight;
    float *residual, *out; /* residual may be NULL: then x itself is normalized */
    int64_t width;
    float eps, weight_offset;
};

/* 1 / sqrt(mean of squares + eps) */
static float inverse_rms(const float *x, int64_t n, float eps) {
    v16 sum = v_all(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        v16 part = v_load(x + i);
        sum = v_fma(part, part, sum);
    }
    v16 rest = v_load_part(x + i, n - i);
    sum = v_fma(rest, rest, sum);
    return 1.0f / sqrtf(v_sum(sum) / (float)n + eps);
}

static void rms_norm(const float *x, const float *weight, int64_t n, float eps, float offset,
                     float *out) {
    float scale = inverse_rms(x, n, eps);
    for (int64_t i = 0; i < n; i++) out[i] = x[i] * scale * (offset + weight[i]);
}

static void norm_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct norm *a = args;
    const float *x = a->x + row * a->width;
    if (a->residual) {
        float *sum = a->residual + row * a->width;
        for (int64_t i = 0; i < a->width; i++) sum[i] = sum[i] + x[i];
        x = sum;
    }
    rms_norm(x, a->weight, a->width, a->eps, a->weight_offset, a->out + row * a->width);
}

void penstock_add_rms_norm(const float *x, float *residual, const float *weight, int64_t rows,
                           int64_t width, float eps, float weight_offset, float *out) {
    struct norm a = {x, weight, residual, out, width, eps, weight_offset};
    unsigned arithmetic = enter();
    run_region(norm_task, &a, rows, 4 * width);
    leave(arithmetic);
}

enum { SILU, GELU_TANH, SIGMOID, CLAMPED_SWIGLU };

struct gate {
    const float *gate_up;
    float *out;
    int64_t width, kind;
};

/* x / (1 + e^-u): SiLU for u = x; for this u GELU with its tanh, since (1 + tanh y) / 2 is
 * 1 / (1 + e^-2y), which does not cancel. Sigmoid has 1 in place of x. */
INLINE v16 activated(v16 x, int64_t kind) {
    v16 u = x;
    if (kind == GELU_TANH) {
        v16 cube = v_mul(v_mul(x, x), x);
        u = v_mul(v_all(1.59576912f), v_fma(v_all(0.044715f), cube, x)); /* 2 sqrt(2 / pi) */
    }
    v16 top = kind == SIGMOID ? v_all(1.0f) : x;
    return v_div(top, v_add(v_all(1.0f), v_exp(v_sub(v_all(0.0f), u))));
}

/* The activation of a gate times its partner. Clamped as gpt-oss has it: a gate is at most 7, its
 * partner within 7 of 0, to which 1 is added; the sigmoid is of 1.702 times the gate. The second
 * argument of v_max is what comes of a NaN. */
INLINE v16 gated(v16 gate, v16 up, int64_t kind) {
    if (kind != CLAMPED_SWIGLU) return v_mul(activated(gate, kind), up);
    v16 zero = v_all(0.0f), one = v_all(1.0f), least = v_all(-7.0f);
    v16 low = v_max(least, v_sub(zero, gate)); /* of the gate, which is at most 7 then, negated */
    up = v_max(least, v_sub(zero, v_max(least, v_sub(zero, up))));
    v16 share = v_div(one, v_add(one, v_exp(v_mul(v_all(1.702f), low))));
    return v_mul(v_mul(v_sub(zero, low), share), v_add(up, one));
}

static void gate_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct gate *a = args;
    const float *gate = a->gate_up + row * 2 * a->width, *up = gate + a->width;
    float *out = a->out + row * a->width;
    int64_t i = 0, n = a->width;
    for (; i + LANES <= n; i += LANES)
        v_store(out + i, gated(v_load(gate + i), v_load(up + i), a->kind));
    v16 rest = gated(v_load_part(gate + i, n - i), v_load_part(up + i, n - i), a->kind);
    v_store_part(out + i, rest, n - i);
}

void penstock_gated_activation(const float *gate_up, int64_t rows, int64_t width, int64_t kind,
                               float *out) {
    struct gate a = {gate_up, out, width, kind};
    unsigned arithmetic = enter();
    run_region(gate_task, &a, rows, 16 * width);
    leave(arithmetic);
}

/* One layer's cache: keys [block][kv head][block_size / 16][dim][16], 16 keys side by side, so that
 * scores need no sums across lanes; values [block][kv head][block_size][dim_v].
 * Where values are the first dim_v elements of the keys there are no `keys`, and `values` has whole
 * keys as rows: [block][kv head][block_size][dim]. */
struct cache {
    void *keys, *values;
    int64_t num_blocks, block_size, kv_heads, dim, dim_v, half;
};

/* Elements from one token's values to the next's. */
INLINE int64_t value_step(const struct cache *c) { return c->keys ? c->dim_v : c->dim; }

INLINE void *element(void *data, int64_t index, int64_t half) {
    return (char *)data + index * (half ? 2 : 4);
}

/* Store elements `step` apart. */
static void store_strided(const float *x, int64_t n, void *to, int64_t step, int64_t half) {
    for (int64_t i = 0; i < n; i += LANES) {
        uint16_t halves[LANES];
        int64_t count = min_of(LANES, n - i);
        if (half) v_store_half(halves, v_load_part(x + i, count));
        for (int64_t j = 0; j < count; j++) {
            if (half) ((uint16_t *)to)[(i + j) * step] = halves[j];
            else ((float *)to)[(i + j) * step] = x[i + j];
        }
    }
}

static void store_key_value(const struct cache *c, int64_t slot, int64_t head, const float *key,
                            const float *value) {
    int64_t block = slot / c->block_size, offset = slot % c->block_size, half = c->half;
    int64_t token = (block * c->kv_heads + head) * c->block_size;
    int64_t tile = (token + offset / LANES * LANES) * c->dim + offset % LANES;
    if (c->keys) store_strided(key, c->dim, element(c->keys, tile, half), LANES, half);
    else value = key;
    int64_t step = value_step(c);
    store_strided(value, step, element(c->values, (token + offset) * step, half), 1, half);
}

struct store {
    const struct cache *cache;
    const float *key, *value;
    const int64_t *slots;
};

static void store_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct store *a = args;
    const struct cache *c = a->cache;
    for (int64_t h = 0; h < c->kv_heads && a->slots[row] >= 0; h++)
        store_key_value(c, a->slots[row], h, a->key + (row * c->kv_heads + h) * c->dim,
                        a->value + (row * c->kv_heads + h) * c->dim_v);
}

int64_t penstock_write_cache(const struct cache *cache, const float *key, const float *value,
                             const int64_t *slots, int64_t rows) {
    struct store a = {cache, key, value, slots};
    if (!in_bounds(slots, rows, -1, cache->num_blocks * cache->block_size)) return BAD_SLOT;
    unsigned arithmetic = enter();
    run_region(store_task, &a, rows, 8 * cache->kv_heads * (cache->dim + cache->dim_v));
    leave(arithmetic);
    return DONE;
}

struct rope {
    float *qkv, *out;
    const struct cache *cache;
    const int64_t *positions, *slots;
    const float *cos, *sin; /* [max_positions][half_dim] */
    int64_t heads, half_dim;
    const float *q_norm, *k_norm; /* NULL: none */
    float eps, weight_offset;
};

/* Rotate pairs (x[i], x[half + i]) by the angles of a position. */
INLINE void rotate_pairs(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[half + i];
        x[i] = first * cos[i] - second * sin[i];
        x[half + i] = second * cos[i] + first * sin[i];
    }
}

/* Write head x [dim] at a position to `out`, normalized and rotated. */
static void rotate(const struct rope *a, int64_t position, const float *x, const float *norm,
                   float *out) {
    int64_t dim = a->cache->dim, half = a->half_dim;
    const float *cos = a->cos + position * half, *sin = a->sin + position * half;
    if (norm) rms_norm(x, norm, dim, a->eps, a->weight_offset, out);
    else memcpy(out, x, (size_t)dim * 4);
    rotate_pairs(out, cos, sin, half);
}

static void rope_task(const void *args, int64_t row, int thread) {
    const struct rope *a = args;
    const struct cache *c = a->cache;
    int64_t dim = c->dim, position = a->positions[row];
    const float *x = a->qkv + row * (a->heads + 2 * c->kv_heads) * dim;
    const float *keys = x + a->heads * dim, *values = keys + c->kv_heads * dim;
    float *rotated = pool.scratch[thread].data;
    for (int64_t h = 0; h < a->heads; h++)
        rotate(a, position, x + h * dim, a->q_norm, a->out + (row * a->heads + h) * dim);
    for (int64_t h = 0; h < c->kv_heads && a->slots[row] >= 0; h++) {
        rotate(a, position, keys + h * dim, a->k_norm, rotated);
        store_key_value(c, a->slots[row], h, rotated, values + h * dim);
    }
}

/* half_dim 0: heads are not rotated. */
int64_t penstock_rope_and_cache(float *qkv, int64_t rows, int64_t heads, const struct cache *cache,
                                const int64_t *positions, const int64_t *slots, const float *cos,
                                const float *sin, int64_t max_positions, int64_t half_dim,
                                const float *q_norm, const float *k_norm, float eps,
                                float weight_offset, float *out) {
    struct rope a = {qkv, out, cache, positions, slots, cos, sin, heads, half_dim,
                     q_norm, k_norm, eps, weight_offset};
    if (!in_bounds(slots, rows, -1, cache->num_blocks * cache->block_size)) return BAD_SLOT;
    if (half_dim && !in_bounds(positions, rows, 0, max_positions)) return BAD_POSITION;
    unsigned arithmetic = enter();
    int found = reserve((size_t)cache->dim * 4);
    if (found) run_region(rope_task, &a, rows, 8 * (heads + 2 * cache->kv_heads) * cache->dim);
    leave(arithmetic);
    return found ? DONE : NO_MEMORY;
}
