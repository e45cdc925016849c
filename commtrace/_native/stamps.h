/* What stamper.c and stamps.c share. */
#ifndef COMMTRACE_STAMPS_H
#define COMMTRACE_STAMPS_H

#include "core.h"

enum {
    NUM_SLOTS = 64,       /* of a stamp: replays that the device may be ahead of the thread; a power of two */
    STAMPS_PER_PAGE = 8,  /* a page is 8 KiB */
    MOST_GRAPHS = 8192,   /* at a time */
    NUM_ANCHORS = 16,
};

/* A slot of a stamp. The number is written last. */
typedef struct {
    _Atomic uint64_t time, number;
} Slot;

typedef struct Page {
    Slot *slots; /* STAMPS_PER_PAGE times NUM_SLOTS */
    uint64_t address;
    struct Page *next_free;
} Page;

typedef struct {
    uint64_t timer;
    int64_t host_ns, bracket_ns;
} Anchor;

/* What is needed on a device, made once for each context, and never freed. */
typedef struct {
    Context context;
    int device;
    const char *failure; /* why there are no stamps; NULL if they can be had */
    Function replay, stamp;
    Stream stream;
    int priority;
    uint64_t counters, heads_address;
    _Atomic uint64_t *heads; /* of graphs, by their number; that of number 0 is the probe's */
    Slot *probe;
    uint64_t probe_address;
    uint64_t num_probes, awaited_probe; /* as the device counts them: the latest, and the latest with a stamp */
    Page *free_pages;
    int num_free, num_arenas;
    Anchor anchors[NUM_ANCHORS]; /* a ring of the latest */
    int num_anchors;             /* ever taken */
    int64_t anchored_at;         /* when the last was tried */
} Stamper;

static const char NO_CONTEXT[] = "the job uses no device here";
static const char NO_MEMORY[] = "there is no memory for stamps";

Stamper *stamper_of(int device); /* what was made in the context that is used now; NULL if nothing was */
/* Makes it, if nothing has; why the device has no stamps, NULL if it has. `is_alone`: nothing else is captured now. */
const char *stamper_prepare(int device, bool is_alone);
Page *stamper_take_page(Stamper *); /* with slots that nothing has written; NULL without any */
void stamper_return_page(Stamper *, Page *);
/* The host's time of a reading of the device's clock; raises the error to half the width of where it may be. */
int64_t stamper_host_time(Stamper *, uint64_t timer, int64_t *error_ns);
void stampers_in_forked_child(void); /* all is the parent's */

#endif
