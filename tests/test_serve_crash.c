/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What dies: the daemon, its keeper, clients, at any moment and under load (I5); forked children through all of that
 * (I7). Nobody hangs, nobody reads a wrong byte, nothing is left behind. The daemon is the program itself, except
 * where a read has to be held: there it is a fork of the test with a hook.
 *
 * Numbers like G34 are those of problems that users of model loaders have reported in public. `make soak` runs the
 * storms for longer ($WD_SOAK_SECONDS).
 */
#include "tests/serve_util.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>

static struct daemon D;
static struct peer P[32];
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
enum { W_STOP, W_CHILDREN_GO, W_HOLD, W_HELD, W_MARK };

static unsigned int count_or(unsigned int usual, unsigned int soak)
{
	return soak_ms(0) ? soak : usual;
}

/* ------------------------------------------------------------------ reads that are held */

/* While W_HOLD is set: half of the bytes come, and they are wrong; the rest does not. */
static int64_t read_half(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	_Atomic uint64_t *w = shared_words();

	(void)direct;
	if (w[W_HOLD]) {
		memset(buf, 0x5A, nbytes / 2);
		w[W_HELD]++;
		while (w[W_HOLD])
			(void)usleep(200);
	}
	return hook_pread(s, buf, nbytes, offset);
}

static void hold_reads(void)
{
	source_hook = read_half;
}

static void until_word(unsigned int i)
{
	uint64_t end = now_ms() + 20000;

	while (!shared_words()[i] && now_ms() < end)
		(void)usleep(200);
	ck_assert_msg(shared_words()[i], "an event did not come within 20 s");
}

/* Killed with a fault that it has read and not answered, in the middle of a fill; the next one gets it.
 * Bites on: the WAKE of every view when a daemon takes over; READING extents are punched, not trusted. */
