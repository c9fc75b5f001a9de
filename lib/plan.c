/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans: lists of names, built by calls or read from a plan file. Knows no models.
 *
 * jansson says where text is no JSON, but not where a value stands that it parsed. A value here carries its path
 * (which member of which member ...), and locate() follows that through the text for the message's line.
 *
 * Threads: a plan has a lock for its builders.
 */
#include <fcntl.h>
#include <jansson.h>
#include <string.h>

#include "lib/stage.h"

/* Far more than any plan; what is larger was given by mistake (a checkpoint, say). */
#define PLAN_FILE_MAX (16 * MiB)

/*
 * ---- lists of names
 */
static void names_free(char **names, size_t nr)
{
	for (size_t i = 0; i < nr; i++)
		free(names[i]);
	free(names);
}

/* Appends a copy unless it is there. */
static int names_add(char ***names, size_t *nr, const char *name)
{
	char **more, *copy;

	for (size_t i = 0; i < *nr; i++)
		if (!strcmp((*names)[i], name))
			return 0;
	more = realloc(*names, (*nr + 1) * sizeof(char *));
	if (!more)
		return -ENOMEM;
	*names = more;
	copy = strdup(name);
	if (!copy)
		return -ENOMEM;
	more[(*nr)++] = copy;
	return 0;
}

static int stage_add(struct wd_plan *p, const char *name, struct plan_stage **ret)
{
	struct plan_stage *more;
	char *copy;

	for (size_t i = 0; i < p->nr_stages; i++)
		if (!strcmp(p->stages[i].name, name)) {
			*ret = &p->stages[i];
			return 0;
		}
	more = realloc(p->stages, (p->nr_stages + 1) * sizeof(*more));
	if (!more)
		return -ENOMEM;
	p->stages = more;
	copy = strdup(name);
	if (!copy)
		return -ENOMEM;
	p->stages[p->nr_stages] = (struct plan_stage){ .name = copy };
	*ret = &p->stages[p->nr_stages++];
	return 0;
}

const struct plan_stage *plan_stage(const struct wd_plan *plan, const char *name)
{
	for (size_t i = 0; i < plan->nr_stages; i++)
		if (!strcmp(plan->stages[i].name, name))
			return &plan->stages[i];
	return NULL;
}

int plan_entry_matches(const char *entry, const char *model)
{
	size_t nr_entry = strlen(entry), nr_model = strlen(model);

	if (!strncmp(model, entry, nr_entry) && (model[nr_entry] == '\0' || model[nr_entry] == '/'))
		return 2;
	return nr_model > nr_entry && model[nr_model - nr_entry - 1] == '/' &&
	       !strcmp(model + nr_model - nr_entry, entry);
}

/*
 * ---- life
 */
static struct wd_plan *plan_new(void)
{
	struct wd_plan *p = calloc(1, sizeof(*p));

	if (p)
		(void)pthread_mutex_init(&p->lock, NULL);
	return p;
}

void wd_plan_free(struct wd_plan *plan)
{
	if (!plan)
		return;
	for (size_t i = 0; i < plan->nr_stages; i++) {
		names_free(plan->stages[i].models, plan->stages[i].nr_models);
		free(plan->stages[i].name);
	}
	free(plan->stages);
	names_free(plan->pinned, plan->nr_pinned);
	(void)pthread_mutex_destroy(&plan->lock);
	free(plan);
}

static void plan_free_p(struct wd_plan **p)
{
	wd_plan_free(*p);
}

struct wd_plan *plan_copy(const struct wd_plan *plan)
{
	cleanup(plan_free_p) struct wd_plan *copy = plan_new();
	pthread_mutex_t *lock = (pthread_mutex_t *)&plan->lock;
	struct plan_stage *s;
	int r = copy ? 0 : -ENOMEM;

	(void)pthread_mutex_lock(lock);
	for (size_t i = 0; r == 0 && i < plan->nr_stages; i++) {
		r = stage_add(copy, plan->stages[i].name, &s);
		for (size_t k = 0; r == 0 && k < plan->stages[i].nr_models; k++)
			r = names_add(&s->models, &s->nr_models, plan->stages[i].models[k]);
	}
	for (size_t i = 0; r == 0 && i < plan->nr_pinned; i++)
		r = names_add(&copy->pinned, &copy->nr_pinned, plan->pinned[i]);
	(void)pthread_mutex_unlock(lock);
	return r < 0 ? NULL : TAKE_PTR(copy);
}

int wd_plan_new(struct wd_plan **ret)
{
	struct wd_plan *p;

	if (!ret)
		return api_fail(-EINVAL, "wd_plan_new: ret is NULL");
	p = plan_new();
	if (!p)
		return api_fail(-ENOMEM, "wd_plan_new: out of memory");
	*ret = p;
	return 0;
}

static int entry_add(struct wd_plan *p, const char *stage, const char *model)
{
	struct plan_stage *s;
	int r = stage_add(p, stage, &s);

	return r < 0 || !model ? r : names_add(&s->models, &s->nr_models, model);
}

