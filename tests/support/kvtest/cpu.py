"""The CPU back end beside the reference: the same weights, the same steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvorum.kernels.backend import Weight
from kvorum.kernels.cpu.backend import CpuBackend, CpuTypes
from kvorum.kernels.cpu.pool import CpuPool
from kvorum.kernels.cpu.weights import Format
from kvorum.kernels.plan import SequenceStep
from kvorum.kernels.reference.backend import ReferenceBackend
from kvorum.kernels.reference.pool import ReferencePool
from kvorum.kernels.spec import DecoderSpec, Shard
from kvtest.models import reference_backend


def cpu_backend(
    spec: DecoderSpec,
    weights: Mapping[str, Weight],
    *,
    format: Format = Format.F32,
    kv_dtype: torch.dtype = torch.float32,
    byte_prompts: bool = False,
    num_threads: int = 2,
) -> CpuBackend:
    """Return a loaded CPU back end."""
    types = CpuTypes(weights=format, kv=kv_dtype, byte_prompts=byte_prompts)
    backend = CpuBackend(spec, Shard.whole(spec), types=types, num_threads=num_threads)
    backend.load(weights.items())
    return backend


@dataclass
class Pair:
    """The CPU back end and the reference in float64, each with a poisoned pool, fed the same steps."""

    spec: DecoderSpec
    weights: dict[str, torch.Tensor]
    format: Format = Format.F32
    kv_dtype: torch.dtype = torch.float32
    num_blocks: int = 40
    block_size: int = 16
    cpu: CpuBackend = field(init=False)
    reference: ReferenceBackend = field(init=False)
    cpu_pool: CpuPool = field(init=False)
    reference_pool: ReferencePool = field(init=False)

    def __post_init__(self) -> None:
        self.cpu = cpu_backend(self.spec, self.weights, format=self.format, kv_dtype=self.kv_dtype)
        self.reference = reference_backend(self.spec, self.weights)
        sizes = {"num_blocks": self.num_blocks, "block_size": self.block_size, "max_num_seqs": 8}
        self.cpu_pool = self.cpu.allocate_pool(**sizes)
        self.reference_pool = self.reference.allocate_pool(**sizes)
        if self.kv_dtype == torch.int8:
            self.cpu_pool.kv.fill_(77)
        else:
            self.cpu_pool.kv.fill_(torch.nan)
        for filled in (self.cpu_pool.scores, self.cpu_pool.scales, self.reference_pool.kv, self.reference_pool.scores):
            filled.fill_(torch.nan)
        self.cpu_pool.positions.fill_(10**9)
        self.reference_pool.positions.fill_(10**9)

    def forward(self, token_ids: Sequence[int], steps: Sequence[SequenceStep]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states of both, the CPU's first, float64."""
        tokens = torch.tensor(token_ids)
        ours = self.cpu.forward(self.cpu_pool, self.cpu.prepare(self.cpu_pool, tokens, steps))
        theirs = self.reference.forward(self.reference_pool, self.reference.prepare(self.reference_pool, tokens, steps))
        return ours.double(), theirs


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number expected."""
    return float((found.double() - expected).abs().max() / expected.abs().max())
