/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Races and other hazards of serving several processes: one test for each way in which the obvious implementation loses
 * a wake or a write, shows zeros, or lets one client hold up the others. Each says what it bites on. Where a moment
 * has to be met, the daemon is a fork of the test with hooks (ufd/hooks.h), or one thread of it is stopped.
 */
#include "tests/serve_util.h"

#include <dirent.h>
#include <fcntl.h>
#include <liburing.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include "ufd/uffd.h"

static struct daemon D;
static struct peer P[16];
static struct use U;

static void stop(void)
{
	daemon_stop(&D);
}

static uint64_t slack(void)
{
	return 4 * extent();
}

/* shared_words() */
enum { W_STOP, W_GO, W_HOLD, W_HELD, W_MARK, W_OPENINGS, W_ARMED, W_PUNCHING, W_LONGEST, W_COUNT };
#define word(i) (shared_words()[i])

static void until_word(unsigned int i, uint64_t at_least)
{
	uint64_t end = now_ms() + 20000;

	while (word(i) < at_least && now_ms() < end)
		(void)usleep(200);
	ck_assert_msg(word(i) >= at_least, "an event did not come within 20 s");
}

static void count_opening(void)
{
	word(W_OPENINGS)++;
}

static void count_arming(void)
{
	word(W_ARMED)++;
}

static void hook_counts_up(void)
{
	pager_hooks.before_open = count_opening;
	pager_hooks.after_arm = count_arming;
}

static const struct wd_tensor *tensor_of(const struct use *u, size_t i)
{
	return wd_model_tensor_at(my_models[u->slot], i);
}

/* ------------------------------------------------------------------ A: lost wakes */

static pthread_barrier_t lw_barrier;
static _Atomic unsigned int lw_passed;
static const struct wd_tensor *_Atomic lw_tensor;
static _Atomic bool lw_stop;
static _Atomic uint64_t lw_wrong;
static uint64_t lw_seed;

static bool right_at(const struct wd_tensor *t, uint64_t off, uint64_t seed)
{
	return data_check((const char *)t->data + off, 8, seed, t->file_offset + off) < 0;
}

/* Touches what the main thread is touching, just when it is about to be opened. */
static void *lw_follower(void *arg)
{
	uint64_t random = 77;

	for (;;) {
		uint64_t off = rnd(&random) % 400 * 4096, spins = rnd(&random) % 1000;
		uint64_t before;

		(void)pthread_barrier_wait(&lw_barrier);
		if (lw_stop)
			return arg;
		before = word(W_OPENINGS);
		(void)pthread_barrier_wait(&lw_barrier);
		for (unsigned int n = 0; word(W_OPENINGS) == before && n < 5000000; n++)
			;
		for (volatile uint64_t n = spins; n > 0; n--)
			;
		lw_wrong += !right_at(lw_tensor, off, lw_seed);
		lw_passed++;
	}
}

static int64_t do_lost_wakes(const void *arg)
{
	const struct use *u = arg;
	uint64_t end = now_ms() + u->value;
	int64_t rounds = 0;
	pthread_t t;

	lw_seed = u->seed;
	if (pthread_barrier_init(&lw_barrier, NULL, 2) != 0 || pthread_create(&t, NULL, lw_follower, NULL) != 0)
		return -1;
	while (now_ms() < end) {
		if (do_release(u) < 0)
			return -1;
		for (size_t i = 0; i < wd_model_nr_tensors(my_models[u->slot]); i++, rounds++) {
			uint64_t late = now_ms() + 10000;

			lw_tensor = tensor_of(u, i);
			lw_passed = 0;
			(void)pthread_barrier_wait(&lw_barrier);
			(void)pthread_barrier_wait(&lw_barrier);
			lw_wrong += !right_at(lw_tensor, 0, u->seed);
			while (!lw_passed && now_ms() < late)
				(void)sched_yield();
			if (!lw_passed)
				return peer_say("round %lld: a touch sleeps for ever", (long long)rounds);
		}
	}
	lw_stop = true;
	(void)pthread_barrier_wait(&lw_barrier);
	(void)pthread_join(t, NULL);
	return lw_wrong ? peer_say("%llu wrong", (unsigned long long)lw_wrong) : rounds;
}

/* Bites on: the WAKE after UNREGISTER (uffd_open_range()): a thread that queues itself between the wake inside of
 * UNREGISTER and the lock of the VMA sleeps for ever. */
START_TEST(test_no_wake_is_lost)
{
	int64_t n;

	daemon_start(&D, "", hook_counts_up);
	U = new_model("wakes.safetensors", 8, extent(), 1, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &U);
	U.value = soak_ms(2000);
	peer_begin(&P[0], "waits for wakes", do_lost_wakes, &U, sizeof(U));
	while (!peer_has_ended(&P[0]) && soak_ms(0))
		(void)usleep(100000);
	n = peer_end(&P[0]);
	ck_assert_msg(n > 0, "%lld: %s", (long long)n, P[0].text);
	peer_leave(&P[0]);
}
END_TEST

/* ------------------------------------------------------------------ B: fork against take-back */

