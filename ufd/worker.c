/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker: everything that waits for this process's mmap_lock (UNREGISTER, REGISTER, clearing page tables), and
 * punching. It works in runs of at most RUN_MAX extents and looks after each whether a thread waits for an opening.
 */
#include "ufd/internal.h"

#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "ufd/hooks.h"
#include "ufd/window.h"

#define RUN_MAX WINDOW_MAX /* extents: 64 MiB, about 1 ms of REGISTER and punch */
#define SERVE_RUN_MAX 512u /* for several address spaces at once */
#define BUDGET_CHECK_NS 100000000

static unsigned char *run_at(const struct run *r)
{
	return r->view->base + run_off(r);
}

static bool in_queue(const struct extent *x, uint32_t flags, uint8_t state)
{
	return x->view && x->state == state && (x->flags & flags) && !list_empty(&x->queue) && !(x->flags & X_TAKING);
}

/* The first extent of a queue and those that follow it in the view and want the same. Takes them out; the view stays
 * until view_idle(). The lock is held. */
static struct run take_run(struct list *queue, uint32_t flags, size_t most)
{
	struct extent *x = container_of(queue->next, struct extent, queue);
	struct run r = { x->view, ext_index(x), 0 };

	r.view->busy++;
	do {
		list_del(&x->queue);
		r.nr++;
		x++;
	} while (r.nr < most && r.first + r.nr < r.view->nr_ext && in_queue(x, flags, EXT_READY));
	return r;
}

/* ------------------------------------------------------------------ opening */

struct huge_count {
	struct run *run;
	uint64_t pages[RUN_MAX];
};

static int huge_run(void *arg, const struct page_run *pr)
{
	struct huge_count *h = arg;
	uint64_t base = (uintptr_t)h->run->view->arena.alias + run_off(h->run);

	for (uint64_t a = pr->start; pr->huge && a < pr->end;) {
		size_t e = (size_t)((a - base) / extent_bytes());
		uint64_t end = MIN(pr->end, base + (e + 1) * extent_bytes());

		h->pages[e] += (end - a) / page_bytes();
		a = end;
	}
	return 0;
}

/* The alias has done its work: see on what pages the extents are, then out of the page tables. */
static void zap(struct run *r)
{
	struct view *v = r->view;
	struct pager *p = v->pager;
	struct huge_count h = { .run = r };
	unsigned char *at = v->arena.alias + run_off(r);

	if (p->pagemap_fd >= 0 && pagemap_scan(p->pagemap_fd, at, run_len(r), huge_run, &h) == 0) {
		for (size_t i = 0; i < r->nr; i++) {
			uint64_t len = MIN(extent_bytes(), run_len(r) - i * extent_bytes());

			/* Small pages stay: MADV_COLLAPSE of an extent in use took 7 to 20 ms and made 35 times the faults (6.18); it
			 * gets a huge page when it is read again. */
			if (h.pages[i] * page_bytes() != len)
				continue;
			own_lock(p);
			v->ext[r->first + i].flags |= X_HUGE;
			if (p->serve)
				serve_publish(&v->ext[r->first + i]);
			own_unlock(p);
		}
	}
	arena_zap_alias(&v->arena, run_off(r), run_len(r));
}

/* Needs no VMA. -EAGAIN: a fork in flight, its event is not read yet: once more. */
static int open_by_page(int uffd, const struct view *v, size_t ext)
{
	unsigned char *at = v->base + ext * extent_bytes();
	uint64_t len = MIN(extent_bytes(), v->bytes - ext * extent_bytes());
	int r = uffd_continue(uffd, at, len);

	if (r < 0 && r != -EAGAIN)
		(void)uffd_wake(uffd, at, len); /* ENOENT: it is open already, or the program has unmapped a part */
	return r;
}

