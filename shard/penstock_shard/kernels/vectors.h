/* Vectors of 16 floats, half precision, exp and tanh: the arithmetic of the kernels, once for each
 * level (PENSTOCK_LEVEL: 0 portable, 1 AVX2 with FMA and F16C, 2 AVX-512 with VNNI) and with the
 * same bits on all of them. Knows nothing of tensors.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if PENSTOCK_LEVEL > 0
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define LANES 16

INLINE uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
INLINE float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* ---- Half precision: single values, and the portable level. Rounds to nearest even ---- */

#ifdef __aarch64__

INLINE float half_to_float(uint16_t h) { __fp16 x; memcpy(&x, &h, 2); return (float)x; }
INLINE uint16_t float_to_half(float x) {
    __fp16 half = (__fp16)x;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}

#else

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
    if (exponent == 31)
        return float_of(sign | 0x7f800000 | (mantissa ? 0x400000 : 0) | mantissa << 13);
    if (exponent == 0)
        return float_of(sign | bits_of((float)mantissa * 0x1p-24f));
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

INLINE uint16_t float_to_half(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (size >> 13 & 0x3ff));
    if (size >= 0x477ff000) /* 65520: half way from the largest to what would be the next */
        return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000) /* subnormal: adding 0.5 rounds at the right bit */
        return (uint16_t)(sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | ((size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13));
}

#endif

