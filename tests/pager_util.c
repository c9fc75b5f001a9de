/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/pager_util.h"

#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <setjmp.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <time.h>

static char folder[200];
static unsigned int nr_skipped;

/* ------------------------------------------------------------------ variants */

static const char *const names[NR_VARIANTS] = { "tmpfs", "memfd", "old", "user", "mmap" };

const char *variant_name(int variant)
{
	return names[variant];
}

int pager_try(int variant, uint64_t budget_bytes, struct pager **ret, struct wd_err *err)
{
	struct pager_config config = { .budget_bytes = budget_bytes };
	bool old = variant == V_OLD;

	config.way = variant == V_USER ? WAY_USER : variant == V_MMAP ? WAY_MMAP : WAY_EMBEDDED;
	pager_hooks.no_tmpfs = variant == V_MEMFD || old;
	pager_hooks.no_pagemap_scan = pager_hooks.no_poison = pager_hooks.no_wp = pager_hooks.no_event_fork = old;
	return pager_new(&config, ret, err);
}

struct pager *pager_of(int variant, uint64_t budget_bytes)
{
	struct pager *p = NULL;
	struct wd_err err = { "" };
	int r = pager_try(variant, budget_bytes, &p, &err);

	catch_signals();
	ck_assert_msg(r == 0, "pager_new(%s): %d: %s", names[variant], r, err.text);
	return p;
}

/* Tried in a fork: the process that runs the suite keeps no threads and no mappings of a pager. */
static const char *why_not(int variant)
{
	static char text[NR_VARIANTS][200];
	static bool asked[NR_VARIANTS];
	int fd[2], status = 0;
	pid_t pid;

	if (asked[variant])
		return text[variant][0] ? text[variant] : NULL;
	asked[variant] = true;
	if (pipe(fd) < 0)
		abort();
	pid = fork();
	if (pid == 0) {
		struct pager *p;
		struct wd_err err = { "" };

		if (pager_try(variant, 64 * MiB, &p, &err) < 0) {
			(void)!write(fd[1], err.text, strnlen(err.text, sizeof(text[0]) - 1));
			_exit(1);
		}
		pager_unref(p);
		_exit(0);
	}
	(void)close(fd[1]);
	if (read(fd[0], text[variant], sizeof(text[0]) - 1) < 0)
		abort();
	(void)close(fd[0]);
	(void)waitpid(pid, &status, 0);
	/* Only a refusal is a reason to skip; a pager that crashes has to fail its tests. */
	return text[variant][0] ? text[variant] : NULL;
}

void skip(const char *name, const char *fmt, ...)
{
	va_list ap;

	nr_skipped++;
	(void)printf("SKIP %s: ", name);
	va_start(ap, fmt);
	(void)vprintf(fmt, ap);
	va_end(ap);
	(void)printf("\n");
	(void)fflush(stdout);
}

void add_variants_named(TCase *tc, const char *name, const TTest *test, unsigned int set)
{
	for (int i = 0; i < NR_VARIANTS; i++) {
		const char *why;

		if (!(set & 1u << i))
			continue;
		why = why_not(i);
		if (why) {
			char text[128];

			(void)snprintf(text, sizeof(text), "%s (%s)", name, names[i]);
			skip(text, "%s", why);
			continue;
		}
		tcase_add_loop_test(tc, test, i, i + 1);
	}
}

TCase *new_case(Suite *s, const char *name, double limit_s)
{
	TCase *tc = tcase_create(name);

	tcase_set_timeout(tc, limit_s);
	suite_add_tcase(s, tc);
	return tc;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	(void)remove(path);
	return 0;
}

