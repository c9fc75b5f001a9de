/* SPDX-License-Identifier: Apache-2.0 */
/* What the daemon tells `weightd ls` and `weightd stat`, as JSON. Threads: any. */
#ifndef WD_CLI_SERVE_REPORT_H
#define WD_CLI_SERVE_REPORT_H

#include <sys/types.h>

#include "cli/serve_session.h"

/* What `uid` may see. Owner of *ret: the caller (free). Return: 0; -ENOMEM. */
int report_ls(struct server *s, uid_t uid, char **ret);
int report_stat(struct server *s, char **ret);

#endif
