/* The functions of the driver, as cuda.h declares them. */
#include "driver.h"

/* What a program finds by dlsym. Everything else of the library is hidden (-fvisibility=hidden). */
#pragma GCC visibility push(default)

/* -------- devices ------------------------------------------------------------------------------------------------ */

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
    *version = driver_version;
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

/* -------- contexts ----------------------------------------------------------------------------------------------- */

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

/* -------- streams ------------------------------------------------------------------------------------------------ */

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

/* -------- captures and graphs ------------------------------------------------------------------------------------ */

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

#ifndef BEFORE_12_3
CUresult cuStreamGetCaptureInfo_v3(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                   const CUgraphNode **dependencies, const CUgraphEdgeData **edge_data, size_t *count)
{
    ENTER(cuStreamGetCaptureInfo);
    return leave(capture_info(stream, status, id, graph, dependencies, edge_data, count));
}
#endif

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
    if (graph->nodes[node_of(node)].is_programmatic)
        return leave(CUDA_ERROR_LOSSY_QUERY);
    const struct node_set *set = &graph->nodes[node_of(node)].dependencies;
    return leave(list_nodes(graph, set->nodes, set->count, dependencies, count));
}

#ifndef BEFORE_12_3
CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *dependencies, CUgraphEdgeData *edge_data,
                                       size_t *count)
{
    ENTER(cuGraphNodeGetDependencies);
    const struct graph *graph = graph_of_node(node);
    if (graph == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    const struct node *asked = &graph->nodes[node_of(node)];
    for (size_t i = 0; edge_data != NULL && i < *count; i++)
        edge_data[i] = (CUgraphEdgeData){.type = asked->is_programmatic};
    return leave(list_nodes(graph, asked->dependencies.nodes, asked->dependencies.count, dependencies, count));
}
#endif

CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                 const CUDA_KERNEL_NODE_PARAMS *params)
{
    ENTER(cuGraphAddKernelNode);
    return leave(add_kernel_node(node, graph, dependencies, count, params));
}

/* The only attribute that is simulated is the priority. */
CUresult cuGraphKernelNodeSetAttribute(CUgraphNode handle, CUkernelNodeAttrID attribute,
                                       const CUkernelNodeAttrValue *value)
{
    ENTER(cuGraphKernelNodeSetAttribute);
    struct graph *graph = graph_of_node(handle);
    if (graph == NULL || attribute != CU_LAUNCH_ATTRIBUTE_PRIORITY || value == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    graph->nodes[node_of(handle)].priority = value->priority;
    return leave(CUDA_SUCCESS);
}

CUresult cuGraphRetainUserObject(CUgraph graph, CUuserObject object, unsigned int count, unsigned int flags)
{
    ENTER(cuGraphRetainUserObject);
    const bool moves = flags == CU_GRAPH_USER_OBJECT_MOVE;
    return leave(count == 1 ? retain_user_object(graph, object, moves) : CUDA_ERROR_INVALID_VALUE);
}

CUresult cuUserObjectCreate(CUuserObject *object, void *data, CUhostFn destroy, unsigned int references,
                            unsigned int flags)
{
    ENTER(cuUserObjectCreate);
    if (flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
        return leave(CUDA_ERROR_INVALID_VALUE);
    return leave(create_user_object(object, data, destroy, references));
}

CUresult cuUserObjectRelease(CUuserObject object, unsigned int count)
{
    ENTER(cuUserObjectRelease);
    return leave(count == 1 ? drop_user_object(object) : CUDA_ERROR_INVALID_VALUE);
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

/* -------- modules, memory and kernels ---------------------------------------------------------------------------- */

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    ENTER(cuModuleLoadData);
    return leave(load_module(module, image));
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    ENTER(cuModuleGetFunction);
    return leave(find_function(function, module, name));
}

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    ENTER(cuMemAlloc);
    uint64_t allocated;
    CUresult status = allocate_memory(&allocated, size, false);
    if (status == CUDA_SUCCESS)
        *address = allocated;
    return leave(status);
}

CUresult cuMemHostAlloc(void **memory, size_t size, unsigned int flags)
{
    ENTER(cuMemHostAlloc);
    uint64_t allocated;
    if ((flags & CU_MEMHOSTALLOC_DEVICEMAP) == 0)
        return leave(CUDA_ERROR_INVALID_VALUE);
    CUresult status = allocate_memory(&allocated, size, true);
    if (status == CUDA_SUCCESS)
        *memory = (void *)(uintptr_t)allocated;
    return leave(status);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned int flags)
{
    ENTER(cuMemHostGetDevicePointer);
    if (address == NULL || flags != 0)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *address = mapped_address(memory);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, CUstream stream)
{
    ENTER(cuMemsetD8Async);
    (void)stream; /* at once: what comes behind it on the stream finds it done */
    return leave(set_memory(address, value, size));
}

CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream stream, void **arguments, void **extra)
{
    ENTER(cuLaunchKernel);
    bool is_one_thread = grid_x * grid_y * grid_z * block_x * block_y * block_z == 1;
    if (!is_one_thread || shared_bytes != 0 || extra != NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    return leave(launch_kernel(function, stream, arguments));
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    ENTER(cuCtxGetStreamPriorityRange);
    *least = 0;
    *greatest = -5;
    return leave(CUDA_SUCCESS);
}

/* -------- events ------------------------------------------------------------------------------------------------- */

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

/* -------- the per-thread forms (_ptsz) --------------------------------------------------------------------------- */

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

#ifndef BEFORE_12_3
CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                                        const CUgraphNode **dependencies, const CUgraphEdgeData **edge_data,
                                        size_t *count)
{
    return cuStreamGetCaptureInfo_v3(or_per_thread(stream), status, id, graph, dependencies, edge_data, count);
}
#endif

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
