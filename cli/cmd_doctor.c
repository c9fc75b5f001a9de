/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `weightd doctor`: what this machine gives, how to get what is missing, and which way to run follows.
 *
 * What the pager can use is probed by ufd/pager.h, which also decides the way; here are only the words, and what the
 * pager does not look at (limits, settings). No rule of the pager is repeated: why a way is not possible is found
 * by asking pager_caps_way() about a machine that lacks one thing at a time.
 */
#include "cli/daemon.h"
#include "cli/machine.h"
#include "lib/include/weightd.h"
#include "ufd/pager.h"
#include "ufd/room.h"

#include <fcntl.h>
#include <grp.h>
#include <inttypes.h>
#include <pwd.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/utsname.h>

enum { OPT_FOLDER = DAEMON_OPT_OWN };

static const char help[] =
	"Usage: weightd doctor [OPTION]...\n"
	"\n"
	"Tries what weightd can use on this machine, as the user who runs it. One line a\n"
	"check: what is there, what it gives, and how to get what is missing. Then: which\n"
	"ways to run are possible here, which one a program gets, and what stands in for\n"
	"what is missing. Says which daemon answers, and what one started here could do.\n"
	"Changes nothing.\n"
	"\n"
	"  ok       there\n"
	"  missing  not there\n"
	"  n/a      not needed here, or not to be asked here\n"
	"\n"
	"Options:\n"
	"  --folder=DIR   where the checkpoints are: O_DIRECT is tried there (.)\n"
	"  --socket=PATH  the daemon's socket (WEIGHTD_SOCKET, or the usual places)\n"
	"  --json         one JSON object (see below)\n"
	"  --help         print this\n"
	"\n"
	"JSON:\n"
	"  {\"version\", \"kernel\", \"machine\", \"uid\", \"way\": name or null,\n"
	"   \"daemon\": {\"socket\", \"version\", \"pid\", \"arena\", \"numa\"} or null,\n"
	"   \"checks\": [{\"name\", \"status\": \"ok\", \"missing\" or \"n/a\", \"found\", \"gives\",\n"
	"      \"get\": text where missing, else null}],\n"
	"   \"ways\": [{\"name\", \"possible\", \"chosen\", \"text\"}],\n"
	"   \"fallbacks\": [{\"for\": name of a check, \"text\"}]}\n"
	"\n"
	"Exit status: 0 a way to run exists, 1 none does, 2 wrong command line.\n";

/* ---- checks */

enum status { OK, MISSING, NOT_ASKED };
static const char *const status_names[] = { "ok", "missing", "n/a" };
static const char *const status_colors[] = { TERM_GREEN, TERM_YELLOW, NULL };

struct check {
	const char *name;
	enum status status;
	char *found;
	const char *gives;
	char *get; /* NULL: nothing to do */
};

struct report {
	struct utsname uts;
	struct pager_caps caps;
	struct machine machine;
	const char *folder;
	struct check checks[48];
	size_t nr_checks;
	bool no_memory;
	struct daemon daemon;
	int daemon_error; /* 0: it answers */
	struct wd_err daemon_err;
	json_t *daemon_stat; /* NULL: not asked */
	enum way way;        /* WAY_AUTO: none */
	char *way_text[WAY_MMAP + 1];
	bool possible[WAY_MMAP + 1];
};

static void report_done(struct report *r)
{
	daemon_done(&r->daemon);
	json_decref(r->daemon_stat);
	for (size_t i = 0; i < r->nr_checks; i++) {
		free(r->checks[i].found);
		free(r->checks[i].get);
	}
	for (size_t i = 0; i < ARRAY_SIZE(r->way_text); i++)
		free(r->way_text[i]);
}

static char *__attribute__((format(printf, 2, 3))) text(struct report *r, const char *fmt, ...)
{
	char *out = NULL;
	va_list args;

	va_start(args, fmt);
	if (vasprintf(&out, fmt, args) < 0) {
		out = NULL;
		r->no_memory = true;
	}
	va_end(args);
	return out;
}

/* Takes `found` and `get`. */
static void add(struct report *r, const char *name, enum status status, char *found, const char *gives, char *get)
{
	if (r->nr_checks == ARRAY_SIZE(r->checks))
		abort(); /* the array is sized for all calls in this file */
	if (status != MISSING) {
		free(get);
		get = NULL;
	}
	r->checks[r->nr_checks++] = (struct check){ name, status, found, gives, get };
}

/* A check that is one field of the caps. `works` is what is said if it is 0. */
static void add_cap(struct report *r, const char *name, int error, const char *works, const char *gives, char *get)
{
	if (error == 0)
		add(r, name, OK, text(r, "%s", works), gives, get);
	else
		add(r, name, MISSING, text(r, "refused: %s", strerror(-error)), gives, get);
}

