/* Device times of the communication in CUDA graphs, by kernels that stamp them.

   While a graph is captured, nodes of one thread each are added to it: one that counts the replays, and for each
   communication some that write the device's time (stamp_kernels.h). No node of the job depends on any of them, and what
   they depend on is what the communication depends on, or its last node: so they order nothing, and an end is that of the
   communication, whatever streams wait for it. The documentation of cuStreamGetCaptureInfo allows nodes to be added
   while a capture is in progress, and does not ask that they are joined. NCCL adds nodes of its own in the same way
   (src/misc/strongstream.cc).

   An external event in the graph would cost less, but each launch resets it as it is enqueued: of all replays that the
   host enqueues between two looks, only the last would be seen. A stamp has a slot for each of the latest NUM_SLOTS
   replays, in memory of the host. The thread of marks.c reads it, without the driver and without the GIL, and never waits:
   what an aborted communicator leaves behind stays without a time.

   The memory of a graph is used again when the graph and all its executables are gone, of which a user object tells. The
   kernels, and the memory as a whole, stay until the process ends: a graph may be replayed after the recording. */
#include "stamps.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_BYTES_READ = 64 << 20, /* that wait for the harvester */
    CAPTURE_ACTIVE = 1,   /* CU_STREAM_CAPTURE_STATUS_ACTIVE */
    KERNEL_NODE = 0, COPY_NODE = 1, /* CUgraphNodeType */
    NODE_PRIORITY = 8,    /* CU_LAUNCH_ATTRIBUTE_PRIORITY */
};

enum { UNUSED, CAPTURING, READ, ABANDONED };

/* The stamps of a graph. */
typedef struct {
    _Atomic int state;
    _Atomic bool is_gone; /* the graph and its executables are; set by any thread of the driver */
    int number, device, session;
    Stamper *stamper;
    int64_t graph_id;
    Context context;
    uint64_t capture_id;
    Graph graph;
    Stream origin; /* on which the capture was begun: that of the job's computing */
    Node counter_node;
    Node *added_nodes; /* by us */
    Page **pages;
    int num_stamps, num_pages, num_added;
    uint64_t base; /* replays that were counted for earlier graphs of this number */
    uint64_t next; /* the replay to be read */
    int num_arrived; /* of its stamps, without a gap */
} Stamps;

/* The times of one replay, for the harvester. */
typedef struct Reading {
    struct Reading *next;
    int64_t graph_id, error_ns;
    uint64_t replay;
    int num_stamps;
    int64_t times[]; /* ns; NOT_APPLICABLE for a stamp that was not written */
} Reading;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of readings */
static Stamps *graphs[MOST_GRAPHS];
static _Atomic int num_graphs = 1; /* number 0 is the probe's */
static _Atomic int session_of_stamps; /* what was begun in an earlier one is not read */
static Reading *first_reading, **last_reading = &first_reading;
static size_t bytes_read;
static _Atomic int64_t num_lost;

/* ---- reasons why something has no stamps ------------------------------------------------------------------------ */

static const char NOT_CAPTURED[] = "the stream is not captured";
static const char OTHER_DEVICE[] = "captured on another device than its graph";
static const char OTHER_CONTEXT[] = "captured in another context than its graph";
static const char OTHER_GRAPH[] = "captured into another graph, such as the body of a conditional node";
static const char PROGRAMMATIC[] = "kernels around it overlap (programmatic edges)";
static const char REFUSED[] = "the driver has refused";
static const char NO_NODES[] = "its nodes in the graph were not found";

/* prepare_stamps(is_alone): why the current device has no stamps, "" if it has. */
static PyObject *python_prepare(PyObject *module, PyObject *value) {
    (void)module;
    int is_alone = PyObject_IsTrue(value), device = device_is_open() ? device_of_context() : NOT_APPLICABLE;
    if (is_alone < 0) {
        return NULL;
    }
    if (device == NOT_APPLICABLE || context_of_device(device) == NULL || device_has_failed()) {
        return PyUnicode_FromString(NO_CONTEXT);
    }
    const char *failure = stamper_prepare(device, is_alone);
    return PyUnicode_FromString(failure == NULL ? "" : failure);
}

/* ---- graphs ------------------------------------------------------------------------------------------------------- */

/* Called by a thread of the driver, which is asked nothing here. */
static void graph_is_gone(void *stamps) { atomic_store(&((Stamps *)stamps)->is_gone, true); }

/* Makes the number of a graph that is gone available again. */
static void recycle(Stamps *stamps) {
    Stamper *stamper = stamps->stamper;
    for (int i = 0; i < stamps->num_pages; i++) {
        stamper_return_page(stamper, stamps->pages[i]);
    }
    stamps->num_pages = stamps->num_stamps = stamps->num_added = 0;
    atomic_store_explicit(&stamps->state, UNUSED, memory_order_release);
}

