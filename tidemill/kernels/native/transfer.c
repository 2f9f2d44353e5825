/* Copying a KV page and summing it in one pass (tidemill/distributed/transfer/checksum.py has the same in numpy).

Words of 64 bits in rows of eight; the last row is filled up with zeros. Of each column, the sum of its words and the sum of all
sums so far, modulo 2^64: the second tells words that changed places. */
#include <string.h>

#include "tidemill.h"

#define VECTORS 4 /* of a row */
#define ROW ((long)sizeof(words) * VECTORS)

typedef uint64_t words __attribute__((vector_size(16)));

/* A row is read once: what is stored is what is summed, whoever else writes to the source. */
static inline __attribute__((always_inline)) void copy_row(char *to, const char *from, words *once, words *twice) {
    for (int v = 0; v < VECTORS; v++) {
        words own;
        memcpy(&own, from + v * sizeof(words), sizeof(words));
        memcpy(to + v * sizeof(words), &own, sizeof(words));
        once[v] += own;
        twice[v] += once[v];
    }
}

/* `sums`: sixteen words, written. */
TM_API void tm_copy_sum(char *to, const char *from, long num_bytes, uint64_t *sums) {
    words once[VECTORS] = {{0}}, twice[VECTORS] = {{0}};
    long at = 0;
    for (; at + ROW <= num_bytes; at += ROW) copy_row(to + at, from + at, once, twice);
    if (at < num_bytes) {
        char row[VECTORS * sizeof(words)] = {0}, copied[VECTORS * sizeof(words)];
        memcpy(row, from + at, num_bytes - at);
        copy_row(copied, row, once, twice);
        memcpy(to + at, copied, num_bytes - at);
    }
    memcpy(sums, once, sizeof(once));
    memcpy(sums + 2 * VECTORS, twice, sizeof(twice));
}
