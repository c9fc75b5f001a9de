/* SPDX-License-Identifier: Apache-2.0 */
/* Asynchronous reads. The only file with liburing is ring.c. One thread at a time. */
#ifndef WD_UFD_RING_H
#define WD_UFD_RING_H

#include "lib/base/base.h"

struct ring;

int ring_new(unsigned int depth, struct ring **ret);
struct ring *ring_free(struct ring *r); /* NULL is fine; returns NULL */
int ring_fd(const struct ring *r);      /* readable when something has completed */
/* Queues a read that never waits for a lock (RWF_NOWAIT: -EAGAIN then). False: the queue is full. */
bool ring_read(struct ring *r, int fd, void *buf, uint32_t nbytes, uint64_t offset, uint64_t tag);
bool ring_submit(struct ring *r); /* true: the kernel did not take all, call again */
/* Takes completions, up to max; ret_res as read(2) with -errno. Returns how many. */
int ring_reap(struct ring *r, uint64_t *ret_tags, int *ret_res, int max);

#endif
