/* SPDX-License-Identifier: Apache-2.0 */
#include "ufd/arena.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/mount.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "lib/base/log.h"
#include "ufd/hooks.h"
#include "ufd/page.h"

/* glibc 2.36 and <linux/mount.h> both define these; only the syscalls are used, so only the kernel's header. */
static int fs_config(int fs, unsigned int cmd, const char *key, const char *value)
{
	return (int)syscall(SYS_fsconfig, fs, cmd, key, value, 0);
}

/* mount_setattr(2): 5.12. */
static int clone_read_only(int mount_fd)
{
	struct mount_attr attr = { .attr_set = MOUNT_ATTR_RDONLY };
	int fd = (int)syscall(SYS_open_tree, mount_fd, "", OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH);

	if (fd < 0)
		return -errno;
	if (syscall(SYS_mount_setattr, fd, "", AT_EMPTY_PATH, &attr, sizeof(attr)) < 0) {
		int e = -errno;

		(void)close(fd);
		return e;
	}
	return fd;
}

/* 0, or why there is none. */
static int make_mount(struct arena_fs *fs, uint64_t limit_bytes, const char *mpol)
{
	cleanup_close int ctx = (int)syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC);
	char size[32];

	if (ctx < 0)
		return -errno;
	(void)snprintf(size, sizeof(size), "%llu", (unsigned long long)limit_bytes);
	/* within_size: fallocate gives huge pages wherever a whole one lies inside of i_size. (advise would give
	 * small ones: fallocate has no VMA to be advised; always would spend a huge page on every tail.) */
	if (fs_config(ctx, FSCONFIG_SET_STRING, "size", size) < 0 ||
	    fs_config(ctx, FSCONFIG_SET_STRING, "mode", "0700") < 0 ||
	    fs_config(ctx, FSCONFIG_SET_STRING, "nr_inodes", "0") < 0)
		return -errno;
	if (!pager_hooks.no_huge)
		(void)fs_config(ctx, FSCONFIG_SET_STRING, "huge", "within_size"); /* kernels without THP refuse */
	fs->noswap = fs_config(ctx, FSCONFIG_SET_FLAG, "noswap", NULL) == 0;
	if (mpol && fs_config(ctx, FSCONFIG_SET_STRING, "mpol", mpol) < 0)
		log_error("memory policy %s: refused by the kernel (%s); the default one is used", mpol,
			  strerror(errno));
	if (fs_config(ctx, FSCONFIG_CMD_CREATE, NULL, NULL) == 0)
		fs->mount_fd = (int)syscall(SYS_fsmount, ctx, FSMOUNT_CLOEXEC, 0);
	if (fs->mount_fd < 0) {
		fs->noswap = false;
		return -errno;
	}
	return 0;
}

/* ------------------------------------------------------------------ a mount made in another name space */

struct made {
	bool noswap;
	int error; /* 0, or why not */
};

static int write_text(const char *path, const char *text)
{
	cleanup_close int fd = open(path, O_WRONLY | O_CLOEXEC);

	return fd < 0 || write(fd, text, strlen(text)) < 0 ? -errno : 0;
}

/* In the child: a mount is cloned in the mount name space that it is attached to (cloning a detached one came with 6.15). The
 * name space goes with this process; the mounts stay with their descriptors. */
