/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Open models: their tensors, files and views, and who stands behind a view.
 *
 * A file that several models open is one view. Its struct view_owner lists them all (`users`), so that its class,
 * strict mode and the messages are right for all. Pipelines have parts instead of files; the functions here that
 * go over files go over those of the parts.
 *
 * Threads: a model is constant once it is published, save what is marked (under wd->lock). Users and owners are
 * changed under wd->lock and read without it by the fault handler: who takes one out waits for fault_quiesce()
 * before freeing it.
 */
#ifndef WD_LIB_MODEL_H
#define WD_LIB_MODEL_H

#include "lib/checkpoint.h"
#include "lib/internal.h"

struct tensor {
	struct wd_tensor pub;
	struct model_file *file;
};

/* Name -> tensor: open addressing, at most half full. */
struct name_table {
	struct name_slot {
		const char *name; /* borrowed */
		struct tensor *tensor;
	} * slots;
	size_t nr, nr_slots; /* nr_slots: a power of two, or 0 */
};

struct model_file {
	struct wd_model *model;
	struct source *source;
	struct view *view; /* NULL: none of its tensors has bytes */
	struct view_owner *owner;
	struct model_file *_Atomic next_user;
	struct tensor *tensors;
	uint32_t *by_address; /* its tensors with bytes, as they lie in the view: number i is the view's unit i */
	size_t nr_by_address;
	struct pager_stats before; /* what the view had counted when this model came */
};

struct view_owner {
	struct wd *wd;
	struct view *view; /* borrowed from the users */
	struct view_owner *next;
	struct model_file *_Atomic users;
	char released_by[64]; /* wd->lock: strict mode: the stage at whose beginning it went; "": needed since */
};

struct wd_model {
	_Atomic unsigned int nr_refs;
	struct wd *wd;
	struct wd_model *next;
	char *name;
	struct checkpoint *ckpt;
	struct model_file *files;
	size_t nr_files;
	struct tensor *tensors; /* a pipeline's are its parts' tensors once more, with longer names */
	size_t nr_tensors;
	int64_t *strides;
	char *names; /* of a pipeline's tensors */
	struct name_table table;
	struct wd_model **parts;
	size_t nr_parts;

	/* a raw range has no checkpoint but this */
	char *raw_path;
	struct ckpt_file raw_file;
	struct ckpt_tensor raw_tensor;
	int64_t raw_shape;

	_Atomic size_t nr_aliases;
	struct name_table aliases; /* wd->lock; owns its names */
	bool published;            /* wd->lock: in wd->models */
	bool pinned;               /* wd->lock: wd_model_pin() */
	bool plan_pinned;          /* wd->lock: the plan pins it */
	bool listed;               /* wd->lock: the running stage lists it */
};

/* The i-th file of a model or of its parts; NULL beyond. */
struct model_file *model_file_at(const struct wd_model *m, size_t i);

/* What to read so that all tensors of a model are there: ranges in the order of files, each run of neighbours once. */
int model_ranges(const struct wd_model *m, struct job_range **ret, size_t *ret_nr);

/* The tensor of this file at an arena offset; NULL: header, padding. Async-signal-safe. */
const struct tensor *model_file_tensor(const struct model_file *f, uint64_t off);

/* By how much the pager's count of reloads (of views) exceeds the number of models that came back. wd->lock held. */
uint64_t models_reloads_extra(const struct wd *wd);

#endif
