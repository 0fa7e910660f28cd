/* Layers with a state: short convolutions, the delta rule and the selective scan.
 *
 * The tokens of a sequence are taken one after the other, in float32 and in one order of operations,
 * and its state lies in memory between two steps: the bits are the same however a prompt is cut.
 * Part of cpu.c, whose helpers it uses.
 */

/* The tokens of a step by sequence: those of sequence i are starts[i] to starts[i + 1], the last of
 * its lengths[i]; its state is in slot table[i * columns]. */
struct step {
    const int32_t *starts, *lengths, *table;
    int64_t sequences, columns;
};

static int64_t slot_of(const struct step *s, int64_t i) { return s->table[i * s->columns]; }

/* Whether the first of its tokens in this step is its first at all: then it has no state yet. */
static int begins(const struct step *s, int64_t i) {
    return s->lengths[i] == s->starts[i + 1] - s->starts[i];
}

/* Check that all tokens and slots exist. */
static int step_in_bounds(const struct step *s, int64_t rows, int64_t slots) {
    if (s->starts[0] < 0 || s->starts[s->sequences] > rows) return 0;
    for (int64_t i = 0; i < s->sequences; i++) {
        int64_t count = s->starts[i + 1] - s->starts[i];
        if (count < 0 || s->lengths[i] < count) return 0;
        if (count && (slot_of(s, i) < 0 || slot_of(s, i) >= slots)) return 0;
    }
    return 1;
}

/* The first n of a vector, all 16 most often. */
INLINE v16 load_lanes(const float *p, int64_t n) { return n < LANES ? v_load_part(p, n) : v_load(p); }

INLINE void store_lanes(float *p, v16 x, int64_t n) {
    if (n < LANES) v_store_part(p, x, n);
    else v_store(p, x);
}

/* ---- Short convolutions ---- */

#define MAX_TAPS 16
#define CONV_VECTORS 8 /* of channels in a task */

struct conv {
    struct step step;
    const float *x, *weight, *bias; /* [T][channels], [taps][channels], [channels] or NULL */
    float *state, *out;             /* [slots][taps - 1][channels]: the inputs before, oldest first */
    int64_t channels, taps, silu;
};

INLINE void conv_channels(const struct conv *a, int64_t sequence, int64_t channel, int64_t n) {
    v16 past[MAX_TAPS - 1], weight[MAX_TAPS], bias = v_all(0.0f);
    int64_t kept = a->taps - 1, width = a->channels;
    float *state = a->state + slot_of(&a->step, sequence) * kept * width + channel;
    int fresh = begins(&a->step, sequence);
    for (int64_t j = 0; j < kept; j++)
        past[j] = fresh ? v_all(0.0f) : load_lanes(state + j * width, n);
    for (int64_t j = 0; j < a->taps; j++) weight[j] = load_lanes(a->weight + j * width + channel, n);
    if (a->bias) bias = load_lanes(a->bias + channel, n);
    for (int64_t t = a->step.starts[sequence]; t < a->step.starts[sequence + 1]; t++) {
        v16 sum = bias, next = load_lanes(a->x + t * width + channel, n);
        for (int64_t j = 0; j < kept; j++) {
            sum = v_fma(weight[j], past[j], sum);
            past[j] = j + 1 < kept ? past[j + 1] : next;
        }
        sum = v_fma(weight[kept], next, sum);
        store_lanes(a->out + t * width + channel, a->silu ? activated(sum, SILU) : sum, n);
    }
    for (int64_t j = 0; j < kept; j++) store_lanes(state + j * width, past[j], n);
}

static void conv_task(const void *args, int64_t index, int thread) {
    (void)thread;
    const struct conv *a = args;
    int64_t groups = ceil_div(a->channels, CONV_VECTORS * LANES), sequence = index / groups;
    int64_t first = index % groups * CONV_VECTORS * LANES;
    int64_t end = min_of(a->channels, first + CONV_VECTORS * LANES);
    if (a->step.starts[sequence] == a->step.starts[sequence + 1]) return;
    int64_t channel = first;
    for (; channel + LANES <= end; channel += LANES) conv_channels(a, sequence, channel, LANES);
    if (channel < end) conv_channels(a, sequence, channel, end - channel);
}

