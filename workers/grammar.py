"""Answers that must follow a grammar: tokens that may not come next are never drawn.

The grammars and the work of finding those tokens are llguidance's. What a sequence has answered so far is all the state
there is, so an answer goes on anywhere; matchers are only kept so that not every step reads the whole answer again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from kvorum.kvstore.types import SeqId
from kvorum.workers.checkpoint.resolve import Checkpoint
from kvorum.workers.plan import RowPlan, Sample, SampleRequest
from kvorum.workers.sampler import sample_batch

logger = logging.getLogger(__name__)

# Sequences whose matchers are kept; those of others are made anew when they come up.
MAX_MATCHERS = 1024


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
        self._progress: OrderedDict[SeqId, _Progress] = OrderedDict()

    def __call__(self, logits: torch.Tensor, rows: Sequence[RowPlan]) -> Sequence[Sample]:
        """Draw from logits [num_rows, vocab_size], one row for each of `rows`."""
        requests = [row.sample for row in rows if row.sample is not None]
        guided = [index for index, request in enumerate(requests) if request.params.grammar]
        if guided:
            logits = logits.clone()
            for index in guided:
                allowed = self._allowed(rows[index].seq_id, requests[index], vocab_size=logits.shape[1])
                logits[index].masked_fill_(~allowed.to(logits.device), -torch.inf)
        return sample_batch(logits, requests)

    def _allowed(self, seq_id: SeqId, request: SampleRequest, *, vocab_size: int) -> torch.Tensor:
        """Return which tokens may come next, [vocab_size] bool; only the end where the grammar allows nothing more."""
        progress = self._progress.pop(seq_id, None)
        if progress is None or not progress.follows(request):
            self._vocabulary = self._vocabulary or self._make_vocabulary()
            progress = _Progress(
                request.params.grammar, LLMatcher(self._vocabulary, request.params.grammar, log_level=0)
            )
        self._progress[seq_id] = progress
        if len(self._progress) > MAX_MATCHERS:
            self._progress.popitem(last=False)
        matcher, news = progress.matcher, list(request.answer[len(progress.answer) :])
        progress.answer += news
        if (not news or matcher.consume_tokens(news)) and not matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:vocab_size]
            if not matcher.is_error():
                return torch.from_numpy(bits.astype(bool))
        if matcher.is_error():
            logger.warning("an answer ends because its grammar cannot be followed: %s", matcher.get_error())
        allowed = torch.zeros(vocab_size, dtype=torch.bool)
        allowed[list(request.params.eos_token_ids)] = True
        return allowed
