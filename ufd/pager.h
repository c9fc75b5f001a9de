/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pager's interface to lib/: sources become views (memory), views are filled on touch, observed, and
 * taken back. Knows pages, files and byte ranges ("units" are read together); knows no tensors.
 *
 * In WD_WAY_MMAP (WAY_MMAP here) the same functions work on plain mappings of the files.
 *
 * Threads: all functions may be called from any thread. None may be called with a lock held that a thread
 * touching a view may hold. They block signals while they hold the pager's lock, and never allocate under it.
 */
#ifndef WD_UFD_PAGER_H
#define WD_UFD_PAGER_H

#include "lib/base/base.h"
#include "ufd/source.h"

struct pager;
struct view;
struct pager_job;
struct serve;
struct arena_fs;

enum way {
	WAY_AUTO,
	WAY_DAEMON,
	WAY_EMBEDDED,
	WAY_USER,
	WAY_MMAP, /* the numbers of WD_WAY_* */
	WAY_SERVE /* the daemon itself: ufd/serve.h */
};

/* ---- what this machine gives (weightd doctor) */
struct pager_caps {
	/* 0, or the negative errno that refused it */
	int dev_userfaultfd;  /* open of /dev/userfaultfd */
	int sys_userfaultfd;  /* userfaultfd(2) with kernel-mode faults */
	int user_userfaultfd; /* userfaultfd(2), user-mode faults only */
	int event_fork;       /* UFFD_FEATURE_EVENT_FORK */
	int minor_shmem;      /* UFFD_FEATURE_MINOR_SHMEM (5.14) */
	int wp_shmem;         /* write-protect on shmem (5.19, x86-64; arm64 later): observing without losing writes */
	int exact_address;    /* UFFD_FEATURE_EXACT_ADDRESS (5.18) */
	int poison;           /* UFFDIO_POISON (6.6) */
	int pagemap_scan;     /* PAGEMAP_SCAN (6.7) */
	int tmpfs;            /* a detached tmpfs of our own */
	int tmpfs_noswap;     /* noswap (6.4) */
	int tmpfs_huge;       /* huge pages in it: fallocate gave one */
	int shared_tmpfs;     /* one for a daemon's arenas: that, or in a user name space of its own */
	int shared_huge;      /* huge pages in it */
	int memfd_huge;       /* a memfd gets huge pages (shmem_enabled) */
	int io_uring;
	int direct_io; /* O_DIRECT reads in the folder that was asked about */
	uint64_t page_bytes, extent_bytes;
	uint64_t max_map_count;
};
/* Tries each thing on throw-away objects. `folder` for direct_io; NULL: the current one. */
void pager_caps_probe(struct pager_caps *ret, const char *folder);
/* The best way that these allow: WAY_EMBEDDED, WAY_USER or WAY_MMAP. */
enum way pager_caps_way(const struct pager_caps *caps);

/* ---- a pager */
struct pager_config {
	enum way way;
	uint64_t budget_bytes; /* 0: automatic */
	/* WAY_DAEMON */
	const char *socket; /* NULL: WEIGHTD_SOCKET, or the usual places */
	bool autostart;     /* start the user's own daemon if none answers */
	/* WAY_SERVE: serve_new() fills these in. */
	struct serve *serve;
	const struct arena_fs *fs; /* one that is there already; NULL: make one */
};
int pager_new(const struct pager_config *config, struct pager **ret, struct wd_err *err);
struct pager *pager_ref(struct pager *p);
struct pager *pager_unref(struct pager *p); /* the last one stops the threads; views must be closed. Returns NULL */
enum way pager_way(const struct pager *p);
int pager_set_budget(struct pager *p, uint64_t budget_bytes);

/* ---- views */

/* Arena bytes [arena_off, +len) are the file's [file_off, +len). The first segment is the file itself, shifted by
 * less than 64 bytes; further ones are aligned copies of parts of it. Sorted by arena_off, not overlapping. */
struct segment {
	uint64_t arena_off, file_off, len;
};

/* Arena bytes that are read together when one of them is touched (a tensor). Sorted by off; may overlap. */
struct unit {
	uint64_t off, len;
};

struct view_layout {
	const struct segment *segs;
	size_t nr_segs;
	const struct unit *units;
	size_t nr_units;
};

/*
 * Maps `src` by `layout` (both are copied or referenced). A view of a source with the same identity
 * and layout is shared: *ret is then one more reference of it.
 * Way WAY_MMAP: segments other than an unshifted first one are read at once into private memory.
 */
