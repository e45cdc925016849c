/* torch's hooks of process groups (torch 2.14 and later), and the buckets that DistributedDataParallel's reducer sends.

   torch calls a pre-hook before, and a post-hook after, each operation of a group, whoever issues it. What a method or an
   operator has counted passes by. The reducer's buckets are recorded here: one operation, one plain tensor, in a backward.
   All else goes to `slow`, of Python's path: see commtrace/capture/collectives/cpp_communication.py.

   The end of a bucket of the host's tensors is not told: its Work is asked whether it is over when the next one is sent. */
#include "core.h"

#include <pthread.h>
#include <string.h>

enum {
    MOST_ISSUING = 8,
    MOST_BUCKETS = 1000, /* that are remembered: a backend may never say that they are over */
    BUCKET_PLACES = 1024,
};

/* ---- what a recording says ---------------------------------------------------------------------------------------- */

static PyObject *failed;         /* (exception): an error of ours */
static PyObject *graph_task;     /* () -> the backward pass in which this thread is; -1 for none */
static PyObject *current_node;   /* () -> the node of autograd that runs in this thread; None for none */
static PyObject *begin_backward; /* (task): the reducer has sent its first bucket in this pass */
static int64_t all_reduce = NOT_APPLICABLE; /* the number of the operation among torch's hooks */
static int operation, name;
static int recording;            /* hooks of other recordings do nothing; 0: none does */
static int num_recordings_so_far;
static bool watches_reducer;     /* there is a DistributedDataParallel */
static bool watches_futures;     /* it may wait, in a backward, for the futures of what Python has sent */

static PyObject *name_operation, *name_op_id, *name_inputs, *name_work, *name_is_completed, *name_is_meta, *name_name;

/* ---- buckets ------------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject *work; /* a reference, until it is over; NULL on a device, whose streams tell */
    Facts facts;
    Point start;
} Bucket;

typedef struct {
    Bucket places[BUCKET_PLACES];
    uint32_t first, num;
} Ring; /* oldest first */

static Ring on_host, on_device;

/* The last one that was sent in the latest backward. */
static struct {
    Facts facts;
    Point start;
    int64_t end_ns; /* 0 until it was seen to be over */
    bool is_known;
} latest;
static int64_t latest_task = NOT_APPLICABLE;

static Bucket *bucket_at(Ring *ring, uint32_t index) { return &ring->places[(ring->first + index) % BUCKET_PLACES]; }

static Bucket take_first(Ring *ring) {
    Bucket bucket = *bucket_at(ring, 0);
    ring->first = (ring->first + 1) % BUCKET_PLACES;
    ring->num--;
    return bucket;
}

static Bucket take_last(Ring *ring) { return *bucket_at(ring, --ring->num); }

static void give_up_bucket(Bucket bucket) {
    give_up_call(&bucket.facts, bucket.start);
    Py_XDECREF(bucket.work); /* last: it may run Python */
}

static void put_first(Ring *ring, Bucket bucket) {
    if (ring->num == BUCKET_PLACES) { /* other threads have sent as many since it was taken */
        give_up_bucket(bucket);
        return;
    }
    ring->first = (ring->first + BUCKET_PLACES - 1) % BUCKET_PLACES;
    ring->num++;
    *bucket_at(ring, 0) = bucket;
}

static void put_last(Ring *ring, Bucket bucket) {
    while (ring->num >= MOST_BUCKETS) {
        give_up_bucket(take_first(ring));
    }
    *bucket_at(ring, ring->num++) = bucket;
}

static void forget_latest(void) {
    if (latest.is_known) {
        latest.is_known = false;
        point_release(latest.start);
    }
}

static void set_latest(const Facts *facts, Point start) {
    forget_latest();
    latest.facts = *facts;
    latest.start = point_shared(start);
    latest.end_ns = 0;
    latest.is_known = true;
}

