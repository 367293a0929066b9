// One engine step as the layers need it: where each sequence's slots are, and attention cut into tasks.
#pragma once

#include <atomic>

#include "pool.h"

namespace kvorum {

constexpr int CHUNK = 256;   // slots that a decode task attends to; fixed, so that results do not depend on the threads
constexpr int STRIP = 64;    // queries of a prefill task, cut at multiples of STRIP positions
constexpr int TILE = 8;      // queries whose logits are in the cache together, cut likewise

// kernels.plan.SequenceStep and its EvictionRule; num_slots is the count after the step.
struct Sequence {
    double decay;
    int32_t row, start, num_tokens, num_slots;
    int32_t first_token;   // its first row among the step's tokens
    int32_t first_panel;   // where its panels begin in the step's table of panels
    int32_t replace, choose_victims, keeps_scores;
    int32_t recent_tokens, sink_tokens, by_age, per_lifetime, observe_from;

    int newest() const { return start + num_tokens - 1; }
    int slots_before() const { return num_slots - (replace ? 0 : num_tokens); }
    // What the query at a position counts for in the scores.
    float query_weight(int position) const {
        if (position < observe_from) return 0.0f;
        return decay == 1.0 ? 1.0f : float(std::pow(decay, newest() - position));
    }
};

// Attention of one KV head: decode over slots [begin, end), prefill for queries [begin, end).
struct Task {
    int sequence, head, begin, end;
    int finish;     // of which Finish it is a part
    long scratch;
};

// A (sequence, KV head): its first task in its list and how many there are.
struct Finish {
    int sequence, head, first_task, num_tasks;
};

struct Step {
    std::vector<Sequence> sequences;
    std::vector<int32_t> panels;
    std::vector<Run> runs;
    std::vector<Task> decodes, prefills;
    std::vector<int32_t> order;   // in which members take prefill tasks: the longest first
    std::vector<Finish> decode_finishes, prefill_finishes;
    long scratch_size = 0;   // floats that tasks leave for finishes
    long buffer_size = 0;    // floats that a member needs for itself
    std::vector<const float*> cosines, sines;   // for each rotary table: [num_tokens, head_dim]
    int num_tokens = 0;
    int group_size = 1;
    std::atomic<int> next_prefill{0};   // decode tasks are claimed from the team

    const int32_t* panels_of(const Sequence& sequence) const { return panels.data() + sequence.first_panel; }
};

}  // namespace kvorum
