// Attention over a paged cache on a CPU, for any number of tokens.
//
// Keys and values are read in place, once for all query heads that share them, and the softmax is
// updated on the way (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et al., arXiv
// 2205.14135). A block has at most as many keys as a vector has lanes. Its keys are transposed, so
// that each lane sums the score of one key and no sum goes across lanes.
//
// Plain C with GCC's vectors, called through ctypes; ../attention.py declares the same structures.
// The library shares OpenMP's runtime, and so its threads, with torch.

#include "cpu_kernels.h"

#include <omp.h>

// This number grows with each change of a structure that Python fills, of the weights' order or of
// an exported name. `LAYOUT` in ../library.py is the same number; Python loads no library with
// another number.
const int64_t outrider_layout = 2;

#define MOST_HEAD_SIZE 256

INLINE float largest_lane(vec x) {
#pragma GCC unroll 4
  for (int apart = LANES / 2; apart > 0; apart /= 2)
    x = largest(x, __builtin_shuffle(x, lanes ^ apart));
  return x[0];
}

// Up to QUERY_ROWS queries and the state of their softmax. The queries of a key/value head are
// adjacent. If `by_dots`, keys and queries are pairs of bfloat16 of adjacent dimensions, and values
// and weights are pairs of adjacent keys. If not `by_dots`, all four are floats, and the queries
// are already multiplied by `scale`.
struct work {
  int by_dots;
  float scale;
  vec keys[MOST_HEAD_SIZE], values[LANES][MOST_HEAD_SIZE / LANES];
  uint32_t query_pairs[QUERY_ROWS][MOST_HEAD_SIZE / 2], weight_pairs[QUERY_ROWS][LANES / 2];
  vec sums[QUERY_ROWS][MOST_HEAD_SIZE / LANES], weights[QUERY_ROWS], total[QUERY_ROWS];
  float queries[QUERY_ROWS][MOST_HEAD_SIZE], max_score[QUERY_ROWS];
  // A query sees the places from `first` to `last`. Before `tree_start` a place is a slot. From
  // there on, the places hold the query's ancestors in their order, whatever their slots. So the
  // keys of a tree's row are in the same blocks as if its path were a chain, and its result has the
  // same bits as in the chain.
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

// Turns a row's scores into weights exp(score - max_score), and rescales its earlier sums if the
// maximum has risen.
INLINE void update_softmax(struct work *work, int row, ivec places, int head_size) {
  ivec seen = (places >= (int32_t)work->first[row]) & (places <= (int32_t)work->last[row]);
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

// Runs `call` for up to eight rows at a time; `n` is a constant in each call, so the compiler can
// unroll the loops.
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
// Loads the block's values and interleaves the values of adjacent keys; zeros follow the last key.
INLINE void pair_values(struct work *work, const uint16_t *values, const int64_t at[LANES],
                        int count, int head_size) {
  for (int j = 0; j < count; j += 2)
    for (int d = 0; d < head_size; d += 2 * LANES) {
      vec a = load_float((const float *)(values + at[j] + d)), b = splat(0);
      if (j + 1 < count) b = load_float((const float *)(values + at[j + 1] + d));
      interleave(a, b, &work->values[j / 2][d / LANES]);
    }
}
#endif

// Keys and values to prefetch: rows of `bytes` bytes, `stride` bytes apart, at addresses that the
// processor cannot predict. If all of them were prefetched at once, the processor would have to
// wait for them. One prefetch beside each load of the present block lets them arrive while this
// block is computed.
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

// Loads LANES keys from dimension `d` on, with zeros in place of keys after the first `count`, and
// transposes them. If `paired`, an element is a pair of bfloat16. Each load also prefetches as many
// bytes of the next block.
INLINE void load_keys(const struct layer *layer, const int64_t at[LANES], int d, int count,
                      int paired, struct prefetch *prefetch, int is_bfloat16, vec block[LANES]) {
  int bytes = (paired ? 2 * LANES : LANES) * (is_bfloat16 ? 2 : 4);
  for (int j = 0; j < LANES; j++) {
    prefetch_some(prefetch, bytes);
    if (j >= count)
      block[j] = splat(0);
    else if (paired)
      memcpy(&block[j], (const uint16_t *)layer->keys + at[j] + d, sizeof block[j]);
    else
      block[j] = load(layer->keys, at[j] + d, is_bfloat16);
  }
  transpose(block);
}

// Loads the block's keys, transposed, and its values; key and value of lane j begin at `at[j]`.
INLINE void load_block(struct work *work, const struct layer *layer, const int64_t at[LANES],
                       int count, struct prefetch *prefetch, int is_bfloat16) {
  int head_size = (int)layer->head_size;
  // Two bfloat16 numbers are transposed as one element if the head's size allows it.
  int paired = is_bfloat16 && head_size % (2 * LANES) == 0, step = paired ? 2 * LANES : LANES;
  for (int d = 0; d < head_size; d += step) {
    vec block[LANES];
    load_keys(layer, at, d, count, paired, prefetch, is_bfloat16, block);
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
    pair_values(work, (const uint16_t *)layer->values, at, count, head_size);
    return;
  }
#endif
  for (int j = 0; j < count; j++)
    for (int c = 0; c < head_size / LANES; c++)
      work->values[j][c] = load(layer->values, at[j] + c * LANES, is_bfloat16);
}

// Returns the number of keys of the block that begins at a place. No block crosses a page's border
// or goes beyond `last`.
INLINE int block_keys(int64_t place, int64_t page_size, int64_t last) {
  int64_t count = page_size - place % page_size;
  if (count > LANES) count = LANES;
  return (int)(count > last - place + 1 ? last - place + 1 : count);
}

// Adds a block of `count` keys, which begin at `place`, to the sums of some rows of each head. Each
// head has `rows` rows, of which `some` rows from `begin` on are used. `slots` are the keys' slots
// in the cache.
INLINE void attend_block(const struct layer *layer, struct work *work, int rows, int begin,
                         int some, int64_t kv_head, int64_t heads, int64_t place, int count,
                         const int64_t slots[LANES], struct prefetch *prefetch, int is_bfloat16) {
  int head_size = (int)layer->head_size;
  // Lanes after the block get a place that no row sees.
  ivec places = lanes + (int32_t)place;
  places |= (lanes >= count) & INT32_MAX;
  for (int head = 0; head < heads; head++) {
    int first = head * rows + begin;
    int64_t at[LANES];
    for (int j = 0; j < count; j++)
      at[j] = (slots[j] * layer->kv_heads + kv_head + head) * head_size;
    load_block(work, layer, at, count, prefetch, is_bfloat16);
    BY_ROWS(some, score(work, first + row, n, head_size))
    for (int row = first; row < first + some; row++) update_softmax(work, row, places, head_size);
    BY_ROWS(some, add_values(work, first + row, n, count, head_size))
  }
}

// Computes the attention of `some` rows, from row `begin` on, to the keys from `place` on. The rows
// belong to one token of a slice with a tree. The block of keys at `place` is the first that
// reaches the tree.
INLINE void attend_path(const struct layer *layer, const int64_t *pages, struct work *work,
                        int rows, int begin, int some, int64_t kv_head, int64_t heads,
                        int64_t place, int is_bfloat16) {
  const int64_t page_size = layer->page_size, last = work->last[begin];
  uint64_t left = work->ancestors[begin];
  for (int64_t before = place - work->tree_start; before > 0; before--) left &= left - 1;
  for (int count; place <= last; place += count) {
    count = block_keys(place, page_size, last);
    int64_t slots[LANES];
    for (int j = 0; j < count; j++) {
      int64_t slot = place + j;
      if (slot >= work->tree_start) {
        slot = work->tree_start + __builtin_ctzll(left);
        left &= left - 1;
      }
      slots[j] = pages[slot / page_size] * page_size + slot % page_size;
    }
    if (place + count <= work->first[begin]) continue;
    struct prefetch none = {layer->keys, layer->values, 0, 1, 0};
    attend_block(layer, work, rows, begin, some, kv_head, heads, place, count, slots, &none,
                 is_bfloat16);
  }
}

// Attends for the rows of `heads` key/value heads from `kv_head` on. Each head has `rows` rows, and
// the first is row `first_row` of its slice. Blocks that reach a tree are read anew for each token.
INLINE void attend_rows(const struct layer *layer, const int64_t *pages, struct work *work,
                        int rows, int64_t first_row, int64_t kv_head, int64_t heads, int64_t place,
                        int64_t last, int is_bfloat16) {
  int head_size = (int)layer->head_size;
  const int64_t page_size = layer->page_size, width = is_bfloat16 ? 2 : 4;
  const int64_t bytes = heads * head_size * width, stride = layer->kv_heads * head_size * width;
  // Blocks begin at fixed places, whatever the rows see.
  place -= place % page_size % LANES;
  for (int count; place <= last; place += count) {
    count = block_keys(place, page_size, last);
    if (place + count > work->tree_start) break;
    // During the last block, prefetch that block again: nothing follows it.
    int64_t next = place + count <= last ? place + count : place;
    int64_t slots[LANES];
    for (int j = 0; j < LANES; j++)
      slots[j] = pages[place / page_size] * page_size + place % page_size + j;
    int64_t next_slot = pages[next / page_size] * page_size + next % page_size;
    int64_t at = next_slot * stride + kv_head * head_size * width;
    const char *keys = (const char *)layer->keys, *values = (const char *)layer->values;
    struct prefetch prefetch = {keys + at, values + at, 0, bytes, stride};
    attend_block(layer, work, rows, 0, rows, kv_head, heads, place, count, slots, &prefetch,
                 is_bfloat16);
  }
  if (place > last) return;
  int64_t group = layer->heads / layer->kv_heads;
  for (int begin = 0, some; begin < rows; begin += some) {
    some = (int)(group - (first_row + begin) % group);
    if (some > rows - begin) some = rows - begin;
    attend_path(layer, pages, work, rows, begin, some, kv_head, heads, place, is_bfloat16);
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

// Loads one query and resets its softmax, whose first score is the sink.
INLINE void load_query(struct work *work, int64_t i, const struct rows *query, int64_t at,
                       int64_t size, float sink, int is_bfloat16) {
  for (int64_t d = 0; d < size; d += LANES) {
    vec part = load(query->data, at + d, is_bfloat16) * work->scale;
    memcpy(&work->queries[i][d], &part, sizeof part);
    if (work->by_dots)
      memcpy(&work->query_pairs[i][d / 2], (const uint16_t *)query->data + at + d,
             LANES * sizeof(uint16_t));
    work->sums[i][d / LANES] = splat(0);
  }
  work->total[i] = splat(0);
  work->total[i][0] = sink > -INFINITY;
  work->max_score[i] = sink;
}

// Finds the places that a query of a slice's token sees, up to its own place: all if `window` is 0,
// the last `window` places if it is above 0. If it is below 0, the text is cut into chunks of
// -`window` places, and the query sees its own chunk.
INLINE void find_view(struct work *work, int64_t i, const struct batch *batch, int64_t slice,
                      int64_t token, int64_t window) {
  int64_t place = batch->starts[slice] + token;
  work->ancestors[i] = 0;
  if (place >= work->tree_start) {
    work->ancestors[i] = batch->ancestors[batch->first_rows[slice] + token];
    place = work->tree_start + __builtin_popcountll(work->ancestors[i]) - 1;
  }
  work->last[i] = place;
  work->first[i] = window > 0 && place >= window ? place - window + 1 : 0;
  if (window < 0) work->first[i] = place - place % -window;
}

// Attends for up to QUERY_ROWS rows of an item: `rows` rows of each of its key/value heads, from
// `first_row` on.
INLINE void attend_row_block(const struct layer *layer, const struct batch *batch,
                             const struct rows *query, void *out, float scale, int64_t window,
                             const float *sinks, struct attention_item item, int64_t first_row,
                             int rows, int is_bfloat16) {
  // The struct is not initialized as a whole: most of it is room for the largest heads.
  struct work work;
  work.by_dots = HAS_DOTS && is_bfloat16 && layer->head_size % (2 * LANES) == 0;
  work.scale = scale;
  int64_t group = layer->heads / layer->kv_heads, size = layer->head_size;
  int64_t first_token = batch->first_rows[item.slice];
  work.tree_start = find_tree_start(batch, item.slice);
  int64_t first_place = INT32_MAX, last_place = 0, all = item.kv_heads * rows;
  for (int64_t i = 0; i < all; i++) {
    struct query_row row = find_row(item, group, first_row, rows, i);
    int64_t at = row.head * query->head_stride + (first_token + row.token) * query->token_stride;
    load_query(&work, i, query, at, size, sinks ? sinks[row.head] : -INFINITY, is_bfloat16);
    find_view(&work, i, batch, item.slice, row.token, window);
    if (work.first[i] < first_place) first_place = work.first[i];
    if (work.last[i] > last_place) last_place = work.last[i];
  }
  const int64_t *pages = batch->pages + batch->page_offsets[item.slice];
  attend_rows(layer, pages, &work, rows, first_row, item.kv_head, item.kv_heads, first_place,
              last_place, is_bfloat16);
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
                     const float *sinks, struct attention_item item) {
  int64_t rows = batch->lengths[item.slice] * (layer->heads / layer->kv_heads);
  for (int64_t row = item.part * QUERY_ROWS; row < rows; row += item.parts * QUERY_ROWS) {
    int some = (int)(rows - row < QUERY_ROWS ? rows - row : QUERY_ROWS);
    if (layer->is_bfloat16)
      attend_row_block(layer, batch, query, out, scale, window, sinks, item, row, some, 1);
    else
      attend_row_block(layer, batch, query, out, scale, window, sinks, item, row, some, 0);
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
// head_size]; only the slices' rows are written. A query sees the keys up to its own position,
// within `window` (see find_view); of a tree it sees only its ancestors. `sinks` has one more score
// for each query head, and the weight of this score goes to no key; null without sinks.
void outrider_paged_attention(const struct layer *layer, const struct batch *batch,
                              struct rows query, struct rows key, struct rows value, void *out,
                              float scale, int64_t window, const float *sinks) {
  store_in_cache(layer, batch, &key, layer->keys);
  store_in_cache(layer, batch, &value, layer->values);
  struct attention_split split = split_attention(layer, batch, omp_get_max_threads());
#pragma omp parallel for schedule(dynamic, 1)
  for (int64_t i = 0; i < split.count; i++)
    outrider_attend(layer, batch, &query, out, scale, window, sinks, get_item(layer, i, split));
}
