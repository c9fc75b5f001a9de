/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fork(2). A child has no pager thread, and the parent's may end before it: so in the child each view becomes a plain
 * mapping of its file wherever the process has not written (0 of 862 children wrong, 0.3 to 2 ms each; measured). The
 * child is single-threaded here, so nothing moves under our hands. The parent's pager sees the sentinel go last and
 * forgets the child.
 *
 * The prepare handler takes no lock: one that took the pager's would deadlock with a later prepare handler that touches a
 * weight. It only waits until no page table is being cleared (window_begin(), some ms at most; no new one begins until
 * the fork is over): in such a window page tables do not tell what was written.
 * No malloc and no stdio in the child: fork holds those locks.
 *
 * A client of the daemon goes on with it in the child (client_forked()); where that fails, the same is done. What happens to
 * one view here, replace_range() does for a client that has lost its daemon, too.
 */
#include "ufd/internal.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include "ufd/client.h"

static struct list pagers = { &pagers, &pagers };
static pthread_mutex_t pagers_lock = PTHREAD_MUTEX_INITIALIZER;

struct replace {
	struct view *view;
	uint64_t pos;    /* arena bytes up to here are done */
	bool keep_clean; /* also what was only read: other threads may be writing to it */
	int error;
};

/* Makes the mapping elsewhere and puts it there in one step: other threads see what was, or what is. */
static int put(struct view *v, uint64_t off, uint64_t len, int fd,
	       int (*fill)(struct view *, unsigned char *, uint64_t, uint64_t))
{
	unsigned char *m = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0), fd,
				fd < 0 ? 0 : (off_t)off);
	int r = 0;

	if (m == MAP_FAILED)
		return -errno;
	(void)munlock(m, len); /* MCL_FUTURE would read it all */
	if (fill && mprotect(m, len, PROT_READ | PROT_WRITE) < 0)
		r = -errno;
	if (r == 0 && fill)
		r = fill(v, m, off, len);
	if (r == 0 && !v->broken && (v->read_only || mprotect(m, len, PROT_READ | PROT_WRITE) < 0)) {
		v->read_only = true; /* overcommit_memory=2: writable extent by extent */
		r = mprotect(m, len, PROT_READ) < 0 ? -errno : 0;
	}
	if (r == 0 && mremap(m, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, v->base + off) == MAP_FAILED)
		r = -errno;
	if (r < 0)
		(void)munmap(m, len);
	return r;
}

static int read_segments(struct view *v, unsigned char *to, uint64_t off, uint64_t len)
{
	int r = 0;

	for (size_t i = 0; i < v->nr_segs && r == 0; i++) {
		const struct segment *s = &v->segs[i];
		uint64_t a = MAX(off, s->arena_off), b = MIN(off + len, s->arena_off + s->len);

		if (a < b)
			r = source_read(v->source, to + (a - off), b - a, s->file_off + (a - s->arena_off));
	}
	return r;
}

/* [from, to) of the arena was never written here: the file's bytes go there. Where these are others by now: nothing that
 * can be touched. */
static void put_file(struct replace *r, uint64_t from, uint64_t to)
{
	struct view *v = r->view;
	const struct segment *first = &v->segs[0];

	if (from < to && !r->error && v->broken) {
		r->error = put(v, from, to - from, -1, NULL);
		return;
	}
	if (from < to && !r->error && first->arena_off == 0 && first->file_off == 0 && from < first->len) {
		uint64_t end = MIN(to, round_up(first->len, page_bytes()));

		r->error = put(v, from, end - from, v->source->fd, NULL);
		from = end;
	}
	/* Shifted data and aligned copies cannot be mapped: read now. */
	if (from < to && !r->error)
		r->error = put(v, from, to - from, -1, read_segments);
}

static int kept_run(void *arg, const struct page_run *run)
{
	struct replace *r = arg;
	struct view *v = r->view;
	uint64_t base = (uintptr_t)v->base;

	if (run->file && !r->keep_clean)
		return 0;
	for (uint64_t a = run->start; a < run->end;) {
		uint64_t i = (a - base) / page_bytes(), end = a + page_bytes();

		/* A poisoned page looks like one that is swapped out; it is simply read again. */
		if (!run->present && v->poisoned[i / 64] >> i % 64 & 1) {
			a = end;
			continue;
		}
		if (run->present)
			end = run->end;
		put_file(r, r->pos, a - base);
		r->pos = end - base;
		a = end;
	}
	return r->error;
}

int replace_range(struct view *v, int pagemap_fd, uint64_t off, uint64_t len)
{
	struct replace r = { .view = v, .pos = off, .keep_clean = true };
	int e = pagemap_scan(pagemap_fd, v->base + off, len, kept_run, &r);

	if (e < 0)
		return e;
	put_file(&r, r.pos, off + len);
	return r.error;
}

/* Where the process is not dumpable (it has changed its uid), /proc/self belongs to root. */
int pagemap_open(void)
{
	int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), was;

	if (fd >= 0 || errno != EACCES)
		return fd;
	was = prctl(PR_GET_DUMPABLE);
	if (was < 0 || prctl(PR_SET_DUMPABLE, 1) < 0)
		return -1;
	fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	(void)prctl(PR_SET_DUMPABLE, was);
	return fd;
}

