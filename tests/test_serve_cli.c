/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `weightd serve` from outside: command line and file, sockets, service managers, signals, limits, and what a
 * connection may say. What the daemon does with memory is tested elsewhere; here clients speak the protocol by hand.
 *
 * Daemons and keepers outlive whoever starts them, so main() runs the suite in a child, is the reaper of all that come
 * from it, and kills what is left when that child ends, in whatever way.
 *
 * Threads: none.
 */
#include <check.h>
#include <ctype.h>
#include <dirent.h>
#include <fcntl.h>
#include <grp.h>
#include <jansson.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/file.h>
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

#include "cli/serve_config.c" /* the tests are linked with the library's objects, not with the tool's */
#include "lib/include/weightd.h"
#include "tests/data.h"
#include "ufd/arena.h"
#include "ufd/page.h"
#include "ufd/uffd.h"

#define NOBODY 65534u
#define LONG_MS 20000 /* no figure of a test: longer than anything that is not stuck */

static char *dir, *socket_path;
static int tool;

static int elapsed_ms(const struct timespec *since)
{
	struct timespec now;

	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	return (int)((now.tv_sec - since->tv_sec) * 1000 + (now.tv_nsec - since->tv_nsec) / 1000000);
}

/* ------------------------------------------------------------------ programs */

struct how {
	const char *const *env; /* "NAME=value", NULL at the end; NULL: none */
	int listener;           /* passed as descriptor 3; 0: none */
	bool listen_other_pid;
	bool nobody;
	bool private_tmp;
	unsigned int nofile; /* limit on descriptors; 0: as it is */
};

struct program {
	pid_t pid;
	int out, err; /* files */
};

static void become(const struct how *how, struct program *p, char **argv)
{
	static const char *const unset[] = { "LISTEN_FDS",      "LISTEN_PID",      "NOTIFY_SOCKET",   "WEIGHTD_KEEPER",
					     "WEIGHTD_SOCKET",  "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR", "WEIGHTD_MODE",
					     "WEIGHTD_DISABLE", "WEIGHTD_LOG" };
	int null = open("/dev/null", O_RDWR);
	sigset_t none;

	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
	(void)dup2(null, 0);
	(void)dup2(p->out, 1);
	(void)dup2(p->err, 2);
	for (size_t i = 0; i < ARRAY_SIZE(unset); i++)
		(void)unsetenv(unset[i]);
	(void)setenv("HOME", dir, 1);
	for (size_t i = 0; how->env && how->env[i]; i++)
		(void)putenv((char *)how->env[i]);
	/* It must not be removed together with the folder of a test that a mount hides. */
	if (how->private_tmp && (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
				 mount("none", "/tmp", "tmpfs", 0, "mode=1777") < 0))
		_exit(125);
	if (how->nofile && setrlimit(RLIMIT_NOFILE, &(struct rlimit){ how->nofile, how->nofile }) < 0)
		_exit(124);
	if (how->nobody && (setgroups(0, NULL) < 0 || setgid(NOBODY) < 0 || setuid(NOBODY) < 0))
		_exit(126);
	if (how->listener) {
		char pid[16];

		(void)snprintf(pid, sizeof(pid), "%d", how->listen_other_pid ? 1 : getpid());
		(void)setenv("LISTEN_PID", pid, 1);
		(void)setenv("LISTEN_FDS", "1", 1);
		if (tool == 3)
			tool = fcntl(tool, F_DUPFD_CLOEXEC, 10);
		(void)dup2(how->listener, 3);
		if (how->listener == 3)
			(void)fcntl(3, F_SETFD, 0);
	}
	(void)fexecve(tool, argv, environ);
	_exit(127);
}

#define MAX_WORDS 32
/* "serve" and these words (blanks between them), %s: the socket. */
static struct program start(const struct how *how, const char *fmt, ...)
{
	struct program p = { .out = memfd_create("out", MFD_CLOEXEC), .err = memfd_create("err", MFD_CLOEXEC) };
	cleanup_free char *text = NULL;
	char *argv[MAX_WORDS + 2] = { (char *)"weightd", (char *)"serve" }, *save = NULL;
	va_list args;
	int n = 2;

	va_start(args, fmt);
	ck_assert_int_ge(vasprintf(&text, fmt, args), 0);
	va_end(args);
	for (char *w = strtok_r(text, " ", &save); w && n < MAX_WORDS; w = strtok_r(NULL, " ", &save))
		argv[n++] = w;
	ck_assert_int_ge(p.out, 0);
	ck_assert_int_ge(p.err, 0);
	p.pid = fork();
	ck_assert_int_ge(p.pid, 0);
	if (p.pid == 0)
		become(how ? how : &(struct how){ 0 }, &p, argv);
	return p;
}

static char *text_of(int fd)
{
	struct stat st;
	char *text;

	ck_assert_int_eq(fstat(fd, &st), 0);
	text = calloc(1, (size_t)st.st_size + 1);
	ck_assert_ptr_nonnull(text);
	ck_assert_int_eq(pread(fd, text, (size_t)st.st_size, 0), st.st_size);
	return text;
}

