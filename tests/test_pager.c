/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pager by its interface: opening, reading, sharing, dropping, populating, counting, and the ways to run.
 * Races are in test_races.c, forks in test_fork.c, errors in test_faults.c, budgets in test_budget.c.
 */
#include "tests/pager_util.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>

#define SIZE (16 * MiB + 5000)

static void counted(void)
{
	source_hook = hook_count;
}

/* ------------------------------------------------------------------ what this machine gives */

START_TEST(test_caps_are_sane)
{
	struct pager_caps caps;
	enum way way;

	pager_caps_probe(&caps, test_path("."));
	way = pager_caps_way(&caps);
	ck_assert_uint_eq(caps.page_bytes, (uint64_t)sysconf(_SC_PAGESIZE));
	ck_assert_uint_ge(caps.extent_bytes, caps.page_bytes);
	ck_assert_uint_le(caps.extent_bytes, 2 * MiB);
	ck_assert_uint_eq(caps.extent_bytes & (caps.extent_bytes - 1), 0);
	ck_assert_uint_gt(caps.max_map_count, 0);
	ck_assert(way == WAY_EMBEDDED || way == WAY_USER || way == WAY_MMAP);
	if (caps.dev_userfaultfd && caps.sys_userfaultfd)
		ck_assert_int_ne(way, WAY_EMBEDDED);
	if (caps.dev_userfaultfd && caps.sys_userfaultfd && caps.user_userfaultfd)
		ck_assert_int_eq(way, WAY_MMAP);
	/* Asked twice, it says the same and leaves nothing behind. */
	{
		struct pager_caps again;
		unsigned int fds = count_fds();

		memset(&again, 0, sizeof(again));
		pager_caps_probe(&again, test_path("."));
		ck_assert_int_eq(pager_caps_way(&again), way);
		ck_assert_uint_eq(count_fds(), fds);
	}
}
END_TEST

START_TEST(test_pager_takes_the_way_asked_for)
{
	static const enum way ways[NR_VARIANTS] = { WAY_EMBEDDED, WAY_EMBEDDED, WAY_EMBEDDED, WAY_USER, WAY_MMAP };
	struct pager *p = pager_of(_i, 64 * MiB);

	ck_assert_int_eq(pager_way(p), ways[_i]);
	ck_assert(!pager_is_forked(p));
	ck_assert_ptr_null(pager_unref(p));
	ck_assert_ptr_null(pager_unref(NULL));
}
END_TEST

/* ------------------------------------------------------------------ reading */

START_TEST(test_every_byte_is_right)
{
	struct tfile f;
	struct rig r;
	uint64_t seed = 7;

	tfile_make(&f, "every", SIZE, 11);
	rig_open(&r, _i, &f, 256 * MiB, 3 * MiB);
	ck_assert_uint_eq((uintptr_t)r.base % 64, 0);
	for (int i = 0; i < 2000; i++) { /* at random, then all */
		uint64_t off = rnd(&seed) % (r.size - 8);

		ck_assert_uint_eq(wrong_words(r.base + off, &f, off, 16 > r.size - off ? 0 : 16, 8), 0);
	}
	rig_check(&r);
	ck_assert_ptr_eq(view_source(r.view), r.source);
	rig_close(&r);
}
END_TEST

/* What lies between the end of the file and the end of its page is zero, as with mmap(2).
 * Bites on: the lengths of direct reads at the end (rounded up to the file's alignment, checked against what is there); an
 * extent is a hole before it is filled (a direct read writes up to its block's border and no further). */
START_TEST(test_tails_of_every_size)
{
	static const uint64_t sizes[] = { 1,
					  7,
					  511,
					  512,
					  513,
					  4095,
					  4096,
					  4097,
					  MiB + 1,
					  MiB + 511,
					  MiB + 512,
					  2 * MiB - 1,
					  2 * MiB,
					  2 * MiB + 1,
					  2 * MiB + 5000,
					  4 * MiB + 512,
					  4 * MiB + 4096 };

	for (size_t i = 0; i < ARRAY_SIZE(sizes); i++) {
		struct tfile f;
		struct rig r;
		uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

		tfile_make(&f, "tail", sizes[i], 100 + i);
		rig_open(&r, _i, &f, 64 * MiB, 0);
		ck_assert_msg(wrong_words(r.base, &f, 0, f.size, 8) == 0, "size %llu", (unsigned long long)f.size);
		for (uint64_t o = f.size; o < round_up(f.size, page); o++)
			if (r.base[o])
				ck_abort_msg("size %llu: byte %llu behind the end is not zero",
					     (unsigned long long)f.size, (unsigned long long)(o - f.size));
		if (rig_drop(&r) == 0 || _i == V_MMAP)
			rig_check(&r);
		rig_close(&r);
	}
}
END_TEST

/* Only what the touched unit overlaps is read (and each byte once), and stats say what the hook saw. */
START_TEST(test_touch_reads_one_unit)
{
	struct tfile f;
	struct rig r;
	struct pager_stats st, vst;
	uint64_t unit = 3 * MiB, e = extent();

	counted();
	tfile_make(&f, "unit", SIZE, 12);
	rig_open(&r, _i, &f, 256 * MiB, unit);
	pager_stats(r.pager, &st);
	ck_assert_uint_eq(st.read_bytes, 0);
	ck_assert_uint_eq(hook_counts.bytes, 0);
	ck_assert_uint_eq(wrong_words(r.base + unit + 4096, &f, unit + 4096, 8, 8), 0); /* unit 1: [3, 6) MiB */
	for (uint64_t end = now_ms() + 10000; now_ms() < end;) { /* its other extents follow by themselves */
		pager_stats(r.pager, &st);
		if (st.read_bytes >= round_up(2 * unit, e) - round_down(unit, e))
			break;
		(void)usleep(1000);
	}
	ck_assert_int_eq(pager_sync(r.pager, 20000), 0);
	pager_stats(r.pager, &st);
	view_stats(r.view, &vst);
	ck_assert_uint_eq(st.read_bytes, round_up(2 * unit, e) - round_down(unit, e));
	ck_assert_uint_eq(hook_counts.bytes, st.read_bytes);
	ck_assert_uint_eq(vst.read_bytes, st.read_bytes);
	ck_assert_uint_eq(st.resident_bytes, st.read_bytes);
	ck_assert_uint_ge(st.peak_bytes, st.resident_bytes);
	ck_assert_uint_ge(st.faults, 1);
	ck_assert_uint_eq(st.budget_bytes, 256 * MiB);
	ck_assert_uint_eq(st.dropped_bytes + st.reloads + st.reload_bytes + st.failed + st.written_bytes, 0);

	rig_check(&r);
	pager_stats(r.pager, &st);
	ck_assert_uint_eq(hook_counts.bytes, SIZE);
	ck_assert_uint_eq(st.read_bytes, SIZE);
	ck_assert_uint_ge(st.reads, 1);
	ck_assert_uint_le(st.reads, hook_counts.reads);
	ck_assert_uint_eq(st.reload_bytes, 0);
	rig_close(&r);
}
END_TEST

