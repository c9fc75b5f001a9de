/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `weightd demo` as a user runs it, at small sizes, and the cgroups that it measures with.
 * The program under test is $OUT/weightd. What a run needs beyond that (root, the memory controller) is asked for
 * when the suite is made; what is missing is printed as SKIP.
 */
#define _GNU_SOURCE
#include "cli/cgroup.c" /* the tool's objects are not linked into tests */
#include "lib/include/weightd.h"
#include "tests/data.h"

#include <check.h>
#include <grp.h>
#include <jansson.h>
#include <linux/magic.h>
#include <sched.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#define MAX_ARGS 16
#define LIMIT_SECONDS 120
#define NOBODY 65534

struct output {
	int status; /* of wait */
	char *out, *err;
};

static char *tool(void)
{
	const char *out = getenv("OUT");

	return data_text("%s/weightd", out ? out : ".out");
}

static char *slurp(const char *path)
{
	FILE *f = fopen(path, "re");
	char *text = NULL;
	size_t room = 0;

	ck_assert_ptr_nonnull(f);
	if (getdelim(&text, &room, '\0', f) < 0)
		text[0] = '\0';
	(void)fclose(f);
	return text;
}

/* Runs in the child between fork and exec. */
typedef void (*prepare_fn)(const void *arg);

static pid_t start(const char *folder, prepare_fn prepare, const void *arg, const char *const *args)
{
	char *argv[MAX_ARGS] = { tool(), (char *)"demo" }, *out = data_text("%s/out", folder),
	     *err = data_text("%s/err", folder);
	pid_t pid;

	for (size_t i = 0; args[i]; i++) {
		ck_assert_uint_lt(i + 3, MAX_ARGS);
		argv[i + 2] = (char *)args[i];
	}
	pid = fork();
	ck_assert_int_ge(pid, 0);
	if (pid == 0) {
		if (!freopen(out, "w", stdout) || !freopen(err, "w", stderr))
			_exit(99);
		if (prepare)
			prepare(arg);
		(void)execv(argv[0], argv);
		_exit(98);
	}
	free(argv[0]);
	free(out);
	free(err);
	return pid;
}

static struct output finish(const char *folder, pid_t pid)
{
	char *out = data_text("%s/out", folder), *err = data_text("%s/err", folder);
	struct output o = { 0 };

	while (waitpid(pid, &o.status, 0) < 0)
		ck_assert_int_eq(errno, EINTR);
	o.out = slurp(out);
	o.err = slurp(err);
	free(out);
	free(err);
	return o;
}

#define RUN(folder, prepare, arg, ...) \
	finish(folder, start(folder, prepare, arg, (const char *const[]){ __VA_ARGS__, NULL }))

static void output_done(struct output *o)
{
	free(o->out);
	free(o->err);
}

static void expect_exit(const struct output *o, int code)
{
	ck_assert_msg(WIFEXITED(o->status) && WEXITSTATUS(o->status) == code, "status 0x%x, stderr: %s", o->status,
		      o->err);
}

static void expect_one_line(const char *text)
{
	const char *end = strchr(text, '\n');

	ck_assert_msg(end && !end[1] && end != text, "one line is wanted: %s", text);
}

static json_t *parse_json(const struct output *o)
{
	json_error_t error;
	json_t *value = json_loads(o->out, 0, &error);

	ck_assert_msg(value != NULL, "%s: %s", error.text, o->out);
	return value;
}

static json_t *mode_of(const json_t *value, const char *name)
{
	size_t i;
	json_t *mode;

	json_array_foreach(json_object_get(value, "modes"), i, mode) {
		if (!strcmp(json_string_value(json_object_get(mode, "mode")), name))
			return mode;
	}
	ck_abort_msg("mode %s is not there", name);
	return NULL;
}

static const char *text_of(const json_t *object, const char *key)
{
	const char *text = json_string_value(json_object_get(object, key));

	ck_assert_msg(text != NULL, "%s is no text", key);
	return text;
}

static uint64_t number_of(const json_t *object, const char *key)
{
	const json_t *n = json_object_get(object, key);

	ck_assert_msg(json_is_number(n), "%s is no number", key);
	return (uint64_t)json_number_value(n);
}

static size_t nr_entries(const char *folder)
{
	DIR *dir = opendir(folder);
	size_t nr = 0;
	struct dirent *e;

	ck_assert_ptr_nonnull(dir);
	while ((e = readdir(dir)))
		nr += strcmp(e->d_name, ".") && strcmp(e->d_name, "..");
	(void)closedir(dir);
	return nr;
}

static bool disk;  /* the tests' files are on one, so that reads can be counted */
static bool pager; /* weights of the staged mode are in arenas, and counted */

