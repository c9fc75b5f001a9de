/* SPDX-License-Identifier: Apache-2.0 */
#include "ufd/source.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "lib/base/log.h"
#include "ufd/hooks.h"
#include "ufd/page.h"

#ifndef AT_HANDLE_FID
#define AT_HANDLE_FID 0x200 /* name_to_handle_at: an identity is enough, no need to open by it (6.5) */
#endif

/* Below this, a second description and unbuffered reads cost more than they save. */
#define DIRECT_MIN_BYTES MiB

source_hook_fn source_hook;

static int64_t ns(const struct statx_timestamp *t)
{
	return t->tv_sec * 1000000000 + t->tv_nsec;
}

static int id_get(int fd, struct source_id *ret, struct statx *st)
{
	struct {
		struct file_handle h;
		unsigned char bytes[MAX_HANDLE_SZ];
	} handle;
	unsigned int mask = STATX_BASIC_STATS;
	struct statfs fs;
	int mount;

#ifdef STATX_DIOALIGN
	mask |= STATX_DIOALIGN;
#endif
	if (statx(fd, "", AT_EMPTY_PATH, mask, st) < 0)
		return -errno;
	*ret = (struct source_id){
		.dev = (uint64_t)st->stx_dev_major << 32 | st->stx_dev_minor,
		.ino = st->stx_ino,
		.size = st->stx_size,
		.mtime_ns = ns(&st->stx_mtime),
		.ctime_ns = ns(&st->stx_ctime),
	};
	/* Who has a file server of his own answers what he likes, the handle of anybody's file included; only the device is
	 * the kernel's word. (A user can mount FUSE in a user namespace.) */
	if (fstatfs(fd, &fs) < 0 || fs.f_type == FUSE_SUPER_MAGIC)
		return 0;
	handle.h.handle_bytes = MAX_HANDLE_SZ;
	if (name_to_handle_at(fd, "", &handle.h, &mount, AT_EMPTY_PATH | AT_HANDLE_FID) < 0) {
		handle.h.handle_bytes = MAX_HANDLE_SZ;
		if (name_to_handle_at(fd, "", &handle.h, &mount, AT_EMPTY_PATH) < 0)
			return 0; /* this file system has none: device and inode */
	}
	if (handle.h.handle_bytes <= sizeof(ret->handle)) {
		ret->handle_len = handle.h.handle_bytes;
		memcpy(ret->handle, handle.h.f_handle, handle.h.handle_bytes);
	}
	return 0;
}

/* A link that leads nowhere is the usual broken model cache: say where it leads. */
static int open_failed(const char *path, int error, struct wd_err *err)
{
	char target[512];
	ssize_t n = readlink(path, target, sizeof(target) - 1);

	if (n > 0 && (error == -ENOENT || error == -ELOOP)) {
		target[n] = 0;
		return err_set(err, error, "%s: is a symbolic link to %s, %s; fetch the file again", path, target,
			       error == -ELOOP ? "which leads in a circle" : "which does not exist");
	}
	if (error == -EMFILE || error == -ENFILE)
		return err_set(err, error, "%s: no file descriptor left; raise the limit (ulimit -n, RLIMIT_NOFILE)",
			       path);
	return err_set(err, error, "%s: cannot open: %s", path, strerror(-error));
}