/* A view without units, with empty ones, with overlapping ones, with one over all. */
START_TEST(test_units_of_every_kind)
{
	static const struct unit kinds[][4] = {
		{ { 0, 0 }, { 0, 5 * MiB }, { 4 * MiB, 2 * MiB }, { 6 * MiB, 0 } },
		{ { MiB, 10 }, { MiB + 3, 3 * MiB }, { MiB + 4, 1 }, { SIZE, 0 } },
		{ { 0, SIZE }, { SIZE - 1, 1 }, { SIZE - 1, 1 }, { SIZE - 1, 1 } },
	};
	struct tfile f;

	tfile_make(&f, "kinds", SIZE, 13);
	for (size_t k = 0; k <= ARRAY_SIZE(kinds); k++) {
		struct pager *p = pager_of(_i, 256 * MiB);
		struct source *s;
		struct segment seg = { 0, 0, SIZE };
		struct view_layout layout = { .segs = &seg, .nr_segs = 1 };
		struct view *v;
		struct wd_err err = { "" };

		if (k < ARRAY_SIZE(kinds)) {
			layout.units = kinds[k];
			layout.nr_units = ARRAY_SIZE(kinds[k]);
		}
		ck_assert_int_eq(source_open(f.path, &s, &err), 0);
		ck_assert_msg(view_open(p, s, &layout, &v, &err) == 0, "%s", err.text);
		source_unref(s);
		ck_assert_uint_eq(wrong_words(view_base(v) + 5 * MiB, &f, 5 * MiB, 4096, 8), 0);
		ck_assert_uint_eq(wrong_words(view_base(v), &f, 0, SIZE, 8), 0);
		if (layout.nr_units) {
			ck_assert_int_eq(view_drop_units(v, 0, layout.nr_units), 0);
			ck_assert_int_eq(pager_sync(p, 20000), 0);
		}
		ck_assert_uint_eq(wrong_words(view_base(v), &f, 0, SIZE, 8), 0);
		view_unref(v);
		pager_unref(p);
	}
}
END_TEST

/* Data that is misaligned in the file: the whole file shifted, and parts of it copied to aligned places. */
START_TEST(test_shifted_and_copied_segments)
{
	static const uint64_t shifts[] = { 0, 1, 8, 24, 63 };
	struct tfile f;
	uint64_t e = extent();

	tfile_make(&f, "shift", 6 * MiB + 123, 14);
	for (size_t i = 0; i < ARRAY_SIZE(shifts); i++) {
		struct pager *p = pager_of(_i, 256 * MiB);
		uint64_t end = round_up(f.size + shifts[i], e);
		struct segment segs[] = {
			{ shifts[i], 0, f.size },
			{ end, 12345, 3 * MiB },                          /* odd place, over an extent's border */
			{ round_up(end + 3 * MiB, 64) + 64, 4097, 1000 }, /* in the same extent as the one before */
			{ round_up(end + 4 * MiB, e), f.size - 3, 3 },
		};
		struct unit units[] = { { segs[0].arena_off, 2 * MiB },
					{ segs[0].arena_off + 2 * MiB, f.size - 2 * MiB },
					{ segs[1].arena_off, segs[1].len },
					{ segs[2].arena_off, segs[2].len },
					{ segs[3].arena_off, segs[3].len } };
		struct view_layout layout = { segs, ARRAY_SIZE(segs), units, ARRAY_SIZE(units) };
		struct source *s;
		struct view *v;
		struct wd_err err = { "" };

		ck_assert_int_eq(source_open(f.path, &s, &err), 0);
		ck_assert_msg(view_open(p, s, &layout, &v, &err) == 0, "%s", err.text);
		for (int pass = 0; pass < 2; pass++) {
			for (size_t k = ARRAY_SIZE(segs); k-- > 0;)
				for (uint64_t j = 0; j < segs[k].len; j += k ? 1 : 1021) {
					uint64_t o = segs[k].file_off + j;
					uint64_t w = file_word(f.seed, round_down(o, 8));
					unsigned char want = (unsigned char)(w >> (o % 8 * 8));

					if (view_base(v)[segs[k].arena_off + j] != want)
						ck_abort_msg("shift %llu segment %zu byte %llu",
							     (unsigned long long)shifts[i], k, (unsigned long long)j);
				}
			ck_assert_int_eq(view_drop(v), 0);
			ck_assert_int_eq(pager_sync(p, 20000), 0);
		}
		view_unref(v);
		source_unref(s);
		pager_unref(p);
	}
}
END_TEST

/* ------------------------------------------------------------------ several views */

START_TEST(test_two_views_do_not_mix)
{
	struct tfile fa, fb;
	struct rig a, b;

	tfile_make(&fa, "a", SIZE, 21);
	tfile_make(&fb, "b", 7 * MiB, 22);
	rig_open(&a, _i, &fa, 256 * MiB, MiB);
	rig_add(&b, a.pager, &fb, 0);
	for (uint64_t o = 0; o < fb.size; o += MiB / 2) {
		ck_assert_uint_eq(wrong_words(a.base + o, &fa, o, 64, 8), 0);
		ck_assert_uint_eq(wrong_words(b.base + o, &fb, o, 64, 8), 0);
	}
	ck_assert_int_eq(view_drop(b.view), 0);
	ck_assert_int_eq(pager_sync(b.pager, 20000), 0);
	rig_check(&a);
	rig_check(&b);
	view_set_owner(a.view, &fa);
	view_set_owner(b.view, &fb);
	ck_assert_ptr_eq(view_owner(a.view), &fa);
	ck_assert_ptr_eq(view_owner(b.view), &fb);
	rig_close(&a);
	rig_check(&b);
	rig_close(&b);
}
END_TEST

