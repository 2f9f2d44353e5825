/* Layers with a state of constant size: convolution and recurrence over states in pages (kernels/state.py has the formulas).

Tokens of a sequence are computed one after the other, always by the same operations: how a sequence is cut into steps changes no
bit. Work is shared out by sequences and channels, or sequences and heads. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "simd.h"
#include "tidemill.h"

enum { MAMBA, MAMBA2, DELTA };
enum { ROW, TOKEN, COUNT, SOURCE, TARGET, FIELDS }; /* of a segment */

#define CHANNELS 256 /* of a task */
#define MAX_KEPT 15
#define SERIAL_VALUES 8192 /* a second thread takes longer to start than these take */
#define UNIT_EPS 1e-6f

static float *piece(const tm_states *s, const tm_state_layer *l, long number, long row, long block) {
    const int32_t *at = l->pieces + 2 * number;
    long page = s->tables[at[0] * s->table_stride + row * s->table_width + block];
    return (float *)(s->pool + page * s->page_bytes + at[1]);
}

TM_INLINE f32x8 sigmoid(f32x8 x) {
    f32x8 one = f32x8_set(1);
    return f32x8_div(one, f32x8_add(one, f32x8_exp(f32x8_sub(f32x8_set(0), x))));
}

TM_INLINE f32x8 silu(f32x8 x) { return f32x8_div(x, f32x8_add(f32x8_set(1), f32x8_exp(f32x8_sub(f32x8_set(0), x)))); }

/* log(1 + e^x), with what the sum rounds off added again: small values keep all their digits. */
TM_INLINE f32x8 softplus(f32x8 x) {
    f32x8 one = f32x8_set(1), power = f32x8_exp(f32x8_min(f32x8_set(20), x)), u = f32x8_add(one, power);
    f32x8 small = f32x8_add(f32x8_log(u), f32x8_div(f32x8_sub(power, f32x8_sub(u, one)), u));
    return f32x8_add(small, f32x8_max(f32x8_set(0), f32x8_sub(x, f32x8_set(20)))); /* beyond 20, e^-20 is not seen */
}

/* ---- the convolution, and silu */

typedef struct {
    const tm_states *states;
    const tm_state_layer *layer;
    const float *weight, *bias, *projected;
    float *out;
} conv_job;

static void convolve_part(void *arg, long task, int thread) {
    (void)thread;
    const conv_job *j = arg;
    const tm_states *s = j->states;
    const tm_state_layer *l = j->layer;
    long num_parts = (l->num_channels + CHANNELS - 1) / CHANNELS, chain = task / num_parts, channel = task % num_parts * CHANNELS;
    long num = l->num_channels - channel < CHANNELS ? l->num_channels - channel : CHANNELS, num_kept = l->kernel - 1;
    const int32_t *segment = s->segments + s->chains[chain] * FIELDS, *end = s->segments + s->chains[chain + 1] * FIELDS;
    long first = segment[TOKEN];
    const float *x = j->projected + first * l->num_projected + channel;
    float kept[MAX_KEPT * CHANNELS];
    for (long r = 0; r < num_kept; r++) {
        if (segment[SOURCE] < 0)
            memset(kept + r * CHANNELS, 0, num * sizeof(float));
        else
            memcpy(kept + r * CHANNELS, piece(s, l, 0, segment[ROW], segment[SOURCE]) + r * l->num_channels + channel, num * sizeof(float));
    }
    /* The channels of the token that comes `at` after the chain's first. */
#define INPUT(at) ((at) >= 0 ? x + (at) * l->num_projected : kept + ((at) + num_kept) * CHANNELS)
    for (; segment < end; segment += FIELDS) {
        long after = segment[TOKEN] + segment[COUNT] - first;
        for (long token = segment[TOKEN] - first; token < after; token++)
            for (long c = 0; c < num; c += 8) {
                f32x8 sum = j->bias ? f32x8_load(j->bias + channel + c) : f32x8_set(0);
                for (long k = 0; k < l->kernel; k++)
                    sum = f32x8_fma(sum, f32x8_load(INPUT(token - num_kept + k) + c), f32x8_load(j->weight + k * l->num_channels + channel + c));
                f32x8_store(j->out + (first + token) * l->num_channels + channel + c, silu(sum));
            }
        float *to = piece(s, l, 0, segment[ROW], segment[TARGET]) + channel;
        for (long r = 0; r < num_kept; r++) memcpy(to + r * l->num_channels, INPUT(after - num_kept + r), num * sizeof(float));
    }
#undef INPUT
}

void conv_op(const tm_states *states, const tm_state_layer *layer, const float *weight, const float *bias, const float *projected, float *out) {
    conv_job j = {states, layer, weight, bias, projected, out};
    tm_parallel(states->num_chains * ((layer->num_channels + CHANNELS - 1) / CHANNELS), 1, convolve_part, &j);
}

