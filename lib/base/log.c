/* SPDX-License-Identifier: Apache-2.0 */
/* See log.h for threads and rules. */
#include <string.h>

#include "lib/base/log.h"

_Atomic int log_max = LOG_LEVEL_ERROR;

static const char *const names[] = {
	[LOG_LEVEL_ERROR] = "error",
	[LOG_LEVEL_INFO] = "info",
	[LOG_LEVEL_DEBUG] = "debug",
};

/* At start, not at first use: getenv() in a pager thread would race with the program's setenv(). */
static void __attribute__((constructor)) read_environment(void)
{
	const char *wanted = getenv("WEIGHTD_LOG");

	for (size_t i = 0; wanted && i < ARRAY_SIZE(names); i++)
		if (strcmp(wanted, names[i]) == 0)
			log_max = (int)i;
}

void log_write(enum log_level level, const char *fmt, ...)
{
	int saved = errno;
	struct wd_err line, text;
	char out[sizeof(line.text) + 1];
	va_list ap;
	size_t n;

	va_start(ap, fmt);
	if (vsnprintf(text.text, sizeof(text.text), fmt, ap) < 0)
		text.text[0] = '\0';
	va_end(ap);
	(void)err_set(&line, 0, "weightd: %s: %s", names[level], text.text);
	n = strlen(line.text);
	memcpy(out, line.text, n);
	out[n++] = '\n';
	while (write(STDERR_FILENO, out, n) < 0 && errno == EINTR)
		;
	errno = saved;
}
