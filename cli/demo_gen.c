/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Generated checkpoints: three models of transformer blocks, written once into a cache folder.
 *
 * A file is a function of version, size and seed alone, header included; so it is known to be the right one when
 * its first bytes are this header and its size fits. Files get their names only when complete and on the disk.
 * The header says whose file it is: another file of the same name is never replaced.
 */
#define _GNU_SOURCE
#include "cli/demo.h"

#include "lib/include/weightd.h"

#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

#define VERSION 1 /* of what a size and a seed stand for: another one makes everybody's cache be written again */
#define CHUNK (4 * MiB)
#define MAX_TENSORS 600
#define NAME_ROOM 64
#define MARK "{\"__metadata__\":{\"weightd_demo\":\""
#define SPARE_BYTES (8 * MiB) /* the file system's own needs */

static const struct recipe {
	const char *model, *stage;
	unsigned int steps;
	unsigned int percent; /* of the whole size; none above 40 */
	uint32_t dtype;       /* of the matrices; norms and biases are F32 */
	bool cross;           /* blocks with a second attention */
	const char *first;    /* name of the matrix that fills up to the size */
} recipes[DEMO_NR_GENERATED] = {
	{ "encoder", "encode", 1, 30, WD_DTYPE_F32, false, "token_embedding.weight" },
	{ "denoiser", "denoise", 4, 38, WD_DTYPE_BF16, true, "proj_in.weight" },
	{ "decoder", "decode", 1, 32, WD_DTYPE_F32, false, "codebook.weight" },
};

struct plan_tensor {
	char name[NAME_ROOM];
	uint32_t dtype;
	uint64_t rows, cols; /* cols 0: one dimension */
};

struct file_plan {
	struct plan_tensor tensors[MAX_TENSORS];
	size_t nr;
	uint64_t nbytes; /* of data */
	char *header;    /* length field included */
	size_t header_len;
};

static uint64_t element_bytes(uint32_t dtype)
{
	return wd_dtype_bits(dtype) / 8;
}

static uint64_t tensor_bytes(const struct plan_tensor *t)
{
	return t->rows * MAX(t->cols, (uint64_t)1) * element_bytes(t->dtype);
}

__attribute__((format(printf, 5, 6))) static void add(struct file_plan *p, uint32_t dtype, uint64_t rows, uint64_t cols,
						      const char *fmt, ...)
{
	struct plan_tensor *t = &p->tensors[p->nr++];
	va_list args;

	va_start(args, fmt);
	(void)vsnprintf(t->name, sizeof(t->name), fmt, args);
	va_end(args);
	t->dtype = dtype;
	t->rows = rows;
	t->cols = cols;
	p->nbytes += tensor_bytes(t);
}

/* Norms and biases of a block (F32), or its matrices. */
static void add_block(struct file_plan *p, const struct recipe *r, uint64_t d, unsigned int i, bool matrices)
{
	if (!matrices) {
		add(p, WD_DTYPE_F32, d, 0, "blocks.%u.norm1.weight", i);
		add(p, WD_DTYPE_F32, d, 0, "blocks.%u.norm2.weight", i);
		add(p, WD_DTYPE_F32, 3 * d, 0, "blocks.%u.attn.qkv.bias", i);
		add(p, WD_DTYPE_F32, d, 0, "blocks.%u.attn.proj.bias", i);
		add(p, WD_DTYPE_F32, 4 * d, 0, "blocks.%u.mlp.fc1.bias", i);
		add(p, WD_DTYPE_F32, d, 0, "blocks.%u.mlp.fc2.bias", i);
		return;
	}
	add(p, r->dtype, 3 * d, d, "blocks.%u.attn.qkv.weight", i);
	add(p, r->dtype, d, d, "blocks.%u.attn.proj.weight", i);
	if (r->cross) {
		add(p, r->dtype, d, d, "blocks.%u.cross.q.weight", i);
		add(p, r->dtype, 2 * d, d, "blocks.%u.cross.kv.weight", i);
		add(p, r->dtype, d, d, "blocks.%u.cross.proj.weight", i);
	}
	add(p, r->dtype, 4 * d, d, "blocks.%u.mlp.fc1.weight", i);
	add(p, r->dtype, d, 4 * d, "blocks.%u.mlp.fc2.weight", i);
}

