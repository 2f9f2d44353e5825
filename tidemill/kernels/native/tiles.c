/* Whether this process may use AMX. */
#include "tiles.h"

#include "tidemill.h"

int has_tiles;

#if defined(HAS_TILES) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM of arch_prctl, for all threads of the process */
#define TILE_DATA 18
#define TILE_BITS (1u << 22 | 1u << 24 | 1u << 25) /* AMX-BF16, AMX-TILE, AMX-INT8 */

static int find_tiles(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILE_BITS) == TILE_BITS && !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
}
#else
static int find_tiles(void) { return 0; }
#endif

/* Returns whether they are used from now on. */
TM_API int tm_use_tiles(int wanted) {
    tm_lock();
    has_tiles = wanted && find_tiles();
    tm_unlock();
    return has_tiles;
}
