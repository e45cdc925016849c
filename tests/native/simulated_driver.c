/*
 * A simulated CUDA driver: stands for libcuda.so.1 in tests, on machines without a GPU.
 *
 * Functions, types and status codes are those of cuda.h; "the documentation" below is the CUDA driver API
 * (https://docs.nvidia.com/cuda/cuda-driver-api/), which cuda.h repeats in its comments. Functions that begin with
 * `simulated_` are for the tests: they say what the device does, and read what was asked of it.
 *
 * How it works. When work is put on a stream it is known at once when the work will start and end, because all that
 * was put there before has known ends and a kernel says how long it takes. So a stream is the time at which it is free,
 * and an event is the time at which its stream gets there: it is reached when the clock shows that time. The clock is
 * moved by the test (exact to the ns), or is CLOCK_MONOTONIC.
 *
 * One lock guards everything but the clock. No handle is a pointer: a handle that is stale or invented is answered by
 * an error, never by a crash.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* -------- what cuda.h declares -------------------------------------------------------------------------------- */

typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphNode_st *CUgraphNode;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUgraphEdgeData_st CUgraphEdgeData;
typedef uint64_t cuuint64_t;

typedef enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_TIMEOUT = 702,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_MERGE = 902,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED = 904,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_UNKNOWN = 999,
} CUresult;

typedef enum {
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2,
} CUstreamCaptureStatus;

typedef enum {
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
} CUstreamCaptureMode;

typedef enum {
    CU_GRAPH_NODE_TYPE_KERNEL = 0,
    CU_GRAPH_NODE_TYPE_WAIT_EVENT = 6,
    CU_GRAPH_NODE_TYPE_EVENT_RECORD = 7,
} CUgraphNodeType;

#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)
#define CU_STREAM_NON_BLOCKING 0x1u
#define CU_EVENT_DISABLE_TIMING 0x2u
#define CU_EVENT_RECORD_EXTERNAL 0x1u
#define CU_EVENT_WAIT_EXTERNAL 0x1u

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
    X(cuGraphInstantiate)                                                                                              \
    X(cuGraphExecDestroy)                                                                                              \
    X(cuGraphLaunch)

#define AS_MEMBER(name) FUNCTION_##name,
#define AS_TEXT(name) #name,
enum function { FUNCTIONS(AS_MEMBER) FUNCTION_COUNT };
static const char *const function_names[FUNCTION_COUNT] = {FUNCTIONS(AS_TEXT)};

/* -------- the clock ------------------------------------------------------------------------------------------- */

#define SCRIPTED_START_NS INT64_C(1000000000)

/* The end of a kernel that never ends. Far from INT64_MAX, so that adding to it overflows nothing. */
#define NEVER_NS (INT64_MAX / 4)

/* Read without the lock: the clock must cost no more than the real one, and answer while a call is held. */
static atomic_bool is_real_time;
static _Atomic int64_t scripted_now_ns = SCRIPTED_START_NS;
static _Atomic int64_t clock_reading_ns;

static int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* The time, at no cost: what the device sees. */
int64_t simulated_now_ns(void)
{
    return is_real_time ? monotonic_ns() : scripted_now_ns;
}

/* The time as the host reads it: with scripted time, a reading can take time (simulated_set_reading_ns). */
int64_t simulated_host_ns(void)
{
    if (is_real_time)
        return monotonic_ns();
    int64_t reading_ns = clock_reading_ns;
    return reading_ns == 0 ? scripted_now_ns : atomic_fetch_add(&scripted_now_ns, reading_ns) + reading_ns;
}

void simulated_set_reading_ns(int64_t duration_ns)
{
    clock_reading_ns = duration_ns;
}

int64_t simulated_reading_ns(void)
{
    return clock_reading_ns;
}

void simulated_advance(int64_t duration_ns)
{
    scripted_now_ns += duration_ns;
}

void simulated_set_now_ns(int64_t time_ns)
{
    scripted_now_ns = time_ns;
}

/* Let the time be CLOCK_MONOTONIC (true), or stand until the test moves it (false). */
void simulated_use_real_time(bool is_real)
{
    is_real_time = is_real;
}