/* Some 6 to 25 blocks of the widest kind that this size has room for; one more matrix takes the rest. */
static void plan_tensors(struct file_plan *p, const struct recipe *r, uint64_t room)
{
	static const uint64_t widths[] = { 8192, 4096, 2048, 1024, 768, 512, 256, 128, 64 };
	uint64_t d = 64, block = 0;
	unsigned int nr;

	for (size_t i = 0; i < ARRAY_SIZE(widths); i++) {
		d = widths[i];
		block = d * d * (r->cross ? 16 : 12) * element_bytes(r->dtype) + 11 * d * element_bytes(WD_DTYPE_F32);
		if (6 * block <= room)
			break;
	}
	nr = (unsigned int)MIN(room / block, (uint64_t)40);
	/* As usual writers do: wider elements first, so that all are aligned. */
	for (unsigned int i = 0; i < nr; i++)
		add_block(p, r, d, i, false);
	add(p, WD_DTYPE_F32, d, 0, "final_norm.weight");
	for (unsigned int i = 0; i < nr; i++)
		add_block(p, r, d, i, true);
	if (room > p->nbytes) {
		uint64_t rows = (room - p->nbytes) / (d * element_bytes(r->dtype));

		if (rows)
			add(p, r->dtype, rows, d, "%s", r->first);
	}
}

static int plan_header(struct file_plan *p, const struct recipe *r, uint64_t size, uint64_t seed)
{
	uint64_t at = 0, len;
	char *text = NULL;
	size_t text_len = 0;
	FILE *f = open_memstream(&text, &text_len);

	if (!f)
		return -ENOMEM;
	/* Names and numbers of ours only: nothing here needs escaping. */
	(void)fprintf(f, "%*s" MARK "version %d, model %s, size %ju, seed %ju\"}", 8, "", VERSION, r->model,
		      (uintmax_t)size, (uintmax_t)seed);
	for (size_t i = 0; i < p->nr; i++) {
		const struct plan_tensor *t = &p->tensors[i];

		(void)fprintf(f, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%ju", t->name, wd_dtype_name(t->dtype),
			      (uintmax_t)t->rows);
		if (t->cols)
			(void)fprintf(f, ",%ju", (uintmax_t)t->cols);
		(void)fprintf(f, "],\"data_offsets\":[%ju,%ju]}", (uintmax_t)at, (uintmax_t)(at + tensor_bytes(t)));
		at += tensor_bytes(t);
	}
	(void)fputc('}', f);
	(void)fflush(f);
	while (text_len % 64) {
		(void)fputc(' ', f);
		(void)fflush(f);
	}
	if (fclose(f) != 0) {
		free(text);
		return -ENOMEM;
	}
	len = text_len - 8;
	for (size_t i = 0; i < 8; i++)
		text[i] = (char)(len >> (8 * i));
	p->header = text;
	p->header_len = text_len;
	return 0;
}

/* 1: the right file; 0: there is none, or an older one of ours; -EEXIST: somebody else's. */
static int look(const char *path, const struct file_plan *p, uint64_t *ret_old_bytes, struct wd_err *err)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	cleanup_free char *buf = malloc(p->header_len);
	struct stat st;
	ssize_t n;

	*ret_old_bytes = 0;
	if (!buf)
		return err_set(err, -ENOMEM, "out of memory");
	if (fd < 0 && errno == ENOENT)
		return 0;
	if (fd < 0 || fstat(fd, &st) < 0 || (n = pread(fd, buf, p->header_len, 0)) < 0)
		return err_set(err, -errno, "cannot read %s: %s", path, strerror(errno));
	if ((size_t)n == p->header_len && !memcmp(buf, p->header, p->header_len) &&
	    (uint64_t)st.st_size == p->header_len + p->nbytes)
		return 1;
	if ((size_t)n < 8 + strlen(MARK) || memcmp(buf + 8, MARK, strlen(MARK)))
		return err_set(err, -EEXIST,
			       "%s is not a file of weightd demo: move it, or give another folder by --cache", path);
	*ret_old_bytes = (uint64_t)st.st_size;
	return 0;
}

static uint64_t next(uint64_t *state)
{
	uint64_t z = *state += 0x9e3779b97f4a7c15u;

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return z ^ (z >> 31);
}

