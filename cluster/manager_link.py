"""A router's connection to the cache manager: found, kept alive, and known to be lost within two seconds.

Every BEAT_S the router says that it is there. A beat that is not answered means that the manager is dead, hung or cut
off: what waits for it is told so at once, and the manager is looked for anew. With the first beat it is told of all
leases that the router holds, later of each before it would expire. One that was just started is asked for nothing
before every router has had the time to tell it what it holds: else it would promise the same room again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from itertools import islice

import grpc
import grpc.aio

from kvorum.cluster.cancelling import end_if_cancelled
from kvorum.cluster.held_leases import HeldLeases
from kvorum.cluster.manager.channel import FindManager, ManagerAddress, ManagerLostError, open_channel
from kvorum.cluster.manager.safe_shares import SafeShare
from kvorum.cluster.manager.tls import ControlTls
from kvorum.cluster.manager.types import AdmitRequest, ClusterView, LeaseRecord, Refused
from kvorum.cluster.manager.watching import ViewChange, apply
from kvorum.cluster.manager.wire import (
    change_from_pb,
    lease_request_to_pb,
    outcome_from_pb,
    record_to_pb,
    share_from_pb,
)
from kvorum.protos.cache.v1 import cache_pb2 as pb
from kvorum.protos.cache.v1 import cache_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

OnAnswer = Callable[[str, float], None]
_AdmitCall = grpc.aio.StreamStreamCall[pb.AdmitRequest, pb.AdmitResponse]

BEAT_S = 0.5
BEAT_TIMEOUT_S = 1.0
_RETRY_S = 0.1
# A lease is renewed after half of its life, or within the quarter that follows where all were due together. The manager
# takes half a millisecond for so many, and admits nobody meanwhile.
_RECORDS_AT_ONCE = 100
# While the manager learns it admits nobody anyway, and waits for all.
_RECORDS_WHILE_IT_LEARNS = 2_000
# What comes up while so many messages are not read yet is asked together. Read one by one, those that came while the
# manager was busy would take until long after. So many requests take it 1 to 3 ms, in which it hears nobody else.
_MESSAGES_UNREAD = 1
_REQUESTS_AT_ONCE = 16
# Leases that are given back sooner after others go together, so that a call for each does not keep the manager busy.
_RELEASE_PERIOD_S = 0.02
_RELEASES_AT_ONCE = 1_000


class ManagerLink:
    """The connection, for as long as `run` runs."""

    def __init__(
        self,
        find: FindManager,
        *,
        router_id: str,
        tls: ControlTls | None = None,
        on_answer: OnAnswer = lambda _, __: None,
    ) -> None:
        """on_answer hears how many seconds each RPC took, of Admit each answer."""
        self._find = find
        self._router_id = router_id
        self._tls = tls
        self._on_answer = on_answer
        self._address: ManagerAddress | None = None
        self._stub: pb_grpc.CacheManagerServiceStub | None = None
        # What is to be asked, while there is somebody to ask, and who waits for an answer, by lease.
        self._questions: asyncio.Queue[pb.LeaseRequest] | None = None
        self._answers: dict[str, asyncio.Future[str | Refused]] = {}
        self.held = HeldLeases()
        self._lease_s = math.inf  # as the manager last said
        self._to_release: dict[str, bool] = {}  # whether it has ended, by lease
        self._release_now = asyncio.Event()
        self.shares: Mapping[str, SafeShare] = {}
        self.is_learning = False  # the manager that is there, but is not asked yet

    @property
    def is_up(self) -> bool:
        """Whether the last beat was answered."""
        return self._questions is not None

    async def admit(self, request: AdmitRequest) -> str | Refused:
        """Ask for a lease, waiting in line; return the engine's id or why not. Raises ManagerLostError.

        What was not answered, because the caller gave up or the manager was lost, is released.
        """
        if self._questions is None:
            raise ManagerLostError("the cache manager is not connected")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str | Refused] = loop.create_future()
        self._answers[request.lease_id] = answer
        self._questions.put_nowait(lease_request_to_pb(request))
        try:
            with self._timed("Admit"):
                outcome = await answer
        except BaseException:
            self.release(request.lease_id, has_ended=False)
            raise
        finally:
            del self._answers[request.lease_id]
        if not isinstance(outcome, Refused):
            record = LeaseRecord(request.lease_id, request.tenant, outcome, request.sequence_blocks)
            self.held.add(record, told_s=loop.time())
        return outcome

    async def watch(self) -> AsyncGenerator[ViewChange]:
        """Yield the cluster's whole state, then what changes; raises ManagerLostError when the manager is lost."""
        if self._stub is None:
            raise ManagerLostError("the cache manager is not connected")
        call = self._stub.Watch(pb.WatchRequest(), metadata=self._metadata())
        try:
            async for message in call:
                yield change_from_pb(message)
        except grpc.RpcError as error:
            raise ManagerLostError(f"the cache manager was lost: {error}") from error
        except asyncio.CancelledError:
            end_if_cancelled()
            raise ManagerLostError("the cache manager was lost") from None  # a closed channel cancels its calls
        finally:
            call.cancel()

    async def look(self, *, timeout_s: float) -> ClusterView | None:
        """Return the cluster's state now; None when the manager does not tell it in time."""
        changes = self.watch()
        try:
            async with asyncio.timeout(timeout_s):
                return apply(ClusterView(), await anext(changes))
        except (ManagerLostError, TimeoutError):
            return None
        finally:
            await changes.aclose()

    def release(self, lease_id: str, *, has_ended: bool) -> None:
        """Give a lease back, or leave the line, as soon as the manager can be reached."""
        self.held.remove(lease_id)
        self._to_release[lease_id] = has_ended
        self._release_now.set()

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        last_reason = ""
        while True:
            try:
                await self._serve_connection(await self._find())
            except (ManagerLostError, grpc.RpcError) as error:
                if (reason := str(error)) != last_reason:
                    logger.warning("no cache manager: %s", reason)
                    last_reason = reason
            except Exception:
                logger.exception("the connection to the cache manager failed")  # a new one may not
            finally:
                self._stub = self._questions = None
                self.is_learning = False
                for answer in self._answers.values():
                    if not answer.done():
                        answer.set_exception(ManagerLostError("the cache manager was lost before it answered"))
            end_if_cancelled()
            await asyncio.sleep(_RETRY_S)

    async def _serve_connection(self, address: ManagerAddress) -> None:
        async with open_channel(address, self._tls) as channel:
            stub = pb_grpc.CacheManagerServiceStub(channel)  # type: ignore[no-untyped-call]  # generated code
            self._address = address
            self.held.start_anew()
            while await self._beat(stub):
                await asyncio.sleep(BEAT_S)
            logger.info("connected to the cache manager at %s", address.target)
            self._stub, self._questions = stub, asyncio.Queue()
            call: _AdmitCall = stub.Admit(metadata=self._metadata())
            unread = asyncio.Semaphore(_MESSAGES_UNREAD)
            works = (
                self._keep_beating(stub),
                self._keep_releasing(stub),
                self._keep_asking(call, self._questions, unread),
                self._keep_answering(call, unread),
            )
            tasks = [asyncio.create_task(work) for work in works]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                await done.pop()  # raises what the connection broke of
            finally:
                call.cancel()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_beating(self, stub: pb_grpc.CacheManagerServiceStub) -> None:
        while not await self._beat(stub):
            await asyncio.sleep(BEAT_S)
        raise ManagerLostError("the cache manager stood still and learns anew")

    async def _beat(self, stub: pb_grpc.CacheManagerServiceStub) -> bool:
        """Tell what the manager may not know, some at a time; return whether it waits for other routers to do so."""
        now_s = asyncio.get_running_loop().time()
        num_renewals = math.ceil(len(self.held) * BEAT_S / (self._lease_s / 4))
        while True:
            at_once = _RECORDS_WHILE_IT_LEARNS if self.is_learning else _RECORDS_AT_ONCE
            records = untold = self.held.due(-math.inf, at_most=at_once)
            if not untold:
                records = self.held.due(now_s - self._lease_s / 2, at_most=min(num_renewals, at_once))
                num_renewals -= len(records)
            is_full = len(records) == at_once
            leases = map(record_to_pb, records)
            request = pb.RenewRequest(router_id=self._router_id, leases=leases, has_more=is_full and bool(untold))
            with self._timed("Renew"):
                response = await stub.Renew(request, timeout=BEAT_TIMEOUT_S, metadata=self._metadata())
            if response.is_new:
                self.held.start_anew()
            self.held.note_told(records, now_s)
            self._lease_s = response.lease_s
            self.is_learning = response.is_learning
            if not is_full:
                break
        if response.shares:  # a manager that was just started has none yet: the last ones hold
            self.shares = {name: share_from_pb(share) for name, share in response.shares.items()}
        return self.is_learning

    async def _keep_asking(
        self, call: _AdmitCall, questions: asyncio.Queue[pb.LeaseRequest], unread: asyncio.Semaphore
    ) -> None:
        while True:
            await unread.acquire()
            requests = [await questions.get()]
            while len(requests) < _REQUESTS_AT_ONCE and not questions.empty():
                requests.append(questions.get_nowait())
            try:
                await call.write(pb.AdmitRequest(router_id=self._router_id, requests=requests))
            except asyncio.InvalidStateError as error:  # what gRPC says of a call that is over
                raise ManagerLostError("the cache manager ended the stream") from error

    async def _keep_answering(self, call: _AdmitCall, unread: asyncio.Semaphore) -> None:
        num_read = 0
        async for message in call:
            for _ in range(message.num_read - num_read):
                unread.release()
            num_read = message.num_read
            for decision in message.decisions:
                answer = self._answers.get(decision.lease_id)
                if answer and not answer.done():
                    answer.set_result(outcome_from_pb(decision))
        raise ManagerLostError("the cache manager ended the stream")

    async def _keep_releasing(self, stub: pb_grpc.CacheManagerServiceStub) -> None:
        if self._to_release:
            self._release_now.set()  # what the last connection did not get through
        while True:
            await self._release_now.wait()
            self._release_now.clear()
            batch = dict(islice(self._to_release.items(), _RELEASES_AT_ONCE))
            ended = [lease_id for lease_id, has_ended in batch.items() if has_ended]
            request = pb.ReleaseRequest(lease_ids=batch, ended_lease_ids=ended)
            with self._timed("Release"):
                await stub.Release(request, timeout=BEAT_TIMEOUT_S, metadata=self._metadata())
            for lease_id, has_ended in batch.items():
                if self._to_release[lease_id] == has_ended:  # else it was seen to end meanwhile
                    del self._to_release[lease_id]
            if self._to_release:
                self._release_now.set()
            await asyncio.sleep(_RELEASE_PERIOD_S)

    @contextlib.contextmanager
    def _timed(self, rpc: str) -> Iterator[None]:
        """Report how long an answer took; of none there is nothing to report."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        yield
        self._on_answer(rpc, loop.time() - asked_s)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        assert self._address, "a connection has an address"
        return self._address.metadata
