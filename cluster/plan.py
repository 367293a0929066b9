"""`kvorum plan MODEL`: how much KV memory a model needs and how many sequences fit, before any hardware is bought.

Pure arithmetic over a model's shape; no weights are read. What it compares is the model as it is, the same model with a
KV head for every query head (MHA), and with a single one (MQA); and sequences that keep everything with sequences that
are held to a budget. Windowed layers get no discount: kvorum's blocks span all layers alike.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table

from kvorum.cluster.config import ConfigError, budget_from_number
from kvorum.kernels.sharding import plan_shards
from kvorum.kernels.spec import DecoderSpec, LayerSpec, RopeSpec, Shard
from kvorum.kvstore.errors import KvorumError
from kvorum.kvstore.policies import parse_policy, resolve_budget
from kvorum.kvstore.types import blocks_for
from kvorum.workers.checkpoint.resolve import read_spec

# A float32 score and an int32 position beside every cached key and value of a head.
_SLOT_BYTES = 8
_MOST_DRAWN = 32  # heads in a strip
_ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
_UNITS: Mapping[str, int] = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


def _shape(sizes: tuple[int, int, int], heads: tuple[int, int, int], num_layers: int, max_position: int) -> DecoderSpec:
    vocab_size, hidden_size, intermediate_size = sizes
    num_heads, num_kv_heads, head_dim = heads
    return DecoderSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerSpec(RopeSpec(())),) * num_layers,
        max_position=max_position,
        rms_norm_eps=1e-5,
    )


# Shapes of well-known models, to plan with before anything is fetched; enough for arithmetic, not for computing.
#   (vocab, hidden, intermediate), (query heads, KV heads, head length), layers, context
WELL_KNOWN: Mapping[str, DecoderSpec] = {
    "SmolLM2-135M": _shape((49_152, 576, 1_536), (9, 3, 64), 30, 8_192),
    "SmolLM2-360M": _shape((49_152, 960, 2_560), (15, 5, 64), 32, 8_192),
    "SmolLM2-1.7B": _shape((49_152, 2_048, 8_192), (32, 32, 64), 24, 8_192),
    "Llama-2-7B": _shape((32_000, 4_096, 11_008), (32, 32, 128), 32, 4_096),
    "Llama-2-13B": _shape((32_000, 5_120, 13_824), (40, 40, 128), 40, 4_096),
    "Llama-2-70B": _shape((32_000, 8_192, 28_672), (64, 8, 128), 80, 4_096),
    "Llama-3-8B": _shape((128_256, 4_096, 14_336), (32, 8, 128), 32, 8_192),
    "Llama-3-70B": _shape((128_256, 8_192, 28_672), (64, 8, 128), 80, 8_192),
    "Llama-3.1-8B": _shape((128_256, 4_096, 14_336), (32, 8, 128), 32, 131_072),
    "Llama-3.1-70B": _shape((128_256, 8_192, 28_672), (64, 8, 128), 80, 131_072),
    "Llama-3.1-405B": _shape((128_256, 16_384, 53_248), (128, 8, 128), 126, 131_072),
    "Llama-3.2-1B": _shape((128_256, 2_048, 8_192), (32, 8, 64), 16, 131_072),
    "Llama-3.2-3B": _shape((128_256, 3_072, 8_192), (24, 8, 128), 28, 131_072),
    "Mistral-7B": _shape((32_000, 4_096, 14_336), (32, 8, 128), 32, 32_768),
    "Qwen2.5-0.5B": _shape((151_936, 896, 4_864), (14, 2, 64), 24, 32_768),
    "Qwen2.5-7B": _shape((152_064, 3_584, 18_944), (28, 4, 128), 28, 32_768),
    "Qwen2.5-72B": _shape((152_064, 8_192, 29_568), (64, 8, 128), 80, 32_768),
    "Qwen3-0.6B": _shape((151_936, 1_024, 3_072), (16, 8, 128), 28, 40_960),
    "Qwen3-8B": _shape((151_936, 4_096, 12_288), (32, 8, 128), 36, 40_960),
    "Qwen3-32B": _shape((151_936, 5_120, 25_600), (64, 8, 128), 64, 40_960),
    "Gemma-3-1B": _shape((262_144, 1_152, 6_912), (4, 1, 256), 26, 32_768),
    "Gemma-3-4B": _shape((262_208, 2_560, 10_240), (8, 4, 256), 34, 131_072),
    "Gemma-3-12B": _shape((262_208, 3_840, 15_360), (16, 8, 256), 48, 131_072),
    "Gemma-3-27B": _shape((262_208, 5_376, 21_504), (32, 16, 128), 62, 131_072),
}


@dataclass(frozen=True, slots=True)
class VariantPlan:
    """The model with one number of KV heads.

    is_model: it is the model's own number. kv_heads_per_rank, shards: uneven when they must be; the fullest rank
    decides what fits. rank_bytes_per_token and block_bytes: of that rank; the latter with scores and positions.
    sequences_at_budget: None without a budget.
    """

    attention: Literal["MHA", "GQA", "MQA"]
    is_model: bool
    num_kv_heads: int
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    kv_heads_per_rank: tuple[int, ...]
    shards: tuple[Shard, ...]
    rank_bytes_per_token: int
    block_bytes: int
    num_blocks: int
    sequences: int
    sequences_at_budget: int | None


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What fits, and the question it answers. pool_bytes is the KV pool of one rank."""

    num_layers: int
    num_heads: int
    head_dim: int
    tensor_parallel_size: int
    pool_bytes: int
    context_tokens: int
    budget_tokens: int | None
    block_size: int
    kv_element_bytes: int
    variants: tuple[VariantPlan, ...]


