"""The console's routes on an engine whose answers are known: who may look, and what is seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import httpx
import pytest

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.console.routes import STATIC, console_routes
from kvorum.cluster.http import create_app
from kvorum.cluster.tenants import Tenant, hash_key
from kvorum.kvstore.errors import InvalidRequestError
from kvtest.managed import ManagedCluster, managed_cluster
from kvtest.servers import HasFrontend, http_server
from kvtest.stack import running_stack
from kvtest.waiting import eventually

TENANTS = {
    "ops": Tenant(api_key_sha256=(hash_key("ops-key"),), is_operator=True),
    "shop": Tenant(api_key_sha256=(hash_key("shop-key"),)),
}


async def teach(name: str, arguments: Mapping[str, int]) -> dict[str, Any]:
    if arguments.get("budget") == 3:
        raise InvalidRequestError("budget: too small", param="budget")
    return {"name": name, **arguments}


@contextlib.asynccontextmanager
async def console(stack: HasFrontend, *, key: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(stack.frontend)
    app.include_router(console_routes(stack.frontend, teach))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with http_server(app) as url, httpx.AsyncClient(base_url=url, headers=headers, timeout=20) as client:
        yield client


@contextlib.asynccontextmanager
async def watching(client: httpx.AsyncClient, **query: str) -> AsyncIterator[AsyncIterator[Any]]:
    """Open the stream; yields its events."""
    async with client.stream("GET", "/console/stream", params=query) as response:
        assert response.status_code == 200

        async def events() -> AsyncIterator[Any]:
            async for line in response.aiter_lines():
                if line:
                    yield json.loads(line.removeprefix("data: "))

        yield events()


@contextlib.asynccontextmanager
async def asking(client: httpx.AsyncClient, **fields: object) -> AsyncIterator[None]:
    """Ask for a long answer, and hang up at the end."""
    body = {"prompt": "abcdef", "max_tokens": 400, "ignore_eos": True, "stream": True} | fields
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        yield


def on_a_managed_cluster(scenario: Callable[[ManagedCluster], Awaitable[None]]) -> None:
    async def main() -> None:
        async with managed_cluster(ClusterConfig(tenants=TENANTS), step_delay_s=0.01) as cluster:
            await scenario(cluster)
            await cluster.wait_until_idle()

    asyncio.run(main())


def test_the_stream_tells_of_the_model_then_again_and_again_of_the_cluster() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        async with console(cluster, key="ops-key") as client, asking(client), watching(client) as events:
            first = await anext(events)
            assert first["model"]["num_kv_heads"] == 2
            fields = first["model"]["row_fields"]
            async for event in events:
                seen = event["cluster"]
                (engine,) = seen["engines"]
                if seen["sequences"] and engine["held_blocks"] and engine.get("reserved_blocks"):
                    break
            row = dict(zip(fields, seen["sequences"][0], strict=True))
            assert (row["engine"], row["tenant"], row["policy"], row["num_prompt"]) == (0, "ops", "full", 6)
            assert row["blocks"] >= 1
            assert (seen["has_manager"], seen["manager_is_up"], seen["drift_blocks"]) == (True, True, 0)
            assert engine["ranks"] == [{"q_heads": [0, 4], "kv_heads": [0, 2]}]
            assert [tenant["tenant"] for tenant in seen["tenants"]] == ["ops", "shop"]
            assert "sequence" not in event

    on_a_managed_cluster(scenario)


def test_a_sequence_in_focus_comes_with_what_is_new_of_its_text() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        async with (
            console(cluster, key="ops-key") as client,
            asking(client, kvorum={"policy": "h2o", "kv_budget": 16}),
            focus_on_the_only_one(client, cluster) as events,
        ):
            await anext(events)
            text = ""
            async for event in events:
                seen = event["sequence"]
                assert seen["tokens"]["from"] == len(text)
                text += "".join(seen["tokens"]["texts"])
                if seen["row"]["evicted_tokens"] > 5:
                    break
            assert text.startswith("abcdefabcdef")
            slots = seen["slots"]
            assert sum(slots["alive"]) == 16 == seen["num_written"] - seen["row"]["evicted_tokens"]
            assert None in slots["values"], "a protected slot has no value"
            assert [each["kind"] for each in seen["events"]][:1] == ["started"]

    on_a_managed_cluster(scenario)


@contextlib.asynccontextmanager
async def focus_on_the_only_one(
    client: httpx.AsyncClient, cluster: ManagedCluster
) -> AsyncIterator[AsyncIterator[Any]]:
    engine = cluster.engine.host.engine
    await eventually(lambda: engine.stats().generation_tokens_total > 2)
    (row,) = engine.sequences()
    query = {"engine": engine.info.engine_id, "sequence": row.request_id, "layer": "0", "kv_head": "1"}
    async with watching(client, **query) as events:
        yield events


def test_an_operator_sees_anothers_slots_but_no_word_of_its_text() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        async with (
            console(cluster, key="ops-key") as operator,
            console(cluster, key="shop-key") as shop,
            asking(shop),
            focus_on_the_only_one(operator, cluster) as events,
        ):
            await anext(events)
            seen = (await anext(events))["sequence"]
            assert seen["row"]["tenant"] == "shop"
            assert seen["slots"]["positions"][:3] == [0, 1, 2]
            assert seen["tokens"] is None
            assert "abc" not in json.dumps(seen)

    on_a_managed_cluster(scenario)


def test_a_sequence_that_is_over_is_null_and_the_stream_goes_on() -> None:
    async def scenario(cluster: ManagedCluster) -> None:
        async with console(cluster, key="ops-key") as client:
            async with asking(client), focus_on_the_only_one(client, cluster) as events:
                await anext(events)
                assert (await anext(events))["sequence"] is not None
            async with watching(client, engine="engine-0", sequence="nobody") as events:
                await anext(events)
                assert (await anext(events))["sequence"] is None
            async with watching(client, engine="nowhere", sequence="nobody") as events:
                await anext(events)
                assert (await anext(events))["sequence"] is None

    on_a_managed_cluster(scenario)


def test_without_a_manager_and_without_engines_there_is_still_something_to_see() -> None:
    async def main() -> None:
        async with running_stack() as stack, console(stack) as client, watching(client) as events:
            await anext(events)
            seen = (await anext(events))["cluster"]
            assert (len(seen["engines"]), seen["manager_is_up"], seen["tenants"]) == (1, False, [])
            await stack.host.server.stop()
            await eventually(lambda: not stack.frontend.statuses())
            async for event in events:
                if not event["cluster"]["engines"]:
                    break

    asyncio.run(main())


@pytest.mark.parametrize(("key", "status"), [("shop-key", 403), ("wrong", 401), (None, 401)])
@pytest.mark.parametrize("path", ["/console/stream", "/console/learn/caching"])
def test_with_tenants_only_an_operators_key_opens_stream_and_lessons(path: str, key: str | None, status: int) -> None:
    async def main() -> None:
        config = ClusterConfig(tenants=TENANTS)
        async with running_stack(config) as stack, console(stack, key=key) as client:
            assert (await client.get(path)).status_code == status
            assert (await client.get("/console/")).status_code == 200, "the page itself holds nothing"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("query", "param"),
    [({"layer": "1"}, "layer"), ({"layer": "-1"}, "layer"), ({"kv_head": "2"}, "kv_head"), ({"layer": "x"}, "layer")],
)
def test_a_layer_or_head_that_there_is_not_is_refused_by_name(query: dict[str, str], param: str) -> None:
    async def main() -> None:
        async with running_stack() as stack, console(stack) as client:
            asked = {"engine": "engine-0", "sequence": "r"} | query
            refused = await client.get("/console/stream", params=asked)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)

    asyncio.run(main())


def test_lessons_are_asked_with_their_arguments_and_refused_with_their_reasons() -> None:
    async def main() -> None:
        async with running_stack() as stack, console(stack) as client:
            lesson = await client.get("/console/learn/evictions", params={"budget": 32, "layer": 2, "extra": 1})
            assert lesson.json() == {"name": "evictions", "budget": 32, "layer": 2, "kv_head": 0}
            refused = await client.get("/console/learn/evictions", params={"budget": 3})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "budget")
            assert (await client.get("/console/learn/history")).status_code == 404

    asyncio.run(main())


def test_pages_come_from_here_alone_and_nothing_else_does() -> None:
    async def main() -> None:
        async with running_stack() as stack, console(stack) as client:
            redirect = await client.get("/console")
            assert (redirect.status_code, redirect.headers["location"]) == (307, "console/")
            for file in STATIC.iterdir():
                page = await client.get(f"/console/{file.name}")
                assert page.status_code == 200
                assert page.content == file.read_bytes()
                assert "default-src 'self'" in page.headers["content-security-policy"]
            assert (await client.get("/console/")).content == (STATIC / "index.html").read_bytes()
            for path in (
                "/console/none.js",
                "/console/../routes.py",
                "/console/%2e%2e/routes.py",
                "/console/a/b.js",
                "/console/" + "x" * 300,
            ):
                assert (await client.get(path)).status_code == 404

    asyncio.run(main())


def test_no_page_names_another_host() -> None:
    for file in STATIC.iterdir():
        text = file.read_text().replace('"http://www.w3.org/2000/svg"', "")
        assert "http://" not in text
        assert "https://" not in text
        assert "//cdn" not in text
