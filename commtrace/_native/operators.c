/* The operators of functional collectives as Python calls them, and of the waits for their results.

   An Operator stands in the attribute `_op` of one of torch's: see commtrace/capture/collectives/operator_calls.py. A call
   of the common kind (positional arguments, a plain tensor, no mode, a known group, one result) is recorded here. Any
   other goes to `capture`, of Python's path. */
#include "core.h"

#include <structmember.h>

_Thread_local bool is_in_operator;

static PyObject *failed;         /* (exception): an error of ours */
static PyObject *resolve_group;  /* name -> process group */
static PyObject *has_function;   /* tensor -> whether a mode of functions, or its class, gets the call first */
static PyObject *num_modes;      /* () -> number of modes of dispatch, which get the call first */
static PyObject *is_transformed; /* tensor -> whether it is one of torch.func's, for which C++ calls the operator */
static PyObject *python_results; /* a dictionary of Python's path: what it waits for, by the storage of the result */
static PyObject *forget_result;  /* (storage): gives up what Python knows of it */

static PyObject *name_is_meta, *name_untyped_storage, *name_cdata;

typedef struct {
    PyObject_HEAD
    PyObject *dict;
    PyObject *original; /* the function of C++ */
    PyObject *capture;  /* (original, arguments, keywords); None once the recording has ended */
    int operation, name;
    int num_arguments, tensor, group, root; /* positions; a root of -1 is none */
    int is_per_rank; /* a rank's payload is the tensor times the ranks */
    int is_wait;
} Operator;

static bool is_true(PyObject *function, PyObject *argument, bool *truth) {
    PyObject *result = PyObject_CallFunctionObjArgs(function, argument, NULL);
    int answer = result == NULL ? -1 : PyObject_IsTrue(result);
    Py_XDECREF(result);
    *truth = answer == 1;
    return answer >= 0;
}

/* Whether a call with this tensor does now what the operator does, and no mode gets it first. False, too, with an error. */
static bool reaches_kernels(PyObject *tensor) {
    bool answer;
    return is_plain_tensor(tensor) && is_true(has_function, tensor, &answer) && !answer &&
           is_true(num_modes, NULL, &answer) && !answer && is_true(is_transformed, tensor, &answer) && !answer &&
           attribute_is_true(tensor, name_is_meta, &answer) && !answer;
}

