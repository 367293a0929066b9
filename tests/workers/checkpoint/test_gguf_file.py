"""GGUF metadata and tensors against the models that the files were made of."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel
from transformers.integrations.gguf.kernels import dequantize_blocks

from kvorum.kernels.spec import DecoderSpec
from kvorum.kvstore.errors import CheckpointError
from kvorum.workers.checkpoint.fields import Fields
from kvorum.workers.checkpoint.gguf_file import decoder_spec, eos_token_ids, read_gguf, read_rows
from kvorum.workers.checkpoint.hf_config import decoder_spec as hf_decoder_spec
from kvorum.workers.checkpoint.resolve import resolve
from kvtest.checkpoints import tiny_gguf, write_gguf

F32 = GGMLQuantizationType.F32
LLAMA: dict[str, object] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def hf_spec(model: PreTrainedModel) -> DecoderSpec:
    return hf_decoder_spec(Fields("config.json", {**model.config.to_dict(), "architectures": [type(model).__name__]}))


def spec_of(path: Path, metadata: Mapping[str, object], **tensors: tuple[int, ...]) -> DecoderSpec:
    shapes = {"token_embd.weight": (96, 32), **tensors}
    zeros = {name: (np.zeros(shape, np.float32), F32) for name, shape in shapes.items() if shape}
    write_gguf(path, metadata=metadata, tensors=zeros)
    return decoder_spec(read_gguf(path))


class TestSpec:
    @pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
    @pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 3), (4, 1)])
    def test_a_file_describes_the_model_it_was_made_of(
        self, tmp_path: Path, family: str, num_heads: int, num_kv_heads: int
    ) -> None:
        model = tiny_gguf(tmp_path / "m.gguf", family, num_heads=num_heads, num_kv_heads=num_kv_heads)
        spec = decoder_spec(read_gguf(tmp_path / "m.gguf"))
        assert spec == replace(hf_spec(model), rms_norm_eps=float(np.float32(1e-6)))

    def test_gemma3_has_its_offset_in_the_norms(self, tmp_path: Path) -> None:
        model = tiny_gguf(tmp_path / "m.gguf", "gemma3", num_heads=4, num_kv_heads=2)
        spec = decoder_spec(read_gguf(tmp_path / "m.gguf"))
        assert spec == replace(hf_spec(model), rms_norm_eps=float(np.float32(1e-6)), norm_offset=0.0)

    def test_gemma3_27b_scales_attention_by_another_length(self, tmp_path: Path) -> None:
        tiny_gguf(tmp_path / "m.gguf", "gemma3", num_heads=2, num_kv_heads=1, hidden_size=64)
        file = read_gguf(tmp_path / "m.gguf")
        metadata = file.metadata.values
        longest = replace(file, metadata=Fields("m.gguf", {**metadata, "gemma3.block_count": 62}))
        assert decoder_spec(file).attention_scale == 16**-0.5
        assert decoder_spec(longest).attention_scale == 32**-0.5

    def test_gemma3_files_that_are_silent_have_every_sixth_layer_global(self, tmp_path: Path) -> None:
        tiny_gguf(tmp_path / "m.gguf", "gemma3", num_heads=2, num_kv_heads=1)
        file = read_gguf(tmp_path / "m.gguf")
        values = {key: value for key, value in file.metadata.values.items() if "pattern" not in key}
        layers = decoder_spec(replace(file, metadata=Fields("m", {**values, "gemma3.block_count": 7}))).layers
        assert [layer.sliding_window for layer in layers] == [5, 5, 5, 5, 5, None, 5]

    @pytest.mark.parametrize(
        "scaling",
        [
            {"rope_type": "linear", "factor": 4.0},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ],
        ids=["linear", "llama3"],
    )
    def test_scaled_frequencies_survive(self, tmp_path: Path, scaling: dict[str, object]) -> None:
        rope = {"rope_theta": 500_000.0, **scaling}
        model: Any = tiny_gguf(
            tmp_path / "m.gguf",
            "llama",
            num_heads=4,
            num_kv_heads=2,
            rope_parameters=rope,
            max_position_embeddings=2048,
        )
        found = decoder_spec(read_gguf(tmp_path / "m.gguf")).layers[0].rope.inv_freq
        assert found == pytest.approx(model.model.rotary_emb.inv_freq.tolist(), rel=4 * 2**-23, abs=0)

    def test_biases_and_tied_embeddings_show_in_the_tensors(self, tmp_path: Path) -> None:
        tiny_gguf(
            tmp_path / "m.gguf",
            "llama",
            num_heads=2,
            num_kv_heads=1,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        )
        spec = decoder_spec(read_gguf(tmp_path / "m.gguf"))
        assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.tied_embeddings) == (True, True, True, True)

    @pytest.mark.parametrize(
        ("changes", "field", "reason"),
        [
            ({"general.architecture": "gpt2"}, r"general\.architecture", "llama, qwen2, qwen3, gemma3"),
            ({"llama.expert_count": 8}, r"llama\.expert_count", "not supported"),
            ({"llama.attention.sliding_window": 8}, r"llama\.attention\.sliding_window", "not supported"),
            ({"llama.final_logit_softcapping": 30.0}, r"llama\.final_logit_softcapping", "not supported"),
            ({"llama.block_count": "one"}, r"llama\.block_count", "integer"),
            ({"llama.feed_forward_length": [64, 64]}, r"llama\.feed_forward_length", "integer"),
            ({"llama.attention.head_count_kv": 3}, r"llama\.attention\.head_count_kv", "divide the number of heads, 4"),
            ({"llama.attention.value_length": 16}, r"llama\.attention\.value_length", "length of keys, 8"),
            ({"llama.rope.dimension_count": 4}, r"llama\.rope\.dimension_count", "length of a head, 8"),
            ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type", "none, linear"),
            ({"llama.rope.scaling.type": "linear"}, r"llama\.rope\.scaling\.factor", "missing"),
            ({"split.count": 2}, r"split\.count", "merge the parts"),
        ],
        ids=str,
    )
    def test_what_cannot_be_served_is_named(
        self, tmp_path: Path, changes: Mapping[str, object], field: str, reason: str
    ) -> None:
        with pytest.raises(CheckpointError, match=rf"m\.gguf: {field}.*{reason}"):
            spec_of(tmp_path / "m.gguf", {**LLAMA, **changes})

    def test_a_missing_field_is_named(self, tmp_path: Path) -> None:
        metadata = {key: value for key, value in LLAMA.items() if key != "llama.context_length"}
        with pytest.raises(CheckpointError, match=r"m\.gguf: llama\.context_length is missing"):
            spec_of(tmp_path / "m.gguf", metadata)

    def test_missing_embeddings_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"m\.gguf: tensor token_embd\.weight is missing"):
            spec_of(tmp_path / "m.gguf", LLAMA, **{"token_embd.weight": (), "output.weight": (96, 32)})


class TestEndTokens:
    TOKENS: Mapping[str, object] = {"tokenizer.ggml.tokens": ["a", "</s>", "<|eot_id|>", "<|im_end|>"]}

    @pytest.mark.parametrize(
        ("metadata", "expected"),
        [
            ({}, ()),
            ({"tokenizer.ggml.eos_token_id": 1}, (1,)),
            ({"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 9}, (1, 9)),
            ({"tokenizer.ggml.eos_token_id": 1, **TOKENS}, (1, 2, 3)),
            ({"tokenizer.ggml.eos_token_id": 3, **TOKENS}, (3, 2)),
            ({"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 2, **TOKENS}, (1, 2)),
        ],
        ids=str,
    )
    def test_end_of_turn_counts_and_is_looked_for_when_the_file_does_not_name_it(
        self, tmp_path: Path, metadata: Mapping[str, object], expected: tuple[int, ...]
    ) -> None:
        write_gguf(tmp_path / "m.gguf", metadata={**LLAMA, **metadata}, tensors={})
        assert eos_token_ids(read_gguf(tmp_path / "m.gguf")) == expected


class TestNumbers:
    @pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
    def test_blocks_of_256_are_read_as_transformers_reads_them(self, tmp_path: Path, kind: str) -> None:
        quantization = GGMLQuantizationType[kind]
        block_bytes = {"Q4_K": 144, "Q6_K": 210}[kind]
        blocks = np.random.default_rng(0).integers(0, 256, (6, 2 * block_bytes), np.uint8)
        scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
        for begin in (0, 2) if kind == "Q4_K" else (block_bytes - 2,):  # float16 scales, which must be finite
            blocks.reshape(-1, block_bytes)[:, begin : begin + 2] = scale
        write_gguf(tmp_path / "m.gguf", metadata=LLAMA, tensors={"t": (blocks, quantization)})
        expected = dequantize_blocks(torch.from_numpy(blocks), int(quantization), 6, 512, torch.float32)
        file = read_gguf(tmp_path / "m.gguf")
        assert file.tensors["t"].shape == (6, 512)
        assert np.array_equal(read_rows(file, "t"), expected.numpy())
        assert np.array_equal(read_rows(file, "t", slice(2, 5)), expected.numpy()[2:5])

    def test_rows_of_a_vector_are_its_numbers(self, tmp_path: Path) -> None:
        numbers = np.arange(10, dtype=np.float32)
        write_gguf(tmp_path / "m.gguf", metadata=LLAMA, tensors={"t": (numbers, F32)})
        assert read_rows(read_gguf(tmp_path / "m.gguf"), "t", slice(3, 6)).tolist() == [3.0, 4.0, 5.0]

    def test_an_unsupported_type_is_named_with_its_tensor(self, tmp_path: Path) -> None:
        stored = (np.zeros((2, 22), np.uint8), GGMLQuantizationType.Q5_0)
        write_gguf(tmp_path / "m.gguf", metadata=LLAMA, tensors={"blk.0.attn_q.weight": stored})
        with pytest.raises(
            CheckpointError, match=r"m\.gguf: tensor blk\.0\.attn_q\.weight is of type Q5_0.*Q4_K, Q6_K"
        ):
            read_rows(read_gguf(tmp_path / "m.gguf"), "blk.0.attn_q.weight")


class TestFiles:
    @pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file, but long enough to be one" * 4])
    def test_a_file_of_something_else_is_named(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"m\.gguf cannot be read as a GGUF file"):
            read_gguf(tmp_path / "m.gguf")

    def test_a_file_that_was_cut_off_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        write_gguf(path, metadata=LLAMA, tensors={"t": (np.zeros((64, 64), np.float32), F32)})
        path.write_bytes(path.read_bytes()[:-5000])
        with pytest.raises(CheckpointError, match=r"m\.gguf cannot be read as a GGUF file"):
            read_gguf(path)

    def test_what_is_read_can_be_sent_to_another_process(self, tmp_path: Path) -> None:
        tiny_gguf(tmp_path / "m.gguf", "llama", num_heads=2, num_kv_heads=1)
        file = read_gguf(tmp_path / "m.gguf")
        copy = pickle.loads(pickle.dumps(file))
        assert np.array_equal(read_rows(copy, "blk.0.attn_q.weight"), read_rows(file, "blk.0.attn_q.weight"))


@pytest.mark.model
def test_the_embedded_model_is_smollm2() -> None:
    checkpoint = resolve("smollm2-135m")
    spec = checkpoint.spec
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size, spec.vocab_size) == (30, 576, 1536, 49152)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_position) == (9, 3, 64, 8192)
    assert (spec.tied_embeddings, spec.qkv_bias, spec.qk_norm) == (True, False, False)
    assert (checkpoint.eos_token_ids, checkpoint.bos_token_id, checkpoint.format) == ((2,), 1, "gguf")