static void replace_view(struct view *v, int pagemap_fd)
{
	struct replace r = { .view = v };

	v->mmap = true;        /* before anything is looked up by a handler here */
	v->arena.alias = NULL; /* DONTFORK: not there */
	v->source_map = NULL;
	v->busy = v->poisoning = 0; /* of threads that are not here */
	if (pagemap_fd < 0 || source_check(v->source) < 0)
		v->broken = true; /* we cannot tell what was written, or the file's bytes are others now */
	else if (pagemap_scan(pagemap_fd, v->base, v->bytes, kept_run, &r) == 0)
		put_file(&r, r.pos, v->bytes);
	if (r.error)
		v->broken = true;
	/* An error at the touch, never wrong bytes; strict mode goes on. */
	if (v->broken || v->forbidden)
		(void)mprotect(v->base, v->bytes, PROT_NONE);
	/* The arena would stay in memory as long as this child. (Where it keeps written pages it does: they are mapped there.) */
	arena_close(&v->arena);
	/* Last: while the sentinel is there the parent holds this child for one that still has the view. */
	(void)mmap(view_sentinel(v), page_bytes(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
		   -1, 0);
}

static atomic_int forking, windows;

bool window_begin(void)
{
	(void)atomic_fetch_add(&windows, 1);
	if (atomic_load(&forking) == 0)
		return true;
	(void)atomic_fetch_sub(&windows, 1);
	return false;
}

void window_end(void)
{
	(void)atomic_fetch_sub(&windows, 1);
}

bool fork_under_way(void)
{
	return atomic_load(&forking) != 0;
}

static void prepare(void)
{
	const struct timespec t = { .tv_nsec = 50000 };

	(void)atomic_fetch_add(&forking, 1);
	while (atomic_load(&windows) > 0)
		(void)nanosleep(&t, NULL);
}

static void in_parent(void)
{
	(void)atomic_fetch_sub(&forking, 1);
}

static void in_child(void)
{
	bool first = true;
	int fd = -1;

	registry_forked();
	atomic_store(&forking, 0);
	atomic_store(&windows, 0);
	/* The parent's descriptors (its memory, its faults, its reads) first: there may be no other one left for pagemap. */
	for (struct list *n = pagers.next; n != &pagers; n = n->next) {
		struct pager *p = container_of(n, struct pager, node);

		(void)pthread_mutex_init(&p->lock, NULL);
		(void)pthread_mutex_init(&p->lift, NULL);
		/* (Destroying one that others wait at would wait for them.) */
		(void)pthread_cond_init(&p->changed, NULL);
		(void)pthread_cond_init(&p->work, NULL);
		(void)pthread_cond_init(&p->slow_work, NULL);
		list_init(&p->jobs);
		if (!p->forked && p->way != WAY_MMAP) {
			for (int i = 0; i < p->nr_mms; i++)
				if (p->mms[i].uffd >= 0)
					(void)close(TAKE_FD(p->mms[i].uffd));
			if (p->epoll_fd >= 0)
				(void)close(TAKE_FD(p->epoll_fd));
			if (p->ring)
				(void)close(ring_fd(p->ring));
			p->ring = NULL; /* its memory is not mapped here */
		}
		int *fds[] = { &p->pagemap_fd, &p->wake_fd, &p->empty_fd, &p->reserve_fd };

		for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
			if (*fds[i] >= 0)
				(void)close(TAKE_FD(*fds[i]));
		arena_fs_done(&p->fs);
	}
	for (struct list *n = pagers.next; n != &pagers; n = n->next) {
		struct pager *p = container_of(n, struct pager, node);

		if (!p->client || p->forked)
			continue;
		p->pagemap_fd = pagemap_open();
		p->claimed = client_forked(p);
	}
	for (unsigned int i = 0; i < registry_max(); i++) {
		struct view *v = registry_at(i);

		if (!v || v->pager->forked || v->pager->claimed)
			continue;
		if (v->mmap && !v->client) /* (after a rescue some of it is still the arena, and not open) */
			continue;
		if (first)
			fd = pagemap_open();
		first = false;
		replace_view(v, fd);
	}
	if (fd >= 0)
		(void)close(fd);
	(void)pthread_mutex_init(&pagers_lock, NULL);
	for (struct list *n = pagers.next; n != &pagers; n = n->next) {
		struct pager *p = container_of(n, struct pager, node);

		p->forked |= !p->claimed;
	}
}

static void handlers(void)
{
	(void)pthread_atfork(prepare, in_parent, in_child);
}

void fork_register(struct pager *p)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	(void)pthread_once(&once, handlers);
	(void)pthread_mutex_lock(&pagers_lock);
	list_add_tail(&pagers, &p->node);
	(void)pthread_mutex_unlock(&pagers_lock);
}

void fork_unregister(struct pager *p)
{
	(void)pthread_mutex_lock(&pagers_lock);
	list_del(&p->node);
	(void)pthread_mutex_unlock(&pagers_lock);
}
