/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Models as programs use them, through the public interface: larger than the budget, linked, misaligned, saved over,
 * replaced, read-only; opened, staged and closed by several threads; forked from; left open at the end.
 */
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/api_util.h"

/* What may be on its way in while room for it is made. */
static uint64_t window(void)
{
	return 4 * extent();
}

/* ------------------------------------------------------------------ larger than the budget */

enum order { FORWARD, BACKWARD, RANDOM, NR_ORDERS };
enum marks { NO_MARKS, MARKS, MARKS_OF_A_PLAN, NR_MARKS };

static void pass_mark(struct wd *wd, enum marks marks, int pass)
{
	if (marks == MARKS)
		ck_works(wd_stage_begin(wd, pass % 2 ? "odd" : "even"));
	if (marks == MARKS_OF_A_PLAN)
		ck_works(wd_stage_begin(wd, "read"));
}

/* From end to end in any order, again and again, with and without stages; one tensor alone is larger than the budget.
 * Bites on: second chance inside of a running stage, large tensors in windows, the wait of a fault for room. */
START_TEST(test_larger_than_the_budget)
{
	enum { NR = 19 };
	uint64_t budget = 16 * MiB, seed = 3, total = 0;
	cleanup_free char *path = data_text("%s/larger.safetensors", test_dir);
	struct data_tensor t[NR];
	struct wd_plan *plan;

	for (size_t i = 0; i < NR; i++) {
		t[i] = (struct data_tensor){ .name = data_text("w%zu", i),
					     .dtype = "U8",
					     .ndim = 1,
					     .shape = { i == 9 ? 20 * (int64_t)MiB + 5 :
								 (int64_t)(2 * MiB - 700 * KiB + i * 99991) } };
	}
	(void)data_write_safetensors(path, t, NR, &(struct data_opts){ .seed = 21 });
	for (size_t i = 0; i < NR; i++) {
		total += t[i].nbytes;
		free((char *)t[i].name);
	}
	ck_assert_uint_gt(total, 3 * budget);
	ck_works(wd_plan_new(&plan));
	ck_works(wd_plan_add(plan, "read", "larger"));
	for (enum marks marks = NO_MARKS; marks < NR_MARKS; marks++) {
		struct wd *wd = connected(_i, budget, 0);
		struct wd_model *m = opened(wd, path, NULL);
		struct wd_stats st;

		if (marks == MARKS_OF_A_PLAN)
			ck_works(wd_set_plan(wd, plan));
		for (int order = 0; order < NR_ORDERS; order++) {
			for (int pass = 0; pass < 2; pass++) {
				pass_mark(wd, marks, pass);
				for (size_t i = 0; i < NR; i++) {
					size_t k = order == FORWARD  ? i :
						   order == BACKWARD ? NR - 1 - i :
								       rnd(&seed) % NR;

					/* With user-mode faults nothing is dropped but where the program says so. */
					if (_i == WD_WAY_USER)
						release(wd, m);
					if (_i != WD_WAY_USER || k != 9)
						ck_tensor(wd_model_tensor_at(m, k), 21);
					if (_i != WD_WAY_MMAP)
						ck_assert_uint_le(stats_of(wd).resident_bytes, budget + window());
				}
			}
		}
		st = stats_of(wd);
		ck_assert_uint_eq(st.failed, 0);
		if (_i == WD_WAY_EMBEDDED) {
			ck_assert_uint_le(st.peak_bytes, budget + window());
			ck_assert_uint_gt(st.reload_bytes, 0);
			ck_assert_uint_le(arena_bytes(), budget + window());
		}
		wd_model_close(m);
		wd_disconnect(wd);
	}
	wd_plan_free(plan);
}
END_TEST

/* ------------------------------------------------------------------ a hub's cache: links to blobs */

/* Two revisions, by file and by folder, that link to one blob are one view, read once.
 * Bites on: identity by the file and not by its name. */
