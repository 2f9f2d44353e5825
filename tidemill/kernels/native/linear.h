/* A matmul under way: what the tasks of linear.c read. linear_op makes one, moe.c several at once. */
#ifndef TM_LINEAR_H
#define TM_LINEAR_H

#include <stdint.h>

enum { F32 = 0, F16 = 1, BF16 = 2, Q8 = 3, Q8M = 4, Q4 = 5, MX4 = 6, S4 = 7 };
#define GROUP 32
#define LANES 8

typedef struct {
    int kind;
    const float *x;
    const void *codes;
    const uint16_t *scales;
    const float *bias;
    float *out;
    long num_rows, num_in, num_out, num_panels, panels_per_task;
    int8_t *xq;      /* [row][k] */
    float *xd, *xs;  /* [row][k / 32]: scale; scale * sum of codes */
} linear_job;

/* Tasks (tm_task) of a job: a row of x to bytes, for the Q kinds; then some panels of the output. */
void quantize_row(void *job, long row, int thread);
void run_panels(void *job, long task, int thread);

#endif
