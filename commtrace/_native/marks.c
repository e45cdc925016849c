/* Places on the streams of a device, and the thread that learns when the device passes them.

   Training threads take marks, under the GIL: an event of the driver, recorded on a stream. The thread below asks the
   driver which of them have been passed, and when. It never holds the GIL: a driver that is stuck holds up no training.
   An event's time is known by its distance from an anchor: an event on a stream of our own, on which nothing else
   runs, recorded between two readings of the host's clock. */
#include "core.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    MOST_MARKS = 1 << 17, /* on their way to the resolver, or ahead of the device */
    MOST_STREAMS = 1024,
    ANCHOR_TRIES = 3,
    ANCHOR_POLLS = 1000, /* then it is given up: the device is so busy that our stream waits, too */
    NON_BLOCKING = 1,    /* CU_STREAM_NON_BLOCKING: it does not wait for the default stream */
    THREAD_LOCAL = 1,    /* CU_STREAM_CAPTURE_MODE_THREAD_LOCAL */
    EXIT_PATIENCE_MS = 200,
};

static const int64_t ANCHOR_INTERVAL_NS = 500000000;
static const int64_t GATHER_INTERVAL_NS = 20000000;
static const int64_t DRIFT_PPM = 100; /* largest drift between the device's clock and the host's */
static const double NANOSECONDS_PER_MILLISECOND = 1e6;
/* A host that takes longer to record an event was kept from going on: when it did so is not known. */
static const int64_t LONGEST_RECORD_NS = 10000;
/* Of an anchor by which leads are told. */
static const int64_t WIDEST_BRACKET_NS = 100000;

/* ---- clock ------------------------------------------------------------------------------------------------------ */

static int64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int64_t (*_Atomic host_clock)(void) = monotonic_ns;

int64_t host_ns(void) { return atomic_load_explicit(&host_clock, memory_order_relaxed)(); }

void use_clock(int64_t (*clock)(void)) { atomic_store(&host_clock, clock != NULL ? clock : monotonic_ns); }

/* ---- devices ---------------------------------------------------------------------------------------------------- */

typedef struct {
    _Atomic(Context) context; /* the primary one; NULL as long as the job has none on this device. Set under the GIL */
    Mark *pool;              /* under the GIL */
    _Atomic(Mark *) returned; /* by any thread; taken into the pool when that is empty */
    _Atomic bool is_marked;
    Stream anchor_stream; /* from here on: the resolver's */
    Event anchor, spare;
    int64_t anchor_ns, anchor_bracket_ns;
    bool has_anchor;
} Device;

static Device devices[MOST_DEVICES];
static int first_device = NOT_APPLICABLE;
static _Atomic int generation;
static _Atomic bool is_open;
static _Atomic int failure; /* a status of the driver: nothing of the device is believed after it */

bool device_is_open(void) { return atomic_load_explicit(&is_open, memory_order_relaxed); }
bool device_has_failed(void) { return atomic_load_explicit(&failure, memory_order_relaxed) != DRIVER_SUCCESS; }
int device_failure(void) { return atomic_load(&failure); }
int device_used_first(void) { return first_device; }

static void fail(int status) {
    int none = DRIVER_SUCCESS;
    atomic_compare_exchange_strong(&failure, &none, status);
}

void device_switch_off(void) { fail(-1); }

bool device_is_used(int device) {
    if (device < 0 || device >= MOST_DEVICES) {
        return false;
    }
    if (devices[device].context != NULL) {
        return true;
    }
    unsigned flags;
    int active = 0;
    /* Only where the job has a context already: it takes some hundred MB of the device. */
    if (driver.primary_context_state(device, &flags, &active) != DRIVER_SUCCESS || !active) {
        return false;
    }
    Context context = NULL;
    if (driver.primary_context_retain(&context, device) != DRIVER_SUCCESS) {
        return false;
    }
    atomic_store(&devices[device].context, context);
    return true;
}

