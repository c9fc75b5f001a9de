/* SPDX-License-Identifier: Apache-2.0 */
/*
 * WAY_MMAP: the file itself is mapped, and the kernel's page cache does the paging. No pager thread. Also how a forked
 * child goes on (fork.c).
 *
 * Dropping: MADV_PAGEOUT of what is clean. It reclaims a page without ever losing a write: a page that is written in
 * between is a private one by then, and would at worst be swapped. (MADV_DONTNEED after a scan loses such writes.)
 * The kernel pages out file pages only for whoever owns the file or may write to it; otherwise they stay in the page
 * cache, as clean memory that it takes back by itself.
 */
#include "ufd/internal.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* 5.14 */
#endif

/* What cannot be mapped (shifted data, aligned copies of misaligned tensors) is read now and kept. */
static int copy_segment(struct view *v, const struct segment *seg)
{
	return source_read(v->source, v->base + seg->arena_off, seg->len, seg->file_off);
}

int mmap_view_open(struct view *v, struct wd_err *err)
{
	uint64_t len = v->bytes + page_bytes();
	int r = 0;

	v->base = map_reserve(len);
	if (!v->base)
		return err_set(err, -ENOMEM, "%s: cannot map %llu MiB: no address space", v->source->path,
			       (unsigned long long)(v->bytes / MiB));
	/* Private and writable, so that a write makes a copy as in the other ways; with overcommit_memory=2 that would be
	 * charged in full: then it becomes writable extent by extent. */
	if (mmap(v->base, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1,
		 0) == MAP_FAILED &&
	    v->nr_segs > 1)
		return err_set(err, -errno, "%s: cannot map %llu MiB: %s", v->source->path,
			       (unsigned long long)(v->bytes / MiB), strerror(errno));
	for (size_t i = 0; i < v->nr_segs && r == 0; i++) {
		const struct segment *seg = &v->segs[i];

		if (!seg->len)
			continue;
		if (seg->arena_off % page_bytes() || seg->file_off % page_bytes() || i > 0) {
			r = copy_segment(v, seg);
			if (r < 0)
				return err_set(err, r, "%s: cannot read %llu bytes at %llu: %s", v->source->path,
					       (unsigned long long)seg->len, (unsigned long long)seg->file_off,
					       strerror(-r));
			continue;
		}
		if (mmap(v->base + seg->arena_off, seg->len, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, v->source->fd, (off_t)seg->file_off) != MAP_FAILED)
			continue;
		v->read_only = true;
		if (mmap(v->base + seg->arena_off, seg->len, PROT_READ, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE,
			 v->source->fd, (off_t)seg->file_off) == MAP_FAILED)
			return err_set(err, -errno, "%s: cannot map %llu MiB: %s", v->source->path,
				       (unsigned long long)(seg->len / MiB), strerror(errno));
	}
	(void)madvise(v->base, len, MADV_DONTDUMP);
	return 0;
}

/* Is this part of the view the file itself? */
static uint64_t mapped_bytes(const struct view *v)
{
	const struct segment *seg = &v->segs[0];

	return v->nr_segs && seg->arena_off % page_bytes() == 0 && seg->file_off % page_bytes() == 0 ?
		       seg->arena_off + seg->len :
		       0;
}

static int pageout_run(void *arg, const struct page_run *run)
{
	(void)arg;
	if (run->present && run->file)
		(void)madvise((void *)(uintptr_t)run->start, run->end - run->start, MADV_PAGEOUT);
	return 0;
}

static int view_pagemap(const struct view *v)
{
	/* In a forked child the pager's descriptor shows the parent's memory. */
	return v->pager->forked || v->pager->pagemap_fd < 0 ? open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC) :
							      dup(v->pager->pagemap_fd);
}

void mmap_view_drop(struct view *v, uint64_t off, uint64_t len)
{
	cleanup_close int fd = view_pagemap(v);
	uint64_t first = round_up(off, page_bytes()), end = round_down(off + len, page_bytes());

	if (off + len >= mapped_bytes(v))
		end = round_up(mapped_bytes(v), page_bytes());
	if (fd < 0 || first >= end)
		return;
	(void)pagemap_scan(fd, v->base + first, end - first, pageout_run, NULL);
	if (!v->pager->forked)
		(void)posix_fadvise(v->source->fd, (off_t)first, (off_t)(end - first), POSIX_FADV_DONTNEED);
}

static int stats_run(void *arg, const struct page_run *run)
{
	struct pager_stats *s = arg;
	uint64_t bytes = run->end - run->start;

	if (!run->file)
		s->written_bytes += bytes;
	else if (run->present)
		s->resident_bytes += bytes;
	if (run->file && run->huge)
		s->huge_bytes += bytes;
	return 0;
}

void mmap_view_stats(struct view *v, struct pager_stats *ret)
{
	cleanup_close int fd = view_pagemap(v);

	*ret = (struct pager_stats){ .budget_bytes = UINT64_MAX };
	if (fd >= 0 && mapped_bytes(v))
		(void)pagemap_scan(fd, v->base, MIN(round_up(mapped_bytes(v), page_bytes()), v->bytes), stats_run, ret);
	if (v->bytes >
	    round_up(mapped_bytes(v), page_bytes())) { /* aligned copies are private, but nobody wrote them */
		struct pager_stats copies = { 0 };
		uint64_t from = round_up(mapped_bytes(v), page_bytes());

		if (fd >= 0)
			(void)pagemap_scan(fd, v->base + from, v->bytes - from, stats_run, &copies);
		ret->resident_bytes += copies.written_bytes;
	}
	v->stats.peak_bytes = MAX(v->stats.peak_bytes, ret->resident_bytes);
	ret->peak_bytes = v->stats.peak_bytes;
}

void *mmap_job_main(void *arg)
{
	struct pager_job *j = arg;

	for (size_t i = 0; i < j->nr_ranges; i++) {
		struct view *v = j->ranges[i].view;
		uint64_t step = 4 * extent_bytes(), end = MIN(j->ranges[i].off + j->ranges[i].len, v->bytes);

		for (uint64_t off = j->ranges[i].off; off < end; off += step) {
			uint64_t len = MIN(step, end - off), map = mapped_bytes(v);

			if (atomic_load(&j->cancelled)) {
				job_end(j, -ECANCELED);
				return NULL;
			}
			if (v->forbidden) {
				job_end(j, -EACCES);
				return NULL;
			}
			if (off < map && madvise(v->base + off, round_up(MIN(len, map - off), page_bytes()),
						 MADV_POPULATE_READ) < 0) {
				int e = errno;

				/* EFAULT: a page beyond the end of a file that shrank; EHWPOISON, EIO: unreadable. */
				job_end(j, source_check(v->source) < 0 ? -ESTALE : e == EINVAL ? -EOPNOTSUPP : -EIO);
				return NULL;
			}
			(void)atomic_fetch_add(&j->done_bytes, len);
		}
	}
	job_end(j, 1);
	return NULL;
}
