/* The functions of the driver that timing needs: few, stable, and none that waits for the device. */
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
    return true;
}