static bool has_pager(void)
{
	int status = 1;
	pid_t pid = fork(); /* so that no threads are left here */

	if (pid == 0) {
		struct wd *wd;

		_exit(wd_connect(NULL, &wd) < 0 || wd_way(wd) == WD_WAY_MMAP);
	}
	return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

/* Every key of the documented shape, with its type. */
static void check_shape(const json_t *value)
{
	static const char *const counts[] = { "peak_bytes",     "peak_weights_bytes", "peak_cache_bytes", "read_bytes",
					      "swap_out_bytes", "major_faults",       "pager_faults",     "reloads" };
	size_t i, k;
	json_t *mode, *stage;

	ck_assert(json_is_boolean(json_object_get(value, "identical")) ||
		  json_is_null(json_object_get(value, "identical")));
	json_array_foreach(json_object_get(value, "modes"), i, mode) {
		bool finished = !strcmp(text_of(mode, "status"), "finished");

		(void)text_of(mode, "mode");
		(void)number_of(mode, "seconds");
		ck_assert(finished ? json_is_null(json_object_get(mode, "reason")) :
				     json_is_string(json_object_get(mode, "reason")));
		for (k = 0; k < ARRAY_SIZE(counts); k++) {
			const json_t *n = json_object_get(mode, counts[k]);

			ck_assert_msg(json_is_integer(n) || json_is_null(n), "%s", counts[k]);
		}
		if (finished)
			ck_assert_uint_eq(strlen(text_of(mode, "sha256")), 64);
		json_array_foreach(json_object_get(mode, "stages"), k, stage) {
			(void)text_of(stage, "name");
			ck_assert(json_is_integer(json_object_get(stage, "peak_bytes")));
			if (finished) {
				(void)number_of(stage, "seconds");
				ck_assert_uint_eq(strlen(text_of(stage, "sha256")), 64);
			}
		}
	}
}

static void check_same_stages(const json_t *value, const char *const *names, size_t nr)
{
	static const char *const modes[] = { "eager", "mmap", "staged" };

	for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
		json_t *mode = mode_of(value, modes[i]), *stages = json_object_get(mode, "stages");

		ck_assert_str_eq(text_of(mode, "status"), "finished");
		ck_assert_uint_eq(json_array_size(stages), nr);
		ck_assert_str_eq(text_of(mode, "sha256"), text_of(mode_of(value, "eager"), "sha256"));
		for (size_t k = 0; k < nr; k++) {
			const json_t *first = json_array_get(json_object_get(mode_of(value, "eager"), "stages"), k);

			ck_assert_str_eq(text_of(json_array_get(stages, k), "name"), names[k]);
			ck_assert_str_eq(text_of(json_array_get(stages, k), "sha256"), text_of(first, "sha256"));
		}
	}
}

static struct stat stat_of(const char *path)
{
	struct stat st;

	ck_assert_msg(stat(path, &st) == 0, "%s", path);
	return st;
}

/* ---- generated checkpoints */

