/* What was recorded, on its way to the harvester.

   Training threads add happenings to a ring, under the GIL. They become rows when the device has passed their marks: in
   `rows_gather`, by whoever calls it, without the GIL. The harvester takes rows as columns. */
#include "core.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* Codes of commtrace/trace/schema.py; a test compares them. */
enum { HOST_TIMING = 0, CUDA_EVENT_TIMING = 1 };

enum {
    RING = 1 << 16,
    ROWS_PER_BLOCK = 1024,
    SHORTEST_HOST_WAIT_NS = 50000, /* a wait of the host that returned so soon found the communication over */
    MOST_LOOKED_AT = 256, /* happenings that the device has not reached: those behind them are looked at later */
};

Coordinates here = {NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE};
bool is_recording;
int num_recordings;
int64_t num_pauses;

static int64_t num_ids;

int64_t next_ids(int64_t count) {
    num_ids += count;
    return num_ids - count;
}

int64_t next_id(void) { return next_ids(1); }

/* ---- from training threads -------------------------------------------------------------------------------------- */

static Happening *ring;
static _Atomic uint64_t num_added, num_gathered, num_taken;
static uint64_t most_waiting;
static _Atomic int64_t num_dropped[NUM_KINDS];

void rows_drop(uint8_t kind) {
    if (kind < NUM_KINDS) {
        atomic_fetch_add_explicit(&num_dropped[kind], 1, memory_order_relaxed);
    }
}

static void drop(const Happening *happening) {
    if (happening->has_row) {
        rows_drop(happening->facts.kind);
    }
    if (happening->has_stall) {
        rows_drop(STALL);
    }
}

static void release_points(const Happening *happening) {
    point_release(happening->start);
    point_release(happening->waited_from);
    point_release(happening->end);
}

uint64_t rows_added(void) { return atomic_load_explicit(&num_added, memory_order_relaxed); }

uint64_t rows_waiting(void) { return rows_added() - atomic_load_explicit(&num_taken, memory_order_relaxed); }

void rows_add(const Happening *happening) {
    uint64_t at = rows_added();
    bool is_full = at - atomic_load_explicit(&num_gathered, memory_order_acquire) >= RING;
    if (is_full || rows_waiting() >= most_waiting) {
        drop(happening);
        release_points(happening);
        return;
    }
    ring[at % RING] = *happening;
    atomic_store_explicit(&num_added, at + 1, memory_order_release);
}

void rows_add_span(int kind, int name, int lane, Coordinates place, Point start, Point end) {
    Happening happening = {
        .facts =
            {
                .id = NOT_APPLICABLE,
                .seq = NOT_APPLICABLE,
                .num_bytes = NOT_APPLICABLE,
                .self_bytes = NOT_APPLICABLE,
                .group = NOT_APPLICABLE,
                .operation = NOT_APPLICABLE,
                .name = name,
                .dtype = NOT_APPLICABLE,
                .peer = NOT_APPLICABLE,
                .device = NOT_APPLICABLE,
                .place = place,
                .kind = (uint8_t)kind,
            },
        .start = start,
        .end = end,
        .lane = (uint8_t)lane,
        .has_row = true,
    };
    rows_add(&happening);
}

/* ---- rows ------------------------------------------------------------------------------------------------------- */

/* The columns of schema.SCHEMA but `detail`. */
typedef struct {
    int64_t start, end, group, seq, bytes, self_bytes, id, stalled_on;
    int32_t name, step, microbatch, chunk, stage, op_in_seq, dtype, peer;
    int16_t start_lead_us, end_lead_us;
    int8_t kind, lane, timing, is_async, is_unfinished, end_exact;
} Row;

/* A row whose times are those of marks, `start` that of its launch: where it is placed between them, Python finds. */
typedef struct {
    Row row;
    int64_t waited_from, waited_taken_at, end_taken_at, position, launched_at, returned_at;
    int32_t group_number, queue_peer, device;
    int8_t on_job_stream;
} CallRow;

typedef struct {
    const char *name;
    char type; /* of numpy: b, h, i, q for integers of 8, 16, 32 and 64 bits */
    size_t place;
} Column;

