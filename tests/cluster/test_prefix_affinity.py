"""A router remembers where beginnings of prompts went, in runs, and no more of them than it may."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.prefix_affinity import RUN_TOKENS, PrefixAffinity


@given(common=st.integers(0, 300), rests=st.tuples(st.integers(0, 200), st.integers(0, 200)))
def test_it_finds_the_whole_runs_that_two_prompts_share(common: int, rests: tuple[int, int]) -> None:
    first = [*range(common), *range(1_000, 1_000 + rests[0])]
    second = [*range(common), *range(2_000, 2_000 + rests[1])]
    affinity = PrefixAffinity()
    affinity.note("a", first, "")
    assert affinity.cached_tokens("a", second, "") == common // RUN_TOKENS * RUN_TOKENS
    assert affinity.cached_tokens("a", first, "") == len(first) // RUN_TOKENS * RUN_TOKENS


def test_engines_and_salts_are_kept_apart() -> None:
    affinity, prompt = PrefixAffinity(), range(200)
    affinity.note("a", prompt, "tenant")
    assert affinity.cached_tokens("a", prompt, "tenant") == 192
    assert affinity.cached_tokens("b", prompt, "tenant") == 0
    assert affinity.cached_tokens("a", prompt, "other") == 0


def test_the_same_run_elsewhere_in_a_prompt_is_another() -> None:
    affinity = PrefixAffinity()
    affinity.note("a", [*range(RUN_TOKENS)] * 2, "")
    assert affinity.cached_tokens("a", [*range(64, 64 + RUN_TOKENS), *range(RUN_TOKENS)], "") == 0


def test_the_least_recently_used_is_forgotten_first() -> None:
    affinity = PrefixAffinity(max_runs=2)
    prompts = [[n] * RUN_TOKENS for n in range(3)]
    affinity.note("a", prompts[0], "")
    affinity.note("a", prompts[1], "")
    affinity.note("a", prompts[0], "")
    affinity.note("a", prompts[2], "")
    assert [affinity.cached_tokens("a", prompt, "") for prompt in prompts] == [RUN_TOKENS, 0, RUN_TOKENS]


def test_an_engine_that_is_gone_is_forgotten() -> None:
    affinity, prompt = PrefixAffinity(), range(100)
    for engine in "ab":
        affinity.note(engine, prompt, "")
    affinity.keep_only(["b"])
    assert [affinity.cached_tokens(engine, prompt, "") for engine in "ab"] == [0, RUN_TOKENS]
