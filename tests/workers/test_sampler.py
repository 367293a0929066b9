"""Sampling: each parameter against its definition written out over Python lists, and the draws against chance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvorum.workers.plan import Sample, SampleRequest
from kvorum.workers.request import SamplingParams
from kvorum.workers.sampler import GREEDY_BELOW, adjust, draw, sample, sample_batch, truncate

GREEDY = SamplingParams(max_tokens=100, temperature=0.0)
PLAIN = SamplingParams(max_tokens=100)
LOGITS = [0.5, 3.0, -1.0, 2.0, 2.5, -4.0, 0.0, 1.0]

# Multiples of 1/8 within a small range: many ties, and sums that floats hold exactly.
logits_lists = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12)


def request(
    params: SamplingParams, *, index: int = 0, prompt: Sequence[int] = (), answer: Sequence[int] = ()
) -> SampleRequest:
    return SampleRequest(params, index, tuple(prompt), tuple(answer))


def pick(logits: Sequence[float], params: SamplingParams, *, index: int = 0) -> int:
    return sample(torch.tensor(logits), request(params, index=index)).token_id


def softmax(logits: Sequence[float]) -> list[float]:
    highest = max(logits)
    exponentials = [math.exp(logit - highest) for logit in logits]
    return [value / math.fsum(exponentials) for value in exponentials]


def survivors(logits: torch.Tensor) -> set[int]:
    return {token for token, logit in enumerate(logits.tolist()) if logit > -math.inf}


class TestTemperature:
    @pytest.mark.parametrize("temperature", [0.0, GREEDY_BELOW / 2])
    @pytest.mark.parametrize("seed", range(10))
    def test_none_takes_the_most_likely_by_however_little(self, temperature: float, seed: int) -> None:
        assert pick([1.0, 1.0000001, 1.0], replace(PLAIN, temperature=temperature, seed=seed)) == 1

    @pytest.mark.parametrize("seed", range(20))
    def test_a_tiny_one_all_but_does(self, seed: int) -> None:
        assert pick(LOGITS, replace(PLAIN, temperature=2 * GREEDY_BELOW, seed=seed)) == 1

    def test_a_high_one_takes_anything(self) -> None:
        found = {pick(LOGITS, replace(PLAIN, temperature=100.0), index=index) for index in range(200)}
        assert found == set(range(len(LOGITS)))

    def test_of_equals_greedy_takes_the_first(self) -> None:
        assert pick([1.0, 2.0, 2.0, 2.0], GREEDY) == 1


class TestTruncation:
    @given(logits_lists, st.integers(0, 14))
    def test_top_k_keeps_the_k_most_likely_and_what_equals_the_last(self, logits: list[float], top_k: int) -> None:
        found = survivors(truncate(torch.tensor(logits), replace(PLAIN, top_k=top_k)))
        allowed = sorted(logits, reverse=True)[: top_k or None]
        assert found == {token for token, logit in enumerate(logits) if logit >= allowed[-1]}

    @given(logits_lists, st.integers(1, 99).map(lambda n: n / 100 + 1e-4))
    def test_top_p_keeps_the_fewest_that_reach_p(self, logits: list[float], top_p: float) -> None:
        found = survivors(truncate(torch.tensor(logits, dtype=torch.float64), replace(PLAIN, top_p=top_p)))
        probabilities = softmax(logits)
        kept, reached = set(), 0.0
        for token in sorted(range(len(logits)), key=lambda token: (-logits[token], token)):
            if reached >= top_p:
                break
            kept.add(token)
            reached += probabilities[token]
        assert found == kept

    @given(logits_lists, st.integers(1, 100).map(lambda n: n / 100))
    def test_min_p_keeps_what_is_likely_beside_the_best(self, logits: list[float], min_p: float) -> None:
        found = survivors(truncate(torch.tensor(logits, dtype=torch.float64), replace(PLAIN, min_p=min_p)))
        probabilities = softmax(logits)
        threshold = min_p * max(probabilities)
        sure = {token for token, p in enumerate(probabilities) if p > threshold * (1 + 1e-9)}
        possible = {token for token, p in enumerate(probabilities) if p > threshold * (1 - 1e-9)}
        assert sure <= found <= possible

    def test_a_top_p_that_is_reached_exactly_keeps_no_more(self) -> None:
        assert survivors(truncate(torch.zeros(4), replace(PLAIN, top_p=0.5))) == {0, 1}

    @pytest.mark.parametrize("top_p", [0.0, 1e-9])
    def test_the_smallest_top_p_keeps_the_best(self, top_p: float) -> None:
        assert survivors(truncate(torch.tensor(LOGITS), replace(PLAIN, top_p=top_p))) == {1}

    def test_a_min_p_of_one_keeps_the_best(self) -> None:
        assert survivors(truncate(torch.tensor(LOGITS), replace(PLAIN, min_p=1.0))) == {1}

    def test_each_is_applied_to_what_the_one_before_left(self) -> None:
        """top_k leaves 1, 4 and 3; of these 1 and 4 are 0.82, so top_p 0.8 leaves them; 4 is 0.61 of 1."""
        logits = torch.tensor(LOGITS)
        assert survivors(truncate(logits, replace(PLAIN, top_k=3))) == {1, 4, 3}
        assert survivors(truncate(logits, replace(PLAIN, top_k=3, top_p=0.8))) == {1, 4}
        assert survivors(truncate(logits, replace(PLAIN, top_p=0.8))) == {1, 4, 3}
        assert survivors(truncate(logits, replace(PLAIN, top_k=3, top_p=0.8, min_p=0.7))) == {1}

    def test_they_see_the_temperature(self) -> None:
        hot = replace(PLAIN, temperature=3.0, min_p=0.5)
        found = {pick(LOGITS, hot, index=index) for index in range(300)}
        assert found == {1, 4, 3, 7}  # 3.0, 2.5, 2.0 and 1.0: exp(-2 / 3) = 0.51

    def test_what_is_kept_is_unchanged(self) -> None:
        truncated = truncate(torch.tensor(LOGITS), replace(PLAIN, top_k=3)).tolist()
        assert [truncated[token] for token in (1, 4, 3)] == [3.0, 2.5, 2.0]


class TestPenalties:
    PROMPT, ANSWER = (0, 1, 5), (1, 1, 3)

    def adjusted(self, params: SamplingParams) -> list[float]:
        found = adjust(torch.tensor(LOGITS), request(params, index=3, prompt=self.PROMPT, answer=self.ANSWER))
        return found.tolist()

    def test_repetition_shrinks_what_prompt_and_answer_hold(self) -> None:
        found = self.adjusted(replace(PLAIN, repetition_penalty=2.0))
        assert found == [0.25, 1.5, -1.0, 1.0, 2.5, -8.0, 0.0, 1.0]

    def test_a_repetition_penalty_below_one_favours_it(self) -> None:
        found = self.adjusted(replace(PLAIN, repetition_penalty=0.5))
        assert found == [1.0, 6.0, -1.0, 4.0, 2.5, -2.0, 0.0, 1.0]

    def test_frequency_counts_the_answer(self) -> None:
        found = self.adjusted(replace(PLAIN, frequency_penalty=0.5))
        assert found == [0.5, 2.0, -1.0, 1.5, 2.5, -4.0, 0.0, 1.0]

    def test_presence_counts_a_token_of_the_answer_once(self) -> None:
        found = self.adjusted(replace(PLAIN, presence_penalty=0.5))
        assert found == [0.5, 2.5, -1.0, 1.5, 2.5, -4.0, 0.0, 1.0]

    def test_they_add_up_after_the_repetition_penalty(self) -> None:
        found = self.adjusted(replace(PLAIN, repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=-1.0))
        assert found == [0.25, 1.5 - 0.5 + 1.0, -1.0, 1.0 - 0.25 + 1.0, 2.5, -8.0, 0.0, 1.0]

    def test_nothing_is_penalised_before_the_answer_begins(self) -> None:
        params = replace(PLAIN, frequency_penalty=0.5, presence_penalty=0.5)
        assert adjust(torch.tensor(LOGITS), request(params, prompt=self.PROMPT)).tolist() == LOGITS

    @pytest.mark.parametrize(
        "params",
        [
            replace(PLAIN, repetition_penalty=2.0),
            replace(PLAIN, presence_penalty=1.0),
            replace(PLAIN, logit_bias={1: 1.0}),
            replace(PLAIN, min_tokens=9, stop_token_ids=(2,)),
            replace(PLAIN, top_k=2, top_p=0.5, min_p=0.5),
        ],
    )
    def test_the_models_logits_are_left_as_they_were(self, params: SamplingParams) -> None:
        logits = torch.tensor(LOGITS)
        sample(logits, request(params, index=3, prompt=self.PROMPT, answer=self.ANSWER))
        assert logits.tolist() == LOGITS


class TestBias:
    def test_it_is_added(self) -> None:
        found = adjust(torch.tensor(LOGITS), request(replace(PLAIN, logit_bias={2: 5.0, 1: -0.5})))
        assert found.tolist() == [0.5, 2.5, 4.0, 2.0, 2.5, -4.0, 0.0, 1.0]

    def test_it_is_added_after_penalties(self) -> None:
        params = replace(PLAIN, logit_bias={1: 4.0}, repetition_penalty=2.0)
        assert adjust(torch.tensor(LOGITS), request(params, prompt=(1,)))[1].item() == 3.0 / 2.0 + 4.0

    @pytest.mark.parametrize(("bias", "expected"), [({1: -100.0}, 4), ({5: 100.0}, 5)])
    def test_a_large_one_forbids_or_forces(self, bias: Mapping[int, float], expected: int) -> None:
        assert pick(LOGITS, replace(GREEDY, logit_bias=bias)) == expected


class TestMinTokens:
    HELD_BACK = replace(GREEDY, min_tokens=3, stop_token_ids=(1,), eos_token_ids=(4,))

    def test_stop_and_end_tokens_are_held_back_until_then(self) -> None:
        assert [pick(LOGITS, self.HELD_BACK, index=index) for index in range(5)] == [3, 3, 3, 1, 1]

    def test_a_bias_does_not_bring_them_back(self) -> None:
        assert pick(LOGITS, replace(self.HELD_BACK, logit_bias={1: 100.0}), index=2) == 3

    @pytest.mark.parametrize("index", range(50))
    def test_they_are_never_drawn_before(self, index: int) -> None:
        params = replace(self.HELD_BACK, temperature=50.0, min_tokens=50, seed=index)
        assert pick(LOGITS, params, index=index) not in (1, 4)


class TestRandomness:
    PARAMS = replace(PLAIN, temperature=2.0, seed=11)

    def stream(self, params: SamplingParams) -> list[int]:
        return [pick(LOGITS, params, index=index) for index in range(40)]

    def test_the_same_seed_draws_the_same(self) -> None:
        assert self.stream(self.PARAMS) == self.stream(self.PARAMS)

    def test_another_seed_draws_otherwise(self) -> None:
        assert self.stream(self.PARAMS) != self.stream(replace(self.PARAMS, seed=12))

    def test_the_next_seed_does_not_draw_the_same_one_token_later(self) -> None:
        assert self.stream(self.PARAMS)[1:] != self.stream(replace(self.PARAMS, seed=12))[:-1]

    @pytest.mark.parametrize("seed", [-1, 2**63 - 1, 2**64])
    def test_any_integer_is_a_seed(self, seed: int) -> None:
        assert len(set(self.stream(replace(self.PARAMS, seed=seed)))) > 1

    def test_a_draw_depends_on_its_index_and_not_on_draws_before(self) -> None:
        backwards = [pick(LOGITS, self.PARAMS, index=index) for index in reversed(range(40))]
        assert backwards[::-1] == self.stream(self.PARAMS)

    def test_the_generator_of_torch_is_neither_used_nor_moved(self) -> None:
        torch.manual_seed(1)
        state = torch.get_rng_state()
        found = self.stream(self.PARAMS)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        assert self.stream(self.PARAMS) == found


# 99.9 % quantiles of the chi-square distribution, by degrees of freedom.
CHI_SQUARE = {1: 10.83, 2: 13.82, 7: 24.32, 8: 26.12}


def chi_square(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Return the statistic of the tokens that can be drawn; the others must not have been."""
    total = sum(counts)
    assert all(not count for count, p in zip(counts, probabilities, strict=True) if p == 0.0)
    return sum(
        (count - total * p) ** 2 / (total * p) for count, p in zip(counts, probabilities, strict=True) if p > 0.0
    )


