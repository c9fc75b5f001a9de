/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The races that the pager is built around. Each test names the guard that it bites on: with that line taken out,
 * the test fails (a wrong byte, a lost write) or hangs into its time limit (a lost wake).
 */
#include "tests/pager_util.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/time.h>

static struct rig R;
static struct tfile F;
static _Atomic bool stop;
static _Atomic uint64_t nr_wrong, nr_reads, nr_writes;

/* A thread that touches one place, for hooks: what it read, and whether it is through. */
struct toucher {
	pthread_t thread;
	const unsigned char *p;
	uint64_t word;
	pid_t tid;
	_Atomic bool started, done;
	int write; /* a byte to write, or -1: read a word */
};

static void *touch_one(void *arg)
{
	struct toucher *t = arg;

	t->tid = gettid();
	t->started = true;
	if (t->write >= 0)
		*(volatile unsigned char *)t->p = (unsigned char)t->write;
	else
		t->word = *(const volatile uint64_t *)t->p;
	t->done = true;
	return NULL;
}

static void toucher_start(struct toucher *t, uint64_t off, int write_byte)
{
	*t = (struct toucher){ .p = R.base + off, .write = write_byte };
	ck_assert_int_eq(pthread_create(&t->thread, NULL, touch_one, t), 0);
}

/* For hooks: no check inside. */
static void toucher_wait_asleep(struct toucher *t)
{
	while (!t->started)
		(void)usleep(50);
	until_asleep(t->tid, &t->done);
}

/* Within 10 s, or the test fails. */
static void toucher_must_end(struct toucher *t)
{
	uint64_t end = now_ms() + 10000;

	while (!t->done && now_ms() < end)
		(void)usleep(200);
	ck_assert_msg(t->done, "a touch did not get through within 10 s");
	ck_assert_int_eq(pthread_join(t->thread, NULL), 0);
	if (t->write < 0)
		ck_assert_uint_eq(t->word, file_word(F.seed, (uint64_t)(t->p - R.base)));
}

/* ------------------------------------------------------------------ A: lost wakes */

#define LW_EXTENTS 8

static pthread_barrier_t lw_barrier;
static _Atomic unsigned int lw_opening, lw_passed;
static _Atomic uint64_t lw_extent;

static void lw_before_open(void)
{
	lw_opening++;
}

/* Touches the extent that the main thread is touching, just when it is about to be opened. It spins: one follower only,
 * so that on two CPUs one is left for the pager. */
static void *lw_follower(void *arg)
{
	uint64_t seed = 77;

	(void)arg;
	for (;;) {
		uint64_t off = rnd(&seed) % 500 * 4096, spins = rnd(&seed) % 1000;
		unsigned int before;

		(void)pthread_barrier_wait(&lw_barrier);
		if (stop)
			return NULL;
		off += lw_extent * extent();
		before = lw_opening;
		(void)pthread_barrier_wait(&lw_barrier);
		for (unsigned int n = 0; lw_opening == before && n < 5000000; n++)
			;
		for (volatile uint64_t n = spins; n > 0; n--)
			;
		if (*(volatile uint64_t *)(R.base + off) != file_word(F.seed, off))
			nr_wrong++;
		lw_passed++;
	}
}

/* Bites on: uffd_open_range(), the WAKE after UNREGISTER (a thread that queues itself between the wake inside of
 * UNREGISTER and the lock of the VMA sleeps for ever). */
