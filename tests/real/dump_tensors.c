/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dump_tensors FILE...: one line for each tensor, "<SHA-256 of its bytes> <dtype> <shape, joined by x> <name>", the
 * bytes as weightd pages them in. Names end the line, so they may contain anything but a newline.
 * Built by tests/real.sh, outside of the tree of objects: it sees the public header and library only.
 */
#include <weightd.h>

#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>

static void die(const char *what)
{
	(void)fprintf(stderr, "dump_tensors: %s\n", what);
	exit(1);
}

static void dump(const struct wd_tensor *t)
{
	unsigned char sha[EVP_MAX_MD_SIZE];
	unsigned int len = 0;

	if (!EVP_Digest(t->nbytes ? t->data : "", t->nbytes, sha, &len, EVP_sha256(), NULL))
		die("SHA-256 failed");
	for (unsigned int i = 0; i < len; i++)
		(void)printf("%02x", sha[i]);
	(void)printf(" %s ", wd_dtype_name(t->dtype));
	for (uint32_t i = 0; i < t->ndim; i++)
		(void)printf("%s%lld", i ? "x" : "", (long long)t->shape[i]);
	(void)printf(" %s\n", t->name);
}

int main(int argc, char **argv)
{
	struct wd *wd;

	if (wd_connect(NULL, &wd) < 0)
		die(wd_error());
	for (int i = 1; i < argc; i++) {
		struct wd_model *model;

		if (wd_model_open(wd, argv[i], NULL, &model) < 0)
			die(wd_error());
		for (size_t k = 0; k < wd_model_nr_tensors(model); k++)
			dump(wd_model_tensor_at(model, k));
		wd_model_close(model);
	}
	wd_disconnect(wd);
	return fflush(stdout) == 0 ? 0 : 1;
}
