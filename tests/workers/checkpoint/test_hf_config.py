"""config.json against what transformers makes of the same file."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding, Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvorum.kernels.spec import DecoderSpec, RopeSpec
from kvorum.kvstore.errors import CheckpointError
from kvorum.workers.checkpoint.fields import Fields
from kvorum.workers.checkpoint.hf_config import decoder_spec
from kvtest.checkpoints import ATTENTIONS, FAMILIES, tiny_model

# One unit in the last place of float32: powers are not rounded alike everywhere.
ONE_ULP = 2**-23

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
GEMMA3: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 32,
    "num_hidden_layers": 7,
    "sliding_window": 64,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
LLAMA3_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN_SCALING: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def spec_of(config: Mapping[str, object]) -> DecoderSpec:
    return decoder_spec(Fields("config.json", config))


def architecture(name: str, **changes: object) -> dict[str, object]:
    return {**LLAMA, "architectures": [name], **changes}


def assert_same_rope(rope: RopeSpec, inv_freq: torch.Tensor, attention_factor: float) -> None:
    assert rope.inv_freq == pytest.approx(inv_freq.tolist(), rel=ONE_ULP, abs=0)
    assert rope.attention_factor == attention_factor


class TestAgainstTransformers:
    @pytest.mark.parametrize("attention", ATTENTIONS)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_family_gets_the_shape_that_its_model_has(self, family: str, attention: str) -> None:
        num_heads, num_kv_heads = ATTENTIONS[attention]
        model = tiny_model(family, num_heads=num_heads, num_kv_heads=num_kv_heads)
        config: Any = model.config
        spec = spec_of({**json.loads(config.to_json_string(use_diff=True)), "architectures": [type(model).__name__]})
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (num_heads, num_kv_heads, config.head_dim)
        assert (spec.num_layers, spec.hidden_size, spec.intermediate_size) == (3, config.hidden_size, 64)
        assert (spec.vocab_size, spec.max_position, spec.rms_norm_eps) == (96, 256, 1e-6)
        for index, layer in enumerate(spec.layers):
            module: Any = model.get_submodule(f"model.layers.{index}.self_attn")
            window = config.sliding_window if family == "mistral" else getattr(module, "sliding_window", None)
            assert layer.sliding_window == window
            assert spec.attention_scale == module.scaling
            assert (spec.qkv_bias, spec.output_bias) == (module.q_proj.bias is not None, module.o_proj.bias is not None)
            assert spec.qk_norm == hasattr(module, "q_norm")

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_layer_turns_by_the_frequencies_of_its_kind(self, family: str) -> None:
        model = tiny_model(family, num_heads=4, num_kv_heads=2)
        config: Any = model.config
        spec = spec_of({**json.loads(config.to_json_string(use_diff=True)), "architectures": [type(model).__name__]})
        rotary: Any = model.get_submodule("model.rotary_emb")
        for index, layer in enumerate(spec.layers):
            prefix = f"{config.layer_types[index]}_" if family == "gemma3" else ""
            factor = getattr(rotary, f"{prefix}attention_scaling")
            assert_same_rope(layer.rope, getattr(rotary, f"{prefix}inv_freq"), factor)

    @pytest.mark.parametrize(
        "scaling",
        [
            {"rope_type": "default"},
            {"type": "linear", "factor": 3.0},
            {"rope_type": "linear", "factor": 3.0},
            LLAMA3_SCALING,
            {**LLAMA3_SCALING, "factor": 32.0, "original_max_position_embeddings": 4096},
            YARN_SCALING,
            {**YARN_SCALING, "truncate": False, "beta_fast": 16, "beta_slow": 2},
            {**YARN_SCALING, "attention_factor": 0.75},
            {**YARN_SCALING, "mscale": 1.5, "mscale_all_dim": 0.5},
            {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 8192},
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 2048},
        ],
        ids=lambda scaling: f"{scaling.get('rope_type', scaling.get('type'))}-{len(scaling)}",
    )
    @pytest.mark.parametrize("head_dim", [16, 80, 128])
    def test_scaled_frequencies_are_those_of_transformers_in_both_spellings(
        self, scaling: Mapping[str, object], head_dim: int
    ) -> None:
        old = {**LLAMA, "head_dim": head_dim, "rope_scaling": scaling}
        new = {**LLAMA, "head_dim": head_dim, "rope_parameters": {**scaling, "rope_theta": LLAMA["rope_theta"]}}
        new.pop("rope_theta")
        config: Any = LlamaConfig.from_dict(json.loads(json.dumps(old)))
        rotary: Any = LlamaRotaryEmbedding(config)
        for spelling in (old, new):
            rope = spec_of(spelling).layers[0].rope
            assert rope.inv_freq == pytest.approx(rotary.inv_freq.tolist(), rel=4 * ONE_ULP, abs=0)
            assert rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-15)

    def test_an_original_context_beside_the_parameters_counts(self) -> None:
        scaling = {"rope_type": "yarn", "factor": 4.0}
        inside = {**LLAMA, "rope_scaling": {**scaling, "original_max_position_embeddings": 2048}}
        outside = {**LLAMA, "rope_scaling": scaling, "original_max_position_embeddings": 2048}
        assert spec_of(inside) == spec_of(outside)
        assert spec_of(inside) != spec_of({**LLAMA, "rope_scaling": scaling})

    @pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
    def test_gemma3_scales_global_layers_only(self, scaling: Mapping[str, object] | None) -> None:
        old = {**GEMMA3, "rope_scaling": scaling}
        config: Any = Gemma3TextConfig.from_dict(json.loads(json.dumps(old)))
        rotary: Any = Gemma3RotaryEmbedding(config)
        new = {**GEMMA3, "rope_parameters": config.rope_parameters, "layer_types": config.layer_types}
        for spelling in (old, new):
            spec = spec_of(spelling)
            assert [layer.sliding_window for layer in spec.layers] == [64, 64, 64, 64, 64, None, 64]
            assert_same_rope(spec.layers[0].rope, rotary.sliding_attention_inv_freq, 1.0)
            assert_same_rope(spec.layers[5].rope, rotary.full_attention_inv_freq, 1.0)

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    @pytest.mark.parametrize("hidden_size", [64, 1152, 2560, 5376])
    def test_gemma3_scales_embeddings_as_in_the_dtype_of_the_checkpoint(self, dtype: str, hidden_size: int) -> None:
        module = Gemma3TextScaledWordEmbedding(2, hidden_size, 0, embed_scale=hidden_size**0.5)
        module.weight.data.fill_(1.0)
        embedded = module.to(getattr(torch, dtype))(torch.tensor([1]))
        for key in ("dtype", "torch_dtype"):
            spec = spec_of({**GEMMA3, "hidden_size": hidden_size, key: dtype})
            assert spec.embedding_scale == embedded[0, 0].item()

    def test_the_text_part_of_a_multimodal_gemma3_is_that_model(self) -> None:
        text = json.loads(Gemma3TextConfig(hidden_size=64, num_hidden_layers=2).to_json_string(use_diff=True))
        outer = {"architectures": ["Gemma3ForConditionalGeneration"], "dtype": "float32", "text_config": text}
        assert spec_of(outer) == spec_of({**text, "architectures": ["Gemma3ForCausalLM"], "dtype": "float32"})

    def test_a_sparse_multimodal_gemma3_file_means_what_transformers_takes_it_for(self) -> None:
        text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
        config: Any = Gemma3Config(text_config=dict(text)).text_config
        spec = spec_of({"architectures": [Gemma3ForConditionalGeneration.__name__], "text_config": text})
        assert (spec.num_heads, spec.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
        assert (spec.head_dim, spec.vocab_size, spec.max_position) == (256, config.vocab_size, 131_072)
        assert spec.attention_scale == config.query_pre_attn_scalar**-0.5
        assert spec.tied_embeddings

    @pytest.mark.parametrize(
        ("name", "config_class"),
        [
            ("LlamaForCausalLM", LlamaConfig),
            ("MistralForCausalLM", MistralConfig),
            ("Qwen2ForCausalLM", Qwen2Config),
            ("Qwen3ForCausalLM", Qwen3Config),
            ("Gemma3ForCausalLM", Gemma3TextConfig),
        ],
    )
    def test_what_a_file_leaves_out_is_what_transformers_assumes(
        self, name: str, config_class: type[PreTrainedConfig]
    ) -> None:
        given: dict[str, object] = {
            "architectures": [name],
            "vocab_size": 100,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 30,
            "num_attention_heads": 32,
            "max_position_embeddings": 8192,
        }
        config = config_class.from_dict(dict(given))
        assert spec_of(given) == spec_of({**json.loads(config.to_json_string(use_diff=False)), "architectures": [name]})


class TestVariants:
    def test_llama_may_have_biases_everywhere(self) -> None:
        spec = spec_of({**LLAMA, "attention_bias": True, "mlp_bias": True})
        assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, True, True)

    def test_qwen2_has_biases_but_none_on_the_output(self) -> None:
        spec = spec_of(architecture("Qwen2ForCausalLM"))
        assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (True, False, False)

    def test_qwen3_has_biases_only_when_asked(self) -> None:
        assert not spec_of(architecture("Qwen3ForCausalLM")).qkv_bias
        assert spec_of(architecture("Qwen3ForCausalLM", attention_bias=True)).output_bias

    def test_mistral_without_a_window_sees_everything(self) -> None:
        layers = spec_of(architecture("MistralForCausalLM", sliding_window=None)).layers
        assert {layer.sliding_window for layer in layers} == {None}

    def test_qwen_windows_begin_after_max_window_layers(self) -> None:
        config = architecture(
            "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=9, max_window_layers=1, num_hidden_layers=3
        )
        assert [layer.sliding_window for layer in spec_of(config).layers] == [None, 9, 9]
        assert {layer.sliding_window for layer in spec_of({**config, "use_sliding_window": False}).layers} == {None}

    def test_listed_layer_types_win(self) -> None:
        kinds = ["sliding_attention", "full_attention"]
        config = architecture("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=9, layer_types=kinds)
        assert [layer.sliding_window for layer in spec_of(config).layers] == [9, None]

    def test_parameters_may_be_given_for_each_kind_of_layer(self) -> None:
        kinds = ["sliding_attention", "full_attention"]
        ropes = {
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
        }
        config = architecture(
            "Qwen3ForCausalLM", use_sliding_window=True, sliding_window=9, layer_types=kinds, rope_parameters=ropes
        )
        local, everywhere = (layer.rope for layer in spec_of(config).layers)
        assert local == spec_of(architecture("Qwen3ForCausalLM", rope_theta=1e4)).layers[0].rope
        assert everywhere == spec_of(architecture("Qwen3ForCausalLM", rope_theta=1e6)).layers[0].rope


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "field", "reason"),
        [
            ({"architectures": ["GPT2LMHeadModel"]}, "architectures", "LlamaForCausalLM, MistralForCausalLM"),
            ({"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "architectures", "not supported"),
            ({"architectures": None}, "architectures", "missing"),
            ({"architectures": "LlamaForCausalLM"}, "architectures", "list of strings"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config", "GGUF"),
            ({"hidden_size": None}, "hidden_size", "missing"),
            ({"hidden_size": "64"}, "hidden_size", "integer"),
            ({"hidden_size": True}, "hidden_size", "integer"),
            ({"hidden_size": 0}, "hidden_size", "at least 1"),
            ({"hidden_size": 66}, "hidden_size", "multiple of num_attention_heads, 4"),
            ({"num_key_value_heads": 3}, "num_key_value_heads", "divide num_attention_heads, 4"),
            ({"head_dim": 15}, "head_dim", "even"),
            ({"hidden_act": "relu"}, "hidden_act", "silu"),
            ({"rms_norm_eps": -1.0}, "rms_norm_eps", "positive number"),
            ({"rms_norm_eps": "tiny"}, "rms_norm_eps", "positive number"),
            ({"attention_bias": 1}, "attention_bias", "true or false"),
            ({"rope_scaling": "linear"}, "rope_scaling", "object"),
            ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "type", "default, linear, llama3, yarn"),
            ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type", "default, linear, llama3, yarn"),
            ({"rope_scaling": {"rope_type": 7}}, "rope_type", "string"),
            ({"rope_scaling": {"rope_type": "linear"}}, "factor", "missing"),
            ({"rope_scaling": {**LLAMA3_SCALING, "high_freq_factor": 1.0}}, "high_freq_factor", "low_freq_factor"),
            ({"rope_scaling": {**YARN_SCALING, "rope_theta": 1.0}}, "rope_theta", "above 1"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor", "not supported"),
            ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor", "not supported"),
        ],
        ids=str,
    )
    def test_a_field_that_cannot_be_served_is_named(
        self, changes: Mapping[str, object], field: str, reason: str
    ) -> None:
        with pytest.raises(CheckpointError, match=rf"config\.json.*{field}.*{reason}"):
            spec_of({**LLAMA, **changes})

    @pytest.mark.parametrize(
        ("changes", "field", "reason"),
        [
            ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping", "not supported"),
            ({"final_logit_softcapping": 30.0}, "final_logit_softcapping", "not supported"),
            ({"use_bidirectional_attention": True}, "use_bidirectional_attention", "not supported"),
            ({"layer_types": ["full_attention"]}, "layer_types", "each of the 7 layers"),
            ({"layer_types": ["full_attention"] * 6 + ["linear_attention"]}, "layer_types", "'linear_attention'"),
            ({"hidden_activation": "gelu"}, "hidden_activation", "gelu_pytorch_tanh"),
            ({"dtype": "float8"}, "dtype", "bfloat16"),
            ({"sliding_window": None}, "sliding_window", "missing"),
        ],
        ids=str,
    )
    def test_what_no_back_end_computes_of_gemma3_is_named(
        self, changes: Mapping[str, object], field: str, reason: str
    ) -> None:
        with pytest.raises(CheckpointError, match=rf"config\.json.*{field}.*{reason}"):
            spec_of({**GEMMA3, **changes})

    def test_sliding_layers_without_a_window_are_refused(self) -> None:
        kinds = ["sliding_attention", "full_attention"]
        with pytest.raises(CheckpointError, match="use_sliding_window is off"):
            spec_of(architecture("Qwen2ForCausalLM", layer_types=kinds))

    def test_mistral_with_layer_types_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match=r"layer_types.*MistralForCausalLM"):
            spec_of(architecture("MistralForCausalLM", layer_types=["full_attention"] * 2))

    def test_a_broken_text_config_is_named(self) -> None:
        with pytest.raises(CheckpointError, match=r"text_config: hidden_size is missing"):
            spec_of({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"num_hidden_layers": 1}})

    def test_a_long_value_is_cut_short(self) -> None:
        with pytest.raises(CheckpointError) as caught:
            spec_of({**LLAMA, "architectures": ["x" * 1000]})
        assert len(str(caught.value)) < 400

    @given(
        field=st.sampled_from([*LLAMA, "rope_scaling", "rope_parameters", "head_dim", "rms_norm_eps", "text_config"]),
        value=st.recursive(
            st.none() | st.booleans() | st.integers(-2, 300) | st.floats(-2, 300) | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=2)
                | st.dictionaries(st.sampled_from([*YARN_SCALING, *LLAMA3_SCALING, "rope_theta"]), inner, max_size=4)
            ),
            max_leaves=6,
        ),
    )
    def test_no_value_of_a_field_ends_in_anything_but_a_spec_or_a_checkpoint_error(
        self, field: str, value: object
    ) -> None:
        with contextlib.suppress(CheckpointError):
            spec_of({**LLAMA, field: value})


class TestFiles:
    def test_a_missing_file_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"config\.json cannot be read: .*No such file"):
            Fields.read(tmp_path / "config.json")

    @pytest.mark.parametrize(("text", "reason"), [("{", "cannot be read"), ("[]", "JSON object"), ("\xff", "read")])
    def test_a_file_that_is_not_an_object_is_named(self, tmp_path: Path, text: str, reason: str) -> None:
        path = tmp_path / "config.json"
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError, match=rf"config\.json.*{reason}"):
            Fields.read(path)
