"""Compile, without a GPU, every kernel just as the back end launches it, and print what each takes as JSON.

The back end runs on CPU tensors while launches are noted down instead of carried out; so what is compiled here has the
very argument types, constants and options of a real step.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvorum.kernels.plan import EvictionRule, SequenceStep, ShrinkRequest
from kvorum.kernels.spec import DecoderSpec, LayerSpec, RopeSpec, Shard, weight_names
from kvorum.kernels.triton import backend as backend_module
from kvorum.kernels.triton.backend import TritonBackend
from kvorum.kernels.triton.tiles import Architecture

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), Architecture.AMPERE),
    "sm_90": (GPUTarget("cuda", 90, 32), Architecture.HOPPER),
    "sm_100": (GPUTarget("cuda", 100, 32), Architecture.HOPPER),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Architecture.CDNA),
}
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
# num_heads, num_kv_heads, head_dim of one rank: Llama 3 8B, 70B on 8 ranks, and multi-head attention.
SHAPES = {"8B": (32, 8, 128), "70B/TP8": (8, 1, 128), "MHA": (8, 8, 64)}
PROGRAMS = 396
RULE = EvictionRule(recent_tokens=8, per_lifetime=True, decay=0.99)

Launch = tuple[JITFunction[Any], dict[str, Any], dict[str, Any]]


@contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Note launches down: kernel, arguments by name, options."""
    launches: list[Launch] = []

    def run(self: JITFunction[Any], *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        arguments = dict(zip(self.arg_names, args, strict=False))
        arguments |= {name: value for name, value in kwargs.items() if name in self.arg_names}
        options = {name: value for name, value in kwargs.items() if name not in self.arg_names}
        launches.append((self, arguments, options))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def one_layer(shape: tuple[int, int, int], *, window: int | None = None) -> DecoderSpec:
    num_heads, num_kv_heads, head_dim = shape
    return DecoderSpec(
        vocab_size=32,
        hidden_size=4096,
        intermediate_size=2048,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(LayerSpec(RopeSpec((1.0,) * (head_dim // 2)), window),),
        max_position=64,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
    )


def launches_of(spec: DecoderSpec, kv_dtype: torch.dtype, architecture: Architecture) -> list[Launch]:
    """Run a prefill, decodes with short and long rows, a shrink and a copy."""
    with (
        mock.patch.object(backend_module, "programs_at_once", return_value=PROGRAMS),
        mock.patch.object(Architecture, "of", return_value=architecture),
        noted_launches() as launches,
    ):
        backend = TritonBackend(
            spec, Shard.whole(spec), dtype=torch.bfloat16, device=torch.device("cpu"), kv_dtype=kv_dtype
        )
        backend.load((name, torch.zeros(weight_shape(spec, name), dtype=torch.bfloat16)) for name in weight_names(spec))
        pool = backend.allocate_pool(num_blocks=64, block_size=16, max_num_seqs=2)
        table = tuple(range(64))
        for step in (
            SequenceStep(0, table, 0, 8, 0, RULE),
            SequenceStep(0, table, 8, 1, 8, RULE, choose_victims=True),
            SequenceStep(0, table, 1000, 1, 1000, RULE, choose_victims=True),
        ):
            backend.forward(pool, backend.prepare(pool, torch.zeros(step.num_tokens, dtype=torch.int64), [step]))
        backend.shrink(pool, ShrinkRequest(0, table, table, 1000, 500, 1000, RULE))
        backend.copy_blocks(pool, [0], [1])
    return launches


def weight_shape(spec: DecoderSpec, name: str) -> tuple[int, ...]:
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "embed": (spec.vocab_size, spec.hidden_size),
        "q": (heads, spec.hidden_size),
        "k": (kv_heads, spec.hidden_size),
        "v": (kv_heads, spec.hidden_size),
        "o": (spec.hidden_size, heads),
        "gate": (spec.intermediate_size, spec.hidden_size),
        "up": (spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "q_norm": (spec.head_dim,),
        "k_norm": (spec.head_dim,),
    }
    return shapes.get(name.rsplit(".", 1)[-1], (spec.hidden_size,))


def source_of(launch: Launch) -> ASTSource:
    """Return what triton.compile takes: pointers are aligned, as torch's are, and numbers are not specialised."""
    kernel, arguments, _ = launch
    signature, constants, attributes = {}, {}, {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        value = arguments[name]
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constants[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "i32"
    return ASTSource(kernel, signature, constants, attributes)


def resources(compiled: Any, target: GPUTarget) -> dict[str, int]:  # noqa: ANN401
    """Read registers, bytes of stack (spills) and bytes of shared memory."""
    found = {"shared": compiled.metadata.shared}
    if target.backend == "cuda":
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True, timeout=60
            ).stdout
        for key, field in (("registers", "REG"), ("stack", "STACK")):
            found[key] = int(re.search(rf"\b{field}:(\d+)", usage)[1])  # type: ignore[index]  # must be there
    else:
        notes = compiled.asm["amdgcn"]
        counts = {name: int(re.search(rf"\.{name}: +(\d+)", notes)[1]) for name in ("vgpr_count", "vgpr_spill_count")}  # type: ignore[index]  # must be there
        found |= {"registers": counts["vgpr_count"], "stack": counts["vgpr_spill_count"]}
    return found


def main() -> None:
    """Compile for the target in argv; a line of JSON for each kernel."""
    target, architecture = TARGETS[sys.argv[1]]
    models = {name: (one_layer(shape), torch.bfloat16) for name, shape in SHAPES.items()}
    gemma = replace(one_layer((8, 4, 64), window=512), qk_norm=True, sandwich_norms=True, norm_offset=1.0)
    models["window"] = (replace(gemma, activation="gelu_tanh"), torch.bfloat16)
    if sys.argv[1] != "sm_80":  # has no float8_e4m3fn
        models["8B fp8"] = (one_layer(SHAPES["8B"]), torch.float8_e4m3fn)
    built = set()
    for model, (spec, kv_dtype) in models.items():
        for launch in launches_of(spec, kv_dtype, architecture):
            kernel, _, options = launch
            source = source_of(launch)
            key = (source.hash(), tuple(options.items()))
            if key in built:
                continue
            built.add(key)
            compiled = triton.compile(source, target=target, options=options)
            threads = options.get("num_warps", 4) * target.warp_size
            line = {"model": model, "kernel": kernel.__name__, "threads": threads, **resources(compiled, target)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    assert "TRITON_CACHE_DIR" in os.environ, "compiled kernels belong into a folder of the test's own"
    main()
