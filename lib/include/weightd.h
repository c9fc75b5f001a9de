/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weightd: memory for model weights.
 *
 * A checkpoint file is opened (only its headers are read), its tensors get addresses at once, and the
 * first touch of a tensor's data reads that tensor. Stage marks tell which models a phase of a
 * pipeline uses; what it does not use leaves memory and comes back on the next touch.
 *
 * What holds for every function here
 *   Return   int functions give 0 (or a count) or a negative errno; wd_error() then has one line
 *            that says what failed, where, why and what to do. Pointer functions give NULL.
 *   Results  go to the last arguments and are written only on success.
 *   Threads  Every function may be called from every thread, except that a handle must not be used
 *            by one thread while another one closes or frees it. No function may be called from a
 *            signal handler, save wd_fault_reason(). Signals are blocked for moments inside.
 *   Touching Reading or writing a tensor's data needs no call and no lock. A first touch may sleep
 *            until the bytes have been read. A write stays in this process: the page becomes a
 *            private copy (counted as written), is never dropped and never reaches the file.
 *            A touch of bytes that cannot be read (read error, the file was truncated or changed
 *            since it was opened), or that strict mode forbids, raises SIGBUS (SIGSEGV for what
 *            strict mode forbids in WD_WAY_MMAP); system calls on such memory give EFAULT. A page
 *            that was answered so stays so until wd_populate() has read its tensor (strict mode:
 *            until a stage lists it).
 *   fork     A child made by fork(2) keeps all tensors, also if the parent ends. A daemon serves it
 *            like its parent; otherwise a struct wd behaves in it as one of WD_WAY_MMAP, and of a
 *            file whose data begins misaligned it gets copies, read during the fork. If another
 *            thread was inside of a call here at that moment, the child's calls give
 *            -ENOTRECOVERABLE (tensors stay good). A child made by a raw clone(2) is served by a
 *            daemon that may ask for fork events (CAP_SYS_PTRACE); without one only while its parent
 *            lives and keeps the model open, only if the parent is privileged so, and up to 1,000
 *            of them. vfork(2), posix_spawn(3) and exec(2) need nothing.
 *   Layout   Structs with a leading `size` are set up by the caller: .size = sizeof(the struct).
 *
 * weightd(3) says the same at more length; weightd-stages(7) is about stages and plans.
 */
#ifndef WEIGHTD_H
#define WEIGHTD_H

#include <stddef.h>
#include <stdint.h>

#define WD_VERSION_MAJOR 0
#define WD_VERSION_MINOR 1
#define WD_VERSION_PATCH 0
#define WD_VERSION "0.1.0"

#if defined(__GNUC__)
#define WD_API __attribute__((visibility("default")))
#define WD_MUST_USE __attribute__((warn_unused_result))
#else
#define WD_API
#define WD_MUST_USE
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct wd;       /* one pager with its budget, its models and its current stage */
struct wd_model; /* the tensors of one checkpoint (file, sharded set or folder) */
struct wd_plan;  /* which models each stage uses */
struct wd_job;   /* a populate that is under way */

/* The version of the library that is running: "0.1.0". WD_VERSION is the one compiled against.
 * Owner: static. */
WD_API const char *wd_version(void);

/* The text of this thread's last failed call: one line without a newline; "" if none failed yet.
 * Owner: the library; valid until this thread's next call. */
WD_API const char *wd_error(void);

/*
 * ------------------------------------------------------------------ ways to run
 * Chosen by wd_connect(), best first; `weightd doctor` says which one a machine gives, and why.
 * The bytes are the same in all of them.
 */
#define WD_WAY_AUTO 0u
#define WD_WAY_DAEMON 1u   /* the weightd daemon has the memory: one copy for all processes of the node */
#define WD_WAY_EMBEDDED 2u /* a pager thread in this process, userfaultfd with kernel faults */
#define WD_WAY_USER 3u     /* same, user-mode faults only: populate before system calls; drops only at stage marks */
#define WD_WAY_MMAP 4u     /* no userfaultfd: the files are mapped; dropping is advice to the kernel */

