"""A step as flat tensors on the device: one copy there, nothing back."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kvorum.kernels.plan import EvictionRule, SequenceStep
from kvorum.kernels.triton import records
from kvorum.kernels.triton.tiles import Tiles, cut_row

INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TritonStep:
    """A whole step.

    token_ids: [num_tokens] int64. token_seqs: [num_tokens] int32, each token's sequence.
    seqs: [num_seqs, NUM_FIELDS] int32 and rules: [num_seqs, NUM_NUMBERS] float64; see `records`.
    tables: int32, the block tables one behind the other, each as long as the sequence's slots need.
    decode_items: [num_items, ITEM_FIELDS] int32, the slots of sequences with one new token, cut up: see
        `decode_attention`. splits: whether any of these sequences has several items.
    query_tiles: [n, 2] int32, sequence and first new token (counted in the sequence's own) of each tile of queries of
        the other sequences. key_tiles: [n, 2] int32, sequence and first slot of each tile of slots that receive scores
        from them. query_weights: [num_tokens] float32, what each query counts for in those scores.
    choosers: [n] int32, sequences whose victims the decode kernel does not choose itself; negative: none.
    """

    token_ids: torch.Tensor
    token_seqs: torch.Tensor
    seqs: torch.Tensor
    rules: torch.Tensor
    tables: torch.Tensor
    decode_items: torch.Tensor
    splits: bool
    query_tiles: torch.Tensor
    key_tiles: torch.Tensor
    query_weights: torch.Tensor
    choosers: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens in the step."""
        return len(self.token_ids)

    @property
    def only_decodes(self) -> bool:
        """Whether every sequence has one new token."""
        return len(self.query_tiles) == 0


@dataclass(slots=True)
class _Lists:
    """The int32 parts of a step while it is written down."""

    token_seqs: list[int] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    decode_items: list[int] = field(default_factory=list)
    query_tiles: list[int] = field(default_factory=list)
    key_tiles: list[int] = field(default_factory=list)
    choosers: list[int] = field(default_factory=list)

    def parts(self) -> tuple[list[int], ...]:
        return (
            self.token_seqs,
            self.seqs,
            self.tables,
            self.decode_items,
            self.query_tiles,
            self.key_tiles,
            self.choosers,
        )


def build_step(
    token_ids: torch.Tensor, sequences: Sequence[SequenceStep], *, block_size: int, tiles: Tiles, device: torch.device
) -> TritonStep:
    """Write a step down and send it to the device.

    token_ids: [num_tokens], sequence after sequence. tiles: into what the work is cut.
    """
    lists = _Lists()
    decoding = [step.num_slots_after for step in sequences if step.num_tokens == 1]
    piece = tiles.piece_of_decode(decoding)
    for seq, step in enumerate(sequences):
        _write_sequence(lists, seq, step, block_size=block_size, tiles=tiles, piece=piece)
    assert len(lists.token_seqs) == len(token_ids), "token_ids and sequences disagree"
    token_seqs, seqs, tables, decode_items, query_tiles, key_tiles, choosers = _send(lists.parts(), device)
    rules = torch.tensor([_rule_numbers(step) for step in sequences], dtype=torch.float64)
    return TritonStep(
        token_ids=token_ids.to(device, non_blocking=True),
        token_seqs=token_seqs,
        seqs=seqs.view(-1, records.NUM_FIELDS.value),
        rules=_pinned(rules, device).to(device, non_blocking=True),
        tables=tables,
        decode_items=decode_items.view(-1, records.ITEM_FIELDS.value),
        splits=len(decode_items) > records.ITEM_FIELDS.value * len(decoding),
        query_tiles=query_tiles.view(-1, 2),
        key_tiles=key_tiles.view(-1, 2),
        query_weights=_query_weights(sequences, len(token_ids), device),
        choosers=choosers,
    )


def _write_sequence(lists: _Lists, seq: int, step: SequenceStep, *, block_size: int, tiles: Tiles, piece: int) -> None:
    num_slots = step.num_slots_after
    num_blocks = -(-num_slots // block_size)
    assert num_blocks <= len(step.block_table), "block table is too short"
    assert step.num_tokens == 1 or not step.replace, "victims make room for one token"
    record = [0] * records.NUM_FIELDS.value
    record[records.ROW.value] = step.row
    record[records.START.value] = step.start
    record[records.NUM_TOKENS.value] = step.num_tokens
    record[records.FIRST_TOKEN.value] = len(lists.token_seqs)
    record[records.FIRST_SLOT.value] = step.num_slots
    record[records.NUM_SLOTS.value] = num_slots
    record[records.REPLACE.value] = step.replace
    record[records.TABLE.value] = len(lists.tables)
    chooses = step.rule is not None and step.choose_victims
    if step.rule is not None:
        _write_rule(record, step.rule, chooses=chooses)
    if step.num_tokens == 1:
        items = cut_row(num_slots, piece)
        record[records.FIRST_ITEM.value] = len(lists.decode_items) // records.ITEM_FIELDS.value
        record[records.NUM_ITEMS.value] = len(items)
        lists.decode_items += [number for i, (first, end) in enumerate(items) for number in (seq, first, end, i)]
        chooses = chooses and len(items) > 1
    else:
        # The last tiles see most slots: they go first, so that the short ones fill what is left.
        firsts = range(0, step.num_tokens, tiles.queries)
        lists.query_tiles += [number for first in reversed(firsts) for number in (seq, first)]
        if step.rule is not None:
            lists.key_tiles += [
                number for first in range(0, num_slots, tiles.column_sums.slots) for number in (seq, first)
            ]
    if chooses:
        lists.choosers.append(seq)
    lists.token_seqs += [seq] * step.num_tokens
    lists.tables += step.block_table[:num_blocks]
    lists.seqs += record


def _write_rule(record: list[int], rule: EvictionRule, *, chooses: bool) -> None:
    record[records.HAS_RULE.value] = 1
    record[records.CHOOSE.value] = chooses
    record[records.RECENT.value] = min(rule.recent_tokens, INT32_MAX)
    record[records.SINKS.value] = min(rule.sink_tokens, INT32_MAX)
    record[records.BY_AGE.value] = rule.by_age
    record[records.PER_LIFETIME.value] = rule.per_lifetime
    record[records.OBSERVE_FROM.value] = min(rule.observe_from, INT32_MAX)


def _rule_numbers(step: SequenceStep) -> list[float]:
    decay = 1.0 if step.rule is None else step.rule.decay
    return [decay**step.num_tokens, math.log(decay) if decay > 0.0 else -math.inf, 1.0 - decay, 0.0]


def rule_tensors(
    rule: EvictionRule, *, row: int, newest: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the record [NUM_FIELDS] and the numbers [NUM_NUMBERS] of a sequence whose newest token is at `newest`."""
    record = [0] * records.NUM_FIELDS.value
    record[records.ROW.value] = row
    record[records.START.value] = newest
    record[records.NUM_TOKENS.value] = 1
    _write_rule(record, rule, chooses=True)
    numbers = _rule_numbers(SequenceStep(row, (), newest, 1, 0, rule))
    return (
        torch.tensor(record, dtype=torch.int32, device=device),
        torch.tensor(numbers, dtype=torch.float64, device=device),
    )


def _query_weights(sequences: Sequence[SequenceStep], num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return each query's weight [num_tokens] in the column sums; empty where none are taken."""
    if not any(step.rule is not None and step.num_tokens > 1 for step in sequences):
        return torch.empty(0, dtype=torch.float32, device=device)
    weights = []
    for step in sequences:
        if step.rule is None:
            weights.append(torch.ones(step.num_tokens, dtype=torch.float64))
            continue
        positions = torch.arange(step.start, step.start + step.num_tokens)
        age = step.start + step.num_tokens - 1 - positions
        weights.append(torch.where(positions >= step.rule.observe_from, step.rule.decay ** age.double(), 0.0))
    flat = torch.cat(weights).float()
    assert len(flat) == num_tokens
    return _pinned(flat, device).to(device, non_blocking=True)


def _send(parts: Iterable[list[int]], device: torch.device) -> list[torch.Tensor]:
    """Copy lists to the device at once; each part starts at a multiple of 16 bytes, as the kernels assume."""
    flat: list[int] = []
    spans = []
    for part in parts:
        spans.append((len(flat), len(part)))
        flat += part
        flat += [0] * (-len(part) % 4)
    # Ten times as fast as torch.tensor of a list, and the tables of a large batch are long.
    host = torch.frombuffer(array("i", flat), dtype=torch.int32)
    sent = _pinned(host, device).to(device, non_blocking=True)
    return [sent[first : first + length] for first, length in spans]


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor
