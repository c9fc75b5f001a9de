/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Starting the user's own daemon: `weightd serve --detach`, which returns when it listens. Knows processes; knows no protocol.
 *
 * The program that is started is the one installed with this library (or the build's), only then one in PATH: both ends
 * must speak the same version.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/wait.h>
#include <time.h>

#include "lib/base/log.h"
#include "ufd/client.h"
#include "ufd/wire.h"

#define START_MS 15000
#define OTHER_MS 5000 /* for one that another process of ours is starting at this moment */
#define PROGRAM_MAX 4096

extern char **environ;

static bool program_at(char ret[static PROGRAM_MAX], const char *folder, size_t len, const char *name)
{
	int n = snprintf(ret, PROGRAM_MAX, "%.*s%s", (int)len, folder, name);

	return n > 0 && n < PROGRAM_MAX && access(ret, X_OK) == 0;
}

static void program_find(char ret[static PROGRAM_MAX])
{
	Dl_info self;

	if (dladdr((const void *)(uintptr_t)client_autostart, &self) && self.dli_fname && strchr(self.dli_fname, '/')) {
		size_t len = (size_t)(strrchr(self.dli_fname, '/') - self.dli_fname);
		static const char *const names[] = { "/weightd", "/../bin/weightd", "/../../bin/weightd" };

		for (size_t i = 0; i < ARRAY_SIZE(names); i++)
			if (program_at(ret, self.dli_fname, len, names[i]))
				return;
	}
	(void)snprintf(ret, PROGRAM_MAX, "weightd");
}

/* The last words of one that could not be started. */
static void words(int fd, char *ret, size_t room)
{
	ssize_t n;

	ret[0] = '\0';
	if (fcntl(fd, F_SETFL, O_NONBLOCK) < 0)
		return;
	n = read(fd, ret, room - 1);
	ret[MAX(n, (ssize_t)0)] = '\0';
	ret[strcspn(ret, "\n")] = '\0';
}

static bool answers(const char *socket)
{
	uint32_t uid;
	cleanup_close int fd = -1;

	return wire_connect_to(socket, &fd, &uid) == 0;
}

/* Several processes may start one at once; the socket is for the first of them. */
static bool other_started(const char *socket)
{
	const struct timespec moment = { .tv_nsec = 20000000 };
	uint64_t until = now_ns() + (uint64_t)OTHER_MS * 1000000;

	while (!answers(socket)) {
		if (now_ns() > until)
			return false;
		(void)nanosleep(&moment, NULL);
	}
	return true;
}

static int spawn(const char *program, const char *socket, int error_fd, pid_t *ret)
{
	char *argv[] = { "weightd", "serve", "--detach", "--idle-exit", "10m", "--socket", (char *)socket, NULL };
	posix_spawn_file_actions_t actions;
	posix_spawnattr_t attr;
	sigset_t none;
	int r;

	(void)posix_spawn_file_actions_init(&actions);
	(void)posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
	(void)posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
	(void)posix_spawn_file_actions_adddup2(&actions, error_fd, STDERR_FILENO);
	(void)posix_spawnattr_init(&attr);
	(void)sigemptyset(&none);
	(void)posix_spawnattr_setsigmask(&attr, &none);
	(void)posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSID);
	r = posix_spawnp(ret, program, &actions, &attr, argv, environ);
	(void)posix_spawnattr_destroy(&attr);
	(void)posix_spawn_file_actions_destroy(&actions);
	return -r;
}

/* Return: its exit status; -ETIMEDOUT (it is ended then); -ECHILD: the program reaps all children itself. */
static int wait_for(pid_t pid)
{
	cleanup_close int fd = pidfd_open(pid, 0);
	struct pollfd p = { .fd = fd, .events = POLLIN };
	bool late = fd >= 0 && poll(&p, 1, START_MS) == 0;
	int status;

	if (late)
		(void)kill(pid, SIGTERM);
	while (waitpid(pid, &status, 0) < 0)
		if (errno != EINTR)
			return -errno;
	return late ? -ETIMEDOUT : WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

int client_autostart(const char *socket, struct wd_err *err)
{
	char program[PROGRAM_MAX], text[WIRE_TEXT], own[WIRE_SOCKET];
	int ends[2], r;
	pid_t pid;

	if (!socket || !*socket)
		socket = getenv("WEIGHTD_SOCKET");
	if (!socket || !*socket) {
		r = wire_socket_own(own);
		if (r < 0)
			return err_set(err, r, "cannot start a daemon: the path of its socket is too long");
		socket = own;
	}
	program_find(program);
	if (pipe2(ends, O_CLOEXEC) < 0)
		return err_set(err, -errno, "cannot start a daemon: %s", strerror(errno));
	r = spawn(program, socket, ends[1], &pid);
	(void)close(ends[1]);
	if (r == 0)
		r = wait_for(pid);
	words(ends[0], text, sizeof(text));
	(void)close(ends[0]);
	if (r == 0 || r == -ECHILD || (r > 0 && other_started(socket))) {
		log_info("started a daemon at %s: %s serve", socket, program);
		return 0;
	}
	if (r > 0)
		return err_set(err, -ECHILD, "cannot start a daemon at %s: %s", socket,
			       text[0] ? text : "weightd serve has failed");
	return err_set(err, r, "cannot start a daemon at %s: %s: %s", socket, program,
		       r == -ETIMEDOUT ? "it did not listen within 15 s" : strerror(-r));
}
