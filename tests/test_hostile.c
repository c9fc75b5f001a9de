/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients that mean no good, against the program itself: messages that are none, come twice, in the wrong order or without
 * end; descriptors of every kind; layouts and addresses that lie; what belongs to others; too many of everything; memory
 * that is not what it was. After each: who is honest reads right bytes, and the daemon holds no more than before.
 *
 * An enemy is a peer (serve_util.h) that speaks the protocol by itself, once as nobody and once as root. Its functions
 * return 0 if it was treated as it should be, else they say what happened.
 */
#include "tests/serve_util.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>

#include "ufd/arena.h"
#include "ufd/page.h"
#include "ufd/table.h"
#include "ufd/uffd.h"
#include "ufd/wire.h"

#ifndef FS_IOC_SETFLAGS
#define FS_IOC_SETFLAGS _IOW('f', 2, long) /* <linux/fs.h> and <sys/mount.h> exclude each other */
#endif
#define WAIT 20000 /* ms, for an answer: longer than anything that is not stuck */
#define TENSORS 4
#define TENSOR_BYTES (3 * MiB)

/* What the enemy is after. */
struct target {
	char path[200];  /* a file that all may read and the honest client uses */
	char other[200]; /* one more, which only the enemies use */
};

static struct daemon D;
static struct peer Good, Evil;

static void stop(void)
{
	daemon_stop(&D);
}

/* ------------------------------------------------------------------ the protocol by hand */

struct raw {
	int control, notify, device, uffd, arena, table, state;
	uint64_t mm, view, bytes, table_bytes;
	unsigned char *base;
	uint32_t seq;
};

static union wire_any A; /* the last answer */
static int A_fds[WIRE_MAX_FDS] = { -1, -1, -1, -1 };

#define MUST(call, wanted)                                                           \
	do {                                                                         \
		int r_ = (call);                                                     \
		if (r_ != (wanted))                                                  \
			return peer_say("line %d: %s: %d: %s", __LINE__, #call, r_,  \
					A.h.type == WIRE_ERROR ? A.error.text : ""); \
	} while (0)
/* Refused by an answer: neither silence nor a hang-up. */
#define REFUSED(call)                                                              \
	do {                                                                       \
		int r_ = (call);                                                   \
		if (r_ >= 0 || r_ == -ETIMEDOUT || r_ == -EPIPE || r_ == -EBADMSG) \
			return peer_say("line %d: %s: %d", __LINE__, #call, r_);   \
	} while (0)
/* Answered, whatever it says. */
#define ANSWERED(call)                                                           \
	do {                                                                     \
		int r_ = (call);                                                 \
		if (r_ == -ETIMEDOUT || r_ == -EPIPE || r_ == -EBADMSG)          \
			return peer_say("line %d: %s: %d", __LINE__, #call, r_); \
	} while (0)
#define TRUE(what)                                                       \
	do {                                                             \
		if (!(what))                                             \
			return peer_say("line %d: %s", __LINE__, #what); \
	} while (0)

static int dial(void)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	cleanup_close int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	(void)snprintf(to.sun_path, sizeof(to.sun_path), "%s", getenv("WEIGHTD_SOCKET"));
	if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof(to)) < 0)
		return -errno;
	return TAKE_FD(fd);
}

static void close_answer(void)
{
	for (unsigned int i = 0; i < WIRE_MAX_FDS; i++) {
		if (A_fds[i] >= 0)
			(void)close(A_fds[i]);
		A_fds[i] = -1;
	}
}

/* 0: an answer that is no error; -EBADMSG: one that no daemon should give. */
static int get_answer(int fd, uint32_t *ret_seq)
{
	unsigned int nr;
	int r;

	close_answer();
	A.h.type = 0;
	r = wire_recv(fd, &A, A_fds, &nr, WAIT);
	if (r != 1)
		return r == 0 || r == -ECONNRESET ? -EPIPE : r == -EAGAIN ? -ETIMEDOUT : r == -EPROTO ? -EBADMSG : r;
	*ret_seq = A.h.seq;
	if (A.h.type == WIRE_WELCOME)
		return A.welcome.status;
	if (A.h.type != WIRE_ERROR)
		return 0;
	if (!A.error.text[0])
		return -EBADMSG;
	for (const char *c = A.error.text; *c; c++)
		if ((unsigned char)*c < ' ' || *c == 127)
			return -EBADMSG;
	return A.error.status;
}

/* `m` is changed: it gets a number. */
static int ask(struct raw *r, void *m, const int *fds, unsigned int nr)
{
	struct wire_head *h = m;
	uint32_t seq = 0;
	int e;

	h->seq = ++r->seq;
	e = wire_send(r->control, m, fds, nr, true);
	if (e == 0)
		e = get_answer(r->control, &seq);
	if (e == -ECONNRESET)
		e = -EPIPE;
	if (e != -EPIPE && e != -ETIMEDOUT && seq != h->seq)
		e = -EBADMSG;
	return e;
}

static int raw_hello(struct raw *r)
{
	struct wire_hello m = { .version = WIRE_VERSION, .name = "enemy" };
	int e;

	*r = (struct raw){ .notify = -1, .device = -1, .uffd = -1, .arena = -1, .table = -1, .state = -1 };
	r->control = dial();
	if (r->control < 0)
		return r->control;
	WIRE_INIT(m, WIRE_HELLO, 0);
	e = ask(r, &m, NULL, 0);
	if (e == 0) {
		r->notify = A_fds[0];
		r->device = A_fds[1];
		A_fds[0] = A_fds[1] = -1;
	}
	return e;
}

static void raw_close(struct raw *r)
{
	close_answer();
	if (r->base)
		(void)munmap(r->base, r->bytes + page_bytes());
	for (int *fd = &r->control; fd <= &r->state; fd++)
		if (*fd >= 0)
			(void)close(*fd);
	*r = (struct raw){ -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, NULL, 0 };
}

static int pass_uffd(struct raw *r, int fd, uint32_t flags)
{
	struct wire_uffd m = { .flags = flags };

	WIRE_INIT(m, WIRE_UFFD, 0);
	return ask(r, &m, &fd, 1);
}

static int fresh_uffd(struct raw *r, uint32_t *ret_flags)
{
	bool user_only = false;
	int fd = uffd_open_raw(r->device, &user_only);

	*ret_flags = user_only ? WIRE_UFFD_USER_ONLY : 0;
	return fd;
}

static int raw_uffd(struct raw *r)
{
	uint32_t flags;
	int e;

	r->uffd = fresh_uffd(r, &flags);
	if (r->uffd < 0)
		return r->uffd;
	e = pass_uffd(r, r->uffd, flags);
	if (e == 0)
		r->mm = A.welcome.mm;
	return e;
}

static uint64_t size_of(int fd)
{
	struct stat st;

	return fstat(fd, &st) < 0 ? 0 : (uint64_t)st.st_size;
}

struct layout {
	const struct segment *segs;
	uint32_t nr_segs;
	const struct unit *units;
	uint32_t nr_units;
	uint64_t bytes; /* 0: as it should be */
};

/* fds: file, layout (-1: made of `l`), direct or -1 */
static int attach_fds(struct raw *r, int file, int blob, int direct, const struct layout *l)
{
	struct wire_attach m = { .nr_segs = l->nr_segs, .nr_units = l->nr_units, .name = "enemy's\nfile\033[31m" };
	cleanup_close int own = -1;
	int fds[3] = { file, blob, direct };

	m.bytes = l->bytes;
	if (!m.bytes && l->nr_segs)
		m.bytes = arena_round(l->segs[l->nr_segs - 1].arena_off + l->segs[l->nr_segs - 1].len);
	m.flags = direct >= 0 ? WIRE_DIRECT : 0;
	WIRE_INIT(m, WIRE_ATTACH, 0);
	if (blob < 0)
		fds[1] = own =
			wire_blob(l->segs, l->nr_segs * sizeof(*l->segs), l->units, l->nr_units * sizeof(*l->units));
	return ask(r, &m, fds, direct >= 0 ? 3 : 2);
}

/* All of it, as a client would. */
static int attach_whole(struct raw *r, int file, int direct)
{
	struct segment whole = { 0, 0, size_of(file) };

	return attach_fds(r, file, -1, direct, &(struct layout){ .segs = &whole, .nr_segs = 1 });
}

static void take_attached(struct raw *r)
{
	r->view = A.attached.view;
	r->bytes = A.attached.bytes;
	r->table_bytes = A.attached.table_bytes;
	r->arena = A_fds[0];
	r->table = A_fds[1];
	A_fds[0] = A_fds[1] = -1;
}

static int raw_attach(struct raw *r, const char *path)
{
	cleanup_close int file = open(path, O_RDONLY | O_CLOEXEC);
	cleanup_close int direct = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
	int e = file < 0 ? -errno : attach_whole(r, file, direct);

	if (e == 0)
		take_attached(r);
	return e;
}

static int map_at(struct raw *r, uint64_t view, uint64_t address)
{
	struct wire_map m = { .view = view, .address = address };

	WIRE_INIT(m, WIRE_MAP, 0);
	return ask(r, &m, NULL, 0);
}

static int unmap_at(struct raw *r, uint64_t view, uint64_t address)
{
	struct wire_map m = { .view = view, .address = address };

	WIRE_INIT(m, WIRE_UNMAP, 0);
	return ask(r, &m, NULL, 0);
}

static unsigned char *arena_mapped(const struct raw *r)
{
	void *p = mmap(NULL, r->bytes + page_bytes(), PROT_NONE, MAP_PRIVATE | MAP_NORESERVE, r->arena, 0);

	return p == MAP_FAILED ? NULL : p;
}

static int raw_map(struct raw *r)
{
	int e;

	r->base = arena_mapped(r);
	if (!r->base)
		return -errno;
	e = map_at(r, r->view, (uintptr_t)r->base);
	if (e < 0)
		return e;
	r->state = TAKE_FD(A_fds[0]);
	return mprotect(r->base, r->bytes + page_bytes(), PROT_READ | PROT_WRITE) < 0 ? -errno : 0;
}

static int raw_client(struct raw *r, const char *path)
{
	int e = raw_hello(r);

	e = e ? e : raw_uffd(r);
	e = e ? e : raw_attach(r, path);
	return e ? e : raw_map(r);
}

/* The first byte that is not the file's; -1: all are right. */
static int64_t first_wrong(const struct raw *r, const char *path)
{
	static unsigned char chunk[256 * 1024];
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n;

	for (off_t at = 0; (n = pread(fd, chunk, sizeof(chunk), at)) > 0; at += n)
		for (ssize_t i = 0; i < n; i++)
			if (chunk[i] != r->base[at + i])
				return at + i;
	return fd < 0 ? 0 : -1;
}

static int plain(struct raw *r, enum wire_type type)
{
	struct wire_plain m;

	WIRE_INIT(m, type, 0);
	return ask(r, &m, NULL, 0);
}

static int with_view(struct raw *r, enum wire_type type, uint64_t view)
{
	struct wire_view m = { .view = view };

	WIRE_INIT(m, type, 0);
	return ask(r, &m, NULL, 0);
}

static int with_value(struct raw *r, enum wire_type type, uint64_t view, uint32_t value)
{
	struct wire_value m = { .view = view, .value = value };

	WIRE_INIT(m, type, 0);
	return ask(r, &m, NULL, 0);
}

static int hold(struct raw *r, uint64_t view, enum wire_hold how, uint32_t first, uint32_t nr)
{
	static struct wire_ranges m;

	m = (struct wire_ranges){ .view = view, .hold = how, .nr_ranges = 1, .ranges = { { first, nr } } };
	m.h = (struct wire_head){ WIRE_MAGIC, WIRE_HOLD, wire_ranges_bytes(1), 0 };
	return ask(r, &m, NULL, 0);
}

static int job(struct raw *r, uint64_t view, uint64_t off, uint64_t len)
{
	static struct wire_job m;

	m = (struct wire_job){ .nr_ranges = 1, .ranges = { { view, off, len } } };
	m.h = (struct wire_head){ WIRE_MAGIC, WIRE_JOB, wire_job_bytes(1), 0 };
	return ask(r, &m, NULL, 0);
}

static int with_job(struct raw *r, enum wire_type type, uint64_t id)
{
	struct wire_job_id m = { .job = id };

	WIRE_INIT(m, type, 0);
	return ask(r, &m, NULL, 0);
}

/* The daemon has ended the connection: 0. */
static int hung_up(int fd)
{
	uint32_t seq;
	int r;

	while ((r = get_answer(fd, &seq)) != -EPIPE)
		if (r == -ETIMEDOUT)
			return r;
	return 0;
}

/* ------------------------------------------------------------------ messages */

static void send_raw(int socket, const void *bytes, size_t nbytes, const int *fds, unsigned int nr_fds)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * 64)];
	} space = { 0 };
	struct iovec part = { (void *)(uintptr_t)bytes, nbytes };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1 };

	if (nr_fds > 0) {
		struct cmsghdr *c;

		m.msg_control = &space;
		m.msg_controllen = CMSG_SPACE(sizeof(int) * nr_fds);
		c = CMSG_FIRSTHDR(&m);
		*c = (struct cmsghdr){ CMSG_LEN(sizeof(int) * nr_fds), SOL_SOCKET, SCM_RIGHTS };
		memcpy(CMSG_DATA(c), fds, sizeof(int) * nr_fds);
	}
	(void)sendmsg(socket, &m, MSG_NOSIGNAL); /* the daemon may have hung up already */
}

