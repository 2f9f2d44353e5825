/* Matrices side by side, and values cut off at a limit. */
#include <string.h>

#include "rows.h"

/* ---- values cut off at a limit, in place; what is no number stays none */

typedef struct {
    float *x, limit;
    long width;
} clip_job;

static void clip_row(void *arg, long row, int thread) {
    (void)thread;
    const clip_job *j = arg;
    float *x = j->x + row * j->width;
    for (long i = 0; i < j->width; i++) x[i] = x[i] > j->limit ? j->limit : x[i] < -j->limit ? -j->limit : x[i];
}

void clip_op(float *x, float limit, long num_rows, long width) {
    clip_job j = {x, limit, width};
    for_rows(num_rows, width, clip_row, &j);
}

TM_API void tm_clip(float *x, float limit, long num_rows, long width) {
    tm_lock();
    clip_op(x, limit, num_rows, width);
    tm_unlock();
}

/* ---- side by side */

typedef struct {
    const float *const *parts;
    const long *widths;
    float *out;
} concat_job;

static void concat_row(void *arg, long row, int thread) {
    (void)thread;
    const concat_job *j = arg;
    float *to = j->out + row * (j->widths[0] + j->widths[1] + j->widths[2]);
    for (int i = 0; i < 3; to += j->widths[i++])
        if (j->widths[i]) memcpy(to, j->parts[i] + row * j->widths[i], j->widths[i] * sizeof(float));
}

void concat_op(const float *const parts[3], const long widths[3], long num_rows, float *out) {
    concat_job j = {parts, widths, out};
    for_rows(num_rows, widths[0] + widths[1] + widths[2], concat_row, &j);
}

TM_API void tm_concat(const float *first, const float *second, const float *third, const long *widths, long num_rows, float *out) {
    const float *const parts[3] = {first, second, third};
    tm_lock();
    concat_op(parts, widths, num_rows, out);
    tm_unlock();
}
