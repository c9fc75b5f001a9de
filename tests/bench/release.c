/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Releasing 1 GiB that is in memory and was touched all over. Bars: 5 ms in the caller; the memory free, by the
 * arena's own account of its blocks, within 100 ms of the call. munmap() of as much malloc'ed memory is shown beside.
 */
#include <inttypes.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>

#include "lib/model.h"
#include "tests/bench_util.h"
#include "tests/data.h"
#include "ufd/internal.h"

#define SIZE GiB

static double munmap_ms(void)
{
	void *p = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	double t;

	if (p == MAP_FAILED)
		bench_cannot("no memory: %s", strerror(errno));
	t = bench_seconds();
	(void)munmap(p, SIZE);
	return (bench_seconds() - t) * 1e3;
}

int main(void)
{
	struct samples caller = { 0 }, freed = { 0 }, unmapped = { 0 };
	size_t repeats = bench_repeats(15);
	cleanup_free char *path = NULL;
	struct wd_model *m;
	struct view *v;
	struct wd *wd;

	bench_begin("release", "release of 1 GiB that was touched all over");
	path = bench_file(SIZE, 4 * SIZE, 4);
	wd = bench_connect();
	if (wd_model_open_raw(wd, path, 0, 0, NULL, &m) < 0)
		bench_cannot("%s", wd_error());
	v = model_file_at(m, 0)->view;
	for (size_t i = 0; i < repeats; i++) {
		double t, in_call;
		struct wd_job *job;

		bench_warm_memory(SIZE + SIZE / 2);
		if (i % 2)
			add(&unmapped, munmap_ms());
		if (wd_populate(m, NULL, &job) < 0 || wd_job_wait(job, -1) < 0)
			bench_cannot("%s", wd_error());
		wd_job_free(job);
		(void)bench_touch(wd_model_tensor_at(m, 0)->data, SIZE);
		if (arena_allocated(&v->arena) < SIZE)
			bench_cannot("only %" PRIu64 " MiB of 1024 are in memory", arena_allocated(&v->arena) / MiB);

		bench_realtime(true);
		t = bench_seconds();
		if (wd_model_release(m) < 0)
			bench_cannot("%s", wd_error());
		in_call = bench_seconds() - t;
		/* One page is the sentinel's part of the arena. */
		while (arena_allocated(&v->arena) > page_bytes() && bench_seconds() - t < 10)
			(void)sched_yield();
		add(&freed, (bench_seconds() - t) * 1e3);
		bench_realtime(false);
		add(&caller, in_call * 1e3);
		if (arena_allocated(&v->arena) > page_bytes())
			bench_cannot("%" PRIu64 " MiB are still in memory after 10 s",
				     arena_allocated(&v->arena) / MiB);
		if (!(i % 2))
			add(&unmapped, munmap_ms());
	}
	bench_note("repeats", "%zu", repeats);
	bench_row("in the caller", &caller, "ms", BENCH_AT_MOST, 5);
	bench_row("until it is free", &freed, "ms", BENCH_AT_MOST, 100);
	bench_row("munmap() of 1 GiB of malloc's kind", &unmapped, "ms", BENCH_NO_BAR, 0);
	wd_model_close(m);
	wd_disconnect(wd);
	return bench_end();
}
