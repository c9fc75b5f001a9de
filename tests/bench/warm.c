/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A full touch of weights that are in memory, by a view that has not seen them yet, against mmap of the same file
 * from the page cache. Bar: not slower, on huge pages.
 *
 * A process has one view of a file, so the new one is made of it (bench_renew()); what another process would get.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/bench_util.h"
#include "tests/data.h"

#define SIZE GiB
#define SEED 1
#define TENSOR (16 * MiB)

struct side {
	struct wd_model *model;
	const unsigned char *data;
	struct samples ratio, ms, faults;
};

/* Into memory, and every byte of it right. */
static void side_open(struct side *s, struct wd *wd, const char *path, bool raw)
{
	struct wd_stats st = { .size = sizeof(st) };
	const struct wd_tensor *first;
	struct wd_job *job;
	int r = raw ? wd_model_open_raw(wd, path, 0, 0, NULL, &s->model) : wd_model_open(wd, path, NULL, &s->model);

	if (r < 0 || wd_populate(s->model, NULL, &job) < 0 || wd_job_wait(job, -1) < 0 ||
	    wd_model_stats(s->model, &st) < 0)
		bench_cannot("%s", wd_error());
	wd_job_free(job);
	first = wd_model_tensor_at(s->model, 0);
	s->data = first->data;
	if (data_check(s->data, SIZE, SEED, first->file_offset) >= 0)
		bench_cannot("%s: wrong bytes", path);
	if (st.resident_bytes < SIZE || st.huge_bytes < SIZE)
		bench_cannot("%" PRIu64 " MiB of 1024 are in memory, %" PRIu64
			     " on huge pages; the bar is about huge pages",
			     st.resident_bytes / MiB, st.huge_bytes / MiB);
}

static double touch_view(struct side *s)
{
	struct wd_stats before = { .size = sizeof(before) }, after = { .size = sizeof(after) };
	double t;

	bench_renew(s->model);
	(void)wd_model_stats(s->model, &before);
	bench_realtime(true);
	t = bench_seconds();
	(void)bench_touch(s->data, SIZE);
	t = bench_seconds() - t;
	bench_realtime(false);
	(void)wd_model_stats(s->model, &after);
	if (after.read_bytes != before.read_bytes)
		bench_cannot("the weights were read again meanwhile");
	add(&s->faults, (double)(after.faults - before.faults));
	add(&s->ms, t * 1e3);
	return t;
}

static double touch_mmap(const char *path)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	double t;
	void *p;

	bench_recache(path);
	p = fd < 0 ? MAP_FAILED : mmap(NULL, SIZE, PROT_READ, MAP_PRIVATE, fd, 0);
	if (p == MAP_FAILED)
		bench_cannot("%s: %s", path, strerror(errno));
	bench_realtime(true);
	t = bench_seconds();
	(void)bench_touch(p, SIZE);
	t = bench_seconds() - t;
	bench_realtime(false);
	(void)munmap(p, SIZE);
	return t;
}

static char *write_tensors(void)
{
	static struct data_tensor tensors[SIZE / TENSOR];
	static char names[ARRAY_SIZE(tensors)][16];
	cleanup_free char *dir = data_tmpdir();
	char *path = data_text("%s/model.safetensors", dir);

	for (size_t i = 0; i < ARRAY_SIZE(tensors); i++) {
		(void)snprintf(names[i], sizeof(names[i]), "layer.%zu", i);
		tensors[i] = (struct data_tensor){ .name = names[i], .dtype = "U8", .ndim = 1, .shape = { TENSOR } };
	}
	data_write_safetensors(path, tensors, ARRAY_SIZE(tensors), &(struct data_opts){ .seed = SEED });
	return path;
}

int main(void)
{
	cleanup_free char *raw = NULL, *model = NULL;
	struct side one = { 0 }, many = { 0 };
	struct samples mmap_ms = { 0 };
	size_t repeats = bench_repeats(15);
	struct wd *wd;

	bench_begin("warm", "touch 1 GiB in memory by a new view, against mmap of the file from the page cache");
	bench_room(2 * SIZE, 5 * SIZE);
	wd = bench_connect();
	raw = bench_file(SIZE, 0, SEED);
	model = write_tensors();
	bench_uncache(raw);
	bench_uncache(model);
	bench_warm_memory(2 * SIZE);
	side_open(&one, wd, raw, true);
	side_open(&many, wd, model, false);
	(void)unlink(model);

	for (size_t i = 0; i < repeats; i++) {
		double t_one = 0, t_many = 0, t_mmap = 0;

		/* Each goes first as often as last. */
		for (size_t k = 0; k < 3; k++) {
			switch ((i + k) % 3) {
			case 0:
				t_mmap = touch_mmap(raw);
				break;
			case 1:
				t_one = touch_view(&one);
				break;
			default:
				t_many = touch_view(&many);
				break;
			}
		}
		add(&one.ratio, t_one / t_mmap);
		add(&many.ratio, t_many / t_mmap);
		add(&mmap_ms, t_mmap * 1e3);
	}
	bench_note("repeats", "%zu", repeats);
	bench_row("one tensor of 1 GiB: time / mmap's", &one.ratio, "x", BENCH_AT_MOST, 1.0);
	bench_row("64 tensors of 16 MiB: time / mmap's", &many.ratio, "x", BENCH_AT_MOST, 1.0);
	bench_row("mmap", &mmap_ms, "ms", BENCH_NO_BAR, 0);
	bench_row("one tensor", &one.ms, "ms", BENCH_NO_BAR, 0);
	bench_row("one tensor: faults", &one.faults, "", BENCH_NO_BAR, 0);
	bench_row("64 tensors", &many.ms, "ms", BENCH_NO_BAR, 0);
	bench_row("64 tensors: faults", &many.faults, "", BENCH_NO_BAR, 0);
	wd_model_close(one.model);
	wd_model_close(many.model);
	wd_disconnect(wd);
	return bench_end();
}