int device_of_context(void) {
    Context current = NULL;
    if (driver.context_get_current(&current) != DRIVER_SUCCESS || current == NULL) {
        return NOT_APPLICABLE;
    }
    for (int device = 0; device < MOST_DEVICES; device++) {
        if (devices[device].context == current) {
            return device;
        }
    }
    return NOT_APPLICABLE;
}

bool push_context(int device) {
    Context current = NULL;
    driver.context_get_current(&current);
    return current != devices[device].context && driver.context_push(devices[device].context) == DRIVER_SUCCESS;
}

void pop_context(bool was_pushed) {
    Context popped;
    if (was_pushed) {
        driver.context_pop(&popped);
    }
}

Context known_context_of(int device) { return atomic_load(&devices[device].context); }

Context context_of_device(int device) { return device_is_used(device) ? devices[device].context : NULL; }

/* ---- marks, by training threads --------------------------------------------------------------------------------- */

/* What stands for a mark for which there was no room. Never freed. */
static Mark lost = {.references = 1 << 30, .state = MARK_LOST, .device = NOT_APPLICABLE, .lead_us = UNKNOWN_LEAD};

static Mark *taken[MOST_MARKS]; /* a ring: training threads add under the GIL, the resolver takes */
static _Atomic uint64_t num_taken, num_received;
static uint64_t num_held; /* by the resolver, ahead of the device */
static _Atomic uint64_t num_ahead;

Point point_of_host(void) { return (Point){NULL, host_ns()}; }

static void mark_retain(Mark *mark) { atomic_fetch_add_explicit(&mark->references, 1, memory_order_relaxed); }

static void mark_release(Mark *mark) {
    if (atomic_fetch_sub_explicit(&mark->references, 1, memory_order_acq_rel) != 1) {
        return;
    }
    if (mark->generation != atomic_load_explicit(&generation, memory_order_relaxed)) {
        free(mark); /* its event stays in the driver, of which nothing is asked here: any thread may come by */
        return;
    }
    _Atomic(Mark *) *returned = &devices[mark->device].returned;
    mark->next = atomic_load_explicit(returned, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(returned, &mark->next, mark, memory_order_release,
                                                  memory_order_relaxed)) {
    }
}

Point point_shared(Point point) {
    if (point.mark != NULL) {
        mark_retain(point.mark);
    }
    return point;
}

void point_release(Point point) {
    if (point.mark != NULL) {
        mark_release(point.mark);
    }
}

int point_time(Point point, int64_t *ns) {
    if (point.mark == NULL) {
        *ns = point.ns;
        return 1;
    }
    switch (atomic_load_explicit(&point.mark->state, memory_order_acquire)) {
    case MARK_PASSED:
        *ns = point.mark->time_ns;
        return 1;
    case MARK_AHEAD:
        return device_has_failed() ? -1 : 0;
    default:
        return -1;
    }
}

int64_t point_taken_at(Point point) { return point.mark == NULL ? 0 : point.mark->taken_at; }

int16_t point_lead(Point point) { return point.mark == NULL ? UNKNOWN_LEAD : point.mark->lead_us; }

int64_t point_host_ns(Point point) {
    if (point.mark == NULL) {
        return point.ns;
    }
    return point.mark == &lost ? host_ns() : point.mark->taken_at; /* that one stands for many */
}

static Mark *pooled_mark(int device) {
    Device *owner = &devices[device];
    if (owner->pool == NULL) {
        owner->pool = atomic_exchange_explicit(&owner->returned, NULL, memory_order_acquire);
    }
    Mark *mark = owner->pool;
    if (mark != NULL) {
        owner->pool = mark->next;
        return mark;
    }
    mark = calloc(1, sizeof *mark);
    if (mark == NULL) {
        return NULL;
    }
    int status = driver.event_create(&mark->event, 0);
    if (status != DRIVER_SUCCESS) {
        fail(status);
        free(mark);
        return NULL;
    }
    mark->device = device;
    mark->generation = atomic_load(&generation);
    return mark;
}

