// Attention over a paged cache on a CPU, for verification and decoding: few tokens a sequence.
//
// Keys and values are read in place, once for all query heads that share them, and the softmax is
// updated on the way (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et al., arXiv
// 2205.14135). A block has as many keys as a vector has lanes. Its keys are transposed, so that
// each lane sums the score of one key and no sum goes across lanes.
//
// Plain C with GCC's vectors, called through ctypes; ../attention.py declares the same structures.
// It shares OpenMP's runtime, and so its threads, with torch.

#include "cpu_kernels.h"

#include <omp.h>

#define MOST_HEAD_SIZE 256

INLINE float largest_lane(vec x) {
#pragma GCC unroll 4
  for (int apart = LANES / 2; apart > 0; apart /= 2)
    x = largest(x, __builtin_shuffle(x, lanes ^ apart));
  return x[0];
}

// Up to QUERY_ROWS queries, those of a key/value head together, and the state of their softmax. If
// `by_dots`, keys and queries are pairs of bfloat16 of adjacent dimensions, and values and weights
// are pairs of adjacent keys. Otherwise they are floats, and the queries are already multiplied by
// `scale`.
struct work {
  int by_dots;
  float scale;
  vec keys[MOST_HEAD_SIZE], values[LANES][MOST_HEAD_SIZE / LANES];
  uint32_t query_pairs[QUERY_ROWS][MOST_HEAD_SIZE / 2], weight_pairs[QUERY_ROWS][LANES / 2];
  vec sums[QUERY_ROWS][MOST_HEAD_SIZE / LANES], weights[QUERY_ROWS], total[QUERY_ROWS];
  float queries[QUERY_ROWS][MOST_HEAD_SIZE], max_score[QUERY_ROWS];
  // The slots that a query sees; within the tree, only the slots of its ancestors.
  int64_t first[QUERY_ROWS], last[QUERY_ROWS], tree_start;
  uint64_t ancestors[QUERY_ROWS];
};

// Computes the scores of `n` rows against the block. Each score has the same partial sums whatever
// `n` is, so a row's result does not depend on the other rows.
INLINE void score(struct work *work, int row, int n, int head_size) {
  const int parts = 2;
  vec sums[8 * 2] = {0};
  for (int d = 0; d < head_size / (work->by_dots ? 2 : 1); d += parts)
    for (int part = 0; part < parts; part++)
      for (int i = 0; i < n; i++) {
        vec *sum = &sums[i * parts + part], keys = work->keys[d + part];
        if (HAS_DOTS && work->by_dots)
          *sum = add_dots(*sum, keys, work->query_pairs[row + i][d + part]);
        else
          *sum += work->queries[row + i][d + part] * keys;
      }
  for (int i = 0; i < n; i++) {
    for (int part = 1; part < parts; part++) sums[i * parts] += sums[i * parts + part];
    vec scores = sums[i * parts];
    work->weights[row + i] = HAS_DOTS && work->by_dots ? scores * work->scale : scores;
  }
}

// Returns which lanes of a block are ancestors or text. The block's first key is `offset` slots
// behind the tree's first token, or up to LANES - 1 before it.
INLINE ivec find_ancestors(uint64_t ancestors, int64_t offset) {
  uint64_t text = offset < 0 ? (1 << -offset) - 1 : 0;
  uint32_t bits = (uint32_t)(offset < 0 ? ancestors << -offset | text : ancestors >> offset);
  return (((int32_t)bits & (1 << lanes)) != 0);
}

// Turns a row's scores into weights exp(score - max_score), and rescales its earlier sums if the
// maximum has risen. The row sees only slots in `ancestors`.
INLINE void update_softmax(struct work *work, int row, ivec slots, ivec ancestors, int head_size) {
  ivec seen = (slots >= (int32_t)work->first[row]) & (slots <= (int32_t)work->last[row]);
  seen &= ancestors;
  vec scores = (vec)(((ivec)work->weights[row] & seen) | ((ivec)splat(-INFINITY) & ~seen));
  float highest = largest_lane(scores);
  if (highest > work->max_score[row]) {
    float scale = expf(work->max_score[row] - highest);
    work->max_score[row] = highest;
    work->total[row] *= scale;
    for (int c = 0; c < head_size / LANES; c++) work->sums[row][c] *= scale;
  }
  // Until the row has seen a key, max_score is -inf, and the difference would be a NaN.
  vec weights = work->max_score[row] > -INFINITY ? exponential(scores - work->max_score[row])
                                                 : splat(0);
  work->weights[row] = (vec)((ivec)weights & seen);
  work->total[row] += work->weights[row];
  if (HAS_DOTS && work->by_dots) store(work->weights[row], work->weight_pairs[row], 0, 1);
}

