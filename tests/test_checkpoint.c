/* SPDX-License-Identifier: Apache-2.0 */
/* From a path to tensors: sharded sets, snapshots, pipelines, model caches made of links, folders in any order. */
#include <check.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "lib/base/log.h"
#include "lib/checkpoint.h"
#include "lib/include/weightd.h"
#include "tests/data.h"

#define SEED 12

static char *folder;
static struct wd_err err;

static void setup(void)
{
	folder = data_tmpdir();
}

static void teardown(void)
{
	data_remove(folder);
	free(folder);
}

struct kept_text {
	char *text;
	struct kept_text *next;
};

/* Texts live as long as the test's process, and a leak checker can see them until then. */
static char *kept(char *text)
{
	static struct kept_text *all;
	struct kept_text *more;

	more = malloc(sizeof(*more));
	more->text = text;
	more->next = all;
	all = more;
	return text;
}
#define text(...) kept(data_text(__VA_ARGS__))

/* Paths and small files below the test's folder. */
static char *at(const char *name)
{
	return text("%s%s%s", folder, *name ? "/" : "", name);
}

static void make_folder(const char *name)
{
	ck_assert_int_eq(mkdir(at(name), 0755), 0);
}

static void make_link(const char *target, const char *name)
{
	ck_assert_int_eq(symlink(target, at(name)), 0);
}

static void make_text(const char *name, const char *text)
{
	data_write(at(name), text, strlen(text));
}

/* A file with one F32 tensor of 4 elements for each of the names, space-separated. */
static void make_weights(const char *name, const char *tensors)
{
	struct data_tensor t[16];
	size_t nr = 0;
	char *names = text("%s", tensors), *rest = NULL;

	for (char *n = strtok_r(names, " ", &rest); n; n = strtok_r(NULL, " ", &rest))
		t[nr++] = (struct data_tensor){ .name = n, .dtype = "F32", .ndim = 1, .shape = { 4 } };
	(void)data_write_safetensors(at(name), t, nr,
				     &(struct data_opts){ .seed = SEED, .metadata = "{\"format\":\"pt\"}" });
}

static struct checkpoint *open_good(const char *name, const char *variant)
{
	struct checkpoint *c = NULL;
	int r = checkpoint_open(at(name), variant, 0, &c, &err);

	ck_assert_msg(r == 0, "%d: %s", r, err.text);
	ck_assert_str_eq(c->path, at(name));
	return c;
}

/* The names of all tensors, in order, space-separated; each with the right bytes. */
static char *tensors_of(const struct checkpoint *c)
{
	char *all = text("%s", "");

	for (size_t i = 0; i < c->nr_tensors; i++) {
		const struct ckpt_tensor *t = &c->tensors[i];
		const struct ckpt_file *f = &c->files[t->file];
		unsigned char bytes[16];

		ck_assert_uint_le(f->first_tensor, i);
		ck_assert_uint_gt(f->first_tensor + f->nr_tensors, i);
		ck_assert_uint_eq(t->nbytes, 16);
		ck_assert_int_eq(source_read(f->source, bytes, 16, t->file_offset), 0);
		ck_assert_int_eq(data_check(bytes, 16, SEED, t->file_offset), -1);
		all = text("%s%s%s", all, i ? " " : "", t->name);
	}
	return all;
}

static void ck_opens(const char *name, const char *variant, const char *tensors)
{
	struct checkpoint *c = open_good(name, variant);

	ck_assert_str_eq(tensors_of(c), tensors);
	checkpoint_free(c);
}

/* It is refused with a line that has all of the fragments, separated by '|'. */
static void ck_refused(const char *name, const char *variant, int want, const char *fragments)
{
	struct checkpoint *c = NULL;
	int r = checkpoint_open(at(name), variant, 0, &c, &err);
	char *all = text("%s", fragments), *rest = NULL;

	ck_assert_msg(r == want, "got %d, not %d: %s", r, want, r < 0 ? err.text : "opened");
	ck_assert_ptr_null(c);
	ck_assert_ptr_null(strchr(err.text, '\n'));
	for (char *f = strtok_r(all, "|", &rest); f; f = strtok_r(NULL, "|", &rest))
		ck_assert_msg(strstr(err.text, f) != NULL, "lacks \"%s\": %s", f, err.text);
}

