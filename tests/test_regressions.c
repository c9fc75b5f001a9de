/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Defects that a review of the pager found and showed with programs, each made to happen here without a race: the
 * pager's threads are held (by hooks, by reads that wait, once by ptrace), and one is let go after the other.
 *
 * Knows the names of the pager's threads. A child here exits with 0, or with the number of the check that failed; it
 * uses no check.h.
 */
#include "tests/api_util.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "ufd/arena.h"

#define LIMIT_MS 10000 /* what takes longer hangs */

static struct rig R, S;
static struct tfile F, G;

/* No stdio, no malloc: for children of a raw clone as well. */
static int wrong_in_child(void)
{
	for (uint64_t off = 0; off + 8 <= R.size; off += 4096)
		if (*(volatile uint64_t *)(R.base + off) != file_word(F.seed, off))
			return 1;
	return 0;
}

static pid_t raw_clone(void)
{
	return (pid_t)syscall(SYS_clone, (long)SIGCHLD, 0L, 0L, 0L, 0L);
}

/* As child_result(), but a child that hangs fails the test here and does not outlive it. */
static int ended_child(pid_t pid)
{
	uint64_t end = now_ms() + LIMIT_MS;
	int status, r;

	while ((r = waitpid(pid, &status, WNOHANG)) == 0 && now_ms() < end)
		(void)usleep(1000);
	if (r == 0) {
		(void)kill(pid, SIGKILL);
		(void)child_result(pid);
		ck_abort_msg("the child hangs");
	}
	return r < 0 ? -errno : WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* The thread of this process with that name; of the pager's there is one each. */
static pid_t thread_named(const char *name)
{
	DIR *d = opendir("/proc/self/task");
	struct dirent *e;
	pid_t found = 0;

	while (d && !found && (e = readdir(d))) {
		char path[300], have[32] = "";
		cleanup_fclose FILE *f = NULL;

		(void)snprintf(path, sizeof(path), "/proc/self/task/%s/comm", e->d_name);
		f = fopen(path, "re");
		if (f && fgets(have, sizeof(have), f) && !strncmp(have, name, strlen(name)))
			found = atoi(e->d_name);
	}
	if (d)
		(void)closedir(d);
	return found;
}

/* Until everything that was asked of the pager is done or waits for something: its threads sleep, all at once. */
static void until_pager_rests(void)
{
	pid_t tids[] = { thread_named("wd-pager"), thread_named("wd-worker"), thread_named("wd-slow") };
	uint64_t end = now_ms() + LIMIT_MS;

	for (int in_a_row = 0; in_a_row < 20 && now_ms() < end;) {
		bool asleep = true;

		for (unsigned int i = 0; i < ARRAY_SIZE(tids); i++)
			asleep &= thread_state(tids[i]) == 'S';
		in_a_row = asleep ? in_a_row + 1 : 0;
		(void)usleep(200);
	}
}

static struct pager_job *populate(struct rig *r, uint64_t off, uint64_t len, bool gentle)
{
	struct pager_job *j = NULL;

	ck_assert_int_eq(pager_job_new(r->pager, &(struct job_range){ r->view, off, len }, 1, gentle, &j), 0);
	return j;
}

static int populated(struct pager_job *j)
{
	int r = pager_job_wait(j, LIMIT_MS);

	pager_job_free(j);
	return r;
}

/* ------------------------------------------------------------------ a fork between arming and probing */

/* A process that can stop one of our threads, wherever it is. */
static struct {
	int to[2], from[2];
	pid_t pid, tid;
} tracer;

static void tracer_main(void)
{
	pid_t tid;
	int status;
	char ok, byte;

	limit_child(30);
	(void)close(tracer.to[1]);
	if (read(tracer.to[0], &tid, sizeof(tid)) != sizeof(tid))
		_exit(1);
	ok = ptrace(PTRACE_SEIZE, tid, NULL, NULL) == 0 && ptrace(PTRACE_INTERRUPT, tid, NULL, NULL) == 0 &&
	     waitpid(tid, &status, __WALL) == tid && WIFSTOPPED(status);
	(void)!write(tracer.from[1], &ok, 1);
	(void)!read(tracer.to[0], &byte, 1); /* or the other end is gone */
	_exit(ptrace(PTRACE_DETACH, tid, NULL, NULL) < 0);
}

static void tracer_start(void)
{
	ck_assert(pipe(tracer.to) == 0 && pipe(tracer.from) == 0);
	tracer.pid = fork();
	if (tracer.pid == 0)
		tracer_main();
	ck_assert_int_gt(tracer.pid, 0);
}

static void tracer_stop(pid_t tid)
{
	char ok = 0;

	tracer.tid = tid;
	ck_assert_int_eq(write(tracer.to[1], &tid, sizeof(tid)), sizeof(tid));
	ck_assert_int_eq(read(tracer.from[0], &ok, 1), 1);
	ck_assert_msg(ok, "thread %d cannot be stopped", (int)tid);
}

static bool can_trace(void)
{
	pid_t pid = fork();
	bool ok;

	if (pid == 0) {
		limit_child(20);
		(void)pause();
		_exit(0);
	}
	ok = pid > 0 && ptrace(PTRACE_SEIZE, pid, NULL, NULL) == 0;
	if (pid > 0) {
		(void)kill(pid, SIGKILL);
		(void)child_result(pid);
	}
	return ok;
}

static struct {
	pthread_t thread;
	int go[2]; /* the child reads from it before it looks at anything */
	_Atomic pid_t tid;
	pid_t child;
	_Atomic bool done;
} cloner;
static _Atomic bool reader_stopped, never;

static void *clone_in_thread(void *arg)
{
	pid_t pid;

	cloner.tid = gettid();
	pid = raw_clone();
	if (pid == 0) {
		char byte;

		limit_child(20);
		syscall(SYS_exit_group, read(cloner.go[0], &byte, 1) == 1 ? wrong_in_child() : 2);
	}
	cloner.child = pid;
	cloner.done = true;
	return arg;
}

/* The worker has armed what it knows: only now the reader learns of the child. */
static void hook_reader_goes_on(void)
{
	uint64_t end = now_ms() + LIMIT_MS;

	if (!atomic_exchange(&reader_stopped, false))
		return;
	(void)!write(tracer.to[1], "", 1);
	while (!cloner.done && now_ms() < end) /* clone(2) returns when the event has been read */
		(void)usleep(200);
	until_asleep(tracer.tid, &never); /* the child is in the table */
}

/*
 * A child copies the open ranges; the thread that would read its event is stopped. The worker arms every address space
 * that it knows; then the event is read, and the child answers the probe like all the others. It was armed by nobody:
 * punching would show it zeros.
 * Bites on: arm_and_probe() reads fork_seq before the first REGISTER, not after it.
 */
START_TEST(test_fork_between_arming_and_probing)
{
	uint64_t end;

	tfile_make(&F, "clone", 4 * extent(), 200);
	tracer_start();
	pager_hooks.after_arm = hook_reader_goes_on;
	rig_open(&R, _i, &F, 256 * MiB, 0);
	rig_check(&R);
	ck_assert_int_eq(pipe(cloner.go), 0);
	until_pager_rests();
	tracer_stop(thread_named("wd-pager"));
	ck_assert_int_eq(pthread_create(&cloner.thread, NULL, clone_in_thread, NULL), 0);
	for (end = now_ms() + LIMIT_MS; !cloner.tid && now_ms() < end;)
		(void)usleep(200);
	until_asleep(cloner.tid, &cloner.done);
	ck_assert(!cloner.done); /* its event is unread */
	reader_stopped = true;
	ck_assert_int_eq(view_drop(R.view), 0);
	ck_assert_int_eq(pager_sync(R.pager, LIMIT_MS), 0);
	ck_assert(!reader_stopped);
	ck_assert_int_eq(write(cloner.go[1], "", 1), 1);
	ck_assert_int_eq(pthread_join(cloner.thread, NULL), 0);
	ck_assert_int_gt(cloner.child, 0);
	ck_assert_int_eq(ended_child(cloner.child), 0);
	ck_assert_int_eq(ended_child(tracer.pid), 0);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ victims that do not go */

/*
 * The program has locked weights in memory: MADV_DONTNEED is refused, so their page tables cannot be cleared. They can be
 * dropped all the same.
 * Bites on: clear_taken() arms what it could not clear; arm_oldest() ends, whatever cannot be armed (each extent that
 * was put at the end of the list came round again: the worker ran for ever, the touch hung).
 */
START_TEST(test_touch_goes_on_with_locked_weights)
{
	uint64_t e = extent();

	tfile_make(&F, "locked", 12 * e, 201);
	pager_hooks.no_huge = true;
	rig_open(&R, _i, &F, 4 * e, 0);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 4 * e, 512), 0);
	/* (The system call: a sanitizer's mlock() does nothing.) */
	ck_assert_int_eq(syscall(SYS_mlock2, R.base, R.size, 1 /* MLOCK_ONFAULT */), 0);
	rig_check(&R);
	ck_assert_uint_le(resident(R.pager), 8 * e); /* the budget, and what is read while room for it is made */
	rig_check(&R);
	rig_close(&R);
}
END_TEST

