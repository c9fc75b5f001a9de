/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages over a socket: what each type must look like, sending, receiving, and the sealed memfds beside them.
 *
 * The peer is hostile: no field is used before its message's size is known to be right, every descriptor that came
 * with a refused message is closed, and nothing is done with a descriptor that could run its sender's code (a file of
 * a FUSE mount answers even fstat() from there).
 *
 * Threads: no state. No allocation but in wire_blob_read(), no stdio: fork handlers and rescue threads call these.
 */
#include "ufd/wire.h"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#include "ufd/pager.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u /* since 6.3; Debian 12's header lacks it */
#endif
#define MAX_ERRNO 4095
/* No arena, table or file is larger: the lower half of an x86-64 address space has 2^47. */
#define MAX_BYTES (1ull << 46)

#define CHANGES_SIZE UINT16_MAX /* the message has a count in it */

/* Size, and how many descriptors come along. What is not here is no message. */
static const struct {
	uint16_t size;
	uint8_t fds_min, fds_max;
} types[] = {
	[WIRE_HELLO] = { sizeof(struct wire_hello), 0, 0 },
	[WIRE_UFFD] = { sizeof(struct wire_uffd), 1, 1 },
	[WIRE_CLAIM] = { sizeof(struct wire_claim), 0, 0 },
	[WIRE_CLAIMED] = { sizeof(struct wire_claimed), 0, 0 },
	[WIRE_ATTACH] = { sizeof(struct wire_attach), 2, 3 },
	[WIRE_DETACH] = { sizeof(struct wire_view), 0, 0 },
	[WIRE_MAP] = { sizeof(struct wire_map), 0, 0 },
	[WIRE_UNMAP] = { sizeof(struct wire_map), 0, 0 },
	[WIRE_HOLD] = { CHANGES_SIZE, 0, 0 },
	[WIRE_STAGE] = { sizeof(struct wire_stage), 0, 0 },
	[WIRE_CLASS] = { sizeof(struct wire_value), 0, 0 },
	[WIRE_FORBID] = { sizeof(struct wire_value), 0, 0 },
	[WIRE_JOB] = { CHANGES_SIZE, 0, 0 },
	[WIRE_JOB_STATE] = { sizeof(struct wire_job_id), 0, 0 },
	[WIRE_JOB_END] = { sizeof(struct wire_job_id), 0, 0 },
	[WIRE_VIEW_STAT] = { sizeof(struct wire_view), 0, 0 },
	[WIRE_LS] = { sizeof(struct wire_plain), 0, 0 },
	[WIRE_STAT] = { sizeof(struct wire_plain), 0, 0 },
	[WIRE_DROP] = { sizeof(struct wire_admin), 0, 1 },
	[WIRE_PIN] = { sizeof(struct wire_admin), 1, 1 },
	[WIRE_SHUTDOWN] = { sizeof(struct wire_plain), 0, 0 },
	[WIRE_WELCOME] = { sizeof(struct wire_welcome), 0, 2 },
	[WIRE_OK] = { sizeof(struct wire_plain), 0, 1 },
	[WIRE_ERROR] = { sizeof(struct wire_error), 0, 0 },
	[WIRE_ATTACHED] = { sizeof(struct wire_attached), 2, 2 },
	[WIRE_MAPPED] = { sizeof(struct wire_mapped), 1, 1 },
	[WIRE_JOB_INFO] = { sizeof(struct wire_job_info), 0, 1 },
	[WIRE_STATS] = { sizeof(struct wire_stats), 0, 0 },
	[WIRE_JSON] = { sizeof(struct wire_plain), 1, 1 },
	[WIRE_PING] = { sizeof(struct wire_plain), 0, 0 },
	[WIRE_PONG] = { sizeof(struct wire_plain), 0, 0 },
	[WIRE_ROUND] = { sizeof(struct wire_round), 0, 0 },
	[WIRE_TOUCHED] = { CHANGES_SIZE, 0, 0 },
	[WIRE_ROUND_DONE] = { sizeof(struct wire_round), 0, 0 },
	[WIRE_RESUME] = { sizeof(struct wire_plain), 0, 0 },
	[WIRE_POISON] = { sizeof(struct wire_page), 0, 0 },
};

_Static_assert(sizeof(struct wire_ranges) < CHANGES_SIZE && sizeof(struct wire_job) < CHANGES_SIZE, "fits a message");

