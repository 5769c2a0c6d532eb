// A barrier and a work counter for OpenMP threads, which wait for each other some 200 times a
// forward.
//
// OpenMP's own barriers spin for 16 ms before they sleep. Suppose that two threads use two cores,
// and another process takes one of these cores. The thread on the other core then spins, so the
// process cannot move there, and the first thread waits for the process: a forward took four times
// as long. Shorter spinning everywhere (see outrider/__init__.py) would slow down torch, whose
// loops are short.
#pragma once

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

// `generation` counts the barriers that all `size` threads have passed.
struct thread_pool {
  _Atomic unsigned arrived, generation, sleeping, claimed;
  unsigned size;
};
#define SPINS 1000

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE()
#endif

// Returns the number of the next unclaimed work item; numbers start at 0 after each barrier.
static inline unsigned claim_work(struct thread_pool *pool) {
  return atomic_fetch_add(&pool->claimed, 1);
}

// Waits until all threads of the pool have called this: spins first, then sleeps.
static inline void barrier_wait(struct thread_pool *pool) {
  unsigned generation = atomic_load(&pool->generation);
  if (atomic_fetch_add(&pool->arrived, 1) + 1 == pool->size) {
    atomic_store(&pool->arrived, 0);
    atomic_store(&pool->claimed, 0);
    atomic_fetch_add(&pool->generation, 1);
    if (atomic_load(&pool->sleeping))
      syscall(SYS_futex, &pool->generation, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    return;
  }
  for (int i = 0; i < SPINS; i++) {
    if (atomic_load_explicit(&pool->generation, memory_order_acquire) != generation) return;
    PAUSE();
  }
  atomic_fetch_add(&pool->sleeping, 1);
  while (atomic_load(&pool->generation) == generation)
    syscall(SYS_futex, &pool->generation, FUTEX_WAIT_PRIVATE, generation, NULL, NULL, 0);
  atomic_fetch_sub(&pool->sleeping, 1);
}
