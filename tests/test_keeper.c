/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keeper: what was put survives whoever put it, in every order of deaths; a daemon is started again, or let in, or
 * asked to let go; nobody else is let in; nothing named stays behind.
 *
 * Daemons here are children of the test that use ufd/keeper.h and nothing else, or (where the keeper starts them) this
 * program again, as `test_keeper --daemon HOW SOCKET FIFO`. They tell the test what happens by a pipe or a FIFO. All
 * that a test starts ends up below it, or below the program when the test fails (PR_SET_CHILD_SUBREAPER), and is killed
 * there.
 */
#include "tests/pager_util.h"
#include "ufd/keeper.h"

#include <dirent.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fuse.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>

#define HANG_MS 30000 /* nothing takes so long unless it is stuck */
#define NOBODY 65534u

static char folder[200], sock[220], name[240];

/* ---- processes */

/* Kills all children, and theirs, which become ours. */
static unsigned int end_children(void)
{
	unsigned int nr = 0;

	for (;;) {
		cleanup_fclose FILE *f = fopen("/proc/thread-self/children", "re");
		pid_t pid;
		int r;

		if (!f)
			abort();
		while (fscanf(f, "%d", &pid) == 1)
			(void)kill(pid, SIGKILL);
		do
			r = waitpid(-1, NULL, 0);
		while (r < 0 && errno == EINTR);
		if (r < 0)
			return nr;
		nr++;
	}
}

static void begin(void)
{
	ck_assert_int_eq(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
	(void)snprintf(folder, sizeof(folder), "%s", test_path("keeper-XXXXXX"));
	ck_assert(mkdtemp(folder) != NULL);
	ck_assert_int_eq(chmod(folder, 0755), 0);
	(void)snprintf(sock, sizeof(sock), "%s/s", folder);
	(void)snprintf(name, sizeof(name), "%s.keeper", sock);
}

static void finish(void)
{
	(void)end_children();
}

struct child {
	pid_t pid;
	int out;
};

static void say(int out, uint64_t word)
{
	if (write(out, &word, sizeof(word)) != sizeof(word))
		_exit(90);
}

static uint64_t hear(int in)
{
	struct pollfd p = { .fd = in, .events = POLLIN };
	uint64_t word;

	ck_assert_msg(poll(&p, 1, HANG_MS) == 1, "nothing is heard");
	ck_assert_msg(read(in, &word, sizeof(word)) == sizeof(word), "it ended before it said so");
	return word;
}

static struct child start(void (*fn)(int out, void *arg), void *arg)
{
	struct child c;
	int fd[2];

	ck_assert_int_eq(pipe2(fd, O_CLOEXEC), 0);
	c.pid = fork();
	ck_assert_int_ge(c.pid, 0);
	if (c.pid == 0) {
		(void)close(fd[0]);
		fn(fd[1], arg);
		_exit(0);
	}
	(void)close(fd[1]);
	c.out = fd[0];
	return c;
}

/* Return: the signal that ended it, or its status + 1000. */
static int ended(struct child *c)
{
	int status;

	ck_assert_int_eq(waitpid(c->pid, &status, 0), c->pid);
	(void)close(c->out);
	return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status) + 1000;
}

static void must_end(struct child *c, int how)
{
	ck_assert_int_eq(kill(c->pid, SIGKILL), 0);
	ck_assert_int_eq(ended(c), how);
}

static bool readable(int fd, int timeout_ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };

	return poll(&p, 1, timeout_ms) == 1;
}

/* A keeper is a child of ours as soon as who started it is dead; or a stranger's: pidfd. */
static void must_be_gone(pid_t pid)
{
	int fd = (int)syscall(SYS_pidfd_open, pid, 0);

	if (fd < 0) {
		ck_assert_int_eq(errno, ESRCH);
		return;
	}
	ck_assert_msg(readable(fd, HANG_MS), "the keeper goes on");
	(void)close(fd);
}

/* Waits until the process is in that state, as /proc/PID/stat has it. */
static void wait_for_state(pid_t pid, char want)
{
	char path[40], line[200] = "";

	(void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	for (;;) {
		cleanup_fclose FILE *f = fopen(path, "re");
		const char *state;

		ck_assert(f && fgets(line, sizeof(line), f));
		state = strrchr(line, ')');
		if (state && state[2] == want)
			return;
		(void)sched_yield();
	}
}

static void stop_it(pid_t pid)
{
	ck_assert_int_eq(kill(pid, SIGSTOP), 0);
	wait_for_state(pid, 'T');
}

static size_t nr_names(void)
{
	DIR *d = opendir(folder);
	size_t nr = 0;

	ck_assert(d != NULL);
	while (readdir(d))
		nr++;
	(void)closedir(d);
	return nr - 2;
}

static bool is_there(const char *path)
{
	struct stat st;

	return lstat(path, &st) == 0;
}

/* ---- objects */

static int memfd_of(const char *text)
{
	int fd = memfd_create("test", MFD_CLOEXEC);

	if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
		abort();
	return fd;
}

static bool memfd_is(int fd, const char *text)
{
	char buf[64] = "";

	return pread(fd, buf, sizeof(buf) - 1, 0) == (ssize_t)strlen(text) && strcmp(buf, text) == 0;
}

struct found {
	size_t nr, size;
	struct one {
		uint64_t key;
		unsigned char blob[64];
		size_t nbytes;
		unsigned int nr_fds;
		int fds[KEEPER_FDS];
	} * list;
};

static int find_one(void *arg, uint64_t key, const void *blob, size_t nbytes, int fds[static KEEPER_FDS],
		    unsigned int nr_fds)
{
	struct found *f = arg;
	struct one *o;

	if (f->nr == f->size) {
		f->size = f->size ? 2 * f->size : 64;
		f->list = realloc(f->list, f->size * sizeof(*f->list));
		if (!f->list)
			abort();
	}
	o = &f->list[f->nr++];
	*o = (struct one){ .key = key, .nbytes = nbytes, .nr_fds = nr_fds };
	memcpy(o->blob, blob, MIN(nbytes, sizeof(o->blob)));
	memcpy(o->fds, fds, sizeof(o->fds));
	return 0;
}

static struct found all_of(struct keeper *k)
{
	struct found f = { 0 };

	ck_assert_int_eq(keeper_list(k, find_one, &f), 0);
	return f;
}

static void forget(struct found *f)
{
	for (size_t i = 0; i < f->nr; i++)
		for (unsigned int j = 0; j < KEEPER_FDS; j++)
			if (f->list[i].fds[j] >= 0)
				(void)close(f->list[i].fds[j]);
	free(f->list);
	*f = (struct found){ 0 };
}

static struct keeper *must_start(char *const *argv)
{
	struct wd_err err = { "" };
	struct keeper *k;
	int r = keeper_start(sock, argv, &k, &err);

	if (r < 0)
		(void)fprintf(stderr, "keeper_start: %d %s\n", r, err.text);
	if (r < 0)
		abort();
	return k;
}

static struct keeper *must_adopt(bool take_over)
{
	struct wd_err err = { "" };
	struct keeper *k = NULL;
	int r = keeper_adopt(sock, take_over, &k, NULL, &err);

	ck_assert_msg(r == 0, "keeper_adopt: %d %s", r, err.text);
	return k;
}

static void bye(struct keeper *k)
{
	int pid = keeper_pid(k);

	keeper_bye(k);
	(void)keeper_free(k);
	must_be_gone(pid);
	ck_assert_uint_eq(nr_names(), 0);
}

/* ------------------------------------------------------------------ a map of objects */

START_TEST(test_objects_come_back_as_they_were_put)
{
	struct keeper *k = must_start(NULL);
	unsigned char blob[KEEPER_BLOB];
	int fds[KEEPER_FDS], gone[2], pair[2];
	struct found f;

	/* put in no order; from none to all descriptors, from no byte to all */
	for (size_t i = 0; i < sizeof(blob); i++)
		blob[i] = (unsigned char)(i * 7);
	for (unsigned int i = 0; i < KEEPER_FDS; i++) {
		char text[16];

		(void)snprintf(text, sizeof(text), "text %u", i);
		fds[i] = memfd_of(text);
	}
	ck_assert_int_eq(keeper_put(k, KEEP_KEY(KEEP_SESSION, 5), NULL, 0, fds, 2), 0);
	ck_assert_int_eq(keeper_put(k, KEEP_KEY(KEEP_VIEW, 9), blob, 33, fds, KEEPER_FDS), 0);
	ck_assert_int_eq(keeper_put(k, KEEP_KEY(KEEP_MAP, (1ull << 56) - 1), blob, sizeof(blob), NULL, 0), 0);
	ck_assert_int_eq(keeper_put(k, KEEP_KEY(KEEP_VIEW, 2), blob, 1, (int[]){ fds[3], -1, -1 }, 3), 0);
	ck_assert_int_eq(keeper_put(k, KEEP_KEY(KEEP_LISTEN, 0), NULL, 0, NULL, 0), 0);
	/* what is too much is refused, and changes nothing */
	ck_assert_int_eq(keeper_put(k, 1, blob, sizeof(blob) + 1, NULL, 0), -EINVAL);
	ck_assert_int_eq(keeper_put(k, 1, NULL, 0, fds, KEEPER_FDS + 1), -EINVAL);
	ck_assert_int_eq(keeper_put(k, UINT64_MAX, NULL, 0, NULL, 0), -EINVAL);
	ck_assert_int_eq(keeper_put(k, 1, NULL, 0, (int[]){ -1, fds[0] }, 2), -EBADF);
	for (unsigned int i = 0; i < KEEPER_FDS; i++)
		(void)close(fds[i]);

	f = all_of(k);
	ck_assert_uint_eq(f.nr, 5);
	ck_assert_uint_eq(f.list[0].key, KEEP_KEY(KEEP_LISTEN, 0));
	ck_assert_uint_eq(f.list[1].key, KEEP_KEY(KEEP_VIEW, 2));
	ck_assert_uint_eq(f.list[2].key, KEEP_KEY(KEEP_VIEW, 9));
	ck_assert_uint_eq(f.list[3].key, KEEP_KEY(KEEP_SESSION, 5));
	ck_assert_uint_eq(f.list[4].key, KEEP_KEY(KEEP_MAP, (1ull << 56) - 1));
	for (unsigned int i = 0; i < 5; i++) {
		const unsigned int nr_fds[] = { 0, 1, 4, 2, 0 };
		const size_t nbytes[] = { 0, 1, 33, 0, KEEPER_BLOB };

		ck_assert_uint_eq(f.list[i].nr_fds, nr_fds[i]);
		ck_assert_uint_eq(f.list[i].nbytes, nbytes[i]);
		ck_assert_mem_eq(f.list[i].blob, blob, MIN(nbytes[i], sizeof(f.list[i].blob)));
		for (unsigned int j = 0; j < KEEPER_FDS; j++) {
			char text[16];

			(void)snprintf(text, sizeof(text), "text %u", i == 1 ? 3 : j);
			ck_assert_int_eq(f.list[i].fds[j] >= 0, j < nr_fds[i]);
			ck_assert(j >= nr_fds[i] || memfd_is(f.list[i].fds[j], text));
			ck_assert(j >= nr_fds[i] || fcntl(f.list[i].fds[j], F_GETFD) == FD_CLOEXEC);
		}
	}
	forget(&f);

	ck_assert_int_eq(keeper_list_of(k, KEEP_VIEW, find_one, &f), 0);
	ck_assert_uint_eq(f.nr, 2);
	ck_assert_uint_eq(f.list[0].key, KEEP_KEY(KEEP_VIEW, 2));
	ck_assert_uint_eq(f.list[1].key, KEEP_KEY(KEEP_VIEW, 9));
	forget(&f);
	ck_assert_int_eq(keeper_list_of(k, KEEP_FS, find_one, &f), 0);
	ck_assert_uint_eq(f.nr, 0);

	/* replaced and deleted: the keeper lets go of what it had */
	ck_assert_int_eq(pipe2(gone, O_CLOEXEC), 0);
	ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	ck_assert_int_eq(keeper_put(k, 77, "a", 1, &gone[1], 1), 0);
	ck_assert_int_eq(keeper_put(k, 78, "b", 1, &pair[1], 1), 0);
	(void)close(gone[1]);
	(void)close(pair[1]);
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 7);
	forget(&f);
	ck_assert(!readable(gone[0], 0));
	ck_assert(!readable(pair[0], 0));
	ck_assert_int_eq(keeper_put(k, 77, "other", 5, NULL, 0), 0);
	ck_assert_int_eq(keeper_del(k, 78), 0);
	ck_assert_int_eq(keeper_del(k, 79), 0); /* never was there */
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 6);
	ck_assert_uint_eq(f.list[0].key, 77);
	ck_assert_uint_eq(f.list[0].nbytes, 5);
	ck_assert_mem_eq(f.list[0].blob, "other", 5);
	forget(&f);
	ck_assert(readable(gone[0], HANG_MS));
	ck_assert(readable(pair[0], HANG_MS));
	(void)close(gone[0]);
	(void)close(pair[0]);
	bye(k);
}
END_TEST

