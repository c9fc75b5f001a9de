/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The keeper: a small process that outlives the daemon and holds what must not be lost with it: the listening socket,
 * arenas and extent tables, every userfaultfd, clients' sockets, and a few bytes that say what is what. It understands
 * none of it: a map from a 64-bit key to a blob and descriptors. (Closing the last userfaultfd of an address space makes
 * its waiters read zeros.)
 *
 * keeper_start() forks it off a daemon that has no threads yet. It listens at "<socket>.keeper" (mode 0600; only root and
 * its own user are let in). When the daemon ends without keeper_bye(), the keeper waits RESPAWN_MS for somebody to
 * take over by keeper_adopt(), then starts the daemon again itself, with the command line it was started with; after
 * RESPAWN_TRIES such starts in a row that lived less than 10 s it gives up, ends, and so hangs up on all clients, who
 * then map their files (client.c). (A daemon that took over by itself starts the count anew.)
 *
 * Threads: keeper_put() and keeper_del() may be called from any thread. They return when the message is in the keeper's
 * queue: from then on it survives the caller.
 */
#ifndef WD_UFD_KEEPER_H
#define WD_UFD_KEEPER_H

#include "lib/base/base.h"

#define KEEPER_VERSION 1u
#define KEEPER_BLOB 4096
#define KEEPER_FDS 4
#define KEEPER_RESPAWN_MS 300
#define KEEPER_RESPAWN_TRIES 5
#define KEEPER_ADOPT_MS 30000 /* without a command line: how long a next daemon is waited for */

struct keeper;

/* Kinds of keys (bits 56 to 63); the rest is a number of that kind's. */
enum keeper_kind {
	KEEP_LISTEN = 1, /* fds: listening socket(s) */
	KEEP_FS,         /* fds: the tmpfs mount, its read-only clone */
	KEEP_VIEW,       /* fds: arena, table, file, file O_DIRECT */
	KEEP_MM,         /* fds: userfaultfd */
	KEEP_SESSION,    /* fds: control socket, notify socket */
	KEEP_MAP,        /* fds: the mapping's state */
	KEEP_RO,         /* fds: arena, table, as clients get them */
};
#define KEEP_KEY(kind, id) ((uint64_t)(kind) << 56 | (uint64_t)(id))
#define KEEP_KIND(key) ((enum keeper_kind)((key) >> 56))
#define KEEP_ID(key) ((key) & ((1ull << 56) - 1))

/*
 * Forks the keeper. `argv`: how to start the daemon again (copied; argv[0] is found like /proc/self/exe); it finds
 * WEIGHTD_KEEPER=<fd> in its environment then: the connection. NULL: never start it again (systemd does).
 * Call before the process has threads.
 */
int keeper_start(const char *socket_path, char *const *argv, struct keeper **ret, struct wd_err *err);

/*
 * Is there a keeper left at that socket (or WEIGHTD_KEEPER in the environment)? Then *ret is connected to it.
 * Return: 0; -ENOENT none; -EBUSY one, and its daemon lives (*ret_pid, may be NULL); -EPROTONOSUPPORT another version
 * (with no daemon alive, that keeper ends, so that keeper_start() may follow); -EACCES its peer is neither root nor this
 * user; others. With `take_over` a living daemon is asked to let go first (keeper_asked()), stops serving and exits; one
 * that does not within 3 s is killed. The call returns when it has gone, or -ETIMEDOUT.
 */
int keeper_adopt(const char *socket_path, bool take_over, struct keeper **ret, int *ret_pid, struct wd_err *err);
/* After keeper_adopt(): from now on it is started like that (see keeper_start()), not as who was before. -E2BIG. */
int keeper_restart(struct keeper *k, char *const *argv, struct wd_err *err);

/* The daemon polls this: readable = it is asked to let go (keeper_asked() says so), or the keeper has died (hang-up). */
int keeper_fd(const struct keeper *k);
/* 1: let go, and exit without keeper_bye(); 0: nothing; -EPIPE: the keeper is dead. */
int keeper_asked(struct keeper *k);

/*
 * Stores (or replaces) one object. fds are duplicated; nr_fds <= KEEPER_FDS, a fd of -1 is left out at the end only.
 * -EPIPE: the keeper is dead; -ETIMEDOUT: it has not read for 5 s.
 */
int keeper_put(struct keeper *k, uint64_t key, const void *blob, size_t nbytes, const int *fds, unsigned int nr_fds);
int keeper_del(struct keeper *k, uint64_t key);

/* All objects, in order of their keys. fds (-1 beyond nr_fds) are the callee's, fewer than were put where the keeper or
 * this process had no descriptor left; stops at the first non-zero result. Before other threads use `k`. */
typedef int (*keeper_fn)(void *arg, uint64_t key, const void *blob, size_t nbytes, int fds[static KEEPER_FDS],
			 unsigned int nr_fds);
int keeper_list(struct keeper *k, keeper_fn fn, void *arg);
/* Those of one kind. (Closing the descriptors of others that come along may wait for the server of a file.) */
int keeper_list_of(struct keeper *k, enum keeper_kind kind, keeper_fn fn, void *arg);

/* The daemon ends for good: the keeper forgets everything and ends, too. */
void keeper_bye(struct keeper *k);
/* Lets go of the connection only. Returns NULL. */
struct keeper *keeper_free(struct keeper *k);
/* Process id of the keeper. */
int keeper_pid(const struct keeper *k);

#endif
