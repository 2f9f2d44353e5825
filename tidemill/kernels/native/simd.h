/* Vectors on NEON and on AVX2, named by element and count: f32x8, i32x8, u8x32, i8x16. Everything else is built on these.

A u8x32 is 32 bytes of weights: i32x8_dot reads them as signed, i32x8_dot_unsigned as unsigned.

Each function rounds every lane the same way, so a value never depends on the lane or the tile it was computed in. */
#ifndef TM_SIMD_H
#define TM_SIMD_H

#include <stdint.h>
#include <string.h>

#define TM_INLINE static inline __attribute__((always_inline))

#if defined(__aarch64__)
#include <arm_neon.h>

#define HAS_QUADS 1 /* linear_neon.h */
typedef struct { float32x4_t a, b; } f32x8;
typedef struct { int32x4_t a, b; } i32x8;
typedef struct { int8x16_t a, b; } u8x32;

TM_INLINE f32x8 f32x8_load(const float *p) { return (f32x8){vld1q_f32(p), vld1q_f32(p + 4)}; }
TM_INLINE void f32x8_store(float *p, f32x8 x) { vst1q_f32(p, x.a); vst1q_f32(p + 4, x.b); }
TM_INLINE f32x8 f32x8_set(float x) { return (f32x8){vdupq_n_f32(x), vdupq_n_f32(x)}; }
TM_INLINE f32x8 f32x8_add(f32x8 x, f32x8 y) { return (f32x8){vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
TM_INLINE f32x8 f32x8_sub(f32x8 x, f32x8 y) { return (f32x8){vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
TM_INLINE f32x8 f32x8_mul(f32x8 x, f32x8 y) { return (f32x8){vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
TM_INLINE f32x8 f32x8_div(f32x8 x, f32x8 y) { return (f32x8){vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
TM_INLINE f32x8 f32x8_max(f32x8 x, f32x8 y) { return (f32x8){vmaxq_f32(x.a, y.a), vmaxq_f32(x.b, y.b)}; }
TM_INLINE f32x8 f32x8_min(f32x8 x, f32x8 y) { return (f32x8){vminq_f32(x.a, y.a), vminq_f32(x.b, y.b)}; }
TM_INLINE f32x8 f32x8_abs(f32x8 x) { return (f32x8){vabsq_f32(x.a), vabsq_f32(x.b)}; }
TM_INLINE f32x8 f32x8_fma(f32x8 acc, f32x8 x, f32x8 y) { return (f32x8){vfmaq_f32(acc.a, x.a, y.a), vfmaq_f32(acc.b, x.b, y.b)}; }
TM_INLINE f32x8 f32x8_fma1(f32x8 acc, f32x8 x, float y) { return (f32x8){vfmaq_n_f32(acc.a, x.a, y), vfmaq_n_f32(acc.b, x.b, y)}; }
TM_INLINE f32x8 f32x8_mul1(f32x8 x, float y) { return (f32x8){vmulq_n_f32(x.a, y), vmulq_n_f32(x.b, y)}; }
TM_INLINE f32x8 f32x8_zero_below(f32x8 x, f32x8 y, float limit) { /* x where y >= limit, else 0 */
    uint32x4_t a = vcgeq_f32(y.a, vdupq_n_f32(limit)), b = vcgeq_f32(y.b, vdupq_n_f32(limit));
    return (f32x8){vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x.a), a)), vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x.b), b))};
}
TM_INLINE float f32x8_sum(f32x8 x) { return vaddvq_f32(vaddq_f32(x.a, x.b)); }
TM_INLINE float f32x8_maximum(f32x8 x) { return vmaxvq_f32(vmaxq_f32(x.a, x.b)); }
TM_INLINE f32x8 f32x8_round(f32x8 x) { return (f32x8){vrndnq_f32(x.a), vrndnq_f32(x.b)}; }
TM_INLINE i32x8 f32x8_to_i32x8(f32x8 x) { return (i32x8){vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)}; }
TM_INLINE f32x8 f32x8_ldexp(f32x8 x, i32x8 n) { /* x * 2^n, no overflow of the exponent */
    return (f32x8){vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x.a), vshlq_n_s32(n.a, 23))),
                vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x.b), vshlq_n_s32(n.b, 23)))};
}
/* x = mantissa * 2^exponent, the mantissa between the square roots of 1/2 and 2. */
TM_INLINE float32x4_t tm_split(float32x4_t x, float32x4_t *exponent) {
    int32x4_t bits = vreinterpretq_s32_f32(x), n = vshrq_n_s32(vsubq_s32(bits, vdupq_n_s32(0x3f3504f3)), 23);
    *exponent = vcvtq_f32_s32(n);
    return vreinterpretq_f32_s32(vsubq_s32(bits, vshlq_n_s32(n, 23)));
}
TM_INLINE f32x8 f32x8_split(f32x8 x, f32x8 *exponent) { return (f32x8){tm_split(x.a, &exponent->a), tm_split(x.b, &exponent->b)}; }
TM_INLINE float32x4_t tm_exp2_scale(float32x4_t p, float32x4_t t) { /* p * 2^n, n in the low bits of t */
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vreinterpretq_s32_f32(t), 23)));
}
TM_INLINE f32x8 f32x8_exp2_scale(f32x8 p, f32x8 t) { return (f32x8){tm_exp2_scale(p.a, t.a), tm_exp2_scale(p.b, t.b)}; }
TM_INLINE f32x8 f32x8_load_f16(const uint16_t *p) {
    float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return (f32x8){vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
}
/* bfloat16 is the upper half of a float: interleaving with zeros is four times as fast here as the conversion of a float16. */
TM_INLINE f32x8 f32x8_load_bf16(const uint16_t *p) {
    uint16x8_t h = vld1q_u16(p), zero = vdupq_n_u16(0);
    return (f32x8){vreinterpretq_f32_u16(vzip1q_u16(zero, h)), vreinterpretq_f32_u16(vzip2q_u16(zero, h))};
}
/* Sixteen numbers in bfloat16, looked up by eight indices. */
typedef uint8x16x2_t f32x8_table; /* lower bytes, upper bytes */
TM_INLINE f32x8_table f32x8_table_load(const uint16_t *p) { return vld2q_u8((const uint8_t *)p); }
TM_INLINE f32x8 f32x8_look_up(f32x8_table table, const uint8_t *indices) {
    uint8x8_t index = vld1_u8(indices);
    uint8x8x2_t both = vzip_u8(vqtbl1_u8(table.val[0], index), vqtbl1_u8(table.val[1], index));
    uint16x8_t h = vreinterpretq_u16_u8(vcombine_u8(both.val[0], both.val[1])), zero = vdupq_n_u16(0);
    return (f32x8){vreinterpretq_f32_u16(vzip1q_u16(zero, h)), vreinterpretq_f32_u16(vzip2q_u16(zero, h))};
}
TM_INLINE uint32x4_t tm_round_bf16(float32x4_t x) { /* to nearest, ties to even, in the upper half */
    uint32x4_t bits = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
}
TM_INLINE void f32x8_store_bf16(uint16_t *p, f32x8 x) {
    vst1q_u16(p, vuzp2q_u16(vreinterpretq_u16_u32(tm_round_bf16(x.a)), vreinterpretq_u16_u32(tm_round_bf16(x.b))));
}

/* The sums of four accumulators' lanes, side by side, from two pairs of them. */
typedef float32x4_t f32x8_pair;
TM_INLINE f32x8_pair f32x8_sum2(f32x8 x, f32x8 y) { return vpaddq_f32(vaddq_f32(x.a, x.b), vaddq_f32(y.a, y.b)); }
TM_INLINE void f32x8_store_sums(float *p, f32x8_pair x, f32x8_pair y) { vst1q_f32(p, vpaddq_f32(x, y)); }
TM_INLINE void f32x8_store_two_sums(float *p, f32x8_pair x) { vst1_f32(p, vget_low_f32(vpaddq_f32(x, x))); }

/* Sums that start from 1.5 * 2^23's bits are, read as a float, 1.5 * 2^23 + sum: one subtraction instead of a conversion, which
   takes four times as long here. Good for sums below 2^22. The bits are loaded each time: a copy of a register would take a slot of
   the units that multiply. */
static const int32_t tm_start[8] = {0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000, 0x4B400000};
TM_INLINE i32x8 i32x8_start(void) {
    i32x8 start;
    __asm__ volatile("ldp %q0, %q1, [%2]" : "=w"(start.a), "=w"(start.b) : "r"(tm_start), "m"(tm_start));
    return start;
}
TM_INLINE f32x8 i32x8_finish(i32x8 x) {
    float32x4_t start = vdupq_n_f32(12582912.0f);
    return (f32x8){vsubq_f32(vreinterpretq_f32_s32(x.a), start), vsubq_f32(vreinterpretq_f32_s32(x.b), start)};
}
/* Four values, each used as a factor of all lanes; f is a constant. */
typedef float32x4_t f32x4;
TM_INLINE f32x4 f32x4_load(const float *p) { return vld1q_f32(p); }
#define f32x8_fma_lane(acc, x, y, f) ((f32x8){vfmaq_laneq_f32((acc).a, (x).a, y, f), vfmaq_laneq_f32((acc).b, (x).b, y, f)})
TM_INLINE u8x32 u8x32_load(const void *p) { return (u8x32){vld1q_s8(p), vld1q_s8((const int8_t *)p + 16)}; }
TM_INLINE void u8x32_store(void *p, u8x32 x) { vst1q_s8(p, x.a); vst1q_s8((int8_t *)p + 16, x.b); }
TM_INLINE u8x32 u8x32_low(u8x32 x) {
    int8x16_t mask = vdupq_n_s8(15);
    return (u8x32){vandq_s8(x.a, mask), vandq_s8(x.b, mask)};
}
/* A byte's halves as signed numbers, sixteen times as large. */
TM_INLINE u8x32 u8x32_low_by_16(u8x32 x) { return (u8x32){vshlq_n_s8(x.a, 4), vshlq_n_s8(x.b, 4)}; }
TM_INLINE u8x32 u8x32_high_by_16(u8x32 x) {
    int8x16_t mask = vdupq_n_s8(-16);
    return (u8x32){vandq_s8(x.a, mask), vandq_s8(x.b, mask)};
}
TM_INLINE u8x32 u8x32_look_up(const int8_t table[16], u8x32 x) { /* of indices 0 .. 15 */
    int8x16_t t = vld1q_s8(table);
    return (u8x32){vqtbl1q_s8(t, vreinterpretq_u8_s8(x.a)), vqtbl1q_s8(t, vreinterpretq_u8_s8(x.b))};
}
TM_INLINE u8x32 u8x32_high(u8x32 x) {
    return (u8x32){vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x.a), 4)),
                 vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x.b), 4))};
}
/* Codes of two bits. */
TM_INLINE u8x32 u8x32_mask(u8x32 x, int bits) { return (u8x32){vandq_s8(x.a, vdupq_n_s8((int8_t)bits)), vandq_s8(x.b, vdupq_n_s8((int8_t)bits))}; }
TM_INLINE u8x32 u8x32_shift_2(u8x32 x) {
    return (u8x32){vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x.a), 2)), vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x.b), 2))};
}
TM_INLINE u8x32 u8x32_shift_6(u8x32 x) {
    return (u8x32){vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x.a), 6)), vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(x.b), 6))};
}
TM_INLINE u8x32 u8x32_flip_top(u8x32 x) { return (u8x32){veorq_s8(x.a, vdupq_n_s8(-128)), veorq_s8(x.b, vdupq_n_s8(-128))}; }
TM_INLINE i32x8 i32x8_set(int32_t x) { return (i32x8){vdupq_n_s32(x), vdupq_n_s32(x)}; }
TM_INLINE i32x8 i32x8_sub(i32x8 x, i32x8 y) { return (i32x8){vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b)}; }
#define i32x8_shift_right(x, n) ((i32x8){vshrq_n_s32((x).a, n), vshrq_n_s32((x).b, n)})
TM_INLINE f32x8 i32x8_to_f32x8(i32x8 x) { return (f32x8){vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b)}; }
/* Sixteen activations, used four at a time. Lane n of a dot: weights 4n .. 4n+3 by activations 4f .. 4f+3; f is a constant. */
typedef int8x16_t i8x16;
TM_INLINE i8x16 i8x16_load(const int8_t *p) { return vld1q_s8(p); }
#define i32x8_dot(acc, w, x, f) ((i32x8){vdotq_laneq_s32((acc).a, (w).a, x, f), vdotq_laneq_s32((acc).b, (w).b, x, f)})
#define i32x8_dot_unsigned i32x8_dot /* codes 0 .. 15 fit either way */
/* The four 2-bit fields of each byte by the same activations, the top bit flipped: dots[i] takes the fields up to i together, which costs
   three masks for four products; fields_finish takes them apart. `sum`: of the activations. */