START_TEST(test_revisions_share_a_blob)
{
	static const char *const dirs[] = { "blobs", "snapshots", "snapshots/r1", "snapshots/r2" };
	cleanup_free char *blob = NULL, *r1 = data_text("%s/snapshots/r1/model.safetensors", test_dir);
	cleanup_free char *r2 = data_text("%s/snapshots/r2", test_dir), *in_r2 = data_text("%s/model.safetensors", r2);
	struct wd_model *a, *b, *c;
	struct wd *wd;

	for (size_t i = 0; i < ARRAY_SIZE(dirs); i++) {
		cleanup_free char *d = data_text("%s/%s", test_dir, dirs[i]);

		ck_assert_int_eq(mkdir(d, 0755), 0);
	}
	blob = make_model("blobs/5f0e", 3, 3 * MiB, 22);
	ck_assert_int_eq(symlink("../../blobs/5f0e", r1), 0);
	ck_assert_int_eq(symlink("../../blobs/5f0e", in_r2), 0);
	wd = connected(_i, 64 * MiB, 0);
	a = opened(wd, r1, "first");
	b = opened(wd, r2, "second");
	c = opened(wd, blob, NULL);
	for (size_t i = 0; i < 3; i++) {
		ck_assert_ptr_eq(wd_model_tensor_at(a, i)->data, wd_model_tensor_at(b, i)->data);
		ck_assert_ptr_eq(wd_model_tensor_at(a, i)->data, wd_model_tensor_at(c, i)->data);
	}
	ck_model(a, 22);
	ck_model(b, 22);
	if (_i != WD_WAY_MMAP) {
		ck_assert_uint_le(stats_of(wd).read_bytes, 9 * MiB + extent());
		ck_assert_uint_eq(stats_of(wd).reload_bytes, 0);
		ck_assert_uint_le(arena_bytes(), 9 * MiB + 2 * extent());
	}
	wd_model_close(a);
	ck_model(b, 22);
	wd_model_close(c);
	/* The cache is cleaned up while it is in use. */
	ck_assert_int_eq(unlink(in_r2), 0);
	ck_assert_int_eq(unlink(blob), 0);
	release(wd, b);
	ck_model(b, 22);
	wd_model_close(b);
	wd_disconnect(wd);
}
END_TEST

/* ------------------------------------------------------------------ misaligned data */

/* Data at every residue of 64, with tensors misaligned inside of it: exact and aligned, dropped and built again, and
 * what was written stays. Bites on: the aligned copies of layout_compute() and the segments of a fill. */
START_TEST(test_misaligned_is_dropped_and_rebuilt)
{
	struct wd *wd = connected(_i, 64 * MiB, 0);

	for (uint64_t residue = 0; residue < 64; residue++) {
		/* A few are larger than an extent. */
		int64_t n = residue % 16 == 5 ? 3 * (int64_t)MiB / 8 : 20011;
		struct data_tensor t[] = {
			{ .name = "f64", .dtype = "F64", .ndim = 1, .shape = { n } },
			{ .name = "odd", .dtype = "U8", .ndim = 1, .shape = { 3 } },
			{ .name = "bf16", .dtype = "BF16", .ndim = 1, .shape = { n } },
			{ .name = "f32", .dtype = "F32", .ndim = 1, .shape = { n } },
			{ .name = "odd2", .dtype = "BOOL", .ndim = 1, .shape = { 1 } },
			{ .name = "f64b", .dtype = "F64", .ndim = 2, .shape = { n, 1 } },
		};
		cleanup_free char *path = data_text("%s/residue.safetensors", test_dir);
		unsigned char was[ARRAY_SIZE(t)];
		struct wd_model *m;

		(void)unlink(path);
		(void)data_write_safetensors(
			path, t, ARRAY_SIZE(t),
			&(struct data_opts){ .seed = residue + 1, .align = 64, .residue = residue });
		m = opened(wd, path, NULL);
		for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
			const struct wd_tensor *w = wd_model_tensor_at(m, i);

			ck_assert_str_eq(w->name, t[i].name);
			ck_assert_uint_eq((uintptr_t)w->data % (wd_dtype_bits(w->dtype) / 8), 0);
			ck_tensor(w, residue + 1);
		}
		release(wd, m);
		if (_i != WD_WAY_MMAP)
			ck_assert_uint_eq(model_stats_of(m).resident_bytes, 0);
		ck_model(m, residue + 1);
		/* A write in each, also in the copies, outlives what is dropped around it. */
		for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
			unsigned char *p = (unsigned char *)wd_model_tensor_at(m, i)->data + t[i].nbytes / 2;

			was[i] = *p;
			*p = (unsigned char)~was[i];
		}
		release(wd, m);
		for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
			unsigned char *p = (unsigned char *)wd_model_tensor_at(m, i)->data + t[i].nbytes / 2, c;

			ck_assert_uint_eq(*p, (unsigned char)~was[i]);
			ck_works(wd_tensor_read(m, wd_model_tensor_at(m, i), t[i].nbytes / 2, &c, 1));
			ck_assert_uint_eq(c, was[i]);
			*p = was[i];
		}
		ck_model(m, residue + 1);
		wd_model_close(m);
	}
	wd_disconnect(wd);
}
END_TEST

/* ------------------------------------------------------------------ saved over its own source */

/* How a program saves a model under the name that it was loaded from. */
enum saving {
	IN_PLACE,  /* over the old bytes */
	TRUNCATED, /* open(path, "wb") */
	ALLOCATED, /* the same, with the new size set first: holes where nothing is written yet */
	IN_ORDER,  /* in place, in another order of the tensors: each over its neighbour's bytes */
	NR_SAVINGS,
};

struct saver {
	struct wd_model *m;
	const char *path;
	enum saving how;
	int error;       /* of the first write that failed */
	size_t nr_saved; /* tensors that were written in whole */
	_Atomic bool done;
};

#define SAVED_TENSORS 5

