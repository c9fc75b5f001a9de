/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the daemon decides: which views there are and who may share them, what is taken back and in which order, and how a
 * new daemon goes on with what the keeper has kept. What is done in an address space is done in remote.c.
 *
 * Threads: the pager's worker is the *coordinator* here. It asks the remotes' workers to arm, waits for all of them or for
 * the deadline, and punches. A client that does not let its worker through (it holds its mmap_lock, it is stopped in the
 * middle of something) is stalled: what it has mapped is no candidate for a while, twice as long each time.
 *
 * The extent table is in memory that clients read and a next daemon trusts: an extent is READY there only while all its
 * bytes are the file's.
 */
#include "ufd/serve.h"

#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#include "lib/base/log.h"
#include "ufd/remote.h"

#define TEND_NS 1000000000ull
#define FOREIGN_NS 5000000000ull
#define ROUND_WAIT_NS 50000000ull
#define ROUND_EVERY_NS 100000000ull
#define STALL_MIN_NS 100000000ull
#define STALL_MAX_NS 10000000000ull
#define HUNGRY_NS 1000000000ull
#define HUNGRY_LOOK_NS 20000000ull
#define SUSPECT_NS 10000000ull
#define ADOPT_WAIT_MS 1000
#define SLOW_LOOK_S 10
#define SYNC_MS 200

/*
 * The reader sleeps in epoll until a fault comes. Spinning for the next one saves the wake-up of one of two threads: measured on
 * 2 CPUs (make bench, fault), p50 42 instead of 44 us, but p99 105 instead of 78 us, since the spinning thread takes the
 * processor from who could answer. So 0 is the default, and --spin-us is for machines with processors to spare.
 */
uint64_t serve_spin_ns(const struct pager *p)
{
	return (uint64_t)p->serve->config.spin_us * 1000;
}

bool serve_let_going(const struct pager *p)
{
	return p->serve->let_go;
}

const char *serve_mpol(const struct pager *p)
{
	return p->serve && p->serve->mpol[0] ? p->serve->mpol : NULL;
}

/* ------------------------------------------------------------------ the table */

void serve_publish(struct extent *x)
{
	struct table_extent *t = table_ext(x->view->serve->table) + ext_index(x);

	t->code = x->code;
	t->error = x->error;
	t->huge = (x->flags & X_HUGE) != 0;
	atomic_store_explicit(&t->state, x->state, memory_order_release);
}

void serve_unpublish(struct extent *x)
{
	atomic_store(&(table_ext(x->view->serve->table) + ext_index(x))->state, EXT_EMPTY);
}

/* ------------------------------------------------------------------ slow files */

/* The lock is held. */
bool serve_slow_full(const struct view *v)
{
	return v->serve->nr_slow >= SERVE_SLOW_MAX;
}

void serve_park(struct extent *x)
{
	ext_queue(x, &x->view->serve->parked);
}

void serve_slow_push(struct fill *f)
{
	struct serve_view *s = f->view->serve;

	s->nr_slow++;
	if (f->demand)
		list_add_head(&s->slow, &f->queue);
	else
		list_add_tail(&s->slow, &f->queue);
	(void)pthread_cond_signal(&s->work);
}

void serve_slow_first(struct extent *x)
{
	struct serve_view *s = x->view->serve;

	for (struct list *n = s->slow.next; n != &s->slow; n = n->next) {
		struct fill *f = container_of(n, struct fill, queue);

		if (f->ext == ext_index(x)) {
			list_del(n);
			list_add_head(&s->slow, n);
			return;
		}
	}
}

/* Is there still a name, and are these still the bytes? A network file system answers when its server does. */
static bool is_stale(struct view *v)
{
	struct stat st;

	return fstat(v->source->fd, &st) < 0 || st.st_nlink == 0 || source_check(v->source) < 0;
}

static void *slow_thread(void *arg)
{
	struct view *v = arg;
	struct serve_view *s = v->serve;
	struct pager *p = v->pager;

	own_lock(p);
	while (!s->end) {
		struct timespec until;
		struct fill *f;

		if (list_empty(&s->slow)) {
			bool stale;

			deadline_in(&until, SLOW_LOOK_S * 1000);
			if (pthread_cond_timedwait(&s->work, &p->lock, &until) != ETIMEDOUT || !s->idle_since_ns)
				continue;
			own_unlock(p);
			stale = is_stale(v);
			own_lock(p);
			s->stale = stale;
			continue;
		}
		f = container_of(s->slow.next, struct fill, queue);
		list_del(&f->queue);
		f->slow_started = true;
		own_unlock(p);
		slow_fill(f);
		own_lock(p);
		list_add_tail(&p->slow_done, &f->queue);
		s->nr_slow--;
		while (!list_empty(&s->parked)) {
			struct extent *x = container_of(s->parked.next, struct extent, queue);

			ext_queue(x, x->flags & X_WAIT ? &p->demand : &p->ahead);
		}
		pager_wake_reader(p);
	}
	own_unlock(p);
	(void)!ftruncate(v->arena.fd, 0); /* who kept its descriptor could fill it for ever, seen by nobody */
	view_free(v);                     /* here, since closing a file may wait for its server */
	return NULL;
}

int serve_slow_start(struct view *v)
{
	return thread_detached(slow_thread, v, "wd-source");
}

void serve_view_end(struct view *v)
{
	struct pager *p = v->pager;

	keep_del(p, KEEP_KEY(KEEP_VIEW, v->serve->id));
	keep_del(p, KEEP_KEY(KEEP_RO, v->serve->id));
	own_lock(p);
	v->serve->end = true;
	(void)pthread_cond_signal(&v->serve->work);
	own_unlock(p);
}

/* ------------------------------------------------------------------ taking back */

bool serve_arm(struct pager *p, const struct run *r, uint64_t until)
{
	struct serve *s = p->serve;
	struct view *v = r->view;
	bool good = false;

	own_lock(p);
	s->counts.take_backs++;
	for (;;) {
		uint64_t now = now_ns(), gen = ++s->arm_gen;
		bool forking = false, pending = true;
		struct timespec t = { .tv_sec = (time_t)(until / 1000000000), .tv_nsec = (long)(until % 1000000000) };

		for (struct list *n = v->maps.next; n != &v->maps; n = n->next) {
			struct mapping *m = container_of(n, struct mapping, node);

			if (now < m->remote->stalled_until_ns)
				goto out;
		}
		for (struct list *n = v->maps.next; n != &v->maps; n = n->next) {
			struct mapping *m = container_of(n, struct mapping, node);

			if (m->remote->gone)
				continue;
			m->arm = ARM_ASKED;
			m->arm_gen = gen;
			m->arm_run = *r;
			m->arm_forks = m->remote->forks;
			m->remote->nr_arms++;
			(void)pthread_cond_signal(&m->remote->work);
		}
		while (pending) {
			pending = false;
			for (struct list *n = v->maps.next; n != &v->maps && !pending; n = n->next)
				pending = container_of(n, struct mapping, node)->arm == ARM_ASKED;
			if (pending && pthread_cond_timedwait(&s->armed, &p->lock, &t) == ETIMEDOUT)
				break;
		}
		for (struct list *n = v->maps.next; n != &v->maps; n = n->next) {
			struct mapping *m = container_of(n, struct mapping, node);
			struct remote *who = m->remote;

			if (m->arm == ARM_ASKED) {
				/* It does not come through: not now, and not so soon again. */
				m->arm = ARM_NONE;
				who->nr_arms--;
				if (who->working) { /* else it has only not had a processor yet */
					who->stall_ns = MIN(MAX(who->stall_ns * 2, STALL_MIN_NS), STALL_MAX_NS);
					who->stalled_until_ns = now_ns() + who->stall_ns;
				}
				forking = true;
				until = 0;
				continue;
			}
			forking |= m->arm == ARM_FORKING;
			who->stall_ns = 0;
			m->arm = ARM_NONE;
		}
		if (!forking) {
			good = true;
			break;
		}
		if (now_ns() > until)
			break;
		own_unlock(p);
		sched_yield(); /* the reader takes the event in */
		own_lock(p);
	}
out:
	s->counts.take_backs_given_up += !good;
	own_unlock(p);
	return good;
}

static bool pinned_by_user_only(const struct extent *x)
{
	size_t e = ext_index(x);

	/* System calls on an armed page would fail there: nothing goes but what it has given back itself. */
	for (const struct list *n = x->view->maps.next; n != &x->view->maps; n = n->next) {
		const struct mapping *m = container_of(n, struct mapping, node);

		if (m->remote->info.user_only && m->flags[e] & M_HELD)
			return true;
	}
	return false;
}

/* Whose use of an extent counts against taking it. */
enum spare { SPARE_HELD, SPARE_STAGES, SPARE_NONE };