static int stop_at_third(void *arg, uint64_t key, const void *blob, size_t nbytes, int fds[static KEEPER_FDS],
			 unsigned int nr_fds)
{
	(void)blob;
	(void)nbytes;
	(void)fds;
	(void)nr_fds;
	return ++*(int *)arg == 3 ? (int)key : 0;
}

#define MANY 20000u

static size_t many_bytes(uint64_t key)
{
	return file_word(3, key * 8) % 64;
}

/* A third of all put twice, a quarter deleted: then what another daemon finds is what a plain array says. */
static void put_many(int out, void *arg)
{
	struct keeper *k = must_start(NULL);
	const uint64_t *order = arg;

	for (unsigned int i = 0; i < MANY; i++) {
		unsigned char blob[64];
		uint64_t key = order[i];
		int r = 0;

		memset(blob, (int)(key & 0xFF), sizeof(blob));
		if (key % 3 == 0)
			r = keeper_put(k, key, "old", 3, NULL, 0);
		if (r == 0)
			r = keeper_put(k, key, blob, many_bytes(key), key % 100 == 0 ? (int[]){ out } : NULL,
				       key % 100 == 0);
		if (r < 0)
			_exit(1);
	}
	for (uint64_t key = 0; key < MANY; key += 4)
		if (keeper_del(k, order[key]) < 0)
			_exit(2);
	(void)kill(getpid(), SIGKILL);
}

START_TEST(test_twenty_thousand_objects)
{
	static uint64_t order[MANY];
	static bool deleted[MANY];
	struct child c;
	struct keeper *k;
	struct found f;
	size_t at = 0;
	int nr = 0;

	for (uint64_t i = 0; i < MANY; i++)
		order[i] = i;
	for (uint64_t i = MANY - 1; i > 0; i--) {
		uint64_t j = file_word(1, i * 8) % (i + 1), t = order[i];

		order[i] = order[j];
		order[j] = t;
	}
	for (uint64_t i = 0; i < MANY; i += 4)
		deleted[order[i]] = true;
	c = start(put_many, order);
	ck_assert_int_eq(ended(&c), SIGKILL);
	k = must_adopt(false);
	f = all_of(k);
	for (uint64_t key = 0; key < MANY; key++) {
		const struct one *o = &f.list[at];

		if (deleted[key])
			continue;
		ck_assert_uint_lt(at, f.nr);
		ck_assert_uint_eq(o->key, key);
		ck_assert_uint_eq(o->nbytes, many_bytes(key));
		for (size_t i = 0; i < o->nbytes; i++)
			ck_assert_uint_eq(o->blob[i], key & 0xFF);
		ck_assert_uint_eq(o->nr_fds, key % 100 == 0);
		at++;
	}
	ck_assert_uint_eq(at, f.nr);
	forget(&f);
	/* who stops a list can ask for another one */
	nr = 0;
	ck_assert_int_gt(keeper_list(k, stop_at_third, &nr), 0);
	ck_assert_int_eq(nr, 3);
	f = all_of(k);
	ck_assert_uint_eq(f.nr, at);
	forget(&f);
	bye(k);
}
END_TEST

static int put_more(void *arg, uint64_t key, const void *blob, size_t nbytes, int fds[static KEEPER_FDS],
		    unsigned int nr_fds)
{
	unsigned char more[KEEPER_BLOB] = { 0 };

	(void)blob;
	(void)nbytes;
	(void)fds;
	(void)nr_fds;
	return keeper_put(arg, key, more, sizeof(more), NULL, 0);
}

/* A daemon puts each object while it reads the list: the queues of both are full. Bites on: a keeper that waits in its
 * send until the daemon reads. */
START_TEST(test_putting_while_listing)
{
	struct keeper *k = must_start(NULL);
	unsigned char blob[KEEPER_BLOB] = { 1 };
	struct found f;

	for (uint64_t key = 0; key < 1000; key++)
		ck_assert_int_eq(keeper_put(k, key, blob, sizeof(blob), NULL, 0), 0);
	ck_assert_int_eq(keeper_list(k, put_more, k), 0);
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 1000);
	for (size_t i = 0; i < f.nr; i++)
		ck_assert_uint_eq(f.list[i].blob[0], 0);
	forget(&f);
	bye(k);
}
END_TEST

struct putter {
	pthread_t thread;
	struct keeper *k;
	uint64_t first;
	int result;
};

static void *put_500(void *arg)
{
	struct putter *p = arg;
	char text[16];
	int fd;

	(void)snprintf(text, sizeof(text), "%" PRIu64, p->first);
	fd = memfd_of(text);
	for (uint64_t i = 0; i < 500 && p->result == 0; i++)
		p->result = keeper_put(p->k, p->first + i, text, strlen(text), &fd, i % 10 == 0);
	for (uint64_t i = 1; i < 500 && p->result == 0; i += 2)
		p->result = keeper_del(p->k, p->first + i);
	(void)close(fd);
	return NULL;
}

