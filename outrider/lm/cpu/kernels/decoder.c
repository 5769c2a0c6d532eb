// A whole forward of Llama, or of a model built like it, in one call.
//
// A forward of few tokens reads every weight once and computes little with it. The time of such a
// forward depends on how steadily weights arrive from memory, and on the time between two products.
// So weights lie in the order in which they are read, and nothing between the products leaves C.
// Sums are float. Results are rounded to bfloat16 where transformers rounds them, except inside
// attention and the rotary embedding. This file itself is compiled for bfloat16, by
// decoder_float32.c for float, where nothing is rounded, and by decoder_int8.c for bfloat16 with
// weights in int8.

#ifndef BFLOAT16
#define BFLOAT16 1
#endif
#ifndef INT8
#define INT8 0
#endif

#include "gemm.h"

#include <stdlib.h>

#if INT8
#define NAME(name) outrider_int8_##name
#elif BFLOAT16
#define NAME(name) outrider_bfloat16_##name
#else
#define NAME(name) outrider_float32_##name
#endif

struct decoder_layer {
  struct linear qkv, o, gate_up, down;
  const element *input_norm, *post_norm, *query_norm, *key_norm;  // the last two may be null
  struct layer cache;
};

struct decoder {
  const struct decoder_layer *layers;
  const element *embedding, *norm;
  struct linear head;
  const float *frequencies;  // of the rotary embedding, one for each of `pairs` pairs
  int64_t layer_count, hidden, intermediate, pairs;
  float epsilon, rope_scale, attention_scale;
};

// One forward of a `struct batch`: its tokens and positions, the rows that need logits, scratch
// memory, and the output. NAME(continue) runs several forwards. The output of each begins
// `logits_stride` floats after the previous output, and overwrites it if `logits_stride` is 0.
// `kept` [state_count, tokens, hidden] gets the hidden states in `states`: k for the input of layer
// k, layer_count for the output of the last layer, FINAL_STATE for the state after the final norm.
struct step {
  const int64_t *token_ids, *positions, *logits_indices;
  int64_t logits_count;
  void *scratch;
  float *logits;
  int64_t logits_stride;
  const int64_t *states;
  int64_t state_count;
  element *kept;
};

#define FINAL_STATE -1

const int64_t NAME(line) = LINE;
const int64_t NAME(pair) = PAIR;
#if INT8
// 1 if draft models are kept in int8 by default: only where int8 was measured to be faster.
#if defined(__AVX512VNNI__) && !defined(__AMX_BF16__)
const int64_t NAME(default) = 1;
#else
const int64_t NAME(default) = 0;
#endif
#endif

// Computes out [rows, out] = x [rows, in] · weights. Returns 1, or 0 if there is no memory for the
// rows of x in int8.
int64_t NAME(product)(const struct linear *linear, const element *x, int64_t rows, element *out) {
  struct thread_pool pool = {0};
  struct gemm_input input = {x, choose_tile_rows(rows), 0, NULL};
  if (INT8 && rows) {
    input.room = malloc((size_t)(rows * ROW_ELEMENTS(linear->in)) * sizeof(element));
    if (!input.room) return 0;
  }
#pragma omp parallel
  {
    saved_state saved = join_pool(&pool);
    gemm(&pool, input, rows, linear, out, STORE);
    restore_state(&saved);
  }
  free(input.room);
  return 1;
}

// Root mean square norm (Zhang and Sennrich, arXiv 1910.07467) of `size` elements, a multiple of
// 16. In `out`, successive parts of TILE_DEPTH elements begin `step` elements apart.
INLINE void normalize(const element *x, const element *weight, int64_t size, float epsilon,
                      element *out, int64_t step) {
  vec squares = splat(0);
  float sum = 0;
  for (int64_t i = 0; i < size; i += LANES) {
    vec part = load(x, i, BFLOAT16);
    squares += part * part;
  }
  for (int i = 0; i < LANES; i++) sum += squares[i];
  float scale = 1.0f / sqrtf(sum / (float)size + epsilon);
  for (int64_t i = 0; i < size; i += LANES) {
    vec scaled = rounded(load(x, i, BFLOAT16) * scale) * load(weight, i, BFLOAT16);
    store(scaled, out, i / TILE_DEPTH * step + i % TILE_DEPTH, BFLOAT16);
  }
}

