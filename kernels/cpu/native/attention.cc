#include "attention.h"

#include <numeric>

#include "paged_products.h"
#include "pair_products.h"
#include "ranking.h"

namespace kvorum {
namespace {

constexpr int MAX_GROUP = 256;

int padded(int slots) { return (slots + LANES - 1) / LANES * LANES; }

// What a decode task leaves: for each query head the largest logit, the sum of exponentials, the factor that combining
// finds for them, and the weighted values; for sequences with scores, the exponentials [group_size][padded slots] and
// the lowest-ranked of its slots.
struct Partial {
    float *largest, *total, *factor, *output, *exponentials;
    Lowest* lowest;

    Partial(float* scratch, int group_size, int head_dim)
        : largest(scratch), total(scratch + group_size), factor(scratch + 2 * group_size),
          output(scratch + 3 * group_size),
          exponentials(output + group_size * head_dim + LOWEST_SIZE),
          lowest(reinterpret_cast<Lowest*>(output + group_size * head_dim)) {}

    static constexpr int LOWEST_SIZE = sizeof(Lowest) / sizeof(float);

    static long size(int group_size, int head_dim, int slots, bool keeps_scores) {
        return 3 * group_size + group_size * head_dim + LOWEST_SIZE + (keeps_scores ? group_size * padded(slots) : 0);
    }
};

// Turn a row of logits into exponentials of their distance to the largest; what is behind `slots` becomes 0.
void exponentiate(float* row, int slots, float& largest_logit, float& total) {
    const int end = padded(slots);
    std::fill(row + slots, row + end, -INFINITE);
    F16 most = splat(-INFINITE);
    for (int i = 0; i < end; i += LANES) most = max(most, load(row + i));
    largest_logit = largest(most);
    if (largest_logit == -INFINITE) {
        std::fill(row, row + end, 0.0f);
        total = 0.0f;
        return;
    }
    const F16 shift = splat(largest_logit);
    F16 sums = zero();
    for (int i = 0; i < end; i += LANES) {
        const F16 e = exp(load(row + i) - shift);
        store(row + i, e);
        sums = sums + e;
    }
    total = sum(sums);
}

// Set the logits of slots whose tokens are outside the window to -inf.
void mask_window(const Pool& pool, const int32_t* panels, int slots, long base, int oldest_hidden, float* row) {
    for (int slot = 0; slot < slots; ++slot) {
        const long at = (base + panels[slot / LANES]) * LANES + slot % LANES;
        if (pool.positions[at] <= oldest_hidden) row[slot] = -INFINITE;
    }
}

template <class W>
void decode_task(const Step& step, const Task& task, const Task* next, const Pool& pool, const LayerShape& shape,
                 const float* qkv, float* scratch, float* buffer) {
    const Sequence& sequence = step.sequences[task.sequence];
    const int group = step.group_size, head_dim = pool.head_dim, slots = task.end - task.begin, stride = padded(slots);
    const Partial partial(scratch + task.scratch, group, head_dim);
    const int32_t* panels = step.panels_of(sequence) + task.begin / LANES;
    const long base = pool.panel(shape.layer, task.head, 0);
    const float* queries = qkv + sequence.first_token * shape.stride + long(task.head) * group * head_dim;
    float* exponentials = sequence.keeps_scores ? partial.exponentials : buffer;
    compute_logits<W>(pool, panels, stride / LANES, base, queries, head_dim, group, exponentials, stride);
    for (int g = 0; g < group; ++g) {
        float* row = exponentials + g * stride;
        if (shape.window > 0) mask_window(pool, panels, slots, base, sequence.start - shape.window, row);
        exponentiate(row, slots, partial.largest[g], partial.total[g]);
    }
    const float* weights = exponentials;
    if constexpr (std::is_same_v<W, int8_t>) {
        float* scaled = buffer + (sequence.keeps_scores ? 0 : group * stride);
        scale_weights(pool, panels, slots, base, exponentials, stride, group, scaled);
        weights = scaled;
    }
    std::fill(partial.output, partial.output + group * head_dim, 0.0f);
    const Ahead ahead = next == nullptr ? Ahead{}
                                        : Ahead{step.panels_of(step.sequences[next->sequence]) + next->begin / LANES,
                                                padded(next->end - next->begin) / LANES,
                                                pool.panel(shape.layer, next->head, 0)};
    add_values<W>(pool, panels, slots, base, weights, stride, group, partial.output, ahead);
}

// Queries [begin, end) of a strip, and the slots up to the last one's own: those that they may see.
struct Tile {
    const Step& step;
    const Task& task;
    const Pool& pool;
    const LayerShape& shape;
    int begin, end;

