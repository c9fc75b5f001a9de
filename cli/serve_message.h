/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What one client has in the daemon, and the messages of its control socket. Only serve_session.c and serve_message.c
 * know this.
 */
#ifndef WD_CLI_SERVE_MESSAGE_H
#define WD_CLI_SERVE_MESSAGE_H

#include "cli/serve_session.h"
#include "ufd/wire.h"

/* A view that the client has attached. */
struct attached {
	struct view *view;
	uint64_t id;
};

struct job {
	struct pager_job *job;
	uint64_t id;
};

struct session {
	struct list node; /* in server.sessions */
	struct server *server;
	uint64_t id;
	unsigned int nr_refs; /* server.lock */
	int control_fd, notify_fd;
	pid_t pid;
	uid_t uid;
	char name[WIRE_NAME];
	struct remote *remote; /* server.lock; NULL: a tool, or not yet */

	/* the thread's */
	struct attached *views;
	_Atomic size_t nr_views; /* others only read it */
	size_t views_room;
	struct job *jobs;
	size_t nr_jobs, jobs_room;
	uint64_t next_job;
	uint64_t parent; /* of CLAIM */
	union wire_any message;
};

/* The rest is for the session's thread. */

/* Does what c->message asks for, with the descriptors that came (those it takes are -1 afterwards), and answers.
 * Return: false: the connection has to end. */
bool message_answer(struct session *c, int fds[]);
/* A message came, but its descriptors could not be taken. Return: as above. */
bool message_no_descriptor(const struct session *c);
/* Lets go of all that the client has attached, and of its jobs. */
void message_let_go(struct session *c);

void welcome_fill(const struct server *s, struct wire_welcome *w, uint32_t seq);

#endif
