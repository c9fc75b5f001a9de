/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The JSON of `weightd ls` and `weightd stat`:
 *
 *   {"numa", "arena", "views": [{"name", "id", "device", "inode", "size", "bytes", "resident_bytes", "huge_bytes",
 *     "pinned_bytes", "read_bytes", "dropped_bytes", "changed", "idle_seconds": null while mapped,
 *     "clients": [{"pid", "uid", "name", "child", "stage", "held_bytes", "mapped_bytes"}]}]}
 *
 *   {"version", "pid", "socket", "uptime_seconds", "arena", "numa", "sessions", every field of pager_stats and
 *     serve_counts, "huge_percent", "wait_us": [{"from", "to": null for the last, "count"}]}
 *
 * "device" is "MAJOR:MINOR".
 */
#include "cli/serve_report.h"

#include <inttypes.h>

#include "cli/cmd.h"
#include "lib/include/weightd.h"

static int put(json_t *to, const char *key, json_t *value)
{
	return json_object_set_new(to, key, value) < 0 ? -ENOMEM : 0; /* also for a value that is NULL */
}

static int put_number(json_t *to, const char *key, uint64_t n)
{
	return put(to, key, json_integer((json_int_t)MIN(n, (uint64_t)INT64_MAX)));
}

static int put_text(json_t *to, const char *key, const char *text)
{
	return put(to, key, text ? json_text(text) : json_null());
}

struct number {
	const char *key;
	uint64_t n;
};

static int put_numbers(json_t *to, const struct number *numbers, size_t nr)
{
	int r = 0;

	for (size_t i = 0; r == 0 && i < nr; i++)
		r = put_number(to, numbers[i].key, numbers[i].n);
	return r;
}

static int finish(json_t *root, char **ret)
{
	*ret = json_dumps(root, JSON_COMPACT);
	return *ret ? 0 : -ENOMEM;
}

static int add_client(json_t *list, const struct serve_client_info *c)
{
	json_t *one = json_object();
	int r;

	if (json_array_append_new(list, one) < 0)
		return -ENOMEM;
	r = put_number(one, "pid", (uint64_t)c->pid);
	r = r ? r : put_number(one, "uid", c->uid);
	r = r ? r : put_text(one, "name", c->name);
	r = r ? r : put(one, "child", json_boolean(c->child));
	r = r ? r : put_text(one, "stage", c->stage && c->stage[0] ? c->stage : NULL);
	r = r ? r : put_number(one, "held_bytes", c->held_bytes);
	return r ? r : put_number(one, "mapped_bytes", c->mapped_bytes);
}

static int add_view(void *views, const struct serve_view_info *v)
{
	const struct number numbers[] = {
		{ "id", v->id },
		{ "inode", v->ino },
		{ "size", v->size },
		{ "bytes", v->bytes },
		{ "resident_bytes", v->resident_bytes },
		{ "huge_bytes", v->huge_bytes },
		{ "pinned_bytes", v->pinned_bytes },
		{ "read_bytes", v->read_bytes },
		{ "dropped_bytes", v->dropped_bytes },
	};
	json_t *one = json_object(), *clients = json_array();
	char device[48];
	int r = json_array_append_new(views, one) < 0 ? -ENOMEM : 0;

	if (r < 0) {
		json_decref(clients);
		return r;
	}
	(void)snprintf(device, sizeof(device), "%" PRIu64 ":%" PRIu64, v->dev >> 32, v->dev & UINT32_MAX);
	r = put(one, "clients", clients);
	r = r ? r : put_text(one, "name", v->name);
	r = r ? r : put_text(one, "device", device);
	r = r ? r : put_numbers(one, numbers, ARRAY_SIZE(numbers));
	r = r ? r : put(one, "changed", json_boolean(v->changed));
	r = r ? r : put(one, "idle_seconds", v->idle_ns ? json_real((double)v->idle_ns / 1e9) : json_null());
	for (unsigned int i = 0; r == 0 && i < v->nr_clients; i++)
		r = add_client(clients, &v->clients[i]);
	return r;
}

int report_ls(struct server *s, uid_t uid, char **ret)
{
	cleanup_json json_t *root = json_object(), *views = json_array();
	struct serve_counts counts;
	int r = root && views ? serve_list(s->pager, uid, add_view, views) : -ENOMEM;

	if (r < 0)
		return r;
	serve_counts(s->pager, &counts);
	r = put_text(root, "numa", s->numa);
	r = r ? r : put_text(root, "arena", counts.arena);
	r = r ? r : put(root, "views", json_incref(views));
	return r ? r : finish(root, ret);
}

static int add_waits(json_t *root, const struct serve_counts *c)
{
	json_t *list = json_array();
	int r = put(root, "wait_us", list);

	for (unsigned int i = 0; r == 0 && i < SERVE_BUCKETS; i++) {
		json_t *one = json_object();

		r = json_array_append_new(list, one) < 0 ? -ENOMEM : 0;
		r = r ? r : put_number(one, "from", i == 0 ? 0 : 1ull << i);
		if (r == 0)
			r = i + 1 < SERVE_BUCKETS ? put_number(one, "to", 2ull << i) : put(one, "to", json_null());
		r = r ? r : put_number(one, "count", c->wait[i]);
	}
	return r;
}

int report_stat(struct server *s, char **ret)
{
	cleanup_json json_t *root = json_object();
	struct serve_counts c;
	struct timespec now;
	int r;

	if (!root)
		return -ENOMEM;
	serve_counts(s->pager, &c);
	(void)clock_gettime(CLOCK_MONOTONIC, &now);
	{
		const struct number numbers[] = {
			{ "pid", (uint64_t)getpid() },
			{ "uptime_seconds", (uint64_t)now.tv_sec - s->started_ns / 1000000000 },
			{ "sessions", session_count(s) },
			{ "budget_bytes", c.stats.budget_bytes },
			{ "resident_bytes", c.stats.resident_bytes },
			{ "peak_bytes", c.stats.peak_bytes },
			{ "huge_bytes", c.stats.huge_bytes },
			{ "written_bytes", c.stats.written_bytes },
			{ "read_bytes", c.stats.read_bytes },
			{ "reads", c.stats.reads },
			{ "faults", c.stats.faults },
			{ "dropped_bytes", c.stats.dropped_bytes },
			{ "reloads", c.stats.reloads },
			{ "reload_bytes", c.stats.reload_bytes },
			{ "failed", c.stats.failed },
			{ "clients", c.clients },
			{ "children", c.children },
			{ "views", c.views },
			{ "mappings", c.mappings },
			{ "pinned_bytes", c.pinned_bytes },
			{ "foreign_bytes", c.foreign_bytes },
			{ "take_backs", c.take_backs },
			{ "take_backs_given_up", c.take_backs_given_up },
			{ "rounds", c.rounds },
			{ "forks", c.forks },
		};
		double resident = (double)c.stats.resident_bytes;

		r = put_numbers(root, numbers, ARRAY_SIZE(numbers));
		r = r ? r :
			put(root, "huge_percent",
			    json_real(resident > 0 ? 100.0 * (double)c.stats.huge_bytes / resident : 0));
	}
	r = r ? r : put_text(root, "version", wd_version());
	r = r ? r : put_text(root, "socket", s->socket);
	r = r ? r : put_text(root, "arena", c.arena);
	r = r ? r : put_text(root, "numa", s->numa);
	r = r ? r : add_waits(root, &c);
	return r ? r : finish(root, ret);
}