/* Records a bucket that is over at this time, or was before. */
static void record_over(const Bucket *bucket, Point end) {
    Happening happening = {
        .facts = bucket->facts,
        .start = bucket->start,
        .waited_from = point_shared(bucket->start),
        .end = end,
        .lane = COMMUNICATION,
        .has_row = true,
        .is_end_late = true,
    };
    if (latest.is_known && latest.facts.id == bucket->facts.id) {
        latest.end_ns = end.ns;
    }
    rows_add(&happening);
}

/* 1 if a Work is over, 0 if not, -1 with an exception. It lets other threads run, and may run Python. */
static int is_completed(PyObject *work) {
    PyObject *answer = PyObject_CallMethodObjArgs(work, name_is_completed, NULL);
    int is_over = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return is_over;
}

/* Records the buckets that are over by now. What runs behind one that goes on is not asked. False with an exception. */
static bool ask_buckets(void) {
    Point end = {NULL, 0};
    while (on_host.num > 0) {
        Bucket bucket = take_first(&on_host); /* so that no other thread asks it meanwhile */
        int is_over = is_completed(bucket.work);
        if (is_over != 1) {
            put_first(&on_host, bucket);
            return is_over == 0;
        }
        end = end.ns == 0 ? point_of_host() : end;
        record_over(&bucket, end);
        Py_DECREF(bucket.work);
    }
    return true;
}

void hooks_forget_all(void) {
    Ring *rings[] = {&on_host, &on_device};
    for (int i = 0; i < 2; i++) {
        while (rings[i]->num > 0) {
            give_up_bucket(take_first(rings[i]));
        }
    }
    forget_latest();
    latest_task = NOT_APPLICABLE;
}

bool hooks_add_pending(PyObject *list) {
    for (uint32_t i = 0; i < on_device.num; i++) {
        const Bucket *bucket = bucket_at(&on_device, i);
        if (!add_facts(list, &bucket->facts, bucket->start)) {
            return false;
        }
    }
    for (uint32_t i = 0; i < on_host.num; i++) {
        Bucket bucket = *bucket_at(&on_host, i);
        bucket.start = point_shared(bucket.start);
        Py_INCREF(bucket.work);
        int is_over = is_completed(bucket.work);
        bool is_added = is_over == 1 || (is_over == 0 && add_facts(list, &bucket.facts, bucket.start));
        point_release(bucket.start);
        Py_DECREF(bucket.work);
        if (!is_added) {
            return false;
        }
    }
    return true;
}

/* ---- between the pre-hook and the post-hook --------------------------------------------------------------------------- */

typedef struct {
    int64_t op_id, task;
    int recording;
    Call call;
} Issuing;

static _Thread_local Issuing issuing[MOST_ISSUING]; /* the innermost last; what was refused stays until the next is over */
static _Thread_local int num_issuing, depth;
static _Thread_local bool waits_in_cpp; /* it is in a function of C++ that communicates and waits, not in a reducer */

static void drop_issuing(int from, int to) {
    for (int i = from; i < to; i++) {
        issuing[i].call.is_counted = false;
        undo_call(&issuing[i].call);
    }
}

static void push_issuing(int64_t op_id, int64_t task, Call call) {
    if (num_issuing == MOST_ISSUING) {
        drop_issuing(0, 1);
        memmove(&issuing[0], &issuing[1], (MOST_ISSUING - 1) * sizeof issuing[0]);
        num_issuing--;
    }
    issuing[num_issuing++] = (Issuing){op_id, task, recording, call};
}

/* Numbers are a group's, and what was refused in an earlier recording may still be there. */
static bool pop_issuing(const Group *group, int64_t op_id, Issuing *popped) {
    for (int i = num_issuing - 1; i >= 0; i--) {
        if (issuing[i].op_id == op_id && issuing[i].call.group == group && issuing[i].recording == recording) {
            *popped = issuing[i];
            drop_issuing(i + 1, num_issuing); /* refused: they had no post-hook */
            num_issuing = i;
            return true;
        }
    }
    return false;
}

/* ---- the hooks ------------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    Group *group; /* its numbers: a hook that held the process group would keep it alive */
    PyObject *slow;
    int recording;
    int is_post;
} GroupHook;

