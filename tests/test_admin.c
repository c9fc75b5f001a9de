/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commands that talk to a daemon (ls, stat, prefetch, drop, pin, unpin, shutdown, and doctor's part of it), from
 * outside. First against a thread of the test that speaks the protocol and answers what the test wants: tables, hostile
 * names, refusals, versions, daemons that hang or lie. Then against `weightd serve`.
 *
 * The thread serves one connection after the other. What it was asked it writes down; a test reads that when the tool
 * has ended. It never fails a test by itself: it hangs up.
 */
#include "lib/checkpoint.h"
#include "lib/include/weightd.h"
#include "lib/layout.h"
#include "tests/data.h"
#include "tests/serve_util.h"
#include "ufd/wire.h"

#include <check.h>
#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

/* ------------------------------------------------------------------ the daemon that is none */

#define MOST_ASKED 128
#define VIEW 7u /* the first number it gives; each file has its own */

enum at_hello { WELCOME, SILENT, HANG_UP, GARBAGE };

struct asked {
	uint32_t type, flags;
	uint64_t bytes, ino, view;
};

struct fake {
	/* how it behaves */
	enum at_hello hello;
	uint32_t version; /* 0: ours */
	int32_t status;
	const char *text;                    /* of WELCOME */
	const char *const *ls, *const *stat; /* answers in turn, the last one for ever; NULL: it makes some up */
	bool no_seal_json;                   /* JSON in a file that is not a memfd */
	uint32_t refuse;                     /* this question... */
	unsigned int refuse_after;           /* ...but for the first so many */
	int32_t error;
	const char *error_text;
	unsigned int questions_most; /* then it hangs up; 0: never */
	unsigned int job_steps;      /* answers until a job is done */
	int32_t job_error;           /* how it ends; 0: well */
	_Atomic bool job_waits;      /* a job does not end while this is set */
	uint64_t dropped_each, read_each, known;
	bool wrong_seq, wrong_type;

	/* what was asked */
	struct asked asked[MOST_ASKED];
	_Atomic size_t nr_asked;
	_Atomic unsigned int hung_up; /* connections that have ended */
	struct view_layout layout;    /* of the last ATTACH; text: its memory */
	void *layout_blob;
	uint64_t arena_bytes;
	bool direct, left_early;
	char name[WIRE_PATH];
	struct wire_job_range *ranges; /* of the last JOB */
	uint32_t nr_ranges;

	/* its own */
	char *folder, *socket;
	int listen_fd, stop[2], client;
	pthread_t thread;
	size_t nr_ls, nr_stat;
	uint64_t next_view, next_job, read_bytes;
	struct fake_job {
		uint64_t total, done;
		unsigned int steps;
		int event;
	} jobs[32];
	union wire_any *message;
};

static int send_error(struct fake *f, uint32_t seq, int32_t status, const char *text)
{
	struct wire_error e = { .status = status };

	WIRE_INIT(e, WIRE_ERROR, seq);
	(void)snprintf(e.text, sizeof(e.text), "%s", text ? text : "");
	return wire_send(f->client, &e, NULL, 0, true);
}

static int send_plain(struct fake *f, uint32_t type, uint32_t seq, int fd)
{
	struct wire_plain m;

	WIRE_INIT(m, type, seq);
	return wire_send(f->client, &m, &fd, fd >= 0 ? 1 : 0, true);
}

static int send_json(struct fake *f, uint32_t seq, const char *text)
{
	cleanup_close int fd = -1;

	if (f->no_seal_json) {
		int pair[2];

		if (pipe2(pair, O_CLOEXEC) < 0)
			return -errno;
		(void)close(pair[1]);
		fd = pair[0];
	} else {
		fd = wire_blob(text, strlen(text), NULL, 0);
	}
	return fd < 0 ? fd : send_plain(f, WIRE_JSON, seq, fd);
}

/* An answer of the test's, or one that has what prefetch looks for. */
static int send_report(struct fake *f, uint32_t seq, bool ls)
{
	const char *const *list = ls ? f->ls : f->stat;
	size_t *at = ls ? &f->nr_ls : &f->nr_stat;
	cleanup_free char *text = NULL;
	const char *given;

	if (list) {
		given = list[*at];
		if (list[*at + 1])
			(*at)++;
		return send_json(f, seq, given);
	}
	text = ls ? data_text("{\"views\": [{\"id\": %u, \"read_bytes\": %" PRIu64 "}]}", VIEW, f->read_bytes) :
		    data_text("{\"version\": \"%s\", \"pid\": %d, \"arena\": \"tmpfs\", \"numa\": \"interleave\", "
			      "\"budget_bytes\": 1, \"wait_us\": []}",
			      WD_VERSION, getpid());
	return send_json(f, seq, text);
}

static int on_attach(struct fake *f, const int *fds, const struct wire_attach *m)
{
	size_t segs = m->nr_segs * sizeof(struct segment), units = m->nr_units * sizeof(struct unit);
	struct wire_attached a = { .view = f->next_view++, .bytes = m->bytes, .table_bytes = 4096 };
	int out[2] = { memfd_create("arena", MFD_CLOEXEC), memfd_create("table", MFD_CLOEXEC) };
	int r;

	free(f->layout_blob);
	f->layout_blob = NULL;
	r = wire_blob_read(fds[1], segs + units, &f->layout_blob);
	if (r < 0)
		return r;
	f->layout = (struct view_layout){ f->layout_blob, m->nr_segs,
					  (struct unit *)(void *)((char *)f->layout_blob + segs), m->nr_units };
	f->arena_bytes = m->bytes;
	f->direct = m->flags & WIRE_DIRECT && fcntl(fds[2], F_GETFL) & O_DIRECT;
	a.known = (uint32_t)f->known;
	WIRE_INIT(a, WIRE_ATTACHED, m->h.seq);
	r = wire_send(f->client, &a, out, 2, true);
	(void)close(out[0]);
	(void)close(out[1]);
	return r;
}

static int send_job(struct fake *f, uint64_t id, uint32_t seq, int fd)
{
	struct fake_job *j = &f->jobs[id % ARRAY_SIZE(f->jobs)];
	struct wire_job_info m = { .job = id, .total_bytes = j->total };

	if (j->steps >= f->job_steps && !atomic_load(&f->job_waits)) {
		m.state = f->job_error ? f->job_error : 1;
		if (m.state == 1)
			j->done = j->total;
	}
	m.done_bytes = j->done;
	WIRE_INIT(m, WIRE_JOB_INFO, seq);
	return wire_send(f->client, &m, &fd, fd >= 0 ? 1 : 0, true);
}

static int on_job(struct fake *f, const struct wire_job *m)
{
	uint64_t id = ++f->next_job;
	struct fake_job *j = &f->jobs[id % ARRAY_SIZE(f->jobs)];
	const uint64_t one = 1;

	f->nr_ranges = m->nr_ranges;
	free(f->ranges);
	f->ranges = calloc(m->nr_ranges + 1u, sizeof(m->ranges[0]));
	if (!f->ranges)
		return -ENOMEM;
	(void)memcpy(f->ranges, m->ranges, m->nr_ranges * sizeof(m->ranges[0]));
	*j = (struct fake_job){ .event = eventfd(0, EFD_CLOEXEC) };
	for (uint32_t i = 0; i < m->nr_ranges; i++)
		j->total += m->ranges[i].len;
	/* Always readable but while a job waits: the tool asks for the state without a pause. */
	if (!atomic_load(&f->job_waits))
		(void)!write(j->event, &one, sizeof(one));
	f->read_bytes += f->read_each;
	return send_job(f, id, m->h.seq, j->event);
}

static void note(struct fake *f, const int *fds, unsigned int nr_fds)
{
	const union wire_any *m = f->message;
	struct asked a = { .type = m->h.type };
	struct stat st;

	if (nr_fds > 0 && fstat(fds[0], &st) == 0)
		a.ino = st.st_ino;
	switch (m->h.type) {
	case WIRE_DROP:
	case WIRE_PIN:
		a.flags = m->admin.flags;
		a.bytes = m->admin.bytes;
		break;
	case WIRE_ATTACH:
		a.flags = m->attach.flags;
		(void)snprintf(f->name, sizeof(f->name), "%s", m->attach.name);
		break;
	case WIRE_DETACH:
		a.view = m->view.view;
		break;
	case WIRE_JOB:
		a.flags = m->job.gentle;
		break;
	default:
		break;
	}
	if (f->nr_asked < MOST_ASKED) {
		f->asked[f->nr_asked] = a;
		atomic_fetch_add(&f->nr_asked, 1);
	}
}

static unsigned int times_asked(const struct fake *f, uint32_t type)
{
	unsigned int n = 0;

	for (size_t i = 0; i < f->nr_asked; i++)
		n += f->asked[i].type == type;
	return n;
}

static int answer(struct fake *f, const int *fds)
{
	const union wire_any *m = f->message;
	uint32_t seq = m->h.seq + f->wrong_seq;

	if (f->wrong_type)
		return send_plain(f, WIRE_OK, seq, -1);
	if (f->refuse == m->h.type && times_asked(f, f->refuse) > f->refuse_after)
		return send_error(f, seq, f->error, f->error_text);
	switch (m->h.type) {
	case WIRE_LS:
	case WIRE_STAT:
		return send_report(f, seq, m->h.type == WIRE_LS);
	case WIRE_ATTACH:
		return on_attach(f, fds, &m->attach);
	case WIRE_JOB:
		return on_job(f, &m->job);
	case WIRE_JOB_STATE: {
		struct fake_job *j = &f->jobs[m->job_id.job % ARRAY_SIZE(f->jobs)];

		j->steps++;
		j->done = MIN(j->done + j->total / MAX(f->job_steps, 1u), j->total);
		return send_job(f, m->job_id.job, seq, -1);
	}
	case WIRE_DROP: {
		struct wire_stats s = { .dropped_bytes = f->dropped_each, .resident_bytes = 3 * GiB };

		WIRE_INIT(s, WIRE_STATS, seq);
		return wire_send(f->client, &s, NULL, 0, true);
	}
	case WIRE_SHUTDOWN: {
		struct pollfd p = { .fd = f->client, .events = POLLRDHUP };

		(void)send_plain(f, WIRE_OK, seq, -1);
		f->left_early = poll(&p, 1, 300) != 0; /* a daemon needs its time to end */
		return -ESHUTDOWN;
	}
	default:
		return send_plain(f, WIRE_OK, seq, -1);
	}
}

static int hello(struct fake *f)
{
	struct wire_welcome w = {
		.version = f->version ? f->version : WIRE_VERSION,
		.status = f->status,
		.pid = (uint32_t)getpid(),
		.page_bytes = 4096,
		.extent_bytes = 2 * MiB,
		.release = "9.8.7",
	};
	int pair[2], r;

	switch (f->hello) {
	case SILENT:
		return 0;
	case HANG_UP:
		return -EPIPE;
	case GARBAGE:
		(void)send(f->client, "220 mail ready\r\n", 16, MSG_NOSIGNAL);
		return 0;
	default:
		break;
	}
	(void)snprintf(w.text, sizeof(w.text), "%s", f->text ? f->text : "");
	WIRE_INIT(w, WIRE_WELCOME, f->message->h.seq);
	if (f->status) { /* a refusal answers no question in particular, and brings nothing */
		w.h.seq = 0;
		return wire_send(f->client, &w, NULL, 0, true);
	}
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	r = wire_send(f->client, &w, &pair[1], 1, true);
	(void)close(pair[1]);
	(void)close(pair[0]);
	return r;
}

/* Return: go on with it? */
static bool serve_one(struct fake *f)
{
	int fds[WIRE_MAX_FDS], r;
	unsigned int nr = 0;

	if (wire_recv(f->client, f->message, fds, &nr, -1) != 1)
		return false;
	note(f, fds, nr);
	if (f->questions_most && f->nr_asked > f->questions_most)
		r = -EPIPE;
	else
		r = f->message->h.type == WIRE_HELLO ? hello(f) : answer(f, fds);
	for (unsigned int i = 0; i < nr; i++)
		(void)close(fds[i]);
	return r == 0;
}

static void *fake_main(void *arg)
{
	struct fake *f = arg;

	for (;;) {
		struct pollfd p[2] = { { f->stop[0], POLLIN, 0 },
				       { f->client >= 0 ? f->client : f->listen_fd, POLLIN, 0 } };

		if (poll(p, 2, -1) < 0)
			continue;
		if (p[0].revents)
			return NULL;
		if (f->client < 0) {
			f->client = accept4(f->listen_fd, NULL, NULL, SOCK_CLOEXEC);
		} else if (!serve_one(f)) {
			(void)close(f->client);
			f->client = -1;
			atomic_fetch_add(&f->hung_up, 1);
		}
	}
}

/* Listens as that user: a client is told the one who called listen(). */
static void fake_start_as(struct fake *f, uid_t uid)
{
	struct sockaddr_un at = { .sun_family = AF_UNIX };

	f->folder = data_tmpdir();
	f->socket = data_text("%s/weightd.sock", f->folder);
	f->client = -1;
	f->next_view = VIEW;
	f->message = malloc(sizeof(*f->message));
	ck_assert_ptr_nonnull(f->message);
	ck_assert_int_lt(snprintf(at.sun_path, sizeof(at.sun_path), "%s", f->socket), (int)sizeof(at.sun_path));
	ck_assert_int_eq(chmod(f->folder, 0755), 0);
	f->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	ck_assert_int_ge(f->listen_fd, 0);
	ck_assert_int_eq(bind(f->listen_fd, (struct sockaddr *)&at, sizeof(at)), 0);
	ck_assert_int_eq(chmod(f->socket, 0666), 0);
	ck_assert_int_eq(seteuid(uid), 0);
	ck_assert_int_eq(listen(f->listen_fd, 8), 0);
	ck_assert_int_eq(seteuid(getuid()), 0);
	ck_assert_int_eq(pipe2(f->stop, O_CLOEXEC), 0);
	ck_assert_int_eq(setenv("WEIGHTD_SOCKET", f->socket, 1), 0);
	for (const char *const *name = (const char *const[]){ "WEIGHTD_MODE", "WEIGHTD_DISABLE", "WEIGHTD_AUTOSTART",
							      "XDG_RUNTIME_DIR", NULL };
	     *name; name++)
		(void)unsetenv(*name);
	ck_assert_int_eq(pthread_create(&f->thread, NULL, fake_main, f), 0);
}

static void fake_start(struct fake *f)
{
	fake_start_as(f, geteuid());
}

static void fake_stop(struct fake *f)
{
	ck_assert_int_eq(write(f->stop[1], "", 1), 1);
	ck_assert_int_eq(pthread_join(f->thread, NULL), 0);
	(void)close(f->stop[0]);
	(void)close(f->stop[1]);
	(void)close(f->listen_fd);
	if (f->client >= 0)
		(void)close(f->client);
	for (size_t i = 0; i < ARRAY_SIZE(f->jobs); i++)
		if (f->jobs[i].event > 0)
			(void)close(f->jobs[i].event);
	data_remove(f->folder);
	free(f->layout_blob);
	free(f->ranges);
	free(f->message);
	free(f->folder);
	free(f->socket);
}

#define FAKE(...)           \
	&(struct fake)      \
	{                   \
		__VA_ARGS__ \
	}

static const struct asked *asked(const struct fake *f, uint32_t type, unsigned int nth)
{
	for (size_t i = 0; i < f->nr_asked; i++)
		if (f->asked[i].type == type && nth-- == 0)
			return &f->asked[i];
	ck_abort_msg("question %u was asked only %u times", type, times_asked(f, type));
}

/* ------------------------------------------------------------------ the tool */

static int tool_binary(void)
{
	const char *out = getenv("OUT");
	cleanup_free char *path = data_text("%s/weightd", out ? out : ".out");
	int fd = open(path, O_RDONLY | O_CLOEXEC);

	ck_assert_msg(fd >= 0, "%s: %s: build it first", path, strerror(errno));
	return fd;
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

static void __attribute__((noreturn)) become_tool(uid_t uid, int out, int err, int binary, char **argv)
{
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	(void)dup2(open("/dev/null", O_RDONLY), 0);
	(void)dup2(out, 1);
	(void)dup2(err, 2);
	(void)signal(SIGPIPE, SIG_DFL);
	(void)setenv("TERM", "xterm", 1);
	(void)setenv("NO_COLOR", "1", 1);
	if (uid != geteuid() &&
	    (setgroups(0, NULL) < 0 || setresgid(uid, uid, uid) < 0 || setresuid(uid, uid, uid) < 0))
		_exit(126);
	(void)fexecve(binary, argv, environ);
	_exit(127);
}

static struct tool run_as(uid_t uid, char **argv)
{
	cleanup_close int out = memfd_create("out", MFD_CLOEXEC), err = memfd_create("err", MFD_CLOEXEC);
	cleanup_close int binary = tool_binary();
	struct tool t;
	int status;
	pid_t pid = fork();

	ck_assert_int_ge(pid, 0);
	if (pid == 0)
		become_tool(uid, out, err, binary, argv);
	ck_assert_int_eq(waitpid(pid, &status, 0), pid);
	t.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
	t.out = text_of(out);
	t.err = text_of(err);
	return t;
}

#define RUN_AS(uid, ...) run_as(uid, (char *[]){ "weightd", __VA_ARGS__, NULL })
#define RUN(...) RUN_AS(geteuid(), __VA_ARGS__)

/* With a pseudo-terminal of that width as stdout and stderr; goes on until it ends, or has printed `until`. */
struct terminal {
	int master;
	pid_t pid;
	char *text;
	size_t len, room;
};

static struct terminal terminal_start(unsigned short columns, char **argv)
{
	struct winsize size = { .ws_row = 24, .ws_col = columns };
	struct terminal t = { .master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), .room = 1 << 20 };
	cleanup_close int binary = tool_binary(), slave = -1;
	char name[64];

	t.text = calloc(1, t.room);
	ck_assert_ptr_nonnull(t.text);
	ck_assert_int_ge(t.master, 0);
	ck_assert_int_eq(grantpt(t.master), 0);
	ck_assert_int_eq(unlockpt(t.master), 0);
	ck_assert_int_eq(ptsname_r(t.master, name, sizeof(name)), 0);
	slave = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC);
	ck_assert_int_ge(slave, 0);
	ck_assert_int_eq(ioctl(slave, TIOCSWINSZ, &size), 0);
	t.pid = fork();
	ck_assert_int_ge(t.pid, 0);
	if (t.pid == 0)
		become_tool(geteuid(), slave, slave, binary, argv);
	return t;
}

