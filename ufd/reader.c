/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reader: fault messages, fork events, reads. See pager.c for what it must not do.
 * A read of one extent ("fill") goes through the ring (O_DIRECT, into the alias, RWF_NOWAIT), or by copying what the
 * page cache already has, or to the slow thread (slow.c).
 */
#include "ufd/internal.h"

#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>

#include "lib/base/log.h"
#include "ufd/hooks.h"

#define STALE_FAILURE_NS \
	1000000000ull           /* a failed read is not tried again before (a waiter's second fault, a bad disk) */
#define SLOW_OPEN_NS 1000000ull /* an UNREGISTER that takes longer is overtaken by a CONTINUE */
#define DIRECT_MIN_LEN (128 * 1024u)

/* view_idle() without the lock. */
static void view_done(struct view *v)
{
	struct pager *p = v->pager;

	own_lock(p);
	view_idle(v);
	own_unlock(p);
}

/* ------------------------------------------------------------------ reads */

/* The arena range [off, off + len) as parts of the file, one after the other; false: none left. */
static bool next_piece(const struct view *v, uint64_t off, uint64_t end, struct segment *ret)
{
	size_t lo = 0, hi = v->nr_segs;

	while (lo < hi) {
		size_t mid = (lo + hi) / 2;

		if (v->segs[mid].arena_off + v->segs[mid].len > off)
			hi = mid;
		else
			lo = mid + 1;
	}
	if (off >= end || lo == v->nr_segs || v->segs[lo].arena_off >= end)
		return false;
	ret->arena_off = MAX(off, v->segs[lo].arena_off);
	ret->file_off = v->segs[lo].file_off + (ret->arena_off - v->segs[lo].arena_off);
	ret->len = MIN(end, v->segs[lo].arena_off + v->segs[lo].len) - ret->arena_off;
	return true;
}

bool fill_piece(const struct fill *f, struct segment *ret)
{
	return next_piece(f->view, f->pos, f->end, ret);
}

/* Reads into the arena at these offsets can be direct: one piece, everything on the file's alignment. */
static bool can_direct(const struct fill *f)
{
	const struct view *v = f->view;
	const struct source *s = v->source;
	struct segment piece, more;

	if (!v->pager->ring || s->direct_fd < 0 || atomic_load(&v->source->direct_refused) || source_hook)
		return false;
	if (!next_piece(v, f->pos, f->end, &piece) || next_piece(v, piece.arena_off + piece.len, f->end, &more))
		return false;
	/* The tail's length is rounded up: what follows in the arena must be room of the same extent. */
	return piece.arena_off % s->align == 0 && piece.file_off % s->align == 0 &&
	       round_up(piece.arena_off + piece.len, s->align) <= f->end;
}

/* Is all of it in the page cache? Then copying is faster than the disk, and a direct read would not even use it. */
static bool is_cached(const struct view *v, uint64_t off, uint64_t len)
{
	struct {
		uint64_t off, len;
	} range = { round_down(off, page_bytes()), round_up(off + len, page_bytes()) - round_down(off, page_bytes()) };
	struct {
		uint64_t cached, dirty, writeback, evicted, recently_evicted;
	} stat;

#ifndef SYS_cachestat
#define SYS_cachestat 451 /* 6.5; the same number on every architecture */
#endif
	if (syscall(SYS_cachestat, v->source->fd, &range, &stat, 0) < 0)
		return false;
	return stat.cached == range.len / page_bytes();
}

