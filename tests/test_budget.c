/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Budgets: files larger than what may be in memory at once, who goes first, and what happens when nothing can go.
 * With user-mode faults only nothing is taken back but at a stage mark, so most of it is about the embedded pager.
 */
#include "tests/pager_util.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

static struct rig R;
static struct tfile F;
static _Atomic bool stop;
static _Atomic uint64_t nr_wrong, most;

/* What is being read while room for it is made. */
static uint64_t window(void)
{
	return 4 * extent();
}

/* Looks at what the arenas really hold, all the time. */
static void *watch(void *arg)
{
	(void)arg;
	while (!stop) {
		uint64_t n = arena_bytes();

		if (n > most)
			most = n;
		(void)usleep(1000);
	}
	return NULL;
}

static void check_bounds(struct pager *p, uint64_t budget)
{
	struct pager_stats st;

	pager_stats(p, &st);
	ck_assert_uint_eq(st.budget_bytes, budget);
	ck_assert_uint_le(st.resident_bytes, budget + window());
	ck_assert_uint_le(st.peak_bytes, budget + window());
}

enum order { FORWARDS, BACKWARDS, RANDOM, STRIDED, NR_ORDERS };

/* Bites on: the clock (second chance), the wait of a fault for room, the bound of what is read ahead. */
START_TEST(test_file_larger_than_the_budget)
{
	uint64_t e = extent(), nr = 24, budget = 8 * e, seed = 3;
	struct pager_stats st;
	pthread_t t;

	source_hook = hook_count;
	tfile_make(&F, "larger", nr * e, 120);
	rig_open(&R, _i, &F, budget, e / 2);
	ck_assert_int_eq(pthread_create(&t, NULL, watch, NULL), 0);
	for (int order = 0; order < NR_ORDERS; order++) {
		for (int pass = 0; pass < 2; pass++) {
			for (uint64_t i = 0; i < nr; i++) {
				uint64_t k = order == FORWARDS  ? i :
					     order == BACKWARDS ? nr - 1 - i :
					     order == RANDOM    ? rnd(&seed) % nr :
								  i * 7 % nr;

				ck_assert_uint_eq(wrong_words(R.base + k * e, &F, k * e, e, 512), 0);
				check_bounds(R.pager, budget);
			}
		}
	}
	stop = true;
	(void)pthread_join(t, NULL);
	ck_assert_uint_le(most, budget + window());
	pager_stats(R.pager, &st);
	ck_assert_uint_gt(st.dropped_bytes, 0);
	ck_assert_uint_eq(st.failed, 0);
	ck_assert_uint_eq(st.read_bytes, hook_counts.bytes);
	/* Reading in order reads each byte once a pass (and what was read ahead of a jump, now and then, twice). */
	ck_assert_uint_le(st.read_bytes, NR_ORDERS * 2 * F.size * 5 / 4);
	rig_close(&R);
}
END_TEST

/* One unit is larger than the budget: it is read in pieces, as it is touched. */
START_TEST(test_unit_larger_than_the_budget)
{
	uint64_t e = extent();

	tfile_make(&F, "unit", 16 * e, 121);
	rig_open(&R, _i, &F, 4 * e, 16 * e);
	for (int pass = 0; pass < 2; pass++) {
		ck_assert_uint_eq(wrong_words(R.base, &F, 0, F.size, 512), 0);
		check_bounds(R.pager, 4 * e);
	}
	rig_close(&R);
}
END_TEST

/* Several threads at once, more of them than extents have room. */
static void *reader(void *arg)
{
	uint64_t seed = 11 + (uint64_t)(uintptr_t)arg;

	while (!stop) {
		uint64_t off = rnd(&seed) % (R.size / 4096) * 4096 + 80;

		if (*(volatile uint64_t *)(R.base + off) != file_word(F.seed, off))
			nr_wrong++;
	}
	return NULL;
}

START_TEST(test_storm_over_the_budget)
{
	pthread_t t[7];
	uint64_t e = extent(), n = 0;

	tfile_make(&F, "storm", 24 * e + 100, 122);
	rig_open(&R, _i, &F, 4 * e, e);
	for (uintptr_t i = 0; i < ARRAY_SIZE(t); i++)
		ck_assert_int_eq(pthread_create(&t[i], NULL, i ? reader : watch, (void *)i), 0);
	for (uint64_t end = now_ms() + soak_ms(1000); now_ms() < end; n++) {
		struct pager_job *j = NULL;

		/* The budget moves up and down as well, and jobs compete. */
		ck_assert_int_eq(pager_set_budget(R.pager, (4 + n % 3) * e), 0);
		if (n % 4 == 0)
			ck_assert_int_eq(pager_job_new(R.pager, &(struct job_range){ R.view, 0, R.size }, 1, false, &j),
					 0);
		(void)usleep(10000);
		pager_job_free(j);
	}
	stop = true;
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
		(void)pthread_join(t[i], NULL);
	ck_assert_uint_eq(nr_wrong, 0);
	ck_assert_uint_le(most, 6 * e + window());
	rig_close(&R);
}
END_TEST

