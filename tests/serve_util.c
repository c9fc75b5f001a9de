/* SPDX-License-Identifier: Apache-2.0 */
/* See serve_util.h. */
#include "tests/serve_util.h"

#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#include "cli/cmd.h"
#include "ufd/wire.h"

#define WAIT_MS 20000
#define MAX_WORDS 64

void (*serve_failed)(const char *text);

static _Atomic uint64_t *words_shared;
static const struct daemon *running;

/* ------------------------------------------------------------------ failures */

static void __attribute__((noreturn, format(printf, 1, 2))) failed(const char *fmt, ...)
{
	char text[1024];
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	if (serve_failed)
		serve_failed(text);
	ck_abort_msg("%s", text);
	abort();
}

/* Check's own say at each success where they are, which only a running test can. */
#define need_msg(condition, ...)             \
	do {                                 \
		if (!(condition))            \
			failed(__VA_ARGS__); \
	} while (0)
#define need(condition) need_msg(condition, "tests/serve_util.c:%d: %s: %s", __LINE__, #condition, strerror(errno))

/* ------------------------------------------------------------------ processes */

static void default_signals(void)
{
	sigset_t none;

	for (int sig = 1; sig < 32; sig++)
		(void)signal(sig, SIG_DFL);
	(void)alarm(0);
	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
}

/* What a fork of the test has no business with: other peers' sockets, the leash. (A copy of them would keep their ends
 * from being seen.) */
static void close_but(int a, int b)
{
	for (int fd = 3; fd < 1024; fd++)
		if (fd != a && fd != b)
			(void)close(fd);
}

static int become(uid_t uid)
{
	if (uid == getuid())
		return 0;
	if (setgroups(0, NULL) < 0 || setresgid(uid, uid, uid) < 0 || setresuid(uid, uid, uid) < 0)
		return -errno;
	return prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) < 0 ? -errno : 0;
}

