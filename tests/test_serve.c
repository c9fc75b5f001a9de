/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What users of `weightd serve` see: one copy of the weights for all processes, read once; right bytes whatever becomes
 * of file, memory and clients; who may see, drop and pin what. The daemon is the program itself, clients are other
 * processes that use the public interface. (Races, crashes and forks: test_serve_races.c, test_serve_crash.c.)
 *
 * Numbers like G10 are those of problems that users of model loaders have reported in public.
 */
#include "tests/serve_util.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <sys/wait.h>

#include "ufd/hooks.h"
#include "ufd/table.h"

static struct daemon D;
static struct peer P[16];

static void stop(void)
{
	daemon_stop(&D);
}

/* What may be on its way in while room for it is made, and what is no weight (tables, states of mappings). */
static uint64_t slack(void)
{
	return 4 * extent();
}

static const struct wd_tensor *tensor_of(const struct use *u, size_t i)
{
	return wd_model_tensor_at(my_models[u->slot], i);
}

static uint64_t source_value(const char *path, const char *key)
{
	json_t *all, *s = listed(getuid(), strrchr(path, '/'), &all), *v = json_object_get(s, key);
	uint64_t n;

	ck_assert_msg(json_is_integer(v), "weightd ls --json: %s has no number \"%s\"", path, key);
	n = (uint64_t)json_integer_value(v);
	json_decref(all);
	return n;
}

static uint64_t resident_of(const char *path)
{
	return source_value(path, "resident_bytes");
}

static void link_as(struct use *u, const struct use *to, const char *name, bool symbolic)
{
	*u = *to;
	(void)snprintf(u->path, sizeof(u->path), "%s/%s", test_dir, name);
	ck_assert_int_eq(symbolic ? symlink(to->path, u->path) : link(to->path, u->path), 0);
}

/* ------------------------------------------------------------------ one copy */

START_TEST(test_client_reads_right_bytes)
{
	struct use a, b;

	daemon_start(&D, "", NULL);
	a = new_model("small.safetensors", 40, 300 * KiB + 4, 1, 0);
	b = new_model("large.safetensors", 3, 20 * MiB, 2, 1);
	for (int i = 0; i < 2; i++) {
		peer_new(&P[i], i && !getuid() ? NOBODY : getuid());
		must_do(&P[i], do_open_and_check, &a);
		must_do(&P[i], do_open_and_check, &b);
		must_do(&P[i], do_release, &b);
		must_do(&P[i], do_check, &b);
	}
	for (int i = 0; i < 2; i++) {
		must_do(&P[i], do_check, &a);
		peer_leave(&P[i]);
	}
}
END_TEST

static uint64_t pss_of_all(unsigned int nr)
{
	pid_t family[16];
	size_t n = daemon_family(&D, family, ARRAY_SIZE(family));
	uint64_t sum = 0;

	for (unsigned int i = 0; i < nr; i++)
		sum += pss_of(P[i].pid);
	for (size_t i = 0; i < n; i++)
		sum += pss_of(family[i]);
	return sum;
}

/* Bites on: an arena for each attach, or for each path. */
START_TEST(test_g10_one_copy)
{
	struct use u[4];
	uint64_t read;

	daemon_start(&D, "", NULL);
	u[0] = u[3] = new_model("g10.safetensors", 64, 4 * MiB, 3, 0);
	link_as(&u[1], &u[0], "g10-hard.safetensors", false);
	link_as(&u[2], &u[0], "g10-soft.safetensors", true);
	for (int i = 0; i < 4; i++)
		peer_new(&P[i], getuid());
	must_do(&P[0], do_open_and_check, &u[0]);
	read = must_stat("read_bytes");
	ck_assert_uint_ge(read, 256 * MiB);
	ck_assert_uint_le(read, 256 * MiB / 100 * 102);
	for (int i = 1; i < 4; i++)
		must_do(&P[i], do_open_and_check, &u[i]);
	ck_assert_uint_eq(must_stat("read_bytes"), read);
	if (!SANITIZED) /* (which takes memory of its own, also below) */
		ck_assert_uint_le(pss_of_all(4), 256 * MiB / 10 * 11);
	ck_assert_uint_le(held_by(D.pid).arena_bytes, 256 * MiB + slack());

	must_do(&P[0], do_close, &u[0]);
	peer_leave(&P[1]);
	peer_kill(&P[2]);
	must_do(&P[3], do_check, &u[3]);
	ck_assert_uint_eq(must_stat("read_bytes"), read);
	must_do(&P[3], do_release, &u[3]);
	must_do(&P[3], do_check, &u[3]);
	peer_leave(&P[0]);
	peer_leave(&P[3]);
}
END_TEST

#define G02_SHARDS 4
#define G02_EACH (16 * MiB)

static struct use make_shards(uint64_t seed)
{
	struct use u = { .seed = seed };
	cleanup_free char *text = strdup("{\"metadata\": {}, \"weight_map\": {");

	for (int i = 0; i < G02_SHARDS; i++) {
		cleanup_free char *path =
			data_text("%s/model-0000%d-of-0000%d.safetensors", test_dir, i + 1, G02_SHARDS);
		cleanup_free char *first = data_text("s%d.a", i), *second = data_text("s%d.b", i);
		struct data_tensor t[2] = {
			{ .name = first, .dtype = "U8", .ndim = 1, .shape = { G02_EACH / 4 } },
			{ .name = second, .dtype = "U8", .ndim = 1, .shape = { G02_EACH / 4 * 3 } }
		};
		char *more;

		(void)data_write_safetensors(path, t, 2, &(struct data_opts){ .seed = seed });
		(void)data_drop_cache(path);
		more = data_text("%s%s\"%s\": \"%s\", \"%s\": \"%s\"", text, i ? ", " : "", first,
				 strrchr(path, '/') + 1, second, strrchr(path, '/') + 1);
		free(text);
		text = more;
	}
	{
		cleanup_free char *all = data_text("%s}}", text);

		(void)snprintf(u.path, sizeof(u.path), "%s/model.safetensors.index.json", test_dir);
		data_write(u.path, all, strlen(all));
	}
	return u;
}

