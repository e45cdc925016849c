/* The native part of commtrace. It is built with the limited API of Python 3.10, so that one file serves all later
   versions, and without headers of torch or CUDA. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* The number that commtrace/_native/__init__.py wants. */
#define COMMTRACE_ABI 1

static int
core_exec(PyObject *module)
{
    return PyModule_AddIntConstant(module, "ABI", COMMTRACE_ABI);
}

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, core_exec},
    {0, NULL},
};

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "commtrace._native.core",
    .m_doc = "What commtrace does on the path of training, in C.",
    .m_size = 0,
    .m_slots = core_slots,
};

PyMODINIT_FUNC
PyInit_core(void)
{
    return PyModuleDef_Init(&core_module);
}
