// The matrix product of one block of columns by vectors; see gemm_block.h.
#pragma once

// The number of rows whose sums fit the registers, if a block's columns are divided into
// COLUMN_PARTS parts, which are multiplied one after the other.
#if LANES == 16
#define ACC_ROWS 8
#define COLUMN_PARTS 1
#elif LANES == 8 || defined(__aarch64__)
#define ACC_ROWS 4
#define COLUMN_PARTS 2
#else
#define ACC_ROWS 2
#define COLUMN_PARTS 2
#endif
#define VECTORS (BLOCK / COLUMN_PARTS / LANES)
// Columns of a line of weights: the whole block, so that weights are read strictly in order.
#define LINE BLOCK
// More than ACC_ROWS rows take longer to compute than a block's weights take to arrive, and memory
// would be idle for half of the time. So all rows together prefetch the next block, bit by bit. On
// an EPYC (Zen 4) 16 rows then take 0.85 to 0.95 of the time that they take without this
// prefetching.
#define PREFETCHES_NEXT(rows) ((rows) > ACC_ROWS && (rows) <= ROWS)
// With AVX-512 a single row needs no prefetching: on an EPYC (Zen 5), forwards of one thread took
// 1.08 to 1.11 times as long with prefetching as without it.
#define PREFETCHES_OWN(rows) ((rows) > 1 || LANES < 16)
// Distance in bytes at which a block prefetches its own weights. The distance is two pages, because
// the processor's own prefetching stops at the end of each page. With this distance, 8 rows on an
// EPYC (Zen 4) took 0.57 of the time that they took with 1 KiB, or without prefetching.
#define PREFETCH_DISTANCE 8192

// Returns the tile_rows of an input with `rows` rows: the rows of one pass over the weights, about
// the same number in each pass. A pass of one row waits for the weights as long as a pass of six
// rows, so 17 rows took a tenth more time in passes of 8, 8 and 1 than in passes of 6, 6 and 5.
// Full passes share tiles of TILE_ROWS rows: passes of 8 rows took a tenth less time with these
// tiles than with tiles of 8 rows.
INLINE int64_t choose_tile_rows(int64_t rows) {
  int64_t passes = (rows + ACC_ROWS - 1) / ACC_ROWS;
  int64_t pass_rows = rows < 1 || rows > ROWS ? ACC_ROWS : (rows + passes - 1) / passes;
  return pass_rows == ACC_ROWS ? TILE_ROWS : pass_rows;
}

// Adds the products of PAIR elements of one row with a line of weights.
INLINE vec add_products(vec acc, vec weights, const element *x) {
#if BFLOAT16
  uint32_t pair;
  memcpy(&pair, x, sizeof pair);
  return add_dots(acc, weights, pair);
#else
  return acc + *x * weights;
#endif
}

// Multiplies `n` rows by a block of columns. Rows are `row_stride` elements apart, and their parts
// of TILE_DEPTH elements are `step` elements apart. For each line of weights, the next `bytes` from
// `ahead` on are prefetched.
//
// If the sums of all columns do not fit the registers, each tile of weights is read in parts of its
// columns. From the second part on, the tile is in the L1 cache, so memory is read strictly in
// order. When each part was read over the whole block before the next part, one row took 1.76 times
// as long on an EPYC (Zen 3).
INLINE void gemm_rows(const element *x, int64_t row_stride, int64_t step, int64_t in,
                      const char *weights, float (*acc)[BLOCK], int n, const char *ahead,
                      int64_t bytes) {
  const int parts = n * BLOCK / LANES <= ACC_ROWS * VECTORS ? 1 : COLUMN_PARTS;
  const int vectors = BLOCK / LANES / parts;
  vec total[ACC_ROWS][BLOCK / LANES];
  for (int i = 0; i < n; i++)
    for (int v = 0; v < parts * vectors; v++) total[i][v] = splat(0);
  for (int64_t k = 0; k < in / TILE_DEPTH; k++, x += step, weights += DEPTH_BYTES)
    for (int part = 0; part < parts; part++) {
      vec sums[ACC_ROWS][BLOCK / LANES];
      for (int i = 0; i < n; i++)
        for (int v = 0; v < vectors; v++) sums[i][v] = total[i][part * vectors + v];
      for (int line = 0; line < LINES; line++) {
        if (part == 0) {
          for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
          ahead += bytes;
        }
        const float *columns = (const float *)weights + line * BLOCK + part * vectors * LANES;
        for (int i = 0; i < n; i++)
          for (int v = 0; v < vectors; v++)
            sums[i][v] = add_products(sums[i][v], load_float(columns + v * LANES),
                                      x + i * row_stride + line * PAIR);
      }
      for (int i = 0; i < n; i++)
        for (int v = 0; v < vectors; v++) total[i][part * vectors + v] = sums[i][v];
    }
  for (int i = 0; i < n; i++) memcpy(acc[i], total[i], sizeof total[i]);
}

// Multiplies up to ROWS rows by one block of columns: acc = x · weights.
INLINE void gemm_block(struct gemm_input input, int rows, const struct linear *linear,
                       int64_t block, float acc[ROWS][BLOCK], struct prefetch_plan prefetch) {
  const int64_t in = linear->in, row_stride = input.tiled ? TILE_DEPTH : in;
  const int64_t step = input.tiled ? input.tile_rows * TILE_DEPTH : TILE_DEPTH;
  const int64_t size = in / TILE_DEPTH * DEPTH_BYTES;
  const char *weights = (const char *)linear->tiles + block * size;
  const int pass_rows = input.tile_rows < ACC_ROWS ? (int)input.tile_rows : ACC_ROWS;
  for (int row = 0; row < rows; row += pass_rows) {
    const int some = rows - row < pass_rows ? rows - row : pass_rows;
    const char *ahead = weights + PREFETCH_DISTANCE;
    int64_t bytes = 0;
    if (prefetch.cold && row == 0) {
      bytes = PREFETCHES_OWN(rows) ? BLOCK * 4 : 0;
    } else if (prefetch.next) {
      ahead = weights + prefetch.next * size + size * row / rows;
      bytes = BLOCK * 4 * some / rows;
    }
    const element *x = input.tiled ? tiled_row((element *)input.data, row, in, input.tile_rows)
                                   : input.data + row * in;
#define GEMM(n) gemm_rows(x, row_stride, step, in, weights, acc + row, n, ahead, bytes)
    switch (some) {
      case 1: GEMM(1); break;
#if ACC_ROWS > 2
      case 2: GEMM(2); break;
      case 3: GEMM(3); break;
#endif
#if ACC_ROWS > 4
      case 4: GEMM(4); break;
      case 5: GEMM(5); break;
      case 6: GEMM(6); break;
      case 7: GEMM(7); break;
#endif
      default: GEMM(ACC_ROWS);
    }
#undef GEMM
  }
}