static void open_run(struct pager *p)
{
	struct extent *head = container_of(p->open.next, struct extent, queue);
	uint32_t kind = head->flags & (X_WAIT | X_WANT) ? X_WAIT | X_WANT : X_ZAP;
	struct run r = take_run(&p->open, kind, RUN_MAX);
	struct view *v = r.view;
	bool lift = false, want_zap = false, by_page = false, again[RUN_MAX] = { 0 };

	for (size_t i = 0; i < r.nr; i++) {
		struct extent *x = &v->ext[r.first + i];

		lift |= (x->flags & X_POISON) != 0;
		want_zap |= (x->flags & X_ZAP) != 0;
		x->flags &= ~(X_POISON | X_ZAP);
	}
	/* Each border costs a VMA of the process (vm.max_map_count): beyond our part of them, page by page. */
	by_page = p->borders + 2 > p->max_borders;
	own_unlock(p);
	if (kind != X_ZAP) {
		if (pager_hooks.before_open)
			pager_hooks.before_open();
		if (lift)
			view_lift(v, r.first, r.nr);
		if (!by_page)
			by_page = uffd_open_range(p->mms[0].uffd, run_at(&r), run_len(&r)) == -ENOMEM;
		for (size_t i = 0; by_page && i < r.nr; i++)
			again[i] = open_by_page(p->mms[0].uffd, v, r.first + i) == -EAGAIN;
	}
	own_lock(p);
	for (size_t i = 0; i < r.nr; i++) {
		struct extent *x = &v->ext[r.first + i];

		if (kind != X_ZAP && !again[i]) {
			x->flags &= ~(X_WAIT | X_WANT);
			if (by_page)
				x->flags |= X_CONT;
			else
				ext_open_flags(x, true);
		}
		ext_settle(x);
	}
	if (want_zap) {
		/* After the waiters: it is only for the accounts. Extents that are being dropped meanwhile stay in memory until
		 * this thread comes to it. */
		own_unlock(p);
		zap(&r);
		own_lock(p);
	}
	view_idle(v);
	if (!list_empty(&p->jobs))
		pager_wake_reader(p);
}

/* The same in a forked child's address space. */
static void open_child(struct pager *p)
{
	struct child_open c = p->child_opens[--p->nr_child_opens];
	struct view *v = c.ext->view;
	struct run r = { v, ext_index(c.ext), 1 };

	if (p->mms[c.mm].uffd < 0 || p->mms[c.mm].gone || p->mms[c.mm].seq != c.seq)
		return;
	v->busy++;
	if (c.ext->state != EXT_READY || c.ext->flags & X_TAKING) {
		/* Being taken back: it is woken when the bytes are there again, or at once if they stay. */
		c.ext->flags |= X_WANT;
		ext_settle(c.ext);
		own_unlock(p);
		sched_yield();
		(void)uffd_wake(p->mms[c.mm].uffd, run_at(&r), run_len(&r));
	} else {
		own_unlock(p);
		if (uffd_open_range(p->mms[c.mm].uffd, run_at(&r), run_len(&r)) == -ENOMEM &&
		    open_by_page(p->mms[c.mm].uffd, v, r.first) == -EAGAIN)
			(void)uffd_wake(p->mms[c.mm].uffd, run_at(&r), run_len(&r)); /* it faults again */
	}
	own_lock(p);
	view_idle(v);
}

/* ------------------------------------------------------------------ arming */

static bool child_has_view(const struct pager *p, int mm, const struct view *v)
{
	return p->mms[mm].uffd >= 0 && !p->mms[mm].gone && v->seq < p->mms[mm].seq;
}

/* Where VMAs have run out, one register call for the whole view needs none: it merges. */
static int arm_whole(struct pager *p, struct view *v)
{
	int r = uffd_register(p->mms[0].uffd, v->base, v->bytes, false);

	if (r < 0)
		return r;
	own_lock(p);
	for (size_t i = 0; i < v->nr_ext; i++) {
		struct extent *x = &v->ext[i];

		if (!x->view || !(x->flags & X_OPEN))
			continue;
		ext_open_flags(x, false);
		if (list_empty(&x->queue))
			ext_settle(x);
	}
	own_unlock(p);
	return 0;
}

/*
 * Arms the run in every address space that has the view. Errors of REGISTER (measured, 6.18): EBUSY another userfaultfd
 * has it; EINVAL, ENOENT something else is mapped there now; ENOMEM no VMA left, or the address space is gone (the
 * probe tells which). Whatever is neither 0 nor a proven end forbids the punch.
 */