/* ---- one file */

START_TEST(test_checkpoint_names)
{
	static const struct {
		const char *file, *name;
	} files[] = {
		{ "unet.safetensors", "unet" }, { "v1.5.safetensors", "v1.5" },     { "weights.bin", "weights" },
		{ "weights", "weights" },       { ".safetensors", ".safetensors" },
	};
	struct checkpoint *c;

	for (size_t i = 0; i < ARRAY_SIZE(files); i++) {
		make_weights(files[i].file, "a");
		c = open_good(files[i].file, NULL);
		ck_assert_str_eq(c->name, files[i].name);
		c = checkpoint_free(c);
	}
	make_folder("my.model");
	make_weights("my.model/model.safetensors", "a");
	c = open_good("my.model/", NULL);
	ck_assert_str_eq(c->name, "my.model");
	checkpoint_free(c);
	ck_assert_int_eq(chdir(at("my.model")), 0);
	ck_assert_int_eq(checkpoint_open(".", NULL, 0, &c, &err), 0);
	ck_assert_str_eq(c->name, "my.model");
	checkpoint_free(c);
	ck_assert_int_eq(checkpoint_open("model.safetensors", NULL, 0, &c, &err), 0);
	ck_assert_str_eq(c->name, "model");
	checkpoint_free(c);
	ck_assert_ptr_null(checkpoint_free(NULL));
}
END_TEST

START_TEST(test_checkpoint_content_decides)
{
	make_weights("model.gguf", "a b");
	ck_opens("model.gguf", NULL, "a b");
	make_text("model.safetensors", "GGUF\3.................");
	ck_refused("model.safetensors", NULL, -EOPNOTSUPP, "model.safetensors|a GGUF file");
	make_weights("shard.safetensors", "a");
	make_text("index.txt", " {\"weight_map\":{\"a\":\"shard.safetensors\"}}");
	ck_opens("index.txt", NULL, "a");
	make_text("model_index.json", "{\"_class_name\":\"Pipeline\"}");
	ck_refused("model_index.json", NULL, -EBADMSG, "open its folder instead");
}
END_TEST

START_TEST(test_checkpoint_system_errors)
{
	ck_refused("nothing.safetensors", NULL, -ENOENT, "nothing.safetensors");
	make_folder("empty");
	ck_refused("empty", NULL, -ENOENT, "empty|looked for|*.safetensors|model_index.json");
	ck_assert_int_eq(mkfifo(at("fifo"), 0600), 0);
	ck_refused("fifo", NULL, -EINVAL, "fifo|not a regular file");
}
END_TEST

/* ---- model caches made of links */

START_TEST(test_checkpoint_links)
{
	struct checkpoint *one, *two;

	make_folder("blobs");
	make_folder("snapshots");
	make_folder("snapshots/r1");
	make_folder("snapshots/r2");
	make_weights("blobs/0123abcd", "a b");
	make_link("../../blobs/0123abcd", "snapshots/r1/model.safetensors");
	make_link("../../blobs/0123abcd", "snapshots/r2/model.safetensors");
	one = open_good("snapshots/r1", NULL);
	two = open_good("snapshots/r2/model.safetensors", NULL);
	ck_assert(source_id_equal(&one->files[0].source->id, &two->files[0].source->id));
	ck_assert_str_eq(one->name, "r1");
	ck_assert_str_eq(two->name, "model");
	checkpoint_free(one);
	checkpoint_free(two);

	make_link("../blobs/gone", "snapshots/dangling.safetensors");
	ck_refused("snapshots/dangling.safetensors", NULL, -ENOENT, "snapshots/dangling.safetensors|../blobs/gone");
	make_weights("blobs/gone.incomplete", "a");
	ck_refused("snapshots/dangling.safetensors", NULL, -ENOENT,
		   "dangling.safetensors|../blobs/gone,|gone.incomplete");
	make_link("../blobs/gone.incomplete", "snapshots/half.safetensors");
	ck_refused("snapshots/half.safetensors", NULL, -EBADMSG, "half.safetensors|../blobs/gone.incomplete|not ended");
	make_link("loop.safetensors", "snapshots/loop.safetensors");
	ck_refused("snapshots/loop.safetensors", NULL, -ELOOP, "loop.safetensors|circle");

	/* in a folder: the name is there, so it is meant */
	make_folder("broken");
	make_link("../blobs/nowhere", "broken/model.safetensors");
	ck_refused("broken", NULL, -ENOENT, "broken/model.safetensors|../blobs/nowhere");
}
END_TEST

