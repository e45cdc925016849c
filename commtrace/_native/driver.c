/* The functions of the driver that timing needs: few, stable, and none that waits for the device; and those with which
   stamps are put into graphs (stamps.c), which a driver may lack. */
#include "core.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

Driver driver;

/* Their names in libcuda.so.1 and in HIP's libamdhip64.so, which has them with the same arguments and status codes. */
static const struct {
    const char *cuda, *hip;
    size_t place;
} functions[] = {
    {"cuEventCreate", "hipEventCreateWithFlags", offsetof(Driver, event_create)},
    {"cuEventDestroy_v2", "hipEventDestroy", offsetof(Driver, event_destroy)},
    {"cuEventRecord", "hipEventRecord", offsetof(Driver, event_record)},
    {"cuEventQuery", "hipEventQuery", offsetof(Driver, event_query)},
    {"cuEventElapsedTime", "hipEventElapsedTime", offsetof(Driver, event_elapsed_time)},
    {"cuStreamCreate", "hipStreamCreateWithFlags", offsetof(Driver, stream_create)},
    {"cuStreamDestroy_v2", "hipStreamDestroy", offsetof(Driver, stream_destroy)},
    {"cuStreamIsCapturing", "hipStreamIsCapturing", offsetof(Driver, stream_is_capturing)},
    {"cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode",
     offsetof(Driver, exchange_capture_mode)},
    {"cuCtxGetCurrent", "hipCtxGetCurrent", offsetof(Driver, context_get_current)},
    {"cuCtxSetCurrent", "hipCtxSetCurrent", offsetof(Driver, context_set_current)},
    {"cuCtxPushCurrent_v2", "hipCtxPushCurrent", offsetof(Driver, context_push)},
    {"cuCtxPopCurrent_v2", "hipCtxPopCurrent", offsetof(Driver, context_pop)},
    {"cuDevicePrimaryCtxGetState", "hipDevicePrimaryCtxGetState", offsetof(Driver, primary_context_state)},
    {"cuDevicePrimaryCtxRetain", "hipDevicePrimaryCtxRetain", offsetof(Driver, primary_context_retain)},
};

GraphDriver graph_driver;

/* CUDA's only: the kernels are PTX. Those that are missing stay NULL. */
static const struct {
    const char *name;
    size_t place;
} graph_functions[] = {
    {"cuDriverGetVersion", offsetof(GraphDriver, version)},
    {"cuModuleLoadData", offsetof(GraphDriver, module_load)},
    {"cuModuleGetFunction", offsetof(GraphDriver, module_function)},
    {"cuMemAlloc_v2", offsetof(GraphDriver, allocate)},
    {"cuMemHostAlloc", offsetof(GraphDriver, allocate_on_host)},
    {"cuMemHostGetDevicePointer_v2", offsetof(GraphDriver, address_of_host)},
    {"cuMemsetD8Async", offsetof(GraphDriver, set_memory)},
    {"cuLaunchKernel", offsetof(GraphDriver, launch)},
    {"cuCtxGetStreamPriorityRange", offsetof(GraphDriver, priority_range)},
    {"cuGraphGetNodes", offsetof(GraphDriver, nodes)},
    {"cuGraphNodeGetType", offsetof(GraphDriver, node_type)},
    {"cuGraphNodeGetDependencies", offsetof(GraphDriver, dependencies)},
    {"cuGraphAddKernelNode_v2", offsetof(GraphDriver, add_kernel)},
    {"cuGraphKernelNodeSetAttribute", offsetof(GraphDriver, set_attribute)},
    {"cuUserObjectCreate", offsetof(GraphDriver, object_create)},
    {"cuUserObjectRelease", offsetof(GraphDriver, object_release)},
    {"cuGraphRetainUserObject", offsetof(GraphDriver, retain_object)},
    {"cuStreamGetCaptureInfo_v2", offsetof(GraphDriver, capture_info)},
    {"cuStreamGetCaptureInfo_v3", offsetof(GraphDriver, capture_info_with_edges)},
    {"cuGraphNodeGetDependencies_v2", offsetof(GraphDriver, dependencies_with_edges)},
};
static const size_t NUM_NEEDED = sizeof graph_functions / sizeof graph_functions[0] - 2; /* the last two are of 12.3 */

const char *graph_driver_missing(void) {
    for (size_t i = 0; i < NUM_NEEDED; i++) {
        void *function;
        memcpy(&function, (char *)&graph_driver + graph_functions[i].place, sizeof function);
        if (function == NULL) {
            return graph_functions[i].name;
        }
    }
    return NULL;
}

static void open_graph_driver(void *library) {
    for (size_t i = 0; i < sizeof graph_functions / sizeof graph_functions[0]; i++) {
        void *function = dlsym(library, graph_functions[i].name);
        memcpy((char *)&graph_driver + graph_functions[i].place, &function, sizeof function);
    }
}

bool driver_open(const char *path, char *reason, size_t reason_size) {
    /* Never closed: its functions may be running in another thread. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        snprintf(reason, reason_size, "%s", dlerror());
        return false;
    }
    Driver opened;
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *function = dlsym(library, functions[i].cuda);
        if (function == NULL) {
            function = dlsym(library, functions[i].hip);
        }
        if (function == NULL) {
            snprintf(reason, reason_size, "%s has no %s", path, functions[i].cuda);
            return false;
        }
        memcpy((char *)&opened + functions[i].place, &function, sizeof function);
    }
    driver = opened;
    open_graph_driver(library);
    return true;
}
