/* The native part of the recorder: what lies on the path of training, in C.

   driver.c   the few functions of libcuda or HIP, found when a device is used
   marks.c    places on streams, and the thread that learns when the device passes them
   groups.c   sequence numbers of process groups
   calls.c    communications that are under way, whoever intercepts them:
   methods.c    methods of ProcessGroup and Work
   operators.c  operators of functional collectives
   hooks.c      torch's hooks of process groups, for the buckets of DistributedDataParallel
  bucket_kernel.c  the same before torch had these hooks, by a kernel in its dispatcher
   modules.c  spans of forward and backward of modules
   stamps.c   device times of what CUDA graphs contain
   stamper.c    what these need on a device: kernels, memory, its clock
   rows.c     what was recorded, on its way to the harvester as columns
   core.c     the module, and marks as objects of Python

   It knows nothing of torch but attributes of its objects, and nothing of CUDA but the driver's stable functions: one
   binary serves all versions. Nothing here waits for the device, and the thread of its own never needs the GIL. */
#include "core.h"

#include <structmember.h>

/* Raised when the functions below change; commtrace/_native/__init__.py has the same number. */
enum { ABI_VERSION = 8 };
enum { RESET_PATIENCE_MS = 1000 };

/* ---- marks as objects --------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Mark *mark;
} MarkObject;

static PyTypeObject *mark_type;

PyObject *point_to_python(Point point) {
    if (point.mark == NULL) {
        return PyLong_FromLongLong(point.ns);
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(mark_type, Py_tp_alloc);
    MarkObject *object = (MarkObject *)allocate(mark_type, 0);
    if (object != NULL) {
        object->mark = point_shared(point).mark;
    }
    return (PyObject *)object;
}

bool point_from_python(PyObject *object, Point *point) {
    if (Py_TYPE(object) == mark_type) {
        *point = point_shared((Point){((MarkObject *)object)->mark, 0});
        return true;
    }
    *point = (Point){NULL, PyLong_AsLongLong(object)};
    return point->ns != -1 || PyErr_Occurred() == NULL;
}

static void mark_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    point_release((Point){((MarkObject *)self)->mark, 0});
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *mark_device(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromLong(((MarkObject *)self)->mark->device);
}

static PyObject *mark_stream(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong((uintptr_t)((MarkObject *)self)->mark->stream);
}

static PyObject *mark_taken_at(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromLongLong(((MarkObject *)self)->mark->taken_at);
}

static PyObject *mark_lead_us(PyObject *self, void *unused) {
    (void)unused;
    return PyLong_FromLong(((MarkObject *)self)->mark->lead_us);
}

static PyGetSetDef mark_attributes[] = {
    {"device", mark_device, NULL, "index", NULL},
    {"stream", mark_stream, NULL, "the driver's handle, as a number", NULL},
    {"taken_at", mark_taken_at, NULL, "the host's time when it was taken, ns", NULL},
    {"lead_us", mark_lead_us, NULL, "how far the host was ahead of the device, µs, once that has passed it", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot mark_slots[] = {
    {Py_tp_dealloc, mark_dealloc},
    {Py_tp_getset, mark_attributes},
    {Py_tp_doc, "A place on a stream, which the device passes later."},
    {0, NULL},
};

static PyType_Spec mark_spec = {"commtrace._native.core.Mark", sizeof(MarkObject), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, mark_slots};

static bool is_device_ready(void) {
    if (device_is_open()) {
        return !device_has_failed();
    }
    if (open_device == NULL) {
        return false;
    }
    PyObject *opened = call_python(open_device, NULL, NULL, NULL);
    bool is_open = opened != NULL && PyObject_IsTrue(opened) == 1;
    Py_XDECREF(opened);
    return is_open && !is_for_the_job();
}

/* The device of a mark: the current one, or the only one that the job uses, although it never set it. */
static int device_to_mark(int device) {
    if (device == NOT_APPLICABLE) {
        device = device_of_context();
    }
    if (device == NOT_APPLICABLE && current_device != NULL) {
        PyObject *number = PyObject_CallFunctionObjArgs(current_device, NULL);
        device = number == NULL ? NOT_APPLICABLE : (int)PyLong_AsLong(number);
        Py_XDECREF(number);
        if (is_for_the_job()) {
            return NOT_APPLICABLE;
        }
    }
    return device_is_used(device) ? device : device_used_first();
}

