/*
 * A simulated CUDA driver: stands for libcuda.so.1 in tests, on machines without a GPU. functions.c has what a program
 * finds in it, script.c what a test does with it (by simulated_driver.py); this is what the parts share.
 *
 * Functions, types and status codes are those of cuda.h; "the documentation" is the CUDA driver API
 * (https://docs.nvidia.com/cuda/cuda-driver-api/), which cuda.h repeats in its comments.
 *
 * How it works. When work is put on a stream it is known at once when the work will start and end, because all that
 * was put there before has known ends and a kernel says how long it takes. So a stream is the time at which it is free,
 * and an event is the time at which its stream gets there: it is reached when the clock shows that time. The clock is
 * moved by the test (exact to the ns), or is CLOCK_MONOTONIC.
 *
 * One lock guards everything but the clock. The functions declared here expect it to be held, but for those of the
 * clock; functions.c and script.c take it. No handle is a pointer: a handle that is stale or invented is answered by an
 * error, never by a crash.
 */
#ifndef SIMULATED_DRIVER_H
#define SIMULATED_DRIVER_H

#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/types.h>

#include "cuda_types.h"

/* -------- clock.c: the time -------------------------------------------------------------------------------------- */

#define SCRIPTED_START_NS INT64_C(1000000000)

/* The end of a kernel that never ends. Far from INT64_MAX, so that adding to it overflows nothing. */
#define NEVER_NS (INT64_MAX / 4)

extern atomic_bool is_real_time;
extern _Atomic int64_t scripted_now_ns;
extern _Atomic int64_t clock_reading_ns;

int64_t simulated_now_ns(void);
int64_t monotonic_ns(void);
void sleep_until(int64_t time_ns);
int64_t later(int64_t left_ns, int64_t right_ns);
int64_t plus(int64_t start_ns, int64_t duration_ns);

/* -------- handles.c: what a handle stands for -------------------------------------------------------------------- */

enum handle_kind {
    CONTEXT_HANDLE = 1,
    STREAM_HANDLE,
    EVENT_HANDLE,
    GRAPH_HANDLE,
    NODE_HANDLE,
    EXEC_HANDLE,
    MODULE_HANDLE,
    OBJECT_HANDLE,
};

struct slot {
    void *object; /* NULL: free */
    uint64_t generation;
    uint64_t next_free;
};

/* The objects of one kind. */
struct table {
    enum handle_kind kind;
    struct slot *slots;
    uint64_t slot_count, capacity;
    uint64_t first_free; /* slot + 1; 0: none */
};

extern struct table streams, events, graphs, execs, modules, user_objects;

void *allocate(size_t count, size_t size);
void *resize(void *memory, size_t count, size_t size);
void *make_handle(enum handle_kind kind, uint64_t generation, uint64_t slot, uint64_t node);
enum handle_kind kind_of(const void *handle);
uint64_t generation_of(const void *handle);
uint64_t slot_of(const void *handle);
uint64_t node_of(const void *handle);
void *table_add(struct table *table, void *object);
void *table_get(const struct table *table, const void *handle);
void *table_remove(struct table *table, const void *handle);

/* Nodes of a graph, by their places in it: what the next node of a stream depends on, or what a node depends on. */
struct node_set {
    uint32_t *nodes;
    uint32_t count;
};

void node_set_add(struct node_set *set, uint32_t node);
void node_set_add_all(struct node_set *set, const struct node_set *more);
void node_set_clear(struct node_set *set);

/* -------- the objects -------------------------------------------------------------------------------------------- */

enum { REPLAY_KERNEL = 1, STAMP_KERNEL, KERNEL_COUNT = 2 };

/* A kernel of the native part, with its arguments. */
struct kernel {
    int number; /* 0: another kernel, which only takes time */
    uint64_t counter, memory;
    uint32_t mask;
};

struct module {
    bool has[KERNEL_COUNT];
};

/* What is told when the graphs that hold it are gone. */
struct user_object {
    void *data;
    CUhostFn destroy;
    unsigned int references;
};

struct object_list {
    struct user_object **objects;
    uint32_t count;
};

struct node {
    CUgraphNodeType type;
    int64_t duration_ns; /* of a kernel */
    struct kernel kernel;
    int priority;
    bool is_programmatic; /* it starts before what it depends on has ended: its edges have data */
    CUevent event;       /* that is recorded, or waited for */
    struct node_set dependencies;
    int64_t start_ns, end_ns; /* in the last launch */
};

struct graph {
    CUgraph handle;
    struct node *nodes;
    uint32_t node_count;
    struct object_list objects;
    bool is_being_captured;
};

struct exec {
    struct node *nodes;
    uint32_t node_count;
    struct object_list objects;
    int64_t free_at_ns; /* one launch runs at a time: the next one starts behind it */
};

struct thread;

/* Between cuStreamBeginCapture and cuStreamEndCapture. */
struct capture {
    uint64_t id;
    struct stream *origin;
    struct thread *thread;
    CUstreamCaptureMode mode;
    struct graph *graph;
    bool is_invalidated;
    struct capture *next;
};

