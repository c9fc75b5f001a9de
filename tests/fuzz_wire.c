/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: the first byte says how many descriptors come along (0 to 5), the rest but for the last byte (files end
 * with a newline) is a packet. It is checked in memory and sent through a socket: both must say the same, what is
 * accepted must hold together, and no descriptor may stay open.
 *
 * With -DFUZZ_STANDALONE (gcc, no fuzzer): runs the files named as arguments, or else a fixed number of mutated messages,
 * the number being the environment's FUZZ_RUNS; with FUZZ_SEEDS set to a folder, writes one seed of each type there.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/socket.h>

#include "ufd/pager.h"
#include "ufd/wire.h"

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t nbytes);

static void __attribute__((noreturn)) broken(const char *what)
{
	(void)fprintf(stderr, "%s\n", what);
	abort();
}

static void text_ends(const char *text, size_t size)
{
	if (strnlen(text, size) == size)
		broken("accepted, but a text has no end");
}

/* What the readers of accepted messages rely on. */
static void check(const union wire_any *m, size_t nbytes, unsigned int nr_fds)
{
	if (m->h.magic != WIRE_MAGIC || m->h.nbytes != nbytes || nr_fds > 3)
		broken("accepted, but the head is wrong");
	switch (m->h.type) {
	case WIRE_HELLO:
		text_ends(m->hello.name, sizeof(m->hello.name));
		break;
	case WIRE_STAGE:
		text_ends(m->stage.name, sizeof(m->stage.name));
		break;
	case WIRE_WELCOME:
		text_ends(m->welcome.release, sizeof(m->welcome.release));
		text_ends(m->welcome.text, sizeof(m->welcome.text));
		if (m->welcome.status > 0 || (m->welcome.status < 0 && nr_fds > 0))
			broken("accepted, but there is a socket in spite of the status");
		if (m->welcome.status == 0 &&
		    (!m->welcome.page_bytes || m->welcome.extent_bytes % m->welcome.page_bytes))
			broken("accepted, but pages do not fit extents");
		break;
	case WIRE_ERROR:
		text_ends(m->error.text, sizeof(m->error.text));
		if (m->error.status >= 0)
			broken("accepted, but an error is none");
		break;
	case WIRE_ATTACH:
		text_ends(m->attach.name, sizeof(m->attach.name));
		if (m->attach.nr_segs == 0 || m->attach.nr_segs > WIRE_MAX_SEGS ||
		    m->attach.nr_units > WIRE_MAX_UNITS || m->attach.bytes == 0)
			broken("accepted, but a layout is none");
		if (nr_fds != (m->attach.flags & WIRE_DIRECT ? 3 : 2))
			broken("accepted, but a file is missing");
		break;
	case WIRE_HOLD:
	case WIRE_TOUCHED:
		if (nbytes != offsetof(struct wire_ranges, ranges) + (size_t)m->ranges.nr_ranges * 8)
			broken("accepted, but ranges are missing");
		for (uint32_t i = 0; i < m->ranges.nr_ranges; i++)
			if (m->ranges.ranges[i].first + m->ranges.ranges[i].nr <= m->ranges.ranges[i].first)
				broken("accepted, but a range is empty or wraps around");
		break;
	case WIRE_JOB:
		if (nbytes != offsetof(struct wire_job, ranges) + (size_t)m->job.nr_ranges * 24)
			broken("accepted, but ranges are missing");
		for (uint32_t i = 0; i < m->job.nr_ranges; i++)
			if (m->job.ranges[i].off + m->job.ranges[i].len > 1ull << 46 ||
			    m->job.ranges[i].off + m->job.ranges[i].len < m->job.ranges[i].off)
				broken("accepted, but a range is too large");
		break;
	case WIRE_CLASS:
		if (m->value.value > VIEW_PINNED)
			broken("accepted, but a class is none");
		break;
	default:
		break;
	}
}

