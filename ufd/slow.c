/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads that may have to wait: the page cache, files without direct I/O, misaligned data, a file whose inode is locked.
 * The bytes come from a mapping of the file, by write(2) into the arena: a fault on a file mapping takes no inode lock
 * (ext4's buffered read takes none either, XFS's does), and an unreadable page is an EFAULT, not a SIGBUS.
 */
#include "ufd/internal.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22 /* 5.14 */
#endif

static int64_t read_hooked(struct view *v, const struct segment *piece)
{
	struct source *s = v->source;
	bool direct = s->direct_fd >= 0 && !atomic_load(&s->direct_refused) && piece->arena_off % s->align == 0 &&
		      piece->file_off % s->align == 0;
	int64_t n = source_hook(s, v->arena.alias + piece->arena_off, piece->len, piece->file_off, direct);

	if (direct && (n == -EINVAL || n == -EOPNOTSUPP)) {
		source_direct_refused(s, (int)n);
		n = source_hook(s, v->arena.alias + piece->arena_off, piece->len, piece->file_off, false);
	}
	return n;
}

static int64_t read_mapped(struct view *v, const struct segment *piece)
{
	uint64_t page = page_bytes(), begin = round_down(piece->file_off, page);
	uint64_t len = piece->file_off + piece->len - begin;
	unsigned char *from = v->source_map + begin;
	ssize_t n;

	/* Whole at once: a fault by itself would read 128 KiB at a time. And before the write, which holds the arena's inode
	 * lock: the reader allocates memory there, and must not wait for this disk. */
	(void)madvise(from, len, MADV_WILLNEED);
	if (madvise(from, len, MADV_POPULATE_READ) < 0 && errno != EINVAL)
		return -EFAULT;
	n = pwrite(v->arena.fd, v->source_map + piece->file_off, piece->len, (off_t)piece->arena_off);
	if (n < 0)
		n = -errno;
	/* Held twice otherwise; a page that is mapped would not be let go. */
	(void)madvise(from, len, MADV_DONTNEED);
	(void)posix_fadvise(v->source->fd, (off_t)begin, (off_t)len, POSIX_FADV_DONTNEED);
	return n;
}

static int64_t read_plain(struct view *v, const struct segment *piece)
{
	ssize_t n = pread(v->source->fd, v->arena.alias + piece->arena_off, piece->len, (off_t)piece->file_off);

	if (n >= 0)
		(void)posix_fadvise(v->source->fd, (off_t)piece->file_off, n, POSIX_FADV_DONTNEED);
	return n < 0 ? -errno : n;
}

void slow_fill(struct fill *f)
{
	struct view *v = f->view;
	struct segment piece;

	while (fill_piece(f, &piece)) {
		int64_t n = source_hook   ? read_hooked(v, &piece) :
			    v->source_map ? read_mapped(v, &piece) :
					    read_plain(v, &piece);

		if (n == -EINTR || n == -EAGAIN)
			continue;
		if (n == -EFAULT && !source_hook && v->source_map) {
			/* A page of the mapping could not be had: beyond the end, or unreadable. read(2) knows which. */
			n = source_check(v->source) < 0 ? 0 : read_plain(v, &piece);
		}
		if (n < 0) {
			f->error = (int)n;
			f->code = n == -ENOSPC ? FAULT_NO_MEMORY : FAULT_READ;
			return;
		}
		if (n == 0) {
			f->code = FAULT_SHRANK;
			atomic_store(&v->source->changed, true);
			return;
		}
		fill_count_read(f, (uint64_t)n);
		f->pos = piece.arena_off + (uint64_t)n;
	}
	if (source_check(v->source) < 0) /* after the last byte: see fill_done() */
		f->code = FAULT_CHANGED;
}

void *slow_main(void *arg)
{
	struct pager *p = arg;

	own_lock(p);
	while (!p->stop) {
		struct fill *f;

		if (list_empty(&p->slow)) {
			(void)pthread_cond_wait(&p->slow_work, &p->lock);
			continue;
		}
		f = container_of(p->slow.next, struct fill, queue);
		list_del(&f->queue);
		f->slow_started = true;
		own_unlock(p);
		slow_fill(f);
		own_lock(p);
		list_add_tail(&p->slow_done, &f->queue);
		pager_wake_reader(p);
	}
	own_unlock(p);
	return NULL;
}