START_TEST(test_threads_put_at_once)
{
	struct keeper *k = must_start(NULL);
	struct putter p[8];
	struct found f;

	for (unsigned int i = 0; i < ARRAY_SIZE(p); i++) {
		p[i] = (struct putter){ .k = k, .first = i * 1000 };
		ck_assert_int_eq(pthread_create(&p[i].thread, NULL, put_500, &p[i]), 0);
	}
	for (unsigned int i = 0; i < ARRAY_SIZE(p); i++) {
		(void)pthread_join(p[i].thread, NULL);
		ck_assert_int_eq(p[i].result, 0);
	}
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 250 * ARRAY_SIZE(p));
	for (size_t i = 0; i < f.nr; i++) {
		char text[24];

		(void)snprintf(text, sizeof(text), "%" PRIu64, f.list[i].key / 1000 * 1000);
		ck_assert_uint_eq(f.list[i].key, i / 250 * 1000 + i % 250 * 2);
		ck_assert_uint_eq(f.list[i].nbytes, strlen(text));
		ck_assert_mem_eq(f.list[i].blob, text, strlen(text));
		ck_assert_uint_eq(f.list[i].nr_fds, i % 250 * 2 % 10 == 0);
		ck_assert(!f.list[i].nr_fds || memfd_is(f.list[i].fds[0], text));
	}
	forget(&f);
	bye(k);
}
END_TEST

#define FEW_FDS 256

static void put_too_many_fds(int out, void *arg)
{
	struct rlimit limit = { FEW_FDS, FEW_FDS };
	struct keeper *k;

	(void)arg;
	if (setrlimit(RLIMIT_NOFILE, &limit) < 0)
		_exit(1);
	k = must_start(NULL);
	for (uint64_t key = 0; key < 2 * FEW_FDS; key++)
		if (keeper_put(k, key, "x", 1, (int[]){ out, out }, 2) < 0)
			_exit(2);
	say(out, 1);
	for (;;)
		(void)pause();
}

/* Bites on: descriptors kept back for connections (no daemon could get in), and the count that a list tells. */
START_TEST(test_no_descriptor_left)
{
	struct child c = start(put_too_many_fds, NULL);
	struct keeper *k = NULL;
	struct found f;
	size_t nr = 0;

	(void)hear(c.out);
	ck_assert_int_eq(keeper_adopt(sock, false, &k, NULL, NULL), -EBUSY);
	must_end(&c, SIGKILL);
	for (int i = 0; i < 3; i++) {
		nr = 0;
		k = must_adopt(false);
		f = all_of(k);
		ck_assert_uint_eq(f.nr, 2 * FEW_FDS);
		for (size_t j = 0; j < f.nr; j++) {
			ck_assert_uint_eq(f.list[j].nbytes, 1);
			for (unsigned int l = 0; l < KEEPER_FDS; l++)
				ck_assert_int_eq(fcntl(f.list[j].fds[l], F_GETFD) >= 0, l < f.list[j].nr_fds);
			nr += f.list[j].nr_fds;
		}
		ck_assert_uint_gt(nr, FEW_FDS / 2);
		ck_assert_uint_lt(nr, FEW_FDS);
		forget(&f);
		if (i < 2)
			(void)keeper_free(k);
	}
	/* what is deleted makes room */
	for (uint64_t key = 0; key < 2 * FEW_FDS; key++)
		ck_assert_int_eq(keeper_del(k, key), 0);
	ck_assert_int_eq(keeper_put(k, 5, NULL, 0, (int[]){ 0, 1 }, 2), 0);
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 1);
	ck_assert_uint_eq(f.list[0].nr_fds, 2);
	forget(&f);
	bye(k);
}
END_TEST

static int count_whole(void *arg, uint64_t key, const void *blob, size_t nbytes, int fds[static KEEPER_FDS],
		       unsigned int nr_fds)
{
	unsigned int *nr = arg;

	(void)key;
	(void)blob;
	(void)nbytes;
	for (unsigned int i = 0; i < KEEPER_FDS; i++)
		if (fcntl(fds[i], F_GETFD) >= 0 ? i >= nr_fds : i < nr_fds)
			return -EBADF;
	nr[nr_fds]++;
	return 0; /* they stay open */
}

/* Bites on: the count is of what has come, not of what was sent. */
START_TEST(test_no_descriptor_left_for_a_list)
{
	struct keeper *k = must_start(NULL);
	struct rlimit limit, low;
	unsigned int nr[KEEPER_FDS + 1] = { 0 };
	struct found f;

	for (uint64_t key = 0; key < 60; key++)
		ck_assert_int_eq(keeper_put(k, key, NULL, 0, (int[]){ 0, 1, 2 }, 3), 0);
	ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &limit), 0);
	low = limit;
	low.rlim_cur = 100;
	ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &low), 0);
	ck_assert_int_eq(keeper_list(k, count_whole, nr), 0);
	ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &limit), 0);
	ck_assert_uint_gt(nr[3], 0);
	ck_assert_uint_gt(nr[0], 0);
	ck_assert_uint_eq(nr[0] + nr[1] + nr[2] + nr[3], 60);
	/* the keeper has them all */
	f = all_of(k);
	for (size_t i = 0; i < f.nr; i++)
		ck_assert_uint_eq(f.list[i].nr_fds, 3);
	forget(&f);
	bye(k);
}
END_TEST

/* ------------------------------------------------------------------ deaths */

struct kept {
	int memfd, end, uffd;
	bool stop;
};

/* Puts, and is dead before the keeper has seen anything of it. */
static void put_and_die(int out, void *arg)
{
	const struct kept *kept = arg;
	struct keeper *k = must_start(NULL);

	say(out, (uint64_t)keeper_pid(k));
	if (kept->stop) {
		if (kill(keeper_pid(k), SIGSTOP) < 0)
			_exit(1);
	}
	if (keeper_put(k, 1, "mem", 3, &kept->memfd, 1) < 0 || keeper_put(k, 2, NULL, 0, &kept->end, 1) < 0 ||
	    keeper_put(k, 3, NULL, 0, &kept->uffd, 1) < 0)
		_exit(2);
	(void)kill(getpid(), SIGKILL);
}

static void *touch_it(void *arg)
{
	return (void *)(uintptr_t) * (volatile unsigned char *)arg;
}

/* With _i the keeper is stopped until the daemon is dead. */
START_TEST(test_what_was_put_survives_its_putter)
{
	struct uffdio_api api = { .api = UFFD_API };
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *area = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *value;
	struct uffdio_register reg = { { (uintptr_t)area, page }, UFFDIO_REGISTER_MODE_MISSING, 0 };
	struct kept kept = { .stop = _i };
	struct child c;
	struct keeper *k;
	struct found f;
	pthread_t thread;
	int pair[2], pid;
	char word[8];

	kept.memfd = memfd_of("kept");
	ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	kept.end = pair[1];
	kept.uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
	ck_assert_int_ge(kept.uffd, 0);
	ck_assert_int_eq(ioctl(kept.uffd, UFFDIO_API, &api), 0);
	ck_assert_int_eq(ioctl(kept.uffd, UFFDIO_REGISTER, &reg), 0);

	c = start(put_and_die, &kept);
	(void)close(kept.memfd);
	(void)close(kept.end);
	(void)close(kept.uffd);
	pid = (int)hear(c.out);
	ck_assert_int_eq(ended(&c), SIGKILL);
	ck_assert_int_eq(pthread_create(&thread, NULL, touch_it, area),
			 0); /* stands, for nobody but the keeper has it */
	ck_assert(!readable(pair[0], 0));
	if (kept.stop)
		ck_assert_int_eq(kill(pid, SIGCONT), 0);
	k = must_adopt(false);
	ck_assert_int_eq(keeper_pid(k), pid);
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 3);
	ck_assert(memfd_is(f.list[0].fds[0], "kept"));
	ck_assert_int_eq(write(pair[0], "ping", 4), 4);
	ck_assert_int_eq(read(f.list[1].fds[0], word, sizeof(word)), 4);
	{
		struct uffd_msg msg;
		unsigned char *from = malloc(page);
		struct uffdio_copy copy = { (uintptr_t)area, (uintptr_t)from, page, 0, 0 };

		ck_assert(from != NULL);
		memset(from, 0x5A, page);
		ck_assert(readable(f.list[2].fds[0], HANG_MS));
		ck_assert_int_eq(read(f.list[2].fds[0], &msg, sizeof(msg)), sizeof(msg));
		ck_assert_int_eq(ioctl(f.list[2].fds[0], UFFDIO_COPY, &copy), 0);
		free(from);
	}
	(void)pthread_join(thread, &value);
	ck_assert_uint_eq((uintptr_t)value, 0x5A);
	forget(&f);
	/* with the keeper's end the client's socket hangs up */
	bye(k);
	ck_assert(readable(pair[0], HANG_MS));
	(void)close(pair[0]);
	(void)munmap(area, page);
}
END_TEST

