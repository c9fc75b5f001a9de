/* SPDX-License-Identifier: Apache-2.0 */
/* See model.h for what is what, and for threads. */
#include <string.h>
#include <sys/auxv.h>

#include "lib/fault.h"
#include "lib/layout.h"
#include "lib/model.h"
#include "lib/stage.h"
#include "ufd/page.h"

/*
 * ---- names
 */
/* Seeded, so that nobody can write a file whose names all fall into one slot. */
static uint64_t hash(const char *s)
{
	static _Atomic uint64_t seed;
	uint64_t h = atomic_load_explicit(&seed, memory_order_relaxed);

	if (h == 0) {
		const void *random = (const void *)getauxval(AT_RANDOM); /* 16 bytes, by the kernel */

		if (random)
			memcpy(&h, random, sizeof(h));
		h |= 1;
		atomic_store_explicit(&seed, h, memory_order_relaxed);
	}
	for (; *s; s++)
		h = (h ^ (unsigned char)*s) * 0x100000001B3; /* FNV-1a's prime */
	return h ^ h >> 32;
}

static struct name_slot *name_slot(const struct name_table *t, const char *name)
{
	size_t i = hash(name) & (t->nr_slots - 1);

	while (t->slots[i].name && strcmp(t->slots[i].name, name))
		i = (i + 1) & (t->nr_slots - 1);
	return &t->slots[i];
}

static struct tensor *name_find(const struct name_table *t, const char *name)
{
	return t->nr_slots ? name_slot(t, name)->tensor : NULL;
}

/* Room for `nr` names in all. */
static int name_reserve(struct name_table *t, size_t nr)
{
	struct name_table bigger = { .nr_slots = 8 };

	while (bigger.nr_slots < 2 * nr)
		bigger.nr_slots *= 2;
	if (bigger.nr_slots <= t->nr_slots)
		return 0;
	bigger.slots = calloc(bigger.nr_slots, sizeof(*bigger.slots));
	if (!bigger.slots)
		return -ENOMEM;
	for (size_t i = 0; i < t->nr_slots; i++)
		if (t->slots[i].name)
			*name_slot(&bigger, t->slots[i].name) = t->slots[i];
	bigger.nr = t->nr;
	free(t->slots);
	*t = bigger;
	return 0;
}

/* There is room, and the name is new. */
static void name_add(struct name_table *t, const char *name, struct tensor *tensor)
{
	*name_slot(t, name) = (struct name_slot){ name, tensor };
	t->nr++;
}

/*
 * ---- going over files and tensors
 */
struct model_file *model_file_at(const struct wd_model *m, size_t i)
{
	if (i < m->nr_files)
		return &m->files[i];
	i -= m->nr_files;
	for (size_t p = 0; p < m->nr_parts; p++) {
		size_t nr = wd_model_nr_files(m->parts[p]);

		if (i < nr)
			return model_file_at(m->parts[p], i);
		i -= nr;
	}
	return NULL;
}

static uint64_t arena_off(const struct tensor *t)
{
	return (uint64_t)((unsigned char *)t->pub.data - view_base(t->file->view));
}

const struct tensor *model_file_tensor(const struct model_file *f, uint64_t off)
{
	size_t low = 0, high = f->nr_by_address;

	while (low < high) {
		size_t mid = low + (high - low) / 2;

		if (arena_off(&f->tensors[f->by_address[mid]]) <= off)
			low = mid + 1;
		else
			high = mid;
	}
	/* Tensors may overlap, but no format that we read nests them deeply. */
	for (size_t i = low; i > 0 && low - i < 64; i--) {
		const struct tensor *t = &f->tensors[f->by_address[i - 1]];

		if (off - arena_off(t) < t->pub.nbytes)
			return t;
	}
	return NULL;
}

int model_ranges(const struct wd_model *m, struct job_range **ret, size_t *ret_nr)
{
	struct job_range *ranges;
	struct model_file *f;
	size_t nr = 0, at = 0;

	for (size_t i = 0; (f = model_file_at(m, i)); i++)
		nr += f->nr_by_address;
	ranges = calloc(nr + 1, sizeof(*ranges));
	if (!ranges)
		return -ENOMEM;
	for (size_t i = 0; (f = model_file_at(m, i)); i++) {
		for (size_t k = 0; k < f->nr_by_address; k++) {
			const struct tensor *t = &f->tensors[f->by_address[k]];
			struct job_range *last = k ? &ranges[at - 1] : NULL;
			uint64_t off = arena_off(t), end = off + t->pub.nbytes;

			/* A gap smaller than an extent holds no whole one: nothing is read for it. */
			if (last && off < last->off + last->len + extent_bytes())
				last->len = MAX(last->off + last->len, end) - last->off;
			else
				ranges[at++] = (struct job_range){ f->view, off, t->pub.nbytes };
		}
	}
	*ret = ranges;
	*ret_nr = at;
	return 0;
}