static void sleep_until(int64_t time_ns)
{
    struct timespec until = {time_ns / 1000000000, time_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
        ;
}

static int64_t later(int64_t left_ns, int64_t right_ns)
{
    return left_ns > right_ns ? left_ns : right_ns;
}

static int64_t plus(int64_t start_ns, int64_t duration_ns)
{
    return duration_ns >= NEVER_NS || start_ns >= NEVER_NS - duration_ns ? NEVER_NS : start_ns + duration_ns;
}

/* -------- handles and objects --------------------------------------------------------------------------------- */

static void *allocate(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (memory == NULL)
        abort();
    return memory;
}

static void *resize(void *memory, size_t count, size_t size)
{
    memory = realloc(memory, (count ? count : 1) * size);
    if (memory == NULL)
        abort();
    return memory;
}

enum handle_kind { CONTEXT_HANDLE = 1, STREAM_HANDLE, EVENT_HANDLE, GRAPH_HANDLE, NODE_HANDLE, EXEC_HANDLE };

/* From the top: 4 bits kind, 20 generation, 20 slot, 20 node. The generation of a slot grows when its object goes, so
 * that the handle of one that is gone is not taken for that of the next one. */
#define PART_BITS 20
#define PART_MASK ((UINT64_C(1) << PART_BITS) - 1)

static void *make_handle(enum handle_kind kind, uint64_t generation, uint64_t slot, uint64_t node)
{
    return (void *)(uintptr_t)((uint64_t)kind << 60 | (generation & PART_MASK) << 40 | slot << PART_BITS | node);
}

static enum handle_kind kind_of(const void *handle)
{
    return (enum handle_kind)((uint64_t)(uintptr_t)handle >> 60);
}

static uint64_t generation_of(const void *handle)
{
    return (uint64_t)(uintptr_t)handle >> 40 & PART_MASK;
}

static uint64_t slot_of(const void *handle)
{
    return (uint64_t)(uintptr_t)handle >> PART_BITS & PART_MASK;
}

static uint64_t node_of(const void *handle)
{
    return (uint64_t)(uintptr_t)handle & PART_MASK;
}

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

static struct table streams = {.kind = STREAM_HANDLE};
static struct table events = {.kind = EVENT_HANDLE};
static struct table graphs = {.kind = GRAPH_HANDLE};
static struct table execs = {.kind = EXEC_HANDLE};

/* Returns the handle. */
static void *table_add(struct table *table, void *object)
{
    uint64_t slot;
    if (table->first_free != 0) {
        slot = table->first_free - 1;
        table->first_free = table->slots[slot].next_free;
    } else {
        if (table->slot_count == table->capacity) {
            table->capacity = table->capacity ? 2 * table->capacity : 64;
            table->slots = resize(table->slots, table->capacity, sizeof(struct slot));
        }
        slot = table->slot_count++;
        if (slot > PART_MASK)
            abort(); /* a million objects: some test leaks them */
        table->slots[slot].generation = 1;
    }
    table->slots[slot].object = object;
    return make_handle(table->kind, table->slots[slot].generation, slot, 0);
}

static struct slot *table_slot(const struct table *table, const void *handle)
{
    uint64_t slot = slot_of(handle);
    if (kind_of(handle) != table->kind || slot >= table->slot_count)
        return NULL;
    struct slot *found = &table->slots[slot];
    return found->object != NULL && (found->generation & PART_MASK) == generation_of(handle) ? found : NULL;
}

/* NULL if there is no such object (any more). */
static void *table_get(const struct table *table, const void *handle)
{
    struct slot *slot = table_slot(table, handle);
    return slot != NULL ? slot->object : NULL;
}

static void *table_remove(struct table *table, const void *handle)
{
    struct slot *slot = table_slot(table, handle);
    if (slot == NULL)
        return NULL;
    void *object = slot->object;
    slot->object = NULL;
    slot->generation++;
    slot->next_free = table->first_free;
    table->first_free = (uint64_t)(slot - table->slots) + 1;
    return object;
}

/* Nodes of a graph, by their places in it: what the next node of a stream depends on, or what a node depends on. */
struct node_set {
    uint32_t *nodes;
    uint32_t count;
};

static bool node_set_has(const struct node_set *set, uint32_t node)
{
    for (uint32_t i = 0; i < set->count; i++)
        if (set->nodes[i] == node)
            return true;
    return false;
}

static void node_set_add(struct node_set *set, uint32_t node)
{
    if (node_set_has(set, node))
        return;
    set->nodes = resize(set->nodes, set->count + 1, sizeof(uint32_t));
    set->nodes[set->count++] = node;
}

static void node_set_add_all(struct node_set *set, const struct node_set *more)
{
    for (uint32_t i = 0; i < more->count; i++)
        node_set_add(set, more->nodes[i]);
}

static void node_set_clear(struct node_set *set)
{
    free(set->nodes);
    *set = (struct node_set){0};
}

struct node {
    CUgraphNodeType type;
    int64_t duration_ns; /* of a kernel */
    CUevent event;       /* that is recorded, or waited for */
    struct node_set dependencies;
    int64_t start_ns, end_ns; /* in the last launch */
};

struct graph {
    CUgraph handle;
    struct node *nodes;
    uint32_t node_count;
    bool is_being_captured;
};

struct exec {
    struct node *nodes;
    uint32_t node_count;
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

/* -------- the driver's state ---------------------------------------------------------------------------------- */

#define MOST_DEVICES 16
#define DEEPEST_CONTEXT_STACK 32

struct device {
    bool is_in_use;            /* its primary context is active */
    CUstream legacy_stream;    /* 0 before it is used first */
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

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static uint64_t epoch = 1; /* grows when the state is reset */
static bool is_initialized;
static int device_count;
static struct device devices[MOST_DEVICES];
static CUresult device_failure; /* returned by everything from then on, as after an illegal address */
static double drift_ppm;
static struct script scripts[FUNCTION_COUNT];
static _Atomic int64_t call_costs_ns[FUNCTION_COUNT]; /* spent without the lock */
static int held_calls;
static struct capture *captures;
static uint64_t last_capture_id;
static struct thread *threads;
static _Thread_local struct thread *current_thread;

/* Shared with forked children, so that a test can read what they have asked for. */
static _Atomic int64_t *calls_in_children;
static atomic_bool is_forked_child;

static struct thread *this_thread(void)
{
    struct thread *thread = current_thread;
    if (thread == NULL) {
        thread = current_thread = allocate(1, sizeof(struct thread));
        thread->id = gettid();
        thread->next = threads;
        threads = thread;
    }
    if (thread->epoch != epoch) {
        pid_t id = thread->id;
        struct thread *next = thread->next;
        *thread = (struct thread){.id = id, .next = next, .epoch = epoch};
    }
    return thread;
}

static void lock_for_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void unlock_after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

/* The documentation of the runtime: "cudaErrorInitializationError" (3) for everything in a child that was forked after
 * the parent had initialised CUDA. A child of a process that had not may use the device. */
static void become_forked_child(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    released = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    if (is_initialized)
        is_forked_child = true;
    if (current_thread != NULL)
        current_thread->id = gettid();
}

__attribute__((constructor)) static void load(void)
{
    size_t size = FUNCTION_COUNT * sizeof(*calls_in_children);
    calls_in_children = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (calls_in_children == MAP_FAILED || pthread_atfork(lock_for_fork, unlock_after_fork, become_forked_child) != 0)
        abort();
}

/* -------- what every call begins with ------------------------------------------------------------------------- */

static void spend(int64_t duration_ns)
{
    if (duration_ns == 0)
        return;
    int64_t end_ns = monotonic_ns() + duration_ns;
    while (monotonic_ns() < end_ns)
        ;
}

static void count_call(enum function function)
{
    scripts[function].calls++;
    this_thread()->calls[function]++;
    if (scripts[function].is_fatal) {
        fprintf(stderr, "simulated driver: %s was called, which this test forbids\n", function_names[function]);
        abort();
    }
}

static void wait_until_released(enum function function)
{
    held_calls++;
    while (scripts[function].is_held)
        pthread_cond_wait(&released, &lock);
    held_calls--;
}

static CUresult scripted_status(enum function function)
{
    const struct script *script = &scripts[function];
    if (script->status != CUDA_SUCCESS && script->calls >= script->fails_from)
        return script->status;
    if (function == FUNCTION_cuInit || function == FUNCTION_cuDriverGetVersion)
        return CUDA_SUCCESS;
    return is_initialized ? device_failure : CUDA_ERROR_NOT_INITIALIZED;
}

/* Takes the lock, unless the call is refused. */
static CUresult enter(enum function function)
{
    if (is_forked_child) {
        calls_in_children[function]++;
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    spend(call_costs_ns[function]);
    pthread_mutex_lock(&lock);
    count_call(function);
    wait_until_released(function);
    CUresult status = scripted_status(function);
    if (status != CUDA_SUCCESS)
        pthread_mutex_unlock(&lock);
    return status;
}

static CUresult leave(CUresult status)
{
    pthread_mutex_unlock(&lock);
    return status;
}

/* Begins each function of the driver, which ends with `return leave(status)`. */
#define ENTER(name)                                                                                                    \
    do {                                                                                                               \
        CUresult refusal = enter(FUNCTION_##name);                                                                     \
        if (refusal != CUDA_SUCCESS)                                                                                   \
            return refusal;                                                                                            \
    } while (0)

/* -------- contexts (no locking) ------------------------------------------------------------------------------- */

/* An old handle is not valid after a reset: it is of another epoch. */
static CUcontext context_of(CUdevice device)
{
    return make_handle(CONTEXT_HANDLE, epoch, (uint64_t)device, 0);
}

static CUresult device_of_context(CUcontext context, CUdevice *device)
{
    if (kind_of(context) != CONTEXT_HANDLE || generation_of(context) != (epoch & PART_MASK))
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = (CUdevice)slot_of(context);
    return devices[*device].is_in_use ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult current_device(CUdevice *device)
{
    struct thread *thread = this_thread();
    if (thread->context_count == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = thread->contexts[thread->context_count - 1];
    return devices[*device].is_in_use ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult push_context(CUcontext context)
{
    struct thread *thread = this_thread();
    CUdevice device;
    CUresult status = device_of_context(context, &device);
    if (status != CUDA_SUCCESS)
        return status;
    if (thread->context_count == DEEPEST_CONTEXT_STACK)
        return CUDA_ERROR_INVALID_VALUE;
    thread->contexts[thread->context_count++] = device;
    return CUDA_SUCCESS;
}

static CUresult pop_context(CUcontext *context)
{
    struct thread *thread = this_thread();
    if (thread->context_count == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUdevice device = thread->contexts[--thread->context_count];
    if (context != NULL)
        *context = context_of(device);
    return CUDA_SUCCESS;
}

/* cuCtxSetCurrent replaces the top of the thread's stack of contexts, or pops it if given NULL. */
static CUresult set_context(CUcontext context)
{
    struct thread *thread = this_thread();
    CUdevice device;
    if (context != NULL) {
        CUresult status = device_of_context(context, &device);
        if (status != CUDA_SUCCESS)
            return status;
    }
    if (thread->context_count > 0)
        thread->context_count--;
    return context != NULL ? push_context(context) : CUDA_SUCCESS;
}

/* -------- captures (no locking) ------------------------------------------------------------------------------- */

static bool capture_is_open(uint64_t id)
{
    for (struct capture *capture = captures; capture != NULL; capture = capture->next)
        if (capture->id == id)
            return true;
    return false;
}

/* The rules of cuThreadExchangeStreamCaptureMode: calls that are not put on a stream, and so would not be captured, are
 * prohibited to the capturing thread, and to other ones if both they and the capture have the global mode. Such a call
 * fails and invalidates the captures that prohibit it. */
static CUresult refuse_unsafe_call(void)
{
    const struct thread *thread = this_thread();
    CUresult status = CUDA_SUCCESS;
    if (thread->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return status;
    for (struct capture *capture = captures; capture != NULL; capture = capture->next) {
        if (capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
            continue;
        bool are_both_global = thread->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                               capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (capture->thread == thread || are_both_global) {
            capture->is_invalidated = true;
            status = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return status;
}

/* Whether a blocking stream of the device is captured: its legacy stream cannot be used then. */
static bool legacy_stream_is_blocked(CUdevice device, bool invalidates)
{
    bool is_blocked = false;
    for (uint64_t i = 0; i < streams.slot_count; i++) {
        struct stream *stream = streams.slots[i].object;
        if (stream == NULL || stream->capture == NULL || !stream->is_blocking || stream->device != device)
            continue;
        is_blocked = true;
        if (invalidates)
            stream->capture->is_invalidated = true;
    }
    return is_blocked;
}

/* Whether work can be put on the stream. */
static CUresult check_usable(const struct stream *stream)
{
    if (stream->is_legacy && legacy_stream_is_blocked(stream->device, true))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (stream->capture != NULL && stream->capture->is_invalidated)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    return CUDA_SUCCESS;
}

static CUgraphNode handle_of_node(const struct graph *graph, uint32_t node)
{
    return make_handle(NODE_HANDLE, generation_of(graph->handle), slot_of(graph->handle), node);
}

static struct graph *graph_of_node(CUgraphNode handle)
{
    if (kind_of(handle) != NODE_HANDLE)
        return NULL;
    struct graph *graph = table_get(&graphs, make_handle(GRAPH_HANDLE, generation_of(handle), slot_of(handle), 0));
    return graph != NULL && node_of(handle) < graph->node_count ? graph : NULL;
}

/* Returns the place of the new node. */
static uint32_t add_node(struct graph *graph, struct node node, const struct node_set *dependencies)
{
    node_set_add_all(&node.dependencies, dependencies);
    graph->nodes = resize(graph->nodes, graph->node_count + 1, sizeof(struct node));
    graph->nodes[graph->node_count] = node;
    return graph->node_count++;
}

/* Adds a node behind what the stream has captured so far. */
static void capture_node(struct stream *stream, struct node node)
{
    uint32_t added = add_node(stream->capture->graph, node, &stream->frontier);
    node_set_clear(&stream->frontier);
    node_set_add(&stream->frontier, added);
}

static void free_nodes(struct node *nodes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        node_set_clear(&nodes[i].dependencies);
    free(nodes);
}

static void free_graph(struct graph *graph)
{
    table_remove(&graphs, graph->handle);
    free_nodes(graph->nodes, graph->node_count);
    free(graph);
}

/* Whether each stream of the capture is joined again: all that it captured is before what the origin captured last.
 * Only frontiers count, as the documentation of cuStreamGetCaptureInfo says: a leaf that was added to the graph need not
 * be joined. */
static bool is_joined(const struct capture *capture)
{
    const struct graph *graph = capture->graph;
    bool *is_before = allocate(graph->node_count, sizeof(bool));
    for (uint32_t i = 0; i < capture->origin->frontier.count; i++)
        is_before[capture->origin->frontier.nodes[i]] = true;
    for (uint32_t node = graph->node_count; node-- > 0;) /* a node depends on nodes added before it */
        for (uint32_t i = 0; is_before[node] && i < graph->nodes[node].dependencies.count; i++)
            is_before[graph->nodes[node].dependencies.nodes[i]] = true;
    bool are_all_before = true;
    for (uint64_t i = 0; i < streams.slot_count; i++) {
        const struct stream *stream = streams.slots[i].object;
        if (stream == NULL || stream->capture != capture)
            continue;
        for (uint32_t j = 0; j < stream->frontier.count; j++)
            are_all_before = are_all_before && is_before[stream->frontier.nodes[j]];
    }
    free(is_before);
    return are_all_before;
}

static void close_capture(struct capture *capture)
{
    for (uint64_t i = 0; i < streams.slot_count; i++) {
        struct stream *stream = streams.slots[i].object;
        if (stream == NULL || stream->capture != capture)
            continue;
        stream->capture = NULL;
        node_set_clear(&stream->frontier);
    }
    for (struct capture **link = &captures; *link != NULL; link = &(*link)->next) {
        if (*link == capture) {
            *link = capture->next;
            break;
        }
    }
    free(capture);
}

/* -------- streams and time (no locking) ----------------------------------------------------------------------- */

static CUstream add_stream(CUdevice device, struct stream stream)
{
    struct stream *added = allocate(1, sizeof(struct stream));
    *added = stream;
    added->device = device;
    return table_add(&streams, added);
}

static CUstream legacy_stream(CUdevice device)
{
    CUstream *legacy = &devices[device].legacy_stream;
    if (*legacy == NULL)
        *legacy = add_stream(device, (struct stream){.is_built_in = true, .is_legacy = true});
    return *legacy;
}

static CUstream per_thread_stream(CUdevice device)
{
    CUstream *stream = &this_thread()->own_streams[device];
    if (*stream == NULL)
        *stream = add_stream(device, (struct stream){.is_built_in = true, .is_blocking = true});
    return *stream;
}

/* Which stream is meant: 0 and CU_STREAM_LEGACY are that of the current context. */
static CUresult find_stream(CUstream handle, struct stream **stream)
{
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        CUdevice device;
        CUresult status = current_device(&device);
        if (status != CUDA_SUCCESS)
            return status;
        handle = handle == CU_STREAM_PER_THREAD ? per_thread_stream(device) : legacy_stream(device);
    }
    *stream = table_get(&streams, handle);
    return *stream != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* When what is put on the stream now can start. */
static int64_t position_ns(const struct stream *stream)
{
    int64_t position = later(stream->free_at_ns, plus(simulated_now_ns(), stream->lateness_ns));
    if (!stream->is_legacy && !stream->is_blocking)
        return position;
    for (uint64_t i = 0; i < streams.slot_count; i++) {
        const struct stream *another = streams.slots[i].object;
        if (another == NULL || another->device != stream->device)
            continue;
        if (stream->is_legacy ? another->is_blocking : another->is_legacy)
            position = later(position, another->free_at_ns);
    }
    return position;
}

static void free_stream(CUstream handle)
{
    struct stream *stream = table_remove(&streams, handle);
    node_set_clear(&stream->frontier);
    free(stream->frontier_handles);
    free(stream);
}

static void free_event(CUevent handle)
{
    struct event *event = table_remove(&events, handle);
    node_set_clear(&event->frontier);
    free(event);
}

static void set_reached(struct event *event, int64_t time_ns)
{
    event->is_recorded = true;
    event->reached_at_ns = time_ns;
    event->capture_id = 0;
    node_set_clear(&event->frontier);
}

/* An event that was recorded into a capture is no point in time, but a set of nodes that a stream can wait for. */
static void capture_event(struct stream *stream, struct event *event)
{
    set_reached(event, NEVER_NS);
    event->capture_id = stream->capture->id;
    node_set_add_all(&event->frontier, &stream->frontier);
}

static CUresult record_event(CUevent handle, CUstream stream_handle, unsigned int flags)
{
    struct stream *stream;
    struct event *event = table_get(&events, handle);
    CUresult status = find_stream(stream_handle, &stream);
    if (status != CUDA_SUCCESS)
        return status;
    if (event == NULL || event->device != stream->device)
        return CUDA_ERROR_INVALID_HANDLE;
    status = check_usable(stream);
    if (status != CUDA_SUCCESS)
        return status;
    if (flags & CU_EVENT_RECORD_EXTERNAL) {
        if (stream->capture == NULL) /* "This flag is invalid outside of stream capture" */
            return CUDA_ERROR_INVALID_VALUE;
        capture_node(stream, (struct node){.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD, .event = handle});
    } else if (stream->capture != NULL) {
        capture_event(stream, event);
    } else {
        set_reached(event, position_ns(stream));
    }
    return CUDA_SUCCESS;
}

/* A stream that waits for what was captured takes part in the capture from then on. */
static CUresult join_capture(struct stream *stream, const struct event *event)
{
    if (!capture_is_open(event->capture_id))
        return CUDA_ERROR_INVALID_VALUE;
    struct capture *capture = captures;
    while (capture->id != event->capture_id)
        capture = capture->next;
    if (stream->capture != NULL && stream->capture != capture) {
        stream->capture->is_invalidated = capture->is_invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (stream->is_legacy) { /* it cannot be captured */
        capture->is_invalidated = true;
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    stream->capture = capture;
    node_set_add_all(&stream->frontier, &event->frontier);
    return CUDA_SUCCESS;
}

static CUresult wait_for_event(CUstream stream_handle, CUevent handle, unsigned int flags)
{
    struct stream *stream;
    struct event *event = table_get(&events, handle);
    CUresult status = find_stream(stream_handle, &stream);
    if (status != CUDA_SUCCESS)
        return status;
    if (event == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    status = check_usable(stream);
    if (status != CUDA_SUCCESS)
        return status;
    if (event->capture_id != 0)
        return join_capture(stream, event);
    if (stream->capture == NULL) {
        if (event->is_recorded)
            stream->free_at_ns = later(position_ns(stream), event->reached_at_ns);
        return CUDA_SUCCESS;
    }
    if (flags & CU_EVENT_WAIT_EXTERNAL) {
        capture_node(stream, (struct node){.type = CU_GRAPH_NODE_TYPE_WAIT_EVENT, .event = handle});
        return CUDA_SUCCESS;
    }
    if (!event->is_recorded)
        return CUDA_SUCCESS;
    stream->capture->is_invalidated = true; /* the graph would depend on work that is not in it */
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
}

static CUresult query_event(CUevent handle)
{
    CUresult status = refuse_unsafe_call();
    if (status != CUDA_SUCCESS)
        return status;
    const struct event *event = table_get(&events, handle);
    if (event == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture_id != 0) {
        for (struct capture *capture = captures; capture != NULL; capture = capture->next)
            if (capture->id == event->capture_id)
                capture->is_invalidated = true;
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    bool is_reached = !event->is_recorded || event->reached_at_ns <= simulated_now_ns();
    return is_reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* Is it unsafe in a capture, as a query is? The documentation does not say: assume the worse. */
static CUresult elapsed_time(float *milliseconds, CUevent start_handle, CUevent end_handle)
{
    CUresult status = refuse_unsafe_call();
    if (status != CUDA_SUCCESS)
        return status;
    const struct event *start = table_get(&events, start_handle), *end = table_get(&events, end_handle);
    if (milliseconds == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (start == NULL || end == NULL || start->device != end->device || !start->is_recorded || !end->is_recorded ||
        (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
        return CUDA_ERROR_INVALID_HANDLE;
    if (start->capture_id != 0 || end->capture_id != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (later(start->reached_at_ns, end->reached_at_ns) > simulated_now_ns())
        return CUDA_ERROR_NOT_READY;
    double elapsed_ns = (double)(end->reached_at_ns - start->reached_at_ns);
    *milliseconds = (float)(elapsed_ns * (1 + drift_ppm / 1e6) / 1e6);
    return CUDA_SUCCESS;
}

/* A synchronisation: with scripted time, the time passes that the host would have waited. */
static CUresult host_waits_until(int64_t time_ns)
{
    if (time_ns >= NEVER_NS)
        return CUDA_ERROR_LAUNCH_TIMEOUT;
    if (is_real_time) {
        pthread_mutex_unlock(&lock);
        sleep_until(time_ns);
        pthread_mutex_lock(&lock);
    } else if (time_ns > scripted_now_ns) {
        scripted_now_ns = time_ns;
    }
    return CUDA_SUCCESS;
}

/* -------- graphs (no locking) --------------------------------------------------------------------------------- */

static CUresult begin_capture(CUstream handle, CUstreamCaptureMode mode)
{
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status != CUDA_SUCCESS)
        return status;
    if (stream->is_legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture != NULL || (unsigned int)mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    struct graph *graph = allocate(1, sizeof(struct graph));
    graph->is_being_captured = true;
    graph->handle = table_add(&graphs, graph);
    struct capture *capture = allocate(1, sizeof(struct capture));
    *capture = (struct capture){
        .id = ++last_capture_id,
        .origin = stream,
        .thread = this_thread(),
        .mode = mode,
        .graph = graph,
        .next = captures,
    };
    captures = stream->capture = capture;
    return CUDA_SUCCESS;
}

static CUresult end_capture(CUstream handle, CUgraph *result)
{
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status != CUDA_SUCCESS)
        return status;
    if (result == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct capture *capture = stream->capture;
    if (capture == NULL || capture->origin != stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != this_thread())
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (capture->is_invalidated)
        status = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!is_joined(capture))
        status = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    struct graph *graph = capture->graph;
    close_capture(capture);
    graph->is_being_captured = false;
    *result = status == CUDA_SUCCESS ? graph->handle : NULL;
    if (status != CUDA_SUCCESS)
        free_graph(graph);
    return status;
}

/* The nodes that the next captured one depends on: "valid until the next API call which operates on the stream". */
static const CUgraphNode *frontier_handles(struct stream *stream)
{
    stream->frontier_handles = resize(stream->frontier_handles, stream->frontier.count, sizeof(CUgraphNode));
    for (uint32_t i = 0; i < stream->frontier.count; i++)
        stream->frontier_handles[i] = handle_of_node(stream->capture->graph, stream->frontier.nodes[i]);
    return stream->frontier_handles;
}

static CUresult capture_status(const struct stream *stream, CUstreamCaptureStatus *status)
{
    if (status == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->is_legacy && legacy_stream_is_blocked(stream->device, false))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT; /* "The blocking stream capture is not invalidated" */
    if (stream->capture == NULL)
        *status = CU_STREAM_CAPTURE_STATUS_NONE;
    else if (stream->capture->is_invalidated)
        *status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    else
        *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

static CUresult capture_info(CUstream handle, CUstreamCaptureStatus *status_out, cuuint64_t *id_out, CUgraph *graph_out,
                             const CUgraphNode **dependencies_out, const CUgraphEdgeData **edge_data_out,
                             size_t *count_out)
{
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status == CUDA_SUCCESS)
        status = capture_status(stream, status_out);
    if (status != CUDA_SUCCESS || *status_out != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return status;
    if (id_out != NULL)
        *id_out = stream->capture->id;
    if (graph_out != NULL)
        *graph_out = stream->capture->graph->handle;
    if (dependencies_out != NULL)
        *dependencies_out = frontier_handles(stream);
    if (edge_data_out != NULL)
        *edge_data_out = NULL; /* no edge has data */
    if (count_out != NULL)
        *count_out = stream->frontier.count;
    return CUDA_SUCCESS;
}

static CUresult add_event_record_node(CUgraphNode *node_out, CUgraph graph_handle, const CUgraphNode *dependencies,
                                      size_t count, CUevent event)
{
    struct graph *graph = table_get(&graphs, graph_handle);
    if (node_out == NULL || graph == NULL || table_get(&events, event) == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct node_set set = {0};
    for (size_t i = 0; i < count; i++) {
        if (graph_of_node(dependencies[i]) != graph) {
            node_set_clear(&set);
            return CUDA_ERROR_INVALID_VALUE;
        }
        node_set_add(&set, (uint32_t)node_of(dependencies[i]));
    }
    struct node node = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD, .event = event};
    *node_out = handle_of_node(graph, add_node(graph, node, &set));
    node_set_clear(&set);
    return CUDA_SUCCESS;
}

/* As cuGraphGetNodes and cuGraphNodeGetDependencies answer: without an array only the count; what the array holds
 * beyond the nodes there are is set to NULL. */
static CUresult list_nodes(const struct graph *graph, const uint32_t *nodes, uint32_t count, CUgraphNode *list,
                           size_t *list_count)
{
    if (list_count == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; list != NULL && i < *list_count; i++)
        list[i] = i < count ? handle_of_node(graph, nodes != NULL ? nodes[i] : (uint32_t)i) : NULL;
    if (list == NULL || *list_count > count)
        *list_count = count;
    return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *exec_out, CUgraph handle)
{
    const struct graph *graph = table_get(&graphs, handle);
    if (exec_out == NULL || graph == NULL || graph->is_being_captured)
        return CUDA_ERROR_INVALID_VALUE;
    struct exec *exec = allocate(1, sizeof(struct exec));
    exec->node_count = graph->node_count;
    exec->nodes = allocate(graph->node_count, sizeof(struct node));
    for (uint32_t i = 0; i < graph->node_count; i++) {
        exec->nodes[i] = graph->nodes[i];
        exec->nodes[i].dependencies = (struct node_set){0};
        node_set_add_all(&exec->nodes[i].dependencies, &graph->nodes[i].dependencies);
    }
    *exec_out = table_add(&execs, exec);
    return CUDA_SUCCESS;
}

static void free_exec(CUgraphExec handle)
{
    struct exec *exec = table_remove(&execs, handle);
    free_nodes(exec->nodes, exec->node_count);
    free(exec);
}

/* Runs a node as soon as what it depends on is over. */
static void run_node(struct exec *exec, struct node *node, int64_t launched_ns)
{
    node->start_ns = launched_ns;
    for (uint32_t i = 0; i < node->dependencies.count; i++)
        node->start_ns = later(node->start_ns, exec->nodes[node->dependencies.nodes[i]].end_ns);
    node->end_ns = plus(node->start_ns, node->duration_ns);
    struct event *event = node->event != NULL ? table_get(&events, node->event) : NULL;
    if (event == NULL)
        return;
    if (node->type == CU_GRAPH_NODE_TYPE_WAIT_EVENT && event->is_recorded)
        node->end_ns = later(node->end_ns, event->reached_at_ns);
    /* The state of the event is replaced when the launch is put on the stream, not when the node runs: what an earlier
     * launch recorded is lost from here on, read or not. */
    if (node->type == CU_GRAPH_NODE_TYPE_EVENT_RECORD)
        set_reached(event, node->end_ns);
}

static CUresult launch_graph(CUgraphExec handle, CUstream stream_handle)
{
    struct stream *stream;
    struct exec *exec = table_get(&execs, handle);
    CUresult status = find_stream(stream_handle, &stream);
    if (status != CUDA_SUCCESS)
        return status;
    if (exec == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    status = check_usable(stream);
    if (status != CUDA_SUCCESS)
        return status;
    if (stream->capture != NULL) /* a graph within a graph is not simulated */
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    int64_t launched_ns = later(position_ns(stream), exec->free_at_ns), end_ns = launched_ns;
    for (uint32_t i = 0; i < exec->node_count; i++) {
        run_node(exec, &exec->nodes[i], launched_ns);
        end_ns = later(end_ns, exec->nodes[i].end_ns);
    }
    exec->free_at_ns = stream->free_at_ns = end_ns;
    return CUDA_SUCCESS;
}

/* -------- the driver's functions: devices --------------------------------------------------------------------- */

CUresult cuInit(unsigned int flags)
{
    ENTER(cuInit);
    if (flags != 0)
        return leave(CUDA_ERROR_INVALID_VALUE);
    is_initialized = true;
    return leave(CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *version)
{
    ENTER(cuDriverGetVersion);
    if (version == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *version = 13000;
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    ENTER(cuDeviceGet);
    if (device == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (ordinal < 0 || ordinal >= device_count)
        return leave(CUDA_ERROR_INVALID_DEVICE);
    *device = ordinal;
    return leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetCount(int *count)
{
    ENTER(cuDeviceGetCount);
    if (count == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *count = device_count;
    return leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    ENTER(cuDevicePrimaryCtxGetState);
    if (device < 0 || device >= device_count)
        return leave(CUDA_ERROR_INVALID_DEVICE);
    if (flags == NULL || active == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *flags = 0;
    *active = devices[device].is_in_use;
    return leave(CUDA_SUCCESS);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRetain);
    if (context == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (device < 0 || device >= device_count)
        return leave(CUDA_ERROR_INVALID_DEVICE);
    devices[device].is_in_use = true;
    *context = context_of(device);
    return leave(CUDA_SUCCESS);
}

/* The job keeps its context: only what a test says of a device (simulated_use_device) ends its use. */
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    ENTER(cuDevicePrimaryCtxRelease);
    return leave(device >= 0 && device < device_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE);
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    return cuDevicePrimaryCtxRelease_v2(device);
}

/* -------- the driver's functions: contexts -------------------------------------------------------------------- */

CUresult cuCtxGetCurrent(CUcontext *context)
{
    ENTER(cuCtxGetCurrent);
    if (context == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    CUdevice device;
    *context = current_device(&device) == CUDA_SUCCESS ? context_of(device) : NULL;
    return leave(CUDA_SUCCESS);
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    ENTER(cuCtxSetCurrent);
    return leave(set_context(context));
}

CUresult cuCtxPushCurrent_v2(CUcontext context)
{
    ENTER(cuCtxPushCurrent);
    return leave(push_context(context));
}

CUresult cuCtxPushCurrent(CUcontext context)
{
    return cuCtxPushCurrent_v2(context);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context)
{
    ENTER(cuCtxPopCurrent);
    return leave(pop_context(context));
}

CUresult cuCtxPopCurrent(CUcontext *context)
{
    return cuCtxPopCurrent_v2(context);
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    ENTER(cuCtxGetDevice);
    return leave(device != NULL ? current_device(device) : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuCtxSynchronize(void)
{
    ENTER(cuCtxSynchronize);
    CUdevice device;
    CUresult status = current_device(&device);
    if (status == CUDA_SUCCESS)
        status = refuse_unsafe_call();
    int64_t free_at_ns = 0;
    for (uint64_t i = 0; status == CUDA_SUCCESS && i < streams.slot_count; i++) {
        const struct stream *stream = streams.slots[i].object;
        if (stream != NULL && stream->device == device)
            free_at_ns = later(free_at_ns, stream->free_at_ns);
    }
    return leave(status == CUDA_SUCCESS ? host_waits_until(free_at_ns) : status);
}

/* -------- the driver's functions: streams --------------------------------------------------------------------- */

static CUresult create_stream(CUstream *stream, unsigned int flags)
{
    CUdevice device;
    CUresult status = current_device(&device);
    if (status != CUDA_SUCCESS)
        return status;
    if (stream == NULL || (flags & ~CU_STREAM_NON_BLOCKING) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *stream = add_stream(device, (struct stream){.is_blocking = (flags & CU_STREAM_NON_BLOCKING) == 0});
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    ENTER(cuStreamCreate);
    return leave(create_stream(stream, flags));
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    ENTER(cuStreamCreateWithPriority);
    (void)priority; /* kernels of different streams never compete here */
    return leave(create_stream(stream, flags));
}

CUresult cuStreamDestroy_v2(CUstream handle)
{
    ENTER(cuStreamDestroy);
    const struct stream *stream = table_get(&streams, handle);
    if (stream == NULL || stream->is_built_in)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    if (stream->capture != NULL) /* what the driver does then is not documented: nobody should */
        return leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    free_stream(handle);
    return leave(CUDA_SUCCESS);
}

CUresult cuStreamDestroy(CUstream handle)
{
    return cuStreamDestroy_v2(handle);
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext *context)
{
    ENTER(cuStreamGetCtx);
    struct stream *stream;
    CUresult status = context != NULL ? find_stream(handle, &stream) : CUDA_ERROR_INVALID_VALUE;
    if (status == CUDA_SUCCESS)
        *context = context_of(stream->device);
    return leave(status);
}

CUresult cuStreamQuery(CUstream handle)
{
    ENTER(cuStreamQuery);
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status == CUDA_SUCCESS)
        status = refuse_unsafe_call();
    if (status == CUDA_SUCCESS)
        status = check_usable(stream);
    if (status == CUDA_SUCCESS && stream->free_at_ns > simulated_now_ns())
        status = CUDA_ERROR_NOT_READY;
    return leave(status);
}

CUresult cuStreamSynchronize(CUstream handle)
{
    ENTER(cuStreamSynchronize);
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status == CUDA_SUCCESS)
        status = refuse_unsafe_call();
    return leave(status == CUDA_SUCCESS ? host_waits_until(stream->free_at_ns) : status);
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    ENTER(cuStreamWaitEvent);
    return leave(wait_for_event(stream, event, flags));
}

/* -------- the driver's functions: captures and graphs --------------------------------------------------------- */

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status_out)
{
    ENTER(cuStreamIsCapturing);
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    return leave(status == CUDA_SUCCESS ? capture_status(stream, status_out) : status);
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
    ENTER(cuStreamGetCaptureInfo);
    return leave(capture_info(stream, status, id, NULL, NULL, NULL, NULL));
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **dependencies, size_t *count)
{
    ENTER(cuStreamGetCaptureInfo);
    return leave(capture_info(stream, status, id, graph, dependencies, NULL, count));
}

CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **dependencies, const CUgraphEdgeData **edge_data, size_t *count)
{
    ENTER(cuStreamGetCaptureInfo);
    return leave(capture_info(stream, status, id, graph, dependencies, edge_data, count));
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
    ENTER(cuStreamBeginCapture);
    return leave(begin_capture(stream, mode));
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    ENTER(cuStreamEndCapture);
    return leave(end_capture(stream, graph));
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    ENTER(cuThreadExchangeStreamCaptureMode);
    struct thread *thread = this_thread();
    CUdevice device;
    CUresult status = current_device(&device);
    if (status != CUDA_SUCCESS)
        return leave(status);
    if (mode == NULL || (unsigned int)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return leave(CUDA_ERROR_INVALID_VALUE);
    CUstreamCaptureMode previous = thread->capture_mode;
    thread->capture_mode = *mode;
    *mode = previous;
    return leave(CUDA_SUCCESS);
}

CUresult cuGraphDestroy(CUgraph handle)
{
    ENTER(cuGraphDestroy);
    struct graph *graph = table_get(&graphs, handle);
    if (graph == NULL || graph->is_being_captured)
        return leave(CUDA_ERROR_INVALID_VALUE);
    free_graph(graph);
    return leave(CUDA_SUCCESS);
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count)
{
    ENTER(cuGraphGetNodes);
    const struct graph *graph = table_get(&graphs, handle);
    if (graph == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    return leave(list_nodes(graph, NULL, graph->node_count, nodes, count));
}

CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
    ENTER(cuGraphNodeGetType);
    const struct graph *graph = graph_of_node(node);
    if (graph == NULL || type == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *type = graph->nodes[node_of(node)].type;
    return leave(CUDA_SUCCESS);
}

CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *dependencies, size_t *count)
{
    ENTER(cuGraphNodeGetDependencies);
    const struct graph *graph = graph_of_node(node);
    if (graph == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    const struct node_set *set = &graph->nodes[node_of(node)].dependencies;
    return leave(list_nodes(graph, set->nodes, set->count, dependencies, count));
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *dependencies, CUgraphEdgeData *edge_data,
                                       size_t *count)
{
    (void)edge_data; /* no edge has data */
    return cuGraphNodeGetDependencies(node, dependencies, count);
}

CUresult cuGraphAddEventRecordNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                   CUevent event)
{
    ENTER(cuGraphAddEventRecordNode);
    return leave(add_event_record_node(node, graph, dependencies, count, event));
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    ENTER(cuGraphInstantiate);
    (void)flags; /* of memory, priorities and launches by the device: nothing that is simulated */
    return leave(instantiate(exec, graph));
}

CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_size)
{
    if (error_node != NULL)
        *error_node = NULL;
    if (log != NULL && log_size > 0)
        log[0] = '\0';
    return cuGraphInstantiateWithFlags(exec, graph, 0);
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_size)
{
    return cuGraphInstantiate_v2(exec, graph, error_node, log, log_size);
}

CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    ENTER(cuGraphExecDestroy);
    if (table_get(&execs, exec) == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    free_exec(exec);
    return leave(CUDA_SUCCESS);
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
    ENTER(cuGraphLaunch);
    return leave(launch_graph(exec, stream));
}

/* -------- the driver's functions: events ---------------------------------------------------------------------- */

CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    ENTER(cuEventCreate);
    CUdevice device;
    CUresult status = current_device(&device);
    if (status != CUDA_SUCCESS)
        return leave(status);
    if (event == NULL || flags > 7)
        return leave(CUDA_ERROR_INVALID_VALUE);
    struct event *created = allocate(1, sizeof(struct event));
    *created = (struct event){.device = device, .flags = flags};
    *event = table_add(&events, created);
    return leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy_v2(CUevent event)
{
    ENTER(cuEventDestroy);
    if (table_get(&events, event) == NULL)
        return leave(CUDA_ERROR_INVALID_HANDLE);
    free_event(event);
    return leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy(CUevent event)
{
    return cuEventDestroy_v2(event);
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
    ENTER(cuEventRecord);
    return leave(record_event(event, stream, 0));
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags)
{
    ENTER(cuEventRecordWithFlags);
    return leave(record_event(event, stream, flags));
}

CUresult cuEventQuery(CUevent event)
{
    ENTER(cuEventQuery);
    return leave(query_event(event));
}

CUresult cuEventSynchronize(CUevent handle)
{
    ENTER(cuEventSynchronize);
    CUresult status = query_event(handle);
    if (status == CUDA_ERROR_NOT_READY)
        status = host_waits_until(((const struct event *)table_get(&events, handle))->reached_at_ns);
    return leave(status);
}

CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    ENTER(cuEventElapsedTime);
    return leave(elapsed_time(milliseconds, start, end));
}

CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
    return cuEventElapsedTime(milliseconds, start, end);
}

/* -------- the per-thread forms (_ptsz) ------------------------------------------------------------------------ */

/* cuda.h turns names into these where a program was compiled for per-thread default streams: 0 means another stream. */
static CUstream or_per_thread(CUstream stream)
{
    return stream == NULL ? CU_STREAM_PER_THREAD : stream;
}

CUresult cuEventRecord_ptsz(CUevent event, CUstream stream)
{
    return cuEventRecord(event, or_per_thread(stream));
}

CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned int flags)
{
    return cuEventRecordWithFlags(event, or_per_thread(stream), flags);
}

CUresult cuStreamGetCtx_ptsz(CUstream stream, CUcontext *context)
{
    return cuStreamGetCtx(or_per_thread(stream), context);
}

CUresult cuStreamQuery_ptsz(CUstream stream)
{
    return cuStreamQuery(or_per_thread(stream));
}

CUresult cuStreamSynchronize_ptsz(CUstream stream)
{
    return cuStreamSynchronize(or_per_thread(stream));
}

CUresult cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned int flags)
{
    return cuStreamWaitEvent(or_per_thread(stream), event, flags);
}

CUresult cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *status)
{
    return cuStreamIsCapturing(or_per_thread(stream), status);
}

CUresult cuStreamGetCaptureInfo_ptsz(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
    return cuStreamGetCaptureInfo(or_per_thread(stream), status, id);
}

CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                        const CUgraphNode **dependencies, size_t *count)
{
    return cuStreamGetCaptureInfo_v2(or_per_thread(stream), status, id, graph, dependencies, count);
}

CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                        const CUgraphNode **dependencies, const CUgraphEdgeData **edge_data,
                                        size_t *count)
{
    return cuStreamGetCaptureInfo_v3(or_per_thread(stream), status, id, graph, dependencies, edge_data, count);
}

CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode)
{
    return cuStreamBeginCapture_v2(or_per_thread(stream), mode);
}

CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    return cuStreamEndCapture(or_per_thread(stream), graph);
}

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
    return cuGraphLaunch(exec, or_per_thread(stream));
}

/* -------- for tests: the device ------------------------------------------------------------------------------- */

/* Brings back the state of a process that has not initialised CUDA: `count` devices, none in use, scripted time.
 * Handles from before are stale; calls that are held go on. */
void simulated_reset(int count)
{
    pthread_mutex_lock(&lock);
    while (captures != NULL) {
        struct graph *graph = captures->graph;
        close_capture(captures);
        free_graph(graph);
    }
    for (uint64_t i = 0; i < streams.slot_count; i++)
        if (streams.slots[i].object != NULL)
            free_stream(make_handle(STREAM_HANDLE, streams.slots[i].generation, i, 0));
    for (uint64_t i = 0; i < events.slot_count; i++)
        if (events.slots[i].object != NULL)
            free_event(make_handle(EVENT_HANDLE, events.slots[i].generation, i, 0));
    for (uint64_t i = 0; i < graphs.slot_count; i++)
        if (graphs.slots[i].object != NULL)
            free_graph(graphs.slots[i].object);
    for (uint64_t i = 0; i < execs.slot_count; i++)
        if (execs.slots[i].object != NULL)
            free_exec(make_handle(EXEC_HANDLE, execs.slots[i].generation, i, 0));
    memset(devices, 0, sizeof(devices));
    memset(scripts, 0, sizeof(scripts));
    for (int i = 0; i < FUNCTION_COUNT; i++) {
        call_costs_ns[i] = 0;
        calls_in_children[i] = 0;
    }
    epoch++;
    is_initialized = false;
    device_count = count < MOST_DEVICES ? count : MOST_DEVICES;
    device_failure = CUDA_SUCCESS;
    drift_ppm = 0;
    is_real_time = false;
    scripted_now_ns = SCRIPTED_START_NS;
    clock_reading_ns = 0;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
}

/* Has the job use a device (its primary context becomes active), or use it no more. */
void simulated_use_device(CUdevice device, bool is_in_use)
{
    pthread_mutex_lock(&lock);
    if (device >= 0 && device < MOST_DEVICES)
        devices[device].is_in_use = is_in_use;
    pthread_mutex_unlock(&lock);
}

/* The context of a device, whether it is in use or not. */
CUcontext simulated_context(CUdevice device)
{
    pthread_mutex_lock(&lock);
    CUcontext context = context_of(device);
    pthread_mutex_unlock(&lock);
    return context;
}

/* A handle of the device's legacy stream that holds in each context, as 0 does not. */
CUstream simulated_legacy_stream(CUdevice device)
{
    pthread_mutex_lock(&lock);
    CUstream stream = legacy_stream(device);
    pthread_mutex_unlock(&lock);
    return stream;
}

/* A non-blocking stream of a device, as from the pool that torch has made and never destroys. */
CUstream simulated_pool_stream(CUdevice device)
{
    pthread_mutex_lock(&lock);
    CUstream stream = add_stream(device, (struct stream){.is_built_in = true});
    pthread_mutex_unlock(&lock);
    return stream;
}

/* Puts a kernel on a stream, and tells when it starts and ends (both the stream's position, while that is captured). */
CUresult simulated_kernel(CUstream handle, int64_t duration_ns, int64_t *start_ns, int64_t *end_ns)
{
    pthread_mutex_lock(&lock);
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status == CUDA_SUCCESS)
        status = check_usable(stream);
    if (status != CUDA_SUCCESS)
        return leave(status);
    *start_ns = *end_ns = position_ns(stream);
    if (stream->capture != NULL)
        capture_node(stream, (struct node){.type = CU_GRAPH_NODE_TYPE_KERNEL, .duration_ns = duration_ns});
    else
        *end_ns = stream->free_at_ns = plus(*start_ns, duration_ns);
    return leave(CUDA_SUCCESS);
}

/* Has a stream wait until a time, as it waits for something of which nothing else is simulated. */
CUresult simulated_wait_until(CUstream handle, int64_t time_ns)
{
    pthread_mutex_lock(&lock);
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status == CUDA_SUCCESS)
        status = check_usable(stream);
    if (status == CUDA_SUCCESS && stream->capture == NULL)
        stream->free_at_ns = later(position_ns(stream), time_ns);
    return leave(status);
}

/* Has a stream wait for all that is on another one now, as by an event between them; no call is counted. */
CUresult simulated_follow(CUstream handle, CUstream earlier_handle)
{
    pthread_mutex_lock(&lock);
    struct stream *stream, *earlier;
    CUresult status = find_stream(handle, &stream);
    if (status == CUDA_SUCCESS)
        status = find_stream(earlier_handle, &earlier);
    if (status == CUDA_SUCCESS)
        status = check_usable(earlier);
    if (status != CUDA_SUCCESS)
        return leave(status);
    struct event *event = allocate(1, sizeof(struct event));
    CUevent event_handle = table_add(&events, event);
    if (earlier->capture != NULL)
        capture_event(earlier, event);
    else
        set_reached(event, position_ns(earlier));
    status = wait_for_event(handle, event_handle, 0);
    free_event(event_handle);
    return leave(status);
}

/* When what is put on the stream now can start; -1 if there is no such stream. */
int64_t simulated_position_ns(CUstream handle)
{
    pthread_mutex_lock(&lock);
    struct stream *stream;
    int64_t position = find_stream(handle, &stream) == CUDA_SUCCESS ? position_ns(stream) : -1;
    pthread_mutex_unlock(&lock);
    return position;
}

/* Forgets the work of a stream that has not ended yet, as an aborted communicator's kernels stop. */
CUresult simulated_stop_work(CUstream handle)
{
    pthread_mutex_lock(&lock);
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status == CUDA_SUCCESS && stream->free_at_ns > simulated_now_ns())
        stream->free_at_ns = simulated_now_ns();
    return leave(status);
}

/* How long after the host has put work on the stream the work starts, at the earliest. */
CUresult simulated_set_lateness_ns(CUstream handle, int64_t lateness_ns)
{
    pthread_mutex_lock(&lock);
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status == CUDA_SUCCESS)
        stream->lateness_ns = lateness_ns;
    return leave(status);
}

/* How many millionths the device's clock, in which cuEventElapsedTime counts, is faster than the host's. */
void simulated_set_drift_ppm(double ppm)
{
    pthread_mutex_lock(&lock);
    drift_ppm = ppm;
    pthread_mutex_unlock(&lock);
}

/* When an event is reached; -1 if it is not recorded on a stream, or is not there. */
int64_t simulated_event_ns(CUevent handle)
{
    pthread_mutex_lock(&lock);
    const struct event *event = table_get(&events, handle);
    int64_t time_ns = event != NULL && event->is_recorded && event->capture_id == 0 ? event->reached_at_ns : -1;
    pthread_mutex_unlock(&lock);
    return time_ns;
}

/* When a node ran, or will run, in the last launch. */
CUresult simulated_node_times(CUgraphExec handle, uint32_t node, int64_t *start_ns, int64_t *end_ns)
{
    pthread_mutex_lock(&lock);
    const struct exec *exec = table_get(&execs, handle);
    if (exec == NULL || node >= exec->node_count)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *start_ns = exec->nodes[node].start_ns;
    *end_ns = exec->nodes[node].end_ns;
    return leave(CUDA_SUCCESS);
}

/* -------- for tests: failures and what was asked -------------------------------------------------------------- */

/* The number of a function, for the functions below; -1 if it is none of those simulated. */
int simulated_function(const char *name)
{
    for (int i = 0; i < FUNCTION_COUNT; i++)
        if (strcmp(name, function_names[i]) == 0)
            return i;
    return -1;
}

/* The name of a function by its number; NULL if there are no more. */
const char *simulated_function_name(int function)
{
    return function >= 0 && function < FUNCTION_COUNT ? function_names[function] : NULL;
}

/* Has the `call`-th call from now (1: the next) and all after it return `status`. CUDA_SUCCESS ends that. */
void simulated_fail(int function, int64_t call, CUresult status)
{
    pthread_mutex_lock(&lock);
    scripts[function].fails_from = scripts[function].calls + call;
    scripts[function].status = status;
    pthread_mutex_unlock(&lock);
}

/* Has all functions return `status`, as after an illegal address (700): the documentation's "sticky" errors. */
void simulated_break_device(CUresult status)
{
    pthread_mutex_lock(&lock);
    device_failure = status;
    pthread_mutex_unlock(&lock);
}

/* Has calls of a function wait until they are released, as in a driver that is stuck. Others are answered meanwhile. */
void simulated_hold(int function, bool is_held)
{
    pthread_mutex_lock(&lock);
    scripts[function].is_held = is_held;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
}

/* How many calls wait to be released. */
int simulated_held_calls(void)
{
    pthread_mutex_lock(&lock);
    int count = held_calls;
    pthread_mutex_unlock(&lock);
    return count;
}

/* Has a call of a function end the process, so that no caller can go on as if nothing were. */
void simulated_forbid(int function, bool is_forbidden)
{
    pthread_mutex_lock(&lock);
    scripts[function].is_fatal = is_forbidden;
    pthread_mutex_unlock(&lock);
}

/* Has each call of a function keep its thread busy so long. */
void simulated_set_cost_ns(int function, int64_t cost_ns)
{
    call_costs_ns[function] = cost_ns;
}

/* How often a function was called since the reset, refused calls included. */
int64_t simulated_calls(int function)
{
    pthread_mutex_lock(&lock);
    int64_t calls = scripts[function].calls;
    pthread_mutex_unlock(&lock);
    return calls;
}

/* How often a thread (gettid) called a function since the reset. */
int64_t simulated_calls_of_thread(int function, pid_t thread_id)
{
    pthread_mutex_lock(&lock);
    int64_t calls = 0;
    for (const struct thread *thread = threads; thread != NULL; thread = thread->next)
        if (thread->id == thread_id && thread->epoch == epoch)
            calls += thread->calls[function];
    pthread_mutex_unlock(&lock);
    return calls;
}

/* How often forked children called a function, all of which was refused. Known in the parent, too. */
int64_t simulated_calls_in_children(int function)
{
    return calls_in_children[function];
}

static uint64_t list_handles(const struct table *table, void **handles, uint64_t capacity)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < table->slot_count; i++) {
        const struct slot *slot = &table->slots[i];
        bool is_built_in = table == &streams && slot->object != NULL && ((struct stream *)slot->object)->is_built_in;
        if (slot->object == NULL || is_built_in)
            continue;
        if (count < capacity)
            handles[count] = make_handle(table->kind, slot->generation, i, 0);
        count++;
    }
    return count;
}

/* Fills in the events that are not destroyed, up to `capacity`, and returns how many there are. */
uint64_t simulated_live_events(void **handles, uint64_t capacity)
{
    pthread_mutex_lock(&lock);
    uint64_t count = list_handles(&events, handles, capacity);
    pthread_mutex_unlock(&lock);
    return count;
}

/* The same of streams, without those that were not created. */
uint64_t simulated_live_streams(void **handles, uint64_t capacity)
{
    pthread_mutex_lock(&lock);
    uint64_t count = list_handles(&streams, handles, capacity);
    pthread_mutex_unlock(&lock);
    return count;
}
