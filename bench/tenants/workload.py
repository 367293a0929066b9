"""Who asks for what: read by the benchmark, which configures the tenants, and by Locust, whose users they are."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TenantWork:
    """One tenant's load, and its limits where there is a cache manager.

    users: half of them over HTTP, half over gRPC. period_s: between an answer and the next question, on average.
    prompt_tokens, answer_tokens: of each request. policy: its eviction policy; None is not to be shrunk. limits: of the
    tenant's configuration.
    """

    name: str
    users: int
    period_s: float
    prompt_tokens: int
    answer_tokens: int
    policy: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Its API key."""
        return f"kv-bench-{self.name}"

    @property
    def settings(self) -> dict[str, Any]:
        """What stands in the configuration file for it."""
        return {"api_key_sha256": [hashlib.sha256(self.key.encode()).hexdigest()], **self.limits}


QUIET = TenantWork(
    "quiet",
    users=4,
    period_s=1.5,
    prompt_tokens=128,
    answer_tokens=64,
    limits={"floor": 0.3, "weight": 4.0, "priority": -1},
)
# Five times as many users, as often.
NOISY = TenantWork(
    "noisy",
    users=20,
    period_s=1.5,
    prompt_tokens=256,
    answer_tokens=64,
    limits={"ceiling": 0.4, "max_running": 1, "max_waiting": 8},
)
BATCH = TenantWork(
    "batch",
    users=2,
    period_s=0.0,
    prompt_tokens=600,
    answer_tokens=200,
    policy="h2o_avg",
    limits={"ceiling": 0.4, "max_running": 1, "priority": 1, "min_kv_tokens": 256},
)
ALL = (QUIET, NOISY, BATCH)
