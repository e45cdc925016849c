/* The methods of ProcessGroup and Work, with what is recorded of a call around the original.

   A call of the common kind (positional arguments, one plain tensor, a known group) is recorded here, in a microsecond.
   Any other goes to `slow`: the method of Python's path, which records and calls the original itself. Which of the two
   it is, is decided before anything is counted. Nothing here raises into training: an error of ours is swallowed and
   counted, and one of the original's is handed on. */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

enum { COLLECTIVE = 6, P2P = 7 };
enum { COMMUNICATION = 2 };

_Thread_local bool is_inside;

/* ---- what the module was told ----------------------------------------------------------------------------------- */

PyObject *raw_stream, *current_device; /* functions of torch: device -> stream as a number; () -> device */
PyObject *open_device;                 /* (): opens the device as soon as the job uses one */

static PyObject *tensor_types;     /* a tuple: classes whose attributes run no Python */
static PyObject *plain_types[8];   /* the same, to compare with */
static PyObject *p2p_codes[4];     /* of dist.send, dist.recv, dist.isend, dist.irecv */
static PyObject *code_of_dtype;    /* dtype -> its code among the names */
static PyObject *wait_failed;      /* (facts, exception): a wait has raised */
static PyObject *waited_on_a_side; /* (facts, mark, mark): a stream that does not compute has waited, or run it */
static PyObject *python_pending[2]; /* dictionaries of Python's path: Works that it waits for, by their id */
static PyObject *failed;            /* (exception): an error of ours */
static PyObject *forget_in_python;  /* (work): gives up what had its address */
static bool times_devices;         /* tensors of a device are timed by marks; those of the host go to Python */
static bool has_captured; /* a communication went into a graph, whose replays are not seen */
static int session;                 /* number of the recording: methods of an earlier one pass their calls on */

static PyObject *name_nbytes, *name_dtype, *name_is_cuda, *name_get_device, *name_async, *name_root, *name_back,
    *name_code, *name_func;

bool is_for_the_job(void) { return error_is_for_the_job(failed); }

/* ---- streams that compute --------------------------------------------------------------------------------------- */

/* Those of the step's begin and of the phases that are open: a wait of another stream is no stall of the job. */
typedef struct {
    int device;
    Stream stream;
} Place;

enum { MOST_PLACES = 32 };
static Place computing[MOST_PLACES];
static int num_computing;
static bool has_step_place;

static bool computes(Point end) {
    if (end.mark == NULL) {
        return true;
    }
    for (int i = 0; i < num_computing; i++) {
        if (computing[i].device == end.mark->device && computing[i].stream == end.mark->stream) {
            return true;
        }
    }
    return end.mark->stream == NULL && !has_step_place; /* the default stream */
}

bool current_stream(int device, Stream *stream) {
    static PyObject *numbers[MOST_DEVICES];
    if (device < 0 || device >= MOST_DEVICES || raw_stream == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the current stream of the device is not known");
        return false;
    }
    if (numbers[device] == NULL && (numbers[device] = PyLong_FromLong(device)) == NULL) {
        return false;
    }
    PyObject *handle = PyObject_CallFunctionObjArgs(raw_stream, numbers[device], NULL);
    if (handle == NULL) {
        return false;
    }
    *stream = (Stream)(uintptr_t)PyLong_AsUnsignedLongLong(handle);
    Py_DECREF(handle);
    return PyErr_Occurred() == NULL;
}

/* ---- communications without a wait ------------------------------------------------------------------------------ */

typedef struct {
    PyObject *work;      /* an address only: a Work is not kept alive */
    PyObject *reference; /* a weak one to it, as another Work may get the address; NULL where there can be none */
    Facts facts;
    Point start;
} Pending;

enum { PENDING_PLACES = 1 << 13 };
static Pending pending[PENDING_PLACES]; /* by the address of the Work, with linear probing */
static int num_pending;

static uint32_t pending_place(const void *work) {
    return (uint32_t)(((uintptr_t)work >> 4) * 0x9E3779B97F4A7C15ULL >> 40) % PENDING_PLACES;
}

/* What has the address of a Work: its communication, or one whose Work is gone. */
static Pending *find_address(const PyObject *work) {
    if (num_pending == 0) {
        return NULL;
    }
    for (uint32_t i = pending_place(work); pending[i].work != NULL; i = (i + 1) % PENDING_PLACES) {
        if (pending[i].work == work) {
            return &pending[i];
        }
    }
    return NULL;
}

static Pending *find_pending(const PyObject *work) {
    Pending *place = find_address(work);
    bool is_of_another = place != NULL && place->reference != NULL && PyWeakref_GetObject(place->reference) != work;
    return is_of_another ? NULL : place;
}

