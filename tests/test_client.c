/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The library as a client of the daemon: which socket it trusts, when it falls back, what WEIGHTD_MODE and its like do,
 * starting a daemon on demand, forked children that stay clients, and how a process goes on when daemon and keeper are both
 * gone (rescue). That the whole interface works the same in this way is tested by test_api, test_stage and test_cases, which
 * run in it too; the daemon's side is test_serve's.
 *
 * Functions named do_* run in peers (serve_util.h).
 */
#include "tests/serve_util.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "ufd/page.h"
#include "ufd/wire.h"

extern char **environ;

static struct daemon D;
static struct peer P[2];
static struct use U;
static pid_t fake; /* a process that listens instead of a daemon */

#define STRANGER 4242u /* a user who is neither root nor weightd's */

static void stop(void)
{
	if (fake > 0) {
		(void)kill(fake, SIGKILL);
		(void)waitpid(fake, NULL, 0);
	}
	fake = 0;
	daemon_stop(&D);
}

/* In a peer. */
#define want(condition)                                                                           \
	do {                                                                                      \
		if (!(condition))                                                                 \
			return peer_say("line %d: %s; %.150s", __LINE__, #condition, wd_error()); \
	} while (0)

/* ------------------------------------------------------------------ who is trusted, and what if there is nobody */

static int listen_at(const char *path)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	(void)snprintf(at.sun_path, sizeof(at.sun_path), "%s", path);
	if (fd < 0 || bind(fd, (struct sockaddr *)&at, sizeof(at)) < 0 || chmod(path, 0666) < 0 || listen(fd, 10) < 0)
		_exit(9);
	return fd;
}

enum { SILENT, NEWER, FULL, NONSENSE };

/* Answers HELLO in its way, again and again. */
static void __attribute__((noreturn)) fake_main(const char *path, uid_t uid, int kind, int ready)
{
	union wire_any *m = malloc(sizeof(*m));
	int fd;

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (!m || (uid && setuid(uid) < 0))
		_exit(9);
	fd = listen_at(path);
	(void)!write(ready, "", 1);
	for (;;) {
		struct wire_welcome w = { .version = WIRE_VERSION, .page_bytes = 4096, .extent_bytes = 4096 };
		int client = accept(fd, NULL, NULL), fds[WIRE_MAX_FDS];
		unsigned int nr;

		if (client < 0 || wire_recv(client, m, fds, &nr, -1) != 1 || m->h.type != WIRE_HELLO)
			continue;
		WIRE_INIT(w, WIRE_WELCOME, m->h.seq);
		(void)snprintf(w.release, sizeof(w.release), "9.8.7");
		if (kind == NEWER) {
			w.version = WIRE_VERSION + 1;
			w.status = -EPROTONOSUPPORT;
		} else if (kind == FULL) {
			w.status = -EUSERS;
			(void)snprintf(w.text, sizeof(w.text), "the daemon has 3 clients, its limit");
		}
		if (kind == NONSENSE)
			(void)!write(client, "what?", 5);
		else if (kind != SILENT)
			(void)wire_send(client, &w, NULL, 0, true);
	}
}

static char *fake_start(uid_t uid, int kind)
{
	char *folder = data_tmpdir(), *path = data_text("%s/s", folder), byte;
	int ready[2];

	ck_assert_int_eq(chmod(folder, 0777), 0);
	ck_assert_int_eq(pipe(ready), 0);
	(void)fflush(NULL);
	fake = fork();
	ck_assert_int_ge(fake, 0);
	if (fake == 0)
		fake_main(path, uid, kind, ready[1]);
	(void)close(ready[1]);
	ck_assert_int_eq(read(ready[0], &byte, 1), 1);
	(void)close(ready[0]);
	free(folder);
	return path;
}

/* The way daemon fails with this error and these words; left to itself the library goes on without. */
static void refused(const char *socket, int error, const char *words)
{
	struct wd_options o = { .size = sizeof(o), .way = WD_WAY_DAEMON, .socket = socket };
	cleanup_free char *path = make_model("alone.safetensors", 2, MiB, 3);
	struct wd *wd = (struct wd *)&o;
	struct wd_model *m;

	ck_fails(wd_connect(&o, &wd), error, words);
	ck_assert_ptr_eq(wd, &o);
	o.way = WD_WAY_AUTO;
	ck_works(wd_connect(&o, &wd));
	ck_assert_uint_ne(wd_way(wd), WD_WAY_DAEMON);
	m = opened(wd, path, NULL);
	ck_model(m, 3);
	wd_model_close(m);
	wd_disconnect(wd);
}

