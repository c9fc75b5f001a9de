/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds the files behind a path and puts their tensors together: a file; a sharded set by its index; a folder,
 * which is a pipeline (model_index.json) or a snapshot (one set of weights among possibly several).
 *
 * What a file is, its content decides; which of a folder's files are meant, only names can. Names in an index are
 * relative to the folder of the index as given: in a model cache the index is a symbolic link, and what it
 * points to lies elsewhere. Nothing depends on the order in which a folder lists its entries.
 *
 * Knows no format (lib/format.h) and no memory. Threads: no state.
 */
#include <dirent.h>
#include <jansson.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "lib/base/log.h"
#include "lib/checkpoint.h"
#include "lib/format.h"

#define PIPELINE_INDEX "model_index.json"
#define UNFINISHED ".incomplete" /* how download tools call a file that they have not finished */
#define JSON_MAX (64 * MiB) /* bytes of an index; a hundred thousand tensors take 9 MB */

static void json_decref_p(json_t **j)
{
	json_decref(*j);
}
#define cleanup_json cleanup(json_decref_p)

static void checkpoint_free_p(struct checkpoint **c)
{
	checkpoint_free(*c);
}
#define cleanup_checkpoint cleanup(checkpoint_free_p)

static int no_memory(struct wd_err *err, const char *path)
{
	return err_set(err, -ENOMEM, "%s: out of memory", path);
}

static void file_done(struct format_file *f)
{
	format_pool_free(f->pool);
}
#define cleanup_file cleanup(file_done)

static bool ends_with(const char *s, const char *end)
{
	size_t n = strlen(s), k = strlen(end);

	return n >= k && strcmp(s + n - k, end) == 0;
}

/* folder/name; NULL: out of memory. */
static char *join(const char *folder, const char *name)
{
	char *path;

	return asprintf(&path, "%s%s%s", folder, *folder && !ends_with(folder, "/") ? "/" : "", name) < 0 ? NULL : path;
}

/* The folder part of a path, "" if it has none. */
static char *folder_of(const char *path)
{
	const char *slash = strrchr(path, '/');

	return strndup(path, slash ? (size_t)(slash - path) + 1 : 0);
}

/* A model's name by default. */
static char *default_name(const char *path, bool is_folder)
{
	size_t end = strlen(path), begin, cut;
	cleanup_free char *last = NULL, *real = NULL;
	const char *mark;

	while (end > 1 && path[end - 1] == '/')
		end--;
	for (begin = end; begin > 0 && path[begin - 1] != '/'; begin--)
		;
	last = strndup(path + begin, end - begin);
	if (!last)
		return NULL;
	if (is_folder) {
		if (*last && strcmp(last, ".") != 0 && strcmp(last, "..") != 0)
			return TAKE_PTR(last);
		real = realpath(path, NULL);
		mark = real ? strrchr(real, '/') : NULL;
		return strdup(mark && mark[1] ? mark + 1 : last);
	}
	mark = strstr(last, ".safetensors");
	if (!mark || mark == last)
		mark = strrchr(last, '.');
	cut = mark && mark != last ? (size_t)(mark - last) : strlen(last);
	return strndup(last, cut);
}

struct checkpoint *checkpoint_free(struct checkpoint *c)
{
	if (!c)
		return NULL;
	for (size_t i = 0; i < c->nr_files; i++)
		source_unref(c->files[i].source);
	for (size_t i = 0; i < c->nr_parts; i++)
		checkpoint_free(c->parts[i]);
	format_pool_free(c->pool);
	free(c->files);
	free(c->tensors);
	free(c->metadata);
	free(c->parts);
	free(c->path);
	free(c->name);
	free(c);
	return NULL;
}

static int checkpoint_new(const char *path, const char *name, struct checkpoint **ret, struct wd_err *err)
{
	cleanup_checkpoint struct checkpoint *c = calloc(1, sizeof(*c));

	if (!c || !(c->path = strdup(path)) || !name || !(c->name = strdup(name)))
		return no_memory(err, path);
	*ret = TAKE_PTR(c);
	return 0;
}

/* ---- files */

/* A link of a model cache that leads to a file whose download has not ended: that file's bytes are not to be
 * trusted, however many there are. */
