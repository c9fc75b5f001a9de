/* SPDX-License-Identifier: Apache-2.0 */
/* See stage.h. What a mark does is in wd_stage_begin()'s and wd_stage_end()'s bodies, mark_*(). */
#include <string.h>
#include <time.h>

#include "lib/stage.h"

/* The longest that a mark waits for its drops (weightd.h promises it). What is not gone then goes on by itself. */
#define MARK_WAIT_MS 200

struct stage_job {
	struct stage_job *next;
	const struct wd_model *model;
	struct pager_job *job;
};

/*
 * ---- which models an entry means
 */
static int entry_best(const struct wd *wd, const char *entry)
{
	int best = 0;

	for (const struct wd_model *m = wd->models; m && best < 2; m = m->next)
		best = MAX(best, plan_entry_matches(entry, m->name));
	return best;
}

/* Adds "'name', " to a list of names, "..." where it would not fit. */
static void list_name(char *list, size_t room, const char *name)
{
	size_t used = strlen(list);

	if (used + strlen(name) + sizeof(", ''...") <= room)
		(void)snprintf(list + used, room - used, "%s'%s'", used ? ", " : "", name);
	else if (used < 3 || strcmp(list + used - 3, "..."))
		(void)snprintf(list + used, room - used, "...");
}

/* Says which models are open, each name once. */
static void list_models(const struct wd *wd, char *list, size_t room)
{
	for (const struct wd_model *m = wd->models; m; m = m->next) {
		const struct wd_model *o = wd->models;

		while (o != m && strcmp(o->name, m->name))
			o = o->next;
		if (o == m)
			list_name(list, room, m->name);
	}
}

/* An entry must mean an open model, and one only (of which there may be several handles). */
static int entry_check(const struct wd *wd, const char *what, const char *entry, struct wd_err *err)
{
	const char *found = NULL;
	char list[400] = "";

	switch (entry_best(wd, entry)) {
	case 2:
		return 0;
	case 0:
		list_models(wd, list, sizeof(list));
		return err_set(err, -ENOENT, "%s names model '%s', which is not open; open are: %s", what, entry,
			       *list ? list : "none");
	}
	for (const struct wd_model *m = wd->models; m; m = m->next) {
		if (!plan_entry_matches(entry, m->name))
			continue;
		if (found && strcmp(found, m->name))
			return err_set(err, -ENOENT, "%s names '%s', which may be '%s' or '%s'; write the whole name",
				       what, entry, found, m->name);
		found = m->name;
	}
	return 0;
}

static bool entry_means(const char *entry, int best, const struct wd_model *m)
{
	return best && plan_entry_matches(entry, m->name) == best;
}

/*
 * ---- what follows for models and views
 */
void stage_update(struct wd *wd, const struct wd_model *only)
{
	const struct plan_stage *s = wd->running;
	const struct wd_plan *p = wd->plan;
	struct model_file *f;

	for (struct wd_model *m = wd->models; m; m = m->next)
		m->listed = m->plan_pinned = false;
	for (size_t i = 0; s && i < s->nr_models; i++) {
		int best = entry_best(wd, s->models[i]);

		for (struct wd_model *m = wd->models; m; m = m->next)
			m->listed |= entry_means(s->models[i], best, m);
	}
	for (size_t i = 0; p && i < p->nr_pinned; i++) {
		int best = entry_best(wd, p->pinned[i]);

		for (struct wd_model *m = wd->models; m; m = m->next)
			m->plan_pinned |= entry_means(p->pinned[i], best, m);
	}
	if (only) {
		for (size_t i = 0; (f = model_file_at(only, i)); i++)
			if (f->owner)
				(void)stage_apply(f->owner);
	} else {
		for (struct view_owner *o = wd->owners; o; o = o->next)
			(void)stage_apply(o);
	}
}

bool stage_apply(struct view_owner *o)
{
	const struct wd *wd = o->wd;
	bool pinned = false, needed = wd->running == NULL; /* between stages, and without a plan, all are */
	bool listed = false;

	for (const struct model_file *f = atomic_load_explicit(&o->users, memory_order_relaxed); f;
	     f = atomic_load_explicit(&f->next_user, memory_order_relaxed)) {
		pinned |= f->model->pinned || f->model->plan_pinned;
		listed |= f->model->listed;
	}
	needed |= pinned || listed;
	view_set_class(o->view, pinned ? VIEW_PINNED : needed ? VIEW_NORMAL : VIEW_UNNEEDED);
	if (pinned || listed)
		o->released_by[0] = '\0';
	else if (!needed && !o->released_by[0])
		(void)snprintf(o->released_by, sizeof(o->released_by), "%s", wd->stage_name);
	if (!needed && (wd->flags & WD_STRICT))
		view_forbid(o->view, o->released_by);
	else
		view_allow(o->view);
	return !needed;
}

