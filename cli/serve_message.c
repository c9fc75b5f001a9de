/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the messages of a control socket do: each is checked (wire_check() has seen to its shape), handed to the engine,
 * and answered. Knows the protocol and the engine; knows nothing of how connections come and go.
 *
 * Threads: the one of the session. What it waits for, it waits for alone: a file's server, a client's mmap_lock.
 *
 * Invariant: between a message that is taken off a control socket and its answer the daemon may die; the next one then
 * says RESUME, and the client asks again. So no message may do harm when it comes twice.
 */
#include "cli/serve_message.h"

#include <signal.h>
#include <string.h>

#include "cli/serve_report.h"
#include "lib/base/log.h"
#include "ufd/arena.h"
#include "ufd/page.h"

#define MAX_JOBS 1024 /* of one client at once */
#define DROP_MS 30000
/* No arena ends above this: sums of what a client sends cannot pass 2^64. */
#define MAX_ARENA_BYTES (1ull << 46)

struct answer {
	union {
		struct wire_head h;
		struct wire_plain plain;
		struct wire_welcome welcome;
		struct wire_error error;
		struct wire_attached attached;
		struct wire_mapped mapped;
		struct wire_job_info job_info;
		struct wire_stats stats;
	} m;
	int fds[WIRE_MAX_FDS]; /* borrowed */
	unsigned int nr_fds;
	int own_fd; /* closed when sent */
};

#define ANSWER(a, c, member, t) WIRE_INIT((a)->m.member, t, (c)->message.h.seq)

/* The kind of descriptor that a peer has passed, without asking the thing itself. */
static bool fd_is(int fd, const char *what)
{
	char self[32], is[64];
	ssize_t n;

	(void)snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
	n = readlink(self, is, sizeof(is) - 1);
	if (n < 0)
		return false;
	is[n] = '\0';
	return strcmp(is, what) == 0;
}

static struct attached *attached_find(const struct session *c, uint64_t id)
{
	for (size_t i = 0; i < c->nr_views; i++)
		if (c->views[i].id == id)
			return &c->views[i];
	return NULL;
}

/* What this client may use: it has attached it, or has it mapped. Borrowed. */
static struct view *view_of(const struct session *c, uint64_t id, struct wd_err *err)
{
	struct attached *a = attached_find(c, id);
	struct view *v = a ? a->view : c->remote ? remote_view(c->remote, id) : NULL;

	if (!v)
		err_set(err, -ENOENT, "view %ju was not attached here", (uintmax_t)id);
	return v;
}

/* Room for one more in a growing array. */
static int room_for(void **array, size_t nr, size_t *room, size_t size)
{
	void *grown;

	if (nr < *room)
		return 0;
	grown = realloc(*array, MAX(*room * 2, (size_t)8) * size);
	if (!grown)
		return -ENOMEM;
	*array = grown;
	*room = MAX(*room * 2, (size_t)8);
	return 0;
}

static int need_remote(const struct session *c, struct wd_err *err)
{
	if (!c->remote)
		return err_set(err, -EPROTO, "this client has passed no userfaultfd");
	return 0;
}

static int need_none(const struct session *c, struct wd_err *err)
{
	if (c->remote)
		return err_set(err, -EALREADY, "this client has passed its userfaultfd already");
	return 0;
}

static struct remote_info info_of(const struct session *c)
{
	struct remote_info info = { .pid = c->pid, .uid = c->uid };

	(void)memcpy(info.name, c->name, sizeof(info.name));
	return info;
}

/* The session has an address space from now on. */
static void set_remote(struct session *c, struct remote *r, struct answer *a)
{
	int kept;

	(void)pthread_mutex_lock(&c->server->lock);
	c->remote = r;
	remote_set_session(r, c);
	(void)pthread_mutex_unlock(&c->server->lock);
	kept = remote_keep_session(r, c->control_fd, c->notify_fd);
	if (kept < 0)
		log_error("client %s (pid %d): its connection is not kept through a restart of the daemon: %s", c->name,
			  c->pid, strerror(-kept));
	welcome_fill(c->server, &a->m.welcome, c->message.h.seq);
	a->m.welcome.mm = remote_id(r);
	(void)memcpy(a->m.welcome.token, remote_token(r), sizeof(a->m.welcome.token));
}