/* A thread of the daemon by its name; 0: none. */
static pid_t daemon_thread(const char *name)
{
	cleanup_free char *folder = data_text("/proc/%d/task", (int)D.pid);
	DIR *d = opendir(folder);
	struct dirent *e;
	pid_t tid = 0;

	while (d && !tid && (e = readdir(d))) {
		cleanup_free char *path = data_text("%s/%s/comm", folder, e->d_name);
		cleanup_fclose FILE *f = fopen(path, "re");
		char text[32] = "";

		if (f && fgets(text, sizeof(text), f) && !strncmp(text, name, strlen(name)))
			tid = atoi(e->d_name);
	}
	if (d)
		(void)closedir(d);
	return tid;
}

static void thread_stop(pid_t tid)
{
	int status;

	ck_assert_int_eq(ptrace(PTRACE_SEIZE, tid, NULL, NULL), 0);
	ck_assert_int_eq(ptrace(PTRACE_INTERRUPT, tid, NULL, NULL), 0);
	ck_assert_int_eq(waitpid(tid, &status, __WALL), tid);
}

static void thread_go(pid_t tid)
{
	ck_assert_int_eq(ptrace(PTRACE_DETACH, tid, NULL, NULL), 0);
}

static int64_t do_clone_once(const void *arg)
{
	pid_t pid = raw_clone();

	if (pid == 0)
		(void)syscall(SYS_exit_group, do_check(arg) < 0 ? 1 : 0);
	return pid < 0 ? -1 : child_result(pid);
}

static int64_t do_drop_all(const void *arg)
{
	cleanup_tool struct tool t = tool_run(getuid(), "drop --all");

	(void)arg;
	return t.code;
}

/*
 * A child has copied the open ranges, its event is unread (the thread that reads events is stopped); now a take-back
 * arms the views that it knows. If it punched, the child would read zeros as soon as it runs.
 * Bites on: the probe of the sentinels before the punch (EAGAIN: a fork is in flight).
 */