/* The tensor behind a pointer that the caller got from this model; NULL: it did not. */
static const struct tensor *tensor_of(const struct wd_model *m, const struct wd_tensor *pub)
{
	uintptr_t at = (uintptr_t)pub - (uintptr_t)m->tensors;

	if (!pub || at >= m->nr_tensors * sizeof(*m->tensors) || at % sizeof(*m->tensors))
		return NULL;
	return &m->tensors[at / sizeof(*m->tensors)];
}

/*
 * ---- building
 */
static void set_strides(const struct ckpt_tensor *c, int64_t *strides)
{
	int64_t stride = 1;

	for (uint32_t i = c->ndim; i-- > 0;) {
		strides[i] = stride;
		/* Dimensions of 0 count as 1 here, as everywhere. Only an empty tensor's product can overflow. */
		if (__builtin_mul_overflow(stride, MAX(c->shape[i], 1), &stride))
			stride = INT64_MAX;
	}
}

/* Maps a file and tells its tensors where they are. f->tensors are filled but for `data`. */
static int file_open(struct model_file *f, const struct ckpt_file *c, uint64_t min_align,
		     const struct ckpt_tensor *tensors, struct wd_err *err)
{
	struct layout layout;
	int r;

	r = layout_compute(c->source->id.size, c->data_offset, min_align, tensors, (uint32_t)c->nr_tensors, &layout);
	if (r < 0)
		return r;
	if (layout.view.nr_units == 0) { /* nothing to map */
		layout_done(&layout);
		return 0;
	}
	r = view_open(f->model->wd->pager, f->source, &layout.view, &f->view, err);
	if (r < 0) {
		layout_done(&layout);
		return r;
	}
	if (view_owner(f->view))
		view_stats(f->view, &f->before);
	for (size_t u = 0; u < layout.view.nr_units; u++)
		f->tensors[layout.unit_tensor[u]].pub.data = view_base(f->view) + layout.view.units[u].off;
	f->by_address = TAKE_PTR(layout.unit_tensor);
	f->nr_by_address = layout.view.nr_units;

	layout_done(&layout);

	/* Used if this turns out to be the view's first model: publishing must not fail half way. */
	f->owner = calloc(1, sizeof(*f->owner));
	if (!f->owner)
		return -ENOMEM;
	f->owner->wd = f->model->wd;
	f->owner->view = f->view;
	return 0;
}

static int files_open(struct wd_model *m, const struct ckpt_file *files, size_t nr_files,
		      const struct ckpt_tensor *tensors, size_t nr_tensors, uint64_t min_align, struct wd_err *err)
{
	size_t nr_dims = 0, dim = 0;
	int r;

	if (nr_tensors > UINT32_MAX)
		return -EOVERFLOW;
	for (size_t i = 0; i < nr_tensors; i++)
		nr_dims += tensors[i].ndim;
	m->files = calloc(nr_files + 1, sizeof(*m->files));
	m->tensors = calloc(nr_tensors + 1, sizeof(*m->tensors));
	m->strides = calloc(nr_dims + 1, sizeof(*m->strides));
	if (!m->files || !m->tensors || !m->strides || name_reserve(&m->table, nr_tensors) < 0)
		return -ENOMEM;
	m->nr_tensors = nr_tensors;
	for (size_t i = 0; i < nr_tensors; i++) {
		const struct ckpt_tensor *c = &tensors[i];

		set_strides(c, m->strides + dim);
		m->tensors[i] = (struct tensor){
			.pub = {
				.size = sizeof(struct wd_tensor),
				.name = c->name,
				.shape = c->shape,
				.strides = m->strides + dim,
				.nbytes = c->nbytes,
				.dtype = c->dtype,
				.ndim = c->ndim,
				.file = files[c->file].source->path,
				.file_offset = c->file_offset,
			},
			.file = &m->files[c->file],
		};
		dim += c->ndim;
		name_add(&m->table, c->name, &m->tensors[i]);
	}
	for (size_t i = 0; i < nr_files; i++) {
		struct model_file *f = &m->files[i];

		f->model = m;
		f->source = source_ref(files[i].source);
		f->tensors = m->tensors + files[i].first_tensor;
		m->nr_files = i + 1;
		r = file_open(f, &files[i], min_align, tensors + files[i].first_tensor, err);
		if (r < 0)
			return r;
	}
	return 0;
}

static int model_new(struct wd *wd, const char *above, const char *name, struct checkpoint *c, struct wd_model **ret,
		     struct wd_err *err);
static void model_free(struct wd_model *m);

