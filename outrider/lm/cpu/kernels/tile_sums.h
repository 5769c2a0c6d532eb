// Sums by the tiles of AMX; see sums.h.
#pragma once

#include "tiles.h"

// oneDNN remembers in the processor itself which tiles it uses, and so it must find them as it left them.
typedef struct tile_config kept_state;

INLINE kept_state keep_state(void) {
  struct tile_config kept;
  store_config(&kept);
  return kept;
}

INLINE void restore_state(const kept_state *kept) {
  if (kept->palette)
    load_config(kept);
  else
    _tile_release();
}

// Rows of a tile of inputs of so many rows.
INLINE int64_t choose_tile_rows(int64_t rows) {
  (void)rows;
  return TILE_ROWS;
}

// Before sums of so many rows are taken.
INLINE void expect_rows(int rows) { configure(rows); }

// Columns of a line: what a row of a tile holds.
#define LINE 16
// All rows but a long prompt's are multiplied at once, and leave no time in which to ask for another block.
#define ASKS(rows) 0
// How far ahead weights are asked for, in bytes. One tile gets the processor's own prefetching going; farther ahead was slower.
#define AHEAD 1024

INLINE void sum_tiles(struct input input, int64_t in, const char *weights, float sums[ROWS][BLOCK], int two, int cold) {
  const int64_t step = input.tiled ? TILE_ROWS * TILE_DEPTH : TILE_DEPTH, apart = input.tiled ? TILE_DEPTH : in;
  const uint16_t *x = input.data;
  _tile_zero(0);
  _tile_zero(1);
  if (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < in / TILE_DEPTH; k++, x += step) {
    const char *at = weights + k * DEPTH_BYTES;
    // The rows behind the first ROWS find the weights in the cache.
    for (int i = 0; i < DEPTH_BYTES && cold; i += 64) _mm_prefetch(at + AHEAD + i, _MM_HINT_T1);
    // More than 16 rows do not stay in the first cache from one block of weights to the next.
    for (int i = 0; i < TILE_ROWS && two; i++) {
      _mm_prefetch(x + step + i * apart, _MM_HINT_T0);
      _mm_prefetch(x + TILE_ROWS * in + step + i * apart, _MM_HINT_T0);
    }
    // Loads before products: where another processor's thread shares the core, that is a tenth faster than one by one.
    _tile_loadd(4, x, apart * 2);
    _tile_loadd(6, at, 64);
    _tile_loadd(7, at + 1024, 64);
    if (two) _tile_loadd(5, x + TILE_ROWS * in, apart * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums[0], BLOCK * sizeof(float));
  _tile_stored(1, sums[0] + 16, BLOCK * sizeof(float));
  if (two) {
    _tile_stored(2, sums[16], BLOCK * sizeof(float));
    _tile_stored(3, sums[16] + 16, BLOCK * sizeof(float));
  }
}

// Sums of one block of columns for up to ROWS rows.
INLINE void sum_block(struct input x, int rows, const struct linear *linear, int64_t block, float sums[ROWS][BLOCK],
                      struct reading reading) {
  const int64_t in = linear->in;
  const char *weights = (const char *)linear->tiles + block * in / TILE_DEPTH * DEPTH_BYTES;
  switch (reading.cold * 2 + (rows > 16)) {
    case 0: sum_tiles(x, in, weights, sums, 0, 0); break;
    case 1: sum_tiles(x, in, weights, sums, 1, 0); break;
    case 2: sum_tiles(x, in, weights, sums, 0, 1); break;
    default: sum_tiles(x, in, weights, sums, 1, 1);
  }
}