/* Reads until `text` has come `times` times, or (NULL) to the end. */
static void terminal_read(struct terminal *t, const char *text, unsigned int times)
{
	for (;;) {
		unsigned int found = 0;
		ssize_t n;

		for (const char *p = t->text; text && (p = strstr(p, text)); p++)
			found++;
		if (text && found >= times)
			return;
		n = read(t->master, t->text + t->len, t->room - 1 - t->len);
		if (n <= 0) { /* EIO: the last writer closed it */
			ck_assert_msg(!text, "no '%s' in:\n%s", text, t->text);
			return;
		}
		t->len += (size_t)n;
	}
}

static int terminal_end(struct terminal *t)
{
	int status;

	terminal_read(t, NULL, 0);
	ck_assert_int_eq(waitpid(t->pid, &status, 0), t->pid);
	(void)close(t->master);
	return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static char *on_terminal(unsigned short columns, char **argv)
{
	struct terminal t = terminal_start(columns, argv);
	int code = terminal_end(&t);

	ck_assert_msg(code == 0, "exit %d:\n%s", code, t.text);
	return t.text;
}
#define ON_TERMINAL(columns, ...) on_terminal(columns, (char *[]){ "weightd", __VA_ARGS__, NULL })

static void check_width(const char *text, size_t most)
{
	size_t columns = 0;

	for (const char *s = text; *s; s++) {
		if (*s == '\n' || *s == '\r')
			columns = 0;
		else if (((unsigned char)*s & 0xc0) != 0x80)
			columns++;
		ck_assert_msg(columns <= most, "wider than %zu columns:\n%s", most, text);
	}
}

static void has(const char *text, const char *part)
{
	ck_assert_msg(strstr(text, part) != NULL, "no '%s' in:\n%s", part, text);
}

static void has_not(const char *text, const char *part)
{
	ck_assert_msg(strstr(text, part) == NULL, "'%s' in:\n%s", part, text);
}

static size_t lines(const char *s)
{
	size_t n = 0;

	for (; *s; s++)
		n += *s == '\n';
	return n;
}

/* It failed, and said so in one line that has `part`. */
static void must_fail(const struct tool *t, const char *part)
{
	has(t->err, part);
	ck_assert_int_eq(t->code, 1);
	ck_assert_msg(lines(t->err) == 1, "not one line:\n%s", t->err);
	has_not(t->err, "\033");
}

static json_t *parse(const struct tool *t)
{
	json_error_t e;
	json_t *root = json_loads(t->out, JSON_REJECT_DUPLICATES, &e);

	ck_assert_msg(root != NULL, "%s (%d:%d) in:\n%s", e.text, e.line, e.column, t->out);
	return root;
}

static json_int_t number(const json_t *object, const char *key)
{
	ck_assert_msg(json_is_integer(json_object_get(object, key)), "no integer \"%s\"", key);
	return json_integer_value(json_object_get(object, key));
}

static const json_t *named(const json_t *root, const char *list, const char *name)
{
	const json_t *one;
	size_t i;

	json_array_foreach(json_object_get(root, list), i, one) {
		if (strcmp(json_string_value(json_object_get(one, "name")), name) == 0)
			return one;
	}
	ck_abort_msg("no %s in %s", name, list);
}

static const char *str(const json_t *object, const char *key)
{
	const char *s = json_string_value(json_object_get(object, key));

	ck_assert_msg(s != NULL, "no string \"%s\"", key);
	return s;
}

/* ------------------------------------------------------------------ files */

static char *folder;

/* Those who are not us must get through to sockets and files. */
static void let_others_in(const char *path)
{
	cleanup_free char *above = strdup(path);

	*strrchr(above, '/') = '\0';
	ck_assert_int_eq(chmod(above, 0711), 0);
	ck_assert_int_eq(chmod(path, 0755), 0);
}

static void setup(void)
{
	folder = data_tmpdir();
	let_others_in(folder);
}

static void teardown(void)
{
	data_remove(folder);
	free(folder);
}

static char *checkpoint(const char *name, uint64_t rows)
{
	char *path = data_text("%s/%s", folder, name);
	struct data_tensor t[] = {
		{ .name = "a", .dtype = "F32", .ndim = 2, .shape = { (int64_t)rows, 1024 } },
		{ .name = "b", .dtype = "F32", .ndim = 1, .shape = { 64 } },
	};

	(void)data_write_safetensors(path, t, ARRAY_SIZE(t), &(struct data_opts){ .seed = 5 });
	return path;
}

/* The second tensor is of 3 bytes, so that the third one needs a copy. */
static char *misaligned(const char *name)
{
	char *path = data_text("%s/%s", folder, name);
	struct data_tensor t[] = {
		{ .name = "a", .dtype = "F32", .ndim = 2, .shape = { 1024, 1024 } },
		{ .name = "b", .dtype = "U8", .ndim = 1, .shape = { 3 } },
		{ .name = "c", .dtype = "F32", .ndim = 1, .shape = { 64 } },
	};

	(void)data_write_safetensors(path, t, ARRAY_SIZE(t), &(struct data_opts){ .seed = 5 });
	return path;
}

/* A folder with an index and two shards. */
static char *sharded(void)
{
	char *path = data_text("%s/sharded", folder);
	static const char index[] = "{\"weight_map\": {\"a\": \"m-00001-of-00002.safetensors\", "
				    "\"b\": \"m-00002-of-00002.safetensors\"}}";
	cleanup_free char *one = data_text("%s/m-00001-of-00002.safetensors", path),
			  *two = data_text("%s/m-00002-of-00002.safetensors", path),
			  *at = data_text("%s/model.safetensors.index.json", path);
	struct data_tensor a = { .name = "a", .dtype = "F32", .ndim = 1, .shape = { 1000 } },
			   b = { .name = "b", .dtype = "F32", .ndim = 1, .shape = { 2000 } };

	ck_assert_int_eq(mkdir(path, 0755), 0);
	(void)data_write_safetensors(one, &a, 1, NULL);
	(void)data_write_safetensors(two, &b, 1, NULL);
	data_write(at, index, strlen(index));
	return path;
}

static uint64_t inode(const char *path)
{
	struct stat st;

	ck_assert_int_eq(stat(path, &st), 0);
	return st.st_ino;
}

/* ------------------------------------------------------------------ ls */

static const char ls_three[] =
	"{\"arena\": \"tmpfs\", \"numa\": \"interleave\", \"views\": ["
	"{\"name\": \"/srv/models/flux/transformer/diffusion_pytorch_model-00001-of-00003.safetensors\", \"id\": 1,"
	" \"device\": \"259:1\", \"inode\": 1311234, \"size\": 10737418240, \"bytes\": 10737418240,"
	" \"resident_bytes\": 10737418240, \"huge_bytes\": 10522669875, \"pinned_bytes\": 10737418240,"
	" \"read_bytes\": 1, \"dropped_bytes\": 0, \"changed\": false, \"idle_seconds\": null, \"clients\": ["
	"{\"pid\": 12345, \"uid\": 0, \"name\": \"python3\", \"child\": false, \"stage\": \"denoise\","
	" \"held_bytes\": 10737418240, \"mapped_bytes\": 10737418240},"
	"{\"pid\": 12346, \"uid\": 4000000, \"name\": \"python3\", \"child\": true, \"stage\": null,"
	" \"held_bytes\": 4194304, \"mapped_bytes\": 10737418240},"
	"{\"pid\": 12347, \"uid\": 0, \"name\": \"idler\", \"child\": false, \"stage\": \"\","
	" \"held_bytes\": 0, \"mapped_bytes\": 10737418240}]},"
	"{\"name\": \"vae.safetensors\", \"id\": 2, \"device\": \"259:1\", \"inode\": 77, \"size\": 335544320,"
	" \"bytes\": 337641472, \"resident_bytes\": 0, \"huge_bytes\": 0, \"pinned_bytes\": 0, \"read_bytes\": 0,"
	" \"dropped_bytes\": 337641472, \"changed\": false, \"idle_seconds\": 185.7, \"clients\": []},"
	"{\"name\": \"evil\\u001b[31m\\n\\u202ename\", \"id\": 3, \"device\": \"0:45\", \"inode\": 5, \"size\": 4096,"
	" \"bytes\": 2097152, \"resident_bytes\": 1048576, \"huge_bytes\": 0, \"pinned_bytes\": 0,"
	" \"read_bytes\": 4096, \"dropped_bytes\": 0, \"changed\": true, \"idle_seconds\": null, \"clients\": ["
	"{\"pid\": 9, \"uid\": 0, \"name\": \"x\\u0007y\", \"child\": false, \"stage\": \"\\u009b2J\","
	" \"held_bytes\": 1, \"mapped_bytes\": 2097152}]}]}";
static const char ls_none[] = "{\"arena\": \"memfd\", \"numa\": \"default\", \"views\": []}";

START_TEST(test_ls_is_a_table)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ ls_three, NULL });
	cleanup_tool struct tool t = { 0 };

	fake_start(f);
	t = RUN("ls");
	fake_stop(f);
	ck_assert_str_eq(t.err, "");
	ck_assert_int_eq(t.code, 0);
	has(t.out, "NAME ");
	/* everything of a source in one line where there is no terminal, the name whole */
	has(t.out, "/srv/models/flux/transformer/diffusion_pytorch_model-00001-of-00003.safetensors  "
		   "259:1:1311234   10 GiB    10 GiB  100%   97%        3  used, pinned   "
		   "12345:python3:denoise 12346:python3\n");
	has(t.out, "259:1:77       320 MiB       0 B    0%     -        0  idle 3 min");
	has(t.out, "0:45:5           4 KiB     1 MiB   50%    0%        1  used, changed  9:x\\x07y:\\u{9b}2J\n");
	has(t.out, "evil\\x1b[31m\\n\\u{202e}name");
	has_not(t.out, "\033");
	has(t.out, "3 sources, 10 GiB resident; arenas: tmpfs, NUMA: interleave\n");
	ck_assert_int_eq(lines(t.out), 5);
}
END_TEST

