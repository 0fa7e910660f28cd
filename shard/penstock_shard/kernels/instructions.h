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
    v_store(found, v_dot_bfloat(v_load(sums), &x, v_load((const float *)w)));
    for (int i = 0; i < LANES; i++) {
        float expected = dot_of_pairs(sums[i], x, w[i]);
        if (expected == expected ? bits_of(expected) != bits_of(found[i]) : found[i] == found[i])
            return 1;
    }
    return 0;
}

/* Bytes of any codes: of 8 bits, and the halves of each as codes of 4. */
static int codes_differ(uint32_t *random) {
    int8_t x[4];
    uint8_t bytes[4 * LANES];
    float found[3][LANES];
    for (int i = 0; i < 4; i++) x[i] = (int8_t)(next_random(random) % 255 - 127);
    for (int i = 0; i < 4 * LANES; i++) bytes[i] = (uint8_t)(next_random(random) % 256);
    v16i zeros = v_ints(0);
    v_store(found[0], v_of_ints(v_dot_codes8(zeros, x, v_load_codes8(bytes))));
    v_store(found[1], v_of_ints(v_dot_codes4(zeros, x, v_load_codes4(bytes, 0))));
    v_store(found[2], v_of_ints(v_dot_codes4(zeros, x, v_load_codes4(bytes, 1))));
    for (int i = 0; i < LANES; i++) {
        int32_t expected[3] = {0};
        for (int j = 0; j < 4; j++) {
            int byte = bytes[4 * i + j];
            expected[0] += x[j] * (byte - CODES8_ZERO);
            expected[1] += x[j] * (byte & 15);
            expected[2] += x[j] * (byte >> 4);
        }
        for (int j = 0; j < 3; j++)
            if ((float)expected[j] != found[j][i]) return 1;
    }
    return 0;
}

/* Tiles of any bits, but that NaNs may differ. */
static int tiles_differ(uint32_t *random) {
    struct tile x, w, sum, found[2], expected[2];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int c = 0; c < LANES; c++) {
            x.at[r][c] = next_random(random), w.at[r][c] = next_random(random);
            sum.at[r][c] = next_random(random);
        }
    expected[0] = expected[1] = sum;
    dot_tile_codes(&expected[0], &x, &w);
    dot_tile_bfloats(&expected[1], &x, &w);
    begin_tiles();
    load_tile(0, &sum, TILE_BYTES);
    load_tile(1, &sum, TILE_BYTES);
    load_tile(2, &x, TILE_BYTES);
    load_tile(3, &w, TILE_BYTES);
    add_tile_codes(0, 2, 3);
    add_tile_bfloats(1, 2, 3);
    store_tile(0, &found[0]);
    store_tile(1, &found[1]);
    end_tiles();
    for (int r = 0; r < TILE_ROWS; r++)
        for (int c = 0; c < LANES; c++) {
            float one = float_of(found[1].at[r][c]), other = float_of(expected[1].at[r][c]);
            if ((one == one || other == other) && bits_of(one) != bits_of(other)) return 1;
        }
    return memcmp(&found[0], &expected[0], sizeof(struct tile)) != 0;
}

/* 1 if any instruction gave other bits than its definition. */
int64_t penstock_differs(void) {
    uint32_t random = 2463534242u;
    int differs = HAS_TILES && !may_use_tiles();
    unsigned standard = enter(), flushing = FLUSHES ? flushing_arithmetic() : 0;
    for (int i = 0; i < 4000 && !differs; i++)
        differs = bfloats_differ(&random) || codes_differ(&random)
                  || (HAS_TILES && i % 40 == 0 && tiles_differ(&random));
    if (FLUSHES) restore_arithmetic(flushing);
    leave(standard);
    return differs;
}