static Stamps *unused_stamps(void) {
    int known = atomic_load(&num_graphs);
    for (int number = 1; number < known; number++) {
        if (atomic_load_explicit(&graphs[number]->state, memory_order_acquire) == UNUSED) {
            return graphs[number];
        }
    }
    if (known == MOST_GRAPHS) {
        return NULL;
    }
    Stamps *stamps = calloc(1, sizeof *stamps);
    if (stamps != NULL) {
        stamps->number = known;
        graphs[known] = stamps;
        atomic_store(&num_graphs, known + 1);
    }
    return stamps;
}

/* What a stream captures. */
typedef struct {
    uint64_t id;
    Graph graph;
    Node *frontier; /* allocated */
    size_t num_frontier;
    Stream stream;
} Captured;

static Node *copy_nodes(const Node *nodes, size_t count) {
    Node *copy = malloc((count + 1) * sizeof *copy);
    if (copy != NULL && count > 0) {
        memcpy(copy, nodes, count * sizeof *copy);
    }
    return copy;
}

/* Whether it ends before all of the node before it is over. */
static bool is_programmatic_edge(const Edge *edge) { return edge->from_port != 0 || edge->type != 0; }

static const char *look_at(Stream stream, Captured *captured) {
    int status = 0, result;
    const Node *frontier = NULL;
    const Edge *edges = NULL;
    *captured = (Captured){.stream = stream};
    if (graph_driver.capture_info_with_edges != NULL) {
        result = graph_driver.capture_info_with_edges(stream, &status, &captured->id, &captured->graph, &frontier,
                                                      &edges, &captured->num_frontier);
    } else {
        result = graph_driver.capture_info(stream, &status, &captured->id, &captured->graph, &frontier,
                                           &captured->num_frontier);
        if (result != DRIVER_SUCCESS) { /* CUDA_ERROR_LOSSY_QUERY: it cannot tell of such edges */
            return PROGRAMMATIC;
        }
    }
    if (result != DRIVER_SUCCESS) {
        return REFUSED;
    }
    if (status != CAPTURE_ACTIVE) {
        return NOT_CAPTURED;
    }
    for (size_t i = 0; edges != NULL && i < captured->num_frontier; i++) {
        if (is_programmatic_edge(&edges[i])) {
            return PROGRAMMATIC;
        }
    }
    captured->frontier = copy_nodes(frontier, captured->num_frontier);
    return captured->frontier == NULL ? NO_MEMORY : NULL;
}

/* The same of the stream that is current where a communication of a graph is launched or waited for. */
static const char *look_into(const Stamps *stamps, int device, Captured *captured) {
    Context current = NULL;
    Stream stream;
    *captured = (Captured){0};
    if (device != NOT_APPLICABLE && device != stamps->device) {
        return OTHER_DEVICE;
    }
    if (driver.context_get_current(&current) != DRIVER_SUCCESS || current != stamps->context) {
        return OTHER_CONTEXT;
    }
    if (!current_stream(stamps->device, &stream)) {
        clear_exception();
        return NOT_CAPTURED;
    }
    const char *reason = look_at(stream, captured);
    if (reason == NULL && (captured->id != stamps->capture_id || captured->graph != stamps->graph)) {
        free(captured->frontier);
        captured->frontier = NULL;
        return OTHER_GRAPH;
    }
    return reason;
}

/* Why the graph must not be touched; NULL while its capture goes on. The documentation of cuStreamGetCaptureInfo: "The
   graph handle may be invalidated before end of capture for certain errors". */
static const char *capture_is_over(const Stamps *stamps) {
    int status = 0;
    uint64_t id = 0;
    Graph graph = NULL;
    int result = graph_driver.capture_info_with_edges != NULL
                     ? graph_driver.capture_info_with_edges(stamps->origin, &status, &id, &graph, NULL, NULL, NULL)
                     : graph_driver.capture_info(stamps->origin, &status, &id, &graph, NULL, NULL);
    bool goes_on = result == DRIVER_SUCCESS && status == CAPTURE_ACTIVE && id == stamps->capture_id &&
                   graph == stamps->graph;
    return goes_on ? NULL : NOT_CAPTURED;
}

/* begin_stamps(graph id): (number, graph id), by which the functions below know the graph that the current stream captures;
   else why it has no stamps. */
