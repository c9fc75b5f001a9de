/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See client.h. Knows the protocol's client side, mappings and page tables of this process; knows nothing of how the daemon
 * reads or whom it drops.
 *
 * Locks, outermost first
 *   ask    one question at a time; held from the question to its answer, and over the whole opening of a view
 *   views  the list of views; held while they are looked at (ms). Never waited for by a thread that is asked.
 *   clear  one window at a time (window.h): they share a userfaultfd, whose registration must not end under the other's hands
 * The service thread never waits for `ask` but in the rescue, where `dead` makes its holder give up. All signals are blocked
 * while one is held: a handler may touch a weight, and for that the service thread may be needed.
 *
 * fork: the child has this thread only. The list of views is changed by one pointer at a time, so that it is whole there.
 *
 * A rescue is safe because nobody opens or drops anything any more: HUP of the notify socket means that no thread of the
 * daemon or keeper is left (the kernel closes their descriptors after the last one). A daemon that was stopped for 5 s and then
 * goes on finds mappings that it cannot arm: it keeps that memory until we end, and changes nothing here.
 */
#include "ufd/client.h"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include "lib/base/log.h"
#include "ufd/window.h"
#include "ufd/wire.h"

#define STEP_MS 100       /* how long nobody looks whether there still is a daemon */
#define PING_MS 2000      /* without being asked */
#define SILENCE_MS 5000   /* without an answer: it counts as dead */
#define RESCUE_EXTENTS 64 /* at once */
#define UNIT_RELEASED 2   /* in view.unit_used: given back since it was populated */
#define NR_CHILDREN 32
#define SYNC_MS 2000 /* a drop that is not done by then has been given up, or others' come and come */

struct client_view {
	struct client_view *next;
	struct view *view;
	uint64_t number;     /* the daemon's */
	bool live;           /* open, and not being closed: the daemon serves it for sure */
	struct table *table; /* read-only */
	uint64_t table_bytes;
	unsigned char *state; /* table.h: struct of a mapping */
	uint64_t state_bytes;
	uint16_t *written; /* pages of each extent that were written when it was last cleared */
};

struct client {
	struct pager *pager;
	char path[WIRE_SOCKET], name[WIRE_NAME], stage[WIRE_NAME];
	uint32_t uid; /* of the daemon */
	int control, notify, wake_fd;
	ino_t control_ino, notify_ino; /* a program that closes all descriptors may have others under these numbers */
	int uffd;                      /* the daemon's as well: for the rescue only */
	struct window window;
	uint64_t mm;
	unsigned char token[16];
	uint32_t flags; /* wire_welcome.flags */
	uint32_t seq;
	pthread_mutex_t ask, views_lock, clear;
	struct client_view *views;
	pthread_t thread;
	bool threaded;
	bool watched;      /* the service thread watches the daemon: answers may take their time. Under ask */
	_Atomic bool dead; /* no daemon any more, or no way to it */
	_Atomic bool stop;
	_Atomic unsigned int resumes;    /* daemons that have taken over */
	union wire_any question, answer; /* under ask */

	/* the service thread's */
	union wire_any note, touched;
	bool pinged;
	uint64_t round; /* asked for; 0: none */
	uint64_t pinged_ns, looked_ns;
	uint64_t silent_ns;
	int children[NR_CHILDREN]; /* after a rescue: userfaultfds of children that are setting themselves up */
	unsigned int nr_children;
};

static void client_lock(struct client *c, sigset_t *saved)
{
	sigset_t all;

	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, saved);
	(void)pthread_mutex_lock(&c->ask);
}

static void client_unlock(struct client *c, const sigset_t *saved)
{
	(void)pthread_mutex_unlock(&c->ask);
	(void)pthread_sigmask(SIG_SETMASK, saved, NULL);
}

static void close_all(int *fds, size_t nr)
{
	for (size_t i = 0; i < nr; i++)
		if (fds[i] >= 0)
			(void)close(TAKE_FD(fds[i]));
}

/* ------------------------------------------------------------------ questions; `ask` is held */

static bool hung_up(int fd)
{
	struct pollfd p = { .fd = fd };

	return fd >= 0 && poll(&p, 1, 0) > 0 && p.revents & (POLLHUP | POLLERR | POLLNVAL);
}

static bool still_ours(int fd, ino_t ino)
{
	struct stat st;

	return fstat(fd, &st) == 0 && S_ISSOCK(st.st_mode) && st.st_ino == ino;
}

static ino_t socket_ino(int fd)
{
	struct stat st;

	return fstat(fd, &st) < 0 ? 0 : st.st_ino;
}

static int send_question(struct client *c, const void *question, const int *fds, unsigned int nr_fds, uint64_t until)
{
	for (;;) {
		struct pollfd p = { .fd = c->control, .events = POLLOUT };
		int r = wire_send(c->control, question, fds, nr_fds, false);

		if (r != -EAGAIN)
			return r;
		if (atomic_load(&c->dead) || hung_up(c->notify))
			return -ENOTCONN;
		if (until && now_ns() > until)
			return -ETIMEDOUT;
		(void)poll(&p, 1, STEP_MS);
	}
}

/*
 * Asks, and waits for the answer of this type (in c->answer; its descriptors in ret_fds, -1 where there are none). All
 * questions may be asked twice: a daemon that takes over in the middle is asked again.
 * Return: 0; the error that the daemon answered with (c->answer.error.text); -ENOTCONN there is no daemon any more;
 * -ETIMEDOUT while nobody else watches it (c->watched).
 */
static int ask(struct client *c, void *question, const int *fds, unsigned int nr_fds, enum wire_type type,
	       int ret_fds[static WIRE_MAX_FDS])
{
	struct wire_head *q = question;
	uint64_t until = c->watched ? 0 : now_ns() + (uint64_t)SILENCE_MS * 1000000;
	unsigned int resumes = atomic_load(&c->resumes), nr;
	int r;

	for (int i = 0; i < WIRE_MAX_FDS; i++)
		ret_fds[i] = -1;
	c->answer.error.text[0] = '\0';
	if (atomic_load(&c->dead) || !still_ours(c->control, c->control_ino))
		return -ENOTCONN;
	q->seq = ++c->seq;
	r = send_question(c, question, fds, nr_fds, until);
	while (r == 0) {
		r = wire_recv(c->control, &c->answer, ret_fds, &nr, STEP_MS);
		if (r == 1) {
			for (unsigned int i = nr; i < WIRE_MAX_FDS; i++)
				ret_fds[i] = -1;
			if (c->answer.h.seq == q->seq)
				break;
			close_all(ret_fds, WIRE_MAX_FDS); /* of a question that was asked twice */
			r = 0;
			continue;
		}
		for (int i = 0; i < WIRE_MAX_FDS; i++)
			ret_fds[i] = -1;
		if (r == 0 || (r < 0 && r != -EAGAIN && r != -EPROTO))
			return -ENOTCONN;
		if (r == -EPROTO)
			return r;
		r = 0;
		if (atomic_load(&c->dead) || hung_up(c->notify))
			return -ENOTCONN;
		if (until && now_ns() > until)
			return -ETIMEDOUT;
		if (atomic_load(&c->resumes) != resumes) {
			resumes = atomic_load(&c->resumes);
			r = send_question(c, question, fds, nr_fds, until);
		}
	}
	if (r < 0)
		return r == -EPIPE || r == -ECONNRESET ? -ENOTCONN : r;
	if (c->answer.h.type == (uint32_t)type)
		return 0;
	close_all(ret_fds, WIRE_MAX_FDS);
	return c->answer.h.type == WIRE_ERROR && c->answer.error.status < 0 ? c->answer.error.status : -EPROTO;
}

