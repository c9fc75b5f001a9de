/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One touch of an extent that is in memory, but not open in this process: how long the thread stands. By a pager in the
 * same process, by a daemon whose threads sleep, and by one that looks for the next fault for a while before it sleeps
 * (--spin-us). No bar: the daemon's way of waiting is chosen from these (cli/serve_config.c says how).
 *
 * 100 touches in an order of the seed's, with 300 us between them, so that who sleeps is asleep. Each is of a tensor
 * inside of one extent; the budget is nearly full, so that no touch opens what follows. What a daemon has is dropped
 * before, and read again by another process: then it is in memory, and armed in the one that is measured.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/bench_util.h"
#include "tests/serve_util.h"

#define NR 512 /* tensors of 1 MiB */
#define TOUCHES 100
#define BUDGET (560 * MiB)
#define SEED 1

enum { INSIDE, SLEEPING, SPINNING, NR_SIDES };
static const char *const names[] = { "embedded", "daemon, sleeping", "daemon, spinning" };

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

/* Into the shared words 1 and 2: p50 and p99, ns. */
static int64_t touch_some(struct wd_model *m, uint64_t random)
{
	const struct wd_tensor *picked[NR];
	uint64_t ns[TOUCHES], seen = 0;
	size_t nr = 0;

	for (size_t i = 0; i < wd_model_nr_tensors(m); i++) {
		const struct wd_tensor *t = wd_model_tensor_at(m, i);
		uint64_t first = (uintptr_t)t->data / extent(), last = ((uintptr_t)t->data + t->nbytes - 1) / extent();
		size_t k;

		if (first != last || first == seen)
			continue;
		seen = first;
		k = rnd(&random) % (nr + 1);
		picked[nr] = picked[k];
		picked[k] = t;
		nr++;
	}
	if (nr < TOUCHES)
		return peer_say("%zu tensors lie in one extent", nr);
	for (size_t i = 0; i < TOUCHES; i++) {
		double begin;

		(void)usleep(300);
		begin = bench_seconds();
		(void)*(const volatile unsigned char *)picked[i]->data;
		ns[i] = (uint64_t)((bench_seconds() - begin) * 1e9);
		if (data_check(picked[i]->data, 8, SEED, picked[i]->file_offset) >= 0)
			return peer_say("wrong bytes");
	}
	qsort(ns, TOUCHES, sizeof(ns[0]), by_value);
	shared_words()[1] = ns[TOUCHES / 2];
	shared_words()[2] = ns[TOUCHES - 1 - TOUCHES / 100];
	return 0;
}

static int64_t do_daemon(const void *arg)
{
	const struct use *u = arg;

	return touch_some(my_models[u->slot], u->value);
}

/* One process for all repeats: its pager is in it. */
static int64_t do_embedded(const void *arg)
{
	static struct wd_model *m;
	const struct use *u = arg;

	if (!m) {
		struct wd_options o = { .size = sizeof(o), .way = WD_WAY_EMBEDDED, .budget_bytes = BUDGET };
		struct wd_job *j;

		if (wd_connect(&o, &my_wd) < 0 || wd_model_open(my_wd, u->path, NULL, &m) < 0 ||
		    wd_populate(m, NULL, &j) < 0 || wd_job_wait(j, -1) < 0)
			return peer_say("%s", wd_error());
		wd_job_free(j);
		my_models[u->slot] = m;
	}
	bench_renew(m);
	return touch_some(m, u->value);
}

