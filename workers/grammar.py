"""Answers that must follow a grammar: tokens that may not come next are never drawn.

The grammars and the work of finding those tokens are llguidance's. What a sequence has answered so far is all the state
there is, so an answer goes on anywhere; matchers are only kept so that not every step reads the whole answer again. A
grammar comes here only after routers have tried how long its matcher takes to make (`cluster/grammar_trial.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from kvorum.kvstore.types import SeqId
from kvorum.workers.checkpoint.resolve import Checkpoint
from kvorum.workers.plan import RowPlan, Sample, SampleRequest
from kvorum.workers.sampler import sample_batch


def vocabulary_of(checkpoint: Checkpoint) -> LLTokenizer:
    """Return a model's tokens as grammars see them."""
    tokenizer = checkpoint.load_tokenizer().to_json()
    return LLTokenizer(tokenizer, n_vocab=checkpoint.spec.vocab_size, eos_token=list(checkpoint.eos_token_ids))


@dataclass(slots=True)
class _Progress:
    """How far a matcher has read the answer of its sequence."""

    grammar: str
    matcher: LLMatcher
    answer: list[int] = field(default_factory=list)

    def follows(self, request: SampleRequest) -> bool:
        """Say whether the answer so far goes on where this stands."""
        return self.grammar == request.params.grammar and list(request.answer[: len(self.answer)]) == self.answer


class GrammarSampler:
    """Draws each row's next token; where its request has a grammar, one with which the answer can follow it."""

    def __init__(self, make_vocabulary: Callable[[], LLTokenizer]) -> None:
        """make_vocabulary: called when the first grammar comes."""
        self._make_vocabulary = make_vocabulary
        self._vocabulary: LLTokenizer | None = None
        self._progress: dict[SeqId, _Progress] = {}

    def __call__(self, logits: torch.Tensor, rows: Sequence[RowPlan]) -> Sequence[Sample]:
        """Draw from logits [num_rows, vocab_size], one row for each of `rows`.

        A sample is cut where the answer cannot follow its grammar any further.
        """
        requests = [row.sample for row in rows if row.sample is not None]
        guided = {index: rows[index].seq_id for index, request in enumerate(requests) if request.params.grammar}
        if not guided:
            return sample_batch(logits, requests)
        # Of those that are not in this step a matcher is made anew, should they come again.
        self._progress = {seq: it for seq, it in self._progress.items() if seq in guided.values()}
        logits, is_cut = logits.clone(), set[int]()
        for index, seq_id in guided.items():
            allowed = self._allowed(seq_id, requests[index], vocab_size=logits.shape[1])
            if allowed is None:
                is_cut.add(index)
                allowed = torch.zeros(logits.shape[1], dtype=torch.bool)
                allowed[list(requests[index].params.eos_token_ids)] = True
            logits[index].masked_fill_(~allowed.to(logits.device), -torch.inf)
        samples = sample_batch(logits, requests)
        return [replace(sample, is_cut=True) if index in is_cut else sample for index, sample in enumerate(samples)]

    def _allowed(self, seq_id: SeqId, request: SampleRequest, *, vocab_size: int) -> torch.Tensor | None:
        """Return which tokens may come next, [vocab_size] bool; None where that cannot be told."""
        progress = self._progress.pop(seq_id, None)
        if progress is None or not progress.follows(request):
            self._vocabulary = self._vocabulary or self._make_vocabulary()
            matcher = LLMatcher(self._vocabulary, request.params.grammar, log_level=0)
            progress = _Progress(request.params.grammar, matcher)
        self._progress[seq_id] = progress
        matcher, news = progress.matcher, list(request.answer[len(progress.answer) :])
        progress.answer += news
        if news and not matcher.consume_tokens(news):
            return None
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:vocab_size]
        # What went wrong is not logged: llguidance's words have the client's grammar and answer in them.
        return None if matcher.is_error() else torch.from_numpy(bits.astype(bool))
