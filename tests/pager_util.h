/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the pager's tests share: the variants of the pager under test, files whose every byte is known, reads that
 * survive SIGBUS, counts of what a process holds.
 *
 * A file made here has at offset o (a multiple of 8) the word file_word(seed, o), which is never 0: so zeros, another
 * place's bytes, another file's bytes and torn reads are all seen by whoever reads any word of a view.
 *
 * Threads: everything may be used from several threads at once, save rig_open()/rig_close() of one rig. The
 * functions that check (rig_*, must_*) fail the running test; in a forked child of a test use their results instead.
 */
#ifndef WD_TESTS_PAGER_UTIL_H
#define WD_TESTS_PAGER_UTIL_H

#include <check.h>
#include <semaphore.h>
#include <sys/types.h>

#include "lib/base/base.h"
#include "ufd/hooks.h"
#include "ufd/pager.h"
#include "ufd/source.h"

/* ---- the pager in all its forms */
enum variant {
	V_TMPFS, /* embedded, tmpfs of its own */
	V_MEMFD, /* embedded, as without the privilege to mount */
	V_OLD,   /* embedded as on Linux 6.1 without privilege: no PAGEMAP_SCAN, POISON, shmem WP, tmpfs, EVENT_FORK */
	V_USER,  /* user-mode faults only */
	V_MMAP,  /* no userfaultfd */
	NR_VARIANTS,
};
#define EMBEDDED (1u << V_TMPFS | 1u << V_MEMFD | 1u << V_OLD)
#define PAGED (EMBEDDED | 1u << V_USER)
#define ALL_VARIANTS (PAGED | 1u << V_MMAP)

/* Adds `test` as a loop test over the variants in `set`; _i is the variant. One that this machine cannot run is
 * skipped, with a line that says why. */
#define add_variants(tc, test, set) add_variants_named(tc, #test, test, set)
void add_variants_named(TCase *tc, const char *name, const TTest *test, unsigned int set);
const char *variant_name(int variant);
/* Prints "SKIP name: reason" and counts it. */
void skip(const char *name, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* A test case of a suite with a time limit. */
TCase *new_case(Suite *s, const char *name, double limit_s);
/* Runs the suite with a temporary folder, removes that, returns main()'s result. */
int run_suite(Suite *s);

/* A pager of this variant. Hooks that are functions are left as they are. */
struct pager *pager_of(int variant, uint64_t budget_bytes);
int pager_try(int variant, uint64_t budget_bytes, struct pager **ret, struct wd_err *err);

/* ---- files */
struct tfile {
	char path[256];
	uint64_t size, seed;
};
uint64_t file_word(uint64_t seed, uint64_t offset);
/* In the suite's folder; on disk and out of the page cache (where that can be done) afterwards. */
void tfile_make(struct tfile *f, const char *name, uint64_t size, uint64_t seed);
/* [off, +len) becomes what a file with `seed` has there; through the page cache, like any writer. */
int tfile_write(const char *path, uint64_t off, uint64_t len, uint64_t seed);
void tfile_uncache(const struct tfile *f);
uint64_t tfile_cached_bytes(const char *path);
/* A path in the suite's folder. Static buffer of the thread. */
const char *test_path(const char *name);
/* Data at `p` should be the file's [off, +len): how many words (looking at one in `step` bytes; 8: every one, and
 * the bytes of the tail) are not. Prints the first few. */
uint64_t wrong_words(const void *p, const struct tfile *f, uint64_t off, uint64_t len, uint64_t step);

/* ---- a pager with one view of a whole file */
struct rig {
	const struct tfile *file;
	struct pager *pager;
	struct source *source;
	struct view *view;
	unsigned char *base;
	uint64_t size;
};
/* Units of unit_bytes each; 0: none. */
void rig_open(struct rig *r, int variant, const struct tfile *f, uint64_t budget_bytes, uint64_t unit_bytes);
/* A rig with one more view in the same pager. */
void rig_add(struct rig *r, struct pager *p, const struct tfile *f, uint64_t unit_bytes);
void rig_close(struct rig *r);
int view_try(struct pager *p, const struct tfile *f, uint64_t unit_bytes, struct source **ret_source,
	     struct view **ret_view, struct wd_err *err);
/* Every word is right. */
void rig_check(const struct rig *r);
/* Drops and waits until that is done. Returns the bytes that are resident afterwards. */
uint64_t rig_drop(struct rig *r);
uint64_t resident(struct pager *p);
uint64_t extent(void);

/* ---- backing reads, counted: a source_hook that reads the file */
struct hook_counts {
	_Atomic uint64_t bytes, reads, direct;
};
extern struct hook_counts hook_counts;
int64_t hook_count(struct source *s, void *buf, size_t nbytes, uint64_t offset, bool direct);
/* pread() of all of it from the buffered description. */
int64_t hook_pread(struct source *s, void *buf, size_t nbytes, uint64_t offset);

/* ---- touches that may fail */
struct caught {
	int sig, code; /* 0: no signal */
	const void *addr;
};
/* Call once in a test before touch(). Handles SIGBUS and SIGSEGV; obeys pager_fault_retry(). */
void catch_signals(void);
bool touch(const void *p, unsigned char *ret, struct caught *caught);
bool touch_write(void *p, unsigned char byte, struct caught *caught);

/* ---- this process */
unsigned int count_fds(void);
unsigned int count_threads(void);
unsigned int count_vmas(const void *from, const void *to);
/* Blocks of all tmpfs and memfd files that this process has open: what arenas really hold. */
uint64_t arena_bytes(void);
/* Takes all maps that this process may have (vm.max_map_count) but `leave`. */
void use_up_maps(unsigned int leave);
void give_back_maps(void);
uint64_t proc_kib(const char *file, const char *key); /* "/proc/meminfo", "MemFree:"; UINT64_MAX: not there */
uint64_t cpu_ms(void);

/* ---- waiting and running */
void must_wait(sem_t *s); /* 20 s at most, then the test fails */
/* Forks; the child's exit status is fn(arg). Returns it, or 1000 + the signal that ended it. */
int in_child(int (*fn)(void *arg), void *arg);
int child_result(pid_t pid);
/* In a child: it ends with SIGALRM after so many seconds. */
void limit_child(unsigned int seconds);
uint64_t rnd(uint64_t *state);
uint64_t now_ms(void);
/* How long a storm runs: a few seconds, or $WD_SOAK_SECONDS. */
uint64_t soak_ms(uint64_t usual_ms);
/* What another thread of this process is doing: the letter of /proc/PID/task/TID/stat. */
char thread_state(pid_t tid);
/* Waits until that thread sleeps in the kernel, or *done. For hooks: no check inside. */
void until_asleep(pid_t tid, const _Atomic bool *done);

#endif