bool fill_start(struct pager *p, struct extent *x, enum urgency urgency)
{
	bool demand = urgency == FILL_DEMAND;
	struct view *v = x->view;
	uint64_t len = ext_len(x), budget = __atomic_load_n(&p->budget, __ATOMIC_RELAXED);
	struct fill *f;

	if (p->nr_fills == NR_FILLS || (!demand && p->nr_fills_ahead >= NR_FILLS_AHEAD))
		return false;
	if (p->resident + len > budget && !(demand && p->evict_failed & EVICT_ANY)) {
		p->evict_need = MAX(p->evict_need, len);
		p->evict_any |= urgency != FILL_GENTLE;
		(void)pthread_cond_signal(&p->work);
		return false;
	}
	for (f = p->fills; f->used; f++)
		;
	*f = (struct fill){ .used = true,
			    .view = v,
			    .ext = ext_index(x),
			    .demand = demand,
			    .pos = ext_off(x),
			    .end = ext_off(x) + len };
	list_init(&f->queue);
	p->nr_fills++;
	p->nr_fills_ahead += !demand;
	v->busy++;
	list_del(&x->queue);
	ext_state(x, EXT_READING);
	x->code = FAULT_NONE;
	x->error = 0;
	x->flags |= X_RESERVED | (demand ? X_DEMAND : 0);
	p->resident += len;
	p->peak = MAX(p->peak, p->resident);
	v->resident += len;
	v->stats.peak_bytes = MAX(v->stats.peak_bytes, v->resident);
	if (x->flags & X_LOADED) {
		v->stats.reload_bytes += len;
		p->stats.reload_bytes += len;
		if (v->dropped) { /* a stage's mark had dropped it: once a comeback, however many extents */
			v->dropped = false;
			v->stats.reloads++;
			p->stats.reloads++;
		}
	}
	return true;
}

/* Gives a fill to the slow thread, from its beginning. No request of it is in flight. */
static void fill_slow(struct pager *p, struct fill *f)
{
	struct fill *own;

	f->slow = true;
	f->again = f->slow_started = false;
	f->pos = ext_off(&f->view->ext[f->ext]);
	/* A file server that does not answer must not keep a place that others need. */
	own = p->serve ? malloc(sizeof(*own)) : NULL;
	own_lock(p);
	if (own) {
		*own = *f;
		own->owned = true;
		list_init(&own->queue);
		f->used = false;
		p->nr_fills--;
		p->nr_fills_ahead -= !f->demand;
		f = own;
	}
	if (p->serve)
		serve_slow_push(f);
	else if (f->demand)
		list_add_head(&p->slow, &f->queue);
	else
		list_add_tail(&p->slow, &f->queue);
	(void)pthread_cond_signal(&p->slow_work);
	own_unlock(p);
}

/* The extent is complete, or has failed. */
static void fill_done(struct pager *p, struct fill *f)
{
	struct view *v = f->view;
	struct extent *x = &v->ext[f->ext];
	uint64_t now = now_ns(), wake_off = ext_off(x), wake_len = ext_len(x);
	bool failed;

	/* After the last byte, not before: a writer moves mtime before it changes the first byte (for writes by
	 * write(2); a shared writable mapping moves it at its first write to a clean page). The slow thread asks by itself: a
	 * network file system answers when its server does. */
	if (f->code == FAULT_NONE && !f->slow && source_check(v->source) < 0)
		f->code = FAULT_CHANGED;
	failed = f->code != FAULT_NONE;
	if (failed) /* nothing half read may be found there, by nobody */
		(void)arena_punch(&v->arena, wake_off, wake_len);

	own_lock(p);
	f->used = false;
	if (!f->owned) {
		p->nr_fills--;
		p->nr_fills_ahead -= !f->demand;
	}
	if (failed) {
		x->code = (uint8_t)f->code;
		x->error = f->error;
		ext_state(x, EXT_FAILED); /* tells both */
		x->failed_ns = now;
		x->flags &= ~(X_WAIT | X_WANT | X_DEMAND);
		ext_unreserve(x);
	} else {
		ext_state(x, EXT_READY);
		x->flags &= ~X_DEMAND;
		x->flags |= X_LOADED | X_ZAP;
		for (size_t i = 0; p->nr_waiting && i < NR_WAITING; i++)
			if (p->waiting[i].ext == x)
				p->waiting[i].since_ns = now;
	}
	ext_settle(x);
	own_unlock(p);
	if (f->owned)
		free(f);
	if (p->serve && failed)
		serve_wake(x);
	/* Waiters of a failed extent fault again and are answered with poison, each at its own page. Children are woken
	 * in any case: their ranges are opened when they fault again. (Only this thread closes a userfaultfd.) */
	for (int i = failed ? 0 : 1; !p->serve && i < p->nr_mms; i++)
		if (p->mms[i].uffd >= 0)
			(void)uffd_wake(p->mms[i].uffd, v->base + wake_off, wake_len);
	view_done(v);
}

