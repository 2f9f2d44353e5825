/* A mixture of experts: every row goes through the experts that its logits choose, and their outputs are added by weight.

Rows are sorted by expert, so that each expert's matrices are read once, for all of its rows; an expert that no row chose is not
read. The matmuls are linear.c's, and a row's sum runs over its experts in the order of their rank: the bits of a row depend on the
row alone. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "linear.h"
#include "simd.h"
#include "tidemill.h"

#define SERIAL_VALUES 8192 /* as in rows.h */
#define TASKS_PER_THREAD 16

/* Rows as a matmul takes them: floats, and for the Q kinds bytes. */
typedef struct {
    const float *x;
    int8_t *xq;
    float *xd, *xs;
    halves_start *starts; /* NULL: no matrix has_starts */
} rows;

typedef struct {
    const tm_moe *moe;
    const float *x, *logits;
    float *out;
    long num_rows, num_pairs; /* pairs: of a row and one of its experts, and of every row and the shared expert, if any */
    int is_gathered;          /* else there is one row, which every expert reads where it lies */
    /* by [row][rank]; the shared expert's rank is the last */
    long *chosen, *place; /* expert; the pair's place in the order by experts */
    float *weights;
    /* by place */
    long *source; /* row */
    rows given, gathered, inner; /* by row; by place; by place, the second matmul's */
    float *gate_up, *products, *results;
    long *first; /* place of each expert's first pair */
    linear_job *jobs;
    long *first_task; /* of each job */
    long num_jobs;
    long *units;         /* of a stream: the experts that are used */
    const char **places; /* [expert]: where they are; NULL: no stream */
} moe_job;

static int has_shared(const tm_moe *m) { return m->shared_gate_up.codes != NULL; }
static int needs_bytes(const tm_matrices *one, const tm_matrices *other) { return one->kind >= Q8 || (other->codes && other->kind >= Q8); }
static int needs_starts(const tm_matrices *one, const tm_matrices *other) { return has_starts(one->kind) || (other->codes && has_starts(other->kind)); }

/* ---- memory: one piece, cut up */

static char *cut(char **at, long num_bytes) {
    char *piece = *at;
    *at += (num_bytes + 63) & ~63L;
    return piece;
}

static void cut_bytes(char **at, rows *r, long num_rows, long width, int with_starts) {
    r->xq = (int8_t *)cut(at, num_rows * width);
    r->xd = (float *)cut(at, num_rows * (width / GROUP) * (long)sizeof(float));
    r->xs = (float *)cut(at, num_rows * (width / GROUP) * (long)sizeof(float));
    if (with_starts) r->starts = (halves_start *)cut(at, num_rows * (width / GROUP) * (long)sizeof(halves_start));
}

/* Places of the shared expert come last, in each buffer with its own width. */
static long lay_out(moe_job *j, char *base) {
    const tm_moe *m = j->moe;
    char *at = base;
    long k = m->top_k + has_shared(m), num_rows = j->num_rows, own = num_rows * m->top_k, shared = has_shared(m) ? num_rows : 0;
    long width = m->gate_up.num_in, inner = m->down.num_in, shared_inner = m->shared_down.num_in;
    j->chosen = (long *)cut(&at, num_rows * k * (long)sizeof(long));
    j->place = (long *)cut(&at, num_rows * k * (long)sizeof(long));
    j->weights = (float *)cut(&at, num_rows * k * (long)sizeof(float));
    j->source = (long *)cut(&at, own * (long)sizeof(long));
    j->first = (long *)cut(&at, (m->num_experts + 1) * (long)sizeof(long));
    j->jobs = (linear_job *)cut(&at, (m->num_experts + 1) * (long)sizeof(linear_job));
    j->first_task = (long *)cut(&at, (m->num_experts + 2) * (long)sizeof(long));
    if (m->stream) {
        j->units = (long *)cut(&at, m->num_experts * (long)sizeof(long));
        j->places = (const char **)cut(&at, m->num_experts * (long)sizeof(char *));
    }
    if (needs_bytes(&m->gate_up, &m->shared_gate_up)) cut_bytes(&at, &j->given, num_rows, width, needs_starts(&m->gate_up, &m->shared_gate_up));
    if (j->is_gathered) {
        if (m->gate_up.kind >= Q8) cut_bytes(&at, &j->gathered, own, width, has_starts(m->gate_up.kind));
        else j->gathered.x = (float *)cut(&at, own * width * (long)sizeof(float));
    }
    j->gate_up = (float *)cut(&at, 2 * (own * inner + shared * shared_inner) * (long)sizeof(float));
    j->products = (float *)cut(&at, (own * inner + shared * shared_inner) * (long)sizeof(float));
    j->inner.x = j->products;
    if (needs_bytes(&m->down, &m->shared_down)) cut_bytes(&at, &j->inner, 1, own * inner + shared * shared_inner, needs_starts(&m->down, &m->shared_down));
    j->results = (float *)cut(&at, (own + shared) * width * (long)sizeof(float));
    return at - base;
}