static PyObject *python_begin(PyObject *module, PyObject *graph_id) {
    (void)module;
    int64_t id = PyLong_AsLongLong(graph_id);
    int device = device_is_open() ? device_of_context() : NOT_APPLICABLE;
    Stream stream;
    UserObject object;
    Captured captured;
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    Stamper *stamper = device == NOT_APPLICABLE ? NULL : stamper_of(device);
    if (stamper == NULL || stamper->failure != NULL) {
        return PyUnicode_FromString(NO_CONTEXT);
    }
    if (!current_stream(device, &stream)) {
        return NULL;
    }
    const char *reason = look_at(stream, &captured);
    free(captured.frontier);
    if (reason != NULL) {
        return PyUnicode_FromString(reason);
    }
    Stamps *stamps = unused_stamps();
    if (stamps == NULL) {
        return PyUnicode_FromString(NO_MEMORY);
    }
    stamps->device = device;
    stamps->stamper = stamper;
    stamps->context = stamper->context;
    stamps->session = session_of_stamps;
    stamps->graph_id = id;
    stamps->capture_id = captured.id;
    stamps->graph = captured.graph;
    stamps->origin = stream;
    stamps->counter_node = NULL;
    stamps->next = 0;
    stamps->num_arrived = 0;
    stamps->base = atomic_load_explicit(&stamper->heads[stamps->number], memory_order_acquire);
    atomic_store(&stamps->is_gone, false);
    /* Before any node, so that what the nodes write to lives as long as they do. */
    if (graph_driver.object_create(&object, stamps, graph_is_gone, 1, 1) != DRIVER_SUCCESS) {
        return PyUnicode_FromString(REFUSED);
    }
    atomic_store(&stamps->state, CAPTURING);
    if (graph_driver.retain_object(captured.graph, object, 1, 1) != DRIVER_SUCCESS) {
        atomic_store(&stamps->state, ABANDONED);
        graph_driver.object_release(object, 1);
        return PyUnicode_FromString(REFUSED);
    }
    return Py_BuildValue("iL", stamps->number, (long long)id);
}

/* Converts for PyArg_ParseTuple what begin_stamps has returned to the stamps of its graph: NULL for None, and where the number
   is another graph's by now. */
static int stamps_from_python(PyObject *handle, void *stamps) {
    int number = 0;
    long long graph_id = 0;
    if (handle != Py_None && !PyTuple_Check(handle)) {
        PyErr_SetString(PyExc_TypeError, "stamps are known by (number, graph id), or None");
        return 0;
    }
    if (handle != Py_None && !PyArg_ParseTuple(handle, "iL", &number, &graph_id)) {
        return 0;
    }
    Stamps *of_number = number > 0 && number < atomic_load(&num_graphs) ? graphs[number] : NULL;
    *(Stamps **)stamps = of_number != NULL && of_number->graph_id == graph_id ? of_number : NULL;
    return 1;
}

/* The same, but NULL also where the graph is captured no more. */
static int captured_stamps(PyObject *handle, void *stamps) {
    Stamps *of_graph;
    if (!stamps_from_python(handle, &of_graph)) {
        return 0;
    }
    bool is_captured = of_graph != NULL && atomic_load(&of_graph->state) == CAPTURING &&
                       of_graph->session == session_of_stamps && !atomic_load(&of_graph->is_gone);
    *(Stamps **)stamps = is_captured ? of_graph : NULL;
    return 1;
}

/* close_stamps(stamps, is to be read) */
static PyObject *python_close(PyObject *module, PyObject *arguments) {
    (void)module;
    int is_read;
    Stamps *stamps;
    if (!PyArg_ParseTuple(arguments, "O&p", stamps_from_python, &stamps, &is_read)) {
        return NULL;
    }
    int state = stamps == NULL ? UNUSED : atomic_load(&stamps->state);
    if (state == CAPTURING || (state == READ && !is_read)) {
        /* The thread that reads may have made the number available meanwhile. */
        atomic_compare_exchange_strong(&stamps->state, &state, is_read ? READ : ABANDONED);
    }
    Py_RETURN_NONE;
}

/* ---- nodes --------------------------------------------------------------------------------------------------------- */

static bool was_added_here(const Stamps *stamps, Node node) {
    for (int i = stamps->num_added; i-- > 0;) {
        if (stamps->added_nodes[i] == node) {
            return true;
        }
    }
    return false;
}

static bool is_among(Node node, const Node *nodes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (nodes[i] == node) {
            return true;
        }
    }
    return false;
}

static const char *add_node(Stamps *stamps, Function function, void **arguments, const Node *dependencies, size_t count,
                            Node *node) {
    Node *added = realloc(stamps->added_nodes, (size_t)(stamps->num_added + 1) * sizeof *added);
    if (added == NULL) {
        return NO_MEMORY;
    }
    stamps->added_nodes = added;
    KernelNode kernel = {.function = function, .grid = {1, 1, 1}, .block = {1, 1, 1}, .arguments = arguments};
    if (graph_driver.add_kernel(node, stamps->graph, dependencies, count, &kernel) != DRIVER_SUCCESS) {
        return REFUSED;
    }
    added[stamps->num_added++] = *node;
    union { /* CUlaunchAttributeValue */
        int priority;
        char size[64];
    } value = {0};
    value.priority = stamps->stamper->priority;
    graph_driver.set_attribute(*node, NODE_PRIORITY, &value); /* without it a stamp may be later */
    return NULL;
}