static int arm_everywhere(struct pager *p, const struct run *r)
{
	int e = uffd_register(p->mms[0].uffd, run_at(r), run_len(r), false);

	if (e == -ENOMEM)
		e = arm_whole(p, r->view);
	if (e < 0)
		return e;
	for (int i = 1; i < p->nr_mms; i++) {
		if (!child_has_view(p, i, r->view))
			continue;
		/* Asked first: where a child has replaced the view, something of its own may lie there by now. */
		switch (uffd_probe(p->mms[i].uffd, view_sentinel(r->view))) {
		case PROBE_UNMAPPED:
			continue;
		case PROBE_DEAD:
			p->mms[i].gone = true;
			__atomic_store_n(&p->some_gone, true, __ATOMIC_RELEASE);
			pager_wake_reader(p);
			continue;
		default:
			break;
		}
		e = uffd_register(p->mms[i].uffd, run_at(r), run_len(r), false);
		if (e < 0 && uffd_probe(p->mms[i].uffd, view_sentinel(r->view)) != PROBE_DEAD)
			return e;
	}
	return 0;
}

/*
 * Arms the run everywhere, children in flight too. A fork copies the VMAs, its event is queued only afterwards, and until
 * that has been read CONTINUE answers EAGAIN. So: every address space that is known is armed, none is forking, and no
 * event was taken in meanwhile (fork_seq, read before the first REGISTER: a child that was copied before it and came into
 * the table after it would be armed by nobody).
 */
static bool arm_and_probe(struct pager *p, const struct run *r, uint64_t until)
{
	for (;;) {
		unsigned int seq = atomic_load(&p->fork_seq);
		bool quiet = !(seq & 1);

		if (arm_everywhere(p, r) < 0)
			return false;
		if (pager_hooks.after_arm)
			pager_hooks.after_arm();
		if (!p->caps.event_fork)
			return true; /* children are known by their fork handler alone; it replaces the view before they touch it */
		for (int i = 0; quiet && i < p->nr_mms; i++) {
			if (i && !child_has_view(p, i, r->view))
				continue;
			quiet = uffd_probe(p->mms[i].uffd, view_sentinel(r->view)) != PROBE_FORKING;
		}
		if (quiet && atomic_load(&p->fork_seq) == seq)
			return true;
		if (now_ns() > until)
			return false;
		sched_yield(); /* the reader takes the event in */
	}
}

/* ------------------------------------------------------------------ taking back */

/* What holds an extent up (the reader's CONTINUE, a fork, a child that sets itself up, a client) needs a moment, and the
 * lock. */
static void breathe(struct pager *p)
{
	const struct timespec t = { .tv_nsec = p->serve ? 500000 : 20000 };

	own_unlock(p);
	(void)nanosleep(&t, NULL);
	own_lock(p);
}

/* Without those that a client's mapping holds. */
static bool punch_run(const struct run *r)
{
	struct view *v = r->view;

	for (size_t i = 0, nr; i < r->nr; i += nr) {
		struct run part = { v, r->first + i, 0 };
		bool stuck = (v->ext[part.first].flags & X_STUCK) != 0;

		for (nr = 1; i + nr < r->nr && !(v->ext[part.first + nr].flags & X_STUCK) == !stuck; nr++)
			;
		part.nr = nr;
		if (!stuck && arena_punch(&v->arena, run_off(&part), run_len(&part)) < 0)
			return false;
	}
	return true;
}