static int on_uffd(struct session *c, int fds[], struct answer *a, struct wd_err *err)
{
	struct remote_info info = info_of(c);
	struct remote *r;
	int e = need_none(c, err);

	if (e < 0)
		return e;
	if (!fd_is(fds[0], "anon_inode:[userfaultfd]"))
		return err_set(err, -EPROTO, "what was passed is no userfaultfd");
	/* Nothing of theirs is ever taken back: only where nobody can have more. */
	if (c->message.uffd.flags & WIRE_UFFD_USER_ONLY && c->server->userfaultfd >= 0)
		return err_set(err, -EPERM,
			       "a userfaultfd for user mode only: make it from the passed /dev/userfaultfd");
	info.user_only = c->message.uffd.flags & WIRE_UFFD_USER_ONLY;
	info.armed = c->message.uffd.flags & WIRE_UFFD_ARMED;
	e = remote_new(c->server->pager, TAKE_FD(fds[0]), &info, &r, err);
	if (e < 0)
		return e;
	set_remote(c, r, a);
	return 0;
}

static int on_claim(struct session *c, struct wd_err *err)
{
	const struct wire_claim *m = &c->message.claim;
	int e = need_none(c, err);

	if (e == 0)
		e = remote_claim(c->server->pager, m->parent, m->token, err);
	if (e == 0)
		c->parent = m->parent;
	return e;
}

static int on_claimed(struct session *c, struct answer *a, struct wd_err *err)
{
	struct remote_info info = info_of(c);
	struct remote *r;
	int e = need_none(c, err);

	if (e == 0 && !c->parent)
		e = err_set(err, -EPROTO, "CLAIMED comes after CLAIM");
	if (e == 0)
		e = remote_claimed(c->server->pager, c->parent, c->message.claimed.number, &info, &r, &a->own_fd, err);
	if (e < 0)
		return e;
	set_remote(c, r, a);
	a->fds[a->nr_fds++] = a->own_fd;
	return 0;
}

/* Is this what ufd/pager.h says of a layout, inside of the file and the arena? */
static int layout_check(const struct view_layout *l, uint64_t bytes, uint64_t file_size)
{
	uint64_t end = 0;

	for (size_t i = 0; i < l->nr_segs; i++) {
		const struct segment *g = &l->segs[i];

		if (g->file_off > file_size || g->len > file_size - g->file_off)
			return -EINVAL;
		if (i == 0 ? g->file_off != 0 || g->arena_off >= 64 : g->len == 0)
			return -EINVAL;
		if (g->arena_off < end || g->arena_off > MAX_ARENA_BYTES || g->len > MAX_ARENA_BYTES - g->arena_off)
			return -EINVAL;
		end = g->arena_off + g->len;
	}
	if (l->nr_segs == 0 || bytes != MAX(arena_round(end), page_bytes()))
		return -EINVAL;
	for (size_t i = 0; i < l->nr_units; i++) {
		const struct unit *u = &l->units[i];

		if (u->len == 0 || u->off > end || u->len > end - u->off || (i > 0 && u->off < u[-1].off))
			return -EINVAL;
	}
	return 0;
}

/* One user cannot take the descriptors that views cost from all others, over however many clients. */
static int check_views(const struct session *c, struct wd_err *err)
{
	struct server *s = c->server;
	size_t of_user = 0;

	if (c->nr_views >= s->max_views)
		return err_set(err, -EUSERS,
			       "this client has attached %zu views, the limit; raise it by --max-views or in the "
			       "daemon's configuration",
			       c->nr_views);
	if (c->uid == 0 || c->uid == geteuid())
		return 0;
	(void)pthread_mutex_lock(&s->lock);
	for (struct list *n = s->sessions.next; n != &s->sessions; n = n->next) {
		const struct session *other = container_of(n, struct session, node);

		if (other->uid == c->uid)
			of_user += other->nr_views;
	}
	(void)pthread_mutex_unlock(&s->lock);
	if (of_user >= s->max_views_of_user)
		return err_set(
			err, -EUSERS,
			"this user (uid %u) has attached %zu views, the limit that the daemon's descriptors set; raise "
			"its limit on open files (LimitNOFILE, ulimit -Hn)",
			c->uid, of_user);
	return 0;
}

