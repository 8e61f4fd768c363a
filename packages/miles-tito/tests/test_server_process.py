"""The server as a process on real sockets: its port, its end, and clients that go away."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from miles_tito import Family, PortInUseError, SessionServerClient, SGLangEngine, TitoConfig, Tokenizer
from miles_tito.server import create_app
from miles_tito.server.run import bind
from miles_tito.testing import StubEngine, StubReply, stub_engine_app

DEADLINE_S = 30.0
USER = {"role": "user", "content": "q"}


@contextmanager
def threaded(app: object) -> Iterator[str]:
    """Serve an ASGI app from a thread of this process; yields its URL."""
    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listener.close()


@contextmanager
def command(*arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, "-m", "miles_tito.cli", *arguments]
    process = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE_S)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr.read() if process.stderr else ""
    return line.strip()


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(tmp_path)
    return tmp_path


async def test_serve_announces_its_port_and_drains_on_sigterm(folder: Path, smollm2: Family) -> None:
    engine = StubEngine(stop_id=smollm2.stop_ids[0])
    entered, gate = threading.Event(), threading.Event()

    class Held(StubEngine):
        async def generate(self, request):  # type: ignore[no-untyped-def]
            entered.set()
            await asyncio.to_thread(gate.wait, DEADLINE_S)
            return await engine.generate(request)

    with threaded(stub_engine_app(Held())) as engine_url:
        arguments = ["serve", "--engine", engine_url, "--tokenizer", str(folder), "--family", "smollm2"]
        with command(*arguments, env={"MILES_CONTROL_TOKEN": "t"}) as process:
            url = first_line(process).rsplit(" ", 1)[1]
            client = SessionServerClient(url, control_token="t")
            assert await client.health()
            await client.set_versions(0, {"stub:0": 0})
            handle = await client.create(seed=1, sampling={"max_new_tokens": 8})
            async with httpx.AsyncClient(timeout=DEADLINE_S) as agent:
                chat = asyncio.create_task(
                    agent.post(f"{handle.base_url}/v1/chat/completions", json={"messages": [USER]})
                )
                await asyncio.to_thread(entered.wait, DEADLINE_S)
                process.send_signal(signal.SIGTERM)
                gate.set()
                answer = await chat
            assert answer.status_code == 200
            assert await asyncio.to_thread(process.wait, DEADLINE_S) == 0
            await client.aclose()


def test_a_port_in_use_is_one_clear_line(folder: Path) -> None:
    with closing(bind("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)
        arguments = ["--engine", "http://127.0.0.1:9", "--tokenizer", str(folder), "--family", "smollm2"]
        with command("serve", *arguments, "--port", str(port)) as process:
            _, errors = process.communicate(timeout=DEADLINE_S)
            assert process.returncode == 1
            assert f"port {port}" in errors
            assert len(errors.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--family", "llama9"], "no chat family 'llama9'"),
        (["--family", "smollm2", "--tito-allowed-append-roles", "tool", "user"], "cannot append tool"),
        (["--family", "smollm2", "--tokenizer", "/nowhere"], "does not exist"),
    ],
)
def test_bad_options_are_one_clear_line(folder: Path, arguments: list[str], message: str) -> None:
    given = arguments if "--tokenizer" in arguments else [*arguments, "--tokenizer", str(folder)]
    with command("serve", "--engine", "http://127.0.0.1:9", *given) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert message in errors
    assert "Traceback" not in errors


@asynccontextmanager
async def http_client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=DEADLINE_S, trust_env=False) as client:
        yield client


async def until(condition) -> None:  # type: ignore[no-untyped-def]
    """Poll a condition of another thread within the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "the deadline passed"
        await asyncio.sleep(0.01)


async def test_a_client_that_goes_away_aborts_its_generation(smollm2: Family) -> None:
    engine = StubEngine([StubReply([1], fault="slow")], stop_id=smollm2.stop_ids[0])
    app = create_app(TitoConfig(), engine=engine, tokenizer=smollm2.tokenizer, family=smollm2)
    with threaded(app) as url:
        client = SessionServerClient(url)
        handle = await client.create(seed=1)
        async with http_client() as agent:
            body = {"messages": [USER]}
            chat = asyncio.create_task(agent.post(f"{handle.base_url}/v1/chat/completions", json=body))
            await until(lambda: engine.requests)
            chat.cancel()
            await asyncio.gather(chat, return_exceptions=True)
        await until(lambda: engine.aborted)
        assert engine.aborted == [engine.requests[0].request_id]
        assert await client.collect(handle.session_id) == []
        async with http_client() as agent:
            answer = await agent.post(f"{handle.base_url}/v1/chat/completions", json={"messages": [USER]})
            assert answer.status_code == 200
        (trajectory,) = await client.collect(handle.session_id)
        assert len(trajectory.turns) == 1
        await client.aclose()
    assert not engine.open


async def test_a_whole_conversation_over_real_sockets(smollm2: Family) -> None:
    engine = StubEngine(stop_id=smollm2.stop_ids[0])
    with threaded(stub_engine_app(engine)) as engine_url:
        app = create_app(TitoConfig(), engine=SGLangEngine(engine_url), tokenizer=smollm2.tokenizer, family=smollm2)
        with threaded(app) as url:
            client = SessionServerClient(url)
            handle = await client.create(seed=1, sampling={"temperature": 0.7})
            messages = [USER]
            async with http_client() as agent:
                for _ in range(3):
                    answer = await agent.post(f"{handle.base_url}/v1/chat/completions", json={"messages": messages})
                    messages = [*messages, answer.json()["choices"][0]["message"], USER]
            (trajectory,) = await client.collect(handle.session_id)
            assert (len(trajectory.turns), trajectory.temperature) == (3, 0.7)
            await client.aclose()


def test_a_server_that_is_not_there_is_named() -> None:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def ask() -> bool:
        client = SessionServerClient(f"http://127.0.0.1:{port}", timeout_s=5.0)
        alive = await client.health()
        await client.aclose()
        return alive

    assert asyncio.run(ask()) is False