static const char *count_replays(Stamps *stamps) {
    Stamper *stamper = stamps->stamper;
    uint64_t counter = stamper->counters + (uint64_t)stamps->number * sizeof(uint64_t);
    uint64_t head = stamper->heads_address + (uint64_t)stamps->number * sizeof(uint64_t);
    return add_node(stamps, stamper->replay, (void *[]){&counter, &head}, NULL, 0, &stamps->counter_node);
}

/* Adds a stamp that runs when these nodes are over, and gives its position among those of the graph. */
static const char *add_stamp(Stamps *stamps, const Node *nodes, size_t count, int *position) {
    Stamper *stamper = stamps->stamper;
    int page = stamps->num_stamps / STAMPS_PER_PAGE, on_page = stamps->num_stamps % STAMPS_PER_PAGE;
    const char *reason = stamps->counter_node == NULL ? count_replays(stamps) : NULL;
    if (reason != NULL) {
        return reason;
    }
    if (page == stamps->num_pages) {
        Page **pages = realloc(stamps->pages, (size_t)(page + 1) * sizeof *pages);
        Page *taken = pages == NULL ? NULL : stamper_take_page(stamper);
        stamps->pages = pages == NULL ? stamps->pages : pages;
        if (taken == NULL) {
            return NO_MEMORY;
        }
        pages[stamps->num_pages++] = taken;
    }
    Node *dependencies = malloc((count + 1) * sizeof *dependencies), node;
    if (dependencies == NULL) {
        return NO_MEMORY;
    }
    size_t num_dependencies = 0;
    dependencies[num_dependencies++] = stamps->counter_node;
    for (size_t i = 0; i < count; i++) {
        if (!is_among(nodes[i], dependencies, num_dependencies)) {
            dependencies[num_dependencies++] = nodes[i];
        }
    }
    uint64_t counter = stamper->counters + (uint64_t)stamps->number * sizeof(uint64_t);
    uint64_t slots = stamps->pages[page]->address + (uint64_t)on_page * NUM_SLOTS * sizeof(Slot);
    uint32_t mask = NUM_SLOTS - 1;
    reason = add_node(stamps, stamper->stamp, (void *[]){&counter, &slots, &mask}, dependencies, num_dependencies, &node);
    free(dependencies);
    if (reason == NULL) {
        *position = stamps->num_stamps++;
    }
    return reason;
}

static const char *dependencies_of(Node node, Node **dependencies, size_t *count) {
    bool has_edges = graph_driver.dependencies_with_edges != NULL;
    *dependencies = NULL;
    *count = 0;
    int status = has_edges ? graph_driver.dependencies_with_edges(node, NULL, NULL, count)
                           : graph_driver.dependencies(node, NULL, count);
    if (status != DRIVER_SUCCESS) {
        return has_edges ? REFUSED : PROGRAMMATIC;
    }
    Node *nodes = calloc(*count + 1, sizeof *nodes);
    Edge *edges = calloc(*count + 1, sizeof *edges);
    if (nodes != NULL && edges != NULL && *count > 0) {
        status = has_edges ? graph_driver.dependencies_with_edges(node, nodes, edges, count)
                           : graph_driver.dependencies(node, nodes, count);
    }
    bool is_programmatic = false;
    for (size_t i = 0; edges != NULL && i < *count; i++) {
        is_programmatic = is_programmatic || is_programmatic_edge(&edges[i]);
    }
    free(edges);
    if (nodes == NULL || edges == NULL || status != DRIVER_SUCCESS || is_programmatic) {
        free(nodes);
        return nodes == NULL || edges == NULL ? NO_MEMORY : is_programmatic || !has_edges ? PROGRAMMATIC : REFUSED;
    }
    *dependencies = nodes;
    return NULL;
}

/* A list of nodes without repetitions. */
typedef struct {
    Node *nodes; /* allocated */
    size_t count;
} NodeList;

static bool add_to(NodeList *list, Node node) {
    if (is_among(node, list->nodes, list->count)) {
        return true;
    }
    Node *nodes = realloc(list->nodes, (list->count + 1) * sizeof *nodes);
    if (nodes == NULL) {
        return false;
    }
    list->nodes = nodes;
    nodes[list->count++] = node;
    return true;
}