#define COLUMN(record, type, name) {#name, type, offsetof(record, name)}
#define ROW_COLUMN(type, name) {#name, type, offsetof(Row, name)}

static const Column row_columns[] = {
    ROW_COLUMN('q', start), ROW_COLUMN('q', end), ROW_COLUMN('q', group), ROW_COLUMN('q', seq),
    ROW_COLUMN('q', bytes), ROW_COLUMN('q', self_bytes), ROW_COLUMN('q', id), ROW_COLUMN('q', stalled_on),
    ROW_COLUMN('i', name), ROW_COLUMN('i', step), ROW_COLUMN('i', microbatch), ROW_COLUMN('i', chunk),
    ROW_COLUMN('i', stage), ROW_COLUMN('i', op_in_seq), ROW_COLUMN('i', dtype), ROW_COLUMN('i', peer),
    ROW_COLUMN('h', start_lead_us), ROW_COLUMN('h', end_lead_us),
    ROW_COLUMN('b', kind), ROW_COLUMN('b', lane), ROW_COLUMN('b', timing), ROW_COLUMN('b', is_async),
    ROW_COLUMN('b', is_unfinished), ROW_COLUMN('b', end_exact),
};

static const Column call_columns[] = {
    COLUMN(CallRow, 'q', waited_from), COLUMN(CallRow, 'q', waited_taken_at), COLUMN(CallRow, 'q', end_taken_at),
    COLUMN(CallRow, 'q', position), COLUMN(CallRow, 'q', launched_at), COLUMN(CallRow, 'q', returned_at),
    COLUMN(CallRow, 'i', group_number), COLUMN(CallRow, 'i', queue_peer), COLUMN(CallRow, 'i', device),
    COLUMN(CallRow, 'b', on_job_stream),
};

enum {
    NUM_ROW_COLUMNS = sizeof row_columns / sizeof row_columns[0],
    NUM_CALL_COLUMNS = sizeof call_columns / sizeof call_columns[0],
};

typedef struct Block {
    struct Block *next;
    size_t num_rows;
    char rows[]; /* of one size */
} Block;

typedef struct {
    size_t size; /* of a row */
    size_t num_rows;
    Block *first, *last;
} Table;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what follows; never held while the driver is asked */
static Table rows = {.size = sizeof(Row)}, calls = {.size = sizeof(CallRow)};
static Happening *ahead; /* of the device */
static size_t num_ahead, room_ahead;

static void *new_row(Table *table) {
    if (table->last == NULL || table->last->num_rows == ROWS_PER_BLOCK) {
        Block *block = malloc(sizeof *block + ROWS_PER_BLOCK * table->size);
        if (block == NULL) {
            return NULL;
        }
        block->next = NULL;
        block->num_rows = 0;
        if (table->last == NULL) {
            table->first = block;
        } else {
            table->last->next = block;
        }
        table->last = block;
    }
    table->num_rows++;
    return table->last->rows + table->size * table->last->num_rows++;
}

static Row row_of(const Facts *facts, Coordinates place) {
    return (Row){
        .group = facts->group,
        .seq = facts->seq,
        .bytes = NOT_APPLICABLE,
        .self_bytes = NOT_APPLICABLE,
        .id = NOT_APPLICABLE,
        .stalled_on = NOT_APPLICABLE,
        .name = facts->name,
        .step = place.step,
        .microbatch = place.microbatch,
        .chunk = place.chunk,
        .stage = place.stage,
        .dtype = NOT_APPLICABLE,
        .peer = facts->peer,
        .is_async = facts->is_async,
        .end_exact = true,
        .start_lead_us = UNKNOWN_LEAD,
        .end_lead_us = UNKNOWN_LEAD,
    };
}

static int8_t timing_of(Point first, Point last) {
    return first.mark == NULL || last.mark == NULL ? HOST_TIMING : CUDA_EVENT_TIMING;
}

static int64_t larger(int64_t left, int64_t right) { return left > right ? left : right; }

