/* SPDX-License-Identifier: Apache-2.0 */
/* Element types: numbers (WD_DTYPE_*), names and sizes. The two functions the other way round are in weightd.h. */
#ifndef WD_LIB_DTYPE_H
#define WD_LIB_DTYPE_H

#include "lib/base/base.h"

/* The WD_DTYPE_* of a name in safetensors ("BF16", exactly so); 0 if there is none. */
uint32_t dtype_from_name(const char *name);

#endif