// Adds the block's weighted values to the sums of `n` rows.
INLINE void add_values(struct work *work, int row, int n, int count, int head_size) {
  for (int c = 0; c < head_size / LANES; c++) {
    vec sums[8];
    for (int i = 0; i < n; i++) sums[i] = work->sums[row + i][c];
    if (HAS_DOTS && work->by_dots) {
      for (int j = 0; j < (count + 1) / 2; j++)
        for (int i = 0; i < n; i++)
          sums[i] = add_dots(sums[i], work->values[j][c], work->weight_pairs[row + i][j]);
    } else {
      for (int j = 0; j < count; j++)
        for (int i = 0; i < n; i++) sums[i] += work->weights[row + i][j] * work->values[j][c];
    }
    for (int i = 0; i < n; i++) work->sums[row + i][c] = sums[i];
  }
}

// Calls something for up to eight rows at a time; `n` is a constant in each call, so the compiler
// can unroll the loops.
#define BY_ROWS(rows, call)                     \
  for (int row = 0; row < (rows); row += 8) {   \
    switch ((rows) - row) {                     \
      case 1: { const int n = 1; call; } break; \
      case 2: { const int n = 2; call; } break; \
      case 3: { const int n = 3; call; } break; \
      case 4: { const int n = 4; call; } break; \
      case 5: { const int n = 5; call; } break; \
      case 6: { const int n = 6; call; } break; \
      case 7: { const int n = 7; call; } break; \
      default: { const int n = 8; call; }       \
    }                                           \
  }

#if HAS_DOTS
// Loads the block's values and interleaves those of adjacent keys; zeros follow the last key.
INLINE void pair_values(struct work *work, const uint16_t *values, int64_t stride, int count,
                        int head_size) {
  static const uint16_t order[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i first = _mm512_loadu_si512(order);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int j = 0; j < count; j += 2, values += 2 * stride)
    for (int d = 0; d < head_size; d += 2 * LANES) {
      __m512i a = _mm512_loadu_si512(values + d), b = _mm512_setzero_si512();
      if (j + 1 < count) b = _mm512_loadu_si512(values + stride + d);
      work->values[j / 2][d / LANES] = (vec)_mm512_permutex2var_epi16(a, first, b);
      work->values[j / 2][d / LANES + 1] = (vec)_mm512_permutex2var_epi16(a, second, b);
    }
}
#endif

// Keys and values to prefetch: rows of `bytes` bytes, `stride` bytes apart, at addresses that the
// processor cannot predict. Prefetching all at once would wait for them. One prefetch beside each
// load of the present block lets them arrive during its computation.
struct prefetch {
  const char *keys, *values;
  int64_t column, bytes, stride;
};

INLINE void prefetch_some(struct prefetch *prefetch, int64_t bytes) {
  __builtin_prefetch(prefetch->keys + prefetch->column, 0, 2);
  __builtin_prefetch(prefetch->values + prefetch->column, 0, 2);
  prefetch->column += bytes;
  if (prefetch->column < prefetch->bytes) return;
  prefetch->column = 0;
  prefetch->keys += prefetch->stride;
  prefetch->values += prefetch->stride;
}

// Loads LANES keys, with zeros for those after `count`, and transposes them. If `paired`, an
// element is a pair of bfloat16. Each load prefetches as many bytes.
INLINE void load_keys(const struct layer *layer, int64_t at, int64_t stride, int count, int paired,
                      struct prefetch *prefetch, int is_bfloat16, vec block[LANES]) {
  int bytes = (paired ? 2 * LANES : LANES) * (is_bfloat16 ? 2 : 4);
  for (int j = 0; j < LANES; j++, at += stride) {
    prefetch_some(prefetch, bytes);
    if (j >= count)
      block[j] = splat(0);
    else if (paired)
      memcpy(&block[j], (const uint16_t *)layer->keys + at, sizeof block[j]);
    else
      block[j] = load(layer->keys, at, is_bfloat16);
  }
  transpose(block);
}

