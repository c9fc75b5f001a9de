/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `weightd prefetch`: reads checkpoints into a daemon's memory. Parses them here and lays them out as the library does
 * (lib/layout.h), so that programs which open them later find the same arena.
 */
#include "cli/daemon.h"
#include "lib/checkpoint.h"
#include "lib/layout.h"
#include "ufd/arena.h"
#include "ufd/page.h"

#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <time.h>

enum { OPT_PIN = DAEMON_OPT_OWN, OPT_NO_WAIT, OPT_VARIANT };

#define ANSWER_MS 30000
#define REDRAW_MS 200

static const char help[] = "Usage: weightd prefetch [OPTION]... FILE...\n"
			   "\n"
			   "Reads checkpoints into a daemon's memory, so that programs which open them find\n"
			   "them there. FILE is a .safetensors file, a sharded set's index .json, or a\n"
			   "folder that holds one of these (a model's snapshot, or a pipeline with\n"
			   "model_index.json). What is in memory already is not read again. To make room\n"
			   "the daemon drops what was not used for longest. If none answers and\n"
			   "WEIGHTD_AUTOSTART=1 is set, the user's own is started.\n"
			   "\n"
			   "Options:\n"
			   "  --pin           keep them there (as weightd pin)\n"
			   "  --no-wait       come back at once; a process in the background waits\n"
			   "  --variant=NAME  which of several weight sets in a folder, such as fp16\n"
			   "  --socket=PATH   the daemon's socket (WEIGHTD_SOCKET, or the usual places)\n"
			   "  --json          one JSON object (see below)\n"
			   "  --help          print this\n"
			   "\n"
			   "JSON:\n"
			   "  {\"files\": [{\"path\", \"bytes\": of weights, \"known\": somebody had opened it}],\n"
			   "   \"bytes\", \"read_bytes\": from disk, null with --no-wait, \"seconds\",\n"
			   "   \"errors\": [{\"path\", \"errno\", \"text\"}]}\n"
			   "\n"
			   "Exit status: 0 done, 1 something failed, 2 wrong command line.\n";

struct job;

struct request {
	struct daemon d;
	bool json, pin, no_wait;
	const char *variant;
	json_t *files, *errors;
	size_t nr_files;
	uint64_t done_bytes, total_bytes; /* of all files so far; of all that were parsed */
	uint64_t read_bytes;
	uint64_t began_ns;
	bool drawn;
	struct job *jobs; /* with --no-wait */
	size_t nr_jobs;
	union wire_any message;
};

