"""One engine step as plain data: what the scheduler decides, ranks carry out and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvorum.kernels.plan import EvictionRule, SequenceStep
from kvorum.kvstore.ops import MemoryOp, Residence
from kvorum.kvstore.policies import Policy
from kvorum.kvstore.types import BlockId, SeqId
from kvorum.workers.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Draw the next token of a sequence. index: how many tokens of the answer came before.

    prompt, answer: the tokens so far, filled in only when a penalty needs them, the answer also for a grammar.
    """

    params: SamplingParams
    index: int
    prompt: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One sequence's part of a step. sample: None while its prompt is not done.

    report_retained: report its retained mass after the step, pending victims not counted.
    """

    seq_id: SeqId
    token_ids: tuple[int, ...]
    step: SequenceStep
    sample: SampleRequest | None
    report_retained: bool = False

    @property
    def residence(self) -> Residence:
        """Where the sequence's slots are after the step."""
        block_ids = tuple(map(BlockId, self.step.block_table))
        return Residence(self.seq_id, self.step.row, block_ids, self.step.num_slots_after)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Memory operations in order, then one forward pass over the rows."""

    ops: tuple[MemoryOp, ...]
    rows: tuple[RowPlan, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(row.step.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class Sample:
    """A drawn token. logprobs: None unless asked for. is_cut: the answer ends here, before it is whole."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step: a sample for each row that asked for one, retained masses where reported."""

    samples: Mapping[SeqId, Sample]
    retained: Mapping[SeqId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MassQuery:
    """Ask for a sequence's retained mass. num_tokens: tokens whose KV was written so far."""

    residence: Residence
    rule: EvictionRule
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CurveQuery:
    """Ask for the retained mass of a sequence were it cut to 0, 1, 2 ... blocks."""

    residence: Residence
    rule: EvictionRule
    num_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class HeadQuery:
    """Ask for a sequence's slots in one KV head of one layer. newest: position of the last token written."""

    residence: Residence
    rule: EvictionRule
    newest: int
    layer: int
    kv_head: int


@dataclass(frozen=True, slots=True)
class HeadSlots:
    """A sequence's slots in one KV head, in slot order.

    positions: of the tokens in them. scores: attention mass received. values: what eviction goes by, the lowest first;
    infinite for what is protected. alive: False for the victim that the next token replaces.
    """

    positions: tuple[int, ...]
    scores: tuple[float, ...]
    values: tuple[float, ...]
    alive: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class BudgetQuery:
    """Ask for the smallest budget, at least `budget`, whose cut keeps `floor` of the mass.

    policy: one that pools does so in this cut.
    """

    residence: Residence
    policy: Policy
    floor: float
    budget: int
    prompt_tokens: int
    num_tokens: int
