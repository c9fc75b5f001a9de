/* SPDX-License-Identifier: Apache-2.0 */
/* The safetensors reader: all that the reference accepts and refuses, damage, attacks, scale. */
#include <check.h>
#include <fcntl.h>
#include <jansson.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#include "lib/dtype.h"
#include "lib/format.h"
#include "lib/include/weightd.h"
#include "tests/data.h"

#define SEED 11

static char *folder, *path;

static void setup(void)
{
	folder = data_tmpdir();
	path = data_text("%s/model.safetensors", folder);
}

static void teardown(void)
{
	data_remove(folder);
	free(folder);
	free(path);
}

/* The text must be one line, name the file and have the fragment. */
static void ck_refused(int r, int want, const struct wd_err *err, const char *fragment)
{
	ck_assert_msg(r == want, "got %d, not %d: %s", r, want, err->text);
	ck_assert_msg(strstr(err->text, path) != NULL, "does not name the file: %s", err->text);
	ck_assert_msg(!strchr(err->text, '\n'), "more than a line: %s", err->text);
	ck_assert_msg(strstr(err->text, fragment) != NULL, "lacks \"%s\": %s", fragment, err->text);
}

static int open_header(const char *header, uint64_t data_bytes, uint32_t flags, struct checkpoint **ret,
		       struct wd_err *err)
{
	(void)data_write_header(path, header, data_bytes, SEED);
	return checkpoint_open(path, NULL, flags, ret, err);
}

/* ---- refused */

#define T(name, dtype, shape, begin, end) \
	"\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"