uint32_t wire_ranges_bytes(uint32_t nr_ranges)
{
	return (uint32_t)(offsetof(struct wire_ranges, ranges) + nr_ranges * sizeof(struct wire_range));
}

uint32_t wire_job_bytes(uint32_t nr_ranges)
{
	return (uint32_t)(offsetof(struct wire_job, ranges) + nr_ranges * sizeof(struct wire_job_range));
}

static bool ends(const char *text, size_t size)
{
	return memchr(text, 0, size) != NULL;
}

static bool is_errno(int32_t status)
{
	return status < 0 && status >= -MAX_ERRNO;
}

static bool is_size(uint64_t bytes)
{
	return bytes > 0 && bytes < MAX_BYTES;
}

static bool is_power(uint64_t n)
{
	return n > 0 && (n & (n - 1)) == 0;
}

static bool check_welcome(const struct wire_welcome *m, unsigned int nr_fds)
{
	if (!ends(m->release, sizeof(m->release)) || !ends(m->text, sizeof(m->text)))
		return false;
	if (m->status != 0) /* of any version */
		return is_errno(m->status) && nr_fds == 0;
	return m->version == WIRE_VERSION && !(m->flags & ~(WIRE_EVENT_FORK | WIRE_PRIVATE | WIRE_POISONS)) &&
	       is_power(m->page_bytes) && is_power(m->extent_bytes) && m->page_bytes <= m->extent_bytes &&
	       m->extent_bytes < MAX_BYTES;
}

static bool check_ranges(const struct wire_ranges *m, size_t nbytes)
{
	if (nbytes < wire_ranges_bytes(0) || m->nr_ranges > WIRE_RANGES || nbytes != wire_ranges_bytes(m->nr_ranges) ||
	    m->hold > (m->h.type == WIRE_HOLD ? WIRE_HOLD_DROP : 0))
		return false;
	for (uint32_t i = 0; i < m->nr_ranges; i++)
		if (m->ranges[i].nr == 0 || m->ranges[i].first > UINT32_MAX - m->ranges[i].nr)
			return false;
	return true;
}

static bool check_job(const struct wire_job *m, size_t nbytes)
{
	if (nbytes < wire_job_bytes(0) || m->nr_ranges > WIRE_RANGES || nbytes != wire_job_bytes(m->nr_ranges) ||
	    m->gentle > 1)
		return false;
	/* A tensor may have no bytes. */
	for (uint32_t i = 0; i < m->nr_ranges; i++)
		if (m->ranges[i].off >= MAX_BYTES || m->ranges[i].len > MAX_BYTES - m->ranges[i].off)
			return false;
	return true;
}