static int open_weights(const char *path, struct source **ret, struct wd_err *err)
{
	char target[PATH_MAX];
	ssize_t n = readlink(path, target, sizeof(target) - sizeof(UNFINISHED));
	int r;

	if (n > 0) {
		target[n] = '\0';
		if (ends_with(target, UNFINISHED))
			return err_set(err, -EBADMSG,
				       "%s: is a symbolic link to %s, a download that has not ended; fetch the "
				       "file again",
				       path, target);
	}
	r = source_open(path, ret, err);
	if (r == -ENOENT && n > 0) {
		cleanup_free char *folder = target[0] == '/' ? strdup("") : folder_of(path), *blob = NULL;

		memcpy(target + n, UNFINISHED, sizeof(UNFINISHED));
		blob = folder ? join(folder, target) : NULL;
		if (blob && access(blob, F_OK) == 0)
			return err_set(err, r,
				       "%s: is a symbolic link to %.*s, which does not exist: its download has not "
				       "ended (%s does exist); fetch the file again",
				       path, (int)n, target, target);
	}
	return r;
}

/* Adds a file with the tensors of `f`, and takes what `src` and `f` own. */
static int add_file(struct checkpoint *c, struct source **src, const struct format *format, struct format_file *f,
		    struct wd_err *err)
{
	struct ckpt_file *files = reallocarray(c->files, c->nr_files + 1, sizeof(*files));
	struct ckpt_tensor *tensors = reallocarray(c->tensors, c->nr_tensors + f->nr_tensors + 1, sizeof(*tensors));
	struct ckpt_metadata *metadata =
		reallocarray(c->metadata, c->nr_metadata + f->nr_metadata + 1, sizeof(*metadata));
	struct format_pool **last = &f->pool;

	c->files = files ? files : c->files;
	c->tensors = tensors ? tensors : c->tensors;
	c->metadata = metadata ? metadata : c->metadata;
	if (!files || !tensors || !metadata)
		return no_memory(err, (*src)->path);
	for (size_t i = 0; i < f->nr_tensors; i++) {
		tensors[c->nr_tensors + i] = f->tensors[i];
		tensors[c->nr_tensors + i].file = (uint32_t)c->nr_files;
	}
	for (size_t i = 0; i < f->nr_metadata; i++)
		metadata[c->nr_metadata + i] = f->metadata[i];
	files[c->nr_files] = (struct ckpt_file){
		.source = TAKE_PTR(*src),
		.format = format->name,
		.data_offset = f->data_offset,
		.data_bytes = f->data_bytes,
		.first_tensor = c->nr_tensors,
		.nr_tensors = f->nr_tensors,
	};
	while (*last)
		last = &(*last)->next;
	*last = c->pool;
	c->pool = TAKE_PTR(f->pool);
	c->nr_files++;
	c->nr_tensors += f->nr_tensors;
	c->nr_metadata += f->nr_metadata;
	return 0;
}

static int read_json(struct source *src, json_t **ret, struct wd_err *err)
{
	cleanup_free char *text = NULL;
	json_error_t why = { 0 };
	size_t n = (size_t)src->id.size;
	int r;

	if (src->id.size > JSON_MAX)
		return err_set(err, -EBADMSG, "%s: %llu bytes of JSON are no index; at most %llu are read", src->path,
			       (unsigned long long)src->id.size, (unsigned long long)JSON_MAX);
	text = malloc(n + 1);
	if (!text)
		return no_memory(err, src->path);
	r = source_read(src, text, n, 0);
	if (r < 0)
		return err_set(err, r == -ENODATA ? -EBADMSG : r, "%s: cannot read: %s", src->path, strerror(-r));
	errno = 0;
	*ret = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
	if (*ret)
		return 0;
	if (errno == ENOMEM || json_error_code(&why) == json_error_out_of_memory)
		return no_memory(err, src->path);
	return err_set(err, -EBADMSG, "%s: is no valid JSON, line %d, column %d: %s", src->path, why.line, why.column,
		       why.text);
}

static int read_json_file(const char *path, json_t **ret, struct wd_err *err)
{
	cleanup_source struct source *src = NULL;
	int r = open_weights(path, &src, err);

	return r < 0 ? r : read_json(src, ret, err);
}

/* ---- a sharded set */