static const struct {
	const char *header;
	uint64_t data_bytes;
	const char *fragment;
} refused[] = {
	/* no JSON */
	{ "", 0, "JSON at byte 8" },
	{ "", 4, "JSON" },
	{ "{", 0, "JSON at byte 9" },
	{ "\xff", 0, "UTF-8 at byte 8" },
	{ "{\"a\xff\":1}", 0, "UTF-8" },
	{ "{\"a\":\"\xed\xa0\x80\"}", 0, "UTF-8" },
	{ "{\"a\":\"\xc0\x80\"}", 0, "UTF-8" },
	{ "\xef\xbb\xbf{}", 0, "JSON" },
	{ "[]", 0, "no object" },
	{ "7", 0, "JSON" },
	{ "{} x", 0, "JSON" },
	{ "{}{}", 0, "JSON" },
	{ "{" T("a", "U8", "1", 0, 1) ",}", 1, "JSON" },
	{ "{'a':1}", 0, "JSON" },
	{ "{\"a\":\"\t\"}", 0, "JSON" },
	{ "{\"a\":\"\\ud800\"}", 0, "JSON" },
	{ "{\"a\\u0000b\":1}", 0, "NUL" },
	{ "{\"__metadata__\":{\"a\":\"\\u0000\"}}", 0, "u0000" },
	{ "{" T("a", "U8", "1", 0, 1) "," T("a", "U8", "1", 1, 2) "}", 2, "duplicate" },
	{ "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "duplicate" },
	/* types */
	{ "{\"a\":1}", 0, "\"a\": its entry" },
	{ "{\"a\":null}", 0, "\"a\": its entry" },
	{ "{\"a\":[\"U8\",[1],[0,1]]}", 1, "\"a\": its entry" },
	{ "{\"a\":{}}", 0, "\"a\": dtype is missing" },
	{ "{" T("a", "F99", "1", 0, 1) "}", 1, "\"a\": unknown dtype \"F99\"" },
	{ "{" T("a", "f32", "1", 0, 4) "}", 4, "\"a\": unknown dtype \"f32\"" },
	{ "{" T("a", "", "1", 0, 4) "}", 4, "\"a\": unknown dtype \"\"" },
	{ "{\"a\":{\"dtype\":7,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "\"a\": dtype is no string" },
	{ "{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "\"a\": dtype is missing" },
	{ "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "\"a\": shape is missing" },
	{ "{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, "\"a\": shape is no array" },
	{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "\"a\": data_offsets is missing" },
	{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1,
	  "\"a\": data_offsets is no array of two" },
	{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1,
	  "\"a\": data_offsets is no array of two" },
	{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":{}}}", 1, "\"a\": data_offsets is no array of two" },
	{ "{" T("a", "U8", "-1", 0, 1) "}", 1, "\"a\": dimension 0" },
	{ "{" T("a", "U8", "1,1.0", 0, 1) "}", 1, "\"a\": dimension 1" },
	{ "{" T("a", "U8", "1e0", 0, 1) "}", 1, "\"a\": dimension 0" },
	{ "{" T("a", "U8", "1.5", 0, 1) "}", 1, "\"a\": dimension 0" },
	{ "{" T("a", "U8", "\"1\"", 0, 1) "}", 1, "\"a\": dimension 0" },
	{ "{" T("a", "U8", "null", 0, 1) "}", 1, "\"a\": dimension 0" },
	{ "{" T("a", "U8", "01", 0, 1) "}", 1, "JSON" },
	{ "{" T("a", "U8", "-0", 0, 0) "}", 0, "-0" },
	{ "{" T("a", "U8", "1", -0, 1) "}", 1, "-0" },
	{ "{" T("a", "U8", "1", -1, 0) "}", 1, "\"a\": the first of its data_offsets" },
	{ "{" T("a", "U8", "1", 0, 1.0) "}", 1, "\"a\": the second of its data_offsets" },
	{ "{" T("a", "U8", "1", 0, 1e0) "}", 1, "\"a\": the second of its data_offsets" },
	{ "{" T("a", "U8", "18446744073709551616", 0, 1) "}", 1, "too big integer" },
	{ "{" T("a", "U8", "1", 0, 18446744073709551615) "}", 1, "too big integer" },
	{ "{\"__metadata__\":{\"format\":1}}", 0, "__metadata__: the value of \"format\"" },
	{ "{\"__metadata__\":{\"format\":[]}}", 0, "__metadata__: the value of \"format\"" },
	{ "{\"__metadata__\":{\"format\":{}}}", 0, "__metadata__: the value of \"format\"" },
	{ "{\"__metadata__\":{\"format\":null}}", 0, "__metadata__: the value of \"format\"" },
	{ "{\"__metadata__\":[]}", 0, "__metadata__ is no" },
	{ "{\"__metadata__\":\"pt\"}", 0, "__metadata__ is no" },
	{ "{" T("__metadata__", "U8", "1", 0, 1) "}", 1, "__metadata__: the value of \"shape\"" },
	/* places */
	{ "{" T("a", "U8", "1", 1, 2) "}", 2, "\"a\": data_offsets [1, 2]" },
	{ "{" T("a", "U8", "1", 0, 1) "," T("b", "U8", "1", 2, 3) "}", 3,
	  "\"b\": data_offsets [2, 3] do not begin at 1" },
	{ "{" T("a", "U8", "4", 0, 4) "," T("b", "U8", "4", 2, 6) "}", 6, "\"b\": data_offsets [2, 6]" },
	{ "{" T("a", "U8", "4", 0, 4) "," T("b", "U8", "4", 0, 4) "}", 4, "\"b\": data_offsets [0, 4]" },
	{ "{" T("a", "U8", "1", 0, 1) "," T("b", "U8", "1", 1, 0) "}", 1, "\"b\": data_offsets [1, 0]" },
	{ "{" T("a", "U8", "4", 0, 4) "," T("b", "U8", "0", 2, 2) "}", 4, "\"b\": data_offsets [2, 2]" },
	/* sizes, in the reference's order */
	{ "{" T("a", "I32", "2,2", 0, 4) "}", 4, "\"a\": shape and dtype need 16 bytes, data_offsets give 4" },
	{ "{" T("a", "I32", "2", 0, 16) "}", 16, "\"a\": shape and dtype need 8 bytes" },
	{ "{" T("a", "I32", "2,18446744073709551614", 0, 16) "}", 16, "too big integer" },
	{ "{" T("a", "I32", "2,9223372036854775807", 0, 16) "}", 16, "\"a\": its shape needs 2^64 bits" },
	{ "{" T("a", "U8", "4294967296,4294967296", 0, 0) "}", 0, "\"a\": its shape has 2^64 elements" },
	{ "{" T("a", "U8", "4294967296,4294967296,0", 0, 0) "}", 0, "\"a\": its shape has 2^64 elements" },
	{ "{" T("a", "F4", "3", 0, 1) "}", 1, "\"a\": 3 elements of F4 are no whole number of bytes" },
	{ "{" T("a", "F6_E2M3", "2", 0, 2) "}", 2, "\"a\": 2 elements of F6_E2M3 are no whole number of bytes" },
	{ "{" T("a", "F4", "3", 1, 2) "}", 2, "\"a\": data_offsets [1, 2]" },
	/* data against the file */
	{ "{" T("a", "U8", "8", 0, 8) "}", 7, "\"a\" is the first that does not fit" },
	{ "{" T("a", "U8", "4", 0, 4) "," T("b", "U8", "0", 4, 4) "," T("c", "U8", "4", 4, 8) "}", 4,
	  "\"c\" is the first" },
	{ "{" T("a", "U8", "4", 0, 4) "," T("b", "U8", "9223372036854775803", 4, 9223372036854775807) "}", 4,
	  "\"b\": its shape" },
	{ "{" T("a", "U8", "8", 0, 8) "}", 9, "1 bytes too many" },
	{ "{}", 1, "1 bytes too many" },
	{ "{\"__metadata__\":{}}", 4096, "4096 bytes too many" },
};

START_TEST(test_safetensors_refuses)
{
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };

	ck_refused(open_header(refused[_i].header, refused[_i].data_bytes, 0, &c, &err), -EBADMSG, &err,
		   refused[_i].fragment);
	ck_assert_ptr_null(c);
}
END_TEST

