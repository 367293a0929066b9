"""A step while it is being decided, and the rows of which it is made."""

from __future__ import annotations

from kvorum.kernels.plan import SequenceStep
from kvorum.kvstore.sequence import SequenceKV
from kvorum.kvstore.types import SeqId
from kvorum.workers.plan import RowPlan, SampleRequest
from kvorum.workers.sequence import Sequence


class StepBuilder:
    """Collects rows under a budget of tokens.

    is_short: a running sequence lacked blocks, so nobody is admitted. shares: blocks that an elastic newcomer is due.
    urgent: the highest priority that steps stay short for. background_tokens: of prompts of a lower one.
    """

    def __init__(self, max_tokens: int, *, urgent: int | None = None) -> None:
        self.rows: list[RowPlan] = []
        self.tokens_left = max_tokens
        self.is_short = False
        self.shares: dict[SeqId, int] = {}
        self.urgent = urgent
        self.background_tokens = 0
        self._seq_ids: set[SeqId] = set()

    def add(self, row: RowPlan) -> None:
        """Take a row in."""
        self.rows.append(row)
        self.tokens_left -= row.step.num_tokens
        self._seq_ids.add(row.seq_id)

    def holds(self, sequence: Sequence) -> bool:
        """Say whether a sequence is computed in this step, so that its blocks must stay."""
        return sequence.seq_id in self._seq_ids


def decode_row(sequence: Sequence, kv: SequenceKV, *, num_slots: int, replace: bool, choose_victims: bool) -> RowPlan:
    """Return the row of a token whose place was made; num_slots: in use before."""
    return RowPlan(
        seq_id=sequence.seq_id,
        token_ids=(sequence.tokens[-1],),
        step=SequenceStep(
            row=kv.row,
            block_table=tuple(kv.block_ids),
            start=kv.num_tokens - 1,
            num_tokens=1,
            num_slots=num_slots,
            rule=kv.rule,
            replace=replace,
            choose_victims=choose_victims,
        ),
        sample=_sample_request(sequence),
        report_retained=choose_victims and sequence.keeps_floor,
    )


def chunk_row(sequence: Sequence, kv: SequenceKV, *, start: int, num_slots: int) -> RowPlan:
    """Return the row of a chunk whose place was made; num_slots: in use before."""
    return RowPlan(
        seq_id=sequence.seq_id,
        token_ids=tuple(sequence.tokens[start : kv.num_tokens]),
        step=SequenceStep(
            row=kv.row,
            block_table=tuple(kv.block_ids),
            start=start,
            num_tokens=kv.num_tokens - start,
            num_slots=num_slots,
            rule=kv.rule,
        ),
        sample=_sample_request(sequence) if kv.num_tokens == len(sequence.tokens) else None,
    )


def _sample_request(sequence: Sequence) -> SampleRequest:
    params = sequence.request.sampling
    return SampleRequest(
        params,
        sequence.num_answer,
        prompt=sequence.request.prompt_token_ids if params.needs_history else (),
        answer=tuple(sequence.tokens[sequence.num_prompt :]) if params.needs_history or params.grammar else (),
    )