/* Where tensor i goes. */
static uint64_t saved_at(const struct saver *s, size_t i)
{
	return wd_model_tensor_at(s->m, s->how == IN_ORDER ? (i + 1) % SAVED_TENSORS : i)->file_offset;
}

static void *save(void *arg)
{
	struct saver *s = arg;
	bool trunc = s->how == TRUNCATED || s->how == ALLOCATED;
	const struct wd_tensor *last = wd_model_tensor_at(s->m, SAVED_TENSORS - 1);
	cleanup_close int fd = open(s->path, O_WRONLY | O_CLOEXEC | (trunc ? O_TRUNC : 0));

	if (fd < 0 || (s->how == ALLOCATED && ftruncate(fd, (off_t)(last->file_offset + last->nbytes)) < 0))
		s->error = errno;
	for (size_t i = 0; i < SAVED_TENSORS && !s->error; i++) {
		const struct wd_tensor *t = wd_model_tensor_at(s->m, i);

		for (uint64_t off = 0; off < t->nbytes;) {
			ssize_t n =
				pwrite(fd, (const char *)t->data + off, t->nbytes - off, (off_t)(saved_at(s, i) + off));

			if (n < 0) {
				s->error = errno;
				break;
			}
			off += (uint64_t)n;
		}
		s->nr_saved += !s->error;
	}
	s->done = true;
	return NULL;
}

/* What is in memory is an old byte, or an error that says why. Returns how many tensors have errors. */
static unsigned int old_or_reason(const struct saver *s)
{
	unsigned int nr_failed = 0;

	for (size_t i = 0; i < SAVED_TENSORS; i++) {
		const struct wd_tensor *t = wd_model_tensor_at(s->m, i);
		const char *why;

		for (uint64_t off = 0; off < t->nbytes; off += 64 * KiB) {
			const char *at = (const char *)t->data + off;

			if (touch(at, NULL, NULL)) {
				ck_assert_int_eq(data_check(at, 64, 24, t->file_offset + off), -1);
				continue;
			}
			why = wd_fault_reason(at);
			ck_assert_msg(why && strstr(why, s->path) && strstr(why, t->name) && !strchr(why, '\n'),
				      "reason: %s", why ? why : "none");
			nr_failed++;
			break;
		}
	}
	return nr_failed;
}

/* Neither a hang, nor bytes that were never in the file: what arrives is right, and what cannot be read any more is an
 * error with a reason. Bites on: RWF_NOWAIT of direct reads (demand waits for no inode lock); the check for a change
 * after each read. */
START_TEST(test_saved_over_its_own_source)
{
	catch_signals();
	for (int k = 0; k < NR_SAVINGS * 4; k++) {
		bool populated = k & 1, part = k & 2;
		cleanup_free char *path = make_model("saved.safetensors", SAVED_TENSORS, 3 * MiB, 24);
		struct wd *wd = connected(_i, 64 * MiB, WD_NO_SIGNAL_HANDLER);
		struct saver s = { .m = opened(wd, path, NULL), .path = path, .how = (enum saving)(k / 4) };
		uint64_t end = now_ms() + (SANITIZED ? 60000 : 30000);
		unsigned char byte;
		pthread_t thread;
		struct wd_job *job;

		(void)data_drop_cache(path);
		if (part)
			ck_tensor(wd_model_tensor(s.m, "t2"), 24);
		if (populated) {
			ck_works(wd_populate(s.m, NULL, &job));
			ck_works(wd_job_wait(job, 30000));
			wd_job_free(job);
		}
		ck_assert_int_eq(pthread_create(&thread, NULL, save, &s), 0);
		while (!s.done && now_ms() < end)
			(void)usleep(1000);
		ck_assert_msg(s.done, "case %d: write(2) from a tensor hangs", k);
		ck_assert_int_eq(pthread_join(thread, NULL), 0);

		if (s.error)
			ck_assert_int_eq(s.error, EFAULT);
		if (_i == WD_WAY_MMAP) { /* shows the file as it is now, as any mmap does: documented */
			wd_model_close(s.m);
			wd_disconnect(wd);
			continue;
		}
		if (populated) /* all of it was in memory: saving must work */
			ck_assert_msg(!s.error && s.nr_saved == SAVED_TENSORS, "case %d: %s after %zu tensors", k,
				      strerror(s.error), s.nr_saved);
		for (size_t i = 0; i < s.nr_saved; i++) {
			const struct wd_tensor *t = wd_model_tensor_at(s.m, i);
			cleanup_free unsigned char *buf = malloc(t->nbytes);
			cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);

			ck_assert_int_eq(pread(fd, buf, t->nbytes, (off_t)saved_at(&s, i)), (ssize_t)t->nbytes);
			ck_assert_msg(data_check(buf, t->nbytes, 24, t->file_offset) == -1,
				      "case %d: tensor %zu was saved with bytes that were never its own", k, i);
		}
		ck_assert_uint_le(old_or_reason(&s), populated ? 0 : SAVED_TENSORS);
		ck_works(wd_model_release(s.m));
		ck_works(wd_sync(wd));
		(void)old_or_reason(&s);
		/* The header's own bytes count: nobody may go on with a file that is another one now. */
		if (s.nr_saved || s.how != IN_PLACE)
			ck_fails(wd_tensor_read(s.m, wd_model_tensor(s.m, "t0"), 0, &byte, 1), -ESTALE,
				 "saved.safetensors|t0|changed");
		wd_model_close(s.m);
		wd_disconnect(wd);
	}
}
END_TEST

