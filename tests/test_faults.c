/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What cannot be read, must not be read, or is not the file's any more (I2): errors of backing reads, torn and short
 * reads, changed files, strict mode, direct I/O that is refused, memory that is locked, a file that is saved over
 * itself. Whoever touches such bytes gets a signal and a reason; nobody reads a wrong byte.
 */
#include "tests/pager_util.h"

#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

static struct rig R;
static struct tfile F;

/* ------------------------------------------------------------------ backing reads that fail */

static struct {
	_Atomic uint64_t from, to; /* file bytes whose read fails */
	_Atomic int64_t error;
	_Atomic uint64_t calls;
} bad;

static int64_t hook_bad(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	(void)direct;
	if (offset < bad.to && offset + nbytes > bad.from) {
		bad.calls++;
		(void)hook_pread(s, buf, nbytes / 2, offset); /* an error after half of it */
		return bad.error;
	}
	return hook_pread(s, buf, nbytes, offset);
}

static void fail_extent(uint64_t i, int error)
{
	bad.from = i * extent();
	bad.to = (i + 1) * extent();
	bad.error = error;
	source_hook = hook_bad;
}

static void check_sigbus(const struct caught *c, const void *p)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);

	ck_assert_int_eq(c->sig, SIGBUS);
	/* BUS_ADRERR, or BUS_MCEERR_AR where the kernel has CONFIG_MEMORY_FAILURE */
	ck_assert_msg(c->code == 2 || c->code == 4, "si_code %d", c->code);
	ck_assert_uint_eq((uintptr_t)c->addr / page, (uintptr_t)p / page);
}

static void check_reason(const void *p, enum fault_code code, int error)
{
	struct fault_reason why;

	ck_assert(pager_fault_reason(p, &why));
	ck_assert_int_eq(why.code, code);
	if (error)
		ck_assert_int_eq(why.error, error);
	ck_assert_ptr_eq(why.view, R.view);
	ck_assert_uint_eq(why.off, (uint64_t)((const unsigned char *)p - R.base));
}

/* Bites on: poisoning of the waiting page when its read failed; the other extents' states. */
START_TEST(test_failed_read_is_a_signal_with_a_reason)
{
	uint64_t e = extent();
	struct caught c;
	struct fault_reason why;
	struct pager_stats st;
	unsigned char *p;
	cleanup_close int fd = open(test_path("sink"), O_RDWR | O_CREAT | O_TRUNC, 0600);

	catch_signals();
	tfile_make(&F, "eio", 5 * e, 80);
	fail_extent(2, -EIO);
	rig_open(&R, _i, &F, 256 * MiB, e / 2);
	p = R.base + 2 * e + e / 2 + 4096 + 10;
	ck_assert(!pager_fault_reason(p, &why));
	ck_assert(!touch(p, NULL, &c));
	check_sigbus(&c, p);
	check_reason(p, FAULT_READ, -EIO);
	ck_assert(pager_fault_reason(p, &why));
	ck_assert_uint_eq(why.unit, 5);
	ck_assert(!touch_write(p, 3, &c)); /* a write as well */
	check_sigbus(&c, p);
	errno = 0;
	ck_assert_int_eq(write(fd, p, 100), -1);
	ck_assert_int_eq(errno, EFAULT);
	for (uint64_t end = now_ms() + 5000; pager_stats(R.pager, &st), st.failed == 0 && now_ms() < end;)
		(void)sched_yield(); /* counted a moment later */
	ck_assert_uint_ge(st.failed, 1);
	ck_assert_uint_le(arena_bytes(), resident(R.pager) + 64 * KiB); /* nothing half read stays */
	/* All others are as they should be. */
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 2 * e, 8), 0);
	ck_assert_uint_eq(wrong_words(R.base + 3 * e, &F, 3 * e, 2 * e, 8), 0);
	ck_assert(!pager_fault_reason(R.base, &why));
	rig_close(&R);
}
END_TEST

/* Once the file can be read again, so can the memory: at the next populate, at the next touch (a poisoned page by
 * populating or dropping; another page of the extent by itself). */
