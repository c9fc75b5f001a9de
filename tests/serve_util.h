/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A daemon of the test's own, and other processes that use it.
 *
 * The daemon, its keeper and whatever these start live below a *guard*, a process that ends them all by SIGKILL when
 * the test's end of a socket closes: also if the test crashes, or is killed because its time is over. Clients are
 * *peers*: forked off the test, which itself never has a pager. A peer runs functions of the test, one at a time, and
 * sends their results back; it dies with the test. One that gives no result within PEER_SECONDS fails the test, with
 * a dump of where it and the daemon stand.
 *
 * Functions named must_* and those that start something fail the running test. Peers use no check.h: they say what was
 * wrong by peer_say() and return a negative number.
 *
 * Threads: one.
 */
#ifndef WD_TESTS_SERVE_UTIL_H
#define WD_TESTS_SERVE_UTIL_H

#include <jansson.h>
#include <sys/types.h>

#include "tests/api_util.h"

/* What to do when something fails that is no test (a benchmark): does not return. */
extern void (*serve_failed)(const char *text);

#define NOBODY 65534u
#define PEER_SECONDS 60 /* no figure of a test: longer than anything that is not stuck, on a busy machine */

/* ---- the daemon */
struct daemon {
	char *folder, *socket;
	pid_t guard;
	int leash; /* to the guard */
	pid_t pid; /* that answered last */
};

/*
 * Starts `weightd serve --socket ... OPTIONS` (words with blanks between them), waits until it answers, and sets
 * WEIGHTD_SOCKET. With `setup` the daemon is a fork of the test that calls it first and then goes the same way as the
 * program: for hooks.
 */
void daemon_start(struct daemon *d, const char *options, void (*setup)(void));
/* The same as another user. */
void daemon_start_as(struct daemon *d, uid_t uid, const char *options);
/* Ends it with all that belongs to it, by SIGKILL. Nothing to do if it was not started. */
void daemon_stop(struct daemon *d);
/* Kills the daemon alone, or the keeper alone; returns when that process is gone. */
void daemon_kill(struct daemon *d);
void keeper_kill(struct daemon *d);
/* SIGSTOP; returns when all threads stand. */
void daemon_pause(const struct daemon *d);
/* Starts another one with the same options and further ones; waits until a process other than the last one answers. */
void daemon_start_again(struct daemon *d, const char *more_options);
/* Waits until a process other than the last one answers. */
void daemon_wait_other(struct daemon *d);
/* Who answers now; 0: nobody. */
pid_t daemon_answers(const struct daemon *d);
/* All processes below the guard (daemon, keeper). */
size_t daemon_family(const struct daemon *d, pid_t *pids, size_t max);
pid_t keeper_pid_of(const struct daemon *d); /* 0: none */

/* What the process holds now. */
struct held {
	unsigned int fds, threads;
	unsigned int maps;    /* of files and shared memory */
	uint64_t arena_bytes; /* blocks of all files of a tmpfs and memfds that it has open */
	uint64_t anon_bytes;  /* private memory */
};
struct held held_by(pid_t pid);
/* Waits until held_by() of the daemon is at most `most` in all but anon_bytes, at most 20 s; returns the last. */
struct held daemon_held_until(const struct daemon *d, const struct held *most);
uint64_t pss_of(pid_t pid);

/* Adds a test for _i from..to-1, if a daemon of this user gets kernel-mode faults; otherwise it takes back only what
 * clients have given up, and the test is skipped. */
#define add_full(tc, test, from, to) add_full_named(tc, #test, test, from, to)
void add_full_named(TCase *tc, const char *name, const TTest *test, int from, int to);