static uint64_t now_ns(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* ---- the bar, on stderr where that is a terminal */

static void bar_draw(struct request *q, uint64_t done)
{
	enum { WIDTH = 30 };
	static const char full[] = "##############################", empty[] = "..............................";
	char a[SIZE_TEXT], b[SIZE_TEXT], c[SIZE_TEXT];
	double seconds = (double)(now_ns() - q->began_ns) / 1e9;
	/* The daemon counts what lies between tensors, too. */
	uint64_t shown = MIN(done, q->total_bytes);
	int part = q->total_bytes ? (int)((double)shown / (double)q->total_bytes * WIDTH) : 0;

	if (!isatty(STDERR_FILENO))
		return;
	(void)fprintf(stderr, "\r[%.*s%.*s] %s of %s, %s/s\033[K", part, full, WIDTH - part, empty, size_text(shown, a),
		      size_text(q->total_bytes, b), size_text((uint64_t)((double)shown / MAX(seconds, 1e-3)), c));
	q->drawn = true;
}

static void bar_clear(struct request *q)
{
	if (q->drawn)
		(void)fputs("\r\033[K", stderr);
	q->drawn = false;
}

/* ---- one file */

/* Runs of tensors, so many that a message takes them. A gap smaller than an extent holds no whole one. */
static uint32_t ranges_of(const struct layout *l, uint64_t view, struct wire_job_range *ranges)
{
	uint64_t gap = extent_bytes();
	uint32_t nr;

	for (;; gap *= 2) {
		nr = 0;
		for (size_t i = 0; i < l->view.nr_units && nr <= WIRE_RANGES; i++) {
			const struct unit *u = &l->view.units[i];
			struct wire_job_range *last = nr ? &ranges[nr - 1] : NULL;

			if (last && u->off < last->off + last->len + gap)
				last->len = MAX(last->off + last->len, u->off + u->len) - last->off;
			else if (nr++ < WIRE_RANGES)
				ranges[nr - 1] = (struct wire_job_range){ view, u->off, u->len };
		}
		if (nr <= WIRE_RANGES)
			return nr;
	}
}

static int attach(struct request *q, const struct source *source, const struct layout *l, struct wd_err *err)
{
	const struct segment *last = &l->view.segs[l->view.nr_segs - 1];
	const char *name = source->path;
	int fds[3] = { source->fd, -1, source->direct_fd };
	bool direct = source->direct_fd >= 0 && !source->direct_refused;
	cleanup_close int layout = -1;

	layout = wire_blob(l->view.segs, l->view.nr_segs * sizeof(*l->view.segs), l->view.units,
			   l->view.nr_units * sizeof(*l->view.units));
	if (layout < 0)
		return err_set(err, layout, "making a memfd: %s", strerror(-layout));
	fds[1] = layout;
	q->message.attach = (struct wire_attach){
		.flags = direct ? WIRE_DIRECT : 0,
		.nr_segs = (uint32_t)l->view.nr_segs,
		.nr_units = (uint32_t)l->view.nr_units,
		.bytes = MAX(arena_round(last->arena_off + last->len), page_bytes()),
	};
	WIRE_INIT(q->message.attach, WIRE_ATTACH, 0);
	if (strlen(name) >= WIRE_PATH)
		name += strlen(name) - (WIRE_PATH - 1);
	(void)strcpy(q->message.attach.name, name);
	/* It may compare what is in memory with the file, at the speed of the file's disk. */
	return daemon_ask(&q->d, &q->message, fds, direct ? 3 : 2, WIRE_ATTACHED, -1, NULL, err);
}

/* What was read from disk for a view, by the daemon's own count. */
static int view_read_bytes(struct request *q, uint64_t view, uint64_t *ret, struct wd_err *err)
{
	cleanup_json json_t *answer = NULL;
	const json_t *v;
	size_t i;
	int r = daemon_json(&q->d, WIRE_LS, &answer, err);

	*ret = 0;
	if (r < 0)
		return r;
	json_array_foreach(json_object_get(answer, "views"), i, v) {
		if (json_count(v, "id") == view)
			*ret = json_count(v, "read_bytes");
	}
	return 0;
}

static int job_failed(struct request *q, int error, struct wd_err *err)
{
	char a[SIZE_TEXT], b[SIZE_TEXT];

	(void)size_text(q->message.job_info.done_bytes, a);
	(void)size_text(q->message.job_info.total_bytes, b);
	switch (error) {
	case -ENOSPC:
		return err_set(err, error,
			       "the daemon has no room: %s of %s were read; raise its budget, or drop something", a, b);
	case -ESTALE:
		return err_set(err, error, "the file was changed while it was read");
	default:
		return err_set(err, error, "reading failed after %s of %s: %s", a, b, strerror(-error));
	}
}

/* A read that the daemon does for us. It ends with our connection. */
struct job {
	uint64_t id;
	int event; /* readable when it has ended */
	int state; /* as pager_job_progress() has it */
};

static int job_start(struct request *q, uint64_t view, const struct layout *l, struct job *ret, struct wd_err *err)
{
	int r;

	q->message.job.gentle = 0;
	q->message.job.nr_ranges = ranges_of(l, view, q->message.job.ranges);
	q->message.h = (struct wire_head){ WIRE_MAGIC, WIRE_JOB, wire_job_bytes(q->message.job.nr_ranges), 0 };
	r = daemon_ask(&q->d, &q->message, NULL, 0, WIRE_JOB_INFO, ANSWER_MS, &ret->event, err);
	if (r < 0)
		return r;
	ret->id = q->message.job_info.job;
	ret->state = q->message.job_info.state;
	return 0;
}

static int job_ask(struct request *q, struct job *j, enum wire_type question, struct wd_err *err)
{
	int r;

	q->message.job_id = (struct wire_job_id){ .job = j->id };
	WIRE_INIT(q->message.job_id, question, 0);
	r = daemon_ask(&q->d, &q->message, NULL, 0, question == WIRE_JOB_STATE ? WIRE_JOB_INFO : WIRE_OK, ANSWER_MS,
		       NULL, err);
	if (r == 0 && question == WIRE_JOB_STATE)
		j->state = q->message.job_info.state;
	return r;
}

/* Waits for its end, and frees it. */
static int job_wait(struct request *q, struct job *j, struct wd_err *err)
{
	int r = 0;

	bar_draw(q, q->done_bytes);
	while (r == 0 && j->state == 0) {
		struct pollfd fds[2] = { { .fd = j->event, .events = POLLIN }, { .fd = q->d.fd, .events = POLLRDHUP } };

		if (poll(fds, 2, REDRAW_MS) < 0 && errno != EINTR)
			return err_set(err, -errno, "poll: %s", strerror(errno));
		r = job_ask(q, j, WIRE_JOB_STATE, err);
		if (r == 0)
			bar_draw(q, q->done_bytes + q->message.job_info.done_bytes);
	}
	(void)close(TAKE_FD(j->event));
	if (r == 0 && j->state < 0)
		return job_failed(q, j->state, err);
	return r == 0 ? job_ask(q, j, WIRE_JOB_END, err) : r;
}

static int job_later(struct request *q, const struct job *j)
{
	struct job *jobs = reallocarray(q->jobs, q->nr_jobs + 1, sizeof(*jobs));

	if (!jobs)
		return -ENOMEM;
	q->jobs = jobs;
	q->jobs[q->nr_jobs++] = *j;
	return 0;
}

/* Reads end with the connection: a process of its own keeps it until all are done. */
static int go_to_background(struct request *q)
{
	pid_t pid = fork();
	int null;

	if (pid < 0) {
		cmd_error("fork: %s", strerror(errno));
		return -errno;
	}
	if (pid > 0)
		return 0;
	(void)setsid();
	/* Nobody shall wait for the end of a pipe because of us. */
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	for (int fd = 0; fd <= 2; fd++)
		if (null < 0 || dup2(null, fd) < 0)
			(void)close(fd);
	for (size_t i = 0; i < q->nr_jobs; i++)
		if (job_wait(q, &q->jobs[i], NULL) == -EPIPE)
			break;
	_exit(0);
}

static int file_read(struct request *q, uint64_t view, const struct layout *l, struct wd_err *err)
{
	uint64_t before = 0, after = 0;
	struct job job = { .event = -1 };
	int r;

	if (q->no_wait) {
		r = job_start(q, view, l, &job, err);
		if (r == 0 && job_later(q, &job) < 0)
			r = err_set(err, -ENOMEM, "out of memory");
		return r;
	}
	r = view_read_bytes(q, view, &before, err);
	if (r == 0)
		r = job_start(q, view, l, &job, err);
	if (r == 0)
		r = job_wait(q, &job, err);
	if (r == 0)
		r = view_read_bytes(q, view, &after, err);
	if (r < 0)
		return r;
	q->read_bytes += after - MIN(before, after);
	q->message.view = (struct wire_view){ .view = view };
	WIRE_INIT(q->message.view, WIRE_DETACH, 0);
	return daemon_ask(&q->d, &q->message, NULL, 0, WIRE_OK, ANSWER_MS, NULL, err);
}

static int prefetch_file(struct request *q, const struct ckpt_file *f, const struct ckpt_tensor *tensors,
			 struct wd_err *err)
{
	struct layout l;
	uint64_t view, bytes = 0;
	bool known;
	int r = layout_compute(f->source->id.size, f->data_offset, 1, tensors + f->first_tensor,
			       (uint32_t)f->nr_tensors, &l);

	if (r < 0)
		return err_set(err, r, "out of memory");
	for (size_t i = 0; i < l.view.nr_units; i++)
		bytes += l.view.units[i].len;
	if (l.view.nr_units == 0) /* as a program that opens it: nothing to map */
		goto done;
	r = attach(q, f->source, &l, err);
	if (r < 0)
		goto done;
	view = q->message.attached.view;
	known = q->message.attached.known;
	if (q->pin) { /* first, so that nothing of it is dropped while it comes */
		q->message.admin = (struct wire_admin){ 0 };
		WIRE_INIT(q->message.admin, WIRE_PIN, 0);
		r = daemon_ask(&q->d, &q->message, &f->source->fd, 1, WIRE_OK, ANSWER_MS, NULL, err);
	}
	if (r == 0)
		r = file_read(q, view, &l, err);
	if (r < 0)
		goto done;
	q->done_bytes += bytes;
	q->nr_files++;
	if (json_array_append_new(q->files, json_pack("{s:o, s:I, s:b}", "path", json_text(f->source->path), "bytes",
						      (json_int_t)bytes, "known", (int)known)) < 0)
		r = err_set(err, -ENOMEM, "out of memory");
done:
	layout_done(&l);
	return r < 0 ? daemon_error_of(f->source->path, r, err) : 0;
}

/* ---- the command */

static uint64_t checkpoint_bytes(const struct checkpoint *c)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < c->nr_tensors; i++)
		bytes += c->tensors[i].nbytes;
	for (size_t i = 0; i < c->nr_parts; i++)
		bytes += checkpoint_bytes(c->parts[i]);
	return bytes;
}

