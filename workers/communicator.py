"""How an engine's ranks add up, collect and hand out tensors: torch.distributed, or nothing for a rank that is alone.

Ranks meet in a store that rank 0 opens on a free port. Plans and counts go over Gloo, so that no GPU spins while ranks
wait for work; what is computed goes over NCCL on GPUs. Over Gloo a collective whose peer is dead raises at once, one
whose peer has stopped raises when its time is over: either way the caller knows that the group is gone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not export it for type checkers

from kvorum.kernels.backend import SlotView
from kvorum.kernels.spec import Shard

# Longer than any two ranks drift apart in a step, shorter than what a client may wait for a hung rank.
COLLECTIVE_TIMEOUT_S = 4.0
# While ranks meet and load their weights, which takes the slowest of them minutes.
MEETING_TIMEOUT_S = 600.0
# Numbers that the first message of a hand-out carries; most steps fit in it.
_HEAD = 1024


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the ranks of one engine meet."""

    host: str
    port: int


class Communicator(Protocol):
    """The ranks of one engine, seen from one of them. Every rank makes the same calls in the same order."""

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' parts, the same bits on each."""

    def share_among_replicas(self, part: torch.Tensor) -> torch.Tensor:
        """Return the mean over the ranks that hold the same KV heads."""

    def collect(self, part: torch.Tensor) -> torch.Tensor | None:
        """Put all ranks' [num_rows, columns] side by side on rank 0; None elsewhere."""

    def smallest(self, count: int) -> int:
        """Return the smallest of all ranks' counts; waits for ranks that are still loading."""


class Alone:
    """The communicator of a rank without peers."""

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Return the only part."""
        return part

    def share_among_replicas(self, part: torch.Tensor) -> torch.Tensor:
        """Return the only part."""
        return part

    def collect(self, part: torch.Tensor) -> torch.Tensor:
        """Return the only part."""
        return part

    def smallest(self, count: int) -> int:
        """Return the only count."""
        return count


class RankGroup:
    """The communicator of one of several ranks."""

    def __init__(
        self, shards: Sequence[Shard], rank: int, meeting: MeetingPoint, *, host: str, device: torch.device
    ) -> None:
        """Meet the other ranks; blocks until all are there.

        host: this rank's address, by which the others reach it. device: what is computed on it is added up by NCCL when
        it is a GPU.
        """
        if interface := _interface_of(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        is_gpu = device.type == "cuda"
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
            store=TCPStore(meeting.host, meeting.port, is_master=False, timeout=_seconds(MEETING_TIMEOUT_S)),
            rank=rank,
            world_size=len(shards),
            timeout=_seconds(MEETING_TIMEOUT_S),
        )
        self._rank = rank
        self._shards = tuple(shards)
        self._columns = [shard.vocab[1] - shard.vocab[0] for shard in shards]
        timeout = _seconds(COLLECTIVE_TIMEOUT_S)
        everyone = tuple(range(len(shards)))
        self._steps = dist.new_group(everyone, timeout=timeout)
        # Each rank takes part in the making of every group.
        replicas = {each: dist.new_group(each, timeout=timeout) for each in dict.fromkeys(s.replicas for s in shards)}
        self._replicas = replicas[shards[rank].replicas]
        self._num_replicas = len(shards[rank].replicas)

    def leave(self) -> None:
        """Close the connections to the other ranks, so that none of them waits for this one."""
        dist.destroy_process_group()

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' parts, written over this rank's."""
        dist.all_reduce(part, group=self._steps)
        return part

    def share_among_replicas(self, part: torch.Tensor) -> torch.Tensor:
        """Return the mean over replicas, written over this rank's part."""
        if self._num_replicas > 1:
            dist.all_reduce(part, group=self._replicas)
            part /= self._num_replicas
        return part

    def collect(self, part: torch.Tensor) -> torch.Tensor | None:
        """Put all ranks' columns side by side on rank 0."""
        widest = max(self._columns)
        padded = torch.nn.functional.pad(part, (0, widest - part.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in self._columns] if self._rank == 0 else None
        dist.gather(padded, parts, dst=0, group=self._steps)
        if parts is None:
            return None
        return torch.cat([each[:, :columns] for each, columns in zip(parts, self._columns, strict=True)], dim=1)

    def smallest(self, count: int) -> int:
        """Return the smallest count."""
        counts = torch.tensor([count])
        dist.all_reduce(counts, op=dist.ReduceOp.MIN)
        return int(counts)

    def whole_view(self, part: SlotView) -> SlotView | None:
        """Put the KV heads of all ranks together on rank 0, replicas' parts of a score added up; None elsewhere."""
        parts: list[SlotView | None] | None = [None] * len(self._shards) if self._rank == 0 else None
        dist.gather_object(part, parts, dst=0, group=self._steps)
        if parts is None:
            return None
        views = [each for each in parts if each is not None]
        firsts = [shard.replicas[0] for shard in self._shards if shard.rank == shard.replicas[0]]
        scores = {first: sum(views[rank].scores for rank in self._shards[first].replicas) for first in firsts}
        return SlotView(
            positions=torch.cat([views[first].positions for first in firsts], dim=1),
            scores=torch.cat([torch.as_tensor(scores[first]) for first in firsts], dim=1),
            alive=torch.cat([views[first].alive for first in firsts], dim=1),
        )

    def hand_out(self, numbers: Sequence[int]) -> None:
        """Give whole numbers to the other ranks; on rank 0 only."""
        head = torch.zeros(_HEAD, dtype=torch.int64)
        head[0] = len(numbers)
        rest = torch.tensor(numbers, dtype=torch.int64)
        fitting = min(len(numbers), _HEAD - 1)
        head[1 : 1 + fitting] = rest[:fitting]
        dist.broadcast(head, src=0, group=self._steps)
        if fitting < len(numbers):
            dist.broadcast(rest[fitting:].contiguous(), src=0, group=self._steps)

    def take(self) -> list[int]:
        """Wait for what rank 0 hands out."""
        head = torch.empty(_HEAD, dtype=torch.int64)
        dist.broadcast(head, src=0, group=self._steps)
        count, *numbers = head.tolist()
        if count < _HEAD:
            return numbers[:count]
        rest = torch.empty(count - len(numbers), dtype=torch.int64)
        dist.broadcast(rest, src=0, group=self._steps)
        return [*numbers, *rest.tolist()]


def open_meeting(host: str, *, world_size: int) -> tuple[MeetingPoint, TCPStore]:
    """Open the store in which ranks meet, on a free port; the caller keeps it as long as the group lives."""
    store = TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False, timeout=_seconds(MEETING_TIMEOUT_S))
    return MeetingPoint(host, store.port), store


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def _interface_of(address: str) -> str | None:
    """Return the network interface of one of this machine's addresses; every 127.x.x.x is the loopback's."""
    wanted = "127.0.0.1" if address.startswith("127.") else address
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == wanted for each in addresses):
            return name
    return None