/* With an argument: and has descriptors of low and high numbers when it makes its keeper. */
static void hold(int out, void *arg)
{
	struct keeper *k;

	if (arg && dup2(out, 500) < 0)
		_exit(1);
	k = must_start(NULL);
	if (keeper_put(k, 1, "one", 3, NULL, 0) < 0)
		_exit(1);
	say(out, (uint64_t)keeper_pid(k));
	for (;;)
		(void)pause();
}

static void wait_for_keepers_end(int out, void *arg)
{
	struct keeper *k = must_start(NULL);

	(void)arg;
	say(out, (uint64_t)keeper_pid(k));
	if (keeper_asked(k) != 0 || !readable(keeper_fd(k), HANG_MS) || keeper_asked(k) != -EPIPE)
		_exit(1);
	if (keeper_put(k, 1, NULL, 0, NULL, 0) != -EPIPE || keeper_del(k, 1) != -EPIPE ||
	    keeper_list(k, find_one, NULL) != -EPIPE)
		_exit(2);
	keeper_bye(k); /* does not wait for the dead */
	(void)keeper_free(k);
	_exit(3);
}

START_TEST(test_daemon_hears_of_its_keepers_end)
{
	struct child c = start(wait_for_keepers_end, NULL);

	ck_assert_int_eq(kill((pid_t)hear(c.out), SIGKILL), 0);
	ck_assert_int_eq(ended(&c), 1003);
}
END_TEST

START_TEST(test_keeper_ignores_signals)
{
	struct keeper *k = must_start(NULL);
	struct found f;

	for (size_t i = 0; i < 4; i++)
		ck_assert_int_eq(kill(keeper_pid(k), (int[]){ SIGINT, SIGHUP, SIGTERM, SIGPIPE }[i]), 0);
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 0);
	forget(&f);
	ck_assert_int_ne(getsid(keeper_pid(k)), getsid(0));
	bye(k);
}
END_TEST

/* It holds nothing open but what is its own: a pipe of the daemon's ends with the daemon. */
START_TEST(test_keeper_holds_nothing_else)
{
	struct child c = start(hold, (void *)1);
	pid_t keeper = (pid_t)hear(c.out);
	char path[40], link[64];
	struct dirent *e;
	size_t nr = 0;
	ssize_t n;
	DIR *d;

	must_end(&c, SIGKILL);
	(void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)keeper);
	d = opendir(path);
	ck_assert(d != NULL);
	while ((e = readdir(d))) {
		if (e->d_name[0] == '.' || strcmp(e->d_name, "2") == 0)
			continue;
		n = readlinkat(dirfd(d), e->d_name, link, sizeof(link) - 1);
		ck_assert_int_gt(n, 0);
		link[n] = '\0';
		ck_assert_msg(strncmp(link, "socket:", 7) == 0 || strncmp(link, "anon_inode:", 11) == 0 ||
				      strcmp(link, "/dev/null") == 0,
			      "%s", link);
		nr++;
	}
	(void)closedir(d);
	ck_assert_uint_lt(nr, 80);
	(void)snprintf(path, sizeof(path), "/proc/%d/cwd", (int)keeper);
	n = readlink(path, link, sizeof(link));
	ck_assert(n == 1 && link[0] == '/');
}
END_TEST

/* G37: whatever dies, in whatever order, the next start finds a place and removes only what is dead. */
START_TEST(test_twenty_kills_leave_nothing)
{
	struct wd_err err = { "" };
	struct keeper *k = NULL;

	for (int i = 0; i < 20; i++) {
		struct child c = start(hold, NULL);
		pid_t keeper = (pid_t)hear(c.out);

		ck_assert_uint_eq(nr_names(), 1);
		ck_assert(is_there(name));
		/* a living one stays */
		ck_assert_int_eq(keeper_start(sock, NULL, &k, &err), -EBUSY);
		ck_assert_int_eq(keeper_adopt(sock, false, &k, NULL, &err), -EBUSY);
		ck_assert_int_eq(kill(i % 2 ? keeper : c.pid, SIGKILL), 0);
		ck_assert_int_eq(kill(i % 2 ? c.pid : keeper, SIGKILL), 0);
		ck_assert_int_eq(ended(&c), SIGKILL);
		must_be_gone(keeper);
		ck_assert_uint_eq(nr_names(), 1); /* the dead one's */
		ck_assert_int_eq(keeper_adopt(sock, false, &k, NULL, &err), -ENOENT);
	}
	bye(must_start(NULL));
	ck_assert_int_eq(keeper_adopt(sock, false, &k, NULL, &err), -ENOENT);
}
END_TEST

