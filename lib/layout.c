/* SPDX-License-Identifier: Apache-2.0 */
/* See layout.h. */
#include "lib/layout.h"
#include "lib/include/weightd.h"

uint64_t layout_dtype_align(uint32_t dtype)
{
	uint32_t bits = wd_dtype_bits(dtype);

	return bits <= 8 ? 1 : bits / 8; /* packed types smaller than a byte are read by bytes */
}

/* The arena offset of a copy of `t`: in the last segment if the file's bytes go on there and that aligns it, else in
 * a new one. */
static uint64_t copy_place(struct segment *segs, size_t *nr, const struct ckpt_tensor *t, uint64_t align,
			   uint64_t file_end)
{
	struct segment *last = &segs[*nr - 1];

	if (*nr > 1 && t->file_offset >= last->file_off && t->file_offset <= last->file_off + last->len) {
		uint64_t in = t->file_offset - last->file_off;

		if ((last->arena_off + in) % align == 0) {
			last->len = MAX(last->len, in + t->nbytes);
			return last->arena_off + in;
		}
	}
	segs[*nr] = (struct segment){
		.arena_off = *nr == 1 ? round_up(file_end, LAYOUT_COPIES_ALIGN) :
					round_up(last->arena_off + last->len, LAYOUT_ALIGN),
		.file_off = t->file_offset,
		.len = t->nbytes,
	};
	return segs[(*nr)++].arena_off;
}

int layout_compute(uint64_t file_size, uint64_t data_offset, uint64_t min_align, const struct ckpt_tensor *tensors,
		   uint32_t nr, struct layout *ret)
{
	uint64_t align = min_align, shift = 0;
	size_t nr_segs = 1, nr_copied = 0, at = 0;
	struct segment *segs;
	struct unit *units;
	uint32_t *unit_tensor;

	for (uint32_t i = 0; i < nr; i++)
		if (tensors[i].nbytes)
			align = MAX(align, layout_dtype_align(tensors[i].dtype));
	if (data_offset % align)
		shift = LAYOUT_ALIGN - data_offset % LAYOUT_ALIGN;

	for (uint32_t i = 0; i < nr; i++)
		if (tensors[i].nbytes && (shift + tensors[i].file_offset) % layout_dtype_align(tensors[i].dtype))
			nr_copied++;
	segs = calloc(nr_copied + 1, sizeof(*segs));
	units = calloc((size_t)nr + 1, sizeof(*units));
	unit_tensor = calloc((size_t)nr + 1, sizeof(*unit_tensor));
	if (!segs || !units || !unit_tensor) {
		free(segs);
		free(units);
		free(unit_tensor);
		return -ENOMEM;
	}
	segs[0] = (struct segment){ .arena_off = shift, .file_off = 0, .len = file_size };

	/* Units must be sorted: first those in the file's own segment, then the copies behind it. */
	for (uint32_t i = 0; i < nr; i++) {
		uint64_t off = shift + tensors[i].file_offset;

		if (tensors[i].nbytes == 0 || off % layout_dtype_align(tensors[i].dtype))
			continue;
		units[at] = (struct unit){ off, tensors[i].nbytes };
		unit_tensor[at++] = i;
	}
	for (uint32_t i = 0; nr_copied && i < nr; i++) {
		uint64_t elem = layout_dtype_align(tensors[i].dtype);

		if (tensors[i].nbytes == 0 || (shift + tensors[i].file_offset) % elem == 0)
			continue;
		units[at] = (struct unit){ copy_place(segs, &nr_segs, &tensors[i], elem, shift + file_size),
					   tensors[i].nbytes };
		unit_tensor[at++] = i;
	}
	ret->view = (struct view_layout){ segs, nr_segs, units, at };
	ret->unit_tensor = unit_tensor;
	return 0;
}

void layout_done(struct layout *l)
{
	free((void *)l->view.segs);
	free((void *)l->view.units);
	free(l->unit_tensor);
	*l = (struct layout){ 0 };
}
