// The matrix product of one block of columns in integers; see gemm_block.h. Weights are int8
// with a scale for each column. Rows are quantised to int8 with a scale for each group of
// TILE_DEPTH elements, because one scale for a whole row would lose the small elements beside a
// few large ones.
//
// Weights are stored with 128 added, because most processors' products multiply unsigned by signed
// numbers. A group begins its sums with `offset`, which takes the 128 out again. The sums of a
// group are exact, and groups are added in the same order for any number of rows.
#pragma once

// The number of rows whose sums fit the registers, if a block's columns are divided into
// COLUMN_PARTS parts, which are multiplied one after the other.
#if PAIR == 8
#define ACC_ROWS 6
#elif LANES == 16
#define ACC_ROWS 8
#define COLUMN_PARTS 1
#elif LANES == 8 || defined(__aarch64__)
#define ACC_ROWS 4
#define COLUMN_PARTS 2
#else
#define ACC_ROWS 4
#define COLUMN_PARTS 4
#endif
#define LINE BLOCK
#define PREFETCHES_NEXT(rows) 0
// As in gemm_vector.h.
#define PREFETCH_DISTANCE 8192

// Weights are stored with 128 added. EXCESS is the part of the 128 that the weights still have in a
// product: 0 with sdot, which multiplies signed weights, so that the 128 is subtracted first.
#if PAIR == 4 && defined(__aarch64__)
#define EXCESS 0
#else
#define EXCESS 128
#endif

#if PAIR >= 4
typedef int8_t number;
typedef uint8_t weight_vec __attribute__((vector_size(4 * LANES)));
#else
typedef int16_t number;
typedef int16_t weight_vec __attribute__((vector_size(4 * LANES)));
#endif
typedef number number_vec __attribute__((vector_size(sizeof(number) * LANES)));
typedef uint8_t byte_vec __attribute__((vector_size(2 * LANES)));

// TILE_DEPTH quantised elements of a row. A row's groups are contiguous.
struct group {
  float scale;
  int32_t offset;
  number numbers[TILE_DEPTH];
};
#define ROW_ELEMENTS(in) ((in) / TILE_DEPTH * (int64_t)(sizeof(struct group) / sizeof(element)))

// Returns the tile_rows of an input with `rows` rows: the rows of one pass over the weights, about
// the same number in each pass.
INLINE int64_t choose_tile_rows(int64_t rows) {
  int64_t passes = (rows + ACC_ROWS - 1) / ACC_ROWS;
  int64_t pass_rows = rows < 1 || rows > ROWS ? ACC_ROWS : (rows + passes - 1) / passes;
  return pass_rows == ACC_ROWS ? TILE_ROWS : pass_rows;
}

// Quantises TILE_DEPTH elements. An infinite element or a NaN makes the group's scale NaN, and this
// makes all products of the row NaN.
INLINE void quantize_group(const element *from, struct group *to) {
  vec parts[TILE_DEPTH / LANES], most = splat(0), nothing = splat(0);
  for (int i = 0; i < TILE_DEPTH / LANES; i++) {
    parts[i] = load(from, i * LANES, BFLOAT16);
    most = largest(largest(parts[i], -parts[i]), most);
    nothing += parts[i] * 0;  // NaN for NaN and infinity
  }
  float top = 0, zero = 0;
  for (int i = 0; i < LANES; i++) {
    top = most[i] > top ? most[i] : top;
    zero += nothing[i];
  }
  // Groups with a smaller maximum count as zero: 127 divided by the maximum could be infinite.
  const int is_zero = top < 1e-30f;
  const float factor = is_zero ? 0 : 127 / top;
  const vec magic = splat(12582912.0f);  // adding this rounds to an integer
  ivec sums = {0};
  for (int i = 0; i < TILE_DEPTH / LANES; i++) {
    vec steps = parts[i] * factor;
    steps = (vec)((ivec)steps & (steps == steps));  // 0 for NaN, which is no integer
    ivec whole = __builtin_convertvector((steps + magic) - magic, ivec);
    sums += whole;
    number_vec numbers = __builtin_convertvector(whole, number_vec);
    memcpy(to->numbers + i * LANES, &numbers, sizeof numbers);
  }
  int32_t sum = 0;
  for (int i = 0; i < LANES; i++) sum += sums[i];
  to->scale = (is_zero ? 0 : top / 127) + zero;
  to->offset = -EXCESS * sum;
}

// Quantises all rows of an input into its `room`, and waits until all threads have done so.
INLINE struct gemm_input quantize(struct thread_pool *pool, struct gemm_input input, int64_t rows,
                                  int64_t in) {
#pragma omp for nowait
  for (int64_t i = 0; i < rows; i++) {
    const element *x = input.tiled ? tiled_row((element *)input.data, i, in, input.tile_rows)
                                   : input.data + i * in;
    struct group *to = (struct group *)(input.room + i * ROW_ELEMENTS(in));
    for (int64_t k = 0; k < in / TILE_DEPTH; k++)
      quantize_group(x + k * TILE_DEPTH * (input.tiled ? input.tile_rows : 1), to + k);
  }
  barrier_wait(pool);
  input.data = input.room;
  return input;
}

