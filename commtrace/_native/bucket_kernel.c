/* A kernel in torch's dispatcher for all_reduce, before torch 2.14: it sees the buckets that DistributedDataParallel's
   reducer sends. Later versions have hooks, see hooks.c, which remembers buckets for both.

   A bucket is one plain tensor, in a backward, on a group that is known. All else goes to `slow`, the kernel in Python: see
   commtrace/capture/collectives/dispatcher.py. */
#include "core.h"

enum { KEYS, TENSORS, GROUP, FEWEST_ARGUMENTS }; /* positions */

static PyObject *name_is_meta;

typedef struct {
    PyObject_HEAD
    PyObject *redispatch; /* (keys, arguments …): runs the operator's next kernel */
    PyObject *backends;   /* the keys behind ours */
    PyObject *slow;
    PyObject *group_of, *work_of; /* take a process group, and a Work, out of the box in which torch hands them to kernels */
} BucketKernel;

static PyObject *run_next(const BucketKernel *kernel, PyObject *arguments) {
    Py_ssize_t num_arguments = PyTuple_Size(arguments);
    PyObject *keys = PyNumber_And(PyTuple_GetItem(arguments, KEYS), kernel->backends);
    PyObject *passed = keys == NULL ? NULL : PyTuple_New(num_arguments);
    if (passed == NULL) {
        Py_XDECREF(keys);
        return NULL;
    }
    PyTuple_SetItem(passed, KEYS, keys);
    for (Py_ssize_t i = KEYS + 1; i < num_arguments; i++) {
        PyObject *argument = PyTuple_GetItem(arguments, i);
        Py_INCREF(argument);
        PyTuple_SetItem(passed, i, argument);
    }
    PyObject *result = PyObject_Call(kernel->redispatch, passed, NULL);
    Py_DECREF(passed);
    return result;
}

/* The only tensor of a list, plain and real: borrowed, and NULL where it has none, or with an exception. */
static PyObject *only_tensor(PyObject *tensors) {
    bool is_meta;
    if (!PyList_CheckExact(tensors) || PyList_Size(tensors) != 1) {
        return NULL;
    }
    PyObject *tensor = PyList_GetItem(tensors, 0);
    bool is_real = is_plain_tensor(tensor) && attribute_is_true(tensor, name_is_meta, &is_meta) && !is_meta;
    return is_real ? tensor : NULL;
}

/* The group in a box, a new reference; NULL where Python must look, or with an exception. */
static Group *group_in(const BucketKernel *kernel, PyObject *box) {
    PyObject *process_group = PyObject_CallFunctionObjArgs(kernel->group_of, box, NULL);
    if (process_group == NULL) {
        return NULL;
    }
    Group *group = held_group(process_group);
    Py_DECREF(process_group);
    return group;
}

/* What is ours before a call: SLOW, maybe with an exception, for what is no bucket, or is uncommon. */
static Call before(const BucketKernel *kernel, PyObject *arguments, int64_t *task) {
    Call call = new_call();
    if (is_inside && !futures_are_watched()) { /* counted where it was called */
        call.way = PASS;
        return call;
    }
    if (is_inside || is_capturing || !current_pass(task) || *task == -1) {
        return call;
    }
    PyObject *tensor = only_tensor(PyTuple_GetItem(arguments, TENSORS));
    if (tensor == NULL || !measure_tensor(tensor, &call)) {
        return call;
    }
    Group *group = group_in(kernel, PyTuple_GetItem(arguments, GROUP));
    if (group != NULL && session == call.session && buckets_are_watched()) {
        call.facts.seq = group_next_collective(group);
        call.is_counted = true;
        begin_bucket(group, &call);
    }
    Py_XDECREF(group);
    return call;
}

