// The C interface that library.py binds. Nothing is checked here: the caller has.
#include <memory>

#include "decoder.h"
#include "pack.h"

using namespace kvorum;

extern "C" {

// Sizes of the structures that both sides declare: Linear, Layer, Config, Pool, Sequence.
void kvorum_struct_sizes(int64_t* sizes) {
    sizes[0] = sizeof(Linear), sizes[1] = sizeof(Layer), sizes[2] = sizeof(Config), sizes[3] = sizeof(Pool);
    sizes[4] = sizeof(Sequence);
}

const char* kvorum_simd() {
#if defined(KVORUM_AVX512)
    return "avx512";
#elif defined(KVORUM_AVX2)
    return "avx2";
#else
    return "portable";
#endif
}

int64_t kvorum_panel_bytes(int format, int64_t num_inputs) { return panel_bytes(format, num_inputs); }

void kvorum_pack_floats(int format, const float* source, int64_t rows, int64_t inputs, uint8_t* panels, int64_t first,
                        int64_t step) {
    pack_floats(format, source, rows, inputs, panels, first, step);
}

void kvorum_pack_gguf(int format, const uint8_t* source, int64_t rows, int64_t inputs, uint8_t* panels, int64_t first,
                      int64_t step) {
    pack_gguf(format, source, rows, inputs, panels, first, step);
}

// Dequantise the first `rows` rows of a packed weight.
void kvorum_unpack_rows(const Linear* weight, int64_t rows, float* out) {
    for (int64_t row = 0; row < rows; ++row) unpack_row(*weight, row, out + row * weight->num_inputs);
}

Decoder* kvorum_decoder_new(const Config* config, const Layer* layers, const Linear* embedding, const Linear* head,
                            const float* final_norm) {
    return new Decoder{*config, {layers, layers + config->num_layers}, *embedding, *head, final_norm, {}};
}

void kvorum_decoder_delete(Decoder* decoder) { delete decoder; }

// tables: the panels of all sequences, one after the other; rotary: cos and sin by turns, [num_tokens, head_dim] each.
Step* kvorum_step_new(const Decoder* decoder, const Pool* pool, const Sequence* sequences, int num_sequences,
                      const int32_t* tables, int64_t table_size, const float* const* rotary, int num_rotary) {
    auto step = std::make_unique<Step>();
    step->sequences.assign(sequences, sequences + num_sequences);
    step->panels.assign(tables, tables + table_size);
    step->group_size = decoder->config.num_heads / decoder->config.num_kv_heads;
    for (const Sequence& sequence : step->sequences) {
        const int begin = step->num_tokens, end = begin + sequence.num_tokens;
        const bool as_bytes = HAS_BYTE_DOTS && decoder->config.byte_prompts && sequence.num_tokens > 1;
        if (!step->runs.empty() && step->runs.back().as_bytes == as_bytes) step->runs.back().end = end;
        else step->runs.push_back({begin, end, as_bytes});
        step->num_tokens = end;
    }
    for (int i = 0; i < num_rotary; ++i) {
        step->cosines.push_back(rotary[2 * i]);
        step->sines.push_back(rotary[2 * i + 1]);
    }
    plan_tasks(*step, *pool);
    return step.release();
}

void kvorum_step_delete(Step* step) { delete step; }

void kvorum_embed(Decoder* decoder, const int64_t* token_ids, int count, float* hidden) {
    run_team(decoder->config.num_threads,
             [&](const Member& member) { embed(member, *decoder, token_ids, count, hidden); });
}

void kvorum_attention(Decoder* decoder, Step* step, const Pool* pool, int layer, const float* hidden, float* partial) {
    decoder->work.reserve(decoder->config, step->num_tokens, step);
    run_team(decoder->config.num_threads,
             [&](const Member& member) { attention_half(member, *decoder, layer, *step, *pool, hidden, partial); });
}

void kvorum_mlp(Decoder* decoder, const Step* step, int layer, const float* hidden, float* partial) {
    decoder->work.reserve(decoder->config, step->num_tokens, nullptr);
    run_team(decoder->config.num_threads,
             [&](const Member& member) { mlp_half(member, *decoder, layer, *step, hidden, partial); });
}

void kvorum_add_residual(Decoder* decoder, int layer, int after_mlp, float* hidden, const float* partial, int rows) {
    run_team(decoder->config.num_threads, [&](const Member& member) {
        add_residual(member, *decoder, layer, after_mlp != 0, hidden, partial, rows);
    });
}

void kvorum_forward(Decoder* decoder, Step* step, const Pool* pool, const int64_t* token_ids, float* hidden) {
    decoder->work.reserve(decoder->config, step->num_tokens, step);
    run_team(decoder->config.num_threads,
             [&](const Member& member) { forward(member, *decoder, *step, *pool, token_ids, hidden); });
}

void kvorum_logits(Decoder* decoder, const float* hidden, int rows, float* logits) {
    decoder->work.reserve(decoder->config, rows, nullptr);
    run_team(decoder->config.num_threads,
             [&](const Member& member) { output_head(member, *decoder, hidden, rows, logits); });
}

// Copy slots between a pool and arrays: keys, values [num_layers, num_kv_heads, count, head_dim]. Reads take the
// sequence's slots [num_layers, num_kv_heads, count], writes go to its first slots.
void kvorum_read_slots(const Pool* pool, const int32_t* panels, const int64_t* slots, int64_t count, float* keys,
                       float* values) {
    for (long pair = 0; pair < long(pool->num_layers) * pool->num_kv_heads; ++pair)
        for (long i = 0; i < count; ++i) {
            const long slot = slots[pair * count + i];
            const long panel = pair * pool->num_panels + panels[slot / LANES], at = (pair * count + i) * pool->head_dim;
            with_kv_type(pool->format, [&](auto* type) {
                read_slot<std::remove_pointer_t<decltype(type)>>(*pool, panel, int(slot % LANES), keys + at, values + at);
            });
        }
}

void kvorum_write_slots(const Pool* pool, const int32_t* panels, int64_t count, const float* keys, const float* values) {
    for (long pair = 0; pair < long(pool->num_layers) * pool->num_kv_heads; ++pair)
        for (long slot = 0; slot < count; ++slot) {
            const long panel = pair * pool->num_panels + panels[slot / LANES], at = (pair * count + slot) * pool->head_dim;
            with_kv_type(pool->format, [&](auto* type) {
                write_slot<std::remove_pointer_t<decltype(type)>>(*pool, panel, int(slot % LANES), keys + at, values + at);
            });
        }
}

}  // extern "C"