/* torch keeps the Work of a result by its storage. (Not by its address: empty ones have none.) NULL with an error. */
static const void *storage_of(PyObject *tensor) {
    PyObject *storage = PyObject_CallMethodObjArgs(tensor, name_untyped_storage, NULL);
    PyObject *number = storage == NULL ? NULL : PyObject_GetAttr(storage, name_cdata);
    const void *address = number == NULL ? NULL : PyLong_AsVoidPtr(number);
    Py_XDECREF(storage);
    Py_XDECREF(number);
    return address;
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

/* The group of a name, or of itself: a new reference; NULL where Python must look. */
static Group *known_group(PyObject *argument) {
    PyObject *process_group = argument;
    if (PyUnicode_CheckExact(argument)) {
        process_group = PyObject_CallFunctionObjArgs(resolve_group, argument, NULL);
        if (process_group == NULL) {
            return NULL;
        }
    } else {
        Py_INCREF(process_group);
    }
    Group *group = held_group(process_group);
    Py_DECREF(process_group);
    return group;
}

static bool read_root(const Operator *operator, PyObject *arguments, Call *call) {
    call->facts.peer = NOT_APPLICABLE;
    if (operator->root < 0) {
        return true;
    }
    long rank = PyLong_AsLong(PyTuple_GetItem(arguments, operator->root));
    if (rank < 0 || rank >= call->group->num_ranks) {
        return false;
    }
    call->facts.peer = call->group->ranks[rank];
    return true;
}

/* What is ours before a launch. An exception may be set where the way is SLOW: it is ours. */
static Call before_launch(const Operator *operator, PyObject *arguments) {
    Call call = new_call();
    Facts *facts = &call.facts;
    PyObject *tensor = PyTuple_GetItem(arguments, operator->tensor);
    if (is_capturing || !reaches_kernels(tensor)) {
        return call;
    }
    call.group = known_group(PyTuple_GetItem(arguments, operator->group));
    if (call.group == NULL || !read_root(operator, arguments, &call) || !measure_tensor(tensor, &call) ||
        session != call.session) {
        return call;
    }
    facts->seq = group_next_collective(call.group);
    facts->kind = COLLECTIVE;
    call.is_counted = true;
    call.way = PASS;
    if (is_recording && !call.group->is_skipped) {
        facts->num_bytes *= operator->is_per_rank ? call.group->num_ranks : 1;
        facts->operation = operator->operation;
        facts->name = operator->name;
        facts->queue_peer = NOT_APPLICABLE;
        facts->is_async = true;
        start_call(&call);
    }
    return call;
}

static bool is_python_waiting_for_results(void) { return python_results != NULL && PyDict_Size(python_results) > 0; }

/* What had this storage is gone: a wait for its result would be taken for one for what has the storage now. */
static void forget_storage(const void *storage) {
    forget_key(&results, storage);
    if (is_python_waiting_for_results() && forget_result != NULL) {
        PyObject *number = PyLong_FromVoidPtr((void *)storage);
        if (number != NULL) {
            Py_XDECREF(call_python(forget_result, number, NULL, NULL));
            Py_DECREF(number);
        }
    }
}

static void after_launch(Call *call, PyObject *result) {
    bool is_to_be_found = call->way == RECORD || results.num_pending > 0 || is_python_waiting_for_results();
    call->facts.returned_at = call->is_on_device ? host_ns() : 0;
    const void *storage = is_to_be_found && is_plain_tensor(result) ? storage_of(result) : NULL;
    if (storage != NULL) {
        forget_storage(storage);
    }
    if (call->way == RECORD && storage != NULL) {
        add_pending(&results, storage, NULL, &call->facts, call->start);
    } else if (call->way == RECORD) {
        give_up_call(&call->facts, call->start);
    }
    Py_CLEAR(call->group);
}

/* ---- waits ------------------------------------------------------------------------------------------------------- */

static Call before_wait(PyObject *tensor) {
    Call call = new_call();
    if (results.num_pending == 0 && !is_python_waiting_for_results()) {
        call.way = PASS;
        return call;
    }
    if (!reaches_kernels(tensor)) {
        return call;
    }
    const void *storage = storage_of(tensor);
    Pending *place = storage == NULL ? NULL : find_pending(&results, storage);
    if (place == NULL) {
        call.way = storage == NULL || is_python_waiting_for_results() ? SLOW : PASS;
        return call;
    }
    call.key = storage;
    call.facts = place->facts;
    call.way = RECORD;
    set_blocked(&call.facts, place->start);
    call.start = point_of(&call.facts);
    return call;
}

static void after_wait(Call *call) {
    Pending *place = find_pending(&results, call->key);
    if (place == NULL || place->facts.id != call->facts.id) { /* another thread has waited for it, and recorded that */
        point_release(call->start);
        return;
    }
    Pending ended = take_pending(&results, place);
    record_end(ended.facts, ended.start, call->start, point_of(&ended.facts));
}

/* ---- the callable ------------------------------------------------------------------------------------------------ */

static bool is_released(const Operator *operator) { return operator->capture == NULL || operator->capture == Py_None; }

static PyObject *call_capture(const Operator *operator, PyObject *arguments, PyObject *keywords) {
    if (is_released(operator)) { /* since the call began */
        return PyObject_Call(operator->original, arguments, keywords);
    }
    PyObject *named = keywords == NULL ? PyDict_New() : keywords, *result = NULL;
    if (named != NULL) {
        result = call_python(operator->capture, operator->original, arguments, named);
    }
    if (keywords == NULL) {
        Py_XDECREF(named);
    }
    return result;
}

static Call before(const Operator *operator, PyObject *arguments, PyObject *keywords) {
    bool is_common = (keywords == NULL || PyDict_Size(keywords) == 0) && calls_are_recorded() && has_function != NULL &&
                     PyTuple_Size(arguments) == operator->num_arguments;
    if (!is_common) {
        return new_call();
    }
    return operator->is_wait ? before_wait(PyTuple_GetItem(arguments, 0)) : before_launch(operator, arguments);
}

/* What is ours after the original, which has no result if it has raised. */
static void finish(const Operator *operator, Call *call, PyObject *result) {
    bool is_ours = call->session == session && calls_are_recorded();
    if (operator->is_wait && call->way == RECORD && is_ours) {
        set_unblocked();
    }
    if (result == NULL || !is_ours) {
        call->is_counted = call->is_counted && result == NULL;
        undo_call(call);
    } else if (!operator->is_wait) {
        after_launch(call, result);
    } else if (call->way == RECORD) {
        after_wait(call);
    }
}

static PyObject *operator_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
    const Operator *operator = (const Operator *)self;
    if (is_released(operator)) {
        return PyObject_Call(operator->original, arguments, keywords);
    }
    Call call = before(operator, arguments, keywords);
    if (call.way == SLOW) {
        clear_exception(); /* arguments that could not be read: Python's path knows what to say */
    }
    if (error_is_for_the_job(failed)) {
        undo_call(&call);
        return NULL;
    }
    if (call.way == SLOW) {
        undo_call(&call);
        return call_capture(operator, arguments, keywords);
    }
    bool was_inside = is_inside, was_in_operator = is_in_operator;
    is_inside = is_inside || !operator->is_wait;
    is_in_operator = is_in_operator || !operator->is_wait;
    PyObject *result = PyObject_Call(operator->original, arguments, keywords);
    is_inside = was_inside;
    is_in_operator = was_in_operator;
    Raised raised = take_raised(result);
    finish(operator, &call, result);
    return result_or_raised(result, raised, error_is_for_the_job(failed));
}

