/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The public interface: connecting, models, tensors, reading, populating, errors. Each test runs in every way that
 * this machine has. Stages, strict mode and the signal handler are in test_stage.c.
 */
#include <check.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "lib/internal.h"
#include "lib/layout.h"
#include "tests/api_util.h"

/*
 * ---- layout: pure
 */
static void ck_layout(const struct layout *l, uint64_t file_size, const struct ckpt_tensor *t, size_t nr)
{
	const struct view_layout *v = &l->view;
	size_t nr_bytes = 0;

	for (size_t i = 0; i < nr; i++)
		nr_bytes += t[i].nbytes > 0;
	ck_assert_uint_eq(v->nr_units, nr_bytes);
	ck_assert_uint_eq(v->segs[0].file_off, 0);
	ck_assert_uint_eq(v->segs[0].len, file_size);
	ck_assert_uint_lt(v->segs[0].arena_off, LAYOUT_ALIGN);
	for (size_t i = 1; i < v->nr_segs; i++) {
		ck_assert_uint_ge(v->segs[i].arena_off, v->segs[i - 1].arena_off + v->segs[i - 1].len);
		ck_assert_uint_eq(v->segs[i].arena_off % LAYOUT_ALIGN, 0);
		ck_assert_uint_le(v->segs[i].file_off + v->segs[i].len, file_size);
	}
	if (v->nr_segs > 1)
		ck_assert_uint_eq(v->segs[1].arena_off % LAYOUT_COPIES_ALIGN, 0);
	for (size_t u = 0, s = 0; u < v->nr_units; u++) {
		const struct ckpt_tensor *c = &t[l->unit_tensor[u]];
		const struct unit *unit = &v->units[u];

		ck_assert_uint_eq(unit->len, c->nbytes);
		ck_assert_uint_eq(unit->off % layout_dtype_align(c->dtype), 0);
		if (u)
			ck_assert_uint_ge(unit->off, v->units[u - 1].off);
		/* all its bytes lie in one segment and are the file's */
		while (unit->off >= v->segs[s].arena_off + v->segs[s].len)
			ck_assert_uint_lt(++s, v->nr_segs);
		ck_assert_uint_ge(unit->off, v->segs[s].arena_off);
		ck_assert_uint_le(unit->off + unit->len, v->segs[s].arena_off + v->segs[s].len);
		ck_assert_uint_eq(v->segs[s].file_off + (unit->off - v->segs[s].arena_off), c->file_offset);
	}
}

START_TEST(test_layout_follows_the_offset)
{
	uint64_t data = 1000 * 64 + (uint64_t)_i;
	/* The last one is misaligned inside of the data for every residue. */
	struct ckpt_tensor t[] = {
		{ .name = "a", .file_offset = data, .nbytes = 16, .dtype = WD_DTYPE_F32 },
		{ .name = "b", .file_offset = data + 16, .nbytes = 0, .dtype = WD_DTYPE_F64 },
		{ .name = "c", .file_offset = data + 16, .nbytes = 6, .dtype = WD_DTYPE_BF16 },
		{ .name = "d", .file_offset = data + 22, .nbytes = 3, .dtype = WD_DTYPE_F6_E2M3 },
		{ .name = "e", .file_offset = data + 25, .nbytes = 8, .dtype = WD_DTYPE_F32 },
	};
	struct layout l;

	ck_assert_int_eq(layout_compute(data + 33, data, 1, t, 4, &l), 0);
	ck_layout(&l, data + 33, t, 4);
	ck_assert_uint_eq(l.view.nr_segs, 1); /* b has no bytes: 4 is the largest alignment that counts */
	ck_assert_uint_eq(l.view.segs[0].arena_off, _i % 4 ? (64 - (uint64_t)_i) % 64 : 0);
	layout_done(&l);

	ck_assert_int_eq(layout_compute(data + 33, data, 1, t, 5, &l), 0);
	ck_layout(&l, data + 33, t, 5);
	ck_assert_uint_eq(l.view.nr_segs, 2);
	ck_assert_uint_eq(l.unit_tensor[3], 4);
	layout_done(&l);

	ck_assert_int_eq(layout_compute(data + 33, data, LAYOUT_ALIGN, t, 1, &l), 0);
	ck_layout(&l, data + 33, t, 1);
	ck_assert_uint_eq(l.view.units[0].off % LAYOUT_ALIGN, 0);
	layout_done(&l);
}
END_TEST

/* Neighbours share a segment if that aligns them; a hundred thousand are no work. */
START_TEST(test_layout_copies_many)
{
	enum { NR = 100000 };
	struct ckpt_tensor *t = calloc(NR, sizeof(*t));
	uint64_t begin, data = 9, off = data;
	struct layout l;

	for (int i = 0; i < NR; i++) {
		bool odd = i == 0 || (_i == 1 && i % 2 == 0);

		/* 0: one odd byte, then floats without gaps. 1: an odd byte before each. */
		t[i] = (struct ckpt_tensor){ .name = "x",
					     .file_offset = off,
					     .nbytes = odd ? 1 : 60,
					     .dtype = odd ? WD_DTYPE_U8 : WD_DTYPE_F32 };
		off += t[i].nbytes;
	}
	begin = cpu_ms();
	ck_assert_int_eq(layout_compute(off, data, 1, t, NR, &l), 0);
	ck_assert_uint_lt(cpu_ms() - begin, 500);
	ck_layout(&l, off, t, NR);
	if (_i == 0)
		ck_assert_uint_eq(l.view.nr_segs, 2);
	layout_done(&l);
	free(t);
}
END_TEST

START_TEST(test_layout_any)
{
	static const uint32_t dtypes[] = { WD_DTYPE_U8,  WD_DTYPE_BF16, WD_DTYPE_F32,
					   WD_DTYPE_F64, WD_DTYPE_C64,  WD_DTYPE_F4 };
	uint64_t state = (uint64_t)_i + 1;

	for (int round = 0; round < 300; round++) {
		struct ckpt_tensor t[40];
		uint64_t data = 8 + rnd(&state) % 300, off = data;
		struct layout l;

		for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
			uint64_t back = rnd(&state) % 8 == 0 && i ? rnd(&state) % (off - t[i - 1].file_offset + 1) : 0;

			off -= back; /* some overlap, as views of one storage do */
			t[i] = (struct ckpt_tensor){ .name = "x",
						     .file_offset = off,
						     .nbytes = rnd(&state) % 70,
						     .dtype = dtypes[rnd(&state) % ARRAY_SIZE(dtypes)] };
			off = MAX(off + back, off + t[i].nbytes);
			if (i + 1 < ARRAY_SIZE(t) && rnd(&state) % 4 == 0)
				off += rnd(&state) % 5;
		}
		ck_assert_int_eq(layout_compute(off, data, 1, t, ARRAY_SIZE(t), &l), 0);
		ck_layout(&l, off, t, ARRAY_SIZE(t));
		layout_done(&l);
	}
}
END_TEST

