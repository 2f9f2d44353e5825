/* KVQuant: keys and values as codes of non-uniform levels (kernels/kvquant.py says how, and is the reference).

Keys lie in the cache as they are before rotation. A block of them is dequantized and rotated in a thread's own memory, where attention.c
reads it; nothing else is kept dequantized. */
#include <float.h>
#include <math.h>
#include <stddef.h>

#include "simd.h"
#include "tidemill.h"

#define MAX_DIM 1024 /* as in native_attention.py */

static uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return x == x ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}
static float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* ---- into the cache, bit for bit as the reference */

static void put_codes(const float *z, const float *bounds, long bits, long dim, uint8_t *to) {
    int32_t codes[MAX_DIM] = {0};
    for (long b = 0; b < (1 << bits) - 1; b++) {
        float bound = bounds[b];
        for (long i = 0; i < dim; i++) codes[i] += z[i] > bound;
    }
    if (bits == 4) {
        for (long i = 0; i < dim / 2; i++) to[i] = codes[i] | codes[dim / 2 + i] << 4;
        return;
    }
    long quarter = dim / 4, eighth = dim / 8;
    for (long i = 0; i < quarter; i++) {
        int byte = 0;
        for (long k = 0; k < 4; k++) byte |= (codes[k * quarter + i] & 3) << (2 * k);
        to[i] = byte;
    }
    for (long i = 0; i < eighth; i++) {
        int byte = 0;
        for (long k = 0; k < 8; k++) byte |= (codes[k * eighth + i] >> 2) << k;
        to[quarter + i] = byte;
    }
}

static void put_key(const tm_kvquant *quant, long channel, const float *x, long dim, uint8_t *codes, uint16_t *extra) {
    const float *offsets = quant->offsets + channel, *factors = quant->factors + channel;
    float z[MAX_DIM];
    for (long i = 0; i < dim; i++) z[i] = (x[i] - offsets[i]) * factors[i];
    put_codes(z, quant->key_bounds, quant->bits, dim, codes);
    for (int slot = 0; slot < 2; slot++) { /* of what is farthest from its channel's middle */
        float most = -1;
        long at = 0;
        for (long i = 0; i < dim; i++) {
            float far = fabsf(z[i]) <= FLT_MAX ? fabsf(z[i]) : INFINITY; /* what is not a number comes first */
            if (far > most && (slot == 0 || i != extra[2])) {
                most = far;
                at = i;
            }
        }
        extra[slot] = to_bf16(x[at]);
        extra[2 + slot] = (uint16_t)at;
    }
}

static void put_value(const tm_kvquant *quant, const float *x, long dim, uint8_t *codes, uint16_t *extra) {
    long top = 0, low = 0;
    float nothing = 0, next_top = -INFINITY, next_low = INFINITY, z[MAX_DIM];
    for (long i = 0; i < dim; i++) {
        nothing += x[i] * 0;
        if (x[i] > x[top]) top = i;
        if (x[i] < x[low]) low = i;
    }
    for (long i = 0; i < dim; i++) {
        if (i != top && x[i] > next_top) next_top = x[i];
        if (i != low && x[i] < next_low) next_low = x[i];
    }
    int is_top = next_top - x[low] <= x[top] - next_low; /* the outlier is the one without which the range is smaller */
    long place = is_top ? top : low;
    float least = is_top ? x[low] : next_low, most = is_top ? next_top : x[top];
    uint16_t stored = to_bf16((most - least) * 0.5f);
    float scale = from_bf16(stored), offset = from_bf16(to_bf16((most + least) * 0.5f));
    if (scale < 1e-30f) scale = stored = 0;
    float factor = scale > 0 ? 1 / scale : 0;
    for (long i = 0; i < dim; i++) z[i] = (x[i] - offset) * factor;
    put_codes(z, quant->value_bounds, quant->bits, dim, codes);
    extra[0] = nothing == 0 ? stored : 0x7fc0; /* a value that is not finite makes the row NaN */
    extra[1] = to_bf16(offset);
    extra[2] = to_bf16(x[place]);
    extra[3] = (uint16_t)place;
}

/* Four 16-bit numbers of a head's token. */
TM_INLINE uint16_t *extra_at(const tm_step *s, const char *extras, long page, long head, long offset) {
    return (uint16_t *)(extras + page * s->page_bytes) + 4 * (head * s->page_size + offset);
}