#define fields_dot(dots, w, x, f)                                      \
    {                                                                  \
        (dots)[0] = i32x8_dot((dots)[0], u8x32_mask(w, 3), x, f);      \
        (dots)[1] = i32x8_dot((dots)[1], u8x32_mask(w, 15), x, f);     \
        (dots)[2] = i32x8_dot((dots)[2], u8x32_mask(w, 63), x, f);     \
        (dots)[3] = i32x8_dot((dots)[3], w, x, f);                     \
    }
TM_INLINE void fields_finish(i32x8 dots[4], int32_t sum) {
    dots[3] = i32x8_shift_right(i32x8_sub((i32x8){vaddq_s32(dots[3].a, vdupq_n_s32(128 * sum)), vaddq_s32(dots[3].b, vdupq_n_s32(128 * sum))}, dots[2]), 6);
    dots[2] = i32x8_shift_right(i32x8_sub(dots[2], dots[1]), 4);
    dots[1] = i32x8_shift_right(i32x8_sub(dots[1], dots[0]), 2);
}
/* Codes of 4 bits, four columns of eight rows in 16 bytes: rows 0 to 3 in the lower halves, 8 more than their values, rows 4 to 7 in the upper
   ones, whose values are multiplied sixteen times as large. The upper rows' sums are taken together with the lower rows', which saves a mask,
   and less them at the end. Sums start from what makes that difference, and the lower sums, whole numbers in a float, as i32x8_start does;
   the product with a factor of 22 bits then takes off 1.5 * 2^23 without another rounding. */