/* Bytes that are no text: the length, NUL padding, whole files of other kinds. */
static const struct {
	const char *bytes;
	size_t nbytes;
	uint64_t file_bytes; /* 0: no more than bytes */
	int error;
	const char *fragment;
} raw[] = {
	{ "", 0, 0, -EBADMSG, "is empty" },
	{ "\1", 1, 0, -EBADMSG, "too short" },
	{ "\2\0\0\0\0\0\0", 7, 0, -EBADMSG, "too short" },
	{ "\74\0\0\0\0\0\0\0", 8, 0, -EBADMSG,
	  "cut off in the header: 8 bytes long, and the header alone ends at byte 68" },
	{ "\3\0\0\0\0\0\0\0{}", 10, 0, -EBADMSG, "cut off in the header" },
	{ "\3\0\0\0\0\0\0\0{}\0", 11, 0, -EBADMSG, "JSON" },
	{ "\5\0\0\0\0\0\0\0{\"\0\":", 13, 0, -EBADMSG, "NUL byte" },
	{ "\x36\0\0\0\0\0\0\0{\"a\":{\"dtype\":\"U8\",\"shape\":[1\0],\"data_offsets\":[0,1]}}x", 63, 0, -EBADMSG,
	  "NUL byte" },
	{ "\1\xe1\xf5\5\0\0\0\0{", 9, 0, -EBADMSG, "header of 100000001 bytes, at most 100000000" },
	{ "\1\xe1\xf5\5\0\0\0\0{", 9, 200000000, -EBADMSG, "header of 100000001 bytes, at most 100000000" },
	{ "\0\xe1\xf5\5\0\0\0\0{", 9, 0, -EBADMSG, "cut off in the header" },
	{ "\xff\xff\xff\xff\xff\xff\xff\xff{", 9, 0, -EBADMSG, "header of 18446744073709551615 bytes" },
	/* the second attack sample: ten million tensors, a header of 600 MB that is really there */
	{ "\0F\303#\0\0\0\0{\"0\":", 13, 700000000, -EBADMSG, "header of 600000000 bytes, at most" },
	/* another format, or none */
	{ "GGUF\3\0\0\0\0\0\0\0\0\0\0\0", 16, 0, -EOPNOTSUPP, "a GGUF file" },
	{ "PK\3\4\0\0\0\0\0\0\0\0\0\0\0\0", 16, 0, -EOPNOTSUPP, "a zip file" },
	{ "PK\3\4\24\0\10\10\0\0\0\0\0\0\0\0", 16, 0, -EOPNOTSUPP, "a zip file" },
	{ "\x80\2\x8a\nl\xfc\x9c\x46\xf9 j\xa8P\x19.", 15, 0, -EOPNOTSUPP,
	  "a pickle, as torch.save wrote it before 1.6" },
	{ "\x80\4\x95\0\0\0\0\0\0\0\0}.", 13, 0, -EOPNOTSUPP, "a pickle" },
	{ "PYTORCH1........", 16, 0, -EOPNOTSUPP, "preview" },
	{ "\x89HDF\r\n\x1a\n........", 16, 0, -EOPNOTSUPP, "HDF5" },
	{ "\x1f\x8b\10\0\0\0\0\0\0\3", 10, 0, -EOPNOTSUPP, "gzip" },
	{ "<!DOCTYPE html><html>", 21, 0, -EBADMSG, "HTML" },
	{ "\n\n  <html><head>", 16, 0, -EBADMSG, "HTML" },
	{ "{\"error\":\"not found\"}", 21, 0, -EBADMSG, "no weight_map" },
	{ "{}", 2, 0, -EBADMSG, "no weight_map" },
};

START_TEST(test_safetensors_refuses_bytes)
{
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };

	data_write(path, raw[_i].bytes, raw[_i].nbytes);
	if (raw[_i].file_bytes)
		ck_assert_int_eq(truncate(path, (off_t)raw[_i].file_bytes), 0);
	ck_refused(checkpoint_open(path, NULL, 0, &c, &err), raw[_i].error, &err, raw[_i].fragment);
	ck_assert_ptr_null(c);
}
END_TEST

START_TEST(test_safetensors_recognises_lfs_pointer)
{
	static const char pointer[] =
		"version https://git-lfs.github.com/spec/v1\n"
		"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 4932817920\n";
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };

	data_write(path, pointer, strlen(pointer));
	ck_refused(checkpoint_open(path, NULL, 0, &c, &err), -EBADMSG, &err,
		   "Git LFS pointer: the real file (4932817920 bytes) was not fetched");
	data_write(path, pointer, 60); /* cut off before the size */
	ck_refused(checkpoint_open(path, NULL, 0, &c, &err), -EBADMSG, &err, "(unknown bytes) was not fetched");
}
END_TEST