#define NR_GARBAGE 10

/* A packet that is no message. */
static void send_garbage(int socket, unsigned int kind, uint64_t *random)
{
	static unsigned char bytes[100000];
	struct wire_hello hello = { .version = WIRE_VERSION };
	struct wire_plain m;
	int fds[64];

	for (unsigned int i = 0; i < ARRAY_SIZE(fds); i++)
		fds[i] = STDIN_FILENO;
	WIRE_INIT(hello, WIRE_HELLO, 1);
	WIRE_INIT(m, WIRE_LS, 1);
	memset(bytes, 0, sizeof(bytes));
	switch (kind % NR_GARBAGE) {
	case 0:
		for (size_t i = 0; i < sizeof(bytes); i++)
			bytes[i] = (unsigned char)rnd(random);
		send_raw(socket, bytes, 1 + rnd(random) % sizeof(bytes), NULL, 0);
		break;
	case 1: /* nothing at all, but descriptors */
		send_raw(socket, bytes, 0, fds, 3);
		break;
	case 2: /* too large */
		memcpy(bytes, &hello, sizeof(hello));
		send_raw(socket, bytes, sizeof(bytes), fds, 1);
		break;
	case 3: /* cut short */
		send_raw(socket, &hello, 1 + rnd(random) % (sizeof(hello) - 1), NULL, 0);
		break;
	case 4: /* more descriptors than any message has */
		send_raw(socket, &m, sizeof(m), fds, 64);
		break;
	case 5: /* more than this one has */
		send_raw(socket, &m, sizeof(m), fds, 1);
		break;
	case 6:
		m.h.type = (uint32_t)rnd(random) | 1u << 20;
		send_raw(socket, &m, sizeof(m), NULL, 0);
		break;
	case 7: /* it promises more */
		m.h.nbytes = WIRE_MAX_BYTES;
		send_raw(socket, &m, sizeof(m), NULL, 0);
		break;
	case 8: /* a text without an end */
		memset(hello.name, 'x', sizeof(hello.name));
		send_raw(socket, &hello, sizeof(hello), NULL, 0);
		break;
	default: /* what only daemons say */
		m.h.type = WIRE_OK;
		send_raw(socket, &m, sizeof(m), fds, rnd(random) % 2);
	}
}

static int64_t garbage_first(const void *arg)
{
	uint64_t random = 1;

	(void)arg;
	for (unsigned int i = 0; i < 10 * NR_GARBAGE; i++) {
		cleanup_close int fd = dial();

		TRUE(fd >= 0);
		send_garbage(fd, i, &random);
		MUST(hung_up(fd), 0);
	}
	return 0;
}

static int64_t garbage_later(const void *arg)
{
	const struct target *t = arg;
	uint64_t random = 2;
	struct raw r;

	for (unsigned int i = 0; i < 6 * NR_GARBAGE; i++) {
		bool notify = i / NR_GARBAGE % 2; /* over the other socket */

		if (i < 4 * NR_GARBAGE)
			MUST(raw_hello(&r), 0);
		else
			MUST(raw_client(&r, t->path), 0);
		send_garbage(notify ? r.notify : r.control, i, &random);
		MUST(hung_up(r.control), 0);
		/* Whoever has memory is served in spite of that. */
		if (r.base)
			MUST((int)first_wrong(&r, t->path), -1);
		raw_close(&r);
	}
	return 0;
}

/* Good messages where they do not belong. */
static int64_t wrong_place(const void *arg)
{
	static const enum wire_type first[] = { WIRE_LS, WIRE_STAT, WIRE_SHUTDOWN, WIRE_PING, WIRE_OK, WIRE_RESUME };
	static const enum wire_type control[] = { WIRE_OK, WIRE_PING, WIRE_PONG, WIRE_RESUME };
	static const enum wire_type notify[] = { WIRE_OK, WIRE_LS, WIRE_SHUTDOWN, WIRE_PONG, WIRE_RESUME };
	struct wire_hello again = { .version = WIRE_VERSION };
	struct wire_plain m;
	struct raw r;

	(void)arg;
	for (size_t i = 0; i < ARRAY_SIZE(first); i++) {
		cleanup_close int fd = dial();

		TRUE(fd >= 0);
		WIRE_INIT(m, first[i], 1);
		(void)wire_send(fd, &m, NULL, 0, true);
		MUST(hung_up(fd), 0);
	}
	for (size_t i = 0; i < ARRAY_SIZE(control) + ARRAY_SIZE(notify); i++) {
		bool to_notify = i >= ARRAY_SIZE(control);

		MUST(raw_hello(&r), 0);
		WIRE_INIT(m, to_notify ? notify[i - ARRAY_SIZE(control)] : control[i], 1);
		(void)wire_send(to_notify ? r.notify : r.control, &m, NULL, 0, true);
		MUST(hung_up(r.control), 0);
		raw_close(&r);
	}
	MUST(raw_hello(&r), 0);
	WIRE_INIT(again, WIRE_HELLO, 1);
	MUST(ask(&r, &again, NULL, 0), -EPIPE);
	raw_close(&r);
	/* Another version is told so. */
	again.version = WIRE_VERSION + 1;
	again.flags = 0xFFFF;
	r = (struct raw){ .notify = -1, .device = -1, .uffd = -1, .arena = -1, .table = -1, .state = -1 };
	r.control = dial();
	(void)ask(&r, &again, NULL, 0);
	TRUE(A.h.type == WIRE_WELCOME && A.welcome.status == -EPROTONOSUPPORT && A.welcome.version == WIRE_VERSION);
	TRUE(strstr(A.welcome.text, "version"));
	raw_close(&r);
	return 0;
}

/* Everything that needs memory, without; and what is not the asker's. */
static int64_t without_memory(const void *arg)
{
	const struct target *t = arg;
	struct wire_claimed claimed = { .number = 1 };
	struct raw r;

	MUST(raw_hello(&r), 0);
	MUST(raw_attach(&r, t->path), 0); /* a tool does this */
	REFUSED(map_at(&r, r.view, 0x10000000));
	REFUSED(unmap_at(&r, r.view, 0x10000000));
	REFUSED(hold(&r, r.view, WIRE_HOLD_ADD, 0, 1));
	REFUSED(with_value(&r, WIRE_CLASS, r.view, VIEW_PINNED));
	REFUSED(with_value(&r, WIRE_FORBID, r.view, 1));
	REFUSED(with_view(&r, WIRE_VIEW_STAT, r.view));
	WIRE_INIT(claimed, WIRE_CLAIMED, 0);
	REFUSED(ask(&r, &claimed, NULL, 0));
	/* Children of others: the number of the parent alone, and tokens that were not told. */
	for (uint64_t mm = 0; mm < 64; mm++) {
		struct wire_claim claim = { .parent = mm };

		WIRE_INIT(claim, WIRE_CLAIM, 0);
		REFUSED(ask(&r, &claim, NULL, 0));
		memset(claim.token, (int)mm, sizeof(claim.token));
		REFUSED(ask(&r, &claim, NULL, 0));
		REFUSED(ask(&r, &claimed, NULL, 0));
	}
	MUST(plain(&r, WIRE_STAT), 0); /* it is still talked to */
	raw_close(&r);
	return 0;
}

/* Everything twice. */
static int64_t replayed(const void *arg)
{
	const struct target *t = arg;
	uint64_t id[2];
	uint32_t flags;
	struct raw r;
	int fd;

	MUST(raw_client(&r, t->path), 0);
	fd = fresh_uffd(&r, &flags);
	REFUSED(pass_uffd(&r, fd, flags));
	(void)close(fd);
	REFUSED(pass_uffd(&r, r.uffd, 0));
	for (int i = 0; i < 3; i++) {
		cleanup_close int file = open(t->path, O_RDONLY | O_CLOEXEC);

		MUST(attach_whole(&r, file, -1), 0);
		TRUE(A.attached.view == r.view && A.attached.known);
		MUST(map_at(&r, r.view, (uintptr_t)r.base), 0);
		MUST(hold(&r, r.view, WIRE_HOLD_ADD, 0, 2), 0);
		MUST(with_value(&r, WIRE_CLASS, r.view, VIEW_UNNEEDED), 0);
		MUST(with_view(&r, WIRE_VIEW_STAT, r.view), 0);
	}
	for (int i = 0; i < 2; i++) {
		MUST(job(&r, r.view, 0, r.bytes), 0);
		id[i] = A.job_info.job;
	}
	TRUE(id[0] != id[1]);
	MUST(with_job(&r, WIRE_JOB_END, id[0]), 0);
	MUST(with_job(&r, WIRE_JOB_END, id[0]), -ENOENT);
	MUST(with_job(&r, WIRE_JOB_STATE, id[0]), -ENOENT);
	MUST(with_job(&r, WIRE_JOB_STATE, id[1]), 0);
	MUST((int)first_wrong(&r, t->path), -1);
	for (int i = 0; i < 2; i++)
		MUST(hold(&r, r.view, WIRE_HOLD_DROP, 0, 2), 0);
	MUST((int)first_wrong(&r, t->path), -1);
	for (int i = 0; i < 4; i++) /* attached four times */
		MUST(with_view(&r, WIRE_DETACH, r.view), 0);
	MUST(with_view(&r, WIRE_DETACH, r.view), -ENOENT);
	MUST((int)first_wrong(&r, t->path), -1); /* mapped still */
	MUST(unmap_at(&r, r.view, (uintptr_t)r.base), 0);
	REFUSED(unmap_at(&r, r.view, (uintptr_t)r.base));
	raw_close(&r);
	return 0;
}

/* Several processes talk over one socket, and ask before they have the answers. */
static int64_t interleaved(const void *arg)
{
	enum { PROCESSES = 4, EACH = 200 };
	const struct target *t = arg;
	pid_t pids[PROCESSES];
	struct raw r;

	MUST(raw_client(&r, t->path), 0);
	for (uint32_t i = 0; i < PROCESSES; i++) {
		pids[i] = fork();
		TRUE(pids[i] >= 0);
		if (pids[i] > 0)
			continue;
		for (uint32_t k = 0; k < EACH; k++) {
			struct wire_view m = { .view = r.view };
			struct wire_plain p;

			WIRE_INIT(m, WIRE_VIEW_STAT, i * EACH + k);
			WIRE_INIT(p, k % 3 ? WIRE_STAT : WIRE_LS, i * EACH + k);
			if (wire_send(r.control, k % 2 ? (void *)&m : (void *)&p, NULL, 0, true) < 0)
				_exit(1);
		}
		_exit(0);
	}
	{
		bool seen[PROCESSES * EACH] = { false };
		uint32_t seq;

		for (uint32_t i = 0; i < PROCESSES * EACH; i++) {
			MUST(get_answer(r.control, &seq), 0);
			TRUE(seq < PROCESSES * EACH && !seen[seq]);
			seen[seq] = true;
		}
	}
	for (int i = 0; i < PROCESSES; i++)
		MUST(child_result(pids[i]), 0);
	MUST((int)first_wrong(&r, t->path), -1);
	raw_close(&r);
	return 0;
}

/* ------------------------------------------------------------------ descriptors */

#define NR_KINDS 14

/* Things that are open, and no file for reading. */
static int fd_of_kind(int kind)
{
	char path[32];
	int p[2], fd;

	switch (kind) {
	case 0:
		return pipe2(p, O_CLOEXEC) < 0 ? -1 : (close(p[1]), p[0]);
	case 1:
		return pipe2(p, O_CLOEXEC) < 0 ? -1 : (close(p[0]), p[1]);
	case 2:
		return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	case 3:
		return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, p) < 0 ? -1 : (close(p[1]), p[0]);
	case 4:
		return epoll_create1(EPOLL_CLOEXEC);
	case 5:
		return eventfd(0, EFD_CLOEXEC);
	case 6:
		return inotify_init1(IN_CLOEXEC);
	case 7:
		return open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	case 8:
		return open("/dev/zero", O_RDWR | O_CLOEXEC);
	case 9:
		return open("/proc/self/exe", O_PATH | O_CLOEXEC);
	case 10: /* for writing only */
	case 11: /* nobody may read it, but everybody may name it */
		fd = memfd_create("enemy", MFD_CLOEXEC);
		if (fd < 0 || write(fd, "secret", 6) != 6 || fchmod(fd, kind == 10 ? 0200 : 0) < 0)
			return -1;
		(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		p[0] = open(path, (kind == 10 ? O_WRONLY : O_PATH) | O_CLOEXEC);
		(void)close(fd);
		return p[0];
	case 12: /* a link itself */
		return open("/proc/self/exe", O_PATH | O_NOFOLLOW | O_CLOEXEC);
	default:
		return open("/dev/null", O_RDONLY | O_CLOEXEC);
	}
}

