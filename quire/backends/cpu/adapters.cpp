// What the rows' adapters add to a product (quire/kernels/low_rank.py).
//
// A row's inner products with A are sums over K in segments of SEGMENT, each of four chains (k modulo 4), which are
// added in pairs; the segments' sums are added in order. Products with B are added one after the other, along the rank.
// Lanes are ranks, and then outputs, so no sum goes across lanes: bits are the same on every instruction set, and
// however rows are put together (up to MAX_ROWS that have the same adapter share what is read of it).
//
// bfloat16 numbers lie in pairs, of which one instruction makes either number: A's are those of two steps along K, B's
// those of outputs that are half a panel apart.
#include <type_traits>

#include "arguments.h"
#include "simd.h"
#include "threads.h"
#include "vectors.h"

namespace quire {
namespace {

constexpr int64_t SEGMENT = 256;
constexpr int64_t STRIP = 16;     // ranks whose A lies together
constexpr int64_t PANEL = 32;     // outputs whose B lies together
constexpr int64_t BLOCK = 512;    // outputs of a task
constexpr int MAX_ROWS = LANES == 8 ? 2 : 4;  // whose sums fit the registers
constexpr int VECTORS = int(PANEL) / LANES;

template <class T>
constexpr int64_t STEP = sizeof(T) == 2 ? 2 : 1;  // numbers along K that lie side by side

// As `adapters.py` lays them out: eight bytes each.
template <class T>
struct LowRankPart {
  int64_t first, count, first_rank, rank;
  const T* b;                       // [panels, rank, PANEL]
  const float *factor, *offset;     // [panels * PANEL], or null
};

template <class T>
struct LowRankSlot {
  const T* a;          // [strips, depth, STRIP]; null: nothing is added
  const float* scale;  // [ranks]
  int64_t ranks;       // a multiple of STRIP
  int64_t num_parts;
  const LowRankPart<T>* parts;
};

struct Group {
  int64_t first, count, slot;  // among the rows in the order of their slots
};

// LANES ranks of four steps along K.
inline void load_steps(const float* a, Vec (&w)[4]) {
  for (int i = 0; i < 4; ++i) w[i] = load(a + i * STRIP);
}
inline void load_steps(const bf16* a, Vec (&w)[4]) {
  for (int i = 0; i < 2; ++i) {
    UIntVec pairs;
    std::memcpy(&pairs, a + i * 2 * STRIP, sizeof pairs);
    w[2 * i] = low_bf16(pairs);
    w[2 * i + 1] = high_bf16(pairs);
  }
}

// The last steps, of which there are `count` < 4: zeros come in for the rest.
template <class T>
inline void load_last_steps(const T* a, int64_t count, Vec (&w)[4]) {
  T padded[4 * STRIP] = {};
  const int64_t size = (count - 1) / STEP<T> * STEP<T> * STRIP + LANES * STEP<T>;
  std::memcpy(static_cast<void*>(padded), a, size_t(size) * sizeof(T));
  load_steps(padded, w);
}

// The panel's outputs at one rank.
inline void load_outputs(const float* b, Vec (&w)[VECTORS]) {
  for (int v = 0; v < VECTORS; ++v) w[v] = load(b + v * LANES);
}
inline void load_outputs(const bf16* b, Vec (&w)[VECTORS]) {
  for (int v = 0; v < VECTORS / 2; ++v) {
    UIntVec pairs;
    std::memcpy(&pairs, b + 2 * v * LANES, sizeof pairs);
    w[v] = low_bf16(pairs);
    w[v + VECTORS / 2] = high_bf16(pairs);
  }
}

// Adds one segment's sums of `count` products for ROWS rows to those of each row, `stride` floats apart. `a` is the
// segment's first step.
template <class T, int ROWS>
void inner_products(const T* a, int64_t depth, int64_t ranks, const float* const* x, int64_t count, float* to,
                    int64_t stride) {
  const int64_t strip_size = (depth + STEP<T> - 1) / STEP<T> * STEP<T> * STRIP;
  for (int64_t rank = 0; rank < ranks; rank += LANES) {
    const T* lanes = a + rank / STRIP * strip_size + rank % STRIP * STEP<T>;
    Vec chain[ROWS][4] = {};
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
      Vec w[4];
      load_steps(lanes + k * STRIP, w);
      for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 4; ++i) chain[r][i] = fma(splat(x[r][k + i]), w[i], chain[r][i]);
    }
    if (k < count) {
      Vec w[4];
      load_last_steps(lanes + k * STRIP, count - k, w);
      for (int r = 0; r < ROWS; ++r)
        for (int i = 0; k + i < count; ++i) chain[r][i] = fma(splat(x[r][k + i]), w[i], chain[r][i]);
    }
    for (int r = 0; r < ROWS; ++r) {
      float* sum = to + r * stride + rank;
      store(sum, load(sum) + ((chain[r][0] + chain[r][1]) + (chain[r][2] + chain[r][3])));
    }
  }
}

