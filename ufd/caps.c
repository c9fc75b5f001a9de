/* SPDX-License-Identifier: Apache-2.0 */
/* What this machine gives: each thing is tried on throw-away objects. */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "ufd/arena.h"
#include "ufd/page.h"
#include "ufd/pager.h"
#include "ufd/ring.h"
#include "ufd/uffd.h"

static int try_way(int how)
{
	int fd = uffd_open_way(how);

	if (fd < 0)
		return fd;
	(void)close(fd);
	return 0;
}

/* A file is made there, if it may be: what reads there do depends on the file system. */
static int try_direct(const char *folder)
{
	cleanup_close int fd = open(folder, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600), direct = -1;
	char self[32];

	if (fd < 0)
		return -errno;
	if (ftruncate(fd, (off_t)extent_bytes()) < 0)
		return -errno;
	(void)snprintf(self, sizeof(self), "/proc/self/fd/%d", fd);
	direct = open(self, O_RDONLY | O_DIRECT | O_CLOEXEC);
	if (direct < 0)
		return -errno;
	void *buf = mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buf == MAP_FAILED)
		return -errno;
	int r = pread(direct, buf, page_bytes(), 0) < 0 ? -errno : 0;
	(void)munmap(buf, page_bytes());
	return r;
}

/* Does a whole extent come as one huge page? Seen in the page tables of the alias. */
static int huge_run(void *arg, const struct page_run *run)
{
	*(bool *)arg |= run->huge;
	return 0;
}

static int try_huge(const struct arena_fs *fs)
{
	cleanup_close int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	struct arena a;
	bool huge = false;
	int r = arena_open(fs, extent_bytes(), &a);

	if (r < 0)
		return r;
	r = arena_alloc(&a, 0, extent_bytes());
	if (r == 0) {
		*(volatile unsigned char *)a.alias = 1;
		if (pagemap >= 0 && pagemap_probe(pagemap) == 0) {
			r = pagemap_scan(pagemap, a.alias, extent_bytes(), huge_run, &huge);
			if (r == 0 && !huge)
				r = -ENOENT;
		} else {
			r = -EOPNOTSUPP; /* cannot be seen before 6.7 */
		}
	}
	arena_close(&a);
	return r;
}

void pager_caps_probe(struct pager_caps *ret, const char *folder)
{
	struct uffd_caps u = { 0 };
	struct arena_fs fs, memfds = { .mount_fd = -1 };
	struct ring *ring = NULL;
	cleanup_close int fd = -1, pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);

	*ret = (struct pager_caps){ .page_bytes = page_bytes(), .extent_bytes = extent_bytes() };
	ret->dev_userfaultfd = try_way(0);
	ret->sys_userfaultfd = try_way(1);
	ret->user_userfaultfd = try_way(2);
	fd = uffd_open(true, true, &u);
	ret->minor_shmem = fd < 0 ? fd : 0;
	ret->event_fork = fd < 0 ? fd : u.event_fork ? 0 : -EPERM;
	ret->wp_shmem = fd < 0 ? fd : u.wp ? 0 : -EOPNOTSUPP;
	ret->exact_address = fd < 0 ? fd : u.exact_address ? 0 : -EOPNOTSUPP;
	ret->poison = fd < 0 ? fd : u.poison ? 0 : -EOPNOTSUPP;
	ret->pagemap_scan = pagemap < 0 ? -EACCES : pagemap_probe(pagemap);
	arena_fs_init(&fs, 16 * extent_bytes(), NULL, false, &ret->tmpfs);
	ret->tmpfs_noswap = ret->tmpfs < 0 ? ret->tmpfs : fs.noswap ? 0 : -EOPNOTSUPP;
	ret->tmpfs_huge = ret->tmpfs < 0 ? ret->tmpfs : try_huge(&fs);
	arena_fs_done(&fs);
	arena_fs_init(&fs, 16 * extent_bytes(), NULL, true, &ret->shared_tmpfs);
	ret->shared_huge = ret->shared_tmpfs < 0 ? ret->shared_tmpfs : try_huge(&fs);
	arena_fs_done(&fs);
	ret->memfd_huge = try_huge(&memfds);
	ret->io_uring = ring_new(8, &ring);
	(void)ring_free(ring);
	ret->direct_io = try_direct(folder ? folder : ".");
	{
		cleanup_close int map = open("/proc/sys/vm/max_map_count", O_RDONLY | O_CLOEXEC);
		char text[32] = "";

		if (map >= 0 && read(map, text, sizeof(text) - 1) > 0)
			ret->max_map_count = strtoull(text, NULL, 10);
	}
}

enum way pager_caps_way(const struct pager_caps *caps)
{
	if (caps->minor_shmem < 0)
		return WAY_MMAP;
	if (caps->dev_userfaultfd == 0 || caps->sys_userfaultfd == 0)
		return WAY_EMBEDDED;
	return caps->user_userfaultfd == 0 ? WAY_USER : WAY_MMAP;
}
