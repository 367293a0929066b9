"""One engine as a model: a pool of blocks, prompts one after the other, answers side by side. Pure.

Time. A step makes one token for each decoding sequence and takes  step_s + sequence_s * sequences;  while a prompt is
being read, at prefill_tokens_per_s, decoding runs at half its speed. So all decoding sequences move along one *token
clock*: a sequence that began at v ends at v + its answer's length, and the next end is the smallest of a heap, however
many there are.

Memory. A sequence takes its prompt's blocks when its prompt is begun, and grows by one block in block_size tokens until
it is held to what it has. Growth is linear in the token clock, so the moment at which the pool is full follows from a
sum. The prefix cache keeps the blocks of past prompts in what nobody holds.

Quality. A sequence that keeps a fraction f of its tokens keeps the mass R(f) = f ** 0.12: the curve through what was
measured on the embedded model, about 0.8 at an eighth and 0.7 at a sixteenth.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvorum.cluster.bench_trace import BLOCK_TOKENS
from kvorum.kvstore.pricing import Bidder, Rule, allocate
from kvorum.kvstore.types import blocks_for

BLOCK_SIZE = 16
_MASS_EXPONENT = 0.12
# Blocks are got back a few at a time, so that not every token shrinks somebody.
_RECLAIM_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine can do; the defaults are roughly an 8B model on one large GPU."""

    num_blocks: int = 8192
    max_sequences: int = 64
    prefill_tokens_per_s: float = 20_000.0
    step_s: float = 0.008
    sequence_s: float = 0.0001


@dataclass(slots=True, eq=False)
class SimSequence:
    """One request on its way. least: blocks that it may be shrunk to; None for one that may not be."""

    name: str
    tenant: str
    arrived_s: float
    prompt_tokens: int
    answer_tokens: int
    block_ids: tuple[int, ...] = ()
    least: int | None = None
    kept_blocks: float = 0.0
    began_at: float = 0.0  # token clock
    is_held: bool = False
    first_token_s: float | None = None
    done_s: float | None = None
    done_tokens: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0
    retained_mass: float = 1.0
    evicted_tokens: float = 0.0
    is_refused: bool = False

    @property
    def context_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def tokens_to_read(self) -> int:
        """Tokens of the prompt, and of the answer so far after a preemption."""
        return self.prompt_tokens + int(self.done_tokens)


def retained_mass(kept_tokens: float, all_tokens: float) -> float:
    """Return the share of attention that so many kept tokens stand for."""
    return min(1.0, (kept_tokens / all_tokens)) ** _MASS_EXPONENT if all_tokens else 1.0


@dataclass(slots=True)
class EngineCounts:
    """What happened since the start."""

    preemptions: int = 0
    shrinks: int = 0
    block_seconds: float = 0.0


