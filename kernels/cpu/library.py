"""The compiled library through ctypes: its structures and functions, as native/*.h declare them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from kvorum.kernels.cpu.build import library_path


class CLinear(ctypes.Structure):
    """native/linear.h, Linear."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("format", c_int32),
        ("num_outputs", c_int32),
        ("num_inputs", c_int32),
        ("unused", c_int32),
    )


class CLayer(ctypes.Structure):
    """native/decoder.h, Layer."""

    _fields_ = (
        ("qkv", CLinear),
        ("output", CLinear),
        ("gate_up", CLinear),
        ("down", CLinear),
        ("attn_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_attn_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("rotary", c_int32),
        ("window", c_int32),
    )


class CConfig(ctypes.Structure):
    """native/decoder.h, Config."""

    _fields_ = (
        ("hidden_size", c_int32),
        ("intermediate_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_layers", c_int32),
        ("gelu", c_int32),
        ("num_threads", c_int32),
        ("eps", c_float),
        ("attention_scale", c_float),
        ("embedding_scale", c_float),
        ("byte_prompts", c_int32),
    )


class CPool(ctypes.Structure):
    """native/pool.h, Pool."""

    _fields_ = (
        ("kv", c_void_p),
        ("scores", c_void_p),
        ("positions", c_void_p),
        ("scales", c_void_p),
        ("victims", c_void_p),
        ("num_panels", c_int64),
        ("num_layers", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("max_num_seqs", c_int32),
        ("format", c_int32),
        ("unused", c_int32),
    )


# native/step.h, Sequence, as rows of an array.
SEQUENCE = np.dtype(
    [
        ("decay", np.float64),
        *(
            (name, np.int32)
            for name in (
                "row",
                "start",
                "num_tokens",
                "num_slots",
                "first_token",
                "first_panel",
                "replace",
                "choose_victims",
                "keeps_scores",
                "recent_tokens",
                "sink_tokens",
                "by_age",
                "per_lifetime",
                "observe_from",
            )
        ),
    ]
)

_SIGNATURES = {
    "kvorum_struct_sizes": (None, [c_void_p]),
    "kvorum_simd": (c_char_p, []),
    "kvorum_panel_bytes": (c_int64, [c_int, c_int64]),
    "kvorum_pack_floats": (None, [c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64]),
    "kvorum_pack_gguf": (None, [c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64]),
    "kvorum_unpack_rows": (None, [POINTER(CLinear), c_int64, c_void_p]),
    "kvorum_decoder_new": (
        c_void_p,
        [POINTER(CConfig), POINTER(CLayer), POINTER(CLinear), POINTER(CLinear), c_void_p],
    ),
    "kvorum_decoder_delete": (None, [c_void_p]),
    "kvorum_step_new": (
        c_void_p,
        [c_void_p, POINTER(CPool), c_void_p, c_int, c_void_p, c_int64, c_void_p, c_int],
    ),
    "kvorum_step_delete": (None, [c_void_p]),
    "kvorum_embed": (None, [c_void_p, c_void_p, c_int, c_void_p]),
    "kvorum_attention": (None, [c_void_p, c_void_p, POINTER(CPool), c_int, c_void_p, c_void_p]),
    "kvorum_mlp": (None, [c_void_p, c_void_p, c_int, c_void_p, c_void_p]),
    "kvorum_add_residual": (None, [c_void_p, c_int, c_int, c_void_p, c_void_p, c_int]),
    "kvorum_forward": (None, [c_void_p, c_void_p, POINTER(CPool), c_void_p, c_void_p]),
    "kvorum_logits": (None, [c_void_p, c_void_p, c_int, c_void_p]),
    "kvorum_read_slots": (None, [POINTER(CPool), c_void_p, c_void_p, c_int64, c_void_p, c_void_p]),
    "kvorum_write_slots": (None, [POINTER(CPool), c_void_p, c_int64, c_void_p, c_void_p]),
}


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """Compile the library if need be and load it; raises CompilerError."""
    return bind(library_path())


def bind(path: Path) -> ctypes.CDLL:
    """Load a compiled library. torch is loaded already and brings libgomp, so that both share one pool of threads."""
    assert torch.get_num_threads() > 0
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    sizes = np.zeros(5, np.int64)
    library.kvorum_struct_sizes(sizes.ctypes.data)
    expected = [*map(ctypes.sizeof, (CLinear, CLayer, CConfig, CPool)), SEQUENCE.itemsize]
    assert sizes.tolist() == expected, f"structures differ: {sizes.tolist()} in C++, {expected} here"
    return library
