/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the pager share. Read pager.c's opening comment first: states, threads and invariants.
 */
#ifndef WD_UFD_INTERNAL_H
#define WD_UFD_INTERNAL_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "lib/base/list.h"
#include "ufd/arena.h"
#include "ufd/page.h"
#include "ufd/pager.h"
#include "ufd/policy.h"
#include "ufd/ring.h"
#include "ufd/table.h"
#include "ufd/uffd.h"

enum extent_state { EXT_EMPTY, EXT_READING, EXT_READY, EXT_FAILED };

/* extent.flags */
#define X_OPEN (1u << 0)      /* not registered in this process: the kernel maps it by itself */
#define X_CONT (1u << 1)      /* armed, and mapped page by page (no VMA was left for its borders) */
#define X_WAIT (1u << 2)      /* a thread waits for it */
#define X_WANT (1u << 3)      /* open it when it is READY (rest of a tensor, populate) */
#define X_TOUCHED (1u << 4)   /* faulted since the stage began */
#define X_TAKING (1u << 5)    /* the worker is taking it back or clears its page tables: faults are parked */
#define X_DROP (1u << 6)      /* a drop was asked for */
#define X_CLEAR (1u << 7)     /* its page tables shall be cleared, to see what the stage touches */
#define X_HUGE (1u << 8)      /* on a huge page */
#define X_LOADED (1u << 9)    /* was in memory before: reading it again is a reload */
#define X_POISON (1u << 10)   /* has poisoned pages: see view.poisoned */
#define X_ZAP (1u << 11)      /* its alias is still mapped */
#define X_DEMAND (1u << 12)   /* being read because a thread waits (not ahead) */
#define X_RESERVED (1u << 13) /* counted in pager.resident */
#define X_STUCK (1u << 14)    /* WAY_SERVE: a client's mapping of it could not be armed: it stays */

struct extent {
	uint8_t state;
	uint8_t code;      /* enum fault_code: why it FAILED */
	uint16_t inflight; /* ioctls of the reader under way on it; a take-back starts at zero */
	uint32_t flags;
	int32_t error;     /* FAILED: negative errno, or 0 */
	uint16_t written;  /* written pages that were there when the stage began */
	struct list queue; /* in one of the pager's queues, or in none */
	struct list lru;   /* READY: in one of pager.lru, or in none */
	struct view *view;
	uint64_t failed_ns; /* when it FAILED: touches soon after are answered without another read */
	uint64_t drop_ns;   /* X_DROP: when to give it up */
};

struct view {
	struct pager *pager;
	unsigned int nr_refs;
	unsigned int busy;          /* fills, drops and openings under way; closing waits for zero */
	struct client_view *client; /* WAY_DAEMON (client.c) */
	/* WAY_SERVE (serve.c): where clients have it mapped; and what only the daemon needs to know of it. */
	struct list maps;
	struct serve_view *serve;
	unsigned char *base;
	uint64_t bytes; /* of the arena; the sentinel page follows (not in WAY_MMAP) */
	struct source *source;
	void *owner;
	struct arena arena;
	/* The file, for reads that may not wait for the inode's lock; NULL if it cannot be mapped. */
	unsigned char *source_map;
	struct segment *segs;
	size_t nr_segs;
	struct unit *units;
	size_t nr_units;
	uint64_t unit_max_bytes;
	uint8_t *unit_used; /* one byte a unit */
	struct extent *ext;
	size_t nr_ext;
	uint64_t *poisoned;     /* one bit a page; address space only, until one is */
	unsigned int poisoning; /* touches that will be answered with poison; view_lift() waits for them */
	struct policy_streams streams;
	uint64_t resident;
	uint32_t direct_bytes; /* length of a direct read; halved when the device cannot take it without waiting */
	bool direct_ok;        /* one of that length has worked */
	uint8_t class;
	_Atomic bool forbidden; /* read by handlers */
	bool dropped, dying, read_only, mmap;
	_Atomic bool broken;  /* forked child that could not keep it: touches are errors */
	char stage[64];       /* that forbade it */
	uint64_t seq;         /* order of views and forks */
	unsigned int borders; /* between armed and open runs: each costs a VMA */
	struct pager_stats stats;
};

/* A read of one extent. */
struct fill {
	struct view *view;
	size_t ext;
	uint64_t pos, end; /* arena bytes not yet asked for */
	unsigned int inflight;
	int error;
	enum fault_code code;
	bool used, demand, again, slow, slow_started;
	bool owned;        /* on the heap, not in pager.fills: WAY_SERVE's slow reads take no slot from others */
	struct list queue; /* the slow reader's */
};
#define NR_FILLS 32       /* extents being read at once */
#define NR_FILLS_AHEAD 16 /* of these, at most so many that nobody waits for */
#define RING_DEPTH 256

