/* SPDX-License-Identifier: Apache-2.0 */
/* See serve_socket.h. */
#include "cli/serve_socket.h"

#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#define LISTEN_FIRST_FD 3 /* sd_listen_fds(3) */
#define BACKLOG 1024      /* many processes may start at the same moment; the kernel's limit is below or above */

static int address_of(const char *path, struct sockaddr_un *ret)
{
	*ret = (struct sockaddr_un){ .sun_family = AF_UNIX };
	if (strlen(path) >= sizeof(ret->sun_path))
		return -ENAMETOOLONG;
	(void)strcpy(ret->sun_path, path);
	return 0;
}

/* ---- socket activation */

static int option_of(int fd, int option)
{
	int value = -1;
	socklen_t len = sizeof(value);

	return getsockopt(fd, SOL_SOCKET, option, &value, &len) < 0 ? -1 : value;
}

int listen_passed(int fds[static LISTEN_MAX], struct wd_err *err)
{
	const char *pid = getenv("LISTEN_PID"), *number = getenv("LISTEN_FDS");
	long nr = pid && number && strtol(pid, NULL, 10) == getpid() ? strtol(number, NULL, 10) : 0;

	(void)unsetenv("LISTEN_PID");
	(void)unsetenv("LISTEN_FDS");
	(void)unsetenv("LISTEN_FDNAMES");
	if (nr < 0 || nr > LISTEN_MAX)
		return err_set(err, -EINVAL, "socket activation: at most %d sockets, not %ld", LISTEN_MAX, nr);
	for (int i = 0; i < nr; i++) {
		int fd = LISTEN_FIRST_FD + i, flags = fcntl(fd, F_GETFL);

		if (flags < 0 || option_of(fd, SO_DOMAIN) != AF_UNIX || option_of(fd, SO_TYPE) != SOCK_SEQPACKET ||
		    option_of(fd, SO_ACCEPTCONN) != 1)
			return err_set(err, -EINVAL,
				       "socket activation: descriptor %d is no listening SOCK_SEQPACKET Unix socket "
				       "(ListenSequentialPacket=)",
				       fd);
		if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
			return err_set(err, -errno, "socket activation: descriptor %d: %s", fd, strerror(errno));
		fds[i] = fd;
	}
	return (int)nr;
}

int listen_path(int fd, char *ret, size_t size)
{
	struct sockaddr_un address;
	socklen_t len = sizeof(address) - 1;
	size_t n;

	(void)memset(&address, 0, sizeof(address));
	if (getsockname(fd, (struct sockaddr *)&address, &len) < 0)
		return -errno;
	n = strlen(address.sun_path);
	if (n == 0 || n >= size)
		return -EINVAL;
	(void)memcpy(ret, address.sun_path, n + 1);
	return 0;
}

/* ---- a socket of our own */

static int lock_path(const char *path, char *ret, size_t size, struct wd_err *err)
{
	int n = snprintf(ret, size, "%s.lock", path);

	return n < 0 || (size_t)n >= size ? err_set(err, -ENAMETOOLONG, "%s: the path is too long", path) : 0;
}

int listen_lock(const char *path, struct wd_err *err)
{
	char lock[256];
	int r = lock_path(path, lock, sizeof(lock), err);

	/* The file is there only while it is held: who waited for one that was removed tries again. Nobody else may
	 * open it, so nobody else can hold us up. */
	while (r == 0) {
		struct stat ours, there;
		int fd = open(lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);

		if (fd < 0)
			return err_set(err, -errno, "%s: cannot make it: %s%s", lock, strerror(errno),
				       errno == ENOENT ? "; give a path whose folder is there by --socket" :
				       errno == EACCES ? "; give a path in a folder of your own by --socket" :
							 "");
		if (flock(fd, LOCK_EX) == 0 && fstat(fd, &ours) == 0 && lstat(lock, &there) == 0 &&
		    ours.st_ino == there.st_ino && ours.st_dev == there.st_dev)
			return fd;
		(void)close(fd);
	}
	return r;
}

void listen_unlock(int fd, const char *path)
{
	char lock[256];

	if (lock_path(path, lock, sizeof(lock), NULL) == 0)
		(void)unlink(lock);
	(void)close(fd);
}

