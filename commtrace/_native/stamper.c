/* What stamps need on a device: the kernels, memory that the host sees, and the device's clock.

   It is made once, before the first capture, and stays until the process ends: graphs may be replayed after the recording.
   The device's clock is compared with the host's by a stamp on a stream of our own, between two readings of the host's. */
#include "stamps.h"
#include "stamp_kernels.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    PAGES_PER_ARENA = 512,
    MOST_ARENAS = 32,
    MOST_SPINS = 100000,  /* should the host's clock stand still */
    PATIENCE_MS = 500,    /* of the self-test */
    PORTABLE_AND_MAPPED = 3, /* CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP */
    OWN_STREAM = 1,       /* CU_STREAM_NON_BLOCKING */
    LOADS_IN_CAPTURES = 12030, /* CUDA 12.3: earlier drivers load nothing while any stream is captured */
    LEAST_VERSION = 12000, /* with cuGraphAddKernelNode_v2 */
    RELAXED = 2,          /* CU_STREAM_CAPTURE_MODE_RELAXED: allocating and loading are allowed while others capture */
};

static const int64_t ANCHOR_INTERVAL_NS = 900000000;
static const int64_t BASELINE_NS = 2000000000; /* of two anchors that tell the drift */
static const double MOST_DRIFT = 200e-6;
static const double UNKNOWN_DRIFT = 100e-6; /* between the device's clock and the host's, until it is measured */
static const int64_t SELF_TEST_NS = 1000000;
/* A stamp becomes visible some microseconds after its launch has returned. What takes longer finds the device busy. */
static const int64_t ANCHOR_SPIN_NS = 100000;
static const int64_t SELF_TEST_SPIN_NS = 1000000;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of pages */
static _Atomic(Stamper *) stampers[MOST_DEVICES];

static const char TOO_OLD[] = "the driver is none of CUDA 12.0 or newer";
static const char LOADS_NOTHING[] = "another graph is captured, and a driver before CUDA 12.3 loads nothing meanwhile";
static const char NO_JIT[] = "the driver may not compile PTX: CUDA_DISABLE_PTX_JIT is set, or its compiler is missing";
static const char NOT_LOADED[] = "the driver has not loaded the kernels";
static const char NO_PROBE[] = "a stamp did not arrive within half a second";
static const char WRONG_CLOCK[] = "two stamps that were 1 ms apart are not, by the device's clock";

/* ---- the device's clock ----------------------------------------------------------------------------------------- */

static void pause_for_us(long microseconds) { nanosleep(&(struct timespec){0, microseconds * 1000L}, NULL); }

static bool has_arrived(Stamper *stamper) {
    return atomic_load_explicit(&stamper->probe->number, memory_order_acquire) == stamper->awaited_probe;
}

/* Spins first: a pause would widen the bracket of an anchor. */
static bool await_probe(Stamper *stamper, int64_t launched_ns, int patience_ms) {
    const int64_t spin_ns = patience_ms > 0 ? SELF_TEST_SPIN_NS : ANCHOR_SPIN_NS;
    for (int spins = 0; spins < MOST_SPINS; spins++) {
        if (has_arrived(stamper)) {
            return true;
        }
        if (host_ns() - launched_ns >= spin_ns) {
            break;
        }
    }
    for (int pauses = 0; pauses < 10 * patience_ms && !has_arrived(stamper); pauses++) {
        pause_for_us(100);
    }
    return has_arrived(stamper);
}

/* Puts a stamp on our own stream, and returns whether it arrived; a device that is too busy is given up. */
static bool take_probe(Stamper *stamper, Anchor *anchor, int patience_ms) {
    if (!has_arrived(stamper)) {
        return false; /* the one before has not arrived yet */
    }
    uint64_t counter = stamper->counters, head = stamper->heads_address, slots = stamper->probe_address;
    uint32_t mask = 0;
    if (graph_driver.launch(stamper->replay, 1, 1, 1, 1, 1, 1, 0, stamper->stream, (void *[]){&counter, &head}, NULL) !=
        DRIVER_SUCCESS) {
        return false;
    }
    stamper->num_probes++; /* also if no stamp follows: the device has counted it */
    int64_t before = host_ns();
    if (graph_driver.launch(stamper->stamp, 1, 1, 1, 1, 1, 1, 0, stamper->stream, (void *[]){&counter, &slots, &mask},
                            NULL) != DRIVER_SUCCESS) {
        return false;
    }
    stamper->awaited_probe = stamper->num_probes;
    if (!await_probe(stamper, before, patience_ms)) {
        return false;
    }
    int64_t after = host_ns();
    uint64_t time = atomic_load_explicit(&stamper->probe->time, memory_order_relaxed);
    *anchor = (Anchor){time, before + (after - before) / 2, after - before};
    return true;
}

static Anchor *latest_anchor(Stamper *stamper) { return &stamper->anchors[(stamper->num_anchors - 1) % NUM_ANCHORS]; }

