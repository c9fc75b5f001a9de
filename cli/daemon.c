/* SPDX-License-Identifier: Apache-2.0 */
/* See daemon.h. */
#include "cli/daemon.h"
#include "lib/checkpoint.h"
#include "lib/format.h"
#include "lib/include/weightd.h"

#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define HELLO_MS 5000   /* a daemon that lives but does not answer for so long counts as dead */
#define ANSWER_MS 30000 /* to a question that waits for no disk and no client */
#define JSON_MOST GiB   /* bytes of an answer */

/* ---- connection */

static void wire_text(const char *text, size_t room, char *to)
{
	(void)snprintf(to, room, "%.*s", (int)strnlen(text, room - 1), text);
}

static int welcome_check(struct daemon *d, struct wd_err *err)
{
	const struct wire_welcome *w = &d->welcome;
	char release[WIRE_NAME], text[WIRE_TEXT];

	wire_text(w->release, sizeof(release), release);
	wire_text(w->text, sizeof(text), text);
	if (w->status == -EPROTONOSUPPORT || w->version != WIRE_VERSION)
		return err_set(
			err, -EPROTONOSUPPORT,
			"the daemon at %s is weightd %s and speaks version %u of the protocol, this is weightd %s "
			"with version %u: use the same weightd on both sides",
			d->path, release, w->version, wd_version(), WIRE_VERSION);
	if (w->status < 0)
		return err_set(err, w->status, "the daemon at %s refuses: %s", d->path,
			       text[0] ? text : strerror(-w->status));
	return 0;
}

int daemon_connect(const char *socket, struct daemon *ret, struct wd_err *err)
{
	cleanup_free union wire_any *m = calloc(1, sizeof(*m));
	int r;

	*ret = DAEMON_NONE;
	if (!m)
		return err_set(err, -ENOMEM, "out of memory");
	r = wire_connect(socket, &ret->fd, ret->path, err);
	if (r == -ENOENT || r == -ECONNREFUSED) {
		const char *named = socket ? socket : getenv("WEIGHTD_SOCKET");

		/* `weightd serve` does not obey WEIGHTD_SOCKET: without the option it would listen elsewhere. */
		return err_set(
			err, r,
			"%s: start one with `weightd serve%s%s`, or let programs start it by WEIGHTD_AUTOSTART=1",
			err->text, named && *named ? " --socket=" : "", named ? named : "");
	}
	if (r < 0)
		return r;
	m->hello = (struct wire_hello){ .version = WIRE_VERSION, .name = "weightd" };
	WIRE_INIT(m->hello, WIRE_HELLO, ++ret->seq);
	r = wire_send(ret->fd, m, NULL, 0, false);
	if (r == 0) {
		r = wire_recv(ret->fd, m, ret->fds, &ret->nr_fds, HELLO_MS);
		r = r == 1 ? 0 : r == 0 ? -EPIPE : r;
	}
	if (r == 0 && m->h.type != WIRE_WELCOME)
		r = -EPROTO;
	if (r == 0) {
		ret->welcome = m->welcome;
		r = welcome_check(ret, err);
	} else if (r == -EAGAIN) {
		r = err_set(err, -ETIMEDOUT,
			    "the daemon at %s does not answer; see whether it is stopped, or start it again",
			    ret->path);
	} else if (r == -EPROTO) {
		r = err_set(err, r, "what answers at %s is not a weightd daemon", ret->path);
	} else {
		r = err_set(err, r, "the daemon at %s hangs up: %s", ret->path, strerror(-r));
	}
	if (r < 0) {
		struct wire_welcome w = ret->welcome;
		char path[WIRE_SOCKET];

		(void)memcpy(path, ret->path, sizeof(path));
		daemon_done(ret);
		(void)memcpy(ret->path, path, sizeof(path));
		ret->welcome = w;
	}
	return r;
}

bool daemon_autostart(void)
{
	const char *value = getenv("WEIGHTD_AUTOSTART");

	return value && *value && strcmp(value, "0") != 0;
}

static int open_told(const char *socket, bool start, struct daemon *ret)
{
	struct wd_err err = { "" };
	int r = daemon_connect(socket, ret, &err);

	if (start && (r == -ENOENT || r == -ECONNREFUSED)) {
		r = client_autostart(socket, &err);
		if (r == 0)
			r = daemon_connect(socket, ret, &err);
	}
	if (r < 0)
		cmd_error("%s", err.text);
	return r;
}

int daemon_open(const char *socket, struct daemon *ret)
{
	return open_told(socket, false, ret);
}

