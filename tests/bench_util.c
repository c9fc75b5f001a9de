/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench_util.h"

#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <time.h>

#include "lib/model.h"
#include "tests/data.h"
#include "ufd/internal.h"

#define ROWS_MAX 16

struct row {
	char what[64];
	const char *unit;
	double median, q1, q3, min, max, bar;
	enum bench_bar kind;
};

static const char *name, *title;
static double load_before;
static struct row rows[ROWS_MAX];
static size_t nr_rows;
static json_t *notes;

static double load_now(void)
{
	double load = 0;

	return getloadavg(&load, 1) == 1 ? load : -1;
}

void add(struct samples *s, double value)
{
	if (s->nr == BENCH_REPEATS_MAX)
		abort();
	s->v[s->nr++] = value;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* The value below which a share of the samples lies, between two of them in proportion. */
static double quantile(const struct samples *s, double share)
{
	struct samples sorted = *s;
	double at = share * (double)(s->nr - 1), below;
	size_t i = (size_t)at;

	qsort(sorted.v, sorted.nr, sizeof(sorted.v[0]), by_value);
	below = sorted.v[i];
	return i + 1 == s->nr ? below : below + (at - (double)i) * (sorted.v[i + 1] - below);
}

double median(const struct samples *s)
{
	return quantile(s, 0.5);
}

void bench_begin(const char *bench_name, const char *what)
{
	name = bench_name;
	title = what;
	load_before = load_now();
	notes = json_object();
}

void bench_note(const char *key, const char *fmt, ...)
{
	char text[256];
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	(void)json_object_set_new(notes, key, json_string(text));
}

void bench_row(const char *what, const struct samples *s, const char *unit, enum bench_bar kind, double bar)
{
	struct row *r = &rows[nr_rows++];

	if (nr_rows == ROWS_MAX || !s->nr)
		abort();
	*r = (struct row){ .unit = unit,
			   .median = median(s),
			   .q1 = quantile(s, 0.25),
			   .q3 = quantile(s, 0.75),
			   .min = quantile(s, 0),
			   .max = quantile(s, 1),
			   .kind = kind,
			   .bar = bar };
	(void)snprintf(r->what, sizeof(r->what), "%s", what);
}

static bool is_met(const struct row *r)
{
	return r->kind == BENCH_AT_MOST ? r->median <= r->bar : r->median >= r->bar;
}

/* Three digits that say something: 1024, 102, 10.2, 1.02. */
static const char *number(char text[static 16], double v)
{
	(void)snprintf(text, 16, "%.*f", v >= 99.95 ? 0 : v >= 9.995 ? 1 : 2, v);
	return text;
}

static void print_row(const struct row *r)
{
	char m[16], q1[16], q3[16], bar[16];

	(void)printf("  %-46s %7s %-7s %7s .. %-7s", r->what, number(m, r->median), r->unit, number(q1, r->q1),
		     number(q3, r->q3));
	if (r->kind != BENCH_NO_BAR)
		(void)printf("  at %s %s %s", r->kind == BENCH_AT_MOST ? "most" : "least", number(bar, r->bar),
			     is_met(r) ? "met" : "MISSED");
	(void)printf("\n");
}

/* To $BENCH_JSON. Owns `j`. */
static void write_json(json_t *j)
{
	const char *path = getenv("BENCH_JSON");

	if (path && (!j || json_dump_file(j, path, JSON_INDENT(2) | JSON_REAL_PRECISION(6)) < 0)) {
		(void)fprintf(stderr, "%s: cannot write %s: %s\n", name, path, strerror(errno));
		exit(1);
	}
	json_decref(j);
}

static json_t *row_json(const struct row *r)
{
	json_t *j = json_pack("{s:s, s:s, s:f, s:f, s:f, s:f, s:f}", "what", r->what, "unit", r->unit, "median",
			      r->median, "q1", r->q1, "q3", r->q3, "min", r->min, "max", r->max);

	if (r->kind != BENCH_NO_BAR) {
		(void)json_object_set_new(j, r->kind == BENCH_AT_MOST ? "at_most" : "at_least", json_real(r->bar));
		(void)json_object_set_new(j, "met", json_boolean(is_met(r)));
	}
	return j;
}

int bench_end(void)
{
	json_t *list = json_array(), *note;
	double load = load_now();
	const char *key;
	bool met = true;

	(void)printf("%s: %s (load %.1f .. %.1f)\n", name, title, load_before, load);
	json_object_foreach(notes, key, note)
		(void)printf("  %s: %s\n", key, json_string_value(note));
	(void)printf("  %-46s %7s %-7s %18s\n", "", "median", "", "quartiles   ");
	for (size_t i = 0; i < nr_rows; i++) {
		print_row(&rows[i]);
		met &= rows[i].kind == BENCH_NO_BAR || is_met(&rows[i]);
		(void)json_array_append_new(list, row_json(&rows[i]));
	}
	(void)printf("\n");
	(void)fflush(stdout);
	write_json(json_pack("{s:s, s:s, s:b, s:[f, f], s:o, s:o}", "name", name, "what", title, "met", met, "load",
			     load_before, load, "notes", notes, "rows", list));
	return 0;
}

void bench_cannot(const char *fmt, ...)
{
	char text[1024];
	va_list ap;

	va_start(ap, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	(void)printf("%s: cannot be measured: %s\n\n", name, text);
	(void)fflush(stdout);
	write_json(json_pack("{s:s, s:s, s:n, s:s}", "name", name, "what", title, "met", "error", text));
	exit(1);
}

void bench_failed(const char *text)
{
	bench_cannot("%s", text);
}

size_t bench_repeats(size_t usual)
{
	const char *text = getenv("BENCH_REPEATS");
	unsigned long n = text ? strtoul(text, NULL, 10) : 0;

	return n ? MIN(n, (unsigned long)BENCH_REPEATS_MAX) : usual;
}

/* ------------------------------------------------------------------ files and memory */

static uint64_t memory_available(void)
{
	cleanup_fclose FILE *f = fopen("/proc/meminfo", "re");
	uint64_t kib = 0;
	char line[128];

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1)
			break;
	return kib * KiB;
}

void bench_room(uint64_t disk_bytes, uint64_t memory_bytes)
{
	const char *tmp = getenv("TMPDIR");
	struct statvfs fs;

	tmp = tmp && *tmp ? tmp : "/var/tmp";
	if (statvfs(tmp, &fs) < 0)
		bench_cannot("%s: %s", tmp, strerror(errno));
	if (fs.f_bavail * fs.f_frsize < disk_bytes + GiB / 4)
		bench_cannot("%s has %" PRIu64 " MiB free, needed are %" PRIu64 "; set TMPDIR", tmp,
			     (uint64_t)(fs.f_bavail * fs.f_frsize) / MiB, (disk_bytes + GiB / 4) / MiB);
	if (memory_available() < memory_bytes)
		bench_cannot("%" PRIu64 " MiB of memory are available, needed are %" PRIu64, memory_available() / MiB,
			     memory_bytes / MiB);
}

char *bench_file(uint64_t nbytes, uint64_t memory_bytes, uint64_t seed)
{
	cleanup_free char *dir = NULL;
	char *path;

	bench_room(nbytes, memory_bytes);
	dir = data_tmpdir();
	path = data_text("%s/weights", dir);
	data_write_seed(path, nbytes, seed);
	return path;
}

void bench_uncache(const char *path)
{
	uint64_t left = data_drop_cache(path);

	if (left)
		bench_cannot("%s: %" PRIu64 " KiB stay in the page cache", path, left / KiB);
}

void bench_recache(const char *path)
{
	const size_t chunk = 16 * MiB;
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	cleanup_free char *buf = malloc(chunk);
	ssize_t n;

	bench_uncache(path);
	if (fd < 0 || !buf)
		bench_cannot("%s: %s", path, strerror(errno));
	while ((n = read(fd, buf, chunk)) > 0)
		;
	if (n < 0)
		bench_cannot("%s: %s", path, strerror(errno));
}

void bench_warm_memory(uint64_t nbytes)
{
	volatile char *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED)
		bench_cannot("no memory: %s", strerror(errno));
	(void)madvise((void *)p, nbytes, MADV_HUGEPAGE);
	for (uint64_t i = 0; i < nbytes; i += 4096)
		p[i] = 1;
	(void)munmap((void *)p, nbytes);
}

