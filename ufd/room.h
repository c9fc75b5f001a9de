/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much memory this process may still take: available memory of the machine and every cgroup limit above the
 * process (v1 and v2, the tightest counts). Reads /proc and /sys/fs/cgroup; no allocation, no stdio (pager threads).
 */
#ifndef WD_UFD_ROOM_H
#define WD_UFD_ROOM_H

#include "lib/base/base.h"

struct room {
	uint64_t free_bytes;  /* may be taken now: the smallest over all limits; page cache counts as free */
	uint64_t total_bytes; /* of the limit that gave free_bytes: MemTotal, or the cgroup's limit */
	bool cgroup;          /* it was a cgroup's */
};

/* `proc` and `cgroup`: the roots, "/proc" and "/sys/fs/cgroup" (parameters for tests). Return: 0, or -errno when
 * not even meminfo could be read. */
int room_get(const char *proc, const char *cgroup, struct room *ret);

#endif