static int make_there(struct arena_fs *fs, uint64_t limit_bytes, const char *mpol, bool user_ns, uid_t uid, gid_t gid)
{
	char map[64];
	int r;

	if (unshare(CLONE_NEWNS | (user_ns ? CLONE_NEWUSER : 0)) < 0)
		return -errno;
	if (user_ns) {
		(void)snprintf(map, sizeof(map), "0 %u 1", (unsigned int)uid);
		r = write_text("/proc/self/uid_map", map);
		(void)write_text("/proc/self/setgroups", "deny");
		(void)snprintf(map, sizeof(map), "0 %u 1", (unsigned int)gid);
		if (r == 0)
			r = write_text("/proc/self/gid_map", map);
		if (r < 0)
			return r;
	}
	if (syscall(SYS_mount, NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0)
		return -errno;
	r = make_mount(fs, limit_bytes, mpol);
	if (r < 0)
		return r;
	if (syscall(SYS_move_mount, fs->mount_fd, "", AT_FDCWD, "/", MOVE_MOUNT_F_EMPTY_PATH) < 0)
		return -errno;
	fs->ro_fd = clone_read_only(fs->mount_fd);
	return fs->ro_fd < 0 ? fs->ro_fd : 0;
}

static int make_elsewhere(struct arena_fs *fs, uint64_t limit_bytes, const char *mpol, bool user_ns)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(2 * sizeof(int))];
	} control = { 0 };
	struct made made = { .error = -EIO };
	struct iovec iov = { &made, sizeof(made) };
	struct msghdr msg = {
		.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)
	};
	struct arena_fs got = { .mount_fd = -1, .ro_fd = -1, .shared = fs->shared };
	uid_t uid = geteuid();
	gid_t gid = getegid();
	int pair[2], fds[2];
	pid_t pid;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	pid = fork();
	if (pid == 0) {
		made.error = make_there(&got, limit_bytes, mpol, user_ns, uid, gid);
		made.noswap = got.noswap;
		if (made.error == 0) {
			struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

			fds[0] = got.mount_fd;
			fds[1] = got.ro_fd;
			c->cmsg_level = SOL_SOCKET;
			c->cmsg_type = SCM_RIGHTS;
			c->cmsg_len = CMSG_LEN(sizeof(fds));
			memcpy(CMSG_DATA(c), fds, sizeof(fds));
		} else {
			msg.msg_control = NULL;
			msg.msg_controllen = 0;
		}
		(void)sendmsg(pair[1], &msg, MSG_NOSIGNAL);
		_exit(0);
	}
	(void)close(pair[1]);
	if (pid > 0) {
		if (recvmsg(pair[0], &msg, MSG_CMSG_CLOEXEC) == (ssize_t)sizeof(made) && made.error == 0) {
			const struct cmsghdr *c = CMSG_FIRSTHDR(&msg);

			made.error = -EIO;
			if (c && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof(fds))) {
				memcpy(fds, CMSG_DATA(c), sizeof(fds));
				arena_fs_done(fs);
				fs->mount_fd = fds[0];
				fs->ro_fd = fds[1];
				fs->noswap = made.noswap;
				made.error = 0;
			}
		}
		while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
			;
	}
	(void)close(pair[0]);
	return made.error;
}

void arena_fs_init(struct arena_fs *fs, uint64_t limit_bytes, const char *mpol, bool shared, int *ret_error)
{
	int r;

	*fs = (struct arena_fs){ .mount_fd = -1, .ro_fd = -1, .shared = shared };
	*ret_error = -EPERM;
	if (pager_hooks.no_tmpfs)
		return;
	*ret_error = make_mount(fs, limit_bytes, mpol);
	if (!shared)
		return;
	if (*ret_error == 0) {
		fs->ro_fd = pager_hooks.no_clone ? -EINVAL : clone_read_only(fs->mount_fd);
		r = fs->ro_fd < 0 ? make_elsewhere(fs, limit_bytes, mpol, false) : 0;
		if (r < 0) {
			log_error("no read-only clone of the arenas' mount (%s): root in a client could write to them",
				  strerror(-r));
			fs->ro_fd = -1;
		}
	} else {
		/* Without the privilege: in a user name space of its own. (Not noswap: see alias_locked.) */
		*ret_error = make_elsewhere(fs, limit_bytes, mpol, true);
	}
}

void arena_fs_done(struct arena_fs *fs)
{
	if (fs->mount_fd >= 0)
		(void)close(TAKE_FD(fs->mount_fd));
	if (fs->ro_fd >= 0)
		(void)close(TAKE_FD(fs->ro_fd));
}

int arena_fs_limit(struct arena_fs *fs, uint64_t limit_bytes)
{
	cleanup_close int ctx = -1;
	char size[32];

	if (fs->mount_fd < 0)
		return 0;
	ctx = (int)syscall(SYS_fspick, fs->mount_fd, "", FSPICK_CLOEXEC | FSPICK_EMPTY_PATH);
	if (ctx < 0)
		return -errno;
	(void)snprintf(size, sizeof(size), "%llu", (unsigned long long)limit_bytes);
	if (fs_config(ctx, FSCONFIG_SET_STRING, "size", size) < 0 ||
	    fs_config(ctx, FSCONFIG_CMD_RECONFIGURE, NULL, NULL) < 0)
		return -errno;
	return 0;
}