START_TEST(test_what_is_in_the_way)
{
	char lock[260], longer[260];
	struct wd_err err = { "" };
	struct keeper *k = NULL;
	int fd = open(name, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);

	ck_assert_int_ge(fd, 0);
	(void)close(fd);
	ck_assert_int_eq(keeper_start(sock, NULL, &k, &err), -EEXIST);
	ck_assert(strstr(err.text, name) != NULL);
	ck_assert(is_there(name));
	ck_assert_uint_eq(nr_names(), 1);
	ck_assert_int_eq(unlink(name), 0);
	/* the lock of one that was killed just then */
	(void)snprintf(lock, sizeof(lock), "%s.lock", name);
	fd = open(lock, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	ck_assert_int_ge(fd, 0);
	(void)close(fd);
	bye(must_start(NULL));
	memset(longer, 'x', sizeof(longer));
	longer[0] = '/';
	longer[sizeof(longer) - 1] = '\0';
	ck_assert_int_eq(keeper_start(longer, NULL, &k, &err), -ENAMETOOLONG);
	ck_assert_int_eq(keeper_adopt(longer, false, &k, NULL, &err), -ENAMETOOLONG);
	(void)snprintf(longer, sizeof(longer), "%s/none/s", folder);
	ck_assert_int_eq(keeper_start(longer, NULL, &k, &err), -ENOENT);
	ck_assert_int_eq(keeper_adopt(longer, false, &k, NULL, &err), -ENOENT);
	/* a name that is somebody else's by now stays */
	k = must_start(NULL);
	ck_assert_int_eq(rename(name, lock), 0);
	fd = open(name, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	ck_assert_int_ge(fd, 0);
	(void)close(fd);
	keeper_bye(k);
	k = keeper_free(k);
	ck_assert(is_there(name));
	/* none of these left a process behind */
	ck_assert_int_eq(waitpid(-1, NULL, WNOHANG), -1);
	ck_assert_int_eq(errno, ECHILD);
}
END_TEST

#define STARTERS 4

struct race {
	pthread_barrier_t at;
	_Atomic int won, lost;
};

static void race_once(int out, void *arg)
{
	struct race *race = arg;
	struct wd_err err;
	struct keeper *k = NULL;
	int r;

	(void)pthread_barrier_wait(&race->at);
	r = keeper_start(sock, NULL, &k, &err);
	if (r == 0)
		race->won++;
	else if (r == -EBUSY)
		race->lost++;
	(void)pthread_barrier_wait(&race->at);
	if (r == 0)
		say(out, (uint64_t)keeper_pid(k));
	else
		say(out, 0);
	(void)pthread_barrier_wait(&race->at);
	_exit(r == 0 || r == -EBUSY ? 0 : 1);
}

/* A dead one's name is there, and all of them see that it is dead. Bites on: the lock. */
START_TEST(test_one_of_several_starters_wins)
{
	struct race *race = mmap(NULL, sizeof(*race), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pthread_barrierattr_t attr;

	ck_assert(race != MAP_FAILED);
	(void)pthread_barrierattr_init(&attr);
	(void)pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	for (int i = 0; i < 40; i++) {
		struct child c[STARTERS];
		pid_t keeper = 0;

		ck_assert_int_eq(pthread_barrier_init(&race->at, &attr, STARTERS), 0);
		race->won = race->lost = 0;
		for (int j = 0; j < STARTERS; j++)
			c[j] = start(race_once, race);
		for (int j = 0; j < STARTERS; j++) {
			pid_t pid = (pid_t)hear(c[j].out);

			ck_assert(!pid || !keeper);
			keeper = pid ? pid : keeper;
		}
		ck_assert_int_eq(race->won, 1);
		ck_assert_int_eq(race->lost, STARTERS - 1);
		ck_assert_uint_eq(nr_names(), 1);
		if (keeper)
			ck_assert_int_eq(kill(keeper, SIGKILL), 0);
		for (int j = 0; j < STARTERS; j++)
			ck_assert_int_eq(ended(&c[j]), 1000);
		must_be_gone(keeper);
	}
}
END_TEST

static void start_and_bye(int out, void *arg)
{
	struct keeper *k = must_start(NULL);

	(void)arg;
	say(out, 1);
	keeper_bye(k);
}

static int take_lock(const char *path)
{
	int fd = open(path, O_CREAT | O_RDWR | O_EXCL | O_CLOEXEC, 0600);

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(flock(fd, LOCK_EX), 0);
	return fd;
}

/* Until somebody waits for this lock; nobody must get past it. */
static void must_be_waited_for(int fd, const struct child *c)
{
	struct stat st;
	char want[40], line[200];
	bool found = false;

	ck_assert_int_eq(fstat(fd, &st), 0);
	(void)snprintf(want, sizeof(want), ":%ju ", (uintmax_t)st.st_ino);
	while (!found) {
		cleanup_fclose FILE *f = fopen("/proc/locks", "re");

		ck_assert(f != NULL);
		ck_assert_msg(!readable(c->out, 0), "it went on without the lock");
		while (fgets(line, sizeof(line), f))
			found |= strstr(line, "->") && strstr(line, want);
		(void)sched_yield();
	}
}

/* Who waited for a lock whose file was removed meanwhile does not hold the one that all others see. */
START_TEST(test_lock_file_that_is_removed)
{
	char path[260];
	struct child c;
	int first, second;

	(void)snprintf(path, sizeof(path), "%s.lock", name);
	first = take_lock(path);
	c = start(start_and_bye, NULL);
	must_be_waited_for(first, &c);
	ck_assert_int_eq(unlink(path), 0);
	second = take_lock(path);
	ck_assert_int_eq(flock(first, LOCK_UN), 0); /* (the child has a copy of it) */
	(void)close(first);
	must_be_waited_for(second, &c);
	ck_assert_int_eq(unlink(path), 0);
	ck_assert_int_eq(flock(second, LOCK_UN), 0);
	(void)close(second);
	ck_assert_uint_eq(hear(c.out), 1);
	ck_assert_int_eq(ended(&c), 1000);
	ck_assert_uint_eq(nr_names(), 0);
}
END_TEST

/* ------------------------------------------------------------------ the next daemon */

static void adopt_once(int out, void *arg)
{
	struct race *race = arg;
	struct keeper *k = NULL;
	int r, pid = 0;

	(void)pthread_barrier_wait(&race->at);
	r = keeper_adopt(sock, false, &k, &pid, NULL);
	say(out, r == 0 ? 0 : r == -EBUSY ? (uint64_t)pid : UINT64_MAX);
	for (;;)
		(void)pause();
}

START_TEST(test_one_of_two_adopters_wins)
{
	struct race *race = mmap(NULL, sizeof(*race), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct child first = start(hold, NULL), c[2];
	pthread_barrierattr_t attr;
	uint64_t heard[2];
	int winner;

	ck_assert(race != MAP_FAILED);
	(void)pthread_barrierattr_init(&attr);
	(void)pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	ck_assert_int_eq(pthread_barrier_init(&race->at, &attr, 2), 0);
	(void)hear(first.out);
	must_end(&first, SIGKILL);
	for (int i = 0; i < 2; i++)
		c[i] = start(adopt_once, race);
	for (int i = 0; i < 2; i++)
		heard[i] = hear(c[i].out);
	winner = heard[0] == 0 ? 0 : 1;
	ck_assert_uint_eq(heard[winner], 0);
	ck_assert_uint_eq(heard[!winner], (uint64_t)c[winner].pid);
	must_end(&c[!winner], SIGKILL);
	must_end(&c[winner], SIGKILL);
	bye(must_adopt(false));
}
END_TEST

/* Lets go when it is asked, with a last word. */
static void let_go(int out, void *arg)
{
	struct keeper *k = must_start(NULL);

	(void)arg;
	if (keeper_put(k, 1, "one", 3, NULL, 0) < 0)
		_exit(1);
	say(out, (uint64_t)keeper_pid(k));
	while (keeper_asked(k) == 0)
		(void)readable(keeper_fd(k), HANG_MS);
	if (keeper_asked(k) != 1 || keeper_put(k, 2, "two", 3, NULL, 0) < 0)
		_exit(2);
	_exit(3);
}

START_TEST(test_take_over_of_a_living_daemon)
{
	struct child c = start(let_go, NULL);
	struct keeper *k = NULL;
	struct wd_err err = { "" };
	struct found f;
	int pid = 0;

	(void)hear(c.out);
	ck_assert_int_eq(keeper_adopt(sock, false, &k, &pid, &err), -EBUSY);
	ck_assert_int_eq(pid, c.pid);
	k = must_adopt(true);
	ck_assert_int_eq(ended(&c), 1003);
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 2);
	forget(&f);
	/* we are it now */
	ck_assert_int_eq(keeper_asked(k), 0);
	bye(k);
}
END_TEST

START_TEST(test_take_over_of_a_stopped_daemon)
{
	struct child c = start(hold, NULL);
	struct keeper *k;
	struct found f;

	(void)hear(c.out);
	stop_it(c.pid);
	k = must_adopt(true);
	ck_assert_int_eq(ended(&c), SIGKILL);
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 1);
	forget(&f);
	bye(k);
}
END_TEST

struct deaf {
	_Atomic uint64_t nr;
	_Atomic bool asked;
};

/* Never reads that it shall let go, and goes on putting: counts what was taken. */
static void put_on(int out, void *arg)
{
	struct deaf *deaf = arg;
	struct keeper *k = must_start(NULL);

	say(out, (uint64_t)keeper_pid(k));
	for (uint64_t i = 0;; i++) {
		if (keeper_put(k, i % 512, &i, sizeof(i), NULL, 0) < 0)
			_exit(1);
		deaf->nr = i + 1;
		deaf->asked = readable(keeper_fd(k), 0);
	}
}

static void take_over(int out, void *arg)
{
	struct keeper *k;

	(void)arg;
	if (keeper_adopt(sock, true, &k, NULL, NULL) < 0)
		_exit(1);
	say(out, 3);
	for (;;)
		(void)pause();
}

/*
 * The daemon dies with a message of the keeper's unread, and the keeper has not read all of the daemon's. Bites on: the
 * ECONNRESET that then comes first is no hang-up.
 */
START_TEST(test_take_over_of_a_deaf_daemon_loses_nothing)
{
	struct deaf *deaf = mmap(NULL, sizeof(*deaf), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct child c = start(put_on, deaf), taker;
	pid_t keeper = (pid_t)hear(c.out);
	struct keeper *k;
	struct found f;
	uint64_t last = 0, nr;

	taker = start(take_over, NULL);
	while (!deaf->asked)
		(void)sched_yield();
	stop_it(keeper);
	wait_for_state(c.pid, 'S'); /* the queue is full */
	must_end(&c, SIGKILL);
	nr = deaf->nr;
	ck_assert_int_eq(kill(keeper, SIGCONT), 0);
	ck_assert_uint_eq(hear(taker.out), 3);
	must_end(&taker, SIGKILL);
	k = must_adopt(true);
	f = all_of(k);
	for (size_t i = 0; i < f.nr; i++) {
		uint64_t value;

		memcpy(&value, f.list[i].blob, sizeof(value));
		last = MAX(last, value);
	}
	ck_assert_uint_ge(last + 1, nr);
	forget(&f);
	bye(k);
	(void)munmap(deaf, sizeof(*deaf));
}
END_TEST

/* Says that it was asked, and does not let go. */
static void stay(int out, void *arg)
{
	struct keeper *k = must_start(NULL);

	(void)arg;
	say(out, (uint64_t)keeper_pid(k));
	if (!readable(keeper_fd(k), HANG_MS) || keeper_asked(k) != 1)
		_exit(1);
	say(out, 2);
	for (;;)
		(void)pause();
}

/* One waits until the daemon is killed; a second one is told at once who lives. */
START_TEST(test_two_takers)
{
	struct child daemon = start(stay, NULL), taker;
	struct keeper *k = NULL;
	struct wd_err err = { "" };
	int pid = 0;

	(void)hear(daemon.out);
	taker = start(take_over, NULL);
	ck_assert_uint_eq(hear(daemon.out), 2);
	ck_assert_int_eq(keeper_adopt(sock, true, &k, &pid, &err), -EBUSY);
	ck_assert_int_eq(pid, daemon.pid);
	ck_assert_uint_eq(hear(taker.out), 3);
	ck_assert_int_eq(ended(&daemon), SIGKILL);
	/* and the one that took over is a daemon as any */
	ck_assert_int_eq(keeper_adopt(sock, false, &k, &pid, &err), -EBUSY);
	ck_assert_int_eq(pid, taker.pid);
	must_end(&taker, SIGKILL);
	bye(must_adopt(true));
}
END_TEST

/* ------------------------------------------------------------------ a daemon of the keeper's own */

static char fifo[240];

static int listen_fifo(void)
{
	int fd;

	(void)snprintf(fifo, sizeof(fifo), "%s/fifo", folder);
	ck_assert_int_eq(mkfifo(fifo, 0600), 0);
	fd = open(fifo, O_RDWR | O_CLOEXEC); /* for writing, too: it never ends */
	ck_assert_int_ge(fd, 0);
	return fd;
}

/* The program as a keeper starts it. Says: its pid; how many objects there are; is all as a process expects it. */
static int be_daemon(char **argv)
{
	const char *how = argv[2];
	struct sigaction term;
	struct found f = { 0 };
	struct wd_err err = { "" };
	struct keeper *k;
	sigset_t set;
	char cwd[300] = "";
	int nr_fds = 0, r, out = open(argv[4], O_WRONLY | O_CLOEXEC);

	if (out < 0)
		return 1;
	say(out, (uint64_t)getpid());
	if (strcmp(how, "die") == 0)
		return 1;
	for (int fd = 3; fd < 1000; fd++)
		nr_fds += fcntl(fd, F_GETFD) >= 0; /* `out` and the connection */
	(void)sigprocmask(SIG_SETMASK, NULL, &set);
	(void)sigaction(SIGTERM, NULL, &term);
	r = keeper_adopt(argv[3], false, &k, NULL, &err);
	if (r < 0) {
		(void)fprintf(stderr, "adopt: %s\n", err.text);
		return 1;
	}
	if (strcmp(how, "fuse") == 0)
		if (keeper_del(k, 1) < 0)
			return 1;
	if (keeper_list(k, find_one, &f) < 0 || !getcwd(cwd, sizeof(cwd)))
		return 1;
	say(out, f.nr);
	say(out, nr_fds == 2 && !sigismember(&set, SIGCHLD) && term.sa_handler == SIG_DFL &&
			 !getenv("WEIGHTD_KEEPER") && strcmp(cwd, argv[5]) == 0 && getppid() == keeper_pid(k));
	if (strcmp(how, "restart") == 0) {
		char *other[] = { argv[0], argv[1], "other", argv[3], argv[4], argv[5], NULL };

		if (keeper_restart(k, other, &err) < 0)
			return 1;
		say(out, 7);
	}
	if (strcmp(how, "other") == 0)
		say(out, 8);
	if (strcmp(how, "fuse") == 0) {
		(void)close(f.list[1].fds[0]); /* the end of a socket */
		keeper_bye(k);
		say(out, 9);
	}
	for (;;)
		(void)pause();
}

static void start_with(int out, void *arg)
{
	char cwd[300];
	char *argv[] = { "any", "--daemon", arg, sock, fifo, getcwd(cwd, sizeof(cwd)), NULL };
	struct keeper *k;

	if (chdir(folder) < 0)
		_exit(1);
	argv[5] = getcwd(cwd, sizeof(cwd));
	k = must_start(argv);
	if (keeper_put(k, 1, "one", 3, NULL, 0) < 0 || keeper_put(k, 2, "two", 3, &out, 1) < 0)
		_exit(1);
	say(out, (uint64_t)keeper_pid(k));
	for (;;)
		(void)pause();
}

START_TEST(test_a_dead_daemon_is_started_again)
{
	int in = listen_fifo();
	struct child c = start(start_with, (void *)"live");
	pid_t keeper = (pid_t)hear(c.out), pid = c.pid;
	struct found f;
	struct keeper *k;

	for (int i = 0; i < 3; i++) {
		ck_assert_int_eq(kill(pid, SIGKILL), 0);
		pid = (pid_t)hear(in);
		ck_assert_uint_eq(hear(in), 2);
		ck_assert_uint_eq(hear(in), 1);
	}
	ck_assert_int_eq(ended(&c), SIGKILL);
	/* nobody else is the daemon then; and it is taken over like any */
	k = NULL;
	ck_assert_int_eq(keeper_adopt(sock, false, &k, NULL, NULL), -EBUSY);
	ck_assert_int_eq(kill(pid, SIGSTOP), 0);
	k = must_adopt(true);
	must_be_gone(pid);
	while (kill(pid, 0) == 0) /* it is reaped, too */
		(void)sched_yield();
	ck_assert_int_eq(keeper_pid(k), keeper);
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 2);
	forget(&f);
	ck_assert_int_eq(unlink(fifo), 0);
	bye(k);
	(void)close(in);
}
END_TEST

/* Who took over says how it is started from now on. */
START_TEST(test_started_as_the_last_one_said)
{
	int in = listen_fifo();
	struct child c = start(start_with, (void *)"restart");
	pid_t pid;

	(void)hear(c.out);
	must_end(&c, SIGKILL);
	pid = (pid_t)hear(in);
	ck_assert_uint_eq(hear(in), 2);
	ck_assert_uint_eq(hear(in), 1);
	ck_assert_uint_eq(hear(in), 7);
	ck_assert_int_eq(kill(pid, SIGKILL), 0);
	(void)hear(in);
	ck_assert_uint_eq(hear(in), 2);
	ck_assert_uint_eq(hear(in), 1);
	ck_assert_uint_eq(hear(in), 8);
	(void)close(in);
}
END_TEST

static void copy_self(const char *to)
{
	cleanup_close int from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	cleanup_close int fd = open(to, O_WRONLY | O_CREAT | O_CLOEXEC, 0700);
	static char buf[65536];
	ssize_t n;

	ck_assert(from >= 0 && fd >= 0);
	while ((n = read(from, buf, sizeof(buf))) > 0)
		ck_assert_int_eq(write(fd, buf, (size_t)n), n);
}

static void start_from(int out, void *arg)
{
	char *argv[] = { arg, "--start", sock, fifo, folder, NULL };

	(void)dup3(out, 100, 0);
	(void)execv(arg, argv);
	_exit(1);
}

/* What start_from() becomes: another program, whose file is then removed. */
static int be_starter(char **argv)
{
	char *again[] = { "any", "--daemon", "live", argv[2], argv[3], argv[4], NULL };
	struct wd_err err = { "" };
	struct keeper *k;

	if (chdir(argv[4]) < 0 || keeper_start(argv[2], again, &k, &err) < 0)
		return 1;
	say(100, (uint64_t)keeper_pid(k));
	for (;;)
		(void)pause();
}

/* With _i the program file is removed before it is started again, else it is the one of that path. */
START_TEST(test_started_from_a_file_that_is_gone)
{
	char path[256];
	struct child c;
	int in;

	(void)snprintf(path, sizeof(path), "%s/program", folder);
	copy_self(path);
	in = listen_fifo();
	c = start(start_from, path);
	(void)hear(c.out);
	if (_i)
		ck_assert_int_eq(unlink(path), 0);
	must_end(&c, SIGKILL);
	(void)hear(in);
	ck_assert_uint_eq(hear(in), 0);
	ck_assert_uint_eq(hear(in), 1);
	(void)close(in);
}
END_TEST

/* With _i somebody else takes over before the last try: then they are counted anew. */
START_TEST(test_gives_up_after_short_lives)
{
	int in = listen_fifo(), r;
	struct keeper *k = NULL;
	struct child c;
	pid_t keeper;

	c = start(start_with, (void *)"die"); /* keeps the pipe's end as an object */
	keeper = (pid_t)hear(c.out);
	ck_assert_int_eq(kill(c.pid, SIGKILL), 0);
	if (_i) {
		for (int i = 0; i < KEEPER_RESPAWN_TRIES - 1; i++)
			ck_assert_uint_ne(hear(in), 0);
		/* it may not have ended yet */
		while ((r = keeper_adopt(sock, false, &k, NULL, NULL)) == -EBUSY)
			(void)sched_yield();
		ck_assert_int_eq(r, 0);
		(void)keeper_free(k);
	}
	for (int i = 0; i < KEEPER_RESPAWN_TRIES; i++)
		ck_assert_uint_ne(hear(in), 0);
	must_be_gone(keeper);
	ck_assert(!readable(in, 0)); /* no more than these */
	ck_assert(!is_there(name));
	ck_assert_int_eq(poll(&(struct pollfd){ .fd = c.out, .events = POLLIN }, 1, HANG_MS), 1); /* hang-up */
	ck_assert_int_eq(ended(&c), SIGKILL);
	(void)close(in);
}
END_TEST

/* One whose daemon has died when the suite began: it takes as long as all other tests. */
static pid_t abandoned;
static char abandoned_name[260];

static void abandon(void)
{
	char path[240];
	struct keeper *k;
	int fd[2];
	pid_t pid;

	if (abandoned)
		return;
	(void)snprintf(path, sizeof(path), "%s", test_path("abandoned"));
	(void)snprintf(abandoned_name, sizeof(abandoned_name), "%s.keeper", path);
	if (pipe2(fd, O_CLOEXEC) < 0)
		abort();
	pid = fork();
	if (pid == 0) {
		if (keeper_start(path, NULL, &k, NULL) < 0)
			_exit(1);
		abandoned = keeper_pid(k);
		_exit(write(fd[1], &abandoned, sizeof(abandoned)) != sizeof(abandoned));
	}
	(void)close(fd[1]);
	if (read(fd[0], &abandoned, sizeof(abandoned)) != sizeof(abandoned))
		abort();
	(void)close(fd[0]);
	(void)waitpid(pid, NULL, 0);
}

START_TEST(test_gives_up_when_nobody_comes)
{
	cleanup_close int fd = (int)syscall(SYS_pidfd_open, abandoned, 0);

	if (fd >= 0)
		ck_assert(readable(fd, KEEPER_ADOPT_MS + HANG_MS));
	ck_assert(!is_there(abandoned_name));
}
END_TEST

/* ------------------------------------------------------------------ strangers */

struct raw {
	uint32_t magic, type, version;
	int32_t status;
	uint64_t key;
	uint32_t nbytes, nr_fds;
};
#define RAW_MAGIC 0x6b647764u
#define RAW_HELLO 1u
#define RAW_WELCOME 64u

static struct sockaddr_un keepers_address(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	ck_assert_uint_lt(strlen(name), sizeof(address.sun_path));
	memcpy(address.sun_path, name, strlen(name));
	return address;
}

static int raw_connect(void)
{
	struct sockaddr_un address = keepers_address();
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
		return fd;
	(void)close(fd);
	return -errno;
}

static void fake_keeper(int out, void *arg)
{
	struct sockaddr_un address = keepers_address();
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), peer;
	struct raw m;

	if (arg && setuid(NOBODY) < 0)
		_exit(1);
	if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(fd, 1) < 0)
		_exit(2);
	say(out, 1);
	peer = accept(fd, NULL, NULL);
	if (peer < 0 || recv(peer, &m, sizeof(m), 0) <= 0)
		_exit(3); /* it said nothing to us */
	m.type = RAW_WELCOME;
	m.version = KEEPER_VERSION + 1;
	if (send(peer, &m, sizeof(m), 0) != sizeof(m))
		_exit(4);
	(void)usleep(50000); /* who does not wait for our end comes too early */
	say(out, 2);
	_exit(5);
}

