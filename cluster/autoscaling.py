"""How many engines there should be: enough that each is loaded to a target, by KV blocks or by sequences.

Serve collects what each engine reports (`EngineReplica.record_autoscaling_stats`), asks `scale_engines`, and applies
its own delays and bounds to the answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvorum.workers.request import EngineInfo, EngineStats

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

LOAD_METRIC = "load"
# Room for bursts that come faster than an engine loads.
TARGET_LOAD = 0.75


def engine_load(info: EngineInfo, stats: EngineStats) -> float:
    """Return how loaded an engine is: 1 when its KV pool is held, or its batch is full; more when requests wait."""
    kv_pressure = stats.blocks_held / info.num_blocks
    queue = (stats.num_running + stats.num_waiting) / info.max_num_seqs
    return max(kv_pressure, queue)


def desired_engines(loads: Sequence[float]) -> int:
    """Return the fewest engines that would each carry at most TARGET_LOAD of the load that these carry together."""
    return max(1, math.ceil(sum(loads) / TARGET_LOAD - 1e-9))


def scale_engines(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Serve's autoscaling policy; leaves the number as it is while no engine has reported."""
    reported = (context.aggregated_metrics or {}).get(LOAD_METRIC, {})
    if not reported:
        return context.target_num_replicas, {}
    # Engines that load report nothing yet, and take their share once they are there.
    return desired_engines(list(reported.values())), {}
