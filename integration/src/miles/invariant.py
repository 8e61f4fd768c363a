"""Batch-invariant numerics: a token's numbers do not depend on what else is in the batch.

Every matrix product runs on blocks of a fixed number of rows, the last one padded with zeros, and attention sees a
fixed number of keys. A kernel that gets the same shape each time adds the products of one row in the same order each
time, whatever the other rows hold; `integration/tests/test_invariant.py` varies neighbours and row position to prove
it on the machine at hand. Serves the `Numerics` protocols of miles-rollout and miles-trainer, so both sides compute
bit for bit alike.

Only matrix products and attention are replaced. torch's CPU `silu` computes the last elements of a tensor another way,
so the widths it sees (the MLP's) must be multiples of 32, as those of the toy and of common models are.

Shapes: Q query tokens, S key tokens, H query heads, G key/value heads, D head size, R rows, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from miles.errors import ContextTooLongError


class FixedBlocks:
    """Numerics on fixed blocks of `block_rows` rows and `max_context` keys.

    `max_context` is a constant of the run: engine and trainer must be given the same one. Sequences beyond it raise
    `ContextTooLongError`.
    """

    def __init__(self, *, max_context: int, block_rows: int = 32) -> None:
        if max_context <= 0 or block_rows <= 0:
            raise ValueError(f"max_context and block_rows must be positive, got {max_context} and {block_rows}")
        self.max_context = max_context
        self.block_rows = block_rows

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Compute every linear layer entered inside on fixed row blocks."""
        with _BlockedLinear(self.block_rows):
            yield

    def attend(
        self,
        query_QHD: torch.Tensor,
        key_SGD: torch.Tensor,
        value_SGD: torch.Tensor,
        first_position: int,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of one sequence, [Q, H, D], over `max_context` keys of which later ones weigh 0."""
        n_queries, n_heads, _ = query_QHD.shape
        n_keys, n_groups, _ = key_SGD.shape
        if n_keys > self.max_context:
            raise ContextTooLongError(
                f"a sequence of {n_keys} tokens does not fit the batch-invariant context of {self.max_context}: "
                "raise numerics.max_context (both sides use the same value) or shorten the task"
            )
        key_HDS = _pad_rows(key_SGD, self.max_context).repeat_interleave(n_heads // n_groups, dim=1).permute(1, 2, 0)
        value_HSD = _pad_rows(value_SGD, self.max_context).repeat_interleave(n_heads // n_groups, dim=1).transpose(0, 1)
        blocks = []
        for start in range(0, n_queries, self.block_rows):
            query_BHD = query_QHD[start : start + self.block_rows]
            used = query_BHD.shape[0]
            query_HBD = _pad_rows(query_BHD, self.block_rows).transpose(0, 1)
            positions_B = torch.arange(self.block_rows, device=query_QHD.device) + (first_position + start)
            visible_BS = torch.arange(self.max_context, device=query_QHD.device)[None, :] <= positions_B[:, None]
            scores_HBS = (query_HBD.contiguous() @ key_HDS.contiguous()).float() * scale
            weights_HBS = scores_HBS.masked_fill(~visible_BS, float("-inf")).softmax(dim=-1).to(value_HSD.dtype)
            blocks.append((weights_HBS @ value_HSD.contiguous()).transpose(0, 1)[:used])
        return torch.cat(blocks)


class _BlockedLinear(TorchFunctionMode):
    """Replaces `torch.nn.functional.linear` inside the context: the one hook that reaches unmodified model code."""

    def __init__(self, block_rows: int) -> None:
        super().__init__()
        self.block_rows = block_rows

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear:
            return _blocked_linear(func, self.block_rows, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _blocked_linear(
    linear: Callable[..., torch.Tensor],
    block_rows: int,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    rows_RK = input.reshape(-1, input.shape[-1])
    n_rows = rows_RK.shape[0]
    padded_RK = _pad_rows(rows_RK, -(-n_rows // block_rows) * block_rows)
    out = torch.cat(
        [linear(block_BK, weight, bias) for block_BK in torch.split(padded_RK, block_rows)] or [padded_RK @ weight.T]
    )
    return out[:n_rows].reshape(*input.shape[:-1], weight.shape[0])


def _pad_rows(tensor: torch.Tensor, n_rows: int) -> torch.Tensor:
    missing = n_rows - tensor.shape[0]
    if missing == 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