int64_t penstock_short_conv(const float *x, int64_t rows, int64_t channels, const float *weight,
                            const float *bias, int64_t taps, int64_t silu, float *state,
                            int64_t slots, const int32_t *starts, const int32_t *lengths,
                            const int32_t *table, int64_t sequences, int64_t columns, float *out) {
    struct conv a = {{starts, lengths, table, sequences, columns}, x, weight, bias, state, out,
                     channels, taps, silu};
    if (!step_in_bounds(&a.step, rows, slots)) return BAD_SLOT;
    unsigned arithmetic = enter();
    int64_t groups = ceil_div(channels, CONV_VECTORS * LANES);
    if (sequences)
        run_region(conv_task, &a, sequences * groups,
                   rows / sequences * CONV_VECTORS * LANES * (taps + 8 * silu));
    leave(arithmetic);
    return DONE;
}

/* ---- The delta rule ----
 *
 * For each value head, with its key head's q and k, both of length 1, and q over sqrt(dim):
 * S = decay S; S += k (beta (v - S' k))'; out = S' q. Decays are of a head or of each channel of
 * its keys (Yang et al., Gated Delta Networks, 2024).
 */

#define TOKENS_TOGETHER 16

struct delta {
    struct step step;
    const float *qkv;          /* [T][2 key_heads dim + heads dim_v] */
    const float *decay, *beta; /* [T][heads], or [T][heads][dim] by channel; [T][heads] */
    float *state, *out;        /* [slots][heads][dim][dim_v], [T][heads][dim_v] */
    int64_t heads, key_heads, dim, dim_v, by_channel;
};

/* x / sqrt(sum of squares + 1e-6), times scale. */
static void to_unit(const float *x, int64_t n, float scale, float *out) {
    v16 sum = v_all(0.0f);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) sum = v_fma(v_load(x + i), v_load(x + i), sum);
    v16 rest = v_load_part(x + i, n - i);
    sum = v_fma(rest, rest, sum);
    scale = scale / sqrtf(v_sum(sum) + 1e-6f);
    for (i = 0; i < n; i++) out[i] = x[i] * scale;
}

/* One token's update of `n` columns of a state. Sums have four parts, by the row modulo 4. */
INLINE void update_columns(float *state, int64_t step, int64_t n, int64_t dim, const float *query,
                           const float *key, const float *decay, const float *value, float beta,
                           float *out) {
    v16 sum[4] = {v_all(0.0f), v_all(0.0f), v_all(0.0f), v_all(0.0f)};
    for (int64_t i = 0; i < dim; i++)
        sum[i & 3] = v_fma(load_lanes(state + i * step, n), v_all(decay[i] * key[i]), sum[i & 3]);
    v16 found = v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3]));
    v16 change = v_mul(v_sub(load_lanes(value, n), found), v_all(beta));
    for (int64_t i = 0; i < 4; i++) sum[i] = v_all(0.0f);
    for (int64_t i = 0; i < dim; i++) {
        v16 row = v_mul(load_lanes(state + i * step, n), v_all(decay[i]));
        row = v_fma(v_all(key[i]), change, row);
        store_lanes(state + i * step, row, n);
        sum[i & 3] = v_fma(row, v_all(query[i]), sum[i & 3]);
    }
    store_lanes(out, v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3])), n);
}

static void delta_task(const void *args, int64_t index, int thread) {
    const struct delta *a = args;
    int64_t sequence = index / a->heads, head = index % a->heads, dim = a->dim, dim_v = a->dim_v;
    int64_t first = a->step.starts[sequence], end = a->step.starts[sequence + 1];
    if (first == end) return;
    float *state = a->state + (slot_of(&a->step, sequence) * a->heads + head) * dim * dim_v;
    if (begins(&a->step, sequence)) memset(state, 0, (size_t)(dim * dim_v) * 4);
    int64_t keys = a->key_heads * dim, width = 2 * keys + a->heads * dim_v;
    int64_t key_head = head / (a->heads / a->key_heads) * dim;
    float *query = pool.scratch[thread].data, *key = query + TOKENS_TOGETHER * dim;
    float *decay = key + TOKENS_TOGETHER * dim, scale = 1.0f / sqrtf((float)dim);
    for (int64_t t = first; t < end; t += TOKENS_TOGETHER) {
        int64_t count = min_of(TOKENS_TOGETHER, end - t);
        for (int64_t u = 0; u < count; u++) {
            const float *x = a->qkv + (t + u) * width + key_head;
            const float *d = a->decay + ((t + u) * a->heads + head) * (a->by_channel ? dim : 1);
            to_unit(x, dim, scale, query + u * dim);
            to_unit(x + keys, dim, 1.0f, key + u * dim);
            for (int64_t i = 0; i < dim; i++) decay[u * dim + i] = a->by_channel ? d[i] : d[0];
        }
        for (int64_t column = 0; column < dim_v; column += LANES) {
            int64_t n = min_of(LANES, dim_v - column);
            for (int64_t u = 0; u < count; u++) {
                const float *value = a->qkv + (t + u) * width + 2 * keys + head * dim_v + column;
                float *out = a->out + ((t + u) * a->heads + head) * dim_v + column;
                float beta = a->beta[(t + u) * a->heads + head];
                if (n == LANES)
                    update_columns(state + column, dim_v, LANES, dim, query + u * dim, key + u * dim,
                                   decay + u * dim, value, beta, out);
                else
                    update_columns(state + column, dim_v, n, dim, query + u * dim, key + u * dim,
                                   decay + u * dim, value, beta, out);
            }
        }
    }
}

