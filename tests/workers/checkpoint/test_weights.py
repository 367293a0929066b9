"""Weights from disk against the models that were saved, whole and in shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from kvorum.kernels.spec import DecoderSpec, Shard, weight_names
from kvorum.kvstore.errors import CheckpointError
from kvorum.workers.checkpoint import weights as weights_module
from kvorum.workers.checkpoint.resolve import Checkpoint, resolve
from kvorum.workers.checkpoint.weights import iter_weights
from kvtest.checkpoints import ATTENTIONS, FAMILIES, model_weights, save_model, tiny_checkpoint, tiny_gguf

GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")
# Axis that a shard cuts, by kind of weight; whatever is not here comes whole.
CUT_AXES = {
    **dict.fromkeys(("q", "k", "v", "q_bias", "k_bias", "v_bias", "gate", "up", "gate_bias", "up_bias"), 0),
    **dict.fromkeys(("embed", "lm_head"), 0),
    **dict.fromkeys(("o", "down"), 1),
}
SUMMED = ("o_bias", "down_bias")


def load(checkpoint: Checkpoint, shard: Shard | None = None) -> dict[str, torch.Tensor]:
    return dict(iter_weights(checkpoint, shard or Shard.whole(checkpoint.spec), dtype=torch.float32))


def transformers_tensors(path: Path, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Read a GGUF file as transformers does, into the names that the model has there."""
    read: Any = load_gguf_checkpoint
    tensors: dict[str, torch.Tensor] = read(str(path), return_tensors=True, model_to_load=model)["tensors"]
    return tensors


def thirds(spec: DecoderSpec) -> tuple[Shard, Shard]:
    """Split 3 groups of 2 query heads over two ranks, 2 + 1, and the rest as unevenly."""
    assert (spec.num_heads, spec.num_kv_heads) == (6, 3)
    mlp, vocab = spec.intermediate_size, spec.vocab_size
    return (
        Shard(q_heads=(0, 4), kv_heads=(0, 2), mlp=(0, 40), vocab=(0, 50)),
        Shard(q_heads=(4, 6), kv_heads=(2, 3), mlp=(40, mlp), vocab=(50, vocab), rank=1),
    )


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name


def assert_shards_make_the_whole(checkpoint: Checkpoint) -> None:
    whole = load(checkpoint)
    parts = [load(checkpoint, shard) for shard in thirds(checkpoint.spec)]
    for name, weight in whole.items():
        leaf = name.rpartition(".")[2]
        axis = CUT_AXES.get(leaf)
        if leaf in SUMMED:
            assert torch.equal(parts[0][name] + parts[1][name], weight), name
        elif axis is None:
            assert all(torch.equal(part[name], weight) for part in parts), name
        else:
            assert torch.equal(torch.cat([part[name] for part in parts], axis), weight), name
            assert all(part[name].is_contiguous() for part in parts)