/* _i: whether all have it open before the first touch. Bites on: two fills of one extent; a fill for each client. */
START_TEST(test_g02_read_once_by_eight)
{
	struct use u;
	uint64_t read;

	daemon_start(&D, "", NULL);
	u = make_shards(4);
	for (int i = 0; i < 8; i++) {
		peer_new(&P[i], getuid());
		if (_i)
			must_do(&P[i], do_open, &u);
	}
	for (int i = 0; i < 8; i++) {
		u.value = (uint64_t)i / 2; /* two at a time meet at the same page */
		peer_begin(&P[i], "checks", _i ? do_check : do_open_and_check, &u, sizeof(u));
	}
	for (int i = 0; i < 8; i++)
		must_end(&P[i]);
	read = must_stat("read_bytes");
	ck_assert_uint_ge(read, G02_SHARDS * G02_EACH);
	ck_assert_uint_le(read, G02_SHARDS * G02_EACH / 100 * 102);
	if (!SANITIZED)
		ck_assert_uint_le(pss_of_all(8), G02_SHARDS * G02_EACH + 9 * 4 * MiB);
	for (int i = 0; i < 8; i++)
		peer_leave(&P[i]);
}
END_TEST

static int64_t do_write_page(const void *arg)
{
	const struct use *u = arg;
	unsigned char *p = wd_model_tensor_at(my_models[u->slot], 0)->data;

	memset(p + 8192, (int)u->value, 64);
	return p[8192] == (unsigned char)u->value ? 0 : -1;
}

static int64_t do_look_at_page(const void *arg)
{
	const struct use *u = arg;
	const unsigned char *p = wd_model_tensor_at(my_models[u->slot], 0)->data;

	for (int i = 0; i < 64; i++)
		if (p[8192 + i] != (unsigned char)u->value)
			return peer_say("byte %d is %02x", i, p[8192 + i]);
	return 0;
}

START_TEST(test_g11_a_write_is_the_writers_own)
{
	struct use u;

	daemon_start(&D, "", NULL);
	u = new_model("written.safetensors", 4, 3 * MiB, 5, 0);
	for (int i = 0; i < 2; i++) {
		peer_new(&P[i], getuid());
		must_do(&P[i], do_open, &u);
	}
	u.value = 0xA5;
	must_do(&P[0], do_write_page, &u); /* before it was read, and... */
	u.value = 0;
	must_do(&P[1], do_check, &u);
	must_tool("drop %s", u.path);
	u.value = 0xA5;
	must_do(&P[0], do_look_at_page, &u); /* ...kept when its extent is dropped */
	u.value = 0;
	must_do(&P[1], do_check, &u);
	ck_assert(file_is_right(u.path, file_bytes(u.path) - 12 * MiB, u.seed));
	peer_leave(&P[0]);
	must_do(&P[1], do_check, &u);
	peer_leave(&P[1]);
}
END_TEST

/* ------------------------------------------------------------------ identity (I2) */

static void overwrite(const char *path, uint64_t from, uint64_t seed)
{
	cleanup_close int fd = open(path, O_WRONLY | O_CLOEXEC);
	cleanup_free unsigned char *buf = malloc(MiB);
	uint64_t end = file_bytes(path);

	ck_assert_int_ge(fd, 0);
	for (uint64_t off = from; off < end; off += MiB) {
		size_t n = (size_t)MIN(MiB, end - off);

		data_fill(buf, n, seed, off);
		ck_assert_int_eq(pwrite(fd, buf, n, (off_t)off), (ssize_t)n);
	}
	ck_assert_int_eq(fsync(fd), 0);
}

/* Where the tensors begin: the header stays. */
static uint64_t header_of(const char *path)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint64_t n = 0;

	ck_assert_int_eq(pread(fd, &n, 8, 0), 8);
	return 8 + le64toh(n);
}

/* Bytes [0, value) of tensor 0 have been read and must be right; each other page is right or an error. Returns how many
 * pages gave an error. */
static int64_t do_read_changed(const void *arg)
{
	const struct use *u = arg;
	int64_t failed = 0;

	catch_signals();
	for (size_t i = 0; i < wd_model_nr_tensors(my_models[u->slot]); i++) {
		const struct wd_tensor *t = wd_model_tensor_at(my_models[u->slot], i);
		const unsigned char *p = t->data;

		for (uint64_t off = 0; off < t->nbytes; off += 4096) {
			struct caught c;

			if (touch(p + off, NULL, &c)) {
				/* to the end of this page: the next one has a touch of its own */
				uint64_t n = MIN(t->nbytes - off, 4096 - ((uintptr_t)p + off) % 4096);

				if (data_check(p + off, n, u->seed, t->file_offset + off) >= 0)
					return peer_say("tensor %zu, offset %llu: not the old file's bytes", i,
							(unsigned long long)off);
				continue;
			}
			failed++;
			if (c.sig != SIGBUS)
				return peer_say("signal %d", c.sig);
			if (i == 0 && off < u->value)
				return peer_say("what had been read is an error now (offset %llu)",
						(unsigned long long)off);
		}
	}
	return failed;
}

static int64_t do_check_part(const void *arg)
{
	const struct use *u = arg;
	const struct wd_tensor *t = wd_model_tensor_at(my_models[u->slot], 0);

	return data_check(t->data, u->value, u->seed, t->file_offset) < 0 ? 0 : -1;
}

static void no_poison(void)
{
	pager_hooks.no_poison = true;
}

