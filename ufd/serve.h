/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pager as the daemon runs it (way WAY_SERVE): arenas without mappings here, mapped by *remotes*, the address spaces
 * of clients and of their forked children. Reading, states, policy and budget are those of pager.c; serve.c adds
 * what concerns other processes. Knows neither sockets nor the protocol: cli/serve_*.c does.
 *
 * Threads: all functions from any thread. Those marked [may wait] wait for the client's memory (its mmap_lock) or for its
 * file, for as long as the client or its file server likes: only from a thread that serves that client alone.
 */
#ifndef WD_UFD_SERVE_H
#define WD_UFD_SERVE_H

#include <sys/types.h>

#include "lib/base/base.h"
#include "ufd/keeper.h"
#include "ufd/pager.h"

struct remote;

enum serve_numa { SERVE_NUMA_DEFAULT, SERVE_NUMA_INTERLEAVE, SERVE_NUMA_LOCAL, SERVE_NUMA_NODE };

struct serve_config {
	uint64_t budget_bytes;    /* 0: automatic */
	unsigned int pin_percent; /* of the budget that one user may pin; 0: 50 */
	unsigned int max_maps;    /* mappings of one remote; 0: 4096 */
	enum serve_numa numa;
	unsigned int numa_node;
	unsigned int spin_us;  /* how long the reader looks for the next fault before it sleeps */
	struct keeper *keeper; /* borrowed; NULL: none (tests) */
	/* Asks a client's session for its touched extents (WIRE_ROUND). Called without a lock; must not wait. */
	void (*round)(void *arg, struct remote *r, uint64_t round);
	/* Before 6.6: the client's session asks it to make this page an error (WIRE_POISON). The same rules. */
	void (*poison)(void *arg, struct remote *r, uint64_t address);
	void *arg;
};

/* A pager without any client. End it with pager_unref() after all remotes, views and jobs are let go; a daemon simply
 * exits. */
int serve_new(const struct serve_config *config, struct pager **ret, struct wd_err *err);
/*
 * The same, taking over what `config->keeper` holds: arenas with their READY extents, remotes, mappings. Serves them when
 * it returns. `session`: called for each remote that had a session, to make one again (fds become the callee's).
 */
typedef void (*serve_session_fn)(void *arg, struct remote *r, int control_fd, int notify_fd);
int serve_adopt(const struct serve_config *config, serve_session_fn session, void *arg, struct pager **ret,
		struct wd_err *err);
/* Stops serving so that another process may take over: no thread of the pager touches a client, an arena or the table
 * after it returns (or does not return: -ETIMEDOUT after 2 s; then exit at once all the same). */
int serve_let_go(struct pager *p);

/* ---- remotes */
struct remote_info {
	pid_t pid;
	uid_t uid;
	bool user_only; /* its userfaultfd has user-mode faults only: nothing of its is taken back but what it gives back */
	bool armed;     /* a child that lost its context: UFFDIO_API is done */
	char name[64]; /* program */
};

/*
 * Takes a client's userfaultfd (closed on failure, too) on which no UFFDIO_API was done (unless `armed`).
 * -EPROTO: it is none, or was used; -EUSERS: the limit. Its number and token are made here.
 */
int remote_new(struct pager *p, int uffd, const struct remote_info *info, struct remote **ret, struct wd_err *err);
uint64_t remote_id(const struct remote *r);
const unsigned char *remote_token(const struct remote *r); /* 16 bytes */
const struct remote_info *remote_info(const struct remote *r);
/* The session's word, set by it (NULL: it has none any more). Read by config.round. */
void remote_set_session(struct remote *r, void *session);
void *remote_session(struct remote *r);
/* The sockets of its session, for the keeper (borrowed). */
int remote_keep_session(struct remote *r, int control_fd, int notify_fd);
/* The session is gone. The remote lives until its address space has ended (ESRCH). The pointer is no longer the caller's. */
void remote_hup(struct remote *r);

/* A forked child asks for itself, see struct wire_claim. [may wait] */
int remote_claim(struct pager *p, uint64_t parent, const unsigned char token[16], struct wd_err *err);
/* *ret_uffd: the caller's. -ENOENT: no such child waits. */
int remote_claimed(struct pager *p, uint64_t parent, uint64_t number, const struct remote_info *info,
		   struct remote **ret, int *ret_uffd, struct wd_err *err);

/* ---- views and mappings */
/*
 * The view of that source and layout, made if there is none (then `src` is referenced, and *ret_known is false). Equal
 * identity but for ctime: shared after the resident bytes were compared with the file. [may wait: reads the file]
 * `uid` may see it in serve_list() from now on. *ret is a reference: serve_detach().
 */
