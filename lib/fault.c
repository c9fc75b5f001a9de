/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Says why a touch of a tensor failed. Runs in signal handlers of any thread at any moment: no lock, no allocation,
 * no stdio, own formatting; errno is kept.
 *
 * What it looks at (view owners, models) may be closed by another thread meanwhile. `readers` counts who looks;
 * a closer takes its model out of the lists first and then waits until nobody does (fault_quiesce()). All signals
 * are blocked while one looks: a handler that jumped out of here would keep closers waiting for ever.
 *
 * The handlers stay for the life of the process. A fault that is none of ours (or in a wd with
 * WD_NO_SIGNAL_HANDLER) goes to the handler that was there before, with the mask and flags that it had asked for. A program
 * that installs its own handler later is first, and calls us if it chains. Installing again then would close a
 * circle, so we never do.
 */
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "lib/fault.h"
#include "lib/model.h"

static _Atomic unsigned int readers;

static pthread_mutex_t install_lock = PTHREAD_MUTEX_INITIALIZER;
static bool installed; /* install_lock */

void fault_quiesce(void)
{
	while (atomic_load(&readers))
		(void)sched_yield();
}

void fault_forked(void)
{
	atomic_store(&readers, 0);
	install_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

/*
 * ---- a line of text
 */
struct line {
	size_t used;
	char text[896];
};

/* One line of text that cannot steer a terminal: names come from files that anyone may have written. At most `most` bytes of
 * it. */
static void put(struct line *l, const char *text, size_t most)
{
	for (size_t i = 0; text[i] && i < most && l->used < sizeof(l->text) - 2; i++) {
		unsigned char c = (unsigned char)text[i];
		bool control = c < ' ' || c == 0x7F ||
			       (i && (unsigned char)text[i - 1] == 0xC2 && c >= 0x80 && c < 0xA0); /* C1, in UTF-8 */

		l->text[l->used++] = (char)(control ? '?' : c);
	}
	l->text[l->used] = '\0';
}

static void put_number(struct line *l, uint64_t n)
{
	char digits[24];
	size_t at = sizeof(digits);

	digits[--at] = '\0';
	do {
		digits[--at] = (char)('0' + n % 10);
		n /= 10;
	} while (n);
	put(l, digits + at, sizeof(digits));
}

static void put_cause(struct line *l, const struct fault_reason *r)
{
	const char *what;

	switch (r->code) {
	case FAULT_READ:
		what = r->error ? strerrordesc_np(-r->error) : NULL;
		put(l, "reading it failed: ", SIZE_MAX);
		put(l, what ? what : "unknown error", 80);
		put(l, "; check the storage, then open the file again", SIZE_MAX);
		return;
	case FAULT_CHANGED:
		put(l,
		    "the file changed since it was opened; open it again, and replace files by rename(2), not in place",
		    SIZE_MAX);
		return;
	case FAULT_SHRANK:
		put(l, "the file is shorter than when it was opened; restore it, then open it again", SIZE_MAX);
		return;
	case FAULT_NO_MEMORY:
		put(l,
		    "no memory for it, and nothing that could be dropped; raise the budget (wd_set_budget) or release models",
		    SIZE_MAX);
		return;
	case FAULT_FORBIDDEN:
		put(l, "strict mode: stage '", SIZE_MAX);
		put(l, r->stage ? r->stage : "?", 64);
		put(l, "' released it and the running stage does not list it; add the model to that stage in the plan",
		    SIZE_MAX);
		return;
	case FAULT_NONE:
		break;
	}
	put(l, "unknown cause", SIZE_MAX);
}

static void put_place(struct line *l, const struct fault_reason *r, const struct view_owner *o)
{
	const struct model_file *f = o ? atomic_load_explicit(&o->users, memory_order_acquire) : NULL;
	const struct tensor *t = NULL;

	if (!f) { /* closed meanwhile */
		put(l, "a model that is being closed: ", SIZE_MAX);
		return;
	}
	/* Several models may hold other pieces of one file. */
	for (const struct model_file *u = f; u && !t; u = atomic_load_explicit(&u->next_user, memory_order_acquire)) {
		t = model_file_tensor(u, r->off);
		if (t)
			f = u;
	}
	if (t) {
		put(l, "tensor '", SIZE_MAX);
		put(l, t->pub.name, 160);
		put(l, "' of ", SIZE_MAX);
	}
	put(l, "model '", SIZE_MAX);
	put(l, f->model->name, 120);
	put(l, "' (file ", SIZE_MAX);
	put(l, f->source->path, 256);
	if (t) {
		put(l, ", bytes ", SIZE_MAX);
		put_number(l, t->pub.file_offset);
		put(l, "..", SIZE_MAX);
		put_number(l, t->pub.file_offset + t->pub.nbytes - 1);
	}
	put(l, t ? "): " : ", outside of its tensors): ", SIZE_MAX);
}

/* Adds why touching this address fails. False: it does not, as far as we know. `quiet`: nor if its wd has
 * WD_NO_SIGNAL_HANDLER. All signals are blocked. */
static bool explain(struct line *l, const void *address, bool quiet)
{
	struct fault_reason r;
	bool known;

	(void)atomic_fetch_add(&readers, 1);
	known = pager_fault_reason(address, &r);
	if (known) {
		const struct view_owner *o = view_owner(r.view);

		if (quiet && o && o->wd->flags & WD_NO_SIGNAL_HANDLER) {
			known = false;
		} else {
			put_place(l, &r, o);
			put_cause(l, &r);
		}
	}
	(void)atomic_fetch_sub(&readers, 1);
	return known;
}

/*
 * ---- wd_fault_reason()
 *
 * Its results live in slots, one a thread that ever asked. No thread-local storage: in a library that was loaded
 * with dlopen(3) the first use of it allocates. Slots are never freed; one of a thread that has ended is used again.
 */
struct slot {
	_Atomic pid_t tid; /* 0: free */
	struct slot *next;
	struct line line;
};
static struct slot first_slot;
static struct slot *_Atomic slots = &first_slot;

static bool slot_take(struct slot *s, pid_t tid)
{
	pid_t owner = atomic_load(&s->tid);

	if (owner == tid)
		return true;
	if (owner && (syscall(SYS_tgkill, getpid(), owner, 0) == 0 || errno != ESRCH))
		return false;
	return atomic_compare_exchange_strong(&s->tid, &owner, tid);
}

static struct slot *slot_mine(void)
{
	pid_t tid = (pid_t)syscall(SYS_gettid);
	struct slot *s;

	for (s = atomic_load(&slots); s; s = s->next)
		if (atomic_load(&s->tid) == tid)
			return s;
	for (s = atomic_load(&slots); s; s = s->next)
		if (slot_take(s, tid))
			return s;
	s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (s == MAP_FAILED)
		return NULL;
	atomic_store(&s->tid, tid);
	s->next = atomic_load(&slots);
	while (!atomic_compare_exchange_weak(&slots, &s->next, s))
		;
	return s;
}

const char *wd_fault_reason(const void *address)
{
	const char *text = NULL;
	sigset_t all, mask;
	int saved = errno;
	struct slot *s;

	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &mask);
	s = slot_mine();
	if (s) {
		s->line.used = 0;
		if (explain(&s->line, address, false))
			text = s->line.text;
	} else {
		struct fault_reason r;

		if (pager_fault_reason(address, &r))
			text = "the touch fails, and there is no memory to say why";
	}
	(void)pthread_sigmask(SIG_SETMASK, &mask, NULL);
	errno = saved;
	return text;
}