int run_suite(Suite *s)
{
	const char *tmp = getenv("TMPDIR");
	SRunner *sr = srunner_create(s);
	int nr_failed;

	(void)snprintf(folder, sizeof(folder), "%s/wd-pager-XXXXXX", tmp && *tmp ? tmp : "/var/tmp");
	if (!mkdtemp(folder)) {
		perror(folder);
		return 1;
	}
	(void)chmod(folder, 0755); /* some tests run as another user */
	srunner_run_all(sr, CK_ENV);
	nr_failed = srunner_ntests_failed(sr);
	srunner_free(sr);
	if (nr_skipped)
		(void)printf("%u skipped\n", nr_skipped);
	(void)nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
	return nr_failed ? 1 : 0;
}

const char *test_path(const char *name)
{
	static __thread char path[256];

	(void)snprintf(path, sizeof(path), "%s/%s", folder, name);
	return path;
}

/* ------------------------------------------------------------------ files */

uint64_t file_word(uint64_t seed, uint64_t offset)
{
	uint64_t z = (seed << 40) + offset / 8 + 1;

	z *= 0x9E3779B97F4A7C15u;
	z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
	z = (z ^ z >> 27) * 0x94D049BB133111EBu;
	/* No byte of it is zero, so that a zeroed tail is seen too. */
	return (z ^ z >> 31) | 0x0101010101010101u;
}

int tfile_write(const char *path, uint64_t off, uint64_t len, uint64_t seed)
{
	cleanup_close int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
	cleanup_free uint64_t *buf = malloc(MiB);

	if (fd < 0 || !buf)
		return -1;
	while (len) {
		uint64_t n = MIN(len, MiB);

		for (uint64_t i = 0; i * 8 < n; i++)
			buf[i] = file_word(seed, off + i * 8);
		if (pwrite(fd, buf, n, (off_t)off) != (ssize_t)n)
			return -1;
		off += n;
		len -= n;
	}
	return 0;
}

void tfile_uncache(const struct tfile *f)
{
	cleanup_close int fd = open(f->path, O_RDONLY | O_CLOEXEC);

	if (fd < 0 || fsync(fd) < 0)
		abort();
	(void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
}

uint64_t tfile_cached_bytes(const char *path)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	struct stat st;
	uint64_t n = 0, pg = (uint64_t)sysconf(_SC_PAGESIZE), nr;
	unsigned char *vec;
	void *p;

	if (fd < 0 || fstat(fd, &st) < 0 || !st.st_size)
		return 0;
	p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	nr = ((uint64_t)st.st_size + pg - 1) / pg;
	vec = malloc(nr);
	if (p != MAP_FAILED && vec && mincore(p, (size_t)st.st_size, vec) == 0)
		for (uint64_t i = 0; i < nr; i++)
			n += vec[i] & 1 ? pg : 0;
	free(vec);
	if (p != MAP_FAILED)
		(void)munmap(p, (size_t)st.st_size);
	return n;
}

void tfile_make(struct tfile *f, const char *name, uint64_t size, uint64_t seed)
{
	f->size = size;
	f->seed = seed;
	(void)snprintf(f->path, sizeof(f->path), "%s", test_path(name));
	(void)unlink(f->path);
	if (tfile_write(f->path, 0, size, seed) < 0) {
		perror(f->path);
		abort();
	}
	tfile_uncache(f);
}

static uint64_t load(const unsigned char *p)
{
	uint64_t w;

	/* Read again each time, whatever the compiler saw before. */
	__asm__ volatile("" ::: "memory");
	memcpy(&w, p, sizeof(w));
	return w;
}

uint64_t wrong_words(const void *ptr, const struct tfile *f, uint64_t off, uint64_t len, uint64_t step)
{
	const unsigned char *p = ptr;
	uint64_t wrong = 0, end = off + len, o = round_up(off, 8);

	for (; o + 8 <= end; o += step) {
		uint64_t w = load(p + (o - off));

		if (w == file_word(f->seed, o))
			continue;
		if (wrong++ < 3)
			fprintf(stderr, "offset %" PRIu64 " has %016" PRIx64 ", the file has %016" PRIx64 "\n", o, w,
				file_word(f->seed, o));
	}
	if (step == 8 && o < end) {
		uint64_t w = 0, right = file_word(f->seed, o);

		__asm__ volatile("" ::: "memory");
		memcpy(&w, p + (o - off), end - o);
		if (memcmp(&w, &right, end - o)) {
			wrong++;
			fprintf(stderr, "tail at offset %" PRIu64 " has %016" PRIx64 "\n", o, w);
		}
	}
	return wrong;
}

