// Matrix products in bfloat16 with tile instructions.
//
// A tile of 32 x 32 sums stays in four tile registers while K is walked from the first number to the last:
// one order of additions for one row or a thousand.
#include <cstdlib>

#include "amx.h"

#if defined(QUIRE_HAS_AMX)

#include "linear.h"
#include "threads.h"

namespace quire {

bool has_amx() { return request_amx(); }

namespace {

constexpr int64_t DEPTH = 32;        // numbers along K in one tile
constexpr int64_t ROW_CHUNK = 128;   // rows of one task; while they are worked on, their x stays in the cache
constexpr int64_t PANEL_GROUP = 4;   // panels of one task when there are many rows

// Tiles 0-3 are sums, 4 and 5 rows of x, 6 and 7 the two halves of a panel.
struct Shape {
  int64_t rows = 0, width = 0;

  void use(int64_t new_rows, int64_t new_width) {
    if (new_rows == rows && new_width == width) return;
    rows = new_rows;
    width = new_width;
    TileConfig config;
    for (int half = 0; half < 2; ++half) {
      int64_t tile_rows = half == 0 ? (rows < 16 ? rows : 16) : rows - 16;
      for (int side = 0; side < 2; ++side) {
        int64_t tile_width = side == 0 ? (width < 16 ? width : 16) : width - 16;
        if (tile_rows > 0 && tile_width > 0) config.set(2 * half + side, int(tile_rows), int(tile_width * 4));
        if (tile_width > 0) config.set(6 + side, int(DEPTH / 2), int(tile_width * 4));
      }
      if (tile_rows > 0) config.set(4 + half, int(tile_rows), int(DEPTH * 2));
    }
    config.use();
  }
};

struct Operands {
  const bf16* x;
  int64_t x_stride;  // in bytes
  const bf16* panel;
  int64_t panel_stride;  // in bytes, of one pair of k
};

// One step of 32 along K. BOTH_ROWS: more than 16 rows; BOTH_SIDES: more than 16 columns.
template <bool BOTH_ROWS, bool BOTH_SIDES>
inline void step(const Operands& at) {
  tile_load<6>(at.panel, at.panel_stride);
  tile_load<4>(at.x, at.x_stride);
  tile_product<0, 4, 6>();
  if constexpr (BOTH_SIDES) {
    tile_load<7>(at.panel + 32, at.panel_stride);
    tile_product<1, 4, 7>();
  }
  if constexpr (BOTH_ROWS) {
    tile_load<5>(reinterpret_cast<const char*>(at.x) + 16 * at.x_stride, at.x_stride);
    tile_product<2, 5, 6>();
    if constexpr (BOTH_SIDES) tile_product<3, 5, 7>();
  }
}

// The last step when K is no multiple of 32: copies filled up with zeros.
struct Tail {
  alignas(64) bf16 x[32 * DEPTH];
  alignas(64) bf16 panel[DEPTH * PANEL];

  Operands fill(const Linear<bf16>& call, int64_t row, int64_t rows, const bf16* weights, int64_t width) {
    int64_t k = call.depth / DEPTH * DEPTH, left = call.depth - k;
    std::memset(static_cast<void*>(this), 0, sizeof *this);
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(static_cast<void*>(x + r * DEPTH), call.x + (row + r) * call.x_stride + k, size_t(left) * 2);
    std::memcpy(static_cast<void*>(panel), weights + k * width, size_t(left * width) * 2);
    return {x, DEPTH * 2, panel, width * 4};
  }
};

template <bool BOTH_ROWS, bool BOTH_SIDES>
void tile(const Linear<bf16>& call, int64_t row, int64_t rows, int64_t panel, float* sums) {
  const bf16* weights = call.panel_data(panel);
  int64_t width = call.width(panel);
  tile_zero<0>();
  if constexpr (BOTH_SIDES) tile_zero<1>();
  if constexpr (BOTH_ROWS) tile_zero<2>();
  if constexpr (BOTH_ROWS && BOTH_SIDES) tile_zero<3>();
  const bf16* x = call.x + row * call.x_stride;
  int64_t k = 0;
  for (; k + DEPTH <= call.depth; k += DEPTH) {
    step<BOTH_ROWS, BOTH_SIDES>({x + k, call.x_stride * 2, weights + k * width, width * 4});
  }
  if (k < call.depth) {
    Tail tail;
    step<BOTH_ROWS, BOTH_SIDES>(tail.fill(call, row, rows, weights, width));
  }
  constexpr int64_t STRIDE = PANEL * 4;
  tile_store<0>(sums, STRIDE);
  if constexpr (BOTH_SIDES) tile_store<1>(sums + 16, STRIDE);
  if constexpr (BOTH_ROWS) tile_store<2>(sums + 16 * PANEL, STRIDE);
  if constexpr (BOTH_ROWS && BOTH_SIDES) tile_store<3>(sums + 16 * PANEL + 16, STRIDE);
}

void rows_by_panel(const Linear<bf16>& call, Shape& shape, int64_t row, int64_t rows, int64_t panel) {
  alignas(64) float sums[32 * PANEL];
  int64_t width = call.width(panel);
  shape.use(rows, width);
  if (rows > 16)
    width > 16 ? tile<true, true>(call, row, rows, panel, sums) : tile<true, false>(call, row, rows, panel, sums);
  else
    width > 16 ? tile<false, true>(call, row, rows, panel, sums) : tile<false, false>(call, row, rows, panel, sums);
  for (int64_t r = 0; r < rows; ++r) call.finish_row(sums + r * PANEL, row + r, panel);
}

}  // namespace

void linear_amx(const Linear<bf16>& call) {
  const int64_t chunks = (call.rows + ROW_CHUNK - 1) / ROW_CHUNK;
  const int64_t group = call.rows > 32 ? PANEL_GROUP : 1;
  const int64_t groups = (call.num_panels() + group - 1) / group;
  std::atomic<int64_t> next{0};
  auto work = [&] {
    Shape shape;
    for (int64_t task = next.fetch_add(1); task < groups * chunks; task = next.fetch_add(1)) {
      int64_t first = task % chunks * ROW_CHUNK, panel = task / chunks * group;
      int64_t end = first + ROW_CHUNK < call.rows ? first + ROW_CHUNK : call.rows;
      int64_t end_panel = panel + group < call.num_panels() ? panel + group : call.num_panels();
      for (int64_t row = first; row < end; row += 32)
        for (int64_t p = panel; p < end_panel; ++p)
          rows_by_panel(call, shape, row, end - row < 32 ? end - row : 32, p);
    }
    tile_release();
  };
  parallel(groups * chunks < call.num_threads ? int(groups * chunks) : call.num_threads, work);
}

}  // namespace quire

#else

namespace quire {

// As in linear.h, which takes a second to read, and simd.h.
struct bf16;
template <class T>
struct Linear;

bool has_amx() { return false; }
void linear_amx(const Linear<bf16>&) { std::abort(); }

}  // namespace quire

#endif