/* ------------------------------------------------------------------ files that go, come and cannot be written */

/* Renamed over, then deleted: who has it open keeps the old bytes, also what was never read or was dropped; a new open
 * gets the new file, under another name. Bites on: reading by descriptor; an identity that a new file does not share. */
START_TEST(test_replaced_while_open)
{
	cleanup_free char *path = make_model("replaced.safetensors", 4, 3 * MiB, 25), *tmp = NULL;
	struct wd *wd = connected(_i, 64 * MiB, 0);
	struct wd_model *old = opened(wd, path, NULL), *new_one = NULL, *none = NULL;

	ck_tensor(wd_model_tensor(old, "t1"), 25);
	tmp = make_model("tmp.safetensors", 4, 3 * MiB, 26);
	ck_assert_int_eq(rename(tmp, path), 0);
	ck_model(old, 25);
	ck_fails(wd_model_open(wd, path, NULL, &none), -EEXIST, "'replaced'|replaced.safetensors|another");
	new_one = opened(wd, path, "replacement");
	ck_model(new_one, 26);
	release(wd, old);
	release(wd, new_one);
	ck_assert_int_eq(unlink(path), 0);
	ck_model(new_one, 26);
	ck_model(old, 25);
	ck_fails(wd_model_open(wd, path, NULL, &none), -ENOENT, "replaced.safetensors");
	ck_assert_ptr_null(none);
	wd_model_close(old);
	ck_model(new_one, 26);
	wd_model_close(new_one);
	wd_disconnect(wd);
}
END_TEST

static int use_twice(int way, const char *path, uint64_t seed)
{
	struct wd_options o = { .size = sizeof(o), .way = (uint32_t)way, .budget_bytes = 64 * MiB };
	struct wd_model *m;
	struct wd *wd;

	if (wd_connect(&o, &wd) < 0 || wd_model_open(wd, path, NULL, &m) < 0) {
		(void)fprintf(stderr, "%s\n", wd_error());
		return 1;
	}
	for (int round = 0; round < 2; round++) {
		for (size_t i = 0; i < wd_model_nr_tensors(m); i++)
			if (!tensor_is_right(wd_model_tensor_at(m, i), seed))
				return 2;
		*(unsigned char *)wd_model_tensor_at(m, 0)->data ^=
			1; /* a private page needs no right to write the file */
		*(unsigned char *)wd_model_tensor_at(m, 0)->data ^= 1;
		if (wd_model_release(m) < 0 || wd_sync(wd) < 0)
			return 3;
	}
	wd_model_close(m);
	wd_disconnect(wd);
	return 0;
}

#define NO_NAMESPACE 77

struct medium {
	int way;
	bool mount;
};

static int on_read_only_media(void *arg)
{
	const struct medium *md = arg;

	if (chdir(test_dir) < 0)
		return 10;
	if (md->mount) {
		if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
		    mount(test_dir, test_dir, NULL, MS_BIND, NULL) < 0 ||
		    mount(NULL, test_dir, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL) < 0 || chdir(test_dir) < 0)
			return NO_NAMESPACE;
		if (open("new", O_WRONLY | O_CREAT, 0600) >= 0)
			return 11;
	} else {
		/* A file of somebody else's that may only be read. Way embedded is for root here. */
		if (md->way != WD_WAY_EMBEDDED && become_nobody() < 0)
			return 12;
		if (md->way != WD_WAY_EMBEDDED && access("read.safetensors", W_OK) == 0)
			return 13;
	}
	return use_twice(md->way, "read.safetensors", 27);
}

/* Bites on: opening for reading only, everywhere; private mappings of what cannot be written. */
START_TEST(test_read_only_media)
{
	cleanup_free char *path = make_model("read.safetensors", 4, MiB + 3, 27);
	struct medium md = { .way = _i };
	int r;

	ck_assert_int_eq(chmod(path, 0444), 0);
	ck_assert_int_eq(chmod(test_dir, 0755), 0);
	if (geteuid() != 0) {
		skip("test_read_only_media", "only root can mount and become nobody");
		ck_assert_int_eq(use_twice(_i, path, 27), 0);
		return;
	}
	ck_assert_int_eq(in_child(on_read_only_media, &md), 0);
	md.mount = true;
	r = in_child(on_read_only_media, &md);
	if (r == NO_NAMESPACE)
		skip("test_read_only_media (mount)", "no mount namespace can be made here");
	else
		ck_assert_int_eq(r, 0);
}
END_TEST