/* Waits for its end. Return: exit code, or 1000 + signal; -1: it still runs after that time. */
static int ended(const struct program *p, int timeout_ms)
{
	cleanup_close int pidfd = (int)syscall(SYS_pidfd_open, p->pid, 0);
	struct pollfd poll_it = { .fd = pidfd, .events = POLLIN };
	int status;

	ck_assert_int_ge(pidfd, 0);
	if (poll(&poll_it, 1, timeout_ms) != 1)
		return -1;
	ck_assert_int_eq(waitpid(p->pid, &status, 0), p->pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* It ends with this code, and stderr has these words. */
static void must_end(struct program *p, int code, const char *words)
{
	cleanup_free char *err = NULL;
	int r = ended(p, LONG_MS);

	err = text_of(p->err);
	ck_assert_msg(r == code, "ended with %d, not %d: %s", r, code, err);
	ck_assert_msg(!words || strstr(err, words), "no '%s' in: %s", words, err);
	(void)close(p->out);
	(void)close(p->err);
}

static void must_say(const struct program *p, const char *words)
{
	struct timespec since;

	(void)clock_gettime(CLOCK_MONOTONIC, &since);
	for (;;) {
		cleanup_free char *err = text_of(p->err);

		if (strstr(err, words))
			return;
		ck_assert_msg(elapsed_ms(&since) < LONG_MS, "no '%s' in: %s", words, err);
		(void)poll(NULL, 0, 1);
	}
}

/* ------------------------------------------------------------------ a client by hand */

static union wire_any message;
static int message_fds[WIRE_MAX_FDS];
static unsigned int nr_message_fds;

static int dial(const char *path)
{
	struct sockaddr_un to = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	ck_assert_int_ge(fd, 0);
	(void)snprintf(to.sun_path, sizeof(to.sun_path), "%s", path);
	if (connect(fd, (const struct sockaddr *)&to, sizeof(to)) == 0)
		return fd;
	(void)close(fd);
	return -errno;
}

static void close_message_fds(void)
{
	for (unsigned int i = 0; i < nr_message_fds; i++)
		(void)close(message_fds[i]);
	nr_message_fds = 0;
}

static int receive(int fd)
{
	close_message_fds();
	return wire_recv(fd, &message, message_fds, &nr_message_fds, LONG_MS);
}

/* Says HELLO; WELCOME's status. `message` has the rest. */
static int say_hello(int fd, uint32_t version)
{
	struct wire_hello m = { .version = version, .name = "by hand" };

	WIRE_INIT(m, WIRE_HELLO, 1);
	ck_assert_int_eq(wire_send(fd, &m, NULL, 0, true), 0);
	ck_assert_int_eq(receive(fd), 1);
	ck_assert_int_eq(message.h.type, WIRE_WELCOME);
	return message.welcome.status;
}

struct client {
	int control, notify;
	pid_t daemon;
};

static void hang_up(struct client *c)
{
	(void)close(c->control);
	(void)close(c->notify);
	*c = (struct client){ -1, -1, 0 };
}

static struct client client_at(const char *path)
{
	struct client c = { .control = dial(path), .notify = -1 };

	ck_assert_msg(c.control >= 0, "%s: %s", path, strerror(-c.control));
	ck_assert_int_eq(say_hello(c.control, WIRE_VERSION), 0);
	ck_assert_int_ge(nr_message_fds, 1);
	c.notify = message_fds[0];
	message_fds[0] = fcntl(c.notify, F_DUPFD_CLOEXEC, 0);
	c.daemon = (pid_t)message.welcome.pid;
	close_message_fds();
	return c;
}

/* Sends; the answer's type. */
static uint32_t ask_with(const struct client *c, const void *m, const int *fds, unsigned int nr_fds)
{
	ck_assert_int_eq(wire_send(c->control, m, fds, nr_fds, true), 0);
	ck_assert_int_eq(receive(c->control), 1);
	return message.h.type;
}

static uint32_t ask(const struct client *c, enum wire_type type)
{
	struct wire_plain m;

	WIRE_INIT(m, type, 7);
	return ask_with(c, &m, NULL, 0);
}

static json_t *report(const struct client *c, enum wire_type type)
{
	cleanup_free char *text = NULL;
	json_error_t err;
	json_t *j;

	ck_assert_uint_eq(ask(c, type), WIRE_JSON);
	ck_assert_int_eq(message.h.seq, 7);
	ck_assert_uint_eq(nr_message_fds, 1);
	text = text_of(message_fds[0]);
	j = json_loads(text, 0, &err);
	ck_assert_msg(j, "%s in: %s", err.text, text);
	return j;
}

static json_int_t stat_of(const struct client *c, const char *key)
{
	json_t *j = report(c, WIRE_STAT);
	json_int_t n;

	ck_assert_msg(json_is_integer(json_object_get(j, key)), "no number %s", key);
	n = json_integer_value(json_object_get(j, key));
	json_decref(j);
	return n;
}

/* The next message of the daemon's own is a hang-up. */
static void must_hang_up(int fd)
{
	ck_assert_int_eq(receive(fd), 0);
}

/* Waits until a daemon other than `last` answers; a client of it. */
static struct client client_of_other(const char *path, pid_t last)
{
	struct timespec since;

	(void)clock_gettime(CLOCK_MONOTONIC, &since);
	for (;;) {
		int fd = dial(path);
		struct client c;

		/* One that is about to end may hang up before it answers. */
		if (fd >= 0) {
			struct wire_hello m = { .version = WIRE_VERSION, .name = "by hand" };
			int r;

			WIRE_INIT(m, WIRE_HELLO, 1);
			r = wire_send(fd, &m, NULL, 0, true);
			if (r == 0 && receive(fd) == 1 && message.h.type == WIRE_WELCOME &&
			    (pid_t)message.welcome.pid != last) {
				c = (struct client){ fd, message_fds[0], (pid_t)message.welcome.pid };
				for (unsigned int i = 1; i < nr_message_fds; i++)
					(void)close(message_fds[i]);
				nr_message_fds = 0;
				return c;
			}
			(void)close(fd);
		}
		ck_assert_msg(elapsed_ms(&since) < LONG_MS, "no daemon answers at %s", path);
		(void)poll(NULL, 0, 1);
	}
}

/* A daemon that serves; ended by quit(). */
static struct program serving(const struct how *how, const char *options, struct client *ret)
{
	struct program p = start(how, "--socket=%s %s", socket_path, options);
	struct client c = client_of_other(socket_path, 0);

	ck_assert_int_eq(c.daemon, p.pid);
	if (ret)
		*ret = c;
	else
		hang_up(&c);
	return p;
}

static void quit(struct program *p)
{
	ck_assert_int_eq(kill(p->pid, SIGTERM), 0);
	must_end(p, 0, NULL);
	ck_assert_int_eq(access(socket_path, F_OK), -1);
}

/* ------------------------------------------------------------------ a service manager by hand */

static int notify_fd;
static char notify_env[200];
static const char *const notify_vars[] = { notify_env, NULL };
static const struct how under_manager = { .env = notify_vars };

static void manager_start(void)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	const struct timeval limit = { .tv_sec = LONG_MS / 1000 };

	(void)snprintf(at.sun_path, sizeof(at.sun_path), "%s/notify", dir);
	(void)snprintf(notify_env, sizeof(notify_env), "NOTIFY_SOCKET=%s", at.sun_path);
	notify_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	ck_assert_int_ge(notify_fd, 0);
	ck_assert_int_eq(bind(notify_fd, (const struct sockaddr *)&at, sizeof(at)), 0);
	ck_assert_int_eq(setsockopt(notify_fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)), 0);
}

/* The next message has these lines. */
static char *must_notify(const char *line)
{
	static char text[1024];
	ssize_t n = recv(notify_fd, text, sizeof(text) - 1, 0);
	size_t len = strlen(line);
	bool found = false;

	ck_assert_msg(n > 0, "no message with %s", line);
	text[n] = '\0';
	for (const char *p = text; p && !found; p = strchr(p, '\n') ? strchr(p, '\n') + 1 : NULL)
		found = strncmp(p, line, len) == 0;
	ck_assert_msg(found, "no %s in: %s", line, text);
	return text;
}

/* ------------------------------------------------------------------ command line and file */

static char *write_text(const char *name, const char *text)
{
	char *path = data_text("%s/%s", dir, name);

	data_write(path, text, strlen(text));
	return path;
}

static const struct {
	const char *options;
	int code;
	const char *words;
} wrong[] = {
	{ "--nonsense", 2, "Try 'weightd serve --help'" },
	{ "word", 2, "takes no argument: 'word'" },
	{ "--budget=12Q", 2, "--budget: '12Q' is not a budget" },
	{ "--budget=0", 2, "--budget: '0' is not a budget" },
	{ "--budget=101%", 2, "--budget: '101%' is not a budget" },
	{ "--idle-exit=10x", 2, "--idle-exit: '10x' is not a time" },
	{ "--idle-exit=", 2, "--idle-exit: '' is not a time" },
	{ "--idle-exit=-5s", 2, "--idle-exit: '-5s' is not a time" },
	{ "--socket-mode=999", 2, "--socket-mode: '999' is not a file mode" },
	{ "--socket-mode=1777", 2, "--socket-mode: '1777' is not a file mode" },
	{ "--max-clients=0", 2, "--max-clients: '0' is not a number from 1 to 65536" },
	{ "--max-clients-per-user=many", 2, "--max-clients-per-user: 'many' is not a number" },
	{ "--max-views=1e3", 2, "--max-views: '1e3' is not a number" },
	{ "--pin-percent=101", 2, "--pin-percent: '101' is not a number from 1 to 100" },
	{ "--spin-us=10001", 2, "--spin-us: '10001' is not a number" },
	{ "--numa=near", 2, "--numa: 'near' is not a memory policy" },
	{ "--numa=node:", 2, "--numa: 'node:' is not a memory policy" },
	{ "--numa=node:1000", 2, "--numa: this machine has no memory node 1000" },
	{ "--preload=@/does/not/exist", 2, "--preload: /does/not/exist: cannot open" },
	{ "--config=/does/not/exist", 1, "/does/not/exist: cannot open the configuration" },
	{ "--socket=", 2, "--socket: needs a path" },
	{ "--socket=/does/not/exist/s", 1, "/does/not/exist/s.lock: cannot make it" },
	{ "--socket=/0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456"
	  "7890123456789",
	  2, "is too long for a socket: at most 107 bytes" },
	{ "--takeover --no-keeper", 1, "takeover needs the keeper" },
};

START_TEST(test_wrong_options_are_told)
{
	struct program p = start(NULL, "%s", wrong[_i].options);

	must_end(&p, wrong[_i].code, wrong[_i].words);
}
END_TEST

static const struct {
	const char *text;
	int line;
	const char *words;
} bad_files[] = {
	{ "budgets = 1G\n", 1, "there is no key 'budgets'" },
	{ "# comment\n\n  budget=lots\n", 3, "budget: 'lots' is not a budget" },
	{ "budget = 1G\nmax-clients\n", 2, "'max-clients' is no 'key = value'" },
	{ "max-clients = 0", 1, "max-clients: '0' is not a number from 1 to 65536" },
	{ "no-keeper = maybe\n", 1, "no-keeper: is yes or no, not 'maybe'" },
	{ "idle-exit = soon\n", 1, "idle-exit: 'soon' is not a time" },
	{ "config = /etc/passwd\n", 1, "there is no key 'config'" },
	{ "= 3\n", 1, "there is no key ''" },
	{ "\xff\xfe\n", 1, "'?\?' is no 'key = value'" },
};

START_TEST(test_wrong_files_are_told_with_their_line)
{
	cleanup_free char *path = write_text("c.conf", bad_files[_i].text);
	cleanup_free char *words = data_text("%s:%d: %s", path, bad_files[_i].line, bad_files[_i].words);
	struct program p = start(NULL, "--socket=%s --config=%s", socket_path, path);

	must_end(&p, 1, bad_files[_i].line ? words : NULL);
	ck_assert_int_eq(access(socket_path, F_OK), -1);
}
END_TEST