/* An index in a cache is a link too; its shards lie beside the link, not beside the blob. */
START_TEST(test_checkpoint_index_resolves_as_given)
{
	make_folder("blobs");
	make_folder("snapshot");
	make_weights("blobs/s1", "a");
	make_weights("blobs/s2", "b");
	make_text(
		"blobs/index",
		"{\"weight_map\":{\"a\":\"model-00001-of-00002.safetensors\",\"b\":\"model-00002-of-00002.safetensors\"}}");
	make_link("../blobs/index", "snapshot/model.safetensors.index.json");
	make_link("../blobs/s1", "snapshot/model-00001-of-00002.safetensors");
	make_link("../blobs/s2", "snapshot/model-00002-of-00002.safetensors");
	ck_opens("snapshot/model.safetensors.index.json", NULL, "a b");
	ck_opens("snapshot", NULL, "a b");
	ck_assert_int_eq(chdir(at("snapshot")), 0);
	free(folder);
	folder = strdup(".");
	ck_opens("model.safetensors.index.json", NULL, "a b");
	ck_assert_int_eq(chdir(".."), 0);
	free(folder);
	folder = getcwd(NULL, 0);
	ck_assert_int_eq(unlink(at("snapshot/model-00002-of-00002.safetensors")), 0);
	ck_refused("snapshot", NULL, -ENOENT, "index.json|\"b\"|model-00002-of-00002.safetensors");
}
END_TEST

/* ---- sharded sets */

static void make_shards(void)
{
	make_weights("s-1.safetensors", "a b x");
	make_weights("s-2.safetensors", "c d x");
	make_weights("s-3.safetensors", "e");
}

static void make_index(const char *text)
{
	make_text("s.safetensors.index.json", text);
}

#define INDEX "s.safetensors.index.json"

START_TEST(test_checkpoint_index)
{
	struct checkpoint *c;

	make_shards();
	/* x is in two shards: the index decides. d is in none of its lines: still there. */
	make_index(
		"{\"metadata\":{\"total_size\":96},\"weight_map\":{\"e\":\"s-3.safetensors\",\"c\":\"s-2.safetensors\","
		"\"x\":\"s-2.safetensors\",\"a\":\"s-1.safetensors\",\"b\":\"s-1.safetensors\"}}");
	c = open_good(INDEX, NULL);
	ck_assert_str_eq(c->name, "s");
	ck_assert_str_eq(tensors_of(c), "a b c d x e");
	ck_assert_uint_eq(c->nr_files, 3);
	ck_assert_str_eq(c->files[0].source->path, at("s-1.safetensors"));
	ck_assert_str_eq(c->files[1].source->path, at("s-2.safetensors"));
	ck_assert_uint_eq(c->files[0].nr_tensors, 2);
	ck_assert_uint_eq(c->files[0].data_bytes, 48);
	ck_assert_uint_eq(c->nr_metadata, 1); /* all three say the same */
	ck_assert_str_eq(c->metadata[0].value, "pt");
	checkpoint_free(c);

	make_index("{\"weight_map\":{\"x\":\"s-1.safetensors\",\"c\":\"s-2.safetensors\"}}");
	ck_opens(INDEX, NULL, "a b x c d"); /* shards that it does not name do not belong to it */
	make_index("{\"metadata\":{\"total_size\":5},\"weight_map\":{\"e\":\"s-3.safetensors\"}}");
	ck_opens(INDEX, NULL, "e"); /* a wrong total_size is worth a warning only */
	make_index("{\"metadata\":{\"total_size\":\"?\"},\"weight_map\":{\"e\":\"./s-3.safetensors\"}}");
	ck_opens(INDEX, NULL, "e");
}
END_TEST

