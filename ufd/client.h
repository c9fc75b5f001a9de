/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The client's side of the daemon, behind pager.h: in way WAY_DAEMON its functions end here. Mappings are ours, what is in
 * memory is the daemon's business. A service thread answers rounds, pings the daemon, and when daemon and keeper are
 * both gone (or silent for 5 s) maps the source files over everything that is neither present nor swapped ("rescue").
 * From then on the pager goes on as WAY_MMAP.
 *
 * The service thread and the fork handlers use no stdio and no malloc (fork holds these locks). It blocks all signals.
 */
#ifndef WD_UFD_CLIENT_H
#define WD_UFD_CLIENT_H

#include "ufd/internal.h"

struct client;      /* in pager.client */
struct client_view; /* in view.client */

/* Connects (socket: NULL: WEIGHTD_SOCKET, or the usual ones in turn), hands the userfaultfd over, starts the thread.
 * -ENOENT, -ECONNREFUSED: no daemon answers; -EACCES: a socket whose peer is not trusted (the text names it);
 * -EPROTONOSUPPORT: another version. */
int client_setup(struct pager *p, const char *socket, bool autostart, struct wd_err *err);
void client_done(struct pager *p);
int client_uffd(const struct pager *p); /* our own descriptor of what the daemon serves by */
/* Maps it; a plain mapping of the file (v->mmap) where there is no daemon any more. */
int client_view_open(struct view *v, struct wd_err *err);
void client_view_close(struct view *v); /* before it is unmapped */

/* None of these may be called with the pager's lock held. */
void client_view_drop(struct view *v);
void client_view_drop_units(struct view *v, size_t first, size_t nr);
int client_sync(struct pager *p, int timeout_ms); /* 0; -ETIMEDOUT */
void client_view_class(struct view *v, enum view_class class);
void client_observe_begin(struct view *v);
void client_observe_drop(struct view *v);
void client_stage(struct pager *p, const char *name); /* NULL: none */
void client_forbid(struct view *v);
void client_allow(struct view *v);                               /* the poison is still to be lifted */
void client_view_stats(struct view *v, struct pager_stats *ret); /* all but written_bytes */
int client_job_start(struct pager_job *j);
void client_job_cancel(struct pager_job *j);
/* Async-signal-safe, no lock: why an extent is not readable. False: nothing is known against it. */
bool client_reason(const struct view *v, uint64_t off, enum fault_code *ret_code, int *ret_error);

/* In fork's child, single-threaded: claims this address space from the daemon and goes on with it (true). False: the
 * views must be replaced by mappings of their files. */
bool client_forked(struct pager *p);

#endif
