/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tool from outside: what it prints where, exit codes, JSON, hostile input, broken outputs, missing rights. And from
 * inside the two files that have edges which no command reaches (sizes, text, /proc).
 *
 * JSON is parsed by jansson here, never compared as text.
 */
#include "cli/machine.c" /* the tests are linked with the library's objects, not with the tool's */
#include "cli/util.c"
#include "lib/include/weightd.h"
#include "tests/data.h"

#include <check.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <locale.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define NOBODY 65534u

/* ---- running the tool */

struct how {
	char *env;       /* "NAME=value", or NULL */
	const char *out; /* a file to open as stdout; NULL: captured */
	bool nobody;     /* as a user without any rights */
	bool ignore_sigpipe;
	bool close_out;         /* stdout is closed from the start */
	size_t read_most;       /* stdout is a pipe whose reader goes away after so many bytes; 0: no pipe */
	int refuse_userfaultfd; /* errno from a filter of system calls */
};

struct ran {
	int code; /* exit code, or 128 + signal */
	char *out, *err;
};

static void ran_done(struct ran *r)
{
	free(r->out);
	free(r->err);
}
#define cleanup_ran cleanup(ran_done)

static void filter_userfaultfd(int error)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned int)error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog filter = { .len = ARRAY_SIZE(code), .filter = code };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) < 0)
		_exit(126);
}

static void become(const struct how *how, int out, int err, int tool, char **argv)
{
	int null = open("/dev/null", O_RDWR);

	(void)dup2(null, 0);
	(void)dup2(out, 1);
	(void)dup2(err, 2);
	if (how->close_out)
		(void)close(1);
	if (how->env)
		(void)putenv(how->env);
	(void)signal(SIGPIPE, how->ignore_sigpipe ? SIG_IGN : SIG_DFL);
	if (how->nobody && (setgroups(0, NULL) < 0 || setgid(NOBODY) < 0 || setuid(NOBODY) < 0))
		_exit(126);
	if (how->refuse_userfaultfd)
		filter_userfaultfd(how->refuse_userfaultfd);
	/* By descriptor: a user without rights may not be able to walk to where it was built. */
	(void)fexecve(tool, argv, environ);
	_exit(127);
}

static char *read_all(int fd)
{
	struct stat st;
	char *text;

	ck_assert_int_eq(fstat(fd, &st), 0);
	text = calloc(1, (size_t)st.st_size + 1);
	ck_assert_ptr_nonnull(text);
	ck_assert_int_eq(pread(fd, text, (size_t)st.st_size, 0), st.st_size);
	return text;
}

static int tool_open(void)
{
	const char *out = getenv("OUT");
	cleanup_free char *path = data_text("%s/weightd", out ? out : ".out");
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	ck_assert_msg(fd >= 0, "%s: %s: build it first", path, strerror(errno));
	return fd;
}

static struct ran run_how(const struct how *how, char **argv)
{
	cleanup_close int out = how->out ? open(how->out, O_WRONLY | O_CLOEXEC) : memfd_create("out", MFD_CLOEXEC);
	cleanup_close int err = memfd_create("err", MFD_CLOEXEC);
	cleanup_close int tool = tool_open();
	int pipes[2] = { -1, -1 }, status;
	struct ran ran = { 0 };
	pid_t pid;

	ck_assert_int_ge(out, 0);
	if (how->read_most > 0)
		ck_assert_int_eq(pipe2(pipes, O_CLOEXEC), 0);
	pid = fork();
	ck_assert_int_ge(pid, 0);
	if (pid == 0)
		become(how, how->read_most > 0 ? pipes[1] : out, err, tool, argv);
	if (how->read_most > 0) {
		char buf[256];
		size_t got = 0;
		ssize_t n = 0;

		(void)close(pipes[1]);
		while (got < how->read_most && (n = read(pipes[0], buf, MIN(sizeof(buf), how->read_most - got))) > 0)
			got += (size_t)n;
		ck_assert_int_eq(got, how->read_most);
		(void)close(pipes[0]);
	}
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	ran.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
	ck_assert_int_ne(ran.code, 126);
	ck_assert_int_ne(ran.code, 127);
	ran.out = how->out ? strdup("") : read_all(out);
	ran.err = read_all(err);
	return ran;
}

#define HOW(...)            \
	&(struct how)       \
	{                   \
		__VA_ARGS__ \
	}
#define RUN_HOW(how, ...) run_how(how, (char *[]){ "weightd", __VA_ARGS__, NULL })
#define RUN(...) RUN_HOW(HOW(0), __VA_ARGS__)

static size_t lines(const char *s)
{
	size_t n = 0;

	for (; *s; s++)
		n += *s == '\n';
	return n;
}

static json_t *parse(const struct ran *ran)
{
	json_error_t e;
	json_t *root = json_loads(ran->out, JSON_REJECT_DUPLICATES, &e);

	ck_assert_msg(root != NULL, "%s (%d:%d)", e.text, e.line, e.column);
	return root;
}

static const char *str(const json_t *object, const char *key)
{
	const char *s = json_string_value(json_object_get(object, key));

	ck_assert_msg(s != NULL, "no string \"%s\"", key);
	return s;
}

static json_int_t num(const json_t *object, const char *key)
{
	ck_assert_msg(json_is_integer(json_object_get(object, key)), "no integer \"%s\"", key);
	return json_integer_value(json_object_get(object, key));
}

static void has(const char *text, const char *part)
{
	ck_assert_msg(strstr(text, part) != NULL, "no '%s' in:\n%s", part, text);
}

static void has_not(const char *text, const char *part)
{
	ck_assert_msg(strstr(text, part) == NULL, "'%s' in:\n%s", part, text);
}

/* ---- the command line */

static const char *const commands_all[] = { "inspect", "doctor", "demo",  "serve",    "ls",      "stat", "prefetch",
					    "drop",    "pin",    "unpin", "shutdown", "version", "help" };

START_TEST(test_help_goes_to_stdout)
{
	const char *name = commands_all[_i];
	cleanup_ran struct ran a = RUN((char *)name, "--help"), b = RUN("help", (char *)name);
	cleanup_free char *usage = data_text("Usage: weightd %s", name);

	ck_assert_int_eq(a.code, 0);
	ck_assert_int_eq(strncmp(a.out, usage, strlen(usage)), 0);
	ck_assert_str_eq(a.err, "");
	ck_assert_int_eq(b.code, 0);
	ck_assert_str_eq(a.out, b.out);
	for (char *line = strtok(a.out, "\n"); line; line = strtok(NULL, "\n"))
		ck_assert_msg(strlen(line) <= 80, "wider than 80 columns: %s", line);
}
END_TEST

