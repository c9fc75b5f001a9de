/* SPDX-License-Identifier: Apache-2.0 */
/* See serve_config.h. One table of keys serves the command line, the file, and the comparison at a reload. */
#include "cli/serve_config.h"

#include <ctype.h>
#include <limits.h>
#include <pwd.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/cmd.h"
#include "ufd/page.h"
#include "ufd/room.h"
#include "ufd/wire.h"

#define SYSTEM_CONFIG "/etc/weightd/weightd.conf"
#define SYSTEM_SOCKET "/run/weightd/weightd.sock"
#define MAX_LINE 65536

enum kind { PATH, FLAG, BUDGET, SECONDS, NUMBER, MODE, NUMA, LIST };

/* How a key may change when the file is read again. */
enum change {
	LIVE,   /* at once */
	FIXED,  /* by a restart */
	STARTS, /* concerns the start only */
};

#define AT(member) offsetof(struct serve_settings, member)

static const struct key {
	const char *name;
	enum kind kind;
	enum change change;
	size_t at;
	uint32_t min, max;
} keys[] = {
	{ "socket", PATH, FIXED, AT(socket), 0, 0 },
	{ "socket-mode", MODE, FIXED, AT(socket_mode), 0, 0777 },
	{ "budget", BUDGET, LIVE, AT(budget_bytes), 0, 0 },
	{ "idle-exit", SECONDS, LIVE, AT(idle_exit_ns), 0, 0 },
	{ "preload", LIST, STARTS, AT(preload), 0, 0 },
	{ "numa", NUMA, FIXED, AT(numa), 0, 1023 },
	{ "max-clients", NUMBER, LIVE, AT(max_clients), 1, 65536 },
	{ "max-clients-per-user", NUMBER, LIVE, AT(max_clients_per_user), 1, 65536 },
	{ "max-views", NUMBER, FIXED, AT(max_views), 1, 65536 },
	{ "pin-percent", NUMBER, FIXED, AT(pin_percent), 1, 100 },
	{ "spin-us", NUMBER, FIXED, AT(spin_us), 0, 10000 },
	{ "takeover", FLAG, STARTS, AT(takeover), 0, 0 },
	{ "no-keeper", FLAG, FIXED, AT(no_keeper), 0, 0 },
	{ "detach", FLAG, STARTS, AT(detach), 0, 0 },
};

/* ------------------------------------------------------------------ values */

static int no_memory(struct wd_err *err)
{
	return err_set(err, -ENOMEM, "out of memory");
}

static char *absolute(const char *path)
{
	char folder[PATH_MAX], *text;

	if (path[0] == '/')
		return strdup(path);
	if (!getcwd(folder, sizeof(folder)) || asprintf(&text, "%s/%s", folder, path) < 0)
		return NULL;
	return text;
}

static bool number_parse(const char *text, int base, uint64_t max, uint64_t *ret)
{
	char *end;

	if (!isdigit((unsigned char)text[0]))
		return false;
	errno = 0;
	*ret = strtoull(text, &end, base);
	return errno == 0 && *end == '\0' && *ret <= max;
}

/* "90", "90s", "10m", "2h", "1d", "never" */
static bool seconds_parse(const char *text, uint64_t *ret_ns)
{
	static const struct {
		char suffix;
		uint32_t seconds;
	} units[] = { { 's', 1 }, { 'm', 60 }, { 'h', 3600 }, { 'd', 86400 } };
	uint64_t seconds = 0, unit = 1;
	size_t len = strlen(text);
	char number[24];

	if (strcmp(text, "never") == 0) {
		*ret_ns = 0;
		return true;
	}
	if (len == 0 || len >= sizeof(number))
		return false;
	(void)strcpy(number, text);
	for (size_t i = 0; i < ARRAY_SIZE(units); i++) {
		if (number[len - 1] == units[i].suffix) {
			unit = units[i].seconds;
			number[len - 1] = '\0';
			break;
		}
	}
	if (!number_parse(number, 10, INT64_MAX / 1000000000 / unit, &seconds))
		return false;
	*ret_ns = seconds * unit * 1000000000;
	return true;
}

