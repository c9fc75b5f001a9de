/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fuzz target: the bytes are a whole file; it is looked at as wd_model_open() would, without a file system.
 * What is accepted must hold together: every tensor inside of the file, sorted, of the size that its shape has.
 *
 * With -DFUZZ_STANDALONE (gcc, no fuzzer): runs the files named as arguments, or else a fixed number of mutated
 * seeds, the number being the environment's FUZZ_RUNS.
 */
#include <string.h>

#include "lib/format.h"
#include "lib/include/weightd.h"

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t nbytes);

static void __attribute__((noreturn)) broken(const char *what)
{
	(void)fprintf(stderr, "accepted, but %s\n", what);
	abort();
}

static void check(const struct format_file *f, uint64_t file_bytes, uint32_t flags)
{
	uint64_t at = f->data_offset;

	for (size_t i = 0; i < f->nr_tensors; i++) {
		const struct ckpt_tensor *t = &f->tensors[i];
		uint64_t elements = 1;

		for (uint32_t k = 0; k < t->ndim; k++) {
			if (t->shape[k] < 0)
				broken("a dimension is negative");
			elements *= (uint64_t)t->shape[k];
		}
		if (elements * wd_dtype_bits(t->dtype) != t->nbytes * 8)
			broken("a tensor's size is not that of its shape");
		if (t->file_offset > file_bytes || t->nbytes > file_bytes - t->file_offset)
			broken("a tensor leaves the file");
		if (i > 0 && t[-1].file_offset == t->file_offset && strcmp(t[-1].name, t->name) >= 0)
			broken("names are not sorted, or twice there");
		if (t->nbytes > 0 && t->file_offset != at)
			broken("there is a gap or an overlap");
		at += t->nbytes;
	}
	if (at != f->data_offset + f->data_bytes || (!(flags & CKPT_TRAILING) && at != file_bytes))
		broken("the data do not end with the file");
	for (size_t i = 0; i < f->nr_metadata; i++)
		if (!f->metadata[i].key || !f->metadata[i].value)
			broken("metadata are missing");
}

int LLVMFuzzerTestOneInput(const unsigned char *bytes, size_t nbytes)
{
	struct span file = { bytes, nbytes }, head = { bytes, MIN(nbytes, (size_t)FORMAT_HEAD_BYTES) }, header;

	(void)format_is_json(head);
	(void)format_safetensors.is(head);
	for (uint32_t flags = 0; flags <= CKPT_TRAILING; flags++) {
		struct format_file f;
		struct wd_err err = { "" };
		uint64_t n;

		int r = safetensors_header_bytes("fuzz", head, nbytes, &n, &err);
		if (r == 0 && span_cut(file, 8, n, &header) < 0)
			broken("the header leaves the file");
		if (r == 0) {
			cleanup_free unsigned char *copy = malloc(header.nbytes + 1);

			if (!copy)
				abort();
			memcpy(copy, header.bytes, header.nbytes);
			r = safetensors_parse("fuzz", copy, header.nbytes, nbytes, flags, &f, &err);
		}
		if (r == 0) {
			check(&f, nbytes, flags);
			format_pool_free(f.pool);
		} else if ((r != -EBADMSG && r != -ENOMEM) || !*err.text) {
			broken("no: refused without a reason");
		}
	}
	return 0;
}

#ifdef FUZZ_STANDALONE
static const char *const seeds[] = {
	"{\"a\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]},\"b\":{\"dtype\":\"U8\",\"shape\":[],"
	"\"data_offsets\":[16,17]},\"__metadata__\":{\"format\":\"pt\"}}   ",
	"{\"z\":{\"dtype\":\"F4\",\"shape\":[0,4],\"data_offsets\":[0,0]},\"\\u00e9\":{\"dtype\":\"F6_E2M3\",\"shape\":[4],"
	"\"data_offsets\":[0,3],\"x\":[{},1.5e3,null,-7]}}",
	" \n{\"__metadata__\":null}",
	"{}",
};
static const char *const words[] = { "\"",
				     "{",
				     "}",
				     "[",
				     "]",
				     ",",
				     ":",
				     "-0",
				     "18446744073709551615",
				     "1e9",
				     "\\u0000",
				     "\\ud800",
				     "null",
				     "F32",
				     "data_offsets",
				     "\xff",
				     "9223372036854775807",
				     "__metadata__" };

static uint64_t state = 1;

static size_t below(size_t n)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (size_t)(state % n);
}

static void run_mutated(void)
{
	unsigned char file[1024] = { 0 };
	const char *seed = seeds[below(ARRAY_SIZE(seeds))];
	size_t n = strlen(seed), data = below(4) ? 17 : below(40);

	memcpy(file + 8, seed, n);
	for (size_t i = below(4); i > 0 && n > 0; i--) {
		const char *word = words[below(ARRAY_SIZE(words))];
		size_t at = below(n), k = strlen(word), gone = below(4);

		gone = MIN(gone, n - at);
		switch (below(3)) {
		case 0:
			file[8 + at] = (unsigned char)below(256);
			break;
		case 1:
			memmove(file + 8 + at + k, file + 8 + at + gone, n - at - gone);
			memcpy(file + 8 + at, word, k);
			n = n - gone + k;
			break;
		default:
			file[8 + at] = (unsigned char)(file[8 + at] ^ (1 << below(8)));
		}
	}
	for (size_t i = 0; i < 8; i++)
		file[i] = (unsigned char)(n >> 8 * i);
	if (below(16) == 0)
		file[below(8)] = (unsigned char)below(256);
	n += 8 + data;
	(void)LLVMFuzzerTestOneInput(file, below(8) ? n : below(n));
}

int main(int argc, char **argv)
{
	const char *wanted = getenv("FUZZ_RUNS");
	unsigned long runs = wanted ? strtoul(wanted, NULL, 10) : 100000;

	for (int i = 1; i < argc; i++) {
		cleanup_fclose FILE *f = fopen(argv[i], "rb");
		static unsigned char bytes[1 << 20];
		size_t n = f ? fread(bytes, 1, sizeof(bytes), f) : 0;

		if (!f || ferror(f)) {
			perror(argv[i]);
			return 1;
		}
		(void)LLVMFuzzerTestOneInput(bytes, n);
	}
	for (unsigned long i = 0; argc == 1 && i < runs; i++)
		run_mutated();
	return 0;
}
#endif