int view_open(struct pager *p, struct source *src, const struct view_layout *layout, struct view **ret,
	      struct wd_err *err);
struct view *view_unref(struct view *v);          /* the last one waits for I/O in flight and unmaps. Returns NULL */
unsigned char *view_base(const struct view *v);   /* address of arena offset 0 */
struct source *view_source(const struct view *v); /* borrowed */

/* ---- dropping (taking back). Asynchronous; pager_sync() waits. */
int view_drop(struct view *v);
/* Marks units as no longer used and drops the extents in which no unit is in use (touched or populated since). */
int view_drop_units(struct view *v, size_t first, size_t nr);
/* Waits until drops that were asked for have ended, at most timeout_ms (-1: no limit). 0 or -ETIMEDOUT. */
int pager_sync(struct pager *p, int timeout_ms);

/* Who goes first when the budget is full. */
enum view_class { VIEW_UNNEEDED, VIEW_NORMAL, VIEW_PINNED };
void view_set_class(struct view *v, enum view_class class);

/* The daemon is told which stage runs (NULL: none); nothing in the other ways. */
void pager_stage(struct pager *p, const char *name);

/* Observing without a plan: pager_observe_begin() makes touches visible again (clears page tables, losing no
 * write); pager_observe_drop() drops, of every view that is not pinned, what was not touched since. */
void pager_observe_begin(struct pager *p);
void pager_observe_drop(struct pager *p);

/* Strict mode: a touch of what is not in memory is an error from now on, until view_allow(). `stage`: for the
 * reason's text, copied (63 bytes). What could not be dropped stays readable. */
void view_forbid(struct view *v, const char *stage);
void view_allow(struct view *v);

/* ---- populate */
struct job_range {
	struct view *view;
	uint64_t off, len; /* arena bytes */
};
/* `gentle` (reading ahead that nobody asked for): drops only what no stage needs, else ends with -ENOSPC. Otherwise
 * older weights may be dropped by second chance; -ENOSPC when the job itself is larger than the budget. */
int pager_job_new(struct pager *p, const struct job_range *ranges, size_t nr, bool gentle, struct pager_job **ret);
int pager_job_fd(const struct pager_job *j);
/* state: 0 under way, 1 done, negative errno */
void pager_job_progress(const struct pager_job *j, uint64_t *ret_done_bytes, uint64_t *ret_total_bytes, int *ret_state);
int pager_job_wait(struct pager_job *j, int timeout_ms);
void pager_job_cancel(struct pager_job *j);
struct pager_job *pager_job_free(struct pager_job *j); /* returns NULL */

/* ---- counts */
struct pager_stats {
	uint64_t budget_bytes, resident_bytes, peak_bytes, huge_bytes, written_bytes;
	uint64_t read_bytes, reads, faults, dropped_bytes, reloads, reload_bytes, failed;
};
void pager_stats(struct pager *p, struct pager_stats *ret);
void view_stats(struct view *v, struct pager_stats *ret);

/* ---- why a touch fails. All async-signal-safe: no lock, no allocation. */
enum fault_code {
	FAULT_NONE,
	FAULT_READ,      /* the read failed with `error` */
	FAULT_CHANGED,   /* size or mtime changed since the file was opened */
	FAULT_SHRANK,    /* the file ended before these bytes */
	FAULT_NO_MEMORY, /* nothing could be dropped to make room, or the arena refused the memory */
	FAULT_FORBIDDEN, /* strict mode */
};
struct fault_reason {
	struct view *view;
	enum fault_code code;
	int error;         /* negative errno, or 0 */
	uint64_t off;      /* arena offset */
	size_t unit;       /* index in the layout's units, or SIZE_MAX */
	const char *stage; /* FAULT_FORBIDDEN: the one given to view_forbid() */
};
/* False: the address lies in no view, or nothing is known against it. */
bool pager_fault_reason(const void *address, struct fault_reason *ret);
/* For a SIGSEGV/SIGBUS handler: true if the touch can simply be tried again (a first write to a view that
 * overcommit_memory=2 made read-only). */
bool pager_fault_retry(const void *address);

/* A word of the opener's that a reason can be led back by (the model). Set before the first touch. */
void view_set_owner(struct view *v, void *owner);
void *view_owner(const struct view *v);

/* Is this process a forked child of the one that made the pager? (It then runs as WAY_MMAP, without threads.) */
bool pager_is_forked(const struct pager *p);

#endif