START_TEST(test_failed_read_can_be_tried_again)
{
	uint64_t e = extent();
	struct pager_job *j;
	struct caught c;
	struct fault_reason why;
	uint64_t page;

	catch_signals();
	tfile_make(&F, "again", 4 * e, 81);
	fail_extent(1, -EIO);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	ck_assert(!touch(R.base + e, NULL, &c));
	ck_assert_int_eq(pager_job_new(R.pager, &(struct job_range){ R.view, 0, R.size }, 1, false, &j), 0);
	ck_assert_int_eq(pager_job_wait(j, 20000), -EIO);
	pager_job_free(j);
	ck_assert(!touch(R.base + e, NULL, &c));
	/* by itself, on a page that nobody touched while it could not be read */
	bad.to = 0;
	for (page = 1; !touch(R.base + e + page * 4096, NULL, &c) && page < e / 4096 - 1; page++)
		(void)usleep(20000);
	page++;
	ck_assert_uint_eq(wrong_words(R.base + e + page * 4096, &F, e + page * 4096, e - page * 4096, 8), 0);
	/* the poisoned ones */
	ck_assert_int_eq(pager_job_new(R.pager, &(struct job_range){ R.view, 0, R.size }, 1, false, &j), 0);
	ck_assert_int_eq(pager_job_wait(j, 20000), 0);
	pager_job_free(j);
	ck_assert(touch(R.base + e, NULL, &c));
	ck_assert(!pager_fault_reason(R.base + e, &why));
	rig_check(&R);
	rig_drop(&R);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* Many threads wait for the read that fails: every one of them is told, none hangs. */
static void *toucher(void *arg)
{
	return (void *)(uintptr_t)touch(arg, NULL, NULL);
}

START_TEST(test_every_waiter_learns_of_the_failure)
{
	pthread_t t[8];
	uint64_t e = extent();

	catch_signals();
	tfile_make(&F, "waiters", 4 * e, 82);
	fail_extent(1, -ENXIO);
	rig_open(&R, _i, &F, 256 * MiB, 2 * e);
	for (unsigned int round = 0; round < 5; round++) {
		void *ok;

		for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
			ck_assert_int_eq(pthread_create(&t[i], NULL, toucher, R.base + e + (8 * round + i / 2) * 4096),
					 0);
		for (unsigned int i = 0; i < ARRAY_SIZE(t); i++) {
			ck_assert_int_eq(pthread_join(t[i], &ok), 0);
			ck_assert_ptr_null(ok);
		}
	}
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, e, 8), 0); /* the same unit, another extent */
	rig_close(&R);
}
END_TEST

/* Errors that mean "ask again" or "not like this" are no failures. G05: the first direct read is refused. */
static _Atomic uint64_t refusals;
static _Atomic int refuse_with;

static int64_t hook_refuses_direct(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	if (direct) {
		refusals++;
		return refuse_with;
	}
	return hook_pread(s, buf, nbytes, offset);
}

