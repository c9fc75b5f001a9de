/* SPDX-License-Identifier: Apache-2.0 */
/*
 * `weightd serve`: the daemon's life, from the command line to the last signal. Who it serves is in serve_session.c,
 * what with in ufd/serve.h.
 *
 * Order of the start: command line and file; a keeper that is left (its daemon died, or lets go for --takeover) is
 * adopted, else the socket is made and a keeper forked off, before there is any thread; then the pager; then READY.
 *
 * Three ends: told to stop (signal, idle, `weightd shutdown`): serving stops, the keeper is dismissed, clients see
 * their sockets close and map their files. Taken over: serving stops, and everything stays with the keeper. Killed:
 * likewise, without a word.
 *
 * Threads: the main thread runs the epoll here and blocks all signals for itself and for all others (signalfd).
 */
#include "cli/cmd.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>

#include "cli/serve_config.h"
#include "cli/serve_session.h"
#include "cli/serve_socket.h"
#include "lib/base/log.h"
#include "lib/include/weightd.h"
#include "ufd/uffd.h"
#include "ufd/wire.h"

static const char help[] = "Usage: weightd serve [OPTION]...\n"
			   "\n"
			   "The daemon: keeps one copy of the weights for all processes of this machine.\n"
			   "Programs use it by themselves when it runs. Each option but --config is also a\n"
			   "key of the configuration file, one \"key = value\" a line ('#' begins a comment\n"
			   "line; yes or no where the option has no value); the command line comes first.\n"
			   "\n"
			   "Options:\n"
			   "  --config=FILE       configuration (/etc/weightd/weightd.conf; a user's own:\n"
			   "                      $XDG_CONFIG_HOME/weightd/weightd.conf or in ~/.config)\n"
			   "  --socket=PATH       where it listens (/run/weightd/weightd.sock; a user's own:\n"
			   "                      weightd.sock in $XDG_RUNTIME_DIR, or in /tmp/weightd-UID)\n"
			   "  --socket-mode=MODE  who may connect (0666: reading needs an open file; a\n"
			   "                      user's own: 0600)\n"
			   "  --budget=SIZE       memory for weights: 64G, 50% of the machine's or cgroup's,\n"
			   "                      or auto (what is free, less a reserve)\n"
			   "  --idle-exit=TIME    end when there has been no client for so long: 90s, 10m,\n"
			   "                      2h, never (never)\n"
			   "  --preload=LIST      read these checkpoints at once: files and folders with\n"
			   "                      commas between them, or @FILE with one a line\n"
			   "  --numa=POLICY       where memory is taken: default, interleave, local, node:N\n"
			   "  --max-clients=N     processes that are connected at once (1024)\n"
			   "  --max-clients-per-user=N  of one user (256)\n"
			   "  --max-views=N       checkpoint files that one client has open (4096)\n"
			   "  --pin-percent=N     part of the budget that one user may pin (50)\n"
			   "  --spin-us=N         how long the pager looks for a fault before it sleeps (0)\n"
			   "  --takeover          replace the daemon that runs: clients and cache are kept\n"
			   "  --no-keeper         without the process that holds all when the daemon dies\n"
			   "  --detach            return when the daemon serves; it runs on in the\n"
			   "                      background. What it says is lost unless stderr is a file\n"
			   "  --help              print this\n"
			   "\n"
			   "SIZE is in bytes, or with K, M, G, T in powers of 1024: 64G is 64 GiB.\n"
			   "Signals: SIGTERM and SIGINT end it, its clients go on with mapped files; a\n"
			   "second one ends it at once. SIGHUP reads the configuration again.\n"
			   "WEIGHTD_LOG=info tells who comes and goes. WEIGHTD_SOCKET is for clients:\n"
			   "--socket says where it listens.\n"
			   "Exit status: 0 ended as asked, 1 failed, 2 wrong command line.\n";

