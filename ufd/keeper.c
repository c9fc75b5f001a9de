/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keeper (see keeper.h) and the daemon's side of it. Knows sockets, processes and descriptors; not what any of them
 * is for.
 *
 * One packet is one message: struct message, then nbytes of a blob; descriptors beside it. Who connects says HELLO with
 * its version and is answered WELCOME with ours; the head and these two never change. At most one connection is *the
 * daemon's*. While it lives, one other, the *taker*, may wait until it lets go:
 *
 *      no daemon --HELLO--> daemon --hang-up--> no daemon --KEEPER_RESPAWN_MS--> a daemon of our own
 *                           daemon --HELLO of a taker--> LET_GO is sent --hang-up--> the taker is the daemon
 *                                                           \--TAKE_OVER_MS--> SIGKILL --hang-up--/
 *
 * What must hold:
 *  - Whatever the daemon's sendmsg() has returned for is kept: the queue of a socket outlives who filled it, and it is
 *    read to its end before a hang-up is one.
 *  - The keeper waits for nobody: not for a daemon that does not read, and not for the server of a file. (Any close of
 *    a descriptor, also an exec's, asks a FUSE server to flush, and waits.)
 *  - The name in the file system is always one of a listening socket or of a dead one, never somebody else's.
 *
 * Threads: the keeper has one, and one more for as long as a file is being closed.
 */
#include "ufd/keeper.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#include "lib/base/log.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* 6.5 */
#endif
#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x1000
#endif

#define ENV "WEIGHTD_KEEPER"
#define ENV_VALUE "3"     /* DAEMON_FD */
#define MAGIC 0x6b647764u /* "dwdk" */
#define START_BYTES 32768 /* folder, program and arguments of a daemon */
#define LIVED_MS 500      /* a daemon that lived shorter did not start */
#define TAKE_OVER_MS 3000 /* what the daemon has to let go */
#define ANSWER_MS 5000    /* a keeper that says nothing for so long is stuck */
#define FRESH 8           /* connections that have not said HELLO */
#define BATCH 256         /* messages before others have their turn */
#define SPARE_FDS 32      /* not given to objects: connections and a new daemon need some */
#define DAEMON_FD 3       /* a daemon of our own finds its connection there */
#define LOW_FDS 64        /* no object is below: the kernel unshares descriptors a word of its bitmap at a time */

enum message_type {
	/* from the daemon */
	HELLO = 1, /* key: take over */
	BYE,
	START, /* blob: how to start a daemon, see start_block() */
	PUT,
	DEL,
	LIST, /* key: kind; 0: all */
	/* from the keeper */
	WELCOME = 64, /* status; key: pid of the daemon that lives; blob: a text where starting failed */
	OBJECT,
	END,
	LET_GO,
};

struct message {
	uint32_t magic, type, version;
	int32_t status;
	uint64_t key;
	uint32_t nbytes, nr_fds; /* nr_fds: as sent; fewer come where the receiver has no descriptor left */
};

/* ---- messages, both sides */

static int64_t now_ms(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int send_message(int socket, struct message m, const void *blob, const int *fds, int flags)
{
	union {
		struct cmsghdr h;
		char bytes[CMSG_SPACE(KEEPER_FDS * sizeof(int))];
	} control = { .bytes = { 0 } };
	struct iovec iov[2] = { { &m, sizeof(m) }, { (void *)blob, m.nbytes } };
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = m.nbytes ? 2 : 1 };

	m.magic = MAGIC;
	m.version = KEEPER_VERSION;
	if (m.nr_fds) {
		msg.msg_control = &control;
		msg.msg_controllen = CMSG_SPACE(m.nr_fds * sizeof(int));
		control.h.cmsg_level = SOL_SOCKET;
		control.h.cmsg_type = SCM_RIGHTS;
		control.h.cmsg_len = CMSG_LEN(m.nr_fds * sizeof(int));
		memcpy(CMSG_DATA(&control.h), fds, m.nr_fds * sizeof(int));
	}
	for (int tries = 0; sendmsg(socket, &msg, flags | MSG_NOSIGNAL) < 0;) {
		if (errno == ETOOMANYREFS) { /* descriptors of this user in flight, against RLIMIT_NOFILE */
			if ((flags & MSG_DONTWAIT) || tries++ == ANSWER_MS)
				return -EAGAIN;
			(void)poll(NULL, 0, 1);
		} else if (errno == ECONNRESET) {
			return -EPIPE;
		} else if (errno != EINTR) {
			return -errno;
		}
	}
	return 0;
}

static void close_fds(int *fds, unsigned int nr)
{
	for (unsigned int i = 0; i < nr; i++)
		if (fds[i] >= 0) {
			(void)close(fds[i]);
			fds[i] = -1;
		}
}

/*
 * Waits for none. 1: a message, with *ret_nr_fds descriptors (close-on-exec; at most as many as it says); 0: the peer
 * has hung up and nothing it sent is left; -EAGAIN; -EPROTO: none of ours (its descriptors are closed).
 */
static int recv_message(int socket, struct message *ret, void *blob, size_t size, int fds[static KEEPER_FDS],
			unsigned int *ret_nr_fds)
{
	union {
		struct cmsghdr h;
		char bytes[CMSG_SPACE(KEEPER_FDS * sizeof(int))];
	} control;
	struct iovec iov[2] = { { ret, sizeof(*ret) }, { blob, size } };
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = 2, .msg_control = &control };
	unsigned int nr = 0;
	ssize_t n;

	for (unsigned int i = 0; i < KEEPER_FDS; i++)
		fds[i] = -1;
	/* ECONNRESET: the peer died with something of ours unread. Told once; what the peer sent comes after it. */
	do {
		msg.msg_controllen = sizeof(control);
		n = recvmsg(socket, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (n < 0 && (errno == EINTR || errno == ECONNRESET));
	if (n <= 0)
		return n < 0 ? -errno : 0;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c))
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
			nr = (unsigned int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
			memcpy(fds, CMSG_DATA(c), nr * sizeof(int));
		}
	if ((size_t)n < sizeof(*ret) || (msg.msg_flags & MSG_TRUNC) || ret->magic != MAGIC ||
	    ret->nbytes != (size_t)n - sizeof(*ret) || nr > ret->nr_fds) {
		close_fds(fds, nr);
		return -EPROTO;
	}
	*ret_nr_fds = nr;
	return 1;
}

