/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One byte of each of 300 tensors of 1 MiB: how often the pager is called, and how much is read. Bars: once a tensor,
 * and not more than the extents that these tensors overlap; in the worst of the repeats. Once in a file that has only
 * these, once for every fourth tensor of a file of 1200, where reading what nobody asked for would show; in an order
 * of the seed's.
 */
#include <string.h>

#include "tests/bench_util.h"
#include "tests/data.h"
#include "ufd/page.h"

#define NR 300
#define EACH MiB

struct side {
	char *path;
	size_t nr_tensors, step;
	struct samples faults, extents, ms;
};

static void side_make(struct side *s, size_t step)
{
	static char names[4 * NR][16];
	static struct data_tensor tensors[4 * NR];
	cleanup_free char *dir = data_tmpdir();

	s->step = step;
	s->nr_tensors = step * NR;
	s->path = data_text("%s/model.safetensors", dir);
	for (size_t i = 0; i < s->nr_tensors; i++) {
		(void)snprintf(names[i], sizeof(names[i]), "w.%04zu", i);
		tensors[i] = (struct data_tensor){
			.name = names[i], .dtype = "F16", .ndim = 2, .shape = { EACH / 2048, 1024 }
		};
	}
	data_write_safetensors(s->path, tensors, s->nr_tensors, &(struct data_opts){ .seed = 3 });
}

static void worst(struct samples *s, double value)
{
	if (!s->nr || value > s->v[0])
		*s = (struct samples){ .v = { value }, .nr = 1 };
}

static void measure(struct side *s, uint64_t seed)
{
	struct wd_stats touched = { .size = sizeof(touched) }, st = { .size = sizeof(st) };
	struct wd *wd = bench_connect();
	uint64_t extent = extent_bytes(), overlapped = 0;
	cleanup_free bool *needed = calloc(s->step * NR * EACH / extent + 2, sizeof(*needed));
	size_t order[NR];
	struct wd_model *m;
	double t;

	bench_uncache(s->path);
	if (!needed || wd_model_open(wd, s->path, NULL, &m) < 0)
		bench_cannot("%s", wd_error());
	for (size_t i = 0; i < NR; i++) {
		size_t k = (size_t)(seed = seed * 6364136223846793005u + 1442695040888963407u, seed >> 33) % (i + 1);

		order[i] = order[k];
		order[k] = i * s->step;
	}
	t = bench_seconds();
	for (size_t i = 0; i < NR; i++)
		(void)*(volatile unsigned char *)wd_model_tensor_at(m, order[i])->data;
	t = bench_seconds() - t;
	if (wd_model_stats(m, &touched) < 0)
		bench_cannot("%s", wd_error());
	for (size_t i = 0; i < NR; i++) {
		const struct wd_tensor *w = wd_model_tensor_at(m, order[i]);

		if (w->nbytes != EACH || data_check(w->data, EACH, 3, w->file_offset) >= 0)
			bench_cannot("%s: wrong bytes", w->name);
		for (uint64_t e = w->file_offset / extent; e <= (w->file_offset + EACH - 1) / extent; e++)
			overlapped += needed[e] ? 0 : (needed[e] = true);
	}
	/* After every byte was looked at: what was still being read counts as well. */
	if (wd_model_stats(m, &st) < 0)
		bench_cannot("%s", wd_error());
	worst(&s->faults, (double)touched.faults);
	worst(&s->extents, (double)st.read_bytes / (double)(overlapped * extent));
	add(&s->ms, t * 1e3);
	wd_model_close(m);
	wd_disconnect(wd);
}

int main(void)
{
	struct side all = { 0 }, fourth = { 0 };
	size_t repeats = bench_repeats(7);

	bench_begin("faults", "one byte of each of 300 tensors of 1 MiB");
	bench_room(5 * NR * EACH, 3 * GiB);
	side_make(&all, 1);
	side_make(&fourth, 4);
	bench_warm_memory(GiB);
	for (size_t i = 0; i < repeats; i++) {
		measure(i % 2 ? &fourth : &all, i);
		measure(i % 2 ? &all : &fourth, i);
	}
	bench_note("repeats", "%zu", repeats);
	bench_row("a file of 300: faults", &all.faults, "", BENCH_AT_MOST, NR);
	bench_row("a file of 300: bytes read / extents overlapped", &all.extents, "x", BENCH_AT_MOST, 1);
	bench_row("every 4th of 1200: faults", &fourth.faults, "", BENCH_AT_MOST, NR);
	bench_row("every 4th of 1200: read / extents overlapped", &fourth.extents, "x", BENCH_AT_MOST, 1);
	bench_row("a file of 300", &all.ms, "ms", BENCH_NO_BAR, 0);
	bench_row("every 4th of 1200", &fourth.ms, "ms", BENCH_NO_BAR, 0);
	free(all.path);
	free(fourth.path);
	return bench_end();
}
