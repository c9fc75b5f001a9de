/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The errno tables of the userfaultfd ioctls live here, one function an ioctl.
 * Sources: ioctl_userfaultfd(2); fs/userfaultfd.c and mm/userfaultfd.c of 6.1 to 6.18; what was measured on 6.18.
 */
#include "ufd/uffd.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>

#include "ufd/hooks.h"
#include "ufd/page.h"

/* Newer than the headers of Debian 12 (6.1). The numbers are the kernel's interface and never change. */
#ifndef UFFD_FEATURE_WP_HUGETLBFS_SHMEM
#define UFFD_FEATURE_WP_HUGETLBFS_SHMEM (1 << 12)
#endif
#ifndef UFFD_FEATURE_POISON
#define UFFD_FEATURE_POISON (1 << 14)
#endif
#ifndef UFFDIO_POISON
struct uffdio_poison {
	struct uffdio_range range;
	__u64 mode;
	__s64 updated;
};
#define UFFDIO_POISON _IOWR(UFFDIO, 0x08, struct uffdio_poison)
#endif

/* A hand-written number that is off by a bit fails silently, with every call EINVAL. */
_Static_assert(UFFDIO_POISON == 0xc020aa08u, "UFFDIO_POISON");
_Static_assert(UFFDIO_CONTINUE == 0xc020aa07u, "UFFDIO_CONTINUE");
_Static_assert(UFFDIO_WAKE == 0x8010aa02u, "UFFDIO_WAKE");
_Static_assert(UFFDIO_REGISTER == 0xc020aa00u, "UFFDIO_REGISTER");
_Static_assert(UFFDIO_UNREGISTER == 0x8010aa01u, "UFFDIO_UNREGISTER");
_Static_assert(sizeof(struct uffd_msg) == 32, "uffd_msg");

struct pm_region {
	uint64_t start, end, categories;
};
struct pm_arg {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define PM_SCAN _IOWR('f', 16, struct pm_arg) /* PAGEMAP_SCAN, 6.7 */
#define PM_FILE (1u << 2)
#define PM_PRESENT (1u << 3)
#define PM_SWAPPED (1u << 4)
#define PM_HUGE (1u << 6)
_Static_assert(PM_SCAN == 0xc0606610u, "PAGEMAP_SCAN");

struct pager_hooks pager_hooks;

/* how: as in uffd_open_way(); 0 uses `device` if that is an open /dev/userfaultfd (it stays open). */
static int open_new(int how, int device)
{
	cleanup_close int dev = -1;
	int fd;

	switch (how) {
	case 0:
		if (device < 0)
			device = dev = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
		fd = device < 0 ? -1 : ioctl(device, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
		break;
	case 1:
		fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
		break;
	default:
		fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
		break;
	}
	return fd < 0 ? -errno : fd;
}

int uffd_open_way(int how)
{
	return open_new(how, -1);
}

int uffd_open_raw(int device, bool *ret_user_only)
{
	int first = 0;

	for (int how = 0; how <= 2; how++) {
		int fd = open_new(how, device);

		*ret_user_only = how == 2;
		if (fd >= 0)
			return fd;
		if (how <= 1)
			first = fd;
	}
	return first;
}

/* The features that this kernel has: UFFDIO_API fixes a fd's set at the first call, so a throw-away fd is asked. */
static uint64_t kernel_features(int how, int device)
{
	cleanup_close int fd = open_new(how, device);
	struct uffdio_api api = { .api = UFFD_API };

	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) < 0)
		return 0;
	return api.features;
}

static int enable(int fd, uint64_t features)
{
	struct uffdio_api api = { .api = UFFD_API, .features = features };

	return ioctl(fd, UFFDIO_API, &api) < 0 ? -errno : 0;
}

static uint64_t wanted(uint64_t have, bool fork)
{
	uint64_t want = have & (UFFD_FEATURE_MINOR_SHMEM | UFFD_FEATURE_EXACT_ADDRESS | UFFD_FEATURE_POISON |
				UFFD_FEATURE_WP_HUGETLBFS_SHMEM | UFFD_FEATURE_PAGEFAULT_FLAG_WP);

	if (pager_hooks.no_wp)
		want &= ~(uint64_t)(UFFD_FEATURE_WP_HUGETLBFS_SHMEM | UFFD_FEATURE_PAGEFAULT_FLAG_WP);
	if (pager_hooks.no_poison)
		want &= ~(uint64_t)UFFD_FEATURE_POISON;
	if (fork && !pager_hooks.no_event_fork)
		want |= UFFD_FEATURE_EVENT_FORK;
	return want;
}