/* Bites on: the check of the peer's user; any process may make a socket in a folder that it can write to. */
START_TEST(test_a_strangers_socket_is_refused)
{
	cleanup_free char *socket = fake_start(STRANGER, SILENT), *words = data_text("%s|uid %u", socket, STRANGER);

	refused(socket, -EACCES, words);
}
END_TEST

START_TEST(test_nobody_answers)
{
	cleanup_free char *folder = data_tmpdir(), *none = data_text("%s/none", folder),
			  *dead = data_text("%s/d", folder), *file = data_text("%s/f", folder),
			  *locked = data_text("%s/locked", folder);
	pid_t pid;

	refused(none, -ENOENT, none);
	pid = fork();
	if (pid == 0)
		_exit(close(listen_at(dead)));
	ck_assert_int_eq(child_result(pid), 0);
	refused(dead, -ECONNREFUSED, dead);
	data_write_seed(file, 10, 1);
	refused(file, -ECONNREFUSED, file);
	ck_assert_int_eq(setenv("WEIGHTD_SOCKET", none, 1), 0);
	refused(NULL, -ENOENT, none);
	(void)locked;
}
END_TEST

static const struct {
	int kind, error;
	const char *words;
} strange[] = {
	{ NEWER, -EPROTONOSUPPORT, "9.8.7|protocol" },
	{ FULL, -EUSERS, "3 clients, its limit" },
	{ NONSENSE, -EPROTO, "has refused" },
	{ SILENT, -ETIMEDOUT, "does not answer" },
};

START_TEST(test_strange_daemons)
{
	cleanup_free char *socket = fake_start(0, strange[_i].kind);

	refused(socket, strange[_i].error, strange[_i].words);
}
END_TEST

/* ------------------------------------------------------------------ modes */

static int64_t do_modes(const void *arg)
{
	static const struct {
		const char *mode, *disable;
		uint32_t way, got;
	} modes[] = {
		{ "", "", WD_WAY_AUTO, WD_WAY_DAEMON },
		{ "auto", "", WD_WAY_AUTO, WD_WAY_DAEMON },
		{ "daemon", "", WD_WAY_AUTO, WD_WAY_DAEMON },
		{ "embedded", "", WD_WAY_AUTO, WD_WAY_EMBEDDED },
		{ "mmap", "", WD_WAY_AUTO, WD_WAY_MMAP },
		{ "mmap", "", WD_WAY_DAEMON, WD_WAY_DAEMON }, /* the program's choice is stronger */
		{ "daemon", "1", WD_WAY_AUTO, WD_WAY_MMAP },
		{ "", "1", WD_WAY_AUTO, WD_WAY_MMAP },
		{ "", "0", WD_WAY_AUTO, WD_WAY_DAEMON },
		{ "", "1", WD_WAY_EMBEDDED, WD_WAY_EMBEDDED },
	};
	const struct use *u = arg;

	for (size_t i = 0; i < ARRAY_SIZE(modes); i++) {
		struct wd_options o = { .size = sizeof(o), .way = modes[i].way };

		want(setenv("WEIGHTD_MODE", modes[i].mode, 1) == 0);
		want(setenv("WEIGHTD_DISABLE", modes[i].disable, 1) == 0);
		want(wd_connect(&o, &my_wd) == 0);
		if (wd_way(my_wd) != modes[i].got)
			return peer_say("mode %s, disable %s: way %s", modes[i].mode, modes[i].disable,
					wd_way_name(wd_way(my_wd)));
		want(wd_model_open(my_wd, u->path, NULL, &my_models[0]) == 0);
		if (do_check(u) < 0)
			return -1;
		if (wd_way(my_wd) == WD_WAY_DAEMON) {
			want(wd_set_budget(my_wd, GiB) == -EPERM);
			want(strstr(wd_error(), "--budget"));
		}
		(void)do_close(u);
		(void)do_disconnect(u);
	}
	return 0;
}