START_TEST(test_no_wake_is_lost)
{
	pthread_t t;
	uint64_t rounds = 0;

	pager_hooks.before_open = lw_before_open;
	tfile_make(&F, "wakes", LW_EXTENTS * extent(), 1);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	ck_assert_int_eq(pthread_barrier_init(&lw_barrier, NULL, 2), 0);
	ck_assert_int_eq(pthread_create(&t, NULL, lw_follower, NULL), 0);
	for (uint64_t end = now_ms() + soak_ms(1500); now_ms() < end;) {
		rig_drop(&R);
		for (uint64_t i = 0; i < LW_EXTENTS; i++, rounds++) {
			uint64_t late = now_ms() + 10000;

			lw_extent = i;
			lw_passed = 0;
			(void)pthread_barrier_wait(&lw_barrier);
			(void)pthread_barrier_wait(&lw_barrier);
			if (*(volatile uint64_t *)(R.base + i * extent()) != file_word(F.seed, i * extent()))
				nr_wrong++;
			while (!lw_passed && now_ms() < late)
				(void)sched_yield();
			ck_assert_msg(lw_passed, "round %llu: a touch sleeps for ever", (unsigned long long)rounds);
		}
	}
	stop = true;
	(void)pthread_barrier_wait(&lw_barrier);
	(void)pthread_join(t, NULL);
	ck_assert_uint_eq(nr_wrong, 0);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ H, I8: who may wait for whom */

static sem_t reached, go;
static _Atomic bool hold;

static void hold_once(void)
{
	if (!atomic_exchange(&hold, false))
		return;
	(void)sem_post(&reached);
	while (sem_wait(&go) < 0)
		;
}

/* The worker is kept from its UNREGISTER, as if the client held its mmap_lock: touches of what is READY but armed
 * get through all the same, of several extents and views.
 * Bites on: the CONTINUE of a waiting page when its opening is slow (pager, reader thread). */
START_TEST(test_touch_does_not_wait_for_a_slow_open)
{
	struct toucher t[4];
	struct tfile fb;
	struct rig b;
	uint64_t e = extent();

	(void)sem_init(&reached, 0, 0);
	(void)sem_init(&go, 0, 0);
	pager_hooks.before_open = hold_once;
	tfile_make(&F, "slow", 4 * e, 2);
	tfile_make(&fb, "slow-b", 2 * e, 3);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	rig_add(&b, R.pager, &fb, 0);
	hold = true;
	toucher_start(&t[0], 8, -1);
	must_wait(&reached);
	toucher_must_end(&t[0]);
	toucher_start(&t[1], e - 8, -1);   /* another page of the same extent */
	toucher_start(&t[2], 3 * e, -1);   /* another extent of the same view: read, then let through */
	toucher_start(&t[3], 4096 + 5, 9); /* a write */
	for (int i = 1; i < 4; i++)
		toucher_must_end(&t[i]);
	ck_assert_uint_eq(wrong_words(b.base, &fb, 0, fb.size, 131072), 0); /* another view, page by page */
	(void)sem_post(&go);
	ck_assert_uint_eq(R.base[4096 + 5], 9);
	R.base[4096 + 5] = (unsigned char)(file_word(F.seed, 4096) >> 40);
	rig_check(&R);
	rig_drop(&R);
	rig_check(&R);
	rig_close(&b);
	rig_close(&R);
}
END_TEST

/* A take-back is asked for while an opening is under way: it must wait for it, or be given up; if it punched now,
 * the opening would open a hole.
 * Bites on: openings and take-backs of a pager are done by one worker, one after the other; overtake() for the touch. */
START_TEST(test_take_back_waits_for_an_opening)
{
	struct toucher t;
	uint64_t e = extent();

	(void)sem_init(&reached, 0, 0);
	(void)sem_init(&go, 0, 0);
	pager_hooks.before_open = hold_once;
	tfile_make(&F, "opening", 4 * e, 4);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	hold = true;
	toucher_start(&t, 4096, -1);
	must_wait(&reached);
	toucher_must_end(&t);
	ck_assert_int_eq(view_drop(R.view), 0);
	(void)pager_sync(R.pager, 50);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, 16 * 4096, 4096), 0);
	(void)sem_post(&go);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

static struct toucher in_hook[3];
static _Atomic unsigned int hook_calls;

static void touch_in_hook(void)
{
	if (hook_calls++)
		return;
	for (unsigned int i = 0; i < ARRAY_SIZE(in_hook); i++) {
		in_hook[i].started = false;
		in_hook[i].done = false;
		if (pthread_create(&in_hook[i].thread, NULL, touch_one, &in_hook[i]) != 0)
			abort();
		toucher_wait_asleep(&in_hook[i]);
	}
}

/* Touches arrive when everything is armed and the hole is about to be punched: they must not be answered from what
 * was READY a moment ago.
 * Bites on: a fault is answered by the thread that punches, from the state after it; READY as it was when the message came
 * must not open anything. */