/* The part that sizes do not tell. */
static bool check_body(const union wire_any *m, size_t nbytes, unsigned int nr_fds)
{
	switch ((enum wire_type)m->h.type) {
	case WIRE_HELLO:
		/* What flags another version has is not ours to judge: it gets its answer. */
		return ends(m->hello.name, sizeof(m->hello.name)) &&
		       (m->hello.version != WIRE_VERSION || m->hello.flags == 0);
	case WIRE_UFFD:
		return !(m->uffd.flags & ~(WIRE_UFFD_USER_ONLY | WIRE_UFFD_ARMED)) && m->uffd.pad == 0;
	case WIRE_ATTACH:
		return !(m->attach.flags & ~WIRE_DIRECT) && nr_fds == (m->attach.flags & WIRE_DIRECT ? 3 : 2) &&
		       m->attach.nr_segs >= 1 && m->attach.nr_segs <= WIRE_MAX_SEGS &&
		       m->attach.nr_units <= WIRE_MAX_UNITS && m->attach.pad == 0 && is_size(m->attach.bytes) &&
		       ends(m->attach.name, sizeof(m->attach.name));
	case WIRE_STAGE:
		return ends(m->stage.name, sizeof(m->stage.name));
	case WIRE_CLASS:
		return m->value.value <= VIEW_PINNED && m->value.pad == 0;
	case WIRE_FORBID:
		return m->value.value <= 1 && m->value.pad == 0;
	case WIRE_HOLD:
	case WIRE_TOUCHED:
		return check_ranges(&m->ranges, nbytes);
	case WIRE_JOB:
		return check_job(&m->job, nbytes);
	case WIRE_DROP:
		return !(m->admin.flags & ~(WIRE_ALL | WIRE_FORCE)) && m->admin.pad == 0 &&
		       nr_fds == (m->admin.flags & WIRE_ALL ? 0 : 1);
	case WIRE_PIN:
		return !(m->admin.flags & ~WIRE_UNPIN) && m->admin.pad == 0 && m->admin.bytes == 0;
	case WIRE_WELCOME:
		return check_welcome(&m->welcome, nr_fds);
	case WIRE_ERROR:
		return is_errno(m->error.status) && m->error.pad == 0 && ends(m->error.text, sizeof(m->error.text));
	case WIRE_ATTACHED:
		return is_size(m->attached.bytes) && is_size(m->attached.table_bytes) && m->attached.known <= 1 &&
		       m->attached.pad == 0;
	case WIRE_MAPPED:
		return is_size(m->mapped.state_bytes);
	case WIRE_JOB_INFO:
		return (is_errno(m->job_info.state) || m->job_info.state == 0 || m->job_info.state == 1) &&
		       m->job_info.pad == 0;
	case WIRE_CLAIM:
	case WIRE_CLAIMED:
	case WIRE_DETACH:
	case WIRE_MAP:
	case WIRE_UNMAP:
	case WIRE_JOB_STATE:
	case WIRE_JOB_END:
	case WIRE_VIEW_STAT:
	case WIRE_LS:
	case WIRE_STAT:
	case WIRE_SHUTDOWN:
	case WIRE_OK:
	case WIRE_STATS:
	case WIRE_JSON:
	case WIRE_PING:
	case WIRE_PONG:
	case WIRE_ROUND:
	case WIRE_ROUND_DONE:
	case WIRE_RESUME:
	case WIRE_POISON:
		return true;
	case WIRE_CLIENT_LAST:
		break;
	}
	return false;
}

int wire_check(const union wire_any *m, size_t nbytes, unsigned int nr_fds)
{
	uint32_t type;

	if (nbytes < sizeof(m->h) || nbytes > WIRE_MAX_BYTES || m->h.magic != WIRE_MAGIC || m->h.nbytes != nbytes)
		return -EPROTO;
	type = m->h.type;
	/* (A type that is none has size 0, which no message has.) */
	if (type >= ARRAY_SIZE(types) || (types[type].size != CHANGES_SIZE && types[type].size != nbytes))
		return -EPROTO;
	if (nr_fds < types[type].fds_min || nr_fds > types[type].fds_max)
		return -EPROTO;
	return check_body(m, nbytes, nr_fds) ? 0 : -EPROTO;
}

/* ------------------------------------------------------------------ sockets */

/* Of the greatest size that a message may have; aligned as the kernel wants it. */
union fds_space {
	struct cmsghdr align;
	unsigned char bytes[CMSG_SPACE(sizeof(int) * WIRE_MAX_FDS)];
};

int wire_send(int socket, const void *message, const int *fds, unsigned int nr_fds, bool wait)
{
	const struct wire_head *h = message;
	/* (sendmsg() reads only) */
	struct iovec part = { (void *)(uintptr_t)message, h->nbytes };
	union fds_space space;
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1 };

	if (nr_fds > WIRE_MAX_FDS)
		return -EINVAL;
	if (nr_fds > 0) {
		struct cmsghdr *c;

		memset(&space, 0, sizeof(space));
		m.msg_control = &space;
		m.msg_controllen = CMSG_SPACE(sizeof(int) * nr_fds);
		c = CMSG_FIRSTHDR(&m);
		*c = (struct cmsghdr){ CMSG_LEN(sizeof(int) * nr_fds), SOL_SOCKET, SCM_RIGHTS };
		memcpy(CMSG_DATA(c), fds, sizeof(int) * nr_fds);
	}
	while (sendmsg(socket, &m, MSG_NOSIGNAL | (wait ? 0 : MSG_DONTWAIT)) < 0)
		if (errno != EINTR)
			return -errno;
	return 0;
}