int main(void)
{
	struct samples p50[NR_SIDES] = { 0 }, p99[NR_SIDES] = { 0 }, ratio = { 0 }, spin_ratio = { 0 }, faults = { 0 };
	static struct data_tensor tensors[NR];
	static char tensor_names[NR][16];
	size_t repeats = bench_repeats(15);
	cleanup_free char *dir = data_tmpdir();
	struct use u = { .seed = SEED };
	struct daemon d[NR_SIDES] = { 0 };
	struct peer keeps[NR_SIDES], touches[NR_SIDES];

	serve_failed = bench_failed;
	bench_begin("fault", "one touch of an extent that is in memory");
	bench_room(GiB, 4 * GiB);
	(void)snprintf(u.path, sizeof(u.path), "%s/model.safetensors", dir);
	for (size_t i = 0; i < NR; i++) {
		(void)snprintf(tensor_names[i], sizeof(tensor_names[i]), "w.%zu", i);
		tensors[i] = (struct data_tensor){
			.name = tensor_names[i], .dtype = "U8", .ndim = 1, .shape = { (int64_t)MiB }
		};
	}
	(void)data_write_safetensors(u.path, tensors, NR, &(struct data_opts){ .seed = SEED });
	bench_warm_memory(2 * GiB);
	daemon_start(&d[SLEEPING], "--budget 560M --spin-us 0", NULL);
	daemon_start(&d[SPINNING], "--budget 560M --spin-us 1000", NULL);
	for (int i = 0; i < NR_SIDES; i++) {
		if (i != INSIDE)
			(void)setenv("WEIGHTD_SOCKET", d[i].socket, 1);
		peer_new(&keeps[i], getuid());
		if (i == INSIDE)
			continue;
		peer_new(&touches[i], getuid());
		if (peer_does(&keeps[i], do_open, &u) < 0)
			bench_cannot("%s", keeps[i].text);
		if (peer_does(&touches[i], do_open, &u) < 0)
			bench_cannot("%s", touches[i].text);
	}
	for (size_t k = 0; k < repeats + 1; k++)
		for (int n = 0; n < NR_SIDES; n++) {
			int i = (int)(k + (size_t)n) % NR_SIDES;
			uint64_t before = 0;
			int64_t r;

			u.value = k + 1;
			if (i == INSIDE) {
				r = peer_does(&keeps[i], do_embedded, &u);
				if (r < 0)
					bench_cannot("%s", keeps[i].text);
			} else {
				(void)setenv("WEIGHTD_SOCKET", d[i].socket, 1);
				must_tool("drop --all");
				if (peer_does(&keeps[i], do_touch, &u) < 0)
					bench_cannot("%s", keeps[i].text);
				before = must_stat("faults");
				r = peer_does(&touches[i], do_daemon, &u);
				if (r < 0)
					bench_cannot("%s", touches[i].text);
				if (k && i == SLEEPING)
					add(&faults, (double)(must_stat("faults") - before));
			}
			if (!k)
				continue;
			add(&p50[i], (double)shared_words()[1] / 1e3);
			add(&p99[i], (double)shared_words()[2] / 1e3);
		}
	for (size_t k = 0; k < repeats; k++) {
		add(&ratio, p50[SLEEPING].v[k] / p50[INSIDE].v[k]);
		add(&spin_ratio, p50[SPINNING].v[k] / p50[SLEEPING].v[k]);
	}
	bench_note("repeats", "%zu", repeats);
	for (int i = 0; i < NR_SIDES; i++) {
		char what[64];

		(void)snprintf(what, sizeof(what), "%s: p50", names[i]);
		bench_row(what, &p50[i], "us", BENCH_NO_BAR, 0);
		(void)snprintf(what, sizeof(what), "%s: p99", names[i]);
		bench_row(what, &p99[i], "us", BENCH_NO_BAR, 0);
	}
	bench_row("p50: daemon, sleeping / embedded", &ratio, "x", BENCH_NO_BAR, 0);
	bench_row("p50: spinning / sleeping", &spin_ratio, "x", BENCH_NO_BAR, 0);
	bench_row("faults of 100 touches", &faults, "", BENCH_NO_BAR, 0);
	for (int i = 0; i < NR_SIDES; i++) {
		peer_leave(&keeps[i]);
		if (i != INSIDE)
			peer_leave(&touches[i]);
	}
	for (int i = SLEEPING; i < NR_SIDES; i++)
		daemon_stop(&d[i]);
	return bench_end();
}
