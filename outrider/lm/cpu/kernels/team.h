// Threads that wait for each other, some 200 times a forward. OpenMP's own barriers spin for 16 ms before they sleep: where a third
// process wants one of two cores, the thread that spins keeps it from running while the other thread waits for its turn, which made
// a forward four times as long. Spinning less everywhere (see outrider/__init__.py) would slow down torch, whose loops are short.
#pragma once

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

struct team {
  _Atomic unsigned arrived, turn, sleeping, claimed;
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

// Numbers from 0 on of pieces of work, each for one thread, until the team meets.
static inline unsigned claim(struct team *team) { return atomic_fetch_add(&team->claimed, 1); }

static inline void meet(struct team *team) {
  unsigned turn = atomic_load(&team->turn);
  if (atomic_fetch_add(&team->arrived, 1) + 1 == team->size) {
    atomic_store(&team->arrived, 0);
    atomic_store(&team->claimed, 0);
    atomic_fetch_add(&team->turn, 1);
    if (atomic_load(&team->sleeping)) syscall(SYS_futex, &team->turn, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
    return;
  }
  for (int i = 0; i < SPINS; i++) {
    if (atomic_load_explicit(&team->turn, memory_order_acquire) != turn) return;
    PAUSE();
  }
  atomic_fetch_add(&team->sleeping, 1);
  while (atomic_load(&team->turn) == turn) syscall(SYS_futex, &team->turn, FUTEX_WAIT_PRIVATE, turn, NULL, NULL, 0);
  atomic_fetch_sub(&team->sleeping, 1);
}
