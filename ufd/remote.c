/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Address spaces of clients: one worker thread each, for everything that waits for that client's mmap_lock (I8). See
 * pager.c for the extents' states, serve.c for what the daemon decides.
 *
 * What a client can do to its own memory at any time (munmap, fork, exec, UNREGISTER by its dup) makes our flags hints:
 * a take-back arms every mapping whatever they say, and an opening that was not needed does no harm.
 */
#include "ufd/remote.h"

#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>

#include "lib/base/log.h"
#include "ufd/hooks.h"

#define OPEN_RUN_MAX 512u
#define PROBE_MIN_NS 10000000ull
#define PROBE_MAX_NS 1000000000ull

/* ------------------------------------------------------------------ mappings */

struct mapping *serve_mapping_at(struct pager *p, int mm, uint64_t address)
{
	const struct remote *r = p->mms[mm].remote;
	size_t lo = 0, hi = r ? r->nr_maps : 0;

	while (lo < hi) {
		size_t mid = (lo + hi) / 2;

		if ((uintptr_t)r->maps[mid]->base <= address)
			lo = mid + 1;
		else
			hi = mid;
	}
	if (!lo || address >= (uintptr_t)r->maps[lo - 1]->base + r->maps[lo - 1]->view->bytes)
		return NULL;
	return r->maps[lo - 1];
}

struct view *mapping_view(const struct mapping *m)
{
	return m->view;
}

uint64_t mapping_off(const struct mapping *m, uint64_t address)
{
	return address - (uintptr_t)m->base;
}

bool mapping_forbidden(const struct mapping *m)
{
	return m->forbidden;
}

struct mapping *remote_map(struct remote *r, uint64_t view)
{
	for (size_t i = 0; i < r->nr_maps; i++)
		if (r->maps[i]->view->serve->id == view)
			return r->maps[i];
	return NULL;
}

struct mapping *mapping_new(struct remote *r, struct view *v, uint64_t base, uint64_t id)
{
	struct mapping *m = calloc(1, sizeof(*m));

	if (!m)
		return NULL;
	list_init(&m->node);
	m->flags = calloc(v->nr_ext, 1);
	if (!m->flags) {
		free(m);
		return NULL;
	}
	m->view = v;
	m->remote = r;
	m->id = id;
	m->base = (unsigned char *)(uintptr_t)base; // NOLINT: an address of another process; never followed here
	m->state_fd = -1;
	return m;
}

void mapping_free(struct mapping *m)
{
	if (!m)
		return;
	if (m->state)
		(void)munmap(m->state, m->state_bytes);
	if (m->state_fd >= 0)
		(void)close(m->state_fd);
	free(m->flags);
	free(m);
}