START_TEST(test_demo_compares_three_modes)
{
	static const char *const names[] = { "encode", "denoise", "decode", "encode-again" };
	char *folder = data_tmpdir(), *cache = data_text("%s/a/b", folder),
	     *file = data_text("%s/encoder.safetensors", cache);
	struct output o = RUN(folder, NULL, NULL, "--json", "--size=24M", "--cache", cache), again, other;
	json_t *value, *staged, *eager, *later;
	uint64_t total = 0, largest = 0;
	struct stat before;

	expect_exit(&o, 0);
	ck_assert_str_eq(o.err, "");
	value = parse_json(&o);
	check_shape(value);
	ck_assert(json_is_true(json_object_get(value, "identical")));
	check_same_stages(value, names, ARRAY_SIZE(names));

	for (size_t i = 0; i < 3; i++) {
		static const char *const models[] = { "encoder", "denoiser", "decoder" };
		char *path = data_text("%s/%s.safetensors", cache, models[i]);
		uint64_t nbytes = (uint64_t)stat_of(path).st_size;

		total += nbytes;
		largest = MAX(largest, nbytes);
		free(path);
	}
	ck_assert_uint_le(largest, 24 * MiB * 4 / 10);
	ck_assert_uint_ge(total, 24 * MiB * 95 / 100);
	ck_assert_uint_le(total, 24 * MiB * 105 / 100);

	eager = mode_of(value, "eager");
	staged = mode_of(value, "staged");
	ck_assert_uint_ge(number_of(eager, "peak_weights_bytes"), 24 * MiB * 95 / 100);
	ck_assert_uint_ge(number_of(eager, "peak_bytes"), number_of(eager, "peak_weights_bytes"));
	ck_assert_uint_lt(number_of(staged, "peak_weights_bytes"), number_of(eager, "peak_weights_bytes"));
	ck_assert_uint_eq(number_of(mode_of(value, "mmap"), "peak_weights_bytes"), 0);
	if (pager) {
		/* whole extents, and the one that ends a file */
		ck_assert_uint_le(number_of(staged, "peak_weights_bytes"), largest + 4 * MiB);
		ck_assert_uint_ge(number_of(staged, "peak_weights_bytes"), largest * 9 / 10);
		ck_assert_uint_eq(number_of(staged, "reloads"), 1);
	}

	/* out of the page cache before each mode; a MiB for what the program itself needs */
	for (size_t i = 0; disk && i < json_array_size(json_object_get(value, "modes")); i++) {
		const json_t *mode = json_array_get(json_object_get(value, "modes"), i);

		ck_assert_uint_ge(number_of(mode, "read_bytes"), total - MiB);
	}

	/* the same files again, and the same result; with them in the page cache */
	before = stat_of(file);
	again = RUN(folder, NULL, NULL, "--json", "--size=24M", "--cache", cache, "--modes=mmap", "--warm");
	expect_exit(&again, 0);
	ck_assert_int_eq((int64_t)before.st_ino, (int64_t)stat_of(file).st_ino);
	later = parse_json(&again);
	ck_assert_str_eq(text_of(mode_of(later, "mmap"), "sha256"), text_of(eager, "sha256"));
	ck_assert(json_is_null(json_object_get(later, "identical")));
	ck_assert_uint_le(number_of(mode_of(later, "mmap"), "read_bytes"), MiB);
	json_decref(later);

	other = RUN(folder, NULL, NULL, "--json", "--size=24M", "--seed=2", "--cache", cache, "--modes=staged");
	expect_exit(&other, 0);
	later = parse_json(&other);
	ck_assert_str_ne(text_of(mode_of(later, "staged"), "sha256"), text_of(eager, "sha256"));
	json_decref(later);
	json_decref(value);
	output_done(&o);
	output_done(&again);
	output_done(&other);
	free(cache);
	free(file);
	free(folder);
}
END_TEST

START_TEST(test_demo_prints_a_table)
{
	char *folder = data_tmpdir();
	struct output o = RUN(folder, NULL, NULL, "--size=8M", "--cache", folder);

	expect_exit(&o, 0);
	ck_assert_str_eq(o.err, ""); /* no bar where stderr is no terminal */
	ck_assert_ptr_nonnull(strstr(o.out, "peak memory"));
	ck_assert_ptr_nonnull(strstr(o.out, "encode-again"));
	ck_assert_ptr_nonnull(strstr(o.out, "3 of 3 modes finished, and computed the same result"));
	output_done(&o);
	free(folder);
}
END_TEST

START_TEST(test_demo_limit_holds)
{
	char *folder = data_tmpdir();
	struct output o = RUN(folder, NULL, NULL, "--json", "--size=192M", "--limit=120M", "--cache", folder);
	json_t *value, *eager, *staged;

	expect_exit(&o, 0);
	value = parse_json(&o);
	check_shape(value);
	eager = mode_of(value, "eager");
	staged = mode_of(value, "staged");
	ck_assert_str_eq(text_of(staged, "status"), "finished");
	ck_assert_uint_le(number_of(staged, "peak_bytes"), 120 * MiB);
	/* With swap it may get through; otherwise there is one way for it to end, and the report must say it. */
	if (strcmp(text_of(eager, "status"), "finished")) {
		ck_assert_str_eq(text_of(eager, "status"), "killed");
		ck_assert_ptr_nonnull(strstr(text_of(eager, "reason"), "out of memory"));
		ck_assert(json_is_null(json_object_get(eager, "sha256")));
		ck_assert_uint_eq(json_array_size(json_object_get(eager, "stages")), 0);
	}
	json_decref(value);
	output_done(&o);
	free(folder);
}
END_TEST

/* ---- a user's own checkpoints */