static int64_t wrong_files(const void *arg)
{
	const struct target *t = arg;
	const struct segment whole = { 0, 0, 5000 };
	const struct layout l = { .segs = &whole, .nr_segs = 1 };
	cleanup_close int good = open(t->path, O_RDONLY | O_CLOEXEC);
	struct raw r;

	MUST(raw_hello(&r), 0);
	for (int kind = 0; kind < NR_KINDS; kind++) {
		cleanup_close int fd = fd_of_kind(kind);
		struct wire_admin admin = { .flags = 0 };

		if (fd < 0)
			return peer_say("kind %d: %s", kind, strerror(errno));
		A.error.text[0] = 0;
		if (attach_fds(&r, fd, -1, -1, &l) >= 0 || A.h.type != WIRE_ERROR)
			return peer_say("kind %d is taken for a file", kind);
		WIRE_INIT(admin, WIRE_DROP, 0);
		if (ask(&r, &admin, &fd, 1) >= 0 || A.h.type != WIRE_ERROR)
			return peer_say("kind %d is dropped", kind);
		WIRE_INIT(admin, WIRE_PIN, 0);
		if (ask(&r, &admin, &fd, 1) >= 0 || A.h.type != WIRE_ERROR)
			return peer_say("kind %d is pinned", kind);
	}
	/* A userfaultfd, and the daemon's own things. */
	{
		cleanup_close int u = uffd_open_raw(r.device, &(bool){ false });

		TRUE(u >= 0);
		REFUSED(attach_fds(&r, u, -1, -1, &l));
		REFUSED(attach_fds(&r, r.control, -1, -1, &l));
		REFUSED(attach_fds(&r, r.notify, -1, -1, &l));
	}
	MUST(attach_whole(&r, good, -1), 0);
	raw_close(&r);
	return 0;
}

static int64_t wrong_userfaultfds(const void *arg)
{
	const struct target *t = arg;
	cleanup_close int file = open(t->path, O_RDONLY | O_CLOEXEC);
	struct uffdio_api api = { .api = UFFD_API };
	struct raw r;
	uint32_t flags;
	int fd;

	MUST(raw_hello(&r), 0);
	for (int kind = 0; kind < NR_KINDS; kind++) {
		cleanup_close int wrong = fd_of_kind(kind);

		TRUE(wrong >= 0);
		REFUSED(pass_uffd(&r, wrong, 0));
	}
	REFUSED(pass_uffd(&r, file, 0));
	REFUSED(pass_uffd(&r, file, WIRE_UFFD_ARMED));
	REFUSED(pass_uffd(&r, r.control, 0));
	if (r.device >= 0)
		REFUSED(pass_uffd(&r, r.device, 0));
	/* One that was used. */
	fd = fresh_uffd(&r, &flags);
	TRUE(fd >= 0);
	MUST(ioctl(fd, UFFDIO_API, &api), 0);
	REFUSED(pass_uffd(&r, fd, flags));
	(void)close(fd);
	MUST(raw_uffd(&r), 0);
	MUST(raw_attach(&r, t->path), 0);
	MUST(raw_map(&r), 0);
	MUST((int)first_wrong(&r, t->path), -1);
	raw_close(&r);
	return 0;
}

/* "Its API is done", of one on which it is not: nothing that is asked of it ever says that its owner has died, and it is
 * always ready for reading. */
static int64_t unready_userfaultfds(const void *arg)
{
	const struct target *t = arg;
	static struct raw r[8]; /* they stay */
	uint32_t flags;

	for (size_t i = 0; i < ARRAY_SIZE(r); i++) {
		cleanup_close int fd = -1;
		int e;

		MUST(raw_hello(&r[i]), 0);
		fd = fresh_uffd(&r[i], &flags);
		TRUE(fd >= 0);
		if (i % 2)
			TRUE(fcntl(fd, F_SETFL, 0) == 0);
		e = pass_uffd(&r[i], fd, flags | WIRE_UFFD_ARMED);
		TRUE(e == 0 || A.h.type == WIRE_ERROR);
		if (e < 0)
			continue;
		MUST(raw_attach(&r[i], t->path), 0);
		r[i].base = arena_mapped(&r[i]);
		REFUSED(map_at(&r[i], r[i].view, (uintptr_t)r[i].base));
	}
	return 0;
}

/* The flag that says "do not wait" belongs to the enemy as well. */
static int64_t waiting_userfaultfds(const void *arg)
{
	const struct target *t = arg;
	static struct raw r; /* it stays */

	MUST(raw_client(&r, t->path), 0);
	TRUE(fcntl(r.uffd, F_SETFL, 0) == 0);
	MUST((int)first_wrong(&r, t->path), -1);
	MUST(hold(&r, r.view, WIRE_HOLD_DROP, 0, (uint32_t)(r.bytes / extent_bytes())), 0);
	MUST((int)first_wrong(&r, t->path), -1);
	return 0;
}

/* ------------------------------------------------------------------ layouts */

static int sealed_hole(size_t nbytes)
{
	int fd = memfd_create("enemy", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0 || ftruncate(fd, (off_t)nbytes) < 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK) < 0)
		return -1;
	return fd;
}

static int64_t wrong_layouts(const void *arg)
{
	const struct target *t = arg;
	cleanup_close int file = open(t->other, O_RDONLY | O_CLOEXEC);
	const uint64_t size = size_of(file);
	const struct {
		const char *what;
		struct segment segs[3];
		uint32_t nr_segs;
		struct unit units[2];
		uint32_t nr_units;
		uint64_t bytes;
	} lies[] = {
		{ "beyond the file", { { 0, 0, size + 1 } }, 1, { { 0, 0 } }, 0, 0 },
		{ "far beyond the file", { { 0, 0, 1ull << 45 } }, 1, { { 0, 0 } }, 0, 0 },
		{ "length wraps around", { { 0, 0, size }, { size, 8, UINT64_MAX - 4 } }, 2, { { 0, 0 } }, 0, 1 << 20 },
		{ "begins behind the file", { { 0, 0, size }, { size, size + 1, 1 } }, 2, { { 0, 0 } }, 0, 0 },
		{ "begins far away", { { 0, 0, size }, { size, UINT64_MAX, 1 } }, 2, { { 0, 0 } }, 0, 0 },
		{ "overlapping", { { 0, 0, size }, { size - 1, 0, 8 } }, 2, { { 0, 0 } }, 0, 0 },
		{ "the same twice", { { 0, 0, size }, { 0, 0, size } }, 2, { { 0, 0 } }, 0, 0 },
		{ "not sorted", { { 0, 0, 64 }, { 4096, 0, 64 }, { 1024, 0, 64 } }, 3, { { 0, 0 } }, 0, 8192 },
		{ "the arena's end is beyond all",
		  { { 0, 0, size }, { UINT64_MAX - 8, 0, 8 } },
		  2,
		  { { 0, 0 } },
		  0,
		  1 << 20 },
		{ "the arena's end is far",
		  { { 0, 0, size }, { 1ull << 46, 0, 8 } },
		  2,
		  { { 0, 0 } },
		  0,
		  (1ull << 46) - 4096 },
		{ "too few bytes", { { 0, 0, size } }, 1, { { 0, 0 } }, 0, 4096 },
		{ "too many bytes", { { 0, 0, size } }, 1, { { 0, 0 } }, 0, 1ull << 45 },
		{ "odd bytes", { { 0, 0, size } }, 1, { { 0, 0 } }, 0, size + 1 },
		{ "not the file itself first", { { 0, 4096, 4096 } }, 1, { { 0, 0 } }, 0, 0 },
		{ "shifted too far", { { 1 << 20, 0, size } }, 1, { { 0, 0 } }, 0, 0 },
		{ "unit beyond the end", { { 0, 0, size } }, 1, { { 0, size + 1 } }, 1, 0 },
		{ "unit begins behind the end", { { 0, 0, size } }, 1, { { size + 1, 1 } }, 1, 0 },
		{ "unit wraps around", { { 0, 0, size } }, 1, { { 8, UINT64_MAX - 4 } }, 1, 0 },
		{ "unit far away", { { 0, 0, size } }, 1, { { UINT64_MAX, 1 } }, 1, 0 },
		{ "units not sorted", { { 0, 0, size } }, 1, { { 4096, 8 }, { 0, 8 } }, 2, 0 },
	};
	const struct segment whole = { 0, 0, size };
	const struct layout good = { .segs = &whole, .nr_segs = 1 };
	struct raw r;

	TRUE(size > 0);
	MUST(raw_hello(&r), 0);
	for (size_t i = 0; i < ARRAY_SIZE(lies); i++) {
		struct layout l = { lies[i].segs, lies[i].nr_segs, lies[i].units, lies[i].nr_units, lies[i].bytes };

		if (attach_fds(&r, file, -1, -1, &l) >= 0 || A.h.type != WIRE_ERROR)
			return peer_say("a layout is accepted: %s", lies[i].what);
	}
	/* What should be a sealed memfd of that size. */
	for (int kind = 0; kind < NR_KINDS; kind++) {
		cleanup_close int fd = fd_of_kind(kind);

		REFUSED(attach_fds(&r, file, fd, -1, &good));
	}
	REFUSED(attach_fds(&r, file, file, -1, &good));
	{
		cleanup_close int a = sealed_hole(sizeof(whole) - 1), b = sealed_hole(sizeof(whole) + 1);
		cleanup_close int c = memfd_create("enemy", MFD_CLOEXEC | MFD_ALLOW_SEALING);
		cleanup_close int d = sealed_hole(WIRE_MAX_SEGS * sizeof(struct segment) +
						  (uint64_t)WIRE_MAX_UNITS * sizeof(struct unit));
		struct layout most = { NULL, WIRE_MAX_SEGS, NULL, WIRE_MAX_UNITS, 4096 };

		TRUE(a >= 0 && b >= 0 && d >= 0 && pwrite(c, &whole, sizeof(whole), 0) == (ssize_t)sizeof(whole));
		REFUSED(attach_fds(&r, file, a, -1, &good));
		REFUSED(attach_fds(&r, file, b, -1, &good));
		REFUSED(attach_fds(&r, file, c, -1, &good)); /* not sealed: it could be changed while it is read */
		REFUSED(attach_fds(&r, file, d, -1, &most)); /* all zeros */
		REFUSED(attach_fds(&r, file, c, -1, &most));
	}
	MUST(attach_fds(&r, file, -1, -1, &good), 0);
	raw_close(&r);
	return 0;
}

/* ------------------------------------------------------------------ addresses */

static int64_t wrong_maps(const void *arg)
{
	const struct target *t = arg;
	const uint64_t page = page_bytes();
	cleanup_close int file = open(t->path, O_RDONLY | O_CLOEXEC);
	unsigned char *p;
	struct raw r, s;
	uint64_t len;

	MUST(raw_client(&r, t->path), 0);
	len = r.bytes + page;
	MUST(raw_client(&s, t->other), 0);
	/* Nothing is there; no address of a process; not the beginning of a page. */
	p = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	TRUE(p != MAP_FAILED && munmap(p, len) == 0);
	REFUSED(map_at(&r, r.view, (uintptr_t)p));
	REFUSED(map_at(&r, r.view, 0));
	REFUSED(map_at(&r, r.view, page));
	REFUSED(map_at(&r, r.view, 0xffffffff81000000));
	REFUSED(map_at(&r, r.view, UINT64_MAX));
	REFUSED(map_at(&r, r.view, UINT64_MAX & ~(page - 1)));
	REFUSED(map_at(&r, r.view, (1ull << 63) - page));
	REFUSED(map_at(&r, r.view, (1ull << 47) - 2 * page));
	REFUSED(map_at(&r, r.view, (uintptr_t)r.base + 1));
	/* Where something of its own is served already: the same, overlapping, another view. */
	REFUSED(map_at(&r, r.view, (uintptr_t)r.base + page));
	REFUSED(map_at(&r, r.view, (uintptr_t)r.base - page));
	/* A file that userfaultfd cannot serve; a part of it; a view shared; one too short. */
	p = mmap(NULL, len, PROT_READ, MAP_PRIVATE, file, 0);
	TRUE(p != MAP_FAILED);
	REFUSED(map_at(&r, r.view, (uintptr_t)p));
	(void)munmap(p, len);
	p = mmap(NULL, len, PROT_NONE, MAP_SHARED, r.arena, 0);
	TRUE(p != MAP_FAILED);
	REFUSED(map_at(&r, r.view, (uintptr_t)p));
	(void)munmap(p, len);
	p = arena_mapped(&r);
	TRUE(p && munmap(p + len - page, page) == 0);
	REFUSED(map_at(&r, r.view, (uintptr_t)p));
	(void)munmap(p, len - page);
	/* Views that were not attached here. */
	for (uint64_t view = 0; view < 64; view++)
		if (view != r.view && view != s.view)
			REFUSED(map_at(&r, view, (uintptr_t)r.base));
	REFUSED(unmap_at(&r, s.view, (uintptr_t)r.base));
	REFUSED(unmap_at(&r, r.view, (uintptr_t)s.base));
	REFUSED(unmap_at(&s, r.view, (uintptr_t)r.base));
	/* Memory of its own in the place of the view: what becomes of that is its own affair. */
	for (int turn = 0; turn < 3; turn++) {
		p = mmap(NULL, len, PROT_READ | PROT_WRITE,
			 turn == 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_PRIVATE | MAP_NORESERVE,
			 turn == 0 ? -1 :
			 turn == 1 ? s.arena :
				     r.table,
			 0);
		TRUE(p != MAP_FAILED);
		if (map_at(&r, r.view, (uintptr_t)p) == 0)
			MUST(unmap_at(&r, r.view, (uintptr_t)p), 0);
		TRUE(A.h.type == WIRE_ERROR || A.h.type == WIRE_OK);
		(void)munmap(p, len);
	}
	MUST((int)first_wrong(&r, t->path), -1);
	MUST((int)first_wrong(&s, t->other), -1);
	raw_close(&r);
	raw_close(&s);
	return 0;
}

