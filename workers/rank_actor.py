"""One rank as a Ray actor: it meets its peers, loads its part of the model, and then does what the engine asks.

Rank 0 is called by the engine over a channel of its own and takes the others along (lockstep.py); Ray's calls are for
control. A rank that has lost a peer stops working and closes its connections, so that nobody waits for it. It keeps its
weights, and works on once it has met the others again.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence

import ray

if os.environ.get("OMP_NUM_THREADS") == str(len(os.sched_getaffinity(0))):
    # Before torch is loaded. A rank that has all cores keeps each thread on one: else two of them, which wait for each
    # other by spinning, end up on the same core while another process is on theirs, and stay there for milliseconds.
    os.environ["OMP_PROC_BIND"] = "true"

from kvorum.kernels.spec import Shard
from kvorum.kvstore.errors import EngineLostError
from kvorum.workers.backends import choose_device
from kvorum.workers.channel import ChannelAddress, ChannelServer
from kvorum.workers.communicator import Alone, Communicator, MeetingPoint, RankGroup, open_meeting
from kvorum.workers.config import EngineConfig, RankShape
from kvorum.workers.lockstep import KEEP_ALIVE_PERIOD_S, Leader, follow
from kvorum.workers.worker import RankWorker, agree_on_shape, load_worker

logger = logging.getLogger(__name__)


class _RankActor:
    """Holds a Worker, and the thread in which it works."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._shards: Sequence[Shard] = ()
        self._worker: RankWorker | None = None
        self._shape: RankShape | None = None
        self._group: RankGroup | None = None
        self._work: threading.Thread | None = None
        self._progress = (0, 0)

    @ray.method
    def open_meeting(self) -> MeetingPoint:
        """Open the store in which the ranks meet; for rank 0."""
        host: str = ray.util.get_node_ip_address()
        meeting, self._store = open_meeting(host, world_size=self._config.tensor_parallel_size)
        return meeting

    @ray.method
    def load(self, meeting: MeetingPoint | None) -> RankShape:
        """Meet the other ranks, if there are any, load this rank's part of the model and allocate the pool.

        A rank that has done so before only meets the others, with which it begins anew.
        """
        if self._worker is None:
            self._worker, self._shape = load_worker(
                self._config,
                on_progress=self._note_progress,
                rank=self._rank,
                meet=lambda shards: self._meet(meeting, shards),
            )
        else:
            assert self._shape is not None
            ranks = self._meet(meeting, self._shards)
            self._shape = agree_on_shape(self._shape, ranks)
            self._worker.begin_anew(ranks)
        return self._shape

    def _meet(self, meeting: MeetingPoint | None, shards: Sequence[Shard]) -> Communicator:
        self._shards = shards
        if meeting is None:
            return Alone()
        host: str = ray.util.get_node_ip_address()
        device = choose_device(self._config.device)
        self._group = RankGroup(shards, self._rank, meeting, host=host, device=device)
        return self._group

    def _note_progress(self, done: int, total: int) -> None:
        self._progress = (done, total)

    @ray.method(concurrency_group="control")
    def progress(self) -> tuple[int, int]:
        """Return bytes loaded and bytes in all; (0, 0) before the checkpoint is open."""
        return self._progress

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answer; raise EngineLostError when this rank has lost the others."""
        if self._work is not None and not self._work.is_alive():
            raise EngineLostError(f"rank {self._rank} has lost the others")

    @ray.method
    def serve(self) -> ChannelAddress | None:
        """Begin to work: rank 0 listens for the engine and says where, the others follow it."""
        assert self._worker is not None
        if self._rank > 0:
            self._start(self._follow)
            return None
        host = ray.util.get_node_ip_address()
        if self._group is None:
            channel = ChannelServer(self._worker, host=host)
        else:
            leader = Leader(self._worker, self._group)
            channel = ChannelServer(leader, host=host, on_idle=leader.keep_alive, idle_period_s=KEEP_ALIVE_PERIOD_S)
        self._start(channel.serve)
        return channel.address

    def _start(self, work: Callable[[], None]) -> None:
        def work_and_leave() -> None:
            try:
                work()
            except Exception:  # of the group or of this rank: `ping` tells, and the engine replaces what is lost
                logger.exception("rank %d has lost the others", self._rank)
            finally:
                # Else the others would wait for this one until their time is over.
                if self._group is not None:
                    self._group.leave()

        self._work = threading.Thread(target=work_and_leave, name="rank", daemon=True)
        self._work.start()

    def _follow(self) -> None:
        assert self._worker is not None
        assert self._group is not None
        follow(self._worker, self._group)

    @ray.method
    def retire(self, timeout_s: float) -> None:
        """Wait until the work has ended, which it does once a peer or the engine is gone; then `load` can come again.

        Raises EngineLostError when it does not end in time.
        """
        if self._work is not None:
            self._work.join(timeout_s)
            if self._work.is_alive():
                raise EngineLostError(f"rank {self._rank} is stuck")
            self._work = None


# Ray's type stubs do not know concurrency_groups.
RankActor = ray.remote(concurrency_groups={"control": 1})(_RankActor)  # type: ignore[call-overload]
