/* AMX: matrices of up to 16 rows of 64 bytes in eight registers. Only where tm_use_tiles has found them; a thread sets their shapes before
it uses them and releases them afterwards. By the names of the instructions: a library for AVX-512 runs with and without them. */
#ifndef TM_TILES_H
#define TM_TILES_H

#include <stdint.h>

#if defined(__AVX512VNNI__) && __has_include(<amxtileintrin.h>) /* the compiler's assembler knows them */
#define HAS_TILES 1

typedef struct {
    uint8_t palette, start_row, nothing[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_shapes;

#define tiles_begin(shapes) __asm__ volatile("ldtilecfg %0" ::"m"(*(shapes)))
#define tiles_end() __asm__ volatile("tilerelease")
#define tile_zero(t) __asm__ volatile("tilezero %%tmm" #t :::)
#define tile_load(t, from, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t ::"r"(from), "r"((long)(stride)) : "memory")
#define tile_store(to, stride, t) __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
/* sums += x * y: x [row][k], y [k / 4][column][4] (bytes) or [k / 2][column][2] (bfloat16) */
#define tile_dot_signed_unsigned(sums, x, y) __asm__ volatile("tdpbsud %%tmm" #y ", %%tmm" #x ", %%tmm" #sums :::)
#define tile_dot_signed(sums, x, y) __asm__ volatile("tdpbssd %%tmm" #y ", %%tmm" #x ", %%tmm" #sums :::)
#define tile_dot_bf16(sums, x, y) __asm__ volatile("tdpbf16ps %%tmm" #y ", %%tmm" #x ", %%tmm" #sums :::)
#endif

extern int has_tiles; /* whether this processor has them and the system lets this process use them */

#endif