/* Makes the row of a communication; false if there is no memory. Times are those of its points. */
static bool add_communication(const Happening *happening, int64_t start, int64_t waited_from, int64_t end) {
    const Facts *facts = &happening->facts;
    bool is_placed = facts->device != NOT_APPLICABLE && !happening->is_unfinished;
    void *place = new_row(is_placed ? &calls : &rows);
    if (place == NULL) {
        return false;
    }
    Row row = row_of(facts, facts->place);
    row.kind = (int8_t)facts->kind;
    row.lane = (int8_t)happening->lane;
    row.start = start;
    row.end = larger(start, end);
    row.bytes = facts->num_bytes;
    row.self_bytes = facts->self_bytes;
    row.dtype = facts->dtype;
    row.id = facts->id;
    row.timing = timing_of(happening->start, happening->end);
    row.is_unfinished = happening->is_unfinished;
    if (happening->lane == COMPUTE) { /* its times are those of its marks; of a communication they are found later */
        row.start_lead_us = point_lead(happening->start);
        row.end_lead_us = point_lead(happening->end);
    }
    bool is_waited_for = happening->has_stall && facts->is_async && facts->device == NOT_APPLICABLE;
    bool was_over = is_waited_for && end - waited_from < SHORTEST_HOST_WAIT_NS;
    row.end_exact = !happening->is_end_late && !was_over;
    if (!is_placed) {
        memcpy(place, &row, sizeof row);
        return true;
    }
    CallRow call = {
        .row = row,
        .waited_from = waited_from,
        .waited_taken_at = point_taken_at(happening->waited_from),
        .end_taken_at = point_taken_at(happening->end),
        .position = facts->position,
        .launched_at = facts->launched_at,
        .returned_at = facts->returned_at,
        .group_number = facts->group_number,
        .queue_peer = facts->queue_peer,
        .device = facts->device,
        .on_job_stream = facts->on_job_stream,
    };
    memcpy(place, &call, sizeof call);
    return true;
}

static bool add_stall(const Happening *happening, int64_t waited_from, int64_t end) {
    Row *place = new_row(&rows);
    if (place == NULL) {
        return false;
    }
    Row row = row_of(&happening->facts, happening->place_of_stall);
    row.kind = STALL;
    row.lane = COMPUTE;
    row.start = waited_from;
    row.end = larger(waited_from, end);
    row.stalled_on = happening->facts.id;
    row.timing = timing_of(happening->waited_from, happening->end);
    row.start_lead_us = point_lead(happening->waited_from);
    row.end_lead_us = point_lead(happening->end);
    memcpy(place, &row, sizeof row);
    return true;
}

/* Makes rows of a happening; false while the device has not passed its marks. */
static bool gathered(const Happening *happening) {
    int64_t start, waited_from, end;
    int known = point_time(happening->start, &start);
    int known_wait = point_time(happening->waited_from, &waited_from);
    int known_end = point_time(happening->end, &end);
    /* One that is lost is enough: there will be no row, and nothing to ask about. */
    bool is_lost = known < 0 || known_wait < 0 || known_end < 0;
    if (!is_lost && (known == 0 || known_wait == 0 || known_end == 0)) {
        return false;
    }
    if (happening->has_row && (is_lost || !add_communication(happening, start, waited_from, end))) {
        rows_drop(happening->facts.kind);
    }
    if (happening->has_stall && (is_lost || !add_stall(happening, waited_from, end))) {
        rows_drop(STALL);
    }
    release_points(happening);
    return true;
}

static void hold(const Happening *happening) {
    if (num_ahead == room_ahead) {
        size_t room = room_ahead ? 2 * room_ahead : 1024;
        Happening *larger_room = realloc(ahead, room * sizeof *ahead);
        if (larger_room == NULL) {
            drop(happening);
            release_points(happening);
            return;
        }
        ahead = larger_room;
        room_ahead = room;
    }
    ahead[num_ahead++] = *happening;
}

static void gather(void) {
    size_t num_kept = 0;
    for (size_t i = 0; i < num_ahead; i++) {
        if (num_kept >= MOST_LOOKED_AT || !gathered(&ahead[i])) {
            ahead[num_kept++] = ahead[i];
        }
    }
    num_ahead = num_kept;
    uint64_t at = atomic_load_explicit(&num_gathered, memory_order_relaxed);
    uint64_t end = atomic_load_explicit(&num_added, memory_order_acquire);
    for (; at != end; at++) {
        const Happening *happening = &ring[at % RING];
        if (num_ahead >= MOST_LOOKED_AT || !gathered(happening)) {
            hold(happening);
        }
    }
    atomic_store_explicit(&num_gathered, end, memory_order_release);
}