@dataclass(slots=True, eq=False)
class SimEngine:
    """One engine; `advance` moves it to a time, `next_event_s` says when something happens by itself.

    rule: how elastic sequences share the pool when it is short. budget_share: what each elastic sequence is held to
    from its prompt's end on, whatever there is room for; None for none.
    """

    name: str
    spec: EngineSpec
    rule: Rule | None = None
    budget_share: float | None = None
    now_s: float = 0.0
    waiting: deque[SimSequence] = field(default_factory=deque)
    decoding: list[SimSequence] = field(default_factory=list)
    counts: EngineCounts = field(default_factory=EngineCounts)
    _reading: SimSequence | None = None
    _read_done_s: float = math.inf
    _clock: float = 0.0
    _ends: list[tuple[float, int, SimSequence]] = field(default_factory=list)
    _num_ends: int = 0
    _held: float = 0.0
    _num_growing: int = 0
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict)

    @property
    def held_blocks(self) -> float:
        """Blocks that sequences hold."""
        return self._held

    @property
    def num_sequences(self) -> int:
        """Sequences that it runs or queues."""
        return len(self.waiting) + len(self.decoding) + (self._reading is not None)

    @property
    def unread_tokens(self) -> float:
        """Tokens of prompts that are still to be read."""
        reading = max(0.0, self._read_done_s - self.now_s) * self.spec.prefill_tokens_per_s if self._reading else 0.0
        return reading + sum(sequence.tokens_to_read for sequence in self.waiting)

    def submit(self, sequence: SimSequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)
        self._begin_reading()

    def next_event_s(self) -> float:
        """Return when something happens next; infinity when nothing will."""
        return min(self._read_done_s, self._end_s(), self._full_s())

    def advance(self, now_s: float) -> list[SimSequence]:
        """Move to a time that is no later than the next event, let it happen, and return who is done."""
        tokens = (now_s - self.now_s) * self._rate()
        self.counts.block_seconds += (now_s - self.now_s) * self._held
        self._clock += tokens
        self._held += self._num_growing * tokens / BLOCK_SIZE
        self.now_s = now_s
        done = [*self._take_done()]
        if self._read_done_s <= now_s + 1e-9:
            self._end_reading()
        if self._held >= self.spec.num_blocks - 1e-6:
            self._get_back(max(1.0, _RECLAIM_SHARE * self.spec.num_blocks))
        self._begin_reading()
        return done

    # Reading prompts.

    def _begin_reading(self) -> None:
        if self._reading or not self.waiting or len(self.decoding) >= self.spec.max_sequences:
            return
        sequence = self.waiting[0]
        needed = blocks_for(sequence.tokens_to_read + 1, BLOCK_SIZE)
        lacking = needed - (self.spec.num_blocks - self._held)
        if lacking > 0 and not self._shrink(lacking):
            return
        self.waiting.popleft()
        sequence.cached_tokens = self._hit(sequence.block_ids) if not sequence.done_tokens else 0
        self._held += needed
        sequence.kept_blocks = needed
        self._reading = sequence
        to_read = max(1, sequence.tokens_to_read - sequence.cached_tokens)
        self._read_done_s = self.now_s + to_read / self.spec.prefill_tokens_per_s

    def _end_reading(self) -> None:
        sequence = self._reading
        assert sequence
        self._reading, self._read_done_s = None, math.inf
        sequence.first_token_s = sequence.first_token_s or self.now_s
        sequence.began_at = self._clock - sequence.done_tokens
        self._remember(sequence.block_ids)
        self.decoding.append(sequence)
        self._num_growing += 1
        sequence.is_held = False
        self._num_ends += 1
        heapq.heappush(self._ends, (sequence.began_at + sequence.answer_tokens, self._num_ends, sequence))
        if self.budget_share is not None and sequence.least is not None:
            self._cut(sequence, max(1, int(self.budget_share * sequence.context_tokens / BLOCK_SIZE)))

    def _hit(self, block_ids: Sequence[int]) -> int:
        """Return how many tokens of a prompt's beginning are cached."""
        count = 0
        for block_id in block_ids:
            if block_id not in self._cached:
                break
            count += 1
        return count * BLOCK_TOKENS

    def _remember(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._cached[block_id] = None
            self._cached.move_to_end(block_id)
        room = (self.spec.num_blocks - self._held) * BLOCK_SIZE / BLOCK_TOKENS
        while len(self._cached) > max(0.0, room):
            self._cached.popitem(last=False)

    # Decoding.

    def _rate(self) -> float:
        """Return the tokens a second of each decoding sequence."""
        if not self.decoding:
            return 0.0
        rate = 1.0 / (self.spec.step_s + self.spec.sequence_s * len(self.decoding))
        return rate / 2 if self._reading else rate

    def _end_s(self) -> float:
        return self.now_s + max(0.0, self._ends[0][0] - self._clock) / self._rate() if self._ends else math.inf

    def _full_s(self) -> float:
        growth = self._num_growing * self._rate() / BLOCK_SIZE
        return self.now_s + max(0.0, self.spec.num_blocks - self._held) / growth if growth else math.inf

    def _take_done(self) -> Iterator[SimSequence]:
        while self._ends and self._ends[0][0] <= self._clock + 1e-6:
            sequence = heapq.heappop(self._ends)[2]
            sequence.done_tokens = sequence.answer_tokens
            sequence.done_s = self.now_s
            self._let_go(sequence)
            yield sequence

    def _let_go(self, sequence: SimSequence) -> None:
        self._held -= self._blocks_of(sequence)
        if not sequence.is_held:
            self._num_growing -= 1
        kept, all_tokens = self._blocks_of(sequence) * BLOCK_SIZE, self._tokens_of(sequence)
        if sequence.is_held:
            sequence.retained_mass = min(sequence.retained_mass, retained_mass(kept, all_tokens))
            sequence.evicted_tokens = max(0.0, all_tokens - kept)
        self.decoding.remove(sequence)
        if not self.decoding and not self._reading:
            self._held = 0.0  # without what rounding has left

    def _tokens_of(self, sequence: SimSequence) -> float:
        return sequence.prompt_tokens + min(sequence.answer_tokens, self._clock - sequence.began_at)

    def _blocks_of(self, sequence: SimSequence) -> float:
        if sequence.is_held:
            return sequence.kept_blocks
        read = blocks_for(sequence.tokens_to_read + 1, BLOCK_SIZE)
        return read + (self._clock - sequence.began_at - sequence.done_tokens) / BLOCK_SIZE

    # When blocks are short.

    def _get_back(self, blocks: float) -> None:
        """Make blocks free: by shrinking if the rule allows it, else by preempting who came last."""
        if self._shrink(blocks):
            return
        freed = 0.0
        while freed < 1.0 and self.decoding:
            last = max(self.decoding, key=lambda sequence: (sequence.least is not None, sequence.arrived_s))
            freed += self._blocks_of(last)
            self._preempt(last)

    def _preempt(self, sequence: SimSequence) -> None:
        done = self._clock - sequence.began_at
        self._let_go(sequence)
        self._ends = [entry for entry in self._ends if entry[2] is not sequence]
        heapq.heapify(self._ends)
        sequence.done_tokens = done
        sequence.preemptions += 1
        self.counts.preemptions += 1
        self.waiting.appendleft(sequence)

    def _shrink(self, blocks: float) -> bool:
        """Take blocks from elastic sequences by the rule; False, and nothing is taken, when they have not so many."""
        if self.rule is None:
            return False
        elastic = [each for each in self.decoding if each.least is not None and self._blocks_of(each) > each.least]
        if sum(self._blocks_of(each) - (each.least or 0) for each in elastic) < blocks:
            return False
        bidders = [self._bidder(index, each) for index, each in enumerate(elastic)]
        pages = int(sum(self._blocks_of(each) for each in elastic) - blocks)
        shares = allocate(bidders, pages, {}, self.rule).pages
        for index, each in enumerate(elastic):
            if shares[str(index)] < self._blocks_of(each):
                self._cut(each, shares[str(index)])
        self.counts.shrinks += 1
        return True

    def _bidder(self, index: int, sequence: SimSequence) -> Bidder:
        most = max(1, math.ceil(self._blocks_of(sequence)))
        tokens = self._tokens_of(sequence)
        curve = tuple(retained_mass(page * BLOCK_SIZE, tokens) for page in range(most + 1))
        return Bidder(str(index), sequence.tenant, curve, min(sequence.least or 0, most), most)

    def _cut(self, sequence: SimSequence, blocks: int) -> None:
        if blocks >= self._blocks_of(sequence):
            return
        self._held -= self._blocks_of(sequence) - blocks
        if not sequence.is_held:
            self._num_growing -= 1
        sequence.is_held, sequence.kept_blocks = True, blocks