/*
 * ---- connecting
 */
START_TEST(test_versions)
{
	ck_assert_str_eq(wd_version(), WD_VERSION);
	ck_assert_str_eq(wd_error(), "");
	for (uint32_t way = 0; way < 7; way++)
		ck_assert_str_eq(wd_way_name(way),
				 ((const char *[]){ "auto", "daemon", "embedded", "user", "mmap", "?", "?" })[way]);
}
END_TEST

START_TEST(test_connect_refuses)
{
	struct {
		struct wd_options o;
		char more[16];
	} big = { .o = { .size = sizeof(big) } };
	struct wd *wd = (struct wd *)&big;

	ck_fails(wd_connect(NULL, NULL), -EINVAL, "ret");
	ck_fails(wd_connect(&(struct wd_options){ 0 }, &wd), -EINVAL, "size");
	ck_fails(wd_connect(&(struct wd_options){ .size = 8 }, &wd), -EINVAL, "size");
	ck_fails(wd_connect(&(struct wd_options){ .size = sizeof(struct wd_options), .way = 9 }, &wd), -EINVAL,
		 "way 9");
	ck_fails(wd_connect(&(struct wd_options){ .size = sizeof(struct wd_options), .flags = 8 }, &wd), -EINVAL,
		 "flags");
	big.more[3] = 1;
	ck_fails(wd_connect(&big.o, &wd), -EINVAL, "options");
	ck_assert_ptr_eq(wd, &big); /* results only on success */
	big.more[3] = 0;
	big.o.way = WD_WAY_MMAP;
	ck_works(wd_connect(&big.o, &wd));
	wd_disconnect(wd);
	/* an older, shorter struct */
	ck_works(wd_connect(
		&(struct wd_options){ .size = offsetof(struct wd_options, budget_bytes), .way = WD_WAY_MMAP }, &wd));
	wd_disconnect(wd);
	wd_disconnect(NULL);
}
END_TEST

START_TEST(test_connect_obeys_the_environment)
{
	static const struct {
		const char *mode;
		int r;
		uint32_t way;
	} table[] = {
		{ "mmap", 0, WD_WAY_MMAP }, { "", 0, 0 },           { "auto", 0, 0 },
		{ "daemon", -ENOENT, 0 },   { "swap", -EINVAL, 0 }, { "MMAP", -EINVAL, 0 },
	};

	ck_assert_int_eq(setenv("WEIGHTD_SOCKET", "/nonexistent/socket", 1), 0);

	for (size_t i = 0; i < ARRAY_SIZE(table); i++) {
		struct wd *wd = NULL;
		int r;

		ck_assert_int_eq(setenv("WEIGHTD_MODE", table[i].mode, 1), 0);
		r = wd_connect(NULL, &wd);
		ck_assert_msg(r == table[i].r, "%s: %d: %s", table[i].mode, r, wd_error());
		if (r == -EINVAL)
			ck_fails(r, -EINVAL, "WEIGHTD_MODE|auto, daemon, embedded, user or mmap");
		if (table[i].way)
			ck_assert_uint_eq(wd_way(wd), table[i].way);
		wd_disconnect(wd);
	}
	ck_assert_int_eq(setenv("WEIGHTD_MODE", "nonsense", 1), 0); /* is not asked when the program chooses */
	wd_disconnect(connected(WD_WAY_MMAP, 0, 0));
}
END_TEST

START_TEST(test_connect_leaves_nothing)
{
	unsigned int fds, threads;
	char *path = make_model("nothing.safetensors", 3, 100000, 3);

	wd_disconnect(connected(_i, 0, 0)); /* what libraries set up once */
	fds = count_fds();
	threads = count_threads();
	for (int i = 0; i < 20; i++) {
		struct wd *wd = connected(_i, 0, 0), *other = connected(_i, 0, 0);
		struct wd_model *m = opened(wd, path, NULL);

		wd_disconnect(wd); /* the model keeps it */
		ck_tensor(wd_model_tensor_at(m, 1), 3);
		wd_disconnect(other);
		wd_model_close(m);
	}
	ck_assert_uint_eq(count_fds(), fds);
	ck_assert_uint_eq(count_threads(), threads);
	free(path);
}
END_TEST

START_TEST(test_budget)
{
	struct wd *wd = connected(_i, 0, 0);
	struct wd_stats st = { .size = sizeof(st) };

	if (_i == WD_WAY_MMAP) {
		ck_fails(wd_set_budget(wd, MiB), -EOPNOTSUPP, "mmap");
		ck_works(wd_stats(wd, &st));
		ck_assert_uint_eq(st.budget_bytes, UINT64_MAX);
	} else {
		ck_works(wd_set_budget(wd, 64 * MiB));
		ck_works(wd_stats(wd, &st));
		ck_assert_uint_eq(st.budget_bytes, 64 * MiB);
		ck_works(wd_set_budget(wd, 0));
		ck_works(wd_stats(wd, &st));
		ck_assert_uint_gt(st.budget_bytes, 64 * MiB);
	}
	ck_fails(wd_set_budget(NULL, 0), -EINVAL, "NULL");
	wd_disconnect(wd);
}
END_TEST

START_TEST(test_stats_size)
{
	struct wd *wd = connected(_i, 0, 0);
	struct {
		struct wd_stats st;
		uint64_t more;
	} s;

	memset(&s, 0xAA, sizeof(s));
	s.st.size = offsetof(struct wd_stats, huge_bytes);
	ck_works(wd_stats(wd, &s.st));
	ck_assert_uint_eq(s.st.resident_bytes, 0);
	ck_assert_uint_eq(s.st.huge_bytes, 0xAAAAAAAAAAAAAAAA); /* the caller's struct ends before it */
	ck_assert_uint_eq(s.st.size, offsetof(struct wd_stats, huge_bytes));
	s.st.size = sizeof(s);
	ck_works(wd_stats(wd, &s.st));
	ck_assert_uint_eq(s.more, 0);
	s.st.size = 0;
	ck_fails(wd_stats(wd, &s.st), -EINVAL, "size");
	wd_disconnect(wd);
}
END_TEST

