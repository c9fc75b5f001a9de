/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the modes' results look like: a table and a few sentences for people, JSON for programs. Every figure and
 * every sentence comes from this run.
 * Threads: none.
 */
#define _GNU_SOURCE
#include "cli/demo.h"

#include "cli/cmd.h"
#include "lib/include/weightd.h"

#include <string.h>

#define BAR_COLUMNS 24
#define BAR_SECONDS 0.1
#define SHA_TEXT (2 * DEMO_SHA_BYTES + 1)

static const char *const status_names[] = { "finished", "killed", "failed" };

static const char *sha_text(const unsigned char *sha, char buf[static SHA_TEXT])
{
	for (size_t i = 0; i < DEMO_SHA_BYTES; i++)
		(void)snprintf(buf + 2 * i, 3, "%02x", sha[i]);
	return buf;
}

static bool same(const unsigned char *a, const unsigned char *b)
{
	return !memcmp(a, b, DEMO_SHA_BYTES);
}

static const struct demo_result *find(const struct demo_result *results, size_t nr, enum demo_mode mode)
{
	for (size_t i = 0; i < nr; i++) {
		if (results[i].mode == mode)
			return &results[i];
	}
	return NULL;
}

static bool finished(const struct demo_result *r)
{
	return r && r->status == DEMO_FINISHED;
}

int demo_identical(const struct demo_job *job, const struct demo_result *results, size_t nr)
{
	const struct demo_result *first = NULL;
	int identical = -1;

	for (size_t i = 0; i < nr; i++) {
		if (!finished(&results[i]))
			continue;
		if (!first) {
			first = &results[i];
			continue;
		}
		if (identical < 0)
			identical = 1;
		if (!same(first->sha, results[i].sha))
			identical = 0;
		for (size_t k = 0; k < job->nr_stages; k++) {
			if (!same(first->stages[k].sha, results[i].stages[k].sha))
				identical = 0;
		}
	}
	return identical;
}

bool demo_stages_agree(const struct demo_job *job, const struct demo_result *results, size_t nr, size_t *ret_stage)
{
	for (size_t k = 0; k < job->nr_stages; k++) {
		const struct demo_stage_result *first = NULL;

		for (size_t i = 0; i < nr; i++) {
			const struct demo_stage_result *s = &results[i].stages[k];

			if (s->done && first && !same(s->sha, first->sha)) {
				*ret_stage = k;
				return false;
			}
			if (s->done && !first)
				first = s;
		}
	}
	return true;
}

/* ---- JSON */

static json_t *json_count(uint64_t n)
{
	return n == DEMO_UNKNOWN ? json_null() : json_integer((json_int_t)n);
}

static json_t *json_sha(bool known, const unsigned char *sha)
{
	char text[SHA_TEXT];

	return known ? json_string(sha_text(sha, text)) : json_null();
}

static json_t *mode_json(const struct demo_job *job, const struct demo_result *r)
{
	json_t *stages = json_array();

	for (size_t i = 0; i < job->nr_stages; i++) {
		const struct demo_stage_result *s = &r->stages[i];

		if (!s->entered)
			continue;
		(void)json_array_append_new(
			stages, json_pack("{s:o, s:o, s:o, s:o, s:o}", "name", json_text(job->stages[i].name),
					  "seconds", s->done ? json_real(s->seconds) : json_null(), "peak_bytes",
					  json_count(s->peak_bytes), "peak_weights_bytes",
					  json_count(s->peak_weights_bytes), "sha256", json_sha(s->done, s->sha)));
	}
	return json_pack("{s:s, s:s, s:o, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "mode",
			 demo_mode_names[r->mode], "status", status_names[r->status], "reason",
			 r->reason[0] ? json_text(r->reason) : json_null(), "seconds", r->seconds, "peak_bytes",
			 json_count(r->peak_bytes), "peak_weights_bytes", json_count(r->peak_weights_bytes),
			 "peak_cache_bytes", json_count(r->peak_cache_bytes), "read_bytes", json_count(r->read_bytes),
			 "swap_out_bytes", json_count(r->swap_out_bytes), "swap_in_bytes", json_count(r->swap_in_bytes),
			 "major_faults", json_count(r->major_faults), "pager_faults", json_count(r->pager_faults),
			 "reloads", json_count(r->reloads), "sha256", json_sha(finished(r), r->sha), "stages", stages);
}

