/* SPDX-License-Identifier: Apache-2.0 */
/* See api_util.h. */
#include "tests/api_util.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

#include "tests/serve_util.h"

char *test_dir;

/* ------------------------------------------------------------------ ways */

struct asked {
	uint32_t way;
	int fd;
};

static int ask(void *arg)
{
	struct asked *a = arg;
	struct wd_options o = { .size = sizeof(o), .way = a->way, .flags = WD_NO_SIGNAL_HANDLER };
	struct wd *wd;

	if (wd_connect(&o, &wd) == 0) {
		wd_disconnect(wd);
		return 0;
	}
	(void)!write(a->fd, wd_error(), strlen(wd_error()));
	return 1;
}

/* Asked in a fork: the process that runs the suite has no pager. Only a refusal is a reason to skip; a crash is not. */
static const char *why_not(uint32_t way)
{
	static char text[WD_WAY_MMAP + 1][256];
	static bool known[WD_WAY_MMAP + 1];
	int fd[2], r;

	if (!known[way]) {
		if (pipe(fd) < 0)
			abort();
		r = in_child(ask, &(struct asked){ way, fd[1] });
		(void)close(fd[1]);
		if (r == 1 && read(fd[0], text[way], sizeof(text[way]) - 1) < 0)
			abort();
		(void)close(fd[0]);
		known[way] = true;
	}
	return text[way][0] ? text[way] : NULL;
}

static struct daemon daemon_of_case;

static void daemon_up(void)
{
	cleanup_free char *above = NULL;

	daemon_start(&daemon_of_case, "--budget 4G", NULL);
	above = data_text("%s/..", daemon_of_case.folder);
	ck_assert_int_eq(chmod(above, 0711), 0); /* some tests run as another user */
}

static void daemon_down(void)
{
	daemon_stop(&daemon_of_case);
}

void add_ways_named(TCase *tc, const char *name, const TTest *test, unsigned int set)
{
	for (uint32_t way = WD_WAY_DAEMON; way <= WD_WAY_MMAP; way++) {
		char what[128];

		if (!(set & 1u << way))
			continue;
		if (way == WD_WAY_DAEMON) {
			static const TCase *has_one;

			if (why_not(WD_WAY_EMBEDDED)) {
				(void)snprintf(what, sizeof(what), "%s (daemon)", name);
				skip(what, "%s", why_not(WD_WAY_EMBEDDED));
				continue;
			}
			if (has_one != tc)
				tcase_add_unchecked_fixture(tc, daemon_up, daemon_down);
			has_one = tc;
			tcase_add_loop_test(tc, test, (int)way, (int)way + 1);
			continue;
		}
		if (!why_not(way)) {
			tcase_add_loop_test(tc, test, (int)way, (int)way + 1);
			continue;
		}
		(void)snprintf(what, sizeof(what), "%s (%s)", name, wd_way_name(way));
		skip(what, "%s", why_not(way));
	}
}

static void setup(void)
{
	test_dir = data_tmpdir();
	hook_counts = (struct hook_counts){ 0 };
}

static void teardown(void)
{
	source_hook = NULL;
	pager_hooks = (struct pager_hooks){ 0 };
	data_remove(test_dir);
	free(TAKE_PTR(test_dir));
}

TCase *folder_case(Suite *s, const char *name, double limit_s)
{
	TCase *tc = new_case(s, name, limit_s);

	tcase_add_checked_fixture(tc, setup, teardown);
	return tc;
}

/* ------------------------------------------------------------------ results */

void failed_with(int line, int r, int error, const char *words)
{
	cleanup_free char *copy = strdup(words);
	char *rest = copy, *word;
	const char *text = wd_error();

	ck_assert_msg(r == error, "line %d: %d instead of %d; %s", line, r, error, text);
	ck_assert_msg(*text && !strchr(text, '\n'), "line %d: no line of text: %s", line, text);
	while ((word = strsep(&rest, "|")))
		ck_assert_msg(strstr(text, word), "line %d: '%s' lacks '%s'", line, text, word);
}

struct wd *connected(int way, uint64_t budget_bytes, uint32_t flags)
{
	struct wd_options o = { .size = sizeof(o), .way = (uint32_t)way, .flags = flags, .budget_bytes = budget_bytes };
	struct wd *wd = NULL;

	ck_works(wd_connect(&o, &wd));
	ck_assert_uint_eq(wd_way(wd), way);
	return wd;
}

struct wd_model *opened(struct wd *wd, const char *path, const char *name)
{
	struct wd_model_options o = { .size = sizeof(o), .name = name };
	struct wd_model *m = NULL;

	ck_works(wd_model_open(wd, path, &o, &m));
	return m;
}

struct wd_stats stats_of(struct wd *wd)
{
	struct wd_stats st = { .size = sizeof(st) };

	ck_works(wd_stats(wd, &st));
	return st;
}

