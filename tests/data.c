/* SPDX-License-Identifier: Apache-2.0 */
/* See data.h. */
#include <fcntl.h>
#include <ftw.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "tests/data.h"

static char *root;
static pid_t root_pid;

static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *fmt, ...)
{
	va_list ap;

	(void)fprintf(stderr, "tests/data.c: ");
	va_start(ap, fmt);
	(void)vfprintf(stderr, fmt, ap);
	va_end(ap);
	(void)fprintf(stderr, ": %s\n", strerror(errno));
	abort();
}

char *data_text(const char *fmt, ...)
{
	char *text;
	va_list ap;

	va_start(ap, fmt);
	if (vasprintf(&text, fmt, ap) < 0)
		die("%s", fmt);
	va_end(ap);
	return text;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
	(void)st;
	(void)type;
	(void)ftw;
	return remove(path);
}

void data_remove(const char *path)
{
	if (nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS) < 0 && errno != ENOENT)
		die("%s", path);
}

/* Runs in the forks of the tests as well: only the process that made the folder removes it. */
static void remove_root(void)
{
	if (root && root_pid == getpid())
		data_remove(root);
}

/* Before main(), so that the folder belongs to the test program and not to the fork of one test. */
static void __attribute__((constructor)) make_root(void)
{
	const char *tmp = getenv("TMPDIR");

	root = data_text("%s/weightd-test.XXXXXX", tmp && *tmp ? tmp : "/var/tmp");
	if (!mkdtemp(root) || chmod(root, 0711) < 0) /* tests that give up root must get through */
		die("%s", root);
	root_pid = getpid();
	if (atexit(remove_root) != 0)
		die("atexit");
}

char *data_tmpdir(void)
{
	char *dir = data_text("%s/XXXXXX", root);

	if (!mkdtemp(dir))
		die("%s", dir);
	return dir;
}

/* splitmix64's finisher over seed and word number. */
static uint64_t word(uint64_t seed, uint64_t nr)
{
	uint64_t z = seed * UINT64_C(0xD1342543DE82EF95) + (nr + 1) * UINT64_C(0x9E3779B97F4A7C15);

	z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
	z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
	return z ^ z >> 31;
}

static unsigned char byte_at(uint64_t seed, uint64_t position)
{
	return (unsigned char)(word(seed, position / 8) >> position % 8 * 8);
}

void data_fill(void *buf, size_t nbytes, uint64_t seed, uint64_t position)
{
	unsigned char *to = buf;
	size_t i = 0;

	for (; i < nbytes && (position + i) % 8 != 0; i++)
		to[i] = byte_at(seed, position + i);
	for (; nbytes - i >= 8; i += 8) {
		uint64_t w = htole64(word(seed, (position + i) / 8));

		memcpy(to + i, &w, 8);
	}
	for (; i < nbytes; i++)
		to[i] = byte_at(seed, position + i);
}

int64_t data_check(const void *buf, size_t nbytes, uint64_t seed, uint64_t position)
{
	const unsigned char *is = buf;
	unsigned char want[4096];

	for (size_t i = 0; i < nbytes;) {
		size_t n = MIN(sizeof(want), nbytes - i);

		data_fill(want, n, seed, position + i);
		if (memcmp(want, is + i, n) != 0)
			for (size_t k = 0; k < n; k++)
				if (want[k] != is[i + k])
					return (int64_t)(i + k);
		i += n;
	}
	return -1;
}

uint32_t data_dtype_bits(const char *dtype)
{
	/* not the library's own table: that one is under test */
	static const struct {
		const char *name;
		uint32_t bits;
	} table[] = {
		{ "F4", 4 },          { "F6_E2M3", 6 }, { "F6_E3M2", 6 }, { "BOOL", 8 },    { "U8", 8 },
		{ "I8", 8 },          { "F8_E5M2", 8 }, { "F8_E4M3", 8 }, { "F8_E8M0", 8 }, { "F8_E4M3FNUZ", 8 },
		{ "F8_E5M2FNUZ", 8 }, { "I16", 16 },    { "U16", 16 },    { "F16", 16 },    { "BF16", 16 },
		{ "I32", 32 },        { "U32", 32 },    { "F32", 32 },    { "F64", 64 },    { "I64", 64 },
		{ "U64", 64 },        { "C64", 64 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(table); i++)
		if (strcmp(dtype, table[i].name) == 0)
			return table[i].bits;
	errno = EINVAL;
	die("dtype %s", dtype);
}

static void write_at(int fd, const char *path, const void *buf, size_t nbytes, uint64_t offset)
{
	for (size_t done = 0; done < nbytes;) {
		ssize_t n = pwrite(fd, (const char *)buf + done, nbytes - done, (off_t)(offset + done));

		if (n <= 0)
			die("writing %s", path);
		done += (size_t)n;
	}
}

static void write_seed_at(int fd, const char *path, uint64_t nbytes, uint64_t seed, uint64_t offset)
{
	size_t chunk = MiB;
	cleanup_free unsigned char *buf = malloc(chunk);

	if (!buf)
		die("%s", path);
	for (uint64_t done = 0; done < nbytes;) {
		size_t n = MIN(chunk, nbytes - done);

		data_fill(buf, n, seed, offset + done);
		write_at(fd, path, buf, n, offset + done);
		done += n;
	}
}

static int create(const char *path)
{
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);

	if (fd < 0)
		die("%s", path);
	return fd;
}