/* Bites on: the check of size and mtime after a read; identity by inode alone. _i: as before Linux 6.6, where the
 * client maps an empty file (WIRE_POISON). */
START_TEST(test_changed_file)
{
	struct use old, new;
	int64_t failed;

	daemon_start(&D, "", _i ? no_poison : NULL);
	old = new = new_model("changed.safetensors", 8, 8 * MiB, 6, 0);
	old.value = MiB;
	new.seed = 7;
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &old);
	must_do(&P[0], do_check_part, &old);
	overwrite(old.path, header_of(old.path), new.seed);
	peer_new(&P[1], getuid());
	must_do(&P[1], do_open_and_check, &new);
	failed = peer_does(&P[0], do_read_changed, &old);
	ck_assert_msg(failed > 0, "%lld pages of the old file failed: %s", (long long)failed, P[0].text);
	must_do(&P[1], do_check, &new);
	/* dropped, the old bytes cannot come back, and nothing else comes in their place */
	must_tool("drop --all");
	old.value = 0;
	failed = peer_does(&P[0], do_read_changed, &old);
	ck_assert_msg(failed > 0, "%lld: %s", (long long)failed, P[0].text);
	must_do(&P[1], do_check, &new);
	peer_new(&P[2], getuid());
	must_do(&P[2], do_open_and_check, &new);
	for (int i = 0; i < 3; i++)
		peer_leave(&P[i]);
}
END_TEST

START_TEST(test_link_chmod_rename_unlink_disturb_nobody)
{
	struct use u, other, moved;
	cleanup_free char *second = NULL;

	daemon_start(&D, "", NULL);
	u = new_model("named.safetensors", 6, 4 * MiB, 8, 0);
	other = new_model("other.safetensors", 6, 4 * MiB, 9, 0);
	second = data_text("%s/second", test_dir);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &u);
	u.value = MiB;
	must_do(&P[0], do_check_part, &u);
	u.value = 0;
	ck_assert_int_eq(chmod(u.path, 0600), 0);
	ck_assert_int_eq(link(u.path, second), 0);
	must_do(&P[0], do_check, &u);
	must_do(&P[0], do_release, &u);
	moved = other;
	(void)snprintf(moved.path, sizeof(moved.path), "%s", u.path);
	ck_assert_int_eq(rename(other.path, u.path), 0);
	must_do(&P[0], do_check, &u);
	peer_new(&P[1], getuid());
	must_do(&P[1], do_open_and_check, &moved);
	must_do(&P[0], do_release, &u);
	ck_assert_int_eq(unlink(second), 0);
	must_do(&P[0], do_check, &u);
	must_do(&P[1], do_check, &moved);
	peer_leave(&P[0]);
	peer_leave(&P[1]);
}
END_TEST

/* Bites on: comparing the resident bytes when only ctime differs (or not sharing at all then). */
START_TEST(test_ctime_alone)
{
	struct timespec times[2];
	struct use u, new;
	struct stat st;
	uint64_t read;

	daemon_start(&D, "", NULL);
	u = new = new_model("ctime.safetensors", 4, 8 * MiB, 10, 0);
	new.seed = 11;
	for (int i = 0; i < 3; i++)
		peer_new(&P[i], getuid());
	must_do(&P[0], do_open_and_check, &u);
	read = must_stat("read_bytes");
	ck_assert_int_eq(chmod(u.path, 0640), 0);
	must_do(&P[1], do_open_and_check, &u);
	/* compared, but not held twice */
	ck_assert_uint_le(held_by(D.pid).arena_bytes, file_bytes(u.path) + slack());
	ck_assert_uint_le(must_stat("resident_bytes"), file_bytes(u.path) + slack());
	(void)read;

	ck_assert_int_eq(stat(u.path, &st), 0);
	overwrite(u.path, header_of(u.path) + 20 * MiB, new.seed);
	times[0] = st.st_atim;
	times[1] = st.st_mtim;
	ck_assert_int_eq(utimensat(AT_FDCWD, u.path, times, 0), 0);
	must_do(&P[2], do_open, &new);
	/* the last tensor lies behind 20 MiB: the new file's, not the old one's that is in memory */
	new.value = 3;
	ck_assert_int_lt(peer_does(&P[2], do_check, &u), 0);
	must_do(&P[0], do_check, &u); /* all of it had been read */
	must_do(&P[1], do_check, &u);
	for (int i = 0; i < 3; i++)
		peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ budget, drop, pin, stages */

/* _i: in so many processes. Bites on: making room before a fill; a drop that takes what a stage holds. */
START_TEST(test_three_models_in_a_budget_for_one_and_a_half)
{
	const uint64_t budget = 72 * MiB;
	uint64_t most = 0, n = 0;
	struct use u[3];

	daemon_start(&D, "--budget 72M", NULL);
	for (unsigned int k = 0; k < 3; k++) {
		cleanup_free char *name = data_text("turn%u.safetensors", k);

		u[k] = new_model(name, 12, 4 * MiB, 20 + k, k);
	}
	for (int i = 0; i < _i; i++)
		peer_new(&P[i], getuid());
	for (int k = 0; k < 3; k++)
		must_do(&P[k % _i], do_open, &u[k]);
	for (int round = 0; round < 12; round++) {
		struct peer *p = &P[round % 3 % _i];

		peer_begin(p, "checks in turn", do_check, &u[round % 3], sizeof(u[0]));
		while (!peer_has_ended(p)) {
			uint64_t now = held_by(D.pid).arena_bytes;

			most = MAX(most, now);
			n++;
			(void)usleep(1000);
		}
		must_end(p);
	}
	ck_assert_uint_gt(n, 0);
	ck_assert_msg(most <= budget + slack(), "%llu MiB were in memory, the budget is 72",
		      (unsigned long long)(most / MiB));
	ck_assert_uint_le(must_stat("resident_bytes"), budget + slack());
	ck_assert_uint_ge(must_stat("dropped_bytes"), 48 * MiB);
	for (int i = 0; i < _i; i++)
		peer_leave(&P[i]);
}
END_TEST

START_TEST(test_client_leaves_cache_that_can_be_dropped)
{
	struct use u;
	uint64_t read, size;

	daemon_start(&D, "", NULL);
	u = new_model("left.safetensors", 8, 4 * MiB, 30, 0);
	size = 32 * MiB;
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open_and_check, &u);
	peer_leave(&P[0]);
	read = must_stat("read_bytes");
	ck_assert_uint_ge(resident_of(u.path), size);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open_and_check, &u);
	ck_assert_uint_eq(must_stat("read_bytes"), read);
	peer_kill(&P[0]);
	ck_assert_uint_ge(resident_of(u.path), size);
	must_tool("drop %s", u.path);
	ck_assert_uint_eq(stat_until_at_most("resident_bytes", 0), 0);
	ck_assert_uint_le(held_by(D.pid).arena_bytes, slack());
}
END_TEST