static int recv_within(int socket, struct message *ret, void *blob, size_t size, int fds[static KEEPER_FDS],
		       unsigned int *ret_nr_fds, int timeout_ms)
{
	int64_t end = now_ms() + timeout_ms;

	for (;;) {
		int r = recv_message(socket, ret, blob, size, fds, ret_nr_fds);
		struct pollfd p = { .fd = socket, .events = POLLIN };
		int64_t left = end - now_ms();

		if (r != -EAGAIN)
			return r;
		if (left <= 0)
			return -ETIMEDOUT;
		(void)poll(&p, 1, (int)left);
	}
}

static int address_of(const char *path, const char *suffix, struct sockaddr_un *ret)
{
	int n;

	*ret = (struct sockaddr_un){ .sun_family = AF_UNIX };
	n = snprintf(ret->sun_path, sizeof(ret->sun_path), "%s%s", path, suffix);
	return n < 0 || (size_t)n >= sizeof(ret->sun_path) ? -ENAMETOOLONG : 0;
}

/* ---- the keeper: what it has */

struct object {
	uint64_t key;
	unsigned char *blob;
	uint32_t nbytes, nr_fds;
	int fds[KEEPER_FDS];
};

struct peer {
	int fd, pidfd; /* -1: none */
	pid_t pid;
};

struct keep {
	struct sockaddr_un address;
	struct stat name; /* what we have bound */
	int listener, signals;
	struct peer daemon, taker, fresh[FRESH];
	unsigned int next_fresh;
	bool started; /* the daemon is of our own */
	bool ready;   /* it has said HELLO */
	bool asked;   /* it was told to let go */
	bool listing; /* it is being told of objects of these keys */
	uint64_t list_from, list_to;
	int64_t since;       /* when the daemon came */
	int64_t due;         /* 0, or when we are to act: without a daemon start one, with one end it */
	unsigned int failed; /* daemons of our own in a row that did not live long */
	bool told_short;
	int limit; /* on descriptors */
	char oom[16];
	struct object *objects; /* by key */
	size_t nr, size;
	char start[START_BYTES];
	size_t start_bytes;
};

static const struct peer no_peer = { .fd = -1, .pidfd = -1 };

static void drop_peer(struct peer *p)
{
	if (p->fd >= 0)
		(void)close(p->fd);
	if (p->pidfd >= 0)
		(void)close(p->pidfd);
	*p = no_peer;
}

