/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole file that is not in the page cache, through the pager, against fio's sequential O_DIRECT reads of the
 * same file (throughput) and against read() into malloc (CPU seconds of the whole process, pager threads, io_uring's
 * work and the end of the process included). Bars: 0.9x and half.
 *
 * Each measure is a process of its own. fio gets the engine, block size and depth that are the fastest here, tried
 * first. The pager can be faster than fio: its buffers are huge pages, so one request takes few segments.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "tests/bench_util.h"
#include "tests/data.h"

#define SIZE GiB
#define SEED 2

struct outcome {
	double seconds, cpu;
	bool good;
	char why[256];
};

static double cpu_of(const struct rusage *u)
{
	return (double)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) +
	       (double)(u->ru_utime.tv_usec + u->ru_stime.tv_usec) / 1e6;
}

static void through_pager(const char *path, bool populate, struct outcome *ret)
{
	struct wd_options options = { .size = sizeof(options), .way = WD_WAY_EMBEDDED };
	struct wd_stats st = { .size = sizeof(st) };
	const struct wd_tensor *t;
	struct wd_model *m;
	struct wd_job *job;
	struct wd *wd;
	double begin;

	if (wd_connect(&options, &wd) < 0 || wd_model_open_raw(wd, path, 0, 0, NULL, &m) < 0)
		goto failed;
	t = wd_model_tensor_at(m, 0);
	begin = bench_seconds();
	if (populate) {
		if (wd_populate(m, NULL, &job) < 0 || wd_job_wait(job, -1) < 0)
			goto failed;
		ret->seconds = bench_seconds() - begin;
		wd_job_free(job);
	}
	(void)bench_touch(t->data, SIZE);
	if (!populate)
		ret->seconds = bench_seconds() - begin;
	if (wd_model_stats(m, &st) < 0)
		goto failed;
	/* Every page was touched; that its bytes are right is looked at where their number is small. */
	ret->good = st.read_bytes == SIZE && data_check(t->data, MiB, SEED, 0) < 0 &&
		    data_check((unsigned char *)t->data + SIZE - MiB, MiB, SEED, SIZE - MiB) < 0;
	(void)snprintf(ret->why, sizeof(ret->why), "%" PRIu64 " bytes read, or wrong ones", st.read_bytes);
	wd_model_close(m);
	wd_disconnect(wd);
	return;
failed:
	(void)snprintf(ret->why, sizeof(ret->why), "%s", wd_error());
}

static void populate(const char *path, struct outcome *ret)
{
	through_pager(path, true, ret);
}

static void touch(const char *path, struct outcome *ret)
{
	through_pager(path, false, ret);
}

static void read_into_malloc(const char *path, struct outcome *ret)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	cleanup_free unsigned char *buf = malloc(SIZE);
	double begin = bench_seconds();
	uint64_t done = 0;
	ssize_t n = 1;

	while (fd >= 0 && buf && done < SIZE && n > 0) {
		n = read(fd, buf + done, SIZE - done);
		done += n > 0 ? (uint64_t)n : 0;
	}
	ret->seconds = bench_seconds() - begin;
	ret->good = done == SIZE && data_check(buf, MiB, SEED, 0) < 0 &&
		    data_check(buf + SIZE - MiB, MiB, SEED, SIZE - MiB) < 0;
	(void)snprintf(ret->why, sizeof(ret->why), "%" PRIu64 " bytes read, or wrong ones: %s", done, strerror(errno));
}

/* Runs it in a child that has nothing of ours; cold and with memory that is warm. */
static struct outcome measure(void (*fn)(const char *path, struct outcome *ret), const char *path)
{
	struct outcome o = { .good = false };
	struct rusage usage;
	int fd[2], status;
	ssize_t n;
	pid_t pid;

	bench_uncache(path);
	bench_warm_memory(3 * SIZE);
	if (pipe(fd) < 0 || (pid = fork()) < 0)
		bench_cannot("no child: %s", strerror(errno));
	if (pid == 0) {
		fn(path, &o);
		_exit(write(fd[1], &o, sizeof(o)) == sizeof(o) ? 0 : 1);
	}
	(void)close(fd[1]);
	n = read(fd[0], &o, sizeof(o));
	(void)close(fd[0]);
	if (wait4(pid, &status, 0, &usage) < 0 || n != sizeof(o) || status)
		bench_cannot("a measuring process died (%d)", status);
	if (!o.good)
		bench_cannot("%s", o.why);
	o.cpu = cpu_of(&usage);
	return o;
}

/* ------------------------------------------------------------------ fio */

struct fio_job {
	const char *engine, *block, *depth;
};

static const struct fio_job fio_jobs[] = {
	{ "io_uring", "128k", "64" }, { "io_uring", "512k", "32" }, { "io_uring", "1M", "16" },
	{ "io_uring", "1M", "64" },   { "io_uring", "2M", "16" },   { "io_uring", "4M", "16" },
	{ "libaio", "1M", "16" },
};