/* G10 in one process: the same file by path, hard link and symbolic link is one view, read once. */
START_TEST(test_views_are_shared_by_identity)
{
	struct tfile f, hard, soft;
	struct rig a, b, c;
	uint64_t before;

	counted();
	tfile_make(&f, "shared", SIZE, 23);
	hard = soft = f;
	(void)snprintf(hard.path, sizeof(hard.path), "%s", test_path("hard"));
	(void)snprintf(soft.path, sizeof(soft.path), "%s", test_path("soft"));
	(void)unlink(hard.path);
	(void)unlink(soft.path);
	ck_assert_int_eq(link(f.path, hard.path), 0);
	ck_assert_int_eq(symlink("shared", soft.path), 0);

	rig_open(&a, _i, &f, 256 * MiB, MiB);
	rig_add(&b, a.pager, &hard, MiB);
	rig_add(&c, a.pager, &soft, MiB);
	ck_assert_ptr_eq(a.view, b.view);
	ck_assert_ptr_eq(a.view, c.view);
	rig_check(&a);
	before = hook_counts.bytes;
	rig_check(&b);
	rig_check(&c);
	ck_assert_uint_eq(hook_counts.bytes, before);
	rig_close(&a);
	rig_close(&c);
	rig_check(&b); /* the others' end did not take it away */
	ck_assert_uint_eq(hook_counts.bytes, before);
	/* A link made meanwhile moves ctime only: old and new openers have the right bytes, nobody is disturbed. */
	(void)unlink(test_path("hard2"));
	ck_assert_int_eq(link(f.path, test_path("hard2")), 0);
	rig_add(&a, b.pager, &f, MiB);
	rig_drop(&b);
	rig_check(&a);
	rig_check(&b);
	rig_close(&a);
	rig_close(&b);
}
END_TEST

START_TEST(test_other_segments_are_another_view)
{
	struct tfile f;
	struct rig a;
	struct view *v;
	struct segment seg = { 8, 0, SIZE };
	struct view_layout layout = { &seg, 1, NULL, 0 };
	struct wd_err err = { "" };

	tfile_make(&f, "segs", SIZE, 24);
	rig_open(&a, _i, &f, 256 * MiB, 0);
	ck_assert_msg(view_open(a.pager, a.source, &layout, &v, &err) == 0, "%s", err.text);
	ck_assert_ptr_ne(v, a.view);
	ck_assert_uint_eq(wrong_words(view_base(v) + 8, &f, 0, SIZE, 8), 0);
	rig_check(&a);
	view_unref(v);
	rig_close(&a);
}
END_TEST

/* ------------------------------------------------------------------ dropping */

/* G12: dropped memory is physically free, although addresses stay; the bytes come back, counted as read again. */
START_TEST(test_dropped_is_free_and_comes_back)
{
	struct tfile f;
	struct rig r;
	struct pager_stats st;
	uint64_t empty;

	counted();
	tfile_make(&f, "drop", SIZE, 31);
	rig_open(&r, _i, &f, 256 * MiB, MiB);
	empty = arena_bytes();
	rig_check(&r);
	ck_assert_uint_ge(arena_bytes() - empty, SIZE);
	ck_assert_uint_eq(rig_drop(&r), 0);
	ck_assert_uint_le(arena_bytes(), empty + 64 * KiB);
	pager_stats(r.pager, &st);
	ck_assert_uint_ge(st.dropped_bytes, SIZE);
	ck_assert_uint_eq(st.reloads, 0);
	rig_check(&r);
	pager_stats(r.pager, &st);
	ck_assert_uint_eq(st.read_bytes, 2 * (uint64_t)SIZE);
	ck_assert_uint_eq(st.read_bytes, hook_counts.bytes);
	ck_assert_uint_ge(st.reload_bytes, SIZE);
	ck_assert_uint_le(st.reload_bytes, round_up(SIZE, extent()));
	ck_assert_uint_eq(st.reloads, 1);
	ck_assert_uint_ge(st.peak_bytes, SIZE);
	rig_close(&r);
	ck_assert_uint_le(arena_bytes(), empty);
}
END_TEST

/* G11 and I4 without threads: a write stays here, is never dropped, and never reaches the file. */
START_TEST(test_writes_stay)
{
	struct tfile f;
	struct rig r;
	struct pager_stats st;
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), e = extent();
	const uint64_t at[] = { 0, e - 1, e + 5 * page + 17, 3 * e, SIZE - 1 };
	cleanup_close int fd = -1;
	unsigned char byte;

	tfile_make(&f, "writes", SIZE, 32);
	rig_open(&r, _i, &f, 256 * MiB, MiB);
	/* the first touch of some of them is the write itself */
	for (size_t i = 0; i < ARRAY_SIZE(at); i++)
		r.base[at[i]] = (unsigned char)(0xA0 + i);
	pager_stats(r.pager, &st);
	if (_i != V_MMAP) {
		ck_assert_uint_ge(st.written_bytes, ARRAY_SIZE(at) * page);
		ck_assert_uint_le(st.written_bytes, ARRAY_SIZE(at) * e);
	}
	for (int pass = 0; pass < 3; pass++) {
		if (pass == 1) {
			rig_drop(&r);
		} else if (pass == 2) {
			pager_observe_begin(r.pager);
			pager_observe_drop(r.pager);
			ck_assert_int_eq(view_drop_units(r.view, 0, (SIZE + MiB - 1) / MiB), 0);
			ck_assert_int_eq(pager_sync(r.pager, 20000), 0);
		}
		for (size_t i = 0; i < ARRAY_SIZE(at); i++)
			ck_assert_uint_eq(r.base[at[i]], 0xA0 + i);
		/* all other words, also in the written pages */
		for (uint64_t o = 0; o + 8 <= SIZE; o += 8) {
			uint64_t w;
			bool mine = false;

			for (size_t i = 0; i < ARRAY_SIZE(at); i++)
				mine |= at[i] >= o && at[i] < o + 8;
			memcpy(&w, r.base + o, 8);
			if (!mine && w != file_word(f.seed, o))
				ck_abort_msg("offset %llu is wrong", (unsigned long long)o);
		}
	}
	rig_close(&r);
	fd = open(f.path, O_RDONLY);
	ck_assert_int_eq(pread(fd, &byte, 1, 0), 1);
	ck_assert_uint_eq(byte, (unsigned char)file_word(f.seed, 0));
}
END_TEST