static bool kernel_before(const struct report *r, unsigned int major, unsigned int minor)
{
	unsigned int a = 0, b = 0;

	return sscanf(r->uts.release, "%u.%u", &a, &b) != 2 || a < major || (a == major && b < minor);
}

/* For what a kernel of that version has: what else can be in the way is a filter of system calls. */
static char *get_kernel(struct report *r, unsigned int major, unsigned int minor)
{
	if (kernel_before(r, major, minor))
		return text(r, "run Linux %u.%u or later", major, minor);
	if (r->machine.seccomp)
		return text(
			r,
			"let the seccomp filter allow it (in a container: docker run --security-opt seccomp=PROFILE)");
	return text(r, "run a kernel that was built with it (Linux %u.%u and later can have it)", major, minor);
}

static void add_machine(struct report *r)
{
	char a[SIZE_TEXT], b[SIZE_TEXT];
	const struct machine *m = &r->machine;

	add(r, "kernel", kernel_before(r, 6, 1) ? MISSING : OK, text(r, "Linux %s, %s", r->uts.release, r->uts.machine),
	    "weights can be paged (Linux 6.1 and later)", text(r, "run Linux 6.1 or later"));
	if (m->huge_page_bytes > 0)
		add(r, "pages", OK,
		    text(r, "%s, huge pages %s, extents %s", size_text(r->caps.page_bytes, a),
			 size_text(m->huge_page_bytes, b), size_text(r->caps.extent_bytes, (char[SIZE_TEXT]){ 0 })),
		    "extents are what is read and dropped as one", NULL);
	else
		add(r, "pages", MISSING,
		    text(r, "%s, no huge pages, extents %s", size_text(r->caps.page_bytes, a),
			 size_text(r->caps.extent_bytes, b)),
		    "huge pages, on which first touches are several times cheaper",
		    text(r, "run a kernel with CONFIG_TRANSPARENT_HUGEPAGE"));
}

static bool any_userfaultfd(const struct pager_caps *c)
{
	return c->dev_userfaultfd == 0 || c->sys_userfaultfd == 0 || c->user_userfaultfd == 0;
}

static void add_userfaultfd(struct report *r)
{
	const struct pager_caps *c = &r->caps;
	const struct group *group = getgrgid(getegid());
	static const char kernel_faults[] = "system calls on weights that were not read yet work; drops at any time";
	char *get;

	if (c->dev_userfaultfd == 0 || c->sys_userfaultfd != 0) {
		if (c->dev_userfaultfd == -ENOENT)
			get = text(
				r,
				"run Linux 6.1 or later with CONFIG_USERFAULTFD; in a container: docker run --device "
				"/dev/userfaultfd");
		else if (geteuid() == 0)
			get = text(r, "in a container: docker run --device /dev/userfaultfd");
		else if (group)
			get = text(r, "as root: chgrp %s /dev/userfaultfd && chmod g+rw /dev/userfaultfd",
				   group->gr_name);
		else
			get = text(r, "as root: chgrp %u /dev/userfaultfd && chmod g+rw /dev/userfaultfd", getegid());
		add_cap(r, "dev-userfaultfd", c->dev_userfaultfd, "/dev/userfaultfd can be used", kernel_faults, get);
	} else {
		add(r, "dev-userfaultfd", NOT_ASKED,
		    text(r, "/dev/userfaultfd is refused (%s), but userfaultfd(2) works",
			 strerror(-c->dev_userfaultfd)),
		    kernel_faults, NULL);
	}

	if (c->sys_userfaultfd != 0 && c->dev_userfaultfd == 0)
		add(r, "userfaultfd", NOT_ASKED,
		    text(r, "userfaultfd(2) is refused (%s), but /dev/userfaultfd works",
			 strerror(-c->sys_userfaultfd)),
		    kernel_faults, NULL);
	else if (c->sys_userfaultfd == -EPERM && c->user_userfaultfd == 0 && !machine_may_userfaultfd(&r->machine))
		add_cap(r, "userfaultfd", c->sys_userfaultfd, "", kernel_faults,
			text(r, "as root: sysctl -w vm.unprivileged_userfaultfd=1, or for one program: setcap "
				"cap_sys_ptrace+ep PROGRAM"));
	else
		add_cap(r, "userfaultfd", c->sys_userfaultfd, "userfaultfd(2) works", kernel_faults,
			get_kernel(r, 4, 3));
	add_cap(r, "userfaultfd-user", c->user_userfaultfd, "userfaultfd(2) for user-mode faults works",
		"weights can be paged, with limits: see the way user below", get_kernel(r, 5, 11));

	if (!any_userfaultfd(c)) {
		add(r, "userfaultfd-features", NOT_ASKED, text(r, "there is no userfaultfd to ask"),
		    "fork events, minor faults, write-protection, exact addresses, poison", NULL);
		return;
	}
	add_cap(r, "fork-events", c->event_fork, "the kernel tells of new processes",
		"children of a raw clone(2) are served (those of fork(2) always are)",
		c->event_fork == -EPERM ? text(r, "run as root, or: setcap cap_sys_ptrace+ep PROGRAM") :
					  get_kernel(r, 4, 11));
	add_cap(r, "minor-shmem", c->minor_shmem, "minor faults on shared memory work",
		"a direct read goes straight into memory that programs see", get_kernel(r, 5, 14));
	add_cap(r, "wp-shmem", c->wp_shmem, "shared memory can be write-protected",
		"what a stage touched is observed cheaply, losing no write", get_kernel(r, 5, 19));
	add_cap(r, "exact-address", c->exact_address, "faults tell their exact address",
		"a touch reads its own tensor, not a neighbour in the same page", get_kernel(r, 5, 18));
	add_cap(r, "poison", c->poison, "UFFDIO_POISON works",
		"a touch of bytes that cannot be read is an error, at that page only", get_kernel(r, 6, 6));
}