typedef struct { int32_t low[4], both[4]; float less[4]; } halves_start;
TM_INLINE void halves_prepare(halves_start *to, float factor, int32_t sum) { /* of the activations, and what they are multiplied by */
    int32x4_t low = vdupq_n_s32(0x4B400000 - 8 * sum);
    vst1q_s32(to->low, low);
    vst1q_s32(to->both, vaddq_s32(low, vdupq_n_s32(0x4B400000)));
    vst1q_f32(to->less, vdupq_n_f32(-12582912.0f * factor));
}
TM_INLINE i32x8 halves_begin(const halves_start *start) { return (i32x8){vld1q_s32(start->low), vld1q_s32(start->both)}; }
#define halves_dot(acc, lower, both, x, f) ((i32x8){vdotq_laneq_s32((acc).a, lower, x, f), vdotq_laneq_s32((acc).b, both, x, f)})
typedef int8x16_t halves;
TM_INLINE halves halves_load(const void *p) { return vld1q_s8(p); }
TM_INLINE halves halves_lower(halves x) { return vandq_s8(x, vdupq_n_s8(15)); }
TM_INLINE u8x32 halves_unpack(halves x) { return (u8x32){vsubq_s8(halves_lower(x), vdupq_n_s8(8)), vandq_s8(x, vdupq_n_s8(-16))}; }
TM_INLINE f32x8 halves_finish(i32x8 sums, const halves_start *start, float factor) { /* sums * factor */
    float32x4_t less; /* loaded twice, not copied, as in i32x8_start */
    __asm__ volatile("ldr %q0, [%1]" : "=w"(less) : "r"(start->less), "m"(start->less));
    return (f32x8){vfmaq_n_f32(less, vreinterpretq_f32_s32(sums.a), factor),
                   vfmaq_n_f32(vld1q_f32(start->less), vreinterpretq_f32_s32(vsubq_s32(sums.b, sums.a)), factor)};
}
TM_INLINE void i32x8_store_bytes(int8_t *p, i32x8 x) { vst1_s8(p, vqmovn_s16(vcombine_s16(vqmovn_s32(x.a), vqmovn_s32(x.b)))); }
TM_INLINE int32_t i32x8_sum(i32x8 x) { return vaddvq_s32(vaddq_s32(x.a, x.b)); }
TM_INLINE i32x8 i32x8_add(i32x8 x, i32x8 y) { return (i32x8){vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)}; }
TM_INLINE void f32x8_store_f16(uint16_t *p, f32x8 x) { vst1q_u16(p, vreinterpretq_u16_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b))); }