/*
 * ---- models
 */
START_TEST(test_model_tensors)
{
	struct data_tensor t[] = {
		{ .name = "first", .dtype = "F32", .ndim = 3, .shape = { 5, 7, 11 } },
		{ .name = "scalar", .dtype = "F64" },
		{ .name = "empty", .dtype = "BF16", .ndim = 2, .shape = { 0, 9 } },
		{ .name = "last/\xC3\xA9", .dtype = "BF16", .ndim = 2, .shape = { 300, 1000 } },
	};
	char *path = data_text("%s/tensors.v1.safetensors", test_dir);
	const struct wd_tensor *w;
	const char *key, *value;
	struct wd_model *m;
	struct wd *wd;

	(void)data_write_safetensors(
		path, t, ARRAY_SIZE(t),
		&(struct data_opts){ .seed = 11, .metadata = "{\"format\":\"pt\",\"who\":\"me\"}" });
	wd = connected(_i, 0, 0);
	m = opened(wd, path, NULL);
	ck_assert_str_eq(wd_model_name(m), "tensors.v1");
	ck_assert_str_eq(wd_model_path(m), path);
	ck_assert_uint_eq(wd_model_nr_files(m), 1);
	ck_assert_str_eq(wd_model_file_at(m, 0), path);
	ck_assert_ptr_null(wd_model_file_at(m, 1));
	ck_assert_uint_eq(wd_model_nr_parts(m), 0);
	ck_assert_ptr_null(wd_model_part_at(m, 0));
	ck_assert_uint_eq(wd_model_nr_tensors(m), ARRAY_SIZE(t));
	ck_assert_ptr_null(wd_model_tensor_at(m, ARRAY_SIZE(t)));
	for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
		int64_t stride = 1;

		w = wd_model_tensor(m, t[i].name);
		ck_assert_ptr_nonnull(w);
		ck_assert_uint_eq(w->size, sizeof(*w));
		ck_assert_str_eq(w->name, t[i].name);
		ck_assert_str_eq(wd_dtype_name(w->dtype), t[i].dtype);
		ck_assert_str_eq(w->file, path);
		ck_assert_uint_eq(w->ndim, t[i].ndim);
		ck_assert_uint_eq(w->nbytes, t[i].nbytes);
		ck_assert_uint_eq(w->file_offset, t[i].file_offset);
		for (uint32_t d = w->ndim; d-- > 0;) {
			ck_assert_int_eq(w->shape[d], t[i].shape[d]);
			ck_assert_int_eq(w->strides[d], stride);
			stride *= MAX(w->shape[d], 1);
		}
		ck_assert(!w->data == (w->nbytes == 0));
		ck_assert_uint_eq((uintptr_t)w->data % (wd_dtype_bits(w->dtype) / 8), 0);
		ck_tensor(w, 11);
	}
	w = wd_model_tensor_at(m, 0);
	ck_assert_str_eq(w->name, "first");

	ck_assert_ptr_null(wd_model_tensor(m, "firs"));
	ck_fails(0, 0, "firs|tensors.v1");
	ck_assert_ptr_null(wd_model_tensor(m, ""));
	ck_assert_ptr_null(wd_model_tensor(m, NULL));
	ck_assert_ptr_null(wd_model_tensor(NULL, "x"));

	ck_assert_uint_eq(wd_model_nr_metadata(m), 2);
	ck_works(wd_model_metadata_at(m, 0, &key, &value));
	ck_assert_str_eq(wd_model_metadata(m, "format"), "pt");
	ck_assert_str_eq(wd_model_metadata(m, "who"), "me");
	ck_assert_ptr_null(wd_model_metadata(m, "missing"));
	ck_fails(wd_model_metadata_at(m, 2, &key, &value), -ERANGE, "2");
	wd_model_close(m);
	wd_disconnect(wd);
	free(path);
}
END_TEST

/* Data that begin at any residue, and tensors that are misaligned inside. */
START_TEST(test_model_misaligned)
{
	struct wd *wd = connected(_i, 0, 0);

	for (uint64_t residue = 0; residue < 64; residue++) {
		struct data_tensor t[] = {
			{ .name = "f32", .dtype = "F32", .ndim = 1, .shape = { 3001 } },
			{ .name = "odd", .dtype = "U8", .ndim = 1, .shape = { 3 } },
			{ .name = "bf16", .dtype = "BF16", .ndim = 1, .shape = { 777 } },
			{ .name = "f64", .dtype = "F64", .ndim = 1, .shape = { 400 } },
			{ .name = "c64", .dtype = "C64", .ndim = 1, .shape = { 1 } },
		};
		char *path = data_text("%s/residue%u.safetensors", test_dir, (unsigned int)residue);
		struct wd_model *m;

		(void)data_write_safetensors(path, t, ARRAY_SIZE(t),
					     &(struct data_opts){ .seed = residue, .align = 64, .residue = residue });
		m = opened(wd, path, NULL);
		for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
			const struct wd_tensor *w = wd_model_tensor(m, t[i].name);

			ck_assert_uint_eq((uintptr_t)w->data % (wd_dtype_bits(w->dtype) / 8), 0);
			ck_tensor(w, residue);
			ck_works(wd_tensor_release(m, w));
		}
		ck_works(wd_sync(wd));
		for (size_t i = 0; i < ARRAY_SIZE(t); i++)
			ck_tensor(wd_model_tensor(m, t[i].name), residue);
		wd_model_close(m);
		ck_assert_int_eq(unlink(path), 0);
		free(path);
	}
	wd_disconnect(wd);
}
END_TEST

START_TEST(test_model_many_tensors)
{
	enum { NR = 20000 };
	char *path = make_model("many.safetensors", NR, 33, 21);
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model *m = opened(wd, path, NULL);
	char name[32];

	for (size_t i = 0; i < NR; i++) {
		(void)snprintf(name, sizeof(name), "t%zu", i);
		ck_tensor(wd_model_tensor(m, name), 21);
	}
	wd_model_close(m);
	wd_disconnect(wd);
	free(path);
}
END_TEST