int mapping_state(struct mapping *m)
{
	uint64_t bytes = map_state_bytes(m->view->nr_ext, m->view->bytes, page_bytes());
	cleanup_close int fd = -1;
	void *at;

	if (m->state)
		return 0;
	fd = memfd_create("weightd-state", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	/* Sealed: a client that cut it short would make the daemon's write a SIGBUS. */
	if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		return -errno;
	at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (at == MAP_FAILED)
		return -errno;
	m->state = at;
	m->state_bytes = bytes;
	m->state_fd = TAKE_FD(fd);
	return 0;
}

static void state_open(struct mapping *m, size_t ext, bool open)
{
	if (m->state)
		__atomic_store_n(&m->state[ext], open ? MAP_OPEN : 0, __ATOMIC_RELAXED);
}

static void open_flag(struct mapping *m, size_t ext, bool open)
{
	bool before = ext > 0 && m->flags[ext - 1] & M_OPEN,
	     after = ext + 1 < m->view->nr_ext && m->flags[ext + 1] & M_OPEN;

	if (open == !!(m->flags[ext] & M_OPEN))
		return;
	m->remote->borders += (before != open) + (after != open);
	m->remote->borders -= (before != !open) + (after != !open);
	m->flags[ext] ^= M_OPEN;
	state_open(m, ext, open);
}

void mapping_closed(struct mapping *m, size_t first, size_t nr)
{
	for (size_t i = first; i < first + nr; i++)
		open_flag(m, i, false);
}

void remote_kick(struct mapping *m, size_t ext, uint8_t flag)
{
	m->flags[ext] |= flag;
	if (m->work_lo >= m->work_hi) {
		m->work_lo = ext;
		m->work_hi = ext + 1;
	} else {
		m->work_lo = MIN(m->work_lo, ext);
		m->work_hi = MAX(m->work_hi, ext + 1);
	}
	(void)pthread_cond_signal(&m->remote->work);
}

/* READY extents are opened before the client's first touch: each fault would cost more than all of these. */
void mapping_want_ready(struct mapping *m)
{
	struct view *v = m->view;

	for (size_t i = 0; i < v->nr_ext; i++)
		if (v->ext[i].view && v->ext[i].state == EXT_READY && !(v->ext[i].flags & X_TAKING))
			remote_kick(m, i, M_WANT | M_HELD);
}

/* Does a client hold it (`stages`: by its running stage)? */
bool ext_held(const struct extent *x, bool stages)
{
	size_t e = ext_index(x);

	for (const struct list *n = x->view->maps.next; n != &x->view->maps; n = n->next) {
		const struct mapping *m = container_of(n, struct mapping, node);

		if (m->flags[e] & M_HELD && !m->remote->gone && (!stages || m->remote->stage[0]))
			return true;
	}
	return false;
}

int remote_add_map(struct remote *r, struct mapping *m)
{
	uint64_t len = m->view->bytes + page_bytes();
	size_t at = 0;

	while (at < r->nr_maps && r->maps[at]->base < m->base)
		at++;
	if (at > 0 && r->maps[at - 1]->base + r->maps[at - 1]->view->bytes + page_bytes() > m->base)
		return -EEXIST;
	if (at < r->nr_maps && m->base + len > r->maps[at]->base)
		return -EEXIST;
	if (r->nr_maps == r->room_maps) {
		size_t room = MAX(r->room_maps * 2, (size_t)8);
		struct mapping **maps = realloc(r->maps, room * sizeof(*maps));

		if (!maps)
			return -ENOMEM;
		r->maps = maps;
		r->room_maps = room;
	}
	memmove(r->maps + at + 1, r->maps + at, (r->nr_maps - at) * sizeof(*r->maps));
	r->maps[at] = m;
	r->nr_maps++;
	list_add_tail(&m->view->maps, &m->node);
	m->view->nr_refs++;
	m->view->serve->idle_since_ns = 0;
	return 0;
}

/* Out of every table; nobody finds it any more. */
static void unlink_map(struct mapping *m)
{
	struct remote *r = m->remote;
	struct pager *p = r->pager;
	size_t i;

	for (i = 0; i < r->nr_maps && r->maps[i] != m; i++)
		;
	if (i == r->nr_maps)
		return;
	memmove(r->maps + i, r->maps + i + 1, (r->nr_maps - i - 1) * sizeof(*r->maps));
	r->nr_maps--;
	list_del(&m->node);
	mapping_closed(m, 0, m->view->nr_ext);
	if (m->arm == ARM_ASKED) {
		r->nr_arms--;
		(void)pthread_cond_broadcast(&p->serve->armed);
	}
	m->arm = ARM_NONE;
	for (size_t k = 0; k < NR_WAITING; k++) {
		if (p->waiting[k].ext && p->waiting[k].map == m) {
			p->waiting[k].ext = NULL;
			p->nr_waiting--;
		}
	}
	for (unsigned int k = 0; k < r->nr_poison;) {
		if (r->poison[k].map == m)
			r->poison[k] = r->poison[--r->nr_poison];
		else
			k++;
	}
	for (unsigned int k = 0; k < r->nr_cont;) {
		if (r->cont[k].map == m)
			r->cont[k] = r->cont[--r->nr_cont];
		else
			k++;
	}
	if (list_empty(&m->view->maps))
		m->view->serve->idle_since_ns = now_ns();
}

void remote_del_map(struct mapping *m)
{
	struct pager *p = m->remote->pager;
	struct view *v = m->view;
	uint64_t id = m->id;
	bool pinned = m->pinned;

	unlink_map(m);
	while (m->busy)
		(void)pthread_cond_wait(&m->remote->changed, &p->lock);
	own_unlock(p);
	keep_del(p, KEEP_KEY(KEEP_MAP, id));
	mapping_free(m);
	if (pinned)
		pin_apply(v);
	(void)view_unref(v);
	own_lock(p);
}

/* ------------------------------------------------------------------ what the reader asks for */

bool serve_fault(struct mapping *m, struct extent *x, uint64_t address)
{
	struct pager *p = m->remote->pager;
	size_t e = ext_index(x);

	if (m->flags[e] & M_WAIT)
		for (size_t i = 0; p->nr_waiting && i < NR_WAITING; i++)
			if (p->waiting[i].ext == x && p->waiting[i].map == m && p->waiting[i].address == address)
				return false;
	m->flags[e] |= M_HELD;
	remote_kick(m, e, M_WAIT);
	if (!list_empty(&x->lru)) /* used now: last to go */
		ext_lru(x, LRU_ARMED, false);
	return true;
}

void serve_want(struct mapping *m, struct extent *x)
{
	size_t e = ext_index(x);

	if (!(m->flags[e] & M_OPEN))
		remote_kick(m, e, M_WANT);
}

void serve_settled(struct extent *x)
{
	size_t e = ext_index(x);

	for (struct list *n = x->view->maps.next; n != &x->view->maps; n = n->next) {
		struct mapping *m = container_of(n, struct mapping, node);

		if (m->flags[e] & (M_WAIT | M_WANT))
			remote_kick(m, e, 0);
	}
}

void serve_job_want(struct remote *r, struct extent *x)
{
	for (size_t i = 0; i < r->nr_maps; i++)
		if (r->maps[i]->view == x->view) {
			r->maps[i]->flags[ext_index(x)] |= M_HELD;
			serve_want(r->maps[i], x);
		}
}

void serve_poison(struct mapping *m, uint64_t address)
{
	struct remote *r = m->remote;

	m->flags[mapping_off(m, address) / extent_bytes()] &= (uint8_t)~M_WAIT;
	if (r->nr_poison < NR_POISON) {
		r->poison[r->nr_poison].map = m;
		r->poison[r->nr_poison++].address = round_down(address, page_bytes());
		(void)pthread_cond_signal(&r->work);
	} else { /* no room to note it: it faults again */
		(void)uffd_wake(r->pager->mms[r->mm].uffd, (void *)(uintptr_t)round_down(address, page_bytes()),
				page_bytes());
	}
}

/* WAKE takes no lock of the client's. Only the caller (the reader) closes these descriptors. */
void serve_wake(struct extent *x)
{
	struct pager *p = x->view->pager;
	size_t e = ext_index(x);

	own_lock(p);
	for (struct list *n = x->view->maps.next; n != &x->view->maps; n = n->next) {
		struct mapping *m = container_of(n, struct mapping, node);

		m->flags[e] &= (uint8_t) ~(M_WAIT | M_WANT);
		if (!m->remote->gone)
			(void)uffd_wake(p->mms[m->remote->mm].uffd, m->base + ext_off(x), ext_len(x));
	}
	own_unlock(p);
}

bool serve_waited(const struct extent *x)
{
	for (const struct list *n = x->view->maps.next; n != &x->view->maps; n = n->next)
		if (container_of(n, struct mapping, node)->flags[ext_index(x)] & M_WAIT)
			return true;
	return false;
}

bool serve_waits(const struct waiting *w)
{
	return w->map->flags[ext_index(w->ext)] & (M_WAIT | M_OPENING);
}

atomic_uint *serve_reading(struct pager *p, int mm)
{
	static atomic_uint none;

	return p->mms[mm].remote ? &p->mms[mm].remote->reading : &none;
}

/* ------------------------------------------------------------------ overtaking */

static void *express_main(void *arg)
{
	struct remote *r = arg;
	struct pager *p = r->pager;

	own_lock(p);
	while (!r->gone) {
		struct mapping *m;
		struct extent *x;
		uint64_t address;

		if (!r->nr_cont) {
			(void)pthread_cond_wait(&r->express, &p->lock);
			continue;
		}
		m = r->cont[--r->nr_cont].map;
		address = r->cont[r->nr_cont].address;
		x = &m->view->ext[mapping_off(m, address) / extent_bytes()];
		if (x->state != EXT_READY || x->flags & X_TAKING || m->forbidden)
			continue;
		x->inflight++; /* holds off a take-back */
		m->busy++;
		r->express_busy = true;
		own_unlock(p);
		(void)uffd_continue(p->mms[r->mm].uffd, (void *)(uintptr_t)round_down(address, page_bytes()),
				    page_bytes());
		own_lock(p);
		r->express_busy = false;
		m->busy--;
		x->inflight--;
		(void)pthread_cond_broadcast(&r->changed);
	}
	(void)pthread_cond_broadcast(&r->changed);
	own_unlock(p);
	remote_put(r);
	return NULL;
}

int thread_detached(void *(*fn)(void *), void *arg, const char *name)
{
	pthread_attr_t attr;
	pthread_t thread;
	int e;

	(void)pthread_attr_init(&attr);
	(void)pthread_attr_setstacksize(&attr, 128 * KiB);
	(void)pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	e = pthread_create(&thread, &attr, fn, arg);
	(void)pthread_attr_destroy(&attr);
	if (e == 0)
		(void)pthread_setname_np(thread, name);
	return -e;
}

void serve_overtake(const struct waiting *w)
{
	struct remote *r = w->map->remote;

	if (r->gone || r->nr_cont == NR_CONT)
		return;
	if (!r->express_started) {
		r->nr_refs++;
		if (thread_detached(express_main, r, "wd-express") < 0) {
			r->nr_refs--;
			return;
		}
		r->express_started = true;
	}
	r->cont[r->nr_cont].map = w->map;
	r->cont[r->nr_cont++].address = w->address;
	(void)pthread_cond_signal(&r->express);
}

/* ------------------------------------------------------------------ the worker */

/* Around an ioctl on a mapping: without the lock. */
static int fd_of(const struct remote *r)
{
	return r->pager->mms[r->mm].uffd;
}

static void begin(struct mapping *m)
{
	m->busy++;
	m->remote->working = true;
	own_unlock(m->remote->pager);
}

static void end(struct mapping *m)
{
	own_lock(m->remote->pager);
	m->remote->working = false;
	m->busy--;
	(void)pthread_cond_broadcast(&m->remote->changed);
}

static void count_wait(struct pager *p, uint64_t ns)
{
	unsigned int bucket = 0;

	for (uint64_t us = ns / 1000; us > 1 && bucket + 1 < SERVE_BUCKETS; us /= 2)
		bucket++;
	p->serve->counts.wait[bucket]++;
}

/* The waiting threads of these extents have been woken. */
static void answered(struct mapping *m, size_t first, size_t nr)
{
	struct pager *p = m->remote->pager;
	uint64_t now = p->nr_waiting ? now_ns() : 0;

	for (size_t i = 0; p->nr_waiting && i < NR_WAITING; i++) {
		struct waiting *w = &p->waiting[i];

		if (!w->ext || w->map != m || ext_index(w->ext) < first || ext_index(w->ext) >= first + nr)
			continue;
		count_wait(p, now - w->fault_ns);
		w->ext = NULL;
		p->nr_waiting--;
	}
}

static bool to_open(const struct mapping *m, size_t i, uint8_t flags)
{
	const struct extent *x = &m->view->ext[i];

	return m->flags[i] & flags && x->view && x->state == EXT_READY && !(x->flags & X_TAKING);
}

#define NR_PAGES 16

/* Needs no VMA. Across a border of VMAs (the client has protected a part) only the pages that are waited for. */
static int open_by_page(struct mapping *m, size_t ext)
{
	struct pager *p = m->remote->pager;
	unsigned char *at = m->base + ext * extent_bytes();
	uint64_t len = MIN(extent_bytes(), m->view->bytes - ext * extent_bytes()), pages[NR_PAGES];
	int e = uffd_continue(fd_of(m->remote), at, len), nr = 0;

	if (e == -ENOENT) {
		own_lock(p);
		for (size_t i = 0; i < NR_WAITING && nr < NR_PAGES; i++)
			if (p->waiting[i].ext && p->waiting[i].map == m && ext_index(p->waiting[i].ext) == ext)
				pages[nr++] = round_down(p->waiting[i].address, page_bytes());
		own_unlock(p);
		while (nr > 0)
			(void)uffd_continue(fd_of(m->remote), (void *)(uintptr_t)pages[--nr], page_bytes());
	}
	if (e < 0 && e != -EAGAIN)
		(void)uffd_wake(fd_of(m->remote), at, len);
	if (e == -ESRCH)
		m->remote->probe_ns = 0;
	return e;
}

/* Opens one run of what is READY and wanted: first what a thread waits for. Returns false if there was none. */
static bool open_run(struct mapping *m, uint8_t flags)
{
	struct remote *r = m->remote;
	struct pager *p = r->pager;
	struct view *v = m->view;
	size_t first = m->work_lo, nr = 0;
	bool by_page, again[OPEN_RUN_MAX] = { 0 };
	unsigned char *at;
	uint64_t len;

	while (first < m->work_hi && !to_open(m, first, flags))
		first++;
	if (first >= m->work_hi)
		return false;
	while (nr < OPEN_RUN_MAX && first + nr < m->work_hi && to_open(m, first + nr, M_WAIT | M_WANT))
		nr++;
	at = m->base + first * extent_bytes();
	len = MIN(nr * extent_bytes(), v->bytes - first * extent_bytes());
	/* Each border costs a VMA of the client (vm.max_map_count): beyond our part of them, page by page. */
	by_page = r->borders + 2 > p->max_borders;
	if (m->forbidden) {
		for (size_t i = first; i < first + nr; i++)
			m->flags[i] &= (uint8_t) ~(M_WAIT | M_WANT);
		begin(m);
		(void)uffd_wake(fd_of(r), at, len); /* they fault again, and are answered with poison */
		end(m);
		return true;
	}
	/* Before it is done, not after: who is woken without its page (a border of VMAs, a fork in flight, a client that arms by
	 * itself) faults again at once, and that is another wait. */
	for (size_t i = first; i < first + nr; i++)
		m->flags[i] = (uint8_t)((m->flags[i] & ~(M_WAIT | M_WANT)) | M_OPENING);
	begin(m);
	if (pager_hooks.before_open)
		pager_hooks.before_open();
	if (!by_page) {
		int e = uffd_open_range(fd_of(r), at, len);

		by_page = e == -ENOMEM;
	}
	for (size_t i = 0; by_page && i < nr; i++)
		again[i] = open_by_page(m, first + i) == -EAGAIN; /* a fork in flight */
	end(m);
	for (size_t i = first; i < first + nr; i++) {
		m->flags[i] &= (uint8_t)~M_OPENING;
		if (again[i - first]) {
			remote_kick(m, i, M_WAIT);
			continue;
		}
		if (!by_page)
			open_flag(m, i, true);
		if (v->ext[i].state == EXT_READY)
			m->flags[i] |= M_HELD;
		if (by_page)
			answered(m, i, 1);
	}
	if (!by_page)
		answered(m, first, nr);
	(void)pthread_cond_broadcast(&r->changed);
	return true;
}

static bool open_some(struct remote *r)
{
	for (int round = 0; round < 2; round++) {
		for (size_t i = 0; i < r->nr_maps; i++) {
			struct mapping *m = r->maps[i];

			if (m->work_lo >= m->work_hi || !m->ready)
				continue;
			if (open_run(m, round == 0 ? M_WAIT : M_WAIT | M_WANT))
				return true;
			if (round == 1)
				m->work_lo = m->work_hi = 0; /* the others are not READY: serve_settled() asks again */
		}
	}
	return false;
}

/* The sentinel is gone: so is the view of a child whose handler has replaced it, or of who cannot tell us any more. Who
 * still can has cut off its end, and may have the rest. */
static bool may_have_rest(const struct remote *r)
{
	return !r->hup && (!r->child || r->claimed);
}

/*
 * Arms a run of one mapping for a take-back, and tells whether a fork is in flight there. Errors of REGISTER (measured,
 * 6.18): EBUSY another userfaultfd has it (the client clears its page tables); EINVAL, ENOENT something else is mapped
 * there now; ENOMEM no VMA left, or the address space is gone. Whatever is neither 0 nor a proven end forbids the punch.
 */
static enum arm_result arm(struct remote *r, struct mapping *m, const struct run *run, bool stuck[static 512])
{
	unsigned char *at = m->base + run_off(run), *sentinel = m->base + m->view->bytes;
	int fd = fd_of(r), e;

	/* Asked first: where a child has replaced the view, something of its own may lie there by now. */
	switch (uffd_probe(fd, sentinel)) {
	case PROBE_UNMAPPED:
		m->lost = !may_have_rest(r);
		for (size_t i = 0; !m->lost && i < run->nr; i++)
			stuck[i] = true;
		return ARM_DONE;
	case PROBE_DEAD:
		r->probe_ns = 0;
		return ARM_DONE;
	default:
		break;
	}
	e = uffd_register(fd, at, run_len(run), false);
	if (e == -ENOMEM) /* for the whole view it needs no VMA: it merges */
		e = uffd_register(fd, m->base, m->view->bytes, false);
	if (e < 0 && uffd_probe(fd, sentinel) == PROBE_DEAD) {
		r->probe_ns = 0;
		return ARM_DONE;
	}
	for (size_t i = 0; e < 0 && i < run->nr; i++)
		stuck[i] = uffd_register(fd, at + i * extent_bytes(),
					 MIN(extent_bytes(), run_len(run) - i * extent_bytes()), false) < 0;
	if (pager_hooks.after_arm)
		pager_hooks.after_arm();
	if (!r->caps.event_fork)
		return ARM_DONE; /* its children map the file before they touch it (fork's child handler) */
	switch (uffd_probe(fd, sentinel)) {
	case PROBE_FORKING:
		return ARM_FORKING;
	case PROBE_DEAD:
		r->probe_ns = 0;
		return ARM_DONE;
	default:
		return ARM_DONE;
	}
}

static void arm_some(struct remote *r)
{
	struct pager *p = r->pager;

	for (size_t i = 0; i < r->nr_maps; i++) {
		struct mapping *m = r->maps[i];
		struct run run = m->arm_run;
		uint64_t gen = m->arm_gen;
		bool stuck[512] = { 0 };
		enum arm_result result;
		bool ready;

		if (m->arm != ARM_ASKED)
			continue;
		/* (One that is being set up is registered whole, and nobody has touched it.) */
		ready = m->ready;
		begin(m);
		result = ready ? arm(r, m, &run, stuck) : ARM_DONE;
		/* An event that the reader has in its hands counts as in flight until it is in the table. */
		while (atomic_load(&r->reading) & 1)
			sched_yield();
		end(m);
		mapping_closed(m, run.first, run.nr);
		if (m->arm != ARM_ASKED || m->arm_gen != gen)
			return; /* nobody waits for it any more */
		for (size_t k = 0; k < run.nr; k++)
			if (stuck[k])
				m->view->ext[run.first + k].flags |= X_STUCK;
		if (r->forks != m->arm_forks)
			result = ARM_FORKING; /* a child has come that was not asked */
		m->arm = (uint8_t)result;
		r->nr_arms--;
		(void)pthread_cond_broadcast(&p->serve->armed);
		return;
	}
	r->nr_arms = 0;
}

static void poison_some(struct remote *r)
{
	struct mapping *m = r->poison[--r->nr_poison].map;
	uint64_t address = r->poison[r->nr_poison].address;
	void *at = (void *)(uintptr_t)address; // NOLINT
	uint64_t page = mapping_off(m, address) / page_bytes();
	struct pager *p = r->pager;
	int e;

	m->view->stats.failed++;
	p->stats.failed++;
	if (!r->caps.poison) {
		/* (A child that has no session waits: nobody can do it for it.) */
		if (r->session && p->serve->config.poison) {
			own_unlock(p);
			p->serve->config.poison(p->serve->config.arg, r, address);
			own_lock(p);
		}
		return;
	}
	begin(m);
	e = uffd_poison(fd_of(r), at, page_bytes());
	if (e == 0 && m->state)
		(void)__atomic_fetch_or((uint64_t *)(void *)(m->state + map_state_poison(m->view->nr_ext)) + page / 64,
					(uint64_t)1 << page % 64, __ATOMIC_RELEASE);
	/* (EAGAIN, a fork in flight; EEXIST, it has been mapped meanwhile: the thread tries again.) */
	(void)uffd_wake(fd_of(r), at, page_bytes());
	end(m);
}

static struct mapping *first_map(const struct remote *r)
{
	for (size_t i = 0; i < r->nr_maps; i++)
		if (r->maps[i]->ready)
			return r->maps[i];
	return NULL;
}

/* The number by which a forked child finds out which of ours it is. */
static void put_number(struct remote *r)
{
	struct mapping *m = first_map(r);
	void *page = NULL;

	if (m && posix_memalign(&page, page_bytes(), page_bytes()) == 0) {
		memset(page, 0, page_bytes());
		memcpy(page, &r->id, sizeof(r->id));
		begin(m);
		(void)uffd_copy(fd_of(r), m->base + m->view->bytes, page, page_bytes());
		end(m);
		free(page);
	}
	r->number_wanted = false;
	(void)pthread_cond_broadcast(&r->pager->serve->armed);
}

/* Is the address space still there? */
static void probe(struct remote *r)
{
	struct mapping *m = first_map(r);
	enum uffd_probe result;

	r->probe_every_ns = MIN(MAX(r->probe_every_ns * 2, PROBE_MIN_NS), PROBE_MAX_NS);
	r->probe_ns = now_ns() + r->probe_every_ns;
	if (!m) {
		r->gone = r->hup && !r->nr_maps; /* nothing to serve, and nobody who could ask for it */
		return;
	}
	begin(m);
	result = uffd_probe(fd_of(r), m->base + m->view->bytes);
	if (result == PROBE_UNMAPPED && may_have_rest(r))
		result = PROBE_QUIET;
	end(m);
	if (result == PROBE_DEAD)
		r->gone = true;
	else if (result == PROBE_UNMAPPED) {
		m->lost = true;
		r->probe_ns = 0; /* the others at once */
	}
}

static void wait_for_work(struct remote *r)
{
	struct timespec until;
	uint64_t now = now_ns();
	bool timed = r->hup || r->nr_maps;

	if (timed && now >= r->probe_ns) {
		probe(r);
		return;
	}
	if (!timed) {
		(void)pthread_cond_wait(&r->work, &r->pager->lock);
		return;
	}
	deadline_in(&until, (int)((r->probe_ns - now + 999999) / 1000000));
	(void)pthread_cond_timedwait(&r->work, &r->pager->lock, &until);
}

static bool remove_lost(struct remote *r)
{
	for (size_t i = 0; i < r->nr_maps; i++)
		if (r->maps[i]->lost) {
			remote_del_map(r->maps[i]);
			return true;
		}
	return false;
}

static void *worker(void *arg)
{
	struct remote *r = arg;
	struct pager *p = r->pager;

	own_lock(p);
	while (!r->gone && !p->serve->let_go) {
		if (r->nr_arms)
			arm_some(r);
		else if (r->nr_poison)
			poison_some(r);
		else if (open_some(r))
			continue;
		else if (r->number_wanted)
			put_number(r);
		else if (!remove_lost(r))
			wait_for_work(r);
	}
	if (!r->gone) { /* another process goes on with it */
		own_unlock(p);
		remote_put(r);
		return NULL;
	}
	while (r->nr_maps)
		remote_del_map(r->maps[0]);
	r->number_wanted = false;
	(void)pthread_cond_broadcast(&r->express);
	(void)pthread_cond_broadcast(&r->changed);
	while (r->express_busy)
		(void)pthread_cond_wait(&r->changed, &p->lock);
	if (r->round) {
		r->round = 0;
		(void)pthread_cond_broadcast(&p->serve->armed);
	}
	p->mms[r->mm].gone = true;
	__atomic_store_n(&p->some_gone, true, __ATOMIC_RELEASE);
	pager_wake_reader(p);
	own_unlock(p);
	keep_del(p, KEEP_KEY(KEEP_SESSION, r->id));
	keep_del(p, KEEP_KEY(KEEP_MM, r->id));
	remote_put(r);
	return NULL;
}

/* ------------------------------------------------------------------ a remote's life */

int remote_make(struct pager *p, uint64_t id, struct remote **ret)
{
	struct remote *r = calloc(1, sizeof(*r));
	pthread_condattr_t attr;

	if (!r)
		return -ENOMEM;
	(void)pthread_condattr_init(&attr);
	(void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	(void)pthread_cond_init(&r->work, &attr);
	(void)pthread_cond_init(&r->express, &attr);
	(void)pthread_cond_init(&r->changed, &attr);
	(void)pthread_condattr_destroy(&attr);
	r->pager = p;
	r->mm = -1;
	r->id = id;
	r->nr_refs = 1;
	*ret = r;
	return 0;
}

void remote_put(struct remote *r)
{
	struct pager *p = r->pager;

	own_lock(p);
	if (--r->nr_refs) {
		own_unlock(p);
		return;
	}
	own_unlock(p);
	(void)pthread_cond_destroy(&r->work);
	(void)pthread_cond_destroy(&r->express);
	(void)pthread_cond_destroy(&r->changed);
	free(r->maps);
	free(r);
}

struct keep_mm {
	uint64_t id, parent;
	unsigned char token[16];
	struct remote_info info;
	struct uffd_caps caps;
	char stage[64];
	uint32_t nr_maps; /* a child's when it was made: its own records may be missing, the parent's stand for them */
	bool child, claimed;
};

struct keep_map {
	uint64_t id, mm, view, base;
	bool forbidden, pinned;
};

int keep_remote(struct remote *r, int uffd)
{
	struct keep_mm k = {
		.id = r->id,
		.parent = r->parent,
		.info = r->info,
		.caps = r->caps,
		.nr_maps = (uint32_t)r->nr_maps,
		.child = r->child,
		.claimed = r->claimed,
	};

	memcpy(k.token, r->token, sizeof(k.token));
	memcpy(k.stage, r->stage, sizeof(k.stage));
	return keep_put(r->pager, KEEP_KEY(KEEP_MM, r->id), &k, sizeof(k), &uffd, 1);
}

int keep_map(struct mapping *m)
{
	struct keep_map k = { .id = m->id,
			      .mm = m->remote->id,
			      .view = m->view->serve->id,
			      .base = (uintptr_t)m->base,
			      .forbidden = m->forbidden,
			      .pinned = m->pinned };

	return keep_put(m->remote->pager, KEEP_KEY(KEEP_MAP, m->id), &k, sizeof(k), &m->state_fd, m->state_fd >= 0);
}

int remote_adopt(struct pager *p, const void *blob, size_t nbytes, struct remote **ret, uint32_t *ret_nr_maps)
{
	const struct keep_mm *k = blob;
	struct remote *r;
	int e;

	if (nbytes != sizeof(*k))
		return -EPROTO;
	e = remote_make(p, k->id, &r);
	if (e < 0)
		return e;
	r->parent = k->parent;
	memcpy(r->token, k->token, sizeof(r->token));
	memcpy(r->stage, k->stage, sizeof(r->stage));
	r->info = k->info;
	r->caps = k->caps;
	r->child = k->child;
	r->claimed = k->claimed;
	r->hup = true; /* until its session is back */
	*ret_nr_maps = k->nr_maps;
	*ret = r;
	return 0;
}

int mapping_adopt(struct pager *p, const void *blob, size_t nbytes, int state_fd)
{
	const struct keep_map *k = blob;
	struct remote *r = NULL;
	struct view *v = NULL;
	struct mapping *m;
	int e;

	if (nbytes != sizeof(*k))
		return -EPROTO;
	for (int i = 1; i < p->nr_mms; i++)
		if (p->mms[i].remote && p->mms[i].remote->id == k->mm)
			r = p->mms[i].remote;
	for (size_t i = 0; i < p->nr_views; i++)
		if (p->views[i]->serve->id == k->view)
			v = p->views[i];
	m = r && v ? mapping_new(r, v, k->base, k->id) : NULL;
	if (!m) {
		if (r)
			r->abandoned = true;
		return -ENOENT;
	}
	m->state_fd = state_fd;
	m->state_bytes = map_state_bytes(v->nr_ext, v->bytes, page_bytes());
	if (state_fd >= 0) {
		m->state = mmap(NULL, m->state_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, state_fd, 0);
		if (m->state == MAP_FAILED)
			m->state = NULL;
	}
	m->ready = true;
	m->forbidden = k->forbidden;
	m->pinned = k->pinned;
	own_lock(p);
	e = remote_add_map(r, m);
	own_unlock(p);
	if (e < 0) {
		m->state_fd = -1;
		mapping_free(m);
	}
	return e;
}

static bool has_map(const struct remote *r, const struct view *v, const unsigned char *base)
{
	for (size_t i = 0; i < r->nr_maps; i++)
		if (r->maps[i]->view == v && r->maps[i]->base == base)
			return true;
	return false;
}

void keep_maps(struct remote *r)
{
	struct pager *p = r->pager;

	for (size_t i = 0;; i++) {
		struct mapping *m = NULL;

		own_lock(p);
		if (!r->gone && i < r->nr_maps) {
			m = r->maps[i];
			m->busy++;
		}
		own_unlock(p);
		if (!m)
			break;
		(void)keep_map(m);
		own_lock(p);
		m->busy--;
		(void)pthread_cond_broadcast(&r->changed);
		own_unlock(p);
	}
}

/* The parent's mappings in the child's address space. The lock is held. */
static void inherit(struct remote *child, const struct remote *parent)
{
	struct pager *p = child->pager;

	for (size_t i = 0; i < parent->nr_maps; i++) {
		const struct mapping *of = parent->maps[i];
		struct mapping *m;

		if (has_map(child, of->view, of->base))
			continue;
		m = mapping_new(child, of->view, (uintptr_t)of->base, atomic_fetch_add(&p->serve->next_id, 1));

		if (!m || remote_add_map(child, m) < 0) {
			mapping_free(m);
			log_error("a forked child of process %d is not fully served: out of memory",
				  (int)parent->info.pid);
			return;
		}
		m->ready = true;
		m->forbidden = of->forbidden;
	}
}

void remote_inherit(struct remote *child, size_t nr_maps)
{
	struct pager *p = child->pager;

	/* (One that the parent has made since is found not to be there by the first probe.) */
	for (int i = 1; i < p->nr_mms; i++)
		if (p->mms[i].remote && p->mms[i].remote->id == child->parent && child->nr_maps < nr_maps)
			inherit(child, p->mms[i].remote);
}

static int worker_start(struct remote *r)
{
	int e;

	r->nr_refs++;
	e = thread_detached(worker, r, "wd-client");
	if (e < 0)
		r->nr_refs--;
	r->worker_missing = e < 0;
	return e;
}

/* A thread could not be had before. */
void remote_tend(struct remote *r)
{
	if (r->worker_missing)
		(void)worker_start(r);
}

/* Nobody but root and the daemon's user takes all places. */
static bool crowded(const struct pager *p, uid_t uid)
{
	unsigned int nr = 0;

	for (int i = 1; i < p->nr_mms; i++)
		nr += p->mms[i].remote && p->mms[i].remote->info.uid == uid;
	return uid != 0 && uid != geteuid() && nr >= NR_MMS / 4;
}

int remote_enter(struct remote *r, int uffd)
{
	struct pager *p = r->pager;
	struct epoll_event ev = { .events = EPOLLIN };
	int i, e = -EUSERS;

	own_lock(p);
	for (i = 1; i < NR_MMS && (p->mms[i].uffd >= 0 || p->mms[i].remote); i++)
		;
	if (i < NR_MMS && !crowded(p, r->info.uid)) {
		p->mms[i] = (struct mm){ .uffd = uffd, .remote = r, .seq = ++p->seq };
		p->nr_mms = MAX(p->nr_mms, i + 1);
		p->serve->nr_remotes++;
		r->mm = i;
		e = p->serve->running ? worker_start(r) : 0;
		if (e < 0 && !r->child) {
			p->mms[i] = (struct mm){ .uffd = -1 };
			p->serve->nr_remotes--;
		} else {
			e = 0;
		}
	}
	own_unlock(p);
	if (e < 0)
		return e;
	ev.data.u32 = (uint32_t)i;
	(void)epoll_ctl(p->epoll_fd, EPOLL_CTL_ADD, uffd, &ev);
	return 0;
}

void serve_on_fork(struct pager *p, int mm, int fd)
{
	struct remote *parent = p->mms[mm].remote, *r = NULL;
	struct serve *s = p->serve;

	if (!parent || remote_make(p, atomic_fetch_add(&s->next_id, 1), &r) < 0) {
		/* Not closed: the child would read zeros. It waits instead. */
		log_error("a forked child is not served: out of memory");
		return;
	}
	r->parent = parent->id;
	memcpy(r->token, parent->token, sizeof(r->token));
	r->info = parent->info;
	r->info.pid = 0; /* not known before it claims itself */
	r->caps = parent->caps;
	r->child = r->hup = true;
	r->nr_maps = parent->nr_maps; /* for the keeper's record */
	(void)keep_remote(r, fd);
	r->nr_maps = 0;

	/* Its mappings and our count of children in one step: a take-back sees both, or asks again. */
	own_lock(p);
	inherit(r, parent);
	parent->forks++;
	s->counts.forks++;
	own_unlock(p);
	if (remote_enter(r, fd) < 0) {
		log_error(
			"a forked child of process %d is not served: more than %d address spaces are alive, or %d of one "
			"user's",
			(int)parent->info.pid, NR_MMS, NR_MMS / 4);
		own_lock(p);
		while (r->nr_maps)
			remote_del_map(r->maps[0]);
		own_unlock(p);
		remote_put(r);
		return;
	}
	keep_maps(r);
}

void serve_close_gone(struct pager *p, int mm)
{
	struct remote *r = p->mms[mm].remote;

	own_lock(p);
	p->mms[mm].remote = NULL;
	p->serve->nr_remotes--;
	own_unlock(p);
	if (r)
		remote_put(r);
}

int remote_new(struct pager *p, int uffd, const struct remote_info *info, struct remote **ret, struct wd_err *err)
{
	struct remote *r = NULL;
	struct uffd_caps caps = p->caps;
	int e;

	e = info->armed ? uffd_check_ready(uffd) : uffd_adopt(uffd, info->user_only, &caps);
	if (e < 0) {
		(void)close(uffd);
		return err_set(err, e, "the descriptor is no fresh userfaultfd");
	}
	e = remote_make(p, atomic_fetch_add(&p->serve->next_id, 1), &r);
	if (e == 0 && getrandom(r->token, sizeof(r->token), 0) != (ssize_t)sizeof(r->token))
		e = -EIO;
	if (e == 0) {
		r->info = *info;
		r->caps = caps;
		r->nr_refs++; /* the session's */
		e = keep_remote(r, uffd);
	}
	if (e == 0)
		e = remote_enter(r, uffd);
	if (e < 0) {
		if (r)
			keep_del(p, KEEP_KEY(KEEP_MM, r->id));
		(void)close(uffd);
		free(r);
		return e == -EUSERS ?
			       err_set(err, e,
				       "more than %d address spaces have weights mapped, children included, or %d of "
				       "one user's",
				       NR_MMS, NR_MMS / 4) :
			       err_set(err, e, "cannot take the client in: %s", strerror(-e));
	}
	*ret = r;
	return 0;
}

uint64_t remote_id(const struct remote *r)
{
	return r->id;
}

const unsigned char *remote_token(const struct remote *r)
{
	return r->token;
}

const struct remote_info *remote_info(const struct remote *r)
{
	return &r->info;
}

void remote_set_session(struct remote *r, void *session)
{
	own_lock(r->pager);
	r->session = session;
	own_unlock(r->pager);
}

void *remote_session(struct remote *r)
{
	return r->session;
}

int remote_keep_session(struct remote *r, int control_fd, int notify_fd)
{
	int fds[] = { control_fd, notify_fd };

	return keep_put(r->pager, KEEP_KEY(KEEP_SESSION, r->id), &r->id, sizeof(r->id), fds, 2);
}

void remote_hup(struct remote *r)
{
	struct pager *p = r->pager;

	if (!p->serve->let_go)
		keep_del(p, KEEP_KEY(KEEP_SESSION, r->id));
	own_lock(p);
	r->session = NULL;
	r->hup = true;
	r->stage[0] = 0;
	/* Its pins end with it. What it held it holds until its memory is gone, or a round says otherwise. */
	if (r->round) {
		r->round = 0;
		(void)pthread_cond_broadcast(&p->serve->armed);
	}
	r->probe_ns = 0;
	r->probe_every_ns = 0;
	(void)pthread_cond_signal(&r->work);
	for (size_t i = 0; i < r->nr_maps; i++) {
		struct view *v = r->maps[i]->view;

		if (!r->maps[i]->pinned)
			continue;
		r->maps[i]->pinned = false;
		v->nr_refs++;
		own_unlock(p);
		pin_apply(v);
		(void)view_unref(v);
		own_lock(p);
		i = SIZE_MAX; /* (mappings may have come and gone) */
	}
	own_unlock(p);
	remote_put(r);
}

/* A descendant: all of a family have one token. (Between may be raw clones that never claimed themselves.) */
static bool related(const struct pager *p, const struct remote *r, uint64_t parent)
{
	if (r->parent == parent)
		return true;
	for (int i = 1; i < p->nr_mms; i++) {
		const struct remote *it = p->mms[i].remote;

		if (it && (it->id == parent || it->parent == parent) && !memcmp(it->token, r->token, sizeof(r->token)))
			return true;
	}
	return false;
}

static struct remote *child_of(struct pager *p, uint64_t parent, const unsigned char *token, uint64_t id)
{
	for (int i = 1; i < p->nr_mms; i++) {
		struct remote *r = p->mms[i].remote;

		if (r && r->child && !r->claimed && !r->gone && (!id || r->id == id) && related(p, r, parent) &&
		    (!token || !memcmp(r->token, token, sizeof(r->token))))
			return r;
	}
	return NULL;
}

static bool numbering(struct pager *p, uint64_t parent)
{
	for (int i = 1; i < p->nr_mms; i++) {
		const struct remote *r = p->mms[i].remote;

		if (r && r->number_wanted && !r->gone && related(p, r, parent))
			return true;
	}
	return false;
}

#define CLAIM_WAIT_MS 2000

int remote_claim(struct pager *p, uint64_t parent, const unsigned char token[16], struct wd_err *err)
{
	struct timespec until;
	uint64_t end = now_ns() + 50000000;
	bool any = false;

	deadline_in(&until, CLAIM_WAIT_MS);
	own_lock(p);
	/* (The child runs as soon as its event has been read, which may be before it is in our table.) */
	while (!child_of(p, parent, token, 0) && now_ns() < end) {
		own_unlock(p);
		(void)usleep(200);
		own_lock(p);
	}
	for (int i = 1; i < p->nr_mms; i++) {
		struct remote *r = p->mms[i].remote;

		if (r && r->child && !r->claimed && !r->gone && related(p, r, parent) &&
		    !memcmp(r->token, token, sizeof(r->token))) {
			r->number_wanted = any = true;
			(void)pthread_cond_signal(&r->work);
		}
	}
	while (any && numbering(p, parent) && pthread_cond_timedwait(&p->serve->armed, &p->lock, &until) != ETIMEDOUT)
		;
	own_unlock(p);
	return any ? 0 : err_set(err, -ENOENT, "no forked child of that process waits here");
}

int remote_claimed(struct pager *p, uint64_t parent, uint64_t number, const struct remote_info *info,
		   struct remote **ret, int *ret_uffd, struct wd_err *err)
{
	struct remote *r;
	int fd = -1;

	own_lock(p);
	r = number ? child_of(p, parent, NULL, number) : NULL;
	if (r) {
		fd = fcntl(p->mms[r->mm].uffd, F_DUPFD_CLOEXEC, 3);
		if (fd < 0)
			r = NULL;
	}
	if (r) {
		bool user_only = r->info.user_only;

		r->claimed = true;
		r->hup = false;
		r->info = *info;
		r->info.user_only = user_only;
		r->nr_refs++;
		*ret_uffd = fd;
	}
	own_unlock(p);
	if (!r)
		return err_set(err, -ENOENT, "no such forked child waits here");
	(void)keep_remote(r, *ret_uffd);
	*ret = r;
	return 0;
}
