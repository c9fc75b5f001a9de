/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the daemon shares as memory: the extent table of an arena (clients read it, a new daemon trusts it), and the state
 * of one mapping (its own client's).
 */
#ifndef WD_UFD_TABLE_H
#define WD_UFD_TABLE_H

#include <stdatomic.h>

#include "lib/base/base.h"
#include "ufd/pager.h"

#define TABLE_MAGIC 0x6262742d64747764ull /* "dwtd-tbb" */
#define TABLE_VERSION 1u

/* enum extent_state in `state`; a file of the arena's file system that only the daemon can write. */
struct table_extent {
	_Atomic uint8_t state;
	uint8_t code;  /* enum fault_code, FAILED */
	uint16_t huge; /* 1: on a huge page */
	int32_t error; /* FAILED: negative errno or 0 */
};

struct table {
	uint64_t magic;
	uint32_t version, nr_ext;
	uint64_t bytes, extent_bytes; /* of the arena */
	uint32_t nr_segs, nr_units;
	/* then nr_segs struct segment, nr_units struct unit at table_units(), nr_ext struct table_extent at table_ext() */
	struct segment segs[];
};

static inline struct unit *table_units(struct table *t)
{
	return (struct unit *)(t->segs + t->nr_segs);
}

static inline struct table_extent *table_ext(struct table *t)
{
	return (struct table_extent *)(table_units(t) + t->nr_units);
}

static inline uint64_t table_bytes(uint64_t nr_segs, uint64_t nr_units, uint64_t nr_ext)
{
	return sizeof(struct table) + nr_segs * sizeof(struct segment) + nr_units * sizeof(struct unit) +
	       nr_ext * sizeof(struct table_extent);
}

/*
 * The state of one mapping: a memfd that the daemon makes and its client may read and write. The daemon writes and never
 * believes it. First nr_ext bytes (MAP_OPEN), then, from the next multiple of 8, a bit a page that says: poisoned.
 */
enum { MAP_OPEN = 1 }; /* the daemon has opened it in this mapping, and has not armed it again: a hint */

static inline uint64_t map_state_poison(uint64_t nr_ext)
{
	return round_up(nr_ext, 8);
}

static inline uint64_t map_state_bytes(uint64_t nr_ext, uint64_t bytes, uint64_t page)
{
	return map_state_poison(nr_ext) + round_up(bytes / page + 1, 64) / 8;
}

#endif