/* The same for those that are answered with OK and bring nothing. */
static int tell(struct client *c, void *question)
{
	int fds[WIRE_MAX_FDS];
	int r = ask(c, question, NULL, 0, WIRE_OK, fds);

	close_all(fds, WIRE_MAX_FDS);
	return r;
}

static const char *why(const struct client *c, int error)
{
	return c->answer.h.type == WIRE_ERROR && c->answer.error.text[0] ? c->answer.error.text : strerror(-error);
}

/* ------------------------------------------------------------------ getting acquainted */

static int hello(struct client *c, int *ret_device, struct wd_err *err)
{
	struct wire_hello q = { .version = WIRE_VERSION };
	const struct wire_welcome *w = &c->answer.welcome;
	int fds[WIRE_MAX_FDS], r;

	WIRE_INIT(q, WIRE_HELLO, 0);
	(void)memcpy(q.name, c->name, sizeof(q.name));
	r = ask(c, &q, NULL, 0, WIRE_WELCOME, fds);
	if (r == -ETIMEDOUT)
		return err_set(err, r, "the daemon at %s does not answer; see whether it is stopped or very busy",
			       c->path);
	if (r < 0)
		return err_set(err, r, "the daemon at %s has refused: %s", c->path, why(c, r));
	if (w->status < 0 || w->version != WIRE_VERSION || w->page_bytes != page_bytes() ||
	    w->extent_bytes != extent_bytes() || fds[0] < 0) {
		close_all(fds, WIRE_MAX_FDS);
		r = w->status < 0 ? w->status : -EPROTONOSUPPORT;
		if (r == -EPROTONOSUPPORT)
			return err_set(err, r,
				       "the daemon at %s is weightd %.64s, protocol %u, this library's is %u; "
				       "restart the daemon or the program with the same version",
				       c->path, w->release, w->version, WIRE_VERSION);
		return err_set(err, r, "the daemon at %s has refused: %s", c->path,
			       w->text[0] ? w->text : strerror(-r));
	}
	c->flags = w->flags;
	c->notify = TAKE_FD(fds[0]);
	*ret_device = TAKE_FD(fds[1]);
	close_all(fds, WIRE_MAX_FDS);
	c->notify_ino = socket_ino(c->notify);
	return 0;
}

static void take_welcome(struct client *c)
{
	c->mm = c->answer.welcome.mm;
	(void)memcpy(c->token, c->answer.welcome.token, sizeof(c->token));
}

static int hand_over(struct client *c, int uffd, uint32_t flags)
{
	struct wire_uffd q = { .flags = flags };
	int fds[WIRE_MAX_FDS], r;

	WIRE_INIT(q, WIRE_UFFD, 0);
	r = ask(c, &q, &uffd, 1, WIRE_WELCOME, fds);
	close_all(fds, WIRE_MAX_FDS);
	if (r == 0)
		take_welcome(c);
	return r;
}

static void window_make(struct client *c, int device)
{
	struct uffd_caps caps = { 0 };

	/* Without one nothing can be observed: then all counts as touched. */
	c->window.uffd = uffd_open_from(device, true, false, &caps);
	c->window.wp = caps.wp;
	c->window.pagemap_fd = c->pager->pagemap_fd;
}

static int introduce(struct client *c, struct wd_err *err)
{
	cleanup_close int device = -1;
	bool user_only;
	int r = hello(c, &device, err);

	if (r < 0)
		return r;
	c->uffd = uffd_open_raw(device, &user_only);
	if (c->uffd < 0)
		return err_set(err, c->uffd == -EMFILE ? -EMFILE : -EOPNOTSUPP,
			       "cannot use the daemon at %s: userfaultfd is not allowed here (%s); see weightd doctor",
			       c->path, strerror(-c->uffd));
	r = hand_over(c, c->uffd, user_only ? WIRE_UFFD_USER_ONLY : 0);
	if (r < 0)
		return err_set(err, r, "the daemon at %s has refused this process: %s", c->path, why(c, r));
	window_make(c, device);
	return 0;
}

static void *service_main(void *client);

static int service_start(struct client *c)
{
	sigset_t all, saved;
	pthread_attr_t attr;
	int r;

	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &saved);
	(void)pthread_attr_init(&attr);
	(void)pthread_attr_setstacksize(&attr, 256 * KiB);
	r = pthread_create(&c->thread, &attr, service_main, c);
	(void)pthread_attr_destroy(&attr);
	(void)pthread_sigmask(SIG_SETMASK, &saved, NULL);
	if (r == 0)
		(void)pthread_setname_np(c->thread, "wd-client");
	c->threaded = c->watched = r == 0;
	return -r;
}

static void close_ours(struct client *c)
{
	int *fds[] = { &c->control, &c->notify, &c->uffd, &c->window.uffd, &c->wake_fd };

	/* Whoever closes all descriptors has closed these: what is there now is not ours. */
	if (c->notify >= 0 && !still_ours(c->notify, c->notify_ino))
		return;
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
		close_all(fds[i], 1);
	close_all(c->children, c->nr_children);
	c->nr_children = 0;
}

static void client_free(struct client *c)
{
	close_ours(c);
	(void)pthread_mutex_destroy(&c->ask);
	(void)pthread_mutex_destroy(&c->views_lock);
	(void)pthread_mutex_destroy(&c->clear);
	free(c);
}

static uint32_t peer_uid(int fd)
{
	struct ucred peer = { .uid = (uid_t)-1 };
	socklen_t len = sizeof(peer);

	(void)getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len);
	return peer.uid;
}

int client_setup(struct pager *p, const char *socket, bool autostart, struct wd_err *err)
{
	struct client *c = calloc(1, sizeof(*c));
	int r;

	if (!c)
		return err_set(err, -ENOMEM, "cannot use a daemon: out of memory");
	c->pager = p;
	c->control = c->notify = c->uffd = c->window.uffd = c->wake_fd = -1;
	(void)snprintf(c->name, sizeof(c->name), "%s", program_invocation_short_name);
	(void)pthread_mutex_init(&c->ask, NULL);
	(void)pthread_mutex_init(&c->views_lock, NULL);
	(void)pthread_mutex_init(&c->clear, NULL);
	p->pagemap_fd = pagemap_open();
	r = wire_connect(socket, &c->control, c->path, err);
	if ((r == -ENOENT || r == -ECONNREFUSED) && autostart) {
		r = client_autostart(socket, err);
		if (r == 0)
			r = wire_connect(socket, &c->control, c->path, err);
	}
	if (r == 0) {
		c->control_ino = socket_ino(c->control);
		c->uid = peer_uid(c->control);
		r = introduce(c, err);
	}
	if (r == 0) {
		p->caps.poison = c->flags & WIRE_POISONS;
		if (!p->caps.poison)
			p->empty_fd = memfd_create("weightd-poison", MFD_CLOEXEC);
		c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		r = c->wake_fd < 0 || (!p->caps.poison && p->empty_fd < 0) ? -errno : service_start(c);
		if (r < 0)
			(void)err_set(err, r, "cannot use a daemon: %s", strerror(-r));
	}
	if (r < 0) {
		client_free(c);
		return r;
	}
	p->client = c;
	return 0;
}

int client_uffd(const struct pager *p)
{
	return p->client->uffd;
}