static void take_back(struct pager *p)
{
	struct run r = take_run(&p->drop, X_DROP, p->serve ? SERVE_RUN_MAX : RUN_MAX);
	struct view *v = r.view;
	uint64_t now = now_ns(), bytes = 0;
	size_t nr = 0;
	bool done;

	/* Only as far as nothing is under way on them: a CONTINUE of the reader's. */
	while (nr < r.nr && v->ext[r.first + nr].inflight == 0)
		v->ext[r.first + nr++].flags |= X_TAKING;
	for (size_t i = nr; i < r.nr; i++) {
		struct extent *x = &v->ext[r.first + i];

		if (p->serve && now > x->drop_ns) { /* a client may hold the reader's CONTINUE up as long as it likes */
			ext_drop_done(x, X_DROP);
			ext_settle(x);
		} else {
			ext_queue(x, &p->drop);
		}
	}
	r.nr = nr;
	if (!nr) {
		view_idle(v);
		breathe(p);
		return;
	}
	own_unlock(p);

	done = p->serve ? serve_arm(p, &r, now + PROBE_DEADLINE_NS) : arm_and_probe(p, &r, now + PROBE_DEADLINE_NS);
	if (done && pager_hooks.before_punch)
		pager_hooks.before_punch();
	/* Before the first byte goes: a next daemon believes the table. */
	for (size_t i = 0; done && p->serve && i < r.nr; i++)
		if (!(v->ext[r.first + i].flags & X_STUCK)) /* may be open: stays READY there */
			serve_unpublish(&v->ext[r.first + i]);
	done = done && punch_run(&r);

	own_lock(p);
	for (size_t i = 0; i < r.nr; i++) {
		struct extent *x = &v->ext[r.first + i];
		bool gone = done && !(x->flags & X_STUCK);

		/* Armed by now, in any case. (Where arming failed it may be open still: then the flag says less than
		 * is true, which costs a fault at most.) */
		if (gone)
			ext_open_flags(x, false);
		x->flags &= ~(X_TAKING | X_STUCK);
		if (p->serve && !gone)
			serve_publish(x);
		if (gone) {
			ext_state(x, EXT_EMPTY);
			x->flags &= ~(X_CONT | X_HUGE | X_ZAP | X_TOUCHED);
			bytes += ext_len(x);
			ext_unreserve(x);
		} else if (done || now > x->drop_ns) {
			ext_drop_done(x, X_DROP);     /* given up; it stays READY */
			p->evict_failed |= EVICT_ANY; /* whoever waits for this room must not wait for ever */
			pager_wake_reader(p);
		}
		ext_settle(x);
	}
	v->stats.dropped_bytes += bytes;
	p->stats.dropped_bytes += bytes;
	view_idle(v);
	pager_wake_reader(p); /* there is room; or a job waits for what stays */
	if (!done)
		breathe(p);
}

/* ------------------------------------------------------------------ clearing page tables: see window.h */

/* Clears a run that is in no queue, and tells which of it is armed and open afterwards. The lock is held, and a window
 * has been begun (fork.c). */
static void clear_taken(struct pager *p, struct run *r, bool arm)
{
	const struct window w = { p->mms[0].uffd, p->caps.wp, p->pagemap_fd };
	struct view *v = r->view;
	uint32_t written[WINDOW_MAX];
	bool was_open[RUN_MAX];
	int e;

	for (size_t i = 0; i < r->nr; i++) {
		struct extent *x = &v->ext[r->first + i];

		x->flags |= X_TAKING;
		was_open[i] = (x->flags & X_OPEN) != 0;
	}
	own_unlock(p);
	e = window_clear(&w, run_at(r), run_len(r), written);
	for (size_t i = 0; e == 0 && i < r->nr; i++)
		v->ext[r->first + i].written = (uint16_t)MIN(written[i], (uint32_t)UINT16_MAX);
	if (arm) /* also where it cannot be seen whether it is used: it can be dropped */
		e = uffd_register(p->mms[0].uffd, run_at(r), run_len(r), false);
	/* What had been armed and stays so: a run is of one kind only if it was; arm the others again. */
	for (size_t i = 0; !arm && i < r->nr; i++)
		if (!was_open[i] && e != -EOPNOTSUPP)
			(void)uffd_register(p->mms[0].uffd, run_at(r) + i * extent_bytes(),
					    MIN(extent_bytes(), run_len(r) - i * extent_bytes()), false);
	window_end();
	own_lock(p);
	for (size_t i = 0; i < r->nr; i++) {
		struct extent *x = &v->ext[r->first + i];

		x->flags &= ~(X_TAKING | (e == 0 ? X_CONT : 0));
		if (arm && e == 0)
			ext_open_flags(x, false);
		if (!arm && e < 0)
			x->flags |= X_TOUCHED; /* it cannot be seen: taken as touched, so it is not dropped for it */
		ext_settle(x);                 /* X_WAIT: was parked */
	}
}

