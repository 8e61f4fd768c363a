"""Capture of routed experts: which experts each MoE layer chose for each packed token.

Routers of transformers 5 are modules named `…TopKRouter` that return (logits, weights, indices).

Shapes: N packed tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from miles_rollout.local.errors import EngineSetupError
from miles_rollout.local.kv import RouteLayout

_LAYER_INDEX = re.compile(r"\.layers\.(\d+)\.")


class RouteCapture:
    """Forward hooks on the routers of one model; `take` gives the routes of the last forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        routers = [(name, m) for name, m in model.named_modules() if type(m).__name__.endswith("TopKRouter")]
        self.layout = _route_layout(routers)
        self._taken: dict[int, torch.Tensor] = {}
        for layer, (_, router) in zip(self.layout.layers, routers, strict=True):
            router.register_forward_hook(self._hook(layer))

    def take(self, tokens: int) -> NDArray[np.int64]:
        """Return the routes [N, L, K] of the forward that just ran over `tokens` packed tokens."""
        captured, self._taken = self._taken, {}
        shape = (tokens, self.layout.top_k)
        for layer in self.layout.layers:
            found = tuple(captured[layer].shape) if layer in captured else None
            if found != shape:
                raise EngineSetupError(f"router of layer {layer} gave routes of shape {found}; {shape} was expected")
        if not self.layout.layers:
            return np.zeros((tokens, 0, 0), dtype=np.int64)
        return torch.stack([captured[layer] for layer in self.layout.layers], dim=1).numpy()

    def _hook(self, layer: int) -> Any:
        def capture(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            self._taken[layer] = output[2].detach()

        return capture


def _route_layout(routers: list[tuple[str, torch.nn.Module]]) -> RouteLayout:
    if not routers:
        return RouteLayout()
    sizes = {(int(getattr(m, "num_experts", 0)), int(getattr(m, "top_k", 0))) for _, m in routers}
    if len(sizes) != 1 or 0 in next(iter(sizes)):
        raise EngineSetupError(f"routers differ in (experts, top k): {sorted(sizes)}", code="unsupported_model")
    num_experts, top_k = next(iter(sizes))
    return RouteLayout(tuple(_layer_index(name) for name, _ in routers), num_experts, top_k)


def _layer_index(name: str) -> int:
    found = _LAYER_INDEX.search(f".{name}")
    if found is None:
        raise EngineSetupError(f"router {name!r} lies in no decoder layer", code="unsupported_model")
    return int(found.group(1))
