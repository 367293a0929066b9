"""What the answers of w5 are worth: perplexity of text that the model was not made for, under the same KV budget.

`kvorum eval` reads w3's prompt length of prose and predicts w3's answer length, with everything kept (what a server
that preempts answers with) and with the budget that w5 sets. Its pool is roomy: what eviction during the prompt
costs on top is not in it; the receipts of w5 say how many requests that happened to.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

from environments import PEERS, ROOT
from peers import KV_BUDGET

from kvtest.prose import prose

_PROMPT_TOKENS = 3_000
_TOKENS = 256
_POLICIES = ("h2o", "h2o_avg", "sinks")


def perplexities(*, windows: int) -> list[dict[str, Any]]:
    """Return what each policy costs; the first is the full cache's."""
    text = PEERS / "held-out.txt"
    text.write_text(prose(), encoding="utf-8")
    flags = ["--prompt-tokens", str(_PROMPT_TOKENS), "--tokens", str(_TOKENS), "--windows", str(windows)]
    policies = [argument for policy in _POLICIES for argument in ("--policy", policy)]
    kvorum = str(ROOT / ".venv" / "bin" / "kvorum")
    command = [kvorum, "eval", "--text", str(text), "--json", "--kv-budget", str(KV_BUDGET), *flags, *policies]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    cases: list[dict[str, Any]] = json.loads(done.stdout)["cases"]
    return cases