void client_done(struct pager *p)
{
	struct client *c = TAKE_PTR(p->client);
	uint64_t one = 1;

	if (c->threaded) {
		atomic_store(&c->stop, true);
		if (still_ours(c->notify, c->notify_ino))
			(void)!write(c->wake_fd, &one, sizeof(one));
		(void)pthread_join(c->thread, NULL);
	}
	client_free(c);
}

/* ------------------------------------------------------------------ views */

static int attach(struct client *c, struct client_view *cv, int *ret_arena_fd, struct wd_err *err)
{
	struct view *v = cv->view;
	cleanup_close int blob =
		wire_blob(v->segs, v->nr_segs * sizeof(*v->segs), v->units, v->nr_units * sizeof(*v->units));
	struct wire_attach *q = &c->question.attach;
	const char *path = v->source->path;
	const struct wire_attached *a = &c->answer.attached;
	int fds[WIRE_MAX_FDS], send[] = { v->source->fd, blob, v->source->direct_fd }, r;

	if (blob < 0)
		return err_set(err, blob, "%s: no memory for its layout: %s", path, strerror(-blob));
	*q = (struct wire_attach){ .flags = v->source->direct_fd >= 0 ? WIRE_DIRECT : 0,
				   .nr_segs = (uint32_t)v->nr_segs,
				   .nr_units = (uint32_t)v->nr_units,
				   .bytes = v->bytes };
	WIRE_INIT(*q, WIRE_ATTACH, 0);
	if (strlen(path) >= sizeof(q->name))
		path += strlen(path) - sizeof(q->name) + 1;
	(void)memcpy(q->name, path, strlen(path));
	r = ask(c, q, send, v->source->direct_fd >= 0 ? 3 : 2, WIRE_ATTACHED, fds);
	if (r < 0)
		return err_set(err, r, "%s: the daemon at %s cannot open it: %s", v->source->path, c->path, why(c, r));
	cv->number = a->view;
	cv->table_bytes = a->table_bytes;
	if (a->bytes == v->bytes && fds[0] >= 0 && fds[1] >= 0 &&
	    cv->table_bytes == table_bytes(v->nr_segs, v->nr_units, v->nr_ext))
		cv->table = mmap(NULL, cv->table_bytes, PROT_READ, MAP_SHARED, fds[1], 0);
	else
		r = -EPROTO;
	if (r == 0 && cv->table == MAP_FAILED)
		r = -errno;
	if (r == 0 &&
	    (cv->table->magic != TABLE_MAGIC || cv->table->version != TABLE_VERSION || cv->table->nr_ext != v->nr_ext ||
	     cv->table->nr_segs != v->nr_segs || cv->table->nr_units != v->nr_units))
		r = -EPROTO;
	if (r < 0) {
		if (cv->table == MAP_FAILED)
			cv->table = NULL;
		close_all(fds, WIRE_MAX_FDS);
		return err_set(err, r, "%s: the table of the daemon at %s cannot be used: %s", v->source->path, c->path,
			       strerror(-r));
	}
	*ret_arena_fd = TAKE_FD(fds[0]);
	close_all(fds, WIRE_MAX_FDS);
	return 0;
}

/* A child has its parent's poison in its page tables, but a state of its own, which says nothing of it. */
static int inherit_state(struct client_view *cv, unsigned char *state)
{
	for (uint64_t off = 0; off < cv->state_bytes; off += page_bytes()) {
		uint64_t from = MAX(off, map_state_poison(cv->view->nr_ext));
		uint64_t to = MIN(off + page_bytes(), cv->state_bytes);
		unsigned char there;

		/* (A look at a page that nobody has written to would cost memory.) */
		if (mincore(cv->state + off, page_bytes(), &there) < 0 || !(there & 1))
			continue;
		for (; from < to; from += 8)
			if (*(const volatile uint64_t *)(cv->state + from))
				*(uint64_t *)(state + from) = *(const volatile uint64_t *)(cv->state + from);
	}
	if (mremap(state, cv->state_bytes, cv->state_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, cv->state) == MAP_FAILED)
		return -errno;
	return 0;
}