static bool can_lock(void)
{
	uint64_t len = 4 * extent();
	unsigned char *p = map_reserve(len);
	bool ok = p && syscall(SYS_mlock2, p, len, 1) == 0;

	if (p)
		(void)munmap(p, len);
	return ok;
}

static void mapped_over(int variant, enum view_class class)
{
	uint64_t e = extent(), page = (uint64_t)sysconf(_SC_PAGESIZE);

	tfile_make(&F, "over", 4 * e, 202);
	tfile_make(&G, "comes", 4 * e, 212);
	rig_open(&R, variant, &F, 4 * e, 0);
	rig_add(&S, R.pager, &G, 0);
	rig_check(&R);
	for (uint64_t i = 0; i < 4; i++)
		ck_assert(mmap(R.base + i * e + page, page, PROT_READ, MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1,
			       0) != MAP_FAILED);
	view_set_class(R.view, class);
	rig_check(&S);
	for (uint64_t i = 0; i < 4; i++) {
		ck_assert_uint_eq(wrong_words(R.base + i * e, &F, i * e, page, 8), 0);
		ck_assert_uint_eq(wrong_words(R.base + i * e + 2 * page, &F, i * e + 2 * page, e - 2 * page, 8), 0);
	}
	rig_close(&S);
	rig_close(&R);
}

