/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The parts of `weightd demo`.
 *
 *   cmd_demo.c      arguments, and the order in which the rest happens
 *   demo_gen.c      writes the generated checkpoints (a cache on disk)
 *   demo_job.c      from checkpoints to models, tensors and stages: the same work list for every mode
 *   demo_compute.c  what a stage does with a tensor
 *   demo_run.c      one mode, inside the process that is measured
 *   demo_measure.c  one mode, seen from outside: page cache, cgroup, process, samples
 *   demo_report.c   table, sentences, JSON
 *
 * Threads: the measuring process has one. The measured one has the pager's and one that publishes its counts.
 */
#ifndef WD_CLI_DEMO_H
#define WD_CLI_DEMO_H

#include "lib/base/base.h"

#include <jansson.h>
#include <signal.h>
#include <stdatomic.h>

/* A count that this machine or this way to run does not give: null in the JSON. */
#define DEMO_UNKNOWN UINT64_MAX
#define DEMO_SHA_BYTES 32

enum demo_mode { DEMO_EAGER, DEMO_MMAP, DEMO_STAGED, DEMO_NR_MODES };
extern const char *const demo_mode_names[DEMO_NR_MODES];

/* ---- the work */

struct demo_tensor {
	char *name;      /* as wd_model_tensor() wants it */
	uint64_t offset; /* in its file */
	uint64_t nbytes;
	uint64_t cols; /* of what demo_apply() takes as one element */
	uint32_t file; /* index in demo_model.files */
	uint32_t dtype;
};

struct demo_model {
	char *name; /* unique */
	char *path;
	char **files;
	size_t nr_files;
	struct demo_tensor *tensors;
	size_t nr_tensors;
	uint64_t nbytes; /* of all tensors */
};

struct demo_stage {
	char *name;
	size_t model;
	unsigned int steps; /* passes over the model */
};

struct demo_job {
	struct demo_model *models;
	size_t nr_models;
	struct demo_stage *stages;
	size_t nr_stages;
	uint64_t seed;
};

/* Adds a model and the stage that uses it; names NULL: after the file. Reads headers only. */
int demo_job_add(struct demo_job *job, const char *path, const char *model_name, const char *stage_name,
		 unsigned int steps, struct wd_err *err);
/* Adds the stage in which the first model comes back, "<name of the first stage>-again". */
int demo_job_add_again(struct demo_job *job, struct wd_err *err);
void demo_job_done(struct demo_job *job);

/* ---- generated checkpoints */

#define DEMO_NR_GENERATED 3
#define DEMO_MIN_SIZE (4 * MiB)

struct demo_generated {
	const char *model, *stage;
	unsigned int steps;
	char *path;
};

/*
 * Sees to it that the checkpoints of this size and seed are in `folder`, which is made where it is missing.
 * What has the right size and header is used as it is. On failure nothing that this call wrote is left.
 * `stop` is looked at while it writes (-EINTR); `progress` draws a bar. The folder is locked until *ret_lock_fd is closed.
 */
int demo_generate(const char *folder, uint64_t size, uint64_t seed, const volatile sig_atomic_t *stop, bool progress,
		  struct demo_generated out[DEMO_NR_GENERATED], int *ret_lock_fd, struct wd_err *err);

/* ---- computing */

#define DEMO_STATE 1024 /* floats that flow from stage to stage */

struct demo_state {
	float x[DEMO_STATE];
};

void demo_state_init(struct demo_state *s, uint64_t seed);
/* How many bytes of a tensor are one element here: 4, 2 or 1 (dtypes without arithmetic here are raw bytes). */
unsigned int demo_element_bytes(uint32_t dtype);
/*
 * The tensor as a matrix with rows of `cols` elements: each row's product with the state goes into the state,
 * in a fixed order. `sum` gets sums over all bits of the data, so that a wrong one cannot hide behind rounding.
 * `done` grows by the bytes worked on.
 */