START_TEST(test_ls_fits_a_terminal)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ ls_three, NULL });
	cleanup_free char *narrow = NULL, *wide = NULL, *clients = NULL;

	fake_start(f);
	narrow = ON_TERMINAL(80, "ls");
	wide = ON_TERMINAL(120, "ls");
	clients = ON_TERMINAL(80, "ls", "--clients");
	fake_stop(f);
	check_width(narrow, 80);
	check_width(wide, 120);
	check_width(clients, 80);
	/* shards can be told from each other */
	has(narrow, "0003.safetensors");
	has(wide, "pytorch_model-00001-of-00003.safetensors  259:1:1311234   10 GiB");
	has(narrow, "    259:1:1311234 12345:python3:denoise 12346:python3\r\n");
	has(wide, "\r\n    12345:python3:denoise 12346:python3\r\n");
	has(clients, "12346");
	has_not(narrow, "\033");
	has_not(wide, "\033");
}
END_TEST

START_TEST(test_ls_clients)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ ls_three, NULL });
	cleanup_tool struct tool t = { 0 };

	fake_start(f);
	t = RUN("ls", "--clients");
	fake_stop(f);
	ck_assert_int_eq(t.code, 0);
	has(t.out, "\n  PID  USER     PROGRAM          STAGE     ");
	has(t.out, "\n12345  root     python3          denoise   10 GiB  10 GiB  /srv");
	has(t.out, "\n12346  4000000  python3 (child)  -          4 MiB  10 GiB  /srv");
	has(t.out, "\n12347  root     idler            -            0 B  10 GiB  /srv");
	has(t.out, "\n    9  root     x\\x07y           \\u{9b}2J     1 B   2 MiB  evil\\x1b[31m\\n\\u{202e}name\n");
}
END_TEST