START_TEST(test_touch_between_arming_and_punching)
{
	uint64_t e = extent();

	tfile_make(&F, "between", 2 * e, 5);
	for (int which = 0; which < 2; which++) {
		pager_hooks.after_arm = which ? NULL : touch_in_hook;
		pager_hooks.before_punch = which ? touch_in_hook : NULL;
		rig_open(&R, _i, &F, 256 * MiB, 0);
		rig_check(&R);
		hook_calls = 0;
		for (unsigned int i = 0; i < ARRAY_SIZE(in_hook); i++)
			in_hook[i] = (struct toucher){ .p = R.base + (i & 1 ? e : 0) + 4096 * (i + 1),
						       .write = i == 2 ? 7 : -1 };
		rig_drop(&R);
		if (hook_calls)
			for (unsigned int i = 0; i < ARRAY_SIZE(in_hook); i++)
				toucher_must_end(&in_hook[i]);
		else if (_i != V_USER)
			ck_abort_msg("the take-back did not come by the hook");
		if (hook_calls) {
			ck_assert_uint_eq(R.base[4096 * 3], 7);
			R.base[4096 * 3] = (unsigned char)file_word(F.seed, 4096 * 3);
		}
		rig_check(&R);
		rig_close(&R);
	}
}
END_TEST

static void on_alarm(int sig)
{
	static uint64_t seed = 99;
	static volatile sig_atomic_t inside;

	(void)sig;
	if (inside)
		return;
	inside = 1;
	for (int i = 0; i < 3; i++) {
		uint64_t off = rnd(&seed) % (R.size / 8) * 8;

		if (*(volatile uint64_t *)(R.base + off) != file_word(F.seed, off))
			nr_wrong++;
		nr_reads++;
	}
	inside = 0;
}

/* A signal handler touches weights, whatever call it interrupts.
 * Bites on: signals blocked while the pager's lock is held, and in all of its threads. */