void rows_gather(void) {
    pthread_mutex_lock(&lock);
    gather();
    pthread_mutex_unlock(&lock);
}

static void give_up(void) {
    gather();
    for (size_t i = 0; i < num_ahead; i++) {
        drop(&ahead[i]);
        release_points(&ahead[i]);
    }
    num_ahead = 0;
    atomic_store(&num_taken, atomic_load(&num_gathered)); /* but for rows that were gathered before: soon taken */
}

void rows_give_up(void) {
    pthread_mutex_lock(&lock);
    give_up();
    pthread_mutex_unlock(&lock);
}

/* ---- to the harvester ------------------------------------------------------------------------------------------- */

static size_t size_of_type(char type) { return type == 'q' ? 8 : type == 'i' ? 4 : type == 'h' ? 2 : 1; }

static size_t stride_of(const Table *table, char type) {
    return (table->num_rows * size_of_type(type) + 7) & ~(size_t)7;
}

static size_t size_of_columns(const Table *table, const Column *columns, size_t num_columns) {
    size_t size = 0;
    for (size_t i = 0; i < num_columns; i++) {
        size += stride_of(table, columns[i].type);
    }
    return size;
}

static char *copy_column(const Table *table, size_t place, char type, char *to) {
    size_t size = size_of_type(type), at = 0;
    for (const Block *block = table->first; block != NULL; block = block->next) {
        const char *from = block->rows + place;
        for (size_t i = 0; i < block->num_rows; i++, at++, from += table->size) {
            memcpy(to + at * size, from, size);
        }
    }
    return to + stride_of(table, type);
}

static void free_blocks(Table *table) {
    while (table->first != NULL) {
        Block *block = table->first;
        table->first = block->next;
        free(block);
    }
    *table = (Table){.size = table->size};
}

/* Counts rows that cannot be handed over as dropped. */
static void drop_rows(const Table *table) {
    for (const Block *block = table->first; block != NULL; block = block->next) {
        for (size_t i = 0; i < block->num_rows; i++) {
            rows_drop((uint8_t)((const Row *)(block->rows + i * table->size))->kind);
        }
    }
}

static PyObject *columns_of(const Table *table, bool is_of_calls) {
    size_t size = size_of_columns(table, row_columns, NUM_ROW_COLUMNS);
    size += is_of_calls ? size_of_columns(table, call_columns, NUM_CALL_COLUMNS) : 0;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    char *to = bytes == NULL ? NULL : PyBytes_AsString(bytes);
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; to != NULL && i < NUM_ROW_COLUMNS; i++) {
        to = copy_column(table, row_columns[i].place, row_columns[i].type, to);
    }
    for (size_t i = 0; to != NULL && is_of_calls && i < NUM_CALL_COLUMNS; i++) {
        to = copy_column(table, call_columns[i].place, call_columns[i].type, to);
    }
    Py_END_ALLOW_THREADS
    return bytes;
}

PyObject *rows_take(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    Table taken_rows, taken_calls;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&lock);
    gather();
    taken_rows = rows;
    taken_calls = calls;
    rows = (Table){.size = sizeof(Row)};
    calls = (Table){.size = sizeof(CallRow)};
    atomic_store(&num_taken, atomic_load(&num_gathered) - num_ahead);
    pthread_mutex_unlock(&lock);
    Py_END_ALLOW_THREADS
    long long num_rows = (long long)taken_rows.num_rows, num_calls = (long long)taken_calls.num_rows;
    PyObject *row_bytes = columns_of(&taken_rows, false), *call_bytes = columns_of(&taken_calls, true);
    PyObject *result = NULL;
    if (row_bytes != NULL && call_bytes != NULL) {
        result = Py_BuildValue("LOLO", num_rows, row_bytes, num_calls, call_bytes);
    }
    if (result == NULL) { /* out of memory */
        drop_rows(&taken_rows);
        drop_rows(&taken_calls);
    }
    free_blocks(&taken_rows);
    free_blocks(&taken_calls);
    Py_XDECREF(row_bytes);
    Py_XDECREF(call_bytes);
    return result;
}

