/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One mode, seen from outside: files out of the page cache, a cgroup, a process, samples of its memory.
 *
 * What is measured, and by what:
 *   memory      with a cgroup: its anonymous and shared memory, which has the arena's pages once, mapped or not, huge
 *               or not. Without one: RssAnon of the process and what the pager says that its arenas hold.
 *   page cache  with a cgroup: what was charged to it. Without one: what mincore(2) says of the checkpoints.
 *   disk        read_bytes of /proc/PID/io, read when the process has ended and before it is reaped: page cache misses,
 *               direct reads and io_uring all count there.
 *   faults      the kernel's count of major faults of the process; the pager's own count.
 *   swap        the cgroup's counts, where the kernel has them; otherwise the machine's.
 * Samples are taken every few milliseconds and at both ends of every stage, where the process waits for it.
 *
 * Threads: none here, and none may exist when a process is forked.
 */
#define _GNU_SOURCE
#include "cli/demo.h"

#include "cli/cgroup.h"
#include "cli/cmd.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#define SAMPLE_MS 4
#define CACHE_SAMPLE_S 0.05 /* mincore of a GiB takes some ms */
#define DROP_TRIES 20       /* of 10 ms: pages that are just being added are dropped the next time */
#define WARM_BYTES (4 * MiB)
#define TOUCH_MAX_BYTES (8 * GiB)

struct mapped_file {
	const char *path;
	void *map;
	size_t len;
};

struct measure {
	const struct demo_job *job;
	struct demo_setup *setup;
	struct demo_live *live;
	size_t live_len;
	struct cgroup *cg;
	struct mapped_file *files;
	size_t nr_files;
	pid_t pid;            /* 0: none to end */
	int status_fd, io_fd; /* of /proc/PID; who is not root cannot open them any more when the process has ended */
	uint64_t cached_before, swap_in_before, swap_out_before;
	double cache_seen_at;
	struct demo_stage_result *window; /* of the stage that runs */
	struct demo_result *result;
};

/* "name N" or "name: N" in one of the kernel's files. */
static uint64_t number_in(const char *text, const char *name)
{
	size_t len = strlen(name);

	for (const char *line = text; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (!strncmp(line, name, len) && strchr(" :\t", line[len]) && line[len])
			return strtoull(line + len + strspn(line + len, " :\t"), NULL, 10);
	}
	return DEMO_UNKNOWN;
}

static uint64_t number_in_fd(int fd, const char *name)
{
	char text[16384];
	ssize_t n, len = 0;

	while ((n = pread(fd, text + len, sizeof(text) - 1 - (size_t)len, len)) > 0)
		len += n;
	text[len] = '\0';
	return number_in(text, name);
}

static uint64_t number_of(const char *path, const char *name)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);

	return number_in_fd(fd, name);
}

static uint64_t in_bytes(uint64_t pages)
{
	return pages == DEMO_UNKNOWN ? pages : pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static uint64_t since(uint64_t now, uint64_t before)
{
	return now == DEMO_UNKNOWN || before == DEMO_UNKNOWN ? DEMO_UNKNOWN : now - MIN(now, before);
}

/* ---- the page cache */

static int map_files(struct measure *m, struct wd_err *err)
{
	size_t nr = 0;

	for (size_t i = 0; i < m->job->nr_models; i++)
		nr += m->job->models[i].nr_files;
	m->files = calloc(nr + 1, sizeof(*m->files));
	if (!m->files)
		return err_set(err, -ENOMEM, "out of memory");
	for (size_t i = 0; i < m->job->nr_models; i++) {
		for (size_t k = 0; k < m->job->models[i].nr_files; k++) {
			const char *path = m->job->models[i].files[k];
			cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
			struct stat st;
			void *map;

			if (fd < 0 || fstat(fd, &st) < 0)
				return err_set(err, -errno, "cannot open %s: %s", path, strerror(errno));
			/* mincore(2) tells the truth only about files that the caller owns or may write. */
			if (st.st_uid != geteuid() && faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) < 0)
				m->setup->cache_unseen = true;
			map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
			if (map == MAP_FAILED)
				return err_set(err, -errno, "cannot map %s: %s", path, strerror(errno));
			(void)madvise(map, (size_t)st.st_size, MADV_DONTFORK);
			m->files[m->nr_files++] =
				(struct mapped_file){ .path = path, .map = map, .len = (size_t)st.st_size };
		}
	}
	return 0;
}