/* The parent of a process; 0: no such process. */
static pid_t parent_of(pid_t pid)
{
	char path[64], text[512], *p;
	cleanup_close int fd = -1;
	ssize_t n;
	int parent;

	(void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		return 0;
	text[n] = 0;
	p = strrchr(text, ')');
	return p && sscanf(p + 1, " %*c %d", &parent) == 1 ? parent : 0;
}

static size_t descendants(pid_t of, pid_t *pids, size_t max)
{
	DIR *d = opendir("/proc");
	struct dirent *e;
	size_t n = 0;

	if (!d)
		return 0;
	while ((e = readdir(d))) {
		pid_t pid = atoi(e->d_name), up = pid;

		if (!isdigit((unsigned char)e->d_name[0]))
			continue;
		while (up > 1 && (up = parent_of(up)) > 1)
			if (up == of) {
				if (n < max)
					pids[n++] = pid;
				break;
			}
	}
	(void)closedir(d);
	return n;
}

static unsigned int count_entries(const char *path)
{
	DIR *d = opendir(path);
	unsigned int n = 0;
	struct dirent *e;

	while (d && (e = readdir(d)))
		n += e->d_name[0] != '.';
	if (d)
		(void)closedir(d);
	return n;
}

/* Also one that nobody has reaped yet; but not while one of its threads still has its files. */
static bool is_gone(pid_t pid)
{
	char path[64], text[512], *p;
	cleanup_close int fd = -1;
	ssize_t n;

	(void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	text[n < 0 ? 0 : n] = 0;
	p = strrchr(text, ')');
	if (!p)
		return true;
	(void)snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	return (p[2] == 'Z' || p[2] == 'X') && count_entries(path) <= 1;
}

static void until_gone(pid_t pid)
{
	uint64_t end = now_ms() + WAIT_MS;

	while (!is_gone(pid) && now_ms() < end)
		(void)usleep(200);
	if (!is_gone(pid)) {
		dump_process(pid);
		failed("process %d does not end", (int)pid);
	}
}

static int tool_fd(void)
{
	const char *out = getenv("OUT");
	cleanup_free char *path = data_text("%s/weightd", out ? out : ".out");
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	if (fd < 0) {
		(void)fprintf(stderr, "%s: %s: build it first\n", path, strerror(errno));
		abort();
	}
	return fd;
}

static int split(char *text, char **words, int max)
{
	int n = 0;
	char *save = NULL;

	for (char *w = strtok_r(text, " ", &save); w && n < max - 1; w = strtok_r(NULL, " ", &save))
		words[n++] = w;
	words[n] = NULL;
	return n;
}

/* ------------------------------------------------------------------ the guard */

struct start {
	char *socket;
	const char *options;
	void (*setup)(void);
	uid_t uid;
	int tool;
};

static void guard_spawn(const struct start *s, int leash, int signals, const char *more)
{
	cleanup_free char *text = data_text("weightd serve --config /dev/null --socket %s %s %s", s->socket,
					    s->options ? s->options : "", more);
	char *argv[MAX_WORDS];
	int argc;

	if (fork() != 0)
		return;
	(void)close(leash);
	(void)close(signals);
	default_signals();
	argc = split(text, argv, MAX_WORDS);
	if (become(s->uid) < 0)
		_exit(126);
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (s->setup) {
		s->setup();
		/* as main() does: "weightd serve" is one word there */
		argv[1] = "weightd serve";
		optind = 1;
		exit(cmd_serve(argc - 1, argv + 1));
	}
	(void)fexecve(s->tool, argv, environ);
	_exit(127);
}

/* Everything below is killed, and reaped as it comes up to this process: when no child is left, nobody is. */
static int guard_end(void)
{
	uint64_t end = now_ms() + WAIT_MS;
	pid_t pids[256], r;
	size_t n;

	do {
		n = descendants(getpid(), pids, ARRAY_SIZE(pids));
		for (size_t i = 0; i < n; i++)
			(void)kill(pids[i], SIGKILL);
		(void)usleep(500);
		while ((r = waitpid(-1, NULL, WNOHANG)) > 0)
			;
	} while (r == 0 && now_ms() < end);
	for (size_t i = 0; r == 0 && i < n; i++)
		dump_process(pids[i]);
	return r == 0;
}

static void __attribute__((noreturn)) guard_main(const struct start *s, int leash)
{
	sigset_t chld;
	int signals;

	close_but(leash, s->tool);
	(void)setsid();
	default_signals();
	(void)signal(SIGPIPE, SIG_IGN);
	(void)sigemptyset(&chld);
	(void)sigaddset(&chld, SIGCHLD);
	(void)sigprocmask(SIG_BLOCK, &chld, NULL);
	signals = signalfd(-1, &chld, SFD_CLOEXEC);
	if (signals < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) < 0)
		_exit(2);
	guard_spawn(s, leash, signals, "");
	for (;;) {
		struct pollfd p[2] = { { leash, POLLIN, 0 }, { signals, POLLIN, 0 } };
		char more[512];
		ssize_t n;

		if (poll(p, 2, -1) < 0 && errno != EINTR)
			_exit(guard_end());
		if (p[1].revents) {
			struct signalfd_siginfo info;

			(void)!read(signals, &info, sizeof(info));
			while (waitpid(-1, NULL, WNOHANG) > 0)
				;
		}
		if (!p[0].revents)
			continue;
		n = recv(leash, more, sizeof(more) - 1, 0);
		if (n <= 0)
			_exit(guard_end());
		more[n] = 0;
		guard_spawn(s, leash, signals, more);
	}
}

/* ------------------------------------------------------------------ the daemon */

static void start(struct daemon *d, const char *options, void (*setup)(void), uid_t uid)
{
	struct start s = { .options = options, .setup = setup, .uid = uid };
	int sv[2];

	if (!words_shared) {
		words_shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		need((void *)words_shared != MAP_FAILED);
	}
	d->folder = data_tmpdir();
	d->socket = data_text("%s/s", d->folder);
	need(chmod(d->folder, 0755) == 0);
	if (uid != getuid())
		need(chown(d->folder, uid, uid) == 0);
	s.socket = d->socket;
	s.tool = tool_fd();
	for (const char *const *name = (const char *const[]){ "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID",
							      "LISTEN_FDNAMES", "WEIGHTD_KEEPER", "WEIGHTD_MODE",
							      "WEIGHTD_DISABLE", "WEIGHTD_AUTOSTART", NULL };
	     *name; name++)
		(void)unsetenv(*name);
	need(setenv("WEIGHTD_SOCKET", d->socket, 1) == 0);
	need(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv) == 0);
	(void)fflush(NULL);
	d->guard = fork();
	need(d->guard >= 0);
	if (d->guard == 0)
		guard_main(&s, sv[1]);
	(void)close(sv[1]);
	(void)close(s.tool);
	d->leash = sv[0];
	d->pid = 0;
	running = d;
	daemon_wait_other(d);
}

void daemon_start(struct daemon *d, const char *options, void (*setup)(void))
{
	start(d, options, setup, getuid());
}

void daemon_start_as(struct daemon *d, uid_t uid, const char *options)
{
	start(d, options, NULL, uid);
}

void daemon_stop(struct daemon *d)
{
	int r = 0;

	if (d->guard > 0) {
		(void)close(d->leash);
		r = child_result(d->guard);
	}
	if (d->folder)
		data_remove(d->folder);
	free(d->folder);
	free(d->socket);
	*d = (struct daemon){ 0 };
	running = NULL;
	need_msg(r == 0, "a process of the daemon's cannot be killed (%d)", r);
}