/* Oldest first. Returns bytes. */
static uint64_t take_oldest(struct pager *p, uint64_t bytes, enum spare spare, uint64_t now)
{
	struct list *list = &p->lru[VIEW_NORMAL][LRU_ARMED];
	uint64_t got = 0;

	for (struct list *n = list->next, *next; n != list && got < bytes; n = next) {
		struct extent *x = container_of(n, struct extent, lru);

		next = n->next;
		if (x->view->dying || x->flags & X_DROP || pinned_by_user_only(x) ||
		    (spare != SPARE_NONE && ext_held(x, spare == SPARE_STAGES)))
			continue;
		ext_lru(x, -1, false);
		got += ext_len(x);
		x->drop_ns = now + PROBE_DEADLINE_NS;
		x->flags |= X_DROP;
		p->nr_drops++;
		ext_settle(x);
	}
	return got;
}

static bool rounding(const struct pager *p)
{
	for (int i = 1; i < p->nr_mms; i++)
		if (p->mms[i].remote && p->mms[i].remote->round)
			return true;
	return false;
}

/* Clients without a stage tell what they touched since the last round; the others' marks have told. */
static void round_ask(struct pager *p)
{
	struct serve *s = p->serve;
	struct timespec until;
	uint64_t round = ++s->round;

	s->round_ns = now_ns();
	s->counts.rounds++;
	for (int i = 1; i < p->nr_mms; i++) {
		struct remote *r = p->mms[i].remote;

		if (!r || r->gone || r->stage[0] || r->info.user_only || !r->nr_maps)
			continue;
		/* From now on it holds what it touches, or says that it has touched. */
		for (size_t k = 0; k < r->nr_maps; k++)
			for (size_t e = 0; e < r->maps[k]->view->nr_ext; e++)
				r->maps[k]->flags[e] &= (uint8_t)~M_HELD;
		if (r->session && s->config.round) {
			r->round = round;
			r->nr_refs++;
			own_unlock(p);
			s->config.round(s->config.arg, r, round);
			remote_put(r);
			own_lock(p);
		}
	}
	deadline_in(&until, ROUND_WAIT_NS / 1000000);
	while (rounding(p) && pthread_cond_timedwait(&s->armed, &p->lock, &until) != ETIMEDOUT)
		;
	for (int i = 1; i < p->nr_mms; i++)
		if (p->mms[i].remote)
			p->mms[i].remote->round = 0;
}

/* What nobody holds goes first; then, after a round of questions, the longest untouched, what running stages hold last. */
void serve_evict(struct pager *p)
{
	uint64_t budget = __atomic_load_n(&p->budget, __ATOMIC_RELAXED), now = now_ns(), need = p->evict_need, got = 0,
		 want;
	bool any = p->evict_any;

	want = policy_excess(p->resident, need, budget, extent_bytes());
	p->evict_need = 0;
	p->evict_any = false;
	for (const struct list *l = p->drop.next; l != &p->drop && got < want; l = l->next)
		got += extent_bytes();
	if (got < want)
		got += take_oldest(p, want - got, SPARE_HELD, now);
	if (any && got < want) {
		if (now - p->serve->round_ns > ROUND_EVERY_NS) {
			round_ask(p);
			got += take_oldest(p, want - got, SPARE_HELD, now);
		}
		if (got < want)
			got += take_oldest(p, want - got, SPARE_STAGES, now);
		if (got < want)
			got += take_oldest(p, want - got, SPARE_NONE, now);
	}
	if (!got && want) {
		if (p->nr_fills)
			return; /* what is being read can go when it has come: the reader asks again then */
		p->evict_failed |= any ? EVICT_ANY : EVICT_GENTLE;
	}
	pager_wake_reader(p);
}

/* The arenas' file system is full though the table says that there is room: somebody has filled holes. The extent waits until
 * they were looked for. False: for a second already in vain. No lock. */
bool serve_hungry(struct extent *x)
{
	struct pager *p = x->view->pager;
	struct serve *s = p->serve;
	uint64_t now = now_ns();
	bool waits;

	own_lock(p);
	if (!s->hungry_ns)
		s->hungry_ns = now;
	waits = now - s->hungry_ns < HUNGRY_NS;
	if (waits) {
		ext_state(x, EXT_EMPTY);
		ext_unreserve(x);
		x->flags &= ~X_DEMAND;
		ext_queue(x, &s->hungry);
		(void)pthread_cond_signal(&p->work);
	}
	own_unlock(p);
	return waits;
}

void serve_fed(struct pager *p)
{
	if (p->serve->hungry_ns)
		p->serve->hungry_ns = 0;
}

/* Memory in the arena that the table does not know: of a client that unregistered its view and touched holes. */
static void take_foreign(struct pager *p, struct view *v)
{
	uint64_t known = page_bytes(), has; /* the sentinel's */

	for (size_t i = 0; i < v->nr_ext; i++)
		if (v->ext[i].view && v->ext[i].flags & X_RESERVED)
			known += ext_len(&v->ext[i]);
	own_unlock(p);
	has = arena_allocated(&v->arena);
	own_lock(p);
	if (has <= known)
		return;
	p->serve->counts.foreign_bytes += has - known;
	log_info("%s: %llu KiB in its arena that were not read by us: taken back", v->source->path,
		 (unsigned long long)((has - known) / KiB));
	for (size_t i = 0; i < v->nr_ext; i++) {
		struct extent *x = view_extent(v, i);

		if (x->state != EXT_EMPTY || x->flags & X_TAKING || x->inflight)
			continue;
		x->flags |= X_TAKING; /* not filled meanwhile */
		ext_queue(x, NULL);
		own_unlock(p);
		(void)arena_punch(&v->arena, ext_off(x), ext_len(x));
		own_lock(p);
		x->flags &= ~X_TAKING;
		ext_settle(x);
	}
}

static bool adopt_unfinished(struct pager *p, struct view *v);

/* The coordinator's, once a second; the lock is held. */
bool serve_tend(struct pager *p)
{
	struct serve *s = p->serve;
	uint64_t now = now_ns();
	bool foreign, hungry;

	if (s->nr_suspect && now - s->suspect_ns > SUSPECT_NS) {
		for (size_t i = 0; i < p->nr_views; i++) {
			struct view *v = p->views[i];

			if (v->dying || !v->serve->suspect)
				continue;
			v->busy++;
			v->serve->suspect = !adopt_unfinished(p, v);
			view_idle(v);
			s->nr_suspect -= !v->serve->suspect;
			if (v->serve->suspect)
				break; /* in a moment again: a client holds its memory */
			i = SIZE_MAX;  /* from the beginning: the table may be another one now */
		}
		s->suspect_ns = now_ns();
		(void)pthread_cond_broadcast(&p->changed);
		return true;
	}
	hungry = !list_empty(&s->hungry) && now - s->foreign_ns > HUNGRY_LOOK_NS;
	if (!hungry && now - s->tended_ns < TEND_NS)
		return false;
	s->tended_ns = now;
	foreign = hungry || now - s->foreign_ns > FOREIGN_NS;
	if (foreign)
		s->foreign_ns = now;
	for (int i = 1; i < p->nr_mms; i++)
		if (p->mms[i].remote)
			remote_tend(p->mms[i].remote);
	if (s->nr_remotes)
		s->counts.last_used_ns = now;
	for (size_t i = 0; hungry && i < p->nr_views; i++) {
		struct view *v = p->views[i];

		if (v->dying)
			continue;
		v->busy++;
		take_foreign(p, v);
		view_idle(v);
	}
	while (hungry && !list_empty(&s->hungry)) {
		struct extent *x = container_of(s->hungry.next, struct extent, queue);

		ext_queue(x, x->flags & X_WAIT ? &p->demand : &p->ahead);
		pager_wake_reader(p);
	}
	for (size_t i = 0; i < p->nr_views; i++) {
		struct view *v = p->views[i];

		if (v->dying)
			continue;
		if (v->serve->suspect)
			continue;
		if (foreign && (v->nr_refs > 1 || !list_empty(&v->maps))) { /* who has attached it has its arena */
			v->busy++;
			take_foreign(p, v);
			view_idle(v);
		}
		if (v->nr_refs > 1 || v->busy)
			continue;
		v->serve->stale |= atomic_load(&v->source->changed);
		if (v->serve->stale)
			for (size_t e = 0; e < v->nr_ext; e++)
				if (v->ext[e].view)
					ext_ask_drop(&v->ext[e], now + 1000000000);
		if (!v->resident && !v->busy && (v->serve->stale || now - v->serve->idle_since_ns > 10 * TEND_NS) &&
		    !v->serve->nr_pins) {
			v->dying = true; /* nobody finds it any more */
			own_unlock(p);
			(void)view_unref(v);
			own_lock(p);
			return true;
		}
	}
	return false;
}

/* ------------------------------------------------------------------ views */

struct keep_view {
	uint64_t id, bytes;
	struct source_id source;
	uint32_t nr_uids, nr_pins;
	uid_t uids[64], pins[64];
	char name[1024];
};

