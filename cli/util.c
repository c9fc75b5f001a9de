/* SPDX-License-Identifier: Apache-2.0 */
/* What commands share: errors, sizes, text that is safe to show, tables, JSON. Knows neither checkpoints nor the pager. */
#include "cli/cmd.h"

#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <wchar.h>

/* ---- errors and help */

static const char *command_name = "weightd";

void cmd_set_name(const char *name)
{
	command_name = name;
}

static void __attribute__((format(printf, 1, 0))) print_error(const char *fmt, va_list args)
{
	cleanup_free char *text = NULL, *safe = NULL;

	if (vasprintf(&text, fmt, args) < 0)
		text = NULL; /* what it points to is undefined then */
	else
		safe = text_escape(text, NULL);
	(void)fflush(stdout); /* both may be the same terminal */
	(void)fprintf(stderr, "%s: %s\n", command_name, safe ? safe : "out of memory");
}

void cmd_error(const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	print_error(fmt, args);
	va_end(args);
}

int cmd_usage_error(const char *fmt, ...)
{
	if (fmt) {
		va_list args;

		va_start(args, fmt);
		print_error(fmt, args);
		va_end(args);
	}
	(void)fprintf(stderr, "Try '%s --help'.\n", command_name);
	return CMD_USAGE;
}

int cmd_print_help(const char *text)
{
	(void)fputs(text, stdout);
	return CMD_DONE;
}

/* ---- sizes */

/* 0 for a suffix that is none; "" means bytes. */
static uint64_t unit_bytes(const char *suffix)
{
	static const char units[] = "KMGT";
	uint64_t bytes = 1;

	if (suffix[0] && strcasecmp(suffix, "B") != 0) {
		const char *unit = NULL;

		for (const char *u = units; *u; u++)
			if (strncasecmp(suffix, u, 1) == 0)
				unit = u;
		if (!unit)
			return 0;
		suffix++;
		if (suffix[0] && strcasecmp(suffix, "B") != 0 && strcasecmp(suffix, "iB") != 0)
			return 0;
		bytes = KiB << (10 * (unit - units));
	}
	return bytes;
}

int size_parse(const char *text, uint64_t whole, uint64_t *ret_bytes)
{
	/* The number is n / scale: at most 9 digits behind the point, exact, and no locale decides what a point is. */
	unsigned __int128 n = 0, scale = 1, bytes;
	const char *p = text;
	bool fraction = false;

	for (; (*p >= '0' && *p <= '9') || (*p == '.' && !fraction && p > text); p++) {
		if (*p == '.') {
			fraction = true;
			if (p[1] < '0' || p[1] > '9')
				return -EINVAL;
			continue;
		}
		n = n * 10 + (unsigned int)(*p - '0');
		if (fraction)
			scale *= 10;
		if (scale > 1000000000)
			return -EINVAL;
		if (n > (unsigned __int128)INT64_MAX * 1000000000)
			return -ERANGE;
	}
	if (p == text)
		return -EINVAL;
	if (strcmp(p, "%") == 0) {
		if (whole == 0)
			return -EINVAL;
		if (n > 100 * scale)
			return -ERANGE;
		bytes = n * whole / scale / 100;
	} else {
		uint64_t unit = unit_bytes(p);

		if (unit == 0 || (unit == 1 && fraction))
			return -EINVAL;
		/* n below 2^93 and unit at most 2^40: the product could pass 2^128 */
		if (n / scale > (uint64_t)INT64_MAX / unit)
			return -ERANGE;
		bytes = (n / scale) * unit + (n % scale) * unit / scale;
	}
	if (bytes > INT64_MAX)
		return -ERANGE;
	*ret_bytes = (uint64_t)bytes;
	return 0;
}