/* What a launch has added to the graph: all nodes, and among them those that do its work. */
typedef struct {
    NodeList every, work;
} Launched;

static void free_launched(Launched *launched) {
    free(launched->every.nodes);
    free(launched->work.nodes);
}

/* The nodes between two counts: they are listed in the order in which they were added, which torch relies on, too. */
static const char *find_launched(const Stamps *stamps, Py_ssize_t first, Py_ssize_t last, Launched *launched) {
    *launched = (Launched){{NULL, 0}, {NULL, 0}};
    if (first < 0 || last <= first) {
        return NO_NODES;
    }
    size_t count = (size_t)last;
    Node *nodes = calloc(count, sizeof *nodes);
    if (nodes == NULL) {
        return NO_MEMORY;
    }
    const char *reason = graph_driver.nodes(stamps->graph, nodes, &count) != DRIVER_SUCCESS ? REFUSED : NULL;
    for (size_t i = (size_t)first; reason == NULL && i < count; i++) {
        reason = was_added_here(stamps, nodes[i]) || add_to(&launched->every, nodes[i]) ? NULL : NO_MEMORY;
    }
    free(nodes);
    /* Kernels, or else copies: NCCL has event nodes and host nodes of its own beside them. */
    for (int wanted = KERNEL_NODE; wanted <= COPY_NODE && launched->work.count == 0; wanted++) {
        for (size_t i = 0; reason == NULL && i < launched->every.count; i++) {
            int type = -1;
            reason = graph_driver.node_type(launched->every.nodes[i], &type) != DRIVER_SUCCESS ? REFUSED : NULL;
            if (reason == NULL && type == wanted && !add_to(&launched->work, launched->every.nodes[i])) {
                reason = NO_MEMORY;
            }
        }
    }
    return reason != NULL ? reason : launched->work.count == 0 ? NO_NODES : NULL;
}

/* What the first of the work waits for, and what of it nothing else of it waits for. */
static const char *edges_of(const NodeList *work, NodeList *before, NodeList *ends, int *num_firsts) {
    bool *has_follower = calloc(work->count + 1, sizeof *has_follower);
    const char *reason = has_follower == NULL ? NO_MEMORY : NULL;
    *num_firsts = 0;
    for (size_t i = 0; reason == NULL && i < work->count; i++) {
        Node *dependencies;
        size_t count;
        bool is_first = true;
        reason = dependencies_of(work->nodes[i], &dependencies, &count);
        for (size_t j = 0; reason == NULL && j < count; j++) {
            for (size_t k = 0; k < work->count; k++) {
                if (work->nodes[k] == dependencies[j]) {
                    has_follower[k] = true;
                    is_first = false;
                }
            }
        }
        *num_firsts += reason == NULL && is_first;
        for (size_t j = 0; reason == NULL && is_first && *num_firsts == 1 && j < count; j++) {
            reason = add_to(before, dependencies[j]) ? NULL : NO_MEMORY;
        }
        free(dependencies);
    }
    for (size_t i = 0; reason == NULL && i < work->count; i++) {
        reason = has_follower[i] || add_to(ends, work->nodes[i]) ? NULL : NO_MEMORY;
    }
    free(has_follower);
    return reason;
}

/* ---- stamps of a communication -------------------------------------------------------------------------------------- */

static PyObject *reason_or(const char *reason, PyObject *result) {
    if (reason == NULL) {
        return result;
    }
    Py_XDECREF(result);
    return PyUnicode_FromString(reason);
}

/* stamps_before(stamps, device): how many nodes the graph has, or why what is launched next has no stamps. */
static PyObject *python_before(PyObject *module, PyObject *arguments) {
    (void)module;
    int device;
    Stamps *stamps;
    if (!PyArg_ParseTuple(arguments, "O&i", captured_stamps, &stamps, &device)) {
        return NULL;
    }
    if (stamps == NULL) {
        return PyUnicode_FromString(NOT_CAPTURED);
    }
    Captured captured;
    size_t count = 0;
    const char *reason = look_into(stamps, device, &captured);
    free(captured.frontier);
    if (reason == NULL && graph_driver.nodes(stamps->graph, NULL, &count) != DRIVER_SUCCESS) {
        reason = REFUSED;
    }
    return reason != NULL ? PyUnicode_FromString(reason) : PyLong_FromSize_t(count);
}

