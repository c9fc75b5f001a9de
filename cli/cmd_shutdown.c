/* SPDX-License-Identifier: Apache-2.0 */
/* `weightd shutdown`: ends a daemon, and comes back when it has ended. */
#include "cli/daemon.h"

#include <poll.h>
#include <string.h>

#define END_MS 60000

static const char help[] = "Usage: weightd shutdown [OPTION]...\n"
			   "\n"
			   "Ends a daemon; for its user and root. It lets its clients go first: they go on,\n"
			   "on the files themselves. Comes back when it has ended (at most 60 seconds).\n"
			   "\n"
			   "Options:\n"
			   "  --socket=PATH  the daemon's socket (WEIGHTD_SOCKET, or the usual places)\n"
			   "  --json         one JSON object: pid and socket of what has ended\n"
			   "  --help         print this\n"
			   "\n"
			   "Exit status: 0 done, 1 something failed, 2 wrong command line.\n";

int cmd_shutdown(int argc, char **argv)
{
	static const struct option options[] = {
		DAEMON_COMMON_OPTIONS,
		{ NULL, 0, NULL, 0 },
	};
	cleanup_free union wire_any *m = calloc(1, sizeof(*m));
	cleanup_daemon struct daemon d = DAEMON_NONE;
	struct wd_err err = { "" };
	const char *socket = NULL;
	struct pollfd fd;
	bool json = false;
	int opt, r;

	while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
		switch (opt) {
		case CMD_OPT_HELP:
			return cmd_print_help(help);
		case CMD_OPT_JSON:
			json = true;
			break;
		case DAEMON_OPT_SOCKET:
			socket = optarg;
			break;
		default:
			return cmd_usage_error(NULL);
		}
	}
	if (optind < argc)
		return cmd_usage_error("takes no argument: '%s'", argv[optind]);
	if (!m) {
		cmd_error("out of memory");
		return CMD_FAILED;
	}
	if (daemon_open(socket, &d) < 0)
		return CMD_FAILED;
	m->h = (struct wire_head){ WIRE_MAGIC, WIRE_SHUTDOWN, sizeof(struct wire_plain), 0 };
	r = daemon_ask(&d, m, NULL, 0, WIRE_OK, END_MS, NULL, &err);
	if (r < 0 && r != -EPIPE) { /* it may be gone before its answer is read */
		cmd_error("%s", err.text);
		return CMD_FAILED;
	}
	/* The keeper holds the other end of the socket, too: its end means that both are gone. */
	fd = (struct pollfd){ .fd = d.fd, .events = POLLRDHUP };
	do
		r = poll(&fd, 1, END_MS);
	while (r < 0 && errno == EINTR);
	if (r <= 0) {
		cmd_error("the daemon (pid %u) at %s has said that it ends, but is still there after %d seconds",
			  d.welcome.pid, d.path, END_MS / 1000);
		return CMD_FAILED;
	}
	if (json) {
		cleanup_json json_t *root =
			json_pack("{s:I, s:o}", "pid", (json_int_t)d.welcome.pid, "socket", json_text(d.path));

		if (!root || json_print(root) < 0) {
			cmd_error("out of memory");
			return CMD_FAILED;
		}
		return CMD_DONE;
	}
	(void)printf("the daemon (pid %u) at %s has ended\n", d.welcome.pid, d.path);
	return CMD_DONE;
}
