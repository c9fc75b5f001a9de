/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the benchmarks share: repeats that are spread over one run, medians with their spread, the bar and whether it
 * is met, one table row and one JSON object for each.
 *
 *	bench_begin("warm", "a full touch of 1 GiB ...");
 *	for each repeat: measure both sides, in turns first; add(&ratio, ours / theirs);
 *	bench_row("touch, weightd / mmap", &ratio, "x", BENCH_AT_MOST, 1.0);
 *	return bench_end();
 *
 * A missed bar is a result; only what could not be measured fails (bench_cannot()).
 * Threads: one.
 */
#ifndef WD_TESTS_BENCH_UTIL_H
#define WD_TESTS_BENCH_UTIL_H

#include "lib/base/base.h"
#include "lib/include/weightd.h"

#define BENCH_REPEATS_MAX 64

struct samples {
	double v[BENCH_REPEATS_MAX];
	size_t nr;
};
void add(struct samples *s, double value);
double median(const struct samples *s);

/* `what` is measured, in one line. */
void bench_begin(const char *name, const char *what);
/* Goes into the JSON, and as a line above the table. */
void bench_note(const char *key, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
enum bench_bar { BENCH_NO_BAR, BENCH_AT_MOST, BENCH_AT_LEAST };
/* The median is held against the bar. */
void bench_row(const char *what, const struct samples *s, const char *unit, enum bench_bar kind, double bar);
/* The rows as a table; the JSON goes to $BENCH_JSON if that is set. Returns main()'s result. */
int bench_end(void);
/* "name: cannot be measured: why", and exits with 1. */
void bench_cannot(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));

void bench_failed(const char *text) __attribute__((noreturn)); /* the same, for serve_failed */

/* How often to measure: `usual`, or $BENCH_REPEATS. */
size_t bench_repeats(size_t usual);

/* A file of a seed's bytes in the temporary folder, on disk. Looks first whether there is room for it there, and
 * for `memory_bytes` in memory. Owner: the caller, free() the path; the file goes when the program ends. */
char *bench_file(uint64_t nbytes, uint64_t memory_bytes, uint64_t seed);
void bench_room(uint64_t disk_bytes, uint64_t memory_bytes);
/* Out of the page cache, all of it. */
void bench_uncache(const char *path);
/* Out of the page cache and read back by large reads. */
void bench_recache(const char *path);
/* Memory that the machine has not used for a while may cost 20 times as much at its first touch (a hypervisor takes
 * free pages back): touches as much and frees it. */
void bench_warm_memory(uint64_t nbytes);

/* With $BENCH_REALTIME=1 (root): what runs between on and off, and threads started there, goes before all ordinary
 * programs, so that another program's load does not decide. Off by default; the JSON tells. */
void bench_realtime(bool on);

double bench_seconds(void);
/* Reads one byte a 4 KiB page. */
uint64_t bench_touch(const void *p, uint64_t nbytes);

/* The view of a model's first file as a process gets it that has touched nothing: armed as a whole, page tables empty,
 * read-ahead knowing nothing. That is the worker's work; here it is asleep, and stays so under the lock. */
void bench_renew(struct wd_model *m);

/* A pager in this process with kernel-mode faults, the way that the bars are about. */
struct wd *bench_connect(void);

#endif
