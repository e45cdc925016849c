/* The clock: scripted, or the host's own. */
#include "driver.h"

#include <time.h>

/* Read without the lock: the clock must cost no more than the real one, and answer while a call is held. */
atomic_bool is_real_time;
_Atomic int64_t scripted_now_ns = SCRIPTED_START_NS;
_Atomic int64_t clock_reading_ns;

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

void sleep_until(int64_t time_ns)
{
    struct timespec until = {time_ns / 1000000000, time_ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
        ;
}

int64_t later(int64_t left_ns, int64_t right_ns)
{
    return left_ns > right_ns ? left_ns : right_ns;
}

int64_t plus(int64_t start_ns, int64_t duration_ns)
{
    return duration_ns >= NEVER_NS || start_ns >= NEVER_NS - duration_ns ? NEVER_NS : start_ns + duration_ns;
}

/* Found by dlsym, as the functions of script.c are. */
#pragma GCC visibility push(default)

/* The time, at no cost: what the device sees. */
int64_t simulated_now_ns(void)
{
    return is_real_time ? monotonic_ns() : scripted_now_ns;
}

static int64_t host_reading(void)
{
    if (is_real_time)
        return monotonic_ns();
    int64_t reading_ns = clock_reading_ns;
    return reading_ns == 0 ? scripted_now_ns : atomic_fetch_add(&scripted_now_ns, reading_ns) + reading_ns;
}

/* The time as the host reads it: with scripted time, a reading can take time (simulated_set_reading_ns). What kernels
 * have written by then is seen by a host that polls memory between readings, and calls nothing of the driver. */
int64_t simulated_host_ns(void)
{
    int64_t now_ns = host_reading();
    if (now_ns >= next_effect_ns && pthread_mutex_trylock(&lock) == 0) {
        show_effects();
        pthread_mutex_unlock(&lock);
    }
    return now_ns;
}

void simulated_set_reading_ns(int64_t duration_ns)
{
    clock_reading_ns = duration_ns;
}

int64_t simulated_reading_ns(void)
{
    return clock_reading_ns;
}

void simulated_advance(int64_t duration_ns)
{
    scripted_now_ns += duration_ns;
    pthread_mutex_lock(&lock);
    show_effects();
    pthread_mutex_unlock(&lock);
}

void simulated_set_now_ns(int64_t time_ns)
{
    scripted_now_ns = time_ns;
    pthread_mutex_lock(&lock);
    show_effects();
    pthread_mutex_unlock(&lock);
}

/* Let the time be CLOCK_MONOTONIC (true), or stand until the test moves it (false). */
void simulated_use_real_time(bool is_real)
{
    is_real_time = is_real;
}