static int parts_open(struct wd_model *m, struct wd_err *err)
{
	size_t nr = 0, nr_text = 0, at = 0;
	char *text;
	int r;

	m->parts = calloc(m->ckpt->nr_parts, sizeof(struct wd_model *));
	if (!m->parts)
		return -ENOMEM;
	for (size_t i = 0; i < m->ckpt->nr_parts; i++) {
		struct checkpoint *c = TAKE_PTR(m->ckpt->parts[i]); /* it may outlive the pipeline */

		r = model_new(m->wd, m->name, c->name, c, &m->parts[i], err);
		if (r < 0)
			return r;
		m->nr_parts = i + 1;
	}
	for (size_t p = 0; p < m->nr_parts; p++) {
		nr += m->parts[p]->nr_tensors;
		for (size_t i = 0; i < m->parts[p]->nr_tensors; i++)
			nr_text += strlen(m->parts[p]->ckpt->name) + 1 + strlen(m->parts[p]->tensors[i].pub.name) + 1;
	}
	m->tensors = calloc(nr + 1, sizeof(*m->tensors));
	m->names = text = malloc(nr_text + 1);
	if (!m->tensors || !text || name_reserve(&m->table, nr) < 0)
		return -ENOMEM;
	m->nr_tensors = nr;
	for (size_t p = 0; p < m->nr_parts; p++)
		for (size_t i = 0; i < m->parts[p]->nr_tensors; i++) {
			struct tensor *t = &m->tensors[at++];

			*t = m->parts[p]->tensors[i];
			t->pub.name = text;
			text = stpcpy(stpcpy(stpcpy(text, m->parts[p]->ckpt->name), "/"),
				      m->parts[p]->tensors[i].pub.name) +
			       1;
			name_add(&m->table, t->pub.name, t);
		}
	return 0;
}

/* Frees what is in no list (any more). Parts that are open elsewhere stay. */
static void model_free(struct wd_model *m)
{
	for (size_t i = 0; i < m->nr_files; i++) {
		free(m->files[i].owner);
		view_unref(m->files[i].view);
		source_unref(m->files[i].source);
		free(m->files[i].by_address);
	}
	for (size_t i = 0; i < m->nr_parts; i++)
		wd_model_close(m->parts[i]);
	for (size_t i = 0; i < m->aliases.nr_slots; i++)
		free((char *)m->aliases.slots[i].name);
	free(m->aliases.slots);
	free(m->table.slots);
	free(m->parts);
	free(m->names);
	free(m->strides);
	free(m->tensors);
	free(m->files);
	checkpoint_free(m->ckpt);
	source_unref(m->raw_file.source);
	free(m->raw_path);
	free(m->name);
	handle_unref(m->wd);
	free(m);
}

/* Takes `c` (NULL for a raw range, whose files the caller opens), also if it fails. `above`: the pipeline's name or
 * NULL. The model is in no list yet. */
static int model_new(struct wd *wd, const char *above, const char *name, struct checkpoint *c, struct wd_model **ret,
		     struct wd_err *err)
{
	struct wd_model *m = calloc(1, sizeof(*m));
	int r = 0;

	if (!m) {
		checkpoint_free(c);
		return -ENOMEM;
	}
	m->nr_refs = 1;
	m->wd = handle_ref(wd);
	m->ckpt = c;
	if (asprintf(&m->name, "%s%s%s", above ? above : "", above ? "/" : "", name) < 0) {
		m->name = NULL;
		r = -ENOMEM;
	}
	if (r == 0 && c)
		r = c->nr_parts ? parts_open(m, err) :
				  files_open(m, c->files, c->nr_files, c->tensors, c->nr_tensors, 1, err);
	if (r < 0) {
		model_free(m);
		return r;
	}
	*ret = m;
	return 0;
}

/*
 * ---- publishing
 */
static bool same_files(const struct wd_model *a, const struct wd_model *b)
{
	size_t i;

	for (i = 0;; i++) {
		const struct model_file *fa = model_file_at(a, i), *fb = model_file_at(b, i);
		struct source_id id;

		if (!fa || !fb)
			return fa == fb;
		id = fa->source->id;
		id.ctime_ns = fb->source->id.ctime_ns; /* moved by links and chmod, which make no other file of it */
		if (!source_id_equal(&id, &fb->source->id))
			return false;
	}
}

static int name_free_check(const struct wd *wd, const struct wd_model *m, struct wd_err *err)
{
	int r;

	for (const struct wd_model *o = wd->models; o; o = o->next)
		if (!strcmp(o->name, m->name) && !same_files(o, m))
			return err_set(err, -EEXIST,
				       "%s: a model named '%s' is open from another file, %s; give this one "
				       "another name (wd_model_options.name)",
				       wd_model_path(m), m->name, wd_model_path(o));
	for (size_t i = 0; i < m->nr_parts; i++) {
		r = name_free_check(wd, m->parts[i], err);
		if (r < 0)
			return r;
	}
	return 0;
}

static void users_add(struct model_file *f)
{
	struct model_file *_Atomic *at = &f->owner->users;

	while (atomic_load_explicit(at, memory_order_relaxed))
		at = &atomic_load_explicit(at, memory_order_relaxed)->next_user;
	atomic_store_explicit(at, f, memory_order_release);
}

static void users_remove(struct model_file *f)
{
	struct model_file *_Atomic *at = &f->owner->users;

	while (atomic_load_explicit(at, memory_order_relaxed) != f)
		at = &atomic_load_explicit(at, memory_order_relaxed)->next_user;
	/* f keeps its own pointer: a handler that stands on it goes on from there. */
	atomic_store_explicit(at, atomic_load_explicit(&f->next_user, memory_order_relaxed), memory_order_release);
}

