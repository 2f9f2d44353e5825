/* Of unpacked codes, four rows by one panel, written as the processor is to run it.

The sums of a group become floats, are multiplied by a row's and by the panel's scales and added up: half as many operations again as
there are products. A compiler puts them behind the products, where each waits for the one before, and a Neoverse-N1 takes 61 cycles for a
group. Here the two halves of a panel, a and b, are half a group apart: while the sums of one are scaled, the other's products go on. And a
sum, which starts from 1.5 * 2^23 (i32x8_start), loses that in the multiplication by its row's scale, as in halves_finish. 48 cycles; at two
operations a cycle, 44 would do.

v0 .. 3: sums of a's four rows, v4 .. 7: b's; v8 .. 11, v12 .. 15: the lower and upper 16 columns of the rows; v16, v17: codes;
v18, v23: scaled sums; v19, v20: scales and offsets of the half; v21, v22: the rows' scales, and these times their sums; v24 .. 27,
v28 .. 31: results. */
#ifndef TM_LINEAR_NEON_H
#define TM_LINEAR_NEON_H

#define DOT(sum, w, x, f) "sdot v" #sum ".4s, v" #w ".16b, v" #x ".4b[" #f "]\n"
#define FOUR_DOTS(s0, s1, s2, s3, x0, x1, x2, x3, w, f, early, between, late)                                          \
    DOT(s0, w, x0, f) DOT(s1, w, x1, f) early between DOT(s2, w, x2, f) DOT(s3, w, x3, f) late
#define A_LOW(...) FOUR_DOTS(0, 1, 2, 3, 8, 9, 10, 11, __VA_ARGS__)
#define A_HIGH(...) FOUR_DOTS(0, 1, 2, 3, 12, 13, 14, 15, __VA_ARGS__)
#define B_LOW(...) FOUR_DOTS(4, 5, 6, 7, 8, 9, 10, 11, __VA_ARGS__)
#define B_HIGH(...) FOUR_DOTS(4, 5, 6, 7, 12, 13, 14, 15, __VA_ARGS__)

#define LOAD(v, from, at) "ldr q" #v ", [%[" #from "], #" #at "]\n"
#define CODES(v, at) LOAD(v, codes, at)
#define AHEAD(x) "prfm pldl1keep, [%[" #x "], %[ahead]]\n"
#define BEGIN(v, next) "ldp q" #v ", q" #next ", [%[start]]\n"

#define BY_ROW(to, s, r) "fmla v" #to ".4s, v" #s ".4s, v21.s[" #r "]\n"
#define BY_ROWS(s, r, at, t, q, next) LOAD(18, rows, at) LOAD(23, rows, next) BY_ROW(18, s, r) BY_ROW(23, t, q)
#define BY_SCALES(to, s) "fmla v" #to ".4s, v" #s ".4s, v19.4s\n"
#define OFFSETS(to, r) "fmla v" #to ".4s, v20.4s, v22.s[" #r "]\n"
#define NONE(...) ""

/* The upper columns of a, while b's sums of the group before are scaled; then the lower ones of b, while a's are. `more`: what the next
   group needs, if there is one. */
#define HALVES_APART(PLUS, OFFSET_LOAD, more)                                                                           \
    A_HIGH(16, 0, BY_ROWS(4, 0, -64, 5, 1, -48), CODES(17, 160), BY_SCALES(28, 18))                                     \
    A_HIGH(17, 1, BY_SCALES(29, 23) PLUS(28, 0), CODES(16, 192), PLUS(29, 1))                                           \
    A_HIGH(16, 2, BY_ROWS(6, 2, -32, 7, 3, -16), CODES(17, 224), BY_SCALES(30, 18))                                     \
    A_HIGH(17, 3, BY_SCALES(31, 23) PLUS(30, 2), CODES(16, 16), PLUS(31, 3) BEGIN(4, 5) BEGIN(6, 7)                     \
           LOAD(21, rows, 0) LOAD(19, scales, 0) OFFSET_LOAD(22, rows, 16) OFFSET_LOAD(20, scales, 32))                 \
    B_LOW(16, 0, BY_ROWS(0, 0, 32, 1, 1, 48), CODES(17, 48), BY_SCALES(24, 18))                                         \
    B_LOW(17, 1, BY_SCALES(25, 23) PLUS(24, 0), CODES(16, 80), PLUS(25, 1))                                             \
    B_LOW(16, 2, BY_ROWS(2, 2, 64, 3, 3, 80), CODES(17, 112), BY_SCALES(26, 18))                                        \
    B_LOW(17, 3, BY_SCALES(27, 23) PLUS(26, 2), CODES(16, 144), PLUS(27, 3) more)

