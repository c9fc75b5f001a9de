/* SPDX-License-Identifier: Apache-2.0 */
/* `weightd pin` and `weightd unpin`: what a daemon may not drop on its own. One question with a flag, so one file. */
#include "cli/daemon.h"

#include <string.h>

enum { OPT_VARIANT = DAEMON_OPT_OWN };

#define PIN_MS 30000

static const char pin_help[] = "Usage: weightd pin [OPTION]... FILE...\n"
			       "\n"
			       "Keeps checkpoints that a daemon has in memory there: they are not dropped to\n"
			       "make room. FILE is a file, a sharded set's index .json, or a folder; programs\n"
			       "or 'weightd prefetch' must have opened it. All that a user pins is counted\n"
			       "against a share of the budget. Nothing is read: see weightd prefetch.\n"
			       "\n"
			       "Options:\n"
			       "  --variant=NAME  which of several weight sets in a folder, such as fp16\n"
			       "  --socket=PATH   the daemon's socket (WEIGHTD_SOCKET, or the usual places)\n"
			       "  --json          one JSON object (see below)\n"
			       "  --help          print this\n"
			       "\n"
			       "JSON:\n"
			       "  {\"files\": [{\"path\", \"bytes\"}], \"errors\": [{\"path\", \"errno\", \"text\"}]}\n"
			       "\n"
			       "Exit status: 0 done, 1 something failed, 2 wrong command line.\n";

static const char unpin_help[] =
	"Usage: weightd unpin [OPTION]... FILE...\n"
	"\n"
	"Undoes 'weightd pin': checkpoints may be dropped again to make room. They stay\n"
	"in memory until then.\n"
	"\n"
	"Options:\n"
	"  --variant=NAME  which of several weight sets in a folder, such as fp16\n"
	"  --socket=PATH   the daemon's socket (WEIGHTD_SOCKET, or the usual places)\n"
	"  --json          one JSON object (see below)\n"
	"  --help          print this\n"
	"\n"
	"JSON:\n"
	"  {\"files\": [{\"path\", \"bytes\"}], \"errors\": [{\"path\", \"errno\", \"text\"}]}\n"
	"\n"
	"Exit status: 0 done, 1 something failed, 2 wrong command line.\n";

struct request {
	struct daemon d;
	uint32_t flags; /* 0: pin; WIRE_UNPIN */
	const char *variant;
	json_t *files, *errors;
	size_t nr_files;
	uint64_t bytes;
	union wire_any message;
};

/* One file of the user's. Return: 0; -ENOMEM for the answer; another error concerns this file, and has its text. */
static int pin(struct request *q, const struct source *source, struct wd_err *err)
{
	int r;

	q->message.admin = (struct wire_admin){ .flags = q->flags };
	WIRE_INIT(q->message.admin, WIRE_PIN, 0);
	r = daemon_ask(&q->d, &q->message, &source->fd, 1, WIRE_OK, PIN_MS, NULL, err);
	if (r < 0)
		return daemon_error_of(source->path, r, err);
	q->nr_files++;
	q->bytes += source->id.size;
	return json_array_append_new(q->files, json_pack("{s:o, s:I}", "path", json_text(source->path), "bytes",
							 (json_int_t)source->id.size)) < 0 ?
		       err_set(err, -ENOMEM, "out of memory") :
		       0;
}

static int pin_path(struct request *q, const char *path, struct wd_err *err)
{
	cleanup_sources struct sources s = { 0 };
	int r = sources_add(&s, path, q->variant, err);

	for (size_t i = 0; r == 0 && i < s.nr; i++)
		r = pin(q, s.list[i], err);
	return r;
}

static void request_free(struct request **q)
{
	if (!*q)
		return;
	daemon_done(&(*q)->d);
	json_decref((*q)->files);
	json_decref((*q)->errors);
	free(*q);
}

static int run(int argc, char **argv, uint32_t flags, const char *help)
{
	static const struct option options[] = {
		DAEMON_COMMON_OPTIONS,
		{ "variant", required_argument, NULL, OPT_VARIANT },
		{ NULL, 0, NULL, 0 },
	};
	cleanup(request_free) struct request *q = calloc(1, sizeof(*q));
	const char *socket = NULL;
	char size[SIZE_TEXT];
	bool json = false;
	int opt, code = CMD_DONE;

	if (!q)
		goto no_memory;
	*q = (struct request){ .d = DAEMON_NONE, .flags = flags, .files = json_array(), .errors = json_array() };
	if (!q->files || !q->errors)
		goto no_memory;
	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case CMD_OPT_HELP:
			return cmd_print_help(help);
		case CMD_OPT_JSON:
			json = true;
			break;
		case DAEMON_OPT_SOCKET:
			socket = optarg;
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
	if (daemon_open(socket, &q->d) < 0)
		return CMD_FAILED;
	for (int i = optind; i < argc; i++) {
		struct wd_err err = { "" };
		int r = pin_path(q, argv[i], &err);

		if (r == 0)
			continue;
		code = CMD_FAILED;
		cmd_error("%s", err.text[0] ? err.text : strerror(-r));
		if (json_array_append_new(q->errors, json_pack("{s:o, s:i, s:o}", "path", json_text(argv[i]), "errno",
							       -r, "text", json_text(err.text))) < 0)
			goto no_memory;
		if (r == -EPIPE || r == -ETIMEDOUT)
			break;
	}
	if (json) {
		cleanup_json json_t *root = json_pack("{s:O, s:O}", "files", q->files, "errors", q->errors);

		if (!root || json_print(root) < 0)
			goto no_memory;
	} else if (q->nr_files > 0) {
		(void)printf("%s %zu file%s of %s\n", flags ? "unpinned" : "pinned", q->nr_files,
			     q->nr_files == 1 ? "" : "s", size_text(q->bytes, size));
	}
	return code;

no_memory:
	cmd_error("out of memory");
	return CMD_FAILED;
}

int cmd_pin(int argc, char **argv)
{
	return run(argc, argv, 0, pin_help);
}

int cmd_unpin(int argc, char **argv)
{
	return run(argc, argv, WIRE_UNPIN, unpin_help);
}