struct daemon {
	struct serve_arguments arguments;
	struct serve_settings settings;
	struct server server;
	struct keeper *keeper;
	bool adopted;
	int listeners[LISTEN_MAX];
	int nr_listeners;
	bool activated;   /* the service manager's sockets: not ours to remove */
	struct stat name; /* of the socket that is ours to remove */
	char numa[24];
	int signal_fd;
	pid_t preload;
	uint64_t views_of_user; /* that one user may attach */
	uint64_t used_ns;       /* when somebody was last seen to be connected */
	bool service;           /* a service manager has started us */
};

static uint64_t clock_ns(void)
{
	struct timespec t;

	(void)clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* ------------------------------------------------------------------ the start */

#define DESCRIPTORS_A_VIEW 8 /* arena, table, file, most of them twice, and the mapping's state */
#define USERS_SHARE 4

static void raise_limits(struct daemon *d)
{
	struct rlimit limit;
	int fd;

	/* Every client costs several descriptors. */
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
		limit.rlim_cur = limit.rlim_max;
		(void)setrlimit(RLIMIT_NOFILE, &limit);
	}
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
		d->views_of_user = limit.rlim_cur / DESCRIPTORS_A_VIEW / USERS_SHARE;
	/* Its death costs all clients; its memory is cache, which it gives back itself. Only for who may. */
	fd = open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC);
	if (fd >= 0) {
		char text[16] = "";

		if (read(fd, text, sizeof(text) - 1) > 0 && strtol(text, NULL, 10) > -500)
			(void)!pwrite(fd, "-500", 4, 0);
		(void)close(fd);
	}
}

/* The listening sockets that the daemon before us had. */
static int keep_listeners(void *arg, uint64_t key, const void *blob, size_t nbytes, int fds[static KEEPER_FDS],
			  unsigned int nr_fds)
{
	struct daemon *d = arg;

	(void)key;
	(void)blob;
	(void)nbytes;
	for (unsigned int i = 0; i < nr_fds; i++) {
		if (d->nr_listeners < LISTEN_MAX)
			d->listeners[d->nr_listeners++] = fds[i];
		else
			(void)close(fds[i]);
	}
	return 0;
}

static int already_running(const struct daemon *d, int pid, struct wd_err *err)
{
	if (pid > 0)
		return err_set(err, -EBUSY, "a daemon is already running at %s (pid %d); use --takeover to replace it",
			       d->settings.socket, pid);
	return err_set(err, -EBUSY, "a daemon is already running at %s; use --takeover to replace it",
		       d->settings.socket);
}

static int find_keeper(struct daemon *d, struct wd_err *err)
{
	struct serve_settings *s = &d->settings;
	int pid = 0, r;

	if (s->no_keeper)
		return 0;
	r = keeper_adopt(s->socket, s->takeover, &d->keeper, &pid, err);
	if (r == 0) {
		d->adopted = true;
		return 0;
	}
	if (r == -EBUSY)
		return already_running(d, pid, err);
	if (r == -ENOENT)
		return 0;
	if (r == -EPROTONOSUPPORT && !listen_alive(s->socket, &pid)) {
		/* A keeper of another version has no daemon any more, and has ended: its clients map their files. */
		log_error("%s; starting afresh", err->text);
		return 0;
	}
	return r;
}

/* Under the lock. Afterwards there is a socket, and nobody else's. */
static int find_listeners(struct daemon *d, struct wd_err *err)
{
	struct serve_settings *s = &d->settings;
	int pid, r;

	if (d->activated)
		return 0;
	if (d->adopted) {
		r = keeper_list_of(d->keeper, KEEP_LISTEN, keep_listeners, d);
		if (r < 0)
			return err_set(err, r, "the keeper does not say what it has: %s", strerror(-r));
		/* Its file may have been removed, or be another one's. */
		if (d->nr_listeners > 0 && listen_alive(s->socket, &pid))
			return stat(s->socket, &d->name) < 0 ?
				       err_set(err, -errno, "%s: %s", s->socket, strerror(errno)) :
				       0;
		while (d->nr_listeners > 0)
			(void)close(d->listeners[--d->nr_listeners]);
	} else if (listen_alive(s->socket, &pid)) {
		if (!s->takeover)
			return already_running(d, pid, err);
		return err_set(
			err, -EBUSY,
			"the daemon at %s (pid %d) has no keeper to take over from; end it by weightd shutdown first",
			s->socket, pid);
	}
	r = listen_at(s->socket, s->socket_mode, err);
	if (r < 0)
		return r;
	d->listeners[d->nr_listeners++] = r;
	if (stat(s->socket, &d->name) < 0)
		return err_set(err, -errno, "%s: %s", s->socket, strerror(errno));
	return 0;
}