pid_t daemon_answers(const struct daemon *d)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	cleanup_close int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	cleanup_free union wire_any *m = malloc(sizeof(*m));
	struct wire_hello hello = { .version = WIRE_VERSION, .name = "test" };
	int fds[WIRE_MAX_FDS], r;
	unsigned int nr = 0;

	(void)snprintf(to.sun_path, sizeof(to.sun_path), "%s", d->socket);
	if (fd < 0 || !m || connect(fd, (struct sockaddr *)&to, sizeof(to)) < 0)
		return 0;
	WIRE_INIT(hello, WIRE_HELLO, 1);
	if (wire_send(fd, &hello, NULL, 0, true) < 0)
		return 0;
	r = wire_recv(fd, m, fds, &nr, 1000);
	if (r != 1)
		return 0;
	for (unsigned int i = 0; i < nr; i++)
		(void)close(fds[i]);
	return m->h.type == WIRE_WELCOME && !m->welcome.status ? (pid_t)m->welcome.pid : 0;
}

void daemon_wait_other(struct daemon *d)
{
	uint64_t end = now_ms() + WAIT_MS;
	pid_t pid = 0, other[1];

	do {
		pid = daemon_answers(d);
		if (pid && pid != d->pid) {
			d->pid = pid;
			return;
		}
		/* one that has ended with an error need not be waited for */
		if (!d->pid && now_ms() + WAIT_MS > end + 1000 && !descendants(d->guard, other, 1))
			break;
		(void)usleep(1000);
	} while (now_ms() < end);
	dump_all(d, 0);
	failed("the daemon does not answer at %s", d->socket);
}

void daemon_start_again(struct daemon *d, const char *more_options)
{
	cleanup_free char *text = data_text(" %s", more_options);

	need(send(d->leash, text, strlen(text), MSG_NOSIGNAL) > 0);
	daemon_wait_other(d);
}

void daemon_kill(struct daemon *d)
{
	need(d->pid > 0);
	need(kill(d->pid, SIGKILL) == 0);
	until_gone(d->pid);
}

static bool is_stopped(pid_t pid)
{
	char folder[64];
	struct dirent *e;
	bool all = true;
	DIR *d;

	(void)snprintf(folder, sizeof(folder), "/proc/%d/task", (int)pid);
	d = opendir(folder);
	while (d && all && (e = readdir(d))) {
		char path[sizeof(folder) + 300], text[512], *p;
		cleanup_close int fd = -1;
		ssize_t n;

		if (e->d_name[0] == '.')
			continue;
		(void)snprintf(path, sizeof(path), "%s/%s/stat", folder, e->d_name);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
		text[n < 0 ? 0 : n] = 0;
		p = strrchr(text, ')');
		all = !p || p[2] == 'T' || p[2] == 't';
	}
	if (d)
		(void)closedir(d);
	return all;
}

void daemon_pause(const struct daemon *d)
{
	uint64_t end = now_ms() + WAIT_MS;

	need(kill(d->pid, SIGSTOP) == 0);
	while (!is_stopped(d->pid) && now_ms() < end)
		(void)usleep(200);
	need_msg(is_stopped(d->pid), "the daemon does not stop");
}

size_t daemon_family(const struct daemon *d, pid_t *pids, size_t max)
{
	return descendants(d->guard, pids, max);
}

pid_t keeper_pid_of(const struct daemon *d)
{
	pid_t pids[16];
	size_t n = daemon_family(d, pids, ARRAY_SIZE(pids));

	for (size_t i = 0; i < n; i++)
		if (pids[i] != d->pid)
			return pids[i];
	return 0;
}

void keeper_kill(struct daemon *d)
{
	pid_t pid = keeper_pid_of(d);

	need_msg(pid > 0, "there is no keeper");
	need(kill(pid, SIGKILL) == 0);
	until_gone(pid);
}

/* ------------------------------------------------------------------ what processes hold */

/* (Stacks and heaps of threads that have ended are kept for the next ones by the C library.) */
static unsigned int count_file_maps(const char *path)
{
	cleanup_fclose FILE *f = fopen(path, "re");
	unsigned long inode;
	char line[1024];
	unsigned int n = 0;

	while (f && fgets(line, sizeof(line), f))
		n += sscanf(line, "%*s %*s %*s %*s %lu", &inode) == 1 && inode != 0;
	return n;
}