START_TEST(test_ls_of_nothing)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ ls_none, NULL });
	cleanup_tool struct tool t = { 0 };

	fake_start(f);
	t = RUN("ls", "--clients");
	fake_stop(f);
	ck_assert_int_eq(t.code, 0);
	ck_assert_str_eq(t.out, "no sources: nothing is open, and nothing is kept\n");
}
END_TEST

START_TEST(test_json_is_the_daemons)
{
	static const char stat_any[] =
		"{\"new\": {\"deep\": [1, -9007199254740993, 9223372036854775807]}, \"x\": \"\\u001b\"}";
	struct fake *f =
		FAKE(.ls = (const char *const[]){ ls_three, NULL }, .stat = (const char *const[]){ stat_any, NULL });
	cleanup_tool struct tool a = { 0 }, b = { 0 };
	json_t *got, *want;

	fake_start(f);
	a = RUN("ls", "--json");
	b = RUN("stat", "--json");
	fake_stop(f);
	ck_assert_int_eq(a.code, 0);
	ck_assert_int_eq(lines(a.out), 1);
	got = parse(&a);
	want = json_loads(ls_three, 0, NULL);
	ck_assert(json_equal(got, want));
	json_decref(got);
	json_decref(want);
	got = parse(&b);
	want = json_loads(stat_any, 0, NULL);
	ck_assert(json_equal(got, want));
	json_decref(got);
	json_decref(want);
	has_not(a.out, "\033");
	has_not(b.out, "\033");
}
END_TEST

static const struct {
	const char *ls, *stat, *says;
} lies[] = {
	{ "", "", "no JSON object" },
	{ "[]", "[]", "no JSON object" },
	{ "{\"views\": [", "{", "no JSON object" },
	{ "{\"views\": {}, \"views\": []}", "{\"a\": 1, \"a\": 2}", "no JSON object" },
	{ "{}", "{}", "what this version does not know" },
	{ "{\"views\": 5}", "{\"wait_us\": 5, \"budget_bytes\": 5}", "what this version does not know" },
	{ "{\"views\": \"x\"}", "{\"wait_us\": [], \"budget_bytes\": \"5\"}", "what this version does not know" },
};

START_TEST(test_answers_that_are_no_json)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ lies[_i].ls, NULL },
			      .stat = (const char *const[]){ lies[_i].stat, NULL });
	cleanup_tool struct tool a = { 0 }, b = { 0 };

	fake_start(f);
	a = RUN("ls");
	b = RUN("stat");
	must_fail(&a, lies[_i].says);
	must_fail(&b, lies[_i].says);
	has(a.err, f->socket);
	ck_assert_str_eq(a.out, "");
	ck_assert_str_eq(b.out, "");
	fake_stop(f);
}
END_TEST

/* A table with odd members is printed all the same: nothing that a program could misread, no crash. */
START_TEST(test_ls_of_odd_members)
{
	static const char odd[] =
		"{\"views\": [{}, 5, null, {\"name\": 5, \"clients\": [5, {}], \"size\": -5, \"bytes\": 0, "
		"\"resident_bytes\": 9223372036854775807, \"huge_bytes\": 9223372036854775807, "
		"\"idle_seconds\": -1e300}]}";
	struct fake *f = FAKE(.ls = (const char *const[]){ odd, NULL });
	cleanup_tool struct tool t = { 0 };

	fake_start(f);
	t = RUN("ls", "--clients");
	fake_stop(f);
	ck_assert_str_eq(t.err, "");
	ck_assert_int_eq(t.code, 0);
	has(t.out, "4 sources");
	has(t.out, "8 EiB");
}
END_TEST

/* ------------------------------------------------------------------ stat */

#define STAT(faults, read, buckets)                                                                                    \
	"{\"version\": \"0.1.0\", \"pid\": 4242, \"socket\": \"/run/x.sock\", \"uptime_seconds\": 93784, "             \
	"\"arena\": \"tmpfs\", \"numa\": \"node:1\", \"budget_bytes\": 68719476736, \"resident_bytes\": 17179869184, " \
	"\"peak_bytes\": 34359738368, \"huge_bytes\": 16835872000, \"huge_percent\": 98.0, \"written_bytes\": 0, "     \
	"\"read_bytes\": " read ", \"reads\": 12, \"faults\": " faults ", \"dropped_bytes\": 2097152, "                \
	"\"reloads\": 3, \"reload_bytes\": 6291456, \"failed\": 1, \"clients\": 8, \"children\": 2, \"views\": 3, "    \
	"\"mappings\": 24, \"pinned_bytes\": 1073741824, \"foreign_bytes\": 0, \"take_backs\": 5, "                    \
	"\"take_backs_given_up\": 1, \"rounds\": 4, \"forks\": 6, \"wait_us\": [" buckets "]}"
#define BUCKET(from, to, count) "{\"from\": " from ", \"to\": " to ", \"count\": " count "}"
#define EIGHT_BUCKETS                                                                                              \
	BUCKET("0", "2", "0")                                                                                      \
	"," BUCKET("2", "4", "0") "," BUCKET("4", "8", "100") "," BUCKET("8", "16", "0") "," BUCKET(               \
		"16", "32", "850") "," BUCKET("32", "1048576", "45") "," BUCKET("1048576", "2097152",              \
										"5") "," BUCKET("2097152", "null", \
												"0")

START_TEST(test_stat_is_a_table)
{
	static const char text[] = STAT("1000", "17179869184", EIGHT_BUCKETS);
	struct fake *f = FAKE(.stat = (const char *const[]){ text, NULL });
	cleanup_tool struct tool t = { 0 };
	cleanup_free char *narrow = NULL;

	fake_start(f);
	t = RUN("stat");
	narrow = ON_TERMINAL(80, "stat");
	fake_stop(f);
	ck_assert_str_eq(t.err, "");
	ck_assert_int_eq(t.code, 0);
	has(t.out, "weightd 0.1.0, pid 4242, up 1 d 2 h, /run/x.sock\n");
	has(t.out, "16 GiB resident, 25% of the budget of 64 GiB; peak 32 GiB\n");
	has(t.out, "tmpfs, 98% on huge pages, NUMA: node:1\n");
	has(t.out, "8, and 2 forked children; 24 mappings of 3 sources\n");
	has(t.out, "16 GiB in 12 reads\n");
	has(t.out, "1000: p50 under 32 us, p99 under 1.0 s\n");
	/* the fullest has the longest bar, what was at all has one, empty ones between have none */
	has(t.out, "     16 us - 32 us             850  ########################################\n");
	has(t.out, "      4 us - 8 us              100  ####\n");
	has(t.out, "      8 us - 16 us               0\n");
	has(t.out, "     1.0 s - 2.1 s               5  #\n");
	has_not(t.out, "2 us - 4 us");
	has_not(t.out, "foreign");
	check_width(narrow, 80);
	has_not(narrow, "\033");
}
END_TEST

static const struct {
	const char *buckets, *says;
} waits[] = {
	{ BUCKET("0", "2", "0"), "waits       none\n" },
	{ BUCKET("0", "2", "1"), "1: p50 under 2 us, p99 under 2 us\n" },
	{ BUCKET("0", "2", "1") "," BUCKET("2", "4", "1"), "2: p50 under 2 us, p99 under 4 us\n" },
	{ BUCKET("0", "2", "1") "," BUCKET("2", "4", "2"), "3: p50 under 4 us, p99 under 4 us\n" },
	{ BUCKET("0", "2", "99") "," BUCKET("2", "4", "1"), "100: p50 under 2 us, p99 under 2 us\n" },
	{ BUCKET("0", "2", "98") "," BUCKET("2", "4", "2"), "100: p50 under 2 us, p99 under 4 us\n" },
	{ BUCKET("0", "2", "1") "," BUCKET("8388608", "null", "9"), "10: p50 over 8.4 s, p99 over 8.4 s\n" },
	{ BUCKET("512", "1024", "1") "," BUCKET("16384", "32768", "1"), "2: p50 under 1.0 ms, p99 under 33 ms\n" },
};

START_TEST(test_stat_percentiles)
{
	cleanup_free char *text = data_text("{\"budget_bytes\": 1, \"wait_us\": [%s]}", waits[_i].buckets);
	struct fake *f = FAKE(.stat = (const char *const[]){ text, NULL });
	cleanup_tool struct tool t = { 0 };

	fake_start(f);
	t = RUN("stat");
	fake_stop(f);
	ck_assert_int_eq(t.code, 0);
	has(t.out, waits[_i].says);
}
END_TEST

START_TEST(test_stat_watch_in_a_log)
{
	static const char first[] = STAT("10", "1048576", ""), second[] = STAT("15", "3145728", BUCKET("0", "2", "1"));
	struct fake *f = FAKE(.stat = (const char *const[]){ first, second, NULL }, .questions_most = 4);
	cleanup_tool struct tool t = { 0 };
	char *line;

	fake_start(f);
	t = RUN("stat", "--watch", "0.1"); /* HELLO and three STATs, then it hangs up */
	fake_stop(f);
	must_fail(&t, "has gone");
	ck_assert_int_eq(lines(t.out), 3);
	line = strtok(t.out, "\n");
	has(line, "resident 16 GiB of 64 GiB, clients 8, read 1 MiB, dropped 2 MiB, faults 10");
	has_not(line, "waits");
	line = strtok(NULL, "\n");
	has(line, "read 3 MiB (+2 MiB), dropped 2 MiB, faults 15 (+5), waits p50 under 2 us");
	line = strtok(NULL, "\n");
	has(line, "read 3 MiB, dropped 2 MiB, faults 15, waits");
}
END_TEST

