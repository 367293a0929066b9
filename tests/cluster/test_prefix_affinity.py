"""Where beginnings of prompts went is remembered, in runs, and no more of them than may be."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from kvorum.cluster.prefix_affinity import MAX_ENGINES_OF_RUN, RUN_TOKENS, PrefixAffinity, prefix_runs


@given(common=st.integers(0, 300), rests=st.tuples(st.integers(0, 200), st.integers(0, 200)))
def test_it_finds_the_whole_runs_that_two_prompts_share(common: int, rests: tuple[int, int]) -> None:
    first = prefix_runs([*range(common), *range(1_000, 1_000 + rests[0])], "")
    second = prefix_runs([*range(common), *range(2_000, 2_000 + rests[1])], "")
    affinity = PrefixAffinity()
    affinity.note("a", first)
    shared = common // RUN_TOKENS
    assert affinity.cached_runs(second) == ({"a": shared} if shared else {})
    assert affinity.cached_runs(first) == ({"a": len(first)} if first else {})


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 1), max_size=4)), max_size=12),
    st.lists(st.integers(0, 1), max_size=4),
)
def test_each_engine_has_what_it_was_sent(sent: list[tuple[str, list[int]]], asked: list[int]) -> None:
    def runs_of(prompt: list[int]) -> tuple[int, ...]:
        return prefix_runs([token for token in prompt for _ in range(RUN_TOKENS)], "")

    affinity = PrefixAffinity()
    expected: dict[str, int] = {}
    for engine_id, prompt in sent:
        affinity.note(engine_id, runs_of(prompt))
        shared = next(
            (i for i, (a, b) in enumerate(zip(prompt, asked, strict=False)) if a != b), min(len(prompt), len(asked))
        )
        if shared:
            expected[engine_id] = max(expected.get(engine_id, 0), shared)
    assert affinity.cached_runs(runs_of(asked)) == expected


def test_salts_are_kept_apart() -> None:
    affinity, prompt = PrefixAffinity(), range(200)
    affinity.note("a", prefix_runs(prompt, "tenant"))
    assert affinity.cached_runs(prefix_runs(prompt, "tenant")) == {"a": 3}
    assert affinity.cached_runs(prefix_runs(prompt, "other")) == {}


def test_the_same_run_elsewhere_in_a_prompt_is_another() -> None:
    affinity = PrefixAffinity()
    affinity.note("a", prefix_runs([*range(RUN_TOKENS)] * 2, ""))
    assert affinity.cached_runs(prefix_runs([*range(64, 64 + RUN_TOKENS), *range(RUN_TOKENS)], "")) == {}


def test_the_least_recently_used_is_forgotten_first() -> None:
    affinity = PrefixAffinity(max_runs=2)
    prompts = [prefix_runs([n] * RUN_TOKENS, "") for n in range(3)]
    for index in (0, 1, 0, 2):
        affinity.note("a", prompts[index])
    assert [affinity.cached_runs(prompt) for prompt in prompts] == [{"a": 1}, {}, {"a": 1}]


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    affinity, runs = PrefixAffinity(max_runs=2), prefix_runs(range(4 * RUN_TOKENS), "")
    affinity.note("a", runs)
    assert affinity.cached_runs(runs) == {"a": 2}


def test_no_more_runs_are_remembered_than_may_be_and_the_latest_are_among_them() -> None:
    affinity = PrefixAffinity(max_runs=10_000)
    runs = prefix_runs(range(12_000 * RUN_TOKENS), "")
    for run in runs:
        affinity.note("a", (run,))
    remembered = [run for run in runs if affinity.cached_runs((run,))]
    assert 9_000 < len(remembered) <= 10_000
    assert remembered[-5_000:] == list(runs[-5_000:])


def test_a_prompt_is_found_though_its_runs_are_in_many_parts() -> None:
    affinity, runs = PrefixAffinity(), prefix_runs(range(500 * RUN_TOKENS), "")
    affinity.note("a", runs)
    assert affinity.cached_runs(runs) == {"a": 500}


def test_of_a_beginning_that_all_share_the_last_engines_are_remembered() -> None:
    affinity = PrefixAffinity()
    for number in range(MAX_ENGINES_OF_RUN + 1):
        affinity.note(f"e{number}", (1,))
    assert [*affinity.cached_runs((1,))] == [f"e{number}" for number in range(1, MAX_ENGINES_OF_RUN + 1)]


def test_another_process_finds_the_same_digests() -> None:
    code = "from kvorum.cluster.prefix_affinity import prefix_runs; print(prefix_runs(range(130), 'salt'))"
    command = [sys.executable, "-P", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}).stdout
    assert found.strip() == str(prefix_runs(range(130), "salt"))