const char *size_text(uint64_t bytes, char buf[static SIZE_TEXT])
{
	static const char *const units[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
	double n = (double)bytes;
	size_t unit = 0;

	while (n >= 1023.5 && unit + 1 < ARRAY_SIZE(units)) {
		n /= 1024;
		unit++;
	}
	(void)snprintf(buf, SIZE_TEXT, "%.*f", unit == 0 || n >= 99.95 ? 0 : n >= 9.995 ? 1 : 2, n);
	if (strchr(buf, '.')) {
		size_t len = strlen(buf);

		while (buf[len - 1] == '0')
			buf[--len] = '\0';
		if (buf[len - 1] == '.')
			buf[--len] = '\0';
	}
	(void)snprintf(buf + strlen(buf), SIZE_TEXT - strlen(buf), " %s", units[unit]);
	return buf;
}

/* ---- text */

/* Reads one character of UTF-8. Return: its length in bytes; 0 when there is none here. */
static unsigned int utf8_next(const char *text, uint32_t *ret)
{
	const unsigned char *s = (const unsigned char *)text;
	static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 }; /* what is below was made longer than needed */
	unsigned int len = s[0] < 0x80           ? 1 :
			   (s[0] & 0xe0) == 0xc0 ? 2 :
			   (s[0] & 0xf0) == 0xe0 ? 3 :
			   (s[0] & 0xf8) == 0xf0 ? 4 :
						   0;
	uint32_t c = len == 1 ? s[0] : len == 0 ? 0 : s[0] & (0x7fu >> len);

	for (unsigned int i = 1; i < len; i++) {
		if ((s[i] & 0xc0) != 0x80) /* the NUL at the end as well */
			return 0;
		c = c << 6 | (s[i] & 0x3f);
	}
	if (len == 0 || c < least[len] || c > 0x10ffff || (c >= 0xd800 && c <= 0xdfff))
		return 0;
	*ret = c;
	return len;
}

/* Characters that show nothing, look like a space, or change the direction of others. wcwidth() does not tell. */
static bool misleads(uint32_t c)
{
	static const struct {
		uint32_t first, last;
	} ranges[] = {
		{ 0x80, 0xa0 },     { 0xad, 0xad },     { 0x61c, 0x61c },   { 0x115f, 0x1160 },
		{ 0x1680, 0x1680 }, { 0x180e, 0x180e }, { 0x2000, 0x200f }, { 0x2028, 0x202f },
		{ 0x205f, 0x206f }, { 0x2800, 0x2800 }, { 0x3000, 0x3000 }, { 0x3164, 0x3164 },
		{ 0xfeff, 0xfeff }, { 0xffa0, 0xffa0 }, { 0xfff9, 0xfffb }, { 0xe0000, 0xe0fff },
	};

	for (size_t i = 0; i < ARRAY_SIZE(ranges); i++)
		if (c >= ranges[i].first && c <= ranges[i].last)
			return true;
	return false;
}

#define ESCAPED_MOST 10 /* bytes of "\u{10ffff}", the longest that one byte or character becomes */

char *text_escape(const char *text, size_t *ret_columns)
{
	char *out = malloc(strlen(text) * ESCAPED_MOST + 1), *to = out, *shrunk;
	size_t columns = 0;

	if (!out)
		return NULL;
	for (const char *from = text; *from;) {
		uint32_t c = 0;
		unsigned int len = utf8_next(from, &c);
		int width;
		char *start = to;

		if (len == 0) {
			to += sprintf(to, "\\x%02x", (unsigned char)*from);
			len = 1;
		} else if (c == '\n' || c == '\t' || c == '\r' || c == '\\') {
			*to++ = '\\';
			*to++ = c == '\n' ? 'n' : c == '\t' ? 't' : c == '\r' ? 'r' : '\\';
		} else if (c < ' ' || c == 0x7f) {
			to += sprintf(to, "\\x%02x", c);
		} else if (c < 0x7f) {
			*to++ = (char)c;
		} else if (misleads(c) || (width = wcwidth((wchar_t)c)) < 0) {
			to += sprintf(to, "\\u{%x}", c);
		} else {
			(void)memcpy(to, from, len);
			to += len;
			columns += (size_t)width;
			start = to; /* counted already */
		}
		columns += (size_t)(to - start);
		from += len;
	}
	*to = '\0';
	if (ret_columns)
		*ret_columns = columns;
	shrunk = realloc(out, (size_t)(to - out) + 1);
	return shrunk ? shrunk : out;
}

unsigned int term_columns(void)
{
	struct winsize size;
	const char *env;

	if (!isatty(STDOUT_FILENO))
		return 0;
	if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0)
		return size.ws_col;
	env = getenv("COLUMNS");
	return env && atoi(env) > 0 ? (unsigned int)atoi(env) : 80;
}

bool term_has_color(void)
{
	const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");

	return isatty(STDOUT_FILENO) && term && strcmp(term, "dumb") != 0 && !(no_color && no_color[0]);
}

/* ---- tables */

#define TABLE_GAP 2        /* spaces between columns */
#define TABLE_CUT_LEAST 16 /* a name of fewer columns tells nothing: then the terminal wraps */
#define TABLE_WRAP_LEAST 24

void table_init(struct table *t, const struct column *columns, size_t nr_columns)
{
	*t = (struct table){ .columns = columns, .nr_columns = nr_columns };
}