static uint64_t cached_bytes(const struct mapped_file *f)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	unsigned char seen[4096];
	uint64_t n = 0;

	for (size_t at = 0; at < f->len; at += sizeof(seen) * page) {
		size_t len = MIN(f->len - at, sizeof(seen) * page), nr = (len + page - 1) / page;

		if (mincore((char *)f->map + at, len, seen) < 0)
			return 0;
		for (size_t i = 0; i < nr; i++)
			n += (seen[i] & 1) * page;
	}
	return n;
}

static uint64_t all_cached_bytes(const struct measure *m)
{
	uint64_t n = 0;

	for (size_t i = 0; i < m->nr_files; i++)
		n += cached_bytes(&m->files[i]);
	return n;
}

static int drop_from_cache(struct measure *m, const struct mapped_file *f, uint64_t *ret_stayed, struct wd_err *err)
{
	const struct timespec pause = { .tv_nsec = 10000000 };
	cleanup_close int fd = open(f->path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return err_set(err, -errno, "cannot open %s: %s", f->path, strerror(errno));
	for (int i = 0; i < DROP_TRIES; i++) {
		(void)fdatasync(fd); /* only clean pages are dropped; fails on read-only media, which have no others */
		(void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
		*ret_stayed = m->setup->cache_unseen ? 0 : cached_bytes(f);
		if (!*ret_stayed)
			break;
		(void)nanosleep(&pause, NULL);
	}
	return 0;
}

/* In large pieces: what small reads leave in the cache is many times slower to map. */
static int read_into_cache(const struct demo_setup *setup, const struct mapped_file *f, struct wd_err *err)
{
	cleanup_close int fd = open(f->path, O_RDONLY | O_CLOEXEC);
	cleanup_free char *buf = malloc(WARM_BYTES);
	ssize_t n;

	if (fd < 0 || !buf)
		return err_set(err, -errno, "cannot open %s: %s", f->path, strerror(errno));
	do {
		if (*setup->stop)
			return -EINTR;
		n = read(fd, buf, WARM_BYTES);
	} while (n > 0 || (n < 0 && errno == EINTR));
	return n < 0 ? err_set(err, -errno, "cannot read %s: %s", f->path, strerror(errno)) : 0;
}

/*
 * Memory that a virtual machine has not used lately is slow to touch for the first time (its host must find it), and
 * the mode that runs first would pay for all. So as much as a mode may need is touched and freed before each one, by a
 * process that offers itself to the kernel should memory be short.
 */
static int touch_memory(const struct measure *m, struct wd_err *err)
{
	uint64_t available = number_of("/proc/meminfo", "MemAvailable"), page = (uint64_t)sysconf(_SC_PAGESIZE),
		 len = 0;
	pid_t pid;
	int status;

	for (size_t i = 0; i < m->nr_files; i++)
		len += 2 * m->files[i].len; /* in memory and in the page cache */
	len = MIN(MIN(len, TOUCH_MAX_BYTES), available == DEMO_UNKNOWN ? 0 : available * KiB / 2);
	if (!len)
		return 0;
	pid = fork();
	if (pid < 0)
		return err_set(err, -errno, "cannot start a process: %s", strerror(errno));
	if (pid == 0) {
		cleanup_close int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
		char *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		/* Without that score the kernel might choose somebody else. */
		if (p == MAP_FAILED || fd < 0 || write(fd, "1000", 4) != 4)
			_exit(1);
		for (uint64_t i = 0; i < len; i += page) {
			p[i] = 1;
			if (i % (16 * MiB) == 0 && *m->setup->stop)
				break;
		}
		_exit(0);
	}
	while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
		;
	return *m->setup->stop ? -EINTR : 0;
}

static int prepare_cache(struct measure *m, struct wd_err *err)
{
	uint64_t stayed = 0, n = 0;
	int r;

	for (size_t i = 0; i < m->nr_files; i++) {
		if ((r = drop_from_cache(m, &m->files[i], &n, err)) < 0)
			return r;
		stayed += n;
	}
	if ((r = touch_memory(m, err)) < 0)
		return r;
	m->setup->stayed_cached_bytes = MAX(m->setup->stayed_cached_bytes, stayed);
	for (size_t i = 0; m->setup->warm && i < m->nr_files; i++) {
		if ((r = read_into_cache(m->setup, &m->files[i], err)) < 0)
			return r;
	}
	m->cached_before = m->setup->cache_unseen ? 0 : all_cached_bytes(m);
	return 0;
}

/* ---- samples */

static uint64_t rss_anon_bytes(const struct measure *m)
{
	uint64_t kib = number_in_fd(m->status_fd, "RssAnon");

	return kib == DEMO_UNKNOWN ? 0 : kib * KiB; /* no such line in a process that is ending */
}

static void sample(struct measure *m, bool boundary)
{
	struct demo_result *to = m->result;
	uint64_t weights = atomic_load(&m->live->weights_bytes), total;
	struct cgroup_usage u;

	if (m->cg) {
		if (cgroup_usage(m->cg, &u) < 0)
			return;
		total = u.anon_bytes + u.shmem_bytes;
		to->peak_cache_bytes = MAX(to->peak_cache_bytes, u.cache_bytes);
	} else {
		total = rss_anon_bytes(m) + (atomic_load(&m->live->in_arena) ? weights : 0);
		if (!m->setup->cache_unseen && (boundary || demo_now() - m->cache_seen_at > CACHE_SAMPLE_S)) {
			to->peak_cache_bytes = MAX(to->peak_cache_bytes, since(all_cached_bytes(m), m->cached_before));
			m->cache_seen_at = demo_now();
		}
	}
	/* The cgroup's count may be late by some pages a CPU; what is known to be there is there. */
	total = MAX(total, weights);
	to->peak_bytes = MAX(to->peak_bytes, total);
	to->peak_weights_bytes = MAX(to->peak_weights_bytes, weights);
	if (m->window) {
		m->window->peak_bytes = MAX(m->window->peak_bytes, total);
		m->window->peak_weights_bytes = MAX(m->window->peak_weights_bytes, weights);
	}
}

static void show_progress(const struct measure *m)
{
	int stage = atomic_load(&m->live->stage);

	if (m->setup->progress)
		demo_progress(demo_mode_names[m->result->mode], stage < 0 ? "" : m->job->stages[stage].name,
			      atomic_load(&m->live->done_bytes), atomic_load(&m->live->total_bytes));
}

/* ---- the process */

_Noreturn static void child(struct measure *m, int sync_fd, pid_t parent)
{
	(void)signal(SIGINT, SIG_DFL);
	(void)signal(SIGTERM, SIG_DFL);
	(void)signal(SIGHUP, SIG_DFL);
	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	if (m->cg) {
		int r = cgroup_join(m->cg);

		if (r < 0) {
			(void)snprintf(m->live->reason, sizeof(m->live->reason), "cannot enter the cgroup %s: %s",
				       cgroup_path(m->cg), strerror(-r));
			_exit(1);
		}
	}
	demo_run(m->job, m->result->mode, m->live, sync_fd);
}

/* Samples until the process closes its end of the socket. Return: 0; -EINTR. */
static int watch(struct measure *m, int sync_fd)
{
	for (;;) {
		struct pollfd p = { .fd = sync_fd, .events = POLLIN };
		int n = poll(&p, 1, SAMPLE_MS);
		char what;

		if (*m->setup->stop)
			return -EINTR;
		if (n <= 0) {
			sample(m, false);
			show_progress(m);
			continue;
		}
		if (recv(sync_fd, &what, 1, 0) != 1)
			return 0;
		if (what == DEMO_SYNC_BEGIN) {
			m->window = &m->result->stages[atomic_load(&m->live->stage)];
			m->window->entered = true;
		}
		sample(m, true);
		if (what == DEMO_SYNC_END)
			m->window = NULL;
		if (send(sync_fd, &what, 1, MSG_NOSIGNAL) != 1)
			return 0;
	}
}

/* What can be asked of a process only between its end and its burial. */
static int bury(struct measure *m, int *ret_status)
{
	struct demo_result *to = m->result;
	struct rusage usage = { 0 };
	siginfo_t info;

	while (waitid(P_PID, (id_t)m->pid, &info, WEXITED | WNOWAIT) < 0) {
		if (errno != EINTR || *m->setup->stop)
			return -errno;
	}
	to->read_bytes = number_in_fd(m->io_fd, "read_bytes");
	if (wait4(m->pid, ret_status, 0, &usage) < 0)
		return -errno;
	m->pid = 0;
	to->major_faults = (uint64_t)usage.ru_majflt;
	return 0;
}

static void swap_counts(const struct measure *m, uint64_t *ret_in, uint64_t *ret_out)
{
	struct cgroup_usage u;

	*ret_in = *ret_out = DEMO_UNKNOWN;
	if (m->cg && cgroup_usage(m->cg, &u) == 0) {
		*ret_in = u.swap_in_bytes;
		*ret_out = u.swap_out_bytes;
	}
	if (*ret_in == DEMO_UNKNOWN || *ret_out == DEMO_UNKNOWN) {
		*ret_in = in_bytes(number_of("/proc/vmstat", "pswpin"));
		*ret_out = in_bytes(number_of("/proc/vmstat", "pswpout"));
	}
}

/* finished, killed or failed, and why. */
static void judge(struct measure *m, int status)
{
	struct demo_result *to = m->result;
	struct cgroup_usage u = { 0 };
	char size[SIZE_TEXT];

	if (m->cg)
		(void)cgroup_usage(m->cg, &u);
	if (WIFSIGNALED(status)) {
		int sig = WTERMSIG(status);

		to->status = DEMO_KILLED;
		if (sig == SIGKILL && u.oom_kills && m->setup->limit_bytes)
			(void)snprintf(to->reason, sizeof(to->reason),
				       "out of memory: the kernel killed it at the limit of %s",
				       size_text(m->setup->limit_bytes, size));
		else if (sig == SIGKILL && u.oom_kills)
			(void)snprintf(to->reason, sizeof(to->reason), "out of memory: the kernel killed it");
		else
			(void)snprintf(to->reason, sizeof(to->reason), "killed by signal %d (%s)", sig, strsignal(sig));
	} else if (WEXITSTATUS(status) == 0 && m->live->finished) {
		to->status = DEMO_FINISHED;
	} else {
		to->status = DEMO_FAILED;
		m->live->reason[sizeof(m->live->reason) - 1] = '\0';
		if (m->live->reason[0])
			(void)snprintf(to->reason, sizeof(to->reason), "%s", m->live->reason);
		else
			(void)snprintf(to->reason, sizeof(to->reason), "it ended with exit code %d",
				       WEXITSTATUS(status));
	}
}

static void take_over(struct measure *m, double seconds)
{
	struct demo_result *to = m->result;
	uint64_t in, out;

	to->seconds = to->status == DEMO_FINISHED ? m->live->seconds : seconds;
	to->pager_faults = atomic_load(&m->live->pager_faults);
	to->reloads = atomic_load(&m->live->reloads);
	to->way = atomic_load(&m->live->way);
	swap_counts(m, &in, &out);
	to->swap_in_bytes = since(in, m->swap_in_before);
	to->swap_out_bytes = since(out, m->swap_out_before);
	memcpy(to->sha, m->live->sha, sizeof(to->sha));
	for (size_t i = 0; i < m->job->nr_stages; i++) {
		to->stages[i].done = m->live->stages[i].done;
		to->stages[i].seconds = m->live->stages[i].seconds;
		memcpy(to->stages[i].sha, m->live->stages[i].sha, sizeof(to->stages[i].sha));
	}
	if (!m->cg && m->setup->cache_unseen)
		to->peak_cache_bytes = DEMO_UNKNOWN;
}

static int run_process(struct measure *m, struct wd_err *err)
{
	cleanup_close int ours = -1, theirs = -1;
	char path[64];
	double begin;
	int fds[2], status = 0, r;
	pid_t parent = getpid();

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
		return err_set(err, -errno, "cannot make a socket: %s", strerror(errno));
	ours = fds[0];
	theirs = fds[1];
	begin = demo_now();
	m->pid = fork();
	if (m->pid < 0) {
		m->pid = 0;
		return err_set(err, -errno, "cannot start a process: %s", strerror(errno));
	}
	if (m->pid == 0) {
		(void)close(ours);
		child(m, theirs, parent);
	}
	(void)close(TAKE_FD(theirs));
	(void)snprintf(path, sizeof(path), "/proc/%d/status", (int)m->pid);
	m->status_fd = open(path, O_RDONLY | O_CLOEXEC);
	(void)snprintf(path, sizeof(path), "/proc/%d/io", (int)m->pid);
	m->io_fd = open(path, O_RDONLY | O_CLOEXEC);
	r = watch(m, ours);
	if (r == 0)
		r = bury(m, &status);
	if (m->setup->progress)
		demo_progress_clear();
	if (r < 0)
		return r == -EINTR ? r : err_set(err, r, "cannot wait for the process: %s", strerror(-r));
	judge(m, status);
	take_over(m, demo_now() - begin);
	return 0;
}

/* Nothing of a mode stays behind, whatever stopped us. */
static void measure_done(struct measure *m)
{
	if (m->pid > 0) {
		(void)kill(m->pid, SIGKILL);
		while (waitpid(m->pid, NULL, 0) < 0 && errno == EINTR)
			;
	}
	if (m->status_fd >= 0)
		(void)close(m->status_fd);
	if (m->io_fd >= 0)
		(void)close(m->io_fd);
	m->cg = cgroup_free(m->cg);
	for (size_t i = 0; i < m->nr_files; i++)
		(void)munmap(m->files[i].map, m->files[i].len);
	free(m->files);
	if (m->live)
		(void)munmap(m->live, m->live_len);
}

static int make_cgroup(struct measure *m, struct wd_err *err)
{
	char name[64];
	int r;

	(void)snprintf(name, sizeof(name), "weightd-demo-%d", (int)getpid());
	r = cgroup_new("", name, &m->cg, &m->setup->cgroup_why);
	m->setup->no_cgroup = r < 0;
	if (!m->setup->limit_bytes)
		return 0;
	if (r < 0)
		return err_set(err, r, "--limit needs a memory cgroup: %s", m->setup->cgroup_why.text);
	return cgroup_set_limit(m->cg, m->setup->limit_bytes, err);
}

int demo_measure(const struct demo_job *job, enum demo_mode mode, struct demo_setup *setup, struct demo_result *ret,
		 struct wd_err *err)
{
	struct measure m = { .job = job, .setup = setup, .status_fd = -1, .io_fd = -1, .result = ret };
	void *live;
	int r;

	memset(ret, 0, sizeof(*ret));
	ret->mode = mode;
	ret->stages = calloc(job->nr_stages, sizeof(*ret->stages));
	m.live_len = sizeof(struct demo_live) + job->nr_stages * sizeof(struct demo_live_stage);
	live = mmap(NULL, m.live_len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (live == MAP_FAILED || !ret->stages)
		return err_set(err, -ENOMEM, "out of memory");
	m.live = memset(live, 0, m.live_len); /* touched here: its pages are charged to us, not to the mode's cgroup */
	atomic_store(&m.live->stage, -1);

	r = map_files(&m, err);
	if (r == 0)
		r = prepare_cache(&m, err);
	if (r == 0)
		r = make_cgroup(&m, err);
	if (r == 0) {
		swap_counts(&m, &m.swap_in_before, &m.swap_out_before);
		r = run_process(&m, err);
	}
	measure_done(&m);
	return r;
}
