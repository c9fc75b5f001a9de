/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Emptying page tables of a view, so that the next touch shows, without losing a write (hazard E). Used by the embedded
 * worker and, with a userfaultfd of its own, by a client of the daemon. Knows page tables; knows no extent's state.
 *
 * Threads: any that blocks all signals, touches no view meanwhile, and is in a window of fork.c's (window_begin()): within
 * it page tables do not tell what was written.
 */
#ifndef WD_UFD_WINDOW_H
#define WD_UFD_WINDOW_H

#include "lib/base/base.h"

#define WINDOW_MAX 32u /* extents in one call */

struct window {
	int uffd;       /* not armed by another one: -EBUSY */
	bool wp;        /* it can write-protect shmem */
	int pagemap_fd; /* /proc/self/pagemap; -1: -EOPNOTSUPP */
};

/*
 * [at, +len) begins at an extent; at most WINDOW_MAX of them, all READY. A touch waits while it is cleared. Afterwards the
 * range is open; after an error each extent is open or as it was (-EBUSY, -EOPNOTSUPP).
 * `ret_written`: pages written in each extent.
 */
int window_clear(const struct window *w, unsigned char *at, uint64_t len, uint32_t ret_written[static WINDOW_MAX]);

#endif