static uint64_t clock_ms(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static void close_all(int *fds, unsigned int nr)
{
	for (unsigned int i = 0; i < nr; i++) {
		(void)close(fds[i]);
		fds[i] = -1;
	}
}

static unsigned int take_fds(struct msghdr *m, int fds[static WIRE_MAX_FDS])
{
	unsigned int nr = 0;

	for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
		unsigned int n = 0;

		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
			n = (unsigned int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
		memcpy(fds + nr, CMSG_DATA(c), sizeof(int) * n); /* all together fit the space that the kernel had */
		nr += n;
	}
	return nr;
}

/* A packet of no bytes looks like a hang-up. */
static bool hung_up(int socket)
{
	struct pollfd p = { socket, POLLRDHUP, 0 };

	return poll(&p, 1, 0) != 0;
}

/* Takes what is there. -EAGAIN: nothing. */
static int recv_now(int socket, union wire_any *ret, int fds[static WIRE_MAX_FDS], unsigned int *ret_nr_fds)
{
	union fds_space space;
	struct iovec part = { ret, sizeof(*ret) };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1 };
	unsigned int nr;
	ssize_t n;
	int r;

	do {
		m.msg_control = &space;
		m.msg_controllen = sizeof(space);
		n = recvmsg(socket, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
		/* A peer that ends without having read all resets us, once: its last messages come after that. */
	} while (n < 0 && errno == ECONNRESET);
	if (n < 0)
		return -errno;
	nr = take_fds(&m, fds);
	if (n == 0 && nr == 0 && hung_up(socket))
		return 0;
	/* Fewer than there is space for, and yet cut: this process has no descriptor free. */
	r = m.msg_flags & MSG_CTRUNC && nr < WIRE_MAX_FDS ? -EMFILE :
	    m.msg_flags & (MSG_CTRUNC | MSG_TRUNC)        ? -EPROTO :
							    wire_check(ret, (size_t)n, nr);
	if (r < 0) {
		close_all(fds, nr);
		return r;
	}
	*ret_nr_fds = nr;
	return 1;
}

int wire_recv(int socket, union wire_any *ret, int fds[static WIRE_MAX_FDS], unsigned int *ret_nr_fds, int timeout_ms)
{
	uint64_t end = timeout_ms > 0 ? clock_ms() + (uint64_t)timeout_ms : 0;

	for (unsigned int i = 0; i < WIRE_MAX_FDS; i++)
		fds[i] = -1;
	for (;;) {
		struct pollfd p = { socket, POLLIN, 0 };
		int left = timeout_ms, r = recv_now(socket, ret, fds, ret_nr_fds);

		if (r != -EAGAIN || timeout_ms == 0)
			return r;
		if (timeout_ms > 0) {
			uint64_t now = clock_ms();

			if (now >= end)
				return -EAGAIN;
			left = (int)(end - now);
		}
		if (poll(&p, 1, left) < 0 && errno != EINTR)
			return -errno;
	}
}

/* ------------------------------------------------------------------ blobs */

static int write_all(int fd, const void *bytes, size_t nbytes)
{
	const unsigned char *p = bytes;

	while (nbytes > 0) {
		ssize_t n = write(fd, p, nbytes);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		p += n;
		nbytes -= (size_t)n;
	}
	return 0;
}

int wire_blob(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
	cleanup_close int fd = memfd_create("weightd-message", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
	int r;

	if (fd < 0 && errno == EINVAL) /* before 6.3 */
		fd = memfd_create("weightd-message", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -errno;
	r = write_all(fd, a, a_bytes);
	if (r == 0)
		r = write_all(fd, b, b_bytes);
	if (r < 0)
		return r;
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		return -errno;
	return TAKE_FD(fd);
}

int wire_blob_read(int fd, size_t nbytes, void **ret)
{
	const int needed = F_SEAL_WRITE | F_SEAL_SHRINK;
	cleanup_free unsigned char *bytes = NULL;
	struct stat st;
	int seals;

	/* First of all: it is answered without calling the file system that the file belongs to. */
	seals = fcntl(fd, F_GET_SEALS);
	if (seals < 0 || (seals & needed) != needed)
		return -EPROTO;
	if (fstat(fd, &st) < 0 || st.st_size < 0 || (uint64_t)st.st_size != nbytes)
		return -EPROTO;
	bytes = malloc(MAX(nbytes, (size_t)1));
	if (!bytes)
		return -ENOMEM;
	for (size_t done = 0; done < nbytes;) {
		ssize_t n = pread(fd, bytes + done, nbytes - done, (off_t)done);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return -EPROTO;
		done += (size_t)n;
	}
	*ret = TAKE_PTR(bytes);
	return 0;
}
