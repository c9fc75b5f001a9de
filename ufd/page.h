/* SPDX-License-Identifier: Apache-2.0 */
/* Sizes of pages and extents: asked for once, never written as numbers. */
#ifndef WD_UFD_PAGE_H
#define WD_UFD_PAGE_H

#include <stdint.h>

uint64_t page_bytes(void);
/* The unit of filling, observing and dropping: the huge page size if that is at most 2 MiB, else 2 MiB. */
uint64_t extent_bytes(void);

#endif
