/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `weightd inspect`: what checkpoints hold. Opens them by lib/checkpoint.h, without a pager: headers are read, no memory
 * for weights is mapped, no privilege is asked for.
 */
#include "cli/cmd.h"
#include "lib/checkpoint.h"
#include "lib/include/weightd.h"

#include <inttypes.h>
#include <string.h>

#define NR_DTYPES (WD_DTYPE_F4 + 1)
#define METADATA_SHOWN 60 /* bytes of a value, so that a line stays near 100 columns */

enum { OPT_METADATA = CMD_OPT_OWN, OPT_TRAILING, OPT_VARIANT };

static const char help[] = "Usage: weightd inspect [OPTION]... FILE...\n"
			   "\n"
			   "Lists the tensors of checkpoints: name, type, shape, bytes, and where the bytes\n"
			   "begin in their file. FILE is a .safetensors file, a sharded set's index .json,\n"
			   "or a folder that holds one of these (a model's snapshot, or a pipeline with\n"
			   "model_index.json). Only headers are read. A file that cannot be read is told on\n"
			   "stderr, and the others follow.\n"
			   "\n"
			   "Options:\n"
			   "  --json          one JSON object: checkpoints[] and errors[], as below\n"
			   "  --metadata      only metadata, but all of it\n"
			   "  --trailing      accept bytes that follow a safetensors file's data\n"
			   "  --variant=NAME  which of several weight sets in a folder, such as fp16\n"
			   "  --help          print this\n"
			   "\n"
			   "JSON:\n"
			   "  {\"checkpoints\": [{\"path\", \"name\", \"nr_tensors\", \"bytes\",\n"
			   "     \"dtypes\": {DTYPE: {\"tensors\", \"bytes\"}}, \"metadata\": {KEY: TEXT},\n"
			   "     \"files\": [{\"path\", \"format\", \"bytes\", \"data_offset\", \"data_bytes\"}],\n"
			   "     \"tensors\": [{\"name\", \"dtype\", \"shape\": [], \"bytes\",\n"
			   "        \"file\": index in files, \"offset\": in that file}],\n"
			   "     \"parts\": [components of a pipeline, each as a checkpoint]}],\n"
			   "   \"errors\": [{\"path\", \"errno\", \"text\"}]}\n"
			   "With --metadata there is no \"tensors\".\n"
			   "\n"
			   "Exit status: 0 all files were read, 1 some were not, 2 wrong command line.\n";

struct request {
	bool json, metadata;
	uint32_t flags;
	const char *variant;
};

struct totals {
	size_t nr_tensors;
	uint64_t bytes;
	struct {
		size_t nr_tensors;
		uint64_t bytes;
	} dtypes[NR_DTYPES];
};

/* Parts included. */
static void add_up(const struct checkpoint *c, struct totals *sum)
{
	for (size_t i = 0; i < c->nr_tensors; i++) {
		const struct ckpt_tensor *t = &c->tensors[i];
		uint32_t dtype = t->dtype < NR_DTYPES ? t->dtype : 0;

		sum->nr_tensors++;
		sum->bytes += t->nbytes;
		sum->dtypes[dtype].nr_tensors++;
		sum->dtypes[dtype].bytes += t->nbytes;
	}
	for (size_t i = 0; i < c->nr_parts; i++)
		add_up(c->parts[i], sum);
}

/* ---- for people */

static const char *plural(size_t n)
{
	return n == 1 ? "" : "s";
}

static void print_header(const struct checkpoint *c, const struct totals *sum)
{
	char size[SIZE_TEXT];
	const char *sep = ", ";

	if (c->nr_parts > 0)
		(void)printf(": pipeline, %zu part%s", c->nr_parts, plural(c->nr_parts));
	else
		(void)printf(": %s", c->nr_files > 0 ? c->files[0].format : "no file");
	if (c->nr_files > 1)
		(void)printf(" in %zu files", c->nr_files);
	(void)printf(", %zu tensor%s, %s", sum->nr_tensors, plural(sum->nr_tensors), size_text(sum->bytes, size));
	for (uint32_t d = 0; d < NR_DTYPES; d++) {
		if (sum->dtypes[d].nr_tensors == 0)
			continue;
		(void)printf("%s%s", sep, wd_dtype_name(d));
		sep = " ";
	}
	(void)putchar('\n');
}

