"""The command `kvorum`: finds the subcommand, parses its flags, runs it, and says in one line what went wrong.

A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`; only the chosen one is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from kvorum.client import ClientError
from kvorum.cluster.config import ConfigError
from kvorum.cluster.config_flags import suggest
from kvorum.kvstore.errors import KvorumError
from kvorum.workers.config import COMPUTE_ENVIRONMENT

_COMMANDS = {
    "serve": ("kvorum.cluster.serve_command", "run a cluster until Ctrl-C"),
    "generate": ("kvorum.cluster.generate_command", "ask a running cluster for text"),
    "demo": ("kvorum.cluster.demo", "start a small cluster, ask it, show what the KV cache did, stop it"),
    "top": ("kvorum.cluster.top_command", "watch a running cluster's KV cache in the terminal"),
    "tenants": ("kvorum.cluster.tenants_command", "show what tenants have, or make an API key"),
    "certs": ("kvorum.cluster.certs_command", "make certificates for the control plane, for development"),
    "bench": ("kvorum.cluster.bench_command", "measure a running server: throughput, latencies, goodput"),
    "sim": (
        "kvorum.cluster.sim_command",
        "replay a trace over modelled engines, with the cache manager and without",
    ),
    "plan": ("kvorum.cluster.plan", "work out how much KV cache a model needs"),
    "lab": ("kvorum.cluster.lab", "show on a real model what the KV cache does"),
    "eval": ("kvorum.cluster.eval_command", "measure what an eviction policy costs on a text"),
}

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    os.environ.update(COMPUTE_ENVIRONMENT)
    arguments = [_with_dashes(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    chosen = next((argument for argument in arguments if not argument.startswith("-")), "")
    module = importlib.import_module(_COMMANDS[chosen][0]) if chosen in _COMMANDS else None
    parser = argparse.ArgumentParser(prog="kvorum", description="LLM inference with a governed KV cache.")
    parser.add_argument("--version", action="version", version=f"kvorum {version('kvorum')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, help_text) in _COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
        if name == chosen and module:
            module.add_arguments(command)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        command = commands.choices[chosen]
        command.error(f"unknown argument {unknown[0]}{_suggestion(unknown[0], command)}")
    assert module, "the parser takes no other command"
    try:
        return int(module.run(args))
    except ConfigError as error:
        print(f"kvorum: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KvorumError as error:
        print(f"kvorum: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except ClientError as error:
        print(f"kvorum: {error.status.name}: {error}", file=sys.stderr)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output is gone; nothing more can be said, not even while Python shuts down.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def _with_dashes(argument: str) -> str:
    """Write `--max_num_seqs=4` as `--max-num-seqs=4`; configuration files allow both, so flags do too."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _suggestion(argument: str, command: argparse.ArgumentParser) -> str:
    return suggest(argument.partition("=")[0], list(command._option_string_actions))