/* What lies so many values further; for the Q kinds, a multiple of 32. */
static rows further(rows r, long values) {
    if (r.x) r.x += values;
    if (r.xq) r.xq += values, r.xd += values / GROUP, r.xs += values / GROUP;
    if (r.starts) r.starts += values / GROUP;
    return r;
}

/* ---- which experts, and by what weight */

/* The sum of e^(x - top), in order. */
static float sum_exp(const float *x, long num, float top) {
    float total = 0;
    for (long first = 0; first < num; first += 8) {
        float lanes[8] = {0};
        long some = num - first < 8 ? num - first : 8;
        for (long i = 0; i < some; i++) lanes[i] = x[first + i] - top;
        f32x8_store(lanes, f32x8_exp(f32x8_load(lanes)));
        for (long i = 0; i < some; i++) total += lanes[i];
    }
    return total;
}

/* The highest logit first; of equal ones the lowest number. A NaN chooses some expert, and gets a weight that is one. */
static void choose(const tm_moe *m, const float *logits, long *chosen) {
    for (long rank = 0; rank < m->top_k; rank++) {
        long best = -1;
        for (long e = 0; e < m->num_experts; e++) {
            if (best >= 0 && !(logits[e] > logits[best])) continue;
            int is_taken = 0;
            for (long r = 0; r < rank; r++) is_taken |= chosen[r] == e;
            if (!is_taken) best = e;
        }
        chosen[rank] = best;
    }
}

static void route(const tm_moe *m, const float *logits, long *chosen, float *weights) {
    choose(m, logits, chosen);
    if (has_shared(m)) weights[m->top_k] = 1 / (1 + exp1(-logits[m->num_experts]));
    if (m->is_scored) {
        for (long rank = 0; rank < m->top_k; rank++) weights[rank] = logits[chosen[rank]];
        return;
    }
    int among_chosen = m->topk_first || m->renormalise; /* which is the same: the softmax's own sum is divided out again */
    float top = logits[chosen[0]], total = among_chosen ? 0 : sum_exp(logits, m->num_experts, top);
    for (long rank = 0; rank < m->top_k; rank++) weights[rank] = exp1(logits[chosen[rank]] - top);
    for (long rank = 0; among_chosen && rank < m->top_k; rank++) total += weights[rank];
    for (long rank = 0; rank < m->top_k; rank++) weights[rank] /= total;
}

static void start_row(void *arg, long row, int thread) {
    const moe_job *j = arg;
    const tm_moe *m = j->moe;
    long k = m->top_k + has_shared(m);
    route(m, j->logits + row * (m->num_experts + has_shared(m)), j->chosen + row * k, j->weights + row * k);
    if (j->given.xq) {
        linear_job bytes = {.x = j->x, .num_in = m->gate_up.num_in, .xq = j->given.xq, .xd = j->given.xd, .xs = j->given.xs,
                             .starts = j->given.starts};
        quantize_row(&bytes, row, thread);
    }
}

/* Pairs in the order of their experts, those of one in the order of rows. */
static void sort_pairs(moe_job *j) {
    const tm_moe *m = j->moe;
    long k = m->top_k + has_shared(m), *next = j->first;
    memset(next, 0, (m->num_experts + 1) * sizeof(long));
    for (long row = 0; row < j->num_rows; row++)
        for (long rank = 0; rank < m->top_k; rank++) next[j->chosen[row * k + rank] + 1]++;
    for (long e = 0; e < m->num_experts; e++) {
        if (m->counts) m->counts[e] += next[e + 1];
        next[e + 1] += next[e];
    }
    for (long row = 0; row < j->num_rows; row++) {
        for (long rank = 0; rank < m->top_k; rank++) {
            long at = next[j->chosen[row * k + rank]]++;
            j->place[row * k + rank] = at;
            j->source[at] = row;
        }
        if (has_shared(m)) j->place[row * k + m->top_k] = j->num_rows * m->top_k + row;
    }
    for (long e = m->num_experts; e > 0; e--) next[e] = next[e - 1]; /* each now ends where the next begins: back to the firsts */
    next[0] = 0;
}

