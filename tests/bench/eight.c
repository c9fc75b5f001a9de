/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Eight processes start at once and read the same 1 GiB, which is not in memory. Bars: bytes read from the disk 1.02
 * times the file; memory of all of them with the daemon and its keeper together (PSS) 1.05 times the file.
 *
 * Beside it, what the same costs one process.
 */
#include <string.h>

#include "tests/bench_util.h"
#include "tests/serve_util.h"

#define NR 8
#define TENSORS 64
#define SIZE GiB
#define SEED 1

static int64_t do_open_and_touch(const void *arg)
{
	return do_open(arg) < 0 ? -1 : do_touch(arg);
}

/* Seconds until all have touched all of it. */
static double run(struct use *u, struct peer *p, size_t nr)
{
	double t;

	for (size_t i = 0; i < nr; i++)
		peer_new(&p[i], getuid());
	t = bench_seconds();
	for (size_t i = 0; i < nr; i++)
		peer_begin(&p[i], "touches", do_open_and_touch, u, sizeof(*u));
	for (size_t i = 0; i < nr; i++)
		if (peer_end(&p[i]) < 0)
			bench_cannot("%s", p[i].text);
	return bench_seconds() - t;
}

int main(void)
{
	struct samples read = { 0 }, pss = { 0 }, eight = { 0 }, one = { 0 };
	static struct data_tensor tensors[TENSORS];
	static char names[TENSORS][16];
	size_t repeats = bench_repeats(5);
	cleanup_free char *dir = data_tmpdir();
	struct use u = { .seed = SEED };
	struct daemon d;
	struct peer p[NR];
	uint64_t size;

	serve_failed = bench_failed;
	bench_begin("eight", "eight processes at once read 1 GiB, cold");
	bench_room(SIZE, 3 * SIZE);
	(void)snprintf(u.path, sizeof(u.path), "%s/model.safetensors", dir);
	for (size_t i = 0; i < TENSORS; i++) {
		(void)snprintf(names[i], sizeof(names[i]), "layer.%zu", i);
		tensors[i] = (struct data_tensor){
			.name = names[i], .dtype = "U8", .ndim = 1, .shape = { (int64_t)(SIZE / TENSORS) }
		};
	}
	(void)data_write_safetensors(u.path, tensors, TENSORS, &(struct data_opts){ .seed = SEED });
	size = file_bytes(u.path);
	daemon_start(&d, "--budget 2G", NULL);
	bench_warm_memory(2 * SIZE);
	for (size_t i = 0; i < repeats; i++) {
		for (size_t k = 0; k < 2; k++) {
			bool all = (i + k) % 2;
			uint64_t before, sum = 0;
			pid_t family[8];
			double t;

			must_tool("drop --all");
			bench_uncache(u.path);
			before = must_stat("read_bytes");
			t = run(&u, p, all ? NR : 1);
			add(all ? &eight : &one, t);
			if (all) {
				add(&read, (double)(must_stat("read_bytes") - before) / (double)size);
				for (size_t n = 0; n < NR; n++)
					sum += pss_of(p[n].pid);
				for (size_t n = daemon_family(&d, family, ARRAY_SIZE(family)); n-- > 0;)
					sum += pss_of(family[n]);
				add(&pss, (double)sum / (double)size);
			}
			for (size_t n = 0; n < (all ? NR : 1); n++) {
				if (peer_does(&p[n], do_check, &u) < 0)
					bench_cannot("%s", p[n].text);
				peer_leave(&p[n]);
			}
		}
	}
	bench_note("repeats", "%zu", repeats);
	bench_row("bytes read / the file's", &read, "x", BENCH_AT_MOST, 1.02);
	bench_row("PSS of all, the daemon's too / the file's", &pss, "x", BENCH_AT_MOST, 1.05);
	bench_row("eight", &eight, "s", BENCH_NO_BAR, 0);
	bench_row("one", &one, "s", BENCH_NO_BAR, 0);
	daemon_stop(&d);
	return bench_end();
}
