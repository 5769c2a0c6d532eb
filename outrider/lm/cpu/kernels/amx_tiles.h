// The tile registers of AMX (Intel, Architecture Instruction Set Extensions Programming Reference,
// chapter 3): eight registers of up to 16 rows of 64 bytes.
//
// A tile product adds A · B to an accumulator. A has rows of up to 32 bfloat16 or 64 int8. The rows
// of B are interleaved, element by element, in pairs of bfloat16 or in fours of int8.
#pragma once

#include "cpu_kernels.h"

#include <immintrin.h>

struct tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} __attribute__((packed));

#ifdef EMULATED_TILES
#include EMULATED_TILES
#else
// GCC's own intrinsics declare only 8 of the 64 bytes as accessed (GCC bug 114098).
INLINE void load_config(const struct tile_config *config) {
  __asm__ volatile("ldtilecfg %0" ::"m"(*config));
}

INLINE void store_config(struct tile_config *config) {
  __asm__ volatile("sttilecfg %0" : "=m"(*config));
}
#endif

// Makes the compiler finish earlier stores: GCC does not know that a tile load reads memory.
INLINE void compiler_fence(void) { __asm__ volatile("" ::: "memory"); }

// oneDNN remembers which tile configuration it has loaded, so a kernel must restore it at its end.
typedef struct tile_config saved_state;

INLINE saved_state save_state(void) {
  struct tile_config saved;
  store_config(&saved);
  return saved;
}

INLINE void restore_state(const saved_state *saved) {
  if (saved->palette)
    load_config(saved);
  else
    _tile_release();
}

// Configures the tiles for up to 32 rows of A, of `row_bytes` bytes each. Tiles 0 to 3 are
// accumulators: 0 and 1 for the rows 0 to 15 of A, 2 and 3 for the rows 16 to 31. Tile 4 has the
// rows 0 to 15 of A, and tile 5 has the rows 16 to 31. Tiles 6 and 7 have B.
INLINE void configure_tiles(int rows, int row_bytes) {
  struct tile_config config = {.palette = 1};
  uint8_t first = (uint8_t)(rows < 16 ? rows : 16), second = (uint8_t)(rows > 16 ? rows - 16 : 1);
  const uint8_t depth = (uint8_t)(row_bytes / 4);
  const uint8_t counts[8] = {first, first, second, second, first, second, depth, depth};
  for (int i = 0; i < 8; i++) {
    config.row_bytes[i] = (uint16_t)(i == 4 || i == 5 ? row_bytes : 64);
    config.rows[i] = counts[i];
  }
  load_config(&config);
}

// Returns 1 if outrider_attend_amx supports a layer, else 0.
int outrider_fits_amx(const struct layer *layer);

// Like outrider_attend, for one key/value head of a layer that fits; expects tiles configured for
// 32 rows of 64 bytes.
void outrider_attend_amx(const struct layer *layer, const struct batch *batch,
                         const struct rows *query, void *out, float scale,
                         struct attention_item item);
