/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans, plan files, stages, strict mode, and the handler that says why a touch failed. Each test runs in every way
 * that this machine has. What ends a process, or needs its signal handlers, runs in a child that connects by itself
 * (a child of a connected process is another case: test_api.c).
 */
#include <check.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "lib/stage.h"
#include "tests/api_util.h"

#define MODEL_BYTES (8 * MiB)

/* A model of one tensor "w" of MODEL_BYTES; the seed is its name's first letter. */
static char *model_file(const char *name)
{
	struct data_tensor t = { .name = "w", .dtype = "U8", .ndim = 1, .shape = { (int64_t)MODEL_BYTES } };
	char *path = data_text("%s/%s.safetensors", test_dir, name);

	(void)data_write_safetensors(path, &t, 1, &(struct data_opts){ .seed = (uint64_t)*name });
	return path;
}

static struct wd_model *made(struct wd *wd, const char *name)
{
	cleanup_free char *path = model_file(name);

	return opened(wd, path, NULL);
}

static int64_t wrong(struct wd_model *m)
{
	const struct wd_tensor *t = wd_model_tensor_at(m, 0);
	const char *name = strrchr(wd_model_path(m), '/') + 1;

	return data_check(t->data, t->nbytes, (uint64_t)*name, t->file_offset);
}
#define ck_right(m) ck_assert_int_eq(wrong(m), -1)

/* A mark waits 200 ms at most for its drops; on a busy machine reads that are under way may take longer. In way mmap
 * the page cache keeps what it likes: nothing can be said about it. */
static void gone(int line, int way, struct wd_model *m)
{
	ck_works(wd_sync(m->wd));
	if (way != WD_WAY_MMAP)
		ck_assert_msg(model_stats_of(m).resident_bytes == 0, "line %d: %llu bytes are there", line,
			      (unsigned long long)model_stats_of(m).resident_bytes);
}
#define ck_gone(way, m) gone(__LINE__, way, m)

static void ck_there(int way, struct wd_model *m)
{
	if (way != WD_WAY_MMAP)
		ck_assert_uint_ge(model_stats_of(m).resident_bytes, MODEL_BYTES);
}

/* What is read ahead comes by itself, in its time. */
static void ck_comes(int way, struct wd_model *m)
{
	uint64_t until = now_ms() + 20000;

	while (way != WD_WAY_MMAP && model_stats_of(m).resident_bytes < MODEL_BYTES) {
		ck_assert_uint_lt(now_ms(), until);
		(void)sched_yield();
	}
}

/*
 * ---- plans
 */
