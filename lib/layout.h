/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where a checkpoint file's tensors lie in its arena, so that each is aligned to its element's size.
 * Pure functions: no files, no memory of tensors. Threads: any.
 */
#ifndef WD_LIB_LAYOUT_H
#define WD_LIB_LAYOUT_H

#include "lib/checkpoint.h"
#include "ufd/pager.h"

/* A shifted file's data, and every copy, begin at multiples of this: a cache line, and what vector loads like. */
#define LAYOUT_ALIGN 64u

/* Copies begin at a multiple of this behind the file's bytes: no extent (2 MiB at most) holds both what is read
 * straight from the file and what is put together from pieces of it. */
#define LAYOUT_COPIES_ALIGN (2 * MiB)

struct layout {
	struct view_layout view; /* owned here; one unit for each tensor with bytes */
	uint32_t *unit_tensor;   /* unit -> index in `tensors` */
};

/*
 * tensors: one file's, by file_offset, all of them inside of the file. The file itself is the first segment,
 * shifted if data_offset does not suit the tensors' largest alignment (or min_align, a power of two up to
 * LAYOUT_ALIGN). A tensor that is misaligned even so gets a copy; copies that lie side by side in the file share a
 * segment where that aligns them too.
 * O(nr). Return: 0; -ENOMEM.
 */
int layout_compute(uint64_t file_size, uint64_t data_offset, uint64_t min_align, const struct ckpt_tensor *tensors,
		   uint32_t nr, struct layout *ret);
void layout_done(struct layout *l);

/* Bytes that an address of this element type must be a multiple of. */
uint64_t layout_dtype_align(uint32_t dtype);

#endif
