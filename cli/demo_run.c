/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One mode, inside the process that is measured. The modes differ in how a tensor's bytes come to an address, and
 * in nothing else; the staged one is written against the public API, as a user's program would be.
 *
 *   eager   at the start, read(2) of every tensor into memory from malloc
 *   mmap    at the start, every file mapped; the kernel brings pages in and keeps them
 *   staged  weightd, with a plan: what a stage does not list has left memory when it begins
 *
 * Threads: the main one computes. In the staged mode a second one publishes the pager's counts every few
 * milliseconds; `publish_lock` makes sure that an old count never overwrites a newer one.
 */
#define _GNU_SOURCE
#include "cli/demo.h"

#include "lib/include/weightd.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>

#define READ_BYTES (8 * MiB) /* of one read(2): large enough to be as fast as the disk */
#define PUBLISH_NS 3000000

const char *const demo_mode_names[DEMO_NR_MODES] = { "eager", "mmap", "staged" };

struct run {
	const struct demo_job *job;
	enum demo_mode mode;
	struct demo_live *live;
	int sync_fd;
	const void ***data; /* eager and mmap: addresses by model and tensor */

	struct wd *wd;
	struct wd_model **models;
	pthread_mutex_t publish_lock;
};

double demo_now(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Keeps the first reason. */
__attribute__((format(printf, 2, 3))) static int fail(struct run *run, const char *fmt, ...)
{
	va_list args;

	if (!run->live->reason[0]) {
		va_start(args, fmt);
		(void)vsnprintf(run->live->reason, sizeof(run->live->reason), fmt, args);
		va_end(args);
	}
	return -1;
}

/* Tells the measuring process and waits until it has looked. */
static int sync_with(struct run *run, char what)
{
	char answer;
	ssize_t n = send(run->sync_fd, &what, 1, MSG_NOSIGNAL);

	if (n == 1) {
		do {
			n = recv(run->sync_fd, &answer, 1, 0);
		} while (n < 0 && errno == EINTR);
	}
	return n == 1 ? 0 : fail(run, "the measuring process is gone");
}

/* ---- eager */

static int read_tensor(struct run *run, const char *file, int fd, const struct demo_tensor *t, void **ret)
{
	unsigned char *p = malloc(MAX(t->nbytes, (uint64_t)1));

	if (!p)
		return fail(run, "%s: no memory for the %ju bytes of %s", file, (uintmax_t)t->nbytes, t->name);
	*ret = p;
	for (uint64_t done = 0; done < t->nbytes;) {
		ssize_t n = pread(fd, p + done, MIN(t->nbytes - done, READ_BYTES), (off_t)(t->offset + done));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return fail(run, "%s: cannot read %s: %s", file, t->name,
				    n < 0 ? strerror(errno) : "the file ends in it");
		done += (uint64_t)n;
		atomic_fetch_add(&run->live->weights_bytes, (uint64_t)n);
		atomic_fetch_add(&run->live->done_bytes, (uint64_t)n);
	}
	return 0;
}

/* ---- eager and mmap */

static int load_file(struct run *run, const struct demo_model *m, size_t file, const void **data)
{
	cleanup_close int fd = open(m->files[file], O_RDONLY | O_CLOEXEC);
	const unsigned char *map = NULL;
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return fail(run, "cannot open %s: %s", m->files[file], strerror(errno));
	if (run->mode == DEMO_MMAP) {
		void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);

		if (p == MAP_FAILED)
			return fail(run, "cannot map %s: %s", m->files[file], strerror(errno));
		map = p;
	}
	for (size_t i = 0; i < m->nr_tensors; i++) {
		const struct demo_tensor *t = &m->tensors[i];
		void *p = NULL;

		if (t->file != file)
			continue;
		if (map)
			data[i] = map + t->offset;
		else if (read_tensor(run, m->files[file], fd, t, &p) < 0)
			return -1;
		else
			data[i] = p;
	}
	return 0;
}

static int load_all(struct run *run)
{
	run->data = calloc(run->job->nr_models, sizeof(*run->data));
	for (size_t i = 0; run->data && i < run->job->nr_models; i++) {
		const struct demo_model *m = &run->job->models[i];

		run->data[i] = calloc(m->nr_tensors + 1, sizeof(**run->data));
		if (!run->data[i])
			return fail(run, "out of memory");
		for (size_t k = 0; k < m->nr_files; k++) {
			if (load_file(run, m, k, run->data[i]) < 0)
				return -1;
		}
	}
	return run->data ? 0 : fail(run, "out of memory");
}