/*
 * ---- reading ahead
 */
struct stage_job *stage_jobs_take(struct wd *wd, const struct wd_model *model)
{
	struct stage_job *taken = NULL, **at = &wd->jobs;

	while (*at) {
		struct stage_job *j = *at;

		if (model && j->model != model) {
			at = &j->next;
			continue;
		}
		pager_job_cancel(j->job); /* before the drops: it would read again what goes */
		*at = j->next;
		j->next = taken;
		taken = j;
	}
	return taken;
}

void stage_jobs_free(struct stage_job *jobs)
{
	while (jobs) {
		struct stage_job *next = jobs->next;

		pager_job_free(jobs->job);
		free(jobs);
		jobs = next;
	}
}

static void job_start(struct wd *wd, const struct wd_model *m)
{
	cleanup_free struct job_range *ranges = NULL;
	struct stage_job *j, **at = &wd->jobs;
	size_t nr;

	for (; *at; at = &(*at)->next)
		if ((*at)->model == m)
			return;
	/* Reading ahead is a kindness: what is not read now is read when it is touched, so nothing here is an error. */
	if (model_ranges(m, &ranges, &nr) < 0 || nr == 0)
		return;
	j = calloc(1, sizeof(*j));
	if (!j)
		return;
	j->model = m;
	if (pager_job_new(wd->pager, ranges, nr, true, &j->job) < 0)
		free(j);
	else
		*at = j;
}

/* In the plan's order: what a stage needs first should be named first. */
static void jobs_start(struct wd *wd)
{
	const struct plan_stage *s = wd->running;

	for (size_t i = 0; i < s->nr_models; i++) {
		int best = entry_best(wd, s->models[i]);

		for (const struct wd_model *m = wd->models; m; m = m->next)
			if (m->nr_files && entry_means(s->models[i], best, m))
				job_start(wd, m);
	}
}

/*
 * ---- marks
 */
/* Plans that are neither the next nor the running one any more go. */
static void plans_set(struct wd *wd, struct wd_plan *next, struct wd_plan *running)
{
	struct wd_plan *old[] = { wd->plan, wd->running_plan };

	wd->plan = next;
	wd->running_plan = running;
	for (size_t i = 0; i < ARRAY_SIZE(old); i++)
		if (old[i] && old[i] != next && old[i] != running && (i == 0 || old[i] != old[0]))
			wd_plan_free(old[i]);
}

void stage_done(struct wd *wd)
{
	plans_set(wd, NULL, NULL);
	free(wd->stage_name);
}

int wd_set_plan(struct wd *wd, const struct wd_plan *plan)
{
	struct wd_err err = { .text = "" };
	struct wd_plan *copy = NULL;
	int r;

	if (!wd)
		return api_fail(-EINVAL, "wd_set_plan: wd is NULL");
	if (plan && !(copy = plan_copy(plan)))
		return api_fail(-ENOMEM, "wd_set_plan: out of memory");
	r = handle_lock(wd, &err);
	if (r < 0) {
		wd_plan_free(copy);
		return api_done(r, __func__, &err);
	}
	plans_set(wd, copy, wd->running_plan);
	stage_update(wd, NULL);
	handle_unlock(wd);
	return 0;
}

/* Can this stage begin? The stage's models and the pinned ones must be open; those of other stages may come later. */
static int mark_check(const struct wd *wd, const char *name, const struct plan_stage **ret, struct wd_err *err)
{
	const struct wd_plan *p = wd->plan;
	const struct plan_stage *s = plan_stage(p, name);
	struct wd_err what;
	char list[400] = "";
	int r = 0;

	if (!s) {
		for (size_t i = 0; i < p->nr_stages; i++)
			list_name(list, sizeof(list), p->stages[i].name);
		return err_set(err, -ENOENT, "wd_stage_begin: the plan has no stage '%s'; it has: %s", name,
			       *list ? list : "none");
	}
	(void)err_set(&what, 0, "wd_stage_begin: the plan's stage '%.200s'", name);
	for (size_t i = 0; r == 0 && i < s->nr_models; i++)
		r = entry_check(wd, what.text, s->models[i], err);
	for (size_t i = 0; r == 0 && i < p->nr_pinned; i++)
		r = entry_check(wd, "wd_stage_begin: the plan's list of pinned models", p->pinned[i], err);
	*ret = s;
	return r;
}