/* The streams that were marked since the host waited for the device. What it waited for is not known: the next mark of
   each stream of each device is passed at once by necessity. All of it under the GIL. */
static struct {
    bool is_any; /* synchronisation, ever */
    int num_marked;
    struct {
        Stream stream;
        int device;
    } marked[MOST_STREAMS];
} synchronized;

void device_synchronized(void) {
    synchronized.is_any = true;
    synchronized.num_marked = 0;
}

static void forget_synchronizations(void) {
    synchronized.is_any = false;
    synchronized.num_marked = 0;
}

/* Notes a mark, and returns whether it is its stream's first since a synchronisation. */
static bool is_first_since_synchronized(int device, Stream stream) {
    if (!synchronized.is_any) {
        return false;
    }
    for (int i = 0; i < synchronized.num_marked; i++) {
        if (synchronized.marked[i].stream == stream && synchronized.marked[i].device == device) {
            return false;
        }
    }
    if (synchronized.num_marked == MOST_STREAMS) {
        synchronized.num_marked = 0; /* as after another one: no mark is taken for that of a late host */
    }
    synchronized.marked[synchronized.num_marked].stream = stream;
    synchronized.marked[synchronized.num_marked++].device = device;
    return true;
}

static Point recorded(int device, Stream stream) {
    int is_capturing = 0;
    /* An event would belong to the graph. The driver answers an error for the default stream while another thread
       captures (906): nothing must be done on it then. */
    if (driver.stream_is_capturing(stream, &is_capturing) != DRIVER_SUCCESS || is_capturing) {
        return point_of_host();
    }
    Mark *mark = pooled_mark(device);
    if (mark == NULL) {
        return point_of_host();
    }
    int64_t before = host_ns();
    int status = driver.event_record(mark->event, stream);
    if (status != DRIVER_SUCCESS) {
        fail(status);
        mark->next = devices[device].pool;
        devices[device].pool = mark;
        return point_of_host();
    }
    mark->stream = stream;
    mark->taken_at = host_ns();
    mark->taken_from = is_first_since_synchronized(device, stream)   ? SYNCHRONIZED_LEAD
                       : mark->taken_at - before > LONGEST_RECORD_NS ? UNKNOWN_LEAD
                                                                     : before;
    atomic_store_explicit(&mark->references, 2, memory_order_relaxed); /* the caller's, and the resolver's */
    atomic_store_explicit(&mark->state, MARK_AHEAD, memory_order_relaxed);
    uint64_t at = atomic_load_explicit(&num_taken, memory_order_relaxed);
    taken[at % MOST_MARKS] = mark;
    atomic_store_explicit(&num_taken, at + 1, memory_order_release);
    return (Point){mark, 0};
}

Point point_on(int device, Stream stream) {
    /* It may have been closed, and opened again, since the device was found to be in use. */
    if (!device_is_open() || device_has_failed() || devices[device].context == NULL) {
        return point_of_host();
    }
    uint64_t on_their_way = atomic_load_explicit(&num_taken, memory_order_relaxed) -
                            atomic_load_explicit(&num_received, memory_order_acquire);
    if (on_their_way + atomic_load_explicit(&num_ahead, memory_order_relaxed) >= MOST_MARKS) {
        mark_retain(&lost);
        return (Point){&lost, 0};
    }
    bool was_pushed = push_context(device);
    Point point = recorded(device, stream);
    pop_context(was_pushed);
    if (point.mark != NULL && !atomic_load_explicit(&devices[device].is_marked, memory_order_relaxed)) {
        atomic_store(&devices[device].is_marked, true);
        first_device = first_device == NOT_APPLICABLE ? device : first_device;
    }
    return point;
}

/* ---- resolving, without the GIL --------------------------------------------------------------------------------- */

typedef struct {
    Stream stream;
    int device;
    Mark *first, *last;
} Queue; /* marks on a stream, in order: while the device has not passed the first, it has passed none */

static Queue queues[MOST_STREAMS];
static int num_queues;

