"""What clients count of a load run is exactly what the metrics say, and what engines compute has metrics of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import httpx
from fastapi.routing import APIRoute

from kvorum.cluster.config import ClusterConfig
from kvorum.cluster.http import create_app
from kvorum.cluster.http_calls import method_of
from kvorum.cluster.tenants import Tenant, hash_key
from kvorum.protos.inference.v1 import inference_pb2 as pb
from kvtest.counting import Books, Samples, booked, samples_of
from kvtest.managed import ManagedCluster, managed_cluster
from kvtest.servers import Unchecked, failure_of, grpc_stub, http_client
from kvtest.stack import DEFAULT_INFO, Stack, running_stack
from kvtest.waiting import eventually

REASONS = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length"}
# Of 32 blocks, four long answers take more.
SMALL_POOL = replace(DEFAULT_INFO, num_blocks=32, max_num_waiting=16)


class Client:
    """Sends requests in either protocol and keeps books of what comes back."""

    def __init__(self, http: httpx.AsyncClient, grpc_stub: Unchecked, books: Books) -> None:
        self.http = http
        self.stub = grpc_stub
        self.books = books

    async def complete(self, **fields: Unchecked) -> None:
        """Ask for a whole answer."""
        self.books.sent("http", "/v1/completions")
        response = await self.http.post("/v1/completions", json={"prompt": "abcdef", "max_tokens": 9} | fields)
        if response.status_code == 200:
            self.books.whole(response.json())
        else:
            self.books.refused(response.json()["error"]["code"])

    async def stream(self, **fields: Unchecked) -> None:
        """Ask for a stream."""
        self.books.sent("http", "/v1/completions")
        body = {"prompt": "abcdef", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
        response = await self.http.post("/v1/completions", json=body | fields)
        assert response.status_code == 200
        self.books.streamed(response.text)

    async def generate(self, text: str = "abcdef", *, max_tokens: int = 9, **fields: Unchecked) -> None:
        """Ask for a stream over gRPC."""
        self.books.sent("grpc", "Generate")
        message = pb.GenerateRequest(text=text, sampling=pb.SamplingParams(max_tokens=max_tokens), **fields)
        pieces = [piece async for piece in self.stub.Generate(message)]
        self.books.began(pieces[-1].completion.usage.prompt_tokens, sum(len(piece.token_ids) for piece in pieces))
        self.books.ended()
        completion = pieces[-1].completion
        receipt = completion.receipt
        self.books.finished(REASONS[completion.finish_reason], receipt.policy, receipt.kv_tokens_evicted)

    async def scrape(self) -> Samples:
        """Return what the metrics say."""
        return samples_of((await self.http.get("/metrics")).text)


def run_stack(
    scenario: Callable[[Client, Stack], Awaitable[None]], config: ClusterConfig | None = None, **settings: Unchecked
) -> None:
    async def main() -> None:
        async with running_stack(config, **settings) as stack, http_client(stack) as http, grpc_stub(stack) as stub:
            await scenario(Client(http, stub, Books()), stack)

    asyncio.run(main())


def test_whatever_happens_to_whole_answers_both_count_the_same() -> None:
    async def scenario(client: Client, stack: Stack) -> None:
        long = "The quick brown fox jumps over the lazy dog, as it does on every other day. "
        await client.complete(prompt=long)
        await asyncio.gather(
            client.complete(prompt=long),  # its prefix is cached
            client.complete(prompt=["one", "two"], n=2),
            client.complete(stop=["de"], max_tokens=60),
            client.stream(stop=["cd"], n=2),
            client.stream(prompt=long, kvorum={"policy": "h2o", "kv_budget": 16}),
            client.stream(prompt="a<end>", n=1),
            client.generate(),
            client.generate(long, stop=["fox"], max_tokens=60),
            *(client.generate(f"{number}{long}", max_tokens=80) for number in range(6)),  # more than the pool holds
            client.complete(temperature=9),
        )
        await stack.wait_until_idle()
        stats = stack.host.engine.stats()
        assert stats.preemptions_total > 0
        assert stats.prefix_cache_hits_total > 0
        samples = await client.scrape()
        assert booked(samples, {}) == client.books.entries
        assert client.books.counts["kvorum_evicted_tokens_total", (("policy", "h2o"), ("tenant", "default"))] > 0

    run_stack(scenario, info=SMALL_POOL)


def test_what_an_engine_computes_is_counted_apart() -> None:
    async def scenario(client: Client, stack: Stack) -> None:
        # The engine is a token or more ahead of the router that sees the stop string.
        await client.generate("abcdefgh", stop=["cd"], max_tokens=200)
        await client.complete(prompt="abcdefgh" * 8)
        await client.complete(prompt="abcdefgh" * 8)
        await stack.wait_until_idle()
        stats = stack.host.engine.stats()
        await eventually(lambda: stack.frontend.statuses()["engine-0"].stats == stats)
        samples = await client.scrape()
        engine, tenant = (("engine", "engine-0"),), (("tenant", "default"),)
        assert samples["kvorum_engine_prompt_tokens_total", engine] == stats.prompt_tokens_total
        assert samples["kvorum_engine_generation_tokens_total", engine] == stats.generation_tokens_total
        assert stats.prompt_tokens_total < samples["kvorum_prompt_tokens_total", tenant] == 8 + 64 + 64
        assert (
            samples["kvorum_generation_tokens_total", tenant]
            == client.books.counts["kvorum_generation_tokens_total", tenant]
        )
        assert stats.generation_tokens_total >= samples["kvorum_generation_tokens_total", tenant]

    run_stack(scenario)


def test_a_cancelled_stream_counts_what_was_handed_out_and_nothing_of_its_end() -> None:
    async def scenario(client: Client, stack: Stack) -> None:
        message = pb.GenerateRequest(text="abcdef", sampling=pb.SamplingParams(max_tokens=400))
        call = client.stub.Generate(message)
        read = [await call.read() for _ in range(3)]
        call.cancel()
        await stack.wait_until_idle()
        samples = await client.scrape()
        tenant = (("tenant", "default"),)
        handed_out = samples["kvorum_generation_tokens_total", tenant]
        assert sum(len(piece.token_ids) for piece in read) <= handed_out < 400
        books = Books()
        books.sent("grpc", "Generate")
        books.began(6, int(handed_out))
        books.add("request_failures_total", reason="cancelled")
        assert booked(samples, {}) == books.entries

    run_stack(scenario, step_delay_s=0.01)


def test_an_answer_that_fails_midway_is_a_failure_of_a_stream_and_a_refusal_of_a_whole() -> None:
    async def scenario(client: Client, stack: Stack) -> None:
        message = pb.GenerateRequest(text="abcdef", sampling=pb.SamplingParams(max_tokens=400))
        body = {"prompt": "abcdef", "max_tokens": 400}
        failed, streamed, whole = await asyncio.gather(
            failure_of(client.stub.Generate(message)),
            client.http.post("/v1/completions", json=body | {"stream": True}),
            client.http.post("/v1/completions", json=body),
        )
        assert failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (streamed.status_code, whole.status_code) == (200, 504)
        samples = await client.scrape()
        assert samples["kvorum_request_failures_total", (("reason", "timeout"),)] == 2
        assert samples["kvorum_admission_rejections_total", (("reason", "timeout"), ("tenant", "default"))] == 1
        assert ("kvorum_request_success_total", (("finished_reason", "length"),)) not in samples
        assert samples["kvorum_e2e_request_latency_seconds_count", ()] == 0

    run_stack(scenario, ClusterConfig(request_timeout_s=0.3), step_delay_s=0.02)


def test_every_refusal_is_counted_under_its_code() -> None:
    config = ClusterConfig(
        tenants={"acme": Tenant(api_key_sha256=(hash_key("key"),), allowed_policies=("full",))}, max_num_seqs=1
    )

    async def scenario(client: Client, _: Stack) -> None:
        books, http, stub = Books("acme"), client.http, client.stub

        async def post(path: str, body: object, *, code: str, key: str = "key") -> None:
            response = await http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
            assert response.json()["error"]["code"] == code
            books.sent("http", path)
            books.refused(code, tenant=None if key == "key" else "")

        async def rpc(method: str, message: object, *, code: str, key: str = "key") -> None:
            await failure_of(getattr(stub, method)(message, metadata=(("authorization", f"Bearer {key}"),)))
            books.sent("grpc", method)
            books.refused(code, tenant=None if key == "key" else "")

        ask = {"prompt": "abc", "max_tokens": 3}
        await post("/v1/completions", ask, code="invalid_api_key", key="wrong")
        await post("/v1/chat/completions", {}, code="invalid_value")
        await post("/v1/completions", ask | {"model": "gpt-4"}, code="model_not_found")
        await post("/v1/completions", ask | {"max_tokens": 4000}, code="context_length_exceeded")
        await post("/v1/completions", ask | {"kvorum": {"policy": "h2o"}}, code="permission_denied")
        await post("/v1/completions", {"prompt": "abc" * 90, "max_tokens": 200}, code="kv_never_fits")
        await post("/tokenize", {"prompt": "x"}, code="invalid_api_key", key="wrong")
        await post("/detokenize", {"tokens": [-1]}, code="invalid_value")
        generate = pb.GenerateRequest(text="abc", sampling=pb.SamplingParams(max_tokens=3))
        await rpc("Generate", generate, code="invalid_api_key", key="wrong")
        await rpc("Generate", pb.GenerateRequest(), code="invalid_value")
        await rpc("Tokenize", pb.TokenizeRequest(model="gpt-4", text="x"), code="model_not_found")
        await rpc("ListModels", pb.ListModelsRequest(), code="invalid_api_key", key="wrong")
        await rpc("Abort", pb.AbortRequest(), code="invalid_api_key", key="wrong")
        assert (await http.get("/operator/cluster", headers={"Authorization": "Bearer key"})).status_code == 403
        books.sent("http", "/operator")
        books.refused("permission_denied")
        assert (await http.get("/v1/models/gpt-4", headers={"Authorization": "Bearer key"})).status_code == 404
        books.sent("http", "/v1/models")
        books.refused("model_not_found")
        assert (await http.get("/nowhere")).status_code == 404
        assert booked(await client.scrape(), {}) == books.entries

    run_stack(scenario, config, info=replace(DEFAULT_INFO, num_blocks=8))


def test_an_answer_that_goes_on_elsewhere_is_counted_once() -> None:
    engines = {name: replace(DEFAULT_INFO, engine_id=name) for name in ("first", "second")}

    async def scenario(cluster: ManagedCluster) -> None:
        async with http_client(cluster) as http, grpc_stub(cluster) as stub:
            client = Client(http, stub, Books())
            answering = asyncio.create_task(client.generate(max_tokens=60))
            await eventually(lambda: any(e.host.engine.stats().generation_tokens_total > 5 for e in _hosts(cluster)))
            (lost,) = (each for each in _hosts(cluster) if each.host.engine.stats().num_running)
            lost.agent.cancel()
            await lost.host.server.stop()
            await answering
            samples = await client.scrape()
            assert booked(samples, {}) == client.books.entries
            assert samples["kvorum_request_resumes_total", ()] == 1

    async def main() -> None:
        async with managed_cluster(engines=engines, step_delay_s=0.005) as cluster:
            await scenario(cluster)

    asyncio.run(main())


def _hosts(cluster: ManagedCluster) -> list[Unchecked]:
    return list(cluster.engines.values())


def test_every_route_but_probes_and_scrapes_is_noted() -> None:
    async def scenario(_: Client, stack: Stack) -> None:
        paths = {route.path for route in create_app(stack.frontend).routes if isinstance(route, APIRoute)}
        assert {path for path in paths if method_of(path) is None} == {"/health", "/version", "/metrics"}
        assert method_of("/v1/modelsque") is None

    run_stack(scenario)