/* Removes our socket, if it is still ours. */
static void remove_socket(const struct daemon *d)
{
	struct stat st;

	if (!d->activated && d->name.st_ino && stat(d->settings.socket, &st) == 0 && st.st_ino == d->name.st_ino &&
	    st.st_dev == d->name.st_dev)
		(void)unlink(d->settings.socket);
}

static int start_keeper(struct daemon *d, struct wd_err *err)
{
	cleanup_free char **again = NULL;
	int r = 0;

	if (d->settings.no_keeper)
		return 0;
	/* A service manager starts us again itself, and does not know whom the keeper starts. */
	if (!d->service) {
		again = serve_arguments_again(&d->arguments);
		if (!again)
			return err_set(err, -ENOMEM, "out of memory");
	}
	if (!d->adopted)
		r = keeper_start(d->settings.socket, again, &d->keeper, err);
	else
		r = keeper_restart(d->keeper, again, err);
	if (r < 0)
		return r;
	r = keeper_put(d->keeper, KEEP_KEY(KEEP_LISTEN, 0), NULL, 0, d->listeners, (unsigned int)d->nr_listeners);
	return r < 0 ? err_set(err, r, "the keeper does not take the socket: %s", strerror(-r)) : 0;
}

static int start_listening(struct daemon *d, struct wd_err *err)
{
	int lock, r;

	d->nr_listeners = listen_passed(d->listeners, err);
	if (d->nr_listeners < 0)
		return d->nr_listeners;
	d->activated = d->nr_listeners > 0;
	if (d->activated) {
		char path[256];

		/* Where clients find us is the service manager's to say; the keeper's socket lies beside it. */
		r = listen_path(d->listeners[0], path, sizeof(path));
		if (r < 0)
			return err_set(err, r, "socket activation: the socket has no path");
		free(d->settings.socket);
		d->settings.socket = strdup(path);
		if (!d->settings.socket)
			return err_set(err, -ENOMEM, "out of memory");
	} else if (!d->settings.socket_given) {
		r = listen_folder(d->settings.socket, err);
		if (r < 0)
			return r;
	}
	lock = listen_lock(d->settings.socket, err);
	if (lock < 0)
		return lock;
	r = find_keeper(d, err);
	if (r == 0)
		r = find_listeners(d, err);
	if (r == 0)
		r = start_keeper(d, err);
	listen_unlock(lock, d->settings.socket);
	return r;
}

static int start_pager(struct daemon *d, struct wd_err *err)
{
	struct server *server = &d->server;
	const struct serve_settings *s = &d->settings;
	const struct serve_config config = {
		.budget_bytes = s->budget_bytes,
		.pin_percent = s->pin_percent,
		.max_maps = s->max_views,
		.numa = s->numa,
		.numa_node = s->numa_node,
		.spin_us = s->spin_us,
		.keeper = d->keeper,
		.round = session_round,
		.poison = session_poison,
		.arg = server,
	};
	struct serve_counts counts;
	struct uffd_caps caps;
	int fd, r;

	server_init(server);
	server->socket = s->socket;
	server->numa = serve_numa_text(s->numa, s->numa_node, d->numa);
	server->max_views = s->max_views;
	server->max_views_of_user = d->views_of_user;
	server->max_clients = s->max_clients;
	server->max_clients_per_user = s->max_clients_per_user;
	server->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (server->epoll_fd < 0)
		return err_set(err, -errno, "epoll: %s", strerror(errno));
	if (d->adopted)
		r = serve_adopt(&config, session_adopt, server, &server->pager, err);
	else
		r = serve_new(&config, &server->pager, err);
	if (r < 0)
		return r;
	server->userfaultfd = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
	fd = uffd_open(true, true, &caps);
	if (fd >= 0) {
		if (caps.event_fork)
			server->welcome_flags |= WIRE_EVENT_FORK;
		if (caps.poison)
			server->welcome_flags |= WIRE_POISONS;
		(void)close(fd);
	}
	serve_counts(server->pager, &counts);
	if (strcmp(counts.arena, "tmpfs") == 0)
		server->welcome_flags |= WIRE_PRIVATE;
	return 0;
}