PyObject *rows_dropped(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *counts = PyTuple_New(NUM_KINDS);
    for (int kind = 0; counts != NULL && kind < NUM_KINDS; kind++) {
        PyTuple_SetItem(counts, kind, PyLong_FromLongLong(atomic_load(&num_dropped[kind])));
    }
    return counts;
}

PyObject *facts_to_python(const Facts *facts, Point start) {
    PyObject *python_start = point_to_python(start);
    if (python_start == NULL) {
        return NULL;
    }
    const Coordinates *place = &facts->place;
    return Py_BuildValue("LiiLLLiiOL(iiii)N", (long long)facts->id, (int)facts->operation, (int)facts->group_number,
                         (long long)facts->seq, (long long)facts->num_bytes, (long long)facts->self_bytes,
                         (int)facts->dtype, (int)facts->peer, facts->is_async ? Py_True : Py_False,
                         (long long)facts->position, (int)place->step,
                         (int)place->microbatch, (int)place->chunk, (int)place->stage, python_start);
}

/* The communications whose marks the device has not passed, oldest first: for a report on what hangs. */
PyObject *rows_ahead(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    Happening *copies = malloc(MOST_LOOKED_AT * sizeof *copies); /* no object is made while the lock is held */
    size_t num_copies = 0;
    if (copies == NULL) {
        return PyErr_NoMemory();
    }
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < num_ahead && i < MOST_LOOKED_AT; i++) {
        int64_t start;
        if (ahead[i].has_row && ahead[i].facts.operation >= 0 && point_time(ahead[i].start, &start) >= 0) {
            copies[num_copies] = ahead[i];
            copies[num_copies++].start = point_shared(ahead[i].start);
        }
    }
    pthread_mutex_unlock(&lock);
    PyObject *list = PyList_New(0);
    for (size_t i = 0; i < num_copies; i++) {
        PyObject *item = list == NULL ? NULL : facts_to_python(&copies[i].facts, copies[i].start);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
        point_release(copies[i].start);
    }
    free(copies);
    return list;
}

/* ---- start and end ---------------------------------------------------------------------------------------------- */

/* Empties everything, for a new recording of this process. Only where no device is open. */
void rows_reset(size_t capacity) {
    pthread_mutex_lock(&lock);
    give_up();
    free_blocks(&rows);
    free_blocks(&calls);
    pthread_mutex_unlock(&lock);
    most_waiting = capacity;
    num_recordings++;
    atomic_store(&num_taken, atomic_load(&num_added));
    for (int kind = 0; kind < NUM_KINDS; kind++) {
        atomic_store(&num_dropped[kind], 0);
    }
    here = (Coordinates){NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE, NOT_APPLICABLE};
}

static void in_forked_child(void) {
    is_recording = false;
    pthread_mutex_init(&lock, NULL); /* a thread of the parent's may have held it, and have been changing what follows */
    rows = (Table){.size = sizeof(Row)};
    calls = (Table){.size = sizeof(CallRow)};
    ahead = NULL;
    num_ahead = room_ahead = 0;
    atomic_store(&num_gathered, atomic_load(&num_added));
    atomic_store(&num_taken, atomic_load(&num_added));
}

static PyObject *described(const Column *columns, size_t num_columns) {
    PyObject *tuple = PyTuple_New((Py_ssize_t)num_columns);
    for (size_t i = 0; tuple != NULL && i < num_columns; i++) {
        char type[2] = {columns[i].type, '\0'};
        PyTuple_SetItem(tuple, (Py_ssize_t)i, Py_BuildValue("ss", columns[i].name, type));
    }
    return tuple;
}

int rows_init(PyObject *module) {
    if (ring == NULL) {
        ring = calloc(RING, sizeof *ring); /* its memory is used as it fills */
        if (ring == NULL || pthread_atfork(NULL, NULL, in_forked_child) != 0) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return PyModule_AddObject(module, "ROW_COLUMNS", described(row_columns, NUM_ROW_COLUMNS)) ||
           PyModule_AddObject(module, "CALL_COLUMNS", described(call_columns, NUM_CALL_COLUMNS));
}