/* Codes of eight bits by factors of 15 bits, in whole numbers (kv_codes.h). Here a factor is two bytes, 128 * upper + lower, which are
   multiplied one after the other. */
#define FACTOR_PARTS 2
typedef int8_t code_factor, value_code;
typedef u8x32 codes32, factors32, codes8x4; /* 8x4: of eight dimensions, four keys each */
typedef i8x16 factors16;
typedef int32x4_t code_sum; /* of all its lanes */
#define codes32_load u8x32_load
#define factors32_load u8x32_load
#define codes8x4_load u8x32_load
#define factors16_load i8x16_load
#define codes8x4_dot i32x8_dot
TM_INLINE code_sum code_sum_zero(void) { return vdupq_n_s32(0); }
TM_INLINE code_sum code_sum_dot(code_sum acc, codes32 x, factors32 y) { return vdotq_s32(vdotq_s32(acc, x.a, y.a), x.b, y.b); }
TM_INLINE code_sum code_sum_next_part(code_sum x) { return vshlq_n_s32(x, 7); }
TM_INLINE void code_sums_store(float *p, code_sum a, code_sum b, code_sum c, code_sum d) {
    vst1q_f32(p, vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d))));
}
TM_INLINE void factors_store(code_factor *p, long stride, f32x8 x, float by) { /* eight, x * by rounded; `stride`: from part to part */
    f32x8 sum = f32x8_fma1(f32x8_set(12582912.0f), x, by); /* 1.5 * 2^23: rounds to a whole number, in the low bits */
    int16x8_t words = vuzp1q_s16(vreinterpretq_s16_f32(sum.a), vreinterpretq_s16_f32(sum.b));
    vst1_s8(p, vshrn_n_s16(words, 7));
    vst1_s8(p + stride, vmovn_s16(vandq_s16(words, vdupq_n_s16(127))));
}
TM_INLINE void values_store(value_code *p, const int8_t *const rows[4], long i) { /* sixteen dimensions of four rows */
    int8x16_t a = vld1q_s8(rows[0] + i), b = vld1q_s8(rows[1] + i), c = vld1q_s8(rows[2] + i), d = vld1q_s8(rows[3] + i);
    int8x16_t ac = vzip1q_s8(a, c), bd = vzip1q_s8(b, d), ac_high = vzip2q_s8(a, c), bd_high = vzip2q_s8(b, d);
    vst1q_s8(p, vzip1q_s8(ac, bd));
    vst1q_s8(p + 16, vzip2q_s8(ac, bd));
    vst1q_s8(p + 32, vzip1q_s8(ac_high, bd_high));
    vst1q_s8(p + 48, vzip2q_s8(ac_high, bd_high));
}
TM_INLINE void tm_pause(void) { __asm__ volatile("isb" ::: "memory"); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

typedef __m256 f32x8;
typedef __m256i i32x8;
typedef __m256i u8x32;

TM_INLINE f32x8 f32x8_load(const float *p) { return _mm256_loadu_ps(p); }
TM_INLINE void f32x8_store(float *p, f32x8 x) { _mm256_storeu_ps(p, x); }
TM_INLINE f32x8 f32x8_set(float x) { return _mm256_set1_ps(x); }
TM_INLINE f32x8 f32x8_add(f32x8 x, f32x8 y) { return _mm256_add_ps(x, y); }
TM_INLINE f32x8 f32x8_sub(f32x8 x, f32x8 y) { return _mm256_sub_ps(x, y); }
TM_INLINE f32x8 f32x8_mul(f32x8 x, f32x8 y) { return _mm256_mul_ps(x, y); }
TM_INLINE f32x8 f32x8_div(f32x8 x, f32x8 y) { return _mm256_div_ps(x, y); }
TM_INLINE f32x8 f32x8_max(f32x8 x, f32x8 y) { return _mm256_max_ps(x, y); }
TM_INLINE f32x8 f32x8_min(f32x8 x, f32x8 y) { return _mm256_min_ps(x, y); }
TM_INLINE f32x8 f32x8_abs(f32x8 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
TM_INLINE f32x8 f32x8_fma(f32x8 acc, f32x8 x, f32x8 y) { return _mm256_fmadd_ps(x, y, acc); }
TM_INLINE f32x8 f32x8_fma1(f32x8 acc, f32x8 x, float y) { return _mm256_fmadd_ps(x, _mm256_set1_ps(y), acc); }
TM_INLINE f32x8 f32x8_mul1(f32x8 x, float y) { return _mm256_mul_ps(x, _mm256_set1_ps(y)); }
TM_INLINE f32x8 f32x8_zero_below(f32x8 x, f32x8 y, float limit) { return _mm256_and_ps(x, _mm256_cmp_ps(y, _mm256_set1_ps(limit), _CMP_GE_OQ)); }
TM_INLINE float f32x8_sum(f32x8 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
TM_INLINE float f32x8_maximum(f32x8 x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
TM_INLINE f32x8 f32x8_round(f32x8 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
TM_INLINE i32x8 f32x8_to_i32x8(f32x8 x) { return _mm256_cvtps_epi32(x); }
TM_INLINE f32x8 f32x8_ldexp(f32x8 x, i32x8 n) { return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_slli_epi32(n, 23))); }
TM_INLINE f32x8 f32x8_split(f32x8 x, f32x8 *exponent) {
    __m256i bits = _mm256_castps_si256(x), n = _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x3f3504f3)), 23);
    *exponent = _mm256_cvtepi32_ps(n);
    return _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(n, 23)));
}
TM_INLINE f32x8 f32x8_exp2_scale(f32x8 p, f32x8 t) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23)));
}
TM_INLINE f32x8 f32x8_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
TM_INLINE f32x8 f32x8_load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
typedef struct { __m256 a, b; } f32x8_table;
TM_INLINE f32x8_table f32x8_table_load(const uint16_t *p) { return (f32x8_table){f32x8_load_bf16(p), f32x8_load_bf16(p + 8)}; }
TM_INLINE f32x8 f32x8_look_up(f32x8_table table, const uint8_t *indices) {
    __m256i index = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)indices));
    __m256 is_upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.a, index), _mm256_permutevar8x32_ps(table.b, index), is_upper);
}
TM_INLINE void f32x8_store_bf16(uint16_t *p, f32x8 x) {
    __m256i bits = _mm256_castps_si256(x), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}