struct request {
	struct fill *fill; /* NULL: free */
	uint64_t off;      /* arena */
	uint32_t len;
};

/* An address space that has our views: this process (0), and children made by fork until they have replaced theirs. In
 * WAY_SERVE: clients and their children (0 is not used). */
struct mm {
	int uffd;              /* -1: free */
	struct remote *remote; /* WAY_SERVE */
	bool gone;             /* set by the worker; the reader closes it */
	uint64_t seq;
};
#define NR_MMS 4096

/* A waiting page, known to the reader only. */
struct waiting {
	struct extent *ext;  /* NULL: free */
	struct mapping *map; /* WAY_SERVE */
	uint64_t address, since_ns, fault_ns;
};
#define NR_WAITING 256

/* A range of a forked child's that shall be opened. */
struct child_open {
	struct extent *ext;
	int mm;
	uint64_t seq; /* mm's, so that a re-used number is not mistaken */
};
#define NR_CHILD_OPENS 256

struct pager_job {
	struct list node;
	struct pager *pager;
	struct job_range *ranges; /* extents of it: off and len are rounded */
	size_t nr_ranges;
	size_t range, tail_range; /* reading position, and what is not known to be done */
	size_t next, tail;        /* extents in these ranges */
	uint64_t total_bytes;
	_Atomic uint64_t done_bytes;
	_Atomic int state;
	_Atomic bool cancelled;
	bool gentle;
	struct remote *remote; /* WAY_SERVE: in whose mappings it is opened, too; or NULL */
	uint64_t started_bytes;
	_Atomic uint64_t number; /* WAY_DAEMON: the daemon's, while it has one */
	int event_fd;
	pid_t pid;        /* that made it: a forked child has nobody to go on with it */
	pthread_t thread; /* WAY_MMAP */
	bool threaded;
};

enum { LRU_ARMED, LRU_OPEN, NR_LRU };
enum { EVICT_GENTLE = 1, EVICT_ANY = 2 };

struct pager {
	unsigned int nr_refs;
	enum way way;
	struct uffd_caps caps;
	bool forked;           /* we are a child: no threads here */
	bool claimed;          /* we are a child with which the daemon goes on as with its parent */
	struct client *client; /* WAY_DAEMON (client.c) */
	struct list node;      /* in the list of all pagers (fork.c) */

	pthread_mutex_t lock;   /* short; no allocation, no system call that can fault, no UFFDIO under it */
	pthread_cond_t changed; /* drops ended, a view became idle */
	pthread_mutex_t lift;   /* around view_lift(): before the lock */
	struct view **views;    /* sorted by base */
	size_t nr_views;
	uint64_t view_changes; /* counts additions and removals */
	uint64_t seq;

	uint64_t budget_set; /* 0: automatic */
	uint64_t budget, tmpfs_limit;
	uint64_t resident, peak;
	uint64_t freed_ns; /* when memory was last given back */
	struct arena_fs fs;
	struct list lru[3][NR_LRU]; /* by enum view_class */
	size_t nr_lru[3][NR_LRU];
	struct pager_stats stats;

	struct list demand, ahead; /* to read; reader takes */
	struct list open;          /* to open; worker takes */
	struct list drop, clear;   /* worker takes */
	struct list jobs;
	size_t nr_drops;           /* extents with X_DROP or X_CLEAR */
	uint64_t evict_need;       /* bytes that the reader waits for */
	bool evict_any;            /* a thread waits: second chance too, not only what no stage needs */
	unsigned int evict_failed; /* rounds that found nothing: EVICT_* */
	bool stop;

	struct child_open child_opens[NR_CHILD_OPENS];
	unsigned int nr_child_opens;

	struct mm mms[NR_MMS];
	int nr_mms;           /* highest used + 1 */
	atomic_uint fork_seq; /* odd while a fork event is being taken in */
	int reserve_fd;       /* given up to read a fork event when no descriptor is left */
	bool some_gone;
	bool reap; /* worker: look which children are done */

	/* the reader */
	pthread_t reader, worker, slow_thread;
	int epoll_fd, wake_fd, empty_fd; /* empty_fd: a file without a byte, the poison of kernels before 6.6 */
	struct ring *ring;               /* NULL: not allowed here */
	struct fill fills[NR_FILLS];
	unsigned int nr_fills, nr_fills_ahead;
	struct request requests[RING_DEPTH];
	unsigned int nr_requests;
	struct waiting waiting[NR_WAITING];
	unsigned int nr_waiting;

