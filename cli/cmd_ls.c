/* SPDX-License-Identifier: Apache-2.0 */
/* `weightd ls`: which sources a daemon has in memory, and who uses them. */
#include "cli/daemon.h"

#include <inttypes.h>
#include <pwd.h>
#include <string.h>

enum { OPT_WATCH = DAEMON_OPT_OWN, OPT_CLIENTS };

static const char help[] = "Usage: weightd ls [OPTION]... [--watch [SECONDS]]\n"
			   "\n"
			   "Lists the checkpoint files that a daemon has in memory: root and the daemon's\n"
			   "user see all of them, others those that they have opened. A line a file:\n"
			   "\n"
			   "  NAME       as its first client named it\n"
			   "  DEV:INODE  which file that is: major:minor:inode\n"
			   "  SIZE       of the file\n"
			   "  RESIDENT   what of it is in memory, also in per cent\n"
			   "  HUGE       how much of that is on huge pages\n"
			   "  CLIENTS    processes that have it open\n"
			   "  STATE      used, or idle and for how long; pinned; changed (the file is\n"
			   "             another one by now, and this is kept for those who have it open)\n"
			   "  HOLDERS    who holds some of it, by the running stage or, without stages, by\n"
			   "             what was touched lately: PID:PROGRAM:STAGE, PID:PROGRAM\n"
			   "\n"
			   "On a terminal HOLDERS are below each line, and so is DEV:INODE where it has less\n"
			   "than 100 columns.\n"
			   "\n"
			   "Options:\n"
			   "  --clients           then list the clients: what each holds and has mapped\n"
			   "  --watch[=SECONDS]   again and again, every 2 seconds, until Ctrl-C\n"
			   "  --socket=PATH       the daemon's socket (WEIGHTD_SOCKET, or the usual places)\n"
			   "  --json              one JSON object a time (see below)\n"
			   "  --help              print this\n"
			   "\n"
			   "JSON:\n"
			   "  {\"arena\", \"numa\",\n"
			   "   \"views\": [{\"name\", \"id\", \"device\": \"MAJOR:MINOR\", \"inode\", \"size\",\n"
			   "     \"bytes\": in memory at most,\n"
			   "     \"resident_bytes\", \"huge_bytes\", \"pinned_bytes\", \"read_bytes\",\n"
			   "     \"dropped_bytes\", \"changed\", \"idle_seconds\": null while it is used,\n"
			   "     \"clients\": [{\"pid\", \"uid\", \"name\", \"child\", \"stage\", \"held_bytes\",\n"
			   "        \"mapped_bytes\"}]}]}\n"
			   "\n"
			   "Exit status: 0 done, 1 something failed, 2 wrong command line.\n";

#define WIDE 100 /* columns that leave 30 or so for the name, with DEV:INODE beside it */

struct request {
	bool clients, again;
};

static const char *text_of(const json_t *object, const char *key)
{
	const char *text = json_string_value(json_object_get(object, key));

	return text ? text : "";
}

static void percent(struct table *t, uint64_t part, uint64_t whole)
{
	if (whole == 0)
		table_cell(t, "-");
	else
		table_printf(t, "%u%%", (unsigned int)((unsigned __int128)MIN(part, whole) * 100 / whole));
}

static const char *duration_text(uint64_t seconds, char buf[static SIZE_TEXT])
{
	static const struct {
		uint64_t seconds;
		const char *unit;
	} units[] = { { 86400, "d" }, { 3600, "h" }, { 60, "min" }, { 1, "s" } };

	for (size_t i = 0; i < ARRAY_SIZE(units); i++)
		if (seconds >= units[i].seconds || i + 1 == ARRAY_SIZE(units)) {
			(void)snprintf(buf, SIZE_TEXT, "%" PRIu64 " %s", seconds / units[i].seconds, units[i].unit);
			break;
		}
	return buf;
}

