/* Compares instructions with their definitions, once at load: what a machine, or what emulates one,
 * computes otherwise must not serve.
 */

static uint32_t next_random(uint32_t *state) {
    *state ^= *state << 13, *state ^= *state >> 17, *state ^= *state << 5;
    return *state;
}

/* Pairs of any bits: finite or not, normal or not; and sums near the products of some. */
static int bfloats_differ(uint32_t *random) {
    uint32_t x = next_random(random), w[LANES];
    float sums[LANES], found[LANES];
    for (int i = 0; i < LANES; i++) {
        w[i] = next_random(random);
        sums[i] = i % 2 ? -second_of(x) * second_of(w[i]) : float_of(next_random(random));
    }
    v_store(found, v_dot_bfloat(v_load(sums), &x, w));
    for (int i = 0; i < LANES; i++) {
        float expected = dot_of_pairs(sums[i], x, w[i]);
        if (expected == expected ? bits_of(expected) != bits_of(found[i]) : found[i] == found[i])
            return 1;
    }
    return 0;
}

static int int8s_differ(uint32_t *random) {
    int8_t x[4], w[4 * LANES];
    uint8_t steps[4];
    float found[LANES];
    for (int i = 0; i < 4; i++) {
        x[i] = (int8_t)(next_random(random) % 255 - 127);
        steps[i] = (uint8_t)(x[i] + OFFSET);
    }
    for (int i = 0; i < 4 * LANES; i++) w[i] = (int8_t)(next_random(random) % 255 - 127);
    v_store(found, v_dot_int8(v_all(0.0f), steps, w));
    for (int i = 0; i < LANES; i++) {
        int32_t expected = 0;
        for (int j = 0; j < 4; j++) expected += (x[j] + OFFSET) * w[4 * i + j];
        if ((uint32_t)expected != bits_of(found[i])) return 1;
    }
    return 0;
}

/* 1 if any instruction gave other bits than its definition. */
int64_t penstock_differs(void) {
    uint32_t random = 2463534242u;
    int differs = 0;
    unsigned standard = enter(), flushing = FLUSHES ? flushing_arithmetic() : 0;
    for (int i = 0; i < 4000 && !differs; i++)
        differs = bfloats_differ(&random) || int8s_differ(&random);
    if (FLUSHES) restore_arithmetic(flushing);
    leave(standard);
    return differs;
}