static int budget_parse(const char *text, uint64_t *ret, struct wd_err *err)
{
	struct room room = { 0 };
	int r;

	if (strcmp(text, "auto") == 0) {
		*ret = 0;
		return 0;
	}
	if (strchr(text, '%')) {
		r = room_get("/proc", "/sys/fs/cgroup", &room);
		if (r < 0)
			return err_set(err, r, "cannot tell how much memory there is: %s", strerror(-r));
	}
	r = size_parse(text, room.total_bytes, ret);
	if (r == 0 && *ret == 0)
		r = -EINVAL;
	if (r < 0)
		return err_set(
			err, -EINVAL,
			"'%s' is not a budget: give a size such as 64G, a part of the memory such as 50%%, or auto",
			text);
	if (*ret < extent_bytes())
		return err_set(err, -EINVAL,
			       "'%s' is a budget of %llu bytes, which holds nothing: give 64M or more, as 64G", text,
			       (unsigned long long)*ret);
	return 0;
}

static int numa_parse(const char *text, uint32_t max, struct serve_settings *s, struct wd_err *err)
{
	static const char *const names[] = {
		[SERVE_NUMA_DEFAULT] = "default",
		[SERVE_NUMA_INTERLEAVE] = "interleave",
		[SERVE_NUMA_LOCAL] = "local",
	};
	char folder[64];
	uint64_t node;

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		if (strcmp(text, names[i]) == 0) {
			s->numa = (enum serve_numa)i;
			return 0;
		}
	}
	if (strncmp(text, "node:", 5) != 0 || !number_parse(text + 5, 10, max, &node))
		return err_set(err, -EINVAL, "'%s' is not a memory policy: give default, interleave, local or node:N",
			       text);
	(void)snprintf(folder, sizeof(folder), "/sys/devices/system/node/node%ju", (uintmax_t)node);
	if (node > 0 && access(folder, F_OK) < 0)
		return err_set(err, -EINVAL, "this machine has no memory node %ju", (uintmax_t)node);
	s->numa = SERVE_NUMA_NODE;
	s->numa_node = (uint32_t)node;
	return 0;
}

const char *serve_numa_text(enum serve_numa numa, uint32_t node, char buf[static 24])
{
	static const char *const names[] = {
		[SERVE_NUMA_DEFAULT] = "default",
		[SERVE_NUMA_INTERLEAVE] = "interleave",
		[SERVE_NUMA_LOCAL] = "local",
	};

	if (numa == SERVE_NUMA_NODE)
		(void)snprintf(buf, 24, "node:%u", node);
	else
		(void)snprintf(buf, 24, "%s", names[numa]);
	return buf;
}

static int list_add(struct serve_settings *s, const char *path, struct wd_err *err)
{
	char **grown = realloc(s->preload, (s->nr_preload + 1) * sizeof(*grown));

	if (!grown)
		return no_memory(err);
	s->preload = grown;
	s->preload[s->nr_preload] = absolute(path);
	if (!s->preload[s->nr_preload])
		return no_memory(err);
	s->nr_preload++;
	return 0;
}

static char *trim(char *text)
{
	char *end = text + strlen(text);

	while (isspace((unsigned char)*text))
		text++;
	while (end > text && isspace((unsigned char)end[-1]))
		*--end = '\0';
	return text;
}

/* Checkpoints with commas between them, or @FILE with one a line. */
static int list_parse(const char *text, struct serve_settings *s, struct wd_err *err)
{
	cleanup_free char *copy = NULL;
	int r = 0;

	if (text[0] == '@') {
		cleanup_fclose FILE *f = fopen(text + 1, "re");
		cleanup_free char *line = NULL;
		size_t room = 0;

		if (!f)
			return err_set(err, -errno, "%s: cannot open: %s", text + 1, strerror(errno));
		while (r == 0 && getline(&line, &room, f) > 0) {
			char *path = trim(line);

			if (path[0] && path[0] != '#')
				r = list_add(s, path, err);
		}
		if (r == 0 && ferror(f))
			r = err_set(err, -EIO, "%s: cannot be read", text + 1);
		return r;
	}
	copy = strdup(text);
	if (!copy)
		return no_memory(err);
	for (char *rest = copy, *path; r == 0 && (path = strsep(&rest, ","));) {
		path = trim(path);
		if (path[0])
			r = list_add(s, path, err);
	}
	return r;
}