static void state_cell(struct table *t, const json_t *view)
{
	const json_t *idle = json_object_get(view, "idle_seconds");
	bool pinned = json_count(view, "pinned_bytes") > 0, changed = json_is_true(json_object_get(view, "changed"));
	char buf[SIZE_TEXT];

	table_printf(t, "%s%s%s%s", json_is_number(idle) ? "idle " : "used",
		     json_is_number(idle) ? duration_text((uint64_t)MAX(json_number_value(idle), 0.0), buf) : "",
		     pinned ? ", pinned" : "", changed ? ", changed" : "");
	table_color(t, changed ? TERM_YELLOW : NULL);
}

static void where_text(const json_t *view, char *buf, size_t room)
{
	(void)snprintf(buf, room, "%s:%" PRIu64, text_of(view, "device"), json_count(view, "inode"));
}

/* Appends to *text, which is freed and NULL when memory is missing. */
static void __attribute__((format(printf, 2, 3))) append(char **text, const char *fmt, ...)
{
	cleanup_free char *more = NULL, *before = *text;
	va_list args;

	va_start(args, fmt);
	if (vasprintf(&more, fmt, args) < 0)
		more = NULL;
	va_end(args);
	if (!before || !more || asprintf(text, "%s%s", before, more) < 0)
		*text = NULL;
}

/* "" where there are none. Owner: the caller. */
static char *holders_text(const json_t *view, const char *first)
{
	char *text = strdup(first);
	const json_t *client;
	size_t i;

	json_array_foreach(json_object_get(view, "clients"), i, client) {
		const char *stage = text_of(client, "stage");

		if (json_count(client, "held_bytes") == 0)
			continue;
		append(&text, "%s%" PRIu64 ":%s%s%s", text && text[0] ? " " : "", json_count(client, "pid"),
		       text_of(client, "name"), stage[0] ? ":" : "", stage);
	}
	return text;
}

static int print_sources(const json_t *answer, const json_t *views)
{
	unsigned int terminal = term_columns();
	bool where_beside = terminal == 0 || terminal >= WIDE;
	struct column columns[9];
	uint64_t resident_sum = 0;
	cleanup_table struct table t;
	char buf[SIZE_TEXT], where[80];
	const json_t *view;
	size_t i, nr = 0;
	int r;

	columns[nr++] = (struct column){ "NAME", COLUMN_CUT_FRONT };
	if (where_beside)
		columns[nr++] = (struct column){ "DEV:INODE", COLUMN_LEFT };
	columns[nr++] = (struct column){ "SIZE", COLUMN_RIGHT };
	columns[nr++] = (struct column){ "RESIDENT", COLUMN_RIGHT };
	columns[nr++] = (struct column){ "", COLUMN_RIGHT };
	columns[nr++] = (struct column){ "HUGE", COLUMN_RIGHT };
	columns[nr++] = (struct column){ "CLIENTS", COLUMN_RIGHT };
	columns[nr++] = (struct column){ "STATE", COLUMN_LEFT };
	columns[nr++] = (struct column){ "HOLDERS", terminal ? COLUMN_BELOW : COLUMN_LEFT };
	table_init(&t, columns, nr);
	json_array_foreach(views, i, view) {
		uint64_t resident = json_count(view, "resident_bytes");
		cleanup_free char *holders = NULL;

		where_text(view, where, sizeof(where));
		holders = holders_text(view, where_beside ? "" : where);
		if (!holders)
			return -ENOMEM;
		table_cell(&t, text_of(view, "name"));
		if (where_beside)
			table_cell(&t, where);
		table_cell(&t, size_text(json_count(view, "size"), buf));
		table_cell(&t, size_text(resident, buf));
		percent(&t, resident, json_count(view, "bytes"));
		percent(&t, json_count(view, "huge_bytes"), resident);
		table_printf(&t, "%zu", json_array_size(json_object_get(view, "clients")));
		state_cell(&t, view);
		table_cell(&t, holders);
		resident_sum += resident;
	}
	r = table_print(&t, 0);
	(void)printf("%zu source%s, %s resident; arenas: %s, NUMA: %s\n", i, i == 1 ? "" : "s",
		     size_text(resident_sum, buf), text_of(answer, "arena"), text_of(answer, "numa"));
	return r;
}