/*
 * The program has mapped something over a part of each victim: REGISTER is refused, so not one can be armed and taken
 * back. The touch is let in above the budget.
 * Bites on: arm_oldest() is bounded, see above.
 */
START_TEST(test_touch_goes_on_with_victims_mapped_over)
{
	mapped_over(_i, VIEW_NORMAL);
}
END_TEST

/* The same where no stage needs them, so that they go without having been armed.
 * Bites on: take_back() that gives up sets evict_failed (the victims were chosen again and again, the touch hung). */
START_TEST(test_touch_goes_on_with_unneeded_victims_mapped_over)
{
	mapped_over(_i, VIEW_UNNEEDED);
}
END_TEST

/* ------------------------------------------------------------------ reads that are held */

static _Atomic uint64_t hold_from; /* reads of F at and above wait; UINT64_MAX: none */
static sem_t reading, go;

static int64_t hook_hold(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	(void)direct;
	if (offset >= hold_from && !strcmp(s->path, F.path)) {
		(void)sem_post(&reading);
		while (sem_wait(&go) < 0)
			;
		(void)sem_post(&go); /* for all that follow */
	}
	return hook_pread(s, buf, nbytes, offset);
}

static void hold_reads(uint64_t from)
{
	(void)sem_init(&reading, 0, 0);
	(void)sem_init(&go, 0, 0);
	hold_from = from;
	source_hook = hook_hold;
}