/* ------------------------------------------------------------------ many threads, everything at once */

#define STORM_MODELS 4

struct storm {
	struct wd *wd;
	char *paths[STORM_MODELS];
	struct wd_plan *plan;
	uint64_t seed, end;
	int way;
	pthread_t thread;
	unsigned int nr_calls;
};

/* Some of it is true of one moment only: these calls may fail, but only so. */
static void may_fail(int r, int a, int b)
{
	ck_assert_msg(r == 0 || r == a || r == b, "%d: %s", r, wd_error());
}

static void storm_step(struct storm *s, struct wd_model *m, size_t k)
{
	const struct wd_tensor *t = wd_model_tensor_at(m, rnd(&s->seed) % wd_model_nr_tensors(m));
	struct wd_progress p = { .size = sizeof(p) };
	struct wd_job *job;
	unsigned char buf[200];
	int r;

	switch (rnd(&s->seed) % 12) {
	case 0:
		ck_works(wd_model_release(m));
		break;
	case 1:
		ck_works(wd_tensor_release(m, t));
		break;
	case 2:
		ck_works(wd_populate(m, rnd(&s->seed) % 2 ? t : NULL, &job));
		if (rnd(&s->seed) % 2)
			wd_job_cancel(job);
		ck_works(wd_job_progress(job, &p));
		if (rnd(&s->seed) % 2) {
			r = wd_job_wait(job, (int)(rnd(&s->seed) % 20));
			ck_assert_msg(r == 0 || r == -ECANCELED || r == -ETIMEDOUT || r == -ENOSPC, "%d: %s", r,
				      wd_error());
		}
		wd_job_free(job);
		break;
	case 3:
		may_fail(wd_stage_begin(s->wd, rnd(&s->seed) % 2 ? "one" : "two"), -ENOENT, 0);
		break;
	case 4:
		may_fail(wd_stage_end(s->wd), -ESRCH, 0);
		break;
	case 5:
		ck_works(wd_set_plan(s->wd, rnd(&s->seed) % 2 ? s->plan : NULL));
		break;
	case 6:
		ck_works(wd_model_pin(m, 1));
		ck_tensor(t, 30 + k);
		ck_works(wd_model_pin(m, 0));
		break;
	case 7:
		ck_works(wd_tensor_read(m, t, 11, buf, sizeof(buf)));
		ck_assert_int_eq(data_check(buf, sizeof(buf), 30 + k, t->file_offset + 11), -1);
		break;
	case 8:
		if (s->way != WD_WAY_MMAP)
			ck_works(wd_set_budget(s->wd, (16 + rnd(&s->seed) % 16) * MiB));
		break;
	case 9:
		(void)stats_of(s->wd);
		(void)model_stats_of(m);
		(void)wd_stage_name(s->wd);
		break;
	case 10:
		ck_assert_ptr_null(wd_fault_reason(t->data));
		ck_works(wd_sync(s->wd));
		break;
	default:
		(void)wd_model_ref(m);
		ck_assert_ptr_null(wd_model_tensor(m, "nobody"));
		wd_model_close(m);
	}
	ck_tensor(t, 30 + k);
}

static void *storm(void *arg)
{
	struct storm *s = arg;

	while (now_ms() < s->end) {
		size_t k = rnd(&s->seed) % STORM_MODELS;
		struct wd_model *m = NULL;

		ck_works(wd_model_open(s->wd, s->paths[k], NULL, &m));
		for (size_t n = rnd(&s->seed) % 8; n > 0; n--, s->nr_calls++)
			storm_step(s, m, k);
		wd_model_close(m);
	}
	return NULL;
}

/* Nobody reads a wrong byte, fails or waits for ever, whatever the others do. A sanitizer sees the rest.
 * Bites on: wd.lock around the lists of models and owners, references that models, jobs and views hold. */
START_TEST(test_storm_of_calls)
{
	struct storm s[3] = { { .wd = connected(_i, 24 * MiB, 0), .end = now_ms() + soak_ms(3000), .way = _i } };
	struct wd_model *stays;

	ck_works(wd_plan_new(&s[0].plan));
	for (size_t k = 0; k < STORM_MODELS; k++) {
		cleanup_free char *name = data_text("s%zu.safetensors", k), *model = data_text("s%zu", k);

		s[0].paths[k] = make_model(name, 3, 700 * KiB + k * 801, 30 + k);
		ck_works(wd_plan_add(s[0].plan, k % 2 ? "one" : "two", model));
	}
	stays = opened(s[0].wd, s[0].paths[0], NULL);
	for (size_t i = 0; i < ARRAY_SIZE(s); i++) {
		s[i] = s[0];
		s[i].seed = 1000 + i;
		ck_assert_int_eq(pthread_create(&s[i].thread, NULL, storm, &s[i]), 0);
	}
	for (size_t i = 0; i < ARRAY_SIZE(s); i++) {
		ck_assert_int_eq(pthread_join(s[i].thread, NULL), 0);
		ck_assert_uint_gt(s[i].nr_calls, 0);
	}
	ck_model(stays, 30);
	ck_works(wd_set_plan(s[0].wd, NULL));
	wd_model_close(stays);
	if (_i != WD_WAY_MMAP)
		ck_assert_uint_eq(stats_of(s[0].wd).resident_bytes, 0);
	wd_disconnect(s[0].wd);
	wd_plan_free(s[0].plan);
	for (size_t k = 0; k < STORM_MODELS; k++)
		free(s[0].paths[k]);
}
END_TEST