/* A file has a name; sockets, userfaultfds and memfds ("/memfd:") are closed without waiting for anybody. */
static bool may_wait(int fd)
{
	char link[32], name[8];
	ssize_t n;

	(void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	n = readlink(link, name, sizeof(name));
	return n < 0 || (name[0] == '/' && (n < 7 || memcmp(name, "/memfd:", 7) != 0));
}

struct closing {
	int fds[KEEPER_FDS];
};

static void *close_all(void *arg)
{
	struct closing *c = arg;

	close_fds(c->fds, KEEPER_FDS);
	free(c);
	return NULL;
}

static void let_fds_go(int *fds, unsigned int nr)
{
	struct closing *c;
	unsigned int nr_waiting = 0;
	int waiting[KEEPER_FDS];
	pthread_attr_t attr;
	pthread_t thread;

	for (unsigned int i = 0; i < nr; i++) {
		if (may_wait(fds[i]))
			waiting[nr_waiting++] = fds[i];
		else
			(void)close(fds[i]);
	}
	if (!nr_waiting)
		return;
	c = malloc(sizeof(*c));
	if (c) {
		for (unsigned int i = 0; i < KEEPER_FDS; i++)
			c->fds[i] = i < nr_waiting ? waiting[i] : -1;
		if (pthread_attr_init(&attr) == 0) {
			int r;

			(void)pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
			(void)pthread_attr_setstacksize(&attr, 65536);
			r = pthread_create(&thread, &attr, close_all, c);
			(void)pthread_attr_destroy(&attr);
			if (r == 0)
				return;
		}
		free(c);
	}
	close_fds(waiting, nr_waiting);
}

static void object_done(struct object *o)
{
	let_fds_go(o->fds, o->nr_fds);
	free(o->blob);
}

/* The name goes before the socket: nobody takes it for a dead one's meanwhile. */
static void forget_name(struct keep *k)
{
	struct stat st;

	if (lstat(k->address.sun_path, &st) == 0 && st.st_ino == k->name.st_ino && st.st_dev == k->name.st_dev)
		(void)unlink(k->address.sun_path);
}

/* Clients hear of it first: the rest is closed by the kernel, which may wait for the server of a file. */
static _Noreturn void end(struct keep *k)
{
	forget_name(k);
	for (size_t i = 0; i < k->nr; i++)
		for (unsigned int j = 0; j < k->objects[i].nr_fds; j++)
			if (!may_wait(k->objects[i].fds[j]))
				(void)close(k->objects[i].fds[j]);
	drop_peer(&k->taker);
	drop_peer(&k->daemon);
	_exit(0);
}

/* Index of the first object whose key is not below. */
static size_t find(const struct keep *k, uint64_t key)
{
	size_t low = 0, high = k->nr;

	while (low < high) {
		size_t mid = low + (high - low) / 2;

		if (k->objects[mid].key < key)
			low = mid + 1;
		else
			high = mid;
	}
	return low;
}

/* Without memory, what the daemon believes kept would be lost: it had better know. */
static _Noreturn void out_of_memory(struct keep *k)
{
	log_error("keeper: out of memory; the daemon goes on without a keeper");
	end(k);
}

static void put(struct keep *k, const struct message *m, const void *blob, const int *fds, unsigned int nr_fds)
{
	struct object o = { .key = m->key, .nbytes = m->nbytes };
	size_t i = find(k, m->key);

	for (unsigned int j = 0; j < nr_fds; j++) {
		if (fds[j] < k->limit - SPARE_FDS)
			o.fds[o.nr_fds++] = fds[j];
		else
			(void)let_fds_go((int[]){ fds[j] }, 1);
	}
	if (o.nr_fds < m->nr_fds && !k->told_short) {
		k->told_short = true;
		log_error(
			"keeper: no file descriptor left (%d): what is kept is not whole; raise the hard limit on open "
			"files (ulimit -Hn, LimitNOFILE=)",
			k->limit);
	}
	if (o.nbytes) {
		o.blob = malloc(o.nbytes);
		if (!o.blob)
			out_of_memory(k);
		memcpy(o.blob, blob, o.nbytes);
	}
	if (i < k->nr && k->objects[i].key == m->key) {
		object_done(&k->objects[i]);
		k->objects[i] = o;
		return;
	}
	if (k->nr == k->size) {
		size_t size = k->size ? 2 * k->size : 256;
		struct object *grown = realloc(k->objects, size * sizeof(*grown));

		if (!grown)
			out_of_memory(k);
		k->objects = grown;
		k->size = size;
	}
	memmove(&k->objects[i + 1], &k->objects[i], (k->nr - i) * sizeof(o));
	k->objects[i] = o;
	k->nr++;
}

static void del(struct keep *k, uint64_t key)
{
	size_t i = find(k, key);

	if (i == k->nr || k->objects[i].key != key)
		return;
	object_done(&k->objects[i]);
	k->nr--;
	memmove(&k->objects[i], &k->objects[i + 1], (k->nr - i) * sizeof(k->objects[0]));
}

/* ---- the keeper: daemons */

static void welcome(const struct keep *k, int fd, int status)
{
	struct message m = { .type = WELCOME, .status = status, .key = status ? (uint64_t)k->daemon.pid : 0 };

	(void)send_message(fd, m, NULL, NULL, MSG_DONTWAIT); /* a peer that has gone hangs up */
}

static void have_daemon(struct keep *k, struct peer p, bool started, bool ready)
{
	k->daemon = p;
	k->started = started;
	k->ready = ready;
	k->asked = k->listing = false;
	k->since = now_ms();
	k->due = 0;
}

/* The daemon waits for no word of ours before its HELLO is answered and while it reads a list: later, then. */
static void ask_daemon(struct keep *k)
{
	struct message m = { .type = LET_GO };

	if (k->taker.fd >= 0 && k->ready && !k->listing && !k->asked)
		k->asked = send_message(k->daemon.fd, m, NULL, NULL, MSG_DONTWAIT) == 0;
}

/* As much of a list as the daemon's queue takes. */
static void tell_list(struct keep *k)
{
	while (k->listing) {
		size_t i = find(k, k->list_from);
		struct message m = { .type = END };
		const struct object *o = NULL;

		if (i < k->nr && k->objects[i].key <= k->list_to) {
			o = &k->objects[i];
			m = (struct message){ .type = OBJECT, .key = o->key, .nbytes = o->nbytes, .nr_fds = o->nr_fds };
		}
		if (send_message(k->daemon.fd, m, o ? o->blob : NULL, o ? o->fds : NULL, MSG_DONTWAIT) < 0)
			return; /* full; or a hang-up, which is seen */
		k->listing = o != NULL;
		if (o)
			k->list_from = o->key + 1; /* UINT64_MAX is no key */
	}
	ask_daemon(k);
}

static void daemon_failed(struct keep *k)
{
	if (++k->failed >= KEEPER_RESPAWN_TRIES) {
		log_error("keeper: the daemon was started %u times and ended each time within %d ms: given up; clients "
			  "go on with mapped files. Its own messages say why; then start it again",
			  k->failed, LIVED_MS);
		end(k);
	}
	k->due = now_ms() + KEEPER_RESPAWN_MS;
}

static void on_hang_up(struct keep *k)
{
	pid_t pid = k->daemon.pid;
	bool short_life = k->started && now_ms() - k->since < LIVED_MS;
	struct peer taker = k->taker;

	drop_peer(&k->daemon);
	if (taker.fd >= 0) {
		k->taker = no_peer;
		have_daemon(k, taker, false, true);
		welcome(k, taker.fd, 0);
		return;
	}
	if (short_life) {
		daemon_failed(k);
	} else {
		k->failed = 0;
		k->due = now_ms() + (k->start_bytes ? KEEPER_RESPAWN_MS : KEEPER_ADOPT_MS);
	}
	log_error("keeper: the daemon (pid %d) has ended without a word; %s", (int)pid,
		  k->start_bytes ? "it is started again" : "waiting for the next one");
}

/* In the child of vfork's kind: its memory is its own, its descriptors are ours until it unshares them. */
static _Noreturn void run_daemon(const struct keep *k, char *const *argv)
{
	sigset_t none;
	int fd;

	/* From LOW_FDS on not copied, so not closed: no file's server is asked to flush (as exec's closing would). */
	if (close_range(DAEMON_FD + 1, ~0U, CLOSE_RANGE_UNSHARE) < 0)
		_exit(127);
	for (int s = 1; s < NSIG; s++)
		(void)signal(s, SIG_DFL);
	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
	fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
	if (fd >= 0) {
		(void)!write(fd, k->oom, strlen(k->oom));
		(void)close(fd);
	}
	(void)!chdir(argv[0]);
	(void)execv(argv[1], argv + 2);
	(void)execv("/proc/self/exe", argv + 2); /* it was removed: ours is the same */
	log_error("keeper: cannot start %s: %s", argv[1], strerror(errno));
	_exit(127);
}

static void start_daemon(struct keep *k)
{
	cleanup_free char **argv = NULL;
	struct peer p = no_peer;
	int pair[2];
	size_t nr = 0;
	long pid;

	for (size_t i = 0; i < k->start_bytes; i++)
		nr += k->start[i] == '\0';
	argv = calloc(nr + 1, sizeof(*argv));
	if (!argv)
		out_of_memory(k);
	for (size_t i = 0, at = 0; i < nr; i++, at += strlen(k->start + at) + 1)
		argv[i] = k->start + at;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) {
		log_error("keeper: cannot make a socket for the daemon: %s", strerror(errno));
		daemon_failed(k);
		return;
	}
	(void)dup3(pair[1], DAEMON_FD, 0);
	(void)close(pair[1]);
	/* The third argument is where the pidfd goes; CLONE_VFORK: until it has taken DAEMON_FD with it. */
	pid = syscall(SYS_clone, CLONE_FILES | CLONE_VFORK | CLONE_PIDFD | SIGCHLD, NULL, &p.pidfd, NULL, NULL);
	if (pid == 0)
		run_daemon(k, argv);
	(void)dup3(k->signals, DAEMON_FD, O_CLOEXEC);
	if (pid < 0) {
		log_error("keeper: cannot start the daemon: %s", strerror(errno));
		(void)close(pair[0]);
		daemon_failed(k);
		return;
	}
	p.fd = pair[0];
	p.pid = (pid_t)pid;
	have_daemon(k, p, true, false);
}