static int64_t too_many_maps(const void *arg)
{
	enum { LIMIT = 4096 };
	const struct target *t = arg;
	unsigned int n = 0;
	struct raw r;
	int e;

	MUST(raw_client(&r, t->path), 0);
	do {
		unsigned char *p = arena_mapped(&r);

		TRUE(p);
		e = map_at(&r, r.view, (uintptr_t)p);
	} while (e == 0 && ++n <= LIMIT);
	/* A process's limit, or (not root's) that of all of one user's, which depends on descriptors. */
	TRUE(e == -EUSERS && (n == LIMIT - 1 || (getuid() != 0 && n > 100 && n < LIMIT)));
	TRUE(strstr(A.error.text, "4096"));
	MUST((int)first_wrong(&r, t->path), -1);
	raw_close(&r);
	return 0;
}

/* Views, mappings and jobs of others. */
static int64_t others(const void *arg)
{
	const struct target *t = arg;
	struct raw r, s;
	uint64_t id;

	MUST(raw_client(&r, t->other), 0);
	MUST(raw_client(&s, t->path), 0);
	MUST(job(&s, s.view, 0, s.bytes), 0);
	id = A.job_info.job;
	for (uint64_t view = 0; view < 64; view++) {
		if (view == r.view)
			continue;
		REFUSED(hold(&r, view, WIRE_HOLD_DROP, 0, 1));
		REFUSED(with_value(&r, WIRE_CLASS, view, VIEW_PINNED));
		REFUSED(with_value(&r, WIRE_FORBID, view, 1));
		REFUSED(with_view(&r, WIRE_VIEW_STAT, view));
		REFUSED(with_view(&r, WIRE_DETACH, view));
		REFUSED(unmap_at(&r, view, (uintptr_t)r.base));
		REFUSED(job(&r, view, 0, 4096));
	}
	REFUSED(with_job(&r, WIRE_JOB_STATE, id));
	REFUSED(with_job(&r, WIRE_JOB_END, id));
	MUST(with_job(&s, WIRE_JOB_STATE, id), 0);
	/* Beyond the ends of its own. */
	ANSWERED(hold(&r, r.view, WIRE_HOLD_ADD, (uint32_t)(r.bytes / extent_bytes()) + 1, 1));
	ANSWERED(hold(&r, r.view, WIRE_HOLD_ADD, 0, UINT32_MAX));
	ANSWERED(hold(&r, r.view, WIRE_HOLD_DROP, UINT32_MAX - 1, 1));
	REFUSED(job(&r, r.view, r.bytes + extent_bytes(), 4096));
	REFUSED(job(&r, r.view, 0, r.bytes + extent_bytes()));
	MUST((int)first_wrong(&r, t->other), -1);
	MUST((int)first_wrong(&s, t->path), -1);
	raw_close(&r);
	raw_close(&s);
	return 0;
}

/* What others use is neither dropped nor pinned by nobody; the daemon does not end for him. */
static int64_t tools_of_nobody(const void *arg)
{
	const struct target *t = arg;
	cleanup_close int file = open(t->path, O_RDONLY | O_CLOEXEC);
	struct wire_admin admin = { .flags = WIRE_FORCE };
	struct raw r;

	if (geteuid() == 0)
		return 0;
	MUST(raw_hello(&r), 0);
	WIRE_INIT(admin, WIRE_DROP, 0);
	MUST(ask(&r, &admin, &file, 1), -EPERM);
	MUST(plain(&r, WIRE_SHUTDOWN), -EPERM);
	raw_close(&r);
	return 0;
}

/* ------------------------------------------------------------------ memory */

/* The first way of writing that works; NULL: none. */
static const char *writes(int fd, uint64_t nbytes)
{
	static const unsigned char zeros[4096];
	cleanup_close int source = memfd_create("enemy", MFD_CLOEXEC), pipe_end = -1, mem = -1;
	struct iovec iov = { (void *)(uintptr_t)zeros, sizeof(zeros) };
	int p[2], flags = 0x10; /* immutable */
	char link[64];
	void *at;

	(void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
	for (const int *how = (const int[]){ O_RDWR, O_WRONLY, O_RDWR | O_TRUNC, O_RDONLY | O_TRUNC,
					     O_WRONLY | O_APPEND, O_RDWR | O_DIRECT, -1 };
	     *how != -1; how++) {
		cleanup_close int again = open(link, *how | O_CLOEXEC);

		if (again >= 0)
			return "opening it again";
	}
	if (write(fd, zeros, 1) > 0 || pwrite(fd, zeros, 1, 0) > 0 || pwritev2(fd, &iov, 1, 0, 0) > 0)
		return "write";
	if (truncate(link, 0) == 0 || truncate(link, (off_t)nbytes * 2) == 0 || ftruncate(fd, 0) == 0)
		return "truncate";
	for (const int *mode = (const int[]){ 0, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, FALLOC_FL_ZERO_RANGE,
					      FALLOC_FL_COLLAPSE_RANGE, -1 };
	     *mode != -1; mode++)
		if (fallocate(fd, *mode, 0, 4096) == 0)
			return "fallocate";
	if (mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED)
		return "a shared mapping";
	at = mmap(NULL, nbytes, PROT_READ, MAP_SHARED, fd, 0);
	if (at == MAP_FAILED)
		return "(it cannot even be mapped for reading)";
	if (mprotect(at, 4096, PROT_READ | PROT_WRITE) == 0)
		return "mprotect";
	if (madvise(at, 4096, MADV_REMOVE) == 0)
		return "MADV_REMOVE";
	mem = open("/proc/self/mem", O_RDWR | O_CLOEXEC); /* writes where the process itself may not */
	if (mem >= 0 && pwrite(mem, zeros, sizeof(zeros), (off_t)(uintptr_t)at) > 0)
		return "/proc/self/mem";
	(void)munmap(at, nbytes);
	if (ftruncate(source, 4096) == 0 &&
	    (sendfile(fd, source, NULL, 4096) > 0 || copy_file_range(source, NULL, fd, &(off_t){ 0 }, 4096, 0) > 0))
		return "sendfile";
	if (pipe2(p, O_CLOEXEC) == 0) {
		pipe_end = p[0];
		(void)!write(p[1], zeros, sizeof(zeros));
		(void)close(p[1]);
		if (splice(p[0], NULL, fd, &(off_t){ 0 }, sizeof(zeros), 0) > 0)
			return "splice";
	}
	if (fchmod(fd, 0777) == 0 || fchown(fd, getuid(), getgid()) == 0)
		return "changing its owner or mode";
	if (ioctl(fd, FS_IOC_SETFLAGS, &flags) == 0)
		return "making it immutable";
	if (fsetxattr(fd, "trusted.enemy", "1", 1, 0) == 0 || fsetxattr(fd, "user.enemy", "1", 1, 0) == 0)
		return "an attribute";
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE) == 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0)
		return "sealing it";
	if (fcntl(fd, F_SETLEASE, F_RDLCK) == 0)
		return "a lease"; /* the daemon's opening it for writing would wait */
	return NULL;
}

static int64_t write_paths(const void *arg)
{
	const struct target *t = arg;
	const char *how;
	struct raw r;

	MUST(raw_client(&r, t->path), 0);
	MUST((int)first_wrong(&r, t->path), -1);
	how = writes(r.arena, r.bytes);
	if (how)
		return peer_say("the arena can be changed: %s", how);
	how = writes(r.table, r.table_bytes);
	if (how)
		return peer_say("the table can be changed: %s", how);
	/* The state of the mapping is its own, but not its size. */
	TRUE(ftruncate(r.state, 0) < 0 && ftruncate(r.state, 1 << 20) < 0);
	MUST((int)first_wrong(&r, t->path), -1);
	raw_close(&r);
	return 0;
}

/* It writes what it likes into its view and its state: nobody else is told. */
static int64_t scribbled(const void *arg)
{
	const struct target *t = arg;
	struct raw r;
	void *state;

	for (int turn = 0; turn < 4; turn++) {
		MUST(raw_client(&r, t->path), 0);
		state = mmap(NULL, size_of(r.state), PROT_READ | PROT_WRITE, MAP_SHARED, r.state, 0);
		TRUE(state != MAP_FAILED);
		memset(state, turn % 2 ? 0xFF : 0, size_of(r.state));
		memset(r.base, 0xEE, r.bytes + page_bytes()); /* and the sentinel */
		(void)fallocate(r.state, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)size_of(r.state));
		MUST(job(&r, r.view, 0, r.bytes), 0);
		MUST(hold(&r, r.view, WIRE_HOLD_DROP, 0, (uint32_t)(r.bytes / extent_bytes())), 0);
		for (uint64_t i = 0; i < r.bytes; i += page_bytes())
			TRUE(r.base[i] == 0xEE); /* a drop loses no write */
		memset(state, 0xFF, size_of(r.state));
		(void)munmap(state, size_of(r.state));
		raw_close(&r);
	}
	return 0;
}

/* It takes its memory back from userfaultfd and touches what is not there: zeros in its own arena mapping, which nobody
 * else may see, and which the daemon takes back. */
static int64_t touched_holes(const void *arg)
{
	const struct target *t = arg;
	struct wire_admin drop = { .flags = WIRE_FORCE };
	cleanup_close int file = open(t->other, O_RDONLY | O_CLOEXEC);
	volatile unsigned char sum = 0;
	struct raw r;

	MUST(raw_client(&r, t->other), 0);
	WIRE_INIT(drop, WIRE_DROP, 0);
	for (int turn = 0; turn < 3; turn++) {
		struct uffdio_range range = { (uintptr_t)r.base, r.bytes };

		(void)ask(&r, &drop, &file, 1); /* (nobody may not, if others have it) */
		(void)ioctl(r.uffd, UFFDIO_UNREGISTER, &range);
		for (uint64_t i = 0; i < r.bytes; i += page_bytes())
			sum = (unsigned char)(sum + r.base[i]);
	}
	{
		unsigned char *p = arena_mapped(&r); /* of which the daemon never hears */

		TRUE(p && mprotect(p, r.bytes, PROT_READ) == 0);
		(void)ask(&r, &drop, &file, 1);
		for (uint64_t i = 0; i < r.bytes; i += page_bytes())
			sum = (unsigned char)(sum + p[i]);
		(void)munmap(p, r.bytes + page_bytes());
	}
	raw_close(&r);
	MUST(raw_client(&r, t->other), 0);
	MUST((int)first_wrong(&r, t->other), -1);
	raw_close(&r);
	return 0;
}

/* Its view goes away, moves and becomes something else under the daemon's hands. */
static int64_t views_that_change(const void *arg)
{
	const struct target *t = arg;
	struct raw r;

	for (int turn = 0; turn < 6; turn++) {
		uint64_t half;

		MUST(raw_client(&r, t->path), 0);
		MUST((int)first_wrong(&r, t->path), -1);
		half = round_down(r.bytes / 2, page_bytes());
		switch (turn) {
		case 0:
			(void)munmap(r.base, half);
			break;
		case 1:
			(void)mmap(r.base, half, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1,
				   0);
			break;
		case 2:
			(void)mremap(r.base, r.bytes, r.bytes, MREMAP_MAYMOVE | MREMAP_DONTUNMAP);
			break;
		case 3: /* every other page: as many mappings as the kernel allows */
			for (uint64_t i = 0; i < r.bytes; i += 2 * page_bytes())
				(void)mprotect(r.base + i, page_bytes(), PROT_NONE);
			break;
		case 4:
			(void)madvise(r.base, r.bytes, MADV_DONTNEED);
			(void)madvise(r.base, r.bytes, MADV_DONTFORK);
			break;
		default:
			(void)mmap(r.base, half, PROT_READ, MAP_SHARED | MAP_FIXED, r.table, 0);
		}
		ANSWERED(job(&r, r.view, 0, r.bytes));
		ANSWERED(hold(&r, r.view, WIRE_HOLD_ADD, 0, 1));
		ANSWERED(hold(&r, r.view, WIRE_HOLD_DROP, 0, (uint32_t)(r.bytes / extent_bytes())));
		ANSWERED(with_value(&r, WIRE_FORBID, r.view, 1));
		raw_close(&r);
	}
	return 0;
}

/* ------------------------------------------------------------------ those who do not listen */