/* Lengths whose bytes are those of another format's beginning: content decides, all of it. */
START_TEST(test_safetensors_with_a_length_like_other_magic)
{
	cleanup_free char *header = data_text("{%*s}", 0x0280 - 2, "");
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };

	ck_assert_msg(open_header(header, 0, 0, &c, &err) == 0, "%s", err.text); /* begins as a pickle */
	checkpoint_free(c);
}
END_TEST

/* ---- accepted */

static const struct {
	const char *header;
	uint64_t data_bytes;
	size_t nr_tensors, nr_metadata;
} accepted[] = {
	{ "{}", 0, 0, 0 },
	{ " \t\r\n{}\t \n\r", 0, 0, 0 },
	{ "{\"__metadata__\":null}", 0, 0, 0 },
	{ "{\"__metadata__\":{}}", 0, 0, 0 },
	{ "{\"__metadata__\":{\"format\":\"pt\",\"\":\"\",\"\xc3\xa9\":\"\xe2\x82\xac\\u20ac\"}}", 0, 0, 3 },
	{ "{" T("scalar", "F32", "", 0, 4) "}", 4, 1, 0 },
	{ "{" T("a", "F32", "0", 0, 0) "," T("b", "F32", "3,0,2", 0, 0) "," T("c", "U8", "1", 0, 1) "}", 1, 3, 0 },
	{ "{" T("a", "F32", "0,9223372036854775807,2,2", 0, 0) "}", 0, 1, 0 },
	{ "{" T("b", "U8", "3", 2, 5) "," T("a", "U8", "2", 0, 2) "}", 5, 2, 0 },
	{ "{" T("odd", "U8", "1", 0, 1) "," T("wide", "F64", "1", 1, 9) "}", 9, 2, 0 },
	{ "{" T("", "U8", "1", 0, 1) "}", 1, 1, 0 },
	{ "{" T("\\\"\\\\\\n\\u00e9\\ud83d\\ude00", "U8", "1", 0, 1) "," T("\xf0\x9f\x98\x80", "U8", "1", 1, 2) "}", 2,
	  2, 0 },
	{ "{" T("deep", "U8", "1,1,1,1,1,1,1,1,1,1,2", 0, 2) "}", 2, 1, 0 },
	{ "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"extra\":{\"x\":[1.5,-3,2E-03,-0.5,null,{}]}}}",
	  1, 1, 0 },
	{ "{\"a\":{\"data_offsets\":[0,1],\"shape\":[1],\"dtype\":\"U8\"}}", 1, 1, 0 },
	{ "{" T("F4-0", "F4", "2", 0, 1) "," T("-0", "F6_E3M2", "4", 1, 4) "}", 4, 2, 0 },
	{ "{" T("metadata", "U8", "1", 0, 1) ",\"__metadata__\":{\"a\":\"-0\"}}", 1, 1, 1 },
};

START_TEST(test_safetensors_accepts)
{
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };
	int r = open_header(accepted[_i].header, accepted[_i].data_bytes, 0, &c, &err);

	ck_assert_msg(r == 0, "%s", err.text);
	ck_assert_uint_eq(c->nr_tensors, accepted[_i].nr_tensors);
	ck_assert_uint_eq(c->nr_metadata, accepted[_i].nr_metadata);
	ck_assert_uint_eq(c->nr_files, 1);
	ck_assert_str_eq(c->files[0].format, "safetensors");
	ck_assert_uint_eq(c->files[0].data_offset, 8 + strlen(accepted[_i].header));
	ck_assert_uint_eq(c->files[0].data_bytes, accepted[_i].data_bytes);
	ck_assert_uint_eq(c->files[0].nr_tensors, c->nr_tensors);
	checkpoint_free(c);
}
END_TEST

START_TEST(test_safetensors_order_names_and_shapes)
{
	static const char header[] = "{" T("z", "U8", "0", 2, 2) "," T("b", "U8", "3", 2, 5) "," T(
		"a", "U8", "1,2", 0, 2) "," T("\\u0061\\\"", "U8", "0,7", 2, 2) "}";
	static const char *const names[] = { "a", "a\"", "b", "z" };
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };

	ck_assert_msg(open_header(header, 5, 0, &c, &err) == 0, "%s", err.text);
	ck_assert_str_eq(c->name, "model");
	ck_assert_str_eq(c->path, path);
	ck_assert_uint_eq(c->nr_tensors, 4);
	for (size_t i = 0; i < 4; i++) {
		ck_assert_str_eq(c->tensors[i].name, names[i]);
		ck_assert_uint_eq(c->tensors[i].file_offset, 8 + strlen(header) + (i ? 2 : 0));
		ck_assert_uint_eq(c->tensors[i].dtype, WD_DTYPE_U8);
	}
	ck_assert_uint_eq(c->tensors[0].ndim, 2);
	ck_assert_int_eq(c->tensors[0].shape[0], 1);
	ck_assert_int_eq(c->tensors[0].shape[1], 2);
	ck_assert_uint_eq(c->tensors[0].nbytes, 2);
	ck_assert_uint_eq(c->tensors[1].ndim, 2);
	ck_assert_int_eq(c->tensors[1].shape[1], 7);
	ck_assert_uint_eq(c->tensors[1].nbytes, 0);
	ck_assert_uint_eq(c->tensors[2].nbytes, 3);
	checkpoint_free(c);
}
END_TEST

