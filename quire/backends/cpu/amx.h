// Intel AMX: matrix products of 16 x 16 tiles in bfloat16 with float32 sums, one instruction each.
//
// A tile instruction adds its 16 pairs of products to a row in an order of its own that depends on nothing
// but the position along K, and each row of the tile is computed by itself.
#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define QUIRE_HAS_AMX 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace quire {

// Linux lets a process use tiles only after it asked; the answer holds for all its threads.
inline bool request_amx() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return granted;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_bytes) {
    rows[tile] = uint8_t(num_rows);
    bytes_per_row[tile] = uint16_t(num_bytes);
  }
  void use() const { __asm__ volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};

// The compiler's own intrinsics don't say that they read memory, so stores could move past them.
template <int TILE>
inline void tile_load(const void* base, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void tile_store(void* base, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(TILE));
}
// Tile C += tile A times tile B.
template <int C, int A, int B>
inline void tile_product() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// The same for bytes with int32 sums: A is signed, B unsigned.
template <int C, int A, int B>
inline void tile_product_signed_unsigned() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
inline void tile_release() { __asm__ volatile("tilerelease" ::); }

}  // namespace quire

#endif