// Loads the block's keys, transposed, and its values.
INLINE void load_block(struct work *work, const struct layer *layer, int64_t slot, int64_t kv_head,
                       int count, struct prefetch *prefetch, int is_bfloat16) {
  int head_size = (int)layer->head_size;
  int64_t stride = layer->kv_heads * layer->head_size;
  int64_t at = slot * stride + kv_head * layer->head_size;
  // Two bfloat16 numbers are transposed as one element if the head's size allows it.
  int paired = is_bfloat16 && head_size % (2 * LANES) == 0, step = paired ? 2 * LANES : LANES;
  for (int d = 0; d < head_size; d += step) {
    vec block[LANES];
    load_keys(layer, at + d, stride, count, paired, prefetch, is_bfloat16, block);
    for (int i = 0; i < LANES; i++) {
      if (work->by_dots) {
        work->keys[d / 2 + i] = block[i];
      } else if (paired) {
        work->keys[d + 2 * i] = (vec)((uvec)block[i] << 16);
        work->keys[d + 2 * i + 1] = (vec)((uvec)block[i] & 0xffff0000);
      } else {
        work->keys[d + i] = block[i];
      }
    }
  }
#if HAS_DOTS
  if (work->by_dots) {
    pair_values(work, (const uint16_t *)layer->values + at, stride, count, head_size);
    return;
  }
#endif
  for (int j = 0; j < count; j++)
    for (int c = 0; c < head_size / LANES; c++)
      work->values[j][c] = load(layer->values, at + j * stride + c * LANES, is_bfloat16);
}

// Attends for the rows of `heads` key/value heads from `kv_head` on, `rows` rows a head.
INLINE void attend_rows(const struct layer *layer, const int64_t *pages, struct work *work,
                        int rows, int64_t kv_head, int64_t heads, int64_t first_key,
                        int64_t last_key, int is_bfloat16) {
  int head_size = (int)layer->head_size;
  const int64_t page_size = layer->page_size, width = is_bfloat16 ? 2 : 4;
  const int64_t bytes = heads * head_size * width, stride = layer->kv_heads * head_size * width;
  for (int64_t key = first_key, count; key <= last_key; key += count) {
    int64_t within = key % page_size;
    count = page_size - within;
    if (count > LANES) count = LANES;
    if (count > last_key - key + 1) count = last_key - key + 1;
    // During the last block, prefetch that block again: nothing follows it.
    int64_t next = key + count <= last_key ? key + count : key;
    int64_t slot = pages[key / page_size] * page_size + within;
    int64_t next_slot = pages[next / page_size] * page_size + next % page_size;
    int64_t at = next_slot * stride + kv_head * head_size * width;
    const char *keys = (const char *)layer->keys, *values = (const char *)layer->values;
    struct prefetch prefetch = {keys + at, values + at, 0, bytes, stride};
    // Lanes after the block get a slot that no row sees.
    ivec slots = lanes + (int32_t)key;
    slots |= (lanes >= (int32_t)count) & INT32_MAX;
    int64_t offset = key - work->tree_start;
    for (int head = 0; head < heads; head++) {
      int first = head * rows;
      load_block(work, layer, slot, kv_head + head, (int)count, &prefetch, is_bfloat16);
      BY_ROWS(rows, score(work, first + row, n, head_size))
      if (offset <= -LANES) {
        const ivec all = ~(ivec){0};
        for (int row = first; row < first + rows; row++)
          update_softmax(work, row, slots, all, head_size);
      } else {
        for (int row = first; row < first + rows; row++) {
          ivec ancestors = find_ancestors(work->ancestors[row], offset);
          update_softmax(work, row, slots, ancestors, head_size);
        }
      }
      BY_ROWS(rows, add_values(work, first + row, n, (int)count, head_size))
    }
  }
}

// The token and query head of one row: row r is query head r % group of token r / group, where
// `group` query heads share a key/value head. `work` has `rows` rows of each key/value head.
struct query_row {
  int64_t token, head;
};

INLINE struct query_row find_row(struct attention_item item, int64_t group, int64_t first_row,
                                 int rows, int64_t i) {
  int64_t row = first_row + i % rows;
  return (struct query_row){row / group, (item.kv_head + i / rows) * group + row % group};
}

// Loads one query and resets its softmax.
INLINE void load_query(struct work *work, int64_t i, const struct rows *query, int64_t at,
                       int64_t size, int is_bfloat16) {
  for (int64_t d = 0; d < size; d += LANES) {
    vec part = load(query->data, at + d, is_bfloat16) * work->scale;
    memcpy(&work->queries[i][d], &part, sizeof part);
    if (work->by_dots)
      memcpy(&work->query_pairs[i][d / 2], (const uint16_t *)query->data + at + d,
             LANES * sizeof(uint16_t));
    work->sums[i][d / LANES] = splat(0);
  }
  work->total[i] = splat(0);
  work->max_score[i] = -INFINITY;
}