/* Writes while extents come and go under pressure: none is lost, and they do not count as room that can be made. */
START_TEST(test_writes_under_pressure)
{
	uint64_t e = extent(), nr = 16, page = (uint64_t)sysconf(_SC_PAGESIZE), seed = 9;
	cleanup_free uint64_t *shadow = calloc(nr * e / page, 8);

	tfile_make(&F, "pressure", nr * e, 123);
	rig_open(&R, _i, &F, 4 * e, 0);
	for (int i = 0; i < 600; i++) {
		uint64_t k = rnd(&seed) % (nr * e / page), off = k * page + 8;
		volatile uint64_t *p = (volatile uint64_t *)(R.base + off);

		if (*p != (shadow[k] ? shadow[k] : file_word(F.seed, off)))
			ck_abort_msg("page %llu", (unsigned long long)k);
		if (rnd(&seed) % 8 == 0)
			*p = shadow[k] = (uint64_t)i << 1 | 1;
	}
	for (uint64_t k = 0; k < nr * e / page; k++)
		if (*(volatile uint64_t *)(R.base + k * page + 8) !=
		    (shadow[k] ? shadow[k] : file_word(F.seed, k * page + 8)))
			ck_abort_msg("page %llu", (unsigned long long)k);
	check_bounds(R.pager, 4 * e);
	rig_close(&R);
}
END_TEST

/* What is used all the time stays, whatever streams by: no hot extent is dropped and read again in a loop.
 * Bites on: second chance (an armed extent that faults is not the next one to go). */
START_TEST(test_hot_extent_stays)
{
	struct tfile fh;
	struct rig h;
	uint64_t e = extent(), nr = 32;
	struct pager_stats st;

	tfile_make(&F, "cold", nr * e, 124);
	tfile_make(&fh, "hot", e, 125);
	rig_open(&R, _i, &F, 8 * e, 0);
	rig_add(&h, R.pager, &fh, 0);
	for (int pass = 0; pass < 3; pass++)
		for (uint64_t i = 0; i < nr; i++) {
			ck_assert_uint_eq(wrong_words(R.base + i * e, &F, i * e, e, 8192), 0);
			ck_assert_uint_eq(wrong_words(h.base, &fh, 0, e, 8192), 0);
		}
	view_stats(h.view, &st);
	/* 96 extents went by in 8 places; without a second chance it would be read a dozen times. */
	ck_assert_uint_le(st.read_bytes, 3 * e);
	rig_close(&h);
	rig_close(&R);
}
END_TEST

/* G12 without and with release calls: three models, room for less than two; dropped, never kept beyond the budget. */
START_TEST(test_pipeline_of_three_models)
{
	uint64_t e = extent(), budget = 12 * e;
	struct tfile f[3];
	struct rig r[3];
	struct pager *p = pager_of(_i, budget);
	struct pager_stats st;

	for (unsigned int i = 0; i < 3; i++) {
		char name[8];

		(void)snprintf(name, sizeof(name), "m%u", i);
		tfile_make(&f[i], name, 8 * e + 5000, 130 + i);
		rig_add(&r[i], p, &f[i], MiB);
	}
	for (int release = 0; release < 2; release++)
		for (unsigned int k = 0; k < 4; k++) {
			unsigned int i = k % 3;

			if (release || _i == V_USER) /* there, only a stage mark takes back */
				for (unsigned int q = 0; q < 3; q++)
					if (q != i) {
						view_drop(r[q].view);
						ck_assert_int_eq(pager_sync(p, 20000), 0);
					}
			rig_check(&r[i]);
			check_bounds(p, budget);
		}
	pager_stats(p, &st);
	ck_assert_uint_gt(st.reloads, 0);
	ck_assert_uint_eq(st.failed, 0);
	for (unsigned int i = 0; i < 3; i++)
		rig_close(&r[i]);
	pager_unref(p);
}
END_TEST