/* Every key is an option that help names, and a word of the file. */
START_TEST(test_every_option_is_a_key_and_in_the_help)
{
	static const char *const values[] = {
		[PATH] = "/x/y", [FLAG] = "yes",  [BUDGET] = "7M",  [SECONDS] = "90s",
		[NUMBER] = "9",  [MODE] = "0640", [NUMA] = "local", [LIST] = "/a,/b",
	};
	struct program p = start(NULL, "--help");
	cleanup_free char *help = NULL;
	int code = ended(&p, LONG_MS);

	ck_assert_int_eq(code, 0);
	help = text_of(p.out);
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		cleanup_free char *option = data_text("  --%s%s", keys[i].name, keys[i].kind == FLAG ? " " : "=");
		cleanup_free char *line = data_text("%s = %s\n", keys[i].name, values[keys[i].kind]);
		cleanup_free char *path = write_text("c.conf", line);
		struct serve_arguments a = { .config = path };
		struct serve_settings s;
		struct wd_err err = { "" };

		ck_assert_msg(strstr(help, option), "help lacks%s", option);
		ck_assert_msg(serve_settings_load(&a, &s, &err) == 0, "%s: %s", line, err.text);
		serve_settings_done(&s);
	}
}
END_TEST

START_TEST(test_values_mean_what_they_say)
{
	cleanup_free char *path =
		write_text("c.conf", "budget = 3G\nidle-exit = 2h\npreload = /a\npreload = /b, /c\n"
				     "numa = node:0\nno-keeper = no\nmax-clients = 5\nsocket-mode = 0660\n");
	cleanup_free char *list = write_text("list", "# what\n/d\n\n  /e  \n");
	cleanup_free char *at_list = data_text("@%s", list);
	struct serve_arguments a = { .config = strdup(path) };
	const struct option *options = serve_options();
	struct serve_settings s;
	struct wd_err err = { "" };
	char numa[24];

	ck_assert_msg(serve_settings_load(&a, &s, &err) == 0, "%s", err.text);
	ck_assert_uint_eq(s.budget_bytes, 3 * GiB);
	ck_assert_uint_eq(s.idle_exit_ns, 7200 * 1000000000ull);
	ck_assert_uint_eq(s.nr_preload, 3);
	ck_assert_str_eq(s.preload[2], "/c");
	ck_assert_str_eq(serve_numa_text(s.numa, s.numa_node, numa), "node:0");
	ck_assert(!s.no_keeper);
	ck_assert_uint_eq(s.max_clients, 5);
	ck_assert_uint_eq(s.socket_mode, 0660);
	serve_settings_done(&s);

	/* The command line takes the file's place, a list as a whole. */
	for (const struct option *o = options; o->name; o++) {
		const char *value = strcmp(o->name, "preload") == 0     ? at_list :
				    strcmp(o->name, "budget") == 0      ? "50%" :
				    strcmp(o->name, "idle-exit") == 0   ? "never" :
				    strcmp(o->name, "max-clients") == 0 ? "6" :
				    strcmp(o->name, "socket") == 0      ? "relative" :
									  NULL;

		if (value)
			ck_assert_msg(serve_argument(&a, o->val, value, &err) == 0, "%s", err.text);
		if (strcmp(o->name, "no-keeper") == 0 || strcmp(o->name, "detach") == 0)
			ck_assert_int_eq(serve_argument(&a, o->val, NULL, &err), 0);
	}
	ck_assert_int_eq(chdir("/"), 0); /* paths were made absolute before */
	ck_assert_msg(serve_settings_load(&a, &s, &err) == 0, "%s", err.text);
	ck_assert_uint_gt(s.budget_bytes, MiB);
	ck_assert_uint_ne(s.budget_bytes, 3 * GiB);
	ck_assert_uint_eq(s.idle_exit_ns, 0);
	ck_assert_uint_eq(s.nr_preload, 2);
	ck_assert_str_eq(s.preload[1], "/e");
	ck_assert_uint_eq(s.max_clients, 6);
	ck_assert(s.no_keeper);
	ck_assert_str_ne(s.socket, "/relative");
	serve_settings_done(&s);

	/* What the keeper starts is the same daemon, without what is only for the first time. */
	{
		cleanup_free char **again = serve_arguments_again(&a);
		cleanup_free char *config = data_text("--config=%s", path);
		bool found = false;

		ck_assert_str_eq(again[1], "serve");
		ck_assert_str_eq(again[2], config);
		for (size_t i = 2; again[i]; i++) {
			ck_assert_ptr_null(strstr(again[i], "preload"));
			ck_assert_ptr_null(strstr(again[i], "detach"));
			found |= strcmp(again[i], "--max-clients=6") == 0;
		}
		ck_assert(found);
	}
	serve_arguments_done(&a);
}
END_TEST

START_TEST(test_file_and_options_reach_the_daemon)
{
	cleanup_free char *path =
		write_text("c.conf", "budget = 64M\nmax-views = 3\nsocket-mode = 0600\nno-keeper = yes\n");
	cleanup_free char *options = data_text("--config=%s --budget=32M", path);
	struct client c;
	struct program p = serving(NULL, options, &c);
	struct stat st;
	json_t *j;

	ck_assert_int_eq(stat_of(&c, "budget_bytes"), 32 * MiB);
	ck_assert_int_eq(stat_of(&c, "pid"), p.pid);
	ck_assert_int_eq(stat(socket_path, &st), 0);
	ck_assert_int_eq(st.st_mode & 07777, 0600);
	j = report(&c, WIRE_STAT);
	ck_assert_str_eq(json_string_value(json_object_get(j, "version")), WD_VERSION);
	ck_assert_str_eq(json_string_value(json_object_get(j, "socket")), socket_path);
	ck_assert_uint_eq(json_array_size(json_object_get(j, "wait_us")), SERVE_BUCKETS);
	json_decref(j);
	j = report(&c, WIRE_LS);
	ck_assert(json_is_array(json_object_get(j, "views")));
	json_decref(j);
	hang_up(&c);
	quit(&p);
}
END_TEST

/* ------------------------------------------------------------------ sockets */

START_TEST(test_second_daemon_says_who_is_there)
{
	struct program p = serving(NULL, "", NULL), q;
	cleanup_free char *words =
		data_text("a daemon is already running at %s (pid %d); use --takeover", socket_path, p.pid);
	struct client c;

	q = start(NULL, "--socket=%s", socket_path);
	must_end(&q, 1, words);
	q = start(NULL, "--socket=%s --no-keeper", socket_path);
	must_end(&q, 1, words);
	c = client_at(socket_path); /* unharmed */
	ck_assert_int_eq(c.daemon, p.pid);
	hang_up(&c);
	quit(&p);
}
END_TEST

START_TEST(test_takeover_needs_a_keeper)
{
	struct program p = serving(NULL, "--no-keeper", NULL), q;

	q = start(NULL, "--socket=%s --takeover", socket_path);
	must_end(&q, 1, "has no keeper to take over from");
	quit(&p);
}
END_TEST

START_TEST(test_socket_of_a_dead_daemon_is_replaced)
{
	struct program p = serving(NULL, "--no-keeper", NULL);

	ck_assert_int_eq(kill(p.pid, SIGKILL), 0);
	must_end(&p, 1000 + SIGKILL, NULL);
	ck_assert_int_eq(access(socket_path, F_OK), 0);
	p = serving(NULL, "--no-keeper", NULL);
	quit(&p);
}
END_TEST

START_TEST(test_what_is_no_socket_is_not_touched)
{
	cleanup_free char *path = write_text("s", "precious");
	struct program p;
	struct stat st;

	ck_assert_str_eq(path, socket_path);
	p = start(NULL, "--socket=%s --no-keeper", socket_path);
	must_end(&p, 1, "is in the way, and no socket");
	ck_assert_int_eq(stat(path, &st), 0);
	ck_assert_int_eq(st.st_size, 8);
}
END_TEST

/* Of many that start at the same moment, where a dead one has left its socket, one serves, and the others say so. */
START_TEST(test_of_many_one_serves)
{
	struct program p[12];

	for (int round = 0; round < 2; round++) {
		int serving_one = -1;
		struct client c;

		for (size_t i = 0; i < ARRAY_SIZE(p); i++)
			p[i] = start(NULL, "--socket=%s --no-keeper", socket_path);
		c = client_of_other(socket_path, 0);
		for (size_t i = 0; i < ARRAY_SIZE(p); i++) {
			if (p[i].pid == c.daemon)
				serving_one = (int)i;
			else
				must_end(&p[i], 1, "already running");
		}
		ck_assert_int_ge(serving_one, 0);
		ck_assert_uint_eq(ask(&c, WIRE_STAT), WIRE_JSON);
		hang_up(&c);
		ck_assert_int_eq(kill(p[serving_one].pid, SIGKILL), 0);
		must_end(&p[serving_one], 1000 + SIGKILL, NULL);
	}
}
END_TEST