static struct request *request_get(struct pager *p)
{
	if (p->nr_requests == RING_DEPTH)
		return NULL;
	for (struct request *r = p->requests;; r++)
		if (!r->fill) {
			p->nr_requests++;
			return r;
		}
}

/* Asks for the next parts of a fill, as many as the ring takes. */
static void fill_push(struct pager *p, struct fill *f)
{
	struct view *v = f->view;
	struct segment piece;

	while (!f->error && !f->again && next_piece(v, f->pos, f->end, &piece)) {
		uint32_t len = (uint32_t)round_up(MIN(piece.len, (uint64_t)v->direct_bytes), v->source->align);
		struct request *r = request_get(p);

		if (!r)
			return;
		if (!ring_read(p->ring, v->source->direct_fd, v->arena.alias + piece.arena_off, len, piece.file_off,
			       (uint64_t)(r - p->requests))) {
			p->nr_requests--;
			return;
		}
		*r = (struct request){ f, piece.arena_off, len };
		f->pos = piece.arena_off + MIN((uint64_t)len, piece.len);
		f->inflight++;
	}
	if (f->pos < f->end && !next_piece(v, f->pos, f->end, &piece))
		f->pos = f->end;
}

/* All that was asked for has come, or nothing can be asked any more. */
static void fill_check(struct pager *p, struct fill *f)
{
	if (f->inflight)
		return;
	if (f->error == 0 && f->again) {
		struct view *v = f->view;

		/* It would have had to wait: for the inode's lock (somebody writes into this file, perhaps from these
		 * very weights), for dirty pages, or because the device takes no request of this length. */
		if (!v->direct_ok && v->direct_bytes > DIRECT_MIN_LEN)
			v->direct_bytes /= 2;
		fill_slow(p, f);
		return;
	}
	if (f->error == 0 && f->pos < f->end)
		return; /* the ring was full */
	if (f->error && f->code == FAULT_NONE)
		f->code = FAULT_READ;
	if (!f->error)
		f->view->direct_ok = true;
	fill_done(p, f);
}

static void count_read(struct view *v, uint64_t bytes)
{
	(void)__atomic_add_fetch(&v->stats.read_bytes, bytes, __ATOMIC_RELAXED);
	(void)__atomic_add_fetch(&v->stats.reads, 1, __ATOMIC_RELAXED);
	(void)__atomic_add_fetch(&v->pager->stats.read_bytes, bytes, __ATOMIC_RELAXED);
	(void)__atomic_add_fetch(&v->pager->stats.reads, 1, __ATOMIC_RELAXED);
}

void fill_count_read(struct fill *f, uint64_t bytes)
{
	count_read(f->view, bytes);
}

static void request_done(struct pager *p, struct request *r, int res)
{
	struct fill *f = r->fill;
	struct view *v = f->view;
	struct segment piece = { 0 };
	uint64_t off = r->off, len = r->len, wanted;

	r->fill = NULL;
	p->nr_requests--;
	f->inflight--;
	(void)next_piece(v, off, f->end, &piece);
	wanted = MIN(len, piece.len);
	if (res == -EAGAIN || res == -EINTR) {
		f->again = true;
	} else if (res == -EINVAL || res == -EOPNOTSUPP) {
		source_direct_refused(v->source, res);
		f->again = true;
	} else if (res == -ENOMEM) {
		f->again = true;
	} else if (res < 0) {
		f->error = res;
		f->code = res == -EFAULT ? FAULT_NO_MEMORY : FAULT_READ; /* EFAULT: the arena's file system is full */
	} else if ((uint64_t)res < wanted) {
		count_read(v, (uint64_t)res);
		/* The end of the file (it shrank), or a read cut short: the slow path tells. */
		f->again = true;
	} else {
		count_read(v, MIN((uint64_t)res, wanted));
	}
}