static void set_passed(Mark *mark, int64_t time_ns) {
    mark->time_ns = time_ns;
    atomic_store_explicit(&mark->state, MARK_PASSED, memory_order_release);
}

static void let_go(Mark *mark) {
    num_held--;
    mark_release(mark);
}

static Queue *queue_of(const Mark *mark) {
    for (int i = 0; i < num_queues; i++) {
        if (queues[i].stream == mark->stream && queues[i].device == mark->device) {
            return &queues[i];
        }
    }
    for (int i = 0; i < num_queues; i++) {
        if (queues[i].first == NULL) { /* a stream without marks: perhaps it is gone */
            queues[i] = (Queue){mark->stream, mark->device, NULL, NULL};
            return &queues[i];
        }
    }
    if (num_queues == MOST_STREAMS) {
        return NULL;
    }
    queues[num_queues] = (Queue){mark->stream, mark->device, NULL, NULL};
    return &queues[num_queues++];
}

static void receive_marks(void) {
    uint64_t received = atomic_load_explicit(&num_received, memory_order_relaxed);
    uint64_t end = atomic_load_explicit(&num_taken, memory_order_acquire);
    for (; received != end; received++) {
        Mark *mark = taken[received % MOST_MARKS];
        Queue *queue = queue_of(mark);
        num_held++;
        mark->next = NULL;
        if (queue == NULL) {
            atomic_store_explicit(&mark->state, MARK_LOST, memory_order_release);
            let_go(mark);
        } else if (queue->first == NULL) {
            queue->first = queue->last = mark;
        } else {
            queue->last = queue->last->next = mark;
        }
    }
    atomic_store_explicit(&num_ahead, num_held, memory_order_relaxed);
    atomic_store_explicit(&num_received, received, memory_order_release);
}

static int16_t lead_of(const Mark *mark, int64_t passed_ns) {
    if (mark->taken_from < 0) {
        return (int16_t)mark->taken_from;
    }
    if (devices[mark->device].anchor_bracket_ns > WIDEST_BRACKET_NS) {
        return UNKNOWN_LEAD;
    }
    int64_t lead_us = (passed_ns - mark->taken_from) / 1000;
    return (int16_t)(lead_us < LEAST_LEAD_US ? LEAST_LEAD_US : lead_us > MOST_LEAD_US ? MOST_LEAD_US : lead_us);
}

/* Whether the device has passed the mark, or has failed. */
static bool is_over(Mark *mark) {
    int status = driver.event_query(mark->event);
    if (status == DRIVER_NOT_READY) {
        return false;
    }
    float milliseconds;
    const Device *device = &devices[mark->device];
    if (status == DRIVER_SUCCESS) {
        status = driver.event_elapsed_time(&milliseconds, device->anchor, mark->event);
    }
    if (status == DRIVER_SUCCESS) {
        /* float32 milliseconds: 60 ns fine at 1 s, 0.25 ms after an hour. So anchors are renewed. */
        int64_t passed_ns = device->anchor_ns + llrint((double)milliseconds * NANOSECONDS_PER_MILLISECOND);
        mark->lead_us = lead_of(mark, passed_ns);
        set_passed(mark, passed_ns);
    } else {
        fail(status);
        atomic_store_explicit(&mark->state, MARK_LOST, memory_order_release);
    }
    return true;
}

/* The device has failed, or the recording is over: nothing more is learnt of what was held. */
static void lose_marks(void) {
    for (int i = 0; i < num_queues; i++) {
        while (queues[i].first != NULL) {
            Mark *mark = queues[i].first;
            queues[i].first = mark->next;
            atomic_store_explicit(&mark->state, MARK_LOST, memory_order_release);
            let_go(mark);
        }
    }
}

static void pass_marks(void) {
    for (int i = 0; i < num_queues; i++) {
        Queue *queue = &queues[i];
        if (queue->first != NULL) {
            driver.context_set_current(devices[queue->device].context);
        }
        while (queue->first != NULL && !device_has_failed() && devices[queue->device].has_anchor &&
               is_over(queue->first)) {
            Mark *passed = queue->first;
            queue->first = passed->next;
            let_go(passed);
        }
    }
    if (device_has_failed()) {
        lose_marks();
    }
    atomic_store_explicit(&num_ahead, num_held, memory_order_relaxed);
}