/* Tells where the view is mapped, and maps what the daemon tells about it; again after a fork. */
static int map(struct client *c, struct client_view *cv)
{
	struct view *v = cv->view;
	struct wire_map q = { .view = cv->number, .address = (uintptr_t)v->base };
	int fds[WIRE_MAX_FDS], r;
	void *m;

	WIRE_INIT(q, WIRE_MAP, 0);
	r = ask(c, &q, NULL, 0, WIRE_MAPPED, fds);
	if (r < 0)
		return r;
	if (fds[0] < 0 || c->answer.mapped.state_bytes != map_state_bytes(v->nr_ext, v->bytes, page_bytes())) {
		r = -EPROTO;
	} else {
		cv->state_bytes = c->answer.mapped.state_bytes;
		m = mmap(NULL, cv->state_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
		if (m == MAP_FAILED)
			r = -errno;
		else if (cv->state)
			r = inherit_state(cv, m);
		else
			cv->state = m;
	}
	close_all(fds, WIRE_MAX_FDS);
	return r;
}

static void tell_view(struct client *c, const struct client_view *cv, enum wire_type type)
{
	struct wire_view q = { .view = cv->number };

	WIRE_INIT(q, type, 0);
	(void)tell(c, &q);
}

static void cv_free(struct client_view *cv)
{
	if (cv->table)
		(void)munmap(cv->table, cv->table_bytes);
	if (cv->state)
		(void)munmap(cv->state, cv->state_bytes);
	if (cv->written)
		(void)munmap(cv->written, cv->view->nr_ext * sizeof(*cv->written));
	free(cv);
}

static void link_view(struct client *c, struct client_view *cv)
{
	(void)pthread_mutex_lock(&c->views_lock);
	cv->next = c->views;
	__atomic_store_n(&c->views, cv, __ATOMIC_RELEASE);
	(void)pthread_mutex_unlock(&c->views_lock);
}

static void unlink_view(struct client *c, struct client_view *cv)
{
	struct client_view **at;

	(void)pthread_mutex_lock(&c->views_lock);
	for (at = &c->views; *at && *at != cv; at = &(*at)->next)
		;
	if (*at)
		__atomic_store_n(at, cv->next, __ATOMIC_RELEASE);
	(void)pthread_mutex_unlock(&c->views_lock);
}

static void set_live(struct client *c, struct client_view *cv, bool live)
{
	(void)pthread_mutex_lock(&c->views_lock);
	cv->live = live;
	(void)pthread_mutex_unlock(&c->views_lock);
}

static int map_view(struct client *c, struct client_view *cv, int arena_fd, struct wd_err *err)
{
	struct view *v = cv->view;
	uint64_t len = v->bytes + page_bytes();
	int r;

	v->base = map_reserve(len);
	if (!v->base)
		return view_map_failed(v, -ENOMEM, "map", err);
	/* PROT_NONE until it is armed: see view_map(). */
	if (mmap(v->base, len, PROT_NONE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, arena_fd, 0) == MAP_FAILED)
		return view_map_failed(v, -errno, "map", err);
	if (!v->pager->caps.poison) /* to put a page back there */
		v->arena.fd = fcntl(arena_fd, F_DUPFD_CLOEXEC, 3);
	(void)munlock(v->base, len);
	(void)madvise(v->base, len, MADV_HUGEPAGE);
	(void)madvise(v->base, len, MADV_DONTDUMP);
	/* Before the daemon has it: in a child of this moment its sentinel may be the one that is written to. */
	link_view(c, cv);
	r = map(c, cv);
	if (r < 0)
		return err_set(err, r, "%s: the daemon at %s cannot serve %llu MiB: %s", v->source->path, c->path,
			       (unsigned long long)(v->bytes / MiB), why(c, r));
	if (mprotect(v->base, len, PROT_READ | PROT_WRITE) < 0) {
		v->read_only = true; /* overcommit_memory=2: writable extent by extent then */
		if (mprotect(v->base, len, PROT_READ) < 0)
			return view_map_failed(v, -errno, "map", err);
	}
	return 0;
}

static void unmap(struct client *c, const struct client_view *cv)
{
	struct wire_map q = { .view = cv->number, .address = (uintptr_t)cv->view->base };

	if (cv->state) {
		WIRE_INIT(q, WIRE_UNMAP, 0);
		(void)tell(c, &q);
	}
	tell_view(c, cv, WIRE_DETACH);
}

int client_view_open(struct view *v, struct wd_err *err)
{
	struct client *c = v->pager->client;
	struct client_view *cv = calloc(1, sizeof(*cv));
	cleanup_close int arena_fd = -1;
	sigset_t saved;
	int r;

	if (!cv)
		return view_map_failed(v, -ENOMEM, "keep the table of", err);
	cv->view = v;
	cv->written = mmap(NULL, v->nr_ext * sizeof(*cv->written), PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (cv->written == MAP_FAILED) {
		free(cv);
		return view_map_failed(v, -ENOMEM, "keep the table of", err);
	}
	client_lock(c, &saved);
	r = attach(c, cv, &arena_fd, err);
	if (r == 0)
		r = map_view(c, cv, arena_fd, err);
	if (r == 0) {
		(void)munmap(v->poisoned, cv->state_bytes - map_state_poison(v->nr_ext));
		v->poisoned = (uint64_t *)(cv->state + map_state_poison(v->nr_ext));
		v->client = cv;
		set_live(c, cv, true);
	} else {
		if (cv->number)
			unmap(c, cv);
		unlink_view(c, cv);
	}
	client_unlock(c, &saved);
	if (r == 0)
		return 0;
	if (v->base)
		(void)munmap(v->base, v->bytes + page_bytes());
	v->base = NULL;
	v->read_only = false;
	cv_free(cv);
	if (r != -ENOTCONN)
		return r;
	/* Its memory is not shared any more, but it works. */
	log_info("%s: the daemon at %s is gone: the file is mapped instead", v->source->path, c->path);
	v->mmap = true;
	return mmap_view_open(v, err);
}

void client_view_close(struct view *v)
{
	struct client *c = v->pager->client;
	struct client_view *cv = v->client;
	struct pager_stats s;
	sigset_t saved;

	if (!v->mmap) {
		client_view_stats(v, &s);
		pager_count(v->pager, &s);
	}
	client_lock(c, &saved);
	set_live(c, cv, false);
	if (!v->mmap)
		unmap(c, cv);
	unlink_view(c, cv);
	client_unlock(c, &saved);
	v->poisoned = NULL;
	v->client = NULL;
	cv_free(cv);
}

bool client_reason(const struct view *v, uint64_t off, enum fault_code *ret_code, int *ret_error)
{
	const struct table_extent *x = &table_ext(v->client->table)[off / extent_bytes()];
	bool failed = atomic_load(&x->state) == EXT_FAILED;

	*ret_code = (enum fault_code)x->code;
	*ret_error = x->error;
	return failed;
}

/* ------------------------------------------------------------------ page tables */

/* What is in the page tables of some extents in a row. */
struct chunk {
	uint64_t base;
	uint32_t file[WINDOW_MAX], written[WINDOW_MAX]; /* pages */
};

static int chunk_run(void *arg, const struct page_run *run)
{
	struct chunk *k = arg;

	for (uint64_t a = run->start; a < run->end;) {
		size_t e = (size_t)((a - k->base) / extent_bytes());
		uint64_t end = MIN(run->end, k->base + (e + 1) * extent_bytes());

		if (run->file)
			k->file[e] += (uint32_t)((end - a) / page_bytes());
		else
			k->written[e] += (uint32_t)((end - a) / page_bytes());
		a = end;
	}
	return 0;
}

static uint64_t ext_span(const struct view *v, size_t first, size_t nr)
{
	return MIN(nr * extent_bytes(), v->bytes - first * extent_bytes());
}

static int chunk_scan(const struct client_view *cv, size_t first, size_t nr, struct chunk *ret)
{
	struct view *v = cv->view;
	unsigned char *at = v->base + first * extent_bytes();

	*ret = (struct chunk){ .base = (uintptr_t)at };
	return pagemap_scan(v->pager->pagemap_fd, at, ext_span(v, first, nr), chunk_run, ret);
}

static bool touched(const struct client_view *cv, size_t first, size_t i, const struct chunk *k)
{
	/* The pages that were written before tell nothing: they are always there. */
	return k->file[i] || k->written[i] > cv->written[first + i];
}

static int clear_some(struct client *c, struct client_view *cv, size_t first, size_t nr)
{
	struct view *v = cv->view;
	uint32_t written[WINDOW_MAX];
	int r;

	if (!window_begin())
		return -EAGAIN; /* a fork is under way */
	(void)pthread_mutex_lock(&c->clear);
	r = window_clear(&c->window, v->base + first * extent_bytes(), ext_span(v, first, nr), written);
	(void)pthread_mutex_unlock(&c->clear);
	window_end();
	for (size_t i = 0; r == 0 && i < nr; i++)
		cv->written[first + i] = (uint16_t)MIN(written[i], (uint32_t)UINT16_MAX);
	return r;
}

/* Empties the page tables of what is open among these extents. What the daemon has armed meanwhile says EBUSY; it is not
 * mapped then. All signals are blocked, no view is touched. */
static void clear_chunk(struct client *c, struct client_view *cv, size_t first, size_t nr)
{
	struct chunk k;
	size_t i = 0;

	if (c->window.uffd < 0 || chunk_scan(cv, first, nr, &k) < 0)
		return;
	while (i < nr) {
		size_t from = i;

		/* What is empty is as it shall be; only its written pages are counted. */
		while (i < nr && cv->state[first + i] & MAP_OPEN && k.file[i])
			i++;
		if (i == from) {
			if (!k.file[i])
				cv->written[first + i] = (uint16_t)MIN(k.written[i], (uint32_t)UINT16_MAX);
			i++;
		} else if (clear_some(c, cv, first + from, i - from) == -EBUSY && i - from > 1) {
			for (size_t e = from; e < i; e++)
				(void)clear_some(c, cv, first + e, 1);
		}
	}
}

static void clear_view(struct client *c, struct client_view *cv)
{
	size_t nr_ext = cv->view->nr_ext;

	for (size_t e = 0; e < nr_ext; e += WINDOW_MAX)
		clear_chunk(c, cv, e, MIN((size_t)WINDOW_MAX, nr_ext - e));
}

/* ------------------------------------------------------------------ messages with ranges */

struct batch {
	struct client *c;
	struct wire_ranges *q;
};

static struct batch batch_new(struct client *c, const struct client_view *cv, enum wire_type type, enum wire_hold hold)
{
	struct batch b = { c, type == WIRE_HOLD ? &c->question.ranges : &c->touched.ranges };

	b.q->h = (struct wire_head){ WIRE_MAGIC, type, 0, 0 };
	b.q->view = cv->number;
	b.q->hold = hold;
	b.q->nr_ranges = 0;
	return b;
}

static void batch_send(struct batch *b)
{
	int fds[WIRE_MAX_FDS];

	if (!b->q->nr_ranges)
		return;
	b->q->h.nbytes = wire_ranges_bytes(b->q->nr_ranges);
	if (b->q->h.type == WIRE_HOLD)
		(void)ask(b->c, b->q, NULL, 0, WIRE_OK, fds);
	else
		(void)wire_send(b->c->notify, b->q, NULL, 0, false);
	b->q->nr_ranges = 0;
}

static void batch_add(struct batch *b, size_t first, size_t nr)
{
	struct wire_range *last = b->q->ranges + b->q->nr_ranges - 1;

	if (b->q->nr_ranges && last->first + last->nr == first) {
		last->nr += (uint32_t)nr;
		return;
	}
	if (b->q->nr_ranges == WIRE_RANGES)
		batch_send(b);
	b->q->ranges[b->q->nr_ranges++] = (struct wire_range){ (uint32_t)first, (uint32_t)nr };
}

/* ------------------------------------------------------------------ dropping, stages */

void client_view_drop(struct view *v)
{
	struct client *c = v->pager->client;
	struct batch b;
	sigset_t saved;

	client_lock(c, &saved);
	memset(v->unit_used, UNIT_RELEASED, v->nr_units);
	b = batch_new(c, v->client, WIRE_HOLD, WIRE_HOLD_DROP);
	batch_add(&b, 0, v->nr_ext);
	batch_send(&b);
	client_unlock(c, &saved);
}

static int first_run(void *arg, const struct page_run *run)
{
	(void)arg;
	return run->file;
}

static bool mapped_in(const struct view *v, uint64_t from, uint64_t to)
{
	from = round_down(from, page_bytes());
	to = MIN(round_up(to, page_bytes()), v->bytes);
	return from < to && pagemap_scan(v->pager->pagemap_fd, v->base + from, to - from, first_run, NULL) != 0;
}

/* Is something in this extent in use beside what is given back? Touches are not told to us one by one: a neighbour counts
 * as used if any of it is mapped, where that can be told from the extent's own pages; else if it was never given back. */
static bool extent_used(const struct view *v, size_t e)
{
	uint64_t from = e * extent_bytes(), to = from + ext_span(v, e, 1);

	for (size_t u = view_unit_from(v, from); u < v->nr_units && v->units[u].off < to; u++) {
		uint64_t off = v->units[u].off, end = off + v->units[u].len;

		if (end <= from || v->unit_used[u] == UNIT_RELEASED)
			continue;
		if (v->unit_used[u])
			return true;
		if (off < from || end > to ?
			    (off < from && mapped_in(v, off, from)) || (end > to && mapped_in(v, to, end)) :
			    mapped_in(v, from, to))
			return true;
	}
	return false;
}

void client_view_drop_units(struct view *v, size_t first, size_t nr)
{
	struct client *c = v->pager->client;
	size_t done = 0; /* extents that have been looked at: each is told once */
	struct batch b;
	sigset_t saved;

	client_lock(c, &saved);
	memset(v->unit_used + first, UNIT_RELEASED, nr);
	b = batch_new(c, v->client, WIRE_HOLD, WIRE_HOLD_DROP);
	for (size_t u = first; u < first + nr; u++) {
		const struct unit *unit = &v->units[u];

		if (!unit->len)
			continue;
		for (size_t e = MAX(done, unit->off / extent_bytes());
		     e <= (unit->off + unit->len - 1) / extent_bytes(); e++, done = e)
			if (!extent_used(v, e))
				batch_add(&b, e, 1);
	}
	batch_send(&b);
	client_unlock(c, &saved);
}

int client_sync(struct pager *p, int timeout_ms)
{
	struct client *c = p->client;
	uint64_t until = now_ns() + (uint64_t)(timeout_ms < 0 ? SYNC_MS : MIN(timeout_ms, SYNC_MS)) * 1000000;
	sigset_t saved;
	int r = 0;

	client_lock(c, &saved);
	if (c->views) {
		struct batch b = batch_new(c, c->views, WIRE_HOLD, WIRE_HOLD_DROP);
		int fds[WIRE_MAX_FDS];

		/* Without a range: answered when what was asked for is over, -ETIMEDOUT after some ms. */
		b.q->h.nbytes = wire_ranges_bytes(0);
		do
			r = ask(c, b.q, NULL, 0, WIRE_OK, fds);
		while (r == -ETIMEDOUT && now_ns() < until);
	}
	client_unlock(c, &saved);
	return r == -ETIMEDOUT ? r : 0;
}

void client_view_class(struct view *v, enum view_class class)
{
	struct client *c = v->pager->client;
	struct wire_value q = { .view = v->client->number, .value = class };
	sigset_t saved;

	WIRE_INIT(q, WIRE_CLASS, 0);
	client_lock(c, &saved);
	(void)tell(c, &q);
	client_unlock(c, &saved);
}

static int forbid(struct client *c, const struct client_view *cv, bool on)
{
	struct wire_value q = { .view = cv->number, .value = on };

	WIRE_INIT(q, WIRE_FORBID, 0);
	return tell(c, &q);
}

void client_forbid(struct view *v)
{
	struct client *c = v->pager->client;
	sigset_t saved;

	client_lock(c, &saved);
	clear_view(c, v->client);
	(void)forbid(c, v->client, true);
	client_unlock(c, &saved);
}

void client_allow(struct view *v)
{
	struct client *c = v->pager->client;
	sigset_t saved;

	client_lock(c, &saved);
	(void)forbid(c, v->client, false);
	client_unlock(c, &saved);
}

void client_observe_begin(struct view *v)
{
	struct client *c = v->pager->client;
	sigset_t saved;

	client_lock(c, &saved);
	clear_view(c, v->client);
	client_unlock(c, &saved);
}

void client_observe_drop(struct view *v)
{
	struct client *c = v->pager->client;
	struct client_view *cv = v->client;
	const struct table_extent *x = table_ext(cv->table);
	struct batch b;
	struct chunk k;
	sigset_t saved;

	client_lock(c, &saved);
	b = batch_new(c, cv, WIRE_HOLD, WIRE_HOLD_DROP);
	for (size_t e = 0; e < v->nr_ext; e += WINDOW_MAX) {
		size_t nr = MIN((size_t)WINDOW_MAX, v->nr_ext - e);

		if (chunk_scan(cv, e, nr, &k) < 0)
			break; /* nothing can be seen: nothing is dropped */
		for (size_t i = 0; i < nr; i++)
			if (atomic_load(&x[e + i].state) == EXT_READY && !touched(cv, e, i, &k))
				batch_add(&b, e + i, 1);
	}
	batch_send(&b);
	client_unlock(c, &saved);
}

static int tell_stage(struct client *c)
{
	struct wire_stage q = { 0 };

	WIRE_INIT(q, WIRE_STAGE, 0);
	(void)memcpy(q.name, c->stage, sizeof(q.name));
	return tell(c, &q);
}

void client_stage(struct pager *p, const char *name)
{
	struct client *c = p->client;
	sigset_t saved;

	client_lock(c, &saved);
	memset(c->stage, 0, sizeof(c->stage));
	(void)snprintf(c->stage, sizeof(c->stage), "%s", name ? name : "");
	(void)tell_stage(c);
	client_unlock(c, &saved);
}

void client_view_stats(struct view *v, struct pager_stats *ret)
{
	struct client *c = v->pager->client;
	struct wire_view q = { .view = v->client->number };
	const struct wire_stats *a = &c->answer.stats;
	int fds[WIRE_MAX_FDS];
	sigset_t saved;

	*ret = (struct pager_stats){ 0 };
	WIRE_INIT(q, WIRE_VIEW_STAT, 0);
	client_lock(c, &saved);
	if (ask(c, &q, NULL, 0, WIRE_STATS, fds) == 0)
		*ret = (struct pager_stats){
			.budget_bytes = a->budget_bytes,
			.resident_bytes = a->resident_bytes,
			.peak_bytes = a->peak_bytes,
			.huge_bytes = a->huge_bytes,
			.read_bytes = a->read_bytes,
			.reads = a->reads,
			.faults = a->faults,
			.dropped_bytes = a->dropped_bytes,
			.reloads = a->reloads,
			.reload_bytes = a->reload_bytes,
			.failed = a->failed,
		};
	close_all(fds, WIRE_MAX_FDS);
	client_unlock(c, &saved);
}

/* ------------------------------------------------------------------ populate: a thread a job */

/* Starts ranges [first, +nr) at the daemon. -ECANCELED: asked to end before. */
static int job_ask(struct client *c, struct pager_job *j, size_t first, size_t nr, int *ret_event_fd)
{
	struct wire_job *q = &c->question.job;
	int fds[WIRE_MAX_FDS], r = -ECANCELED;

	(void)pthread_mutex_lock(&c->ask);
	if (!atomic_load(&j->cancelled)) {
		q->h = (struct wire_head){ WIRE_MAGIC, WIRE_JOB, wire_job_bytes((uint32_t)nr), 0 };
		q->gentle = j->gentle;
		q->nr_ranges = (uint32_t)nr;
		for (size_t i = 0; i < nr; i++) {
			const struct job_range *range = &j->ranges[first + i];

			q->ranges[i] = (struct wire_job_range){ range->view->client->number, range->off,
								MIN(range->len, range->view->bytes - range->off) };
		}
		r = ask(c, q, NULL, 0, WIRE_JOB_INFO, fds);
		if (r == 0) {
			atomic_store(&j->number, c->answer.job_info.job);
			*ret_event_fd = TAKE_FD(fds[0]);
		}
		close_all(fds, WIRE_MAX_FDS);
	}
	(void)pthread_mutex_unlock(&c->ask);
	return r;
}

static int job_tell(struct client *c, struct pager_job *j, enum wire_type type, uint64_t *ret_done_bytes)
{
	struct wire_job_id q = { .job = atomic_load(&j->number) };
	int fds[WIRE_MAX_FDS], r;

	WIRE_INIT(q, type, 0);
	(void)pthread_mutex_lock(&c->ask);
	r = ask(c, &q, NULL, 0, type == WIRE_JOB_END ? WIRE_OK : WIRE_JOB_INFO, fds);
	if (r == 0 && type == WIRE_JOB_STATE) {
		*ret_done_bytes = c->answer.job_info.done_bytes;
		r = c->answer.job_info.state;
	}
	close_all(fds, WIRE_MAX_FDS);
	(void)pthread_mutex_unlock(&c->ask);
	return r;
}

/* Return: 1 done; negative errno. */
static int job_part(struct client *c, struct pager_job *j, size_t first, size_t nr)
{
	uint64_t before = atomic_load(&j->done_bytes), done = 0;
	cleanup_close int fd = -1;
	int r = job_ask(c, j, first, nr, &fd);

	if (r < 0)
		return r;
	while (!atomic_load(&j->cancelled)) {
		struct pollfd p = { .fd = fd, .events = POLLIN };

		(void)poll(&p, 1, STEP_MS / 2);
		r = job_tell(c, j, WIRE_JOB_STATE, &done);
		if (r == -ENOENT || r == -EBADF) { /* another daemon, which knows nothing of it */
			if (fd >= 0)
				(void)close(TAKE_FD(fd));
			r = job_ask(c, j, first, nr, &fd);
		} else if (r >= 0) {
			atomic_store(&j->done_bytes, before + done);
		}
		if (r != 0)
			break;
	}
	if (r != -ENOTCONN)
		(void)job_tell(c, j, WIRE_JOB_END, NULL);
	/* What could not be read before can be now: the touches that failed shall work, too. */
	for (size_t i = first; r == 1 && i < first + nr; i++)
		view_lift(j->ranges[i].view, j->ranges[i].off / extent_bytes(), j->ranges[i].len / extent_bytes());
	atomic_store(&j->number, 0);
	return r == 0 ? -ECANCELED : r;
}

static void *job_main(void *arg)
{
	struct pager_job *j = arg;
	struct client *c = j->pager->client;
	int r = 1;

	for (size_t i = 0; r == 1 && i < j->nr_ranges; i += WIRE_RANGES)
		r = job_part(c, j, i, MIN(j->nr_ranges - i, (size_t)WIRE_RANGES));
	if (r == -ENOTCONN) { /* then by touching, whoever serves it */
		atomic_store(&j->done_bytes, 0);
		return mmap_job_main(j);
	}
	job_end(j, r);
	return NULL;
}

int client_job_start(struct pager_job *j)
{
	for (size_t i = 0; i < j->nr_ranges; i++)
		if (!j->ranges[i].view->client)
			return job_thread(j, mmap_job_main); /* it was opened without a daemon */
	return job_thread(j, job_main);
}

void client_job_cancel(struct pager_job *j)
{
	sigset_t all, saved;

	/* What was asked for ends before this returns: drops may follow, and would be read again. */
	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &saved);
	if (atomic_load(&j->state) == 0 && atomic_load(&j->number))
		(void)job_tell(j->pager->client, j, WIRE_JOB_END, NULL);
	(void)pthread_sigmask(SIG_SETMASK, &saved, NULL);
}

/* ------------------------------------------------------------------ rescue */

/* After a rescue: a fork event must be read, or the fork waits for ever. Faults come of pages that the program has given
 * back, or that the kernel has taken out of a page table; `serve` false: they fault again. */
static void late_fault(struct client *c, uint64_t address, bool serve);

static void read_events(struct client *c, bool serve)
{
	struct uffd_msg_info msgs[16];
	int n;

	while ((n = uffd_read(c->uffd, msgs, (int)ARRAY_SIZE(msgs))) > 0) {
		for (int i = 0; i < n; i++) {
			const struct uffd_msg_info *m = &msgs[i];

			if (m->event == EVENT_FAULT) {
				late_fault(c, m->address, serve);
			} else if (m->event == EVENT_FORK) {
				/* Its handler maps the files; until then none of its memory may be let go. */
				if (c->nr_children == NR_CHILDREN) {
					(void)close(c->children[0]);
					memmove(c->children, c->children + 1,
						--c->nr_children * sizeof(c->children[0]));
				}
				c->children[c->nr_children++] = m->child_fd;
			}
		}
	}
}

/* Puts the file where nothing was ever touched. Armed first: then what is absent stays so until it is woken. What cannot be
 * armed is the program's own by now. */
static void rescue_armed(struct client *c, struct view *v, uint64_t off, uint64_t len)
{
	uint64_t half = round_up(len / 2, page_bytes());

	if (uffd_register(c->uffd, v->base + off, len, false) == 0) {
		if (replace_range(v, v->pager->pagemap_fd, off, len) < 0)
			v->broken = true;
	} else if (len > page_bytes()) {
		rescue_armed(c, v, off, half);
		rescue_armed(c, v, off + half, len - half);
	}
}

static void rescue_range(struct client *c, struct view *v, uint64_t off, uint64_t len)
{
	struct pollfd p = { .fd = c->uffd, .events = POLLIN };

	/* A fork copies what is half done here, and then its page tables would not tell what was written. */
	while (!window_begin()) {
		read_events(c, false);
		(void)poll(&p, 1, 1);
	}
	rescue_armed(c, v, off, len);
	window_end();
	(void)uffd_wake(c->uffd, v->base + off, len);
}

static void late_fault(struct client *c, uint64_t address, bool serve)
{
	for (struct client_view *cv = c->views; cv; cv = cv->next) {
		struct view *v = cv->view;
		uint64_t off = address - (uintptr_t)v->base;

		if (!cv->live || address < (uintptr_t)v->base || off >= v->bytes)
			continue;
		off = round_down(off, extent_bytes());
		if (serve)
			rescue_range(c, v, off, MIN(extent_bytes(), v->bytes - off));
		else
			(void)uffd_wake(c->uffd, v->base + off, MIN(extent_bytes(), v->bytes - off));
		return;
	}
}

static void rescue_view(struct client *c, struct view *v)
{
	uint64_t step = RESCUE_EXTENTS * extent_bytes();

	/* A file that is another one now: an error at a touch of what was not read, never a mixture. Without /proc nobody can
	 * tell what was written. */
	v->broken = source_check(v->source) < 0 || v->pager->pagemap_fd < 0;
	(void)uffd_register(c->uffd, v->base, v->bytes, false); /* merges: may need no VMA where the parts would */
	if (v->pager->pagemap_fd < 0)
		(void)mprotect(v->base, v->bytes, PROT_NONE);
	else
		for (uint64_t off = 0; off < v->bytes; off += step)
			rescue_range(c, v, off, MIN(step, v->bytes - off));
	if (v->forbidden)
		(void)mprotect(v->base, v->bytes, PROT_NONE);
	(void)madvise(v->base, v->bytes, MADV_DONTDUMP);
	v->mmap = true;
	(void)uffd_wake(c->uffd, v->base, v->bytes);
}

static void rescue(struct client *c, const char *what)
{
	size_t nr = 0, nr_changed = 0;

	atomic_store(&c->dead, true); /* whoever waits for an answer gives up and lets `ask` go */
	(void)pthread_mutex_lock(&c->ask);
	(void)pthread_mutex_lock(&c->views_lock);
	for (struct client_view *cv = c->views; cv; cv = cv->next, nr++) {
		rescue_view(c, cv->view);
		nr_changed += cv->view->broken;
	}
	__atomic_store_n(&c->pager->way, WAY_MMAP, __ATOMIC_RELEASE);
	(void)pthread_mutex_unlock(&c->views_lock);
	(void)pthread_mutex_unlock(&c->ask);
	log_error("the daemon at %s %s: %zu files are mapped instead, their memory is no longer shared%s", c->path,
		  what, nr, nr_changed ? "; what was not read yet of those that have changed cannot be read" : "");
}

/* ------------------------------------------------------------------ the service thread */

static void do_round(struct client *c)
{
	struct wire_round q = { .round = c->round };
	bool clear = !c->stage[0];

	(void)pthread_mutex_lock(&c->views_lock);
	for (struct client_view *cv = c->views; cv; cv = cv->next) {
		struct batch b = batch_new(c, cv, WIRE_TOUCHED, 0);
		size_t nr_ext = cv->live ? cv->view->nr_ext : 0;
		struct chunk k;

		for (size_t e = 0; e < nr_ext; e += WINDOW_MAX) {
			size_t nr = MIN((size_t)WINDOW_MAX, nr_ext - e);
			bool seen = c->pager->pagemap_fd >= 0 && chunk_scan(cv, e, nr, &k) == 0, any = false;

			for (size_t i = 0; i < nr; i++) {
				if (seen ? !touched(cv, e, i, &k) : !(cv->state[e + i] & MAP_OPEN))
					continue;
				batch_add(&b, e + i, 1);
				any = true;
			}
			if (any && clear)
				clear_chunk(c, cv, e, nr);
		}
		batch_send(&b);
	}
	(void)pthread_mutex_unlock(&c->views_lock);
	WIRE_INIT(q, WIRE_ROUND_DONE, 0);
	(void)wire_send(c->notify, &q, NULL, 0, false);
	c->round = 0;
}

/* Takes what the daemon has sent. False: it has hung up. */
/* Before 6.6: a page of an empty file, where nothing is mapped yet; the touching thread waits until it is woken. */
static void poison_here(struct client *c, uint64_t address)
{
	struct pager *p = c->pager;
	uint64_t page = page_bytes();

	(void)pthread_mutex_lock(&c->views_lock);
	for (struct client_view *cv = c->views; cv; cv = cv->next) {
		struct view *v = cv->view;
		uint64_t off = round_down(address - (uintptr_t)v->base, page);
		unsigned char *at = v->base + off;

		if (address < (uintptr_t)v->base || off >= v->bytes || !v->client)
			continue;
		if (pagemap_absent(p->pagemap_fd, at, page) &&
		    mmap(at, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, p->empty_fd, 0) != MAP_FAILED)
			(void)__atomic_fetch_or(&v->poisoned[off / page / 64], (uint64_t)1 << off / page % 64,
						__ATOMIC_RELEASE);
		(void)uffd_wake(c->uffd, at, page);
		break;
	}
	(void)pthread_mutex_unlock(&c->views_lock);
}

static bool read_notes(struct client *c)
{
	int fds[WIRE_MAX_FDS], r;
	unsigned int nr;

	while ((r = wire_recv(c->notify, &c->note, fds, &nr, 0)) == 1) {
		close_all(fds, nr);
		switch (c->note.h.type) {
		case WIRE_RESUME:
			(void)atomic_fetch_add(&c->resumes, 1);
			c->pinged = false;
			break;
		case WIRE_PONG:
			c->pinged = false;
			break;
		case WIRE_ROUND:
			c->round = c->note.round.round;
			break;
		case WIRE_POISON:
			poison_here(c, c->note.page.address);
			break;
		default:
			break;
		}
	}
	return r == -EAGAIN || r == -EPROTO;
}

/* False: silent for too long. Time is counted in small steps, so that a process (or a machine) that was stopped does not
 * take its own pause for the daemon's. */
static bool ping(struct client *c)
{
	uint64_t now = now_ns(), step = MIN(now - c->looked_ns, (uint64_t)STEP_MS * 2 * 1000000);
	struct wire_plain q;

	c->looked_ns = now;
	if (c->pinged) {
		c->silent_ns += step;
		return c->silent_ns < (uint64_t)SILENCE_MS * 1000000;
	}
	if (now - c->pinged_ns < (uint64_t)PING_MS * 1000000)
		return true;
	WIRE_INIT(q, WIRE_PING, 0);
	(void)wire_send(c->notify, &q, NULL, 0, false);
	c->pinged = true;
	c->pinged_ns = now;
	c->silent_ns = 0;
	return true;
}

/* A rescued process goes on without a daemon; the dup of its userfaultfd still has forks and late faults to tell. */
static void serve_rescued(struct client *c)
{
	while (!atomic_load(&c->stop)) {
		struct pollfd fds[] = { { .fd = c->uffd, .events = POLLIN }, { .fd = c->wake_fd, .events = POLLIN } };

		(void)poll(fds, ARRAY_SIZE(fds), -1);
		if ((fds[0].revents | fds[1].revents) & POLLNVAL)
			return;
		(void)pthread_mutex_lock(&c->views_lock);
		read_events(c, true);
		(void)pthread_mutex_unlock(&c->views_lock);
	}
}

static void *service_main(void *arg)
{
	struct client *c = arg;

	c->pinged_ns = c->looked_ns = now_ns();
	while (!atomic_load(&c->stop)) {
		struct pollfd fds[] = { { .fd = c->notify, .events = POLLIN }, { .fd = c->wake_fd, .events = POLLIN } };
		bool there;

		(void)poll(fds, ARRAY_SIZE(fds), c->pinged ? STEP_MS : PING_MS);
		if (atomic_load(&c->stop))
			break;
		if (fds[1].revents & POLLNVAL || !still_ours(c->notify, c->notify_ino)) {
			/* The program has closed all descriptors (as daemons do): the weights are served as before, only
			 * questions cannot be asked any more. */
			atomic_store(&c->dead, true);
			return NULL;
		}
		there = read_notes(c);
		if (!there || !ping(c)) {
			rescue(c, there ? "has not answered for 5 s" : "is gone");
			serve_rescued(c);
			return NULL;
		}
		if (c->round)
			do_round(c);
	}
	return NULL;
}

/* ------------------------------------------------------------------ fork: the child */

static int present_run(void *arg, const struct page_run *run)
{
	(void)arg;
	return run->present;
}

/* The daemon has written a number into the sentinel of each child that it holds and nobody has claimed yet. */
static uint64_t number_read(struct client *c)
{
	for (struct client_view *cv = c->views; cv; cv = cv->next) {
		unsigned char *at = view_sentinel(cv->view);

		if (pagemap_scan(c->pager->pagemap_fd, at, page_bytes(), present_run, NULL) > 0 &&
		    (cv->live || mprotect(at, page_bytes(), PROT_READ) == 0)) /* (it was just being opened) */
			return *(const volatile uint64_t *)at;
	}
	return 0;
}

static int claim(struct client *c)
{
	struct wire_claim q = { .parent = c->mm };
	struct wire_claimed claimed = { 0 };
	int fds[WIRE_MAX_FDS], r;

	(void)memcpy(q.token, c->token, sizeof(q.token));
	for (struct client_view *cv = c->views; cv; cv = cv->next)
		if (madvise(view_sentinel(cv->view), page_bytes(), MADV_DONTNEED) < 0)
			return -errno;
	WIRE_INIT(q, WIRE_CLAIM, 0);
	r = ask(c, &q, NULL, 0, WIRE_OK, fds);
	close_all(fds, WIRE_MAX_FDS);
	if (r < 0)
		return r;
	claimed.number = number_read(c);
	if (!claimed.number)
		return -ENOENT;
	WIRE_INIT(claimed, WIRE_CLAIMED, 0);
	r = ask(c, &claimed, NULL, 0, WIRE_WELCOME, fds);
	if (r < 0)
		return r;
	take_welcome(c);
	c->uffd = TAKE_FD(fds[0]);
	close_all(fds, WIRE_MAX_FDS);
	return c->uffd < 0 ? -EPROTO : 0;
}

/* The daemon does not hold this address space (it died while it took the fork in; or it may not ask for fork events): so
 * nobody serves what is armed here, and we do what it would have done. */
static int arm_anew(struct client *c, int device)
{
	struct uffd_caps caps;

	close_all(&c->uffd, 1);
	c->uffd = uffd_open_from(device, true, c->flags & WIRE_EVENT_FORK, &caps);
	if (c->uffd < 0)
		return c->uffd;
	for (struct client_view *cv = c->views; cv; cv = cv->next) {
		struct view *v = cv->view;
		int r;

		if (!cv->live)
			continue;
		/* EBUSY: it is held after all. */
		r = uffd_register(c->uffd, view_sentinel(v), page_bytes(), false);

		if (r == 0)
			r = uffd_register(c->uffd, v->base, v->bytes + page_bytes(), false);
		if (r < 0)
			return r;
	}
	return hand_over(c, c->uffd, WIRE_UFFD_ARMED | (caps.user_only ? WIRE_UFFD_USER_ONLY : 0));
}

/* The same view, for a session that has not attached it. */
static int attach_again(struct client *c, struct client_view *cv)
{
	struct client_view as = { .view = cv->view };
	cleanup_close int arena_fd = -1;
	int r = attach(c, &as, &arena_fd, NULL);

	if (as.table)
		(void)munmap(as.table, as.table_bytes);
	return r < 0 ? r : as.number == cv->number ? 0 : -ESTALE; /* ours is another arena */
}

static int claim_again(struct client *c)
{
	cleanup_close int device = -1;
	uint64_t until;
	uint32_t uid;
	int r = wire_connect_to(c->path, &c->control, &uid);

	if (r < 0)
		return r;
	if (uid != c->uid && uid != 0 && uid != geteuid())
		return -EACCES;
	c->control_ino = socket_ino(c->control);
	if (!c->views)
		return introduce(c, NULL);
	r = hello(c, &device, NULL);
	if (r < 0)
		return r;
	/* The daemon may have the fork event in its hands still: until that is lost, or in its table. */
	until = now_ns() + (uint64_t)SILENCE_MS * 1000000;
	do {
		r = c->flags & WIRE_EVENT_FORK ? claim(c) : -ENOENT;
		if (r == -ENOENT)
			r = arm_anew(c, device);
	} while (r == -EBUSY && now_ns() < until);
	for (struct client_view *cv = c->views; cv && r == 0; cv = cv->next) {
		struct wire_value class = { .view = cv->number, .value = cv->view->class };

		if (!cv->live)
			continue;
		cv->view->busy = 0; /* of threads that are not here */
		WIRE_INIT(class, WIRE_CLASS, 0);
		r = map(c, cv);
		if (r == -ENOENT) { /* the parent has closed it since, before the daemon took us in */
			r = attach_again(c, cv);
			if (r == 0)
				r = map(c, cv);
		}
		if (r == 0 && cv->view->class != VIEW_NORMAL)
			r = tell(c, &class);
		if (r == 0 && cv->view->forbidden)
			r = forbid(c, cv, true);
	}
	if (r == 0 && c->stage[0])
		r = tell_stage(c);
	if (r == 0)
		window_make(c, device);
	return r;
}

bool client_forked(struct pager *p)
{
	struct client *c = p->client;
	bool dead = atomic_load(&c->dead);

	close_ours(c); /* the parent's: its answers, its faults */
	c->control = c->notify = c->uffd = c->window.uffd = c->wake_fd = -1;
	c->nr_children = 0;
	c->threaded = c->watched = c->pinged = false;
	c->round = 0;
	(void)pthread_mutex_init(&c->ask, NULL);
	(void)pthread_mutex_init(&c->views_lock, NULL);
	(void)pthread_mutex_init(&c->clear, NULL);
	if (!dead) {
		int r = p->pagemap_fd < 0 ? -EACCES : claim_again(c);

		if (r == 0) {
			c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
			r = c->wake_fd < 0 ? -errno : service_start(c);
		}
		if (r == 0)
			return true;
		log_info("forked child %d has its weights without the daemon at %s: %s", getpid(), c->path, why(c, r));
	}
	atomic_store(&c->dead, true);
	close_ours(c);
	return false;
}
