"""Returns and advantages that differ from token to token (spec 1.3, 1.4). Not selectable in the trainer's options yet.

Arrays are of one sample: float64 [T], masks bool [T].
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

FloatT = NDArray[np.float64]
BoolT = NDArray[np.bool_]


def discounted_returns(
    reward: float,
    kl_T: FloatT,
    mask_T: BoolT,
    *,
    gamma: float,
    kl_coef: float,
    over: Literal["trainable", "all"] = "trainable",
) -> FloatT:
    """REINFORCE++: G_t = r_t + γ G_(t+1) with r_t = -kl_coef·kl_t and the reward at the last trainable token.

    Masked tokens are absent: no reward, no step of discount, return 0. `over="all"` counts them in, as some do.
    A sample without a trainable token has returns 0.
    """
    returns_T = np.zeros(len(kl_T), dtype=np.float64)
    if not mask_T.any():
        return returns_T
    positions = np.flatnonzero(mask_T) if over == "trainable" else np.arange(len(kl_T))
    following = 0.0
    for position in positions[::-1]:
        terminal = reward if position == np.flatnonzero(mask_T)[-1] else 0.0
        following = terminal - kl_coef * kl_T[position] + gamma * following
        returns_T[position] = following
    return returns_T


def baseline_advantages(centred_reward: float, kl_T: FloatT, *, kl_coef: float) -> FloatT:
    """REINFORCE++ with the group's mean as baseline: (R - mean) - kl_coef·kl_t on every token, before whitening."""
    result: FloatT = centred_reward - kl_coef * kl_T
    return result


def generalized_advantages(
    reward: float,
    values_T: FloatT,
    kl_T: FloatT,
    mask_T: BoolT,
    *,
    gamma: float,
    lambd: float,
    kl_coef: float,
) -> tuple[FloatT, FloatT]:
    """GAE over the trainable tokens in order: (advantages, returns = advantages + values), 0 at masked ones.

    The value after the last trainable token is 0, the reward arrives there, and KL of masked tokens is left out.
    """
    advantages_T = np.zeros(len(values_T), dtype=np.float64)
    following_value = following = 0.0
    terminal = reward
    for position in np.flatnonzero(mask_T)[::-1]:
        delta = terminal - kl_coef * kl_T[position] + gamma * following_value - values_T[position]
        following = delta + gamma * lambd * following
        advantages_T[position] = following
        following_value, terminal = values_T[position], 0.0
    return advantages_T, np.where(mask_T, advantages_T + values_T, 0.0)