static int keep_view(struct view *v)
{
	struct pager *p = v->pager;
	struct keep_view blob = { .id = v->serve->id, .bytes = v->bytes };
	int fds[] = { v->arena.fd, v->serve->table_fd, v->source->fd, v->source->direct_fd }, r;
	int ro[] = { v->arena.ro_fd, v->serve->table_ro_fd };

	(void)pthread_mutex_lock(&p->serve->keep);
	own_lock(p);
	blob.source = v->source->id;
	blob.nr_uids = (uint32_t)MIN(v->serve->nr_uids, ARRAY_SIZE(blob.uids));
	blob.nr_pins = (uint32_t)MIN(v->serve->nr_pins, ARRAY_SIZE(blob.pins));
	if (blob.nr_uids)
		memcpy(blob.uids, v->serve->uids, blob.nr_uids * sizeof(uid_t));
	if (blob.nr_pins)
		memcpy(blob.pins, v->serve->pins, blob.nr_pins * sizeof(uid_t));
	own_unlock(p);
	(void)snprintf(blob.name, sizeof(blob.name), "%s", v->source->path);
	r = keep_put(p, KEEP_KEY(KEEP_RO, blob.id), &blob.id, sizeof(blob.id), ro, 2);
	if (r == 0)
		r = keep_put(p, KEEP_KEY(KEEP_VIEW, blob.id), &blob, sizeof(blob), fds, fds[3] >= 0 ? 4 : 3);
	(void)pthread_mutex_unlock(&p->serve->keep);
	return r;
}

static int serve_view_new(struct view *v, uint64_t id)
{
	struct serve_view *s = calloc(1, sizeof(*s));
	pthread_condattr_t attr;

	if (!s)
		return -ENOMEM;
	s->id = id;
	s->table_fd = s->table_ro_fd = -1;
	list_init(&s->slow);
	list_init(&s->parked);
	(void)pthread_condattr_init(&attr);
	(void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	(void)pthread_cond_init(&s->work, &attr);
	(void)pthread_condattr_destroy(&attr);
	s->idle_since_ns = now_ns();
	v->serve = s;
	return 0;
}

void serve_view_done(struct view *v)
{
	struct serve_view *s = v->serve;

	if (!s)
		return;
	if (s->table)
		(void)munmap(s->table, s->table_bytes);
	if (s->table_fd >= 0)
		(void)close(s->table_fd);
	if (s->table_ro_fd >= 0)
		(void)close(s->table_ro_fd);
	(void)pthread_cond_destroy(&s->work);
	free(s->uids);
	free(s->pins);
	free(s);
	v->serve = NULL;
}

static int table_map(struct serve_view *s, uint64_t bytes)
{
	void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, s->table_fd, 0);

	if (at == MAP_FAILED)
		return -errno;
	s->table = at;
	s->table_bytes = bytes;
	return 0;
}

static int table_make(struct view *v)
{
	struct serve_view *s = v->serve;
	uint64_t bytes = table_bytes(v->nr_segs, v->nr_units, v->nr_ext);
	int r = arena_file(&v->pager->fs, bytes, &s->table_fd, &s->table_ro_fd);

	/* All of it now: a full file system must not be a SIGBUS later. */
	if (r == 0 && fallocate(s->table_fd, 0, 0, (off_t)bytes) < 0)
		r = -errno;
	if (r == 0)
		r = table_map(s, bytes);
	if (r < 0)
		return r;
	*s->table = (struct table){
		.magic = TABLE_MAGIC,
		.version = TABLE_VERSION,
		.nr_ext = (uint32_t)v->nr_ext,
		.bytes = v->bytes,
		.extent_bytes = extent_bytes(),
		.nr_segs = (uint32_t)v->nr_segs,
		.nr_units = (uint32_t)v->nr_units,
	};
	memcpy(s->table->segs, v->segs, v->nr_segs * sizeof(*v->segs));
	if (v->nr_units)
		memcpy(table_units(s->table), v->units, v->nr_units * sizeof(*v->units));
	return 0;
}

/* A reference, or NULL. `ctime`: equal but for that. */
static struct view *find(struct pager *p, const struct source_id *id, const struct view_layout *layout, bool ctime)
{
	struct view *found = NULL;

	own_lock(p);
	for (size_t i = 0; i < p->nr_views && !found; i++) {
		struct view *v = p->views[i];
		struct source_id known = v->source->id;

		if (ctime)
			known.ctime_ns = id->ctime_ns;
		/* (A handle may be equal by chance or by somebody's will: only what is compared in full stands on it alone.) */
		if (ctime && (known.dev != id->dev || known.ino != id->ino))
			continue;
		if (v->dying || !source_id_equal(&known, id) || !view_layout_equal(v, layout) ||
		    atomic_load(&v->source->changed))
			continue;
		v->nr_refs++;
		found = v;
	}
	own_unlock(p);
	return found;
}

/* Do the resident bytes equal the file's? What is dropped meanwhile does not count. */
static bool same_bytes(struct view *v, struct source *src)
{
	struct pager *p = v->pager;
	unsigned char *buf = malloc(extent_bytes());
	bool same = buf != NULL;

	for (size_t i = 0; i < v->nr_ext && same; i++) {
		struct extent *x = &v->ext[i];
		bool ready;

		own_lock(p);
		ready = x->view && x->state == EXT_READY && !(x->flags & X_TAKING);
		x->inflight += ready; /* holds off a take-back */
		own_unlock(p);
		if (!ready)
			continue;
		for (size_t k = 0; k < v->nr_segs && same; k++) {
			const struct segment *seg = &v->segs[k];
			uint64_t a = MAX(ext_off(x), seg->arena_off);
			uint64_t b = MIN(ext_off(x) + ext_len(x), seg->arena_off + seg->len);

			if (a < b)
				same = source_read(src, buf, b - a, seg->file_off + (a - seg->arena_off)) == 0 &&
				       !memcmp(buf, v->arena.alias + a, b - a);
		}
		own_lock(p);
		x->inflight--;
		x->flags |= X_ZAP; /* the alias is mapped again */
		ext_settle(x);
		own_unlock(p);
	}
	free(buf);
	return same && source_check(src) == 0;
}

static int may_see(struct view *v, uid_t uid)
{
	struct serve_view *s = v->serve;
	struct pager *p = v->pager;
	uid_t *more = NULL;
	bool known = false;

	own_lock(p);
	for (size_t i = 0; i < s->nr_uids && !known; i++)
		known = s->uids[i] == uid;
	if (!known) {
		more = realloc(s->uids, (s->nr_uids + 1) * sizeof(*more));
		if (more) {
			s->uids = more;
			s->uids[s->nr_uids++] = uid;
		}
	}
	own_unlock(p);
	return known ? 0 : more ? 1 : -ENOMEM;
}

/* The same file, whatever has happened to it since. */
static bool same_file(const struct source_id *a, const struct source_id *b)
{
	return (a->dev == b->dev && a->ino == b->ino) ||
	       (a->handle_len && a->handle_len == b->handle_len && a->ino == b->ino &&
		!memcmp(a->handle, b->handle, a->handle_len));
}

/* The file is another one than we knew: those who have the old one are told, in ls, too, and idle memory goes. */
static void look_again(struct pager *p, const struct source_id *id)
{
	struct view *v;
	size_t i = 0;

	do {
		v = NULL;
		own_lock(p);
		while (i < p->nr_views && !v) {
			struct view *it = p->views[i++];

			if (!it->dying && same_file(&it->source->id, id) && !atomic_load(&it->source->changed))
				v = it;
		}
		if (v)
			v->nr_refs++;
		own_unlock(p);
		if (v) {
			(void)source_check(v->source);
			(void)view_unref(v);
		}
	} while (v);
}

/* A user's views: address space is free, but tables are memory, and the lock is held while all extents are looked at. */
#define USER_BYTES_MAX (4ull << 40)
#define USER_TABLES_MAX (256ull << 20)

static int may_have(struct pager *p, uid_t uid, uint64_t bytes, uint64_t table)
{
	own_lock(p);
	for (size_t i = 0; i < p->nr_views; i++) {
		if (p->views[i]->serve->nr_uids && p->views[i]->serve->uids[0] == uid) { /* who brought it in */
			bytes += p->views[i]->bytes;
			table += p->views[i]->serve->table_bytes;
		}
	}
	own_unlock(p);
	return uid != 0 && (bytes > USER_BYTES_MAX || table > USER_TABLES_MAX) ? -EUSERS : 0;
}

int serve_attach(struct pager *p, struct source *src, const struct view_layout *layout, uint64_t bytes, uid_t uid,
		 struct view **ret, bool *ret_known, struct wd_err *err)
{
	struct view *v = find(p, &src->id, layout, false), *other;
	int r;