START_TEST(test_safetensors_metadata)
{
	cleanup_free char *big = malloc(MiB + 1), *header = NULL;
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };
	size_t nbytes;
	FILE *f = open_memstream(&header, &nbytes);

	memset(big, 'x', MiB);
	big[MiB] = '\0';
	(void)fprintf(f, "{\"__metadata__\":{\"big\":\"%s\"", big);
	for (int i = 0; i < 1000; i++)
		(void)fprintf(f, ",\"key %d\":\"\xc3\xa9 %d\"", i, i);
	(void)fprintf(f, "}}");
	(void)fclose(f);
	ck_assert_msg(open_header(header, 0, 0, &c, &err) == 0, "%s", err.text);
	ck_assert_uint_eq(c->nr_metadata, 1001);
	ck_assert_str_eq(c->metadata[0].key, "big");
	ck_assert_str_eq(c->metadata[0].value, big);
	ck_assert_str_eq(c->metadata[1000].key, "key 999");
	ck_assert_str_eq(c->metadata[1000].value, "\xc3\xa9 999");
	checkpoint_free(c);
}
END_TEST

/* Every dtype of the format; the bytes of each are where the reader says. */
START_TEST(test_safetensors_all_dtypes)
{
	static const char *const names[] = { "F4",      "F6_E2M3", "F6_E3M2", "BOOL",        "U8",          "I8",
					     "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I16",
					     "U16",     "F16",     "BF16",    "I32",         "U32",         "F32",
					     "F64",     "I64",     "U64",     "C64" };
	struct data_tensor t[ARRAY_SIZE(names)];
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };

	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		t[i] = (struct data_tensor){ .name = names[i], .dtype = names[i], .ndim = 2, .shape = { 3, 8 } };
	(void)data_write_safetensors(path, t, ARRAY_SIZE(t), &(struct data_opts){ .seed = SEED });
	ck_assert_msg(checkpoint_open(path, NULL, 0, &c, &err) == 0, "%s", err.text);
	ck_assert_uint_eq(c->nr_tensors, ARRAY_SIZE(t));
	for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
		unsigned char bytes[24 * 8];

		ck_assert_str_eq(c->tensors[i].name, names[i]);
		ck_assert_str_eq(wd_dtype_name(c->tensors[i].dtype), names[i]);
		ck_assert_uint_eq(dtype_from_name(names[i]), c->tensors[i].dtype);
		ck_assert_uint_eq(wd_dtype_bits(c->tensors[i].dtype), data_dtype_bits(names[i]));
		ck_assert_uint_eq(c->tensors[i].nbytes, 24 * data_dtype_bits(names[i]) / 8);
		ck_assert_int_eq(
			source_read(c->files[0].source, bytes, c->tensors[i].nbytes, c->tensors[i].file_offset), 0);
		ck_assert_int_eq(data_check(bytes, c->tensors[i].nbytes, SEED, t[i].file_offset), -1);
	}
	checkpoint_free(c);
	ck_assert_str_eq(wd_dtype_name(0), "?");
	ck_assert_str_eq(wd_dtype_name(WD_DTYPE_F4 + 1), "?");
	ck_assert_uint_eq(wd_dtype_bits(0), 0);
	ck_assert_uint_eq(wd_dtype_bits(UINT32_MAX), 0);
	ck_assert_uint_eq(dtype_from_name("f32"), 0);
	ck_assert_uint_eq(dtype_from_name(""), 0);
}
END_TEST

/* Data that begin at each residue of 64, with tensors that are misaligned inside of them as well. */
START_TEST(test_safetensors_any_data_offset)
{
	struct data_tensor t[] = {
		{ .name = "bytes", .dtype = "U8", .ndim = 1, .shape = { 3 } },
		{ .name = "half", .dtype = "BF16", .ndim = 1, .shape = { 100 } },
		{ .name = "double", .dtype = "F64", .ndim = 2, .shape = { 5, 5 } },
	};
	struct data_opts o = { .seed = SEED, .align = 64, .residue = (uint64_t)_i };
	uint64_t begin = data_write_safetensors(path, t, ARRAY_SIZE(t), &o);
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };

	ck_assert_msg(checkpoint_open(path, NULL, 0, &c, &err) == 0, "%s", err.text);
	ck_assert_uint_eq(begin % 64, (unsigned int)_i);
	ck_assert_uint_eq(c->files[0].data_offset, begin);
	for (size_t i = 0; i < ARRAY_SIZE(t); i++) {
		unsigned char bytes[200];

		ck_assert_uint_eq(c->tensors[i].file_offset, t[i].file_offset);
		ck_assert_uint_eq(c->tensors[i].nbytes, t[i].nbytes);
		ck_assert_int_eq(source_read(c->files[0].source, bytes, t[i].nbytes, c->tensors[i].file_offset), 0);
		ck_assert_int_eq(data_check(bytes, t[i].nbytes, SEED, t[i].file_offset), -1);
	}
	checkpoint_free(c);
}
END_TEST