int64_t penstock_delta_rule(const float *qkv, int64_t rows, int64_t heads, int64_t key_heads,
                            int64_t dim, int64_t dim_v, const float *decay, int64_t by_channel,
                            const float *beta, float *state, int64_t slots, const int32_t *starts,
                            const int32_t *lengths, const int32_t *table, int64_t sequences,
                            int64_t columns, float *out) {
    struct delta a = {{starts, lengths, table, sequences, columns}, qkv, decay, beta, state, out,
                      heads, key_heads, dim, dim_v, by_channel};
    if (!step_in_bounds(&a.step, rows, slots)) return BAD_SLOT;
    unsigned arithmetic = enter();
    int64_t status = NO_MEMORY;
    if (reserve((size_t)(3 * TOKENS_TOGETHER * dim) * 4)) {
        status = DONE;
        if (sequences)
            run_region(delta_task, &a, sequences * heads, rows / sequences * 4 * dim * dim_v);
    }
    leave(arithmetic);
    return status;
}

/* ---- The selective scan ----
 *
 * For each head, with its group's b and c: S = e^(dt a) S + (dt x) b'; out = S c + d x. Rates a are
 * of a head (Mamba-2: Dao and Gu, 2024) or of each number of a row of its state (Mamba: Gu and Dao,
 * 2023, where a head is one channel).
 */

#define SCAN_ROWS 64 /* of states in a task */

struct scan {
    struct step step;
    const float *x, *dt, *a;      /* [T][heads][dim], [T][heads], [heads][by_column ? width : 1] */
    const float *b, *c, *d;       /* [T][groups][width] each, [heads] or NULL */
    float *state, *out;           /* [slots][heads][dim][width], [T][heads][dim] */
    int64_t heads, groups, dim, width, by_column;
};

INLINE v16 scan_lanes(float *state, int64_t n, v16 decay, v16 input, const float *b, const float *c,
                      v16 sum) {
    v16 now = v_fma(input, load_lanes(b, n), v_mul(decay, load_lanes(state, n)));
    store_lanes(state, now, n);
    return v_fma(now, load_lanes(c, n), sum);
}

/* One token's update of one head's state. */
static void scan_head(const struct scan *s, int64_t t, int64_t head, float *state) {
    int64_t width = s->width, whole = width / LANES * LANES, rest = width - whole;
    int64_t group = t * s->groups + head / (s->heads / s->groups);
    const float *b = s->b + group * width, *c = s->c + group * width;
    const float *x = s->x + (t * s->heads + head) * s->dim;
    const float *a = s->a + head * (s->by_column ? width : 1);
    float dt = s->dt[t * s->heads + head], *out = s->out + (t * s->heads + head) * s->dim;
    v16 shared = v_exp(v_all(dt * a[0]));
    for (int64_t i = 0; i < s->dim; i++, state += width) {
        v16 sum = v_all(0.0f), input = v_all(dt * x[i]);
        for (int64_t j = 0; j < width; j += LANES) {
            int64_t n = j < whole ? LANES : rest;
            v16 decay = shared;
            if (s->by_column) decay = v_exp(v_mul(v_all(dt), load_lanes(a + j, n)));
            if (n == LANES) sum = scan_lanes(state + j, LANES, decay, input, b + j, c + j, sum);
            else sum = scan_lanes(state + j, n, decay, input, b + j, c + j, sum);
        }
        out[i] = s->d ? fmaf(s->d[head], x[i], v_sum(sum)) : v_sum(sum);
    }
}