static void send_raw(int socket, const void *bytes, size_t nbytes, const int *fds, unsigned int nr_fds)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * 8)];
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
	if (sendmsg(socket, &m, MSG_NOSIGNAL) != (ssize_t)nbytes)
		broken("a packet cannot be sent");
}

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t nbytes)
{
	static int socks[2] = { -1, -1 }, null = -1, free_fd;
	static union wire_any got;
	/* As large as the message says, and no larger: the address sanitizer sees who looks behind it. */
	cleanup_free union wire_any *m = NULL;
	unsigned int nr_fds, nr = 0;
	int r, s, fds[WIRE_MAX_FDS + 1], got_fds[WIRE_MAX_FDS];

	if (nbytes < 2 || nbytes > 2 * WIRE_MAX_BYTES)
		return 0;
	if (null < 0) {
		null = open("/dev/null", O_RDONLY | O_CLOEXEC);
		if (null < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, socks) < 0)
			broken("no socket");
		free_fd = dup(null);
		(void)close(free_fd);
	}
	nr_fds = *bytes++ % (WIRE_MAX_FDS + 2);
	nbytes -= 2;
	m = malloc(MAX(nbytes, (size_t)1));
	if (!m)
		abort();
	memcpy((void *)m, bytes, nbytes);
	r = wire_check(m, nbytes, nr_fds);
	if (r == 0)
		check(m, nbytes, nr_fds);
	else if (r != -EPROTO)
		broken("refused with another error");

	for (unsigned int i = 0; i < ARRAY_SIZE(fds); i++)
		fds[i] = null;
	send_raw(socks[0], bytes, nbytes, fds, nr_fds);
	s = wire_recv(socks[1], &got, got_fds, &nr, 0);
	if (s != (r == 0 ? 1 : -EPROTO))
		broken("the socket makes something else of it");
	if (s == 1 && (nr != nr_fds || memcmp(&got, bytes, nbytes) != 0))
		broken("the socket loses something");
	for (unsigned int i = 0; i < WIRE_MAX_FDS; i++) {
		if ((got_fds[i] >= 0) != (i < nr))
			broken("there are other descriptors than it says");
		if (got_fds[i] >= 0)
			(void)close(got_fds[i]);
	}
	s = dup(null);
	if (s != free_fd)
		broken("a descriptor stays open");
	(void)close(s);
	return 0;
}

#ifdef FUZZ_STANDALONE
static uint64_t state = 1;

static size_t below(size_t n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (size_t)(state % n);
}

static const struct {
	const char *name;
	uint32_t type, size, nr_fds;
} kinds[] = {
	{ "hello", WIRE_HELLO, sizeof(struct wire_hello), 0 },
	{ "uffd", WIRE_UFFD, sizeof(struct wire_uffd), 1 },
	{ "claim", WIRE_CLAIM, sizeof(struct wire_claim), 0 },
	{ "claimed", WIRE_CLAIMED, sizeof(struct wire_claimed), 0 },
	{ "attach", WIRE_ATTACH, sizeof(struct wire_attach), 2 },
	{ "detach", WIRE_DETACH, sizeof(struct wire_view), 0 },
	{ "map", WIRE_MAP, sizeof(struct wire_map), 0 },
	{ "unmap", WIRE_UNMAP, sizeof(struct wire_map), 0 },
	{ "hold", WIRE_HOLD, offsetof(struct wire_ranges, ranges) + 3 * sizeof(struct wire_range), 0 },
	{ "stage", WIRE_STAGE, sizeof(struct wire_stage), 0 },
	{ "class", WIRE_CLASS, sizeof(struct wire_value), 0 },
	{ "forbid", WIRE_FORBID, sizeof(struct wire_value), 0 },
	{ "job", WIRE_JOB, offsetof(struct wire_job, ranges) + 3 * sizeof(struct wire_job_range), 0 },
	{ "job_state", WIRE_JOB_STATE, sizeof(struct wire_job_id), 0 },
	{ "job_end", WIRE_JOB_END, sizeof(struct wire_job_id), 0 },
	{ "view_stat", WIRE_VIEW_STAT, sizeof(struct wire_view), 0 },
	{ "ls", WIRE_LS, sizeof(struct wire_plain), 0 },
	{ "drop", WIRE_DROP, sizeof(struct wire_admin), 1 },
	{ "pin", WIRE_PIN, sizeof(struct wire_admin), 1 },
	{ "shutdown", WIRE_SHUTDOWN, sizeof(struct wire_plain), 0 },
	{ "welcome", WIRE_WELCOME, sizeof(struct wire_welcome), 2 },
	{ "ok", WIRE_OK, sizeof(struct wire_plain), 0 },
	{ "error", WIRE_ERROR, sizeof(struct wire_error), 0 },
	{ "attached", WIRE_ATTACHED, sizeof(struct wire_attached), 2 },
	{ "mapped", WIRE_MAPPED, sizeof(struct wire_mapped), 1 },
	{ "job_info", WIRE_JOB_INFO, sizeof(struct wire_job_info), 1 },
	{ "stats", WIRE_STATS, sizeof(struct wire_stats), 0 },
	{ "json", WIRE_JSON, sizeof(struct wire_plain), 1 },
	{ "ping", WIRE_PING, sizeof(struct wire_plain), 0 },
	{ "round", WIRE_ROUND, sizeof(struct wire_round), 0 },
	{ "poison", WIRE_POISON, sizeof(struct wire_page), 0 },
	{ "touched", WIRE_TOUCHED, offsetof(struct wire_ranges, ranges) + 3 * sizeof(struct wire_range), 0 },
};