static Pending take_pending(Pending *place) {
    Pending taken = *place;
    uint32_t hole = (uint32_t)(place - pending), i = hole;
    num_pending--;
    /* What lies behind and belongs at the hole or before it moves up, so that searches need no tombstones. */
    for (;;) {
        i = (i + 1) % PENDING_PLACES;
        if (pending[i].work == NULL) {
            break;
        }
        uint32_t wanted = pending_place(pending[i].work);
        if ((i - wanted) % PENDING_PLACES >= (i - hole) % PENDING_PLACES) {
            pending[hole] = pending[i];
            hole = i;
        }
    }
    pending[hole].work = NULL;
    return taken;
}

/* A communication that nobody has waited for: its end was not seen. */
static void give_up(Pending forgotten) {
    Py_XDECREF(forgotten.reference);
    Happening happening = {
        .facts = forgotten.facts,
        .start = forgotten.start,
        .waited_from = point_shared(forgotten.start),
        .end = point_shared(forgotten.start),
        .lane = COMMUNICATION,
        .has_row = true,
        .is_unfinished = true,
    };
    rows_add(&happening);
}

static void forget(PyObject *work) {
    Pending *place = find_address(work);
    if (place != NULL) {
        give_up(take_pending(place));
    }
}

static bool is_python_waiting(void) {
    return (python_pending[0] != NULL && PyDict_Size(python_pending[0]) > 0) ||
           (python_pending[1] != NULL && PyDict_Size(python_pending[1]) > 0);
}

/* What had the address of this Work, which is new, is gone: its wait would be taken for the other's. */
static void forget_everywhere(PyObject *work) {
    forget(work);
    if (is_python_waiting() && forget_in_python != NULL) {
        Py_XDECREF(call_python(forget_in_python, work, NULL, NULL));
    }
}

static void remember(PyObject *work, Facts facts, Point start) {
    forget_everywhere(work);
    if (2 * num_pending >= PENDING_PLACES) {
        rows_drop(facts.kind);
        point_release(start);
        return;
    }
    PyObject *reference = PyWeakref_NewRef(work, NULL);
    if (reference == NULL) {
        PyErr_Clear(); /* a class of Works without weak references */
    }
    uint32_t i = pending_place(work);
    while (pending[i].work != NULL) {
        i = (i + 1) % PENDING_PLACES;
    }
    pending[i] = (Pending){work, reference, facts, start};
    num_pending++;
}

void methods_forget_all(void) {
    for (uint32_t i = 0; i < PENDING_PLACES; i++) {
        if (pending[i].work != NULL) {
            Pending forgotten = pending[i];
            pending[i].work = NULL;
            give_up(forgotten);
        }
    }
    num_pending = 0;
}

/* ---- the callable ------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    PyObject *original; /* as it stood in the class */
    PyObject *function; /* the function in it, which takes the object as its first argument */
    PyObject *slow;
    int operation, name;
    int tensor, options, splits; /* positions of arguments; the object is 0; splits: of the first of two, 0 for none */
    int session;
    int is_wait, is_p2p, is_send, has_root;
} Method;

/* What is known of a call before the original runs. */
typedef struct {
    enum { PASS, SLOW, RECORD } way;
    Group *group;
    Facts facts;
    Point start;
    int session; /* when it began: the recording may end, and another one begin, meanwhile */
    bool is_counted, is_on_device;
    int device;
    PyObject *work; /* of a wait */
} Call;

static Facts blocked_facts; /* of what this process hands on, or waits for, now: read by the watch for hangs */
static int64_t blocked_since_ns;
static bool is_blocked;

static void set_blocked(const Facts *facts, Point start) {
    blocked_facts = *facts;
    blocked_since_ns = point_host_ns(start);
    is_blocked = true;
}

static bool attribute_as_int64(PyObject *object, PyObject *name, int64_t *number) {
    PyObject *attribute = PyObject_GetAttr(object, name);
    if (attribute == NULL) {
        return false;
    }
    *number = PyLong_AsLongLong(attribute);
    Py_DECREF(attribute);
    return *number != -1 || PyErr_Occurred() == NULL;
}

static bool attribute_is_true(PyObject *object, PyObject *name, bool *truth) {
    PyObject *attribute = PyObject_GetAttr(object, name);
    if (attribute == NULL) {
        return false;
    }
    *truth = attribute == Py_True;
    Py_DECREF(attribute);
    return true;
}

static bool is_empty(PyObject *splits) {
    return splits == Py_None || (PyList_Check(splits) && PyList_Size(splits) == 0);
}

/* The one tensor of a call, or NULL where it is of another kind. Borrowed. */
static PyObject *plain_tensor(PyObject *argument) {
    if (PyList_CheckExact(argument)) {
        if (PyList_Size(argument) != 1) {
            return NULL;
        }
        argument = PyList_GetItem(argument, 0);
    }
    PyObject *type = (PyObject *)Py_TYPE(argument);
    for (int i = 0; i < 8 && plain_types[i] != NULL; i++) {
        if (plain_types[i] == type) {
            return argument;
        }
    }
    return NULL;
}

