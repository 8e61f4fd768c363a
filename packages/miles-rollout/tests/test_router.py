"""The router over real sockets: affinity, health, failover, the version gate, and bodies that pass untouched."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from miles_rollout import create_router_app
from miles_rollout.config import RouterConfig
from miles_rollout.errors import PortInUseError, RolloutConfigError
from miles_rollout.listening import bind, url_of
from miles_rollout.router import base_urls, run_router
from miles_rollout.router.fleet import Engine, Fleet
from miles_rollout.router.metrics import merge_pages
from miles_rollout.router.policies import POLICIES, Manual


class Backend:
    """An engine's HTTP face on a raw socket. `mode`: ok, drop (close without an answer), hang, stream, refuse (503)."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.version = "0"
        self.healthy = True
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.abandoned = asyncio.Event()
        self.arrived = asyncio.Event()
        self.more = asyncio.Event()
        self.url = ""

    @property
    def generated(self) -> list[bytes]:
        return [body for method, path, _, body in self.requests if path.startswith(("/generate", "/v1/"))]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.abandoned.set()
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append((method, path, headers, body))
        if path == "/health":
            return await self._answer(writer, 200 if self.healthy else 503, b"{}")
        if path == "/model_info":
            return await self._answer(writer, 200, json.dumps({"weight_version": self.version}).encode())
        if path == "/metrics":
            page = b'# TYPE sglang_num_running_reqs gauge\nsglang_num_running_reqs 3\nother{a="b"} 1\n'
            return await self._answer(writer, 200, page)
        self.arrived.set()
        return await self._generate(reader, writer, body)

    async def _generate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> bool:
        if self.mode == "drop":
            return False
        if self.mode == "hang":
            await reader.readexactly(1)
        if self.mode == "stream":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"5\r\nfirst\r\n")
            await self.more.wait()
            writer.write(b"4\r\nlast\r\n0\r\n\r\n")
            return True
        if self.mode == "refuse":
            return await self._answer(writer, 503, b'{"code": "busy"}')
        return await self._answer(writer, 200, b'{"url": "' + self.url.encode() + b'",  "nan": NaN}')

    async def _answer(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> bool:
        headers = f"content-type: application/json\r\nx-engine: yes\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(f"HTTP/1.1 {status} X\r\n{headers}".encode() + body)
        await writer.drain()
        return True


class Cluster:
    """A router on a real port, and engines that can be stopped and started again at the same address."""

    def __init__(self, stack: AsyncExitStack, **config: Any) -> None:
        self._stack = stack
        self._servers: dict[str, asyncio.Server] = {}
        settings = {"policy": "round_robin", "health_interval_s": 3600.0, "failover_pause_s": 0.01, **config}
        self.config = RouterConfig(**settings)
        self.token: str | None = None
        self.app: Starlette
        self.client: httpx.AsyncClient

    async def start(self, token: str | None = None) -> Cluster:
        self.app = create_router_app(self.config, control_token=token)
        listener = bind("127.0.0.1", 0)
        server = uvicorn.Server(uvicorn.Config(self.app, log_level="error", lifespan="on"))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        self.url = url_of("127.0.0.1", listener)
        self.client = await self._stack.enter_async_context(httpx.AsyncClient(base_url=self.url, timeout=20))

        async def stop() -> None:
            server.should_exit = True
            await task
            listener.close()

        self._stack.push_async_callback(stop)
        return self

    async def engine(self, backend: Backend | None = None, *, register: bool = True) -> Backend:
        backend = backend or Backend()
        port = int(backend.url.rpartition(":")[2]) if backend.url else 0
        server = await asyncio.start_server(backend.serve, "127.0.0.1", port)
        backend.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._servers[backend.url] = server
        self._stack.callback(server.close)
        if register:
            answer = await self.client.post("/workers", json={"url": backend.url})
            assert answer.status_code == 201, answer.text
        return backend

    def stop(self, backend: Backend) -> None:
        self._servers[backend.url].close()

    async def probe(self) -> None:
        await self.app.state.monitor.probe_all()

    async def generate(self, key: str | None = None, **headers: str) -> httpx.Response:
        extra = {"X-SMG-Routing-Key": key} if key else {}
        return await self.client.post("/generate", json={"input_ids": [1]}, headers={**extra, **headers})

    async def served_by(self, key: str | None = None, **headers: str) -> str:
        answer = await self.generate(key, **headers)
        assert answer.status_code == 200, answer.text
        return answer.text.split('"')[3]

    async def states(self) -> dict[str, bool]:
        workers = (await self.client.get("/workers")).json()["workers"]
        return {worker["url"]: worker["is_healthy"] for worker in workers}


@pytest.fixture
async def cluster() -> AsyncIterator[Callable[..., Cluster]]:
    async with AsyncExitStack() as stack:
        yield lambda **config: Cluster(stack, **config)


async def test_workers_are_added_listed_and_removed(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    first, second = await router.engine(), await router.engine()
    described = (await router.client.get("/workers")).json()["workers"]
    assert [worker["url"] for worker in described] == [first.url, second.url]
    assert described[0] == {
        "id": "w1", "url": first.url, "worker_type": "regular", "is_healthy": True, "load": 0,
        "weight_version": "0", "engine_id": None, "reason": None,
    }  # fmt: skip
    assert (await router.client.post("/workers", json={"url": first.url})).json()["id"] == "w1"
    assert (await router.client.delete("/workers/w1")).status_code == 200
    assert (await router.client.delete("/workers/w1")).json()["code"] == "no_such_worker"
    assert await router.served_by() == second.url


async def test_the_old_routes_take_query_and_body(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    engine = await router.engine(register=False)
    assert (await router.client.post(f"/add_worker?url={engine.url}")).status_code == 200
    assert (await router.client.post("/add_worker", json={"worker_url": engine.url})).status_code == 200
    assert (await router.client.get("/list_workers")).json() == {"urls": [engine.url]}
    assert (await router.client.post("/remove_worker", json={"url": engine.url})).status_code == 200
    assert (await router.client.get("/list_workers")).json() == {"urls": []}
    assert engine.generated == []


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({}, "a worker needs a url"),
        ({"url": "ftp://x"}, "is no http address"),
        ({"url": "http://a:1@0"}, "without @rank"),
        ({"url": "http://a:1", "worker_type": "prefill"}, "only 'regular' workers"),
    ],
)
async def test_a_worker_without_a_usable_url_is_refused(
    cluster: Callable[..., Cluster], body: dict[str, Any], fault: str
) -> None:
    router = await cluster().start()
    answer = await router.client.post("/workers", json=body)
    assert answer.status_code == 400
    assert fault in answer.json()["detail"]


async def test_without_workers_a_request_gets_a_problem(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    answer = await router.generate()
    assert (answer.status_code, answer.json()["code"]) == (503, "no_worker")
    assert answer.headers["content-type"] == "application/problem+json"
    assert (await router.client.get("/health")).status_code == 503


async def test_bodies_pass_untouched_both_ways(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    engine = await router.engine()
    body = b'{ "input_ids":[1,2],   "x": 1e400, "dup": 1, "dup": 2 }' + b" " * 100_000
    answer = await router.client.post("/generate?q=1%202", content=body, headers={"x-own": "kept"})
    assert engine.generated == [body]
    assert engine.requests[-1][1] == "/generate?q=1%202"
    assert engine.requests[-1][2]["x-own"] == "kept"
    assert answer.text.endswith('",  "nan": NaN}')
    assert answer.headers["x-engine"] == "yes"


async def test_a_route_that_is_not_for_rollout_is_not_proxied(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    engine = await router.engine()
    seen = len(engine.requests)
    for path in ("/pause_generation", "/update_weights_from_disk", "/update_weights_from_tensor", "/anything"):
        assert (await router.client.post(path, json={})).status_code in {404, 405}
    assert len(engine.requests) == seen


async def test_a_key_stays_at_its_engine_and_new_keys_spread(cluster: Callable[..., Cluster]) -> None:
    router = await cluster(policy="manual").start()
    engines = {(await router.engine()).url for _ in range(3)}
    places = {f"k{i}": await router.served_by(f"k{i}") for i in range(9)}
    assert sorted(list(places.values()).count(url) for url in engines) == [3, 3, 3]
    for key, place in reversed(places.items()):
        assert await router.served_by(key) == place


async def test_a_request_without_a_key_is_refused_where_sessions_are_sticky(cluster: Callable[..., Cluster]) -> None:
    router = await cluster(policy="manual").start()
    await router.engine()
    answer = await router.generate()
    assert (answer.status_code, answer.json()["code"]) == (400, "routing_key_missing")
    assert (await router.client.get("/model_info")).json() == {"weight_version": "0"}


async def test_a_target_worker_comes_before_the_key(cluster: Callable[..., Cluster]) -> None:
    router = await cluster(policy="manual").start()
    engines = [await router.engine() for _ in range(2)]
    for index, engine in enumerate(engines):
        assert await router.served_by("k", **{"X-SMG-Target-Worker": str(index)}) == engine.url
    assert (await router.generate("k", **{"X-SMG-Target-Worker": "7"})).json()["code"] == "no_such_worker"
    assert "x-smg-target-worker" not in engines[0].requests[-1][2]


async def test_the_least_loaded_engine_is_chosen(cluster: Callable[..., Cluster]) -> None:
    router = await cluster(policy="least_load").start()
    busy, idle = await router.engine(), await router.engine()
    busy.mode = "hang"
    hanging = asyncio.create_task(router.generate())
    await asyncio.wait_for(busy.arrived.wait(), 10)
    assert [await router.served_by() for _ in range(3)] == [idle.url] * 3
    hanging.cancel()
    await asyncio.wait_for(busy.abandoned.wait(), 10)


async def test_a_connection_lost_before_the_answer_is_taken_elsewhere_and_the_key_moves(
    cluster: Callable[..., Cluster],
) -> None:
    router = await cluster(policy="manual").start()
    engines = {engine.url: engine for engine in [await router.engine(), await router.engine()]}
    first = engines[await router.served_by("k")]
    first.mode = "drop"
    second = await router.served_by("k")
    assert second != first.url
    first.mode = "ok"
    assert await router.served_by("k") == second


async def test_a_stopped_engine_loses_no_request(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    engines = [await router.engine() for _ in range(3)]
    router.stop(engines[0])
    answers = await asyncio.gather(*(router.generate() for _ in range(30)))
    assert {answer.status_code for answer in answers} == {200}


async def test_an_only_engine_is_tried_again(cluster: Callable[..., Cluster]) -> None:
    router = await cluster(failover_pause_s=0.2).start()
    engine = await router.engine()
    engine.mode = "drop"
    waiting = asyncio.create_task(router.generate())
    await asyncio.wait_for(engine.arrived.wait(), 10)
    engine.mode = "ok"
    assert (await waiting).status_code == 200


async def test_an_unanswered_request_is_a_problem_that_names_the_engines(cluster: Callable[..., Cluster]) -> None:
    router = await cluster(failure_threshold=100).start()
    engine = await router.engine()
    engine.mode = "drop"
    answer = await router.generate()
    assert (answer.status_code, answer.json()["code"]) == (502, "no_engine_answered")
    assert engine.url in answer.json()["detail"]
    assert len(engine.generated) == 3


async def test_a_silent_engine_is_given_up_and_not_asked_again(cluster: Callable[..., Cluster]) -> None:
    router = await cluster(request_timeout_s=0.3).start()
    engine = await router.engine()
    engine.mode = "hang"
    answer = await router.generate()
    assert (answer.status_code, answer.json()["code"]) == (504, "engine_timeout")
    assert len(engine.generated) == 1


async def test_backpressure_passes_through_and_is_no_failure(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    engine = await router.engine()
    engine.mode = "refuse"
    for _ in range(5):
        answer = await router.generate()
        assert (answer.status_code, answer.content) == (503, b'{"code": "busy"}')
    assert await router.states() == {engine.url: True}


async def test_an_answer_streams_through(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    engine = await router.engine()
    engine.mode = "stream"
    async with router.client.stream("POST", "/v1/chat/completions", json={"stream": True}) as answer:
        parts = answer.aiter_raw()
        assert await anext(parts) == b"first"
        engine.more.set()
        assert b"".join([part async for part in parts]) == b"last"


async def test_a_client_that_leaves_ends_the_engines_work_and_its_load(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    engine = await router.engine()
    engine.mode = "hang"
    waiting = asyncio.create_task(router.generate())
    await asyncio.wait_for(engine.arrived.wait(), 10)
    waiting.cancel()
    await asyncio.wait_for(engine.abandoned.wait(), 10)
    for _ in range(500):
        if (await router.client.get("/workers")).json()["workers"][0]["load"] == 0:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the load did not fall")


async def test_three_missed_probes_quarantine_and_two_good_ones_readmit(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    engine = await router.engine()
    engine.healthy = False
    seen = []
    for _ in range(3):
        await router.probe()
        seen.append((await router.states())[engine.url])
    engine.healthy = True
    for _ in range(2):
        await router.probe()
        seen.append((await router.states())[engine.url])
    assert seen == [True, True, False, False, True]


async def test_adding_again_clears_the_quarantine(cluster: Callable[..., Cluster]) -> None:
    router = await cluster(failure_threshold=1).start()
    engine = await router.engine()
    router.stop(engine)
    engine.mode = "drop"
    await router.generate()
    assert await router.states() == {engine.url: False}
    engine.mode = "ok"
    await router.engine(engine)
    assert await router.served_by() == engine.url


async def test_a_restarted_engine_gets_no_request_before_it_has_the_fleets_weights(
    cluster: Callable[..., Cluster],
) -> None:
    router = await cluster(failure_threshold=1).start()
    current, restarted = await router.engine(), await router.engine()
    current.version = restarted.version = "5"
    await router.probe()
    restarted.version = "0"
    await router.probe()
    assert await router.states() == {current.url: True, restarted.url: False}
    await router.client.post("/workers", json={"url": restarted.url})
    for _ in range(3):
        await router.probe()
        assert await router.served_by() == current.url
    restarted.version = "5"
    await router.probe()
    await router.probe()
    assert {await router.served_by() for _ in range(4)} == {current.url, restarted.url}


async def test_engines_that_are_updated_one_after_another_stay_routable(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    first, second = await router.engine(), await router.engine()
    first.version = "1"
    await router.probe()
    assert await router.states() == {first.url: True, second.url: True}


async def test_an_abort_reaches_every_engine(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start(token="secret")
    engines = [await router.engine(register=False) for _ in range(2)]
    headers = {"authorization": "Bearer secret"}
    for engine in engines:
        assert (await router.client.post("/workers", json={"url": engine.url})).status_code == 401
        assert (await router.client.post("/workers", json={"url": engine.url}, headers=headers)).status_code == 201
    assert (await router.client.post("/abort_request", json={"rid": "x"})).status_code == 401
    assert (await router.client.post("/abort_request", json={"rid": "x"}, headers=headers)).status_code == 200
    assert [engine.requests[-1][1] for engine in engines] == ["/abort_request"] * 2
    assert (await router.generate()).status_code == 200


async def test_metrics_of_all_engines_come_in_one_page(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    urls = [(await router.engine()).url for _ in range(2)]
    page = (await router.client.get("/engine_metrics")).text
    assert page.count("# TYPE sglang_num_running_reqs gauge") == 1
    assert all(f'sglang_num_running_reqs{{worker="{url}"}} 3' in page for url in urls)
    assert all(f'other{{a="b",worker="{url}"}} 1' in page for url in urls)


async def test_a_body_over_the_limit_is_refused(cluster: Callable[..., Cluster]) -> None:
    router = await cluster(max_request_bytes=100).start()
    await router.engine()
    answer = await router.client.post("/generate", content=b"x" * 101)
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


def test_an_idle_key_loses_its_place() -> None:
    now = [0.0]
    policy = Manual(RouterConfig(key_idle_s=10), lambda: now[0])
    engines = [Engine("w1", "http://a"), Engine("w2", "http://b")]
    policy.choose(engines, "old")
    now[0] = 8.0
    policy.choose(engines, "new")
    now[0] = 11.0
    policy.choose(engines, "third")
    assert len(policy) == 2


def test_random_assignment_follows_the_seed() -> None:
    engines = [Engine(f"w{i}", f"http://{i}") for i in range(4)]

    def places(seed: int) -> list[str]:
        policy = POLICIES["manual"](RouterConfig(assignment="random", seed=seed), lambda: 0.0)
        return [policy.choose(engines, str(key)).url for key in range(20)]

    assert places(1) == places(1) != places(2)


def test_an_emptied_fleet_forgets_its_version() -> None:
    fleet = Fleet(failure_threshold=3, success_threshold=2)
    old = fleet.add("http://a:1")
    fleet.record_success(old, version=9, engine_id=None)
    assert fleet.version == 9
    fleet.remove(old)
    new = fleet.add("http://a:1")
    fleet.record_success(new, version=0, engine_id=None)
    assert new.healthy


def test_ranks_fold_into_one_address() -> None:
    assert base_urls(["http://a:1@0", "http://a:1@1", "http://b:2"]) == ["http://a:1", "http://b:2"]


def test_merging_no_pages_gives_an_empty_page() -> None:
    assert merge_pages({}) == ""


def test_a_taken_port_is_one_clear_error() -> None:
    with bind("127.0.0.1", 0) as taken, pytest.raises(PortInUseError, match="choose another port, or 0"):
        run_router(RouterConfig(port=taken.getsockname()[1]))


def test_a_worker_that_is_no_url_is_refused_at_the_start() -> None:
    with pytest.raises(RolloutConfigError, match=r"router\.workers: 'nonsense' is no http address"):
        run_router(RouterConfig(workers=("nonsense",)))


def test_the_command_announces_its_port_and_ends_on_sigterm() -> None:
    command = [sys.executable, "-c", "from miles_rollout.cli import main; main()", "serve-router", "--port", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        assert httpx.get(f"{ready['url']}/list_workers", timeout=10, trust_env=False).json() == {"urls": []}
        process.terminate()
        assert process.wait(timeout=10) in {0, -15}


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://[",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:x",
        "http://127.0.0.1:1\n",
        "http://127.0.0.1:1?x",
        "http://127.0.0.1:1#x",
        "http://a b",
        "http://" + "a" * 70_000,
        "file:///etc/hosts",
        ["http://127.0.0.1:1"],
    ],
)
async def test_an_address_that_is_none_is_refused_and_not_kept(cluster: Callable[..., Cluster], url: object) -> None:
    router = await cluster().start()
    for path in ("/workers", "/add_worker", "/remove_worker"):
        answer = await router.client.post(path, json={"url": url})
        assert (answer.status_code, answer.json()["code"]) == (400, "worker_url_invalid")
    assert (await router.client.get("/workers")).json()["workers"] == []


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"a":' * 100_000, b"\xff", b"[]"], ids=len)
async def test_a_management_body_that_is_no_object_is_400(cluster: Callable[..., Cluster], body: bytes) -> None:
    router = await cluster().start()
    for path in ("/workers", "/add_worker", "/remove_worker"):
        answer = await router.client.post(path, content=body)
        assert (answer.status_code, answer.json()["code"]) == (400, "worker_url_invalid")


async def test_a_management_body_over_the_limit_is_refused(cluster: Callable[..., Cluster]) -> None:
    router = await cluster(max_request_bytes=10).start()
    answer = await router.client.post("/workers", content=b"x" * 11)
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("target", ["-1", "7", "9" * 5000, "", "x", b"\xe9"], ids=lambda target: str(target)[:5])
async def test_an_unknown_target_is_400(cluster: Callable[..., Cluster], target: str | bytes) -> None:
    router = await cluster().start()
    await router.engine()
    answer = await router.client.post("/generate", content=b"{}", headers={"x-smg-target-worker": target})
    assert (answer.status_code, answer.json()["code"]) == (400, "no_such_worker")


async def test_header_bytes_pass_untouched(cluster: Callable[..., Cluster]) -> None:
    router = await cluster().start()
    backend = await router.engine()
    headers = {"x-smg-routing-key": b"caf\xe9", "x-other": b"\xff"}
    assert (await router.client.post("/generate", content=b"{}", headers=headers)).status_code == 200
    assert backend.requests[-1][2]["x-other"].encode("latin-1") == b"\xff"
