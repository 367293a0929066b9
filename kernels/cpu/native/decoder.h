// The decoder, half a layer at a time or whole; each function runs on every member of a team.
#pragma once

#include "attention.h"

namespace kvorum {

// Null norms and biases are absent. Norm weights have the model's offset added already.
struct Layer {
    Linear qkv;       // rows of q, k, v one after the other
    Linear output;
    Linear gate_up;   // panels of gate and up by turns
    Linear down;
    const float *attn_norm, *mlp_norm, *post_attn_norm, *post_mlp_norm, *q_norm, *k_norm;
    int32_t rotary;   // which of the step's rotary tables
    int32_t window;   // 0: none
};

struct Config {
    int32_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, num_layers;
    int32_t gelu;     // tanh-approximated GELU instead of SiLU
    int32_t num_threads;
    float eps, attention_scale, embedding_scale;
    int32_t byte_prompts;   // prompts as bytes before quantised weights, with AVX2 or AVX512-VNNI
};

// What the halves hand on inside themselves; grows to the largest step.
struct Workspace {
    std::vector<float> normed, qkv, attended, gated, partial, scratch;
    std::vector<std::vector<float>> buffers;
    QuantisedRows quantised;

    void reserve(const Config& config, long rows, const Step* step);
};

struct Decoder {
    Config config;
    std::vector<Layer> layers;
    Linear embedding, head;
    const float* final_norm;
    Workspace work;
};

void embed(const Member& member, const Decoder& decoder, const int64_t* token_ids, int count, float* hidden);

// partial: [num_tokens, hidden_size], this rank's part.
void attention_half(const Member& member, Decoder& decoder, int layer, Step& step, const Pool& pool, const float* hidden,
                    float* partial);

void mlp_half(const Member& member, Decoder& decoder, int layer, const Step& step, const float* hidden, float* partial);

// hidden += partial, through the post-norm where there is one; this member's rows.
void add_residual(const Member& member, const Decoder& decoder, int layer, bool after_mlp, float* hidden,
                  const float* partial, int rows);

// All layers; hidden is overwritten.
void forward(const Member& member, Decoder& decoder, Step& step, const Pool& pool, const int64_t* token_ids, float* hidden);

// logits: [rows, this rank's vocabulary].
void output_head(const Member& member, Decoder& decoder, const float* hidden, int rows, float* logits);

}  // namespace kvorum