/* stamp_start(stamps, nodes before): (position of the stamp, nodes behind, whether the work has one first node). */
static PyObject *python_start(PyObject *module, PyObject *arguments) {
    (void)module;
    int position = NOT_APPLICABLE, num_firsts = 0;
    Py_ssize_t first;
    Stamps *stamps;
    if (!PyArg_ParseTuple(arguments, "O&n", captured_stamps, &stamps, &first)) {
        return NULL;
    }
    if (stamps == NULL) {
        return PyUnicode_FromString(NOT_CAPTURED);
    }
    size_t last = 0;
    Launched launched = {{NULL, 0}, {NULL, 0}};
    NodeList before = {NULL, 0}, ends = {NULL, 0};
    const char *reason = capture_is_over(stamps);
    if (reason == NULL && graph_driver.nodes(stamps->graph, NULL, &last) != DRIVER_SUCCESS) {
        reason = REFUSED;
    }
    reason = reason != NULL ? reason : find_launched(stamps, first, (Py_ssize_t)last, &launched);
    reason = reason != NULL ? reason : edges_of(&launched.work, &before, &ends, &num_firsts);
    reason = reason != NULL ? reason : add_stamp(stamps, before.nodes, before.count, &position);
    free_launched(&launched);
    free(before.nodes);
    free(ends.nodes);
    PyObject *started =
        reason != NULL ? NULL : Py_BuildValue("inN", position, (Py_ssize_t)last, PyBool_FromLong(num_firsts == 1));
    return reason_or(reason, started);
}

/* Stamps the end of what was launched: its nodes that nothing else of it waits for. */
static const char *stamp_last_nodes(Stamps *stamps, const Launched *launched, int *position) {
    NodeList before = {NULL, 0}, ends = {NULL, 0};
    int num_firsts;
    const char *reason = edges_of(&launched->work, &before, &ends, &num_firsts);
    reason = reason != NULL ? reason : add_stamp(stamps, ends.nodes, ends.count, position);
    free(before.nodes);
    free(ends.nodes);
    return reason;
}

/* stamp_end(stamps, device, nodes before, nodes behind): (the position of a stamp at the end of what was launched, whether
   the stream of the capture's begin has captured it). What the current stream's next node would wait for is preferred. */
static PyObject *python_end_of(PyObject *module, PyObject *arguments) {
    (void)module;
    int device, position = NOT_APPLICABLE;
    Py_ssize_t first, last;
    Stamps *stamps;
    if (!PyArg_ParseTuple(arguments, "O&inn", captured_stamps, &stamps, &device, &first, &last)) {
        return NULL;
    }
    if (stamps == NULL) {
        return PyUnicode_FromString(NOT_CAPTURED);
    }
    Captured captured;
    Launched launched = {{NULL, 0}, {NULL, 0}};
    NodeList on_stream = {NULL, 0};
    bool is_on_origin = false;
    const char *reason = capture_is_over(stamps);
    reason = reason != NULL ? reason : find_launched(stamps, first, last, &launched);
    if (reason == NULL && look_into(stamps, device, &captured) == NULL) {
        for (size_t i = 0; reason == NULL && i < captured.num_frontier; i++) {
            Node node = captured.frontier[i];
            bool is_launched = is_among(node, launched.every.nodes, launched.every.count);
            reason = !is_launched || add_to(&on_stream, node) ? NULL : NO_MEMORY;
        }
        free(captured.frontier);
        is_on_origin = on_stream.count > 0 && captured.stream == stamps->origin;
    }
    if (reason == NULL && on_stream.count > 0) {
        reason = add_stamp(stamps, on_stream.nodes, on_stream.count, &position);
    } else if (reason == NULL) {
        reason = stamp_last_nodes(stamps, &launched, &position);
    }
    free(on_stream.nodes);
    free_launched(&launched);
    return reason_or(reason, reason != NULL ? NULL : Py_BuildValue("iN", position, PyBool_FromLong(is_on_origin)));
}

/* stamps_frontier(stamps, device): the nodes that the current stream's next one waits for, as bytes. */
static PyObject *python_frontier(PyObject *module, PyObject *arguments) {
    (void)module;
    int device;
    Stamps *stamps;
    if (!PyArg_ParseTuple(arguments, "O&i", captured_stamps, &stamps, &device)) {
        return NULL;
    }
    if (stamps == NULL) {
        return PyUnicode_FromString(NOT_CAPTURED);
    }
    Captured captured;
    const char *reason = look_into(stamps, device, &captured);
    PyObject *nodes = reason != NULL ? NULL
                                     : PyBytes_FromStringAndSize((const char *)captured.frontier,
                                                                 (Py_ssize_t)(captured.num_frontier * sizeof(Node)));
    free(captured.frontier);
    return reason_or(reason, nodes);
}

/* stamp_wait(stamps, device, frontier before the wait, nodes before, nodes behind, is the end stamped): the positions of
   stamps where the stream came to the wait, and at the end of what it has waited for, and whether the stream is that of the
   capture's begin: others are not stalled by it, and have no first stamp. -1 where none is needed. */