/* Starts reading what fill_start() has set up. No lock. */
static void fill_go(struct pager *p, struct fill *f)
{
	struct view *v = f->view;
	struct extent *x = &v->ext[f->ext];
	struct segment piece;
	int r;

	if (atomic_load(&v->source->changed)) {
		f->code = FAULT_CHANGED;
		fill_done(p, f);
		return;
	}
	r = arena_alloc(&v->arena, ext_off(x), ext_len(x));
	if (p->serve && r == 0)
		serve_fed(p);
	if (r == -ENOSPC && p->serve && serve_hungry(x)) {
		own_lock(p);
		f->used = false;
		p->nr_fills--;
		p->nr_fills_ahead -= !f->demand;
		view_idle(v);
		own_unlock(p);
		return;
	}
	if (r < 0) {
		f->code = FAULT_NO_MEMORY;
		f->error = r;
		fill_done(p, f);
		return;
	}
	if (!source_hook && next_piece(v, f->pos, f->end, &piece) && piece.len == f->end - f->pos &&
	    is_cached(v, piece.file_off, piece.len)) {
		struct iovec iov = { v->arena.alias + piece.arena_off, piece.len };
		ssize_t n = preadv2(v->source->fd, &iov, 1, (off_t)piece.file_off, RWF_NOWAIT);

		if (n == (ssize_t)piece.len) {
			count_read(v, piece.len);
			own_lock(p);
			v->busy++;
			own_unlock(p);
			fill_done(p, f);
			/* Held twice otherwise. (What others have mapped stays.) It may take a while: after the waiters. */
			(void)posix_fadvise(v->source->fd, (off_t)piece.file_off, (off_t)piece.len,
					    POSIX_FADV_DONTNEED);
			view_done(v);
			return;
		}
	}
	if (!can_direct(f)) {
		if (atomic_load(&v->source->direct_refused))
			source_direct_refused(v->source, -EINVAL);
		fill_slow(p, f);
		return;
	}
	fill_push(p, f);
	fill_check(p, f);
}

static struct extent *queue_first(struct list *queue)
{
	return list_empty(queue) ? NULL : container_of(queue->next, struct extent, queue);
}

/* The same, past those whose file is so slow that many wait for it already. */
static struct extent *queue_next(struct pager *p, struct list *queue)
{
	struct extent *x;

	while ((x = queue_first(queue)) && p->serve && serve_slow_full(x->view))
		serve_park(x);
	return x;
}

#define AHEAD_A_ROUND 4 /* reads ahead that are begun before faults are looked at again: they may copy at once */

/* Starts reads, most urgent first, while there is room. Returns true if there may be more to start at once. */
static bool pump(struct pager *p)
{
	struct fill *start[NR_FILLS];
	bool was_used[NR_FILLS];
	unsigned int started = 0, ahead = 0;
	struct extent *x;

	if (p->serve && serve_let_going(p))
		return p->ring && ring_submit(p->ring);
	own_lock(p);
	for (int i = 0; i < NR_FILLS; i++)
		was_used[i] = p->fills[i].used;
	while ((x = queue_next(p, &p->demand)) && fill_start(p, x, FILL_DEMAND))
		p->evict_failed = 0; /* one may stand above the budget each time: it must go on */
	if (!x) {
		while (ahead < AHEAD_A_ROUND && (x = queue_next(p, &p->ahead)) && fill_start(p, x, FILL_AHEAD))
			ahead++;
		/* Nothing could be dropped for them: they were not asked for, so they go without. */
		if (x && p->evict_failed & EVICT_ANY) {
			while ((x = queue_first(&p->ahead))) {
				x->flags &= ~X_WANT;
				ext_queue(x, NULL);
			}
		}
		while (ahead < AHEAD_A_ROUND && job_pump(p))
			ahead++;
		p->evict_failed = 0;
	}
	for (int i = 0; i < NR_FILLS; i++)
		if (p->fills[i].used && !was_used[i])
			start[started++] = &p->fills[i];
	own_unlock(p);
	for (unsigned int i = 0; i < started; i++)
		fill_go(p, start[i]);
	/* What waited for room in the ring. */
	for (int i = 0; i < NR_FILLS; i++) {
		struct fill *f = &p->fills[i];

		if (f->used && !f->slow && f->pos < f->end && !f->error && !f->again) {
			fill_push(p, f);
			fill_check(p, f);
		}
	}
	if (p->ring && ring_submit(p->ring))
		return true;
	return started > 0 || ahead == AHEAD_A_ROUND;
}

