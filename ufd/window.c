/* SPDX-License-Identifier: Apache-2.0 */
#include "ufd/window.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#include "ufd/arena.h"
#include "ufd/hooks.h"
#include "ufd/page.h"
#include "ufd/uffd.h"

#define CLEAN_RUNS 1024

struct clean_runs {
	uint64_t base;
	uint32_t *written; /* pages per extent */
	struct {
		uint64_t start, end;
	} clean[CLEAN_RUNS];
	size_t nr;
};

/* Not on the stack: the threads that come here have a small one. */
static struct clean_runs clean;
static pthread_mutex_t clean_lock = PTHREAD_MUTEX_INITIALIZER;

static int clean_run(void *arg, const struct page_run *pr)
{
	struct clean_runs *c = arg;

	for (uint64_t a = pr->start; a < pr->end;) {
		size_t e = (size_t)((a - c->base) / extent_bytes());
		uint64_t end = MIN(pr->end, c->base + (e + 1) * extent_bytes());

		if (!pr->file)
			c->written[e] += (uint32_t)((end - a) / page_bytes());
		a = end;
	}
	if (pr->present && pr->file && c->nr < CLEAN_RUNS) {
		c->clean[c->nr].start = pr->start;
		c->clean[c->nr++].end = pr->end;
	}
	return 0;
}

static int written_run(void *arg, const struct page_run *pr)
{
	if (!pr->file)
		*(uint32_t *)arg += (uint32_t)((pr->end - pr->start) / page_bytes());
	return 0;
}

/*
 * Where shmem cannot be write-protected: an extent's page tables are moved away (a touch of the registered range then
 * waits), and back if there is something written in them. A raw clone(2) in this window loses the writes in the child
 * (fork(2), too: the child then reads the file's bytes): DESIGN, hazard E.
 */
static int clear_moving(const struct window *w, unsigned char *first, uint64_t bytes, uint32_t *ret_written)
{
	unsigned char *scratch = map_reserve(extent_bytes());
	int e = scratch ? 0 : -ENOMEM;
	uint64_t registered = 0;

	for (uint64_t off = 0; e == 0 && off < bytes; off += extent_bytes()) {
		unsigned char *at = first + off;
		uint64_t len = MIN(extent_bytes(), bytes - off);
		uint32_t written = 0;

		e = uffd_register(w->uffd, at, len, false);
		if (e < 0)
			break;
		registered = off + len;
		if (mremap(at, len, len, MREMAP_MAYMOVE | MREMAP_DONTUNMAP | MREMAP_FIXED, scratch) == MAP_FAILED) {
			e = -errno; /* EFAULT: more than one VMA here (something else is mapped over a part) */
			break;
		}
		if (pager_hooks.in_window)
			pager_hooks.in_window();
		e = pagemap_scan(w->pagemap_fd, scratch, len, written_run, &written);
		/* What was moved back is not registered: open. */
		if ((e < 0 || written) && mremap(scratch, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED)
			abort(); /* the written pages have no other place: going on would lose them */
		(void)mmap(scratch, extent_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
			   -1, 0);
		ret_written[off / extent_bytes()] = written;
	}
	if (scratch)
		(void)munmap(scratch, extent_bytes());
	if (registered)
		(void)uffd_open_range(w->uffd, first, registered);
	return e;
}

/* Scanning and then MADV_DONTNEED would lose what other threads write in between; while the range is write-protected
 * nobody can write to a clean page, and a fault waits. */
int window_clear(const struct window *w, unsigned char *at, uint64_t len, uint32_t ret_written[static WINDOW_MAX])
{
	int fd = w->uffd, e;

	memset(ret_written, 0, WINDOW_MAX * sizeof(*ret_written));
	if (w->pagemap_fd < 0)
		return -EOPNOTSUPP;
	if (!w->wp)
		return clear_moving(w, at, len, ret_written);
	e = uffd_register(fd, at, len, true);
	if (e < 0)
		return e;
	(void)pthread_mutex_lock(&clean_lock);
	clean.base = (uintptr_t)at;
	clean.written = ret_written;
	do {
		clean.nr = 0;
		e = uffd_writeprotect(fd, at, len, true);
		if (e == 0) {
			e = pagemap_scan(w->pagemap_fd, at, len, clean_run, &clean);
			if (pager_hooks.in_window)
				pager_hooks.in_window();
			for (size_t i = 0; e == 0 && i < clean.nr; i++)
				if (madvise((void *)(uintptr_t)clean.clean[i].start,
					    clean.clean[i].end - clean.clean[i].start, MADV_DONTNEED) < 0)
					e = -errno; /* EINVAL: locked by mlock */
		}
		(void)uffd_writeprotect(fd, at, len, false);
	} while (e == 0 && clean.nr == CLEAN_RUNS); /* more than fits: the rest in another round */
	/* What is left is what was written. (Counted now: within the window the marks of the protection look like pages that
	 * are swapped out.) */
	memset(ret_written, 0, WINDOW_MAX * sizeof(*ret_written));
	clean.nr = 0;
	if (e == 0)
		e = pagemap_scan(w->pagemap_fd, at, len, clean_run, &clean);
	for (uint64_t off = 0; e == 0 && off < len; off += extent_bytes())
		/* Where nothing was written, the page table goes, too: else the extent would be mapped page by page from now
		 * on. Nobody can put anything there: it is still registered. */
		if (ret_written[off / extent_bytes()] == 0)
			(void)madvise(at + off, MIN(extent_bytes(), len - off), MADV_DONTNEED);
	(void)pthread_mutex_unlock(&clean_lock);
	/* All flags off, so that VMAs are of one kind and merge. A touch between this and an arming is not seen, no more. */
	(void)uffd_open_range(fd, at, len);
	return e;
}