static struct uffd_caps caps_of(uint64_t features, bool user_only)
{
	return (struct uffd_caps){
		.user_only = user_only,
		.event_fork = features & UFFD_FEATURE_EVENT_FORK,
		.wp = features & UFFD_FEATURE_WP_HUGETLBFS_SHMEM,
		.exact_address = features & UFFD_FEATURE_EXACT_ADDRESS,
		.poison = features & UFFD_FEATURE_POISON,
	};
}

static int open_with(int how, int device, bool want_fork, struct uffd_caps *ret)
{
	uint64_t have = kernel_features(how, device), want;
	int fd, r;

	if (!have) {
		fd = open_new(how, device);
		if (fd >= 0) {
			(void)close(fd);
			return -EOPNOTSUPP;
		}
		return fd;
	}
	if (!(have & UFFD_FEATURE_MINOR_SHMEM))
		return -EOPNOTSUPP;
	want = wanted(have, want_fork);
	for (;;) {
		fd = open_new(how, device);
		if (fd < 0)
			return fd;
		r = enable(fd, want);
		if (r == 0)
			break;
		(void)close(fd);
		/* EVENT_FORK needs CAP_SYS_PTRACE: EPERM without it. */
		if (!(want & UFFD_FEATURE_EVENT_FORK))
			return r;
		want &= ~(uint64_t)UFFD_FEATURE_EVENT_FORK;
	}
	*ret = caps_of(want, how == 2);
	return fd;
}