int wd_plan_add(struct wd_plan *plan, const char *stage, const char *model)
{
	int r;

	if (!plan || !stage)
		return api_fail(-EINVAL, "wd_plan_add: %s is NULL", plan ? "stage" : "plan");
	if (!*stage || (model && !*model))
		return api_fail(-EINVAL, "wd_plan_add: the name of the %s is empty", *stage ? "model" : "stage");
	(void)pthread_mutex_lock(&plan->lock);
	r = entry_add(plan, stage, model);
	(void)pthread_mutex_unlock(&plan->lock);
	return r < 0 ? api_fail(r, "wd_plan_add: stage '%s': %s", stage, strerror(-r)) : 0;
}

int wd_plan_pin(struct wd_plan *plan, const char *model)
{
	int r;

	if (!plan || !model)
		return api_fail(-EINVAL, "wd_plan_pin: %s is NULL", plan ? "model" : "plan");
	if (!*model)
		return api_fail(-EINVAL, "wd_plan_pin: the name of the model is empty");
	(void)pthread_mutex_lock(&plan->lock);
	r = names_add(&plan->pinned, &plan->nr_pinned, model);
	(void)pthread_mutex_unlock(&plan->lock);
	return r < 0 ? api_fail(r, "wd_plan_pin: model '%s': %s", model, strerror(-r)) : 0;
}

/*
 * ---- lines of values. All text here has been parsed by jansson, so it is good JSON.
 */
struct where {
	const char *path, *text;
	size_t depth, at[4]; /* number of the member or element at each depth */
};

static const char *skip_space(const char *s)
{
	return s + strspn(s, " \t\r\n");
}

static const char *skip_string(const char *s)
{
	for (s++; *s != '"'; s++)
		if (*s == '\\')
			s++;
	return s + 1;
}

static const char *skip_value(const char *s)
{
	size_t depth = 0;

	do {
		s = skip_space(s);
		if (*s == '"') {
			s = skip_string(s);
		} else if (strchr("[{", *s)) {
			depth++;
			s++;
		} else if (strchr("]}", *s)) {
			depth--;
			s++;
		} else if (strchr(",:", *s)) {
			s++;
		} else {
			s += strcspn(s, " \t\r\n,:]}\"[{");
		}
	} while (depth);
	return skip_space(s);
}

/* Where the member or element at w's path begins (a member's key, if it has one). */
static size_t locate(const struct where *w)
{
	const char *s = skip_space(w->text);
	size_t line = 1;

	for (size_t d = 0; d < w->depth; d++) {
		if (d && *s == '"' && *skip_space(skip_string(s)) == ':')
			s = skip_space(skip_space(skip_string(s)) + 1); /* the key of the step before */
		s = skip_space(s + 1);                                  /* into the object or array */
		for (size_t i = 0; i < w->at[d]; i++) {
			if (*s == '"' && *skip_space(skip_string(s)) == ':')
				s = skip_space(skip_string(s)) + 1;
			s = skip_space(skip_value(s) + 1); /* behind the comma */
		}
	}
	for (const char *c = w->text; c < s; c++)
		line += *c == '\n';
	return line;
}

static int bad(struct wd_err *err, const struct where *w, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int bad(struct wd_err *err, const struct where *w, const char *fmt, ...)
{
	char text[512];
	va_list ap;

	va_start(ap, fmt);
	if (vsnprintf(text, sizeof(text), fmt, ap) < 0)
		text[0] = '\0';
	va_end(ap);
	return err_set(err, -EBADMSG, "%s: line %zu: %s", w->path, locate(w), text);
}

static struct where step(struct where w, size_t i)
{
	w.at[w.depth++] = i;
	return w;
}

/*
 * ---- plan files
 */
static int parse_names(const json_t *array, const char *what, struct where w, char ***names, size_t *nr,
		       struct wd_err *err)
{
	if (!json_is_array(array))
		return bad(err, &w, "%s must be a list of model names", what);
	for (size_t i = 0; i < json_array_size(array); i++) {
		const json_t *name = json_array_get(array, i);
		struct where at = step(w, i);
		size_t before = *nr;

		if (!json_is_string(name) || !json_string_length(name))
			return bad(err, &at, "%s: each must be a model's name, in quotes", what);
		if (names_add(names, nr, json_string_value(name)) < 0)
			return -ENOMEM;
		if (*nr == before)
			return bad(err, &at, "%s: '%s' is listed twice", what, json_string_value(name));
	}
	return 0;
}

static int parse_stage(json_t *stage, struct where w, struct wd_plan *p, struct wd_err *err)
{
	json_t *value, *name = json_object_get(stage, "name"), *models = NULL;
	struct where models_at = w;
	struct plan_stage *s;
	const char *key;
	size_t i = 0;
	int r;

	if (!json_is_object(stage))
		return bad(err, &w, "a stage must be an object: {\"name\": ..., \"models\": [...]}");
	json_object_foreach(stage, key, value) {
		struct where at = step(w, i++);

		if (!strcmp(key, "models")) {
			models = value;
			models_at = at;
		} else if (strcmp(key, "name")) {
			return bad(err, &at, "a stage has no '%s'; it has name and models", key);
		} else if (!json_is_string(value) || !json_string_length(value)) {
			return bad(err, &at, "name must be the stage's name, in quotes");
		} else if (plan_stage(p, json_string_value(value))) {
			return bad(err, &at, "there is a stage '%s' already", json_string_value(value));
		}
	}
	if (!name || !models)
		return bad(err, &w, "the stage lacks its %s", name ? "models (a list, which may be empty)" : "name");
	r = stage_add(p, json_string_value(name), &s);
	return r < 0 ? r : parse_names(models, "models", models_at, &s->models, &s->nr_models, err);
}

static int parse_stages(const json_t *stages, struct where w, struct wd_plan *p, struct wd_err *err)
{
	int r = 0;

	if (!json_is_array(stages))
		return bad(err, &w, "stages must be a list");
	for (size_t i = 0; r == 0 && i < json_array_size(stages); i++)
		r = parse_stage(json_array_get(stages, i), step(w, i), p, err);
	return r;
}

static int parse_plan(json_t *root, struct where w, struct wd_plan *p, struct wd_err *err)
{
	json_t *value;
	const char *key;
	size_t i = 0;
	int r = 0;

	if (!json_is_object(root) || !json_object_get(root, "weightd_plan"))
		return bad(err, &w, "this is no plan: it must begin with {\"weightd_plan\": 1, \"stages\": [");
	if (!json_object_get(root, "stages"))
		return bad(err, &w, "the plan lacks its stages");
	json_object_foreach(root, key, value) {
		struct where at = step(w, i++);

		if (!strcmp(key, "weightd_plan")) {
			if (!json_is_integer(value) || json_integer_value(value) != 1)
				r = bad(err, &at,
					"the plan's version (weightd_plan) must be 1; weightd %s knows no other",
					WD_VERSION);
		} else if (!strcmp(key, "stages")) {
			r = parse_stages(value, at, p, err);
		} else if (!strcmp(key, "pinned")) {
			r = parse_names(value, "pinned", at, &p->pinned, &p->nr_pinned, err);
		} else {
			r = bad(err, &at, "a plan has no '%s'; it has weightd_plan, stages and pinned", key);
		}
		if (r < 0)
			return r;
	}
	return 0;
}

static int read_text(const char *path, char **ret, size_t *ret_nbytes, struct wd_err *err)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
	cleanup_free char *text = NULL;
	size_t nbytes = 0, room = 0;
	ssize_t n;

	if (fd < 0)
		return err_set(err, -errno, "%s: cannot open the plan: %s", path, strerror(errno));
	do {
		if (nbytes == room) {
			char *more = realloc(text, room + 64 * KiB + 1);

			if (!more)
				return err_set(err, -ENOMEM, "%s: out of memory", path);
			text = more;
			room += 64 * KiB;
		}
		n = read(fd, text + nbytes, room - nbytes);
		if (n < 0 && errno != EINTR)
			return err_set(err, -errno, "%s: cannot read the plan: %s", path, strerror(errno));
		nbytes += n > 0 ? (size_t)n : 0;
		if (nbytes > PLAN_FILE_MAX)
			return err_set(err, -EBADMSG, "%s: line 1: this is no plan: it has more than %llu MiB", path,
				       (unsigned long long)(PLAN_FILE_MAX / MiB));
	} while (n);
	text[nbytes] = '\0';
	*ret = TAKE_PTR(text);
	*ret_nbytes = nbytes;
	return 0;
}

static void json_decref_p(json_t **json)
{
	json_decref(*json);
}

static int plan_load(const char *path, struct wd_plan **ret, struct wd_err *err)
{
	cleanup(json_decref_p) json_t *root = NULL;
	cleanup(plan_free_p) struct wd_plan *p = NULL;
	cleanup_free char *text = NULL;
	json_error_t at;
	size_t nbytes = 0;
	int r;

	if (!path || !ret)
		return err_set(err, -EINVAL, "wd_plan_load: %s is NULL", path ? "ret" : "path");
	r = read_text(path, &text, &nbytes, err);
	if (r < 0)
		return r;
	root = json_loadb(text, nbytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &at);
	if (!root)
		return err_set(err, -EBADMSG, "%s: line %d: no JSON: %s", path, MAX(at.line, 1), at.text);
	p = plan_new();
	r = p ? parse_plan(root, (struct where){ .path = path, .text = text }, p, err) : -ENOMEM;
	if (r == -ENOMEM)
		return err_set(err, r, "%s: out of memory", path);
	if (r == 0)
		*ret = TAKE_PTR(p);
	return r;
}

int wd_plan_load(const char *path, struct wd_plan **ret)
{
	struct wd_err err = { .text = "" };

	return api_done(plan_load(path, ret, &err), __func__, &err);
}
