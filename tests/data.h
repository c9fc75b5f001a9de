/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What tests need to make files and to check bytes: temporary folders, bytes of a seed, safetensors files.
 *
 * Every file made here holds, at file offset o, the byte that seed's stream has at position o, except for headers
 * and holes. So any range of any file can be checked without keeping a copy:
 *
 *	struct data_tensor t[] = { { .name = "w", .dtype = "F32", .ndim = 2, .shape = { 64, 64 } } };
 *	data_write_safetensors(path, t, 1, &(struct data_opts){ .seed = 7 });
 *	ck_assert_int_eq(data_check(bytes, t[0].nbytes, 7, t[0].file_offset), -1);
 *
 * Functions that cannot do their work print why and abort: a test has nothing better to do.
 */
#ifndef WD_TESTS_DATA_H
#define WD_TESTS_DATA_H

#include "lib/base/base.h"

/* A new empty folder under $TMPDIR (default /var/tmp). All of them are removed when the test program ends, also if
 * tests crashed in their forks. Owner: the caller, free() the text. */
char *data_tmpdir(void);
/* Removes a folder with all that is in it, now. */
void data_remove(const char *path);

/* A text made by printf rules. Owner: the caller. */
char *data_text(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* The stream of a seed: the same byte at the same position, always. A page of it is never all zeros. */
void data_fill(void *buf, size_t nbytes, uint64_t seed, uint64_t position);
/* Compares: -1 if all bytes are right, else the index in `buf` of the first wrong one. */
int64_t data_check(const void *buf, size_t nbytes, uint64_t seed, uint64_t position);

struct data_tensor {
	const char *name;  /* UTF-8; escaped for JSON where needed */
	const char *dtype; /* as in the file: "F32" */
	uint32_t ndim;
	int64_t shape[8];
	bool hole; /* not written: reads as zeros, takes no room on disk (so 200 GiB are fine) */

	/* set by data_write_safetensors() */
	uint64_t file_offset, nbytes;
};

struct data_opts {
	uint64_t seed;
	uint64_t align,
		residue; /* data begin where offset % align == residue; both 0: multiples of 8, as the usual writer does */
	const char *metadata; /* JSON text of __metadata__, or NULL for none */
	uint64_t trailing;    /* bytes after the data, of the seed */
};

/* Tensors lie in the order given, without gaps. opts may be NULL. The file is on the disk (fsync) afterwards.
 * Returns the offset at which data begin. */
uint64_t data_write_safetensors(const char *path, struct data_tensor *tensors, size_t nr, const struct data_opts *opts);
/* A safetensors file by hand: length, header text, then data_bytes of the seed. Returns where data begin. */
uint64_t data_write_header(const char *path, const char *header, uint64_t data_bytes, uint64_t seed);
/* A file of these bytes, and one of nbytes of a seed from position 0. */
void data_write(const char *path, const void *bytes, size_t nbytes);
void data_write_seed(const char *path, uint64_t nbytes, uint64_t seed);

/* Takes a file out of the page cache; returns how many of its bytes are still there (mincore). */
uint64_t data_drop_cache(const char *path);

/* Bits an element of a safetensors dtype by name; aborts if unknown. */
uint32_t data_dtype_bits(const char *dtype);

#endif