def plan(  # noqa: PLR0913  # the question has this many parts, each named
    spec: DecoderSpec,
    *,
    tensor_parallel_size: int,
    pool_bytes: int,
    context_tokens: int,
    budget_tokens: int | None,
    block_size: int,
    kv_element_bytes: int,
) -> PlanReport:
    """Work out what a model's KV cache takes and how many sequences of a length fit.

    Raises:
        ConfigError: there are more ranks than query heads.
    """
    if tensor_parallel_size > spec.num_heads:
        raise ConfigError(
            f"tensor_parallel_size: {tensor_parallel_size} ranks cannot share {spec.num_heads} query heads"
        )

    def variant(num_kv_heads: int) -> VariantPlan:
        token_bytes = 2 * spec.num_layers * spec.head_dim * kv_element_bytes  # of one KV head
        shards = plan_shards(replace(spec, num_kv_heads=num_kv_heads), tensor_parallel_size)
        per_rank = tuple(shard.num_kv_heads for shard in shards)
        block_bytes = block_size * max(per_rank) * (token_bytes + spec.num_layers * _SLOT_BYTES)
        num_blocks = pool_bytes // block_bytes
        whole = blocks_for(context_tokens, block_size)
        held = None if budget_tokens is None else min(whole, blocks_for(budget_tokens + 1, block_size))
        return VariantPlan(
            attention=_attention(num_kv_heads, spec.num_heads),
            is_model=num_kv_heads == spec.num_kv_heads,
            num_kv_heads=num_kv_heads,
            kv_bytes_per_token=num_kv_heads * token_bytes,
            kv_bytes_per_sequence=num_kv_heads * token_bytes * context_tokens,
            kv_heads_per_rank=per_rank,
            shards=shards,
            rank_bytes_per_token=max(per_rank) * token_bytes,
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            sequences=num_blocks // whole,
            sequences_at_budget=None if held is None else num_blocks // held,
        )

    counts = sorted({spec.num_heads, spec.num_kv_heads, 1}, reverse=True)
    return PlanReport(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        tensor_parallel_size=tensor_parallel_size,
        pool_bytes=pool_bytes,
        context_tokens=context_tokens,
        budget_tokens=budget_tokens,
        block_size=block_size,
        kv_element_bytes=kv_element_bytes,
        variants=tuple(variant(count) for count in counts),
    )


def render(report: PlanReport) -> RenderableType:
    """Return a table for people: a column for each number of KV heads."""
    table = Table(caption="A block holds a score and a position beside each key and value.", caption_justify="left")
    table.add_column()
    for variant in report.variants:
        heading = f"{variant.attention} (this model)" if variant.is_model else variant.attention
        table.add_column(heading, justify="right", style="bold" if variant.is_model else "")
    for label, cell in _rows(report):
        table.add_row(label, *map(cell, report.variants))
    ranks = f", {report.tensor_parallel_size} ranks" if report.tensor_parallel_size > 1 else ""
    heading = (
        f"{report.num_layers} layers, {report.num_heads} query heads of {report.head_dim}, "
        f"{report.kv_element_bytes} bytes a number{ranks}"
    )
    if report.tensor_parallel_size == 1:
        return Group(heading, table)
    return Group(heading, table, _shard_table(next(variant for variant in report.variants if variant.is_model)))


def _shard_table(variant: VariantPlan) -> Table:
    """Draw what each rank holds: a row for each rank, a mark for each head."""
    table = Table(
        title="What each rank holds",
        title_justify="left",
        caption="A KV head that several ranks hold is marked *: they split its query heads and share its scores.",
        caption_justify="left",
    )
    for column in ("rank", "KV heads", "query heads", "MLP columns", "vocabulary"):
        table.add_column(column)
    for shard in variant.shards:
        mark = "*" if len(shard.replicas) > 1 else ""
        table.add_row(
            str(shard.rank),
            _heads_text(shard.kv_heads, variant.num_kv_heads) + mark,
            _heads_text(shard.q_heads, variant.shards[-1].q_heads[1]),
            _range_text(shard.mlp),
            _range_text(shard.vocab),
        )
    return table


