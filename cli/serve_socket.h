/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the daemon listens, how it is started by socket activation, and what it tells a service manager
 * (sd_listen_fds(3) and sd_notify(3), without libsystemd). Knows sockets and paths; knows neither clients nor the
 * pager.
 *
 * Threads: none; everything here is for the main thread, and all but service_notify() for before it has company.
 */
#ifndef WD_CLI_SERVE_SOCKET_H
#define WD_CLI_SERVE_SOCKET_H

#include "lib/base/base.h"

#define LISTEN_MAX 4

/* Sockets that a service manager has opened for us; LISTEN_* leave the environment. Return: how many; negative
 * errno. */
int listen_passed(int fds[static LISTEN_MAX], struct wd_err *err);
/* The path that a socket is bound to. Return: 0; -EINVAL it has none. */
int listen_path(int fd, char *ret, size_t size);

/* Keeps others from starting at the same path until it is closed; the file is gone then. Return: fd; negative errno. */
int listen_lock(const char *path, struct wd_err *err);
void listen_unlock(int fd, const char *path);

/* Does somebody listen there? *ret_pid: who called listen(); 0: hidden from us. */
bool listen_alive(const char *path, int *ret_pid);
/* Makes the folder of a default path, where it is ours to make. */
int listen_folder(const char *path, struct wd_err *err);
/* Listens there with this mode from the first moment on, in the place of a dead one's socket. Return: fd; negative
 * errno. */
int listen_at(const char *path, uint32_t mode, struct wd_err *err);

/* Remembers NOTIFY_SOCKET, which leaves the environment, also if it is not `ours` (but that of a service whose process
 * has started us beside itself). Return: is there a service manager? */
bool service_init(bool ours);
/* Tells it ("READY=1\nSTATUS=..."); nothing without one. */
void service_notify(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
