/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See cgroup.h. Where the controller lives:
 *   v1  /proc/self/cgroup has "N:memory:/path", the mount has the super option "memory".
 *   v2  it has "0::/path"; the folder's cgroup.controllers lists "memory", and children have it only if
 *       cgroup.subtree_control does. A cgroup with processes in it cannot switch that on (unless it is the root),
 *       so there the new one stands beside ours: that is no escape only if ours has no limit itself.
 */
#define _GNU_SOURCE
#include "cli/cgroup.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define REMOVE_TRIES 200 /* of 10 ms: a killed process gives back a few hundred MiB within it */

struct cgroup {
	int version;
	char *path;
	int stat_fd;
	char *enabled; /* v2: the cgroup.subtree_control in which we switched memory on */
};

/* The whole of a small file in the kernel's file systems. */
static int read_text(const char *path, char *buf, size_t room)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	size_t len = 0;
	ssize_t n;

	if (fd < 0)
		return -errno;
	while (len < room - 1 && (n = read(fd, buf + len, room - 1 - len)) != 0) {
		if (n < 0)
			return -errno;
		len += (size_t)n;
	}
	buf[len] = '\0';
	return 0;
}

static int write_text(const char *path, const char *text)
{
	cleanup_close int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0)
		return -errno;
	return write(fd, text, strlen(text)) < 0 ? -errno : 0;
}

__attribute__((format(printf, 2, 3))) static int path_make(char buf[static PATH_MAX], const char *fmt, ...)
{
	va_list args;
	int n;

	va_start(args, fmt);
	n = vsnprintf(buf, PATH_MAX, fmt, args);
	va_end(args);
	return n < 0 || n >= PATH_MAX ? -ENAMETOOLONG : 0;
}

/* Is `word` one of the words of a list? */
static bool has_word(const char *list, const char *word, const char *separators)
{
	size_t len = strlen(word);

	for (const char *p = list; *(p += strspn(p, separators)); p += strcspn(p, separators)) {
		if (strcspn(p, separators) == len && !memcmp(p, word, len))
			return true;
	}
	return false;
}

/* "name N" lines, as in memory.stat. */
static uint64_t stat_value(const char *text, const char *name)
{
	size_t len = strlen(name);

	for (const char *line = text; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (!strncmp(line, name, len) && line[len] == ' ')
			return strtoull(line + len + 1, NULL, 10);
	}
	return CGROUP_UNKNOWN;
}

static uint64_t or_zero(uint64_t n)
{
	return n == CGROUP_UNKNOWN ? 0 : n;
}

/* Our own path in the hierarchy that has the memory controller. Return: its version; -EOPNOTSUPP. */
static int own_path(const char *root, char path[static PATH_MAX])
{
	char file[PATH_MAX], line[PATH_MAX + 64];
	int version = 0, r = path_make(file, "%s/proc/self/cgroup", root);
	cleanup_fclose FILE *f = r < 0 ? NULL : fopen(file, "re");

	if (!f)
		return -EOPNOTSUPP;
	while (fgets(line, sizeof(line), f)) {
		char *controllers = strchr(line, ':'), *p = controllers ? strchr(controllers + 1, ':') : NULL;

		if (!p)
			continue;
		*p++ = '\0';
		p[strcspn(p, "\n")] = '\0';
		if (has_word(controllers + 1, "memory", ",") || (controllers[1] == '\0' && !version)) {
			version = controllers[1] ? 1 : 2;
			if ((r = path_make(path, "%s", p)) < 0)
				return r;
		}
		if (version == 1)
			break;
	}
	return version ? version : -EOPNOTSUPP;
}

/* Where that hierarchy is mounted, with what of our path lies below the mount's root appended. */
static int own_folder(const char *root, int version, const char *own, char folder[static PATH_MAX],
		      size_t *ret_mount_len)
{
	char file[PATH_MAX], *line = NULL;
	size_t room = 0;
	int r = path_make(file, "%s/proc/self/mountinfo", root);
	cleanup_fclose FILE *f = r < 0 ? NULL : fopen(file, "re");

	r = -EOPNOTSUPP;
	while (f && r == -EOPNOTSUPP && getline(&line, &room, f) > 0) {
		char mount_root[PATH_MAX], point[PATH_MAX], *tail = strstr(line, " - "), type[32], options[1024];
		const char *below = own;
		size_t len;

		if (!tail || sscanf(line, "%*s %*s %*s %4095s %4095s", mount_root, point) != 2 ||
		    sscanf(tail, " - %31s %*s %1023s", type, options) != 2)
			continue;
		if (version == 1 ? strcmp(type, "cgroup") || !has_word(options, "memory", ",") :
				   strcmp(type, "cgroup2"))
			continue;
		len = strlen(mount_root);
		if (len > 1) {
			if (strncmp(own, mount_root, len) || (own[len] && own[len] != '/'))
				continue;
			below = own + len;
		}
		while (*below == '/')
			below++;
		r = path_make(folder, "%s%s%s%s", root, point, *below ? "/" : "", below);
		*ret_mount_len = strlen(root) + strlen(point);
	}
	free(line);
	return r;
}