START_TEST(test_model_names)
{
	char *a = make_model("one.safetensors", 1, 1000, 1), *b = make_model("two.safetensors", 1, 1000, 2);
	char *link_path = data_text("%s/link.safetensors", test_dir);
	struct wd *wd = connected(_i, 0, 0), *other = connected(_i, 0, 0);
	struct wd_model_options o = { .size = sizeof(o), .name = "one" };
	struct wd_model *m, *again, *linked, *elsewhere, *bad = NULL;

	(void)unlink(link_path);
	ck_assert_int_eq(link(a, link_path), 0);
	m = opened(wd, a, NULL);
	ck_fails(wd_model_open(wd, b, &o, &bad), -EEXIST, "'one'|one.safetensors|two.safetensors");
	ck_fails(wd_model_open_raw(wd, b, 0, 0, &o, &bad), -EEXIST, "'one'");
	ck_assert_ptr_null(bad);
	/* the same file: another handle on the same memory, under this name or another one */
	again = opened(wd, a, NULL);
	linked = opened(wd, link_path, NULL);
	ck_assert_ptr_ne(again, m);
	ck_assert_str_eq(wd_model_name(again), "one");
	ck_assert_str_eq(wd_model_name(linked), "link");
	ck_assert_ptr_eq(wd_model_tensor_at(again, 0)->data, wd_model_tensor_at(m, 0)->data);
	ck_assert_ptr_eq(wd_model_tensor_at(linked, 0)->data, wd_model_tensor_at(m, 0)->data);
	elsewhere = opened(other, b, "one"); /* names are one wd's */
	wd_model_close(m);
	wd_model_close(linked);
	ck_tensor(wd_model_tensor_at(again, 0), 1);
	wd_model_close(again);
	m = opened(wd, b, "one"); /* free again */
	ck_tensor(wd_model_tensor_at(m, 0), 2);
	wd_model_close(m);
	wd_model_close(elsewhere);
	wd_disconnect(wd);
	wd_disconnect(other);
	free(a);
	free(b);
	free(link_path);
}
END_TEST

static bool is_mapped(const void *p)
{
	unsigned char vec;

	return mincore((void *)((uintptr_t)p & ~(uintptr_t)4095), 1, &vec) == 0;
}

START_TEST(test_model_refs)
{
	char *path = make_model("refs.safetensors", 2, 5000000, 5);
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model *m = opened(wd, path, NULL);
	const struct wd_tensor *t = wd_model_tensor(m, "t1");
	const void *data = t->data;

	ck_assert_ptr_eq(wd_model_ref(m), m);
	ck_assert_ptr_null(wd_model_ref(NULL));
	wd_model_close(m);
	ck_tensor(t, 5);
	wd_model_close(m);
	ck_assert(!is_mapped(data));
	wd_model_close(NULL);
	wd_disconnect(wd);
	free(path);
}
END_TEST

START_TEST(test_model_alias)
{
	char *path = make_model("alias.safetensors", 3, 1000, 6), name[16];
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model *m = opened(wd, path, NULL);

	ck_works(wd_model_alias(m, "tied", "t1"));
	ck_works(wd_model_alias(m, "tied.again", "tied"));
	ck_assert_ptr_eq(wd_model_tensor(m, "tied")->data, wd_model_tensor(m, "t1")->data);
	ck_assert_ptr_eq(wd_model_tensor(m, "tied.again")->data, wd_model_tensor(m, "t1")->data);
	ck_assert_uint_eq(wd_model_nr_tensors(m), 3);
	ck_fails(wd_model_alias(m, "x", "missing"), -ENOENT, "missing|alias");
	ck_fails(wd_model_alias(m, "t0", "t1"), -EEXIST, "t0");
	ck_fails(wd_model_alias(m, "tied", "t0"), -EEXIST, "tied");
	ck_fails(wd_model_alias(m, NULL, "t0"), -EINVAL, "NULL");
	for (int i = 0; i < 1000; i++) {
		(void)snprintf(name, sizeof(name), "a%d", i);
		ck_works(wd_model_alias(m, name, "t2"));
	}
	for (int i = 0; i < 1000; i++) {
		(void)snprintf(name, sizeof(name), "a%d", i);
		ck_assert_ptr_eq(wd_model_tensor(m, name), wd_model_tensor(m, "t2"));
	}
	wd_model_close(m);
	wd_disconnect(wd);
	free(path);
}
END_TEST

START_TEST(test_model_raw)
{
	char *path = data_text("%s/blob.bin", test_dir), *empty = data_text("%s/empty", test_dir);
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model_options o = { .size = sizeof(o), .variant = "fp16" };
	struct wd_model *m;
	static const struct {
		uint64_t off, nbytes, expect;
	} table[] = {
		{ 0, 0, 300007 }, { 1, 0, 300006 }, { 63, 5, 5 }, { 4097, 200000, 200000 }, { 300006, 1, 1 },
	};

	data_write_seed(path, 300007, 8);
	data_write(empty, "", 0);
	for (size_t i = 0; i < ARRAY_SIZE(table); i++) {
		const struct wd_tensor *t;

		ck_works(wd_model_open_raw(wd, path, table[i].off, table[i].nbytes, NULL, &m));
		ck_assert_str_eq(wd_model_name(m), "blob");
		ck_assert_uint_eq(wd_model_nr_tensors(m), 1);
		t = wd_model_tensor(m, "data");
		ck_assert_uint_eq(t->dtype, WD_DTYPE_U8);
		ck_assert_uint_eq(t->ndim, 1);
		ck_assert_int_eq(t->shape[0], (int64_t)table[i].expect);
		ck_assert_uint_eq(t->nbytes, table[i].expect);
		ck_assert_uint_eq((uintptr_t)t->data % 64, 0);
		ck_assert_uint_eq(t->file_offset, table[i].off);
		ck_tensor(t, 8);
		wd_model_close(m);
	}
	ck_works(wd_model_open_raw(wd, empty, 0, 0, NULL, &m));
	ck_assert_ptr_null(wd_model_tensor(m, "data")->data);
	wd_model_close(m);
	ck_fails(wd_model_open_raw(wd, path, 300008, 0, NULL, &m), -ERANGE, "300008|300007|blob.bin");
	ck_fails(wd_model_open_raw(wd, path, 300000, 8, NULL, &m), -ERANGE, "300008|300007");
	ck_fails(wd_model_open_raw(wd, path, 1, UINT64_MAX, NULL, &m), -ERANGE, "blob.bin");
	ck_fails(wd_model_open_raw(wd, test_dir, 0, 0, NULL, &m), -EISDIR, test_dir);
	ck_fails(wd_model_open_raw(wd, path, 0, 0, &o, &m), -EINVAL, "variant");
	wd_disconnect(wd);
	free(path);
	free(empty);
}
END_TEST

