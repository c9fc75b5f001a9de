/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A new process connects to a daemon and opens a model of 1,000 tensors that is in its memory: 100 MiB, and 4 GiB. Bar:
 * 5 ms, whatever the size.
 *
 * The process is a fork without a pager; what is measured begins with wd_connect() and ends when wd_model_open() has
 * returned. (The file of 4 GiB is holes: of opening, only its headers matter.)
 */
#include <string.h>

#include "tests/bench_util.h"
#include "tests/serve_util.h"

#define NR 1000

static struct use make(const char *dir, const char *name, uint64_t each, unsigned int slot)
{
	static struct data_tensor tensors[NR];
	static char names[NR][48];
	struct use u = { .slot = slot, .seed = 1 };

	(void)snprintf(u.path, sizeof(u.path), "%s/%s.safetensors", dir, name);
	for (size_t i = 0; i < NR; i++) {
		(void)snprintf(names[i], sizeof(names[i]), "model.layers.%zu.mlp.weight", i);
		tensors[i] = (struct data_tensor){
			.name = names[i], .dtype = "U8", .ndim = 1, .shape = { (int64_t)each }, .hole = each > MiB
		};
	}
	(void)data_write_safetensors(u.path, tensors, NR, &(struct data_opts){ .seed = 1 });
	return u;
}

/* Nanoseconds: all of it, and of that the opening. */
static int64_t do_attach(const void *arg)
{
	double begin = bench_seconds(), connected;

	if (do_connect(arg) < 0)
		return -1;
	connected = bench_seconds();
	if (do_open(arg) < 0)
		return -1;
	shared_words()[1] = (uint64_t)((bench_seconds() - connected) * 1e9);
	return (int64_t)((bench_seconds() - begin) * 1e9);
}

static void measure(const struct use *u, struct samples *all, struct samples *open)
{
	struct peer p;
	int64_t ns;

	peer_new(&p, getuid());
	ns = peer_does(&p, do_attach, u);
	if (ns <= 0)
		bench_cannot("%s", p.text);
	if (peer_does(&p, do_random, &((struct use){ .slot = u->slot, .value = u->slot ? 0 : 20, .seed = 1 })) < 0)
		bench_cannot("%s", p.text);
	peer_leave(&p);
	add(all, (double)ns / 1e6);
	add(open, (double)shared_words()[1] / 1e6);
}

int main(void)
{
	struct samples small = { 0 }, large = { 0 }, small_open = { 0 }, large_open = { 0 }, ratio = { 0 };
	size_t repeats = bench_repeats(31);
	cleanup_free char *dir = data_tmpdir();
	struct daemon d;
	struct use u[2];
	struct peer keeps;

	serve_failed = bench_failed;
	bench_begin("attach", "a new process opens a model of 1,000 tensors that is in a daemon's memory");
	bench_room(GiB, 6 * GiB);
	u[0] = make(dir, "small", 100 * MiB / NR, 0);
	u[1] = make(dir, "large", 4 * GiB / NR, 1);
	daemon_start(&d, "--budget 5G", NULL);
	bench_warm_memory(5 * GiB);
	peer_new(&keeps, getuid());
	for (int i = 0; i < 2; i++)
		if (peer_does(&keeps, do_open, &u[i]) < 0 || peer_does(&keeps, do_populate, &u[i]) < 0)
			bench_cannot("%s", keeps.text);
	if (must_stat("resident_bytes") < 4 * GiB + 99 * MiB)
		bench_cannot("the weights are not in memory");
	for (size_t i = 0; i < repeats + 1; i++) {
		struct samples skip = { 0 };

		for (size_t k = 0; k < 2; k++) {
			bool is_large = (i + k) % 2;

			measure(&u[is_large],
				!i       ? &skip :
				is_large ? &large :
					   &small,
				!i       ? &skip :
				is_large ? &large_open :
					   &small_open);
		}
		if (i)
			add(&ratio, large.v[large.nr - 1] / small.v[small.nr - 1]);
	}
	bench_note("repeats", "%zu", repeats);
	bench_row("100 MiB: connect and open", &small, "ms", BENCH_AT_MOST, 5);
	bench_row("4 GiB: connect and open", &large, "ms", BENCH_AT_MOST, 5);
	bench_row("4 GiB / 100 MiB", &ratio, "x", BENCH_NO_BAR, 0);
	bench_row("100 MiB: of that, open", &small_open, "ms", BENCH_NO_BAR, 0);
	bench_row("4 GiB: of that, open", &large_open, "ms", BENCH_NO_BAR, 0);
	peer_leave(&keeps);
	daemon_stop(&d);
	return bench_end();
}