int uffd_check(int fd)
{
	static const char kind[] = "anon_inode:[userfaultfd]";
	char path[32], link[64];
	ssize_t n;

	/* The type first: an ioctl on somebody's file may end in that somebody's file server. */
	(void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	n = readlink(path, link, sizeof(link));
	if (n != (ssize_t)sizeof(kind) - 1 || memcmp(link, kind, sizeof(kind) - 1))
		return -EPROTO;
	return 0;
}

int uffd_check_ready(int fd)
{
	/* One that was not answers EINVAL to everything, and is an error to poll for ever. */
	return uffd_check(fd) < 0 || uffd_wake(fd, (void *)(uintptr_t)page_bytes(), page_bytes()) < 0 ? -EPROTO : 0;
}

int uffd_adopt(int fd, bool user_only, struct uffd_caps *ret)
{
	uint64_t want = 0;
	int r = uffd_check(fd);

	if (r < 0)
		return r;
	for (int how = 0; how <= 2 && !want; how++)
		want = kernel_features(how, -1);
	want = wanted(want, true);
	r = enable(fd, want);
	if (r == -EPERM) { /* (a refused call leaves it as it was) */
		want &= ~(uint64_t)UFFD_FEATURE_EVENT_FORK;
		r = enable(fd, want);
	}
	if (r < 0)
		return -EPROTO;
	*ret = caps_of(want, user_only);
	return 0;
}

int uffd_open_user(struct uffd_caps *ret)
{
	return open_with(2, -1, false, ret);
}

int uffd_open(bool allow_user_only, bool want_fork, struct uffd_caps *ret)
{
	return uffd_open_from(-1, allow_user_only, want_fork, ret);
}

int uffd_open_from(int device, bool allow_user_only, bool want_fork, struct uffd_caps *ret)
{
	int first = 0, fd;

	/* Each may be refused alone: the device is 0600 by default, the syscall needs a sysctl or CAP_SYS_PTRACE,
	 * a seccomp filter may refuse either. None of their errors ends the search. */
	for (int how = 0; how <= 2; how++) {
		if (how == 2 && !allow_user_only)
			break;
		fd = open_with(how, device, want_fork && how != 2, ret);
		if (fd >= 0)
			return fd;
		if (how == 1 || first == 0)
			first = fd;
	}
	return first;
}

/* EAGAIN from an ioctl that maps: a fork is in flight, over when its event has been read and the forking thread has run.
 * At the VMA limit a fork copies 65,000 of them, 0.1 s. */
#define FORK_TRIES 20000

static void pause_for_fork(int tries)
{
	const struct timespec t = { .tv_nsec = 50000 };

	if (tries < 10)
		sched_yield();
	else
		(void)nanosleep(&t, NULL);
}

int uffd_register(int fd, void *addr, uint64_t len, bool wp)
{
	struct uffdio_register reg = {
		.range = { (uintptr_t)addr, len },
		.mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_MINOR | (wp ? UFFDIO_REGISTER_MODE_WP : 0),
	};

	return ioctl(fd, UFFDIO_REGISTER, &reg) < 0 ? -errno : 0;
}

int uffd_open_range(int fd, void *addr, uint64_t len)
{
	struct uffdio_range range = { (uintptr_t)addr, len };
	int r = ioctl(fd, UFFDIO_UNREGISTER, &range) < 0 ? -errno : 0;

	/* Also after an error: ENOMEM (no VMA left for the border) comes after the wake inside, and waiters that
	 * came later must fault again to be seen again. */
	(void)ioctl(fd, UFFDIO_WAKE, &range);
	return r;
}

int uffd_wake(int fd, void *addr, uint64_t len)
{
	struct uffdio_range range = { (uintptr_t)addr, len };

	return ioctl(fd, UFFDIO_WAKE, &range) < 0 ? -errno : 0;
}

int uffd_continue(int fd, void *addr, uint64_t len)
{
	unsigned char *p = addr, *end = p + len;
	int stalls = 0;

	while (p < end) {
		struct uffdio_continue c = { .range = { (uintptr_t)p, (uint64_t)(end - p) } };

		if (ioctl(fd, UFFDIO_CONTINUE, &c) == 0)
			return 0;
		if (errno == EAGAIN && c.mapped > 0) {
			/* Stopped part-way: those pages are mapped and their waiters woken. */
			p += c.mapped;
			stalls = 0;
			continue;
		}
		switch (errno) {
		case EEXIST:
			/* The page is mapped; EEXIST never wakes (one lost wake in 2 to 3 million otherwise). */
			(void)uffd_wake(fd, p, page_bytes());
			p += page_bytes();
			break;
		case EAGAIN:
			/* A fork in flight, or a page table that vanished under us: the latter is gone at the next try. */
			if (++stalls > 8)
				return -EAGAIN;
			sched_yield();
			break;
		default:
			return -errno;
		}
	}
	return 0;
}

enum uffd_probe uffd_probe(int fd, void *page)
{
	struct uffdio_continue c = { .range = { (uintptr_t)page, page_bytes() } };

	if (ioctl(fd, UFFDIO_CONTINUE, &c) == 0)
		return PROBE_QUIET;
	switch (errno) {
	case EAGAIN:
		return PROBE_FORKING;
	case ESRCH:
		return PROBE_DEAD;
	case ENOENT:
		return PROBE_UNMAPPED;
	default:
		return PROBE_QUIET; /* EEXIST: what a sentinel answers; EFAULT: no page there */
	}
}

int uffd_copy(int fd, void *dst, const void *src, uint64_t len)
{
	for (int tries = 0;; tries++) {
		struct uffdio_copy c = { .dst = (uintptr_t)dst, .src = (uintptr_t)src, .len = len };

		if (ioctl(fd, UFFDIO_COPY, &c) == 0)
			return 0;
		if (errno != EAGAIN || tries > FORK_TRIES)
			return -errno;
		pause_for_fork(tries);
	}
}

#define POISON_DONTWAKE 1 /* UFFDIO_POISON_MODE_DONTWAKE */

int uffd_poison(int fd, void *addr, uint64_t len)
{
	struct uffdio_poison p = { .range = { (uintptr_t)addr, len }, .mode = POISON_DONTWAKE };
	int r;

	if (pager_hooks.no_poison)
		return -EOPNOTSUPP;
	do {
		r = ioctl(fd, UFFDIO_POISON, &p) < 0 ? -errno : 0;
	} while (r == -EINTR);
	/* A kernel before 6.6 does not know the number. */
	return r == -EINVAL || r == -ENOTTY ? -EOPNOTSUPP : r;
}

int uffd_writeprotect(int fd, void *addr, uint64_t len, bool on)
{
	struct uffdio_writeprotect w = { .range = { (uintptr_t)addr, len },
					 .mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0 };

	for (int tries = 0;; tries++) {
		if (ioctl(fd, UFFDIO_WRITEPROTECT, &w) == 0)
			return 0;
		if (errno != EAGAIN || tries > FORK_TRIES)
			return -errno;
		pause_for_fork(tries);
	}
}

int uffd_read(int fd, struct uffd_msg_info *ret, int max)
{
	struct uffd_msg msgs[64];
	struct iovec iov;
	ssize_t n;
	int nr = 0;

	if (max > (int)ARRAY_SIZE(msgs))
		max = (int)ARRAY_SIZE(msgs);
	iov = (struct iovec){ msgs, (size_t)max * sizeof(msgs[0]) };
	/* A client can make a shared description blocking again: never waits, whatever its flags say (6.10; before that the
	 * flag is all there is). */
	n = preadv2(fd, &iov, 1, -1, RWF_NOWAIT);
	if (n < 0 && errno == EOPNOTSUPP)
		n = read(fd, msgs, iov.iov_len);
	if (n < 0 && errno == EAGAIN) {
		int flags = fcntl(fd, F_GETFL);

		/* Nothing to read though poll said so: a blocking one is an error to poll for ever. */
		if (flags >= 0 && !(flags & O_NONBLOCK))
			(void)fcntl(fd, F_SETFL, flags | O_NONBLOCK);
		return -EAGAIN;
	}
	if (n < 0)
		return -errno;
	for (size_t i = 0; i < (size_t)n / sizeof(msgs[0]); i++) {
		struct uffd_msg_info *m = &ret[nr++];

		*m = (struct uffd_msg_info){ .event = EVENT_OTHER, .child_fd = -1 };
		if (msgs[i].event == UFFD_EVENT_PAGEFAULT) {
			m->event = EVENT_FAULT;
			m->address = msgs[i].arg.pagefault.address;
		} else if (msgs[i].event == UFFD_EVENT_FORK) {
			m->event = EVENT_FORK;
			m->child_fd = (int)msgs[i].arg.fork.ufd;
		}
	}
	return nr;
}

/* Before 6.7: 8 bytes a page (Documentation/admin-guide/mm/pagemap.rst): bit 63 present, 62 swapped, 61 file. */
static int pagemap_scan_old(int fd, const void *addr, uint64_t len, int (*fn)(void *, const struct page_run *),
			    void *arg)
{
	uint64_t page = page_bytes(), entries[512];
	struct page_run run = { 0 };
	int r;

	for (uint64_t a = (uintptr_t)addr, end = a + len; a < end;) {
		uint64_t nr = MIN((end - a) / page, (uint64_t)ARRAY_SIZE(entries));
		ssize_t n = pread(fd, entries, nr * 8, (off_t)(a / page * 8));

		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		for (uint64_t i = 0; i < (uint64_t)n / 8; i++, a += page) {
			bool present = entries[i] >> 63 & 1, swapped = entries[i] >> 62 & 1,
			     file = entries[i] >> 61 & 1;

			if (run.end == a && run.present == present && run.swapped == swapped && run.file == file &&
			    (present || swapped)) {
				run.end = a + page;
				continue;
			}
			if (run.end) {
				r = fn(arg, &run);
				if (r)
					return r;
				run.end = 0;
			}
			if (present || swapped)
				run = (struct page_run){ a, a + page, present, swapped, file, false };
		}
	}
	return run.end ? fn(arg, &run) : 0;
}

int pagemap_scan(int fd, const void *addr, uint64_t len, int (*fn)(void *, const struct page_run *), void *arg)
{
	/* At most 512 regions a call: with 4096 the kernel reported some twice (walk_end falls behind; 6.18). */
	struct pm_region regions[512];
	struct pm_arg scan = {
		.size = sizeof(scan),
		.start = (uintptr_t)addr,
		.end = (uintptr_t)addr + len,
		.vec = (uintptr_t)regions,
		.vec_len = ARRAY_SIZE(regions),
		.category_anyof_mask = PM_PRESENT | PM_SWAPPED,
		.return_mask = PM_PRESENT | PM_SWAPPED | PM_FILE | PM_HUGE,
	};

	if (pager_hooks.no_pagemap_scan)
		return pagemap_scan_old(fd, addr, len, fn, arg);
	while (scan.start < scan.end) {
		int n = ioctl(fd, PM_SCAN, &scan), r;

		if (n < 0 && (errno == ENOTTY || errno == EINVAL))
			return pagemap_scan_old(fd, (void *)(uintptr_t)scan.start, scan.end - scan.start, fn, arg);
		if (n < 0)
			return -errno;
		for (int i = 0; i < n; i++) {
			uint64_t c = regions[i].categories;
			struct page_run run = { regions[i].start,      regions[i].end,     (c & PM_PRESENT) != 0,
						(c & PM_SWAPPED) != 0, (c & PM_FILE) != 0, (c & PM_HUGE) != 0 };

			r = fn(arg, &run);
			if (r)
				return r;
		}
		if (n < (int)ARRAY_SIZE(regions))
			return 0;
		scan.start = regions[n - 1].end;
	}
	return 0;
}

static int any_run(void *arg, const struct page_run *run)
{
	(void)arg;
	(void)run;
	return 1;
}

bool pagemap_absent(int pagemap_fd, const void *addr, uint64_t len)
{
	return pagemap_scan(pagemap_fd, addr, len, any_run, NULL) == 0;
}

int pagemap_probe(int fd)
{
	struct pm_arg scan = { .size = sizeof(scan) };

	if (pager_hooks.no_pagemap_scan)
		return -EOPNOTSUPP;
	return ioctl(fd, PM_SCAN, &scan) < 0 ? -errno : 0;
}