START_TEST(test_watch_draws_over_until_ctrl_c)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ ls_three, ls_none, NULL });
	struct terminal t;

	fake_start(f);
	t = terminal_start(80, (char *[]){ "weightd", "ls", "--watch=0.1", NULL });
	terminal_read(&t, "\033[H\033[J", 3);
	ck_assert_int_eq(kill(t.pid, SIGINT), 0);
	ck_assert_int_eq(terminal_end(&t), 0);
	fake_stop(f);
	ck_assert_int_eq(strncmp(t.text, "\033[H\033[JNAME", 10), 0);
	has(t.text, "\033[H\033[Jno sources");
	ck_assert_int_eq(t.text[t.len - 1], '\n');
	free(t.text);
}
END_TEST

START_TEST(test_watch_json_is_a_document_a_line)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ ls_three, ls_none, NULL }, .questions_most = 3);
	cleanup_tool struct tool t = { 0 };
	char *second;
	json_t *j;

	fake_start(f);
	t = RUN("ls", "--watch=0.1", "--json");
	fake_stop(f);
	must_fail(&t, "has gone");
	ck_assert_int_eq(lines(t.out), 2);
	second = strchr(t.out, '\n') + 1;
	j = json_loads(second, 0, NULL);
	ck_assert(j && json_array_size(json_object_get(j, "views")) == 0);
	json_decref(j);
}
END_TEST

/* ------------------------------------------------------------------ the connection */

START_TEST(test_no_daemon)
{
	static char *const commands[][3] = { { "ls" }, { "stat" }, { "shutdown" }, { "drop", "--all" } };

	(void)unsetenv("WEIGHTD_SOCKET");
	for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
		cleanup_free char *none = data_text("--socket=%s/none", folder), *file = data_text("%s/file", folder);
		cleanup_free char *plain = data_text("--socket=%s", file),
				  *want = data_text("%s/none: start one", folder);
		cleanup_tool struct tool t = RUN(commands[i][0], none, commands[i][1]);
		cleanup_tool struct tool s = { 0 };

		must_fail(&t, "no daemon answers at");
		has(t.err, want);
		has(t.err, "weightd serve");
		has(t.err, "WEIGHTD_AUTOSTART=1");
		data_write(file, "x", 1);
		s = RUN(commands[i][0], plain, commands[i][1]);
		must_fail(&s, "no daemon answers at");
	}
}
END_TEST

/* A daemon that cannot come up there; what is told is its own reason, so one was started. Only for what is of use on an
 * empty daemon. */
START_TEST(test_prefetch_starts_a_daemon_where_that_is_wanted)
{
	cleanup_free char *path = checkpoint("a.safetensors", 16), *at = data_text("%s/no/folder/w.sock", folder);
	cleanup_tool struct tool with = { 0 }, without = { 0 }, ls = { 0 }, doctor = { 0 };
	const json_t *way;
	json_t *j;

	ck_assert_int_eq(setenv("WEIGHTD_SOCKET", at, 1), 0);
	without = RUN("prefetch", path);
	must_fail(&without, "start one with");
	ck_assert_int_eq(setenv("WEIGHTD_AUTOSTART", "1", 1), 0);
	/* The tool is run by descriptor here, so it cannot tell where it lies. */
	ck_assert_int_eq(setenv("PATH", getenv("OUT") ? getenv("OUT") : ".out", 1), 0);
	with = RUN("prefetch", path);
	must_fail(&with, "give a path whose folder is there");
	ls = RUN("ls");
	must_fail(&ls, "start one with");
	doctor = RUN("doctor", "--json");
	j = parse(&doctor);
	way = named(j, "ways", "daemon");
	if (json_is_true(json_object_get(named(j, "ways", "embedded"), "possible"))) {
		ck_assert(json_is_true(json_object_get(way, "chosen")));
		has(str(way, "text"), "WEIGHTD_AUTOSTART");
	}
	json_decref(j);
	ck_assert_int_eq(setenv("WEIGHTD_DISABLE", "1", 1), 0);
	tool_done(&doctor);
	doctor = RUN("doctor", "--json");
	j = parse(&doctor);
	ck_assert_str_eq(str(j, "way"), "mmap");
	json_decref(j);
	(void)unsetenv("WEIGHTD_AUTOSTART");
	(void)unsetenv("WEIGHTD_DISABLE");
}
END_TEST

START_TEST(test_socket_of_a_name_that_is_too_long)
{
	cleanup_free char *option = data_text("--socket=/tmp/%0200d", 0);
	cleanup_tool struct tool t = RUN("ls", option);

	must_fail(&t, "too long for a socket");
}
END_TEST

START_TEST(test_socket_of_another_program)
{
	cleanup_free char *path = data_text("%s/other", folder), *option = data_text("--socket=%s", path);
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	cleanup_close int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	cleanup_tool struct tool t = { 0 };

	(void)snprintf(at.sun_path, sizeof(at.sun_path), "%s", path);
	ck_assert_int_eq(bind(fd, (struct sockaddr *)&at, sizeof(at)), 0);
	ck_assert_int_eq(listen(fd, 1), 0);
	t = RUN("ls", option);
	must_fail(&t, "is a socket of another program");
	has(t.err, path);
}
END_TEST

/* The option goes before the environment. */
START_TEST(test_socket_option_wins)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ ls_none, NULL });
	cleanup_free char *option = NULL;
	cleanup_tool struct tool t = { 0 }, u = { 0 };

	fake_start(f);
	option = data_text("--socket=%s", f->socket);
	(void)setenv("WEIGHTD_SOCKET", "/nowhere/at/all", 1);
	t = RUN("ls", option);
	u = RUN("ls");
	fake_stop(f);
	ck_assert_int_eq(t.code, 0);
	must_fail(&u, "/nowhere/at/all");
}
END_TEST

static const struct {
	struct fake fake;
	const char *says[2];
} welcomes[] = {
	{ { .version = WIRE_VERSION + 1, .status = -EPROTONOSUPPORT },
	  { "is weightd 9.8.7 and speaks version 2", "this is weightd " WD_VERSION } },
	{ { .status = -EPROTONOSUPPORT, .version = 77 }, { "version 77", "use the same weightd on both sides" } },
	{ { .status = -EUSERS, .text = "100 clients are the limit (max-clients)" },
	  { "refuses: 100 clients are the limit (max-clients)", "weightd.sock" } },
	{ { .status = -ENOMEM }, { "Cannot allocate memory", "weightd.sock" } },
	{ { .hello = HANG_UP }, { "hangs up", "weightd.sock" } },
	{ { .hello = GARBAGE }, { "is not a weightd daemon", "weightd.sock" } },
	{ { .hello = SILENT }, { "does not answer", "weightd.sock" } },
	{ { .questions_most = 1 }, { "has gone", "weightd.sock" } },
	{ { .wrong_seq = true }, { "what this version does not know", "weightd.sock" } },
	{ { .wrong_type = true }, { "what this version does not know", "weightd.sock" } },
	{ { .no_seal_json = true }, { "answers with no text", "weightd.sock" } },
	{ { .refuse = WIRE_LS, .error = -EPERM, .error_text = "not \033[31mfor you" }, { "not ?[31mfor you", "ls: " } },
	{ { .refuse = WIRE_LS, .error = -EPERM, .error_text = "" }, { "Operation not permitted", "ls: " } },
};

START_TEST(test_daemons_that_refuse_or_lie)
{
	struct fake *f = calloc(1, sizeof(*f));
	cleanup_tool struct tool t = { 0 };

	ck_assert_ptr_nonnull(f);
	(void)memcpy(f, &welcomes[_i].fake, sizeof(*f));
	fake_start(f);
	t = RUN("ls");
	fake_stop(f);
	free(f);
	must_fail(&t, welcomes[_i].says[0]);
	must_fail(&t, welcomes[_i].says[1]);
	ck_assert_str_eq(t.out, "");
}
END_TEST

/* root runs these: somebody else's socket, and who may trust whose. */
START_TEST(test_socket_of_somebody_else_is_refused)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ ls_none, NULL });
	cleanup_tool struct tool root = { 0 }, own = { 0 }, other = { 0 };

	fake_start_as(f, NOBODY);
	root = RUN("ls");
	own = RUN_AS(NOBODY, "ls");
	other = RUN_AS(NOBODY - 1, "ls");
	ck_assert_int_eq(f->nr_asked, 2); /* HELLO and LS of its own user: the others told it nothing */
	must_fail(&root, "is refused: it belongs to uid 65534");
	has(root.err, f->socket);
	must_fail(&other, "is refused: it belongs to uid 65534");
	ck_assert_str_eq(own.err, "");
	ck_assert_int_eq(own.code, 0);
	fake_stop(f);
}
END_TEST

START_TEST(test_roots_socket_is_everybodys)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ ls_none, NULL });
	cleanup_tool struct tool t = { 0 }, closed = { 0 };

	fake_start(f);
	t = RUN_AS(NOBODY, "ls");
	ck_assert_int_eq(chmod(f->socket, 0600), 0);
	closed = RUN_AS(NOBODY, "ls");
	ck_assert_str_eq(t.err, "");
	ck_assert_int_eq(t.code, 0);
	must_fail(&closed, "may not be used by this user (uid 65534): Permission denied");
	has(closed.err, f->socket);
	fake_stop(f);
}
END_TEST

START_TEST(test_own_socket_is_found)
{
	struct fake *f = FAKE(.ls = (const char *const[]){ ls_none, NULL });
	cleanup_tool struct tool t = { 0 }, gone = { 0 };

	fake_start_as(f, NOBODY);
	(void)unsetenv("WEIGHTD_SOCKET");
	(void)setenv("XDG_RUNTIME_DIR", f->folder, 1);
	t = RUN_AS(NOBODY, "ls");
	ck_assert_str_eq(t.err, "");
	ck_assert_int_eq(t.code, 0);
	(void)setenv("XDG_RUNTIME_DIR", folder, 1);
	gone = RUN_AS(NOBODY, "ls");
	must_fail(&gone, "no daemon answers at /run/weightd/weightd.sock or ");
	has(gone.err, folder);
	fake_stop(f);
}
END_TEST

/* ------------------------------------------------------------------ prefetch */