class TestSafetensors:
    @pytest.mark.parametrize("attention", ATTENTIONS)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_weight_is_the_one_that_was_saved(self, tmp_path: Path, family: str, attention: str) -> None:
        num_heads, num_kv_heads = ATTENTIONS[attention]
        model = tiny_checkpoint(family, tmp_path, num_heads=num_heads, num_kv_heads=num_kv_heads)
        checkpoint = resolve(str(tmp_path))
        names = [name for name, _ in iter_weights(checkpoint, Shard.whole(checkpoint.spec), dtype=torch.float32)]
        assert names == weight_names(checkpoint.spec)
        assert_same(load(checkpoint), model_weights(model))

    def test_biases_everywhere_are_found(self, tmp_path: Path) -> None:
        model = tiny_checkpoint(
            "llama", tmp_path, num_heads=6, num_kv_heads=3, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
        )
        checkpoint = resolve(str(tmp_path))
        assert_same(load(checkpoint), model_weights(model))
        assert {"layers.0.o_bias", "layers.0.down_bias"} <= load(checkpoint).keys()
        assert "lm_head" not in load(checkpoint)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_model_in_many_files_is_the_same_model(self, tmp_path: Path, family: str) -> None:
        model = tiny_checkpoint(family, tmp_path, num_heads=6, num_kv_heads=3, max_shard_size="60KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 5
        assert_same(load(resolve(str(tmp_path))), model_weights(model))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_uneven_shards_put_together_are_the_whole(self, tmp_path: Path, family: str) -> None:
        tiny_checkpoint(family, tmp_path, num_heads=6, num_kv_heads=3)
        assert_shards_make_the_whole(resolve(str(tmp_path)))

    def test_a_replicated_kv_head_goes_to_both_ranks_with_their_query_heads(self, tmp_path: Path) -> None:
        model = tiny_checkpoint("llama", tmp_path, num_heads=4, num_kv_heads=1)
        checkpoint, whole = resolve(str(tmp_path)), model_weights(model)
        for q_heads in ((0, 2), (2, 4)):
            found = load(checkpoint, replace(Shard.whole(checkpoint.spec), q_heads=q_heads))
            assert torch.equal(found["layers.1.k"], whole["layers.1.k"])
            assert torch.equal(found["layers.1.q"], whole["layers.1.q"][q_heads[0] * 16 : q_heads[1] * 16])

    def test_a_dtype_is_that_of_every_weight(self, tmp_path: Path) -> None:
        model = tiny_checkpoint("llama", tmp_path, num_heads=2, num_kv_heads=1)
        checkpoint = resolve(str(tmp_path))
        found = dict(iter_weights(checkpoint, Shard.whole(checkpoint.spec), dtype=torch.bfloat16))
        assert_same(found, {name: weight.bfloat16() for name, weight in model_weights(model).items()})

    @pytest.mark.parametrize("keeps_format", [True, False])
    def test_the_language_model_is_found_inside_a_multimodal_gemma3(self, tmp_path: Path, keeps_format: bool) -> None:
        plain = tiny_checkpoint("gemma3", tmp_path / "plain", num_heads=4, num_kv_heads=2)
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision |= {"image_size": 28, "patch_size": 14}
        config = Gemma3Config(text_config=plain.config.to_dict(), vision_config=vision, mm_tokens_per_image=4)
        model: Any = Gemma3ForConditionalGeneration(config)
        model.model.language_model.load_state_dict(plain.get_submodule("model").state_dict())
        model.save_pretrained(tmp_path / "multi", save_original_format=keeps_format)
        checkpoint = resolve(str(tmp_path / "multi"))
        assert checkpoint.spec == resolve(str(tmp_path / "plain")).spec
        assert_same(load(checkpoint), model_weights(plain))

    def test_progress_ends_at_all_the_bytes_of_the_shard(self, tmp_path: Path) -> None:
        tiny_checkpoint("qwen3", tmp_path, num_heads=6, num_kv_heads=3)
        checkpoint, calls = resolve(str(tmp_path)), list[tuple[int, int]]()
        shard = thirds(checkpoint.spec)[1]
        loaded = dict(
            iter_weights(checkpoint, shard, dtype=torch.float16, on_progress=lambda *done: calls.append(done))
        )
        total_bytes = sum(weight.numel() * 2 for weight in loaded.values())
        assert [total for _, total in calls] == [total_bytes] * len(loaded)
        assert calls[-1][0] == total_bytes
        assert sorted(calls) == calls


class CountedSlice:
    """A safetensors slice that counts the bytes read through it."""

    def __init__(self, stored: Any, count: list[int]) -> None:  # noqa: ANN401  # has no type of its own
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype
        self._stored, self._count = stored, count

    def __getitem__(self, index: Any) -> torch.Tensor:  # noqa: ANN401
        part: torch.Tensor = self._stored[index]
        self._count.append(part.numel() * part.element_size())
        return part


class TestReadingOnlySlices:
    def test_a_rank_reads_the_bytes_of_its_shard_and_no_more(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tiny_checkpoint("llama", tmp_path, num_heads=6, num_kv_heads=3, max_shard_size="60KB")
        count = list[int]()

        class CountedFile:
            def __init__(self, path: Path, framework: str) -> None:
                self._file: Any = safetensors.safe_open(path, framework)

            def __enter__(self) -> CountedFile:
                return self

            def __exit__(self, *_: object) -> None:
                return None

            def get_slice(self, name: str) -> CountedSlice:
                return CountedSlice(self._file.get_slice(name), count)

        monkeypatch.setattr(weights_module, "safe_open", CountedFile)
        checkpoint = resolve(str(tmp_path))
        for shard in thirds(checkpoint.spec):
            count.clear()
            held = load(checkpoint, shard)
            assert sum(count) == sum(weight.numel() * 4 for weight in held.values())
        assert sum(count) < sum(weight.numel() * 4 for weight in load(checkpoint).values()) / 2


class TestGguf:
    @pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
    @pytest.mark.parametrize("family", GGUF_FAMILIES)
    def test_numbers_are_exactly_those_of_transformers(self, tmp_path: Path, family: str, quantization: str) -> None:
        path = tmp_path / "m.gguf"
        model = tiny_gguf(path, family, num_heads=6, num_kv_heads=3, quantization=GGMLQuantizationType[quantization])
        model.load_state_dict(transformers_tensors(path, model), strict=family != "gemma3")  # whose head is tied
        found = load(resolve(str(path)))
        if family == "gemma3":  # the file has 1 + weight
            found = {name: weight - 1 if weight.ndim == 1 else weight for name, weight in found.items()}
        assert_same(found, model_weights(model))

    @pytest.mark.parametrize("attention", ATTENTIONS)
    def test_rows_that_alternate_are_put_back_for_any_number_of_heads(self, tmp_path: Path, attention: str) -> None:
        num_heads, num_kv_heads = ATTENTIONS[attention]
        model = tiny_gguf(
            tmp_path / "m.gguf", "llama", num_heads=num_heads, num_kv_heads=num_kv_heads, attention_bias=True
        )
        assert_same(load(resolve(str(tmp_path / "m.gguf"))), model_weights(model))

    @pytest.mark.parametrize("quantization", ["F32", "Q4_1"])
    @pytest.mark.parametrize("family", GGUF_FAMILIES)
    def test_uneven_shards_put_together_are_the_whole(self, tmp_path: Path, family: str, quantization: str) -> None:
        path = tmp_path / "m.gguf"
        tiny_gguf(path, family, num_heads=6, num_kv_heads=3, quantization=GGMLQuantizationType[quantization])
        assert_shards_make_the_whole(resolve(str(path)))

    @pytest.mark.model
    def test_the_embedded_model_has_the_numbers_that_transformers_reads(self) -> None:
        checkpoint = resolve("smollm2-135m")
        with torch.device("meta"):
            model = LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=49152,
                    hidden_size=576,
                    intermediate_size=1536,
                    num_hidden_layers=30,
                    num_attention_heads=9,
                    num_key_value_heads=3,
                    tie_word_embeddings=True,
                )
            )
        model.load_state_dict(transformers_tensors(checkpoint.path, model), assign=True, strict=False)
        assert_same(load(checkpoint), model_weights(model))