static int prefetch(struct request *q, const struct checkpoint *c, struct wd_err *err)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < c->nr_files; i++)
		r = prefetch_file(q, &c->files[i], c->tensors, err);
	for (size_t i = 0; r == 0 && i < c->nr_parts; i++)
		r = prefetch(q, c->parts[i], err);
	return r;
}

/* Tells it. Return: 0; -ENOMEM. */
static int failed(struct request *q, const char *path, int error, const struct wd_err *err)
{
	bar_clear(q);
	cmd_error("%s", err->text[0] ? err->text : strerror(-error));
	return json_array_append_new(q->errors, json_pack("{s:o, s:i, s:o}", "path", json_text(path), "errno", -error,
							  "text", json_text(err->text))) < 0 ?
		       -ENOMEM :
		       0;
}

static int print_end(struct request *q, double seconds)
{
	cleanup_json json_t *root = NULL;
	char a[SIZE_TEXT], b[SIZE_TEXT], c[SIZE_TEXT];

	if (q->json) {
		root = json_pack("{s:O, s:I, s:o, s:f, s:O}", "files", q->files, "bytes", (json_int_t)q->done_bytes,
				 "read_bytes", q->no_wait ? json_null() : json_integer((json_int_t)q->read_bytes),
				 "seconds", seconds, "errors", q->errors);
		return root ? json_print(root) : -ENOMEM;
	}
	if (q->nr_files == 0)
		return 0;
	(void)printf("%zu file%s, %s", q->nr_files, q->nr_files == 1 ? "" : "s", size_text(q->done_bytes, a));
	if (q->no_wait)
		(void)puts(": the daemon reads them");
	else if (q->read_bytes == 0)
		(void)puts(": all in memory already");
	else
		(void)printf(": %s read in %.2f s, %s/s\n", size_text(q->read_bytes, b), seconds,
			     size_text((uint64_t)((double)q->read_bytes / MAX(seconds, 1e-3)), c));
	return 0;
}