/* Cgroups of our kind whose makers are dead. rmdir() refuses those in which something still runs. */
static void remove_left_behind(const char *folder, const char *name)
{
	size_t len = (size_t)(strrchr(name, '-') ? strrchr(name, '-') + 1 - name : 0);
	DIR *dir = len ? opendir(folder) : NULL;
	struct dirent *e;

	while (dir && (e = readdir(dir))) {
		long pid = strncmp(e->d_name, name, len) ? 0 : strtol(e->d_name + len, NULL, 10);

		if (pid > 0 && kill((pid_t)pid, 0) < 0 && errno == ESRCH)
			(void)unlinkat(dirfd(dir), e->d_name, AT_REMOVEDIR);
	}
	if (dir)
		(void)closedir(dir);
}

/* v2: the folder in which a child gets the memory controller: ours, or the one above (see the top of this file). */
static int v2_parent(struct cgroup *cg, char folder[static PATH_MAX], size_t mount_len, struct wd_err *err)
{
	char file[PATH_MAX], text[4096], *slash;
	int r;

	if ((r = path_make(file, "%s/cgroup.controllers", folder)) < 0)
		return r;
	if (read_text(file, text, sizeof(text)) < 0 || !has_word(text, "memory", " \n"))
		return err_set(err, -EOPNOTSUPP, "the memory controller is not there in %s", folder);
	if ((r = path_make(file, "%s/cgroup.subtree_control", folder)) < 0)
		return r;
	if (read_text(file, text, sizeof(text)) == 0 && has_word(text, "memory", " \n"))
		return 0;
	r = write_text(file, "+memory");
	if (r == 0) {
		cg->enabled = strdup(file);
		return cg->enabled ? 0 : -ENOMEM;
	}
	if (r != -EBUSY && r != -EACCES && r != -EPERM)
		return err_set(err, r, "%s: %s", file, strerror(-r));
	if (path_make(file, "%s/memory.max", folder) < 0 || read_text(file, text, sizeof(text)) < 0 ||
	    strncmp(text, "max", 3))
		return err_set(err, r, "%s has processes and a limit of its own, so no cgroup can be made there",
			       folder);
	slash = strrchr(folder, '/');
	if (!slash || (size_t)(slash - folder) < mount_len)
		return err_set(err, r, "no cgroup with the memory controller can be made in %s: %s", folder,
			       strerror(-r));
	*slash = '\0';
	if (path_make(file, "%s/cgroup.subtree_control", folder) < 0 || read_text(file, text, sizeof(text)) < 0 ||
	    !has_word(text, "memory", " \n"))
		return err_set(err, r, "no cgroup with the memory controller can be made in %s", folder);
	return 0;
}

int cgroup_new(const char *root, const char *name, struct cgroup **ret, struct wd_err *err)
{
	struct cgroup *cg = calloc(1, sizeof(*cg));
	char own[PATH_MAX], folder[PATH_MAX], path[PATH_MAX];
	size_t mount_len = 0;
	int r;

	if (!cg)
		return err_set(err, -ENOMEM, "out of memory");
	cg->stat_fd = -1;
	r = own_path(root, own);
	if (r >= 0) {
		cg->version = r;
		r = own_folder(root, r, own, folder, &mount_len);
	}
	if (r < 0) {
		err_set(err, r, "the memory controller is not mounted");
		goto fail;
	}
	if (cg->version == 2 && (r = v2_parent(cg, folder, mount_len, err)) < 0)
		goto fail;
	remove_left_behind(folder, name);
	if ((r = path_make(path, "%s/%s", folder, name)) < 0) {
		err_set(err, r, "%s: the path is too long", folder);
		goto fail;
	}
	if (mkdir(path, 0755) < 0 && errno != EEXIST) {
		r = -errno;
		err_set(err, r, "cannot make the cgroup %s: %s", path, strerror(-r));
		goto fail;
	}
	cg->path = strdup(path);
	if (!cg->path) {
		(void)rmdir(path);
		r = err_set(err, -ENOMEM, "out of memory");
		goto fail;
	}
	if (path_make(path, "%s/memory.stat", cg->path) == 0)
		cg->stat_fd = open(path, O_RDONLY | O_CLOEXEC);
	if (cg->stat_fd < 0) {
		r = err_set(err, -EOPNOTSUPP, "%s has no memory.stat", cg->path);
		goto fail;
	}
	*ret = cg;
	return 0;
fail:
	(void)cgroup_free(cg);
	return r;
}