/* The same program, unchanged, gives the same bytes in every mode. */
START_TEST(test_modes)
{
	daemon_start(&D, "", NULL);
	U = new_model("modes.safetensors", 3, 2 * MiB + 5, 11, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_modes, &U);
	peer_leave(&P[0]);
}
END_TEST

/* A client without any privilege, and its children. */
static int64_t do_all_of_it(const void *arg)
{
	const struct use *u = arg;
	struct wd_stats st = { .size = sizeof(st) };
	unsigned char *data;

	if (do_open(u) < 0 || do_check(u) < 0)
		return -1;
	data = (unsigned char *)wd_model_tensor_at(my_models[0], 1)->data;
	data[100] ^= 1;
	want(wd_model_release(my_models[0]) == 0 && wd_sync(my_wd) == 0);
	want(wd_stats(my_wd, &st) == 0);
	want(st.resident_bytes == 0);
	want(st.written_bytes == page_bytes());
	data[100] ^= 1;
	return do_check(u);
}

START_TEST(test_unprivileged_client)
{
	daemon_start(&D, "", NULL);
	U = new_model("nobody.safetensors", 3, 2 * MiB + 5, 12, 0);
	peer_new(&P[0], NOBODY);
	must_do(&P[0], do_all_of_it, &U);
	must_do(&P[0], do_fork, &U);
	must_tool("drop --all");
	shared_words()[1] = 1;
	must_do(&P[0], do_fork_end, &U);
	peer_leave(&P[0]);
}
END_TEST

/* ------------------------------------------------------------------ a daemon on demand */

#define STARTERS 6

/* Below the guard: six processes that want a daemon at the same moment. */
static void start_on_demand(void)
{
	struct wd_options o = { .size = sizeof(o), .way = WD_WAY_DAEMON, .flags = WD_AUTOSTART };
	cleanup_free char *path = data_text("%s:%s", getenv("OUT") ? getenv("OUT") : ".out", getenv("PATH"));
	_Atomic uint64_t *w = shared_words();
	pid_t pids[STARTERS];

	(void)setenv("PATH", path, 1);

	for (int i = 0; i < STARTERS; i++) {
		pids[i] = fork();
		if (pids[i] == 0) {
			struct wd *wd;

			if (i % 2) {
				o.flags = 0;
				(void)setenv("WEIGHTD_AUTOSTART", "1", 1);
			}
			if (wd_connect(&o, &wd) < 0)
				(void)fprintf(stderr, "%s\n", wd_error());
			else if (wd_way(wd) == WD_WAY_DAEMON)
				(void)atomic_fetch_add(&w[2], 1);
			_exit(0);
		}
	}
	for (int i = 0; i < STARTERS; i++)
		(void)waitpid(pids[i], NULL, 0);
	w[1] = 1;
	for (;;)
		(void)pause(); /* the guard ends this, too */
}