static const struct {
	const char *text;
	int error;
	const char *fragments;
} bad_index[] = {
	{ "{\"weight_map\":{\"a\":\"s-1.safetensors\",\"q\":\"s-9.safetensors\",\"r\":\"s-9.safetensors\"}}", -ENOENT,
	  "\"q\" and 1 more|s-9.safetensors" },
	{ "{\"weight_map\":{\"a\":\"s-1.safetensors\",\"q\":\"s-1.safetensors\"}}", -EBADMSG,
	  "\"q\"|s-1.safetensors, which lacks it" },
	{ "{\"weight_map\":{\"c\":\"s-1.safetensors\"}}", -EBADMSG, "\"c\"|s-1.safetensors, which lacks it" },
	{ "{\"weight_map\":{\"a\":\"s-1.safetensors\",\"c\":\"s-2.safetensors\"}}", -EBADMSG,
	  "\"x\"|s-1.safetensors|s-2.safetensors|does not say" },
	{ "{\"weight_map\":{\"a\":\"../s-1.safetensors\"}}", -EBADMSG, "\"a\"|\"../s-1.safetensors\"|a path with .." },
	{ "{\"weight_map\":{\"a\":\"x/../s-1.safetensors\"}}", -EBADMSG, "a path with .." },
	{ "{\"weight_map\":{\"a\":\"x/..\"}}", -EBADMSG, "a path with .." },
	{ "{\"weight_map\":{\"a\":\"/etc/passwd\"}}", -EBADMSG, "\"a\"|\"/etc/passwd\"|an absolute path" },
	{ "{\"weight_map\":{\"a\":\"\"}}", -EBADMSG, "\"a\"|empty" },
	{ "{\"weight_map\":{\"a\":1}}", -EBADMSG, "\"a\"|no string" },
	{ "{\"weight_map\":{\"a\":\"s-1.safetensors\",\"a\":\"s-2.safetensors\"}}", -EBADMSG, "duplicate" },
	{ "{\"weight_map\":{}}", -EBADMSG, "weight_map is empty" },
	{ "{\"weight_map\":[]}", -EBADMSG, "no JSON object" },
	{ "{\"weight_map\":{\"a\":\"s-1.safetensors\"}", -EBADMSG, "no valid JSON, line 1" },
	{ "{\"weight_map\":{\"a\":\"" INDEX "\"}}", -EBADMSG, INDEX },
	{ "{\"weight_map\":{\"a\":\"folder\"}}", -EISDIR, "\"a\"|folder" },
	{ "{\"weight_map\":{\"a\":\"damaged.safetensors\"}}", -EBADMSG, INDEX "|damaged.safetensors|too short" },
	{ "{}", -EBADMSG, "no weight_map" },
};

START_TEST(test_checkpoint_index_refuses)
{
	make_shards();
	make_folder("folder");
	make_text("damaged.safetensors", "abc");
	make_index(bad_index[_i].text);
	ck_refused(INDEX, NULL, bad_index[_i].error, bad_index[_i].fragments);
	ck_assert_ptr_nonnull(strstr(err.text, INDEX));
}
END_TEST

/* ---- snapshots: which of a folder's files */