json_t *demo_report_json(const struct demo_job *job, const struct demo_result *results, size_t nr)
{
	int identical = demo_identical(job, results, nr);
	json_t *modes = json_array();

	for (size_t i = 0; i < nr; i++)
		(void)json_array_append_new(modes, mode_json(job, &results[i]));
	return json_pack("{s:o, s:o}", "identical", identical < 0 ? json_null() : json_boolean(identical), "modes",
			 modes);
}

/* ---- the table */

static void size_cell(struct table *t, uint64_t bytes)
{
	char text[SIZE_TEXT];

	table_cell(t, bytes == DEMO_UNKNOWN ? "?" : size_text(bytes, text));
}

static void count_cell(struct table *t, uint64_t n)
{
	if (n == DEMO_UNKNOWN)
		table_cell(t, "?");
	else
		table_printf(t, "%ju", (uintmax_t)n);
}

/* A row of one of the counts of a result, by its place in the struct. */
static void row(struct table *t, const char *title, const struct demo_result *results, size_t nr, size_t offset,
		void (*cell)(struct table *, uint64_t))
{
	table_cell(t, title);
	for (size_t i = 0; i < nr; i++) {
		uint64_t n;

		memcpy(&n, (const char *)&results[i] + offset, sizeof(n));
		cell(t, n);
	}
}

#define ROW(t, title, field, cell) row(t, title, results, nr, offsetof(struct demo_result, field), cell)

static void stage_rows(struct table *t, const struct demo_job *job, const struct demo_result *results, size_t nr,
		       bool seconds)
{
	for (size_t k = 0; k < job->nr_stages; k++) {
		table_printf(t, "  %s", job->stages[k].name);
		for (size_t i = 0; i < nr; i++) {
			const struct demo_stage_result *s = &results[i].stages[k];

			if (seconds ? !s->done : !s->entered)
				table_cell(t, "-");
			else if (seconds)
				table_printf(t, "%.3f", s->seconds);
			else
				size_cell(t, s->peak_bytes);
		}
	}
}

static int print_table(const struct demo_job *job, const struct demo_result *results, size_t nr)
{
	struct column columns[1 + DEMO_NR_MODES] = { { "", COLUMN_LEFT } };
	cleanup_table struct table t;
	bool color = term_has_color();

	for (size_t i = 0; i < nr; i++)
		columns[1 + i] = (struct column){ demo_mode_names[results[i].mode], COLUMN_RIGHT };
	table_init(&t, columns, 1 + nr);
	table_cell(&t, "status");
	for (size_t i = 0; i < nr; i++) {
		table_cell(&t, status_names[results[i].status]);
		if (color)
			table_color(&t, finished(&results[i]) ? TERM_GREEN : TERM_RED);
	}
	table_cell(&t, "seconds");
	for (size_t i = 0; i < nr; i++)
		table_printf(&t, "%.3f", results[i].seconds);
	stage_rows(&t, job, results, nr, true);
	ROW(&t, "peak memory", peak_bytes, size_cell);
	stage_rows(&t, job, results, nr, false);
	ROW(&t, "  of it weights", peak_weights_bytes, size_cell);
	table_cell(&t, "  of it the rest");
	for (size_t i = 0; i < nr; i++)
		size_cell(&t, results[i].peak_bytes - MIN(results[i].peak_bytes, results[i].peak_weights_bytes));
	ROW(&t, "peak page cache", peak_cache_bytes, size_cell);
	ROW(&t, "read from disk", read_bytes, size_cell);
	ROW(&t, "swap out", swap_out_bytes, size_cell);
	ROW(&t, "swap in", swap_in_bytes, size_cell);
	ROW(&t, "major faults", major_faults, count_cell);
	ROW(&t, "pager faults", pager_faults, count_cell);
	ROW(&t, "models read again", reloads, count_cell);
	return table_print(&t, 0);
}