static uint64_t arena_bytes_of(pid_t pid)
{
	struct {
		dev_t dev;
		ino_t ino;
	} seen[1024];
	unsigned int nr = 0;
	uint64_t sum = 0;
	struct dirent *e;
	char path[64];
	DIR *d;

	(void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
	d = opendir(path);
	while (d && (e = readdir(d))) {
		struct statfs fs;
		struct stat st;
		char name[sizeof(path) + 300];
		unsigned int i;

		(void)snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
		if (e->d_name[0] == '.' || statfs(name, &fs) < 0 || fs.f_type != TMPFS_MAGIC || stat(name, &st) < 0 ||
		    !S_ISREG(st.st_mode))
			continue;
		for (i = 0; i < nr && (seen[i].dev != st.st_dev || seen[i].ino != st.st_ino); i++)
			;
		if (i < nr || nr == ARRAY_SIZE(seen))
			continue;
		seen[nr].dev = st.st_dev;
		seen[nr++].ino = st.st_ino;
		sum += (uint64_t)st.st_blocks * 512;
	}
	if (d)
		(void)closedir(d);
	return sum;
}

struct held held_by(pid_t pid)
{
	struct held h = { 0 };
	char path[64];

	(void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
	h.fds = count_entries(path);
	(void)snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	h.threads = count_entries(path);
	(void)snprintf(path, sizeof(path), "/proc/%d/maps", (int)pid);
	h.maps = count_file_maps(path);
	h.arena_bytes = arena_bytes_of(pid);
	(void)snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
	h.anon_bytes = proc_kib(path, "RssAnon:") * KiB;
	return h;
}

struct held daemon_held_until(const struct daemon *d, const struct held *most)
{
	uint64_t end = now_ms() + WAIT_MS;
	struct held h;

	do {
		h = held_by(d->pid);
		if (h.fds <= most->fds && h.threads <= most->threads && h.maps <= most->maps &&
		    h.arena_bytes <= most->arena_bytes)
			break;
		(void)usleep(5000);
	} while (now_ms() < end);
	return h;
}

uint64_t pss_of(pid_t pid)
{
	char path[64];

	(void)snprintf(path, sizeof(path), "/proc/%d/smaps_rollup", (int)pid);
	return proc_kib(path, "Pss:") * KiB;
}

static void show(const char *path, const char *what)
{
	char text[4096];
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

	if (n <= 0)
		return;
	text[n] = 0;
	(void)fprintf(stderr, "    %s: %s%s", what, text, text[n - 1] == '\n' ? "" : "\n");
}

void dump_process(pid_t pid)
{
	char path[128], name[400];
	struct dirent *e;
	DIR *d;

	(void)snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	d = opendir(path);
	(void)fprintf(stderr, "---- process %d%s\n", (int)pid, d ? "" : " is gone");
	while (d && (e = readdir(d))) {
		if (e->d_name[0] == '.')
			continue;
		(void)fprintf(stderr, "  thread %s\n", e->d_name);
		for (const char *const *file = (const char *const[]){ "comm", "syscall", "wchan", "stack", NULL };
		     *file; file++) {
			(void)snprintf(name, sizeof(name), "%s/%s/%s", path, e->d_name, *file);
			show(name, *file);
		}
	}
	if (d)
		(void)closedir(d);
	(void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
	d = opendir(path);
	while (d && (e = readdir(d))) {
		char to[128];
		ssize_t n;

		(void)snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
		n = readlink(name, to, sizeof(to) - 1);
		to[n < 0 ? 0 : n] = 0;
		if (!strstr(to, "userfaultfd]"))
			continue;
		(void)snprintf(name, sizeof(name), "/proc/%d/fdinfo/%s", (int)pid, e->d_name);
		show(name, "userfaultfd");
	}
	if (d)
		(void)closedir(d);
}

void dump_all(const struct daemon *d, pid_t peer)
{
	pid_t pids[16];
	size_t n = d && d->guard ? daemon_family(d, pids, ARRAY_SIZE(pids)) : 0;

	if (peer)
		dump_process(peer);
	for (size_t i = 0; i < n; i++)
		dump_process(pids[i]);
}

void add_full_named(TCase *tc, const char *name, const TTest *test, int from, int to)
{
	static struct pager_caps caps;

	if (!caps.page_bytes)
		pager_caps_probe(&caps, NULL);
	if (caps.dev_userfaultfd == 0 || caps.sys_userfaultfd == 0)
		tcase_add_loop_test(tc, test, from, to);
	else
		skip(name, "a daemon of this user gets user-mode faults only");
}

/* ------------------------------------------------------------------ the tool */

void tool_done(struct tool *t)
{
	free(t->out);
	free(t->err);
}

static char *read_back(int fd)
{
	struct stat st;
	char *text;

	need(fstat(fd, &st) == 0);
	text = calloc(1, (size_t)st.st_size + 1);
	need(text);
	need(pread(fd, text, (size_t)st.st_size, 0) == st.st_size);
	return text;
}

static struct tool run_words(uid_t uid, char *text)
{
	cleanup_close int out = memfd_create("out", MFD_CLOEXEC);
	cleanup_close int err = memfd_create("err", MFD_CLOEXEC);
	cleanup_close int tool = tool_fd();
	char *argv[MAX_WORDS];
	struct tool t;
	pid_t pid;

	(void)split(text, argv, MAX_WORDS);
	(void)fflush(NULL);
	pid = fork();
	need(pid >= 0);
	if (pid == 0) {
		default_signals();
		(void)dup2(open("/dev/null", O_RDWR), 0);
		(void)dup2(out, 1);
		(void)dup2(err, 2);
		(void)alarm(PEER_SECONDS);
		if (become(uid) == 0)
			(void)fexecve(tool, argv, environ);
		_exit(127);
	}
	t.code = child_result(pid);
	t.out = read_back(out);
	t.err = read_back(err);
	return t;
}

struct tool tool_run(uid_t uid, const char *fmt, ...)
{
	cleanup_free char *words = NULL, *text = NULL;
	va_list ap;

	va_start(ap, fmt);
	if (vasprintf(&words, fmt, ap) < 0)
		abort();
	va_end(ap);
	text = data_text("weightd %s", words);
	return run_words(uid, text);
}

void must_tool(const char *fmt, ...)
{
	cleanup_free char *words = NULL, *text = NULL;
	cleanup_tool struct tool t = { 0 };
	va_list ap;

	va_start(ap, fmt);
	if (vasprintf(&words, fmt, ap) < 0)
		abort();
	va_end(ap);
	text = data_text("weightd %s", words);
	t = run_words(getuid(), text);
	need_msg(t.code == 0 && !*t.err, "weightd %s: %d: %s", words, t.code, t.err);
}

json_t *must_json(uid_t uid, const char *words)
{
	cleanup_tool struct tool t = tool_run(uid, "%s --json", words);
	json_error_t error = { 0 };
	json_t *j;

	need_msg(t.code == 0, "weightd %s --json: %d: %s", words, t.code, t.err);
	j = json_loads(t.out, 0, &error);
	need_msg(j != NULL, "weightd %s --json: %s: %s", words, error.text, t.out);
	return j;
}

static json_t *find(json_t *j, const char *key)
{
	json_t *found = NULL, *value;
	const char *name;
	size_t i;

	if (json_is_object(j)) {
		found = json_object_get(j, key);
		if (found)
			return found;
		json_object_foreach(j, name, value) {
			found = find(value, key);
			if (found)
				return found;
		}
	}
	if (json_is_array(j))
		json_array_foreach(j, i, value) {
			found = find(value, key);
			if (found)
				return found;
		}
	return NULL;
}

uint64_t must_stat(const char *key)
{
	json_t *j = must_json(getuid(), "stat"), *value = find(j, key);
	uint64_t n;

	need_msg(json_is_integer(value), "weightd stat --json has no number \"%s\"", key);
	n = (uint64_t)json_integer_value(value);
	json_decref(j);
	return n;
}

uint64_t stat_until_at_most(const char *key, uint64_t most)
{
	uint64_t end = now_ms() + WAIT_MS, n;

	while ((n = must_stat(key)) > most && now_ms() < end)
		(void)usleep(5000);
	return n;
}

void must_drop_all(bool force)
{
	uint64_t end = now_ms() + WAIT_MS, left;

	do
		must_tool("drop --all%s", force ? " --force" : "");
	while ((left = must_stat("resident_bytes")) && now_ms() < end);
	need_msg(!left, "%" PRIu64 " KiB stay in memory", left / KiB);
}

json_t *listed(uid_t uid, const char *name, json_t **ret_all)
{
	json_t *sources, *value;
	size_t i;

	*ret_all = must_json(uid, "ls");
	sources = find(*ret_all, "views");
	need_msg(json_is_array(sources), "weightd ls --json has no array \"views\"");
	json_array_foreach(sources, i, value) {
		const char *text = json_string_value(json_object_get(value, "name"));
		size_t have = text ? strlen(text) : 0, want = strlen(name);

		if (have >= want && !strcmp(text + have - want, name))
			return value;
	}
	return NULL;
}

/* ------------------------------------------------------------------ peers */

struct order {
	peer_fn fn;
	unsigned char arg[PEER_ARG];
};

struct result {
	int64_t value;
	char text[PEER_TEXT];
};

static char said[PEER_TEXT];

int64_t peer_say(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(said, sizeof(said), fmt, ap);
	va_end(ap);
	return -1;
}

static void __attribute__((noreturn)) peer_main(int fd, uid_t uid)
{
	close_but(fd, -1);
	default_signals();
	if (become(uid) < 0)
		_exit(126);
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;) {
		struct result r = { 0 };
		struct order o;

		if (recv(fd, &o, sizeof(o), 0) != (ssize_t)sizeof(o)) {
			(void)do_disconnect(NULL);
			exit(0);
		}
		said[0] = 0;
		r.value = o.fn(o.arg);
		memcpy(r.text, said, sizeof(said));
		if (send(fd, &r, sizeof(r), MSG_NOSIGNAL) < 0)
			exit(1);
	}
}

void peer_new(struct peer *p, uid_t uid)
{
	int sv[2];

	*p = (struct peer){ .fd = -1 };
	need(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sv) == 0);
	(void)fflush(NULL);
	p->pid = fork();
	need(p->pid >= 0);
	if (p->pid == 0)
		peer_main(sv[1], uid);
	(void)close(sv[1]);
	p->fd = sv[0];
}

void peer_begin(struct peer *p, const char *doing, peer_fn fn, const void *arg, size_t nbytes)
{
	struct order o = { .fn = fn };

	need(nbytes <= sizeof(o.arg));
	memcpy(o.arg, arg, nbytes);
	p->doing = doing;
	need(send(p->fd, &o, sizeof(o), MSG_NOSIGNAL) == sizeof(o));
}

void until_in_fork(pid_t pid)
{
	uint64_t end = now_ms() + WAIT_MS;
	char path[64], text[64];

	(void)snprintf(path, sizeof(path), "/proc/%d/wchan", (int)pid);
	do {
		cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
		ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

		text[n < 0 ? 0 : n] = 0;
		if (strstr(text, "userfaultfd_event") || strstr(text, "dup_userfaultfd"))
			return;
		(void)usleep(200);
	} while (now_ms() < end);
	dump_process(pid);
	failed("process %d is in no fork: %s", (int)pid, text);
}

bool peer_has_ended(const struct peer *p)
{
	struct pollfd pf = { p->fd, POLLIN, 0 };

	return poll(&pf, 1, 0) == 1;
}

int64_t peer_end(struct peer *p)
{
	struct pollfd pf = { p->fd, POLLIN, 0 };
	struct result r;
	int n = poll(&pf, 1, PEER_SECONDS * 1000);

	if (n == 0) {
		dump_all(running, p->pid);
		failed("%s in client %d hangs", p->doing, (int)p->pid);
	}
	if (recv(p->fd, &r, sizeof(r), 0) != (ssize_t)sizeof(r))
		failed("%s: client %d has died: %d", p->doing, (int)p->pid, child_result(p->pid));
	memcpy(p->text, r.text, sizeof(p->text));
	return r.value;
}

void peer_leave(struct peer *p)
{
	uint64_t end = now_ms() + PEER_SECONDS * 1000;
	int status;
	pid_t r;

	(void)shutdown(p->fd, SHUT_RDWR); /* later peers have a copy */
	(void)close(p->fd);
	while ((r = waitpid(p->pid, &status, WNOHANG)) == 0 && now_ms() < end)
		(void)usleep(500);
	if (r == 0) {
		dump_all(running, p->pid);
		failed("client %d does not end", (int)p->pid);
	}
	need_msg(WIFEXITED(status) && !WEXITSTATUS(status), "client %d ended with status %x", (int)p->pid, status);
	*p = (struct peer){ .fd = -1 };
}

void peer_kill(struct peer *p)
{
	need(kill(p->pid, SIGKILL) == 0);
	need(child_result(p->pid) == 1000 + SIGKILL);
	(void)close(p->fd);
	*p = (struct peer){ .fd = -1 };
}

/* ------------------------------------------------------------------ what peers do */

struct wd *my_wd;
struct wd_model *my_models[MODELS];

_Atomic uint64_t *shared_words(void)
{
	return words_shared;
}

int64_t do_connect(const void *arg)
{
	const struct use *u = arg;
	struct wd_options o = { .size = sizeof(o), .way = WD_WAY_DAEMON, .flags = u->flags };

	if (my_wd)
		return 0;
	if (wd_connect(&o, &my_wd) < 0)
		return peer_say("%s", wd_error());
	if (wd_way(my_wd) != WD_WAY_DAEMON)
		return peer_say("connected by way %s", wd_way_name(wd_way(my_wd)));
	return 0;
}

int64_t do_open(const void *arg)
{
	const struct use *u = arg;
	int r;

	if (do_connect(u) < 0)
		return -1;
	r = wd_model_open(my_wd, u->path, NULL, &my_models[u->slot]);
	if (r < 0) {
		(void)peer_say("%s", wd_error());
		return r;
	}
	return 0;
}

int64_t do_check(const void *arg)
{
	const struct use *u = arg;
	struct wd_model *m = my_models[u->slot];
	size_t nr = wd_model_nr_tensors(m);

	for (size_t i = 0; i < nr; i++) {
		const struct wd_tensor *t = wd_model_tensor_at(m, (i + u->value) % nr);
		int64_t wrong = data_check(t->data, t->nbytes, u->seed, t->file_offset);

		if (wrong >= 0)
			return peer_say("%s: %s: byte %lld (of the file: %llu) is %02x", t->file, t->name,
					(long long)wrong, (unsigned long long)t->file_offset + (uint64_t)wrong,
					((unsigned char *)t->data)[wrong]);
	}
	return 0;
}

int64_t do_touch(const void *arg)
{
	const struct use *u = arg;
	struct wd_model *m = my_models[u->slot];

	for (size_t i = 0; i < wd_model_nr_tensors(m); i++)
		touch_all(wd_model_tensor_at(m, i));
	return 0;
}

int64_t do_populate(const void *arg)
{
	const struct use *u = arg;
	struct wd_job *j;
	int r = wd_populate(my_models[u->slot], NULL, &j);

	if (r == 0) {
		r = wd_job_wait(j, PEER_SECONDS * 1000);
		wd_job_free(j);
	}
	if (r < 0)
		(void)peer_say("%s", wd_error());
	return r;
}

int64_t do_release(const void *arg)
{
	const struct use *u = arg;

	if (wd_model_release(my_models[u->slot]) < 0 || wd_sync(my_wd) < 0)
		return peer_say("%s", wd_error());
	return 0;
}

int64_t do_close(const void *arg)
{
	const struct use *u = arg;

	wd_model_close(TAKE_PTR(my_models[u->slot]));
	return 0;
}

int64_t do_disconnect(const void *arg)
{
	(void)arg;
	for (size_t i = 0; i < MODELS; i++)
		wd_model_close(TAKE_PTR(my_models[i]));
	wd_disconnect(TAKE_PTR(my_wd));
	return 0;
}

int64_t do_stage(const void *arg)
{
	const struct use *u = arg;
	int r = u->path[0] ? wd_stage_begin(my_wd, u->path) : wd_stage_end(my_wd);

	return r < 0 ? peer_say("%s", wd_error()) : 0;
}

static int64_t read_somewhere(struct wd_model *m, uint64_t seed, uint64_t *random)
{
	const struct wd_tensor *t = wd_model_tensor_at(m, rnd(random) % wd_model_nr_tensors(m));
	uint64_t at = t->nbytes > 8 ? rnd(random) % (t->nbytes - 8) : 0, n = MIN(t->nbytes, (uint64_t)8);

	if (data_check((const char *)t->data + at, n, seed, t->file_offset + at) < 0)
		return 0;
	return peer_say("%s: %s: byte %llu (of the file: %llu) is wrong", t->file, t->name, (unsigned long long)at,
			(unsigned long long)(t->file_offset + at));
}

int64_t do_random(const void *arg)
{
	const struct use *u = arg;
	uint64_t random = u->value2 + 1;

	for (uint64_t i = 0; i < u->value; i++)
		if (read_somewhere(my_models[u->slot], u->seed, &random) < 0)
			return -1;
	return 0;
}

int64_t do_storm(const void *arg)
{
	const struct use *u = arg;
	uint64_t random = u->value2 + 1;
	int64_t n = 0;

	while (!words_shared[0]) {
		for (unsigned int i = 0; i < 16; i++, n++)
			if (read_somewhere(my_models[u->slot], u->seed, &random) < 0)
				return -1;
	}
	return n;
}

int64_t do_open_and_check(const void *arg)
{
	int64_t r = do_open(arg);

	return r < 0 ? r : do_check(arg);
}

/* ------------------------------------------------------------------ children of peers */

#define MAX_CHILDREN 64
static pid_t children[MAX_CHILDREN];
static unsigned int nr_children;

pid_t raw_clone(void)
{
	return (pid_t)syscall(SYS_clone, (long)SIGCHLD, 0L, 0L, 0L, 0L);
}

/* No stdio, no malloc: for children of a raw clone as well. */
static void __attribute__((noreturn)) child_main(const struct use *u, int64_t (*check)(const void *))
{
	int64_t r;

	(void)syscall(SYS_prctl, PR_SET_PDEATHSIG, SIGKILL);
	r = check(u);
	if (r < 0)
		(void)!write(STDERR_FILENO, said, strlen(said));
	(void)syscall(SYS_exit_group, r < 0 ? 1 : 0);
	__builtin_unreachable();
}

static int64_t check_when_told(const void *arg)
{
	while (!words_shared[1])
		(void)usleep(200);
	return do_check(arg);
}

static pid_t fork_kind(const struct use *u, uint64_t kind, int64_t (*check)(const void *))
{
	pid_t pid = kind == RAW_CLONE ? raw_clone() : fork();

	if (pid != 0)
		return pid;
	if (kind == FORK_OF_FORK) {
		pid = fork();
		if (pid != 0)
			_exit(pid < 0 ? 99 : child_result(pid));
	}
	child_main(u, check);
}

int64_t do_fork(const void *arg)
{
	const struct use *u = arg;
	struct use check = *u;

	check.value = 0;
	if (nr_children == MAX_CHILDREN)
		return -1;
	children[nr_children] = fork_kind(&check, u->value, check_when_told);
	return children[nr_children++] < 0 ? peer_say("fork: %s", strerror(errno)) : 0;
}

int64_t do_fork_end(const void *arg)
{
	int64_t wrong = 0;

	(void)arg;
	for (unsigned int i = 0; i < nr_children; i++) {
		int r = child_result(children[i]);

		if (r)
			(void)peer_say("child %u: %d", i, r);
		wrong -= r != 0;
	}
	nr_children = 0;
	return wrong;
}

static int64_t check_somewhere(const void *arg)
{
	return do_random(arg);
}

int64_t do_fork_storm(const void *arg)
{
	struct use u = *(const struct use *)arg;
	uint64_t kind = u.value2;
	int64_t n = 0;

	for (; !words_shared[0]; n++) {
		pid_t pid;
		int r;

		u.value2 = (uint64_t)n * 77 + (uint64_t)getpid();
		pid = fork_kind(&u, kind, check_somewhere);
		if (pid < 0)
			return peer_say("fork: %s", strerror(errno));
		r = child_result(pid);
		if (r)
			return peer_say("child %lld: %d", (long long)n, r);
	}
	return n;
}

int admin_connect(void)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	static union wire_any m;
	struct wire_hello hello = { .version = WIRE_VERSION, .name = "drops" };
	int fds[WIRE_MAX_FDS];
	unsigned int nr = 0;

	(void)snprintf(to.sun_path, sizeof(to.sun_path), "%s", getenv("WEIGHTD_SOCKET"));
	WIRE_INIT(hello, WIRE_HELLO, 1);
	if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof(to)) < 0 || wire_send(fd, &hello, NULL, 0, true) < 0 ||
	    wire_recv(fd, &m, fds, &nr, 5000) != 1) {
		if (fd >= 0)
			(void)close(fd);
		return -1;
	}
	for (unsigned int i = 0; i < nr; i++)
		(void)close(fds[i]);
	return fd;
}

