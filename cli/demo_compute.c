/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a stage does with a tensor. Everything is in one order, whatever the machine's vectors are: a row is
 * multiplied in LANES sums, added up from the first lane to the last. So the same bytes give the same state.
 *
 * Data may begin at any address (a file that is mapped has its tensors where they are), so it is read by memcpy,
 * which compilers turn into one load.
 */
#define _GNU_SOURCE
#include "cli/demo.h"

#include "lib/include/weightd.h"

#include <math.h>
#include <string.h>

#define LANES 8

typedef float vf __attribute__((vector_size(LANES * 4)));
typedef uint32_t vu __attribute__((vector_size(LANES * 4)));
typedef uint16_t vh __attribute__((vector_size(LANES * 2)));
typedef uint8_t vb __attribute__((vector_size(LANES)));
typedef int32_t vi __attribute__((vector_size(LANES * 4)));

enum kind { KIND_F32, KIND_BF16, KIND_F16, KIND_BYTES };

/* Fletcher's two sums, a pair for each lane: the first over the data's bits, the second over the first. */
struct sums {
	vu a, b;
};

void demo_state_init(struct demo_state *s, uint64_t seed)
{
	for (size_t i = 0; i < DEMO_STATE; i++) {
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		s->x[i] = (float)(int32_t)(seed >> 32) * 0x1p-31f;
	}
}

static enum kind kind_of(uint32_t dtype)
{
	switch (dtype) {
	case WD_DTYPE_F32:
		return KIND_F32;
	case WD_DTYPE_BF16:
		return KIND_BF16;
	case WD_DTYPE_F16:
		return KIND_F16;
	default:
		return KIND_BYTES;
	}
}

unsigned int demo_element_bytes(uint32_t dtype)
{
	static const unsigned char bytes[] = { [KIND_F32] = 4, [KIND_BF16] = 2, [KIND_F16] = 2, [KIND_BYTES] = 1 };

	return bytes[kind_of(dtype)];
}

/* LANES elements at p as bits and as floats. */
static inline __attribute__((always_inline)) void load(enum kind kind, const unsigned char *p, vu *ret_bits, vf *ret)
{
	vh h;
	vb b;

	switch (kind) {
	case KIND_F32:
		memcpy(ret_bits, p, sizeof(*ret_bits));
		memcpy(ret, p, sizeof(*ret));
		return;
	case KIND_BF16: {
		memcpy(&h, p, sizeof(h));
		*ret_bits = __builtin_convertvector(h, vu);
		vu shifted = *ret_bits << 16;
		memcpy(ret, &shifted, sizeof(*ret));
		return;
	}
	case KIND_F16: {
		memcpy(&h, p, sizeof(h));
		*ret_bits = __builtin_convertvector(h, vu);
		/* The exponent is re-biased by a product, which is right for subnormals too; infinities become 2^16. */
		vu shifted = (*ret_bits & 0x8000u) << 16 | (*ret_bits & 0x7fffu) << 13;
		vf f;
		memcpy(&f, &shifted, sizeof(f));
		*ret = f * 0x1p112f;
		return;
	}
	case KIND_BYTES:
		memcpy(&b, p, sizeof(b));
		*ret_bits = __builtin_convertvector(b, vu);
		*ret = __builtin_convertvector((vi)*ret_bits - 128, vf) * 0x1p-7f;
		return;
	}
}

/* The product of n elements with x[0, n). */
static inline __attribute__((always_inline)) float dot(enum kind kind, unsigned int element, const unsigned char *p,
						       const float *x, size_t n, struct sums *sums)
{
	vf acc = { 0 }, w, v;
	vu bits, a = sums->a, b = sums->b;
	size_t i = 0;
	float sum = 0;

	for (; i + LANES <= n; i += LANES) {
		load(kind, p + i * element, &bits, &w);
		memcpy(&v, x + i, sizeof(v));
		acc += w * v;
		a += bits;
		b += a;
	}
	if (i < n) {
		unsigned char tail[LANES * 4] = { 0 };
		float tail_x[LANES] = { 0 };

		memcpy(tail, p + i * element, (n - i) * element);
		memcpy(tail_x, x + i, (n - i) * sizeof(float));
		load(kind, tail, &bits, &w);
		memcpy(&v, tail_x, sizeof(v));
		acc += w * v;
		a += bits;
		b += a;
	}
	sums->a = a;
	sums->b = b;
	for (i = 0; i < LANES; i++)
		sum += acc[i];
	return sum;
}

static inline __attribute__((always_inline)) void apply(enum kind kind, unsigned int element, struct demo_state *s,
							const unsigned char *p, uint64_t nr, uint64_t cols,
							struct sums *sums, _Atomic uint64_t *done)
{
	float z[DEMO_STATE] = { 0 };
	uint64_t told = 0;

	for (uint64_t row = 0, i = 0; i < nr; row++) {
		uint64_t end = nr - i < cols ? nr : i + cols;
		float y = 0;

		while (i < end) {
			size_t n = (size_t)MIN(end - i, (uint64_t)DEMO_STATE);

			y += dot(kind, element, p + i * element, s->x, n, sums);
			i += n;
			if ((i - told) * element >= MiB) {
				atomic_fetch_add_explicit(done, (i - told) * element, memory_order_relaxed);
				told = i;
			}
		}
		/* An infinity or a NaN among a user's weights would hide all others from here on. */
		if (isfinite(y))
			z[row % DEMO_STATE] += y / (1 + fabsf(y));
	}
	atomic_fetch_add_explicit(done, (nr - told) * element, memory_order_relaxed);
	for (size_t i = 0; i < DEMO_STATE; i++)
		s->x[i] = 0.5f * s->x[i] + z[i] / (1 + fabsf(z[i]));
}

void demo_apply(struct demo_state *s, const void *data, uint64_t nbytes, uint32_t dtype, uint64_t cols,
		uint32_t sum[DEMO_SUM_WORDS], _Atomic uint64_t *done)
{
	struct sums sums = { 0 };

	cols = MAX(cols, (uint64_t)1);
	switch (kind_of(dtype)) {
	case KIND_F32:
		apply(KIND_F32, 4, s, data, nbytes / 4, cols, &sums, done);
		break;
	case KIND_BF16:
		apply(KIND_BF16, 2, s, data, nbytes / 2, cols, &sums, done);
		break;
	case KIND_F16:
		apply(KIND_F16, 2, s, data, nbytes / 2, cols, &sums, done);
		break;
	case KIND_BYTES:
		apply(KIND_BYTES, 1, s, data, nbytes, cols, &sums, done);
		break;
	}
	memcpy(sum, &sums.a, sizeof(sums.a));
	memcpy(sum + LANES, &sums.b, sizeof(sums.b));
}
