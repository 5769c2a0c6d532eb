// The sums of a matrix product, a block of columns at a time: in bfloat16 by the tiles of AMX, or by the dot products of AVX512-BF16;
// else by vectors of floats. A row's sums are taken in the same order whatever other rows there are.
//
// What includes this says by BFLOAT16 of which elements inputs and weights are: bfloat16 (1) or float (0).
#pragma once

#include "cpu_kernels.h"

#if BFLOAT16
typedef uint16_t element;
// A line of weights is of so many rows of `in`, side by side, and LINE columns of `out`.
#define PAIR 2
#else
typedef float element;
#define PAIR 1
#endif

// Columns of a block of weights, and rows of activations that are multiplied by it at once.
#define BLOCK 32
#define ROWS 32
// Lines of weights of TILE_DEPTH elements of `in`, and the bytes that these of a whole block take.
#define LINES (TILE_DEPTH / PAIR)
#define DEPTH_BYTES (LINES * BLOCK * 4)

// A product's weights [out, in] as [blocks of 32 out][blocks of 32 in][parts of a line][lines][LINE columns][pair], zeros behind the
// last out. There is as much of the bias.
struct linear {
  const void *tiles;
  const element *bias;
  int64_t in, out;
};

// A product's input [rows, in]. Either rows lie one behind the other; or tiles of `tile_rows` rows and 32 of `in` do, tiles of the same
// rows side by side, which are read the faster since their lines fall into different sets of the cache. By vectors, no more
// than `tile_rows` are multiplied at once in both cases; and a gated product's output is in such tiles.
struct input {
  const element *data;
  int64_t tile_rows;
  int tiled;
};

// Whether a block's weights still have to come from memory; and how many blocks behind it is the next one to be asked for, or 0.
struct reading {
  int cold;
  int64_t next;
};

// Where a row of what is tiled begins; its parts of TILE_DEPTH elements are a tile apart.
INLINE element *tiled_row(element *data, int64_t row, int64_t in, int64_t tile_rows) {
  return data + row / tile_rows * tile_rows * in + row % tile_rows * TILE_DEPTH;
}

#if BFLOAT16 && defined(__AMX_BF16__)
#include "tile_sums.h"
#else
#include "vector_sums.h"
#endif
