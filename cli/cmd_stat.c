/* SPDX-License-Identifier: Apache-2.0 */
/* `weightd stat`: what a daemon has counted since it began. Plain text, no cursor: a terminal and a log can show it. */
#include "cli/daemon.h"

#include <inttypes.h>
#include <string.h>
#include <time.h>

enum { OPT_WATCH = DAEMON_OPT_OWN };

static const char help[] =
	"Usage: weightd stat [OPTION]... [--watch [SECONDS]]\n"
	"\n"
	"Prints what a daemon has counted since it began: its budget and memory, reads,\n"
	"drops, and how long programs waited for weights, as a histogram. Half of the\n"
	"waits were shorter than p50, 99 of 100 shorter than p99.\n"
	"\n"
	"Options:\n"
	"  --watch[=SECONDS]  again and again, every 2 seconds, until Ctrl-C; a line\n"
	"                     a time where the output is no terminal\n"
	"  --socket=PATH      the daemon's socket (WEIGHTD_SOCKET, or the usual places)\n"
	"  --json             one JSON object a time (see below)\n"
	"  --help             print this\n"
	"\n"
	"JSON:\n"
	"  {\"version\", \"pid\", \"socket\", \"uptime_seconds\", \"sessions\", \"arena\", \"numa\",\n"
	"   \"budget_bytes\", \"resident_bytes\", \"peak_bytes\", \"huge_bytes\", \"huge_percent\",\n"
	"   \"written_bytes\", \"read_bytes\", \"reads\", \"faults\", \"dropped_bytes\", \"reloads\",\n"
	"   \"reload_bytes\", \"failed\", \"clients\", \"children\", \"views\", \"mappings\",\n"
	"   \"pinned_bytes\", \"foreign_bytes\", \"take_backs\", \"take_backs_given_up\",\n"
	"   \"rounds\", \"forks\", \"wait_us\": [{\"from\", \"to\": null in the last, \"count\"}]}\n"
	"\n"
	"Exit status: 0 done, 1 something failed, 2 wrong command line.\n";

struct request {
	bool again;
	json_t *before; /* the last answer, for what was added since */
};

/* ---- waits */

struct waits {
	uint64_t count;
	uint64_t p50_us, p99_us; /* upper ends of their buckets; UINT64_MAX: in the one without end */
	uint64_t last_from_us;   /* of that one */
};

static uint64_t bucket_end(const json_t *bucket)
{
	return json_is_integer(json_object_get(bucket, "to")) ? json_count(bucket, "to") : UINT64_MAX;
}

/* The end of the bucket in which the n-th wait (from 1) lies. */
static uint64_t wait_end(const json_t *buckets, uint64_t n)
{
	const json_t *bucket;
	uint64_t sum = 0;
	size_t i;

	json_array_foreach(buckets, i, bucket) {
		sum += json_count(bucket, "count");
		if (sum >= n)
			return bucket_end(bucket);
	}
	return UINT64_MAX;
}

static struct waits waits_of(const json_t *answer)
{
	const json_t *buckets = json_object_get(answer, "wait_us"), *bucket;
	struct waits w = { 0 };
	size_t i;

	json_array_foreach(buckets, i, bucket) {
		w.count += json_count(bucket, "count");
		w.last_from_us = json_count(bucket, "from");
	}
	if (w.count > 0) {
		w.p50_us = wait_end(buckets, w.count - w.count / 2);
		w.p99_us = wait_end(buckets, w.count - w.count / 100);
	}
	return w;
}

static const char *us_text(uint64_t us, char buf[static SIZE_TEXT])
{
	double n = (double)us;

	if (us < 1000)
		(void)snprintf(buf, SIZE_TEXT, "%" PRIu64 " us", us);
	else if (us < 1000000)
		(void)snprintf(buf, SIZE_TEXT, "%.*f ms", n < 9950 ? 1 : 0, n / 1e3);
	else
		(void)snprintf(buf, SIZE_TEXT, "%.*f s", n < 9950000 ? 1 : 0, n / 1e6);
	return buf;
}

/* "under 64 us", "over 8.4 s" */
static const char *percentile_text(const struct waits *w, uint64_t us, char buf[static SIZE_TEXT])
{
	char number[SIZE_TEXT];

	if (us == UINT64_MAX)
		(void)snprintf(buf, SIZE_TEXT, "over %s", us_text(w->last_from_us, number));
	else
		(void)snprintf(buf, SIZE_TEXT, "under %s", us_text(us, number));
	return buf;
}