static void print_totals(const struct totals *sum)
{
	const char *sep = ": ";

	(void)printf("  total: %zu tensor%s, %" PRIu64 " bytes", sum->nr_tensors, plural(sum->nr_tensors), sum->bytes);
	for (uint32_t d = 0; d < NR_DTYPES; d++) {
		if (sum->dtypes[d].nr_tensors == 0)
			continue;
		(void)printf("%s%zu of %s", sep, sum->dtypes[d].nr_tensors, wd_dtype_name(d));
		sep = ", ";
	}
	(void)putchar('\n');
}

static int print_safe(const char *text)
{
	cleanup_free char *safe = text_escape(text, NULL);

	if (!safe)
		return -ENOMEM;
	(void)fputs(safe, stdout);
	return 0;
}

static const char *base_name(const char *path)
{
	const char *slash = strrchr(path, '/');

	return slash ? slash + 1 : path;
}

static int print_metadata(const struct checkpoint *c, bool all)
{
	static const struct column columns[] = { { NULL, COLUMN_LEFT }, { NULL, COLUMN_WRAP } };
	cleanup_table struct table table;

	table_init(&table, columns, ARRAY_SIZE(columns));
	for (size_t i = 0; i < c->nr_metadata; i++) {
		const struct ckpt_metadata *m = &c->metadata[i];
		size_t len = strlen(m->value), shown = METADATA_SHOWN;

		table_cell(&table, m->key);
		if (all || len <= METADATA_SHOWN) {
			table_cell(&table, m->value);
			continue;
		}
		while (shown > 0 && ((unsigned char)m->value[shown] & 0xc0) == 0x80)
			shown--; /* not through a character */
		table_printf(&table, "%.*s... (cut: %zu bytes, see --metadata)", (int)shown, m->value, len);
	}
	if (c->nr_metadata > 0 && !all)
		(void)puts("  metadata:");
	return table_print(&table, all ? 2 : 4);
}

static char *shape_text(const struct ckpt_tensor *t)
{
	size_t room = (size_t)t->ndim * 21 + 3, len = 1; /* 20 digits and sign, a comma */
	char *text = malloc(room);

	if (!text)
		return NULL;
	text[0] = '[';
	for (uint32_t i = 0; i < t->ndim; i++)
		len += (size_t)snprintf(text + len, room - len, "%s%" PRId64, i ? "," : "", t->shape[i]);
	(void)snprintf(text + len, room - len, "]");
	return text;
}

static int print_tensors(const struct checkpoint *c)
{
	static const struct column columns[] = {
		{ "NAME", COLUMN_CUT },    { "DTYPE", COLUMN_LEFT },   { "SHAPE", COLUMN_LEFT },
		{ "BYTES", COLUMN_RIGHT }, { "OFFSET", COLUMN_RIGHT }, { "FILE", COLUMN_LEFT },
	};
	bool shards = c->nr_files > 1;
	cleanup_table struct table table;

	table_init(&table, columns, ARRAY_SIZE(columns) - (shards ? 0 : 1));
	for (size_t i = 0; i < c->nr_tensors; i++) {
		const struct ckpt_tensor *t = &c->tensors[i];
		cleanup_free char *shape = shape_text(t);

		if (!shape)
			return -ENOMEM;
		table_cell(&table, t->name);
		table_cell(&table, wd_dtype_name(t->dtype));
		table_cell(&table, shape);
		table_printf(&table, "%" PRIu64, t->nbytes);
		table_printf(&table, "%" PRIu64, t->file_offset);
		if (shards)
			table_cell(&table, base_name(c->files[t->file].source->path));
	}
	return c->nr_tensors > 0 ? table_print(&table, 2) : 0;
}

