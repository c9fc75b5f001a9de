/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forked children (I7): they read the file's bytes and the parent's writes, whatever the parent and its pager do
 * meanwhile, also when the parent is gone. fork(2) is served by the child handler that maps the source file; raw
 * clone(2), which runs no handlers, by the fork event.
 *
 * A child here exits with 0, or with the number of the check that failed. It uses no check.h.
 */
#include "tests/pager_util.h"

#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

extern char **environ;

static struct rig R;
static struct tfile F;
static _Atomic bool stop;
static _Atomic uint64_t nr_wrong, nr_reads;

#define MARK 0x1122334455667788u /* what the tests write into weights */

static bool marked;

/* No stdio, no malloc: for children of a raw clone as well. Looks at words `step` apart, and at all marks. */
static int wrong_in_child(uint64_t step)
{
	uint64_t e = extent();

	for (uint64_t off = 0; off + 8 <= R.size; off += step) {
		uint64_t have = *(volatile uint64_t *)(R.base + off);

		if (have != (marked && off % (2 * e) == 64 ? MARK : file_word(F.seed, off)))
			return 1;
	}
	for (uint64_t off = 64; marked && off + 8 <= R.size; off += 2 * e)
		if (*(volatile uint64_t *)(R.base + off) != MARK)
			return 1;
	return 0;
}

/* One word in every other extent. */
static void write_marks(void)
{
	for (uint64_t off = 64; off + 8 <= R.size; off += 2 * extent())
		*(volatile uint64_t *)(R.base + off) = MARK;
	marked = true;
}

/* Some extents read, some written, some never touched, some dropped again. */
static void mixed_state(int variant, const char *name, uint64_t nr_extents)
{
	tfile_make(&F, name, nr_extents * extent() + 5000, 70);
	rig_open(&R, variant, &F, 256 * MiB, 0);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, R.size / 2, 4096), 0);
	write_marks();
	ck_assert_int_eq(view_drop(R.view), 0);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	ck_assert_uint_eq(wrong_words(R.base + 2 * extent(), &F, 2 * extent(), 16, 8), 0);
}

static int child_reads(void *arg)
{
	(void)arg;
	limit_child(20);
	return wrong_in_child(8) ? 2 : 0;
}

static int child_writes_and_forks(void *arg)
{
	int r;

	(void)arg;
	limit_child(20);
	if (wrong_in_child(8))
		return 2;
	for (uint64_t i = 0; i < 3; i++)
		R.base[i * extent() + 128] ^= 0xFF;
	r = in_child(child_reads, NULL); /* sees the change above: wrong once, then right again */
	if (r != 2)
		return 3;
	for (uint64_t i = 0; i < 3; i++)
		R.base[i * extent() + 128] ^= 0xFF;
	r = in_child(child_reads, NULL);
	return r ? 4 : 0;
}