/* Takes a better anchor, if the reading is one: a thread that lost its core in between makes a wide bracket. */
static void read_anchor(Device *device) {
    int64_t before = host_ns();
    int status = driver.event_record(device->spare, device->anchor_stream);
    for (int polls = 0; status == DRIVER_SUCCESS; polls++) {
        status = driver.event_query(device->spare);
        if (status != DRIVER_NOT_READY) {
            break;
        }
        if (polls == ANCHOR_POLLS) {
            return;
        }
        status = DRIVER_SUCCESS;
    }
    if (status != DRIVER_SUCCESS) {
        fail(status);
        return;
    }
    int64_t after = host_ns(), bracket_ns = after - before, at_ns = before + bracket_ns / 2;
    int64_t drifted_ns = 2 * DRIFT_PPM * (at_ns - device->anchor_ns) / 1000000;
    if (device->has_anchor && bracket_ns > device->anchor_bracket_ns + drifted_ns) {
        return;
    }
    Event event = device->spare;
    device->spare = device->anchor;
    device->anchor = event;
    device->anchor_ns = at_ns;
    device->anchor_bracket_ns = bracket_ns;
    device->has_anchor = true;
}

static void prepare_anchors(Device *device) {
    int status = driver.event_create(&device->anchor, 0);
    if (status == DRIVER_SUCCESS) {
        status = driver.event_create(&device->spare, 0);
    }
    if (status == DRIVER_SUCCESS) {
        status = driver.stream_create(&device->anchor_stream, NON_BLOCKING);
    }
    if (status != DRIVER_SUCCESS) {
        fail(status);
    }
}

static void take_anchors(void) {
    for (int i = 0; i < MOST_DEVICES; i++) {
        Device *device = &devices[i];
        if (!atomic_load(&device->is_marked) || device_has_failed()) {
            continue;
        }
        driver.context_set_current(device->context);
        if (device->anchor_stream == NULL) {
            /* By default a query of this thread fails, and breaks the capture, while another thread captures a graph.
               The watchdog of ProcessGroupNCCL does the same: https://github.com/pytorch/pytorch/pull/148594 */
            int mode = THREAD_LOCAL;
            driver.exchange_capture_mode(&mode);
            prepare_anchors(device);
        }
        for (int tries = 0; tries < ANCHOR_TRIES && !device_has_failed(); tries++) {
            read_anchor(device);
        }
    }
    stamps_anchor();
}

void device_pass(void) {
    take_anchors();
    receive_marks();
    pass_marks();
    stamps_read();
}

/* ---- the resolver's thread -------------------------------------------------------------------------------------- */

static pthread_t resolver;
static bool has_resolver;
static _Atomic bool is_to_run, is_running, is_closing;

static void pause_for(int milliseconds) {
    nanosleep(&(struct timespec){milliseconds / 1000, milliseconds % 1000 * 1000000L}, NULL);
}

static bool lacks_an_anchor(void) {
    for (int i = 0; i < MOST_DEVICES; i++) {
        if (atomic_load(&devices[i].is_marked) && !devices[i].has_anchor) {
            return true;
        }
    }
    return false;
}

static void *resolve(void *unused) {
    (void)unused;
    int64_t anchored_at = 0, gathered_at = 0;
    while (atomic_load_explicit(&is_to_run, memory_order_relaxed)) {
        int64_t now = host_ns();
        receive_marks();
        if (now - anchored_at >= ANCHOR_INTERVAL_NS || (num_held != 0 && lacks_an_anchor())) {
            take_anchors();
            anchored_at = now;
        }
        pass_marks();
        bool is_replayed = stamps_read();
        if (now - gathered_at >= GATHER_INTERVAL_NS) {
            rows_gather();
            gathered_at = now;
        }
        pause_for(num_held != 0 || is_replayed ? 1 : 5);
    }
    atomic_store(&is_running, false);
    return NULL;
}