/* A unit's extents stay while another unit in use lies in them. */
START_TEST(test_dropping_units_keeps_their_neighbours)
{
	struct tfile f;
	struct rig r;
	uint64_t e = extent(), unit = e + e / 2, before; /* units 0 and 1 share extent 1 */

	counted();
	tfile_make(&f, "neighbours", 6 * e, 33);
	rig_open(&r, _i, &f, 256 * MiB, unit);
	ck_assert_uint_eq(wrong_words(r.base, &f, 0, 2 * unit, 4096), 0); /* units 0, 1: extents 0 to 2 */
	ck_assert_uint_eq(resident(r.pager), 3 * e);
	ck_assert_int_eq(view_drop_units(r.view, 0, 1), 0);
	ck_assert_int_eq(pager_sync(r.pager, 20000), 0);
	ck_assert_uint_eq(resident(r.pager), 2 * e); /* extent 0 went, 1 is unit 1's as well */
	before = hook_counts.bytes;
	ck_assert_uint_eq(wrong_words(r.base + unit, &f, unit, unit, 8), 0);
	ck_assert_uint_eq(hook_counts.bytes, before);
	ck_assert_int_eq(view_drop_units(r.view, 1, 1), 0);
	ck_assert_int_eq(pager_sync(r.pager, 20000), 0);
	ck_assert_uint_eq(resident(r.pager), 0);
	rig_check(&r);
	rig_close(&r);
}
END_TEST

/* Observing: what was touched since observe_begin() stays, the rest goes; what is pinned stays. */
START_TEST(test_observed_drop_keeps_what_was_touched)
{
	struct tfile fa, fb, fc;
	struct rig a, b, c;
	uint64_t e = extent(), before;

	counted();
	tfile_make(&fa, "oa", 8 * e, 34);
	tfile_make(&fb, "ob", 4 * e, 35);
	tfile_make(&fc, "oc", 4 * e, 36);
	rig_open(&a, _i, &fa, 256 * MiB, e);
	rig_add(&b, a.pager, &fb, e);
	rig_add(&c, a.pager, &fc, e);
	view_set_class(c.view, VIEW_PINNED);
	rig_check(&a);
	rig_check(&b);
	rig_check(&c);
	ck_assert_uint_eq(resident(a.pager), 16 * e);
	pager_observe_begin(a.pager);
	ck_assert_int_eq(pager_sync(a.pager, 20000), 0);
	ck_assert_uint_eq(wrong_words(a.base + 2 * e, &fa, 2 * e, 3 * e, 65536), 0);
	pager_observe_drop(a.pager);
	ck_assert_int_eq(pager_sync(a.pager, 20000), 0);
	/* Extents 2 to 4 were touched; c is pinned. */
	ck_assert_uint_eq(resident(a.pager), 7 * e);
	before = hook_counts.bytes;
	ck_assert_uint_eq(wrong_words(a.base + 2 * e, &fa, 2 * e, 3 * e, 8), 0);
	rig_check(&c);
	ck_assert_uint_eq(hook_counts.bytes, before);
	rig_check(&a);
	rig_check(&b);
	rig_close(&c);
	rig_close(&b);
	rig_close(&a);
}
END_TEST

/* ------------------------------------------------------------------ populate */

static sem_t hook_reached, hook_go;

static int64_t hook_gate(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	(void)direct;
	(void)sem_post(&hook_reached);
	while (sem_wait(&hook_go) < 0)
		;
	(void)sem_post(&hook_go); /* once open, it stays so */
	return hook_pread(s, buf, nbytes, offset);
}

static void gated(void)
{
	(void)sem_init(&hook_reached, 0, 0);
	(void)sem_init(&hook_go, 0, 0);
	source_hook = hook_gate;
}

START_TEST(test_populate_reads_ahead)
{
	struct tfile f;
	struct rig r;
	struct pager_job *j;
	uint64_t done, total;
	int state;

	counted();
	tfile_make(&f, "ahead", SIZE, 41);
	rig_open(&r, _i, &f, 256 * MiB, MiB);
	ck_assert_int_eq(pager_job_new(r.pager, &(struct job_range){ r.view, 0, SIZE }, 1, false, &j), 0);
	{
		struct pollfd p = { pager_job_fd(j), POLLIN, 0 };

		ck_assert_int_eq(poll(&p, 1, 20000), 1);
		ck_assert(p.revents & POLLIN);
	}
	ck_assert_int_eq(pager_job_wait(j, 0), 0);
	pager_job_progress(j, &done, &total, &state);
	ck_assert_int_eq(state, 1);
	ck_assert_uint_eq(done, total);
	ck_assert_uint_ge(total, SIZE);
	if (_i != V_MMAP) {
		struct pager_stats st;
		cleanup_close int fd = open(test_path("copy"), O_RDWR | O_CREAT | O_TRUNC, 0600);

		ck_assert_uint_eq(hook_counts.bytes, SIZE);
		/* Fit for system calls, in every way, without a fault. */
		ck_assert_int_eq(write(fd, r.base, SIZE), SIZE);
		pager_stats(r.pager, &st);
		ck_assert_uint_eq(st.faults, 0);
		ck_assert_uint_eq(st.read_bytes, SIZE);
	}
	rig_check(&r);
	ck_assert_ptr_null(pager_job_free(j));
	ck_assert_ptr_null(pager_job_free(NULL));
	/* Nothing to do is done at once. */
	ck_assert_int_eq(pager_job_new(r.pager, NULL, 0, false, &j), 0);
	ck_assert_int_eq(pager_job_wait(j, 20000), 0);
	pager_job_free(j);
	ck_assert_int_eq(pager_job_new(r.pager, &(struct job_range){ r.view, 0, SIZE }, 1, false, &j), 0);
	ck_assert_int_eq(pager_job_wait(j, 20000), 0);
	pager_job_free(j);
	rig_close(&r);
}
END_TEST

