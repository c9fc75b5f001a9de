/* SPDX-License-Identifier: Apache-2.0 */
/* Error texts. Knows nothing of ours. Threads: a struct wd_err belongs to one caller. No allocation, no stdio stream. */
#include <string.h>

#include "lib/base/base.h"

/* Bytes of the UTF-8 sequence at `s`, or 0 if there is none that may be shown (damaged, or a C1 control). */
static size_t utf8_len(const unsigned char *s)
{
	size_t n = s[0] < 0x80                 ? 1 :
		   s[0] >= 0xC2 && s[0] < 0xE0 ? 2 :
		   s[0] >= 0xE0 && s[0] < 0xF0 ? 3 :
		   s[0] >= 0xF0 && s[0] < 0xF5 ? 4 :
						 0;

	/* the NUL at the end is no continuation byte, so this stops in time */
	for (size_t i = 1; i < n; i++)
		if ((s[i] & 0xC0) != 0x80)
			return 0;
	if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] >= 0xA0) || (s[0] == 0xF0 && s[1] < 0x90) ||
	    (s[0] == 0xF4 && s[1] >= 0x90) || (s[0] == 0xC2 && s[1] < 0xA0))
		return 0;
	return n;
}

/* One line of valid UTF-8 that cannot steer a terminal: names come from files that anyone may have written. */
static void clean(char *text)
{
	for (unsigned char *s = (unsigned char *)text; *s;) {
		size_t n = utf8_len(s);

		if (n == 0 || *s < ' ' || *s == 0x7F) {
			*s++ = '?';
			continue;
		}
		s += n;
	}
}

int err_set(struct wd_err *err, int error, const char *fmt, ...)
{
	struct wd_err made; /* an argument may point into *err */
	va_list ap;

	if (!err)
		return error;
	va_start(ap, fmt);
	if (vsnprintf(made.text, sizeof(made.text), fmt, ap) < 0)
		made.text[0] = '\0';
	va_end(ap);
	clean(made.text);
	*err = made;
	return error;
}

int err_prefix(struct wd_err *err, int error, const char *fmt, ...)
{
	struct wd_err made;
	size_t used;
	va_list ap;
	int n;

	if (!err)
		return error;
	va_start(ap, fmt);
	n = vsnprintf(made.text, sizeof(made.text), fmt, ap);
	va_end(ap);
	used = n < 0 ? 0 : MIN((size_t)n, sizeof(made.text) - 1);
	if (snprintf(made.text + used, sizeof(made.text) - used, ": %s", err->text) < 0)
		made.text[used] = '\0';
	clean(made.text);
	*err = made;
	return error;
}