/* What the library would attach. */
static void layout_of(const char *path, struct layout *ret, struct checkpoint **c)
{
	ck_assert_int_eq(checkpoint_open(path, NULL, 0, c, NULL), 0);
	ck_assert_int_eq(layout_compute((*c)->files[0].source->id.size, (*c)->files[0].data_offset, 1, (*c)->tensors,
					(uint32_t)(*c)->nr_tensors, ret),
			 0);
}

START_TEST(test_prefetch_lays_out_as_the_library)
{
	struct fake *f = FAKE(.job_steps = 3, .read_each = 5 * MiB);
	cleanup_free char *path = misaligned("model.safetensors");
	cleanup_tool struct tool t = { 0 };
	struct checkpoint *c = NULL;
	struct layout l;
	const struct asked *a;

	fake_start(f);
	t = RUN("prefetch", path);
	ck_assert_str_eq(t.err, "");
	ck_assert_int_eq(t.code, 0);
	has(t.out, "1 file, 4 MiB: 5 MiB read in ");
	a = asked(f, WIRE_ATTACH, 0);
	ck_assert_str_eq(f->name, path);
	ck_assert_uint_eq(a->ino, inode(path));
	layout_of(path, &l, &c);
	ck_assert_uint_gt(l.view.nr_segs, 1); /* a copy: the case that could differ */
	ck_assert_uint_eq(f->layout.nr_segs, l.view.nr_segs);
	ck_assert_uint_eq(f->layout.nr_units, l.view.nr_units);
	ck_assert_int_eq(memcmp(f->layout.segs, l.view.segs, l.view.nr_segs * sizeof(*l.view.segs)), 0);
	ck_assert_int_eq(memcmp(f->layout.units, l.view.units, l.view.nr_units * sizeof(*l.view.units)), 0);
	ck_assert_uint_ge(f->arena_bytes,
			  l.view.segs[l.view.nr_segs - 1].arena_off + l.view.segs[l.view.nr_segs - 1].len);
	ck_assert(f->direct == (c->files[0].source->direct_fd >= 0));
	/* every tensor is in what was asked for */
	for (size_t i = 0; i < l.view.nr_units; i++) {
		bool in = false;

		for (uint32_t k = 0; k < f->nr_ranges; k++)
			in = in || (l.view.units[i].off >= f->ranges[k].off &&
				    l.view.units[i].off + l.view.units[i].len <= f->ranges[k].off + f->ranges[k].len);
		ck_assert(in);
	}
	ck_assert_uint_eq(asked(f, WIRE_JOB, 0)->flags, 0); /* not gentle: it was asked for */
	ck_assert_uint_eq(asked(f, WIRE_DETACH, 0)->view, VIEW);
	ck_assert_uint_eq(times_asked(f, WIRE_JOB_END), 1);
	ck_assert_uint_eq(times_asked(f, WIRE_PIN), 0);
	layout_done(&l);
	checkpoint_free(c);
	fake_stop(f);
}
END_TEST

START_TEST(test_prefetch_shows_a_bar)
{
	struct fake *f = FAKE(.job_steps = 4);
	cleanup_free char *path = checkpoint("model.safetensors", 1024), *text = NULL;

	fake_start(f);
	text = ON_TERMINAL(80, "prefetch", path);
	fake_stop(f);
	has(text, "\r[..............................] 0 B of 4 MiB");
	has(text, "[###");
	has(text, "[##############################] 4 MiB of 4 MiB");
	has(text, " of 4 MiB, ");
	has(text, "\r\033[K1 file, 4 MiB: all in memory already\r\n"); /* the bar has gone */
}
END_TEST

START_TEST(test_prefetch_of_shards_with_pins)
{
	struct fake *f = FAKE(.known = 1);
	cleanup_free char *path = sharded();
	cleanup_tool struct tool t = { 0 };
	json_t *j, *files;
	size_t pin = 0, job = 0;

	fake_start(f);
	t = RUN("prefetch", "--pin", "--json", path);
	ck_assert_str_eq(t.err, "");
	ck_assert_int_eq(t.code, 0);
	j = parse(&t);
	files = json_object_get(j, "files");
	ck_assert_int_eq(json_array_size(files), 2);
	ck_assert_int_eq(number(json_array_get(files, 0), "bytes"), 4000);
	ck_assert_int_eq(number(json_array_get(files, 1), "bytes"), 8000);
	ck_assert(json_is_true(json_object_get(json_array_get(files, 1), "known")));
	ck_assert_int_eq(number(j, "bytes"), 12000);
	ck_assert_int_eq(number(j, "read_bytes"), 0);
	ck_assert_int_eq(json_array_size(json_object_get(j, "errors")), 0);
	json_decref(j);
	ck_assert_uint_eq(times_asked(f, WIRE_ATTACH), 2);
	ck_assert_uint_eq(times_asked(f, WIRE_PIN), 2);
	for (size_t i = 0; i < f->nr_asked; i++) {
		pin = f->asked[i].type == WIRE_PIN && !pin ? i : pin;
		job = f->asked[i].type == WIRE_JOB && !job ? i : job;
	}
	ck_assert_uint_lt(pin, job); /* nothing of it may be dropped while it comes */
	fake_stop(f);
}
END_TEST

START_TEST(test_prefetch_that_does_not_wait)
{
	struct fake *f = FAKE(.job_waits = true);
	cleanup_free char *path = checkpoint("model.safetensors", 1024);
	cleanup_tool struct tool t = { 0 };
	const uint64_t one = 1;

	fake_start(f);
	t = RUN("prefetch", "--no-wait", path);
	ck_assert_str_eq(t.err, "");
	ck_assert_int_eq(t.code, 0);
	has(t.out, "1 file, 4 MiB: the daemon reads them\n");
	ck_assert_uint_eq(f->hung_up, 0); /* the job would end with the connection */
	ck_assert_uint_eq(times_asked(f, WIRE_JOB_END), 0);
	atomic_store(&f->job_waits, false);
	ck_assert_int_eq(write(f->jobs[1].event, &one, sizeof(one)), sizeof(one));
	while (!atomic_load(&f->hung_up))
		(void)poll(NULL, 0, 1);
	ck_assert_uint_eq(times_asked(f, WIRE_JOB_END), 1);
	fake_stop(f);
}
END_TEST

static const struct {
	struct fake fake;
	const char *says;
} reads[] = {
	{ { .job_error = -ENOSPC },
	  "model.safetensors: the daemon has no room: 0 B of 4 MiB were read; raise its budget" },
	{ { .job_error = -EIO }, "model.safetensors: reading failed after 0 B of 4 MiB: Input/output error" },
	{ { .job_error = -ESTALE }, "model.safetensors: the file was changed" },
	{ { .refuse = WIRE_ATTACH, .error = -EUSERS, .error_text = "64 views are the limit" },
	  "model.safetensors: 64 views are the limit" },
	{ { .refuse = WIRE_PIN, .error = -ENOSPC, .error_text = "pins: 4 GiB of 4 GiB" },
	  "model.safetensors: pins: 4 GiB of 4 GiB" },
};

START_TEST(test_prefetch_that_fails)
{
	struct fake *f = calloc(1, sizeof(*f));
	cleanup_free char *path = checkpoint("model.safetensors", 1024);
	cleanup_tool struct tool t = { 0 };
	json_t *j, *e;

	ck_assert_ptr_nonnull(f);
	(void)memcpy(f, &reads[_i].fake, sizeof(*f));
	fake_start(f);
	t = RUN("prefetch", "--pin", "--json", path);
	fake_stop(f);
	must_fail(&t, reads[_i].says);
	j = parse(&t);
	e = json_array_get(json_object_get(j, "errors"), 0);
	ck_assert_str_eq(json_string_value(json_object_get(e, "path")), path);
	ck_assert_int_eq(number(e, "errno"), reads[_i].fake.error ? -reads[_i].fake.error : -reads[_i].fake.job_error);
	ck_assert_int_eq(json_array_size(json_object_get(j, "files")), 0);
	json_decref(j);
	free(f);
}
END_TEST

START_TEST(test_prefetch_goes_on_after_bad_files)
{
	struct fake *f = FAKE(0);
	cleanup_free char *good = checkpoint("good.safetensors", 16), *bad = data_text("%s/bad.safetensors", folder),
			  *none = data_text("%s/none.safetensors", folder);
	cleanup_tool struct tool t = { 0 };

	data_write(bad, "no checkpoint at all", 20);
	fake_start(f);
	t = RUN("prefetch", bad, none, good);
	ck_assert_int_eq(t.code, 1);
	ck_assert_int_eq(lines(t.err), 2);
	has(t.err, "bad.safetensors");
	has(t.err, "none.safetensors");
	has(t.out, "1 file, ");
	ck_assert_uint_eq(times_asked(f, WIRE_JOB), 1);
	fake_stop(f);
}
END_TEST

/* ------------------------------------------------------------------ drop, pin, shutdown */

START_TEST(test_drop)
{
	struct fake *f = FAKE(.dropped_each = GiB);
	cleanup_free char *path = checkpoint("a.safetensors", 16), *shards = sharded();
	cleanup_tool struct tool a = { 0 }, b = { 0 }, c = { 0 };
	json_t *j;

	fake_start(f);
	a = RUN("drop", path);
	ck_assert_int_eq(a.code, 0);
	ck_assert_str_eq(a.err, "");
	ck_assert_str_eq(a.out, "dropped 1 GiB; 3 GiB are in memory\n");
	ck_assert_uint_eq(asked(f, WIRE_DROP, 0)->flags, 0);
	ck_assert_uint_eq(asked(f, WIRE_DROP, 0)->bytes, 0);
	ck_assert_uint_eq(asked(f, WIRE_DROP, 0)->ino, inode(path));

	b = RUN("drop", "--all", "--force", "--bytes=3G", "--json");
	ck_assert_int_eq(b.code, 0);
	j = parse(&b);
	ck_assert_int_eq(number(j, "dropped_bytes"), GiB);
	ck_assert_int_eq(number(j, "resident_bytes"), 3 * GiB);
	json_decref(j);
	ck_assert_uint_eq(asked(f, WIRE_DROP, 1)->flags, WIRE_ALL | WIRE_FORCE);
	ck_assert_uint_eq(asked(f, WIRE_DROP, 1)->bytes, 3 * GiB);
	ck_assert_uint_eq(asked(f, WIRE_DROP, 1)->ino, 0);

	/* all shards; and --bytes counts over all of them */
	c = RUN("drop", "--bytes=1.5G", shards, path);
	ck_assert_int_eq(c.code, 0);
	ck_assert_uint_eq(times_asked(f, WIRE_DROP), 4);
	ck_assert_uint_eq(asked(f, WIRE_DROP, 2)->bytes, GiB + GiB / 2);
	ck_assert_uint_eq(asked(f, WIRE_DROP, 3)->bytes, GiB / 2);
	fake_stop(f);
}
END_TEST