/* Bites on: `drop --all` without --force; the share of a user. */
START_TEST(test_pins)
{
	struct use u[2];
	cleanup_tool struct tool t = { 0 };

	daemon_start(&D, "--budget 80M", NULL);
	u[0] = new_model("pinned.safetensors", 4, 8 * MiB, 31, 0);
	u[1] = new_model("loose.safetensors", 4, 16 * MiB, 32, 1);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open_and_check, &u[0]);
	must_tool("pin %s", u[0].path);
	must_do(&P[0], do_open_and_check, &u[1]);
	ck_assert_uint_ge(resident_of(u[0].path), 32 * MiB); /* the other one had no room beside it */
	must_tool("drop --all");
	ck_assert_uint_ge(resident_of(u[0].path), 32 * MiB);
	ck_assert_uint_eq(resident_of(u[1].path), 0);
	t = tool_run(getuid(), "pin %s", u[1].path); /* more than this user's share */
	ck_assert_msg(t.code == 1 && *t.err, "pinned beyond the share of a user: %d %s", t.code, t.err);
	must_drop_all(true);
	must_do(&P[0], do_check, &u[0]);
	must_tool("unpin %s", u[0].path);
	must_drop_all(false);
	must_do(&P[0], do_check, &u[0]);
	peer_leave(&P[0]);
}
END_TEST

/* Only root and the daemon's user may drop and pin what others use. */
START_TEST(test_drop_and_pin_by_others)
{
	struct use u;
	cleanup_tool struct tool drop = { 0 }, pin = { 0 }, all = { 0 }, bye = { 0 };

	daemon_start(&D, "", NULL);
	u = new_model("used.safetensors", 4, 4 * MiB, 33, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open_and_check, &u);
	drop = tool_run(NOBODY, "drop %s", u.path);
	ck_assert_msg(drop.code == 1 && *drop.err, "%d %s", drop.code, drop.err);
	all = tool_run(NOBODY, "drop --all");
	bye = tool_run(NOBODY, "shutdown");
	ck_assert_msg(bye.code == 1, "%d %s", bye.code, bye.err);
	pin = tool_run(NOBODY, "pin %s", u.path);
	ck_assert_msg(pin.code == 1 && *pin.err, "%d %s", pin.code, pin.err);
	ck_assert_uint_ge(resident_of(u.path), 16 * MiB);
	must_do(&P[0], do_check, &u);
	peer_leave(&P[0]);
}
END_TEST

/* As a program reads that computes between its layers: slower than the clock's rounds. */
static int64_t do_read_slowly(const void *arg)
{
	const struct use *u = arg;

	for (size_t i = 0; i < wd_model_nr_tensors(my_models[u->slot]); i++) {
		const struct wd_tensor *t = tensor_of(u, i);

		if (data_check(t->data, t->nbytes, u->seed, t->file_offset) >= 0)
			return peer_say("tensor %zu is wrong", i);
		(void)usleep(40000);
	}
	return 0;
}

/* A client without stages holds only what it touched in the last round: what another one's stage uses stays.
 * Bites on: the order of dropping (not held by a client's stage first). */
