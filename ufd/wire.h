/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The protocol between a client (libweightd, the tool) and the daemon: SOCK_SEQPACKET, one message a packet, native byte
 * order (both ends are on one machine), fixed-size structs, descriptors beside them. Knows sockets; knows no pager.
 *
 * Two sockets a client. *Control*: the client asks, the daemon answers, one at a time, in order. *Notify* (a socketpair
 * end that WELCOME brings): the daemon tells (ROUND, RESUME), the client pings. Both server ends are also held by the
 * keeper, so that a hang-up means: daemon and keeper are both gone.
 *
 * A conversation:
 *   HELLO -> WELCOME (+ notify socket, + an open /dev/userfaultfd where the daemon has one)
 *   UFFD (+ userfaultfd on which no ioctl was made but what opens it) -> WELCOME    a client with memory: mm and token
 *   ATTACH (+ file, + the same file opened O_DIRECT, + layout) -> ATTACHED (+ arena, + table, both read-only)
 *   MAP (address; mapped PROT_NONE, not touched) -> MAPPED (+ state)               then the client makes it readable
 *   ... HOLD, STAGE, CLASS, FORBID, JOB ...
 *   UNMAP -> OK                                                                    before the client unmaps
 * A forked child (child handler of fork): HELLO -> WELCOME, CLAIM -> OK (see wire_claim), CLAIMED -> WELCOME (+ its
 * userfaultfd).
 * A tool: HELLO -> WELCOME, then LS, STAT, DROP, PIN, SHUTDOWN, ATTACH + JOB (prefetch).
 *
 * Everything that comes from a peer goes through wire_check() first: type, size, counts, text that ends, known flags.
 * Different WIRE_VERSION: WELCOME says -EPROTONOSUPPORT with the daemon's version, and the client falls back.
 * HELLO, WELCOME and wire_head never change.
 */
#ifndef WD_UFD_WIRE_H
#define WD_UFD_WIRE_H

#include "lib/base/base.h"

#define WIRE_MAGIC 0x64747764u /* "dwtd" */
#define WIRE_VERSION 1u
#define WIRE_MAX_BYTES 65536 /* of a message */
#define WIRE_MAX_FDS 4
#define WIRE_NAME 64
#define WIRE_PATH 1024 /* of a name for people; longer ones are cut in front */
#define WIRE_TEXT 512  /* of an error */
#define WIRE_RANGES 1024
#define WIRE_MAX_SEGS (1u << 20)
#define WIRE_MAX_UNITS (1u << 22)

enum wire_type {
	/* control, client -> daemon */
	WIRE_HELLO = 1,
	WIRE_UFFD,
	WIRE_CLAIM,
	WIRE_CLAIMED,
	WIRE_ATTACH,
	WIRE_DETACH, /* the view of an ATTACH that is not (or no longer) mapped is let go */
	WIRE_MAP,
	WIRE_UNMAP,
	WIRE_HOLD,
	WIRE_STAGE,
	WIRE_CLASS,
	WIRE_FORBID,
	WIRE_JOB,
	WIRE_JOB_STATE,
	WIRE_JOB_END, /* cancels and forgets it */
	WIRE_VIEW_STAT,
	WIRE_LS,
	WIRE_STAT,
	WIRE_DROP,
	WIRE_PIN,
	WIRE_SHUTDOWN,
	WIRE_CLIENT_LAST,
	/* control, daemon -> client */
	WIRE_WELCOME = 64,
	WIRE_OK,
	WIRE_ERROR,
	WIRE_ATTACHED,
	WIRE_MAPPED,
	WIRE_JOB_INFO,
	WIRE_STATS,
	WIRE_JSON, /* + a memfd with the text */
	/* notify */
	WIRE_PING = 128, /* client -> daemon */
	WIRE_PONG,       /* daemon -> client */
	WIRE_ROUND,      /* daemon -> client: tell what you touched since the last round (clients without stages) */
	WIRE_TOUCHED,    /* client -> daemon, any number */
	WIRE_ROUND_DONE, /* client -> daemon */
	WIRE_RESUME,     /* daemon -> client: a new daemon has taken over; ask again what you waited for */
	WIRE_POISON,     /* daemon -> client: this page shall be an error (struct wire_page) */
};

