/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where daemons listen, and which of them a client trusts: one rule for the library and the tool. Knows sockets; knows no
 * message.
 */
#include <pwd.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "lib/base/log.h"
#include "ufd/wire.h"

#define SYSTEM_SOCKET "/run/weightd/weightd.sock"
#define SYSTEM_USER "weightd"
#define NAME "weightd.sock"
#define CONNECT_SECONDS 5 /* a daemon that does not even accept for so long counts as dead */

int wire_socket_own(char ret[static WIRE_SOCKET])
{
	const char *folder = getenv("XDG_RUNTIME_DIR");
	struct stat st;
	int n;

	if (geteuid() == 0)
		n = snprintf(ret, WIRE_SOCKET, "%s", SYSTEM_SOCKET);
	else if (folder && folder[0] == '/')
		n = snprintf(ret, WIRE_SOCKET, "%s/%s", folder, NAME);
	else {
		/* A shell without a session (ssh, su, cron) has the folder, but is not told of it; a container has none. */
		n = snprintf(ret, WIRE_SOCKET, "/run/user/%u", geteuid());
		if (stat(ret, &st) == 0 && S_ISDIR(st.st_mode) && st.st_uid == geteuid())
			n = snprintf(ret, WIRE_SOCKET, "/run/user/%u/%s", geteuid(), NAME);
		else
			n = snprintf(ret, WIRE_SOCKET, "/tmp/weightd-%u/%s", geteuid(), NAME);
	}
	return n < 0 || n >= WIRE_SOCKET ? -ENAMETOOLONG : 0;
}

bool wire_trusted(uint32_t uid)
{
	struct passwd user, *found = NULL;
	char text[4096];

	if (uid == 0 || uid == geteuid())
		return true;
	return getpwnam_r(SYSTEM_USER, &user, text, sizeof(text), &found) == 0 && found && found->pw_uid == uid;
}

int wire_connect_to(const char *path, int *ret_fd, uint32_t *ret_uid)
{
	/* connect() waits where the queue of the listener is full, and so for ever if that is stopped. */
	struct timeval limit = { .tv_sec = CONNECT_SECONDS };
	struct sockaddr_un at = { .sun_family = AF_UNIX };
	struct ucred peer;
	socklen_t len = sizeof(peer);
	cleanup_close int fd = -1;

	if (!path[0])
		return -ENOENT;
	if (strlen(path) >= sizeof(at.sun_path))
		return -ENAMETOOLONG;
	(void)memcpy(at.sun_path, path, strlen(path) + 1);
	fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -errno;
	if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) < 0)
		return -errno;
	while (connect(fd, (const struct sockaddr *)&at, sizeof(at)) < 0)
		if (errno != EINTR)
			return errno == EAGAIN ? -ETIMEDOUT : -errno;
	limit.tv_sec = 0;
	if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) < 0 ||
	    getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0)
		return -errno;
	*ret_uid = peer.uid;
	*ret_fd = TAKE_FD(fd);
	return 0;
}

static int try(const char *path, int *ret_fd, struct wd_err *err)
{
	cleanup_close int fd = -1;
	uint32_t uid;
	int r = wire_connect_to(path, &fd, &uid);

	switch (r) {
	case 0:
		break;
	case -ENOENT:
	case -ENOTDIR:
	case -ECONNREFUSED:
		return err_set(err, r == -ENOTDIR ? -ENOENT : r, "no daemon answers at %s", path);
	case -ETIMEDOUT:
		return err_set(err, r, "the daemon at %s does not answer; see whether it is stopped or very busy",
			       path);
	case -EACCES:
	case -EPERM:
		return err_set(err, -EACCES, "%s may not be used by this user (uid %u): %s", path, geteuid(),
			       strerror(-r));
	case -EPROTOTYPE:
		return err_set(err, -EACCES, "%s is a socket of another program, not weightd's", path);
	case -ENAMETOOLONG:
		return err_set(err, r, "%s is too long for a socket: at most %d bytes", path, WIRE_SOCKET - 1);
	default:
		return err_set(err, r, "connecting to %s failed: %s", path, strerror(-r));
	}
	if (!wire_trusted(uid))
		return err_set(err, -EACCES,
			       "%s is refused: it belongs to uid %u, which is neither root, nor this user, nor %s's",
			       path, uid, SYSTEM_USER);
	*ret_fd = TAKE_FD(fd);
	return 0;
}

int wire_connect(const char *path, int *ret_fd, char ret_path[static WIRE_SOCKET], struct wd_err *err)
{
	char own[WIRE_SOCKET] = "";
	struct wd_err first = { "" };
	int r, r2;

	if (!path) {
		path = getenv("WEIGHTD_SOCKET");
		if (path && !path[0])
			path = NULL;
	}
	(void)snprintf(ret_path, WIRE_SOCKET, "%s", path ? path : SYSTEM_SOCKET);
	if (path)
		return try(path, ret_fd, err);
	r = try(SYSTEM_SOCKET, ret_fd, &first);
	if (r == 0)
		return 0;
	/* Here a user may have a daemon of his own, whatever is wrong with the system's. */
	r2 = wire_socket_own(own);
	if (r2 < 0 || strcmp(own, SYSTEM_SOCKET) == 0)
		return err_set(err, r, "%s", first.text);
	if (r != -ENOENT && r != -ECONNREFUSED)
		log_info("%s", first.text);
	r2 = try(own, ret_fd, err);
	if (r2 == 0) {
		(void)memcpy(ret_path, own, sizeof(own));
		return 0;
	}
	if (r2 != -ENOENT && r2 != -ECONNREFUSED) {
		(void)memcpy(ret_path, own, sizeof(own));
		return r2;
	}
	if (r != -ENOENT && r != -ECONNREFUSED) /* what was refused tells more than what is not there */
		return err_set(err, r, "%s", first.text);
	return err_set(err, r2, "no daemon answers at %s or %s", SYSTEM_SOCKET, own);
}
