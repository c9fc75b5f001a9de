/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients' connections in the daemon: from accept to the last message. Knows the protocol (ufd/wire.h) and the engine
 * (ufd/serve.h); knows neither how the daemon is configured nor how it starts and ends.
 *
 * Threads: the main thread calls what is here, except where noted. It never waits for a client: it accepts, reads
 * HELLO, and answers the notify sockets. Everything that may wait for a client's memory or file is done by the thread
 * that a connection gets after its HELLO, and nobody else waits for that one.
 */
#ifndef WD_CLI_SERVE_SESSION_H
#define WD_CLI_SERVE_SESSION_H

#include <pthread.h>
#include <stdatomic.h>

#include "lib/base/base.h"
#include "lib/base/list.h"
#include "ufd/serve.h"

/* What an event of the main epoll is about: bits 56 to 63 of its number; the rest tells which. */
enum server_event {
	EVENT_LISTEN = 1, /* index */
	EVENT_SIGNAL,
	EVENT_KEEPER,
	EVENT_PENDING, /* number of a connection that has not said HELLO */
	EVENT_NOTIFY,  /* number of a session */
};
#define SERVER_EVENT(kind, id) ((uint64_t)(kind) << 56 | (uint64_t)(id))

struct server {
	struct pager *pager;
	const char *socket; /* path, for texts */
	const char *numa;
	uint64_t started_ns;
	int epoll_fd;
	int userfaultfd; /* /dev/userfaultfd for clients, or -1 */
	uint32_t welcome_flags;
	uint32_t max_views;         /* of one client */
	uint64_t max_views_of_user; /* of all of a user's, but root's and the daemon's own */
	_Atomic uint32_t max_clients, max_clients_per_user;
	_Atomic bool stopping; /* no message is taken up any more */

	pthread_mutex_t lock; /* sessions; what they share with the main thread and the engine's. Held shortly */
	struct list sessions;
	size_t nr_sessions;
	uint64_t next_id;

	struct list pending; /* connections without HELLO, the oldest first; the main thread's */
	size_t nr_pending;
};

void server_init(struct server *s);

/* Takes a new connection in. */
void session_accept(struct server *s, int listen_fd);
/* Events of the main epoll. */
void session_pending(struct server *s, uint64_t id);
void session_notify(struct server *s, uint64_t id);
/* Ends connections that have not said HELLO in time. Return: ms until it has to be called again; -1: not for now. */
int session_expire(struct server *s);

/* For struct serve_config: any thread. */
void session_round(void *server, struct remote *r, uint64_t round);
/* For serve_config.poison. */
void session_poison(void *server, struct remote *r, uint64_t address);
/* A session of a daemon that was here before (serve_session_fn). It starts by session_resume(). */
void session_adopt(void *server, struct remote *r, int control_fd, int notify_fd);
void session_resume(struct server *s);

size_t session_count(struct server *s);

#endif