START_TEST(test_demo_own_checkpoints)
{
	static const char *const names[] = { "model", "model-2", "odd", "model-again" };
	struct data_tensor plain[] = { { .name = "w", .dtype = "F32", .ndim = 2, .shape = { 300, 700 } },
				       { .name = "b", .dtype = "F16", .ndim = 1, .shape = { 701 } } };
	struct data_tensor odd[] = { { .name = "i", .dtype = "I64", .ndim = 3, .shape = { 7, 5, 11 } },
				     { .name = "nothing", .dtype = "F32", .ndim = 2, .shape = { 0, 4 } },
				     { .name = "one", .dtype = "F64", .ndim = 0 },
				     { .name = "bits", .dtype = "BOOL", .ndim = 1, .shape = { 13 } },
				     { .name = "late", .dtype = "BF16", .ndim = 2, .shape = { 1025, 9 } } };
	char *folder = data_tmpdir(), *one = data_text("%s/one", folder), *two = data_text("%s/two", folder);
	char *a = data_text("%s/model.safetensors", one), *b = data_text("%s/model.safetensors", two);
	char *c = data_text("%s/odd.safetensors", folder);
	struct output o;
	json_t *value;

	ck_assert_int_eq(mkdir(one, 0755) | mkdir(two, 0755), 0);
	data_write_safetensors(a, plain, ARRAY_SIZE(plain), &(struct data_opts){ .seed = 1 });
	data_write_safetensors(b, plain, ARRAY_SIZE(plain), &(struct data_opts){ .seed = 2 });
	data_write_safetensors(c, odd, ARRAY_SIZE(odd), &(struct data_opts){ .seed = 3, .align = 8, .residue = 3 });
	o = RUN(folder, NULL, NULL, "--json", a, b, c);
	expect_exit(&o, 0);
	value = parse_json(&o);
	check_shape(value);
	ck_assert(json_is_true(json_object_get(value, "identical")));
	check_same_stages(value, names, ARRAY_SIZE(names));
	json_decref(value);
	output_done(&o);
	free(a);
	free(b);
	free(c);
	free(one);
	free(two);
	free(folder);
}
END_TEST

/* A daemon that would be found, and one that would be started. */
static void offer_daemon(const void *socket_path)
{
	if (unsetenv("WEIGHTD_MODE") < 0 || setenv("WEIGHTD_SOCKET", socket_path, 1) < 0 ||
	    setenv("WEIGHTD_AUTOSTART", "1", 1) < 0)
		_exit(97);
}

/* Its figures are one process's: what a daemon reads and holds is not in them. */
START_TEST(test_demo_uses_no_daemon)
{
	char *folder = data_tmpdir(), *path = data_text("%s/socket", folder);
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	struct output o;

	(void)snprintf(at.sun_path, sizeof(at.sun_path), "%s", path);
	ck_assert_int_eq(bind(fd, (const struct sockaddr *)&at, sizeof(at)), 0);
	ck_assert_int_eq(listen(fd, 8), 0);
	o = RUN(folder, offer_daemon, path, "--size=4M", "--modes=staged", "--cache", folder);
	expect_exit(&o, 0);
	ck_assert_str_eq(o.err, "");
	ck_assert_ptr_null(strstr(o.out, "daemon"));
	ck_assert_int_eq(accept(fd, NULL, NULL), -1);
	ck_assert_int_eq(errno, EAGAIN);
	output_done(&o);
	(void)close(fd);
	free(path);
	free(folder);
}
END_TEST

static void want_daemon(const void *unused)
{
	(void)unused;
	if (setenv("WEIGHTD_MODE", "daemon", 1) < 0)
		_exit(97);
}

START_TEST(test_demo_says_that_it_uses_no_daemon)
{
	char *folder = data_tmpdir();
	struct output o = RUN(folder, want_daemon, NULL, "--size=4M", "--modes=staged", "--cache", folder);

	expect_exit(&o, 1);
	expect_one_line(o.err);
	ck_assert_ptr_nonnull(strstr(o.err, "WEIGHTD_MODE=daemon"));
	output_done(&o);
	free(folder);
}
END_TEST

START_TEST(test_demo_damaged_checkpoint_is_one_line)
{
	char *folder = data_tmpdir(), *path = data_text("%s/broken.safetensors", folder);
	struct output o;

	data_write(path, "\x20\0\0\0\0\0\0\0{\"a\":", 13);
	o = RUN(folder, NULL, NULL, path);
	expect_exit(&o, 1);
	ck_assert_str_eq(o.out, "");
	expect_one_line(o.err);
	ck_assert_ptr_nonnull(strstr(o.err, "broken.safetensors"));
	output_done(&o);
	free(path);
	free(folder);
}
END_TEST

START_TEST(test_demo_usage)
{
	static const char *const bad[] = { "--size=1K",     "--size=x",     "--limit=0",       "--modes=eager,eager",
					   "--modes=other", "--seed=minus", "--no-such-option" };
	char *folder = data_tmpdir();
	struct output o = RUN(folder, NULL, NULL, bad[_i]);

	expect_exit(&o, 2);
	ck_assert_str_eq(o.out, "");
	ck_assert_str_ne(o.err, "");
	output_done(&o);
	free(folder);
}
END_TEST

/* ---- the cache folder */

static void mount_small(const void *folder)
{
	if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
	    mount("none", folder, "tmpfs", 0, "size=8m") < 0)
		_exit(97);
}

/* The folder's entries, counted inside of its mount namespace once the demo has ended. */
static void list_after(const void *folder)
{
	pid_t pid;
	int status;

	mount_small(folder);
	pid = fork();
	if (pid == 0)
		return; /* goes on to exec */
	if (pid < 0 || waitpid(pid, &status, 0) < 0)
		_exit(97);
	_exit(nr_entries(folder) ? 96 : WEXITSTATUS(status));
}