START_TEST(test_drop_of_what_the_daemon_does_not_have)
{
	struct fake *all = FAKE(.refuse = WIRE_DROP, .error = -ENOENT, .error_text = "nobody has it"),
		    *some = FAKE(.refuse = WIRE_DROP, .refuse_after = 1, .error = -ENOENT,
				 .error_text = "nobody has it");
	cleanup_free char *shards = sharded();
	cleanup_tool struct tool a = { 0 }, b = { 0 };

	fake_start(all);
	a = RUN("drop", shards);
	fake_stop(all);
	must_fail(&a, "nobody has it");
	fake_start(some);
	b = RUN("drop", shards);
	fake_stop(some);
	ck_assert_str_eq(b.err, "");
	ck_assert_int_eq(b.code, 0);
}
END_TEST

START_TEST(test_drop_refused)
{
	struct fake *f = FAKE(.refuse = WIRE_DROP, .error = -EPERM, .error_text = "others use it");
	cleanup_free char *path = checkpoint("a.safetensors", 16);
	cleanup_tool struct tool a = { 0 }, b = { 0 };
	json_t *j;

	fake_start(f);
	a = RUN("drop", path);
	b = RUN("drop", "--all", "--json");
	fake_stop(f);
	must_fail(&a, "a.safetensors: others use it");
	ck_assert_str_eq(a.out, "");
	must_fail(&b, "others use it");
	j = parse(&b);
	ck_assert_int_eq(json_array_size(json_object_get(j, "errors")), 1);
	json_decref(j);
}
END_TEST

START_TEST(test_pin_and_unpin)
{
	struct fake *f = FAKE(0);
	cleanup_free char *shards = sharded();
	cleanup_free char *index = data_text("%s/model.safetensors.index.json", shards),
			  *one = data_text("%s/m-00001-of-00002.safetensors", shards);
	cleanup_tool struct tool a = { 0 }, b = { 0 }, c = { 0 };
	json_t *j;

	fake_start(f);
	a = RUN("pin", index);
	ck_assert_int_eq(a.code, 0);
	has(a.out, "pinned 2 files of ");
	ck_assert_uint_eq(times_asked(f, WIRE_PIN), 2);
	ck_assert_uint_eq(asked(f, WIRE_PIN, 0)->ino, inode(one));
	ck_assert_uint_eq(asked(f, WIRE_PIN, 0)->flags, 0);
	b = RUN("unpin", "--json", one);
	ck_assert_int_eq(b.code, 0);
	j = parse(&b);
	ck_assert_int_eq(json_array_size(json_object_get(j, "files")), 1);
	json_decref(j);
	ck_assert_uint_eq(asked(f, WIRE_PIN, 2)->flags, WIRE_UNPIN);
	f->refuse = WIRE_PIN;
	f->error = -ENOSPC;
	f->error_text = "this user may pin 32 GiB, and has";
	c = RUN("pin", one);
	must_fail(&c, "m-00001-of-00002.safetensors: this user may pin 32 GiB, and has");
	fake_stop(f);
}
END_TEST

START_TEST(test_shutdown_waits_for_the_end)
{
	struct fake *f = FAKE(0), *g = FAKE(.refuse = WIRE_SHUTDOWN, .error = -EPERM, .error_text = "only root may");
	cleanup_tool struct tool t = { 0 }, u = { 0 };
	json_t *j;

	fake_start(f);
	t = RUN("shutdown", "--json");
	ck_assert_int_eq(t.code, 0);
	ck_assert(!f->left_early);
	j = parse(&t);
	ck_assert_int_eq(number(j, "pid"), getpid());
	ck_assert_str_eq(json_string_value(json_object_get(j, "socket")), f->socket);
	json_decref(j);
	fake_stop(f);
	fake_start(g);
	u = RUN("shutdown");
	must_fail(&u, "only root may");
	fake_stop(g);
}
END_TEST

/* ------------------------------------------------------------------ command lines */

static const struct {
	const char *args[5], *says;
} wrong[] = {
	{ { "ls", "x" }, "ls: takes no argument: 'x'" },
	{ { "ls", "--watch", "x" }, "--watch: 'x' is not a number of seconds" },
	{ { "ls", "--watch=0" }, "--watch: '0' is not a number of seconds" },
	{ { "ls", "--watch=nan" }, "--watch: 'nan' is not a number of seconds" },
	{ { "ls", "--watch=1e9" }, "--watch: '1e9' is not a number of seconds" },
	{ { "ls", "--watch", "1", "2" }, "takes no argument: '2'" },
	{ { "ls", "--socket" }, "requires an argument" },
	{ { "stat", "1" }, "stat: takes no argument: '1'" },
	{ { "stat", "--watch=" }, "--watch: '' is not a number" },
	{ { "prefetch" }, "prefetch: no file given" },
	{ { "drop" }, "drop: no file given, and no --all" },
	{ { "drop", "--all", "x" }, "drop: --all and a file: 'x'" },
	{ { "drop", "--bytes=many", "x" }, "--bytes: 'many' is not a size" },
	{ { "drop", "--bytes=0", "x" }, "--bytes: '0' is not a size" },
	{ { "drop", "--bytes=50%", "x" }, "--bytes: '50%' is not a size" },
	{ { "pin" }, "pin: no file given" },
	{ { "unpin" }, "unpin: no file given" },
	{ { "shutdown", "now" }, "shutdown: takes no argument: 'now'" },
};

START_TEST(test_wrong_command_lines)
{
	struct fake *f = FAKE(0);
	char *argv[7] = { "weightd" };
	cleanup_tool struct tool t = { 0 };

	for (size_t i = 0; i < ARRAY_SIZE(wrong[_i].args); i++)
		argv[i + 1] = (char *)wrong[_i].args[i];
	fake_start(f);
	t = run_as(geteuid(), argv);
	ck_assert_int_eq(t.code, 2);
	has(t.err, wrong[_i].says);
	has(t.err, "--help'");
	ck_assert_str_eq(t.out, "");
	ck_assert_uint_eq(f->nr_asked, 0); /* nothing was done */
	fake_stop(f);
}
END_TEST

/* ------------------------------------------------------------------ doctor */

START_TEST(test_doctor_tells_of_the_daemon)
{
	struct fake *f = FAKE(0), *old = FAKE(.version = 99, .status = -EPROTONOSUPPORT);
	cleanup_tool struct tool t = { 0 }, o = { 0 }, text = { 0 };
	json_t *j;

	fake_start(f);
	t = RUN("doctor", "--json");
	ck_assert_int_eq(t.code, 0);
	j = parse(&t);
	ck_assert_str_eq(str(j, "way"), "daemon");
	ck_assert_str_eq(str(named(j, "checks", "daemon"), "status"), "ok");
	has(str(named(j, "checks", "daemon"), "found"), f->socket);
	has(str(named(j, "checks", "daemon"), "found"), "NUMA: interleave");
	ck_assert(json_is_true(json_object_get(named(j, "ways", "daemon"), "chosen")));
	ck_assert_str_eq(str(json_object_get(j, "daemon"), "socket"), f->socket);
	ck_assert_int_eq(number(json_object_get(j, "daemon"), "pid"), getpid());
	json_decref(j);
	(void)setenv("WEIGHTD_MODE", "mmap", 1);
	text = RUN("doctor");
	(void)unsetenv("WEIGHTD_MODE");
	has(text.out, "possible  daemon    one copy for all processes");
	fake_stop(f);

	fake_start(old);
	o = RUN("doctor", "--json");
	ck_assert_int_eq(o.code, 0);
	j = parse(&o);
	ck_assert_str_ne(str(j, "way"), "daemon");
	ck_assert_str_eq(str(named(j, "checks", "daemon"), "status"), "missing");
	has(str(named(j, "checks", "daemon"), "found"), "version 99");
	ck_assert(!json_is_true(json_object_get(named(j, "ways", "daemon"), "possible")));
	ck_assert(json_is_null(json_object_get(j, "daemon")));
	json_decref(j);
	fake_stop(old);
}
END_TEST

START_TEST(test_doctor_tells_of_a_refused_socket)
{
	struct fake *f = FAKE(0);
	cleanup_tool struct tool t = { 0 }, forced = { 0 };
	json_t *j;

	fake_start_as(f, NOBODY);
	t = RUN("doctor", "--json");
	j = parse(&t);
	ck_assert_int_eq(t.code, 0);
	has(str(named(j, "checks", "daemon"), "found"), "is refused: it belongs to uid 65534");
	has(str(named(j, "checks", "daemon"), "found"), f->socket);
	has(str(named(j, "ways", "daemon"), "text"), "is refused");
	json_decref(j);
	(void)setenv("WEIGHTD_MODE", "daemon", 1);
	forced = RUN("doctor", "--json");
	(void)unsetenv("WEIGHTD_MODE");
	must_fail(&forced, "WEIGHTD_MODE");
	fake_stop(f);
}
END_TEST

/* ------------------------------------------------------------------ the daemon itself */

static struct daemon d;

static void real_setup(void)
{
	let_others_in(test_dir);
	daemon_start(&d, "", NULL);
}

static void real_teardown(void)
{
	daemon_stop(&d);
}

static json_int_t resident_of(const char *name)
{
	json_t *all;
	const json_t *v = listed(getuid(), name, &all);
	json_int_t n = v ? number(v, "resident_bytes") : -1;

	json_decref(all);
	return n;
}

