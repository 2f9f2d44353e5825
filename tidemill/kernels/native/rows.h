/* Ops that compute each row on its own: a row's bits depend on the row alone. */
#ifndef TM_ROWS_H
#define TM_ROWS_H

#include "simd.h"
#include "tidemill.h"

#define SERIAL_VALUES 8192 /* a second thread takes longer to start than these take */

static inline void for_rows(long num_rows, long width, tm_task task, void *arg) {
    tm_parallel(num_rows, (SERIAL_VALUES + width - 1) / width, task, arg);
}

#endif
