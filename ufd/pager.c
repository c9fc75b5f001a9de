/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pager: who does what, and what always holds.
 *
 * An extent's states, and who makes each transition:
 *
 *        fault, populate: reader (fill_start)          last byte read, file unchanged: reader (fill_done)
 *   EMPTY ------------------------------------> READING --------------------------------------> READY
 *     ^                                           | read failed, file changed: reader             |
 *     |                                           v                                               |
 *     |         asked again (after 1 s) <----- FAILED                                             |
 *     +-------------------------------------------------------------------------------------------+
 *        every address space armed and probed, hole punched: worker (take_back)
 *
 * A READY extent is *open* in this process (X_OPEN: not registered, the kernel maps it by itself), or *armed* (a
 * touch calls the reader, the worker opens it). Only the worker opens, arms, clears and punches.
 *
 * Threads
 *   reader   reads fault messages and fork events, starts and ends reads. Issues no REGISTER and no UNREGISTER and
 *            takes no lock but pager.lock, which nobody holds while it touches a view or waits for anything.
 *   worker   UNREGISTER + WAKE, REGISTER, page-table clearing, punching: all that waits for this process's mmap_lock.
 *            If it is slow, the reader gives a waiting page a CONTINUE.
 *   slow     reads that may not go through the ring: from a mapping of the file, which takes no inode lock.
 * None of them allocates, uses stdio, or runs signal handlers: fork holds malloc's and stdio's locks while it waits
 * for the reader to take its event.
 *
 * Invariants (DESIGN)
 *   I1 a range is open only while its extents are READY; a take-back arms every address space that has the view,
 *      children in flight too, before it punches.
 *   I2 READY means: all bytes read, and size and mtime of the file still as they were when it was opened.
 *      An extent that is not READY is a hole, or is punched before it is filled again.
 *   I4 dropping goes through the arena or through a write-protected window: no write is lost.
 *   I8 see "reader" above.
 */
#include "ufd/internal.h"

#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>

#include "lib/base/log.h"
#include "ufd/client.h"
#include "ufd/hooks.h"
#include "ufd/room.h"

uint64_t now_ns(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

void pager_lock(struct pager *p, sigset_t *saved)
{
	sigset_t all;

	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, saved);
	(void)pthread_mutex_lock(&p->lock);
}

void pager_unlock(struct pager *p, const sigset_t *saved)
{
	(void)pthread_mutex_unlock(&p->lock);
	(void)pthread_sigmask(SIG_SETMASK, saved, NULL);
}

void pager_wake_reader(struct pager *p)
{
	uint64_t one = 1;

	(void)!write(p->wake_fd, &one, sizeof(one));
}

/* ------------------------------------------------------------------ extents; the lock is held */

void ext_queue(struct extent *x, struct list *queue)
{
	list_del(&x->queue);
	if (queue)
		list_add_tail(queue, &x->queue);
	if (queue &&
	    (queue == &x->view->pager->open || queue == &x->view->pager->drop || queue == &x->view->pager->clear))
		(void)pthread_cond_signal(&x->view->pager->work);
}

static int lru_of(const struct extent *x)
{
	return x->flags & X_OPEN ? LRU_OPEN : LRU_ARMED;
}

void ext_lru(struct extent *x, int list, bool head)
{
	struct pager *p = x->view->pager;
	int class = x->view->class;

	if (!list_empty(&x->lru)) {
		p->nr_lru[class][lru_of(x)]--;
		list_del(&x->lru);
	}
	if (list < 0)
		return;
	if (head)
		list_add_head(&p->lru[class][list], &x->lru);
	else
		list_add_tail(&p->lru[class][list], &x->lru);
	p->nr_lru[class][list]++;
}

void ext_open_flags(struct extent *x, bool open)
{
	struct view *v = x->view;
	size_t i = ext_index(x);
	bool before = i > 0 && (x[-1].flags & X_OPEN), after = i + 1 < v->nr_ext && (x[1].flags & X_OPEN);
	unsigned int borders = v->borders;

	if (open == !!(x->flags & X_OPEN))
		return;
	ext_lru(x, -1, false); /* it is counted by this flag */
	/* What lies before the view and the sentinel behind it count as armed. */
	borders -= (before != !open) + (after != !open);
	borders += (before != open) + (after != open);
	x->flags ^= X_OPEN;
	v->pager->borders += borders - v->borders;
	v->borders = borders;
}

void ext_drop_done(struct extent *x, uint32_t flag)
{
	struct pager *p = x->view->pager;

	if (!(x->flags & flag))
		return;
	x->flags &= ~flag;
	if (--p->nr_drops == 0)
		(void)pthread_cond_broadcast(&p->changed);
}

void ext_state(struct extent *x, enum extent_state state)
{
	x->state = (uint8_t)state;
	if (x->view->serve)
		serve_publish(x);
}

void ext_settle(struct extent *x)
{
	struct view *v = x->view;
	struct pager *p = v->pager;

	if (v->dying || x->flags & X_TAKING)
		return;
	switch (x->state) {
	case EXT_READING:
		ext_queue(x, NULL);
		return;
	case EXT_FAILED:
		ext_drop_done(x, X_DROP);
		ext_drop_done(x, X_CLEAR);
		ext_lru(x, -1, false);
		ext_queue(x, NULL);
		return;
	case EXT_EMPTY:
		ext_drop_done(x, X_DROP);
		ext_drop_done(x, X_CLEAR);
		ext_lru(x, -1, false);
		if (p->serve && serve_waited(x)) /* since it was READY, and was being taken back */
			x->flags |= X_WAIT;
		ext_queue(x, x->flags & X_WAIT ? &p->demand : x->flags & X_WANT ? &p->ahead : NULL);
		if (x->flags & (X_WAIT | X_WANT))
			pager_wake_reader(p);
		return;
	default:
		break;
	}
	if (p->serve) {
		x->flags &= ~(X_WAIT | X_WANT);
		serve_settled(x);
	}
	/* Waiters first. (X_WAIT may also be of a thread that runs already and has asked for the drop itself: the worker clears
	 * the flag when it is done with the opening, and then comes the drop.) */
	if (!(x->flags & X_WAIT) && x->flags & X_DROP) {
		ext_lru(x, -1, false);
		ext_queue(x, &p->drop);
	} else if (!(x->flags & X_WAIT) && x->flags & X_CLEAR) {
		ext_lru(x, -1, false);
		ext_queue(x, &p->clear);
	} else if (x->flags & (X_WAIT | X_ZAP) || (x->flags & X_WANT && !(x->flags & X_OPEN))) {
		ext_lru(x, -1, false);
		ext_queue(x, &p->open);
	} else {
		x->flags &= ~X_WANT;
		ext_queue(x, NULL);
		if (list_empty(&x->lru))
			ext_lru(x, lru_of(x), false);
	}
}

