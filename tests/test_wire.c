/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The protocol's messages: what is accepted and what is not, what a socket does to them, whose descriptors are closed,
 * and sealed memfds. The daemon behind the messages is in test_hostile.c.
 */
#include "tests/pager_util.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>

#include "tests/data.h"
#include "ufd/page.h"
#include "ufd/wire.h"

static union wire_any in, out; /* 64 KiB each */

/* ------------------------------------------------------------------ one good message of each kind */

static void text(char *field, size_t size)
{
	memset(field, 'x', size - 1); /* up to the end */
	field[size - 1] = 0;
}

static unsigned int hello(union wire_any *m)
{
	WIRE_INIT(m->hello, WIRE_HELLO, 7);
	m->hello.version = WIRE_VERSION;
	text(m->hello.name, sizeof(m->hello.name));
	return 0;
}

static unsigned int hello_of_another_version(union wire_any *m)
{
	hello(m);
	m->hello.version = WIRE_VERSION + 1;
	m->hello.flags = UINT32_MAX;
	return 0;
}

static unsigned int uffd(union wire_any *m)
{
	WIRE_INIT(m->uffd, WIRE_UFFD, 7);
	m->uffd.flags = WIRE_UFFD_USER_ONLY | WIRE_UFFD_ARMED;
	return 1;
}

static unsigned int claim(union wire_any *m)
{
	WIRE_INIT(m->claim, WIRE_CLAIM, 7);
	m->claim.parent = 3;
	return 0;
}

static unsigned int claimed(union wire_any *m)
{
	WIRE_INIT(m->claimed, WIRE_CLAIMED, 7);
	m->claimed.number = UINT64_MAX;
	return 0;
}

static unsigned int attach(union wire_any *m)
{
	WIRE_INIT(m->attach, WIRE_ATTACH, 7);
	m->attach.nr_segs = WIRE_MAX_SEGS;
	m->attach.nr_units = WIRE_MAX_UNITS;
	m->attach.bytes = (1ull << 46) - 1;
	text(m->attach.name, sizeof(m->attach.name));
	return 2;
}

static unsigned int attach_direct(union wire_any *m)
{
	attach(m);
	m->attach.flags = WIRE_DIRECT;
	m->attach.nr_segs = 1;
	m->attach.nr_units = 0;
	m->attach.bytes = 1;
	return 3;
}

static unsigned int detach(union wire_any *m)
{
	WIRE_INIT(m->view, WIRE_DETACH, 7);
	m->view.view = 5;
	return 0;
}

static unsigned int map(union wire_any *m)
{
	WIRE_INIT(m->map, WIRE_MAP, 7);
	m->map = (struct wire_map){ m->h, 5, 0x7f0000000000 };
	return 0;
}

static unsigned int unmap(union wire_any *m)
{
	map(m);
	m->h.type = WIRE_UNMAP;
	return 0;
}

static unsigned int hold(union wire_any *m)
{
	m->h = (struct wire_head){ WIRE_MAGIC, WIRE_HOLD, wire_ranges_bytes(WIRE_RANGES), 7 };
	m->ranges.view = 5;
	m->ranges.hold = WIRE_HOLD_DROP;
	m->ranges.nr_ranges = WIRE_RANGES;
	for (uint32_t i = 0; i < WIRE_RANGES; i++)
		m->ranges.ranges[i] = (struct wire_range){ i, UINT32_MAX - i };
	return 0;
}

static unsigned int hold_nothing(union wire_any *m)
{
	m->h = (struct wire_head){ WIRE_MAGIC, WIRE_HOLD, wire_ranges_bytes(0), 7 };
	m->ranges.hold = WIRE_HOLD_ADD;
	return 0;
}

static unsigned int touched(union wire_any *m)
{
	hold(m);
	m->h.type = WIRE_TOUCHED;
	m->h.nbytes = wire_ranges_bytes(3);
	m->ranges.hold = 0;
	m->ranges.nr_ranges = 3;
	return 0;
}

static unsigned int stage(union wire_any *m)
{
	WIRE_INIT(m->stage, WIRE_STAGE, 7);
	text(m->stage.name, sizeof(m->stage.name));
	return 0;
}

static unsigned int class(union wire_any *m)
{
	WIRE_INIT(m->value, WIRE_CLASS, 7);
	m->value.value = VIEW_PINNED;
	return 0;
}

static unsigned int forbid(union wire_any *m)
{
	WIRE_INIT(m->value, WIRE_FORBID, 7);
	m->value.value = 1;
	return 0;
}

static unsigned int job(union wire_any *m)
{
	m->h = (struct wire_head){ WIRE_MAGIC, WIRE_JOB, wire_job_bytes(WIRE_RANGES), 7 };
	m->job.gentle = 1;
	m->job.nr_ranges = WIRE_RANGES;
	for (uint32_t i = 0; i < WIRE_RANGES; i++)
		m->job.ranges[i] = (struct wire_job_range){ 5, i, (1ull << 46) - i };
	return 0;
}

static unsigned int small_job(union wire_any *m)
{
	job(m);
	m->h.nbytes = wire_job_bytes(2);
	m->job.nr_ranges = 2;
	m->job.ranges[1].len = 0;
	return 0;
}

static unsigned int job_state(union wire_any *m)
{
	WIRE_INIT(m->job_id, WIRE_JOB_STATE, 7);
	return 0;
}

static unsigned int job_end(union wire_any *m)
{
	WIRE_INIT(m->job_id, WIRE_JOB_END, 7);
	return 0;
}

static unsigned int view_stat(union wire_any *m)
{
	WIRE_INIT(m->view, WIRE_VIEW_STAT, 7);
	return 0;
}

static unsigned int plain(union wire_any *m, enum wire_type type)
{
	m->h = (struct wire_head){ WIRE_MAGIC, type, sizeof(struct wire_plain), 7 };
	return 0;
}

static unsigned int ls(union wire_any *m)
{
	return plain(m, WIRE_LS);
}

static unsigned int stat_(union wire_any *m)
{
	return plain(m, WIRE_STAT);
}

static unsigned int shutdown_(union wire_any *m)
{
	return plain(m, WIRE_SHUTDOWN);
}

static unsigned int drop(union wire_any *m)
{
	WIRE_INIT(m->admin, WIRE_DROP, 7);
	m->admin.flags = WIRE_FORCE;
	m->admin.bytes = UINT64_MAX;
	return 1;
}