bool current_pass(int64_t *task) {
    PyObject *result = PyObject_CallFunctionObjArgs(graph_task, NULL);
    *task = result == NULL ? -1 : PyLong_AsLongLong(result);
    Py_XDECREF(result);
    return *task != -1 || PyErr_Occurred() == NULL;
}

bool buckets_are_watched(void) { return recording != 0 && watches_reducer && !waits_in_cpp; }

bool futures_are_watched(void) { return watches_futures; }

void enter_hook(void) { depth++; }

void leave_hook(void) { depth--; }

bool hook_error_is_for_the_job(void) { return error_is_for_the_job(failed); }

/* A reducer sends where a gradient is accumulated, or behind all nodes of a backward. False, too, with an exception. */
static bool is_of_the_reducer(void) {
    static PyTypeObject *accumulates; /* torch's class, which lives as long as it */
    PyObject *node = PyObject_CallFunctionObjArgs(current_node, NULL);
    if (node == NULL) {
        return false;
    }
    bool is_reducers = node == Py_None || Py_TYPE(node) == accumulates;
    if (!is_reducers) {
        PyObject *its_name = PyObject_GetAttr((PyObject *)Py_TYPE(node), name_name);
        is_reducers = its_name != NULL && PyUnicode_CompareWithASCIIString(its_name, "AccumulateGrad") == 0;
        Py_XDECREF(its_name);
        if (is_reducers) {
            accumulates = Py_TYPE(node);
            Py_INCREF(accumulates);
        }
    }
    Py_DECREF(node);
    return is_reducers;
}

/* The tensor of an operation that has one, plain and real; NULL where it has none. A new reference. */
static PyObject *only_tensor(PyObject *arguments) {
    PyObject *inputs = PyObject_GetAttr(arguments, name_inputs), *tensor = NULL;
    bool is_meta = true;
    if (inputs != NULL && PyList_CheckExact(inputs) && PyList_Size(inputs) == 1) {
        tensor = PyList_GetItem(inputs, 0);
        Py_INCREF(tensor);
        if (!is_plain_tensor(tensor) || !attribute_is_true(tensor, name_is_meta, &is_meta) || is_meta) {
            Py_CLEAR(tensor);
        }
    }
    Py_XDECREF(inputs);
    return tensor;
}

void begin_bucket(Group *group, Call *call) {
    Py_INCREF(group);
    call->group = group;
    call->way = PASS;
    call->facts.kind = COLLECTIVE;
    if (is_recording && !group->is_skipped) {
        call->facts.operation = operation;
        call->facts.name = name;
        call->facts.peer = NOT_APPLICABLE;
        call->facts.queue_peer = NOT_APPLICABLE;
        call->facts.is_async = true;
        start_call(call);
    }
}

/* Takes what is known of a bucket before it is sent: SLOW for what is none, or is uncommon. */
static Call before_bucket(const GroupHook *hook, PyObject *arguments) {
    Call call = new_call();
    int64_t number;
    if (is_capturing || hook->group->is_slow || !attribute_as_int64(arguments, name_operation, &number) || number != all_reduce ||
        !is_of_the_reducer()) {
        return call;
    }
    PyObject *tensor = only_tensor(arguments);
    bool is_measured = tensor != NULL && measure_tensor(tensor, &call);
    Py_XDECREF(tensor);
    if (!is_measured || session != call.session || hook->recording != recording) {
        return call;
    }
    begin_bucket(hook->group, &call);
    return call;
}

static void pre(const GroupHook *hook, PyObject *arguments, bool *is_slow) {
    int64_t task, op_id;
    *is_slow = !is_inside || watches_futures;
    if (!watches_reducer || waits_in_cpp) {
        return;
    }
    if (!current_pass(&task) || task == -1) {
        *is_slow = !is_inside;
        return;
    }
    if (is_inside || !attribute_as_int64(arguments, name_op_id, &op_id)) {
        return;
    }
    Call call = before_bucket(hook, arguments);
    if (call.way == SLOW) {
        undo_call(&call);
        return;
    }
    *is_slow = false;
    push_issuing(op_id, task, call);
}