START_TEST(test_safetensors_trailing)
{
	static const uint64_t trailing[] = { 1, 8, 4096 };
	struct data_tensor t[] = { { .name = "w", .dtype = "F32", .ndim = 1, .shape = { 10 } } };

	for (size_t i = 0; i < ARRAY_SIZE(trailing); i++) {
		struct data_opts o = { .seed = SEED, .trailing = trailing[i] };
		cleanup_free char *text = data_text("%llu bytes too many", (unsigned long long)trailing[i]);
		struct checkpoint *c = NULL;
		struct wd_err err = { "" };

		(void)data_write_safetensors(path, t, 1, &o);
		ck_refused(checkpoint_open(path, NULL, 0, &c, &err), -EBADMSG, &err, text);
		ck_assert_msg(checkpoint_open(path, NULL, CKPT_TRAILING, &c, &err) == 0, "%s", err.text);
		ck_assert_uint_eq(c->files[0].data_bytes, 40);
		checkpoint_free(c);
		/* short stays short */
		ck_assert_int_eq(truncate(path, (off_t)(t[0].file_offset + 39)), 0);
		ck_refused(checkpoint_open(path, NULL, CKPT_TRAILING, &c, &err), -EBADMSG, &err, "\"w\" is the first");
	}
}
END_TEST

START_TEST(test_safetensors_every_truncation)
{
	struct data_tensor t[] = {
		{ .name = "first", .dtype = "U8", .ndim = 1, .shape = { 30 } },
		{ .name = "second", .dtype = "F32", .ndim = 2, .shape = { 4, 5 } },
	};
	struct data_opts o = { .seed = SEED, .metadata = "{\"format\":\"pt\"}" };
	uint64_t begin = data_write_safetensors(path, t, ARRAY_SIZE(t), &o), end = begin + 110;
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };

	ck_assert_msg(checkpoint_open(path, NULL, 0, &c, &err) == 0, "%s", err.text);
	c = checkpoint_free(c);
	while (end-- > 0) {
		ck_assert_int_eq(truncate(path, (off_t)end), 0);
		ck_refused(checkpoint_open(path, NULL, (uint32_t)(end % 2), &c, &err), -EBADMSG, &err,
			   end == 0         ? "is empty" :
			   end < 8          ? "too short" :
			   end < begin      ? "cut off in the header" :
			   end < begin + 30 ? "\"first\" is the first that does not fit" :
					      "\"second\" is the first that does not fit");
		ck_assert_ptr_null(c);
	}
}
END_TEST

START_TEST(test_safetensors_larger_than_memory)
{
	struct data_tensor t[] = {
		{ .name = "hole", .dtype = "U8", .ndim = 1, .shape = { (int64_t)(200 * GiB) }, .hole = true },
		{ .name = "small", .dtype = "U8", .ndim = 1, .shape = { 1024 } },
	};
	unsigned char bytes[1024];
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };

	(void)data_write_safetensors(path, t, ARRAY_SIZE(t), &(struct data_opts){ .seed = SEED });
	ck_assert_msg(checkpoint_open(path, NULL, 0, &c, &err) == 0, "%s", err.text);
	ck_assert_uint_eq(c->tensors[0].nbytes, 200 * GiB);
	ck_assert_int_eq(source_read(c->files[0].source, bytes, 1024, c->tensors[1].file_offset), 0);
	ck_assert_int_eq(data_check(bytes, 1024, SEED, t[1].file_offset), -1);
	checkpoint_free(c);
}
END_TEST

/* ---- reads that fail */

static int64_t hook_result;
static uint64_t hook_from;

static int64_t hook(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct)
{
	(void)direct;
	if (offset >= hook_from)
		return hook_result;
	return pread(s->fd, buf, MIN(nbytes, (size_t)3), (off_t)offset); /* short reads are no errors */
}

START_TEST(test_safetensors_reads_that_fail)
{
	struct data_tensor t[] = { { .name = "w", .dtype = "F32", .ndim = 1, .shape = { 10 } } };
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };

	(void)data_write_safetensors(path, t, 1, &(struct data_opts){ .seed = SEED });
	source_hook = hook;
	hook_from = UINT64_MAX;
	ck_assert_msg(checkpoint_open(path, NULL, 0, &c, &err) == 0, "%s", err.text);
	c = checkpoint_free(c);
	hook_from = 20;
	hook_result = -EIO;
	ck_refused(checkpoint_open(path, NULL, 0, &c, &err), -EIO, &err, "Input/output error");
	hook_result = 0;
	ck_refused(checkpoint_open(path, NULL, 0, &c, &err), -EBADMSG, &err, "has become shorter");
	ck_assert_ptr_null(c);
}
END_TEST