static void request_free(struct request **q)
{
	if (!*q)
		return;
	daemon_done(&(*q)->d);
	json_decref((*q)->files);
	json_decref((*q)->errors);
	free((*q)->jobs);
	free(*q);
}

/* All arguments are parsed before the first byte is read: the bar knows the whole, and a mistake shows at once. */
static int run(struct request *q, char **paths, size_t nr)
{
	struct checkpoint **list = calloc(nr + 1, sizeof(*list));
	int r = list ? 0 : -ENOMEM, code = CMD_DONE;

	for (size_t i = 0; r == 0 && i < nr; i++) {
		struct wd_err err = { "" };
		/* Bytes behind the data are no matter here: who opens the file decides about them. */
		int e = checkpoint_open(paths[i], q->variant, CKPT_TRAILING, &list[i], &err);

		if (e < 0) {
			code = CMD_FAILED;
			r = failed(q, paths[i], e, &err);
		} else {
			q->total_bytes += checkpoint_bytes(list[i]);
		}
	}
	q->began_ns = now_ns();
	for (size_t i = 0; r == 0 && i < nr; i++) {
		struct wd_err err = { "" };
		int e = list[i] ? prefetch(q, list[i], &err) : 0;

		if (e < 0) {
			code = CMD_FAILED;
			r = failed(q, paths[i], e, &err);
		}
		if (e == -EPIPE || e == -ETIMEDOUT)
			break;
	}
	bar_clear(q);
	if (q->nr_jobs > 0 && go_to_background(q) < 0)
		code = CMD_FAILED;
	if (r == 0)
		r = print_end(q, (double)(now_ns() - q->began_ns) / 1e9);
	for (size_t i = 0; list && i < nr; i++)
		checkpoint_free(list[i]);
	free(list);
	if (r < 0)
		cmd_error("out of memory");
	return r < 0 ? CMD_FAILED : code;
}

int cmd_prefetch(int argc, char **argv)
{
	static const struct option options[] = {
		DAEMON_COMMON_OPTIONS,
		{ "pin", no_argument, NULL, OPT_PIN },
		{ "no-wait", no_argument, NULL, OPT_NO_WAIT },
		{ "variant", required_argument, NULL, OPT_VARIANT },
		{ NULL, 0, NULL, 0 },
	};
	cleanup(request_free) struct request *q = calloc(1, sizeof(*q));
	const char *socket = NULL;
	int opt;

	if (!q)
		goto no_memory;
	*q = (struct request){ .d = DAEMON_NONE, .files = json_array(), .errors = json_array() };
	if (!q->files || !q->errors)
		goto no_memory;
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case CMD_OPT_HELP:
			return cmd_print_help(help);
		case CMD_OPT_JSON:
			q->json = true;
			break;
		case DAEMON_OPT_SOCKET:
			socket = optarg;
			break;
		case OPT_PIN:
			q->pin = true;
			break;
		case OPT_NO_WAIT:
			q->no_wait = true;
			break;
		case OPT_VARIANT:
			q->variant = optarg;
			break;
		default:
			return cmd_usage_error(NULL);
		}
	}
	if (optind == argc)
		return cmd_usage_error("no file given");
	if (daemon_open_or_start(socket, &q->d) < 0)
		return CMD_FAILED;
	return run(q, argv + optind, (size_t)(argc - optind));

no_memory:
	cmd_error("out of memory");
	return CMD_FAILED;
}
