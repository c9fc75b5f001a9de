/* SPDX-License-Identifier: Apache-2.0 */
#include "ufd/policy.h"

static bool follows(const struct policy_stream *s, uint64_t at)
{
	return s->next && at >= s->mark && at <= s->next;
}

struct policy_run policy_read(struct policy_streams *streams, uint64_t at, uint64_t first, uint64_t last, uint64_t most)
{
	struct policy_stream *s = &streams->s[0];
	uint64_t start, window;

	most = MAX(most, (uint64_t)1);
	if (last - first < POLICY_WINDOW_MAX && last - first < most)
		return (struct policy_run){ first, last - first + 1, last + 1 };
	for (size_t i = 0; i < POLICY_STREAMS; i++) {
		if (follows(&streams->s[i], at)) {
			s = &streams->s[i];
			break;
		}
		if (streams->s[i].age < s->age)
			s = &streams->s[i];
	}
	if (follows(s, at)) {
		start = MAX(s->next, at);
		window = s->window * 2;
	} else {
		start = at;
		window = at == first ? POLICY_WINDOW_MAX / 2 : 4;
	}
	if (start > last)
		return (struct policy_run){ start, 0, start };
	window = MIN(MIN(window, (uint64_t)POLICY_WINDOW_MAX), MIN(most, last - start + 1));
	*s = (struct policy_stream){ .next = start + window, .window = window, .age = ++streams->clock };
	s->mark = s->next > last ? s->next : s->next - MAX(window / 4, (uint64_t)1);
	/* What was read last and left armed is opened with it: else each of its extents would be a fault, and look like a
	 * touch in the middle of nowhere. */
	at = MIN(at, start);
	return (struct policy_run){ at, start + window - at, s->mark };
}

uint64_t policy_excess(uint64_t resident, uint64_t need, uint64_t budget, uint64_t extent)
{
	uint64_t reserve = MIN(budget / 32, 64 * extent);

	if (resident + need <= budget)
		return 0;
	return MIN(resident, resident + need - budget + reserve);
}

uint64_t policy_armed_target(uint64_t nr_ready, uint64_t nr_to_free)
{
	/* Two at least beyond what goes now: one that is armed only when it goes had no chance. */
	return MIN(nr_ready, nr_ready / 8 + nr_to_free + 2);
}

uint64_t policy_budget(uint64_t resident, uint64_t room, uint64_t total)
{
	/* The program's own memory grows beside the weights; a reserve that is too small gets it OOM-killed, since
	 * arenas cannot be swapped. */
	uint64_t reserve = MAX(MIN(total / 8, 4 * GiB), MIN(64 * MiB, total / 4));

	return resident + room > reserve ? resident + room - reserve : 0;
}