START_TEST(test_model_open_refuses)
{
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model_options flags = { .size = sizeof(flags), .flags = 2 }, none = { 0 },
				unnamed = { .size = sizeof(unnamed), .name = "" };
	char *missing = data_text("%s/missing.safetensors", test_dir), *bad = data_text("%s/bad.safetensors", test_dir);
	struct wd_model *m = NULL;

	data_write(bad, "<html>not a checkpoint</html>", 29);
	ck_fails(wd_model_open(wd, missing, NULL, &m), -ENOENT, "missing.safetensors");
	ck_fails(wd_model_open(wd, bad, NULL, &m), -EBADMSG, "bad.safetensors");
	ck_fails(wd_model_open(wd, bad, &flags, &m), -EINVAL, "flags");
	ck_fails(wd_model_open(wd, bad, &none, &m), -EINVAL, "size");
	ck_fails(wd_model_open(wd, bad, &unnamed, &m), -EINVAL, "name");
	ck_fails(wd_model_open(NULL, bad, NULL, &m), -EINVAL, "wd is NULL");
	ck_fails(wd_model_open(wd, NULL, NULL, &m), -EINVAL, "path is NULL");
	ck_fails(wd_model_open(wd, bad, NULL, NULL), -EINVAL, "ret is NULL");
	ck_assert_ptr_null(m);
	wd_disconnect(wd);
	free(missing);
	free(bad);
}
END_TEST

/* The one who is refused is told nothing by those who are not: texts are a thread's own. */
static void *error_of_thread(void *arg)
{
	(void)arg;
	return strdup(wd_error());
}

START_TEST(test_errors_are_a_threads_own)
{
	pthread_t thread;
	void *text;

	ck_fails(wd_sync(NULL), -EINVAL, "wd_sync");
	ck_assert_int_eq(pthread_create(&thread, NULL, error_of_thread, NULL), 0);
	ck_assert_int_eq(pthread_join(thread, &text), 0);
	ck_assert_str_eq(text, "");
	ck_fails(0, 0, "wd_sync");
	free(text);
}
END_TEST

START_TEST(test_null_is_refused)
{
	struct wd_stats st = { .size = sizeof(st) };
	struct wd_progress p = { .size = sizeof(p) };
	struct wd_job *job;
	const struct wd_tensor *none = NULL;
	char c;

	ck_fails(wd_model_release(NULL), -EINVAL, "wd_model_release");
	ck_fails(wd_tensor_release(NULL, none), -EINVAL, "wd_tensor_release");
	ck_fails(wd_model_pin(NULL, 1), -EINVAL, "wd_model_pin");
	ck_fails(wd_tensor_read(NULL, none, 0, &c, 1), -EINVAL, "wd_tensor_read");
	ck_fails(wd_populate(NULL, NULL, &job), -EINVAL, "wd_populate");
	ck_fails(wd_stats(NULL, &st), -EINVAL, "wd_stats");
	ck_fails(wd_model_stats(NULL, &st), -EINVAL, "wd_model_stats");
	ck_fails(wd_model_alias(NULL, "a", "b"), -EINVAL, "wd_model_alias");
	ck_fails(wd_job_wait(NULL, 0), -EINVAL, "wd_job_wait");
	ck_fails(wd_job_progress(NULL, &p), -EINVAL, "wd_job_progress");
	ck_fails(wd_job_fd(NULL), -EINVAL, "wd_job_fd");
	wd_job_cancel(NULL);
	wd_job_free(NULL);
	ck_assert_uint_eq(wd_model_nr_tensors(NULL), 0);
	ck_assert_uint_eq(wd_model_nr_files(NULL), 0);
	ck_assert_uint_eq(wd_model_nr_parts(NULL), 0);
	ck_assert_uint_eq(wd_model_nr_metadata(NULL), 0);
	ck_assert_ptr_null(wd_model_name(NULL));
	ck_assert_ptr_null(wd_model_path(NULL));
	ck_assert_ptr_null(wd_fault_reason(NULL));
}
END_TEST

/*
 * ---- sharded sets and pipelines
 */
static char *make_pipeline(const char *name)
{
	static const char *const components[] = { "unet", "vae" };
	char *root = data_text("%s/%s", test_dir, name), *path;

	ck_assert_int_eq(mkdir(root, 0755), 0);
	for (size_t i = 0; i < ARRAY_SIZE(components); i++) {
		char *file = data_text("%s/%s/diffusion_pytorch_model.safetensors", name, components[i]);

		path = data_text("%s/%s", root, components[i]);
		ck_assert_int_eq(mkdir(path, 0755), 0);
		free(path);
		free(make_model(file, 2, 3 * MiB, 100 + i));
		free(file);
	}
	path = data_text("%s/model_index.json", root);
	data_write(path, "{\"_class_name\":\"P\",\"unet\":[\"d\",\"U\"],\"vae\":[\"d\",\"V\"]}",
		   strlen("{\"_class_name\":\"P\",\"unet\":[\"d\",\"U\"],\"vae\":[\"d\",\"V\"]}"));
	free(path);
	return root;
}

START_TEST(test_pipeline)
{
	char *root = make_pipeline("sd");
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model *m = opened(wd, root, NULL), *unet = NULL, *vae = NULL;
	struct wd_stats st = { .size = sizeof(st) };
	const struct wd_tensor *t;

	ck_assert_str_eq(wd_model_name(m), "sd");
	ck_assert_uint_eq(wd_model_nr_parts(m), 2);
	ck_assert_uint_eq(wd_model_nr_files(m), 2);
	ck_assert_uint_eq(wd_model_nr_tensors(m), 4);
	for (size_t i = 0; i < 2; i++) {
		struct wd_model *part = wd_model_part_at(m, i);

		if (!strcmp(wd_model_name(part), "sd/unet"))
			unet = part;
		if (!strcmp(wd_model_name(part), "sd/vae"))
			vae = part;
	}
	ck_assert(unet && vae);
	ck_assert_ptr_null(wd_model_part_at(m, 2));
	ck_assert_ptr_nonnull(strstr(wd_model_file_at(m, 1), "diffusion_pytorch_model"));
	t = wd_model_tensor(m, "vae/t1");
	ck_assert_str_eq(t->name, "vae/t1");
	ck_assert_ptr_eq(t->data, wd_model_tensor(vae, "t1")->data);
	ck_tensor(t, 101);
	ck_tensor(wd_model_tensor(unet, "t0"), 100);
	ck_works(wd_model_stats(m, &st));
	if (_i != WD_WAY_MMAP)
		ck_assert_uint_ge(st.resident_bytes, 6 * MiB);
	ck_works(wd_tensor_release(m, t));
	ck_works(wd_model_release(m));
	ck_works(wd_sync(wd));
	if (_i != WD_WAY_MMAP) {
		ck_works(wd_model_stats(m, &st));
		ck_assert_uint_eq(st.resident_bytes, 0);
	}
	wd_model_ref(vae);
	wd_model_close(m);
	t = wd_model_tensor(vae, "t1");
	ck_tensor(t, 101);
	ck_assert_str_eq(wd_model_name(vae), "sd/vae");
	wd_model_close(vae);
	wd_disconnect(wd);
	free(root);
}
END_TEST