static void finish(int fd, const char *path)
{
	if (fsync(fd) < 0)
		die("fsync of %s", path);
}

void data_write(const char *path, const void *bytes, size_t nbytes)
{
	cleanup_close int fd = create(path);

	write_at(fd, path, bytes, nbytes, 0);
	finish(fd, path);
}

void data_write_seed(const char *path, uint64_t nbytes, uint64_t seed)
{
	cleanup_close int fd = create(path);

	write_seed_at(fd, path, nbytes, seed, 0);
	finish(fd, path);
}

static void write_header(int fd, const char *path, const char *header, size_t nbytes)
{
	uint64_t n = htole64(nbytes);

	write_at(fd, path, &n, 8, 0);
	write_at(fd, path, header, nbytes, 8);
}

uint64_t data_write_header(const char *path, const char *header, uint64_t data_bytes, uint64_t seed)
{
	cleanup_close int fd = create(path);
	uint64_t begin = 8 + strlen(header);

	write_header(fd, path, header, strlen(header));
	write_seed_at(fd, path, data_bytes, seed, begin);
	finish(fd, path);
	return begin;
}

static void put_string(FILE *f, const char *s)
{
	(void)fputc('"', f);
	for (; *s; s++)
		if (*s == '"' || *s == '\\')
			(void)fprintf(f, "\\%c", *s);
		else if ((unsigned char)*s < ' ')
			(void)fprintf(f, "\\u%04x", *s);
		else
			(void)fputc(*s, f);
	(void)fputc('"', f);
}

uint64_t data_write_safetensors(const char *path, struct data_tensor *tensors, size_t nr, const struct data_opts *opts)
{
	static const struct data_opts none;
	const struct data_opts *o = opts ? opts : &none;
	cleanup_close int fd = create(path);
	cleanup_free char *header = NULL;
	uint64_t end = 0, begin, align = o->align ? o->align : 8;
	size_t nbytes;
	FILE *f = open_memstream(&header, &nbytes);

	if (!f)
		die("%s", path);
	(void)fputc('{', f);
	if (o->metadata)
		(void)fprintf(f, "\"__metadata__\":%s%s", o->metadata, nr ? "," : "");
	for (size_t i = 0; i < nr; i++) {
		struct data_tensor *t = &tensors[i];
		uint64_t elements = 1;

		put_string(f, t->name);
		(void)fprintf(f, ":{\"dtype\":\"%s\",\"shape\":[", t->dtype);
		for (uint32_t k = 0; k < t->ndim; k++) {
			elements *= (uint64_t)t->shape[k];
			(void)fprintf(f, "%s%lld", k ? "," : "", (long long)t->shape[k]);
		}
		t->nbytes = elements * data_dtype_bits(t->dtype) / 8;
		t->file_offset = end; /* in the data; the header's length is added below */
		end += t->nbytes;
		(void)fprintf(f, "],\"data_offsets\":[%llu,%llu]}%s", (unsigned long long)t->file_offset,
			      (unsigned long long)end, i + 1 < nr ? "," : "");
	}
	(void)fputc('}', f);
	(void)fflush(f);
	while ((8 + nbytes) % align != o->residue) {
		(void)fputc(' ', f);
		(void)fflush(f);
	}
	if (fclose(f) != 0)
		die("%s", path);

	begin = 8 + nbytes;
	write_header(fd, path, header, nbytes);
	if (ftruncate(fd, (off_t)(begin + end)) < 0)
		die("%s", path);
	for (size_t i = 0; i < nr; i++) {
		tensors[i].file_offset += begin;
		if (!tensors[i].hole)
			write_seed_at(fd, path, tensors[i].nbytes, o->seed, tensors[i].file_offset);
	}
	write_seed_at(fd, path, o->trailing, o->seed, begin + end);
	finish(fd, path);
	return begin;
}

uint64_t data_drop_cache(const char *path)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), left = 0;
	cleanup_free unsigned char *in = NULL;
	struct stat st;
	size_t nbytes;
	void *map;

	if (fd < 0 || fstat(fd, &st) < 0)
		die("%s", path);
	if (st.st_size == 0)
		return 0;
	nbytes = (size_t)st.st_size;
	if (fsync(fd) < 0 || (errno = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED)) != 0)
		die("dropping %s from the page cache", path);
	map = mmap(NULL, nbytes, PROT_READ, MAP_SHARED, fd, 0);
	in = malloc(nbytes / page + 1);
	if (map == MAP_FAILED || !in || mincore(map, nbytes, in) < 0)
		die("looking for %s in the page cache", path);
	for (size_t i = 0; i < (nbytes + page - 1) / page; i++)
		left += in[i] & 1 ? page : 0;
	(void)munmap(map, nbytes);
	return left;
}