static void reap_reads(struct pager *p)
{
	uint64_t tags[64];
	int res[64], n;
	struct list done, *l;

	while (p->ring && (n = ring_reap(p->ring, tags, res, 64)) > 0) {
		for (int i = 0; i < n; i++) {
			struct fill *f = p->requests[tags[i]].fill;

			request_done(p, &p->requests[tags[i]], res[i]);
			fill_push(p, f);
			fill_check(p, f);
		}
		(void)ring_submit(p->ring);
	}
	list_init(&done);
	own_lock(p);
	while (!list_empty(&p->slow_done)) {
		l = p->slow_done.next;
		list_del(l);
		list_add_tail(&done, l);
	}
	own_unlock(p);
	while (!list_empty(&done)) {
		l = done.next;
		list_del(l);
		fill_done(p, container_of(l, struct fill, queue));
	}
}

/* ------------------------------------------------------------------ faults */

/*
 * From now on the page is an error: the touching thread gets SIGBUS, a system call EFAULT. It is noted before the thread
 * is woken, which finds the reason in its handler and may lift the poison at once; and only where it was done:
 * view_lift() discards the page, which must not have been written to.
 */
static void poison(struct pager *p, int mm, struct view *v, uint64_t off)
{
	uint64_t page = off / page_bytes();
	unsigned char *at = v->base + page * page_bytes();
	int r = uffd_poison(p->mms[mm].uffd, at, page_bytes());

	if (r == -EOPNOTSUPP) {
		/* Before 6.6: a page of an empty file, where nothing is mapped yet. This waits for mmap_lock, the only thing here
		 * that does. In another address space it cannot be done: a raw clone's thread waits then. */
		if (mm)
			return;
		if (pagemap_absent(p->pagemap_fd, at, page_bytes()) &&
		    mmap(at, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, p->empty_fd, 0) !=
			    MAP_FAILED)
			r = 0;
	}
	if (r == 0 && mm == 0)
		(void)__atomic_fetch_or(&v->poisoned[page / 64], (uint64_t)1 << page % 64, __ATOMIC_RELEASE);
	(void)__atomic_add_fetch(&v->stats.failed, 1, __ATOMIC_RELAXED);
	(void)__atomic_add_fetch(&p->stats.failed, 1, __ATOMIC_RELAXED);
	/* (EAGAIN, a fork in flight; EEXIST, it has been mapped meanwhile: the thread tries again.) */
	(void)uffd_wake(p->mms[mm].uffd, at, page_bytes());
}

static void want(struct view *v, struct mapping *map, uint64_t first, uint64_t nr, uint64_t mark, size_t at)
{
	struct pager *p = v->pager;

	/* From the touch to the end, then what lies before it: the order of use, most probably. */
	for (uint64_t k = 0; k < nr; k++) {
		uint64_t i = at >= first && at < first + nr ? (at - first + k) % nr + first : first + k;
		struct extent *x = view_extent(v, i);

		if (i == at || x->flags & X_TAKING)
			continue;
		if (i >= mark) {
			/* In memory but armed, so that a touch of it tells to read on. */
			if (x->state == EXT_EMPTY && list_empty(&x->queue)) {
				ext_queue(x, &p->ahead);
			}
			continue;
		}
		if (x->state == EXT_FAILED)
			continue;
		if (x->state == EXT_READY && x->flags & X_OPEN)
			continue;
		x->flags |= X_WANT;
		if (map)
			serve_want(map, x);
		if (x->state == EXT_READING || (x->state == EXT_EMPTY && !list_empty(&x->queue)))
			continue;
		ext_settle(x);
	}
}

/* A thread that waits is sometimes woken for nothing (a late wake-up of mmap_lock's, measured once in 500 touches) and
 * faults once more: the same touch. */
static bool waits_already(const struct pager *p, const struct extent *x, uint64_t address)
{
	for (size_t i = 0; (x->flags & X_WAIT) && p->nr_waiting && i < NR_WAITING; i++)
		if (p->waiting[i].ext == x && p->waiting[i].address == address)
			return true;
	return false;
}