	if (v && source_check(v->source) < 0) {
		(void)view_unref(v);
		v = NULL;
	}
	if (!v) {
		other = find(p, &src->id, layout, true);
		if (other && source_check(other->source) == 0 && same_bytes(other, src)) {
			/* link, chmod, rename: another ctime, the same bytes */
			own_lock(p);
			other->source->id.ctime_ns = src->id.ctime_ns;
			own_unlock(p);
			v = other;
			(void)keep_view(v);
		} else if (other) {
			(void)view_unref(other);
		}
	}
	*ret_known = v != NULL;
	if (!v)
		look_again(p, &src->id);
	if (!v) {
		(void)pthread_mutex_lock(&p->serve->attach);
		v = find(p, &src->id, layout, false);
		*ret_known = v != NULL;
		if (v) {
			(void)pthread_mutex_unlock(&p->serve->attach);
			goto out;
		}
		r = may_have(p, uid, bytes, table_bytes(layout->nr_segs, layout->nr_units, bytes / extent_bytes() + 1));
		if (r < 0) {
			(void)pthread_mutex_unlock(&p->serve->attach);
			return err_set(
				err, r,
				"%s: user %u's sources would be more than %llu TiB, or their tables more than %llu MiB: "
				"close some",
				src->path, (unsigned int)uid, USER_BYTES_MAX >> 40, USER_TABLES_MAX >> 20);
		}
		v = view_new(p, src, layout, bytes);
		r = v ? serve_view_new(v, atomic_fetch_add(&p->serve->next_id, 1)) : -ENOMEM;
		if (r == 0)
			r = arena_open(&p->fs, bytes, &v->arena);
		if (r == 0)
			r = table_make(v);
		if (r == 0) {
			view_map_source(v);
			r = keep_view(v);
		}
		if (r == 0)
			r = view_publish(v, err);
		if (r == 0) {
			own_lock(p);
			v->nr_refs++; /* ours: it stays as a cache when nobody has it */
			own_unlock(p);
			r = serve_slow_start(v);
			if (r < 0) {
				own_lock(p);
				v->dying = true;
				own_unlock(p);
				v = NULL; /* (it is in the table, and not shared: rather lost than freed while it is seen) */
			}
		}
		(void)pthread_mutex_unlock(&p->serve->attach);
		if (r < 0) {
			if (v && v->serve) {
				keep_del(p, KEEP_KEY(KEEP_VIEW, v->serve->id));
				keep_del(p, KEEP_KEY(KEEP_RO, v->serve->id));
			}
			view_free(v);
			return err_set(err, r, "%s: cannot make an arena of %llu MiB: %s", src->path,
				       (unsigned long long)(bytes / MiB), strerror(-r));
		}
	}
out:
	r = may_see(v, uid);
	if (r > 0)
		(void)keep_view(v);
	*ret = v;
	return 0;
}

void serve_detach(struct view *v)
{
	(void)view_unref(v);
}

uint64_t view_id(const struct view *v)
{
	return v->serve->id;
}

uint64_t view_arena_bytes(const struct view *v)
{
	return v->bytes;
}

int view_arena_fd(const struct view *v)
{
	return v->arena.ro_fd;
}

int view_table_fd(const struct view *v)
{
	return v->serve->table_ro_fd;
}

uint64_t view_table_bytes(const struct view *v)
{
	return v->serve->table_bytes;
}

/* ------------------------------------------------------------------ mappings */

#define OPEN_WAIT_MS 2000

/* Each costs the daemon a descriptor and a VMA, and the keeper a descriptor. */
static uint64_t maps_most(uid_t uid)
{
	struct rlimit limit;

	if (uid == 0 || uid == geteuid() || getrlimit(RLIMIT_NOFILE, &limit) < 0)
		return UINT64_MAX;
	return limit.rlim_cur / 8;
}

static uint64_t maps_of(const struct pager *p, uid_t uid)
{
	uint64_t nr = 0;

	for (int i = 1; i < p->nr_mms; i++)
		if (p->mms[i].remote && p->mms[i].remote->info.uid == uid)
			nr += p->mms[i].remote->nr_maps;
	return nr;
}

static bool linked(const struct mapping *m)
{
	for (size_t i = 0; i < m->remote->nr_maps; i++)
		if (m->remote->maps[i] == m)
			return true;
	return false;
}

/* A descriptor of the caller's: the mapping may end before it is passed on. */
static int state_out(const struct mapping *m, int *ret_fd, uint64_t *ret_bytes)
{
	int fd = fcntl(m->state_fd, F_DUPFD_CLOEXEC, 3);

	if (fd < 0)
		return -errno;
	*ret_fd = fd;
	*ret_bytes = m->state_bytes;
	return 0;
}

int serve_map(struct remote *r, struct view *v, uint64_t address, int *ret_state_fd, uint64_t *ret_state_bytes,
	      struct wd_err *err)
{
	static const _Alignas(4096) unsigned char zeros[64 * 1024]; /* one page of the largest size */
	unsigned int most = r->pager->serve->config.max_maps ? r->pager->serve->config.max_maps : 4096;
	struct pager *p = r->pager;
	uint64_t len = v->bytes + page_bytes();
	struct mapping *m, *known = NULL;
	struct timespec until;
	int e = 0, fd;

	if (address % page_bytes() || address > UINT64_MAX / 2 || address + len > UINT64_MAX / 2)
		return err_set(err, -EINVAL, "the address of a mapping is not one");
	own_lock(p);
	for (size_t i = 0; i < r->nr_maps; i++)
		if (r->maps[i]->view == v && (uintptr_t)r->maps[i]->base == address)
			known = r->maps[i];
	if (known)
		known->busy++; /* not unmapped meanwhile */
	else if (r->nr_maps >= most || maps_of(p, r->info.uid) >= maps_most(r->info.uid))
		e = -EUSERS;
	own_unlock(p);
	if (e < 0)
		return err_set(err, e, "one process may map at most %u files, one user's processes together %llu", most,
			       (unsigned long long)maps_most(r->info.uid));
	if (known) {
		e = mapping_state(known);
		if (e == 0)
			e = keep_map(known);
		if (e == 0)
			e = state_out(known, ret_state_fd, ret_state_bytes);
		own_lock(p);
		known->busy--;
		(void)pthread_cond_broadcast(&r->changed);
		own_unlock(p);
		return e < 0 ? err_set(err, e, "cannot make the state of a mapping: %s", strerror(-e)) : 0;
	}
	m = mapping_new(r, v, address, atomic_fetch_add(&p->serve->next_id, 1));
	e = m ? mapping_state(m) : -ENOMEM;
	if (e == 0) /* before it is armed: a next daemon must know it to arm it */
		e = keep_map(m);
	if (e < 0) {
		mapping_free(m);
		return err_set(err, e, "cannot note a mapping: %s", strerror(-e));
	}
	own_lock(p);
	e = r->gone ? -ESRCH : remote_add_map(r, m);
	m->busy++; /* so that its remote does not end under us */
	fd = p->mms[r->mm].uffd;
	own_unlock(p);
	if (e < 0) {
		keep_del(p, KEEP_KEY(KEEP_MAP, m->id));
		mapping_free(m);
		return err_set(err, e,
			       e == -EEXIST ? "another mapping of this process lies there already" :
					      "the process is gone, or out of memory");
	}
	e = uffd_register(fd, (void *)(uintptr_t)address, len, false); // NOLINT
	/* One private page gives the view its anon_vma before it is ever split (hazard G), and probes something to ask. */
	if (e == 0) {
		e = uffd_copy(fd, (void *)(uintptr_t)(address + v->bytes), zeros, page_bytes()); // NOLINT
		if (e == -EEXIST)
			e = 0;
	}
	own_lock(p);
	if (e == 0) {
		m->ready = true;
		mapping_want_ready(m);
		deadline_in(&until, OPEN_WAIT_MS);
		while (m->work_lo < m->work_hi && !r->gone &&
		       pthread_cond_timedwait(&r->changed, &p->lock, &until) != ETIMEDOUT)
			;
		e = state_out(m, ret_state_fd, ret_state_bytes);
	}
	m->busy--;
	(void)pthread_cond_broadcast(&r->changed);
	if (e < 0 && linked(m)) /* (its worker may have taken it out meanwhile) */
		remote_del_map(m);
	own_unlock(p);
	return e < 0 ? err_set(err, e, "cannot register the mapping with userfaultfd: %s", strerror(-e)) : 0;
}

int serve_unmap(struct remote *r, uint64_t view, uint64_t address)
{
	struct pager *p = r->pager;
	int e = -ENOENT;

	own_lock(p);
	for (size_t i = 0; i < r->nr_maps; i++)
		if (r->maps[i]->view->serve->id == view && (uintptr_t)r->maps[i]->base == address) {
			remote_del_map(r->maps[i]);
			e = 0;
			break;
		}
	own_unlock(p);
	return e;
}

struct view *remote_view(struct remote *r, uint64_t view)
{
	struct mapping *m;

	own_lock(r->pager);
	m = remote_map(r, view);
	own_unlock(r->pager);
	return m ? m->view : NULL;
}