static unsigned int drop_all(union wire_any *m)
{
	drop(m);
	m->admin.flags = WIRE_ALL | WIRE_FORCE;
	return 0;
}

static unsigned int pin(union wire_any *m)
{
	WIRE_INIT(m->admin, WIRE_PIN, 7);
	m->admin.flags = WIRE_UNPIN;
	return 1;
}

static unsigned int welcome(union wire_any *m)
{
	WIRE_INIT(m->welcome, WIRE_WELCOME, 7);
	m->welcome.version = WIRE_VERSION;
	m->welcome.flags = WIRE_EVENT_FORK | WIRE_PRIVATE | WIRE_POISONS;
	m->welcome.page_bytes = 65536;
	m->welcome.extent_bytes = 65536;
	text(m->welcome.release, sizeof(m->welcome.release));
	text(m->welcome.text, sizeof(m->welcome.text));
	return 1;
}

static unsigned int welcome_with_device(union wire_any *m)
{
	welcome(m);
	return 2;
}

static unsigned int welcome_after_uffd(union wire_any *m)
{
	welcome(m);
	return 0;
}

static unsigned int not_welcome(union wire_any *m)
{
	welcome(m);
	m->welcome.version = WIRE_VERSION + 1;
	m->welcome.status = -EPROTONOSUPPORT;
	m->welcome.flags = UINT32_MAX;
	m->welcome.page_bytes = 0;
	return 0;
}

static unsigned int ok(union wire_any *m)
{
	return plain(m, WIRE_OK);
}

static unsigned int ok_with_one(union wire_any *m)
{
	return plain(m, WIRE_OK) + 1;
}

static unsigned int error(union wire_any *m)
{
	WIRE_INIT(m->error, WIRE_ERROR, 7);
	m->error.status = -4095;
	text(m->error.text, sizeof(m->error.text));
	return 0;
}

static unsigned int attached(union wire_any *m)
{
	WIRE_INIT(m->attached, WIRE_ATTACHED, 7);
	m->attached.bytes = 1;
	m->attached.table_bytes = (1ull << 46) - 1;
	m->attached.known = 1;
	return 2;
}

static unsigned int mapped(union wire_any *m)
{
	WIRE_INIT(m->mapped, WIRE_MAPPED, 7);
	m->mapped.state_bytes = 16;
	return 1;
}

static unsigned int job_info(union wire_any *m)
{
	WIRE_INIT(m->job_info, WIRE_JOB_INFO, 7);
	m->job_info.state = 1;
	return 1;
}

static unsigned int job_info_failed(union wire_any *m)
{
	job_info(m);
	m->job_info.state = -ENOSPC;
	return 0;
}

static unsigned int stats(union wire_any *m)
{
	WIRE_INIT(m->stats, WIRE_STATS, 7);
	return 0;
}

static unsigned int json(union wire_any *m)
{
	return plain(m, WIRE_JSON) + 1;
}

static unsigned int ping(union wire_any *m)
{
	return plain(m, WIRE_PING);
}

static unsigned int pong(union wire_any *m)
{
	return plain(m, WIRE_PONG);
}

static unsigned int round_(union wire_any *m)
{
	WIRE_INIT(m->round, WIRE_ROUND, 7);
	return 0;
}

static unsigned int round_done(union wire_any *m)
{
	WIRE_INIT(m->round, WIRE_ROUND_DONE, 7);
	return 0;
}

static unsigned int resume(union wire_any *m)
{
	return plain(m, WIRE_RESUME);
}

static unsigned int poison(union wire_any *m)
{
	m->page.address = 0x7f0000001000;
	WIRE_INIT(m->page, WIRE_POISON, 0);
	return 0;
}

/* How many descriptors fewer or more would be right as well. */
static const struct good {
	unsigned int (*make)(union wire_any *m);
	unsigned int fewer, more;
} goods[] = {
	{ hello, 0, 0 },         { hello_of_another_version, 0, 0 },
	{ uffd, 0, 0 },          { claim, 0, 0 },
	{ claimed, 0, 0 },       { attach, 0, 0 },
	{ attach_direct, 0, 0 }, { detach, 0, 0 },
	{ map, 0, 0 },           { unmap, 0, 0 },
	{ hold, 0, 0 },          { hold_nothing, 0, 0 },
	{ touched, 0, 0 },       { stage, 0, 0 },
	{ class, 0, 0 },         { forbid, 0, 0 },
	{ job, 0, 0 },           { small_job, 0, 0 },
	{ job_state, 0, 0 },     { job_end, 0, 0 },
	{ view_stat, 0, 0 },     { ls, 0, 0 },
	{ stat_, 0, 0 },         { shutdown_, 0, 0 },
	{ drop, 0, 0 },          { drop_all, 0, 0 },
	{ pin, 0, 0 },           { welcome_with_device, 2, 0 },
	{ welcome, 1, 1 },       { welcome_after_uffd, 0, 2 },
	{ not_welcome, 0, 0 },   { ok, 0, 1 },
	{ ok_with_one, 1, 0 },   { error, 0, 0 },
	{ attached, 0, 0 },      { mapped, 0, 0 },
	{ job_info, 1, 0 },      { job_info_failed, 0, 1 },
	{ stats, 0, 0 },         { json, 0, 0 },
	{ ping, 0, 0 },          { pong, 0, 0 },
	{ round_, 0, 0 },        { round_done, 0, 0 },
	{ resume, 0, 0 },        { poison, 0, 0 },
};