    const Sequence& sequence() const { return step.sequences[task.sequence]; }
    const int32_t* panels() const { return step.panels_of(sequence()); }
    long base() const { return pool.panel(shape.layer, task.head, 0); }
    int rows() const { return (end - begin) * step.group_size; }
    int slots() const { return sequence().slots_before() + end; }
    int seen(int row) const { return sequence().slots_before() + begin + row / step.group_size + 1; }
    const float* query(const float* qkv, int row) const { return qkv + token(row) * shape.stride + head(row); }
    float* target(float* out, int row) const {
        return out + token(row) * shape.num_heads * pool.head_dim + head(row);
    }
    // Hide from a row of logits what is outside the row's window.
    void mask(int row, float* logits) const {
        if (shape.window == 0) return;
        const int oldest_hidden = sequence().start + begin + row / step.group_size - shape.window;
        mask_window(pool, panels(), seen(row), base(), oldest_hidden, logits);
    }

  private:
    long token(int row) const { return sequence().first_token + begin + row / step.group_size; }
    long head(int row) const { return (long(task.head) * step.group_size + row % step.group_size) * pool.head_dim; }
};

void write_outputs(const Tile& tile, const float* output, const float* totals, float* out) {
    const int head_dim = tile.pool.head_dim;
    for (int row = 0; row < tile.rows(); ++row) {
        float* target = tile.target(out, row);
        const F16 inverse = splat(1.0f / totals[row]);
        for (int d = 0; d < head_dim; d += LANES) store(target + d, load(output + row * head_dim + d) * inverse);
    }
}

// Add to the strip's column sums what its slots received from a tile.
void add_received(const Tile& tile, const float* exponentials, long stride, const float* totals, float* column_sums) {
    const Sequence& sequence = tile.sequence();
    const int group = tile.step.group_size;
    for (int query = tile.begin; query < tile.end; ++query) {
        const float weight = sequence.query_weight(sequence.start + query);
        if (weight == 0.0f) continue;
        const int first_row = (query - tile.begin) * group;
        for (int i = 0; i < padded(tile.seen(first_row)); i += LANES) {
            F16 received = load(column_sums + i);
            for (int row = first_row; row < first_row + group; ++row)
                received = fma(load(exponentials + row * stride + i), splat(weight / totals[row]), received);
            store(column_sums + i, received);
        }
    }
}

// Call body with the tiles of a strip in order.
template <class Body>
void for_tiles(const Step& step, const Task& task, const Pool& pool, const LayerShape& shape, const Body& body) {
    const int start = step.sequences[task.sequence].start;
    for (int begin = task.begin, end; begin < task.end; begin = end) {
        end = std::min(task.end, begin + TILE - (start + begin) % TILE);
        body(Tile{step, task, pool, shape, begin, end});
    }
}

template <class W>
void prefill_tile(const Tile& tile, const float* qkv, float* buffer, float* column_sums, float* out) {
    const Pool& pool = tile.pool;
    const int head_dim = pool.head_dim, rows = tile.rows(), slots = tile.slots(), stride = padded(slots);
    const int32_t* panels = tile.panels();
    const long base = tile.base();
    float* queries = buffer;
    float* output = queries + rows * head_dim;
    float* exponentials = output + rows * head_dim;
    float* scaled = exponentials + long(rows) * stride;
    float totals[TILE * MAX_GROUP];
    for (int row = 0; row < rows; ++row) {
        const float* query = tile.query(qkv, row);
        std::copy(query, query + head_dim, queries + row * head_dim);
    }
    compute_logits<W>(pool, panels, stride / LANES, base, queries, head_dim, rows, exponentials, stride);
    for (int row = 0; row < rows; ++row) {
        const int seen = tile.seen(row);
        float* logits = exponentials + long(row) * stride;
        tile.mask(row, logits);
        float most;
        exponentiate(logits, seen, most, totals[row]);
        std::fill(logits + padded(seen), logits + stride, 0.0f);
    }
    const float* weights = exponentials;
    if constexpr (std::is_same_v<W, int8_t>) {
        scale_weights(pool, panels, slots, base, exponentials, stride, rows, scaled);
        weights = scaled;
    }
    std::fill(output, output + rows * head_dim, 0.0f);
    add_values<W>(pool, panels, slots, base, weights, stride, rows, output);
    write_outputs(tile, output, totals, out);
    if (tile.sequence().keeps_scores) add_received(tile, exponentials, stride, totals, column_sums);
}

template <class W>
void prefill_strip(const Step& step, const Task& task, const Pool& pool, const LayerShape& shape, const float* qkv,
                   float* buffer, float* column_sums, float* out) {
    for_tiles(step, task, pool, shape,
              [&](const Tile& tile) { prefill_tile<W>(tile, qkv, buffer, column_sums, out); });
}

#if defined(KVORUM_PAIR_DOTS)

// Turn a row of base-2 logits into exponentials of their distance to the largest, rounded to weights[0, end), and left
// in float32 where they are kept; what is behind `slots` becomes 0. Returns their sum, before rounding.
float exponentiate_to_bf16(float* row, int slots, int end, bool kept, uint16_t* weights) {
    const int last = padded(slots);
    std::fill(row + slots, row + last, -INFINITE);
    F16 most = splat(-INFINITE);
    for (int i = 0; i < last; i += LANES) most = max(most, load(row + i));
    const F16 shift = splat(largest(most));
    F16 sums = zero();
    for (int i = 0; i < last; i += LANES) {
        const F16 e = exp2_nonpositive(load(row + i) - shift);
        if (kept) store(row + i, e);
        store_bf16(weights + i, e);
        sums = sums + e;
    }
    std::fill(weights + last, weights + end, uint16_t(0));
    return sum(sums);
}

// A tile whose products are of bf16 pairs: K and V as they are in the pool, queries and exponentials rounded.
void prefill_tile_in_pairs(const Tile& tile, const PairedSlots& paired, const float* qkv, Cutter cutter,
                           float* column_sums, float* out) {
    const int head_dim = tile.pool.head_dim, rows = tile.rows(), stride = padded(tile.slots());
    const bool keeps_scores = tile.sequence().keeps_scores;
    uint16_t* queries = cutter.take<uint16_t>(long(rows) * head_dim);
    float* output = cutter.take<float>(long(rows) * head_dim);
    uint16_t* weights = cutter.take<uint16_t>(long(rows) * stride);
    float* exponentials = cutter.take<float>(long(rows) * stride);
    float totals[TILE * MAX_GROUP];
    for (int row = 0; row < rows; ++row) {
        const float* query = tile.query(qkv, row);
        for (int d = 0; d < head_dim; d += LANES)
            store_bf16(queries + row * head_dim + d, load(query + d) * splat(1.44269504088896341f));
    }
    multiply_pairs<false>(queries, head_dim, rows, head_dim, paired.keys(), stride, exponentials, stride);
    for (int row = 0; row < rows; ++row) {
        float* logits = exponentials + long(row) * stride;
        tile.mask(row, logits);
        totals[row] = exponentiate_to_bf16(logits, tile.seen(row), stride, keeps_scores, weights + long(row) * stride);
    }
    std::fill(output, output + rows * head_dim, 0.0f);
    for (int first = 0; first < stride; first += VALUE_PANELS * LANES)
        multiply_pairs<true>(weights + first, stride, rows, std::min(VALUE_PANELS * LANES, stride - first),
                             paired.values(first), head_dim, output, head_dim);
    write_outputs(tile, output, totals, out);
    if (keeps_scores) add_received(tile, exponentials, stride, totals, column_sums);
}

template <>
void prefill_strip<uint16_t>(const Step& step, const Task& task, const Pool& pool, const LayerShape& shape,
                             const float* qkv, float* buffer, float* column_sums, float* out) {
    const Sequence& sequence = step.sequences[task.sequence];
    Cutter cutter(buffer);
    const PairedSlots paired = pair_slots(pool, step.panels_of(sequence), sequence.slots_before() + task.end,
                                          pool.panel(shape.layer, task.head, 0), cutter);
    for_tiles(step, task, pool, shape, [&](const Tile& tile) {
        prefill_tile_in_pairs(tile, paired, qkv, cutter, column_sums, out);   // each cuts the rest anew
    });
}

#endif

template <class W>
void prefill_task(const Step& step, const Task& task, const Pool& pool, const LayerShape& shape, const float* qkv,
                  float* scratch, float* buffer, float* out) {
    const Sequence& sequence = step.sequences[task.sequence];
    float* column_sums = scratch + task.scratch;
    if (sequence.keeps_scores) std::fill(column_sums, column_sums + padded(sequence.slots_before() + task.end), 0.0f);
    prefill_strip<W>(step, task, pool, shape, qkv, buffer, column_sums, out);
}

// Score slots [begin, end) by what they received, received(first) for 16 of them; note the lowest where victims are due.
template <class Received>
void update_scores(const Step& step, const Sequence& sequence, int begin, int end, const Pool& pool, long base,
                   const Received& received, Lowest& lowest) {
    const int32_t* panels = step.panels_of(sequence);
    const F16 decay = splat(sequence.decay == 1.0 ? 1.0f : float(std::pow(sequence.decay, sequence.num_tokens)));
    const int last = padded(sequence.num_slots) / LANES - 1;
    lowest.clear();
    for (int first = begin, panel = begin / LANES; first < end; first += LANES, ++panel) {
        const long at = (base + panels[panel]) * LANES, soon = (base + panels[std::min(panel + 16, last)]) * LANES;
        __builtin_prefetch(pool.scores + soon, 1, 3);
        store(pool.scores + at, fma(load(pool.scores + at), decay, received(first)));
        if (!sequence.choose_victims) continue;
        __builtin_prefetch(pool.positions + soon, 0, 3);
        lowest.offer(sequence, load(pool.scores + at), to_float(pool.positions + at), first, sequence.num_slots - first);
    }
}

// Score the slots of a decode task whose finish is combined.
void score_decode(const Step& step, const Task& task, const Pool& pool, const LayerShape& shape, float* scratch) {
    const Sequence& sequence = step.sequences[task.sequence];
    const int group = step.group_size, stride = padded(task.end - task.begin);
    const Partial partial(scratch + task.scratch, group, pool.head_dim);
    const float weight = sequence.query_weight(sequence.start);
    const auto received = [&](int first) {
        F16 sum = zero();
        for (int g = 0; g < group; ++g)
            sum = fma(load(partial.exponentials + g * stride + first - task.begin), splat(partial.factor[g] * weight), sum);
        return sum;
    };
    update_scores(step, sequence, task.begin, task.end, pool, pool.panel(shape.layer, task.head, 0), received,
                  *partial.lowest);
}

// Combine the tasks of a finish; each keeps how much its exponentials count in the whole softmax.
void combine_decode(const Step& step, const Finish& finish, const Pool& pool, const LayerShape& shape, float* scratch,
                    float* out) {
    const Sequence& sequence = step.sequences[finish.sequence];
    const int group = step.group_size, head_dim = pool.head_dim;
    const auto partial = [&](int task) {
        return Partial(scratch + step.decodes[finish.first_task + task].scratch, group, head_dim);
    };
    for (int g = 0; g < group; ++g) {
        float most = -INFINITE, total = 0.0f;
        for (int task = 0; task < finish.num_tasks; ++task) most = std::max(most, partial(task).largest[g]);
        for (int task = 0; task < finish.num_tasks; ++task) {
            const Partial part = partial(task);
            part.factor[g] = std::exp(part.largest[g] - most);
            total += part.factor[g] * part.total[g];
        }
        for (int task = 0; task < finish.num_tasks; ++task) partial(task).factor[g] /= total;
        float* target = out + (long(sequence.first_token) * shape.num_heads + finish.head * group + g) * head_dim;
        for (int d = 0; d < head_dim; d += LANES) {
            F16 acc = zero();
            for (int task = 0; task < finish.num_tasks; ++task)
                acc = fma(load(partial(task).output + g * head_dim + d), splat(partial(task).factor[g]), acc);
            store(target + d, acc);
        }
    }
}

void choose_victim(const Step& step, const Finish& finish, const Pool& pool, int layer, float* scratch) {
    const Sequence& sequence = step.sequences[finish.sequence];
    if (!sequence.choose_victims) return;
    Lowest lowest;
    lowest.clear();
    for (int task = 0; task < finish.num_tasks; ++task)
        lowest.merge(*Partial(scratch + step.decodes[finish.first_task + task].scratch, step.group_size, pool.head_dim).lowest);
    pool.victim(layer, sequence.row, finish.head) = lowest.victim();
}

void finish_prefill(const Step& step, const Finish& finish, const Pool& pool, const LayerShape& shape,
                    const float* scratch) {
    const Sequence& sequence = step.sequences[finish.sequence];
    if (!sequence.keeps_scores) return;
    Lowest lowest;
    const auto received = [&](int first) {
        F16 sum = zero();
        for (int i = 0; i < finish.num_tasks; ++i) {
            const Task& task = step.prefills[finish.first_task + i];
            if (first < padded(sequence.slots_before() + task.end)) sum = sum + load(scratch + task.scratch + first);
        }
        return sum;
    };
    update_scores(step, sequence, 0, sequence.num_slots, pool, pool.panel(shape.layer, finish.head, 0), received, lowest);
    if (sequence.choose_victims) pool.victim(shape.layer, sequence.row, finish.head) = lowest.victim();
}

}  // namespace

void plan_tasks(Step& step, const Pool& pool) {
    long scratch = 0, buffer = 0;
    const int group = step.group_size, head_dim = pool.head_dim;
    std::vector<long> costs;
    for (int index = 0; index < int(step.sequences.size()); ++index) {
        const Sequence& sequence = step.sequences[index];
        const bool decodes = sequence.num_tokens == 1;
        auto& tasks = decodes ? step.decodes : step.prefills;
        auto& finishes = decodes ? step.decode_finishes : step.prefill_finishes;
        for (int head = 0; head < pool.num_kv_heads; ++head) {
            Finish finish{index, head, int(tasks.size()), 0};
            const int count = decodes ? sequence.num_slots : sequence.num_tokens;
            for (int begin = 0, end; begin < count; begin = end) {
                end = std::min(count, decodes ? begin + CHUNK : begin + STRIP - (sequence.start + begin) % STRIP);
                tasks.push_back({index, head, begin, end, int(finishes.size()), scratch});
                const int slots = decodes ? end - begin : sequence.slots_before() + end;
                const int rows = decodes ? group : TILE * group;
                if (decodes) {
                    scratch += Partial::size(group, head_dim, slots, sequence.keeps_scores);
                } else {
                    costs.push_back(long(slots) * (end - begin));
                    if (sequence.keeps_scores) scratch += padded(slots);
                }
                scratch = (scratch + LANES - 1) / LANES * LANES;
                const bool in_pairs = HAS_PAIR_DOTS && !decodes && pool.format == KV_BF16;
                buffer = std::max(buffer, 2 * rows * (long(head_dim) + padded(slots))
                                              + (in_pairs ? paired_size(head_dim, padded(slots)) : 0));
            }
            finish.num_tasks = int(tasks.size()) - finish.first_task;
            finishes.push_back(finish);
        }
    }
    step.order.resize(step.prefills.size());
    std::iota(step.order.begin(), step.order.end(), 0);
    std::stable_sort(step.order.begin(), step.order.end(), [&](int a, int b) { return costs[a] > costs[b]; });
    step.scratch_size = scratch;
    step.buffer_size = buffer;
}

void append(const Member& member, const Step& step, const Pool& pool, const LayerShape& shape, const float* qkv) {
    int begin, end;
    member.share(step.num_tokens, begin, end);
    for (const Sequence& sequence : step.sequences) {
        const int32_t* panels = step.panels_of(sequence);
        const int first = std::max(0, begin - sequence.first_token);
        const int last = std::min(sequence.num_tokens, end - sequence.first_token);
        for (int token = first; token < last; ++token) {
            const float* keys = qkv + (sequence.first_token + token) * shape.stride + long(shape.num_heads) * pool.head_dim;
            for (int head = 0; head < pool.num_kv_heads; ++head) {
                int slot = sequence.slots_before() + token;
                if (sequence.replace) {
                    slot = pool.victim(shape.layer, sequence.row, head);
                    pool.victim(shape.layer, sequence.row, head) = NO_VICTIM;
                }
                const float* key = keys + long(head) * pool.head_dim;
                const float* value = key + long(pool.num_kv_heads) * pool.head_dim;
                const long panel = pool.panel(shape.layer, head, panels[slot / LANES]);
                with_kv_type(pool.format, [&](auto* type) {
                    write_slot<std::remove_pointer_t<decltype(type)>>(pool, panel, slot % LANES, key, value);
                });
                pool.positions[panel * LANES + slot % LANES] = sequence.start + token;
                pool.scores[panel * LANES + slot % LANES] = 0.0f;
            }
        }
    }
}

std::vector<Part> attend(const Member& member, Step& step, const Pool& pool, const LayerShape& shape, const float* qkv,
                         float* scratch, float* buffer, float* out) {
    const int count = int(step.prefills.size());
    std::vector<Part> decoded;
    with_kv_type(pool.format, [&](auto* type) {
        using W = std::remove_pointer_t<decltype(type)>;
        for (int turn; (turn = step.next_prefill.fetch_add(1, std::memory_order_relaxed)) < count;)
            prefill_task<W>(step, step.prefills[step.order[turn]], pool, shape, qkv, scratch, buffer, out);
        member.take_parts(int(step.decodes.size()), 1, [&](int begin, int end) {
            decoded.push_back({begin, end});
            for (int task = begin; task < end; ++task)
                decode_task<W>(step, step.decodes[task], task + 1 < end ? &step.decodes[task + 1] : nullptr, pool, shape,
                               qkv, scratch, buffer);
        });
    });
    return decoded;
}

void finish(const Member& member, const Step& step, const Pool& pool, const LayerShape& shape, float* scratch, float* out) {
    int begin, end;
    member.share(int(step.decode_finishes.size()), begin, end);
    for (int i = begin; i < end; ++i) combine_decode(step, step.decode_finishes[i], pool, shape, scratch, out);
    member.share(int(step.prefill_finishes.size()), begin, end);
    for (int i = begin; i < end; ++i) finish_prefill(step, step.prefill_finishes[i], pool, shape, scratch);
}

void score(const std::vector<Part>& decoded, const Step& step, const Pool& pool, const LayerShape& shape, float* scratch) {
    for (const Part& part : decoded)
        for (int task = part.begin; task < part.end; ++task)
            if (step.sequences[step.decodes[task].sequence].keeps_scores)
                score_decode(step, step.decodes[task], pool, shape, scratch);
}

void choose_victims(const Member& member, const Step& step, const Pool& pool, const LayerShape& shape, float* scratch) {
    int begin, end;
    member.share(int(step.decode_finishes.size()), begin, end);
    for (int i = begin; i < end; ++i) choose_victim(step, step.decode_finishes[i], pool, shape.layer, scratch);
}

}  // namespace kvorum
