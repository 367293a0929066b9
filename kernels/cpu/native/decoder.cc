#include "decoder.h"

#include "pack.h"

namespace kvorum {
namespace {

// out = x / rms(x) * weight over one row.
void rms_norm(const float* x, const float* weight, long size, float eps, float* out) {
    F16 squares = zero();
    long i = 0;
    for (; i + LANES <= size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < size; ++i) total += x[i] * x[i];
    const float inverse = 1.0f / std::sqrt(total / float(size) + eps);
    for (i = 0; i < size; ++i) out[i] = x[i] * inverse * weight[i];
}

// Rotate one head's halves by cos and sin, then scale.
void rotate(float* head, const float* cosine, const float* sine, int head_dim, float scale) {
    const int half = head_dim / 2;
    for (int i = 0; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        head[i] = (first * cosine[i] - second * sine[i]) * scale;
        head[i + half] = (second * cosine[i] + first * sine[i]) * scale;
    }
}

// Norm this member's rows into the workspace, quantised beside where the weight asks for it; a barrier must follow.
Rows norm_rows(const Member& member, Decoder& decoder, const float* hidden, const float* norm,
               const std::vector<Run>& runs, const Linear& weight) {
    const int size = decoder.config.hidden_size;
    float* normed = decoder.work.normed.data();
    int begin, end;
    member.share(runs.back().end, begin, end);
    for (long row = begin; row < end; ++row)
        rms_norm(hidden + row * size, norm, size, decoder.config.eps, normed + row * size);
    return decoder.work.quantised.fill(member, normed, size, runs, size, is_quantised(weight));
}

// Rows that every member has written already, quantised where the weight asks for it.
Rows take_rows(const Member& member, Decoder& decoder, const float* values, long stride, const std::vector<Run>& runs,
               const Linear& weight) {
    const Rows taken =
        decoder.work.quantised.fill(member, values, stride, runs, weight.num_inputs, is_quantised(weight));
    if (is_quantised(weight)) member.barrier();
    return taken;
}

void rotate_tokens(const Member& member, const Decoder& decoder, const Layer& layer, const Step& step, long stride,
                   float* qkv) {
    const Config& config = decoder.config;
    const int head_dim = config.head_dim;
    int begin, end;
    member.share(step.num_tokens, begin, end);
    for (long token = begin; token < end; ++token) {
        const float* cosine = step.cosines[layer.rotary] + token * head_dim;
        const float* sine = step.sines[layer.rotary] + token * head_dim;
        for (int index = 0; index < config.num_heads + config.num_kv_heads; ++index) {
            const bool is_query = index < config.num_heads;
            float* head = qkv + token * stride + long(index) * head_dim;
            const float* norm = is_query ? layer.q_norm : layer.k_norm;
            if (norm != nullptr) rms_norm(head, norm, head_dim, config.eps, head);
            rotate(head, cosine, sine, head_dim, is_query ? config.attention_scale : 1.0f);
        }
    }
}

KVORUM_INLINE F16 activate(F16 x, bool gelu) {
    F16 exponent = zero() - x;
    if (gelu) {
        const F16 cubic = fma(x * x * x, splat(0.044715f), x);
        exponent = cubic * splat(-2.0f * 0.7978845608028654f);
    }
    return x / (splat(1.0f) + exp(exponent));
}

void gate_up(const Member& member, const Decoder& decoder, const Linear& weight, const Rows& x, float* gated) {
    const long columns = decoder.config.intermediate_size;
    const bool gelu = decoder.config.gelu != 0;
    const auto sink = [&](long row, long panel, const auto& acc) {
        constexpr int R = std::extent_v<std::remove_reference_t<decltype(acc)>, 0>;
        constexpr int P = std::extent_v<std::remove_reference_t<decltype(acc)>, 1>;
        for (int p = 0; p + 1 < P; p += 2) {
            const float* bias = weight.bias == nullptr ? nullptr : weight.bias + (panel + p) * LANES;
            for (int r = 0; r < R; ++r) {
                const F16 gate = bias == nullptr ? acc[r][p] : acc[r][p] + load(bias);
                const F16 up = bias == nullptr ? acc[r][p + 1] : acc[r][p + 1] + load(bias + LANES);
                store_columns(gated + (row + r) * columns, (panel + p) / 2 * LANES, columns, activate(gate, gelu) * up);
            }
        }
    };
    member.take_parts(num_panels(columns) * 2, panels_at_once(weight, x),
                      [&](int begin, int end) { product<2>(weight, x, begin, end, sink); });
}

template <class T>
void grow(std::vector<T>& vector, long size) {
    if (long(vector.size()) < size) vector.resize(size);
}

}  // namespace

void Workspace::reserve(const Config& config, long rows, const Step* step) {
    const long heads = long(config.num_heads) * config.head_dim, kv_heads = long(config.num_kv_heads) * config.head_dim;
    grow(normed, rows * config.hidden_size);
    grow(gated, rows * config.intermediate_size);
    quantised.reserve(rows, std::max<long>({config.hidden_size, config.intermediate_size, heads}));
    if (step == nullptr) return;
    grow(qkv, rows * (heads + 2 * kv_heads));
    grow(attended, rows * heads);
    grow(partial, rows * config.hidden_size);
    grow(scratch, step->scratch_size);
    grow(buffers, config.num_threads);
    for (auto& buffer : buffers) grow(buffer, step->buffer_size);
}

void embed(const Member& member, const Decoder& decoder, const int64_t* token_ids, int count, float* hidden) {
    int begin, end;
    member.share(count, begin, end);
    const long size = decoder.config.hidden_size;
    for (long token = begin; token < end; ++token) {
        unpack_row(decoder.embedding, token_ids[token], hidden + token * size);
        for (long i = 0; i < size; ++i) hidden[token * size + i] *= decoder.config.embedding_scale;
    }
}

void attention_half(const Member& member, Decoder& decoder, int index, Step& step, const Pool& pool, const float* hidden,
                    float* partial) {
    const Config& config = decoder.config;
    const Layer& layer = decoder.layers[index];
    const LayerShape shape{index, layer.window, config.num_heads,
                           long(config.num_heads + 2 * config.num_kv_heads) * config.head_dim};
    const long heads = long(config.num_heads) * config.head_dim;
    float *qkv = decoder.work.qkv.data(), *attended = decoder.work.attended.data(), *scratch = decoder.work.scratch.data();
    const Rows normed = norm_rows(member, decoder, hidden, layer.attn_norm, step.runs, layer.qkv);
    if (member.index == 0) step.next_prefill = 0;
    member.barrier();
    linear(member, layer.qkv, normed, qkv, shape.stride);
    member.barrier();
    rotate_tokens(member, decoder, layer, step, shape.stride, qkv);
    append(member, step, pool, shape, qkv);
    member.barrier();
    const std::vector<Part> decoded =
        attend(member, step, pool, shape, qkv, scratch, decoder.work.buffers[member.index].data(), attended);
    member.barrier();
    finish(member, step, pool, shape, scratch, attended);
    member.barrier();
    score(decoded, step, pool, shape, scratch);
    const Rows taken = take_rows(member, decoder, attended, heads, step.runs, layer.output);
    linear(member, layer.output, taken, partial, config.hidden_size);
    member.barrier();
    choose_victims(member, step, pool, shape, scratch);
}

void mlp_half(const Member& member, Decoder& decoder, int index, const Step& step, const float* hidden, float* partial) {
    const Layer& layer = decoder.layers[index];
    float* gated = decoder.work.gated.data();
    const Rows normed = norm_rows(member, decoder, hidden, layer.mlp_norm, step.runs, layer.gate_up);
    member.barrier();
    gate_up(member, decoder, layer.gate_up, normed, gated);
    member.barrier();
    const Rows taken = take_rows(member, decoder, gated, decoder.config.intermediate_size, step.runs, layer.down);
    linear(member, layer.down, taken, partial, decoder.config.hidden_size);
    member.barrier();
}

void add_residual(const Member& member, const Decoder& decoder, int index, bool after_mlp, float* hidden,
                  const float* partial, int rows) {
    const Layer& layer = decoder.layers[index];
    const float* norm = after_mlp ? layer.post_mlp_norm : layer.post_attn_norm;
    const long size = decoder.config.hidden_size;
    std::vector<float> normed(norm == nullptr ? 0 : size);
    int begin, end;
    member.share(rows, begin, end);
    for (long row = begin; row < end; ++row) {
        const float* added = partial + row * size;
        if (norm != nullptr) {
            rms_norm(added, norm, size, decoder.config.eps, normed.data());
            added = normed.data();
        }
        for (long i = 0; i < size; ++i) hidden[row * size + i] += added[i];
    }
}

void forward(const Member& member, Decoder& decoder, Step& step, const Pool& pool, const int64_t* token_ids, float* hidden) {
    float* partial = decoder.work.partial.data();
    embed(member, decoder, token_ids, step.num_tokens, hidden);
    // A member norms the rows that it embedded or added to: no barrier is needed between.
    for (int layer = 0; layer < decoder.config.num_layers; ++layer) {
        attention_half(member, decoder, layer, step, pool, hidden, partial);
        add_residual(member, decoder, layer, false, hidden, partial, step.num_tokens);
        mlp_half(member, decoder, layer, step, hidden, partial);
        add_residual(member, decoder, layer, true, hidden, partial, step.num_tokens);
    }
}

void output_head(const Member& member, Decoder& decoder, const float* hidden, int rows, float* logits) {
    const std::vector<Run> runs{{0, rows, false}};
    const Rows normed = norm_rows(member, decoder, hidden, decoder.final_norm, runs, decoder.head);
    member.barrier();
    linear(member, decoder.head, normed, logits, decoder.head.num_outputs);
}

}  // namespace kvorum
