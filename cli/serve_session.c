/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See serve_session.h. A connection's life:
 *
 *   accepted -> pending (a descriptor in the main epoll, nothing else) -> HELLO -> a session, with a thread
 *     -> the client hangs up, or sends what is no message -> closed; its memory stays the engine's until it is gone
 *
 * A session is referenced by its thread, and by whoever handles its notify socket at the moment; who lets go last
 * closes it. What a client has attached and its jobs belong to its thread alone.
 */
#include "cli/serve_session.h"

#include <fcntl.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>

#include "cli/serve_message.h"
#include "lib/base/log.h"
#include "lib/include/weightd.h"
#include "ufd/page.h"

#define HELLO_NS (10 * 1000000000ull)
#define THREAD_STACK (256 * KiB)

struct pending {
	struct list node;
	uint64_t id;
	int fd;
	pid_t pid;
	uid_t uid;
	uint64_t since_ns;
};

static uint64_t clock_ns(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

void server_init(struct server *s)
{
	*s = (struct server){ .epoll_fd = -1, .userfaultfd = -1, .started_ns = clock_ns() };
	(void)pthread_mutex_init(&s->lock, NULL);
	list_init(&s->sessions);
	list_init(&s->pending);
}

static void lock(struct server *s)
{
	(void)pthread_mutex_lock(&s->lock);
}

static void unlock(struct server *s)
{
	(void)pthread_mutex_unlock(&s->lock);
}

size_t session_count(struct server *s)
{
	size_t nr;

	lock(s);
	nr = s->nr_sessions;
	unlock(s);
	return nr;
}

static size_t sessions_of(struct server *s, uid_t uid)
{
	size_t nr = 0;

	lock(s);
	for (struct list *n = s->sessions.next; n != &s->sessions; n = n->next)
		nr += container_of(n, struct session, node)->uid == uid;
	unlock(s);
	return nr;
}

/* ------------------------------------------------------------------ a session's beginning and end */

static void session_unref(struct session *c)
{
	struct server *s = c->server;
	bool last;

	lock(s);
	last = --c->nr_refs == 0;
	unlock(s);
	if (!last)
		return;
	/* A client's closed socket is not its death (exec, closefrom): the engine serves its memory on. */
	if (c->remote)
		remote_hup(c->remote);
	/* The keeper may hold the same sockets: closing does not hang up. */
	(void)shutdown(c->control_fd, SHUT_RDWR);
	(void)shutdown(c->notify_fd, SHUT_RDWR);
	(void)close(c->control_fd);
	(void)close(c->notify_fd);
	free(c->views);
	free(c->jobs);
	free(c);
}

/* Descriptors are taken. NULL: no memory. */
static struct session *session_new(struct server *s, int control_fd, int notify_fd, pid_t pid, uid_t uid,
				   const char *name, struct remote *r)
{
	struct session *c = malloc(sizeof(*c));

	if (!c) {
		(void)close(control_fd);
		(void)close(notify_fd);
		return NULL;
	}
	(void)memset(c, 0, offsetof(struct session, message));
	c->server = s;
	c->nr_refs = 1;
	c->control_fd = control_fd;
	c->notify_fd = notify_fd;
	c->pid = pid;
	c->uid = uid;
	(void)snprintf(c->name, sizeof(c->name), "%s", name);
	c->remote = r;
	c->next_job = clock_ns(); /* numbers of a daemon before this one must not be found again */
	lock(s);
	c->id = ++s->next_id;
	list_add_tail(&s->sessions, &c->node);
	s->nr_sessions++;
	if (r)
		remote_set_session(r, c);
	unlock(s);
	return c;
}

static void *session_main(void *arg);

static void session_end(struct session *c);

/* On failure the session is ended. */
static int session_start(struct session *c)
{
	struct epoll_event event = { .events = EPOLLIN, .data.u64 = SERVER_EVENT(EVENT_NOTIFY, c->id) };
	pthread_attr_t attr;
	pthread_t thread;
	int r = -pthread_attr_init(&attr);

	if (r == 0) {
		(void)pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
		(void)pthread_attr_setstacksize(&attr, THREAD_STACK);
		r = epoll_ctl(c->server->epoll_fd, EPOLL_CTL_ADD, c->notify_fd, &event) < 0 ? -errno : 0;
		if (r == 0)
			r = -pthread_create(&thread, &attr, session_main, c);
		(void)pthread_attr_destroy(&attr);
	}
	if (r < 0) {
		log_error("a client (pid %d) cannot be served: %s; see the limits on threads and open files", c->pid,
			  strerror(-r));
		session_end(c);
	}
	return r;
}

static void session_end(struct session *c)
{
	struct server *s = c->server;

	message_let_go(c);
	(void)epoll_ctl(s->epoll_fd, EPOLL_CTL_DEL, c->notify_fd, NULL);
	lock(s);
	list_del(&c->node);
	s->nr_sessions--;
	if (c->remote)
		remote_set_session(c->remote, NULL);
	unlock(s);
	log_info("client %s (pid %d, uid %u) has left", c->name, c->pid, c->uid);
	session_unref(c);
}

void session_adopt(void *server, struct remote *r, int control_fd, int notify_fd)
{
	const struct remote_info *info = remote_info(r);

	if (!session_new(server, control_fd, notify_fd, info->pid, info->uid, info->name, r))
		remote_hup(r);
}

void session_resume(struct server *s)
{
	struct wire_plain resume;
	struct list *n, *next;

	WIRE_INIT(resume, WIRE_RESUME, 0);
	/* Only adopted ones are there, and the main thread makes no others meanwhile. */
	lock(s);
	for (n = s->sessions.next; n != &s->sessions; n = next) {
		struct session *c = container_of(n, struct session, node);

		next = n->next;
		c->nr_refs++;
		unlock(s);
		if (session_start(c) == 0)
			(void)wire_send(c->notify_fd, &resume, NULL, 0, false);
		session_unref(c);
		lock(s);
	}
	unlock(s);
}

/* ------------------------------------------------------------------ connections without HELLO */

static void pending_end(struct server *s, struct pending *p)
{
	list_del(&p->node);
	s->nr_pending--;
	if (p->fd >= 0)
		(void)close(p->fd); /* and out of the epoll: nobody else has it */
	free(p);
}

void session_accept(struct server *s, int listen_fd)
{
	struct epoll_event event = { .events = EPOLLIN };
	struct ucred peer;
	socklen_t len = sizeof(peer);
	struct pending *p;
	size_t of_user = 0;
	int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd < 0 && (errno == EMFILE || errno == ENFILE) && !list_empty(&s->pending)) {
		/* Who has said nothing for the longest time makes room, or nobody would get in. */
		pending_end(s, container_of(s->pending.next, struct pending, node));
		fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	}
	if (fd < 0) {
		if (errno == EMFILE || errno == ENFILE) {
			static uint64_t told_ns;
			const struct timespec pause = { .tv_nsec = 1000000 };

			if (clock_ns() - told_ns > 1000000000)
				log_error("no descriptor is left for another client; raise the limit (LimitNOFILE, "
					  "ulimit -n)");
			told_ns = clock_ns();
			(void)nanosleep(&pause, NULL); /* the connection stays in the queue: do not spin on it */
		}
		return;
	}
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0) {
		(void)close(fd);
		return;
	}
	/* Silent connections cost a descriptor each: as many as there may be clients, of one user and of all, and the
	 * oldest goes first. Who means to be a client says HELLO at once. */
	for (struct list *n = s->pending.next; n != &s->pending; n = n->next)
		of_user += container_of(n, struct pending, node)->uid == peer.uid;
	if (of_user >= atomic_load(&s->max_clients_per_user) || s->nr_pending >= atomic_load(&s->max_clients)) {
		bool of_anyone = of_user < atomic_load(&s->max_clients_per_user);

		for (struct list *n = s->pending.next; n != &s->pending; n = n->next) {
			p = container_of(n, struct pending, node);
			if (of_anyone || p->uid == peer.uid) {
				pending_end(s, p);
				break;
			}
		}
	}
	p = calloc(1, sizeof(*p));
	if (!p) {
		(void)close(fd);
		return;
	}
	lock(s);
	p->id = ++s->next_id;
	unlock(s);
	p->fd = fd;
	p->pid = peer.pid;
	p->uid = peer.uid;
	p->since_ns = clock_ns();
	list_add_tail(&s->pending, &p->node);
	s->nr_pending++;
	event.data.u64 = SERVER_EVENT(EVENT_PENDING, p->id);
	if (epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0)
		pending_end(s, p);
}