typedef __m256 f32x8_pair;
TM_INLINE f32x8_pair f32x8_sum2(f32x8 x, f32x8 y) { return _mm256_hadd_ps(x, y); }
TM_INLINE void f32x8_store_sums(float *p, f32x8_pair x, f32x8_pair y) {
    __m256 sums = _mm256_hadd_ps(x, y);
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
TM_INLINE void f32x8_store_two_sums(float *p, f32x8_pair x) {
    __m256 sums = _mm256_hadd_ps(x, x);
    _mm_storel_pi((__m64 *)p, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
}
/* Rows to columns. */
TM_INLINE void f32x8_transpose(f32x8 x[8]) {
    f32x8 y[8], z[8];
    for (int i = 0; i < 8; i += 2) y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]), y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    for (int i = 0; i < 8; i++) /* pairs of columns of four rows */
        z[i] = i & 1 ? _mm256_shuffle_ps(y[i / 4 * 4 + (i >> 1 & 1)], y[i / 4 * 4 + (i >> 1 & 1) + 2], 0xee)
                     : _mm256_shuffle_ps(y[i / 4 * 4 + (i >> 1 & 1)], y[i / 4 * 4 + (i >> 1 & 1) + 2], 0x44);
    for (int i = 0; i < 4; i++) x[i] = _mm256_permute2f128_ps(z[i], z[i + 4], 0x20), x[i + 4] = _mm256_permute2f128_ps(z[i], z[i + 4], 0x31);
}