/* G13: twice through a model of twice the budget writes nothing to disk. */
START_TEST(test_nothing_is_written_to_disk)
{
	uint64_t e = extent(), before;

	tfile_make(&F, "nodisk", 16 * e, 135);
	rig_open(&R, _i, &F, 8 * e, e);
	before = proc_kib("/proc/self/io", "write_bytes:");
	for (int pass = 0; pass < 2; pass++)
		rig_check(&R);
	/* (Reading moves a time stamp of the file now and then: a block of its inode table.) */
	ck_assert_uint_le(proc_kib("/proc/self/io", "write_bytes:"), before + 64 * 1024);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ who goes first */

START_TEST(test_unneeded_goes_before_normal_and_pinned_never)
{
	uint64_t e = extent();
	struct tfile fp, fn, fu, fx;
	struct rig pin, normal, unneeded, x;
	struct pager_stats st;

	tfile_make(&fp, "pin", 4 * e, 140);
	tfile_make(&fn, "normal", 4 * e, 141);
	tfile_make(&fu, "unneeded", 4 * e, 142);
	tfile_make(&fx, "x", 4 * e, 143);
	rig_open(&pin, _i, &fp, 12 * e, 0);
	rig_add(&normal, pin.pager, &fn, 0);
	rig_add(&unneeded, pin.pager, &fu, 0);
	rig_add(&x, pin.pager, &fx, 0);
	view_set_class(pin.view, VIEW_PINNED);
	rig_check(&pin);
	rig_check(&unneeded);
	rig_check(&normal);
	rig_check(&normal);
	view_set_class(unneeded.view, VIEW_UNNEEDED);
	rig_check(&x); /* needs 4 extents */
	view_stats(unneeded.view, &st);
	ck_assert_uint_ge(st.dropped_bytes, 3 * e);
	view_stats(normal.view, &st);
	ck_assert_uint_le(st.dropped_bytes, e);
	view_stats(pin.view, &st);
	ck_assert_uint_eq(st.dropped_bytes, 0);
	ck_assert_uint_eq(st.resident_bytes, 4 * e);
	for (int i = 0; i < 3; i++) {
		rig_check(&unneeded);
		rig_check(&normal);
		rig_check(&x);
	}
	view_stats(pin.view, &st);
	ck_assert_uint_eq(st.dropped_bytes, 0);
	ck_assert_uint_eq(st.read_bytes, 4 * e);
	view_set_class(pin.view, VIEW_NORMAL); /* now it can go, as the oldest */
	view_set_class(unneeded.view, VIEW_NORMAL);
	for (int i = 0; i < 2; i++) {
		rig_check(&unneeded);
		rig_check(&normal);
		rig_check(&x);
	}
	view_stats(pin.view, &st);
	ck_assert_uint_gt(st.dropped_bytes, 0);
	rig_check(&pin);
	rig_close(&x);
	rig_close(&unneeded);
	rig_close(&normal);
	rig_close(&pin);
}
END_TEST

/* Full of what must stay: a populate ends with -ENOSPC. A touch has to go on: above the budget, or as an error with
 * its reason where there is no memory for that either. */
START_TEST(test_full_of_pinned)
{
	uint64_t e = extent();
	struct tfile fp;
	struct rig pin;
	struct pager_job *j;
	struct caught c;
	struct fault_reason why;

	catch_signals();
	tfile_make(&fp, "pinned", 8 * e, 144);
	tfile_make(&F, "noroom", 4 * e, 145);
	rig_open(&pin, _i, &fp, 8 * e, 0);
	rig_add(&R, pin.pager, &F, 0);
	view_set_class(pin.view, VIEW_PINNED);
	rig_check(&pin);
	for (int gentle = 0; gentle < 2; gentle++) {
		ck_assert_int_eq(pager_job_new(R.pager, &(struct job_range){ R.view, 0, R.size }, 1, gentle, &j), 0);
		ck_assert_int_eq(pager_job_wait(j, 20000), -ENOSPC);
		pager_job_free(j);
	}
	for (uint64_t off = 4096; off < R.size; off += e) {
		if (touch(R.base + off, NULL, &c)) {
			ck_assert_uint_eq(wrong_words(R.base + off, &F, off, e / 2, 8), 0);
			continue;
		}
		ck_assert_int_eq(c.sig, SIGBUS);
		ck_assert(pager_fault_reason(R.base + off, &why));
		ck_assert_int_eq(why.code, FAULT_NO_MEMORY);
	}
	rig_check(&pin);
	/* Room is made: as after any failure, populate first. */
	ck_assert_int_eq(pager_set_budget(R.pager, 16 * e), 0);
	ck_assert_int_eq(pager_job_new(R.pager, &(struct job_range){ R.view, 0, R.size }, 1, false, &j), 0);
	ck_assert_int_eq(pager_job_wait(j, 20000), 0);
	pager_job_free(j);
	rig_check(&R);
	rig_check(&pin);
	rig_close(&pin);
	rig_close(&R);
}
END_TEST

/* The arena's file system itself is full, by pinned weights far above the budget: ENOSPC is an error with a reason for
 * whoever touches, nothing else; what is in memory stays right.
 * Bites on: memory is allocated before an extent is filled, or else EFAULT of a read into a full tmpfs is told as that and
 * the half extent punched (either of the two is enough). */
START_TEST(test_arena_is_full)
{
	uint64_t e = extent(), nr = 8 + 64 + 16, failed = 0;
	struct caught c;
	struct fault_reason why;

	catch_signals();
	tfile_make(&F, "full", nr * e, 147);
	rig_open(&R, _i, &F, 8 * e, 0);
	view_set_class(R.view, VIEW_PINNED);
	for (uint64_t i = 0; i < nr; i++) {
		if (touch(R.base + i * e, NULL, &c)) {
			ck_assert_uint_eq(wrong_words(R.base + i * e, &F, i * e, e, 512), 0);
			continue;
		}
		failed++;
		ck_assert_int_eq(c.sig, SIGBUS);
		ck_assert(pager_fault_reason(R.base + i * e, &why));
		ck_assert_int_eq(why.code, FAULT_NO_MEMORY);
	}
	ck_assert_uint_gt(failed, 0);
	ck_assert_uint_le(arena_bytes(), (nr - failed) * e);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 8 * e, 512), 0);
	view_set_class(R.view, VIEW_NORMAL);
	rig_drop(&R);
	for (uint64_t i = 0; i < nr; i++) {
		struct pager_job *j;

		ck_assert_int_eq(pager_job_new(R.pager, &(struct job_range){ R.view, i * e, e }, 1, false, &j), 0);
		ck_assert_int_eq(pager_job_wait(j, 20000), 0);
		pager_job_free(j);
		ck_assert_uint_eq(wrong_words(R.base + i * e, &F, i * e, e, 512), 0);
	}
	rig_close(&R);
}
END_TEST