/* ---- staged */

static void publish(struct run *run)
{
	struct wd_stats stats = { .size = sizeof(stats) };

	(void)pthread_mutex_lock(&run->publish_lock);
	if (wd_stats(run->wd, &stats) == 0) {
		/* Where files are mapped, the page cache has the weights, and it is counted as such. */
		atomic_store(&run->live->weights_bytes, atomic_load(&run->live->in_arena) ? stats.resident_bytes : 0);
		atomic_store(&run->live->pager_faults, stats.faults);
		atomic_store(&run->live->reloads, stats.reloads);
	}
	(void)pthread_mutex_unlock(&run->publish_lock);
}

static void *publish_main(void *arg)
{
	const struct timespec pause = { .tv_nsec = PUBLISH_NS };

	for (;;) {
		publish(arg);
		(void)nanosleep(&pause, NULL);
	}
	return NULL;
}

/* The modes compare what one process needs. Weights in a daemon would be read and held by another one, uncounted. */
static int connect_here(struct run *run)
{
	static const uint32_t ways[] = { WD_WAY_EMBEDDED, WD_WAY_USER, WD_WAY_MMAP };
	struct wd_options options = { .size = sizeof(options) };
	const char *mode = getenv("WEIGHTD_MODE"), *disable = getenv("WEIGHTD_DISABLE");
	bool disabled = disable && *disable && strcmp(disable, "0");
	bool automatic = !disabled && (!mode || !*mode || !strcmp(mode, wd_way_name(WD_WAY_AUTO)));
	int r = -EOPNOTSUPP;

	if (!disabled && mode && !strcmp(mode, wd_way_name(WD_WAY_DAEMON)))
		return fail(run, "the demo measures one process, which WEIGHTD_MODE=daemon does not show; unset it");
	for (size_t i = 0; automatic && i < ARRAY_SIZE(ways) && r == -EOPNOTSUPP; i++) {
		options.way = ways[i];
		r = wd_connect(&options, &run->wd);
	}
	if (!automatic)
		r = wd_connect(NULL, &run->wd);
	return r < 0 ? fail(run, "%s", wd_error()) : 0;
}

static int connect_all(struct run *run)
{
	const struct demo_job *job = run->job;
	struct wd_plan *plan = NULL;
	pthread_t thread;
	int r = 0;

	run->models = calloc(job->nr_models, sizeof(struct wd_model *));
	if (!run->models)
		return fail(run, "out of memory");
	if (connect_here(run) < 0)
		return -1;
	atomic_store(&run->live->way, wd_way(run->wd));
	atomic_store(&run->live->in_arena, wd_way(run->wd) != WD_WAY_MMAP);
	for (size_t i = 0; i < job->nr_models; i++) {
		struct wd_model_options options = { .size = sizeof(options), .name = job->models[i].name };

		if (wd_model_open(run->wd, job->models[i].path, &options, &run->models[i]) < 0)
			return fail(run, "%s", wd_error());
	}
	if (wd_plan_new(&plan) < 0)
		return fail(run, "%s", wd_error());
	for (size_t i = 0; i < job->nr_stages && r == 0; i++)
		r = wd_plan_add(plan, job->stages[i].name, job->models[job->stages[i].model].name);
	if (r == 0)
		r = wd_set_plan(run->wd, plan);
	if (r < 0)
		(void)fail(run, "%s", wd_error());
	wd_plan_free(plan);
	if (r == 0 && pthread_create(&thread, NULL, publish_main, run) != 0)
		r = fail(run, "cannot start a thread");
	return r < 0 ? -1 : 0;
}

static int begin_stage(struct run *run, const struct demo_stage *stage)
{
	if (wd_stage_begin(run->wd, stage->name) < 0 || wd_sync(run->wd) < 0)
		return fail(run, "%s", wd_error());
	return 0;
}

/* ---- all */

static const void *tensor_data(struct run *run, size_t model, size_t i)
{
	const struct demo_tensor *t = &run->job->models[model].tensors[i];
	const struct wd_tensor *w;

	if (run->mode != DEMO_STAGED)
		return run->data[model][i];
	w = wd_model_tensor(run->models[model], t->name);
	if (!w || w->nbytes != t->nbytes || w->dtype != t->dtype) {
		(void)fail(run, "%s: %s", run->job->models[model].path,
			   w ? "it changed while the demo ran" : wd_error());
		return NULL;
	}
	return w->data;
}

