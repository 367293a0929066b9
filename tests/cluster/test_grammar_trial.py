"""A process that cannot be had, or that is lost, is an error of its own and not the end of structured answers.

And nobody waits for all the grammars of somebody else.
"""

from __future__ import annotations

import asyncio
import sys

import pytest
from llguidance import LLMatcher

from kvorum.cluster.grammar_trial import GrammarTrial
from kvorum.kvstore.errors import CapacityError, InvalidRequestError
from kvtest.tiny_model import byte_tokenizer

DIGITS = LLMatcher.grammar_from_regex("[0-9]+")


def trial() -> GrammarTrial:
    return GrammarTrial(byte_tokenizer().to_json(), vocab_size=257, eos_token_ids=(256,))


def test_a_process_that_does_not_start_is_said_so_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        it = trial()
        with monkeypatch.context() as broken:
            broken.setattr(sys, "executable", "/bin/false")
            with pytest.raises(CapacityError, match="cannot be checked"):
                await it.check(DIGITS, param="regex", tenant="a")
        await it.check(DIGITS, param="regex", tenant="a")
        await it.close()

    asyncio.run(main())


def test_a_good_grammar_needs_no_process_any_more_and_a_bad_one_is_tried_each_time() -> None:
    async def main() -> None:
        it = trial()
        await asyncio.gather(*(it.check(DIGITS, param="regex", tenant="a") for _ in range(3)))
        await it.close()
        await it.check(DIGITS, param="regex", tenant="a")
        assert it._process is None
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="structured: cannot be followed"):
                await it.check(LLMatcher.grammar_from_regex("(a"), param="structured", tenant="a")
        await it.close()

    asyncio.run(main())


def test_who_leaves_in_the_middle_takes_the_process_along_and_not_the_next_ones_answer() -> None:
    async def main() -> None:
        it = trial()
        leaving = asyncio.create_task(it.check(DIGITS, param="regex", tenant="a"))
        await asyncio.sleep(0.05)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        with pytest.raises(InvalidRequestError):
            await it.check(LLMatcher.grammar_from_regex("(a"), param="regex", tenant="a")
        await it.close()

    asyncio.run(main())


def test_a_tenants_grammar_waits_for_one_of_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    async def try_out(_: GrammarTrial, grammar: str) -> str:
        tried.append(grammar)
        await asyncio.sleep(0)
        return ""

    async def main() -> None:
        it = trial()
        many = [it.check(f"a{i}", param="regex", tenant="a") for i in range(5)]
        await asyncio.gather(*many, it.check("b", param="regex", tenant="b"))
        assert not it._turns

    monkeypatch.setattr(GrammarTrial, "_try", try_out)
    asyncio.run(main())
    assert tried == ["a0", "b", "a1", "a2", "a3", "a4"]