START_TEST(test_direct_reads_refused)
{
	static const int errors[] = { -EINVAL, -EOPNOTSUPP };

	for (size_t i = 0; i < ARRAY_SIZE(errors); i++) {
		refusals = 0;
		refuse_with = errors[i];
		tfile_make(&F, "direct", 6 * MiB + 777, 83);
		source_hook = hook_refuses_direct;
		rig_open(&R, _i, &F, 256 * MiB, MiB);
		rig_check(&R);
		ck_assert_uint_le(refusals, 64); /* those that were on their way; then never again */
		rig_drop(&R);
		rig_check(&R);
		rig_close(&R);
	}
	source_hook = NULL;
	/* By the kernel itself, at the first read: the alignment is not what the source believes. */
	{
		struct pager *p = pager_of(_i, 256 * MiB);
		struct segment seg = { 0, 1, 6 * MiB };
		struct view_layout layout = { &seg, 1, NULL, 0 };
		struct source *s;
		struct view *v;

		tfile_make(&F, "direct", 6 * MiB + 777, 83);
		ck_assert_int_eq(source_open(F.path, &s, NULL), 0);
		if (s->direct_fd >= 0) {
			s->align = 1;
			ck_assert_int_eq(view_open(p, s, &layout, &v, NULL), 0);
			for (uint64_t o = 0; o < seg.len; o += 1021)
				if (view_base(v)[o] !=
				    (unsigned char)(file_word(F.seed, round_down(o + 1, 8)) >> (o + 1) % 8 * 8))
					ck_abort_msg("byte %" PRIu64 " is wrong", o);
			view_unref(v);
		}
		source_unref(s);
		pager_unref(p);
	}
	pager_hooks.no_direct = true; /* refused at open */
	tfile_make(&F, "direct", 6 * MiB + 777, 84);
	rig_open(&R, _i, &F, 256 * MiB, MiB);
	ck_assert_int_lt(R.source->direct_fd, 0);
	rig_check(&R);
	rig_drop(&R);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* G05 (d): a file that is in the page cache already. */
START_TEST(test_file_in_page_cache)
{
	tfile_make(&F, "cached", 8 * MiB + 777, 85);
	{
		cleanup_close int fd = open(F.path, O_RDONLY);
		cleanup_free void *buf = malloc(F.size);

		ck_assert_int_eq(read(fd, buf, F.size), (ssize_t)F.size);
	}
	rig_open(&R, _i, &F, 256 * MiB, 3 * MiB);
	rig_check(&R);
	rig_drop(&R);
	rig_check(&R);
	rig_close(&R);
	/* And one that has dirty pages. */
	ck_assert_int_eq(tfile_write(F.path, 0, F.size, 86), 0);
	F.seed = 86;
	rig_open(&R, _i, &F, 256 * MiB, 3 * MiB);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ torn and short reads */

static sem_t half_done, go_on;

static int64_t hook_two_halves(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	int64_t n;

	(void)direct;
	n = hook_pread(s, buf, nbytes / 2, offset);
	if (n < 0)
		return n;
	(void)sem_post(&half_done);
	while (sem_wait(&go_on) < 0)
		;
	(void)sem_post(&go_on);
	return hook_pread(s, buf, nbytes, offset);
}

struct torn {
	pthread_t thread;
	uint64_t off, wrong;
	pid_t tid;
	_Atomic bool started, done;
};

static void *torn_reader(void *arg)
{
	struct torn *t = arg;

	t->tid = gettid();
	t->started = true;
	t->wrong = wrong_words(R.base + t->off, &F, t->off, 4096, 8);
	t->done = true;
	return NULL;
}

/* The arena has its pages before the read has ended: a touch of the first half, of the second, of any page waits.
 * Bites on: READY only after the last byte (a MINOR fault on a page that exists says nothing). */
START_TEST(test_nobody_sees_half_a_read)
{
	static struct torn t[6];
	uint64_t e = extent();

	(void)sem_init(&half_done, 0, 0);
	(void)sem_init(&go_on, 0, 0);
	source_hook = hook_two_halves;
	tfile_make(&F, "torn", 2 * e, 87);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	for (uint64_t i = 0; i < ARRAY_SIZE(t); i++) {
		t[i].off = i * (e / ARRAY_SIZE(t) / 4096 * 4096);
		ck_assert_int_eq(pthread_create(&t[i].thread, NULL, torn_reader, &t[i]), 0);
		if (i == 0)
			must_wait(&half_done); /* the others come when half is there */
		while (!t[i].started)
			(void)sched_yield();
		until_asleep(t[i].tid, &t[i].done);
	}
	for (uint64_t i = 0; i < ARRAY_SIZE(t); i++)
		ck_assert_msg(!t[i].done, "a touch at %" PRIu64 " got through before the read had ended", t[i].off);
	(void)sem_post(&go_on);
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++) {
		ck_assert_int_eq(pthread_join(t[i].thread, NULL), 0);
		ck_assert_uint_eq(t[i].wrong, 0);
	}
	rig_check(&R);
	rig_close(&R);
}
END_TEST

static _Atomic uint64_t short_seed = 12345;
static _Atomic bool odd_lengths;

static int64_t hook_short(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	uint64_t n = atomic_fetch_add(&short_seed, 0x9E3779B97F4A7C15u);

	n = rnd(&n);

	(void)direct;
	if (n % 16 == 0)
		return -EINTR;
	n = odd_lengths ? 1 + n % 70000 : (1 + n % 100) * 4096;
	return hook_pread(s, buf, MIN(nbytes, n), offset);
}

/* A short read before the end is gone on with, from where it stopped. */
START_TEST(test_short_reads_are_completed)
{
	for (int odd = 0; odd < 2; odd++) {
		odd_lengths = odd;
		source_hook = hook_short;
		tfile_make(&F, "short", 6 * MiB + 4321, 88);
		rig_open(&R, _i, &F, 256 * MiB, 3 * MiB);
		rig_check(&R);
		rig_drop(&R);
		rig_check(&R);
		rig_close(&R);
	}
}
END_TEST

static int64_t hook_ends_early(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	uint64_t end = 3 * extent() + 1000;

	(void)direct;
	return offset >= end ? 0 : hook_pread(s, buf, MIN(nbytes, end - offset), offset);
}

/* The end comes before st_size said: the file shrank, whatever fstat(2) says. */
START_TEST(test_early_end_is_a_shrunken_file)
{
	uint64_t e = extent();
	struct caught c;
	struct fault_reason why;

	catch_signals();
	source_hook = hook_ends_early;
	tfile_make(&F, "early", 5 * e, 89);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 3 * e, 8), 0);
	for (uint64_t off = 3 * e; off < 5 * e; off += e) {
		ck_assert(!touch(R.base + off, NULL, &c));
		check_sigbus(&c, R.base + off);
		ck_assert(pager_fault_reason(R.base + off, &why));
		ck_assert(why.code == FAULT_SHRANK || why.code == FAULT_CHANGED);
	}
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 3 * e, 8), 0);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ files that change */

