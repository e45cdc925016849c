/* What the parts of the native recorder share. See core.c for what they are and how they fit together. */
#ifndef COMMTRACE_CORE_H
#define COMMTRACE_CORE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NOT_APPLICABLE (-1)

/* ---- driver.c: the functions of libcuda or of HIP ------------------------------------------------------------- */

typedef void *Event;
typedef void *Stream;
typedef void *Context;

enum { DRIVER_SUCCESS = 0, DRIVER_NOT_READY = 600 };

typedef struct {
    int (*event_create)(Event *, unsigned flags);
    int (*event_destroy)(Event);
    int (*event_record)(Event, Stream);
    int (*event_query)(Event);
    int (*event_elapsed_time)(float *milliseconds, Event start, Event end);
    int (*stream_create)(Stream *, unsigned flags);
    int (*stream_destroy)(Stream);
    int (*stream_is_capturing)(Stream, int *status);
    int (*exchange_capture_mode)(int *mode);
    int (*context_get_current)(Context *);
    int (*context_set_current)(Context);
    int (*context_push)(Context);
    int (*context_pop)(Context *);
    int (*primary_context_state)(int device, unsigned *flags, int *active);
    int (*primary_context_retain)(Context *, int device);
} Driver;

extern Driver driver;

typedef void *Graph;
typedef void *Node;
typedef void *Module;
typedef void *Function;
typedef void *UserObject;

/* CUgraphEdgeData: all are 0 of an edge to whose end all of the node before it is over. */
typedef struct {
    unsigned char from_port, to_port, type, reserved[5];
} Edge;

/* CUDA_KERNEL_NODE_PARAMS_v2 */
typedef struct {
    Function function;
    unsigned grid[3], block[3], shared_bytes;
    void **arguments, **extra;
    void *kernel;
    Context context;
} KernelNode;

/* Of CUDA; in HIP they are all NULL. Addresses of the device are numbers. */
typedef struct {
    int (*version)(int *);
    int (*module_load)(Module *, const void *image);
    int (*module_function)(Function *, Module, const char *name);
    int (*allocate)(uint64_t *, size_t);
    int (*allocate_on_host)(void **, size_t, unsigned flags);
    int (*address_of_host)(uint64_t *, void *, unsigned flags);
    int (*set_memory)(uint64_t, unsigned char value, size_t, Stream);
    int (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared_bytes, Stream,
                  void **arguments, void **extra);
    int (*priority_range)(int *least, int *greatest);
    int (*nodes)(Graph, Node *, size_t *);
    int (*node_type)(Node, int *);
    int (*dependencies)(Node, Node *, size_t *);
    int (*add_kernel)(Node *, Graph, const Node *dependencies, size_t, const KernelNode *);
    int (*set_attribute)(Node, int attribute, const void *value);
    int (*object_create)(UserObject *, void *data, void (*destroy)(void *), unsigned references, unsigned flags);
    int (*object_release)(UserObject, unsigned references);
    int (*retain_object)(Graph, UserObject, unsigned references, unsigned flags);
    int (*capture_info)(Stream, int *status, uint64_t *id, Graph *, const Node **, size_t *);
    /* NULL in drivers before 12.3: */
    int (*capture_info_with_edges)(Stream, int *status, uint64_t *id, Graph *, const Node **, const Edge **, size_t *);
    int (*dependencies_with_edges)(Node, Node *, Edge *, size_t *);
} GraphDriver;

extern GraphDriver graph_driver;
const char *graph_driver_missing(void); /* the name of a function that it lacks; NULL if none */

/* Loads the driver's library; false, with the reason, where it is missing or lacks a function. */
bool driver_open(const char *path, char *reason, size_t reason_size);

/* ---- marks.c: places on the streams of a device, and the thread that learns when the device passes them -------- */

typedef struct Mark Mark;

enum { MARK_AHEAD, MARK_PASSED, MARK_LOST };

struct Mark {
    _Atomic int references;
    _Atomic int state;
    int device;
    int generation; /* of the device's opening: what is left of an earlier one does not go back into the pool */
    Event event; /* of the driver; stays with the mark when that goes back into the pool */
    Stream stream;
    int64_t taken_at; /* ns, the host's time behind the record call */
    int64_t taken_from; /* before it; or one of the leads below, where the host's time is no guide */
    int64_t time_ns;  /* when the device passed it, once state is MARK_PASSED */
    int16_t lead_us;  /* likewise: how far the host was ahead of the device, see schema.py */
    Mark *next;       /* on its stream, or in the pool */
};

/* Leads of commtrace/trace/schema.py; a test compares them. */
enum { UNKNOWN_LEAD = -32768, SYNCHRONIZED_LEAD = -32767, LEAST_LEAD_US = -32766, MOST_LEAD_US = 32767 };

