// The products of many int8 rows with a block of columns by AMX tiles; see gemm_int8.h. The sums of
// a group are exact, so a row's result has the same bits as if vectors multiplied it.
#pragma once

#include "amx_tiles.h"

#if PAIR != 4
#error "tiles multiply bytes, four at a time, as AVX512-VNNI does"
#endif

// Fewer than LEAST_TILED_ROWS rows are multiplied by vectors.
#ifndef LEAST_TILED_ROWS
#define LEAST_TILED_ROWS 9
#endif

// Prepares the tiles for products of `rows` rows.
INLINE void configure_rows(int rows) {
  if (rows >= LEAST_TILED_ROWS) configure_tiles(rows, TILE_DEPTH);
}

// Multiplies a group of all rows by its tiles of weights, up to 32 rows if `two`, else up to 16.
INLINE void multiply_group(const struct group *x, int64_t groups, const uint8_t *weights,
                           int32_t (*sums)[BLOCK], int two) {
  const int64_t stride = groups * (int64_t)sizeof(struct group);
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(4, x->numbers, stride);
  _tile_loadd(6, weights, BLOCK * PAIR);
  _tile_loadd(7, weights + BLOCK / 2 * PAIR, BLOCK * PAIR);
  if (two) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, x[TILE_ROWS * groups].numbers, stride);
  }
  _tile_dpbsud(0, 4, 6);
  _tile_dpbsud(1, 4, 7);
  if (two) {
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  const int64_t line = BLOCK * sizeof(int32_t);
  _tile_stored(0, sums[0], line);
  _tile_stored(1, sums[0] + BLOCK / 2, line);
  if (two) {
    _tile_stored(2, sums[TILE_ROWS], line);
    _tile_stored(3, sums[TILE_ROWS] + BLOCK / 2, line);
  }
}

// Adds the sums of a group to the rows' totals.
INLINE void add_group(const struct group *x, int64_t groups, int32_t (*sums)[BLOCK],
                      float (*acc)[BLOCK], int rows) {
  for (int i = 0; i < rows; i++)
    for (int at = 0; at < BLOCK; at += LANES) {
      ivec sum;
      memcpy(&sum, sums[i] + at, sizeof sum);
      vec total = load_float(acc[i] + at);
      total += __builtin_convertvector(sum + x[i * groups].offset, vec) * x[i * groups].scale;
      memcpy(acc[i] + at, &total, sizeof total);
    }
}

// Multiplies up to ROWS rows by a block of columns. While the tiles of a group are computed, the
// sums of the group before it are added.
INLINE void multiply_tiles(const struct group *x, int64_t groups, const uint8_t *weights,
                           float (*acc)[BLOCK], int rows, int cold) {
  int32_t sums[2][ROWS][BLOCK] __attribute__((aligned(64)));
  memset(acc, 0, (size_t)rows * sizeof acc[0]);
  for (int64_t k = 0; k <= groups; k++) {
    if (k < groups) {
      const uint8_t *tile = weights + k * DEPTH_BYTES;
      for (int at = 0; at < DEPTH_BYTES && cold; at += 64)
        __builtin_prefetch(tile + PREFETCH_DISTANCE + at, 0, 2);
      // Tile loads read memory that was written as other types.
      compiler_fence();
      if (rows > TILE_ROWS)
        multiply_group(x + k, groups, tile, sums[k % 2], 1);
      else
        multiply_group(x + k, groups, tile, sums[k % 2], 0);
      compiler_fence();
    }
    if (k > 0) add_group(x + k - 1, groups, sums[(k - 1) % 2], acc, rows);
  }
}