/* ---- the tool */
struct tool {
	int code; /* exit code, or 1000 + signal */
	char *out, *err;
};
void tool_done(struct tool *t);
#define cleanup_tool cleanup(tool_done)
/* `weightd WORDS` against this daemon. */
struct tool tool_run(uid_t uid, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* It worked, and said nothing on stderr. */
void must_tool(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* `weightd WORDS --json`. Owner: the caller. */
json_t *must_json(uid_t uid, const char *words);
/* The first value of that name in `weightd stat --json`, however deep. */
uint64_t must_stat(const char *key);
/* The entry of `weightd ls --json` whose name ends with `name`; NULL: none. Borrowed from *ret_all. */
json_t *listed(uid_t uid, const char *name, json_t **ret_all);
/* `weightd drop --all` (and --force) until nothing is in memory: what was just being read comes after a drop. */
void must_drop_all(bool force);
/* Waits until the value is that or less, at most 20 s; returns the last one. */
uint64_t stat_until_at_most(const char *key, uint64_t value);

/* What the tool does, without a process for each time. -1: nobody answers. */
int admin_connect(void);
/* Drops everything, pinned or not, and waits. 0; the daemon's error (peer_say() has its text); -EPIPE: it is gone. */
int admin_drop_all(int fd);

/* ---- peers */
typedef int64_t (*peer_fn)(const void *arg);
#define PEER_ARG 512
#define PEER_TEXT 256

struct peer {
	pid_t pid;
	int fd;
	const char *doing;
	char text[PEER_TEXT]; /* what it said with its last result */
};
void peer_new(struct peer *p, uid_t uid);
void peer_begin(struct peer *p, const char *doing, peer_fn fn, const void *arg, size_t nbytes);
int64_t peer_end(struct peer *p);
/* Waits until that process sleeps in a fork whose event nobody reads. */
void until_in_fork(pid_t pid);
/* Has a result come? */
bool peer_has_ended(const struct peer *p);
/* Runs fn and waits for its result; `arg` is a pointer to something that is copied. */
#define peer_does(p, fn, arg) (peer_begin((p), #fn, (fn), (arg), sizeof(*(arg))), peer_end(p))
/* The result must be 0. */
#define must_do(p, fn, arg)                                                                        \
	do {                                                                                       \
		int64_t r_ = peer_does(p, fn, arg);                                                \
		ck_assert_msg(r_ == 0, "%s in a client: %lld: %s", #fn, (long long)r_, (p)->text); \
	} while (0)
#define must_end(p)                                                                                       \
	do {                                                                                              \
		int64_t r_ = peer_end(p);                                                                 \
		ck_assert_msg(r_ == 0, "%s in a client: %lld: %s", (p)->doing, (long long)r_, (p)->text); \
	} while (0)
/* It ends by itself, with exit status 0. */
void peer_leave(struct peer *p);
void peer_kill(struct peer *p);
/* In a peer. Returns -1. */
int64_t peer_say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Where its threads and those of the daemon stand, to stderr. */
void dump_process(pid_t pid);
void dump_all(const struct daemon *d, pid_t peer);

/* ---- what peers do with models: slot numbers below MODELS */
#define MODELS 8
struct use {
	char path[300];
	uint64_t seed;
	unsigned int slot, flags; /* do_connect: WD_* flags */
	uint64_t value, value2;
};
extern struct wd *my_wd;
extern struct wd_model *my_models[MODELS];
int64_t do_connect(const void *use); /* way daemon; done by do_open, too */
int64_t do_open(const void *use);
int64_t do_check(const void *use);    /* every byte, beginning at tensor `value` */
int64_t do_touch(const void *use);    /* one byte a page */
int64_t do_populate(const void *use); /* and waits */
int64_t do_release(const void *use);
int64_t do_close(const void *use);
int64_t do_disconnect(const void *use);
int64_t do_stage(const void *use);  /* path: its name; "": ends */
int64_t do_random(const void *use); /* value: reads of 8 bytes at random places, value2 the seed of these; all right? */
int64_t do_storm(
	const void *use); /* the same until the word that peer_stop() points at is set; returns the number of reads */
int64_t do_open_and_check(const void *use);
/* Children by kind; they wait for the word [1], then check every byte. do_fork_end: their results, 0 if all are
 * right. */
enum { FORK, FORK_OF_FORK, RAW_CLONE };
int64_t do_fork(const void *use); /* value: kind; one more child each time */
int64_t do_fork_end(const void *use);
int64_t do_fork_storm(
	const void *use); /* until the stop word: children that read `value` random places; value2: kind */
int64_t do_drop_storm(const void *use); /* until the stop word: drops all, also what is pinned; returns how often */
pid_t raw_clone(void);
/* A word that all processes share: set it to end do_storm(). One for a test. */
_Atomic uint64_t *shared_words(void); /* 64 of them; [0] is the stop word */

/* A model (see make_model()) that anybody may read. Returns what peers need to use it. */
struct use new_model(const char *name, size_t nr, uint64_t nbytes, uint64_t seed, unsigned int slot);
uint64_t file_bytes(const char *path);

#endif
