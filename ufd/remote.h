/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What serve.c and remote.c share: address spaces of clients, and where they have views mapped.
 */
#ifndef WD_UFD_REMOTE_H
#define WD_UFD_REMOTE_H

#include "ufd/internal.h"
#include "ufd/serve.h"

/* mapping.flags, one byte an extent */
#define M_OPEN 1u     /* not registered there (a hint: a fork or the client may have made it otherwise) */
#define M_WAIT 2u     /* a thread of the client waits for it */
#define M_WANT 4u     /* open it when it is READY */
#define M_OPENING 16u /* its worker is at it; a wait that begins now sets M_WAIT again */
#define M_HELD 8u     /* the client's running stage uses it, or it was used since the last round */

enum arm_result { ARM_NONE, ARM_ASKED, ARM_DONE, ARM_FORKING, ARM_FAILED };

struct mapping {
	struct list node; /* view.maps */
	struct view *view;
	struct remote *remote;
	uint64_t id;
	unsigned char *base;
	uint8_t *flags;
	size_t work_lo, work_hi; /* extents that may have M_WAIT or M_WANT */
	unsigned int busy;       /* ioctls of the remote's threads under way on it */
	bool forbidden, pinned;
	bool ready;  /* registered: before that nothing is opened in it */
	bool lost;   /* nothing of it is there any more (the client has replaced it); removed by the worker */
	uint8_t arm; /* enum arm_result */
	uint64_t arm_gen;
	struct run arm_run;
	unsigned int arm_forks;
	unsigned char *state; /* shared with the client: struct at table.h; NULL: a child's that has not asked */
	int state_fd;
	uint64_t state_bytes;
};

#define NR_POISON 64
#define NR_CONT 16

/* Threads of each: the worker does what waits for that address space's mmap_lock; `express`, started when it is first
 * needed, gives a page a CONTINUE that the worker takes long to open. Both may be held up by that client only. */
struct remote {
	struct pager *pager;
	int mm; /* in pager.mms */
	uint64_t id, parent;
	unsigned char token[16];
	struct remote_info info;
	struct uffd_caps caps;
	char stage[64];
	struct mapping **maps; /* sorted by base */
	size_t nr_maps, room_maps;
	unsigned int nr_refs; /* the table's, the worker's, the express thread's, the session's */
	void *session;
	bool abandoned; /* a view of its could not be taken over: it must map its files */
	bool child, claimed, hup, gone, express_started, express_busy, worker_missing;
	pthread_cond_t work, express, changed;
	unsigned int nr_arms, borders;
	bool working;        /* its worker is in an ioctl */
	atomic_uint reading; /* odd while the reader takes its events in */
	unsigned int forks;  /* children taken in */
	size_t kept_maps;    /* adopted: how many mappings it had when it was made */
	uint64_t stall_ns, stalled_until_ns;
	uint64_t probe_ns, probe_every_ns;
	bool number_wanted;
	uint64_t round; /* asked for, and not answered yet; 0: none */
	struct {
		struct mapping *map;
		uint64_t address;
	} poison[NR_POISON], cont[NR_CONT];
	unsigned int nr_poison, nr_cont;
};

struct serve_view {
	uint64_t id;
	struct table *table;
	uint64_t table_bytes;
	int table_fd, table_ro_fd;
	uid_t *uids; /* may see it */
	size_t nr_uids;
	uid_t *pins;
	size_t nr_pins;
	uint64_t idle_since_ns; /* not mapped; 0: mapped */
	bool stale;             /* nobody can open it again: the file is gone or another one */
	bool suspect;           /* adopted: not armed everywhere, nor its unfinished extents (X_TAKING) punched, yet */
	bool end;
	/* the slow thread */
	struct list slow, parked;
	unsigned int nr_slow;
	pthread_cond_t work;
};

struct serve {
	struct serve_config config;
	struct pager *pager;
	char mpol[64];
	_Atomic uint64_t next_id;
	pthread_mutex_t attach; /* one at a time makes a view: before the lock */
	pthread_cond_t armed;
	uint64_t arm_gen;
	uint64_t round, round_ns;
	uint64_t tended_ns, foreign_ns;
	bool let_go, running, keeper_lost;
	struct list hungry;      /* extents for which the arenas' file system had no room */
	uint64_t hungry_ns;      /* since when; 0: there is room */
	unsigned int nr_suspect; /* views that are being taken over */
	uint64_t suspect_ns;
	pthread_mutex_t keep; /* around keep_view(): the last state is the one that is kept */
	unsigned int nr_remotes;
	struct serve_counts counts;
};

/* A small thread that nobody waits for. 0 or a negative errno. */
int thread_detached(void *(*fn)(void *), void *arg, const char *name);

/* remote.c; the lock is held unless told */
int remote_make(struct pager *p, uint64_t id, struct remote **ret); /* not in the table yet */
int remote_enter(struct remote *r, int uffd);                       /* no lock: into the table, and its worker runs */
int remote_adopt(struct pager *p, const void *blob, size_t nbytes, struct remote **ret, uint32_t *ret_nr_maps);
int mapping_adopt(struct pager *p, const void *blob, size_t nbytes, int state_fd); /* no lock; takes state_fd if 0 */
void remote_inherit(struct remote *child, size_t nr_maps); /* what it lacks of nr_maps: its parent's */
void remote_tend(struct remote *r);
void remote_put(struct remote *r);
int remote_add_map(struct remote *r, struct mapping *m);
void remote_del_map(struct mapping *m); /* waits for its ioctls; then it is freed */
struct mapping *mapping_new(struct remote *r, struct view *v, uint64_t base, uint64_t id); /* no lock */
void mapping_free(struct mapping *m);                                                      /* no lock */
int mapping_state(struct mapping *m); /* no lock: makes its shared state */
void mapping_want_ready(struct mapping *m);
struct mapping *remote_map(struct remote *r, uint64_t view);
void remote_kick(struct mapping *m, size_t ext, uint8_t flag);
void mapping_closed(struct mapping *m, size_t first, size_t nr); /* armed: the flags say so */
void pin_apply(struct view *v);                                  /* no lock: pinned, or not any more */
bool ext_held(const struct extent *x, bool stages);
int keep_put(struct pager *p, uint64_t key, const void *blob, size_t nbytes, const int *fds, unsigned int nr_fds);
void keep_del(struct pager *p, uint64_t key);
int keep_remote(struct remote *r, int uffd); /* no lock */
int keep_map(struct mapping *m);             /* no lock */
void keep_maps(struct remote *r);            /* no lock */

#endif