static int on_attach(struct session *c, int fds[], struct answer *a, struct wd_err *err)
{
	const struct wire_attach *m = &c->message.attach;
	size_t segs_bytes = m->nr_segs * sizeof(struct segment), units_bytes = m->nr_units * sizeof(struct unit);
	cleanup_source struct source *src = NULL;
	cleanup_free void *blob = NULL;
	struct view_layout layout;
	struct view *v;
	bool known = false;
	int r;

	r = check_views(c, err);
	if (r < 0)
		return err_prefix(err, r, "%s", m->name);
	r = room_for((void **)&c->views, c->nr_views, &c->views_room, sizeof(*c->views));
	if (r < 0)
		return err_set(err, r, "%s: the daemon is out of memory", m->name);
	r = source_from_fds(TAKE_FD(fds[0]), m->flags & WIRE_DIRECT ? TAKE_FD(fds[2]) : -1, m->name, &src, err);
	if (r < 0)
		return r;
	r = wire_blob_read(fds[1], segs_bytes + units_bytes, &blob);
	if (r < 0)
		return err_set(err, r, "%s: the layout cannot be read: %s", m->name, strerror(-r));
	layout = (struct view_layout){ blob, m->nr_segs, (const struct unit *)((const char *)blob + segs_bytes),
				       m->nr_units };
	r = layout_check(&layout, m->bytes, src->id.size);
	if (r < 0)
		return err_set(err, r, "%s: the layout does not fit the file", m->name);
	r = serve_attach(c->server->pager, src, &layout, m->bytes, c->uid, &v, &known, err);
	if (r < 0)
		return r;
	c->views[c->nr_views++] = (struct attached){ v, view_id(v) };
	a->m.attached = (struct wire_attached){
		.view = view_id(v),
		.bytes = view_arena_bytes(v),
		.table_bytes = view_table_bytes(v),
		.known = known,
	};
	ANSWER(a, c, attached, WIRE_ATTACHED);
	a->fds[a->nr_fds++] = view_arena_fd(v);
	a->fds[a->nr_fds++] = view_table_fd(v);
	return 0;
}

static int on_detach(struct session *c, struct wd_err *err)
{
	struct attached *at = attached_find(c, c->message.view.view);

	if (!at)
		return err_set(err, -ENOENT, "view %ju was not attached here", (uintmax_t)c->message.view.view);
	serve_detach(at->view);
	*at = c->views[--c->nr_views];
	return 0;
}

static int on_map(struct session *c, struct answer *a, struct wd_err *err)
{
	const struct wire_map *m = &c->message.map;
	int r = need_remote(c, err);
	uint64_t state_bytes;
	struct view *v;

	if (r < 0)
		return r;
	v = view_of(c, m->view, err);
	if (!v)
		return -ENOENT;
	r = serve_map(c->remote, v, m->address, &a->own_fd, &state_bytes, err);
	if (r < 0)
		return r;
	a->m.mapped = (struct wire_mapped){ .state_bytes = state_bytes };
	ANSWER(a, c, mapped, WIRE_MAPPED);
	a->fds[a->nr_fds++] = a->own_fd;
	return 0;
}

static int on_hold(struct session *c, struct wd_err *err)
{
	const struct wire_ranges *m = &c->message.ranges;
	struct serve_range ranges[WIRE_RANGES];
	int r = need_remote(c, err);

	_Static_assert((int)SERVE_HOLD_DROP == (int)WIRE_HOLD_DROP && (int)SERVE_HOLD_ADD == (int)WIRE_HOLD_ADD,
		       "the same numbers");
	if (r < 0)
		return r;
	for (uint32_t i = 0; i < m->nr_ranges; i++)
		ranges[i] = (struct serve_range){ m->ranges[i].first, m->ranges[i].nr };
	return serve_hold(c->remote, m->view, (enum serve_hold)m->hold, ranges, m->nr_ranges);
}

static void job_answer(const struct session *c, const struct job *j, struct answer *a)
{
	struct wire_job_info *m = &a->m.job_info;
	int state;

	*m = (struct wire_job_info){ .job = j->id };
	pager_job_progress(j->job, &m->done_bytes, &m->total_bytes, &state);
	m->state = state;
	ANSWER(a, c, job_info, WIRE_JOB_INFO);
}