static _Atomic pid_t closer_tid;
static _Atomic bool closed;

static void *closer(void *arg)
{
	closer_tid = gettid();
	R.view = view_unref(R.view);
	closed = true;
	return arg;
}

/*
 * A view is being closed, waits for a read in flight, and would be the first to make room for another one.
 * Bites on: evict_from() takes what it has counted out of the list (an extent of a dying view stayed there, and was
 * counted again and again: drops that nobody would ever take off the count, so pager_sync() never ended).
 */
START_TEST(test_view_closed_while_evictions_run)
{
	struct pager_job *j;
	uint64_t e = extent(), end;
	pthread_t t;

	tfile_make(&F, "closed", 8 * e, 203);
	tfile_make(&G, "needs", 8 * e, 204);
	hold_reads(6 * e);
	rig_open(&R, _i, &F, 8 * e, 0);
	rig_add(&S, R.pager, &G, 0);
	ck_assert_int_eq(populated(populate(&R, 0, 6 * e, false)), 0);
	view_set_class(R.view, VIEW_UNNEEDED);
	j = populate(&R, 6 * e, e, false);
	must_wait(&reading);
	pager_job_cancel(j);
	pager_job_free(j);
	ck_assert_int_eq(pthread_create(&t, NULL, closer, NULL), 0);
	for (end = now_ms() + LIMIT_MS; !closer_tid && now_ms() < end;)
		(void)usleep(200);
	until_asleep(closer_tid, &closed);
	ck_assert(!closed);
	j = populate(&S, 0, 4 * e, false);
	until_pager_rests(); /* it has looked for victims */
	(void)sem_post(&go);
	ck_assert_int_eq(pthread_join(t, NULL), 0);
	ck_assert_int_eq(populated(j), 0);
	ck_assert_int_eq(pager_sync(S.pager, LIMIT_MS), 0);
	ck_assert_uint_eq(wrong_words(S.base, &G, 0, 4 * e, 8), 0);
	rig_close(&R);
	rig_check(&S);
	rig_close(&S);
}
END_TEST

/*
 * Two populates, each of which fits: while everything is being read there is nothing to drop yet.
 * Bites on: evict() that finds nothing while reads are under way is no failure (the second one ended with -ENOSPC).
 */
START_TEST(test_two_populates_share_the_budget)
{
	struct pager_job *a, *b;
	uint64_t e = extent();

	tfile_make(&F, "first", 10 * e, 205);
	tfile_make(&G, "second", 10 * e, 206);
	hold_reads(0);
	rig_open(&R, _i, &F, 12 * e, 0);
	rig_add(&S, R.pager, &G, 0);
	a = populate(&R, 0, R.size, false);
	must_wait(&reading);
	b = populate(&S, 0, S.size, false);
	until_pager_rests(); /* it has looked for room for the rest of the second one */
	(void)sem_post(&go);
	ck_assert_int_eq(populated(a), 0);
	ck_assert_int_eq(populated(b), 0);
	ck_assert_int_eq(pager_sync(R.pager, LIMIT_MS), 0);
	ck_assert_uint_le(resident(R.pager), 12 * e);
	hold_from = UINT64_MAX;
	rig_check(&R);
	rig_check(&S);
	rig_close(&S);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ a child's fault and a drop */

static sem_t punching, punch;
static _Atomic bool hold_punch;

static void hook_before_punch(void)
{
	if (!atomic_exchange(&hold_punch, false))
		return;
	(void)sem_post(&punching);
	while (sem_wait(&punch) < 0)
		;
}

static void *toucher(void *arg)
{
	(void)*(volatile unsigned char *)arg;
	return NULL;
}

/*
 * A raw clone's fault waits for room; the parent drops the view meanwhile.
 * Bites on: X_WAIT for children, too (the drop took the extent out of the queue: never read, the child never woken).
 */
START_TEST(test_childs_fault_survives_a_drop)
{
	struct pager_stats st;
	uint64_t e = extent(), faults, end;
	pthread_t t;
	pid_t pid;

	(void)sem_init(&punching, 0, 0);
	(void)sem_init(&punch, 0, 0);
	pager_hooks.before_punch = hook_before_punch;
	tfile_make(&F, "survives", 8 * e, 207);
	rig_open(&R, _i, &F, 4 * e, 0);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 4 * e, 4096), 0);
	hold_punch = true;
	ck_assert_int_eq(pthread_create(&t, NULL, toucher, R.base + 7 * e), 0); /* needs room */
	must_wait(&punching);
	until_asleep(thread_named("wd-pager"), &never);
	pager_stats(R.pager, &st);
	faults = st.faults;
	pid = raw_clone();
	if (pid == 0) {
		limit_child(30);
		syscall(SYS_exit_group, *(volatile uint64_t *)(R.base + 6 * e) != file_word(F.seed, 6 * e));
	}
	ck_assert_int_gt(pid, 0);
	for (end = now_ms() + LIMIT_MS; st.faults == faults && now_ms() < end; pager_stats(R.pager, &st))
		(void)usleep(1000);
	ck_assert_uint_gt(st.faults, faults);
	ck_assert_int_eq(view_drop(R.view), 0);
	(void)sem_post(&punch);
	ck_assert_int_eq(pthread_join(t, NULL), 0);
	ck_assert_int_eq(ended_child(pid), 0);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ what a forked child is */

