/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A memory cgroup of our own: made, limited, read, and removed. Speaks v1 and v2.
 *
 * Knows /proc/self/{cgroup,mountinfo} and the memory controller's files; knows nothing of what runs inside.
 * Threads: none.
 */
#ifndef WD_CLI_CGROUP_H
#define WD_CLI_CGROUP_H

#include "lib/base/base.h"

struct cgroup;

#define CGROUP_UNKNOWN UINT64_MAX /* this kernel does not count it */

struct cgroup_usage {
	uint64_t anon_bytes;
	uint64_t shmem_bytes; /* tmpfs and memfd, mapped or not, each page once */
	uint64_t cache_bytes; /* page cache of files, without shmem */
	uint64_t swap_in_bytes, swap_out_bytes;
	uint64_t oom_kills;
};

/*
 * Makes the cgroup `name` under our own one, or, where v2 does not allow that because processes (we) live there,
 * beside it. What earlier owners of such a name left behind (the part after the last '-' is their pid) is removed.
 * `root`: put before every path (a test's fake tree); "" otherwise.
 * Return: 0; -EOPNOTSUPP no memory controller; -EACCES, -EPERM, -EROFS, -EBUSY not allowed; others.
 */
int cgroup_new(const char *root, const char *name, struct cgroup **ret, struct wd_err *err);
/* Anonymous and shared memory and page cache together; swap comes on top of it where the machine has some. */
int cgroup_set_limit(struct cgroup *cg, uint64_t bytes, struct wd_err *err);
/* Moves the calling process in. Threads must not run yet. */
int cgroup_join(const struct cgroup *cg);
int cgroup_usage(const struct cgroup *cg, struct cgroup_usage *ret);
const char *cgroup_path(const struct cgroup *cg);
/* Kills what still runs inside, waits for it and removes the cgroup. NULL is fine; returns NULL. */
struct cgroup *cgroup_free(struct cgroup *cg);

static inline void cgroup_free_p(struct cgroup **cg)
{
	(void)cgroup_free(*cg);
}
#define cleanup_cgroup cleanup(cgroup_free_p)

#endif