START_TEST(test_other_versions)
{
	struct raw hello = { .magic = RAW_MAGIC, .type = RAW_HELLO, .version = KEEPER_VERSION + 1, .key = 1 }, m;
	struct child c = start(fake_keeper, NULL);
	struct keeper *k = NULL;
	struct wd_err err = { "" };
	pid_t keeper;
	int fd;

	(void)hear(c.out);
	ck_assert_int_eq(keeper_adopt(sock, true, &k, NULL, &err), -EPROTONOSUPPORT);
	ck_assert(strstr(err.text, "version 2") != NULL);
	ck_assert_msg(readable(c.out, 0), "it has not ended yet");
	ck_assert_uint_eq(hear(c.out), 2);
	ck_assert_int_eq(ended(&c), 1005);

	/* a daemon lives: it is not disturbed, not even by one that wants to take over */
	c = start(hold, NULL);
	keeper = (pid_t)hear(c.out);
	fd = raw_connect();
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(send(fd, &hello, sizeof(hello), 0), sizeof(hello));
	ck_assert_int_eq(recv(fd, &m, sizeof(m), 0), sizeof(m));
	ck_assert_uint_eq(m.magic, RAW_MAGIC);
	ck_assert_uint_eq(m.type, RAW_WELCOME);
	ck_assert_uint_eq(m.version, KEEPER_VERSION);
	ck_assert_int_eq(m.status, -EPROTONOSUPPORT);
	ck_assert_int_eq(recv(fd, &m, sizeof(m), 0), 0);
	(void)close(fd);
	ck_assert_int_eq(keeper_adopt(sock, false, &k, NULL, &err), -EBUSY);

	/* none lives: the keeper makes way */
	must_end(&c, SIGKILL);
	fd = raw_connect();
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(send(fd, &hello, sizeof(hello), 0), sizeof(hello));
	ck_assert_int_eq(recv(fd, &m, sizeof(m), 0), sizeof(m));
	ck_assert_int_eq(m.status, -EPROTONOSUPPORT);
	ck_assert(!is_there(name)); /* so that one can be started at once */
	(void)close(fd);
	must_be_gone(keeper);
	bye(must_start(NULL));
}
END_TEST

