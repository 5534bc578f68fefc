// Paged attention: cuts a step into tasks and runs them, over all splits in one go or a split at a time.
#include "attention.h"

#include <utility>
#include <vector>

#include "attention_amx.h"
#include "attention_vector.h"

namespace quire {
namespace {

template <class T, class CACHED>
std::vector<Task> make_tasks(const Attention<T, CACHED>& call) {
  std::vector<Task> tasks;
  for (int64_t sequence = 0; sequence < call.num_sequences; ++sequence) {
    int64_t rows = (call.query_start[sequence + 1] - call.query_start[sequence]) * call.group();
    // The last rows see the most keys: taken first, they don't keep one thread busy while the others are done.
    for (int64_t tile = (rows - 1) / TASK_ROWS; tile >= 0 && rows > 0; --tile)
      for (int64_t head = 0; head < call.num_kv_heads; ++head)
        tasks.push_back({sequence, head, tile * TASK_ROWS, std::min(TASK_ROWS, rows - tile * TASK_ROWS)});
  }
  return tasks;
}

// The splits [begin, end) in which some row of the task sees a key.
template <class T, class CACHED>
std::pair<int64_t, int64_t> splits(const Rows<T, CACHED>& rows) {
  int64_t last = rows.visible(rows.task.rows - 1).end;
  return {rows.visible(0).begin / SPLIT, (last + SPLIT - 1) / SPLIT};
}

// The tokens of a tile that the task's rows see.
template <class T, class CACHED>
KeyTile tile_at(const Rows<T, CACHED>& rows, int64_t split, int64_t origin) {
  const int64_t first_key = rows.visible(0).begin, last_key = rows.visible(rows.task.rows - 1).end;
  KeyTile tile{origin, std::max(origin, first_key), std::min({origin + KEY_TILE, (split + 1) * SPLIT, last_key}), {}};
  rows.find(tile);
  return tile;
}
template <class T, class CACHED>
KeyTile first_tile(const Rows<T, CACHED>& rows, int64_t split) {
  return tile_at(rows, split, std::max(split * SPLIT, rows.visible(0).begin / KEY_TILE * KEY_TILE));
}

// `after` is the tile that will probably be worked on next: it is asked for while the last one of this split is. There
// is a state for each of the heads that the walk was started with.
template <class Walk, class T, class CACHED>
void one_split(Walk& walk, const Rows<T, CACHED>& rows, int64_t split, const KeyTile& after, State* states,
               int64_t heads) {
  for (int64_t i = 0; i < heads; ++i) states[i].clear(rows.task.rows, rows.call.padded_value_dim());
  const int64_t end = std::min((split + 1) * SPLIT, rows.visible(rows.task.rows - 1).end);
  KeyTile tile = first_tile(rows, split);
  for (int64_t origin = tile.origin; origin < end; origin += KEY_TILE) {
    const KeyTile next = origin + KEY_TILE < end ? tile_at(rows, split, origin + KEY_TILE) : after;
    walk.tile(rows, tile, next, states);
    tile = next;
  }
}

template <class T, class CACHED>
void write_out(const Rows<T, CACHED>& rows, const State& state) {
  const int64_t dim = rows.call.padded_value_dim(), size = rows.call.value_dim;
  for (int64_t r = 0; r < rows.task.rows; ++r) {
    const float* sums = state.output + r * dim;
    Vec totals[PER_SUM];
    for (int v = 0; v < PER_SUM; ++v) totals[v] = load(state.total + r * SUM_LANES + v * LANES);
    float total = sum_lanes(fold_vectors(totals)), factor = rows.call.value_scale;
    if (rows.call.sinks) {
      const float sink = rows.call.sinks[rows.head(r)] * 1.44269504f, top = std::max(state.highest[r], sink);
      const float decay = exp2_of_negative(splat(state.highest[r] - top))[0];
      total = total * decay + exp2_of_negative(splat(sink - top))[0];
      factor *= decay;
    }
    T* out = rows.out(r);
    for (int64_t i = 0; i < size; i += LANES) write(out + i, load(sums + i) * factor / total, size - i);
  }
}

// Neighbouring tasks, of one sequence's key heads, that are walked together; all of their splits, or one.
struct Part {
  size_t task;
  int64_t heads, split;
};

// Enough tasks for all threads: each walks all its splits and merges as it goes.
template <class Walk, class T, class CACHED>
void whole_tasks(const Attention<T, CACHED>& call, const std::vector<Task>& tasks) {
  const int64_t dim = call.padded_value_dim();
  std::vector<Part> parts;
  for (size_t i = 0; i < tasks.size(); i += size_t(call.num_kv_heads)) {
    const int64_t walks = int64_t(tasks.size()) / call.num_kv_heads;
    const bool is_enough = call.num_threads == 1 || walks >= 4 * call.num_threads;
    const int64_t together = is_enough ? Walk::heads_together(call, tasks[i].rows) : 1;
    for (int64_t head = 0; head < call.num_kv_heads; head += together)
      parts.push_back({i + size_t(head), std::min(together, call.num_kv_heads - head), 0});
  }
  parallel_tasks(call.num_threads, int64_t(parts.size()), [&](int64_t i) {
    thread_local Scratch scratch;
    const Part part = parts[size_t(i)], after_it = parts[std::min(size_t(i) + 1, parts.size() - 1)];
    float* memory = scratch.get<float>(size_t(2 * part.heads * State::floats(dim)));
    State merged[TASK_ROWS], states[TASK_ROWS];
    const Rows<T, CACHED> rows{call, tasks[part.task]}, later{call, tasks[after_it.task]};
    for (int64_t head = 0; head < part.heads; ++head) {
      merged[head] = State::at(memory + 2 * head * State::floats(dim), dim);
      states[head] = State::at(memory + (2 * head + 1) * State::floats(dim), dim);
      merged[head].clear(rows.task.rows, dim);
    }
    auto [begin, end] = splits(rows);
    Walk walk(call);
    walk.start(rows, part.heads);
    for (int64_t split = begin; split < end; ++split) {
      const KeyTile after = split + 1 < end ? first_tile(rows, split + 1) : first_tile(later, splits(later).first);
      one_split(walk, rows, split, after, states, part.heads);
      for (int64_t head = 0; head < part.heads; ++head) merged[head].merge(states[head], rows.task.rows, dim);
    }
    for (int64_t head = 0; head < part.heads; ++head)
      write_out(Rows<T, CACHED>{call, tasks[part.task + size_t(head)]}, merged[head]);
    walk.finish();
  });
}

// Few tasks with long contexts: the splits are shared out, then merged in the same order.
template <class Walk, class T, class CACHED>
void split_tasks(const Attention<T, CACHED>& call, const std::vector<Task>& tasks) {
  const int64_t dim = call.padded_value_dim(), heads = call.num_kv_heads;
  std::vector<Part> parts;
  std::vector<size_t> first_state(tasks.size() + 1);  // a task has one for each of its splits
  for (size_t i = 0; i < tasks.size(); ++i) {
    auto [begin, end] = splits(Rows<T, CACHED>{call, tasks[i]});
    first_state[i + 1] = first_state[i] + size_t(end - begin);
    if (int64_t(i) % heads) continue;
    // As many splits with all heads as give every thread the same; the heads of the others are shared out. In the order
    // in which `parallel_tasks` divides them.
    const int64_t together = Walk::heads_together(call, tasks[i].rows), threads = call.num_threads;
    const int64_t each = (end - begin) / threads, whole = begin + each * threads, rest = (end - whole) * heads;
    for (int64_t thread = 0; thread < threads; ++thread) {
      for (int64_t split = begin + thread * each; split < begin + (thread + 1) * each; ++split)
        for (int64_t head = 0; head < heads; head += together)
          parts.push_back({i + size_t(head), std::min(together, heads - head), split});
      for (int64_t one = rest * thread / threads; one < rest * (thread + 1) / threads; ++one)
        parts.push_back({i + size_t(one % heads), 1, whole + one / heads});
    }
  }
  thread_local Scratch scratch;
  float* memory = scratch.get<float>(size_t(State::floats(dim)) * (first_state.back() + 1));
  auto state_at = [&](size_t i) { return State::at(memory + int64_t(i) * State::floats(dim), dim); };
  parallel_tasks(call.num_threads, int64_t(parts.size()), [&](int64_t i) {
    const Part part = parts[size_t(i)], later = parts[std::min(size_t(i) + 1, parts.size() - 1)];
    const Rows<T, CACHED> rows{call, tasks[part.task]};
    const int64_t begin = splits(rows).first;
    State states[TASK_ROWS];
    for (int64_t head = 0; head < part.heads; ++head)
      states[head] = state_at(first_state[part.task + size_t(head)] + size_t(part.split - begin));
    Walk walk(call);
    walk.start(rows, part.heads);
    const KeyTile after = first_tile(Rows<T, CACHED>{call, tasks[later.task]}, later.split);
    one_split(walk, rows, part.split, after, states, part.heads);
    walk.finish();
  });
  State merged = state_at(first_state.back());
  for (size_t i = 0; i < tasks.size(); ++i) {
    merged.clear(tasks[i].rows, dim);
    for (size_t at = first_state[i]; at < first_state[i + 1]; ++at) merged.merge(state_at(at), tasks[i].rows, dim);
    write_out(Rows<T, CACHED>{call, tasks[i]}, merged);
  }
}

// As many threads as there is work for: to wake one takes as long as some ten thousand products.
template <class T, class CACHED>
int useful_threads(const Attention<T, CACHED>& call) {
  constexpr int64_t WORTH_A_THREAD = 65536;
  int64_t products = 0;
  for (int64_t i = 0; i < call.num_sequences; ++i)
    products += (call.query_start[i + 1] - call.query_start[i]) * call.context_lens[i] * call.num_heads * call.head_dim;
  return int(std::min<int64_t>(call.num_threads, 1 + products / WORTH_A_THREAD));
}

template <class Walk, class T, class CACHED>
void attention(Attention<T, CACHED> call) {
  std::vector<Task> tasks = make_tasks(call);
  if (tasks.empty()) return;
  call.num_threads = useful_threads(call);
  int64_t longest = *std::max_element(call.context_lens, call.context_lens + call.num_sequences);
  if (call.num_threads > 1 && longest > SPLIT && int64_t(tasks.size()) < 4 * call.num_threads)
    split_tasks<Walk>(call, tasks);
  else
    whole_tasks<Walk>(call, tasks);
}

template <class T, class CACHED>
void attention_vector(const Attention<T, CACHED>& call) {
  attention<VectorWalk<T, CACHED>>(call);
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" {
QUIRE_FUNCTION(attention_float32, attention_vector(*call), Attention<float>)
QUIRE_FUNCTION(attention_bfloat16, attention_vector(*call), Attention<bf16>)
QUIRE_FUNCTION(attention_int8_float32, attention_vector(*call), Attention<float, int8_t>)
QUIRE_FUNCTION(attention_int8_bfloat16, attention_vector(*call), Attention<bf16, int8_t>)
QUIRE_FUNCTION(attention_fp8_float32, attention_vector(*call), Attention<float, fp8>)
QUIRE_FUNCTION(attention_fp8_bfloat16, attention_vector(*call), Attention<bf16, fp8>)
#if defined(QUIRE_HAS_AMX)
QUIRE_FUNCTION(attention_amx, attention<AmxWalk>(*call), Attention<bf16>)
#endif
}
