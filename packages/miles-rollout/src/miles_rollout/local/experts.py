"""Routed experts: which ones each MoE layer chose for each packed token, and routers that repeat recorded choices.

Routers that are known here return (logits, weights, indices): weights are the softmax over all experts at the chosen
ones, divided by their sum if `norm_topk_prob` is set. A repeated choice gets its weights by the same formula from the
logits of today.

Shapes: N packed tokens, E experts, L MoE layers, K experts per token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from miles_rollout.local.errors import EngineSetupError
from miles_rollout.local.routes import HOLE, RouteLayout

KNOWN_ROUTERS = frozenset({"FlexOlmoTopKRouter", "OlmoeTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"})
"""Class names in transformers; other routers are served, but their routes are neither recorded nor repeated."""

_LAYER_INDEX = re.compile(r"\.layers\.(\d+)\.")
RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RouteCapture:
    """Forward hooks on the routers of one model; `take` gives the routes of the last forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        routers = [(name, m) for name, m in model.named_modules() if type(m).__name__ in KNOWN_ROUTERS]
        self.layout = _route_layout(routers)
        self._taken: dict[int, torch.Tensor] = {}
        self._repeated_NLK: torch.Tensor | None = None
        for index, (_, router) in enumerate(routers):
            router.register_forward_hook(self._hook(index))

    @contextmanager
    def repeating(self, recorded_NLK: torch.Tensor | None) -> Iterator[None]:
        """Within it, a forward over N packed tokens takes these routes; where they have holes, routers choose."""
        self._repeated_NLK = recorded_NLK
        try:
            yield
        finally:
            self._repeated_NLK = None

    def take(self, tokens: int) -> NDArray[np.int64]:
        """Return the routes [N, L, K] of the forward that just ran over `tokens` packed tokens."""
        captured, self._taken = self._taken, {}
        shape = (tokens, self.layout.top_k)
        for index, layer in enumerate(self.layout.layers):
            found = tuple(captured[index].shape) if index in captured else None
            if found != shape:
                raise EngineSetupError(f"router of layer {layer} gave routes of shape {found}; {shape} was expected")
        if not self.layout.layers:
            return np.zeros((tokens, 0, 0), dtype=np.int64)
        return torch.stack([captured[index] for index in range(len(self.layout.layers))], dim=1).numpy()

    def _hook(self, index: int) -> Any:
        def capture(router: torch.nn.Module, _args: Any, output: RouterOutput) -> RouterOutput | None:
            repeated_NLK = self._repeated_NLK
            routed = output if repeated_NLK is None else repeat_choice(router, repeated_NLK[:, index], output)
            self._taken[index] = routed[2].detach()
            return None if repeated_NLK is None else routed

        return capture


def repeat_choice(router: Any, recorded_NK: torch.Tensor, output: RouterOutput) -> RouterOutput:
    """Return a router's output with recorded experts in place of its own choice, except in rows of holes."""
    logits_NE, own_weight_NK, own_NK = output
    present_N1 = recorded_NK[:, :1] != HOLE
    chosen_NK = torch.where(present_N1, recorded_NK, own_NK)
    weight_NK = torch.softmax(logits_NE, dim=-1, dtype=torch.float32).gather(-1, chosen_NK)
    if router.norm_topk_prob:
        weight_NK = weight_NK / weight_NK.sum(dim=-1, keepdim=True)
    return logits_NE, torch.where(present_N1, weight_NK.to(own_weight_NK.dtype), own_weight_NK), chosen_NK


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