/* One line for every digest, with the modes that have it. `stage` SIZE_MAX: of the result. */
static void sha_rows(struct table *t, const struct demo_job *job, const struct demo_result *results, size_t nr,
		     size_t stage)
{
	bool told[DEMO_NR_MODES] = { false };

	for (size_t i = 0; i < nr; i++) {
		const unsigned char *sha = stage == SIZE_MAX ? results[i].sha : results[i].stages[stage].sha;
		char who[64] = "", text[SHA_TEXT];

		if (told[i] || !(stage == SIZE_MAX ? finished(&results[i]) : results[i].stages[stage].done))
			continue;
		for (size_t k = i; k < nr; k++) {
			const struct demo_result *r = &results[k];
			bool done = stage == SIZE_MAX ? finished(r) : r->stages[stage].done;

			if (!done || !same(sha, stage == SIZE_MAX ? r->sha : r->stages[stage].sha))
				continue;
			told[k] = true;
			(void)snprintf(who + strlen(who), sizeof(who) - strlen(who), "%s%s", who[0] ? ", " : "",
				       demo_mode_names[r->mode]);
		}
		table_cell(t, stage == SIZE_MAX ? "result" : job->stages[stage].name);
		table_cell(t, sha_text(sha, text));
		table_cell(t, who);
	}
}

static int print_shas(const struct demo_job *job, const struct demo_result *results, size_t nr)
{
	static const struct column columns[] = { { "stage", COLUMN_LEFT },
						 { "SHA-256", COLUMN_LEFT },
						 { "modes", COLUMN_LEFT } };
	cleanup_table struct table t;

	table_init(&t, columns, ARRAY_SIZE(columns));
	for (size_t k = 0; k < job->nr_stages; k++)
		sha_rows(&t, job, results, nr, k);
	sha_rows(&t, job, results, nr, SIZE_MAX);
	return t.nr_cells ? table_print(&t, 0) : 0;
}

/* ---- the sentences */

static double ratio(uint64_t a, uint64_t b)
{
	return b ? (double)a / (double)b : 0;
}

static void say_results(const struct demo_job *job, const struct demo_result *results, size_t nr)
{
	int identical = demo_identical(job, results, nr);
	size_t nr_finished = 0;

	for (size_t i = 0; i < nr; i++)
		nr_finished += finished(&results[i]);
	if (identical == 1)
		(void)printf("%zu of %zu modes finished, and computed the same result, bit for bit.\n", nr_finished,
			     nr);
	else if (identical == 0)
		(void)printf("The results DIFFER: at least one mode computed with wrong bytes.\n");
	for (size_t i = 0; i < nr; i++) {
		if (results[i].status != DEMO_FINISHED) {
			cleanup_free char *reason = text_escape(results[i].reason, NULL);

			(void)printf("%s %s: %s.\n", demo_mode_names[results[i].mode],
				     results[i].status == DEMO_KILLED ? "was killed" : "failed", reason ? reason : "?");
		}
	}
}

static void say_memory(const struct demo_setup *setup, const struct demo_result *results, size_t nr)
{
	const struct demo_result *eager = find(results, nr, DEMO_EAGER), *mmap = find(results, nr, DEMO_MMAP),
				 *staged = find(results, nr, DEMO_STAGED);
	char a[SIZE_TEXT], b[SIZE_TEXT], limit[SIZE_TEXT];

	if (finished(staged) && staged->way == WD_WAY_MMAP && staged->peak_cache_bytes != DEMO_UNKNOWN)
		(void)printf("staged's weights stood in the page cache (up to %s), as the way \"mmap\" has it.\n",
			     size_text(staged->peak_cache_bytes, a));
	else if (finished(staged) && finished(eager))
		(void)printf(
			"staged needed %.0f %% of eager's peak memory (%s instead of %s) and %.2f times its time.\n",
			100 * ratio(staged->peak_bytes, eager->peak_bytes), size_text(staged->peak_bytes, a),
			size_text(eager->peak_bytes, b), staged->seconds / eager->seconds);
	else if (finished(staged) && setup->limit_bytes)
		(void)printf("staged finished within %s, with a peak of %s.\n", size_text(setup->limit_bytes, limit),
			     size_text(staged->peak_bytes, a));
	if (finished(mmap) && mmap->peak_cache_bytes != DEMO_UNKNOWN && !setup->warm)
		(void)printf(
			"mmap's weights stood in the page cache instead (up to %s), which the kernel takes back only under "
			"pressure.\n",
			size_text(mmap->peak_cache_bytes, a));
}