/* torch keeps operators by their hashes, which are those of their functions. */
static Py_hash_t operator_hash(PyObject *self) { return PyObject_Hash(((Operator *)self)->original); }

static PyObject *operator_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"original", "capture", "operation", "name",        "num_arguments", "tensor",
                            "group",    "root",    "is_per_rank", "is_wait", NULL};
    PyObject *original, *capture;
    int numbers[] = {NOT_APPLICABLE, NOT_APPLICABLE, -1, 0, 0, NOT_APPLICABLE};
    int is_per_rank = false, is_wait = false;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO|iiiiiipp", names, &original, &capture, &numbers[0],
                                     &numbers[1], &numbers[2], &numbers[3], &numbers[4], &numbers[5], &is_per_rank,
                                     &is_wait)) {
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Operator *operator = (Operator *)allocate(type, 0);
    if (operator == NULL) {
        return NULL;
    }
    Py_INCREF(original);
    Py_INCREF(capture);
    operator->original = original;
    operator->capture = capture;
    operator->operation = numbers[0];
    operator->name = numbers[1];
    operator->num_arguments = numbers[2];
    operator->tensor = numbers[3];
    operator->group = numbers[4];
    operator->root = numbers[5];
    operator->is_per_rank = is_per_rank;
    operator->is_wait = is_wait;
    return (PyObject *)operator;
}