/* `value` NULL: a flag of the command line. */
static int set(struct serve_settings *s, const struct key *k, const char *value, struct wd_err *err)
{
	void *to = (char *)s + k->at;
	uint64_t n;

	switch (k->kind) {
	case PATH: {
		char *path = value[0] ? absolute(value) : NULL;

		if (!path)
			return value[0] ? no_memory(err) : err_set(err, -EINVAL, "needs a path");
		if (strlen(path) >= WIRE_SOCKET) {
			err_set(err, -EINVAL, "%s is too long for a socket: at most %d bytes", path, WIRE_SOCKET - 1);
			free(path);
			return -EINVAL;
		}
		free(*(char **)to);
		*(char **)to = path;
		s->socket_given = true;
		return 0;
	}
	case FLAG:
		if (value && strcmp(value, "yes") != 0 && strcmp(value, "no") != 0)
			return err_set(err, -EINVAL, "is yes or no, not '%s'", value);
		*(bool *)to = !value || strcmp(value, "yes") == 0;
		return 0;
	case BUDGET:
		return budget_parse(value, to, err);
	case SECONDS:
		if (!seconds_parse(value, to))
			return err_set(err, -EINVAL, "'%s' is not a time such as 90s, 10m, 2h or never", value);
		return 0;
	case MODE:
	case NUMBER:
		if (!number_parse(value, k->kind == MODE ? 8 : 10, k->max, &n) || n < k->min)
			return err_set(err, -EINVAL,
				       k->kind == MODE ? "'%s' is not a file mode such as 0660" :
							 "'%s' is not a number from %u to %u",
				       value, k->min, k->max);
		*(uint32_t *)to = (uint32_t)n;
		return 0;
	case NUMA:
		return numa_parse(value, k->max, s, err);
	case LIST:
		return list_parse(value, s, err);
	}
	return -EINVAL;
}

/* ------------------------------------------------------------------ the command line */

const struct option *serve_options(void)
{
	static struct option options[ARRAY_SIZE(keys) + 3];

	for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
		options[i] = (struct option){ keys[i].name, keys[i].kind == FLAG ? no_argument : required_argument,
					      NULL, SERVE_OPT_KEY + (int)i };
	options[ARRAY_SIZE(keys)] = (struct option){ "config", required_argument, NULL, SERVE_OPT_CONFIG };
	options[ARRAY_SIZE(keys) + 1] = (struct option){ "help", no_argument, NULL, CMD_OPT_HELP };
	return options;
}

int serve_argument(struct serve_arguments *a, int opt, const char *value, struct wd_err *err)
{
	struct serve_settings tried = { 0 };
	struct serve_argument *grown;
	bool file = opt != SERVE_OPT_CONFIG && keys[opt - SERVE_OPT_KEY].kind == LIST && value[0] == '@';
	char *kept = NULL;

	if (opt != SERVE_OPT_CONFIG) {
		int r = set(&tried, &keys[opt - SERVE_OPT_KEY], value, err);

		serve_settings_done(&tried);
		if (r < 0)
			return err_prefix(err, r, "--%s", keys[opt - SERVE_OPT_KEY].name);
	}
	/* The daemon reads them again when it may have left this folder. */
	if (file && (kept = absolute(value + 1))) {
		char *path = kept;

		if (asprintf(&kept, "@%s", path) < 0)
			kept = NULL;
		free(path);
	} else if (opt == SERVE_OPT_CONFIG || keys[opt - SERVE_OPT_KEY].kind == PATH) {
		kept = value[0] ? absolute(value) : strdup("");
	} else if (value) {
		kept = strdup(value);
	}
	if (value && !kept)
		return no_memory(err);
	if (opt == SERVE_OPT_CONFIG) {
		free(a->config);
		a->config = kept;
		return 0;
	}
	grown = realloc(a->given, (a->nr_given + 1) * sizeof(*grown));
	if (!grown) {
		free(kept);
		return no_memory(err);
	}
	a->given = grown;
	a->given[a->nr_given++] = (struct serve_argument){ (size_t)(opt - SERVE_OPT_KEY), kept };
	return 0;
}