/* What follows a touched extent and is in memory, but armed: a new view's, or of the clock's last round. Far from the
 * budget nobody needs to know what of it is touched, and each fault costs more than all these openings together. */
static void want_ready(struct view *v, struct mapping *map, size_t at)
{
	for (size_t i = at + 1; i < MIN(v->nr_ext, at + 4 * POLICY_WINDOW_MAX); i++) {
		struct extent *x = &v->ext[i];

		if (!x->view || x->state != EXT_READY || x->flags & (X_OPEN | X_TAKING | X_DROP | X_CLEAR))
			return;
		if (map) {
			serve_want(map, x);
			continue;
		}
		x->flags |= X_WANT;
		ext_settle(x);
	}
}

/* One touch. Returns true if it is to be answered with poison. The lock is held. */
static bool fault(struct pager *p, int mm, struct view *v, struct mapping *map, uint64_t off, uint64_t address)
{
	struct extent *x = view_extent(v, off / extent_bytes());
	size_t at = ext_index(x), unit = view_unit_at(v, off);
	uint64_t first = at, last = at, most, budget = __atomic_load_n(&p->budget, __ATOMIC_RELAXED);
	struct policy_run run;
	bool again = map ? !serve_fault(map, x, address) : mm == 0 && waits_already(p, x, address);

	v->stats.faults += !again;
	p->stats.faults += !again;
	if (v->dying)
		return false;
	if (map ? mapping_forbidden(map) : v->forbidden) {
		x->flags |= mm ? 0 : X_POISON;
		return true;
	}
	if (x->state == EXT_EMPTY && atomic_load_explicit(&v->source->changed, memory_order_relaxed)) {
		x->code = FAULT_CHANGED;
		ext_state(x, EXT_FAILED);
		x->failed_ns = now_ns();
	}
	if (x->state == EXT_FAILED) {
		bool room = x->code == FAULT_NO_MEMORY && p->freed_ns > x->failed_ns;

		if (x->code == FAULT_CHANGED || (!room && now_ns() - x->failed_ns < STALE_FAILURE_NS)) {
			x->flags |= mm ? 0 : X_POISON;
			return true;
		}
		ext_state(x, EXT_EMPTY);
	}
	x->flags |= X_TOUCHED;
	if (!map && !(x->flags & (X_OPEN | X_TAKING)))
		ext_drop_done(x, X_DROP); /* a touch takes a drop back */
	if (unit != SIZE_MAX) {
		v->unit_used[unit] = 1;
		first = v->units[unit].off / extent_bytes();
		last = (v->units[unit].off + v->units[unit].len - 1) / extent_bytes();
	}
	if (mm == 0 || map) {
		struct waiting *w = p->waiting;

		x->flags |= X_WAIT;
		if (!again && p->nr_waiting < NR_WAITING) {
			uint64_t now = now_ns();

			while (w->ext)
				w++;
			*w = (struct waiting){ x, map, address, now, now };
			p->nr_waiting++;
		}
	} else if (x->state == EXT_READY) {
		if (p->nr_child_opens < NR_CHILD_OPENS) {
			p->child_opens[p->nr_child_opens++] = (struct child_open){ x, mm, p->mms[mm].seq };
			(void)pthread_cond_signal(&p->work);
		}
		return false;
	} else {
		x->flags |= X_WAIT; /* it is woken when it has been read; to open it here, too, does no harm */
	}
	if (x->state == EXT_READING && !(x->flags & X_DEMAND)) {
		x->flags |= X_DEMAND; /* somebody waits now: past what is only read ahead */
		for (int i = 0; i < NR_FILLS; i++) {
			struct fill *f = &p->fills[i];

			if (f->used && f->view == v && f->ext == at && f->slow && !list_empty(&f->queue) &&
			    !f->slow_started) {
				list_del(&f->queue);
				list_add_head(&p->slow, &f->queue);
			}
		}
		if (map)
			serve_slow_first(x);
	}
	ext_settle(x);
	/* Room for what is read beside it must not push out what was just read: a quarter of the budget. */
	most = budget / extent_bytes() / 4;
	run = policy_read(&v->streams, at, first, last, most);
	want(v, map, run.first, run.nr, run.mark, at);
	if ((mm == 0 || map) && x->state == EXT_READY && p->resident < budget - budget / 8)
		want_ready(v, map, at);
	return false;
}