static char *make_shards(void)
{
	static const char index[] =
		"{\"metadata\":{},\"weight_map\":{\"t0\":\"s1.safetensors\",\"u0\":\"s2.safetensors\"}}";
	struct data_tensor a = { .name = "t0", .dtype = "U8", .ndim = 1, .shape = { 3 * (int64_t)MiB } };
	struct data_tensor b = { .name = "u0", .dtype = "U8", .ndim = 1, .shape = { 3 * (int64_t)MiB } };
	char *folder = data_text("%s/set", test_dir), *path;

	ck_assert_int_eq(mkdir(folder, 0755), 0);
	path = data_text("%s/s1.safetensors", folder);
	(void)data_write_safetensors(path, &a, 1, &(struct data_opts){ .seed = 31 });
	free(path);
	path = data_text("%s/s2.safetensors", folder);
	(void)data_write_safetensors(path, &b, 1, &(struct data_opts){ .seed = 32 });
	free(path);
	path = data_text("%s/model.safetensors.index.json", folder);
	data_write(path, index, sizeof(index) - 1);
	free(folder);
	return path;
}

START_TEST(test_shards)
{
	char *path = make_shards();
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model *m = opened(wd, path, NULL);
	struct wd_stats st = { .size = sizeof(st) };

	ck_assert_uint_eq(wd_model_nr_files(m), 2);
	ck_assert_uint_eq(wd_model_nr_tensors(m), 2);
	for (int round = 0; round < 2; round++) {
		ck_tensor(wd_model_tensor(m, "t0"), 31);
		ck_tensor(wd_model_tensor(m, "u0"), 32);
		ck_works(wd_model_release(m));
		ck_works(wd_sync(wd));
	}
	if (_i != WD_WAY_MMAP) {
		/* the model came back once, though two files did */
		ck_works(wd_model_stats(m, &st));
		ck_assert_uint_eq(st.reloads, 1);
		ck_works(wd_stats(wd, &st));
		ck_assert_uint_eq(st.reloads, 1);
		wd_model_close(m);
		ck_works(wd_stats(wd, &st));
		ck_assert_uint_eq(st.reloads, 1);
	} else {
		wd_model_close(m);
	}
	wd_disconnect(wd);
	free(path);
}
END_TEST

/*
 * ---- memory
 */
START_TEST(test_release_and_stats)
{
	char *path = make_model("release.safetensors", 4, 8 * MiB, 41);
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model *m = opened(wd, path, NULL);
	struct wd_stats st = { .size = sizeof(st) };
	const struct wd_tensor *t = wd_model_tensor(m, "t2");
	uint64_t before;

	ck_tensor(t, 41);
	if (_i == WD_WAY_MMAP) {
		ck_works(wd_tensor_release(m, t));
		ck_works(wd_model_release(m));
		ck_works(wd_sync(wd));
		ck_tensor(t, 41);
	} else {
		ck_works(wd_model_stats(m, &st));
		before = st.resident_bytes;
		ck_assert_uint_ge(before, 8 * MiB);
		ck_assert_uint_le(before, 8 * MiB + 2 * extent());
		ck_assert_uint_ge(st.read_bytes, 8 * MiB);
		ck_assert_uint_gt(st.faults, 0);
		ck_assert_uint_ge(arena_bytes(), 8 * MiB);
		/* its neighbours' extents stay: t1 was touched, so the one that it shares with t2 is in use */
		ck_assert_uint_eq(*(unsigned char *)wd_model_tensor(m, "t1")->data == 0, 0 == 1);
		ck_works(wd_tensor_release(m, t));
		ck_works(wd_sync(wd));
		ck_works(wd_model_stats(m, &st));
		ck_assert_uint_le(st.resident_bytes, 8 * MiB + 2 * extent());
		ck_works(wd_model_release(m));
		ck_works(wd_sync(wd));
		ck_works(wd_stats(wd, &st));
		ck_assert_uint_eq(st.resident_bytes, 0);
		ck_assert_uint_ge(st.peak_bytes, 8 * MiB);
		ck_assert_uint_lt(arena_bytes(), extent());
		ck_tensor(t, 41);
		ck_works(wd_model_stats(m, &st));
		ck_assert_uint_eq(st.reloads, 1);
	}
	ck_fails(wd_tensor_release(m, (const struct wd_tensor *)((const char *)t + 8)), -EINVAL, "release");
	wd_model_close(m);
	wd_disconnect(wd);
	free(path);
}
END_TEST

START_TEST(test_writes_stay)
{
	char *path = make_model("writes.safetensors", 1, 8 * MiB, 42);
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model *m = opened(wd, path, NULL);
	struct wd_stats st = { .size = sizeof(st) };
	const struct wd_tensor *t = wd_model_tensor_at(m, 0);
	unsigned char *p = t->data, was = p[3 * MiB], read;

	p[3 * MiB] = (unsigned char)(was + 1);
	ck_works(wd_model_release(m));
	ck_works(wd_sync(wd));
	ck_assert_uint_eq(p[3 * MiB], (unsigned char)(was + 1));
	ck_works(wd_model_stats(m, &st));
	ck_assert_uint_gt(st.written_bytes, 0);
	ck_works(wd_tensor_read(m, t, 3 * MiB, &read, 1)); /* the file's, not ours */
	ck_assert_uint_eq(read, was);
	p[3 * MiB] = was;
	ck_tensor(t, 42);
	wd_model_close(m);
	wd_disconnect(wd);
	free(path);
}
END_TEST