/* Even values in (-scale, scale), about what keeps a row's product near 1. */
static void fill(unsigned char *to, uint64_t nbytes, uint32_t dtype, float scale, uint64_t *state)
{
	uint64_t random = 0;

	for (uint64_t i = 0, k = 0; i < nbytes; i += element_bytes(dtype), k++) {
		float value;
		uint32_t bits;

		random = k % 2 ? random >> 32 : next(state);
		value = (float)(int32_t)random * (scale * 0x1p-31f);
		memcpy(&bits, &value, sizeof(bits));
		if (dtype == WD_DTYPE_BF16) {
			uint16_t half = (uint16_t)(bits >> 16);

			memcpy(to + i, &half, sizeof(half));
		} else {
			memcpy(to + i, &bits, sizeof(bits));
		}
	}
}

static int write_all(int fd, const void *data, size_t len)
{
	const char *p = data;

	while (len) {
		ssize_t n = write(fd, p, len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return -errno;
		p += n;
		len -= (size_t)n;
	}
	return 0;
}

struct writing {
	const volatile sig_atomic_t *stop;
	bool progress;
	uint64_t done_bytes, total_bytes;
};

static int write_data(int fd, const struct file_plan *p, uint64_t seed, const char *model, struct writing *w)
{
	cleanup_free unsigned char *chunk = malloc(CHUNK);
	int r = chunk ? write_all(fd, p->header, p->header_len) : -ENOMEM;

	for (size_t i = 0; r == 0 && i < p->nr; i++) {
		const struct plan_tensor *t = &p->tensors[i];
		uint64_t left = tensor_bytes(t), state = seed * 1000003 + i;
		float scale = t->cols ? 2 / sqrtf((float)t->cols) : 1;

		while (r == 0 && left) {
			uint64_t n = MIN(left, CHUNK);

			if (*w->stop)
				return -EINTR;
			fill(chunk, n, t->dtype, scale, &state);
			r = write_all(fd, chunk, n);
			left -= n;
			w->done_bytes += n;
			if (w->progress)
				demo_progress("writing", model, w->done_bytes, w->total_bytes);
		}
	}
	if (r == 0 && fsync(fd) < 0)
		r = -errno;
	return r;
}

static int write_file(int dir, const char *folder, const char *name, const struct file_plan *p, uint64_t seed,
		      const char *model, struct writing *w, struct wd_err *err)
{
	char temp[NAME_ROOM + 8];
	cleanup_close int fd = -1;
	int r;

	(void)snprintf(temp, sizeof(temp), ".%.*s.part", NAME_ROOM, name);
	(void)unlinkat(dir, temp, 0); /* of a demo that was killed; the folder is locked */
	fd = openat(dir, temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
	r = fd < 0 ? -errno : write_data(fd, p, seed, model, w);
	if (r == 0 && renameat(dir, temp, dir, name) < 0)
		r = -errno;
	if (r == 0 && fsync(dir) < 0)
		r = -errno;
	if (r < 0 && fd >= 0)
		(void)unlinkat(dir, temp, 0);
	if (r < 0 && r != -EINTR)
		err_set(err, r, "cannot write %s/%s: %s%s", folder, name, strerror(-r),
			r == -ENOSPC ? ": make room, give a smaller --size, or another folder by --cache" : "");
	return r;
}

/* mkdir -p. *ret_old_len: of the part that was there before, also on failure. */
static int make_folders(const char *folder, size_t *ret_old_len)
{
	cleanup_free char *path = strdup(folder);
	bool made = false;

	*ret_old_len = path ? 0 : strlen(folder);
	if (!path)
		return -ENOMEM;
	for (char *p = path + 1;; p++) {
		char c = *p;

		if (c && c != '/')
			continue;
		*p = '\0';
		if (mkdir(path, 0755) == 0)
			made = true;
		else if (errno != EEXIST)
			return -errno;
		else if (!made)
			*ret_old_len = (size_t)(p - path);
		if (!c)
			return 0;
		*p = c;
	}
}

/* Takes them away again, the last one first; those with something in them stay. */
static void remove_folders(const char *folder, size_t old_len)
{
	cleanup_free char *path = strdup(folder);

	for (size_t len = strlen(folder); path && len > old_len; len--) {
		if (path[len] && path[len] != '/')
			continue;
		path[len] = '\0';
		(void)rmdir(path);
	}
}

/* Is there room for what will be written? What it replaces goes first. */
static int check_room(int dir, const char *folder, uint64_t need, struct wd_err *err)
{
	struct statvfs vfs;
	uint64_t room;

	if (fstatvfs(dir, &vfs) < 0)
		return err_set(err, -errno, "cannot ask %s for its free space: %s", folder, strerror(errno));
	room = (uint64_t)vfs.f_bavail * vfs.f_frsize;
	if (room < need)
		return err_set(
			err, -ENOSPC,
			"%s has room for %ju MiB, and the checkpoints need %ju MiB: make room, give a smaller --size, "
			"or another folder by --cache",
			folder, (uintmax_t)(room / MiB), (uintmax_t)((need + MiB - 1) / MiB));
	return 0;
}

int demo_generate(const char *folder, uint64_t size, uint64_t seed, const volatile sig_atomic_t *stop, bool progress,
		  struct demo_generated out[DEMO_NR_GENERATED], int *ret_lock_fd, struct wd_err *err)
{
	struct file_plan *plans = calloc(DEMO_NR_GENERATED, sizeof(*plans));
	bool present[DEMO_NR_GENERATED] = { false }, written[DEMO_NR_GENERATED] = { false };
	struct writing w = { .stop = stop, .progress = progress };
	char name[NAME_ROOM];
	size_t old_len = strlen(folder);
	int dir = -1, r = plans ? 0 : err_set(err, -ENOMEM, "out of memory");

	for (size_t i = 0; i < DEMO_NR_GENERATED; i++) {
		const struct recipe *recipe = &recipes[i];

		out[i] = (struct demo_generated){ recipe->model, recipe->stage, recipe->steps, NULL };
		if (r < 0)
			continue;
		/* Header and padding fit into what rounding down to rows leaves, or into the 2 % below the 40. */
		plan_tensors(&plans[i], recipe, size / 100 * recipe->percent);
		if (plan_header(&plans[i], recipe, size, seed) < 0 ||
		    asprintf(&out[i].path, "%s/%s.safetensors", folder, recipe->model) < 0) {
			out[i].path = NULL;
			r = err_set(err, -ENOMEM, "out of memory");
		}
	}
	if (r < 0)
		goto out;
	if ((r = make_folders(folder, &old_len)) < 0 || (dir = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0) {
		r = r < 0 ? r : -errno;
		err_set(err, r, "cannot use the folder %s: %s: give another one by --cache", folder, strerror(-r));
		goto out;
	}
	/* Held while the files are used: a second demo must neither replace these files nor disturb the figures. */
	if (flock(dir, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK) {
		(void)fprintf(stderr, "weightd demo: waiting for another demo that uses %s\n", folder);
		if (flock(dir, LOCK_EX) < 0) {
			r = -errno;
			goto out;
		}
	}
	for (size_t i = 0; i < DEMO_NR_GENERATED && r >= 0; i++) {
		uint64_t old_bytes;

		r = look(out[i].path, &plans[i], &old_bytes, err);
		present[i] = r == 1;
		if (r == 0) {
			w.total_bytes += plans[i].header_len + plans[i].nbytes;
			if (old_bytes && unlink(out[i].path) < 0)
				r = err_set(err, -errno, "cannot remove %s: %s", out[i].path, strerror(errno));
		}
	}
	if (r >= 0 && w.total_bytes)
		r = check_room(dir, folder, w.total_bytes + SPARE_BYTES, err);
	for (size_t i = 0; i < DEMO_NR_GENERATED && r >= 0; i++) {
		if (present[i])
			continue;
		(void)snprintf(name, sizeof(name), "%s.safetensors", recipes[i].model);
		r = write_file(dir, folder, name, &plans[i], seed * DEMO_NR_GENERATED + i, recipes[i].model, &w, err);
		written[i] = r == 0;
	}
	if (progress)
		demo_progress_clear();
out:
	if (r < 0) {
		for (size_t i = 0; i < DEMO_NR_GENERATED; i++) {
			if (written[i])
				(void)unlink(out[i].path);
			free(out[i].path);
			out[i].path = NULL;
		}
		if (dir >= 0)
			(void)close(dir);
		remove_folders(folder, old_len);
	}
	for (size_t i = 0; plans && i < DEMO_NR_GENERATED; i++)
		free(plans[i].header);
	free(plans);
	if (r < 0)
		return r;
	*ret_lock_fd = dir;
	return 0;
}