void ext_unreserve(struct extent *x)
{
	if (x->flags & X_RESERVED) {
		x->flags &= ~X_RESERVED;
		x->view->pager->resident -= ext_len(x);
		x->view->resident -= ext_len(x);
		if (x->state != EXT_FAILED)
			x->view->pager->freed_ns = now_ns();
	}
}

struct view *view_at(struct pager *p, uint64_t address)
{
	size_t lo = 0, hi = p->nr_views;

	while (lo < hi) {
		size_t mid = (lo + hi) / 2;

		if ((uintptr_t)p->views[mid]->base <= address)
			lo = mid + 1;
		else
			hi = mid;
	}
	if (!lo || address >= (uintptr_t)p->views[lo - 1]->base + p->views[lo - 1]->bytes)
		return NULL;
	return p->views[lo - 1];
}

/* ------------------------------------------------------------------ the budget */

/* Worker (or at start): looks at the machine. Never called by the reader: reading /proc takes its time. */
void view_budget_refresh(struct pager *p)
{
	struct room room;
	uint64_t budget;

	if (p->budget_set || room_get("/proc", "/sys/fs/cgroup", &room) < 0)
		return;
	budget = policy_budget(__atomic_load_n(&p->resident, __ATOMIC_RELAXED), room.free_bytes, room.total_bytes);
	__atomic_store_n(&p->budget, MIN(budget, p->tmpfs_limit), __ATOMIC_RELAXED);
}

/* The tmpfs' own limit stands behind the table: it stops what the table does not know (a program that unregisters its
 * view and touches holes). Tails are rounded to pages, and threads that must go on may overshoot by some extents. */
static uint64_t limit_for(uint64_t budget)
{
	return budget + MAX(64 * extent_bytes(), budget / 16);
}

int pager_set_budget(struct pager *p, uint64_t budget_bytes)
{
	sigset_t saved;
	struct room room = { .total_bytes = UINT64_MAX / 4 };
	uint64_t limit;
	int r;

	if (pager_way(p) == WAY_MMAP)
		return -EOPNOTSUPP;
	if (p->client)
		return -EPERM; /* one for all processes: the daemon's */
	(void)room_get("/proc", "/sys/fs/cgroup", &room);
	limit = limit_for(budget_bytes ? budget_bytes : room.total_bytes);
	r = arena_fs_limit(&p->fs, limit);
	if (r < 0) { /* made in a user name space: it keeps the size that it was made with */
		if (limit > p->tmpfs_limit)
			return r;
		limit = p->tmpfs_limit;
	}
	pager_lock(p, &saved);
	p->budget_set = budget_bytes;
	p->tmpfs_limit = limit;
	if (budget_bytes)
		p->budget = MAX(budget_bytes, extent_bytes()); /* less holds nothing */
	p->budget_checked_ns = 0;
	p->freed_ns = now_ns();
	if (p->resident > p->budget) {
		p->evict_need = MAX(p->evict_need, (uint64_t)1);
		p->evict_any = true;
	}
	(void)pthread_cond_signal(&p->work);
	pager_unlock(p, &saved);
	if (!budget_bytes)
		view_budget_refresh(p);
	return 0;
}

/* ------------------------------------------------------------------ a pager's life */

static int thread_start(pthread_t *thread, void *(*fn)(void *), struct pager *p, const char *name)
{
	pthread_attr_t attr;
	int r;

	(void)pthread_attr_init(&attr);
	(void)pthread_attr_setstacksize(&attr, 256 * KiB);
	r = pthread_create(thread, &attr, fn, p);
	(void)pthread_attr_destroy(&attr);
	if (r == 0)
		(void)pthread_setname_np(*thread, name);
	return -r;
}

static int threads_start(struct pager *p)
{
	sigset_t all, saved;
	int r;

	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &saved); /* inherited: no handler of the program runs in ours */
	r = thread_start(&p->slow_thread, slow_main, p, "wd-slow");
	if (r == 0) {
		r = thread_start(&p->worker, worker_main, p, "wd-worker");
		if (r == 0) {
			r = thread_start(&p->reader, reader_main, p, "wd-pager");
			if (r == 0)
				goto out;
		}
	}
	own_lock(p);
	p->stop = true;
	(void)pthread_cond_broadcast(&p->work);
	(void)pthread_cond_broadcast(&p->slow_work);
	own_unlock(p);
	if (p->worker)
		(void)pthread_join(p->worker, NULL);
	if (p->slow_thread)
		(void)pthread_join(p->slow_thread, NULL);
out:
	(void)pthread_sigmask(SIG_SETMASK, &saved, NULL);
	return r;
}

static void pager_free(struct pager *p)
{
	for (int i = 0; i < p->nr_mms; i++)
		if (p->mms[i].uffd >= 0)
			(void)close(p->mms[i].uffd);
	(void)ring_free(p->ring);
	int *fds[] = { &p->epoll_fd, &p->wake_fd, &p->empty_fd, &p->reserve_fd, &p->pagemap_fd };
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
		if (*fds[i] >= 0)
			(void)close(*fds[i]);
	arena_fs_done(&p->fs);
	(void)pthread_mutex_destroy(&p->lock);
	(void)pthread_mutex_destroy(&p->lift);
	(void)pthread_cond_destroy(&p->work);
	(void)pthread_cond_destroy(&p->changed);
	(void)pthread_cond_destroy(&p->slow_work);
	free(p->views);
	free(p);
}