unsigned char *map_reserve(uint64_t len)
{
	uint64_t align = extent_bytes(), page = page_bytes();
	unsigned char *p, *start;

	len = round_up(len, page);
	if (len > UINT64_MAX / 2)
		return NULL;
	p = mmap(NULL, len + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return NULL;
	start = (unsigned char *)round_up((uintptr_t)p, align);
	if (start > p)
		(void)munmap(p, (size_t)(start - p));
	if (start + len < p + len + align)
		(void)munmap(start + len, (size_t)(p + align - start));
	return start;
}

uint64_t arena_round(uint64_t data_bytes)
{
	uint64_t extent = extent_bytes(), tail = data_bytes % extent;

	return tail > extent / 2 ? round_up(data_bytes, extent) : round_up(data_bytes, page_bytes());
}

int arena_file(const struct arena_fs *fs, uint64_t bytes, int *ret_fd, int *ret_ro_fd)
{
	static unsigned int serial;
	cleanup_close int fd = -1, ro = -1;
	char name[32];

	if (fs->mount_fd >= 0) {
		/* (A number of its own: a next daemon goes on with this file system.) */
		(void)snprintf(name, sizeof(name), "%d.%u", (int)getpid(),
			       __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED));
		fd = openat(fs->mount_fd, name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
		if (fd >= 0 && fs->ro_fd >= 0)
			ro = openat(fs->ro_fd, name, O_RDONLY | O_CLOEXEC);
		if (fd >= 0)
			(void)unlinkat(fs->mount_fd, name, 0);
	} else {
		fd = memfd_create("weightd", MFD_CLOEXEC);
	}
	if (fd < 0)
		return -errno;
	if (fs->shared && ro < 0) {
		(void)fchmod(fd, 0600);
		(void)snprintf(name, sizeof(name), "/proc/self/fd/%d", fd);
		ro = open(name, O_RDONLY | O_CLOEXEC);
		if (ro < 0)
			return -errno;
	}
	if (ftruncate(fd, (off_t)bytes) < 0)
		return -errno;
	*ret_fd = TAKE_FD(fd);
	*ret_ro_fd = TAKE_FD(ro);
	return 0;
}

int arena_adopt(const struct arena_fs *fs, uint64_t bytes, int fd, int ro_fd, struct arena *ret)
{
	struct arena a = { .fd = fd, .ro_fd = ro_fd, .bytes = bytes };
	uint64_t len = bytes + page_bytes();
	int r;

	a.alias = map_reserve(len);
	/* PROT_NONE and munlock first: under mlockall(MCL_FUTURE) the mapping would be filled at once, with zeros. */
	if (!a.alias || mmap(a.alias, len, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, a.fd, 0) == MAP_FAILED ||
	    (munlock(a.alias, len), mprotect(a.alias, len, PROT_READ | PROT_WRITE)) < 0) {
		r = a.alias ? -errno : -ENOMEM;
		arena_close(&a);
		return r;
	}
	(void)madvise(a.alias, len, MADV_HUGEPAGE);
	(void)madvise(a.alias, len, MADV_DONTFORK);
	(void)madvise(a.alias, len, MADV_DONTDUMP);
	if (!fs->noswap)
		a.alias_locked = mlock2(a.alias, len, MLOCK_ONFAULT) == 0;
	*ret = a;
	return 0;
}

int arena_open(const struct arena_fs *fs, uint64_t bytes, struct arena *ret)
{
	int fd, ro_fd, r = arena_file(fs, bytes + page_bytes(), &fd, &ro_fd);

	return r < 0 ? r : arena_adopt(fs, bytes, fd, ro_fd, ret);
}

void arena_close(struct arena *a)
{
	if (a->alias)
		(void)munmap(a->alias, a->bytes + page_bytes());
	a->alias = NULL;
	if (a->fd >= 0)
		(void)close(TAKE_FD(a->fd));
	if (a->ro_fd >= 0)
		(void)close(TAKE_FD(a->ro_fd));
}

int arena_alloc(struct arena *a, uint64_t off, uint64_t len)
{
	while (fallocate(a->fd, 0, (off_t)off, (off_t)len) < 0)
		if (errno != EINTR)
			return -errno;
	return 0;
}

int arena_punch(struct arena *a, uint64_t off, uint64_t len)
{
	while (fallocate(a->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)off, (off_t)len) < 0)
		if (errno != EINTR)
			return -errno;
	return 0;
}

void arena_zap_alias(struct arena *a, uint64_t off, uint64_t len)
{
	if (!a->alias_locked)
		(void)madvise(a->alias + off, len, MADV_DONTNEED);
}

uint64_t arena_allocated(const struct arena *a)
{
	struct stat st;

	return fstat(a->fd, &st) < 0 ? 0 : (uint64_t)st.st_blocks * 512;
}