/*
 * ---- the handler
 */
static const int handled[] = { SIGBUS, SIGSEGV };
static struct sigaction previous[ARRAY_SIZE(handled)];

static void say(const void *address)
{
	struct line l = { .used = 0 };
	size_t done = 0;

	put(&l, "weightd: ", SIZE_MAX);
	if (!explain(&l, address, true))
		return;
	l.text[l.used++] = '\n'; /* put() leaves room for it */
	while (done < l.used) {
		ssize_t n = write(STDERR_FILENO, l.text + done, l.used - done);

		if (n > 0)
			done += (size_t)n;
		else if (n == 0 || errno != EINTR)
			return;
	}
}

/* As if `before` had got the signal itself. */
static void chain(const struct sigaction *before, int sig, siginfo_t *info, ucontext_t *context, bool by_kernel)
{
	sigset_t mask = context->uc_sigmask;

	if (!(before->sa_flags & SA_SIGINFO) && before->sa_handler == SIG_IGN && !by_kernel)
		return;
	if (!(before->sa_flags & SA_SIGINFO) && (before->sa_handler == SIG_DFL || before->sa_handler == SIG_IGN)) {
		/* The kernel lets nobody ignore a fault. When we return, the instruction is tried again and ends the
		 * process as it would have without us: same signal, same address in the core file. */
		struct sigaction plain = { .sa_handler = SIG_DFL };

		(void)sigaction(sig, &plain, NULL);
		if (!by_kernel) /* nothing will be tried again */
			(void)raise(sig);
		return;
	}
	for (int s = 1; s < _NSIG; s++)
		if (sigismember(&before->sa_mask, s) == 1)
			(void)sigaddset(&mask, s);
	if (!(before->sa_flags & SA_NODEFER))
		(void)sigaddset(&mask, sig);
	(void)pthread_sigmask(SIG_SETMASK, &mask, NULL); /* our return puts back the one of the fault */
	if (before->sa_flags & SA_SIGINFO)
		before->sa_sigaction(sig, info, context);
	else
		before->sa_handler(sig);
}

static void on_fault(int sig, siginfo_t *info, void *context)
{
	bool by_kernel = info->si_code > 0;
	int saved = errno;

	if (by_kernel && pager_fault_retry(info->si_addr)) {
		errno = saved;
		return;
	}
	if (by_kernel)
		say(info->si_addr);
	errno = saved;
	for (size_t i = 0; i < ARRAY_SIZE(handled); i++)
		if (handled[i] == sig)
			chain(&previous[i], sig, info, context, by_kernel);
}

int fault_handler_install(struct wd_err *err)
{
	struct sigaction ours = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK };
	int r = 0;

	(void)sigfillset(&ours.sa_mask);
	(void)pthread_mutex_lock(&install_lock);
	for (size_t i = 0; !installed && r == 0 && i < ARRAY_SIZE(handled); i++)
		/* Known before ours can run. */
		if (sigaction(handled[i], NULL, &previous[i]) < 0 || sigaction(handled[i], &ours, NULL) < 0)
			r = err_set(err, -errno, "wd_connect: cannot install the handler of signal %d: %s", handled[i],
				    strerror(errno));
	installed |= r == 0;
	(void)pthread_mutex_unlock(&install_lock);
	return r;
}
