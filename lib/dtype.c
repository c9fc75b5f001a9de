/* SPDX-License-Identifier: Apache-2.0 */
/* One table of the element types. Names are those of safetensors. */
#include <string.h>

#include "lib/dtype.h"
#include "lib/include/weightd.h"

static const struct {
	char name[12];
	uint32_t bits;
} dtypes[] = {
	[WD_DTYPE_BOOL] = { "BOOL", 8 },
	[WD_DTYPE_U8] = { "U8", 8 },
	[WD_DTYPE_I8] = { "I8", 8 },
	[WD_DTYPE_U16] = { "U16", 16 },
	[WD_DTYPE_I16] = { "I16", 16 },
	[WD_DTYPE_U32] = { "U32", 32 },
	[WD_DTYPE_I32] = { "I32", 32 },
	[WD_DTYPE_U64] = { "U64", 64 },
	[WD_DTYPE_I64] = { "I64", 64 },
	[WD_DTYPE_F16] = { "F16", 16 },
	[WD_DTYPE_BF16] = { "BF16", 16 },
	[WD_DTYPE_F32] = { "F32", 32 },
	[WD_DTYPE_F64] = { "F64", 64 },
	[WD_DTYPE_C64] = { "C64", 64 },
	[WD_DTYPE_F8_E4M3] = { "F8_E4M3", 8 },
	[WD_DTYPE_F8_E5M2] = { "F8_E5M2", 8 },
	[WD_DTYPE_F8_E8M0] = { "F8_E8M0", 8 },
	[WD_DTYPE_F8_E4M3FNUZ] = { "F8_E4M3FNUZ", 8 },
	[WD_DTYPE_F8_E5M2FNUZ] = { "F8_E5M2FNUZ", 8 },
	[WD_DTYPE_F6_E2M3] = { "F6_E2M3", 6 },
	[WD_DTYPE_F6_E3M2] = { "F6_E3M2", 6 },
	[WD_DTYPE_F4] = { "F4", 4 },
};

const char *wd_dtype_name(uint32_t dtype)
{
	return dtype > 0 && dtype < ARRAY_SIZE(dtypes) ? dtypes[dtype].name : "?";
}

uint32_t wd_dtype_bits(uint32_t dtype)
{
	return dtype < ARRAY_SIZE(dtypes) ? dtypes[dtype].bits : 0;
}

uint32_t dtype_from_name(const char *name)
{
	for (uint32_t i = 1; i < ARRAY_SIZE(dtypes); i++)
		if (strcmp(name, dtypes[i].name) == 0)
			return i;
	return 0;
}