START_TEST(test_overview_names_every_command)
{
	cleanup_ran struct ran a = RUN("--help"), b = RUN("help");
	cleanup_ran struct ran none = run_how(&(struct how){ 0 }, (char *[]){ "weightd", NULL });

	ck_assert_int_eq(a.code, 0);
	ck_assert_str_eq(a.out, b.out);
	for (size_t i = 0; i < ARRAY_SIZE(commands_all); i++)
		has(a.out, commands_all[i]);
	has(a.out, "8G is 8 GiB");
	ck_assert_int_eq(none.code, 2);
	ck_assert_str_eq(none.out, "");
	ck_assert_str_eq(none.err, a.out);
}
END_TEST

static const struct {
	const char *args[3], *says, *hint;
} wrong[] = {
	{ { "insepct" }, "weightd: no command 'insepct'; did you mean 'weightd inspect'?", "weightd --help" },
	{ { "doc" }, "did you mean 'weightd doctor'?", "weightd --help" },
	{ { "VERSION" }, "did you mean 'weightd version'?", "weightd --help" },
	{ { "xylophone" }, "weightd: no command 'xylophone'\n", "weightd --help" },
	{ { "" }, "weightd: no command ''\n", "weightd --help" },
	{ { "\033[31m" }, "weightd: no command '\\x1b[31m'\n", "weightd --help" },
	{ { "--frobnicate" }, "weightd: no option '--frobnicate'", "weightd --help" },
	{ { "inspect" }, "weightd inspect: no file given", "weightd inspect --help" },
	{ { "inspect", "--frob", "x" }, "weightd inspect: unrecognized option '--frob'", "weightd inspect --help" },
	{ { "inspect", "--variant" }, "requires an argument", "weightd inspect --help" },
	{ { "inspect", "-j", "x" }, "invalid option -- 'j'", "weightd inspect --help" },
	{ { "doctor", "now" }, "weightd doctor: takes no argument: 'now'", "weightd doctor --help" },
	{ { "doctor", "--folder" }, "requires an argument", "weightd doctor --help" },
	{ { "version", "now" }, "weightd version: takes no argument: 'now'", "weightd version --help" },
	{ { "help", "insepct" }, "did you mean 'weightd inspect'?", "weightd help --help" },
	{ { "help", "doctor", "demo" }, "weightd help: one command at a time", "weightd help --help" },
};

START_TEST(test_wrong_command_line_is_2_and_tells_where_help_is)
{
	cleanup_ran struct ran r =
		run_how(&(struct how){ 0 }, (char *[]){ "weightd", (char *)wrong[_i].args[0], (char *)wrong[_i].args[1],
							(char *)wrong[_i].args[2], NULL });

	ck_assert_int_eq(r.code, 2);
	ck_assert_str_eq(r.out, "");
	has(r.err, wrong[_i].says);
	has(r.err, wrong[_i].hint);
	ck_assert_int_eq(lines(r.err), 2);
}
END_TEST

START_TEST(test_version_is_the_librarys)
{
	cleanup_ran struct ran a = RUN("version"), b = RUN("--version");
	cleanup_ran struct ran j = RUN("version", "--json");
	cleanup_json json_t *root = parse(&j);

	ck_assert_int_eq(a.code, 0);
	ck_assert_int_eq(strncmp(a.out, "weightd " WD_VERSION "\n", strlen("weightd " WD_VERSION "\n")), 0);
	ck_assert_str_eq(a.out, b.out);
	ck_assert_int_eq(j.code, 0);
	ck_assert_str_eq(str(root, "version"), WD_VERSION);
	ck_assert_str_eq(str(json_object_get(root, "libraries"), "jansson"), jansson_version_str());
	ck_assert_str_ne(str(json_object_get(root, "libraries"), "liburing"), "");
	ck_assert_int_gt(json_array_size(json_object_get(root, "formats")), 0);
	ck_assert_int_eq(json_array_size(json_object_get(root, "ways")), 4);
}
END_TEST

/* ---- inspect */

static char *folder;

static void setup(void)
{
	folder = data_tmpdir();
}

static void teardown(void)
{
	data_remove(folder);
	free(folder);
}

static char *at(const char *name)
{
	return data_text("%s/%s", folder, name);
}

static char *small_file(void)
{
	char *path = at("small.safetensors");
	struct data_tensor t[] = {
		{ .name = "embed.weight", .dtype = "F32", .ndim = 2, .shape = { 16, 8 } },
		{ .name = "scale", .dtype = "BF16", .ndim = 0 },
		{ .name = "empty", .dtype = "U8", .ndim = 2, .shape = { 0, 4 } },
	};
	char metadata[600] = "{\"format\": \"pt\", \"license\": \"";
	size_t len = strlen(metadata);

	(void)memset(metadata + len, 'x', 500);
	(void)strcpy(metadata + len + 500, "\"}");
	(void)data_write_safetensors(path, t, ARRAY_SIZE(t), &(struct data_opts){ .seed = 1, .metadata = metadata });
	return path;
}

START_TEST(test_inspect_lists_tensors)
{
	cleanup_free char *path = small_file(),
			  *first = data_text("%s: safetensors, 3 tensors, 514 B, U8 BF16 F32\n", path);
	cleanup_ran struct ran r = RUN("inspect", path);
	char *row;

	ck_assert_int_eq(r.code, 0);
	ck_assert_str_eq(r.err, "");
	ck_assert_int_eq(strncmp(r.out, first, strlen(first)), 0);
	has(r.out, "NAME          DTYPE  SHAPE   BYTES  OFFSET\n");
	row = strstr(r.out, "embed.weight  F32    [16,8]    512  ");
	ck_assert_ptr_nonnull(row);
	has(r.out, "  scale         BF16   []          2  ");
	has(r.out, "  empty         U8     [0,4]       0  ");
	has(r.out, "total: 3 tensors, 514 bytes: 1 of U8, 1 of BF16, 1 of F32\n");
	has(r.out, "x... (cut: 500 bytes, see --metadata)");
	has_not(r.out, "\033");
}
END_TEST

