/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lines on stderr, as WEIGHTD_LOG=error|info|debug wants them (default error; read when the program starts).
 * Knows nothing of ours.
 * Threads: any, also the pager's: no lock, no allocation, no stdio stream; one write(2) a line. Keeps errno.
 */
#ifndef WD_BASE_LOG_H
#define WD_BASE_LOG_H

#include <stdatomic.h>

#include "lib/base/base.h"

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };

/* Lines above this level are not even formatted. */
extern _Atomic int log_max;

void log_write(enum log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define log_at(level, ...)                                                                \
	do {                                                                              \
		if ((int)(level) <= atomic_load_explicit(&log_max, memory_order_relaxed)) \
			log_write((level), __VA_ARGS__);                                  \
	} while (0)
#define log_error(...) log_at(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_info(...) log_at(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...) log_at(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