/* ------------------------------------------------------------------ rigs */

int view_try(struct pager *p, const struct tfile *f, uint64_t unit_bytes, struct source **ret_source,
	     struct view **ret_view, struct wd_err *err)
{
	struct source *s;
	struct segment seg = { 0, 0, 0 };
	struct view_layout layout = { .segs = &seg, .nr_segs = 1 };
	cleanup_free struct unit *units = NULL;
	int r = source_open(f->path, &s, err);

	if (r < 0)
		return r;
	seg.len = s->id.size;
	if (unit_bytes) {
		layout.nr_units = (size_t)((seg.len + unit_bytes - 1) / unit_bytes);
		units = calloc(layout.nr_units, sizeof(*units));
		if (!units) {
			source_unref(s);
			return -ENOMEM;
		}
		for (size_t i = 0; i < layout.nr_units; i++)
			units[i] = (struct unit){ i * unit_bytes, MIN(unit_bytes, seg.len - i * unit_bytes) };
		layout.units = units;
	}
	r = view_open(p, s, &layout, ret_view, err);
	if (r < 0)
		source_unref(s);
	else
		*ret_source = s;
	return r;
}

void rig_add(struct rig *r, struct pager *p, const struct tfile *f, uint64_t unit_bytes)
{
	struct wd_err err = { "" };
	int e;

	memset(r, 0, sizeof(*r));
	r->file = f;
	r->pager = pager_ref(p);
	e = view_try(p, f, unit_bytes, &r->source, &r->view, &err);
	ck_assert_msg(e == 0, "view_open(%s): %d: %s", f->path, e, err.text);
	r->base = view_base(r->view);
	r->size = r->source->id.size;
}

void rig_open(struct rig *r, int variant, const struct tfile *f, uint64_t budget_bytes, uint64_t unit_bytes)
{
	struct pager *p = pager_of(variant, budget_bytes);

	rig_add(r, p, f, unit_bytes);
	pager_unref(p);
}

void rig_close(struct rig *r)
{
	r->view = view_unref(r->view);
	r->source = source_unref(r->source);
	r->pager = pager_unref(r->pager);
}

void rig_check(const struct rig *r)
{
	ck_assert_uint_eq(wrong_words(r->base, r->file, 0, r->size, 8), 0);
}

uint64_t rig_drop(struct rig *r)
{
	ck_assert_int_eq(view_drop(r->view), 0);
	ck_assert_int_eq(pager_sync(r->pager, 20000), 0);
	return resident(r->pager);
}

uint64_t resident(struct pager *p)
{
	struct pager_stats st;

	pager_stats(p, &st);
	return st.resident_bytes;
}

uint64_t extent(void)
{
	static uint64_t bytes;
	struct pager_caps caps;

	if (!bytes) {
		pager_caps_probe(&caps, NULL);
		bytes = caps.extent_bytes;
	}
	return bytes;
}

/* ------------------------------------------------------------------ backing reads */

struct hook_counts hook_counts;

int64_t hook_pread(struct source *s, void *buf, size_t nbytes, uint64_t offset)
{
	size_t done = 0;

	while (done < nbytes) {
		ssize_t n = pread(s->fd, (char *)buf + done, nbytes - done, (off_t)(offset + done));

		if (n < 0)
			return -errno;
		if (n == 0)
			break;
		done += (size_t)n;
	}
	return (int64_t)done;
}