/* ------------------------------------------------------------------ closing in any order */

struct toucher {
	const struct wd_tensor *t;
	_Atomic bool stop;
	_Atomic uint64_t nr_wrong, rounds;
};

static void *toucher(void *arg)
{
	struct toucher *w = arg;

	while (!w->stop) {
		w->nr_wrong += !tensor_is_right(w->t, 40);
		w->rounds++;
	}
	return NULL;
}

/* The wd goes first, with a plan, a running stage and a job under way; the model lives on by its second reference, with
 * a thread that touches it all the time and after being given back. Bites on: references of models on the wd, of jobs
 * on models; a close that is not the last one and unmaps nothing. */
START_TEST(test_wd_goes_before_its_models)
{
	cleanup_free char *path = make_model("last.safetensors", 4, 3 * MiB, 40),
			  *other = make_model("other.safetensors", 2, MiB, 41);
	unsigned int fds, threads;

	wd_disconnect(connected(_i, 0, 0)); /* what libraries set up once */
	fds = count_fds();
	threads = count_threads();
	for (int round = 0; round < 4; round++) {
		struct wd *wd = connected(_i, 64 * MiB, 0);
		struct wd_model *m = opened(wd, path, NULL), *o = opened(wd, other, NULL);
		struct toucher w = { .t = wd_model_tensor(m, "t3") };
		struct wd_plan *plan;
		struct wd_job *job;
		pthread_t thread;

		ck_works(wd_plan_new(&plan));
		ck_works(wd_plan_add(plan, "run", "last"));
		ck_works(wd_set_plan(wd, round % 2 ? plan : NULL));
		wd_plan_free(plan);
		ck_works(wd_stage_begin(wd, "run"));
		ck_works(wd_populate(o, NULL, &job));
		(void)wd_model_ref(m);
		ck_assert_int_eq(pthread_create(&thread, NULL, toucher, &w), 0);
		wd_disconnect(wd);
		wd_model_close(m); /* one reference is left */
		wd_model_close(o); /* (the job keeps it) */
		for (int i = 0; i < 3; i++) {
			uint64_t rounds = w.rounds;

			ck_works(wd_model_release(m));
			ck_assert_ptr_eq(wd_model_tensor(m, "t3"), w.t);
			ck_tensor(wd_model_tensor(m, "t0"), 40);
			while (w.rounds < rounds + 2)
				(void)sched_yield();
		}
		w.stop = true;
		ck_assert_int_eq(pthread_join(thread, NULL), 0);
		ck_assert_uint_eq(w.nr_wrong, 0);
		if (round % 2) {
			wd_model_close(m);
			wd_job_free(job);
		} else {
			wd_job_free(job);
			wd_model_close(m);
		}
		ck_assert_uint_eq(arena_bytes(), 0);
	}
	ck_assert_uint_eq(count_fds(), fds);
	ck_assert_uint_eq(count_threads(), threads);
}
END_TEST

/* ------------------------------------------------------------------ fork in the middle */

struct parent {
	struct wd *wd;
	struct wd_model *m, *other;
	const char *path;
	int out;
};

/* What a child of a program with models does: everything. Returns 0, or the number of the check that failed. */
static int child_lives_on(const struct parent *p)
{
	struct wd_stats st = { .size = sizeof(st) };
	struct wd_model *again = NULL;
	struct wd_job *job = NULL;
	struct wd *own = NULL;
	unsigned char byte;
	const struct wd_tensor *t = wd_model_tensor(p->m, "t1");

	for (size_t i = 0; i < wd_model_nr_tensors(p->m); i++)
		if (i != 2 && !tensor_is_right(wd_model_tensor_at(p->m, i), 42))
			return 1;
	if (*(unsigned char *)wd_model_tensor(p->m, "t2")->data != 0x5A)
		return 2; /* what the parent had written */
	if (wd_way(p->wd) != WD_WAY_MMAP && wd_way(p->wd) != WD_WAY_DAEMON)
		return 3;
	if (wd_stats(p->wd, &st) < 0 || wd_model_stats(p->m, &st) < 0 ||
	    (wd_way(p->wd) == WD_WAY_MMAP && st.budget_bytes != UINT64_MAX))
		return 4;
	if (wd_tensor_read(p->m, t, 5, &byte, 1) < 0 || byte != ((unsigned char *)t->data)[5])
		return 5;
	if (wd_model_open(p->wd, p->path, NULL, &again) < 0 || !tensor_is_right(wd_model_tensor(again, "t3"), 42))
		return 6;
	if (wd_populate(p->m, NULL, &job) < 0 || wd_job_wait(job, 30000) < 0) {
		(void)fprintf(stderr, "%s\n", wd_error());
		return 7;
	}
	wd_job_free(job);
	if (wd_stage_begin(p->wd, "child") < 0 || wd_model_release(p->m) < 0 || wd_sync(p->wd) < 0 ||
	    wd_stage_end(p->wd) < 0)
		return 8;
	if (!tensor_is_right(wd_model_tensor(p->m, "t0"), 42) ||
	    *(unsigned char *)wd_model_tensor(p->m, "t2")->data != 0x5A)
		return 9;
	if (wd_connect(NULL, &own) < 0)
		return 10;
	wd_disconnect(own);
	wd_model_close(again);
	wd_model_close(p->other);
	wd_model_close(p->m);
	wd_disconnect(p->wd);
	return 0;
}