/* Asks and pings as long as the sockets take it, and reads nothing. Stays so. */
static int64_t deaf(const void *arg)
{
	const struct target *t = arg;
	struct wire_plain m;
	static struct raw r[8];

	for (size_t i = 0; i < ARRAY_SIZE(r); i++) {
		MUST(raw_client(&r[i], t->path), 0);
		WIRE_INIT(m, WIRE_PING, 1);
		while (wire_send(r[i].notify, &m, NULL, 0, false) == 0)
			;
		WIRE_INIT(m, WIRE_LS, 1);
		while (wire_send(r[i].control, &m, NULL, 0, false) == 0)
			;
	}
	return 0;
}

/* ------------------------------------------------------------------ the test of all these */

static const struct {
	const char *name;
	peer_fn fn;
} attacks[] = {
	{ "garbage first", garbage_first },
	{ "garbage later", garbage_later },
	{ "wrong place", wrong_place },
	{ "without memory", without_memory },
	{ "replayed", replayed },
	{ "interleaved", interleaved },
	{ "wrong files", wrong_files },
	{ "wrong userfaultfds", wrong_userfaultfds },
	{ "unready userfaultfds", unready_userfaultfds },
	{ "waiting userfaultfds", waiting_userfaultfds },
	{ "wrong layouts", wrong_layouts },
	{ "wrong maps", wrong_maps },
	{ "too many maps", too_many_maps },
	{ "others", others },
	{ "tools of nobody", tools_of_nobody },
	{ "write paths", write_paths },
	{ "scribbled", scribbled },
	{ "touched holes", touched_holes },
	{ "views that change", views_that_change },
	{ "deaf", deaf },
};

static struct use U;
static struct target T;

static void begin(const char *options)
{
	struct use other;
	char above[300];

	daemon_start(&D, options, NULL);
	(void)snprintf(above, sizeof(above), "%s/..", D.folder);
	ck_assert_int_eq(chmod(above, 0711), 0); /* for nobody */
	U = new_model("honest.safetensors", TENSORS, TENSOR_BYTES, 71, 0);
	other = new_model("other.safetensors", 2, TENSOR_BYTES, 72, 1);
	ck_assert_uint_lt(strlen(U.path), sizeof(T.path));
	ck_assert_uint_lt(strlen(other.path), sizeof(T.other));
	memcpy(T.path, U.path, sizeof(T.path));
	memcpy(T.other, other.path, sizeof(T.other));
	peer_new(&Good, getuid());
	must_do(&Good, do_open_and_check, &U);
}

static int64_t honest(const void *arg)
{
	const struct target *t = arg;
	struct raw r;

	for (int i = 0; i < 2; i++) {
		MUST(raw_client(&r, i ? t->other : t->path), 0);
		MUST((int)first_wrong(&r, i ? t->other : t->path), -1);
		raw_close(&r);
	}
	return 0;
}

/* Who is honest is served: who was there, and who comes. */
static void must_serve(void)
{
	struct peer p;

	ck_assert_int_eq(daemon_answers(&D), D.pid);
	must_do(&Good, do_release, &U);
	must_do(&Good, do_check, &U);
	peer_new(&p, getuid());
	must_do(&p, do_open_and_check, &U);
	peer_leave(&p);
}

/* Everything that the daemon had before, and no more. Arenas: cache of the two files may stay. */
static void must_hold(const struct held *before)
{
	struct held most = *before, now;

	most.threads += 1; /* one more of the honest client's, which is started when it is first needed */
	most.maps += 400;  /* the C library keeps stacks of threads that have ended; an attack makes more mappings */
	most.arena_bytes = MAX(most.arena_bytes, file_bytes(T.path) + file_bytes(T.other) + 4 * extent());
	now = daemon_held_until(&D, &most);
	ck_assert_uint_le(now.fds, most.fds);
	ck_assert_uint_le(now.threads, most.threads);
	ck_assert_uint_le(now.maps, most.maps);
	ck_assert_uint_le(now.arena_bytes, most.arena_bytes);
	if (!SANITIZED) /* (a sanitizer keeps what was freed) */
		ck_assert_uint_le(now.anon_bytes, most.anon_bytes + 8 * MiB);
	ck_assert_uint_le(stat_until_at_most("clients", 2), 2); /* the honest one, and who asks */
	ck_assert_uint_le(stat_until_at_most("mappings", 1), 1);
}

/* A fraction of a second of the daemon's: nothing in it may turn in circles. */
static void must_be_idle(void)
{
	char path[64], text[1024];
	uint64_t cpu[2];

	(void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)D.pid);
	for (int i = 0; i < 2; i++) {
		cleanup_fclose FILE *f = fopen(path, "re");
		unsigned long long user, sys;

		ck_assert(f && fgets(text, sizeof(text), f));
		ck_assert_int_eq(sscanf(strrchr(text, ')'), ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu",
					&user, &sys),
				 2);
		cpu[i] = (user + sys) * 1000 / (uint64_t)sysconf(_SC_CLK_TCK);
		if (i == 0)
			(void)usleep(500000); /* (the span that is measured) */
	}
	ck_assert_uint_le(cpu[1] - cpu[0], SANITIZED ? 300 : 100);
}

START_TEST(test_enemy_harms_nobody)
{
	bool root = getuid() == 0;
	struct held before;

	begin("");
	peer_new(&Evil, getuid());
	must_do(&Evil, honest, &T);
	peer_leave(&Evil);
	(void)stat_until_at_most("clients", 2);
	before = held_by(D.pid);
	for (int i = 0; i < (root ? 2 : 1); i++) {
		peer_new(&Evil, i == 0 && root ? NOBODY : getuid());
		must_do(&Evil, attacks[_i].fn, &T);
		must_serve(); /* while he is there */
		must_be_idle();
		peer_kill(&Evil);
		must_serve();
	}
	must_hold(&before);
	peer_leave(&Good);
}
END_TEST

/* ------------------------------------------------------------------ too many */

#define CROWD 10000

static int crowd[CROWD];
static unsigned int nr_crowd;

/* Connects as often as it may, and says HELLO. The text of the refusal names the limit. */
static int64_t crowd_talks(const void *arg)
{
	struct rlimit limit;
	unsigned int in = 0;

	(void)arg;
	TRUE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = limit.rlim_max;
	TRUE(setrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_max > CROWD + 1000);
	for (nr_crowd = 0; nr_crowd < CROWD; nr_crowd++) {
		struct raw r;
		int e = raw_hello(&r);

		if (e == 0) {
			in++;
			(void)close(r.notify);
			if (r.device >= 0)
				(void)close(r.device);
		} else if (e != -EUSERS || !strstr(A.welcome.text, "max-clients-per-user") ||
			   !strstr(A.welcome.text, "256")) {
			return peer_say("connection %u: %d: %s", nr_crowd, e, A.welcome.text);
		}
		crowd[nr_crowd] = r.control;
	}
	return in;
}

/* The same, but says nothing. Returns how many are still open. */
static int64_t crowd_is_silent(const void *arg)
{
	struct rlimit limit;

	(void)arg;
	TRUE(getrlimit(RLIMIT_NOFILE, &limit) == 0);
	limit.rlim_cur = limit.rlim_max;
	TRUE(setrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_max > CROWD + 1000);
	for (nr_crowd = 0; nr_crowd < CROWD; nr_crowd++) {
		crowd[nr_crowd] = dial();
		TRUE(crowd[nr_crowd] >= 0);
	}
	return 0;
}

/* How many of them the daemon has not closed; waits until it is at most so many. */
static int64_t crowd_left(const void *arg)
{
	static struct pollfd p[CROWD];
	uint64_t end = now_ms() + 2 * WAIT, most = *(const uint64_t *)arg;
	int64_t left;

	do {
		left = nr_crowd;
		for (unsigned int i = 0; i < nr_crowd; i++)
			p[i] = (struct pollfd){ crowd[i], POLLRDHUP, 0 };
		TRUE(poll(p, nr_crowd, 100) >= 0);
		for (unsigned int i = 0; i < nr_crowd; i++)
			left -= p[i].revents != 0;
	} while ((uint64_t)left > most && now_ms() < end);
	return left;
}

static int64_t crowd_goes(const void *arg)
{
	(void)arg;
	while (nr_crowd > 0)
		(void)close(crowd[--nr_crowd]);
	return 0;
}

/* _i: they say nothing. As nobody: what one user may have is not what another lacks. */
START_TEST(test_ten_thousand_connections)
{
	struct held before;
	int64_t n;

	begin("");
	(void)stat_until_at_most("clients", 2);
	before = held_by(D.pid);
	shared_words()[0] = 0;
	peer_begin(&Good, "do_storm", do_storm, &U, sizeof(U));
	peer_new(&Evil, NOBODY);
	if (_i == 0) {
		n = peer_does(&Evil, crowd_talks, &T);
		ck_assert_msg(n == 256, "%lld of them are let in: %s", (long long)n, Evil.text);
	} else {
		must_do(&Evil, crowd_is_silent, &T);
		n = peer_does(&Evil, crowd_left, &(uint64_t){ 256 });
		ck_assert_msg(n >= 0 && n <= 256, "%lld may say nothing: %s", (long long)n, Evil.text);
	}
	ck_assert_uint_le(held_by(D.pid).fds, before.fds + 3 * 256 + 32);
	shared_words()[0] = 1;
	n = peer_end(&Good);
	ck_assert_msg(n > 0, "%s", Good.text);
	must_serve();  /* while they are there */
	if (_i == 1) { /* and nobody is waited for without end */
		n = peer_does(&Evil, crowd_left, &(uint64_t){ 0 });
		ck_assert_msg(n == 0, "%lld are still waited for: %s", (long long)n, Evil.text);
	}
	must_do(&Evil, crowd_goes, &T);
	must_hold(&before);
	peer_kill(&Evil);
	peer_leave(&Good);
}
END_TEST

/* As many as there are of the one kind; the next one's text names the option. */
static int64_t over_the_limits(const void *arg)
{
	const struct target *t = arg;
	struct raw r[8];
	unsigned int n = 0;
	int e;

	MUST(raw_hello(&r[0]), 0);
	for (n = 0; n < 3; n++)
		MUST(raw_attach(&r[0], t->path), 0);
	MUST(raw_attach(&r[0], t->path), -EUSERS);
	TRUE(strstr(A.error.text, "max-views") && strstr(A.error.text, "3"));
	for (n = 1; (e = raw_hello(&r[n])) == 0; n++)
		TRUE(n < ARRAY_SIZE(r) - 1);
	/* The honest one is the fifth; whoever has just asked for the figures may not be gone yet. */
	TRUE(e == -EUSERS && (n == 4 || n == 3));
	TRUE(strstr(A.welcome.text, "--max-clients ") && strstr(A.welcome.text, "5"));
	(void)close(r[n].control);
	while (n > 0)
		raw_close(&r[--n]);
	return 0;
}

START_TEST(test_limits_are_named)
{
	begin("--max-clients=5 --max-clients-per-user=5 --max-views=3");
	peer_new(&Evil, getuid());
	(void)peer_does(&Evil, honest, &T);
	for (int i = 0; i < 3; i++) {
		ck_assert_uint_le(stat_until_at_most("sessions", 2), 2); /* the honest one, and who asks */
		must_do(&Evil, over_the_limits, &T);
	}
	must_serve();
	peer_leave(&Evil);
	peer_leave(&Good);
}
END_TEST

/* As the description for direct reads: another file, which must not be read in the place of the first. */
static int64_t wrong_direct_files(const void *arg)
{
	const struct target *t = arg;

	for (int kind = -2; kind < NR_KINDS; kind++) {
		cleanup_close int file = open(t->other, O_RDONLY | O_CLOEXEC);
		cleanup_close int fd = kind == -2 ? open(t->path, O_RDONLY | O_CLOEXEC | O_DIRECT) :
				       kind == -1 ? open(t->other, O_RDONLY | O_CLOEXEC) : /* not direct */
							  fd_of_kind(kind);
		const struct segment whole = { 0, 0, size_of(file) };
		const struct unit unit = { 0,
					   (uint64_t)(kind + 3) }; /* nobody has this layout yet: it is read by these */
		struct raw r;
		int e;

		TRUE(file >= 0 && fd >= 0);
		MUST(raw_hello(&r), 0);
		MUST(raw_uffd(&r), 0);
		e = attach_fds(&r, file, -1, fd, &(struct layout){ &whole, 1, &unit, 1, 0 });
		TRUE(e == 0 || A.h.type == WIRE_ERROR);
		if (e == 0) { /* it may do without, but then it reads the right file */
			TRUE(!A.attached.known);
			take_attached(&r);
			MUST(raw_map(&r), 0);
			MUST((int)first_wrong(&r, t->other), -1);
		}
		raw_close(&r);
	}
	return 0;
}

START_TEST(test_direct_descriptor_of_another_file)
{
	begin("");
	peer_new(&Evil, getuid() ? getuid() : NOBODY);
	must_do(&Evil, wrong_direct_files, &T);
	must_serve();
	peer_leave(&Evil);
	peer_leave(&Good);
}
END_TEST

/* A file as large as a file can be costs the daemon no memory before it is read; what cannot be served is refused with a
 * reason. */