/* ---- attacks and scale */

static double cpu_seconds(void)
{
	struct timespec t;

	ck_assert_int_eq(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t), 0);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static long peak_kib(void)
{
	struct rusage u;

	ck_assert_int_eq(getrusage(RUSAGE_SELF, &u), 0);
	return u.ru_maxrss;
}

/* The third attack sample: 100,000 tensors on one range. */
START_TEST(test_safetensors_attack_one_range)
{
	cleanup_free char *header = NULL;
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };
	size_t nbytes;
	FILE *f = open_memstream(&header, &nbytes);

	for (int i = 0; i < 100000; i++)
		(void)fprintf(f, "%s\"%06d\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[0,16]}",
			      i ? "," : "{", i);
	(void)fprintf(f, "}");
	(void)fclose(f);
	ck_refused(open_header(header, 16, 0, &c, &err), -EBADMSG, &err,
		   "\"000001\": data_offsets [0, 16] do not begin at 16");
}
END_TEST

/* Text made to cost the JSON library far more memory than it has bytes: refused before that is spent. */
START_TEST(test_safetensors_attack_memory)
{
	static const struct {
		const char *unit;
		size_t nbytes;
		const char *fragment;
	} attacks[] = {
		{ "{},", 8 * MiB, "far more values" },        { "[],", 8 * MiB, "far more values" },
		{ "[", 8 * MiB, "far more values" },          { "{\"\":", 8 * MiB, "far more values" },
		{ "[", 5000, "maximum parsing depth" },       { "{\"\":", 10000, "maximum parsing depth" },
		{ "\"\",", 8 * MiB, "\"extra\": its entry" }, /* these may cost their 32 bytes a byte */
		{ "1,", 8 * MiB, "\"extra\": its entry" },
	};
	const char *unit = attacks[_i].unit;
	size_t n = attacks[_i].nbytes / strlen(unit) * strlen(unit), k;
	size_t nr_open = strpbrk(unit, ",") ? 0 : n / strlen(unit);
	cleanup_free char *header = malloc(n + nr_open + 200);
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };
	long before;

	k = (size_t)sprintf(header, "{\"extra\":[");
	for (size_t i = 0; i < n; i += strlen(unit))
		memcpy(header + k + i, unit, strlen(unit));
	header[k + n] = '0';
	memset(header + k + n + 1, unit[0] == '{' ? '}' : ']', nr_open);
	(void)strcpy(header + k + n + 1 + nr_open, "]}");
	(void)data_write_header(path, header, 0, SEED);
	before = peak_kib();
	ck_refused(checkpoint_open(path, NULL, 0, &c, &err), -EBADMSG, &err, attacks[_i].fragment);
	/* 32 bytes a byte, by the library's rule, and the header itself; a sanitizer's allocator needs more */
#ifndef __SANITIZE_ADDRESS__
	ck_assert_int_le(peak_kib() - before, 8 * 1024 * 34);
#else
	(void)before;
#endif
}
END_TEST

/* A header as a model of so many tensors has it: 64 bytes each, names of 40 characters. */
static void write_many(int nr)
{
	cleanup_free struct data_tensor *t = calloc((size_t)nr, sizeof(*t));
	cleanup_free char *names = malloc((size_t)nr * 64);

	for (int i = 0; i < nr; i++) {
		(void)snprintf(names + 64 * i, 64, "model.layers.%010d.attention.weight", i);
		t[i] = (struct data_tensor){ .name = names + 64 * i, .dtype = "U8", .ndim = 1, .shape = { 64 } };
	}
	(void)data_write_safetensors(path, t, (size_t)nr, &(struct data_opts){ .seed = SEED });
}

static double open_seconds(size_t nr)
{
	double best = 1e9;

	for (int i = 0; i < 5; i++) {
		struct checkpoint *c = NULL;
		struct wd_err err = { "" };
		double begin = cpu_seconds();

		ck_assert_msg(checkpoint_open(path, NULL, 0, &c, &err) == 0, "%s", err.text);
		best = MIN(best, cpu_seconds() - begin);
		ck_assert_uint_eq(c->nr_tensors, nr);
		checkpoint_free(c);
	}
	return best;
}

static double json_seconds(void)
{
	double best = 1e9;

	for (int i = 0; i < 5; i++) {
		cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
		cleanup_free char *text = NULL;
		double begin = cpu_seconds();
		uint64_t n;
		json_t *j;

		ck_assert_int_eq(pread(fd, &n, 8, 0), 8);
		text = malloc(n);
		ck_assert_int_eq(pread(fd, text, n, 8), (ssize_t)n);
		j = json_loadb(text, n, 0, NULL);
		ck_assert_ptr_nonnull(j);
		json_decref(j);
		best = MIN(best, cpu_seconds() - begin);
	}
	return best;
}