START_TEST(test_a_stage_holds_what_it_uses)
{
	struct use held, other, stage = { .path = "encode" };
	uint64_t read;

	daemon_start(&D, "--budget 64M", NULL);
	held = new_model("held.safetensors", 6, 4 * MiB, 34, 0);
	other = new_model("passing.safetensors", 32, 4 * MiB, 35, 1);
	for (int i = 0; i < 2; i++)
		peer_new(&P[i], getuid());
	must_do(&P[1], do_open, &other);
	must_do(&P[1], do_read_slowly, &other); /* without stages, twice the budget: the clock goes round */
	must_do(&P[0], do_open, &held);
	must_do(&P[0], do_stage, &stage);
	must_do(&P[0], do_check, &held);
	must_do(&P[1], do_read_slowly, &other);
	ck_assert_uint_ge(resident_of(held.path), 24 * MiB);
	read = source_value(held.path, "read_bytes");
	must_do(&P[0], do_check, &held);
	ck_assert_uint_eq(source_value(held.path, "read_bytes"), read);
	/* the stage ends: now it may go */
	stage.path[0] = 0;
	must_do(&P[0], do_stage, &stage);
	for (int i = 0; i < 3; i++)
		must_do(&P[1], do_check, &other);
	ck_assert_uint_lt(resident_of(held.path), 24 * MiB);
	must_do(&P[0], do_check, &held);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* Two clients' stages use it: it goes with the second one's end. */
START_TEST(test_a_stage_drops_only_what_nobody_holds)
{
	struct use u, one = { .path = "one" }, two = { .path = "two" };

	daemon_start(&D, "", NULL);
	u = new_model("shared.safetensors", 6, 4 * MiB, 36, 0);
	for (int i = 0; i < 2; i++) {
		peer_new(&P[i], getuid());
		must_do(&P[i], do_open, &u);
		must_do(&P[i], do_stage, &one);
		must_do(&P[i], do_check, &u);
	}
	for (int i = 0; i < 2; i++) {
		/* the stage "two" touches nothing: at its end nothing of it is in use any more */
		must_do(&P[i], do_stage, &two);
		two.path[0] = 0;
		must_do(&P[i], do_stage, &two);
		(void)snprintf(two.path, sizeof(two.path), "two");
		if (i == 0)
			ck_assert_uint_ge(resident_of(u.path), 24 * MiB);
	}
	ck_assert_uint_le(stat_until_at_most("resident_bytes", 0), 0);
	for (int i = 0; i < 2; i++) {
		must_do(&P[i], do_check, &u);
		peer_leave(&P[i]);
	}
}
END_TEST

/* ------------------------------------------------------------------ who sees what */

START_TEST(test_ls_hides_what_others_use)
{
	struct use mine, theirs;
	json_t *all;

	daemon_start(&D, "", NULL);
	mine = new_model("mine.safetensors", 2, 4 * MiB, 40, 0);
	theirs = new_model("theirs.safetensors", 2, 4 * MiB, 41, 0);
	peer_new(&P[0], getuid());
	peer_new(&P[1], NOBODY);
	must_do(&P[0], do_open_and_check, &mine);
	must_do(&P[1], do_open_and_check, &theirs);
	ck_assert_ptr_null(listed(NOBODY, "/mine.safetensors", &all));
	json_decref(all);
	ck_assert_ptr_nonnull(listed(NOBODY, "/theirs.safetensors", &all));
	json_decref(all);
	ck_assert_ptr_nonnull(listed(getuid(), "/mine.safetensors", &all));
	json_decref(all);
	ck_assert_ptr_nonnull(listed(getuid(), "/theirs.safetensors", &all));
	json_decref(all);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

START_TEST(test_numa_is_shown)
{
	cleanup_tool struct tool t = { 0 };
	json_t *j;

	daemon_start(&D, "--numa interleave", NULL);
	j = must_json(getuid(), "stat");
	ck_assert_str_eq(json_string_value(json_object_get(j, "numa")), "interleave");
	json_decref(j);
	t = tool_run(getuid(), "ls");
	ck_assert_msg(t.code == 0, "%d %s", t.code, t.err);
}
END_TEST

/* ------------------------------------------------------------------ a client without privileges gets everything */

/* Each system call meets a tensor that nobody has read. */
static int64_t do_system_calls(const void *arg)
{
	const struct use *u = arg;
	const struct wd_tensor *t;
	cleanup_free unsigned char *buf = malloc(MiB);
	int fd[2], sv[2];
	cleanup_close int file = memfd_create("sink", MFD_CLOEXEC), source = open(u->path, O_RDONLY | O_CLOEXEC);
	ssize_t n;

	if (pipe(fd) < 0 || file < 0 || source < 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, sv) < 0)
		return peer_say("set-up: %s", strerror(errno));
	t = tensor_of(u, 0);
	n = write(fd[1], t->data, 4000);
	if (n != 4000 || read(fd[0], buf, 4000) != 4000 || data_check(buf, 4000, u->seed, t->file_offset) >= 0)
		return peer_say("write to a pipe: %zd", n);
	t = tensor_of(u, 1);
	n = pwrite(file, t->data, MiB, 0);
	if (n != (ssize_t)MiB || pread(file, buf, MiB, 0) != (ssize_t)MiB ||
	    data_check(buf, MiB, u->seed, t->file_offset) >= 0)
		return peer_say("write to a file: %zd", n);
	t = tensor_of(u, 2);
	n = send(sv[0], t->data, 3000, 0);
	if (n != 3000 || recv(sv[1], buf, 3000, MSG_WAITALL) != 3000 ||
	    data_check(buf, 3000, u->seed, t->file_offset) >= 0)
		return peer_say("send: %zd", n);
	/* into a weight: the file's own bytes from another place, so that they differ from what was there */
	t = tensor_of(u, 3);
	n = pread(source, (char *)t->data + 10000, 10000, 64);
	if (n != 10000 || pread(source, buf, 10000, 64) != 10000 || memcmp(buf, (char *)t->data + 10000, 10000) != 0)
		return peer_say("pread into a weight: %zd", n);
	if (data_check(t->data, 10000, u->seed, t->file_offset) >= 0 ||
	    data_check((char *)t->data + 20000, t->nbytes - 20000, u->seed, t->file_offset + 20000) >= 0)
		return peer_say("pread into a weight has changed what lies beside it");
	t = tensor_of(u, 4);
	if (mlock((char *)((uintptr_t)t->data & ~4095ul), 64 * KiB) < 0 ||
	    munlock((char *)((uintptr_t)t->data & ~4095ul), 64 * KiB) < 0)
		return peer_say("mlock: %s", strerror(errno));
	if (data_check(t->data, t->nbytes, u->seed, t->file_offset) >= 0)
		return peer_say("mlock: wrong bytes");
	t = tensor_of(u, 5);
	if (madvise((char *)((uintptr_t)t->data & ~4095ul), t->nbytes, MADV_POPULATE_READ) < 0)
		return peer_say("MADV_POPULATE_READ: %s", strerror(errno));
	if (data_check(t->data, t->nbytes, u->seed, t->file_offset) >= 0)
		return peer_say("MADV_POPULATE_READ: wrong bytes");
	t = tensor_of(u, 6);
	if (access(t->data, F_OK) == 0 || (errno != ENOENT && errno != ENAMETOOLONG && errno != EINVAL))
		return peer_say("a path of an unread page: %s", strerror(errno));
	for (int i = 0; i < 2; i++) {
		(void)close(fd[i]);
		(void)close(sv[i]);
	}
	return 0;
}

/* _i: as nobody. Bites on: kernel-mode faults (a userfaultfd made by way of the daemon's /dev/userfaultfd). */
START_TEST(test_system_calls_on_unread_weights)
{
	struct use u;

	daemon_start(&D, "", NULL);
	u = new_model("calls.safetensors", 10, 2 * MiB, 42, 0);
	peer_new(&P[0], _i ? NOBODY : getuid());
	must_do(&P[0], do_open, &u);
	must_do(&P[0], do_system_calls, &u);
	peer_leave(&P[0]);
}
END_TEST

static int64_t do_address(const void *arg)
{
	const struct use *u = arg;

	return (int64_t)(uintptr_t)tensor_of(u, (size_t)u->value)->data;
}

static int64_t do_file_offset(const void *arg)
{
	const struct use *u = arg;

	return (int64_t)tensor_of(u, (size_t)u->value)->file_offset;
}

static int64_t do_dump_core(const void *arg)
{
	struct rlimit all = { RLIM_INFINITY, RLIM_INFINITY };
	const struct use *u = arg;
	int status;
	pid_t pid;

	if (chdir(u->path) < 0)
		return peer_say("%s: %s", u->path, strerror(errno));
	pid = fork();
	if (pid == 0) {
		(void)setrlimit(RLIMIT_CORE, &all);
		(void)prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
		abort();
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return -1;
	return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT ? 0 : peer_say("status %x", status);
}

/*
 * What debuggers do: other processes reach for pages that their owner has not read. Nobody hangs and nobody is told a
 * wrong byte. (What goes by /proc/PID/mem and ptrace(2) gets EIO for such a page: the kernel does not let these wait
 * for a userfaultfd. process_vm_readv(2) waits, and gets the bytes.)
 */
START_TEST(test_debuggers_and_core_dumps)
{
	cleanup_free unsigned char *buf = malloc(MiB);
	struct use u, core = { 0 };
	cleanup_free char *mem = NULL;
	cleanup_close int fd = -1;
	uint64_t address[3], off[3];
	struct iovec to, from;
	long word;
	int status;
	ssize_t n;

	daemon_start(&D, "", NULL);
	u = new_model("peeked.safetensors", 6, 4 * MiB, 43, 0);
	peer_new(&P[0], getuid());
	must_do(&P[0], do_open, &u);
	for (unsigned int i = 0; i < 3; i++) {
		u.value = i;
		address[i] = (uint64_t)peer_does(&P[0], do_address, &u);
		off[i] = (uint64_t)peer_does(&P[0], do_file_offset, &u);
	}
	to = (struct iovec){ buf, MiB };
	from = (struct iovec){ (void *)(uintptr_t)address[0], MiB };
	ck_assert_int_eq(process_vm_readv(P[0].pid, &to, 1, &from, 1, 0), (ssize_t)MiB);
	ck_assert_int_eq(data_check(buf, MiB, u.seed, off[0]), -1);

	mem = data_text("/proc/%d/mem", (int)P[0].pid);
	fd = open(mem, O_RDONLY | O_CLOEXEC);
	ck_assert_int_ge(fd, 0);
	n = pread(fd, buf, MiB, (off_t)address[1]);
	ck_assert(n == (ssize_t)MiB ? data_check(buf, MiB, u.seed, off[1]) < 0 : n < 0 && errno == EIO);

	/* stopped: nobody in that process could help */
	ck_assert_int_eq(ptrace(PTRACE_ATTACH, P[0].pid, NULL, NULL), 0);
	ck_assert_int_eq(waitpid(P[0].pid, &status, 0), P[0].pid);
	errno = 0;
	word = ptrace(PTRACE_PEEKDATA, P[0].pid, (void *)(uintptr_t)address[2], NULL);
	ck_assert(!errno ? data_check(&word, sizeof(word), u.seed, off[2]) < 0 : errno == EIO);
	ck_assert_int_eq(ptrace(PTRACE_DETACH, P[0].pid, NULL, NULL), 0);

	(void)snprintf(core.path, sizeof(core.path), "%s", test_dir);
	must_do(&P[0], do_dump_core, &core);
	u.value = 0;
	must_do(&P[0], do_check, &u);
	peer_leave(&P[0]);
}
END_TEST

/* ------------------------------------------------------------------ a client that does things to its own view */

/* Six tensors of two extents each: parts of what nobody else looks at here are discarded, protected, replaced. */
static int64_t do_maltreat(const void *arg)
{
	const struct use *u = arg;
	uint64_t e = extent();
	unsigned char *p[6];
	void *at;

	for (size_t i = 0; i < 6; i++)
		p[i] = (unsigned char *)round_up((uintptr_t)tensor_of(u, i)->data, e);
	/* discarded, read and unread */
	touch_all(tensor_of(u, 0));
	if (madvise(p[0], e, MADV_DONTNEED) < 0 || madvise(p[1] + 8192, 4096, MADV_DONTNEED) < 0)
		return peer_say("MADV_DONTNEED: %s", strerror(errno));
	/* away and back */
	if (mprotect(p[2] + 4096, 65536, PROT_NONE) < 0 || mprotect(p[2] + 4096, 65536, PROT_READ | PROT_WRITE) < 0)
		return peer_say("mprotect: %s", strerror(errno));
	/* unmapped: half an extent; replaced: a page */
	if (munmap(p[3], e / 2) < 0)
		return peer_say("munmap: %s", strerror(errno));
	at = mmap(p[4] + 4096, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (at == MAP_FAILED)
		return peer_say("mmap: %s", strerror(errno));
	memset(at, 0x77, 4096);
	/* (a page that was never read, so that it takes the daemon to make it present) */
	if (mprotect(p[5], 4096, PROT_READ) < 0)
		return peer_say("mprotect: %s", strerror(errno));
	return 0;
}

static int64_t do_check_maltreated(const void *arg)
{
	const struct use *u = arg;
	uint64_t e = extent();

	for (size_t i = 0; i < 6; i++) {
		const struct wd_tensor *t = tensor_of(u, i);
		unsigned char *data = t->data, *p = (unsigned char *)round_up((uintptr_t)data, e);

		for (uint64_t off = 0; off < t->nbytes; off += 4096) {
			unsigned char *page = (unsigned char *)((uintptr_t)(data + off) & ~4095ul);
			unsigned char *begin = MAX(page, data), *end = MIN(page + 4096, data + t->nbytes);

			if (i == 3 && page >= p && page < p + e / 2)
				continue;
			if (i == 4 && page == p + 4096) {
				if (page[5] != 0x77)
					return peer_say("the client's own page is %02x", page[5]);
				continue;
			}
			if (data_check(begin, (size_t)(end - begin), u->seed,
				       t->file_offset + (uint64_t)(begin - data)) >= 0)
				return peer_say("tensor %zu, offset %llu", i, (unsigned long long)off);
		}
	}
	return 0;
}

/* Bites on: a result of REGISTER other than 0 forbids the punch (EINVAL where a page was replaced). */
START_TEST(test_client_changes_its_view)
{
	struct use u;

	daemon_start(&D, "", NULL);
	u = new_model("view.safetensors", 6, 2 * extent() + 8192, 44, 0);
	for (int i = 0; i < 2; i++) {
		peer_new(&P[i], getuid());
		must_do(&P[i], do_open, &u);
	}
	must_do(&P[0], do_maltreat, &u);
	must_do(&P[0], do_check_maltreated, &u);
	must_do(&P[1], do_check, &u);
	for (int i = 0; i < 3; i++) {
		cleanup_tool struct tool t = { 0 };

		t = tool_run(getuid(), "drop %s", u.path);
		/* what that client keeps from being dropped is left */
		must_do(&P[i % 2], i % 2 ? do_check : do_check_maltreated, &u);
		must_do(&P[(i + 1) % 2], i % 2 ? do_check_maltreated : do_check, &u);
	}
	peer_kill(&P[0]);
	must_do(&P[1], do_check, &u);
	/* with that client gone nothing is in the way any more */
	for (uint64_t end = now_ms() + 20000; now_ms() < end;) {
		cleanup_tool struct tool t = tool_run(getuid(), "drop %s", u.path);

		if (t.code == 0 && must_stat("resident_bytes") == 0)
			break;
	}
	ck_assert_uint_eq(must_stat("resident_bytes"), 0);
	must_do(&P[1], do_check, &u);
	peer_leave(&P[1]);
}
END_TEST

/* ------------------------------------------------------------------ I3: who may write what */

static const char *written_by(int fd, const char *link)
{
	unsigned char byte = 0xEE;
	int flags = FS_IMMUTABLE_FL, again;
	void *p;

	if (pwrite(fd, &byte, 1, 0) == 1)
		return "pwrite";
	if (ftruncate(fd, 4096) == 0)
		return "ftruncate";
	if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0)
		return "punch";
	if (fallocate(fd, 0, 0, 4096) == 0)
		return "fallocate";
	p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p != MAP_FAILED)
		return "mmap";
	p = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
	if (p != MAP_FAILED) {
		if (mprotect(p, 4096, PROT_READ | PROT_WRITE) == 0)
			return "mprotect";
		if (madvise(p, 4096, MADV_REMOVE) == 0)
			return "MADV_REMOVE";
		(void)munmap(p, 4096);
	}
	again = open(link, O_RDWR | O_CLOEXEC);
	if (again >= 0)
		return "open for writing";
	again = open(link, O_RDONLY | O_TRUNC | O_CLOEXEC);
	if (again >= 0)
		return "open with O_TRUNC";
	if (truncate(link, 0) == 0)
		return "truncate";
	if (ioctl(fd, FS_IOC_SETFLAGS, &flags) == 0)
		return "making it immutable";
	if (fchmod(fd, 0777) == 0)
		return "chmod";
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) == 0)
		return "sealing";
	return NULL;
}