TM_INLINE i32x8 i32x8_start(void) { return _mm256_setzero_si256(); }
TM_INLINE f32x8 i32x8_finish(i32x8 x) { return _mm256_cvtepi32_ps(x); }
typedef const float *f32x4;
TM_INLINE f32x4 f32x4_load(const float *p) { return p; }
TM_INLINE f32x8 f32x8_fma_lane(f32x8 acc, f32x8 x, f32x4 y, int f) { return _mm256_fmadd_ps(x, _mm256_broadcast_ss(y + f), acc); }
TM_INLINE u8x32 u8x32_load(const void *p) { return _mm256_loadu_si256(p); }
TM_INLINE void u8x32_store(void *p, u8x32 x) { _mm256_storeu_si256(p, x); }
TM_INLINE u8x32 u8x32_low(u8x32 x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
TM_INLINE u8x32 u8x32_high(u8x32 x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
TM_INLINE u8x32 u8x32_low_by_16(u8x32 x) { return _mm256_and_si256(_mm256_slli_epi16(x, 4), _mm256_set1_epi8(-16)); }
TM_INLINE u8x32 u8x32_high_by_16(u8x32 x) { return _mm256_and_si256(x, _mm256_set1_epi8(-16)); }
TM_INLINE u8x32 u8x32_look_up(const int8_t table[16], u8x32 x) { /* of indices 0 .. 15 */
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table)), x);
}
TM_INLINE u8x32 u8x32_mask(u8x32 x, int bits) { return _mm256_and_si256(x, _mm256_set1_epi8((char)bits)); }
TM_INLINE u8x32 u8x32_shift_2(u8x32 x) { return _mm256_srli_epi16(x, 2); } /* with bits of the next byte, which a mask takes off */
TM_INLINE u8x32 u8x32_shift_6(u8x32 x) { return _mm256_and_si256(_mm256_srli_epi16(x, 6), _mm256_set1_epi8(3)); }
TM_INLINE i32x8 i32x8_set(int32_t x) { return _mm256_set1_epi32(x); }
TM_INLINE u8x32 u8x32_flip_top(u8x32 x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }
TM_INLINE i32x8 i32x8_shift_right(i32x8 x, int n) { return _mm256_srai_epi32(x, n); }
TM_INLINE f32x8 i32x8_to_f32x8(i32x8 x) { return _mm256_cvtepi32_ps(x); }
typedef const int8_t *i8x16;
TM_INLINE i8x16 i8x16_load(const int8_t *p) { return p; }
TM_INLINE __m256i i8x16_four(i8x16 x, int f) {
    int32_t four;
    memcpy(&four, x + 4 * f, 4);
    return _mm256_set1_epi32(four);
}
TM_INLINE i32x8 i32x8_dot_mixed(i32x8 acc, __m256i u, __m256i s) { /* unsigned by signed bytes */
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(acc, u, s);
#else /* products of at most 128 * 127: their pairs fit 16 bits */
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
#endif
}
TM_INLINE i32x8 i32x8_dot_unsigned(i32x8 acc, u8x32 w, i8x16 x, int f) { return i32x8_dot_mixed(acc, w, i8x16_four(x, f)); }
TM_INLINE i32x8 i32x8_dot(i32x8 acc, u8x32 w, i8x16 x, int f) {
    return i32x8_dot_mixed(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(i8x16_four(x, f), w));
}
/* The four 2-bit fields of each byte by the same activations, the top bit flipped: here field by field, as pairs of products of larger
   codes do not fit 16 bits. */
#define fields_dot(dots, w, x, f)                                                           \
    {                                                                                       \
        (dots)[0] = i32x8_dot_unsigned((dots)[0], u8x32_mask(w, 3), x, f);                  \
        (dots)[1] = i32x8_dot_unsigned((dots)[1], u8x32_mask(w, 12), x, f);                 \
        (dots)[2] = i32x8_dot_unsigned((dots)[2], u8x32_mask(w, 48), x, f);                 \
        (dots)[3] = i32x8_dot_unsigned((dots)[3], u8x32_shift_6(u8x32_flip_top(w)), x, f);  \
    }
TM_INLINE void fields_finish(i32x8 dots[4], int32_t sum) {
    (void)sum;
    dots[1] = i32x8_shift_right(dots[1], 2);
    dots[2] = i32x8_shift_right(dots[2], 4);
}
/* Signed bytes by signed ones in one instruction: 128 larger they are unsigned, and sums start from what that adds. Without the
   instruction, pairs of such products do not fit 16 bits. */
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define HAS_RAISED 1
#else
#define HAS_RAISED 0
#endif
/* 4-bit codes in halves of bytes, as above. Here signed bytes are made of them. */
typedef struct { int32_t raised; } halves_start;
typedef __m128i halves;
TM_INLINE void halves_prepare(halves_start *to, float factor, int32_t sum) { (void)factor, to->raised = -128 * sum; }
TM_INLINE i32x8 halves_begin(const halves_start *start) { return (void)start, _mm256_setzero_si256(); }
TM_INLINE halves halves_load(const void *p) { return _mm_loadu_si128(p); }
TM_INLINE halves halves_lower(halves x) { return _mm_sub_epi8(_mm_and_si128(x, _mm_set1_epi8(15)), _mm_set1_epi8(8)); }
TM_INLINE u8x32 halves_unpack(halves x) { return _mm256_set_m128i(_mm_and_si128(x, _mm_set1_epi8(-16)), halves_lower(x)); }
#define halves_dot(acc, lower, both, x, f) i32x8_dot(acc, _mm256_set_m128i(_mm_and_si128(both, _mm_set1_epi8(-16)), lower), x, f)
TM_INLINE f32x8 halves_finish(i32x8 sums, const halves_start *start, float factor) { return (void)start, f32x8_mul1(_mm256_cvtepi32_ps(sums), factor); }
TM_INLINE void i32x8_store_bytes(int8_t *p, i32x8 x) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
TM_INLINE int32_t i32x8_sum(i32x8 x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
TM_INLINE i32x8 i32x8_add(i32x8 x, i32x8 y) { return _mm256_add_epi32(x, y); }
TM_INLINE void f32x8_store_f16(uint16_t *p, f32x8 x) { _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT)); }

/* Here a factor is one number of 16 bits, and codes are widened to as many. */
#define FACTOR_PARTS 1
typedef int16_t code_factor, value_code;
typedef struct { __m256i a, b; } codes32;
typedef codes32 factors32, codes8x4;
typedef const int16_t *factors16;
typedef __m256i code_sum;
TM_INLINE codes32 codes32_load(const void *p) {
    const __m128i *from = p;
    return (codes32){_mm256_cvtepi8_epi16(_mm_loadu_si128(from)), _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1))};
}
TM_INLINE factors32 factors32_load(const code_factor *p) {
    return (factors32){_mm256_loadu_si256((const __m256i *)p), _mm256_loadu_si256((const __m256i *)p + 1)};
}
#define codes8x4_load factors32_load
TM_INLINE factors16 factors16_load(const code_factor *p) { return p; }
TM_INLINE __m256i tm_dot_words(__m256i acc, __m256i x, __m256i y) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpwssd_epi32(acc, x, y);
#else
    return _mm256_add_epi32(acc, _mm256_madd_epi16(x, y));