static int child_allows(void *arg)
{
	struct fault_reason why;
	struct caught c;

	(void)arg;
	limit_child(20);
	if (touch(R.base + 100, NULL, &c) || !pager_fault_reason(R.base + 100, &why) || why.code != FAULT_FORBIDDEN)
		return 2;
	view_allow(R.view);
	if (wrong_in_child())
		return 3;
	view_forbid(R.view, "again");
	if (touch(R.base + 100, NULL, &c))
		return 4;
	view_allow(R.view);
	return wrong_in_child();
}

/* Bites on: replace_view() puts the file there for forbidden views, too (the arena stayed, and its holes read as zeros
 * once it was allowed). */
START_TEST(test_child_of_a_forbidden_view)
{
	tfile_make(&F, "forbidden", 4 * extent() + 5000, 208);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	rig_check(&R);
	rig_drop(&R);
	view_forbid(R.view, "stage");
	ck_assert_int_eq(in_child(child_allows, NULL), 0);
	view_allow(R.view);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

static int child_sets_the_budget(void *arg)
{
	limit_child(20);
	return pager_set_budget(R.pager, *(uint64_t *)arg) == -EOPNOTSUPP ? wrong_in_child() : 2;
}

/* Bites on: pager_set_budget() refuses in a child (it made the parent's tmpfs smaller: its reads failed). */
START_TEST(test_child_leaves_the_budget_alone)
{
	uint64_t e = extent(), small = e;

	tfile_make(&F, "child-budget", 80 * e, 209); /* more than a tmpfs has beyond such a budget */
	rig_open(&R, _i, &F, 128 * e, 0);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 2 * e, 4096), 0);
	ck_assert_int_eq(in_child(child_sets_the_budget, &small), 0);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, R.size, 4096), 0);
	ck_assert_uint_eq(resident(R.pager), R.size);
	rig_close(&R);
}
END_TEST

static int variant_of_parent, report[2];

/* Is a file that has no name (an arena) mapped in the view? */
static bool maps_deleted(void)
{
	cleanup_fclose FILE *f = fopen("/proc/self/maps", "re");
	char line[512];

	while (f && fgets(line, sizeof(line), f)) {
		uintptr_t a, z;

		if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &a, &z) == 2 && z > (uintptr_t)R.base &&
		    a <= (uintptr_t)R.base + R.size && strstr(line, "(deleted)"))
			return true;
	}
	return !f;
}

