// AMX tile registers in software, for tests on processors without AMX. amx_tiles.h includes this
// file instead of the intrinsics.
#pragma once

__attribute__((weak)) _Thread_local struct tile_config emulated_config;
__attribute__((weak)) _Thread_local uint8_t emulated_tiles[8][16][64];

INLINE void load_config(const struct tile_config *config) { emulated_config = *config; }
INLINE void store_config(struct tile_config *config) { *config = emulated_config; }

INLINE void emulate_load(int tile, const void *from, int64_t stride) {
  memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile]);
  for (int i = 0; i < emulated_config.rows[tile]; i++)
    memcpy(emulated_tiles[tile][i], (const char *)from + i * stride, emulated_config.row_bytes[tile]);
}

INLINE void emulate_store(int tile, void *to, int64_t stride) {
  for (int i = 0; i < emulated_config.rows[tile]; i++)
    memcpy((char *)to + i * stride, emulated_tiles[tile][i], emulated_config.row_bytes[tile]);
}

INLINE float emulate_element(int tile, int row, int index) {
  uint16_t half;
  memcpy(&half, emulated_tiles[tile][row] + 2 * index, sizeof half);
  uint32_t bits = (uint32_t)half << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Adds up even and odd elements in two sums from zero, as Intel's pseudocode does.
INLINE void emulate_product(int sums, int a, int b) {
  for (int row = 0; row < emulated_config.rows[sums]; row++)
    for (int column = 0; column < 16; column++) {
      float sum, parts[2] = {0, 0};
      memcpy(&sum, emulated_tiles[sums][row] + 4 * column, sizeof sum);
      for (int k = 0; k < 2 * emulated_config.rows[b]; k++)
        parts[k % 2] += emulate_element(a, row, k) * emulate_element(b, k / 2, 2 * column + k % 2);
      sum += parts[0] + parts[1];
      memcpy(emulated_tiles[sums][row] + 4 * column, &sum, sizeof sum);
    }
}

// Multiplies signed by unsigned bytes.
INLINE void emulate_int8_product(int sums, int a, int b) {
  for (int row = 0; row < emulated_config.rows[sums]; row++)
    for (int column = 0; column < 16; column++) {
      int32_t sum;
      memcpy(&sum, emulated_tiles[sums][row] + 4 * column, sizeof sum);
      for (int k = 0; k < 4 * emulated_config.rows[b]; k++)
        sum += (int8_t)emulated_tiles[a][row][k] * emulated_tiles[b][k / 4][4 * column + k % 4];
      memcpy(emulated_tiles[sums][row] + 4 * column, &sum, sizeof sum);
    }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadd(tile, from, stride) emulate_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulate_store(tile, to, stride)
#define _tile_zero(tile) memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define _tile_dpbf16ps(sums, a, b) emulate_product(sums, a, b)
#define _tile_dpbsud(sums, a, b) emulate_int8_product(sums, a, b)
#define _tile_release() memset(&emulated_config, 0, sizeof emulated_config)
