/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What `weightd serve` is told: its options, each of which is also a key of the configuration file ("key = value", '#'
 * begins a comment line; the command line comes first). Knows texts and numbers; knows neither sockets nor the pager.
 *
 * Threads: none; everything here is for the main thread.
 */
#ifndef WD_CLI_SERVE_CONFIG_H
#define WD_CLI_SERVE_CONFIG_H

#include <getopt.h>

#include "lib/base/base.h"
#include "ufd/serve.h"

struct serve_settings {
	char *config; /* the file that was read, absolute; NULL: none */
	char *socket; /* absolute */
	bool socket_given;
	uint32_t socket_mode;
	uint64_t budget_bytes; /* 0: automatic */
	uint64_t idle_exit_ns; /* 0: never */
	char **preload;        /* absolute paths */
	size_t nr_preload;
	enum serve_numa numa;
	uint32_t numa_node;
	uint32_t max_clients, max_clients_per_user, max_views, pin_percent, spin_us;
	bool takeover, no_keeper, detach;
};

/* The options as they were given, to be read again with the file at each reload. */
struct serve_arguments {
	char *config; /* absolute; NULL: the default place, where no file is no error */
	struct serve_argument {
		size_t key;
		char *value; /* NULL: a flag; paths are absolute */
	} * given;
	size_t nr_given;
};

/* For getopt_long(): `val` is SERVE_OPT_KEY + a key's number; then --config and --help. Ends with zeros. */
enum { SERVE_OPT_CONFIG = 300, SERVE_OPT_KEY };
const struct option *serve_options(void);
/* Keeps one of them (a copy). Return: 0; -EINVAL (the text says why) and others. */
int serve_argument(struct serve_arguments *a, int opt, const char *value, struct wd_err *err);
/* The command line that starts such a daemon again, without what is only for the first time. Owner: the caller (one
 * free() for all). NULL: no memory. */
char **serve_arguments_again(const struct serve_arguments *a);
void serve_arguments_done(struct serve_arguments *a);

/* File and arguments together. Errors in the file begin with "FILE:LINE:". Return: 0; -EINVAL, -ENOENT and others. */
int serve_settings_load(const struct serve_arguments *a, struct serve_settings *ret, struct wd_err *err);
void serve_settings_done(struct serve_settings *s);
/* Names of keys in which two differ and which only a restart changes, "socket, numa"; "": none. Owner: the caller. */
char *serve_settings_fixed(const struct serve_settings *a, const struct serve_settings *b);

/* "default", "interleave", "local", "node:N" */
const char *serve_numa_text(enum serve_numa numa, uint32_t node, char buf[static 24]);

#endif
