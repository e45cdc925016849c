/* Loaded before the C library: calls for paths below $FROZEN_BELOW wait while the file $FROZEN_WHILE exists.

   As on a hard NFS mount whose server is away. $FROZEN_CALLS names the kinds of calls that wait, between commas; empty
   for all. Each kind that was called below the folder, frozen or not, is noted as an empty file in $FROZEN_NOTES. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static bool is_below(const char *path) {
    const char *folder = getenv("FROZEN_BELOW");
    return folder != NULL && path != NULL && strncmp(path, folder, strlen(folder)) == 0;
}

static bool waits(const char *kind) {
    const char *kinds = getenv("FROZEN_CALLS");
    if (kinds == NULL || *kinds == '\0') {
        return true;
    }
    size_t size = strlen(kind);
    for (const char *at = strstr(kinds, kind); at != NULL; at = strstr(at + size, kind)) {
        if ((at == kinds || at[-1] == ',') && (at[size] == ',' || at[size] == '\0')) {
            return true;
        }
    }
    return false;
}

static void path_call(const char *kind, const char *path) {
    if (!is_below(path)) {
        return;
    }
    const char *notes = getenv("FROZEN_NOTES"), *flag = getenv("FROZEN_WHILE");
    if (notes != NULL) {
        char note[4096];
        snprintf(note, sizeof note, "%s/%s", notes, kind);
        long file = syscall(SYS_openat, AT_FDCWD, note, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
        if (file >= 0) {
            syscall(SYS_close, file);
        }
    }
    while (flag != NULL && waits(kind) && syscall(SYS_faccessat, AT_FDCWD, flag, F_OK) == 0) {
        usleep(20000);
    }
}

static void file_call(const char *kind, int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (size > 0) {
        path[size] = '\0';
        path_call(kind, path);
    }
}

#define ORIGINAL(type, name, ...) \
    static type (*original)(__VA_ARGS__); \
    if (original == NULL) { \
        original = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name); \
    }

#define WITH_PATH(kind, type, name, parameters, arguments, ...) \
    type name parameters { \
        ORIGINAL(type, name, __VA_ARGS__) \
        path_call(kind, path); \
        return original arguments; \
    }

#define WITH_FILE(kind, type, name, parameters, arguments, ...) \
    type name parameters { \
        ORIGINAL(type, name, __VA_ARGS__) \
        file_call(kind, file); \
        return original arguments; \
    }

#define OPENING(name) \
    int name(const char *path, int flags, ...) { \
        ORIGINAL(int, name, const char *, int, ...) \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        path_call("open", path); \
        return original(path, flags, mode); \
    }

#define OPENING_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        ORIGINAL(int, name, int, const char *, int, ...) \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = (flags & (O_CREAT | __O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        path_call("open", path); \
        return original(folder, path, flags, mode); \
    }

OPENING(open)
OPENING(open64)
OPENING_AT(openat)
OPENING_AT(openat64)
WITH_PATH("list", DIR *, opendir, (const char *path), (path), const char *)
WITH_PATH("stat", int, stat, (const char *path, struct stat *to), (path, to), const char *, struct stat *)
WITH_PATH("stat", int, stat64, (const char *path, struct stat64 *to), (path, to), const char *, struct stat64 *)
WITH_PATH("stat", int, lstat, (const char *path, struct stat *to), (path, to), const char *, struct stat *)
WITH_PATH("stat", int, lstat64, (const char *path, struct stat64 *to), (path, to), const char *, struct stat64 *)
WITH_PATH("stat", int, fstatat, (int folder, const char *path, struct stat *to, int flags), (folder, path, to, flags),
          int, const char *, struct stat *, int)
WITH_PATH("stat", int, fstatat64, (int folder, const char *path, struct stat64 *to, int flags),
          (folder, path, to, flags), int, const char *, struct stat64 *, int)
WITH_PATH("mkdir", int, mkdir, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
WITH_PATH("unlink", int, unlink, (const char *path), (path), const char *)
WITH_PATH("rename", int, rename, (const char *path, const char *to), (path, to), const char *, const char *)
WITH_FILE("stat", int, fstat, (int file, struct stat *to), (file, to), int, struct stat *)
WITH_FILE("stat", int, fstat64, (int file, struct stat64 *to), (file, to), int, struct stat64 *)
WITH_FILE("read", ssize_t, read, (int file, void *to, size_t size), (file, to, size), int, void *, size_t)
WITH_FILE("read", ssize_t, pread, (int file, void *to, size_t size, off_t at), (file, to, size, at), int, void *,
          size_t, off_t)
WITH_FILE("read", ssize_t, pread64, (int file, void *to, size_t size, off64_t at), (file, to, size, at), int, void *,
          size_t, off64_t)
WITH_FILE("write", ssize_t, write, (int file, const void *from, size_t size), (file, from, size), int, const void *,
          size_t)
WITH_FILE("write", ssize_t, pwrite, (int file, const void *from, size_t size, off_t at), (file, from, size, at), int,
          const void *, size_t, off_t)
WITH_FILE("write", ssize_t, pwrite64, (int file, const void *from, size_t size, off64_t at), (file, from, size, at),
          int, const void *, size_t, off64_t)
WITH_FILE("truncate", int, ftruncate, (int file, off_t size), (file, size), int, off_t)
WITH_FILE("truncate", int, ftruncate64, (int file, off64_t size), (file, size), int, off64_t)
WITH_FILE("sync", int, fsync, (int file), (file), int)
WITH_FILE("sync", int, fdatasync, (int file), (file), int)
WITH_FILE("close", int, close, (int file), (file), int)
