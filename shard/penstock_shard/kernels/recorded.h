/* Calls that were recorded, made again one after the other. */

#define MOST_NUMBERS 13
/* In the order of recorded_calls.py. */
enum { LINEAR, ROWS, LOOK_UP, ADD_RMS_NORM, GATED_ACTIVATION, ROPE_AND_CACHE, WRITE_CACHE,
       ATTENTION };

/* Pointers and integers of a call, and its floats, each in the order of its arguments. */
struct call {
    int64_t function, numbers[MOST_NUMBERS];
    float floats[2];
};

#define AT(i) ((void *)(intptr_t)n[i])
static int64_t make_call(const struct call *call) {
    const int64_t *n = call->numbers;
    const float *f = call->floats;
    switch (call->function) {
    case LINEAR: return penstock_linear(AT(0), n[1], AT(2), AT(3), AT(4), n[5]);
    case ROWS: return penstock_rows(AT(0), AT(1), n[2], AT(3));
    case LOOK_UP: return penstock_look_up(AT(0), n[1], n[2], n[3], AT(4), n[5], AT(6));
    case ADD_RMS_NORM:
        penstock_add_rms_norm(AT(0), AT(1), AT(2), n[3], n[4], f[0], f[1], AT(5));
        return DONE;
    case GATED_ACTIVATION:
        penstock_gated_activation(AT(0), n[1], n[2], n[3], AT(4));
        return DONE;
    case ROPE_AND_CACHE:
        return penstock_rope_and_cache(AT(0), n[1], n[2], AT(3), AT(4), AT(5), AT(6), AT(7), n[8],
                                       n[9], AT(10), AT(11), f[0], f[1], AT(12));
    case WRITE_CACHE: return penstock_write_cache(AT(0), AT(1), AT(2), AT(3), n[4]);
    default:
        return penstock_attention(AT(0), n[1], n[2], AT(3), AT(4), AT(5), AT(6), n[7], n[8], f[0],
                                  n[9], f[1], AT(10), AT(11), AT(12));
    }
}

/* The first status that is not DONE ends the calls. */
int64_t penstock_call_again(const struct call *calls, int64_t count) {
    int64_t status = DONE;
    for (int64_t i = 0; i < count && status == DONE; i++) status = make_call(calls + i);
    return status;
}
