"""The tokenizer that a GGUF file's metadata describes, as a `tokenizers` pipeline.

A file says which of two algorithms its vocabulary belongs to, and for byte-level BPE the name of the rule that cuts
text into words. The rule itself is in no file, so a name that is not listed here is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.decoders import Decoder
from tokenizers.models import BPE
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from kvorum.kvstore.errors import CheckpointError
from kvorum.workers.checkpoint.fields import Fields

_SPACE = "▁"
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CASELESS_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True, slots=True)
class _Rule:
    """How text is cut into words before byte-level BPE, pattern after pattern.

    ignore_merges: a word that is a token is taken whole. adds_bos: what a file means that does not say.
    """

    patterns: tuple[str, ...]
    normalizer: Normalizer | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


_LLAMA3 = _Rule((_CASELESS_PATTERN % r"\p{N}{1,3}",), ignore_merges=True, adds_bos=True)
_QWEN2 = _Rule((_CASELESS_PATTERN % r"\p{N}",), normalizer=normalizers.NFC())
_RULES: Mapping[str, _Rule] = {
    "default": _Rule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Rule((_GPT2_PATTERN,)),
    "smollm": _Rule((r"\p{N}", _GPT2_PATTERN)),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def build_tokenizer(metadata: Fields) -> Tokenizer:
    """Return the pipeline from text to token ids and back."""
    build = _MODELS.get(metadata.text("tokenizer.ggml.model"))
    if build is None:
        raise metadata.error("tokenizer.ggml.model", f"is not supported; supported are {', '.join(_MODELS)}")
    vocabulary = _Vocabulary.read(metadata)
    tokenizer = build(metadata, vocabulary)
    tokenizer.add_special_tokens(vocabulary.added((_TokenType.CONTROL, _TokenType.UNKNOWN), special=True))
    tokenizer.add_tokens(vocabulary.added((_TokenType.USER_DEFINED,), special=False))
    return tokenizer


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """tokens[i] is the text of token i, types[i] says what kind it is."""

    tokens: tuple[str, ...]
    types: tuple[int, ...]

    @classmethod
    def read(cls, metadata: Fields) -> _Vocabulary:
        tokens = metadata.texts("tokenizer.ggml.tokens")
        types = metadata.integers("tokenizer.ggml.token_type") or (int(_TokenType.NORMAL),) * len(tokens)
        _require_one_each(metadata, "tokenizer.ggml.token_type", types, tokens)
        return cls(tokens, types)

    def ids(self) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens)}

    def added(self, types: tuple[_TokenType, ...], *, special: bool) -> list[AddedToken]:
        """Return the tokens of these types, which are found in text before it is cut into words."""
        return [
            AddedToken(token, special=special, normalized=False)
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in types
        ]


def _byte_level(metadata: Fields, vocabulary: _Vocabulary) -> Tokenizer:
    rule = _RULES.get(metadata.text("tokenizer.ggml.pre", "default"))
    if rule is None:
        raise metadata.error("tokenizer.ggml.pre", f"is not supported; supported are {', '.join(_RULES)}")
    merges = [_cut_merge(merge) for merge in metadata.texts("tokenizer.ggml.merges")]
    try:
        model = BPE(vocabulary.ids(), merges, ignore_merges=rule.ignore_merges)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{metadata.source}: tokenizer.ggml.merges does not fit the vocabulary: {error}"
        ) from error
    tokenizer = Tokenizer(model)
    if rule.normalizer is not None:
        tokenizer.normalizer = rule.normalizer
    cuts: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    _add_ends(tokenizer, metadata, vocabulary, adds_bos=rule.adds_bos)
    return tokenizer


def _cut_merge(merge: str) -> tuple[str, str]:
    # Neither half is empty, so a space at the very start belongs to the left half.
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _sentencepiece(metadata: Fields, vocabulary: _Vocabulary) -> Tokenizer:
    """Build SentencePiece's BPE: spaces are letters of their own, and what is in no token becomes bytes."""
    unknown, _ = _special_token(metadata, vocabulary, "tokenizer.ggml.unknown_token_id", 0)
    model = BPE(
        vocabulary.ids(), _merges_by_score(metadata, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    spell: list[Normalizer] = [normalizers.Replace(" ", _SPACE)]
    unspell: list[Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag("tokenizer.ggml.add_space_prefix", True):
        spell.insert(0, normalizers.Prepend(_SPACE))
        unspell.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spell)
    tokenizer.decoder = decoders.Sequence(unspell)
    _add_ends(tokenizer, metadata, vocabulary, adds_bos=True)
    return tokenizer


def _merges_by_score(metadata: Fields, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges in SentencePiece's order: whichever makes the token of the best score comes first.

    Equal scores go by token id, and two ways to make one token by the longer left half.
    """
    scores = metadata.numbers("tokenizer.ggml.scores")
    _require_one_each(metadata, "tokenizer.ggml.scores", scores, vocabulary.tokens)
    known = frozenset(vocabulary.tokens)
    normal = [index for index, kind in enumerate(vocabulary.types) if kind == _TokenType.NORMAL]
    normal.sort(key=lambda index: -scores[index])
    return [
        (token[:cut], token[cut:])
        for token in (vocabulary.tokens[index] for index in normal)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]


def _add_ends(tokenizer: Tokenizer, metadata: Fields, vocabulary: _Vocabulary, *, adds_bos: bool) -> None:
    """Let encoding put the tokens of begin and end around a text, as the file says."""
    template: list[str] = ["$A"]
    special: list[tuple[str, int]] = []
    if metadata.flag("tokenizer.ggml.add_bos_token", adds_bos):
        special.append(_special_token(metadata, vocabulary, "tokenizer.ggml.bos_token_id"))
        template.insert(0, special[-1][0])
    if metadata.flag("tokenizer.ggml.add_eos_token", False):
        special.append(_special_token(metadata, vocabulary, "tokenizer.ggml.eos_token_id"))
        template.append(special[-1][0])
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _special_token(metadata: Fields, vocabulary: _Vocabulary, name: str, default: int | None = None) -> tuple[str, int]:
    token_id = metadata.integer(name, default)
    if token_id >= len(vocabulary.tokens):
        raise metadata.error(name, f"is not in the vocabulary of {len(vocabulary.tokens)} tokens")
    return vocabulary.tokens[token_id], token_id


def _require_one_each(metadata: Fields, name: str, values: Sized, tokens: Sized) -> None:
    if len(values) != len(tokens):
        raise CheckpointError(f"{metadata.source}: {name} has {len(values)} entries for {len(tokens)} tokens")


_MODELS: Mapping[str, Callable[[Fields, _Vocabulary], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