/* The program that becomes a daemon. */
static int parent_that_ends(void *arg)
{
	unsigned int fds;
	int alive[2];

	(void)arg;
	if (pipe(alive) < 0)
		return 9;
	fds = count_fds();
	rig_open(&R, variant_of_parent, &F, 1024 * MiB, 0);
	if (wrong_in_child() || arena_bytes() < R.size)
		return 8;
	if (fork() == 0) {
		char byte;

		limit_child(20);
		(void)close(alive[1]);
		(void)!read(alive[0], &byte, 1); /* until the parent is gone */
		byte = (char)(arena_bytes() ? 1 :
			      maps_deleted() ? 2 :
			      count_fds() > fds + 1 ? 3 : /* the source's two, less one of the pipe's */
			      wrong_in_child() ? 4 :
						 0);
		(void)!write(report[1], &byte, 1);
		_exit(0);
	}
	return 0;
}

/* An arena lives as long as somebody has it open or mapped: in what is left of the program nobody does. (Not asked of
 * /proc/meminfo: other programs have shared memory, too.)
 * Bites on: arena_close() in replace_view(); in_child() closes the pager's own descriptors. */
START_TEST(test_daemon_keeps_no_arena)
{
	char byte = 99;

	variant_of_parent = _i;
	tfile_make(&F, "daemon", 16 * extent() + 5000, 210);
	ck_assert_int_eq(pipe(report), 0);
	ck_assert_int_eq(in_child(parent_that_ends, NULL), 0);
	(void)close(report[1]);
	ck_assert_int_eq(read(report[0], &byte, 1), 1);
	ck_assert_int_eq(byte, 0);
}
END_TEST

/* ------------------------------------------------------------------ overcommit_memory=2 */

#define OVERCOMMIT "/proc/sys/vm/overcommit_memory"
static char overcommit_before[8];

/* Where it is 2 already nothing is changed: another program may be about to put it back. */
static int set_overcommit(const char *text)
{
	cleanup_close int fd = overcommit_before[0] == '2' ? -1 : open(OVERCOMMIT, O_WRONLY | O_CLOEXEC);

	if (overcommit_before[0] == '2')
		return 0;
	return fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) ? 0 : -1;
}

/* Unchecked fixture: the parent of the forked test restores it whatever happens to the test. */
static void overcommit_restore(void)
{
	(void)set_overcommit(overcommit_before);
}

/* Puts it back when this process has gone, also if the whole group is killed. */
static void overcommit_guard(void)
{
	int fd[2];
	char byte;
	pid_t pid;

	ck_assert_int_eq(pipe(fd), 0);
	pid = fork();
	ck_assert_int_ge(pid, 0);
	if (pid == 0) {
		(void)setsid();
		(void)close(fd[1]);
		(void)!read(fd[0], &byte, 1);
		overcommit_restore();
		_exit(0);
	}
	(void)close(fd[0]); /* fd[1] stays open as long as we live */
}

static int strict_child(void *arg)
{
	uint64_t tail = *(uint64_t *)arg;
	struct pager *p;
	struct source *s;
	struct view *v;
	struct wd_err err = { "" };
	struct tfile f = { .size = tail + 64 * KiB, .seed = F.seed };
	struct fault_reason why;
	struct caught c;
	unsigned char *at, byte = 0;
	int fd[2];

	limit_child(20);
	catch_signals();
	if (pager_try(V_MMAP, 0, &p, &err) < 0 || view_try(p, &F, 0, &s, &v, &err) < 0) {
		fprintf(stderr, "%s\n", err.text);
		return 2;
	}
	at = view_base(v) + tail;
	if (wrong_words(at, &f, tail, 64 * KiB, 8))
		return 3;
	view_forbid(v, "stage");
	if (touch(at, NULL, &c) || !pager_fault_reason(at, &why) || why.code != FAULT_FORBIDDEN)
		return 4;
	view_allow(v);
	/* A system call first: a touch would be put right by the handler, as if it were a first write. */
	if (pipe(fd) < 0 || write(fd[1], at, 4096) != 4096)
		return 7;
	if (!touch(at, &byte, &c) || wrong_words(at, &f, tail, 64 * KiB, 8))
		return 5;
	/* And the first write makes a part of it writable, as ever. */
	byte = (unsigned char)(byte ^ 0xFF);
	if (!touch_write(at, byte, &c) || *(volatile unsigned char *)at != byte)
		return 6;
	view_unref(v);
	source_unref(s);
	pager_unref(p);
	return 0;
}