static int64_t huge_files(const void *arg)
{
	struct raw r;

	(void)arg;
	MUST(raw_hello(&r), 0);
	for (int bits = 30; bits < 46; bits++) {
		cleanup_close int fd = memfd_create("enemy", MFD_CLOEXEC);
		int e;

		TRUE(fd >= 0 && ftruncate(fd, (off_t)1 << bits) == 0);
		e = attach_whole(&r, fd, -1);
		if (e < 0 && e != -EPROTO && !(A.h.type == WIRE_ERROR && A.error.text[0]))
			return peer_say("2^%d bytes: %d", bits, e);
	}
	/* One part of a file, again and again. */
	{
		static struct segment segs[1000];
		cleanup_close int fd = memfd_create("enemy", MFD_CLOEXEC);
		uint64_t part = 32 * GiB;

		TRUE(fd >= 0 && ftruncate(fd, (off_t)part) == 0);
		for (uint64_t i = 0; i < ARRAY_SIZE(segs); i++)
			segs[i] = (struct segment){ i * part, 0, part };
		ANSWERED(attach_fds(&r, fd, -1, -1, &(struct layout){ .segs = segs, .nr_segs = ARRAY_SIZE(segs) }));
	}
	raw_close(&r);
	return 0;
}

START_TEST(test_huge_files)
{
	struct held before, now;

	begin("");
	before = held_by(D.pid);
	peer_new(&Evil, getuid() ? getuid() : NOBODY);
	must_do(&Evil, huge_files, &T);
	now = held_by(D.pid);
	ck_assert_msg(now.anon_bytes < before.anon_bytes + 512 * MiB, "the daemon has %ju MiB more",
		      (uintmax_t)(now.anon_bytes - before.anon_bytes) / MiB);
	must_serve();
	peer_leave(&Evil);
	peer_leave(&Good);
}
END_TEST

/* ------------------------------------------------------------------ stopped */

static struct raw Stopped;

static int64_t mapped_and_read(const void *arg)
{
	const struct target *t = arg;

	MUST(raw_client(&Stopped, t->path), 0);
	MUST((int)first_wrong(&Stopped, t->path), -1);
	return 0;
}

static int64_t read_again(const void *arg)
{
	const struct target *t = arg;

	MUST((int)first_wrong(&Stopped, t->path), -1);
	return 0;
}

/* A stopped client has weights mapped, and answers nothing: others are served, and its memory is taken back. */
START_TEST(test_stopped_client)
{
	struct use other;

	begin("--budget=20M"); /* one of the two files, and a half */
	other = U;
	(void)snprintf(other.path, sizeof(other.path), "%s", T.other);
	other.seed = 72;
	other.slot = 1;
	peer_new(&Evil, getuid() ? getuid() : NOBODY);
	must_do(&Evil, mapped_and_read, &T);
	ck_assert_int_eq(kill(Evil.pid, SIGSTOP), 0);
	for (int i = 0; i < 3; i++) {
		must_do(&Good, do_open_and_check, &other);
		must_do(&Good, do_check, &U);
		must_tool("drop --all --force");
		ck_assert_uint_eq(stat_until_at_most("resident_bytes", 0), 0);
		must_serve();
		must_do(&Good, do_close, &other);
	}
	ck_assert_int_eq(kill(Evil.pid, SIGCONT), 0);
	must_do(&Evil, read_again, &T);
	peer_leave(&Evil);
	peer_leave(&Good);
}
END_TEST

/* ------------------------------------------------------------------ at random */

static uint64_t some(uint64_t *random, const struct raw *r)
{
	static const uint64_t numbers[] = {
		0, 1, 2, 3, 4096, UINT32_MAX, UINT64_MAX, 1ull << 46, 1ull << 47, 1ull << 63
	};

	switch (rnd(random) % 4) {
	case 0:
		return numbers[rnd(random) % ARRAY_SIZE(numbers)];
	case 1:
		return r->view;
	case 2:
		return (uintptr_t)r->base + rnd(random) % (r->bytes + 2 * page_bytes());
	default:
		return rnd(random) >> rnd(random) % 64;
	}
}

/* Well-formed messages with any numbers in them, on connections with memory. */
static int64_t random_messages(const void *arg)
{
	static union wire_any m;
	static const enum wire_type types[] = { WIRE_CLAIM, WIRE_CLAIMED, WIRE_DETACH,    WIRE_MAP,      WIRE_UNMAP,
						WIRE_HOLD,  WIRE_STAGE,   WIRE_CLASS,     WIRE_FORBID,   WIRE_JOB,
						WIRE_JOB,   WIRE_JOB_END, WIRE_JOB_STATE, WIRE_VIEW_STAT };
	const struct target *t = arg;
	uint64_t end = now_ms() + soak_ms(3000), random = (uint64_t)getpid();

	while (now_ms() < end) {
		struct raw r;

		MUST(raw_client(&r, rnd(&random) % 2 ? t->path : t->other), 0);
		for (int i = 0; i < 200; i++) {
			enum wire_type type = types[rnd(&random) % ARRAY_SIZE(types)];
			uint32_t n = 1 + (uint32_t)rnd(&random) % 8;

			memset(&m, 0, sizeof(m));
			switch (type) {
			case WIRE_CLAIM:
				WIRE_INIT(m.claim, type, 0);
				m.claim.parent = some(&random, &r) % 100;
				break;
			case WIRE_CLAIMED:
				WIRE_INIT(m.claimed, type, 0);
				m.claimed.number = some(&random, &r);
				break;
			case WIRE_MAP:
			case WIRE_UNMAP:
				WIRE_INIT(m.map, type, 0);
				m.map.view = rnd(&random) % 4 ? r.view : some(&random, &r);
				m.map.address = some(&random, &r);
				break;
			case WIRE_HOLD:
				m.h = (struct wire_head){ WIRE_MAGIC, type, wire_ranges_bytes(n), 0 };
				m.ranges.view = rnd(&random) % 4 ? r.view : some(&random, &r);
				m.ranges.hold = (uint32_t)rnd(&random) % 3;
				m.ranges.nr_ranges = n;
				for (uint32_t k = 0; k < n; k++)
					m.ranges.ranges[k] =
						(struct wire_range){ (uint32_t)some(&random, &r) >> 1,
								     1 + ((uint32_t)some(&random, &r) >> 1) };
				break;
			case WIRE_STAGE:
				WIRE_INIT(m.stage, type, 0);
				memset(m.stage.name, (int)rnd(&random), rnd(&random) % WIRE_NAME);
				break;
			case WIRE_CLASS:
			case WIRE_FORBID:
				WIRE_INIT(m.value, type, 0);
				m.value.view = r.view;
				m.value.value = (uint32_t)rnd(&random) % 2;
				break;
			case WIRE_JOB:
				m.h = (struct wire_head){ WIRE_MAGIC, type, wire_job_bytes(n), 0 };
				m.job.gentle = (uint32_t)rnd(&random) % 2;
				m.job.nr_ranges = n;
				for (uint32_t k = 0; k < n; k++)
					m.job.ranges[k] = (struct wire_job_range){ rnd(&random) % 8 ? r.view : 1,
										   rnd(&random) % (r.bytes + 1),
										   rnd(&random) % (r.bytes + 1) };
				break;
			case WIRE_JOB_END:
			case WIRE_JOB_STATE:
				WIRE_INIT(m.job_id, type, 0);
				m.job_id.job = A.h.type == WIRE_JOB_INFO ? A.job_info.job : some(&random, &r);
				break;
			default:
				WIRE_INIT(m.view, type, 0);
				m.view.view = some(&random, &r);
			}
			ANSWERED(ask(&r, &m, NULL, 0));
		}
		raw_close(&r);
	}
	return 0;
}

START_TEST(test_random_messages)
{
	struct held before;
	struct peer evil[3];

	begin("");
	peer_new(&Evil, getuid());
	must_do(&Evil, honest, &T);
	peer_leave(&Evil);
	(void)stat_until_at_most("clients", 2);
	before = held_by(D.pid);
	for (int i = 0; i < 3; i++) {
		peer_new(&evil[i], i && !getuid() ? NOBODY : getuid());
		peer_begin(&evil[i], "random_messages", random_messages, &T, sizeof(T));
	}
	while (!peer_has_ended(&evil[0]))
		must_serve();
	for (int i = 0; i < 3; i++) {
		must_end(&evil[i]);
		peer_kill(&evil[i]);
	}
	must_serve();
	must_be_idle();
	must_hold(&before);
	peer_leave(&Good);
}
END_TEST

/* ------------------------------------------------------------------ a file server of his own */

struct fuse {
	char mount[240];
	char real[240];        /* what the file says it is: name, size, times, numbers, and its first bytes */
	uint64_t head_bytes;   /* so many of them; what follows is not the real file's */
	uint32_t silent;       /* operation that is never answered, once... */
	uint32_t silent_after; /* ...so many were */
};

static int Fuse_fd = -1;
static struct fuse Fuse;
static struct stat Fuse_stat;
static uint64_t Fuse_node, Fuse_generation;

static void fuse_attr(struct fuse_attr *a, bool root)
{
	*a = (struct fuse_attr){ .ino = 1, .mode = S_IFDIR | 0755, .nlink = 2, .blksize = 4096 };
	if (!root) {
		*a = (struct fuse_attr){
			.ino = Fuse_stat.st_ino,
			.size = (uint64_t)Fuse_stat.st_size,
			.mode = S_IFREG | 0644,
			.nlink = 1,
			.blksize = 4096,
			.mtime = (uint64_t)Fuse_stat.st_mtim.tv_sec,
			.mtimensec = (uint32_t)Fuse_stat.st_mtim.tv_nsec,
			.ctime = (uint64_t)Fuse_stat.st_ctim.tv_sec,
			.ctimensec = (uint32_t)Fuse_stat.st_ctim.tv_nsec,
		};
	}
}

static void fuse_reply(uint64_t unique, int error, const void *data, size_t nbytes)
{
	struct fuse_out_header h = { .len = (uint32_t)(sizeof(h) + nbytes), .error = error, .unique = unique };
	struct iovec iov[2] = { { &h, sizeof(h) }, { (void *)(uintptr_t)data, nbytes } };

	(void)!writev(Fuse_fd, iov, nbytes ? 2 : 1);
}

static void *fuse_main(void *arg)
{
	static unsigned char in[1 << 18], data[1 << 17];
	const struct fuse_in_header *h = (void *)in;
	const struct fuse_read_in *read_in = (void *)(in + sizeof(*h));
	cleanup_close int real = open(Fuse.real, O_RDONLY | O_CLOEXEC);
	unsigned int seen = 0;

	(void)arg;
	while (read(Fuse_fd, in, sizeof(in)) > 0) {
		struct fuse_init_out init = { .major = FUSE_KERNEL_VERSION, .minor = 31, .max_write = 65536 };
		struct fuse_entry_out entry = { .nodeid = Fuse_node, .generation = Fuse_generation };
		struct fuse_attr_out attr = { 0 };
		struct fuse_open_out opened = { .fh = 1 };
		uint64_t n;

		if (h->opcode == Fuse.silent && seen++ >= Fuse.silent_after)
			continue;
		switch (h->opcode) {
		case FUSE_INIT:
			fuse_reply(h->unique, 0, &init, sizeof(init));
			break;
		case FUSE_LOOKUP:
			fuse_attr(&entry.attr, false);
			fuse_reply(h->unique, 0, &entry, sizeof(entry));
			break;
		case FUSE_GETATTR:
			fuse_attr(&attr.attr, h->nodeid == FUSE_ROOT_ID);
			fuse_reply(h->unique, 0, &attr, sizeof(attr));
			break;
		case FUSE_OPEN:
		case FUSE_OPENDIR:
			fuse_reply(h->unique, 0, &opened, sizeof(opened));
			break;
		case FUSE_READ:
			n = MIN((uint64_t)read_in->size, (uint64_t)Fuse_stat.st_size - read_in->offset);
			n = MIN(n, sizeof(data));
			(void)!pread(real, data, n, (off_t)read_in->offset);
			for (uint64_t i = 0; i < n; i++)
				if (read_in->offset + i >= Fuse.head_bytes)
					data[i] = 0xEE;
			fuse_reply(h->unique, 0, data, n);
			break;
		case FUSE_FORGET:
		case FUSE_BATCH_FORGET:
		case FUSE_INTERRUPT:
			break;
		case FUSE_FLUSH:
		case FUSE_RELEASE:
		case FUSE_RELEASEDIR:
			fuse_reply(h->unique, 0, NULL, 0);
			break;
		default:
			fuse_reply(h->unique, -ENOSYS, NULL, 0);
		}
	}
	return NULL;
}

/* In a peer: a file system with one file, which claims to be another. */
static int64_t fuse_start(const void *arg)
{
	struct {
		struct file_handle h;
		uint32_t words[MAX_HANDLE_SZ / 4];
	} handle = { .h.handle_bytes = MAX_HANDLE_SZ };
	char options[128];
	pthread_t thread;
	int mount_id;

	Fuse = *(const struct fuse *)arg;
	TRUE(stat(Fuse.real, &Fuse_stat) == 0);
	Fuse_node = 2;
	/* Of a file on tmpfs: generation, inode, upper half of that. A FUSE file's is made of node and generation. */
	if (name_to_handle_at(AT_FDCWD, Fuse.real, &handle.h, &mount_id, 0) == 0 && handle.h.handle_bytes == 12) {
		const uint32_t *w = (const uint32_t *)(const void *)handle.h.f_handle;

		Fuse_node = (uint64_t)w[0] << 32 | w[1];
		Fuse_generation = w[2];
	}
	Fuse_fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	TRUE(Fuse_fd >= 0);
	(void)snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", Fuse_fd);
	TRUE(mount("enemy", Fuse.mount, "fuse", MS_NOSUID | MS_NODEV, options) == 0);
	TRUE(pthread_create(&thread, NULL, fuse_main, NULL) == 0);
	return 0;
}