#endif
}
TM_INLINE __m256i tm_two_words(const int16_t *p) {
    int32_t two;
    memcpy(&two, p, 4);
    return _mm256_set1_epi32(two);
}
TM_INLINE i32x8 codes8x4_dot(i32x8 acc, codes8x4 x, factors16 y, int f) {
    return tm_dot_words(tm_dot_words(acc, x.a, tm_two_words(y + 4 * f)), x.b, tm_two_words(y + 4 * f + 2));
}
TM_INLINE code_sum code_sum_zero(void) { return _mm256_setzero_si256(); }
TM_INLINE code_sum code_sum_dot(code_sum acc, codes32 x, factors32 y) { return tm_dot_words(tm_dot_words(acc, x.a, y.a), x.b, y.b); }
TM_INLINE code_sum code_sum_next_part(code_sum x) { return x; }
TM_INLINE void code_sums_store(float *p, code_sum a, code_sum b, code_sum c, code_sum d) {
    __m256i sums = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    _mm_storeu_ps(p, _mm_cvtepi32_ps(_mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1))));
}
TM_INLINE void factors_store(code_factor *p, long stride, f32x8 value, float by) {
    i32x8 x = f32x8_to_i32x8(f32x8_mul1(value, by));
    (void)stride;
    _mm_storeu_si128((__m128i *)p, _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
}
TM_INLINE __m256i tm_two_rows(const int8_t *a, const int8_t *b) { /* eight dimensions, side by side */
    return _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)a), _mm_loadl_epi64((const __m128i *)b)));
}
TM_INLINE void values_store(value_code *p, const int8_t *const rows[4], long i) {
    for (int half = 0; half < 2; half++, p += 32, i += 8) {
        _mm256_storeu_si256((__m256i *)p, tm_two_rows(rows[0] + i, rows[1] + i));
        _mm256_storeu_si256((__m256i *)p + 1, tm_two_rows(rows[2] + i, rows[3] + i));
    }
}
TM_INLINE void tm_pause(void) { _mm_pause(); }

#else
#error "no vector instructions known here; the engine runs without this library"
#endif

/* The widest vector: 16 lanes with AVX-512, else 8. */
#if defined(__AVX512F__)
typedef __m512 f32x16;
TM_INLINE f32x16 f32x16_load(const float *p) { return _mm512_loadu_ps(p); }
TM_INLINE void f32x16_store(float *p, f32x16 x) { _mm512_storeu_ps(p, x); }
TM_INLINE f32x16 f32x16_set(float x) { return _mm512_set1_ps(x); }
TM_INLINE f32x16 f32x16_add(f32x16 x, f32x16 y) { return _mm512_add_ps(x, y); }
TM_INLINE f32x16 f32x16_sub(f32x16 x, f32x16 y) { return _mm512_sub_ps(x, y); }
TM_INLINE f32x16 f32x16_fma(f32x16 acc, f32x16 x, f32x16 y) { return _mm512_fmadd_ps(x, y, acc); }
TM_INLINE f32x16 f32x16_fma_lane(f32x16 acc, f32x16 x, f32x4 y, int f) { return _mm512_fmadd_ps(x, _mm512_set1_ps(y[f]), acc); }
TM_INLINE f32x16 f32x16_zero_below(f32x16 x, f32x16 y, float limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(y, _mm512_set1_ps(limit), _CMP_GE_OQ), x);
}
TM_INLINE f32x16 f32x16_exp2_scale(f32x16 p, f32x16 t) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23)));
}
TM_INLINE f32x16 f32x16_mul1(f32x16 x, float y) { return _mm512_mul_ps(x, _mm512_set1_ps(y)); }
TM_INLINE f32x16 f32x16_fma1(f32x16 acc, f32x16 x, float y) { return _mm512_fmadd_ps(x, _mm512_set1_ps(y), acc); }
TM_INLINE f32x8 f32x16_half(f32x16 x, int upper) {
    return upper ? _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)) : _mm512_castps512_ps256(x);
}
#if defined(__AVX512VNNI__)
#define HAS_PAIRS 1 /* of panels, by vectors of 16 */
typedef __m512i i32x16, u8x64;
TM_INLINE u8x64 u8x64_load(const void *p) { return _mm512_loadu_si512(p); }
TM_INLINE i32x16 i32x16_load(const int32_t *p) { return _mm512_loadu_si512(p); }
TM_INLINE i32x16 i32x16_set(int32_t x) { return _mm512_set1_epi32(x); }
TM_INLINE u8x64 u8x64_flip_top(u8x64 x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
TM_INLINE u8x64 u8x64_of(const void *low, const void *high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(low)), _mm256_loadu_si256(high), 1);
}
TM_INLINE u8x64 u8x64_mask(u8x64 x, int bits) { return _mm512_and_si512(x, _mm512_set1_epi8((char)bits)); }
TM_INLINE u8x64 u8x64_shift_left_4(u8x64 x) { return _mm512_slli_epi16(x, 4); } /* with bits of the byte before, which a mask takes off */
TM_INLINE u8x64 u8x64_shift_right_4(u8x64 x) { return _mm512_srli_epi16(x, 4); }
TM_INLINE u8x64 u8x64_table(const int8_t table[16]) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table)); }
TM_INLINE u8x64 u8x64_look_up(u8x64 table, u8x64 x) { return _mm512_shuffle_epi8(table, x); } /* of indices 0 .. 15 */
TM_INLINE i32x16 i32x16_dot_unsigned(i32x16 acc, u8x64 w, i8x16 x, int f) {
    int32_t four;
    memcpy(&four, x + 4 * f, 4);
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}
TM_INLINE f32x16 i32x16_to_f32x16(i32x16 x) { return _mm512_cvtepi32_ps(x); }
TM_INLINE f32x16 f32x16_load_f16(const uint16_t *low, const uint16_t *high) {
    return _mm512_cvtph_ps(_mm256_set_m128i(_mm_loadu_si128((const __m128i *)high), _mm_loadu_si128((const __m128i *)low)));
}
TM_INLINE f32x16 f32x16_of(f32x8 low, f32x8 high) {
    return _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(low)), _mm256_castps_pd(high), 1));
}
#endif
/* Its eights of lanes, one after the other. */
TM_INLINE f32x8 f32x16_add_to(f32x8 sum, f32x16 x) {
    return f32x8_add(f32x8_add(sum, f32x16_half(x, 0)), f32x16_half(x, 1));
}
typedef f32x16 wide;
#define WIDE 16
#define wide_(op) f32x16_##op
#else
#define f32x8_add_to f32x8_add
typedef f32x8 wide;
#define WIDE 8
#define wide_(op) f32x8_##op
#endif

