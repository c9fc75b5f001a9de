/* SPDX-License-Identifier: Apache-2.0 */
/*
 * struct wd: connecting, the way to run, error texts, counts of the whole. Knows no tensors and no stages.
 *
 * Threads: `list` is changed under list_lock. The fork handler walks it without: each change is one pointer, and
 * what is taken out is freed only afterwards, so the child sees a whole list at any moment.
 */
#include <string.h>

#include "lib/base/log.h"
#include "lib/fault.h"
#include "lib/internal.h"
#include "lib/stage.h"

_Static_assert((unsigned int)WAY_AUTO == WD_WAY_AUTO && (unsigned int)WAY_DAEMON == WD_WAY_DAEMON &&
		       (unsigned int)WAY_EMBEDDED == WD_WAY_EMBEDDED && (unsigned int)WAY_USER == WD_WAY_USER &&
		       (unsigned int)WAY_MMAP == WD_WAY_MMAP,
	       "the pager's ways have the public numbers");

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static struct wd *list;

static _Thread_local struct wd_err last_error;

/*
 * ---- error texts
 */
const char *wd_version(void)
{
	return WD_VERSION;
}

const char *wd_error(void)
{
	return last_error.text;
}

int api_done(int r, const char *function, const struct wd_err *err)
{
	if (r >= 0)
		return r;
	if (err->text[0])
		last_error = *err;
	else
		(void)err_set(&last_error, r, "%s: %s", function, strerror(-r));
	return r;
}

int api_fail(int error, const char *fmt, ...)
{
	char text[sizeof(last_error.text)];
	va_list ap;

	va_start(ap, fmt);
	if (vsnprintf(text, sizeof(text), fmt, ap) < 0)
		text[0] = '\0';
	va_end(ap);
	return err_set(&last_error, error, "%s", text);
}

/*
 * ---- structs that grow
 */
int options_in(const void *options, size_t min_nbytes, size_t nbytes, void *ret, struct wd_err *err)
{
	size_t given;

	memset(ret, 0, nbytes);
	if (!options)
		return 0;
	memcpy(&given, options, sizeof(given));
	if (given < min_nbytes)
		return err_set(err, -EINVAL, "options: size is %zu; set it to sizeof of the struct", given);
	for (size_t i = nbytes; i < given; i++)
		if (((const char *)options)[i])
			return err_set(err, -EINVAL,
				       "options: byte %zu is set, and weightd %s knows only %zu; "
				       "use the library that belongs to the header",
				       i, WD_VERSION, nbytes);
	memcpy(ret, options, MIN(given, nbytes));
	return 0;
}

int struct_out(const void *filled, size_t min_nbytes, size_t nbytes, void *ret, struct wd_err *err)
{
	size_t room;

	memcpy(&room, ret, sizeof(room));
	if (room < min_nbytes)
		return err_set(err, -EINVAL, "result: size is %zu; set it to sizeof of the struct", room);
	memcpy((char *)ret + sizeof(room), (const char *)filled + sizeof(room), MIN(room, nbytes) - sizeof(room));
	if (room > nbytes)
		memset((char *)ret + nbytes, 0, room - nbytes);
	return 0;
}

/*
 * ---- ways
 */
static const char *const way_names[] = {
	[WD_WAY_AUTO] = "auto", [WD_WAY_DAEMON] = "daemon", [WD_WAY_EMBEDDED] = "embedded",
	[WD_WAY_USER] = "user", [WD_WAY_MMAP] = "mmap",
};

const char *wd_way_name(uint32_t way)
{
	return way < ARRAY_SIZE(way_names) ? way_names[way] : "?";
}

static bool is_set(const char *name)
{
	const char *value = getenv(name);

	return value && *value && strcmp(value, "0") != 0;
}

/* What a caller who leaves the choice to us gets: WEIGHTD_MODE, if it is set; WEIGHTD_DISABLE is stronger. */
static int way_from_environment(uint32_t *ret, struct wd_err *err)
{
	const char *mode = getenv("WEIGHTD_MODE");

	*ret = is_set("WEIGHTD_DISABLE") ? WD_WAY_MMAP : WD_WAY_AUTO;
	if (*ret == WD_WAY_MMAP || !mode || !*mode)
		return 0;
	for (uint32_t way = 0; way < ARRAY_SIZE(way_names); way++)
		if (!strcmp(mode, way_names[way])) {
			*ret = way;
			return 0;
		}
	return err_set(err, -EINVAL, "WEIGHTD_MODE=%s: no such way to run; use auto, daemon, embedded, user or mmap",
		       mode);
}

