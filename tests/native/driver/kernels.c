/* Modules, memory, kernels that write into it, and user objects of graphs.
 *
 * Kernels are those of the native part, known by their names and run as their PTX says. What they write is seen when the
 * clock shows the time at which they ran, as on a device: at once when a test moves the clock, and else when the host
 * next reads the clock or calls the driver. An address of the device is none that the host could read by mistake. */
#include "driver.h"

#include <stdio.h>
#include <string.h>

#define DEVICE_MEMORY (UINT64_C(1) << 62)
#define MAPPED_MEMORY (UINT64_C(1) << 61)

uint64_t globaltimer_ahead_ns;
double globaltimer_ppm;
int64_t stamp_duration_ns;
int64_t launch_latency_ns;
_Atomic int64_t next_effect_ns = NEVER_NS;
int driver_version = 13000;

static const char *const kernel_names[] = {"commtrace_replay", "commtrace_stamp"};

/* The addresses of the device are tagged ones of the host. NULL: none. */
static void *host_address(uint64_t address)
{
    return address & (DEVICE_MEMORY | MAPPED_MEMORY) ? (void *)(address & ~(DEVICE_MEMORY | MAPPED_MEMORY)) : NULL;
}

CUresult load_module(CUmodule *module, const char *image)
{
    if (module == NULL || image == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult status = driver_version < 12030 ? refuse_unsafe_call() : CUDA_SUCCESS;
    if (status != CUDA_SUCCESS)
        return status;
    struct module *loaded = allocate(1, sizeof(struct module));
    for (int i = 0; i < KERNEL_COUNT; i++)
        loaded->has[i] = strstr(image, kernel_names[i]) != NULL;
    *module = table_add(&modules, loaded);
    return CUDA_SUCCESS;
}

CUresult find_function(CUfunction *function, CUmodule handle, const char *name)
{
    const struct module *module = table_get(&modules, handle);
    if (function == NULL || module == NULL || name == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < KERNEL_COUNT; i++) {
        if (module->has[i] && strcmp(name, kernel_names[i]) == 0) {
            *function = (CUfunction)(uintptr_t)(i + 1);
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult allocate_memory(uint64_t *address, size_t size, bool is_mapped)
{
    if (address == NULL || size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult status = refuse_unsafe_call();
    if (status != CUDA_SUCCESS)
        return status;
    void *memory = allocate(1, size);
    memset(memory, is_mapped ? 0xa5 : 0xc3, size); /* it begins with anything */
    *address = is_mapped ? (uint64_t)(uintptr_t)memory : (uint64_t)(uintptr_t)memory | DEVICE_MEMORY;
    return CUDA_SUCCESS;
}

uint64_t mapped_address(const void *memory)
{
    return (uint64_t)(uintptr_t)memory | MAPPED_MEMORY;
}

CUresult set_memory(uint64_t address, int value, size_t size)
{
    void *memory = host_address(address);
    if (memory == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    memset(memory, value, size);
    return CUDA_SUCCESS;
}

/* Copies the arguments, as the driver does when a node is added. */
bool read_kernel(struct kernel *kernel, CUfunction function, void **arguments)
{
    uintptr_t number = (uintptr_t)function;
    if (number < 1 || number > KERNEL_COUNT || arguments == NULL)
        return false;
    *kernel = (struct kernel){
        .number = (int)number,
        .counter = *(uint64_t *)arguments[0],
        .memory = *(uint64_t *)arguments[1],
        .mask = number == STAMP_KERNEL ? *(uint32_t *)arguments[2] : 0,
    };
    return host_address(kernel->counter) != NULL && host_address(kernel->memory) != NULL;
}

/* What kernels will have done, by time. */
struct effect {
    int64_t time_ns;
    struct kernel kernel;
    struct effect *next;
};

static struct effect *effects;

static void note_next_effect(void)
{
    next_effect_ns = effects != NULL ? effects->time_ns : NEVER_NS;
}

void run_kernel(const struct kernel *kernel, int64_t time_ns)
{
    if (time_ns >= NEVER_NS)
        return;
    struct effect **link = &effects;
    while (*link != NULL && (*link)->time_ns <= time_ns)
        link = &(*link)->next;
    struct effect *effect = allocate(1, sizeof(struct effect));
    *effect = (struct effect){.time_ns = time_ns, .kernel = *kernel, .next = *link};
    *link = effect;
    note_next_effect();
}

static uint64_t globaltimer_at(int64_t time_ns)
{
    return globaltimer_ahead_ns + (uint64_t)((double)time_ns * globaltimer_ppm / 1e6) + (uint64_t)time_ns;
}

static void apply(const struct effect *effect)
{
    const struct kernel *kernel = &effect->kernel;
    uint64_t *counter = host_address(kernel->counter);
    _Atomic uint64_t *memory = host_address(kernel->memory);
    if (kernel->number == REPLAY_KERNEL) {
        ++*counter;
        atomic_store_explicit(memory, *counter, memory_order_release);
        return;
    }
    _Atomic uint64_t *slot = memory + 2 * (*counter & kernel->mask);
    atomic_store_explicit(slot, globaltimer_at(effect->time_ns), memory_order_relaxed);
    atomic_store_explicit(slot + 1, *counter, memory_order_release);
}

void show_effects(void)
{
    while (effects != NULL && effects->time_ns <= simulated_now_ns()) {
        struct effect *effect = effects;
        effects = effect->next;
        apply(effect);
        free(effect);
    }
    note_next_effect();
}

void forget_effects(void)
{
    while (effects != NULL) {
        struct effect *effect = effects;
        effects = effect->next;
        free(effect);
    }
    note_next_effect();
}

static void release_object(struct user_object *object)
{
    if (--object->references == 0) {
        object->destroy(object->data);
        free(object);
    }
}

CUresult create_user_object(CUuserObject *handle, void *data, CUhostFn destroy, unsigned int references)
{
    if (handle == NULL || destroy == NULL || references == 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct user_object *object = allocate(1, sizeof(struct user_object));
    *object = (struct user_object){data, destroy, references};
    *handle = table_add(&user_objects, object);
    return CUDA_SUCCESS;
}

CUresult drop_user_object(CUuserObject handle)
{
    struct user_object *object = table_remove(&user_objects, handle);
    if (object == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    release_object(object);
    return CUDA_SUCCESS;
}

CUresult retain_user_object(CUgraph graph_handle, CUuserObject handle, bool moves)
{
    struct graph *graph = table_get(&graphs, graph_handle);
    struct user_object *object = table_get(&user_objects, handle);
    if (graph == NULL || object == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (moves)
        table_remove(&user_objects, handle);
    else
        object->references++;
    objects_add(&graph->objects, object);
    if (moves)
        object->references--; /* the caller's has become the graph's */
    return CUDA_SUCCESS;
}

void objects_add(struct object_list *list, struct user_object *object)
{
    list->objects = resize(list->objects, list->count + 1, sizeof(struct user_object *));
    list->objects[list->count++] = object;
    object->references++;
}

void objects_clear(struct object_list *list)
{
    for (uint32_t i = 0; i < list->count; i++)
        release_object(list->objects[i]);
    free(list->objects);
    *list = (struct object_list){0};
}
