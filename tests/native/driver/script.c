/* What a test has the simulated device do, and reads of it. None of these calls is counted. */
#include "driver.h"

#include <string.h>

/* What a program finds by dlsym. Everything else of the library is hidden (-fvisibility=hidden). */
#pragma GCC visibility push(default)

/* -------- what the device does ----------------------------------------------------------------------------------- */

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
    forget_effects();
    globaltimer_ahead_ns = UINT64_C(5000000000000000);
    globaltimer_ppm = 0;
    stamp_duration_ns = 0;
    launch_latency_ns = 0;
    driver_version = 13000;
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

/* How many millionths %globaltimer is faster than the host's clock, and how far ahead of it at its time 0. */
void simulated_set_globaltimer(double ppm, uint64_t ahead_ns)
{
    pthread_mutex_lock(&lock);
    globaltimer_ppm = ppm;
    globaltimer_ahead_ns = ahead_ns;
    pthread_mutex_unlock(&lock);
}

/* How long the kernels of the native part take from now on: as nodes, from when they are added. */
void simulated_set_stamp_ns(int64_t duration_ns)
{
    pthread_mutex_lock(&lock);
    stamp_duration_ns = duration_ns;
    pthread_mutex_unlock(&lock);
}

/* How long after its launch a kernel of the native part starts, at the earliest. */
void simulated_set_launch_latency_ns(int64_t duration_ns)
{
    pthread_mutex_lock(&lock);
    launch_latency_ns = duration_ns;
    pthread_mutex_unlock(&lock);
}

/* What cuDriverGetVersion says. */
void simulated_set_version(int version)
{
    pthread_mutex_lock(&lock);
    driver_version = version;
    pthread_mutex_unlock(&lock);
}

/* Has kernels that are captured on a stream from now on depend programmatically on what is before them, or not. */
CUresult simulated_set_programmatic(CUstream handle, bool is_programmatic)
{
    pthread_mutex_lock(&lock);
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status == CUDA_SUCCESS)
        stream->is_programmatic = is_programmatic;
    return leave(status);
}

/* The kernel of the native part that a node is: its number, 0 for another one; its priority. */
CUresult simulated_node_kernel(CUgraphNode handle, int *kernel, int *priority)
{
    pthread_mutex_lock(&lock);
    const struct graph *graph = graph_of_node(handle);
    if (graph == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *kernel = graph->nodes[node_of(handle)].kernel.number;
    *priority = graph->nodes[node_of(handle)].priority;
    return leave(CUDA_SUCCESS);
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

/* -------- what fails, and what was asked ------------------------------------------------------------------------- */

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