START_TEST(test_daemon_on_demand)
{
	pid_t pids[64];
	uint64_t end;

	daemon_start(&D, "", start_on_demand);
	for (end = now_ms() + 20000; !shared_words()[1] && now_ms() < end;)
		(void)sched_yield();
	ck_assert_uint_eq(shared_words()[2], STARTERS);
	/* One daemon and its keeper (and the process that has started them). */
	ck_assert_uint_le(daemon_family(&D, pids, ARRAY_SIZE(pids)), 3);
	U = new_model("demand.safetensors", 2, 2 * MiB, 13, 0);
	for (int i = 0; i < 2; i++) {
		peer_new(&P[i], getuid());
		must_do(&P[i], do_open_and_check, &U);
	}
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ fork */

static int64_t child_end(pid_t pid)
{
	int r = pid < 0 ? 1 : child_result(pid);

	return r == 0 ? 0 : peer_say("a child ended with %d", r);
}

/* In a child of a peer: goes on as a client, and what it writes is its own. */
static int child_of_client(const struct use *u, uint32_t way, int depth)
{
	unsigned char *data = (unsigned char *)wd_model_tensor_at(my_models[0], 1)->data;
	struct wd_stats st = { .size = sizeof(st) };
	struct wd_model *again;
	pid_t pid;

	limit_child(40);
	if (wd_way(my_wd) != way)
		return 1;
	if (data[7] != (unsigned char)(0xA0 + depth)) /* what its parent wrote */
		return 2;
	data[7] = (unsigned char)(0xA0 + depth + 1);
	for (size_t i = 0; i < wd_model_nr_tensors(my_models[0]); i++)
		if (i != 1 && !tensor_is_right(wd_model_tensor_at(my_models[0], i), u->seed))
			return 3;
	if (wd_model_release(my_models[0]) < 0 || wd_sync(my_wd) < 0 || wd_stats(my_wd, &st) < 0 ||
	    !tensor_is_right(wd_model_tensor_at(my_models[0], 0), u->seed))
		return 4;
	if (way == WD_WAY_DAEMON && st.written_bytes != page_bytes())
		return 5;
	if (wd_model_open(my_wd, u->path, NULL, &again) < 0)
		return 6;
	wd_model_close(again);
	if (depth == 3)
		return 0;
	pid = fork();
	if (pid == 0)
		_exit(child_of_client(u, way, depth + 1));
	if (child_result(pid) != 0)
		return 7;
	return data[7] == 0xA0 + depth + 1 ? 0 : 8; /* not what its child wrote */
}

static int64_t do_generations(const void *arg)
{
	const struct use *u = arg;
	unsigned char *data;
	pid_t pid;

	if (do_open(u) < 0)
		return -1;
	data = (unsigned char *)wd_model_tensor_at(my_models[0], 1)->data;
	want(tensor_is_right(wd_model_tensor_at(my_models[0], 2), u->seed));
	data[7] = 0xA0;
	pid = fork();
	if (pid == 0)
		_exit(child_of_client(u, (uint32_t)u->value, 0));
	if (child_end(pid) < 0)
		return -1;
	want(data[7] == 0xA0);
	return 0;
}

static void no_event_fork(void)
{
	pager_hooks.no_event_fork = true;
}

/* A child is a client like its parent, whether the daemon is told of it by an event or (`_i` 1) finds out from the child
 * alone. Bites on: CLAIM, and the registering anew. */
START_TEST(test_generations)
{
	daemon_start(&D, "", _i ? no_event_fork : NULL);
	U = new_model("generations.safetensors", 4, 2 * MiB + 8, 14, 0);
	U.value = WD_WAY_DAEMON;
	for (int i = 0; i < 2; i++) {
		peer_new(&P[i], i ? NOBODY : getuid());
		must_do(&P[i], do_generations, &U);
	}
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* Nobody to ask: the child maps the files, as one of an embedded pager does. */
static int64_t do_fork_without_daemon(const void *arg)
{
	const struct use *u = arg;
	unsigned char *data = (unsigned char *)wd_model_tensor_at(my_models[0], 1)->data;
	pid_t pid;

	data[7] = 0xA0;
	pid = fork();
	if (pid == 0)
		_exit(child_of_client(u, WD_WAY_MMAP, 0));
	return child_end(pid);
}

START_TEST(test_fork_when_all_are_gone)
{
	daemon_start(&D, "", NULL);
	U = new_model("alone.safetensors", 4, 2 * MiB + 8, 15, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &U);
	daemon_stop(&D);
	must_do(&P[0], do_fork_without_daemon, &U);
	peer_leave(&P[0]);
}
END_TEST

static _Atomic bool stop_threads;
static _Atomic uint64_t nr_wrong, nr_looks;

static void *look(void *arg)
{
	const struct use *u = arg;
	struct wd_model *m = my_models[0];
	uint64_t state = (uintptr_t)&u;

	while (!stop_threads) {
		const struct wd_tensor *t = wd_model_tensor_at(m, rnd(&state) % wd_model_nr_tensors(m));
		uint64_t at = rnd(&state) % (t->nbytes - 8);

		nr_wrong += data_check((const char *)t->data + at, 8, u->seed, t->file_offset + at) != -1;
		nr_looks++;
	}
	return NULL;
}

/* Forks while other threads read, release and open: no lock of theirs is needed in the child. */
static void *come_and_go(void *arg)
{
	const struct use *u = arg;

	while (!stop_threads) {
		struct wd_model *m;

		(void)wd_model_release(my_models[0]);
		if (wd_model_open(my_wd, u->path + 256, NULL, &m) == 0) {
			nr_wrong += !tensor_is_right(wd_model_tensor_at(m, 0), u->seed);
			wd_model_close(m);
		}
	}
	return NULL;
}

static int64_t do_fork_among_threads(const void *arg)
{
	struct use u = *(const struct use *)arg;
	pthread_t threads[3];
	int64_t r = 0;

	if (do_open(&u) < 0)
		return -1;
	(void)snprintf(u.path + 256, sizeof(u.path) - 256, "%s", "other.safetensors");
	want(chdir(test_dir) == 0);
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		want(pthread_create(&threads[i], NULL, i == 2 ? come_and_go : look, &u) == 0);
	for (int i = 0; i < 40 && r == 0; i++) {
		pid_t pid = fork();

		if (pid == 0) {
			limit_child(40);
			_exit(wd_way(my_wd) != WD_WAY_DAEMON ? 1 : do_check(&u) < 0 ? 2 : 0);
		}
		r = child_end(pid);
	}
	stop_threads = true;
	for (size_t i = 0; i < ARRAY_SIZE(threads); i++)
		(void)pthread_join(threads[i], NULL);
	if (r < 0)
		return r;
	want(nr_wrong == 0 && nr_looks > 0);
	return do_check(&u);
}

START_TEST(test_fork_among_threads)
{
	daemon_start(&D, "", NULL);
	U = new_model("threads.safetensors", 6, 2 * MiB + 8, 16, 0);
	(void)new_model("other.safetensors", 2, MiB, 16, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_fork_among_threads, &U);
	peer_leave(&P[0]);
}
END_TEST

/* Processes that run another program need nothing, and disturb nothing. */
static int64_t do_spawn(const void *arg)
{
	char *words[] = { "true", NULL };
	const struct use *u = arg;
	pid_t pid;

	if (do_open(u) < 0)
		return -1;
	for (int i = 0; i < 10; i++) {
		want(posix_spawnp(&pid, "true", NULL, NULL, words, environ) == 0 && child_result(pid) == 0);
		pid = vfork();
		if (pid == 0) {
			(void)execvp("true", words);
			_exit(9);
		}
		want(child_result(pid) == 0);
		want(system("true") == 0);
	}
	return do_check(u);
}

START_TEST(test_exec_and_spawn)
{
	daemon_start(&D, "", NULL);
	U = new_model("spawn.safetensors", 4, 2 * MiB + 8, 17, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_spawn, &U);
	peer_leave(&P[0]);
}
END_TEST

/* ------------------------------------------------------------------ rescue: daemon and keeper are both gone */

/* In every third page of the first quarter a byte is written; it and the second are read, the other half not touched. */
static int64_t do_use_half(const void *arg)
{
	const struct use *u = arg;
	size_t nr;

	if (do_open(u) < 0)
		return -1;
	nr = wd_model_nr_tensors(my_models[0]);
	for (size_t i = 0; i < nr / 2; i++) {
		const struct wd_tensor *t = wd_model_tensor_at(my_models[0], i);

		want(tensor_is_right(t, u->seed));
		for (uint64_t at = 0; i < nr / 4 && at < t->nbytes; at += 3 * page_bytes())
			((unsigned char *)t->data)[at] ^= 0xFF;
	}
	return 0;
}

static int64_t do_check_half(const void *arg)
{
	const struct use *u = arg;
	size_t nr = wd_model_nr_tensors(my_models[0]);
	pid_t pid;

	for (size_t i = 0; i < nr / 4; i++) {
		const struct wd_tensor *t = wd_model_tensor_at(my_models[0], i);

		for (uint64_t at = 0; at < t->nbytes; at += 3 * page_bytes())
			((unsigned char *)t->data)[at] ^= 0xFF; /* a lost write is not what it was now */
	}
	if (do_check(u) < 0)
		return -1;
	want(wd_way(my_wd) == WD_WAY_MMAP);
	/* What was mapped when the daemon went is still the arena's, and armed: a child has nobody who opens it. */
	pid = fork();
	if (pid == 0) {
		limit_child(20);
		_exit(do_check(u) < 0 ? 1 : 0);
	}
	return child_end(pid);
}

/* What works in way mmap works now. */
static int64_t do_go_on(const void *arg)
{
	const struct use *u = arg;
	struct wd_model *again;
	struct wd_job *job;
	const struct wd_tensor *t = wd_model_tensor_at(my_models[0], 0);
	unsigned char *page = (unsigned char *)(((uintptr_t)t->data + page_bytes()) & ~(page_bytes() - 1));
	pid_t pid;

	want(wd_stage_begin(my_wd, "afterwards") == 0 && wd_stage_end(my_wd) == 0);
	want(wd_model_release(my_models[0]) == 0 && wd_sync(my_wd) == 0);
	want(wd_populate(my_models[0], NULL, &job) == 0 && wd_job_wait(job, 30000) == 0);
	wd_job_free(job);
	want(wd_model_open(my_wd, u->path, NULL, &again) == 0);
	wd_model_close(again);
	/* What the program gives back itself comes back as well, also where it had written. (Data at odd places is copied.) */
	for (int i = 0; i < 8 && !u->value2; i++)
		want(madvise(page + (uint64_t)i * page_bytes(), page_bytes(), MADV_DONTNEED) == 0);
	if (do_check(u) < 0)
		return -1;
	pid = fork();
	if (pid == 0)
		_exit(do_check(u) < 0 ? 1 : 0);
	return child_end(pid);
}

/* The second time in small steps by a program that has data at odd places: these cannot be mapped and are read. */
START_TEST(test_rescue)
{
	daemon_start(&D, "", NULL);
	U = new_model("rescue.safetensors", 8, 3 * MiB + 8, 18, 0);
	if (_i) {
		struct data_tensor t[8];

		for (int i = 0; i < 8; i++)
			t[i] = (struct data_tensor){ .name = (const char *[]){ "a", "b", "c", "d", "e", "f", "g",
									       "h" }[i],
						     .dtype = i == 3 ? "U8" : "F32",
						     .ndim = 1,
						     .shape = { i == 3 ? 13 : 700000 } };
		(void)data_write_safetensors(U.path, t, 8,
					     &(struct data_opts){ .seed = 18, .align = 64, .residue = 37 });
		U.value2 = 1;
	}
	peer_new(&P[0], getuid());
	must_do(&P[0], do_use_half, &U);
	daemon_stop(&D);
	must_do(&P[0], do_check_half, &U);
	must_do(&P[0], do_go_on, &U);
	peer_leave(&P[0]);
}
END_TEST

/* Threads write all the time, each to pages of its own, and give pages back, so that there always are some that are
 * written to for the first time. None of these writes is lost when the ground changes below them. */
#define WRITERS 3
static _Atomic uint64_t nr_lost, nr_writes;

static void *write_words(void *arg)
{
	uint64_t id = (uintptr_t)arg, state = id + 1;
	struct wd_model *m = my_models[0];
	size_t nr_pages = wd_model_nr_tensors(m) * (2 * MiB / page_bytes() - 1);
	uint64_t *last = calloc(nr_pages, sizeof(*last));

	for (uint64_t n = 1; last && !stop_threads; n++) {
		uint64_t which = rnd(&state) % (nr_pages / WRITERS) * WRITERS + id;
		const struct wd_tensor *t = wd_model_tensor_at(m, which % wd_model_nr_tensors(m));
		uint64_t at = which / wd_model_nr_tensors(m) * page_bytes();
		unsigned char *page =
			(unsigned char *)(((uintptr_t)t->data + page_bytes() - 1) & ~(page_bytes() - 1)) + at;
		volatile uint64_t *word = (volatile uint64_t *)(page + 2048);

		if (last[which]) {
			nr_lost += *word != last[which];
			last[which] = 0;
			(void)madvise(page, page_bytes(), MADV_DONTNEED);
		} else {
			*word = last[which] = n << 8 | 0x80;
			nr_writes++;
		}
	}
	for (size_t i = 0; last && i < nr_pages; i++) {
		const struct wd_tensor *t = wd_model_tensor_at(m, i % wd_model_nr_tensors(m));
		unsigned char *page = (unsigned char *)(((uintptr_t)t->data + page_bytes() - 1) & ~(page_bytes() - 1));

		if (last[i])
			nr_lost += *(volatile uint64_t *)(page + i / wd_model_nr_tensors(m) * page_bytes() + 2048) !=
				   last[i];
	}
	free(last);
	return NULL;
}

static int64_t do_write_until_told(const void *arg)
{
	pthread_t threads[WRITERS];
	_Atomic uint64_t *w = shared_words();

	if (do_open(arg) < 0 || do_check(arg) < 0)
		return -1;
	for (uintptr_t i = 0; i < WRITERS; i++)
		want(pthread_create(&threads[i], NULL, write_words, (void *)i) == 0);
	w[1] = 1;
	while (!w[2])
		(void)sched_yield();
	while (wd_way(my_wd) != WD_WAY_MMAP)
		(void)sched_yield();
	for (uint64_t after = nr_writes + 10000; nr_writes < after;)
		(void)sched_yield();
	stop_threads = true;
	for (int i = 0; i < WRITERS; i++)
		(void)pthread_join(threads[i], NULL);
	want(nr_lost == 0);
	return 0;
}

/* Bites on: arming before looking at the page tables. */
START_TEST(test_rescue_loses_no_write)
{
	daemon_start(&D, "", NULL);
	U = new_model("writes.safetensors", 8, 2 * MiB, 19, 0);
	peer_new(&P[0], getuid());
	peer_begin(&P[0], "do_write_until_told", do_write_until_told, &U, sizeof(U));
	while (!shared_words()[1] && !peer_has_ended(&P[0]))
		(void)sched_yield();
	(void)usleep(1000 * (useconds_t)(_i * 7)); /* (another moment each time; nothing is waited for) */
	daemon_stop(&D);
	shared_words()[2] = 1;
	must_end(&P[0]);
	peer_leave(&P[0]);
}
END_TEST

/* The file is another one by now: what was read stays good, what was not is an error with a reason, never other bytes. */
static int64_t do_check_changed(const void *arg)
{
	const struct use *u = arg;
	struct wd_model *m = my_models[0];
	size_t nr = wd_model_nr_tensors(m);
	uint64_t good = 0, bad = 0;

	catch_signals();
	for (size_t i = 0; i < nr; i++) {
		const struct wd_tensor *t = wd_model_tensor_at(m, i);

		for (uint64_t at = 0; at < t->nbytes; at += page_bytes()) {
			const unsigned char *p = (const unsigned char *)t->data + at;
			struct caught caught;
			unsigned char byte;

			if (!touch(p, &byte, &caught)) {
				const char *reason = wd_fault_reason(p);

				want(reason && strstr(reason, "changed"));
				bad++;
				continue;
			}
			if (data_check(&byte, 1, u->seed, t->file_offset + at) != -1)
				return peer_say("tensor %zu: byte %llu is %02x", i, (unsigned long long)at, byte);
			good++;
		}
	}
	want(good >= MiB / page_bytes() && bad >= MiB / page_bytes());
	return 0;
}

static int64_t do_read_some(const void *arg)
{
	const struct use *u = arg;

	if (do_open(u) < 0)
		return -1;
	want(tensor_is_right(wd_model_tensor_at(my_models[0], 1), u->seed));
	return 0;
}

START_TEST(test_rescue_of_a_changed_file)
{
	struct timespec times[2] = { { .tv_nsec = UTIME_OMIT }, { .tv_sec = 1000 } };

	daemon_start(&D, "", NULL);
	U = new_model("changed.safetensors", 8, 3 * MiB + 8, 20, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_read_some, &U);
	ck_assert_int_eq(tfile_write(U.path, 8 * MiB, 4 * MiB, 21), 0);
	ck_assert_int_eq(utimensat(AT_FDCWD, U.path, times, 0), 0);
	daemon_stop(&D);
	must_do(&P[0], do_check_changed, &U);
	peer_leave(&P[0]);
}
END_TEST

/* ------------------------------------------------------------------ other people's descriptors */

/* A program that closes all descriptors and opens its own: under the numbers that were the library's. */
static int64_t do_reuse_descriptors(const void *arg)
{
	const struct use *u = arg;
	struct pollfd ends[64];
	bool before[256];
	int mine;

	for (int fd = 0; fd < 256; fd++)
		before[fd] = fcntl(fd, F_GETFD) >= 0;
	if (do_open(u) < 0)
		return -1;
	for (int fd = 0; fd < 256; fd++)
		if (!before[fd])
			(void)close(fd);
	for (mine = 0; mine < 64; mine += 2) {
		int pair[2];

		want(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
		for (int i = 0; i < 2; i++)
			ends[mine + i] = (struct pollfd){ .fd = pair[i], .events = POLLIN };
	}
	/* Longer than the library is silent. */
	want(poll(ends, 64, 2600) == 0);
	want(do_check(u) == 0);
	want(wd_model_release(my_models[0]) == 0);
	want(poll(ends, 64, 0) == 0);
	/* (The model's file is open under one of these numbers as well, as far as it knows: it stays.) */
	my_models[0] = NULL;
	my_wd = NULL;
	return 0;
}

/* Bites on: looking whose socket it is before each use. */
START_TEST(test_descriptors_of_others_are_left_alone)
{
	daemon_start(&D, "", NULL);
	U = new_model("reuse.safetensors", 4, 2 * MiB, 22, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_reuse_descriptors, &U);
	peer_leave(&P[0]);
}
END_TEST

/* ------------------------------------------------------------------ populate */

/* More ranges than one message holds. */
static int64_t do_large_job(const void *arg)
{
	const struct use *u = arg;
	struct pager_config config = { .way = WAY_DAEMON };
	struct tfile f = { .seed = u->seed };
	struct job_range *ranges = calloc(2500, sizeof(*ranges));
	uint64_t done, total;
	struct pager_job *job;
	struct pager *p;
	struct source *s;
	struct view *v;
	struct wd_err err;
	int state;

	want(ranges && pager_new(&config, &p, &err) == 0);
	(void)snprintf(f.path, sizeof(f.path), "%.255s", u->path);
	f.size = u->value;
	want(view_try(p, &f, MiB, &s, &v, &err) == 0);
	for (size_t i = 0; i < 2500; i++)
		ranges[i] = (struct job_range){ v, i * 7 % (f.size / extent()) * extent(), 1 };
	want(pager_job_new(p, ranges, 2500, false, &job) == 0);
	want(pager_job_wait(job, 30000) == 0);
	pager_job_progress(job, &done, &total, &state);
	want(state == 1 && done == total && total == 2500 * extent());
	(void)pager_job_free(job);
	want(resident(p) >= f.size - extent());
	want(wrong_words(view_base(v), &f, 0, f.size, 8) == 0);
	/* One that is cancelled at once. */
	(void)view_drop(v);
	want(pager_sync(p, 20000) == 0 && resident(p) == 0);
	want(pager_job_new(p, ranges, 2500, false, &job) == 0);
	pager_job_cancel(job);
	want(pager_job_wait(job, 30000) == -ECANCELED || pager_job_wait(job, 0) == 0);
	(void)pager_job_free(job);
	free(ranges);
	(void)view_unref(v);
	(void)source_unref(s);
	(void)pager_unref(p);
	return 0;
}

START_TEST(test_large_job)
{
	struct tfile f;

	daemon_start(&D, "", NULL);
	tfile_make(&f, "job", 24 * extent(), 23);
	U = (struct use){ .seed = 23, .value = f.size };
	(void)snprintf(U.path, sizeof(U.path), "%s", f.path);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_large_job, &U);
	peer_leave(&P[0]);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("client");
	TCase *tc = folder_case(s, "trust", 60);

	tcase_add_checked_fixture(tc, NULL, stop);
	if (geteuid() == 0)
		tcase_add_test(tc, test_a_strangers_socket_is_refused);
	else
		skip("test_a_strangers_socket_is_refused", "only root can be another user");
	tcase_add_test(tc, test_nobody_answers);
	tcase_add_loop_test(tc, test_strange_daemons, 0, (int)ARRAY_SIZE(strange));

	tc = folder_case(s, "modes", 60);
	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_test(tc, test_modes);
	tcase_add_test(tc, test_daemon_on_demand);
	tcase_add_test(tc, test_large_job);
	tcase_add_test(tc, test_descriptors_of_others_are_left_alone);
	if (geteuid() == 0)
		tcase_add_test(tc, test_unprivileged_client);
	else
		skip("test_unprivileged_client", "only root can be another user");

	tc = folder_case(s, "fork", 120);
	tcase_add_checked_fixture(tc, NULL, stop);
	if (geteuid() == 0)
		tcase_add_loop_test(tc, test_generations, 0, 2);
	else
		skip("test_generations", "only root can be another user");
	tcase_add_test(tc, test_fork_when_all_are_gone);
	tcase_add_test(tc, test_fork_among_threads);
	tcase_add_test(tc, test_exec_and_spawn);

	tc = folder_case(s, "rescue", 120);
	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_loop_test(tc, test_rescue, 0, 2);
	tcase_add_loop_test(tc, test_rescue_loses_no_write, 0, 5);
	tcase_add_test(tc, test_rescue_of_a_changed_file);
	return run_suite(s);
}
