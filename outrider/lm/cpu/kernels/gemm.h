// Matrix products by a pool of threads, and the epilogues that store their results.
#pragma once

#include "gemm_block.h"

#include <omp.h>

// Rounds to the precision of elements.
INLINE vec rounded(vec x) {
  element half[LANES];
  store(x, half, 0, BFLOAT16);
  return load(half, 0, BFLOAT16);
}

// Returns LANES results of a row, from `column` on: the accumulators, times the scales of int8
// weights, plus the bias, rounded.
INLINE vec add_bias(const float *acc, const struct linear *linear, int64_t column) {
  vec sum = load_float(acc);
#if INT8
  sum *= load_float(linear->scales + column);
#endif
  return rounded(linear->bias ? sum + load(linear->bias, column, BFLOAT16) : sum);
}

// How a product ends: STORE stores the result; ADD adds it to `out`; SWIGLU gates the second half
// of the columns by the first half; LOGITS stores the result as float.
enum epilogue { STORE, ADD, SWIGLU, LOGITS };

// Stores LANES numbers, or only the first `left` of them if the row has room for no more.
INLINE void store_some(vec value, char *to, int64_t left, int is_bfloat16) {
  if (left >= LANES) {
    store(value, to, 0, is_bfloat16);
    return;
  }
  char whole[sizeof value];
  store(value, whole, 0, is_bfloat16);
  memcpy(to, whole, (size_t)left * (is_bfloat16 ? 2 : 4));
}

INLINE void store_block(float acc[ROWS][BLOCK], int rows, const struct linear *linear,
                        int64_t block, char *out, enum epilogue epilogue) {
  const int64_t width = epilogue == LOGITS ? sizeof(float) : sizeof(element);
  for (int64_t at = 0; at < BLOCK; at += LANES) {
    int64_t column = block * BLOCK + at, left = linear->out - column;
    if (left <= 0) return;
    for (int i = 0; i < rows; i++) {
      vec value = add_bias(acc[i] + at, linear, column);
      char *to = out + (i * linear->out + column) * width;
      // The rows that ADD adds to are inputs of other products, so they consist of whole blocks.
      if (epilogue == ADD) value += load(to, 0, BFLOAT16);
      store_some(value, to, left, BFLOAT16 && epilogue != LOGITS);
    }
  }
}

// Stores silu(gate) * up (Shazeer, arXiv 2002.05202) for one block of columns; `out` is tiled.
INLINE void store_swiglu(float gates[ROWS][BLOCK], float ups[ROWS][BLOCK], int rows,
                         const struct linear *linear, int64_t block, element *out,
                         int64_t tile_rows) {
  int64_t half = linear->out / 2;
  for (int i = 0; i < rows; i++) {
    element *to = tiled_row(out, i, half, tile_rows) + block * tile_rows * TILE_DEPTH;
    for (int64_t at = 0, column = block * BLOCK; at < BLOCK; at += LANES, column += LANES) {
      vec x = add_bias(gates[i] + at, linear, column);
      vec up = add_bias(ups[i] + at, linear, half + column);
      // With e = exp(-|x|), which cannot overflow, the sigmoid is 1 / (1 + e) for positive x, else
      // e / (1 + e).
      vec e = exponential(-largest(x, -x));
      ivec positive = x >= splat(0);
      vec numerator = (vec)(((ivec)splat(1) & positive) | ((ivec)e & ~positive));
      store(rounded(x * numerator / (e + 1.0f)) * up, to, at, BFLOAT16);
    }
  }
}

INLINE void gemm_and_store(struct gemm_input x, int rows, const struct linear *linear,
                           int64_t block, char *out, enum epilogue epilogue,
                           struct prefetch_plan prefetch) {
  float acc[2][ROWS][BLOCK] __attribute__((aligned(64)));
  gemm_block(x, rows, linear, block, acc[0], prefetch);
  if (epilogue != SWIGLU) {
    store_block(acc[0], rows, linear, block, out, epilogue);
    return;
  }
  gemm_block(x, rows, linear, block + linear->out / (2 * BLOCK), acc[1], prefetch);
  store_swiglu(acc[0], acc[1], rows, linear, block, (element *)out, x.tile_rows);
}

// Computes out [rows, out] = x [rows, in] · weights. All threads of the pool call this and share
// the blocks of columns.
//
// A thread claims several blocks at a time, so that a long prompt's rows are read less often. One
// claim has so few blocks that all threads end at about the same time. A thread that prefetches its
// next blocks claims them before it begins with the present blocks.
static void gemm(struct thread_pool *pool, struct gemm_input x, int64_t rows,
                 const struct linear *linear, void *out, enum epilogue epilogue) {
#if INT8
  x = quantize(pool, x, rows, linear->in);
#endif
  const int64_t columns = epilogue == SWIGLU ? linear->out / 2 : linear->out;
  const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
  int64_t some = blocks / (8 * pool->size);
  if (some < 1) some = 1;
  if (some > 4) some = 4;
  const int64_t row_bytes =
      columns * (int64_t)(epilogue == LOGITS ? sizeof(float) : sizeof(element));
  int configured = 0, prefetched = 0;
  int64_t later;
  for (int64_t begin = some * claim_work(pool); begin < blocks;
       begin = PREFETCHES_NEXT(rows) ? later : some * claim_work(pool)) {
    later = PREFETCHES_NEXT(rows) ? some * claim_work(pool) : blocks;
    int64_t end = begin + some < blocks ? begin + some : blocks;
    for (int64_t row = 0; row < rows; row += ROWS) {
      int count = (int)(rows - row < ROWS ? rows - row : ROWS);
      if (count != configured) configure_rows(configured = count);
      for (int64_t block = begin; block < end; block++) {
        int64_t next = block + 1 < end ? block + 1 : later;
        int fetches_next = PREFETCHES_NEXT(rows) && next < blocks;
        struct prefetch_plan prefetch = {row == 0 && !prefetched, fetches_next ? next - block : 0};
        struct gemm_input some_x = x;
        some_x.data += row * ROW_ELEMENTS(linear->in);
        char *some_out = (char *)out + row * row_bytes;
        gemm_and_store(some_x, count, linear, block, some_out, epilogue, prefetch);
        prefetched = PREFETCHES_NEXT(rows);
      }
    }
  }
  barrier_wait(pool);
}

// Sets the pool's size. Every thread of a parallel region begins with this call, because OpenMP
// sets the number of threads only inside the region. Returns the state that the thread must restore
// at its end.
INLINE saved_state join_pool(struct thread_pool *pool) {
  saved_state saved = save_state();
#pragma omp single
  pool->size = (unsigned)omp_get_num_threads();
  return saved;
}