#define DEMO_SUM_WORDS 16
void demo_apply(struct demo_state *s, const void *data, uint64_t nbytes, uint32_t dtype, uint64_t cols,
		uint32_t sum[DEMO_SUM_WORDS], _Atomic uint64_t *done);

/* ---- the measured process */

/* Memory shared by the measured process and the one that measures: it survives whatever ends the former. */
struct demo_live {
	_Atomic uint64_t done_bytes, total_bytes; /* for the progress bar */
	_Atomic uint64_t weights_bytes;           /* weights in its anonymous or shared memory now */
	_Atomic uint64_t pager_faults, reloads;
	_Atomic bool in_arena; /* weights_bytes are shared memory, which RssAnon does not have */
	_Atomic uint32_t way;  /* WD_WAY_* of the staged mode */
	_Atomic int stage;     /* the one that runs, or -1 */
	bool finished;
	double seconds;
	unsigned char sha[DEMO_SHA_BYTES];
	char reason[768];
	struct demo_live_stage {
		bool done;
		double seconds;
		unsigned char sha[DEMO_SHA_BYTES];
	} stages[];
};

#define DEMO_SYNC_BEGIN 'B' /* a stage's window begins: what its beginning drops has been dropped */
#define DEMO_SYNC_END 'E'

/* Runs the mode and ends the process; `sync_fd` is a socket on which each DEMO_SYNC_* is answered by one byte when it
 * has been seen. What happened is in `live`. */
_Noreturn void demo_run(const struct demo_job *job, enum demo_mode mode, struct demo_live *live, int sync_fd);

double demo_now(void); /* seconds, monotonic */

/* ---- measuring */

enum demo_status { DEMO_FINISHED, DEMO_KILLED, DEMO_FAILED };

struct demo_stage_result {
	bool entered, done;
	double seconds;
	uint64_t peak_bytes, peak_weights_bytes;
	unsigned char sha[DEMO_SHA_BYTES];
};

struct demo_result {
	enum demo_mode mode;
	enum demo_status status;
	char reason[800];
	double seconds;
	uint64_t peak_bytes, peak_weights_bytes, peak_cache_bytes;
	uint64_t read_bytes, swap_in_bytes, swap_out_bytes, major_faults, pager_faults, reloads;
	uint32_t way;
	unsigned char sha[DEMO_SHA_BYTES];
	struct demo_stage_result *stages;
};

struct demo_setup {
	uint64_t limit_bytes; /* 0: none */
	bool warm;
	bool progress;
	const volatile sig_atomic_t *stop;
	/* filled while measuring: what the report must say */
	bool no_cgroup;
	struct wd_err cgroup_why;
	uint64_t stayed_cached_bytes; /* most that could not be dropped from the page cache before a mode */
	bool cache_unseen;            /* the kernel does not tell us what of these files is cached */
};

/* Return: 0 whatever became of the mode; -EINTR stopped; another negative errno: it could not be measured. */
int demo_measure(const struct demo_job *job, enum demo_mode mode, struct demo_setup *setup, struct demo_result *ret,
		 struct wd_err *err);

/* One line on the terminal that stderr is, replaced by the next one. Draws at most ten times a second. */
void demo_progress(const char *what, const char *part, uint64_t done, uint64_t total);
void demo_progress_clear(void);

/* ---- the report */

/* Do the modes that finished agree? 1, 0, or -1: fewer than two finished. */
int demo_identical(const struct demo_job *job, const struct demo_result *results, size_t nr);
/* Do all stages that any mode completed agree? Otherwise *ret_stage names the first that does not. */
bool demo_stages_agree(const struct demo_job *job, const struct demo_result *results, size_t nr, size_t *ret_stage);
json_t *demo_report_json(const struct demo_job *job, const struct demo_result *results, size_t nr);
int demo_report_print(const struct demo_job *job, const struct demo_setup *setup, const struct demo_result *results,
		      size_t nr);

#endif
