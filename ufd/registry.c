/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All views of the process, where a signal handler and the fork handler find them without a lock. A view is taken out
 * before it is freed, and that waits for those who are looking: any fault of the program looks at all views.
 */
#include "ufd/internal.h"

#include <sched.h>

#define NR_SLOTS 21845u /* a view takes three VMAs at least, vm.max_map_count is 65530 */

static struct view *_Atomic slots[NR_SLOTS];
static atomic_uint used; /* highest slot ever used + 1 */
static atomic_uint lookers;

int registry_add(struct view *v)
{
	for (unsigned int i = 0; i < NR_SLOTS; i++) {
		struct view *none = NULL;
		unsigned int high;

		if (!atomic_compare_exchange_strong(&slots[i], &none, v))
			continue;
		high = atomic_load(&used);
		while (high < i + 1 && !atomic_compare_exchange_weak(&used, &high, i + 1))
			;
		return 0;
	}
	return -ENFILE;
}

void registry_del(struct view *v)
{
	for (unsigned int i = 0; i < atomic_load(&used); i++) {
		struct view *it = v;

		if (atomic_compare_exchange_strong(&slots[i], &it, NULL))
			break;
	}
	while (atomic_load(&lookers))
		sched_yield();
}

void registry_look(void)
{
	(void)atomic_fetch_add(&lookers, 1);
}

void registry_unlook(void)
{
	(void)atomic_fetch_sub(&lookers, 1);
}

void registry_forked(void)
{
	atomic_store(&lookers, 0);
}

struct view *registry_at(unsigned int i)
{
	return i < atomic_load(&used) ? atomic_load(&slots[i]) : NULL;
}

unsigned int registry_max(void)
{
	return NR_SLOTS;
}

struct view *registry_find(const void *address)
{
	for (unsigned int i = 0; i < atomic_load(&used); i++) {
		struct view *v = atomic_load(&slots[i]);

		if (v && (const unsigned char *)address >= v->base &&
		    (const unsigned char *)address < v->base + v->bytes)
			return v;
	}
	return NULL;
}
