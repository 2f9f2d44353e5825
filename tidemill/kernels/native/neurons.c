/* A feed-forward of which only some neurons are computed: down(act(gate) * up).

A neuron's row of up and column of down lie side by side. Those that no row needs are left out: adding their zeros would change no sum,
since an output is summed over neurons in their order, one fused multiplication after the other, as in linear.c.

In a stream (stream.c), which has neurons that are used often in memory: the gate is a ReLU, which says exactly which ones are zero.
In memory, with the rows of gate beside them: a predictor says by its scores which ones a row needs; to the others' it adds nothing. So a
row's outputs depend on its own scores alone. In memory without them: the gate is computed elsewhere, on a GPU or by linear.c, and what is not
above 0 is left out. */
#include <math.h>
#include <string.h>
#include <time.h>

#include "linear.h"
#include "simd.h"
#include "tidemill.h"

#define COLUMNS 64 /* of the output that a task computes */
#define AHEAD 8 /* neurons whose column of down is fetched ahead: which come next, no prefetcher knows */
#define RELU 4 /* its number in glu.c */

typedef struct {
    const tm_neurons *n;
    const float *x, *gate; /* gate: of neurons in memory, scores */
    float *hidden, *out; /* hidden: [row][active] */
    long num_rows, num_active, *active;
    const char **places; /* of the active ones */
    char *is_active;     /* of all */
    int32_t *listed, *num_listed; /* of each row, those of the active ones that are not zero in it, and how many */
    int failed;
} neurons_job;

TM_INLINE f32x8 values_at(long kind, const char *values, long at) {
    if (kind == F32) return f32x8_load((const float *)values + at);
    if (kind == F16) return f32x8_load_f16((const uint16_t *)values + at);
    return f32x8_load_bf16((const uint16_t *)values + at);
}

/* ---- up, and the gate, of eight neurons */

/* Their rows side by side. */
static void fill_panel(const neurons_job *j, long first, long num, float *panel) {
    for (long lane = 0; lane < LANES; lane++)
        for (long k = 0; k < j->n->num_in; k += LANES) {
            float eight[LANES] = {0};
            if (lane < num) f32x8_store(eight, values_at(j->n->kind, j->places[first + lane], k));
            for (long i = 0; i < LANES; i++) panel[(k + i) * LANES + lane] = eight[i];
        }
}

static void up_task(void *arg, long task, int thread) {
    neurons_job *j = arg;
    const tm_neurons *n = j->n;
    const long first = task * LANES, num = j->num_active - first < LANES ? j->num_active - first : LANES;
    const long num_in = (n->num_in + LANES - 1) / LANES * LANES;
    float *panel = tm_scratch(thread, 1, (num_in + j->num_rows) * LANES * (long)sizeof(float)), *ups = panel + num_in * LANES;
    if (!panel) {
        j->failed = -1;
        return;
    }
    fill_panel(j, first, num, panel);
    linear_job up = {.kind = F32, .x = j->x, .codes = panel, .out = ups, .num_rows = j->num_rows, .num_in = n->num_in, .num_out = LANES,
                     .num_panels = 1, .panels_per_task = 1};
    run_panels(&up, 0, thread);
    for (long row = 0; row < j->num_rows; row++) {
        float both[2 * LANES] = {0}, products[LANES];
        for (long i = 0; i < num; i++) {
            const long neuron = j->active[first + i];
            both[i] = j->gate[row * n->num_inner + neuron];
            both[LANES + i] = ups[row * LANES + i] + (n->up_bias ? n->up_bias[neuron] : 0);
        }
        glu_values(RELU, both, products, LANES);
        memcpy(j->hidden + row * j->num_active + first, products, num * sizeof(float));
    }
}

/* ---- gate and up of neurons in memory, for the rows that chose them */

#define PAIR_ROWS 2

/* Of one neuron and `num` rows: x by its rows of gate, if it is not given, and up, each in two chains of eight sums. */
TM_INLINE void pair_dots(const tm_neurons *n, long kind, int has_gate, const char *place, const float *const *x, int num, float *gates, float *ups) {
    const char *gate = place, *up = place + n->up_place;
    f32x8 g[PAIR_ROWS][2], u[PAIR_ROWS][2];
    long k = 0;
    for (int r = 0; r < num; r++)
        for (int i = 0; i < 2; i++) g[r][i] = u[r][i] = f32x8_set(0);
    for (; k + 2 * LANES <= n->num_in; k += 2 * LANES)
        for (int i = 0; i < 2; i++) {
            f32x8 wg = has_gate ? values_at(kind, gate, k + i * LANES) : f32x8_set(0), wu = values_at(kind, up, k + i * LANES);
            for (int r = 0; r < num; r++) {
                f32x8 v = f32x8_load(x[r] + k + i * LANES);
                if (has_gate) g[r][i] = f32x8_fma(g[r][i], wg, v);
                u[r][i] = f32x8_fma(u[r][i], wu, v);
            }
        }
    for (; k < n->num_in; k += LANES)
        for (int r = 0; r < num; r++) {
            float eight[LANES] = {0};
            memcpy(eight, x[r] + k, (n->num_in - k < LANES ? n->num_in - k : LANES) * sizeof(float));
            if (has_gate) g[r][0] = f32x8_fma(g[r][0], values_at(kind, gate, k), f32x8_load(eight));
            u[r][0] = f32x8_fma(u[r][0], values_at(kind, up, k), f32x8_load(eight));
        }
    for (int r = 0; r < num; r++) {
        if (has_gate) gates[r] = f32x8_sum(f32x8_add(g[r][0], g[r][1]));
        ups[r] = f32x8_sum(f32x8_add(u[r][0], u[r][1]));
    }
}