static void clear_queued(struct pager *p)
{
	struct run r;
	size_t nr = 0;

	if (!window_begin()) { /* a fork is under way; whoever waits for an opening must not wait for it */
		breathe(p);
		return;
	}
	r = take_run(&p->clear, X_CLEAR, RUN_MAX);
	while (nr < r.nr && r.view->ext[r.first + nr].inflight == 0)
		ext_drop_done(&r.view->ext[r.first + nr++], X_CLEAR);
	for (size_t i = nr; i < r.nr; i++)
		ext_queue(&r.view->ext[r.first + i], &p->clear);
	r.nr = nr;
	if (nr) {
		p->nr_drops++; /* waited for by pager_sync() until it is really done */
		clear_taken(p, &r, false);
		if (--p->nr_drops == 0)
			(void)pthread_cond_broadcast(&p->changed);
	} else {
		window_end();
		breathe(p);
	}
	view_idle(r.view);
}

/* ------------------------------------------------------------------ making room */

/* Moves the oldest open extents to the armed list: those that are touched come back, the others are next to go. */
static void arm_oldest(struct pager *p, int class, uint64_t target)
{
	/* (Bounded: what cannot be armed goes to the end of the list and would come round again.) */
	for (size_t left = p->nr_lru[class][LRU_OPEN]; left && p->nr_lru[class][LRU_ARMED] < target;) {
		struct extent *x = container_of(p->lru[class][LRU_OPEN].next, struct extent, lru);
		struct run r = { x->view, ext_index(x), 0 };

		if (list_empty(&p->lru[class][LRU_OPEN]) || !list_empty(&p->open) || p->stop || !window_begin())
			return;
		while (r.nr < MIN(left, (size_t)RUN_MAX) && r.first + r.nr < r.view->nr_ext && x->view &&
		       x->state == EXT_READY && (x->flags & X_OPEN) && !list_empty(&x->lru) && x->inflight == 0) {
			ext_lru(x, -1, false);
			r.nr++;
			x++;
		}
		if (!r.nr) { /* the reader is at it: to the end of the list */
			window_end();
			ext_lru(x, LRU_OPEN, false);
			left--;
			continue;
		}
		left -= r.nr;
		r.view->busy++;
		clear_taken(p, &r, true);
		view_idle(r.view);
	}
}

static uint64_t evict_from(struct pager *p, int class, int list, uint64_t bytes, uint64_t now)
{
	uint64_t got = 0;

	while (got < bytes && !list_empty(&p->lru[class][list])) {
		struct extent *x = container_of(p->lru[class][list].next, struct extent, lru);

		ext_lru(x, -1, false);
		if (x->view->dying || x->flags & X_DROP)
			continue;
		got += ext_len(x);
		x->drop_ns = now + PROBE_DEADLINE_NS;
		x->flags |= X_DROP;
		p->nr_drops++;
		ext_settle(x);
	}
	return got;
}

/* What no stage needs goes first, then what was armed and not touched since. In WAY_USER nothing is taken back but at a
 * stage mark: a system call on an armed page would fail. */
static void evict(struct pager *p)
{
	uint64_t budget = __atomic_load_n(&p->budget, __ATOMIC_RELAXED), now = now_ns(), need = p->evict_need, nr,
		 got = 0, want;
	bool any = p->evict_any;

	want = policy_excess(p->resident, need, budget, extent_bytes());
	p->evict_need = 0;
	p->evict_any = false;
	/* What is being dropped already counts. */
	for (const struct list *l = p->drop.next; l != &p->drop && got < want; l = l->next)
		got += extent_bytes();
	if (p->way != WAY_USER) {
		got += evict_from(p, VIEW_UNNEEDED, LRU_ARMED, want > got ? want - got : 0, now);
		got += evict_from(p, VIEW_UNNEEDED, LRU_OPEN, want > got ? want - got : 0, now);
		if (any && got < want) {
			nr = p->nr_lru[VIEW_NORMAL][LRU_ARMED] + p->nr_lru[VIEW_NORMAL][LRU_OPEN];
			if (p->nr_lru[VIEW_NORMAL][LRU_ARMED] * extent_bytes() < want - got)
				arm_oldest(p, VIEW_NORMAL,
					   policy_armed_target(nr, (want - got + extent_bytes() - 1) / extent_bytes()));
			got += evict_from(p, VIEW_NORMAL, LRU_ARMED, want > got ? want - got : 0, now);
			/* The next victims, so that they have time to prove themselves. */
			nr = p->nr_lru[VIEW_NORMAL][LRU_ARMED] + p->nr_lru[VIEW_NORMAL][LRU_OPEN];
			arm_oldest(p, VIEW_NORMAL, policy_armed_target(nr, 0));
		}
	}
	if (!got && want && p->way != WAY_USER) {
		/* Nothing yet; is there something that may change it? Then it is no failure. */
		if (!list_empty(&p->open) || fork_under_way()) {
			p->evict_need = MAX(p->evict_need, need);
			p->evict_any |= any;
			if (list_empty(&p->open))
				breathe(p);
			return;
		}
		if (p->nr_fills)
			return; /* what is being read can go when it has come: the reader asks again then */
	}
	if (!got && want)
		p->evict_failed |= any ? EVICT_ANY : EVICT_GENTLE;
	pager_wake_reader(p);
}