/* A good message of that kind with the byte before and the byte behind it. Return: bytes. */
static size_t seed(size_t kind, unsigned char *file)
{
	static union wire_any m;
	size_t n = kinds[kind].size;

	memset(&m, 0, sizeof(m));
	m.h = (struct wire_head){ WIRE_MAGIC, kinds[kind].type, kinds[kind].size, 1 };
	switch (m.h.type) {
	case WIRE_HELLO:
		m.hello.version = WIRE_VERSION;
		break;
	case WIRE_ATTACH:
		m.attach.nr_segs = 1;
		m.attach.bytes = 4096;
		break;
	case WIRE_HOLD:
	case WIRE_TOUCHED:
		m.ranges.nr_ranges = 3;
		for (uint32_t i = 0; i < 3; i++)
			m.ranges.ranges[i] = (struct wire_range){ 10 * i, i + 1 };
		break;
	case WIRE_JOB:
		m.job.nr_ranges = 3;
		for (uint32_t i = 0; i < 3; i++)
			m.job.ranges[i] = (struct wire_job_range){ 1, 4096 * i, 4096 };
		break;
	case WIRE_WELCOME:
		m.welcome.version = WIRE_VERSION;
		m.welcome.page_bytes = 4096;
		m.welcome.extent_bytes = 2 << 20;
		break;
	case WIRE_ERROR:
		m.error.status = -EIO;
		break;
	case WIRE_ATTACHED:
		m.attached.bytes = m.attached.table_bytes = 4096;
		break;
	case WIRE_MAPPED:
		m.mapped.state_bytes = 16;
		break;
	default:
		break;
	}
	file[0] = (unsigned char)kinds[kind].nr_fds;
	memcpy(file + 1, &m, n);
	file[n + 1] = '\n';
	if (wire_check(&m, n, kinds[kind].nr_fds) != 0)
		broken(kinds[kind].name);
	return n + 2;
}

static void run_mutated(void)
{
	static const uint64_t numbers[] = { 0,          1,          2,    UINT32_MAX, UINT64_MAX,
					    1ull << 46, 1ull << 63, 1024, 1025,       WIRE_MAGIC };
	static unsigned char file[2 * WIRE_MAX_BYTES];
	size_t n = seed(below(ARRAY_SIZE(kinds)), file);

	for (size_t i = below(4); i > 0; i--) {
		size_t at = below(n), k = MIN(n - at, (size_t)(below(2) ? 4 : 8));

		switch (below(4)) {
		case 0:
			file[at] = (unsigned char)below(256);
			break;
		case 1:
			memcpy(file + at, &numbers[below(ARRAY_SIZE(numbers))], k);
			break;
		case 2: /* where fields are */
			at = 1 + (at - 1) / 4 * 4;
			memcpy(file + at, &numbers[below(ARRAY_SIZE(numbers))], MIN(n - at, (size_t)4));
			break;
		default: /* another size, and a head that agrees */
			memset(file + n, (int)below(256), 64);
			n = below(8) ? 1 + below(n + 63) : sizeof(file) - below(sizeof(file) / 4);
			if (n > 13)
				memcpy(file + 9, &(uint32_t){ (uint32_t)n - 2 }, 4);
		}
	}
	(void)LLVMFuzzerTestOneInput(file, n);
}

int main(int argc, char **argv)
{
	const char *wanted = getenv("FUZZ_RUNS"), *folder = getenv("FUZZ_SEEDS");
	unsigned long runs = wanted ? strtoul(wanted, NULL, 10) : 100000;
	static unsigned char bytes[2 * WIRE_MAX_BYTES];

	for (size_t i = 0; folder && i < ARRAY_SIZE(kinds); i++) {
		char path[4096];
		FILE *f;
		size_t n = seed(i, bytes);

		(void)snprintf(path, sizeof(path), "%s/%s", folder, kinds[i].name);
		f = fopen(path, "wbe");
		if (!f || fwrite(bytes, 1, n, f) != n || fclose(f) != 0) {
			perror(path);
			return 1;
		}
	}
	for (int i = 1; i < argc; i++) {
		cleanup_fclose FILE *f = fopen(argv[i], "rbe");
		size_t n = f ? fread(bytes, 1, sizeof(bytes), f) : 0;

		if (!f || ferror(f)) {
			perror(argv[i]);
			return 1;
		}
		(void)LLVMFuzzerTestOneInput(bytes, n);
	}
	for (unsigned long i = 0; argc == 1 && !folder && i < runs; i++)
		run_mutated();
	return 0;
}
#endif