/* The parent ends at once, with its pager; the child is an orphan when it reads what nobody had read before. */
static int parent_exits_first(void *arg)
{
	const struct parent *p = arg;
	pid_t self = getpid(), child = fork();
	char r;

	if (child != 0)
		_exit(child < 0);
	while (getppid() == self)
		(void)sched_yield();
	r = (char)child_lives_on(p);
	_exit(write(p->out, &r, 1) != 1);
}

static int child_while_parent_lives(void *arg)
{
	return child_lives_on(arg);
}

static int connected_parent(void *arg)
{
	struct parent *p = arg;
	struct wd_options o = { .size = sizeof(o), .way = (uint32_t)p->out, .budget_bytes = 64 * MiB };
	int fd[2], r;
	char said = 99;

	if (wd_connect(&o, &p->wd) < 0 || wd_model_open(p->wd, p->path, NULL, &p->m) < 0 ||
	    wd_model_open(p->wd, p->path,
			  &(struct wd_model_options){ .size = sizeof(struct wd_model_options), .name = "other" },
			  &p->other) < 0)
		return 50;
	if (!tensor_is_right(wd_model_tensor(p->m, "t0"), 42))
		return 51;
	*(unsigned char *)wd_model_tensor(p->m, "t2")->data = 0x5A;
	if (wd_model_release(p->m) < 0 || wd_sync(p->wd) < 0 || !tensor_is_right(wd_model_tensor(p->m, "t1"), 42))
		return 52;
	r = in_child(child_while_parent_lives, p);
	if (r != 0)
		return r;
	/* The parent went on undisturbed, and ends before its child. */
	if (!tensor_is_right(wd_model_tensor(p->m, "t3"), 42) || wd_model_release(p->m) < 0 || wd_sync(p->wd) < 0 ||
	    pipe(fd) < 0)
		return 53;
	p->out = fd[1];
	{
		/* (a middle process, so that the one that checks can wait) */
		pid_t middle = fork();

		if (middle == 0) {
			(void)close(fd[0]);
			(void)parent_exits_first(p);
		}
		(void)close(fd[1]);
		if (middle < 0 || child_result(middle) != 0)
			return 54;
	}
	r = read(fd[0], &said, 1) == 1 ? said : 55;
	if (r != 0)
		return 60 + r;
	return tensor_is_right(wd_model_tensor(p->m, "t3"), 42) ? 0 : 56;
}

/* Bites on: the child handler that maps the file over what was not written (memory, and a wd that works on). */
START_TEST(test_fork_in_the_middle)
{
	cleanup_free char *path = make_model("fork.safetensors", 4, 2 * MiB + 9, 42);
	struct parent p = { .path = path, .out = _i };
	int r = in_child(connected_parent, &p);

	ck_assert_msg(r == 0, "check %d failed", r);
}
END_TEST

/* The same where the process that connected is the one that ends: its pager is gone, not only a process between. */
static int daemonise(void *arg)
{
	struct parent *p = arg;
	struct wd_options o = { .size = sizeof(o), .way = (uint32_t)p->out, .budget_bytes = 64 * MiB };
	int out = p->out >> 8;

	o.way &= 0xff;
	if (wd_connect(&o, &p->wd) < 0 || wd_model_open(p->wd, p->path, NULL, &p->m) < 0 ||
	    wd_model_open(p->wd, p->path,
			  &(struct wd_model_options){ .size = sizeof(struct wd_model_options), .name = "other" },
			  &p->other) < 0)
		return 50;
	if (!tensor_is_right(wd_model_tensor(p->m, "t0"), 42))
		return 51;
	*(unsigned char *)wd_model_tensor(p->m, "t2")->data = 0x5A;
	p->out = out;
	(void)parent_exits_first(p);
	return 57;
}