int64_t hook_count(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	int64_t n = hook_pread(s, buf, nbytes, offset);

	hook_counts.reads++;
	hook_counts.direct += direct;
	if (n > 0)
		hook_counts.bytes += (uint64_t)n;
	return n;
}

/* ------------------------------------------------------------------ touches */

static __thread sigjmp_buf jump;
static __thread volatile sig_atomic_t jump_set;
static __thread struct caught last_caught;

static void on_signal(int sig, siginfo_t *info, void *context)
{
	(void)context;
	if (pager_fault_retry(info->si_addr))
		return;
	if (!jump_set) { /* nobody expected it: say what is known, and crash at the second try */
		struct fault_reason why;
		char text[160];

		if (pager_fault_reason(info->si_addr, &why)) {
			int n = snprintf(text, sizeof(text), "signal %d: offset %" PRIu64 ", code %d, error %d\n", sig,
					 why.off, (int)why.code, why.error);

			(void)!write(STDERR_FILENO, text, (size_t)n);
		}
		(void)signal(sig, SIG_DFL);
		return;
	}
	last_caught = (struct caught){ sig, info->si_code, info->si_addr };
	siglongjmp(jump, 1);
}

void catch_signals(void)
{
	struct sigaction sa = { .sa_sigaction = on_signal, .sa_flags = SA_SIGINFO | SA_NODEFER };

	(void)sigaction(SIGBUS, &sa, NULL);
	(void)sigaction(SIGSEGV, &sa, NULL);
}

/* The jump buffer saves no mask (SA_NODEFER changes none): a touch costs no system call. */
bool touch(const void *p, unsigned char *ret, struct caught *caught)
{
	unsigned char byte;

	last_caught = (struct caught){ 0 };
	if (sigsetjmp(jump, 0) == 0) {
		jump_set = 1;
		byte = *(const volatile unsigned char *)p;
		if (ret)
			*ret = byte;
	}
	jump_set = 0;
	if (caught)
		*caught = last_caught;
	return last_caught.sig == 0;
}

bool touch_write(void *p, unsigned char byte, struct caught *caught)
{
	last_caught = (struct caught){ 0 };
	if (sigsetjmp(jump, 0) == 0) {
		jump_set = 1;
		*(volatile unsigned char *)p = byte;
	}
	jump_set = 0;
	if (caught)
		*caught = last_caught;
	return last_caught.sig == 0;
}

/* ------------------------------------------------------------------ this process */

static unsigned int count_dir(const char *path)
{
	DIR *d = opendir(path);
	unsigned int n = 0;

	if (!d)
		return 0;
	while (readdir(d))
		n++;
	(void)closedir(d);
	return n;
}

unsigned int count_fds(void)
{
	return count_dir("/proc/self/fd") - 3; /* ".", "..", and the one that reads it */
}

unsigned int count_threads(void)
{
	return count_dir("/proc/self/task") - 2;
}

unsigned int count_vmas(const void *from, const void *to)
{
	cleanup_fclose FILE *f = fopen("/proc/self/maps", "re");
	char line[512];
	unsigned int n = 0;

	if (!f)
		return 0;
	while (fgets(line, sizeof(line), f)) {
		uintptr_t a, z;

		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &a, &z) == 2 && z > (uintptr_t)from && a < (uintptr_t)to)
			n++;
	}
	return n;
}

