"""Run one compiled library over a conversation and compare with the reference; prints its SIMD path.

Its own process: the sanitizers must be loaded before everything else. Usage: native_check.py LIBRARY
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import patch

import torch

from kvorum.kernels.cpu.library import bind
from kvorum.kernels.cpu.weights import Format
from kvorum.kernels.plan import EvictionRule

sys.path.append(str(Path(__file__).parents[2] / "support"))

TOLERANCES = {
    (Format.F32, torch.float32): 2e-5,
    (Format.BF16, torch.bfloat16): 4e-2,
    (Format.Q8, torch.int8): 8e-2,
}


def main() -> None:
    from kvtest.conversation import Conversation, make_pair
    from kvtest.models import tiny_spec

    library = bind(Path(sys.argv[1]))
    patch("kvorum.kernels.cpu.backend.load_library", return_value=library).start()
    rules = (EvictionRule(recent_tokens=5), EvictionRule(recent_tokens=3, sink_tokens=4, per_lifetime=True, decay=0.95))
    for (format, kv_dtype), tolerance in TOLERANCES.items():
        for rule in rules:
            spec = tiny_spec(num_heads=6, num_kv_heads=2, head_dim=48, window=30)
            talk = Conversation(make_pair(spec, format=format, kv_dtype=kv_dtype), seed=1, lengths=[70, 33], rule=rule)
            errors = [talk.step([70, 20]), talk.step([1, 13], choose=False)]
            talk.shrink(0, 40, pool_width=3)
            errors.append(talk.step([1, 1], choose=True))
            errors += [talk.step([1, 1], replace_victims=True, choose=True) for _ in range(3)]
            # Rounding may choose other victims, and then the two are no longer about the same tokens.
            checked = errors if format == Format.F32 else errors[:1]
            assert max(checked) < tolerance, (format, kv_dtype, errors)
    print(library.kvorum_simd().decode())


if __name__ == "__main__":
    main()