static void say_reads(const struct demo_job *job, const struct demo_setup *setup, const struct demo_result *results,
		      size_t nr)
{
	uint64_t all = 0;
	char a[SIZE_TEXT], b[SIZE_TEXT];

	for (size_t i = 0; i < job->nr_models; i++)
		all += job->models[i].nbytes;
	for (size_t i = 0; i < nr; i++) {
		const struct demo_result *r = &results[i];

		/* 2 %: headers, the program's own pages, whole extents. */
		if (!finished(r) || setup->warm || r->read_bytes == DEMO_UNKNOWN || r->read_bytes < all + all / 50)
			continue;
		(void)printf("%s read %s from disk for %s of weights: %.2f times.\n", demo_mode_names[r->mode],
			     size_text(r->read_bytes, a), size_text(all, b), ratio(r->read_bytes, all));
	}
}

/* What a reader must know to trust the figures. */
static void say_conditions(const struct demo_setup *setup, const struct demo_result *results, size_t nr)
{
	const struct demo_result *staged = find(results, nr, DEMO_STAGED);
	char a[SIZE_TEXT];

	if (setup->limit_bytes)
		(void)printf("Each mode ran in a memory cgroup of its own, limited to %s.\n",
			     size_text(setup->limit_bytes, a));
	if (setup->no_cgroup) {
		cleanup_free char *why = text_escape(setup->cgroup_why.text, NULL);

		(void)printf("Measured without a memory cgroup, by /proc and the pager's counts: %s.\n",
			     why ? why : "?");
	}
	if (staged && staged->way && staged->way != WD_WAY_EMBEDDED)
		(void)printf("staged ran in the way \"%s\"%s.\n", wd_way_name(staged->way),
			     getenv("WEIGHTD_MODE") ? ", by WEIGHTD_MODE" :
						      ": `weightd doctor` says what \"embedded\" lacks here");
	if (setup->stayed_cached_bytes)
		(void)printf(
			"%s of the files could not be dropped from the page cache before a mode: another program uses them.\n",
			size_text(setup->stayed_cached_bytes, a));
	if (setup->cache_unseen)
		(void)printf(
			"The kernel tells only a file's owner what of it is cached: that the files were dropped is not proven.\n");
}

int demo_report_print(const struct demo_job *job, const struct demo_setup *setup, const struct demo_result *results,
		      size_t nr)
{
	int r = print_table(job, results, nr);

	if (r < 0)
		return r;
	(void)putchar('\n');
	if ((r = print_shas(job, results, nr)) < 0)
		return r;
	(void)putchar('\n');
	say_results(job, results, nr);
	say_memory(setup, results, nr);
	say_reads(job, setup, results, nr);
	say_conditions(setup, results, nr);
	return 0;
}

/* ---- the bar */

void demo_progress(const char *what, const char *part, uint64_t done, uint64_t total)
{
	static double drawn_at;
	char bar[BAR_COLUMNS + 1];
	size_t full = total ? (size_t)(ratio(MIN(done, total), total) * BAR_COLUMNS) : 0;
	cleanup_free char *text = NULL;

	if (demo_now() - drawn_at < BAR_SECONDS)
		return;
	drawn_at = demo_now();
	text = text_escape(part, NULL);
	memset(bar, '.', BAR_COLUMNS);
	memset(bar, '#', full);
	bar[BAR_COLUMNS] = '\0';
	(void)fprintf(stderr, "\r\033[K%-8s [%s] %3.0f %%  %.40s", what, bar, 100 * ratio(MIN(done, total), total),
		      text ? text : "");
	(void)fflush(stderr);
}

void demo_progress_clear(void)
{
	(void)fprintf(stderr, "\r\033[K");
	(void)fflush(stderr);
}