START_TEST(test_inspect_metadata_in_full)
{
	cleanup_free char *path = small_file();
	cleanup_ran struct ran r = RUN("inspect", "--metadata", path);
	char all[501];

	(void)memset(all, 'x', 500);
	all[500] = '\0';
	ck_assert_int_eq(r.code, 0);
	has(r.out, all);
	has_not(r.out, "cut:");
	has_not(r.out, "embed.weight");
}
END_TEST

START_TEST(test_inspect_json_is_exact)
{
	cleanup_free char *path = small_file();
	cleanup_ran struct ran r = RUN("inspect", "--json", path);
	cleanup_ran struct ran m = RUN("inspect", "--json", "--metadata", path);
	cleanup_json json_t *root = parse(&r), *short_ = parse(&m);
	json_t *c = json_array_get(json_object_get(root, "checkpoints"), 0), *t, *f;

	ck_assert_int_eq(r.code, 0);
	ck_assert_int_eq(json_array_size(json_object_get(root, "errors")), 0);
	ck_assert_str_eq(str(c, "path"), path);
	ck_assert_str_eq(str(c, "name"), "small");
	ck_assert_int_eq(num(c, "nr_tensors"), 3);
	ck_assert_int_eq(num(c, "bytes"), 514);
	ck_assert_int_eq(num(json_object_get(json_object_get(c, "dtypes"), "F32"), "bytes"), 512);
	ck_assert_int_eq(json_string_length(json_object_get(json_object_get(c, "metadata"), "license")), 500);
	f = json_array_get(json_object_get(c, "files"), 0);
	ck_assert_str_eq(str(f, "path"), path);
	ck_assert_str_eq(str(f, "format"), "safetensors");
	ck_assert_int_eq(num(f, "data_bytes"), 514);
	ck_assert_int_eq(num(f, "bytes"), num(f, "data_offset") + 514);
	t = json_array_get(json_object_get(c, "tensors"), 0);
	ck_assert_str_eq(str(t, "name"), "embed.weight");
	ck_assert_str_eq(str(t, "dtype"), "F32");
	ck_assert_int_eq(json_array_size(json_object_get(t, "shape")), 2);
	ck_assert_int_eq(json_integer_value(json_array_get(json_object_get(t, "shape"), 0)), 16);
	ck_assert_int_eq(num(t, "bytes"), 512);
	ck_assert_int_eq(num(t, "file"), 0);
	ck_assert_int_eq(num(t, "offset"), num(f, "data_offset"));
	ck_assert_int_eq(json_array_size(json_object_get(json_array_get(json_object_get(c, "tensors"), 1), "shape")),
			 0);

	c = json_array_get(json_object_get(short_, "checkpoints"), 0);
	ck_assert_ptr_null(json_object_get(c, "tensors"));
	ck_assert_int_eq(num(c, "nr_tensors"), 3);
}
END_TEST

START_TEST(test_inspect_hostile_names_stay_text)
{
	cleanup_free char *path = at("evil\033[2J\n.safetensors");
	static const char header[] =
		"{\"__metadata__\":{\"k\\u001b]0;t\\u0007\":\"v\\u001b[2J\\nnext\"},"
		"\"a\\u001b[31mred\\u0007\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
		"\"\\u202eesrever\\u009b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]},"
		"\"\\u65e5\\u672c\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]},"
		"\"\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[3,4]}}";
	cleanup_json json_t *root = NULL;
	json_t *tensors;

	(void)data_write_header(path, header, 4, 1);
	{
		cleanup_ran struct ran r = RUN("inspect", path), j = RUN("inspect", "--json", path);

		ck_assert_int_eq(r.code, 0);
		for (const char *s = r.out; *s; s++)
			ck_assert_msg((unsigned char)*s >= ' ' || *s == '\n', "control character %#x",
				      (unsigned int)*s);
		has_not(r.out, "\u202e");
		has_not(r.out, "\xc2\x9b");
		has(r.out, "  a\\x1b[31mred\\x07       U8     [1]        1  ");
		has(r.out, "  \\u{202e}esrever\\u{9b}  U8     [1]        1  ");
		has(r.out, "  \u65e5\u672c                   U8  "); /* two characters, four columns */
		has(r.out, "v\\x1b[2J\\nnext");
		has(r.out, "evil\\x1b[2J\\n.safetensors: safetensors, 4 tensors");
		ck_assert_int_eq(lines(r.out), 1 + 2 + 1 + 4 + 1);

		root = parse(&j);
		tensors = json_object_get(json_array_get(json_object_get(root, "checkpoints"), 0), "tensors");
		ck_assert_str_eq(str(json_array_get(tensors, 0), "name"), "a\033[31mred\a");
		ck_assert_str_eq(str(json_array_get(tensors, 1), "name"), "\u202eesrever\xc2\x9b");
		ck_assert_str_eq(str(json_array_get(tensors, 3), "name"), "");
	}
}
END_TEST

START_TEST(test_inspect_path_that_is_no_utf8)
{
	cleanup_free char *good = small_file(), *path = at("\xff\xfe.safetensors");

	ck_assert_int_eq(rename(good, path), 0);
	{
		cleanup_ran struct ran r = RUN("inspect", path), j = RUN("inspect", "--json", path);
		cleanup_json json_t *root = parse(&j);

		ck_assert_int_eq(r.code, 0);
		has(r.out, "\\xff\\xfe.safetensors: safetensors");
		ck_assert_int_eq(j.code, 0);
		has(str(json_array_get(json_object_get(root, "checkpoints"), 0), "path"), "\ufffd\ufffd.safetensors");
	}
}
END_TEST