static int watch(struct daemon *d, int fd, uint64_t event, struct wd_err *err)
{
	struct epoll_event e = { .events = EPOLLIN, .data.u64 = event };

	if (epoll_ctl(d->server.epoll_fd, EPOLL_CTL_ADD, fd, &e) < 0)
		return err_set(err, -errno, "epoll: %s", strerror(errno));
	return 0;
}

static int start_watching(struct daemon *d, const sigset_t *signals, struct wd_err *err)
{
	int r = 0;

	d->signal_fd = signalfd(-1, signals, SFD_CLOEXEC | SFD_NONBLOCK);
	if (d->signal_fd < 0)
		return err_set(err, -errno, "signalfd: %s", strerror(errno));
	for (int i = 0; r == 0 && i < d->nr_listeners; i++)
		r = watch(d, d->listeners[i], SERVER_EVENT(EVENT_LISTEN, i), err);
	if (r == 0)
		r = watch(d, d->signal_fd, SERVER_EVENT(EVENT_SIGNAL, 0), err);
	if (r == 0 && d->keeper)
		r = watch(d, keeper_fd(d->keeper), SERVER_EVENT(EVENT_KEEPER, 0), err);
	return r;
}

/* For `weightd prefetch`, and before there are threads that may read the environment. */
static void preload_environment(const struct daemon *d)
{
	if (d->settings.nr_preload == 0)
		return;
	(void)unsetenv("WEIGHTD_DISABLE");
	(void)unsetenv("WEIGHTD_AUTOSTART");
	(void)setenv("WEIGHTD_SOCKET", d->settings.socket, 1);
	(void)setenv("WEIGHTD_MODE", "daemon", 1);
}

/*
 * The checkpoints of --preload are read by a client like any other, `weightd prefetch`: the daemon itself parses no
 * file (I6).
 */
static void start_preload(struct daemon *d)
{
	const struct serve_settings *s = &d->settings;
	cleanup_free char **argv = calloc(s->nr_preload + 4, sizeof(*argv));
	posix_spawn_file_actions_t files;
	posix_spawnattr_t attr;
	sigset_t none, defaults;
	size_t n = 0;
	int r;

	if (s->nr_preload == 0 || !argv)
		return;
	argv[n++] = (char *)"weightd";
	argv[n++] = (char *)"prefetch";
	argv[n++] = (char *)"--";
	for (size_t i = 0; i < s->nr_preload; i++)
		argv[n++] = s->preload[i];
	(void)sigemptyset(&none);
	(void)sigfillset(&defaults);
	(void)posix_spawnattr_init(&attr);
	(void)posix_spawn_file_actions_init(&files);
	(void)posix_spawnattr_setsigmask(&attr, &none);
	(void)posix_spawnattr_setsigdefault(&attr, &defaults);
	(void)posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	(void)posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
	r = posix_spawn(&d->preload, "/proc/self/exe", &files, &attr, argv, environ);
	(void)posix_spawn_file_actions_destroy(&files);
	(void)posix_spawnattr_destroy(&attr);
	if (r != 0) {
		d->preload = 0;
		log_error("preload: cannot start weightd prefetch: %s", strerror(r));
	}
}

static void on_child(struct daemon *d)
{
	int status;

	if (d->keeper) /* (one that was taken over is another's child) */
		(void)waitpid(keeper_pid(d->keeper), NULL, WNOHANG);
	if (d->preload > 0 && waitpid(d->preload, &status, WNOHANG) == d->preload) {
		d->preload = 0;
		if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
			log_info("preload: all that was listed has been read");
		else if (WIFEXITED(status))
			log_error("preload: not all that was listed could be read (see above)");
		else
			log_error("preload: weightd prefetch was ended by signal %d", WTERMSIG(status));
	}
}

