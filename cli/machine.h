/* SPDX-License-Identifier: Apache-2.0 */
/* What /proc and /sys say about the kernel's settings, for `weightd doctor`. Reads only. How much memory there is, ufd/room.h
 * knows. Threads: none. */
#ifndef WD_CLI_MACHINE_H
#define WD_CLI_MACHINE_H

#include "lib/base/base.h"

#define MACHINE_UNKNOWN UINT64_MAX
#define MACHINE_WORD 32

struct machine {
	uint64_t swap_bytes;      /* MACHINE_UNKNOWN: could not be read */
	uint64_t huge_page_bytes; /* 0: none */
	char shmem_enabled[MACHINE_WORD],
		thp[MACHINE_WORD];    /* transparent_hugepage/{shmem_enabled,enabled}; "": not there */
	int overcommit;               /* vm.overcommit_memory, -1: unknown */
	int io_uring_disabled;        /* kernel.io_uring_disabled, -1: unknown (before 6.6) */
	int unprivileged_userfaultfd; /* vm.unprivileged_userfaultfd, -1: unknown */
	unsigned int numa_nodes;      /* that are online; 0: unknown */
	bool seccomp;                 /* a filter of system calls is on */
	bool cap_ptrace;              /* CAP_SYS_PTRACE is effective */
};

/* `root` is put before every path: "", or a folder that imitates /proc and /sys. */
void machine_read(const char *root, struct machine *ret);

/* Should userfaultfd(2) with kernel-mode faults work? If so and it does not, a filter refuses it. */
static inline bool machine_may_userfaultfd(const struct machine *m)
{
	return m->cap_ptrace || m->unprivileged_userfaultfd == 1;
}

#endif