/* Who has pinned it alone may give it back. */
static bool pinned_by_others(const struct view *v, const struct remote *r)
{
	bool pinned = v->serve->nr_pins > 0;

	for (const struct list *n = v->maps.next; n != &v->maps && !pinned; n = n->next)
		pinned = container_of(n, struct mapping, node)->pinned &&
			 container_of(n, struct mapping, node)->remote != r;
	return pinned;
}

static int mark(struct remote *r, uint64_t view, const struct serve_range *ranges, size_t nr, bool hold, bool drop,
		bool touch)
{
	struct pager *p = r->pager;
	uint64_t now = now_ns(), total = 0;
	struct mapping *m;
	bool pinned;

	own_lock(p);
	m = remote_map(r, view);
	for (size_t i = 0; m && i < nr; i++)
		total += ranges[i].nr;
	/* None twice: the lock is held for as long as there are extents. */
	if (m && total > m->view->nr_ext) {
		own_unlock(p);
		return -EINVAL;
	}
	pinned = m && pinned_by_others(m->view, r);
	for (size_t i = 0; m && i < nr; i++) {
		uint64_t end = MIN((uint64_t)ranges[i].first + ranges[i].nr, m->view->nr_ext);

		for (uint64_t e = ranges[i].first; e < end; e++) {
			struct extent *x;

			if (e % 4096 == 4095) { /* others want the lock, too */
				m->busy++;
				own_unlock(p);
				own_lock(p);
				m->busy--;
				(void)pthread_cond_broadcast(&r->changed);
				if (!linked(m))
					goto out;
			}
			x = view_extent(m->view, e);
			if (hold)
				m->flags[e] |= M_HELD;
			else
				m->flags[e] &= (uint8_t)~M_HELD;
			if (touch && !list_empty(&x->lru))
				ext_lru(x, LRU_ARMED, false);
			if (drop && !pinned && !ext_held(x, false)) {
				m->view->dropped |= x->state == EXT_READY;
				ext_ask_drop(x, now);
			}
		}
	}
out:
	own_unlock(p);
	return m ? 0 : -ENOENT;
}

/* Is something of it still to be dropped? What is being read is dropped when it has come, which from a slow file may be
 * never: not waited for. */
static bool dropping(const struct view *v)
{
	for (size_t i = 0; v->pager->nr_drops && i < v->nr_ext; i++)
		if (v->ext[i].view && v->ext[i].flags & X_DROP &&
		    (v->ext[i].state != EXT_READING || !v->serve->nr_slow))
			return true;
	return false;
}

static int sync_remote(struct remote *r)
{
	uint64_t until = now_ns() + SYNC_MS * 1000000ull;
	bool busy;

	do {
		busy = false;
		own_lock(r->pager);
		for (size_t i = 0; i < r->nr_maps && !busy; i++)
			busy = dropping(r->maps[i]->view);
		own_unlock(r->pager);
		if (busy)
			(void)usleep(500);
	} while (busy && now_ns() < until);
	return busy ? -ETIMEDOUT : 0;
}

int serve_hold(struct remote *r, uint64_t view, enum serve_hold hold, const struct serve_range *ranges, size_t nr)
{
	if (hold == SERVE_HOLD_DROP && !nr)
		return sync_remote(r);
	return mark(r, view, ranges, nr, hold == SERVE_HOLD_ADD, hold == SERVE_HOLD_DROP, hold == SERVE_HOLD_ADD);
}

int serve_touched(struct remote *r, uint64_t view, const struct serve_range *ranges, size_t nr)
{
	return mark(r, view, ranges, nr, true, false, true);
}

void serve_round_done(struct remote *r, uint64_t round)
{
	own_lock(r->pager);
	if (r->round == round) {
		r->round = 0;
		(void)pthread_cond_broadcast(&r->pager->serve->armed);
	}
	own_unlock(r->pager);
}

void serve_stage(struct remote *r, const char *name)
{
	int fd = -1;

	own_lock(r->pager);
	(void)snprintf(r->stage, sizeof(r->stage), "%s", name);
	if (!r->gone)
		fd = fcntl(r->pager->mms[r->mm].uffd, F_DUPFD_CLOEXEC, 3);
	own_unlock(r->pager);
	if (fd >= 0) {
		(void)keep_remote(r, fd);
		(void)close(fd);
	}
}

/* The budget's part that this user may keep from being dropped, less what is pinned already. */
static uint64_t pin_room(struct pager *p, uid_t uid)
{
	unsigned int percent = p->serve->config.pin_percent ? p->serve->config.pin_percent : 50;
	uint64_t most = p->budget / 100 * percent, used = 0;

	for (size_t i = 0; i < p->nr_views; i++) {
		const struct view *v = p->views[i];
		bool his = false;

		for (size_t k = 0; k < v->serve->nr_pins; k++)
			his |= v->serve->pins[k] == uid;
		for (const struct list *n = v->maps.next; n != &v->maps && !his; n = n->next) {
			const struct mapping *m = container_of(n, struct mapping, node);

			his = m->pinned && m->remote->info.uid == uid;
		}
		used += his ? v->bytes : 0;
	}
	return most > used ? most - used : 0;
}

void pin_apply(struct view *v)
{
	bool pinned;

	own_lock(v->pager);
	pinned = v->serve->nr_pins > 0;
	for (const struct list *n = v->maps.next; n != &v->maps && !pinned; n = n->next)
		pinned = container_of(n, struct mapping, node)->pinned;
	own_unlock(v->pager);
	view_set_class(v, pinned ? VIEW_PINNED : VIEW_NORMAL);
}

int serve_class(struct remote *r, uint64_t view, enum view_class class)
{
	struct pager *p = r->pager;
	struct mapping *m;
	struct view *v = NULL;
	int e = 0;

	own_lock(p);
	m = remote_map(r, view);
	if (!m) {
		e = -ENOENT;
	} else if (class == VIEW_PINNED && !m->pinned && m->view->bytes > pin_room(p, r->info.uid)) {
		e = -ENOSPC;
	} else {
		m->pinned = class == VIEW_PINNED;
		if (class == VIEW_UNNEEDED)
			for (size_t i = 0; i < m->view->nr_ext; i++)
				m->flags[i] &= (uint8_t)~M_HELD;
		v = m->view;
		v->nr_refs++;
		m->busy++;
	}
	own_unlock(p);
	if (v) {
		(void)keep_map(m);
		own_lock(p);
		m->busy--;
		(void)pthread_cond_broadcast(&r->changed);
		own_unlock(p);
		pin_apply(v);
		(void)view_unref(v);
	}
	return e;
}

int serve_forbid(struct remote *r, uint64_t view, bool on)
{
	struct pager *p = r->pager;
	struct mapping *m;
	int e = 0;

	own_lock(p);
	m = r->gone ? NULL : remote_map(r, view);
	if (m) {
		m->forbidden = on;
		m->busy++;
		while (m->busy > 1) /* an opening that is under way would come after our arming */
			(void)pthread_cond_wait(&r->changed, &p->lock);
		own_unlock(p);
		(void)keep_map(m);
		/* Every touch shall be seen. What its page tables still have the client has cleared before. */
		if (on)
			e = uffd_register(p->mms[r->mm].uffd, m->base, m->view->bytes, false);
		own_lock(p);
		if (on)
			mapping_closed(m, 0, m->view->nr_ext);
		else
			mapping_want_ready(m);
		m->busy--;
		(void)pthread_cond_broadcast(&r->changed);
	}
	own_unlock(p);
	return m ? e : -ENOENT;
}

int serve_view_stats(struct remote *r, uint64_t view, struct pager_stats *ret)
{
	struct pager *p = r->pager;
	struct mapping *m;

	own_lock(p);
	m = remote_map(r, view);
	if (m) {
		*ret = m->view->stats;
		ret->budget_bytes = p->budget;
		for (size_t i = 0; i < m->view->nr_ext; i++) {
			const struct extent *x = &m->view->ext[i];

			if (!x->view || !(x->flags & X_RESERVED))
				continue;
			ret->resident_bytes += ext_len(x);
			if (x->flags & X_HUGE)
				ret->huge_bytes += ext_len(x);
		}
		ret->peak_bytes = MAX(ret->peak_bytes, ret->resident_bytes);
	}
	own_unlock(p);
	return m ? 0 : -ENOENT;
}

int serve_job(struct pager *p, struct remote *r, const struct job_range *ranges, size_t nr, bool gentle,
	      struct pager_job **ret)
{
	return pager_job_new_for(p, r, ranges, nr, gentle, ret);
}

/* ------------------------------------------------------------------ for the tool */

