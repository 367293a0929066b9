"""What a router knows of its model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvorum.cluster.config import ClusterConfig, ConfigError
from kvorum.cluster.model import load_model, resolve_checkpoint
from kvorum.kvstore.errors import ContextLengthError, InvalidRequestError
from kvtest.tiny_model import tiny_model, write_model_without_weights


def test_short_and_long_texts_are_encoded_alike() -> None:
    model = tiny_model(max_model_len=100_000)
    for text in ("hé", "hé" * 5000):
        token_ids = asyncio.run(model.encode(text, param="prompt", add_special_tokens=True))
        assert bytes(token_ids).decode() == text


def test_a_text_that_cannot_fit_is_not_even_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(max_model_len=10)
    monkeypatch.setattr(type(model.tokenizer), "encode", lambda *_, **__: pytest.fail("was tokenised"))
    with pytest.raises(ContextLengthError, match="prompt has 1000 characters"):
        asyncio.run(model.encode("x" * 1000, param="prompt", add_special_tokens=True))


def test_more_token_ids_than_can_fit_are_not_even_looked_at() -> None:
    model = tiny_model(max_model_len=10)
    assert model.checked_tokens(range(10), param="prompt") == tuple(range(10))
    with pytest.raises(ContextLengthError, match="prompt has 1000000000000 tokens") as caught:
        model.checked_tokens(range(10**12), param="prompt")
    assert caught.value.param == "prompt"


def test_what_the_tokenizer_refuses_names_the_field() -> None:
    with pytest.raises(InvalidRequestError, match="prompt: ") as caught:
        asyncio.run(tiny_model().encode("\ud800", param="prompt", add_special_tokens=True))
    assert caught.value.param == "prompt"


def test_a_model_is_known_before_its_weights_are_read(tmp_path: Path) -> None:
    write_model_without_weights(tmp_path)
    model = load_model(ClusterConfig(model=str(tmp_path)))
    assert (model.name, model.vocab_size, model.max_model_len) == (tmp_path.name, 257, 512)
    assert model.eos_token_ids == (256,)
    # A token's longest spelling is <end>.
    assert model.longest_token_chars == 5


def test_settings_change_name_context_and_chat_template(tmp_path: Path) -> None:
    write_model_without_weights(tmp_path)
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0]['content'] }}!")
    config = ClusterConfig(model=str(tmp_path), served_model_name="mine", max_model_len=100, chat_template=template)
    model = load_model(config)
    assert (model.name, model.max_model_len) == ("mine", 100)
    token_ids = asyncio.run(model.encode_chat([{"role": "user", "content": "hey"}]))
    assert bytes(token_ids) == b"hey!"


def test_a_context_beyond_the_models_is_refused(tmp_path: Path) -> None:
    write_model_without_weights(tmp_path)
    with pytest.raises(ConfigError, match="at most 512, got 513"):
        load_model(ClusterConfig(model=str(tmp_path), max_model_len=513))


def test_more_ranks_than_query_heads_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    write_model_without_weights(tmp_path)
    num_heads = resolve_checkpoint(ClusterConfig(model=str(tmp_path))).spec.num_heads
    with pytest.raises(ConfigError, match="ranks cannot share the"):
        resolve_checkpoint(ClusterConfig(model=str(tmp_path), tensor_parallel_size=num_heads + 1))