struct wd_stats model_stats_of(struct wd_model *m)
{
	struct wd_stats st = { .size = sizeof(st) };

	ck_works(wd_model_stats(m, &st));
	return st;
}

char *make_model(const char *name, size_t nr, uint64_t nbytes, uint64_t seed)
{
	char *path = data_text("%s/%s", test_dir, name);
	struct data_tensor *t = calloc(nr, sizeof(*t));

	for (size_t i = 0; i < nr; i++)
		t[i] = (struct data_tensor){
			.name = data_text("t%zu", i), .dtype = "U8", .ndim = 1, .shape = { (int64_t)nbytes }
		};
	(void)data_write_safetensors(path, t, nr, &(struct data_opts){ .seed = seed });
	for (size_t i = 0; i < nr; i++)
		free((char *)t[i].name);
	free(t);
	return path;
}

void ck_tensor(const struct wd_tensor *t, uint64_t seed)
{
	int64_t wrong;

	ck_assert_ptr_nonnull(t);
	wrong = data_check(t->data, t->nbytes, seed, t->file_offset);
	ck_assert_msg(wrong == -1, "%s: tensor %s (file offset %llu): byte %lld is wrong", t->file, t->name,
		      (unsigned long long)t->file_offset, (long long)wrong);
}

void ck_model(struct wd_model *m, uint64_t seed)
{
	for (size_t i = 0; i < wd_model_nr_tensors(m); i++)
		ck_tensor(wd_model_tensor_at(m, i), seed);
}

bool tensor_is_right(const struct wd_tensor *t, uint64_t seed)
{
	return t && data_check(t->data, t->nbytes, seed, t->file_offset) == -1;
}

void touch_all(const struct wd_tensor *t)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	for (uint64_t o = 0; o < t->nbytes; o += page)
		(void)*((const volatile unsigned char *)t->data + o);
	if (t->nbytes)
		(void)*((const volatile unsigned char *)t->data + t->nbytes - 1);
}

bool file_is_right(const char *path, uint64_t from, uint64_t seed)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	cleanup_free unsigned char *buf = malloc(MiB);
	uint64_t off = from;
	ssize_t n;

	if (fd < 0 || !buf)
		return false;
	while ((n = pread(fd, buf, MiB, (off_t)off)) > 0) {
		if (data_check(buf, (size_t)n, seed, off) != -1)
			return false;
		off += (uint64_t)n;
	}
	return n == 0 && off > from;
}

void release(struct wd *wd, struct wd_model *m)
{
	ck_works(wd_model_release(m));
	ck_works(wd_sync(wd));
}

uint64_t extents_of(const struct wd_tensor *const *t, size_t nr)
{
	/* A view begins on an extent's border, so addresses tell extents. */
	uint64_t n = 0;

	for (size_t i = 0; i < nr; i++) {
		uint64_t first = (uintptr_t)t[i]->data / extent(), last;

		last = ((uintptr_t)t[i]->data + t[i]->nbytes - 1) / extent();
		for (uint64_t x = first; x <= last; x++) {
			bool seen = false;

			for (size_t k = 0; k < i && !seen; k++)
				seen = x >= (uintptr_t)t[k]->data / extent() &&
				       x <= ((uintptr_t)t[k]->data + t[k]->nbytes - 1) / extent();
			n += !seen;
		}
	}
	return n;
}

void until_quiet(void)
{
	uint64_t seen = hook_counts.reads, end = now_ms() + 10000;

	for (int same = 0; same < 20 && now_ms() < end; same++) {
		(void)usleep(5000);
		if (hook_counts.reads != seen) {
			seen = hook_counts.reads;
			same = 0;
		}
	}
}

uint64_t thread_cpu_us(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* ------------------------------------------------------------------ less rights */

int refuse_calls(const struct refused_call *refused, size_t nr)
{
	struct sock_filter code[32];
	struct sock_fprog prog = { 0, code };
	unsigned short n = 0;

	for (size_t i = 0; i < nr; i++) {
		bool args = refused[i].ioctl_cmd != 0;

		code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
		code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, refused[i].call, 0,
							 (unsigned char)(args ? 3 : 1));
		if (args) {
			code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS,
								 offsetof(struct seccomp_data, args[1]));
			code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, refused[i].ioctl_cmd, 0, 1);
		}
		code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K,
							 SECCOMP_RET_ERRNO | (unsigned int)refused[i].error);
	}
	code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
	prog.len = n;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog) < 0)
		return -errno;
	return 0;
}

int become_nobody(void)
{
	if (setgroups(0, NULL) < 0 || setresgid(65534, 65534, 65534) < 0 || setresuid(65534, 65534, 65534) < 0)
		return -errno;
	/* As if that user had started the process: /proc/self is its own. */
	return prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) < 0 ? -errno : 0;
}