class TestDistribution:
    NUM_DRAWS = 6000

    def counts(self, params: SamplingParams, *, by_seed: bool) -> list[int]:
        counts = [0] * len(LOGITS)
        for i in range(self.NUM_DRAWS):
            seeded = replace(params, seed=i) if by_seed else params
            counts[pick(LOGITS, seeded, index=0 if by_seed else i)] += 1
        return counts

    @pytest.mark.parametrize("by_seed", [True, False])
    def test_draws_follow_the_softmax(self, by_seed: bool) -> None:
        counts = self.counts(replace(PLAIN, temperature=1.5, seed=5), by_seed=by_seed)
        assert chi_square(counts, softmax([logit / 1.5 for logit in LOGITS])) < CHI_SQUARE[7]

    def test_draws_of_what_truncation_left_follow_it_too(self) -> None:
        counts = self.counts(replace(PLAIN, top_k=3), by_seed=False)
        kept = [math.exp(logit) if logit >= 2.0 else 0.0 for logit in LOGITS]
        assert chi_square(counts, [value / sum(kept) for value in kept]) < CHI_SQUARE[2]

    def test_two_draws_in_a_row_are_independent(self) -> None:
        probabilities = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
        stream = [draw(probabilities, seed=3, index=index) for index in range(self.NUM_DRAWS)]
        counts = [0] * 9
        for first, second in zip(stream[::2], stream[1::2], strict=True):
            counts[3 * first + second] += 1
        expected = [a * b for a in probabilities.tolist() for b in probabilities.tolist()]
        assert chi_square(counts, expected) < CHI_SQUARE[8]

    def test_neighbouring_seeds_are_independent(self) -> None:
        probabilities = torch.tensor([0.4, 0.6], dtype=torch.float64)
        same = sum(
            draw(probabilities, seed=i, index=0) == draw(probabilities, seed=i + 1, index=0) for i in range(3000)
        )
        assert chi_square([same, 3000 - same], [0.52, 0.48]) < CHI_SQUARE[1]