/* wire_check() on a copy that ends where memory ends: whoever looks behind it dies. */
static int check_copy(const void *m, size_t nbytes, unsigned int nr_fds)
{
	static unsigned char *end;
	unsigned char *copy;

	if (!end) {
		size_t size = WIRE_MAX_BYTES + page_bytes();
		unsigned char *p =
			mmap(NULL, size + page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		ck_assert_ptr_ne(p, MAP_FAILED);
		end = p + size;
		ck_assert_int_eq(mprotect(end, page_bytes(), PROT_NONE), 0);
	}
	copy = end - round_up(nbytes, 8);
	memcpy(copy, m, nbytes);
	return wire_check((const union wire_any *)(void *)copy, nbytes, nr_fds);
}

START_TEST(test_every_type_is_known_once)
{
	bool seen[256] = { false };

	for (size_t i = 0; i < ARRAY_SIZE(goods); i++) {
		memset(&out, 0, sizeof(out));
		(void)goods[i].make(&out);
		seen[out.h.type] = true;
	}
	for (uint32_t type = 0; type < 256; type++) {
		bool is = (type >= WIRE_HELLO && type < WIRE_CLIENT_LAST) ||
			  (type >= WIRE_WELCOME && type <= WIRE_JSON) || (type >= WIRE_PING && type <= WIRE_POISON);

		ck_assert_msg(seen[type] == is, "type %u", type);
	}
	/* What is none of them is refused, whatever its size. */
	for (uint32_t type = 0; type < 300; type++)
		for (uint32_t n = sizeof(struct wire_head); (type >= 256 || !seen[type]) && n < 2048; n += 4) {
			memset(&out, 0, sizeof(out));
			out.h = (struct wire_head){ WIRE_MAGIC, type, n, 0 };
			for (unsigned int fds = 0; fds <= WIRE_MAX_FDS; fds++)
				ck_assert_int_eq(wire_check(&out, n, fds), -EPROTO);
		}
	plain(&out, (enum wire_type)UINT32_MAX);
	ck_assert_int_eq(wire_check(&out, sizeof(struct wire_plain), 0), -EPROTO);
}
END_TEST

/* Every size but the right one, every number of descriptors but the right ones, every other magic number. */
START_TEST(test_good_messages_and_their_neighbours)
{
	const struct good *g = &goods[_i];
	unsigned int fds;
	uint32_t n;

	memset(&out, 0, sizeof(out));
	fds = g->make(&out);
	n = out.h.nbytes;
	ck_assert_int_eq(check_copy(&out, n, fds), 0);
	for (unsigned int i = 0; i <= WIRE_MAX_FDS + 1; i++)
		ck_assert_int_eq(check_copy(&out, n, i), i + g->fewer >= fds && i <= fds + g->more ? 0 : -EPROTO);
	for (uint32_t i = 0; i <= MIN(n + 64, (uint32_t)WIRE_MAX_BYTES); i++) {
		if (i == n)
			continue;
		out.h.nbytes = n; /* the head promises what is not there, or less than there is */
		ck_assert_int_eq(check_copy(&out, i, fds), -EPROTO);
		out.h.nbytes = i; /* the head agrees with the size, the type does not */
		ck_assert_int_eq(check_copy(&out, i, fds), -EPROTO);
		out.h.nbytes = i; /* it lies about the size */
		ck_assert_int_eq(check_copy(&out, n, fds), -EPROTO);
	}
	out.h.nbytes = n;
	for (int bit = 0; bit < 32; bit++) {
		out.h.magic = WIRE_MAGIC ^ 1u << bit;
		ck_assert_int_eq(check_copy(&out, n, fds), -EPROTO);
	}
	out.h.magic = WIRE_MAGIC;
	ck_assert_int_eq(check_copy(&out, n, fds), 0);
}
END_TEST

/* ------------------------------------------------------------------ what must not be in one */

/* A number at a place of a good message, of that many bytes. */
#define AT(member) offsetof(union wire_any, member), sizeof(((union wire_any *)NULL)->member)

static const struct {
	unsigned int (*make)(union wire_any *m);
	const char *what;
	size_t offset, size;
	uint64_t value;
	int result;
} patches[] = {
	{ hello, "flags of our version", AT(hello.flags), 1, -EPROTO },
	{ hello, "version 0", AT(hello.version), 0, 0 },
	{ uffd, "unknown flag", AT(uffd.flags), 4, -EPROTO },
	{ uffd, "no flags", AT(uffd.flags), 0, 0 },
	{ uffd, "pad", AT(uffd.pad), 1, -EPROTO },
	{ attach, "unknown flag", AT(attach.flags), 2, -EPROTO },
	{ attach, "direct, without the descriptor", AT(attach.flags), WIRE_DIRECT, -EPROTO },
	{ attach_direct, "not direct, with the descriptor", AT(attach.flags), 0, -EPROTO },
	{ attach, "no segment", AT(attach.nr_segs), 0, -EPROTO },
	{ attach, "too many segments", AT(attach.nr_segs), WIRE_MAX_SEGS + 1, -EPROTO },
	{ attach, "all segments", AT(attach.nr_segs), UINT32_MAX, -EPROTO },
	{ attach, "too many units", AT(attach.nr_units), WIRE_MAX_UNITS + 1, -EPROTO },
	{ attach, "all units", AT(attach.nr_units), UINT32_MAX, -EPROTO },
	{ attach, "pad", AT(attach.pad), 1, -EPROTO },
	{ attach, "no bytes", AT(attach.bytes), 0, -EPROTO },
	{ attach, "too many bytes", AT(attach.bytes), 1ull << 46, -EPROTO },
	{ attach, "all bytes", AT(attach.bytes), UINT64_MAX, -EPROTO },
	{ hold, "unknown action", AT(ranges.hold), WIRE_HOLD_DROP + 1, -EPROTO },
	{ hold, "one range fewer", AT(ranges.nr_ranges), WIRE_RANGES - 1, -EPROTO },
	{ hold, "one range more", AT(ranges.nr_ranges), WIRE_RANGES + 1, -EPROTO },
	{ hold, "a number of ranges that wraps around", AT(ranges.nr_ranges), (1u << 29) + WIRE_RANGES, -EPROTO },
	{ hold, "all ranges", AT(ranges.nr_ranges), UINT32_MAX, -EPROTO },
	{ hold, "empty range", AT(ranges.ranges[WIRE_RANGES - 1].nr), 0, -EPROTO },
	{ hold, "range beyond the end", AT(ranges.ranges[WIRE_RANGES - 1].first), WIRE_RANGES, -EPROTO },
	{ hold, "first range beyond the end", AT(ranges.ranges[0].first), UINT32_MAX, -EPROTO },
	{ hold_nothing, "a range that is not there", AT(ranges.nr_ranges), 1, -EPROTO },
	{ touched, "holds", AT(ranges.hold), WIRE_HOLD_REMOVE, -EPROTO },
	{ touched, "empty range", AT(ranges.ranges[2].nr), 0, -EPROTO },
	{ touched, "behind the last range", AT(ranges.ranges[3].nr), 0, 0 },
	{ class, "unknown class", AT(value.value), VIEW_PINNED + 1, -EPROTO },
	{ class, "pad", AT(value.pad), 1u << 31, -EPROTO },
	{ forbid, "neither off nor on", AT(value.value), 2, -EPROTO },
	{ forbid, "pad", AT(value.pad), 1, -EPROTO },
	{ job, "neither gentle nor not", AT(job.gentle), 2, -EPROTO },
	{ job, "one range fewer", AT(job.nr_ranges), WIRE_RANGES - 1, -EPROTO },
	{ job, "one range more", AT(job.nr_ranges), WIRE_RANGES + 1, -EPROTO },
	{ job, "a number of ranges that wraps around", AT(job.nr_ranges), (1u << 29) + WIRE_RANGES, -EPROTO },
	{ job, "all ranges", AT(job.nr_ranges), UINT32_MAX, -EPROTO },
	{ job, "begins too far", AT(job.ranges[WIRE_RANGES - 1].off), 1ull << 46, -EPROTO },
	{ job, "begins as far as can be", AT(job.ranges[WIRE_RANGES - 1].off), UINT64_MAX, -EPROTO },
	{ job, "ends too far", AT(job.ranges[1].len), 1ull << 46, -EPROTO },
	{ job, "ends before it begins", AT(job.ranges[1].len), UINT64_MAX, -EPROTO },
	{ drop, "unknown flag", AT(admin.flags), 8, -EPROTO },
	{ drop, "unpin", AT(admin.flags), WIRE_UNPIN, -EPROTO },
	{ drop, "all, with a file", AT(admin.flags), WIRE_ALL, -EPROTO },
	{ drop_all, "without a file", AT(admin.flags), 0, -EPROTO },
	{ drop, "pad", AT(admin.pad), 1, -EPROTO },
	{ pin, "pins", AT(admin.flags), 0, 0 },
	{ pin, "all", AT(admin.flags), WIRE_ALL, -EPROTO },
	{ pin, "by force", AT(admin.flags), WIRE_FORCE, -EPROTO },
	{ pin, "pad", AT(admin.pad), 1, -EPROTO },
	{ pin, "bytes", AT(admin.bytes), 1, -EPROTO },
	{ welcome, "other version", AT(welcome.version), WIRE_VERSION + 1, -EPROTO },
	{ welcome, "unknown flag", AT(welcome.flags), 8, -EPROTO },
	{ welcome, "failed, with a socket", AT(welcome.status), (uint32_t)-EUSERS, -EPROTO },
	{ welcome, "positive status", AT(welcome.status), 1, -EPROTO },
	{ not_welcome, "no status, but no sizes", AT(welcome.status), 0, -EPROTO },
	{ not_welcome, "status that is no errno", AT(welcome.status), (uint32_t)-4096, -EPROTO },
	{ welcome, "no page", AT(welcome.page_bytes), 0, -EPROTO },
	{ welcome, "odd page", AT(welcome.page_bytes), 12288, -EPROTO },
	{ welcome, "page above extent", AT(welcome.page_bytes), 131072, -EPROTO },
	{ welcome, "odd extent", AT(welcome.extent_bytes), 3 << 20, -EPROTO },
	{ welcome, "huge extent", AT(welcome.extent_bytes), 1ull << 46, -EPROTO },
	{ error, "no error", AT(error.status), 0, -EPROTO },
	{ error, "positive", AT(error.status), EIO, -EPROTO },
	{ error, "no errno", AT(error.status), (uint32_t)-4096, -EPROTO },
	{ error, "the smallest number", AT(error.status), 1u << 31, -EPROTO },
	{ error, "pad", AT(error.pad), 1, -EPROTO },
	{ attached, "no bytes", AT(attached.bytes), 0, -EPROTO },
	{ attached, "too many bytes", AT(attached.bytes), 1ull << 46, -EPROTO },
	{ attached, "no table", AT(attached.table_bytes), 0, -EPROTO },
	{ attached, "too large a table", AT(attached.table_bytes), 1ull << 46, -EPROTO },
	{ attached, "neither known nor not", AT(attached.known), 2, -EPROTO },
	{ attached, "pad", AT(attached.pad), 1, -EPROTO },
	{ mapped, "no state", AT(mapped.state_bytes), 0, -EPROTO },
	{ mapped, "too large a state", AT(mapped.state_bytes), 1ull << 46, -EPROTO },
	{ job_info, "under way", AT(job_info.state), 0, 0 },
	{ job_info, "more than done", AT(job_info.state), 2, -EPROTO },
	{ job_info, "no errno", AT(job_info.state), (uint32_t)-4096, -EPROTO },
	{ job_info, "pad", AT(job_info.pad), 1, -EPROTO },
};

START_TEST(test_wrong_contents_are_refused)
{
	for (size_t i = 0; i < ARRAY_SIZE(patches); i++) {
		unsigned int fds;

		memset(&out, 0, sizeof(out));
		fds = patches[i].make(&out);
		ck_assert_int_eq(check_copy(&out, out.h.nbytes, fds), 0);
		memcpy(out.bytes + patches[i].offset, &patches[i].value, patches[i].size);
		ck_assert_msg(check_copy(&out, out.h.nbytes, fds) == patches[i].result, "type %u: %s", out.h.type,
			      patches[i].what);
	}
}
END_TEST

static const struct {
	unsigned int (*make)(union wire_any *m);
	size_t offset, size;
} texts[] = {
	{ hello, AT(hello.name) },
	{ hello_of_another_version, AT(hello.name) },
	{ attach, AT(attach.name) },
	{ stage, AT(stage.name) },
	{ welcome, AT(welcome.release) },
	{ welcome, AT(welcome.text) },
	{ not_welcome, AT(welcome.release) },
	{ not_welcome, AT(welcome.text) },
	{ error, AT(error.text) },
};

START_TEST(test_texts_end)
{
	char *field = (char *)out.bytes + texts[_i].offset;
	unsigned int fds;

	memset(&out, 0, sizeof(out));
	fds = texts[_i].make(&out);
	field[texts[_i].size - 1] = 'x';
	ck_assert_int_eq(check_copy(&out, out.h.nbytes, fds), -EPROTO);
	for (size_t i = 0; i < texts[_i].size; i++) { /* whatever lies behind the end */
		field[i] = 0;
		ck_assert_int_eq(check_copy(&out, out.h.nbytes, fds), 0);
		field[i] = 'x';
	}
}
END_TEST

START_TEST(test_sizes_by_count)
{
	ck_assert_uint_eq(wire_ranges_bytes(0), offsetof(struct wire_ranges, ranges));
	ck_assert_uint_eq(wire_ranges_bytes(WIRE_RANGES), sizeof(struct wire_ranges));
	ck_assert_uint_eq(wire_job_bytes(0), offsetof(struct wire_job, ranges));
	ck_assert_uint_eq(wire_job_bytes(WIRE_RANGES), sizeof(struct wire_job));
	ck_assert_uint_eq(sizeof(union wire_any), WIRE_MAX_BYTES);
}
END_TEST

/* ------------------------------------------------------------------ over a socket */

static void pair(int ret[2])
{
	ck_assert_int_eq(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ret), 0);
}