static void print_histogram(const json_t *answer, const struct waits *w)
{
	enum { WIDTH = 40 };
	static const char bar[] = "########################################";
	const json_t *buckets = json_object_get(answer, "wait_us"), *bucket;
	size_t i, first = SIZE_MAX, last = 0;
	uint64_t most = 0;

	json_array_foreach(buckets, i, bucket) {
		if (json_count(bucket, "count") == 0)
			continue;
		first = MIN(first, i);
		last = i;
		most = MAX(most, json_count(bucket, "count"));
	}
	if (w->count == 0)
		return;
	for (i = first; i <= last; i++) {
		char from[SIZE_TEXT], to[SIZE_TEXT];
		uint64_t count, end;
		int len;

		bucket = json_array_get(buckets, i);
		count = json_count(bucket, "count");
		end = bucket_end(bucket);
		/* What happened at all gets a mark. */
		len = count ? (int)MAX((unsigned __int128)count * WIDTH / most, (unsigned __int128)1) : 0;
		(void)printf("  %8s - %-8s %12" PRIu64 "%s%.*s\n", us_text(json_count(bucket, "from"), from),
			     end == UINT64_MAX ? "" : us_text(end, to), count, len ? "  " : "", len, bar);
	}
}

/* ---- text */

/* A count, and how much it has grown since the last time. */
static const char *grown(const struct request *q, const json_t *answer, const char *key, bool size, char *buf,
			 size_t room)
{
	uint64_t now = json_count(answer, key), before = q->before ? json_count(q->before, key) : now;
	char a[SIZE_TEXT], b[SIZE_TEXT];

	if (!size) {
		(void)snprintf(a, sizeof(a), "%" PRIu64, now);
		(void)snprintf(b, sizeof(b), "%" PRIu64, now - MIN(before, now));
	} else {
		(void)size_text(now, a);
		(void)size_text(now - MIN(before, now), b);
	}
	if (now > before)
		(void)snprintf(buf, room, "%s (+%s)", a, b);
	else
		(void)snprintf(buf, room, "%s", a);
	return buf;
}

static unsigned int percent(uint64_t part, uint64_t whole)
{
	return whole ? (unsigned int)((unsigned __int128)part * 100 / whole) : 0;
}

static void uptime_text(uint64_t s, char buf[static SIZE_TEXT])
{
	if (s >= 86400)
		(void)snprintf(buf, SIZE_TEXT, "%" PRIu64 " d %u h", s / 86400, (unsigned int)(s % 86400 / 3600));
	else if (s >= 3600)
		(void)snprintf(buf, SIZE_TEXT, "%u h %u min", (unsigned int)(s / 3600), (unsigned int)(s % 3600 / 60));
	else if (s >= 60)
		(void)snprintf(buf, SIZE_TEXT, "%u min %u s", (unsigned int)(s / 60), (unsigned int)(s % 60));
	else
		(void)snprintf(buf, SIZE_TEXT, "%u s", (unsigned int)s);
}

static const char *text_of(const json_t *object, const char *key)
{
	const char *text = json_string_value(json_object_get(object, key));

	return text ? text : "?";
}