static int64_t scan_heads(const struct scan *s) { return max_of(1, SCAN_ROWS / s->dim); }

static void scan_task(const void *args, int64_t index, int thread) {
    (void)thread;
    const struct scan *s = args;
    int64_t most = scan_heads(s), tasks = ceil_div(s->heads, most), sequence = index / tasks;
    int64_t first = index % tasks * most, end = min_of(s->heads, first + most);
    int64_t start = s->step.starts[sequence], stop = s->step.starts[sequence + 1];
    if (start == stop) return;
    int64_t size = s->dim * s->width;
    float *state = s->state + (slot_of(&s->step, sequence) * s->heads + first) * size;
    if (begins(&s->step, sequence)) memset(state, 0, (size_t)((end - first) * size) * 4);
    for (int64_t t = start; t < stop; t++)
        for (int64_t head = first; head < end; head++)
            scan_head(s, t, head, state + (head - first) * size);
}

int64_t penstock_selective_scan(const float *x, int64_t rows, int64_t heads, int64_t groups,
                                int64_t dim, int64_t width, const float *dt, const float *a,
                                int64_t by_column, const float *b, const float *c, const float *d,
                                float *state, int64_t slots, const int32_t *starts,
                                const int32_t *lengths, const int32_t *table, int64_t sequences,
                                int64_t columns, float *out) {
    struct scan s = {{starts, lengths, table, sequences, columns}, x, dt, a, b, c, d, state, out,
                     heads, groups, dim, width, by_column};
    if (!step_in_bounds(&s.step, rows, slots)) return BAD_SLOT;
    unsigned arithmetic = enter();
    if (sequences)
        run_region(scan_task, &s, sequences * ceil_div(heads, scan_heads(&s)),
                   rows / sequences * 2 * SCAN_ROWS * width * (by_column ? 8 : 1));
    leave(arithmetic);
    return DONE;
}

/* ---- Gates ---- */

/* log(1 + t) for t in [0, 1]: twice the area tangent of t / (2 + t). */
static float log1p_of(float t) {
    float s = t / (2.0f + t), square = s * s, p = 1.0f / 19.0f;
    for (int i = 17; i > 0; i -= 2) p = fmaf(p, square, 1.0f / (float)i);
    return 2.0f * s * p;
}

/* log(1 + e^x) */
static float softplus(float x) {
    return (x > 0.0f ? x : 0.0f) + log1p_of(exp_of(x > 0.0f ? -x : x));
}

struct decay {
    const float *x, *rate, *bias; /* [T][heads][dim], [heads], [heads][dim] */
    float *out;
    int64_t heads, dim;
};

static void decay_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct decay *a = args;
    for (int64_t h = 0; h < a->heads; h++)
        for (int64_t i = h * a->dim; i < (h + 1) * a->dim; i++) {
            float x = a->x[row * a->heads * a->dim + i] + a->bias[i];
            a->out[row * a->heads * a->dim + i] = exp_of(-a->rate[h] * softplus(x));
        }
}

/* e^(-rate softplus(x + bias)) */
void penstock_decay(const float *x, int64_t rows, int64_t heads, int64_t dim, const float *rate,
                    const float *bias, float *out) {
    struct decay a = {x, rate, bias, out, heads, dim};
    unsigned arithmetic = enter();
    run_region(decay_task, &a, rows, 128 * heads * dim);
    leave(arithmetic);
}

struct softplus {
    const float *x, *bias; /* [T][heads], [heads] */
    float *out, low, high;
    int64_t heads;
};

static void softplus_task(const void *args, int64_t row, int thread) {
    (void)thread;
    const struct softplus *a = args;
    for (int64_t h = 0; h < a->heads; h++) {
        float y = softplus(a->x[row * a->heads + h] + a->bias[h]);
        a->out[row * a->heads + h] = y < a->low ? a->low : y > a->high ? a->high : y;
    }
}

/* softplus(x + bias) between two bounds */
void penstock_softplus(const float *x, int64_t rows, int64_t heads, const float *bias, float low,
                       float high, float *out) {
    struct softplus a = {x, bias, out, low, high, heads};
    unsigned arithmetic = enter();
    run_region(softplus_task, &a, rows, 64 * heads);
    leave(arithmetic);
}
