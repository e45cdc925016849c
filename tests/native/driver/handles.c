/* Handles, tables of the objects they stand for, and sets of nodes. */
#include "driver.h"

void *allocate(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (memory == NULL)
        abort();
    return memory;
}

void *resize(void *memory, size_t count, size_t size)
{
    memory = realloc(memory, (count ? count : 1) * size);
    if (memory == NULL)
        abort();
    return memory;
}

/* From the top: 4 bits kind, 20 generation, 20 slot, 20 node. The generation of a slot grows when its object goes, so
 * that the handle of one that is gone is not taken for that of the next one. */
#define PART_BITS 20
#define PART_MASK ((UINT64_C(1) << PART_BITS) - 1)

void *make_handle(enum handle_kind kind, uint64_t generation, uint64_t slot, uint64_t node)
{
    return (void *)(uintptr_t)((uint64_t)kind << 60 | (generation & PART_MASK) << 40 | slot << PART_BITS | node);
}

enum handle_kind kind_of(const void *handle)
{
    return (enum handle_kind)((uint64_t)(uintptr_t)handle >> 60);
}

uint64_t generation_of(const void *handle)
{
    return (uint64_t)(uintptr_t)handle >> 40 & PART_MASK;
}

uint64_t slot_of(const void *handle)
{
    return (uint64_t)(uintptr_t)handle >> PART_BITS & PART_MASK;
}

uint64_t node_of(const void *handle)
{
    return (uint64_t)(uintptr_t)handle & PART_MASK;
}

struct table streams = {.kind = STREAM_HANDLE};
struct table events = {.kind = EVENT_HANDLE};
struct table graphs = {.kind = GRAPH_HANDLE};
struct table execs = {.kind = EXEC_HANDLE};
struct table modules = {.kind = MODULE_HANDLE};
struct table user_objects = {.kind = OBJECT_HANDLE};

/* Returns the handle. */
void *table_add(struct table *table, void *object)
{
    uint64_t slot;
    if (table->first_free != 0) {
        slot = table->first_free - 1;
        table->first_free = table->slots[slot].next_free;
    } else {
        if (table->slot_count == table->capacity) {
            table->capacity = table->capacity ? 2 * table->capacity : 64;
            table->slots = resize(table->slots, table->capacity, sizeof(struct slot));
        }
        slot = table->slot_count++;
        if (slot > PART_MASK)
            abort(); /* a million objects: some test leaks them */
        table->slots[slot].generation = 1;
    }
    table->slots[slot].object = object;
    return make_handle(table->kind, table->slots[slot].generation, slot, 0);
}

static struct slot *table_slot(const struct table *table, const void *handle)
{
    uint64_t slot = slot_of(handle);
    if (kind_of(handle) != table->kind || slot >= table->slot_count)
        return NULL;
    struct slot *found = &table->slots[slot];
    return found->object != NULL && (found->generation & PART_MASK) == generation_of(handle) ? found : NULL;
}

/* NULL if there is no such object (any more). */
void *table_get(const struct table *table, const void *handle)
{
    struct slot *slot = table_slot(table, handle);
    return slot != NULL ? slot->object : NULL;
}

void *table_remove(struct table *table, const void *handle)
{
    struct slot *slot = table_slot(table, handle);
    if (slot == NULL)
        return NULL;
    void *object = slot->object;
    slot->object = NULL;
    slot->generation++;
    slot->next_free = table->first_free;
    table->first_free = (uint64_t)(slot - table->slots) + 1;
    return object;
}

static bool node_set_has(const struct node_set *set, uint32_t node)
{
    for (uint32_t i = 0; i < set->count; i++)
        if (set->nodes[i] == node)
            return true;
    return false;
}

void node_set_add(struct node_set *set, uint32_t node)
{
    if (node_set_has(set, node))
        return;
    set->nodes = resize(set->nodes, set->count + 1, sizeof(uint32_t));
    set->nodes[set->count++] = node;
}

void node_set_add_all(struct node_set *set, const struct node_set *more)
{
    for (uint32_t i = 0; i < more->count; i++)
        node_set_add(set, more->nodes[i]);
}

void node_set_clear(struct node_set *set)
{
    free(set->nodes);
    *set = (struct node_set){0};
}