struct stream {
    CUdevice device;
    bool is_built_in; /* not of cuStreamCreate, nor to be destroyed: a default stream, or of torch's pool */
    bool is_legacy;
    bool is_blocking; /* waits for the legacy stream, and has that wait for it */
    int64_t free_at_ns;
    int64_t lateness_ns; /* how long after the host has put work on the stream the work starts, at the earliest */
    struct capture *capture;
    bool is_programmatic;     /* kernels that are captured have programmatic edges, and the frontier edge data */
    struct node_set frontier; /* what the next captured node depends on */
    CUgraphNode *frontier_handles;
};

struct event {
    CUdevice device;
    unsigned int flags;
    bool is_recorded;
    int64_t reached_at_ns;
    uint64_t capture_id; /* in which it was recorded last; 0: in none */
    struct node_set frontier;
};

/* -------- state.c: the process, and what each call begins with --------------------------------------------------- */

/* The functions, by the names under which calls are counted. Another version of a function (cuEventElapsedTime_v2) or
 * its form for per-thread streams (cuEventRecord_ptsz) counts as the function. */
#define FUNCTIONS(X)                                                                                                   \
    X(cuInit)                                                                                                          \
    X(cuDriverGetVersion)                                                                                              \
    X(cuDeviceGet)                                                                                                     \
    X(cuDeviceGetCount)                                                                                                \
    X(cuDevicePrimaryCtxGetState)                                                                                      \
    X(cuDevicePrimaryCtxRetain)                                                                                        \
    X(cuDevicePrimaryCtxRelease)                                                                                       \
    X(cuCtxGetCurrent)                                                                                                 \
    X(cuCtxSetCurrent)                                                                                                 \
    X(cuCtxPushCurrent)                                                                                                \
    X(cuCtxPopCurrent)                                                                                                 \
    X(cuCtxGetDevice)                                                                                                  \
    X(cuCtxSynchronize)                                                                                                \
    X(cuStreamCreate)                                                                                                  \
    X(cuStreamCreateWithPriority)                                                                                      \
    X(cuStreamDestroy)                                                                                                 \
    X(cuStreamGetCtx)                                                                                                  \
    X(cuStreamQuery)                                                                                                   \
    X(cuStreamSynchronize)                                                                                             \
    X(cuStreamWaitEvent)                                                                                               \
    X(cuStreamIsCapturing)                                                                                             \
    X(cuStreamGetCaptureInfo)                                                                                          \
    X(cuStreamBeginCapture)                                                                                            \
    X(cuStreamEndCapture)                                                                                              \
    X(cuThreadExchangeStreamCaptureMode)                                                                               \
    X(cuEventCreate)                                                                                                   \
    X(cuEventDestroy)                                                                                                  \
    X(cuEventRecord)                                                                                                   \
    X(cuEventRecordWithFlags)                                                                                          \
    X(cuEventQuery)                                                                                                    \
    X(cuEventSynchronize)                                                                                              \
    X(cuEventElapsedTime)                                                                                              \
    X(cuGraphDestroy)                                                                                                  \
    X(cuGraphGetNodes)                                                                                                 \
    X(cuGraphNodeGetType)                                                                                              \
    X(cuGraphNodeGetDependencies)                                                                                      \
    X(cuGraphAddEventRecordNode)                                                                                       \
    X(cuGraphAddKernelNode)                                                                                            \
    X(cuGraphKernelNodeSetAttribute)                                                                                   \
    X(cuGraphRetainUserObject)                                                                                         \
    X(cuUserObjectCreate)                                                                                              \
    X(cuUserObjectRelease)                                                                                             \
    X(cuModuleLoadData)                                                                                                \
    X(cuModuleGetFunction)                                                                                             \
    X(cuMemAlloc)                                                                                                      \
    X(cuMemHostAlloc)                                                                                                  \
    X(cuMemHostGetDevicePointer)                                                                                       \
    X(cuMemsetD8Async)                                                                                                 \
    X(cuLaunchKernel)                                                                                                  \
    X(cuCtxGetStreamPriorityRange)                                                                                     \
    X(cuGraphInstantiate)                                                                                              \
    X(cuGraphExecDestroy)                                                                                              \
    X(cuGraphLaunch)

#define AS_MEMBER(name) FUNCTION_##name,
enum function { FUNCTIONS(AS_MEMBER) FUNCTION_COUNT };

#define MOST_DEVICES 16
#define DEEPEST_CONTEXT_STACK 32

struct device {
    bool is_in_use;         /* its primary context is active */
    CUstream legacy_stream; /* NULL before it is used first */
};

/* What the driver knows of a thread. Stays allocated when the thread ends: counts are asked for afterwards. */
struct thread {
    pid_t id;
    uint64_t epoch; /* of the driver's state, when this was used last */
    CUdevice contexts[DEEPEST_CONTEXT_STACK];
    int context_count;
    CUstreamCaptureMode capture_mode;
    CUstream own_streams[MOST_DEVICES]; /* CU_STREAM_PER_THREAD */
    int64_t calls[FUNCTION_COUNT];
    struct thread *next;
};