static void after(const BucketKernel *kernel, Call *call, int64_t task, PyObject *result) {
    bool is_sent = result != NULL && call->session == session && buckets_are_watched();
    if (!is_sent || call->way != RECORD) {
        call->is_counted = call->is_counted && result == NULL; /* refused: the number is free, as it is on the other ranks */
        undo_call(call);
        return;
    }
    PyObject *box = PyTuple_Check(result) && PyTuple_Size(result) == 2 ? PyTuple_GetItem(result, 1) : Py_None;
    PyObject *work = PyObject_CallFunctionObjArgs(kernel->work_of, box, NULL);
    if (work == NULL) {
        give_up_call(&call->facts, call->start);
    } else {
        bucket_sent(call, task, work);
        Py_DECREF(work);
    }
    Py_CLEAR(call->group);
}

static PyObject *call_natively(const BucketKernel *kernel, PyObject *arguments, bool *is_slow) {
    int64_t task = NOT_APPLICABLE;
    Call call = before(kernel, arguments, &task);
    *is_slow = call.way == SLOW;
    if (*is_slow) {
        clear_exception(); /* arguments that could not be read: Python's path knows what to say */
        undo_call(&call);
    }
    if (hook_error_is_for_the_job()) {
        *is_slow = false;
        undo_call(&call);
        return NULL;
    }
    if (*is_slow) {
        return NULL;
    }
    PyObject *result = run_next(kernel, arguments);
    Raised raised = take_raised(result);
    after(kernel, &call, task, result);
    return result_or_raised(result, raised, hook_error_is_for_the_job());
}

static PyObject *kernel_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
    const BucketKernel *kernel = (const BucketKernel *)self;
    bool is_slow = true;
    PyObject *result = NULL;
    Py_INCREF(self); /* what the call does may take the kernel out */
    bool is_positional = keywords == NULL || PyDict_Size(keywords) == 0;
    if (buckets_are_watched() && is_positional && PyTuple_Size(arguments) >= FEWEST_ARGUMENTS) {
        enter_hook();
        result = call_natively(kernel, arguments, &is_slow);
        leave_hook();
    }
    if (is_slow) {
        result = PyObject_Call(kernel->slow, arguments, keywords);
    }
    Py_DECREF(self);
    return result;
}

static PyObject **fields_of(BucketKernel *kernel, int i) {
    PyObject **fields[] = {&kernel->redispatch, &kernel->backends, &kernel->slow, &kernel->group_of, &kernel->work_of};
    return fields[i];
}

enum { NUM_FIELDS = 5 };

static PyObject *kernel_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"redispatch", "backends", "slow", "group_of", "work_of", NULL};
    PyObject *given[NUM_FIELDS];
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OOOOO", names, &given[0], &given[1], &given[2], &given[3],
                                     &given[4])) {
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    BucketKernel *kernel = (BucketKernel *)allocate(type, 0);
    for (int i = 0; kernel != NULL && i < NUM_FIELDS; i++) {
        Py_INCREF(given[i]);
        *fields_of(kernel, i) = given[i];
    }
    return (PyObject *)kernel;
}

static int kernel_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (int i = 0; i < NUM_FIELDS; i++) {
        Py_VISIT(*fields_of((BucketKernel *)self, i));
    }
    return 0;
}

static int kernel_clear(PyObject *self) {
    for (int i = 0; i < NUM_FIELDS; i++) {
        Py_CLEAR(*fields_of((BucketKernel *)self, i));
    }
    return 0;
}

static PyType_Slot kernel_slots[] = {
    {Py_tp_new, kernel_new},           {Py_tp_dealloc, object_dealloc},
    {Py_tp_traverse, kernel_traverse}, {Py_tp_clear, kernel_clear},
    {Py_tp_call, kernel_call},         {Py_tp_doc, "A kernel for all_reduce, which records the buckets of a reducer."},
    {0, NULL},
};

static PyType_Spec kernel_spec = {"commtrace._native.core.BucketKernel", sizeof(BucketKernel), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kernel_slots};

int bucket_kernel_init(PyObject *module) {
    const InternedName names[] = {{&name_is_meta, "is_meta"}};
    if (!intern_names(names, sizeof names / sizeof names[0])) {
        return -1;
    }
    PyObject *kernel_type = PyType_FromSpec(&kernel_spec);
    return kernel_type == NULL ? -1 : PyModule_AddObject(module, "BucketKernel", kernel_type);
}
