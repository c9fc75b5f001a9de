/* SPDX-License-Identifier: Apache-2.0 */
#include "ufd/page.h"

#include <fcntl.h>
#include <stdlib.h>

#include "lib/base/base.h"

static uint64_t page_size, extent_size;

__attribute__((constructor)) static void page_init(void)
{
	cleanup_close int fd = open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", O_RDONLY | O_CLOEXEC);
	char text[32];
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	unsigned long long huge = 0;

	page_size = (uint64_t)sysconf(_SC_PAGESIZE);
	if (n > 0) {
		text[n] = 0;
		huge = strtoull(text, NULL, 10);
	}
	/* With 64 KiB pages a huge page is 512 MiB: too coarse to drop by. 2 MiB then, of smaller folios. */
	extent_size = huge > page_size && huge <= 2 * MiB ? huge : 2 * MiB;
}

uint64_t page_bytes(void)
{
	return page_size;
}

uint64_t extent_bytes(void)
{
	return extent_size;
}