uint64_t arena_bytes(void)
{
	DIR *d = opendir("/proc/self/fd");
	struct {
		dev_t dev;
		ino_t ino;
	} seen[256];
	unsigned int nr = 0;
	uint64_t sum = 0;
	struct dirent *e;

	if (!d)
		return 0;
	while ((e = readdir(d))) {
		struct statfs fs;
		struct stat st;
		int fd = atoi(e->d_name);
		unsigned int i;

		if (fstatfs(fd, &fs) < 0 || fs.f_type != TMPFS_MAGIC || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
			continue;
		for (i = 0; i < nr && (seen[i].dev != st.st_dev || seen[i].ino != st.st_ino); i++)
			;
		if (i < nr || nr == ARRAY_SIZE(seen))
			continue;
		seen[nr].dev = st.st_dev;
		seen[nr++].ino = st.st_ino;
		sum += (uint64_t)st.st_blocks * 512;
	}
	(void)closedir(d);
	return sum;
}

#define FILLER_BYTES (1024 * MiB)
static unsigned char *filler;

void use_up_maps(unsigned int leave)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), i;

	filler = mmap(NULL, FILLER_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	ck_assert_ptr_ne(filler, MAP_FAILED);
	for (i = 0; i < FILLER_BYTES; i += 2 * page)
		if (mprotect(filler + i, page, PROT_READ) < 0)
			break;
	ck_assert_msg(i < FILLER_BYTES, "the limit on maps was not reached");
	for (; leave >= 2; leave -= 2) { /* two of them go with each piece that is made whole again */
		i -= 2 * page;
		(void)mprotect(filler + i, page, PROT_NONE);
	}
}

void give_back_maps(void)
{
	ck_assert_int_eq(munmap(filler, FILLER_BYTES), 0);
}

uint64_t proc_kib(const char *file, const char *key)
{
	cleanup_fclose FILE *f = fopen(file, "re");
	char line[256];
	uint64_t n;

	while (f && fgets(line, sizeof(line), f))
		if (!strncmp(line, key, strlen(key)) && sscanf(line + strlen(key), "%" SCNu64, &n) == 1)
			return n;
	return UINT64_MAX;
}

uint64_t cpu_ms(void)
{
	struct rusage u;

	(void)getrusage(RUSAGE_SELF, &u);
	return (uint64_t)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000 +
	       (uint64_t)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1000;
}

/* ------------------------------------------------------------------ waiting and running */

void must_wait(sem_t *s)
{
	struct timespec t;
	int r;

	(void)clock_gettime(CLOCK_REALTIME, &t);
	t.tv_sec += 20;
	while ((r = sem_timedwait(s, &t)) < 0 && errno == EINTR)
		;
	ck_assert_msg(r == 0, "an event did not come within 20 s");
}

int child_result(pid_t pid)
{
	int status;

	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return -errno;
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

void limit_child(unsigned int seconds)
{
	(void)signal(SIGALRM, SIG_DFL); /* Check's handler would kill the whole group */
	(void)alarm(seconds);
}

int in_child(int (*fn)(void *arg), void *arg)
{
	pid_t pid;

	(void)fflush(NULL);
	pid = fork();
	if (pid == 0) {
		int r;

		limit_child(0);
		r = fn(arg);
		(void)fflush(NULL);
		_exit(r);
	}
	return pid < 0 ? -errno : child_result(pid);
}

uint64_t rnd(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state >> 11;
}

uint64_t now_ms(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

uint64_t soak_ms(uint64_t usual_ms)
{
	const char *s = getenv("WD_SOAK_SECONDS");

	return s && *s ? strtoull(s, NULL, 10) * 1000 : usual_ms;
}

char thread_state(pid_t tid)
{
	char path[64], buf[256], *p;
	cleanup_close int fd = -1;
	ssize_t n;

	(void)snprintf(path, sizeof(path), "/proc/self/task/%d/stat", (int)tid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	n = fd < 0 ? -1 : read(fd, buf, sizeof(buf) - 1);
	if (n <= 0)
		return '?';
	buf[n] = 0;
	p = strrchr(buf, ')');
	return p && p[1] ? p[2] : '?';
}

void until_asleep(pid_t tid, const _Atomic bool *done)
{
	uint64_t end = now_ms() + 5000;

	for (int in_a_row = 0; in_a_row < 5 && !*done && now_ms() < end;) {
		char c = thread_state(tid);

		in_a_row = c == 'S' || c == 'D' ? in_a_row + 1 : 0;
		(void)usleep(200);
	}
}
