"""`kvorum serve`: a cluster in the foreground, until Ctrl-C or SIGTERM; SIGHUP reads its settings anew."""

from __future__ import annotations

import argparse
import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from kvorum.cluster.config_flags import add_config_arguments, flags_of, load_config
from kvorum.cluster.launcher import RunningCluster, running_cluster, update_cluster
from kvorum.cluster.model import resolve_checkpoint
from kvorum.cluster.progress_view import ProgressView
from kvorum.kvstore.errors import KvorumError

_Handler = Callable[[int, FrameType | None], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the configuration file, the Ray cluster and a flag for each setting."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML file with settings; flags win over it")
    parser.add_argument("--address", metavar="TEXT", help="running Ray cluster to use, auto for this machine's")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Start, say where it is, wait, stop."""
    config = load_config(args.config, flags_of(args))
    resolve_checkpoint(config)  # what can be wrong with the model is said before anything is started
    _on_stop_signals(_interrupter())
    with contextlib.ExitStack() as stack:
        with ProgressView() as view:
            cluster = stack.enter_context(
                running_cluster(config, address=args.address, on_phase=view.show_phase, on_progress=view.show_load)
            )
        # From here on nothing is interrupted: a stop that is cut short would leave processes behind.
        signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        _on_stop_signals(lambda number, _: signals.put(number))
        signal.signal(signal.SIGHUP, lambda number, _: signals.put(number))
        print(ready_line(cluster), flush=True)
        while signals.get() == signal.SIGHUP:
            cluster = _update(cluster, args)
        print("stopping …", file=sys.stderr, flush=True)
    return 0


def _update(cluster: RunningCluster, args: argparse.Namespace) -> RunningCluster:
    """Read the settings anew and roll them out; what is wrong with them is said, and the cluster goes on as it was."""
    print("rolling the settings out …", file=sys.stderr, flush=True)
    try:
        config = load_config(args.config, flags_of(args))
        resolve_checkpoint(config)
        cluster = update_cluster(cluster, config)
    except KvorumError as error:
        print(f"kvorum: {error}", file=sys.stderr, flush=True)
    else:
        print("the settings are rolled out", file=sys.stderr, flush=True)
    return cluster


def ready_line(cluster: RunningCluster) -> str:
    """Say where the cluster is."""
    targets = ", ".join(f"grpc://{target}" for target in cluster.grpc_targets)
    return f"kvorum is ready: {', '.join(cluster.http_urls)} and {targets}"


def _on_stop_signals(handler: _Handler) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _interrupter() -> _Handler:
    """Return a handler that interrupts once, so that the cleaning up after it is left alone."""
    interrupted = threading.Event()

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    return interrupt