// Normalizes a row of the residual stream into row `i` of a tiled input.
INLINE void normalize_tiled(const element *x, const element *weight, const struct decoder *decoder,
                            element *out, int64_t i, int64_t tile_rows) {
  element *row = tiled_row(out, i, decoder->hidden, tile_rows);
  normalize(x, weight, decoder->hidden, decoder->epsilon, row, tile_rows * TILE_DEPTH);
}

// Applies the rotary embedding (Su et al., arXiv 2104.09864) to one head: element i pairs with
// element i + pairs. `cos_sin` has all cosines, then all sines.
INLINE void rotate(element *head, const float *cos_sin, int64_t pairs) {
  for (int64_t i = 0; i < pairs; i += LANES) {
    vec a = load(head, i, BFLOAT16), b = load(head, i + pairs, BFLOAT16);
    vec cosine = load_float(cos_sin + i), sine = load_float(cos_sin + pairs + i);
    store(a * cosine - b * sine, head, i, BFLOAT16);
    store(b * cosine + a * sine, head, i + pairs, BFLOAT16);
  }
}

// Computes the cosines and sines of one position.
static void compute_cos_sin(const struct decoder *decoder, int64_t position, float *cos_sin) {
  for (int64_t i = 0; i < decoder->pairs; i += LANES)
    for (int part = 0; part < 2; part++) {
      vec some;
      for (int lane = 0; lane < LANES; lane++) {
        float angle = (float)position * decoder->frequencies[i + lane];
        some[lane] = (part ? sinf(angle) : cosf(angle)) * decoder->rope_scale;
      }
      some = rounded(some);
      memcpy(cos_sin + part * decoder->pairs + i, &some, sizeof some);
    }
}

// Normalizes and rotates one token's queries and keys in place; writes its keys and values to the
// cache.
static void store_token(const struct decoder *decoder, const struct decoder_layer *layer,
                        element *qkv, const float *cos_sin, int64_t slot) {
  const struct layer *cache = &layer->cache;
  int64_t size = cache->head_size;
  for (int64_t head = 0; head < cache->heads + cache->kv_heads; head++) {
    const element *weight = head < cache->heads ? layer->query_norm : layer->key_norm;
    element *data = qkv + head * size;
    if (weight) normalize(data, weight, size, decoder->epsilon, data, TILE_DEPTH);
    rotate(data, cos_sin, decoder->pairs);
  }
  int64_t width = cache->kv_heads * size, bytes = width * (int64_t)sizeof(element);
  memcpy((char *)cache->keys + slot * bytes, qkv + cache->heads * size, (size_t)bytes);
  memcpy((char *)cache->values + slot * bytes, qkv + cache->heads * size + width, (size_t)bytes);
}

// The parts of the scratch memory, all [tokens, …]. `normed` and `gated` are tiled. `room` has a
// product's input rows in int8. NAME(scratch) returns the total size of all parts.
struct buffers {
  element *residual, *normed, *qkv, *attended, *gated, *room;
  float *cos_sin;
};

static int64_t qkv_width(const struct layer *cache) {
  return (cache->heads + 2 * cache->kv_heads) * cache->head_size;
}

// Returns the number of elements of memory that a row of a product's widest input takes in int8; 0
// without INT8.
static int64_t room_width(const struct decoder *decoder) {
  int64_t attended = decoder->layers->cache.heads * decoder->layers->cache.head_size;
  int64_t widest = decoder->hidden > attended ? decoder->hidden : attended;
  if (decoder->intermediate > widest) widest = decoder->intermediate;
  return INT8 ? ROW_ELEMENTS(widest) : 0;
}

static int64_t whole_tiles(int64_t count) {
  return (count + ROWS - 1) / ROWS * ROWS;
}

static struct buffers divide_scratch(const struct decoder *decoder, const struct step *step,
                                     int64_t count) {
  const struct layer *cache = &decoder->layers->cache;
  count = whole_tiles(count);
  struct buffers buffers = {.cos_sin = step->scratch};
  buffers.residual = (element *)(buffers.cos_sin + count * 2 * decoder->pairs);
  buffers.normed = buffers.residual + count * decoder->hidden;
  buffers.qkv = buffers.normed + count * decoder->hidden;
  buffers.attended = buffers.qkv + count * qkv_width(cache);
  buffers.gated = buffers.attended + count * cache->heads * cache->head_size;
  buffers.room = buffers.gated + count * decoder->intermediate;
  return buffers;
}

