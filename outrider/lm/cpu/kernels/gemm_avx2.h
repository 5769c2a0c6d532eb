// The matrix product of one block of bfloat16 columns, for processors with 16 registers of 8 floats
// each; see gemm_block.h. For float32, whose weights take longer to arrive, gemm_vector.h is
// faster.
//
// All rows are multiplied by a few tiles of weights before the next tiles are taken. So the
// processor computes while the weights of later tiles arrive, whatever the number of rows, and
// weights are read from memory once, in order. Each sum of a row adds the same products in the same
// order, whatever the other rows are and however many tiles are taken at once.
#pragma once

// Rows of one pass over some tiles. Five rows by two vectors of columns have ten sums. Two
// multiplications begin in each cycle and end four cycles later, so eight sums are needed to keep
// the processor busy; with twelve the compiler ran out of registers.
#define PASS_ROWS 5
#define VECTORS (BLOCK / LANES)
// Columns of a line of weights: the whole block.
#define LINE BLOCK
// The size in bytes of the tiles that a pass takes at once for more than FEW_ROWS rows. More than
// FEW_ROWS rows take longer to compute than the tiles take to arrive: with one tile at a time, nine
// rows took a twentieth more time than with four tiles at a time. Up to FEW_ROWS rows take one tile
// at a time: with four tiles at a time, three rows took a quarter more time than with one tile.
#define PASS_BYTES 8192
#define FEW_ROWS 3
// Distance in bytes at which weights are prefetched, in the next block if need be.
#define PREFETCH_DISTANCE 8192
#define PREFETCHES_NEXT(rows) ((rows) <= ROWS)

// Returns the tile_rows of an input of `rows` rows.
INLINE int64_t choose_tile_rows(int64_t rows) { return rows < 1 || rows > ROWS ? ROWS : rows; }

// Returns as floats one element of each pair of a line: the first, or the second if `second`.
INLINE vec half_of_pairs(vec pairs, int second) {
  return second ? (vec)((uvec)pairs & 0xffff0000) : (vec)((uvec)pairs << 16);
}

// Returns PAIR elements of a row in all lanes.
INLINE vec load_pair(const element *x) {
  uint32_t pair;
  memcpy(&pair, x, sizeof pair);
  uvec pairs = pair - (uvec){0};
  // Without this line, the compiler would split the pair in ordinary registers; see add_dots.
  __asm__("" : IN_VECTOR(pairs));
  return (vec)pairs;
}

// Rows of an input and some tiles of weights. Rows are `row_stride` elements apart, and their parts
// of TILE_DEPTH elements are `step` elements apart. For each line of weights, `ahead_bytes` are
// prefetched from `ahead` on.
struct pass {
  const element *x;
  int64_t row_stride, step, tiles, ahead_bytes;
  const char *weights, *ahead;
};

