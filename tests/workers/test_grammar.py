"""Tokens with which an answer could not follow its grammar are never drawn, whoever asks for them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from kvorum.kernels.plan import SequenceStep
from kvorum.kvstore.types import SeqId
from kvorum.workers.grammar import GrammarSampler
from kvorum.workers.plan import RowPlan, SampleRequest
from kvorum.workers.request import SamplingParams
from kvtest.tiny_model import byte_tokenizer

END = 256
VOCAB = 300  # more logits than tokens, as padded models have
DIGITS = LLMatcher.grammar_from_regex("[0-9]{2,3}")
GREEDY = SamplingParams(max_tokens=50, temperature=0.0, eos_token_ids=(END,), grammar=DIGITS)


def vocabulary() -> LLTokenizer:
    return LLTokenizer(byte_tokenizer().to_json(), n_vocab=VOCAB, eos_token=[END])


def row(seq_id: int, params: SamplingParams, answer: list[int]) -> RowPlan:
    step = SequenceStep(row=0, block_table=(0,), start=0, num_tokens=1, num_slots=0)
    return RowPlan(SeqId(seq_id), (0,), step, SampleRequest(params, len(answer), answer=tuple(answer)))


def answer_of(sampler: GrammarSampler, params: SamplingParams, logits: torch.Tensor, *, seq_id: int = 0) -> str:
    """Draw until the end, which must come."""
    answer: list[int] = []
    while not answer or answer[-1] != END:
        (sample,) = sampler(logits[None], [row(seq_id, params, answer)])
        answer.append(sample.token_id)
        assert len(answer) < 40
    return bytes(answer[:-1]).decode()


def wanting(*token_ids: int) -> torch.Tensor:
    """Return logits that want these tokens, the first one most."""
    logits = torch.zeros(VOCAB)
    for rank, token_id in enumerate(token_ids):
        logits[token_id] = 100.0 - rank
    return logits


def test_a_model_that_wants_something_else_gets_the_best_of_what_is_possible() -> None:
    logits = wanting(ord("x"), 299, ord("7"), ord("5"))
    assert answer_of(GrammarSampler(vocabulary), GREEDY, logits) == "777"
    assert answer_of(GrammarSampler(vocabulary), GREEDY, wanting(ord("x"), END, ord("5"))) == "55"


def test_bias_and_penalties_cannot_force_what_is_not_possible() -> None:
    bias = {ord("x"): 100.0, ord("4"): 50.0}
    params = replace(GREEDY, logit_bias=bias, repetition_penalty=2.0, temperature=1.5)
    for seed in range(20):
        text = answer_of(GrammarSampler(vocabulary), replace(params, seed=seed), torch.zeros(VOCAB))
        assert text.isdigit()
        assert 2 <= len(text) <= 3


def test_sequences_side_by_side_follow_their_own_grammars_and_others_none() -> None:
    sampler = GrammarSampler(vocabulary)
    letters = replace(GREEDY, grammar=LLMatcher.grammar_from_regex("[a-z]+"))
    free = replace(GREEDY, grammar="")
    logits = torch.stack([wanting(ord("!"), ord("q"), ord("1"))] * 3)
    drawn = sampler(logits, [row(0, GREEDY, []), row(1, free, []), row(2, letters, [])])
    assert bytes(sample.token_id for sample in drawn) == b"1!q"
    assert logits[0, ord("!")] == 100.0, "the caller's logits are left alone"


def test_an_answer_goes_on_wherever_it_is_taken_up() -> None:
    sampler = GrammarSampler(vocabulary)
    logits = wanting(ord("1"), END)[None]
    (kept,) = sampler(logits, [row(0, GREEDY, [ord("1"), ord("1")])])
    (other_sequence_with_that_number,) = sampler(logits, [row(0, GREEDY, [ord("2"), ord("3"), ord("4")])])
    assert (kept.token_id, other_sequence_with_that_number.token_id) == (ord("1"), END)


def test_matchers_of_sequences_that_are_gone_are_let_go() -> None:
    sampler = GrammarSampler(vocabulary)
    for seq_id in range(5):
        assert answer_of(sampler, GREEDY, wanting(ord("1")), seq_id=seq_id) == "111"
    assert list(sampler._progress) == [4]


def test_an_answer_that_cannot_follow_any_more_is_cut_and_nothing_of_it_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampler = GrammarSampler(vocabulary)
    with caplog.at_level(logging.DEBUG):
        (sample,) = sampler(wanting(ord("1"))[None], [row(0, GREEDY, [ord("x")])])
    assert (sample.token_id, sample.is_cut) == (END, True)
    assert caplog.text == ""


def test_an_answer_whose_grammar_is_at_its_end_ends() -> None:
    sampler = GrammarSampler(vocabulary)
    (sample,) = sampler(wanting(ord("1"))[None], [row(0, GREEDY, [*b"111"])])
    assert (sample.token_id, sample.is_cut) == (END, False)


def test_log_probabilities_leave_out_what_is_not_possible() -> None:
    params = replace(GREEDY, logprobs=20)
    (sample,) = GrammarSampler(vocabulary)(torch.zeros(1, VOCAB), [row(0, params, [])])
    assert sample.logprobs is not None
    assert sorted(token_id for token_id, _ in sample.logprobs.top) == [*b"0123456789"]
    json.dumps(sample.logprobs.top, allow_nan=False)