static const char huge[] = "huge pages, on which first touches are several times cheaper";

/* Takes `found` and `get`. */
static void add_huge(struct report *r, const char *name, int error, char *found, char *get)
{
	if (error != -EOPNOTSUPP) {
		add(r, name, error == 0 ? OK : MISSING, found, huge, get);
		return;
	}
	free(found);
	add(r, name, NOT_ASKED, text(r, "it cannot be seen on this kernel (before 6.7)"), huge, get);
}

static void add_memory_kinds(struct report *r)
{
	const struct pager_caps *c = &r->caps;
	static const char noswap[] = "weights are dropped under pressure, never swapped";
	const char *shmem_enabled = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
	char *found;

	add_cap(r, "pagemap-scan", c->pagemap_scan, "PAGEMAP_SCAN works", "what a stage touched is found fast",
		get_kernel(r, 6, 7));
	add_cap(r, "tmpfs", c->tmpfs, "a tmpfs of our own can be made",
		"weights in memory with its own size, page size and swap rule",
		c->tmpfs == -EPERM ?
			text(r, "run as root (CAP_SYS_ADMIN); in a container: docker run --cap-add SYS_ADMIN") :
			get_kernel(r, 5, 2));
	if (c->tmpfs != 0) {
		add(r, "tmpfs-noswap", NOT_ASKED, text(r, "needs a tmpfs of our own"), noswap, NULL);
		add(r, "tmpfs-huge", NOT_ASKED, text(r, "needs a tmpfs of our own"), huge, NULL);
	} else {
		add_cap(r, "tmpfs-noswap", c->tmpfs_noswap, "its memory is never swapped", noswap, get_kernel(r, 6, 4));
		add_huge(r, "tmpfs-huge", c->tmpfs_huge,
			 text(r, "it gives %s pages", c->tmpfs_huge == 0 ? "huge" : "small"),
			 strcmp(r->machine.shmem_enabled, "deny") == 0 ?
				 text(r, "as root: echo never >%s (deny forbids them everywhere)", shmem_enabled) :
				 text(r, "free memory in one piece, as root: echo 1 >/proc/sys/vm/compact_memory"));
	}
	found = text(r, "shmem_enabled is %s", r->machine.shmem_enabled[0] ? r->machine.shmem_enabled : "not there");
	if (c->memfd_huge != 0 && c->tmpfs_huge == 0)
		add(r, "memfd-huge", NOT_ASKED, found, "huge pages where no tmpfs can be made (here one can)", NULL);
	else
		add_huge(r, "memfd-huge", c->memfd_huge, found, text(r, "as root: echo advise >%s", shmem_enabled));
	add(r, "transparent-huge", r->machine.thp[0] ? OK : MISSING,
	    text(r, "transparent_hugepage/enabled is %s", r->machine.thp[0] ? r->machine.thp : "not there"),
	    "huge pages for a program's own memory, not for weights",
	    text(r, "run a kernel with CONFIG_TRANSPARENT_HUGEPAGE"));
}

/* open(2): the file system has no O_DIRECT. Any other error came before it could be tried. */
#define DIRECT_REFUSED (-EINVAL)