/* ------------------------------------------------------------------ the end */

struct letting_go {
	struct pager *pager;
	int done_fd;
};

static void *let_go_main(void *arg)
{
	struct letting_go *l = arg;
	uint64_t one = 1;

	if (serve_let_go(l->pager) < 0)
		log_error("not all of the pager has stopped in time; going all the same");
	(void)!write(l->done_fd, &one, sizeof(one));
	return NULL;
}

/* Ends at once: other threads are in the middle of something, and destructors would pull it from under them. */
static _Noreturn void leave(void)
{
	(void)fflush(stdout);
	_exit(CMD_DONE);
}

/* Stops serving. A second signal meanwhile ends everything at once. */
static void stop_serving(struct daemon *d)
{
	struct letting_go l = { .pager = d->server.pager, .done_fd = eventfd(0, EFD_CLOEXEC) };
	struct pollfd p[2] = { { .fd = l.done_fd, .events = POLLIN }, { .fd = d->signal_fd, .events = POLLIN } };
	pthread_t thread;

	atomic_store(&d->server.stopping, true);
	if (l.done_fd < 0 || pthread_create(&thread, NULL, let_go_main, &l) != 0) {
		(void)let_go_main(&l);
		return;
	}
	while (!p[0].revents) {
		struct signalfd_siginfo info;

		if (poll(p, 2, -1) < 0)
			continue;
		while (read(d->signal_fd, &info, sizeof(info)) == sizeof(info)) {
			if (info.ssi_signo != SIGTERM && info.ssi_signo != SIGINT)
				continue;
			log_info("a second signal: ending at once");
			if (d->keeper)
				keeper_bye(d->keeper);
			leave();
		}
	}
	(void)pthread_join(thread, NULL);
}

static _Noreturn void stop(struct daemon *d)
{
	service_notify("STOPPING=1\nSTATUS=Letting clients go");
	remove_socket(d);
	for (int i = 0; i < d->nr_listeners; i++)
		(void)epoll_ctl(d->server.epoll_fd, EPOLL_CTL_DEL, d->listeners[i], NULL);
	if (d->preload > 0)
		(void)kill(d->preload, SIGTERM);
	/* Clients see their sockets close only when nothing of ours touches their memory any more: then they map their
	 * files over what is not there. */
	stop_serving(d);
	if (d->keeper)
		keeper_bye(d->keeper);
	leave();
}

/* Another daemon takes over: the keeper has everything, the socket's file is the next one's. */
static _Noreturn void hand_over(struct daemon *d)
{
	log_info("another daemon takes over");
	service_notify("STATUS=Handing over to another daemon");
	if (d->preload > 0)
		(void)kill(d->preload, SIGTERM);
	stop_serving(d);
	leave();
}

/* ------------------------------------------------------------------ the main loop */

static void tell_status(struct daemon *d)
{
	char size[SIZE_TEXT];

	service_notify("READY=1\nSTATUS=Serving at %s, budget %s%s", d->settings.socket,
		       d->settings.budget_bytes ? size_text(d->settings.budget_bytes, size) : "automatic",
		       d->keeper ? "" : ", without a keeper");
}

static void reload(struct daemon *d)
{
	cleanup_free char *fixed = NULL;
	struct serve_settings s;
	struct wd_err err;
	int r;

	service_notify("RELOADING=1\nMONOTONIC_USEC=%ju", (uintmax_t)(clock_ns() / 1000));
	if (serve_settings_load(&d->arguments, &s, &err) < 0) {
		log_error("%s; nothing is changed", err.text);
		tell_status(d);
		return;
	}
	if (d->activated) {
		free(s.socket);
		s.socket = strdup(d->settings.socket);
	}
	fixed = s.socket ? serve_settings_fixed(&d->settings, &s) : NULL;
	if (fixed && fixed[0])
		log_error("changed, but only a new daemon will know (weightd serve --takeover): %s", fixed);
	r = pager_set_budget(d->server.pager, s.budget_bytes);
	if (r < 0) {
		log_error("the budget stays as it is: the arenas' file system cannot be made larger (%s); only a new "
			  "daemon can (weightd serve --takeover)",
			  strerror(-r));
		s.budget_bytes = d->settings.budget_bytes;
	}
	atomic_store(&d->server.max_clients, s.max_clients);
	atomic_store(&d->server.max_clients_per_user, s.max_clients_per_user);
	d->settings.budget_bytes = s.budget_bytes;
	d->settings.idle_exit_ns = s.idle_exit_ns;
	d->settings.max_clients = s.max_clients;
	d->settings.max_clients_per_user = s.max_clients_per_user;
	serve_settings_done(&s);
	log_info("the configuration was read again");
	tell_status(d);
}