/* Bites on: the pthread_atfork child handler that maps the source file over what was not written. */
START_TEST(test_child_reads_and_writes_its_own)
{
	mixed_state(_i, "child", 8);
	for (int i = 0; i < 3; i++)
		ck_assert_int_eq(in_child(child_writes_and_forks, NULL), 0);
	ck_assert_int_eq(wrong_in_child(8), 0); /* the parent saw nothing of it */
	rig_drop(&R);
	ck_assert_int_eq(wrong_in_child(8), 0);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ the parent goes, the child stays */

static int report[2];
static int variant_of_parent;

static int parent_that_dies(void *arg)
{
	sigset_t none;
	int fd[2];

	(void)arg;
	if (pipe(fd) < 0)
		return 9;
	mixed_state(variant_of_parent, "orphan", 8);
	if (fork() == 0) {
		char byte;
		int r;

		limit_child(20);
		(void)close(fd[1]);
		(void)!read(fd[0], &byte, 1); /* until the parent is dead */
		r = wrong_in_child(8);
		R.base[3 * extent() + 256] = 5;
		if (!r && R.base[3 * extent() + 256] != 5)
			r = 3;
		byte = (char)r;
		(void)!write(report[1], &byte, 1);
		_exit(0);
	}
	(void)sigemptyset(&none);
	(void)kill(getpid(), SIGKILL);
	(void)sigsuspend(&none);
	return 0;
}

/* A program that daemonises. Bites on: the child handler (with the fork event alone the pager died with the parent,
 * and every page not mapped yet reads as zeros). */
START_TEST(test_child_outlives_its_parent)
{
	char byte = 99;

	variant_of_parent = _i;
	ck_assert_int_eq(pipe(report), 0);
	ck_assert_int_eq(in_child(parent_that_dies, NULL), 1000 + SIGKILL);
	(void)close(report[1]);
	ck_assert_int_eq(read(report[0], &byte, 1), 1);
	ck_assert_int_eq(byte, 0);
}
END_TEST

/* ------------------------------------------------------------------ the child uses the interface */

static struct tfile other;

static int child_uses_the_pager(void *arg)
{
	struct pager_stats st;
	struct source *s;
	struct view *v;
	struct pager_job *j;
	struct fault_reason reason;

	(void)arg;
	limit_child(20);
	if (!pager_is_forked(R.pager))
		return 1;
	pager_stats(R.pager, &st);
	view_stats(R.view, &st);
	if (wrong_in_child(8))
		return 2;
	if (view_drop(R.view) < 0 || pager_sync(R.pager, 10000) < 0)
		return 3;
	pager_observe_begin(R.pager);
	pager_observe_drop(R.pager);
	if (wrong_in_child(8))
		return 4;
	if (pager_fault_reason(R.base, &reason))
		return 5;
	if (pager_job_new(R.pager, &(struct job_range){ R.view, 0, R.size }, 1, false, &j) == 0) {
		if (pager_job_wait(j, 10000) < 0)
			return 6;
		pager_job_free(j);
	}
	if (view_try(R.pager, &other, MiB, &s, &v, NULL) == 0) {
		if (wrong_words(view_base(v), &other, 0, other.size, 8))
			return 7;
		view_unref(v);
		source_unref(s);
	}
	/* A pager of the child's own, in full. */
	{
		struct rig own = { 0 };
		struct pager *p;

		if (pager_try(variant_of_parent, 64 * MiB, &p, NULL) < 0)
			return 8;
		if (pager_is_forked(p) || view_try(p, &other, MiB, &own.source, &own.view, NULL) < 0)
			return 9;
		if (wrong_words(view_base(own.view), &other, 0, other.size, 8))
			return 10;
		view_unref(own.view);
		source_unref(own.source);
		pager_unref(p);
	}
	rig_close(&R);
	return 0;
}

START_TEST(test_child_uses_the_interface)
{
	variant_of_parent = _i;
	tfile_make(&other, "other", 3 * MiB + 100, 71);
	mixed_state(_i, "uses", 6);
	ck_assert_int_eq(in_child(child_uses_the_pager, NULL), 0);
	ck_assert_int_eq(wrong_in_child(8), 0);
	ck_assert(!pager_is_forked(R.pager));
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ storms */

static void *storm_reader(void *arg)
{
	uint64_t seed = 3 + (uint64_t)(uintptr_t)arg;
	FILE *f = fopen("/dev/null", "we");

	while (!stop) {
		uint64_t off = rnd(&seed) % (R.size / 4096) * 4096 + 512;
		void *p = malloc(rnd(&seed) % 5000);

		/* fork(2) holds the locks of malloc and stdio: the pager has to do without them */
		if (f)
			(void)fprintf(f, "%p", p);
		if (*(volatile uint64_t *)(R.base + off) != file_word(F.seed, off))
			nr_wrong++;
		nr_reads++;
		free(p);
	}
	if (f)
		(void)fclose(f);
	return NULL;
}

static void *plain_reader(void *arg)
{
	uint64_t seed = 3 + (uint64_t)(uintptr_t)arg;

	while (!stop) {
		uint64_t off = rnd(&seed) % (R.size / 4096) * 4096 + 512;

		if (*(volatile uint64_t *)(R.base + off) != file_word(F.seed, off))
			nr_wrong++;
		nr_reads++;
	}
	return arg;
}

static char gently; /* as an argument: leaves children that are served page by page the time to get on */

static void *storm_dropper(void *arg)
{
	uint64_t n = 0;

	for (; !stop; n++) {
		struct pager_stats st;

		if (n % 3 == 0) {
			pager_observe_begin(R.pager);
			pager_observe_drop(R.pager);
		}
		(void)view_drop(R.view);
		pager_stats(R.pager, &st);
		(void)pager_sync(R.pager, 1000);
		if (arg == &gently)
			(void)usleep(3000);
	}
	return NULL;
}

static int storm_child(void *arg)
{
	struct pager_stats st;

	(void)arg;
	limit_child(20);
	if (wrong_in_child(4096 + 64))
		return 1;
	pager_stats(R.pager, &st); /* whatever another thread held at that moment: no hang */
	(void)view_drop(R.view);
	return wrong_in_child(16384 + 64) ? 2 : 0;
}

/* Bites on: the child handler (no lock, no malloc, no stdio in it; page tables tell what was written). */
START_TEST(test_storm_of_forks)
{
	pthread_t t[3];
	int nr = 0;

	tfile_make(&F, "forks", 8 * extent() + 5000, 72);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	write_marks();
	for (uintptr_t i = 0; i < ARRAY_SIZE(t); i++)
		ck_assert_int_eq(pthread_create(&t[i], NULL, i < 2 ? storm_reader : storm_dropper, (void *)i), 0);
	for (uint64_t end = now_ms() + soak_ms(800); now_ms() < end || nr <= 10; nr++) {
		int r;
		pid_t pid = fork();

		if (pid == 0)
			_exit(storm_child(NULL));
		r = child_result(pid);
		ck_assert_msg(r == 0, "child %d: %d", nr, r);
	}
	stop = true;
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
		(void)pthread_join(t[i], NULL);
	ck_assert_int_gt(nr, 10);
	ck_assert_uint_eq(nr_wrong, 0);
	ck_assert_int_eq(wrong_in_child(8), 0);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ raw clone(2): the fork event */

static pid_t raw_clone(void)
{
	return (pid_t)syscall(SYS_clone, (long)SIGCHLD, 0L, 0L, 0L, 0L);
}

START_TEST(test_raw_clone_is_served)
{
	for (int pass = 0; pass < 2; pass++) {
		pid_t pid;

		mixed_state(_i, "raw", 6);
		pid = raw_clone();
		if (pid == 0) {
			int r = wrong_in_child(8);

			if (!r) { /* a grandchild as well */
				pid = raw_clone();
				if (pid == 0)
					syscall(SYS_exit_group, wrong_in_child(4096) ? 1 : 0);
				r = child_result(pid);
			}
			syscall(SYS_exit_group, r ? 1 : 0);
		}
		if (pass)
			rig_drop(&R); /* under the child's feet */
		ck_assert_int_eq(child_result(pid), 0);
		ck_assert_int_eq(wrong_in_child(8), 0);
		rig_close(&R);
	}
}
END_TEST

/* Bites on: arm_and_probe() (the probe of the sentinels before the punch; a child that came meanwhile is armed, too). */
START_TEST(test_storm_of_raw_clones)
{
	pthread_t t[2];
	int nr = 0;

	tfile_make(&F, "clones", 6 * extent(), 73);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	write_marks();
	ck_assert_int_eq(pthread_create(&t[0], NULL, storm_reader, NULL), 0);
	ck_assert_int_eq(pthread_create(&t[1], NULL, storm_dropper, &gently), 0);
	for (uint64_t end = now_ms() + soak_ms(800); now_ms() < end || nr <= 10; nr++) {
		int r;
		pid_t pid = raw_clone();

		if (pid == 0)
			syscall(SYS_exit_group, wrong_in_child(512 * 1024 + 64) ? 1 : 0);
		r = child_result(pid);
		ck_assert_msg(r == 0, "child %d: %d", nr, r);
	}
	stop = true;
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
		(void)pthread_join(t[i], NULL);
	ck_assert_int_gt(nr, 10);
	ck_assert_uint_eq(nr_wrong, 0);
	rig_close(&R);
}
END_TEST

static _Atomic pid_t worker_tid;
static _Atomic unsigned int armed;

static void note_worker(void)
{
	worker_tid = gettid();
	armed++;
}

static unsigned int list_threads(pid_t *tids, unsigned int max)
{
	DIR *d = opendir("/proc/self/task");
	struct dirent *e;
	unsigned int n = 0;

	while (d && (e = readdir(d)))
		if (e->d_name[0] != '.' && n < max)
			tids[n++] = atoi(e->d_name);
	if (d)
		(void)closedir(d);
	return n;
}

static void *spin(void *arg)
{
	(void)arg;
	while (!stop)
		;
	return NULL;
}

struct cloner {
	pthread_t thread;
	pid_t tid, child;
	_Atomic bool started, done;
};

static void *clone_in_thread(void *arg)
{
	struct cloner *c = arg;
	pid_t pid;

	c->tid = gettid();
	c->started = true;
	pid = raw_clone();
	if (pid == 0)
		syscall(SYS_exit_group, wrong_in_child(65536) ? 1 : 0);
	c->child = pid;
	c->done = true;
	return NULL;
}

static void *open_once(void *arg)
{
	struct source *s;
	struct view *v;
	int *ret = arg;

	*ret = view_try(R.pager, &other, 0, &s, &v, NULL);
	if (*ret == 0) {
		view_unref(v);
		source_unref(s);
	}
	return NULL;
}

/*
 * The race of fork and take-back, made to happen: a child has copied the open ranges, its event is unread (the thread
 * that reads events gets no CPU: idle class, on a CPU where another thread spins); now a take-back arms the views
 * that it knows. Punching would show the child zeros.
 * Bites on: the probe of the view's sentinel before the punch (EAGAIN: a fork is in flight); the retry of the sentinel's
 * UFFDIO_COPY when a view is opened at that moment.
 */
START_TEST(test_take_back_while_a_fork_is_in_flight)
{
	pid_t before[64], tids[64];
	unsigned int nr_before, nr;
	struct sched_param zero = { 0 };
	cpu_set_t all, first;
	pthread_t spinner, opener_thread;
	int opened = 0;

	tfile_make(&other, "inflight-b", extent(), 82);
	tfile_make(&F, "inflight", 4 * extent(), 74);
	nr_before = list_threads(before, ARRAY_SIZE(before));
	pager_hooks.after_arm = note_worker;
	rig_open(&R, _i, &F, 256 * MiB, 0);
	rig_check(&R);
	rig_drop(&R);
	ck_assert_int_gt(worker_tid, 0);
	write_marks();
	nr = list_threads(tids, ARRAY_SIZE(tids));
	ck_assert_int_eq(sched_getaffinity(0, sizeof(all), &all), 0);
	CPU_ZERO(&first);
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &all)) {
			CPU_SET(cpu, &first);
			break;
		}
	for (int round = 0; round < 10; round++) {
		struct cloner c = { 0 };

		stop = false;
		ck_assert_int_eq(wrong_in_child(4096), 0); /* everything is open */
		ck_assert_int_eq(pthread_create(&spinner, NULL, spin, NULL), 0);
		(void)pthread_setaffinity_np(spinner, sizeof(first), &first);
		for (unsigned int i = 0; i < nr; i++) {
			bool mine = tids[i] == worker_tid;

			for (unsigned int k = 0; k < nr_before; k++)
				mine |= tids[i] == before[k];
			if (!mine) {
				(void)sched_setaffinity(tids[i], sizeof(first), &first);
				(void)sched_setscheduler(tids[i], SCHED_IDLE, &zero);
			}
		}
		ck_assert_int_eq(pthread_create(&c.thread, NULL, clone_in_thread, &c), 0);
		while (!c.started)
			;
		until_asleep(c.tid, &c.done);
		ck_assert_int_eq(pthread_create(&opener_thread, NULL, open_once, &opened), 0);
		(void)view_drop(R.view);
		(void)pager_sync(R.pager, 20);
		stop = true; /* now the event is read and the child runs */
		(void)pthread_join(spinner, NULL);
		for (unsigned int i = 0; i < nr; i++) {
			(void)sched_setaffinity(tids[i], sizeof(all), &all);
			(void)sched_setscheduler(tids[i], SCHED_OTHER, &zero);
		}
		(void)pthread_join(c.thread, NULL);
		(void)pthread_join(opener_thread, NULL);
		ck_assert_int_gt(c.child, 0);
		ck_assert_int_eq(child_result(c.child), 0);
		ck_assert_int_eq(opened, 0);
		ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	}
	rig_close(&R);
}
END_TEST

/* Each living child is a descriptor of the pager's; they go when the children have gone. */
START_TEST(test_dead_children_are_forgotten)
{
	unsigned int fds;

	mixed_state(_i, "reap", 4);
	fds = count_fds();
	for (int i = 0; i < 200; i++) {
		pid_t pid = i % 2 ? raw_clone() : fork();

		if (pid == 0)
			syscall(SYS_exit_group, 0);
		ck_assert_int_eq(child_result(pid), 0);
	}
	/* The next take-back finds them gone. */
	for (uint64_t end = now_ms() + 10000; count_fds() > fds + 2 && now_ms() < end;) {
		(void)*(volatile unsigned char *)R.base;
		rig_drop(&R);
	}
	ck_assert_uint_le(count_fds(), fds + 2);
	ck_assert_int_eq(wrong_in_child(4096), 0);
	rig_close(&R);
}
END_TEST

/* No descriptor is left when a child is made: the fork returns, everyone reads the right bytes.
 * Bites on: the reserve descriptor for reading a fork event; a child handler that needs none. */
static int child_at_the_limit(void *arg)
{
	struct rlimit rl;
	int fd;
	pid_t pid;

	(void)arg;
	limit_child(20);
	(void)getrlimit(RLIMIT_NOFILE, &rl);
	rl.rlim_cur = 256;
	(void)setrlimit(RLIMIT_NOFILE, &rl);
	while ((fd = dup(0)) >= 0)
		;
	for (int i = 0; i < 5; i++) {
		pid = fork();
		if (pid == 0)
			_exit(wrong_in_child(4096) ? 1 : 0);
		if (child_result(pid))
			return 1;
		if (wrong_in_child(4096))
			return 2;
		(void)view_drop(R.view);
		(void)pager_sync(R.pager, 10000);
	}
	if (wrong_in_child(8))
		return 3;
	if (variant_of_parent != V_TMPFS && variant_of_parent != V_MEMFD)
		return 0;
	/* A raw clone cannot be served here, but it must neither hang nor take the parent with it. */
	pid = raw_clone();
	if (pid == 0) {
		limit_child(10);
		syscall(SYS_exit_group, 0);
	}
	if (child_result(pid))
		return 4;
	return wrong_in_child(8) ? 5 : 0;
}

static int at_the_limit(void *arg)
{
	(void)arg;
	/* in a process of its own, because its pager must be the one that lacks descriptors */
	mixed_state(variant_of_parent, "limit", 4);
	return child_at_the_limit(NULL);
}

START_TEST(test_fork_without_descriptors)
{
	variant_of_parent = _i;
	ck_assert_int_eq(in_child(at_the_limit, NULL), 0);
}
END_TEST

/* ------------------------------------------------------------------ forks at bad moments */

static struct cloner forker;
static _Atomic unsigned int hook_calls;

static void *fork_in_thread(void *arg)
{
	struct cloner *c = arg;
	pid_t pid;

	c->tid = gettid();
	c->started = true;
	pid = fork();
	if (pid == 0)
		_exit(storm_child(NULL));
	c->child = pid;
	c->done = true;
	return NULL;
}

static void fork_in_hook(void)
{
	if (hook_calls++)
		return;
	if (pthread_create(&forker.thread, NULL, fork_in_thread, &forker) != 0)
		abort();
	while (!forker.started)
		;
	/* It may sleep until we go on; the child may hang if this moment leaves it something half done. */
	until_asleep(forker.tid, &forker.done);
}

/* At each place where the pager can be held: the child keeps the writes and reads the right bytes, the parent too.
 * Bites on: the child handler works from page tables alone; no atfork prepare handler that waits for a lock. */
START_TEST(test_fork_at_each_hook)
{
	for (int which = 0; which < 4; which++) {
		hook_calls = 0;
		memset(&forker, 0, sizeof(forker));
		pager_hooks.before_open = which == 0 ? fork_in_hook : NULL;
		pager_hooks.after_arm = which == 1 ? fork_in_hook : NULL;
		pager_hooks.before_punch = which == 2 ? fork_in_hook : NULL;
		pager_hooks.in_window = which == 3 ? fork_in_hook : NULL;
		tfile_make(&F, "hooks", 4 * extent() + 100, 75);
		rig_open(&R, _i, &F, 256 * MiB, 0);
		write_marks();
		ck_assert_int_eq(wrong_in_child(4096), 0);
		pager_observe_begin(R.pager);
		ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
		ck_assert_int_eq(wrong_in_child(4096), 0);
		rig_drop(&R);
		ck_assert_int_eq(wrong_in_child(8), 0);
		if (hook_calls) {
			ck_assert_int_eq(pthread_join(forker.thread, NULL), 0);
			ck_assert_int_gt(forker.child, 0);
			ck_assert_msg(child_result(forker.child) == 0, "hook %d", which);
		} else {
			fprintf(stderr, "%s: hook %d was not reached\n", variant_name(_i), which);
		}
		ck_assert_int_eq(wrong_in_child(8), 0);
		rig_close(&R);
	}
}
END_TEST

static sem_t hook_reached, hook_go;

static int64_t gate_half(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	int64_t n;

	(void)direct;
	n = hook_pread(s, buf, nbytes / 2, offset);
	if (n < 0)
		return n;
	(void)sem_post(&hook_reached);
	while (sem_wait(&hook_go) < 0)
		;
	(void)sem_post(&hook_go);
	return hook_pread(s, buf, nbytes, offset);
}

static void *toucher(void *arg)
{
	if (*(volatile uint64_t *)(R.base + 4096) != file_word(F.seed, 4096))
		nr_wrong++;
	return arg;
}

/* Half a read is in the arena when the child is made. */
START_TEST(test_fork_while_reading)
{
	pthread_t t;
	pid_t pid;

	(void)sem_init(&hook_reached, 0, 0);
	(void)sem_init(&hook_go, 0, 0);
	source_hook = gate_half;
	tfile_make(&F, "reading", 2 * extent(), 76);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	ck_assert_int_eq(pthread_create(&t, NULL, toucher, NULL), 0);
	must_wait(&hook_reached);
	pid = fork();
	if (pid == 0) {
		limit_child(20);
		_exit(wrong_words(R.base, &F, 0, R.size, 8) ? 1 : 0);
	}
	ck_assert_int_eq(child_result(pid), 0);
	(void)sem_post(&hook_go);
	(void)pthread_join(t, NULL);
	ck_assert_uint_eq(nr_wrong, 0);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

static void *opener(void *arg)
{
	while (!stop) {
		struct source *s;
		struct view *v;
		struct wd_err err = { "" };
		int r = view_try(R.pager, &other, 0, &s, &v, &err);

		if (r < 0) {
			fprintf(stderr, "%d: %s\n", r, err.text);
			nr_wrong++;
			break;
		}
		nr_wrong += wrong_words(view_base(v), &other, 0, other.size, 4096);
		view_unref(v);
		source_unref(s);
	}
	return arg;
}

/* Views are opened and closed while others fork: no open fails because of a fork in flight, no child is disturbed. */
START_TEST(test_views_open_while_others_fork)
{
	pthread_t t[2];

	tfile_make(&other, "opened", 2 * extent(), 79);
	tfile_make(&F, "stays", 4 * extent(), 80);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	write_marks();
	for (uintptr_t i = 0; i < ARRAY_SIZE(t); i++)
		ck_assert_int_eq(pthread_create(&t[i], NULL, opener, NULL), 0);
	for (uint64_t end = now_ms() + soak_ms(600); now_ms() < end;) {
		int r;
		pid_t pid = fork();

		if (pid == 0) {
			limit_child(20);
			_exit(wrong_in_child(65536));
		}
		r = child_result(pid);
		ck_assert_msg(r == 0, "a child: %d", r);
	}
	stop = true;
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
		(void)pthread_join(t[i], NULL);
	ck_assert_uint_eq(nr_wrong, 0);
	ck_assert_int_eq(wrong_in_child(8), 0);
	rig_close(&R);
}
END_TEST

/* At the limit of maps extents are opened page by page, and CONTINUE is refused while a fork is in flight, which takes long
 * with that many maps. Touches get through; a child reads the right bytes, or gets a signal where it has no map left.
 * Bites on: a waiter whose CONTINUE got EAGAIN stays a waiter. */
START_TEST(test_forks_at_the_limit_of_maps)
{
	pthread_t t[2];

	tfile_make(&F, "limits", 6 * extent(), 81);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	rig_check(&R);
	for (uintptr_t i = 0; i < ARRAY_SIZE(t); i++)
		ck_assert_int_eq(pthread_create(&t[i], NULL, plain_reader, (void *)i), 0);
	use_up_maps(0);
	for (uint64_t end = now_ms() + soak_ms(700); now_ms() < end;) {
		uint64_t before = nr_reads, late;
		pid_t pid;
		int r;

		(void)view_drop(R.view);
		pid = _i == V_TMPFS || _i == V_MEMFD ? raw_clone() : fork();
		if (pid == 0) {
			limit_child(20);
			syscall(SYS_exit_group, wrong_in_child(512 * 1024));
		}
		ck_assert_int_gt(pid, 0);
		for (late = now_ms() + 10000; nr_reads < before + 4 && now_ms() < late;)
			(void)usleep(200);
		ck_assert_msg(nr_reads >= before + 4, "no touch gets through");
		r = child_result(pid);
		ck_assert_msg(r == 0 || r == 1000 + SIGBUS || r == 1000 + SIGSEGV, "a child: %d", r);
	}
	give_back_maps();
	stop = true;
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
		(void)pthread_join(t[i], NULL);
	ck_assert_uint_eq(nr_wrong, 0);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* vfork(2) and posix_spawn(3) share the parent's memory: nothing to do, nothing to break. */
START_TEST(test_spawn_needs_nothing)
{
	pthread_t t[2];
	char name[] = "true";
	char *const argv[] = { name, NULL };

	tfile_make(&F, "spawn", 4 * extent(), 77);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	write_marks();
	for (uintptr_t i = 0; i < ARRAY_SIZE(t); i++)
		ck_assert_int_eq(pthread_create(&t[i], NULL, i ? storm_dropper : storm_reader, (void *)i), 0);
	for (int i = 0; i < 40; i++) {
		pid_t pid;

		ck_assert_int_eq(posix_spawn(&pid, "/bin/true", NULL, NULL, argv, environ), 0);
		ck_assert_int_eq(child_result(pid), 0);
	}
	stop = true;
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
		(void)pthread_join(t[i], NULL);
	ck_assert_uint_eq(nr_wrong, 0);
	ck_assert_int_eq(wrong_in_child(8), 0);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ without privileges */

static int as_nobody(void *arg)
{
	bool dumpable = *(bool *)arg;
	struct pager_config config = { .way = variant_of_parent == V_MMAP ? WAY_MMAP : WAY_USER,
				       .budget_bytes = 64 * MiB };
	struct pager *p;
	struct wd_err err = { "" };

	if (setgroups(0, NULL) < 0 || setresgid(65534, 65534, 65534) < 0 || setresuid(65534, 65534, 65534) < 0)
		return 100;
	/* After setuid the files of /proc/self are root's, unless one says so; both have to work. */
	if (dumpable && prctl(PR_SET_DUMPABLE, 1) < 0)
		return 101;
	if (pager_new(&config, &p, &err) < 0) {
		fprintf(stderr, "%s\n", err.text);
		return 102;
	}
	R.pager = p;
	R.file = &F;
	R.size = F.size;
	if (view_try(p, &F, 0, &R.source, &R.view, &err) < 0) {
		fprintf(stderr, "%s\n", err.text);
		return 103;
	}
	R.base = view_base(R.view);
	write_marks();
	if (wrong_in_child(4096))
		return 104;
	if (view_drop(R.view) < 0 || pager_sync(p, 10000) < 0)
		return 105;
	if (wrong_in_child(65536))
		return 106;
	for (int i = 0; i < 20; i++) {
		int r = in_child(child_writes_and_forks, NULL);

		if (r)
			return r;
	}
	return wrong_in_child(8) ? 107 : 0;
}

START_TEST(test_children_of_nobody)
{
	bool dumpable = true;

	variant_of_parent = _i;
	tfile_make(&F, "nobody", 6 * extent() + 100, 78);
	ck_assert_int_eq(in_child(as_nobody, &dumpable), 0);
	dumpable = false;
	ck_assert_int_eq(in_child(as_nobody, &dumpable), 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("fork");
	double soak = (double)soak_ms(0) / 1000;
	struct pager_caps caps;
	TCase *tc;

	pager_caps_probe(&caps, NULL);
	tc = new_case(s, "children", 60);
	add_variants(tc, test_child_reads_and_writes_its_own, ALL_VARIANTS);
	add_variants(tc, test_child_outlives_its_parent, ALL_VARIANTS);
	add_variants(tc, test_child_uses_the_interface, ALL_VARIANTS);
	add_variants(tc, test_fork_without_descriptors, ALL_VARIANTS);

	tc = new_case(s, "storms", 60 + soak);
	add_variants(tc, test_storm_of_forks, ALL_VARIANTS);
	add_variants(tc, test_views_open_while_others_fork, ALL_VARIANTS);
	add_variants(tc, test_forks_at_the_limit_of_maps, PAGED);

	tc = new_case(s, "raw", 60 + soak);
	if (caps.event_fork == 0) {
		unsigned int with_event = 1u << V_TMPFS | 1u << V_MEMFD;

		add_variants(tc, test_raw_clone_is_served, with_event);
		add_variants(tc, test_storm_of_raw_clones, with_event);
		add_variants(tc, test_take_back_while_a_fork_is_in_flight, with_event);
		add_variants(tc, test_dead_children_are_forgotten, with_event);
	} else {
		skip("raw clones", "fork events need CAP_SYS_PTRACE: %s", strerror(-caps.event_fork));
	}

	tc = new_case(s, "moments", 60);
	add_variants(tc, test_fork_at_each_hook, PAGED);
	add_variants(tc, test_fork_while_reading, PAGED);
	add_variants(tc, test_spawn_needs_nothing, ALL_VARIANTS);

	tc = new_case(s, "nobody", 60);
	if (geteuid() == 0)
		add_variants(tc, test_children_of_nobody, 1u << V_USER | 1u << V_MMAP);
	else
		skip("test_children_of_nobody", "only root can become nobody");
	return run_suite(s);
}