/* To bfloat16, to nearest even; a NaN stays one. */
INLINE uint16_t float_to_bfloat(float x) {
    uint32_t bits = bits_of(x);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

/* ---- Vectors of 16 floats: one register, two, or an array ----
 *
 * v_max returns its second argument where either is not a number. v_less(a, b, x, y) is x where
 * a < b, else y. v_exponent(x, t) is x * 2^n for t = 1.5 * 2^23 + n.
 */

#if PENSTOCK_LEVEL == 2

typedef __m512 v16;
INLINE v16 v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, v16 x) { _mm512_storeu_ps(p, x); }
INLINE v16 v_load_half(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
INLINE void v_store_half(uint16_t *p, v16 x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
INLINE v16 v_all(float x) { return _mm512_set1_ps(x); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE v16 v_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
INLINE v16 v_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
INLINE v16 v_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
INLINE v16 v_less(v16 a, v16 b, v16 x, v16 y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
INLINE v16 v_exponent(v16 x, v16 t) {
    __m512i shift = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), shift));
}

#elif PENSTOCK_LEVEL == 1

typedef struct { __m256 a, b; } v16;
INLINE v16 v_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void v_store(float *p, v16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE v16 v_load_half(const uint16_t *p) {
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}
INLINE void v_store_half(uint16_t *p, v16 x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i *)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
INLINE v16 v_all(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE v16 v_fma(v16 x, v16 y, v16 z) {
    return (v16){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
#define V_BINARY(name, op) \
    INLINE v16 name(v16 x, v16 y) { return (v16){op(x.a, y.a), op(x.b, y.b)}; }
V_BINARY(v_add, _mm256_add_ps)
V_BINARY(v_sub, _mm256_sub_ps)
V_BINARY(v_mul, _mm256_mul_ps)
V_BINARY(v_div, _mm256_div_ps)
V_BINARY(v_max, _mm256_max_ps)
INLINE __m256 less8(__m256 a, __m256 b, __m256 x, __m256 y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
INLINE v16 v_less(v16 a, v16 b, v16 x, v16 y) {
    return (v16){less8(a.a, b.a, x.a, y.a), less8(a.b, b.b, x.b, y.b)};
}
INLINE __m256 exponent8(__m256 x, __m256 t) {
    __m256i shift = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), shift));
}
INLINE v16 v_exponent(v16 x, v16 t) { return (v16){exponent8(x.a, t.a), exponent8(x.b, t.b)}; }

#else

typedef struct { float x[LANES]; } v16;
#define V_EACH(expression) \
    v16 r; for (int i = 0; i < LANES; i++) r.x[i] = (expression); return r
INLINE v16 v_load(const float *p) { V_EACH(p[i]); }
INLINE void v_store(float *p, v16 x) { memcpy(p, x.x, sizeof x.x); }
INLINE v16 v_load_half(const uint16_t *p) { V_EACH(half_to_float(p[i])); }
INLINE void v_store_half(uint16_t *p, v16 x) {
    for (int i = 0; i < LANES; i++) p[i] = float_to_half(x.x[i]);
}
INLINE v16 v_all(float x) { V_EACH(x); }
INLINE v16 v_fma(v16 a, v16 b, v16 c) { V_EACH(fmaf(a.x[i], b.x[i], c.x[i])); }
INLINE v16 v_add(v16 a, v16 b) { V_EACH(a.x[i] + b.x[i]); }
INLINE v16 v_sub(v16 a, v16 b) { V_EACH(a.x[i] - b.x[i]); }
INLINE v16 v_mul(v16 a, v16 b) { V_EACH(a.x[i] * b.x[i]); }
INLINE v16 v_div(v16 a, v16 b) { V_EACH(a.x[i] / b.x[i]); }
INLINE v16 v_max(v16 a, v16 b) { V_EACH(a.x[i] > b.x[i] ? a.x[i] : b.x[i]); }
INLINE v16 v_less(v16 a, v16 b, v16 x, v16 y) { V_EACH(a.x[i] < b.x[i] ? x.x[i] : y.x[i]); }
INLINE v16 v_exponent(v16 x, v16 t) { V_EACH(float_of(bits_of(x.x[i]) + (bits_of(t.x[i]) << 23))); }

#endif

/* The first n of 16, zeros after them. */
INLINE v16 v_load_part(const float *p, int64_t n) {
    float lanes[LANES] = {0};
    memcpy(lanes, p, (size_t)n * 4);
    return v_load(lanes);
}

INLINE void v_store_part(float *p, v16 x, int64_t n) {
    float lanes[LANES];
    v_store(lanes, x);
    memcpy(p, lanes, (size_t)n * 4);
}

/* By one fixed tree: i and i + 8, then i and i + 4, ... */
INLINE float v_sum(v16 x) {
    float lanes[LANES];
    v_store(lanes, x);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] = lanes[i] + lanes[i + width];
    return lanes[0];
}

INLINE float v_largest(v16 x) {
    float lanes[LANES];
    v_store(lanes, x);
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
    return lanes[0];
}

/* ---- Dot products within a lane ----
 *
 * v_dot_codes: sum[lane] += four steps (int8) times the four codes of that lane, exact in int32.
 * Codes of 8 bits count from CODES8_ZERO, others from 0; v_load_codes4 gives the lower four bits of
 * 64 bytes as codes, or the higher. Integers have a type of their own, so that compilers keep many
 * sums in registers.
 *
 * v_dot_bfloat: sum[lane] is a multiply-add with the second of two bfloat16 and that lane's second
 * weight, then one with the first. Subnormal numbers count as zero, also between the two: so the
 * instruction of AVX-512 BF16 is defined (Intel, VDPBF16PS), and so it is computed where it is not
 * there. Without the instruction the caller flushes subnormals (FLUSHES).
 */

INLINE float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }

/* One lane by the definition. What rounding brings to the smallest normal number is flushed unless
 * it would be brought there with an exponent without bounds too. */
INLINE float fma_flushed(float x, float y, float sum) {
    x = flushed(x), y = flushed(y), sum = flushed(sum);
    float result = fmaf(x, y, sum);
    int is_below = fabs((double)x * y + sum) < 0x1p-126 - 0x1p-151;
    return fabsf(result) == 0x1p-126f && is_below ? copysignf(0.0f, result) : flushed(result);
}

INLINE float first_of(uint32_t pair) { return float_of(pair << 16); }
INLINE float second_of(uint32_t pair) { return float_of(pair & 0xffff0000u); }

INLINE float dot_of_pairs(float sum, uint32_t x, uint32_t w) {
    return fma_flushed(first_of(x), first_of(w), fma_flushed(second_of(x), second_of(w), sum));
}

INLINE uint32_t load_unit(const void *p) { uint32_t x; memcpy(&x, p, 4); return x; }

#if PENSTOCK_LEVEL == 2

#define CODES8_ZERO 0
typedef int32_t v16i __attribute__((vector_size(64)));
INLINE v16i v_ints(int32_t x) { return (v16i)_mm512_set1_epi32(x); }
INLINE v16 v_of_ints(v16i x) { return _mm512_cvtepi32_ps((__m512i)x); }
INLINE v16i v_load_codes8(const void *p) { return (v16i)_mm512_loadu_si512(p); }
INLINE v16i v_load_codes4(const void *p, int high) {
    __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
    return (v16i)_mm512_and_si512(high ? _mm512_srli_epi16(both, 4) : both, mask);
}
INLINE v16i v_dot_codes8(v16i sum, const void *steps, v16i codes) {
    __m512i four = _mm512_set1_epi32((int)load_unit(steps));
    return (v16i)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, four);
}
#define v_dot_codes4 v_dot_codes8
#ifdef __AVX512BF16__
#define FLUSHES 0
INLINE v16 v_dot_bfloat(v16 sum, const void *x, v16 w) {
    __m512i pair = _mm512_set1_epi32((int)load_unit(x));
    return _mm512_dpbf16_ps(sum, (__m512bh)pair, (__m512bh)w);
}
#else
#define FLUSHES 1
INLINE v16 v_dot_bfloat(v16 sum, const void *x, v16 w) {
    __m512i pairs = _mm512_castps_si512(w), high = _mm512_set1_epi32((int)0xffff0000);
    v16 second = _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
    v16 first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    uint32_t pair = load_unit(x);
    return v_fma(v_all(first_of(pair)), first, v_fma(v_all(second_of(pair)), second, sum));
}
#endif

