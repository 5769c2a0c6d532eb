// Sums by vectors, in as many registers as the processor has; see sums.h.
#pragma once

// Rows whose sums are held in registers at once, and parts of a block's columns that are summed one after the other.
#if LANES == 16
#define HELD 8
#define PARTS 1
#elif LANES == 8 || defined(__aarch64__)
#define HELD 4
#define PARTS 2
#else
#define HELD 2
#define PARTS 2
#endif
#define VECTORS (BLOCK / PARTS / LANES)
// Columns of a line: all, so that weights are read strictly in order.
#define LINE BLOCK
// More rows than are held at once take longer to compute than a block's weights to come, half of the time without a look at memory.
// So all of them ask for the next block, bit by bit: on an EPYC (Zen 4) 16 rows then take 0.85 to 0.95 of the time.
#define ASKS(rows) ((rows) > HELD && (rows) <= ROWS)
// How far ahead weights are asked for otherwise, in bytes: two pages, where the processor's own prefetching stops at the end of each.
// On an EPYC (Zen 4) 8 rows took 0.57 of the time that they took with 1 KiB, or with none.
#define AHEAD 8192

// What tiles need, and vectors do not.
typedef char kept_state;
INLINE kept_state keep_state(void) { return 0; }
INLINE void restore_state(const kept_state *kept) { (void)kept; }
INLINE void expect_rows(int rows) { (void)rows; }

// Rows of a tile of inputs of so many rows: as many as are held at once, the same number each time that weights are read, since a
// single row waits for them as long as six (by 8, 8 and 1, 17 rows took a tenth more time). Only of 8 and 8 there is one tile: that
// took a tenth less time than two.
INLINE int64_t choose_tile_rows(int64_t rows) {
  int64_t turns = (rows + HELD - 1) / HELD, held = rows < 1 || rows > ROWS ? HELD : (rows + turns - 1) / turns;
  return held == HELD ? TILE_ROWS : held;
}

// Adds to sums what `PAIR` elements of one row make of a line of weights.
INLINE vec add_products(vec sum, vec weights, const element *x) {
#if BFLOAT16
  uint32_t pair;
  memcpy(&pair, x, sizeof pair);
  return add_dots(sum, weights, pair);
#else
  return sum + *x * weights;
#endif
}

// Sums of `n` rows that lie `apart`, whose parts of TILE_DEPTH elements lie `step` apart; all in elements. With every line of weights
// `bytes` are asked for, from `ahead` on.
INLINE void sum_rows(const element *x, int64_t apart, int64_t step, int64_t in, const char *weights, int part,
                     float (*sums)[BLOCK], int n, const char *ahead, int64_t bytes) {
  vec total[HELD][VECTORS];
  for (int i = 0; i < n; i++)
    for (int v = 0; v < VECTORS; v++) total[i][v] = splat(0);
  for (int64_t k = 0; k < in / TILE_DEPTH; k++, x += step, weights += DEPTH_BYTES)
    for (int line = 0; line < LINES; line++, ahead += bytes) {
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
      for (int v = 0; v < VECTORS; v++) {
        vec some = load_float((const float *)weights + line * BLOCK + part * VECTORS * LANES + v * LANES);
        for (int i = 0; i < n; i++) total[i][v] = add_products(total[i][v], some, x + i * apart + line * PAIR);
      }
    }
  for (int i = 0; i < n; i++)
    for (int v = 0; v < VECTORS; v++) memcpy(sums[i] + part * VECTORS * LANES + v * LANES, &total[i][v], sizeof total[i][v]);
}

// Sums of one block of columns for up to ROWS rows.
INLINE void sum_block(struct input input, int rows, const struct linear *linear, int64_t block, float sums[ROWS][BLOCK],
                      struct reading reading) {
  const int64_t in = linear->in, apart = input.tiled ? TILE_DEPTH : in, step = input.tiled ? input.tile_rows * TILE_DEPTH : TILE_DEPTH;
  const int64_t size = in / TILE_DEPTH * DEPTH_BYTES;
  const char *weights = (const char *)linear->tiles + block * size;
  const int held = input.tile_rows < HELD ? (int)input.tile_rows : HELD;
  for (int row = 0; row < rows; row += held) {
    const int some = rows - row < held ? rows - row : held;
    const char *ahead = weights + AHEAD;
    int64_t bytes = 0;
    if (reading.cold && row == 0) {
      // A single row is read as fast without.
      bytes = rows > 1 ? BLOCK * 4 : 0;
    } else if (reading.next) {
      ahead = weights + reading.next * size + size * row / rows;
      bytes = BLOCK * 4 * some / rows;
    }
    const element *x = input.tiled ? tiled_row((element *)input.data, row, in, input.tile_rows) : input.data + row * in;
    for (int part = 0; part < PARTS; part++) {
#define SUM(n) sum_rows(x, apart, step, in, weights, part, sums + row, n, ahead, part ? 0 : bytes)
      switch (some) {
        case 1: SUM(1); break;
#if HELD > 2
        case 2: SUM(2); break;
        case 3: SUM(3); break;
#endif
#if HELD > 4
        case 4: SUM(4); break;
        case 5: SUM(5); break;
        case 6: SUM(6); break;
        case 7: SUM(7); break;
#endif
        default: SUM(HELD);
      }
#undef SUM
    }
  }
}