/* The rest of opening: `fd` (taken, closed on failure, too) is there, a direct description is not yet. */
static int source_new(int fd, const char *path, struct source **ret, struct wd_err *err)
{
	struct source *s = calloc(1, sizeof(*s));
	struct statx st;
	int r;

	if (!s || !(s->path = strdup(path))) {
		free(s);
		(void)close(fd);
		return err_set(err, -ENOMEM, "%s: out of memory", path);
	}
	s->nr_refs = 1;
	s->fd = fd;
	s->direct_fd = -1;
	r = id_get(fd, &s->id, &st);
	if (r < 0) {
		source_unref(s);
		return err_set(err, r, "%s: cannot stat: %s", path, strerror(-r));
	}
	if (!S_ISREG(st.stx_mode)) {
		source_unref(s);
		return err_set(err, S_ISDIR(st.stx_mode) ? -EISDIR : -EINVAL, "%s: is %s, not a regular file", path,
			       S_ISDIR(st.stx_mode) ? "a folder" : "a device, pipe or socket");
	}
	s->align = (uint32_t)page_bytes();
#ifdef STATX_DIOALIGN
	if (st.stx_mask & STATX_DIOALIGN) { /* 6.1; 0: no direct I/O on this file */
		s->align = MAX(st.stx_dio_mem_align, st.stx_dio_offset_align);
		s->direct_refused = st.stx_dio_offset_align == 0 || s->align > page_bytes();
	}
#endif
	if (pager_hooks.no_direct)
		s->direct_refused = true;
	*ret = s;
	return 0;
}

static bool wants_direct(const struct source *s)
{
	return s->id.size >= DIRECT_MIN_BYTES && !s->direct_refused;
}

/* Takes the descriptor (or closes it, if it is another file's). */
static void set_direct(struct source *s, int fd)
{
	struct source_id id;
	struct statx st;

	if (fd >= 0 && (id_get(fd, &id, &st) < 0 || !source_id_equal(&id, &s->id))) {
		(void)close(fd);
		fd = -1;
	}
	s->direct_fd = fd;
	s->direct_refused = fd < 0;
}

int source_open(const char *path, struct source **ret, struct wd_err *err)
{
	struct source *s;
	int fd, r;

	/* O_NONBLOCK: a FIFO must be refused, not waited for; no effect on regular files. */
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
	if (fd < 0)
		return open_failed(path, -errno, err);
	r = source_new(fd, path, &s, err);
	if (r < 0)
		return r;
	if (wants_direct(s)) {
		/* Through /proc, so that it is the same file whatever happens to the name; the name where there
		 * is no /proc, if it is still the same file. */
		char self[32];

		(void)snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
		fd = open(self, O_RDONLY | O_CLOEXEC | O_DIRECT);
		if (fd < 0 && errno == ENOENT)
			fd = open(path, O_RDONLY | O_CLOEXEC | O_DIRECT);
		if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
			r = open_failed(path, -errno, err);
			source_unref(s);
			return r;
		}
		set_direct(s, fd);
	}
	*ret = s;
	return 0;
}

/* What /proc calls it tells a file from pipes, sockets and the like before anything is asked of the thing itself. */
static int passed_check(int fd, const char *name, int *ret_flags, struct wd_err *err)
{
	char self[32], what[64];
	ssize_t n;
	int flags;

	(void)snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
	n = readlink(self, what, sizeof(what) - 1);
	if (n < 0)
		return err_set(err, -errno, "%s: cannot tell what was passed: %s: %s", name, self, strerror(errno));
	what[n] = '\0';
	if (what[0] != '/')
		return err_set(err, -EINVAL, "%s: what was passed is %s, not a regular file", name, what);
	flags = fcntl(fd, F_GETFL);
	if (flags < 0)
		return err_set(err, -errno, "%s: %s", name, strerror(errno));
	/* Nobody needs permission for an O_PATH descriptor, and a write-only one gives none to read. */
	if (flags & O_PATH || (flags & O_ACCMODE) == O_WRONLY)
		return err_set(err, -EACCES, "%s: was not opened for reading", name);
	*ret_flags = flags;
	return 0;
}