static void pair_rows(const neurons_job *j, long a, const long *rows, int num) {
    const tm_neurons *n = j->n;
    const long neuron = j->active[a];
    const float *x[PAIR_ROWS] = {0};
    float both[2 * LANES] = {0}, products[LANES];
    for (int r = 0; r < num; r++) x[r] = j->x + rows[r] * n->num_in;
#define DOTS_OF(kind, has_gate, num) pair_dots(n, kind, has_gate, j->places[a], x, num, both, both + LANES)
#define DOTS(kind) (n->is_given ? (num == 1 ? DOTS_OF(kind, 0, 1) : DOTS_OF(kind, 0, 2)) : num == 1 ? DOTS_OF(kind, 1, 1) : DOTS_OF(kind, 1, 2))
    if (n->kind == F32) DOTS(F32);
    else if (n->kind == F16) DOTS(F16);
    else DOTS(BF16);
    for (int r = 0; r < num; r++) {
        if (n->is_given) both[r] = j->gate[rows[r] * n->num_inner + neuron];
        else both[r] += n->gate_bias ? n->gate_bias[neuron] : 0;
        both[LANES + r] += n->up_bias ? n->up_bias[neuron] : 0;
    }
    glu_values((int)n->act, both, products, LANES);
    for (int r = 0; r < num; r++) j->hidden[rows[r] * j->num_active + a] = products[r];
}

static void pair_task(void *arg, long task, int thread) {
    (void)thread;
    const neurons_job *j = arg;
    for (long a = task * LANES; a < j->num_active && a < (task + 1) * LANES; a++) {
        long rows[PAIR_ROWS];
        int num = 0;
        for (long row = 0; row < j->num_rows; row++) {
            j->hidden[row * j->num_active + a] = 0;
            if (j->gate[row * j->n->num_inner + j->active[a]] <= 0) continue;
            rows[num++] = row;
            if (num == PAIR_ROWS) pair_rows(j, a, rows, num), num = 0;
        }
        if (num) pair_rows(j, a, rows, num);
    }
}

/* ---- down: some columns of all rows, each by the neurons that are not zero in it */

/* Which ones those are. */
static void list_task(void *arg, long row, int thread) {
    (void)thread;
    neurons_job *j = arg;
    const float *hidden = j->hidden + row * j->num_active;
    int32_t *listed = j->listed + row * j->num_active, num = 0;
    for (int32_t a = 0; a < j->num_active; a++) {
        listed[num] = a;
        num += hidden[a] != 0;
    }
    j->num_listed[row] = num;
}

TM_INLINE void down_row(const neurons_job *j, long kind, long column, long row) {
    const tm_neurons *n = j->n;
    const float *hidden = j->hidden + row * j->num_active;
    const int32_t *listed = j->listed + row * j->num_active;
    const long num = j->num_listed[row], line = column * (kind == F32 ? (long)sizeof(float) : (long)sizeof(uint16_t));
    f32x8 sums[COLUMNS / LANES];
    for (int c = 0; c < COLUMNS / LANES; c++) sums[c] = f32x8_set(0);
    for (long i = 0; i < num; i++) {
        if (i + AHEAD < num) {
            const char *next = j->places[listed[i + AHEAD]] + n->down_place + line;
            for (int k = 0; k < COLUMNS * (kind == F32 ? 4 : 2); k += 64) __builtin_prefetch(next + k);
        }
        const char *values = j->places[listed[i]] + n->down_place;
        for (int c = 0; c < COLUMNS / LANES; c++) sums[c] = f32x8_fma1(sums[c], values_at(kind, values, column + c * LANES), hidden[listed[i]]);
    }
    float lanes[COLUMNS];
    for (int c = 0; c < COLUMNS / LANES; c++) f32x8_store(lanes + c * LANES, sums[c]);
    for (long i = 0; i < COLUMNS && column + i < n->num_out; i++)
        j->out[row * n->num_out + column + i] = n->down_bias ? lanes[i] + n->down_bias[column + i] : lanes[i];
}