template <class T, int ROWS>
void outer_products(const LowRankPart<T>& part, const float* const* inner, T* const* out, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column += PANEL) {
    Vec sums[ROWS][VECTORS] = {};
    const T* b = part.b + column * part.rank;
    for (int64_t r = 0; r < part.rank; ++r) {
      Vec w[VECTORS];
      load_outputs(b + r * PANEL, w);
      for (int row = 0; row < ROWS; ++row) {
        const Vec factor = splat(inner[row][part.first_rank + r]);
        for (int v = 0; v < VECTORS; ++v) sums[row][v] = fma(factor, w[v], sums[row][v]);
      }
    }
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t at = column + v * LANES, count = std::min<int64_t>(LANES, part.count - at);
      if (count <= 0) break;
      for (int row = 0; row < ROWS; ++row) {
        T* place = out[row] + part.first + at;
        Vec value = read(place, count) + sums[row][v];
        if (part.factor) value = fma(value, load(part.factor + at), load(part.offset + at));
        write(place, value, count);
      }
    }
  }
}

template <class T>
struct AddLowRank {
  const T* x;
  int64_t x_stride;
  T* out;
  int64_t out_stride;
  const int* slots;
  const LowRankSlot<T>* table;
  int64_t num_slots, rows, columns, depth;
  int num_threads;
  QUIRE_ARGUMENTS(x, x_stride, out, out_stride, slots, table, num_slots, rows, columns, depth, num_threads)

  void run() const {
    thread_local Scratch kept;
    int64_t* order = kept.get<int64_t>(size_t(num_slots + 1 + rows * 4));
    int64_t *ends = order + rows, most_ranks = 0;
    Group* groups = reinterpret_cast<Group*>(ends + num_slots + 1);
    std::fill(ends, ends + num_slots + 1, int64_t(0));
    for (int64_t row = 0; row < rows; ++row)
      if (takes(row)) {
        ++ends[slots[row] + 1];
        most_ranks = std::max(most_ranks, table[slots[row]].ranks);
      }
    if (most_ranks == 0) return;
    for (int64_t slot = 0; slot < num_slots; ++slot) ends[slot + 1] += ends[slot];
    for (int64_t row = 0; row < rows; ++row)
      if (takes(row)) order[ends[slots[row]]++] = row;
    int64_t num_groups = 0, first = 0;
    for (int64_t slot = 0; slot < num_slots; ++slot)
      for (; first < ends[slot]; first += groups[num_groups++].count)
        groups[num_groups] = {first, std::min<int64_t>(MAX_ROWS, ends[slot] - first), slot};
    if (num_groups < 2 * num_threads) shared_groups(order, groups, num_groups, most_ranks);
    else whole_groups(order, groups, num_groups, most_ranks);
  }

 private:
  bool takes(int64_t row) const { return slots[row] >= 0 && slots[row] < num_slots && table[slots[row]].a; }

  // Each thread takes groups from x to out.
  void whole_groups(const int64_t* order, const Group* groups, int64_t num_groups, int64_t most_ranks) const {
    parallel_shares(num_threads, num_groups, (depth + columns) * most_ranks / 4, [&](int64_t task) {
      thread_local Scratch own;
      const Group& group = groups[task];
      float* inner = own.get<float>(size_t(MAX_ROWS * most_ranks));
      std::fill(inner, inner + MAX_ROWS * most_ranks, 0.0f);
      for (int64_t k = 0; k < depth; k += SEGMENT) add_segment(group, order, k, inner, most_ranks);
      for (int64_t r = 0; r < group.count; ++r) scale(group, inner + r * most_ranks);
      add_outputs(group, order, inner, most_ranks, 0, columns);
    });
  }