START_TEST(test_take_back_while_a_fork_is_in_flight)
{
	pid_t reader;

	daemon_start(&D, "", hook_counts_up);
	U = new_model("inflight.safetensors", 4, 2 * MiB, 2, 0);
	for (int i = 0; i < 2; i++)
		peer_new(&P[i], getuid());
	must_do(&P[0], do_open_and_check, &U);
	reader = daemon_thread("wd-pager");
	ck_assert_int_gt(reader, 0);
	for (int round = 0; round < 5; round++) {
		uint64_t armed;

		must_do(&P[0], do_check, &U); /* everything is open */
		thread_stop(reader);
		peer_begin(&P[0], "clones", do_clone_once, &U, sizeof(U));
		until_in_fork(P[0].pid);
		armed = word(W_ARMED);
		peer_begin(&P[1], "drops", do_drop_all, &U, sizeof(U));
		until_word(W_ARMED, armed + 1);
		/* (what is armed is probed next: the punch, if it came, would come now) */
		for (uint64_t end = now_ms() + 30; now_ms() < end;)
			(void)sched_yield();
		thread_go(reader);
		must_end(&P[0]);
		(void)peer_end(&P[1]); /* done, or given up */
		must_do(&P[0], do_check, &U);
	}
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ torn reads */

/* First something wrong where the bytes will be, then nothing for a while, then half of them, then all: what memory
 * looks like under a device that writes into it. */
static int64_t read_torn(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	(void)direct;
	memset(buf, 0x5A, nbytes);
	(void)usleep(1000);
	(void)hook_pread(s, buf, nbytes / 2, offset);
	(void)usleep(1000);
	return hook_pread(s, buf, nbytes, offset);
}

static void hook_torn(void)
{
	source_hook = read_torn;
}

/* Bites on: nothing is opened, mapped or trusted that is not READY. */
START_TEST(test_no_torn_read)
{
	uint64_t end;

	daemon_start(&D, "--budget 24M", hook_torn);
	U = new_model("torn.safetensors", 16, 2 * MiB + 4096, 3, 0);
	for (unsigned int i = 0; i < 6; i++) {
		peer_new(&P[i], getuid());
		if (i)
			must_do(&P[i], do_open, &U);
	}
	for (unsigned int i = 0; i < 6; i++) {
		U.value2 = i * 1000;
		peer_begin(&P[i], i ? "storms" : "drops", i ? do_storm : do_drop_storm, &U, sizeof(U));
	}
	end = now_ms() + soak_ms(3000);
	while (now_ms() < end)
		(void)usleep(20000);
	word(W_STOP) = 1;
	for (unsigned int i = 0; i < 6; i++) {
		int64_t n = peer_end(&P[i]);

		ck_assert_msg(n > 0, "client %u: %lld: %s", i, (long long)n, P[i].text);
	}
	for (unsigned int i = 0; i < 6; i++)
		peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ D: bytes that land late */

/*
 * What a device does whose driver holds the pages: they are pinned now, and written to when the daemon is long dead.
 * (By a ring that a child keeps: the memory itself is not there in it.)
 */
static void write_late(void *buf, size_t nbytes)
{
	struct iovec pinned = { buf, nbytes };
	cleanup_free unsigned char *wrong = malloc(nbytes);
	int from = memfd_create("late", MFD_CLOEXEC);
	struct io_uring ring;
	struct io_uring_cqe *cqe;
	uint64_t end = now_ms() + 60000;

	memset(wrong, 0x5A, nbytes);
	if (write(from, wrong, nbytes) != (ssize_t)nbytes || io_uring_queue_init(4, &ring, 0) < 0 ||
	    io_uring_register_buffers(&ring, &pinned, 1) < 0)
		return;
	if (fork() != 0)
		return;
	for (int fd = 3; fd < 1024; fd++) /* the daemon's sockets: with them it would seem to live */
		if (fd != from && fd != ring.ring_fd)
			(void)close(fd);
	word(W_HELD)++;
	while (!word(W_GO) && now_ms() < end)
		(void)usleep(200);
	io_uring_prep_read_fixed(io_uring_get_sqe(&ring), from, buf, (unsigned int)nbytes, 0, 0);
	if (io_uring_submit_and_wait(&ring, 1) == 1 && io_uring_wait_cqe(&ring, &cqe) == 0 && cqe->res == (int)nbytes)
		word(W_MARK)++;
	_exit(0);
}

static int64_t read_late(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	(void)direct;
	if (word(W_HOLD)) {
		write_late(buf, nbytes);
		while (word(W_HOLD))
			(void)usleep(200);
	}
	return hook_pread(s, buf, nbytes, offset);
}

static void hook_late(void)
{
	source_hook = read_late;
}

/* Bites on: whoever takes over punches what is not READY before it is filled again: then late bytes go into pages that
 * are nobody's. */
START_TEST(test_bytes_that_land_late)
{
	daemon_start(&D, "", hook_late);
	U = new_model("late.safetensors", 4, 2 * MiB, 23, 0);
	for (int i = 0; i < 2; i++)
		peer_new(&P[i], getuid());
	must_do(&P[0], do_open, &U);
	word(W_HOLD) = 1;
	peer_begin(&P[0], "checks", do_check, &U, sizeof(U));
	until_word(W_HELD, 1);
	daemon_kill(&D);
	word(W_HOLD) = 0;
	daemon_start_again(&D, "");
	must_end(&P[0]);
	word(W_GO) = 1;
	until_word(W_MARK, 1);
	must_do(&P[0], do_check, &U);
	must_do(&P[1], do_open_and_check, &U);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ E: observing against taking back */

static void hold_window(void)
{
	uint64_t end = now_ms() + 10000;

	word(W_MARK)++;
	while (!word(W_GO) && now_ms() < end)
		(void)usleep(200);
}

static int64_t do_hook_window(const void *arg)
{
	(void)arg;
	pager_hooks.in_window = hold_window;
	return 0;
}

static int64_t do_write_all(const void *arg)
{
	const struct use *u = arg;

	for (size_t i = 0; i < wd_model_nr_tensors(my_models[u->slot]); i++)
		for (uint64_t off = 4096; off < tensor_of(u, i)->nbytes; off += MiB)
			((unsigned char *)tensor_of(u, i)->data)[off] = (unsigned char)(u->value + i + off / MiB);
	return 0;
}

/* Finds what do_write_all() wrote, and puts the file's bytes back. */
static int64_t do_unwrite_all(const void *arg)
{
	const struct use *u = arg;

	for (size_t i = 0; i < wd_model_nr_tensors(my_models[u->slot]); i++)
		for (uint64_t off = 4096; off < tensor_of(u, i)->nbytes; off += MiB) {
			unsigned char *p = (unsigned char *)tensor_of(u, i)->data + off;

			if (*p != (unsigned char)(u->value + i + off / MiB))
				return peer_say("what was written into tensor %zu at %llu is lost", i,
						(unsigned long long)off);
			data_fill(p, 1, u->seed, tensor_of(u, i)->file_offset + off);
		}
	return 0;
}

/* A client clears page tables to observe a stage, and holds its window open while the daemon takes back.
 * Bites on: EBUSY of REGISTER forbids the punch. */
START_TEST(test_take_back_in_a_clients_window)
{
	struct use stage = { .path = "encode" };
	cleanup_tool struct tool t = { 0 };

	daemon_start(&D, "", NULL);
	U = new_model("window.safetensors", 4, 4 * MiB, 4, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_hook_window, &U);
	must_do(&P[0], do_open_and_check, &U);
	U.value = 3;
	must_do(&P[0], do_write_all, &U);
	must_do(&P[0], do_touch, &U); /* (a first write takes what is beside it out of the page tables) */
	peer_begin(&P[0], "begins a stage", do_stage, &stage, sizeof(stage));
	until_word(W_MARK, 1);
	t = tool_run(getuid(), "drop %s", U.path);
	word(W_GO) = 1;
	must_end(&P[0]);
	must_do(&P[0], do_unwrite_all, &U);
	U.value = 0;
	must_do(&P[0], do_check, &U);
	peer_leave(&P[0]);
}
END_TEST

static _Atomic uint64_t lost;

static void *writes_on(void *arg)
{
	const struct use *u = arg;
	uint64_t random = (uint64_t)(uintptr_t)&random;

	/* Each page once: written before it was looked at, and found again at the end. */
	for (size_t i = 0; i < wd_model_nr_tensors(my_models[u->slot]); i++)
		for (uint64_t off = 0; off + 4096 <= tensor_of(u, i)->nbytes; off += 8192) {
			volatile unsigned char *p = (unsigned char *)tensor_of(u, i)->data + off + 1000;

			*p = 0xB7;
			lost += *p != 0xB7;
			if (rnd(&random) % 16 == 0)
				(void)usleep(100);
		}
	return arg;
}

static int64_t do_stages_and_writes(const void *arg)
{
	static struct use u;
	struct use stage = { .path = "s" };
	pthread_t t;
	int64_t n = 0;

	u = *(const struct use *)arg;
	if (pthread_create(&t, NULL, writes_on, &u) != 0)
		return -1;
	for (; pthread_tryjoin_np(t, NULL) != 0; n++)
		if (do_stage(&stage) < 0)
			return -1;
	stage.path[0] = 0;
	if (do_stage(&stage) < 0)
		return -1;
	for (size_t i = 0; i < wd_model_nr_tensors(my_models[u.slot]); i++)
		for (uint64_t off = 0; off + 4096 <= tensor_of(&u, i)->nbytes; off += 8192) {
			unsigned char *p = (unsigned char *)tensor_of(&u, i)->data + off + 1000;

			lost += *p != 0xB7;
			data_fill(p, 1, u.seed, tensor_of(&u, i)->file_offset + off + 1000);
		}
	return lost ? peer_say("%llu writes are lost", (unsigned long long)lost) : n;
}

/* Bites on: the write-protected window (I4), against a daemon that takes back at the same time. */
START_TEST(test_no_write_is_lost)
{
	daemon_start(&D, "", NULL);
	U = new_model("writes.safetensors", 12, 4 * MiB, 5, 0);
	for (int i = 0; i < 2; i++)
		peer_new(&P[i], getuid());
	must_do(&P[0], do_open, &U);
	peer_begin(&P[1], "drops", do_drop_storm, &U, sizeof(U));
	for (uint64_t end = now_ms() + soak_ms(1000), n = 0; n < 2 || now_ms() < end; n++) {
		int64_t r = peer_does(&P[0], do_stages_and_writes, &U);

		ck_assert_msg(r > 0, "%lld: %s", (long long)r, P[0].text);
		must_do(&P[0], do_check, &U);
	}
	word(W_STOP) = 1;
	ck_assert_int_gt(peer_end(&P[1]), 0);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ F: mlockall */

static int64_t do_mlockall(const void *arg)
{
	const struct use *u = arg;

	return mlockall((int)u->value) < 0 ? peer_say("mlockall: %s", strerror(errno)) : 0;
}

/* Bites on: PROT_NONE, REGISTER, and only then mprotect (mmap itself would fill the view with zeros). */
START_TEST(test_mlockall)
{
	daemon_start(&D, "", NULL);
	U = new_model("locked.safetensors", 4, 4 * MiB, 6, 0);
	for (int i = 0; i < 2; i++)
		peer_new(&P[i], getuid());
	U.value = MCL_FUTURE;
	must_do(&P[0], do_mlockall, &U);
	U.value = 0;
	must_do(&P[0], do_open, &U);
	must_do(&P[0], do_check, &U);
	must_do(&P[1], do_open_and_check, &U);
	must_tool("drop --all");
	must_do(&P[0], do_check, &U);
	U.value = MCL_CURRENT; /* of a view that is there, and empty */
	must_tool("drop --all");
	must_do(&P[1], do_mlockall, &U);
	U.value = 0;
	must_do(&P[1], do_check, &U);
	must_do(&P[0], do_check, &U);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ G: no map is left */

static int64_t do_use_up_maps(const void *arg)
{
	use_up_maps((unsigned int)((const struct use *)arg)->value);
	return 0;
}

static int64_t do_give_back_maps(const void *arg)
{
	(void)arg;
	give_back_maps();
	return 0;
}

/* Every other extent: what is open beside what is armed costs a map each. */
static int64_t do_touch_every_other(const void *arg)
{
	const struct use *u = arg;

	for (size_t i = u->value; i < wd_model_nr_tensors(my_models[u->slot]); i += 2)
		if (!right_at(tensor_of(u, i), 4096, u->seed))
			return peer_say("tensor %zu is wrong", i);
	return 0;
}

/* _i: so many maps are left. Bites on: ENOMEM of UNREGISTER (the waiters would fault again for ever: CONTINUE), and of
 * REGISTER in the middle of what is open (not the death of the client: the view is armed as a whole, or no punch). */
START_TEST(test_vm_max_map_count)
{
	daemon_start(&D, "", NULL);
	U = new_model("maps.safetensors", 24, 2 * extent(), 7, 0);
	for (int i = 0; i < 3; i++)
		peer_new(&P[i], getuid());
	must_do(&P[0], do_open, &U);
	must_do(&P[1], do_open, &U);
	must_do(&P[0], do_check, &U); /* all of it is open */
	U.value = (uint64_t)_i;
	must_do(&P[0], do_use_up_maps, &U);
	U.value = 0;
	for (int i = 0; i < 6; i++) { /* a few of the oldest: a border each */
		must_tool("drop --all --bytes=%llu", (unsigned long long)extent());
		must_do(&P[0], do_check, &U);
	}
	for (uint64_t pass = 0; pass < 4; pass++) {
		cleanup_tool struct tool t = { 0 };

		U.value = pass % 2;
		must_do(&P[0], do_touch_every_other, &U);
		must_do(&P[1], do_touch_every_other, &U);
		t = tool_run(getuid(), "drop --all");
		U.value = 0;
		must_do(&P[1], do_check, &U);
		must_do(&P[0], do_touch_every_other, &U);
	}
	peer_begin(&P[2], "drops", do_drop_storm, &U, sizeof(U));
	U.value = 3000;
	must_do(&P[0], do_random, &U);
	word(W_STOP) = 1;
	ck_assert_int_gt(peer_end(&P[2]), 0);
	U.value = 0;
	must_do(&P[0], do_check, &U);
	must_do(&P[0], do_give_back_maps, &U);
	must_do(&P[0], do_check, &U);
	for (int i = 0; i < 3; i++)
		peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ H, I8: who may wait for whom */

static _Atomic bool locker_stop;

/* As allocators of tensors do, only larger: each call holds this process's mmap_lock for long. */
static void *locks_on(void *arg)
{
	const size_t nbytes = GiB;

	while (!locker_stop && !word(W_STOP)) {
		uint64_t begin;
		void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (p == MAP_FAILED)
			break;
		(void)madvise(p, nbytes, MADV_NOHUGEPAGE);
		begin = now_ms();
		(void)mlock(p, nbytes);
		(void)munmap(p, nbytes);
		word(W_LONGEST) = MAX(word(W_LONGEST), now_ms() - begin);
		word(W_COUNT)++;
	}
	return arg;
}

static int64_t do_lock_and_storm(const void *arg)
{
	pthread_t t;
	int64_t n;

	if (pthread_create(&t, NULL, locks_on, NULL) != 0)
		return -1;
	n = do_storm(arg);
	(void)pthread_join(t, NULL);
	return n;
}

/* Reads again what it has dropped; returns the longest time that one touch took (ms). */
static int64_t do_measure(const void *arg)
{
	const struct use *u = arg;
	uint64_t longest = 0, n = 0;

	while (!word(W_STOP)) {
		if (do_release(u) < 0)
			return -1;
		for (size_t i = 0; i < wd_model_nr_tensors(my_models[u->slot]) && !word(W_STOP); i++, n++) {
			uint64_t begin = now_ms();

			if (!right_at(tensor_of(u, i), 8192, u->seed))
				return peer_say("tensor %zu is wrong", i);
			longest = MAX(longest, now_ms() - begin);
		}
	}
	return n ? (int64_t)longest : peer_say("nothing was read");
}

/*
 * One client keeps its address space locked for long and touches weights meanwhile; the other one's touches wait for
 * nothing of that.
 * Bites on: one worker for each address space; no lock held across REGISTER and UNREGISTER; the reader does neither.
 */
START_TEST(test_a_slow_client_delays_nobody_else)
{
	struct use other;
	int64_t longest = 0;

	daemon_start(&D, "", NULL);
	U = new_model("slow.safetensors", 16, 2 * MiB, 8, 0);
	other = new_model("quick.safetensors", 16, 2 * MiB, 9, 0);
	for (int attempt = 0; attempt < 4; attempt++) { /* others use this machine too: one good measure is enough */
		word(W_STOP) = word(W_LONGEST) = word(W_COUNT) = 0;
		for (int i = 0; i < 3; i++)
			peer_new(&P[i], getuid());
		must_do(&P[0], do_open, &U);
		must_do(&P[1], do_open, &other);
		peer_begin(&P[0], "locks", do_lock_and_storm, &U, sizeof(U));
		peer_begin(&P[2], "drops", do_drop_storm, &U, sizeof(U));
		peer_begin(&P[1], "measures", do_measure, &other, sizeof(other));
		until_word(W_COUNT, 4);
		word(W_STOP) = 1;
		longest = peer_end(&P[1]);
		ck_assert_msg(longest >= 0, "%s", P[1].text);
		ck_assert_int_gt(peer_end(&P[0]), 0);
		ck_assert_int_gt(peer_end(&P[2]), 0);
		must_do(&P[0], do_check, &U);
		for (int i = 0; i < 3; i++)
			peer_leave(&P[i]);
		if ((uint64_t)longest * 3 < word(W_LONGEST))
			break;
	}
	ck_assert_msg((uint64_t)longest * 3 < word(W_LONGEST),
		      "a touch took %lld ms; the other client was busy for %llu", (long long)longest,
		      (unsigned long long)word(W_LONGEST));
}
END_TEST

/* A client that is stopped, and so reads no socket and touches nothing: others are served, it is taken from, and goes
 * on. */
START_TEST(test_a_stopped_client)
{
	struct use u[3];

	daemon_start(&D, "--budget 40M", NULL);
	for (unsigned int i = 0; i < 3; i++) {
		cleanup_free char *name = data_text("stopped%u.safetensors", i);

		u[i] = new_model(name, 8, 3 * MiB, 10 + i, i);
	}
	for (int i = 0; i < 2; i++)
		peer_new(&P[i], getuid());
	must_do(&P[0], do_open_and_check, &u[0]);
	for (int i = 0; i < 3; i++)
		must_do(&P[1], do_open, &u[i]);
	ck_assert_int_eq(kill(P[0].pid, SIGSTOP), 0);
	for (int round = 0; round < 6; round++)
		must_do(&P[1], do_check, &u[round % 3]);
	must_drop_all(false);
	ck_assert_int_eq(kill(P[0].pid, SIGCONT), 0);
	must_do(&P[0], do_check, &u[0]);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* Reads of one file do not come back, as from a file server that is gone. */
static int64_t read_or_hang(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	(void)direct;
	if (strstr(s->path, "hangs")) {
		word(W_HELD)++;
		while (word(W_HOLD))
			(void)usleep(1000);
	}
	return hook_pread(s, buf, nbytes, offset);
}

static void hook_hang(void)
{
	source_hook = read_or_hang;
}

/* More readers than places for reads. Bites on: a file's reads wait in a thread of its own. */
START_TEST(test_a_file_that_does_not_answer_delays_nobody_else)
{
	struct use hangs, other;
	unsigned int i;

	daemon_start(&D, "", hook_hang);
	hangs = new_model("hangs.safetensors", 40, extent(), 14, 0);
	other = new_model("answers.safetensors", 8, 3 * MiB, 15, 1);
	for (i = 0; i < 12; i++) {
		peer_new(&P[i], getuid());
		must_do(&P[i], do_open, &hangs);
	}
	word(W_HOLD) = 1;
	for (i = 0; i < 10; i++) {
		hangs.value = i * 4;
		peer_begin(&P[i], "waits", do_check, &hangs, sizeof(hangs));
	}
	until_word(W_HELD, 1);
	must_do(&P[10], do_open_and_check, &other);
	must_do(&P[11], do_open_and_check, &other);
	must_do(&P[11], do_release, &other);
	must_do(&P[11], do_check, &other);
	peer_kill(&P[9]); /* in the middle of it */
	peer_leave(&P[11]);
	peer_new(&P[11], getuid());
	must_do(&P[11], do_open_and_check, &other);
	word(W_HOLD) = 0;
	for (i = 0; i < 9; i++)
		must_end(&P[i]);
	hangs.value = 0;
	must_do(&P[10], do_check, &hangs);
	for (i = 0; i < 12; i++)
		if (i != 9)
			peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ I: no descriptor is left */

static uint64_t cpu_ms_of(pid_t pid)
{
	cleanup_free char *path = data_text("/proc/%d/stat", (int)pid);
	cleanup_fclose FILE *f = fopen(path, "re");
	unsigned long user, sys;
	char text[1024];

	ck_assert_ptr_nonnull(f);
	ck_assert_ptr_nonnull(fgets(text, sizeof(text), f));
	ck_assert_int_eq(
		sscanf(strrchr(text, ')') + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &sys), 2);
	return (user + sys) * 1000 / (uint64_t)sysconf(_SC_CLK_TCK);
}

/* Bites on: the reserve descriptor (a fork waits until its event is read, and reading it takes one); children that are
 * gone give theirs back. */
START_TEST(test_forks_when_no_descriptor_is_left)
{
	struct held before, after;
	uint64_t cpu, begin;
	struct rlimit limit, old;

	daemon_start(&D, "", NULL);
	U = new_model("descriptors.safetensors", 4, 2 * MiB, 16, 0);
	for (int i = 0; i < 2; i++)
		peer_new(&P[i], getuid());
	must_do(&P[0], do_open_and_check, &U);
	must_do(&P[1], do_open_and_check, &U);
	before = held_by(D.pid);
	ck_assert_int_eq(prlimit(D.pid, RLIMIT_NOFILE, NULL, &old), 0);
	limit = (struct rlimit){ before.fds + 2, old.rlim_max };
	ck_assert_int_eq(prlimit(D.pid, RLIMIT_NOFILE, &limit, NULL), 0);
	for (int i = 0; i < 8; i++)
		must_do(&P[0], do_fork, &U); /* (kind FORK) */
	/* all children wait now; the daemon must not look at what it cannot read again and again */
	cpu = cpu_ms_of(D.pid);
	begin = now_ms();
	while (now_ms() < begin + 400)
		(void)usleep(20000);
	cpu = cpu_ms_of(D.pid) - cpu;
	ck_assert_msg(cpu * 2 < now_ms() - begin, "the daemon spins: %llu ms", (unsigned long long)cpu);
	word(W_GO) = 1;
	must_do(&P[0], do_fork_end, &U);
	must_do(&P[1], do_check, &U);
	ck_assert_int_eq(prlimit(D.pid, RLIMIT_NOFILE, &old, NULL), 0);
	after = daemon_held_until(&D, &before);
	ck_assert_uint_le(after.fds, before.fds);
	must_do(&P[0], do_check, &U);
	must_drop_all(false);
	must_do(&P[0], do_check, &U);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* Children come and go by the hundred; nothing tells when one has gone but its address space. */
static int64_t do_many_forks(const void *arg)
{
	const struct use *u = arg;

	for (uint64_t i = 0; i < u->value; i++) {
		pid_t pid = i % 2 && !getuid() ? raw_clone() : fork();

		if (pid == 0)
			(void)syscall(SYS_exit_group, right_at(tensor_of(u, i % 4), 8192, u->seed) ? 0 : 1);
		if (pid < 0 || child_result(pid))
			return peer_say("child %llu", (unsigned long long)i);
	}
	return 0;
}

START_TEST(test_children_are_reaped)
{
	struct held before, after;

	daemon_start(&D, "", NULL);
	U = new_model("reaped.safetensors", 4, 2 * MiB, 17, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open_and_check, &U);
	U.value = 10;
	must_do(&P[0], do_many_forks, &U);
	(void)stat_until_at_most("children", 0);
	before = held_by(D.pid);
	U.value = 200;
	must_do(&P[0], do_many_forks, &U);
	ck_assert_uint_eq(stat_until_at_most("children", 0), 0);
	after = daemon_held_until(&D, &before);
	ck_assert_uint_le(after.fds, before.fds);
	ck_assert_uint_le(after.threads, before.threads);
	peer_leave(&P[0]);
}
END_TEST

/* ------------------------------------------------------------------ L: memory that is nobody's */

/* Takes all of its view out of the daemon's hands by its own descriptor of the userfaultfd, and touches holes. */
static int64_t do_unregister(const void *arg)
{
	const struct use *u = arg;
	unsigned char *base = (unsigned char *)round_down((uintptr_t)tensor_of(u, 0)->data, extent());
	unsigned int nr = 0;

	for (int fd = 0; fd < 1024; fd++) {
		char link[64], to[64];
		ssize_t n;

		(void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
		n = readlink(link, to, sizeof(to) - 1);
		to[n < 0 ? 0 : n] = 0;
		if (strcmp(to, "anon_inode:[userfaultfd]") != 0)
			continue;
		nr += uffd_open_range(fd, base, u->value) == 0;
	}
	if (!nr)
		return peer_say("no userfaultfd");
	for (uint64_t off = 0; off < u->value; off += 4096)
		(void)*(volatile unsigned char *)(base + off);
	return 0;
}

/* Bites on: the table decides, not the page cache; the sweep of blocks that the table knows nothing of. */
START_TEST(test_client_that_unregisters_its_view)
{
	uint64_t end, held;

	daemon_start(&D, "", NULL);
	U = new_model("foreign.safetensors", 8, 4 * MiB, 18, 0);
	for (int i = 0; i < 2; i++) {
		peer_new(&P[i], getuid());
		must_do(&P[i], do_open, &U);
	}
	U.value = 16 * MiB; /* half of the model */
	must_do(&P[0], do_unregister, &U);
	U.value = 0;
	must_do(&P[1], do_check, &U);
	must_tool("drop --all");
	U.value = 16 * MiB;
	must_do(&P[0], do_unregister, &U);
	/* the zeros it has made are taken back */
	end = now_ms() + 30000;
	while ((held = held_by(D.pid).arena_bytes) > must_stat("resident_bytes") + slack() && now_ms() < end)
		(void)usleep(20000);
	ck_assert_uint_le(held, must_stat("resident_bytes") + slack());
	U.value = 0;
	must_do(&P[1], do_check, &U);
	peer_leave(&P[0]);
	must_do(&P[1], do_check, &U);
	peer_leave(&P[1]);
}
END_TEST

/* One model alone is larger than the budget. */
START_TEST(test_model_larger_than_the_budget)
{
	uint64_t most = 0;

	daemon_start(&D, "--budget 16M", NULL);
	U = new_model("large.safetensors", 12, 4 * MiB, 19, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &U);
	for (int round = 0; round < 3; round++) {
		peer_begin(&P[0], "checks", do_check, &U, sizeof(U));
		while (!peer_has_ended(&P[0])) {
			most = MAX(most, held_by(D.pid).arena_bytes);
			(void)usleep(1000);
		}
		must_end(&P[0]);
	}
	ck_assert_uint_le(most, 16 * MiB + slack());
	peer_leave(&P[0]);
}
END_TEST

/* ------------------------------------------------------------------ M: touches that fail */

static int64_t read_or_fail(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	(void)direct;
	return word(W_HOLD) ? -EIO : hook_pread(s, buf, nbytes, offset);
}

static void hook_fail(void)
{
	source_hook = read_or_fail;
}

/* The touch fails by SIGBUS, a system call by EFAULT, and the reason has this word. */
static int64_t do_touch_fails(const void *arg)
{
	const struct use *u = arg;
	const struct wd_tensor *t = tensor_of(u, (size_t)u->value);
	cleanup_close int sink = memfd_create("sink", MFD_CLOEXEC);
	const char *why;
	struct caught c;

	catch_signals();
	if (touch((char *)t->data + 4096, NULL, &c))
		return peer_say("the touch works");
	if (c.sig != SIGBUS)
		return peer_say("signal %d", c.sig);
	why = wd_fault_reason((char *)t->data + 4096);
	if (!why || !strstr(why, u->path))
		return peer_say("the reason is: %s", why ? why : "none");
	if (write(sink, (char *)t->data + 8192, 100) >= 0 || errno != EFAULT)
		return peer_say("a system call on it: %s", strerror(errno));
	return 0;
}

START_TEST(test_reads_that_fail)
{
	struct use fails;

	daemon_start(&D, "", hook_fail);
	fails = U = new_model("fails.safetensors", 4, 2 * MiB, 20, 0);
	(void)snprintf(fails.path, sizeof(fails.path), "Input/output error");
	fails.value = 1;
	for (int i = 0; i < 3; i++) {
		peer_new(&P[i], getuid());
		must_do(&P[i], do_open, &U);
	}
	word(W_HOLD) = 1;
	must_do(&P[0], do_touch_fails, &fails);
	must_do(&P[1], do_touch_fails, &fails);
	word(W_HOLD) = 0;
	must_do(&P[2], do_populate, &U); /* one that has not met it */
	must_do(&P[2], do_check, &U);
	must_do(&P[0], do_populate, &U);
	must_do(&P[0], do_check, &U);
	must_do(&P[1], do_populate, &U);
	must_do(&P[1], do_check, &U);
	for (int i = 0; i < 3; i++)
		peer_leave(&P[i]);
}
END_TEST

START_TEST(test_file_that_shrinks)
{
	struct use fails;

	daemon_start(&D, "", NULL);
	fails = U = new_model("shrinks.safetensors", 4, 4 * MiB, 21, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &U);
	ck_assert_int_eq(truncate(U.path, (off_t)(5 * MiB)), 0);
	(void)snprintf(fails.path, sizeof(fails.path), "shrinks.safetensors");
	fails.value = 3;
	must_do(&P[0], do_touch_fails, &fails);
	ck_assert_uint_gt(daemon_answers(&D), 0);
	peer_leave(&P[0]);
}
END_TEST

static int64_t do_plan(const void *arg)
{
	const struct use *u = arg;
	struct wd_plan *p;
	int r;

	(void)u;
	if (wd_plan_new(&p) < 0)
		return -1;
	r = wd_plan_add(p, "uses", "strict") < 0 || wd_plan_add(p, "not", NULL) < 0 || wd_set_plan(my_wd, p) < 0;
	wd_plan_free(p);
	return r ? peer_say("%s", wd_error()) : 0;
}

/* Strict mode is one client's own. */
START_TEST(test_strict_mode)
{
	struct use stage = { .path = "not" }, fails;

	daemon_start(&D, "", NULL);
	fails = U = new_model("strict.safetensors", 4, 2 * MiB, 22, 0);
	for (int i = 0; i < 2; i++) {
		peer_new(&P[i], getuid());
		U.flags = i ? 0 : WD_STRICT;
		must_do(&P[i], do_open, &U);
	}
	must_do(&P[0], do_plan, &U);
	must_do(&P[0], do_stage, &stage);
	(void)snprintf(fails.path, sizeof(fails.path), "not");
	must_do(&P[0], do_touch_fails, &fails);
	must_do(&P[1], do_check, &U);
	must_do(&P[0], do_touch_fails, &fails);
	(void)snprintf(stage.path, sizeof(stage.path), "uses");
	must_do(&P[0], do_stage, &stage);
	must_do(&P[0], do_check, &U);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ N: ends of files */

static int64_t do_open_raw(const void *arg)
{
	const struct use *u = arg;

	if (do_connect(u) < 0)
		return -1;
	return wd_model_open_raw(my_wd, u->path, u->value, 0, NULL, &my_models[u->slot]) < 0 ?
		       peer_say("%s", wd_error()) :
		       0;
}

/* Sizes beside pages, blocks and extents; beginnings as well. */
START_TEST(test_odd_sizes)
{
	const uint64_t sizes[] = { 1, 511, 512, 4095, 4097, extent() - 1, extent(), extent() + 1, 2 * extent() + 513 };

	daemon_start(&D, "", NULL);
	peer_new(&P[0], getuid());
	for (size_t i = 0; i < ARRAY_SIZE(sizes); i++)
		for (uint64_t from = 0; from < MIN(sizes[i], (uint64_t)68); from += 67) {
			U = (struct use){ .seed = 30 + i, .value = from };
			(void)snprintf(U.path, sizeof(U.path), "%s/odd-%zu-%llu", test_dir, i,
				       (unsigned long long)from);
			data_write_seed(U.path, sizes[i], U.seed);
			must_do(&P[0], do_open_raw, &U);
			U.value = 0;
			must_do(&P[0], do_check, &U);
			must_do(&P[0], do_release, &U);
			must_do(&P[0], do_check, &U);
			must_do(&P[0], do_close, &U);
		}
	peer_leave(&P[0]);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("serve_races");
	double soak = (double)soak_ms(0) / 1000;
	bool root = getuid() == 0;
	TCase *tc = folder_case(s, "races", 150);

	tcase_add_checked_fixture(tc, NULL, stop);
	if (root)
		tcase_add_test(tc, test_take_back_while_a_fork_is_in_flight);
	else
		skip("serve_races: raw clone(2)", "only a daemon of root's is told of it");
	tcase_add_test(tc, test_bytes_that_land_late);
	tcase_add_test(tc, test_take_back_in_a_clients_window);
	if (root)
		tcase_add_test(tc, test_mlockall);
	else
		skip("serve_races: mlockall", "only root may lock so much");
	tcase_add_loop_test(tc, test_vm_max_map_count, 0, 1);
	tcase_add_loop_test(tc, test_vm_max_map_count, 8, 9);
	if (SANITIZED)
		skip("serve_races: a slow client", "sanitizers make mlock(2) do nothing");
	else
		add_full(tc, test_a_slow_client_delays_nobody_else, 0, 1);
	add_full(tc, test_a_stopped_client, 0, 1);
	tcase_add_test(tc, test_a_file_that_does_not_answer_delays_nobody_else);
	add_full(tc, test_forks_when_no_descriptor_is_left, 0, 1);
	tcase_add_test(tc, test_children_are_reaped);
	tcase_add_test(tc, test_client_that_unregisters_its_view);
	add_full(tc, test_model_larger_than_the_budget, 0, 1);
	tcase_add_test(tc, test_reads_that_fail);
	tcase_add_test(tc, test_file_that_shrinks);
	tcase_add_test(tc, test_strict_mode);
	tcase_add_test(tc, test_odd_sizes);

	tc = folder_case(s, "wakes", 100 + soak);
	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_test(tc, test_no_wake_is_lost);
	tc = folder_case(s, "torn", 100 + soak);
	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_test(tc, test_no_torn_read);
	tc = folder_case(s, "writes", 100 + soak);
	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_test(tc, test_no_write_is_lost);
	return run_suite(s);
}