START_TEST(test_inspect_goes_on_after_bad_files)
{
	cleanup_free char *good = small_file(), *missing = at("missing"), *lfs = at("lfs.safetensors"),
			  *cut = at("cut");
	static const char pointer[] =
		"version https://git-lfs.github.com/spec/v1\n"
		"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";

	data_write(lfs, pointer, strlen(pointer));
	data_write(cut, "\x40\0\0\0\0\0\0\0{", 9);
	{
		cleanup_ran struct ran r = RUN("inspect", missing, lfs, good, cut, "/dev/null");
		cleanup_ran struct ran j = RUN("inspect", "--json", missing, lfs, good, cut);
		cleanup_json json_t *root = parse(&j);
		json_t *errors = json_object_get(root, "errors");

		ck_assert_int_eq(r.code, 1);
		has(r.out, "embed.weight");
		ck_assert_int_eq(r.out[0], good[0]); /* no empty line first */
		ck_assert_int_eq(lines(r.err), 4);
		has(r.err, "weightd inspect: ");
		has(r.err, missing);
		has(r.err, "No such file");
		has(r.err, "LFS");
		has(r.err, cut);
		has(r.err, "/dev/null");

		ck_assert_int_eq(j.code, 1);
		ck_assert_int_eq(json_array_size(json_object_get(root, "checkpoints")), 1);
		ck_assert_int_eq(json_array_size(errors), 3);
		ck_assert_str_eq(str(json_array_get(errors, 0), "path"), missing);
		ck_assert_int_eq(num(json_array_get(errors, 0), "errno"), ENOENT);
		ck_assert_int_eq(num(json_array_get(errors, 1), "errno"), EBADMSG);
		has(str(json_array_get(errors, 1), "text"), "LFS");
		ck_assert_int_eq(lines(j.err), 3);
	}
}
END_TEST

START_TEST(test_inspect_trailing)
{
	cleanup_free char *path = at("trailing.safetensors");
	struct data_tensor t = { .name = "w", .dtype = "U8", .ndim = 1, .shape = { 8 } };

	(void)data_write_safetensors(path, &t, 1, &(struct data_opts){ .trailing = 5 });
	{
		cleanup_ran struct ran no = RUN("inspect", path);
		cleanup_ran struct ran yes = RUN("inspect", "--trailing", path);

		ck_assert_int_eq(no.code, 1);
		ck_assert_int_eq(lines(no.err), 1);
		has(no.err, "--trailing");
		ck_assert_int_eq(yes.code, 0);
		has(yes.out, "1 tensor, 8 B, U8");
	}
}
END_TEST

static void shard(const char *name, const char *tensor, uint64_t seed)
{
	cleanup_free char *path = at(name);
	struct data_tensor t = { .name = tensor, .dtype = "F16", .ndim = 2, .shape = { 4, 4 } };

	(void)data_write_safetensors(path, &t, 1, &(struct data_opts){ .seed = seed });
}

START_TEST(test_inspect_shards_and_variants)
{
	cleanup_free char *index = at("model.safetensors.index.json");
	static const char text[] = "{\"metadata\":{},\"weight_map\":{\"a\":\"model-00001-of-00002.safetensors\","
				   "\"b\":\"model-00002-of-00002.safetensors\"}}";

	shard("model-00001-of-00002.safetensors", "a", 1);
	shard("model-00002-of-00002.safetensors", "b", 2);
	shard("model.fp16.safetensors", "half", 3);
	data_write(index, text, strlen(text));
	{
		cleanup_ran struct ran r = RUN("inspect", index);
		cleanup_ran struct ran j = RUN("inspect", index, "--json");
		cleanup_ran struct ran v = RUN("inspect", "--variant", "fp16", folder);
		cleanup_json json_t *root = parse(&j);
		json_t *c = json_array_get(json_object_get(root, "checkpoints"), 0);

		ck_assert_int_eq(r.code, 0);
		has(r.out, "safetensors in 2 files, 2 tensors, 64 B, F16");
		has(r.out, "FILE\n");
		has(r.out, "model-00002-of-00002.safetensors\n");
		ck_assert_int_eq(json_array_size(json_object_get(c, "files")), 2);
		ck_assert_int_eq(num(json_array_get(json_object_get(c, "tensors"), 1), "file"), 1);
		ck_assert_int_eq(v.code, 0);
		has(v.out, "half");
	}
}
END_TEST

START_TEST(test_inspect_pipeline)
{
	static const char text[] =
		"{\"_class_name\": \"P\", \"unet\": [\"diffusers\", \"U\"], \"vae\": [\"diffusers\", \"V\"]}";
	cleanup_free char *index = at("model_index.json"), *unet = at("unet"), *vae = at("vae");

	ck_assert_int_eq(mkdir(unet, 0755), 0);
	ck_assert_int_eq(mkdir(vae, 0755), 0);
	shard("unet/diffusion_pytorch_model.safetensors", "w", 1);
	shard("vae/diffusion_pytorch_model.safetensors", "w", 2);
	data_write(index, text, strlen(text));
	{
		cleanup_ran struct ran r = RUN("inspect", folder);
		cleanup_ran struct ran j = RUN("inspect", "--json", "--", folder);
		cleanup_json json_t *root = parse(&j);
		json_t *c = json_array_get(json_object_get(root, "checkpoints"), 0);
		cleanup_free char *part = data_text("%s/vae: safetensors, 1 tensor, 32 B, F16\n", folder);

		ck_assert_int_eq(r.code, 0);
		has(r.out, "pipeline, 2 parts, 2 tensors, 64 B, F16");
		has(r.out, part);
		ck_assert_int_eq(num(c, "nr_tensors"), 2);
		ck_assert_int_eq(json_array_size(json_object_get(c, "parts")), 2);
		ck_assert_str_eq(str(json_array_get(json_object_get(c, "parts"), 0), "name"), "unet");
	}
}
END_TEST

START_TEST(test_inspect_without_rights)
{
	/* Folders above may be closed to others: a descriptor that the tool inherits leads past them. */
	cleanup_free char *path = small_file();
	cleanup_close int fd = open(path, O_PATH);
	cleanup_free char *inherited = data_text("/proc/self/fd/%d", fd);

	ck_assert_int_eq(chmod(path, 0644), 0);
	{
		/* No userfaultfd is needed, and none is there. */
		cleanup_ran struct ran r =
			RUN_HOW(HOW(.nobody = true, .refuse_userfaultfd = EPERM), "inspect", inherited);

		ck_assert_msg(r.code == 0, "%s", r.err);
		has(r.out, "embed.weight");
	}
	ck_assert_int_eq(chmod(path, 0600), 0);
	{
		cleanup_ran struct ran r = RUN_HOW(HOW(.nobody = true), "inspect", inherited);

		ck_assert_int_eq(r.code, 1);
		ck_assert_int_eq(lines(r.err), 1);
		has(r.err, "Permission denied");
	}
}
END_TEST

#define MANY 100000