/* A place in time: of the host where mark is NULL. */
typedef struct {
    Mark *mark;
    int64_t ns;
} Point;

enum { MOST_DEVICES = 64 };

int64_t host_ns(void);
void use_clock(int64_t (*clock)(void)); /* NULL: CLOCK_MONOTONIC */

Point point_of_host(void);
Point point_on(int device, Stream stream);
Point point_shared(Point); /* with a reference more */
void point_release(Point);
/* 1 if the time is known and written to ns, 0 if the device has not passed it yet, -1 if that will never be known. */
int point_time(Point, int64_t *ns);
int64_t point_taken_at(Point); /* 0 for a point of the host */
int16_t point_lead(Point);     /* of a point whose time is known; UNKNOWN_LEAD for one of the host */
int64_t point_host_ns(Point);  /* the host's time of a point just taken, also of a mark for which there was no room */

bool device_is_open(void);
bool device_is_used(int device); /* has a context, which a mark must never make */
bool device_has_failed(void);
int device_failure(void);   /* the driver's status; 0 without one */
int device_used_first(void); /* NOT_APPLICABLE before any was marked */
int device_of_context(void); /* the device that is current in this thread, by its context; NOT_APPLICABLE if unknown */
/* With threaded false nothing happens but in device_pass: for tests with a scripted driver. */
bool device_open(bool threaded);
bool device_is_held(void); /* by the thread of an earlier recording, which is stuck in the driver: it cannot be opened */
/* Closing, under the GIL: no thread is taking a mark then, and none will. False if another thread is closing it. */
bool device_shut(void);
bool device_close(int patience_ms); /* the rest of it, without the GIL; false if the driver holds the thread */
void device_pass(void);
void device_switch_off(void);
void device_synchronized(void); /* the host has waited for the device: under the GIL */
int marks_init(void);

bool push_context(int device); /* makes it current in this thread; false where it was so, or cannot be */
void pop_context(bool was_pushed);
Context known_context_of(int device);  /* as far as it was asked for: for threads without the GIL */
Context context_of_device(int device); /* NULL as long as the job has none */

/* ---- stamps.c: device times of what graphs contain --------------------------------------------------------------- */

extern PyMethodDef stamps_functions[];

void stamps_anchor(void);          /* by the resolver, with THREAD_LOCAL captures: takes the devices' own clocks */
bool stamps_read(void);            /* by the resolver: what replays have written; whether any goes on, or was read */
void stamps_close(void);           /* at the end of the resolver: what has begun is read as far as it is */
void stamps_in_forked_child(void); /* the memory is the parent's */

/* ---- groups.c: sequence numbers of process groups -------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *process_group; /* borrowed, an address only; NULL once it is gone */
    int64_t id;
    int32_t number; /* of this object, unique in the process: for queues */
    int32_t num_ranks;
    int32_t *ranks; /* global rank by rank in the group */
    int64_t next_collective;
    struct MessageCounter *messages;
    int32_t num_messages, room_for_messages;
    struct Communicator *communicators;
    int32_t num_communicators;
    bool is_slow;           /* everything goes through Python: a coalescing bracket is open */
    bool is_skipped;        /* collectives are counted, and not recorded */
    bool has_slow_messages; /* messages go through Python, which knows whether their peer is skipped */
    bool has_stream_per_pair, returns_work; /* see operations.NcclBackend */
} Group;

extern PyTypeObject *group_type;

int groups_init(PyObject *module);
Group *group_of(PyObject *process_group); /* NULL if it is unknown */
Group *held_group(PyObject *process_group); /* the same, a new reference; NULL where Python must look, too */
int64_t group_next_collective(Group *);
void group_take_back(Group *, int64_t seq);
int64_t group_next_message(Group *, bool is_send, int32_t peer, int64_t tag); /* -1: out of memory */
/* The position of a launch on the communicator of a peer, or of all if that is NOT_APPLICABLE, on a device. */
int64_t group_next_position(Group *, int32_t peer, int32_t device);
void group_take_back_message(Group *, bool is_send, int32_t peer, int64_t seq);

/* ---- rows.c: what was recorded, on its way to the harvester ------------------------------------------------------ */

/* Codes of commtrace/trace/schema.py, of kinds and of lanes; a test compares them. */
enum { MODULE = 4, COLLECTIVE = 6, P2P = 7, STALL = 8, NUM_KINDS = 20 };
enum { COMPUTE = 1, COMMUNICATION = 2 };

typedef struct {
    int32_t step, microbatch, chunk, stage;
} Coordinates;