START_TEST(test_demo_full_disk_leaves_nothing)
{
	char *folder = data_tmpdir(), *cache = data_text("%s/small", folder);
	struct output o;

	ck_assert_int_eq(mkdir(cache, 0755), 0);
	o = RUN(folder, list_after, cache, "--size=24M", "--cache", cache);
	expect_exit(&o, 1);
	ck_assert_str_eq(o.out, "");
	expect_one_line(o.err);
	ck_assert_ptr_nonnull(strstr(o.err, "has room for"));
	output_done(&o);
	free(cache);
	free(folder);
}
END_TEST

static void limit_files(const void *arg)
{
	const struct rlimit limit = { 8 * MiB, 8 * MiB }; /* the encoder fits, the denoiser does not */

	(void)arg;
	(void)signal(SIGXFSZ, SIG_IGN);
	if (setrlimit(RLIMIT_FSIZE, &limit) < 0)
		_exit(97);
}

START_TEST(test_demo_failed_write_leaves_nothing)
{
	char *folder = data_tmpdir(), *cache = data_text("%s/made/as/well", folder),
	     *made = data_text("%s/made", folder);
	struct output o = RUN(folder, limit_files, NULL, "--size=24M", "--cache", cache);

	expect_exit(&o, 1);
	expect_one_line(o.err);
	ck_assert_ptr_nonnull(strstr(o.err, "denoiser.safetensors"));
	ck_assert_int_eq(access(made, F_OK), -1);
	output_done(&o);
	free(made);
	free(cache);
	free(folder);
}
END_TEST

START_TEST(test_demo_keeps_its_hands_off_other_files)
{
	char *folder = data_tmpdir(), *cache = data_text("%s/cache", folder),
	     *file = data_text("%s/decoder.safetensors", cache);
	char *text;
	struct output o;

	ck_assert_int_eq(mkdir(cache, 0755), 0);
	data_write(file, "somebody's weights", 18);
	o = RUN(folder, NULL, NULL, "--size=24M", "--cache", cache);
	expect_exit(&o, 1);
	expect_one_line(o.err);
	text = slurp(file);
	ck_assert_str_eq(text, "somebody's weights");
	ck_assert_uint_eq(nr_entries(cache), 1);
	output_done(&o);
	free(text);
	free(file);
	free(cache);
	free(folder);
}
END_TEST

/* ---- signals */

static void wait_for_event(int fd)
{
	char buf[4096] __attribute__((aligned(8)));

	ck_assert_int_gt(read(fd, buf, sizeof(buf)), 0);
}

START_TEST(test_demo_interrupted_while_writing)
{
	char *folder = data_tmpdir(), *cache = data_text("%s/cache", folder);
	int fd = inotify_init1(IN_CLOEXEC);
	struct output o;
	pid_t pid;

	ck_assert_int_eq(mkdir(cache, 0755), 0);
	ck_assert_int_ge(inotify_add_watch(fd, cache, IN_CREATE), 0);
	pid = start(folder, NULL, NULL, (const char *const[]){ "--size=256M", "--cache", cache, NULL });
	wait_for_event(fd);
	ck_assert_int_eq(kill(pid, SIGINT), 0);
	o = finish(folder, pid);
	ck_assert_msg(WIFSIGNALED(o.status) && WTERMSIG(o.status) == SIGINT, "0x%x", o.status);
	ck_assert_uint_eq(nr_entries(cache), 0);
	output_done(&o);
	(void)close(fd);
	free(cache);
	free(folder);
}
END_TEST

START_TEST(test_demo_interrupted_while_running)
{
	char *folder = data_tmpdir(), *cache = data_text("%s/cache", folder), *procs, *name, *parent, *slash;
	struct cgroup *cg = NULL;
	int fd = inotify_init1(IN_CLOEXEC);
	long inside = 0;
	struct output o;
	pid_t pid;

	ck_assert_int_eq(cgroup_new("", "weightd-test-1", &cg, NULL), 0);
	parent = strdup(cgroup_path(cg));
	slash = strrchr(parent, '/');
	*slash = '\0';
	ck_assert_int_ge(inotify_add_watch(fd, parent, IN_CREATE), 0);
	pid = start(folder, NULL, NULL, (const char *const[]){ "--size=128M", "--cache", cache, NULL });
	name = data_text("%s/weightd-demo-%d", parent, (int)pid);
	procs = data_text("%s/cgroup.procs", name);
	while (access(name, F_OK) < 0)
		wait_for_event(fd);
	while (!inside) {
		FILE *f = fopen(procs, "re");

		ck_assert_ptr_nonnull(f);
		if (fscanf(f, "%ld", &inside) != 1)
			(void)sched_yield();
		(void)fclose(f);
	}
	ck_assert_int_eq(kill(pid, SIGTERM), 0);
	o = finish(folder, pid);
	ck_assert_msg(WIFSIGNALED(o.status) && WTERMSIG(o.status) == SIGTERM, "0x%x", o.status);
	ck_assert_int_eq(access(name, F_OK), -1);
	ck_assert_int_eq(kill((pid_t)inside, 0), -1);
	output_done(&o);
	(void)cgroup_free(cg);
	(void)close(fd);
	free(procs);
	free(name);
	free(parent);
	free(cache);
	free(folder);
}
END_TEST