static bool is_code(PyObject *code, int first, int second) {
    return code != NULL && (code == p2p_codes[first] || code == p2p_codes[second]);
}

/* dist.send and dist.recv call isend and irecv, and wait; what calls those itself gets the Work. */
static bool is_async_message(void) {
    PyFrameObject *frame = PyEval_GetFrame(); /* borrowed */
    if (frame == NULL) {
        return true;
    }
    PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    bool is_synchronous = is_code(code, 0, 1);
    if (is_code(code, 2, 3)) {
        PyObject *caller = PyObject_GetAttr((PyObject *)frame, name_back);
        PyObject *code_of_caller = caller == NULL || caller == Py_None ? NULL : PyObject_GetAttr(caller, name_code);
        is_synchronous = is_code(code_of_caller, 0, 1);
        Py_XDECREF(code_of_caller);
        Py_XDECREF(caller);
    }
    Py_DECREF(code);
    return !is_synchronous;
}

/* Codes of dtypes, which Python gives: there are few. */
static int32_t dtype_code(PyObject *dtype) {
    enum { MOST_DTYPES = 64 };
    static struct {
        PyObject *dtype;
        int32_t code;
    } known[MOST_DTYPES];
    static int num_known, known_in;
    if (known_in != session) { /* a new recording has new codes */
        known_in = session;
        num_known = 0;
    }
    for (int i = 0; i < num_known; i++) {
        if (known[i].dtype == dtype) {
            return known[i].code;
        }
    }
    if (code_of_dtype == NULL) { /* the recording has ended within this call */
        return NOT_APPLICABLE;
    }
    PyObject *code = call_python(code_of_dtype, dtype, NULL, NULL);
    if (code == NULL) {
        is_for_the_job(); /* tells of it */
        return NOT_APPLICABLE;
    }
    int32_t number = (int32_t)PyLong_AsLong(code);
    Py_DECREF(code);
    if (num_known < MOST_DTYPES && known_in == session) {
        Py_INCREF(dtype); /* kept: they live as long as torch */
        known[num_known].dtype = dtype;
        known[num_known++].code = number;
    }
    return number;
}

/* Reads the payload and the device of a tensor; false where Python must. */
static bool measure_tensor(PyObject *tensor, Call *call) {
    PyObject *dtype;
    Facts *facts = &call->facts;
    if (!attribute_as_int64(tensor, name_nbytes, &facts->num_bytes)) { /* not defined of sparse tensors */
        return false;
    }
    dtype = PyObject_GetAttr(tensor, name_dtype);
    if (dtype == NULL) {
        return false;
    }
    facts->dtype = dtype_code(dtype);
    Py_DECREF(dtype);
    if (PyErr_Occurred() != NULL) {
        return false;
    }
    bool is_on_device = false;
    if (times_devices) {
        int64_t device;
        if (!attribute_is_true(tensor, name_is_cuda, &is_on_device) || !is_on_device || !device_is_open()) {
            return false;
        }
        PyObject *number = PyObject_CallMethodObjArgs(tensor, name_get_device, NULL);
        if (number == NULL) {
            return false;
        }
        device = PyLong_AsLong(number);
        Py_DECREF(number);
        if (!device_is_used((int)device)) {
            return false;
        }
        call->device = (int)device;
    }
    call->is_on_device = is_on_device;
    return true;
}

static bool measure(PyObject *argument, Call *call) {
    PyObject *tensor = plain_tensor(argument);
    if (tensor == NULL) {
        return false;
    }
    Py_INCREF(tensor); /* Python may change the list in which it is */
    bool is_measured = measure_tensor(tensor, call);
    Py_DECREF(tensor);
    return is_measured;
}

static bool read_peer(const Method *method, PyObject *options, PyObject *const *arguments, Py_ssize_t num_arguments,
                      Group *group, int32_t *peer, int64_t *tag) {
    int64_t rank = NOT_APPLICABLE;
    *tag = 0;
    if (method->is_p2p) {
        rank = PyLong_AsLongLong(arguments[method->options]);
        if (num_arguments <= method->options + 1) {
            return false;
        }
        *tag = PyLong_AsLongLong(arguments[method->options + 1]);
        if (PyErr_Occurred() != NULL) {
            return false;
        }
    } else if (method->has_root) {
        if (!attribute_as_int64(options, name_root, &rank)) {
            return false;
        }
    } else {
        *peer = NOT_APPLICABLE;
        return true;
    }
    if (rank < 0 || rank >= group->num_ranks) {
        return false; /* torch refuses it: Python's path knows what to do */
    }
    *peer = group->ranks[rank];
    return true;
}