static void publish(struct wd *wd, struct wd_model *m)
{
	struct wd_model **at = &wd->models;

	m->published = true;
	for (size_t i = 0; i < m->nr_files; i++) {
		struct model_file *f = &m->files[i];
		struct view_owner *known = f->view ? view_owner(f->view) : NULL;

		if (!f->view)
			continue;
		if (known) {
			free(f->owner);
			f->owner = known;
			users_add(f);
			continue;
		}
		users_add(f);
		f->owner->next = wd->owners;
		wd->owners = f->owner;
		view_set_owner(f->view, f->owner);
	}
	while (*at)
		at = &(*at)->next;
	*at = m;
	for (size_t i = 0; i < m->nr_parts; i++)
		publish(wd, m->parts[i]);
}

static uint64_t reloads_extra(const struct wd_model *m, bool ending);

/* Out of all lists. Owners that nobody needs any more stay with the file, to be freed; others are taken from it. */
static void unpublish(struct wd *wd, struct wd_model *m)
{
	struct wd_model **at = &wd->models;

	wd->reloads_extra += reloads_extra(m, true);
	while (*at != m)
		at = &(*at)->next;
	*at = m->next;
	for (size_t i = 0; i < m->nr_files; i++) {
		struct model_file *f = &m->files[i];
		struct view_owner **o = &wd->owners;

		if (!f->view)
			continue;
		users_remove(f);
		if (atomic_load_explicit(&f->owner->users, memory_order_relaxed)) {
			stage_apply(f->owner); /* the others may need it less */
			f->owner = NULL;
			continue;
		}
		view_set_owner(f->view, NULL);
		while (*o != f->owner)
			o = &(*o)->next;
		*o = f->owner->next;
	}
}

/* Lists a new model and its parts. Takes it, also if it fails. */
static int model_publish(struct wd *wd, struct wd_model *m, struct wd_model **ret, struct wd_err *err)
{
	int r = handle_lock(wd, err);

	if (r == 0) {
		r = name_free_check(wd, m, err);
		if (r == 0) {
			publish(wd, m);
			stage_update(wd, m);
		}
		handle_unlock(wd);
	}
	if (r < 0)
		model_free(m);
	else
		*ret = m;
	return r;
}

static int open_options(const char *function, struct wd *wd, const char *path, const void *options,
			struct wd_model_options *o, struct wd_model **ret, struct wd_err *err)
{
	int r;

	if (!wd || !path || !ret)
		return err_set(err, -EINVAL, "%s: %s is NULL", function, !wd ? "wd" : !path ? "path" : "ret");
	r = handle_check(wd, err);
	if (r == 0)
		r = options_in(options, offsetof(struct wd_model_options, name) + sizeof(o->name), sizeof(*o), o, err);
	if (r < 0)
		return err_prefix(err, r, "%s", function);
	if (o->flags & ~WD_MODEL_TRAILING)
		return err_set(err, -EINVAL, "%s: %s: unknown flags %#x; use WD_MODEL_TRAILING", function, path,
			       o->flags);
	if (o->name && !*o->name)
		return err_set(err, -EINVAL, "%s: %s: the name is empty; give one, or NULL for the file's", function,
			       path);
	return 0;
}

static int model_open(struct wd *wd, const char *path, const struct wd_model_options *options, struct wd_model **ret,
		      struct wd_err *err)
{
	struct wd_model_options o;
	struct checkpoint *c;
	struct wd_model *m;
	int r;

	r = open_options("wd_model_open", wd, path, options, &o, ret, err);
	if (r < 0)
		return r;
	r = checkpoint_open(path, o.variant, o.flags & WD_MODEL_TRAILING ? CKPT_TRAILING : 0, &c, err);
	if (r < 0)
		return r;
	r = model_new(wd, NULL, o.name ? o.name : c->name, c, &m, err);
	return r < 0 ? r : model_publish(wd, m, ret, err);
}

int wd_model_open(struct wd *wd, const char *path, const struct wd_model_options *options, struct wd_model **ret)
{
	struct wd_err err = { .text = "" };
	int r = model_open(wd, path, options, ret, &err);

	if (r < 0 && !err.text[0])
		(void)err_set(&err, r, "%s: %s", path, strerror(-r));
	return api_done(r, __func__, &err);
}

/* "dir/unet.bin" -> "unet". */
static char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path, *dot = strrchr(base, '.');

	return dot && dot != base ? strndup(base, (size_t)(dot - base)) : strdup(base);
}