TM_API void tm_conv(const tm_states *states, const tm_state_layer *layer, const float *weight, const float *bias, const float *projected,
                    float *out) {
    tm_lock();
    conv_op(states, layer, weight, bias, projected, out);
    tm_unlock();
}

/* ---- the recurrence */

typedef struct {
    const tm_states *states;
    const tm_state_layer *layer;
    tm_state_learned learned;
    float *mixed;
    const float *projected, *steps, *bc;
    float *out;
} scan_job;

/* A delta rule's keys and queries to length 1, and queries scaled. */
static void unit_row(void *arg, long token, int thread) {
    (void)thread;
    const scan_job *j = arg;
    const tm_state_layer *l = j->layer;
    long size = l->state_size;
    float *x = j->mixed + token * l->num_channels + l->num_heads * l->head_dim;
    for (long part = 0; part < 2 * l->num_groups; part++, x += size) {
        f32x8 sum = f32x8_set(0);
        for (long i = 0; i < size; i += 8) sum = f32x8_fma(sum, f32x8_load(x + i), f32x8_load(x + i));
        float factor = 1.0f / sqrtf(f32x8_sum(sum) + UNIT_EPS);
        if (part >= l->num_groups) factor /= sqrtf((float)size);
        for (long i = 0; i < size; i += 8) f32x8_store(x + i, f32x8_mul1(f32x8_load(x + i), factor));
    }
}

/* One token, 8 * W columns of a head. `gain`: of what is written, the time step or the strength. */
TM_INLINE void advance(int is_delta, float *state, long dim, long size, float decay, float gain, const float *keys, const float *queries,
                       const float *values, const float *skip, float *out, const int W) {
    f32x8 value[4], sum[4];
    for (int w = 0; w < W; w++) value[w] = f32x8_load(values + 8 * w), sum[w] = f32x8_set(0);
    if (is_delta) {
        f32x8 known[4];
        for (int w = 0; w < W; w++) known[w] = f32x8_set(0);
        for (long n = 0; n < size; n++)
            for (int w = 0; w < W; w++) {
                f32x8 s = f32x8_mul1(f32x8_load(state + n * dim + 8 * w), decay);
                f32x8_store(state + n * dim + 8 * w, s);
                known[w] = f32x8_fma1(known[w], s, keys[n]);
            }
        for (int w = 0; w < W; w++) value[w] = f32x8_sub(value[w], known[w]);
        decay = 1;
    }
    for (int w = 0; w < W; w++) value[w] = f32x8_mul1(value[w], gain);
    for (long n = 0; n < size; n++)
        for (int w = 0; w < W; w++) {
            f32x8 s = f32x8_fma1(f32x8_mul1(f32x8_load(state + n * dim + 8 * w), decay), value[w], keys[n]);
            f32x8_store(state + n * dim + 8 * w, s);
            sum[w] = f32x8_fma1(sum[w], s, queries[n]);
        }
    for (int w = 0; w < W; w++) {
        if (skip) sum[w] = f32x8_fma(sum[w], f32x8_load(skip + 8 * w), f32x8_load(values + 8 * w));
        f32x8_store(out + 8 * w, sum[w]);
    }
}

static void advance_head(const scan_job *j, float *state, long head, long token) {
    const tm_state_layer *l = j->layer;
    long dim = l->head_dim, size = l->state_size, inner = l->num_heads * dim, group = head / (l->num_heads / l->num_groups);
    const float *mixed = j->mixed + token * l->num_channels, *values = mixed + head * dim;
    const float *keys = mixed + inner + group * size, *queries = keys + l->num_groups * size;
    const float *more = j->projected + token * l->num_projected + l->num_channels + inner + head;
    const float *skip = j->learned.skip ? j->learned.skip + head * dim : NULL;
    int is_delta = l->kind == DELTA;
    float lanes[8], step, decay, gain;
    f32x8 steps = softplus(f32x8_set(more[0] + j->learned.step_bias[head]));
    f32x8_store(lanes, steps), step = lanes[0];
    f32x8_store(lanes, f32x8_exp(f32x8_mul1(steps, j->learned.decay[head]))), decay = lanes[0];
    gain = step;
    if (is_delta) f32x8_store(lanes, sigmoid(f32x8_set(more[l->num_heads]))), gain = lanes[0];
    float *out = j->out + token * inner + head * dim;
    long p = 0;
    for (; p + 32 <= dim; p += 32)
        advance(is_delta, state + p, dim, size, decay, gain, keys, queries, values + p, skip ? skip + p : NULL, out + p, 4);
    for (; p < dim; p += 8)
        advance(is_delta, state + p, dim, size, decay, gain, keys, queries, values + p, skip ? skip + p : NULL, out + p, 1);
}

