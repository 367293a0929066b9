// Paged attention with scores and victims: append, attend, finish, score, choose_victims. Every member of the team
// calls each in this order, with a barrier after each.
#pragma once

#include "step.h"

namespace kvorum {

struct LayerShape {
    int layer;
    int window;       // a query at p sees positions > p - window; 0 is no window
    int num_heads;
    long stride;      // of a token's row [q of all heads | k of all KV heads | v of all KV heads]
};

// Cut attention into tasks and lay out their scratch.
void plan_tasks(Step& step, const Pool& pool);

// Write K and V of this member's tokens, rotated and normed already, into their slots; position and score with them.
void append(const Member& member, const Step& step, const Pool& pool, const LayerShape& shape, const float* qkv);

// Decode tasks [begin, end).
struct Part {
    int begin, end;
};

// Attend, task by task; queries are rotated and scaled. Decode leaves partial results in scratch [scratch_size], prefill
// writes out [num_tokens, num_heads * head_dim]. buffer [buffer_size] is this member's own. Over bf16 K and V, prefill
// rounds queries and exponentials to bf16 where the processor has dot products of it; sums stay float32. Returns what
// this member has decoded.
std::vector<Part> attend(const Member& member, Step& step, const Pool& pool, const LayerShape& shape, const float* qkv,
                         float* scratch, float* buffer, float* out);

// Combine what decode tasks left; score what was prefilled and choose its victims.
void finish(const Member& member, const Step& step, const Pool& pool, const LayerShape& shape, float* scratch, float* out);

// Score the slots of what this member has decoded, whose exponentials it has in its cache.
void score(const std::vector<Part>& decoded, const Step& step, const Pool& pool, const LayerShape& shape, float* scratch);

// Choose the victims of decode.
void choose_victims(const Member& member, const Step& step, const Pool& pool, const LayerShape& shape, float* scratch);

}  // namespace kvorum