/* Which constants a key has: of position 0, or of all others. */
TM_INLINE long channel_of(const tm_layer *l, long head, long position) {
    return ((position > 0) * l->num_kv_heads + head) * l->head_dim;
}

void kvquant_put(const tm_step *s, const tm_layer *l, char *keys, char *values, long page, long head, long offset, long position,
                 const float *key, const float *value) {
    long dim = l->head_dim, at = page * s->page_bytes + (head * s->page_size + offset) * (dim * l->quant->bits / 8);
    put_key(l->quant, channel_of(l, head, position), key, dim, (uint8_t *)keys + at, extra_at(s, l->key_scales, page, head, offset));
    put_value(l->quant, value, dim, (uint8_t *)values + at, extra_at(s, l->value_scales, page, head, offset));
}

/* ---- out of it */

static void unpack(const uint8_t *restrict row, long bits, long dim, uint8_t *restrict codes) {
    if (bits == 4) {
        for (long i = 0; i < dim / 2; i++) codes[i] = row[i] & 15;
        for (long i = 0; i < dim / 2; i++) codes[dim / 2 + i] = row[i] >> 4;
        return;
    }
    long quarter = dim / 4, eighth = dim / 8;
    for (long k = 0; k < 4; k++)
        for (long i = 0; i < quarter; i++) codes[k * quarter + i] = (row[i] >> (2 * k)) & 3;
    for (long k = 0; k < 8; k++)
        for (long i = 0; i < eighth; i++) codes[k * eighth + i] |= ((row[quarter + i] >> k) & 1) << 2;
}

static void rotate(float *restrict first, float *restrict second, const float *restrict cos, const float *restrict sin, long half) {
    for (long i = 0; i < half; i++) {
        float x = first[i], y = second[i];
        first[i] = x * cos[i] - y * sin[i];
        second[i] = y * cos[i] + x * sin[i];
    }
}

static void take_key(const tm_layer *l, const char *row, const uint16_t *extra, long head, long position, f32x8_table levels, float *to) {
    const tm_kvquant *quant = l->quant;
    long dim = l->head_dim, half = l->num_rotated / 2, channel = channel_of(l, head, position);
    const float *scales = quant->scales + channel, *offsets = quant->offsets + channel;
    uint8_t codes[MAX_DIM];
    unpack((const uint8_t *)row, quant->bits, dim, codes);
    for (long i = 0; i < dim; i += 8)
        f32x8_store(to + i, f32x8_fma(f32x8_load(offsets + i), f32x8_look_up(levels, codes + i), f32x8_load(scales + i)));
    for (int slot = 0; slot < 2; slot++)
        if (extra[2 + slot] < dim) to[extra[2 + slot]] = from_bf16(extra[slot]);
    if (half) rotate(to, to + half, l->cos + position * half, l->sin + position * half, half);
}

static void take_value(const tm_layer *l, const char *row, const uint16_t *extra, f32x8_table levels, float *to) {
    long dim = l->head_dim;
    f32x8 scale = f32x8_set(from_bf16(extra[0])), offset = f32x8_set(from_bf16(extra[1]));
    uint8_t codes[MAX_DIM];
    unpack((const uint8_t *)row, l->quant->bits, dim, codes);
    for (long i = 0; i < dim; i += 8) f32x8_store(to + i, f32x8_fma(offset, f32x8_look_up(levels, codes + i), scale));
    if (extra[3] < dim) to[extra[3]] = from_bf16(extra[2]);
}

void kvquant_take(const tm_layer *l, long head, long first, long num, const char **keys, const char **values,
                  const char *const *key_extras, const char *const *value_extras, long num_rows, float *to) {
    f32x8_table key_levels = f32x8_table_load(l->quant->key_levels), value_levels = f32x8_table_load(l->quant->value_levels);
    float *value = to + num_rows * l->head_dim;
    for (long i = 0; i < num; i++, to += l->head_dim, value += l->head_dim) {
        take_key(l, keys[i], (const uint16_t *)key_extras[i], head, first + i, key_levels, to);
        take_value(l, values[i], (const uint16_t *)value_extras[i], value_levels, value);
        keys[i] = (const char *)to;
        values[i] = (const char *)value;
    }
    for (long i = num; i < num_rows; i++) {
        keys[i] = keys[num - 1];
        values[i] = values[num - 1];
    }
}