/* Descriptors that can be told apart: memfds of 1, 2, 3... bytes. */
static void some_fds(int *ret, unsigned int nr)
{
	for (unsigned int i = 0; i < nr; i++) {
		ret[i] = memfd_create("test", MFD_CLOEXEC);
		ck_assert_int_ge(ret[i], 0);
		ck_assert_int_eq(ftruncate(ret[i], i + 1), 0);
	}
}

static void close_fds(const int *fds, unsigned int nr)
{
	for (unsigned int i = 0; i < nr; i++)
		ck_assert_int_eq(close(fds[i]), 0);
}

/* Bytes as they are, which wire_send() would not send. */
static void send_raw(int socket, const void *bytes, size_t nbytes, const int *fds, unsigned int nr_fds)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * 64)];
	} space = { 0 };
	struct iovec part = { (void *)(uintptr_t)bytes, nbytes };
	struct msghdr m = { .msg_iov = &part, .msg_iovlen = 1 };

	ck_assert_uint_le(nr_fds, 64);
	if (nr_fds > 0) {
		struct cmsghdr *c;

		m.msg_control = &space;
		m.msg_controllen = CMSG_SPACE(sizeof(int) * nr_fds);
		c = CMSG_FIRSTHDR(&m);
		*c = (struct cmsghdr){ CMSG_LEN(sizeof(int) * nr_fds), SOL_SOCKET, SCM_RIGHTS };
		memcpy(CMSG_DATA(c), fds, sizeof(int) * nr_fds);
	}
	ck_assert_int_eq(sendmsg(socket, &m, MSG_NOSIGNAL), (ssize_t)nbytes);
}

