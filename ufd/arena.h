/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The memory that holds one source's bytes: a file in a tmpfs of our own, or a memfd. Knows memory; knows
 * neither faults nor files on disk.
 * Threads: an arena's functions may be called at once for different ranges.
 */
#ifndef WD_UFD_ARENA_H
#define WD_UFD_ARENA_H

#include "lib/base/base.h"

struct arena_fs {
	int mount_fd; /* a detached tmpfs mount, or -1: memfds */
	int ro_fd;    /* a read-only clone of it: what is opened there nobody can write to, root included; or -1 */
	bool noswap;  /* its pages are never swapped (6.4) */
	bool shared;  /* files get a read-only descriptor for other processes */
};

/* A tmpfs with huge=within_size, noswap where the kernel has it, at most `limit_bytes`. Falls back to memfds
 * where it may not be mounted: *ret_error tells why (0 if it was). `mpol`: tmpfs' memory policy (tmpfs(5)), or NULL.
 * `shared`: for files that others read. */
void arena_fs_init(struct arena_fs *fs, uint64_t limit_bytes, const char *mpol, bool shared, int *ret_error);
void arena_fs_done(struct arena_fs *fs);
/* Changes the limit; nothing to do for memfds. */
int arena_fs_limit(struct arena_fs *fs, uint64_t limit_bytes);

struct arena {
	int fd;
	int ro_fd;            /* for other processes, or -1 */
	uint64_t bytes;       /* data; one more page for the sentinel lies behind it */
	unsigned char *alias; /* shared mapping of all of it, for filling; never registered with userfaultfd */
	bool alias_locked;    /* its pages are kept from swap by mlock: do not zap the alias */
};

/* How many arena bytes hold this much data: rounded up to a huge page if that wastes less than half of one
 * (then the last extent is huge, too), else to a page. */
uint64_t arena_round(uint64_t data_bytes);
int arena_open(const struct arena_fs *fs, uint64_t bytes, struct arena *ret);
/* The same with descriptors of one that is there already (a->fd, ro_fd; taken, also on failure). */
int arena_adopt(const struct arena_fs *fs, uint64_t bytes, int fd, int ro_fd, struct arena *ret);
/* A file of the arenas' file system without a name. *ret_ro_fd is -1 unless fs->shared. */
int arena_file(const struct arena_fs *fs, uint64_t bytes, int *ret_fd, int *ret_ro_fd);
void arena_close(struct arena *a);
/* Memory for a range, all or nothing. -ENOSPC: the limit; -ENOMEM. */
int arena_alloc(struct arena *a, uint64_t off, uint64_t len);
/* Gives it back, out of every mapping. */
int arena_punch(struct arena *a, uint64_t off, uint64_t len);
/* Takes the range out of the alias' page tables (it counts as this process's memory twice otherwise). */
void arena_zap_alias(struct arena *a, uint64_t off, uint64_t len);
uint64_t arena_allocated(const struct arena *a);

/* Address space of this size, aligned to an extent, mapped PROT_NONE. NULL: no room. */
unsigned char *map_reserve(uint64_t len);

#endif