START_TEST(test_populate_waits_and_is_cancelled)
{
	struct tfile f;
	struct rig r;
	struct pager_job *j;
	uint64_t done, total;
	int state;

	gated();
	tfile_make(&f, "cancel", SIZE, 42);
	rig_open(&r, _i, &f, 256 * MiB, MiB);
	ck_assert_int_eq(pager_job_new(r.pager, &(struct job_range){ r.view, 0, SIZE }, 1, false, &j), 0);
	must_wait(&hook_reached);
	ck_assert_int_eq(pager_job_wait(j, 0), -ETIMEDOUT);
	ck_assert_int_eq(pager_job_wait(j, 10), -ETIMEDOUT);
	pager_job_progress(j, &done, &total, &state);
	ck_assert_int_eq(state, 0);
	ck_assert_uint_lt(done, total);
	pager_job_cancel(j);
	pager_job_cancel(j);
	(void)sem_post(&hook_go);
	ck_assert_int_eq(pager_job_wait(j, 20000), -ECANCELED);
	pager_job_progress(j, &done, &total, &state);
	ck_assert_int_eq(state, -ECANCELED);
	pager_job_free(j);
	rig_check(&r); /* what was under way ended well */
	rig_close(&r);
}
END_TEST

/* Closing with reads in flight: by a job that is freed, by a job that goes on, with a toucher elsewhere. */
static void *closer(void *arg)
{
	rig_close(arg);
	return NULL;
}

START_TEST(test_closing_waits_for_reads_in_flight)
{
	struct tfile f, fb;
	struct rig r, b;
	struct pager_job *j;
	pthread_t t;
	unsigned int fds = count_fds(), threads = count_threads();

	gated();
	tfile_make(&f, "closing", SIZE, 43);
	tfile_make(&fb, "closing-b", 4 * MiB, 44);
	rig_open(&r, _i, &f, 256 * MiB, MiB);
	rig_add(&b, r.pager, &fb, 0);
	ck_assert_int_eq(pager_job_new(r.pager, &(struct job_range){ r.view, 0, SIZE }, 1, false, &j), 0);
	must_wait(&hook_reached);
	if (_i % 2)
		j = pager_job_free(j);
	ck_assert_int_eq(pthread_create(&t, NULL, closer, &r), 0);
	(void)sem_post(&hook_go);
	ck_assert_int_eq(pthread_join(t, NULL), 0);
	pager_job_free(j);
	rig_check(&b);
	rig_close(&b);
	ck_assert_uint_eq(count_fds(), fds);
	ck_assert_uint_eq(count_threads(), threads);
}
END_TEST

/* Demand goes before what is read ahead. */
START_TEST(test_demand_goes_before_populate)
{
	struct tfile f;
	struct rig r;
	struct pager_job *j;
	uint64_t done, total;
	int state;

	counted();
	tfile_make(&f, "demand", 64 * MiB, 45);
	rig_open(&r, _i, &f, 256 * MiB, MiB);
	ck_assert_int_eq(pager_job_new(r.pager, &(struct job_range){ r.view, 0, f.size }, 1, false, &j), 0);
	ck_assert_uint_eq(wrong_words(r.base + 60 * MiB, &f, 60 * MiB, 4096, 8), 0);
	pager_job_progress(j, &done, &total, &state);
	ck_assert_int_ge(state, 0);
	ck_assert_int_eq(pager_job_wait(j, 20000), 0);
	rig_check(&r);
	ck_assert_uint_eq(hook_counts.bytes, f.size); /* nothing was read twice */
	pager_job_free(j);
	rig_close(&r);
}
END_TEST

/* ------------------------------------------------------------------ system calls on views */

/* Kernel-mode faults: write(2), pwrite(2), process memory through /proc; with user-mode faults only EFAULT. */
START_TEST(test_system_calls_touch_views)
{
	struct tfile f;
	struct rig r;
	cleanup_close int fd = open(test_path("syscalls"), O_RDWR | O_CREAT | O_TRUNC, 0600);
	cleanup_free unsigned char *buf = malloc(SIZE);
	ssize_t n;

	tfile_make(&f, "calls", SIZE, 46);
	rig_open(&r, _i, &f, 256 * MiB, MiB);
	n = write(fd, r.base, SIZE);
	if (_i == V_USER) {
		ck_assert_int_eq(n, -1);
		ck_assert_int_eq(errno, EFAULT);
		rig_check(&r);
		n = write(fd, r.base, SIZE);
	}
	ck_assert_int_eq(n, SIZE);
	ck_assert_int_eq(pread(fd, buf, SIZE, 0), SIZE);
	ck_assert_uint_eq(wrong_words(buf, &f, 0, SIZE, 8), 0);
	/* read(2) into it makes private copies, as any write does */
	ck_assert_int_eq(pread(fd, r.base + 4096, 8192, 0), 8192);
	ck_assert_uint_eq(wrong_words(r.base + 4096, &f, 0, 8192, 8), 0);
	rig_drop(&r);
	ck_assert_uint_eq(wrong_words(r.base + 4096, &f, 0, 8192, 8), 0);
	ck_assert_uint_eq(wrong_words(r.base + 12288, &f, 12288, SIZE - 12288, 8), 0);
	rig_close(&r);
}
END_TEST

/* ------------------------------------------------------------------ G06: a file larger than memory */

struct sparse {
	int variant;
	const char *path;
	bool strict; /* overcommit_memory=2 */
	struct tfile tail;
	uint64_t size;
};

static int64_t hook_fails(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	(void)s, (void)buf, (void)nbytes, (void)offset, (void)direct;
	return -EIO;
}