#define WD_STRICT 1u /* touching a model that the plan's current stage does not list is an error */
#define WD_NO_SIGNAL_HANDLER \
	2u /* do not install the handler that prints why a touch failed (with vm.overcommit_memory=2 it also
				 * makes weights writable on the first write: without it they are read-only there) */
#define WD_AUTOSTART 4u /* no daemon answers: start this user's own, which leaves 10 minutes after its last client */

struct wd_options {
	size_t size;           /* sizeof(struct wd_options) */
	uint32_t way;          /* WD_WAY_*; AUTO obeys WEIGHTD_MODE (names of ways), else takes the best */
	uint32_t flags;        /* WD_STRICT, WD_NO_SIGNAL_HANDLER, WD_AUTOSTART */
	uint64_t budget_bytes; /* most bytes of weights in memory at once; 0: what memory and cgroup limits leave,
				* looked at again while weights are read. The daemon has one of its own for all */
	const char *socket;    /* the daemon's; NULL: WEIGHTD_SOCKET, else the system's, else this user's */
};

/*
 * Connects to the daemon, or starts a pager in this process. `options` may be NULL (all zero). The signal handler
 * (SIGBUS, and SIGSEGV where it is needed) is installed once in a process, chains to the handler that was there before, and
 * touches nothing but faults inside of tensors.
 * Owner: the caller; wd_disconnect() ends it. Several may exist in a process.
 * Blocks: no I/O; at most some seconds for a daemon that does not answer. Starts threads (all signals blocked in them).
 * Return: 0; -EINVAL bad option; -EOPNOTSUPP the way that was asked for does not exist here (the text
 *   says what is missing); of WD_WAY_DAEMON: -ENOENT, -ECONNREFUSED no daemon answers, -EACCES its socket belongs to
 *   somebody else (the text names it), -EPROTONOSUPPORT it has another version; -ENOMEM, -EMFILE.
 */
WD_API WD_MUST_USE int wd_connect(const struct wd_options *options, struct wd **ret);

/* Gives up the caller's hold on `wd` (may be NULL). Models that are still open keep working; the pager
 * ends with the last of them. */
WD_API void wd_disconnect(struct wd *wd);

/* The way that runs: WD_WAY_DAEMON, _EMBEDDED, _USER or _MMAP. */
WD_API uint32_t wd_way(const struct wd *wd);

/* "embedded", "user", "mmap", "daemon", "auto"; "?" for other numbers. Owner: static. */
WD_API const char *wd_way_name(uint32_t way);

/* Changes the budget; 0 makes it automatic again. A smaller one is reached by dropping, soon after
 * the call; pinned models and written pages may stand above it.
 * Return: 0; -EOPNOTSUPP in WD_WAY_MMAP (the kernel's page cache has no budget of ours); -EPERM in WD_WAY_DAEMON (it has
 * one for all, which `weightd serve` sets). */
WD_API int wd_set_budget(struct wd *wd, uint64_t budget_bytes);

/*
 * ------------------------------------------------------------------ tensors
 */
#define WD_DTYPE_BOOL 1u
#define WD_DTYPE_U8 2u
#define WD_DTYPE_I8 3u
#define WD_DTYPE_U16 4u
#define WD_DTYPE_I16 5u
#define WD_DTYPE_U32 6u
#define WD_DTYPE_I32 7u
#define WD_DTYPE_U64 8u
#define WD_DTYPE_I64 9u
#define WD_DTYPE_F16 10u
#define WD_DTYPE_BF16 11u
#define WD_DTYPE_F32 12u
#define WD_DTYPE_F64 13u
#define WD_DTYPE_C64 14u /* two F32 */
#define WD_DTYPE_F8_E4M3 15u
#define WD_DTYPE_F8_E5M2 16u
#define WD_DTYPE_F8_E8M0 17u
#define WD_DTYPE_F8_E4M3FNUZ 18u
#define WD_DTYPE_F8_E5M2FNUZ 19u
#define WD_DTYPE_F6_E2M3 20u /* 6 bits an element, packed */
#define WD_DTYPE_F6_E3M2 21u
#define WD_DTYPE_F4 22u /* 4 bits an element, packed */