/* All of them on one model: what the one says the other one finds, and a program that uses it sees only its bytes. */
START_TEST(test_end_to_end)
{
	struct use m = new_model("model.safetensors", 8, 4 * MiB, 11, 0);
	cleanup_tool struct tool first = { 0 }, again = { 0 }, table = { 0 }, drop = { 0 }, spare = { 0 },
				 force = { 0 };
	json_t *all;
	const json_t *v;
	struct peer p;
	json_int_t whole;

	first = tool_run(getuid(), "prefetch %s", m.path);
	ck_assert_msg(first.code == 0, "%s", first.err);
	has(first.out, "1 file, 32 MiB: ");
	has(first.out, " read in ");
	again = tool_run(getuid(), "prefetch %s", m.path);
	ck_assert_msg(again.code == 0, "%s", again.err);
	ck_assert_str_eq(again.out, "1 file, 32 MiB: all in memory already\n");
	whole = resident_of("model.safetensors");
	ck_assert_int_ge(whole, 32 * MiB);

	/* the program gets the arena that is there */
	peer_new(&p, getuid());
	must_do(&p, do_open, &m);
	must_do(&p, do_check, &m);
	v = listed(getuid(), "model.safetensors", &all);
	ck_assert_int_eq(json_array_size(json_object_get(all, "views")), 1);
	ck_assert_int_eq(json_array_size(json_object_get(v, "clients")), 1);
	ck_assert_int_eq(number(json_array_get(json_object_get(v, "clients"), 0), "pid"), p.pid);
	ck_assert_int_le(number(v, "read_bytes"), whole);
	json_decref(all);
	table = tool_run(getuid(), "ls --clients");
	has(table.out, "model.safetensors");
	has(table.out, "used");

	/* dropped while it is used: memory goes, bytes stay right */
	drop = tool_run(getuid(), "drop %s", m.path);
	ck_assert_msg(drop.code == 0, "%s", drop.err);
	ck_assert_str_eq(drop.out, "dropped 32 MiB; 0 B are in memory\n");
	ck_assert_int_eq(resident_of("model.safetensors"), 0);
	must_do(&p, do_check, &m);
	ck_assert_int_eq(resident_of("model.safetensors"), whole);

	/* pins are spared, but not by force */
	must_tool("pin %s", m.path);
	spare = tool_run(getuid(), "drop --all");
	ck_assert_msg(spare.code == 0, "%s", spare.err);
	ck_assert_int_eq(resident_of("model.safetensors"), whole);
	force = tool_run(getuid(), "drop --all --force");
	ck_assert_msg(force.code == 0, "%s", force.err);
	ck_assert_int_eq(resident_of("model.safetensors"), 0);
	must_tool("prefetch %s", m.path);
	must_tool("unpin %s", m.path);
	must_tool("drop --all");
	ck_assert_int_eq(resident_of("model.safetensors"), 0);
	must_do(&p, do_check, &m);
	must_do(&p, do_disconnect, &m);
	peer_leave(&p);
}
END_TEST

START_TEST(test_prefetch_in_the_background)
{
	struct use m = new_model("model.safetensors", 8, 4 * MiB, 12, 0);
	cleanup_tool struct tool t = tool_run(getuid(), "prefetch --no-wait --pin %s", m.path);

	ck_assert_msg(t.code == 0, "%s", t.err);
	while (resident_of("model.safetensors") < (json_int_t)(32 * MiB))
		(void)poll(NULL, 0, 10);
	ck_assert_int_eq(stat_until_at_most("sessions", 1), 1); /* who asks; the background has gone */
}
END_TEST

START_TEST(test_prefetch_of_more_than_the_budget)
{
	struct use m = new_model("model.safetensors", 8, 4 * MiB, 13, 0);
	cleanup_tool struct tool t = { 0 };

	daemon_stop(&d);
	daemon_start(&d, "--budget 16M", NULL);
	t = tool_run(getuid(), "prefetch %s", m.path);
	must_fail(&t, "model.safetensors: the daemon has no room");
}
END_TEST

START_TEST(test_what_others_may_not)
{
	struct use m = new_model("model.safetensors", 8, MiB, 14, 0);
	cleanup_tool struct tool ls = { 0 }, drop = { 0 }, end = { 0 }, stat = { 0 };
	struct peer p;

	peer_new(&p, getuid());
	must_do(&p, do_open, &m);
	must_do(&p, do_touch, &m);
	ls = tool_run(NOBODY, "ls");
	ck_assert_msg(ls.code == 0, "%s", ls.err);
	ck_assert_str_eq(ls.out, "no sources: nothing is open, and nothing is kept\n");
	drop = tool_run(NOBODY, "drop %s", m.path);
	ck_assert_int_eq(drop.code, 1);
	ck_assert_int_eq(lines(drop.err), 1);
	ck_assert_int_ge(resident_of("model.safetensors"), 8 * (json_int_t)MiB);
	end = tool_run(NOBODY, "shutdown");
	must_fail(&end, "only root and the daemon's user");
	stat = tool_run(NOBODY, "stat");
	ck_assert_msg(stat.code == 0, "%s", stat.err);
	has(stat.out, "resident");
	must_do(&p, do_check, &m);
	peer_leave(&p);
}
END_TEST

START_TEST(test_doctor_with_a_daemon)
{
	json_t *j = must_json(getuid(), "doctor");

	ck_assert_str_eq(str(j, "way"), "daemon");
	ck_assert_int_eq(number(json_object_get(j, "daemon"), "pid"), d.pid);
	ck_assert_str_eq(str(json_object_get(j, "daemon"), "version"), WD_VERSION);
	json_decref(j);
}
END_TEST

START_TEST(test_shutdown)
{
	cleanup_tool struct tool t = { 0 }, none = { 0 };
	pid_t pid = d.pid;

	t = tool_run(getuid(), "shutdown");
	ck_assert_msg(t.code == 0, "%s", t.err);
	has(t.out, "has ended\n");
	ck_assert_int_eq(daemon_answers(&d), 0);
	while (kill(pid, 0) == 0)
		(void)poll(NULL, 0, 1);
	none = tool_run(getuid(), "ls");
	must_fail(&none, "no daemon answers at");
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("admin");
	TCase *look = tcase_create("ls and stat"), *connection = tcase_create("connection"),
	      *change = tcase_create("prefetch, drop, pin, shutdown"), *real;
	TCase *all[] = { look, connection, change };
	SRunner *runner;
	int failed;

	for (size_t i = 0; i < ARRAY_SIZE(all); i++) {
		tcase_set_timeout(all[i], 60);
		tcase_add_checked_fixture(all[i], setup, teardown);
		suite_add_tcase(suite, all[i]);
	}
	tcase_add_test(look, test_ls_is_a_table);
	tcase_add_test(look, test_ls_fits_a_terminal);
	tcase_add_test(look, test_ls_clients);
	tcase_add_test(look, test_ls_of_nothing);
	tcase_add_test(look, test_json_is_the_daemons);
	tcase_add_loop_test(look, test_answers_that_are_no_json, 0, ARRAY_SIZE(lies));
	tcase_add_test(look, test_ls_of_odd_members);
	tcase_add_test(look, test_stat_is_a_table);
	tcase_add_loop_test(look, test_stat_percentiles, 0, ARRAY_SIZE(waits));
	tcase_add_test(look, test_stat_watch_in_a_log);
	tcase_add_test(look, test_watch_draws_over_until_ctrl_c);
	tcase_add_test(look, test_watch_json_is_a_document_a_line);

	tcase_add_test(connection, test_no_daemon);
	tcase_add_test(connection, test_prefetch_starts_a_daemon_where_that_is_wanted);
	tcase_add_test(connection, test_socket_of_a_name_that_is_too_long);
	tcase_add_test(connection, test_socket_of_another_program);
	tcase_add_test(connection, test_socket_option_wins);
	tcase_add_loop_test(connection, test_daemons_that_refuse_or_lie, 0, ARRAY_SIZE(welcomes));
	tcase_add_loop_test(connection, test_wrong_command_lines, 0, ARRAY_SIZE(wrong));
	tcase_add_test(connection, test_doctor_tells_of_the_daemon);
	if (geteuid() != 0) {
		(void)puts("SKIP sockets of other users: only root can make them");
	} else {
		tcase_add_test(connection, test_socket_of_somebody_else_is_refused);
		tcase_add_test(connection, test_roots_socket_is_everybodys);
		tcase_add_test(connection, test_doctor_tells_of_a_refused_socket);
		if (access("/run/weightd/weightd.sock", F_OK) == 0)
			(void)puts("SKIP a user's own socket: this machine has the system's daemon, which comes first");
		else
			tcase_add_test(connection, test_own_socket_is_found);
	}

	tcase_add_test(change, test_prefetch_lays_out_as_the_library);
	tcase_add_test(change, test_prefetch_shows_a_bar);
	tcase_add_test(change, test_prefetch_of_shards_with_pins);
	tcase_add_test(change, test_prefetch_that_does_not_wait);
	tcase_add_loop_test(change, test_prefetch_that_fails, 0, ARRAY_SIZE(reads));
	tcase_add_test(change, test_prefetch_goes_on_after_bad_files);
	tcase_add_test(change, test_drop);
	tcase_add_test(change, test_drop_of_what_the_daemon_does_not_have);
	tcase_add_test(change, test_drop_refused);
	tcase_add_test(change, test_pin_and_unpin);
	tcase_add_test(change, test_shutdown_waits_for_the_end);

	real = folder_case(suite, "daemon", 120);
	tcase_add_checked_fixture(real, real_setup, real_teardown);
	tcase_add_test(real, test_end_to_end);
	tcase_add_test(real, test_prefetch_in_the_background);
	tcase_add_test(real, test_prefetch_of_more_than_the_budget);
	tcase_add_test(real, test_doctor_with_a_daemon);
	tcase_add_test(real, test_shutdown);
	if (geteuid() != 0)
		(void)puts("SKIP what other users may not do: only root can become one");
	else
		tcase_add_test(real, test_what_others_may_not);

	runner = srunner_create(suite);
	srunner_run_all(runner, CK_NORMAL);
	failed = srunner_ntests_failed(runner);
	srunner_free(runner);
	return failed ? 1 : 0;
}