class TestLogprobs:
    def taken(self, count: int | None, params: SamplingParams = PLAIN) -> Sample:
        return sample(torch.tensor(LOGITS), request(replace(params, logprobs=count)))

    def test_none_asked_for_none_given(self) -> None:
        assert self.taken(None).logprobs is None

    def test_zero_gives_the_chosen_one_alone(self) -> None:
        found = self.taken(0, GREEDY)
        assert found.logprobs is not None
        assert found.logprobs.top == ()
        assert found.logprobs.logprob == pytest.approx(math.log(softmax(LOGITS)[1]))

    def test_the_most_likely_come_best_first(self) -> None:
        found = self.taken(3)
        assert found.logprobs is not None
        assert [token for token, _ in found.logprobs.top] == [1, 4, 3]
        expected = [math.log(softmax(LOGITS)[token]) for token in (1, 4, 3)]
        assert [logprob for _, logprob in found.logprobs.top] == pytest.approx(expected)

    @pytest.mark.parametrize("count", [8, 20])
    def test_all_of_them_are_all_there_is_and_add_up_to_one(self, count: int) -> None:
        found = self.taken(count)
        assert found.logprobs is not None
        assert {token for token, _ in found.logprobs.top} == set(range(len(LOGITS)))
        assert math.fsum(math.exp(logprob) for _, logprob in found.logprobs.top) == pytest.approx(1.0)
        assert found.logprobs.logprob == dict(found.logprobs.top)[found.token_id]

    def test_they_are_the_models_before_temperature_and_truncation(self) -> None:
        found = self.taken(8, replace(PLAIN, temperature=0.5, top_k=2, top_p=0.7, min_p=0.5))
        assert found.logprobs is not None
        plain = self.taken(8).logprobs
        assert plain is not None
        assert found.logprobs.top == plain.top

    def test_they_are_after_bias(self) -> None:
        found = self.taken(1, replace(GREEDY, logit_bias={5: 100.0}))
        assert found.logprobs is not None
        ((token, logprob),) = found.logprobs.top
        assert token == 5
        assert logprob == pytest.approx(0.0)


def test_a_batch_is_drawn_as_each_row_alone() -> None:
    logits = torch.randn(6, 50, generator=torch.manual_seed(0))
    requests = [
        request(GREEDY),
        request(replace(PLAIN, temperature=0.8, seed=5), index=3),
        request(replace(GREEDY, logprobs=2)),
        request(replace(GREEDY, logit_bias={7: 100.0})),
        request(replace(GREEDY, min_tokens=4, stop_token_ids=(int(logits[4].argmax()),))),
        request(replace(GREEDY, frequency_penalty=2.0), answer=[int(logits[5].argmax())]),
    ]
    alone = [sample(row, item) for row, item in zip(logits, requests, strict=True)]
    assert sample_batch(logits, requests) == alone
    assert [drawn.token_id for drawn in alone[3:]] != logits[3:].argmax(dim=-1).tolist()