START_TEST(test_entry_matches)
{
	static const struct {
		const char *entry, *model;
		int match;
	} table[] = {
		{ "unet", "unet", 2 },       { "unet", "unet2", 0 },     { "sd", "sd/unet", 2 },
		{ "sd/unet", "sd/unet", 2 }, { "unet", "sd/unet", 1 },   { "net", "sd/unet", 0 },
		{ "sd", "sdxl/unet", 0 },    { "sd/un", "sd/unet", 0 },  { "a/unet", "b/a/unet", 1 },
		{ "b/a", "b/a/unet", 2 },    { "unet", "net", 0 },       { "/unet", "sd/unet", 0 },
		{ "sd/unet", "unet", 0 },    { "unet/x", "sd/unet", 0 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(table); i++)
		ck_assert_msg(plan_entry_matches(table[i].entry, table[i].model) == table[i].match, "%s %s",
			      table[i].entry, table[i].model);
}
END_TEST

START_TEST(test_plan_builds)
{
	struct wd_plan *p, *copy;
	char name[16];

	ck_works(wd_plan_new(&p));
	ck_works(wd_plan_add(p, "encode", "clip"));
	ck_works(wd_plan_add(p, "denoise", "unet"));
	ck_works(wd_plan_add(p, "encode", "t5"));
	ck_works(wd_plan_add(p, "encode", "clip")); /* once is enough */
	ck_works(wd_plan_add(p, "nothing", NULL));
	ck_works(wd_plan_pin(p, "vae"));
	ck_works(wd_plan_pin(p, "vae"));
	ck_fails(wd_plan_new(NULL), -EINVAL, "ret");
	ck_fails(wd_plan_add(NULL, "a", "b"), -EINVAL, "plan");
	ck_fails(wd_plan_add(p, NULL, "b"), -EINVAL, "stage");
	ck_fails(wd_plan_add(p, "", "b"), -EINVAL, "stage");
	ck_fails(wd_plan_add(p, "a", ""), -EINVAL, "model");
	ck_fails(wd_plan_pin(p, ""), -EINVAL, "model");
	ck_fails(wd_plan_pin(p, NULL), -EINVAL, "model");
	copy = plan_copy(p);
	for (int i = 0; i < 1000; i++) {
		(void)snprintf(name, sizeof(name), "s%d", i);
		ck_works(wd_plan_add(p, name, name));
	}
	wd_plan_free(p);
	ck_assert_uint_eq(copy->nr_stages, 3);
	ck_assert_str_eq(copy->stages[0].name, "encode");
	ck_assert_uint_eq(copy->stages[0].nr_models, 2);
	ck_assert_str_eq(copy->stages[0].models[1], "t5");
	ck_assert_uint_eq(copy->stages[2].nr_models, 0);
	ck_assert_uint_eq(copy->nr_pinned, 1);
	wd_plan_free(copy);
	wd_plan_free(NULL);
}
END_TEST

START_TEST(test_plan_file)
{
	static const char good[] =
		"{\"weightd_plan\": 1,\n \"stages\": [{\"name\": \"encode\", \"models\": [\"clip\", \"t5\"]},\n"
		"{\"models\":[],\"name\":\"idle \\u00e9 \\\"x\\\"\"}],\n \"pinned\": [\"vae\"]}\n";
	char *path = data_text("%s/plan.json", test_dir);
	struct wd_plan *p;

	data_write(path, good, sizeof(good) - 1);
	ck_works(wd_plan_load(path, &p));
	ck_assert_uint_eq(p->nr_stages, 2);
	ck_assert_str_eq(p->stages[0].models[1], "t5");
	ck_assert_str_eq(p->stages[1].name, "idle \xC3\xA9 \"x\"");
	ck_assert_uint_eq(p->stages[1].nr_models, 0);
	ck_assert_str_eq(p->pinned[0], "vae");
	wd_plan_free(p);
	data_write(path, "{\"stages\": [], \"weightd_plan\": 1}", 33);
	ck_works(wd_plan_load(path, &p));
	wd_plan_free(p);

	for (size_t cut = 0; cut + 2 < sizeof(good) - 1; cut++) {
		data_write(path, good, cut);
		ck_fails(wd_plan_load(path, &p), -EBADMSG, "line |plan.json");
	}
	ck_fails(wd_plan_load(test_dir, &p), -EISDIR, test_dir);
	ck_assert_int_eq(unlink(path), 0);
	ck_fails(wd_plan_load(path, &p), -ENOENT, "plan.json");
	ck_fails(wd_plan_load(NULL, &p), -EINVAL, "path");
	ck_fails(wd_plan_load(path, NULL), -EINVAL, "ret");
	free(path);
}
END_TEST

static const struct {
	const char *text, *words;
} bad_plans[] = {
	{ "", "line 1: no JSON" },
	{ "[]", "line 1: |no plan" },
	{ "1", "line 1: |no plan" },
	{ "{}", "line 1: |no plan" },
	{ "{\"stages\": []}", "no plan" },
	{ "{\"weightd_plan\": 1}", "lacks its stages" },
	{ "{\n\"stages\": [],\n\"weightd_plan\": 2}", "line 3: |version|must be 1" },
	{ "{\"weightd_plan\": \"1\", \"stages\": []}", "version" },
	{ "{\"weightd_plan\": 1.0, \"stages\": []}", "version" },
	{ "{\"weightd_plan\": true, \"stages\": []}", "version" },
	{ "{\"weightd_plan\": 1, \"stages\": {}}", "line 1: stages must be a list" },
	{ "{\"weightd_plan\": 1,\n\n\"stages\": [], \"more\": 1}", "line 3: |no 'more'" },
	{ "{\"weightd_plan\": 1, \"stages\": [\n1]}", "line 2: |must be an object" },
	{ "{\"weightd_plan\": 1, \"stages\": [\n{}]}", "line 2: |lacks its name" },
	{ "{\"weightd_plan\": 1, \"stages\": [\n{\"name\": \"a\"}]}", "line 2: |lacks its models" },
	{ "{\"weightd_plan\": 1, \"stages\": [\n{\"name\":\n 5, \"models\": []}]}", "line 2: |name must be" },
	{ "{\"weightd_plan\": 1, \"stages\": [{\"name\": \"\", \"models\": []}]}", "name must be" },
	{ "{\"weightd_plan\": 1, \"stages\": [{\"name\": \"a\", \"models\": []},\n\n{\"name\": \"a\", \"models\": []}]}",
	  "line 3: |stage 'a' already" },
	{ "{\"weightd_plan\": 1, \"stages\": [{\"name\": \"a\",\n \"model\": \"b\"}]}", "line 2: |no 'model'" },
	{ "{\"weightd_plan\": 1, \"stages\": [{\"name\": \"a\",\n \"models\": \"b\"}]}",
	  "line 2: models must be a list" },
	{ "{\"weightd_plan\": 1, \"stages\": [{\"name\": \"a[{\\\"\",\n \"models\": [\"b\",\n\n [\"c\"]]}]}",
	  "line 4: models: each" },
	{ "{\"weightd_plan\": 1, \"stages\": [{\"name\": \"a\", \"models\": [\"b\",\n\"c\", \"b\"]}]}",
	  "line 2: |'b' is listed twice" },
	{ "{\"weightd_plan\": 1, \"stages\": [], \"pinned\":\n{}}", "line 1: pinned must be a list" },
	{ "{\"weightd_plan\": 1, \"stages\": [], \"pinned\": [\n\"a\",\n\"\"]}", "line 3: pinned: each" },
	{ "{\"weightd_plan\": 1, \"weightd_plan\": 1, \"stages\": []}", "line 1: no JSON: duplicate" },
	{ "{\"weightd_plan\": 1, \"stages\": []} x", "line 1: no JSON" },
	{ "{\"weightd_plan\": 1, \"stages\": [{\"name\": \"a\\u0000b\", \"models\": []}]}", "line 1: no JSON" },
	{ "{\"weightd_plan\": 1, \"stages\": [{\"name\": \"a\x1b\", \"models\": []}]}", "line 1: no JSON" },
	{ "{\"weightd_plan\": 1, \"stages\": [\n{\"models\": [{\"x\": [1, \"}\", -2.5e3, null, true]}],\n \"name\": 1}]}",
	  "line 3: name" },
};

START_TEST(test_plan_file_refuses)
{
	char *path = data_text("%s/bad.json", test_dir);
	struct wd_plan *p = NULL;

	data_write(path, bad_plans[_i].text, strlen(bad_plans[_i].text));
	ck_fails(wd_plan_load(path, &p), -EBADMSG, bad_plans[_i].words);
	ck_fails(-EBADMSG, -EBADMSG, "bad.json");
	ck_assert_ptr_null(p);
	free(path);
}
END_TEST

/* Lists of "stage:model,model;..." */
static void use_plan(struct wd *wd, const char *text, const char *pinned)
{
	char *copy = strdup(text), *rest = copy, *stage, *model;
	struct wd_plan *p;

	ck_works(wd_plan_new(&p));
	while ((stage = strsep(&rest, ";"))) {
		char *models = stage, *name = strsep(&models, ":");

		ck_works(wd_plan_add(p, name, NULL));
		while (models && *models && (model = strsep(&models, ",")))
			ck_works(wd_plan_add(p, name, model));
	}
	if (pinned)
		ck_works(wd_plan_pin(p, pinned));
	ck_works(wd_set_plan(wd, p));
	wd_plan_free(p); /* a copy is in use */
	free(copy);
}

/*
 * ---- stages with a plan
 */
START_TEST(test_plan_drops_what_it_does_not_list)
{
	int way = _i;
	struct wd *wd = connected(way, 0, 0);
	struct wd_model *a = made(wd, "a"), *b = made(wd, "b"), *c = made(wd, "c"), *d = made(wd, "d");
	struct wd_stats st = { .size = sizeof(st) };

	use_plan(wd, "encode:a;denoise:b,d;decode:c", NULL);
	ck_assert_ptr_null(wd_stage_name(wd));
	ck_fails(wd_stage_end(wd), -ESRCH, "no stage");
	ck_right(a);
	ck_right(c);
	ck_works(wd_stage_begin(wd, "encode"));
	ck_assert_str_eq(wd_stage_name(wd), "encode");
	ck_gone(way, c);
	ck_there(way, a);
	ck_works(wd_stage_begin(wd, "denoise"));
	ck_assert_str_eq(wd_stage_name(wd), "denoise");
	ck_gone(way, a);
	ck_comes(way, b); /* read ahead, untouched */
	ck_comes(way, d);
	if (way != WD_WAY_MMAP) {
		ck_assert_uint_lt(arena_bytes(), 2 * MODEL_BYTES + 4 * extent());
		ck_assert_uint_eq(model_stats_of(a).reloads, 0);
		ck_assert_uint_eq(model_stats_of(a).dropped_bytes >= MODEL_BYTES, 1);
	}
	ck_right(b);
	ck_works(wd_stage_end(wd));
	ck_assert_ptr_null(wd_stage_name(wd));
	ck_there(way, b); /* the end drops nothing: only the next beginning knows */
	ck_works(wd_stage_begin(wd, "encode"));
	ck_gone(way, b);
	ck_comes(way, a);
	ck_right(a);
	if (way != WD_WAY_MMAP) {
		ck_assert_uint_eq(model_stats_of(a).reloads, 1);
		ck_works(wd_stats(wd, &st));
		ck_assert_uint_eq(st.reloads, 1);
		ck_assert_uint_ge(st.reload_bytes, MODEL_BYTES);
	}
	ck_works(wd_stage_begin(wd, "encode")); /* names may repeat */
	ck_there(way, a);
	wd_model_close(a);
	wd_model_close(b);
	wd_model_close(c);
	wd_model_close(d);
	wd_disconnect(wd);
}
END_TEST

START_TEST(test_pinned_stay)
{
	int way = _i;
	struct wd *wd = connected(way, 0, 0);
	struct wd_model *a = made(wd, "a"), *b = made(wd, "b"), *c = made(wd, "c");

	use_plan(wd, "one:a;two:", "b");
	ck_works(wd_model_pin(c, 1));
	ck_right(a);
	ck_right(b);
	ck_right(c);
	ck_works(wd_stage_begin(wd, "two"));
	ck_gone(way, a);
	ck_there(way, b);
	ck_there(way, c);
	ck_works(wd_model_pin(c, 0));
	ck_there(way, c); /* until the next mark */
	ck_works(wd_stage_begin(wd, "two"));
	ck_gone(way, c);
	ck_there(way, b);
	use_plan(wd, "two:", NULL); /* without the pin */
	ck_works(wd_stage_begin(wd, "two"));
	ck_gone(way, b);
	ck_right(b);
	ck_works(wd_model_pin(b, 1));
	ck_works(wd_model_release(b)); /* whoever asks for it gets it */
	ck_works(wd_sync(wd));
	ck_gone(way, b);
	wd_model_close(a);
	wd_model_close(b);
	wd_model_close(c);
	wd_disconnect(wd);
}
END_TEST

START_TEST(test_unknown_names_change_nothing)
{
	int way = _i;
	struct wd *wd = connected(way, 0, 0);
	struct wd_model *a = made(wd, "a"), *b = made(wd, "b"), *c;

	use_plan(wd, "one:a;two:b,late", NULL);
	ck_works(wd_stage_begin(wd, "one"));
	ck_right(a);
	ck_fails(wd_stage_begin(wd, "three"), -ENOENT, "'three'|'one'|'two'");
	ck_assert_str_eq(wd_stage_name(wd), "one");
	ck_fails(wd_stage_begin(wd, "two"), -ENOENT, "'two'|'late'|'a'|'b'");
	ck_assert_str_eq(wd_stage_name(wd), "one");
	ck_there(way, a);
	c = made(wd, "late");
	ck_works(wd_stage_begin(wd, "two"));
	ck_gone(way, a);
	use_plan(wd, "one:a", "nobody");
	ck_fails(wd_stage_begin(wd, "one"), -ENOENT, "pinned|'nobody'");
	ck_assert_str_eq(wd_stage_name(wd), "two");
	ck_fails(wd_stage_begin(wd, ""), -EINVAL, "empty");
	ck_fails(wd_stage_begin(wd, NULL), -EINVAL, "name");
	ck_fails(wd_stage_begin(NULL, "one"), -EINVAL, "wd");
	ck_fails(wd_stage_end(NULL), -EINVAL, "wd");
	ck_fails(wd_set_plan(NULL, NULL), -EINVAL, "wd");
	ck_assert_ptr_null(wd_stage_name(NULL));
	wd_model_close(a);
	wd_model_close(b);
	wd_model_close(c);
	wd_disconnect(wd);
}
END_TEST

START_TEST(test_names_of_parts)
{
	int way = _i;
	struct wd *wd = connected(way, 0, 0);
	cleanup_free char *a = model_file("a"), *b = model_file("b"), *c = model_file("c");
	struct wd_model *m[] = { opened(wd, a, "sd/unet"), opened(wd, b, "sd/vae"), opened(wd, c, "xl/unet") };

	use_plan(wd, "all:sd;one:vae;two:unet;three:xl/unet", NULL);
	for (size_t i = 0; i < 3; i++)
		ck_right(m[i]);
	ck_works(wd_stage_begin(wd, "all"));
	ck_there(way, m[0]);
	ck_there(way, m[1]);
	ck_gone(way, m[2]);
	ck_works(wd_stage_begin(wd, "one"));
	ck_gone(way, m[0]);
	ck_there(way, m[1]);
	ck_fails(wd_stage_begin(wd, "two"), -ENOENT, "'unet'|'sd/unet'|'xl/unet'|whole name");
	ck_there(way, m[1]);
	ck_works(wd_stage_begin(wd, "three"));
	ck_comes(way, m[2]);
	ck_gone(way, m[1]);
	wd_model_close(m[0]);
	ck_works(wd_stage_begin(wd, "two")); /* only one is left */
	for (size_t i = 1; i < 3; i++)
		wd_model_close(m[i]);
	wd_disconnect(wd);
}
END_TEST

/* Several models behind one view: it is dropped only if none of them is listed. */
START_TEST(test_shared_file)
{
	int way = _i;
	struct wd *wd = connected(way, 0, 0);
	cleanup_free char *path = model_file("a");
	struct wd_model *x = opened(wd, path, "x"), *y = opened(wd, path, "y"), *y2 = opened(wd, path, "y");

	use_plan(wd, "one:x;two:y;three:", NULL);
	ck_works(wd_stage_begin(wd, "one"));
	ck_right(y);
	ck_works(wd_stage_begin(wd, "two"));
	ck_there(way, x);
	wd_model_close(y);
	ck_works(wd_stage_begin(wd, "two"));
	ck_there(way, x);
	ck_works(wd_model_pin(y2, 1));
	ck_works(wd_model_release(x)); /* another's pin holds */
	ck_works(wd_sync(wd));
	ck_there(way, x);
	ck_works(wd_stage_begin(wd, "three"));
	ck_there(way, x);
	wd_model_close(y2);
	ck_works(wd_stage_begin(wd, "three"));
	ck_gone(way, x);
	ck_right(x);
	wd_model_close(x);
	wd_disconnect(wd);
}
END_TEST

/* A written page survives every mark. */
START_TEST(test_writes_survive_stages)
{
	int way = _i;
	struct wd *wd = connected(way, 0, 0);
	struct wd_model *a = made(wd, "a");
	unsigned char *p = wd_model_tensor_at(a, 0)->data, was = p[5 * MiB];

	p[5 * MiB] = (unsigned char)~was;
	use_plan(wd, "one:;two:a", NULL);
	for (int i = 0; i < 3; i++) {
		ck_works(wd_stage_begin(wd, "one"));
		ck_gone(way, a);
		ck_assert_uint_eq(p[5 * MiB], (unsigned char)~was);
		ck_works(wd_stage_begin(wd, "two"));
	}
	ck_works(wd_set_plan(wd, NULL));
	for (int i = 0; i < 3; i++)
		ck_works(wd_stage_begin(wd, "free"));
	ck_assert_uint_eq(p[5 * MiB], (unsigned char)~was);
	p[5 * MiB] = was;
	ck_right(a);
	wd_model_close(a);
	wd_disconnect(wd);
}
END_TEST

/*
 * ---- stages without a plan
 */
START_TEST(test_untouched_is_dropped)
{
	int way = _i;
	struct wd *wd = connected(way, 0, 0);
	struct wd_model *a = made(wd, "a"), *b = made(wd, "b"), *c = made(wd, "c");

	ck_works(wd_model_pin(c, 1));
	ck_right(a);
	ck_works(wd_stage_begin(wd, "one"));
	ck_there(way, a); /* no stage has ended yet */
	ck_right(a);
	ck_right(b);
	ck_right(c);
	ck_works(wd_stage_begin(wd, "two"));
	ck_there(way, a);
	ck_there(way, b);
	ck_right(b);
	ck_works(wd_stage_begin(wd, "three"));
	ck_gone(way, a);
	ck_there(way, b);
	ck_there(way, c);
	ck_right(a);
	ck_works(wd_stage_end(wd));
	ck_there(way, a);
	ck_gone(way, b);
	ck_there(way, c);
	ck_works(wd_stage_begin(wd, "four"));
	ck_there(way, a); /* was dropped for no stage: none ran since */
	/* with a plan from now on */
	use_plan(wd, "five:b", NULL);
	ck_works(wd_stage_begin(wd, "five"));
	ck_gone(way, a);
	ck_right(b);
	ck_works(wd_set_plan(wd, NULL));
	ck_assert_str_eq(wd_stage_name(wd), "five"); /* from the next mark on */
	ck_works(wd_stage_begin(wd, "six"));
	ck_there(way, b);
	ck_works(wd_stage_begin(wd, "seven"));
	ck_gone(way, b);
	wd_model_close(a);
	wd_model_close(b);
	wd_model_close(c);
	wd_disconnect(wd);
}
END_TEST

/*
 * ---- strict mode
 */
START_TEST(test_strict_forbids_and_allows)
{
	int way = _i;
	struct wd *wd = connected(way, 0, WD_STRICT);
	struct wd_model *a = made(wd, "a"), *b = made(wd, "b"), *c;
	char *p = wd_model_tensor_at(a, 0)->data;
	cleanup_close int fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
	cleanup_close int pipe_in = -1, pipe_out = -1;
	int ends[2];

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(pipe2(ends, O_CLOEXEC | O_NONBLOCK), 0);
	pipe_out = ends[0];
	pipe_in = ends[1];
	use_plan(wd, "one:a;two:b;three:;four:a,b", NULL);
	ck_works(wd_stage_begin(wd, "one"));
	ck_right(a);
	ck_assert_ptr_null(wd_fault_reason(p));
	ck_works(wd_stage_begin(wd, "two"));
	ck_gone(way, a);
	ck_assert_int_eq(write(pipe_in, p + 100, 10), -1);
	ck_assert_int_eq(errno, EFAULT);
	for (int i = 0; i < 2; i++) {
		const char *why = wd_fault_reason(p + 100);

		ck_assert_ptr_nonnull(why);
		ck_assert_msg(strstr(why, "'w'") && strstr(why, "'a'") && strstr(why, "'two'") && !strchr(why, '\n'),
			      "%s", why);
		ck_works(wd_stage_begin(wd, "three")); /* it was "two" that released it, also now */
		ck_assert_int_eq(write(pipe_in, p + 5 * MiB, 10), -1);
		ck_assert_int_eq(errno, EFAULT);
	}
	ck_assert_ptr_nonnull(strstr(wd_fault_reason(wd_model_tensor_at(b, 0)->data), "'three'"));

	/* what is opened now is not listed either */
	c = made(wd, "c");
	ck_assert_ptr_nonnull(wd_fault_reason(wd_model_tensor_at(c, 0)->data));
	ck_assert_int_eq(write(pipe_in, wd_model_tensor_at(c, 0)->data, 1), -1);
	ck_works(wd_model_pin(c, 1)); /* pinned is allowed */
	ck_assert_ptr_null(wd_fault_reason(wd_model_tensor_at(c, 0)->data));
	ck_right(c);

	/* listed again: all of it, poisoned pages too */
	ck_works(wd_stage_begin(wd, "four"));
	ck_assert_ptr_null(wd_fault_reason(p + 100));
	ck_right(a);
	ck_right(b);
	ck_works(wd_stage_begin(wd, "three"));
	ck_assert_int_eq(write(pipe_in, p, 1), -1);
	ck_works(wd_stage_end(wd)); /* between stages all is allowed */
	ck_right(a);
	ck_works(wd_set_plan(wd, NULL));
	ck_works(wd_stage_begin(wd, "any"));
	ck_right(b);
	ck_assert_ptr_null(wd_fault_reason(&fd));
	wd_model_close(a);
	wd_model_close(b);
	wd_model_close(c);
	wd_disconnect(wd);
}
END_TEST

/* A view is forbidden only while nobody behind it is listed. */
START_TEST(test_strict_shared_file)
{
	struct wd *wd = connected(_i, 0, WD_STRICT);
	cleanup_free char *path = model_file("a");
	struct wd_model *x = opened(wd, path, "x"), *y = opened(wd, path, "y"), *z;

	use_plan(wd, "one:y;two:x", NULL);
	ck_works(wd_stage_begin(wd, "one"));
	ck_right(x);
	ck_works(wd_model_release(x));
	ck_works(wd_sync(wd));
	wd_model_close(y);
	ck_assert_ptr_nonnull(wd_fault_reason(wd_model_tensor_at(x, 0)->data));
	ck_assert_ptr_nonnull(strstr(wd_fault_reason(wd_model_tensor_at(x, 0)->data), "'x'"));
	z = opened(wd, path, "y"); /* is listed */
	ck_assert_ptr_null(wd_fault_reason(wd_model_tensor_at(x, 0)->data));
	ck_right(x);
	wd_model_close(x);
	wd_model_close(z);
	wd_disconnect(wd);
}
END_TEST

/*
 * ---- the handler. Each case is a child of its own: what it prints, and how it ends.
 */
struct scene {
	uint32_t way, flags;
	int kind;
};

static sigjmp_buf back;
static volatile sig_atomic_t seen_sig, seen_blocked;
static void *volatile seen_addr;

static void program_handler(int sig, siginfo_t *info, void *context)
{
	sigset_t now;

	(void)context;
	(void)pthread_sigmask(SIG_SETMASK, NULL, &now);
	seen_sig = sig;
	seen_addr = info->si_addr;
	/* the mask that it asked for: its own signal and SIGUSR1, nothing else */
	seen_blocked = sigismember(&now, sig) << 0 | sigismember(&now, SIGUSR1) << 1 | sigismember(&now, SIGUSR2) << 2;
	siglongjmp(back, 1);
}

static void plain_handler(int sig)
{
	seen_sig = sig;
	siglongjmp(back, 1);
}

static struct sigaction ours[2];

static void later_handler(int sig, siginfo_t *info, void *context)
{
	(void)!write(STDERR_FILENO, "later\n", 6);
	ours[sig == SIGSEGV].sa_sigaction(sig, info, context);
}

static void handle(void (*fn)(int, siginfo_t *, void *), void (*simple)(int))
{
	struct sigaction sa = { .sa_flags = fn ? SA_SIGINFO : 0 };

	if (fn)
		sa.sa_sigaction = fn;
	else
		sa.sa_handler = simple;
	(void)sigemptyset(&sa.sa_mask);
	if (fn == program_handler)
		(void)sigaddset(&sa.sa_mask, SIGUSR1);
	(void)sigaction(SIGBUS, &sa, &ours[0]);
	(void)sigaction(SIGSEGV, &sa, &ours[1]);
}

/* Connects strictly, with model "a" released by stage "late". Returns its bytes. */
static volatile unsigned char *forbidden_bytes(const struct scene *s)
{
	struct wd_options o = { .size = sizeof(o), .way = s->way, .flags = WD_STRICT | s->flags };
	char *path = data_text("%s/a.safetensors", test_dir);
	struct wd_plan *p;
	struct wd_model *m;
	struct wd *wd, *second;

	if (wd_connect(&o, &wd) < 0 || wd_connect(&o, &second) < 0 || wd_model_open(wd, path, NULL, &m) < 0 ||
	    wd_plan_new(&p) < 0 || wd_plan_add(p, "late", NULL) < 0 || wd_set_plan(wd, p) < 0 ||
	    wd_stage_begin(wd, "late") < 0)
		_exit(99);
	return wd_model_tensor_at(m, 0)->data;
}

enum { DEFAULT, IGNORED, PROGRAM, PLAIN, LATER, OFF, OFF_BUT_ON, STRANGER, SENT, SENT_IGNORED, THREAD, NR_KINDS };

static void *touch_it(void *p)
{
	return (void *)(uintptr_t) * (volatile unsigned char *)p;
}

static int scene_run(void *arg)
{
	const struct scene *s = arg;
	int fd = open(data_text("%s/stderr", test_dir), O_WRONLY | O_CREAT | O_TRUNC, 0600), expected;
	volatile unsigned char *p;
	struct scene with = *s;
	pthread_t thread;
	void *page;

	(void)dup2(fd, STDERR_FILENO);
	handle(NULL, SIG_DFL); /* a sanitizer has its own */
	expected = s->way == WD_WAY_MMAP ? SIGSEGV : SIGBUS;
	switch (s->kind) {
	case IGNORED:
	case SENT_IGNORED:
		handle(NULL, SIG_IGN);
		break;
	case PROGRAM:
	case OFF:
	case OFF_BUT_ON:
		handle(program_handler, NULL);
		break;
	case PLAIN:
		handle(NULL, plain_handler);
		break;
	}
	if (s->kind == OFF || s->kind == OFF_BUT_ON)
		with.flags = WD_NO_SIGNAL_HANDLER;
	p = forbidden_bytes(&with) + 3 * MiB + 5;
	if (s->kind == OFF_BUT_ON) { /* somebody else in this process wants it: for others' tensors, not for these */
		struct wd *other;

		if (wd_connect(NULL, &other) < 0)
			return 98;
	}
	if (s->kind == LATER)
		handle(later_handler, NULL);
	page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (sigsetjmp(back, 1)) {
		if (seen_sig != expected || (s->kind != PLAIN && seen_addr != p &&
					     seen_addr != (const void *)((uintptr_t)p & ~(uintptr_t)4095)))
			return 97;
		if (s->kind != PLAIN && seen_blocked != 3)
			return 96;
		return 42;
	}
	switch (s->kind) {
	case STRANGER:
		return *(volatile unsigned char *)page;
	case SENT:
	case SENT_IGNORED:
		(void)raise(SIGBUS);
		return 43;
	case THREAD:
		(void)pthread_create(&thread, NULL, touch_it, (void *)p);
		(void)pthread_join(thread, NULL);
		return 95;
	default:
		return *p + 200;
	}
}

/* How each scene ends; 0: by the signal of the touch. */
static const struct {
	int end;
	bool line;
} scenes[NR_KINDS] = {
	[DEFAULT] = { 0, true },
	[IGNORED] = { 0, true }, /* the kernel lets nobody ignore a fault */
	[PROGRAM] = { 42, true },
	[PLAIN] = { 42, true },
	[LATER] = { 0, true },
	[OFF] = { 42, false },
	[OFF_BUT_ON] = { 42, false },
	[STRANGER] = { 1000 + SIGSEGV, false },
	[SENT] = { 1000 + SIGBUS, false },
	[SENT_IGNORED] = { 43, false },
	[THREAD] = { 0, true },
};

static void check_scene(uint32_t way, int kind)
{
	struct scene s = { .way = way, .kind = kind };
	int expected = scenes[kind].end ? scenes[kind].end : way == WD_WAY_MMAP ? 1000 + SIGSEGV : 1000 + SIGBUS;
	int end = in_child(scene_run, &s), fd;
	cleanup_free char *path = data_text("%s/stderr", test_dir);
	char text[4096] = "";
	const char *line = text;

	fd = open(path, O_RDONLY | O_CLOEXEC);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_ge(read(fd, text, sizeof(text) - 1), 0);
	(void)close(fd);
	ck_assert_msg(end == expected, "scene %d ended with %d instead of %d: %s", kind, end, expected, text);
	if (kind == LATER) {
		ck_assert_int_eq(strncmp(text, "later\n", 6), 0);
		line += 6;
	}
	if (scenes[kind].line) {
		ck_assert_msg(!strncmp(line, "weightd: tensor 'w' of model 'a' (file ", 39) &&
				      strstr(line, "a.safetensors, bytes ") && strstr(line, "stage 'late'"),
			      "scene %d: %s", kind, text);
		ck_assert_ptr_eq(strchr(line, '\n'), line + strlen(line) - 1);
	} else {
		ck_assert_str_eq(text, "");
	}
}

START_TEST(test_handler)
{
	free(model_file("a"));
	for (int kind = 0; kind < NR_KINDS; kind++)
		check_scene((uint32_t)_i, kind);
}
END_TEST

/* A file that is cut short: the reason says so, in the ways that read it themselves. */
static int shrunk(void *arg)
{
	const struct scene *s = arg;
	struct wd_options o = { .size = sizeof(o), .way = s->way };
	char *path = data_text("%s/a.safetensors", test_dir);
	int fd = open(data_text("%s/stderr", test_dir), O_WRONLY | O_CREAT | O_TRUNC, 0600);
	volatile unsigned char *p;
	struct wd_model *m;
	struct wd *wd;

	(void)dup2(fd, STDERR_FILENO);
	handle(NULL, SIG_DFL);
	if (wd_connect(&o, &wd) < 0 || wd_model_open(wd, path, NULL, &m) < 0)
		return 99;
	p = wd_model_tensor_at(m, 0)->data;
	if (truncate(path, 4096) < 0)
		return 98;
	return p[6 * MiB];
}

START_TEST(test_handler_file_shrank)
{
	struct scene s = { .way = (uint32_t)_i };
	cleanup_free char *path = data_text("%s/stderr", test_dir);
	char text[4096] = "";
	int end, fd;

	free(model_file("a"));
	end = in_child(shrunk, &s);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_ge(read(fd, text, sizeof(text) - 1), 0);
	(void)close(fd);
	ck_assert_msg(end == 1000 + SIGBUS, "%d: %s", end, text);
	ck_assert_msg(strstr(text, "tensor 'w' of model 'a'") && strstr(text, "open it again"), "%s", text);
}
END_TEST

/* Names with control characters cannot draw on the terminal, long ones do not hide the cause. */
START_TEST(test_reason_is_clean)
{
	struct wd *wd = connected(_i, 0, WD_STRICT);
	char name[400], *path = data_text("%s/t.safetensors", test_dir);
	struct data_tensor t[] = {
		{ .name = "a\nb\x1b[31m\xC2\x9B\xC3\xA9", .dtype = "U8", .ndim = 1, .shape = { 100 } },
		{ .name = name, .dtype = "U8", .ndim = 1, .shape = { 100 } }
	};
	struct wd_model *m;
	const char *why;

	memset(name, 'n', sizeof(name));
	name[sizeof(name) - 1] = '\0';
	(void)data_write_safetensors(path, t, 2, NULL);
	m = opened(wd, path, name);
	use_plan(wd, "one:", NULL);
	ck_works(wd_stage_begin(wd, "one"));
	why = wd_fault_reason(wd_model_tensor(m, t[0].name)->data);
	ck_assert_ptr_nonnull(why);
	ck_assert_msg(strstr(why, "'a?b?[31m\xC2?\xC3\xA9'"), "%s", why);
	why = wd_fault_reason((char *)wd_model_tensor(m, name)->data + 99);
	ck_assert_ptr_nonnull(why);
	ck_assert_msg(strstr(why, "nnn") && strstr(why, "'one'") && strstr(why, "plan"), "%s", why);
	wd_model_close(m);
	wd_disconnect(wd);
	free(path);
}
END_TEST

static void *reasons(void *arg)
{
	void **a = arg;
	char mine[1024] = "";

	for (int i = 0; i < 2000; i++) {
		const char *why = wd_fault_reason((char *)a[0] + i);

		if (!why)
			return "no reason";
		if (*mine && strcmp(mine, why))
			return "another thread's text";
		(void)snprintf(mine, sizeof(mine), "%s", why);
	}
	return strstr(mine, a[1]) ? NULL : "wrong tensor";
}

/* Texts are a thread's own, also of more threads than there were before; ended threads' room is used again. */
START_TEST(test_reasons_of_threads)
{
	struct wd *wd = connected(_i, 0, WD_STRICT);
	struct wd_model *m[] = { made(wd, "a"), made(wd, "b") };
	void *args[][2] = { { wd_model_tensor_at(m[0], 0)->data, "model 'a'" },
			    { wd_model_tensor_at(m[1], 0)->data, "model 'b'" } };
	pthread_t threads[12];
	void *r;

	use_plan(wd, "one:", NULL);
	ck_works(wd_stage_begin(wd, "one"));
	for (int round = 0; round < 5; round++) {
		for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
			ck_assert_int_eq(pthread_create(&threads[i], NULL, reasons, args[i % 2]), 0);
		for (size_t i = 0; i < ARRAY_SIZE(threads); i++) {
			ck_assert_int_eq(pthread_join(threads[i], &r), 0);
			ck_assert_msg(!r, "%s", (char *)r);
		}
	}
	wd_model_close(m[0]);
	wd_model_close(m[1]);
	wd_disconnect(wd);
}
END_TEST

/* Marks, closes and questions from several threads at once. */
struct storm {
	struct wd *wd;
	char *path;
	void *data;
};

static void *storm_marks(void *arg)
{
	static const char *const names[] = { "one", "two", "both" };
	struct storm *s = arg;
	uint64_t state = (uintptr_t)&state;

	for (int i = 0; i < 40; i++) {
		if (rnd(&state) % 5)
			ck_works(wd_stage_begin(s->wd, names[rnd(&state) % 3]));
		else
			(void)wd_stage_end(s->wd);
		(void)wd_stage_name(s->wd);
	}
	return NULL;
}

static void *storm_models(void *arg)
{
	struct storm *s = arg;

	for (int i = 0; i < 60; i++) {
		struct wd_model *m;

		ck_works(wd_model_open(s->wd, s->path, NULL, &m));
		(void)wd_fault_reason(s->data);
		ck_works(wd_model_pin(m, i % 2));
		(void)wd_fault_reason(wd_model_tensor_at(m, 0)->data);
		wd_model_close(m);
	}
	return NULL;
}

START_TEST(test_storm)
{
	struct storm s = { .wd = connected(_i, 0, WD_STRICT) };
	struct wd_model *a = made(s.wd, "a"), *b = made(s.wd, "b");
	pthread_t threads[4];

	s.path = model_file("c");
	s.data = wd_model_tensor_at(a, 0)->data;
	use_plan(s.wd, "one:a;two:b;both:a,b", NULL);
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		ck_assert_int_eq(pthread_create(&threads[i], NULL, i < 2 ? storm_marks : storm_models, &s), 0);
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
	ck_works(wd_stage_begin(s.wd, "both"));
	ck_right(a);
	ck_right(b);
	wd_model_close(a);
	wd_model_close(b);
	wd_disconnect(s.wd);
	free(s.path);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("stage");
	TCase *tc = folder_case(s, "plans", 20);

	tcase_add_test(tc, test_entry_matches);
	tcase_add_test(tc, test_plan_builds);
	tcase_add_test(tc, test_plan_file);
	tcase_add_loop_test(tc, test_plan_file_refuses, 0, ARRAY_SIZE(bad_plans));

	tc = folder_case(s, "stages", 60);
	add_ways(tc, test_plan_drops_what_it_does_not_list, ALL_WAYS);
	add_ways(tc, test_pinned_stay, ALL_WAYS);
	add_ways(tc, test_unknown_names_change_nothing, ALL_WAYS);
	add_ways(tc, test_names_of_parts, ALL_WAYS);
	add_ways(tc, test_shared_file, ALL_WAYS);
	add_ways(tc, test_writes_survive_stages, ALL_WAYS);
	add_ways(tc, test_untouched_is_dropped, ALL_WAYS);
	add_ways(tc, test_storm, ALL_WAYS);

	tc = folder_case(s, "strict", 30);
	add_ways(tc, test_strict_forbids_and_allows, ALL_WAYS);
	add_ways(tc, test_strict_shared_file, ALL_WAYS);
	add_ways(tc, test_reason_is_clean, ALL_WAYS);
	add_ways(tc, test_reasons_of_threads, ALL_WAYS);

	tc = folder_case(s, "handler", 30);
	add_ways(tc, test_handler, ALL_WAYS);
	add_ways(tc, test_handler_file_shrank, ALL_WAYS);
	return run_suite(s);
}