/* Reads the experts that are used, if they are in no slot. */
static int find_experts(moe_job *j) {
    const tm_moe *m = j->moe;
    if (!m->stream) return 0;
    long num = 0, own = j->num_rows * m->top_k;
    for (long e = 0; e < m->num_experts; e++)
        if ((e + 1 < m->num_experts ? j->first[e + 1] : own) > j->first[e]) j->units[num++] = m->first_unit + e;
    int failed = stream_experts(m->stream, j->units, num, j->places);
    for (long i = num - 1; i >= 0 && !failed; i--) j->places[j->units[i] - m->first_unit] = j->places[i]; /* never to the left of i */
    return failed;
}

/* Begins to read the experts that the logits of another layer's router choose. */
static void foresee(moe_job *j, const tm_moe *ahead, const float *logits) {
    const long k = ahead->top_k + has_shared(ahead);
    long num = 0, *chosen = j->chosen; /* which, as what follows, is not read any more */
    if (ahead->num_experts != j->moe->num_experts || k != j->moe->top_k + has_shared(j->moe)) return;
    memset(j->units, 0, ahead->num_experts * sizeof(long));
    for (long row = 0; row < j->num_rows; row++) {
        choose(ahead, logits + row * (ahead->num_experts + has_shared(ahead)), chosen);
        for (long rank = 0; rank < ahead->top_k; rank++) j->units[chosen[rank]] = 1;
    }
    for (long e = 0; e < ahead->num_experts; e++)
        if (j->units[e]) j->units[num++] = ahead->first_unit + e; /* never to the right of e */
    stream_ahead(ahead->stream, j->units, num);
}

static void gather_row(void *arg, long at, int thread) {
    (void)thread;
    const moe_job *j = arg;
    long width = j->moe->gate_up.num_in, groups = width / GROUP, row = j->source[at];
    if (!j->gathered.xq) {
        memcpy((float *)j->gathered.x + at * width, j->x + row * width, width * sizeof(float));
        return;
    }
    memcpy(j->gathered.xq + at * width, j->given.xq + row * width, width);
    memcpy(j->gathered.xd + at * groups, j->given.xd + row * groups, groups * sizeof(float));
    memcpy(j->gathered.xs + at * groups, j->given.xs + row * groups, groups * sizeof(float));
    if (j->gathered.starts) memcpy(j->gathered.starts + at * groups, j->given.starts + row * groups, groups * sizeof(halves_start));
}

/* ---- matmuls of all experts at once */

/* `place`: of an expert in a slot of a stream. */
static void add_job(moe_job *j, const tm_matrices *w, long expert, const char *place, rows x, long num_rows, float *out) {
    const uint16_t *scales = !w->num_scales ? NULL : place ? (const uint16_t *)(place + w->scale_place) : w->scales + expert * w->num_scales;
    j->jobs[j->num_jobs++] = (linear_job){
        .kind = (int)w->kind, .x = x.x, .codes = place ? place + w->code_place : (const char *)w->codes + expert * w->code_bytes,
        .scales = scales, .bias = w->bias ? w->bias + expert * w->num_out : NULL,
        .out = out, .num_rows = num_rows, .num_in = w->num_in, .num_out = w->num_out, .num_panels = (w->num_out + LANES - 1) / LANES,
        .xq = x.xq, .xd = x.xd, .xs = x.xs, .starts = x.starts,
    };
    linear_start(j->jobs + j->num_jobs - 1);
}

static void run_task(void *arg, long task, int thread) {
    const moe_job *j = arg;
    long low = 0, high = j->num_jobs; /* the last job that begins at or before the task */
    while (high - low > 1) {
        long middle = (low + high) / 2;
        if (j->first_task[middle] <= task) low = middle;
        else high = middle;
    }
    run_panels(j->jobs + low, task - j->first_task[low], thread);
}

static void run_jobs(moe_job *j) {
    long total = 0, num_tasks = 0;
    for (long i = 0; i < j->num_jobs; i++) total += j->jobs[i].num_panels;
    long share = total / (TASKS_PER_THREAD * tm_num_threads());
    for (long i = 0; i < j->num_jobs; i++) {
        linear_job *job = j->jobs + i;
        long most = job->num_panels / 4;
        job->panels_per_task = share < 1 || most < 1 ? 1 : share < most ? share : most;
        if (job->how && job->how->pair) job->panels_per_task += job->panels_per_task & 1; /* two go at once */
        j->first_task[i] = num_tasks;
        num_tasks += (job->num_panels + job->panels_per_task - 1) / job->panels_per_task;
    }
    tm_parallel(num_tasks, 1, run_task, j);
    j->num_jobs = 0;
}