struct wire_head {
	uint32_t magic, type, nbytes; /* nbytes: of the whole message */
	uint32_t seq;                 /* an answer has its question's */
};

/* WIRE_OK and others that carry nothing else than the head. */
struct wire_plain {
	struct wire_head h;
};

struct wire_hello {
	struct wire_head h;
	uint32_t version;
	uint32_t flags;       /* 0 */
	char name[WIRE_NAME]; /* the program, for people */
};

enum {
	WIRE_EVENT_FORK = 1 << 0, /* the daemon may ask for fork events: forked children are served */
	WIRE_POISONS = 1 << 2,    /* the kernel has UFFDIO_POISON; else the daemon asks by WIRE_POISON */
	WIRE_PRIVATE = 1 << 1,    /* an arena can be written by nobody but the daemon, root in a container included */
};

struct wire_welcome {
	struct wire_head h;
	uint32_t version;
	int32_t status;          /* 0; -EPROTONOSUPPORT; -EUSERS: a limit on clients (see text) */
	uint32_t flags;          /* WIRE_EVENT_FORK... */
	uint32_t pid;            /* of the daemon */
	uint64_t mm;             /* this client's number */
	unsigned char token[16]; /* by which a forked child proves whose it is */
	uint64_t page_bytes, extent_bytes;
	char release[WIRE_NAME]; /* WD_VERSION of the daemon */
	char text[WIRE_TEXT];
};

/* Answer to anything that failed. The text is one line without a newline. */
struct wire_error {
	struct wire_head h;
	int32_t status; /* negative errno */
	uint32_t pad;
	char text[WIRE_TEXT];
};

enum {
	WIRE_UFFD_USER_ONLY = 1 << 0, /* opened with UFFD_USER_MODE_ONLY */
	WIRE_UFFD_ARMED = 1 << 1, /* a child that lost its context: the API is done, its views are registered with it */
};

struct wire_uffd {
	struct wire_head h;
	uint32_t flags, pad;
};

/* The child has given its sentinels back (MADV_DONTNEED) before it asks. The daemon puts a number into the sentinel of
 * each unclaimed child of that parent, by UFFDIO_COPY; OK when all have theirs. Who finds its number claims it. */
struct wire_claim {
	struct wire_head h;
	uint64_t parent; /* wire_welcome.mm of the parent */
	unsigned char token[16];
};

struct wire_claimed {
	struct wire_head h;
	uint64_t number; /* what the first 8 bytes of the sentinel said */
};

/* Descriptors: the file (buffered description), the layout, then, with WIRE_DIRECT, the file again opened O_DIRECT. The
 * layout is a memfd sealed against writing and shrinking: nr_segs structs segment, then nr_units structs unit. */
enum { WIRE_DIRECT = 1 << 0 };

struct wire_attach {
	struct wire_head h;
	uint32_t flags, nr_segs, nr_units, pad;
	uint64_t bytes;       /* of the arena */
	char name[WIRE_PATH]; /* as the user named it */
};

struct wire_attached {
	struct wire_head h;
	uint64_t view;
	uint64_t bytes;       /* of the arena; the sentinel's page follows */
	uint64_t table_bytes; /* see ufd/table.h */
	uint32_t known;       /* somebody had attached it before */
	uint32_t pad;
};

/* WIRE_DETACH, WIRE_VIEW_STAT */
struct wire_view {
	struct wire_head h;
	uint64_t view;
};

/* WIRE_MAP, WIRE_UNMAP. [address, +bytes + one page) is a private mapping of the arena's fd from offset 0. */
struct wire_map {
	struct wire_head h;
	uint64_t view, address;
};

