/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wd_model_open() of a file of 10,000 tensors, against jansson's parsing of the same header that is in memory
 * already. Bar: three times as long.
 */
#include <endian.h>
#include <fcntl.h>
#include <jansson.h>
#include <string.h>

#include "tests/bench_util.h"
#include "tests/data.h"

#define NR 10000

static char *header_of(const char *path, uint64_t *ret_len)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint64_t len = 0;
	char *text;

	if (fd < 0 || pread(fd, &len, 8, 0) != 8)
		bench_cannot("%s: %s", path, strerror(errno));
	len = le64toh(len);
	text = malloc(len);
	if (!text || pread(fd, text, len, 8) != (ssize_t)len)
		bench_cannot("%s: %s", path, strerror(errno));
	*ret_len = len;
	return text;
}

int main(void)
{
	static struct data_tensor tensors[NR];
	static char names[NR][64];
	struct samples ratio = { 0 }, open_ms = { 0 }, parse_ms = { 0 };
	size_t repeats = bench_repeats(31);
	cleanup_free char *dir = NULL, *path = NULL, *text = NULL;
	struct wd *wd;
	uint64_t len;

	bench_begin("open", "opening a model of 10,000 tensors, against parsing its JSON");
	bench_room(NR * 2048, GiB);
	dir = data_tmpdir();
	path = data_text("%s/model.safetensors", dir);
	for (size_t i = 0; i < NR; i++) {
		(void)snprintf(names[i], sizeof(names[i]), "model.layers.%zu.self_attn.q_proj.%zu.weight", i / 10,
			       i % 10);
		tensors[i] = (struct data_tensor){ .name = names[i], .dtype = "BF16", .ndim = 2, .shape = { 32, 32 } };
	}
	data_write_safetensors(path, tensors, NR, &(struct data_opts){ .seed = 5, .metadata = "{\"format\":\"pt\"}" });
	text = header_of(path, &len);
	bench_recache(path);
	wd = bench_connect();
	for (size_t i = 0; i < repeats + 1; i++) {
		double t_open = 0, t_parse = 0;

		for (size_t k = 0; k < 2; k++) {
			double t = bench_seconds();

			if ((i + k) % 2) {
				struct wd_model *m;

				if (wd_model_open(wd, path, NULL, &m) < 0)
					bench_cannot("%s", wd_error());
				t_open = bench_seconds() - t;
				if (wd_model_nr_tensors(m) != NR)
					bench_cannot("%zu tensors", wd_model_nr_tensors(m));
				wd_model_close(m);
			} else {
				json_t *j = json_loadb(text, len, 0, NULL);

				t_parse = bench_seconds() - t;
				if (json_object_size(j) != NR + 1)
					bench_cannot("the header has %zu keys", json_object_size(j));
				json_decref(j);
			}
		}
		if (!i)
			continue; /* malloc's memory is touched for the first time */
		add(&ratio, t_open / t_parse);
		add(&open_ms, t_open * 1e3);
		add(&parse_ms, t_parse * 1e3);
	}
	bench_note("repeats", "%zu", repeats);
	bench_note("header", "%llu KiB", (unsigned long long)(len / KiB));
	bench_row("time / parsing's", &ratio, "x", BENCH_AT_MOST, 3);
	bench_row("wd_model_open()", &open_ms, "ms", BENCH_NO_BAR, 0);
	bench_row("json_loadb()", &parse_ms, "ms", BENCH_NO_BAR, 0);
	wd_disconnect(wd);
	return bench_end();
}
