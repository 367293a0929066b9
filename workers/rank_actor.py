"""One rank as a Ray actor: it meets its peers, loads its part of the model, and then does what the engine asks.

Rank 0 is called by the engine over a channel of its own and takes the others along (lockstep.py); Ray's calls are for
control. A rank whose peers are gone cannot go on: rank 0 tells the engine, any other ends its process, so that whoever
waits for it in a collective knows at once.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

import ray

from kvorum.kernels.spec import Shard
from kvorum.workers.backends import choose_device
from kvorum.workers.channel import ChannelAddress, ChannelServer
from kvorum.workers.communicator import Alone, Communicator, MeetingPoint, RankGroup, open_meeting
from kvorum.workers.config import EngineConfig, RankShape
from kvorum.workers.lockstep import KEEP_ALIVE_PERIOD_S, Leader, follow
from kvorum.workers.worker import RankWorker, load_worker

logger = logging.getLogger(__name__)


class _RankActor:
    """Holds a Worker."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._worker: RankWorker | None = None
        self._group: RankGroup | None = None
        self._progress = (0, 0)

    @ray.method
    def open_meeting(self) -> MeetingPoint:
        """Open the store in which the ranks meet; for rank 0."""
        host: str = ray.util.get_node_ip_address()
        meeting, self._store = open_meeting(host, world_size=self._config.tensor_parallel_size)
        return meeting

    @ray.method
    def load(self, meeting: MeetingPoint | None) -> RankShape:
        """Meet the other ranks, if there are any, load this rank's part of the model and allocate the pool."""

        def meet(shards: Sequence[Shard]) -> Communicator:
            if meeting is None:
                return Alone()
            self._group = RankGroup(shards, self._rank, meeting, device=choose_device(self._config.device))
            return self._group

        self._worker, shape = load_worker(self._config, on_progress=self._note_progress, rank=self._rank, meet=meet)
        return shape

    def _note_progress(self, done: int, total: int) -> None:
        self._progress = (done, total)

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[int, int]:
        """Return bytes loaded and bytes in all; (0, 0) before the checkpoint is open."""
        return self._progress

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answer."""

    @ray.method
    def serve(self) -> ChannelAddress | None:
        """Begin to work: rank 0 listens for the engine and says where, the others follow it."""
        assert self._worker is not None
        if self._rank > 0:
            threading.Thread(target=self._follow, name="rank", daemon=True).start()
            return None
        host = ray.util.get_node_ip_address()
        if self._group is None:
            self._channel = ChannelServer(self._worker, host=host)
        else:
            leader = Leader(self._worker, self._group)
            self._channel = ChannelServer(
                leader, host=host, on_idle=leader.keep_alive, idle_period_s=KEEP_ALIVE_PERIOD_S
            )
        return self._channel.address

    def _follow(self) -> None:
        assert self._worker is not None
        assert self._group is not None
        try:
            follow(self._worker, self._group)
        except Exception:
            logger.exception("rank %d gives up", self._rank)
        finally:
            os._exit(1)


# Ray's type stubs do not know concurrency_groups.
RankActor = ray.remote(concurrency_groups={"control": 1})(_RankActor)  # type: ignore[call-overload]