/* Makes room for one element more, doubling. */
static int grow(void *array, size_t *room, size_t used, size_t more, size_t element)
{
	void **old = array, *bigger;
	size_t n = MAX(*room * 2, MAX(used + more, (size_t)256));

	if (used + more <= *room)
		return 0;
	bigger = reallocarray(*old, n, element);
	if (!bigger)
		return -ENOMEM;
	*old = bigger;
	*room = n;
	return 0;
}

void table_cell(struct table *t, const char *text)
{
	size_t columns = 0, len;
	cleanup_free char *safe = text_escape(text, &columns);

	if (!safe)
		t->error = -ENOMEM;
	if (t->error < 0)
		return;
	len = strlen(safe);
	if (grow(&t->text, &t->text_room, t->text_len, len + 1, 1) < 0 ||
	    grow(&t->cells, &t->cells_room, t->nr_cells, 1, sizeof(*t->cells)) < 0) {
		t->error = -ENOMEM;
		return;
	}
	(void)memcpy(t->text + t->text_len, safe, len + 1);
	t->cells[t->nr_cells++] = (struct table_text){
		.offset = t->text_len,
		.len = (uint32_t)len,
		.width = (uint32_t)columns,
	};
	t->text_len += len + 1;
}

void table_printf(struct table *t, const char *fmt, ...)
{
	cleanup_free char *text = NULL;
	va_list args;
	int r;

	va_start(args, fmt);
	r = vasprintf(&text, fmt, args);
	va_end(args);
	if (r < 0) {
		text = NULL;
		t->error = -ENOMEM;
		return;
	}
	table_cell(t, text);
}

void table_color(struct table *t, const char *color)
{
	if (t->error == 0)
		t->cells[t->nr_cells - 1].color = color;
}

static void spaces(size_t n)
{
	static const char blank[] = "                                                                ";

	for (; n > 0; n -= MIN(n, sizeof(blank) - 1))
		(void)fwrite(blank, 1, MIN(n, sizeof(blank) - 1), stdout);
}

/* How many bytes of `text` fit into `*columns`, of which the rest is left. */
static size_t bytes_that_fit(const char *text, size_t *columns)
{
	size_t len = 0;

	while (text[len]) {
		uint32_t c = 0;
		unsigned int n = utf8_next(text + len, &c);
		size_t width = (size_t)MAX(n ? wcwidth((wchar_t)c) : 1, 0);

		if (width > *columns)
			break;
		*columns -= width;
		len += MAX(n, 1u);
	}
	return len;
}

/* The beginning (unless `front` is cut), an ellipsis, and the end, padded to `columns`. */
static void print_cut(const char *text, const struct table_text *cell, size_t columns, bool front)
{
	size_t head = front ? 0 : (columns - 1) / 2, tail = columns - 1 - head;
	size_t pad = head, skip = cell->width - tail, len;

	len = bytes_that_fit(text, &pad);
	(void)fwrite(text, 1, len, stdout);
	(void)fputs("\xe2\x80\xa6", stdout);
	len = bytes_that_fit(text, &skip);
	if (skip > 0) { /* a wide character lies across the place: it goes as a whole */
		uint32_t c;

		len += utf8_next(text + len, &c);
		pad += skip;
	}
	(void)fputs(text + len, stdout);
	spaces(pad);
}

/* Prints words in lines of `columns`; lines but the first begin after `indent` spaces. */
static void print_wrapped(const char *text, size_t columns, size_t indent)
{
	while (*text) {
		size_t room = columns, fits = bytes_that_fit(text, &room), len = fits;

		if (text[fits] && text[fits] != ' ') {
			while (len > 0 && text[len - 1] != ' ')
				len--;
			if (len == 0)
				len = fits; /* one word that is longer than the line */
		}
		if (len == 0)
			len = 1;
		(void)fwrite(text, 1, len, stdout);
		text += len;
		while (*text == ' ')
			text++;
		if (*text) {
			(void)fputc('\n', stdout);
			spaces(indent);
		}
	}
}

/* How many columns are beside each other. */
static size_t columns_beside(const struct table *t)
{
	return t->nr_columns - (t->columns[t->nr_columns - 1].kind == COLUMN_BELOW);
}

