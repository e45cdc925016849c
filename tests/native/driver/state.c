/* What the driver knows of the process and its threads, and what each call begins with. */
#include "driver.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define AS_TEXT(name) #name,
const char *const function_names[FUNCTION_COUNT] = {FUNCTIONS(AS_TEXT)};

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t released = PTHREAD_COND_INITIALIZER;
uint64_t epoch = 1;
bool is_initialized;
int device_count;
struct device devices[MOST_DEVICES];
CUresult device_failure;
double drift_ppm;
struct script scripts[FUNCTION_COUNT];
_Atomic int64_t call_costs_ns[FUNCTION_COUNT];
int held_calls;
struct thread *threads;
static _Thread_local struct thread *current_thread;

_Atomic int64_t *calls_in_children;
static atomic_bool is_forked_child;

struct thread *this_thread(void)
{
    struct thread *thread = current_thread;
    if (thread == NULL) {
        thread = current_thread = allocate(1, sizeof(struct thread));
        thread->id = gettid();
        thread->next = threads;
        threads = thread;
    }
    if (thread->epoch != epoch) {
        pid_t id = thread->id;
        struct thread *next = thread->next;
        *thread = (struct thread){.id = id, .next = next, .epoch = epoch};
    }
    return thread;
}

static void lock_for_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void unlock_after_fork(void)
{
    pthread_mutex_unlock(&lock);
}

/* Everything fails in a child that was forked after its parent had initialised CUDA (in the runtime's words: with
 * cudaErrorInitializationError). A child of a process that had not may use the device. */
static void become_forked_child(void)
{
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    released = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    if (is_initialized)
        is_forked_child = true;
    if (current_thread != NULL)
        current_thread->id = gettid();
}

__attribute__((constructor)) static void load(void)
{
    size_t size = FUNCTION_COUNT * sizeof(*calls_in_children);
    calls_in_children = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (calls_in_children == MAP_FAILED || pthread_atfork(lock_for_fork, unlock_after_fork, become_forked_child) != 0)
        abort();
}

static void spend(int64_t duration_ns)
{
    if (duration_ns == 0)
        return;
    int64_t end_ns = monotonic_ns() + duration_ns;
    while (monotonic_ns() < end_ns)
        ;
}

static void count_call(enum function function)
{
    scripts[function].calls++;
    this_thread()->calls[function]++;
    if (scripts[function].is_fatal) {
        fprintf(stderr, "simulated driver: %s was called, which this test forbids\n", function_names[function]);
        abort();
    }
}

static void wait_until_released(enum function function)
{
    held_calls++;
    while (scripts[function].is_held)
        pthread_cond_wait(&released, &lock);
    held_calls--;
}

static CUresult scripted_status(enum function function)
{
    const struct script *script = &scripts[function];
    if (script->status != CUDA_SUCCESS && script->calls >= script->fails_from)
        return script->status;
    if (function == FUNCTION_cuInit || function == FUNCTION_cuDriverGetVersion)
        return CUDA_SUCCESS;
    return is_initialized ? device_failure : CUDA_ERROR_NOT_INITIALIZED;
}

/* Takes the lock, unless the call is refused. */
CUresult enter(enum function function)
{
    if (is_forked_child) {
        calls_in_children[function]++;
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    spend(call_costs_ns[function]);
    pthread_mutex_lock(&lock);
    count_call(function);
    wait_until_released(function);
    CUresult status = scripted_status(function);
    show_effects();
    if (status != CUDA_SUCCESS)
        pthread_mutex_unlock(&lock);
    return status;
}

CUresult leave(CUresult status)
{
    pthread_mutex_unlock(&lock);
    return status;
}