static void print_table(const struct request *q, const json_t *a)
{
	static const struct column columns[] = { { NULL, COLUMN_LEFT }, { NULL, COLUMN_WRAP } };
	uint64_t resident = json_count(a, "resident_bytes"), budget = json_count(a, "budget_bytes");
	char b1[SIZE_TEXT], b2[SIZE_TEXT], b3[SIZE_TEXT], g1[2 * SIZE_TEXT + 4], g2[2 * SIZE_TEXT + 4];
	struct waits w = waits_of(a);
	cleanup_table struct table t;

	table_init(&t, columns, ARRAY_SIZE(columns));
	uptime_text(json_count(a, "uptime_seconds"), b1);
	table_cell(&t, "daemon");
	table_printf(&t, "weightd %s, pid %" PRIu64 ", up %s, %s", text_of(a, "version"), json_count(a, "pid"), b1,
		     text_of(a, "socket"));
	table_cell(&t, "memory");
	table_printf(&t, "%s resident, %u%% of the budget of %s; peak %s", size_text(resident, b1),
		     percent(resident, budget), size_text(budget, b2), size_text(json_count(a, "peak_bytes"), b3));
	table_cell(&t, "arenas");
	table_printf(&t, "%s, %.0f%% on huge pages, NUMA: %s", text_of(a, "arena"),
		     json_number_value(json_object_get(a, "huge_percent")), text_of(a, "numa"));
	table_cell(&t, "pinned");
	table_cell(&t, size_text(json_count(a, "pinned_bytes"), b1));
	if (json_count(a, "foreign_bytes") > 0) {
		table_cell(&t, "foreign");
		table_printf(&t, "%s allocated by clients in arenas; taken back",
			     size_text(json_count(a, "foreign_bytes"), b1));
	}
	table_cell(&t, "clients");
	table_printf(&t, "%" PRIu64 ", and %" PRIu64 " forked children; %" PRIu64 " mappings of %" PRIu64 " sources",
		     json_count(a, "clients"), json_count(a, "children"), json_count(a, "mappings"),
		     json_count(a, "views"));
	table_cell(&t, "read");
	table_printf(&t, "%s in %s reads", grown(q, a, "read_bytes", true, g1, sizeof(g1)),
		     grown(q, a, "reads", false, g2, sizeof(g2)));
	table_cell(&t, "read again");
	table_printf(&t, "%s that had been dropped", grown(q, a, "reload_bytes", true, g1, sizeof(g1)));
	table_cell(&t, "dropped");
	table_printf(&t, "%s in %s take-backs, %" PRIu64 " given up",
		     grown(q, a, "dropped_bytes", true, g1, sizeof(g1)),
		     grown(q, a, "take_backs", false, g2, sizeof(g2)), json_count(a, "take_backs_given_up"));
	table_cell(&t, "failed");
	table_printf(&t, "%s", grown(q, a, "failed", false, g1, sizeof(g1)));
	table_color(&t, json_count(a, "failed") ? TERM_YELLOW : NULL);
	table_cell(&t, "forks");
	table_printf(&t, "%s", grown(q, a, "forks", false, g1, sizeof(g1)));
	table_cell(&t, "faults");
	table_printf(&t, "%s", grown(q, a, "faults", false, g1, sizeof(g1)));
	table_cell(&t, "waits");
	if (w.count == 0)
		table_cell(&t, "none");
	else
		table_printf(&t, "%" PRIu64 ": p50 %s, p99 %s", w.count, percentile_text(&w, w.p50_us, b1),
			     percentile_text(&w, w.p99_us, b2));
	if (table_print(&t, 0) == 0)
		print_histogram(a, &w);
}

static void print_line(const struct request *q, const json_t *a)
{
	char b1[SIZE_TEXT], b2[SIZE_TEXT], g1[2 * SIZE_TEXT + 4], g2[2 * SIZE_TEXT + 4], g3[2 * SIZE_TEXT + 4];
	char clock[32] = "";
	struct waits w = waits_of(a);
	time_t now = time(NULL);
	struct tm tm;

	if (localtime_r(&now, &tm))
		(void)strftime(clock, sizeof(clock), "%Y-%m-%dT%H:%M:%S%z", &tm);
	(void)printf("%s resident %s of %s, clients %" PRIu64 ", read %s, dropped %s, faults %s", clock,
		     size_text(json_count(a, "resident_bytes"), b1), size_text(json_count(a, "budget_bytes"), b2),
		     json_count(a, "clients"), grown(q, a, "read_bytes", true, g1, sizeof(g1)),
		     grown(q, a, "dropped_bytes", true, g2, sizeof(g2)), grown(q, a, "faults", false, g3, sizeof(g3)));
	if (w.count > 0)
		(void)printf(", waits p50 %s, p99 %s", percentile_text(&w, w.p50_us, b1),
			     percentile_text(&w, w.p99_us, b2));
	(void)putchar('\n');
}

static int print(void *arg, const json_t *answer)
{
	struct request *q = arg;

	if (!json_is_array(json_object_get(answer, "wait_us")) ||
	    !json_is_integer(json_object_get(answer, "budget_bytes")))
		return -EPROTO;
	if (q->again && !isatty(STDOUT_FILENO))
		print_line(q, answer);
	else
		print_table(q, answer);
	json_decref(q->before);
	q->before = json_deep_copy(answer);
	return 0;
}

static void request_done(struct request *q)
{
	json_decref(q->before);
}

int cmd_stat(int argc, char **argv)
{
	static const struct option options[] = {
		DAEMON_COMMON_OPTIONS,
		{ "watch", optional_argument, NULL, OPT_WATCH },
		{ NULL, 0, NULL, 0 },
	};
	cleanup(request_done) struct request request = { 0 };
	cleanup_daemon struct daemon d = DAEMON_NONE;
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
	return daemon_watch(&d, WIRE_STAT, every_ms, json ? NULL : print, &request);
}