int daemon_open_or_start(const char *socket, struct daemon *ret)
{
	return open_told(socket, daemon_autostart(), ret);
}

void daemon_done(struct daemon *d)
{
	if (d->fd >= 0)
		(void)close(d->fd);
	for (unsigned int i = 0; i < d->nr_fds; i++)
		(void)close(d->fds[i]);
	*d = DAEMON_NONE;
}

int daemon_ask(struct daemon *d, union wire_any *m, const int *fds, unsigned int nr_fds, enum wire_type want,
	       int timeout_ms, int *ret_fd, struct wd_err *err)
{
	int got[WIRE_MAX_FDS], r;
	unsigned int nr_got = 0;

	if (ret_fd)
		*ret_fd = -1;
	m->h.seq = ++d->seq;
	r = wire_send(d->fd, m, fds, nr_fds, true);
	if (r == 0) {
		r = wire_recv(d->fd, m, got, &nr_got, timeout_ms);
		r = r == 1 ? 0 : r == 0 ? -EPIPE : r;
	}
	if (r == -EPIPE || r == -ECONNRESET)
		return err_set(err, -EPIPE, "the daemon at %s has gone", d->path);
	if (r == -EAGAIN)
		return err_set(err, -ETIMEDOUT, "the daemon at %s does not answer any more", d->path);
	if (r == 0 && (m->h.seq != d->seq || (m->h.type != want && m->h.type != WIRE_ERROR)))
		r = -EPROTO;
	for (unsigned int i = 0; i < nr_got; i++) {
		if (i == 0 && ret_fd && r == 0 && m->h.type == want)
			*ret_fd = got[i];
		else
			(void)close(got[i]);
	}
	if (r == 0 && m->h.type == WIRE_ERROR) {
		char text[WIRE_TEXT];

		wire_text(m->error.text, sizeof(text), text);
		r = m->error.status < 0 ? m->error.status : -EPROTO;
		return err_set(err, r, "%s", text[0] ? text : strerror(-r));
	}
	if (r == -EPROTO)
		return err_set(err, r, "the daemon at %s answers with what this version does not know", d->path);
	return r < 0 ? err_set(err, r, "talking to the daemon at %s: %s", d->path, strerror(-r)) : 0;
}

int daemon_error_of(const char *path, int error, struct wd_err *err)
{
	return strncmp(err->text, path, strlen(path)) == 0 ? error : err_prefix(err, error, "%s", path);
}

int daemon_json(struct daemon *d, enum wire_type question, json_t **ret, struct wd_err *err)
{
	cleanup_free union wire_any *m = calloc(1, sizeof(*m));
	cleanup_free char *text = NULL;
	cleanup_close int fd = -1;
	json_error_t where;
	struct stat st;
	size_t got = 0;
	int r;

	if (!m)
		return err_set(err, -ENOMEM, "out of memory");
	m->h = (struct wire_head){ WIRE_MAGIC, question, sizeof(struct wire_plain), 0 };
	r = daemon_ask(d, m, NULL, 0, WIRE_JSON, ANSWER_MS, &fd, err);
	if (r < 0)
		return r;
	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size > JSON_MOST)
		return err_set(err, -EPROTO, "the daemon at %s answers with no text", d->path);
	text = malloc((size_t)st.st_size + 1);
	if (!text)
		return err_set(err, -ENOMEM, "out of memory");
	while (got < (size_t)st.st_size) {
		ssize_t n = pread(fd, text + got, (size_t)st.st_size - got, (off_t)got);

		if (n < 0)
			return err_set(err, -errno, "reading the answer of the daemon at %s: %s", d->path,
				       strerror(errno));
		if (n == 0)
			break;
		got += (size_t)n;
	}
	*ret = json_loadb(text, got, JSON_REJECT_DUPLICATES, &where);
	if (!*ret || !json_is_object(*ret)) {
		json_decref(*ret);
		*ret = NULL;
		return err_set(err, -EPROTO, "the daemon at %s answers with what is no JSON object", d->path);
	}
	return 0;
}

uint64_t json_count(const json_t *object, const char *key)
{
	json_int_t n = json_integer_value(json_object_get(object, key));

	return n > 0 ? (uint64_t)n : 0;
}

/* ---- --watch */

#define WATCH_MS 2000
#define WATCH_LEAST_MS 100
#define WATCH_MOST_MS 86400000

