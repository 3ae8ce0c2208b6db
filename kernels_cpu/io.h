/* Reading weights around the page cache: whole pages of a file into whole pages of memory. */
#ifndef K3_CPU_IO_H
#define K3_CPU_IO_H

#include <stddef.h>
#include <stdint.h>

#define K3_IO_PAGE 4096u

typedef struct K3IoFile {
    int fd; /* -1: nobody asked for it */
    int is_direct;
    int is_kept; /* read with the page cache, it leaves its pages there */
    uint64_t bytes; /* by its header */
    int64_t modified_s, modified_ns, changed_s, changed_ns;
    uint64_t n_links;
} K3IoFile;

enum K3IoKind { K3_IO_FINE = 0, K3_IO_ERROR, K3_IO_SHORT, K3_IO_CHANGED };

/* What went wrong: the range of the file that was asked for, and errno of an error. */
typedef struct K3IoFault {
    uint32_t kind, file;
    int32_t error;
    uint32_t reserved;
    uint64_t offset, bytes;
} K3IoFault;

static inline uint64_t k3_io_down(uint64_t x) { return x & ~(uint64_t)(K3_IO_PAGE - 1u); }
static inline uint64_t k3_io_up(uint64_t x) { return k3_io_down(x + K3_IO_PAGE - 1u); }

/* Open for direct reading, or with the page cache where the file system knows no other way. Returns 0, or -1 with one
 * line in `why`: also where the file has not the promised size. */
int k3_io_open(K3IoFile *file, const char *path, uint64_t bytes, char *why, size_t why_bytes);

/* The same of a descriptor that is open: it becomes the file's. */
int k3_io_adopt(K3IoFile *file, int fd, const char *path, uint64_t bytes, char *why, size_t why_bytes);

/* Returns 0, or -1 with *fault filled in, but for the file's number and the range, where the file is not as it was opened.
 * The time that it was modified can be set back, by a copy that keeps times, say; the time that its entry changed cannot. It
 * changes with the number of names too, when another file takes its place: what is open stays as it was, and is read on. */
int k3_io_check(const K3IoFile *file, K3IoFault *fault);

/* Read bytes offset .. offset + bytes, and what else is in their pages, to `pages`, which is page-aligned and has room
 * for all of them: offset's byte comes to pages + offset % K3_IO_PAGE. Returns 0, or -1 with *fault filled in but for the
 * file's number. A file that was written since it was opened is a fault: half of it may be another model's. */
int k3_io_read(const K3IoFile *file, uint64_t offset, uint64_t bytes, char *pages, K3IoFault *fault);

/* One line on a fault of the file at `path`. */
void k3_io_words(const K3IoFault *fault, const char *path, char *why, size_t why_bytes);

#endif