static int held_lock(const char *path)
{
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(flock(fd, LOCK_EX), 0);
	return fd;
}

/* Waits until that process stands before the lock of this file. */
static void until_it_waits(const struct program *p, int lock_fd)
{
	struct timespec since;
	struct stat st;

	ck_assert_int_eq(fstat(lock_fd, &st), 0);
	(void)clock_gettime(CLOCK_MONOTONIC, &since);
	for (;;) {
		cleanup_fclose FILE *f = fopen("/proc/locks", "re");
		char line[256];

		ck_assert_ptr_nonnull(f);
		while (fgets(line, sizeof(line), f)) {
			unsigned long inode;
			unsigned int major, minor;
			int pid;

			if (sscanf(line, "%*d: -> FLOCK ADVISORY WRITE %d %x:%x:%lu", &pid, &major, &minor, &inode) ==
				    4 &&
			    pid == p->pid && inode == st.st_ino)
				return;
		}
		ck_assert_msg(access(socket_path, F_OK) < 0, "it did not wait");
		ck_assert_int_lt(elapsed_ms(&since), LONG_MS);
		(void)poll(NULL, 0, 1);
	}
}

/* Who starts waits for who is just about to listen, and for the next one, whose lock file is another. */
START_TEST(test_starts_wait_for_each_other)
{
	cleanup_free char *path = data_text("%s.lock", socket_path);
	int first = held_lock(path), second;
	struct program p = start(NULL, "--socket=%s --no-keeper", socket_path);
	struct client c;

	until_it_waits(&p, first);
	ck_assert_int_eq(unlink(path), 0);
	second = held_lock(path);
	(void)close(first);
	until_it_waits(&p, second);
	ck_assert_int_eq(unlink(path), 0);
	(void)close(second);
	c = client_of_other(socket_path, 0);
	ck_assert_int_eq(c.daemon, p.pid);
	ck_assert_int_eq(access(path, F_OK), -1);
	hang_up(&c);
	quit(&p);
}
END_TEST

static int listening(int type)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, type, 0);

	(void)snprintf(at.sun_path, sizeof(at.sun_path), "%s", socket_path);
	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(bind(fd, (const struct sockaddr *)&at, sizeof(at)), 0);
	ck_assert_int_eq(listen(fd, 16), 0);
	return fd;
}

START_TEST(test_socket_activation)
{
	struct how how = { .listener = listening(SOCK_SEQPACKET) };
	int early = dial(socket_path); /* waits in the queue until there is a daemon */
	struct program p;
	struct client c;

	ck_assert_int_ge(early, 0);
	p = start(&how, "");
	ck_assert_int_eq(say_hello(early, WIRE_VERSION), 0);
	ck_assert_int_eq(message.welcome.pid, p.pid);
	c = client_at(socket_path);
	ck_assert_int_eq(c.daemon, p.pid);
	ck_assert_int_eq(kill(p.pid, SIGTERM), 0);
	must_end(&p, 0, NULL);
	must_hang_up(early);
	/* The socket is the service manager's: it stays, and the next one is started for it. */
	ck_assert_int_eq(access(socket_path, F_OK), 0);
	hang_up(&c);
	(void)close(early);
	early = dial(socket_path);
	p = start(&how, "");
	ck_assert_int_eq(say_hello(early, WIRE_VERSION), 0);
	ck_assert_int_eq(kill(p.pid, SIGTERM), 0);
	must_end(&p, 0, NULL);
	(void)close(early);
	(void)close(how.listener);
}
END_TEST

START_TEST(test_socket_activation_refuses_other_kinds)
{
	struct how how = { .listener = listening(SOCK_STREAM) };
	struct program p = start(&how, "");

	must_end(&p, 1, "descriptor 3 is no listening SOCK_SEQPACKET Unix socket");
	(void)close(how.listener);
	how.listener = socket(AF_UNIX, SOCK_SEQPACKET, 0);
	p = start(&how, "");
	must_end(&p, 1, "descriptor 3 is no listening SOCK_SEQPACKET Unix socket");
	(void)close(how.listener);
}
END_TEST

START_TEST(test_sockets_for_another_process_are_left_alone)
{
	struct how how = { .listener = listening(SOCK_SEQPACKET), .listen_other_pid = true };
	struct program p;

	/* Not ours: that somebody listens there is all that is seen. */
	p = start(&how, "--socket=%s --no-keeper", socket_path);
	must_end(&p, 1, "already running");
	(void)close(how.listener);
}
END_TEST

/* ------------------------------------------------------------------ life */

START_TEST(test_service_manager_is_told)
{
	struct program p;
	unsigned long long usec = 0;
	struct timespec now;

	manager_start();
	p = serving(&under_manager, "--budget=1G", NULL);
	ck_assert_ptr_nonnull(strstr(must_notify("READY=1"), "STATUS=Serving at "));
	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	ck_assert_int_eq(kill(p.pid, SIGHUP), 0);
	ck_assert_int_eq(sscanf(strstr(must_notify("RELOADING=1"), "MONOTONIC_USEC="), "MONOTONIC_USEC=%llu", &usec),
			 1);
	ck_assert_uint_ge(usec, (unsigned long long)now.tv_sec * 1000000);
	(void)must_notify("READY=1");
	ck_assert_int_eq(kill(p.pid, SIGTERM), 0);
	(void)must_notify("STOPPING=1");
	must_end(&p, 0, NULL);
	(void)close(notify_fd);
}
END_TEST

START_TEST(test_sighup_reloads)
{
	cleanup_free char *path = write_text("c.conf", "budget = 64M\nmax-clients = 9\n");
	cleanup_free char *options = data_text("--config=%s", path);
	struct program p;
	struct client c;

	manager_start();
	p = serving(&under_manager, options, &c);
	(void)must_notify("READY=1");
	ck_assert_int_eq(stat_of(&c, "budget_bytes"), 64 * MiB);

	free(write_text("c.conf", "budget = 128M\nmax-clients = 2\nmax-views = 17\nspin-us = 3\n"));
	ck_assert_int_eq(kill(p.pid, SIGHUP), 0);
	(void)must_notify("RELOADING=1");
	(void)must_notify("READY=1");
	ck_assert_int_eq(stat_of(&c, "budget_bytes"), 128 * MiB);
	must_say(&p, "max-views, spin-us");
	{
		struct client second = client_at(socket_path);
		int third = dial(socket_path);

		ck_assert_int_eq(say_hello(third, WIRE_VERSION), -EUSERS);
		(void)close(third);
		hang_up(&second);
	}

	free(write_text("c.conf", "budget = 256M\nnonsense\n"));
	ck_assert_int_eq(kill(p.pid, SIGHUP), 0);
	(void)must_notify("RELOADING=1");
	(void)must_notify("READY=1");
	must_say(&p, "c.conf:2: 'nonsense' is no 'key = value'; nothing is changed");
	ck_assert_int_eq(stat_of(&c, "budget_bytes"), 128 * MiB);
	hang_up(&c);
	quit(&p);
	(void)close(notify_fd);
}
END_TEST

/* Clients of a daemon that is told to end see their sockets close, and its keeper is gone as well. */
START_TEST(test_sigterm_ends_daemon_and_keeper)
{
	cleanup_free char *keeper = data_text("%s.keeper", socket_path);
	int signals[] = { SIGTERM, SIGINT };
	struct client c;
	struct program p = serving(NULL, "", &c);

	ck_assert_int_eq(access(keeper, F_OK), 0);
	ck_assert_int_eq(kill(p.pid, signals[_i]), 0);
	must_end(&p, 0, NULL);
	must_hang_up(c.control);
	must_hang_up(c.notify);
	ck_assert_int_eq(access(socket_path, F_OK), -1);
	{
		struct timespec since;

		(void)clock_gettime(CLOCK_MONOTONIC, &since);
		while (access(keeper, F_OK) == 0) {
			ck_assert_int_lt(elapsed_ms(&since), LONG_MS);
			(void)poll(NULL, 0, 1);
		}
	}
	hang_up(&c);
}
END_TEST

START_TEST(test_two_signals_end_it_too)
{
	struct program p = serving(NULL, "", NULL);

	ck_assert_int_eq(kill(p.pid, SIGTERM), 0);
	ck_assert_int_eq(kill(p.pid, SIGINT), 0);
	must_end(&p, 0, NULL);
	ck_assert_int_eq(access(socket_path, F_OK), -1);
}
END_TEST

START_TEST(test_idle_exit_counts_from_the_last_client)
{
	struct client c;
	struct program p = serving(NULL, "--idle-exit=1", &c);

	ck_assert_int_eq(ended(&p, 2500), -1);
	ck_assert_uint_eq(ask(&c, WIRE_STAT), WIRE_JSON);
	hang_up(&c);
	must_end(&p, 0, NULL);
	ck_assert_int_eq(access(socket_path, F_OK), -1);
}
END_TEST