def _heads_text(heads: tuple[int, int], num_heads: int) -> str:
    """Draw heads as a strip, filled where the rank has them, and name them."""
    first, last = heads
    name = str(first) if last - first == 1 else f"{first}-{last - 1}"
    if num_heads > _MOST_DRAWN:
        return name
    return "·" * first + "■" * (last - first) + "·" * (num_heads - last) + f" {name}"


def _range_text(columns: tuple[int, int]) -> str:
    return f"{columns[0]:,}-{columns[1] - 1:,}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `kvorum plan`."""
    known = ", ".join(WELL_KNOWN)
    parser.add_argument("model", help=f"folder, config.json, .gguf file, Hugging Face id, or one of: {known}")
    parser.add_argument(
        "--tensor-parallel-size", type=_positive, default=1, metavar="N", help="ranks that share the model [1]"
    )
    parser.add_argument(
        "--kv-cache-memory-bytes",
        type=parse_bytes,
        default=16 * 1024**3,
        metavar="BYTES",
        help="KV pool of each rank, such as 40GiB [16GiB]",
    )
    parser.add_argument(
        "--max-model-len", type=_positive, metavar="N", help="tokens of a sequence; default: the model's whole context"
    )
    parser.add_argument(
        "--kv-budget",
        type=float,
        metavar="X",
        help="tokens that an evicting policy keeps, or a fraction of the sequence up to 1; default: none",
    )
    parser.add_argument("--block-size", type=_positive, default=16, metavar="N", help="tokens a KV block holds [16]")
    parser.add_argument(
        "--kv-cache-dtype", choices=list(_ELEMENT_BYTES), default="bfloat16", help="type of keys and values [bfloat16]"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers for programs")


def run(args: argparse.Namespace) -> int:
    """Print the plan that the arguments ask for; return the exit status."""
    try:
        name, spec = _find_spec(args.model)
        context_tokens: int = args.max_model_len or spec.max_position
        report = plan(
            spec,
            tensor_parallel_size=args.tensor_parallel_size,
            pool_bytes=args.kv_cache_memory_bytes,
            context_tokens=context_tokens,
            budget_tokens=resolve_budget(
                parse_policy("h2o"), budget_from_number(args.kv_budget), context_tokens=context_tokens
            ),
            block_size=args.block_size,
            kv_element_bytes=_ELEMENT_BYTES[args.kv_cache_dtype],
        )
    except KvorumError as error:
        print(f"kvorum plan: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({"model": name, **asdict(report)}, indent=2))
    else:
        Console().print(name, render(report), sep="\n", markup=False, highlight=False)
    return 0


def parse_bytes(text: str) -> int:
    """Read a number of bytes with an optional unit: 1000, 1.5GB (of 1000), 16GiB (of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes such as 16GiB, 1.5GB or 1000000")
    num_bytes = int(float(match[1]) * _UNITS[match[2]])
    if num_bytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be at least one byte")
    return num_bytes


def _find_spec(model: str) -> tuple[str, DecoderSpec]:
    for name, spec in WELL_KNOWN.items():
        if name.casefold() == model.casefold():
            return name, spec
    return model, read_spec(model)


def _attention(num_kv_heads: int, num_heads: int) -> Literal["MHA", "GQA", "MQA"]:
    if num_kv_heads == num_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"


def _rows(report: PlanReport) -> list[tuple[str, Callable[[VariantPlan], str]]]:
    length, pool = f"{report.context_tokens:,} tokens", _bytes_text(report.pool_bytes)
    rows: list[tuple[str, Callable[[VariantPlan], str]]] = [
        ("KV heads", lambda variant: str(variant.num_kv_heads)),
        ("KV of one token", lambda variant: _bytes_text(variant.kv_bytes_per_token)),
        (f"KV of {length}", lambda variant: _bytes_text(variant.kv_bytes_per_sequence)),
    ]
    if report.tensor_parallel_size > 1:
        rows += [
            ("KV heads on the ranks", lambda variant: _ranks_text(variant.kv_heads_per_rank)),
            ("KV of one token on the fullest", lambda variant: _bytes_text(variant.rank_bytes_per_token)),
        ]
    rows += [
        (f"Blocks of {report.block_size} tokens in {pool}", lambda variant: f"{variant.num_blocks:,}"),
        (f"Sequences of {length}", lambda variant: f"{variant.sequences:,}"),
    ]
    if report.budget_tokens is not None:
        rows.append(
            (f"... held to {report.budget_tokens:,} tokens", lambda variant: f"{variant.sequences_at_budget:,}")
        )
    return rows


def _ranks_text(kv_heads_per_rank: tuple[int, ...]) -> str:
    """Write 2, 2, 1, 1 as `2 x 2 + 2 x 1`."""
    counts = {heads: kv_heads_per_rank.count(heads) for heads in kv_heads_per_rank}
    return " + ".join(str(heads) if count == 1 else f"{count} x {heads}" for heads, count in counts.items())


def _bytes_text(num_bytes: int) -> str:
    """Write bytes with a unit of 1024 that leaves at most four digits before the point."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
