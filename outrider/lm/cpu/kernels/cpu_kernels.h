// Shared by all kernels: vectors of floats, bfloat16 conversion, and the structures that Python
// fills. ../attention.py and ../decoder.py declare the same structures.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// The number of rows of an AMX tile register, and the number of bfloat16 elements in such a row.
// Tiled inputs of products keep TILE_DEPTH elements of a row together.
#define TILE_ROWS 16
#define TILE_DEPTH 32

#define INLINE static inline __attribute__((always_inline))

// The number of floats (lanes) in a vector, and the numbers of the lanes. Each kind of processor
// has its own build, so these are constants.
#if defined(__AVX512F__)
#define LANES 16
#define NUMBERED {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
#elif defined(__AVX2__)
#define LANES 8
#define NUMBERED {0, 1, 2, 3, 4, 5, 6, 7}
#else
#define LANES 4
#define NUMBERED {0, 1, 2, 3}
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));

static const ivec lanes = NUMBERED;

// The constraint of an assembler operand that is read and written in a vector register.
#if defined(__x86_64__)
#define IN_VECTOR(value) "+x"(value)
#else
#define IN_VECTOR(value) "+w"(value)
#endif

// The cached keys and values of one layer, each [pages, page_size, kv_heads, head_size]: bfloat16
// if `is_bfloat16`, else float. `heads` is the number of query heads.
struct layer {
  void *keys, *values;
  int64_t heads, kv_heads, head_size, page_size, is_bfloat16;
};

// One batch of `token_count` tokens; token i goes to slot `slot_mapping[i]` of the flattened cache.
// Attention computes `slice_count` slices. Slice s has `lengths[s]` tokens from row `first_rows[s]`
// on, the first in slot `starts[s]` of its sequence; its page numbers begin at
// `pages[page_offsets[s]]`.
//
// A slice may end with a tree, in the slots from `tree_starts[s]` on; without a tree,
// `tree_starts[s]` is the slot after the slice. Of these slots, token i sees slot tree_starts[s] +
// j only if bit j of `ancestors[i]` is set. A token is one of its own ancestors, so its position is
// tree_starts[s] - 1 plus its number of ancestors. Words of tokens outside trees are 0. In a batch
// without trees, both arrays are null.
struct batch {
  int64_t token_count, slice_count;
  const int64_t *slot_mapping, *first_rows, *lengths, *starts, *page_offsets, *pages, *tree_starts;
  const uint64_t *ancestors;
};

// Returns the slot of a slice's first tree token; without a tree, a number above the slice's slots.
INLINE int64_t find_tree_start(const struct batch *batch, int64_t slice) {
  return batch->tree_starts ? batch->tree_starts[slice] : INT64_MAX;
}

// A tensor [heads, tokens, head_size] with a contiguous last dimension; strides are in elements.
struct rows {
  const void *data;
  int64_t head_stride, token_stride;
};

INLINE vec load_float(const float *from) {
  vec out;
  memcpy(&out, from, sizeof out);
  return out;
}

INLINE vec load(const void *from, int64_t at, int is_bfloat16) {
  if (!is_bfloat16) return load_float((const float *)from + at);
  hvec half;
  memcpy(&half, (const uint16_t *)from + at, sizeof half);
  return (vec)(__builtin_convertvector(half, uvec) << 16);
}

INLINE void store(vec value, void *to, int64_t at, int is_bfloat16) {
  if (!is_bfloat16) {
    memcpy((float *)to + at, &value, sizeof value);
    return;
  }
  // Rounds to nearest, ties to even; a NaN stays a NaN.
#if defined(__AVX512BF16__)
  __m256bh half = _mm512_cvtneps_pbh((__m512)value);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  bfloat16x4_t half = vcvt_bf16_f32((float32x4_t)value);
#else
  uvec bits = (uvec)value, nan = (uvec)(value != value);
  uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  hvec half = __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), hvec);
#endif
  memcpy((uint16_t *)to + at, &half, sizeof half);
}

INLINE vec splat(float value) { return value - (vec){0}; }

INLINE vec largest(vec a, vec b) {
#if defined(__AVX512F__)
  // The compiler does not recognise the code below as this instruction.
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
  ivec first = a > b;
  return (vec)(((ivec)a & first) | ((ivec)b & ~first));
#endif
}

// add_dots adds the products of LANES pairs of bfloat16 with one pair to `sum`. HAS_DOTS is 1 if
// the processor does this in one instruction. interleave makes pairs of the elements of a and b,
// the first LANES pairs in out[0].
#if defined(__AVX512BF16__)
#define HAS_DOTS 1
INLINE vec add_dots(vec sum, vec pairs, uint32_t pair) {
  __m512bh same = (__m512bh)_mm512_set1_epi32((int32_t)pair);
  return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, same);
}