START_TEST(test_read)
{
	char *path = make_model("read.safetensors", 3, 70001, 43),
	     *other = make_model("stranger.safetensors", 1, 10, 1);
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model *m = opened(wd, path, NULL), *stranger = opened(wd, other, NULL);
	struct wd_stats st = { .size = sizeof(st) };
	const struct wd_tensor *t = wd_model_tensor(m, "t1");
	cleanup_free unsigned char *buf = malloc(70001);
	cleanup_close int fd = open(path, O_WRONLY | O_CLOEXEC);

	ck_works(wd_tensor_read(m, t, 0, buf, 70001));
	ck_assert_int_eq(data_check(buf, 70001, 43, t->file_offset), -1);
	ck_works(wd_tensor_read(m, t, 7, buf, 100));
	ck_assert_int_eq(data_check(buf, 100, 43, t->file_offset + 7), -1);
	ck_works(wd_tensor_read(m, t, 70001, NULL, 0));
	ck_fails(wd_tensor_read(m, t, 70001, buf, 1), -ERANGE, "t1|70001|read");
	ck_fails(wd_tensor_read(m, t, 1, buf, SIZE_MAX), -ERANGE, "t1");
	ck_fails(wd_tensor_read(m, t, UINT64_MAX, buf, 2), -ERANGE, "t1");
	ck_fails(wd_tensor_read(m, t, 0, NULL, 2), -EINVAL, "buffer");
	ck_fails(wd_tensor_read(m, wd_model_tensor_at(stranger, 0), 0, buf, 1), -EINVAL, "'read'");
	if (_i != WD_WAY_MMAP) {
		ck_works(wd_model_stats(m, &st));
		ck_assert_uint_eq(st.resident_bytes, 0); /* pages nothing */
	}
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(pwrite(fd, "x", 1, (off_t)t->file_offset), 1);
	/* time stamps are coarse: make sure that this one differs */
	ck_assert_int_eq(futimens(fd, (struct timespec[]){ { .tv_nsec = UTIME_NOW }, { .tv_sec = 5 } }), 0);
	ck_fails(wd_tensor_read(m, t, 0, buf, 10), -ESTALE, "read.safetensors|t1|changed");
	wd_model_close(m);
	wd_model_close(stranger);
	wd_disconnect(wd);
	free(path);
	free(other);
}
END_TEST

START_TEST(test_populate)
{
	char *path = make_model("populate.safetensors", 4, 5 * MiB, 44);
	struct wd *wd = connected(_i, 0, 0);
	struct wd_model *m = opened(wd, path, NULL);
	struct wd_stats st = { .size = sizeof(st) };
	struct wd_progress p = { .size = sizeof(p) };
	const struct wd_tensor *t = wd_model_tensor(m, "t2");
	struct pollfd pfd = { .events = POLLIN };
	struct wd_job *job;
	uint64_t faults;

	ck_works(wd_populate(m, t, &job));
	ck_works(wd_job_wait(job, 20000));
	ck_works(wd_job_progress(job, &p));
	ck_assert_int_eq(p.state, 1);
	ck_assert_uint_eq(p.done_bytes, p.total_bytes);
	ck_assert_uint_ge(p.total_bytes, 5 * MiB);
	wd_job_free(job);
	ck_works(wd_model_stats(m, &st));
	faults = st.faults;
	ck_tensor(t, 44);
	ck_works(wd_model_stats(m, &st));
	ck_assert_uint_eq(st.faults, faults);

	ck_works(wd_populate(m, NULL, &job));
	pfd.fd = wd_job_fd(job);
	ck_assert_int_ge(pfd.fd, 0);
	ck_assert_int_eq(poll(&pfd, 1, 20000), 1);
	ck_works(wd_job_wait(job, 0));
	wd_job_cancel(job); /* too late: it stays done */
	ck_works(wd_job_wait(job, 0));
	wd_model_close(m); /* the job keeps it */
	wd_job_free(job);

	m = opened(wd, path, NULL);
	ck_works(wd_populate(m, NULL, &job));
	wd_job_cancel(job);
	if (wd_job_wait(job, 20000) < 0)
		ck_fails(wd_job_wait(job, 0), -ECANCELED, "cancel|populate");
	wd_job_free(job);
	ck_works(wd_populate(m, NULL, &job));
	wd_job_free(job); /* also while it runs */
	ck_tensor(wd_model_tensor(m, "t3"), 44);
	ck_fails(wd_populate(m, (const struct wd_tensor *)&p, &job), -EINVAL, "populate");
	wd_model_close(m);
	wd_disconnect(wd);
	free(path);
}
END_TEST

START_TEST(test_populate_without_room)
{
	char *path = make_model("large.safetensors", 1, 32 * MiB, 45);
	struct wd *wd = connected(_i, 8 * MiB, 0);
	struct wd_model *m;
	struct wd_job *job;

	m = opened(wd, path, NULL);
	ck_works(wd_model_pin(m, 1));
	ck_works(wd_populate(m, NULL, &job));
	ck_fails(wd_job_wait(job, 20000), -ENOSPC, "budget|large");
	wd_job_free(job);
	wd_model_close(m);
	wd_disconnect(wd);
	free(path);
}
END_TEST

/*
 * ---- fork
 */
struct forked {
	struct wd *wd;
	struct wd_model *m;
	uint32_t way;
	bool broken;
};

static int child_uses(void *arg)
{
	struct forked *f = arg;
	const struct wd_tensor *t = wd_model_tensor(f->m, "t1");
	struct wd_stats st = { .size = sizeof(st) };
	struct wd *own = NULL;

	if (data_check(t->data, t->nbytes, 46, t->file_offset) != -1)
		return 1;
	if (wd_way(f->wd) != (f->way == WD_WAY_DAEMON ? WD_WAY_DAEMON : WD_WAY_MMAP))
		return 2;
	if (f->broken) {
		if (wd_stats(f->wd, &st) != -ENOTRECOVERABLE || wd_stage_begin(f->wd, "x") != -ENOTRECOVERABLE ||
		    wd_model_release(f->m) != -ENOTRECOVERABLE || wd_sync(f->wd) != -ENOTRECOVERABLE ||
		    !strstr(wd_error(), "fork"))
			return 3;
		wd_model_close(f->m);
		wd_disconnect(f->wd);
		if (data_check(t->data, t->nbytes, 46, t->file_offset) != -1)
			return 4;
	} else {
		struct wd_model *again = NULL;

		if (wd_stats(f->wd, &st) < 0 || wd_stage_begin(f->wd, "x") < 0 || wd_model_release(f->m) < 0 ||
		    wd_sync(f->wd) < 0)
			return 5;
		if (wd_model_open(f->wd, wd_model_path(f->m), NULL, &again) < 0 ||
		    data_check(wd_model_tensor(again, "t0")->data, 3 * MiB, 46,
			       wd_model_tensor(again, "t0")->file_offset) != -1)
			return 6;
		wd_model_close(again);
		wd_model_close(f->m);
		wd_disconnect(f->wd);
	}
	return wd_connect(NULL, &own) < 0 ? 7 : 0;
}