@contextmanager
def rewritten(path: Path) -> Iterator[dict[str, torch.Tensor]]:
    tensors = load_file(path)
    yield tensors
    save_file(tensors, path)


class TestRefusals:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        tiny_checkpoint("llama", tmp_path, num_heads=2, num_kv_heads=1)
        return tmp_path

    @pytest.mark.parametrize(
        "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"]
    )
    def test_a_missing_tensor_is_named_before_anything_is_read(self, folder: Path, name: str) -> None:
        with rewritten(folder / "model.safetensors") as tensors:
            del tensors[name]
        with pytest.raises(CheckpointError, match=rf"{folder}: tensor {name} is missing"):
            next(iter_weights(resolve(str(folder)), Shard.whole(resolve(str(folder)).spec), dtype=torch.float32))

    def test_a_tensor_of_another_shape_is_named_with_both(self, folder: Path) -> None:
        with rewritten(folder / "model.safetensors") as tensors:
            tensors["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(32, 32)
        with pytest.raises(
            CheckpointError, match=r"model\.safetensors: .*2\.self_attn\.k_proj.* \[32, 32\], but .* \[16, 32\]"
        ):
            load(resolve(str(folder)))

    def test_a_tensor_of_whole_numbers_is_named(self, folder: Path) -> None:
        with rewritten(folder / "model.safetensors") as tensors:
            tensors["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight is of type I8, .*F16, BF16"):
            load(resolve(str(folder)))

    def test_a_folder_without_weights_is_named(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"model\.safetensors is missing; weights must be in safetensors"):
            load(resolve(str(folder)))

    def test_a_broken_file_is_named(self, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"not safetensors")
        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read as a safetensors file"):
            load(resolve(str(folder)))

    def test_a_file_that_the_index_names_must_be_there(self, tmp_path: Path) -> None:
        tiny_checkpoint("llama", tmp_path, num_heads=2, num_kv_heads=1, max_shard_size="20KB")
        first = min(tmp_path.glob("model-*.safetensors"))
        first.unlink()
        with pytest.raises(CheckpointError, match=rf"{first} is missing"):
            load(resolve(str(tmp_path)))

    def test_an_index_that_promises_too_much_is_named(self, folder: Path) -> None:
        save_model(tiny_checkpoint("llama", folder, num_heads=2, num_kv_heads=1), folder)
        names = list(load_file(folder / "model.safetensors"))
        with rewritten(folder / "model.safetensors") as tensors:
            del tensors["model.norm.weight"]
        index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight is missing, though the index"):
            load(resolve(str(folder)))

    def test_gguf_tensors_are_checked_before_anything_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        tiny_gguf(path, "llama", num_heads=2, num_kv_heads=1)
        whole = resolve(str(path))
        assert whole.gguf is not None
        tensors = dict(whole.gguf.tensors)
        norm = tensors.pop("output_norm.weight")
        for changed, reason in [
            (tensors, "tensor output_norm.weight is missing"),
            ({**tensors, "output_norm.weight": replace(norm, shape=(9,))}, r"the shape \[9\], but .* \[32\]"),
            ({**tensors, "output_norm.weight": replace(norm, quantization="Q5_K")}, "of type Q5_K"),
        ]:
            checkpoint = replace(whole, gguf=replace(whole.gguf, tensors=changed))
            with pytest.raises(CheckpointError, match=rf"m\.gguf: .*{reason}"):
                next(iter_weights(checkpoint, Shard.whole(checkpoint.spec), dtype=torch.float32))
