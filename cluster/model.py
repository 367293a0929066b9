"""What a router knows of the model that its engines serve."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvorum.cluster.config import ClusterConfig, ConfigError
from kvorum.kernels.spec import DecoderSpec
from kvorum.kvstore.errors import ContextLengthError, InvalidRequestError
from kvorum.workers.checkpoint.resolve import Checkpoint, resolve
from kvorum.workers.checkpoint.tokenizer import Tokenizer

# Encoding a short text takes less time than handing it to a thread.
_MAX_INLINE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's name for clients, its limits and its tokenizer.

    longest_token_chars: no token stands for more characters than this.
    """

    name: str
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    longest_token_chars: int
    spec: DecoderSpec

    async def encode(self, text: str, *, param: str, add_special_tokens: bool) -> tuple[int, ...]:
        """Turn text into token ids without holding up the event loop.

        Raises:
            ContextLengthError: the text cannot fit, whatever its tokens are; it is then not even tokenised.
        """
        if len(text) > self.max_model_len * self.longest_token_chars:
            raise ContextLengthError(
                f"{param} has {len(text)} characters, which cannot fit into {self.max_model_len} tokens", param=param
            )
        if len(text) <= _MAX_INLINE_CHARS:
            return tuple(self._encode(text, param, add_special_tokens))
        return tuple(await asyncio.to_thread(self._encode, text, param, add_special_tokens))

    async def encode_chat(self, messages: Sequence[Mapping[str, object]]) -> tuple[int, ...]:
        """Render a conversation and turn it into token ids."""
        prompt = self.tokenizer.render_chat(messages, add_generation_prompt=True)
        return await self.encode(prompt, param="messages", add_special_tokens=False)

    def checked_tokens(self, token_ids: Sequence[int], *, param: str) -> tuple[int, ...]:
        """Return token ids that a client sent, of a prompt or an answer.

        Raises:
            ContextLengthError: they are too many; they are then not even looked at.
            InvalidRequestError: one is not in the vocabulary.
        """
        if len(token_ids) > self.max_model_len:
            raise ContextLengthError(
                f"{param} has {len(token_ids)} tokens, which cannot fit into {self.max_model_len}", param=param
            )
        self.check_token_ids(token_ids, param=param)
        return tuple(token_ids)

    def check_token_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        """Raise InvalidRequestError when one is not in the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequestError(
                    f"{param}: token id {token_id} is not in the vocabulary (0 to {self.vocab_size - 1})", param=param
                )

    def _encode(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{param}: {error}", param=param) from error


def load_model(config: ClusterConfig) -> ServedModel:
    """Read tokenizer and limits of the configured model, but no weights."""
    checkpoint = resolve_checkpoint(config)
    tokenizer = checkpoint.load_tokenizer()
    return ServedModel(
        name=config.served_model_name or checkpoint.name,
        tokenizer=tokenizer,
        vocab_size=checkpoint.spec.vocab_size,
        max_model_len=config.max_model_len or checkpoint.spec.max_position,
        eos_token_ids=checkpoint.eos_token_ids,
        longest_token_chars=longest_token_chars(tokenizer),
        spec=checkpoint.spec,
    )


def resolve_checkpoint(config: ClusterConfig) -> Checkpoint:
    """Find the configured model and check the settings that depend on it."""
    checkpoint = resolve(config.model)
    longest = checkpoint.spec.max_position
    if config.max_model_len and config.max_model_len > longest:
        raise ConfigError(f"max_model_len: {config.model} was made for at most {longest}, got {config.max_model_len}")
    if config.tensor_parallel_size > checkpoint.spec.num_heads:
        raise ConfigError(
            f"tensor_parallel_size: {config.tensor_parallel_size} ranks cannot share the {checkpoint.spec.num_heads} "
            f"query heads of {config.model}"
        )
    if config.chat_template is None:
        return checkpoint
    try:
        return replace(checkpoint, chat_template=config.chat_template.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template: {config.chat_template} cannot be read: {error}") from None


def longest_token_chars(tokenizer: Tokenizer) -> int:
    """Return the most characters that one token stands for."""
    spellings = (tokenizer.id_to_token(token_id) or "" for token_id in range(tokenizer.vocab_size))
    return max(1, *map(len, spellings))
