// The matrix product of one block of output columns: in bfloat16 by AMX tiles, by the dot products
// of AVX512-BF16 or by ARM's bfmmla; else by vectors of floats. A row's result does not depend on
// the other rows, because its sums are always taken in the same order.
//
// A file that includes this file defines BFLOAT16: 1 if inputs and weights are bfloat16, 0 if they
// are float. With INT8 as well, weights are int8, and products are of integers.
#pragma once

#include "cpu_kernels.h"
#include "thread_pool.h"

#if BFLOAT16
typedef uint16_t element;
// The number of elements of `in` that a line of weights has, next to each other, for each of its
// LINE columns of `out`.
#if INT8 && defined(__ARM_FEATURE_MATMUL_INT8)
#define PAIR 8
#elif INT8 && (defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD))
#define PAIR 4
#elif !INT8 && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PAIR 4
#else
#define PAIR 2
#endif
#else
typedef float element;
#define PAIR 1
#endif

// A block of weights has BLOCK columns. One call multiplies at most ROWS rows of activations by a
// block.
#define BLOCK 32
#define ROWS 32
// The number of lines of weights for TILE_DEPTH elements of `in`, and the bytes that the weights of
// a block of columns take for these elements.
#define LINES (TILE_DEPTH / PAIR)
#define DEPTH_BYTES (TILE_DEPTH * BLOCK * (INT8 ? 1 : (int)sizeof(element)))

// A layer's weights of the shape [out, in]. Memory has them in the order [blocks of 32 out][blocks
// of 32 in][parts of LINE columns][lines][columns][PAIR elements]. Zeros pad `out` to a whole
// block. The bias, if any, and the scales of the columns of int8 weights are padded too.
struct linear {
  const void *tiles;
  const element *bias;
  const float *scales;
  int64_t in, out;
};

// The input [rows, in] of a product. If `tiled`, it consists of tiles of `tile_rows` rows by 32
// elements, and the tiles of the same rows are adjacent. Tiles are read faster than contiguous
// rows, because their lines fall into different sets of the cache. If not `tiled`, each row is
// contiguous. The vector code multiplies at most `tile_rows` rows at once in both cases. The output
// of a SWIGLU product has tiles of the same shape. `room` has space for the rows in int8; only INT8
// needs it.
struct gemm_input {
  const element *data;
  int64_t tile_rows;
  int tiled;
  element *room;
};

// What to prefetch during a block. `cold`: the block's own weights are not in the cache yet.
// `next`: distance in blocks to the next block to fetch, or 0 for none.
struct prefetch_plan {
  int cold;
  int64_t next;
};

// Returns the start of a row of tiled data; its parts of TILE_DEPTH elements are a tile apart.
INLINE element *tiled_row(element *data, int64_t row, int64_t in, int64_t tile_rows) {
  return data + row / tile_rows * tile_rows * in + row % tile_rows * TILE_DEPTH;
}

#if INT8
#include "gemm_int8.h"
#elif BFLOAT16 && defined(__AMX_BF16__)
#include "gemm_amx.h"
#elif BFLOAT16 && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include "gemm_bfmmla.h"
#elif BFLOAT16 && LANES == 8
#include "gemm_avx2.h"
#else
#include "gemm_vector.h"
#endif
#if BFLOAT16 && defined(__AMX_BF16__)
// Prepares for outrider_attend_amx.
INLINE void configure_attention(void) { configure_tiles(ROWS, 2 * TILE_DEPTH); }
#else
// Products with AMX need these; here they do nothing.
typedef char saved_state;
INLINE saved_state save_state(void) { return 0; }
INLINE void restore_state(const saved_state *saved) { (void)saved; }
INLINE void configure_rows(int rows) { (void)rows; }
INLINE void configure_attention(void) {}
#endif
#ifndef ROW_ELEMENTS
// The number of elements from the start of a row of a product's input to the start of the next row.
#define ROW_ELEMENTS(in) (in)
#endif
