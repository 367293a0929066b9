"""The Triton back end on one GPU: whether it is right, and how near it comes to the memory and the tensor cores.

    python -P bench/gpu.py                       # everything, under 8 minutes on an H200
    python -P bench/gpu.py --only check decode

Needs the package, torch and triton. Sections: `check` compares every kernel with the reference back end on the GPU and
fails the run; `decode` reads K and V at a fraction of the measured copy bandwidth, with scores off, on, and with
victims; `prefill` gives TFLOP/s and what column sums cost; `moves` times shrinks and copies; `sweep` tries
other decode tiles; `engine` decodes with a random-weight model of Llama 3 8B's shape, with and without H2O.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton

from kvorum.kernels.plan import EvictionRule, SequenceStep, ShrinkRequest
from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kernels.spec import DecoderSpec, LayerSpec, RopeSpec, Shard, weight_names
from kvorum.kernels.triton.backend import TritonBackend
from kvorum.kernels.triton.decode_attention import decode_attention
from kvorum.kernels.triton.pool import TritonPool
from kvorum.kernels.triton.prefill_attention import prefill_attention
from kvorum.kernels.triton.ranking import choose_victims
from kvorum.kernels.triton.step import TritonStep, build_step
from kvorum.kernels.triton.tiles import Architecture, Launch, Tiles, programs_at_once

BLOCK_SIZE = 16
HEAD_DIM = 128
# num_heads, num_kv_heads of one rank.
SHAPES = {"8B": (32, 8), "70B/TP8": (8, 1)}
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
H2O = EvictionRule(recent_tokens=256)
H2O_AVG = EvictionRule(recent_tokens=64, sink_tokens=4, per_lifetime=True, decay=0.99)
TIME_LIMIT_S = 480


def spec_of(
    *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int = HEAD_DIM, hidden: int = 512, mlp: int = 512
) -> DecoderSpec:
    """Return a Llama-like spec."""
    rope = RopeSpec(tuple(500000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)))
    return DecoderSpec(
        vocab_size=128256 if hidden == 4096 else 512,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerSpec(rope),) * num_layers,
        max_position=131072,
        rms_norm_eps=1e-5,
        attention_scale=head_dim**-0.5,
    )


def random_weights(spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Draw weights one by one, so that an 8B model fits beside its cache."""
    generator = torch.Generator(device).manual_seed(0)
    vocab, up = (spec.vocab_size, spec.hidden_size), (spec.intermediate_size, spec.hidden_size)
    q, kv = ((heads * spec.head_dim, spec.hidden_size) for heads in (spec.num_heads, spec.num_kv_heads))
    shapes: dict[str, tuple[int, ...]] = {"embed": vocab, "lm_head": vocab, "gate": up, "up": up, "down": up[::-1]}
    shapes |= {"q": q, "k": kv, "v": kv, "o": q[::-1], "q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    for name in weight_names(spec):
        shape = shapes.get(name.rsplit(".", 1)[-1], (spec.hidden_size,))
        mean, deviation = (1.0, 0.1) if len(shape) == 1 else (0.0, 1.5 * shape[-1] ** -0.5)
        yield name, torch.empty(shape, dtype=dtype, device=device).normal_(mean, deviation, generator=generator)


def seconds(run: Callable[[], object], *, budget_s: float = 0.1) -> float:
    """Return the time of one run as a replayed CUDA graph: launches cost nothing, as in the engine."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    one = timed(graph.replay, 1)
    repeats = max(1, min(50, int(budget_s / 5 / max(one, 1e-6))))
    return statistics.median(timed(graph.replay, repeats) for _ in range(5))


def timed(run: Callable[[], object], repeats: int) -> float:
    """Return seconds of one run by the GPU's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / repeats


class Cache:
    """A pool of a few layers full of random keys and values, block tables in random order."""

    def __init__(self, lengths: Sequence[int], shape: str, kv_dtype: torch.dtype, device: torch.device) -> None:
        num_heads, self.num_kv_heads = SHAPES[shape]
        self.device = device
        self.layer_bytes = sum(lengths) * 2 * self.num_kv_heads * HEAD_DIM * kv_dtype.itemsize
        # The layers together are several times the L2 cache, as in a model.
        self.num_layers = max(1, min(32, -(-(512 << 20) // self.layer_bytes)))
        spec = spec_of(num_layers=self.num_layers, num_heads=num_heads, num_kv_heads=self.num_kv_heads)
        backend = TritonBackend(spec, Shard.whole(spec), dtype=torch.bfloat16, device=device, kv_dtype=kv_dtype)
        blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        self.pool = backend.allocate_pool(num_blocks=sum(blocks), block_size=BLOCK_SIZE, max_num_seqs=len(lengths))
        fill(self.pool, slots_each=max(lengths))
        order = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)).tolist()
        self.tables = [
            tuple(order[end - size : end]) for size, end in zip(blocks, itertools.accumulate(blocks), strict=True)
        ]
        self.lengths = lengths
        self.queries = torch.randn(len(lengths), num_heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.queries)
        self.tiles = Tiles.choose(
            Architecture.of(device),
            num_kv_heads=self.num_kv_heads,
            group_size=num_heads // self.num_kv_heads,
            head_dim=HEAD_DIM,
            kv_itemsize=kv_dtype.itemsize,
            programs=programs_at_once(device),
        )

    def decode_step(self, rule: EvictionRule | None, *, choose: bool = False) -> TritonStep:
        """Return a step of one token for each sequence."""
        steps = [
            SequenceStep(row, table, length - 1, 1, length - 1, rule, choose_victims=choose)
            for row, (table, length) in enumerate(zip(self.tables, self.lengths, strict=True))
        ]
        token_ids = torch.zeros(len(steps), dtype=torch.int64)
        return build_step(token_ids, steps, block_size=BLOCK_SIZE, tiles=self.tiles, device=self.device)

    def prefill_step(self, num_tokens: int, rule: EvictionRule | None) -> TritonStep:
        """Return a step of the last tokens of the first sequence."""
        prefix = self.lengths[0] - num_tokens
        step = SequenceStep(0, self.tables[0], prefix, num_tokens, prefix, rule)
        token_ids = torch.zeros(num_tokens, dtype=torch.int64)
        return build_step(token_ids, [step], block_size=BLOCK_SIZE, tiles=self.tiles, device=self.device)

    def decode_s(self, step: TritonStep, tiles: Tiles | None = None) -> float:
        """Return seconds of decode attention in one layer."""
        used = tiles or self.tiles

        def run() -> None:
            for index in range(self.num_layers):
                layer = self.pool.layer(index)
                decode_attention(self.queries, layer, step, self.out, sliding_window=None, tiles=used)
                choose_victims(layer, step)

        return seconds(run) / self.num_layers


def fill(pool: TritonPool, *, slots_each: int) -> None:
    """Fill a pool with numbers like those of a model; positions count up to slots_each, again and again."""
    if pool.kv.dtype == torch.float8_e4m3fn:
        pool.kv.view(torch.uint8).random_(0, 56)  # 0 to 1
    else:
        pool.kv.normal_(0.0, 0.5)
    pool.scores.uniform_(0.0, 1.0)
    slots = torch.arange(pool.num_blocks * BLOCK_SIZE, device=pool.kv.device) % slots_each
    pool.positions.copy_(slots.view(pool.num_blocks, 1, BLOCK_SIZE).expand_as(pool.positions[0]))


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes per second read and written by a large copy."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(timed(lambda: target.copy_(source), 5) for _ in range(5))


# check


def check(device: torch.device, _bandwidth: float) -> None:
    """Compare the back end with the reference, both on the GPU; raises where they differ."""
    small = spec_of(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=64)
    variant = replace(
        small,
        layers=(small.layers[0], replace(small.layers[1], sliding_window=100)),
        activation="gelu_tanh",
        qk_norm=True,
        sandwich_norms=True,
        norm_offset=1.0,
        embedding_scale=4.0,
        tied_embeddings=True,
    )
    cases = [
        (f"fp32, {name}", spec, torch.float32, torch.float32, 2e-4)
        for name, spec in (("plain", small), ("windows, norms", variant))
    ]
    llama, sharded = (
        spec_of(num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads)
        for num_heads, num_kv_heads in SHAPES.values()
    )
    cases += [
        ("bf16, 8B", llama, torch.bfloat16, torch.bfloat16, 0.05),
        ("bf16, fp8 pool, 8B", llama, torch.bfloat16, torch.float8_e4m3fn, 0.15),
        ("fp16, 8B", llama, torch.float16, torch.float16, 0.01),
        ("bf16, 70B/TP8", sharded, torch.bfloat16, torch.bfloat16, 0.05),
    ]
    for name, spec, dtype, kv_dtype, tolerance in cases:
        errors = run_life(spec, dtype, kv_dtype, device)
        print(f"  {name:32} largest relative error: hidden {errors[0]:.1e}, scores {errors[1]:.1e}", flush=True)
        assert max(errors) <= tolerance, f"{name}: above {tolerance}"


def run_life(spec: DecoderSpec, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Take three sequences through their lives in both back ends; returns the errors of hidden states and scores.

    In narrow types near ties fall either way, and sequences are compared only until something was evicted from them. In
    float32 they are compared to the end: at most one slot in a thousand may hold another token.
    """
    reference = ReferenceBackend(spec, Shard.whole(spec), dtype=torch.float32, device=device)
    backend = TritonBackend(spec, Shard.whole(spec), dtype=dtype, device=device, kv_dtype=kv_dtype)
    for it in (reference, backend):
        it.load((name, weight.to(dtype)) for name, weight in random_weights(spec, device, torch.float32))
    sizes = {"num_blocks": 400, "block_size": BLOCK_SIZE, "max_num_seqs": 4}
    expected_pool, pool = reference.allocate_pool(**sizes), backend.allocate_pool(**sizes)
    pool.kv.view(torch.uint8).fill_(0xFF)  # NaN in every type
    tables = [tuple(range(350, 100, -1)), tuple(range(40)), (380, 360, 370)]
    exact = dtype == torch.float32
    hidden_error = score_error = 0.0
    generator = torch.Generator().manual_seed(0)
    for number, steps in enumerate(life(tables)):
        if isinstance(steps, ShrinkRequest):
            if exact:
                reference.shrink(expected_pool, steps)
                backend.shrink(pool, steps)
            continue
        if not exact and number >= EVICTS_FROM:
            break
        tokens = torch.randint(0, spec.vocab_size, (sum(s.num_tokens for s in steps),), generator=generator)
        expected = reference.forward(expected_pool, reference.prepare(expected_pool, tokens, steps))
        found = backend.forward(pool, backend.prepare(pool, tokens, steps))
        hidden_error = max(hidden_error, relative_error(found, expected))
        for step in steps:
            view = backend.view_slots(pool, step.row, step.block_table, step.num_slots_after)
            truth = reference.view_slots(expected_pool, step.row, step.block_table, step.num_slots_after)
            same = (view.positions == truth.positions) & (view.alive == truth.alive)
            assert float((~same).double().mean()) <= 1e-3, "other tokens are kept"
            if step.rule is not None:
                score_error = max(score_error, relative_error(view.scores[same], truth.scores[same]))
    return hidden_error, score_error


EVICTS_FROM = 3


def life(tables: Sequence[tuple[int, ...]]) -> Iterator[list[SequenceStep] | ShrinkRequest]:
    """Yield chunks, decodes (long rows are split), a shrink, then decodes that replace victims."""
    a, b, c = tables
    yield [SequenceStep(0, a, 0, 2900, 0, H2O_AVG), SequenceStep(1, b, 0, 333, 0)]
    yield [
        SequenceStep(0, a, 2900, 777, 2900, H2O_AVG),
        SequenceStep(1, b, 333, 1, 333),
        SequenceStep(2, c, 0, 17, 0, H2O),
    ]
    yield [
        SequenceStep(0, a, 3677, 1, 3677, H2O_AVG),
        SequenceStep(1, b, 334, 1, 334),
        SequenceStep(2, c, 17, 1, 17, H2O),
    ]
    yield ShrinkRequest(0, a, a[:40], 3678, 600, 3677, H2O_AVG, 5)
    yield [SequenceStep(0, a, 3678, 1, 600, H2O_AVG, choose_victims=True)]
    for position in range(3679, 3690):
        yield [
            SequenceStep(0, a, position, 1, 601, H2O_AVG, replace=True, choose_victims=True),
            SequenceStep(1, b, position - 3344, 1, position - 3344),
        ]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error relative to the largest number."""
    assert bool(found.isfinite().all()), "not finite"
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


# decode, sweep


def decode(device: torch.device, bandwidth: float) -> None:
    """Print decode attention as a fraction of the copy bandwidth."""
    columns = f"{'context':>8} {'batch':>6} {'us/layer':>9} {'GB/s':>6} {'of copy':>8} {'scores':>8} {'victims':>8}"
    print(f"  {'shape':8} {'kv':5} {columns}")
    free = torch.cuda.mem_get_info(device)[0]
    for (shape, kv), context in itertools.product(itertools.product(SHAPES, DTYPES), (1024, 4096, 16384, 65536)):
        for batch in (1, 8, 32, 128, 256):
            heads = SHAPES[shape][1]
            if context * batch * 2 * heads * HEAD_DIM * DTYPES[kv].itemsize > min(24 << 30, free // 3):
                continue
            decode_line([context] * batch, shape, kv, bandwidth, device, name=str(context))
    generator = torch.Generator().manual_seed(0)
    ragged = torch.randint(64, 8192, (128,), generator=generator).tolist()
    for shape in SHAPES:
        decode_line(ragged, shape, "bf16", bandwidth, device, name="64-8k")


def decode_line(
    lengths: Sequence[int], shape: str, kv: str, bandwidth: float, device: torch.device, *, name: str
) -> None:
    """Time one set of rows without scores, with scores, and with victims too."""
    cache = Cache(lengths, shape, DTYPES[kv], device)
    plain = cache.decode_s(cache.decode_step(None))
    scores = cache.decode_s(cache.decode_step(H2O))
    victims = cache.decode_s(cache.decode_step(H2O_AVG, choose=True))
    rate = cache.layer_bytes / plain
    print(
        f"  {shape:8} {kv:5} {name:>8} {len(lengths):6} {plain * 1e6:9.1f} {rate / 1e9:6.0f} {rate / bandwidth:8.1%} "
        f"{scores / plain - 1:+8.1%} {victims / plain - 1:+8.1%}",
        flush=True,
    )


def sweep(device: torch.device, bandwidth: float) -> None:
    """Try other tiles: decode at a size that is all bandwidth, prefill at one that is all arithmetic."""
    for kv in DTYPES:
        cache = Cache([4096] * 64, "8B", DTYPES[kv], device)
        step = cache.decode_step(None)
        for slots, warps, stages in itertools.product((32, 64, 128), (4, 8), (3, 5)):
            launch = Launch(cache.tiles.decode.rows, slots, warps, stages)
            taken = try_out(partial(cache.decode_s, step, replace(cache.tiles, decode=launch)))
            print(f"  decode {kv:5} {launch}: {cache.layer_bytes / taken / bandwidth:6.1%} of copy", flush=True)
    cache = Cache([8192], "8B", torch.bfloat16, device)
    queries = torch.randn(8192, SHAPES["8B"][0], HEAD_DIM, dtype=torch.bfloat16, device=device)
    for numbers in ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (128, 64, 4, 3), (64, 64, 4, 3)):
        cache.tiles = replace(cache.tiles, prefill=Launch(*numbers))
        taken = try_out(partial(prefill_s, cache, queries, cache.prefill_step(8192, None)))
        print(f"  prefill {cache.tiles.prefill}: {2 * queries.numel() * 8192 / taken / 1e12:6.0f} TFLOP/s", flush=True)


def try_out(run: Callable[[], float]) -> float:
    """Return seconds, infinitely many where the GPU has not the shared memory or registers for it."""
    try:
        return run()
    except triton.runtime.errors.OutOfResources:
        return float("inf")


# prefill, moves


def prefill(device: torch.device, _bandwidth: float) -> None:
    """Print prefill attention in TFLOP/s, and what the column sums add."""
    print(f"  {'shape':8} {'kv':5} {'prefix':>7} {'tokens':>7} {'ms':>8} {'TFLOP/s':>8} {'scores':>8}")
    for (shape, kv), (prefix, tokens) in itertools.product(
        itertools.product(SHAPES, DTYPES), ((0, 1024), (0, 4096), (0, 16384), (14336, 2048))
    ):
        cache = Cache([prefix + tokens], shape, DTYPES[kv], device)
        queries = torch.randn(tokens, SHAPES[shape][0], HEAD_DIM, dtype=torch.bfloat16, device=device)
        times = [prefill_s(cache, queries, cache.prefill_step(tokens, rule)) for rule in (None, H2O)]
        pairs = tokens * prefix + tokens * (tokens + 1) / 2
        flops = 4 * SHAPES[shape][0] * HEAD_DIM * pairs
        print(
            f"  {shape:8} {kv:5} {prefix:7} {tokens:7} {times[0] * 1e3:8.3f} {flops / times[0] / 1e12:8.0f} "
            f"{times[1] / times[0] - 1:+8.1%}",
            flush=True,
        )


def prefill_s(cache: Cache, queries: torch.Tensor, step: TritonStep) -> float:
    """Return seconds of prefill attention in one layer."""
    layer, out = cache.pool.layer(0), torch.empty_like(queries)
    return seconds(lambda: prefill_attention(queries, layer, step, out, sliding_window=None, tiles=cache.tiles))


def moves(device: torch.device, _bandwidth: float) -> None:
    """Print what shrinks and copies take."""
    spec = spec_of(num_layers=32, num_heads=32, num_kv_heads=8)
    backend = TritonBackend(spec, Shard.whole(spec), dtype=torch.bfloat16, device=device)
    pool = backend.allocate_pool(num_blocks=4096, block_size=BLOCK_SIZE, max_num_seqs=256)
    fill(pool, slots_each=4096 * BLOCK_SIZE)
    for size, keep in ((4096, 1024), (32768, 4096)):
        table = tuple(range(size // BLOCK_SIZE))
        request = ShrinkRequest(0, table, table, size, keep, size, H2O)
        backend.shrink(pool, request)
        taken = statistics.median(timed(partial(backend.shrink, pool, request), 1) for _ in range(5))
        print(f"  shrink {size} -> {keep}, 32 layers: {taken * 1e3:.2f} ms")
    backend.copy_blocks(pool, range(1024), range(1024, 2048))
    taken = timed(lambda: backend.copy_blocks(pool, range(1024), range(1024, 2048)), 3)
    print(f"  copy 1024 blocks: {2 * 1024 * backend.block_bytes(BLOCK_SIZE) / taken / 1e9:.0f} GB/s read and written")


# engine


def engine(device: torch.device, _bandwidth: float) -> None:
    """Print tokens per second of whole steps: prepare, forward as a graph, logits, the tokens back on the host."""
    spec = spec_of(num_layers=32, num_heads=32, num_kv_heads=8, hidden=4096, mlp=14336)
    backend = TritonBackend(spec, Shard.whole(spec), dtype=torch.bfloat16, device=device)
    backend.load(random_weights(spec, device, torch.bfloat16))
    context, budget = 4096, 1024
    free = torch.cuda.mem_get_info(device)[0] - (8 << 30)
    most = free // (backend.block_bytes(BLOCK_SIZE) * (context // BLOCK_SIZE + 8))
    batches = [batch for batch in (1, 16, 64, 128, 256) if batch <= most]
    blocks_each = context // BLOCK_SIZE + 8
    pool = backend.allocate_pool(num_blocks=batches[-1] * blocks_each, block_size=BLOCK_SIZE, max_num_seqs=256)
    fill(pool, slots_each=blocks_each * BLOCK_SIZE)
    tables = [tuple(range(row * blocks_each, (row + 1) * blocks_each)) for row in range(batches[-1])]

    prompt = [SequenceStep(0, tables[0], 0, context, 0)]
    ids = torch.randint(0, spec.vocab_size, (context,))
    for rule, name in ((None, "no scores"), (H2O, "scores")):
        steps = [replace(prompt[0], rule=rule)]
        taken = min(timed(partial(whole_step, backend, pool, ids, steps), 1) for _ in range(4))
        print(f"  prefill {context} tokens, {name}: {context / taken:.0f} tokens/s", flush=True)

    policies = (
        Policy("full", None, context, context),
        Policy("h2o, budget not reached", H2O, context, context),
        Policy(f"h2o, {budget} slots", H2O, budget, context),
        Policy(f"h2o_avg, {budget} slots", H2O_AVG, budget, context),
    )
    for batch, policy in itertools.product(batches, policies):
        step_s = decode_steps_s(backend, pool, tables[:batch], policy)
        speed = f"{step_s * 1e3:7.2f} ms/step {batch / step_s:8.0f} tokens/s"
        print(f"  batch {batch:4}  {policy.name:24} {speed}", flush=True)


def whole_step(
    backend: TritonBackend, pool: TritonPool, tokens: torch.Tensor, steps: Sequence[SequenceStep]
) -> torch.Tensor:
    """Prepare and run a step; returns its last hidden states."""
    return backend.forward(pool, backend.prepare(pool, tokens, steps))


@dataclass(frozen=True)
class Policy:
    """How sequences of `context` tokens are held: a rule, and the slots before the first step."""

    name: str
    rule: EvictionRule | None
    slots: int
    context: int


def decode_steps_s(
    backend: TritonBackend, pool: TritonPool, tables: Iterable[tuple[int, ...]], policy: Policy, *, num_steps: int = 24
) -> float:
    """Return the median seconds of a step; sequences that hold less than their context replace victims."""
    tables = list(tables)
    tokens = torch.zeros(len(tables), dtype=torch.int64)
    evicts = policy.slots < policy.context
    times = []
    for number in range(num_steps):
        before = policy.slots + (min(number, 1) if evicts else number)
        replaces = evicts and number > 0
        steps = [
            SequenceStep(row, table, policy.context + number, 1, before, policy.rule, replaces, evicts)
            for row, table in enumerate(tables)
        ]
        start = time.perf_counter()
        hidden = whole_step(backend, pool, tokens, steps)
        tokens = backend.logits(hidden).argmax(dim=-1).cpu()
        times.append(time.perf_counter() - start)
    return statistics.median(times[4:])


SECTIONS = {"check": check, "decode": decode, "prefill": prefill, "moves": moves, "engine": engine, "sweep": sweep}


@torch.inference_mode()
def main() -> None:
    """Run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "no GPU\n")

    device = torch.device("cuda", torch.cuda.current_device())
    start = time.monotonic()
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s, read and written")
    for name, section in SECTIONS.items():
        elapsed = time.monotonic() - start
        if name not in args.only:
            continue
        if elapsed > TIME_LIMIT_S - 60:
            print(f"{name}: skipped, {elapsed:.0f} s are over")
            continue
        print(f"{name} ({elapsed:.0f} s)", flush=True)
        section(device, bandwidth)
        torch.cuda.empty_cache()
    print(f"done in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
