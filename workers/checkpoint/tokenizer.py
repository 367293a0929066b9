"""Text to token ids and back, and conversations to prompts, for one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from kvorum.kvstore.errors import CheckpointError, InvalidRequestError
from kvorum.workers.checkpoint.chat_template import ChatTemplate
from kvorum.workers.checkpoint.fields import Fields
from kvorum.workers.checkpoint.gguf_file import GgufFile
from kvorum.workers.checkpoint.gguf_tokenizer import build_tokenizer

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_TEMPLATE_TOKENS: Mapping[str, str] = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


class Tokenizer:
    """A model's tokenizer. Nothing in it changes once it is built, so threads may share one.

    Special tokens in a text are read as such: `<|im_end|>` is one token, not six. Whoever encodes text of users must
    want that.

    special_tokens: the texts of those that chat templates know by a name, such as eos_token.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, chat_template: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens)
        self._chat = None if chat_template is None else ChatTemplate(chat_template, special_tokens)
        added = backend.get_added_tokens_decoder()
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path, *, chat_template: str | None) -> Tokenizer:
        """Read `tokenizer.json`. What it puts around a text is what is put around it, as transformers has it too."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; save the model's tokenizer as a fast tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return cls(backend, chat_template=chat_template, special_tokens=_folder_special_tokens(folder))

    @classmethod
    def from_gguf(cls, file: GgufFile, *, chat_template: str | None) -> Tokenizer:
        """Build the tokenizer that the file's metadata describes."""
        backend = build_tokenizer(file.metadata)
        ids = {name: file.metadata.integers(field) for name, field in _GGUF_TEMPLATE_TOKENS.items()}
        tokens = {name: backend.id_to_token(token_ids[0]) for name, token_ids in ids.items() if token_ids}
        special_tokens = {name: token for name, token in tokens.items() if token is not None}
        return cls(backend, chat_template=chat_template, special_tokens=special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special_tokens: put around it what the model expects around a text, if anything (often a first token).

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair, which JSON can spell and UTF-8 cannot.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise InvalidRequestError("the text is not valid Unicode: it holds a lone surrogate") from error

    def to_json(self) -> str:
        """Return it as the text of a `tokenizer.json`."""
        return self._backend.to_str()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; an id without a token has no text."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return how the vocabulary spells a token."""
        return self._backend.id_to_token(token_id)

    def render_chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """Return a conversation as a prompt, to be encoded with add_special_tokens off.

        Raises:
            InvalidRequestError: the model has no chat template, or its template refuses the messages.
        """
        if self._chat is None:
            raise InvalidRequestError("this model has no chat template; use completions", param="messages")
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt)


def folder_chat_template(folder: Path) -> str | None:
    """Return the chat template of a Hugging Face folder: chat_template.jinja, else that of tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    config = _tokenizer_config(folder)
    template = config.values.get("chat_template")
    if isinstance(template, list):
        named = [Fields(config.source, entry) for entry in template if isinstance(entry, dict)]
        return next((entry.text("template") for entry in named if entry.text("name") == "default"), None)
    return None if template is None else config.text("chat_template")


def _folder_special_tokens(folder: Path) -> dict[str, str]:
    config = _tokenizer_config(folder)
    return {name: _token_text(config, name) for name in _TEMPLATE_TOKENS if config.has(name)}


def _token_text(config: Fields, name: str) -> str:
    """Return a token that is spelled as a string or as an object with its `content`."""
    if isinstance(config.values[name], Mapping):
        return config.section(name).text("content")
    return config.text(name)


def _tokenizer_config(folder: Path) -> Fields:
    path = folder / "tokenizer_config.json"
    return Fields.read(path) if path.is_file() else Fields(str(path), {})
