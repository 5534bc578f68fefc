// What the rows' adapters add to a product (quire/kernels/low_rank.py).
//
// A row's inner products with A are sums over K in segments of SEGMENT, each of four chains (k modulo 4), which are
// added in pairs; the segments' sums are added in order. Products with B are added one after the other, along the rank.
// Lanes are ranks, and then outputs, so no sum goes across lanes: bits are the same on every instruction set, and
// however rows are put together (up to MAX_ROWS that have the same adapter share what is read of it).
#include "arguments.h"
#include "simd.h"
#include "threads.h"
#include "vectors.h"

namespace quire {
namespace {

constexpr int64_t SEGMENT = 256;
constexpr int64_t PANEL = 32;   // outputs whose B lies together
constexpr int64_t BLOCK = 512;  // outputs of a task
constexpr int MAX_ROWS = 4;
constexpr int VECTORS = int(PANEL) / LANES;

// As `adapters.py` lays them out: eight bytes each.
template <class T>
struct LowRankPart {
  int64_t first, count, first_rank, rank;
  const T* b;                       // [panels, rank, PANEL]
  const float *factor, *offset;     // [panels * PANEL], or null
};

template <class T>
struct LowRankSlot {
  const T* a;          // [depth, ranks]; null: nothing is added
  const float* scale;  // [ranks]
  int64_t ranks;       // a multiple of SUM_LANES
  int64_t num_parts;
  const LowRankPart<T>* parts;
};

struct Group {
  int64_t first, count, slot;  // among the rows in the order of their slots
};

inline float number(float value) { return value; }
inline float number(bf16 value) { return to_float(value); }

// The sums of one segment for LANES ranks of ROWS rows, into sums[row].
template <class T, int ROWS>
inline void chains(const T* a, int64_t ranks, const T* const* x, int64_t begin, int64_t end, Vec* sums) {
  Vec chain[ROWS][4] = {};
  int64_t k = begin;
  for (; k + 4 <= end; k += 4)
    for (int i = 0; i < 4; ++i) {
      const Vec w = load(a + (k + i) * ranks);
      for (int r = 0; r < ROWS; ++r) chain[r][i] = fma(splat(number(x[r][k + i])), w, chain[r][i]);
    }
  for (int i = 0; k < end; ++k, ++i) {
    const Vec w = load(a + k * ranks);
    for (int r = 0; r < ROWS; ++r) chain[r][i] = fma(splat(number(x[r][k])), w, chain[r][i]);
  }
  for (int r = 0; r < ROWS; ++r) sums[r] = (chain[r][0] + chain[r][1]) + (chain[r][2] + chain[r][3]);
}

// Adds a segment's sums to those of each row, `stride` floats apart.
template <class T, int ROWS>
void inner_products(const LowRankSlot<T>& slot, const T* const* x, int64_t begin, int64_t end, float* to,
                    int64_t stride) {
  for (int64_t rank = 0; rank < slot.ranks; rank += LANES) {
    Vec sums[ROWS];
    chains<T, ROWS>(slot.a + rank, slot.ranks, x, begin, end, sums);
    for (int r = 0; r < ROWS; ++r) store(to + r * stride + rank, load(to + r * stride + rank) + sums[r]);
  }
}

template <class T, int ROWS>
void outer_products(const LowRankPart<T>& part, const float* const* inner, T* const* out, int64_t begin, int64_t end) {
  for (int64_t column = begin; column < end; column += PANEL) {
    Vec sums[ROWS][VECTORS] = {};
    const T* b = part.b + column * part.rank;
    for (int64_t r = 0; r < part.rank; ++r) {
      Vec w[VECTORS];
      for (int v = 0; v < VECTORS; ++v) w[v] = load(b + r * PANEL + v * LANES);
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
    thread_local Scratch kept, sums;
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
    // With few groups, threads share a group's segments; sums that are added later have a place each.
    const int64_t segments = (depth + SEGMENT - 1) / SEGMENT;
    const bool is_split = num_groups < 2 * num_threads && segments > 1;
    const int64_t places = is_split ? segments : 1, count = ends[num_slots - 1];
    float* inner = sums.get<float>(size_t(count * places * most_ranks));
    const int64_t per_row = places * most_ranks;
    parallel_shares(num_threads, num_groups * places, (is_split ? SEGMENT : depth) * most_ranks / 4, [&](int64_t task) {
      const Group& group = groups[task / places];
      const int64_t part = task % places;
      float* to = inner + group.first * per_row + part * most_ranks;
      for (int64_t r = 0; r < group.count; ++r) std::fill(to + r * per_row, to + r * per_row + most_ranks, 0.0f);
      const int64_t begin = is_split ? part * SEGMENT : 0;
      const int64_t end = is_split ? std::min(begin + SEGMENT, depth) : depth;
      for (int64_t k = begin; k < end; k += SEGMENT)
        products(group, order, k, std::min(k + SEGMENT, end), to, per_row);
    });
    for (int64_t row = 0; row < count; ++row) {
      float* own = inner + row * per_row;
      const float* scale = table[slots[order[row]]].scale;
      const int64_t ranks = table[slots[order[row]]].ranks;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        for (int64_t part = 1; part < places; ++part) own[rank] += own[part * most_ranks + rank];
        own[rank] *= scale[rank];
      }
    }
    const int64_t blocks = (columns + BLOCK - 1) / BLOCK;
    parallel_shares(num_threads, num_groups * blocks, BLOCK * most_ranks / 4, [&](int64_t task) {
      const Group& group = groups[task / blocks];
      const LowRankSlot<T>& slot = table[group.slot];
      const int64_t begin = task % blocks * BLOCK, end = std::min(begin + BLOCK, columns);
      const float* from[MAX_ROWS];
      T* to[MAX_ROWS];
      for (int64_t r = 0; r < group.count; ++r) {
        from[r] = inner + (group.first + r) * per_row;
        to[r] = out + order[group.first + r] * out_stride;
      }
      for (int64_t p = 0; p < slot.num_parts; ++p) {
        const LowRankPart<T>& part = slot.parts[p];
        // Whole panels: a panel is of the task in which it begins.
        const int64_t low = panel_from(begin - part.first), high = std::min(panel_from(end - part.first), part.count);
        if (low >= high) continue;
        if (group.count == 4) outer_products<T, 4>(part, from, to, low, high);
        else if (group.count == 3) outer_products<T, 3>(part, from, to, low, high);
        else if (group.count == 2) outer_products<T, 2>(part, from, to, low, high);
        else outer_products<T, 1>(part, from, to, low, high);
      }
    });
  }

 private:
  bool takes(int64_t row) const { return slots[row] >= 0 && slots[row] < num_slots && table[slots[row]].a; }

  static int64_t panel_from(int64_t column) { return column <= 0 ? 0 : (column + PANEL - 1) / PANEL * PANEL; }

  void products(const Group& group, const int64_t* order, int64_t begin, int64_t end, float* to, int64_t stride) const {
    const T* from[MAX_ROWS];
    for (int64_t r = 0; r < group.count; ++r) from[r] = x + order[group.first + r] * x_stride;
    const LowRankSlot<T>& slot = table[group.slot];
    if (group.count == 4) inner_products<T, 4>(slot, from, begin, end, to, stride);
    else if (group.count == 3) inner_products<T, 3>(slot, from, begin, end, to, stride);
    else if (group.count == 2) inner_products<T, 2>(slot, from, begin, end, to, stride);
    else inner_products<T, 1>(slot, from, begin, end, to, stride);
  }
};

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" {
QUIRE_FUNCTION(add_low_rank_float32, call->run(), AddLowRank<float>)
QUIRE_FUNCTION(add_low_rank_bfloat16, call->run(), AddLowRank<bf16>)
}
