/* Sequence numbers of process groups: the one place where they are counted, for C and Python alike. Under the GIL. */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <structmember.h>

typedef struct MessageCounter {
    bool is_used, is_send;
    int32_t peer, tag;
    int64_t next;
} MessageCounter;

typedef struct Communicator {
    int32_t peer, device;
    int64_t next_position, num_pauses;
} Communicator;

enum { FEW_MESSAGES = 16, MOST_GROUPS = 4096, TAG_BITS = 32 };

/* Groups by the address of the ProcessGroup, with linear probing. One that is gone leaves a place that is not NULL. */
static Group *table[MOST_GROUPS];
static Group gone; /* stands for a group that was taken out */
static int num_places;
static int32_t num_groups;

static uint32_t place_of(const void *key) { return (uint32_t)(((uintptr_t)key >> 4) * 0x9E3779B97F4A7C15ULL >> 40); }

Group *group_of(PyObject *process_group) {
    for (uint32_t i = place_of(process_group);; i++) {
        Group *group = table[i % MOST_GROUPS];
        if (group == NULL) {
            return NULL;
        }
        if (group != &gone && group->process_group == process_group) {
            return group;
        }
    }
}

Group *held_group(PyObject *process_group) {
    Group *group = group_of(process_group);
    if (group == NULL || group->is_slow) {
        return NULL;
    }
    Py_INCREF(group);
    return group;
}

static void leave(Group *group) {
    for (uint32_t i = 0; i < MOST_GROUPS; i++) {
        if (table[i] == group) {
            table[i] = &gone;
        }
    }
    group->process_group = NULL;
}

/* Makes the places of groups that are gone empty again. */
static void tidy(void) {
    Group *before[MOST_GROUPS];
    memcpy(before, table, sizeof table);
    memset(table, 0, sizeof table);
    num_places = 0;
    for (int i = 0; i < MOST_GROUPS; i++) {
        if (before[i] != NULL && before[i] != &gone) {
            uint32_t place = place_of(before[i]->process_group);
            while (table[place % MOST_GROUPS] != NULL) {
                place++;
            }
            table[place % MOST_GROUPS] = before[i];
            num_places++;
        }
    }
}

/* Half of the places stay empty, so that every search ends soon: calls of groups beyond go through Python. */
static void enter(Group *group) {
    Group *earlier = group_of(group->process_group); /* of an earlier recording */
    if (earlier != NULL) {
        leave(earlier);
    }
    if (num_places >= MOST_GROUPS / 2) {
        tidy();
    }
    if (num_places >= MOST_GROUPS / 2) {
        return;
    }
    uint32_t i = place_of(group->process_group);
    while (table[i % MOST_GROUPS] != NULL && table[i % MOST_GROUPS] != &gone) {
        i++;
    }
    num_places += table[i % MOST_GROUPS] == NULL;
    table[i % MOST_GROUPS] = group;
}

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

int64_t group_next_collective(Group *group) { return group->next_collective++; }

void group_take_back(Group *group, int64_t seq) {
    if (group->next_collective == seq + 1) { /* unless another thread has taken the next one */
        group->next_collective = seq;
    }
}

static MessageCounter *find_message(Group *group, bool is_send, int32_t peer, int32_t tag) {
    uint32_t room = (uint32_t)group->room_for_messages;
    uint32_t i = ((uint32_t)peer * 2654435761u ^ (uint32_t)tag * 40503u ^ is_send) % room;
    MessageCounter *counter = &group->messages[i];
    while (counter->is_used && (counter->is_send != is_send || counter->peer != peer || counter->tag != tag)) {
        i = (i + 1) % room;
        counter = &group->messages[i];
    }
    return counter;
}

static bool make_room_for_messages(Group *group) {
    if (2 * group->num_messages < group->room_for_messages) {
        return true;
    }
    MessageCounter *before = group->messages;
    int32_t room_before = group->room_for_messages;
    int32_t room = room_before ? 2 * room_before : FEW_MESSAGES;
    MessageCounter *counters = calloc((size_t)room, sizeof *counters);
    if (counters == NULL) {
        return false;
    }
    group->messages = counters;
    group->room_for_messages = room;
    for (int32_t i = 0; i < room_before; i++) {
        if (before[i].is_used) {
            *find_message(group, before[i].is_send, before[i].peer, before[i].tag) = before[i];
        }
    }
    free(before);
    return true;
}