static int64_t now_ms(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void wait_until(const struct wd *wd, int64_t until_ms)
{
	(void)pager_sync(wd->pager, (int)MAX(until_ms - now_ms(), 0));
}

/* wd->lock held, and left. Takes `name`. */
static void mark_begin(struct wd *wd, char *name, const struct plan_stage *stage)
{
	bool observed = wd->stage_name && !wd->running_plan;
	int64_t until = now_ms() + MARK_WAIT_MS;
	struct stage_job *jobs = stage_jobs_take(wd, NULL);

	free(wd->stage_name);
	wd->stage_name = name;
	wd->running = stage;
	plans_set(wd, wd->plan, stage ? wd->plan : NULL);
	pager_stage(wd->pager, name);
	stage_update(wd, NULL);
	if (stage)
		for (struct view_owner *o = wd->owners; o; o = o->next)
			if (stage_apply(o))
				(void)view_drop(o->view); /* what cannot go now is tried again by the pager */
	handle_unlock(wd);
	stage_jobs_free(jobs);

	/* Without the lock: other calls need not wait for the drops. No other mark comes between (stage_lock). */
	if (!stage && observed)
		pager_observe_drop(wd->pager);
	wait_until(wd, until);
	if (!stage) {
		pager_observe_begin(wd->pager);
		wait_until(wd, until); /* what is touched before it is cleared is not seen */
		return;
	}
	(void)pthread_mutex_lock(&wd->lock);
	jobs_start(wd);
	handle_unlock(wd);
}

static int stage_begin(struct wd *wd, const char *name, struct wd_err *err)
{
	cleanup_free char *copy = NULL;
	const struct plan_stage *stage = NULL;
	int r;

	if (!wd || !name)
		return err_set(err, -EINVAL, "wd_stage_begin: %s is NULL", wd ? "name" : "wd");
	if (!*name)
		return err_set(err, -EINVAL, "wd_stage_begin: the stage's name is empty");
	r = handle_check(wd, err);
	if (r < 0)
		return r;
	copy = strdup(name);
	if (!copy)
		return err_set(err, -ENOMEM, "wd_stage_begin: out of memory");
	(void)pthread_mutex_lock(&wd->stage_lock);
	(void)pthread_mutex_lock(&wd->lock);
	if (wd->plan)
		r = mark_check(wd, name, &stage, err);
	if (r < 0)
		handle_unlock(wd);
	else
		mark_begin(wd, TAKE_PTR(copy), stage);
	(void)pthread_mutex_unlock(&wd->stage_lock);
	return r;
}

int wd_stage_begin(struct wd *wd, const char *name)
{
	struct wd_err err = { .text = "" };

	return api_done(stage_begin(wd, name, &err), __func__, &err);
}

/* wd->lock held, and left. With a plan the end drops nothing: only the next beginning tells what is needed then. */
static void mark_end(struct wd *wd)
{
	bool observed = !wd->running_plan;
	struct stage_job *jobs = stage_jobs_take(wd, NULL);

	free(TAKE_PTR(wd->stage_name));
	wd->running = NULL;
	plans_set(wd, wd->plan, NULL);
	stage_update(wd, NULL);
	handle_unlock(wd);
	stage_jobs_free(jobs);
	if (observed) {
		pager_observe_drop(wd->pager);
		(void)pager_sync(wd->pager, MARK_WAIT_MS);
	}
	pager_stage(wd->pager, NULL); /* until now rounds have cleared nothing that was looked at */
}

int wd_stage_end(struct wd *wd)
{
	struct wd_err err = { .text = "" };
	int r;

	if (!wd)
		return api_fail(-EINVAL, "wd_stage_end: wd is NULL");
	r = handle_check(wd, &err);
	if (r < 0)
		return api_done(r, __func__, &err);
	(void)pthread_mutex_lock(&wd->stage_lock);
	(void)pthread_mutex_lock(&wd->lock);
	if (wd->stage_name) {
		mark_end(wd);
	} else {
		handle_unlock(wd);
		r = err_set(&err, -ESRCH, "wd_stage_end: no stage runs");
	}
	(void)pthread_mutex_unlock(&wd->stage_lock);
	return api_done(r, __func__, &err);
}

const char *wd_stage_name(const struct wd *wd)
{
	struct wd_err err = { .text = "" };
	const char *name;

	if (!wd || handle_lock((struct wd *)wd, &err) < 0)
		return NULL;
	name = wd->stage_name;
	handle_unlock((struct wd *)wd);
	return name;
}