START_TEST(test_takeover_keeps_socket_and_says_so)
{
	struct program p = serving(NULL, "", NULL), q = start(NULL, "--socket=%s --takeover --budget=77M", socket_path);
	struct client c = client_of_other(socket_path, p.pid);

	must_end(&p, 0, NULL);
	ck_assert_int_eq(c.daemon, q.pid);
	ck_assert_int_eq(stat_of(&c, "budget_bytes"), 77 * MiB);
	hang_up(&c);
	quit(&q);
}
END_TEST

/* A client with memory keeps its connection: the next daemon says RESUME, and answers what is asked after that. */
START_TEST(test_connections_survive_takeover_and_death)
{
	struct client c;
	struct program p = serving(NULL, "", &c), q;
	bool user_only = false;
	int uffd = uffd_open_raw(-1, &user_only);
	struct wire_uffd m = { .flags = user_only ? WIRE_UFFD_USER_ONLY : 0 };

	ck_assert_int_ge(uffd, 0);
	WIRE_INIT(m, WIRE_UFFD, 11);
	ck_assert_uint_eq(ask_with(&c, &m, &uffd, 1), WIRE_WELCOME);
	ck_assert_uint_eq(message.h.seq, 11);
	ck_assert_uint_ne(message.welcome.mm, 0);
	ck_assert_uint_eq(ask_with(&c, &m, &uffd, 1), WIRE_ERROR); /* once */
	ck_assert_int_eq(message.error.status, -EALREADY);

	q = start(NULL, "--socket=%s --takeover", socket_path);
	ck_assert_int_eq(receive(c.notify), 1);
	ck_assert_uint_eq(message.h.type, WIRE_RESUME);
	must_end(&p, 0, NULL);
	ck_assert_int_eq(stat_of(&c, "pid"), q.pid);
	ck_assert_int_eq(stat_of(&c, "clients"), 1);

	ck_assert_int_eq(kill(q.pid, SIGKILL), 0);
	must_end(&q, 1000 + SIGKILL, NULL);
	ck_assert_int_eq(receive(c.notify), 1);
	ck_assert_uint_eq(message.h.type, WIRE_RESUME);
	ck_assert_int_ne(stat_of(&c, "pid"), q.pid);
	ck_assert_uint_eq(ask(&c, WIRE_SHUTDOWN), WIRE_OK);
	must_hang_up(c.control);
	must_hang_up(c.notify);
	(void)close(uffd);
	hang_up(&c);
}
END_TEST

/* Killed, it is started again by its keeper with the same options, and listens at the same socket. */
START_TEST(test_killed_daemon_comes_back)
{
	struct client c, next;
	struct program p = serving(NULL, "--budget=99M --max-clients=7", &c);
	pid_t pid = p.pid;

	hang_up(&c);
	for (int i = 0; i < 2; i++) {
		ck_assert_int_eq(kill(pid, SIGKILL), 0);
		if (pid == p.pid)
			must_end(&p, 1000 + SIGKILL, NULL);
		next = client_of_other(socket_path, pid);
		ck_assert_int_eq(stat_of(&next, "budget_bytes"), 99 * MiB);
		pid = next.daemon;
		if (i == 1)
			ck_assert_uint_eq(ask(&next, WIRE_SHUTDOWN), WIRE_OK);
		else
			hang_up(&next);
	}
	must_hang_up(next.control);
	hang_up(&next);
	ck_assert_int_eq(access(socket_path, F_OK), -1);
}
END_TEST

START_TEST(test_detach_returns_when_it_serves)
{
	struct program p, q;
	cleanup_free char *link = NULL, *words = NULL;
	struct client c;
	char target[64];
	ssize_t n;

	/* The service manager, if there is one, has started another program, and waits for that. */
	manager_start();
	p = start(&under_manager, "--socket=%s --detach --budget=11M", socket_path);
	must_end(&p, 0, NULL);
	ck_assert_int_eq(recv(notify_fd, target, sizeof(target), MSG_DONTWAIT), -1);
	(void)close(notify_fd);
	c = client_at(socket_path); /* at once */
	ck_assert_int_ne(c.daemon, p.pid);
	ck_assert_int_eq(stat_of(&c, "budget_bytes"), 11 * MiB);
	ck_assert_int_eq(getsid(c.daemon), c.daemon);
	link = data_text("/proc/%d/fd/0", (int)c.daemon);
	n = readlink(link, target, sizeof(target) - 1);
	ck_assert_int_gt(n, 0);
	target[n] = '\0';
	ck_assert_str_eq(target, "/dev/null");
	/* What keeps it from serving is told by the process that waits. */
	q = start(NULL, "--socket=%s --detach", socket_path);
	words = data_text("weightd serve: a daemon is already running at %s (pid %d)", socket_path, (int)c.daemon);
	must_end(&q, 1, words);
	ck_assert_uint_eq(ask(&c, WIRE_SHUTDOWN), WIRE_OK);
	must_hang_up(c.control);
	hang_up(&c);
}
END_TEST

START_TEST(test_nobody_has_a_daemon_of_his_own)
{
	cleanup_free char *runtime = data_text("XDG_RUNTIME_DIR=%s", dir);
	cleanup_free char *path = data_text("%s/weightd.sock", dir);
	const char *const env[] = { runtime, NULL };
	const struct how how = { .env = env, .nobody = true };
	struct program p;
	struct client c;
	struct stat st;

	ck_assert_int_eq(chown(dir, NOBODY, NOBODY), 0);
	p = start(&how, "");
	c = client_of_other(path, 0);
	ck_assert_int_eq(c.daemon, p.pid);
	ck_assert_int_eq(stat(path, &st), 0);
	ck_assert_int_eq(st.st_mode & 07777, 0600);
	ck_assert_int_eq(st.st_uid, NOBODY);
	hang_up(&c);
	ck_assert_int_eq(kill(p.pid, SIGTERM), 0);
	must_end(&p, 0, NULL);
	ck_assert_int_eq(access(path, F_OK), -1);
}
END_TEST

/* Without a runtime folder it makes one of its own in /tmp, and trusts none that somebody else has made. */
START_TEST(test_own_folder_in_tmp)
{
	cleanup_free char *config = write_text("c.conf", "");
	const struct how how = { .nobody = true, .private_tmp = true };
	struct program p = start(&how, "--config=%s", config);
	cleanup_free char *path = data_text("/proc/%d/root/tmp/weightd-%u", (int)p.pid, NOBODY);
	cleanup_free char *in_it = data_text("%s/weightd.sock", path);
	struct timespec since;
	struct client c;
	struct stat st;

	ck_assert_int_eq(chmod(config, 0644), 0);
	(void)clock_gettime(CLOCK_MONOTONIC, &since);
	while (stat(in_it, &st) < 0) {
		ck_assert_msg(ended(&p, 0) == -1 && elapsed_ms(&since) < LONG_MS, "%s", text_of(p.err));
		(void)poll(NULL, 0, 1);
	}
	ck_assert_int_eq(stat(path, &st), 0);
	ck_assert_int_eq(st.st_mode & 07777, 0700);
	c = client_of_other(in_it, 0);
	hang_up(&c);
	ck_assert_int_eq(kill(p.pid, SIGTERM), 0);
	must_end(&p, 0, NULL);
}
END_TEST

START_TEST(test_folder_of_another_in_tmp_is_refused)
{
	cleanup_free char *path = data_text("/tmp/weightd-%u", NOBODY);
	struct program p;
	pid_t pid;
	int status, code;

	/* In a mount namespace of its own, so that the machine's /tmp is left alone. */
	pid = fork();
	if (pid == 0) {
		const struct how how = { .nobody = true };

		if (unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
		    mount("none", "/tmp", "tmpfs", 0, "mode=1777") < 0 || mkdir(path, 0777) < 0)
			_exit(125);
		p = start(&how, "--no-keeper");
		must_end(&p, 1, "is not a folder that only this user may use");
		_exit(0);
	}
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
	ck_assert_int_eq(code, 0);
}
END_TEST

/* ------------------------------------------------------------------ connections */

START_TEST(test_other_versions_are_told)
{
	struct program p = serving(NULL, "--no-keeper", NULL);
	int fd = dial(socket_path);

	ck_assert_int_eq(say_hello(fd, WIRE_VERSION + 1), -EPROTONOSUPPORT);
	ck_assert_uint_eq(message.welcome.version, WIRE_VERSION);
	ck_assert_ptr_nonnull(strstr(message.welcome.text, "version"));
	must_hang_up(fd);
	(void)close(fd);
	quit(&p);
}
END_TEST

