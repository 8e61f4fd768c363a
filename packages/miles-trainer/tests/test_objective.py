"""The objective's functions: groups, emptiness, masks and bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles_trainer import GroupError
from miles_trainer.objective.advantages import grpo_advantages, leave_one_out_advantages
from miles_trainer.objective.aggregate import step_denominators, token_weights
from miles_trainer.objective.kl import kl_estimate
from miles_trainer.objective.logprob import entropy, tempered_log_softmax
from miles_trainer.objective.mismatch import mismatch
from miles_trainer.objective.policy_loss import clipped_policy_loss
from miles_trainer.objective.ragged import masked_mean_by_sample, sample_index
from miles_trainer.objective.token_terms import TermOptions, TokenInputs, token_terms, total_loss


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-3, 3)), min_size=1, max_size=12), st.randoms())
def test_advantages_follow_the_group_ids_whatever_the_order(rollouts: list[tuple[str, int]], random: object) -> None:
    order = list(range(len(rollouts)))
    random.shuffle(order)  # type: ignore[attr-defined]
    plain = grpo_advantages([r for _, r in rollouts], [g for g, _ in rollouts])
    shuffled = grpo_advantages([rollouts[i][1] for i in order], [rollouts[i][0] for i in order])
    np.testing.assert_allclose(shuffled, plain[order], rtol=1e-12, atol=1e-12)


@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_equal_rewards_give_exactly_zero(reward: float, members: int) -> None:
    for estimator in (grpo_advantages, leave_one_out_advantages):
        assert not estimator([reward] * members, ["g"] * members).any()


def test_a_group_of_one_gives_zero_with_and_without_standard_deviation() -> None:
    assert grpo_advantages([0.7], ["g"], normalize_std=True) == 0
    assert grpo_advantages([0.7], ["g"], normalize_std=False) == 0


def test_absent_group_ids_and_rewards_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(GroupError, match="2 rewards but 1 group ids"):
        grpo_advantages([1.0, 0.0], ["g"])
    with pytest.raises(GroupError, match="not a finite number"):
        grpo_advantages([math.nan, 0.0], ["g", "g"])


def _inputs(logprobs: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> TokenInputs:
    return TokenInputs(
        logprobs=logprobs,
        entropy=torch.ones_like(logprobs),
        old=other,
        rollout=other,
        reference=other,
        advantages=torch.ones_like(logprobs),
        mask=mask,
        sample_index=torch.zeros(len(mask), dtype=torch.int64),
        n_samples=1,
    )


def test_what_stands_at_inactive_tokens_reaches_neither_loss_nor_gradient() -> None:
    options = TermOptions(0.2, 0.2, dual_clip=3.0, tis=(0.0, 2.0), kl_coef=0.1, kl_unbiased=True, entropy_coef=0.1)
    mask = torch.tensor([True, False, True])
    results = []
    for poison in (0.0, math.nan, math.inf, -math.inf):
        other = torch.tensor([-1.0, poison, -2.0])
        logprobs = torch.tensor([-1.5, -1.0, -1.8], requires_grad=True)
        loss = total_loss(token_terms(_inputs(logprobs, other, mask), options), torch.ones(3) / 3, options)
        loss.backward()
        assert logprobs.grad is not None
        results.append((float(loss.detach()), logprobs.grad.tolist()))
    assert all(result == results[0] for result in results)
    assert results[0][1][1] == 0
    assert math.isfinite(results[0][0])


def test_the_clip_indicator_ignores_dual_clip() -> None:
    found = clipped_policy_loss(torch.tensor([3.0]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2, dual_clip=2.0)
    assert float(found.loss) == 2.0
    assert not bool(found.clipped)


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "constant"])
def test_samples_of_one_rollout_weigh_like_one_sample(aggregation: str) -> None:
    whole = torch.ones(6, dtype=torch.bool)
    joined = step_denominators(whole, sample_index([4, 2]), ["a", "b"], aggregation, constant=10.0)  # type: ignore[arg-type]
    split = step_denominators(whole, sample_index([1, 3, 2]), ["a", "a", "b"], aggregation, constant=10.0)  # type: ignore[arg-type]
    torch.testing.assert_close(
        token_weights(whole, sample_index([4, 2]), joined), token_weights(whole, sample_index([1, 3, 2]), split)
    )


def test_a_fully_masked_rollout_adds_nothing_and_counts() -> None:
    mask = torch.tensor([True, True, False])
    found = step_denominators(mask, sample_index([2, 1]), ["a", "b"], "sample_mean")
    assert token_weights(mask, sample_index([2, 1]), found).tolist() == [0.25, 0.25, 0.0]


def test_means_of_samples_without_active_tokens_are_zero() -> None:
    values = torch.tensor([1.0, math.nan])
    found = masked_mean_by_sample(values, torch.tensor([True, False]), torch.tensor([0, 1]), 2)
    assert found.tolist() == [1.0, 0.0]


def test_the_unbiased_gradient_equals_that_of_the_divergence() -> None:
    """Over a vocabulary of three, the expectation under the policy of the unbiased k3 gradient is the KL's gradient."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.1, -0.4], dtype=torch.float64), -1)
    policy = torch.log_softmax(logits, -1)
    exact = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)[0]
    estimate = kl_estimate(policy, reference, "k3", importance_old_M=policy.detach())
    sampled = torch.autograd.grad((policy.detach().exp() * estimate).sum(), logits)[0]
    torch.testing.assert_close(sampled, exact)


def test_entropy_of_a_distribution_with_an_impossible_token_is_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert entropy(tempered_log_softmax(logits, 1.0)).item() == pytest.approx(math.log(2))


def test_comparing_nothing_is_an_error() -> None:
    nothing = torch.zeros(2, dtype=torch.bool)
    with pytest.raises(ValueError, match="no active token"):
        mismatch(torch.zeros(2), torch.zeros(2), nothing, torch.zeros(2, dtype=torch.int64), 1)