static int sparse_child(void *arg)
{
	struct sparse *sp = arg;
	struct pager *p;
	struct source *s;
	struct view *v;
	struct wd_err err = { "" };
	uint64_t tail = sp->size - sp->tail.size, rise = UINT64_MAX;
	struct segment seg = { 0, 0, sp->size };
	struct unit units[] = { { 0, tail }, { tail, sp->tail.size } };
	struct view_layout layout = { &seg, 1, units, 2 };

	if (pager_try(sp->variant, 64 * MiB, &p, &err) < 0 || source_open(sp->path, &s, &err) < 0) {
		fprintf(stderr, "%s\n", err.text);
		return 1;
	}
	/* Other processes come and go meanwhile: the smallest rise of several tries. */
	for (int i = 0; i < 10 && rise >= 64 * 1024; i++) {
		uint64_t before = proc_kib("/proc/meminfo", "Committed_AS:"), after;

		if (view_open(p, s, &layout, &v, &err) < 0) {
			fprintf(stderr, "%s\n", err.text);
			return 2;
		}
		if (wrong_words(view_base(v) + tail, &sp->tail, 0, sp->tail.size, 8))
			return 3;
		after = proc_kib("/proc/meminfo", "Committed_AS:");
		rise = MIN(rise, after > before ? after - before : 0);
		/* the hole, at both ends and in between */
		if (view_base(v)[0] || view_base(v)[sp->size / 2] || view_base(v)[tail - 1])
			return 4;
		if (resident(p) > 64 * MiB)
			return 5;
		catch_signals();
		/* The first write of a view that had to be made read-only is retried by the handler. */
		if (!touch_write(view_base(v) + tail + 8, 0x5A, NULL) || view_base(v)[tail + 8] != 0x5A)
			return 6;
		if (view_base(v)[tail + 4096] != (unsigned char)file_word(sp->tail.seed, 4096))
			return 7;
		view_unref(v);
	}
	if (sp->strict && sp->variant != V_MMAP) {
		struct caught c;

		/* An error stays one: it is not taken for a first write, and tried again for ever. */
		source_hook = hook_fails;
		if (view_open(p, s, &layout, &v, &err) < 0)
			return 9;
		limit_child(20);
		if (touch(view_base(v) + 10, NULL, &c) || c.sig != SIGBUS || touch_write(view_base(v) + 11, 1, &c))
			return 10;
		view_unref(v);
	}
	source_unref(s);
	pager_unref(p);
	if (rise >= 64 * 1024) {
		fprintf(stderr, "Committed_AS rose by %llu KiB\n", (unsigned long long)rise);
		return 8;
	}
	return 0;
}

static void sparse_make(struct sparse *sp, int variant)
{
	cleanup_close int fd = -1;
	cleanup_free unsigned char *buf = malloc(MiB);

	sp->variant = variant;
	sp->size = 200 * GiB;
	sp->tail = (struct tfile){ .size = 64 * KiB, .seed = 60 };
	sp->path = strdup(test_path("sparse"));
	(void)unlink(sp->path);
	fd = open(sp->path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	for (uint64_t o = 0; o < sp->tail.size; o += 8) {
		uint64_t w = file_word(sp->tail.seed, o);

		memcpy(buf + o, &w, 8);
	}
	ck_assert_int_eq(ftruncate(fd, (off_t)sp->size), 0);
	ck_assert_int_eq(pwrite(fd, buf, sp->tail.size, (off_t)(sp->size - sp->tail.size)), (ssize_t)sp->tail.size);
}

/* Bites on: MAP_NORESERVE on views and aliases; a unit larger than the budget is read in pieces. */
START_TEST(test_file_larger_than_memory)
{
	struct sparse sp = { 0 };

	sparse_make(&sp, _i);
	ck_assert_int_eq(in_child(sparse_child, &sp), 0);
	(void)unlink(sp.path);
	free((void *)sp.path);
}
END_TEST

static char overcommit_before[8];

static int write_text(const char *path, const char *text)
{
	cleanup_close int fd = open(path, O_WRONLY | O_CLOEXEC);

	return fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) ? 0 : -1;
}

/* Unchecked fixture: the parent of the forked test restores it whatever happens to the test. */
static void overcommit_restore(void)
{
	if (overcommit_before[0])
		(void)write_text("/proc/sys/vm/overcommit_memory", overcommit_before);
}

/* Puts it back when this process has gone, also if the whole group is killed. */
static void overcommit_guard(void)
{
	int fd[2];
	char byte;

	ck_assert_int_eq(pipe(fd), 0);
	if (fork() == 0) {
		(void)setsid();
		(void)close(fd[1]);
		(void)!read(fd[0], &byte, 1);
		overcommit_restore();
		_exit(0);
	}
	(void)close(fd[0]); /* fd[1] stays open as long as we live */
}

/* Bites on: read-only views and their retry where MAP_NORESERVE is ignored; that an error is not retried. */
START_TEST(test_file_larger_than_memory_without_overcommit)
{
	struct sparse sp = { .strict = true };

	sparse_make(&sp, _i);
	overcommit_guard();
	ck_assert_int_eq(write_text("/proc/sys/vm/overcommit_memory", "2"), 0);
	ck_assert_int_eq(in_child(sparse_child, &sp), 0);
	ck_assert_int_eq(write_text("/proc/sys/vm/overcommit_memory", overcommit_before), 0);
	(void)unlink(sp.path);
	free((void *)sp.path);
}
END_TEST

/* ------------------------------------------------------------------ G08: nothing grows */

/* What freed memory may go on to hold: AddressSanitizer keeps it back for a while (its quarantine). */
#ifdef __SANITIZE_ADDRESS__
#define HELD_BACK_KIB (256 * 1024)
#else
#define HELD_BACK_KIB 0
#endif

START_TEST(test_open_and_close_leak_nothing)
{
	struct tfile f;
	struct pager *p;
	unsigned int fds = 0, vmas = 0, threads = 0;
	uint64_t rss = 0;
	int rounds = _i == V_MMAP ? 1000 : 150;

	tfile_make(&f, "leak", MiB, 51);
	p = pager_of(_i, 64 * MiB);
	for (int i = 0; i < rounds; i++) {
		struct rig r;

		rig_add(&r, p, &f, 64 * KiB);
		ck_assert_uint_eq(wrong_words(r.base, &f, 0, f.size, 4096), 0);
		r.base[5] = 1;
		rig_close(&r);
		if (i == 50) {
			fds = count_fds();
			vmas = count_vmas(NULL, (void *)UINTPTR_MAX);
			threads = count_threads();
			rss = proc_kib("/proc/self/status", "VmRSS:");
		}
	}
	ck_assert_uint_eq(count_fds(), fds);
	ck_assert_uint_eq(count_threads(), threads);
	ck_assert_uint_le(count_vmas(NULL, (void *)UINTPTR_MAX), vmas + 4); /* malloc's own */
	ck_assert_uint_le(proc_kib("/proc/self/status", "VmRSS:"), rss + 2048 + HELD_BACK_KIB);
	ck_assert_uint_eq(resident(p), 0);
	pager_unref(p);
}
END_TEST

