/* SPDX-License-Identifier: Apache-2.0 */
/*
 * safetensors: 8 bytes little-endian N, N bytes of JSON, data. Offsets in the JSON are relative to the data.
 *
 * Accepts and refuses what the reference library does, in its order: length below 8; N above 100,000,000; N + 8
 * beyond the file; UTF-8; JSON and types; tensors by (begin, end), each beginning where the one before ended; the
 * last end against the file's size. Stricter in things that no writer does: duplicate keys (the format's description
 * forbids them), NUL in names and texts (they are C strings here), integers from 2^63 on and -0 where the reference
 * would not look at them, and an entry with values by the million that describe no tensor (MEMORY_FACTOR).
 *
 * The JSON library gets the header one member at a time: of a hundred thousand tensors it holds one, not all, which
 * takes half of the time and a fraction of the memory. Only the commas between members are found here.
 *
 * Knows nothing of files but source_read(). Threads: no state.
 */
#include <jansson.h>
#include <string.h>

#include "lib/dtype.h"
#include "lib/format.h"
#include "lib/include/weightd.h"

#define HEADER_MAX 100000000 /* the reference's */

/* The JSON library spends at most about this many bytes of memory a byte of text on what a tensor needs, whatever
 * its shape. Text made to cost more (ten million empty objects) is refused before it is parsed. */
#define MEMORY_FACTOR 32
#define MEMORY_FREE MiB

/* Names in messages: long ones would push the reason out. */
#define NAME "\"%.200s\""

struct item {
	struct ckpt_tensor t;
	uint64_t begin, end; /* in the data, as the header has them */
};

