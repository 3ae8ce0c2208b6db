/* Several folders of weights, a device each: which copy of a file to read, and what each gave. */
#ifndef K3_CPU_DEVICES_H
#define K3_CPU_DEVICES_H

#include "image.h"
#include "io.h"

#include <pthread.h>

typedef struct K3Device {
    uint64_t outstanding; /* bytes asked for that have not come */
    uint64_t n_bytes;     /* that came */
    double rate;          /* bytes a nanosecond, of late; 0: none has come yet */
    uint32_t n_passed;    /* reads since its last that it could have served and another did */
} K3Device;

typedef struct K3Devices {
    const K3Image *image;
    const K3IoFile *files; /* by row of the file section, all copies open */
    pthread_mutex_t lock;
    K3Device device[K3_MOST_DEVICES];
} K3Devices;

void k3_devices_begin(K3Devices *d, const K3Image *image, const K3IoFile *files);

/* k3_io_read of the copy of *file whose device will have it first; *file becomes that copy's row. */
int k3_devices_read(K3Devices *d, uint32_t *file, uint64_t offset, uint64_t bytes, char *pages, K3IoFault *fault);

#endif