/* Every touch of [off, +len): the old file's bytes, or SIGBUS; never anything else. Returns how many were SIGBUS. */
static uint64_t old_or_signal(uint64_t off, uint64_t len, uint64_t step)
{
	uint64_t signals = 0;
	unsigned char byte;
	struct caught c;

	for (uint64_t o = off; o < off + len; o += step) {
		if (touch(R.base + o, &byte, &c)) {
			if (byte != (unsigned char)(file_word(F.seed, round_down(o, 8)) >> o % 8 * 8))
				ck_abort_msg("offset %" PRIu64 " has a byte that was never the file's", o);
			continue;
		}
		if (c.sig != SIGBUS)
			ck_abort_msg("offset %" PRIu64 ": signal %d", o, c.sig);
		signals++;
	}
	return signals;
}

enum change { SHRINK, SHRINK_TO_0, GROW, OVERWRITE, OVERWRITE_ALL, TRUNC_AND_WRITE, NR_CHANGES };

/* Bites on: the check of size and mtime after a read, before READY; that a source seen changed stays so. */
START_TEST(test_changed_file_is_old_bytes_or_signal)
{
	uint64_t e = extent(), size = 6 * e;

	catch_signals();
	for (int change = 0; change < NR_CHANGES; change++) {
		cleanup_close int fd = -1;
		struct fault_reason why;
		struct pager_job *j;

		tfile_make(&F, "changed", size, 90);
		rig_open(&R, _i, &F, 256 * MiB, 0);
		ck_assert_uint_eq(wrong_words(R.base, &F, 0, 2 * e, 8), 0);
		fd = open(F.path, O_RDWR | (change == TRUNC_AND_WRITE ? O_TRUNC : 0));
		if (change == SHRINK)
			ck_assert_int_eq(ftruncate(fd, (off_t)(4 * e + 100)), 0);
		else if (change == SHRINK_TO_0)
			ck_assert_int_eq(ftruncate(fd, 0), 0);
		else if (change == GROW)
			ck_assert_int_eq(pwrite(fd, "more", 4, (off_t)size), 4);
		else
			ck_assert_int_eq(tfile_write(F.path, change == OVERWRITE ? 4 * e : 0,
						     change == OVERWRITE ? 4096 : size, 91),
					 0);
		/* What is in memory stays readable, or is refused; what is not must be refused. */
		(void)old_or_signal(0, 2 * e, 509);
		ck_assert_uint_eq(old_or_signal(2 * e, 4 * e, 4096), 4 * e / 4096);
		ck_assert(pager_fault_reason(R.base + 5 * e, &why));
		ck_assert(why.code == FAULT_CHANGED || why.code == FAULT_SHRANK);
		ck_assert_int_eq(pager_job_new(R.pager, &(struct job_range){ R.view, 0, size }, 1, false, &j), 0);
		ck_assert_int_lt(pager_job_wait(j, 20000), 0);
		pager_job_free(j);
		rig_drop(&R);
		(void)old_or_signal(0, size, 65536);
		/* Whoever opens it now gets the new file. */
		if (change == OVERWRITE_ALL || change == TRUNC_AND_WRITE) {
			struct tfile now = F;
			struct rig r2;

			now.seed = 91;
			rig_add(&r2, R.pager, &now, 0);
			rig_check(&r2);
			rig_close(&r2);
		}
		rig_close(&R);
	}
}
END_TEST

/* The change comes in the middle of a read: between its first and its second half. */
static int64_t hook_changes_file(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	static _Atomic bool once;
	int64_t n;

	(void)direct;
	if (offset < extent() || atomic_exchange(&once, true))
		return hook_pread(s, buf, nbytes, offset);
	n = hook_pread(s, buf, nbytes / 2, offset);
	if (n < 0 || tfile_write(F.path, 0, F.size, 93) < 0)
		return -EIO;
	return hook_pread(s, buf, nbytes, offset); /* all of the new file: as bad as half of it */
}

START_TEST(test_file_changes_during_a_read)
{
	uint64_t e = extent();

	catch_signals();
	source_hook = hook_changes_file;
	tfile_make(&F, "during", 3 * e, 92);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, e, 8), 0);
	ck_assert_uint_eq(old_or_signal(e, 2 * e, 4096), 2 * e / 4096);
	rig_close(&R);
}
END_TEST

