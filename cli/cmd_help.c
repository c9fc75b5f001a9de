/* SPDX-License-Identifier: Apache-2.0 */
/* `weightd help`: the overview, or one command's own --help. */
#include "cli/cmd.h"

#include <string.h>

static const char help[] = "Usage: weightd help [COMMAND]\n"
			   "\n"
			   "Prints the list of commands, or the help of one command (the same as\n"
			   "weightd COMMAND --help).\n"
			   "\n"
			   "Options:\n"
			   "  --help     print this\n";

void cmd_print_overview(FILE *to)
{
	(void)fputs("Usage: weightd COMMAND [OPTION]... [ARGUMENT]...\n"
		    "\n"
		    "Owns the memory of model weights: checkpoint files stay where they are, the\n"
		    "first touch of a tensor reads it, and what a stage does not use leaves memory.\n"
		    "\n"
		    "Commands:\n",
		    to);
	for (const struct command *c = commands; c->name; c++)
		(void)fprintf(to, "  %s %-*s %s\n", c->name, (int)(17 - strlen(c->name)), c->arguments, c->summary);
	(void)fputs("\n"
		    "Options:\n"
		    "  --help     print this\n"
		    "  --version  print the version\n"
		    "\n"
		    "'weightd COMMAND --help' tells a command's options, weightd(1) all of them.\n"
		    "Sizes are in powers of 1024: 8G is 8 GiB.\n"
		    "Exit status: 0 done, 1 something failed (stderr says what), 2 bad command line.\n",
		    to);
}

int cmd_help(int argc, char **argv)
{
	static const struct option options[] = {
		{ "help", no_argument, NULL, CMD_OPT_HELP },
		{ NULL, 0, NULL, 0 },
	};
	const struct command *command;
	char *arguments[] = { NULL, (char[]){ "--help" }, NULL };
	int opt;

	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (opt == CMD_OPT_HELP)
			return cmd_print_help(help);
		return cmd_usage_error(NULL);
	}
	if (argc - optind > 1)
		return cmd_usage_error("one command at a time");
	if (optind == argc) {
		cmd_print_overview(stdout);
		return CMD_DONE;
	}
	command = command_find(argv[optind]);
	if (!command)
		return command_unknown(argv[optind]);
	return command_run(command, 2, arguments);
}
