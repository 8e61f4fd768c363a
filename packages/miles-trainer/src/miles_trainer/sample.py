"""One trajectory as the trainer reads it.

Shapes: T tokens (prompt and response), R expert rows, L routed (MoE) layers, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """Recorded routes. Row r belongs to token r; `rows` holds only the rows that exist, in order.

    `missing_spans` are (start, count) over the T-1 row positions that have no row; they are not replayed.
    `layers` are the global indices of the routed layers.
    """

    rows: NDArray[np.integer]  # [R, L, K]
    missing_spans: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    num_experts: int
    top_k: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One linear path. A token with mask 1 was sampled by the policy; its log-probability is at the same index.

    `token_ids` int32 [T]; `loss_mask` uint8 [T]; `logprobs` float32 [T], nats, 0 where not sampled;
    `version_spans` (start, version) over the T tokens, version -1 where not sampled; `reward` raw, before
    normalisation; `temperature` of the rollout (1.0 for greedy). Samples of one `group_id` are normalised together;
    those of one `rollout_id` come from one execution and share their reward and their denominator.
    """

    group_id: str
    rollout_id: str
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32]
    version_spans: tuple[tuple[int, int], ...]
    reward: float
    temperature: float = 1.0
    routed_experts: RoutedExperts | None = None
