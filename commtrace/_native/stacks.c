/* Copies what faulthandler has written to a file in memory into a file of the run, on a thread that needs no GIL.

   The stack of code in C that keeps Python's lock is written by a signal's handler on the training thread: only to
   memory, for the file system of the run may not answer. No thread of Python can run then, so the copy is made here. */
#include "core.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LOOK_MS = 250, MOST_BYTES = 1 << 16 };

/* Writes the whole source, which only grows until it is emptied; a stack that is half written comes whole next time.
   On a full disk nothing is left: half a stack would look like a whole one. */
static bool copy(int source, const char *path) {
    char content[4096];
    ssize_t size;
    off_t at = 0;
    bool is_whole = true;
    int target = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (target < 0) {
        return false;
    }
    while (is_whole && at < MOST_BYTES && (size = pread(source, content, sizeof content, at)) > 0) {
        is_whole = write(target, content, (size_t)size) == size;
        at += size;
    }
    is_whole = close(target) == 0 && is_whole;
    if (!is_whole) {
        unlink(path);
    }
    return is_whole;
}

static void keep_copy(int source, unsigned long long device, unsigned long long inode, const char *path) {
    struct stat now;
    off_t copied = 0;
    for (;;) {
        poll(NULL, 0, LOOK_MS);
        /* The end: it was closed. A program that closes all descriptors may have a file of its own there by now. */
        if (fstat(source, &now) != 0 || now.st_dev != device || now.st_ino != inode) {
            break;
        }
        if (now.st_size == copied) {
            continue;
        }
        unlink(path); /* no descriptor is kept, for the same reason */
        if (now.st_size == 0 || copy(source, path)) { /* on a full disk it is tried again */
            copied = now.st_size;
        }
    }
    if (copied != 0) {
        unlink(path);
    }
}

PyObject *stacks_keep_copy(PyObject *module, PyObject *arguments) {
    (void)module;
    int source;
    unsigned long long device, inode;
    const char *path;
    if (!PyArg_ParseTuple(arguments, "iKKy:keep_copy", &source, &device, &inode, &path)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    keep_copy(source, device, inode, path);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}