void bench_realtime(bool on)
{
	const char *text = getenv("BENCH_REALTIME");
	struct sched_param param = { .sched_priority = on ? 1 : 0 };

	if (!text || strcmp(text, "1"))
		return;
	if (sched_setscheduler(0, on ? SCHED_FIFO : SCHED_OTHER, &param) < 0)
		bench_cannot("BENCH_REALTIME=1: %s", strerror(errno));
	bench_note("scheduling", "real-time");
}

double bench_seconds(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

uint64_t bench_touch(const void *p, uint64_t nbytes)
{
	const volatile unsigned char *at = p;
	uint64_t sum = 0;

	for (uint64_t i = 0; i < nbytes; i += 4096)
		sum += at[i];
	return sum;
}

struct wd *bench_connect(void)
{
	struct wd_options options = { .size = sizeof(options), .way = WD_WAY_EMBEDDED };
	struct wd *wd;

	bench_realtime(true); /* for its threads */
	if (wd_connect(&options, &wd) < 0)
		bench_cannot("%s", wd_error());
	bench_realtime(false);
	return wd;
}

/* ------------------------------------------------------------------ inside of the pager */

static bool is_quiet(const struct view *v)
{
	if (v->busy || v->pager->nr_drops)
		return false;
	for (size_t i = 0; i < v->nr_ext; i++)
		if (v->ext[i].state != EXT_READY || !list_empty(&v->ext[i].queue) || v->ext[i].inflight)
			return false;
	return true;
}

void bench_renew(struct wd_model *m)
{
	struct view *v = model_file_at(m, 0)->view;
	struct pager *p = v->pager;
	double until = bench_seconds() + 10;
	sigset_t saved;

	pager_lock(p, &saved);
	while (!is_quiet(v)) {
		pager_unlock(p, &saved);
		if (bench_seconds() > until)
			bench_cannot("the pager does not come to rest");
		(void)sched_yield();
		pager_lock(p, &saved);
	}
	for (size_t i = 0; i < v->nr_ext; i++) {
		v->ext[i].flags &= ~(X_CONT | X_TOUCHED);
		ext_open_flags(&v->ext[i], false);
		ext_settle(&v->ext[i]);
	}
	memset(&v->streams, 0, sizeof(v->streams));
	if (uffd_register(p->mms[0].uffd, v->base, v->bytes, false) < 0 ||
	    madvise(v->base, v->bytes, MADV_DONTNEED) < 0)
		bench_cannot("the view cannot be armed: %s", strerror(errno));
	pager_unlock(p, &saved);
}