bool point_here(int device, Point *point, bool *is_captured) {
    Stream stream;
    *is_captured = false;
    if (!is_device_ready() || (device = device_to_mark(device)) == NOT_APPLICABLE) {
        *point = point_of_host();
        return !is_for_the_job();
    }
    if (!current_stream(device, &stream)) {
        *point = point_of_host();
        return false;
    }
    *point = point_on(device, stream);
    *is_captured = point->mark == NULL && !device_has_failed();
    return true;
}

static PyObject *python_mark(PyObject *module, PyObject *const *arguments, Py_ssize_t num_arguments) {
    (void)module;
    int device = NOT_APPLICABLE;
    if (num_arguments > 0 && arguments[0] != Py_None) {
        device = (int)PyLong_AsLong(arguments[0]);
        if (device == -1 && PyErr_Occurred() != NULL) {
            return NULL;
        }
    }
    Point point;
    bool is_captured;
    if (!point_here(device, &point, &is_captured)) {
        return NULL;
    }
    PyObject *object = point_to_python(point);
    point_release(point);
    return object;
}

static PyObject *python_resolve(PyObject *module, PyObject *object) {
    (void)module;
    Point point;
    int64_t ns = 0;
    if (!point_from_python(object, &point)) {
        return NULL;
    }
    int known = point_time(point, &ns);
    point_release(point);
    if (known > 0) {
        return PyLong_FromLongLong(ns);
    }
    if (known == 0) {
        Py_RETURN_NONE;
    }
    PyErr_SetString(PyExc_RuntimeError, "the device's clock is switched off, or its driver has failed");
    return NULL;
}

bool coordinates_from_python(PyObject *tuple, Coordinates *place) {
    int32_t *numbers[] = {&place->step, &place->microbatch, &place->chunk, &place->stage};
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != 4) {
        PyErr_SetString(PyExc_TypeError, "a place is a tuple of step, microbatch, chunk and stage");
        return false;
    }
    for (int i = 0; i < 4; i++) {
        *numbers[i] = (int32_t)PyLong_AsLong(PyTuple_GetItem(tuple, i));
    }
    return PyErr_Occurred() == NULL;
}

/* span(kind, name, lane, place, start, end) */
PyObject *python_span(PyObject *module, PyObject *const *arguments, Py_ssize_t num_arguments) {
    (void)module;
    if (num_arguments != 6) {
        PyErr_SetString(PyExc_TypeError, "span(kind, name, lane, (step, microbatch, chunk, stage), start, end)");
        return NULL;
    }
    int kind = (int)PyLong_AsLong(arguments[0]);
    int name = (int)PyLong_AsLong(arguments[1]);
    int lane = (int)PyLong_AsLong(arguments[2]);
    Coordinates place;
    Point start, end;
    if (PyErr_Occurred() != NULL || !coordinates_from_python(arguments[3], &place) ||
        !point_from_python(arguments[4], &start)) {
        return NULL;
    }
    if (!point_from_python(arguments[5], &end)) {
        point_release(start);
        return NULL;
    }
    rows_add_span(kind, name, lane, place, start, end);
    Py_RETURN_NONE;
}

bool intern_names(const InternedName *names, size_t num_names) {
    for (size_t i = 0; i < num_names; i++) {
        *names[i].place = PyUnicode_InternFromString(names[i].text);
        if (*names[i].place == NULL) {
            return false;
        }
    }
    return true;
}