/* Replaced by rename, unlinked, linked, its mode changed, moved: who has it open is not disturbed. */
START_TEST(test_names_and_modes_disturb_nobody)
{
	static const char *const what[] = { "rename over", "unlink", "link", "chmod", "move", "utime of atime" };
	uint64_t e = extent();

	for (size_t i = 0; i < ARRAY_SIZE(what); i++) {
		struct tfile other;
		struct rig r2;
		char moved[256];

		tfile_make(&F, "name", 4 * e + 10, 94);
		tfile_make(&other, "name-new", 4 * e + 10, 95);
		(void)snprintf(moved, sizeof(moved), "%s", test_path("name-moved"));
		(void)unlink(moved);
		rig_open(&R, _i, &F, 256 * MiB, 0);
		ck_assert_uint_eq(wrong_words(R.base, &F, 0, e, 8), 0);
		switch (i) {
		case 0:
			ck_assert_int_eq(rename(other.path, F.path), 0);
			break;
		case 1:
			ck_assert_int_eq(unlink(F.path), 0);
			break;
		case 2:
			ck_assert_int_eq(link(F.path, moved), 0);
			break;
		case 3:
			ck_assert_int_eq(chmod(F.path, 0400), 0);
			break;
		case 4:
			ck_assert_int_eq(rename(F.path, moved), 0);
			break;
		default: {
			struct timespec times[2] = { { 1, 0 }, { 0, UTIME_OMIT } };

			ck_assert_int_eq(utimensat(AT_FDCWD, F.path, times, 0), 0);
			break;
		}
		}
		ck_assert_msg(wrong_words(R.base, &F, 0, R.size, 8) == 0, "%s", what[i]);
		rig_drop(&R);
		ck_assert_msg(wrong_words(R.base, &F, 0, R.size, 8) == 0, "%s, after a drop", what[i]);
		if (i == 0) { /* a new open gets the new file; the old one stays what it was */
			struct tfile now = other;

			(void)snprintf(now.path, sizeof(now.path), "%s", F.path);
			rig_add(&r2, R.pager, &now, 0);
			rig_check(&r2);
			rig_check(&R);
			rig_close(&r2);
		}
		rig_close(&R);
	}
}
END_TEST

/* ------------------------------------------------------------------ a file saved over itself */

struct save {
	bool trunc;
	uint64_t from;    /* view offset that is written ... */
	uint64_t to, len; /* ... there */
	ssize_t written;
	_Atomic bool done;
};

static void *save_over_itself(void *arg)
{
	struct save *s = arg;
	cleanup_close int fd = open(F.path, O_WRONLY | (s->trunc ? O_TRUNC : 0));

	s->written = pwrite(fd, R.base + s->from, s->len, (off_t)s->to);
	s->done = true;
	return NULL;
}

/*
 * write(2) from a view that is not read yet into its own source: the writer holds the inode's lock while it faults.
 * Neither a hang, nor bytes that were never in the file.
 * Bites on: direct reads that wait for no inode lock (RWF_NOWAIT in ring_read(); then the mapping of the file, which
 * matters where a buffered read takes that lock, too: XFS, not ext4); the check for a change after the read.
 */
START_TEST(test_file_is_saved_over_itself)
{
	uint64_t e = extent(), size = 8 * e;
	const struct save saves[] = {
		{ .from = 0, .to = 0, .len = size },                     /* the same bytes */
		{ .from = 4 * e, .to = 0, .len = 3 * e },                /* other bytes, not read yet */
		{ .from = 0, .to = 4 * e, .len = 4 * e },                /* over what comes later */
		{ .from = e, .to = 0, .len = 6 * e },                    /* shifted: reads after it wrote there */
		{ .trunc = true, .from = 0, .to = 0, .len = size },      /* as open(path, "wb") does */
		{ .trunc = true, .from = e, .to = 8 * e, .len = 2 * e }, /* behind a hole */
	};

	catch_signals();
	for (size_t i = 0; i < ARRAY_SIZE(saves); i++) {
		for (int warm = 0; warm < 3; warm++) {
			struct save s = saves[i];
			pthread_t t;
			uint64_t end = now_ms() + 20000;
			cleanup_free unsigned char *buf = malloc(size);
			cleanup_close int fd = -1;

			tfile_make(&F, "self", size, 96);
			if (warm == 2) { /* in page cache */
				fd = open(F.path, O_RDONLY);
				ck_assert_int_eq(read(fd, buf, size), (ssize_t)size);
				(void)close(fd);
				fd = -1;
			}
			rig_open(&R, _i, &F, 256 * MiB, 3 * e / 2);
			if (warm == 1) /* part of it was read before */
				ck_assert_uint_eq(wrong_words(R.base + e, &F, e, 3 * e, 4096), 0);
			ck_assert_int_eq(pthread_create(&t, NULL, save_over_itself, &s), 0);
			while (!s.done && now_ms() < end)
				(void)usleep(500);
			ck_assert_msg(s.done, "case %zu: write(2) hangs", i);
			(void)pthread_join(t, NULL);
			ck_assert_int_ge(s.written, -1);
			if (s.written > 0) {
				/* What arrived are the bytes that the file had there. */
				fd = open(F.path, O_RDONLY);
				ck_assert_int_eq(pread(fd, buf, (size_t)s.written, (off_t)s.to), s.written);
				ck_assert_msg(wrong_words(buf, &F, s.from, (uint64_t)s.written, 8) == 0,
					      "case %zu warm %d: %zd bytes were written, some were never the file's", i,
					      warm, s.written);
			}
			(void)old_or_signal(0, size, 4096 + 8);
			rig_drop(&R);
			(void)old_or_signal(0, size, 65536 + 8);
			rig_close(&R);
		}
	}
}
END_TEST