int serve_list(struct pager *p, uid_t uid, int (*fn)(void *arg, const struct serve_view_info *v), void *arg)
{
	uint64_t seen = 0;

	for (;;) {
		struct serve_view_info info = { 0 };
		struct serve_client_info *clients = NULL;
		struct view *v = NULL;
		size_t nr = 0, room = 0;
		int r;

		/* In order of their numbers: views come and go between two of them. */
		own_lock(p);
		for (size_t i = 0; i < p->nr_views; i++) {
			struct view *it = p->views[i];
			bool visible = uid == 0;

			for (size_t k = 0; k < it->serve->nr_uids && !visible; k++)
				visible = it->serve->uids[k] == uid;
			if (visible && !it->dying && it->serve->id > seen && (!v || it->serve->id < v->serve->id))
				v = it;
		}
		if (!v) {
			own_unlock(p);
			return 0;
		}
		seen = v->serve->id;
		v->nr_refs++;
		for (struct list *n = v->maps.next; n != &v->maps; n = n->next)
			room++;
		clients = calloc(room + 1, sizeof(*clients));
		for (struct list *n = v->maps.next; clients && n != &v->maps; n = n->next) {
			const struct mapping *m = container_of(n, struct mapping, node);
			struct serve_client_info *c = &clients[nr++];

			*c = (struct serve_client_info){ .pid = m->remote->info.pid,
							 .uid = m->remote->info.uid,
							 .child = m->remote->child && !m->remote->claimed,
							 .name = strdup(m->remote->info.name),
							 .stage = strdup(m->remote->stage),
							 .mapped_bytes = v->bytes };
			for (size_t e = 0; e < v->nr_ext; e++)
				if (m->flags[e] & M_HELD && v->ext[e].state == EXT_READY && v->ext[e].view)
					c->held_bytes += ext_len(&v->ext[e]);
		}
		info = (struct serve_view_info){
			.name = v->source->path,
			.id = v->serve->id,
			.dev = v->source->id.dev,
			.ino = v->source->id.ino,
			.size = v->source->id.size,
			.bytes = v->bytes,
			.resident_bytes = v->resident,
			.pinned_bytes = v->class == VIEW_PINNED ? v->resident : 0,
			.read_bytes = v->stats.read_bytes,
			.dropped_bytes = v->stats.dropped_bytes,
			.changed = atomic_load(&v->source->changed),
			.nr_clients = (unsigned int)nr,
			.clients = clients,
			.idle_ns = v->serve->idle_since_ns ? now_ns() - v->serve->idle_since_ns : 0,
		};
		for (size_t e = 0; e < v->nr_ext; e++)
			if (v->ext[e].view && v->ext[e].flags & X_HUGE && v->ext[e].flags & X_RESERVED)
				info.huge_bytes += ext_len(&v->ext[e]);
		own_unlock(p);
		r = clients ? fn(arg, &info) : -ENOMEM;
		for (size_t i = 0; i < nr; i++) {
			free((char *)(uintptr_t)clients[i].name);
			free((char *)(uintptr_t)clients[i].stage);
		}
		free(clients);
		(void)view_unref(v);
		if (r)
			return r;
	}
}

static const char *const numa_names[] = { "default", "interleave", "local", "node" };

void serve_counts(struct pager *p, struct serve_counts *ret)
{
	uint64_t huge = 0, pinned = 0, maps = 0, clients = 0, children = 0;

	own_lock(p);
	*ret = p->serve->counts;
	ret->stats = p->stats;
	for (size_t i = 0; i < p->nr_views; i++) {
		const struct view *v = p->views[i];

		pinned += v->class == VIEW_PINNED ? v->resident : 0;
		for (size_t e = 0; e < v->nr_ext; e++)
			if (v->ext[e].view && v->ext[e].flags & X_HUGE && v->ext[e].flags & X_RESERVED)
				huge += ext_len(&v->ext[e]);
	}
	for (int i = 1; i < p->nr_mms; i++) {
		const struct remote *r = p->mms[i].remote;

		if (!r || r->gone)
			continue;
		maps += r->nr_maps;
		clients += !r->child || r->claimed;
		children += r->child && !r->claimed;
	}
	ret->stats.budget_bytes = p->budget;
	ret->stats.resident_bytes = p->resident;
	ret->stats.peak_bytes = MAX(p->peak, p->resident);
	ret->stats.huge_bytes = huge;
	ret->clients = clients;
	ret->children = children;
	ret->views = p->nr_views;
	ret->mappings = maps;
	ret->pinned_bytes = pinned;
	ret->arena = p->fs.mount_fd >= 0 ? "tmpfs" : "memfd";
	ret->numa = p->serve->mpol[0] ? p->serve->mpol : numa_names[SERVE_NUMA_DEFAULT];
	if (clients + children)
		ret->last_used_ns = now_ns();
	own_unlock(p);
}

static bool may_decide(const struct view *v, uid_t uid)
{
	if (uid == 0 || uid == geteuid())
		return true;
	for (const struct list *n = v->maps.next; n != &v->maps; n = n->next)
		if (container_of(n, struct mapping, node)->remote->info.uid != uid)
			return false;
	for (size_t i = 0; i < v->serve->nr_uids; i++)
		if (v->serve->uids[i] == uid)
			return true;
	return false;
}

int serve_drop(struct pager *p, const struct source_id *id, uint64_t bytes, bool force, uid_t uid, int timeout_ms,
	       uint64_t *ret_dropped_bytes, struct wd_err *err)
{
	uint64_t now = now_ns(), before, until;
	bool any = false, denied = false;

	own_lock(p);
	before = p->stats.dropped_bytes;
	if (bytes) {
		if (uid != 0 && uid != geteuid()) {
			own_unlock(p);
			return err_set(err, -EPERM, "only root and the daemon's user may drop what others use");
		}
		uint64_t got = 0;

		for (int spare = SPARE_HELD; spare <= SPARE_NONE && got < bytes; spare++)
			got += take_oldest(p, bytes - got, (enum spare)spare, now);
		any = true;
	}
	for (size_t i = 0; i < p->nr_views && !bytes; i++) {
		struct view *v = p->views[i];

		if (v->dying || (id && !same_file(&v->source->id, id)))
			continue;
		if (!may_decide(v, uid)) {
			denied = true;
			continue;
		}
		any = true;
		if (v->class == VIEW_PINNED && !force) {
			if (id) {
				(void)err_set(err, -EBUSY, "%s is pinned: unpin it, or use --force", v->source->path);
				own_unlock(p);
				return -EBUSY;
			}
			continue;
		}
		for (size_t e = 0; e < v->nr_ext; e++)
			if (v->ext[e].view && !pinned_by_user_only(&v->ext[e]))
				ext_ask_drop(&v->ext[e], now);
	}
	own_unlock(p);
	if (!any && denied)
		return err_set(err, -EPERM,
			       "only root, the daemon's user, and a user whose processes alone have it may drop it");
	if (!any && id)
		return err_set(err, -ENOENT, "the daemon does not have this file");
	until = now + (uint64_t)MAX(timeout_ms, 0) * 1000000;
	do {
		any = false;
		own_lock(p);
		for (size_t i = 0; i < p->nr_views && !any; i++)
			any = (!id || same_file(&p->views[i]->source->id, id)) && dropping(p->views[i]);
		own_unlock(p);
		if (any)
			(void)usleep(200);
	} while (any && now_ns() < until);
	own_lock(p);
	*ret_dropped_bytes = p->stats.dropped_bytes - before;
	own_unlock(p);
	return 0;
}

int serve_pin(struct pager *p, const struct source_id *id, bool pin, uid_t uid, struct wd_err *err)
{
	struct view *v = NULL;
	uint64_t room;
	int r = 0;

	own_lock(p);
	for (size_t i = 0; i < p->nr_views && !v; i++)
		if (!p->views[i]->dying && same_file(&p->views[i]->source->id, id) &&
		    !atomic_load(&p->views[i]->source->changed))
			v = p->views[i];
	if (v) {
		struct serve_view *s = v->serve;
		size_t at = 0;

		v->nr_refs++;
		room = pin_room(p, uid);
		while (at < s->nr_pins && s->pins[at] != uid)
			at++;
		if (!may_decide(v, uid)) {
			r = -EPERM;
		} else if (pin && at == s->nr_pins) {
			uid_t *more = NULL;

			if (v->bytes > room)
				r = -ENOSPC;
			else if (!(more = realloc(s->pins, (s->nr_pins + 1) * sizeof(*more))))
				r = -ENOMEM;
			if (more) {
				s->pins = more;
				s->pins[s->nr_pins++] = uid;
			}
		} else if (!pin && at < s->nr_pins) {
			s->pins[at] = s->pins[--s->nr_pins];
		} else if (!pin && s->nr_pins && (uid == 0 || uid == geteuid())) {
			s->nr_pins = 0; /* the daemon's user may unpin others' */
		} else if (!pin) {
			r = -ENOENT;
		}
	}
	own_unlock(p);
	if (!v)
		return err_set(err, -ENOENT, "the daemon does not have this file; weightd prefetch brings it in");
	pin_apply(v);
	(void)keep_view(v);
	if (r == -ENOSPC)
		(void)err_set(err, r,
			      "%s: pinning its %llu MiB would pass user %u's part of the budget (%llu MiB left)",
			      v->source->path, (unsigned long long)(v->bytes / MiB), (unsigned int)uid,
			      (unsigned long long)(room / MiB));
	else if (r < 0)
		(void)err_set(err, r, "%s: %s", v->source->path,
			      r == -ENOENT ? "is not pinned" :
			      r == -EPERM  ? "others use it: only root and the daemon's user may pin it" :
					     "out of memory");
	(void)view_unref(v);
	return r;
}

