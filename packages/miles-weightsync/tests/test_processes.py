"""Real processes: bytes that arrive equal, and what is left when one side is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_weightsync import SessionError, WeightPublisher, WeightSyncConfig, as_wire, manifest_of
from miles_weightsync.testing import ArraySource

RPC = {"timeout_s": 30, "lock_wait_s": 20}


@pytest.fixture
def odd_tensors() -> dict[str, torch.Tensor]:
    """Every kind of tensor: bfloat16, fp8 codes (NaN and infinities among them), scalars, empty ones, experts."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return {
        "model.layers.0.q_proj.weight": torch.randn(33, 7, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "model.layers.0.q_proj.weight_scale_inv": torch.ones(1, 1),
        "model.layers.0.down_proj.weight": codes.view(torch.float8_e4m3fn).reshape(16, 16),
        "model.layers.0.down_proj.weight_scale": codes.view(torch.float8_e8m0fnu),
        "model.layers.0.mlp.experts.0.up_proj.weight": codes.repeat(2).view(torch.bfloat16),
        "model.layers.0.mlp.experts.1.up_proj.weight": torch.full((3,), float("nan"), dtype=torch.float16),
        "model.scalar": torch.tensor(3, dtype=torch.int32),
        "model.empty": torch.zeros(0, 5, dtype=torch.bfloat16),
        "model.bytes": torch.arange(-5, 5, dtype=torch.int8),
    }


@pytest.mark.verifies("torch", "weights arrive bit equal over gloo, shared memory and TCP")
@pytest.mark.parametrize("transport", ["shm", "gloo", "tcp"])
def test_every_kind_of_tensor_arrives_bit_equal(transport: str, start_process: Any, odd_tensors: Any) -> None:
    wire = {name: as_wire(tensor) for name, tensor in odd_tensors.items()}
    engines = [start_process(wire, engine_id=f"e{i}") for i in range(2)]
    config = WeightSyncConfig(transport=transport, bucket_bytes=600, rpc=RPC)  # type: ignore[arg-type]
    sinks = [engine.sink() for engine in engines]
    with WeightPublisher(ArraySource(odd_tensors), sinks, config=config) as publisher:
        report = publisher.publish(1)
        assert (report.outcome, report.engines_ok) == ("ok", 2)
        for sink in sinks:
            assert sink.digests() == manifest_of(1, wire.items()).digests()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_killed_engine_is_dead_and_the_others_go_on(
    transport: str, start_process: Any, arrays: Mapping[str, Any], tensors: Any
) -> None:
    victim, survivor = start_process(engine_id="victim"), start_process(engine_id="survivor")

    def kill_at(event: Any) -> None:
        if event.action == "bucket n1" and victim.process.poll() is None:
            victim.kill()

    config = WeightSyncConfig(transport=transport, bucket_bytes=8000, rpc=RPC)  # type: ignore[arg-type]
    sinks = [victim.sink(), survivor.sink()]
    with WeightPublisher(ArraySource(arrays), sinks, config=config, on_event=kill_at) as publisher:
        report = publisher.publish(1)
        states = {engine.engine_id: (engine.state, engine.version) for engine in report.engines}
        assert (report.outcome, states) == ("partial", {"victim": ("dead", None), "survivor": ("serving", 1)})
        assert ("rebuild" in report.actions) == (transport == "gloo")
        assert sinks[1].digests() == manifest_of(1, tensors.items()).digests()
    assert not [name for name in Path("/dev/shm").glob("miles-ws-*") if _is_ours(name)]


def _is_ours(path: Path) -> bool:
    """Segments of other tests on this machine are held by their writers; ours are closed."""
    from miles_weightsync.segments import sweep_abandoned

    return path.name in sweep_abandoned(path.parent)


PUBLISHER = """
import json, sys
import numpy as np
from pathlib import Path
from miles_weightsync import ReceiverSink, WeightPublisher, WeightSyncConfig
from miles_weightsync.testing import ArraySource

options = json.loads(sys.argv[1])
arrays = {name: np.zeros(shape, np.float32) for name, shape in options["arrays"]}
config = WeightSyncConfig(bucket_bytes=8000, receiver={"shm_dir": options["shm_dir"]})

def stop_at(event):
    if event.action == options["stop_at"]:
        print(event.action, flush=True)
        sys.stdin.read()

sinks = [ReceiverSink(address, options["token"]) for address in options["addresses"]]
WeightPublisher(ArraySource(arrays), sinks, config=config, on_event=stop_at).publish(5)
"""


@pytest.mark.parametrize(("stop_at", "state"), [("begin", "paused"), ("bucket n0", "paused"), ("commit", "poisoned")])
def test_a_killed_publisher_leaves_no_half_version_in_service(
    stop_at: str,
    state: str,
    start_engine: Any,
    arrays: Mapping[str, Any],
    tmp_path: Path,
    token: str,
    wait_for: Callable[[Callable[[], bool]], None],
) -> None:
    floats = {name: array for name, array in arrays.items() if array.dtype == "float32"}
    wire = {name: as_wire(array) for name, array in floats.items()}
    engine = start_engine(tensors=wire, receiver={"session_timeout_s": 2.0, "shm_dir": tmp_path})
    options = {
        "arrays": [[name, list(array.shape)] for name, array in floats.items()],
        "shm_dir": str(tmp_path),
        "stop_at": stop_at,
        "token": token,
        "addresses": [engine.address],
    }
    command = [sys.executable, "-c", PUBLISHER, json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == stop_at
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    sink = engine.sink()
    wait_for(lambda: sink.describe().state == state)
    assert not sink.describe().routable
    assert sink.describe().version == (0 if state == "paused" else None)
    if state == "poisoned":
        with pytest.raises(SessionError):
            sink.resume()
        wait_for(lambda: not list(tmp_path.iterdir()))
    config = WeightSyncConfig(bucket_bytes=8000, receiver={"shm_dir": tmp_path}, rpc=RPC)  # type: ignore[arg-type]
    with WeightPublisher(ArraySource(floats), [engine.sink()], config=config) as publisher:
        assert publisher.publish(6).outcome == "ok", "a new publisher installs the whole version"
    assert engine.port.stored() == {name: bytes(tensor.data) for name, tensor in wire.items()}
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_printed_when_a_run_with_shared_memory_ends(start_process: Any, arrays: Any, token: str) -> None:
    floats = {name: array for name, array in arrays.items() if array.dtype == "float32"}
    engine = start_process({name: as_wire(array) for name, array in floats.items()})
    options = {
        "arrays": [[name, list(array.shape)] for name, array in floats.items()],
        "shm_dir": None,
        "stop_at": "never",
        "token": token,
        "addresses": [engine.address],
    }
    command = [sys.executable, "-W", "error", "-c", PUBLISHER + "\n", json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert "resource_tracker" not in done.stderr