static int on_job(struct session *c, struct answer *a, struct wd_err *err)
{
	const struct wire_job *m = &c->message.job;
	cleanup_free struct job_range *ranges = calloc(m->nr_ranges + 1, sizeof(*ranges));
	struct job *j;
	int r;

	if (!ranges || room_for((void **)&c->jobs, c->nr_jobs, &c->jobs_room, sizeof(*c->jobs)) < 0)
		return err_set(err, -ENOMEM, "the daemon is out of memory");
	if (c->nr_jobs >= MAX_JOBS)
		return err_set(err, -EUSERS, "this client has %d populate jobs, the limit; end one first", MAX_JOBS);
	for (uint32_t i = 0; i < m->nr_ranges; i++) {
		struct view *v = view_of(c, m->ranges[i].view, err);

		if (!v)
			return -ENOENT;
		if (m->ranges[i].off > view_arena_bytes(v) || m->ranges[i].len > view_arena_bytes(v) - m->ranges[i].off)
			return err_set(err, -EINVAL, "a job's range ends behind its view");
		ranges[i] = (struct job_range){ v, m->ranges[i].off, m->ranges[i].len };
	}
	j = &c->jobs[c->nr_jobs];
	r = serve_job(c->server->pager, c->remote, ranges, m->nr_ranges, m->gentle, &j->job);
	if (r < 0)
		return r;
	j->id = ++c->next_job;
	c->nr_jobs++;
	job_answer(c, j, a);
	a->fds[a->nr_fds++] = pager_job_fd(j->job);
	return 0;
}

static int on_job_id(struct session *c, bool end, struct answer *a, struct wd_err *err)
{
	struct job *j = NULL;

	for (size_t i = 0; i < c->nr_jobs && !j; i++)
		if (c->jobs[i].id == c->message.job_id.job)
			j = &c->jobs[i];
	if (!j)
		return err_set(err, -ENOENT, "there is no job %ju here", (uintmax_t)c->message.job_id.job);
	if (!end) {
		job_answer(c, j, a);
		return 0;
	}
	(void)pager_job_free(j->job);
	*j = c->jobs[--c->nr_jobs];
	return 0;
}

static void stats_answer(const struct session *c, const struct pager_stats *s, struct answer *a)
{
	a->m.stats = (struct wire_stats){
		.budget_bytes = s->budget_bytes,
		.resident_bytes = s->resident_bytes,
		.peak_bytes = s->peak_bytes,
		.huge_bytes = s->huge_bytes,
		.read_bytes = s->read_bytes,
		.reads = s->reads,
		.faults = s->faults,
		.dropped_bytes = s->dropped_bytes,
		.reloads = s->reloads,
		.reload_bytes = s->reload_bytes,
		.failed = s->failed,
	};
	ANSWER(a, c, stats, WIRE_STATS);
}

static int on_view_stat(struct session *c, struct answer *a, struct wd_err *err)
{
	struct pager_stats stats;
	int r = need_remote(c, err);

	if (r == 0)
		r = serve_view_stats(c->remote, c->message.view.view, &stats);
	if (r == 0)
		stats_answer(c, &stats, a);
	return r;
}

static int on_json(struct session *c, bool ls, struct answer *a, struct wd_err *err)
{
	cleanup_free char *text = NULL;
	int r = ls ? report_ls(c->server, c->uid, &text) : report_stat(c->server, &text);

	if (r == 0)
		r = a->own_fd = wire_blob(text, strlen(text), NULL, 0); /* (a negative number is no descriptor) */
	if (r < 0)
		return err_set(err, r, "the daemon cannot make its report: %s", strerror(-r));
	ANSWER(a, c, plain, WIRE_JSON);
	a->fds[a->nr_fds++] = a->own_fd;
	return 0;
}

static int on_drop(struct session *c, int fds[], struct answer *a, struct wd_err *err)
{
	const struct wire_admin *m = &c->message.admin;
	cleanup_source struct source *src = NULL;
	struct serve_counts counts;
	struct pager_stats stats;
	uint64_t dropped = 0;
	int r = 0;

	if (!(m->flags & WIRE_ALL))
		r = source_from_fds(TAKE_FD(fds[0]), -1, "the file", &src, err);
	if (r == 0)
		r = serve_drop(c->server->pager, src ? &src->id : NULL, m->bytes, m->flags & WIRE_FORCE, c->uid,
			       DROP_MS, &dropped, err);
	if (r < 0)
		return r;
	serve_counts(c->server->pager, &counts);
	stats = counts.stats;
	stats.dropped_bytes = dropped;
	stats_answer(c, &stats, a);
	return 0;
}