/* What a test has a function do. */
struct script {
    int64_t calls;
    CUresult status; /* returned from call number `fails_from` on; CUDA_SUCCESS: no failure */
    int64_t fails_from;
    bool is_held;  /* calls wait until they are released */
    bool is_fatal; /* a call aborts the process */
};

extern pthread_mutex_t lock;
extern pthread_cond_t released;
extern uint64_t epoch; /* grows when the state is reset */
extern bool is_initialized;
extern int device_count;
extern struct device devices[MOST_DEVICES];
extern CUresult device_failure; /* returned by everything from then on, as after an illegal address */
extern double drift_ppm;
extern struct script scripts[FUNCTION_COUNT];
extern const char *const function_names[FUNCTION_COUNT];
extern _Atomic int64_t call_costs_ns[FUNCTION_COUNT]; /* spent without the lock */
extern int held_calls;
extern struct thread *threads;
/* Shared with forked children, so that a test can read what they have asked for. */
extern _Atomic int64_t *calls_in_children;

struct thread *this_thread(void);
CUresult enter(enum function function);
CUresult leave(CUresult status);

/* Begins each function of the driver, which ends with `return leave(status)`. */
#define ENTER(name)                                                                                                    \
    do {                                                                                                               \
        CUresult refusal = enter(FUNCTION_##name);                                                                     \
        if (refusal != CUDA_SUCCESS)                                                                                   \
            return refusal;                                                                                            \
    } while (0)

/* -------- streams.c: contexts, streams and events ---------------------------------------------------------------- */

CUcontext context_of(CUdevice device);
CUresult current_device(CUdevice *device);
CUresult push_context(CUcontext context);
CUresult pop_context(CUcontext *context);
CUresult set_context(CUcontext context);

CUstream add_stream(CUdevice device, struct stream stream);
CUstream legacy_stream(CUdevice device);
CUresult find_stream(CUstream handle, struct stream **stream);
int64_t position_ns(const struct stream *stream);
void free_stream(CUstream handle);
CUresult wait_for_event(CUstream stream, CUevent event, unsigned int flags);
CUresult host_waits_until(int64_t time_ns);

CUresult record_event(CUevent event, CUstream stream, unsigned int flags);
CUresult query_event(CUevent event);
CUresult elapsed_time(float *milliseconds, CUevent start, CUevent end);
void set_reached(struct event *event, int64_t time_ns);
void free_event(CUevent handle);

/* -------- captures.c: captures and graphs ------------------------------------------------------------------------ */

extern struct capture *captures; /* the open ones */

CUresult begin_capture(CUstream stream, CUstreamCaptureMode mode);
CUresult end_capture(CUstream stream, CUgraph *result);
void close_capture(struct capture *capture);
CUresult capture_status(const struct stream *stream, CUstreamCaptureStatus *status);
CUresult capture_info(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                      const CUgraphNode **dependencies, const CUgraphEdgeData **edge_data, size_t *count);
CUresult refuse_unsafe_call(void);
CUresult check_usable(const struct stream *stream);
void capture_node(struct stream *stream, struct node node);
void capture_event(struct stream *stream, struct event *event);
CUresult join_capture(struct stream *stream, const struct event *event);
void invalidate_capture(uint64_t id);

struct graph *graph_of_node(CUgraphNode handle);
CUresult add_event_record_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                               CUevent event);
CUresult list_nodes(const struct graph *graph, const uint32_t *nodes, uint32_t count, CUgraphNode *list,
                    size_t *list_count);
void free_graph(struct graph *graph);
CUresult instantiate(CUgraphExec *exec, CUgraph graph);
CUresult launch_graph(CUgraphExec exec, CUstream stream);
void free_exec(CUgraphExec handle);
CUresult add_kernel_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                         const CUDA_KERNEL_NODE_PARAMS *params);
CUresult launch_kernel(CUfunction function, CUstream stream, void **arguments);

/* -------- kernels.c: modules, memory, kernels that write, user objects ------------------------------------------- */

extern uint64_t globaltimer_ahead_ns;
extern double globaltimer_ppm;
extern int64_t stamp_duration_ns; /* of the kernels of the native part */
extern int64_t launch_latency_ns; /* until one that is launched starts */
extern _Atomic int64_t next_effect_ns; /* when the next kernel will have written; NEVER_NS without any */
extern int driver_version;

CUresult load_module(CUmodule *module, const char *image);
CUresult find_function(CUfunction *function, CUmodule module, const char *name);
CUresult allocate_memory(uint64_t *address, size_t size, bool is_mapped);
uint64_t mapped_address(const void *memory);
CUresult set_memory(uint64_t address, int value, size_t size);
bool read_kernel(struct kernel *kernel, CUfunction function, void **arguments);
void run_kernel(const struct kernel *kernel, int64_t time_ns);
void show_effects(void);
void forget_effects(void);
CUresult create_user_object(CUuserObject *object, void *data, CUhostFn destroy, unsigned int references);
CUresult drop_user_object(CUuserObject object);
CUresult retain_user_object(CUgraph graph, CUuserObject object, bool moves);
void objects_add(struct object_list *list, struct user_object *object);
void objects_clear(struct object_list *list);

#endif