START_TEST(test_limits_on_clients)
{
	bool of_user = _i;
	struct program p =
		serving(NULL, of_user ? "--no-keeper --max-clients-per-user=3" : "--no-keeper --max-clients=3", NULL);
	struct client c[3];
	struct timespec since;
	int fd, r;

	for (size_t i = 0; i < ARRAY_SIZE(c); i++)
		c[i] = client_of_other(socket_path, 0);
	fd = dial(socket_path);
	ck_assert_int_eq(say_hello(fd, WIRE_VERSION), -EUSERS);
	ck_assert_ptr_nonnull(strstr(message.welcome.text, of_user ? "--max-clients-per-user" : "--max-clients "));
	must_hang_up(fd);
	(void)close(fd);
	/* Who leaves makes room. */
	hang_up(&c[1]);
	(void)clock_gettime(CLOCK_MONOTONIC, &since);
	do {
		fd = dial(socket_path);
		r = say_hello(fd, WIRE_VERSION);
		(void)close(fd);
		ck_assert_int_lt(elapsed_ms(&since), LONG_MS);
	} while (r == -EUSERS);
	ck_assert_int_eq(r, 0);
	hang_up(&c[0]);
	hang_up(&c[2]);
	quit(&p);
}
END_TEST

static int status_of(pid_t pid, const char *key)
{
	cleanup_free char *path = data_text("/proc/%d/status", (int)pid);
	cleanup_fclose FILE *f = fopen(path, "re");
	char line[256];
	int n = -1;

	while (f && fgets(line, sizeof(line), f))
		if (strncmp(line, key, strlen(key)) == 0)
			n = atoi(line + strlen(key));
	return n;
}

static unsigned int fds_of(pid_t pid)
{
	cleanup_free char *path = data_text("/proc/%d/fd", (int)pid);
	DIR *d = opendir(path);
	unsigned int n = 0;

	ck_assert_ptr_nonnull(d);
	while (readdir(d))
		n++;
	(void)closedir(d);
	return n;
}

/* Connections that say nothing cost neither threads nor, above the limit, descriptors, and keep nobody out. */
START_TEST(test_silent_connections_keep_nobody_out)
{
	enum { SILENT = 400, MOST = 16 };
	static int silent[SILENT];
	struct client c;
	struct program p = serving(NULL, "--no-keeper --max-clients-per-user=16", &c);
	int threads = status_of(p.pid, "Threads:");
	unsigned int fds = fds_of(p.pid);

	for (size_t i = 0; i < SILENT; i++) {
		silent[i] = dial(socket_path);
		ck_assert_int_ge(silent[i], 0);
	}
	{
		struct client d = client_at(socket_path);

		hang_up(&d);
	}
	ck_assert_uint_eq(ask(&c, WIRE_STAT), WIRE_JSON);
	/* (c's may not have been there yet; that of the one that has just left may need a moment.) */
	for (int ms = 0; status_of(p.pid, "Threads:") > threads + 1 && ms < 5000; ms++)
		(void)usleep(1000);
	ck_assert_int_le(status_of(p.pid, "Threads:"), threads + 1);
	ck_assert_uint_le(fds_of(p.pid), fds + MOST + 4);
	must_hang_up(silent[0]); /* the oldest made room */
	for (size_t i = 0; i < SILENT; i++)
		(void)close(silent[i]);
	hang_up(&c);
	quit(&p);
}
END_TEST

START_TEST(test_ping_is_answered_while_the_client_is_busy)
{
	struct client c;
	struct program p = serving(NULL, "--no-keeper", &c);
	struct wire_plain ping;

	for (uint32_t i = 1; i <= 3; i++) {
		WIRE_INIT(ping, WIRE_PING, i);
		ck_assert_int_eq(wire_send(c.notify, &ping, NULL, 0, true), 0);
		ck_assert_int_eq(receive(c.notify), 1);
		ck_assert_uint_eq(message.h.type, WIRE_PONG);
		ck_assert_uint_eq(message.h.seq, i);
	}
	/* What belongs to the other socket ends the connection. */
	WIRE_INIT(ping, WIRE_LS, 9);
	ck_assert_int_eq(wire_send(c.notify, &ping, NULL, 0, true), 0);
	must_hang_up(c.control);
	hang_up(&c);
	quit(&p);
}
END_TEST

START_TEST(test_messages_need_what_comes_before_them)
{
	static const enum wire_type types[] = { WIRE_MAP,   WIRE_UNMAP,  WIRE_HOLD,     WIRE_STAGE,
						WIRE_CLASS, WIRE_FORBID, WIRE_VIEW_STAT };
	struct client c;
	struct program p = serving(NULL, "--no-keeper", &c);
	union {
		struct wire_map map;
		struct wire_stage stage;
		struct wire_value value;
		struct wire_view view;
		struct wire_job_id job;
		struct wire_ranges ranges;
	} m = { 0 };

	for (size_t i = 0; i < ARRAY_SIZE(types); i++) {
		m.map.h = (struct wire_head){ WIRE_MAGIC, types[i], 0, 5 };
		m.map.h.nbytes = types[i] == WIRE_HOLD                          ? wire_ranges_bytes(0) :
				 types[i] == WIRE_STAGE                         ? sizeof(m.stage) :
				 types[i] == WIRE_MAP || types[i] == WIRE_UNMAP ? sizeof(m.map) :
				 types[i] == WIRE_VIEW_STAT                     ? sizeof(m.view) :
										  sizeof(m.value);
		ck_assert_uint_eq(ask_with(&c, &m, NULL, 0), WIRE_ERROR);
		ck_assert_int_eq(message.error.status, -EPROTO);
		ck_assert_uint_eq(message.h.seq, 5);
	}
	m.view = (struct wire_view){ .view = 1 };
	WIRE_INIT(m.view, WIRE_DETACH, 5);
	ck_assert_uint_eq(ask_with(&c, &m, NULL, 0), WIRE_ERROR);
	ck_assert_int_eq(message.error.status, -ENOENT);
	m.job = (struct wire_job_id){ .job = 1 };
	WIRE_INIT(m.job, WIRE_JOB_END, 5);
	ck_assert_uint_eq(ask_with(&c, &m, NULL, 0), WIRE_ERROR);
	ck_assert_int_eq(message.error.status, -ENOENT);
	hang_up(&c);
	quit(&p);
}
END_TEST

/* ATTACH of `fd` as a file of `size` bytes with this layout; 0, or the error's status. */
static int attach(const struct client *c, int fd, int direct_fd, const struct segment *segs, uint32_t nr_segs,
		  const struct unit *units, uint32_t nr_units, uint64_t bytes)
{
	int fds[3] = { fd, wire_blob(segs, nr_segs * sizeof(*segs), units, nr_units * sizeof(*units)), direct_fd };
	struct wire_attach m = {
		.flags = direct_fd >= 0 ? WIRE_DIRECT : 0,
		.nr_segs = nr_segs,
		.nr_units = nr_units,
		.bytes = bytes,
		.name = "the file",
	};
	uint32_t type;

	WIRE_INIT(m, WIRE_ATTACH, 3);
	ck_assert_int_ge(fds[1], 0);
	type = ask_with(c, &m, fds, direct_fd >= 0 ? 3 : 2);
	(void)close(fds[1]);
	ck_assert(type == WIRE_ERROR || type == WIRE_ATTACHED);
	return type == WIRE_ERROR ? message.error.status : 0;
}

#define FILE_BYTES (3 * MiB)

static uint64_t arena_of(uint64_t data)
{
	return MAX(arena_round(data), page_bytes());
}

