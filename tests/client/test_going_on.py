"""Streams of the real model that break go on token for token, whatever their answers depend on."""

from __future__ import annotations

import asyncio

import pytest

from kvorum.client import Message, Options, Piece
from kvtest.asking import asynchronous
from kvtest.relay import relay
from kvtest.served import embedded_model_served
from kvtest.servers import grpc_server

pytestmark = pytest.mark.model

QUESTION = [Message("user", "Tell me about the sea, in three sentences.")]


@pytest.mark.parametrize(
    "options",
    [
        Options(max_tokens=48, temperature=0.0),
        Options(max_tokens=48, temperature=0.9, seed=11),
        Options(max_tokens=48, temperature=0.9, seed=3, frequency_penalty=1.0, presence_penalty=0.5),
        Options(max_tokens=48, temperature=0.9, seed=4, stop=("no such string", "sea is the")),
    ],
    ids=["greedy", "sampled", "penalties", "stop strings"],
)
def test_an_answer_is_what_it_would_have_been(options: Options) -> None:
    async def main() -> None:
        async with (
            embedded_model_served(dtype="float32", quantization="none") as served,
            grpc_server(served) as target,
            relay(target) as way,
            asynchronous(way.target) as client,
        ):
            prompt = await client.tokenize(QUESTION)
            whole = await client.complete(prompt, options)
            assert len(whole.token_ids) > 12
            count = 0

            async def cut_twice(_: Piece) -> None:
                nonlocal count
                count += 1
                if count in (4, 9):
                    await way.cut()

            pieces = await client.stream(prompt, options, cut_twice)
            assert tuple(token for piece in pieces for token in piece.token_ids) == whole.token_ids
            assert "".join(piece.text for piece in pieces) == whole.text
            ending = pieces[-1].completion
            assert ending
            assert ending.reconnects == 2
            assert (ending.finish_reason, ending.prompt_tokens, ending.completion_tokens) == (
                whole.completion.finish_reason,
                whole.completion.prompt_tokens,
                whole.completion.completion_tokens,
            )

    asyncio.run(main())
