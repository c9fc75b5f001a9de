/* SPDX-License-Identifier: Apache-2.0 */
/*
 * From a path to the tensors behind it: a file, a sharded set's index, a folder (snapshot or pipeline).
 * Opens files and reads headers; maps nothing. Formats are in lib/format/.
 * Threads: a checkpoint is constant after checkpoint_open().
 */
#ifndef WD_LIB_CHECKPOINT_H
#define WD_LIB_CHECKPOINT_H

#include "lib/base/base.h"
#include "ufd/source.h"

struct ckpt_file {
	struct source *source;
	const char *format;   /* "safetensors" */
	uint64_t data_offset; /* where tensor data begins, bytes */
	uint64_t data_bytes;
	size_t first_tensor, nr_tensors; /* its run in checkpoint.tensors */
};

struct ckpt_tensor {
	const char *name;
	const int64_t *shape;
	uint64_t file_offset; /* bytes, in its file */
	uint64_t nbytes;
	uint32_t file;  /* index in checkpoint.files */
	uint32_t dtype; /* WD_DTYPE_* */
	uint32_t ndim;
};

struct ckpt_metadata {
	const char *key, *value;
};

struct checkpoint {
	char *path; /* as given */
	char *name; /* default model name: without folder and extension ("unet.safetensors", "unet.safetensors.index.json" -> "unet");
		     * for a folder its own name; for a component its folder's name */
	struct ckpt_file *files;
	size_t nr_files;
	struct ckpt_tensor *tensors; /* by file, then by file_offset, then by name; names are unique */
	size_t nr_tensors;
	struct ckpt_metadata *metadata;
	size_t nr_metadata;
	struct checkpoint **parts; /* a pipeline's components; then files and tensors are empty */
	size_t nr_parts;
	void *pool; /* memory of names and shapes (private to checkpoint.c) */
};

#define CKPT_TRAILING 1u /* WD_MODEL_TRAILING */

/* Errors as wd_model_open() in weightd.h documents them. `variant` may be NULL. */
int checkpoint_open(const char *path, const char *variant, uint32_t flags, struct checkpoint **ret, struct wd_err *err);
struct checkpoint *checkpoint_free(struct checkpoint *c); /* NULL and half-built are fine; returns NULL */

#endif
