// The matrix product of one block of columns by AMX tiles; see gemm_block.h.
#pragma once

#include "amx_tiles.h"

// Returns the tile_rows of an input with `rows` rows.
INLINE int64_t choose_tile_rows(int64_t rows) {
  (void)rows;
  return TILE_ROWS;
}

// Prepares the tiles for products of `rows` rows.
INLINE void configure_rows(int rows) { configure_tiles(rows, 2 * TILE_DEPTH); }

// Columns of a line of weights: one row of a tile.
#define LINE 16
// Prefetching the next block does not help: except in a long prompt, one call multiplies all rows
// and leaves no time for it.
#define PREFETCHES_NEXT(rows) 0
// Distance in bytes at which weights are prefetched: one tile. This starts the processor's own
// prefetching; larger distances were slower.
#define PREFETCH_DISTANCE 1024

// Multiplies up to 16 rows, or up to 32 rows if `two`.
INLINE void gemm_tiles(struct gemm_input input, int64_t in, const char *weights,
                       float acc[ROWS][BLOCK], int two, int cold) {
  const int64_t step = input.tiled ? TILE_ROWS * TILE_DEPTH : TILE_DEPTH;
  const int64_t row_stride = input.tiled ? TILE_DEPTH : in;
  const uint16_t *x = input.data;
  _tile_zero(0);
  _tile_zero(1);
  if (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < in / TILE_DEPTH; k++, x += step) {
    const char *at = weights + k * DEPTH_BYTES;
    // Rows after the first ROWS find the weights in the cache.
    for (int i = 0; i < DEPTH_BYTES && cold; i += 64)
      _mm_prefetch(at + PREFETCH_DISTANCE + i, _MM_HINT_T1);
    // More than 16 rows do not stay in the L1 cache from one block of weights to the next, so their
    // next elements are prefetched.
    for (int i = 0; i < TILE_ROWS && two; i++) {
      _mm_prefetch(x + step + i * row_stride, _MM_HINT_T0);
      _mm_prefetch(x + TILE_ROWS * in + step + i * row_stride, _MM_HINT_T0);
    }
    // All loads come before the products. If another hardware thread shares the core, this is a
    // tenth faster than alternating loads and products.
    _tile_loadd(4, x, row_stride * 2);
    _tile_loadd(6, at, 64);
    _tile_loadd(7, at + 1024, 64);
    if (two) _tile_loadd(5, x + TILE_ROWS * in, row_stride * 2);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, acc[0], BLOCK * sizeof(float));
  _tile_stored(1, acc[0] + 16, BLOCK * sizeof(float));
  if (two) {
    _tile_stored(2, acc[16], BLOCK * sizeof(float));
    _tile_stored(3, acc[16] + 16, BLOCK * sizeof(float));
  }
}

// Multiplies up to ROWS rows by one block of columns: acc = x · weights.
INLINE void gemm_block(struct gemm_input x, int rows, const struct linear *linear, int64_t block,
                       float acc[ROWS][BLOCK], struct prefetch_plan prefetch) {
  const int64_t in = linear->in;
  const char *weights = (const char *)linear->tiles + block * in / TILE_DEPTH * DEPTH_BYTES;
  switch (prefetch.cold * 2 + (rows > 16)) {
    case 0: gemm_tiles(x, in, weights, acc, 0, 0); break;
    case 1: gemm_tiles(x, in, weights, acc, 1, 0); break;
    case 2: gemm_tiles(x, in, weights, acc, 0, 1); break;
    default: gemm_tiles(x, in, weights, acc, 1, 1);
  }
}