int watch_parse(const char *text, int *ret_ms)
{
	char *end;
	double seconds;

	if (!text) {
		*ret_ms = WATCH_MS;
		return 0;
	}
	seconds = strtod(text, &end);
	if (end == text || *end || !(seconds * 1000 >= WATCH_LEAST_MS && seconds * 1000 <= WATCH_MOST_MS))
		return -EINVAL;
	*ret_ms = (int)(seconds * 1000);
	return 0;
}

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal)
{
	(void)signal;
	interrupted = 1;
}

/* Return: 0 the time is over; 1 Ctrl-C; -EPIPE the daemon has gone. `unblocked`: the signal mask while it waits. */
static int watch_wait(const struct daemon *d, int ms, const sigset_t *unblocked)
{
	struct timespec limit = { ms / 1000, ms % 1000 * 1000000L };
	/* Nothing comes unasked on this socket: only its end. */
	struct pollfd fd = { .fd = d->fd, .events = POLLRDHUP };
	int n = ppoll(&fd, 1, &limit, unblocked);

	if (interrupted)
		return 1;
	return n > 0 ? -EPIPE : 0;
}

int daemon_watch(struct daemon *d, enum wire_type question, int every_ms, int (*print)(void *arg, const json_t *answer),
		 void *arg)
{
	bool redraw = every_ms > 0 && isatty(STDOUT_FILENO);
	/* Once it only ends the loop; a second Ctrl-C (the daemon does not answer) ends the program. */
	struct sigaction action = { .sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND };
	sigset_t blocked, unblocked;
	struct wd_err err = { "" };
	int r = 0;

	(void)sigemptyset(&blocked);
	(void)sigaddset(&blocked, SIGINT);
	interrupted = 0;
	if (every_ms > 0)
		(void)sigaction(SIGINT, &action, NULL);
	do {
		cleanup_json json_t *answer = NULL;

		r = daemon_json(d, question, &answer, &err);
		/* Blocked from here to the wait, which lets it in: what is printed is whole, and no press is missed. */
		(void)sigprocmask(SIG_BLOCK, &blocked, &unblocked);
		if (r < 0)
			break;
		if (redraw)
			(void)fputs("\033[H\033[J", stdout);
		r = print ? print(arg, answer) : json_print(answer);
		if (r == -ENOMEM)
			(void)err_set(&err, r, "out of memory");
		else if (r == -EPROTO)
			(void)err_set(&err, r, "the daemon at %s answers with what this version does not know",
				      d->path);
		if (r < 0 || every_ms == 0)
			break;
		if (fflush(stdout) != 0 || ferror(stdout)) { /* main() tells why */
			r = -EIO;
			break;
		}
		r = watch_wait(d, every_ms, &unblocked);
		(void)sigprocmask(SIG_SETMASK, &unblocked, NULL);
		if (r < 0)
			(void)err_set(&err, r, "the daemon at %s has gone", d->path);
	} while (r == 0);
	if (r == 1) {
		if (redraw)
			(void)fputc('\n', stdout); /* the terminal has written ^C */
		r = 0;
	}
	if (r < 0 && err.text[0])
		cmd_error("%s", err.text);
	return r < 0 ? CMD_FAILED : CMD_DONE;
}

/* ---- the files of a checkpoint */

static int sources_append(struct sources *s, struct source *source)
{
	struct source **list = reallocarray(s->list, s->nr + 1, sizeof(*s->list));

	if (!list)
		return -ENOMEM;
	s->list = list;
	s->list[s->nr++] = source_ref(source);
	return 0;
}

static int sources_of(struct sources *s, const struct checkpoint *c)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < c->nr_files; i++)
		r = sources_append(s, c->files[i].source);
	for (size_t i = 0; r == 0 && i < c->nr_parts; i++)
		r = sources_of(s, c->parts[i]);
	return r;
}

int sources_add(struct sources *s, const char *path, const char *variant, struct wd_err *err)
{
	unsigned char head[FORMAT_HEAD_BYTES];
	cleanup_source struct source *source = NULL;
	struct checkpoint *c = NULL;
	struct span span;
	int r = source_open(path, &source, err);

	if (r == 0) {
		r = format_head(source, head, &span, err);
		if (r == 0 && !format_is_json(span))
			return sources_append(s, source);
	}
	if (r < 0 && r != -EISDIR)
		return r;
	/* Bytes behind the data are no matter here: nothing is read. */
	r = checkpoint_open(path, variant, CKPT_TRAILING, &c, err);
	if (r < 0)
		return r;
	r = sources_of(s, c);
	checkpoint_free(c);
	return r;
}

void sources_done(struct sources *s)
{
	for (size_t i = 0; i < s->nr; i++)
		source_unref(s->list[i]);
	free(s->list);
	*s = (struct sources){ 0 };
}