/* All files of a tmpfs that this process can reach by descriptor or mapping, save its own mappings' states. */
static int64_t do_write_arenas(const void *arg)
{
	const struct use *u = arg;
	int64_t nr = 0;

	for (int fd = 0; fd < 1024; fd++) {
		struct statfs fs;
		struct stat st;
		char link[64];
		const char *how;
		uint64_t magic = 0;

		if (fstatfs(fd, &fs) < 0 || fs.f_type != TMPFS_MAGIC || fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
			continue;
		(void)!pread(fd, &magic, sizeof(magic), 0);
		if ((uint64_t)st.st_size < u->value && magic != TABLE_MAGIC)
			continue;
		nr++;
		(void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
		how = written_by(fd, link);
		if (how)
			return peer_say("%s of descriptor %d works", how, fd);
	}
	/* the same by way of the view itself */
	{
		unsigned char *p = (unsigned char *)((uintptr_t)tensor_of(u, 0)->data & ~4095ul);
		cleanup_free char *maps = NULL;
		cleanup_fclose FILE *f = fopen("/proc/self/maps", "re");
		char line[512];

		while (f && fgets(line, sizeof(line), f)) {
			unsigned long a, z;
			int fd;

			if (sscanf(line, "%lx-%lx", &a, &z) != 2 || (uintptr_t)p < a || (uintptr_t)p >= z)
				continue;
			maps = data_text("/proc/self/map_files/%lx-%lx", a, z);
			fd = open(maps, O_RDWR | O_CLOEXEC);
			if (fd >= 0)
				return peer_say("%s opens for writing", maps);
			fd = open(maps, O_RDONLY | O_CLOEXEC);
			if (fd >= 0) {
				const char *how = written_by(fd, maps);

				if (how)
					return peer_say("%s of %s works", how, maps);
				(void)close(fd);
				nr++;
			}
			break;
		}
		if (madvise(p, 4096, MADV_REMOVE) == 0)
			return peer_say("MADV_REMOVE of the view works");
	}
	return nr;
}

/* _i: as nobody. Bites on: the read-only clone of the mount that clients' descriptors are opened through. */
START_TEST(test_no_client_can_write)
{
	struct use u;
	int64_t nr;

	daemon_start(&D, "", NULL);
	u = new_model("guarded.safetensors", 4, 4 * MiB, 45, 0);
	peer_new(&P[0], _i ? NOBODY : getuid());
	peer_new(&P[1], getuid());
	must_do(&P[0], do_open_and_check, &u);
	must_do(&P[1], do_open_and_check, &u);
	u.value = 16 * MiB;
	nr = peer_does(&P[0], do_write_arenas, &u);
	ck_assert_msg(nr >= 0, "%s", P[0].text);
	u.value = 0;
	must_do(&P[1], do_check, &u);
	must_tool("drop %s", u.path);
	ck_assert_uint_eq(stat_until_at_most("resident_bytes", 0), 0);
	must_do(&P[1], do_check, &u);
	must_do(&P[0], do_check, &u);
	/* (that it was looked at all: as root the view's file can be reached through /proc) */
	ck_assert(nr > 0 || _i);
	for (int i = 0; i < 2; i++)
		peer_leave(&P[i]);
}
END_TEST

/* ------------------------------------------------------------------ coming and going */

/* Bites on: anything that is kept of a client (a descriptor, a thread, a mapping). */
START_TEST(test_a_hundred_clients_come_and_go)
{
	const unsigned int nr = soak_ms(0) ? 1000 : 100;
	struct held before, after;
	struct use u[2];

	daemon_start(&D, "", NULL);
	u[0] = new_model("busy.safetensors", 8, 2 * MiB, 46, 0);
	u[1] = new_model("busy2.safetensors", 2, 2 * MiB, 47, 1);
	for (unsigned int i = 0; i < nr + 4; i++) {
		struct peer *p = &P[0];

		if (i == 4) {
			(void)stat_until_at_most("clients", 1); /* who asks is one */
			before = held_by(D.pid);
		}
		peer_new(p, i % 3 || getuid() ? getuid() : NOBODY);
		must_do(p, do_open, &u[0]);
		if (i % 2)
			must_do(p, do_open, &u[1]);
		u[0].value = 20;
		u[0].value2 = i;
		must_do(p, do_random, &u[0]);
		if (i % 4 == 3) {
			peer_kill(p);
			continue;
		}
		if (i % 4 == 2)
			must_do(p, do_disconnect, &u[0]);
		peer_leave(p);
	}
	before.arena_bytes = MAX(before.arena_bytes, file_bytes(u[0].path) + file_bytes(u[1].path) + slack());
	after = daemon_held_until(&D, &before);
	ck_assert_uint_le(after.fds, before.fds);
	ck_assert_uint_le(after.threads, before.threads);
	ck_assert_uint_le(after.maps, before.maps);
	ck_assert_uint_le(after.arena_bytes, before.arena_bytes);
	ck_assert_uint_le(after.anon_bytes, before.anon_bytes + 4 * MiB);
	ck_assert_uint_le(stat_until_at_most("clients", 1), 1);
	ck_assert_uint_eq(must_stat("mappings"), 0);
}
END_TEST

int main(void)
{
	Suite *s = suite_create("serve");
	double soak = (double)soak_ms(0) / 1000;
	bool root = getuid() == 0;
	TCase *tc = folder_case(s, "serve", 150);

	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_test(tc, test_client_reads_right_bytes);
	tcase_add_test(tc, test_g10_one_copy);
	tcase_add_loop_test(tc, test_g02_read_once_by_eight, 0, 2);
	tcase_add_test(tc, test_g11_a_write_is_the_writers_own);
	tcase_add_loop_test(tc, test_changed_file, 0, 2);
	tcase_add_test(tc, test_link_chmod_rename_unlink_disturb_nobody);
	tcase_add_test(tc, test_ctime_alone);
	add_full(tc, test_three_models_in_a_budget_for_one_and_a_half, 1, 2);
	add_full(tc, test_three_models_in_a_budget_for_one_and_a_half, 3, 4);
	tcase_add_test(tc, test_client_leaves_cache_that_can_be_dropped);
	add_full(tc, test_pins, 0, 1);
	add_full(tc, test_a_stage_holds_what_it_uses, 0, 1);
	tcase_add_test(tc, test_a_stage_drops_only_what_nobody_holds);
	tcase_add_test(tc, test_numa_is_shown);
	add_full(tc, test_system_calls_on_unread_weights, 0, root ? 2 : 1);
	add_full(tc, test_debuggers_and_core_dumps, 0, 1);
	add_full(tc, test_client_changes_its_view, 0, 1);
	if (root) {
		tcase_add_loop_test(tc, test_no_client_can_write, 0, 2);
		tcase_add_test(tc, test_drop_and_pin_by_others);
		tcase_add_test(tc, test_ls_hides_what_others_use);
	} else {
		skip("serve: other users", "only root can act for them");
	}
	tc = folder_case(s, "hundreds", 100 + soak);
	tcase_add_checked_fixture(tc, NULL, stop);
	tcase_add_test(tc, test_a_hundred_clients_come_and_go);
	return run_suite(s);
}
