/* SPDX-License-Identifier: Apache-2.0 */
#include "ufd/ring.h"

#include <liburing.h>
#include <sys/uio.h>

struct ring {
	struct io_uring uring;
};

int ring_new(unsigned int depth, struct ring **ret)
{
	struct ring *r = calloc(1, sizeof(*r));
	int e;

	if (!r)
		return -ENOMEM;
	e = io_uring_queue_init(depth, &r->uring, 0);
	if (e < 0) {
		free(r);
		return e;
	}
	/* A fork would copy the mappings and let the child's exit disturb nobody, but they are of no use there. */
	(void)io_uring_ring_dontfork(&r->uring);
	*ret = r;
	return 0;
}

struct ring *ring_free(struct ring *r)
{
	if (r) {
		io_uring_queue_exit(&r->uring);
		free(r);
	}
	return NULL;
}

int ring_fd(const struct ring *r)
{
	return r->uring.ring_fd;
}

bool ring_read(struct ring *r, int fd, void *buf, uint32_t nbytes, uint64_t offset, uint64_t tag)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&r->uring);

	if (!sqe)
		return false;
	io_uring_prep_read(sqe, fd, buf, nbytes, offset);
	sqe->rw_flags = RWF_NOWAIT;
	sqe->user_data = tag;
	return true;
}

bool ring_submit(struct ring *r)
{
	/* EAGAIN, EBUSY, ENOMEM: something is left. */
	(void)io_uring_submit(&r->uring);
	return io_uring_sq_ready(&r->uring) > 0;
}

int ring_reap(struct ring *r, uint64_t *ret_tags, int *ret_res, int max)
{
	struct io_uring_cqe *cqe;
	int n = 0;

	while (n < max && io_uring_peek_cqe(&r->uring, &cqe) == 0) {
		ret_tags[n] = cqe->user_data;
		ret_res[n++] = cqe->res;
		io_uring_cqe_seen(&r->uring, cqe);
	}
	return n;
}