/* HALVES_APART, then the upper columns of b and the lower ones of a in the next group; in the best order that a search found, which moved
   instructions for as long as that took fewer cycles (48 instead of 50). */
#define ONE_GROUP(PLUS, OFFSET_LOAD)                                                                                  \
    CODES(17, 160) LOAD(23, rows, -48) DOT(0, 16, 12, 0) LOAD(18, rows, -64) DOT(1, 16, 13, 0) BY_ROW(18, 4, 0)       \
    BY_ROW(23, 5, 1) DOT(2, 16, 14, 0) DOT(3, 16, 15, 0) DOT(0, 17, 12, 1) DOT(1, 17, 13, 1) BY_SCALES(29, 23)        \
    BY_SCALES(28, 18) PLUS(28, 0) DOT(2, 17, 14, 1) DOT(3, 17, 15, 1) CODES(16, 192) DOT(0, 16, 12, 2)                \
    DOT(1, 16, 13, 2) LOAD(18, rows, -32) LOAD(23, rows, -16) BY_ROW(23, 7, 3) BY_ROW(18, 6, 2) LOAD(21, rows, 0)     \
    DOT(2, 16, 14, 2) DOT(3, 16, 15, 2) BY_SCALES(30, 18) PLUS(29, 1) CODES(17, 224) DOT(1, 17, 13, 3)                \
    DOT(0, 17, 12, 3) BY_SCALES(31, 23) PLUS(30, 2) CODES(16, 16) DOT(2, 17, 14, 3) DOT(3, 17, 15, 3) PLUS(31, 3)     \
    BEGIN(4, 5) BEGIN(6, 7) LOAD(19, scales, 0) OFFSET_LOAD(22, rows, 16) DOT(4, 16, 8, 0) DOT(5, 16, 9, 0)           \
    LOAD(23, rows, 48) LOAD(18, rows, 32) BY_ROW(18, 0, 0) BY_ROW(23, 1, 1) CODES(17, 48)                             \
    OFFSET_LOAD(20, scales, 32) DOT(6, 16, 10, 0) DOT(7, 16, 11, 0) DOT(4, 17, 8, 1) CODES(16, 80) DOT(5, 17, 9, 1)   \
    BY_SCALES(25, 23) BY_SCALES(24, 18) PLUS(24, 0) DOT(6, 17, 10, 1) DOT(7, 17, 11, 1) PLUS(25, 1) DOT(4, 16, 8, 2)  \
    DOT(5, 16, 9, 2) LOAD(18, rows, 64) LOAD(23, rows, 80) BY_ROW(18, 2, 2) BY_ROW(23, 3, 3) DOT(6, 16, 10, 2)        \
    DOT(7, 16, 11, 2) BY_SCALES(27, 23) BY_SCALES(26, 18) CODES(16, 144) CODES(17, 112) DOT(4, 17, 8, 3)              \
    DOT(5, 17, 9, 3) LOAD(9, x1, 32) PLUS(26, 2) DOT(7, 17, 11, 3) DOT(6, 17, 10, 3) CODES(17, 256)                   \
    LOAD(19, scales, 16) PLUS(27, 3) BEGIN(0, 1) DOT(5, 16, 13, 0) DOT(6, 16, 14, 0) DOT(7, 16, 15, 0)                \
    DOT(4, 16, 12, 0) CODES(16, 176) LOAD(8, x0, 32) LOAD(10, x2, 32) DOT(0, 17, 8, 0) DOT(1, 17, 9, 0)               \
    LOAD(11, x3, 32) BEGIN(2, 3) DOT(4, 16, 12, 1) DOT(2, 17, 10, 0) DOT(3, 17, 11, 0) OFFSET_LOAD(20, scales, 48)    \
    DOT(5, 16, 13, 1) DOT(7, 16, 15, 1) AHEAD(x0) CODES(17, 288) DOT(1, 17, 9, 1) DOT(0, 17, 8, 1) DOT(2, 17, 10, 1)  \
    DOT(6, 16, 14, 1) CODES(16, 208) DOT(7, 16, 15, 2) DOT(3, 17, 11, 1) DOT(4, 16, 12, 2) AHEAD(x1)                  \
    DOT(5, 16, 13, 2) CODES(17, 320) DOT(6, 16, 14, 2) CODES(16, 240) DOT(2, 17, 10, 2) DOT(3, 17, 11, 2)             \
    DOT(0, 17, 8, 2) DOT(4, 16, 12, 3) LOAD(12, x0, 48) DOT(5, 16, 13, 3) DOT(1, 17, 9, 2) CODES(17, 352)             \
    LOAD(13, x1, 48) AHEAD(x2) DOT(7, 16, 15, 3) LOAD(15, x3, 48) AHEAD(x3) DOT(6, 16, 14, 3) DOT(0, 17, 8, 3)        \
    LOAD(14, x2, 48) DOT(1, 17, 9, 3) CODES(16, 384) DOT(2, 17, 10, 3) DOT(3, 17, 11, 3)

