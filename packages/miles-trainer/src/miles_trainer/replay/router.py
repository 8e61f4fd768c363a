"""Routers that follow recorded experts, through a forward hook on each live router of a Hugging Face Qwen3-MoE.

The hook replaces the final top-k choice only: weights are the router's own probabilities at the recorded experts,
renormalised if the model does, so the gradient reaches the router. Rows are kept by (micro-batch, layer), not in
queues: a pass repeated by the score, the update or a recomputation finds the same rows.

Shapes: N packed tokens, E experts, L routed layers, K experts a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from miles_trainer.errors import ReplayError
from miles_trainer.micro_batch import MicroBatch
from miles_trainer.replay.records import HOLE, RoutesRLK, dense_rows
from miles_trainer.sample import RoutedExperts, Sample

RouterOutput = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def find_routers(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Global layer index → live router module, ascending."""
    routers: dict[int, torch.nn.Module] = {}
    for name, module in model.named_modules():
        match = re.search(r"\blayers\.(\d+)\.", name)
        if isinstance(module, Qwen3MoeTopKRouter) and match:
            routers[int(match[1])] = module
    return dict(sorted(routers.items()))


class RouteCounts(NamedTuple):
    """A route is the set of experts of one token in one layer; a choice is one expert of it."""

    routes: int
    differing_routes: int
    choices: int
    differing_choices: int


class RouteReplay:
    """Recorded routes of one step and the hooks that play them. `close` removes the hooks."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Bind to the model's live routers. Raises ReplayError `layers` when it has none of a known kind."""
        routers = find_routers(model)
        if not routers:
            raise ReplayError("layers", "replay.enabled is set, but the model has no Qwen3-MoE routers: turn it off")
        self.layers = tuple(routers)
        first: Any = routers[self.layers[0]]
        self.num_experts, self.top_k = int(first.num_experts), int(first.top_k)
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        self._shares: dict[int, torch.Tensor] = {}
        self._differing: dict[tuple[int, int], tuple[int, int]] = {}
        self._playing: int | None = None
        self._hooks = [self._bind(layer, router) for layer, router in routers.items()]

    def _bind(self, layer: int, router: torch.nn.Module) -> torch.utils.hooks.RemovableHandle:
        normalise = bool(router.norm_topk_prob)

        def hook(_: torch.nn.Module, __: tuple[torch.Tensor, ...], output: RouterOutput) -> RouterOutput | None:
            return None if self._playing is None else self._route(self._playing, layer, output, normalise)

        return router.register_forward_hook(hook)

    def check(self, samples: Iterable[Sample]) -> None:
        """Raise ReplayError when a sample's record does not fit the model or its own tokens."""
        self.rows(samples)

    def _check_model(self, routes: RoutedExperts, sample: Sample) -> None:
        if tuple(routes.layers) != self.layers:
            raise ReplayError(
                "layers",
                f"rollout {sample.rollout_id}: {len(routes.layers)} recorded layers {tuple(routes.layers)}, but the "
                "model has "
                f"{len(self.layers)} live routers at {self.layers}",
            )
        if (routes.num_experts, routes.top_k) != (self.num_experts, self.top_k):
            raise ReplayError(
                "top_k",
                f"rollout {sample.rollout_id}: recorded top {routes.top_k} of {routes.num_experts} experts, the model "
                "routes top "
                f"{self.top_k} of {self.num_experts}",
            )

    def rows(self, samples: Iterable[Sample]) -> list[RoutesRLK]:
        """int32 [T, L, K] of each sample, a row of -1 where the router chooses for itself. Raises ReplayError."""
        return [self._dense(sample) for sample in samples]

    def _dense(self, sample: Sample) -> RoutesRLK:
        tokens = len(sample.token_ids)
        if sample.routed_experts is None:
            return np.full((tokens, len(self.layers), self.top_k), HOLE, dtype=np.int32)
        self._check_model(sample.routed_experts, sample)
        return dense_rows(sample.routed_experts, tokens)

    @contextmanager
    def loaded(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Keep the routes of a step's micro-batches within the block. Raises ReplayError `rows` for one without."""
        try:
            for micro in micro_batches:
                self._load(micro)
            yield
        finally:
            self._rows.clear()
            self._shares.clear()
            self._differing.clear()

    def _load(self, micro: MicroBatch) -> None:
        if micro.index in self._shares:
            raise ReplayError("rows", f"micro-batch {micro.index} already has routes: one step at a time")
        if micro.routes is None:
            raise ReplayError("rows", f"micro-batch {micro.index} was planned without routes")
        self._shares[micro.index] = torch.from_numpy(micro.shares)
        rows_NLK = torch.from_numpy(micro.routes).long()
        for position, layer in enumerate(self.layers):
            self._rows[micro.index, layer] = rows_NLK[:, position].contiguous()

    @contextmanager
    def playing(self, micro_batch: int) -> Iterator[None]:
        """Within it, routers follow the routes of this micro-batch. Spans the backward too, for recomputed forwards."""
        if (micro_batch, self.layers[0]) not in self._rows:
            raise ReplayError("rows", f"micro-batch {micro_batch} has no routes: load them before its first pass")
        self._playing = micro_batch
        try:
            yield
        finally:
            self._playing = None

    def _route(self, micro_batch: int, layer: int, output: RouterOutput, normalise: bool) -> RouterOutput | None:
        logits_NE, _, own_NK = output
        recorded_NK = self._rows[micro_batch, layer]
        if len(recorded_NK) != len(own_NK):
            raise ReplayError(
                "rows",
                f"micro-batch {micro_batch}: {len(recorded_NK)} recorded rows but layer {layer} routes {len(own_NK)} "
                "tokens",
            )
        present_N1 = recorded_NK[:, :1] != HOLE
        agrees_NK = (recorded_NK[:, :, None] == own_NK[:, None, :]).any(-1)
        differs_NK = ~agrees_NK & present_N1
        shares_N = self._shares[micro_batch]
        self._differing[micro_batch, layer] = (
            int((differs_NK.any(-1) * shares_N).sum()),
            int((differs_NK.sum(-1) * shares_N).sum()),
        )
        chosen_NK = torch.where(present_N1, recorded_NK, own_NK)
        probability_NE = torch.nn.functional.softmax(logits_NE, dtype=torch.float, dim=-1)
        weight_NK = probability_NE.gather(-1, chosen_NK)
        if normalise:
            weight_NK = weight_NK / weight_NK.sum(dim=-1, keepdim=True)
        return logits_NE, weight_NK.to(logits_NE.dtype), chosen_NK

    def counts(self) -> RouteCounts:
        """What was played in this step, and what the model's own routers would have done otherwise.

        A token that several samples share counts once for each of them, so that packing changes no count.
        """
        choices = sum(int(((self._rows[key] != HOLE).sum(-1) * self._shares[key[0]]).sum()) for key in self._differing)
        routes, single = (sum(column) for column in zip(*self._differing.values(), strict=True)) if choices else (0, 0)
        return RouteCounts(choices // self.top_k, routes, choices, single)

    def close(self) -> None:
        """Remove the hooks; the routers choose for themselves again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