/* The digest of what the stage made, and of every bit of the weights it used. */
static int compute(struct run *run, const struct demo_stage *stage, struct demo_state *state, unsigned char *ret_sha)
{
	const struct demo_model *m = &run->job->models[stage->model];
	EVP_MD_CTX *md = EVP_MD_CTX_new();
	int r = md && EVP_DigestInit_ex(md, EVP_sha256(), NULL) ? 0 : fail(run, "SHA-256 does not work here");

	for (unsigned int step = 0; step < stage->steps && r == 0; step++) {
		for (size_t i = 0; i < m->nr_tensors && r == 0; i++) {
			const struct demo_tensor *t = &m->tensors[i];
			const void *data = t->nbytes ? tensor_data(run, stage->model, i) : "";
			uint32_t sum[DEMO_SUM_WORDS];

			if (!data) {
				r = -1;
				break;
			}
			demo_apply(state, data, t->nbytes, t->dtype, t->cols, sum, &run->live->done_bytes);
			if (!EVP_DigestUpdate(md, sum, sizeof(sum)))
				r = fail(run, "SHA-256 failed");
		}
	}
	if (r == 0 && (!EVP_DigestUpdate(md, state, sizeof(*state)) || !EVP_DigestFinal_ex(md, ret_sha, NULL)))
		r = fail(run, "SHA-256 failed");
	EVP_MD_CTX_free(md);
	return r;
}

static int run_stages(struct run *run)
{
	struct demo_live *live = run->live;
	EVP_MD_CTX *md = EVP_MD_CTX_new();
	struct demo_state state;
	int r = md && EVP_DigestInit_ex(md, EVP_sha256(), NULL) ? 0 : fail(run, "SHA-256 does not work here");

	demo_state_init(&state, run->job->seed);
	for (size_t i = 0; i < run->job->nr_stages && r == 0; i++) {
		const struct demo_stage *stage = &run->job->stages[i];
		struct demo_live_stage *told = &live->stages[i];
		double begin = demo_now(), waited;

		if (run->mode == DEMO_STAGED && (r = begin_stage(run, stage)) < 0)
			break;
		if (run->mode == DEMO_STAGED)
			publish(run);
		waited = demo_now();
		atomic_store(&live->stage, (int)i);
		r = sync_with(run, DEMO_SYNC_BEGIN);
		waited = demo_now() - waited;
		if (r == 0)
			r = compute(run, stage, &state, told->sha);
		if (r < 0)
			break;
		told->seconds = demo_now() - begin - waited;
		told->done = true;
		if (run->mode == DEMO_STAGED)
			publish(run);
		r = sync_with(run, DEMO_SYNC_END);
		atomic_store(&live->stage, -1);
		if (r == 0 && !EVP_DigestUpdate(md, told->sha, sizeof(told->sha)))
			r = fail(run, "SHA-256 failed");
	}
	if (r == 0 && (!EVP_DigestUpdate(md, &state, sizeof(state)) || !EVP_DigestFinal_ex(md, live->sha, NULL)))
		r = fail(run, "SHA-256 failed");
	EVP_MD_CTX_free(md);
	return r;
}

static int run_mode(struct run *run)
{
	const struct demo_job *job = run->job;
	double begin = demo_now();
	uint64_t total = 0;

	for (size_t i = 0; i < job->nr_stages; i++)
		total += job->models[job->stages[i].model].nbytes * job->stages[i].steps;
	for (size_t i = 0; run->mode == DEMO_EAGER && i < job->nr_models; i++)
		total += job->models[i].nbytes;
	atomic_store(&run->live->total_bytes, total);

	if ((run->mode == DEMO_STAGED ? connect_all(run) : load_all(run)) < 0 || run_stages(run) < 0)
		return -1;
	if (run->mode == DEMO_STAGED && wd_stage_end(run->wd) < 0)
		return fail(run, "%s", wd_error());
	run->live->seconds = demo_now() - begin;
	run->live->finished = true;
	return 0;
}

void demo_run(const struct demo_job *job, enum demo_mode mode, struct demo_live *live, int sync_fd)
{
	struct run run = { .job = job, .mode = mode, .live = live, .sync_fd = sync_fd };

	(void)pthread_mutex_init(&run.publish_lock, NULL);
	_exit(run_mode(&run) < 0); /* takes the publishing thread and all memory with it */
}
