"""What is killed or stopped, and how long it takes until everything is there again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import psutil
from nodes import Nodes, processes

KINDS = ("rank killed", "rank stopped", "engine killed", "router killed", "node killed")
_TITLES = {"rank": "_RankActor", "engine": "ServeReplica:kvorum:Engine", "router": "ServeReplica:kvorum:Router"}
_POLL_S = 0.2
_PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Strike:
    """One blow. recovery_s: until all engines and routers served again; None when the next blow came sooner."""

    at_s: float
    kind: str
    recovery_s: float | None


@dataclass
class Striker:
    """Strikes something at random again and again."""

    nodes: Nodes
    urls: Sequence[str]
    num_engines: int
    rng: random.Random
    say: Callable[[str], None]
    strikes: list[Strike] = field(default_factory=list)

    async def strike_until(self, end_s: float, *, period_s: float) -> None:
        """Strike every period_s seconds."""
        begin_s = time.monotonic()
        while time.monotonic() + period_s <= end_s:
            kind = KINDS[len(self.strikes) % len(KINDS)] if len(self.strikes) < len(KINDS) else self.rng.choice(KINDS)
            struck_s = time.monotonic()
            await asyncio.to_thread(self._strike, kind)
            recovery_s = await self._recovery_s(struck_s, until_s=struck_s + period_s, is_noticed=False)
            self.strikes.append(Strike(struck_s - begin_s, kind, recovery_s))
            self.say(f"{struck_s - begin_s:6.1f} s  {kind}: " + _text(recovery_s))
            await asyncio.sleep(max(0.0, struck_s + period_s - time.monotonic()))

    async def wait_until_whole(self, timeout_s: float) -> float | None:
        """Wait until all engines and routers serve; return how long it took, None when it takes too long."""
        begin_s = time.monotonic()
        return await self._recovery_s(begin_s, until_s=begin_s + timeout_s, is_noticed=True)

    def _strike(self, kind: str) -> None:
        what, how = kind.split()
        if what == "node":
            self.nodes.lose_worker(self.rng.randrange(len(self.nodes.workers)))
            self.nodes.add_worker()
            return
        victims = processes(_TITLES[what])
        if not victims:  # it is being built again
            return
        victim: psutil.Process = self.rng.choice(victims)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGSTOP if how == "stopped" else signal.SIGKILL)

    async def _recovery_s(self, since_s: float, *, until_s: float, is_noticed: bool) -> float | None:
        """Wait until the loss is noticed, if it is not yet, and then made good."""
        async with httpx.AsyncClient(timeout=_PROBE_TIMEOUT_S) as client:
            while time.monotonic() < until_s:
                is_whole = await self._is_whole(client)
                if is_whole and is_noticed:
                    return time.monotonic() - since_s
                is_noticed |= not is_whole
                await asyncio.sleep(_POLL_S)
        return None

    async def _is_whole(self, client: httpx.AsyncClient) -> bool:
        """Say whether every router sees all engines alive."""
        try:
            for url in self.urls:
                lines = (await client.get(f"{url}/metrics")).text.splitlines()
                up = [line for line in lines if line.startswith("kvorum_engine_up{") and line.endswith(" 1.0")]
                if len(up) != self.num_engines:
                    return False
        except httpx.HTTPError:
            return False
        return True


def summarise(strikes: Sequence[Strike]) -> str:
    """Return the median and the longest recovery, and how many there were no time to see."""
    times = [strike.recovery_s for strike in strikes if strike.recovery_s is not None]
    unseen = len(strikes) - len(times)
    if not times:
        return f"{len(strikes)} strikes, no recovery before the next"
    text = f"{statistics.median(times):.1f} s (median), {max(times):.1f} s (longest)"
    return f"{len(strikes)} strikes; whole again after {text}; {unseen} times not before the next strike"


def _text(recovery_s: float | None) -> str:
    return "not whole before the next" if recovery_s is None else f"whole after {recovery_s:.1f} s"