static PyObject *python_wait(PyObject *module, PyObject *arguments) {
    (void)module;
    int device, has_end, waited_from = NOT_APPLICABLE, end = NOT_APPLICABLE;
    const char *bytes;
    Py_ssize_t num_bytes, first, last;
    Stamps *stamps;
    if (!PyArg_ParseTuple(arguments, "O&iy#nnp", captured_stamps, &stamps, &device, &bytes, &num_bytes, &first, &last,
                          &has_end)) {
        return NULL;
    }
    if (stamps == NULL) {
        return PyUnicode_FromString(NOT_CAPTURED);
    }
    size_t num_before = (size_t)num_bytes / sizeof(Node);
    Node *frontier = copy_nodes((const Node *)bytes, num_before);
    Captured captured;
    NodeList awaited = {NULL, 0};
    const char *reason = look_into(stamps, device, &captured);
    reason = reason == NULL && frontier == NULL ? NO_MEMORY : reason;
    for (size_t i = 0; reason == NULL && i < captured.num_frontier; i++) {
        if (!is_among(captured.frontier[i], frontier, num_before) && !add_to(&awaited, captured.frontier[i])) {
            reason = NO_MEMORY;
        }
    }
    /* The node that the wait has added is the last one of what was waited for. With none it is before what the stream
       has captured already, and the nodes of the launch tell. */
    bool is_on_origin = captured.stream == stamps->origin;
    bool is_stall = is_on_origin && (awaited.count > 0 || !has_end);
    if (reason == NULL && awaited.count > 0 && (is_stall || !has_end)) {
        reason = add_stamp(stamps, awaited.nodes, awaited.count, &end);
    } else if (reason == NULL && !has_end) {
        Launched launched;
        reason = find_launched(stamps, first, last, &launched);
        reason = reason != NULL ? reason : stamp_last_nodes(stamps, &launched, &end);
        free_launched(&launched);
    }
    if (reason == NULL && is_stall) {
        reason = add_stamp(stamps, frontier, num_before, &waited_from);
    }
    free(captured.frontier);
    free(frontier);
    free(awaited.nodes);
    return reason_or(reason, reason != NULL ? NULL : Py_BuildValue("iiN", waited_from, end, PyBool_FromLong(is_on_origin)));
}

/* ---- reading, without the GIL -------------------------------------------------------------------------------------- */

static Slot *slot_of(const Stamps *stamps, int position, uint64_t number) {
    const Page *page = stamps->pages[position / STAMPS_PER_PAGE];
    return &page->slots[(position % STAMPS_PER_PAGE) * NUM_SLOTS + (number & (NUM_SLOTS - 1))];
}

static void add_reading(Reading *reading) {
    size_t size = sizeof *reading + (size_t)reading->num_stamps * sizeof reading->times[0];
    pthread_mutex_lock(&lock);
    bool has_room = bytes_read + size <= MOST_BYTES_READ;
    if (has_room) {
        bytes_read += size;
        *last_reading = reading;
        last_reading = &reading->next;
    }
    pthread_mutex_unlock(&lock);
    if (!has_room) {
        free(reading);
        atomic_fetch_add(&num_lost, 1);
    }
}

/* Reads the next replay of a graph, of which `begun` have begun; false where it goes on. */
static bool read_replay(Stamps *stamps, uint64_t begun, bool is_gone) {
    Stamper *stamper = stamps->stamper;
    _Atomic uint64_t *head = &stamper->heads[stamps->number];
    uint64_t replay = stamps->next, number = stamps->base + replay + 1;
    bool goes_on = replay + 1 == begun && !is_gone;
    if (begun - replay > NUM_SLOTS) {
        atomic_fetch_add(&num_lost, 1);
        return true;
    }
    while (stamps->num_arrived < stamps->num_stamps &&
           atomic_load_explicit(&slot_of(stamps, stamps->num_arrived, number)->number, memory_order_acquire) == number) {
        stamps->num_arrived++;
    }
    if (goes_on && stamps->num_arrived < stamps->num_stamps) {
        return false;
    }
    Reading *reading = malloc(sizeof *reading + (size_t)stamps->num_stamps * sizeof reading->times[0]);
    if (reading == NULL) {
        atomic_fetch_add(&num_lost, 1);
        return true;
    }
    *reading = (Reading){NULL, stamps->graph_id, 0, replay, stamps->num_stamps};
    for (int i = 0; i < stamps->num_stamps; i++) {
        const Slot *slot = slot_of(stamps, i, number);
        bool is_written = atomic_load_explicit(&slot->number, memory_order_acquire) == number;
        uint64_t time = atomic_load_explicit(&slot->time, memory_order_relaxed);
        reading->times[i] = is_written ? stamper_host_time(stamper, time, &reading->error_ns) : NOT_APPLICABLE;
    }
    /* A replay that has begun meanwhile may have written a time into a slot, and its number not yet. */
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(head, memory_order_acquire) - stamps->base - replay > NUM_SLOTS) {
        free(reading);
        atomic_fetch_add(&num_lost, 1);
        return true;
    }
    add_reading(reading);
    return true;
}