/* ---- without root */

#define CACHE_FD 9

/* `cache` (may be NULL) stays open as CACHE_FD: nobody may not walk through the folders above it. */
static void become_nobody(const void *cache)
{
	int fd = cache ? open(cache, O_RDONLY | O_DIRECTORY) : -1;

	if (cache && (fd < 0 || dup2(fd, CACHE_FD) < 0))
		_exit(97);
	if (setgroups(0, NULL) < 0 || setgid(NOBODY) < 0 || setuid(NOBODY) < 0)
		_exit(97);
}

START_TEST(test_demo_without_root)
{
	char *folder = data_tmpdir(), *cache = data_text("%s/cache", folder);
	struct output o;

	ck_assert_int_eq(mkdir(cache, 0755), 0);
	ck_assert_int_eq(chown(cache, NOBODY, NOBODY), 0);
	o = RUN(folder, become_nobody, cache, "--size=8M", "--cache=/proc/self/fd/9");
	expect_exit(&o, 0);
	ck_assert_ptr_nonnull(strstr(o.out, "3 of 3 modes finished, and computed the same result"));
	ck_assert_ptr_nonnull(strstr(o.out, "Measured without a memory cgroup"));
	ck_assert_ptr_null(strstr(o.out, " ?")); /* every count is there */
	output_done(&o);
	free(cache);
	free(folder);
}
END_TEST

/* ---- cgroups, on fake trees */

static void put(const char *root, const char *path, const char *text)
{
	char *file = data_text("%s/%s", root, path);

	for (char *p = file + strlen(root) + 1; (p = strchr(p, '/')); p++) {
		*p = '\0';
		(void)mkdir(file, 0755);
		*p = '/';
	}
	data_write(file, text, strlen(text));
	ck_assert_int_eq(chmod(file, 0644), 0);
	free(file);
}

static char *got(const char *root, const char *path)
{
	char *file = data_text("%s/%s", root, path), *text = slurp(file);

	free(file);
	return text;
}

START_TEST(test_cgroup_v1)
{
	char *root = data_tmpdir(), *text;
	struct cgroup *cg = NULL;
	struct cgroup_usage u;
	struct wd_err err;

	put(root, "proc/self/cgroup", "12:cpu,cpuacct:/x\n4:memory:/docker/abc/job\n0::/\n");
	put(root, "proc/self/mountinfo",
	    "30 23 0:28 / /cg/unified rw - cgroup2 cgroup2 rw\n"
	    "31 23 0:29 /docker/abc /cg/memory rw shared:9 - cgroup cgroup rw,memory\n");
	put(root, "cg/memory/job/w-0/memory.stat", "cache 9000\nrss 4096\nrss_huge 0\nshmem 5000\ntotal_rss 1\n");
	put(root, "cg/memory/job/w-0/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n");
	put(root, "cg/memory/job/w-0/memory.limit_in_bytes", "");
	put(root, "cg/memory/job/w-0/cgroup.procs", "");
	ck_assert_msg(cgroup_new(root, "w-0", &cg, &err) == 0, "%s", err.text);
	ck_assert_int_eq(cgroup_usage(cg, &u), 0);
	ck_assert_uint_eq(u.anon_bytes, 4096);
	ck_assert_uint_eq(u.shmem_bytes, 5000);
	ck_assert_uint_eq(u.cache_bytes, 4000);
	ck_assert_uint_eq(u.oom_kills, 3);
	ck_assert_uint_eq(u.swap_out_bytes, CGROUP_UNKNOWN);
	ck_assert_int_eq(cgroup_set_limit(cg, 400 * MiB, &err), 0);
	text = got(root, "cg/memory/job/w-0/memory.limit_in_bytes");
	ck_assert_str_eq(text, "419430400");
	free(text);
	ck_assert_int_eq(cgroup_join(cg), 0);
	text = got(root, "cg/memory/job/w-0/cgroup.procs");
	ck_assert_str_eq(text, "0");
	free(text);
	(void)cgroup_free(cg);
	free(root);
}
END_TEST

#define V2_MOUNT "30 23 0:28 / /cg rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
#define V2_STAT "anon 8192\nfile 10000\nshmem 3000\npswpin 2\npswpout 3\n"