START_TEST(test_only_files_open_for_reading_are_taken)
{
	cleanup_free char *path = data_text("%s/file", dir);
	const struct segment seg = { 0, 0, FILE_BYTES };
	const uint64_t bytes = arena_of(FILE_BYTES);
	struct client c;
	struct program p;
	int pipes[2], pair[2], fd, flags;

	data_write_seed(path, FILE_BYTES, 1);
	p = serving(NULL, "--no-keeper", &c);
	ck_assert_int_eq(pipe2(pipes, O_CLOEXEC), 0);
	ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	const struct {
		int fd, status;
		const char *words;
	} wrong_fds[] = {
		{ open(path, O_PATH | O_CLOEXEC), -EACCES, "was not opened for reading" },
		{ open(path, O_WRONLY | O_CLOEXEC), -EACCES, "was not opened for reading" },
		{ open(dir, O_RDONLY | O_CLOEXEC), -EISDIR, "is a folder" },
		{ open("/dev/null", O_RDONLY | O_CLOEXEC), -EINVAL, "not a regular file" },
		/* by their names alone, before anything is asked of them */
		{ pipes[0], -EINVAL, "what was passed is pipe:[" },
		{ pair[0], -EINVAL, "what was passed is socket:[" },
		{ epoll_create1(EPOLL_CLOEXEC), -EINVAL, "what was passed is anon_inode:[eventpoll]" },
	};
	for (size_t i = 0; i < ARRAY_SIZE(wrong_fds); i++) {
		ck_assert_int_ge(wrong_fds[i].fd, 0);
		ck_assert_int_eq(attach(&c, wrong_fds[i].fd, -1, &seg, 1, NULL, 0, bytes), wrong_fds[i].status);
		ck_assert_msg(strstr(message.error.text, wrong_fds[i].words), "%s", message.error.text);
		(void)close(wrong_fds[i].fd);
	}
	/* The right one, and with it what is not the file's direct description: left out, not refused. */
	fd = open(path, O_RDONLY | O_CLOEXEC);
	flags = fcntl(fd, F_GETFL);
	ck_assert_int_eq(attach(&c, fd, -1, &seg, 1, NULL, 0, bytes), 0);
	ck_assert_uint_eq(nr_message_fds, 2);
	ck_assert_uint_eq(message.attached.bytes, bytes);
	ck_assert_int_eq(attach(&c, fd, fd, &seg, 1, NULL, 0, bytes), 0);
	ck_assert_int_eq(attach(&c, fd, pipes[1], &seg, 1, NULL, 0, bytes), 0);
	/* The client's own description is as it was. */
	ck_assert_int_eq(fcntl(fd, F_GETFL), flags);
	(void)close(fd);
	(void)close(pipes[1]);
	(void)close(pair[1]);
	hang_up(&c);
	quit(&p);
}
END_TEST

#define F FILE_BYTES
static const struct {
	const char *what;
	struct segment segs[3];
	uint32_t nr_segs;
	struct unit units[2];
	uint32_t nr_units;
	uint64_t end; /* of the arena's data */
	bool right;
} layouts[] = {
	{ "plain", { { 0, 0, F } }, 1, { { 0 } }, 0, F, true },
	{ "shifted, units", { { 56, 0, F } }, 1, { { 56, 100 }, { 56, 100 } }, 2, F + 56, true },
	{ "a copy", { { 0, 0, F }, { 4 * MiB, 17, 1000 } }, 2, { { 4 * MiB, 1000 } }, 1, 4 * MiB + 1000, true },
	{ "shifted too far", { { 64, 0, F } }, 1, { { 0 } }, 0, F + 64, false },
	{ "not from the beginning", { { 0, 8, F - 8 } }, 1, { { 0 } }, 0, F - 8, false },
	{ "behind the file's end", { { 0, 0, F + 1 } }, 1, { { 0 } }, 0, F + 1, false },
	{ "a copy behind the end", { { 0, 0, F }, { 4 * MiB, F - 10, 11 } }, 2, { { 0 } }, 0, 4 * MiB + 11, false },
	{ "offset that wraps", { { 0, 0, F }, { 4 * MiB, UINT64_MAX, 2 } }, 2, { { 0 } }, 0, 4 * MiB + 2, false },
	{ "segments overlap", { { 0, 0, F }, { F - 1, 0, 5 } }, 2, { { 0 } }, 0, F + 4, false },
	{ "segments not sorted",
	  { { 0, 0, F }, { 8 * MiB, 0, 5 }, { 4 * MiB, 0, 5 } },
	  3,
	  { { 0 } },
	  0,
	  8 * MiB + 5,
	  false },
	{ "a segment without bytes", { { 0, 0, F }, { 4 * MiB, 0, 0 } }, 2, { { 0 } }, 0, 4 * MiB, false },
	{ "a unit behind the end", { { 0, 0, F } }, 1, { { F - 5, 6 } }, 1, F, false },
	{ "a unit that wraps", { { 0, 0, F } }, 1, { { UINT64_MAX, 2 } }, 1, F, false },
	{ "units not sorted", { { 0, 0, F } }, 1, { { 10, 5 }, { 9, 5 } }, 2, F, false },
	{ "a unit without bytes", { { 0, 0, F } }, 1, { { 10, 0 } }, 1, F, false },
	{ "another size", { { 0, 0, F } }, 1, { { 0 } }, 0, F + 8 * MiB, false },
	{ "enormous", { { 0, 0, F }, { 1ull << 62, 0, 5 } }, 2, { { 0 } }, 0, 4 * MiB, false },
};
#undef F

START_TEST(test_layouts_are_checked)
{
	cleanup_free char *path = data_text("%s/file", dir);
	struct client c;
	struct program p;
	int fd;

	data_write_seed(path, FILE_BYTES, 1);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	p = serving(NULL, "--no-keeper", &c);
	for (size_t i = 0; i < ARRAY_SIZE(layouts); i++) {
		int r = attach(&c, fd, -1, layouts[i].segs, layouts[i].nr_segs, layouts[i].units, layouts[i].nr_units,
			       arena_of(layouts[i].end));

		ck_assert_msg(r == (layouts[i].right ? 0 : -EINVAL), "%s: %d", layouts[i].what, r);
	}
	(void)close(fd);
	hang_up(&c);
	quit(&p);
}
END_TEST

START_TEST(test_views_of_a_client_are_limited)
{
	cleanup_free char *path = data_text("%s/file", dir);
	const struct segment seg = { 0, 0, FILE_BYTES };
	struct client c;
	struct program p;
	struct wire_view detach = { 0 };
	int fd;

	data_write_seed(path, FILE_BYTES, 1);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	p = serving(NULL, "--no-keeper --max-views=2", &c);
	ck_assert_int_eq(attach(&c, fd, -1, &seg, 1, NULL, 0, arena_of(FILE_BYTES)), 0);
	detach.view = message.attached.view;
	ck_assert_int_eq(attach(&c, fd, -1, &seg, 1, NULL, 0, arena_of(FILE_BYTES)), 0);
	ck_assert_uint_eq(message.attached.known, 1);
	ck_assert_uint_eq(message.attached.view, detach.view);
	ck_assert_int_eq(attach(&c, fd, -1, &seg, 1, NULL, 0, arena_of(FILE_BYTES)), -EUSERS);
	ck_assert_ptr_nonnull(strstr(message.error.text, "--max-views"));
	WIRE_INIT(detach, WIRE_DETACH, 4);
	ck_assert_uint_eq(ask_with(&c, &detach, NULL, 0), WIRE_OK);
	ck_assert_int_eq(attach(&c, fd, -1, &seg, 1, NULL, 0, arena_of(FILE_BYTES)), 0);
	(void)close(fd);
	hang_up(&c);
	quit(&p);
}
END_TEST