/* What is ours before a launch. An exception may be set where the way is SLOW: it is ours. */
static Call before_launch(const Method *method, PyObject *const *arguments, Py_ssize_t num_arguments) {
    Call call = {.way = SLOW, .device = NOT_APPLICABLE, .session = session};
    PyObject *options = NULL;
    bool is_async = true;
    int32_t peer;
    int64_t tag;
    Group *group = group_of(arguments[0]);
    if (group == NULL || group->is_slow || (method->is_p2p && group->has_slow_messages) ||
        method->tensor >= num_arguments || method->options >= num_arguments) {
        return call;
    }
    if (method->splits != 0 && (!is_empty(arguments[method->splits]) || !is_empty(arguments[method->splits + 1]))) {
        return call;
    }
    /* What is read of arguments may run Python (a mode of torch functions), in which the recording may end. */
    Py_INCREF(group);
    call.group = group;
    options = arguments[method->options];
    if (!method->is_p2p && !attribute_is_true(options, name_async, &is_async)) {
        return call;
    }
    if (!method->is_p2p && is_async && !times_devices) {
        return call; /* a callback of its future tells its end */
    }
    if (!read_peer(method, options, arguments, num_arguments, group, &peer, &tag) ||
        !measure(arguments[method->tensor], &call) || session != call.session) {
        return call;
    }
    is_async = method->is_p2p ? is_async_message() : is_async;
    Facts *facts = &call.facts;
    facts->seq = method->is_p2p ? group_next_message(group, method->is_send, peer, tag) : group_next_collective(group);
    facts->peer = peer;
    call.is_counted = true;
    call.way = PASS;
    if (!is_recording || (group->is_skipped && !method->is_p2p)) {
        return call;
    }
    Stream stream = NULL;
    if (call.is_on_device) {
        if (device_has_failed() || !current_stream(call.device, &stream)) {
            return call;
        }
        call.start = point_on(call.device, stream);
        if (call.start.mark == NULL) {
            has_captured |= !device_has_failed();
            return call;
        }
    } else {
        call.start = point_of_host();
    }
    facts->id = next_id();
    facts->self_bytes = NOT_APPLICABLE;
    facts->group = group->id;
    facts->operation = method->operation;
    facts->name = method->name;
    facts->group_number = group->number;
    facts->queue_peer = method->is_p2p && group->has_stream_per_pair ? peer : NOT_APPLICABLE;
    facts->device = call.is_on_device ? call.device : NOT_APPLICABLE;
    if (call.is_on_device) {
        facts->position = group_next_position(group, facts->queue_peer, facts->device);
        facts->launched_at = point_host_ns(call.start);
    }
    facts->place = here;
    facts->kind = method->is_p2p ? P2P : COLLECTIVE;
    facts->is_async = is_async;
    call.way = RECORD;
    set_blocked(facts, call.start);
    return call;
}

static Point mark_on_current_stream(int device) {
    Stream stream;
    return current_stream(device, &stream) ? point_on(device, stream) : point_of_host();
}

/* The stream on which it ran, or which waited for it, does not compute: Python remembers what it has passed. */
static void report_side_stream(const Facts *facts, Point start, Point waited_from, Point end) {
    PyObject *known = facts_to_python(facts, start), *first = NULL, *last = NULL, *nothing = NULL;
    if (known != NULL && (first = point_to_python(waited_from)) != NULL && (last = point_to_python(end)) != NULL) {
        nothing = call_python(waited_on_a_side, known, first, last);
    }
    Py_XDECREF(known);
    Py_XDECREF(first);
    Py_XDECREF(last);
    Py_XDECREF(nothing);
}

static Point latest_end;
static bool has_latest_end;

static void forget_latest_end(void) {
    if (has_latest_end) {
        has_latest_end = false;
        point_release(latest_end);
    }
}

static void set_latest_end(Point end) {
    forget_latest_end();
    latest_end = point_shared(end);
    has_latest_end = true;
}

/* Records a communication that has ended, as far as streams are concerned, with the stall on it. */
static void record_end(Facts facts, Point start, Point waited_from, Point end) {
    bool is_stall = computes(end);
    if (!is_stall && waited_on_a_side != NULL) {
        report_side_stream(&facts, start, waited_from, end);
    }
    if (is_stall) {
        set_latest_end(end);
    }
    Happening happening = {
        .facts = facts,
        .place_of_stall = here,
        .start = start,
        .waited_from = waited_from,
        .end = end,
        .lane = COMMUNICATION,
        .has_row = true,
        .has_stall = is_stall,
    };
    rows_add(&happening);
}

