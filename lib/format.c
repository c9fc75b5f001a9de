/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tells what a file is by its first bytes. Knows the formats' table and what people mistake for a checkpoint;
 * knows nothing of what the formats look like inside. See format.h for how to add one.
 */
#include <string.h>

#include "lib/format.h"

const struct format *const formats[] = {
	&format_safetensors, /* no magic: last */
};
const size_t nr_formats = ARRAY_SIZE(formats);

/* Known, and not readable by this version. */
static const struct {
	const char *magic;
	uint8_t nbytes;
	uint16_t offset;
	const char *what;
} foreign[] = {
	{ "GGUF", 4, 0, "a GGUF file" },
	{ "PK\3\4", 4, 0, "a zip file, as torch.save writes it" },
	{ "PK\5\6", 4, 0, "an empty zip file" },
	{ "PYTORCH1", 8, 0, "a PyTorch file of a preview format" },
	{ "\x80\2", 2, 0, "a pickle, as torch.save wrote it before 1.6" },
	{ "\x80\3", 2, 0, "a pickle" },
	{ "\x80\4", 2, 0, "a pickle" },
	{ "\x80\5", 2, 0, "a pickle" },
	{ "ustar", 5, 257, "a tar file" },
	{ "\x89HDF\r\n\x1a\n", 8, 0, "an HDF5 file" },
	{ "\x1f\x8b", 2, 0, "compressed by gzip" },
	{ "\x28\xb5\x2f\xfd", 4, 0, "compressed by zstd" },
	{ "\xfd"
	  "7zXZ",
	  5, 0, "compressed by xz" },
};

/* Blocks double up to this: little is wasted on small files, and large ones take few allocations. */
#define POOL_FIRST_BYTES (4 * KiB)
#define POOL_MOST_BYTES MiB

void *format_pool_get(struct format_pool **pool, size_t nbytes)
{
	struct format_pool *p = *pool;
	unsigned char *at;

	nbytes = (size_t)round_up(nbytes, 8);
	if (!p || p->size - p->used < nbytes) {
		size_t size = (size_t)MAX(nbytes, p ? MIN(2 * (uint64_t)p->size, POOL_MOST_BYTES) : POOL_FIRST_BYTES);

		p = malloc(sizeof(*p) + size);
		if (!p)
			return NULL;
		*p = (struct format_pool){ .next = *pool, .size = size };
		*pool = p;
	}
	at = (unsigned char *)p->bytes + p->used;
	p->used += nbytes;
	return at;
}

struct format_pool *format_pool_free(struct format_pool *pool)
{
	while (pool) {
		struct format_pool *next = pool->next;

		free(pool);
		pool = next;
	}
	return NULL;
}

#define LFS_POINTER "version https://git-lfs.github.com/spec/"

/* What a failed download leaves: a pointer or an error page instead of the file. */
static int refuse_impostor(const char *path, struct span head, struct wd_err *err)
{
	size_t i = span_has(head, 0, "\xEF\xBB\xBF", 3) ? 3 : 0;

	if (span_has(head, 0, LFS_POINTER, strlen(LFS_POINTER))) {
		char text[FORMAT_HEAD_BYTES + 1], *size;

		memcpy(text, head.bytes, head.nbytes);
		text[head.nbytes] = '\0';
		size = strstr(text, "\nsize ");
		return err_set(err, -EBADMSG,
			       "%s: is a Git LFS pointer: the real file (%.*s bytes) was not fetched; "
			       "run git lfs pull",
			       path, size ? (int)strspn(size + 6, "0123456789") : 7, size ? size + 6 : "unknown");
	}
	while (i < head.nbytes && memchr(" \t\r\n", head.bytes[i], 4))
		i++;
	if (i + 1 < head.nbytes && head.bytes[i] == '<' && head.bytes[i + 1] > ' ')
		return err_set(err, -EBADMSG,
			       "%s: is an HTML or XML page, no checkpoint: the download was answered with a "
			       "page; fetch the file again",
			       path);
	return 0;
}

bool format_is_json(struct span head)
{
	size_t i = 0;

	if (format_safetensors.is(head))
		return false;
	while (i < head.nbytes && memchr(" \t\r\n", head.bytes[i], 4))
		i++;
	return i < head.nbytes && head.bytes[i] == '{';
}

int format_head(struct source *src, unsigned char buf[FORMAT_HEAD_BYTES], struct span *ret, struct wd_err *err)
{
	size_t n = (size_t)MIN(src->id.size, (uint64_t)FORMAT_HEAD_BYTES);
	int r = source_read(src, buf, n, 0);

	if (r < 0)
		return err_set(err, r == -ENODATA ? -EBADMSG : r, "%s: cannot read the first %zu bytes: %s", src->path,
			       n, r == -ENODATA ? "the file has become shorter" : strerror(-r));
	*ret = (struct span){ buf, n };
	return 0;
}

int format_read(struct source *src, uint32_t flags, const struct format **ret_format, struct format_file *ret,
		struct wd_err *err)
{
	unsigned char buf[FORMAT_HEAD_BYTES];
	const struct format *format = NULL;
	struct span head;
	int r = format_head(src, buf, &head, err);

	if (r < 0)
		return r;
	if (head.nbytes == 0)
		return err_set(err, -EBADMSG, "%s: is empty; fetch the file again", src->path);
	for (size_t i = 0; i < nr_formats && !format; i++)
		if (formats[i]->is(head))
			format = formats[i];
	if (!format) {
		for (size_t i = 0; i < ARRAY_SIZE(foreign); i++)
			if (span_has(head, foreign[i].offset, foreign[i].magic, foreign[i].nbytes))
				return err_set(err, -EOPNOTSUPP,
					       "%s: is %s; this version reads safetensors only: convert it", src->path,
					       foreign[i].what);
		r = refuse_impostor(src->path, head, err);
		if (r < 0)
			return r;
		format = &format_safetensors; /* knows best what is wrong with it */
	}
	r = format->read(src, flags, ret, err);
	if (r < 0)
		return r;
	*ret_format = format;
	return 0;
}