/* `title` is what the user gave, or for a part of a pipeline what leads to it. */
static int print_checkpoint(const struct checkpoint *c, const char *title, const struct request *request)
{
	struct totals sum = { 0 };
	int r = print_safe(title);

	if (r < 0)
		return r;
	add_up(c, &sum);
	print_header(c, &sum);
	r = print_metadata(c, request->metadata);
	if (r == 0 && !request->metadata)
		r = print_tensors(c);
	if (r == 0 && !request->metadata)
		print_totals(&sum);
	for (size_t i = 0; r == 0 && i < c->nr_parts; i++) {
		cleanup_free char *part = NULL;

		if (asprintf(&part, "%s/%s", title, c->parts[i]->name) < 0) {
			part = NULL;
			return -ENOMEM;
		}
		(void)putchar('\n');
		r = print_checkpoint(c->parts[i], part, request);
	}
	return r;
}

/* ---- JSON. Functions return NULL when memory is missing; json_*_new() take the reference in any case. */

static json_t *json_size(uint64_t n)
{
	return json_integer((json_int_t)n); /* files end below 2^63 */
}

static json_t *dtypes_json(const struct totals *sum)
{
	cleanup_json json_t *object = json_object();

	for (uint32_t d = 0; d < NR_DTYPES; d++)
		if (sum->dtypes[d].nr_tensors > 0 &&
		    json_object_set_new(object, wd_dtype_name(d),
					json_pack("{s:o, s:o}", "tensors", json_size(sum->dtypes[d].nr_tensors),
						  "bytes", json_size(sum->dtypes[d].bytes))) < 0)
			return NULL;
	return TAKE_PTR(object);
}

static json_t *tensor_json(const struct ckpt_tensor *t)
{
	cleanup_json json_t *shape = json_array();

	for (uint32_t i = 0; i < t->ndim; i++)
		if (json_array_append_new(shape, json_integer(t->shape[i])) < 0)
			return NULL;
	return json_pack("{s:o, s:s, s:O, s:o, s:o, s:o}", "name", json_text(t->name), "dtype", wd_dtype_name(t->dtype),
			 "shape", shape, "bytes", json_size(t->nbytes), "file", json_size(t->file), "offset",
			 json_size(t->file_offset));
}

static json_t *file_json(const struct ckpt_file *f)
{
	return json_pack("{s:o, s:s, s:o, s:o, s:o}", "path", json_text(f->source->path), "format", f->format, "bytes",
			 json_size(f->source->id.size), "data_offset", json_size(f->data_offset), "data_bytes",
			 json_size(f->data_bytes));
}

static json_t *checkpoint_json(const struct checkpoint *c, const struct request *request)
{
	struct totals sum = { 0 };
	cleanup_json json_t *metadata = json_object(), *files = json_array(), *tensors = json_array(),
			    *parts = json_array(), *root = NULL;
	int r = 0;

	add_up(c, &sum);
	for (size_t i = 0; r == 0 && i < c->nr_metadata; i++)
		r = json_object_set_new(metadata, c->metadata[i].key, json_text(c->metadata[i].value));
	for (size_t i = 0; r == 0 && i < c->nr_files; i++)
		r = json_array_append_new(files, file_json(&c->files[i]));
	for (size_t i = 0; r == 0 && !request->metadata && i < c->nr_tensors; i++)
		r = json_array_append_new(tensors, tensor_json(&c->tensors[i]));
	for (size_t i = 0; r == 0 && i < c->nr_parts; i++)
		r = json_array_append_new(parts, checkpoint_json(c->parts[i], request));
	if (r < 0)
		return NULL;
	root = json_pack("{s:o, s:o, s:o, s:o, s:o, s:O, s:O}", "path", json_text(c->path), "name", json_text(c->name),
			 "nr_tensors", json_size(sum.nr_tensors), "bytes", json_size(sum.bytes), "dtypes",
			 dtypes_json(&sum), "metadata", metadata, "files", files);
	if (!root || (!request->metadata && json_object_set(root, "tensors", tensors) < 0) ||
	    json_object_set(root, "parts", parts) < 0)
		return NULL;
	return TAKE_PTR(root);
}

