/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Populate: the reader walks a job's extents, starts what is missing and counts what has come. Jobs come last, after
 * touches and what is read beside them.
 */
#include "ufd/internal.h"

#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>

#include "ufd/client.h"

void job_end(struct pager_job *j, int state)
{
	uint64_t one = 1;
	int running = 0;

	if (atomic_compare_exchange_strong(&j->state, &running, state))
		(void)!write(j->event_fd, &one, sizeof(one));
}

/* What was asked for has come (or failed): moves the tail on. */
static void job_settle(struct pager_job *j)
{
	while (j->tail_range < j->nr_ranges) {
		struct view *v = j->ranges[j->tail_range].view;
		size_t end = (j->ranges[j->tail_range].off + j->ranges[j->tail_range].len) / extent_bytes();
		struct extent *x;

		if (j->tail_range == j->range && j->tail == j->next)
			return;
		if (j->tail == end) {
			j->tail_range++;
			if (j->tail_range < j->nr_ranges)
				j->tail = j->ranges[j->tail_range].off / extent_bytes();
			continue;
		}
		x = view_extent(v, j->tail);
		if (x->state == EXT_READING ||
		    (x->state == EXT_READY && x->flags & X_WANT && !(x->flags & (X_OPEN | X_DROP))))
			return;
		if (x->state == EXT_FAILED) {
			job_end(j, x->code == FAULT_CHANGED || x->code == FAULT_SHRANK ? -ESTALE :
				   x->error                                            ? x->error :
											 -EIO);
			return;
		}
		/* READY and open; or EMPTY: was in memory and has been dropped again by somebody. */
		(void)atomic_fetch_add(&j->done_bytes, ext_len(x));
		j->tail++;
	}
	job_end(j, 1);
}

static struct extent *job_extent(struct pager_job *j)
{
	while (j->range < j->nr_ranges) {
		struct job_range *r = &j->ranges[j->range];

		if (j->next < (r->off + r->len) / extent_bytes())
			return view_extent(r->view, j->next);
		if (++j->range < j->nr_ranges)
			j->next = j->ranges[j->range].off / extent_bytes();
	}
	return NULL;
}

/* One step of one job. Returns true if a read was started. */
static bool job_step(struct pager *p, struct pager_job *j)
{
	struct extent *x;

	if (j->cancelled)
		job_end(j, -ECANCELED);
	while (atomic_load(&j->state) == 0 && (x = job_extent(j))) {
		if (x->view->forbidden) {
			job_end(j, -EACCES);
			break;
		}
		if (j->remote)
			serve_job_want(j->remote, x);
		switch (x->state) {
		case EXT_READY:
			if (!(x->flags & X_OPEN)) {
				x->flags |= X_WANT;
				ext_settle(x);
			}
			j->next++;
			continue;
		case EXT_READING:
			x->flags |= X_WANT;
			j->next++;
			continue;
		case EXT_FAILED:
			/* Asked for by name: it is tried again, unless the file itself is another one now. */
			if (atomic_load(&x->view->source->changed)) {
				job_end(j, -ESTALE);
				continue;
			}
			ext_state(x, EXT_EMPTY);
			break;
		default:
			break;
		}
		if (j->started_bytes + ext_len(x) > __atomic_load_n(&p->budget, __ATOMIC_RELAXED)) {
			job_end(j, -ENOSPC); /* it would push out what it has read itself */
			break;
		}
		if (x->flags & X_TAKING || (p->serve && serve_slow_full(x->view)))
			break;
		x->flags |= X_WANT;
		if (fill_start(p, x, j->gentle ? FILL_GENTLE : FILL_AHEAD)) {
			j->started_bytes += ext_len(x);
			j->next++;
			return true;
		}
		if (list_empty(&x->queue))
			x->flags &= ~X_WANT;
		if (p->evict_failed & (j->gentle ? EVICT_GENTLE | EVICT_ANY : EVICT_ANY) &&
		    p->resident + ext_len(x) > __atomic_load_n(&p->budget, __ATOMIC_RELAXED))
			job_end(j, -ENOSPC);
		break;
	}
	if (atomic_load(&j->state) == 0)
		job_settle(j);
	return false;
}

bool job_pump(struct pager *p)
{
	for (struct list *n = p->jobs.next, *next; n != &p->jobs; n = next) {
		struct pager_job *j = container_of(n, struct pager_job, node);

		next = n->next;
		if (job_step(p, j))
			return true;
		if (atomic_load(&j->state) != 0)
			list_del(&j->node);
	}
	return false;
}

int job_thread(struct pager_job *j, void *(*main)(void *job))
{
	sigset_t all, saved;
	int r;

	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &saved);
	r = pthread_create(&j->thread, NULL, main, j);
	(void)pthread_sigmask(SIG_SETMASK, &saved, NULL);
	j->threaded = r == 0;
	return -r;
}

