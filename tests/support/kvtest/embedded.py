"""The embedded model, as kvorum loads it and as transformers does."""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvorum.kernels.cpu.backend import CpuBackend
from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kernels.spec import Shard
from kvorum.workers.backends import load_backend
from kvorum.workers.checkpoint.resolve import Checkpoint, resolve
from kvorum.workers.checkpoint.weights import iter_weights
from kvorum.workers.config import EngineConfig
from kvtest.prose import prose

QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue, in two sentences.",
    "List three fruits that are red.",
    "How do I boil an egg?",
    "Give me a name for a cat.",
    "What is 17 plus 25?",
    "Translate 'good morning' into Spanish.",
)
RAW_LENGTHS = (5, 16, 17, 40, 64, 100, 150, 230, 333, 512, 800, 1500)


@lru_cache(maxsize=1)
def embedded_checkpoint() -> Checkpoint:
    """Return the embedded model's checkpoint."""
    return resolve("smollm2-135m")


def embedded_backend(dtype: torch.dtype = torch.float32) -> ReferenceBackend:
    """Return the reference back end with the embedded model's weights."""
    checkpoint = embedded_checkpoint()
    shard = Shard.whole(checkpoint.spec)
    backend = ReferenceBackend(checkpoint.spec, shard, dtype=dtype, device=torch.device("cpu"))
    backend.load(iter_weights(checkpoint, shard, dtype=dtype))
    return backend


def embedded_cpu_backend(**options: str) -> CpuBackend:
    """Return the CPU back end with the embedded model's weights; options are EngineConfig's."""
    config = EngineConfig(model="smollm2-135m", model_name="smollm2-135m", backend="cpu", **options)  # type: ignore[arg-type]
    checkpoint = embedded_checkpoint()
    backend = load_backend(config, checkpoint, Shard.whole(checkpoint.spec))
    assert isinstance(backend, CpuBackend)
    return backend


@lru_cache(maxsize=1)
def embedded_transformers() -> PreTrainedModel:
    """Return transformers' model of the same file, dequantised to float32."""
    path = embedded_checkpoint().path
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    model.eval()
    return model


@lru_cache(maxsize=1)
def twenty_prompts() -> tuple[tuple[int, ...], ...]:
    """Return eight chats and twelve pieces of prose of 5 to 1,500 tokens."""
    tokenizer = embedded_checkpoint().load_tokenizer()
    chats = [tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}])) for text in QUESTIONS]
    tokens = tokenizer.encode(prose()[:40_000])
    starts = range(0, 12 * 500, 500)
    return tuple(map(tuple, chats + [tokens[s : s + n] for s, n in zip(starts, RAW_LENGTHS, strict=True)]))


@lru_cache(maxsize=64)
def transformers_logits(prompt: tuple[int, ...], answer: tuple[int, ...]) -> torch.Tensor:
    """Return the logits [len(answer), vocab] from which transformers would choose each token of an answer.

    An answer is transformers' own greedy one just when every token of it is the largest logit of its row.
    """
    tokens = torch.tensor([[*prompt, *answer[:-1]]])
    with torch.inference_mode():
        logits: torch.Tensor = embedded_transformers()(tokens).logits[0, len(prompt) - 1 :]
    return logits