// Returns the bytes of scratch memory for `count` tokens.
int64_t NAME(scratch)(const struct decoder *decoder, int64_t count) {
  const struct layer *cache = &decoder->layers->cache;
  int64_t elements = 2 * decoder->hidden + qkv_width(cache) + cache->heads * cache->head_size +
                     decoder->intermediate + room_width(decoder);
  return whole_tiles(count) * ((int64_t)sizeof(element) * elements + 4 * 2 * decoder->pairs);
}

INLINE void attend(const struct layer *cache, const struct batch *batch, const struct rows *query,
                   element *out, float scale, struct attention_item item) {
#if BFLOAT16 && defined(__AMX_BF16__)
  if (outrider_fits_amx(cache)) {
    for (int64_t end = item.kv_head + item.kv_heads; item.kv_head < end; item.kv_head++)
      outrider_attend_amx(cache, batch, query, out, scale, item);
    return;
  }
#endif
  outrider_attend(cache, batch, query, out, scale, 0, NULL, item);
}

static void run_attention(const struct decoder *decoder, const struct decoder_layer *layer,
                          const struct batch *batch, const struct buffers *buffers,
                          struct thread_pool *pool) {
  const struct layer *cache = &layer->cache;
  int64_t width = qkv_width(cache);
  struct attention_split split = split_attention(cache, batch, pool->size);
#pragma omp for nowait
  for (int64_t i = 0; i < batch->token_count; i++) {
    const float *cos_sin = buffers->cos_sin + i * 2 * decoder->pairs;
    store_token(decoder, layer, buffers->qkv + i * width, cos_sin, batch->slot_mapping[i]);
  }
  barrier_wait(pool);
  struct rows query = {buffers->qkv, cache->head_size, width};
  configure_attention();
  // The heads of a slice are adjacent in the cache. So one thread reads all of them, if there are
  // enough slices for all threads and no long prompt.
  int enough = batch->slice_count >= 4 * pool->size && batch->token_count < 8 * batch->slice_count;
  int64_t at_once = enough ? cache->kv_heads / split.kv_heads * split.parts : 1;
#pragma omp for schedule(dynamic, at_once) nowait
  for (int64_t i = 0; i < split.count; i++)
    attend(cache, batch, &query, buffers->attended, decoder->attention_scale,
           get_item(cache, i, split));
  barrier_wait(pool);
}

static void run_layer(const struct decoder *decoder, const struct decoder_layer *layer,
                      const struct batch *batch, const struct buffers *buffers,
                      struct thread_pool *pool) {
  int64_t count = batch->token_count, hidden = decoder->hidden;
  int64_t tile_rows = choose_tile_rows(count);
  const struct gemm_input normed = {buffers->normed, tile_rows, 1, buffers->room};
  const struct gemm_input attended = {buffers->attended, tile_rows, 0, buffers->room};
  const struct gemm_input gated = {buffers->gated, tile_rows, 1, buffers->room};
#pragma omp for nowait
  for (int64_t i = 0; i < count; i++)
    normalize_tiled(buffers->residual + i * hidden, layer->input_norm, decoder, buffers->normed, i,
                    tile_rows);
  barrier_wait(pool);
  gemm(pool, normed, count, &layer->qkv, buffers->qkv, STORE);
  run_attention(decoder, layer, batch, buffers, pool);
  gemm(pool, attended, count, &layer->o, buffers->residual, ADD);
#pragma omp for nowait
  for (int64_t i = 0; i < count; i++)
    normalize_tiled(buffers->residual + i * hidden, layer->post_norm, decoder, buffers->normed, i,
                    tile_rows);
  barrier_wait(pool);
  gemm(pool, normed, count, &layer->gate_up, buffers->gated, SWIGLU);
  gemm(pool, gated, count, &layer->down, buffers->residual, ADD);
}