static int raw_open(struct wd_model *m, const char *path, struct source *source, uint64_t offset, uint64_t nbytes,
		    struct wd_err *err)
{
	m->raw_path = strdup(path);
	if (!m->raw_path)
		return -ENOMEM;
	m->raw_shape = (int64_t)nbytes;
	m->raw_file = (struct ckpt_file){ .source = source_ref(source),
					  .format = "raw",
					  .data_offset = offset,
					  .data_bytes = nbytes,
					  .nr_tensors = 1 };
	m->raw_tensor = (struct ckpt_tensor){ .name = "data",
					      .shape = &m->raw_shape,
					      .file_offset = offset,
					      .nbytes = nbytes,
					      .dtype = WD_DTYPE_U8,
					      .ndim = 1 };
	return files_open(m, &m->raw_file, 1, &m->raw_tensor, 1, LAYOUT_ALIGN, err);
}

static int model_open_raw(struct wd *wd, const char *path, uint64_t offset, uint64_t nbytes,
			  const struct wd_model_options *options, struct wd_model **ret, struct wd_err *err)
{
	cleanup_source struct source *source = NULL;
	cleanup_free char *name = NULL;
	struct wd_model_options o;
	struct wd_model *m;
	int r;

	r = open_options("wd_model_open_raw", wd, path, options, &o, ret, err);
	if (r < 0)
		return r;
	if (o.variant || o.flags)
		return err_set(err, -EINVAL, "wd_model_open_raw: %s: a raw range has no variant and no flags", path);
	r = source_open(path, &source, err);
	if (r < 0)
		return r;
	if (offset > source->id.size || nbytes > source->id.size - offset)
		return err_set(err, -ERANGE, "%s: bytes %llu to %llu asked for, but it has %llu", path,
			       (unsigned long long)offset, (unsigned long long)(offset + nbytes),
			       (unsigned long long)source->id.size);
	if (nbytes == 0)
		nbytes = source->id.size - offset;
	name = o.name ? strdup(o.name) : base_name(path);
	r = name ? model_new(wd, NULL, name, NULL, &m, err) : -ENOMEM;
	if (r < 0)
		return r;
	r = raw_open(m, path, source, offset, nbytes, err);
	if (r < 0) {
		model_free(m);
		return r;
	}
	return model_publish(wd, m, ret, err);
}

int wd_model_open_raw(struct wd *wd, const char *path, uint64_t offset, uint64_t nbytes,
		      const struct wd_model_options *options, struct wd_model **ret)
{
	struct wd_err err = { .text = "" };
	int r = model_open_raw(wd, path, offset, nbytes, options, ret, &err);

	if (r < 0 && !err.text[0])
		(void)err_set(&err, r, "%s: %s", path, strerror(-r));
	return api_done(r, __func__, &err);
}

/*
 * ---- references
 */
struct wd_model *wd_model_ref(struct wd_model *model)
{
	if (model)
		(void)atomic_fetch_add_explicit(&model->nr_refs, 1, memory_order_relaxed);
	return model;
}

void wd_model_close(struct wd_model *model)
{
	struct wd_err err;
	struct stage_job *jobs;

	if (!model || atomic_fetch_sub_explicit(&model->nr_refs, 1, memory_order_acq_rel) > 1)
		return;
	if (model->published) {
		if (handle_lock(model->wd, &err) < 0)
			return; /* a broken child: left to the end of the process */
		jobs = stage_jobs_take(model->wd, model);
		unpublish(model->wd, model);
		handle_unlock(model->wd);
		stage_jobs_free(jobs);
		fault_quiesce();
	}
	model_free(model);
}

/*
 * ---- looking
 */
const char *wd_model_name(const struct wd_model *model)
{
	return model ? model->name : NULL;
}

const char *wd_model_path(const struct wd_model *model)
{
	if (!model)
		return NULL;
	return model->ckpt ? model->ckpt->path : model->raw_path;
}

const struct wd_tensor *wd_model_tensor(const struct wd_model *model, const char *name)
{
	struct wd_err err = { .text = "" };
	const struct tensor *t;

	if (!model || !name) {
		(void)api_fail(-EINVAL, "wd_model_tensor: %s is NULL", model ? "name" : "model");
		return NULL;
	}
	t = name_find(&model->table, name);
	if (!t && atomic_load_explicit(&model->nr_aliases, memory_order_acquire)) {
		if (api_done(handle_lock(model->wd, &err), __func__, &err) < 0)
			return NULL;
		t = name_find(&model->aliases, name);
		handle_unlock(model->wd);
	}
	if (!t) {
		(void)api_fail(-ENOENT,
			       "%s: model '%s' has no tensor '%s' (it has %zu others); `weightd inspect` lists them",
			       wd_model_path(model), model->name, name, model->nr_tensors);
		return NULL;
	}
	return &t->pub;
}

size_t wd_model_nr_tensors(const struct wd_model *model)
{
	return model ? model->nr_tensors : 0;
}

const struct wd_tensor *wd_model_tensor_at(const struct wd_model *model, size_t i)
{
	return model && i < model->nr_tensors ? &model->tensors[i].pub : NULL;
}

size_t wd_model_nr_metadata(const struct wd_model *model)
{
	return model && model->ckpt ? model->ckpt->nr_metadata : 0;
}

