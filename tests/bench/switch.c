/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Three models of 512 MiB in turn, 20 switches, with memory for one and a half: by a daemon with that budget, by
 * read(2) into malloc'd memory and by mmap in a memory cgroup with that limit; in one process, and in one for each
 * model. What is measured is a switch: from the last touch of one model to the last touch of the next, a byte a page.
 * No bar.
 *
 * read(2) frees a model's memory before it reads the next one: two have no room. Needs root (the cgroup).
 */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>

#include "cli/cgroup.h"
#include "tests/bench_util.h"
#include "tests/serve_util.h"

#define NR 3
#define SIZE (512 * MiB)
#define LIMIT (SIZE / 2 * 3)
#define SWITCHES 20
#define SEED 1

static struct cgroup *limited;

static int64_t do_join(const void *arg)
{
	(void)arg;
	return cgroup_join(limited) < 0 ? peer_say("cannot enter the cgroup %s", cgroup_path(limited)) : 0;
}

/* ---- the ways: each gives one model to be used, all of it */

static int64_t do_by_daemon(const void *arg)
{
	const struct use *u = arg;

	if (!my_models[u->slot] && do_open(u) < 0)
		return -1;
	return do_touch(u);
}

static unsigned char *buffer;

static int64_t do_by_read(const void *arg)
{
	const struct use *u = arg;
	cleanup_close int fd = open(u->path, O_RDONLY | O_CLOEXEC);
	uint64_t done = 0;
	ssize_t n;

	free(buffer);
	buffer = malloc(u->value);
	if (fd < 0 || !buffer)
		return peer_say("%s: %s", u->path, strerror(errno));
	while (done < u->value && (n = read(fd, buffer + done, MIN(u->value - done, 16 * MiB))) > 0)
		done += (uint64_t)n;
	if (done < u->value)
		return peer_say("%s: %s", u->path, strerror(errno));
	(void)bench_touch(buffer, done);
	return 0;
}

/* Where each model has a process, it keeps nothing while another one's turn is. */
static int64_t do_free(const void *arg)
{
	(void)arg;
	free(TAKE_PTR(buffer));
	return 0;
}

static int64_t do_by_mmap(const void *arg)
{
	static unsigned char *maps[NR];
	const struct use *u = arg;

	if (!maps[u->slot]) {
		cleanup_close int fd = open(u->path, O_RDONLY | O_CLOEXEC);
		void *p = fd < 0 ? MAP_FAILED : mmap(NULL, u->value, PROT_READ, MAP_PRIVATE, fd, 0);

		if (p == MAP_FAILED)
			return peer_say("%s: %s", u->path, strerror(errno));
		maps[u->slot] = p;
	}
	(void)bench_touch(maps[u->slot], u->value);
	return 0;
}

static const struct {
	const char *name;
	peer_fn fn;
} ways[] = { { "weightd", do_by_daemon }, { "read", do_by_read }, { "mmap", do_by_mmap } };

/* Seconds a switch. */
static double run(const struct use *u, size_t way, size_t nr)
{
	struct peer p[NR];
	double t;

	for (size_t i = 0; i < NR; i++)
		bench_uncache(u[i].path);
	if (way == 0)
		must_tool("drop --all");
	for (size_t i = 0; i < nr; i++) {
		peer_new(&p[i], getuid());
		if (way && peer_does(&p[i], do_join, &u[0]) < 0)
			bench_cannot("%s", p[i].text);
	}
	/* The first one is there before it counts. */
	if (peer_does(&p[0], ways[way].fn, &u[0]) < 0)
		bench_cannot("%s", p[0].text);
	t = bench_seconds();
	for (size_t i = 1; i <= SWITCHES; i++) {
		struct peer *now = &p[i % NR % nr], *before = &p[(i - 1) % NR % nr];

		if (ways[way].fn == do_by_read && now != before && peer_does(before, do_free, &u[0]) < 0)
			bench_cannot("%s", before->text);
		if (peer_does(now, ways[way].fn, &u[i % NR]) < 0)
			bench_cannot("%s: %s", ways[way].name, now->text);
	}
	t = (bench_seconds() - t) / SWITCHES;
	for (size_t i = 0; i < nr; i++)
		peer_leave(&p[i]);
	return t;
}

int main(void)
{
	struct samples s[ARRAY_SIZE(ways)][2] = { 0 }, by_read[2] = { 0 }, by_mmap[2] = { 0 };
	size_t repeats = bench_repeats(3);
	cleanup_free char *dir = data_tmpdir(), *group = data_text("weightd-bench-%d", (int)getpid());
	struct wd_err err = { "" };
	struct daemon d;
	struct use u[NR];
	int r;

	serve_failed = bench_failed;
	bench_begin("switch", "three models of 512 MiB in turn, with memory for one and a half");
	bench_room(NR * SIZE, 3 * GiB);
	r = cgroup_new("", group, &limited, &err);
	if (r == 0)
		r = cgroup_set_limit(limited, LIMIT + 32 * MiB, &err); /* and what a process needs beside */
	if (r < 0)
		bench_cannot("no memory cgroup: %s", err.text);
	for (unsigned int i = 0; i < NR; i++) {
		struct data_tensor t[16];
		char names[16][16];

		u[i] = (struct use){ .slot = i, .seed = SEED + i };
		(void)snprintf(u[i].path, sizeof(u[i].path), "%s/model-%u.safetensors", dir, i);
		for (size_t k = 0; k < ARRAY_SIZE(t); k++) {
			(void)snprintf(names[k], sizeof(names[k]), "layer.%zu", k);
			t[k] = (struct data_tensor){
				.name = names[k], .dtype = "U8", .ndim = 1, .shape = { (int64_t)(SIZE / ARRAY_SIZE(t)) }
			};
		}
		(void)data_write_safetensors(u[i].path, t, ARRAY_SIZE(t), &(struct data_opts){ .seed = SEED + i });
		u[i].value = file_bytes(u[i].path);
	}
	bench_warm_memory(2 * GiB);
	daemon_start(&d, "--budget 768M", NULL);
	for (size_t k = 0; k < repeats; k++)
		for (size_t n = 0; n < 2 * ARRAY_SIZE(ways); n++) {
			size_t way = (k + n) % ARRAY_SIZE(ways), many = n / ARRAY_SIZE(ways);

			add(&s[way][many], run(u, way, many ? NR : 1));
		}
	for (size_t k = 0; k < repeats; k++)
		for (int many = 0; many < 2; many++) {
			add(&by_read[many], s[0][many].v[k] / s[1][many].v[k]);
			add(&by_mmap[many], s[0][many].v[k] / s[2][many].v[k]);
		}
	bench_note("repeats", "%zu", repeats);
	for (int many = 0; many < 2; many++) {
		const char *processes = many ? "three processes" : "one process";
		char what[64];

		for (size_t way = 0; way < ARRAY_SIZE(ways); way++) {
			(void)snprintf(what, sizeof(what), "%s: %s", processes, ways[way].name);
			bench_row(what, &s[way][many], "s", BENCH_NO_BAR, 0);
		}
		(void)snprintf(what, sizeof(what), "%s: weightd / read", processes);
		bench_row(what, &by_read[many], "x", BENCH_NO_BAR, 0);
		(void)snprintf(what, sizeof(what), "%s: weightd / mmap", processes);
		bench_row(what, &by_mmap[many], "x", BENCH_NO_BAR, 0);
	}
	daemon_stop(&d);
	(void)cgroup_free(limited);
	return bench_end();
}