/* ------------------------------------------------------------------ children */

/* Children that have ended, or have replaced all their views (the fork handler), need nothing any more. */
static void reap(struct pager *p)
{
	p->reap = false;
	for (int i = 1; i < p->nr_mms; i++) {
		uint64_t changes;
		bool needed;

		if (p->mms[i].uffd < 0 || p->mms[i].gone)
			continue;
		do {
			enum uffd_probe probe = PROBE_UNMAPPED;

			changes = p->view_changes;
			needed = false;
			for (size_t k = 0; k < p->nr_views && !needed && changes == p->view_changes; k++) {
				struct view *v = p->views[k];

				if (v->seq > p->mms[i].seq)
					continue;
				v->busy++;
				own_unlock(p);
				probe = uffd_probe(p->mms[i].uffd, view_sentinel(v));
				own_lock(p);
				view_idle(v);
				if (probe == PROBE_DEAD)
					break;
				needed = probe != PROBE_UNMAPPED;
			}
			if (probe == PROBE_DEAD)
				break;
		} while (changes != p->view_changes);
		if (!needed) {
			p->mms[i].gone = true;
			__atomic_store_n(&p->some_gone, true, __ATOMIC_RELEASE);
			pager_wake_reader(p);
		}
	}
}

/* ------------------------------------------------------------------ */

static void wait_for_work(struct pager *p)
{
	struct timespec until;
	bool children = false;
	int timeout_ms;

	for (int i = 1; i < p->nr_mms && !p->serve; i++) /* (a client's has a thread that asks) */
		children |= p->mms[i].uffd >= 0;
	/* An automatic budget follows what the rest of the program and of the machine takes: looked at while there is much
	 * to give back. Nothing tells when a child has ended: asked now and then. */
	if (p->serve || (!p->budget_set && p->resident >= p->budget / 2))
		timeout_ms = BUDGET_CHECK_NS / 1000000;
	else if (children)
		timeout_ms = 1000;
	else {
		(void)pthread_cond_wait(&p->work, &p->lock);
		return;
	}
	deadline_in(&until, timeout_ms);
	if (pthread_cond_timedwait(&p->work, &p->lock, &until) == ETIMEDOUT)
		p->reap = children;
}

void *worker_main(void *arg)
{
	struct pager *p = arg;

	own_lock(p);
	while (!p->stop) {
		if (!p->budget_set && (p->resident || p->evict_need) &&
		    now_ns() - p->budget_checked_ns > BUDGET_CHECK_NS) {
			p->budget_checked_ns = now_ns();
			own_unlock(p);
			view_budget_refresh(p);
			own_lock(p);
			if (p->resident > p->budget && p->way != WAY_USER && list_empty(&p->drop)) {
				p->evict_need = MAX(p->evict_need, (uint64_t)1);
				p->evict_any = true;
			}
		}
		if (p->serve && serve_tend(p))
			continue;
		if (!list_empty(&p->open))
			open_run(p);
		else if (p->nr_child_opens)
			open_child(p);
		else if (p->evict_need && p->serve)
			serve_evict(p);
		else if (p->evict_need)
			evict(p);
		else if (!list_empty(&p->drop))
			take_back(p);
		else if (!list_empty(&p->clear))
			clear_queued(p);
		else if (p->reap)
			reap(p);
		else
			wait_for_work(p);
	}
	own_unlock(p);
	return NULL;
}
