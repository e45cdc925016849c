/* Contexts, streams and events. */
#include "driver.h"

/* An old handle is not valid after a reset: it is of another epoch. */
CUcontext context_of(CUdevice device)
{
    return make_handle(CONTEXT_HANDLE, epoch, (uint64_t)device, 0);
}

static CUresult device_of_context(CUcontext context, CUdevice *device)
{
    if (slot_of(context) >= MOST_DEVICES || context != context_of((CUdevice)slot_of(context)))
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = (CUdevice)slot_of(context);
    return devices[*device].is_in_use ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult current_device(CUdevice *device)
{
    struct thread *thread = this_thread();
    if (thread->context_count == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = thread->contexts[thread->context_count - 1];
    return devices[*device].is_in_use ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult push_context(CUcontext context)
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

CUresult pop_context(CUcontext *context)
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
CUresult set_context(CUcontext context)
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

CUstream add_stream(CUdevice device, struct stream stream)
{
    struct stream *added = allocate(1, sizeof(struct stream));
    *added = stream;
    added->device = device;
    return table_add(&streams, added);
}

CUstream legacy_stream(CUdevice device)
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
CUresult find_stream(CUstream handle, struct stream **stream)
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
int64_t position_ns(const struct stream *stream)
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

void free_stream(CUstream handle)
{
    struct stream *stream = table_remove(&streams, handle);
    node_set_clear(&stream->frontier);
    free(stream->frontier_handles);
    free(stream);
}

void free_event(CUevent handle)
{
    struct event *event = table_remove(&events, handle);
    node_set_clear(&event->frontier);
    free(event);
}

void set_reached(struct event *event, int64_t time_ns)
{
    event->is_recorded = true;
    event->reached_at_ns = time_ns;
    event->capture_id = 0;
    node_set_clear(&event->frontier);
}

CUresult record_event(CUevent handle, CUstream stream_handle, unsigned int flags)
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

CUresult wait_for_event(CUstream stream_handle, CUevent handle, unsigned int flags)
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

CUresult query_event(CUevent handle)
{
    CUresult status = refuse_unsafe_call();
    if (status != CUDA_SUCCESS)
        return status;
    const struct event *event = table_get(&events, handle);
    if (event == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture_id != 0) {
        invalidate_capture(event->capture_id);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    bool is_reached = !event->is_recorded || event->reached_at_ns <= simulated_now_ns();
    return is_reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* Is it unsafe in a capture, as a query is? The documentation does not say: assume the worse. */
CUresult elapsed_time(float *milliseconds, CUevent start_handle, CUevent end_handle)
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
CUresult host_waits_until(int64_t time_ns)
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