static void after_launch(const Method *method, Call *call, PyObject *work) {
    Facts *facts = &call->facts;
    facts->returned_at = call->is_on_device ? host_ns() : 0;
    bool ran_here = work == Py_None;
    if (call->is_on_device && !ran_here && call->group->returns_work && !method->is_p2p && !facts->is_async) {
        forget_everywhere(work); /* the wait for this one finds the stream behind it already */
        ran_here = true;
    }
    if (!ran_here) {
        remember(work, *facts, call->start);
        return;
    }
    facts->on_job_stream = call->is_on_device;
    Point end = call->is_on_device ? mark_on_current_stream(call->device) : point_of_host();
    record_end(*facts, call->start, point_shared(call->start), end);
}

static Call before_wait(PyObject *work) {
    Call call = {.way = PASS, .work = work, .device = NOT_APPLICABLE, .session = session};
    Pending *place = find_pending(work);
    if (place == NULL) {
        call.way = is_python_waiting() ? SLOW : PASS;
        return call;
    }
    call.facts = place->facts;
    call.is_on_device = place->facts.device != NOT_APPLICABLE;
    call.way = RECORD;
    set_blocked(&call.facts, place->start);
    if (call.is_on_device) {
        call.start = mark_on_current_stream(call.facts.device); /* may run Python */
    } else {
        /* The caller of a synchronous operation does nothing between its launch and its wait. */
        call.start = call.facts.is_async ? point_of_host() : place->start;
    }
    return call;
}

static void after_wait(Call *call) {
    Pending *place = find_pending(call->work);
    if (place == NULL || place->facts.id != call->facts.id) { /* another thread has waited for it, and recorded that */
        point_release(call->start);
        return;
    }
    Pending ended = take_pending(place);
    Py_XDECREF(ended.reference);
    Point end = call->is_on_device ? mark_on_current_stream(ended.facts.device) : point_of_host();
    record_end(ended.facts, ended.start, call->start, end);
}

/* A wait has raised; its exception is not set now. */
static void report_failure(const Call *call, PyObject *exception) {
    Pending *place = find_pending(call->work);
    PyObject *facts = facts_to_python(&call->facts, place == NULL ? call->start : place->start);
    if (facts != NULL && wait_failed != NULL && exception != NULL) {
        Py_XDECREF(call_python(wait_failed, facts, exception, NULL));
    }
    Py_XDECREF(facts);
}

static void take_back(const Method *method, const Call *call) {
    if (method->is_p2p) {
        group_take_back_message(call->group, method->is_send, call->facts.peer, call->facts.seq);
    } else {
        group_take_back(call->group, call->facts.seq);
    }
}

static PyObject *forward(PyObject *function, PyObject *const *arguments, Py_ssize_t num_arguments, PyObject *names) {
    PyObject *tuple = PyTuple_New(num_arguments), *keywords = NULL, *result = NULL;
    for (Py_ssize_t i = 0; tuple != NULL && i < num_arguments; i++) {
        Py_INCREF(arguments[i]);
        PyTuple_SetItem(tuple, i, arguments[i]);
    }
    bool is_ready = tuple != NULL;
    if (is_ready && names != NULL) {
        keywords = PyDict_New();
        is_ready = keywords != NULL;
        for (Py_ssize_t i = 0; is_ready && i < PyTuple_Size(names); i++) {
            is_ready = PyDict_SetItem(keywords, PyTuple_GetItem(names, i), arguments[num_arguments + i]) == 0;
        }
    }
    if (is_ready) {
        result = PyObject_Call(function, tuple, keywords);
    }
    Py_XDECREF(tuple);
    Py_XDECREF(keywords);
    return result;
}

static PyObject *pass_on(const Method *method, PyObject *function, PyObject *const *arguments,
                         Py_ssize_t num_arguments, PyObject *names) {
    PyObject *result = forward(function, arguments, num_arguments, names);
    if (result == NULL || result == Py_None || method->is_wait) {
        return result;
    }
    if (function == method->slow) { /* it has cared for Python's own */
        forget(result);
    } else {
        forget_everywhere(result);
    }
    return result;
}

/* Takes back what was done before a call that is not made, or was refused. */
static void undo(const Method *method, Call *call) {
    if (call->is_counted) {
        take_back(method, call);
    }
    if (call->way == RECORD) {
        point_release(call->start);
        is_blocked = is_blocked && call->session != session;
    }
    Py_CLEAR(call->group);
}

/* What is ours after the original; `exception` is what it raised, where there is no result. */
static void finish(const Method *method, Call *call, PyObject *result, PyObject *exception) {
    bool is_ours = call->way == RECORD && call->session == session;
    if (result != NULL && is_ours) {
        is_blocked = false;
        if (method->is_wait) {
            after_wait(call);
        } else {
            after_launch(method, call, result);
        }
        Py_CLEAR(call->group);
        return;
    }
    if (result == NULL && is_ours && method->is_wait) {
        report_failure(call, exception);
    }
    call->is_counted = call->is_counted && result == NULL;
    undo(method, call);
}