WD_API const char *wd_dtype_name(uint32_t dtype); /* the name in safetensors; "?" if unknown. Owner: static */
WD_API uint32_t wd_dtype_bits(uint32_t dtype);    /* bits an element; 0 if unknown */

struct wd_tensor {
	size_t size;            /* of this struct, set by the library */
	const char *name;       /* UTF-8; in a pipeline "component/name" */
	void *data;             /* nbytes of it, aligned to the element's size; NULL only if nbytes is 0 */
	const int64_t *shape;   /* ndim elements, slowest dimension first */
	const int64_t *strides; /* ndim elements, in elements (not bytes); C order */
	uint64_t nbytes;        /* bytes of data */
	uint32_t dtype;         /* WD_DTYPE_* */
	uint32_t ndim;          /* 0: a scalar */
	const char *file;       /* the file that holds the bytes */
	uint64_t file_offset;   /* where they begin in it, in bytes */
};

/*
 * ------------------------------------------------------------------ models
 */
#define WD_MODEL_TRAILING \
	1u /* accept bytes after a safetensors file's data (refused otherwise, as the reference does) */

struct wd_model_options {
	size_t size;         /* sizeof(struct wd_model_options) */
	const char *name;    /* for plans and messages; NULL: the file's or folder's name without extension */
	const char *variant; /* which of several weight sets in a folder, e.g. "fp16"; NULL: the default one */
	uint32_t flags;      /* WD_MODEL_TRAILING */
};

/*
 * Opens a checkpoint: a .safetensors file, a sharded set's index .json, or a folder that holds one of these
 * (a model's snapshot; a pipeline with model_index.json, whose components become parts). What a file is,
 * its content decides, not its name. Reads headers only. `options` may be NULL.
 * Owner: the caller; wd_model_close(). Keeps `wd` alive.
 * Blocks: reads headers.
 * Return: 0; -EBADMSG the file is damaged or no checkpoint (the text says what and at which byte);
 *   -EOPNOTSUPP a format that this version cannot read; -EEXIST a model of that name is open from another
 *   file; -ENOTUNIQ the folder has several candidates (listed); -ENOENT, -EACCES, -ELOOP, -EISDIR, -EMFILE,
 *   -ENOMEM from the system.
 */
WD_API WD_MUST_USE int wd_model_open(struct wd *wd, const char *path, const struct wd_model_options *options,
				     struct wd_model **ret);

/*
 * Pages a raw range of any regular file: one tensor named "data", dtype U8, shape [nbytes].
 * `offset` and `nbytes` in bytes; nbytes 0 means up to the end of the file. Its address is aligned to 64.
 * Return: as wd_model_open(); -ERANGE the range does not lie in the file.
 */
WD_API WD_MUST_USE int wd_model_open_raw(struct wd *wd, const char *path, uint64_t offset, uint64_t nbytes,
					 const struct wd_model_options *options, struct wd_model **ret);

/* One more reference; returns `model`. */
WD_API struct wd_model *wd_model_ref(struct wd_model *model);

/* Gives up a reference (NULL is fine). With the last one, all memory of the model's tensors is unmapped and
 * its descriptors are closed. Parts of a pipeline go with the pipeline. */
WD_API void wd_model_close(struct wd_model *model);

WD_API const char *wd_model_name(const struct wd_model *model); /* Owner: the model */
WD_API const char *wd_model_path(const struct wd_model *model); /* as given to open. Owner: the model */

/* The tensor of that name, or NULL (wd_error() says so; a name that the file lacks is never invented).
 * O(1). Owner: the model, valid until it is closed; so are all pointers in it. */
WD_API const struct wd_tensor *wd_model_tensor(const struct wd_model *model, const char *name);