// Adds the products of `n` rows with `vectors` vectors of the tiles' columns to `acc`.
INLINE void multiply(struct pass pass, float (*acc)[BLOCK], int n, int vectors) {
  const element *x = pass.x;
  const char *weights = pass.weights, *ahead = pass.ahead;
  vec sums[PASS_ROWS][VECTORS];
  for (int i = 0; i < n; i++)
    for (int v = 0; v < vectors; v++) sums[i][v] = load_float(acc[i] + v * LANES);
  for (int64_t tile = 0; tile < pass.tiles; tile++, x += pass.step - TILE_DEPTH)
    for (int line = 0; line < LINES; line++, weights += BLOCK * 4, x += PAIR) {
      for (int64_t i = 0; i < pass.ahead_bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
      ahead += pass.ahead_bytes;
      for (int second = 0; second < PAIR; second++) {
        // If the registers do not hold both halves of all pairs beside the sums, the empty
        // instruction makes the compiler load the pairs again. Without it the compiler would store
        // sums on the stack.
        if ((n + PAIR) * vectors > 12) __asm__("" : "+r"(weights), "+r"(x));
        vec some[VECTORS];
        for (int v = 0; v < vectors; v++)
          some[v] = half_of_pairs(load_float((const float *)weights + v * LANES), second);
        for (int i = 0; i < n; i++) {
          vec same = half_of_pairs(load_pair(x + i * pass.row_stride), second);
          for (int v = 0; v < vectors; v++) sums[i][v] += same * some[v];
        }
      }
    }
  for (int i = 0; i < n; i++)
    for (int v = 0; v < vectors; v++) memcpy(acc[i] + v * LANES, &sums[i][v], sizeof(vec));
}

// Adds the products of `n` rows with the tiles to `acc`. One or two rows take all columns at once,
// more rows take one half of the columns, then the other half.
INLINE void multiply_rows(struct pass pass, float (*acc)[BLOCK], int n) {
  if (n <= 2) {
    multiply(pass, acc, n, VECTORS);
    return;
  }
  pass.ahead_bytes /= 2;
  multiply(pass, acc, n, VECTORS / 2);
  pass.weights += BLOCK * 4 / 2;
  pass.ahead += pass.tiles * LINES * pass.ahead_bytes;
  multiply(pass, (float(*)[BLOCK])(acc[0] + BLOCK / 2), n, VECTORS / 2);
}

// Returns how many of the `left` remaining rows the next pass takes. Usually it takes PASS_ROWS; it
// takes one row fewer if otherwise a last pass of one or three rows would follow, which has too few
// sums.
INLINE int choose_pass_rows(int left) {
  if (left == PASS_ROWS + 1 || left == PASS_ROWS + 3) return PASS_ROWS - 1;
  return left < PASS_ROWS ? left : PASS_ROWS;
}

// Multiplies up to ROWS rows by one block of columns: acc = x · weights.
INLINE void gemm_block(struct gemm_input input, int rows, const struct linear *linear,
                       int64_t block, float acc[ROWS][BLOCK], struct prefetch_plan prefetch) {
  const int64_t tiles = linear->in / TILE_DEPTH, size = tiles * DEPTH_BYTES;
  const int64_t most = rows <= FEW_ROWS ? 1 : PASS_BYTES / DEPTH_BYTES;
  const char *weights = (const char *)linear->tiles + block * size;
  struct pass pass = {
      .row_stride = input.tiled ? TILE_DEPTH : linear->in,
      .step = input.tiled ? input.tile_rows * TILE_DEPTH : TILE_DEPTH,
  };
  memset(acc, 0, (size_t)rows * sizeof acc[0]);
  for (int64_t tile = 0; tile < tiles; tile += most) {
    pass.tiles = tiles - tile < most ? tiles - tile : most;
    pass.weights = weights + tile * DEPTH_BYTES;
    const char *ahead = pass.weights + PREFETCH_DISTANCE;
    int64_t line_bytes = BLOCK * 4;
    if (ahead >= weights + size) {
      if (prefetch.next)
        ahead += (prefetch.next - 1) * size;
      else
        line_bytes = 0;
    }
    // Each pass prefetches its share, so that weights arrive all the time. When the first pass
    // prefetched them all, it waited for memory, and memory was idle during the other passes: on a
    // Xeon four to nine rows then took 1.24 to 1.34 times as long.
    for (int row = 0, n; row < rows; row += n) {
      pass.x = input.data + row * pass.row_stride + tile * pass.step;
      n = choose_pass_rows(rows - row);
      pass.ahead_bytes = line_bytes * n / rows;
      pass.ahead = ahead + pass.tiles * LINES * line_bytes * row / rows;
      switch (n) {
        case 1: multiply_rows(pass, acc + row, 1); break;
        case 2: multiply_rows(pass, acc + row, 2); break;
        case 3: multiply_rows(pass, acc + row, 3); break;
        case 4: multiply_rows(pass, acc + row, 4); break;
        default: multiply_rows(pass, acc + row, PASS_ROWS);
      }
    }
  }
}