int wd_model_metadata_at(const struct wd_model *model, size_t i, const char **ret_key, const char **ret_value)
{
	if (!model || !ret_key || !ret_value)
		return api_fail(-EINVAL, "wd_model_metadata_at: %s is NULL", model ? "a result" : "model");
	if (i >= wd_model_nr_metadata(model))
		return api_fail(-ERANGE, "wd_model_metadata_at: model '%s' has %zu entries, there is no number %zu",
				model->name, wd_model_nr_metadata(model), i);
	*ret_key = model->ckpt->metadata[i].key;
	*ret_value = model->ckpt->metadata[i].value;
	return 0;
}

const char *wd_model_metadata(const struct wd_model *model, const char *key)
{
	for (size_t i = 0; key && i < wd_model_nr_metadata(model); i++)
		if (!strcmp(model->ckpt->metadata[i].key, key))
			return model->ckpt->metadata[i].value;
	return NULL;
}

size_t wd_model_nr_files(const struct wd_model *model)
{
	size_t nr = model ? model->nr_files : 0;

	for (size_t i = 0; model && i < model->nr_parts; i++)
		nr += wd_model_nr_files(model->parts[i]);
	return nr;
}

const char *wd_model_file_at(const struct wd_model *model, size_t i)
{
	const struct model_file *f = model ? model_file_at(model, i) : NULL;

	return f ? f->source->path : NULL;
}

size_t wd_model_nr_parts(const struct wd_model *model)
{
	return model ? model->nr_parts : 0;
}

struct wd_model *wd_model_part_at(const struct wd_model *model, size_t i)
{
	return model && i < model->nr_parts ? model->parts[i] : NULL;
}

int wd_model_alias(struct wd_model *model, const char *alias, const char *target)
{
	struct wd_err err = { .text = "" };
	struct tensor *t;
	char *name;
	int r;

	if (!model || !alias || !target)
		return api_fail(-EINVAL, "wd_model_alias: %s is NULL", !model ? "model" : !alias ? "alias" : "target");
	r = handle_lock(model->wd, &err);
	if (r < 0)
		return api_done(r, __func__, &err);
	t = name_find(&model->table, target);
	if (!t)
		t = name_find(&model->aliases, target);
	if (!t)
		r = err_set(&err, -ENOENT, "wd_model_alias: model '%s' has no tensor '%s' to give the name '%s' to",
			    model->name, target, alias);
	else if (name_find(&model->table, alias) || name_find(&model->aliases, alias))
		r = err_set(&err, -EEXIST, "wd_model_alias: model '%s' has a tensor '%s' already", model->name, alias);
	else if (name_reserve(&model->aliases, model->aliases.nr + 1) < 0 || !(name = strdup(alias)))
		r = -ENOMEM;
	else {
		name_add(&model->aliases, name, t);
		(void)atomic_fetch_add_explicit(&model->nr_aliases, 1, memory_order_release);
	}
	handle_unlock(model->wd);
	return api_done(r, __func__, &err);
}

/*
 * ---- memory
 */
/* Would this model's release take memory from another one that is pinned? */
static bool pinned_by_other(const struct wd_model *m, const struct view_owner *o)
{
	for (struct model_file *f = atomic_load_explicit(&o->users, memory_order_relaxed); f;
	     f = atomic_load_explicit(&f->next_user, memory_order_relaxed))
		if (f->model != m && (f->model->pinned || f->model->plan_pinned))
			return true;
	return false;
}

int wd_model_release(struct wd_model *model)
{
	struct wd_err err = { .text = "" };
	struct model_file *f;
	int r;

	if (!model)
		return api_fail(-EINVAL, "wd_model_release: model is NULL");
	r = handle_lock(model->wd, &err);
	if (r < 0)
		return api_done(r, __func__, &err);
	for (size_t i = 0; r == 0 && (f = model_file_at(model, i)); i++)
		if (f->view && !pinned_by_other(f->model, f->owner))
			r = view_drop(f->view);
	handle_unlock(model->wd);
	return api_done(r, __func__, &err);
}

/* Its number among the file's units; views are shared only where these are the same. */
static size_t unit_of(const struct tensor *t)
{
	const struct model_file *f = t->file;
	size_t low = 0, high = f->nr_by_address;

	while (low < high) {
		size_t mid = low + (high - low) / 2;

		if (arena_off(&f->tensors[f->by_address[mid]]) < arena_off(t))
			low = mid + 1;
		else
			high = mid;
	}
	/* Several tensors may begin at one place. */
	while (low + 1 < f->nr_by_address && f->tensors[f->by_address[low]].pub.nbytes != t->pub.nbytes)
		low++;
	return low;
}