int64_t group_next_message(Group *group, bool is_send, int32_t peer, int64_t tag) {
    int32_t short_tag = (int32_t)(tag & 0x7FFFFFFF);
    if (!make_room_for_messages(group)) {
        return NOT_APPLICABLE;
    }
    MessageCounter *counter = find_message(group, is_send, peer, short_tag);
    if (!counter->is_used) {
        *counter = (MessageCounter){true, is_send, peer, short_tag, (int64_t)short_tag << TAG_BITS};
        group->num_messages++;
    }
    return counter->next++;
}

int64_t group_next_position(Group *group, int32_t peer, int32_t device) {
    Communicator *communicator = NULL;
    for (int32_t i = 0; i < group->num_communicators && communicator == NULL; i++) {
        if (group->communicators[i].peer == peer && group->communicators[i].device == device) {
            communicator = &group->communicators[i];
        }
    }
    if (communicator == NULL) {
        size_t size = sizeof *communicator * (size_t)(group->num_communicators + 1);
        Communicator *communicators = realloc(group->communicators, size);
        if (communicators == NULL) {
            return NOT_APPLICABLE;
        }
        group->communicators = communicators;
        communicator = &communicators[group->num_communicators++];
        *communicator = (Communicator){peer, device, 0, num_pauses};
    }
    if (communicator->num_pauses != num_pauses) {
        communicator->num_pauses = num_pauses;
        communicator->next_position++; /* what was launched meanwhile */
    }
    return communicator->next_position++;
}

void group_take_back_message(Group *group, bool is_send, int32_t peer, int64_t seq) {
    if (group->room_for_messages == 0) {
        return;
    }
    MessageCounter *counter = find_message(group, is_send, peer, (int32_t)(seq >> TAG_BITS));
    if (counter->is_used && counter->next == seq + 1) {
        counter->next = seq;
    }
}

/* ---- the class Group, for Python -------------------------------------------------------------------------------- */

static PyObject *group_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    static char *names[] = {"process_group", "id", "ranks", "has_stream_per_pair", "returns_work", NULL};
    PyObject *process_group, *ranks;
    long long id;
    int has_stream_per_pair, returns_work;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OLO!pp", names, &process_group, &id, &PyTuple_Type, &ranks,
                                     &has_stream_per_pair, &returns_work)) {
        return NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Group *group = (Group *)allocate(type, 0);
    if (group == NULL) {
        return NULL;
    }
    group->num_ranks = (int32_t)PyTuple_Size(ranks);
    group->ranks = calloc((size_t)group->num_ranks + 1, sizeof *group->ranks);
    if (group->ranks == NULL) {
        Py_DECREF(group);
        return PyErr_NoMemory();
    }
    for (int32_t i = 0; i < group->num_ranks; i++) {
        group->ranks[i] = (int32_t)PyLong_AsLong(PyTuple_GetItem(ranks, i));
    }
    if (PyErr_Occurred()) {
        Py_DECREF(group);
        return NULL;
    }
    group->process_group = process_group;
    group->id = id;
    group->number = num_groups++;
    group->has_stream_per_pair = has_stream_per_pair;
    group->returns_work = returns_work;
    enter(group);
    return (PyObject *)group;
}