static void knock_as_nobody(int out, void *arg)
{
	struct raw hello = { .magic = RAW_MAGIC, .type = RAW_HELLO, .version = KEEPER_VERSION, .key = 1 };
	struct keeper *k;
	int fd, r;

	(void)arg;
	if (setuid(NOBODY) < 0)
		_exit(1);
	say(out, (uint64_t)-keeper_adopt(sock, true, &k, NULL, NULL));
	if (hear(100) != 1) /* the mode of the socket was widened */
		_exit(2);
	fd = raw_connect();
	if (fd < 0)
		_exit(3);
	r = send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) < 0 ? 0 : (int)recv(fd, &hello, sizeof(hello), 0);
	say(out, r <= 0);
}

START_TEST(test_other_users)
{
	struct child c = start(hold, NULL), nobody;
	struct keeper *k = NULL;
	struct wd_err err = { "" };
	struct stat st;
	int go[2];
	pid_t keeper = (pid_t)hear(c.out);

	ck_assert_int_eq(stat(name, &st), 0);
	ck_assert_uint_eq(st.st_mode & 0777, 0600);
	ck_assert_int_eq(pipe(go), 0);
	ck_assert_int_eq(dup2(go[0], 100), 100);
	nobody = start(knock_as_nobody, NULL);
	ck_assert_uint_eq(hear(nobody.out), EACCES);
	ck_assert_int_eq(chmod(name, 0666), 0); /* as some folder's owner may */
	say(go[1], 1);
	ck_assert_uint_eq(hear(nobody.out), 1);
	ck_assert_int_eq(ended(&nobody), 1000);
	ck_assert_int_eq(keeper_adopt(sock, false, &k, NULL, &err), -EBUSY); /* it lives */
	ck_assert_int_eq(kill(keeper, SIGKILL), 0);
	must_end(&c, SIGKILL);

	/* and nobody plays the keeper for root */
	ck_assert_int_eq(unlink(name), 0);
	ck_assert_int_eq(chmod(folder, 0777), 0);
	c = start(fake_keeper, (void *)1);
	(void)hear(c.out);
	ck_assert_int_eq(keeper_adopt(sock, false, &k, NULL, &err), -EACCES);
	ck_assert(strstr(err.text, "65534") != NULL);
	ck_assert_int_eq(ended(&c), 1003);
}
END_TEST

START_TEST(test_silent_and_noisy_connections)
{
	struct child c = start(hold, NULL);
	struct raw m = { .magic = RAW_MAGIC, .type = 999, .version = KEEPER_VERSION };
	int fds[40];

	(void)hear(c.out);
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++) {
		fds[i] = raw_connect();
		ck_assert_int_ge(fds[i], 0);
		if (i % 4 == 1)
			(void)send(fds[i], "noise", 5, MSG_NOSIGNAL);
		if (i % 4 == 2)
			(void)send(fds[i], &m, sizeof(m), MSG_NOSIGNAL);
		if (i % 4 == 3)
			(void)close(fds[i]);
	}
	must_end(&c, SIGKILL);
	bye(must_adopt(false));
	for (size_t i = 0; i < ARRAY_SIZE(fds); i++)
		if (i % 4 != 3)
			(void)close(fds[i]);
}
END_TEST

static void *fill_queue(void *arg)
{
	char blob[KEEPER_BLOB] = { 0 };
	int r;

	do
		r = keeper_put(arg, 1, blob, sizeof(blob), NULL, 0);
	while (r == 0);
	return (void *)(intptr_t)r;
}

/* A keeper that does not run holds nobody for ever. */
START_TEST(test_a_stopped_keeper)
{
	struct keeper *k = must_start(NULL), *other = NULL;
	struct wd_err err = { "" };
	pthread_t thread;
	struct found f;
	void *result;

	stop_it(keeper_pid(k));
	ck_assert_int_eq(pthread_create(&thread, NULL, fill_queue, k), 0);
	ck_assert_int_eq(keeper_adopt(sock, false, &other, NULL, &err), -ETIMEDOUT);
	(void)pthread_join(thread, &result);
	ck_assert_int_eq((int)(intptr_t)result, -ETIMEDOUT);
	ck_assert_int_eq(kill(keeper_pid(k), SIGCONT), 0);
	f = all_of(k);
	ck_assert_uint_eq(f.nr, 1);
	forget(&f);
	bye(k);
}
END_TEST

/* ------------------------------------------------------------------ a file whose server does not answer */

struct fuse {
	char dir[240], path[260];
	_Atomic bool hang;
	_Atomic unsigned int nr_flushes; /* that were not answered */
};

static void answer(int dev, uint64_t unique, int error, const void *body, size_t nbytes)
{
	char buf[512];
	struct fuse_out_header h = { (uint32_t)(sizeof(h) + nbytes), error, unique };

	memcpy(buf, &h, sizeof(h));
	if (nbytes)
		memcpy(buf + sizeof(h), body, nbytes);
	(void)!write(dev, buf, sizeof(h) + nbytes);
}