void bucket_sent(Call *call, int64_t task, PyObject *work) {
    call->facts.returned_at = call->is_on_device ? host_ns() : 0;
    if (task != latest_task) {
        latest_task = task;
        forget_latest();
        PyObject *number = PyLong_FromLongLong(task);
        PyObject *nothing = number == NULL ? NULL : call_python(begin_backward, number, NULL, NULL);
        Py_XDECREF(number);
        if (nothing == NULL) {
            give_up_call(&call->facts, call->start);
            return;
        }
        Py_DECREF(nothing);
    }
    set_latest(&call->facts, call->start);
    if (!call->is_on_device) {
        ask_buckets();
        Py_INCREF(work);
    }
    Bucket bucket = {call->is_on_device ? NULL : work, call->facts, call->start};
    put_last(call->is_on_device ? &on_device : &on_host, bucket);
}

static void post(const GroupHook *hook, PyObject *arguments, bool *is_slow) {
    int64_t op_id;
    Issuing sent;
    *is_slow = true;
    if (num_issuing == 0 || !attribute_as_int64(arguments, name_op_id, &op_id) || !pop_issuing(hook->group, op_id, &sent)) {
        return;
    }
    *is_slow = false;
    Call *call = &sent.call;
    PyObject *work = NULL;
    if (call->session == session) {
        call->facts.seq = group_next_collective(call->group); /* here: what is refused takes no number */
        work = call->way == RECORD ? PyObject_GetAttr(arguments, name_work) : NULL;
    }
    if (work == NULL) {
        undo_call(call);
        return;
    }
    bucket_sent(call, sent.task, work);
    Py_DECREF(work);
    Py_CLEAR(call->group);
}

static PyObject *hook_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
    (void)keywords;
    const GroupHook *hook = (const GroupHook *)self;
    if (recording == 0 || hook->recording != recording || (is_inside && !watches_futures) ||
        PyTuple_Size(arguments) != 1) {
        Py_RETURN_NONE;
    }
    if (is_inside && hook->is_post) {
        Py_RETURN_NONE;
    }
    bool is_slow;
    depth++; /* before anything that may run Python, which may end the recording */
    (hook->is_post ? post : pre)(hook, PyTuple_GetItem(arguments, 0), &is_slow);
    if (is_slow) {
        clear_exception(); /* arguments that could not be read: Python's path knows what to say */
    }
    bool ends_program = error_is_for_the_job(failed);
    PyObject *nothing = NULL;
    if (!ends_program && is_slow && recording != 0 && hook->recording == recording) {
        nothing = call_python(hook->slow, PyTuple_GetItem(arguments, 0), NULL, NULL);
        ends_program = nothing == NULL;
        Py_XDECREF(nothing);
    }
    depth--;
    if (ends_program) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *hook_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"counters", "slow", "is_post", NULL};
    PyObject *counters, *slow;
    int is_post;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!Op", names, group_type, &counters, &slow, &is_post)) {
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    GroupHook *hook = (GroupHook *)allocate(type, 0);
    if (hook != NULL) {
        Py_INCREF(counters);
        Py_INCREF(slow);
        hook->group = (Group *)counters;
        hook->slow = slow;
        hook->recording = recording;
        hook->is_post = is_post;
    }
    return (PyObject *)hook;
}