#if PAIR == 8
#include "gemm_usmmla.h"
#else
// Adds to each lane the products of its PAIR weights with the same PAIR numbers of a row.
INLINE ivec add_products(ivec sum, weight_vec weights, const number *x) {
  int32_t some;
  memcpy(&some, x, sizeof some);
  ivec same = some - (ivec){0};
#if PAIR == 4 && defined(__aarch64__)
  return (ivec)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, (int8x16_t)same);
#elif PAIR == 4
  return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)same);
#else
#if LANES == 16
  sum += (ivec)_mm512_madd_epi16((__m512i)weights, (__m512i)same);
  __asm__("" : "+v"(sum));
#elif LANES == 8
  sum += (ivec)_mm256_madd_epi16((__m256i)weights, (__m256i)same);
  // Without this statement, the compiler would keep the products of several lines of weights and
  // add them up later. There are too few registers for that: forwards of one thread took up to 1.5
  // times as long.
  __asm__("" : "+x"(sum));
#elif defined(__SSE2__)
  sum += (ivec)_mm_madd_epi16((__m128i)weights, (__m128i)same);
  __asm__("" : "+x"(sum));
#else
  // Multiplies both halves of a lane, with their signs. Weights are not negative.
  ivec pairs = (ivec)weights;
  sum += (pairs & 0xffff) * (same << 16 >> 16) + (pairs >> 16) * (same >> 16);
#endif
  return sum;
#endif
}

INLINE weight_vec load_weights(const uint8_t *from) {
#if PAIR == 4
  weight_vec weights;
  memcpy(&weights, from, sizeof weights);
  return EXCESS ? weights : weights ^ 128;
#elif LANES == 16
  return (weight_vec)_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8
  return (weight_vec)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
#else
  byte_vec bytes;
  memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, weight_vec);
#endif
}

// Multiplies `n` rows by a block of columns. If `cold`, reading a line of weights prefetches the
// line PREFETCH_DISTANCE bytes after it. Each group's weights are read in parts of their columns,
// as in gemm_vector.h.
INLINE void gemm_rows(const struct group *x, int64_t groups, const uint8_t *weights,
                      float (*acc)[BLOCK], int n, int cold) {
  const int parts = n * COLUMN_PARTS <= ACC_ROWS ? 1 : COLUMN_PARTS;
  const int vectors = BLOCK / LANES / parts;
  vec total[ACC_ROWS][BLOCK / LANES];
  for (int i = 0; i < n; i++)
    for (int v = 0; v < BLOCK / LANES; v++) total[i][v] = splat(0);
  for (int64_t k = 0; k < groups; k++, x++, weights += DEPTH_BYTES)
    for (int part = 0; part < parts; part++) {
      ivec sums[ACC_ROWS][BLOCK / LANES];
      for (int i = 0; i < n; i++)
        for (int v = 0; v < vectors; v++) sums[i][v] = x[i * groups].offset - (ivec){0};
      for (int line = 0; line < LINES; line++) {
        const uint8_t *columns = weights + (line * BLOCK + part * vectors * LANES) * PAIR;
        for (int at = 0; at < BLOCK * PAIR && cold && part == 0; at += 64)
          __builtin_prefetch(columns + PREFETCH_DISTANCE + at, 0, 2);
        for (int v = 0; v < vectors; v++) {
          weight_vec some = load_weights(columns + v * LANES * PAIR);
          for (int i = 0; i < n; i++)
            sums[i][v] = add_products(sums[i][v], some, x[i * groups].numbers + line * PAIR);
        }
      }
      for (int i = 0; i < n; i++)
        for (int v = 0; v < vectors; v++)
          total[i][part * vectors + v] +=
              __builtin_convertvector(sums[i][v], vec) * x[i * groups].scale;
    }
  for (int i = 0; i < n; i++) memcpy(acc[i], total[i], sizeof total[i]);
}
#endif

#if defined(__AMX_INT8__)
#include "gemm_int8_amx.h"
#endif

// Multiplies up to ROWS quantised rows by one block of columns: acc = x · weights, without the
// scales of the columns.
INLINE void gemm_block(struct gemm_input input, int rows, const struct linear *linear,
                       int64_t block, float acc[ROWS][BLOCK], struct prefetch_plan prefetch) {
  const int64_t groups = linear->in / TILE_DEPTH;
  const uint8_t *weights = (const uint8_t *)linear->tiles + block * groups * DEPTH_BYTES;
#if defined(__AMX_INT8__)
  if (rows >= LEAST_TILED_ROWS) {
    multiply_tiles((const struct group *)input.data, groups, weights, acc, rows, prefetch.cold);
    return;
  }
#endif
  const int pass_rows = input.tile_rows < ACC_ROWS ? (int)input.tile_rows : ACC_ROWS;
  for (int row = 0; row < rows; row += pass_rows) {
    const struct group *x = (const struct group *)input.data + row * groups;
    const int cold = prefetch.cold && row == 0;
#define GEMM(n) gemm_rows(x, groups, weights, acc + row, n, cold)
    switch (rows - row < pass_rows ? rows - row : pass_rows) {
      case 1: GEMM(1); break;
      case 2: GEMM(2); break;
      case 3: GEMM(3); break;
#if ACC_ROWS > 4
      case 4: GEMM(4); break;
      case 5: GEMM(5); break;
#endif
#if ACC_ROWS > 6
      case 6: GEMM(6); break;
      case 7: GEMM(7); break;
#endif
      default: GEMM(ACC_ROWS);
    }
#undef GEMM
  }
}