int session_expire(struct server *s)
{
	uint64_t now = clock_ns();

	while (!list_empty(&s->pending)) {
		struct pending *p = container_of(s->pending.next, struct pending, node);

		if (now < p->since_ns + HELLO_NS)
			return (int)((p->since_ns + HELLO_NS - now) / 1000000) + 1;
		log_info("a connection of pid %d (uid %u) has said nothing for %d s and is closed", p->pid, p->uid,
			 (int)(HELLO_NS / 1000000000));
		pending_end(s, p);
	}
	return -1;
}

void welcome_fill(const struct server *s, struct wire_welcome *w, uint32_t seq)
{
	*w = (struct wire_welcome){
		.version = WIRE_VERSION,
		.flags = s->welcome_flags,
		.pid = (uint32_t)getpid(),
		.page_bytes = page_bytes(),
		.extent_bytes = extent_bytes(),
		.release = WD_VERSION,
	};
	WIRE_INIT(*w, WIRE_WELCOME, seq);
}

static void __attribute__((format(printf, 5, 6)))
refuse(const struct server *s, const struct pending *p, uint32_t seq, int status, const char *fmt, ...)
{
	struct wire_welcome w;
	va_list args;

	welcome_fill(s, &w, seq);
	w.status = status;
	va_start(args, fmt);
	(void)vsnprintf(w.text, sizeof(w.text), fmt, args);
	va_end(args);
	log_info("a client (pid %d, uid %u) is refused: %s", p->pid, p->uid, w.text);
	(void)wire_send(p->fd, &w, NULL, 0, false);
}