/* Whether a replay goes on, or was read. */
static bool read_graph(Stamps *stamps) {
    Stamper *stamper = stamps->stamper;
    bool is_gone = atomic_load(&stamps->is_gone), is_replayed = false;
    if (atomic_load(&stamps->state) == READ && stamps->num_stamps > 0 &&
        stamps->session == session_of_stamps) {
        uint64_t begun = atomic_load_explicit(&stamper->heads[stamps->number], memory_order_acquire) - stamps->base;
        is_replayed = stamps->next < begun;
        while (stamps->next < begun && read_replay(stamps, begun, is_gone)) {
            stamps->next++;
            stamps->num_arrived = 0;
        }
    }
    if (is_gone) {
        recycle(stamps);
    }
    return is_replayed;
}

bool stamps_read(void) {
    bool is_replayed = false;
    int known = atomic_load(&num_graphs);
    for (int number = 1; number < known; number++) {
        int state = atomic_load_explicit(&graphs[number]->state, memory_order_acquire);
        if (state != UNUSED) { /* a graph may be gone while its capture is taken to go on: nobody has closed it */
            is_replayed |= read_graph(graphs[number]);
        }
    }
    return is_replayed;
}

static void free_readings(void) {
    pthread_mutex_lock(&lock);
    Reading *reading = first_reading;
    first_reading = NULL;
    last_reading = &first_reading;
    bytes_read = 0;
    pthread_mutex_unlock(&lock);
    while (reading != NULL) {
        Reading *next = reading->next;
        free(reading);
        reading = next;
    }
}

void stamps_close(void) {
    session_of_stamps++; /* graphs that stay are stamped on, and read no more */
    free_readings();
    atomic_store(&num_lost, 0);
}

void stamps_in_forked_child(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; /* the parent's thread may have had it */
    stampers_in_forked_child();
    session_of_stamps++;
    atomic_store(&num_graphs, 1);
    first_reading = NULL; /* left behind */
    last_reading = &first_reading;
    bytes_read = 0;
}

/* ---- functions for Python ------------------------------------------------------------------------------------------- */

/* take_stamps(): [(graph id, number of the replay, error of the clock in ns, times as bytes)]. */
static PyObject *python_take(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    pthread_mutex_lock(&lock);
    Reading *reading = first_reading;
    first_reading = NULL;
    last_reading = &first_reading;
    bytes_read = 0;
    pthread_mutex_unlock(&lock);
    PyObject *list = PyList_New(0);
    while (reading != NULL) {
        Reading *next = reading->next;
        PyObject *item = list == NULL ? NULL
                                      : Py_BuildValue("LKLy#", (long long)reading->graph_id,
                                                      (unsigned long long)reading->replay, (long long)reading->error_ns,
                                                      (const char *)reading->times,
                                                      (Py_ssize_t)((size_t)reading->num_stamps * sizeof(int64_t)));
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
        free(reading);
        reading = next;
    }
    return list;
}

static PyObject *python_lost(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromLongLong(atomic_load(&num_lost));
}

PyMethodDef stamps_functions[] = {
    {"prepare_stamps", python_prepare, METH_O,
     "Load the kernels on the current device, and test its clock; return why it has no stamps, \"\" if it has."},
    {"begin_stamps", python_begin, METH_O,
     "Return (number, graph id) for the stamps of the graph that the current stream captures, or why it gets none."},
    {"close_stamps", python_close, METH_VARARGS, "End the capture: replays are read from now on, or never."},
    {"stamps_before", python_before, METH_VARARGS,
     "Return how many nodes the graph has before a launch on a device, or why that gets no stamps."},
    {"stamp_start", python_start, METH_VARARGS,
     "Stamp the start of what was launched; return the stamp's position and how many nodes the graph has now."},
    {"stamp_end", python_end_of, METH_VARARGS, "Stamp the end of what was launched; return the stamp's position."},
    {"stamps_frontier", python_frontier, METH_VARARGS, "Return the nodes that the current stream comes from, as bytes."},
    {"stamp_wait", python_wait, METH_VARARGS,
     "Stamp where the stream came to a wait, and the end of what it waited for; return both positions."},
    {"take_stamps", python_take, METH_NOARGS, "Return the times of replays that were read."},
    {"stamps_lost", python_lost, METH_NOARGS, "Return of how many replays the times were lost."},
    {NULL, NULL, 0, NULL},
};