int pager_job_new(struct pager *p, const struct job_range *ranges, size_t nr, bool gentle, struct pager_job **ret)
{
	return pager_job_new_for(p, NULL, ranges, nr, gentle, ret);
}

int pager_job_new_for(struct pager *p, struct remote *r_for, const struct job_range *ranges, size_t nr, bool gentle,
		      struct pager_job **ret)
{
	struct pager_job *j = calloc(1, sizeof(*j));
	sigset_t saved;
	int r;

	if (!j)
		return -ENOMEM;
	list_init(&j->node);
	j->ranges = calloc(nr + 1, sizeof(*j->ranges));
	j->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (!j->ranges || j->event_fd < 0) {
		r = j->ranges ? -errno : -ENOMEM;
		free(j->ranges);
		if (j->event_fd >= 0)
			(void)close(j->event_fd);
		free(j);
		return r;
	}
	j->gentle = gentle;
	j->remote = r_for;
	j->pid = getpid();
	for (size_t i = 0; i < nr; i++) {
		struct view *v = ranges[i].view;
		uint64_t first = round_down(ranges[i].off, extent_bytes());
		uint64_t end = round_up(ranges[i].off + ranges[i].len, extent_bytes());

		if (!ranges[i].len)
			continue;
		j->ranges[j->nr_ranges++] = (struct job_range){ v, first, end - first };
		j->total_bytes += MIN(end, v->bytes) - first;
	}
	j->pager = pager_ref(p);
	pager_lock(p, &saved);
	for (size_t i = 0; i < j->nr_ranges; i++)
		j->ranges[i].view->nr_refs++;
	if (j->nr_ranges)
		j->next = j->tail = j->ranges[0].off / extent_bytes();
	pager_unlock(p, &saved);
	for (size_t i = 0; i < nr; i++) /* releasing a neighbour keeps them */
		view_mark_used(ranges[i].view, ranges[i].off, ranges[i].len);
	if (!j->nr_ranges) {
		job_end(j, 1);
	} else if (pager_way(p) == WAY_MMAP || p->client) {
		r = p->client ? client_job_start(j) : job_thread(j, mmap_job_main);
		if (r < 0) {
			job_end(j, r);
			(void)pager_job_free(j);
			return r;
		}
	} else {
		pager_lock(p, &saved);
		list_add_tail(&p->jobs, &j->node);
		pager_wake_reader(p);
		pager_unlock(p, &saved);
	}
	*ret = j;
	return 0;
}

static int job_state(const struct pager_job *j)
{
	int state = atomic_load(&j->state);

	return state == 0 && getpid() != j->pid ? -ECANCELED : state;
}

int pager_job_fd(const struct pager_job *j)
{
	return j->event_fd;
}

void pager_job_progress(const struct pager_job *j, uint64_t *ret_done_bytes, uint64_t *ret_total_bytes, int *ret_state)
{
	*ret_state = job_state(j);
	*ret_done_bytes = atomic_load(&j->done_bytes);
	*ret_total_bytes = j->total_bytes;
}

int pager_job_wait(struct pager_job *j, int timeout_ms)
{
	struct pollfd pfd = { .fd = j->event_fd, .events = POLLIN };
	uint64_t until = now_ns() + (uint64_t)MAX(timeout_ms, 0) * 1000000;

	while (job_state(j) == 0) {
		uint64_t now = now_ns();
		int left = timeout_ms < 0 ? -1 : now >= until ? 0 : (int)((until - now + 999999) / 1000000);

		if (poll(&pfd, 1, left) == 0 && job_state(j) == 0)
			return -ETIMEDOUT;
	}
	return job_state(j) == 1 ? 0 : job_state(j);
}

void pager_job_cancel(struct pager_job *j)
{
	sigset_t saved;

	if (!j)
		return;
	pager_lock(j->pager, &saved);
	j->cancelled = true;
	if (j->threaded || j->pager->forked || atomic_load(&j->state) != 0) {
		/* a thread of its own looks at the flag */
	} else {
		list_del(&j->node);
		job_end(j, -ECANCELED);
	}
	pager_unlock(j->pager, &saved);
	if (j->pager->client && getpid() == j->pid)
		client_job_cancel(j);
}

struct pager_job *pager_job_free(struct pager_job *j)
{
	sigset_t saved;

	if (!j)
		return NULL;
	pager_job_cancel(j);
	if (j->threaded && getpid() == j->pid)
		(void)pthread_join(j->thread, NULL);
	pager_lock(j->pager, &saved);
	list_del(&j->node);
	pager_unlock(j->pager, &saved);
	for (size_t i = 0; i < j->nr_ranges; i++)
		(void)view_unref(j->ranges[i].view);
	(void)close(j->event_fd);
	(void)pager_unref(j->pager);
	free(j->ranges);
	free(j);
	return NULL;
}