uint32_t wd_way(const struct wd *wd)
{
	if (!wd)
		return WD_WAY_AUTO;
	return pager_is_forked(wd->pager) ? WD_WAY_MMAP : (uint32_t)pager_way(wd->pager);
}

/*
 * ---- life of a struct wd
 */
static void forked(void)
{
	/* Only this thread exists here: a lock that is held was held by a thread that is no more, and what it guards
	 * may be half changed. */
	list_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
	fault_forked();
	for (struct wd *wd = list; wd; wd = wd->next) {
		pthread_mutex_t *locks[] = { &wd->stage_lock, &wd->lock };

		for (size_t i = 0; i < ARRAY_SIZE(locks); i++) {
			if (pthread_mutex_trylock(locks[i]))
				wd->broken = true;
			else
				(void)pthread_mutex_unlock(locks[i]);
		}
	}
}

static int watch_forks(struct wd_err *err)
{
	static bool done; /* list_lock */
	int r = 0;

	(void)pthread_mutex_lock(&list_lock);
	if (!done) {
		r = pthread_atfork(NULL, NULL, forked);
		done = r == 0;
	}
	(void)pthread_mutex_unlock(&list_lock);
	return r ? err_set(err, -r, "cannot watch for fork: %s", strerror(r)) : 0;
}

static int pager_start(const struct wd_options *o, struct pager **ret, struct wd_err *err)
{
	/* Best first. What refuses one way (no permission, an old kernel) may allow the next; the last needs nothing. */
	static const enum way ways[] = { WAY_EMBEDDED, WAY_USER, WAY_MMAP };
	struct pager_config config = { .way = (enum way)o->way,
				       .budget_bytes = o->budget_bytes,
				       .socket = o->socket,
				       .autostart = o->flags & WD_AUTOSTART || is_set("WEIGHTD_AUTOSTART") };
	int r;

	if (o->way != WD_WAY_AUTO)
		return pager_new(&config, ret, err);
	config.way = WAY_DAEMON;
	r = pager_new(&config, ret, err);
	if (r == 0)
		return 0;
	/* Silently only where there is none and none was wanted. */
	if ((r != -ENOENT && r != -ECONNREFUSED) || config.autostart || o->socket)
		log_info("%s; this process has weights of its own", err->text);
	for (size_t i = 0;; i++) {
		config.way = ways[i];
		r = pager_new(&config, ret, err);
		if (r != -EOPNOTSUPP || i + 1 == ARRAY_SIZE(ways))
			return r;
	}
}

static int connect_(const struct wd_options *options, struct wd **ret, struct wd_err *err)
{
	struct wd_options o;
	struct wd *wd;
	int r;

	if (!ret)
		return err_set(err, -EINVAL, "wd_connect: ret is NULL");
	r = options_in(options, offsetof(struct wd_options, way) + sizeof(o.way), sizeof(o), &o, err);
	if (r < 0)
		return err_prefix(err, r, "wd_connect");
	if (o.way >= ARRAY_SIZE(way_names))
		return err_set(err, -EINVAL, "wd_connect: way %u does not exist; use WD_WAY_*", o.way);
	if (o.flags & ~(WD_STRICT | WD_NO_SIGNAL_HANDLER | WD_AUTOSTART))
		return err_set(err, -EINVAL,
			       "wd_connect: unknown flags %#x; use WD_STRICT, WD_NO_SIGNAL_HANDLER, WD_AUTOSTART",
			       o.flags);
	if (o.way == WD_WAY_AUTO) {
		r = way_from_environment(&o.way, err);
		if (r < 0)
			return r;
	}
	r = watch_forks(err);
	if (r < 0)
		return r;
	wd = calloc(1, sizeof(*wd));
	if (!wd)
		return err_set(err, -ENOMEM, "wd_connect: out of memory");
	wd->nr_refs = 1;
	wd->flags = o.flags;
	(void)pthread_mutex_init(&wd->lock, NULL);
	(void)pthread_mutex_init(&wd->stage_lock, NULL);
	r = pager_start(&o, &wd->pager, err);
	if (r == 0 && !(o.flags & WD_NO_SIGNAL_HANDLER))
		r = fault_handler_install(err);
	if (r < 0) {
		pager_unref(wd->pager);
		free(wd);
		return r;
	}
	(void)pthread_mutex_lock(&list_lock);
	wd->next = list;
	list = wd;
	(void)pthread_mutex_unlock(&list_lock);
	*ret = wd;
	return 0;
}

