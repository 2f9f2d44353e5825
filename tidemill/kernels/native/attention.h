/* The layout of keys and values in pages, for the files that write and read them. */
#ifndef TM_ATTENTION_H
#define TM_ATTENTION_H

#include <math.h>
#include <stddef.h>

#include "simd.h"
#include "tidemill.h"

#define MAX_TILE_ROWS 192
#define LOG2_E 1.44269504f
#define TINY 1e-30f        /* a row without a larger value is zero; as in kv_cache.py */

TM_INLINE long row_bytes(long dim, int format) {
    static const int bits[] = {32, 16, 16, 8, 4, 4, 3};
    return dim * bits[format] / 8;
}

/* Values that a layer makes of a token. */
TM_INLINE long qkv_width(const tm_layer *l) { return (l->num_heads + l->num_stored) * l->head_dim + l->num_values * l->value_dim; }

TM_INLINE f32x8 load(const char *row, long i, int format) {
    if (format == TM_KV_F16) return f32x8_load_f16((const uint16_t *)row + i);
    return format == TM_KV_BF16 ? f32x8_load_bf16((const uint16_t *)row + i) : f32x8_load((const float *)row + i);
}

TM_INLINE long place_of(const tm_places *w, long position) { return position < w->base ? position : w->path[position - w->base]; }

/* Positions first .. first + num - 1 of a request, in its pages: where each one's numbers lie. */
static inline void find_rows(const tm_step *s, long dim, const char *cache, const tm_places *w, long head, long first, long num, const char **rows) {
    long num_bytes = row_bytes(dim, (int)s->kv_format), shift = __builtin_ctzl(s->page_size); /* a power of two */
    for (long i = 0; i < num;) {
        long position = place_of(w, first + i), offset = position & (s->page_size - 1);
        long left = first + i >= w->base ? 1 : w->base - first < num ? w->base - first - i : num - i;
        long run = s->page_size - offset < left ? s->page_size - offset : left;
        const char *row = cache + w->pages[position >> shift] * s->page_bytes + ((head << shift) + offset) * num_bytes;
        for (long end = i + run; i < end; i++, row += num_bytes) rows[i] = row;
    }
}

/* A scale of a page, of a head's token; in four bits the offset follows. */
TM_INLINE uint16_t *scale_at(const tm_step *s, const char *scales, long page, long head, long offset) {
    return (uint16_t *)(scales + page * s->page_bytes) + ((head * s->page_size + offset) << (s->kv_format == TM_KV_INT4));
}

/* The largest magnitude of `num` values, a multiple of 8; 0 if it is tiny, NaN if a value is not finite. */
TM_INLINE float magnitude(const float *x, long num) {
    f32x8 top = f32x8_set(0), bad = f32x8_set(0);
    for (long i = 0; i < num; i += 8) {
        f32x8 value = f32x8_load(x + i);
        top = f32x8_max(top, f32x8_abs(value));
        bad = f32x8_fma(bad, value, f32x8_set(0));
    }
    float nothing = f32x8_sum(bad), most = f32x8_maximum(top);
    return nothing != 0 ? NAN : most < TINY ? 0 : most;
}

/* The same positions of keys and values, of which the hardware does not know that they come next: pages lie anywhere. */
static inline void prefetch(const tm_step *s, const tm_layer *l, const tm_attention_job *j, const int32_t *pages, long head, long first, long num) {
    long key_bytes = row_bytes(l->head_dim, (int)s->kv_format), value_bytes = row_bytes(l->value_row, (int)s->kv_format);
    long most = key_bytes > value_bytes ? key_bytes : value_bytes, shift = __builtin_ctzl(s->page_size);
    for (long i = 0; i < num;) {
        long position = first + i, offset = position & (s->page_size - 1), run = s->page_size - offset < num - i ? s->page_size - offset : num - i;
        long page = pages[position >> shift], row = (head << shift) + offset;
        const char *keys = j->keys + page * s->page_bytes + row * key_bytes, *values = j->values + page * s->page_bytes + row * value_bytes;
        for (long line = 0; line < run * most; line += 64) {
            __builtin_prefetch(keys + line);
            __builtin_prefetch(values + line);
        }
        if (l->key_scales) {
            __builtin_prefetch(scale_at(s, l->key_scales, page, head, offset));
            __builtin_prefetch(scale_at(s, l->value_scales, page, head, offset));
        }
        i += run;
    }
}

/* softcap * tanh(score / softcap), of `num` scores. */
static inline void cap(float *scores, long num, float softcap) {
    f32x8 one = f32x8_set(1), two = f32x8_set(2);
    for (long i = 0; i < num; i += 8) {
        f32x8 power = f32x8_exp(f32x8_mul1(f32x8_load(scores + i), 2 / softcap)); /* infinite at most: then tanh is 1 */
        f32x8_store(scores + i, f32x8_mul1(f32x8_sub(one, f32x8_div(two, f32x8_add(power, one))), softcap));
    }
}

/* Whether a value of keys `from` .. num - 1 is not finite: 0 times it is not 0. */
static inline int has_broken(const char *const *values, long from, long num, long dim, int format) {
    f32x8 sum = f32x8_set(0);
    for (long k = from > 0 ? from : 0; k < num; k++)
        for (long i = 0; i < dim; i += 8) sum = f32x8_fma(sum, load(values[k], i, format), f32x8_set(0));
    return f32x8_sum(sum) != 0;
}

/* Whether a token chose a KV head with its query heads. A score that is no number counts as one that did. */
TM_INLINE int is_chosen(const tm_attention_job *j, long token, long head) {
    return !j->chosen || !(j->chosen[token * j->layer->num_kv_heads + head] <= 0);
}

/* attention_tiles.c: as attention_tile, of layers that tiles_serve. */
int tiles_serve(const tm_step *step, const tm_layer *layer);
long tiles_scratch_bytes(long dim);
void attend_with_tiles(const tm_attention_job *j, long first_token, long len, long start, long end, const tm_places *where, long head, void *scratch);

#endif
