"""What a router knows of an engine: what decides, and what reports, look at this and not at the stream it came by."""

from __future__ import annotations

from dataclasses import dataclass

from kvorum.workers.request import EngineInfo, EngineStats


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine last said of itself. healthy: whether all of its ranks are alive."""

    info: EngineInfo
    stats: EngineStats
    healthy: bool = True