START_TEST(test_g34_killed_while_a_client_is_blocked)
{
	daemon_start(&D, "", hold_reads);
	U = new_model("blocked.safetensors", 6, 3 * MiB, 50, 0);
	peer_new(&P[0], getuid());
	peer_new(&P[1], getuid());
	must_do(&P[0], do_open, &U);
	must_do(&P[1], do_open, &U);
	for (int round = 0; round < 3; round++) {
		shared_words()[W_HELD] = 0;
		shared_words()[W_HOLD] = 1;
		peer_begin(&P[0], "checks", do_check, &U, sizeof(U));
		peer_begin(&P[1], "checks", do_check, &U, sizeof(U));
		until_word(W_HELD);
		daemon_kill(&D);
		shared_words()[W_HOLD] = 0;
		daemon_start_again(&D, "");
		must_end(&P[0]);
		must_end(&P[1]);
		must_tool("drop --all");
	}
	must_do(&P[0], do_check, &U);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* The same, but nobody comes back: daemon and keeper are both gone.
 * Bites on: the client's rescue. */
START_TEST(test_g34_all_gone_while_a_client_is_blocked)
{
	daemon_start(&D, "", hold_reads);
	U = new_model("alone.safetensors", 6, 3 * MiB, 51, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &U);
	shared_words()[W_HOLD] = 1;
	peer_begin(&P[0], "checks", do_check, &U, sizeof(U));
	until_word(W_HELD);
	if (_i) {
		keeper_kill(&D);
		daemon_kill(&D);
	} else {
		/* the keeper starts another one unless it is killed first */
		pid_t keeper = keeper_pid_of(&D);

		ck_assert_int_gt(keeper, 0);
		ck_assert_int_eq(kill(keeper, SIGSTOP), 0);
		daemon_kill(&D);
		ck_assert_int_eq(kill(keeper, SIGKILL), 0);
	}
	must_end(&P[0]);
	must_do(&P[0], do_release, &U);
	must_do(&P[0], do_check, &U);
	peer_leave(&P[0]);
}
END_TEST

/* Half is loaded, nobody waits; what was loaded is not read again. _i: who starts the next one. */
START_TEST(test_restart_keeps_the_cache_warm)
{
	daemon_start(&D, "", NULL);
	U = new_model("warm.safetensors", 8, 4 * MiB, 52, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open_and_check, &U);
	daemon_kill(&D);
	if (_i)
		daemon_wait_other(&D); /* the keeper does it */
	else
		daemon_start_again(&D, "");
	ck_assert_uint_ge(must_stat("resident_bytes"), 32 * MiB);
	must_do(&P[0], do_check, &U);
	peer_new(&P[1], getuid());
	must_do(&P[1], do_open_and_check, &U);
	ck_assert_uint_lt(must_stat("read_bytes"), MiB);
	ck_assert_uint_le(held_by(D.pid).arena_bytes, 32 * MiB + slack());
	/* and it is master of all: taken back from the old client as well */
	must_tool("drop %s", U.path);
	ck_assert_uint_eq(stat_until_at_most("resident_bytes", 0), 0);
	must_do(&P[0], do_check, &U);
	must_do(&P[1], do_check, &U);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
	must_drop_all(false);
}
END_TEST

/* The new daemon knows nobody of before (no keeper was left): old clients keep right bytes, new ones get theirs. */
START_TEST(test_new_daemon_without_the_old_ones_keeper)
{
	daemon_start(&D, "", NULL);
	U = new_model("stranger.safetensors", 8, 4 * MiB, 53, 0);
	for (int i = 0; i < 2; i++)
		peer_new(&P[i], getuid());
	must_do(&P[0], do_open, &U);
	U.value2 = 9;
	U.value = 3;
	must_do(&P[0], do_random, &U);
	U.value = 0;
	keeper_kill(&D);
	daemon_kill(&D);
	daemon_start_again(&D, "");
	must_do(&P[1], do_open_and_check, &U);
	must_do(&P[0], do_check, &U);
	must_tool("drop --all");
	must_do(&P[0], do_check, &U);
	must_do(&P[1], do_check, &U);
	must_do(&P[0], do_close, &U);
	must_do(&P[0], do_open_and_check, &U);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

static int64_t do_mark(const void *arg)
{
	const struct use *u = arg;

	for (size_t i = 0; i < wd_model_nr_tensors(my_models[u->slot]); i += 2)
		*((unsigned char *)wd_model_tensor_at(my_models[u->slot], i)->data + 5000) = 0xC3;
	return 0;
}

static int64_t do_unmark(const void *arg)
{
	const struct use *u = arg;

	for (size_t i = 0; i < wd_model_nr_tensors(my_models[u->slot]); i += 2) {
		const struct wd_tensor *t = wd_model_tensor_at(my_models[u->slot], i);

		if (*((unsigned char *)t->data + 5000) != 0xC3)
			return peer_say("what was written into tensor %zu is lost", i);
		data_fill((unsigned char *)t->data + 5000, 1, u->seed, t->file_offset + 5000);
	}
	return 0;
}

/* What a client wrote stays through all of it: a drop, a daemon's death, the death of all (I4). */
START_TEST(test_writes_outlive_the_daemon)
{
	daemon_start(&D, "", NULL);
	U = new_model("marked.safetensors", 6, 3 * MiB, 54, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &U);
	must_do(&P[0], do_mark, &U);
	must_tool("drop --all");
	daemon_kill(&D);
	daemon_start_again(&D, "");
	must_tool("drop --all");
	if (_i) {
		keeper_kill(&D);
		daemon_kill(&D);
	}
	must_do(&P[0], do_unmark, &U);
	must_do(&P[0], do_check, &U);
	peer_leave(&P[0]);
}
END_TEST

/* Alive, but it answers nobody: after some seconds its clients go on without it; and when it goes on, it does no
 * harm. */
START_TEST(test_daemon_that_does_not_answer)
{
	pid_t keeper;

	daemon_start(&D, "", NULL);
	U = new_model("silent.safetensors", 6, 3 * MiB, 55, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &U);
	keeper = keeper_pid_of(&D);
	daemon_pause(&D);
	if (_i && keeper > 0)
		ck_assert_int_eq(kill(keeper, SIGSTOP), 0);
	must_do(&P[0], do_check, &U);
	ck_assert_int_eq(kill(D.pid, SIGCONT), 0);
	if (_i && keeper > 0)
		ck_assert_int_eq(kill(keeper, SIGCONT), 0);
	must_do(&P[0], do_check, &U);
	peer_new(&P[1], getuid());
	if (daemon_answers(&D))
		must_do(&P[1], do_open_and_check, &U);
	if (daemon_answers(&D))
		must_tool("drop --all");
	must_do(&P[0], do_check, &U);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* closefrom(3), as programs do that become daemons: the socket is gone, the client is not.
 * Bites on: a view is let go only when its address space is (ESRCH). */
static int64_t do_close_all(const void *arg)
{
	const struct use *u = arg;
	int keep = (int)u->value;

	for (int fd = 3; fd < 1024; fd++)
		if (fd != keep)
			(void)close(fd);
	return 0;
}

static int64_t do_tell_fd(const void *arg)
{
	(void)arg;
	/* the lowest one that is a socket of the test's: peers are forked with it open, and opened nothing before */
	for (int fd = 3; fd < 1024; fd++) {
		struct stat st;

		if (fstat(fd, &st) == 0 && S_ISSOCK(st.st_mode))
			return fd;
	}
	return -1;
}

START_TEST(test_socket_is_not_the_clients_life)
{
	int64_t fd;

	daemon_start(&D, "", NULL);
	U = new_model("closed.safetensors", 8, 3 * MiB, 56, 0);
	for (int i = 0; i < 2; i++)
		peer_new(&P[i], getuid());
	fd = peer_does(&P[0], do_tell_fd, &U);
	ck_assert_int_ge(fd, 3);
	for (int i = 0; i < 2; i++)
		must_do(&P[i], do_open, &U);
	U.value2 = 3;
	U.value = 4;
	must_do(&P[0], do_random, &U);
	U.value = (uint64_t)fd;
	must_do(&P[0], do_close_all, &U);
	U.value = 0;
	must_tool("drop --all");
	must_do(&P[0], do_check, &U);
	must_tool("drop --all");
	must_do(&P[1], do_check, &U);
	must_do(&P[0], do_check, &U);
	ck_assert_uint_le(held_by(D.pid).arena_bytes, 24 * MiB + slack());
	peer_kill(&P[0]);
	must_drop_all(false);
	ck_assert_uint_le(held_by(D.pid).arena_bytes, slack());
	must_do(&P[1], do_check, &U);
	peer_leave(&P[1]);
}
END_TEST

/* SIGTERM drains: the daemon ends, its clients go on. */
START_TEST(test_clients_outlive_an_orderly_end)
{
	daemon_start(&D, "", NULL);
	U = new_model("bye.safetensors", 8, 3 * MiB, 57, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &U);
	U.value = 5;
	must_do(&P[0], do_random, &U);
	U.value = 0;
	ck_assert_int_eq(kill(D.pid, SIGTERM), 0);
	must_do(&P[0], do_check, &U);
	must_do(&P[0], do_close, &U);
	peer_leave(&P[0]);
	for (uint64_t end = now_ms() + 20000; now_ms() < end && daemon_family(&D, (pid_t[4]){ 0 }, 4);)
		(void)usleep(1000);
	ck_assert_uint_eq(daemon_family(&D, (pid_t[4]){ 0 }, 4), 0);
}
END_TEST

/* An upgrade in place, under load. */
START_TEST(test_takeover)
{
	pid_t pids[8];

	daemon_start(&D, "", NULL);
	U = new_model("upgrade.safetensors", 8, 3 * MiB, 58, 0);
	for (int i = 0; i < 3; i++) {
		peer_new(&P[i], getuid());
		must_do(&P[i], do_open, &U);
		U.value2 = (uint64_t)i;
		peer_begin(&P[i], "storms", do_storm, &U, sizeof(U));
	}
	for (unsigned int i = 0; i < count_or(3, 30); i++) {
		pid_t before = D.pid;

		daemon_start_again(&D, "--takeover");
		for (uint64_t end = now_ms() + 20000; kill(before, 0) == 0 && now_ms() < end;)
			(void)usleep(1000);
		ck_assert_int_lt(kill(before, 0), 0);
		ck_assert_uint_ge(must_stat("resident_bytes"), MiB);
	}
	ck_assert_uint_eq(daemon_family(&D, pids, ARRAY_SIZE(pids)), 2); /* itself and one keeper */
	shared_words()[W_STOP] = 1;
	for (int i = 0; i < 3; i++) {
		int64_t n = peer_end(&P[i]);

		ck_assert_msg(n > 0, "%lld: %s", (long long)n, P[i].text);
		must_do(&P[i], do_check, &U);
		peer_leave(&P[i]);
	}
}
END_TEST

static unsigned int names_in(const char *folder)
{
	cleanup_free char *command = data_text("ls -A %s 2>/dev/null | wc -l", folder);
	FILE *f = popen(command, "r");
	unsigned int n = 0;

	ck_assert_ptr_nonnull(f);
	ck_assert_int_eq(fscanf(f, "%u", &n), 1);
	(void)pclose(f);
	return n;
}

/* Daemon, keeper and clients killed again and again: nothing named is left but the socket, and each start works.
 * (A model larger than /dev/shm is no matter: arenas lie elsewhere.) */
START_TEST(test_g37_leftovers)
{
	unsigned int shm, tmp, in_folder = 0;

	shm = names_in("/dev/shm");
	tmp = names_in("/tmp");
	(void)tmp;
	daemon_start(&D, "", NULL);
	U = new_model("left.safetensors", 8, 2 * MiB, 59, 0);
	for (int i = 0; i < 20; i++) {
		peer_new(&P[0], getuid());
		must_do(&P[0], do_open_and_check, &U);
		if (i == 0)
			in_folder = names_in(D.folder);
		ck_assert_uint_le(names_in(D.folder), in_folder);
		if (i % 2) {
			keeper_kill(&D);
			daemon_kill(&D);
			peer_kill(&P[0]);
		} else {
			peer_kill(&P[0]);
			keeper_kill(&D);
			daemon_kill(&D);
		}
		daemon_start_again(&D, "");
		ck_assert_uint_le(must_stat("resident_bytes"), 0);
	}
	ck_assert_uint_eq(names_in("/dev/shm"), shm);
}
END_TEST

/* ------------------------------------------------------------------ forked children */

/* A raw clone(2) returns when its event is read, a moment before the keeper has the child's userfaultfd: a daemon
 * that dies in this moment takes it along, and no handler runs in such a child that could see it. */
static void until_forks(uint64_t nr)
{
	for (uint64_t end = now_ms() + 20000; must_stat("forks") < nr && now_ms() < end;)
		(void)usleep(1000);
	ck_assert_uint_ge(must_stat("forks"), nr);
}

static void *reads_on(void *arg)
{
	struct use *u = arg;
	uint64_t n = 0;

	while (!shared_words()[W_CHILDREN_GO]) {
		const struct wd_tensor *t = wd_model_tensor_at(my_models[u->slot], n++ % 4);

		(void)*((const volatile unsigned char *)t->data + n * 4096 % t->nbytes);
		free(malloc(n % 3000));
	}
	return NULL;
}

static int64_t do_start_reader(const void *arg)
{
	static struct use u;
	pthread_t t;

	u = *(const struct use *)arg;
	return pthread_create(&t, NULL, reads_on, &u) ? -1 : 0;
}

/*
 * Children of every kind, made before and after; then, before they touch anything, what serves them dies.
 * _i: 0 nothing dies; 1 the daemon, and another one comes; 2 the parent; 3 daemon and keeper (not for raw clone(2)).
 * Bites on: every userfaultfd of a child is with the keeper; the child handler (claim, or the files are mapped).
 */
START_TEST(test_g35_children_read_right_bytes)
{
	daemon_start(&D, "", NULL);
	U = new_model("parent.safetensors", 6, 3 * MiB, 60, 0);
	peer_new(&P[0], getuid());
	peer_new(&P[1], getuid());
	must_do(&P[1], do_open, &U);
	must_do(&P[0], do_open, &U);
	must_do(&P[0], do_start_reader, &U);
	U.value = 3;
	must_do(&P[0], do_random, &U);
	for (uint64_t kind = FORK; kind <= (_i == 3 || getuid() ? FORK_OF_FORK : RAW_CLONE); kind++)
		for (int n = 0; n < 2; n++) {
			U.value = kind;
			must_do(&P[0], do_fork, &U);
		}
	U.value = 0;
	if (_i == 1) {
		until_forks(getuid() ? 0 : 8);
		daemon_kill(&D);
		daemon_start_again(&D, "");
	} else if (_i == 3) {
		keeper_kill(&D);
		daemon_kill(&D);
	}
	/* Nothing is in memory: what nobody serves would read as zeros. */
	if (_i < 3)
		must_tool("drop --all");
	shared_words()[W_CHILDREN_GO] = 1;
	must_do(&P[0], do_fork_end, &U);
	must_do(&P[0], do_check, &U);
	must_do(&P[1], do_check, &U);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
	if (_i == 3)
		return;
	must_drop_all(false);
	ck_assert_uint_eq(stat_until_at_most("children", 0), 0);
	ck_assert_uint_le(held_by(D.pid).arena_bytes, slack());
}
END_TEST

/* The child tells by a word: it has nobody left who could wait for it. */
static int64_t do_fork_and_die(const void *arg)
{
	const struct use *u = arg;

	if (u->value == RAW_CLONE ? raw_clone() == 0 : fork() == 0) {
		while (!shared_words()[W_CHILDREN_GO])
			(void)usleep(200);
		shared_words()[W_MARK] = do_check(u) == 0 ? 1 : 2;
		_exit(0);
	}
	(void)kill(getpid(), SIGKILL);
	return 0;
}

START_TEST(test_child_outlives_its_parent)
{
	daemon_start(&D, "", NULL);
	U = new_model("orphan.safetensors", 6, 3 * MiB, 61, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &U);
	U.value = 3;
	must_do(&P[0], do_random, &U);
	U.value = _i % 2 || getuid() ? FORK : RAW_CLONE;
	peer_begin(&P[0], "dies", do_fork_and_die, &U, sizeof(U));
	ck_assert_int_eq(child_result(P[0].pid), 1000 + SIGKILL);
	if (_i / 2) {
		until_forks(getuid() ? 0 : 1);
		daemon_kill(&D);
		daemon_start_again(&D, "");
	}
	must_tool("drop --all");
	shared_words()[W_CHILDREN_GO] = 1;
	until_word(W_MARK);
	ck_assert_uint_eq(shared_words()[W_MARK], 1);
}
END_TEST

/* A fork waits until its event is read; the daemon is stopped, and then killed with the event unread.
 * Bites on: the next daemon (or, with the keeper gone as well, the client) reads it. */
START_TEST(test_killed_while_a_fork_is_in_flight)
{
	daemon_start(&D, "", NULL);
	U = new_model("flight.safetensors", 6, 3 * MiB, 62, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &U);
	U.value = 3;
	must_do(&P[0], do_random, &U);
	for (int round = 0; round < (_i == 2 ? 1 : 3); round++) {
		daemon_pause(&D);
		U.value = _i == 1 ? RAW_CLONE : FORK;
		peer_begin(&P[0], "forks", do_fork, &U, sizeof(U));
		U.value = 0;
		until_in_fork(P[0].pid);
		if (_i == 2)
			keeper_kill(&D);
		daemon_kill(&D);
		if (_i < 2)
			daemon_start_again(&D, "");
		must_end(&P[0]);
	}
	shared_words()[W_CHILDREN_GO] = 1;
	must_do(&P[0], do_fork_end, &U);
	must_do(&P[0], do_check, &U);
	peer_leave(&P[0]);
}
END_TEST

static int64_t do_exec(const void *arg)
{
	(void)arg;
	return system("exit 7") == 7 * 256 ? 0 : -1; /* vfork and exec */
}

START_TEST(test_exec_leaves_nothing)
{
	struct held before, after;

	daemon_start(&D, "", NULL);
	U = new_model("exec.safetensors", 4, 3 * MiB, 63, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open_and_check, &U);
	for (int i = 0; i < 5; i++)
		must_do(&P[0], do_exec, &U);
	before = held_by(D.pid);
	for (int i = 0; i < 30; i++)
		must_do(&P[0], do_exec, &U);
	after = daemon_held_until(&D, &before);
	ck_assert_uint_le(after.fds, before.fds);
	ck_assert_uint_le(after.threads, before.threads);
	must_do(&P[0], do_check, &U);
	peer_leave(&P[0]);
}
END_TEST

/* ------------------------------------------------------------------ storms */

#define NR_STORM 8

static void end_storm(unsigned int nr)
{
	shared_words()[W_STOP] = 1;
	for (unsigned int i = 0; i < nr; i++) {
		int64_t n = peer_end(&P[i]);

		ck_assert_msg(n > 0, "client %u: %lld: %s", i, (long long)n, P[i].text);
	}
	for (unsigned int i = 0; i < nr; i++)
		if (P[i].doing[0] != 'd') /* (the one that drops has no model) */
			must_do(&P[i], do_check, &U);
}

/* Nothing is left of anybody. */
static void check_nothing_is_left(const struct held *before)
{
	struct held most = *before, after;

	must_drop_all(true);
	ck_assert_uint_eq(stat_until_at_most("children", 0), 0);
	ck_assert_uint_le(stat_until_at_most("clients", 1), 1);
	ck_assert_uint_eq(must_stat("mappings"), 0);
	most.arena_bytes = MAX(most.arena_bytes, slack());
	after = daemon_held_until(&D, &most);
	ck_assert_uint_le(after.fds, most.fds);
	ck_assert_uint_le(after.threads, most.threads);
	ck_assert_uint_le(after.maps, most.maps);
	ck_assert_uint_le(after.arena_bytes, most.arena_bytes);
}

/*
 * Clients read and write, fork and drop; the daemon is killed under them, again and again, at moments of no rule.
 * Bites on: the order of taking over (arm everything that is not READY, punch, WAKE all, serve); children's
 * userfaultfds go to the keeper before anything else is done for them.
 */
START_TEST(test_storm_of_dying_daemons)
{
	const unsigned int kills = count_or(10, 200);
	uint64_t random = now_ms() | 1, end;
	struct held before;

	daemon_start(&D, "--budget 40M", NULL);
	U = new_model("storm.safetensors", 24, 2 * MiB + 4096, 64, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open_and_check, &U);
	peer_leave(&P[0]);
	for (unsigned int i = 0; i < NR_STORM; i++) {
		peer_new(&P[i], getuid());
		if (i < NR_STORM - 1)
			must_do(&P[i], do_open, &U);
	}
	for (unsigned int i = 0; i < NR_STORM; i++) {
		U.value = 20;
		U.value2 = i == 5 ? FORK_OF_FORK : i == 6 ? FORK : i * 1000;
		if (i < 5)
			peer_begin(&P[i], "storms", do_storm, &U, sizeof(U));
		else if (i < NR_STORM - 1)
			peer_begin(&P[i], "forks", do_fork_storm, &U, sizeof(U));
		else
			peer_begin(&P[i], "drops", do_drop_storm, &U, sizeof(U));
	}
	U.value = U.value2 = 0;
	end = now_ms() + soak_ms(0);
	for (unsigned int i = 0; i < kills || now_ms() < end; i++) {
		(void)usleep((unsigned int)(rnd(&random) % 60000));
		daemon_kill(&D);
		daemon_start_again(&D, "");
		for (unsigned int k = 0; k < NR_STORM; k++)
			if (peer_has_ended(&P[k])) {
				int64_t n = peer_end(&P[k]);

				ck_abort_msg("kill %u: client %u (%s): %lld: %s", i, k, P[k].doing, (long long)n,
					     P[k].text);
			}
	}
	end_storm(NR_STORM);
	for (unsigned int i = 0; i < NR_STORM; i++)
		peer_leave(&P[i]);
	/* a daemon that has never had more than this */
	must_tool("drop --all");
	before = held_by(D.pid);
	before.fds += 8;
	before.threads += 4;
	check_nothing_is_left(&before);
}
END_TEST

/* Bites on: anything kept of a client that died in the middle of something. */
START_TEST(test_storm_of_dying_clients)
{
	const unsigned int kills = count_or(50, 1000);
	uint64_t random = now_ms() | 1, end;
	struct held before = { 0 };

	daemon_start(&D, "--budget 40M", NULL);
	U = new_model("mortal.safetensors", 24, 2 * MiB + 4096, 65, 0);
	for (unsigned int i = 0; i < 2; i++) { /* these stay */
		peer_new(&P[i], getuid());
		must_do(&P[i], do_open, &U);
	}
	U.value2 = 1;
	peer_begin(&P[0], "storms", do_storm, &U, sizeof(U));
	end = now_ms() + soak_ms(0);
	for (unsigned int i = 0; i < kills || now_ms() < end; i++) {
		struct peer *p = &P[2];

		if (i == 10) {
			(void)stat_until_at_most("clients", 3);
			(void)stat_until_at_most("children", 0);
			before = held_by(D.pid);
		}
		peer_new(p, getuid());
		if (i % 5)
			must_do(p, do_open, &U);
		U.value = 10;
		U.value2 = i % 3;
		if (i % 5 == 0) /* while it attaches */
			peer_begin(p, "opens", do_open, &U, sizeof(U));
		else if (i % 5 == 1)
			peer_begin(p, "forks", do_fork_storm, &U, sizeof(U));
		else
			peer_begin(p, "storms", do_storm, &U, sizeof(U));
		(void)usleep((unsigned int)(rnd(&random) % 20000));
		peer_kill(p);
		if (i % 10 == 9)
			must_tool("drop --all");
		ck_assert_msg(!peer_has_ended(&P[0]), "the one that stays: %s", P[0].text);
	}
	U.value = U.value2 = 0;
	must_do(&P[1], do_check, &U);
	shared_words()[W_STOP] = 1;
	ck_assert_int_gt(peer_end(&P[0]), 0);
	must_do(&P[0], do_check, &U);
	for (unsigned int i = 0; i < 2; i++)
		peer_leave(&P[i]);
	check_nothing_is_left(&before);
}
END_TEST

/* Thirty-two clients touch what is dropped under them. */
START_TEST(test_storm_of_32_clients)
{
	uint64_t faults, end;
	struct held before;

	daemon_start(&D, "--budget 24M", NULL);
	U = new_model("many.safetensors", 16, 2 * MiB + 4096, 66, 0);
	before = held_by(D.pid);
	before.fds += 8;
	before.threads += 8;
	for (unsigned int i = 0; i < 32; i++) {
		peer_new(&P[i], getuid());
		if (i)
			must_do(&P[i], do_open, &U);
	}
	for (unsigned int i = 0; i < 32; i++) {
		U.value2 = i * 7919;
		if (i)
			peer_begin(&P[i], "storms", do_storm, &U, sizeof(U));
		else
			peer_begin(&P[i], "drops", do_drop_storm, &U, sizeof(U));
	}
	U.value2 = 0;
	end = now_ms() + soak_ms(0);
	for (uint64_t late = now_ms() + 60000; now_ms() < end || (must_stat("faults") < 4000 && now_ms() < late);)
		(void)usleep(20000);
	faults = must_stat("faults");
	end_storm(32);
	ck_assert_uint_ge(faults, 4000);
	for (unsigned int i = 0; i < 32; i++)
		peer_leave(&P[i]);
	check_nothing_is_left(&before);
	if (soak_ms(0))
		(void)printf("32 clients: %llu faults\n", (unsigned long long)faults);
}
END_TEST

/* _i: kind. Bites on: the probe of the sentinels before a punch; the claim of a child's address space. */
START_TEST(test_storm_of_forks)
{
	uint64_t end;
	struct held before;

	daemon_start(&D, "", NULL);
	U = new_model("forks.safetensors", 8, 2 * MiB, 67, 0);
	before = held_by(D.pid);
	before.fds += 8;
	before.threads += 8;
	for (unsigned int i = 0; i < 4; i++) {
		peer_new(&P[i], getuid());
		if (i < 3) {
			must_do(&P[i], do_open, &U);
			must_do(&P[i], do_start_reader, &U);
		}
	}
	for (unsigned int i = 0; i < 4; i++) {
		U.value = 30;
		U.value2 = (uint64_t)_i;
		if (i < 3)
			peer_begin(&P[i], "forks", do_fork_storm, &U, sizeof(U));
		else
			peer_begin(&P[i], "drops", do_drop_storm, &U, sizeof(U));
	}
	U.value = U.value2 = 0;
	end = now_ms() + soak_ms(2000);
	for (uint64_t late = now_ms() + 60000; now_ms() < end || (must_stat("forks") < 20 && now_ms() < late);)
		(void)usleep(20000);
	ck_assert_uint_ge(must_stat("forks"), 20);
	shared_words()[W_CHILDREN_GO] = 1; /* ends the readers */
	end_storm(4);
	for (unsigned int i = 0; i < 4; i++)
		peer_leave(&P[i]);
	check_nothing_is_left(&before);
}
END_TEST

static TCase *storm_case(Suite *s, const char *name)
{
	/* Some go on until they have killed as often as they shall. */
	TCase *tc = folder_case(s, name, 200 + 3 * (double)soak_ms(0) / 1000);

	tcase_add_checked_fixture(tc, NULL, stop);
	return tc;
}

int main(void)
{
	Suite *s = suite_create("serve_crash");
	TCase *tc = folder_case(s, "crash", 150);

	if (getuid() != 0)
		skip("serve_crash: fork events, raw clone(2)", "only a daemon of root's is told of them");
	tcase_add_checked_fixture(tc, NULL, stop);
	add_full(tc, test_g34_killed_while_a_client_is_blocked, 0, 1);
	tcase_add_loop_test(tc, test_g34_all_gone_while_a_client_is_blocked, 0, 2);
	add_full(tc, test_restart_keeps_the_cache_warm, 0, 2);
	tcase_add_test(tc, test_new_daemon_without_the_old_ones_keeper);
	tcase_add_loop_test(tc, test_writes_outlive_the_daemon, 0, 2);
	tcase_add_loop_test(tc, test_daemon_that_does_not_answer, 0, 2);
	add_full(tc, test_socket_is_not_the_clients_life, 0, 1);
	tcase_add_test(tc, test_clients_outlive_an_orderly_end);
	tcase_add_test(tc, test_takeover);
	tcase_add_test(tc, test_g37_leftovers);
	tcase_add_loop_test(tc, test_g35_children_read_right_bytes, 0, 2);
	tcase_add_loop_test(tc, test_g35_children_read_right_bytes, 3, 4);
	tcase_add_loop_test(tc, test_child_outlives_its_parent, 0, 4);
	if (getuid() == 0) /* another one's daemon is told of no forks: they do not wait for it */
		tcase_add_loop_test(tc, test_killed_while_a_fork_is_in_flight, 0, 3);
	tcase_add_test(tc, test_exec_leaves_nothing);

	/* Cases of their own: `make soak` runs them by name. */
	tc = storm_case(s, "daemons");
	tcase_add_test(tc, test_storm_of_dying_daemons);
	tc = storm_case(s, "clients");
	tcase_add_test(tc, test_storm_of_dying_clients);
	tc = storm_case(s, "many");
	add_full(tc, test_storm_of_32_clients, 0, 1);
	tc = storm_case(s, "forks");
	add_full(tc, test_storm_of_forks, FORK, RAW_CLONE + 1);
	return run_suite(s);
}