void object_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    inquiry clear = (inquiry)PyType_GetSlot(type, Py_tp_clear);
    clear(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

PyObject *call_python(PyObject *function, PyObject *first, PyObject *second, PyObject *third) {
    Py_INCREF(function);
    PyObject *result = PyObject_CallFunctionObjArgs(function, first, second, third, NULL);
    Py_DECREF(function);
    return result;
}

void clear_exception(void) {
    if (PyErr_Occurred() != NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
    }
}

Raised take_raised(const PyObject *result) {
    Raised raised = {NULL, NULL, NULL};
    if (result == NULL) {
        PyErr_Fetch(&raised.type, &raised.value, &raised.traceback);
        PyErr_NormalizeException(&raised.type, &raised.value, &raised.traceback);
    }
    return raised;
}

PyObject *result_or_raised(PyObject *result, Raised raised, bool ends_program) {
    if (result == NULL && !ends_program) {
        PyErr_Restore(raised.type, raised.value, raised.traceback);
        return NULL;
    }
    if (ends_program) {
        Py_CLEAR(result);
    }
    Py_XDECREF(raised.type);
    Py_XDECREF(raised.value);
    Py_XDECREF(raised.traceback);
    return result;
}

bool error_is_for_the_job(PyObject *failed) {
    if (PyErr_Occurred() == NULL) {
        return false;
    }
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return true;
    }
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (failed != NULL && value != NULL) {
        if (traceback != NULL) {
            PyException_SetTraceback(value, traceback); /* before Python 3.12 it does not have it yet */
        }
        Py_XDECREF(call_python(failed, value, NULL, NULL));
        clear_exception(); /* there is nobody left to tell */
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return PyErr_Occurred() != NULL;
}

/* ---- the device --------------------------------------------------------------------------------------------------- */

static PyObject *python_open_driver(PyObject *module, PyObject *arguments) {
    (void)module;
    const char *path;
    int threaded;
    char reason[256];
    if (!PyArg_ParseTuple(arguments, "sp", &path, &threaded)) {
        return NULL;
    }
    if (device_is_held()) {
        PyErr_SetString(PyExc_BlockingIOError, "the driver still holds the thread of an earlier recording");
        return NULL;
    }
    if (!driver_open(path, reason, sizeof reason)) {
        PyErr_SetString(PyExc_OSError, reason);
        return NULL;
    }
    if (!device_open(threaded)) {
        PyErr_SetString(PyExc_OSError, "the thread that asks the driver could not be started");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *python_close_device(PyObject *module, PyObject *patience_ms) {
    (void)module;
    int patience = (int)PyLong_AsLong(patience_ms);
    bool has_ended;
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (!device_shut()) {
        Py_RETURN_FALSE;
    }
    Py_BEGIN_ALLOW_THREADS
    has_ended = device_close(patience);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(has_ended);
}

static PyObject *python_pass_marks(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    Py_BEGIN_ALLOW_THREADS
    device_pass();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *python_switch_off(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    device_switch_off();
    Py_RETURN_NONE;
}

static PyObject *python_synchronized(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    device_synchronized();
    Py_RETURN_NONE;
}

static PyObject *python_device_state(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return Py_BuildValue("iii", (int)device_is_open(), device_failure(), device_used_first());
}

static PyObject *python_host_ns(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromLongLong(host_ns());
}

static PyObject *python_use_clock(PyObject *module, PyObject *address) {
    (void)module;
    unsigned long long place = PyLong_AsUnsignedLongLong(address);
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    use_clock((int64_t(*)(void))(uintptr_t)place);
    Py_RETURN_NONE;
}

/* ---- the module --------------------------------------------------------------------------------------------------- */

static PyObject *python_next_id(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromLongLong(next_id());
}

static PyObject *python_take_ids(PyObject *module, PyObject *count) {
    (void)module;
    int64_t number = PyLong_AsLongLong(count);
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    return PyLong_FromLongLong(next_ids(number));
}

static PyObject *python_num_added(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromUnsignedLongLong(rows_added());
}

static PyObject *python_num_waiting(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromUnsignedLongLong(rows_waiting());
}

static PyObject *python_give_up(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    Py_BEGIN_ALLOW_THREADS
    rows_give_up();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *python_reset(PyObject *module, PyObject *capacity) {
    (void)module;
    long long rows = PyLong_AsLongLong(capacity);
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    bool is_shut = device_shut();
    calls_forget_all();
    rows_reset((size_t)rows);
    Py_BEGIN_ALLOW_THREADS
    if (is_shut) {
        device_close(RESET_PATIENCE_MS);
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"mark", (PyCFunction)(void (*)(void))python_mark, METH_FASTCALL,
     "Return a mark on the current stream of a device, or of the current one; the host's time, ns, without one."},
    {"resolve", python_resolve, METH_O, "Return the time of a mark, ns; None while the device has not passed it."},
    {"span", (PyCFunction)(void (*)(void))python_span, METH_FASTCALL,
     "Record a span: kind, name, lane, (step, microbatch, chunk, stage), start, end."},
    {"open_driver", python_open_driver, METH_VARARGS, "Load a driver by its path, and resolve marks in a thread or not."},
    {"close_device", python_close_device, METH_O, "End the thread, within so many ms; False if the driver holds it."},
    {"pass_marks", python_pass_marks, METH_NOARGS, "Take anchors and look which marks were passed, in this thread."},
    {"synchronized", python_synchronized, METH_NOARGS, "Note that the host has waited for the device."},
    {"switch_off", python_switch_off, METH_NOARGS, "Let marks be the host's time from now on."},
    {"device_state", python_device_state, METH_NOARGS, "Return (is open, failure of the driver or 0, first device or -1)."},
    {"host_ns", python_host_ns, METH_NOARGS, "Return the host's time, ns."},
    {"use_clock", python_use_clock, METH_O, "Take the host's time from a function of C, by its address; 0: the usual."},
    {"next_id", python_next_id, METH_NOARGS, "Return a number for a communication, unique in the process."},
    {"take_ids", python_take_ids, METH_O, "Return the first of so many numbers for communications."},
    {"num_added", python_num_added, METH_NOARGS, "Return how many communications and spans were recorded so far."},
    {"num_waiting", python_num_waiting, METH_NOARGS, "Return how many of them were not taken yet."},
    {"give_up", python_give_up, METH_NOARGS, "Count the rows that wait for the device as dropped."},
    {"reset", python_reset, METH_O, "Empty everything for a new recording, with room for so many rows."},
    {"take", rows_take, METH_NOARGS, "Return the finished rows: (number, bytes of columns), of spans and of calls."},
    {"dropped", rows_dropped, METH_NOARGS, "Return how many rows were dropped, by kind."},
    {"ahead", rows_ahead, METH_NOARGS, "Return the facts of communications that the device has not finished."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    mark_type = (PyTypeObject *)PyType_FromSpec(&mark_spec);
    if (mark_type == NULL) {
        return -1;
    }
    Py_INCREF(mark_type); /* ours beside the module's: marks may be made when that is gone, as Python ends */
    if (PyModule_AddObject(module, "Mark", (PyObject *)mark_type) < 0) {
        return -1;
    }
    if (marks_init() != 0 || groups_init(module) < 0 || calls_init() < 0 || methods_init(module) < 0 ||
        operators_init(module) < 0 || hooks_init(module) < 0 ||
        bucket_kernel_init(module) < 0 || modules_init(module) < 0 || rows_init(module) < 0) {
        return -1;
    }
    PyMethodDef *more[] = {calls_functions, operators_functions, hooks_functions, stamps_functions};
    for (size_t i = 0; i < sizeof more / sizeof more[0]; i++) {
        if (PyModule_AddFunctions(module, more[i]) < 0) {
            return -1;
        }
    }
    return PyModule_AddIntConstant(module, "ABI", ABI_VERSION);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
    {0, NULL},
};

static PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "core",
    .m_doc = "The native part of the recorder.",
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit_core(void) { return PyModuleDef_Init(&definition); }
