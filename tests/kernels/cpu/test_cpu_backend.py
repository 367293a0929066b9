"""The C++ kernels against the reference in float64: random shapes, ragged batches, shuffled blocks, poisoned pools."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvorum.kernels.backend import run_layers
from kvorum.kernels.cpu.weights import Format
from kvorum.kernels.plan import EvictionRule, SequenceStep
from kvtest.conversation import Conversation, make_pair, small_weights
from kvtest.cpu import cpu_backend, relative_error
from kvtest.models import tiny_spec

H2O = EvictionRule(recent_tokens=5)
RULES = {
    "h2o": H2O,
    "h2o_avg": EvictionRule(recent_tokens=3, sink_tokens=4, per_lifetime=True),
    "decay": EvictionRule(recent_tokens=2, per_lifetime=True, decay=0.95),
    "plain decay": EvictionRule(recent_tokens=2, decay=0.9),
    "observed": EvictionRule(recent_tokens=2, per_lifetime=True, observe_from=20),
    "sinks": EvictionRule(recent_tokens=0, sink_tokens=4, by_age=True),
}
# Of hidden states after two layers, relative to the largest: float32 arithmetic against float64.
F32_TOLERANCE = 2e-5
TOLERANCES = {Format.F32: F32_TOLERANCE, Format.BF16: 3e-2, Format.Q8: 3e-2}
# bfloat16: K and V are rounded, and on processors with bf16 dot products a prompt's queries and softmax weights too.
KV_TOLERANCES = {torch.float32: F32_TOLERANCE, torch.bfloat16: 5e-3, torch.int8: 5e-2}

any_shape = given(
    num_kv_heads=st.integers(1, 3),
    group_size=st.sampled_from([1, 2, 3, 4, 7, 8, 9]),
    head_dim=st.sampled_from([32, 48, 64, 128, 256]),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    block_size=st.sampled_from([16, 32]),
    window=st.sampled_from([None, 7]),
    rule=st.sampled_from([None, *RULES.values()]),
    seed=st.integers(0, 10**6),
)


@settings(max_examples=25)
@any_shape
def test_any_shape_equals_the_reference(
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    lengths: list[int],
    block_size: int,
    window: int | None,
    rule: EvictionRule | None,
    seed: int,
) -> None:
    spec = tiny_spec(num_heads=num_kv_heads * group_size, num_kv_heads=num_kv_heads, head_dim=head_dim, window=window)
    pair = make_pair(spec, block_size=block_size)
    talk = Conversation(pair, seed=seed, lengths=lengths, rule=rule)
    assert talk.step(lengths) < F32_TOLERANCE
    # Some decode, some go on with their prompt, all in one batch.
    counts = [1 + talk.random.choice([0, 0, 5, 17]) for _ in lengths]
    assert talk.step(counts, choose=rule is not None) < F32_TOLERANCE
    talk.assert_same_slots()
    if rule is not None:
        assert talk.step([1] * len(lengths), replace_victims=True, choose=True) < F32_TOLERANCE
        talk.assert_same_slots()


@settings(max_examples=25)
@any_shape
def test_any_shape_comes_close_with_bf16_kv(
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    lengths: list[int],
    block_size: int,
    window: int | None,
    rule: EvictionRule | None,
    seed: int,
) -> None:
    spec = tiny_spec(num_heads=num_kv_heads * group_size, num_kv_heads=num_kv_heads, head_dim=head_dim, window=window)
    pair = make_pair(spec, block_size=block_size, kv_dtype=torch.bfloat16)
    talk = Conversation(pair, seed=seed, lengths=lengths, rule=rule)
    for counts in (lengths, [1 + talk.random.choice([0, 0, 5, 17]) for _ in lengths]):
        assert talk.step(counts) < KV_TOLERANCES[torch.bfloat16]
    talk.assert_same_slots(score_tolerance=1e-2, relative=1e-2)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_long_life_with_evictions_and_cuts_equals_the_reference(rule: EvictionRule) -> None:
    pair = make_pair(tiny_spec(num_heads=6, num_kv_heads=2, head_dim=32))
    talk = Conversation(pair, seed=3, lengths=[75, 130], rule=rule)
    for counts in ([50, 64], [25, 66]):
        assert talk.step(counts) < F32_TOLERANCE
    talk.shrink(0, 33)
    talk.shrink(1, 40, pool_width=5)
    talk.assert_same_slots()
    assert talk.step([1, 1], choose=True) < F32_TOLERANCE
    for _ in range(20):
        assert talk.step([1, 1], replace_victims=True, choose=True) < F32_TOLERANCE
        talk.assert_same_slots()


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_more_slots_than_a_chunk_and_a_strip_equal_the_reference(kv_dtype: torch.dtype) -> None:
    pair = make_pair(tiny_spec(num_heads=4, num_kv_heads=2, head_dim=32), num_blocks=80, kv_dtype=kv_dtype)
    talk = Conversation(pair, seed=1, lengths=[600, 300], rule=H2O)
    assert talk.step([600, 300]) < KV_TOLERANCES[kv_dtype]
    for _ in range(3):
        assert talk.step([1, 1]) < KV_TOLERANCES[kv_dtype]
    talk.assert_same_slots(relative=1e-4 if kv_dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("format", [Format.BF16, Format.Q8])
def test_narrow_weights_come_close(format: Format) -> None:
    pair = make_pair(tiny_spec(num_heads=8, num_kv_heads=2, head_dim=32), format=format)
    talk = Conversation(pair, seed=2, lengths=[40, 17], rule=H2O)
    for counts in ([40, 17], [1, 1]):
        assert talk.step(counts) < TOLERANCES[format]


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
def test_narrow_kv_comes_close(kv_dtype: torch.dtype) -> None:
    pair = make_pair(tiny_spec(num_heads=8, num_kv_heads=2, head_dim=64), kv_dtype=kv_dtype)
    talk = Conversation(pair, seed=2, lengths=[40, 17], rule=H2O)
    for counts in ([40, 17], [1, 1], [1, 16]):
        assert talk.step(counts) < KV_TOLERANCES[kv_dtype]


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "gelu_tanh"},
        {"qk_norm": True, "norm_offset": 1.0},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
        {"sandwich_norms": True, "embedding_scale": 5.5},
        {"tied_embeddings": False, "attention_scale": 0.3},
        {"intermediate_size": 41, "vocab_size": 53},
    ],
    ids=str,
)
def test_every_variant_of_the_decoder_equals_the_reference(change: dict[str, object]) -> None:
    spec = replace(tiny_spec(num_heads=4, num_kv_heads=2, head_dim=32), **change)  # type: ignore[arg-type]
    pair = make_pair(spec)
    talk = Conversation(pair, seed=2, lengths=[20, 3], rule=H2O)
    for counts in ([20, 3], [1, 1]):
        assert talk.step(counts) < F32_TOLERANCE
    hidden = torch.randn(5, spec.hidden_size)
    expected = pair.reference.logits(hidden.double())
    assert relative_error(pair.cpu.logits(hidden), expected) < F32_TOLERANCE


def test_half_layers_make_the_same_bits_as_the_whole() -> None:
    spec = replace(tiny_spec(num_heads=4, num_kv_heads=2, head_dim=32), sandwich_norms=True)
    tokens = torch.arange(20)
    step = SequenceStep(0, (3, 1), 0, 20, 0, H2O)
    results = []
    for run in (lambda b, p, s: b.forward(p, s), run_layers):
        backend = cpu_backend(spec, small_weights(spec))
        pool = backend.allocate_pool(num_blocks=4, block_size=16, max_num_seqs=1)
        results.append(run(backend, pool, backend.prepare(pool, tokens, [step])))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("format", "kv_dtype"),
    [
        (Format.F32, torch.float32),
        (Format.BF16, torch.float32),
        (Format.Q8, torch.float32),
        (Format.F32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_row_depends_neither_on_its_neighbours_nor_on_threads_nor_on_chunks(
    format: Format, kv_dtype: torch.dtype, num_threads: int
) -> None:
    spec = tiny_spec(num_heads=6, num_kv_heads=2, head_dim=32)
    weights = small_weights(spec)
    alone = cpu_backend(spec, weights, format=format, kv_dtype=kv_dtype, byte_prompts=True, num_threads=2)
    crowded = cpu_backend(spec, weights, format=format, kv_dtype=kv_dtype, byte_prompts=True, num_threads=num_threads)
    prompt = torch.randint(0, spec.vocab_size, (100,), generator=torch.manual_seed(0))
    pool = alone.allocate_pool(num_blocks=8, block_size=16, max_num_seqs=1)
    table = tuple(range(8))
    whole = alone.forward(pool, alone.prepare(pool, prompt, [SequenceStep(0, table, 0, 100, 0, H2O)]))
    decoded = alone.forward(pool, alone.prepare(pool, prompt[:1], [SequenceStep(0, table, 100, 1, 100, H2O)]))

    pool = crowded.allocate_pool(num_blocks=40, block_size=16, max_num_seqs=6)
    ours = (11, 3, 29, 7, 38, 20, 1, 15)
    others = [SequenceStep(row, (30 + row,), 0, 5, 0, H2O) for row in range(1, 6)]
    noise = torch.arange(25)
    found = []
    for start, stop in ((0, 35), (35, 100)):
        step = SequenceStep(0, ours, start, stop - start, start, H2O)
        tokens = torch.cat((noise, prompt[start:stop]))
        found.append(crowded.forward(pool, crowded.prepare(pool, tokens, [*others, step]))[25:])
    assert torch.equal(torch.cat(found), whole)
    tokens = torch.cat((prompt[:1], noise))
    last = crowded.forward(pool, crowded.prepare(pool, tokens, [SequenceStep(0, ours, 100, 1, 100, H2O), *others]))
    assert torch.equal(last[:1], decoded)
    logits = [backend.logits(rows)[0] for backend, rows in ((alone, decoded), (crowded, last))]
    assert torch.equal(*logits)