/* ---- the command */

static void checkpoint_free_p(struct checkpoint **c)
{
	checkpoint_free(*c);
}

/* Does one file. `checkpoints` and `errors` are NULL unless JSON is wanted. Return: 0; -ENOMEM ends everything;
 * another error was told and concerns this file alone. */
static int inspect(const char *path, const struct request *request, bool first, json_t *checkpoints, json_t *errors)
{
	cleanup(checkpoint_free_p) struct checkpoint *c = NULL;
	struct wd_err err = { "" };
	int r = checkpoint_open(path, request->variant, request->flags, &c, &err);

	if (r < 0) {
		struct checkpoint *lenient = NULL;

		/* The library's text tells of its own flag. */
		if (r == -EBADMSG && !(request->flags & CKPT_TRAILING) &&
		    checkpoint_open(path, request->variant, request->flags | CKPT_TRAILING, &lenient, NULL) == 0) {
			checkpoint_free(lenient);
			cmd_error("%s; here: --trailing", err.text);
		} else {
			cmd_error("%s", err.text[0] ? err.text : strerror(-r));
		}
		if (request->json &&
		    json_array_append_new(errors, json_pack("{s:o, s:i, s:o}", "path", json_text(path), "errno", -r,
							    "text", json_text(err.text))) < 0)
			return -ENOMEM;
		return r == -ENOMEM ? -EIO : r;
	}
	if (request->json)
		return json_array_append_new(checkpoints, checkpoint_json(c, request)) < 0 ? -ENOMEM : 0;
	if (!first)
		(void)putchar('\n');
	return print_checkpoint(c, path, request);
}

int cmd_inspect(int argc, char **argv)
{
	static const struct option options[] = {
		CMD_COMMON_OPTIONS,
		{ "metadata", no_argument, NULL, OPT_METADATA },
		{ "trailing", no_argument, NULL, OPT_TRAILING },
		{ "variant", required_argument, NULL, OPT_VARIANT },
		{ NULL, 0, NULL, 0 },
	};
	struct request request = { 0 };
	cleanup_json json_t *root = NULL;
	json_t *checkpoints = NULL, *errors = NULL;
	bool printed = false;
	int opt, r, code = CMD_DONE;

	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case CMD_OPT_HELP:
			return cmd_print_help(help);
		case CMD_OPT_JSON:
			request.json = true;
			break;
		case OPT_METADATA:
			request.metadata = true;
			break;
		case OPT_TRAILING:
			request.flags |= CKPT_TRAILING;
			break;
		case OPT_VARIANT:
			request.variant = optarg;
			break;
		default:
			return cmd_usage_error(NULL);
		}
	}
	if (optind == argc)
		return cmd_usage_error("no file given");
	if (request.json) {
		root = json_pack("{s:[], s:[]}", "checkpoints", "errors");
		checkpoints = json_object_get(root, "checkpoints");
		errors = json_object_get(root, "errors");
	}
	for (int i = optind; i < argc; i++) {
		r = request.json && !root ? -ENOMEM : inspect(argv[i], &request, !printed, checkpoints, errors);
		if (r == -ENOMEM)
			goto no_memory;
		if (r < 0)
			code = CMD_FAILED;
		else
			printed = true;
	}
	if (request.json && json_print(root) < 0)
		goto no_memory;
	return code;

no_memory:
	cmd_error("out of memory");
	return CMD_FAILED;
}