static void on_due(struct keep *k)
{
	k->due = 0;
	if (k->daemon.fd >= 0) {
		if (k->daemon.pidfd < 0 || syscall(SYS_pidfd_send_signal, k->daemon.pidfd, SIGKILL, NULL, 0) < 0)
			log_error("keeper: the daemon (pid %d) does not let go, and cannot be killed: end it by hand",
				  (int)k->daemon.pid);
		else
			log_error("keeper: the daemon (pid %d) did not let go within %d ms: killed", (int)k->daemon.pid,
				  TAKE_OVER_MS);
	} else if (k->start_bytes) {
		start_daemon(k);
	} else {
		log_error("keeper: no daemon came within %d s: given up", KEEPER_ADOPT_MS / 1000);
		end(k);
	}
}

static void other_version(struct keep *k, int fd, uint32_t version, bool is_daemon)
{
	bool hopeless = is_daemon || k->daemon.fd < 0;

	if (hopeless) {
		/* Nobody of our version will come: the one that is there must be able to start afresh. */
		log_error("keeper: the daemon speaks version %u, this keeper %u: it starts afresh", version,
			  KEEPER_VERSION);
		forget_name(k);
	}
	welcome(k, fd, -EPROTONOSUPPORT);
	if (hopeless)
		end(k);
}

static void on_daemon(struct keep *k)
{
	static unsigned char blob[START_BYTES];

	for (unsigned int i = 0; i < BATCH; i++) {
		struct message m;
		int fds[KEEPER_FDS];
		unsigned int nr_fds;
		int r = recv_message(k->daemon.fd, &m, blob, sizeof(blob), fds, &nr_fds);

		if (r == -EAGAIN)
			return;
		if (r <= 0 && r != -EPROTO) {
			on_hang_up(k);
			return;
		}
		if (r > 0 && m.type == PUT && m.nbytes <= KEEPER_BLOB) {
			put(k, &m, blob, fds, nr_fds);
			continue;
		}
		if (r > 0)
			let_fds_go(fds, nr_fds);
		if (r > 0 && m.type == HELLO && m.version != KEEPER_VERSION) {
			other_version(k, k->daemon.fd, m.version, true);
		} else if (r > 0 && m.type == HELLO) {
			k->ready = true;
			welcome(k, k->daemon.fd, 0);
			ask_daemon(k);
		} else if (r > 0 && m.type == DEL) {
			del(k, m.key);
		} else if (r > 0 && m.type == LIST) {
			k->listing = true;
			k->list_from = KEEP_KEY(m.key, 0);
			k->list_to = m.key ? KEEP_KEY(m.key + 1, 0) - 1 : UINT64_MAX;
			tell_list(k);
		} else if (r > 0 && m.type == START && (!m.nbytes || !blob[m.nbytes - 1])) {
			memcpy(k->start, blob, m.nbytes);
			k->start_bytes = m.nbytes;
		} else if (r > 0 && m.type == BYE) {
			end(k);
		} else {
			log_error("keeper: the daemon (pid %d) sent what no daemon sends; ignored", (int)k->daemon.pid);
		}
	}
}