struct wire_mapped {
	struct wire_head h;
	uint64_t state_bytes; /* see struct map_state in ufd/table.h */
};

struct wire_range {
	uint32_t first, nr; /* extents */
};

enum wire_hold {
	WIRE_HOLD_ADD,    /* these are held: the running stage uses them */
	WIRE_HOLD_REMOVE, /* no longer */
	WIRE_HOLD_DROP, /* no longer, and dropped now if nobody else holds them; the answer does not wait for it. Without
			   * a range: answered when drops have ended, or by -ETIMEDOUT after 200 ms */
};

/* WIRE_HOLD, WIRE_TOUCHED (hold is 0 there). nbytes counts only the ranges that are there. */
struct wire_ranges {
	struct wire_head h;
	uint64_t view;
	uint32_t hold, nr_ranges;
	struct wire_range ranges[WIRE_RANGES];
};

struct wire_stage {
	struct wire_head h;
	char name[WIRE_NAME]; /* empty: the stage has ended */
};

/* WIRE_CLASS (value: enum view_class), WIRE_FORBID (0 or 1) */
struct wire_value {
	struct wire_head h;
	uint64_t view;
	uint32_t value, pad;
};

struct wire_job_range {
	uint64_t view, off, len; /* arena bytes */
};

struct wire_job {
	struct wire_head h;
	uint32_t gentle, nr_ranges;
	struct wire_job_range ranges[WIRE_RANGES];
};

/* WIRE_JOB_STATE, WIRE_JOB_END */
struct wire_job_id {
	struct wire_head h;
	uint64_t job;
};

/* Answer to JOB (+ an eventfd that becomes readable at the end), JOB_STATE */
struct wire_job_info {
	struct wire_head h;
	uint64_t job, done_bytes, total_bytes;
	int32_t state; /* 0 under way, 1 done, negative errno */
	uint32_t pad;
};

/* Answer to VIEW_STAT: struct pager_stats of this client's use of the view */
struct wire_stats {
	struct wire_head h;
	uint64_t budget_bytes, resident_bytes, peak_bytes, huge_bytes;
	uint64_t read_bytes, reads, faults, dropped_bytes, reloads, reload_bytes, failed;
};

/* WIRE_DROP, WIRE_PIN: + an open file, unless flags say all. For the daemon's user and root where others use it. */
enum {
	WIRE_ALL = 1 << 0,   /* drop: every source */
	WIRE_FORCE = 1 << 1, /* drop: pinned ones too */
	WIRE_UNPIN = 1 << 2,
};

struct wire_admin {
	struct wire_head h;
	uint32_t flags, pad;
	uint64_t bytes; /* drop: at least so many, by the usual order; 0: all of what is named. Answer (WIRE_STATS):
			 * dropped_bytes and resident_bytes */
};

/* Before 6.6 only the process itself can make a touch of its page an error: by mapping an empty file there. */
struct wire_page {
	struct wire_head h;
	uint64_t address;
};

struct wire_round {
	struct wire_head h;
	uint64_t round;
};

union wire_any {
	struct wire_head h;
	struct wire_hello hello;
	struct wire_welcome welcome;
	struct wire_error error;
	struct wire_uffd uffd;
	struct wire_claim claim;
	struct wire_claimed claimed;
	struct wire_attach attach;
	struct wire_attached attached;
	struct wire_view view;
	struct wire_map map;
	struct wire_mapped mapped;
	struct wire_ranges ranges;
	struct wire_stage stage;
	struct wire_value value;
	struct wire_job job;
	struct wire_job_id job_id;
	struct wire_job_info job_info;
	struct wire_stats stats;
	struct wire_admin admin;
	struct wire_round round;
	struct wire_page page;
	unsigned char bytes[WIRE_MAX_BYTES];
};