START_TEST(test_cgroup_v2_below_us)
{
	char *root = data_tmpdir(), *text;
	struct cgroup *cg = NULL;
	struct cgroup_usage u;
	struct wd_err err;
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	put(root, "proc/self/cgroup", "0::/a/b\n");
	put(root, "proc/self/mountinfo", V2_MOUNT);
	put(root, "cg/a/b/cgroup.controllers", "cpu memory pids\n");
	put(root, "cg/a/b/cgroup.subtree_control", "pids\n"); /* a plain file here: it takes "+memory" without EBUSY */
	put(root, "cg/a/b/w-0/memory.stat", V2_STAT);
	put(root, "cg/a/b/w-0/memory.events", "low 0\noom 1\noom_kill 1\noom_group_kill 0\n");
	put(root, "cg/a/b/w-0/memory.max", "max\n");
	ck_assert_msg(cgroup_new(root, "w-0", &cg, &err) == 0, "%s", err.text);
	text = got(root, "cg/a/b/cgroup.subtree_control");
	ck_assert_ptr_nonnull(strstr(text, "+memory"));
	free(text);
	ck_assert_int_eq(cgroup_usage(cg, &u), 0);
	ck_assert_uint_eq(u.anon_bytes, 8192);
	ck_assert_uint_eq(u.shmem_bytes, 3000);
	ck_assert_uint_eq(u.cache_bytes, 7000);
	ck_assert_uint_eq(u.swap_in_bytes, 2 * page);
	ck_assert_uint_eq(u.swap_out_bytes, 3 * page);
	ck_assert_uint_eq(u.oom_kills, 1);
	(void)cgroup_free(cg);
	text = got(root, "cg/a/b/cgroup.subtree_control");
	ck_assert_ptr_nonnull(strstr(text, "-memory"));
	free(text);
	free(root);
}
END_TEST

/* Where the kernel refuses to switch memory on below us, the new one stands beside us, unless we have a limit that it
 * would escape. Run as nobody: then the fake tree refuses as well. */
START_TEST(test_cgroup_v2_beside_us)
{
	bool limited = _i;
	char *root = data_tmpdir(), *parent = data_text("%s/cg/a", root);
	struct cgroup *cg = NULL;
	struct cgroup_usage u;
	struct wd_err err = { "" };
	char fake[32];

	put(root, "proc/self/cgroup", "0::/a/b\n");
	put(root, "proc/self/mountinfo", V2_MOUNT);
	put(root, "cg/a/cgroup.subtree_control", "memory pids\n");
	put(root, "cg/a/b/cgroup.controllers", "memory pids\n");
	put(root, "cg/a/b/cgroup.subtree_control", "\n");
	put(root, "cg/a/b/memory.max", limited ? "1048576\n" : "max\n");
	put(root, "cg/a/w-0/memory.stat", V2_STAT);
	ck_assert_int_eq(chown(parent, NOBODY, NOBODY) | chown(root, NOBODY, NOBODY), 0);
	become_nobody(root);
	(void)snprintf(fake, sizeof(fake), "/proc/self/fd/%d", CACHE_FD);
	ck_assert_int_eq(cgroup_new(fake, "w-0", &cg, &err), limited ? -EACCES : 0);
	if (limited) {
		ck_assert_ptr_nonnull(strstr(err.text, "limit"));
	} else {
		ck_assert_int_eq(cgroup_usage(cg, &u), 0);
		ck_assert_uint_eq(u.anon_bytes, 8192);
		ck_assert_ptr_nonnull(strstr(cgroup_path(cg), "/cg/a/w-0"));
	}
	(void)cgroup_free(cg);
	free(parent);
	free(root);
}
END_TEST

START_TEST(test_cgroup_absent)
{
	static const struct {
		const char *own, *controllers;
	} cases[] = { { "", "" }, { "0::/a\n", "cpu pids\n" }, { "4:cpu:/\n", "memory\n" } };
	char *root = data_tmpdir();
	struct cgroup *cg = NULL;
	struct wd_err err = { "" };

	put(root, "proc/self/cgroup", cases[_i].own);
	put(root, "proc/self/mountinfo", V2_MOUNT);
	put(root, "cg/a/cgroup.controllers", cases[_i].controllers);
	ck_assert_int_eq(cgroup_new(root, "w-0", &cg, &err), -EOPNOTSUPP);
	ck_assert_ptr_null(cg);
	ck_assert_str_ne(err.text, "");
	free(root);
}
END_TEST