static void add_reading(struct report *r)
{
	const struct pager_caps *c = &r->caps;
	char *get;

	if (r->machine.io_uring_disabled > 0)
		get = text(r, "as root: sysctl -w kernel.io_uring_disabled=0");
	else
		get = get_kernel(r, 5, 6);
	add_cap(r, "io-uring", c->io_uring, "io_uring works", "many reads at once by one thread", get);
	if (c->direct_io == 0)
		add(r, "direct-io", OK, text(r, "O_DIRECT works in %s", r->folder),
		    "files are read at the disk's speed, past the page cache", NULL);
	else if (c->direct_io != DIRECT_REFUSED)
		add(r, "direct-io", NOT_ASKED,
		    text(r, "no file can be made in %s to try it (%s); see --folder", r->folder,
			 strerror(-c->direct_io)),
		    "files are read at the disk's speed, past the page cache", NULL);
	else
		add(r, "direct-io", MISSING, text(r, "O_DIRECT is refused in %s", r->folder),
		    "files are read at the disk's speed, past the page cache",
		    text(r,
			 "keep checkpoints on ext4, XFS or btrfs, and name that folder: weightd doctor --folder=DIR"));
}

static void add_limits(struct report *r)
{
	const struct machine *m = &r->machine;
	struct rlimit files = { 0, 0 }, lock = { 0, 0 };
	char a[SIZE_TEXT], b[SIZE_TEXT];
	uint64_t maps = r->caps.max_map_count;
	struct room room;
	int e;

	add(r, "max-map-count", maps >= 65530 ? OK : MISSING, text(r, "vm.max_map_count is %" PRIu64, maps),
	    "each border between read and unread weights costs a mapping",
	    text(r, "as root: sysctl -w vm.max_map_count=65530"));
	(void)getrlimit(RLIMIT_NOFILE, &files);
	(void)getrlimit(RLIMIT_MEMLOCK, &lock);
	if (files.rlim_cur == RLIM_INFINITY)
		add(r, "open-files", OK, text(r, "no limit"), "a checkpoint file costs up to 4 descriptors", NULL);
	else
		add(r, "open-files", files.rlim_cur >= 1024 ? OK : MISSING,
		    text(r, "at most %" PRIu64, (uint64_t)files.rlim_cur),
		    "a checkpoint file costs up to 4 descriptors",
		    files.rlim_max >= 1024 ? text(r, "ulimit -n 1024") :
					     text(r, "as root: prlimit --nofile=1024:1024 --pid PID"));

	e = room_get("/proc", "/sys/fs/cgroup", &room);
	if (e < 0)
		add(r, "memory", MISSING, text(r, "/proc/meminfo: %s", strerror(-e)), "the budget is computed from it",
		    text(r, "as root: mount -t proc proc /proc"));
	else
		add(r, "memory", OK,
		    text(r, "%s free, of the %s %s", size_text(room.free_bytes, a),
			 room.cgroup ? "cgroup's limit of" : "machine's", size_text(room.total_bytes, b)),
		    "the automatic budget stays below what is free", NULL);
	if (m->swap_bytes == MACHINE_UNKNOWN)
		add(r, "swap", NOT_ASKED, text(r, "/proc/meminfo does not tell"), "weights cannot be swapped", NULL);
	else if (m->swap_bytes == 0)
		add(r, "swap", OK, text(r, "none"), "weights cannot be swapped", NULL);
	else if (r->caps.tmpfs == 0 && r->caps.tmpfs_noswap == 0)
		add(r, "swap", OK, text(r, "%s; weights stay out of it", size_text(m->swap_bytes, a)),
		    "weights cannot be swapped", NULL);
	else if (lock.rlim_cur == RLIM_INFINITY)
		add(r, "swap", OK, text(r, "%s; weights are locked in memory", size_text(m->swap_bytes, a)),
		    "weights cannot be swapped", NULL);
	else
		add(r, "swap", MISSING,
		    text(r, "%s; weights beyond RLIMIT_MEMLOCK (%s) could go there", size_text(m->swap_bytes, a),
			 size_text(lock.rlim_cur, b)),
		    "weights cannot be swapped",
		    text(r, "see tmpfs and tmpfs-noswap, or as root: prlimit --memlock=unlimited PROGRAM"));
	add(r, "overcommit",
	    m->overcommit < 0  ? NOT_ASKED :
	    m->overcommit != 2 ? OK :
				 MISSING,
	    m->overcommit < 0 ? text(r, "/proc/sys/vm cannot be read") :
				text(r, "vm.overcommit_memory is %d", m->overcommit),
	    "weights count as memory only when they are written to",
	    text(r, "as root: sysctl -w vm.overcommit_memory=0"));
}

/* ---- the daemon */