#elif PENSTOCK_LEVEL == 1

#define CODES8_ZERO 128
#define FLUSHES 1
typedef int32_t v8i __attribute__((vector_size(32)));
typedef struct { v8i a, b; } v16i;
INLINE v16i v_ints(int32_t x) {
    return (v16i){(v8i)_mm256_set1_epi32(x), (v8i)_mm256_set1_epi32(x)};
}
INLINE v16 v_of_ints(v16i x) {
    return (v16){_mm256_cvtepi32_ps((__m256i)x.a), _mm256_cvtepi32_ps((__m256i)x.b)};
}
INLINE v16i v_load_codes8(const void *p) {
    const __m256i *halves = p;
    return (v16i){(v8i)_mm256_loadu_si256(halves), (v8i)_mm256_loadu_si256(halves + 1)};
}
INLINE v8i four_bits(v8i both, int high) {
    __m256i shifted = high ? _mm256_srli_epi16((__m256i)both, 4) : (__m256i)both;
    return (v8i)_mm256_and_si256(shifted, _mm256_set1_epi8(15));
}
INLINE v16i v_load_codes4(const void *p, int high) {
    v16i both = v_load_codes8(p);
    return (v16i){four_bits(both.a, high), four_bits(both.b, high)};
}
/* sum + pairs of pairs. */
INLINE v8i add_pairs(v8i sum, __m256i pairs) {
    return sum + (v8i)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
INLINE v8i dot_of_4(v8i sum, __m256i x, v8i codes) {
    return add_pairs(sum, _mm256_maddubs_epi16((__m256i)codes, x));
}
/* |w| times x with the sign of w: |w| is at most 128 and |x| 127, so two stay below 2^15. */
INLINE v8i dot_of_8(v8i sum, __m256i x, v8i codes) {
    __m256i w = _mm256_xor_si256((__m256i)codes, _mm256_set1_epi8((char)0x80));
    return add_pairs(sum, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
}
INLINE v16i v_dot_codes4(v16i sum, const void *steps, v16i codes) {
    __m256i four = _mm256_set1_epi32((int)load_unit(steps));
    return (v16i){dot_of_4(sum.a, four, codes.a), dot_of_4(sum.b, four, codes.b)};
}
INLINE v16i v_dot_codes8(v16i sum, const void *steps, v16i codes) {
    __m256i four = _mm256_set1_epi32((int)load_unit(steps));
    return (v16i){dot_of_8(sum.a, four, codes.a), dot_of_8(sum.b, four, codes.b)};
}
INLINE __m256 dot_bfloat8(__m256 sum, uint32_t x, __m256 w) {
    __m256i pairs = _mm256_castps_si256(w), high = _mm256_set1_epi32((int)0xffff0000);
    __m256 second = _mm256_castsi256_ps(_mm256_and_si256(pairs, high));
    __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    sum = _mm256_fmadd_ps(_mm256_set1_ps(second_of(x)), second, sum);
    return _mm256_fmadd_ps(_mm256_set1_ps(first_of(x)), first, sum);
}
INLINE v16 v_dot_bfloat(v16 sum, const void *x, v16 w) {
    uint32_t pair = load_unit(x);
    return (v16){dot_bfloat8(sum.a, pair, w.a), dot_bfloat8(sum.b, pair, w.b)};
}

#else

#define CODES8_ZERO 0
#define FLUSHES 0
typedef union { uint32_t x[LANES]; uint8_t codes[4 * LANES]; } v16i;
INLINE v16i v_ints(int32_t x) {
    v16i r;
    for (int i = 0; i < LANES; i++) r.x[i] = (uint32_t)x;
    return r;
}
INLINE v16 v_of_ints(v16i x) { V_EACH((float)(int32_t)x.x[i]); }
INLINE v16i v_load_codes8(const void *p) { v16i r; memcpy(&r, p, sizeof r); return r; }
INLINE v16i v_load_codes4(const void *p, int high) {
    v16i r = v_load_codes8(p);
    for (int i = 0; i < 4 * LANES; i++) r.codes[i] = high ? r.codes[i] >> 4 : r.codes[i] & 15;
    return r;
}
INLINE v16i v_dot_codes8(v16i sum, const void *steps, v16i w) {
    const int8_t *x = steps;
    for (int i = 0; i < 4 * LANES; i++) sum.x[i / 4] += (uint32_t)(x[i % 4] * w.codes[i]);
    return sum;
}
#define v_dot_codes4 v_dot_codes8
INLINE v16 v_dot_bfloat(v16 sum, const void *x, v16 w) {
    uint32_t pair = load_unit(x);
    V_EACH(dot_of_pairs(sum.x[i], pair, bits_of(w.x[i])));
}

#endif

/* ---- Functions ---- */

/* e^x: x = n ln 2 + r, a polynomial in r times 2^n. Relative error below 1.5e-7; 0 below -86.5
 * and infinity above 88.3, where 2^n would leave the normal range; exp(0) is 1. */
INLINE v16 v_exp(v16 x) {
    const v16 magic = v_all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    v16 t = v_fma(x, v_all(1.44269504f), magic);
    v16 n = v_sub(t, magic);
    v16 r = v_fma(n, v_all(-0.693145752f), x);
    r = v_fma(n, v_all(-1.42860677e-06f), r);
    v16 p = v_all(0.00138146001f);
    p = v_fma(p, r, v_all(0.00836871541f));
    p = v_fma(p, r, v_all(0.0416683879f));
    p = v_fma(p, r, v_all(0.166665206f));
    p = v_fma(p, r, v_all(0.499999934f));
    p = v_fma(p, r, v_all(1.0f));
    p = v_fma(p, r, v_all(1.0f));
    p = v_exponent(p, t);
    p = v_add(p, v_sub(x, x)); /* NaN stays NaN */
    p = v_less(v_all(88.3f), x, v_all(INFINITY), p);
    return v_less(x, v_all(-86.5f), v_all(0.0f), p);
}

INLINE float exp_of(float x) {
    float lanes[LANES];
    v_store(lanes, v_exp(v_all(x)));
    return lanes[0];
}

/* tanh x: an odd polynomial where 1 - 2 / (e^2x + 1) would cancel. */
INLINE v16 v_tanh(v16 x) {
    v16 e = v_exp(v_add(x, x));
    v16 far = v_sub(v_all(1.0f), v_div(v_all(2.0f), v_add(e, v_all(1.0f))));
    v16 square = v_mul(x, x);
    v16 p = v_all(-0.00570499038f);
    p = v_fma(p, square, v_all(0.0206390906f));
    p = v_fma(p, square, v_all(-0.0537397163f));
    p = v_fma(p, square, v_all(0.133314422f));
    p = v_fma(p, square, v_all(-0.333332819f));
    v16 near = v_fma(v_mul(p, square), x, x);
    return v_less(square, v_all(0.39f), near, far);
}