static const struct {
	const char *const files[6]; /* each gets one tensor of its own name */
	const char *variant;
	int error;
	const char *is; /* the file that is taken, or what the error says */
} snapshots[] = {
	{ { "model.safetensors" }, NULL, 0, "model.safetensors" },
	{ { "any.thing.safetensors" }, NULL, 0, "any.thing.safetensors" },
	{ { "model.fp16.safetensors" }, NULL, 0, "model.fp16.safetensors" },
	{ { "model.fp16.safetensors", "model.safetensors" }, NULL, 0, "model.safetensors" },
	{ { "model.fp16.safetensors", "model.safetensors" }, "fp16", 0, "model.fp16.safetensors" },
	{ { "model.safetensors" }, "fp16", -ENOENT, "\"fp16\"|model.safetensors" },
	{ { "model.fp16.safetensors" }, "bf16", -ENOENT, "\"bf16\"|model.fp16.safetensors" },
	{ { "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors" },
	  NULL,
	  0,
	  "diffusion_pytorch_model.safetensors" },
	{ { "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors" },
	  "fp16",
	  0,
	  "diffusion_pytorch_model.fp16.safetensors" },
	{ { "adapter.safetensors", "model.safetensors" }, NULL, 0, "model.safetensors" },
	{ { "unet.safetensors", "unet.fp16.safetensors", "unet.bf16.safetensors" }, NULL, 0, "unet.safetensors" },
	{ { "unet.safetensors", "unet.fp16.safetensors", "unet.bf16.safetensors" },
	  "bf16",
	  0,
	  "unet.bf16.safetensors" },
	{ { "one.safetensors", "two.safetensors" }, NULL, -ENOTUNIQ, "one.safetensors, two.safetensors" },
	{ { "one.fp16.safetensors", "two.fp16.safetensors" },
	  "fp16",
	  -ENOTUNIQ,
	  "one.fp16.safetensors, two.fp16.safetensors" },
	{ { "model.fp16.safetensors", "model.bf16.safetensors" },
	  NULL,
	  -ENOTUNIQ,
	  "model.bf16.safetensors, model.fp16.safetensors" },
	{ { "model.safetensors", "diffusion_pytorch_model.safetensors" }, NULL, -ENOTUNIQ, "model.safetensors" },
	{ { "model-00001-of-00002.safetensors" }, NULL, -ENOENT, "model-00001-of-00002.safetensors|index" },
	{ { "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors" }, NULL, -ENOENT, "index" },
	{ { "model-00001-of-00001.safetensors" }, NULL, 0, "model-00001-of-00001.safetensors" },
	{ { "model-00001-of-00002.safetensors", "lora.safetensors" },
	  NULL,
	  -ENOTUNIQ,
	  "lora.safetensors|model-00001-of" },
	{ { "model-00001-of-00002.safetensors", "model.safetensors" }, NULL, 0, "model.safetensors" },
	{ { "model-00001-of-00002.fp16.safetensors", "model.safetensors" }, "fp16", -ENOENT, "index" },
	{ { "pytorch_model.bin", "config.txt" }, NULL, -EOPNOTSUPP, "pytorch_model.bin" },
	{ { "q4.gguf", "README.md" }, NULL, -EOPNOTSUPP, "q4.gguf" },
	{ { "pytorch_model.bin", "model.safetensors" }, NULL, 0, "model.safetensors" },
	{ { "README.md" }, NULL, -ENOENT, "looked for" },
};

static void make_named(const char *name)
{
	make_weights(name, name);
}

START_TEST(test_checkpoint_snapshot)
{
	size_t nr = 0;

	/* in both orders: how a folder lists its entries must not matter */
	while (nr < ARRAY_SIZE(snapshots[_i].files) && snapshots[_i].files[nr])
		nr++;
	for (size_t order = 0; order < 2; order++) {
		for (size_t i = 0; i < nr; i++)
			make_named(snapshots[_i].files[order ? nr - 1 - i : i]);
		make_folder("sub.safetensors"); /* no file */
		if (snapshots[_i].error)
			ck_refused("", snapshots[_i].variant, snapshots[_i].error, snapshots[_i].is);
		else
			ck_opens("", snapshots[_i].variant, snapshots[_i].is);
		teardown();
		setup();
	}
}
END_TEST

/* Indexes: their shards are no candidates, every spelling of a variant is known. */
static const struct {
	const char *index[3]; /* each with two shards of its own */
	const char *variant;
	int error;
	const char *is; /* the index that is taken, or what the error says */
} indexed[] = {
	{ { "model.safetensors.index.json" }, NULL, 0, "model.safetensors.index.json" },
	{ { "model.safetensors.index.json", "model.safetensors.index.fp16.json" },
	  NULL,
	  0,
	  "model.safetensors.index.json" },
	{ { "model.safetensors.index.json", "model.safetensors.index.fp16.json" },
	  "fp16",
	  0,
	  "model.safetensors.index.fp16.json" },
	{ { "model.safetensors.index.json", "model.safetensors.fp16.index.json" },
	  "fp16",
	  0,
	  "model.safetensors.fp16.index.json" },
	{ { "model.safetensors.index.json", "model.fp16.safetensors.index.json" },
	  "fp16",
	  0,
	  "model.fp16.safetensors.index.json" },
	{ { "diffusion_pytorch_model.fp16.safetensors.index.json", "diffusion_pytorch_model.safetensors.index.json" },
	  "fp16",
	  0,
	  "diffusion_pytorch_model.fp16.safetensors.index.json" },
	{ { "unet.safetensors.index.json", "unet.safetensors.index.fp16.json" },
	  NULL,
	  0,
	  "unet.safetensors.index.json" },
	{ { "model.safetensors.index.fp16.json", "model.safetensors.index.bf16.json" },
	  NULL,
	  -ENOTUNIQ,
	  "model.safetensors.index.bf16.json, model.safetensors.index.fp16.json" },
	{ { "model.fp16.safetensors.index.json", "model.safetensors.index.fp16.json" }, "fp16", -ENOTUNIQ, "several" },
	{ { "model.safetensors.index.json" }, "fp16", -ENOENT, "\"fp16\"" },
};