/* ------------------------------------------------------------------ strict mode */

/* Bites on: poisoning of the one page that is touched (PROT_NONE where there is no userfaultfd); the lift at
 * view_allow(). */
START_TEST(test_forbidden_touch_is_a_signal_with_a_reason)
{
	uint64_t e = extent();
	struct caught c;
	struct fault_reason why;
	unsigned char *p, byte;
	cleanup_close int fd = open(test_path("sink2"), O_RDWR | O_CREAT | O_TRUNC, 0600);

	catch_signals();
	tfile_make(&F, "strict", 6 * e, 97);
	rig_open(&R, _i, &F, 256 * MiB, e);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 3 * e, 8), 0);
	R.base[2 * e + 100] = 0x5C; /* a write, which must survive all of it */
	rig_drop(&R);
	for (int round = 0; round < 3; round++) {
		char stage[100];

		(void)snprintf(stage, sizeof(stage), "stage-%d", round);
		view_forbid(R.view, stage);
		for (uint64_t i = 0; i < 6; i += 2) {
			p = R.base + i * e + 4096 * (uint64_t)(round + 3) + 7;
			ck_assert(!touch(p, NULL, &c));
			ck_assert_int_eq(c.sig, _i == V_MMAP ? SIGSEGV : SIGBUS);
			if (_i != V_MMAP)
				check_sigbus(&c, p);
			check_reason(p, FAULT_FORBIDDEN, 0);
			ck_assert(pager_fault_reason(p, &why));
			ck_assert_str_eq(why.stage, stage);
			ck_assert_uint_eq(why.unit, i);
			ck_assert(!touch_write(p, 1, &c));
			errno = 0;
			ck_assert_int_eq(write(fd, p, 10), -1);
			ck_assert_int_eq(errno, EFAULT);
		}
		(void)memset(stage, 'x', sizeof(stage)); /* it was copied */
		ck_assert(pager_fault_reason(R.base + 4096 * (uint64_t)(round + 3), &why));
		ck_assert_int_eq(why.stage[0], 's');
		if (_i != V_MMAP) /* private pages are no weights that were dropped */
			ck_assert(touch(R.base + 2 * e + 100, &byte, &c) && byte == 0x5C);
		view_allow(R.view);
		for (uint64_t i = 0; i < 6; i++) {
			p = R.base + i * e + 4096 * (uint64_t)(round + 3) + 7;
			ck_assert_msg(touch(p, &byte, &c), "round %d extent %" PRIu64 ": signal %d, reason %d", round,
				      i, c.sig, pager_fault_reason(p, &why) ? (int)why.code : -1);
			ck_assert_uint_eq(byte,
					  (unsigned char)(file_word(F.seed, round_down((uint64_t)(p - R.base), 8)) >>
							  (uint64_t)(p - R.base) % 8 * 8));
			ck_assert(!pager_fault_reason(p, &why));
		}
		ck_assert_uint_eq(R.base[2 * e + 100], 0x5C);
		R.base[2 * e + 100] = 0x5C;
		rig_drop(&R);
	}
	ck_assert_uint_eq(R.base[2 * e + 100], 0x5C);
	R.base[2 * e + 100] = (unsigned char)(file_word(F.seed, 2 * e + 96) >> 32);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* What is in memory stays readable when it is forbidden; only what is not is an error. */
START_TEST(test_forbidden_but_resident_is_readable)
{
	uint64_t e = extent();
	struct caught c;

	catch_signals();
	tfile_make(&F, "strict2", 4 * e, 98);
	rig_open(&R, _i, &F, 256 * MiB, e);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 2 * e, 8), 0);
	view_forbid(R.view, "other");
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 2 * e, 8), 0);
	ck_assert(!touch(R.base + 3 * e, NULL, &c));
	ck_assert(touch(R.base + e + 8, NULL, &c));
	view_allow(R.view);
	view_allow(R.view);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

static _Atomic bool stop;
static _Atomic uint64_t nr_signals, nr_good, nr_wrong;

static void *strict_reader(void *arg)
{
	uint64_t seed = 5 + (uint64_t)(uintptr_t)arg;

	while (!stop) {
		uint64_t off = rnd(&seed) % (R.size / 8) * 8;
		unsigned char byte;

		if (!touch(R.base + off, &byte, NULL)) {
			nr_signals++;
		} else {
			nr_good++;
			nr_wrong += byte != (unsigned char)file_word(F.seed, off);
		}
	}
	return NULL;
}