START_TEST(test_inspect_100000_tensors)
{
	cleanup_free char *path = at("many.safetensors");
	char *header = malloc(MANY * 80), *to = header;

	for (unsigned int i = 0; i < MANY; i++)
		to += sprintf(to, "%c\"t.%06u\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%u,%u]}",
			      i ? ',' : '{', i, i, i + 1);
	(void)strcpy(to, "}");
	(void)data_write_header(path, header, MANY, 1);
	free(header);
	{
		cleanup_ran struct ran r = RUN("inspect", path), j = RUN("inspect", "--json", path);
		cleanup_json json_t *root = parse(&j);

		ck_assert_int_eq(r.code, 0);
		ck_assert_int_eq(lines(r.out), 1 + 1 + MANY + 1);
		ck_assert_int_eq(json_array_size(json_object_get(
					 json_array_get(json_object_get(root, "checkpoints"), 0), "tensors")),
				 MANY);
	}
	{
		/* `| head` ends it without a word, with SIGPIPE and where a parent ignores that */
		cleanup_ran struct ran r = RUN_HOW(HOW(.read_most = 10), "inspect", path);
		cleanup_ran struct ran i = RUN_HOW(HOW(.read_most = 10, .ignore_sigpipe = true), "inspect", path);

		ck_assert_int_eq(r.code, 128 + SIGPIPE);
		ck_assert_str_eq(r.err, "");
		ck_assert_int_eq(i.code, 1);
		ck_assert_str_eq(i.err, "");
	}
}
END_TEST