int wd_tensor_release(struct wd_model *model, const struct wd_tensor *tensor)
{
	struct wd_err err = { .text = "" };
	const struct tensor *t;
	int r;

	if (!model || !tensor)
		return api_fail(-EINVAL, "wd_tensor_release: %s is NULL", model ? "tensor" : "model");
	t = tensor_of(model, tensor);
	if (!t)
		return api_fail(-EINVAL, "wd_tensor_release: the tensor is none of model '%s'", model->name);
	r = handle_lock(model->wd, &err);
	if (r < 0)
		return api_done(r, __func__, &err);
	if (t->pub.nbytes && !pinned_by_other(t->file->model, t->file->owner))
		r = view_drop_units(t->file->view, unit_of(t), 1);
	handle_unlock(model->wd);
	return api_done(r, __func__, &err);
}

static void pin(struct wd_model *m, bool pinned)
{
	m->pinned = pinned;
	for (size_t i = 0; i < m->nr_parts; i++)
		pin(m->parts[i], pinned);
}

int wd_model_pin(struct wd_model *model, int pinned)
{
	struct wd_err err = { .text = "" };
	int r;

	if (!model)
		return api_fail(-EINVAL, "wd_model_pin: model is NULL");
	r = handle_lock(model->wd, &err);
	if (r < 0)
		return api_done(r, __func__, &err);
	pin(model, pinned != 0);
	stage_update(model->wd, model);
	handle_unlock(model->wd);
	return 0;
}

int wd_tensor_read(struct wd_model *model, const struct wd_tensor *tensor, uint64_t offset, void *buffer, size_t nbytes)
{
	const struct tensor *t;
	struct source *s;
	int r;

	if (!model || !tensor || (!buffer && nbytes))
		return api_fail(-EINVAL, "wd_tensor_read: %s is NULL",
				!model  ? "model" :
				!tensor ? "tensor" :
					  "buffer");
	t = tensor_of(model, tensor);
	if (!t)
		return api_fail(-EINVAL, "wd_tensor_read: the tensor is none of model '%s'", model->name);
	if (offset > tensor->nbytes || nbytes > tensor->nbytes - offset)
		return api_fail(
			-ERANGE,
			"wd_tensor_read: tensor '%s' of model '%s' has %llu bytes; %zu from byte %llu on asked for",
			tensor->name, model->name, (unsigned long long)tensor->nbytes, nbytes,
			(unsigned long long)offset);
	s = t->file->source;
	r = source_read(s, buffer, nbytes, tensor->file_offset + offset);
	/* After the read: a change before or during it shows in the times. A file that ends early has changed, too. */
	if (source_check(s) < 0 || r == -ENODATA)
		return api_fail(
			-ESTALE,
			"%s: changed since it was opened, tensor '%s' of model '%s' cannot be read; open it again",
			tensor->file, tensor->name, model->name);
	if (r == -EFAULT)
		return api_fail(
			r,
			"wd_tensor_read: the buffer for tensor '%s' is not writable memory (or a tensor that strict "
			"mode or the way '%s' keeps from system calls)",
			tensor->name, wd_way_name(wd_way(model->wd)));
	return r < 0 ? api_fail(r, "%s: reading tensor '%s' of model '%s' at byte %llu: %s", tensor->file, tensor->name,
				model->name, (unsigned long long)(tensor->file_offset + offset), strerror(-r)) :
		       0;
}

/*
 * ---- counts
 */
/* A model that comes back is one reload, of however many shards: by how much its views' counts exceed that. Only for
 * views of which it is the first model, so that each is taken off once. */
static uint64_t reloads_extra(const struct wd_model *m, bool ending)
{
	struct pager_stats s;
	uint64_t sum = 0, most = 0;

	for (size_t i = 0; m->nr_files > 1 && i < m->nr_files; i++) {
		const struct model_file *f = &m->files[i];

		if (!f->view || atomic_load_explicit(&f->owner->users, memory_order_relaxed) != f)
			continue;
		if (ending && atomic_load_explicit(&f->next_user, memory_order_relaxed))
			continue; /* the next one's from now on */
		view_stats(f->view, &s);
		sum += s.reloads;
		most = MAX(most, s.reloads);
	}
	return sum - most;
}

uint64_t models_reloads_extra(const struct wd *wd)
{
	uint64_t sum = wd->reloads_extra;

	for (const struct wd_model *m = wd->models; m; m = m->next)
		sum += reloads_extra(m, false);
	return sum;
}

static void stats_add(struct pager_stats *sum, const struct model_file *f)
{
	struct pager_stats s;

	view_stats(f->view, &s);
	sum->resident_bytes += s.resident_bytes;
	sum->peak_bytes += s.peak_bytes;
	sum->huge_bytes += s.huge_bytes;
	sum->written_bytes += s.written_bytes;
	sum->read_bytes += s.read_bytes - f->before.read_bytes;
	sum->reads += s.reads - f->before.reads;
	sum->faults += s.faults - f->before.faults;
	sum->dropped_bytes += s.dropped_bytes - f->before.dropped_bytes;
	sum->reload_bytes += s.reload_bytes - f->before.reload_bytes;
	sum->failed += s.failed - f->before.failed;
}

