/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commands of `weightd` and what they share: arguments, sizes, tables, JSON, errors.
 *
 * To add a subcommand:
 *   1. cli/cmd_<name>.c with `int cmd_<name>(int argc, char **argv)`. argv[0] is "weightd <name>"; parse with
 *      getopt_long(argc, argv, "", ...), long options only, CMD_COMMON_OPTIONS in the table; return CMD_DONE, CMD_FAILED,
 *      or what cmd_usage_error() gives. --help prints to stdout by cmd_print_help(). main() flushes and checks stdout.
 *   2. its prototype below, and its line in `commands` in cli/main.c.
 *   3. its name and options in cli/completion.bash.
 *   4. its section in the man page weightd(1): options, exit codes, the shape of --json.
 *   5. its cases in tests/test_cli.c, and a line in CHANGELOG.
 *
 * Rules: results go to stdout, errors to stderr as "weightd <command>: ...", one line each. Text from files
 * (names, paths, metadata) reaches a terminal only through table_cell() or text_escape().
 *
 * Threads: none; everything here is for the main thread.
 */
#ifndef WD_CLI_CMD_H
#define WD_CLI_CMD_H

#include "lib/base/base.h"

#include <getopt.h>
#include <jansson.h>

#define CMD_DONE 0   /* all that was asked for was done */
#define CMD_FAILED 1 /* something failed; stderr says what */
#define CMD_USAGE 2  /* the command line is wrong; nothing was done */

struct command {
	const char *name;
	int (*run)(int argc, char **argv);
	const char *arguments; /* "FILE..." */
	const char *summary;   /* one line for `weightd help` */
};

int cmd_demo(int argc, char **argv);
int cmd_doctor(int argc, char **argv);
int cmd_drop(int argc, char **argv);
int cmd_help(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_ls(int argc, char **argv);
int cmd_pin(int argc, char **argv);
int cmd_prefetch(int argc, char **argv);
int cmd_serve(int argc, char **argv);
int cmd_shutdown(int argc, char **argv);
int cmd_stat(int argc, char **argv);
int cmd_unpin(int argc, char **argv);
int cmd_version(int argc, char **argv);

/* All of them, in the order in which help shows them; a NULL name ends the table. */
extern const struct command commands[];
/* NULL: there is none of that name. */
const struct command *command_find(const char *name);
/* Runs it; argv[0] is replaced by "weightd <name>". Return: the exit code. */
int command_run(const struct command *command, int argc, char **argv);
/* Says that there is no such command, with the nearest one's name. Return: CMD_USAGE. */
int command_unknown(const char *name);

/* `weightd help`, also for main(). */
void cmd_print_overview(FILE *to);
/* What stands before the colon of an error; "weightd" until then. Borrowed. */
void cmd_set_name(const char *name);

/* ---- arguments */

#define CMD_OPT_HELP \
	256 /* values for getopt_long()'s `val` that no character has; a command's own begin at CMD_OPT_OWN */
#define CMD_OPT_JSON 257
#define CMD_OPT_OWN 258
/* The options of every command that prints results; the row of zeros at the end is the caller's. */
#define CMD_COMMON_OPTIONS                              \
	{ "help", no_argument, NULL, CMD_OPT_HELP },    \
	{                                               \
		"json", no_argument, NULL, CMD_OPT_JSON \
	}

/* Writes "weightd <command>: text" to stderr as one line, whatever the text contains. */
void cmd_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* The same, followed by where to find help. Return: CMD_USAGE. With fmt NULL only the hint is written: for what
 * getopt_long() has already complained about. */
int cmd_usage_error(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Prints `text`, so that a command can `return cmd_print_help(text);`. Return: CMD_DONE. */
int cmd_print_help(const char *text);

/*
 * "512", "64K", "1.5G", "8GiB" -> bytes, powers of 1024 with and without "iB" or "B"; "50%" -> that part of `whole` (0:
 * per cent is not accepted).
 * Return: 0; -EINVAL not a size; -ERANGE above 2^63-1 (or 100 %).
 */
int size_parse(const char *text, uint64_t whole, uint64_t *ret_bytes);

#define SIZE_TEXT 24
/* "0 B", "1023 B", "1.5 KiB", "768 MiB", "2.25 GiB": at most four digits. Returns `buf`. */
const char *size_text(uint64_t bytes, char buf[static SIZE_TEXT]);

/* ---- text for people */

/*
 * A copy in which everything that could move a cursor or mislead a reader is spelled out: control and format
 * characters and white space but ' ' as \n, \t, \xNN or \u{NNNN}; bytes that are no UTF-8 as \xNN; a backslash as \\.
 * `ret_columns` (may be NULL): how wide a terminal shows it. Owner: the caller. NULL: no memory.
 */
char *text_escape(const char *text, size_t *ret_columns);

/* Columns of the terminal that stdout is; 0 where it is none (then nothing is cut or wrapped). */
unsigned int term_columns(void);
/* May stdout have colour: a terminal, TERM is not "dumb", NO_COLOR is unset or empty. */
bool term_has_color(void);

enum column_kind {
	COLUMN_LEFT,
	COLUMN_RIGHT,     /* numbers */
	COLUMN_CUT,       /* left; shortened in the middle where the terminal is too narrow. At most one in a table */
	COLUMN_CUT_FRONT, /* the same, but shortened in front: paths */
	COLUMN_WRAP,      /* left; words go on below. Only as the last one */
	COLUMN_BELOW,     /* in lines of its own below the row, unless it is empty. Only as the last one */
};

struct column {
	const char *title; /* NULL in the first one: no title line */
	enum column_kind kind;
};

struct table {
	const struct column *columns; /* borrowed */
	size_t nr_columns;
	char *text; /* private from here on */
	size_t text_len, text_room;
	struct table_text {
		size_t offset;
		uint32_t len, width;
		const char *color;
	} * cells;
	size_t nr_cells, cells_room;
	int error;
};

/* Cells are added row by row, left to right; text is copied and escaped. Memory that is missing is told by table_print(). */
void table_init(struct table *t, const struct column *columns, size_t nr_columns);
void table_cell(struct table *t, const char *text);
void table_printf(struct table *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* The last cell in that colour: TERM_*. */
void table_color(struct table *t, const char *color);
/* Prints to stdout, each line after `indent` spaces. Return: 0; -ENOMEM. */
int table_print(const struct table *t, unsigned int indent);
void table_done(struct table *t);
#define cleanup_table cleanup(table_done)

#define TERM_BOLD "\033[1m"
#define TERM_GREEN "\033[32m"
#define TERM_YELLOW "\033[33m"
#define TERM_RED "\033[31m"
#define TERM_RESET "\033[0m"

/* ---- JSON */

static inline void json_decref_p(json_t **j)
{
	json_decref(*j);
}
#define cleanup_json cleanup(json_decref_p)

/* A JSON string of any bytes: what is no UTF-8 becomes U+FFFD. NULL: no memory. */
json_t *json_text(const char *text);
/* Prints one value and a newline: indented and in ASCII on a terminal, else on one line. Return: 0; -ENOMEM. A write that
 * fails is told by main(). */
int json_print(const json_t *value);

#endif