static int pager_setup(struct pager *p, struct wd_err *err)
{
	struct epoll_event ev = { .events = EPOLLIN };
	struct room room = { 0 };
	int r;

	if (p->way != WAY_EMBEDDED && p->way != WAY_USER && p->way != WAY_SERVE)
		return err_set(err, -EINVAL, "cannot start a pager: no such way (%d)", p->way);
	r = p->way == WAY_USER ? uffd_open_user(&p->caps) : uffd_open(p->way == WAY_SERVE, true, &p->caps);
	if (r < 0)
		return err_set(
			err, r == -EMFILE ? r : -EOPNOTSUPP,
			"cannot start a pager: userfaultfd is not allowed here (%s); see weightd doctor, or use WEIGHTD_MODE=mmap",
			strerror(-r));
	p->nr_mms = 1;
	if (p->way == WAY_SERVE) /* its clients bring theirs; this one has told what the kernel has */
		(void)close(r);
	else
		p->mms[0].uffd = r;
	p->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	p->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	p->reserve_fd = eventfd(0, EFD_CLOEXEC);
	p->pagemap_fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	if (!p->caps.poison)
		p->empty_fd = memfd_create("weightd-poison", MFD_CLOEXEC);
	if (p->epoll_fd < 0 || p->wake_fd < 0 || p->reserve_fd < 0 || (!p->caps.poison && p->empty_fd < 0))
		return err_set(err, -errno, "cannot start a pager: %s", strerror(errno));
	if (ring_new(RING_DEPTH, &p->ring) < 0)
		p->ring = NULL;
	ev.data.u32 = 0;
	r = p->way == WAY_SERVE ? 0 : epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, p->mms[0].uffd, &ev);
	ev.data.u32 = NR_MMS;
	r |= epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, p->wake_fd, &ev);
	if (p->ring)
		r |= epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, ring_fd(p->ring), &ev);
	if (r < 0)
		return err_set(err, -errno, "cannot start a pager: epoll: %s", strerror(errno));

	(void)room_get("/proc", "/sys/fs/cgroup", &room);
	p->tmpfs_limit = limit_for(p->budget_set ? p->budget_set : room.total_bytes);
	p->budget = p->budget_set ? MAX(p->budget_set, extent_bytes()) : 0; /* less holds nothing */
	view_budget_refresh(p);
	if (p->fs.mount_fd < 0) /* (a daemon before us may have left one) */
		arena_fs_init(&p->fs, p->tmpfs_limit, serve_mpol(p), p->way == WAY_SERVE, &r);
	if (r < 0)
		log_info("no tmpfs of our own (%s): weights are kept in memfds", strerror(-r));
	p->max_borders = 65530 / 4;
	{
		cleanup_close int fd = open("/proc/sys/vm/max_map_count", O_RDONLY | O_CLOEXEC);
		char text[32] = "";

		if (fd >= 0 && read(fd, text, sizeof(text) - 1) > 0)
			p->max_borders = (unsigned int)(strtoul(text, NULL, 10) / 4);
	}
	return p->way == WAY_SERVE ? 0 : pager_run(p, err);
}

int pager_run(struct pager *p, struct wd_err *err)
{
	int r = threads_start(p);

	return r < 0 ? err_set(err, r, "cannot start a pager: no thread: %s", strerror(-r)) : 0;
}