static void hello(struct server *s, struct pending *p, const struct wire_hello *m)
{
	uint32_t most = atomic_load(&s->max_clients), most_of_user = atomic_load(&s->max_clients_per_user);
	int pair[2], fds[2], r, flags;
	struct wire_welcome w;
	struct session *c;

	if (m->version != WIRE_VERSION) {
		refuse(s, p, m->h.seq, -EPROTONOSUPPORT,
		       "the daemon (pid %d, weightd %s) speaks version %u of the protocol, the client version %u; let "
		       "both be of one version",
		       getpid(), WD_VERSION, WIRE_VERSION, m->version);
		return;
	}
	if (session_count(s) >= most) {
		refuse(s, p, m->h.seq, -EUSERS,
		       "the daemon has %u clients, its limit; raise it by --max-clients or in its configuration", most);
		return;
	}
	if (sessions_of(s, p->uid) >= most_of_user) {
		refuse(s, p, m->h.seq, -EUSERS,
		       "this user (uid %u) has %u clients, the limit; raise it by --max-clients-per-user or in "
		       "the daemon's configuration",
		       p->uid, most_of_user);
		return;
	}
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) {
		refuse(s, p, m->h.seq, -errno,
		       "the daemon has no descriptor left: %s; raise its limit (LimitNOFILE, ulimit -n)",
		       strerror(errno));
		return;
	}
	welcome_fill(s, &w, m->h.seq);
	fds[0] = pair[1];
	fds[1] = s->userfaultfd;
	r = wire_send(p->fd, &w, fds, s->userfaultfd >= 0 ? 2 : 1, false);
	(void)close(pair[1]);
	flags = fcntl(p->fd, F_GETFL);
	if (r < 0 || flags < 0 || fcntl(p->fd, F_SETFL, flags & ~O_NONBLOCK) < 0) {
		(void)close(pair[0]);
		return;
	}
	/* From the main epoll to a thread of its own. */
	(void)epoll_ctl(s->epoll_fd, EPOLL_CTL_DEL, p->fd, NULL);
	c = session_new(s, TAKE_FD(p->fd), pair[0], p->pid, p->uid, m->name, NULL);
	if (!c)
		return;
	log_info("client %s (pid %d, uid %u) has come", c->name, c->pid, c->uid);
	(void)session_start(c);
}

void session_pending(struct server *s, uint64_t id)
{
	static union wire_any message; /* the main thread's */
	int fds[WIRE_MAX_FDS], r;
	unsigned int nr_fds = 0;
	struct pending *p = NULL;

	for (struct list *n = s->pending.next; n != &s->pending && !p; n = n->next)
		if (container_of(n, struct pending, node)->id == id)
			p = container_of(n, struct pending, node);
	if (!p)
		return;
	r = wire_recv(p->fd, &message, fds, &nr_fds, 0);
	if (r == -EAGAIN)
		return;
	for (unsigned int i = 0; r == 1 && i < nr_fds; i++)
		(void)close(fds[i]);
	if (r == 1 && message.h.type == WIRE_HELLO)
		hello(s, p, &message.hello);
	else if (r != 0)
		log_info("a connection of pid %d (uid %u) does not begin with HELLO and is closed", p->pid, p->uid);
	pending_end(s, p);
}