static void take_anchor(Stamper *stamper) {
    Anchor best = {.bracket_ns = INT64_MAX}, anchor;
    for (int tries = 0; tries < 3; tries++) {
        if (take_probe(stamper, &anchor, 0) && anchor.bracket_ns < best.bracket_ns) {
            best = anchor;
        }
    }
    if (best.bracket_ns == INT64_MAX) {
        return;
    }
    if (stamper->num_anchors > 0) {
        /* A wide bracket, as of a thread that lost its core, is no better than what the last one has become. */
        const Anchor *last = latest_anchor(stamper);
        double drifted_ns = 2 * UNKNOWN_DRIFT * (double)(best.host_ns - last->host_ns);
        if ((double)best.bracket_ns > (double)last->bracket_ns + drifted_ns) {
            return;
        }
    }
    stamper->anchors[stamper->num_anchors++ % NUM_ANCHORS] = best;
}

/* The host's time of a reading of the device's clock, and half the width of where it may be. */
int64_t stamper_host_time(Stamper *stamper, uint64_t timer, int64_t *error_ns) {
    const Anchor *last = latest_anchor(stamper);
    int first_kept = stamper->num_anchors > NUM_ANCHORS ? stamper->num_anchors - NUM_ANCHORS : 0;
    const Anchor *first = &stamper->anchors[first_kept % NUM_ANCHORS];
    double elapsed = (double)(int64_t)(timer - last->timer), baseline = (double)(int64_t)(last->timer - first->timer);
    double drift = 0, unsure = UNKNOWN_DRIFT;
    if (baseline >= (double)BASELINE_NS) {
        drift = (double)(last->host_ns - first->host_ns) / baseline - 1;
        unsure = (double)(last->bracket_ns + first->bracket_ns) / 2 / baseline;
        if (fabs(drift) > MOST_DRIFT) {
            drift = drift > 0 ? MOST_DRIFT : -MOST_DRIFT;
            unsure = UNKNOWN_DRIFT;
        }
    }
    int64_t error = last->bracket_ns / 2 + llrint(fabs(elapsed) * unsure);
    *error_ns = error > *error_ns ? error : *error_ns;
    return last->host_ns + llrint(elapsed + elapsed * drift);
}

/* What was made on a device in the context that is used now; NULL if nothing was. */
Stamper *stamper_of(int device) {
    Stamper *stamper = atomic_load_explicit(&stampers[device], memory_order_acquire);
    return stamper != NULL && stamper->context == context_of_device(device) ? stamper : NULL;
}

void stamps_anchor(void) {
    int64_t now = 0;
    for (int device = 0; device < MOST_DEVICES && !device_has_failed(); device++) {
        Stamper *stamper = atomic_load_explicit(&stampers[device], memory_order_acquire);
        /* This thread asks for no context: the first use of a device is noted by training threads, under the GIL. */
        if (stamper == NULL || stamper->failure != NULL || stamper->context != known_context_of(device)) {
            continue;
        }
        now = now != 0 ? now : host_ns();
        if (now - stamper->anchored_at >= ANCHOR_INTERVAL_NS) {
            stamper->anchored_at = now;
            driver.context_set_current(stamper->context);
            take_anchor(stamper);
        }
    }
}

/* ---- making what a device needs --------------------------------------------------------------------------------- */

static bool add_arena(Stamper *stamper) {
    const size_t page_size = sizeof(Slot) * STAMPS_PER_PAGE * NUM_SLOTS;
    char *memory;
    uint64_t address;
    Page *pages = calloc(PAGES_PER_ARENA, sizeof(Page));
    if (pages == NULL || stamper->num_arenas == MOST_ARENAS ||
        graph_driver.allocate_on_host((void **)&memory, page_size * PAGES_PER_ARENA, PORTABLE_AND_MAPPED) !=
            DRIVER_SUCCESS ||
        graph_driver.address_of_host(&address, memory, 0) != DRIVER_SUCCESS) {
        free(pages);
        return false;
    }
    pthread_mutex_lock(&lock);
    for (int i = 0; i < PAGES_PER_ARENA; i++) {
        pages[i] = (Page){(Slot *)(memory + i * page_size), address + i * page_size, stamper->free_pages};
        stamper->free_pages = &pages[i];
    }
    stamper->num_free += PAGES_PER_ARENA;
    stamper->num_arenas++;
    pthread_mutex_unlock(&lock);
    return true;
}

/* Nothing can be allocated while a graph is captured: there is room for as many stamps as an arena has before it. */
static bool lacks_pages(const Stamper *stamper) {
    pthread_mutex_lock(&lock);
    bool has_few = stamper->num_free < PAGES_PER_ARENA;
    pthread_mutex_unlock(&lock);
    return has_few;
}

static const char *load_kernels(Stamper *stamper) {
    Module module;
    int status = graph_driver.module_load(&module, STAMP_KERNELS);
    /* CUDA_ERROR_NO_BINARY_FOR_GPU, _JIT_COMPILER_NOT_FOUND, _JIT_COMPILATION_DISABLED */
    if (status == 209 || status == 221 || status == 223) {
        return NO_JIT;
    }
    if (status != DRIVER_SUCCESS ||
        graph_driver.module_function(&stamper->replay, module, "commtrace_replay") != DRIVER_SUCCESS ||
        graph_driver.module_function(&stamper->stamp, module, "commtrace_stamp") != DRIVER_SUCCESS) {
        return NOT_LOADED;
    }
    return NULL;
}