static void on_fault(struct pager *p, int mm, const struct uffd_msg_info *m)
{
	bool poisoned = false, again = false;
	struct mapping *map = NULL;
	struct view *v;
	uint64_t off = 0;

	own_lock(p);
	if (p->serve) {
		map = serve_mapping_at(p, mm, m->address);
		v = map ? mapping_view(map) : NULL;
	} else {
		v = view_at(p, m->address);
	}
	if (v && v->dying)
		v = NULL;
	if (v) {
		off = map ? mapping_off(map, m->address) : m->address - (uintptr_t)v->base;
		poisoned = fault(p, mm, v, map, off, m->address);
		if (map) {
			if (poisoned)
				serve_poison(map, m->address);
			own_unlock(p);
			return;
		}
		v->poisoning += poisoned;
		if (mm && !poisoned && p->nr_child_opens == NR_CHILD_OPENS)
			again = true;
		v->busy++;
	}
	own_unlock(p);
	if (!v)
		return;
	if (poisoned) {
		poison(p, mm, v, off);
		own_lock(p);
		if (--v->poisoning == 0)
			(void)pthread_cond_broadcast(&p->changed);
		own_unlock(p);
	} else if (again) /* no room to note it: it faults again */
		(void)uffd_wake(p->mms[mm].uffd, v->base + round_down(off, page_bytes()), page_bytes());
	view_done(v);
}

/* A child in flight. Its userfaultfd is in the table before fork_seq is even again: a take-back that finds the address
 * space quiet and fork_seq unmoved knows every child. */
static void on_fork(struct pager *p, int fd)
{
	struct epoll_event ev = { .events = EPOLLIN };
	int i;

	own_lock(p);
	for (i = 1; i < NR_MMS && p->mms[i].uffd >= 0; i++)
		;
	if (i < NR_MMS) {
		p->mms[i] = (struct mm){ .uffd = fd, .seq = ++p->seq };
		p->nr_mms = MAX(p->nr_mms, i + 1);
		p->reap = true; /* a good moment to look after the older ones */
		(void)pthread_cond_signal(&p->work);
	}
	own_unlock(p);
	if (i == NR_MMS) {
		/* A thousand children made by fork alone that neither ended nor ran the fork handler. */
		(void)close(fd);
		log_error("a forked child is not served: more than %d are alive", NR_MMS);
		return;
	}
	ev.data.u32 = (uint32_t)i;
	(void)epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, fd, &ev);
}

/* Returns false if a fork event must be read later: no descriptor is left. */
static bool read_events(struct pager *p, int mm)
{
	struct uffd_msg_info msgs[64];
	atomic_uint *seq = p->serve ? serve_reading(p, mm) : &p->fork_seq;
	int n, fd;

	own_lock(p);
	fd = p->mms[mm].uffd;
	own_unlock(p);
	if (fd < 0)
		return true;
	for (int turn = 0; turn < 4;
	     turn++) { /* (epoll tells again: one client's faults must not keep all others waiting) */
		(void)atomic_fetch_add(seq, 1); /* odd: a fork event may be between the kernel and our table */
		n = uffd_read(fd, msgs, 64);
		if (n == -EMFILE || n == -ENFILE) {
			/* The fork hangs until its event is read: this is what the reserve is for. */
			if (p->reserve_fd >= 0) {
				(void)close(TAKE_FD(p->reserve_fd));
				n = uffd_read(fd, msgs, 64);
			}
		}
		for (int i = 0; i < n; i++)
			if (msgs[i].event == EVENT_FORK) {
				if (p->serve)
					serve_on_fork(p, mm, msgs[i].child_fd);
				else
					on_fork(p, msgs[i].child_fd);
			}
		(void)atomic_fetch_add(seq, 1);
		if (n <= 0)
			return n != -EMFILE && n != -ENFILE;
		for (int i = 0; i < n; i++)
			if (msgs[i].event == EVENT_FAULT)
				on_fault(p, mm, &msgs[i]);
		if (n < 64)
			return true;
	}
	return true;
}