/* A smaller budget is reached by dropping, soon after the call; a larger one gives room. */
START_TEST(test_budget_moves)
{
	uint64_t e = extent();

	tfile_make(&F, "moves", 16 * e, 146);
	rig_open(&R, _i, &F, 16 * e, 0);
	rig_check(&R);
	ck_assert_uint_eq(resident(R.pager), 16 * e);
	ck_assert_int_eq(pager_set_budget(R.pager, 4 * e), 0);
	for (uint64_t end = now_ms() + 10000; resident(R.pager) > 4 * e && now_ms() < end;)
		(void)usleep(1000);
	ck_assert_uint_le(resident(R.pager), 4 * e);
	ck_assert_uint_le(arena_bytes(), 4 * e + MiB);
	rig_check(&R);
	ck_assert_int_eq(pager_set_budget(R.pager, 64 * e), 0); /* more than at the start */
	rig_check(&R);
	rig_check(&R);
	ck_assert_uint_eq(resident(R.pager), 16 * e);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ memory cgroups */

#define CGROUP_BYTES (96 * MiB)
static char cgroup[128];

static int write_text(const char *dir, const char *file, const char *text)
{
	char path[256];
	cleanup_close int fd = -1;

	(void)snprintf(path, sizeof(path), "%s/%s", dir, file);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	return fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) ? 0 : -errno;
}

static void cgroup_make(void)
{
	char text[32];

	(void)snprintf(cgroup, sizeof(cgroup), "/sys/fs/cgroup/memory/wd-test-%d", (int)getpid());
	if (mkdir(cgroup, 0700) < 0)
		abort();
	(void)snprintf(text, sizeof(text), "%llu", (unsigned long long)CGROUP_BYTES);
	if (write_text(cgroup, "memory.limit_in_bytes", text) < 0)
		abort();
}

/* In the parent of the forked test, whatever became of it. */
static void cgroup_remove(void)
{
	for (int i = 0; i < 1000 && rmdir(cgroup) < 0 && errno == EBUSY; i++) {
		(void)write_text(cgroup, "memory.force_empty", "0");
		(void)usleep(2000);
	}
}