int admin_drop_all(int fd)
{
	struct wire_admin drop = { .flags = WIRE_ALL | WIRE_FORCE };
	static union wire_any m;
	int fds[WIRE_MAX_FDS];
	unsigned int nr = 0;

	WIRE_INIT(drop, WIRE_DROP, 2);
	if (wire_send(fd, &drop, NULL, 0, true) < 0 || wire_recv(fd, &m, fds, &nr, PEER_SECONDS * 1000) != 1)
		return -EPIPE;
	if (m.h.type != WIRE_ERROR)
		return 0;
	(void)peer_say("drop: %d: %s", m.error.status, m.error.text);
	return m.error.status;
}

int64_t do_drop_storm(const void *arg)
{
	int64_t n = 0;
	int fd = -1;

	(void)arg;
	while (!n || !words_shared[0]) {
		int r;

		/* The daemon may be killed under this. */
		if (fd < 0 && (fd = admin_connect()) < 0) {
			(void)usleep(1000);
			continue;
		}
		r = admin_drop_all(fd);
		if (r == -EPIPE) {
			(void)close(fd);
			fd = -1;
			continue;
		}
		if (r < 0 && r != -EBUSY && r != -ETIMEDOUT)
			return r;
		n++;
		(void)usleep(500);
	}
	(void)close(fd);
	return n;
}

struct use new_model(const char *name, size_t nr, uint64_t nbytes, uint64_t seed, unsigned int slot)
{
	cleanup_free char *path = make_model(name, nr, nbytes, seed);
	struct use u = { .seed = seed, .slot = slot };

	need(chmod(test_dir, 0755) == 0);
	need(chmod(path, 0644) == 0);
	(void)data_drop_cache(path);
	(void)snprintf(u.path, sizeof(u.path), "%s", path);
	return u;
}

uint64_t file_bytes(const char *path)
{
	struct stat st;

	need(stat(path, &st) == 0);
	return (uint64_t)st.st_size;
}
