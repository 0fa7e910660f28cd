/* A pool of threads for regions of independent tasks, and their scratch memory.
 *
 * A region runs task(args, i, thread) for i in [0, count). The calling thread works too, and each
 * thread takes the next tasks when it is free, so a late worker delays only tasks it has taken.
 * Waiting threads spin for a short while and then sleep: other processes need the cores too.
 * Knows nothing of what the tasks do.
 */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#define MAX_THREADS 256
#define SPIN_NS 40000
#define MIN_BATCH (1 << 15) /* least multiplications in a batch of tasks: a few microseconds */
/* A batch number past any region's: no batch can be taken while the next region is set up. */
#define CLOSED 0xffffffffu

typedef void (*task_fn)(const void *args, int64_t index, int thread);
struct buffer { void *data; size_t bytes; };

static struct {
    pthread_mutex_t entry; /* one region at a time */
    pthread_mutex_t lock;  /* for sleeping and waking */
    pthread_cond_t work, finished;
    /* Upper half: number of the region; lower half: its next batch. A thread takes a batch by a
     * compare-and-swap that adds 1, which fails if the ticket has changed meanwhile. */
    _Atomic uint64_t ticket;
    _Atomic int64_t done;
    _Atomic(task_fn) task;
    _Atomic(const void *) args;
    _Atomic int64_t count, grain;
    _Atomic int sleepers, caller_sleeps, stop;
    int threads; /* the calling one included */
    pthread_t workers[MAX_THREADS];
    struct buffer scratch[MAX_THREADS], shared;
} pool = {.entry = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER,
          .work = PTHREAD_COND_INITIALIZER, .finished = PTHREAD_COND_INITIALIZER,
          .grain = 1, .threads = 1};

/* Set rounding and subnormal numbers as in IEEE 754, whatever another library chose. */
static unsigned standard_arithmetic(void) {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return before;
#else
    return 0;
#endif
}

/* Have subnormal numbers count as zero. */
static unsigned flushing_arithmetic(void) {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    return before;
#else
    return 0;
#endif
}

static void restore_arithmetic(unsigned before) {
#ifdef __SSE__
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

static inline void spin_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void run_tasks(int thread) {
    uint64_t ticket = atomic_load(&pool.ticket);
    for (;;) {
        task_fn task = atomic_load(&pool.task);
        const void *args = atomic_load(&pool.args);
        int64_t count = atomic_load(&pool.count), grain = atomic_load(&pool.grain);
        int64_t batch = (uint32_t)ticket, batches = (count + grain - 1) / grain;
        if (batch >= batches) return;
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1)) continue;
        for (int64_t i = batch * grain; i < count && i < (batch + 1) * grain; i++)
            task(args, i, thread);
        if (atomic_fetch_add(&pool.done, 1) + 1 == batches && atomic_load(&pool.caller_sleeps)) {
            pthread_mutex_lock(&pool.lock);
            pthread_cond_signal(&pool.finished);
            pthread_mutex_unlock(&pool.lock);
        }
        ticket = atomic_load(&pool.ticket);
    }
}

/* Returns when the region's number differs from `seen`, or at once to stop. */
static void await_region(uint32_t seen) {
    int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 16; i++) {
            if ((uint32_t)(atomic_load(&pool.ticket) >> 32) != seen || atomic_load(&pool.stop))
                return;
            spin_pause();
        }
    } while (now_ns() < end);
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleepers, 1);
    while ((uint32_t)(atomic_load(&pool.ticket) >> 32) == seen && !atomic_load(&pool.stop))
        pthread_cond_wait(&pool.work, &pool.lock);
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.lock);
}

static void await_batches(int64_t batches) {
    int64_t end = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 16; i++) {
            if (atomic_load(&pool.done) == batches) return;
            spin_pause();
        }
    } while (now_ns() < end);
    pthread_mutex_lock(&pool.lock);
    atomic_store(&pool.caller_sleeps, 1);
    while (atomic_load(&pool.done) != batches) pthread_cond_wait(&pool.finished, &pool.lock);
    atomic_store(&pool.caller_sleeps, 0);
    pthread_mutex_unlock(&pool.lock);
}

static void *work(void *thread) {
    standard_arithmetic();
    uint32_t seen = 0;
    while (!atomic_load(&pool.stop)) {
        await_region(seen);
        seen = (uint32_t)(atomic_load(&pool.ticket) >> 32);
        run_tasks((int)(intptr_t)thread);
    }
    return NULL;
}

/* Tasks are taken `grain` at a time. */
static void run_batches(task_fn task, const void *args, int64_t count, int64_t grain) {
    if (count <= grain || pool.threads == 1) {
        for (int64_t i = 0; i < count; i++) task(args, i, 0);
        return;
    }
    uint64_t region = atomic_load(&pool.ticket) >> 32;
    atomic_store(&pool.ticket, region << 32 | CLOSED);
    atomic_store(&pool.done, 0);
    atomic_store(&pool.task, task);
    atomic_store(&pool.args, args);
    atomic_store(&pool.count, count);
    atomic_store(&pool.grain, grain);
    atomic_store(&pool.ticket, (region + 1) << 32);
    if (atomic_load(&pool.sleepers)) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.work);
        pthread_mutex_unlock(&pool.lock);
    }
    run_tasks(0);
    await_batches((count + grain - 1) / grain);
}

/* `cost`: multiplications, or the like, in one task; small tasks are taken several at a time. */
static void run_region(task_fn task, const void *args, int64_t count, int64_t cost) {
    run_batches(task, args, count, 1 + MIN_BATCH / (cost + 1));
}

/* Memory that is kept for later calls; its contents are not. NULL if there is not enough. */
static void *room(struct buffer *buffer, size_t bytes) {
    if (buffer->bytes < bytes) {
        free(buffer->data);
        if (posix_memalign(&buffer->data, 64, bytes)) {
            buffer->data = NULL;
            bytes = 0;
        }
        buffer->bytes = bytes;
    }
    return buffer->data;
}

/* Reserve scratch memory for every thread; 0 if there is not enough. */
static int reserve(size_t bytes) {
    for (int i = 0; i < pool.threads; i++)
        if (!room(&pool.scratch[i], bytes)) return 0;
    return 1;
}

static unsigned enter(void) {
    pthread_mutex_lock(&pool.entry);
    return standard_arithmetic();
}

static void leave(unsigned arithmetic) {
    restore_arithmetic(arithmetic);
    pthread_mutex_unlock(&pool.entry);
}

void penstock_set_threads(int64_t count) {
    pthread_mutex_lock(&pool.entry);
    atomic_store(&pool.stop, 1);
    pthread_mutex_lock(&pool.lock);
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.lock);
    for (int i = 1; i < pool.threads; i++) pthread_join(pool.workers[i], NULL);
    atomic_store(&pool.stop, 0);
    pool.threads = 1;
    sigset_t all, before; /* workers block signals: the program's own threads handle them */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < count && i < MAX_THREADS; i++) {
        if (pthread_create(&pool.workers[i], NULL, work, (void *)(intptr_t)i)) break;
        pool.threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_unlock(&pool.entry);
}

/* A child of fork has one thread, the one that forked, and none of the workers. That thread enters
 * first, so that no call of another thread is left half done; locks that workers held are new. */
static void before_fork(void) { pthread_mutex_lock(&pool.entry); }

static void after_fork(void) { pthread_mutex_unlock(&pool.entry); }

static void begin_child(void) {
    pool.entry = pool.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool.work = pool.finished = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    atomic_store(&pool.sleepers, 0);
    pool.threads = 1;
}

__attribute__((constructor)) static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork, begin_child);
}