static int print_clients(const json_t *views)
{
	static const struct column columns[] = {
		{ "PID", COLUMN_RIGHT },        { "USER", COLUMN_LEFT },  { "PROGRAM", COLUMN_LEFT },
		{ "STAGE", COLUMN_LEFT },       { "HELD", COLUMN_RIGHT }, { "MAPPED", COLUMN_RIGHT },
		{ "SOURCE", COLUMN_CUT_FRONT },
	};
	cleanup_table struct table t;
	const json_t *view, *client;
	char buf[SIZE_TEXT];
	size_t i, k;

	table_init(&t, columns, ARRAY_SIZE(columns));
	json_array_foreach(views, i, view) {
		json_array_foreach(json_object_get(view, "clients"), k, client) {
			uint64_t uid = json_count(client, "uid");
			const struct passwd *user = getpwuid((uid_t)uid);
			const char *stage = text_of(client, "stage");

			table_printf(&t, "%" PRIu64, json_count(client, "pid"));
			if (user)
				table_cell(&t, user->pw_name);
			else
				table_printf(&t, "%" PRIu64, uid);
			table_printf(&t, "%s%s", text_of(client, "name"),
				     json_is_true(json_object_get(client, "child")) ? " (child)" : "");
			table_cell(&t, stage[0] ? stage : "-");
			table_cell(&t, size_text(json_count(client, "held_bytes"), buf));
			table_cell(&t, size_text(json_count(client, "mapped_bytes"), buf));
			table_cell(&t, text_of(view, "name"));
		}
	}
	if (t.nr_cells == 0) {
		(void)puts("no clients");
		return 0;
	}
	return table_print(&t, 0);
}

static int print(void *arg, const json_t *answer)
{
	const struct request *request = arg;
	const json_t *views = json_object_get(answer, "views");
	int r = 0;

	if (!json_is_array(views))
		return -EPROTO;
	if (json_array_size(views) == 0)
		(void)puts("no sources: nothing is open, and nothing is kept");
	else
		r = print_sources(answer, views);
	if (r == 0 && request->clients && json_array_size(views) > 0) {
		(void)putchar('\n');
		r = print_clients(views);
	}
	if (request->again && !isatty(STDOUT_FILENO))
		(void)putchar('\n');
	return r;
}

int cmd_ls(int argc, char **argv)
{
	static const struct option options[] = {
		DAEMON_COMMON_OPTIONS,
		{ "watch", optional_argument, NULL, OPT_WATCH },
		{ "clients", no_argument, NULL, OPT_CLIENTS },
		{ NULL, 0, NULL, 0 },
	};
	cleanup_daemon struct daemon d = DAEMON_NONE;
	struct request request = { 0 };
	const char *socket = NULL, *seconds = NULL;
	bool json = false;
	int opt, every_ms = 0;

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
		case OPT_WATCH:
			request.again = true;
			seconds = optarg;
			break;
		case OPT_CLIENTS:
			request.clients = true;
			break;
		default:
			return cmd_usage_error(NULL);
		}
	}
	if (request.again && !seconds && optind < argc)
		seconds = argv[optind++];
	if (optind < argc)
		return cmd_usage_error("takes no argument: '%s'", argv[optind]);
	if (request.again && watch_parse(seconds, &every_ms) < 0)
		return cmd_usage_error("--watch: '%s' is not a number of seconds (0.1 to 86400)", seconds);
	if (daemon_open(socket, &d) < 0)
		return CMD_FAILED;
	return daemon_watch(&d, WIRE_LS, every_ms, json ? NULL : print, &request);
}