static int operator_traverse(PyObject *self, visitproc visit, void *arg) {
    Operator *operator = (Operator *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(operator->dict);
    Py_VISIT(operator->original);
    Py_VISIT(operator->capture);
    return 0;
}

static int operator_clear(PyObject *self) {
    Operator *operator = (Operator *)self;
    Py_CLEAR(operator->dict);
    Py_CLEAR(operator->original);
    Py_CLEAR(operator->capture);
    return 0;
}

static PyMemberDef operator_members[] = {
    {"__dictoffset__", T_PYSSIZET, offsetof(Operator, dict), READONLY, NULL},
    {"original", T_OBJECT, offsetof(Operator, original), READONLY, "the function of C++"},
    {"capture", T_OBJECT, offsetof(Operator, capture), 0, "what gets uncommon calls; None once the recording has ended"},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef operator_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot operator_slots[] = {
    {Py_tp_new, operator_new},
    {Py_tp_dealloc, object_dealloc},
    {Py_tp_traverse, operator_traverse},
    {Py_tp_clear, operator_clear},
    {Py_tp_call, operator_call},
    {Py_tp_hash, operator_hash},
    {Py_tp_members, operator_members},
    {Py_tp_getset, operator_attributes},
    {Py_tp_doc, "Stands for the function of C++ of an operator of torch, and records what is called."},
    {0, NULL},
};

static PyType_Spec operator_spec = {"commtrace._native.core.Operator", sizeof(Operator), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, operator_slots};

/* ---- functions for Python ---------------------------------------------------------------------------------------- */

static PyObject **kept[] = {&failed,         &resolve_group,  &has_function, &num_modes,
                            &is_transformed, &python_results, &forget_result};

static PyObject *python_configure_operators(PyObject *module, PyObject *arguments, PyObject *keywords) {
    (void)module;
    static char *names[] = {"failed",         "resolve_group", "has_function",  "num_modes",
                            "is_transformed", "pending",       "forget_result", NULL};
    PyObject *given[7];
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOOOO!O", names, &given[0], &given[1], &given[2], &given[3],
                                     &given[4], &PyDict_Type, &given[5], &given[6])) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        keep(kept[i], given[i]);
    }
    Py_RETURN_NONE;
}

static PyObject *python_end_operators(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        keep(kept[i], Py_None);
    }
    forget_all(&results);
    Py_RETURN_NONE;
}

static PyObject *python_forget_result(PyObject *module, PyObject *storage) {
    (void)module;
    const void *address = PyLong_AsVoidPtr(storage);
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    forget_key(&results, address);
    Py_RETURN_NONE;
}

static PyObject *python_has_result(PyObject *module, PyObject *storage) {
    (void)module;
    const void *address = PyLong_AsVoidPtr(storage);
    return PyErr_Occurred() != NULL ? NULL : PyBool_FromLong(find_pending(&results, address) != NULL);
}

static PyObject *python_surrender_result(PyObject *module, PyObject *storage) {
    (void)module;
    const void *address = PyLong_AsVoidPtr(storage);
    return PyErr_Occurred() != NULL ? NULL : surrender(&results, address);
}

static PyObject *python_is_in_operator(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyBool_FromLong(is_in_operator);
}

static PyObject *python_set_in_operator(PyObject *module, PyObject *value) {
    (void)module;
    is_in_operator = PyObject_IsTrue(value) == 1;
    Py_RETURN_NONE;
}

PyMethodDef operators_functions[] = {
    {"configure_operators", (PyCFunction)(void (*)(void))python_configure_operators, METH_VARARGS | METH_KEYWORDS,
     "Say what operators need to know of torch and of Python's path."},
    {"end_operators", python_end_operators, METH_NOARGS,
     "Leave all calls of operators to Python, and give up results that nobody has waited for."},
    {"forget_result", python_forget_result, METH_O, "Give up what had this storage."},
    {"has_result", python_has_result, METH_O, "Return whether a communication has its result in this storage."},
    {"surrender_result", python_surrender_result, METH_O,
     "Return the facts of the communication with its result in this storage, which is Python's now; or None."},
    {"is_in_operator", python_is_in_operator, METH_NOARGS,
     "Return whether this thread is in a functional operator that has been counted."},
    {"set_in_operator", python_set_in_operator, METH_O, "Say so for Python's path."},
    {NULL, NULL, 0, NULL},
};

int operators_init(PyObject *module) {
    const InternedName names[] = {
        {&name_is_meta, "is_meta"},
        {&name_untyped_storage, "untyped_storage"},
        {&name_cdata, "_cdata"},
    };
    if (!intern_names(names, sizeof names / sizeof names[0])) {
        return -1;
    }
    PyObject *operator_type = PyType_FromSpec(&operator_spec);
    return operator_type == NULL ? -1 : PyModule_AddObject(module, "Operator", operator_type);
}