static void on_fresh(struct keep *k, struct peer *p)
{
	struct message m;
	int fds[KEEPER_FDS];
	unsigned int nr_fds;
	unsigned char none;
	int r = recv_message(p->fd, &m, &none, 0, fds, &nr_fds);

	if (r == -EAGAIN)
		return;
	if (r > 0)
		let_fds_go(fds, nr_fds);
	if (r <= 0 || m.type != HELLO) {
		drop_peer(p);
	} else if (m.version != KEEPER_VERSION) {
		other_version(k, p->fd, m.version, false);
		drop_peer(p);
	} else if (k->daemon.fd < 0) {
		have_daemon(k, *p, false, true);
		*p = no_peer;
		welcome(k, k->daemon.fd, 0);
	} else if (!m.key || k->taker.fd >= 0) {
		welcome(k, p->fd, -EBUSY);
		drop_peer(p);
	} else {
		k->taker = *p;
		*p = no_peer;
		k->due = now_ms() + TAKE_OVER_MS;
		ask_daemon(k);
	}
}

/* Its answer may come before it is heard only if it has gone. */
static void on_taker(struct keep *k)
{
	drop_peer(&k->taker);
	k->due = 0;
}

/* Root of a container that got the whole folder is no daemon of ours: what is kept here can be written to. */
static bool same_pid_ns(pid_t pid)
{
	struct stat ours, its;
	char path[64];

	(void)snprintf(path, sizeof(path), "/proc/%d/ns/pid", (int)pid);
	return pid > 0 && stat("/proc/self/ns/pid", &ours) == 0 && stat(path, &its) == 0 && ours.st_dev == its.st_dev &&
	       ours.st_ino == its.st_ino;
}

static void on_connect(struct keep *k)
{
	int fd = accept4(k->listener, NULL, NULL, SOCK_CLOEXEC);
	struct ucred cred;
	struct peer *p;
	socklen_t n = sizeof(cred);

	if (fd < 0) {
		(void)poll(NULL, 0, 10); /* no descriptor in the whole system: it is still there next time */
		return;
	}
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &n) < 0 || (cred.uid != 0 && cred.uid != geteuid()) ||
	    !same_pid_ns(cred.pid)) {
		(void)close(fd);
		return;
	}
	p = &k->fresh[k->next_fresh++ % FRESH]; /* who was there longest and said nothing goes */
	drop_peer(p);
	p->fd = fd;
	p->pid = cred.pid;
	n = sizeof(p->pidfd);
	if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &p->pidfd, &n) < 0)
		p->pidfd = cred.pid > 0 ? (int)syscall(SYS_pidfd_open, cred.pid, 0) : -1;
}

static _Noreturn void serve(struct keep *k)
{
	for (;;) {
		struct pollfd p[4 + FRESH] = {
			{ .fd = k->daemon.fd, .events = (short)(k->listing ? POLLIN | POLLOUT : POLLIN) },
			{ .fd = k->taker.fd, .events = POLLIN },
			{ .fd = k->listener, .events = POLLIN },
			{ .fd = k->signals, .events = POLLIN },
		};
		int64_t left = k->due ? MAX(k->due - now_ms(), 0) : -1;

		for (unsigned int i = 0; i < FRESH; i++)
			p[4 + i] = (struct pollfd){ .fd = k->fresh[i].fd, .events = POLLIN };
		if (poll(p, ARRAY_SIZE(p), (int)left) < 0)
			continue;
		/* The daemon's end first: who comes after it is let in then. */
		if (p[0].revents & ~POLLOUT)
			on_daemon(k);
		if (k->listing)
			tell_list(k);
		if (p[1].revents && k->taker.fd == p[1].fd)
			on_taker(k);
		for (unsigned int i = 0; i < FRESH; i++)
			if (p[4 + i].revents)
				on_fresh(k, &k->fresh[i]);
		if (p[2].revents)
			on_connect(k);
		if (p[3].revents) {
			struct signalfd_siginfo info;

			(void)!read(k->signals, &info, sizeof(info));
			while (waitpid(-1, NULL, WNOHANG) > 0)
				;
		}
		if (k->due && now_ms() >= k->due)
			on_due(k);
	}
}

/* ---- the keeper: its beginning */

/* A socket that refuses has nobody listening: the lock keeps those out who are just about to. */
static int remove_dead(const struct sockaddr_un *address, struct wd_err *err)
{
	cleanup_close int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct stat st;

	if (fd < 0)
		return err_set(err, -errno, "cannot make a socket: %s", strerror(errno));
	if (lstat(address->sun_path, &st) < 0)
		return 0; /* none; or bind() will say why */
	if (!S_ISSOCK(st.st_mode))
		return err_set(err, -EEXIST, "%s: is in the way, and no socket; remove it", address->sun_path);
	if (connect(fd, (const struct sockaddr *)address, sizeof(*address)) == 0 || errno != ECONNREFUSED)
		return err_set(err, -EBUSY, "%s: another keeper is there; see weightd serve --takeover",
			       address->sun_path);
	(void)unlink(address->sun_path);
	return 0;
}

/* The lock file is there only while it is held; who waited for one that was removed tries again. */
static int lock_name(const char *path, struct wd_err *err)
{
	for (;;) {
		int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
		struct stat ours, there;

		if (fd < 0)
			return err_set(err, -errno, "%s: cannot make it: %s", path, strerror(errno));
		if (flock(fd, LOCK_EX) < 0) {
			int r = -errno;

			(void)close(fd);
			return err_set(err, r, "%s: cannot lock it: %s", path, strerror(-r));
		}
		if (fstat(fd, &ours) == 0 && lstat(path, &there) == 0 && ours.st_ino == there.st_ino &&
		    ours.st_dev == there.st_dev)
			return fd;
		(void)close(fd);
	}
}