START_TEST(test_program_that_daemonises)
{
	cleanup_free char *path = make_model("daemon.safetensors", 4, 2 * MiB + 9, 42);
	struct parent p = { .path = path };
	char said = 99;
	int fd[2], r;

	ck_assert_int_eq(pipe(fd), 0);
	p.out = fd[1] << 8 | _i;
	r = in_child(daemonise, &p);
	(void)close(fd[1]);
	ck_assert_msg(r == 0, "check %d failed", r);
	ck_assert_int_eq(read(fd[0], &said, 1), 1);
	ck_assert_msg(said == 0, "check %d failed in the child", said);
	(void)close(fd[0]);
}
END_TEST

/* ------------------------------------------------------------------ the process ends with everything open */

static sem_t *reading;

static int64_t hook_never_ends(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	if (offset < 64 * KiB && nbytes < 64 * KiB) /* the header */
		return hook_count(s, buf, nbytes, offset, direct);
	(void)sem_post(reading);
	for (;;)
		(void)pause();
}

static void *touch_one(void *arg)
{
	touch_all(arg);
	return NULL;
}

struct leaver {
	int way;
	const char *path;
	bool slow;
};

/* exit(3), with its handlers, while reads, a job and a waiting thread are in flight. */
static int leave(void *arg)
{
	const struct leaver *l = arg;
	struct wd_options o = { .size = sizeof(o), .way = (uint32_t)l->way, .budget_bytes = 64 * MiB };
	struct wd_model *m;
	struct wd_job *job;
	pthread_t thread;
	sem_t sem;
	struct wd *wd;

	reading = &sem;
	(void)sem_init(&sem, 0, 0);
	(void)alarm(60); /* a process that cannot end is ended, and seen */
	if (l->slow)
		source_hook = hook_never_ends;
	if (wd_connect(&o, &wd) < 0 || wd_model_open(wd, l->path, NULL, &m) < 0 || wd_stage_begin(wd, "last") < 0)
		return 1;
	if (wd_populate(m, NULL, &job) < 0 ||
	    pthread_create(&thread, NULL, touch_one, (void *)wd_model_tensor_at(m, 3)) != 0)
		return 2;
	if (l->slow)
		while (sem_wait(&sem) < 0)
			;
	_exit(0);
}

/* As above by exit(): stdio is flushed, exit handlers run. The texts of the test's own are the parent's. */
static int leave_by_exit(void *arg)
{
	const struct leaver *l = arg;
	struct wd_options o = { .size = sizeof(o), .way = (uint32_t)l->way, .budget_bytes = 64 * MiB };
	struct wd_model *m;
	struct wd_job *job;
	pthread_t thread;
	struct wd *wd;

	(void)alarm(60);
	if (wd_connect(&o, &wd) < 0 || wd_model_open(wd, l->path, NULL, &m) < 0)
		_exit(1);
	if (wd_populate(m, NULL, &job) < 0 ||
	    pthread_create(&thread, NULL, touch_one, (void *)wd_model_tensor_at(m, 3)) != 0)
		_exit(2);
	exit(0);
}

/* Bites on: nothing of ours that waits at the end of a process: no exit handler, no thread that must be joined. */
START_TEST(test_exit_with_everything_open)
{
	cleanup_free char *path = make_model("exit.safetensors", 6, 4 * MiB, 43);
	struct leaver l = { .way = _i, .path = path };

	for (int i = 0; i < 5; i++) {
		(void)data_drop_cache(path);
		ck_assert_int_eq(in_child(leave, &l), 0);
		(void)data_drop_cache(path);
		if (!SANITIZED) /* (what is still open is no leak) */
			ck_assert_int_eq(in_child(leave_by_exit, &l), 0);
	}
	if (_i == WD_WAY_MMAP)
		return; /* the kernel reads there */
	l.slow = true;
	ck_assert_int_eq(in_child(leave, &l), 0);
}
END_TEST

/* ------------------------------------------------------------------ main */

int main(void)
{
	Suite *s = suite_create("models");
	double soak = (double)soak_ms(0) / 1000;
	TCase *tc;

	tc = folder_case(s, "files", 90);
	add_ways(tc, test_larger_than_the_budget, LOCAL_WAYS);
	add_ways(tc, test_revisions_share_a_blob, ALL_WAYS);
	add_ways(tc, test_misaligned_is_dropped_and_rebuilt, ALL_WAYS);
	add_ways(tc, test_saved_over_its_own_source, ALL_WAYS);
	add_ways(tc, test_replaced_while_open, ALL_WAYS);
	add_ways(tc, test_read_only_media, ALL_WAYS);

	tc = folder_case(s, "threads", 90 + soak);
	add_ways(tc, test_storm_of_calls, LOCAL_WAYS);
	add_ways(tc, test_wd_goes_before_its_models, ALL_WAYS);

	tc = folder_case(s, "processes", 90);
	add_ways(tc, test_fork_in_the_middle, ALL_WAYS);
	add_ways(tc, test_program_that_daemonises, ALL_WAYS);
	add_ways(tc, test_exit_with_everything_open, LOCAL_WAYS);
	return run_suite(s);
}
