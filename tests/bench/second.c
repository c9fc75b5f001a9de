/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A second process touches 1 GiB of weights that a daemon has in memory, against a process that maps the same file from
 * the page cache. Bar: 1.2 times as long, on huge pages. One tensor of 1 GiB, and 64 of 16 MiB.
 *
 * Each time a new process; only the touches are measured. The page cache is filled by large reads, so that it has large
 * folios.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/bench_util.h"
#include "tests/serve_util.h"

#define SIZE GiB
#define SEED 1

static struct use make(const char *dir, size_t nr, unsigned int slot)
{
	static struct data_tensor tensors[64];
	static char names[64][16];
	struct use u = { .slot = slot, .seed = SEED };

	(void)snprintf(u.path, sizeof(u.path), "%s/of-%zu.safetensors", dir, nr);
	for (size_t i = 0; i < nr; i++) {
		(void)snprintf(names[i], sizeof(names[i]), "layer.%zu", i);
		tensors[i] = (struct data_tensor){
			.name = names[i], .dtype = "U8", .ndim = 1, .shape = { (int64_t)(SIZE / nr) }
		};
	}
	(void)data_write_safetensors(u.path, tensors, nr, &(struct data_opts){ .seed = SEED });
	bench_uncache(u.path);
	return u;
}

static int64_t do_touch_daemon(const void *arg)
{
	const struct use *u = arg;
	double t;

	if (do_open(u) < 0)
		return -1;
	t = bench_seconds();
	for (size_t i = 0; i < wd_model_nr_tensors(my_models[u->slot]); i++) {
		const struct wd_tensor *w = wd_model_tensor_at(my_models[u->slot], i);

		(void)bench_touch(w->data, w->nbytes);
	}
	t = bench_seconds() - t;
	/* (the daemon's reads are looked at outside) */
	return (int64_t)(t * 1e9);
}

static int64_t do_touch_mmap(const void *arg)
{
	const struct use *u = arg;
	cleanup_close int fd = open(u->path, O_RDONLY | O_CLOEXEC);
	void *p = fd < 0 ? MAP_FAILED : mmap(NULL, SIZE, PROT_READ, MAP_PRIVATE, fd, 0);
	double t;

	if (p == MAP_FAILED)
		return peer_say("%s: %s", u->path, strerror(errno));
	t = bench_seconds();
	(void)bench_touch(p, SIZE);
	t = bench_seconds() - t;
	(void)munmap(p, SIZE);
	return (int64_t)(t * 1e9);
}

static double measure(const struct use *u, peer_fn fn, struct samples *ms)
{
	struct peer p;
	int64_t ns;

	peer_new(&p, getuid());
	ns = peer_does(&p, fn, u);
	if (ns <= 0)
		bench_cannot("%s", p.text);
	peer_leave(&p);
	add(ms, (double)ns / 1e6);
	return (double)ns;
}

int main(void)
{
	struct samples ms[2] = { 0 }, ratio[2] = { 0 }, mmap_ms = { 0 }, faults = { 0 };
	size_t repeats = bench_repeats(15);
	cleanup_free char *dir = data_tmpdir();
	struct daemon d;
	struct use u[2];
	struct peer keeps;
	uint64_t read, huge;

	serve_failed = bench_failed;
	bench_begin("second", "a second process touches 1 GiB that a daemon has, against mmap from the page cache");
	bench_room(2 * SIZE, 6 * SIZE);
	u[0] = make(dir, 1, 0);
	u[1] = make(dir, 64, 1);
	daemon_start(&d, "--budget 3G", NULL);
	bench_warm_memory(4 * SIZE);
	peer_new(&keeps, getuid());
	for (int i = 0; i < 2; i++)
		if (peer_does(&keeps, do_open, &u[i]) < 0 || peer_does(&keeps, do_check, &u[i]) < 0)
			bench_cannot("%s", keeps.text);
	huge = must_stat("huge_bytes");
	if (huge < 2 * SIZE)
		bench_cannot("%" PRIu64 " of 2048 MiB are on huge pages; the bar is about huge pages", huge / MiB);
	bench_recache(u[0].path);
	read = must_stat("read_bytes");
	for (size_t i = 0; i < repeats; i++) {
		double ns[2] = { 0 }, by_mmap = 0;

		/* Each goes first as often as last. */
		for (size_t k = 0; k < 3; k++) {
			uint64_t before = must_stat("faults");

			switch ((i + k) % 3) {
			case 0:
				by_mmap = measure(&u[0], do_touch_mmap, &mmap_ms);
				break;
			case 1:
				ns[0] = measure(&u[0], do_touch_daemon, &ms[0]);
				add(&faults, (double)(must_stat("faults") - before));
				break;
			default:
				ns[1] = measure(&u[1], do_touch_daemon, &ms[1]);
				break;
			}
		}
		for (int k = 0; k < 2; k++)
			add(&ratio[k], ns[k] / by_mmap);
	}
	if (must_stat("read_bytes") != read)
		bench_cannot("the weights were read again meanwhile");
	bench_note("repeats", "%zu", repeats);
	bench_row("one tensor of 1 GiB: time / mmap's", &ratio[0], "x", BENCH_AT_MOST, 1.2);
	bench_row("64 tensors of 16 MiB: time / mmap's", &ratio[1], "x", BENCH_AT_MOST, 1.2);
	bench_row("mmap", &mmap_ms, "ms", BENCH_NO_BAR, 0);
	bench_row("one tensor", &ms[0], "ms", BENCH_NO_BAR, 0);
	bench_row("one tensor: faults", &faults, "", BENCH_NO_BAR, 0);
	bench_row("64 tensors", &ms[1], "ms", BENCH_NO_BAR, 0);
	peer_leave(&keeps);
	daemon_stop(&d);
	return bench_end();
}