static int listen_there(struct keep *k, const char *socket_path, struct wd_err *err)
{
	struct sockaddr_un lock;
	cleanup_close int held = -1;
	int r = address_of(socket_path, ".keeper", &k->address);
	mode_t mask;

	if (r == 0)
		r = address_of(socket_path, ".keeper.lock", &lock);
	if (r < 0)
		return err_set(err, r, "%s: the path is too long for a socket beside it", socket_path);
	held = lock_name(lock.sun_path, err);
	if (held < 0)
		return held;
	r = remove_dead(&k->address, err);
	if (r == 0) {
		mask = umask(0177); /* no moment in which others could connect */
		if (bind(k->listener, (const struct sockaddr *)&k->address, sizeof(k->address)) < 0)
			r = err_set(err, -errno, "%s: cannot listen: %s", k->address.sun_path, strerror(errno));
		else if (listen(k->listener, SOMAXCONN) < 0 || lstat(k->address.sun_path, &k->name) < 0)
			r = err_set(err, -errno, "%s: cannot listen: %s", k->address.sun_path, strerror(errno));
		(void)umask(mask);
	}
	(void)unlink(lock.sun_path);
	return r;
}

static void unlikely_victim(struct keep *k)
{
	cleanup_close int fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);

	if (fd < 0)
		return;
	if (read(fd, k->oom, sizeof(k->oom) - 1) > 0)
		(void)!pwrite(fd, "-900", 4, 0); /* only for who may; what holds for us is better than for none */
}

/* Everything but the standard descriptors and the daemon's connection is let go; input and output are nothing. */
static int settle(struct keep *k, int fd)
{
	struct rlimit limit;
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	if (null >= 0) {
		for (int i = 0; i <= STDERR_FILENO; i++)
			if (i < STDERR_FILENO || fcntl(i, F_GETFD) < 0)
				(void)dup2(null, i);
	}
	k->daemon.fd = fcntl(fd, F_DUPFD_CLOEXEC, DAEMON_FD + 1);
	if (k->daemon.fd < 0)
		return -errno;
	(void)close_range(STDERR_FILENO + 1, (unsigned int)k->daemon.fd - 1, 0);
	(void)close_range((unsigned int)k->daemon.fd + 1, ~0U, 0);
	(void)dup3(k->daemon.fd, DAEMON_FD, O_CLOEXEC); /* taken, until something better takes it */
	k->limit = 1024;
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		limit.rlim_cur = limit.rlim_max;
		(void)setrlimit(RLIMIT_NOFILE, &limit);
		k->limit = (int)MIN(limit.rlim_max, (rlim_t)INT32_MAX);
	}
	return 0;
}

static _Noreturn void keeper_main(int fd, const char *socket_path, const char *start, size_t start_bytes, pid_t daemon)
{
	static struct keep k;
	struct wd_err err = { "cannot start" };
	struct message m = { .type = WELCOME };
	sigset_t children;
	int low;

	(void)setsid();
	(void)prctl(PR_SET_NAME, "wd-keeper");
	(void)setenv(ENV, ENV_VALUE, 1); /* for the daemons of our own */
	for (size_t i = 0; i < 4; i++)
		(void)signal((int[]){ SIGINT, SIGHUP, SIGTERM, SIGPIPE }[i], SIG_IGN);
	(void)signal(SIGCHLD, SIG_DFL);
	(void)sigemptyset(&children);
	(void)sigaddset(&children, SIGCHLD);
	(void)sigprocmask(SIG_SETMASK, &children, NULL);
	k.daemon = k.taker = no_peer;
	for (unsigned int i = 0; i < FRESH; i++)
		k.fresh[i] = no_peer;
	memcpy(k.start, start, start_bytes);
	k.start_bytes = start_bytes;
	m.status = settle(&k, fd);
	if (m.status < 0)
		_exit(1); /* the daemon sees the hang-up */
	k.signals = signalfd(-1, &children, SFD_CLOEXEC | SFD_NONBLOCK);
	k.listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	k.daemon.pidfd = (int)syscall(SYS_pidfd_open, daemon, 0);
	if (k.signals < 0 || k.listener < 0)
		m.status = err_set(&err, -errno, "cannot make a socket: %s", strerror(errno));
	else
		m.status = listen_there(&k, socket_path, &err);
	if (m.status < 0) {
		m.nbytes = (uint32_t)strlen(err.text) + 1;
		(void)send_message(k.daemon.fd, m, err.text, NULL, 0);
		_exit(1);
	}
	(void)dup3(k.signals, DAEMON_FD, O_CLOEXEC);
	while ((low = fcntl(k.signals, F_DUPFD_CLOEXEC, 0)) >= 0 && low < LOW_FDS)
		;
	(void)close(low);
	unlikely_victim(&k);
	if (socket_path[0] == '/')
		(void)!chdir("/"); /* hold no file system busy */
	have_daemon(&k, (struct peer){ k.daemon.fd, k.daemon.pidfd, daemon }, false, true);
	(void)send_message(k.daemon.fd, m, NULL, NULL, MSG_DONTWAIT);
	serve(&k);
}

/* ---- the daemon's side */

struct keeper {
	int fd;
	pid_t pid;
	bool child; /* ours: its end is waited for */
	bool asked;
};

/* Folder, program, arguments, each with its NUL. Return: bytes; 0 for no argv; negative errno. */
static int start_block(char *const *argv, char block[static START_BYTES], struct wd_err *err)
{
	size_t at;
	ssize_t n;

	if (!argv)
		return 0;
	if (!getcwd(block, START_BYTES))
		(void)strcpy(block, "/"); /* it was removed */
	at = strlen(block) + 1;
	n = readlink("/proc/self/exe", block + at, START_BYTES - at - 1);
	if (n < 0)
		return err_set(err, -errno, "/proc/self/exe: cannot find out which program this is: %s",
			       strerror(errno));
	at += (size_t)n;
	block[at++] = '\0';
	for (size_t i = 0; argv[i]; i++) {
		size_t bytes = strlen(argv[i]) + 1;

		if (bytes > START_BYTES - at)
			return err_set(err, -E2BIG, "the arguments are too long for a daemon that is started again");
		memcpy(block + at, argv[i], bytes);
		at += bytes;
	}
	return (int)at;
}