START_TEST(test_safetensors_many_tensors)
{
	double few, many, json;

	write_many(10000);
	few = open_seconds(10000);
	json = json_seconds();
	write_many(100000);
	many = open_seconds(100000);
	printf("10,000 tensors: %.1f ms, JSON alone %.1f ms; 100,000 tensors: %.1f ms\n", few * 1e3, json * 1e3,
	       many * 1e3);
	ck_assert_msg(few <= 3 * json, "10,000 tensors take %.1f times the JSON library's time", few / json);
	ck_assert_msg(many <= 15 * few, "100,000 tensors take %.1f times as long as 10,000", many / few);
}
END_TEST

/* ---- no memory */

/* A sanitizer has an allocator of its own, which this would break. */
#if defined(__SANITIZE_ADDRESS__)
#define OWN_MALLOC 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define OWN_MALLOC 0
#endif
#endif
#ifndef OWN_MALLOC
#define OWN_MALLOC 1
#endif

#if OWN_MALLOC
extern void *__libc_malloc(size_t n);
extern void *__libc_calloc(size_t n, size_t size);
extern void *__libc_realloc(void *p, size_t n);

static long fail_in = -1; /* allocations until one fails; below 0: none does */

static bool fails(void)
{
	if (fail_in < 0 || fail_in-- > 0)
		return false;
	errno = ENOMEM;
	return true;
}

__attribute__((visibility("default"))) void *malloc(size_t n)
{
	return fails() ? NULL : __libc_malloc(n);
}

__attribute__((visibility("default"))) void *calloc(size_t n, size_t size)
{
	return fails() ? NULL : __libc_calloc(n, size);
}

__attribute__((visibility("default"))) void *realloc(void *p, size_t n)
{
	return fails() ? NULL : __libc_realloc(p, n);
}

START_TEST(test_safetensors_each_allocation_fails)
{
	struct data_tensor t[] = {
		{ .name = "a", .dtype = "F32", .ndim = 2, .shape = { 2, 5 } },
		{ .name = "b", .dtype = "F32", .ndim = 1, .shape = { 10 } },
	};
	struct checkpoint *c = NULL;
	struct wd_err err = { "" };
	long n;
	int r = -1;

	(void)data_write_safetensors(path, t, 2, &(struct data_opts){ .seed = SEED, .metadata = "{\"a\":\"b\"}" });
	for (n = 0; r < 0; n++) {
		ck_assert_int_lt(n, 10000);
		fail_in = n;
		r = checkpoint_open(path, NULL, 0, &c, &err);
		fail_in = -1;
		if (r < 0) {
			ck_assert_msg(r == -ENOMEM, "allocation %ld: %d: %s", n, r, err.text);
			ck_assert_ptr_null(c);
		}
	}
	ck_assert_int_gt(n, 20);
	checkpoint_free(c);
}
END_TEST
#endif

int main(void)
{
	Suite *s = suite_create("safetensors");
	TCase *rules = tcase_create("rules"), *scale = tcase_create("scale");
	SRunner *sr;
	int failed;

	tcase_add_checked_fixture(rules, setup, teardown);
	tcase_set_timeout(rules, 20);
	tcase_add_loop_test(rules, test_safetensors_refuses, 0, ARRAY_SIZE(refused));
	tcase_add_loop_test(rules, test_safetensors_refuses_bytes, 0, ARRAY_SIZE(raw));
	tcase_add_test(rules, test_safetensors_recognises_lfs_pointer);
	tcase_add_test(rules, test_safetensors_with_a_length_like_other_magic);
	tcase_add_loop_test(rules, test_safetensors_accepts, 0, ARRAY_SIZE(accepted));
	tcase_add_test(rules, test_safetensors_order_names_and_shapes);
	tcase_add_test(rules, test_safetensors_metadata);
	tcase_add_test(rules, test_safetensors_all_dtypes);
	tcase_add_loop_test(rules, test_safetensors_any_data_offset, 0, 64);
	tcase_add_test(rules, test_safetensors_trailing);
	tcase_add_test(rules, test_safetensors_every_truncation);
	tcase_add_test(rules, test_safetensors_larger_than_memory);
	tcase_add_test(rules, test_safetensors_reads_that_fail);
#if OWN_MALLOC
	tcase_add_test(rules, test_safetensors_each_allocation_fails);
#else
	printf("SKIP test_safetensors_each_allocation_fails: the sanitizer has an allocator of its own\n");
#endif
	suite_add_tcase(s, rules);

	tcase_add_checked_fixture(scale, setup, teardown);
	tcase_set_timeout(scale, 120);
	tcase_add_test(scale, test_safetensors_attack_one_range);
	tcase_add_loop_test(scale, test_safetensors_attack_memory, 0, 8);
	tcase_add_test(scale, test_safetensors_many_tensors);
	suite_add_tcase(s, scale);

	sr = srunner_create(s);
	(void)fflush(stdout);
	srunner_run_all(sr, CK_ENV);
	failed = srunner_ntests_failed(sr);
	srunner_free(sr);
	return failed ? 1 : 0;
}
