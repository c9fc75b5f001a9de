/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans and stages: which models a stage uses, and what that means for each view.
 *
 * A view belongs to all models that opened its file: it is pinned if one of them is, needed if one of them is
 * listed, unneeded (and, in strict mode, forbidden) only if none is.
 *
 * Threads: functions here want wd->lock held, save where they say otherwise.
 */
#ifndef WD_LIB_STAGE_H
#define WD_LIB_STAGE_H

#include "lib/model.h"

struct plan_stage {
	char *name;
	char **models;
	size_t nr_models;
};

struct wd_plan {
	pthread_mutex_t lock; /* while its author builds it; those of a wd never change */
	struct plan_stage *stages;
	size_t nr_stages;
	char **pinned;
	size_t nr_pinned;
};

/* ---- plans (plan.c). A plan that a wd uses needs no lock. */
struct wd_plan *plan_copy(const struct wd_plan *plan);
const struct plan_stage *plan_stage(const struct wd_plan *plan, const char *name);
/* What an entry of a plan means by a model of this name: 2 the model itself, or the pipeline that it is part of; 1 the
 * component of some pipeline; 0 something else. */
int plan_entry_matches(const char *entry, const char *model);

/* ---- stages (stage.c) */
/* After the list of models, their pins or the plan changed: what plans say of each model anew, then the views of `only`
 * (NULL: all views). */
void stage_update(struct wd *wd, const struct wd_model *only);
/* Class and strictness of one view, by all models behind it. True: nobody needs it. */
bool stage_apply(struct view_owner *o);

/* Cancels the read-ahead of a model (NULL: of all) and takes it away; give the result to stage_jobs_free(), without the lock. */
struct stage_job *stage_jobs_take(struct wd *wd, const struct wd_model *model);
void stage_jobs_free(struct stage_job *jobs);

/* For the end of a wd, when nobody else has it any more: no lock needed. */
void stage_done(struct wd *wd);

#endif