static bool is_space(unsigned char c)
{
	return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

static bool safetensors_is(struct span head)
{
	uint64_t n;

	return span_u64(head, 0, &n) == 0 && n <= HEADER_MAX && head.nbytes > 8 &&
	       (head.bytes[8] == '{' || is_space(head.bytes[8]));
}

int safetensors_header_bytes(const char *path, struct span head, uint64_t file_bytes, uint64_t *ret, struct wd_err *err)
{
	uint64_t n;

	if (span_u64(head, 0, &n) < 0)
		return err_set(err, -EBADMSG,
			       "%s: is too short for a safetensors file: %llu bytes, and the header's length "
			       "alone takes 8",
			       path, (unsigned long long)file_bytes);
	if (n > HEADER_MAX)
		return err_set(err, -EBADMSG,
			       "%s: is no safetensors file, or damaged: its first 8 bytes give a header of "
			       "%llu bytes, at most %d are allowed",
			       path, (unsigned long long)n, HEADER_MAX);
	if (n > file_bytes - 8)
		return err_set(err, -EBADMSG,
			       "%s: is cut off in the header: %llu bytes long, and the header alone ends at "
			       "byte %llu; fetch the file again",
			       path, (unsigned long long)file_bytes, (unsigned long long)(n + 8));
	*ret = n;
	return 0;
}

/* The header while it is read, one member of the JSON object at a time. */
struct cursor {
	const char *path; /* for messages */
	unsigned char *bytes;
	size_t nbytes;
	size_t at; /* the '{' or ',' before the next member */
};

static size_t skip_space(const struct cursor *c, size_t i)
{
	while (i < c->nbytes && is_space(c->bytes[i]))
		i++;
	return i;
}

static int bad_json(const struct cursor *c, size_t at, const char *what, const char *why, struct wd_err *err)
{
	return err_set(err, -EBADMSG, "%s: the header is not valid %s at byte %zu of the file: %s", c->path, what,
		       8 + at, why);
}

/* Finds the ',' or '}' behind the member that begins at c->at, and what parsing it will cost. Also finds -0, which
 * the JSON library takes for 0. Brackets are only counted: whether they match, the library looks. */
static int find_end(const struct cursor *c, size_t *ret, struct wd_err *err)
{
	uint64_t cost = 0;
	size_t depth = 0, i;
	bool string = false;

	for (i = c->at + 1; i < c->nbytes; i++) {
		unsigned char b = c->bytes[i];

		if (string) {
			if (b == '\\')
				i++;
			else if (b == '"')
				string = false;
			continue;
		}
		if (depth == 0 && (b == ',' || b == '}'))
			break;
		switch (b) {
		case '"':
			string = true;
			cost += 48;
			break;
		case '{': /* a hash table */
			depth++;
			cost += 256;
			break;
		case '[': /* room for eight */
			depth++;
			cost += 144;
			break;
		case '}':
		case ']':
			depth -= depth > 0;
			break;
		case ':': /* a pair */
			cost += 64;
			break;
		case ',': /* a number and its place */
			cost += 48;
			break;
		case '-':
			if (i + 1 < c->nbytes && c->bytes[i + 1] == '0' && !memchr("eE", c->bytes[i - 1], 2) &&
			    (i + 2 >= c->nbytes || !memchr(".eE", c->bytes[i + 2], 3)))
				return bad_json(c, i, "JSON", "-0 is no unsigned integer", err);
			break;
		default:
			break;
		}
	}
	if (i >= c->nbytes)
		return bad_json(c, c->nbytes, "JSON", "it ends before its object does", err);
	if (cost > MEMORY_FREE + MEMORY_FACTOR * (uint64_t)(i - c->at))
		return err_set(err, -EBADMSG,
			       "%s: the header has far more values at byte %zu of the file than any tensor has",
			       c->path, 8 + c->at);
	*ret = i;
	return 0;
}

static int cursor_init(struct cursor *c, struct wd_err *err)
{
	const unsigned char *nul = memchr(c->bytes, '\0', c->nbytes);

	/* the JSON library overlooks one behind a number */
	if (nul)
		return bad_json(c, (size_t)(nul - c->bytes), "JSON", "it has a NUL byte", err);
	c->at = skip_space(c, 0);
	if (c->at == c->nbytes)
		return bad_json(c, c->at, "JSON", "it is empty", err);
	if (c->bytes[c->at] != '{')
		return bad_json(c, c->at, c->bytes[c->at] > 0xF4 ? "UTF-8" : "JSON", "it is no object", err);
	return 0;
}

/*
 * The next member as an object of its own, made in place: what stands before and behind it becomes its braces.
 * Return: 1 and the object; 0 there are no more; -EBADMSG, -ENOMEM.
 */
static int next_member(struct cursor *c, json_t **ret, struct wd_err *err)
{
	json_error_t why = { 0 };
	size_t begin = c->at, end = 0;
	bool first, last;
	int r;

	if (begin >= c->nbytes)
		return 0;
	r = find_end(c, &end, err);
	if (r < 0)
		return r;
	first = c->bytes[begin] == '{';
	last = c->bytes[end] == '}';
	c->bytes[begin] = '{';
	c->bytes[end] = '}';
	errno = 0;
	*ret = json_loadb((const char *)c->bytes + begin, end + 1 - begin, JSON_REJECT_DUPLICATES, &why);
	if (!*ret && (errno == ENOMEM || json_error_code(&why) == json_error_out_of_memory))
		/* Some of the library's paths report a failed allocation as a syntax error. */
		return err_set(err, -ENOMEM, "%s: out of memory for the header", c->path);
	if (!*ret)
		return bad_json(c, begin + (size_t)MAX(why.position, 0),
				json_error_code(&why) == json_error_invalid_utf8 ? "UTF-8" : "JSON", why.text, err);
	c->at = end;
	if (last) {
		c->at = skip_space(c, end + 1);
		if (c->at < c->nbytes)
			return bad_json(c, c->at, "JSON", "there is something behind its object", err);
	}
	if (json_object_size(*ret) == 0 && !(first && last))
		return bad_json(c, end, "JSON", "a member is missing before or behind a comma", err);
	return 1;
}

static bool is_unsigned(const json_t *v)
{
	return json_is_integer(v) && json_integer_value(v) >= 0;
}

static int no_memory(const char *path, struct wd_err *err)
{
	return err_set(err, -ENOMEM, "%s: out of memory for the tensors", path);
}

static char *keep(struct format_pool **pool, const char *s)
{
	size_t n = strlen(s) + 1;
	char *kept = format_pool_get(pool, n);

	return kept ? memcpy(kept, s, n) : NULL;
}

/* One tensor's types. Name and shape are kept in the pool. */
static int read_entry(const char *path, const char *name, const json_t *entry, struct format_pool **pool,
		      struct item *ret, struct wd_err *err)
{
	const json_t *dtype = json_object_get(entry, "dtype"), *dims = json_object_get(entry, "shape");
	const json_t *offsets = json_object_get(entry, "data_offsets");
	int64_t *shape;

	if (!json_is_object(entry))
		return err_set(err, -EBADMSG, "%s: tensor " NAME ": its entry is no JSON object", path, name);
	if (!json_is_string(dtype))
		return err_set(err, -EBADMSG, "%s: tensor " NAME ": dtype is %s", path, name,
			       dtype ? "no string" : "missing");
	ret->t.dtype = dtype_from_name(json_string_value(dtype));
	if (!ret->t.dtype)
		return err_set(err, -EBADMSG, "%s: tensor " NAME ": unknown dtype \"%.40s\"", path, name,
			       json_string_value(dtype));
	if (!json_is_array(dims))
		return err_set(err, -EBADMSG, "%s: tensor " NAME ": shape is %s", path, name,
			       dims ? "no array" : "missing");
	shape = format_pool_get(pool, json_array_size(dims) * sizeof(*shape));
	if (!shape)
		return no_memory(path, err);
	for (size_t i = 0; i < json_array_size(dims); i++) {
		const json_t *dim = json_array_get(dims, i);

		if (!is_unsigned(dim))
			return err_set(err, -EBADMSG,
				       "%s: tensor " NAME ": dimension %zu of its shape is no unsigned integer", path,
				       name, i);
		shape[i] = json_integer_value(dim);
	}
	if (!json_is_array(offsets) || json_array_size(offsets) != 2)
		return err_set(err, -EBADMSG, "%s: tensor " NAME ": data_offsets %s", path, name,
			       offsets ? "is no array of two" : "is missing");
	for (size_t i = 0; i < 2; i++)
		if (!is_unsigned(json_array_get(offsets, i)))
			return err_set(err, -EBADMSG,
				       "%s: tensor " NAME ": the %s of its data_offsets is no unsigned integer", path,
				       name, i ? "second" : "first");
	ret->t.name = keep(pool, name);
	if (!ret->t.name)
		return no_memory(path, err);
	ret->t.shape = shape;
	ret->t.ndim = (uint32_t)json_array_size(dims); /* a header has less than 2^32 bytes */
	ret->begin = (uint64_t)json_integer_value(json_array_get(offsets, 0));
	ret->end = (uint64_t)json_integer_value(json_array_get(offsets, 1));
	return 0;
}

static int by_range(const void *a, const void *b)
{
	const struct item *x = a, *y = b;

	if (x->begin != y->begin)
		return x->begin < y->begin ? -1 : 1;
	if (x->end != y->end)
		return x->end < y->end ? -1 : 1;
	return strcmp(x->t.name, y->t.name);
}

static int by_name(const void *a, const void *b)
{
	return strcmp(((const struct item *)a)->t.name, ((const struct item *)b)->t.name);
}

/* One tensor against its place: `start` is where the one before ended. */
static int check_item(const char *path, struct item *item, uint64_t start, struct wd_err *err)
{
	uint64_t elements = 1, bits;

	if (item->begin != start || item->end < item->begin)
		return err_set(err, -EBADMSG,
			       "%s: tensor " NAME ": data_offsets [%llu, %llu] do not begin at %llu, where "
			       "the data before it end, or end before they begin",
			       path, item->t.name, (unsigned long long)item->begin, (unsigned long long)item->end,
			       (unsigned long long)start);
	for (uint32_t i = 0; i < item->t.ndim; i++)
		if (__builtin_mul_overflow(elements, (uint64_t)item->t.shape[i], &elements))
			return err_set(err, -EBADMSG,
				       "%s: tensor " NAME ": its shape has 2^64 elements or more (dimension %u)", path,
				       item->t.name, i);
	if (__builtin_mul_overflow(elements, (uint64_t)wd_dtype_bits(item->t.dtype), &bits))
		return err_set(err, -EBADMSG, "%s: tensor " NAME ": its shape needs 2^64 bits or more", path,
			       item->t.name);
	if (bits % 8)
		return err_set(err, -EBADMSG, "%s: tensor " NAME ": %llu elements of %s are no whole number of bytes",
			       path, item->t.name, (unsigned long long)elements, wd_dtype_name(item->t.dtype));
	if (item->end - item->begin != bits / 8)
		return err_set(err, -EBADMSG,
			       "%s: tensor " NAME ": shape and dtype need %llu bytes, data_offsets give %llu", path,
			       item->t.name, (unsigned long long)(bits / 8),
			       (unsigned long long)(item->end - item->begin));
	return 0;
}

/* The whole of the data against the file. `items` are sorted, without gaps. */
static int check_size(const char *path, const struct item *items, size_t nr, uint64_t data_offset, uint64_t file_bytes,
		      uint32_t flags, struct wd_err *err)
{
	uint64_t has = file_bytes - data_offset, needs = nr ? items[nr - 1].end : 0;

	if (has < needs) {
		size_t i = 0;

		while (items[i].end <= has)
			i++;
		return err_set(err, -EBADMSG,
			       "%s: is cut off: %llu bytes long, but its header describes %llu; tensor " NAME
			       " is the first that does not fit; fetch the file again",
			       path, (unsigned long long)file_bytes, (unsigned long long)data_offset + needs,
			       items[i].t.name);
	}
	if (has > needs && !(flags & CKPT_TRAILING))
		return err_set(err, -EBADMSG,
			       "%s: %llu bytes too many: the data end at byte %llu, the file at %llu "
			       "(WD_MODEL_TRAILING accepts this)",
			       path, (unsigned long long)(has - needs), (unsigned long long)(data_offset + needs),
			       (unsigned long long)file_bytes);
	return 0;
}

static int read_metadata(const char *path, json_t *from, struct format_file *f, struct wd_err *err)
{
	const char *key;
	json_t *value;

	if (json_is_null(from))
		return 0;
	if (!json_is_object(from))
		return err_set(err, -EBADMSG, "%s: __metadata__ is no JSON object", path);
	f->metadata = format_pool_get(&f->pool, json_object_size(from) * sizeof(*f->metadata));
	if (!f->metadata)
		return no_memory(path, err);
	json_object_foreach(from, key, value) {
		struct ckpt_metadata *m = &f->metadata[f->nr_metadata++];

		if (!json_is_string(value))
			return err_set(err, -EBADMSG, "%s: __metadata__: the value of " NAME " is no string", path,
				       key);
		m->key = keep(&f->pool, key);
		m->value = keep(&f->pool, json_string_value(value));
		if (!m->key || !m->value)
			return no_memory(path, err);
	}
	return 0;
}

static void json_decref_p(json_t **j)
{
	json_decref(*j);
}
#define cleanup_json cleanup(json_decref_p)

/* Members in the order of the text: metadata go to `f`, tensors to *items (grown by doubling). */
static int read_members(struct cursor *c, struct format_file *f, struct item **items, size_t *ret_nr,
			struct wd_err *err)
{
	cleanup_json json_t *names = json_object(); /* only its keys matter; the library's hash is seeded, so no
						     * choice of names makes it slow */
	size_t nr = 0, room = 0;

	if (!names)
		return no_memory(c->path, err);
	for (;;) {
		cleanup_json json_t *member = NULL;
		const char *key;
		json_t *value;
		int r = next_member(c, &member, err);

		if (r <= 0) {
			*ret_nr = nr;
			return r;
		}
		json_object_foreach(member, key, value) { /* one, or none in {} */
			if (json_object_get(names, key))
				return err_set(err, -EBADMSG, "%s: the header has duplicate keys: " NAME, c->path, key);
			if (json_object_set_new_nocheck(names, key, json_true()) < 0)
				return no_memory(c->path, err);
			if (nr == room) {
				struct item *more = reallocarray(*items, room = room ? 2 * room : 64, sizeof(**items));

				if (!more)
					return no_memory(c->path, err);
				*items = more;
			}
			if (strcmp(key, "__metadata__") == 0)
				r = read_metadata(c->path, value, f, err);
			else
				r = read_entry(c->path, key, value, &f->pool, &(*items)[nr++], err);
			if (r < 0)
				return r;
		}
	}
}

/* From ranges to the order that is promised: by offset, then by name. (Empty tensors share their offset with one
 * another and with the one behind them.) */
static void sort_shared_offsets(struct item *items, size_t nr)
{
	for (size_t i = 0, same; i < nr; i += same) {
		for (same = 1; i + same < nr && items[i + same].begin == items[i].begin; same++)
			;
		if (same > 1)
			qsort(items + i, same, sizeof(*items), by_name);
	}
}

int safetensors_parse(const char *path, unsigned char *header, size_t nbytes, uint64_t file_bytes, uint32_t flags,
		      struct format_file *ret, struct wd_err *err)
{
	struct cursor c = { .path = path, .bytes = header, .nbytes = nbytes };
	struct format_file f = { .data_offset = 8 + (uint64_t)nbytes };
	cleanup_free struct item *items = NULL;
	size_t nr = 0;
	int r;

	r = cursor_init(&c, err);
	if (r == 0)
		r = read_members(&c, &f, &items, &nr, err);
	if (r < 0)
		goto fail;
	if (nr)
		qsort(items, nr, sizeof(*items), by_range);
	for (size_t i = 0; i < nr; i++) {
		r = check_item(path, &items[i], f.data_bytes, err);
		if (r < 0)
			goto fail;
		f.data_bytes = items[i].end;
	}
	r = check_size(path, items, nr, f.data_offset, file_bytes, flags, err);
	if (r < 0)
		goto fail;
	sort_shared_offsets(items, nr);
	f.tensors = format_pool_get(&f.pool, nr * sizeof(*f.tensors));
	if (!f.tensors) {
		r = no_memory(path, err);
		goto fail;
	}
	for (size_t i = 0; i < nr; i++) {
		f.tensors[i] = items[i].t;
		f.tensors[i].file = 0;
		f.tensors[i].file_offset = f.data_offset + items[i].begin;
		f.tensors[i].nbytes = items[i].end - items[i].begin;
	}
	f.nr_tensors = nr;
	*ret = f;
	return 0;
fail:
	format_pool_free(f.pool);
	return r;
}

static int safetensors_read(struct source *src, uint32_t flags, struct format_file *ret, struct wd_err *err)
{
	cleanup_free unsigned char *header = NULL;
	unsigned char buf[FORMAT_HEAD_BYTES];
	struct span head;
	uint64_t n;
	int r;

	r = format_head(src, buf, &head, err);
	if (r < 0)
		return r;
	r = safetensors_header_bytes(src->path, head, src->id.size, &n, err);
	if (r < 0)
		return r;
	header = malloc((size_t)n + 1);
	if (!header)
		return err_set(err, -ENOMEM, "%s: out of memory for a header of %llu bytes", src->path,
			       (unsigned long long)n);
	r = source_read(src, header, (size_t)n, 8);
	if (r < 0)
		return err_set(err, r == -ENODATA ? -EBADMSG : r, "%s: cannot read the header of %llu bytes: %s",
			       src->path, (unsigned long long)n,
			       r == -ENODATA ? "the file has become shorter" : strerror(-r));
	return safetensors_parse(src->path, header, (size_t)n, src->id.size, flags, ret, err);
}

const struct format format_safetensors = {
	.name = "safetensors",
	.is = safetensors_is,
	.read = safetensors_read,
};