START_TEST(test_signal_handler_touches_weights)
{
	struct sigaction sa = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
	struct itimerval tv = { { 0, 500 }, { 0, 500 } };
	struct tfile fb;
	uint64_t end, n = 0;

	tfile_make(&F, "alarm", 8 * extent() + 4096, 6);
	tfile_make(&fb, "alarm-b", 2 * extent(), 7);
	rig_open(&R, _i, &F, 256 * MiB, extent() / 2);
	(void)sigaction(SIGALRM, &sa, NULL);
	(void)setitimer(ITIMER_REAL, &tv, NULL);
	for (end = now_ms() + soak_ms(800); now_ms() < end; n++) {
		struct pager_stats st;
		struct pager_job *j;
		struct rig b;
		struct fault_reason reason;

		pager_stats(R.pager, &st);
		view_stats(R.view, &st);
		(void)view_drop(R.view);
		(void)view_drop_units(R.view, 3, 4);
		pager_observe_begin(R.pager);
		pager_observe_drop(R.pager);
		(void)pager_set_budget(R.pager, 256 * MiB + n % 2 * MiB);
		view_set_class(R.view, n % 2 ? VIEW_NORMAL : VIEW_UNNEEDED);
		(void)pager_fault_reason(R.base, &reason);
		ck_assert_int_eq(pager_job_new(R.pager, &(struct job_range){ R.view, 0, R.size }, 1, false, &j), 0);
		if (n % 3 == 0)
			(void)pager_job_wait(j, 20);
		pager_job_free(j);
		rig_add(&b, R.pager, &fb, 0);
		(void)*(volatile unsigned char *)(b.base + extent());
		rig_close(&b);
		(void)pager_sync(R.pager, 20);
	}
	memset(&tv, 0, sizeof(tv));
	(void)setitimer(ITIMER_REAL, &tv, NULL);
	ck_assert_uint_gt(nr_reads, 0);
	ck_assert_uint_eq(nr_wrong, 0);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ G36: races on one page */

static void *storm_reader(void *arg)
{
	uint64_t seed = 1000 + (uint64_t)(uintptr_t)arg;

	while (!stop) {
		uint64_t off = rnd(&seed) % 100 * (R.size / 100 / 4096 * 4096) + rnd(&seed) % 512 * 8;

		if (*(volatile uint64_t *)(R.base + off) != file_word(F.seed, off))
			nr_wrong++;
		nr_reads++;
	}
	return NULL;
}

/* 16 threads, 100 pages at random, evicted all the time, read ahead at the same time. No hang, no wrong byte. */
START_TEST(test_storm_on_the_same_pages)
{
	pthread_t t[16];
	uint64_t end, drops = 0, last = 0, still = now_ms();

	tfile_make(&F, "storm", 12 * MiB + 5000, 8);
	rig_open(&R, _i, &F, 256 * MiB, 3 * MiB);
	for (uintptr_t i = 0; i < ARRAY_SIZE(t); i++)
		ck_assert_int_eq(pthread_create(&t[i], NULL, storm_reader, (void *)i), 0);
	for (end = now_ms() + soak_ms(_i == V_MMAP ? 300 : 800); now_ms() < end; drops++) {
		struct pager_job *j = NULL;

		switch (drops % 4) {
		case 0:
			(void)view_drop(R.view);
			break;
		case 1:
			(void)view_drop_units(R.view, (size_t)(drops / 4 % 4), 1);
			break;
		case 2:
			pager_observe_begin(R.pager);
			pager_observe_drop(R.pager);
			break;
		default:
			ck_assert_int_eq(pager_job_new(R.pager, &(struct job_range){ R.view, 0, R.size }, 1, false, &j),
					 0);
			break;
		}
		(void)pager_sync(R.pager, 5000);
		pager_job_free(j);
		/* The watchdog: reads have to go on. */
		if (nr_reads != last) {
			last = nr_reads;
			still = now_ms();
		}
		ck_assert_msg(now_ms() - still < 5000, "no read got through in 5 s");
	}
	stop = true;
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
		(void)pthread_join(t[i], NULL);
	ck_assert_uint_eq(nr_wrong, 0);
	ck_assert_uint_gt(drops, 0);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* Views open and close, jobs begin and are cancelled, beside readers of a view that stays. */
static void *churner(void *arg)
{
	uint64_t seed = 31 + (uint64_t)(uintptr_t)arg;
	struct tfile f;
	char name[32];

	(void)snprintf(name, sizeof(name), "churn-%d", (int)(uintptr_t)arg % 2); /* two threads share a file */
	f = F;
	f.size = 5 * MiB;
	f.seed = 40 + (uint64_t)(uintptr_t)arg % 2;
	(void)snprintf(f.path, sizeof(f.path), "%s", test_path(name));
	while (!stop) {
		struct pager_job *j = NULL;
		struct source *s;
		struct view *v;

		if (view_try(R.pager, &f, MiB, &s, &v, NULL) < 0) {
			nr_wrong++;
			break;
		}
		if (rnd(&seed) % 2 && pager_job_new(R.pager, &(struct job_range){ v, 0, f.size }, 1, false, &j) < 0)
			nr_wrong++;
		nr_wrong += wrong_words(view_base(v), &f, 0, f.size, 65536);
		if (rnd(&seed) % 2) {
			pager_job_cancel(j);
			(void)view_drop(v);
		}
		nr_wrong += wrong_words(view_base(v), &f, 0, f.size, 65536);
		if (rnd(&seed) % 2)
			j = pager_job_free(j);
		view_unref(v);
		source_unref(s);
		pager_job_free(j);
	}
	return NULL;
}

START_TEST(test_storm_of_views_and_jobs)
{
	pthread_t t[6];
	struct tfile f;
	unsigned int fds;

	tfile_make(&f, "churn-0", 5 * MiB, 40);
	tfile_make(&f, "churn-1", 5 * MiB, 41);
	tfile_make(&F, "stays", 6 * MiB, 9);
	rig_open(&R, _i, &F, 64 * MiB, 0);
	rig_check(&R);
	fds = count_fds();
	for (uintptr_t i = 0; i < ARRAY_SIZE(t); i++)
		ck_assert_int_eq(pthread_create(&t[i], NULL, i < 4 ? churner : storm_reader, (void *)i), 0);
	for (uint64_t end = now_ms() + soak_ms(800); now_ms() < end;) {
		(void)view_drop(R.view);
		(void)pager_sync(R.pager, 5000);
	}
	stop = true;
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
		(void)pthread_join(t[i], NULL);
	ck_assert_uint_eq(nr_wrong, 0);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	rig_check(&R);
	ck_assert_uint_eq(count_fds(), fds);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ E, I4: dropping never loses a write */

#define WRITERS 2
#define PAGE 4096u /* only a stride: pages may be larger */

static uint64_t *shadow[WRITERS]; /* the last value written, by page; 0: none */

static void *writer(void *arg)
{
	uintptr_t id = (uintptr_t)arg;
	uint64_t seed = 7 + id * 99991, nr_pages = R.size / PAGE;

	while (!stop) {
		uint64_t page = rnd(&seed) % nr_pages & ~3u; /* one page in four gets written */
		uint64_t off = page * PAGE + 64 * id;
		volatile uint64_t *p = (volatile uint64_t *)(R.base + off);
		uint64_t want = shadow[id][page] ? shadow[id][page] : file_word(F.seed, off), have = *p;

		if (have != want && nr_wrong++ < 3)
			fprintf(stderr, "page %llu of writer %u has %llx, should have %llx\n", (unsigned long long)page,
				(unsigned int)id, (unsigned long long)have, (unsigned long long)want);
		have = ++nr_writes << 8 | (uint64_t)id << 1;
		*p = have;
		shadow[id][page] = have;
		if (rnd(&seed) % 64 == 0)
			(void)usleep(20);
	}
	return NULL;
}

static void *reader(void *arg)
{
	uint64_t seed = 5;

	(void)arg;
	while (!stop) {
		uint64_t off = rnd(&seed) % (R.size / PAGE) * PAGE + 1024 + rnd(&seed) % 300 * 8;

		if (*(volatile uint64_t *)(R.base + off) != file_word(F.seed, off) && nr_wrong++ < 3)
			fprintf(stderr, "offset %llu is wrong\n", (unsigned long long)off);
		nr_reads++;
	}
	return NULL;
}

/* Bites on: the write-protected window (its second userfaultfd, WRITEPROTECT before the scan) or the mremap that
 * stands in for it; "written" = present or swapped and not file. */
START_TEST(test_no_write_is_lost_by_dropping)
{
	pthread_t t[WRITERS + 1];
	uint64_t end, n = 0, lost = 0;

	tfile_make(&F, "lost", 24 * MiB, 10);
	rig_open(&R, _i, &F, 256 * MiB, 3 * MiB);
	for (uintptr_t i = 0; i < WRITERS; i++) {
		shadow[i] = calloc(F.size / PAGE, 8);
		ck_assert_ptr_nonnull(shadow[i]);
	}
	for (uintptr_t i = 0; i < WRITERS + 1; i++)
		ck_assert_int_eq(pthread_create(&t[i], NULL, i < WRITERS ? writer : reader, (void *)i), 0);
	for (end = now_ms() + soak_ms(1000); now_ms() < end; n++) {
		/* Mostly windows over weights that are in memory: each is a chance to lose a first write. */
		pager_observe_begin(R.pager);
		if (n % 64 == 16)
			(void)view_drop(R.view);
		else if (n % 64 == 48)
			(void)view_drop_units(R.view, (size_t)(n / 64 % 8), 2);
		else if (n % 16 == 8)
			pager_observe_drop(R.pager);
		(void)pager_sync(R.pager, 5000);
		(void)usleep(500);
	}
	stop = true;
	for (unsigned int i = 0; i < ARRAY_SIZE(t); i++)
		(void)pthread_join(t[i], NULL);
	for (uintptr_t id = 0; id < WRITERS; id++)
		for (uint64_t page = 0; page < F.size / PAGE; page += 4) {
			uint64_t off = page * PAGE + 64 * id, have = *(volatile uint64_t *)(R.base + off);

			lost += have != (shadow[id][page] ? shadow[id][page] : file_word(F.seed, off));
		}
	ck_assert_uint_gt(nr_writes, 50);
	ck_assert_uint_gt(nr_reads, 50);
	ck_assert_uint_eq(lost, 0);
	ck_assert_uint_eq(nr_wrong, 0);
	rig_close(&R);
}
END_TEST

static struct toucher in_window;

static void write_in_window(void)
{
	if (hook_calls++)
		return;
	if (pthread_create(&in_window.thread, NULL, touch_one, &in_window) != 0)
		abort();
	toucher_wait_asleep(&in_window);
}

/* A first write comes exactly between the look at the page tables and the dropping.
 * Bites on: the WRITEPROTECT of the window (with the scan's result alone the write is dropped with its page). */
START_TEST(test_write_in_the_window_is_kept)
{
	uint64_t e = extent();

	tfile_make(&F, "window", 4 * e, 11);
	pager_hooks.in_window = write_in_window;
	rig_open(&R, _i, &F, 256 * MiB, 0);
	rig_check(&R); /* all open, all clean */
	in_window = (struct toucher){ .p = R.base + e + 3 * PAGE, .write = 0x77 };
	pager_observe_begin(R.pager);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	ck_assert_msg(hook_calls > 0, "the observation did not come by the hook");
	toucher_must_end(&in_window);
	ck_assert_uint_eq(R.base[e + 3 * PAGE], 0x77);
	pager_observe_begin(R.pager);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	pager_observe_drop(R.pager);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	ck_assert_uint_eq(R.base[e + 3 * PAGE], 0x77);
	R.base[e + 3 * PAGE] = (unsigned char)file_word(F.seed, e + 3 * PAGE);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

static void drop_in_window(void)
{
	if (hook_calls++)
		return;
	if (pthread_create(&in_window.thread, NULL, touch_one, &in_window) != 0)
		abort();
	toucher_wait_asleep(&in_window);
	(void)sem_post(&reached);
}

static void *dropper(void *arg)
{
	(void)arg;
	while (sem_wait(&go) < 0)
		;
	for (int i = 0; i < 50; i++)
		(void)view_drop(R.view);
	return NULL;
}

/* Take-backs are asked for, and touches come, while a window is open.
 * Bites on: windows and take-backs of an extent exclude each other (one worker does both, X_TAKING parks faults). */
START_TEST(test_take_back_in_the_window)
{
	pthread_t t;

	(void)sem_init(&reached, 0, 0);
	(void)sem_init(&go, 0, 0);
	tfile_make(&F, "busy", 4 * extent(), 12);
	pager_hooks.in_window = drop_in_window;
	rig_open(&R, _i, &F, 256 * MiB, 0);
	rig_check(&R);
	in_window = (struct toucher){ .p = R.base + extent() + 8, .write = -1 };
	(void)sem_post(&go);
	ck_assert_int_eq(pthread_create(&t, NULL, dropper, NULL), 0);
	for (int i = 0; i < 200; i++) {
		pager_observe_begin(R.pager);
		ck_assert_uint_eq(wrong_words(R.base, &F, 0, R.size, 65536), 0);
		if (i % 8 == 0)
			(void)pager_sync(R.pager, 1000);
	}
	(void)pthread_join(t, NULL);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	if (hook_calls)
		toucher_must_end(&in_window);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* ------------------------------------------------------------------ G: VMAs */

/* vm.max_map_count is reached by the program itself: alternating touches read the right bytes, without a busy loop.
 * Bites on: what follows UNREGISTER's ENOMEM (CONTINUE, or the whole view armed); any other answer than waking. */
START_TEST(test_touches_at_the_limit_of_maps)
{
	uint64_t e = extent(), faults, cpu, nr = 24;
	struct pager_stats st;

	tfile_make(&F, "maps", nr * e, 13);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	use_up_maps(4);
	pager_stats(R.pager, &st);
	faults = st.faults;
	cpu = cpu_ms();
	for (uint64_t i = 0; i < nr; i += 2)
		ck_assert_uint_eq(wrong_words(R.base + i * e, &F, i * e, 4096, 8), 0);
	for (uint64_t i = nr; i-- > 0;)
		ck_assert_uint_eq(wrong_words(R.base + i * e, &F, i * e, 8192, 8), 0);
	pager_stats(R.pager, &st);
	/* 24 extents, each touched on two pages of several calls: hundreds at most; a busy loop makes thousands. */
	ck_assert_uint_le(st.faults - faults, 600);
	ck_assert_uint_le(cpu_ms() - cpu, 4000);
	/* Taking back in the middle of open ranges: it may not be possible, but nothing reads zeros. */
	(void)view_drop_units(R.view, 0, 0);
	(void)view_drop(R.view);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, R.size, 65536), 0);
	give_back_maps();
	rig_check(&R);
	rig_drop(&R);
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* Take-back of the middle of an open range at the limit: REGISTER gives ENOMEM, as it does when the process is gone.
 * Bites on: the punch that only a REGISTER of 0 (or a proven ESRCH) allows; arm_whole(). */
START_TEST(test_take_back_at_the_limit_of_maps)
{
	uint64_t e = extent(), nr = 16;

	tfile_make(&F, "middle", nr * e, 14);
	rig_open(&R, _i, &F, 256 * MiB, e);
	rig_check(&R);
	use_up_maps(0);
	for (uint64_t i = 1; i < nr; i += 2)
		(void)view_drop_units(R.view, (size_t)i, 1);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	/* The way out that needs no VMA: one REGISTER of the whole view, then the take-backs go on. */
	ck_assert_uint_le(resident(R.pager), nr / 2 * e);
	ck_assert_uint_eq(wrong_words(R.base, &F, 0, R.size, 65536), 0);
	for (uint64_t i = 1; i < nr; i += 2) {
		(void)view_drop_units(R.view, (size_t)i, 1);
		ck_assert_uint_eq(wrong_words(R.base, &F, 0, R.size, 65536), 0);
	}
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	give_back_maps();
	rig_check(&R);
	rig_close(&R);
}
END_TEST

/* Extents that were written while their neighbours were armed become one VMA again.
 * Bites on: the sentinel's UFFDIO_COPY before the first split, which gives the view its anon_vma. */
START_TEST(test_written_extents_merge_again)
{
	uint64_t e = extent(), nr = 32;

	tfile_make(&F, "merge", nr * e, 15);
	rig_open(&R, _i, &F, 256 * MiB, 0);
	for (int pass = 0; pass < 2; pass++)
		for (uint64_t i = (uint64_t)pass; i < nr; i += 2) {
			/* Read first: a write to an armed extent would give the whole view its anon_vma by itself. */
			(void)*(volatile unsigned char *)(R.base + i * e);
			R.base[i * e + 5] = (unsigned char)(i + 1);
		}
	/* A written page may open its extent a moment later: one round of reads makes sure that all are open. */
	for (uint64_t i = 0; i < nr; i++)
		ck_assert_uint_eq(wrong_words(R.base + i * e + 4096, &F, i * e + 4096, e - 4096, 4096), 0);
	for (uint64_t end = now_ms() + 5000; count_vmas(R.base, R.base + R.size) > 3 && now_ms() < end;)
		(void)usleep(1000); /* the worker opens what a CONTINUE let through */
	ck_assert_uint_le(count_vmas(R.base, R.base + R.size), 3);
	for (uint64_t i = 0; i < nr; i++)
		ck_assert_uint_eq(R.base[i * e + 5], i + 1);
	rig_close(&R);
}
END_TEST

/* However a view is touched and dropped, the pieces that it falls into stay bounded. */
START_TEST(test_maps_stay_bounded)
{
	uint64_t e = extent(), nr = 48, seed = 3;
	unsigned int most = 0;

	tfile_make(&F, "bounded", nr * e, 16);
	rig_open(&R, _i, &F, 256 * MiB, e);
	for (int i = 0; i < 400; i++) {
		uint64_t k = rnd(&seed) % nr;

		if (rnd(&seed) % 3)
			R.base[k * e + 8] = 1;
		else
			(void)view_drop_units(R.view, (size_t)k, 1);
		most = MAX(most, count_vmas(R.base, R.base + R.size));
	}
	ck_assert_uint_le(most, (unsigned int)nr + 8);
	ck_assert_int_eq(pager_sync(R.pager, 20000), 0);
	rig_close(&R);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("races");
	double soak = (double)soak_ms(0) / 1000;
	TCase *tc;

	tc = new_case(s, "wakes", 60 + soak);
	add_variants(tc, test_no_wake_is_lost, PAGED);

	tc = new_case(s, "waiting", 60 + soak);
	add_variants(tc, test_touch_does_not_wait_for_a_slow_open, PAGED);
	add_variants(tc, test_take_back_waits_for_an_opening, PAGED);
	add_variants(tc, test_touch_between_arming_and_punching, PAGED);
	add_variants(tc, test_signal_handler_touches_weights, ALL_VARIANTS);

	tc = new_case(s, "storms", 60 + soak);
	add_variants(tc, test_storm_on_the_same_pages, ALL_VARIANTS);
	add_variants(tc, test_storm_of_views_and_jobs, ALL_VARIANTS);

	tc = new_case(s, "writes", 60 + soak);
	add_variants(tc, test_no_write_is_lost_by_dropping, ALL_VARIANTS);
	add_variants(tc, test_write_in_the_window_is_kept, PAGED);
	add_variants(tc, test_take_back_in_the_window, PAGED);

	tc = new_case(s, "maps", 60);
	add_variants(tc, test_touches_at_the_limit_of_maps, PAGED);
	add_variants(tc, test_take_back_at_the_limit_of_maps, PAGED);
	add_variants(tc, test_written_extents_merge_again, PAGED);
	add_variants(tc, test_maps_stay_bounded, PAGED);
	return run_suite(s);
}