static void *hold_lock(void *arg)
{
	struct forked *f = ((void **)arg)[0];

	(void)pthread_mutex_lock(&f->wd->lock);
	(void)sem_post(((sem_t **)arg)[1]);
	must_wait(((sem_t **)arg)[2]);
	(void)pthread_mutex_unlock(&f->wd->lock);
	return NULL;
}

START_TEST(test_fork)
{
	char *path = make_model("fork.safetensors", 2, 3 * MiB, 46);
	struct forked f = { .wd = connected(_i, 0, 0), .way = (uint32_t)_i };
	sem_t held, done;
	void *arg[] = { &f, &held, &done };
	pthread_t thread;
	int r;

	f.m = opened(f.wd, path, NULL);
	ck_assert_int_eq(
		data_check(wd_model_tensor(f.m, "t0")->data, 1000, 46, wd_model_tensor(f.m, "t0")->file_offset), -1);
	r = in_child(child_uses, &f);
	ck_assert_int_eq(r, 0);

	/* another thread is inside of a call */
	(void)sem_init(&held, 0, 0);
	(void)sem_init(&done, 0, 0);
	ck_assert_int_eq(pthread_create(&thread, NULL, hold_lock, arg), 0);
	must_wait(&held);
	f.broken = true;
	r = in_child(child_uses, &f);
	(void)sem_post(&done);
	ck_assert_int_eq(pthread_join(thread, NULL), 0);
	ck_assert_int_eq(r, 0);

	ck_tensor(wd_model_tensor(f.m, "t1"), 46);
	wd_model_close(f.m);
	wd_disconnect(f.wd);
	free(path);
}
END_TEST

/* Opening, looking, releasing and closing from several threads at once. */
struct storm {
	struct wd *wd;
	char *paths[3];
	uint64_t seed;
};

static void *storm(void *arg)
{
	struct storm *s = arg;
	uint64_t state = s->seed;

	for (int i = 0; i < 60; i++) {
		size_t k = rnd(&state) % 3;
		struct wd_model *m = NULL;
		const struct wd_tensor *t;

		ck_works(wd_model_open(s->wd, s->paths[k], NULL, &m));
		t = wd_model_tensor_at(m, rnd(&state) % 3);
		ck_tensor(t, 50 + k);
		if (rnd(&state) % 2)
			ck_works(wd_model_release(m));
		if (rnd(&state) % 8 == 0)
			ck_works(wd_stage_begin(s->wd, "storm"));
		(void)wd_fault_reason(t->data);
		ck_tensor(t, 50 + k);
		wd_model_close(m);
	}
	return NULL;
}

START_TEST(test_threads)
{
	struct storm s[4] = { { .wd = connected(_i, 0, 0) } };
	pthread_t threads[ARRAY_SIZE(s)];

	for (size_t k = 0; k < 3; k++) {
		char *name = data_text("storm%zu.safetensors", k);

		s[0].paths[k] = make_model(name, 3, MiB + 77, 50 + k);
		free(name);
	}
	for (size_t i = 0; i < ARRAY_SIZE(s); i++) {
		s[i] = s[0];
		s[i].seed = i + 1;
		ck_assert_int_eq(pthread_create(&threads[i], NULL, storm, &s[i]), 0);
	}
	for (size_t i = 0; i < ARRAY_SIZE(s); i++)
		ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
	wd_disconnect(s[0].wd);
	for (size_t k = 0; k < 3; k++)
		free(s[0].paths[k]);
}
END_TEST

/*
 * ---- main
 */
int main(void)
{
	Suite *s = suite_create("api");
	TCase *tc = new_case(s, "layout", 20);

	tcase_add_loop_test(tc, test_layout_follows_the_offset, 0, 64);
	tcase_add_loop_test(tc, test_layout_copies_many, 0, 2);
	tcase_add_loop_test(tc, test_layout_any, 0, 4);

	tc = folder_case(s, "connect", 30);
	tcase_add_test(tc, test_versions);
	tcase_add_test(tc, test_connect_refuses);
	tcase_add_test(tc, test_connect_obeys_the_environment);
	add_ways(tc, test_connect_leaves_nothing, ALL_WAYS);
	add_ways(tc, test_budget, LOCAL_WAYS);
	add_ways(tc, test_stats_size, ALL_WAYS);
	tcase_add_test(tc, test_errors_are_a_threads_own);
	tcase_add_test(tc, test_null_is_refused);

	tc = folder_case(s, "models", 60);
	add_ways(tc, test_model_tensors, ALL_WAYS);
	add_ways(tc, test_model_misaligned, ALL_WAYS);
	add_ways(tc, test_model_many_tensors, ALL_WAYS);
	add_ways(tc, test_model_names, ALL_WAYS);
	add_ways(tc, test_model_refs, ALL_WAYS);
	add_ways(tc, test_model_alias, ALL_WAYS);
	add_ways(tc, test_model_raw, ALL_WAYS);
	add_ways(tc, test_model_open_refuses, ALL_WAYS);
	add_ways(tc, test_pipeline, ALL_WAYS);
	add_ways(tc, test_shards, ALL_WAYS);

	tc = folder_case(s, "memory", 60);
	add_ways(tc, test_release_and_stats, LOCAL_WAYS);
	add_ways(tc, test_writes_stay, ALL_WAYS);
	add_ways(tc, test_read, ALL_WAYS);
	add_ways(tc, test_populate, ALL_WAYS);
	add_ways(tc, test_populate_without_room, PAGED_WAYS); /* way mmap has no budget */
	add_ways(tc, test_fork, ALL_WAYS);
	add_ways(tc, test_threads, ALL_WAYS);
	return run_suite(s);
}