static void on_signals(struct daemon *d)
{
	struct signalfd_siginfo info;

	while (read(d->signal_fd, &info, sizeof(info)) == sizeof(info)) {
		if (info.ssi_signo == SIGCHLD)
			on_child(d);
		else if (info.ssi_signo == SIGHUP)
			reload(d);
		else
			stop(d);
	}
}

static void on_keeper(struct daemon *d)
{
	int asked = keeper_asked(d->keeper);

	if (asked == 1)
		hand_over(d);
	if (asked < 0) {
		(void)epoll_ctl(d->server.epoll_fd, EPOLL_CTL_DEL, keeper_fd(d->keeper), NULL);
		log_error("the keeper has died: until the daemon is restarted, clients are not kept when it dies");
	}
}

/* Return: ms until it has to be looked at again; -1: never. */
static int check_idle(struct daemon *d)
{
	uint64_t limit = d->settings.idle_exit_ns, now = clock_ns(), since;
	struct serve_counts counts;

	if (limit == 0)
		return -1;
	serve_counts(d->server.pager, &counts);
	if (session_count(&d->server) > 0 || counts.clients > 0 || counts.children > 0 || d->preload > 0)
		d->used_ns = now; /* nothing tells when the last one goes (a child's memory ends silently) */
	since = MAX(d->used_ns, counts.last_used_ns);
	if (now >= since + limit && list_empty(&d->server.pending)) {
		log_info("no client for %ju s: ending", (uintmax_t)(limit / 1000000000));
		stop(d);
	}
	return (int)MIN((since + limit - MIN(now, since + limit)) / 1000000 + 1, (uint64_t)1000);
}

static int sooner(int a_ms, int b_ms)
{
	return a_ms < 0 ? b_ms : b_ms < 0 ? a_ms : MIN(a_ms, b_ms);
}

static _Noreturn void serve_forever(struct daemon *d)
{
	struct epoll_event events[64];

	for (;;) {
		int timeout = sooner(session_expire(&d->server), check_idle(d));
		int nr = epoll_wait(d->server.epoll_fd, events, ARRAY_SIZE(events), timeout);

		for (int i = 0; i < nr; i++) {
			uint64_t id = events[i].data.u64 & ((1ull << 56) - 1);

			switch ((enum server_event)(events[i].data.u64 >> 56)) {
			case EVENT_LISTEN:
				session_accept(&d->server, d->listeners[id]);
				break;
			case EVENT_SIGNAL:
				on_signals(d);
				break;
			case EVENT_KEEPER:
				on_keeper(d);
				break;
			case EVENT_PENDING:
				session_pending(&d->server, id);
				break;
			case EVENT_NOTIFY:
				session_notify(&d->server, id);
				break;
			}
		}
	}
}

