"""Tries grammars out before engines get them, in a process that can be stopped.

How long a matcher takes to make, and how much memory, does not follow from a grammar's length: a schema of forty
characters can take minutes. An engine makes it between two steps, when everybody waits, so what took too long here is
refused. A grammar that was found good is remembered.

Run as a module, this is that process: it reads grammars, a JSON text a line, and answers each with one.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections import OrderedDict
from weakref import WeakValueDictionary

from llguidance import LLMatcher, LLTokenizer

from kvorum.kvstore.errors import CapacityError, InvalidRequestError

MAX_CPU_S = 0.5
# Beside other processes, half a second of CPU takes longer; the first trial also waits for the process.
_DEADLINE_S = 5.0
_START_S = 60.0
_MAX_BYTES = 4 * 2**30
_MAX_REMEMBERED = 4096
_MAX_PROBLEM_CHARS = 1000
_TOO_HARD = "cannot be followed: it takes too long to work out"


class GrammarTrial:
    """Tries grammars for one model, one at a time, and one of each tenant in turn."""

    def __init__(self, tokenizer_json: str, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocabulary = json.dumps([tokenizer_json, vocab_size, list(eos_token_ids)])
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        # Held by one grammar of a tenant at a time: however many it brings, others wait for one of them.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._good: OrderedDict[str, None] = OrderedDict()

    async def check(self, grammar: str, *, param: str, tenant: str) -> None:
        """Raise InvalidRequestError, which names param, for a tenant's grammar that no engine should get."""
        if not grammar or grammar in self._good:
            return
        async with self._turns.setdefault(tenant, asyncio.Lock()), self._turn:
            if grammar in self._good:  # while this one waited
                return
            try:
                problem = await self._try(grammar)
            except BaseException:
                await self.close()  # it may be in the middle of something
                raise
        if problem:
            raise InvalidRequestError(f"{param}: {problem}", param=param)
        self._good[grammar] = None
        if len(self._good) > _MAX_REMEMBERED:
            self._good.popitem(last=False)

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process:
            if process.returncode is None:
                process.kill()
            await process.communicate()  # closes its pipes, too

    async def _try(self, grammar: str) -> str:
        process = self._process or await self._start()
        try:
            async with asyncio.timeout(_DEADLINE_S):
                answer = await self._ask(process, grammar)
        except TimeoutError:
            answer = None
        if answer is None:
            await self.close()
            return _TOO_HARD
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        arguments = (sys.executable, "-P", "-m", "kvorum.cluster.grammar_trial")
        # Its last words, should a grammar kill it, would have the grammar in them.
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        self._process = process
        assert process.stdin
        process.stdin.write(self._vocabulary.encode() + b"\n")
        try:
            async with asyncio.timeout(_START_S):
                if await self._ask(process, "") is None:
                    raise CapacityError("structured answers cannot be checked here now", retry_after_s=1.0)
        except TimeoutError:
            raise CapacityError("structured answers cannot be checked here now", retry_after_s=1.0) from None
        return process

    @staticmethod
    async def _ask(process: asyncio.subprocess.Process, grammar: str) -> str | None:
        """Return what is wrong with a grammar, empty for nothing; None when the process has died of it."""
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(json.dumps(grammar).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except (BrokenPipeError, ConnectionResetError):
            return None
        return str(json.loads(line)) if line else None


def main() -> None:
    """Try what is read until there is no more."""
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    tokenizer, vocab_size, eos_token_ids = json.loads(sys.stdin.readline())
    vocabulary = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token_ids)
    for line in sys.stdin:
        print(json.dumps(_problem_of(json.loads(line), vocabulary)), flush=True)


def _problem_of(grammar: str, vocabulary: LLTokenizer) -> str:
    if not grammar:
        return ""
    begin_s = time.process_time()
    if problem := LLMatcher.validate_grammar(grammar):
        return f"cannot be followed: {problem.strip()[:_MAX_PROBLEM_CHARS]}"
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    matcher.compute_bitmask()
    if matcher.is_error():
        return "cannot be followed: it is too complex"
    return _TOO_HARD if time.process_time() - begin_s > MAX_CPU_S else ""


if __name__ == "__main__":
    main()
