/* Spans of the forward and backward of modules.

   The wrapper of `_call_impl` stays a function of Python, which torch.compile looks into; it asks `begin` and tells
   `end`. The backward begins and ends with hooks on tensors: see commtrace/capture/model/module_backward.py, which has
   the same rules for Python's engine. Where a module takes or gives what no hook stands on yet, all of it happens here. */
#include "core.h"

#include <stdlib.h>
#include <structmember.h>

enum { MOST_TENSORS = 16, MOST_NESTING = 3 }; /* limits of the search for tensors in arguments and results */

static PyTypeObject *label_type, *call_type, *hook_type, *modules_type;
static PyObject *key; /* of our first hook on a tensor; torch's own keys are numbers */
static PyObject *name_hooks, *name_node, *name_number, *name_register, *name_fields, *name_dict;

/* ---- labels ----------------------------------------------------------------------------------------------------- */

/* The names under which the calls of a module are recorded. */
typedef struct {
    PyObject_HEAD
    PyObject *forward;
    int forward_code, backward_code, recompute_code;
    bool is_wrapped; /* a call meets this label several times; only the outermost is recorded */
    bool is_open;
} Label;

static PyObject *label_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"forward", "codes", "is_wrapped", NULL};
    PyObject *forward;
    int codes[3], is_wrapped;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O(iii)p", names, &forward, &codes[0], &codes[1], &codes[2],
                                     &is_wrapped)) {
        return NULL;
    }
    Label *label = PyObject_New(Label, type);
    if (label != NULL) {
        Py_INCREF(forward);
        label->forward = forward;
        label->forward_code = codes[0];
        label->backward_code = codes[1];
        label->recompute_code = codes[2];
        label->is_wrapped = is_wrapped;
        label->is_open = false;
    }
    return (PyObject *)label;
}