START_TEST(test_pagers_leak_nothing)
{
	struct tfile f;
	unsigned int fds = 0, vmas = 0, threads = 0;

	tfile_make(&f, "leak2", 3 * MiB, 52);
	for (int i = 0; i < 60; i++) {
		struct rig r;

		rig_open(&r, _i, &f, 64 * MiB, MiB);
		ck_assert_uint_eq(wrong_words(r.base, &f, 0, f.size, 4096), 0);
		rig_close(&r);
		if (i == 10) {
			fds = count_fds();
			vmas = count_vmas(NULL, (void *)UINTPTR_MAX);
			threads = count_threads();
		}
	}
	ck_assert_uint_eq(count_fds(), fds);
	ck_assert_uint_eq(count_threads(), threads);
	ck_assert_uint_le(count_vmas(NULL, (void *)UINTPTR_MAX), vmas + 6); /* stacks that libc keeps */
}
END_TEST

/* ------------------------------------------------------------------ G09: the bytes are held once */

/* Bites on: direct reads into the arena; pages of the cache let go after they were copied. */
START_TEST(test_bytes_are_held_once)
{
	struct tfile f;
	struct rig r;
	uint64_t held;

	for (int through_cache = 0; through_cache < 2; through_cache++) {
		tfile_make(&f, "once", 32 * MiB, 54);
		if (tfile_cached_bytes(f.path) > MiB)
			return; /* a file system that keeps its pages (tmpfs): there is nothing to see */
		pager_hooks.no_direct = through_cache;
		rig_open(&r, _i, &f, 256 * MiB, 4 * MiB);
		rig_check(&r);
		held = tfile_cached_bytes(f.path) + resident(r.pager);
		ck_assert_uint_le(held, f.size + f.size / 10 + MiB);
		ck_assert_uint_le(arena_bytes(), f.size + f.size / 10 + 4 * MiB);
		rig_close(&r);
	}
}
END_TEST

/* ------------------------------------------------------------------ G33: not allowed here */

#define IOC_NEW 0xaa00u     /* USERFAULTFD_IOC_NEW: the header's macro is no constant expression */
#define IOC_API 0xc018aa3fu /* UFFDIO_API */

struct refusal {
	const char *what;
	bool nobody;
	int nr_refused; /* system calls (or ioctl commands) that are refused */
	struct {
		unsigned int call, ioctl_cmd; /* ioctl_cmd 0: the call itself */
		int error;
	} refused[3];
};

static int refuse(const struct refusal *r)
{
	struct sock_filter code[32];
	struct sock_fprog prog = { 0, code };
	unsigned short n = 0;

	if (!r->nr_refused)
		return 0;
	for (int i = 0; i < r->nr_refused; i++) {
		bool ioctl_too = r->refused[i].ioctl_cmd != 0;

		code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
		code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, r->refused[i].call, 0,
							 (unsigned char)(ioctl_too ? 3 : 1));
		if (ioctl_too) {
			code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
								 offsetof(struct seccomp_data, args[1]));
			code[n++] =
				(struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, r->refused[i].ioctl_cmd, 0, 1);
		}
		code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
							 SECCOMP_RET_ERRNO | (unsigned int)r->refused[i].error);
	}
	code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	prog.len = n;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
		return -1;
	return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog);
}

static const struct refusal refusals[] = {
	{ .what = "root, userfaultfd(2) EPERM", .nr_refused = 1, .refused = { { SYS_userfaultfd, 0, EPERM } } },
	{ .what = "root, userfaultfd(2) ENOSYS", .nr_refused = 1, .refused = { { SYS_userfaultfd, 0, ENOSYS } } },
	{ .what = "root, /dev/userfaultfd refuses", .nr_refused = 1, .refused = { { SYS_ioctl, IOC_NEW, EPERM } } },
	{ .what = "root, both refuse",
	  .nr_refused = 2,
	  .refused = { { SYS_ioctl, IOC_NEW, EPERM }, { SYS_userfaultfd, 0, EPERM } } },
	{ .what = "root, UFFDIO_API EINVAL", .nr_refused = 1, .refused = { { SYS_ioctl, IOC_API, EINVAL } } },
	{ .what = "root, no io_uring", .nr_refused = 1, .refused = { { SYS_io_uring_setup, 0, EPERM } } },
	{ .what = "root, no mount", .nr_refused = 1, .refused = { { SYS_fsopen, 0, EPERM } } },
	{ .what = "root, no name_to_handle_at", .nr_refused = 1, .refused = { { SYS_name_to_handle_at, 0, EPERM } } },
	{ .what = "nobody", .nobody = true },
	{ .what = "nobody, userfaultfd(2) EPERM",
	  .nobody = true,
	  .nr_refused = 1,
	  .refused = { { SYS_userfaultfd, 0, EPERM } } },
	{ .what = "nobody, userfaultfd(2) ENOSYS",
	  .nobody = true,
	  .nr_refused = 1,
	  .refused = { { SYS_userfaultfd, 0, ENOSYS } } },
	{ .what = "nobody, no io_uring",
	  .nobody = true,
	  .nr_refused = 1,
	  .refused = { { SYS_io_uring_setup, 0, ENOSYS } } },
};

static struct tfile refusal_file;

static int refusal_child(void *arg)
{
	const struct refusal *rf = arg;
	struct pager_caps caps;
	struct wd_err err = { "" };
	enum way best;

	if (rf->nobody &&
	    (setgroups(0, NULL) < 0 || setresgid(65534, 65534, 65534) < 0 || setresuid(65534, 65534, 65534) < 0))
		return 1;
	if (refuse(rf) < 0)
		return 2;
	pager_caps_probe(&caps, NULL);
	best = pager_caps_way(&caps);
	fprintf(stderr, "%s: way %d\n", rf->what, best);
	for (enum way way = WAY_EMBEDDED; way <= WAY_MMAP; way++) {
		struct pager_config config = { .way = way, .budget_bytes = 64 * MiB };
		struct pager *p = NULL;
		struct source *s;
		struct view *v;
		int r;

		err.text[0] = 0;
		r = pager_new(&config, &p, &err);
		if (r < 0 && (way == best || way == WAY_MMAP)) {
			fprintf(stderr, "%s: way %d: %d %s\n", rf->what, way, r, err.text);
			return 3;
		}
		if (r < 0) {
			/* What was asked for does not exist here: said in one line. */
			if (r != -EOPNOTSUPP || !err.text[0] || strchr(err.text, '\n') || p) {
				fprintf(stderr, "%s: way %d: %d '%s'\n", rf->what, way, r, err.text);
				return 4;
			}
			continue;
		}
		if (pager_way(p) != way)
			return 5;
		if (view_try(p, &refusal_file, MiB, &s, &v, &err) < 0) {
			fprintf(stderr, "%s: %s\n", rf->what, err.text);
			return 6;
		}
		if (wrong_words(view_base(v), &refusal_file, 0, refusal_file.size, 8))
			return 7;
		if (view_drop(v) < 0 || pager_sync(p, 20000) < 0 ||
		    wrong_words(view_base(v), &refusal_file, 0, refusal_file.size, 8))
			return 8;
		view_unref(v);
		source_unref(s);
		pager_unref(p);
	}
	return 0;
}