static char *Real_dir;

/* Mounts that end with the test. Files of the test lie on tmpfs then, whose file handles a FUSE server can imitate. */
static void own_mounts(void)
{
	ck_assert_int_eq(unshare(CLONE_NEWNS), 0);
	ck_assert_int_eq(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL), 0);
	Real_dir = test_dir;
	test_dir = data_text("%s/tmpfs", Real_dir);
	ck_assert_int_eq(mkdir(test_dir, 0755), 0);
	ck_assert_int_eq(mount("test", test_dir, "tmpfs", 0, NULL), 0);
}

static void own_mounts_end(void)
{
	daemon_stop(&D);
	if (Real_dir) {
		(void)umount2(test_dir, MNT_DETACH);
		free(test_dir);
		test_dir = Real_dir;
	}
}

static struct fuse fuse_of(const char *real, uint32_t silent, uint32_t after)
{
	struct fuse f = { .silent = silent, .silent_after = after, .head_bytes = 4096 };

	(void)snprintf(f.mount, sizeof(f.mount), "%s/fuse", test_dir);
	(void)mkdir(f.mount, 0755);
	ck_assert_uint_lt(strlen(real), sizeof(f.real));
	memcpy(f.real, real, strlen(real) + 1);
	return f;
}

/* His file says that it is another one: number, size, times and file handle are all his to choose. */
START_TEST(test_file_that_claims_to_be_another)
{
	struct peer server, good;
	struct use forged, real;
	struct fuse f;

	own_mounts();
	begin("");
	real = U;
	memcpy(real.path, T.other, sizeof(T.other));
	real.seed = 72;
	f = fuse_of(T.other, 0, 0);
	peer_new(&server, getuid());
	must_do(&server, fuse_start, &f);
	forged = real;
	(void)snprintf(forged.path, sizeof(forged.path), "%s/%s", f.mount, strrchr(T.other, '/') + 1);
	peer_new(&Evil, getuid());
	must_do(&Evil, do_open, &forged);
	must_do(&Evil, do_populate, &forged);
	peer_new(&good, getuid());
	must_do(&good, do_open_and_check, &real); /* nobody gets the enemy's bytes */
	/* Nor does the enemy get those of a file that was there first. */
	must_do(&good, do_disconnect, &real);
	peer_kill(&Evil);
	peer_kill(&server);
	must_serve();
	peer_leave(&good);
	peer_leave(&Good);
}
END_TEST

/* ...or it never answers. _i: to reading, or to what is asked about it when it is passed. */
START_TEST(test_file_server_that_never_answers)
{
	struct held before;
	struct peer server;
	struct use u;
	struct fuse f;

	own_mounts();
	begin("");
	u = U;
	u.seed = 72;
	(void)stat_until_at_most("clients", 2);
	before = held_by(D.pid);
	/* (A model is opened by a few reads of its head and one or two questions.) */
	f = fuse_of(T.other, _i ? FUSE_GETATTR : FUSE_READ, _i ? 3 : 2);
	(void)snprintf(u.path, sizeof(u.path), "%s/%s", f.mount, strrchr(T.other, '/') + 1);
	peer_new(&server, getuid());
	must_do(&server, fuse_start, &f);
	peer_new(&Evil, getuid());
	peer_begin(&Evil, "do_open_and_check", do_open_and_check, &u, sizeof(u));
	for (int i = 0; i < 5; i++) {
		cleanup_tool struct tool ls = tool_run(getuid(), "ls");

		ck_assert_int_eq(ls.code, 0);
		must_serve();
		must_tool("drop --all");
	}
	ck_assert(!peer_has_ended(&Evil)); /* or nothing was tested */
	ck_assert_int_eq(kill(Evil.pid, SIGKILL), 0);
	peer_kill(&server); /* now its files fail */
	ck_assert_int_eq(child_result(Evil.pid), 1000 + SIGKILL);
	must_serve();
	must_tool("drop --all");
	before.fds += 6; /* a view that has become a cache without a file */
	before.threads += 1;
	must_hold(&before);
	peer_leave(&Good);
}
END_TEST

/* ------------------------------------------------------------------ leftovers */

static unsigned int entries(const char *path)
{
	DIR *d = opendir(path);
	unsigned int n = 0;
	struct dirent *e;

	while (d && (e = readdir(d)))
		n += e->d_name[0] != '.';
	if (d)
		(void)closedir(d);
	return n;
}

/* G37: a /dev/shm that is far too small for the model is not needed at all; after each kill -9 of everything the next start
 * finds its way and nothing with a name stays. */
START_TEST(test_g37_kills_and_leftovers)
{
	unsigned int names = 0;

	if (getuid() == 0) {
		ck_assert_int_eq(unshare(CLONE_NEWNS), 0);
		ck_assert_int_eq(mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL), 0);
		ck_assert_int_eq(mount("test", "/dev/shm", "tmpfs", 0, "size=64k"), 0);
	}
	begin("");
	for (int i = 0; i < 20; i++) {
		peer_new(&Evil, getuid());
		must_do(&Evil, mapped_and_read, &T);
		if (i % 2)
			keeper_kill(&D);
		daemon_kill(&D);
		peer_kill(&Evil);
		peer_kill(&Good);
		if (i % 2)
			daemon_start_again(&D, "");
		else
			daemon_wait_other(&D); /* the keeper starts it */
		peer_new(&Good, getuid());
		must_do(&Good, do_open_and_check, &U);
		if (i == 1)
			names = entries(D.folder);
		if (i > 1)
			ck_assert_uint_eq(entries(D.folder), names);
		ck_assert_uint_le(stat_until_at_most("clients", 2), 2);
	}
	if (getuid() == 0)
		ck_assert_uint_eq(entries("/dev/shm"), 0);
	peer_leave(&Good);
}
END_TEST

static int fuse_is_here(void *arg)
{
	cleanup_close int fd = open("/dev/fuse", O_RDWR | O_CLOEXEC);

	(void)arg;
	return fd < 0 || unshare(CLONE_NEWNS) < 0;
}

/* ------------------------------------------------------------------ found by looking for it */

/* Memory of the daemon's arenas at most so much, in 10 s. */
static uint64_t arena_until_at_most(uint64_t most)
{
	uint64_t end = now_ms() + 10000, n;

	while ((n = held_by(D.pid).arena_bytes) > most && now_ms() < end)
		(void)usleep(20000);
	return n;
}

/* How long the honest client needs for a model that it has not had. */
static uint64_t honest_ms(unsigned int slot, size_t nr)
{
	cleanup_free char *name = data_text("fresh%u.safetensors", slot);
	struct use u = new_model(name, nr, 2 * MiB, 80 + slot, slot);
	uint64_t start = now_ms();

	must_do(&Good, do_open_and_check, &u);
	return now_ms() - start;
}

/* Slower by no more than what other work on the machine does. */
static void must_be_as_fast(uint64_t before_ms, uint64_t now)
{
	ck_assert_msg(now <= 10 * MAX(before_ms, 200u), "%ju ms, alone %ju ms", (uintmax_t)now, (uintmax_t)before_ms);
}

static int64_t read_other(const void *arg)
{
	const struct target *t = arg;
	struct raw r;

	MUST(raw_client(&r, t->other), 0);
	MUST((int)first_wrong(&r, t->other), -1);
	raw_close(&r);
	return 0;
}

static int64_t pinned_and_read(const void *arg)
{
	const struct target *t = arg;

	MUST(raw_client(&Stopped, t->other), 0);
	MUST((int)first_wrong(&Stopped, t->other), -1);
	MUST(with_value(&Stopped, WIRE_CLASS, Stopped.view, VIEW_PINNED), 0);
	return 0;
}

/* A client's pin ends with it. _i: 1 it was pinned before the daemon died. */
START_TEST(test_pin_of_the_dead)
{
	begin("");
	peer_new(&Evil, NOBODY);
	must_do(&Evil, pinned_and_read, &T);
	ck_assert_uint_gt(must_stat("pinned_bytes"), 0);
	if (_i == 1) {
		daemon_kill(&D);
		daemon_wait_other(&D);
		must_do(&Evil, pinned_and_read, &T); /* so that it is connected */
	}
	peer_kill(&Evil);
	ck_assert_uint_eq(stat_until_at_most("pinned_bytes", 0), 0);
	must_drop_all(false);
	must_serve();
	peer_leave(&Good);
}
END_TEST

static struct raw Hog;

static int64_t hog_opens(const void *arg)
{
	int kind = *(const int *)arg;
	cleanup_close int fd = memfd_create("enemy", MFD_CLOEXEC);

	TRUE(fd >= 0 && ftruncate(fd, (off_t)1 * GiB) == 0);
	MUST(raw_hello(&Hog), 0);
	MUST(raw_uffd(&Hog), 0);
	MUST(attach_whole(&Hog, fd, -1), 0);
	take_attached(&Hog);
	if (kind == 1)
		MUST(raw_map(&Hog), 0);
	if (kind == 2)
		MUST(with_view(&Hog, WIRE_DETACH, Hog.view), 0);
	return 0;
}

/* Fills holes through a mapping that the daemon does not know, until there is no more room. Returns how many bytes. */
static int64_t hog_touches(const void *arg)
{
	unsigned char *p = arena_mapped(&Hog);
	_Atomic uint64_t *words = shared_words();
	pid_t pid;

	(void)arg;
	TRUE(p && mprotect(p, Hog.bytes, PROT_READ) == 0);
	words[1] = 0;
	pid = fork();
	TRUE(pid >= 0);
	if (pid == 0) {
		volatile unsigned char sum = 0;

		(void)signal(SIGBUS, SIG_DFL);
		for (uint64_t i = 0; i < Hog.bytes; i += page_bytes()) {
			sum = (unsigned char)(sum + p[i]);
			words[1] = i + page_bytes();
		}
		_exit(0);
	}
	TRUE(child_result(pid) == 1000 + SIGBUS); /* there is an end to it */
	return (int64_t)words[1];
}

/*
 * A client fills the arenas' file system behind the daemon's back. _i: 0 by a file that it has attached, 1 mapped, too,
 * 2 given up, and the daemon has forgotten it. No other client gets a SIGBUS: neither one that has opened its model
 * before, nor one that comes.
 */
START_TEST(test_hog)
{
	struct use before, after;
	struct peer other;
	uint64_t had;
	int64_t n;

	begin("--budget=128M");
	before = new_model("before.safetensors", TENSORS, TENSOR_BYTES, 77, 1);
	after = new_model("after.safetensors", TENSORS, TENSOR_BYTES, 78, 2);
	peer_new(&other, getuid());
	must_do(&other, do_open, &before);
	had = held_by(D.pid).arena_bytes;
	peer_new(&Evil, NOBODY);
	must_do(&Evil, hog_opens, &_i);
	if (_i == 2)
		ck_assert_uint_le(stat_until_at_most("views", 2), 2);
	n = peer_does(&Evil, hog_touches, &_i);
	ck_assert_msg(n >= 0, "%s", Evil.text);
	if (_i == 2)
		ck_assert_int_eq(n, 0);
	else
		ck_assert_int_gt(n, (int64_t)(64 * MiB)); /* or nothing was tested */
	must_do(&other, do_check, &before);
	must_do(&Good, do_open_and_check, &after);
	/* What they have read, and some room for what is being read. */
	ck_assert_uint_le(arena_until_at_most(had + 2 * TENSORS * TENSOR_BYTES + 8 * extent()),
			  had + 2 * TENSORS * TENSOR_BYTES + 8 * extent());
	peer_kill(&Evil);
	must_serve();
	peer_leave(&other);
	peer_leave(&Good);
}
END_TEST

static struct raw Big;

static int64_t big_opens(const void *arg)
{
	cleanup_close int fd = memfd_create("enemy", MFD_CLOEXEC);

	(void)arg;
	MUST(raw_hello(&Big), 0);
	MUST(raw_uffd(&Big), 0);
	TRUE(fd >= 0 && ftruncate(fd, (off_t)15 << 40) == 0);
	MUST(attach_whole(&Big, fd, -1), -EUSERS); /* more than one user may have */
	TRUE(strstr(A.error.text, "TiB"));
	TRUE(ftruncate(fd, (off_t)3 << 40) == 0);
	MUST(attach_whole(&Big, fd, -1), 0);
	take_attached(&Big);
	return raw_map(&Big);
}