static void label_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(((Label *)self)->forward);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMemberDef label_members[] = {
    {"forward", T_OBJECT_EX, offsetof(Label, forward), READONLY, "the name of a forward"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot label_slots[] = {
    {Py_tp_new, label_new},
    {Py_tp_dealloc, label_dealloc},
    {Py_tp_members, label_members},
    {Py_tp_doc, "The names under which the calls of a module are recorded."},
    {0, NULL},
};

static PyType_Spec label_spec = {"commtrace._native.core.Label", sizeof(Label), 0, Py_TPFLAGS_DEFAULT, label_slots};

/* ---- what one recording of modules knows ---------------------------------------------------------------------------- */

/* A backward that is going on. */
typedef struct {
    int name;
    int64_t first, last; /* the first node of its call, and the one after the last */
    Coordinates place;
    Point start;
} Open;

/* A pass through a graph, with the backwards that are going on in it, the innermost last. */
typedef struct {
    int64_t task;
    Open *open;
    int num_open, room;
} Pass;

typedef struct {
    PyObject_HEAD
    PyObject *labels;                             /* a dictionary, by the id of a module */
    PyObject *tensor_type, *ordered_dict;         /* classes */
    PyObject *is_grad_enabled, *graph_task, *next_node; /* functions of torch */
    PyObject *attach;   /* (tensor, node, hook): registers a hook where there are others */
    PyObject *at_end;   /* (task): has end_pass called when this pass ends */
    PyObject *failed;   /* (exception): switches the capture of modules off */
    int recording;      /* its number: hooks that are left of an earlier one do nothing */
    bool is_on_device;  /* marks are of a device, not of the host */
    Pass *passes;       /* few: more than one only in a reentrant checkpoint */
    int num_passes, room;
} Modules;

static PyObject *none_or_error(const Modules *modules) {
    if (error_is_for_the_job(modules->failed)) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The number that a function or method has returned, whose reference is taken; -1 with an exception. */
static int64_t number_of(PyObject *result) {
    if (result == NULL) {
        return -1;
    }
    int64_t number = PyLong_AsLongLong(result);
    Py_DECREF(result);
    return number;
}

static bool is_error(int64_t number) { return number == -1 && PyErr_Occurred() != NULL; }

/* A place on the current stream; false where it is captured into a graph: nothing runs then. Or with an exception. */
static bool take_point(const Modules *modules, Point *point) {
    if (!modules->is_on_device) {
        *point = point_of_host();
        return true;
    }
    bool is_captured;
    return point_here(NOT_APPLICABLE, point, &is_captured) && !is_captured;
}

static Pass *pass_of(const Modules *modules, int64_t task) {
    for (int i = modules->num_passes - 1; i >= 0; i--) {
        if (modules->passes[i].task == task) {
            return &modules->passes[i];
        }
    }
    return NULL;
}

static Pass *new_pass(Modules *modules, int64_t task) {
    if (modules->num_passes == modules->room) {
        int room = modules->room ? 2 * modules->room : 4;
        Pass *larger = realloc(modules->passes, (size_t)room * sizeof *larger);
        if (larger == NULL) {
            PyErr_NoMemory();
            return NULL;
        }
        modules->passes = larger;
        modules->room = room;
    }
    modules->passes[modules->num_passes++] = (Pass){.task = task};
    PyObject *number = PyLong_FromLongLong(task);
    PyObject *nothing = number == NULL ? NULL : PyObject_CallFunctionObjArgs(modules->at_end, number, NULL);
    Py_XDECREF(number);
    Py_XDECREF(nothing);
    return nothing == NULL ? NULL : pass_of(modules, task); /* Python may have moved them */
}

static bool push(Pass *pass, Open open) {
    if (pass->num_open == pass->room) {
        int room = pass->room ? 2 * pass->room : 16;
        Open *larger = realloc(pass->open, (size_t)room * sizeof *larger);
        if (larger == NULL) {
            point_release(open.start);
            PyErr_NoMemory();
            return false;
        }
        pass->open = larger;
        pass->room = room;
    }
    pass->open[pass->num_open++] = open;
    return true;
}

static void record_innermost(Pass *pass, Point end) {
    Open open = pass->open[--pass->num_open];
    rows_add_span(MODULE, open.name, COMPUTE, open.place, open.start, point_shared(end));
}

static void forget_pass(Modules *modules, Pass *pass) {
    for (int i = 0; i < pass->num_open; i++) {
        point_release(pass->open[i].start);
    }
    free(pass->open);
    *pass = modules->passes[--modules->num_passes];
}

static void forget_passes(Modules *modules) {
    while (modules->num_passes > 0) {
        forget_pass(modules, &modules->passes[modules->num_passes - 1]);
    }
}

/* ---- hooks of tensors ---------------------------------------------------------------------------------------------- */

/* A hook on an output (a backward begins) or on an input (backwards of later calls end). Holds no tensor and no node. */
typedef struct {
    PyObject_HEAD
    Modules *modules;
    int name; /* NOT_APPLICABLE: of an input */
    bool is_shared; /* by several outputs, of which only the first with a gradient counts */
    int64_t first, last, latest_task;
} Hook;

static PyObject *new_hook(Modules *modules, int name, int64_t first, int64_t last) {
    Hook *hook = PyObject_New(Hook, hook_type);
    if (hook != NULL) {
        Py_INCREF((PyObject *)modules);
        hook->modules = modules;
        hook->name = name;
        hook->is_shared = false;
        hook->first = first;
        hook->last = last;
        hook->latest_task = -1;
    }
    return (PyObject *)hook;
}

static void hook_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF((PyObject *)((Hook *)self)->modules);
    PyObject_Free(self);
    Py_DECREF(type);
}

static void begin_backward(const Hook *hook, int64_t task) {
    Modules *modules = hook->modules;
    Point now;
    if (!take_point(modules, &now)) { /* before the pass is looked for: it may run Python, and others, who move passes */
        return;
    }
    Pass *pass = pass_of(modules, task);
    if (pass == NULL && (pass = new_pass(modules, task)) == NULL) {
        point_release(now);
        return;
    }
    while (pass->num_open > 0) {
        const Open *around = &pass->open[pass->num_open - 1];
        if (around->first <= hook->first && hook->last <= around->last) {
            break;
        }
        record_innermost(pass, now);
    }
    push(pass, (Open){hook->name, hook->first, hook->last, here, now});
}

static bool has_later(const Pass *pass, int64_t node) {
    return pass != NULL && pass->num_open > 0 && pass->open[pass->num_open - 1].first > node;
}

static void end_later_backwards(const Hook *hook, int64_t task) {
    Point now;
    if (!has_later(pass_of(hook->modules, task), hook->first) || !take_point(hook->modules, &now)) {
        return;
    }
    Pass *pass = pass_of(hook->modules, task);
    while (has_later(pass, hook->first)) {
        record_innermost(pass, now);
    }
    point_release(now);
}

static PyObject *hook_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
    (void)arguments, (void)keywords;
    Hook *hook = (Hook *)self;
    Modules *modules = hook->modules;
    if (modules->recording != num_recordings) {
        Py_RETURN_NONE;
    }
    int64_t task = number_of(PyObject_CallNoArgs(modules->graph_task));
    if (is_error(task)) {
        return none_or_error(modules);
    }
    if (hook->name == NOT_APPLICABLE) {
        end_later_backwards(hook, task);
    } else if (is_recording && !(hook->is_shared && hook->latest_task == task)) {
        hook->latest_task = task;
        begin_backward(hook, task);
    }
    return none_or_error(modules);
}

static PyType_Slot hook_slots[] = {
    {Py_tp_dealloc, hook_dealloc},
    {Py_tp_call, hook_call},
    {Py_tp_doc, "A hook on a tensor, with which the backward of a module begins or ends."},
    {0, NULL},
};

static PyType_Spec hook_spec = {"commtrace._native.core.Hook", sizeof(Hook), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, hook_slots};

/* ---- tensors of arguments and results --------------------------------------------------------------------------------- */

typedef struct {
    int num_tensors;
    PyObject *tensors[MOST_TENSORS];
} Tensors;

static bool is_plain(PyObject *value) {
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
           PyUnicode_CheckExact(value);
}

static bool is_tensor(const Modules *modules, PyObject *value) {
    PyTypeObject *type = Py_TYPE(value), *tensor_type = (PyTypeObject *)modules->tensor_type;
    return type == tensor_type || PyType_IsSubtype(type, tensor_type);
}

static bool collect(const Modules *modules, PyObject *value, Tensors *tensors, int nesting);

static bool collect_from_items(const Modules *modules, PyObject *value, Tensors *tensors, int nesting) {
    bool is_collected = true;
    if (PyTuple_Check(value)) {
        for (Py_ssize_t i = 0; is_collected && i < PyTuple_Size(value); i++) {
            is_collected = collect(modules, PyTuple_GetItem(value, i), tensors, nesting - 1);
        }
    } else if (PyList_Check(value)) {
        for (Py_ssize_t i = 0; is_collected && i < PyList_Size(value); i++) {
            is_collected = collect(modules, PyList_GetItem(value, i), tensors, nesting - 1);
        }
    } else if (PyDict_Check(value)) {
        PyObject *item;
        Py_ssize_t at = 0;
        while (is_collected && PyDict_Next(value, &at, NULL, &item)) {
            is_collected = collect(modules, item, tensors, nesting - 1);
        }
    } else if (PyObject_HasAttr((PyObject *)Py_TYPE(value), name_fields)) { /* a dataclass */
        PyObject *attributes = PyObject_GetAttr(value, name_dict);
        if (attributes == NULL) { /* it has slots */
            PyErr_Clear();
            return true;
        }
        is_collected = collect(modules, attributes, tensors, nesting);
        Py_DECREF(attributes);
    }
    return is_collected;
}

/* Adds the tensors of a value, of its items, and of theirs; false with an exception. */
static bool collect(const Modules *modules, PyObject *value, Tensors *tensors, int nesting) {
    if (tensors->num_tensors == MOST_TENSORS || is_plain(value)) {
        return true;
    }
    Py_INCREF(value); /* what Python does meanwhile may take it out of a list */
    if (is_tensor(modules, value)) {
        tensors->tensors[tensors->num_tensors++] = value;
        return true;
    }
    bool is_collected = nesting == 0 || collect_from_items(modules, value, tensors, nesting);
    Py_DECREF(value);
    return is_collected;
}

static void release_tensors(Tensors *tensors) {
    for (int i = 0; i < tensors->num_tensors; i++) {
        Py_DECREF(tensors->tensors[i]);
    }
}

/* The node that made a tensor, a new reference, and its number; NULL without one, or with an exception. */
static PyObject *node_of(PyObject *tensor, int64_t *number) {
    PyObject *node = PyObject_GetAttr(tensor, name_node);
    if (node == NULL || node == Py_None) {
        Py_XDECREF(node);
        return NULL;
    }
    *number = number_of(PyObject_CallMethodObjArgs(node, name_number, NULL));
    if (is_error(*number)) {
        Py_CLEAR(node);
    }
    return node;
}

/* Whether a tensor has a hook of ours: 1, 0, or -1 with an exception. */
static int is_watched(PyObject *tensor) {
    PyObject *hooks = PyObject_GetAttr(tensor, name_hooks);
    int contained = hooks == NULL ? -1 : hooks == Py_None ? 0 : PySequence_Contains(hooks, key);
    Py_XDECREF(hooks);
    return contained;
}

/* Registers a hook like Tensor.register_hook, but before the hooks that are there. An exception may be set. */
static void attach(const Modules *modules, PyObject *tensor, PyObject *node, PyObject *hook) {
    PyObject *hooks = PyObject_GetAttr(tensor, name_hooks), *nothing = NULL;
    if (hooks == NULL) {
        return;
    }
    if (hooks != Py_None) {
        Py_DECREF(hooks);
        Py_XDECREF(PyObject_CallFunctionObjArgs(modules->attach, tensor, node, hook, NULL));
        return;
    }
    Py_DECREF(hooks);
    hooks = PyObject_CallNoArgs(modules->ordered_dict);
    if (hooks != NULL && PyObject_SetItem(hooks, key, hook) == 0 && PyObject_SetAttr(tensor, name_hooks, hooks) == 0) {
        nothing = PyObject_CallMethodObjArgs(node, name_register, tensor, NULL);
    }
    Py_XDECREF(nothing);
    Py_XDECREF(hooks);
}

/* Hooks the youngest of these, to which autograd comes first. An exception may be set. */
static void watch_youngest(Modules *modules, const Tensors *tensors) {
    if (tensors->num_tensors == 1 && is_watched(tensors->tensors[0]) != 0) { /* in a chain: an output of another call */
        return;
    }
    PyObject *youngest = NULL, *its_node = NULL;
    int64_t number, highest = -1;
    for (int i = 0; i < tensors->num_tensors; i++) {
        PyObject *node = node_of(tensors->tensors[i], &number);
        if (node == NULL && PyErr_Occurred() != NULL) {
            break;
        }
        if (node != NULL && number > highest) {
            highest = number;
            youngest = tensors->tensors[i];
            Py_XDECREF(its_node);
            its_node = node;
        } else {
            Py_XDECREF(node);
        }
    }
    if (youngest != NULL && PyErr_Occurred() == NULL && is_watched(youngest) == 0) {
        PyObject *hook = new_hook(modules, NOT_APPLICABLE, highest, highest);
        if (hook != NULL) {
            attach(modules, youngest, its_node, hook);
        }
        Py_XDECREF(hook);
    }
    Py_XDECREF(its_node);
}

/* The first of the arguments is the module. */
static void watch_inputs(Modules *modules, PyObject *arguments, PyObject *keywords) {
    Tensors tensors = {.num_tensors = 0};
    bool is_collected = true;
    for (Py_ssize_t i = 1; is_collected && i < PyTuple_Size(arguments); i++) {
        is_collected = collect(modules, PyTuple_GetItem(arguments, i), &tensors, MOST_NESTING);
    }
    if (is_collected && collect(modules, keywords, &tensors, MOST_NESTING + 1)) {
        watch_youngest(modules, &tensors);
    }
    release_tensors(&tensors);
}

/* Hooks every output, but those that the module only passed through. An exception may be set. */
static void watch_outputs(Modules *modules, PyObject *result, int name, int64_t first, int64_t last) {
    Tensors tensors = {.num_tensors = 0};
    PyObject *made[MOST_TENSORS], *nodes[MOST_TENSORS];
    int num_made = 0;
    bool is_known = collect(modules, result, &tensors, MOST_NESTING);
    for (int i = 0; is_known && i < tensors.num_tensors; i++) {
        int64_t number;
        PyObject *node = node_of(tensors.tensors[i], &number);
        is_known = node != NULL || PyErr_Occurred() == NULL;
        if (node != NULL && number >= first) {
            made[num_made] = tensors.tensors[i];
            nodes[num_made++] = node;
        } else {
            Py_XDECREF(node);
        }
    }
    PyObject *hook = is_known && num_made > 0 ? new_hook(modules, name, first, last) : NULL;
    if (hook != NULL) {
        ((Hook *)hook)->is_shared = num_made > 1;
    }
    for (int i = 0; i < num_made; i++) {
        if (hook != NULL && PyErr_Occurred() == NULL) {
            attach(modules, made[i], nodes[i], hook);
        }
        Py_DECREF(nodes[i]);
    }
    Py_XDECREF(hook);
    release_tensors(&tensors);
}

/* ---- calls ---------------------------------------------------------------------------------------------------------- */

/* A call of a module that is going on. */
typedef struct {
    PyObject_HEAD
    Label *label;
    int name;
    int64_t first; /* node of its graph; NOT_APPLICABLE without gradients */
    Coordinates place;
    Point start;
} ModuleCall;

static void call_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    ModuleCall *call = (ModuleCall *)self;
    point_release(call->start);
    Py_DECREF((PyObject *)call->label);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyType_Slot call_slots[] = {
    {Py_tp_dealloc, call_dealloc},
    {Py_tp_doc, "A call of a module that is going on."},
    {0, NULL},
};

static PyType_Spec call_spec = {"commtrace._native.core.Call", sizeof(ModuleCall), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots};

/* The label of a module whose call is to be recorded, borrowed; NULL of others, or with an exception. */
static Label *label_to_record(const Modules *modules, PyObject *module) {
    if (!is_recording || modules->recording != num_recordings) {
        return NULL;
    }
    PyObject *id = PyLong_FromVoidPtr(module);
    Label *label = id == NULL ? NULL : (Label *)PyDict_GetItemWithError(modules->labels, id);
    Py_XDECREF(id);
    return label == NULL || label->is_open ? NULL : label;
}

/* The number of the next node of a graph; NOT_APPLICABLE without gradients, or with an exception. */
static int64_t first_node(const Modules *modules) {
    PyObject *is_enabled = PyObject_CallNoArgs(modules->is_grad_enabled);
    bool has_gradients = is_enabled == Py_True;
    Py_XDECREF(is_enabled);
    return has_gradients ? number_of(PyObject_CallNoArgs(modules->next_node)) : NOT_APPLICABLE;
}

/* begin(args, kwargs): the call, or None if it is not recorded. The module is the first of args. */
static PyObject *modules_begin(PyObject *self, PyObject *const *arguments, Py_ssize_t num_arguments) {
    Modules *modules = (Modules *)self;
    if (num_arguments != 2 || !PyTuple_Check(arguments[0]) || !PyDict_Check(arguments[1]) ||
        PyTuple_Size(arguments[0]) == 0) {
        PyErr_SetString(PyExc_TypeError, "begin(args, kwargs), the first of args a module");
        return none_or_error(modules);
    }
    Label *label = label_to_record(modules, PyTuple_GetItem(arguments[0], 0));
    if (label == NULL) {
        return none_or_error(modules);
    }
    Py_INCREF((PyObject *)label); /* what Python does below may end it */
    int64_t first = first_node(modules), task = NOT_APPLICABLE;
    if (first >= 0) {
        watch_inputs(modules, arguments[0], arguments[1]);
    }
    if (PyErr_Occurred() == NULL) {
        task = number_of(PyObject_CallNoArgs(modules->graph_task));
    }
    Point start = {NULL, 0};
    ModuleCall *call = NULL;
    if (PyErr_Occurred() == NULL) {
        take_point(modules, &start); /* the end tells whether a graph was captured */
    }
    if (PyErr_Occurred() == NULL) {
        call = PyObject_New(ModuleCall, call_type);
    }
    if (call == NULL) {
        point_release(start);
        Py_DECREF((PyObject *)label);
        return none_or_error(modules);
    }
    call->label = label;
    call->name = task == NOT_APPLICABLE ? label->forward_code : label->recompute_code;
    call->first = first;
    call->place = here;
    call->start = start;
    label->is_open = label->is_wrapped;
    return (PyObject *)call;
}

/* end(call), of a module that raised, or end(call, result) */
static PyObject *modules_end(PyObject *self, PyObject *const *arguments, Py_ssize_t num_arguments) {
    Modules *modules = (Modules *)self;
    if (num_arguments < 1 || Py_TYPE(arguments[0]) != call_type) {
        PyErr_SetString(PyExc_TypeError, "end(call[, result])");
        return none_or_error(modules);
    }
    ModuleCall *call = (ModuleCall *)arguments[0];
    call->label->is_open = false;
    if (modules->recording != num_recordings) { /* the recording has ended meanwhile */
        Py_RETURN_NONE;
    }
    Point end;
    if (take_point(modules, &end)) {
        rows_add_span(MODULE, call->name, COMPUTE, call->place, call->start, end);
        call->start = (Point){NULL, 0};
    }
    if (PyErr_Occurred() == NULL && num_arguments > 1 && call->first >= 0) {
        int64_t last = number_of(PyObject_CallNoArgs(modules->next_node));
        if (last > call->first) {
            watch_outputs(modules, arguments[1], call->label->backward_code, call->first, last);
        }
    }
    return none_or_error(modules);
}

/* end_pass(task): the backwards that are going on in a pass end with it */
static PyObject *modules_end_pass(PyObject *self, PyObject *task) {
    Modules *modules = (Modules *)self;
    int64_t number = PyLong_AsLongLong(task);
    Point now;
    bool is_timed = !is_error(number) && modules->recording == num_recordings &&
                    has_later(pass_of(modules, number), NOT_APPLICABLE) && take_point(modules, &now);
    Pass *pass = pass_of(modules, number);
    while (is_timed && has_later(pass, NOT_APPLICABLE)) {
        record_innermost(pass, now);
    }
    if (is_timed) {
        point_release(now);
    }
    if (pass != NULL) {
        forget_pass(modules, pass);
    }
    return none_or_error(modules);
}

static PyObject *modules_forget(PyObject *self, PyObject *unused) {
    (void)unused;
    forget_passes((Modules *)self);
    Py_RETURN_NONE;
}

/* ---- the class Modules ------------------------------------------------------------------------------------------------ */

static PyObject *modules_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"labels",    "tensor_type", "ordered_dict", "is_grad_enabled", "graph_task",
                            "next_node", "attach",      "at_end",       "failed",          "is_on_device",
                            NULL};
    PyObject *labels, *tensor, *ordered, *grad, *task, *node, *attach_hook, *at_end, *failed;
    int is_on_device;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "O!O!OOOOOOOp", names, &PyDict_Type, &labels, &PyType_Type,
                                     &tensor, &ordered, &grad, &task, &node, &attach_hook, &at_end, &failed,
                                     &is_on_device)) {
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Modules *modules = (Modules *)allocate(type, 0);
    if (modules == NULL) {
        return NULL;
    }
    struct {
        PyObject **place, *object;
    } kept[] = {
        {&modules->labels, labels},        {&modules->tensor_type, tensor},       {&modules->ordered_dict, ordered},
        {&modules->is_grad_enabled, grad}, {&modules->graph_task, task},          {&modules->next_node, node},
        {&modules->attach, attach_hook},   {&modules->at_end, at_end},            {&modules->failed, failed},
    };
    for (size_t i = 0; i < sizeof kept / sizeof kept[0]; i++) {
        Py_INCREF(kept[i].object);
        *kept[i].place = kept[i].object;
    }
    modules->is_on_device = is_on_device;
    modules->recording = num_recordings;
    return (PyObject *)modules;
}