static int in_cgroup(void *arg)
{
	int variant = *(int *)arg;
	char text[16];
	struct pager *p;
	struct wd_err err = { "" };
	struct pager_stats st;

	(void)snprintf(text, sizeof(text), "%d", (int)getpid());
	if (write_text(cgroup, "cgroup.procs", text) < 0)
		return 1;
	if (pager_try(variant, 0, &p, &err) < 0) { /* automatic budget */
		fprintf(stderr, "%s\n", err.text);
		return 2;
	}
	pager_stats(p, &st);
	if (variant != V_MMAP && st.budget_bytes >= CGROUP_BYTES) {
		fprintf(stderr, "the budget is %llu MiB in a cgroup of %llu\n",
			(unsigned long long)(st.budget_bytes / MiB), (unsigned long long)(CGROUP_BYTES / MiB));
		return 3;
	}
	if (view_try(p, &F, MiB, &R.source, &R.view, &err) < 0) {
		fprintf(stderr, "%s\n", err.text);
		return 4;
	}
	for (int pass = 0; pass < 2; pass++)
		if (wrong_words(view_base(R.view), &F, 0, F.size, 512))
			return 5;
	pager_stats(p, &st);
	if (variant != V_MMAP && st.peak_bytes >= CGROUP_BYTES)
		return 6;
	view_unref(R.view);
	source_unref(R.source);
	pager_unref(p);
	return 0;
}

/* A model of twice the cgroup's limit is read from end to end, twice, and nobody is killed.
 * Bites on: the automatic budget by the cgroup's limit. */
START_TEST(test_larger_than_the_cgroup)
{
	tfile_make(&F, "cgroup", 2 * CGROUP_BYTES, 150);
	ck_assert_int_eq(in_child(in_cgroup, &_i), 0);
}
END_TEST

/* G07: one tensor at a time, converted and released; only tensor 7 is kept. */
START_TEST(test_converting_one_by_one)
{
	uint64_t e = extent(), unit = 2 * e, nr = 16;
	struct pager_stats st;

	tfile_make(&F, "convert", nr * unit, 151);
	rig_open(&R, _i, &F, 64 * e, unit);
	for (uint64_t i = 0; i < nr; i++) {
		ck_assert_uint_eq(wrong_words(R.base + i * unit, &F, i * unit, unit, 64), 0);
		if (i != 7)
			ck_assert_int_eq(view_drop_units(R.view, (size_t)i, 1), 0);
		ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	}
	pager_stats(R.pager, &st);
	ck_assert_uint_le(st.peak_bytes, 2 * unit + 16 * e); /* tensors in use and what is read ahead */
	(void)view_drop_units(R.view, 0, 7);
	(void)view_drop_units(R.view, 8, nr - 8);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	ck_assert_uint_eq(resident(R.pager), unit);
	ck_assert_uint_eq(wrong_words(R.base + 7 * unit, &F, 7 * unit, unit, 8), 0);
	rig_close(&R);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("budget");
	double soak = (double)soak_ms(0) / 1000;
	struct statfs fs;
	TCase *tc;

	tc = new_case(s, "larger", 60 + soak);
	add_variants(tc, test_file_larger_than_the_budget, EMBEDDED);
	add_variants(tc, test_unit_larger_than_the_budget, EMBEDDED);
	add_variants(tc, test_storm_over_the_budget, EMBEDDED);
	add_variants(tc, test_writes_under_pressure, EMBEDDED);
	add_variants(tc, test_nothing_is_written_to_disk, EMBEDDED);
	add_variants(tc, test_converting_one_by_one, PAGED);

	tc = new_case(s, "order", 60);
	add_variants(tc, test_hot_extent_stays, EMBEDDED);
	add_variants(tc, test_unneeded_goes_before_normal_and_pinned_never, EMBEDDED);
	add_variants(tc, test_full_of_pinned, PAGED);
	add_variants(tc, test_arena_is_full, 1u << V_TMPFS);
	add_variants(tc, test_budget_moves, EMBEDDED);
	add_variants(tc, test_pipeline_of_three_models, PAGED);

	tc = new_case(s, "cgroup", 60);
	if (geteuid() == 0 && statfs("/sys/fs/cgroup/memory", &fs) == 0 &&
	    access("/sys/fs/cgroup/memory/cgroup.procs", W_OK) == 0) {
		tcase_add_unchecked_fixture(tc, cgroup_make, cgroup_remove);
		add_variants(tc, test_larger_than_the_cgroup, EMBEDDED | 1u << V_MMAP);
	} else {
		skip("test_larger_than_the_cgroup", "no memory controller (cgroup v1) that can be written");
	}
	return run_suite(s);
}
