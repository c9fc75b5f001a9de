/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An open checkpoint file with its identity. Knows files; knows neither tensors nor memory.
 *
 * Identity (DESIGN, "Decided"): file handle where the kernel gives one, else device and inode; size,
 * mtime, ctime. While a source is open only size and mtime tell that its bytes changed: ctime alone
 * moves on link, chmod, rename-over and unlink, which disturb nobody who has the file open. Once seen
 * changed, a source stays so: the time stamp may be put back, the bytes are not trusted again.
 *
 * Threads: everything but the flag `changed` (atomic) is constant after source_open().
 */
#ifndef WD_UFD_SOURCE_H
#define WD_UFD_SOURCE_H

#include "lib/base/base.h"

struct source_id {
	uint64_t dev, ino;
	uint64_t size;
	int64_t mtime_ns, ctime_ns;
	uint32_t handle_len; /* 0: none */
	unsigned char handle[128];
};

struct source {
	unsigned int nr_refs;
	int fd;                      /* buffered description */
	int direct_fd;               /* O_DIRECT description, or -1: small file, or refused at open */
	uint32_t align;              /* of offset, length and memory of a direct read, bytes */
	_Atomic bool direct_refused; /* direct reads do not work for this source */
	_Atomic bool direct_told;    /* and the log has said so */
	_Atomic bool changed;
	struct source_id id;
	char *path; /* as opened; for messages only */
};

/* Opens a regular file for reading. Follows links; the error text names link and target where that helps. */
int source_open(const char *path, struct source **ret, struct wd_err *err);
/*
 * The same from descriptors that another process has passed: `fd` open for reading, and (or -1) the same file opened
 * O_DIRECT. Both are taken, on failure, too. Sets no flags and opens nothing; `name` is for messages. May wait as long as
 * the file's server likes.
 * Return: 0; -EACCES O_PATH or write-only; -EINVAL, -EISDIR no regular file; others. A direct_fd that does not suit is left out.
 */
int source_from_fds(int fd, int direct_fd, const char *name, struct source **ret, struct wd_err *err);
/* The same from descriptors that a daemon before us had, with the identity that the file had for it. Asks the file nothing. */
int source_adopt(int fd, int direct_fd, const char *name, const struct source_id *id, struct source **ret);
struct source *source_ref(struct source *s);
struct source *source_unref(struct source *s); /* returns NULL */
static inline void source_unref_p(struct source **s)
{
	source_unref(*s);
}
#define cleanup_source cleanup(source_unref_p)

bool source_id_equal(const struct source_id *a, const struct source_id *b);

/* 0, or -ESTALE: size or mtime are not what they were. Sticky. May ask a network file system. */
int source_check(struct source *s);

/* A read could not be direct (`error`: how it was refused): never again here, and one line in the log (info). */
void source_direct_refused(struct source *s, int error);

/*
 * Reads exactly `nbytes` from the buffered description. For headers and for wd_tensor_read(); takes the
 * inode's lock on some file systems, so never on the way of a fault.
 * Return: 0; -ENODATA the file ends before; -EIO and others.
 */
int source_read(struct source *s, void *buf, size_t nbytes, uint64_t offset);

/*
 * Test hook on backing reads. When set, each read of the pager (and of source_read) goes through it instead
 * of the file: it returns bytes read (fewer is a short read; 0 the end) or a negative errno, and may sleep.
 * `direct` says which description would have been used. Set it before anything is read.
 */
typedef int64_t (*source_hook_fn)(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct);
extern source_hook_fn source_hook;

#endif
