/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What tests of the public interface share: the ways that this machine has, models made from a seed, checks of
 * results, error texts and counts. A test added by add_ways() finds its way (WD_WAY_*) in _i.
 *
 * The functions that check fail the running test; in a forked child of a test use results instead.
 */
#ifndef WD_TESTS_API_UTIL_H
#define WD_TESTS_API_UTIL_H

#include <check.h>
#include <string.h>

#include "lib/include/weightd.h"
#include "tests/data.h"
#include "tests/pager_util.h"

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0 /* a sanitizer's allocator keeps what is freed, and cannot do without mmap(2) */
#endif

#define EMBEDDED_WAY (1u << WD_WAY_EMBEDDED)
#define PAGED_WAYS (EMBEDDED_WAY | 1u << WD_WAY_USER)
#define LOCAL_WAYS (PAGED_WAYS | 1u << WD_WAY_MMAP) /* memory, budget and reads (their hooks) are this process's */
#define DAEMON_WAY (1u << WD_WAY_DAEMON)
#define ALL_WAYS (LOCAL_WAYS | DAEMON_WAY)

/* Adds `test` for each way of the set; one that this machine lacks is skipped, with a line that says why. For WD_WAY_DAEMON the
 * test case has a daemon (WEIGHTD_SOCKET). */
#define add_ways(tc, test, set) add_ways_named(tc, #test, test, set)
void add_ways_named(TCase *tc, const char *name, const TTest *test, unsigned int set);
/* A test case whose tests have an empty folder each, test_dir, and no hooks set. */
TCase *folder_case(Suite *s, const char *name, double limit_s);
extern char *test_dir;

/* The call gives this error, and wd_error() is one line that has all of these words ("a|b"). */
#define ck_fails(r, error, words) failed_with(__LINE__, (r), (error), (words))
void failed_with(int line, int r, int error, const char *words);
#define ck_works(call)                                                                           \
	do {                                                                                     \
		int r_ = (call);                                                                 \
		ck_assert_msg(r_ == 0, "%s: %d (%s): %s", #call, r_, strerror(-r_), wd_error()); \
	} while (0)

struct wd *connected(int way, uint64_t budget_bytes, uint32_t flags);
struct wd_model *opened(struct wd *wd, const char *path, const char *name);
struct wd_stats stats_of(struct wd *wd);
struct wd_stats model_stats_of(struct wd_model *m);

/* A model of nr tensors "t0", "t1"... of nbytes each, U8, in the test's folder. Owner of the path: the caller. */
char *make_model(const char *name, size_t nr, uint64_t nbytes, uint64_t seed);

/* Every byte of a tensor is that of its place in the file. */
void ck_tensor(const struct wd_tensor *t, uint64_t seed);
void ck_model(struct wd_model *m, uint64_t seed);
bool tensor_is_right(const struct wd_tensor *t, uint64_t seed);
/* Reads one byte a page. */
void touch_all(const struct wd_tensor *t);
/* Does the file have the bytes of this seed, all of them from `from`? */
bool file_is_right(const char *path, uint64_t from, uint64_t seed);

/* Gives all of a model back and waits. */
void release(struct wd *wd, struct wd_model *m);
/* In how many extents these tensors' bytes lie, together. */
uint64_t extents_of(const struct wd_tensor *const *t, size_t nr);
/* Until no backing read (of the counting hook) has come for a while: what is read ahead ends by itself. */
void until_quiet(void);
uint64_t thread_cpu_us(void);

/* Makes system calls fail in this process, for ever. ioctl_cmd 0: the call itself, whatever its arguments. */
struct refused_call {
	unsigned int call, ioctl_cmd;
	int error;
};
int refuse_calls(const struct refused_call *refused, size_t nr);
int become_nobody(void);

#endif