/* First of the two matmuls, or the second. */
static void run_experts(moe_job *j, int is_second) {
    const tm_moe *m = j->moe;
    const tm_matrices *own = is_second ? &m->down : &m->gate_up, *shared = is_second ? &m->shared_down : &m->shared_gate_up;
    float *out = is_second ? j->results : j->gate_up;
    rows from = is_second ? j->inner : j->is_gathered ? j->gathered : j->given;
    for (long e = 0; e < m->num_experts; e++) {
        long first = j->first[e], num = (e + 1 < m->num_experts ? j->first[e + 1] : j->num_rows * m->top_k) - first;
        long at = is_second || j->is_gathered ? first : 0;
        if (num) add_job(j, own, e, j->places ? j->places[e] : NULL, further(from, at * own->num_in), num, out + first * own->num_out);
    }
    if (has_shared(m)) {
        long before = j->num_rows * m->top_k;
        add_job(j, shared, 0, NULL, is_second ? further(j->inner, before * m->down.num_in) : j->given, j->num_rows, out + before * own->num_out);
    }
    run_jobs(j);
}

/* ---- between them, and after */

static void activate_row(void *arg, long at, int thread) {
    const moe_job *j = arg;
    const tm_moe *m = j->moe;
    long own = j->num_rows * m->top_k, is_shared = at >= own, width = is_shared ? m->shared_down.num_in : m->down.num_in;
    long first = is_shared ? own * m->down.num_in + (at - own) * width : at * width;
    glu_values((int)m->act, j->gate_up + 2 * first, j->products + first, width);
    if ((is_shared ? m->shared_down.kind : m->down.kind) < Q8) return;
    rows r = further(j->inner, first);
    linear_job bytes = {.x = r.x, .num_in = width, .xq = r.xq, .xd = r.xd, .xs = r.xs, .starts = r.starts};
    quantize_row(&bytes, 0, thread);
}

static void combine_row(void *arg, long row, int thread) {
    (void)thread;
    const moe_job *j = arg;
    long k = j->moe->top_k + has_shared(j->moe), width = j->moe->gate_up.num_in, i = 0;
    const long *place = j->place + row * k;
    const float *weights = j->weights + row * k;
    float *out = j->out + row * width;
    for (; i + 8 <= width; i += 8) {
        f32x8 sum = f32x8_mul1(f32x8_load(j->results + place[0] * width + i), weights[0]);
        for (long r = 1; r < k; r++) sum = f32x8_fma1(sum, f32x8_load(j->results + place[r] * width + i), weights[r]);
        f32x8_store(out + i, sum);
    }
    for (; i < width; i++) {
        float sum = j->results[place[0] * width + i] * weights[0];
        for (long r = 1; r < k; r++) sum = fmaf(j->results[place[r] * width + i], weights[r], sum);
        out[i] = sum;
    }
}

static void for_rows(long num_rows, long values, tm_task task, void *arg) {
    tm_parallel(num_rows, (SERIAL_VALUES + values - 1) / values, task, arg);
}

int moe_op(const tm_moe *m, const float *x, const float *logits, const tm_moe *ahead, const float *ahead_logits, long num_rows, float *out) {
    moe_job j = {.moe = m, .x = x, .logits = logits, .out = out, .num_rows = num_rows, .is_gathered = num_rows > 1, .given.x = x};
    if (num_rows == 0) return 0;
    j.num_pairs = num_rows * (m->top_k + has_shared(m));
    char *memory = tm_scratch(0, 0, lay_out(&j, (char *)64)); /* first only its size */
    if (!memory) return -1;
    lay_out(&j, memory);
    long width = m->gate_up.num_in;
    for_rows(num_rows, 2 * width, start_row, &j);
    sort_pairs(&j);
    int failed = find_experts(&j);
    if (failed) return failed;
    if (ahead) foresee(&j, ahead, ahead_logits);
    if (j.is_gathered) for_rows(num_rows * m->top_k, width, gather_row, &j);
    run_experts(&j, 0);
    for_rows(j.num_pairs, 4 * m->down.num_in, activate_row, &j);
    run_experts(&j, 1);
    for_rows(num_rows, m->top_k * width, combine_row, &j);
    return 0;
}

TM_API int tm_run_moe(const tm_moe *moe, const float *x, const float *logits, const tm_moe *ahead, const float *ahead_logits,
                      long num_rows, float *out) {
    tm_lock();
    int failed = moe_op(moe, x, logits, ahead, ahead_logits, num_rows, out);
    tm_unlock();
    return failed;
}