START_TEST(test_checkpoint_snapshot_with_indexes)
{
	for (size_t i = 0; i < ARRAY_SIZE(indexed[_i].index) && indexed[_i].index[i]; i++) {
		const char *name = indexed[_i].index[i];

		make_weights(text("%zu-00001-of-00002.safetensors", i), name);
		make_weights(text("%zu-00002-of-00002.safetensors", i), "last");
		make_text(name, text("{\"weight_map\":{\"%s\":\"%zu-00001-of-00002.safetensors\","
				     "\"last\":\"%zu-00002-of-00002.safetensors\"}}",
				     name, i, i));
	}
	make_text("pytorch_model.bin.index.json", "{\"weight_map\":{\"a\":\"pytorch_model-00001-of-00001.bin\"}}");
	if (indexed[_i].error)
		ck_refused("", indexed[_i].variant, indexed[_i].error, indexed[_i].is);
	else
		ck_opens("", indexed[_i].variant, text("%s last", indexed[_i].is));
	if (!indexed[_i].error && !indexed[_i].variant) {
		make_named("model.safetensors"); /* beside an index: two whole models */
		if (strncmp(indexed[_i].is, "model.", 6) == 0)
			ck_refused("", NULL, -ENOTUNIQ, "several|model.safetensors, |model.safetensors.index.json");
		else
			ck_opens("", NULL, "model.safetensors");
	}
}
END_TEST

/* ---- pipelines */

static void make_pipeline(void)
{
	make_folder("unet");
	make_folder("vae");
	make_folder("text_encoder");
	make_folder("scheduler");
	make_folder("undeclared");
	make_weights("unet/diffusion_pytorch_model.safetensors", "u");
	make_weights("unet/diffusion_pytorch_model.fp16.safetensors", "u16");
	make_weights("vae/diffusion_pytorch_model.safetensors", "v");
	make_weights("text_encoder/t-1.safetensors", "t1");
	make_weights("text_encoder/t-2.safetensors", "t2");
	make_text("text_encoder/model.safetensors.index.json",
		  "{\"weight_map\":{\"t2\":\"t-2.safetensors\",\"t1\":\"t-1.safetensors\"}}");
	make_text("scheduler/scheduler_config.json", "{}");
	make_weights("undeclared/model.safetensors", "no");
	make_weights("single_file.safetensors", "no"); /* the same once more, for other programs */
	make_text("model_index.json",
		  "{\"_class_name\":\"Pipeline\",\"_version\":[\"x\",\"y\"],\"force_zeros\":true,"
		  "\"vae\":[\"diffusers\",\"AutoencoderKL\"],\"unet\":[\"diffusers\",\"UNet\"],"
		  "\"scheduler\":[\"diffusers\",\"Scheduler\"],\"safety_checker\":[null,null],\"absent\":[\"a\",\"b\"],"
		  "\"text_encoder\":[\"transformers\",\"CLIPTextModel\"]}");
}

START_TEST(test_checkpoint_pipeline)
{
	static const char *const names[] = { "vae", "unet", "text_encoder" }, *const tensors[] = { "v", "u", "t1 t2" };
	struct checkpoint *c;

	make_pipeline();
	c = open_good("", NULL);
	ck_assert_uint_eq(c->nr_parts, 3);
	ck_assert_uint_eq(c->nr_files, 0);
	ck_assert_uint_eq(c->nr_tensors, 0);
	for (size_t i = 0; i < 3; i++) {
		ck_assert_str_eq(c->parts[i]->name, names[i]);
		ck_assert_str_eq(c->parts[i]->path, at(names[i]));
		ck_assert_str_eq(tensors_of(c->parts[i]), tensors[i]);
		ck_assert_uint_eq(c->parts[i]->nr_parts, 0);
	}
	checkpoint_free(c);

	/* components without the variant are taken as they are, if one has it */
	c = open_good("", "fp16");
	ck_assert_str_eq(tensors_of(c->parts[1]), "u16");
	ck_assert_str_eq(tensors_of(c->parts[0]), "v");
	checkpoint_free(c);
	ck_refused("", "bf16", -ENOENT, "\"bf16\"");
}
END_TEST

