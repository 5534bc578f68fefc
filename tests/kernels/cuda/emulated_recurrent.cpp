// The kernels of quire/backends/cuda/recurrent.cu as a library for a CPU.
#include "device.h"
#include "recurrent.cu"

#include <string>

extern "C" __attribute__((visibility("default"))) int launch(
    const char* name, unsigned x, unsigned y, unsigned threads, unsigned shared_bytes, const Call* call, unsigned seed) {
  const unsigned many_size = call->most_columns == 128  ? Width<128>::SIZE
                             : call->most_columns == 64 ? Width<64>::SIZE
                                                        : Width<32>::SIZE;
  const struct {
    const char* name;
    void (*kernel)(Call);
    unsigned shared_bytes;
  } kernels[] = {
      {"few_scores", few_scores, 4 * (KEYS_SIZE + QUERIES_AT_ONCE * ROW)},
      {"many_scores", many_scores, 4 * 2 * KEYS_SIZE},
      {"few_tokens_1", few_tokens_1, 0},
#if ALIGNED
      {"few_tokens_2", few_tokens_2, 0},
      {"few_tokens_4", few_tokens_4, 0},
      {"few_tokens_ahead", few_tokens_ahead, 4 * COPIED_SIZE<2>},
#endif
      {"many_tokens", many_tokens, 4 * many_size},
  };
  for (const auto& one : kernels) {
    if (std::string(name) != one.name) continue;
    if (one.shared_bytes > shared_bytes || shared_bytes > sizeof emulation::memory) return 2;
    emulation::run_grid<Call>(one.kernel, *call, x, y, threads, seed);
    return 0;
  }
  return 1;
}

extern "C" __attribute__((visibility("default"))) unsigned call_size() { return sizeof(Call); }