static void group_dealloc(PyObject *self) {
    Group *group = (Group *)self;
    PyTypeObject *type = Py_TYPE(self);
    leave(group);
    free(group->messages);
    free(group->communicators);
    free(group->ranks);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *group_next(PyObject *self) { return PyLong_FromLongLong(group_next_collective((Group *)self)); }

static PyObject *group_self(PyObject *self) {
    Py_INCREF(self);
    return self;
}

static PyObject *python_take(PyObject *self, PyObject *count) {
    Group *group = (Group *)self;
    long long number = PyLong_AsLongLong(count);
    if (number == -1 && PyErr_Occurred()) {
        return NULL;
    }
    int64_t first = group->next_collective;
    group->next_collective += number;
    return PyLong_FromLongLong(first);
}

static PyObject *python_take_messages(PyObject *self, PyObject *arguments) {
    int is_send, peer;
    long long tag, count;
    if (!PyArg_ParseTuple(arguments, "piLL", &is_send, &peer, &tag, &count)) {
        return NULL;
    }
    Group *group = (Group *)self;
    int64_t first = group_next_message(group, is_send, peer, tag);
    if (first < 0) {
        return PyErr_NoMemory();
    }
    find_message(group, is_send, peer, (int32_t)(tag & 0x7FFFFFFF))->next += count - 1;
    return PyLong_FromLongLong(first);
}

static PyObject *python_take_back(PyObject *self, PyObject *seq) {
    long long number = PyLong_AsLongLong(seq);
    if (number == -1 && PyErr_Occurred()) {
        return NULL;
    }
    group_take_back((Group *)self, number);
    Py_RETURN_NONE;
}

static PyObject *python_next_message(PyObject *self, PyObject *arguments) {
    int is_send, peer;
    long long tag = 0;
    if (!PyArg_ParseTuple(arguments, "pi|L", &is_send, &peer, &tag)) {
        return NULL;
    }
    int64_t seq = group_next_message((Group *)self, is_send, peer, tag);
    return seq < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(seq);
}

static PyObject *python_take_back_message(PyObject *self, PyObject *arguments) {
    int is_send, peer;
    long long seq;
    if (!PyArg_ParseTuple(arguments, "piL", &is_send, &peer, &seq)) {
        return NULL;
    }
    group_take_back_message((Group *)self, is_send, peer, seq);
    Py_RETURN_NONE;
}

static PyObject *python_next_position(PyObject *self, PyObject *arguments) {
    int peer, device;
    if (!PyArg_ParseTuple(arguments, "ii", &peer, &device)) {
        return NULL;
    }
    int64_t position = group_next_position((Group *)self, peer, device);
    return position < 0 ? PyErr_NoMemory() : PyLong_FromLongLong(position);
}

static PyObject *python_messages(PyObject *self, PyObject *unused) {
    (void)unused;
    Group *group = (Group *)self;
    PyObject *list = PyList_New(0);
    for (int32_t i = 0; list != NULL && i < group->room_for_messages; i++) {
        const MessageCounter *counter = &group->messages[i];
        if (!counter->is_used) {
            continue;
        }
        int64_t count = counter->next - ((int64_t)counter->tag << TAG_BITS);
        PyObject *item = Py_BuildValue("OiiL", counter->is_send ? Py_True : Py_False, (int)counter->peer,
                                       (int)counter->tag, (long long)count);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *python_detach(PyObject *self, PyObject *unused) {
    (void)unused;
    leave((Group *)self);
    Py_RETURN_NONE;
}

static PyMethodDef group_methods[] = {
    {"take", python_take, METH_O, "Take the numbers of so many collectives; return the first of them."},
    {"take_messages", python_take_messages, METH_VARARGS,
     "Take the numbers of so many sends to, or receives from, a global rank; return the first of them."},
    {"take_back", python_take_back, METH_O,
     "Free the number of a collective that its backend refused, unless the next one has been taken."},
    {"next_message", python_next_message, METH_VARARGS,
     "Return the number of the next send to, or receive from, a global rank, counted per tag."},
    {"take_back_message", python_take_back_message, METH_VARARGS, "Free the number of a message, like take_back."},
    {"next_position", python_next_position, METH_VARARGS,
     "Return the position of a launch on the communicator of a peer (-1: of all) on a device."},
    {"messages", python_messages, METH_NOARGS, "Return (is_send, peer, tag, count) of every kind of message so far."},
    {"detach", python_detach, METH_NOARGS, "Forget the process group, whose address another object may get."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef group_members[] = {
    {"launched", T_LONGLONG, offsetof(Group, next_collective), READONLY, "collectives so far"},
    {"is_slow", T_BOOL, offsetof(Group, is_slow), 0, "whether Python handles every call"},
    {"is_skipped", T_BOOL, offsetof(Group, is_skipped), 0, "whether collectives are counted, and not recorded"},
    {"has_slow_messages", T_BOOL, offsetof(Group, has_slow_messages), 0, "whether Python handles every message"},
    {"number", T_INT, offsetof(Group, number), READONLY, "unique in the process"},
    {"has_stream_per_pair", T_BOOL, offsetof(Group, has_stream_per_pair), 0, "see operations.NcclBackend"},
    {"returns_work", T_BOOL, offsetof(Group, returns_work), 0, "see operations.NcclBackend"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot group_slots[] = {
    {Py_tp_new, group_new},
    {Py_tp_dealloc, group_dealloc},
    {Py_tp_iter, group_self},
    {Py_tp_iternext, group_next},
    {Py_tp_methods, group_methods},
    {Py_tp_members, group_members},
    {Py_tp_doc, "The sequence numbers of a process group; next() gives that of the next collective."},
    {0, NULL},
};

static PyType_Spec group_spec = {"commtrace._native.core.Group", sizeof(Group), 0, Py_TPFLAGS_DEFAULT, group_slots};

PyTypeObject *group_type;

int groups_init(PyObject *module) {
    group_type = (PyTypeObject *)PyType_FromSpec(&group_spec);
    if (group_type == NULL) {
        return -1;
    }
    Py_INCREF(group_type); /* ours beside the module's */
    return PyModule_AddObject(module, "Group", (PyObject *)group_type);
}