/*
 * Is this a whole message of its type, with nothing in it that no peer of this version writes (`pad` is 0)? (Views, jobs
 * and addresses, and whether this peer may send this type at all, are the caller's to look up.) `nr_fds`: how many came
 * with it. Return: 0; -EPROTO.
 */
int wire_check(const union wire_any *m, size_t nbytes, unsigned int nr_fds);

/* Sets the head: of a fixed message (wire_head_of) or one with ranges. */
#define WIRE_INIT(m, t, s) ((m).h = (struct wire_head){ WIRE_MAGIC, (t), sizeof(m), (s) })
/* nbytes of a wire_ranges or wire_job with that many ranges. */
uint32_t wire_ranges_bytes(uint32_t nr_ranges);
uint32_t wire_job_bytes(uint32_t nr_ranges);

/*
 * Sends one message (h.nbytes of it) with descriptors. Async-signal-safe; no SIGPIPE. MSG_DONTWAIT with `wait` false.
 * Return: 0; -EAGAIN the peer does not read; -EPIPE, -ECONNRESET it is gone; others.
 */
int wire_send(int socket, const void *message, const int *fds, unsigned int nr_fds, bool wait);

/*
 * Receives one, close-on-exec descriptors, and checks it (wire_check). Async-signal-safe. All descriptors of a refused
 * or truncated message are closed; fds[] is -1 where there is none, also after a failure. *ret_nr_fds may be less than
 * the message needs only if wire_check() allows it. Waits at most timeout_ms (-1: no limit; 0: not at all).
 * Return: 1 a message; 0 the peer has hung up; -EAGAIN none within the time; -EPROTO no message of ours (a next one can
 * be received all the same); -EMFILE this process had no descriptor free for those that came; others.
 */
int wire_recv(int socket, union wire_any *ret, int fds[static WIRE_MAX_FDS], unsigned int *ret_nr_fds, int timeout_ms);

/* A sealed memfd with these two parts (either may be empty). Return: fd or negative errno. */
int wire_blob(const void *a, size_t a_bytes, const void *b, size_t b_bytes);
/* Reads such a one of exactly nbytes from a peer: refuses what is no memfd sealed against writing and shrinking before
 * anything else is done with it. Return: 0; -EPROTO; -ENOMEM. Owner of *ret: the caller (free). */
int wire_blob_read(int fd, size_t nbytes, void **ret);

/* ---- where daemons listen, and which are trusted (wire_connect.c) */
#define WIRE_SOCKET 108 /* bytes of a path, NUL included: sockaddr_un.sun_path */

/*
 * Connects to a daemon: at `path`; NULL: at WEIGHTD_SOCKET; else at the system's socket, then at the user's own. The peer
 * (whoever called listen()) must be root, this user, or the user "weightd". *ret_path: where, also on failure (the one
 * that the text is about). Waits at most 5 s.
 * Return: 0; -ENOENT, -ECONNREFUSED no daemon answers; -EACCES refused, by either side; -ETIMEDOUT it does not accept;
 * others. The text names the socket.
 */
int wire_connect(const char *path, int *ret_fd, char ret_path[static WIRE_SOCKET], struct wd_err *err);
/* The part of it that is async-signal-safe (a forked child, to a path that its parent was connected to): trusts nobody,
 * tells the peer's uid. Return: 0; negative errno of connect(). */
int wire_connect_to(const char *path, int *ret_fd, uint32_t *ret_uid);
bool wire_trusted(uint32_t uid);
/* Where a daemon of this user listens by default, and a client looks last: the system's socket for root; else in
 * XDG_RUNTIME_DIR, /run/user/UID, or /tmp/weightd-UID (the daemon makes that folder, 0700). Return: 0; -ENAMETOOLONG. */
int wire_socket_own(char ret[static WIRE_SOCKET]);
/* client_start.c: starts the user's own daemon and waits until it listens. `socket`: NULL: where this user's is. */
int client_autostart(const char *socket, struct wd_err *err);

#endif