/* `told`: a pipe to the process that waits in --detach, or -1. Returns only when the start has failed. */
static int run(struct daemon *d, int told, struct wd_err *err)
{
	sigset_t signals;
	int r;

	(void)sigemptyset(&signals);
	for (size_t i = 0; i < 4; i++)
		(void)sigaddset(&signals, (int[]){ SIGTERM, SIGINT, SIGHUP, SIGCHLD }[i]);
	(void)sigprocmask(SIG_BLOCK, &signals, NULL);
	(void)signal(SIGPIPE, SIG_IGN);
	(void)signal(SIGCHLD, SIG_DFL);
	d->service = service_init(!d->settings.detach);
	raise_limits(d);
	r = start_listening(d, err);
	preload_environment(d);
	if (r == 0)
		r = start_pager(d, err);
	if (r == 0)
		r = start_watching(d, &signals, err);
	if (r < 0) {
		if (!d->adopted) {
			remove_socket(d);
			if (d->keeper)
				keeper_bye(d->keeper);
		}
		return r;
	}
	d->used_ns = clock_ns();
	session_resume(&d->server);
	start_preload(d);
	tell_status(d);
	log_info("weightd %s serves at %s (pid %d)%s", WD_VERSION, d->settings.socket, getpid(),
		 d->adopted ? ", taking over clients and cache" : "");
	if (told >= 0) {
		(void)!write(told, "", 1);
		(void)close(told);
	}
	serve_forever(d);
}

/* ------------------------------------------------------------------ --detach */

/* What the daemon's start says: one NUL when it serves, else why not. */
static int wait_for_start(int from, pid_t pid)
{
	struct wd_err err = { "" };
	size_t got = 0;
	ssize_t n = 0;

	while (got < sizeof(err.text) - 1 && (n = read(from, err.text + got, sizeof(err.text) - 1 - got)) != 0) {
		if (n < 0 && errno != EINTR)
			break;
		got += n > 0 ? (size_t)n : 0;
		if (got > 0 && err.text[0] == '\0')
			return CMD_DONE;
	}
	(void)waitpid(pid, NULL, 0);
	err.text[got] = '\0';
	cmd_error("%s", got > 0 ? err.text : "the daemon ended while it started");
	return CMD_FAILED;
}

static int detach(struct daemon *d)
{
	struct wd_err err = { "" };
	struct stat st;
	int pipes[2], null;
	pid_t pid;

	if (pipe2(pipes, O_CLOEXEC) < 0) {
		cmd_error("pipe: %s", strerror(errno));
		return CMD_FAILED;
	}
	(void)fflush(stdout);
	pid = fork();
	if (pid < 0) {
		cmd_error("cannot start a process: %s", strerror(errno));
		return CMD_FAILED;
	}
	if (pid > 0) {
		(void)close(pipes[1]);
		return wait_for_start(pipes[0], pid);
	}
	(void)close(pipes[0]);
	(void)setsid();
	if (chdir("/") < 0) /* hold no file system busy */
		_exit(CMD_FAILED);
	null = open("/dev/null", O_RDWR | O_CLOEXEC);
	for (int fd = 0; null >= 0 && fd <= STDERR_FILENO; fd++)
		if (fd < STDERR_FILENO || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
			(void)dup2(null, fd);
	(void)run(d, pipes[1], &err);
	(void)!write(pipes[1], err.text, strlen(err.text));
	_exit(CMD_FAILED);
}

int cmd_serve(int argc, char **argv)
{
	static struct daemon d; /* threads use it to the end */
	struct wd_err err = { "" };
	int opt, code = CMD_FAILED;

	d.server.epoll_fd = d.signal_fd = -1;
	while ((opt = getopt_long(argc, argv, "", serve_options(), NULL)) != -1) {
		if (opt == CMD_OPT_HELP)
			code = cmd_print_help(help);
		else if (opt < SERVE_OPT_CONFIG)
			code = cmd_usage_error(NULL);
		else if (serve_argument(&d.arguments, opt, optarg, &err) == 0)
			continue;
		else
			code = cmd_usage_error("%s", err.text);
		serve_arguments_done(&d.arguments);
		return code;
	}
	if (optind < argc) {
		serve_arguments_done(&d.arguments);
		return cmd_usage_error("takes no argument: '%s'", argv[optind]);
	}
	if (serve_settings_load(&d.arguments, &d.settings, &err) < 0)
		cmd_error("%s", err.text);
	else if (d.settings.detach)
		code = detach(&d);
	else if (run(&d, -1, &err) < 0)
		cmd_error("%s", err.text);
	serve_settings_done(&d.settings);
	serve_arguments_done(&d.arguments);
	return code;
}
