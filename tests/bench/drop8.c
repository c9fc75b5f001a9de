/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 1 GiB that eight clients have mapped and touched is dropped. Bar: 20 ms from the request to the answer; the memory is
 * free then.
 */
#include "tests/bench_util.h"
#include "tests/serve_util.h"

#define NR 8
#define SIZE GiB
#define SEED 1

int main(void)
{
	struct samples ms = { 0 }, left = { 0 }, tool = { 0 };
	size_t repeats = bench_repeats(9);
	struct use u = { .seed = SEED };
	struct data_tensor t = { .name = "w", .dtype = "U8", .ndim = 1, .shape = { (int64_t)SIZE } };
	cleanup_free char *dir = data_tmpdir();
	struct daemon d;
	struct peer p[NR];
	int fd;

	serve_failed = bench_failed;
	bench_begin("drop8", "1 GiB in use by eight clients is dropped");
	bench_room(SIZE, 3 * SIZE);
	(void)snprintf(u.path, sizeof(u.path), "%s/model.safetensors", dir);
	(void)data_write_safetensors(u.path, &t, 1, &(struct data_opts){ .seed = SEED });
	daemon_start(&d, "--budget 2G", NULL);
	bench_warm_memory(2 * SIZE);
	for (size_t i = 0; i < NR; i++) {
		peer_new(&p[i], getuid());
		if (peer_does(&p[i], do_open, &u) < 0)
			bench_cannot("%s", p[i].text);
	}
	fd = admin_connect();
	if (fd < 0)
		bench_cannot("the daemon does not answer");
	for (size_t k = 0; k < 2 * repeats; k++) {
		double begin;

		for (size_t i = 0; i < NR; i++)
			if (peer_does(&p[i], do_touch, &u) < 0)
				bench_cannot("%s", p[i].text);
		if (must_stat("resident_bytes") < SIZE)
			bench_cannot("the weights are not in memory");
		begin = bench_seconds();
		if (k % 2) {
			must_tool("drop --all");
			add(&tool, (bench_seconds() - begin) * 1e3);
			continue;
		}
		if (admin_drop_all(fd) < 0)
			bench_cannot("the daemon does not drop");
		add(&ms, (bench_seconds() - begin) * 1e3);
		add(&left, (double)held_by(d.pid).arena_bytes / (double)MiB);
	}
	for (size_t i = 0; i < NR; i++) {
		if (peer_does(&p[i], do_check, &u) < 0)
			bench_cannot("%s", p[i].text);
		peer_leave(&p[i]);
	}
	(void)close(fd);
	bench_note("repeats", "%zu", repeats);
	bench_row("the daemon's answer", &ms, "ms", BENCH_AT_MOST, 20);
	bench_row("in memory then", &left, "MiB", BENCH_AT_MOST, 4);
	bench_row("weightd drop --all, as a program", &tool, "ms", BENCH_NO_BAR, 0);
	daemon_stop(&d);
	return bench_end();
}
