/* Communications that are under way: what is read of their tensors, who waits for what, and the rows that come of it.

   Methods of process groups, functional operators and torch's hooks (methods.c, operators.c, hooks.c) intercept them.
   Each decides whether a call is of the common kind before anything is counted; Python's path has all others. Nothing
   here raises into training: an error of ours is told to Python, which switches the capture off. */
#include "core.h"

#include <string.h>

_Thread_local bool is_inside;

/* ---- what the module was told ----------------------------------------------------------------------------------- */

PyObject *raw_stream, *current_device; /* functions of torch: device -> stream as a number; () -> device */
PyObject *open_device;                 /* (): opens the device as soon as the job uses one */
PyObject *p2p_codes[4];                /* of dist.send, dist.recv, dist.isend, dist.irecv */
PyObject *forget_in_python;            /* (work): gives up what had its address */
bool times_devices;                    /* tensors of a device are timed by marks; those of the host go to Python */
bool is_capturing;
int session;

static PyObject *tensor_types;      /* a tuple: classes whose attributes run no Python */
static PyObject *plain_types[8];    /* the same, to compare with */
static PyObject *code_of_dtype;     /* dtype -> its code among the names */
static PyObject *wait_failed;       /* (facts, exception): a wait has raised */
static PyObject *waited_on_a_side;  /* (facts, mark, mark): a stream that does not compute has waited, or run it */
static PyObject *python_pending[2]; /* dictionaries of Python's path: Works that it waits for, by their id */
static PyObject *failed;            /* (exception): an error of ours */
static bool is_configured;          /* a recording is under way */
static bool has_captured; /* a communication went into a graph, whose replays are not seen */

static PyObject *name_nbytes, *name_dtype, *name_is_cuda, *name_get_device;

bool is_for_the_job(void) { return error_is_for_the_job(failed); }

bool calls_are_recorded(void) { return is_configured; }

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

PendingTable works, results;

static uint32_t wanted_place(const void *key) {
    return (uint32_t)(((uintptr_t)key >> 4) * 0x9E3779B97F4A7C15ULL >> 40) % PENDING_PLACES;
}

Pending *find_key(PendingTable *table, const void *key) {
    if (table->num_pending == 0) {
        return NULL;
    }
    for (uint32_t i = wanted_place(key); table->places[i].key != NULL; i = (i + 1) % PENDING_PLACES) {
        if (table->places[i].key == key) {
            return &table->places[i];
        }
    }
    return NULL;
}

Pending *find_pending(PendingTable *table, const void *key) {
    Pending *place = find_key(table, key);
    bool is_of_another = place != NULL && place->reference != NULL && PyWeakref_GetObject(place->reference) != key;
    return is_of_another ? NULL : place;
}

Pending take_pending(PendingTable *table, Pending *place) {
    Pending taken = *place;
    uint32_t hole = (uint32_t)(place - table->places), i = hole;
    table->num_pending--;
    /* What lies behind and belongs at the hole or before it moves up, so that searches need no tombstones. */
    for (;;) {
        i = (i + 1) % PENDING_PLACES;
        if (table->places[i].key == NULL) {
            break;
        }
        uint32_t wanted = wanted_place(table->places[i].key);
        if ((i - wanted) % PENDING_PLACES >= (i - hole) % PENDING_PLACES) {
            table->places[hole] = table->places[i];
            hole = i;
        }
    }
    table->places[hole].key = NULL;
    Py_CLEAR(taken.reference);
    return taken;
}

void give_up_call(const Facts *facts, Point start) {
    Happening happening = {
        .facts = *facts,
        .start = start,
        .waited_from = point_shared(start),
        .end = point_shared(start),
        .lane = COMMUNICATION,
        .has_row = true,
        .is_unfinished = true,
    };
    rows_add(&happening);
}

void forget_key(PendingTable *table, const void *key) {
    Pending *place = find_key(table, key);
    if (place != NULL) {
        Pending forgotten = take_pending(table, place);
        give_up_call(&forgotten.facts, forgotten.start);
    }
}

void add_pending(PendingTable *table, const void *key, PyObject *reference, const Facts *facts, Point start) {
    forget_key(table, key);
    if (2 * table->num_pending >= PENDING_PLACES) {
        Py_XDECREF(reference);
        rows_drop(facts->kind);
        point_release(start);
        return;
    }
    uint32_t i = wanted_place(key);
    while (table->places[i].key != NULL) {
        i = (i + 1) % PENDING_PLACES;
    }
    table->places[i] = (Pending){key, reference, *facts, start};
    table->num_pending++;
}

void forget_all(PendingTable *table) {
    for (uint32_t i = 0; table->num_pending > 0 && i < PENDING_PLACES; i++) {
        while (table->places[i].key != NULL) { /* taking one moves others up */
            forget_key(table, table->places[i].key);
        }
    }
}

bool add_facts(PyObject *list, const Facts *facts, Point start) {
    Facts known = *facts; /* making objects may run a finalizer, which waits */
    start = point_shared(start);
    PyObject *item = facts_to_python(&known, start);
    bool is_added = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    point_release(start);
    return is_added;
}