void serve_arguments_done(struct serve_arguments *a)
{
	for (size_t i = 0; i < a->nr_given; i++)
		free(a->given[i].value);
	free(a->given);
	free(a->config);
	*a = (struct serve_arguments){ 0 };
}

char **serve_arguments_again(const struct serve_arguments *a)
{
	cleanup_free char *text = NULL;
	size_t nr = 2, len = 0;
	FILE *f = open_memstream(&text, &len);
	char **argv = NULL;

	if (!f)
		return NULL;
	(void)fprintf(f, "weightd%cserve%c", 0, 0); /* the keeper knows which program this is */
	if (a->config) {
		(void)fprintf(f, "--config=%s%c", a->config, 0);
		nr++;
	}
	for (size_t i = 0; i < a->nr_given; i++) {
		const struct key *k = &keys[a->given[i].key];

		if (k->change == STARTS)
			continue;
		if (k->kind == FLAG)
			(void)fprintf(f, "--%s%c", k->name, 0);
		else
			(void)fprintf(f, "--%s=%s%c", k->name, a->given[i].value, 0);
		nr++;
	}
	if (fclose(f) == 0 && (argv = malloc((nr + 1) * sizeof(*argv) + len))) {
		char *at = (char *)(argv + nr + 1);

		(void)memcpy(at, text, len);
		for (size_t i = 0; i < nr; i++, at += strlen(at) + 1)
			argv[i] = at;
		argv[nr] = NULL;
	}
	return argv;
}

/* ------------------------------------------------------------------ the file */

static const struct key *key_find(const char *name)
{
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++)
		if (strcmp(keys[i].name, name) == 0)
			return &keys[i];
	return NULL;
}

static int line_apply(struct serve_settings *s, char *line, struct wd_err *err)
{
	char *name = trim(line), *value;
	const struct key *k;
	int r;

	if (!name[0] || name[0] == '#')
		return 0;
	value = strchr(name, '=');
	if (!value)
		return err_set(err, -EINVAL, "'%s' is no 'key = value'", name);
	*value++ = '\0';
	name = trim(name);
	value = trim(value);
	k = key_find(name);
	if (!k)
		return err_set(err, -EINVAL, "there is no key '%s'", name);
	r = set(s, k, value, err);
	return r < 0 ? err_prefix(err, r, "%s", name) : 0;
}

static int file_apply(struct serve_settings *s, const char *path, bool must, struct wd_err *err)
{
	cleanup_fclose FILE *f = fopen(path, "re");
	cleanup_free char *line = NULL;
	unsigned int number = 0;
	size_t room = 0;
	ssize_t n;
	int r = 0;

	if (!f && errno == ENOENT && !must)
		return 0;
	if (!f)
		return err_set(err, -errno, "%s: cannot open the configuration: %s", path, strerror(errno));
	while (r == 0 && (n = getline(&line, &room, f)) > 0) {
		number++;
		if (n > MAX_LINE || strlen(line) != (size_t)n)
			r = err_set(err, -EINVAL, "is no line of text");
		else
			r = line_apply(s, line, err);
		if (r < 0)
			r = err_prefix(err, r, "%s:%u", path, number);
	}
	if (r == 0 && ferror(f))
		r = err_set(err, -EIO, "%s: cannot be read: %s", path, strerror(errno));
	if (r == 0) {
		s->config = absolute(path);
		if (!s->config)
			r = no_memory(err);
	}
	return r;
}

/* Root's and the system user's daemon serves the machine. */
static bool for_all(void)
{
	const struct passwd *user = geteuid() == 0 ? NULL : getpwuid(geteuid());

	return geteuid() == 0 || (user && strcmp(user->pw_name, "weightd") == 0);
}