	/* the worker */
	pthread_cond_t work;
	uint64_t budget_checked_ns;
	int pagemap_fd;
	unsigned int max_borders, borders;

	/* the slow reader */
	pthread_cond_t slow_work;
	struct list slow, slow_done;

	struct serve *serve; /* WAY_SERVE (serve.c) */
};

static inline size_t ext_index(const struct extent *x)
{
	return (size_t)(x - x->view->ext);
}

static inline uint64_t ext_off(const struct extent *x)
{
	return ext_index(x) * extent_bytes();
}

static inline uint64_t ext_len(const struct extent *x)
{
	return MIN(extent_bytes(), x->view->bytes - ext_off(x));
}

static inline unsigned char *view_sentinel(const struct view *v)
{
	return v->base + v->bytes;
}

uint64_t now_ns(void);
void deadline_in(struct timespec *t, int timeout_ms); /* for pthread_cond_timedwait() at the pager's conditions */

/* Ends a use of the view (`busy`); its closing waits for the last one. The lock is held. */
static inline void view_idle(struct view *v)
{
	if (--v->busy == 0 && v->dying)
		(void)pthread_cond_broadcast(&v->pager->changed);
}

/* Locking: signals are blocked meanwhile, since a handler may touch a weight, and the pager needs the lock to serve it. */
void pager_lock(struct pager *p, sigset_t *saved);
void pager_unlock(struct pager *p, const sigset_t *saved);
/* The same in the pager's own threads, where they are blocked anyway. */
static inline void own_lock(struct pager *p)
{
	(void)pthread_mutex_lock(&p->lock);
}

static inline void own_unlock(struct pager *p)
{
	(void)pthread_mutex_unlock(&p->lock);
}

void pager_wake_reader(struct pager *p);

/* pager.c; the lock is held */
struct view *view_at(struct pager *p, uint64_t address);
void ext_queue(struct extent *x, struct list *queue); /* moves it there; NULL: nowhere */
void ext_lru(struct extent *x, int list, bool head);  /* moves it there; -1: nowhere */
void ext_open_flags(struct extent *x, bool open);     /* sets X_OPEN and counts borders */
void ext_settle(struct extent *x);                    /* READY, nothing under way: to where its flags want it */
void ext_drop_done(struct extent *x, uint32_t flag);
void ext_unreserve(struct extent *x);
void view_budget_refresh(struct pager *p);
void ext_state(struct extent *x, enum extent_state state); /* sets it, also where clients and a next daemon read it */
void ext_ask_drop(struct extent *x, uint64_t now);
struct extent *view_extent(struct view *v, size_t i);      /* the lock is held; sets it up when it is first asked for */
size_t view_unit_at(const struct view *v, uint64_t off);   /* SIZE_MAX: none */
size_t view_unit_from(const struct view *v, uint64_t off); /* the first that may reach beyond */
void pager_count(struct pager *p, const struct pager_stats *s); /* what a view has counted stays when it is closed */
int view_map_failed(const struct view *v, int error, const char *what, struct wd_err *err);
void view_mark_used(struct view *v, uint64_t off, uint64_t len); /* units inside of this range */
void view_lift(struct view *v, size_t first, size_t nr);         /* takes poison off; no lock held */

void *reader_main(void *pager);
void *worker_main(void *pager);
void *slow_main(void *pager);
bool job_pump(struct pager *p); /* reader, lock held: starts what jobs want; true if there was progress */
/* A demand may stand above the budget when nothing can be dropped; a gentle one drops only what no stage needs. */
enum urgency { FILL_GENTLE, FILL_AHEAD, FILL_DEMAND };
bool fill_start(struct pager *p, struct extent *x,
		enum urgency urgency); /* reader, lock held: false if no slot or no room */

/* worker.c: a run of extents of one view */
struct run {
	struct view *view;
	size_t first, nr;
};
static inline uint64_t run_off(const struct run *r)
{
	return r->first * extent_bytes();
}
static inline uint64_t run_len(const struct run *r)
{
	return MIN(r->nr * extent_bytes(), r->view->bytes - run_off(r));
}
#define PROBE_DEADLINE_NS 50000000 /* a fork that stays in flight longer: the take-back is given up for now */

