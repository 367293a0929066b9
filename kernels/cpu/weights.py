"""Weights packed into panels for the C++ kernels: which format each linear takes, and who keeps the memory alive."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, byref
from enum import IntEnum

import numpy as np
import torch

from kvorum.kernels.backend import QuantizedWeight, Weight
from kvorum.kernels.cpu.library import CLinear
from kvorum.kernels.cpu.memory import huge_zeros

LANES = 16
GROUP = 32


class Format(IntEnum):
    """native/group_dots.h, Format."""

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q4_1 = 3
    Q4_0 = 4


_FORMATS = {"Q8_0": Format.Q8, "Q4_1": Format.Q4_1, "Q4_0": Format.Q4_0}


class Packer:
    """Packs weights and keeps every buffer that the kernels point into."""

    def __init__(self, library: CDLL, format: Format) -> None:
        self._library = library
        self._format = format
        self._kept: list[torch.Tensor] = []

    @property
    def panel_bytes(self) -> int:
        """Bytes of all linears packed so far."""
        return sum(buffer.numel() for buffer in self._kept if buffer.dtype == torch.uint8)

    def vector(self, values: torch.Tensor | None) -> int | None:
        """Keep a vector in float32, padded to whole panels; returns its address."""
        if values is None:
            return None
        padded = torch.zeros(-(-values.numel() // LANES) * LANES)
        padded[: values.numel()] = values
        self._kept.append(padded)
        return padded.data_ptr()

    def linear(self, parts: Sequence[Weight], biases: Sequence[torch.Tensor | None] = ()) -> CLinear:
        """Pack weights [out_features, in_features] of the same inputs as one linear, one part after the other.

        All parts but the last must fill whole panels.
        """
        assert all(part.shape[0] % LANES == 0 for part in parts[:-1]), "parts must fill whole panels"
        panels, format = self._allocate(parts)
        first = 0
        for part in parts:
            self._pack(part, format, panels, first=first, step=1)
            first += -(-part.shape[0] // LANES)
        num_outputs = sum(part.shape[0] for part in parts)
        bias = torch.cat([bias for bias in biases if bias is not None]) if any(b is not None for b in biases) else None
        return CLinear(panels.data_ptr(), self.vector(bias), format, num_outputs, parts[0].shape[1])

    def gated(self, gate: Weight, up: Weight, biases: Sequence[torch.Tensor | None]) -> CLinear:
        """Pack gate and up with their panels by turns."""
        panels, format = self._allocate([gate, up])
        self._pack(gate, format, panels, first=0, step=2)
        self._pack(up, format, panels, first=1, step=2)
        bias = None
        if biases[0] is not None:
            padding = -gate.shape[0] % LANES
            padded = [torch.nn.functional.pad(bias, (0, padding)) for bias in biases if bias is not None]
            bias = torch.stack([each.view(-1, LANES) for each in padded], dim=1).flatten()
        num_outputs = 2 * -(-gate.shape[0] // LANES) * LANES
        return CLinear(panels.data_ptr(), self.vector(bias), format, num_outputs, gate.shape[1])

    def _allocate(self, parts: Sequence[Weight]) -> tuple[torch.Tensor, Format]:
        format = self._choose(parts)
        num_panels = sum(-(-part.shape[0] // LANES) for part in parts)
        size = self._library.kvorum_panel_bytes(format, parts[0].shape[1])
        panels = huge_zeros((num_panels * size,), torch.uint8)
        self._kept.append(panels)
        return panels, format

    def _choose(self, parts: Sequence[Weight]) -> Format:
        """Return the blocks' own format where all parts share it, else the packer's; bf16 where groups do not fit."""
        found = {part.quantization if isinstance(part, QuantizedWeight) else None for part in parts}
        if len(found) == 1 and (quantization := found.pop()) is not None:
            return _FORMATS[quantization]
        if self._format == Format.Q8 and parts[0].shape[1] % GROUP != 0:
            return Format.BF16
        return self._format

    def _pack(self, part: Weight, format: Format, panels: torch.Tensor, *, first: int, step: int) -> None:
        rows, inputs = part.shape
        if isinstance(part, QuantizedWeight) and _FORMATS[part.quantization] == format:
            pack, source = self._library.kvorum_pack_gguf, part.blocks.contiguous()
        else:
            pack, source = self._library.kvorum_pack_floats, self._floats(part).contiguous()
        pack(format, source.data_ptr(), rows, inputs, panels.data_ptr(), first, step)

    def _floats(self, part: Weight) -> torch.Tensor:
        if not isinstance(part, QuantizedWeight):
            return part.to(torch.float32)
        rows, inputs = part.shape
        format = _FORMATS[part.quantization]
        size = self._library.kvorum_panel_bytes(format, inputs) * -(-rows // LANES)
        panels = np.zeros(size, np.uint8)
        self._library.kvorum_pack_gguf(
            format, part.blocks.contiguous().data_ptr(), rows, inputs, panels.ctypes.data, 0, 1
        )
        floats = torch.empty(rows, inputs)
        linear = CLinear(panels.ctypes.data, None, format, rows, inputs)
        self._library.kvorum_unpack_rows(byref(linear), rows, floats.data_ptr())
        return floats