// Writes state `state` of all tokens to its places in `kept`. `residual` must hold this state, or
// for FINAL_STATE the output of the last layer. No thread may change `residual` before the next
// barrier.
static void keep_state(const struct decoder *decoder, const struct step *step, int64_t state,
                       const element *residual, int64_t count) {
  int64_t hidden = decoder->hidden;
  for (int64_t place = 0; place < step->state_count; place++) {
    if (step->states[place] != state) continue;
    element *out = step->kept + place * count * hidden;
#pragma omp for nowait
    for (int64_t i = 0; i < count; i++) {
      const element *row = residual + i * hidden;
      if (state == FINAL_STATE)
        normalize(row, decoder->norm, hidden, decoder->epsilon, out + i * hidden, TILE_DEPTH);
      else
        memcpy(out + i * hidden, row, (size_t)hidden * sizeof(element));
    }
  }
}

// Computes logits [logits_count, vocabulary] of a batch whose slices hold all its tokens, and
// writes the tokens' keys and values to the caches.
void NAME(decode)(const struct decoder *decoder, const struct batch *batch,
                  const struct step *step) {
  int64_t hidden = decoder->hidden, head_tile_rows = choose_tile_rows(step->logits_count);
  struct buffers buffers = divide_scratch(decoder, step, batch->token_count);
  struct thread_pool pool = {0};
#pragma omp parallel
  {
    saved_state saved = join_pool(&pool);
#pragma omp for nowait
    for (int64_t i = 0; i < batch->token_count; i++) {
      const element *embedding = decoder->embedding + step->token_ids[i] * hidden;
      memcpy(buffers.residual + i * hidden, embedding, (size_t)hidden * sizeof(element));
      compute_cos_sin(decoder, step->positions[i], buffers.cos_sin + i * 2 * decoder->pairs);
    }
    barrier_wait(&pool);
    for (int64_t i = 0; i < decoder->layer_count; i++) {
      keep_state(decoder, step, i, buffers.residual, batch->token_count);
      run_layer(decoder, decoder->layers + i, batch, &buffers, &pool);
    }
    keep_state(decoder, step, decoder->layer_count, buffers.residual, batch->token_count);
    keep_state(decoder, step, FINAL_STATE, buffers.residual, batch->token_count);
#pragma omp for nowait
    for (int64_t i = 0; i < step->logits_count; i++)
      normalize_tiled(buffers.residual + step->logits_indices[i] * hidden, decoder->norm, decoder,
                      buffers.normed, i, head_tile_rows);
    barrier_wait(&pool);
    struct gemm_input normed = {buffers.normed, head_tile_rows, 1, buffers.room};
    gemm(&pool, normed, step->logits_count, &decoder->head, step->logits, LOGITS);
    restore_state(&saved);
  }
}

// Returns the index of the first largest value.
static int64_t argmax(const float *values, int64_t count) {
  int64_t vectors = count / LANES * LANES, at = 0;
  vec most = splat(-INFINITY);
  float top = -INFINITY;
  for (int64_t i = 0; i < vectors; i += LANES) most = largest(load_float(values + i), most);
  for (int i = 0; i < LANES; i++) top = most[i] > top ? most[i] : top;
  for (int64_t i = vectors; i < count; i++) top = values[i] > top ? values[i] : top;
  while (at < count - 1 && values[at] != top) at++;
  return at;
}

// Decodes greedily: runs `step_count` forwards of slices of one token each, and gives each slice
// its likeliest token below `limit` as its next input. Writes the tokens [step_count, slices]. The
// caller provides pages for all of them.
void NAME(continue)(const struct decoder *decoder, const struct batch *batch,
                    const struct step *step, int64_t limit, int64_t step_count, int64_t *tokens) {
  const int64_t count = batch->slice_count, size = decoder->layers->cache.page_size;
  int64_t slot_mapping[count], starts[count];
  struct batch next_batch = *batch;
  struct step next_step = *step;
  next_batch.slot_mapping = slot_mapping;
  next_batch.starts = starts;
  next_step.positions = starts;
  for (int64_t done = 0; done < step_count; done++, tokens += count) {
    for (int64_t i = 0; i < count; i++) {
      starts[i] = batch->starts[i] + done;
      int64_t page = batch->pages[batch->page_offsets[i] + starts[i] / size];
      slot_mapping[i] = page * size + starts[i] % size;
    }
    NAME(decode)(decoder, &next_batch, &next_step);
    for (int64_t i = 0; i < count; i++)
      tokens[i] = argmax(next_step.logits + i * decoder->head.out, limit);
    next_step.token_ids = tokens;
    next_step.logits += step->logits_stride;
  }
}
