"""A model for tests of what stands around one: each byte of UTF-8 is a token, so that any text has known token ids."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvorum.cluster.model import ServedModel, longest_token_chars
from kvorum.kernels.spec import DecoderSpec, LayerSpec, RopeSpec
from kvorum.workers.checkpoint.tokenizer import Tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
END = "<end>"


def byte_tokenizer(*, chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """Build a tokenizer whose token i is the byte i, and whose token 256 is the special <end>."""
    return Tokenizer(_backend(), chat_template=chat_template, special_tokens={})


def write_model_without_weights(folder: Path) -> None:
    """Write all of a checkpoint that can be read before its weights are."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "eos_token_id": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    _backend().save(str(folder / "tokenizer.json"))


def _backend() -> tokenizers.Tokenizer:
    alphabet = _byte_alphabet()
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END, special=True)])
    return backend


def tiny_model(*, max_model_len: int = 512, name: str = "tiny") -> ServedModel:
    """Return a model of 257 tokens whose answers end with <end>."""
    tokenizer = byte_tokenizer()
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=(256,),
        longest_token_chars=longest_token_chars(tokenizer),
        spec=DecoderSpec(
            vocab_size=tokenizer.vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            layers=(LayerSpec(RopeSpec((1.0, 0.1, 0.01, 0.001))),),
            max_position=max_model_len,
            rms_norm_eps=1e-5,
        ),
    )


def _byte_alphabet() -> list[str]:
    """Return the character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