static int hook_traverse(PyObject *self, visitproc visit, void *arg) {
    GroupHook *hook = (GroupHook *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT((PyObject *)hook->group);
    Py_VISIT(hook->slow);
    return 0;
}

static int hook_clear(PyObject *self) {
    GroupHook *hook = (GroupHook *)self;
    Py_CLEAR(hook->slow);
    return 0;
}

static void hook_dealloc(PyObject *self) {
    PyObject *group = (PyObject *)((GroupHook *)self)->group;
    object_dealloc(self);
    Py_XDECREF(group); /* not cleared: until it is gone, a hook may be called */
}

static PyType_Slot hook_slots[] = {
    {Py_tp_new, hook_new},           {Py_tp_dealloc, hook_dealloc}, {Py_tp_traverse, hook_traverse},
    {Py_tp_clear, hook_clear},       {Py_tp_call, hook_call},
    {Py_tp_doc, "A hook of a process group, before or after each of its operations."}, {0, NULL},
};

static PyType_Spec hook_spec = {"commtrace._native.core.GroupHook", sizeof(GroupHook), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, hook_slots};

/* ---- functions for Python ------------------------------------------------------------------------------------------ */

static PyObject **kept[] = {&failed, &graph_task, &current_node, &begin_backward};

static PyObject *python_configure_hooks(PyObject *module, PyObject *arguments, PyObject *keywords) {
    (void)module;
    static char *names[] = {"failed",     "graph_task", "current_node", "begin_backward",
                            "all_reduce", "operation",  "name",         NULL};
    PyObject *given[4];
    long long number;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOOLii", names, &given[0], &given[1], &given[2], &given[3],
                                     &number, &operation, &name)) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        keep(kept[i], given[i]);
    }
    all_reduce = number;
    if (depth == 0) { /* what was refused in an earlier recording; in a hook it may be under way */
        drop_issuing(0, num_issuing);
        num_issuing = 0;
    }
    recording = ++num_recordings_so_far;
    Py_RETURN_NONE;
}

static PyObject *python_end_hooks(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    recording = 0;
    watches_reducer = watches_futures = false;
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        keep(kept[i], Py_None);
    }
    Py_RETURN_NONE;
}

static PyObject *python_watch_reducer(PyObject *module, PyObject *arguments) {
    (void)module;
    int is_to_be_watched, with_futures;
    if (!PyArg_ParseTuple(arguments, "pp", &is_to_be_watched, &with_futures)) {
        return NULL;
    }
    watches_reducer = is_to_be_watched;
    watches_futures = is_to_be_watched && with_futures;
    Py_RETURN_NONE;
}

