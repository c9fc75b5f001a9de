/* SPDX-License-Identifier: Apache-2.0 */
#include "ufd/room.h"

#include <fcntl.h>
#include <string.h>

static int slurp(const char *dir, const char *sub, const char *name, char *buf, size_t size)
{
	char path[1024];
	cleanup_close int fd = -1;
	ssize_t n;

	if (snprintf(path, sizeof(path), "%s%s/%s", dir, sub, name) >= (int)sizeof(path))
		return -ENAMETOOLONG;
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -errno;
	n = read(fd, buf, size - 1);
	if (n < 0)
		return -errno;
	buf[n] = 0;
	return 0;
}

/* The number after `key` at the beginning of a line ("MemTotal:", "inactive_file "). */
static bool field(const char *text, const char *key, uint64_t *ret)
{
	size_t len = strlen(key);

	for (const char *line = text; line && *line; line = strchr(line, '\n'), line += line != NULL) {
		if (strncmp(line, key, len) == 0) {
			*ret = strtoull(line + len, NULL, 10);
			return true;
		}
	}
	return false;
}

static void take(struct room *room, uint64_t limit, uint64_t used)
{
	uint64_t avail = limit > used ? limit - used : 0;

	if (avail < room->free_bytes)
		*room = (struct room){ avail, limit, true };
}

/* One cgroup. Its page cache can be reclaimed, so it does not count as used; shmem (the arenas) is not in these. */
static bool level(struct room *room, const char *root, const char *sub, bool v2)
{
	static const char *const keys[2][2] = { { "total_inactive_file ", "total_active_file " },
						{ "inactive_file ", "active_file " } };
	char text[8192];
	uint64_t limit, used, cache = 0, n;

	if (slurp(root, sub, v2 ? "memory.max" : "memory.limit_in_bytes", text, sizeof(text)) < 0)
		return false;
	if (!strncmp(text, "max", 3))
		return true;
	limit = strtoull(text, NULL, 10);
	if (limit >= UINT64_MAX / 4) /* v1 writes "no limit" as a huge number */
		return true;
	if (slurp(root, sub, v2 ? "memory.current" : "memory.usage_in_bytes", text, sizeof(text)) < 0)
		return true;
	used = strtoull(text, NULL, 10);
	if (slurp(root, sub, "memory.stat", text, sizeof(text)) == 0)
		for (int i = 0; i < 2; i++)
			if (field(text, keys[v2][i], &n))
				cache += n;
	take(room, limit, used > cache ? used - cache : 0);
	return true;
}

static void levels(struct room *room, const char *root, char *sub, bool v2)
{
	/* In a container without a cgroup namespace the path is the host's, but only the container's own part is
	 * mounted, at the root: then the root's files are ours. */
	if (!level(room, root, sub, v2))
		sub[0] = 0;
	for (;;) {
		char *slash = strrchr(sub, '/');

		(void)level(room, root, sub, v2);
		if (!sub[0])
			return;
		*(slash ? slash : sub) = 0;
	}
}

int room_get(const char *proc, const char *cgroup, struct room *ret)
{
	char text[8192], sub[768], root[256];
	uint64_t total = 0, avail = 0;
	int r = slurp(proc, "", "meminfo", text, sizeof(text));

	if (r < 0)
		return r;
	if (!field(text, "MemTotal:", &total) || !field(text, "MemAvailable:", &avail))
		return -EPROTO;
	*ret = (struct room){ avail * KiB, total * KiB, false };
	if (slurp(proc, "/self", "cgroup", text, sizeof(text)) < 0)
		return 0;
	/* cgroups(7): "hierarchy:controllers:path"; v2 is "0::path". */
	for (char *line = text, *end; *line; line = end + 1) {
		char *controllers, *path;

		end = strchr(line, '\n');
		if (!end)
			break;
		*end = 0;
		controllers = strchr(line, ':');
		path = controllers ? strchr(++controllers, ':') : NULL;
		if (!path)
			continue;
		*path++ = 0;
		if (strlen(path) >= sizeof(sub))
			continue;
		(void)strcpy(sub, strcmp(path, "/") ? path : "");
		if (!controllers[0]) {
			(void)snprintf(root, sizeof(root), "%s", cgroup);
			levels(ret, root, sub, true);
			/* hybrid set-ups mount v2 beside the v1 controllers */
			(void)strcpy(sub, strcmp(path, "/") ? path : "");
			(void)snprintf(root, sizeof(root), "%s/unified", cgroup);
			levels(ret, root, sub, true);
		} else if (!strcmp(controllers, "memory")) {
			(void)snprintf(root, sizeof(root), "%s/memory", cgroup);
			levels(ret, root, sub, false);
		}
	}
	return 0;
}