/* log x of a positive normal number, to about 2 units in the last place. */
TM_INLINE f32x8 f32x8_log(f32x8 x) {
    f32x8 exponent, m = f32x8_split(x, &exponent), one = f32x8_set(1);
    f32x8 s = f32x8_div(f32x8_sub(m, one), f32x8_add(m, one)), s2 = f32x8_mul(s, s); /* log m = 2 (s + s^3 / 3 + s^5 / 5 + ...) */
    f32x8 p = f32x8_fma(f32x8_set(0.2857142857f), s2, f32x8_set(0.2222222222f));
    p = f32x8_mul(f32x8_fma(f32x8_set(0.6666666667f), s2, f32x8_fma(f32x8_set(0.4f), s2, p)), s2);
    return f32x8_fma(f32x8_fma(f32x8_fma(f32x8_mul(exponent, f32x8_set(1.42860677e-6f)), s, p), exponent, f32x8_set(0.693145752f)), s, f32x8_set(2.0f));
}

/* e^x to about 2 units in the last place; below -87 the result is the smallest normal number or 0. */
TM_INLINE f32x8 f32x8_exp(f32x8 x) {
    x = f32x8_max(f32x8_set(-87.0f), f32x8_min(f32x8_set(88.0f), x)); /* x last: on x86, too, a NaN stays one */
    f32x8 n = f32x8_round(f32x8_mul(x, f32x8_set(1.44269504f)));
    f32x8 r = f32x8_fma(f32x8_fma(x, n, f32x8_set(-0.693359375f)), n, f32x8_set(2.12194440e-4f));
    f32x8 p = f32x8_set(1.9875691500e-4f);
    p = f32x8_fma(f32x8_set(1.3981999507e-3f), p, r);
    p = f32x8_fma(f32x8_set(8.3334519073e-3f), p, r);
    p = f32x8_fma(f32x8_set(4.1665795894e-2f), p, r);
    p = f32x8_fma(f32x8_set(1.6666665459e-1f), p, r);
    p = f32x8_fma(f32x8_set(5.0000001201e-1f), p, r);
    p = f32x8_add(f32x8_fma(r, p, f32x8_mul(r, r)), f32x8_set(1.0f));
    return f32x8_ldexp(p, f32x8_to_i32x8(n));
}

/* 2^x of x <= 0, to about 2 units in the last place; 0 below -115, of minus infinity and of a NaN. */
#define TM_EXP2_NEGATIVE(v)                                                                            \
    TM_INLINE v v##_exp2_negative(v x) {                                                               \
        v t = v##_add(x, v##_set(12582912.0f)); /* 1.5 * 2^23: rounds x to an integer, in the low bits */ \
        v r = v##_sub(x, v##_sub(t, v##_set(12582912.0f)));                                            \
        v p = v##_fma(v##_set(9.6715128e-3f), v##_set(1.3264727e-3f), r);                              \
        p = v##_fma(v##_set(5.5507337e-2f), p, r);                                                     \
        p = v##_fma(v##_set(2.4022242e-1f), p, r);                                                     \
        p = v##_fma(v##_set(6.9314698e-1f), p, r);                                                     \
        p = v##_fma(v##_set(1.0f), p, r);                                                              \
        return v##_zero_below(v##_exp2_scale(p, t), x, -115.0f);                                       \
    }
TM_EXP2_NEGATIVE(f32x8)
#if defined(__AVX512F__)
TM_EXP2_NEGATIVE(f32x16)
#endif

static inline float exp1(float x) {
    float lanes[8] = {x};
    f32x8_store(lanes, f32x8_exp(f32x8_load(lanes)));
    return lanes[0];
}

#endif