START_TEST(test_survives_refusals)
{
	tfile_make(&refusal_file, "refusal", 6 * MiB + 1, 55);
	ck_assert_int_eq(in_child(refusal_child, (void *)&refusals[_i]), 0);
}
END_TEST

/* Few descriptors left, from none to enough: a refusal of one line, or the right bytes; never a hang, never a leak. */
static int few_fds_child(void *arg)
{
	int variant = *(int *)arg, opened = 0, r;
	struct rlimit rl, few;
	unsigned int fds = count_fds();
	int next = dup(0);

	(void)close(next);
	(void)getrlimit(RLIMIT_NOFILE, &rl);
	for (unsigned int n = 0; n < 64 && opened < 3; n++) {
		struct pager *p;
		struct source *s;
		struct view *v;
		struct wd_err err = { "" };

		few = (struct rlimit){ (rlim_t)next + n, rl.rlim_max };
		if (setrlimit(RLIMIT_NOFILE, &few) < 0)
			return 1;
		r = pager_try(variant, 64 * MiB, &p, &err);
		if (r == 0) {
			r = view_try(p, &refusal_file, MiB, &s, &v, &err);
			if (r == 0) {
				opened++;
				if (wrong_words(view_base(v), &refusal_file, 0, refusal_file.size, 512))
					return 2;
				view_unref(v);
				source_unref(s);
			}
			pager_unref(p);
		}
		(void)setrlimit(RLIMIT_NOFILE, &rl);
		if (r < 0 && (!err.text[0] || strchr(err.text, '\n'))) {
			fprintf(stderr, "%u descriptors: %d '%s'\n", n, r, err.text);
			return 3;
		}
		if (count_fds() != fds) {
			fprintf(stderr, "%u descriptors: %u are open, %u were\n", n, count_fds(), fds);
			return 5;
		}
	}
	return opened ? 0 : 4;
}

START_TEST(test_few_descriptors)
{
	tfile_make(&refusal_file, "few", 4 * MiB, 56);
	ck_assert_int_eq(in_child(few_fds_child, &_i), 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("pager");
	TCase *tc;

	tc = new_case(s, "basics", 60);
	tcase_add_test(tc, test_caps_are_sane);
	add_variants(tc, test_pager_takes_the_way_asked_for, ALL_VARIANTS);
	add_variants(tc, test_every_byte_is_right, ALL_VARIANTS);
	add_variants(tc, test_tails_of_every_size, ALL_VARIANTS);
	add_variants(tc, test_touch_reads_one_unit, PAGED);
	add_variants(tc, test_units_of_every_kind, ALL_VARIANTS);
	add_variants(tc, test_shifted_and_copied_segments, ALL_VARIANTS);
	add_variants(tc, test_two_views_do_not_mix, ALL_VARIANTS);
	add_variants(tc, test_views_are_shared_by_identity, ALL_VARIANTS);
	add_variants(tc, test_other_segments_are_another_view, ALL_VARIANTS);
	add_variants(tc, test_system_calls_touch_views, ALL_VARIANTS);

	tc = new_case(s, "drop", 60);
	add_variants(tc, test_dropped_is_free_and_comes_back, PAGED);
	add_variants(tc, test_writes_stay, ALL_VARIANTS);
	add_variants(tc, test_dropping_units_keeps_their_neighbours, PAGED);
	add_variants(tc, test_observed_drop_keeps_what_was_touched, PAGED);

	tc = new_case(s, "populate", 60);
	add_variants(tc, test_populate_reads_ahead, ALL_VARIANTS);
	add_variants(tc, test_populate_waits_and_is_cancelled, PAGED);
	add_variants(tc, test_closing_waits_for_reads_in_flight, PAGED);
	add_variants(tc, test_demand_goes_before_populate, PAGED);

	tc = new_case(s, "size", 60);
	add_variants(tc, test_file_larger_than_memory, ALL_VARIANTS);
	add_variants(tc, test_bytes_are_held_once, PAGED);

	tc = new_case(s, "overcommit", 60);
	{
		FILE *f = fopen("/proc/sys/vm/overcommit_memory", "re");

		if (!f || !fgets(overcommit_before, 2, f) || access("/proc/sys/vm/overcommit_memory", W_OK) < 0 ||
		    write_text("/proc/sys/vm/overcommit_memory", overcommit_before) < 0) {
			overcommit_before[0] = 0;
			skip("test_file_larger_than_memory_without_overcommit",
			     "vm.overcommit_memory cannot be set here");
		} else {
			tcase_add_unchecked_fixture(tc, NULL, overcommit_restore);
			add_variants(tc, test_file_larger_than_memory_without_overcommit, ALL_VARIANTS);
		}
		if (f)
			(void)fclose(f);
	}

	tc = new_case(s, "leaks", 60);
	add_variants(tc, test_open_and_close_leak_nothing, ALL_VARIANTS);
	add_variants(tc, test_pagers_leak_nothing, ALL_VARIANTS);

	tc = new_case(s, "refusals", 60);
	if (geteuid() == 0)
		tcase_add_loop_test(tc, test_survives_refusals, 0, (int)ARRAY_SIZE(refusals));
	else
		skip("test_survives_refusals", "only root can become nobody");
	add_variants(tc, test_few_descriptors, ALL_VARIANTS);
	return run_suite(s);
}