static void down_task(void *arg, long task, int thread) {
    (void)thread;
    const neurons_job *j = arg;
    for (long row = 0; row < j->num_rows; row++)
        if (j->n->kind == F32) down_row(j, F32, task * COLUMNS, row);
        else if (j->n->kind == F16) down_row(j, F16, task * COLUMNS, row);
        else down_row(j, BF16, task * COLUMNS, row);
}

/* ---- all of it */

#define MARKS 1024 /* neurons that a task looks at */

/* Neurons that are not zero in every row. A gate or score that is no number counts as one that is not. */
static void mark_task(void *arg, long task, int thread) {
    (void)thread;
    const neurons_job *j = arg;
    const long inner = j->n->num_inner, first = task * MARKS, num = inner - first < MARKS ? inner - first : MARKS;
    char *is_active = j->is_active + first;
    memset(is_active, 0, num);
    for (long row = 0; row < j->num_rows; row++) {
        const float *gate = j->gate + row * inner + first;
        for (long i = 0; i < num; i++) is_active[i] |= !(gate[i] <= 0);
    }
}

static void count_chosen(const neurons_job *j) {
    const long num = j->num_rows * j->n->num_inner;
    int64_t chosen = 0;
    for (long i = 0; i < num; i++) chosen += !(j->gate[i] <= 0);
    *j->n->num_chosen += chosen;
}

int neurons_op(const tm_neurons *n, const float *x, const float *gate, long num_rows, float *out) {
    const long inner = n->num_inner;
    if (num_rows == 0) return 0;
    const long values = (num_rows * inner + 15) & ~15L;
    char *memory = tm_scratch(0, 0, inner * (long)(2 * sizeof(long) + sizeof(char *) + 1) + (2 * values + num_rows) * (long)sizeof(float));
    if (!memory) return -1;
    neurons_job j = {.n = n, .x = x, .gate = gate, .out = out, .num_rows = num_rows, .hidden = (float *)memory};
    j.active = (long *)(j.hidden + values);
    long *units = j.active + inner;
    j.places = (const char **)(units + inner);
    j.listed = (int32_t *)(j.places + inner);
    j.num_listed = j.listed + values;
    j.is_active = (char *)(j.num_listed + num_rows);
    tm_parallel((inner + MARKS - 1) / MARKS, num_rows < 8 ? inner : 1, mark_task, &j);
    for (long i = 0; i < inner; i++)
        if (j.is_active[i]) j.active[j.num_active++] = i;
    const long num_tasks = (j.num_active + LANES - 1) / LANES;
    if (n->memory) {
        if (n->num_chosen && n->is_given) *n->num_chosen += j.num_active;
        else if (n->num_chosen) count_chosen(&j);
        for (long i = 0; i < j.num_active; i++) j.places[i] = n->memory + j.active[i] * n->num_bytes;
        tm_parallel(num_tasks, 1, pair_task, &j);
    } else {
        for (long i = 0; i < j.num_active; i++) units[i] = n->first_unit + j.active[i];
        int failed = stream_experts(n->stream, units, j.num_active, j.places);
        if (failed) return failed;
        tm_parallel(num_tasks, 1, up_task, &j);
        if (j.failed) return j.failed;
    }
    tm_parallel(num_rows, num_rows < 8 ? num_rows : 1, list_task, &j);
    tm_parallel((n->num_out + COLUMNS - 1) / COLUMNS, 1, down_task, &j);
    return 0;
}

/* A GPU's stream calls it, from a thread of the driver. Where there is no memory, nothing is a number: the step's requests are lost, no more. */
TM_API void tm_run_host_neurons(void *arg) {
    const tm_host_neurons *h = arg;
    const tm_neurons *n = h->neurons;
    const float *x = h->given, *gate = h->gate ? h->gate : x + h->num_rows * n->num_in;
    const float all = x[h->num_rows * (n->num_in + (h->gate ? 0 : n->num_inner))];
    const long left = (long)all - h->first_row, num_rows = left < h->num_rows ? left : h->num_rows;
    struct timespec begin, end;
    if (num_rows <= 0) return;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    tm_lock();
    int failed = h->gate ? linear_op((int)n->kind, x, num_rows, n->num_in, h->gate_codes, NULL, n->gate_bias, n->num_inner, h->gate) : 0;
    if (!failed) failed = neurons_op(n, x, gate, num_rows, h->out);
    tm_unlock();
    for (long i = 0; failed && i < num_rows * n->num_out; i++) h->out[i] = NAN;
    clock_gettime(CLOCK_MONOTONIC, &end);
    *h->num_ns += (end.tv_sec - begin.tv_sec) * 1000000000L + end.tv_nsec - begin.tv_nsec;
}

TM_API int tm_run_neurons(const tm_neurons *n, const float *x, const float *gate, long num_rows, float *out) {
    tm_lock();
    int failed = neurons_op(n, x, gate, num_rows, out);
    tm_unlock();
    return failed;
}