/* `GROUP_BYTES`: of scales, with their offsets. */
#define FOUR_ROWS(PLUS, OFFSET_LOAD, GROUP_BYTES)                                                                       \
    "movi v24.4s, #0\n movi v25.4s, #0\n movi v26.4s, #0\n movi v27.4s, #0\n"                                            \
    "movi v28.4s, #0\n movi v29.4s, #0\n movi v30.4s, #0\n movi v31.4s, #0\n"                                            \
    "movi v19.4s, #0\n movi v20.4s, #0\n movi v21.4s, #0\n movi v22.4s, #0\n" /* of the group before the first */       \
    BEGIN(0, 1) BEGIN(2, 3) BEGIN(4, 5) BEGIN(6, 7)                                                                     \
    LOAD(8, x0, 0) LOAD(9, x1, 0) LOAD(10, x2, 0) LOAD(11, x3, 0) LOAD(12, x0, 16) LOAD(13, x1, 16) LOAD(14, x2, 16) LOAD(15, x3, 16) \
    CODES(16, 0) A_LOW(16, 0, , CODES(17, 32), ) A_LOW(17, 1, , CODES(16, 64), ) A_LOW(16, 2, , CODES(17, 96), ) A_LOW(17, 3, , CODES(16, 128), ) \
    "b 2f\n"                                                                                                            \
    "1:\n"                                                                                                              \
    ONE_GROUP(PLUS, OFFSET_LOAD)                                                                                        \
    "add %[codes], %[codes], #256\n add %[scales], %[scales], #" #GROUP_BYTES "\n add %[rows], %[rows], #96\n"          \
    "add %[x0], %[x0], #32\n add %[x1], %[x1], #32\n add %[x2], %[x2], #32\n add %[x3], %[x3], #32\n"                    \
    "2:\n subs %[num], %[num], #1\n b.gt 1b\n"                                                                          \
    HALVES_APART(PLUS, OFFSET_LOAD, )                                                                                   \
    B_HIGH(16, 0, LOAD(19, scales, 16), CODES(17, 176), ) B_HIGH(17, 1, OFFSET_LOAD(20, scales, 48), CODES(16, 208), )  \
    B_HIGH(16, 2, , CODES(17, 240), ) B_HIGH(17, 3, , , )                                                               \
    BY_ROWS(4, 0, 32, 5, 1, 48) BY_SCALES(28, 18) BY_SCALES(29, 23) PLUS(28, 0) PLUS(29, 1)                              \
    BY_ROWS(6, 2, 64, 7, 3, 80) BY_SCALES(30, 18) BY_SCALES(31, 23) PLUS(30, 2) PLUS(31, 3)                              \
    "stp q24, q28, [%[out]]\n stp q25, q29, [%[out], #32]\n stp q26, q30, [%[out], #64]\n stp q27, q31, [%[out], #96]\n"

#define RUN_FOUR_ROWS(PLUS, OFFSET_LOAD, GROUP_BYTES)                                                                   \
    __asm__ volatile(FOUR_ROWS(PLUS, OFFSET_LOAD, GROUP_BYTES)                                                          \
        : [codes] "+r"(codes), [scales] "+r"(scales), [rows] "+r"(rows), [num] "+r"(num_groups), [x0] "+r"(x0), [x1] "+r"(x1), [x2] "+r"(x2), [x3] "+r"(x3) \
        : [start] "r"(tm_start), [out] "r"(out), [ahead] "r"(ahead)                                                                             \
        : "memory", "cc", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", \
          "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31")

/* `x`: codes of four rows, so many bytes apart. `rows`: quad_of(). */
static __attribute__((noinline)) void four_rows_by_panel(int has_offsets, const uint8_t *codes, const float *scales, const int8_t *x, long stride,
                                                         const float *rows, long num_groups, f32x8 *out) {
    const int8_t *x0 = x, *x1 = x + stride, *x2 = x1 + stride, *x3 = x2 + stride;
    long ahead = stride > 4096 ? 256 : 4 * stride; /* what is fetched: these rows, or the next four while they fit beside the panel */
    if (has_offsets) RUN_FOUR_ROWS(OFFSETS, LOAD, 64);
    else RUN_FOUR_ROWS(NONE, NONE, 32);
}

#undef DOT
#undef LOAD
#undef BEGIN
#undef NONE
#endif