static void must_send(int socket, unsigned int (*make)(union wire_any *m))
{
	int fds[WIRE_MAX_FDS];
	unsigned int nr;

	memset(&out, 0, sizeof(out));
	nr = make(&out);
	some_fds(fds, nr);
	ck_assert_int_eq(wire_send(socket, &out, fds, nr, true), 0);
	close_fds(fds, nr);
}

/* The next message is that one, with its descriptors. */
static void must_recv(int socket, unsigned int (*make)(union wire_any *m), int timeout_ms)
{
	int fds[WIRE_MAX_FDS];
	unsigned int nr = 99, wanted;

	memset(&out, 0, sizeof(out));
	wanted = make(&out);
	memset(&in, 0xEE, sizeof(in));
	ck_assert_int_eq(wire_recv(socket, &in, fds, &nr, timeout_ms), 1);
	ck_assert_uint_eq(nr, wanted);
	ck_assert_mem_eq(&in, &out, out.h.nbytes);
	for (unsigned int i = 0; i < WIRE_MAX_FDS; i++) {
		struct stat st;

		if (i >= nr) {
			ck_assert_int_eq(fds[i], -1);
			continue;
		}
		ck_assert_int_eq(fcntl(fds[i], F_GETFD), FD_CLOEXEC);
		ck_assert_int_eq(fstat(fds[i], &st), 0);
		ck_assert_int_eq(st.st_size, i + 1);
	}
	close_fds(fds, nr);
}

/* The result is that error, and nothing was written but "no descriptors". */
static void must_fail(int socket, int error, int timeout_ms)
{
	int fds[WIRE_MAX_FDS] = { 77, 77, 77, 77 };
	unsigned int nr = 99;

	ck_assert_int_eq(wire_recv(socket, &in, fds, &nr, timeout_ms), error);
	ck_assert_uint_eq(nr, 99);
	for (unsigned int i = 0; i < WIRE_MAX_FDS; i++)
		ck_assert_int_eq(fds[i], -1);
}

START_TEST(test_round_trip)
{
	unsigned int before = count_fds();
	int s[2];

	pair(s);
	must_send(s[0], goods[_i].make);
	must_recv(s[1], goods[_i].make, 0);
	must_send(s[1], goods[_i].make);
	must_recv(s[0], goods[_i].make, -1);
	close_fds(s, 2);
	ck_assert_uint_eq(count_fds(), before);
}
END_TEST

/* In order, with their descriptors, though a hang-up follows. */
START_TEST(test_messages_before_a_hang_up)
{
	unsigned int before = count_fds();
	int s[2];

	pair(s);
	for (int turn = 0; turn < 2; turn++) {
		/* Small ones: they all have to fit the queue. */
		must_send(s[0], uffd);
		must_send(s[0], attach_direct);
		must_send(s[0], hello);
	}
	if (_i == 1)
		must_send(s[1], ping); /* not read by him: the kernel says "reset", once */
	if (_i == 2)
		ck_assert_int_eq(shutdown(s[0], SHUT_WR), 0);
	else
		ck_assert_int_eq(close(s[0]), 0);
	for (int turn = 0; turn < 2; turn++) {
		must_recv(s[1], uffd, 0);
		must_recv(s[1], attach_direct, -1);
		must_recv(s[1], hello, 100);
	}
	must_fail(s[1], 0, 0);
	must_fail(s[1], 0, -1);
	must_fail(s[1], 0, 20000);
	if (_i != 2) {
		int r = wire_send(s[1], &out, NULL, 0, true); /* no SIGPIPE */

		ck_assert_msg(r == -EPIPE || r == -ECONNRESET, "%d", r);
	} else {
		ck_assert_int_eq(close(s[0]), 0);
	}
	ck_assert_int_eq(close(s[1]), 0);
	ck_assert_uint_eq(count_fds(), before);
}
END_TEST