static PyObject *none_or_error(void) {
    if (error_is_for_the_job(failed)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *python_ask_buckets(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    ask_buckets();
    return none_or_error();
}

static PyObject *python_latest_bucket(PyObject *module, PyObject *task) {
    (void)module;
    int64_t number = PyLong_AsLongLong(task);
    if (number == -1 && PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (!latest.is_known || number != latest_task) {
        Py_RETURN_NONE;
    }
    PyObject *facts = facts_to_python(&latest.facts, latest.start);
    return facts == NULL ? NULL : Py_BuildValue("NL", facts, (long long)latest.end_ns);
}

static PyObject *python_take_bucket(PyObject *module, PyObject *id) {
    (void)module;
    long long number = PyLong_AsLongLong(id);
    if (number == -1 && PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (on_host.num == 0 || bucket_at(&on_host, on_host.num - 1)->facts.id != number) {
        Py_RETURN_NONE;
    }
    Bucket bucket = take_last(&on_host);
    point_release(bucket.start);
    return bucket.work;
}

static bool is_behind_latest(const Facts *facts) {
    return latest.is_known && facts->group_number == latest.facts.group_number && facts->device == latest.facts.device &&
           facts->queue_peer == latest.facts.queue_peer;
}

/* buckets_waited(start, end, is_stall): of the communicator that has run the latest one on a device. The last one first: the others ended before it did. */
static PyObject *python_buckets_waited(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *first, *last;
    int is_stall;
    Point start, end;
    if (!PyArg_ParseTuple(arguments, "OOp", &first, &last, &is_stall) || !point_from_python(first, &start)) {
        return NULL;
    }
    if (!point_from_python(last, &end)) {
        point_release(start);
        return NULL;
    }
    bool has_stall = is_stall;
    uint32_t num_kept = 0; /* at the end of the ring: of other communicators */
    for (uint32_t i = on_device.num; i-- > 0;) {
        Bucket bucket = *bucket_at(&on_device, i);
        if (!is_behind_latest(&bucket.facts)) {
            num_kept++;
            *bucket_at(&on_device, on_device.num - num_kept) = bucket;
            continue;
        }
        Happening happening = {
            .facts = bucket.facts,
            .place_of_stall = here,
            .start = bucket.start,
            .waited_from = point_shared(start),
            .end = point_shared(end),
            .lane = COMMUNICATION,
            .has_row = true,
            .has_stall = has_stall,
        };
        has_stall = false;
        rows_add(&happening);
    }
    on_device.first = (on_device.first + on_device.num - num_kept) % BUCKET_PLACES;
    on_device.num = num_kept;
    point_release(start);
    point_release(end);
    Py_RETURN_NONE;
}

static PyObject *python_forget_buckets(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    ask_buckets();
    hooks_forget_all();
    return none_or_error();
}

static PyObject *python_waits_in_cpp(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(waits_in_cpp);
}

static PyObject *python_set_waits_in_cpp(PyObject *module, PyObject *value) {
    (void)module;
    waits_in_cpp = PyObject_IsTrue(value) == 1;
    Py_RETURN_NONE;
}

static PyObject *python_is_in_hook(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(depth > 0 || num_issuing > 0);
}

PyMethodDef hooks_functions[] = {
    {"configure_hooks", (PyCFunction)(void (*)(void))python_configure_hooks, METH_VARARGS | METH_KEYWORDS,
     "Say what hooks need to know of torch and of Python's path. Those that are made from now on are of this recording."},
    {"end_hooks", python_end_hooks, METH_NOARGS, "Have hooks do nothing from now on."},
    {"watch_reducer", python_watch_reducer, METH_VARARGS,
     "Say whether there is a DistributedDataParallel, and whether its waits for futures are to be told."},
    {"ask_buckets", python_ask_buckets, METH_NOARGS, "Record the buckets that are over by now."},
    {"latest_bucket", python_latest_bucket, METH_O,
     "Return the last bucket of a backward pass: (facts, when it was seen to be over or 0); None if that is not the "
     "latest pass."},
    {"take_bucket", python_take_bucket, METH_O,
     "Return the Work of the last bucket, which is Python's now; None if that is over, or not the one with this id."},
    {"buckets_waited", python_buckets_waited, METH_VARARGS,
     "Record, between two marks, the wait for the latest bucket on a device and those before it; the stall is its or not."},
    {"forget_buckets", python_forget_buckets, METH_NOARGS, "Record what is over, and the rest without an end."},
    {"waits_in_cpp", python_waits_in_cpp, METH_NOARGS,
     "Return whether this thread is in a function of C++ that communicates and waits."},
    {"set_waits_in_cpp", python_set_waits_in_cpp, METH_O, "Say so for Python's path."},
    {"is_in_hook", python_is_in_hook, METH_NOARGS, "Return whether this thread is in a hook, or between two of them."},
    {NULL, NULL, 0, NULL},
};

static void in_forked_child(void) {
    on_host.num = on_device.num = 0; /* their Works are the parent's: nothing is asked of them, not even to free them */
    latest.is_known = false;
    latest_task = NOT_APPLICABLE;
}

int hooks_init(PyObject *module) {
    const InternedName names[] = {
        {&name_operation, "name"}, {&name_op_id, "op_id"}, {&name_inputs, "input_tensors"},
        {&name_work, "work"}, {&name_is_completed, "is_completed"}, {&name_is_meta, "is_meta"},
        {&name_name, "__name__"},
    };
    if (!intern_names(names, sizeof names / sizeof names[0])) {
        return -1;
    }
    static bool is_prepared;
    if (!is_prepared && pthread_atfork(NULL, NULL, in_forked_child) != 0) {
        PyErr_NoMemory();
        return -1;
    }
    is_prepared = true;
    PyObject *hook_type = PyType_FromSpec(&hook_spec);
    return hook_type == NULL ? -1 : PyModule_AddObject(module, "GroupHook", hook_type);
}