/* A real one, where the machine gives one: made, entered, filled, seen, killed, removed. */
START_TEST(test_cgroup_real)
{
	struct cgroup *cg = NULL;
	struct cgroup_usage u = { 0 };
	const size_t len = 32 * MiB;
	int pipes[2], status;
	char *path, byte;
	pid_t pid;

	ck_assert_int_eq(cgroup_new("", "weightd-test-1", &cg, NULL), 0);
	path = strdup(cgroup_path(cg));
	ck_assert_int_eq(pipe(pipes), 0);
	pid = fork();
	if (pid == 0) {
		char *p = cgroup_join(cg) < 0 ? NULL : malloc(len);

		if (!p)
			_exit(1);
		memset(p, 1, len);
		if (write(pipes[1], p, 1) == 1)
			(void)pause();
		_exit(1);
	}
	(void)close(pipes[1]);
	ck_assert_int_eq(read(pipes[0], &byte, 1), 1);
	ck_assert_int_eq(cgroup_usage(cg, &u), 0);
	ck_assert_uint_ge(u.anon_bytes, len - MiB);
	ck_assert_uint_le(u.anon_bytes, len + 4 * MiB);
	kill_all(cg);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	ck_assert(WIFSIGNALED(status));
	(void)cgroup_free(cg);
	ck_assert_int_eq(access(path, F_OK), -1);
	free(path);
}
END_TEST

static bool can_run_as_nobody(void)
{
	char *path = tool();
	int status = 1;
	pid_t pid = fork();

	if (pid == 0) {
		become_nobody(NULL);
		_exit(access(path, X_OK) < 0);
	}
	free(path);
	return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

static bool is_on_disk(void)
{
	const char *folder = getenv("TMPDIR");
	struct statfs fs;

	return statfs(folder ? folder : "/var/tmp", &fs) == 0 && fs.f_type != TMPFS_MAGIC;
}

static bool can_mount(void)
{
	int status = 1;
	pid_t pid = fork();

	if (pid == 0) {
		mount_small("/tmp");
		_exit(0);
	}
	return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

int main(void)
{
	Suite *suite = suite_create("demo");
	TCase *t = tcase_create("demo"), *groups = tcase_create("cgroup");
	SRunner *runner = srunner_create(suite);
	struct cgroup *cg = NULL;
	struct wd_err err = { "" };
	int failed;

	disk = is_on_disk();
	if (!disk)
		puts("SKIP test_demo_compares_three_modes: TMPDIR is a tmpfs, so reads from disk are not checked");
	pager = has_pager();
	if (!pager)
		puts("SKIP test_demo_compares_three_modes: no userfaultfd here, so staged's counts are not checked");
	tcase_set_timeout(t, LIMIT_SECONDS);
	tcase_set_timeout(groups, LIMIT_SECONDS);
	tcase_add_test(t, test_demo_compares_three_modes);
	tcase_add_test(t, test_demo_prints_a_table);
	tcase_add_test(t, test_demo_own_checkpoints);
	tcase_add_test(t, test_demo_uses_no_daemon);
	tcase_add_test(t, test_demo_says_that_it_uses_no_daemon);
	tcase_add_test(t, test_demo_damaged_checkpoint_is_one_line);
	tcase_add_loop_test(t, test_demo_usage, 0, 7);
	tcase_add_test(t, test_demo_failed_write_leaves_nothing);
	tcase_add_test(t, test_demo_keeps_its_hands_off_other_files);
	tcase_add_test(t, test_demo_interrupted_while_writing);
	if (can_mount())
		tcase_add_test(t, test_demo_full_disk_leaves_nothing);
	else
		puts("SKIP test_demo_full_disk_leaves_nothing: no tmpfs can be mounted (not root)");
	if (geteuid() == 0 && can_run_as_nobody())
		tcase_add_test(t, test_demo_without_root);
	else
		puts("SKIP test_demo_without_root: not root, or the user nobody cannot reach the program");
	tcase_add_test(groups, test_cgroup_v1);
	tcase_add_test(groups, test_cgroup_v2_below_us);
	tcase_add_loop_test(groups, test_cgroup_absent, 0, 3);
	if (geteuid() == 0)
		tcase_add_loop_test(groups, test_cgroup_v2_beside_us, 0, 2);
	else
		puts("SKIP test_cgroup_v2_beside_us: not root");
	if (cgroup_new("", "weightd-test-1", &cg, &err) == 0) {
		cg = cgroup_free(cg);
		tcase_add_test(groups, test_cgroup_real);
		tcase_add_test(t, test_demo_limit_holds);
		tcase_add_test(t, test_demo_interrupted_while_running);
	} else {
		printf("SKIP test_cgroup_real: %s\n", err.text);
		printf("SKIP test_demo_limit_holds: %s\n", err.text);
		printf("SKIP test_demo_interrupted_while_running: %s\n", err.text);
	}
	(void)fflush(stdout);
	suite_add_tcase(suite, t);
	suite_add_tcase(suite, groups);
	srunner_run_all(runner, CK_ENV);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed != 0;
}