extern Coordinates here; /* where training is in its schedule; under the GIL */
extern bool is_recording;
extern int num_recordings; /* so far: what is left of an earlier one records no more */
extern int64_t num_pauses; /* of the recording: what was launched meanwhile is not known */

/* The facts about a communication that are known when it starts. */
typedef struct {
    int64_t id, seq, num_bytes, self_bytes, group, position;
    int64_t launched_at, returned_at; /* the host's time before and after the backend's call, of a device's tensors */
    int32_t operation, name, dtype, peer; /* operation: its number in methods.c; name and dtype: codes of Python's names */
    int32_t group_number, queue_peer, device; /* which communicator's stream; device is NOT_APPLICABLE on the host */
    Coordinates place;
    uint8_t kind;
    bool is_async, on_job_stream;
} Facts;

/* What has happened: a communication, the stall on it, or both; or a span of another kind, whose other facts do not apply. */
typedef struct {
    Facts facts;
    Coordinates place_of_stall;
    Point start, waited_from, end;
    uint8_t lane;
    bool has_row, has_stall, is_unfinished;
    bool is_end_late; /* it ended at an unknown time before */
} Happening;

int rows_init(PyObject *module);
void rows_reset(size_t capacity);
void rows_add(const Happening *); /* takes the references of its points; counts it as dropped where there is no room */
void rows_add_span(int kind, int name, int lane, Coordinates place, Point start, Point end); /* the same of a span */
void rows_drop(uint8_t kind);
void rows_gather(void); /* by any thread, without the GIL */
uint64_t rows_added(void);   /* happenings */
uint64_t rows_waiting(void); /* happenings that wait for the device, or to be taken */
void rows_give_up(void);     /* counts what waits for the device as dropped */
PyObject *rows_take(PyObject *module, PyObject *unused);
PyObject *rows_dropped(PyObject *module, PyObject *unused);
PyObject *rows_ahead(PyObject *module, PyObject *unused);
PyObject *facts_to_python(const Facts *, Point start);
int64_t next_id(void);
int64_t next_ids(int64_t count); /* the first of so many */

/* ---- calls.c: communications that are under way ------------------------------------------------------------------- */

/* What is known of a call before the original runs. */
typedef struct {
    enum { PASS, SLOW, RECORD } way; /* only the original; Python's path instead; the original, with a row */
    Group *group;                    /* a reference; NULL of a wait */
    Facts facts;
    Point start; /* of a wait: where that began */
    int session; /* when it began: the recording may end, and another one begin, meanwhile */
    int device;
    bool is_counted, is_send, is_on_device;
    const void *key; /* of what a wait is for, in its table */
} Call;

/* A communication that may be waited for. */
typedef struct {
    const void *key;     /* an address, of a Work or of a result's storage: neither is kept alive */
    PyObject *reference; /* a weak one to a Work, as another one may get its address; NULL where there can be none */
    Facts facts;
    Point start;
} Pending;

enum { PENDING_PLACES = 1 << 13 };

typedef struct {
    Pending places[PENDING_PLACES]; /* by key, with linear probing */
    int num_pending;
} PendingTable;

extern PendingTable works, results;
extern _Thread_local bool is_inside; /* this thread is in a call that has been counted */
extern int session;                  /* number of the recording: what is left of an earlier one passes its calls on */
extern PyObject *raw_stream, *current_device, *open_device, *p2p_codes[4], *forget_in_python;
extern bool times_devices;
extern bool is_capturing; /* a graph is captured, on any thread: Python knows what goes into it */
extern PyMethodDef calls_functions[];

int calls_init(void);
void calls_forget_all(void);
bool calls_are_recorded(void); /* between configure and end */
bool is_for_the_job(void); /* tells Python of an exception of ours; true, with it, for one that ends the program */
void keep(PyObject **place, PyObject *object); /* holds the object there; nothing for None */
bool attribute_as_int64(PyObject *object, PyObject *name, int64_t *number);
bool attribute_is_true(PyObject *object, PyObject *name, bool *truth);

Pending *find_key(PendingTable *, const void *key);     /* also of what is gone, and had this address */
Pending *find_pending(PendingTable *, const void *key); /* NULL if it is not known */
Pending take_pending(PendingTable *, Pending *);
/* Takes the references; what had this key is given up. */
void add_pending(PendingTable *, const void *key, PyObject *reference, const Facts *, Point start);
void forget_key(PendingTable *, const void *key);
void forget_all(PendingTable *);
bool add_facts(PyObject *list, const Facts *, Point start); /* for Python; false, with an exception */
PyObject *surrender(PendingTable *, const void *key);       /* the facts of what is Python's now, or None */
bool is_python_waiting(void);                               /* for a Work */
void give_up_call(const Facts *, Point start); /* records one whose end was not seen; takes the reference */

