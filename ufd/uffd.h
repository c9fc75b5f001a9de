/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The userfaultfd ioctls and PAGEMAP_SCAN: the only file with UFFDIO_* in it is uffd.c.
 * Knows the kernel interface; knows nothing of arenas, extents or policy.
 * Threads: every function may be called from any thread; those marked [mmap_lock] wait for the lock of the
 * address space that the userfaultfd belongs to and must not be called by the thread that reads faults.
 * Results are 0 or a negative errno; nobody above reads errno.
 */
#ifndef WD_UFD_UFFD_H
#define WD_UFD_UFFD_H

#include "lib/base/base.h"

struct uffd_caps {
	bool user_only; /* kernel-mode faults give EFAULT */
	bool event_fork;
	bool wp; /* write-protect on shmem */
	bool exact_address;
	bool poison;
};

/*
 * Opens a userfaultfd (close-on-exec, non-blocking) and enables what it can: /dev/userfaultfd first, then
 * userfaultfd(2), then (where `allow_user_only`) user-mode faults only. MINOR on shmem is required.
 * `want_fork`: ask for EVENT_FORK (needs CAP_SYS_PTRACE; left out silently where refused).
 * Return: the fd, or the negative errno of the best try.
 */
int uffd_open(bool allow_user_only, bool want_fork, struct uffd_caps *ret);
/* The same, /dev/userfaultfd open already as `device` (-1: it is opened). Async-signal-safe. */
int uffd_open_from(int device, bool allow_user_only, bool want_fork, struct uffd_caps *ret);
/* One on which no ioctl was made: for another process to enable. User-mode faults only where nothing else is allowed. */
int uffd_open_raw(int device, bool *ret_user_only);
/* One way alone, for the doctor: 0 = /dev/userfaultfd, 1 = userfaultfd(2), 2 = user-mode only. Returns fd or -errno. */
int uffd_open_way(int how);
/* User-mode faults only, even where more is allowed. */
int uffd_open_user(struct uffd_caps *ret);

/* Enables another process's, on which nothing was done yet. -EPROTO: it is no userfaultfd, or was used. Its description
 * is shared with that process: it is never relied on to be non-blocking. */
int uffd_adopt(int fd, bool user_only, struct uffd_caps *ret);
/* Is it one at all? Asks the descriptor's owner nothing. 0 or -EPROTO. */
int uffd_check(int fd);
/* And was it enabled (by whom ever)? */
int uffd_check_ready(int fd);

/* Arms [addr, +len): missing and minor (and write-protect with `wp`) faults call the reader. [mmap_lock] */
int uffd_register(int fd, void *addr, uint64_t len, bool wp);
/* Opens it and wakes, in this order, always both (hazard A: the wake inside of UNREGISTER comes before the VMA's
 * lock is taken; a thread that queued in between would sleep for ever). [mmap_lock] */
int uffd_open_range(int fd, void *addr, uint64_t len);
/* Wakes the waiters of a range; they fault again. */
int uffd_wake(int fd, void *addr, uint64_t len);

/* Maps what the page cache (the arena) has there, page by page, and wakes. Pages that are mapped already are
 * skipped and their waiters woken; a poison is lifted.
 * Return: 0; -EAGAIN a fork is in flight; -ENOENT not armed or crosses a VMA border; -EFAULT the arena has
 * no page; -ESRCH the address space is gone. */
int uffd_continue(int fd, void *addr, uint64_t len);

/* What is going on in the address space, asked at an armed page that is mapped (a view's sentinel). */
enum uffd_probe { PROBE_QUIET, PROBE_FORKING, PROBE_DEAD, PROBE_UNMAPPED };
enum uffd_probe uffd_probe(int fd, void *page);

/* Puts a private page with this content there. -EEXIST: something is mapped. */
int uffd_copy(int fd, void *dst, const void *src, uint64_t len);
/* From now on a touch of this page is SIGBUS. Wakes nobody. -EOPNOTSUPP before 6.6. -EEXIST: mapped. */
int uffd_poison(int fd, void *addr, uint64_t len);
/* Write-protects (and unprotects, waking writers) what was registered with wp. */
int uffd_writeprotect(int fd, void *addr, uint64_t len, bool on);

/* One event, read without blocking. */
enum uffd_event { EVENT_FAULT, EVENT_FORK, EVENT_OTHER };
struct uffd_msg_info {
	enum uffd_event event;
	uint64_t address; /* EVENT_FAULT; exact where the kernel gives it */
	int child_fd;     /* EVENT_FORK: the child's userfaultfd, now the caller's */
};
/* Reads up to `max` (at most 64). Return: how many; -EAGAIN nothing there; -EMFILE no fd for a child's (the event
 * stays); others. A fork event is always the last of a batch. */
int uffd_read(int fd, struct uffd_msg_info *ret, int max);

/* ---- page tables of this process */
struct page_run {
	uint64_t start, end; /* addresses */
	bool present, swapped, file, huge;
};
/* Page tables of [addr, +len), as runs, in order; absent pages are left out. Written = (present or swapped) and not
 * file. `pagemap_fd`: /proc/self/pagemap. Calls fn for each run; stops when it returns non-zero and returns that. */
int pagemap_scan(int pagemap_fd, const void *addr, uint64_t len, int (*fn)(void *arg, const struct page_run *run),
		 void *arg);
/* Is nothing mapped there, nor swapped out, nor poisoned? */
bool pagemap_absent(int pagemap_fd, const void *addr, uint64_t len);
/* 0 if the kernel has PAGEMAP_SCAN (else pagemap_scan() reads the file: no `huge`). */
int pagemap_probe(int pagemap_fd);

#endif
