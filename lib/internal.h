/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files behind weightd.h share: struct wd, its locks, and how a public function reports its failure.
 *
 * Locks, outermost first:
 *   wd.stage_lock  one stage mark at a time; held while a mark waits for its drops (200 ms)
 *   wd.lock        models, view owners, plans, the running stage. Never held while a tensor's bytes are touched or
 *                  a file is read, so no call waits behind a slow one.
 *   (the pager's)  knows nothing of ours
 *
 * fork: the child handler in weightd.c marks a wd as broken whose locks another thread held at that moment.
 */
#ifndef WD_LIB_INTERNAL_H
#define WD_LIB_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "lib/base/base.h"
#include "lib/include/weightd.h"
#include "ufd/pager.h"

struct view_owner;
struct plan_stage;
struct stage_job;

struct wd {
	_Atomic unsigned int nr_refs; /* the caller's, and one of each model */
	bool broken;                  /* set in a forked child only, before it has threads */
	uint32_t flags;               /* WD_STRICT, WD_NO_SIGNAL_HANDLER */
	struct pager *pager;
	struct wd *next; /* list of all, for the fork handler (weightd.c) */

	pthread_mutex_t stage_lock;
	pthread_mutex_t lock;
	/* all below: under `lock` */
	struct wd_model *models;   /* open ones, parts included, in the order of opening */
	struct view_owner *owners; /* one for each view */

	uint64_t reloads_extra; /* models_reloads_extra() of closed ones */

	/* stage.c */
	struct wd_plan *plan;             /* for the next mark; its pins hold already. Never changed, only replaced */
	struct wd_plan *running_plan;     /* of the running stage; NULL: it runs without one, or none runs */
	const struct plan_stage *running; /* in running_plan */
	char *stage_name;                 /* NULL: none runs */
	struct stage_job *jobs;           /* what the running stage reads ahead */
};

/* A reference of the wd; the last one ends it. */
struct wd *handle_ref(struct wd *wd);
void handle_unref(struct wd *wd);

/* 0, or -ENOTRECOVERABLE with the text. */
int handle_check(const struct wd *wd, struct wd_err *err);
/* The same, and takes wd->lock. */
int handle_lock(struct wd *wd, struct wd_err *err);
static inline void handle_unlock(struct wd *wd)
{
	(void)pthread_mutex_unlock(&wd->lock);
}

/* What a public function ends with: keeps the text for wd_error() if `r` is negative. Returns r. */
int api_done(int r, const char *function, const struct wd_err *err);
/* The same for one that has its text at hand. */
int api_fail(int error, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/*
 * Copies a caller's options (may be NULL: all zero) into `ret`, a struct of nbytes that begins with size_t size. A
 * caller that was compiled against an older, shorter struct gets zeros for the rest; a newer, longer one is
 * accepted if what we do not know is zero. min_nbytes: the end of the first field.
 */
int options_in(const void *options, size_t min_nbytes, size_t nbytes, void *ret, struct wd_err *err);
/* The same the other way: fills as much of the caller's struct as it has; *ret is a struct with its size set. */
int struct_out(const void *filled, size_t min_nbytes, size_t nbytes, void *ret, struct wd_err *err);

/* A pager's or view's counts as the public struct. */
int stats_out(const struct wd *wd, const struct pager_stats *s, struct wd_stats *ret, struct wd_err *err);

#endif