INLINE void interleave(vec a, vec b, vec out[2]) {
  static const uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_loadu_si512(order);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  out[0] = (vec)_mm512_permutex2var_epi16((__m512i)a, first, (__m512i)b);
  out[1] = (vec)_mm512_permutex2var_epi16((__m512i)a, second, (__m512i)b);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_DOTS 1
// The instruction adds the two products of a pair, and then adds the result to `sum`. It rounds
// both sums to odd, and takes subnormal numbers for zero.
INLINE vec add_dots(vec sum, vec pairs, uint32_t pair) {
  bfloat16x8_t same = (bfloat16x8_t)vdupq_n_u32(pair);
  return (vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)pairs, same);
}

INLINE void interleave(vec a, vec b, vec out[2]) {
  out[0] = (vec)vzip1q_u16((uint16x8_t)a, (uint16x8_t)b);
  out[1] = (vec)vzip2q_u16((uint16x8_t)a, (uint16x8_t)b);
}
#else
#define HAS_DOTS 0
INLINE vec add_dots(vec sum, vec pairs, uint32_t pair) {
  uvec both = pair - (uvec){0};
  // Without this line, the compiler would split the pair in ordinary registers and move both halves
  // to vectors. That took a third more time than splitting the pair in vectors.
  __asm__("" : IN_VECTOR(both));
  sum += (vec)(both << 16) * (vec)((uvec)pairs << 16);
  return sum + (vec)(both & 0xffff0000) * (vec)((uvec)pairs & 0xffff0000);
}
#endif

// Transposes a block of LANES rows by exchanges between rows that are 1, 2, 4, … apart.
INLINE void transpose(vec block[LANES]) {
#pragma GCC unroll 4
  for (int apart = 1; apart < LANES; apart *= 2) {
    ivec upper = (lanes & apart) != 0;
    ivec low = (lanes & ~upper) | ((lanes - apart + LANES) & upper);
    ivec high = ((lanes + apart) & ~upper) | ((lanes + LANES) & upper);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & apart) continue;
      vec a = block[i], b = block[i + apart];
      block[i] = __builtin_shuffle(a, b, low);
      block[i + apart] = __builtin_shuffle(a, b, high);
    }
  }
}

// Returns exp(x) for x <= 0, to about 2 units in the last place, by the polynomial of the Cephes
// library on [-log(2)/2, log(2)/2].
INLINE vec exponential(vec x) {
  x = largest(x, splat(-87.0f));
  const vec magic = splat(12582912.0f);  // adding this rounds to an integer
  vec n = (x * 1.44269504f + magic) - magic;
  x = x - n * 0.693359375f - n * -2.12194440e-4f;
  vec y = splat(1.9875691500e-4f);
  y = y * x + 1.3981999507e-3f;
  y = y * x + 8.3334519073e-3f;
  y = y * x + 4.1665795894e-2f;
  y = y * x + 1.6666665459e-1f;
  y = y * x + 5.0000001201e-1f;
  y = y * x * x + x + 1.0f;
  return y * (vec)((__builtin_convertvector(n, ivec) + 127) << 23);
}

// A part of the attention, which one thread computes in one go. It has one slice, `kv_heads`
// key/value heads from `kv_head` on, and every `parts`-th block of QUERY_ROWS rows from block
// `part` on.
struct attention_item {
  int64_t slice, kv_head, kv_heads, part, parts;
};
#define QUERY_ROWS 32

// How a batch is split into `count` items.
struct attention_split {
  int64_t kv_heads, parts, count;
};

// Splits a batch for `threads` threads. The key/value heads of a position are adjacent in the
// cache, so reading several heads together is faster than reading one after the other. An item
// therefore has several heads if they have few rows and all threads still have enough items. A long
// prompt's rows are divided among items.
INLINE struct attention_split split_attention(const struct layer *layer, const struct batch *batch,
                                              int64_t threads) {
  int64_t longest = 1;
  for (int64_t i = 0; i < batch->slice_count; i++)
    longest = batch->lengths[i] > longest ? batch->lengths[i] : longest;
  int64_t rows = longest * (layer->heads / layer->kv_heads);
  int64_t blocks = (rows + QUERY_ROWS - 1) / QUERY_ROWS;
  int64_t parts = blocks < 2 * threads ? blocks : 2 * threads;
  struct attention_split split = {layer->kv_heads, parts, 0};
  while (split.kv_heads > 1 &&
         (layer->kv_heads % split.kv_heads || split.kv_heads * rows > QUERY_ROWS ||
          batch->slice_count * (layer->kv_heads / split.kv_heads) < 4 * threads))
    split.kv_heads--;
  split.count = batch->slice_count * (layer->kv_heads / split.kv_heads) * split.parts;
  return split;
}

// Returns item `number` of a split.
INLINE struct attention_item get_item(const struct layer *layer, int64_t number,
                                      struct attention_split split) {
  int64_t groups = layer->kv_heads / split.kv_heads, group = number / split.parts;
  return (struct attention_item){group / groups, group % groups * split.kv_heads, split.kv_heads,
                                 number % split.parts, split.parts};
}

// Attends for one item; see paged_attention.c.
void outrider_attend(const struct layer *layer, const struct batch *batch,
                     const struct rows *query, void *out, float scale, int64_t window,
                     const float *sinks, struct attention_item item);
