/* SPDX-License-Identifier: Apache-2.0 */
/* The table of commands, and the first and last steps of every one. What a command does is in its own file. */
#include "cli/cmd.h"

#include <fcntl.h>
#include <locale.h>
#include <string.h>
#include <strings.h>

const struct command commands[] = {
	{ "inspect", cmd_inspect, "FILE...", "list what checkpoints hold: tensors, types, shapes, places" },
	{ "doctor", cmd_doctor, "", "say what this machine offers, and what weightd makes of it" },
	{ "demo", cmd_demo, "[FILE...]", "compare a three-stage pipeline with and without weightd" },
	{ "serve", cmd_serve, "", "run the daemon: one copy of the weights for all processes" },
	{ "ls", cmd_ls, "", "list what a daemon has in memory, and who uses it" },
	{ "stat", cmd_stat, "", "print a daemon's counts: memory, reads, drops, waits" },
	{ "prefetch", cmd_prefetch, "FILE...", "read checkpoints into a daemon's memory" },
	{ "drop", cmd_drop, "FILE...", "take checkpoints out of a daemon's memory" },
	{ "pin", cmd_pin, "FILE...", "keep checkpoints in a daemon's memory" },
	{ "unpin", cmd_unpin, "FILE...", "undo pin" },
	{ "shutdown", cmd_shutdown, "", "end a daemon" },
	{ "version", cmd_version, "", "print the version and what was built in" },
	{ "help", cmd_help, "[COMMAND]", "print help, also for one command" },
	{ NULL, NULL, NULL, NULL },
};

const struct command *command_find(const char *name)
{
	for (const struct command *c = commands; c->name; c++)
		if (strcmp(c->name, name) == 0)
			return c;
	return NULL;
}

int command_run(const struct command *command, int argc, char **argv)
{
	static char name[64];

	(void)snprintf(name, sizeof(name), "weightd %s", command->name);
	argv[0] = name;
	cmd_set_name(name);
	optind = 0; /* getopt_long() starts anew: `help` runs a second command */
	return command->run(argc, argv);
}

/* How many letters must be added, taken out, changed or swapped with their neighbour to make `a` into `b`. */
static unsigned int letters_apart(const char *a, const char *b)
{
	enum { LONGEST = 16 };
	unsigned int d[LONGEST + 1][LONGEST + 1];
	size_t na = strlen(a), nb = strlen(b);

	if (na > LONGEST || nb > LONGEST)
		return LONGEST;
	for (size_t i = 0; i <= na; i++) {
		for (size_t j = 0; j <= nb; j++) {
			if (i == 0 || j == 0) {
				d[i][j] = (unsigned int)(i + j);
				continue;
			}
			d[i][j] = MIN(MIN(d[i - 1][j], d[i][j - 1]) + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1]));
			if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
				d[i][j] = MIN(d[i][j], d[i - 2][j - 2] + 1);
		}
	}
	return d[na][nb];
}

int command_unknown(const char *name)
{
	const struct command *best = NULL;
	unsigned int best_apart = 3; /* more than two letters apart is another word */

	for (const struct command *c = commands; c->name; c++) {
		/* "ins" means "inspect", as far as no other begins so: the first one in the table wins. */
		bool begins = name[0] && strncasecmp(c->name, name, strlen(name)) == 0;
		unsigned int apart = begins ? 0 : letters_apart(name, c->name);

		if (apart < best_apart && apart < strlen(c->name)) {
			best = c;
			best_apart = apart;
		}
	}
	if (best)
		return cmd_usage_error("no command '%s'; did you mean 'weightd %s'?", name, best->name);
	return cmd_usage_error("no command '%s'", name);
}

/* A file that is opened later must not become stdout or stderr, which a caller may have closed: these numbers
 * are taken by descriptors that refuse what the number is for, so that writing is an error and told. */
static void hold_standard_fds(void)
{
	for (int fd = 0; fd <= 2; fd++)
		if (fcntl(fd, F_GETFD) < 0 && errno == EBADF)
			(void)open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
}

static int run(int argc, char **argv)
{
	const struct command *command;

	if (argc < 2) {
		cmd_print_overview(stderr);
		return CMD_USAGE;
	}
	if (strcmp(argv[1], "--help") == 0) {
		cmd_print_overview(stdout);
		return CMD_DONE;
	}
	if (strcmp(argv[1], "--version") == 0)
		return command_run(command_find("version"), 1, argv);
	if (strcmp(argv[1], "--") == 0 && argc > 2) {
		argv++;
		argc--;
	} else if (argv[1][0] == '-') {
		return cmd_usage_error("no option '%s' here; a command comes first", argv[1]);
	}
	command = command_find(argv[1]);
	if (!command)
		return command_unknown(argv[1]);
	return command_run(command, argc - 1, argv + 1);
}

int main(int argc, char **argv)
{
	int code;

	hold_standard_fds();
	/* For the width of characters only: names in checkpoints are UTF-8 whatever the user's locale is. */
	(void)setlocale(LC_CTYPE, "C.UTF-8");
	code = run(argc, argv);

	/* With SIGPIPE at its default the kernel ends us quietly when the reader of a pipe is gone; where a parent
	 * ignores it, the write fails with EPIPE, which is no news to anybody either. */
	errno = 0;
	if (fflush(stdout) != 0 || ferror(stdout)) {
		int error = errno ? errno : EIO;

		if (error != EPIPE)
			cmd_error("writing the output failed: %s", strerror(error));
		return code == CMD_DONE ? CMD_FAILED : code;
	}
	return code;
}
