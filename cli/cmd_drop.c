/* SPDX-License-Identifier: Apache-2.0 */
/* `weightd drop`: takes sources out of a daemon's memory. What a running program uses of them is read again on touch. */
#include "cli/daemon.h"

#include <string.h>

enum { OPT_ALL = DAEMON_OPT_OWN, OPT_BYTES, OPT_FORCE, OPT_VARIANT };

#define DROP_MS 120000 /* the daemon gives a take-back up long before */

static const char help[] = "Usage: weightd drop [OPTION]... FILE...\n"
			   "       weightd drop [OPTION]... --all\n"
			   "\n"
			   "Takes checkpoints out of a daemon's memory. FILE is a file, a sharded set's\n"
			   "index .json, or a folder. Programs that use them notice nothing but time: what\n"
			   "they touch is read again. What others use only root and the daemon's user may\n"
			   "drop. What is pinned stays.\n"
			   "\n"
			   "Options:\n"
			   "  --all           every checkpoint\n"
			   "  --bytes=SIZE    at least so much, in the order in which the daemon would make\n"
			   "                  room (all of it); for root and the daemon's user only\n"
			   "  --force         also what is pinned\n"
			   "  --variant=NAME  which of several weight sets in a folder, such as fp16\n"
			   "  --socket=PATH   the daemon's socket (WEIGHTD_SOCKET, or the usual places)\n"
			   "  --json          one JSON object (see below)\n"
			   "  --help          print this\n"
			   "\n"
			   "JSON:\n"
			   "  {\"dropped_bytes\", \"resident_bytes\": in the daemon's memory then,\n"
			   "   \"errors\": [{\"path\", \"errno\", \"text\"}]}\n"
			   "\n"
			   "Exit status: 0 done, 1 something failed, 2 wrong command line.\n";

struct request {
	struct daemon d;
	uint32_t flags;
	uint64_t bytes; /* at least; 0: all */
	const char *variant;
	uint64_t dropped, resident;
	json_t *errors;
	union wire_any message;
};

/* `source` NULL: all. */
static int drop(struct request *q, const struct source *source, struct wd_err *err)
{
	uint64_t bytes = q->bytes ? q->bytes - MIN(q->dropped, q->bytes) : 0;
	int r;

	q->message.admin = (struct wire_admin){ .flags = q->flags | (source ? 0 : WIRE_ALL), .bytes = bytes };
	WIRE_INIT(q->message.admin, WIRE_DROP, 0);
	r = daemon_ask(&q->d, &q->message, source ? &source->fd : NULL, source ? 1 : 0, WIRE_STATS, DROP_MS, NULL, err);
	if (r < 0)
		return source ? daemon_error_of(source->path, r, err) : r;
	q->dropped += q->message.stats.dropped_bytes;
	q->resident = q->message.stats.resident_bytes;
	return 0;
}

static int drop_path(struct request *q, const char *path, struct wd_err *err)
{
	cleanup_sources struct sources s = { 0 };
	bool known = false;
	int r = sources_add(&s, path, q->variant, err);

	for (size_t i = 0; r == 0 && i < s.nr && (q->bytes == 0 || q->dropped < q->bytes); i++) {
		r = drop(q, s.list[i], err);
		known = known || r == 0;
		if (r == -ENOENT && (known || i + 1 < s.nr)) /* not all shards need to be there */
			r = 0;
	}
	return r;
}

/* Tells it. Return: 0; -ENOMEM. */
static int failed(struct request *q, const char *path, int error, const struct wd_err *err)
{
	cmd_error("%s", err->text[0] ? err->text : strerror(-error));
	return json_array_append_new(q->errors,
				     json_pack("{s:o, s:i, s:o}", "path", path ? json_text(path) : json_null(), "errno",
					       -error, "text", json_text(err->text))) < 0 ?
		       -ENOMEM :
		       0;
}

static void request_free(struct request **q)
{
	if (!*q)
		return;
	daemon_done(&(*q)->d);
	json_decref((*q)->errors);
	free(*q);
}

int cmd_drop(int argc, char **argv)
{
	static const struct option options[] = {
		DAEMON_COMMON_OPTIONS,
		{ "all", no_argument, NULL, OPT_ALL },
		{ "bytes", required_argument, NULL, OPT_BYTES },
		{ "force", no_argument, NULL, OPT_FORCE },
		{ "variant", required_argument, NULL, OPT_VARIANT },
		{ NULL, 0, NULL, 0 },
	};
	cleanup(request_free) struct request *q = calloc(1, sizeof(*q));
	bool json = false, all = false;
	const char *socket = NULL;
	int opt, r, code = CMD_DONE;

	if (!q || !(q->errors = json_array()))
		goto no_memory;
	q->d = DAEMON_NONE;
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
		case OPT_ALL:
			all = true;
			break;
		case OPT_BYTES:
			if (size_parse(optarg, 0, &q->bytes) < 0 || q->bytes == 0)
				return cmd_usage_error("--bytes: '%s' is not a size, such as 4G", optarg);
			break;
		case OPT_FORCE:
			q->flags |= WIRE_FORCE;
			break;
		case OPT_VARIANT:
			q->variant = optarg;
			break;
		default:
			return cmd_usage_error(NULL);
		}
	}
	if (all && optind < argc)
		return cmd_usage_error("--all and a file: '%s'", argv[optind]);
	if (!all && optind == argc)
		return cmd_usage_error("no file given, and no --all");
	if (daemon_open(socket, &q->d) < 0)
		return CMD_FAILED;
	for (int i = optind; all || i < argc; i++) {
		struct wd_err err = { "" };

		r = all ? drop(q, NULL, &err) : drop_path(q, argv[i], &err);
		if (r < 0) {
			code = CMD_FAILED;
			if (failed(q, all ? NULL : argv[i], r, &err) < 0)
				goto no_memory;
		}
		if (all || r == -EPIPE || r == -ETIMEDOUT)
			break;
	}
	if (json) {
		cleanup_json json_t *root = json_pack("{s:I, s:I, s:O}", "dropped_bytes", (json_int_t)q->dropped,
						      "resident_bytes", (json_int_t)q->resident, "errors", q->errors);

		if (!root || json_print(root) < 0)
			goto no_memory;
	} else if (code == CMD_DONE || q->dropped > 0) {
		char a[SIZE_TEXT], b[SIZE_TEXT];

		(void)printf("dropped %s; %s are in memory\n", size_text(q->dropped, a), size_text(q->resident, b));
	}
	return code;

no_memory:
	cmd_error("out of memory");
	return CMD_FAILED;
}
