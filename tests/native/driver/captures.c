/* Captures and graphs. */
#include "driver.h"

struct capture *captures;
static uint64_t last_capture_id;

/* NULL if the capture has ended. */
static struct capture *find_capture(uint64_t id)
{
    struct capture *capture = captures;
    while (capture != NULL && capture->id != id)
        capture = capture->next;
    return capture;
}

void invalidate_capture(uint64_t id)
{
    struct capture *capture = find_capture(id);
    if (capture != NULL)
        capture->is_invalidated = true;
}

/* The rules of cuThreadExchangeStreamCaptureMode: calls that are not put on a stream, and so would not be captured, are
 * prohibited to the capturing thread, and to other ones if both they and the capture have the global mode. Such a call
 * fails and invalidates the captures that prohibit it. */
CUresult refuse_unsafe_call(void)
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
CUresult check_usable(const struct stream *stream)
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

struct graph *graph_of_node(CUgraphNode handle)
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
void capture_node(struct stream *stream, struct node node)
{
    node.is_programmatic = node.type == CU_GRAPH_NODE_TYPE_KERNEL && stream->is_programmatic;
    uint32_t added = add_node(stream->capture->graph, node, &stream->frontier);
    node_set_clear(&stream->frontier);
    node_set_add(&stream->frontier, added);
}

/* An event that was recorded into a capture is no point in time, but a set of nodes that a stream can wait for. */
void capture_event(struct stream *stream, struct event *event)
{
    set_reached(event, NEVER_NS);
    event->capture_id = stream->capture->id;
    node_set_add_all(&event->frontier, &stream->frontier);
}

/* A stream that waits for what was captured takes part in the capture from then on. */
CUresult join_capture(struct stream *stream, const struct event *event)
{
    struct capture *capture = find_capture(event->capture_id);
    if (capture == NULL)
        return CUDA_ERROR_INVALID_VALUE;
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

static void free_nodes(struct node *nodes, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        node_set_clear(&nodes[i].dependencies);
    free(nodes);
}

void free_graph(struct graph *graph)
{
    table_remove(&graphs, graph->handle);
    free_nodes(graph->nodes, graph->node_count);
    objects_clear(&graph->objects);
    free(graph);
}

/* Whether each stream of the capture is joined again: all that it captured is before what the origin captured last.
 * Only frontiers count, as the documentation of cuStreamGetCaptureInfo says: a leaf that was added to the graph is not
 * asked for. */
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

void close_capture(struct capture *capture)
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

CUresult begin_capture(CUstream handle, CUstreamCaptureMode mode)
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

CUresult end_capture(CUstream handle, CUgraph *result)
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

CUresult capture_status(const struct stream *stream, CUstreamCaptureStatus *status)
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

static const CUgraphEdgeData programmatic_edges[64] = {[0 ... 63] = {.from_port = 1, .type = 1}};

CUresult capture_info(CUstream handle, CUstreamCaptureStatus *status_out, cuuint64_t *id_out, CUgraph *graph_out,
                      const CUgraphNode **dependencies_out, const CUgraphEdgeData **edge_data_out, size_t *count_out)
{
    struct stream *stream;
    CUresult status = find_stream(handle, &stream);
    if (status == CUDA_SUCCESS)
        status = capture_status(stream, status_out);
    if (status != CUDA_SUCCESS || *status_out != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return status;
    if (stream->is_programmatic && dependencies_out != NULL && edge_data_out == NULL)
        return CUDA_ERROR_LOSSY_QUERY;
    if (id_out != NULL)
        *id_out = stream->capture->id;
    if (graph_out != NULL)
        *graph_out = stream->capture->graph->handle;
    if (dependencies_out != NULL)
        *dependencies_out = frontier_handles(stream);
    if (edge_data_out != NULL)
        *edge_data_out = stream->is_programmatic ? programmatic_edges : NULL;
    if (count_out != NULL)
        *count_out = stream->frontier.count;
    return CUDA_SUCCESS;
}

/* Adds a node that was not captured: no stream depends on it. */
static CUresult add_node_of_graph(CUgraphNode *node_out, CUgraph graph_handle, const CUgraphNode *dependencies,
                                  size_t count, struct node node)
{
    struct graph *graph = table_get(&graphs, graph_handle);
    if (node_out == NULL || graph == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct node_set set = {0};
    for (size_t i = 0; i < count; i++) {
        if (graph_of_node(dependencies[i]) != graph) {
            node_set_clear(&set);
            return CUDA_ERROR_INVALID_VALUE;
        }
        node_set_add(&set, (uint32_t)node_of(dependencies[i]));
    }
    *node_out = handle_of_node(graph, add_node(graph, node, &set));
    node_set_clear(&set);
    return CUDA_SUCCESS;
}

CUresult add_event_record_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                               CUevent event)
{
    if (table_get(&events, event) == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    const struct node added = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD, .event = event};
    return add_node_of_graph(node, graph, dependencies, count, added);
}

CUresult add_kernel_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                         const CUDA_KERNEL_NODE_PARAMS *params)
{
    struct node added = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .duration_ns = stamp_duration_ns};
    if (params == NULL || !read_kernel(&added.kernel, params->func, params->kernelParams))
        return CUDA_ERROR_INVALID_VALUE;
    return add_node_of_graph(node, graph, dependencies, count, added);
}

CUresult launch_kernel(CUfunction function, CUstream stream_handle, void **arguments)
{
    struct stream *stream;
    struct node node = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .duration_ns = stamp_duration_ns};
    CUresult status = find_stream(stream_handle, &stream);
    if (status == CUDA_SUCCESS)
        status = check_usable(stream);
    if (status != CUDA_SUCCESS)
        return status;
    if (!read_kernel(&node.kernel, function, arguments))
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture != NULL) {
        capture_node(stream, node);
        return CUDA_SUCCESS;
    }
    int64_t start_ns = later(position_ns(stream), plus(simulated_now_ns(), launch_latency_ns));
    run_kernel(&node.kernel, start_ns);
    stream->free_at_ns = plus(start_ns, stamp_duration_ns);
    show_effects();
    return CUDA_SUCCESS;
}

/* As cuGraphGetNodes and cuGraphNodeGetDependencies answer: without an array only the count; what the array holds
 * beyond the nodes there are is set to NULL. */
CUresult list_nodes(const struct graph *graph, const uint32_t *nodes, uint32_t count, CUgraphNode *list,
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

CUresult instantiate(CUgraphExec *exec_out, CUgraph handle)
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
    for (uint32_t i = 0; i < graph->objects.count; i++)
        objects_add(&exec->objects, graph->objects.objects[i]);
    *exec_out = table_add(&execs, exec);
    return CUDA_SUCCESS;
}

void free_exec(CUgraphExec handle)
{
    struct exec *exec = table_remove(&execs, handle);
    free_nodes(exec->nodes, exec->node_count);
    objects_clear(&exec->objects);
    free(exec);
}

/* Runs a node as soon as what it depends on is over. */
static void run_node(struct exec *exec, struct node *node, int64_t launched_ns)
{
    node->start_ns = launched_ns;
    for (uint32_t i = 0; i < node->dependencies.count; i++)
        node->start_ns = later(node->start_ns, exec->nodes[node->dependencies.nodes[i]].end_ns);
    node->end_ns = plus(node->start_ns, node->duration_ns);
    if (node->kernel.number != 0)
        run_kernel(&node->kernel, node->start_ns);
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

CUresult launch_graph(CUgraphExec handle, CUstream stream_handle)
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