  // With few groups, threads share a group's segments, whose sums have a place each until they are added, and its
  // outputs.
  void shared_groups(const int64_t* order, const Group* groups, int64_t num_groups, int64_t most_ranks) const {
    thread_local Scratch sums;
    const int64_t segments = (depth + SEGMENT - 1) / SEGMENT, per_row = segments * most_ranks;
    const Group& last = groups[num_groups - 1];
    float* inner = sums.get<float>(size_t((last.first + last.count) * per_row));
    parallel_shares(num_threads, num_groups * segments, SEGMENT * most_ranks / 4, [&](int64_t task) {
      const Group& group = groups[task / segments];
      const int64_t segment = task % segments;
      float* to = inner + group.first * per_row + segment * most_ranks;
      for (int64_t r = 0; r < group.count; ++r) std::fill(to + r * per_row, to + r * per_row + most_ranks, 0.0f);
      add_segment(group, order, segment * SEGMENT, to, per_row);
    });
    for (int64_t g = 0; g < num_groups; ++g)
      for (int64_t r = 0; r < groups[g].count; ++r) {
        float* own = inner + (groups[g].first + r) * per_row;
        const int64_t ranks = table[groups[g].slot].ranks;
        for (int64_t segment = 1; segment < segments; ++segment)
          for (int64_t rank = 0; rank < ranks; ++rank) own[rank] += own[segment * most_ranks + rank];
        scale(groups[g], own);
      }
    const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
    parallel_shares(num_threads, num_groups * blocks, BLOCK * most_ranks / 4, [&](int64_t task) {
      const Group& group = groups[task / blocks];
      const int64_t begin = task % blocks * BLOCK, end = std::min(begin + BLOCK, columns);
      add_outputs(group, order, inner + group.first * per_row, per_row, begin, end);
    });
  }

  void scale(const Group& group, float* inner) const {
    const LowRankSlot<T>& slot = table[group.slot];
    for (int64_t rank = 0; rank < slot.ranks; ++rank) inner[rank] *= slot.scale[rank];
  }

  // Adds the products of a group's rows with the segment that begins at `begin`.
  void add_segment(const Group& group, const int64_t* order, int64_t begin, float* to, int64_t stride) const {
    const int64_t count = std::min(SEGMENT, depth - begin);
    alignas(64) float converted[MAX_ROWS][SEGMENT];
    const float* from[MAX_ROWS];
    for (int64_t r = 0; r < group.count; ++r) {
      const T* row = x + order[group.first + r] * x_stride + begin;
      if constexpr (sizeof(T) == 4) {
        from[r] = row;
      } else {
        for (int64_t k = 0; k < count; ++k) converted[r][k] = to_float(row[k]);
        from[r] = converted[r];
      }
    }
    const LowRankSlot<T>& slot = table[group.slot];
    const T* a = slot.a + begin * STRIP;
    by_rows(group.count, [&](auto rows) {
      inner_products<T, rows()>(a, depth, slot.ranks, from, count, to, stride);
    });
  }

  // Adds to a group's rows, from output `begin` to `end`, what their sums, `stride` floats apart, make with B.
  void add_outputs(const Group& group, const int64_t* order, const float* inner, int64_t stride, int64_t begin,
                   int64_t end) const {
    const float* from[MAX_ROWS];
    T* to[MAX_ROWS];
    for (int64_t r = 0; r < group.count; ++r) {
      from[r] = inner + r * stride;
      to[r] = out + order[group.first + r] * out_stride;
    }
    const LowRankSlot<T>& slot = table[group.slot];
    for (int64_t p = 0; p < slot.num_parts; ++p) {
      const LowRankPart<T>& part = slot.parts[p];
      // Whole panels: a panel is of the task in which it begins.
      const int64_t low = panel_from(begin - part.first), high = std::min(panel_from(end - part.first), part.count);
      if (low < high)
        by_rows(group.count, [&](auto rows) { outer_products<T, rows()>(part, from, to, low, high); });
    }
  }

  static int64_t panel_from(int64_t column) { return column <= 0 ? 0 : (column + PANEL - 1) / PANEL * PANEL; }

  template <int ROWS = MAX_ROWS, class Body>
  static void by_rows(int64_t rows, const Body& body) {
    if constexpr (ROWS > 1) {
      if (rows < ROWS) return by_rows<ROWS - 1>(rows, body);
    }
    body(std::integral_constant<int, ROWS>{});
  }
};

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" {
QUIRE_FUNCTION(add_low_rank_float32, call->run(), AddLowRank<float>)
QUIRE_FUNCTION(add_low_rank_bfloat16, call->run(), AddLowRank<bf16>)
}
