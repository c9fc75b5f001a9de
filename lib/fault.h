/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Why a touch failed: the signal handler that says it, and wd_fault_reason().
 */
#ifndef WD_LIB_FAULT_H
#define WD_LIB_FAULT_H

#include "lib/internal.h"

/* Installs the handlers for SIGBUS and SIGSEGV, once in the life of a process. Threads: any. */
int fault_handler_install(struct wd_err *err);

/* Waits until nobody who may still see a model or view owner that was taken out of the lists looks at it. Never call
 * it in a handler. */
void fault_quiesce(void);

/* In the child of a fork: forgets the parent's other threads. */
void fault_forked(void);

#endif