int serve_attach(struct pager *p, struct source *src, const struct view_layout *layout, uint64_t bytes, uid_t uid,
		 struct view **ret, bool *ret_known, struct wd_err *err);
void serve_detach(struct view *v);
uint64_t view_id(const struct view *v);
uint64_t view_arena_bytes(const struct view *v);
/* Read-only descriptors for clients, borrowed. */
int view_arena_fd(const struct view *v);
int view_table_fd(const struct view *v);
uint64_t view_table_bytes(const struct view *v);

/* The client has mapped the view's arena at `address` (of its own, PROT_NONE, not touched): armed, its READY extents
 * opened. Takes a reference of the view. Twice the same is no error. *ret_state_fd: the caller's. [may wait] */
int serve_map(struct remote *r, struct view *v, uint64_t address, int *ret_state_fd, uint64_t *ret_state_bytes,
	      struct wd_err *err);
/* From now on nothing is done to that range; waits for what is under way. [may wait] */
int serve_unmap(struct remote *r, uint64_t view, uint64_t address);

struct serve_range {
	uint32_t first, nr; /* extents */
};
enum serve_hold { SERVE_HOLD_ADD, SERVE_HOLD_REMOVE, SERVE_HOLD_DROP }; /* the numbers of WIRE_HOLD_* */
/* SERVE_HOLD_DROP returns at once; without a range it waits until drops have ended: -ETIMEDOUT after 200 ms. */
int serve_hold(struct remote *r, uint64_t view, enum serve_hold hold, const struct serve_range *ranges, size_t nr);
/* What the client has touched since the last round; serve_round_done() after the last one. */
int serve_touched(struct remote *r, uint64_t view, const struct serve_range *ranges, size_t nr);
void serve_round_done(struct remote *r, uint64_t round);
void serve_stage(struct remote *r, const char *name); /* "": none runs */
int serve_class(struct remote *r, uint64_t view, enum view_class class);
int serve_forbid(struct remote *r, uint64_t view, bool on); /* [may wait] */
int serve_view_stats(struct remote *r, uint64_t view, struct pager_stats *ret);

/* Populate; `r` (may be NULL: only read) gets what has come opened, too. Views must be attached or mapped by the caller.
 * The rest is pager_job_*(). */
int serve_job(struct pager *p, struct remote *r, const struct job_range *ranges, size_t nr, bool gentle,
	      struct pager_job **ret);
/* A view of this number that `r` has mapped; borrowed while it is mapped. NULL: none. */
struct view *remote_view(struct remote *r, uint64_t view);

/* ---- for the tool */
struct serve_client_info {
	pid_t pid;
	uid_t uid;
	bool child; /* forked, without a session of its own */
	const char *name, *stage;
	uint64_t held_bytes, mapped_bytes;
};
struct serve_view_info {
	const char *name; /* as the first client named it */
	uint64_t id, dev, ino, size, bytes, resident_bytes, huge_bytes, pinned_bytes, read_bytes, dropped_bytes;
	bool changed; /* the file is another one now; kept for those who have it */
	unsigned int nr_clients;
	const struct serve_client_info *clients;
	uint64_t idle_ns; /* since somebody last had it mapped; 0: mapped */
};
/* Views that `uid` may see (root: all), each once; what is passed is valid only during the call of fn. No lock held. */
int serve_list(struct pager *p, uid_t uid, int (*fn)(void *arg, const struct serve_view_info *v), void *arg);

#define SERVE_BUCKETS 24 /* bucket i: waits of [2^i, 2^(i+1)) us, the first from 0, the last without end */
struct serve_counts {
	struct pager_stats stats;
	uint64_t clients, children, views, mappings, pinned_bytes,
		foreign_bytes; /* foreign: allocated in arenas, not in the table: taken back */
	uint64_t take_backs, take_backs_given_up, rounds, forks;
	uint64_t wait[SERVE_BUCKETS]; /* faults by how long the thread stood */
	const char *arena;            /* "tmpfs", "memfd" */
	const char *numa;             /* as configured */
	uint64_t last_used_ns;        /* CLOCK_MONOTONIC: when there last was a client */
};
void serve_counts(struct pager *p, struct serve_counts *ret);

/* Takes back. `id` NULL: any source. bytes 0: all of it, else at least so many in the usual order. Pinned ones only with
 * force. -EPERM: others use it and uid is neither root nor the daemon's. Waits until done (at most timeout_ms). */
int serve_drop(struct pager *p, const struct source_id *id, uint64_t bytes, bool force, uid_t uid, int timeout_ms,
	       uint64_t *ret_dropped_bytes, struct wd_err *err);
/* Against the user's share of the budget: -ENOSPC. -ENOENT: nobody has attached this source. */
int serve_pin(struct pager *p, const struct source_id *id, bool pin, uid_t uid, struct wd_err *err);

#endif