/* A keeper that does not read for so long counts as dead: no thread of ours stands for it for ever. */
static void limit_sends(int fd)
{
	struct timeval limit = { .tv_sec = ANSWER_MS / 1000 };

	(void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

static int keeper_new(int fd, pid_t pid, bool child, struct keeper **ret)
{
	struct keeper *k = calloc(1, sizeof(*k));

	if (!k)
		return -ENOMEM;
	limit_sends(fd);
	*k = (struct keeper){ .fd = fd, .pid = pid, .child = child };
	*ret = k;
	return 0;
}

int keeper_start(const char *socket_path, char *const *argv, struct keeper **ret, struct wd_err *err)
{
	char start[START_BYTES], text[sizeof(err->text)];
	int pair[2], fds[KEEPER_FDS], nr_start, r;
	pid_t self = getpid(), pid;
	struct message m;
	unsigned int nr_fds;

	nr_start = start_block(argv, start, err);
	if (nr_start < 0)
		return nr_start;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return err_set(err, -errno, "keeper: cannot make a socket: %s", strerror(errno));
	pid = fork();
	if (pid == 0)
		keeper_main(pair[1], socket_path, start, (size_t)nr_start, self);
	r = pid < 0 ? -errno : 0;
	(void)close(pair[1]);
	if (r < 0) {
		(void)close(pair[0]);
		return err_set(err, r, "keeper: cannot start a process: %s", strerror(-r));
	}
	r = recv_within(pair[0], &m, text, sizeof(text), fds, &nr_fds, ANSWER_MS);
	if (r > 0 && m.type == WELCOME && m.status == 0) {
		r = keeper_new(pair[0], pid, true, ret);
		if (r == 0)
			return 0;
	} else if (r > 0 && m.type == WELCOME && m.nbytes > 0) {
		text[m.nbytes - 1] = '\0';
		r = err_set(err, m.status, "keeper: %s", text);
	} else {
		r = err_set(err, r < 0 ? r : -EPIPE, "keeper: it did not start: %s",
			    r < 0 ? strerror(-r) : "it ended at once");
	}
	(void)kill(pid, SIGKILL);
	(void)close(pair[0]);
	while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
		;
	return r;
}

/* The connection that a keeper has given the daemon it started. -1: there is none. */
static int inherited(void)
{
	const char *value = getenv(ENV);
	int fd, type = 0;
	socklen_t n = sizeof(type);
	char *rest;
	long number;

	if (!value)
		return -1;
	errno = 0;
	number = strtol(value, &rest, 10);
	fd = errno || *rest || rest == value || number < 0 || number > INT32_MAX ? -1 : (int)number;
	(void)unsetenv(ENV);
	if (fd < 0 || getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n) < 0 || type != SOCK_SEQPACKET)
		return -1;
	(void)fcntl(fd, F_SETFD, FD_CLOEXEC);
	return fd;
}

static int connect_to(const char *socket_path, int *ret, struct wd_err *err)
{
	cleanup_close int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	struct sockaddr_un address;
	int r;

	if (fd < 0)
		return err_set(err, -errno, "keeper: cannot make a socket: %s", strerror(errno));
	limit_sends(fd); /* connecting, too */
	r = address_of(socket_path, ".keeper", &address);
	if (r < 0)
		return err_set(err, r, "%s: the path is too long for a keeper's socket beside it", socket_path);
	if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) < 0) {
		if (errno == ENOENT || errno == ECONNREFUSED)
			return err_set(err, -ENOENT, "%s: no keeper is there", address.sun_path);
		if (errno == EAGAIN)
			return err_set(err, -ETIMEDOUT, "%s: the keeper does not answer", address.sun_path);
		return err_set(err, -errno, "%s: cannot reach the keeper: %s", address.sun_path, strerror(errno));
	}
	*ret = TAKE_FD(fd);
	return 0;
}

int keeper_adopt(const char *socket_path, bool take_over, struct keeper **ret, int *ret_pid, struct wd_err *err)
{
	struct message m = { .type = HELLO, .key = take_over };
	cleanup_close int fd = inherited();
	int fds[KEEPER_FDS], r;
	struct ucred cred = { 0 };
	socklen_t n = sizeof(cred);
	unsigned int nr_fds;
	uint32_t version;
	char text[1];

	if (fd < 0) {
		r = connect_to(socket_path, &fd, err);
		if (r < 0)
			return r;
	}
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &n) < 0)
		return err_set(err, -errno, "keeper: cannot see who it is: %s", strerror(errno));
	if (cred.uid != 0 && cred.uid != geteuid())
		return err_set(err, -EACCES,
			       "%s.keeper: is of user %u, who is neither root nor this one: not trusted; remove it",
			       socket_path, cred.uid);
	r = send_message(fd, m, NULL, NULL, 0);
	if (r == 0)
		r = recv_within(fd, &m, text, 0, fds, &nr_fds, ANSWER_MS + (take_over ? TAKE_OVER_MS : 0));
	if (r == -ETIMEDOUT)
		return err_set(err, r, "%s.keeper: %s within %d s; end the keeper (pid %d) by kill -9", socket_path,
			       take_over ? "the daemon did not let go" : "no answer",
			       (ANSWER_MS + (take_over ? TAKE_OVER_MS : 0)) / 1000, (int)cred.pid);
	if (r == 0 || r == -EPIPE) /* it ended just now */
		return err_set(err, -ENOENT, "%s.keeper: the keeper has ended", socket_path);
	if (r < 0)
		return err_set(err, r, "%s.keeper: no answer of a keeper: %s", socket_path, strerror(-r));
	close_fds(fds, nr_fds);
	if (m.type != WELCOME)
		return err_set(err, -EPROTO, "%s.keeper: no answer of a keeper", socket_path);
	version = m.version;
	if (version != KEEPER_VERSION || m.status == -EPROTONOSUPPORT) {
		/* It lets go of us, or of everything: wait until that is done. */
		while (recv_within(fd, &m, text, 0, fds, &nr_fds, ANSWER_MS) > 0)
			close_fds(fds, nr_fds);
		return err_set(err, -EPROTONOSUPPORT,
			       "%s.keeper: the keeper (pid %d) has version %u, this program %u: stop that daemon first "
			       "(weightd shutdown)",
			       socket_path, (int)cred.pid, version, KEEPER_VERSION);
	}
	if (m.status == -EBUSY) {
		if (ret_pid)
			*ret_pid = (int)m.key;
		return err_set(err, -EBUSY, "%s: a daemon is there already (pid %d)", socket_path, (int)m.key);
	}
	if (m.status < 0)
		return err_set(err, m.status, "%s.keeper: %s", socket_path, strerror(-m.status));
	r = keeper_new(fd, cred.pid, false, ret);
	if (r < 0)
		return err_set(err, r, "keeper: out of memory");
	fd = -1;
	return 0;
}