/* ------------------------------------------------------------------ the notify socket: main thread */

void session_notify(struct server *s, uint64_t id)
{
	static union wire_any message; /* the main thread's */
	struct session *c = NULL;
	struct remote *remote = NULL;
	int fds[WIRE_MAX_FDS], r;
	unsigned int nr_fds = 0;

	lock(s);
	for (struct list *n = s->sessions.next; n != &s->sessions && !c; n = n->next)
		if (container_of(n, struct session, node)->id == id)
			c = container_of(n, struct session, node);
	if (c) {
		c->nr_refs++;
		remote = c->remote;
	}
	unlock(s);
	if (!c)
		return;
	/* One message a turn: nobody keeps the others waiting. */
	r = wire_recv(c->notify_fd, &message, fds, &nr_fds, 0);
	for (unsigned int i = 0; r == 1 && i < nr_fds; i++)
		(void)close(fds[i]);
	if (r == 1 && message.h.type == WIRE_PING) {
		struct wire_plain pong;

		WIRE_INIT(pong, WIRE_PONG, message.h.seq);
		(void)wire_send(c->notify_fd, &pong, NULL, 0, false); /* who does not read gets none */
	} else if (r == 1 && message.h.type == WIRE_TOUCHED) {
		struct serve_range ranges[WIRE_RANGES];

		for (uint32_t i = 0; i < message.ranges.nr_ranges; i++)
			ranges[i] = (struct serve_range){ message.ranges.ranges[i].first, message.ranges.ranges[i].nr };
		if (remote)
			(void)serve_touched(remote, message.ranges.view, ranges, message.ranges.nr_ranges);
	} else if (r == 1 && message.h.type == WIRE_ROUND_DONE) {
		if (remote)
			serve_round_done(remote, message.round.round);
	} else if (r != -EAGAIN) {
		/* Hung up: it is not asked again. No message of this socket: the client is not one of ours. */
		(void)epoll_ctl(s->epoll_fd, EPOLL_CTL_DEL, c->notify_fd, NULL);
		if (r != 0) {
			log_info("client %s (pid %d, uid %u) sent what is no message and is closed", c->name, c->pid,
				 c->uid);
			(void)shutdown(c->control_fd, SHUT_RDWR);
		}
	}
	session_unref(c);
}

static void tell(struct server *s, struct remote *r, const void *m)
{
	struct session *c;

	lock(s); /* so that the session is not ended meanwhile */
	c = remote_session(r);
	if (c)
		(void)wire_send(c->notify_fd, m, NULL, 0, false);
	unlock(s);
}

void session_round(void *server, struct remote *r, uint64_t round)
{
	struct wire_round m = { .round = round };

	WIRE_INIT(m, WIRE_ROUND, 0);
	tell(server, r, &m);
}

void session_poison(void *server, struct remote *r, uint64_t address)
{
	struct wire_page m = { .address = address };

	WIRE_INIT(m, WIRE_POISON, 0);
	tell(server, r, &m);
}

/* ------------------------------------------------------------------ the session's thread */

static void *session_main(void *arg)
{
	struct session *c = arg;
	bool go_on = true;

	while (go_on) {
		int fds[WIRE_MAX_FDS], r;
		unsigned int nr_fds = 0;

		r = wire_recv(c->control_fd, &c->message, fds, &nr_fds, -1);
		/* Not answered: the next daemon says RESUME, or the process is about to end. */
		while (atomic_load(&c->server->stopping))
			(void)pause();
		if (r == -EMFILE) {
			/* What came is lost, but whose it was is known: the client is told, and may ask again. */
			go_on = message_no_descriptor(c);
			continue;
		}
		if (r != 1) {
			if (r < 0 && r != -ECONNRESET)
				log_info("client %s (pid %d, uid %u) sent what is no message and is closed: %s",
					 c->name, c->pid, c->uid, strerror(-r));
			break;
		}
		go_on = message_answer(c, fds);
		for (unsigned int i = 0; i < nr_fds; i++)
			if (fds[i] >= 0)
				(void)close(fds[i]);
	}
	session_end(c);
	return NULL;
}