/* A view larger than what may be committed is mapped read-only.
 * Bites on: view_allow() gives back the protection that the view had (PROT_WRITE was refused, so it stayed PROT_NONE). */
START_TEST(test_forbid_and_allow_without_overcommit)
{
	uint64_t limit = proc_kib("/proc/meminfo", "CommitLimit:"), tail;
	int r;

	ck_assert_uint_ne(limit, UINT64_MAX);
	tail = MAX(200 * GiB, round_up(2 * limit * KiB, MiB));
	F = (struct tfile){ .size = tail + 64 * KiB, .seed = 211 };
	(void)snprintf(F.path, sizeof(F.path), "%s", test_path("sparse"));
	ck_assert_int_eq(tfile_write(F.path, tail, 64 * KiB, F.seed), 0);
	overcommit_guard();
	ck_assert_int_eq(set_overcommit("2"), 0);
	r = in_child(strict_child, &tail);
	ck_assert_int_eq(set_overcommit(overcommit_before), 0);
	(void)unlink(F.path);
	ck_assert_int_eq(r, 0);
}
END_TEST

static bool overcommit_can_be_set(void)
{
	cleanup_fclose FILE *f = fopen(OVERCOMMIT, "re");

	return f && fgets(overcommit_before, 2, f) && set_overcommit(overcommit_before) == 0;
}

int main(void)
{
	Suite *s = suite_create("regressions");
	const unsigned int with_event = 1u << V_TMPFS | 1u << V_MEMFD;
	struct pager_caps caps;
	TCase *tc;

	pager_caps_probe(&caps, NULL);
	tc = new_case(s, "raw", 30);
	if (caps.event_fork < 0) {
		skip("raw clones", "fork events need CAP_SYS_PTRACE: %s", strerror(-caps.event_fork));
	} else {
		add_variants(tc, test_childs_fault_survives_a_drop, with_event);
		if (can_trace())
			add_variants(tc, test_fork_between_arming_and_probing, with_event);
		else
			skip("test_fork_between_arming_and_probing", "ptrace is refused: %s", strerror(errno));
	}

	tc = new_case(s, "victims", 20);
	if (can_lock())
		add_variants(tc, test_touch_goes_on_with_locked_weights, EMBEDDED);
	else
		skip("test_touch_goes_on_with_locked_weights", "mlock2 is refused: %s", strerror(errno));
	add_variants(tc, test_touch_goes_on_with_victims_mapped_over, EMBEDDED);
	add_variants(tc, test_touch_goes_on_with_unneeded_victims_mapped_over, EMBEDDED);

	tc = new_case(s, "held", 30);
	add_variants(tc, test_view_closed_while_evictions_run, EMBEDDED);
	add_variants(tc, test_two_populates_share_the_budget, EMBEDDED);

	tc = new_case(s, "children", 30);
	add_variants(tc, test_child_of_a_forbidden_view, PAGED);
	add_variants(tc, test_child_leaves_the_budget_alone, PAGED);
	add_variants(tc, test_daemon_keeps_no_arena, PAGED);

	tc = new_case(s, "overcommit", 30);
	if (SANITIZED) {
		skip("test_forbid_and_allow_without_overcommit", "a sanitizer needs overcommitted memory");
	} else if (!overcommit_can_be_set()) {
		skip("test_forbid_and_allow_without_overcommit", "vm.overcommit_memory cannot be set here");
	} else {
		tcase_add_unchecked_fixture(tc, NULL, overcommit_restore);
		add_variants(tc, test_forbid_and_allow_without_overcommit, 1u << V_MMAP);
	}
	return run_suite(s);
}