int wd_connect(const struct wd_options *options, struct wd **ret)
{
	struct wd_err err = { .text = "" };

	return api_done(connect_(options, ret, &err), __func__, &err);
}

struct wd *handle_ref(struct wd *wd)
{
	(void)atomic_fetch_add_explicit(&wd->nr_refs, 1, memory_order_relaxed);
	return wd;
}

void handle_unref(struct wd *wd)
{
	struct wd **at;

	if (!wd || atomic_fetch_sub_explicit(&wd->nr_refs, 1, memory_order_acq_rel) > 1)
		return;
	if (wd->broken)
		return; /* what it holds may be half changed: left to the end of the process */
	(void)pthread_mutex_lock(&list_lock);
	for (at = &list; *at != wd; at = &(*at)->next)
		;
	*at = wd->next;
	(void)pthread_mutex_unlock(&list_lock);
	stage_done(wd);
	pager_unref(wd->pager);
	(void)pthread_mutex_destroy(&wd->lock);
	(void)pthread_mutex_destroy(&wd->stage_lock);
	free(wd);
}

void wd_disconnect(struct wd *wd)
{
	handle_unref(wd);
}

int handle_check(const struct wd *wd, struct wd_err *err)
{
	if (!wd->broken)
		return 0;
	return err_set(err, -ENOTRECOVERABLE,
		       "this wd is unusable in this forked child: another thread was in a call of "
		       "weightd when it forked; tensors stay good, wd_connect() makes a new wd");
}

int handle_lock(struct wd *wd, struct wd_err *err)
{
	int r = handle_check(wd, err);

	if (r == 0)
		(void)pthread_mutex_lock(&wd->lock);
	return r;
}

/*
 * ---- the pager as a whole
 */
int wd_set_budget(struct wd *wd, uint64_t budget_bytes)
{
	struct wd_err err = { .text = "" };
	int r;

	if (!wd)
		return api_fail(-EINVAL, "wd_set_budget: wd is NULL");
	if (wd_way(wd) == WD_WAY_MMAP)
		return api_fail(-EOPNOTSUPP,
				"wd_set_budget: way mmap has none, the kernel's page cache holds the weights; "
				"limit the cgroup's memory instead");
	if (wd_way(wd) == WD_WAY_DAEMON)
		return api_fail(-EPERM, "wd_set_budget: the daemon has one budget for all processes; set it by "
					"weightd serve --budget, or budget = in weightd.conf");
	r = handle_check(wd, &err);
	return api_done(r < 0 ? r : pager_set_budget(wd->pager, budget_bytes), __func__, &err);
}

int wd_sync(struct wd *wd)
{
	struct wd_err err = { .text = "" };
	int r;

	if (!wd)
		return api_fail(-EINVAL, "wd_sync: wd is NULL");
	r = handle_check(wd, &err);
	return api_done(r < 0 ? r : pager_sync(wd->pager, -1), __func__, &err);
}

int wd_stats(struct wd *wd, struct wd_stats *ret)
{
	struct wd_err err = { .text = "" };
	struct pager_stats s;
	int r;

	if (!wd || !ret)
		return api_fail(-EINVAL, "wd_stats: %s is NULL", wd ? "ret" : "wd");
	r = handle_check(wd, &err);
	if (r < 0)
		return api_done(r, __func__, &err);
	pager_stats(wd->pager, &s);
	(void)pthread_mutex_lock(&wd->lock);
	s.reloads -= MIN(s.reloads, models_reloads_extra(wd));
	handle_unlock(wd);
	return api_done(stats_out(wd, &s, ret, &err), __func__, &err);
}

int stats_out(const struct wd *wd, const struct pager_stats *s, struct wd_stats *ret, struct wd_err *err)
{
	struct wd_stats st = {
		.size = sizeof(st),
		.budget_bytes = wd_way(wd) == WD_WAY_MMAP ? UINT64_MAX : s->budget_bytes,
		.resident_bytes = s->resident_bytes,
		.peak_bytes = s->peak_bytes,
		.huge_bytes = s->huge_bytes,
		.written_bytes = s->written_bytes,
		.read_bytes = s->read_bytes,
		.reads = s->reads,
		.faults = s->faults,
		.dropped_bytes = s->dropped_bytes,
		.reloads = s->reloads,
		.reload_bytes = s->reload_bytes,
		.failed = s->failed,
	};

	return struct_out(&st, offsetof(struct wd_stats, resident_bytes), sizeof(st), ret, err);
}