static bool start_resolver(void) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* no signal of the job is handled on it */
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 256 << 10);
    atomic_store(&is_to_run, true);
    atomic_store(&is_running, true);
    has_resolver = pthread_create(&resolver, &attributes, resolve, NULL) == 0;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (has_resolver) {
        pthread_setname_np(resolver, "commtrace-marks");
    } else {
        atomic_store(&is_running, false);
    }
    return has_resolver;
}

/* Ends the thread, if the driver lets it: one that is stuck is left behind after so long. */
static bool stop_resolver(int patience_ms) {
    atomic_store(&is_to_run, false);
    for (int waited_ms = 0; atomic_load(&is_running) && waited_ms < patience_ms; waited_ms++) {
        pause_for(1);
    }
    if (atomic_load(&is_running)) {
        return false;
    }
    if (has_resolver) {
        pthread_join(resolver, NULL);
        has_resolver = false;
    }
    return true;
}

static void at_exit(void) {
    atomic_store(&is_open, false);
    stop_resolver(EXIT_PATIENCE_MS);
}

bool device_is_held(void) { return atomic_load(&is_closing) || (has_resolver && !atomic_load(&is_to_run)); }

bool device_open(bool threaded) {
    static bool has_exit_function;
    /* Registered when the driver has been loaded: it then runs before the driver's own, which ends the device. */
    if (!has_exit_function) {
        has_exit_function = atexit(at_exit) == 0;
    }
    if (threaded && !has_resolver && !start_resolver()) {
        return false;
    }
    atomic_store(&is_open, true);
    return true;
}

static void free_pool(Mark *mark) {
    while (mark != NULL) {
        Mark *next = mark->next;
        if (!device_has_failed()) {
            driver.event_destroy(mark->event);
        }
        free(mark);
        mark = next;
    }
}

static void free_anchors(const Device *device) {
    if (device->anchor_stream != NULL && !device_has_failed()) {
        driver.event_destroy(device->anchor);
        driver.event_destroy(device->spare);
        driver.stream_destroy(device->anchor_stream);
    }
}

static void free_devices(void) {
    for (int device = 0; device < MOST_DEVICES; device++) {
        if (devices[device].context != NULL) {
            bool was_pushed = push_context(device);
            free_pool(devices[device].pool);
            free_pool(atomic_load(&devices[device].returned));
            free_anchors(&devices[device]);
            pop_context(was_pushed);
        }
    }
}

bool device_shut(void) {
    atomic_store(&is_open, false);
    forget_synchronizations();
    return !atomic_exchange(&is_closing, true);
}

static void forget_devices(void) {
    memset(devices, 0, sizeof devices);
    atomic_fetch_add(&generation, 1);
    first_device = NOT_APPLICABLE;
    atomic_store(&failure, DRIVER_SUCCESS);
    num_queues = 0;
    num_held = 0;
    atomic_store(&num_ahead, 0);
}

bool device_close(int patience_ms) {
    bool has_ended = stop_resolver(patience_ms);
    if (has_ended) {
        receive_marks();
        lose_marks();
        stamps_close();
        free_devices();
        forget_devices();
    }
    atomic_store(&is_closing, false);
    return has_ended;
}

static void in_forked_child(void) {
    /* The thread is the parent's, and so is the driver: nothing is asked of it here, not even to free an event. */
    atomic_store(&is_open, false);
    atomic_store(&is_to_run, false);
    atomic_store(&is_running, false);
    atomic_store(&is_closing, false);
    has_resolver = false;
    /* The thread may have been changing what follows: its marks are left behind. */
    atomic_store(&num_received, atomic_load(&num_taken));
    forget_synchronizations();
    stamps_in_forked_child();
    forget_devices();
}

int marks_init(void) { return pthread_atfork(NULL, NULL, in_forked_child); }