// Finds what a query of a slice's token sees: the last `window` positions if `window` is above 0.
INLINE void find_view(struct work *work, int64_t i, const struct batch *batch, int64_t slice,
                      int64_t token, int64_t window) {
  int64_t slot = batch->starts[slice] + token;
  work->last[i] = slot;
  work->first[i] = window > 0 && slot >= window ? slot - window + 1 : 0;
  work->ancestors[i] = 0;
  if (slot < work->tree_start) return;
  uint64_t ancestors = batch->ancestors[batch->first_rows[slice] + token];
  work->ancestors[i] = ancestors;
  if (window <= 0) return;
  int64_t depth = __builtin_popcountll(ancestors), text = window - depth;
  for (; depth > window; depth--) ancestors &= ancestors - 1;  // drops the farthest ancestor
  work->ancestors[i] = ancestors;
  work->first[i] = work->tree_start > text ? work->tree_start - text : 0;
  if (text <= 0) work->first[i] = work->tree_start + __builtin_ctzll(ancestors);
}

// Attends for up to QUERY_ROWS rows of an item: `rows` rows of each of its key/value heads, from
// `first_row` on.
INLINE void attend_row_block(const struct layer *layer, const struct batch *batch,
                             const struct rows *query, void *out, float scale, int64_t window,
                             struct attention_item item, int64_t first_row, int rows,
                             int is_bfloat16) {
  // Not initialized as a whole: most of it is room for the largest heads.
  struct work work;
  work.by_dots = HAS_DOTS && is_bfloat16 && layer->head_size % (2 * LANES) == 0;
  work.scale = scale;
  int64_t group = layer->heads / layer->kv_heads, size = layer->head_size;
  int64_t first_token = batch->first_rows[item.slice];
  work.tree_start = find_tree_start(batch, item.slice);
  int64_t first_key = INT32_MAX, last_key = 0, all = item.kv_heads * rows;
  for (int64_t i = 0; i < all; i++) {
    struct query_row row = find_row(item, group, first_row, rows, i);
    int64_t at = row.head * query->head_stride + (first_token + row.token) * query->token_stride;
    load_query(&work, i, query, at, size, is_bfloat16);
    find_view(&work, i, batch, item.slice, row.token, window);
    if (work.first[i] < first_key) first_key = work.first[i];
    if (work.last[i] > last_key) last_key = work.last[i];
  }
  const int64_t *pages = batch->pages + batch->page_offsets[item.slice];
  attend_rows(layer, pages, &work, rows, item.kv_head, item.kv_heads, first_key, last_key,
              is_bfloat16);
  for (int64_t i = 0; i < all; i++) {
    struct query_row row = find_row(item, group, first_row, rows, i);
    int64_t at = ((first_token + row.token) * layer->heads + row.head) * size;
    float total = 0;
    for (int j = 0; j < LANES; j++) total += work.total[i][j];
    for (int64_t c = 0; c < size / LANES; c++)
      store(work.sums[i][c] / total, out, at + c * LANES, is_bfloat16);
  }
}

void outrider_attend(const struct layer *layer, const struct batch *batch,
                     const struct rows *query, void *out, float scale, int64_t window,
                     struct attention_item item) {
  int64_t rows = batch->lengths[item.slice] * (layer->heads / layer->kv_heads);
  for (int64_t row = item.part * QUERY_ROWS; row < rows; row += item.parts * QUERY_ROWS) {
    int some = (int)(rows - row < QUERY_ROWS ? rows - row : QUERY_ROWS);
    if (layer->is_bfloat16)
      attend_row_block(layer, batch, query, out, scale, window, item, row, some, 1);
    else
      attend_row_block(layer, batch, query, out, scale, window, item, row, some, 0);
  }
}

// Copies a batch's keys or values to the cache.
static void store_in_cache(const struct layer *layer, const struct batch *batch,
                           const struct rows *from, void *cache) {
  int64_t width = layer->is_bfloat16 ? 2 : 4, bytes = layer->head_size * width;
  const char *data = (const char *)from->data;
  for (int64_t i = 0; i < batch->token_count; i++)
    for (int64_t head = 0; head < layer->kv_heads; head++) {
      char *to = (char *)cache + (batch->slot_mapping[i] * layer->kv_heads + head) * bytes;
      int64_t at = head * from->head_stride + i * from->token_stride;
      memcpy(to, data + at * width, (size_t)bytes);
    }
}

// Stores the batch's keys and values in the cache, then attends. `out` is [tokens, heads,
// head_size]; only the slices' rows are written. A query sees the keys up to its own position, or
// the last `window` positions if `window` is above 0; of a tree only its ancestors.
void outrider_paged_attention(const struct layer *layer, const struct batch *batch,
                              struct rows query, struct rows key, struct rows value, void *out,
                              float scale, int64_t window) {
  store_in_cache(layer, batch, &key, layer->keys);
  store_in_cache(layer, batch, &value, layer->values);
  struct attention_split split = split_attention(layer, batch, omp_get_max_threads());
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < split.count; i++)
    outrider_attend(layer, batch, &query, out, scale, window, get_item(layer, i, split));
}