/* Forbidding and allowing under threads that touch: right bytes or a signal; at the end everything is readable. */
START_TEST(test_storm_of_strict_mode)
{
	pthread_t t[3];

	catch_signals();
	tfile_make(&F, "strict3", 6 * extent(), 99);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	for (uintptr_t i = 0; i < ARRAY_SIZE(t); i++)
		ck_assert_int_eq(pthread_create(&t[i], NULL, strict_reader, (void *)i), 0);
	for (uint64_t end = now_ms() + soak_ms(700); now_ms() < end;) {
		uint64_t before = nr_good;

		(void)view_drop(R.view);
		view_forbid(R.view, "storm");
		(void)pager_sync(R.pager, 1000);
		(void)usleep(500);
		view_allow(R.view);
		for (uint64_t late = now_ms() + 5000; nr_good == before && now_ms() < late;)
			(void)sched_yield();
		ck_assert_uint_ne(nr_good, before);
	}
	stop = true;
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
		(void)pthread_join(t[i], NULL);
	ck_assert_uint_eq(nr_wrong, 0);
	ck_assert_uint_gt(nr_good, 0);
	view_allow(R.view);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* Nothing is known against addresses that are nobody's, or fine. */
START_TEST(test_no_reason_without_a_fault)
{
	struct fault_reason why;
	int x = 0;

	tfile_make(&F, "reason", 3 * MiB, 100);
	ck_assert(!pager_fault_reason(&x, &why));
	rig_open(&R, _i, &F, 256 * MiB, 0);
	ck_assert(!pager_fault_reason(R.base, &why));
	rig_check(&R);
	ck_assert(!pager_fault_reason(R.base, &why));
	ck_assert(!pager_fault_reason(R.base - 1, &why));
	ck_assert(!pager_fault_reason(NULL, &why));
	ck_assert(!pager_fault_retry(&x));
	ck_assert(!pager_fault_retry(R.base));
	x = (int)(uintptr_t)R.base;
	{
		void *base = R.base;

		rig_close(&R);
		ck_assert(!pager_fault_reason(base, &why));
	}
}
END_TEST

/* ------------------------------------------------------------------ F: mlockall */

/* With MCL_FUTURE, mmap(2) itself would fill the view: zeros, without one fault message.
 * Bites on: PROT_NONE until the view is registered. */
START_TEST(test_locked_memory)
{
	uint64_t empty;

	if (mlockall(MCL_FUTURE) < 0)
		ck_abort_msg("mlockall: %s", strerror(errno));
	tfile_make(&F, "locked", 6 * MiB + 99, 101);
	rig_open(&R, _i, &F, 256 * MiB, MiB);
	empty = arena_bytes();
	if (_i != V_MMAP) {
		ck_assert_uint_eq(resident(R.pager), 0);
		ck_assert_uint_le(empty, 64 * KiB);
	}
	rig_check(&R);
	R.base[10] = 7;
	rig_drop(&R);
	ck_assert_uint_eq(R.base[10], 7);
	pager_observe_begin(R.pager);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	pager_observe_drop(R.pager);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	ck_assert_uint_eq(R.base[10], 7);
	ck_assert_uint_eq(wrong_words(R.base + 16, &F, 16, R.size - 16, 8), 0);
	rig_close(&R);
	(void)munlockall();
}
END_TEST

/* mlockall(MCL_CURRENT) and mlock(2) while views are there: everything is read in, or refused; the bytes are right. */
START_TEST(test_memory_locked_later)
{
	tfile_make(&F, "locked2", 6 * MiB + 99, 102);
	rig_open(&R, _i, &F, 256 * MiB, MiB);
	(void)*(volatile unsigned char *)R.base;
	(void)mlock(R.base, 3 * MiB);
	(void)mlockall(MCL_CURRENT | MCL_FUTURE);
	rig_check(&R);
	rig_drop(&R);
	rig_check(&R);
	pager_observe_begin(R.pager);
	pager_observe_drop(R.pager);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	rig_check(&R);
	rig_close(&R);
	(void)munlockall();
}
END_TEST

/* ------------------------------------------------------------------ sources */

START_TEST(test_source_refuses_what_is_no_file)
{
	struct source *s = NULL;
	struct wd_err err;
	const struct {
		const char *path;
		int error;
	} cases[] = {
		{ "/nonexistent/file", -ENOENT },
		{ "/dev/null", -EINVAL },
		{ "/", -EISDIR },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		err.text[0] = 0;
		ck_assert_int_eq(source_open(cases[i].path, &s, &err), cases[i].error);
		ck_assert_ptr_nonnull(strstr(err.text, cases[i].path));
		ck_assert_ptr_null(strchr(err.text, '\n'));
		ck_assert_ptr_null(s);
	}
	{
		char path[256];

		(void)snprintf(path, sizeof(path), "%s", test_path("fifo"));
		ck_assert_int_eq(mkfifo(path, 0600), 0);
		ck_assert_int_eq(source_open(path, &s, &err), -EINVAL); /* and does not wait for a writer */
		(void)snprintf(path, sizeof(path), "%s", test_path("dangling"));
		ck_assert_int_eq(symlink("to-nowhere", path), 0);
		ck_assert_int_eq(source_open(path, &s, &err), -ENOENT);
		ck_assert_ptr_nonnull(strstr(err.text, "to-nowhere"));
		(void)snprintf(path, sizeof(path), "%s", test_path("loop"));
		ck_assert_int_eq(symlink("loop", path), 0);
		ck_assert_int_eq(source_open(path, &s, &err), -ELOOP);
	}
	ck_assert_ptr_null(source_unref(NULL));
}
END_TEST

START_TEST(test_source_sees_changes)
{
	struct source *a, *b;
	struct timespec back[2];
	struct stat st;
	unsigned char buf[64];

	tfile_make(&F, "source", 2 * MiB + 7, 103);
	ck_assert_int_eq(source_open(F.path, &a, NULL), 0);
	ck_assert_int_eq(source_open(F.path, &b, NULL), 0);
	ck_assert(source_id_equal(&a->id, &b->id));
	ck_assert_uint_eq(a->id.size, F.size);
	ck_assert_int_eq(source_check(a), 0);
	ck_assert_int_eq(source_read(a, buf, sizeof(buf), 4096), 0);
	ck_assert_uint_eq(wrong_words(buf, &F, 4096, sizeof(buf), 8), 0);
	ck_assert_int_eq(source_read(a, buf, sizeof(buf), F.size - 63), -ENODATA);
	ck_assert_int_eq(stat(F.path, &st), 0);
	ck_assert_int_eq(tfile_write(F.path, 0, 8, 104), 0);
	ck_assert_int_eq(source_check(a), -ESTALE);
	/* The time stamp is put back: once seen changed, it stays so. */
	back[0] = st.st_atim;
	back[1] = st.st_mtim;
	ck_assert_int_eq(utimensat(AT_FDCWD, F.path, back, 0), 0);
	ck_assert_int_eq(source_check(a), -ESTALE);
	source_unref(b);
	ck_assert_int_eq(source_open(F.path, &b, NULL), 0);
	ck_assert(!source_id_equal(&a->id, &b->id)); /* by its ctime */
	source_unref(a);
	source_unref(b);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("faults");
	double soak = (double)soak_ms(0) / 1000;
	TCase *tc;

	tc = new_case(s, "errors", 60);
	add_variants(tc, test_failed_read_is_a_signal_with_a_reason, EMBEDDED);
	add_variants(tc, test_failed_read_can_be_tried_again, PAGED);
	add_variants(tc, test_every_waiter_learns_of_the_failure, PAGED);
	add_variants(tc, test_no_reason_without_a_fault, ALL_VARIANTS);

	tc = new_case(s, "direct", 60);
	add_variants(tc, test_direct_reads_refused, PAGED);
	add_variants(tc, test_file_in_page_cache, ALL_VARIANTS);

	tc = new_case(s, "torn", 60);
	add_variants(tc, test_nobody_sees_half_a_read, PAGED);
	add_variants(tc, test_short_reads_are_completed, PAGED);
	add_variants(tc, test_early_end_is_a_shrunken_file, PAGED);

	tc = new_case(s, "changes", 60);
	add_variants(tc, test_changed_file_is_old_bytes_or_signal, PAGED);
	add_variants(tc, test_file_changes_during_a_read, PAGED);
	add_variants(tc, test_names_and_modes_disturb_nobody, ALL_VARIANTS);

	tc = new_case(s, "self", 60);
	add_variants(tc, test_file_is_saved_over_itself, PAGED);

	tc = new_case(s, "strict", 60 + soak);
	add_variants(tc, test_forbidden_touch_is_a_signal_with_a_reason, ALL_VARIANTS);
	add_variants(tc, test_forbidden_but_resident_is_readable, PAGED);
	add_variants(tc, test_storm_of_strict_mode, ALL_VARIANTS);

	tc = new_case(s, "locked", 60);
	if (mlockall(MCL_FUTURE) == 0) {
		(void)munlockall();
		add_variants(tc, test_locked_memory, ALL_VARIANTS);
		add_variants(tc, test_memory_locked_later, ALL_VARIANTS);
	} else {
		skip("test_locked_memory", "mlockall: %s", strerror(errno));
	}

	tc = new_case(s, "sources", 60);
	tcase_add_test(tc, test_source_refuses_what_is_no_file);
	tcase_add_test(tc, test_source_sees_changes);
	return run_suite(s);
}