/* The width of each column, so that a line fits the terminal as far as that is possible. */
static void column_widths(const struct table *t, unsigned int indent, size_t *widths)
{
	size_t sum = indent, columns = term_columns(), most = 0, nr = columns_beside(t);

	for (size_t i = 0; i < nr; i++)
		widths[i] = t->columns[0].title ? strlen(t->columns[i].title) : 0;
	for (size_t i = 0; i < t->nr_cells; i++)
		widths[i % t->nr_columns] = MAX(widths[i % t->nr_columns], (size_t)t->cells[i].width);
	for (size_t i = 0; i < nr; i++)
		sum += widths[i] + (i ? TABLE_GAP : 0);
	if (columns == 0 || sum <= columns)
		return;
	for (size_t i = 0; i < nr; i++) {
		enum column_kind kind = t->columns[i].kind;

		if (kind != COLUMN_CUT && kind != COLUMN_CUT_FRONT && kind != COLUMN_WRAP)
			continue;
		most = kind == COLUMN_WRAP ? TABLE_WRAP_LEAST : TABLE_CUT_LEAST;
		if (widths[i] <= most)
			continue;
		if (widths[i] - most >= sum - columns)
			most = widths[i] - (sum - columns);
		sum -= widths[i] - most;
		widths[i] = most;
		if (sum <= columns)
			return;
	}
}

int table_print(const struct table *t, unsigned int indent)
{
	cleanup_free size_t *widths = calloc(t->nr_columns, sizeof(*widths));
	size_t nr = columns_beside(t), terminal = term_columns();
	bool color = term_has_color();

	if (t->error < 0 || !widths)
		return -ENOMEM;
	column_widths(t, indent, widths);
	if (t->columns[0].title) {
		spaces(indent);
		for (size_t i = 0; i < nr; i++) {
			bool last = i + 1 == nr;
			size_t pad = widths[i] - strlen(t->columns[i].title);

			spaces(t->columns[i].kind == COLUMN_RIGHT ? pad : 0);
			(void)fputs(t->columns[i].title, stdout);
			spaces(last ? 0 : TABLE_GAP + (t->columns[i].kind == COLUMN_RIGHT ? 0 : pad));
		}
		(void)fputc('\n', stdout);
	}
	for (size_t first = 0; first + t->nr_columns <= t->nr_cells; first += t->nr_columns) {
		size_t at = indent;

		spaces(indent);
		for (size_t i = 0; i < nr; i++) {
			const struct table_text *cell = &t->cells[first + i];
			const char *text = t->text + cell->offset;
			bool last = i + 1 == nr;
			size_t pad = widths[i] > cell->width ? widths[i] - cell->width : 0;

			if (t->columns[i].kind == COLUMN_RIGHT)
				spaces(pad);
			if (color && cell->color)
				(void)fputs(cell->color, stdout);
			if (cell->width > widths[i] && t->columns[i].kind == COLUMN_WRAP)
				print_wrapped(text, widths[i], at);
			else if (cell->width > widths[i])
				print_cut(text, cell, widths[i], t->columns[i].kind == COLUMN_CUT_FRONT);
			else
				(void)fwrite(text, 1, cell->len, stdout);
			if (color && cell->color)
				(void)fputs(TERM_RESET, stdout);
			if (!last)
				spaces(TABLE_GAP + (t->columns[i].kind == COLUMN_RIGHT ? 0 : pad));
			at += widths[i] + TABLE_GAP;
		}
		(void)fputc('\n', stdout);
		if (nr < t->nr_columns && t->cells[first + nr].len > 0) {
			size_t below = indent + 2 * TABLE_GAP;

			spaces(below);
			print_wrapped(t->text + t->cells[first + nr].offset,
				      terminal > below + TABLE_WRAP_LEAST ? terminal - below : SIZE_MAX, below);
			(void)fputc('\n', stdout);
		}
	}
	return 0;
}

void table_done(struct table *t)
{
	free(t->text);
	free(t->cells);
	*t = (struct table){ .columns = t->columns, .nr_columns = t->nr_columns };
}

/* ---- JSON */

json_t *json_text(const char *text)
{
	json_t *value = json_string(text); /* NULL also for what is no UTF-8 */
	cleanup_free char *valid = NULL;
	char *to;

	if (value)
		return value;
	to = valid = malloc(strlen(text) * 3 + 1);
	if (!valid)
		return NULL;
	for (const char *from = text; *from;) {
		uint32_t c;
		unsigned int len = utf8_next(from, &c);

		(void)memcpy(to, len ? from : "\xef\xbf\xbd", len ? len : 3);
		to += len ? len : 3;
		from += len ? len : 1;
	}
	*to = '\0';
	return json_string(valid);
}

int json_print(const json_t *value)
{
	/* Only ASCII on a terminal: direction marks and C1 controls are legal in JSON's strings. */
	size_t flags = isatty(STDOUT_FILENO) ? JSON_INDENT(2) | JSON_ENSURE_ASCII : 0;

	if (json_dumpf(value, stdout, flags) < 0 && !ferror(stdout))
		return -ENOMEM;
	(void)fputc('\n', stdout);
	return 0;
}
