"""Text that arrives in pieces is the text that arrives at once, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvorum.cluster.detokenizer import IncrementalDetokenizer, StopFilter
from kvtest.tiny_model import byte_tokenizer

TOKENIZER = byte_tokenizer()
bytes_of_text = st.text(max_size=30).map(lambda text: list(text.encode()))
any_bytes = st.lists(st.integers(0, 256), max_size=40)
# Bytes that begin, continue or break characters, to meet every way of being incomplete.
nasty_bytes = st.lists(st.sampled_from([0x41, 0x80, 0x9F, 0xC3, 0xE2, 0xF0, 0xFF, 0xEF, 0xBF, 0xBD]), max_size=200)
short_texts = st.text("abé€😀", max_size=12)


def decode(token_ids: Sequence[int]) -> str:
    return TOKENIZER.decode(token_ids)


def pieces_of(token_ids: Sequence[int], *, sizes: Sequence[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(decode)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(detokenizer.push(token_ids[start : start + size]))
        start += size
    pieces.append(detokenizer.push(token_ids[start:]))
    return [*pieces, detokenizer.flush()]


@given(bytes_of_text | any_bytes | nasty_bytes, st.lists(st.integers(0, 5), max_size=40))
@example([0xFF] * 300, [1] * 300)
@example([0xE2] * 300, [1] * 300)
@example([0xF0, 0x9F] * 150, [1] * 300)
def test_the_pieces_are_the_whole(token_ids: list[int], sizes: list[int]) -> None:
    assert "".join(pieces_of(token_ids, sizes=sizes)) == decode(token_ids)


@given(st.text(max_size=30))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    token_ids = list(text.encode())
    pieces = pieces_of(token_ids, sizes=[1] * len(token_ids))
    assert [piece for piece in pieces if piece] == list(text)


@given(st.text(max_size=10), bytes_of_text)
def test_the_context_is_not_repeated(prompt: str, answer: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(decode, context=list(prompt.encode()))
    assert detokenizer.push(answer) + detokenizer.flush() == decode(answer)


def test_a_character_that_began_in_the_prompt_is_finished_in_the_answer() -> None:
    prompt, answer = list("é".encode())[:1], [*list("é".encode())[1:], ord("!")]
    assert IncrementalDetokenizer(decode, context=prompt).push(answer) == "é!"


def test_endless_garbage_costs_no_more_with_each_step() -> None:
    longest = 0

    def watched(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    detokenizer = IncrementalDetokenizer(watched)
    for _ in range(1000):
        detokenizer.push([0xFF])
    assert longest < 100


def cut_at_first_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Read character by character; the stop string that is complete first wins, the longest if several are."""
    for end in range(len(text) + 1):
        matching = [each for each in stop if text[:end].endswith(each)]
        if matching:
            return text[: end - max(map(len, matching))], True
    return text, False


@given(st.lists(short_texts, max_size=8), st.lists(short_texts.filter(bool), max_size=3))
@example(["x", "ab", "c"], ["xabc", "ab"])
@example(["aa", "b"], ["aab"])
def test_what_is_sent_is_the_text_up_to_the_first_stop_string(pieces: list[str], stop: list[str]) -> None:
    stop_filter = StopFilter(stop)
    sent = "".join(map(stop_filter.push, pieces)) + stop_filter.flush()
    assert (sent, stop_filter.is_stopped) == cut_at_first_stop("".join(pieces), stop)
    if stop_filter.matched is not None:
        assert stop_filter.matched in stop
        assert "".join(pieces).startswith(sent + stop_filter.matched)


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_than_may_be_needed(text: str, stop: list[str]) -> None:
    stop_filter = StopFilter(stop)
    for end in range(1, len(text) + 1):
        stop_filter.push(text[end - 1])
        if stop_filter.is_stopped:
            return
        held = stop_filter._held
        assert held == "" or any(each.startswith(held) and each != held for each in stop)


def test_an_empty_stop_string_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        StopFilter([""])
