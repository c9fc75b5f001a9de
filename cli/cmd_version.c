/* SPDX-License-Identifier: Apache-2.0 */
/* `weightd version`: what this binary is made of. Asks the libraries, not the headers that it was compiled with. */
#include "cli/cmd.h"
#include "lib/format.h"
#include "lib/include/weightd.h"

/* liburing 2.3 cannot tell its own version; whoever builds us asked pkg-config. */
#ifndef WD_LIBURING_VERSION
#define WD_LIBURING_VERSION "unknown"
#endif

static const char help[] = "Usage: weightd version [--json]\n"
			   "\n"
			   "Prints the version, the ways to run and checkpoint formats that were compiled\n"
			   "in, and the versions of the libraries in use.\n"
			   "\n"
			   "Options:\n"
			   "  --json     one JSON object: version, ways[], formats[], libraries{}, compiler\n"
			   "  --help     print this\n";

static const uint32_t ways[] = { WD_WAY_DAEMON, WD_WAY_EMBEDDED, WD_WAY_USER, WD_WAY_MMAP };

static int print_json(void)
{
	cleanup_json json_t *root = json_pack("{s:s, s:[], s:[], s:{s:s, s:s}, s:s}", "version", wd_version(), "ways",
					      "formats", "libraries", "jansson", jansson_version_str(), "liburing",
					      WD_LIBURING_VERSION, "compiler", __VERSION__);
	int r = root ? 0 : -ENOMEM;

	for (size_t i = 0; r == 0 && i < ARRAY_SIZE(ways); i++)
		r = json_array_append_new(json_object_get(root, "ways"), json_string(wd_way_name(ways[i])));
	for (size_t i = 0; r == 0 && i < nr_formats; i++)
		r = json_array_append_new(json_object_get(root, "formats"), json_string(formats[i]->name));
	return r == 0 ? json_print(root) : -ENOMEM;
}

int cmd_version(int argc, char **argv)
{
	static const struct option options[] = {
		CMD_COMMON_OPTIONS,
		{ NULL, 0, NULL, 0 },
	};
	bool json = false;
	int opt;

	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case CMD_OPT_HELP:
			return cmd_print_help(help);
		case CMD_OPT_JSON:
			json = true;
			break;
		default:
			return cmd_usage_error(NULL);
		}
	}
	if (optind < argc)
		return cmd_usage_error("takes no argument: '%s'", argv[optind]);
	if (json) {
		if (print_json() < 0) {
			cmd_error("out of memory");
			return CMD_FAILED;
		}
		return CMD_DONE;
	}
	(void)printf("weightd %s\n", wd_version());
	(void)printf("ways:      ");
	for (size_t i = 0; i < ARRAY_SIZE(ways); i++)
		(void)printf("%s%s", i ? ", " : "", wd_way_name(ways[i]));
	(void)printf("\nformats:   ");
	for (size_t i = 0; i < nr_formats; i++)
		(void)printf("%s%s", i ? ", " : "", formats[i]->name);
	(void)printf("\nlibraries: jansson %s, liburing %s\ncompiler:  %s\n", jansson_version_str(),
		     WD_LIBURING_VERSION, __VERSION__);
	return CMD_DONE;
}
