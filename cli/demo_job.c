/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From checkpoints to the work list that all modes share: models, their files and tensors, the stages.
 * Keeps copies only: no file of a checkpoint stays open, so that every mode opens its own.
 */
#define _GNU_SOURCE
#include "cli/demo.h"

#include "lib/checkpoint.h"

#include <string.h>

static void checkpoint_free_p(struct checkpoint **c)
{
	(void)checkpoint_free(*c);
}

static void count(const struct checkpoint *c, size_t *nr_files, size_t *nr_tensors)
{
	*nr_files += c->nr_files;
	*nr_tensors += c->nr_tensors;
	for (size_t i = 0; i < c->nr_parts; i++)
		count(c->parts[i], nr_files, nr_tensors);
}

/* Appends a checkpoint's files and tensors; those of a pipeline's components are named "component/tensor". */
static int append(struct demo_model *m, const struct checkpoint *c, const char *prefix)
{
	size_t first_file = m->nr_files;

	for (size_t i = 0; i < c->nr_files; i++) {
		m->files[m->nr_files] = strdup(c->files[i].source->path);
		if (!m->files[m->nr_files])
			return -ENOMEM;
		m->nr_files++;
	}
	for (size_t i = 0; i < c->nr_tensors; i++) {
		const struct ckpt_tensor *t = &c->tensors[i];
		struct demo_tensor *to = &m->tensors[m->nr_tensors];
		uint64_t rows = t->ndim > 1 && t->shape[0] > 0 ? (uint64_t)t->shape[0] : 1;

		if (asprintf(&to->name, "%s%s%s", prefix ? prefix : "", prefix ? "/" : "", t->name) < 0) {
			to->name = NULL;
			return -ENOMEM;
		}
		to->offset = t->file_offset;
		to->nbytes = t->nbytes;
		to->file = (uint32_t)(first_file + t->file);
		to->dtype = t->dtype;
		to->cols = t->nbytes / demo_element_bytes(t->dtype) / rows;
		m->nbytes += t->nbytes;
		m->nr_tensors++;
	}
	for (size_t i = 0; i < c->nr_parts; i++) {
		int r = append(m, c->parts[i], c->parts[i]->name);

		if (r < 0)
			return r;
	}
	return 0;
}

/* `name`, or with "-2", "-3" ... behind it where another model has it. */
static char *unique_name(const struct demo_job *job, const char *name)
{
	char *unique = strdup(name);

	for (size_t i = 0, n = 2; unique && i < job->nr_models; i++) {
		if (strcmp(job->models[i].name, unique))
			continue;
		free(unique);
		if (asprintf(&unique, "%s-%zu", name, n++) < 0)
			return NULL;
		i = SIZE_MAX; /* begins at 0 again */
	}
	return unique;
}

static int add_stage(struct demo_job *job, char *name, size_t model, unsigned int steps)
{
	struct demo_stage *stages = name ? reallocarray(job->stages, job->nr_stages + 1, sizeof(*stages)) : NULL;

	if (!stages) {
		free(name);
		return -ENOMEM;
	}
	job->stages = stages;
	stages[job->nr_stages++] = (struct demo_stage){ .name = name, .model = model, .steps = steps };
	return 0;
}

int demo_job_add(struct demo_job *job, const char *path, const char *model_name, const char *stage_name,
		 unsigned int steps, struct wd_err *err)
{
	cleanup(checkpoint_free_p) struct checkpoint *c = NULL;
	struct demo_model *models, *m;
	size_t nr_files = 0, nr_tensors = 0;
	int r = checkpoint_open(path, NULL, 0, &c, err);

	if (r < 0)
		return r;
	models = reallocarray(job->models, job->nr_models + 1, sizeof(*models));
	if (!models)
		goto nomem;
	job->models = models;
	m = &models[job->nr_models];
	memset(m, 0, sizeof(*m));
	m->name = unique_name(job, model_name ? model_name : c->name);
	job->nr_models++;
	m->path = strdup(path);
	count(c, &nr_files, &nr_tensors);
	m->files = calloc(nr_files + 1, sizeof(*m->files));
	m->tensors = calloc(nr_tensors + 1, sizeof(*m->tensors));
	if (!m->name || !m->path || !m->files || !m->tensors || append(m, c, NULL) < 0 ||
	    add_stage(job, strdup(stage_name ? stage_name : m->name), job->nr_models - 1, steps) < 0)
		goto nomem;
	return 0;
nomem:
	return err_set(err, -ENOMEM, "%s: out of memory", path);
}

int demo_job_add_again(struct demo_job *job, struct wd_err *err)
{
	char *name;

	if (asprintf(&name, "%s-again", job->stages[0].name) < 0)
		name = NULL;
	/* A model may have that name, and with it a stage. */
	for (size_t i = 0; name && i < job->nr_stages; i++) {
		char *longer;

		if (strcmp(job->stages[i].name, name))
			continue;
		if (asprintf(&longer, "%s-again", name) < 0)
			longer = NULL;
		free(name);
		name = longer;
		i = SIZE_MAX;
	}
	if (add_stage(job, name, job->stages[0].model, 1) < 0)
		return err_set(err, -ENOMEM, "out of memory");
	return 0;
}

void demo_job_done(struct demo_job *job)
{
	for (size_t i = 0; i < job->nr_models; i++) {
		struct demo_model *m = &job->models[i];

		for (size_t k = 0; k < m->nr_files; k++)
			free(m->files[k]);
		for (size_t k = 0; k < m->nr_tensors; k++)
			free(m->tensors[k].name);
		free(m->files);
		free(m->tensors);
		free(m->name);
		free(m->path);
	}
	for (size_t i = 0; i < job->nr_stages; i++)
		free(job->stages[i].name);
	free(job->models);
	free(job->stages);
	memset(job, 0, sizeof(*job));
}
