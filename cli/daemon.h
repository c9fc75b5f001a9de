/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tool's connection to a daemon: questions and answers of ufd/wire.h, one at a time. Has no memory that the daemon
 * serves, so it hands no userfaultfd over. Knows which socket, by the library's own rule (wire_connect.c).
 *
 * Threads: none; everything here is for the main thread.
 */
#ifndef WD_CLI_DAEMON_H
#define WD_CLI_DAEMON_H

#include "cli/cmd.h"
#include "ufd/source.h"
#include "ufd/wire.h"

/* The options of every command that talks to a daemon, and of those that list checkpoints. */
#define DAEMON_OPT_SOCKET CMD_OPT_OWN
#define DAEMON_OPT_OWN (CMD_OPT_OWN + 1)
#define DAEMON_COMMON_OPTIONS \
	CMD_COMMON_OPTIONS,   \
	{                     \
		"socket", required_argument, NULL, DAEMON_OPT_SOCKET \
	}

struct daemon {
	int fd;
	uint32_t seq;
	char path[WIRE_SOCKET];
	struct wire_welcome welcome;
	int fds[WIRE_MAX_FDS]; /* that came with it; kept open, so that the daemon does not take us for gone */
	unsigned int nr_fds;
};

/*
 * Connects and says hello. `socket` NULL: the usual ones. ret->path is set also on failure.
 * Return: 0; -ENOENT, -ECONNREFUSED no daemon; -EACCES a socket that is not trusted or not allowed; -EPROTONOSUPPORT
 * another version (ret->welcome says which); others. The text is one line that names the socket.
 */
int daemon_connect(const char *socket, struct daemon *ret, struct wd_err *err);
/* The same for a command: an error is told (cmd_error). */
int daemon_open(const char *socket, struct daemon *ret);
/* The same for one that is of use on a new daemon: WEIGHTD_AUTOSTART starts the user's own. */
int daemon_open_or_start(const char *socket, struct daemon *ret);
/* Does the environment want that? */
bool daemon_autostart(void);
void daemon_done(struct daemon *d);
/* One that daemon_done() may be called on. */
#define DAEMON_NONE \
	(struct daemon) \
	{ \
		.fd = -1 \
	}
#define cleanup_daemon cleanup(daemon_done)

/*
 * Sends `m` (type and size are set by WIRE_INIT or alike; this fills the number in) with descriptors (borrowed), and
 * waits at most timeout_ms (-1: no limit) for its answer, which takes the place of the question. `want`: its type;
 * *ret_fd (may be NULL): a descriptor that came with it, or -1. Owner: the caller.
 * Return: 0; what the daemon refused with, with its text; -EPIPE it has gone; -ETIMEDOUT; -EPROTO.
 */
int daemon_ask(struct daemon *d, union wire_any *m, const int *fds, unsigned int nr_fds, enum wire_type want,
	       int timeout_ms, int *ret_fd, struct wd_err *err);

/* Puts "path: " before the text, unless it begins so already. Returns `error`. */
int daemon_error_of(const char *path, int error, struct wd_err *err);

/* WIRE_LS or WIRE_STAT. Owner of *ret: the caller. */
int daemon_json(struct daemon *d, enum wire_type question, json_t **ret, struct wd_err *err);

/* An integer of an answer; 0 if it is not there (or negative). */
uint64_t json_count(const json_t *object, const char *key);

/* ---- --watch */

/* "2", "0.5" -> milliseconds, 100 ms to a day; NULL: every 2 s. Return: 0; -EINVAL. */
int watch_parse(const char *text, int *ret_ms);

/*
 * Asks for JSON and prints it: once (every_ms 0), or again and again until Ctrl-C or until the daemon has gone. On a
 * terminal each draws over the last. `print` NULL: as JSON. Errors are told. Return: the exit code.
 */
int daemon_watch(struct daemon *d, enum wire_type question, int every_ms, int (*print)(void *arg, const json_t *answer),
		 void *arg);

/* ---- the files of a checkpoint */

struct sources {
	struct source **list;
	size_t nr;
};

/*
 * Adds the files that a user means by `path`: a file (whatever is in it), or all files of a folder or an index.
 * Return: 0; negative errno with the text.
 */
int sources_add(struct sources *s, const char *path, const char *variant, struct wd_err *err);
void sources_done(struct sources *s);
#define cleanup_sources cleanup(sources_done)

#endif