/* Whose it is: whoever made the socket. Owner: the caller. NULL: no memory. */
static char *daemon_owner(struct report *r)
{
	struct ucred peer = { .uid = 0 };
	socklen_t len = sizeof(peer);
	const struct passwd *user;

	(void)getsockopt(r->daemon.fd, SOL_SOCKET, SO_PEERCRED, &peer, &len);
	user = getpwuid(peer.uid);
	return user ? text(r, "%s's", user->pw_name) : text(r, "of uid %u", peer.uid);
}

static const char *stat_text(const struct report *r, const char *key)
{
	const char *value = json_string_value(json_object_get(r->daemon_stat, key));

	return value ? value : "?";
}

static void add_daemon(struct report *r, const char *socket)
{
	static const char gives[] = "one copy of the weights for all processes";
	const char *named = socket ? socket : getenv("WEIGHTD_SOCKET");

	r->daemon_error = daemon_connect(socket, &r->daemon, &r->daemon_err);
	if (r->daemon_error == 0)
		r->daemon_error = daemon_json(&r->daemon, WIRE_STAT, &r->daemon_stat, &r->daemon_err);
	if (r->daemon_error == 0) {
		cleanup_free char *owner = daemon_owner(r);

		add(r, "daemon", OK,
		    text(r, "weightd %s answers at %s (pid %u, %s); arenas: %s, NUMA: %s", stat_text(r, "version"),
			 r->daemon.path, r->daemon.welcome.pid, owner ? owner : "?", stat_text(r, "arena"),
			 stat_text(r, "numa")),
		    gives, NULL);
	} else if (r->daemon_error == -ENOENT || r->daemon_error == -ECONNREFUSED) {
		add(r, "daemon", MISSING, text(r, "none answers at %s", r->daemon.path), gives,
		    text(r, "weightd serve%s%s, or set WEIGHTD_AUTOSTART=1 for programs",
			 named && *named ? " --socket=" : "", named ? named : ""));
	} else {
		add(r, "daemon", MISSING, text(r, "%s", r->daemon_err.text), gives,
		    r->daemon_error == -EPROTONOSUPPORT ?
			    text(r, "install the same version, then: weightd serve --takeover") :
			    text(r, "name another socket (WEIGHTD_SOCKET), or start one of your own: weightd serve"));
	}
}

/* What a daemon that this user starts could do here. */
static void add_serve(struct report *r)
{
	const struct pager_caps *c = &r->caps;
	static const char gives[] = "a daemon started here has all that it can use";
	bool huge_pages = c->shared_tmpfs == 0 ? c->shared_huge == 0 : c->memfd_huge == 0;

	if (!any_userfaultfd(c))
		add(r, "serve", MISSING, text(r, "a daemon cannot run here: there is no userfaultfd"), gives,
		    text(r, "see dev-userfaultfd and userfaultfd"));
	else
		add(r, "serve", c->event_fork == 0 && c->shared_tmpfs == 0 && huge_pages ? OK : MISSING,
		    text(r, "%s, %s, %s",
			 c->event_fork == 0 ? "fork events" : "no fork events (forked children map the files)",
			 c->shared_tmpfs == 0 ? "private arenas" : "memfd arenas (its own user can write to them)",
			 huge_pages ? "huge pages" : "small pages"),
		    gives,
		    text(r, "see fork-events, tmpfs and %s above, or start it as root",
			 c->shared_tmpfs == 0 ? "tmpfs-huge" : "memfd-huge"));
}

static void add_numa(struct report *r)
{
	unsigned int nodes = r->machine.numa_nodes;

	if (nodes == 0)
		add(r, "numa", NOT_ASKED, text(r, "/sys/devices/system/node does not tell"),
		    "memory near to the processors that use it", NULL);
	else
		add(r, "numa", OK, text(r, "%u node%s", nodes, nodes == 1 ? "" : "s; weightd serve --numa says which"),
		    "memory near to the processors that use it", NULL);
}

/* ---- ways */

/* Fields whose lack can rule a way out, with the name of their check. */
static const struct {
	const char *name;
	size_t offset;
	bool of_userfaultfd; /* unknown where there is none */
} needs[] = {
	{ "userfaultfd-user", offsetof(struct pager_caps, user_userfaultfd), false },
	{ "fork-events", offsetof(struct pager_caps, event_fork), true },
	{ "minor-shmem", offsetof(struct pager_caps, minor_shmem), true },
	{ "wp-shmem", offsetof(struct pager_caps, wp_shmem), true },
	{ "exact-address", offsetof(struct pager_caps, exact_address), true },
	{ "poison", offsetof(struct pager_caps, poison), true },
	{ "pagemap-scan", offsetof(struct pager_caps, pagemap_scan), false },
	{ "tmpfs", offsetof(struct pager_caps, tmpfs), false },
	{ "tmpfs-noswap", offsetof(struct pager_caps, tmpfs_noswap), false },
	{ "tmpfs-huge", offsetof(struct pager_caps, tmpfs_huge), false },
	{ "memfd-huge", offsetof(struct pager_caps, memfd_huge), false },
	{ "io-uring", offsetof(struct pager_caps, io_uring), false },
	{ "direct-io", offsetof(struct pager_caps, direct_io), false },
};

