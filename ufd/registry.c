/* SPDX-License-Identifier: Apache-2.0 */
/*
 * All views of the process, where a signal handler and the fork handler find them without a lock. A view is taken out
 * before it is unmapped; touching a view while it is closed is the program's error anyway.
 */
#include "ufd/internal.h"

#define NR_SLOTS 21845u /* a view takes three VMAs at least, vm.max_map_count is 65530 */

static struct view *_Atomic slots[NR_SLOTS];
static atomic_uint used; /* highest slot ever used + 1 */

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
			return;
	}
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

		if (v && (const unsigned char *)address >= v->base && (const unsigned char *)address < v->base + v->bytes)
			return v;
	}
	return NULL;
}