/* Packets that are no messages, and whose descriptors may not stay. */
static const struct {
	const char *what;
	size_t nbytes;
	unsigned int nr_fds;
} packets[] = {
	{ "empty", 0, 0 },
	{ "empty, with a descriptor", 0, 1 },
	{ "empty, with all", 0, WIRE_MAX_FDS },
	{ "a byte", 1, 1 },
	{ "half a head", sizeof(struct wire_head) / 2, 2 },
	{ "a head of nothing", sizeof(struct wire_head), 3 },
	{ "half a message", sizeof(struct wire_hello) / 2, 0 },
	{ "the largest", WIRE_MAX_BYTES, 4 },
	{ "larger", WIRE_MAX_BYTES + 1, 4 },
	{ "twice as large", 2 * WIRE_MAX_BYTES, 1 },
	{ "five descriptors", sizeof(struct wire_hello), WIRE_MAX_FDS + 1 },
	{ "many descriptors", sizeof(struct wire_hello), 64 },
	{ "too large, too many", WIRE_MAX_BYTES + 8, 64 },
};

START_TEST(test_packets_that_are_no_messages)
{
	static unsigned char bytes[2 * WIRE_MAX_BYTES];
	unsigned int before = count_fds();
	int s[2], fds[64];

	pair(s);
	for (size_t i = 0; i < ARRAY_SIZE(packets); i++) {
		for (int like_hello = 0; like_hello < 2; like_hello++) {
			struct wire_hello *m = (struct wire_hello *)(void *)bytes;

			memset(bytes, 0, sizeof(bytes));
			if (like_hello) /* but for what is wrong */
				*m = (struct wire_hello){ { WIRE_MAGIC, WIRE_HELLO, sizeof(*m), 0 }, 1, 0, "x" };
			some_fds(fds, packets[i].nr_fds);
			send_raw(s[0], bytes, packets[i].nbytes, fds, packets[i].nr_fds);
			close_fds(fds, packets[i].nr_fds);
			must_send(s[0], uffd);
			must_fail(s[1], -EPROTO, like_hello ? -1 : 0);
			must_recv(s[1], uffd, 0); /* it was the packet's fault alone */
			must_fail(s[1], -EAGAIN, 0);
			ck_assert_msg(count_fds() == before + 2, "%s", packets[i].what);
		}
	}
	close_fds(s, 2);
	ck_assert_uint_eq(count_fds(), before);
}
END_TEST

/* The last thing that a peer says is an empty packet: the descriptor with it is no reason to say that he hung up. */
START_TEST(test_empty_packet_before_a_hang_up)
{
	unsigned int before = count_fds();
	int s[2], fd;

	pair(s);
	some_fds(&fd, 1);
	send_raw(s[0], "", 0, &fd, 1);
	close_fds(&fd, 1);
	ck_assert_int_eq(close(s[0]), 0);
	must_fail(s[1], -EPROTO, -1);
	must_fail(s[1], 0, -1);
	ck_assert_int_eq(close(s[1]), 0);
	ck_assert_uint_eq(count_fds(), before);
}
END_TEST

/* A good message with one descriptor too many, or too few: they are closed. */
START_TEST(test_descriptors_of_refused_messages)
{
	unsigned int before = count_fds(), nr;
	int s[2], fds[WIRE_MAX_FDS];

	pair(s);
	memset(&out, 0, sizeof(out));
	nr = goods[_i].make(&out);
	for (unsigned int i = 0; i <= WIRE_MAX_FDS; i++) {
		if (i + goods[_i].fewer >= nr && i <= nr + goods[_i].more)
			continue;
		some_fds(fds, i);
		send_raw(s[0], &out, out.h.nbytes, fds, i);
		close_fds(fds, i);
		must_fail(s[1], -EPROTO, 0);
		ck_assert_uint_eq(count_fds(), before + 2);
	}
	close_fds(s, 2);
}
END_TEST

/* Our own limit is not taken for the peer's mistake, and what could be received is closed. */
START_TEST(test_no_descriptor_free)
{
	unsigned int before = count_fds();
	struct rlimit limit;
	int s[2], fds[3], spare[2];

	pair(s);
	for (rlim_t left = 0; left <= 3; left++) {
		must_send(s[0], attach_direct);
		some_fds(fds, 3);
		spare[0] = dup(0); /* the lowest free number: all below are taken */
		ck_assert_int_ge(spare[0], 0);
		ck_assert_int_eq(close(spare[0]), 0);
		ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
		limit.rlim_cur = (rlim_t)spare[0] + left;
		ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
		if (left < 3) {
			must_fail(s[1], -EMFILE, 0);
			spare[0] = dup(0);
			ck_assert_int_eq(spare[0], left > 0 ? (int)limit.rlim_cur - (int)left : -1);
			if (left > 0)
				ck_assert_int_eq(close(spare[0]), 0);
		}
		limit.rlim_cur = limit.rlim_max;
		ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
		if (left == 3)
			must_recv(s[1], attach_direct, 0);
		close_fds(fds, 3);
		must_fail(s[1], -EAGAIN, 0);
		ck_assert_uint_eq(count_fds(), before + 2);
	}
	close_fds(s, 2);
}
END_TEST

START_TEST(test_send_refuses)
{
	int s[2], fds[WIRE_MAX_FDS + 1], one[1] = { -1 };

	pair(s);
	some_fds(fds, WIRE_MAX_FDS + 1);
	memset(&out, 0, sizeof(out));
	hello(&out);
	ck_assert_int_eq(wire_send(s[0], &out, fds, WIRE_MAX_FDS + 1, true), -EINVAL);
	ck_assert_int_eq(wire_send(s[0], &out, one, 1, true), -EBADF);
	ck_assert_int_eq(wire_send(-1, &out, NULL, 0, true), -EBADF);
	ck_assert_int_eq(wire_send(fds[0], &out, NULL, 0, true), -ENOTSOCK);
	must_fail(s[1], -EAGAIN, 0);
	must_fail(-1, -EBADF, 0);
	must_fail(fds[0], -ENOTSOCK, -1);
	close_fds(s, 2);
	close_fds(fds, WIRE_MAX_FDS + 1);
}
END_TEST

/* ------------------------------------------------------------------ waiting */

static _Atomic unsigned int nr_alarms;

static void on_alarm(int sig)
{
	(void)sig;
	(void)atomic_fetch_add(&nr_alarms, 1);
}