void set_blocked(const Facts *, Point start); /* this process hands it on, or waits for it, now */
void set_unblocked(void);
Call new_call(void);
bool is_plain_tensor(PyObject *);                 /* its attributes run no Python of a class of the job's */
bool measure_tensor(PyObject *tensor, Call *call); /* its payload and device; false where Python must */
/* Takes the place in time, and the facts that all have, of a call that is to be recorded: it is then RECORD. False, maybe
   with an exception, where that cannot be. `queue_peer` must be known. */
bool start_call(Call *call);
void undo_call(Call *call); /* takes back what was done before a call that is not made, or was refused */
Point point_of(const Facts *); /* now, on the current stream of its device */
Point mark_on_current_stream(int device);
bool current_stream(int device, Stream *); /* false, with an exception, where torch does not say */
/* Records a communication that has ended, as far as streams are concerned, with the stall on it. Takes the references. */
void record_end(Facts, Point start, Point waited_from, Point end);
void report_failure(const Facts *, Point start, PyObject *exception);

/* ---- methods.c: the methods of ProcessGroup and Work ------------------------------------------------------------ */

int methods_init(PyObject *module);

/* ---- operators.c: functional collectives ------------------------------------------------------------------------- */

extern _Thread_local bool is_in_operator; /* torch runs a functional operator that was counted as Python called it */
extern PyMethodDef operators_functions[];

int operators_init(PyObject *module);

/* ---- hooks.c: torch's hooks of process groups -------------------------------------------------------------------- */

extern PyMethodDef hooks_functions[];

int hooks_init(PyObject *module);
void hooks_forget_all(void);
bool hooks_add_pending(PyObject *list);
bool buckets_are_watched(void); /* those that this thread may send now */
bool futures_are_watched(void); /* of what Python sends in a backward */
bool current_pass(int64_t *task); /* the backward in which this thread is, or -1; false with an exception */
/* Takes the group and the place in time of a bucket that has been measured: it is then RECORD, or PASS. */
void begin_bucket(Group *, Call *);
/* Takes a bucket that was sent in this backward, and its references but that to its group. An exception may be set. */
void bucket_sent(Call *, int64_t task, PyObject *work);
void enter_hook(void); /* until leave_hook, torch calls us in this thread: what it calls must stay */
void leave_hook(void);
bool hook_error_is_for_the_job(void); /* see error_is_for_the_job */

/* ---- bucket_kernel.c: a kernel in torch's dispatcher -------------------------------------------------------------- */

int bucket_kernel_init(PyObject *module);

/* ---- modules.c: forward and backward of modules ----------------------------------------------------------------- */

int modules_init(PyObject *module);

/* ---- core.c: the module ------------------------------------------------------------------------------------------ */

/* A string that is kept for ever, as the name of an attribute or a key. */
typedef struct {
    PyObject **place;
    const char *text;
} InternedName;

PyObject *python_span(PyObject *module, PyObject *const *arguments, Py_ssize_t num_arguments);
bool intern_names(const InternedName *, size_t num_names); /* false with an exception */
/* Py_tp_dealloc of a class with Py_tp_clear that the garbage collector follows. */
void object_dealloc(PyObject *);

/* Calls a function of Python's path with up to three arguments, the rest NULL. It lives until it returns: what it does may
   end the recording, and with that our reference to it. */
PyObject *call_python(PyObject *function, PyObject *first, PyObject *second, PyObject *third);
/* Tells `failed` of an error of ours, if one is set, which switches the capture off. One that is no Exception (the
   KeyboardInterrupt of a signal that arrived while an attribute ran Python) is the job's: true, and it stays set. */
bool error_is_for_the_job(PyObject *failed);
void clear_exception(void); /* but for one that is no Exception: it is the job's */

/* What an original has raised, out of the way of what is ours after it. */
typedef struct {
    PyObject *type, *value, *traceback; /* NULL where it has a result */
} Raised;

Raised take_raised(const PyObject *result); /* beside a result, an exception that is set is ours: it stays */
/* Gives back what the original has given: its result, or the exception if that is NULL. Neither if our error, which is set
   then, ends the program: it goes before. Takes the references. */
PyObject *result_or_raised(PyObject *result, Raised, bool ends_program);

/* A place on the current stream of a device, or of the current one; of the host where none is used, or where the stream is
   captured into a graph. False, with an exception, where torch does not say which stream. */
bool point_here(int device, Point *, bool *is_captured);
PyObject *point_to_python(Point); /* a new reference: an int, or a Mark that shares the point's */
bool point_from_python(PyObject *, Point *); /* takes a reference of its own; false, with an exception, for neither */
bool coordinates_from_python(PyObject *, Coordinates *); /* from a tuple; false, with an exception, for anything else */

#endif