int keeper_restart(struct keeper *k, char *const *argv, struct wd_err *err)
{
	struct message m = { .type = START };
	char start[START_BYTES];
	int r = start_block(argv, start, err);

	if (r < 0)
		return r;
	m.nbytes = (uint32_t)r;
	r = send_message(k->fd, m, start, NULL, 0);
	return r < 0 ? err_set(err, r, "keeper: %s", strerror(-r)) : 0;
}

int keeper_fd(const struct keeper *k)
{
	return k->fd;
}

int keeper_asked(struct keeper *k)
{
	int fds[KEEPER_FDS], r;
	unsigned int nr_fds;
	struct message m;
	char none[1];

	if (k->asked)
		return 1;
	r = recv_message(k->fd, &m, none, 0, fds, &nr_fds);
	if (r == -EAGAIN)
		return 0;
	if (r == 0)
		return -EPIPE;
	if (r < 0)
		return r;
	close_fds(fds, nr_fds);
	k->asked = m.type == LET_GO;
	return k->asked;
}

/* EAGAIN is SO_SNDTIMEO's. */
static int tell(struct keeper *k, struct message m, const void *blob, const int *fds)
{
	int r = send_message(k->fd, m, blob, fds, 0);

	return r == -EAGAIN ? -ETIMEDOUT : r;
}

int keeper_put(struct keeper *k, uint64_t key, const void *blob, size_t nbytes, const int *fds, unsigned int nr_fds)
{
	if (key == UINT64_MAX || nbytes > KEEPER_BLOB || nr_fds > KEEPER_FDS)
		return -EINVAL;
	while (nr_fds && fds[nr_fds - 1] < 0)
		nr_fds--;
	return tell(k, (struct message){ .type = PUT, .key = key, .nbytes = (uint32_t)nbytes, .nr_fds = nr_fds }, blob,
		    fds);
}

int keeper_del(struct keeper *k, uint64_t key)
{
	return tell(k, (struct message){ .type = DEL, .key = key }, NULL, NULL);
}

int keeper_list(struct keeper *k, keeper_fn fn, void *arg)
{
	return keeper_list_of(k, 0, fn, arg);
}

int keeper_list_of(struct keeper *k, enum keeper_kind kind, keeper_fn fn, void *arg)
{
	unsigned char blob[KEEPER_BLOB];
	int result = 0, r = tell(k, (struct message){ .type = LIST, .key = kind }, NULL, NULL);

	/* Read to its end, whatever fn says: what comes after it belongs to somebody else. */
	while (r >= 0) {
		int fds[KEEPER_FDS];
		unsigned int nr_fds;
		struct message m;

		r = recv_within(k->fd, &m, blob, sizeof(blob), fds, &nr_fds, ANSWER_MS);
		if (r == 0)
			r = -EPIPE;
		if (r < 0 || m.type == END)
			break;
		if (m.type != OBJECT || result)
			close_fds(fds, nr_fds);
		else
			result = fn(arg, m.key, blob, m.nbytes, fds, nr_fds);
		if (m.type == LET_GO)
			k->asked = true;
	}
	return r < 0 ? r : result;
}

void keeper_bye(struct keeper *k)
{
	int64_t until = now_ms() + ANSWER_MS;
	bool gone = false;

	if (tell(k, (struct message){ .type = BYE }, NULL, NULL) == 0)
		while (!gone && now_ms() < until) {
			int fds[KEEPER_FDS];
			unsigned int nr_fds;
			struct message m;
			char none[1];
			int r = recv_within(k->fd, &m, none, 0, fds, &nr_fds, (int)MAX(until - now_ms(), 0));

			if (r > 0)
				close_fds(fds, nr_fds);
			gone = r == 0;
		}
	/* Reaped; but a file of its that is being closed may make it stay for as long as the file's server likes. */
	while (gone && k->child && waitpid(k->pid, NULL, WNOHANG) == 0 && now_ms() < until)
		(void)poll(NULL, 0, 1);
}

struct keeper *keeper_free(struct keeper *k)
{
	if (k) {
		(void)close(k->fd);
		free(k);
	}
	return NULL;
}

int keeper_pid(const struct keeper *k)
{
	return k->pid;
}