/* Tensors by number, 0 <= i < nr, in the order of their bytes in the files; NULL beyond. O(1). */
WD_API size_t wd_model_nr_tensors(const struct wd_model *model);
WD_API const struct wd_tensor *wd_model_tensor_at(const struct wd_model *model, size_t i);

/* Another name for a tensor (tied weights): same address, no memory.
 * Return: 0; -ENOENT no tensor `target`; -EEXIST `alias` is taken. */
WD_API int wd_model_alias(struct wd_model *model, const char *alias, const char *target);

/* Text metadata of the header (safetensors' __metadata__), of all files together. NULL if absent. */
WD_API size_t wd_model_nr_metadata(const struct wd_model *model);
WD_API int wd_model_metadata_at(const struct wd_model *model, size_t i, const char **ret_key, const char **ret_value);
WD_API const char *wd_model_metadata(const struct wd_model *model, const char *key);

/* The files behind a model (shards in the order of the index). NULL beyond. Owner: the model. */
WD_API size_t wd_model_nr_files(const struct wd_model *model);
WD_API const char *wd_model_file_at(const struct wd_model *model, size_t i);

/* The components of a pipeline, each a model of its own, named "pipeline/component"; 0 for others.
 * Owner: the pipeline (wd_model_ref() one to keep it longer). */
WD_API size_t wd_model_nr_parts(const struct wd_model *model);
WD_API struct wd_model *wd_model_part_at(const struct wd_model *model, size_t i);

/*
 * Gives memory back now: all of the model, or one tensor of it (the extents that no other tensor in use
 * shares). Addresses stay; the next touch reads the bytes again. Written pages stay.
 * Blocks: no; wd_sync() waits for what was started.
 * Return: 0; -EBUSY never: what cannot be dropped at once is tried again for a while.
 */
WD_API int wd_model_release(struct wd_model *model);
WD_API int wd_tensor_release(struct wd_model *model, const struct wd_tensor *tensor);

/* Waits until every drop that was asked for before has ended (dropped, or given up). Return: 0. */
WD_API int wd_sync(struct wd *wd);

/* Keeps a model's memory whatever stage runs and however full the budget is; false undoes it. */
WD_API int wd_model_pin(struct wd_model *model, int pinned);

/*
 * Reads bytes of a tensor, as the file has them (not what this process wrote), into the caller's buffer.
 * Pages nothing. `offset` and `nbytes` in bytes of the tensor.
 * Blocks: on the file.
 * Return: 0 when all were read; -ERANGE outside of the tensor; -ESTALE the file changed since it was opened;
 *   -EIO and others from the read.
 */
WD_API WD_MUST_USE int wd_tensor_read(struct wd_model *model, const struct wd_tensor *tensor, uint64_t offset,
				      void *buffer, size_t nbytes);

/*
 * ------------------------------------------------------------------ populate
 */
struct wd_progress {
	size_t size;          /* sizeof(struct wd_progress) */
	uint64_t total_bytes; /* to be in memory at the end, whole extents */
	uint64_t done_bytes;  /* in memory, or given up */
	int state;            /* 0 under way, 1 done, or a negative errno: the first failure (-ECANCELED) */
};

/*
 * Reads ahead, in the background: one tensor, or with tensor NULL the whole model. Touches of other
 * tensors go first. A touch of a populated tensor never waits and is fit for system calls in every way.
 * Stops with -ENOSPC where the budget is full of what must stay.
 * Owner: the caller; wd_job_free().
 * Blocks: no.
 */
WD_API WD_MUST_USE int wd_populate(struct wd_model *model, const struct wd_tensor *tensor, struct wd_job **ret);

/* A descriptor that becomes readable when the job ends, for poll(2). Owner: the job; do not read or close it. */
WD_API int wd_job_fd(const struct wd_job *job);
WD_API int wd_job_progress(const struct wd_job *job, struct wd_progress *ret);
/* Waits at most timeout_ms (-1: for ever). Return: 0 done; -ETIMEDOUT; else the job's failure. */
WD_API int wd_job_wait(struct wd_job *job, int timeout_ms);
/* Asks it to stop: it ends soon with -ECANCELED unless it had ended. What was read stays. */
WD_API void wd_job_cancel(struct wd_job *job);
/* Cancels it if need be; NULL is fine. */
WD_API void wd_job_free(struct wd_job *job);

