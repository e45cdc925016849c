/* The methods of ProcessGroup and Work, with what is recorded of a call around the original.

   A call of the common kind (positional arguments, one plain tensor, a known group) is recorded here, in a microsecond.
   Any other goes to `slow`: the method of Python's path, which records and calls the original itself. Which of the two
   it is, is decided before anything is counted. */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

static PyObject *name_async, *name_root, *name_back, *name_code, *name_func;

/* What had the address of this Work, which is new, is gone: its wait would be taken for the other's. */
static void forget_everywhere(PyObject *work) {
    forget_key(&works, work);
    if (is_python_waiting() && forget_in_python != NULL) {
        Py_XDECREF(call_python(forget_in_python, work, NULL, NULL));
    }
}

static void remember(PyObject *work, const Facts *facts, Point start) {
    forget_everywhere(work);
    PyObject *reference = PyWeakref_NewRef(work, NULL);
    if (reference == NULL) {
        PyErr_Clear(); /* a class of Works without weak references */
    }
    add_pending(&works, work, reference, facts, start);
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

static bool is_empty(PyObject *splits) {
    return splits == Py_None || (PyList_Check(splits) && PyList_Size(splits) == 0);
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

/* The one tensor of a call, which may be in a list; NULL where it is of another kind. Borrowed. */
static PyObject *plain_tensor(PyObject *argument) {
    if (PyList_CheckExact(argument)) {
        if (PyList_Size(argument) != 1) {
            return NULL;
        }
        argument = PyList_GetItem(argument, 0);
    }
    return is_plain_tensor(argument) ? argument : NULL;
}

static bool measure(PyObject *argument, Call *call) {
    PyObject *tensor = plain_tensor(argument);
    if (tensor == NULL) {
        return false;
    }
    Py_INCREF(tensor); /* Python may change the list in which it is */
    bool is_measured = measure_tensor(tensor, call);
    Py_DECREF(tensor);
    return is_measured && call->is_on_device == times_devices; /* beside a device, Python knows what the host stalls */
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
    Call call = new_call();
    PyObject *options = NULL;
    bool is_async = true;
    int32_t peer;
    int64_t tag;
    Group *group = group_of(arguments[0]);
    if (is_capturing || group == NULL || group->is_slow || (method->is_p2p && group->has_slow_messages) ||
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
    facts->kind = method->is_p2p ? P2P : COLLECTIVE;
    call.is_send = method->is_send;
    call.is_counted = true;
    call.way = PASS;
    if (!is_recording || (group->is_skipped && !method->is_p2p)) {
        return call;
    }
    facts->operation = method->operation;
    facts->name = method->name;
    facts->queue_peer = method->is_p2p && group->has_stream_per_pair ? peer : NOT_APPLICABLE;
    facts->is_async = is_async;
    if (start_call(&call)) {
        set_blocked(facts, call.start);
    }
    return call;
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
        remember(work, facts, call->start);
        return;
    }
    facts->on_job_stream = call->is_on_device;
    Point end = call->is_on_device ? mark_on_current_stream(call->device) : point_of_host();
    record_end(*facts, call->start, point_shared(call->start), end);
}

static Call before_wait(PyObject *work) {
    Call call = new_call();
    Pending *place = find_pending(&works, work);
    if (place == NULL) {
        call.way = is_python_waiting() ? SLOW : PASS;
        return call;
    }
    call.key = work;
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
    Pending *place = find_pending(&works, call->key);
    if (place == NULL || place->facts.id != call->facts.id) { /* another thread has waited for it, and recorded that */
        point_release(call->start);
        return;
    }
    Pending ended = take_pending(&works, place);
    Point end = call->is_on_device ? mark_on_current_stream(ended.facts.device) : point_of_host();
    record_end(ended.facts, ended.start, call->start, end);
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
        forget_key(&works, result);
    } else {
        forget_everywhere(result);
    }
    return result;
}

/* What is ours after the original; `exception` is what it raised, where there is no result. */
static void finish(const Method *method, Call *call, PyObject *result, PyObject *exception) {
    bool is_ours = call->way == RECORD && call->session == session;
    if (result != NULL && is_ours) {
        set_unblocked();
        if (method->is_wait) {
            after_wait(call);
        } else {
            after_launch(method, call, result);
        }
        Py_CLEAR(call->group);
        return;
    }
    if (result == NULL && is_ours && method->is_wait) {
        Pending *place = find_pending(&works, call->key);
        report_failure(&call->facts, place == NULL ? call->start : place->start, exception);
    }
    call->is_counted = call->is_counted && result == NULL;
    undo_call(call);
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
    if (call.way == SLOW) {
        clear_exception(); /* arguments that could not be read: Python's path knows what to say */
    }
    if (is_for_the_job()) {
        undo_call(&call);
        return NULL;
    }
    if (call.way == SLOW) {
        undo_call(&call);
        return pass_on(method, method->slow, arguments, num_arguments, names);
    }
    bool was_inside = is_inside;
    is_inside = is_inside || !method->is_wait;
    PyObject *result = call.way == PASS ? pass_on(method, method->function, arguments, num_arguments, names)
                                        : forward(method->function, arguments, num_arguments, names);
    is_inside = was_inside;
    Raised raised = take_raised(result);
    finish(method, &call, result, raised.value);
    return result_or_raised(result, raised, is_for_the_job());
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
    {Py_tp_new, method_new},         {Py_tp_dealloc, object_dealloc}, {Py_tp_traverse, method_traverse},
    {Py_tp_clear, method_clear},     {Py_tp_methods, method_methods}, {Py_tp_members, method_members},
    {Py_tp_doc, "A method of ProcessGroup or Work, and what is recorded of its calls."}, {0, NULL},
};

static PyType_Spec method_spec = {"commtrace._native.core.Method", sizeof(Method), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, method_slots};

int methods_init(PyObject *module) {
    const InternedName names[] = {
        {&name_async, "asyncOp"}, {&name_root, "rootRank"}, {&name_back, "f_back"},
        {&name_code, "f_code"},   {&name_func, "__func__"},
    };
    if (!intern_names(names, sizeof names / sizeof names[0])) {
        return -1;
    }
    PyObject *method_type = PyType_FromSpec(&method_spec);
    return method_type == NULL ? -1 : PyModule_AddObject(module, "Method", method_type);
}