static int modules_traverse(PyObject *self, visitproc visit, void *arg) {
    Modules *modules = (Modules *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(modules->labels);
    Py_VISIT(modules->tensor_type);
    Py_VISIT(modules->ordered_dict);
    Py_VISIT(modules->is_grad_enabled);
    Py_VISIT(modules->graph_task);
    Py_VISIT(modules->next_node);
    Py_VISIT(modules->attach);
    Py_VISIT(modules->at_end);
    Py_VISIT(modules->failed);
    return 0;
}

static int modules_clear(PyObject *self) {
    Modules *modules = (Modules *)self;
    modules->recording = NOT_APPLICABLE; /* hooks that are left call nothing of what goes now */
    Py_CLEAR(modules->labels);
    Py_CLEAR(modules->tensor_type);
    Py_CLEAR(modules->ordered_dict);
    Py_CLEAR(modules->is_grad_enabled);
    Py_CLEAR(modules->graph_task);
    Py_CLEAR(modules->next_node);
    Py_CLEAR(modules->attach);
    Py_CLEAR(modules->at_end);
    Py_CLEAR(modules->failed);
    return 0;
}

static void modules_dealloc(PyObject *self) {
    Modules *modules = (Modules *)self;
    forget_passes(modules);
    free(modules->passes);
    object_dealloc(self);
}

static PyMethodDef modules_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))modules_begin, METH_FASTCALL,
     "Begin a call, (args, kwargs); return what `end` takes, or None if it is not recorded."},
    {"end", (PyCFunction)(void (*)(void))modules_end, METH_FASTCALL,
     "End a call that `begin` returned, with its result if it did not raise."},
    {"end_pass", modules_end_pass, METH_O, "End what is going on in a pass through a graph, by its number."},
    {"forget", modules_forget, METH_NOARGS, "Give up the backwards that are going on."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot modules_slots[] = {
    {Py_tp_new, modules_new},           {Py_tp_dealloc, modules_dealloc}, {Py_tp_traverse, modules_traverse},
    {Py_tp_clear, modules_clear},       {Py_tp_methods, modules_methods},
    {Py_tp_doc, "The modules that a recording follows, and their backwards that are going on."},
    {0, NULL},
};

static PyType_Spec modules_spec = {"commtrace._native.core.Modules", sizeof(Modules), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, modules_slots};

int modules_init(PyObject *module) {
    const InternedName names[] = {
        {&key, "commtrace"},
        {&name_hooks, "_backward_hooks"},
        {&name_node, "grad_fn"},
        {&name_number, "_sequence_nr"},
        {&name_register, "_register_hook_dict"},
        {&name_fields, "__dataclass_fields__"},
        {&name_dict, "__dict__"},
    };
    if (!intern_names(names, sizeof names / sizeof names[0])) {
        return -1;
    }
    struct {
        PyTypeObject **place;
        PyType_Spec *spec;
        const char *name;
    } types[] = {
        {&label_type, &label_spec, "Label"},
        {&call_type, &call_spec, "Call"},
        {&hook_type, &hook_spec, "Hook"},
        {&modules_type, &modules_spec, "Modules"},
    };
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        *types[i].place = (PyTypeObject *)PyType_FromSpec(types[i].spec);
        if (*types[i].place == NULL) {
            return -1;
        }
        Py_INCREF(*types[i].place); /* ours beside the module's: modules may be called when that is gone, as Python ends */
        if (PyModule_AddObject(module, types[i].name, (PyObject *)*types[i].place) < 0) {
            return -1;
        }
    }
    /* torch warns of hooks that get lost with a tensor; this one may. */
    return PyObject_SetAttrString((PyObject *)hook_type, "__torch_unserializable__", Py_True);
}