static const char *allocate(Stamper *stamper) {
    const size_t heads_size = MOST_GRAPHS * sizeof(uint64_t);
    char *memory;
    int least, greatest;
    if (graph_driver.allocate_on_host((void **)&memory, heads_size + sizeof(Slot), PORTABLE_AND_MAPPED) !=
            DRIVER_SUCCESS ||
        graph_driver.address_of_host(&stamper->heads_address, memory, 0) != DRIVER_SUCCESS ||
        graph_driver.allocate(&stamper->counters, heads_size) != DRIVER_SUCCESS ||
        driver.stream_create(&stamper->stream, OWN_STREAM) != DRIVER_SUCCESS ||
        graph_driver.set_memory(stamper->counters, 0, heads_size, stamper->stream) != DRIVER_SUCCESS) {
        return NO_MEMORY;
    }
    memset(memory, 0, heads_size + sizeof(Slot));
    stamper->heads = (_Atomic uint64_t *)memory;
    stamper->probe = (Slot *)(memory + heads_size);
    stamper->probe_address = stamper->heads_address + heads_size;
    stamper->priority = graph_driver.priority_range(&least, &greatest) == DRIVER_SUCCESS ? greatest : 0;
    return add_arena(stamper) ? NULL : NO_MEMORY;
}

/* The device's clock must go as the host's does: the documentation of PTX promises nothing about it. */
static const char *test_clock(Stamper *stamper) {
    Anchor first, second;
    for (int tries = 0; tries < 3; tries++) {
        if (!take_probe(stamper, &first, PATIENCE_MS)) {
            return NO_PROBE;
        }
        for (int pauses = 0; pauses < 1000 && host_ns() - first.host_ns < SELF_TEST_NS; pauses++) {
            pause_for_us(100);
        }
        if (!take_probe(stamper, &second, PATIENCE_MS)) {
            return NO_PROBE;
        }
        double host = (double)(second.host_ns - first.host_ns), device = (double)(int64_t)(second.timer - first.timer);
        if (host >= (double)SELF_TEST_NS && fabs(device - host) <= 0.1 * host) {
            stamper->anchors[0] = second.bracket_ns < first.bracket_ns ? second : first;
            stamper->num_anchors = 1;
            stamper->anchored_at = second.host_ns;
            return NULL;
        }
    }
    return WRONG_CLOCK;
}

static const char *prepare(Stamper *stamper, bool is_alone) {
    int version = 0;
    if (graph_driver_missing() != NULL) {
        return TOO_OLD;
    }
    if (graph_driver.version(&version) != DRIVER_SUCCESS || version < LEAST_VERSION) {
        return TOO_OLD;
    }
    if (version < LOADS_IN_CAPTURES && !is_alone) {
        return LOADS_NOTHING;
    }
    const char *failure = load_kernels(stamper);
    failure = failure != NULL ? failure : allocate(stamper);
    return failure != NULL ? failure : test_clock(stamper);
}

const char *stamper_prepare(int device, bool is_alone) {
    Stamper *stamper = stamper_of(device);
    int mode = RELAXED;
    if (stamper == NULL || stamper->failure == LOADS_NOTHING) {
        stamper = calloc(1, sizeof *stamper);
        if (stamper == NULL) {
            return NO_MEMORY;
        }
        *stamper = (Stamper){.context = context_of_device(device), .device = device};
        Py_BEGIN_ALLOW_THREADS
        driver.exchange_capture_mode(&mode);
        stamper->failure = prepare(stamper, is_alone);
        driver.exchange_capture_mode(&mode);
        Py_END_ALLOW_THREADS
        atomic_store_explicit(&stampers[device], stamper, memory_order_release);
    } else if (stamper->failure == NULL && is_alone && lacks_pages(stamper)) {
        Py_BEGIN_ALLOW_THREADS
        driver.exchange_capture_mode(&mode);
        add_arena(stamper); /* without it, what finds no room is not stamped */
        driver.exchange_capture_mode(&mode);
        Py_END_ALLOW_THREADS
    }
    return stamper->failure;
}

Page *stamper_take_page(Stamper *stamper) {
    pthread_mutex_lock(&lock);
    Page *page = stamper->free_pages;
    if (page != NULL) {
        stamper->free_pages = page->next_free;
        stamper->num_free--;
    }
    pthread_mutex_unlock(&lock);
    if (page != NULL) {
        memset(page->slots, 0, sizeof(Slot) * STAMPS_PER_PAGE * NUM_SLOTS); /* numbers begin with 1 */
    }
    return page;
}

void stamper_return_page(Stamper *stamper, Page *page) {
    pthread_mutex_lock(&lock);
    page->next_free = stamper->free_pages;
    stamper->free_pages = page;
    stamper->num_free++;
    pthread_mutex_unlock(&lock);
}

void stampers_in_forked_child(void) {
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; /* the parent's thread may have had it */
    memset(stampers, 0, sizeof stampers);
}