START_TEST(test_checkpoint_pipeline_refuses)
{
	make_pipeline();
	make_text("vae/diffusion_pytorch_model.safetensors", "version https://git-lfs.github.com/spec/v1\nsize 7\n");
	ck_refused("", NULL, -EBADMSG, "\"vae\"|vae/diffusion_pytorch_model.safetensors|Git LFS|7 bytes");
	ck_assert_int_eq(unlink(at("vae/diffusion_pytorch_model.safetensors")), 0);
	make_text("vae/diffusion_pytorch_model.bin", "PK");
	ck_refused("", NULL, -EOPNOTSUPP, "\"vae\"|diffusion_pytorch_model.bin");
	data_remove(at("vae"));
	make_link("../elsewhere", "vae");
	ck_refused("", NULL, -ENOENT, "\"vae\"|../elsewhere");
	make_text("model_index.json", "{\"../vae\":[\"a\",\"b\"]}");
	ck_refused("", NULL, -EBADMSG, "\"../vae\"");
	make_text("model_index.json", "{\"scheduler\":[\"a\",\"b\"]}");
	ck_refused("", NULL, -ENOENT, "model_index.json|none of");
	make_text("model_index.json", "{");
	ck_refused("", NULL, -EBADMSG, "model_index.json|no valid JSON");
	make_text("model_index.json", "[]");
	ck_refused("", NULL, -EBADMSG, "model_index.json|no object");
	ck_assert_int_eq(unlink(at("model_index.json")), 0);
	make_link("nowhere", "model_index.json");
	ck_refused("", NULL, -ENOENT, "model_index.json|nowhere");
}
END_TEST

/* ---- the rest */

static int own_mounts(void)
{
	return unshare(CLONE_NEWNS) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ? -errno : 0;
}

/* 0, or why this process may not mount. */
static int try_mounts(void)
{
	pid_t pid = fork();
	int status;

	if (pid == 0)
		_exit(-own_mounts());
	return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : ECHILD;
}

START_TEST(test_checkpoint_read_only_media)
{
	struct checkpoint *c = NULL;

	make_shards();
	make_index("{\"weight_map\":{\"e\":\"s-3.safetensors\"}}");
	ck_assert_int_eq(own_mounts(), 0); /* ends with this test's process */
	ck_assert_int_eq(mount(folder, folder, NULL, MS_BIND, NULL), 0);
	ck_assert_int_eq(mount(NULL, folder, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL), 0);
	ck_assert_int_lt(open(at(INDEX), O_WRONLY), 0);
	int r = checkpoint_open(at(INDEX), NULL, 0, &c, &err);
	ck_assert_int_eq(umount2(folder, MNT_DETACH), 0);
	ck_assert_msg(r == 0, "%s", err.text);
	checkpoint_free(c);
}
END_TEST

START_TEST(test_checkpoint_many_shards)
{
	struct checkpoint *c;
	size_t nbytes;
	cleanup_free char *index = NULL;
	FILE *f = open_memstream(&index, &nbytes);

	(void)fprintf(f, "{\"weight_map\":{");
	for (int i = 299; i >= 0; i--) {
		make_weights(text("%03d.safetensors", i), text("t%03d", i));
		(void)fprintf(f, "\"t%03d\":\"%03d.safetensors\"%s", i, i, i ? "," : "}}");
	}
	(void)fclose(f);
	make_index(index);
	c = open_good(INDEX, NULL);
	ck_assert_uint_eq(c->nr_files, 300);
	ck_assert_uint_eq(c->nr_metadata, 1);
	for (int i = 0; i < 300; i++) {
		ck_assert_str_eq(c->tensors[i].name, text("t%03d", i));
		ck_assert_uint_eq(c->tensors[i].file, (unsigned int)i);
	}
	checkpoint_free(c);
}
END_TEST