/* ------------------------------------------------------------------ a daemon's beginning and end */

static int make(const struct serve_config *config, const struct arena_fs *fs, struct pager **ret, struct wd_err *err)
{
	struct serve *s = calloc(1, sizeof(*s));
	struct pager_config c = { .way = WAY_SERVE, .budget_bytes = config->budget_bytes, .serve = s, .fs = fs };
	pthread_condattr_t attr;
	int r;

	if (!s)
		return err_set(err, -ENOMEM, "cannot start a pager: out of memory");
	s->config = *config;
	s->next_id = 1;
	if (config->numa == SERVE_NUMA_INTERLEAVE)
		(void)snprintf(s->mpol, sizeof(s->mpol), "interleave");
	else if (config->numa == SERVE_NUMA_LOCAL)
		(void)snprintf(s->mpol, sizeof(s->mpol), "local");
	else if (config->numa == SERVE_NUMA_NODE)
		(void)snprintf(s->mpol, sizeof(s->mpol), "bind:%u", config->numa_node);
	list_init(&s->hungry);
	(void)pthread_mutex_init(&s->attach, NULL);
	(void)pthread_mutex_init(&s->keep, NULL);
	(void)pthread_condattr_init(&attr);
	(void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	(void)pthread_cond_init(&s->armed, &attr);
	(void)pthread_condattr_destroy(&attr);
	s->counts.last_used_ns = now_ns();
	r = pager_new(&c, &s->pager, err);
	if (r < 0) {
		free(s);
		return r;
	}
	*ret = s->pager;
	return 0;
}

static int run(struct pager *p, struct wd_err *err)
{
	p->serve->running = true;
	return pager_run(p, err);
}

/* What the keeper cannot take any more is served without it: the daemon has said so. */
int keep_put(struct pager *p, uint64_t key, const void *blob, size_t nbytes, const int *fds, unsigned int nr_fds)
{
	struct serve *s = p->serve;
	int r;

	if (!s->config.keeper || s->keeper_lost)
		return 0;
	r = keeper_put(s->config.keeper, key, blob, nbytes, fds, nr_fds);
	if (r == -EPIPE || r == -ECONNRESET || r == -ETIMEDOUT) {
		s->keeper_lost = true;
		log_error("the keeper does not answer: what is opened from now on does not outlive this daemon");
		return 0;
	}
	return r;
}

void keep_del(struct pager *p, uint64_t key)
{
	if (p->serve->config.keeper && !p->serve->keeper_lost)
		(void)keeper_del(p->serve->config.keeper, key);
}

static int keep_fs(struct pager *p, struct wd_err *err)
{
	int fds[] = { p->fs.mount_fd, p->fs.ro_fd }, r;

	if (p->fs.mount_fd < 0)
		return 0;
	r = keep_put(p, KEEP_KEY(KEEP_FS, 0), &p->fs.noswap, sizeof(p->fs.noswap), fds, p->fs.ro_fd >= 0 ? 2 : 1);
	return r < 0 ? err_set(err, r, "cannot hand the arenas' file system to the keeper: %s", strerror(-r)) : 0;
}

int serve_new(const struct serve_config *config, struct pager **ret, struct wd_err *err)
{
	struct pager *p;
	int r = make(config, NULL, &p, err);

	if (r < 0)
		return r;
	r = keep_fs(p, err);
	if (r < 0)
		return r;
	r = run(p, err);
	if (r < 0)
		return r;
	*ret = p;
	return 0;
}

struct kept {
	uint64_t key;
	size_t nbytes;
	int fds[KEEPER_FDS];
	unsigned int nr_fds;
	_Alignas(8) unsigned char blob[];
};

struct kept_all {
	struct kept **all;
	size_t nr;
};

static int collect(void *arg, uint64_t key, const void *blob, size_t nbytes, int fds[static KEEPER_FDS],
		   unsigned int nr_fds)
{
	struct kept_all *a = arg;
	struct kept *k = malloc(sizeof(*k) + nbytes), **all = realloc(a->all, (a->nr + 1) * sizeof(*all));

	if (all)
		a->all = all;
	if (!k || !all) {
		free(k);
		for (unsigned int i = 0; i < nr_fds; i++)
			(void)close(fds[i]);
		return -ENOMEM;
	}
	k->key = key;
	k->nbytes = nbytes;
	k->nr_fds = nr_fds;
	memcpy(k->fds, fds, sizeof(k->fds));
	memcpy(k->blob, blob, nbytes);
	a->all[a->nr++] = k;
	return 0;
}

static struct kept *kept_find(const struct kept_all *a, uint64_t key)
{
	for (size_t i = 0; i < a->nr; i++)
		if (a->all[i]->key == key)
			return a->all[i];
	return NULL;
}

static int kept_fd(struct kept *k, unsigned int i)
{
	return k && i < k->nr_fds ? TAKE_FD(k->fds[i]) : -1;
}

/* The table tells what is READY; everything else waits until it is armed everywhere and punched. */
static int adopt_view(struct pager *p, const struct kept_all *all, struct kept *k)
{
	const struct keep_view *blob = (const void *)k->blob;
	struct kept *ro = kept_find(all, KEEP_KEY(KEEP_RO, KEEP_ID(k->key)));
	struct wd_err err = { .text = "" };
	struct view_layout layout;
	struct source *src = NULL;
	struct serve_view *s;
	struct view *v = NULL;
	struct stat st;
	struct table *t;
	uint64_t max_id;
	int r;

	if (k->nbytes != sizeof(*blob) || k->nr_fds < 3 || !ro || ro->nr_fds < 2 || fstat(k->fds[1], &st) < 0 ||
	    (uint64_t)st.st_size < sizeof(*t))
		return -EPROTO;
	t = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, k->fds[1], 0);
	if (t == MAP_FAILED)
		return -errno;
	if (t->magic != TABLE_MAGIC || t->version != TABLE_VERSION || t->extent_bytes != extent_bytes() ||
	    t->bytes != blob->bytes || (uint64_t)st.st_size != table_bytes(t->nr_segs, t->nr_units, t->nr_ext)) {
		(void)munmap(t, (size_t)st.st_size);
		return -EPROTO;
	}
	layout = (struct view_layout){ t->segs, t->nr_segs, table_units(t), t->nr_units };
	r = source_adopt(kept_fd(k, 2), kept_fd(k, 3), blob->name, &blob->source, &src);
	if (r == 0) {
		v = view_new(p, src, &layout, blob->bytes);
		r = v ? serve_view_new(v, blob->id) : -ENOMEM;
	}
	(void)source_unref(src);
	if (r == 0)
		r = arena_adopt(&p->fs, blob->bytes, kept_fd(k, 0), kept_fd(ro, 0), &v->arena);
	if (r < 0) {
		(void)munmap(t, (size_t)st.st_size);
		view_free(v);
		return r;
	}
	s = v->serve;
	s->table = t;
	s->table_bytes = (uint64_t)st.st_size;
	s->table_fd = kept_fd(k, 1);
	s->table_ro_fd = kept_fd(ro, 1);
	for (uint32_t i = 0; i < MIN(blob->nr_uids, (uint32_t)ARRAY_SIZE(blob->uids)); i++)
		(void)may_see(v, blob->uids[i]);
	if (blob->nr_pins && blob->nr_pins <= ARRAY_SIZE(blob->pins)) {
		s->pins = malloc(blob->nr_pins * sizeof(*s->pins));
		if (s->pins) {
			s->nr_pins = blob->nr_pins;
			memcpy(s->pins, blob->pins, s->nr_pins * sizeof(*s->pins));
			v->class = VIEW_PINNED;
		}
	}
	view_map_source(v);
	for (size_t i = 0; i < v->nr_ext; i++) {
		struct extent *x = view_extent(v, i);

		if (atomic_load(&table_ext(t)[i].state) == EXT_READY) {
			x->state = EXT_READY;
			x->flags |= X_RESERVED | X_LOADED | (table_ext(t)[i].huge ? X_HUGE : 0);
			p->resident += ext_len(x);
			v->resident += ext_len(x);
		} else {
			x->flags |= X_TAKING;
		}
	}
	p->peak = MAX(p->peak, p->resident);
	v->stats.peak_bytes = v->resident;
	r = view_publish(v, &err);
	if (r < 0)
		return r;
	own_lock(p);
	for (size_t i = 0; i < v->nr_ext; i++)
		if (v->ext[i].state == EXT_READY)
			ext_lru(&v->ext[i], LRU_ARMED, false);
	own_unlock(p);
	s->suspect = true;
	p->serve->nr_suspect++;
	max_id = MAX(atomic_load(&p->serve->next_id), blob->id + 1);
	atomic_store(&p->serve->next_id, max_id);
	return serve_slow_start(v); /* the one reference is ours */
}