static int *field(struct pager_caps *c, size_t i)
{
	return (int *)(void *)((char *)c + needs[i].offset);
}

/* Why pager_caps_way() does not give `way`: the names of the checks that it needs, one by one, on a machine that
 * has everything else (and, for WAY_USER, no kernel-mode faults: otherwise a better way would win). */
static char *why_not(struct report *r, enum way way)
{
	struct pager_caps all = r->caps;
	char *why = NULL;

	for (size_t i = 0; i < ARRAY_SIZE(needs); i++)
		*field(&all, i) = 0;
	all.dev_userfaultfd = all.sys_userfaultfd = way == WAY_USER ? -EPERM : 0;
	if (way == WAY_EMBEDDED && r->caps.dev_userfaultfd != 0 && r->caps.sys_userfaultfd != 0)
		why = text(r, "dev-userfaultfd or userfaultfd");
	for (size_t i = 0; i < ARRAY_SIZE(needs); i++) {
		struct pager_caps one = all;
		char *longer;

		*field(&one, i) = *field(&r->caps, i);
		if (*field(&one, i) == 0 || (needs[i].of_userfaultfd && !any_userfaultfd(&r->caps)) ||
		    pager_caps_way(&one) == way)
			continue;
		longer = text(r, "%s%s%s", why ? why : "", why ? ", " : "", needs[i].name);
		free(why);
		why = longer;
	}
	return why;
}

/* What wd_connect() obeys where a program leaves the choice to it; NULL: nothing. */
static const char *mode_asked(void)
{
	const char *mode = getenv("WEIGHTD_MODE"), *disable = getenv("WEIGHTD_DISABLE");

	if (disable && *disable && strcmp(disable, "0") != 0)
		return "mmap";
	return mode && mode[0] ? mode : NULL;
}

/* None answers, and a program would start one? */
static bool can_start(const struct report *r)
{
	return (r->daemon_error == -ENOENT || r->daemon_error == -ECONNREFUSED) && daemon_autostart() &&
	       any_userfaultfd(&r->caps);
}