int pager_new(const struct pager_config *config, struct pager **ret, struct wd_err *err)
{
	struct pager *p = calloc(1, sizeof(*p));
	pthread_condattr_t attr;
	int r;

	if (!p)
		return err_set(err, -ENOMEM, "cannot start a pager: out of memory");
	p->nr_refs = 1;
	p->way = config->way;
	p->budget_set = config->budget_bytes;
	p->serve = config->serve;
	p->epoll_fd = p->wake_fd = p->empty_fd = p->reserve_fd = p->pagemap_fd = p->fs.mount_fd = p->fs.ro_fd = -1;
	if (config->fs)
		p->fs = *config->fs;
	for (int i = 0; i < NR_MMS; i++)
		p->mms[i].uffd = -1;
	struct list *lists[] = { &p->demand, &p->ahead, &p->open,      &p->drop, &p->clear,
				 &p->jobs,   &p->slow,  &p->slow_done, &p->node };
	for (size_t i = 0; i < ARRAY_SIZE(lists); i++)
		list_init(lists[i]);
	for (int i = 0; i < 3; i++)
		for (int j = 0; j < NR_LRU; j++)
			list_init(&p->lru[i][j]);
	(void)pthread_mutex_init(&p->lock, NULL);
	(void)pthread_mutex_init(&p->lift, NULL);
	(void)pthread_condattr_init(&attr);
	(void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	(void)pthread_cond_init(&p->work, &attr);
	(void)pthread_cond_init(&p->changed, &attr);
	(void)pthread_cond_init(&p->slow_work, &attr);
	(void)pthread_condattr_destroy(&attr);
	p->budget = UINT64_MAX;
	if (p->way == WAY_DAEMON)
		r = client_setup(p, config->socket, config->autostart, err);
	else
		r = p->way == WAY_MMAP ? 0 : pager_setup(p, err);
	if (r < 0) {
		pager_free(p);
		return r;
	}
	if (p->way == WAY_MMAP)
		p->pagemap_fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	if (p->way != WAY_SERVE)
		fork_register(p);
	*ret = p;
	return 0;
}

struct pager *pager_ref(struct pager *p)
{
	(void)__atomic_add_fetch(&p->nr_refs, 1, __ATOMIC_RELAXED);
	return p;
}

struct pager *pager_unref(struct pager *p)
{
	if (!p || __atomic_sub_fetch(&p->nr_refs, 1, __ATOMIC_ACQ_REL) > 0)
		return NULL;
	fork_unregister(p);
	if (p->client) {
		client_done(p);
	} else if (p->way != WAY_MMAP && !p->forked) {
		sigset_t saved;

		pager_lock(p, &saved);
		p->stop = true;
		(void)pthread_cond_broadcast(&p->work);
		(void)pthread_cond_broadcast(&p->slow_work);
		pager_wake_reader(p);
		pager_unlock(p, &saved);
		(void)pthread_join(p->reader, NULL);
		(void)pthread_join(p->worker, NULL);
		(void)pthread_join(p->slow_thread, NULL);
	}
	pager_free(p);
	return NULL;
}

enum way pager_way(const struct pager *p)
{
	return p->forked ? WAY_MMAP : p->way;
}

bool pager_is_forked(const struct pager *p)
{
	return p->forked;
}

/* ------------------------------------------------------------------ views */

bool view_layout_equal(const struct view *v, const struct view_layout *l)
{
	return v->nr_segs == l->nr_segs && !memcmp(v->segs, l->segs, l->nr_segs * sizeof(*l->segs)) &&
	       v->nr_units == l->nr_units &&
	       (!l->nr_units || !memcmp(v->units, l->units, l->nr_units * sizeof(*l->units)));
}

static uint64_t poison_bytes(const struct view *v)
{
	return round_up(v->bytes / page_bytes() + 1, 64) / 8;
}

void view_free(struct view *v)
{
	if (!v)
		return;
	if (v->client)
		client_view_close(v);
	if (v->base)
		(void)munmap(v->base, v->bytes + page_bytes());
	serve_view_done(v);
	arena_close(&v->arena);
	if (v->source_map)
		(void)munmap(v->source_map, v->source->id.size);
	if (v->ext)
		(void)munmap(v->ext, v->nr_ext * sizeof(*v->ext));
	if (v->poisoned)
		(void)munmap(v->poisoned, poison_bytes(v));
	free(v->segs);
	free(v->units);
	free(v->unit_used);
	(void)source_unref(v->source);
	(void)pager_unref(v->pager);
	free(v);
}

/* Zero pages that cost memory only where they are used. */
static void *sparse(uint64_t nbytes)
{
	void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

int view_map_failed(const struct view *v, int error, const char *what, struct wd_err *err)
{
	return err_set(err, error, "%s: cannot %s %llu MiB: %s%s", v->source->path, what,
		       (unsigned long long)(v->bytes / MiB), strerror(-error),
		       error == -ENOMEM ? "; check vm.max_map_count, ulimit -v and vm.overcommit_memory" :
		       error == -EMFILE ? "; raise the limit (ulimit -n, RLIMIT_NOFILE)" :
					  "");
}

void view_map_source(struct view *v)
{
	uint64_t size = v->source->id.size;
	void *m = size ? mmap(NULL, size, PROT_NONE, MAP_SHARED, v->source->fd, 0) : MAP_FAILED;

	if (m == MAP_FAILED)
		return;
	(void)munlock(m, size); /* MCL_FUTURE would read the whole file */
	(void)madvise(m, size, MADV_DONTFORK);
	if (mprotect(m, size, PROT_READ) == 0)
		v->source_map = m;
	else
		(void)munmap(m, size);
}

static int view_map(struct view *v, struct wd_err *err)
{
	static const _Alignas(4096) unsigned char zeros[64 * 1024]; /* one page of the largest size */
	struct pager *p = v->pager;
	uint64_t len = v->bytes + page_bytes();
	int r = arena_open(&p->fs, v->bytes, &v->arena);

	if (r < 0)
		return view_map_failed(v, r, "make an arena of", err);
	v->base = map_reserve(len);
	if (!v->base)
		return view_map_failed(v, -ENOMEM, "map", err);
	/* PROT_NONE until it is registered: with mlockall(MCL_FUTURE) mmap would fill the view with zeros, and no thread
	 * may touch it in between. (munlock: weights are never swapped; a locked view could not be observed.) */
	if (mmap(v->base, len, PROT_NONE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, v->arena.fd, 0) == MAP_FAILED)
		return view_map_failed(v, -errno, "map", err);
	(void)munlock(v->base, len);
	(void)madvise(v->base, len, MADV_HUGEPAGE);
	(void)madvise(v->base, len, MADV_DONTDUMP);
	r = uffd_register(p->mms[0].uffd, v->base, len, false);
	if (r < 0)
		return view_map_failed(v, r, "register with userfaultfd", err);
	if (mprotect(v->base, len, PROT_READ | PROT_WRITE) < 0) {
		/* overcommit_memory=2 charges a private writable mapping in full: writable extent by extent then */
		v->read_only = true;
		if (mprotect(v->base, len, PROT_READ) < 0)
			return view_map_failed(v, -errno, "map", err);
	}
	/* One private page gives the view its anon_vma before it is ever split: VMAs of written extents would never merge
	 * again otherwise. The sentinel stays armed for ever: probes ask it, fork events come through it. */
	r = uffd_copy(p->mms[0].uffd, view_sentinel(v), zeros, page_bytes());
	if (r < 0)
		return view_map_failed(v, r, "set up", err);
	view_map_source(v);
	return 0;
}

/* Puts it where the reader and handlers find it. */
int view_publish(struct view *v, struct wd_err *err)
{
	struct pager *p = v->pager;
	sigset_t saved;
	int r = p->serve ? 0 : registry_add(v);

	if (r < 0)
		return err_set(err, r, "%s: too many files are open in this process (limit %u)", v->source->path,
			       registry_max());
	for (;;) {
		size_t nr = __atomic_load_n(&p->nr_views, __ATOMIC_RELAXED), i;
		struct view **views = malloc((nr + 1) * sizeof(*views)), **old = NULL;

		if (!views) {
			if (!p->serve)
				registry_del(v);
			return err_set(err, -ENOMEM, "%s: out of memory", v->source->path);
		}
		pager_lock(p, &saved);
		if (nr == p->nr_views) {
			for (i = 0; i < nr && p->views[i]->base < v->base; i++)
				views[i] = p->views[i];
			views[i] = v;
			if (nr > i)
				memcpy(views + i + 1, p->views + i, (nr - i) * sizeof(*views));
			old = p->views;
			p->views = views;
			p->nr_views = nr + 1;
			v->seq = ++p->seq;
			p->view_changes++;
			views = NULL;
		}
		pager_unlock(p, &saved);
		if (!views) {
			free(old);
			return 0;
		}
		free(views); /* another thread was faster: once more with the new number */
	}
}

static struct view *view_shared(struct pager *p, const struct source *src, const struct view_layout *layout)
{
	struct view *found = NULL;
	sigset_t saved;

	pager_lock(p, &saved);
	for (size_t i = 0; i < p->nr_views && !found; i++) {
		struct view *v = p->views[i];

		if (!v->dying && !v->broken && source_id_equal(&v->source->id, &src->id) &&
		    view_layout_equal(v, layout) && !atomic_load(&v->source->changed)) {
			v->nr_refs++;
			found = v;
		}
	}
	pager_unlock(p, &saved);
	return found;
}

struct view *view_new(struct pager *p, struct source *src, const struct view_layout *layout, uint64_t bytes)
{
	struct view *v = calloc(1, sizeof(*v));

	if (!v)
		return NULL;
	v->nr_refs = 1;
	v->arena.fd = v->arena.ro_fd = -1;
	list_init(&v->maps);
	v->pager = pager_ref(p);
	v->source = source_ref(src);
	v->class = VIEW_NORMAL;
	v->mmap = pager_way(p) == WAY_MMAP;
	v->bytes = bytes;
	v->nr_ext = (v->bytes + extent_bytes() - 1) / extent_bytes();
	v->direct_bytes = (uint32_t)extent_bytes();
	v->segs = malloc(layout->nr_segs * sizeof(*v->segs));
	v->units = malloc((layout->nr_units + 1) * sizeof(*v->units));
	v->unit_used = calloc(layout->nr_units + 1, 1);
	v->ext = sparse(v->nr_ext * sizeof(*v->ext));
	v->poisoned = sparse(poison_bytes(v));
	if (!v->segs || !v->units || !v->unit_used || !v->ext || !v->poisoned) {
		view_free(v);
		return NULL;
	}
	v->nr_segs = layout->nr_segs;
	memcpy(v->segs, layout->segs, layout->nr_segs * sizeof(*v->segs));
	v->nr_units = layout->nr_units;
	if (layout->nr_units)
		memcpy(v->units, layout->units, layout->nr_units * sizeof(*v->units));
	for (size_t i = 0; i < v->nr_units; i++)
		v->unit_max_bytes = MAX(v->unit_max_bytes, v->units[i].len);
	return v;
}

int view_open(struct pager *p, struct source *src, const struct view_layout *layout, struct view **ret,
	      struct wd_err *err)
{
	const struct segment *last = &layout->segs[layout->nr_segs - 1];
	struct view *v = view_shared(p, src, layout);
	int r = -ENOMEM;

	if (v) {
		/* Its bytes are only the file's while the file is as it was. */
		if (source_check(v->source) == 0) {
			*ret = v;
			return 0;
		}
		(void)view_unref(v);
	}
	v = view_new(p, src, layout, MAX(arena_round(last->arena_off + last->len), page_bytes()));
	if (!v)
		return err_set(err, r,
			       "%s: no memory for its table; check vm.max_map_count, ulimit -v and "
			       "vm.overcommit_memory",
			       src->path);
	r = v->mmap ? mmap_view_open(v, err) : p->client ? client_view_open(v, err) : view_map(v, err);
	if (r == 0)
		r = view_publish(v, err);
	if (r < 0) {
		view_free(v);
		return r;
	}
	*ret = v;
	return 0;
}

/* An extent's lists are set up when it is first looked at: a 200 GiB file has 100,000 of them. */
struct extent *view_extent(struct view *v, size_t i)
{
	struct extent *x = &v->ext[i];

	if (!x->view) {
		list_init(&x->queue);
		list_init(&x->lru);
		x->view = v;
	}
	return x;
}

static void view_forget(struct view *v)
{
	struct pager *p = v->pager;

	for (size_t i = 0; i < v->nr_ext; i++) {
		struct extent *x = &v->ext[i];

		if (!x->view)
			continue;
		ext_lru(x, -1, false);
		list_del(&x->queue);
		ext_drop_done(x, X_DROP);
		ext_drop_done(x, X_CLEAR);
		ext_unreserve(x);
	}
	for (size_t i = 0; i < NR_WAITING; i++) {
		if (p->waiting[i].ext && p->waiting[i].ext->view == v) {
			p->waiting[i].ext = NULL;
			p->nr_waiting--;
		}
	}
	for (unsigned int i = 0; i < p->nr_child_opens;) {
		if (p->child_opens[i].ext->view == v)
			p->child_opens[i] = p->child_opens[--p->nr_child_opens];
		else
			i++;
	}
	p->borders -= v->borders;
}

struct view *view_unref(struct view *v)
{
	struct pager *p;
	sigset_t saved;
	size_t i;

	if (!v)
		return NULL;
	p = v->pager;
	pager_lock(p, &saved);
	if (--v->nr_refs) {
		pager_unlock(p, &saved);
		return NULL;
	}
	v->dying = true; /* nothing new is begun on it */
	while (v->busy)
		(void)pthread_cond_wait(&p->changed, &p->lock);
	if (!v->mmap && !p->forked && !v->client)
		view_forget(v);
	for (i = 0; i < p->nr_views && p->views[i] != v; i++)
		;
	if (i < p->nr_views) { /* (a child may have been forked in the middle of this) */
		p->nr_views--;
		p->view_changes++;
		memmove(p->views + i, p->views + i + 1, (p->nr_views - i) * sizeof(*p->views));
	}
	pager_unlock(p, &saved);
	if (p->serve) {
		serve_view_end(v);
		return NULL;
	}
	registry_del(v);
	view_free(v);
	return NULL;
}

unsigned char *view_base(const struct view *v)
{
	return v->base;
}

struct source *view_source(const struct view *v)
{
	return v->source;
}

void view_set_owner(struct view *v, void *owner)
{
	__atomic_store_n(&v->owner, owner, __ATOMIC_RELEASE);
}

void *view_owner(const struct view *v)
{
	return __atomic_load_n(&v->owner, __ATOMIC_ACQUIRE);
}

static bool plain(const struct view *v)
{
	return v->mmap || v->pager->forked;
}

static bool at_daemon(const struct view *v)
{
	return v->client && !plain(v);
}

/* ------------------------------------------------------------------ dropping */

/* For how long a drop that cannot be done is tried again (a fork in flight, a child that is setting itself up). In WAY_SERVE ten
 * times as long: a thread for each client must get its turn. */
#define DROP_DEADLINE_NS 100000000

void ext_ask_drop(struct extent *x, uint64_t now)
{
	struct pager *p = x->view->pager;

	x->flags &= ~(X_WANT | X_TOUCHED);
	if (x->state == EXT_EMPTY || x->state == EXT_FAILED) {
		if (!(x->flags & X_WAIT))
			ext_settle(x); /* out of the queue of what is read ahead */
		return;
	}
	x->drop_ns = now + (p->serve ? 10 : 1) * DROP_DEADLINE_NS;
	if (!(x->flags & X_DROP)) {
		x->flags |= X_DROP;
		p->nr_drops++;
	}
	ext_settle(x); /* READING: when it has been read */
}

int view_drop(struct view *v)
{
	uint64_t now = now_ns();
	sigset_t saved;

	if (plain(v)) {
		mmap_view_drop(v, 0, v->bytes);
		return 0;
	}
	if (at_daemon(v)) {
		client_view_drop(v);
		return 0;
	}
	pager_lock(v->pager, &saved);
	for (size_t i = 0; i < v->nr_ext; i++) {
		struct extent *x = &v->ext[i];

		if (!x->view)
			continue;
		if (x->state == EXT_READY)
			v->dropped = true;
		ext_ask_drop(x, now);
	}
	memset(v->unit_used, 0, v->nr_units);
	pager_unlock(v->pager, &saved);
	return 0;
}

/* First unit that may reach beyond arena offset `off`. */
size_t view_unit_from(const struct view *v, uint64_t off)
{
	size_t lo = 0, hi = v->nr_units;

	while (lo < hi) {
		size_t mid = (lo + hi) / 2;

		if (v->units[mid].off + v->unit_max_bytes > off)
			hi = mid;
		else
			lo = mid + 1;
	}
	return lo;
}

static bool used_in(const struct view *v, uint64_t off, uint64_t len)
{
	for (size_t u = view_unit_from(v, off); u < v->nr_units && v->units[u].off < off + len; u++)
		if (v->unit_used[u] && v->units[u].off + v->units[u].len > off)
			return true;
	return false;
}

void view_mark_used(struct view *v, uint64_t off, uint64_t len)
{
	for (size_t u = view_unit_from(v, off); u < v->nr_units && v->units[u].off < off + len; u++)
		if (v->units[u].off >= off && v->units[u].off + v->units[u].len <= off + len)
			v->unit_used[u] = 1;
}

int view_drop_units(struct view *v, size_t first, size_t nr)
{
	uint64_t now = now_ns();
	sigset_t saved;

	if (first > v->nr_units || nr > v->nr_units - first)
		return -ERANGE;
	if (at_daemon(v)) {
		client_view_drop_units(v, first, nr);
		return 0;
	}
	pager_lock(v->pager, &saved);
	memset(v->unit_used + first, 0, nr);
	if (!plain(v)) {
		for (size_t u = first; u < first + nr; u++) {
			const struct unit *unit = &v->units[u];

			if (!unit->len)
				continue;
			for (size_t i = unit->off / extent_bytes(); i <= (unit->off + unit->len - 1) / extent_bytes();
			     i++)
				if (v->ext[i].view && !used_in(v, i * extent_bytes(), ext_len(&v->ext[i])))
					ext_ask_drop(&v->ext[i], now);
		}
	}
	pager_unlock(v->pager, &saved);
	if (plain(v))
		for (size_t u = first; u < first + nr; u++)
			mmap_view_drop(v, v->units[u].off, v->units[u].len);
	return 0;
}

void deadline_in(struct timespec *t, int timeout_ms)
{
	(void)clock_gettime(CLOCK_MONOTONIC, t);
	t->tv_sec += timeout_ms / 1000;
	t->tv_nsec += timeout_ms % 1000 * 1000000L;
	if (t->tv_nsec >= 1000000000L) {
		t->tv_nsec -= 1000000000L;
		t->tv_sec++;
	}
}

int pager_sync(struct pager *p, int timeout_ms)
{
	struct timespec until;
	sigset_t saved;
	int r = 0;

	if (pager_way(p) == WAY_MMAP)
		return 0;
	if (p->client)
		return client_sync(p, timeout_ms);
	deadline_in(&until, MAX(timeout_ms, 0));
	pager_lock(p, &saved);
	while (p->nr_drops && r == 0)
		r = timeout_ms < 0 ? pthread_cond_wait(&p->changed, &p->lock) :
				     pthread_cond_timedwait(&p->changed, &p->lock, &until);
	r = p->nr_drops ? -ETIMEDOUT : 0;
	pager_unlock(p, &saved);
	return r;
}

void view_set_class(struct view *v, enum view_class class)
{
	struct pager *p = v->pager;
	sigset_t saved;
	bool changed;

	pager_lock(p, &saved);
	changed = v->class != class;
	if (changed && !plain(v) && !v->client) {
		/* From list to list in their order, so that ages stay comparable. */
		for (int list = 0; list < NR_LRU; list++) {
			struct list *n = p->lru[v->class][list].next, *next;

			for (; n != &p->lru[v->class][list]; n = next) {
				struct extent *x = container_of(n, struct extent, lru);

				next = n->next;
				if (x->view != v)
					continue;
				p->nr_lru[v->class][list]--;
				list_del(n);
				list_add_tail(&p->lru[class][list], n);
				p->nr_lru[class][list]++;
			}
		}
	}
	v->class = (uint8_t) class;
	pager_unlock(p, &saved);
	if (changed && at_daemon(v))
		client_view_class(v, class);
}

void pager_stage(struct pager *p, const char *name)
{
	if (pager_way(p) == WAY_DAEMON)
		client_stage(p, name);
}

/* ------------------------------------------------------------------ observing */

/* A view that stays while it is looked at without the lock; NULL when i is beyond the last. */
static struct view *view_hold(struct pager *p, size_t i)
{
	struct view *v = NULL;
	sigset_t saved;

	pager_lock(p, &saved);
	for (; i < p->nr_views; i++) {
		if (p->views[i]->dying)
			continue;
		v = p->views[i];
		v->busy++;
		break;
	}
	pager_unlock(p, &saved);
	return v;
}

static size_t view_let_go(struct view *v)
{
	struct pager *p = v->pager;
	sigset_t saved;
	size_t i;

	pager_lock(p, &saved);
	for (i = 0; i < p->nr_views && p->views[i] != v; i++)
		;
	view_idle(v);
	pager_unlock(p, &saved);
	return i + 1;
}

void pager_observe_begin(struct pager *p)
{
	struct view *v;
	sigset_t saved;

	if (pager_way(p) == WAY_MMAP)
		return;
	if (p->client) {
		for (size_t i = 0; (v = view_hold(p, i)); i = view_let_go(v))
			if (v->class != VIEW_PINNED && at_daemon(v))
				client_observe_begin(v);
		return;
	}
	pager_lock(p, &saved);
	for (size_t i = 0; i < p->nr_views; i++) {
		v = p->views[i];
		if (v->class == VIEW_PINNED || v->dying)
			continue;
		for (size_t e = 0; e < v->nr_ext; e++) {
			struct extent *x = &v->ext[e];

			if (!x->view)
				continue;
			x->flags &= ~X_TOUCHED;
			if (x->state != EXT_READY)
				continue;
			if (!(x->flags & X_CLEAR)) {
				x->flags |= X_CLEAR;
				p->nr_drops++;
			}
			ext_settle(x);
		}
	}
	pager_unlock(p, &saved);
}

struct presence {
	struct view *view;
	uint32_t *file, *written; /* pages per extent */
};

static int presence_run(void *arg, const struct page_run *run)
{
	struct presence *pr = arg;
	const struct view *v = pr->view;
	uint64_t page = page_bytes(), base = (uintptr_t)v->base;

	for (uint64_t a = run->start; a < run->end;) {
		size_t e = (size_t)((a - base) / extent_bytes());
		uint64_t end = MIN(run->end, base + (e + 1) * extent_bytes());

		if (e >= v->nr_ext)
			break;
		if (run->file)
			pr->file[e] += (uint32_t)((end - a) / page);
		else
			pr->written[e] += (uint32_t)((end - a) / page);
		a = end;
	}
	return 0;
}

void pager_observe_drop(struct pager *p)
{
	struct view *v;
	sigset_t saved;

	if (pager_way(p) == WAY_MMAP || p->pagemap_fd < 0)
		return; /* nothing can be seen: nothing is dropped */
	for (size_t i = 0; p->client && (v = view_hold(p, i)); i = view_let_go(v))
		if (v->class != VIEW_PINNED && at_daemon(v))
			client_observe_drop(v);
	if (p->client)
		return;
	for (size_t i = 0; (v = view_hold(p, i)); i = view_let_go(v)) {
		cleanup_free uint32_t *file = calloc(v->nr_ext, sizeof(*file)),
				      *written = calloc(v->nr_ext, sizeof(*written));
		struct presence pr = { v, file, written };
		uint64_t now = now_ns();

		if (v->class == VIEW_PINNED || !file || !written ||
		    pagemap_scan(p->pagemap_fd, v->base, v->bytes, presence_run, &pr) < 0)
			continue;
		pager_lock(p, &saved);
		for (size_t e = 0; e < v->nr_ext; e++) {
			struct extent *x = &v->ext[e];

			/* Touched: it faulted, or a page of the arena is mapped, or more pages are written than before. The
			 * written pages themselves tell nothing: they are always there. */
			if (x->view && x->state == EXT_READY && !(x->flags & (X_TOUCHED | X_WAIT)) && !file[e] &&
			    written[e] <= x->written) {
				v->dropped = true;
				ext_ask_drop(x, now);
			}
		}
		pager_unlock(p, &saved);
	}
}

/* ------------------------------------------------------------------ strict mode */

void view_forbid(struct view *v, const char *stage)
{
	sigset_t saved;

	pager_lock(v->pager, &saved);
	(void)snprintf(v->stage, sizeof(v->stage), "%s", stage);
	v->forbidden = true;
	pager_unlock(v->pager, &saved);
	if (plain(v))
		(void)mprotect(v->base, v->bytes, PROT_NONE);
	else if (v->client)
		client_forbid(v);
}

/* Takes poison off; the view is armed or open there, so the next touch is an ordinary one. */
void view_lift(struct view *v, size_t first, size_t nr)
{
	uint64_t page = page_bytes(), per = extent_bytes() / page;
	int fd = v->pager->client ? client_uffd(v->pager) : v->pager->mms[0].uffd;
	sigset_t all, saved;

	/* One at a time: the worker opens (perhaps by CONTINUE, which lifts poison) only after a discard that another thread
	 * has begun. */
	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &saved);
	(void)pthread_mutex_lock(&v->pager->lift);
	for (uint64_t i = first * per; i < MIN((first + nr) * per, v->bytes / page); i++) {
		uint64_t bit = (uint64_t)1 << i % 64;
		unsigned char *at = v->base + i * page;

		if (!v->poisoned[i / 64]) {
			i |= 63;
			continue;
		}
		if (!(__atomic_fetch_and(&v->poisoned[i / 64], ~bit, __ATOMIC_ACQ_REL) & bit))
			continue;
		/* The page has been poison since it was touched: nobody can have written to it. */
		if (v->pager->caps.poison) {
			(void)madvise(at, page, MADV_DONTNEED);
			continue;
		}
		if (mmap(at, page, PROT_NONE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, v->arena.fd,
			 (off_t)(i * page)) != MAP_FAILED) {
			(void)uffd_register(fd, at, page, false);
			(void)mprotect(at, page, v->read_only ? PROT_READ : PROT_READ | PROT_WRITE);
		}
	}
	(void)pthread_mutex_unlock(&v->pager->lift);
	(void)pthread_sigmask(SIG_SETMASK, &saved, NULL);
}

void view_allow(struct view *v)
{
	sigset_t saved;
	bool was;

	pager_lock(v->pager, &saved);
	was = v->forbidden;
	v->forbidden = false;
	/* A touch that is being answered with poison right now: after that it can be lifted. */
	while (v->poisoning && !v->pager->forked)
		(void)pthread_cond_wait(&v->pager->changed, &v->pager->lock);
	pager_unlock(v->pager, &saved);
	if (!was || v->broken)
		return;
	if (at_daemon(v))
		client_allow(v);
	if (plain(v))
		(void)mprotect(v->base, v->bytes, v->read_only ? PROT_READ : PROT_READ | PROT_WRITE);
	else
		view_lift(v, 0, v->nr_ext);
}

/* ------------------------------------------------------------------ counts */

struct written {
	const struct view *view;
	uint64_t bytes;
};

static int written_run(void *arg, const struct page_run *run)
{
	struct written *w = arg;
	uint64_t page = page_bytes();

	if (run->file)
		return 0;
	for (uint64_t a = run->start; a < run->end; a += page) {
		uint64_t i = (a - (uintptr_t)w->view->base) / page;

		/* A poisoned page looks like one that is swapped out. */
		if (run->present || !(w->view->poisoned[i / 64] >> i % 64 & 1))
			w->bytes += page;
	}
	return 0;
}

void view_stats(struct view *v, struct pager_stats *ret)
{
	struct pager *p = v->pager;
	struct written w = { .view = v };
	sigset_t saved;

	if (plain(v)) {
		mmap_view_stats(v, ret);
		return;
	}
	if (p->pagemap_fd >= 0)
		(void)pagemap_scan(p->pagemap_fd, v->base, v->bytes, written_run, &w);
	if (v->client) {
		client_view_stats(v, ret);
		ret->written_bytes = w.bytes;
		return;
	}
	pager_lock(p, &saved);
	*ret = v->stats;
	ret->budget_bytes = p->budget;
	ret->written_bytes = w.bytes;
	for (size_t i = 0; i < v->nr_ext; i++) {
		const struct extent *x = &v->ext[i];

		if (x->view && x->flags & X_RESERVED) {
			ret->resident_bytes += ext_len(x);
			if (x->flags & X_HUGE)
				ret->huge_bytes += ext_len(x);
		}
	}
	ret->peak_bytes = MAX(v->stats.peak_bytes, ret->resident_bytes);
	pager_unlock(p, &saved);
}

static void count(struct pager_stats *sum, const struct pager_stats *s)
{
	sum->read_bytes += s->read_bytes;
	sum->reads += s->reads;
	sum->faults += s->faults;
	sum->dropped_bytes += s->dropped_bytes;
	sum->reloads += s->reloads;
	sum->reload_bytes += s->reload_bytes;
	sum->failed += s->failed;
}

void pager_count(struct pager *p, const struct pager_stats *s)
{
	sigset_t saved;

	pager_lock(p, &saved);
	count(&p->stats, s);
	pager_unlock(p, &saved);
}

void pager_stats(struct pager *p, struct pager_stats *ret)
{
	uint64_t written = 0, huge = 0, resident = 0, budget = UINT64_MAX;
	struct pager_stats s, at_daemon = { 0 };
	struct view *v;
	sigset_t saved;

	for (size_t i = 0; (v = view_hold(p, i)); i = view_let_go(v)) {
		view_stats(v, &s);
		written += s.written_bytes;
		huge += s.huge_bytes;
		resident += s.resident_bytes;
		budget = s.budget_bytes;
		count(&at_daemon, &s);
	}
	pager_lock(p, &saved);
	*ret = p->stats;
	if (p->client)
		count(ret, &at_daemon);
	ret->budget_bytes = pager_way(p) == WAY_MMAP ? UINT64_MAX : p->client ? budget : p->budget;
	ret->resident_bytes = pager_way(p) == WAY_MMAP || p->client ? resident : p->resident;
	p->peak = MAX(p->peak, ret->resident_bytes);
	ret->peak_bytes = p->peak;
	ret->written_bytes = written;
	ret->huge_bytes = huge;
	pager_unlock(p, &saved);
}

/* ------------------------------------------------------------------ why a touch fails: signal-safe */

size_t view_unit_at(const struct view *v, uint64_t off)
{
	size_t from = view_unit_from(v, off);

	for (size_t u = from; u < v->nr_units && u - from < 256 && v->units[u].off <= off;
	     u++) /* (a client's may all overlap) */
		if (off < v->units[u].off + v->units[u].len)
			return u;
	return SIZE_MAX;
}

static bool fault_reason(const void *address, struct fault_reason *ret)
{
	struct view *v = registry_find(address);
	const struct extent *x;
	uint64_t off, page;

	if (!v)
		return false;
	off = (uintptr_t)address - (uintptr_t)v->base;
	page = off / page_bytes();
	*ret = (struct fault_reason){ .view = v, .off = off, .unit = view_unit_at(v, off), .stage = v->stage };
	if (plain(v)) {
		if (v->forbidden)
			ret->code = FAULT_FORBIDDEN;
		else if (v->broken)
			ret->code = FAULT_CHANGED;
		else if (source_check(v->source) < 0)
			ret->code = FAULT_CHANGED;
		return ret->code != FAULT_NONE;
	}
	if (v->client) {
		bool failed = client_reason(v, off, &ret->code, &ret->error);

		if (v->forbidden)
			ret->code = FAULT_FORBIDDEN;
		else if (!failed && !(v->poisoned[page / 64] >> page % 64 & 1))
			ret->code = FAULT_NONE;
		return ret->code != FAULT_NONE;
	}
	x = &v->ext[off / extent_bytes()];
	if (v->poisoned[page / 64] >> page % 64 & 1) {
		ret->code = v->forbidden ? FAULT_FORBIDDEN : (enum fault_code)x->code;
		ret->error = x->error;
	} else if (v->forbidden && x->state != EXT_READY) {
		ret->code = FAULT_FORBIDDEN;
	} else if (x->state == EXT_FAILED) {
		ret->code = (enum fault_code)x->code;
		ret->error = x->error;
	}
	return ret->code != FAULT_NONE;
}

static bool fault_retry(const void *address)
{
	struct view *v = registry_find(address);
	uint64_t off;

	if (!v || !v->read_only || v->forbidden || v->broken)
		return false;
	off = ((uintptr_t)address - (uintptr_t)v->base) / page_bytes();
	if (v->poisoned[off / 64] >> off % 64 & 1)
		return false;
	off = round_down((uintptr_t)address - (uintptr_t)v->base, extent_bytes());
	return mprotect(v->base + off, MIN(extent_bytes(), v->bytes - off), PROT_READ | PROT_WRITE) == 0;
}

bool pager_fault_reason(const void *address, struct fault_reason *ret)
{
	bool r;

	registry_look();
	r = fault_reason(address, ret);
	registry_unlook();
	return r;
}

bool pager_fault_retry(const void *address)
{
	bool r;

	registry_look();
	r = fault_retry(address);
	registry_unlook();
	return r;
}