static int64_t big_touches(const void *arg)
{
	static struct wire_ranges m;
	_Atomic uint64_t *words = shared_words();
	int64_t sent = 0;

	(void)arg;
	while (!words[0]) {
		m = (struct wire_ranges){ .view = Big.view,
					  .nr_ranges = 1,
					  .ranges = { { 0, (uint32_t)(Big.bytes / extent()) } } };
		m.h = (struct wire_head){ WIRE_MAGIC, WIRE_TOUCHED, wire_ranges_bytes(1), 0 };
		if (wire_send(Big.notify, &m, NULL, 0, false) == 0)
			sent++;
		else
			(void)usleep(1000);
	}
	return sent;
}

/* Says without a pause that it has touched all of the largest file that one may have. */
START_TEST(test_big_ranges_delay_nobody)
{
	struct held before;
	uint64_t alone;
	int64_t n;

	begin("");
	alone = honest_ms(1, 6);
	before = held_by(D.pid);
	shared_words()[0] = 0;
	peer_new(&Evil, NOBODY);
	must_do(&Evil, big_opens, &T);
	peer_begin(&Evil, "big_touches", big_touches, &T, sizeof(T));
	for (int i = 0; i < 3; i++)
		must_be_as_fast(alone, honest_ms((unsigned int)i + 2, 6));
	shared_words()[0] = 1;
	n = peer_end(&Evil);
	ck_assert_msg(n > 10, "%lld: %s", (long long)n, Evil.text);
	ck_assert_uint_le(held_by(D.pid).anon_bytes, before.anon_bytes + 512 * MiB);
	peer_kill(&Evil);
	must_serve();
	peer_leave(&Good);
}
END_TEST

/* Something of its own lies in an extent, which can so never be taken back from it. */
static int64_t stuck_map(const void *arg)
{
	const struct target *t = arg;

	MUST(raw_client(&Stopped, t->other), 0);
	TRUE(mmap(Stopped.base + extent() + 8 * page_bytes(), page_bytes(), PROT_READ,
		  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
	return 0;
}

/* The daemon that takes such a client over serves the others, though it lives. _i: 0 the file was read before. */
START_TEST(test_stuck_extent_and_a_new_daemon)
{
	struct peer third;

	begin("");
	peer_new(&Evil, NOBODY);
	must_do(&Evil, stuck_map, &T);
	if (_i == 0) {
		peer_new(&third, NOBODY);
		must_do(&third, read_other, &T);
		peer_kill(&third);
		must_tool("drop --all --force");
	}
	daemon_kill(&D);
	daemon_wait_other(&D);
	peer_new(&third, NOBODY);
	must_do(&third, read_other, &T);
	peer_leave(&third);
	must_serve();
	peer_kill(&Evil);
	peer_leave(&Good);
}
END_TEST

static int64_t forbid_it(const void *arg)
{
	const struct target *t = arg;

	MUST(raw_client(&Stopped, t->other), 0);
	MUST(with_value(&Stopped, WIRE_FORBID, Stopped.view, 1), 0);
	return 0;
}

/* (A system call tells it without a SIGBUS.) */
static int64_t touch_forbidden(const void *arg)
{
	cleanup_close int to = memfd_create("enemy", MFD_CLOEXEC);
	uint64_t at = *(const uint64_t *)arg;
	ssize_t n = write(to, Stopped.base + at, 8);

	return n < 0 ? -errno : n;
}

/* Strict mode is kept by the next daemon, too. */
START_TEST(test_forbidden_stays)
{
	int64_t n;

	begin("");
	peer_new(&Evil, getuid());
	must_do(&Evil, forbid_it, &T);
	n = peer_does(&Evil, touch_forbidden, &(uint64_t){ 0 });
	ck_assert_msg(n == -EFAULT, "%lld", (long long)n);
	daemon_kill(&D);
	daemon_wait_other(&D);
	n = peer_does(&Evil, touch_forbidden, &(uint64_t){ extent() });
	ck_assert_msg(n == -EFAULT, "after the daemon's death: %lld", (long long)n);
	peer_kill(&Evil);
	must_serve();
	peer_leave(&Good);
}
END_TEST

/* Nothing could be taken back from it: not where it could do better. */
static int64_t user_only(const void *arg)
{
	const struct target *t = arg;
	uint32_t flags;
	struct raw r;
	int fd;

	MUST(raw_hello(&r), 0);
	fd = fresh_uffd(&r, &flags);
	TRUE(fd >= 0);
	if (r.device >= 0)
		MUST(pass_uffd(&r, fd, WIRE_UFFD_USER_ONLY), -EPERM);
	MUST(pass_uffd(&r, fd, flags), 0);
	r.uffd = fd;
	MUST(raw_attach(&r, t->other), 0);
	MUST(raw_map(&r), 0);
	MUST((int)first_wrong(&r, t->other), -1);
	return 0;
}

START_TEST(test_user_only_where_more_is_given)
{
	begin("");
	peer_new(&Evil, NOBODY);
	must_do(&Evil, user_only, &T);
	must_drop_all(true);
	peer_kill(&Evil);
	must_serve();
	peer_leave(&Good);
}
END_TEST

/* Maps one small file until it is refused. Returns how often. */
static int64_t maps_until_refused(const void *arg)
{
	cleanup_close int fd = memfd_create("enemy", MFD_CLOEXEC);
	int64_t nr = 0;

	(void)arg;
	TRUE(fd >= 0 && ftruncate(fd, 4096) == 0);
	MUST(raw_hello(&Stopped), 0);
	MUST(raw_uffd(&Stopped), 0);
	MUST(attach_whole(&Stopped, fd, -1), 0);
	take_attached(&Stopped);
	for (;; nr++) {
		unsigned char *p = arena_mapped(&Stopped);
		int e;

		TRUE(p);
		e = map_at(&Stopped, Stopped.view, (uintptr_t)p);
		if (e == -EUSERS && strstr(A.error.text, "one user's"))
			return nr;
		MUST(e, 0);
	}
}

/* One user's processes do not take all descriptors of the daemon. */
START_TEST(test_maps_of_one_user)
{
	static const struct rlimit few = { 4096, 4096 };
	struct peer more;
	int64_t n;

	ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &few), 0); /* the daemon's, too */
	begin("");
	peer_new(&Evil, NOBODY);
	n = peer_does(&Evil, maps_until_refused, &T);
	ck_assert_msg(n == 4096 / 8, "%lld: %s", (long long)n, Evil.text);
	peer_new(&more, NOBODY);
	n = peer_does(&more, maps_until_refused, &T);
	ck_assert_msg(n == 0, "%lld: %s", (long long)n, more.text);
	must_serve();
	peer_kill(&Evil);
	peer_kill(&more);
	ck_assert_uint_le(stat_until_at_most("mappings", 1), 1);
	peer_new(&Evil, NOBODY);
	must_do(&Evil, honest, &T);
	peer_leave(&Evil);
	peer_leave(&Good);
}
END_TEST

static int64_t tail_gone(const void *arg)
{
	const struct target *t = arg;
	uint64_t keep = 2 * extent();

	MUST(raw_client(&Stopped, t->other), 0);
	MUST((int)first_wrong(&Stopped, t->other), -1);
	TRUE(Stopped.bytes > keep);
	TRUE(munmap(Stopped.base + keep, Stopped.bytes + page_bytes() - keep) == 0);
	return 0;
}

static int64_t head_right(const void *arg)
{
	const struct target *t = arg;
	cleanup_close int fd = open(t->other, O_RDONLY | O_CLOEXEC);
	uint64_t nbytes = 2 * extent();
	unsigned char *want = malloc(nbytes);

	TRUE(want && pread(fd, want, nbytes, 0) == (ssize_t)nbytes);
	for (uint64_t i = 0; i < nbytes; i++)
		if (Stopped.base[i] != want[i])
			return peer_say("byte %ju is %d, not %d", (uintmax_t)i, Stopped.base[i], want[i]);
	free(want);
	return 0;
}

/* It has cut off the end of its mapping: what is left reads right, whatever is dropped. */
START_TEST(test_cut_off_tail)
{
	begin("");
	peer_new(&Evil, NOBODY);
	must_do(&Evil, tail_gone, &T);
	for (int i = 0; i < 3; i++) {
		must_tool("drop --all --force");
		must_do(&Evil, head_right, &T);
	}
	must_serve();
	peer_kill(&Evil);
	must_drop_all(true);
	must_serve();
	peer_leave(&Good);
}
END_TEST

#define SPINNERS 16
static struct raw Un;

/* Faults without end where no unit is, until it is killed. */
static void *spinner(void *arg)
{
	unsigned char *at = Un.base + (20 + (uintptr_t)arg) * extent();
	_Atomic uint64_t *words = shared_words();
	volatile unsigned char sum = 0;

	for (;;) {
		struct uffdio_register reg = { .range = { (uintptr_t)at, extent() },
					       .mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR };

		(void)ioctl(Un.uffd, UFFDIO_REGISTER, &reg);
		(void)madvise(at, extent(), MADV_DONTNEED);
		sum = (unsigned char)(sum + at[0]);
		words[1]++;
	}
	return NULL;
}

static int64_t overlapping_units(const void *arg)
{
	cleanup_close int fd = memfd_create("enemy", MFD_CLOEXEC);
	uint32_t nr = *(const uint32_t *)arg;
	struct unit *u = calloc(nr, sizeof(*u));
	struct segment whole = { 0, 0, 128 * MiB };
	pthread_t t[SPINNERS];

	TRUE(u && fd >= 0 && ftruncate(fd, 128 * MiB) == 0);
	u[0] = (struct unit){ .off = 0, .len = 32 * MiB };
	for (uint32_t i = 1; i < nr; i++)
		u[i] = (struct unit){ .off = 32 * MiB, .len = 1 };
	MUST(raw_hello(&Un), 0);
	MUST(raw_uffd(&Un), 0);
	MUST(attach_fds(&Un, fd, -1, -1, &(struct layout){ .segs = &whole, .nr_segs = 1, .units = u, .nr_units = nr }),
	     0);
	free(u);
	take_attached(&Un);
	MUST(raw_map(&Un), 0);
	for (size_t i = 0; i < SPINNERS; i++)
		TRUE(pthread_create(&t[i], NULL, spinner, (void *)(uintptr_t)(i % 10)) == 0);
	for (size_t i = 0; i < SPINNERS; i++)
		(void)pthread_join(t[i], NULL);
	return 0;
}

/* Millions of units that lie on each other cost the others no more than two that do not. */
START_TEST(test_overlapping_units)
{
	uint64_t ms[2], seen;

	begin("");
	for (unsigned int i = 0; i < 2; i++) {
		uint32_t nr = i ? 1u << 22 : 2;

		shared_words()[1] = 0;
		peer_new(&Evil, NOBODY);
		peer_begin(&Evil, "overlapping_units", overlapping_units, &nr, sizeof(nr));
		while (shared_words()[1] < SPINNERS && !peer_has_ended(&Evil))
			(void)usleep(1000);
		ck_assert(!peer_has_ended(&Evil));
		seen = shared_words()[1];
		ms[i] = honest_ms(i + 1, 24);
		ck_assert_uint_gt(shared_words()[1], seen); /* or nothing was tested */
		peer_kill(&Evil);
	}
	must_be_as_fast(ms[0], ms[1]);
	must_serve();
	peer_leave(&Good);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("hostile");
	double soak = (double)soak_ms(0) / 1000;
	bool root = getuid() == 0;
	TCase *tc = folder_case(s, "enemies", 180);

	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_loop_test(tc, test_enemy_harms_nobody, 0, ARRAY_SIZE(attacks));

	tc = folder_case(s, "too much", 180);
	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_test(tc, test_limits_are_named);
	tcase_add_test(tc, test_direct_descriptor_of_another_file);
	tcase_add_test(tc, test_huge_files);
	tcase_add_test(tc, test_stopped_client);
	tcase_add_test(tc, test_g37_kills_and_leftovers);
	if (root)
		tcase_add_loop_test(tc, test_ten_thousand_connections, 0, 2);
	else
		skip("test_ten_thousand_connections", "only root can act for other users");

	tc = folder_case(s, "found", 120);
	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_test(tc, test_forbidden_stays);
	if (root) {
		tcase_add_loop_test(tc, test_stuck_extent_and_a_new_daemon, 0, 2);
		tcase_add_test(tc, test_big_ranges_delay_nobody);
		tcase_add_loop_test(tc, test_pin_of_the_dead, 0, 2);
		tcase_add_loop_test(tc, test_hog, 0, 3);
		tcase_add_test(tc, test_user_only_where_more_is_given);
		tcase_add_test(tc, test_maps_of_one_user);
		tcase_add_test(tc, test_cut_off_tail);
		tcase_add_test(tc, test_overlapping_units);
	} else {
		skip("found", "only root can act for other users");
	}

	tc = folder_case(s, "random", 180 + soak);
	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_test(tc, test_random_messages);

	tc = folder_case(s, "file servers", 180);
	tcase_add_checked_fixture(tc, NULL, own_mounts_end);
	if (root && in_child(fuse_is_here, NULL) == 0) {
		tcase_add_test(tc, test_file_that_claims_to_be_another);
		tcase_add_loop_test(tc, test_file_server_that_never_answers, 0, 2);
	} else {
		skip("test_file_server", "no FUSE mount can be made here");
	}
	return run_suite(s);
}
