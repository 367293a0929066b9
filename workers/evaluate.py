"""What a policy costs on a text: perplexity and divergence from the full cache, teacher-forced through the real engine.

Each window of the text is a prompt and the tokens that follow it. Every case and the full cache run side by side in one
engine; a sampler that always 'draws' the text's own next token compares their logits. The first prediction comes from
the prompt alone, before anything is evicted, and does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kvorum.workers.config import EngineConfig
from kvorum.workers.engine import Engine, build_engine
from kvorum.workers.local import LocalExecutor
from kvorum.workers.plan import RowPlan, Sample, SampleRequest
from kvorum.workers.request import EngineRequest, FinishReason, KVParams, Receipt, RequestId, SamplingParams
from kvorum.workers.worker import load_worker, row_by_row


@dataclass(frozen=True, slots=True)
class Window:
    """One piece of text: what is read, and what is predicted after it."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one case cost, over all windows.

    perplexity: exp of the mean negative log-likelihood of the text. kl: mean KL(full || case) in nats per token.
    agreement: share of predictions whose most likely token is the full cache's. retained_mass, kv_tokens_held: means of
    the receipts.
    """

    kv: KVParams
    predictions: int
    perplexity: float
    kl: float
    agreement: float
    retained_mass: float
    kv_tokens_held: float


def cut_windows(tokens: Sequence[int], *, prompt_tokens: int, num_tokens: int, windows: int) -> list[Window]:
    """Cut disjoint windows from the start of a text; as many as it has, at most `windows`."""
    size = prompt_tokens + num_tokens
    starts = range(0, min(windows * size, len(tokens) - size + 1), size)
    return [Window(tuple(tokens[s : s + prompt_tokens]), tuple(tokens[s + prompt_tokens : s + size])) for s in starts]


@dataclass(slots=True)
class _Tally:
    nll: float = 0.0
    kl: float = 0.0
    agreed: int = 0
    predictions: int = 0
    receipts: list[Receipt] = field(default_factory=list)

    def cost(self, kv: KVParams) -> Cost:
        return Cost(
            kv=kv,
            predictions=self.predictions,
            perplexity=math.exp(self.nll / self.predictions),
            kl=self.kl / self.predictions,
            agreement=self.agreed / self.predictions,
            retained_mass=sum(receipt.retained_mass for receipt in self.receipts) / len(self.receipts),
            kv_tokens_held=sum(receipt.kv_tokens_held for receipt in self.receipts) / len(self.receipts),
        )


class _Teacher:
    """Draws the text's next token for every sequence and compares each case's logits with the full cache's.

    The sequences of a window are submitted together, the full cache first, and move in step: all rows of an index are
    in the step in which the full cache's row is, or later.
    """

    def __init__(self, windows: Sequence[Window], tallies: Sequence[_Tally]) -> None:
        self._windows = windows
        self._tallies = tallies
        self._full: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, logits: torch.Tensor, request: SampleRequest, row: RowPlan) -> Sample:
        window, case = divmod(row.seq_id, len(self._tallies))
        token_id = self._windows[window].continuation[request.index]
        if request.index > 0:
            logprobs = logits.double().log_softmax(dim=-1)
            if case == 0:
                self._full[window, request.index] = logprobs
            self._count(self._tallies[case], logprobs, self._full[window, request.index], token_id)
        return Sample(token_id)

    def _count(self, tally: _Tally, logprobs: torch.Tensor, full: torch.Tensor, token_id: int) -> None:
        tally.nll -= float(logprobs[token_id])
        tally.kl += float((full.exp() * (full - logprobs)).sum())
        tally.agreed += int(logprobs.argmax() == full.argmax())
        tally.predictions += 1


async def evaluate(config: EngineConfig, windows: Sequence[Window], cases: Sequence[KVParams]) -> list[Cost]:
    """Measure what each case costs; the first result is the full cache's own.

    Windows need at least two tokens to predict.
    """
    everything = [KVParams(), *cases]
    tallies = [_Tally() for _ in everything]
    config = replace(config, enable_prefix_caching=False, max_num_seqs=len(everything), max_num_waiting=len(everything))
    worker, shape = load_worker(config, sampler=row_by_row(_Teacher(windows, tallies)))
    engine = build_engine(config, shape, LocalExecutor(worker), engine_id="eval")
    await engine.start()
    try:
        for window in windows:
            for tally, receipt in zip(tallies, await _run_window(engine, window, everything), strict=True):
                tally.receipts.append(receipt)
    finally:
        await engine.stop()
    return [tally.cost(kv) for tally, kv in zip(tallies, everything, strict=True)]


async def _run_window(engine: Engine, window: Window, cases: Sequence[KVParams]) -> list[Receipt]:
    session = engine.open_session()
    sampling = SamplingParams(max_tokens=len(window.continuation), temperature=0.0)
    for index, kv in enumerate(cases):
        session.submit(EngineRequest(RequestId(str(index)), window.prompt, sampling, kv))
    receipts: dict[str, Receipt] = {}
    while len(receipts) < len(cases):
        for output in await session.outputs():
            if output.finish_reason is FinishReason.LENGTH and output.receipt is not None:
                receipts[output.request_id] = output.receipt
            elif output.finish_reason is not None:
                raise RuntimeError(output.error or f"a sequence ended with {output.finish_reason}")
    return [receipts[str(index)] for index in range(len(cases))]