static int default_config(char ret[static PATH_MAX])
{
	const char *folder = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
	int n;

	if (for_all())
		n = snprintf(ret, PATH_MAX, "%s", SYSTEM_CONFIG);
	else if (folder && folder[0] == '/')
		n = snprintf(ret, PATH_MAX, "%s/weightd/weightd.conf", folder);
	else if (home && home[0] == '/')
		n = snprintf(ret, PATH_MAX, "%s/.config/weightd/weightd.conf", home);
	else
		return -ENOENT;
	return n < 0 || n >= PATH_MAX ? -ENOENT : 0;
}

static int set_defaults(struct serve_settings *s, struct wd_err *err)
{
	char path[WIRE_SOCKET] = SYSTEM_SOCKET;
	int r = for_all() ? 0 : wire_socket_own(path);

	if (r < 0)
		return err_set(err, r, "XDG_RUNTIME_DIR is too long for a socket; give another one by --socket");
	*s = (struct serve_settings){
		.socket = strdup(path),
		.socket_mode = for_all() ? 0666 : 0600,
		.max_clients = 1024,
		.max_clients_per_user = 256,
		.max_views = 4096,
		.pin_percent = 50,
	};
	return s->socket ? 0 : no_memory(err);
}

int serve_settings_load(const struct serve_arguments *a, struct serve_settings *ret, struct wd_err *err)
{
	struct serve_settings s;
	char path[PATH_MAX];
	int r = set_defaults(&s, err);

	if (r < 0)
		return r;
	if (a->config)
		r = file_apply(&s, a->config, true, err);
	else if (default_config(path) == 0)
		r = file_apply(&s, path, false, err);
	/* A list is added to line by line in the file; the command line's takes its place. */
	for (size_t i = 0; r == 0 && i < a->nr_given; i++) {
		if (keys[a->given[i].key].kind == LIST) {
			while (s.nr_preload > 0)
				free(s.preload[--s.nr_preload]);
		}
	}
	for (size_t i = 0; r == 0 && i < a->nr_given; i++) {
		const struct key *k = &keys[a->given[i].key];

		r = set(&s, k, a->given[i].value, err);
		if (r < 0) /* it was right when it was given: a list's file */
			r = err_prefix(err, r, "--%s", k->name);
	}
	if (r == 0 && s.no_keeper && s.takeover)
		r = err_set(err, -EINVAL, "takeover needs the keeper: without it there is nothing to take over from");
	if (r < 0) {
		serve_settings_done(&s);
		return r;
	}
	*ret = s;
	return 0;
}

void serve_settings_done(struct serve_settings *s)
{
	while (s->nr_preload > 0)
		free(s->preload[--s->nr_preload]);
	free(s->preload);
	free(s->socket);
	free(s->config);
	*s = (struct serve_settings){ 0 };
}

static bool differ(const struct serve_settings *a, const struct serve_settings *b, const struct key *k)
{
	const void *x = (const char *)a + k->at, *y = (const char *)b + k->at;

	switch (k->kind) {
	case PATH:
		return strcmp(*(char *const *)x, *(char *const *)y) != 0;
	case FLAG:
		return *(const bool *)x != *(const bool *)y;
	case NUMA:
		return a->numa != b->numa || a->numa_node != b->numa_node;
	case MODE:
	case NUMBER:
		return *(const uint32_t *)x != *(const uint32_t *)y;
	default:
		return false;
	}
}

char *serve_settings_fixed(const struct serve_settings *a, const struct serve_settings *b)
{
	char *text = NULL;
	size_t len;
	FILE *f = open_memstream(&text, &len);
	const char *sep = "";

	if (!f)
		return NULL;
	for (size_t i = 0; i < ARRAY_SIZE(keys); i++) {
		if (keys[i].change != FIXED || !differ(a, b, &keys[i]))
			continue;
		(void)fprintf(f, "%s%s", sep, keys[i].name);
		sep = ", ";
	}
	(void)fclose(f);
	return text;
}