static PyObject *call_method(PyObject *self, PyObject *const *arguments, Py_ssize_t num_arguments, PyObject *names) {
    const Method *method = (const Method *)self;
    if (names != NULL && PyTuple_Size(names) == 0) {
        names = NULL;
    }
    if (method->session != session || num_arguments == 0) { /* without an object, the original has something to say */
        return forward(method->function, arguments, num_arguments, names);
    }
    Call call = {.way = SLOW};
    if (method->is_wait) {
        call = before_wait(arguments[0]);
    } else if (names == NULL) {
        call = before_launch(method, arguments, num_arguments);
    }
    if (call.way == SLOW && PyErr_Occurred() != NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear(); /* arguments that could not be read: Python's path knows what to say */
    }
    if (is_for_the_job()) {
        undo(method, &call);
        return NULL;
    }
    if (call.way == SLOW) {
        undo(method, &call);
        return pass_on(method, method->slow, arguments, num_arguments, names);
    }
    bool was_inside = is_inside;
    is_inside = is_inside || !method->is_wait;
    PyObject *result = call.way == PASS ? pass_on(method, method->function, arguments, num_arguments, names)
                                        : forward(method->function, arguments, num_arguments, names);
    is_inside = was_inside;
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    if (result == NULL) {
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
    }
    finish(method, &call, result, value);
    if (is_for_the_job()) { /* what ends the program goes before what the original gave */
        Py_CLEAR(result);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    } else if (result == NULL) {
        PyErr_Restore(type, value, traceback);
    }
    return result;
}

/* ---- the class Method, and functions made of it ------------------------------------------------------------------ */

static PyObject *method_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"original", "slow",   "operation", "name",     "tensor",     "options", "splits",
                            "is_wait",  "is_p2p", "is_send",   "has_root", NULL};
    PyObject *original, *slow;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Method *method = (Method *)allocate(type, 0);
    if (method == NULL) {
        return NULL;
    }
    method->operation = method->name = NOT_APPLICABLE;
    method->tensor = 1;
    method->options = 2;
    method->session = session;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO|iiiiipppp", names, &original, &slow, &method->operation,
                                     &method->name, &method->tensor, &method->options, &method->splits,
                                     &method->is_wait, &method->is_p2p, &method->is_send, &method->has_root)) {
        Py_DECREF((PyObject *)method);
        return NULL;
    }
    Py_INCREF(original);
    Py_INCREF(slow);
    method->original = original;
    method->slow = slow;
    method->function = PyObject_GetAttr(original, name_func); /* of pybind's instancemethod */
    if (method->function == NULL) {
        PyErr_Clear();
        Py_INCREF(original);
        method->function = original;
    }
    return (PyObject *)method;
}

