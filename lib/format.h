/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checkpoint formats: what a file is, and which tensors lie where in it.
 *
 * To add a format
 *  1. lib/format/<name>.c: a `const struct format format_<name>` at its end. Cut every byte out of a span
 *     (lib/base/span.h); allocate nothing before the file's size justifies it; -EBADMSG and one line for what
 *     is damaged ("file: what, at which byte or tensor"), -EOPNOTSUPP for what is legal but not supported.
 *  2. a line in formats[] in lib/format.c (those that have a magic before safetensors, which has none), and take
 *     its row out of foreign[] there.
 *  3. tests/test_<name>.c: a good file, every truncation of it, every refusal; tests/fuzz_<name>.c.
 *  4. the format's name in weightd.h (wd_model_open), the man pages and the README.
 *
 * Threads: no state.
 */
#ifndef WD_LIB_FORMAT_H
#define WD_LIB_FORMAT_H

#include "lib/base/base.h"
#include "lib/base/span.h"
#include "lib/checkpoint.h"

/* Bytes of a file's beginning that is() gets to see (fewer if the file is shorter). */
#define FORMAT_HEAD_BYTES 512

/* Memory for the names, shapes and texts of a file: few allocations, freed together. */
struct format_pool {
	struct format_pool *next;
	size_t used, size; /* bytes */
	max_align_t bytes[];
};

/* Room for nbytes, aligned to 8; NULL: out of memory. *pool is NULL at first. */
void *format_pool_get(struct format_pool **pool, size_t nbytes);
/* NULL is fine; returns NULL. */
struct format_pool *format_pool_free(struct format_pool *pool);
static inline void format_pool_free_p(struct format_pool **pool)
{
	format_pool_free(*pool);
}
#define cleanup_pool cleanup(format_pool_free_p)

/* The tensors of one file. */
struct format_file {
	uint64_t data_offset, data_bytes;
	struct ckpt_tensor *tensors; /* by file_offset, then by name; .file is 0 */
	size_t nr_tensors;
	struct ckpt_metadata *metadata;
	size_t nr_metadata;
	struct format_pool *pool; /* has all of the above */
};

struct format {
	const char *name;
	/* By content, never by name. True only if nothing else can begin so. */
	bool (*is)(struct span head);
	/* CKPT_* in flags. Writes *ret on success only. */
	int (*read)(struct source *src, uint32_t flags, struct format_file *ret, struct wd_err *err);
};

extern const struct format *const formats[];
extern const size_t nr_formats;
extern const struct format format_safetensors;

/*
 * Finds out what a file is, and reads its headers.
 * Return: 0; -EBADMSG damaged, or no checkpoint at all; -EOPNOTSUPP a format that is known but not read; from the read.
 */
int format_read(struct source *src, uint32_t flags, const struct format **ret_format, struct format_file *ret,
		struct wd_err *err);

/* The first bytes of a file, at most FORMAT_HEAD_BYTES, into `buf`. */
int format_head(struct source *src, unsigned char buf[FORMAT_HEAD_BYTES], struct span *ret, struct wd_err *err);

/* Is it JSON text (an index, not a checkpoint)? */
bool format_is_json(struct span head);

/*
 * safetensors without a file: `header` is what lies between the length and the data of a file of file_bytes, and is
 * overwritten. For the reader and its fuzz target. `path` is for the messages.
 */
int safetensors_parse(const char *path, unsigned char *header, size_t nbytes, uint64_t file_bytes, uint32_t flags,
		      struct format_file *ret, struct wd_err *err);
/* The checks of the length that the file begins with. */
int safetensors_header_bytes(const char *path, struct span head, uint64_t file_bytes, uint64_t *ret,
			     struct wd_err *err);

#endif