START_TEST(test_output_that_cannot_be_written_is_told)
{
	cleanup_free char *path = small_file();
	char *argv[][4] = {
		{ "weightd", "inspect", path }, { "weightd", "doctor" }, { "weightd", "doctor", "--json" },
		{ "weightd", "version" },       { "weightd", "--help" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(argv); i++) {
		cleanup_ran struct ran full = run_how(&(struct how){ .out = "/dev/full" }, argv[i]);
		cleanup_ran struct ran closed = run_how(&(struct how){ .close_out = true }, argv[i]);

		ck_assert_int_eq(full.code, 1);
		ck_assert_int_eq(lines(full.err), 1);
		has(full.err, "No space left on device");
		ck_assert_int_eq(closed.code, 1);
		has(closed.err, "Bad file descriptor");
	}
}
END_TEST

/* ---- doctor */

static const char *const checks_all[] = {
	"kernel",           "pages",    "dev-userfaultfd", "userfaultfd",   "userfaultfd-user",
	"pagemap-scan",     "tmpfs",    "tmpfs-noswap",    "tmpfs-huge",    "memfd-huge",
	"transparent-huge", "io-uring", "direct-io",       "max-map-count", "open-files",
	"memory",           "swap",     "overcommit",      "numa",          "serve",
	"daemon",
};

/* What must hold whatever the machine gives. Return: the way. */
static const char *check_doctor(const json_t *root)
{
	const char *way = str(root, "way");
	json_t *c, *ways = json_object_get(root, "ways"), *checks = json_object_get(root, "checks");
	size_t i, chosen = 0;

	for (i = 0; i < ARRAY_SIZE(checks_all); i++) {
		size_t found = 0, at_;

		json_array_foreach(checks, at_, c)
			found += strcmp(str(c, "name"), checks_all[i]) == 0;
		ck_assert_msg(found == 1, "%zu checks %s", found, checks_all[i]);
	}
	json_array_foreach(checks, i, c) {
		const char *status = str(c, "status");

		ck_assert_str_ne(str(c, "found"), "");
		ck_assert_str_ne(str(c, "gives"), "");
		ck_assert(strcmp(status, "ok") == 0 || strcmp(status, "missing") == 0 || strcmp(status, "n/a") == 0);
		/* what is missing comes with the way to get it, and nothing else does */
		ck_assert_int_eq(strcmp(status, "missing") == 0, json_is_string(json_object_get(c, "get")));
	}
	ck_assert_int_eq(json_array_size(ways), 4);
	json_array_foreach(ways, i, c) {
		bool is = json_is_true(json_object_get(c, "chosen"));

		chosen += is;
		ck_assert_int_eq(is, strcmp(str(c, "name"), way) == 0);
		ck_assert(!is || json_is_true(json_object_get(c, "possible")));
		ck_assert_str_ne(str(c, "text"), "");
	}
	ck_assert_int_eq(chosen, 1);
	ck_assert(json_is_array(json_object_get(root, "fallbacks")));
	return way;
}

static const char *check_status(const json_t *root, const char *name)
{
	json_t *c;
	size_t i;

	json_array_foreach(json_object_get(root, "checks"), i, c)
		if (strcmp(str(c, "name"), name) == 0)
			return str(c, "status");
	ck_abort_msg("no check %s", name);
}

static bool has_fallback(const json_t *root, const char *name)
{
	json_t *f;
	size_t i;

	json_array_foreach(json_object_get(root, "fallbacks"), i, f)
		if (strcmp(str(f, "for"), name) == 0)
			return true;
	return false;
}

START_TEST(test_doctor_agrees_with_the_library)
{
	cleanup_ran struct ran j = RUN("doctor", "--json"), r = RUN("doctor");
	cleanup_json json_t *root = parse(&j);
	const char *way = check_doctor(root);
	struct wd *wd = NULL;

	ck_assert_int_eq(j.code, 0);
	ck_assert_int_eq(num(root, "uid"), geteuid());
	ck_assert_int_eq(wd_connect(NULL, &wd), 0);
	ck_assert_str_eq(wd_way_name(wd_way(wd)), way);
	wd_disconnect(wd);

	ck_assert_int_eq(r.code, 0);
	ck_assert_str_eq(r.err, "");
	has_not(r.out, "\033");
	for (size_t i = 0; i < ARRAY_SIZE(checks_all); i++)
		has(r.out, checks_all[i]);
	has(r.out, "daemon    no daemon answers at ");
	/* one line a check and a way where the output is no terminal */
	ck_assert_int_eq(lines(strstr(r.out, "Ways to run")) -
				 (strstr(r.out, "What stands in") ? lines(strstr(r.out, "What stands in")) + 1 : 0),
			 1 + 4);
}
END_TEST

START_TEST(test_doctor_obeys_the_environment)
{
	cleanup_ran struct ran m = RUN_HOW(HOW(.env = "WEIGHTD_MODE=mmap"), "doctor", "--json");
	cleanup_ran struct ran b = RUN_HOW(HOW(.env = "WEIGHTD_MODE=bogus"), "doctor", "--json");
	cleanup_ran struct ran a = RUN_HOW(HOW(.env = "WEIGHTD_MODE=auto"), "doctor", "--json");
	cleanup_json json_t *root = parse(&m), *bogus = parse(&b), *automatic = parse(&a);

	ck_assert_int_eq(m.code, 0);
	ck_assert_str_eq(check_doctor(root), "mmap");
	ck_assert_int_eq(json_array_size(json_object_get(root, "fallbacks")), 0);
	ck_assert_int_eq(a.code, 0);
	(void)check_doctor(automatic);
	ck_assert_int_eq(b.code, 1);
	ck_assert(json_is_null(json_object_get(bogus, "way")));
	has(b.err, "WEIGHTD_MODE");
	ck_assert_int_eq(lines(b.err), 1);
}
END_TEST

START_TEST(test_doctor_folder)
{
	cleanup_ran struct ran ext = RUN("doctor", "--json", "--folder", folder);
	cleanup_ran struct ran proc = RUN("doctor", "--json", "--folder=/proc");
	cleanup_ran struct ran none = RUN("doctor", "--folder=/nowhere\n/x");
	cleanup_json json_t *a = parse(&ext), *b = parse(&proc);

	ck_assert_int_eq(ext.code, 0);
	(void)check_doctor(a);
	ck_assert_int_eq(proc.code, 0);
	(void)check_doctor(b);
	ck_assert_str_eq(check_status(b, "direct-io"), "n/a"); /* nothing can be made there */
	ck_assert_int_eq(none.code, 1);
	ck_assert_int_eq(lines(none.err), 1);
	has(none.err, "/nowhere\\n/x: No such file or directory");
}
END_TEST

START_TEST(test_doctor_as_nobody)
{
	cleanup_ran struct ran j = RUN_HOW(HOW(.nobody = true), "doctor", "--json", "--folder=/");
	cleanup_json json_t *root = parse(&j);

	ck_assert_int_eq(j.code, 0);
	ck_assert_int_eq(num(root, "uid"), NOBODY);
	(void)check_doctor(root);
	ck_assert_str_eq(check_status(root, "tmpfs"), "missing");
	if (strcmp(check_status(root, "dev-userfaultfd"), "missing") == 0 &&
	    strcmp(check_status(root, "userfaultfd"), "missing") == 0 &&
	    strcmp(check_status(root, "userfaultfd-user"), "ok") == 0) {
		cleanup_ran struct ran e =
			RUN_HOW(HOW(.nobody = true, .env = "WEIGHTD_MODE=embedded"), "doctor", "--folder=/");

		/* one thing is missing for the better way, and it is named; what stands in for it as well */
		ck_assert_str_eq(str(root, "way"), "user");
		ck_assert_str_eq(str(json_array_get(json_object_get(root, "ways"), 1), "text"),
				 "needs dev-userfaultfd or userfaultfd (see above)");
		ck_assert(has_fallback(root, "tmpfs"));
		ck_assert(has_fallback(root, "fork-events"));
		ck_assert_int_eq(e.code, 1);
		has(e.err, "WEIGHTD_MODE");
	}
}
END_TEST

START_TEST(test_doctor_where_userfaultfd_is_refused)
{
	int error = _i == 0 ? EPERM : ENOSYS;
	cleanup_ran struct ran j = RUN_HOW(HOW(.nobody = true, .refuse_userfaultfd = error), "doctor", "--json");
	cleanup_ran struct ran r = RUN_HOW(HOW(.nobody = true, .refuse_userfaultfd = error), "doctor");
	cleanup_json json_t *root = parse(&j);

	ck_assert_int_eq(j.code, 0);
	(void)check_doctor(root);
	ck_assert_str_eq(check_status(root, "userfaultfd-user"), "missing");
	has(r.out, "seccomp");
	if (access("/dev/userfaultfd", F_OK) == 0 && strcmp(check_status(root, "dev-userfaultfd"), "ok") == 0)
		return; /* this machine gives the device to everyone: then that is used */
	ck_assert_str_eq(str(root, "way"), "mmap");
	has(r.out, "needs dev-userfaultfd or userfaultfd (see above)\n");
	has(r.out, "needs userfaultfd-user (see above)\n");
	ck_assert_int_eq(json_array_size(json_object_get(root, "fallbacks")), 0);
}
END_TEST

/* ---- /proc and /sys */

static void fake(const char *path, const char *text)
{
	cleanup_free char *full = at(path);

	for (char *slash = strchr(full + strlen(folder) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		(void)mkdir(full, 0755);
		*slash = '/';
	}
	data_write(full, text, strlen(text));
}

START_TEST(test_machine_reads)
{
	static const char *const no_lists[] = { "", "x", "3-1", "0-", "0;1", "0,x" };
	struct machine m;

	machine_read(folder, &m); /* nothing is there */
	ck_assert_uint_eq(m.swap_bytes, MACHINE_UNKNOWN);
	ck_assert_uint_eq(m.huge_page_bytes, 0);
	ck_assert_str_eq(m.shmem_enabled, "");
	ck_assert_int_eq(m.overcommit, -1);
	ck_assert_uint_eq(m.numa_nodes, 0);
	ck_assert(!m.seccomp && !m.cap_ptrace && !machine_may_userfaultfd(&m));

	fake("proc/meminfo", "MemTotal:  100 kB\nSwapTotal:      2048 kB\nSwapFree: 0 kB\n");
	fake("proc/self/status", "Name:\tx\nCapEff:\t0000000000080000\nSeccomp:\t2\n");
	fake("proc/sys/vm/overcommit_memory", "2\n");
	fake("proc/sys/vm/unprivileged_userfaultfd", "0\n");
	fake("proc/sys/kernel/io_uring_disabled", "1\n");
	fake("sys/devices/system/node/online", "0-3,8,10-11\n");
	fake("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "2097152\n");
	fake("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size advise never [deny] force\n");
	fake("sys/kernel/mm/transparent_hugepage/enabled", "always madvise never\n");
	machine_read(folder, &m);
	ck_assert_uint_eq(m.swap_bytes, 2048 * KiB);
	ck_assert_uint_eq(m.huge_page_bytes, 2 * MiB);
	ck_assert_str_eq(m.shmem_enabled, "deny");
	ck_assert_str_eq(m.thp, "");
	ck_assert_int_eq(m.overcommit, 2);
	ck_assert_int_eq(m.io_uring_disabled, 1);
	ck_assert_int_eq(m.unprivileged_userfaultfd, 0);
	ck_assert_uint_eq(m.numa_nodes, 7);
	ck_assert(m.seccomp && m.cap_ptrace && machine_may_userfaultfd(&m));
	for (size_t i = 0; i < ARRAY_SIZE(no_lists); i++) {
		fake("sys/devices/system/node/online", no_lists[i]);
		machine_read(folder, &m);
		ck_assert_uint_eq(m.numa_nodes, 0);
	}
}
END_TEST

/* ---- sizes and text */

static const struct {
	const char *text;
	uint64_t whole;
	int r;
	uint64_t bytes;
} sizes[] = {
	{ "0", 0, 0, 0 },
	{ "512", 0, 0, 512 },
	{ "512B", 0, 0, 512 },
	{ "8G", 0, 0, 8 * GiB },
	{ "8g", 0, 0, 8 * GiB },
	{ "8GiB", 0, 0, 8 * GiB },
	{ "8GB", 0, 0, 8 * GiB },
	{ "1.5M", 0, 0, 3 * MiB / 2 },
	{ "0.000000001T", 0, 0, 1099 },
	{ "1T", 0, 0, 1024 * GiB },
	{ "64K", 0, 0, 64 * KiB },
	{ "9223372036854775807", 0, 0, INT64_MAX },
	{ "9223372036854775808", 0, -ERANGE, 0 },
	{ "99999999999999999999999999999999999999999999999999", 0, -ERANGE, 0 },
	{ "8388607T", 0, 0, (uint64_t)8388607 << 40 },
	{ "8388608T", 0, -ERANGE, 0 },
	{ "50%", 4 * GiB, 0, 2 * GiB },
	{ "12.5%", 800, 0, 100 },
	{ "100%", INT64_MAX, 0, INT64_MAX },
	{ "101%", 4 * GiB, -ERANGE, 0 },
	{ "50%", 0, -EINVAL, 0 },
	{ "", 0, -EINVAL, 0 },
	{ "G", 0, -EINVAL, 0 },
	{ "-1", 0, -EINVAL, 0 },
	{ "+1", 0, -EINVAL, 0 },
	{ " 1", 0, -EINVAL, 0 },
	{ "1 G", 0, -EINVAL, 0 },
	{ "1GG", 0, -EINVAL, 0 },
	{ "1iB", 0, -EINVAL, 0 },
	{ "1Gi", 0, -EINVAL, 0 },
	{ "1P", 0, -EINVAL, 0 },
	{ "1.5", 0, -EINVAL, 0 },
	{ "1.", 0, -EINVAL, 0 },
	{ ".5G", 0, -EINVAL, 0 },
	{ "1..5G", 0, -EINVAL, 0 },
	{ "1,5G", 0, -EINVAL, 0 },
	{ "0x10", 0, -EINVAL, 0 },
	{ "1.0000000001G", 0, -EINVAL, 0 },
	{ "50%%", 100, -EINVAL, 0 },
};

START_TEST(test_size_parse)
{
	uint64_t bytes = 77;

	ck_assert_int_eq(size_parse(sizes[_i].text, sizes[_i].whole, &bytes), sizes[_i].r);
	ck_assert_uint_eq(bytes, sizes[_i].r == 0 ? sizes[_i].bytes : 77);
}
END_TEST

START_TEST(test_size_text)
{
	static const struct {
		uint64_t bytes;
		const char *text;
	} table[] = {
		{ 0, "0 B" },
		{ 1023, "1023 B" },
		{ 1024, "1 KiB" },
		{ 1536, "1.5 KiB" },
		{ 768 * MiB, "768 MiB" },
		{ 9 * GiB / 4, "2.25 GiB" },
		{ MiB - 1, "1 MiB" },
		{ 100 * GiB + 1, "100 GiB" },
		{ 10239, "10 KiB" },
		{ UINT64_MAX, "16 EiB" },
	};
	char buf[SIZE_TEXT];

	for (size_t i = 0; i < ARRAY_SIZE(table); i++)
		ck_assert_str_eq(size_text(table[i].bytes, buf), table[i].text);
}
END_TEST

START_TEST(test_text_escape)
{
	static const struct {
		const char *text, *shown;
		size_t columns;
	} table[] = {
		{ "", "", 0 },
		{ "plain text", "plain text", 10 },
		{ "\a\033[1m\x7f", "\\x07\\x1b[1m\\x7f", 15 },
		{ "a\nb\tc\rd\\", "a\\nb\\tc\\rd\\\\", 12 },
		{ "\u65e5\u672c", "\u65e5\u672c", 4 },
		{ "e\u0301", "e\u0301", 1 },
		{ "\u00e9", "\u00e9", 1 },
		{ "\u200b\u2028\u00a0", "\\u{200b}\\u{2028}\\u{a0}", 22 },
		{ "\xff\xc0\x80", "\\xff\\xc0\\x80", 12 },          /* no UTF-8; a longer form of NUL */
		{ "\xed\xa0\x80", "\\xed\\xa0\\x80", 12 },          /* half of a surrogate pair */
		{ "\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80", 16 }, /* above U+10FFFF */
		{ "\xe6\x97", "\\xe6\\x97", 8 },                    /* cut short */
	};

	ck_assert_ptr_nonnull(setlocale(LC_CTYPE, "C.UTF-8"));
	for (size_t i = 0; i < ARRAY_SIZE(table); i++) {
		size_t columns = 99;
		cleanup_free char *shown = text_escape(table[i].text, &columns);

		ck_assert_str_eq(shown, table[i].shown);
		ck_assert_uint_eq(columns, table[i].columns);
	}
}
END_TEST

/* ---- on a terminal */

/* Runs the tool with a pseudo-terminal of that width as stdout. */
static char *run_on_terminal(unsigned short columns, char *env, char **argv)
{
	struct winsize size = { .ws_row = 24, .ws_col = columns };
	cleanup_close int master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), tool = tool_open();
	cleanup_close int slave = -1;
	char name[64], *text = calloc(1, 65536);
	size_t len = 0;
	ssize_t n;
	pid_t pid;
	int status;

	ck_assert_int_ge(master, 0);
	ck_assert_int_eq(grantpt(master), 0);
	ck_assert_int_eq(unlockpt(master), 0);
	ck_assert_int_eq(ptsname_r(master, name, sizeof(name)), 0);
	slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
	ck_assert_int_ge(slave, 0);
	ck_assert_int_eq(ioctl(slave, TIOCSWINSZ, &size), 0);
	pid = fork();
	ck_assert_int_ge(pid, 0);
	if (pid == 0) {
		(void)setenv("TERM", "xterm", 1);
		(void)unsetenv("NO_COLOR");
		become(&(struct how){ .env = env }, slave, slave, tool, argv);
	}
	(void)close(TAKE_FD(slave));
	while (len < 65535 && (n = read(master, text + len, 65535 - len)) > 0) /* EIO: the last writer closed it */
		len += (size_t)n;
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	ck_assert_int_eq(status, 0);
	return text;
}

static void check_width(const char *text, size_t most)
{
	size_t columns = 0;

	for (const char *s = text; *s; s++) {
		if (*s == '\n' || *s == '\r') {
			columns = 0;
		} else if (*s == '\033') {
			s = strchr(s, 'm');
			ck_assert_ptr_nonnull(s);
		} else if (((unsigned char)*s & 0xc0) != 0x80) {
			columns++;
		}
		ck_assert_msg(columns <= most, "wider than %zu columns:\n%s", most, text);
	}
}

START_TEST(test_terminal_is_not_overrun)
{
	cleanup_close int before = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
	cleanup_free char *path = at("long.safetensors");
	struct data_tensor t[] = {
		{ .name = "a.very.long.name.of.a.tensor.that.does.not.fit.into.any.narrow.window.at.all.but.ends.in.weight",
		  .dtype = "F32",
		  .ndim = 2,
		  .shape = { 1024, 8 } },
		{ .name = "b", .dtype = "F32", .ndim = 1, .shape = { 8 } },
	};
	char *argv[] = { "weightd", "inspect", "long.safetensors", NULL };
	char *doctor[] = { "weightd", "doctor", NULL };
	cleanup_free char *narrow = NULL, *wide = NULL, *color = NULL, *plain = NULL, *json = NULL;
	char *json_argv[] = { "weightd", "inspect", "--json", "long.safetensors", NULL };

	(void)data_write_safetensors(path, t, ARRAY_SIZE(t), NULL);
	/* A short path, so that the first line is not what is too wide. */
	ck_assert_int_eq(chdir(folder), 0);
	narrow = run_on_terminal(80, NULL, argv);
	check_width(narrow, 80);
	has(narrow, "a.very.long");
	has(narrow, "\u2026");
	has(narrow, "in.weight  F32    [1024,8]  32768");
	wide = run_on_terminal(160, NULL, argv);
	check_width(wide, 160);
	has(wide, t[0].name);

	color = run_on_terminal(80, NULL, doctor);
	check_width(color, 80);
	has(color, "\033[32m");
	plain = run_on_terminal(80, "NO_COLOR=1", doctor);
	check_width(plain, 80);
	has_not(plain, "\033");
	json = run_on_terminal(80, NULL, json_argv);
	has(json, "\n  \"checkpoints\": [");
	ck_assert_int_eq(fchdir(before), 0); /* for CK_FORK=no */
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("cli");
	TCase *line = tcase_create("command line"), *inspect = tcase_create("inspect"),
	      *doctor = tcase_create("doctor");
	TCase *inside = tcase_create("inside");
	SRunner *runner;
	int failed;

	/* A daemon of this machine's must not answer in these tests. */
	(void)setenv("WEIGHTD_SOCKET", "/nowhere/weightd.sock", 1);

	tcase_set_timeout(line, 20);
	tcase_add_loop_test(line, test_help_goes_to_stdout, 0, ARRAY_SIZE(commands_all));
	tcase_add_test(line, test_overview_names_every_command);
	tcase_add_loop_test(line, test_wrong_command_line_is_2_and_tells_where_help_is, 0, ARRAY_SIZE(wrong));
	tcase_add_test(line, test_version_is_the_librarys);
	suite_add_tcase(suite, line);

	tcase_set_timeout(inspect, 60);
	tcase_add_checked_fixture(inspect, setup, teardown);
	tcase_add_test(inspect, test_inspect_lists_tensors);
	tcase_add_test(inspect, test_inspect_metadata_in_full);
	tcase_add_test(inspect, test_inspect_json_is_exact);
	tcase_add_test(inspect, test_inspect_hostile_names_stay_text);
	tcase_add_test(inspect, test_inspect_path_that_is_no_utf8);
	tcase_add_test(inspect, test_inspect_goes_on_after_bad_files);
	tcase_add_test(inspect, test_inspect_trailing);
	tcase_add_test(inspect, test_inspect_shards_and_variants);
	tcase_add_test(inspect, test_inspect_pipeline);
	tcase_add_test(inspect, test_inspect_100000_tensors);
	tcase_add_test(inspect, test_output_that_cannot_be_written_is_told);
	tcase_add_test(inspect, test_terminal_is_not_overrun);
	suite_add_tcase(suite, inspect);

	tcase_set_timeout(doctor, 60);
	tcase_add_checked_fixture(doctor, setup, teardown);
	tcase_add_test(doctor, test_doctor_agrees_with_the_library);
	tcase_add_test(doctor, test_doctor_obeys_the_environment);
	tcase_add_test(doctor, test_doctor_folder);
	suite_add_tcase(suite, doctor);

	if (geteuid() == 0) {
		tcase_add_test(inspect, test_inspect_without_rights);
		tcase_add_test(doctor, test_doctor_as_nobody);
		tcase_add_loop_test(doctor, test_doctor_where_userfaultfd_is_refused, 0, 2);
	} else {
		(void)puts("SKIP cli without rights (4 tests): only root can become nobody");
	}

	tcase_add_checked_fixture(inside, setup, teardown);
	tcase_add_test(inside, test_machine_reads);
	tcase_add_loop_test(inside, test_size_parse, 0, ARRAY_SIZE(sizes));
	tcase_add_test(inside, test_size_text);
	tcase_add_test(inside, test_text_escape);
	suite_add_tcase(suite, inside);

	runner = srunner_create(suite);
	srunner_run_all(runner, CK_NORMAL);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed ? 1 : 0;
}