static int method_traverse(PyObject *self, visitproc visit, void *arg) {
    Method *method = (Method *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(method->original);
    Py_VISIT(method->function);
    Py_VISIT(method->slow);
    return 0;
}

static int method_clear(PyObject *self) {
    Method *method = (Method *)self;
    Py_CLEAR(method->original);
    Py_CLEAR(method->function);
    Py_CLEAR(method->slow);
    return 0;
}

static void method_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    method_clear(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Definitions outlive their functions. They are kept for ever, and used again by the next recording. */
static PyMethodDef *definition_of(const char *name, const char *doc) {
    typedef struct Definition {
        PyMethodDef definition;
        struct Definition *next;
    } Definition;
    static Definition *known;
    for (Definition *entry = known; entry != NULL; entry = entry->next) {
        const char *its_doc = entry->definition.ml_doc;
        bool has_doc = doc == NULL || its_doc == NULL ? doc == its_doc : strcmp(doc, its_doc) == 0;
        if (has_doc && strcmp(name, entry->definition.ml_name) == 0) {
            return &entry->definition;
        }
    }
    Definition *entry = calloc(1, sizeof *entry);
    if (entry == NULL) {
        return NULL;
    }
    entry->definition = (PyMethodDef){
        .ml_name = strdup(name),
        .ml_meth = (PyCFunction)(void (*)(void))call_method,
        .ml_flags = METH_FASTCALL | METH_KEYWORDS,
        .ml_doc = doc == NULL ? NULL : strdup(doc),
    };
    entry->next = known;
    known = entry;
    return &entry->definition;
}

/* A function of C with the name of the original, as pybind's own are: to Dynamo, profilers and debuggers a call of it
   looks as before. A descriptor of a class of our own would crash compiled code, which binds none but these. */
static PyObject *method_function(PyObject *self, PyObject *unused) {
    (void)unused;
    Method *method = (Method *)self;
    PyObject *name = PyObject_GetAttrString(method->original, "__name__");
    PyObject *doc = PyObject_GetAttrString(method->original, "__doc__");
    PyObject *module = PyObject_GetAttrString(method->original, "__module__");
    const char *name_text = name == NULL ? NULL : PyUnicode_AsUTF8AndSize(name, NULL);
    const char *doc_text = doc == NULL || doc == Py_None ? NULL : PyUnicode_AsUTF8AndSize(doc, NULL);
    PyErr_Clear();
    PyMethodDef *definition = name_text == NULL ? NULL : definition_of(name_text, doc_text);
    PyObject *function = NULL;
    if (definition == NULL) {
        PyErr_SetString(PyExc_TypeError, "the original has no name");
    } else {
        function = PyCFunction_NewEx(definition, self, module);
    }
    Py_XDECREF(name);
    Py_XDECREF(doc);
    Py_XDECREF(module);
    return function;
}

static PyMethodDef method_methods[] = {
    {"function", method_function, METH_NOARGS, "Return a function of C that records a call of the original."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef method_members[] = {
    {"__wrapped__", T_OBJECT_EX, offsetof(Method, original), READONLY, "the original"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot method_slots[] = {
    {Py_tp_new, method_new},         {Py_tp_dealloc, method_dealloc}, {Py_tp_traverse, method_traverse},
    {Py_tp_clear, method_clear},     {Py_tp_methods, method_methods}, {Py_tp_members, method_members},
    {Py_tp_doc, "A method of ProcessGroup or Work, and what is recorded of its calls."}, {0, NULL},
};

static PyType_Spec method_spec = {"commtrace._native.core.Method", sizeof(Method), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, method_slots};

/* ---- functions for Python ---------------------------------------------------------------------------------------- */

static void keep(PyObject **place, PyObject *object) {
    PyObject *before = *place;
    object = object == Py_None ? NULL : object;
    Py_XINCREF(object);
    *place = object;
    Py_XDECREF(before);
}

static PyObject *python_configure(PyObject *module, PyObject *arguments, PyObject *keywords) {
    (void)module;
    static char *names[] = {"tensor_types",     "p2p_codes",     "code_of_dtype", "failed",
                            "wait_failed",      "waited_on_a_side", "pending",    "forget_in_python",
                            "times_devices",    "raw_stream",    "current_device", "open_device",
                            NULL};
    PyObject *types, *codes, *dtypes, *fails, *failed_wait, *aside, *waiting, *forgets, *stream, *device, *opener;
    int timed;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!O!OOOOO!OpOOO", names, &PyTuple_Type, &types, &PyTuple_Type,
                                     &codes, &dtypes, &fails, &failed_wait, &aside, &PyTuple_Type, &waiting, &forgets,
                                     &timed, &stream, &device, &opener)) {
        return NULL;
    }
    if (PyTuple_Size(codes) != 4 || PyTuple_Size(waiting) != 2) {
        PyErr_SetString(PyExc_ValueError, "p2p_codes has four items, pending has two");
        return NULL;
    }
    keep(&tensor_types, types);
    for (Py_ssize_t i = 0; i < 8; i++) {
        plain_types[i] = i < PyTuple_Size(types) ? PyTuple_GetItem(types, i) : NULL;
    }
    for (int i = 0; i < 4; i++) {
        keep(&p2p_codes[i], PyTuple_GetItem(codes, i));
    }
    for (int i = 0; i < 2; i++) {
        keep(&python_pending[i], PyTuple_GetItem(waiting, i));
    }
    keep(&code_of_dtype, dtypes);
    keep(&failed, fails);
    keep(&wait_failed, failed_wait);
    keep(&waited_on_a_side, aside);
    keep(&forget_in_python, forgets);
    keep(&raw_stream, stream);
    keep(&current_device, device);
    keep(&open_device, opener);
    times_devices = timed;
    num_computing = 0;
    has_step_place = false;
    is_blocked = false;
    forget_latest_end();
    session++;
    Py_RETURN_NONE;
}

static PyObject *python_set_recording(PyObject *module, PyObject *value) {
    (void)module;
    bool was_recording = is_recording;
    is_recording = PyObject_IsTrue(value) == 1;
    num_pauses += is_recording && !was_recording;
    Py_RETURN_NONE;
}

static PyObject *python_set_place(PyObject *module, PyObject *place) {
    (void)module;
    Coordinates coordinates;
    if (!coordinates_from_python(place, &coordinates)) {
        return NULL;
    }
    here = coordinates;
    Py_RETURN_NONE;
}

static PyObject *python_set_computing(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *marks;
    int has_step;
    if (!PyArg_ParseTuple(arguments, "O!p", &PyTuple_Type, &marks, &has_step)) {
        return NULL;
    }
    num_computing = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(marks) && num_computing < MOST_PLACES; i++) {
        Point point;
        if (!point_from_python(PyTuple_GetItem(marks, i), &point)) {
            return NULL;
        }
        if (point.mark != NULL) {
            computing[num_computing++] = (Place){point.mark->device, point.mark->stream};
        }
        point_release(point);
    }
    has_step_place = has_step;
    Py_RETURN_NONE;
}

static PyObject *python_end(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    session++;
    is_blocked = false;
    /* Nothing of the recording is kept alive, and a mark that is taken later does not open the device again. */
    PyObject **kept[] = {&open_device, &code_of_dtype, &failed, &wait_failed, &waited_on_a_side, &forget_in_python,
                         &python_pending[0], &python_pending[1]};
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        keep(kept[i], Py_None);
    }
    methods_forget_all();
    Py_RETURN_NONE;
}

static PyObject *python_surrender(PyObject *module, PyObject *work) {
    (void)module;
    Pending *place = find_pending(work);
    if (place == NULL) {
        Py_RETURN_NONE;
    }
    Pending taken = take_pending(place);
    Py_XDECREF(taken.reference);
    PyObject *facts = facts_to_python(&taken.facts, taken.start);
    point_release(taken.start);
    return facts;
}

static PyObject *python_pending_facts(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && num_pending > 0 && i < PENDING_PLACES; i++) {
        if (pending[i].work == NULL) {
            continue;
        }
        Facts known = pending[i].facts; /* making objects may run a finalizer, which waits */
        PyObject *facts = facts_to_python(&known, pending[i].start);
        if (facts == NULL || PyList_Append(list, facts) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(facts);
    }
    return list;
}

static PyObject *python_blocked(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    if (!is_blocked) {
        Py_RETURN_NONE;
    }
    Facts known = blocked_facts;
    return facts_to_python(&known, (Point){NULL, blocked_since_ns});
}

static PyObject *python_latest_end(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    if (!has_latest_end) {
        Py_RETURN_NONE;
    }
    return point_to_python(latest_end);
}

static PyObject *python_clear_latest_end(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    forget_latest_end();
    Py_RETURN_NONE;
}

static PyObject *python_is_inside(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(is_inside);
}

static PyObject *python_set_inside(PyObject *module, PyObject *value) {
    (void)module;
    is_inside = PyObject_IsTrue(value) == 1;
    Py_RETURN_NONE;
}

static PyObject *python_saw_capture(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    bool saw = has_captured;
    has_captured = false;
    return PyBool_FromLong(saw);
}

PyMethodDef methods_functions[] = {
    {"configure", (PyCFunction)(void (*)(void))python_configure, METH_VARARGS | METH_KEYWORDS,
     "Say what a recording needs to know of torch and of Python's path."},
    {"set_recording", python_set_recording, METH_O, "Record calls from now on, or only count them."},
    {"set_place", python_set_place, METH_O, "Say where training is: (step, microbatch, chunk, stage)."},
    {"set_computing", python_set_computing, METH_VARARGS,
     "Say by marks which streams compute, and whether the step's is among them."},
    {"end", python_end, METH_NOARGS, "Pass all calls on from now on, and give up what nobody has waited for."},
    {"surrender", python_surrender, METH_O, "Return the facts of a Work's communication, which is Python's now; or None."},
    {"pending", python_pending_facts, METH_NOARGS, "Return the facts of communications that nobody has waited for."},
    {"blocked", python_blocked, METH_NOARGS, "Return the facts of what is being handed on or waited for; or None."},
    {"latest_end", python_latest_end, METH_NOARGS, "Return the mark at the end of the latest stall; or None."},
    {"clear_latest_end", python_clear_latest_end, METH_NOARGS, "Forget that mark: a step begins."},
    {"is_inside", python_is_inside, METH_NOARGS, "Return whether this thread is in a call that has been counted."},
    {"set_inside", python_set_inside, METH_O, "Say so for Python's path."},
    {"saw_capture", python_saw_capture, METH_NOARGS,
     "Return whether a communication was captured into a graph since the last call."},
    {NULL, NULL, 0, NULL},
};

int methods_init(PyObject *module) {
    struct {
        PyObject **place;
        const char *name;
    } names[] = {
        {&name_nbytes, "nbytes"},  {&name_dtype, "dtype"},   {&name_is_cuda, "is_cuda"},
        {&name_async, "asyncOp"},  {&name_root, "rootRank"}, {&name_get_device, "get_device"},
        {&name_back, "f_back"},    {&name_code, "f_code"},   {&name_func, "__func__"},
    };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        *names[i].place = PyUnicode_InternFromString(names[i].name);
        if (*names[i].place == NULL) {
            return -1;
        }
    }
    PyObject *method_type = PyType_FromSpec(&method_spec);
    return method_type == NULL ? -1 : PyModule_AddObject(module, "Method", method_type);
}