static bool add_table(PyObject *list, const PendingTable *table) {
    for (uint32_t i = 0; table->num_pending > 0 && i < PENDING_PLACES; i++) {
        const Pending *place = &table->places[i];
        if (place->key != NULL && !add_facts(list, &place->facts, place->start)) {
            return false;
        }
    }
    return true;
}

bool is_python_waiting(void) {
    return (python_pending[0] != NULL && PyDict_Size(python_pending[0]) > 0) ||
           (python_pending[1] != NULL && PyDict_Size(python_pending[1]) > 0);
}

void calls_forget_all(void) {
    forget_all(&works);
    forget_all(&results);
    hooks_forget_all();
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static Facts blocked_facts; /* of what this process hands on, or waits for, now: read by the watch for hangs */
static int64_t blocked_since_ns;
static bool is_blocked;

void set_blocked(const Facts *facts, Point start) {
    blocked_facts = *facts;
    blocked_since_ns = point_host_ns(start);
    is_blocked = true;
}

void set_unblocked(void) { is_blocked = false; }

bool attribute_as_int64(PyObject *object, PyObject *name, int64_t *number) {
    PyObject *attribute = PyObject_GetAttr(object, name);
    if (attribute == NULL) {
        return false;
    }
    *number = PyLong_AsLongLong(attribute);
    Py_DECREF(attribute);
    return *number != -1 || PyErr_Occurred() == NULL;
}

bool attribute_is_true(PyObject *object, PyObject *name, bool *truth) {
    PyObject *attribute = PyObject_GetAttr(object, name);
    if (attribute == NULL) {
        return false;
    }
    *truth = attribute == Py_True;
    Py_DECREF(attribute);
    return true;
}

bool is_plain_tensor(PyObject *argument) {
    PyObject *type = (PyObject *)Py_TYPE(argument);
    for (int i = 0; i < 8 && plain_types[i] != NULL; i++) {
        if (plain_types[i] == type) {
            return true;
        }
    }
    return false;
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
    int asked_in = session;
    PyObject *code = call_python(code_of_dtype, dtype, NULL, NULL);
    if (code == NULL) {
        is_for_the_job(); /* tells of it */
        return NOT_APPLICABLE;
    }
    int32_t number = (int32_t)PyLong_AsLong(code);
    Py_DECREF(code);
    if (asked_in != session) { /* Python let another thread end that recording, and begin one with other codes */
        return NOT_APPLICABLE;
    }
    if (num_known < MOST_DTYPES) {
        Py_INCREF(dtype); /* kept: they live as long as torch */
        known[num_known].dtype = dtype;
        known[num_known++].code = number;
    }
    return number;
}

/* Reads the payload and the device of a tensor; false where Python must. */
bool measure_tensor(PyObject *tensor, Call *call) {
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
    if (!times_devices) {
        return true;
    }
    int64_t device;
    if (!attribute_is_true(tensor, name_is_cuda, &call->is_on_device)) {
        return false;
    }
    if (!call->is_on_device) {
        return true;
    }
    PyObject *number = device_is_open() ? PyObject_CallMethodObjArgs(tensor, name_get_device, NULL) : NULL;
    if (number == NULL) {
        return false;
    }
    device = PyLong_AsLong(number);
    Py_DECREF(number);
    call->device = (int)device;
    return device_is_used((int)device);
}

Call new_call(void) { return (Call){.way = SLOW, .device = NOT_APPLICABLE, .session = session}; }

bool start_call(Call *call) {
    Facts *facts = &call->facts;
    const Group *group = call->group;
    Stream stream = NULL;
    if (call->is_on_device) {
        if (device_has_failed() || !current_stream(call->device, &stream)) {
            return false;
        }
        call->start = point_on(call->device, stream);
        if (call->start.mark == NULL) {
            has_captured |= !device_has_failed();
            return false;
        }
    } else {
        call->start = point_of_host();
    }
    facts->id = next_id();
    facts->self_bytes = NOT_APPLICABLE;
    facts->group = group->id;
    facts->group_number = group->number;
    facts->device = call->is_on_device ? call->device : NOT_APPLICABLE;
    if (call->is_on_device) {
        facts->position = group_next_position(call->group, facts->queue_peer, facts->device);
        facts->launched_at = point_host_ns(call->start);
    }
    facts->place = here;
    call->way = RECORD;
    return true;
}

Point mark_on_current_stream(int device) {
    Stream stream;
    return current_stream(device, &stream) ? point_on(device, stream) : point_of_host();
}

Point point_of(const Facts *facts) {
    return facts->device == NOT_APPLICABLE ? point_of_host() : mark_on_current_stream(facts->device);
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
void record_end(Facts facts, Point start, Point waited_from, Point end) {
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

/* A wait has raised; its exception is not set now. */
void report_failure(const Facts *facts, Point start, PyObject *exception) {
    PyObject *known = facts_to_python(facts, start);
    if (known != NULL && wait_failed != NULL && exception != NULL) {
        Py_XDECREF(call_python(wait_failed, known, exception, NULL));
    }
    Py_XDECREF(known);
}

void undo_call(Call *call) {
    if (call->is_counted && call->facts.kind == P2P) {
        group_take_back_message(call->group, call->is_send, call->facts.peer, call->facts.seq);
    } else if (call->is_counted) {
        group_take_back(call->group, call->facts.seq);
    }
    if (call->way == RECORD) {
        point_release(call->start);
        is_blocked = is_blocked && call->session != session;
    }
    Py_CLEAR(call->group);
}

/* ---- functions for Python ---------------------------------------------------------------------------------------- */

void keep(PyObject **place, PyObject *object) {
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
    is_capturing = false;
    num_computing = 0;
    has_step_place = false;
    is_blocked = false;
    forget_latest_end();
    is_configured = true;
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

static PyObject *python_set_capturing(PyObject *module, PyObject *value) {
    (void)module;
    is_capturing = PyObject_IsTrue(value) == 1;
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
    is_configured = is_blocked = false;
    /* Nothing of the recording is kept alive, and a mark that is taken later does not open the device again. */
    PyObject **kept[] = {&open_device, &code_of_dtype, &failed, &wait_failed, &waited_on_a_side, &forget_in_python,
                         &python_pending[0], &python_pending[1]};
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        keep(kept[i], Py_None);
    }
    calls_forget_all();
    Py_RETURN_NONE;
}

PyObject *surrender(PendingTable *table, const void *key) {
    Pending *place = find_pending(table, key);
    if (place == NULL) {
        Py_RETURN_NONE;
    }
    Pending taken = take_pending(table, place);
    PyObject *facts = facts_to_python(&taken.facts, taken.start);
    point_release(taken.start);
    return facts;
}

static PyObject *python_surrender(PyObject *module, PyObject *work) {
    (void)module;
    return surrender(&works, work);
}

static PyObject *python_pending_facts(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
    if (list != NULL && !(add_table(list, &works) && add_table(list, &results) && hooks_add_pending(list))) {
        Py_CLEAR(list);
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

/* end_phase(kind, name, lane, place, start, end, place around it): of span, clear_latest_end and set_place, in one call. */
static PyObject *python_end_phase(PyObject *module, PyObject *const *arguments, Py_ssize_t num_arguments) {
    if (num_arguments != 7) {
        PyErr_SetString(PyExc_TypeError, "end_phase(kind, name, lane, place, start, end, place around it)");
        return NULL;
    }
    Coordinates around;
    PyObject *nothing = coordinates_from_python(arguments[6], &around) ? python_span(module, arguments, 6) : NULL;
    if (nothing != NULL) {
        forget_latest_end();
        here = around;
    }
    return nothing;
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

PyMethodDef calls_functions[] = {
    {"configure", (PyCFunction)(void (*)(void))python_configure, METH_VARARGS | METH_KEYWORDS,
     "Say what a recording needs to know of torch and of Python's path."},
    {"set_recording", python_set_recording, METH_O, "Record calls from now on, or only count them."},
    {"set_capturing", python_set_capturing, METH_O, "Leave all calls to Python while a graph is captured."},
    {"set_place", python_set_place, METH_O, "Say where training is: (step, microbatch, chunk, stage)."},
    {"set_computing", python_set_computing, METH_VARARGS,
     "Say by marks which streams compute, and whether the step's is among them."},
    {"end", python_end, METH_NOARGS, "Pass all calls on from now on, and give up what nobody has waited for."},
    {"surrender", python_surrender, METH_O, "Return the facts of a Work's communication, which is Python's now; or None."},
    {"pending", python_pending_facts, METH_NOARGS, "Return the facts of communications that nobody has waited for."},
    {"blocked", python_blocked, METH_NOARGS, "Return the facts of what is being handed on or waited for; or None."},
    {"latest_end", python_latest_end, METH_NOARGS, "Return the mark at the end of the latest stall; or None."},
    {"clear_latest_end", python_clear_latest_end, METH_NOARGS, "Forget that mark: a step begins."},
    {"end_phase", (PyCFunction)(void (*)(void))python_end_phase, METH_FASTCALL,
     "Record a phase, like span, forget the latest end of a stall, and go back to the place around the phase."},
    {"is_inside", python_is_inside, METH_NOARGS, "Return whether this thread is in a call that has been counted."},
    {"set_inside", python_set_inside, METH_O, "Say so for Python's path."},
    {"saw_capture", python_saw_capture, METH_NOARGS,
     "Return whether a communication was captured into a graph since the last call."},
    {NULL, NULL, 0, NULL},
};

int calls_init(void) {
    const InternedName names[] = {
        {&name_nbytes, "nbytes"},
        {&name_dtype, "dtype"},
        {&name_is_cuda, "is_cuda"},
        {&name_get_device, "get_device"},
    };
    return intern_names(names, sizeof names / sizeof names[0]) ? 0 : -1;
}