static int on_pin(struct session *c, int fds[], struct wd_err *err)
{
	cleanup_source struct source *src = NULL;
	int r = source_from_fds(TAKE_FD(fds[0]), -1, "the file", &src, err);

	if (r == 0)
		r = serve_pin(c->server->pager, &src->id, !(c->message.admin.flags & WIRE_UNPIN), c->uid, err);
	return r;
}

static int on_shutdown(const struct session *c, struct wd_err *err)
{
	if (c->uid != 0 && c->uid != geteuid())
		return err_set(err, -EPERM, "only root and the daemon's user (uid %u) may shut it down", geteuid());
	log_info("pid %d (uid %u) asks for a shutdown", c->pid, c->uid);
	(void)kill(getpid(), SIGTERM);
	return 0;
}

static int handle(struct session *c, int fds[], struct answer *a, struct wd_err *err)
{
	const union wire_any *m = &c->message;
	int r;

	switch ((enum wire_type)m->h.type) {
	case WIRE_UFFD:
		return on_uffd(c, fds, a, err);
	case WIRE_CLAIM:
		return on_claim(c, err);
	case WIRE_CLAIMED:
		return on_claimed(c, a, err);
	case WIRE_ATTACH:
		return on_attach(c, fds, a, err);
	case WIRE_DETACH:
		return on_detach(c, err);
	case WIRE_MAP:
		return on_map(c, a, err);
	case WIRE_UNMAP:
		r = need_remote(c, err);
		return r ? r : serve_unmap(c->remote, m->map.view, m->map.address);
	case WIRE_HOLD:
		return on_hold(c, err);
	case WIRE_STAGE:
		r = need_remote(c, err);
		if (r == 0)
			serve_stage(c->remote, m->stage.name);
		return r;
	case WIRE_CLASS:
		r = need_remote(c, err);
		return r ? r : serve_class(c->remote, m->value.view, (enum view_class)m->value.value);
	case WIRE_FORBID:
		r = need_remote(c, err);
		return r ? r : serve_forbid(c->remote, m->value.view, m->value.value);
	case WIRE_JOB:
		return on_job(c, a, err);
	case WIRE_JOB_STATE:
	case WIRE_JOB_END:
		return on_job_id(c, m->h.type == WIRE_JOB_END, a, err);
	case WIRE_VIEW_STAT:
		return on_view_stat(c, a, err);
	case WIRE_LS:
	case WIRE_STAT:
		return on_json(c, m->h.type == WIRE_LS, a, err);
	case WIRE_DROP:
		return on_drop(c, fds, a, err);
	case WIRE_PIN:
		return on_pin(c, fds, err);
	case WIRE_SHUTDOWN:
		return on_shutdown(c, err);
	default:
		return -EBADMSG; /* not one that a client sends here */
	}
}

bool message_answer(struct session *c, int fds[])
{
	struct answer a = { .own_fd = -1 };
	struct wd_err err = { "" };
	uint32_t seq = c->message.h.seq;
	int r;

	WIRE_INIT(a.m.plain, WIRE_OK, seq);
	r = handle(c, fds, &a, &err);
	if (r == -EBADMSG && !err.text[0])
		return false;
	if (r < 0) {
		a.m.error = (struct wire_error){ .status = r };
		WIRE_INIT(a.m.error, WIRE_ERROR, seq);
		(void)snprintf(a.m.error.text, sizeof(a.m.error.text), "%.*s", WIRE_TEXT - 1,
			       err.text[0] ? err.text : strerror(-r));
		a.nr_fds = 0;
	}
	r = wire_send(c->control_fd, &a.m, a.fds, a.nr_fds, true);
	if (a.own_fd >= 0)
		(void)close(a.own_fd);
	return r == 0;
}

bool message_no_descriptor(const struct session *c)
{
	struct wire_error m = { .status = -EMFILE };

	WIRE_INIT(m, WIRE_ERROR, c->message.h.seq);
	(void)snprintf(m.text, sizeof(m.text),
		       "the daemon has no descriptor left; raise its limit on open files (LimitNOFILE, ulimit -n)");
	return wire_send(c->control_fd, &m, NULL, 0, true) == 0;
}

void message_let_go(struct session *c)
{
	for (size_t i = 0; i < c->nr_jobs; i++)
		(void)pager_job_free(c->jobs[i].job);
	for (size_t i = 0; i < c->nr_views; i++)
		serve_detach(c->views[i].view);
	c->nr_jobs = 0;
	c->nr_views = 0;
}