int cgroup_set_limit(struct cgroup *cg, uint64_t bytes, struct wd_err *err)
{
	char path[PATH_MAX], text[32];
	int r = path_make(path, "%s/%s", cg->path, cg->version == 1 ? "memory.limit_in_bytes" : "memory.max");

	(void)snprintf(text, sizeof(text), "%ju", (uintmax_t)bytes);
	if (r == 0)
		r = write_text(path, text);
	return r < 0 ? err_set(err, r, "cannot limit the cgroup %s: %s", cg->path, strerror(-r)) : 0;
}

int cgroup_join(const struct cgroup *cg)
{
	char path[PATH_MAX];
	int r = path_make(path, "%s/cgroup.procs", cg->path);

	return r < 0 ? r : write_text(path, "0"); /* 0 is the writer */
}

int cgroup_usage(const struct cgroup *cg, struct cgroup_usage *ret)
{
	char path[PATH_MAX], text[16384];
	ssize_t n = pread(cg->stat_fd, text, sizeof(text) - 1, 0);
	struct cgroup_usage u = { .swap_in_bytes = CGROUP_UNKNOWN, .swap_out_bytes = CGROUP_UNKNOWN };
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), file;

	if (n < 0)
		return -errno;
	text[n] = '\0';
	u.shmem_bytes = or_zero(stat_value(text, "shmem"));
	u.anon_bytes = or_zero(stat_value(text, cg->version == 1 ? "rss" : "anon"));
	file = or_zero(stat_value(text, cg->version == 1 ? "cache" : "file")); /* with shmem in it, in both */
	u.cache_bytes = file - MIN(file, u.shmem_bytes);
	if (cg->version == 2) {
		u.swap_in_bytes = stat_value(text, "pswpin"); /* 6.12; pages */
		u.swap_out_bytes = stat_value(text, "pswpout");
		if (u.swap_in_bytes != CGROUP_UNKNOWN)
			u.swap_in_bytes *= page;
		if (u.swap_out_bytes != CGROUP_UNKNOWN)
			u.swap_out_bytes *= page;
	}
	if (path_make(path, "%s/%s", cg->path, cg->version == 1 ? "memory.oom_control" : "memory.events") == 0 &&
	    read_text(path, text, sizeof(text)) == 0)
		u.oom_kills = or_zero(stat_value(text, "oom_kill"));
	*ret = u;
	return 0;
}

const char *cgroup_path(const struct cgroup *cg)
{
	return cg->path;
}

static void kill_all(const struct cgroup *cg)
{
	char path[PATH_MAX];
	cleanup_fclose FILE *f = NULL;
	long pid;

	if (path_make(path, "%s/cgroup.procs", cg->path) < 0)
		return;
	f = fopen(path, "re");
	while (f && fscanf(f, "%ld", &pid) == 1) {
		if (pid > 0 && pid != getpid())
			(void)kill((pid_t)pid, SIGKILL);
	}
}

struct cgroup *cgroup_free(struct cgroup *cg)
{
	const struct timespec pause = { .tv_nsec = 10000000 };

	if (!cg)
		return NULL;
	if (cg->stat_fd >= 0)
		(void)close(cg->stat_fd);
	for (int i = 0; cg->path && i < REMOVE_TRIES && rmdir(cg->path) < 0 && errno == EBUSY; i++) {
		kill_all(cg);
		(void)nanosleep(&pause, NULL);
	}
	if (cg->enabled)
		(void)write_text(cg->enabled, "-memory");
	free(cg->enabled);
	free(cg->path);
	free(cg);
	return NULL;
}
