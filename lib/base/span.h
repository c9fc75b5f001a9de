/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bounded views of bytes that nobody vouches for. Everything that reads a checkpoint's bytes cuts them out of a
 * span first: no sum can overflow and no read can leave the span. Knows nothing of ours.
 */
#ifndef WD_BASE_SPAN_H
#define WD_BASE_SPAN_H

#include <string.h>

#include "lib/base/base.h"

struct span {
	const unsigned char *bytes;
	size_t nbytes;
};

/* [off, off + len) of `s`. 0, or -EBADMSG if that leaves `s`. */
static inline int span_cut(struct span s, uint64_t off, uint64_t len, struct span *ret)
{
	if (off > s.nbytes || len > s.nbytes - off)
		return -EBADMSG;
	*ret = (struct span){ s.bytes + off, (size_t)len };
	return 0;
}

/* The little-endian number at `off`. 0, or -EBADMSG. */
static inline int span_u64(struct span s, uint64_t off, uint64_t *ret)
{
	struct span cut;
	uint64_t n = 0;

	if (span_cut(s, off, sizeof(n), &cut) < 0)
		return -EBADMSG;
	for (size_t i = sizeof(n); i-- > 0;)
		n = n << 8 | cut.bytes[i];
	*ret = n;
	return 0;
}

/* Are the bytes at `off` these? False if they leave `s`. */
static inline bool span_has(struct span s, uint64_t off, const void *bytes, size_t nbytes)
{
	struct span cut;

	return span_cut(s, off, nbytes, &cut) == 0 && memcmp(cut.bytes, bytes, nbytes) == 0;
}

#endif
