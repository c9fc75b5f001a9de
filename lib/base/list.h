/* SPDX-License-Identifier: Apache-2.0 */
/* Intrusive doubly linked list. A node that is in no list points to itself. */
#ifndef WD_BASE_LIST_H
#define WD_BASE_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct list {
	struct list *prev, *next;
};

static inline void list_init(struct list *l)
{
	l->prev = l->next = l;
}

static inline bool list_empty(const struct list *l)
{
	return l->next == l;
}

static inline void list_del(struct list *n)
{
	n->prev->next = n->next;
	n->next->prev = n->prev;
	list_init(n);
}

static inline void list_add_tail(struct list *l, struct list *n)
{
	n->prev = l->prev;
	n->next = l;
	l->prev->next = n;
	l->prev = n;
}

static inline void list_add_head(struct list *l, struct list *n)
{
	list_add_tail(l->next, n);
}

#endif