int source_from_fds(int fd, int direct_fd, const char *name, struct source **ret, struct wd_err *err)
{
	struct source *s;
	int flags = 0, r = passed_check(fd, name, &flags, err);

	if (r < 0) {
		(void)close(fd);
	} else {
		r = source_new(fd, name, &s, err);
		if (r == 0 && direct_fd >= 0 && wants_direct(s)) {
			struct wd_err why;

			if (passed_check(direct_fd, name, &flags, &why) < 0)
				log_info("%s; reading through the page cache", why.text);
			else if (!(flags & O_DIRECT))
				log_info(
					"%s: the second descriptor is not open for direct reads; reading through the page cache",
					name);
			else
				set_direct(s, TAKE_FD(direct_fd));
			if (s->direct_fd < 0 && direct_fd < 0)
				log_info("%s: the second descriptor is another file's; reading through the page cache",
					 name);
		}
	}
	if (direct_fd >= 0)
		(void)close(direct_fd);
	if (r < 0)
		return r;
	s->direct_refused = s->direct_fd < 0;
	*ret = s;
	return 0;
}

int source_adopt(int fd, int direct_fd, const char *name, const struct source_id *id, struct source **ret)
{
	struct source *s = calloc(1, sizeof(*s));

	if (!s || !(s->path = strdup(name))) {
		free(s);
		(void)close(fd);
		if (direct_fd >= 0)
			(void)close(direct_fd);
		return -ENOMEM;
	}
	s->nr_refs = 1;
	s->fd = fd;
	s->direct_fd = direct_fd;
	s->align = (uint32_t)page_bytes(); /* a multiple of what it needs */
	s->direct_refused = direct_fd < 0;
	s->id = *id;
	*ret = s;
	return 0;
}

void source_direct_refused(struct source *s, int error)
{
	atomic_store(&s->direct_refused, true);
	if (!atomic_exchange(&s->direct_told, true))
		log_info("%s: direct reads are refused (%s), reading through the page cache", s->path,
			 strerror(-error));
}

struct source *source_ref(struct source *s)
{
	(void)__atomic_add_fetch(&s->nr_refs, 1, __ATOMIC_RELAXED);
	return s;
}

struct source *source_unref(struct source *s)
{
	if (!s || __atomic_sub_fetch(&s->nr_refs, 1, __ATOMIC_ACQ_REL) > 0)
		return NULL;
	if (s->direct_fd >= 0)
		(void)close(s->direct_fd);
	(void)close(s->fd);
	free(s->path);
	free(s);
	return NULL;
}

bool source_id_equal(const struct source_id *a, const struct source_id *b)
{
	if (a->size != b->size || a->mtime_ns != b->mtime_ns || a->ctime_ns != b->ctime_ns)
		return false;
	/* A handle sees through overlay mounts, where device and inode of one file differ. Two file systems can
	 * give equal handles, so it does not stand alone: the times (ns) and the size do the rest only with it. */
	if (a->dev == b->dev && a->ino == b->ino)
		return true;
	return a->handle_len && a->handle_len == b->handle_len && !memcmp(a->handle, b->handle, a->handle_len) &&
	       a->ino == b->ino;
}

int source_check(struct source *s)
{
	struct stat st;

	if (atomic_load_explicit(&s->changed, memory_order_relaxed))
		return -ESTALE;
	if (fstat(s->fd, &st) < 0 || (uint64_t)st.st_size != s->id.size ||
	    st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec != s->id.mtime_ns) {
		atomic_store_explicit(&s->changed, true, memory_order_relaxed);
		return -ESTALE;
	}
	return 0;
}

int source_read(struct source *s, void *buf, size_t nbytes, uint64_t offset)
{
	while (nbytes) {
		int64_t n;

		if (source_hook)
			n = source_hook(s, buf, nbytes, offset, false);
		else
			n = pread(s->fd, buf, MIN(nbytes, (size_t)(1 << 30)), (off_t)offset);
		if (n < 0 && !source_hook)
			n = -errno;
		if (n == -EINTR)
			continue;
		if (n < 0)
			return (int)n;
		if (n == 0)
			return -ENODATA;
		buf = (char *)buf + n;
		nbytes -= (size_t)n;
		offset += (uint64_t)n;
	}
	return 0;
}
