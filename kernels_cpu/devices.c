/* A read goes to the device with the shortest queue in time: its outstanding bytes over the rate at which it has been
 * giving them. Counting reads, or bytes, instead would let the slowest device set the pace of all. */
#define _GNU_SOURCE
#include "devices.h"

#include <string.h>
#include <time.h>

#include "interp.h"

#define OLD_SHARE 0.875 /* of a rate when a new read adds to it */
#define MOST_PASSED 64u  /* then it is asked again: it may have been slow for a while only */

void k3_devices_begin(K3Devices *d, const K3Image *image, const K3IoFile *files) {
    memset(d, 0, sizeof *d);
    pthread_mutex_init(&d->lock, NULL);
    d->image = image;
    d->files = files;
}

#ifdef K3_CONTROL_DEVICE_NS /* only a test defines it: device n takes (n + 1)^2 times as many ns a KiB, one read at a time */
static pthread_mutex_t turn[K3_MOST_DEVICES] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER};
static void slow_down(uint32_t device, uint64_t bytes) {
    const uint64_t ns = (uint64_t)(K3_CONTROL_DEVICE_NS) * (bytes / 1024u + 1u) * (device + 1u) * (device + 1u);
    pthread_mutex_lock(&turn[device]);
    nanosleep(&(struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)}, NULL);
    pthread_mutex_unlock(&turn[device]);
}
#endif

/* Time until `bytes` more have come; a device that nobody has heard of yet is taken as the fastest. */
static double wait_of(const K3Devices *d, uint32_t device, uint64_t bytes) {
    double rate = d->device[device].rate;
    for (uint32_t i = 0; d->device[device].rate <= 0 && i < K3_MOST_DEVICES; i++)
        if (d->device[i].rate > rate) rate = d->device[i].rate;
    return (double)(d->device[device].outstanding + bytes) / (rate > 0 ? rate : 1.0);
}

static uint32_t shortest_queue(const K3Devices *d, uint32_t file, uint64_t bytes) {
    const K3FileRow *rows = d->image->files;
    uint32_t best = file;
    double least = wait_of(d, rows[file].device, bytes);
    for (uint32_t i = file; i != K3_NO_INDEX; i = rows[i].copy) {
        const double wait = wait_of(d, rows[i].device, bytes);
        if (d->device[rows[i].device].n_passed >= MOST_PASSED) return i;
#ifdef K3_CONTROL_ALTERNATE /* only a test defines it: by bytes, whatever the device's rate is */
        if (d->device[rows[i].device].n_bytes + d->device[rows[i].device].outstanding < d->device[rows[best].device].n_bytes + d->device[rows[best].device].outstanding) best = i;
        continue;
#endif
        if (wait < least || (wait <= least && d->device[rows[i].device].n_bytes < d->device[rows[best].device].n_bytes)) {
            best = i;
            least = wait;
        }
    }
    return best;
}

int k3_devices_read(K3Devices *d, uint32_t *file, uint64_t offset, uint64_t bytes, char *pages, K3IoFault *fault) {
    const K3FileRow *rows = d->image->files;
    pthread_mutex_lock(&d->lock);
    const uint32_t chosen = shortest_queue(d, *file, bytes);
    for (uint32_t i = *file; i != K3_NO_INDEX; i = rows[i].copy) d->device[rows[i].device].n_passed++;
    K3Device *device = &d->device[rows[chosen].device];
    device->n_passed = 0;
    device->outstanding += bytes;
    const uint64_t queued = device->outstanding;
    pthread_mutex_unlock(&d->lock);
    *file = chosen;
    const uint64_t start = k3_now_ns();
    const int rc = k3_io_read(&d->files[chosen], offset, bytes, pages, fault);
#ifdef K3_CONTROL_DEVICE_NS
    slow_down(rows[chosen].device, bytes);
#endif
    const uint64_t ns = k3_now_ns() - start;
    pthread_mutex_lock(&d->lock);
    device->outstanding -= bytes;
    if (rc == 0) {
        const double rate = (double)queued / (double)(ns > 0 ? ns : 1); /* what was queued before it has come too */
        device->n_bytes += bytes;
        device->rate = device->rate > 0 ? OLD_SHARE * device->rate + (1 - OLD_SHARE) * rate : rate;
    }
    pthread_mutex_unlock(&d->lock);
    return rc;
}
