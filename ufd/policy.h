/* SPDX-License-Identifier: Apache-2.0 */
/* What to read next, and how much to drop. Pure functions: no syscalls, no clock, no state of their own. */
#ifndef WD_UFD_POLICY_H
#define WD_UFD_POLICY_H

#include "lib/base/base.h"

/* Places where a view is read from front to back; several threads may work on parts of one tensor. */
#define POLICY_STREAMS 8

struct policy_stream {
	uint64_t next;   /* first extent that was not asked for yet; 0: unused */
	uint64_t mark;   /* a touch in [mark, next] reads on */
	uint64_t window; /* extents asked for last time */
	uint64_t age;
};

struct policy_streams {
	struct policy_stream s[POLICY_STREAMS];
	uint64_t clock;
};

struct policy_run {
	uint64_t first, nr; /* extents; nr 0: nothing */
	uint64_t mark;      /* extents from here to the end stay armed, so that a touch tells to read on */
};

/*
 * A touch of extent `at`, inside of a unit that covers [first, last]: what shall be in memory next?
 * A unit of at most POLICY_WINDOW_MAX extents: all of it. A larger one: a window that begins at the touch (small in the
 * middle of nowhere, larger at the unit's beginning) and doubles as long as touches follow each other.
 * `most`: never more than this (a part of the budget), at least 1.
 */
#define POLICY_WINDOW_MAX 32 /* extents: 64 MiB; measured: no faster beyond */
struct policy_run policy_read(struct policy_streams *streams, uint64_t at, uint64_t first, uint64_t last,
			      uint64_t most);

/* How many bytes to free when `need` more are wanted and `resident` are there: enough for `need`, and a reserve of
 * 1/32 of the budget (at most 64 extents) so that a reader of much data does not wait each time. */
uint64_t policy_excess(uint64_t resident, uint64_t need, uint64_t budget, uint64_t extent);

/* How many extents the second-chance clock keeps armed, so that they can prove to be in use before their turn. */
uint64_t policy_armed_target(uint64_t nr_ready, uint64_t nr_to_free);

/* The automatic budget: what is resident and what there is room for, less a reserve for everything else. */
uint64_t policy_budget(uint64_t resident, uint64_t room, uint64_t total);

#endif