/* Bytes a second. */
static double fio(const char *path, const struct fio_job *job)
{
	cleanup_free char *command =
		data_text("exec fio --name=weightd --readonly --filename='%s' --rw=read --direct=1 --size=%" PRIu64
			  " --ioengine=%s --bs=%s --iodepth=%s --output-format=json 2>&1",
			  path, SIZE, job->engine, job->block, job->depth);
	json_t *j;
	double rate;
	FILE *f;

	bench_uncache(path);
	f = popen(command, "re");
	/* Notes of fio's may come before the object. */
	j = f ? json_loadf(f, JSON_DISABLE_EOF_CHECK, NULL) : NULL;
	if (f && pclose(f) != 0)
		return json_decref(j), 0;
	rate = json_number_value(
		json_object_get(json_object_get(json_array_get(json_object_get(j, "jobs"), 0), "read"), "bw_bytes"));
	json_decref(j);
	return rate;
}

static const struct fio_job *fio_fastest(const char *path)
{
	const struct fio_job *best = NULL;
	double most = 0;

	for (size_t i = 0; i < 2 * ARRAY_SIZE(fio_jobs); i++) {
		double rate = fio(path, &fio_jobs[i % ARRAY_SIZE(fio_jobs)]);

		if (rate > most) {
			most = rate;
			best = &fio_jobs[i % ARRAY_SIZE(fio_jobs)];
		}
	}
	if (!best)
		bench_cannot("fio reads nothing (is the package fio there?)");
	return best;
}

int main(void)
{
	struct samples rate_p = { 0 }, rate_t = { 0 }, cpu_p = { 0 }, cpu_t = { 0 };
	struct samples gib_fio = { 0 }, gib_p = { 0 }, gib_t = { 0 }, gib_r = { 0 }, s_p = { 0 }, s_t = { 0 },
		       s_r = { 0 };
	size_t repeats = bench_repeats(9);
	const struct fio_job *job;
	cleanup_free char *path = NULL;

	bench_begin("cold", "1 GiB that is not in the page cache through the pager, against fio and read()");
	path = bench_file(SIZE, 4 * SIZE, SEED);
	job = fio_fastest(path);
	bench_note("repeats", "%zu", repeats);
	bench_note("fio", "--rw=read --direct=1 --ioengine=%s --bs=%s --iodepth=%s (fastest of %zu here)", job->engine,
		   job->block, job->depth, ARRAY_SIZE(fio_jobs));
	for (size_t i = 0; i < repeats; i++) {
		struct outcome p = { 0 }, t = { 0 }, r = { 0 };
		double rate = 0;

		for (size_t k = 0; k < 4; k++) {
			switch ((i + k) % 4) {
			case 0:
				rate = fio(path, job);
				break;
			case 1:
				p = measure(populate, path);
				break;
			case 2:
				t = measure(touch, path);
				break;
			default:
				r = measure(read_into_malloc, path);
				break;
			}
		}
		if (rate <= 0)
			bench_cannot("fio failed");
		add(&rate_p, (double)SIZE / p.seconds / rate);
		add(&rate_t, (double)SIZE / t.seconds / rate);
		add(&cpu_p, p.cpu / r.cpu);
		add(&cpu_t, t.cpu / r.cpu);
		add(&gib_fio, rate / (double)GiB);
		add(&gib_p, 1 / p.seconds);
		add(&gib_t, 1 / t.seconds);
		add(&gib_r, 1 / r.seconds);
		add(&s_p, p.cpu);
		add(&s_t, t.cpu);
		add(&s_r, r.cpu);
	}
	bench_row("populated: throughput / fio's", &rate_p, "x", BENCH_AT_LEAST, 0.9);
	bench_row("touched, front to back: throughput / fio's", &rate_t, "x", BENCH_AT_LEAST, 0.9);
	bench_row("populated: CPU seconds / read()'s", &cpu_p, "x", BENCH_AT_MOST, 0.5);
	bench_row("touched: CPU seconds / read()'s", &cpu_t, "x", BENCH_AT_MOST, 0.5);
	bench_row("fio", &gib_fio, "GiB/s", BENCH_NO_BAR, 0);
	bench_row("populated", &gib_p, "GiB/s", BENCH_NO_BAR, 0);
	bench_row("touched", &gib_t, "GiB/s", BENCH_NO_BAR, 0);
	bench_row("read() into malloc", &gib_r, "GiB/s", BENCH_NO_BAR, 0);
	bench_row("populated: CPU", &s_p, "s", BENCH_NO_BAR, 0);
	bench_row("touched: CPU", &s_t, "s", BENCH_NO_BAR, 0);
	bench_row("read() into malloc: CPU", &s_r, "s", BENCH_NO_BAR, 0);
	return bench_end();
}