/* Of a mamba, each column has a time step and decays of its own. */
static void advance_channels(const scan_job *j, float *state, long head, long token) {
    const tm_state_layer *l = j->layer;
    long dim = l->head_dim, size = l->state_size, at = token * l->num_heads * dim + head * dim;
    const float *keys = j->bc + token * 2 * size, *queries = keys + size, *decays = j->learned.decay + head * size * dim;
    for (long p = 0; p < dim; p += 8) {
        f32x8 x = f32x8_load(j->mixed + at + p), step = softplus(f32x8_load(j->steps + at + p));
        f32x8 value = f32x8_mul(x, step), sum = f32x8_set(0);
        for (long n = 0; n < size; n++) {
            f32x8 decay = f32x8_exp(f32x8_mul(step, f32x8_load(decays + n * dim + p)));
            f32x8 s = f32x8_fma1(f32x8_mul(f32x8_load(state + n * dim + p), decay), value, keys[n]);
            f32x8_store(state + n * dim + p, s);
            sum = f32x8_fma1(sum, s, queries[n]);
        }
        f32x8_store(j->out + at + p, f32x8_fma(sum, f32x8_load(j->learned.skip + head * dim + p), x));
    }
}

static void scan_head(void *arg, long task, int thread) {
    const scan_job *j = arg;
    const tm_states *s = j->states;
    const tm_state_layer *l = j->layer;
    long chain = task / l->num_heads, head = task % l->num_heads, num_bytes = l->state_size * l->head_dim * (long)sizeof(float);
    const int32_t *segment = s->segments + s->chains[chain] * FIELDS, *end = s->segments + s->chains[chain + 1] * FIELDS;
    float *state = tm_scratch(thread, 1, num_bytes); /* scan_op has made sure there is */
    if (segment[SOURCE] < 0)
        memset(state, 0, num_bytes);
    else
        memcpy(state, piece(s, l, 1 + head, segment[ROW], segment[SOURCE]), num_bytes);
    for (; segment < end; segment += FIELDS) {
        for (long token = segment[TOKEN]; token < segment[TOKEN] + segment[COUNT]; token++)
            l->kind == MAMBA ? advance_channels(j, state, head, token) : advance_head(j, state, head, token);
        memcpy(piece(s, l, 1 + head, segment[ROW], segment[TARGET]), state, num_bytes);
    }
}

/* Gate and norm. */
static void finish_row(void *arg, long token, int thread) {
    (void)thread;
    const scan_job *j = arg;
    const tm_state_layer *l = j->layer;
    long inner = l->num_heads * l->head_dim;
    float *out = j->out + token * inner;
    const float *gate = j->projected + token * l->num_projected + l->num_channels, *norm = j->learned.norm;
    if (!norm || l->kind == MAMBA2)
        for (long i = 0; i < inner; i += 8) f32x8_store(out + i, f32x8_mul(f32x8_load(out + i), silu(f32x8_load(gate + i))));
    for (long first = 0; norm && first < inner; first += l->norm_size) {
        f32x8 sum = f32x8_set(0);
        for (long i = first; i < first + l->norm_size; i += 8) sum = f32x8_fma(sum, f32x8_load(out + i), f32x8_load(out + i));
        float factor = 1.0f / sqrtf(f32x8_sum(sum) / (float)l->norm_size + j->learned.eps);
        for (long i = first; i < first + l->norm_size; i += 8) {
            f32x8 v = f32x8_mul(f32x8_mul1(f32x8_load(out + i), factor), f32x8_load(norm + i));
            f32x8_store(out + i, l->kind == DELTA ? f32x8_mul(v, silu(f32x8_load(gate + i))) : v);
        }
    }
}

int scan_op(const tm_states *states, const tm_state_layer *layer, tm_state_learned learned, float *mixed, const float *projected,
            const float *steps, const float *bc, float *out) {
    scan_job j = {states, layer, learned, mixed, projected, steps, bc, out};
    long num_tokens = states->num_tokens, rows = (SERIAL_VALUES + layer->num_channels - 1) / layer->num_channels;
    for (int t = 0; t < tm_num_threads(); t++)
        if (!tm_scratch(t, 1, layer->state_size * layer->head_dim * (long)sizeof(float))) return -1;
    if (layer->kind == DELTA) tm_parallel(num_tokens, rows, unit_row, &j);
    tm_parallel(states->num_chains * layer->num_heads, 1, scan_head, &j);
    tm_parallel(num_tokens, rows, finish_row, &j);
    return 0;
}

TM_API int tm_scan(const tm_states *states, const tm_state_layer *layer, const float *decay, const float *skip, const float *step_bias,
                   const float *norm, float eps, float *mixed, const float *projected, const float *steps, const float *bc, float *out) {
    tm_lock();
    int failed = scan_op(states, layer, (tm_state_learned){decay, skip, step_bias, norm, eps}, mixed, projected, steps, bc, out);
    tm_unlock();
    return failed;
}