static void fuse_serve(int dev, struct fuse *fuse)
{
	static union {
		struct fuse_in_header h;
		char bytes[65536];
	} in;

	while (read(dev, &in, sizeof(in)) > 0) {
		struct fuse_attr attr = { .ino = in.h.nodeid, .nlink = 1 };

		attr.mode = in.h.nodeid == 1 ? S_IFDIR | 0755 : S_IFREG | 0644;
		if (in.h.opcode == FUSE_INIT) {
			struct fuse_init_out out = { .major = 7, .minor = 31, .max_write = 4096, .max_background = 4 };

			answer(dev, in.h.unique, 0, &out, sizeof(out));
		} else if (in.h.opcode == FUSE_LOOKUP) {
			struct fuse_entry_out out = { .nodeid = 2, .attr = attr };

			out.attr.ino = 2;
			out.attr.mode = S_IFREG | 0644;
			answer(dev, in.h.unique, 0, &out, sizeof(out));
		} else if (in.h.opcode == FUSE_GETATTR) {
			struct fuse_attr_out out = { .attr = attr };

			answer(dev, in.h.unique, 0, &out, sizeof(out));
		} else if (in.h.opcode == FUSE_OPEN) {
			struct fuse_open_out out = { .fh = 1 };

			answer(dev, in.h.unique, 0, &out, sizeof(out));
		} else if (in.h.opcode == FUSE_FLUSH && fuse->hang) {
			fuse->nr_flushes++;
		} else if (in.h.opcode == FUSE_FLUSH || in.h.opcode == FUSE_RELEASE) {
			answer(dev, in.h.unique, 0, NULL, 0);
		} else if (in.h.opcode != FUSE_FORGET && in.h.opcode != FUSE_BATCH_FORGET &&
			   in.h.opcode != FUSE_INTERRUPT) {
			answer(dev, in.h.unique, -ENOSYS, NULL, 0);
		}
	}
}

/* In a mount namespace of the test's own. Return: pid of the server; negative errno: not here. */
static pid_t fuse_start(struct fuse *fuse)
{
	char options[100];
	pid_t pid;
	int dev;

	(void)snprintf(fuse->dir, sizeof(fuse->dir), "%s/fuse", folder);
	(void)snprintf(fuse->path, sizeof(fuse->path), "%s/file", fuse->dir);
	if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
	    mkdir(fuse->dir, 0700) < 0)
		return -errno;
	dev = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	if (dev < 0)
		return -errno;
	(void)snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=%u,group_id=%u", dev, geteuid(),
		       getegid());
	if (mount("wd-test", fuse->dir, "fuse", MS_NOSUID | MS_NODEV, options) < 0)
		return -errno;
	pid = fork();
	if (pid == 0) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		fuse_serve(dev, fuse);
		_exit(0);
	}
	(void)close(dev);
	return pid;
}

static bool fuse_works(void)
{
	pid_t pid = fork();
	int status = 1;

	if (pid == 0) {
		int dev = open("/dev/fuse", O_RDWR | O_CLOEXEC);
		char options[100];

		(void)snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=0,group_id=0", dev);
		_exit(dev < 0 || unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
		      mount("wd-test", "/tmp", "fuse", MS_NOSUID | MS_NODEV, options) < 0);
	}
	(void)waitpid(pid, &status, 0);
	return status == 0;
}

struct fuse_kept {
	int file, end, go;
};

static bool hear_byte(int in)
{
	char c;

	return read(in, &c, 1) == 1;
}

static void keep_file(int out, void *arg)
{
	const struct fuse_kept *kept = arg;
	char *argv[] = { "any", "--daemon", "fuse", sock, fifo, folder, NULL };
	struct keeper *k;

	if (chdir(folder) < 0)
		_exit(1);
	k = must_start(argv);
	if (keeper_put(k, 1, NULL, 0, &kept->file, 1) < 0 || keeper_put(k, 2, NULL, 0, &kept->file, 1) < 0 ||
	    keeper_put(k, 3, NULL, 0, &kept->end, 1) < 0)
		_exit(2);
	say(out, (uint64_t)keeper_pid(k));
	(void)close(kept->end);
	if (hear_byte(kept->go)) {
		if (keeper_del(k, 1) < 0)
			_exit(3);
		keeper_bye(k);
		say(out, 9);
	}
	for (;;)
		(void)pause();
}

/*
 * Any close of such a descriptor waits until the server answers, also the one that an exec or an exit makes. Bites on:
 * CLOSE_RANGE_UNSHARE (no daemon is started), the thread that closes (no list comes), closing sockets first at the end
 * (clients do not hear of it), a limit to the wait for the keeper's end (_i: the daemon that made it says bye).
 */
START_TEST(test_a_file_server_that_does_not_answer)
{
	struct fuse *fuse = mmap(NULL, sizeof(*fuse), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t server;
	struct fuse_kept kept;
	struct child c;
	int in = listen_fifo(), pair[2], go[2];

	ck_assert(fuse != MAP_FAILED);
	ck_assert_int_eq(pipe2(go, O_CLOEXEC), 0);
	kept.go = go[0];
	server = fuse_start(fuse);
	ck_assert_int_gt(server, 0);
	ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	kept.end = pair[1];
	kept.file = open(fuse->path, O_RDONLY | O_CLOEXEC);
	ck_assert_int_ge(kept.file, 0);
	c = start(keep_file, &kept);
	(void)hear(c.out);
	(void)close(pair[1]);
	if (_i) {
		fuse->hang = true;
		ck_assert_int_eq(write(go[1], "g", 1), 1);
		ck_assert_uint_eq(hear(c.out), 9);
	} else {
		must_end(&c, SIGKILL);
		fuse->hang = true;
		(void)hear(in);
		ck_assert_uint_eq(hear(in), 2); /* it has deleted one and listed the others */
		ck_assert_uint_eq(hear(in), 1);
		ck_assert_uint_eq(hear(in), 9); /* and said bye */
	}
	ck_assert(readable(pair[0], HANG_MS));
	ck_assert(!is_there(name));
	while (fuse->nr_flushes == 0)
		(void)sched_yield();
	ck_assert_int_eq(kill(server, SIGKILL), 0); /* lets all who wait for it go */
	(void)close(kept.file);
	(void)close(in);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *s;
	TCase *tc;
	int r;

	if (argc == 6 && strcmp(argv[1], "--daemon") == 0)
		return be_daemon(argv);
	if (argc == 5 && strcmp(argv[1], "--start") == 0)
		return be_starter(argv);
	s = suite_create("keeper");
	(void)prctl(PR_SET_CHILD_SUBREAPER, 1);

	tc = new_case(s, "objects", 60);
	tcase_add_unchecked_fixture(tc, abandon, NULL);
	tcase_add_checked_fixture(tc, begin, finish);
	tcase_add_test(tc, test_objects_come_back_as_they_were_put);
	tcase_add_test(tc, test_twenty_thousand_objects);
	tcase_add_test(tc, test_putting_while_listing);
	tcase_add_test(tc, test_threads_put_at_once);
	tcase_add_test(tc, test_no_descriptor_left);
	tcase_add_test(tc, test_no_descriptor_left_for_a_list);

	tc = new_case(s, "deaths", 60);
	tcase_add_checked_fixture(tc, begin, finish);
	tcase_add_loop_test(tc, test_what_was_put_survives_its_putter, 0, 2);
	tcase_add_test(tc, test_daemon_hears_of_its_keepers_end);
	tcase_add_test(tc, test_keeper_ignores_signals);
	tcase_add_test(tc, test_keeper_holds_nothing_else);
	tcase_add_test(tc, test_twenty_kills_leave_nothing);
	tcase_add_test(tc, test_what_is_in_the_way);
	tcase_add_test(tc, test_one_of_several_starters_wins);
	tcase_add_test(tc, test_lock_file_that_is_removed);

	tc = new_case(s, "next", 60);
	tcase_add_checked_fixture(tc, begin, finish);
	tcase_add_test(tc, test_one_of_two_adopters_wins);
	tcase_add_test(tc, test_take_over_of_a_living_daemon);
	tcase_add_test(tc, test_take_over_of_a_stopped_daemon);
	tcase_add_test(tc, test_take_over_of_a_deaf_daemon_loses_nothing);
	tcase_add_test(tc, test_two_takers);

	tc = new_case(s, "again", 60);
	tcase_add_checked_fixture(tc, begin, finish);
	tcase_add_test(tc, test_a_dead_daemon_is_started_again);
	tcase_add_test(tc, test_started_as_the_last_one_said);
	tcase_add_loop_test(tc, test_started_from_a_file_that_is_gone, 0, 2);
	tcase_add_loop_test(tc, test_gives_up_after_short_lives, 0, 2);

	tc = new_case(s, "strangers", 60);
	tcase_add_checked_fixture(tc, begin, finish);
	tcase_add_test(tc, test_other_versions);
	tcase_add_test(tc, test_silent_and_noisy_connections);
	tcase_add_test(tc, test_a_stopped_keeper);
	if (geteuid() == 0)
		tcase_add_test(tc, test_other_users);
	else
		skip("test_other_users", "only root can become nobody");
	if (fuse_works())
		tcase_add_loop_test(tc, test_a_file_server_that_does_not_answer, 0, 2);
	else
		skip("test_a_file_server_that_does_not_answer", "no FUSE here, or not the right to mount it");

	tc = new_case(s, "abandoned", 90);
	tcase_add_unchecked_fixture(tc, abandon, NULL);
	tcase_add_test(tc, test_gives_up_when_nobody_comes);

	r = run_suite(s);
	(void)end_children(); /* of tests that failed */
	return r;
}