/* As models, not files, are counted: a leaf's is the highest of its shards', a pipeline's the sum of its parts'. */
static uint64_t reloads(const struct wd_model *m)
{
	struct pager_stats s;
	uint64_t sum = 0, most = 0;

	for (size_t i = 0; i < m->nr_files; i++) {
		if (!m->files[i].view)
			continue;
		view_stats(m->files[i].view, &s);
		most = MAX(most, s.reloads - m->files[i].before.reloads);
	}
	for (size_t i = 0; i < m->nr_parts; i++)
		sum += reloads(m->parts[i]);
	return sum + most;
}

int wd_model_stats(struct wd_model *model, struct wd_stats *ret)
{
	struct wd_err err = { .text = "" };
	struct pager_stats all, sum = { 0 };
	struct model_file *f;
	int r;

	if (!model || !ret)
		return api_fail(-EINVAL, "wd_model_stats: %s is NULL", model ? "ret" : "model");
	r = handle_check(model->wd, &err);
	if (r < 0)
		return api_done(r, __func__, &err);
	for (size_t i = 0; (f = model_file_at(model, i)); i++)
		if (f->view)
			stats_add(&sum, f);
	pager_stats(model->wd->pager, &all);
	sum.reloads = reloads(model);
	sum.budget_bytes = all.budget_bytes;
	return api_done(stats_out(model->wd, &sum, ret, &err), __func__, &err);
}

/*
 * ---- populate
 */
struct wd_job {
	struct wd_model *model; /* referenced: the memory that is read into */
	const struct wd_tensor *tensor;
	struct pager_job *job;
};

int wd_populate(struct wd_model *model, const struct wd_tensor *tensor, struct wd_job **ret)
{
	struct wd_err err = { .text = "" };
	cleanup_free struct job_range *ranges = NULL;
	const struct tensor *t = NULL;
	struct wd_job *job;
	size_t nr = 0;
	int r;

	if (!model || !ret)
		return api_fail(-EINVAL, "wd_populate: %s is NULL", model ? "ret" : "model");
	if (tensor && !(t = tensor_of(model, tensor)))
		return api_fail(-EINVAL, "wd_populate: the tensor is none of model '%s'", model->name);
	r = handle_check(model->wd, &err);
	if (r < 0)
		return api_done(r, __func__, &err);
	if (!t) {
		r = model_ranges(model, &ranges, &nr);
	} else {
		ranges = calloc(1, sizeof(*ranges));
		if (!ranges)
			r = -ENOMEM;
		else if (tensor->nbytes)
			ranges[nr++] = (struct job_range){ t->file->view, arena_off(t), tensor->nbytes };
	}
	job = calloc(1, sizeof(*job));
	if (!job)
		r = -ENOMEM;
	if (r == 0)
		r = pager_job_new(model->wd->pager, ranges, nr, false, &job->job);
	if (r < 0) {
		free(job);
		return api_fail(r, "wd_populate: model '%s': %s", model->name, strerror(-r));
	}
	job->model = wd_model_ref(model);
	job->tensor = tensor;
	*ret = job;
	return 0;
}

int wd_job_fd(const struct wd_job *job)
{
	return job ? pager_job_fd(job->job) : api_fail(-EINVAL, "wd_job_fd: job is NULL");
}

int wd_job_progress(const struct wd_job *job, struct wd_progress *ret)
{
	struct wd_progress p = { .size = sizeof(p) };
	struct wd_err err = { .text = "" };

	if (!job || !ret)
		return api_fail(-EINVAL, "wd_job_progress: %s is NULL", job ? "ret" : "job");
	pager_job_progress(job->job, &p.done_bytes, &p.total_bytes, &p.state);
	return api_done(struct_out(&p, offsetof(struct wd_progress, done_bytes), sizeof(p), ret, &err), __func__, &err);
}

int wd_job_wait(struct wd_job *job, int timeout_ms)
{
	const char *why;
	int r;

	if (!job)
		return api_fail(-EINVAL, "wd_job_wait: job is NULL");
	r = pager_job_wait(job->job, timeout_ms);
	if (r == 0)
		return 0;
	switch (r) {
	case -ETIMEDOUT:
		why = "still reading when the time was over";
		break;
	case -ECANCELED:
		why = "cancelled";
		break;
	case -ENOSPC:
		why = "the budget is full of what must stay; raise it (wd_set_budget) or release models";
		break;
	case -ESTALE:
		why = "the file changed since it was opened; open it again";
		break;
	default:
		why = strerror(-r);
	}
	return api_fail(r, "%s: populate of %s%s%smodel '%s': %s",
			job->tensor ? job->tensor->file : wd_model_path(job->model), job->tensor ? "tensor '" : "",
			job->tensor ? job->tensor->name : "", job->tensor ? "' of " : "", job->model->name, why);
}

void wd_job_cancel(struct wd_job *job)
{
	if (job)
		pager_job_cancel(job->job);
}

void wd_job_free(struct wd_job *job)
{
	if (!job)
		return;
	pager_job_free(job->job);
	wd_model_close(job->model);
	free(job);
}
