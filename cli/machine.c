/* SPDX-License-Identifier: Apache-2.0 */
/* See machine.h. */
#include "cli/machine.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <string.h>

#define CAP_SYS_PTRACE_BIT 19 /* linux/capability.h */

/* The whole of a small file, without a newline at its end. "" if it cannot be read. */
static void read_text(const char *root, const char *path, char *buf, size_t room)
{
	char full[PATH_MAX];
	int n = snprintf(full, sizeof(full), "%s%s", root, path);
	cleanup_close int fd = n < 0 || n >= (int)sizeof(full) ? -1 : open(full, O_RDONLY | O_CLOEXEC);
	size_t len = 0;
	ssize_t got;

	while (fd >= 0 && len < room - 1 && (got = read(fd, buf + len, room - 1 - len)) > 0)
		len += (size_t)got;
	while (len > 0 && buf[len - 1] == '\n')
		len--;
	buf[len] = '\0';
}

/* What follows `key` and blanks in a text of "Key: value" lines; NULL if no line begins so. */
static const char *find_line(const char *text, const char *key)
{
	size_t len = strlen(key);

	for (const char *line = text; line; line = strchr(line, '\n')) {
		line += *line == '\n';
		if (strncmp(line, key, len) == 0)
			return line + len + strspn(line + len, " \t");
	}
	return NULL;
}

static int read_int(const char *root, const char *path)
{
	char text[32];
	int n;

	read_text(root, path, text, sizeof(text));
	return sscanf(text, "%d", &n) == 1 ? n : -1;
}

/* The word in brackets: "always [madvise] never" -> "madvise". */
static void read_choice(const char *root, const char *path, char word[static MACHINE_WORD])
{
	char text[128], *open_, *close_;

	read_text(root, path, text, sizeof(text));
	open_ = strchr(text, '[');
	close_ = open_ ? strchr(open_, ']') : NULL;
	if (close_)
		*close_ = '\0';
	(void)snprintf(word, MACHINE_WORD, "%s", close_ ? open_ + 1 : "");
}

/* How many a list like "0-3,8" names; 0: it is none. */
static unsigned int read_list(const char *root, const char *path)
{
	unsigned int sum = 0, first, last;
	char text[256];
	int len;

	read_text(root, path, text, sizeof(text));
	for (const char *p = text; *p; p += *p == ',') {
		if (sscanf(p, "%u%n", &first, &len) != 1)
			return 0;
		p += len;
		last = first;
		if (*p == '-') {
			if (sscanf(p, "-%u%n", &last, &len) != 1 || last < first)
				return 0;
			p += len;
		}
		if (*p && *p != ',')
			return 0;
		sum += last - first + 1;
	}
	return sum;
}

void machine_read(const char *root, struct machine *ret)
{
	struct machine m = { 0 };
	char text[8192];
	const char *value;
	uint64_t n;

	read_text(root, "/proc/meminfo", text, sizeof(text));
	value = find_line(text, "SwapTotal:");
	m.swap_bytes = value && sscanf(value, "%" SCNu64, &n) == 1 ? n * KiB : MACHINE_UNKNOWN;
	read_text(root, "/proc/self/status", text, sizeof(text));
	value = find_line(text, "Seccomp:");
	m.seccomp = value && value[0] != '0';
	value = find_line(text, "CapEff:");
	m.cap_ptrace = value && sscanf(value, "%" SCNx64, &n) == 1 && (n >> CAP_SYS_PTRACE_BIT & 1);
	read_text(root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", text, sizeof(text));
	m.huge_page_bytes = sscanf(text, "%" SCNu64, &n) == 1 ? n : 0;
	read_choice(root, "/sys/kernel/mm/transparent_hugepage/shmem_enabled", m.shmem_enabled);
	read_choice(root, "/sys/kernel/mm/transparent_hugepage/enabled", m.thp);
	m.overcommit = read_int(root, "/proc/sys/vm/overcommit_memory");
	m.io_uring_disabled = read_int(root, "/proc/sys/kernel/io_uring_disabled");
	m.unprivileged_userfaultfd = read_int(root, "/proc/sys/vm/unprivileged_userfaultfd");
	m.numa_nodes = read_list(root, "/sys/devices/system/node/online");
	*ret = m;
}
