/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Places where a test can hold the pager still. All NULL in use. Set them before pager_new().
 * (Backing reads have their own: source_hook in ufd/source.h.)
 */
#ifndef WD_UFD_HOOKS_H
#define WD_UFD_HOOKS_H

#include <stdbool.h>
#include <stdint.h>

struct pager_hooks {
	void (*before_open)(void);  /* worker thread, before each UNREGISTER */
	void (*before_punch)(void); /* worker thread, all views armed and probed: before the hole is punched */
	void (*after_arm)(void);    /* worker thread, known views armed, not probed yet */
	/* worker thread, clearing page tables: between the scan of write-protected pages and their dropping */
	void (*in_window)(void);
	bool no_pagemap_scan; /* as on kernels before 6.7 */
	bool no_poison;       /* as on kernels before 6.6 */
	bool no_wp;           /* as where shmem cannot be write-protected */
	bool no_direct;       /* O_DIRECT refused at open */
	bool no_tmpfs;        /* as without the privilege to mount: memfd arenas */
	bool no_clone;        /* a detached mount cannot be cloned, as before 6.15 */
	bool no_huge;         /* the arena's file system gives small pages, as where memory is fragmented */
	bool no_event_fork;   /* as without CAP_SYS_PTRACE */
};
extern struct pager_hooks pager_hooks;

#endif