/* Error texts: one line of valid UTF-8 that steers no terminal, whatever the names are. */
START_TEST(test_err_text_is_clean)
{
	struct wd_err e;
	char big[2000];

	ck_assert_int_eq(err_set(&e, -EIO, "a\nb\x1b[1m\x7f\xff\xc2\x9b \xc3\xa9\xe2\x82\xac\xed\xa0\x80 %d", 7), -EIO);
	ck_assert_str_eq(e.text, "a?b?[1m????"
				 " \xc3\xa9\xe2\x82\xac??? 7");
	ck_assert_int_eq(err_prefix(&e, -EPERM, "%s", "x\t"), -EPERM);
	ck_assert_str_eq(e.text, "x?: a?b?[1m????"
				 " \xc3\xa9\xe2\x82\xac??? 7");
	(void)err_set(&e, 0, "[%s]", e.text); /* from itself */
	ck_assert_int_eq(strncmp(e.text, "[x?: a?b", 8), 0);
	memset(big, 'x', sizeof(big) - 1);
	big[sizeof(big) - 1] = '\0';
	(void)err_set(&e, 0, "%s", big);
	ck_assert_uint_eq(strlen(e.text), sizeof(e.text) - 1);
	(void)err_prefix(&e, 0, "%s", big);
	ck_assert_uint_eq(strlen(e.text), sizeof(e.text) - 1);
	(void)err_set(&e, 0, "%.*s\xc3\xa9", (int)sizeof(e.text) - 2, big); /* cut inside of a character */
	ck_assert_int_eq(e.text[sizeof(e.text) - 2], '?');
	ck_assert_int_eq(err_set(NULL, -EIO, "x"), -EIO);
	ck_assert_int_eq(err_prefix(NULL, -EIO, "x"), -EIO);
}
END_TEST

START_TEST(test_log_lines)
{
	char line[200];
	int fds[2];
	ssize_t n;

	ck_assert_int_eq(pipe(fds), 0);
	ck_assert_int_eq(dup2(fds[1], STDERR_FILENO), STDERR_FILENO);
	log_max = LOG_LEVEL_INFO;
	errno = ERANGE;
	log_debug("not this");
	log_info("one %d\ntwo", 1);
	ck_assert_int_eq(errno, ERANGE);
	n = read(fds[0], line, sizeof(line));
	ck_assert_int_eq(n, (ssize_t)strlen("weightd: info: one 1?two\n"));
	ck_assert_int_eq(strncmp(line, "weightd: info: one 1?two\n", (size_t)n), 0);
	(void)close(fds[0]);
	(void)close(fds[1]);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("checkpoint");
	TCase *t = tcase_create("checkpoint");
	SRunner *sr;
	int failed;

	tcase_add_checked_fixture(t, setup, teardown);
	tcase_set_timeout(t, 30);
	tcase_add_test(t, test_checkpoint_names);
	tcase_add_test(t, test_checkpoint_content_decides);
	tcase_add_test(t, test_checkpoint_system_errors);
	tcase_add_test(t, test_checkpoint_links);
	tcase_add_test(t, test_checkpoint_index_resolves_as_given);
	tcase_add_test(t, test_checkpoint_index);
	tcase_add_loop_test(t, test_checkpoint_index_refuses, 0, ARRAY_SIZE(bad_index));
	tcase_add_loop_test(t, test_checkpoint_snapshot, 0, ARRAY_SIZE(snapshots));
	tcase_add_loop_test(t, test_checkpoint_snapshot_with_indexes, 0, ARRAY_SIZE(indexed));
	tcase_add_test(t, test_checkpoint_pipeline);
	tcase_add_test(t, test_checkpoint_pipeline_refuses);
	if (try_mounts() == 0)
		tcase_add_test(t, test_checkpoint_read_only_media);
	else
		printf("SKIP test_checkpoint_read_only_media: a mount namespace is needed: %s\n",
		       strerror(try_mounts()));
	tcase_add_test(t, test_checkpoint_many_shards);
	tcase_add_test(t, test_err_text_is_clean);
	tcase_add_test(t, test_log_lines);
	suite_add_tcase(s, t);

	sr = srunner_create(s);
	(void)fflush(stdout);
	srunner_run_all(sr, CK_ENV);
	failed = srunner_ntests_failed(sr);
	srunner_free(sr);
	return failed ? 1 : 0;
}
