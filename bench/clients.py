"""Do the field's load tools run against kvorum, unchanged? On a real cluster with the real model.

    make bench-clients

AIPerf and GuideLLM are installed into environments of their own below build/, and run as `examples/` shows it. Exits
with 1 when one fails, reports an error, or saw fewer answers than it asked for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# The tools of the comparison, never the repository's root: it hides other packages.
sys.path.insert(0, str(Path(__file__).parent / "peers"))

from environments import PEERS, ROOT, ensure
from peers import Command
from processes import free_port, running

from kvorum.workers.checkpoint.gguf_tokenizer import build_tokenizer
from kvorum.workers.checkpoint.resolve import DEMO_MODEL, resolve

OUTPUT = ROOT / "build" / "clients"
KEY = "kv-bench-clients"
NUM_REQUESTS = 16
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Tool:
    """A load tool. answered: reads from what it wrote how many answers and how many errors it saw."""

    name: str
    packages: tuple[str, ...]
    answered: Callable[[Path], tuple[int, int]]


def main() -> int:
    """Run both tools and say what they saw."""
    tokenizer = _tokenizer_folder()
    port = free_port()
    serve = (ROOT / ".venv" / "bin" / "kvorum", "serve", "--model", DEMO_MODEL, "--api-key", KEY)
    command = Command((*serve, "--port", str(port), "--grpc-port", "0"), weights="q4_1", kv_cache="bf16")
    for tool in TOOLS:
        ensure(tool.name, tool.packages)
    with running(command, port=port, log=OUTPUT / "server.log") as server:
        outcomes = [_run(tool, server.base_url, tokenizer) for tool in TOOLS]
    return 0 if all(outcomes) else 1


def _run(tool: Tool, url: str, tokenizer: Path) -> bool:
    out, log = OUTPUT / tool.name, OUTPUT / f"{tool.name}.log"
    environment = {
        "PATH": f"{PEERS / tool.name / 'bin'}:{os.environ['PATH']}",
        "KVORUM_URL": url,
        "KVORUM_API_KEY": KEY,
        "MODEL_PATH": str(tokenizer),
        "OUT": str(out),
    }
    with log.open("wb") as output:
        done = subprocess.run(
            ["sh", ROOT / "examples" / f"{tool.name}.sh"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            check=False,
            timeout=_TIMEOUT_S,
        )
    answers, errors = tool.answered(out) if done.returncode == 0 else (0, 0)
    seen = f"exit status {done.returncode}, {answers} answers, {errors} errors"
    print(f"{tool.packages[0]}: {seen}; {log.relative_to(ROOT)}", flush=True)
    return (done.returncode, answers, errors) == (0, NUM_REQUESTS, 0)


def _tokenizer_folder() -> Path:
    """Write the model's tokenizer as transformers reads it."""
    folder = OUTPUT / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    gguf = resolve(DEMO_MODEL).gguf
    assert gguf, "the embedded model is a GGUF file"
    build_tokenizer(gguf.metadata).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _aiperf_answers(out: Path) -> tuple[int, int]:
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    return int(found["request_count"]["avg"]), len(found["error_summary"])


def _guidellm_answers(out: Path) -> tuple[int, int]:
    (benchmark,) = json.loads((out / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    return totals["successful"], totals["errored"]


TOOLS = (
    Tool("aiperf", ("aiperf==0.13.0",), _aiperf_answers),
    Tool("guidellm", ("guidellm==0.8.1", "torch==2.13.0"), _guidellm_answers),
)

if __name__ == "__main__":
    sys.exit(main())