/* A signal every ms, without SA_RESTART. */
static void alarms(bool on)
{
	struct itimerval every = { { 0, on ? 1000 : 0 }, { 0, on ? 1000 : 0 } };
	struct sigaction act = { .sa_handler = on_alarm };

	ck_assert_int_eq(sigaction(SIGALRM, &act, NULL), 0);
	ck_assert_int_eq(setitimer(ITIMER_REAL, &every, NULL), 0);
}

START_TEST(test_time_limits)
{
	uint64_t begin;
	int s[2];

	pair(s);
	must_fail(s[1], -EAGAIN, 0);
	alarms(_i);
	begin = now_ms();
	must_fail(s[1], -EAGAIN, 100);
	ck_assert_uint_ge(now_ms() - begin, 99); /* (two clocks) */
	if (_i)
		ck_assert_uint_gt(atomic_load(&nr_alarms), 1);
	alarms(false);
	close_fds(s, 2);
}
END_TEST

struct later {
	int socket;
	pid_t waiter;
	bool hang_up;
};

static const _Atomic bool never;

static void *answer_later(void *arg)
{
	static union wire_any m;
	const struct later *l = arg;
	unsigned int seen = atomic_load(&nr_alarms);
	sigset_t all;

	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_BLOCK, &all, NULL);
	until_asleep(l->waiter, &never);
	while (atomic_load(&nr_alarms) - seen < 5) /* and was woken for nothing */
		(void)sched_yield();
	hello(&m);
	if (l->hang_up)
		(void)shutdown(l->socket, SHUT_RDWR);
	else
		(void)wire_send(l->socket, &m, NULL, 0, false);
	return NULL;
}

/* Signals neither end the wait nor hide what comes. */
START_TEST(test_wait_for_a_message)
{
	struct later l = { .waiter = gettid(), .hang_up = _i & 1 };
	int s[2], timeout_ms = _i & 2 ? -1 : 50000;
	pthread_t t;

	pair(s);
	l.socket = s[0];
	alarms(true);
	ck_assert_int_eq(pthread_create(&t, NULL, answer_later, &l), 0);
	if (l.hang_up)
		must_fail(s[1], 0, timeout_ms);
	else
		must_recv(s[1], hello, timeout_ms);
	alarms(false);
	ck_assert_int_eq(pthread_join(t, NULL), 0);
	close_fds(s, 2);
}
END_TEST

static void *drain_later(void *arg)
{
	static union wire_any m;
	const struct later *l = arg;
	int fds[WIRE_MAX_FDS], r;
	unsigned int nr;
	intptr_t n = 0;
	sigset_t all;

	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_BLOCK, &all, NULL);
	until_asleep(l->waiter, &never);
	while ((r = wire_recv(l->socket, &m, fds, &nr, 20000)) == 1 && m.h.type != WIRE_RESUME)
		n++;
	return (void *)(r < 0 ? r : n);
}

START_TEST(test_peer_that_does_not_read)
{
	struct later l = { .waiter = gettid() };
	intptr_t sent = 0;
	void *got;
	int s[2], r;
	pthread_t t;

	pair(s);
	memset(&out, 0, sizeof(out));
	(void)job(&out);
	while ((r = wire_send(s[0], &out, NULL, 0, false)) == 0)
		sent++;
	ck_assert_int_eq(r, -EAGAIN);
	ck_assert_int_gt(sent, 0);
	/* With `wait` it waits, through signals. */
	alarms(true);
	l.socket = s[1];
	ck_assert_int_eq(pthread_create(&t, NULL, drain_later, &l), 0);
	ck_assert_int_eq(wire_send(s[0], &out, NULL, 0, true), 0);
	alarms(false);
	(void)resume(&out);
	ck_assert_int_eq(wire_send(s[0], &out, NULL, 0, true), 0);
	ck_assert_int_eq(pthread_join(t, &got), 0);
	ck_assert_int_eq((intptr_t)got, sent + 1);
	close_fds(s, 2);
}
END_TEST

/* ------------------------------------------------------------------ blobs */

START_TEST(test_blob_round_trip)
{
	static const size_t sizes[][2] = {
		{ 0, 0 }, { 0, 1 }, { 1, 0 }, { 24, 16 }, { 4096, 4096 }, { 3 << 20, 5000 }
	};
	size_t a = sizes[_i][0], b = sizes[_i][1];
	cleanup_free unsigned char *bytes = malloc(a + b + 1);
	unsigned int before = count_fds();
	cleanup_free void *got = NULL;
	int fd;

	ck_assert_ptr_nonnull(bytes);
	data_fill(bytes, a + b, 5, 0);
	fd = wire_blob(a ? bytes : NULL, a, b ? bytes + a : NULL, b);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(fcntl(fd, F_GETFD), FD_CLOEXEC);
	ck_assert_int_eq(wire_blob_read(fd, a + b, &got), 0);
	ck_assert_ptr_nonnull(got);
	ck_assert_int_eq(data_check(got, a + b, 5, 0), -1);
	/* Nobody can change it afterwards, by no path. */
	ck_assert_int_eq(fcntl(fd, F_GET_SEALS) & (F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
			 F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
	ck_assert_int_eq(pwrite(fd, "x", 1, 0), -1);
	ck_assert_int_eq(ftruncate(fd, (off_t)(a + b + 1)), -1);
	if (a + b > 0) {
		ck_assert_int_eq(ftruncate(fd, 0), -1);
		ck_assert_int_eq(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 1), -1);
		ck_assert_ptr_eq(mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
	}
	ck_assert_int_eq(close(fd), 0);
	ck_assert_uint_eq(count_fds(), before);
}
END_TEST

#define BLOB 5000

static int sealed(size_t nbytes, int seals)
{
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(ftruncate(fd, (off_t)nbytes), 0);
	ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, seals), 0);
	return fd;
}

static int reopened(int fd, int flags)
{
	char path[64];
	int r;

	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	r = open(path, flags | O_CLOEXEC);
	ck_assert_int_ge(r, 0);
	ck_assert_int_eq(close(fd), 0);
	return r;
}

