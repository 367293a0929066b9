"""Tokenizers of both formats, and chat templates, against transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS, convert_gguf_tokenizer

from kvorum.kvstore.errors import CheckpointError, InvalidRequestError
from kvorum.workers.checkpoint.chat_template import ChatTemplate
from kvorum.workers.checkpoint.fields import Fields
from kvorum.workers.checkpoint.gguf_file import read_gguf
from kvorum.workers.checkpoint.gguf_tokenizer import build_tokenizer
from kvorum.workers.checkpoint.resolve import resolve
from kvorum.workers.checkpoint.tokenizer import Tokenizer, folder_chat_template
from kvtest.checkpoints import CHAT_TEMPLATE, tiny_tokenizer, write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXTS = [
    "",
    " ",
    "Hello, world!",
    "It was 1945; 3.14159 and 1,000,000 and ½ and ٣.",
    "def f(x):\n\treturn  x ** 2  # square\n\n\n",
    "Café déjà vu, naïve — “quotes” … 日本語 한국어 עברית 🙂👩‍👩‍👧",
    "They're we'll I'M DON'T",
    "<|im_start|>user\nHi<|im_end|>\n",
    "  leading and trailing  ",
    "\u00a0\u2003odd\u200bspaces\r\n\r\n",
]
MESSAGES: list[dict[str, str]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say {% hi %} & <b>bye</b>"},
    {"role": "assistant", "content": "hi\n"},
    {"role": "user", "content": "Thanks 🙂"},
]


def byte_level_metadata(**changes: object) -> Fields:
    """Describe a byte-level vocabulary: three special tokens, one user-defined, the bytes and a few merges."""
    pieces = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = ["1 2", "12 3", "Ġ a", "Ġa b", "a b"]
    tokens = [*pieces, *(merge.replace(" ", "") for merge in merges)]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [USER_DEFINED] + [NORMAL] * (len(tokens) - 4),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return Fields("m.gguf", {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}})


def sentencepiece_metadata(**changes: object) -> Fields:
    """Describe a SentencePiece vocabulary whose scores say in which order pieces were learned."""
    letters = ["▁", *"abcdehlorwt", "é"]
    learned = ["he", "ll", "▁w", "hell", "▁t", "▁he", "hello", "▁hello", "or", "▁wor", "ld", "▁world", "aa", "aaa"]
    letters.append("n")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *letters, *learned]
    scores = [0.0] * 259 + [-1000.0] * len(letters) + [-float(rank) for rank in range(len(learned))]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return Fields("m.gguf", {**metadata, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}})


def pieces_of(backend: tokenizers.Tokenizer, text: str) -> list[str]:
    return backend.encode(text, add_special_tokens=False).tokens


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return resolve("smollm2-135m").load_tokenizer()


@pytest.fixture(scope="module")
def transformers_smollm2() -> PreTrainedTokenizerFast:
    path = resolve("smollm2-135m").path
    tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))
    # It loses the rule that digits stand alone.
    backend: Any = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.model
class TestEmbeddedModel:
    @pytest.mark.parametrize("text", TEXTS)
    def test_ids_are_those_of_transformers(
        self, smollm2: Tokenizer, transformers_smollm2: PreTrainedTokenizerFast, text: str
    ) -> None:
        assert smollm2.encode(text) == transformers_smollm2.encode(text, add_special_tokens=False)

    @settings(deadline=None)
    @given(text=st.text(max_size=60))
    def test_any_text_gets_the_ids_of_transformers(
        self, smollm2: Tokenizer, transformers_smollm2: PreTrainedTokenizerFast, text: str
    ) -> None:
        assert smollm2.encode(text) == transformers_smollm2.encode(text, add_special_tokens=False)

    # The vocabulary lacks some control characters and everything from U+40000 on.
    @given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cc", "Cs"]), max_size=60))
    def test_decoding_gives_the_text_back(self, smollm2: Tokenizer, text: str) -> None:
        assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text

    def test_digits_stand_alone(self, smollm2: Tokenizer) -> None:
        assert [smollm2.decode([token_id]) for token_id in smollm2.encode("in 1945")] == ["in", " ", "1", "9", "4", "5"]

    def test_nothing_is_put_before_a_text(self, smollm2: Tokenizer) -> None:
        assert smollm2.encode("Hello") == smollm2.encode("Hello", add_special_tokens=False)

    def test_special_tokens_in_a_text_are_special_and_need_not_show(self, smollm2: Tokenizer) -> None:
        ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>")
        assert (ids[0], ids[-1]) == (1, 2)
        assert {1, 2} <= smollm2.special_ids
        assert smollm2.decode(ids) == "user\nHi"
        assert smollm2.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nHi<|im_end|>"

    def test_the_vocabulary_can_be_looked_up(self, smollm2: Tokenizer) -> None:
        assert smollm2.vocab_size == 49152
        assert smollm2.token_to_id("<|im_end|>") == 2
        assert smollm2.id_to_token(2) == "<|im_end|>"
        assert smollm2.token_to_id("no such token") is None
        assert smollm2.id_to_token(49152) is None
        assert smollm2.decode([49152]) == ""

    @pytest.mark.parametrize("add_generation_prompt", [True, False])
    @pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:2], MESSAGES[1:]], ids=len)
    def test_chats_are_rendered_as_by_transformers(
        self,
        smollm2: Tokenizer,
        transformers_smollm2: PreTrainedTokenizerFast,
        messages: list[dict[str, str]],
        add_generation_prompt: bool,
    ) -> None:
        expected = transformers_smollm2.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert smollm2.render_chat(messages, add_generation_prompt=add_generation_prompt) == expected

    def test_threads_may_share_a_tokenizer(self, smollm2: Tokenizer) -> None:
        texts = [text * 20 for text in TEXTS] * 8
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(smollm2.encode, texts)) == [smollm2.encode(text) for text in texts]


class TestByteLevel:
    @pytest.mark.parametrize("rule", ["llama-bpe", "llama3", "qwen2", "gpt-2"])
    @given(text=st.text(st.characters(codec="utf-8"), max_size=40) | st.text("aB1'sT \n\r\t.,½", max_size=40))
    def test_words_are_cut_as_transformers_cuts_them(self, rule: str, text: str) -> None:
        backend = build_tokenizer(byte_level_metadata(pre=rule))
        if rule == "gpt-2":
            expected: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
        else:
            split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[rule]), behavior="isolated")
            expected = pre_tokenizers.Sequence(
                [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
            )
        found: Any = backend.pre_tokenizer
        assert found.pre_tokenize_str(text) == expected.pre_tokenize_str(text)

    @pytest.mark.parametrize(
        ("rule", "expected"),
        [
            ("smollm", ["Ġab", "Ġ", "1", "2", "3", "4", ","]),
            ("gpt-2", ["Ġab", "Ġ", "123", "4", ","]),
            ("qwen2", ["Ġab", "Ġ", "1", "2", "3", "4", ","]),
            ("llama-bpe", ["Ġab", "Ġ", "123", "4", ","]),
            ("default", ["Ġab", "Ġ", "123", "4", ","]),
        ],
    )
    def test_numbers_show_the_rule(self, rule: str, expected: list[str]) -> None:
        assert pieces_of(build_tokenizer(byte_level_metadata(pre=rule)), " ab 1234,") == expected

    def test_a_file_without_a_rule_follows_the_default(self) -> None:
        metadata = byte_level_metadata(pre=None)
        assert pieces_of(build_tokenizer(metadata), "a!?12341") == ["a", "!", "?", "123", "4", "1"]

    def test_llama3_takes_whole_words_from_the_vocabulary_before_merging(self) -> None:
        tokens = [*byte_level_metadata().texts("tokenizer.ggml.tokens"), "bab"]
        types = [NORMAL] * len(tokens)
        merged = build_tokenizer(byte_level_metadata(tokens=tokens, token_type=types))
        whole = build_tokenizer(byte_level_metadata(tokens=tokens, token_type=types, pre="llama-bpe"))
        assert (pieces_of(merged, "bab"), pieces_of(whole, "bab")) == (["b", "ab"], ["bab"])

    def test_qwen2_composes_characters(self) -> None:
        backend = build_tokenizer(byte_level_metadata(pre="qwen2"))
        assert backend.encode("e\u0301").ids == backend.encode("\u00e9").ids

    @pytest.mark.parametrize(
        ("changes", "first", "last"),
        [
            ({}, "a", "b"),
            ({"add_bos_token": True}, "<|im_start|>", "b"),
            ({"add_eos_token": True}, "a", "<|im_end|>"),
            ({"pre": "llama-bpe"}, "<|im_start|>", "b"),
            ({"pre": "llama-bpe", "add_bos_token": False}, "a", "b"),
        ],
        ids=str,
    )
    def test_what_stands_around_a_text_is_what_the_file_says(
        self, changes: Mapping[str, object], first: str, last: str
    ) -> None:
        tokens = build_tokenizer(byte_level_metadata(**changes)).encode("a b").tokens
        assert (tokens[0], tokens[-1]) == (first, last)
        assert pieces_of(build_tokenizer(byte_level_metadata(**changes)), "a b") == ["a", "Ġ", "b"]

    def test_user_defined_tokens_stay_whole_but_are_not_special(self, tmp_path: Path) -> None:
        values = {"general.architecture": "llama", **byte_level_metadata().values}
        write_gguf(tmp_path / "m.gguf", metadata=values, tensors={})
        tokenizer = Tokenizer.from_gguf(read_gguf(tmp_path / "m.gguf"), chat_template=None)
        assert tokenizer.encode("a<think>b") == [tokenizer.token_to_id("a"), 3, tokenizer.token_to_id("b")]
        assert tokenizer.decode([3]) == "<think>"
        assert tokenizer.special_ids == {0, 1, 2}

    def test_a_vocabulary_without_types_has_normal_tokens_only(self) -> None:
        assert build_tokenizer(byte_level_metadata(token_type=None)).get_added_tokens_decoder() == {}


class TestSentencePiece:
    def test_the_best_score_is_merged_first(self) -> None:
        backend = build_tokenizer(sentencepiece_metadata())
        assert pieces_of(backend, "hello world") == ["▁hello", "▁world"]
        assert pieces_of(backend, "held") == ["▁he", "ld"]
        assert pieces_of(backend, "aaaaa") == ["▁", "aa", "aaa"]

    def test_pieces_are_those_of_transformers(self) -> None:
        metadata = sentencepiece_metadata()
        description = {
            "tokenizer_type": "llama",
            "tokens": list(metadata.texts("tokenizer.ggml.tokens")),
            "scores": list(metadata.numbers("tokenizer.ggml.scores")),
            "token_type": list(metadata.integers("tokenizer.ggml.token_type")),
        }
        convert: Any = convert_gguf_tokenizer
        expected, _ = convert("llama", description)
        backend = build_tokenizer(metadata)
        for text in ["hello world", "held  the tall  word ", "naïve é 日本", "aaaa aa", "hellohello"]:
            assert pieces_of(backend, text) == expected.encode(text, add_special_tokens=False).tokens
            ids = backend.encode(text).ids
            assert backend.decode(ids, skip_special_tokens=True) == text

    def test_what_no_piece_holds_becomes_bytes(self) -> None:
        backend = build_tokenizer(sentencepiece_metadata())
        assert pieces_of(backend, "z\n") == ["▁", "<0x7A>", "<0x0A>"]
        assert backend.decode(backend.encode("日本z").ids) == "日本z"

    def test_a_space_goes_before_every_stretch_of_text_unless_the_file_says_no(self) -> None:
        assert pieces_of(build_tokenizer(sentencepiece_metadata()), "he<s>he") == ["▁he", "<s>", "▁he"]
        backend = build_tokenizer(sentencepiece_metadata(add_space_prefix=False))
        assert pieces_of(backend, "he<s>he") == ["he", "<s>", "he"]
        assert backend.decode(backend.encode(" he").ids) == " he"

    def test_a_text_that_begins_with_a_space_gets_another(self) -> None:
        backend = build_tokenizer(sentencepiece_metadata())
        assert pieces_of(backend, " he") == ["▁", "▁he"]
        assert backend.decode(backend.encode(" he").ids) == " he"

    def test_a_text_begins_with_bos_unless_the_file_says_no(self) -> None:
        assert build_tokenizer(sentencepiece_metadata()).encode("he").tokens == ["<s>", "▁he"]
        assert build_tokenizer(sentencepiece_metadata(add_bos_token=False)).encode("he").tokens == ["▁he"]

    def test_equal_scores_go_by_token_id(self) -> None:
        tokens = sentencepiece_metadata().texts("tokenizer.ggml.tokens")
        backend = build_tokenizer(sentencepiece_metadata(scores=[0.0] * len(tokens)))
        assert pieces_of(backend, "hello world") == ["▁hello", "▁world"]

    def test_runs_of_spaces_that_a_file_defines_stay_whole(self) -> None:
        base = sentencepiece_metadata()
        tokens = [*base.texts("tokenizer.ggml.tokens"), "  ", "\n\n"]
        backend = build_tokenizer(
            sentencepiece_metadata(
                tokens=tokens,
                scores=[*base.numbers("tokenizer.ggml.scores"), -1000.0, -1000.0],
                token_type=[*base.integers("tokenizer.ggml.token_type"), USER_DEFINED, USER_DEFINED],
                add_space_prefix=False,
            )
        )
        ids = backend.encode("he  he\n\n").ids
        assert [tokens[token_id] for token_id in ids] == ["<s>", "he", "  ", "he", "\n\n"]
        assert backend.decode(ids) == "he  he\n\n"


class TestRefusedMetadata:
    @pytest.mark.parametrize(
        ("changes", "field", "reason"),
        [
            ({"model": "bert"}, "model", "gpt2, llama"),
            ({"model": None}, "model", "missing"),
            ({"pre": "gpt-5"}, "pre", "default, gpt-2, smollm"),
            ({"tokens": None}, "tokens", "missing"),
            ({"tokens": [1, 2]}, "tokens", "list of strings"),
            ({"token_type": [1]}, "token_type", "1 entries for 265 tokens"),
            ({"token_type": ["a"]}, "token_type", "integer"),
            ({"merges": None}, "merges", "missing"),
            ({"merges": ["z z"]}, "merges", "does not fit the vocabulary"),
            ({"add_bos_token": 1}, "add_bos_token", "true or false"),
            ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id", "missing"),
            ({"add_eos_token": True, "eos_token_id": 999}, "eos_token_id", "not in the vocabulary of 265"),
        ],
        ids=str,
    )
    def test_of_byte_level_vocabularies(self, changes: Mapping[str, object], field: str, reason: str) -> None:
        with pytest.raises(CheckpointError, match=rf"m\.gguf: tokenizer\.ggml\.{field}.*{reason}"):
            build_tokenizer(byte_level_metadata(**changes))

    @pytest.mark.parametrize(
        ("changes", "field", "reason"),
        [
            ({"scores": None}, "scores", "missing"),
            ({"scores": [0.0]}, "scores", "1 entries for"),
            ({"scores": ["a"]}, "scores", "list of numbers"),
            ({"unknown_token_id": 9999}, "unknown_token_id", "not in the vocabulary"),
        ],
        ids=str,
    )
    def test_of_sentencepiece_vocabularies(self, changes: Mapping[str, object], field: str, reason: str) -> None:
        with pytest.raises(CheckpointError, match=rf"m\.gguf: tokenizer\.ggml\.{field}.*{reason}"):
            build_tokenizer(sentencepiece_metadata(**changes))


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        tiny_tokenizer(tmp_path)
        return tmp_path

    def write_config(self, folder: Path, **values: object) -> None:
        (folder / "tokenizer_config.json").write_text(json.dumps(values))

    @pytest.mark.parametrize("text", TEXTS)
    def test_ids_are_those_of_transformers(self, folder: Path, text: str) -> None:
        self.write_config(folder, tokenizer_class="PreTrainedTokenizerFast", add_bos_token=False)
        expected = PreTrainedTokenizerFast.from_pretrained(folder)
        tokenizer = Tokenizer.from_folder(folder, chat_template=None)
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == expected.decode(
            expected.encode(text), skip_special_tokens=True
        )

    def test_truncation_and_padding_in_the_file_are_ignored(self, folder: Path) -> None:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.enable_truncation(2)
        backend.enable_padding(length=100)
        backend.save(str(folder / "tokenizer.json"))
        assert len(Tokenizer.from_folder(folder, chat_template=None).encode("abcdef")) == 7

    def test_special_tokens_reach_the_template_in_both_spellings(self, folder: Path) -> None:
        self.write_config(folder, bos_token="<|im_start|>", eos_token={"content": "<|im_end|>", "lstrip": False})
        tokenizer = Tokenizer.from_folder(folder, chat_template="{{ bos_token }}+{{ eos_token }}+{{ pad_token }}")
        assert tokenizer.render_chat([]) == "<|im_start|>+<|im_end|>+"

    def test_the_template_file_wins_over_the_config(self, folder: Path) -> None:
        assert folder_chat_template(folder) is None
        self.write_config(folder, chat_template="from config")
        assert folder_chat_template(folder) == "from config"
        (folder / "chat_template.jinja").write_text("from file")
        assert folder_chat_template(folder) == "from file"

    def test_of_several_templates_the_default_counts(self, folder: Path) -> None:
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
        self.write_config(folder, chat_template=named)
        assert folder_chat_template(folder) == "plain"
        self.write_config(folder, chat_template=named[:1])
        assert folder_chat_template(folder) is None

    def test_a_template_of_another_type_is_named(self, folder: Path) -> None:
        self.write_config(folder, chat_template=7)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template = 7 must be a string"):
            folder_chat_template(folder)

    def test_a_missing_tokenizer_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing; save"):
            Tokenizer.from_folder(tmp_path, chat_template=None)

    def test_a_broken_tokenizer_is_named(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
            Tokenizer.from_folder(folder, chat_template=None)

    def test_half_a_surrogate_pair_is_the_clients_mistake(self, folder: Path) -> None:
        with pytest.raises(InvalidRequestError, match="lone surrogate"):
            Tokenizer.from_folder(folder, chat_template=None).encode("a\ud83d")

    def test_a_model_without_a_template_cannot_chat(self, folder: Path) -> None:
        with pytest.raises(InvalidRequestError, match="no chat template") as caught:
            Tokenizer.from_folder(folder, chat_template=None).render_chat(MESSAGES)
        assert caught.value.param == "messages"


def render(
    source: str, messages: Sequence[Mapping[str, object]] = MESSAGES, tokens: Mapping[str, str] | None = None
) -> str:
    return ChatTemplate(source, tokens or {}).render(messages, add_generation_prompt=True)


class TestChatTemplate:
    @pytest.mark.parametrize(
        "source",
        [
            CHAT_TEMPLATE,
            "{{ messages | tojson }}",
            "{{ messages[0] | tojson(indent=2, sort_keys=true) }}|{{ 'é<' | tojson(ensure_ascii=true) }}",
            "{%- for m in messages -%}\n  {%- if loop.last %}{% break %}{% endif %}\n {{ m.content }}\n{% endfor %}",
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "{% for m in messages %}{% generation %}{{ m['content'] }}\n{% endgeneration %}{% endfor %}",
            "{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}",
            "{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ eos_token }}{{ custom is defined }}",
            "{{ strftime_now('%Y') }}",
            "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}ok",
            "{{ messages | map(attribute='role') | join(',') }}{{ messages[1:] | length }}",
        ],
        ids=range(11),
    )
    def test_what_templates_use_works_as_in_transformers(self, source: str, tmp_path: Path) -> None:
        backend = tiny_tokenizer(tmp_path)
        tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        make: Any = PreTrainedTokenizerFast
        tokenizer: PreTrainedTokenizerFast = make(tokenizer_object=backend, chat_template=source, **tokens)
        expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert render(source, tokens=tokens) == expected

    def test_null_fields_of_a_message_are_absent(self) -> None:
        messages = [{"role": "user", "content": "a", "tool_calls": None}]
        assert render("{{ messages[0].tool_calls is defined }}", messages) == "False"

    @pytest.mark.parametrize(
        ("source", "messages", "reason"),
        [
            ("{{ raise_exception('roles must alternate') }}", MESSAGES, "roles must alternate"),
            ("{{ 'x' + messages[0]['content'] }}", [{"content": [{"type": "text"}]}], "can only concatenate"),
            ("{{ messages[0].content.text + 'x' }}", [{"role": "user"}], "no attribute 'content'"),
            ("{{ messages.append(1) }}", MESSAGES, "unsafe"),
            ("{{ messages.__class__.__mro__ }}", MESSAGES, "unsafe"),
        ],
        ids=range(5),
    )
    def test_what_a_template_refuses_is_the_clients_mistake(
        self, source: str, messages: list[dict[str, object]], reason: str
    ) -> None:
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            render(source, messages)
        assert caught.value.param == "messages"

    def test_a_template_that_is_no_template_is_the_checkpoints_mistake(self) -> None:
        with pytest.raises(CheckpointError, match="chat template is broken at line 2"):
            ChatTemplate("line one\n{% for %}", {})

    def test_a_template_cannot_change_the_clients_messages(self) -> None:
        messages = [{"role": "user", "content": "a"}]
        with pytest.raises(InvalidRequestError):
            render("{% set _ = messages[0].update(role='system') %}", messages)
        assert messages == [{"role": "user", "content": "a"}]
