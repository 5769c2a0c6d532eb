// The matrix product of one block of columns by ARM's bfmmla; see gemm_block.h.
//
// bfmmla adds the products of 2 rows of 4 elements with 2 columns of 4 elements to 2 by 2 sums. It
// is used for any number of rows, so that a row's bits do not depend on the other rows. A single
// row is paired with itself, which takes no longer than bfdot would.
#pragma once

// The columns of a line of weights, and the number of vectors in the line: each has two columns.
#define LINE 16
#define LINE_VECTORS (LINE / 2)
// The largest number of pairs of rows whose sums for the columns of a line fit the registers.
#define MOST_PAIRS 3
// Each tile of weights is multiplied by all rows before the next tile is read. So the next block
// needs no prefetching.
#define PREFETCHES_NEXT(rows) 0
// Distance in bytes at which weights are prefetched: as in gemm_vector.h, not measured on ARM.
#define PREFETCH_DISTANCE 8192

// Returns the tile_rows of an input with `rows` rows.
INLINE int64_t choose_tile_rows(int64_t rows) {
  (void)rows;
  return TILE_ROWS;
}

// The sums of a pair of rows. Each vector has the sums of two columns for the first row, then those
// for the second row.
typedef float32x4_t sums_of_pair[BLOCK / LINE][LINE_VECTORS];

// Adds the products with one part of a tile of weights to the sums of `n` pairs of rows. x has the
// two rows of each pair. If `cold`, reading a line of weights prefetches the line PREFETCH_DISTANCE
// bytes after it.
INLINE void add_part(const uint16_t *const (*x)[2], const char *weights, sums_of_pair *acc,
                     int part, int n, int cold) {
  float32x4_t sums[MOST_PAIRS][LINE_VECTORS];
  for (int i = 0; i < n; i++)
    for (int v = 0; v < LINE_VECTORS; v++) sums[i][v] = acc[i][part][v];
  // With unrolled lines some sums did not fit the registers.
#pragma GCC unroll 1
  for (int line = 0; line < LINES; line++) {
    const char *from = weights + (part * LINES + line) * LINE * PAIR * (int)sizeof(element);
    for (int at = 0; at < LINE * PAIR * (int)sizeof(element) && cold; at += 64)
      __builtin_prefetch(from + PREFETCH_DISTANCE + at, 0, 2);
    bfloat16x8_t rows[MOST_PAIRS];
    for (int i = 0; i < n; i++)
      rows[i] = (bfloat16x8_t)vcombine_u16(vld1_u16(x[i][0] + line * PAIR),
                                           vld1_u16(x[i][1] + line * PAIR));
    for (int v = 0; v < LINE_VECTORS; v++) {
      // Without this statement, the compiler would load more weights early than fit the registers
      // beside the sums.
      if (n > 1 && v % 2 == 0) __asm__ volatile("" ::: "memory");
      bfloat16x8_t columns = (bfloat16x8_t)vld1q_u16((const uint16_t *)from + v * 2 * PAIR);
      for (int i = 0; i < n; i++) sums[i][v] = vbfmmlaq_f32(sums[i][v], rows[i], columns);
    }
  }
  for (int i = 0; i < n; i++)
    for (int v = 0; v < LINE_VECTORS; v++) acc[i][part][v] = sums[i][v];
}

// Adds the products with one tile of weights to the sums of `n` pairs of rows.
INLINE void add_tile(const uint16_t *const (*x)[2], const char *weights, sums_of_pair *acc, int n,
                     int cold) {
  for (int part = 0; part < BLOCK / LINE; part++) add_part(x, weights, acc, part, n, cold);
}

// Multiplies up to two rows by one block of columns. The sums stay in registers.
INLINE void multiply_pair(const uint16_t *first, const uint16_t *second, int64_t step, int64_t in,
                          const char *weights, sums_of_pair *acc, int cold) {
  sums_of_pair sums;
  memset(sums, 0, sizeof sums);
  for (int64_t k = 0; k < in / TILE_DEPTH; k++, weights += DEPTH_BYTES) {
    const uint16_t *const x[1][2] = {{first + k * step, second + k * step}};
    add_tile(x, weights, &sums, 1, cold);
  }
  memcpy(acc, sums, sizeof sums);
}

// Multiplies up to ROWS rows by one block of columns: acc = x · weights.
INLINE void gemm_block(struct gemm_input input, int rows, const struct linear *linear,
                       int64_t block, float acc[ROWS][BLOCK], struct prefetch_plan prefetch) {
  const int64_t in = linear->in, step = input.tiled ? TILE_ROWS * TILE_DEPTH : TILE_DEPTH;
  const char *weights = (const char *)linear->tiles + block * in / TILE_DEPTH * DEPTH_BYTES;
  const int pairs = (rows + 1) / 2;
  const uint16_t *x[ROWS / 2][2];
  sums_of_pair sums[ROWS / 2];
  for (int row = 0; row < 2 * pairs; row++) {
    // If the number of rows is odd, the last row is paired with itself.
    int64_t from = row < rows ? row : rows - 1;
    x[row / 2][row % 2] = input.tiled
                              ? tiled_row((element *)input.data, from, in, input.tile_rows)
                              : input.data + from * in;
  }
  if (pairs == 1) {
    if (prefetch.cold)
      multiply_pair(x[0][0], x[0][1], step, in, weights, sums, 1);
    else
      multiply_pair(x[0][0], x[0][1], step, in, weights, sums, 0);
  } else {
    memset(sums, 0, (size_t)pairs * sizeof sums[0]);
    // Each turn multiplies about the same number of pairs.
    const int times = (pairs + MOST_PAIRS - 1) / MOST_PAIRS;
    for (int64_t k = 0; k < in / TILE_DEPTH; k++, weights += DEPTH_BYTES) {
      for (int i = 0, pair = 0, some; i < times; i++, pair += some) {
        const uint16_t *const(*at)[2] = (const uint16_t *const(*)[2])x + pair;
        some = (pairs - pair + times - i - 1) / (times - i);
        const int cold = prefetch.cold && i == 0;
        switch (2 * some + cold) {
          case 2: add_tile(at, weights, sums + pair, 1, 0); break;
          case 3: add_tile(at, weights, sums + pair, 1, 1); break;
          case 4: add_tile(at, weights, sums + pair, 2, 0); break;
          case 5: add_tile(at, weights, sums + pair, 2, 1); break;
          case 6: add_tile(at, weights, sums + pair, MOST_PAIRS, 0); break;
          default: add_tile(at, weights, sums + pair, MOST_PAIRS, 1);
        }
      }
      for (int i = 0; i < 2 * pairs; i++) x[i / 2][i % 2] += step;
    }
  }
  for (int i = 0; i < pairs; i++)
    for (int part = 0; part < BLOCK / LINE; part++)
      for (int v = 0; v < LINE_VECTORS; v += 2) {
        float64x2_t a = (float64x2_t)sums[i][part][v], b = (float64x2_t)sums[i][part][v + 1];
        vst1q_f32(acc[2 * i] + part * LINE + v * 2, (float32x4_t)vzip1q_f64(a, b));
        vst1q_f32(acc[2 * i + 1] + part * LINE + v * 2, (float32x4_t)vzip2q_f64(a, b));
      }
}