static int no_blob(int kind)
{
	int p[2], fd;

	switch (kind) {
	case 0:
		return -1;
	case 1:
		ck_assert_int_eq(pipe2(p, O_CLOEXEC), 0);
		ck_assert_int_eq(close(p[1]), 0);
		return p[0];
	case 2:
		pair(p);
		ck_assert_int_eq(close(p[1]), 0);
		return p[0];
	case 3:
		return epoll_create1(EPOLL_CLOEXEC);
	case 4:
		return eventfd(0, EFD_CLOEXEC);
	case 5: /* a regular file of the right size */
		fd = open(test_path("."), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
		ck_assert_int_ge(fd, 0);
		ck_assert_int_eq(ftruncate(fd, BLOB), 0);
		return fd;
	case 6:
		return open(test_path("."), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	case 7:
		return open("/dev/zero", O_RDWR | O_CLOEXEC);
	case 8: /* sealed well, but a path only */
		return reopened(sealed(BLOB, F_SEAL_WRITE | F_SEAL_SHRINK), O_PATH);
	case 9: /* opened for writing only */
		fd = reopened(sealed(BLOB, 0), O_WRONLY);
		ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK), 0);
		return fd;
	case 10:
		return sealed(BLOB, 0);
	case 11:
		return sealed(BLOB, F_SEAL_WRITE | F_SEAL_GROW | F_SEAL_SEAL);
	case 12:
		return sealed(BLOB, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
	case 13: /* who has it mapped for writing may go on */
		return sealed(BLOB, F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW);
	case 14:
		return sealed(BLOB - 1, F_SEAL_WRITE | F_SEAL_SHRINK);
	case 15:
		return sealed(BLOB + 1, F_SEAL_WRITE | F_SEAL_SHRINK);
	case 16:
		return sealed(0, F_SEAL_WRITE | F_SEAL_SHRINK);
	case 17: /* not made for sealing */
		fd = memfd_create("test", MFD_CLOEXEC);
		ck_assert_int_ge(fd, 0);
		ck_assert_int_eq(ftruncate(fd, BLOB), 0);
		return fd;
	default: /* the one that is right */
		return sealed(BLOB, F_SEAL_WRITE | F_SEAL_SHRINK);
	}
}

START_TEST(test_what_is_no_blob)
{
	void *const nothing = &in;
	void *got = nothing;
	int fd = no_blob(_i);

	ck_assert_int_eq(fd < 0, _i == 0);
	if (_i < 18) {
		ck_assert_int_eq(wire_blob_read(fd, BLOB, &got), -EPROTO);
		ck_assert_ptr_eq(got, nothing);
	} else {
		ck_assert_int_eq(wire_blob_read(fd, BLOB, &got), 0);
		ck_assert_int_eq(*(unsigned char *)got, 0);
		free(got);
	}
	if (fd >= 0) {
		ck_assert_int_ge(fcntl(fd, F_GETFD), 0); /* it is the caller's still */
		ck_assert_int_eq(close(fd), 0);
	}
}
END_TEST

START_TEST(test_blob_beyond_memory)
{
	void *const nothing = &in;
	void *got = nothing;
	int fd = sealed((size_t)1 << 62, F_SEAL_WRITE | F_SEAL_SHRINK);

	ck_assert_int_eq(wire_blob_read(fd, (size_t)1 << 62, &got), -ENOMEM);
	ck_assert_ptr_eq(got, nothing);
	ck_assert_int_eq(close(fd), 0);
}
END_TEST

/* The file system of a descriptor is not asked before it is known to be a memfd: this one never answers. */
static int silent_mount(const char *path)
{
	cleanup_close int server = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	char options[128];

	if (server < 0 || unshare(CLONE_NEWNS) < 0 || mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		return -errno;
	(void)mkdir(path, 0755);
	(void)snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=0,group_id=0", server);
	if (mount("test", path, "fuse", MS_NOSUID | MS_NODEV, options) < 0)
		return -errno;
	return TAKE_FD(server);
}

static int fuse_is_here(void *arg)
{
	return silent_mount(arg) < 0;
}

START_TEST(test_foreign_file_system_is_not_asked)
{
	char path[300];
	void *got = NULL;
	int server, fd;

	(void)snprintf(path, sizeof(path), "%s", test_path("silent"));
	server = silent_mount(path);
	ck_assert_int_ge(server, 0);
	fd = open(path, O_PATH | O_CLOEXEC); /* needs no answer */
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(wire_blob_read(fd, BLOB, &got), -EPROTO);
	ck_assert_int_eq(close(server), 0);
	ck_assert_int_eq(close(fd), 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("wire");
	char path[300];
	TCase *tc;

	tc = new_case(s, "check", 60);
	tcase_add_test(tc, test_every_type_is_known_once);
	tcase_add_loop_test(tc, test_good_messages_and_their_neighbours, 0, ARRAY_SIZE(goods));
	tcase_add_test(tc, test_wrong_contents_are_refused);
	tcase_add_loop_test(tc, test_texts_end, 0, ARRAY_SIZE(texts));
	tcase_add_test(tc, test_sizes_by_count);

	tc = new_case(s, "socket", 60);
	tcase_add_loop_test(tc, test_round_trip, 0, ARRAY_SIZE(goods));
	tcase_add_loop_test(tc, test_messages_before_a_hang_up, 0, 3);
	tcase_add_test(tc, test_packets_that_are_no_messages);
	tcase_add_test(tc, test_empty_packet_before_a_hang_up);
	tcase_add_loop_test(tc, test_descriptors_of_refused_messages, 0, ARRAY_SIZE(goods));
	tcase_add_test(tc, test_no_descriptor_free);
	tcase_add_test(tc, test_send_refuses);

	tc = new_case(s, "waiting", 60);
	tcase_add_loop_test(tc, test_time_limits, 0, 2);
	tcase_add_loop_test(tc, test_wait_for_a_message, 0, 4);
	tcase_add_test(tc, test_peer_that_does_not_read);

	tc = new_case(s, "blob", 60);
	tcase_add_loop_test(tc, test_blob_round_trip, 0, 6);
	tcase_add_loop_test(tc, test_what_is_no_blob, 0, 19);
	tcase_add_test(tc, test_blob_beyond_memory);
	(void)snprintf(path, sizeof(path), "%s/weightd-silent-XXXXXX",
		       getenv("TMPDIR") ? getenv("TMPDIR") : "/var/tmp");
	if (mkdtemp(path)) {
		if (in_child(fuse_is_here, path) == 0)
			tcase_add_test(tc, test_foreign_file_system_is_not_asked);
		else
			skip("test_foreign_file_system_is_not_asked", "no FUSE mount can be made here");
		(void)rmdir(path);
	}
	return run_suite(s);
}