static bool mmap_works(void)
{
	cleanup_close int fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	void *map;

	if (fd < 0) /* without /proc there is still memory to map */
		map = mmap(NULL, 1, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	else
		map = mmap(NULL, 1, PROT_READ, MAP_PRIVATE, fd, 0);
	if (map == MAP_FAILED)
		return false;
	(void)munmap(map, 1);
	return true;
}

static void find_ways(struct report *r)
{
	static const char *const gives[WAY_MMAP + 1] = {
		[WAY_EMBEDDED] = "a pager thread in each process; everything but sharing between processes",
		[WAY_USER] =
			"a pager thread in each process; system calls need weights populated first, drops at stage marks only",
		[WAY_MMAP] = "files are mapped; no budget, dropping is advice to the kernel",
	};
	struct pager_caps user = r->caps;
	const char *mode = mode_asked();

	user.dev_userfaultfd = user.sys_userfaultfd = -EPERM;
	r->possible[WAY_EMBEDDED] = pager_caps_way(&r->caps) == WAY_EMBEDDED;
	r->possible[WAY_USER] = pager_caps_way(&user) == WAY_USER;
	r->possible[WAY_MMAP] = mmap_works();

	r->possible[WAY_DAEMON] = r->daemon_error == 0;
	if (can_start(r)) {
		r->possible[WAY_DAEMON] = true;
		r->way_text[WAY_DAEMON] =
			text(r, "one copy for all processes; the first program starts the daemon (WEIGHTD_AUTOSTART)");
	} else if (r->possible[WAY_DAEMON])
		r->way_text[WAY_DAEMON] = text(r, "one copy for all processes, in the daemon (pid %u) at %s",
					       r->daemon.welcome.pid, r->daemon.path);
	else
		r->way_text[WAY_DAEMON] = text(r, "%s", r->daemon_err.text);
	for (enum way w = WAY_EMBEDDED; w <= WAY_MMAP; w++) {
		cleanup_free char *why = r->possible[w] || w == WAY_MMAP ? NULL : why_not(r, w);

		if (r->possible[w])
			r->way_text[w] = text(r, "%s", gives[w]);
		else if (w == WAY_MMAP)
			r->way_text[w] = text(r, "mmap(2) of a file fails");
		else
			r->way_text[w] = text(r, "needs %s (see above)", why ? why : "more than this machine has");
	}

	for (enum way w = WAY_MMAP; w >= WAY_DAEMON; w--)
		if (r->possible[w])
			r->way = w;
	if (!mode || strcmp(mode, "auto") == 0)
		return;
	r->way = WAY_AUTO;
	for (enum way w = WAY_DAEMON; w <= WAY_MMAP; w++)
		if (r->possible[w] && strcmp(mode, wd_way_name(w)) == 0)
			r->way = w;
}

/* ---- what stands in for what is missing */

/* Only what the way that was chosen uses. Ends with NULL in `name`. */
struct fallback {
	const char *name, *text;
	bool in_use;
};

#define NR_FALLBACKS 9

static void find_fallbacks(const struct report *r, struct fallback f[static NR_FALLBACKS])
{
	const struct pager_caps *c = &r->caps;
	bool paged = r->way == WAY_EMBEDDED || r->way == WAY_USER;
	const char *huge_name = c->tmpfs == 0 ? "tmpfs-huge" : "memfd-huge";
	int huge_error = c->tmpfs == 0 ? c->tmpfs_huge : c->memfd_huge;
	const struct fallback all[NR_FALLBACKS] = {
		{ "fork-events",
		  "fork(2) is served by a handler in the child; children of a raw clone(2) are not served",
		  c->event_fork != 0 },
		{ "poison", "a page of an empty file is mapped over what cannot be read", c->poison != 0 },
		{ "wp-shmem", "what a stage touched is not observed: without a plan all of it stays",
		  c->wp_shmem != 0 },
		{ "pagemap-scan", "/proc/self/pagemap is read, 8 bytes a page", c->pagemap_scan != 0 },
		{ "tmpfs", "weights live in memfds", c->tmpfs != 0 },
		{ "tmpfs-noswap", "weights are locked in memory as far as RLIMIT_MEMLOCK allows",
		  c->tmpfs != 0 || c->tmpfs_noswap != 0 },
		{ huge_name, "small pages are used", huge_error != 0 && huge_error != -EOPNOTSUPP },
		{ "io-uring", "files are read through the page cache, one piece at a time", c->io_uring != 0 },
		{ "direct-io", "files are read through the page cache", c->direct_io == DIRECT_REFUSED },
	};

	for (size_t i = 0; i < NR_FALLBACKS; i++) {
		f[i] = all[i];
		f[i].in_use = f[i].in_use && paged;
	}
}

/* ---- output */

static json_t *daemon_to_json(const struct report *r)
{
	if (r->daemon_error < 0)
		return json_null();
	return json_pack("{s:o, s:o, s:I, s:o, s:o}", "socket", json_text(r->daemon.path), "version",
			 json_text(stat_text(r, "version")), "pid", (json_int_t)r->daemon.welcome.pid, "arena",
			 json_text(stat_text(r, "arena")), "numa", json_text(stat_text(r, "numa")));
}

static int print_json(const struct report *r)
{
	struct fallback fallbacks[NR_FALLBACKS];
	cleanup_json json_t *checks = json_array(), *ways = json_array(), *used = json_array(), *root = NULL;
	int e = 0;

	find_fallbacks(r, fallbacks);
	for (size_t i = 0; e == 0 && i < r->nr_checks; i++) {
		const struct check *c = &r->checks[i];

		e = json_array_append_new(checks,
					  json_pack("{s:s, s:s, s:o, s:s, s:o}", "name", c->name, "status",
						    status_names[c->status], "found", json_text(c->found), "gives",
						    c->gives, "get", c->get ? json_text(c->get) : json_null()));
	}
	for (enum way w = WAY_DAEMON; e == 0 && w <= WAY_MMAP; w++)
		e = json_array_append_new(ways, json_pack("{s:s, s:b, s:b, s:s}", "name", wd_way_name(w), "possible",
							  (int)r->possible[w], "chosen", (int)(r->way == w), "text",
							  r->way_text[w]));
	for (size_t i = 0; e == 0 && i < NR_FALLBACKS; i++)
		if (fallbacks[i].in_use)
			e = json_array_append_new(
				used, json_pack("{s:s, s:s}", "for", fallbacks[i].name, "text", fallbacks[i].text));
	if (e < 0)
		return -ENOMEM;
	root = json_pack("{s:s, s:s, s:s, s:i, s:o, s:o, s:O, s:O, s:O}", "version", wd_version(), "kernel",
			 r->uts.release, "machine", r->uts.machine, "uid", (int)geteuid(), "way",
			 r->way != WAY_AUTO ? json_string(wd_way_name(r->way)) : json_null(), "daemon",
			 daemon_to_json(r), "checks", checks, "ways", ways, "fallbacks", used);
	return root ? json_print(root) : -ENOMEM;
}

static int print_text(const struct report *r)
{
	static const struct column columns[] = { { NULL, COLUMN_LEFT }, { NULL, COLUMN_LEFT }, { NULL, COLUMN_WRAP } };
	cleanup_table struct table checks, ways, used;
	struct fallback fallbacks[NR_FALLBACKS];
	const char *mode = mode_asked();
	int e;

	table_init(&checks, columns, ARRAY_SIZE(columns));
	table_init(&ways, columns, ARRAY_SIZE(columns));
	table_init(&used, columns + 1, ARRAY_SIZE(columns) - 1);
	for (size_t i = 0; i < r->nr_checks; i++) {
		const struct check *c = &r->checks[i];

		table_cell(&checks, status_names[c->status]);
		table_color(&checks, status_colors[c->status]);
		table_cell(&checks, c->name);
		if (c->get)
			table_printf(&checks, "%s. It would give: %s. To get it: %s", c->found, c->gives, c->get);
		else
			table_printf(&checks, c->status == OK ? "%s: %s" : "%s. It would give: %s", c->found, c->gives);
	}
	for (enum way w = WAY_DAEMON; w <= WAY_MMAP; w++) {
		table_cell(&ways, r->way == w ? "chosen" : r->possible[w] ? "possible" : "no");
		table_color(&ways, r->way == w ? TERM_GREEN : NULL);
		table_cell(&ways, wd_way_name(w));
		table_cell(&ways, r->way_text[w]);
	}
	find_fallbacks(r, fallbacks);
	for (size_t i = 0; i < NR_FALLBACKS; i++) {
		if (!fallbacks[i].in_use)
			continue;
		table_cell(&used, fallbacks[i].name);
		table_cell(&used, fallbacks[i].text);
	}

	(void)printf("weightd %s, uid %u\n\nWhat this machine offers\n", wd_version(), geteuid());
	e = table_print(&checks, 2);
	(void)puts("\nWays to run, best first");
	if (e == 0)
		e = table_print(&ways, 2);
	if (mode)
		(void)printf("  %s in the environment decides: %s\n",
			     getenv("WEIGHTD_MODE") == mode ? "WEIGHTD_MODE" : "WEIGHTD_DISABLE", mode);
	if (used.nr_cells > 0)
		(void)puts("\nWhat stands in for what is missing");
	return e == 0 ? table_print(&used, 2) : e;
}

int cmd_doctor(int argc, char **argv)
{
	static const struct option options[] = {
		DAEMON_COMMON_OPTIONS,
		{ "folder", required_argument, NULL, OPT_FOLDER },
		{ NULL, 0, NULL, 0 },
	};
	cleanup(report_done) struct report r = { .folder = ".", .daemon = { .fd = -1 } };
	const char *socket = NULL;
	struct stat st;
	bool json = false;
	int opt, error;

	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case CMD_OPT_HELP:
			return cmd_print_help(help);
		case CMD_OPT_JSON:
			json = true;
			break;
		case DAEMON_OPT_SOCKET:
			socket = optarg;
			break;
		case OPT_FOLDER:
			r.folder = optarg;
			break;
		default:
			return cmd_usage_error(NULL);
		}
	}
	if (optind < argc)
		return cmd_usage_error("takes no argument: '%s'", argv[optind]);
	errno = 0;
	if (stat(r.folder, &st) < 0 || !S_ISDIR(st.st_mode)) {
		cmd_error("folder %s: %s", r.folder, errno ? strerror(errno) : "not a folder");
		return CMD_FAILED;
	}
	if (uname(&r.uts) < 0) {
		cmd_error("uname: %s", strerror(errno));
		return CMD_FAILED;
	}
	pager_caps_probe(&r.caps, r.folder);
	machine_read("", &r.machine);
	add_machine(&r);
	add_userfaultfd(&r);
	add_memory_kinds(&r);
	add_reading(&r);
	add_limits(&r);
	add_numa(&r);
	add_serve(&r);
	add_daemon(&r, socket);
	find_ways(&r);
	error = r.no_memory ? -ENOMEM : json ? print_json(&r) : print_text(&r);
	if (error < 0) {
		cmd_error("out of memory");
		return CMD_FAILED;
	}
	if (r.way == WAY_AUTO) {
		cmd_error("no way to run: %s", mode_asked() ?
						       "WEIGHTD_MODE asks for one that this machine does not give" :
						       "not even mmap(2) of a file works");
		return CMD_FAILED;
	}
	return CMD_DONE;
}
