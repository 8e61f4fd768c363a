"""How fast the FP8 block reference quantises and dequantises on this machine's CPU, one thread."""

from __future__ import annotations

import json
import time

import torch

from miles_quant import Fp8Block, dequantize, quantize

SHAPE = (2048, 2048)
REPEATS = 5


def best_seconds(call: object) -> float:
    assert callable(call)
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).bfloat16()
    for variant in ("recip", "ue8m0"):
        format = Fp8Block(variant=variant)
        stored = quantize(weight, format)
        for name, seconds in (
            ("quantize", best_seconds(lambda format=format: quantize(weight, format))),
            ("dequantize", best_seconds(lambda stored=stored: dequantize(stored))),
        ):
            rate = weight.numel() / seconds / 1e6
            print(json.dumps({"name": f"fp8_block/{variant}/{name}", "value": round(rate, 1), "unit": "Melements/s"}))


if __name__ == "__main__":
    main()