/*
 * ------------------------------------------------------------------ stages and plans
 * A plan lists the models of each stage, by the models' names; "pipeline" stands for all of its parts,
 * "component" for "pipeline/component" where that is the only one.
 */
WD_API WD_MUST_USE int wd_plan_new(struct wd_plan **ret);
/* Adds a model to a stage; a stage with model NULL uses none. Order of the first mention is kept. */
WD_API int wd_plan_add(struct wd_plan *plan, const char *stage, const char *model);
WD_API int wd_plan_pin(struct wd_plan *plan, const char *model);
/* Reads a plan file, weightd-plan(5): {"weightd_plan": 1, "stages": [{"name": "encode", "models": ["clip"]}], "pinned": []}.
 * Return: 0; -EBADMSG with line and reason. */
WD_API WD_MUST_USE int wd_plan_load(const char *path, struct wd_plan **ret);
WD_API void wd_plan_free(struct wd_plan *plan);
/* Uses a copy of `plan` from the next stage mark on; NULL: none any more. Pins take effect at once. */
WD_API int wd_set_plan(struct wd *wd, const struct wd_plan *plan);

/*
 * Begins a stage; one that runs is ended first. With a plan: what the stage does not list is dropped (pinned
 * models stay), then its models are read ahead in the background as far as the budget allows. Without one:
 * what the stage before did not touch is dropped. Names may repeat.
 * Blocks: until the drop has ended, at most 200 ms.
 * Return: 0; -ENOENT the plan lacks this stage, or names a model that is not open (the text lists the known
 *   names): then nothing has changed.
 */
WD_API WD_MUST_USE int wd_stage_begin(struct wd *wd, const char *name);
/* Ends it. With a plan nothing is dropped and nothing forbidden until the next beginning; without one, what the stage
 * did not touch is dropped. Return: 0; -ESRCH none runs. */
WD_API int wd_stage_end(struct wd *wd);
/* The running stage's name, or NULL. Owner: the library, valid until the next stage mark. */
WD_API const char *wd_stage_name(const struct wd *wd);

/*
 * ------------------------------------------------------------------ what happened
 * All counts are since wd_connect() or wd_model_open().
 */
struct wd_stats {
	size_t size;             /* sizeof(struct wd_stats) */
	uint64_t budget_bytes;   /* in force now; UINT64_MAX in WD_WAY_MMAP */
	uint64_t resident_bytes; /* weights in memory, shared by all views of a file: the arenas */
	uint64_t peak_bytes;     /* highest resident_bytes */
	uint64_t huge_bytes;     /* of resident_bytes, on huge pages */
	uint64_t written_bytes;  /* private copies that this process made by writing */
	uint64_t read_bytes;     /* read from files */
	uint64_t reads;          /* in how many reads */
	uint64_t faults;         /* touches that called the pager */
	uint64_t dropped_bytes;  /* given back */
	uint64_t reloads;        /* models that were read again after having been dropped */
	uint64_t reload_bytes;   /* bytes that were read more than once */
	uint64_t failed;         /* touches that were answered with an error */
};
/* In WD_WAY_MMAP the page cache does the work: only sizes in memory are known, the rest is 0. */
WD_API int wd_stats(struct wd *wd, struct wd_stats *ret);
WD_API int wd_model_stats(struct wd_model *model, struct wd_stats *ret);

/*
 * Why a touch of this address fails, as one line; NULL where it does not (or where the address is no
 * tensor's). Async-signal-safe.
 * Owner: the library; valid until this thread's next call of it.
 */
WD_API const char *wd_fault_reason(const void *address);

#ifdef __cplusplus
}
#endif

#endif
