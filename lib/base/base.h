/* SPDX-License-Identifier: Apache-2.0 */
/* What every file may use: cleanup attributes, min/max, overflow-checked sums, an error text. Knows nothing of ours. */
#ifndef WD_BASE_BASE_H
#define WD_BASE_BASE_H

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define container_of(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))
/* Names made unique, so that one may be an argument of the other (-Wshadow). */
#define BASE_CAT_(a, b) a##b
#define BASE_CAT(a, b) BASE_CAT_(a, b)
#define BASE_PICK(a, op, b, x, y)      \
	({                             \
		__typeof__(a) x = (a); \
		__typeof__(b) y = (b); \
		x op y ? x : y;        \
	})
#define MIN(a, b) BASE_PICK(a, <, b, BASE_CAT(a_, __COUNTER__), BASE_CAT(b_, __COUNTER__))
#define MAX(a, b) BASE_PICK(a, >, b, BASE_CAT(a_, __COUNTER__), BASE_CAT(b_, __COUNTER__))

#define KiB ((uint64_t)1 << 10)
#define MiB ((uint64_t)1 << 20)
#define GiB ((uint64_t)1 << 30)

/* Round to a power of two. */
static inline uint64_t round_down(uint64_t n, uint64_t to)
{
	return n & ~(to - 1);
}

static inline uint64_t round_up(uint64_t n, uint64_t to)
{
	return (n + to - 1) & ~(to - 1);
}

static inline void free_p(void *p)
{
	free(*(void **)p);
}

static inline void close_p(const int *fd)
{
	if (*fd >= 0) {
		int saved = errno;

		(void)close(*fd);
		errno = saved;
	}
}

static inline void fclose_p(FILE **f)
{
	if (*f)
		(void)fclose(*f);
}

#define cleanup(fn) __attribute__((cleanup(fn)))
#define cleanup_free cleanup(free_p)
#define cleanup_close cleanup(close_p)
#define cleanup_fclose cleanup(fclose_p)

/* Hand ownership over: the variable is NULL (or -1) afterwards. */
#define TAKE_PTR(p)                         \
	({                                  \
		__typeof__(p) taken_ = (p); \
		(p) = NULL;                 \
		taken_;                     \
	})
#define TAKE_FD(fd)                \
	({                         \
		int taken_ = (fd); \
		(fd) = -1;         \
		taken_;            \
	})

/* One line for a person, filled beside a negative errno. Caller's memory; NULL is accepted everywhere. */
struct wd_err {
	char text[768];
};

/* Writes the text (control characters become '?') and returns `error`, so that a caller can `return err_set(...)`. */
int err_set(struct wd_err *err, int error, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* Puts "text: " before what is there. Returns `error`. */
int err_prefix(struct wd_err *err, int error, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

#endif