bool listen_alive(const char *path, int *ret_pid)
{
	cleanup_close int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un address;
	struct ucred peer;
	socklen_t len = sizeof(peer);

	*ret_pid = 0;
	if (fd < 0 || address_of(path, &address) < 0)
		return false;
	if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) < 0)
		return errno == EAGAIN || errno == EPROTOTYPE; /* too busy to accept; a socket of another kind */
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) == 0)
		*ret_pid = peer.pid;
	return true;
}

int listen_folder(const char *path, struct wd_err *err)
{
	cleanup_free char *folder = strdup(path);
	char *slash = folder ? strrchr(folder, '/') : NULL;
	bool in_tmp, system;
	struct stat st;

	if (!folder)
		return err_set(err, -ENOMEM, "out of memory");
	if (!slash || slash == folder)
		return 0;
	*slash = '\0';
	in_tmp = strncmp(folder, "/tmp/weightd-", 13) == 0;
	system = strcmp(folder, "/run/weightd") == 0;
	if (!in_tmp && !system)
		return 0; /* somebody else's to make */
	if (mkdir(folder, system ? 0755 : 0700) < 0 && errno != EEXIST)
		return err_set(err, -errno, "%s: cannot make the folder: %s", folder, strerror(errno));
	/* Everybody can make a folder of that name in /tmp: only one that is ours alone will do. */
	if (lstat(folder, &st) < 0)
		return err_set(err, -errno, "%s: %s", folder, strerror(errno));
	if (in_tmp && (!S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077)))
		return err_set(err, -EACCES,
			       "%s: is not a folder that only this user may use; remove it, or set XDG_RUNTIME_DIR or "
			       "--socket",
			       folder);
	return 0;
}

int listen_at(const char *path, uint32_t mode, struct wd_err *err)
{
	cleanup_close int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un address;
	struct stat st;
	mode_t mask;
	int r = 0;

	if (fd < 0)
		return err_set(err, -errno, "cannot make a socket: %s", strerror(errno));
	if (address_of(path, &address) < 0)
		return err_set(err, -ENAMETOOLONG, "%s: the path is too long for a socket", path);
	if (lstat(path, &st) == 0) {
		if (!S_ISSOCK(st.st_mode))
			return err_set(err, -EEXIST, "%s: is in the way, and no socket; remove it", path);
		if (unlink(path) < 0)
			return err_set(err, -errno, "%s: cannot remove the socket of a daemon that has ended: %s", path,
				       strerror(errno));
	}
	/* The mode by umask: there is no moment in which it is another one. */
	mask = umask(0777 & ~mode);
	if (bind(fd, (const struct sockaddr *)&address, sizeof(address)) < 0)
		r = -errno;
	(void)umask(mask);
	if (r == 0 && listen(fd, BACKLOG) < 0) {
		r = -errno;
		(void)unlink(path);
	}
	return r < 0 ? err_set(err, r, "%s: cannot listen: %s", path, strerror(-r)) : TAKE_FD(fd);
}

/* ---- the service manager */

static char notify_path[sizeof(((struct sockaddr_un *)0)->sun_path)];

bool service_init(bool ours)
{
	const char *path = getenv("NOTIFY_SOCKET");

	if (ours && path && (path[0] == '/' || path[0] == '@') && strlen(path) < sizeof(notify_path))
		(void)strcpy(notify_path, path);
	(void)unsetenv("NOTIFY_SOCKET");
	return notify_path[0] != '\0';
}

void service_notify(const char *fmt, ...)
{
	cleanup_close int fd = -1;
	struct sockaddr_un address;
	socklen_t len;
	char text[512];
	va_list args;

	if (!notify_path[0] || address_of(notify_path, &address) < 0)
		return;
	va_start(args, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, args);
	va_end(args);
	len = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + strlen(notify_path));
	if (notify_path[0] == '@')
		address.sun_path[0] = '\0'; /* a name without a file */
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd >= 0)
		(void)sendto(fd, text, strlen(text), MSG_NOSIGNAL, (const struct sockaddr *)&address, len);
}
