"""Into what pieces attention's work is cut, and how its kernels are launched, by architecture and shape.

What is chosen here keeps every kernel free of spills at head_dim 64 and 128 (the ahead-of-time tests hold it to that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch
import triton

# Decode rows are cut at multiples of this many slots.
CUT = 64
# A shorter piece would not be worth a second launch.
MIN_PIECE = 4 * CUT
# A row has at most this many pieces more than one, so that one tile holds their log-sum-exps.
MAX_EXTRA_ITEMS = 255
# Bytes of keys that a decode program reads at a time, and as many of values: with PROGRAMS_PER_MULTIPROCESSOR programs
# that is what a Hopper must have in flight to cover its memory's latency.
DECODE_TILE_BYTES = 16384
PROGRAMS_PER_MULTIPROCESSOR = 3
# What stands for a GPU's programs where there is none.
PROGRAMS_WITHOUT_GPU = 12


class Architecture(Enum):
    """Families that differ in registers and shared memory: NVIDIA before Hopper, from Hopper on, and AMD."""

    AMPERE = "ampere"
    HOPPER = "hopper"
    CDNA = "cdna"

    @classmethod
    def of(cls, device: torch.device) -> Architecture:
        """Return the family of a device; the interpreter takes Hopper's."""
        if device.type != "cuda":
            return cls.HOPPER
        if torch.version.hip is not None:
            return cls.CDNA
        return cls.HOPPER if torch.cuda.get_device_capability(device) >= (9, 0) else cls.AMPERE


@dataclass(frozen=True, slots=True)
class Launch:
    """Tile of one kernel: rows are queries x query heads, slots are keys; and Triton's options for it."""

    rows: int
    slots: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """How attention is launched for one shape of heads.

    group: query heads of a KV head, padded to a power of two. extra_items: pieces beyond one for each sequence that a
    decode step may have.
    """

    group: int
    decode: Launch
    prefill: Launch
    column_sums: Launch
    extra_items: int

    @classmethod
    def choose(
        cls,
        architecture: Architecture,
        *,
        num_kv_heads: int,
        group_size: int,
        head_dim: int,
        kv_itemsize: int,
        programs: int,
    ) -> Tiles:
        """Return the tiles for a shape. kv_itemsize: bytes of a number in the pool; programs: what fills the device."""
        group = triton.next_power_of_2(group_size)
        padded_dim = triton.next_power_of_2(head_dim)
        cdna = architecture is Architecture.CDNA
        decode_slots = min(64 if cdna else 128, max(32, DECODE_TILE_BYTES // (padded_dim * kv_itemsize)))
        prefill, column_sums = _prefill_launches(architecture, wide=padded_dim > 128, group=group)
        return cls(
            group=group,
            decode=Launch(max(16, group), decode_slots, 4, 2 if cdna else 3),
            prefill=prefill,
            column_sums=column_sums,
            extra_items=min(max(1, programs // num_kv_heads), MAX_EXTRA_ITEMS),
        )

    @property
    def queries(self) -> int:
        """New tokens in a tile of prefill."""
        return self.prefill.rows // self.group

    def piece_of_decode(self, num_slots: Sequence[int]) -> int:
        """Return the length in slots of the pieces that rows of these lengths are cut into.

        The cut keeps the number of pieces at or below len(num_slots) + extra_items whatever the lengths are, so that a
        captured graph holds every step; long rows get the more pieces, so that a ragged step has no tail.
        """
        cuts = sum(-(-slots // CUT) for slots in num_slots)
        return max(MIN_PIECE, -(-cuts // self.extra_items) * CUT)


def _prefill_launches(architecture: Architecture, *, wide: bool, group: int) -> tuple[Launch, Launch]:
    """Return the launches of prefill and of its column sums. wide: head_dim above 128."""
    match architecture, wide:
        case Architecture.HOPPER, False:
            prefill, column_sums = Launch(128, 64, 8, 3), Launch(64, 128, 8, 3)
        case Architecture.AMPERE, False:
            prefill, column_sums = Launch(128, 32, 8, 3), Launch(64, 128, 8, 2)
        case Architecture.CDNA, False:
            prefill, column_sums = Launch(128, 64, 4, 1), Launch(64, 128, 4, 1)
        case _:
            prefill, column_sums = Launch(64, 32, 4, 2), Launch(32, 64, 4, 2)
    return _at_least(prefill, group), _at_least(column_sums, group)


def _at_least(launch: Launch, group: int) -> Launch:
    return Launch(max(launch.rows, group), launch.slots, launch.num_warps, launch.num_stages)


def cut_row(num_slots: int, piece: int) -> list[tuple[int, int]]:
    """Cut a row into pieces of at most `piece` slots (a multiple of CUT), even to a cut: (first, end) of each."""
    cuts = -(-num_slots // CUT)
    pieces = -(-cuts * CUT // piece)
    edges = [cuts * i // pieces * CUT for i in range(pieces)] + [num_slots]
    return list(pairwise(edges))


def programs_at_once(device: torch.device) -> int:
    """Return how many decode programs fill the device."""
    if device.type != "cuda":
        return PROGRAMS_WITHOUT_GPU
    return PROGRAMS_PER_MULTIPROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