static int compare_strings(const void *a, const void *b)
{
	return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Would this shard be looked for outside of the index's folder? */
static bool leaves_folder(const char *shard)
{
	if (*shard == '/' || *shard == '\0')
		return true;
	for (const char *p = shard; *p; p += strcspn(p, "/"), p += *p == '/')
		if (strncmp(p, "..", 2) == 0 && (p[2] == '/' || p[2] == '\0'))
			return true;
	return false;
}

/* The weight_map of an index, checked. */
static int weight_map(const char *path, const json_t *root, json_t **ret, struct wd_err *err)
{
	json_t *map = json_object_get(root, "weight_map"), *value;
	const char *key;

	if (!map && json_object_get(root, "_class_name"))
		return err_set(err, -EBADMSG,
			       "%s: describes a pipeline or a configuration and has no weight_map; open its "
			       "folder instead",
			       path);
	if (!map)
		return err_set(err, -EBADMSG,
			       "%s: is JSON, but neither a checkpoint nor a sharded set's index: it has no "
			       "weight_map",
			       path);
	if (!json_is_object(map) || json_object_size(map) == 0)
		return err_set(err, -EBADMSG, "%s: weight_map is %s", path,
			       json_is_object(map) ? "empty" : "no JSON object");
	json_object_foreach(map, key, value) {
		if (!json_is_string(value))
			return err_set(err, -EBADMSG, "%s: weight_map: the shard of tensor \"%.200s\" is no string",
				       path, key);
		if (leaves_folder(json_string_value(value)))
			return err_set(err, -EBADMSG,
				       "%s: weight_map: shard \"%.200s\" of tensor \"%.200s\" is %s; shards must lie "
				       "in the index's folder",
				       path, json_string_value(value), key,
				       *json_string_value(value) == '/' ? "an absolute path" :
				       *json_string_value(value)        ? "a path with .." :
									  "empty");
	}
	*ret = map;
	return 0;
}

/* The first tensor that the index places in `shard`; if `f` is given, the first that it lacks. */
static const char *placed_in(json_t *map, const char *shard, const struct format_file *f)
{
	cleanup_json json_t *has = json_object();
	const char *key;
	json_t *value;

	for (size_t i = 0; f && i < f->nr_tensors; i++)
		(void)json_object_set_new_nocheck(has, f->tensors[i].name, json_true());
	json_object_foreach(map, key, value)
		if (strcmp(json_string_value(value), shard) == 0 && !json_object_get(has, key))
			return key;
	return "?";
}

/* Leaves in `f` what belongs to the model: what the index places in this shard, and what it does not know at all.
 * `unplaced` remembers the shards of the latter. */
static int apply_index(const char *path, json_t *map, const char *shard, size_t nr_placed, json_t *unplaced,
		       struct format_file *f, struct wd_err *err)
{
	size_t nr = 0, found = 0;

	for (size_t i = 0; i < f->nr_tensors; i++) {
		const char *name = f->tensors[i].name;
		const json_t *place = json_object_get(map, name), *other;

		if (place && strcmp(json_string_value(place), shard) != 0) {
			log_debug("%s: tensor \"%s\" is also in %s; the index says %s", path, name, shard,
				  json_string_value(place));
			continue;
		}
		if (!place) {
			other = json_object_get(unplaced, name);
			if (other)
				return err_set(err, -EBADMSG,
					       "%s: tensor \"%.200s\" is in shard %.200s and in shard %.200s, and "
					       "the index does not say which is meant",
					       path, name, json_string_value(other), shard);
			if (json_object_set_new_nocheck(unplaced, name, json_string_nocheck(shard)) < 0)
				return no_memory(err, path);
			log_info("%s: tensor \"%s\" of shard %s is not in the index", path, name, shard);
		} else {
			found++;
		}
		f->tensors[nr++] = f->tensors[i];
	}
	if (found < nr_placed)
		return err_set(err, -EBADMSG,
			       "%s: places tensor \"%.200s\" in shard %.200s, which lacks it (and %zu more)", path,
			       placed_in(map, shard, f), shard, nr_placed - found - 1);
	f->nr_tensors = nr;
	return 0;
}

static int add_shard(struct checkpoint *c, const char *path, const char *folder, const char *shard, json_t *map,
		     size_t nr_placed, json_t *unplaced, uint32_t flags, struct wd_err *err)
{
	cleanup_free char *shard_path = join(folder, shard);
	cleanup_source struct source *src = NULL;
	const struct format *format;
	cleanup_file struct format_file f = { 0 };
	int r;

	if (!shard_path)
		return no_memory(err, path);
	r = open_weights(shard_path, &src, err);
	if (r < 0)
		return err_prefix(err, r, "%s: tensor \"%.200s\" and %zu more are in shard %.200s", path,
				  placed_in(map, shard, NULL), nr_placed - 1, shard);
	r = format_read(src, flags, &format, &f, err);
	if (r < 0)
		return err_prefix(err, r, "%s: shard %.200s", path, shard);
	r = apply_index(path, map, shard, nr_placed, unplaced, &f, err);
	if (r < 0)
		return r;
	return add_file(c, &src, format, &f, err);
}

/* Of what several shards say alike ("format": "pt"), once is enough. */
static int merge_metadata(struct checkpoint *c, struct wd_err *err)
{
	cleanup_json json_t *seen = json_object();
	size_t nr = 0;

	for (size_t i = 0; i < c->nr_metadata; i++) {
		const struct ckpt_metadata *m = &c->metadata[i];
		const char *before = json_string_value(json_object_get(seen, m->key));

		if (before && strcmp(before, m->value) == 0)
			continue;
		if (!before && json_object_set_new_nocheck(seen, m->key, json_string_nocheck(m->value)) < 0)
			return no_memory(err, c->path);
		c->metadata[nr++] = *m;
	}
	c->nr_metadata = nr;
	return 0;
}

static void check_total_size(const struct checkpoint *c, const char *path, const json_t *root)
{
	const json_t *total = json_object_get(json_object_get(root, "metadata"), "total_size");
	uint64_t sum = 0;

	for (size_t i = 0; i < c->nr_tensors; i++)
		sum += c->tensors[i].nbytes;
	if (total && (!json_is_number(total) || json_number_value(total) != (double)sum))
		log_info("warning: %s: total_size is %.0f, the tensors have %llu bytes", path, json_number_value(total),
			 (unsigned long long)sum);
}

static int add_index(struct checkpoint *c, struct source *src, uint32_t flags, struct wd_err *err)
{
	cleanup_json json_t *root = NULL, *unplaced = json_object();
	cleanup_free char *folder = folder_of(src->path);
	cleanup_free const char **shards = NULL;
	const char *key;
	size_t nr = 0, nr_placed;
	json_t *map, *value;
	int r;

	if (!folder || !unplaced)
		return no_memory(err, src->path);
	r = read_json(src, &root, err);
	if (r < 0)
		return r;
	r = weight_map(src->path, root, &map, err);
	if (r < 0)
		return r;
	shards = calloc(json_object_size(map), sizeof(*shards));
	if (!shards)
		return no_memory(err, src->path);
	json_object_foreach(map, key, value)
		shards[nr++] = json_string_value(value);
	qsort(shards, nr, sizeof(*shards), compare_strings);
	for (size_t i = 0; i < nr; i += nr_placed) {
		for (nr_placed = 1; i + nr_placed < nr && strcmp(shards[i], shards[i + nr_placed]) == 0; nr_placed++)
			;
		r = add_shard(c, src->path, folder, shards[i], map, nr_placed, unplaced, flags, err);
		if (r < 0)
			return r;
	}
	check_total_size(c, src->path, root);
	return merge_metadata(c, err);
}

/* A checkpoint file or an index. */
static int add_path(struct checkpoint *c, const char *path, uint32_t flags, struct wd_err *err)
{
	cleanup_source struct source *src = NULL;
	unsigned char buf[FORMAT_HEAD_BYTES];
	const struct format *format;
	cleanup_file struct format_file f = { 0 };
	struct span head;
	int r;

	r = open_weights(path, &src, err);
	if (r < 0)
		return r;
	r = format_head(src, buf, &head, err);
	if (r < 0)
		return r;
	if (format_is_json(head))
		return add_index(c, src, flags, err);
	r = format_read(src, flags, &format, &f, err);
	if (r < 0)
		return r;
	return add_file(c, &src, format, &f, err);
}

/* ---- a folder */

struct entries {
	struct dirent **list; /* sorted by name */
	const char **sets;    /* candidates: names of files that each stand for a set of weights */
	size_t nr, nr_sets;
};

static void entries_done(struct entries *e)
{
	for (size_t i = 0; i < e->nr; i++)
		free(e->list[i]);
	free(e->list);
	free(e->sets);
}

static int by_entry_name(const struct dirent **a, const struct dirent **b)
{
	return strcmp((*a)->d_name, (*b)->d_name);
}

/* x.safetensors.index.json, or that with a variant before or behind "index" or before "safetensors": four
 * spellings are in use. */
static bool is_index_name(const char *name)
{
	const char *rest = strstr(name, ".safetensors.");

	return rest && ends_with(rest, ".json") && strstr(rest, ".index.");
}

/* One shard of several (model-00001-of-00003.safetensors), by the names that all writers use? */
static bool is_shard_name(const char *name)
{
	const char *of = strstr(name, "-of-");

	return of && of > name && of[-1] >= '0' && of[-1] <= '9' && strtoul(of + 4, NULL, 10) > 1;
}

static bool is_other_format_name(const char *name)
{
	static const char *const ends[] = {
		".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".pkl"
	};

	for (size_t i = 0; i < ARRAY_SIZE(ends); i++)
		if (ends_with(name, ends[i]))
			return true;
	return false;
}

/* Is `name` the set `base` in this variant (NULL: in none), single or sharded? Any base if that is NULL. */
static bool is_variant(const char *name, const char *base, const char *variant)
{
	static const char *const plain[] = { ".safetensors", ".safetensors.index.json" };
	static const char *const varied[] = {
		".%s.safetensors",
		".%s.safetensors.index.json",
		".safetensors.index.%s.json",
		".safetensors.%s.index.json",
	};
	size_t nr = variant ? ARRAY_SIZE(varied) : ARRAY_SIZE(plain), n = strlen(name);

	for (size_t i = 0; i < nr; i++) {
		char end[NAME_MAX + 1];
		int k = variant ? snprintf(end, sizeof(end), varied[i], variant) :
				  snprintf(end, sizeof(end), "%s", plain[i]);

		if (k < 0 || (size_t)k >= sizeof(end) || !ends_with(name, end))
			continue;
		if (!base || (strlen(base) == n - (size_t)k && strncmp(name, base, n - (size_t)k) == 0))
			return true;
	}
	return false;
}

static bool is_default_base(const char *name, const char *variant)
{
	return is_variant(name, "model", variant) || is_variant(name, "diffusion_pytorch_model", variant);
}

/* Finds the sets of weights: indexes, and single files that are no shard of one. */
static int find_sets(const char *folder, struct entries *e, struct wd_err *err)
{
	cleanup_json json_t *shards = json_object();
	const char *orphan = NULL, *other = NULL;
	int n = scandir(folder, &e->list, NULL, by_entry_name);

	if (n < 0)
		return err_set(err, -errno, "%s: cannot list the folder: %s", folder, strerror(errno));
	e->nr = (size_t)n;
	e->sets = calloc(e->nr + 1, sizeof(*e->sets));
	if (!e->sets || !shards)
		return no_memory(err, folder);
	for (size_t i = 0; i < e->nr; i++) {
		const char *name = e->list[i]->d_name, *key;
		cleanup_json json_t *root = NULL;
		cleanup_free char *path = NULL;
		json_t *map, *value;
		int r;

		if (!is_index_name(name))
			continue;
		e->sets[e->nr_sets++] = name;
		path = join(folder, name);
		if (!path)
			return no_memory(err, folder);
		r = read_json_file(path, &root, err);
		if (r == 0)
			r = weight_map(path, root, &map, err);
		if (r < 0)
			return r;
		json_object_foreach(map, key, value)
			if (json_object_set_new_nocheck(shards, json_string_value(value), json_true()) < 0)
				return no_memory(err, folder);
	}
	for (size_t i = 0; i < e->nr; i++) {
		const char *name = e->list[i]->d_name;
		cleanup_free char *path = NULL;
		struct stat st;

		if (is_other_format_name(name))
			other = other ? other : name;
		if (!ends_with(name, ".safetensors") || json_object_get(shards, name))
			continue;
		path = join(folder, name);
		if (!path)
			return no_memory(err, folder);
		if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
			continue;
		/* Of shards whose index is missing one stands for all, so that nothing is chosen in silence. */
		if (is_shard_name(name) && orphan)
			continue;
		if (is_shard_name(name))
			orphan = name;
		e->sets[e->nr_sets++] = name;
	}
	qsort(e->sets, e->nr_sets, sizeof(*e->sets), compare_strings);
	if (e->nr_sets == 0 && other)
		return err_set(err, -EOPNOTSUPP,
			       "%s: has weights only in a format that this version does not read (%s); convert "
			       "them to safetensors",
			       folder, other);
	return 0;
}

/* The names, comma-separated, as far as they fit. */
static void list_sets(const struct entries *e, char *text, size_t room)
{
	size_t used = 0;

	*text = '\0';
	for (size_t i = 0; i < e->nr_sets; i++) {
		int n = snprintf(text + used, room - used, "%s%s", i ? ", " : "", e->sets[i]);

		if (n < 0 || (size_t)n + sizeof(", ...") > room - used) {
			(void)snprintf(text + used, room - used, ", ...");
			return;
		}
		used += (size_t)n;
	}
}

/* Is this the plain form of a base that all sets are variants of? */
static bool is_plain_of_all(const struct entries *e, const char *name)
{
	size_t n = (size_t)(strstr(name, ".safetensors") - name) + 1;

	for (size_t i = 0; i < e->nr_sets; i++)
		if (strncmp(e->sets[i], name, n) != 0)
			return false;
	return is_variant(name, NULL, NULL);
}

/* The set that is meant: that of a usual base, or (defaults false) of any. NULL if there is none; *ret_several if
 * there are more. */
static const char *only_one(const struct entries *e, const char *variant, bool defaults, bool *ret_several)
{
	const char *found = NULL;

	*ret_several = false;
	for (size_t i = 0; i < e->nr_sets; i++) {
		const char *name = e->sets[i];
		bool fits = defaults ? is_default_base(name, variant) :
			    variant  ? is_variant(name, NULL, variant) :
				       is_plain_of_all(e, name);

		if (fits && found)
			*ret_several = true;
		else if (fits)
			found = name;
	}
	return found;
}

enum picked { PICK_NOTHING, PICK_NO_VARIANT, PICK_FOUND };

/*
 * Decides which weights of a folder are meant. Of several sets those of the usual names go first (model,
 * diffusion_pytorch_model), then what is the only choice.
 * Return: PICK_FOUND and the path; PICK_NOTHING: no weights; PICK_NO_VARIANT: weights, none of that variant (both
 * have set a text); negative errno.
 */
static int pick(const char *folder, const char *variant, char **ret, struct wd_err *err)
{
	cleanup(entries_done) struct entries e = { 0 };
	const char *name;
	char list[400];
	bool several;
	int r = find_sets(folder, &e, err);

	if (r < 0)
		return r;
	if (e.nr_sets == 0)
		return err_set(err, PICK_NOTHING,
			       "%s: no weights in this folder: looked for *.safetensors, "
			       "*.safetensors.index.json and " PIPELINE_INDEX,
			       folder);
	list_sets(&e, list, sizeof(list));
	name = only_one(&e, variant, true, &several);
	if (!name)
		name = only_one(&e, variant, false, &several);
	if (!variant && e.nr_sets == 1) {
		name = e.sets[0];
	} else if (variant && !name) {
		return err_set(err, PICK_NO_VARIANT, "%s: has no weights of variant \"%.60s\"; there are: %s", folder,
			       variant, list);
	} else if (several || !name) {
		return err_set(err, -ENOTUNIQ, "%s: has several sets of weights: %s; open one of them by its path%s",
			       folder, list, variant ? "" : ", or name a variant");
	}
	if (is_shard_name(name))
		return err_set(err, -ENOENT,
			       "%s: %s is one shard of a set, and the set's index (.safetensors.index.json) is "
			       "missing; fetch it",
			       folder, name);
	*ret = join(folder, name);
	return *ret ? PICK_FOUND : no_memory(err, folder);
}

static int add_part(struct checkpoint *c, const char *folder, const char *name, const char *path, uint32_t flags,
		    struct wd_err *err)
{
	cleanup_checkpoint struct checkpoint *part = NULL;
	struct checkpoint **parts;
	int r = checkpoint_new(folder, name, &part, err);

	if (r < 0)
		return r;
	r = add_path(part, path, flags, err);
	if (r < 0)
		return r;
	parts = reallocarray(c->parts, c->nr_parts + 1, sizeof(*parts));
	if (!parts)
		return no_memory(err, folder);
	c->parts = parts;
	c->parts[c->nr_parts++] = TAKE_PTR(part);
	return 0;
}

/* Does this entry of model_index.json declare a component? [null, null] is one that the pipeline does without. */
static bool is_component(const char *key, const json_t *value)
{
	return *key != '_' && json_array_size(value) == 2 && json_is_string(json_array_get(value, 0)) &&
	       json_is_string(json_array_get(value, 1));
}

static int add_pipeline(struct checkpoint *c, const char *index, const char *variant, uint32_t flags,
			struct wd_err *err)
{
	cleanup_json json_t *root = NULL;
	struct wd_err no_variant = { "" };
	bool has_variant = false;
	const char *key;
	json_t *value;
	int r;

	r = read_json_file(index, &root, err);
	if (r < 0)
		return r;
	if (!json_is_object(root))
		return err_set(err, -EBADMSG, "%s: is JSON, but no object", index);
	json_object_foreach(root, key, value) {
		cleanup_free char *folder = NULL, *path = NULL;
		struct stat st;

		if (!is_component(key, value))
			continue;
		if (*key == '\0' || strchr(key, '/') || strcmp(key, ".") == 0 || strcmp(key, "..") == 0)
			return err_set(err, -EBADMSG, "%s: component \"%.200s\": its name is no name of a folder",
				       index, key);
		folder = join(c->path, key);
		if (!folder)
			return no_memory(err, index);
		if (stat(folder, &st) < 0) {
			cleanup_source struct source *src = NULL;

			if (errno == ENOENT && lstat(folder, &st) < 0) {
				log_info("%s: component \"%s\" has no folder", index, key);
				continue;
			}
			r = open_weights(folder, &src, err); /* knows how to say why not */
			return err_prefix(err, r < 0 ? r : -ENOTDIR, "%s: component \"%.200s\"", index, key);
		}
		if (!S_ISDIR(st.st_mode))
			continue;
		r = pick(folder, variant, &path, err);
		has_variant = has_variant || (variant && r == PICK_FOUND);
		if (r == PICK_NO_VARIANT) {
			no_variant = err ? *err : no_variant;
			r = pick(folder, NULL, &path, err);
		}
		if (r == PICK_NOTHING)
			continue; /* schedulers and tokenizers have none */
		if (r == PICK_FOUND)
			r = add_part(c, folder, key, path, flags, err);
		if (r < 0)
			return err_prefix(err, r, "%s: component \"%.200s\"", index, key);
	}
	if (c->nr_parts == 0)
		return err_set(err, -ENOENT, "%s: none of the pipeline's components has weights in a folder beside it",
			       index);
	if (variant && !has_variant)
		return err_set(err, -ENOENT, "%s: no component has weights of variant \"%.60s\"", index, variant);
	return 0;
}

static int add_folder(struct checkpoint *c, const char *variant, uint32_t flags, struct wd_err *err)
{
	cleanup_free char *index = join(c->path, PIPELINE_INDEX), *path = NULL;
	struct stat st;
	int r;

	if (!index)
		return no_memory(err, c->path);
	if (lstat(index, &st) == 0)
		return add_pipeline(c, index, variant, flags, err);
	r = pick(c->path, variant, &path, err);
	if (r < 0)
		return r;
	return r == PICK_FOUND ? add_path(c, path, flags, err) : -ENOENT;
}

int checkpoint_open(const char *path, const char *variant, uint32_t flags, struct checkpoint **ret, struct wd_err *err)
{
	cleanup_checkpoint struct checkpoint *c = NULL;
	cleanup_free char *name = NULL;
	struct stat st;
	bool is_folder = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
	int r;

	name = default_name(path, is_folder);
	r = checkpoint_new(path, name, &c, err);
	if (r < 0)
		return r;
	r = is_folder ? add_folder(c, variant, flags, err) : add_path(c, path, flags, err);
	if (r < 0)
		return r;
	*ret = TAKE_PTR(c);
	return 0;
}