/* In a child of the test as another user; `fn` returns 0 for what is right. */
static int as_nobody(int (*fn)(void))
{
	pid_t pid = fork();
	int status;

	if (pid == 0) {
		if (setgroups(0, NULL) < 0 || setgid(NOBODY) < 0 || setuid(NOBODY) < 0)
			_exit(101);
		_exit(fn());
	}
	ck_assert_int_ge(pid, 0);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

/* 320 descriptors: views of 8, a quarter of them for one user. */
static int attach_too_much(void)
{
	cleanup_free char *path = data_text("%s/file", dir);
	const struct segment seg = { 0, 0, FILE_BYTES };
	struct client a = client_at(socket_path), b = client_at(socket_path);
	int fd = open(path, O_RDONLY | O_CLOEXEC), r = 0;

	for (int i = 0; i < 10; i++)
		if (attach(i % 2 ? &a : &b, fd, -1, &seg, 1, NULL, 0, arena_of(FILE_BYTES)) != 0)
			return 1;
	r = attach(&a, fd, -1, &seg, 1, NULL, 0, arena_of(FILE_BYTES));
	return r == -EUSERS && strstr(message.error.text, "has attached 10 views") ? 0 : 2;
}

START_TEST(test_views_of_a_user_are_limited)
{
	cleanup_free char *path = data_text("%s/file", dir);
	const struct segment seg = { 0, 0, FILE_BYTES };
	const struct how how = { .nofile = 320 };
	struct program p;
	struct client c;
	int fd, code;

	data_write_seed(path, FILE_BYTES, 1);
	ck_assert_int_eq(chmod(path, 0644), 0);
	p = serving(&how, "--no-keeper", &c);
	code = as_nobody(attach_too_much);
	ck_assert_int_eq(code, 0);
	/* Others are not concerned, and the daemon's own user has no such limit. */
	fd = open(path, O_RDONLY | O_CLOEXEC);
	for (int i = 0; i < 20; i++)
		ck_assert_int_eq(attach(&c, fd, -1, &seg, 1, NULL, 0, arena_of(FILE_BYTES)), 0);
	(void)close(fd);
	hang_up(&c);
	quit(&p);
}
END_TEST

static int shutdown_is_refused(void)
{
	struct client c = client_at(socket_path);

	return ask(&c, WIRE_SHUTDOWN) == WIRE_ERROR && message.error.status == -EPERM ? 0 : 1;
}

START_TEST(test_shutdown_is_for_owner_and_root)
{
	struct client c;
	struct program p = serving(NULL, "", &c);
	int code = as_nobody(shutdown_is_refused);

	ck_assert_int_eq(code, 0);
	ck_assert_uint_eq(ask(&c, WIRE_SHUTDOWN), WIRE_OK);
	must_end(&p, 0, NULL);
	hang_up(&c);
}
END_TEST

/* ------------------------------------------------------------------ preload */

START_TEST(test_preload_warms_the_node)
{
	cleanup_free char *a = data_text("%s/a.safetensors", dir), *b = data_text("%s/b.safetensors", dir);
	cleanup_free char *lines = data_text("# what we need\n%s\n%s\n", a, b), *list = write_text("list", lines);
	cleanup_free char *options = _i ? data_text("--preload=@%s", list) : data_text("--preload=%s,%s", a, b);
	struct data_tensor t[] = { { .name = "w", .dtype = "U8", .ndim = 1, .shape = { 5 * MiB } } };
	struct timespec since;
	struct program p;
	struct client c;
	json_int_t resident;

	(void)data_write_safetensors(a, t, 1, &(struct data_opts){ .seed = 3 });
	(void)data_write_safetensors(b, t, 1, &(struct data_opts){ .seed = 4 });
	p = serving(NULL, options, &c);
	(void)clock_gettime(CLOCK_MONOTONIC, &since);
	do {
		resident = stat_of(&c, "resident_bytes");
		ck_assert_msg(elapsed_ms(&since) < LONG_MS, "%lld: %s", (long long)resident, text_of(p.err));
	} while (resident < (json_int_t)(10 * MiB));
	hang_up(&c);
	quit(&p);
}
END_TEST

START_TEST(test_preload_of_what_is_not_there_is_told)
{
	cleanup_free char *options = data_text("--preload=%s/nothing", dir);
	struct client c;
	struct program p = serving(NULL, options, &c);

	must_say(&p, "preload: not all that was listed could be read");
	ck_assert_uint_eq(ask(&c, WIRE_STAT), WIRE_JSON);
	hang_up(&c);
	quit(&p);
}
END_TEST

/* ------------------------------------------------------------------ the program */

static void setup(void)
{
	cleanup_free char *up = NULL;

	dir = data_tmpdir();
	ck_assert_int_eq(chmod(dir, 0755), 0);
	up = data_text("%s/..", dir); /* another user must get through */
	ck_assert_int_eq(chmod(up, 0711), 0);
	socket_path = data_text("%s/s", dir);
}

static void teardown(void)
{
	data_remove(dir);
	free(socket_path);
	free(dir);
}

static TCase *add_case(Suite *s, const char *name)
{
	TCase *tc = tcase_create(name);

	tcase_set_timeout(tc, 60);
	tcase_add_checked_fixture(tc, setup, teardown);
	suite_add_tcase(s, tc);
	return tc;
}

static int run_suite_here(void)
{
	const char *out = getenv("OUT");
	cleanup_free char *path = data_text("%s/weightd", out ? out : ".out");
	Suite *s = suite_create("serve_cli");
	SRunner *runner;
	TCase *tc;
	int failed;

	tool = open(path, O_RDONLY | O_CLOEXEC);
	if (tool < 0) {
		(void)fprintf(stderr, "%s: %s: build it first\n", path, strerror(errno));
		return EXIT_FAILURE;
	}
	tc = add_case(s, "options");
	tcase_add_loop_test(tc, test_wrong_options_are_told, 0, ARRAY_SIZE(wrong));
	tcase_add_loop_test(tc, test_wrong_files_are_told_with_their_line, 0, ARRAY_SIZE(bad_files));
	tcase_add_test(tc, test_every_option_is_a_key_and_in_the_help);
	tcase_add_test(tc, test_values_mean_what_they_say);
	tcase_add_test(tc, test_file_and_options_reach_the_daemon);
	tc = add_case(s, "sockets");
	tcase_add_test(tc, test_second_daemon_says_who_is_there);
	tcase_add_test(tc, test_takeover_needs_a_keeper);
	tcase_add_test(tc, test_socket_of_a_dead_daemon_is_replaced);
	tcase_add_test(tc, test_what_is_no_socket_is_not_touched);
	tcase_add_test(tc, test_of_many_one_serves);
	tcase_add_test(tc, test_starts_wait_for_each_other);
	tcase_add_test(tc, test_socket_activation);
	tcase_add_test(tc, test_socket_activation_refuses_other_kinds);
	tcase_add_test(tc, test_sockets_for_another_process_are_left_alone);
	tc = add_case(s, "life");
	tcase_add_test(tc, test_service_manager_is_told);
	tcase_add_test(tc, test_sighup_reloads);
	tcase_add_loop_test(tc, test_sigterm_ends_daemon_and_keeper, 0, 2);
	tcase_add_test(tc, test_two_signals_end_it_too);
	tcase_add_test(tc, test_idle_exit_counts_from_the_last_client);
	tcase_add_test(tc, test_takeover_keeps_socket_and_says_so);
	tcase_add_test(tc, test_connections_survive_takeover_and_death);
	tcase_add_test(tc, test_killed_daemon_comes_back);
	tcase_add_test(tc, test_detach_returns_when_it_serves);
	tc = add_case(s, "connections");
	tcase_add_test(tc, test_other_versions_are_told);
	tcase_add_loop_test(tc, test_limits_on_clients, 0, 2);
	tcase_add_test(tc, test_silent_connections_keep_nobody_out);
	tcase_add_test(tc, test_ping_is_answered_while_the_client_is_busy);
	tcase_add_test(tc, test_messages_need_what_comes_before_them);
	tcase_add_test(tc, test_only_files_open_for_reading_are_taken);
	tcase_add_test(tc, test_layouts_are_checked);
	tcase_add_test(tc, test_views_of_a_client_are_limited);
	tcase_add_loop_test(tc, test_preload_warms_the_node, 0, 2);
	tcase_add_test(tc, test_preload_of_what_is_not_there_is_told);
	if (geteuid() == 0) {
		tc = add_case(s, "users");
		tcase_add_test(tc, test_shutdown_is_for_owner_and_root);
		tcase_add_test(tc, test_views_of_a_user_are_limited);
		tcase_add_test(tc, test_nobody_has_a_daemon_of_his_own);
		tcase_add_test(tc, test_own_folder_in_tmp);
		tcase_add_test(tc, test_folder_of_another_in_tmp_is_refused);
	} else {
		(void)printf("SKIP users: only root can be another user\n");
	}
	runner = srunner_create(s);
	srunner_run_all(runner, CK_ENV);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* All that came from this process and is still there. */
static void kill_the_rest(void)
{
	size_t found;

	do {
		DIR *proc = opendir("/proc");
		struct dirent *e;

		found = 0;
		while (proc && (e = readdir(proc))) {
			pid_t pid = atoi(e->d_name), up = pid;

			while (isdigit((unsigned char)e->d_name[0]) && up > 1 && up != getpid())
				up = status_of(up, "PPid:");
			if (pid > 1 && pid != getpid() && up == getpid()) {
				(void)kill(pid, SIGKILL);
				found++;
			}
		}
		if (proc)
			(void)closedir(proc);
		while (waitpid(-1, NULL, found ? 0 : WNOHANG) > 0)
			;
	} while (found > 0);
}

int main(void)
{
	sigset_t signals;
	int status = 0;
	pid_t suite;

	(void)prctl(PR_SET_CHILD_SUBREAPER, 1);
	(void)sigemptyset(&signals);
	for (size_t i = 0; i < 4; i++)
		(void)sigaddset(&signals, (int[]){ SIGCHLD, SIGTERM, SIGINT, SIGHUP }[i]);
	(void)sigprocmask(SIG_BLOCK, &signals, NULL);
	suite = fork();
	if (suite == 0) {
		(void)sigprocmask(SIG_UNBLOCK, &signals, NULL);
		return run_suite_here();
	}
	for (;;) {
		int sig = sigwaitinfo(&signals, NULL);
		pid_t pid;

		if (sig > 0 && sig != SIGCHLD) {
			kill_the_rest();
			return EXIT_FAILURE;
		}
		while ((pid = waitpid(-1, &status, WNOHANG)) > 0 && pid != suite)
			;
		if (pid == suite)
			break;
	}
	kill_the_rest();
	return WIFEXITED(status) ? WEXITSTATUS(status) : EXIT_FAILURE;
}
