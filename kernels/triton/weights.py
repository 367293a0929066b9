"""Weights as the back end multiplies by them: q, k and v in one matrix, gate and up in one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvorum.kernels.spec import DecoderSpec, Shard, weight_names


class Weights:
    """The weights of one rank by name; `qkv`, `qkv_bias`, `gate_up` and `gate_up_bias` stand for their parts."""

    def __init__(self, spec: DecoderSpec, shard: Shard, *, dtype: torch.dtype, device: torch.device) -> None:
        q, kv, mlp = shard.num_heads * spec.head_dim, shard.num_kv_heads * spec.head_dim, shard.mlp[1] - shard.mlp[0]
        # Where each part lies in the rows of its whole.
        self._parts = {
            "q": ("qkv", slice(0, q), q + 2 * kv),
            "k": ("qkv", slice(q, q + kv), q + 2 * kv),
            "v": ("qkv", slice(q + kv, q + 2 * kv), q + 2 * kv),
            "gate": ("gate_up", slice(0, mlp), 2 * mlp),
            "up": ("gate_up", slice(mlp, 2 * mlp), 2 * mlp),
        }
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the weights as they come; every name of `weight_names` must come."""
        seen = set()
        for name, tensor in weights:
            seen.add(name)
            prefix, _, kind = name.rpartition(".")
            base, bias = kind.removesuffix("_bias"), "_bias" if kind.endswith("_bias") else ""
            if base not in self._parts:
                self._tensors[name] = tensor.to(self._device, self._dtype).contiguous()
                continue
            whole, rows, num_rows = self._parts[base]
            whole_name = f"{prefix}.{whole}{bias}"
            if whole_name not in self._tensors:
                shape = (num_rows, *tensor.shape[1:])
                self._tensors[whole_name] = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._tensors[whole_name][rows].copy_(tensor)
        missing = set(weight_names(self._spec)) - seen
        assert not missing, f"weights missing: {sorted(missing)}"

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a weight that every model of the spec has."""
        return self._tensors[name]

    def get(self, name: str) -> torch.Tensor | None:
        """Return a weight, or None where the model has none of the name."""
        return self._tensors.get(name)
