"""Engines in memory and in processes, and a way between them that loses answers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles_weightsync import EngineReceiver, RawTensor, ReceiverConfig, ReceiverSink, as_wire
from miles_weightsync.testing import MemoryPort

ROOT = Path(__file__).parents[3]
TOKEN = "a token of this test"


@pytest.fixture
def contract() -> Path:
    return ROOT / "contracts" / "weight-manifest" / "v1"


@pytest.fixture(scope="session")
def golden() -> Path:
    folder = ROOT.parent / "shared" / "golden" / "weightsync"
    assert folder.is_dir(), f"golden vectors are expected in {folder}"
    return folder


@pytest.fixture
def arrays() -> dict[str, np.ndarray[Any, Any]]:
    """A small mixture-of-experts model: non-expert buckets, then experts; a scalar and an empty tensor."""
    draw = np.random.default_rng(7)
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(5)]
    names += [f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight" for layer in range(2) for e in range(3)]
    arrays = {name: draw.standard_normal((16, 48)).astype(np.float32) for name in names}
    arrays["model.norm.weight"] = np.ones(48, np.float32)
    arrays["model.scale"] = np.array(0.5, np.float32)
    arrays["model.nothing"] = np.zeros((0, 4), np.float16)
    return arrays


@pytest.fixture
def tensors(arrays: Mapping[str, Any]) -> dict[str, RawTensor]:
    return {name: as_wire(array) for name, array in arrays.items()}


@dataclass
class Engine:
    port: MemoryPort
    receiver: EngineReceiver
    stack: ExitStack

    @property
    def address(self) -> str:
        return self.receiver.address

    def sink(self, timeout_s: float = 10.0) -> ReceiverSink:
        return self.stack.enter_context(ReceiverSink(self.address, TOKEN, timeout_s=timeout_s))


@pytest.fixture
def start_engine(tensors: Mapping[str, RawTensor]) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def start(*, receiver: Mapping[str, Any] | None = None, stale: bool | None = None, **port: Any) -> Engine:
            memory = MemoryPort(**({"tensors": tensors} | port))
            config = ReceiverConfig(**(receiver or {}))
            served = stack.enter_context(EngineReceiver(memory, token=TOKEN, config=config, stale=stale))
            return Engine(memory, served, stack)

        yield start


@dataclass
class EngineProcess:
    process: subprocess.Popen[str]
    address: str
    stack: ExitStack

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def sink(self, timeout_s: float = 20.0) -> ReceiverSink:
        return self.stack.enter_context(ReceiverSink(self.address, TOKEN, timeout_s=timeout_s))


@pytest.fixture
def start_process(tensors: Mapping[str, RawTensor]) -> Iterator[Callable[..., EngineProcess]]:
    started: list[subprocess.Popen[str]] = []
    stack = ExitStack()

    def start(served: Mapping[str, RawTensor] | None = None, **options: Any) -> EngineProcess:
        specs = [[name, t.dtype, list(t.shape)] for name, t in (served or tensors).items()]
        command = [sys.executable, "-m", "miles_weightsync.memory_engine"]
        command.append(json.dumps({"token": TOKEN, "tensors": specs, **options}))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        return EngineProcess(process, json.loads(process.stdout.readline())["address"], stack)

    yield start
    stack.close()
    for process in started:
        process.kill()
        process.wait(10)
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


@dataclass
class LossyProxy:
    """Forwards connections to `target`; the first answer after a request that holds `lose_answer_to` is cut off."""

    target: str
    lose_answer_to: bytes
    lost: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        host, port = self.target.split(":")
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection((host, int(port)))
            self._sockets += [client, server]
            armed = threading.Event()
            for args in ((client, server, armed, True), (server, client, armed, False)):
                self._threads.append(threading.Thread(target=self._pump, args=args, daemon=True))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, armed: threading.Event, outward: bool) -> None:
        try:
            while data := source.recv(65536):
                if outward and self.lose_answer_to in data and not self.lost.is_set():
                    armed.set()
                if not outward and armed.is_set():
                    self.lost.set()
                    break
                target.sendall(data)
        except OSError:
            pass
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(5)


@pytest.fixture
def lossy() -> Iterator[Callable[[str, bytes], LossyProxy]]:
    proxies: list[LossyProxy] = []

    def start(target: str, lose_answer_to: bytes) -> LossyProxy:
        proxies.append(LossyProxy(target, lose_answer_to))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.close()


@pytest.fixture
def wait_for() -> Callable[[Callable[[], bool]], None]:
    def wait(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
        end_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while not condition():
            assert time.monotonic() < end_s, "the condition did not come true in time"
            pause.wait(0.02)

    return wait


@pytest.fixture
def token() -> str:
    return TOKEN
