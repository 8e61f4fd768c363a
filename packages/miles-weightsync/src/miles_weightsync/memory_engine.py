"""An engine process that holds weights in memory, for tests of what happens between processes.

    python -m miles_weightsync.memory_engine '{"token": "t", "tensors": [["a", "F32", [2, 3]]]}'

prints {"address": "127.0.0.1:…"} and serves until its standard input closes. Further keys: `engine_id`, `epoch`, and
the fields of `ReceiverConfig` under `receiver`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from miles_weightsync.config import ReceiverConfig
from miles_weightsync.receiver import EngineReceiver
from miles_weightsync.tensors import RawTensor, tensor_nbytes
from miles_weightsync.testing import MemoryPort


def main() -> None:
    """Serve the engine that the first argument describes."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    port = MemoryPort(
        {name: _zeros(dtype, tuple(shape)) for name, dtype, shape in options["tensors"]},
        engine_id=options.get("engine_id", "memory:1"),
        epoch=options.get("epoch", 1),
    )
    config = ReceiverConfig(**options.get("receiver", {}))
    with EngineReceiver(port, token=options["token"], config=config) as receiver:
        print(json.dumps({"address": receiver.address}), flush=True)
        sys.stdin.read()


def _zeros(dtype: str, shape: tuple[int, ...]) -> RawTensor:
    return RawTensor(dtype, shape, memoryview(bytes(tensor_nbytes(dtype, shape))))


if __name__ == "__main__":
    main()