/* Pages whose opening takes long get a CONTINUE, which needs no mmap_lock. Returns true if some are still watched. */
static bool overtake(struct pager *p)
{
	uint64_t now;
	bool watched = false;

	if (!p->nr_waiting)
		return false;
	now = now_ns();
	own_lock(p);
	for (size_t i = 0; i < NR_WAITING && p->nr_waiting; i++) {
		struct waiting *w = &p->waiting[i];
		struct extent *x = w->ext;
		struct view *v;
		void *page;

		if (!x)
			continue;
		if (w->map ? !serve_waits(w) : !(x->flags & X_WAIT) || (x->state == EXT_READY && x->flags & X_OPEN)) {
			w->ext = NULL; /* answered */
			p->nr_waiting--;
			continue;
		}
		if (x->state != EXT_READY)
			continue; /* since_ns is set when it is */
		/* (CONTINUE would lift a poison that view_lift() is about to discard.) */
		if (x->flags & (X_TAKING | X_POISON) || now - w->since_ns < SLOW_OPEN_NS) {
			watched = true;
			continue;
		}
		if (w->map) {
			serve_overtake(w);
			w->ext = NULL;
			p->nr_waiting--;
			continue;
		}
		page = (void *)(uintptr_t)round_down(w->address, page_bytes());
		w->ext = NULL;
		p->nr_waiting--;
		x->inflight++; /* holds off a take-back */
		v = x->view;
		v->busy++;
		own_unlock(p);
		(void)uffd_continue(p->mms[0].uffd, page, page_bytes());
		own_lock(p);
		x->inflight--;
		view_idle(v);
	}
	own_unlock(p);
	return watched;
}

/* Children whose address space has ended, or that have replaced their views. Closed here, by the only thread that reads
 * them: a number that is used again would bring another address space's faults. */
static void close_gone(struct pager *p)
{

	if (!__atomic_exchange_n(&p->some_gone, false, __ATOMIC_ACQUIRE))
		return;
	for (int i = 1; i < p->nr_mms; i++) {
		if (!p->mms[i].gone)
			continue;
		(void)close(p->mms[i].uffd); /* epoll forgets it by itself */
		if (p->serve)
			serve_close_gone(p, i);
		own_lock(p);
		p->mms[i] = (struct mm){ .uffd = -1 };
		own_unlock(p);
	}
}

void *reader_main(void *arg)
{
	struct pager *p = arg;
	struct epoll_event events[32];
	bool retry = false, more = false;
	uint64_t spin_ns = p->serve ? serve_spin_ns(p) : 0, last_ns = 0;

	while (!__atomic_load_n(&p->stop, __ATOMIC_RELAXED)) {
		bool spin = spin_ns && now_ns() - last_ns < spin_ns;
		int n = epoll_wait(p->epoll_fd, events, 32, more || spin ? 0 : retry ? 1 : -1);

		if (spin_ns && n > 0)
			last_ns = now_ns();

		retry = false;
		for (int i = 0; i < n; i++) {
			uint64_t count;

			if (events[i].data.u32 < NR_MMS) {
				if (!read_events(p, (int)events[i].data.u32)) {
					/* It stays readable, so epoll would not wait. */
					const struct timespec t = { .tv_nsec = 1000000 };

					(void)nanosleep(&t, NULL);
					retry = true;
				}
			} else {
				(void)!read(p->wake_fd, &count, sizeof(count));
			}
		}
		reap_reads(p);
		more = pump(p);
		retry |= overtake(p);
		close_gone(p);
		if (p->reserve_fd < 0) {
			p->reserve_fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
			if (p->reserve_fd < 0) {
				own_lock(p);
				p->reap = !p->serve; /* (a client's has a thread that asks) */
				(void)pthread_cond_signal(&p->work);
				own_unlock(p);
				retry = true;
			}
		}
	}
	/* Nobody has a view any more; but reads may be in flight no longer, since closing a view waits for them. */
	return NULL;
}