/* Starts the threads (WAY_SERVE: when what a daemon before us has left is in place). */
int pager_run(struct pager *p, struct wd_err *err);
struct view *view_new(struct pager *p, struct source *src, const struct view_layout *layout, uint64_t bytes);
int view_publish(struct view *v, struct wd_err *err);
void view_free(struct view *v);
void view_map_source(struct view *v);
bool view_layout_equal(const struct view *v, const struct view_layout *l);

/* serve.c: what the pager's threads do differently for the address spaces of others. The lock is held unless told. */
#define SERVE_SLOW_MAX 16 /* extents of one view that its slow thread reads or shall read */
struct mapping *serve_mapping_at(struct pager *p, int mm, uint64_t address);
struct view *mapping_view(const struct mapping *m);
uint64_t mapping_off(const struct mapping *m, uint64_t address);
bool mapping_forbidden(const struct mapping *m);
void serve_publish(struct extent *x);   /* its state, in the table */
void serve_unpublish(struct extent *x); /* there it is not READY any more */
const char *serve_mpol(const struct pager *p);
bool serve_fault(struct mapping *m, struct extent *x, uint64_t address); /* false: the same touch once more */
void serve_want(struct mapping *m, struct extent *x);                    /* opens it there when it is READY */
void serve_settled(struct extent *x);                                    /* READY: it is opened where it is wanted */
void serve_poison(struct mapping *m, uint64_t address);
bool serve_hungry(struct extent *x); /* no lock: there was no room for it; true: it is asked for again */
void serve_fed(struct pager *p);
void serve_wake(struct extent *x); /* FAILED, no lock: waiters everywhere fault again */
bool serve_waits(const struct waiting *w);
bool serve_waited(const struct extent *x);           /* by a thread of a client */
void serve_overtake(const struct waiting *w);        /* its opening takes long */
void serve_on_fork(struct pager *p, int mm, int fd); /* no lock */
void serve_close_gone(struct pager *p, int mm);      /* no lock */
atomic_uint *serve_reading(struct pager *p, int mm); /* odd while its events are being taken in */
void serve_job_want(struct remote *r, struct extent *x);
uint64_t serve_spin_ns(const struct pager *p);
bool serve_let_going(const struct pager *p);
bool serve_arm(struct pager *p, const struct run *r, uint64_t until); /* no lock; cf. arm_and_probe() */
void serve_evict(struct pager *p);
bool serve_tend(struct pager *p); /* what the coordinator does now and then; true: look again at what there is to do */
int serve_slow_start(struct view *v); /* the thread that reads what must be waited for */
void serve_slow_push(struct fill *f);
void serve_slow_first(struct extent *x); /* somebody waits for it now */
bool serve_slow_full(const struct view *v);
void serve_park(struct extent *x);    /* until its slow thread has room */
void serve_view_done(struct view *v); /* what serve.c keeps beside it */
void serve_view_end(struct view *v);  /* no lock: nobody has it any more */

/* slow.c */
void slow_fill(struct fill *f);

/* job.c */
struct remote;
int pager_job_new_for(struct pager *p, struct remote *remote, const struct job_range *ranges, size_t nr, bool gentle,
		      struct pager_job **ret);
void job_end(struct pager_job *j, int state);
int job_thread(struct pager_job *j, void *(*main)(void *job)); /* runs it in a thread of its own */

bool fill_piece(const struct fill *f, struct segment *ret); /* the next part of the file that it needs; false: none */
void fill_count_read(struct fill *f, uint64_t bytes);

/* mmap.c: the same for plain mappings of the file */
int mmap_view_open(struct view *v, struct wd_err *err);
void mmap_view_drop(struct view *v, uint64_t off, uint64_t len);
void mmap_view_stats(struct view *v, struct pager_stats *ret);
void *mmap_job_main(void *job);

/* fork.c */
int pagemap_open(void);
/* Maps the file over what is neither present nor swapped there (nothing that can be touched, if the view is broken). The
 * range is armed and no window is open: nothing else changes page tables. */
int replace_range(struct view *v, int pagemap_fd, uint64_t off, uint64_t len);
void fork_register(struct pager *p);
void fork_unregister(struct pager *p);
bool window_begin(void); /* false: a fork is under way, not now */
void window_end(void);
bool fork_under_way(void);

/* All views of the process, for handlers: no lock. */
int registry_add(struct view *v);
void registry_del(struct view *v);
struct view *registry_find(const void *address);
/* Around registry_find() and what is done with its result; not to be jumped out of. */
void registry_look(void);
void registry_unlook(void);
void registry_forked(void);               /* fork's child: other threads are not here */
struct view *registry_at(unsigned int i); /* NULL: free slot */
unsigned int registry_max(void);

#endif