/*
 * Arms everything of an adopted view everywhere; then what was not READY is a hole, and faults that the daemon before us
 * had read are told again. Return: whether that is done. The coordinator's; the lock is held; `busy` too.
 */
static bool adopt_unfinished(struct pager *p, struct view *v)
{
	bool good = true;

	for (size_t first = 0; first < v->nr_ext; first += 512) {
		struct run part = { v, first, MIN(v->nr_ext - first, (size_t)512) };

		own_unlock(p);
		good = serve_arm(p, &part, now_ns() + PROBE_DEADLINE_NS);
		own_lock(p);
		if (!good) /* asked again; nobody else waits for who holds its memory: what was not READY was armed before */
			break;
	}
	for (size_t i = 0; i < v->nr_ext; i++) {
		struct extent *x = &v->ext[i];

		x->flags &= ~X_STUCK;
		if (!(x->flags & X_TAKING))
			continue; /* READY; or done before, and being read by now */
		own_unlock(p);
		(void)arena_punch(&v->arena, ext_off(x), ext_len(x));
		own_lock(p);
		ext_state(x, EXT_EMPTY);
		x->flags &= ~X_TAKING;
		ext_settle(x);
	}
	for (struct list *n = v->maps.next; n != &v->maps; n = n->next) {
		struct mapping *m = container_of(n, struct mapping, node);

		if (!m->remote->gone)
			(void)uffd_wake(p->mms[m->remote->mm].uffd, m->base, v->bytes);
	}
	return good;
}

/* Who held what is not kept: all of it is held until a mark or a round says otherwise. The lock is held. */
static void hold_all(struct pager *p)
{
	for (int i = 1; i < p->nr_mms; i++) {
		const struct remote *r = p->mms[i].remote;

		for (size_t k = 0; r && k < r->nr_maps; k++)
			for (size_t e = 0; e < r->maps[k]->view->nr_ext; e++)
				if (r->maps[k]->view->ext[e].state == EXT_READY)
					r->maps[k]->flags[e] |= M_HELD;
	}
}

int serve_adopt(const struct serve_config *config, serve_session_fn session, void *arg, struct pager **ret,
		struct wd_err *err)
{
	struct kept_all all = { 0 };
	struct arena_fs fs = { .mount_fd = -1, .ro_fd = -1, .shared = true };
	struct kept *k;
	struct pager *p = NULL;
	int r = keeper_list(config->keeper, collect, &all);

	if (r < 0)
		return err_set(err, r, "cannot take over from the keeper: %s", strerror(-r));
	k = kept_find(&all, KEEP_KEY(KEEP_FS, 0));
	if (k) {
		fs.mount_fd = kept_fd(k, 0);
		fs.ro_fd = kept_fd(k, 1);
		fs.noswap = k->nbytes == sizeof(bool) && k->blob[0];
	}
	r = make(config, &fs, &p, err);
	if (r == 0 && !k)
		r = keep_fs(p, err);
	for (size_t i = 0; i < all.nr && r == 0; i++) {
		uint64_t id = KEEP_ID(all.all[i]->key);

		if (id >= atomic_load(&p->serve->next_id))
			atomic_store(&p->serve->next_id, id + 1);
	}
	for (size_t i = 0; i < all.nr && r == 0; i++) {
		int e;

		k = all.all[i];
		if (KEEP_KIND(k->key) == KEEP_VIEW) {
			e = adopt_view(p, &all, k);
			if (e < 0)
				log_error("a source could not be taken over: %s", strerror(-e));
		}
	}
	for (size_t i = 0; i < all.nr && r == 0; i++) {
		struct remote *m = NULL;
		uint32_t nr;
		int fd;

		k = all.all[i];
		if (KEEP_KIND(k->key) != KEEP_MM || !k->nr_fds)
			continue;
		fd = kept_fd(k, 0);
		if (remote_adopt(p, k->blob, k->nbytes, &m, &nr) < 0 || remote_enter(m, fd) < 0)
			log_error("a client could not be taken over");
		else
			m->kept_maps = nr;
	}
	for (size_t i = 0; i < all.nr && r == 0; i++) {
		k = all.all[i];
		if (KEEP_KIND(k->key) == KEEP_MAP) {
			int fd = kept_fd(k, 0);

			if (mapping_adopt(p, k->blob, k->nbytes, fd) < 0) {
				if (fd >= 0)
					(void)close(fd);
				keep_del(p, k->key);
			}
		}
	}
	if (r == 0) {
		own_lock(p);
		/* Before a worker looks: one that has neither a session nor a mapping is gone. */
		for (size_t i = 0; i < all.nr; i++)
			for (int j = 1;
			     KEEP_KIND(all.all[i]->key) == KEEP_SESSION && all.all[i]->nr_fds == 2 && j < p->nr_mms;
			     j++)
				if (p->mms[j].remote && p->mms[j].remote->id == KEEP_ID(all.all[i]->key))
					p->mms[j].remote->hup = false;
		for (int i = 1; i < p->nr_mms; i++)
			if (p->mms[i].remote && p->mms[i].remote->child)
				remote_inherit(p->mms[i].remote, p->mms[i].remote->kept_maps);
		p->serve->running = true;
		for (int i = 1; i < p->nr_mms; i++)
			if (p->mms[i].remote) {
				p->mms[i].remote->worker_missing = true;
				remote_tend(p->mms[i].remote);
			}
		own_unlock(p);
		for (int i = 1; i < p->nr_mms; i++)
			if (p->mms[i].remote && p->mms[i].remote->child)
				keep_maps(p->mms[i].remote);
		for (size_t i = 0; i < p->nr_views; i++)
			pin_apply(p->views[i]);
		own_lock(p);
		hold_all(p);
		own_unlock(p);
		r = pager_run(p, err); /* the reader: forks in flight are over only when their event is read */
	}
	if (r == 0) {
		struct timespec until;

		/* The coordinator arms all of it. A client that holds it up is not waited for. */
		deadline_in(&until, ADOPT_WAIT_MS);
		own_lock(p);
		while (p->serve->nr_suspect && pthread_cond_timedwait(&p->changed, &p->lock, &until) != ETIMEDOUT)
			;
		own_unlock(p);
		for (size_t i = 0; i < all.nr; i++) {
			struct remote *m = NULL;
			bool abandoned = false;

			k = all.all[i];
			if (KEEP_KIND(k->key) != KEEP_SESSION || k->nr_fds < 2)
				continue;
			own_lock(p);
			for (int j = 1; j < p->nr_mms; j++)
				if (p->mms[j].remote && p->mms[j].remote->id == KEEP_ID(k->key) &&
				    !p->mms[j].remote->gone)
					m = p->mms[j].remote;
			if (m && m->abandoned) {
				log_error(
					"process %d: a file of its could not be taken over: it goes on with mapped files",
					(int)m->info.pid);
				while (m->nr_maps) /* nothing of its is touched any more */
					remote_del_map(m->maps[0]);
				m->hup = true;
				m = NULL;
				abandoned = true;
			}
			if (m) {
				m->nr_refs++;
				m->hup = false;
			}
			own_unlock(p);
			if (abandoned)
				keep_del(p, k->key); /* the last to hold its sockets */
			if (m) {
				int control = kept_fd(k, 0);

				session(arg, m, control, kept_fd(k, 1));
			}
		}
		*ret = p;
	}
	for (size_t i = 0; i < all.nr; i++) {
		/* A file's descriptors stay: closing one may wait for its server. */
		for (unsigned int f = 0; KEEP_KIND(all.all[i]->key) != KEEP_VIEW && f < all.all[i]->nr_fds; f++)
			if (all.all[i]->fds[f] >= 0)
				(void)close(all.all[i]->fds[f]);
		free(all.all[i]);
	}
	free(all.all);
	return r;
}

int serve_let_go(struct pager *p)
{
	uint64_t until = now_ns() + 2000000000;
	bool busy = true;

	own_lock(p);
	p->serve->let_go = true; /* nothing new is begun */
	for (int i = 1; i < p->nr_mms; i++)
		if (p->mms[i].remote) {
			(void)pthread_cond_broadcast(&p->mms[i].remote->work);
			(void)pthread_cond_broadcast(&p->mms[i].remote->express);
		}
	(void)pthread_cond_broadcast(&p->work);
	pager_wake_reader(p);
	/* Reads in flight: a next daemon punches what they were for, but bytes that land later would land there. */
	while (busy && now_ns() < until) {
		busy = p->nr_fills > 0;
		own_unlock(p);
		(void)usleep(1000);
		own_lock(p);
	}
	__atomic_store_n(&p->stop, true, __ATOMIC_RELAXED);
	pager_wake_reader(p);
	own_unlock(p);
	return busy ? -ETIMEDOUT : 0;
}
