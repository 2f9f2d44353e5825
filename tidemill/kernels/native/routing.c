/* Which experts a row goes through, and by what weights, where that is no plain softmax: experts are chosen by their scores plus a bias,
among the groups with the best sums; a weight is the score without the bias. Every row is computed by itself, in one order. */
#include <math.h>

#include "rows.h"
#include "simd.h"
#include "tidemill.h"

#define MAX_EXPERTS 4096 /* of model_config.py */

typedef struct {
    const tm_routing *r;
    const float *logits;
    float *out;
} routing_job;

/* The best of `num` values at or above none of `taken`; of equal ones the first. A NaN is the best only where it is the first. */
static long best_of(const float *values, long num, const char *taken) {
    long best = -1;
    for (long i = 0; i < num; i++)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

/* Experts of groups that are left out are taken. */
static void leave_out_groups(const tm_routing *r, const float *choice, char *taken) {
    long size = r->num_experts / r->num_groups;
    float sums[MAX_EXPERTS];
    char of_groups[MAX_EXPERTS] = {0};
    for (long g = 0; g < r->num_groups; g++) {
        float total = 0;
        for (long n = 0; n < r->best_of_group && n < size; n++) {
            long best = best_of(choice + g * size, size, taken + g * size);
            total += choice[g * size + best];
            taken[g * size + best] = 1;
        }
        sums[g] = total;
    }
    for (long e = 0; e < r->num_experts; e++) taken[e] = 1;
    for (long n = 0; n < r->top_groups; n++) {
        long g = best_of(sums, r->num_groups, of_groups);
        of_groups[g] = 1;
        for (long e = g * size; e < (g + 1) * size; e++) taken[e] = 0;
    }
}

static void score_row(void *arg, long row, int thread) {
    (void)thread;
    const routing_job *j = arg;
    const tm_routing *r = j->r;
    long num = r->num_experts;
    const float *logits = j->logits + row * num;
    float *out = j->out + row * (num + r->has_shared), scores[MAX_EXPERTS], choice[MAX_EXPERTS], total = 0;
    char taken[MAX_EXPERTS] = {0};
    if (r->is_softmax) {
        float top = logits[0];
        for (long e = 1; e < num; e++) top = logits[e] > top ? logits[e] : top;
        for (long e = 0; e < num; e++) total += scores[e] = exp1(logits[e] - top);
        for (long e = 0; e < num; e++) scores[e] /= total;
    } else {
        for (long e = 0; e < num; e++) scores[e] = 1 / (1 + exp1(-logits[e]));
    }
    for (long e = 0; e < num; e++) choice[e] = scores[e] + (r->bias ? r->bias[e] : 0);
    if (r->num_groups > 1) leave_out_groups(r, choice, taken);
    for (long e = 0; e < num; e++) out[e] = -INFINITY;
    total = 0;
    for (long rank = 0; rank < r->top_k; rank++) {
        long best = best_of(choice, num, taken);
        taken[best] = 1;
        total += out[best] = scores[best];
    }
    float factor = r->renormalise ? r->scale / (total + 1e-20f) : r->scale;
    for (long e = 0; e < num; e++)
        if (out[e] != -INFINITY) out[e] *= factor;
    if (r->has_shared) out[num] = 64; /* the sigmoid of which is 1 */
}

void score_experts_op(const tm_routing *routing, const float *logits, float *out, long num_rows) {
    routing_job j = {routing, logits, out};
    for_rows(num_rows, routing->num_experts, score_row, &j);
}

TM_API void tm_score_experts(const tm_routing *routing, const float *logits, float *out, long num_rows) {
    tm_lock();
    score_experts_op(routing, logits, out, num_rows);
    tm_unlock();
}
