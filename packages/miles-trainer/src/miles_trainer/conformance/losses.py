"""The loss families: inputs as flat float64 tensors, results and gradients as nested lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from miles_trainer.config import OptimizerConfig
from miles_trainer.conformance import more_losses
from miles_trainer.conformance.arrays import Case, flat, flat_mask, gradient, index_of, leaf, ragged, vector
from miles_trainer.errors import NotBuiltError
from miles_trainer.objective.advantages import (
    grpo_advantages,
    leave_one_out_advantages,
    length_weighted_advantages,
    mean_centred_advantages,
)
from miles_trainer.objective.aggregate import Denominators, step_denominators, token_weights
from miles_trainer.objective.corrections import clip_or_pop, importance_ratio, truncated_importance
from miles_trainer.objective.kl import kl_estimate
from miles_trainer.objective.logprob import entropy, tempered_log_softmax, token_logprobs
from miles_trainer.objective.mismatch import effective_sample_size, mismatch
from miles_trainer.objective.policy_loss import clipped_policy_loss, log_ratio, sequence_log_ratio
from miles_trainer.objective.token_terms import TermOptions, TokenInputs, supervised_loss, token_terms, total_loss
from miles_trainer.optim import build_adamw, clipped_update


def compute(family: str, case: Case) -> dict[str, Any]:
    """The fields of a case's `expected` that are built. Raises NotBuiltError for a family that is not."""
    if family not in FAMILIES:
        raise NotBuiltError(f"not built: family {family}")
    return FAMILIES[family](case["options"], case["inputs"])


def _aggregation(options: Case, inputs: Case) -> dict[str, Any]:
    rows = inputs["loss_masks"]
    values, mask, index = flat(inputs["per_token"]), flat_mask(rows), index_of(rows)
    samples, rollouts = list(range(len(rows))), inputs["rollout_ids"]

    def reduced(ids: Sequence[int], mode: Any, batch: float | None = None, constant: float | None = None) -> float:
        found = step_denominators(mask, index, ids, mode, constant=constant)
        weights = token_weights(mask, index, found if batch is None else Denominators(found.per_sample, batch))
        return float((values * weights).sum())

    nonempty = float(sum(any(row) for row in rows))
    weights = token_weights(mask, index, step_denominators(mask, index, samples, "token_mean"))
    return {
        "sum_of_sample_means": reduced(samples, "sample_mean", 1.0),
        "sum_of_tokens": reduced(samples, "token_mean", 1.0),
        "token_mean": reduced(samples, "token_mean"),
        "sample_mean_all": reduced(samples, "sample_mean"),
        "sample_mean_nonempty": reduced(samples, "sample_mean", nonempty),
        "sum_of_rollout_means": reduced(rollouts, "sample_mean", 1.0),
        "rollout_mean": reduced(rollouts, "sample_mean"),
        "constant_1000": reduced(samples, "constant", 1.0, 1000.0),
        "seq_mean_token_sum_nonempty": reduced(samples, "token_mean", nonempty),
        "sft_nll_token_mean": float(supervised_loss(values, weights)),
    }


def _groups(options: Case, inputs: Case) -> dict[str, Any]:
    rewards, ids = inputs["rewards"], inputs["group_ids"]
    if options.get("estimator") == "opo":
        return {"advantage_per_sample": length_weighted_advantages(rewards, ids, inputs["response_lengths"]).tolist()}
    normalised = grpo_advantages(
        rewards, ids, normalize_std=options["grpo_std_normalization"], epsilon=options["std_eps"]
    )
    return {
        "grpo_advantage_per_sample": normalised.tolist(),
        "mean_centred": mean_centred_advantages(rewards, ids).tolist(),
        "rloo": leave_one_out_advantages(rewards, ids).tolist(),
    }


def _estimator(name: str) -> Any:
    return "low_var" if name == "low_var_kl" else name


def _kl(options: Case, inputs: Case) -> dict[str, Any]:
    logprobs = leaf(vector(inputs["log_probs"]))
    old = vector(inputs["old_log_probs"]) if options["use_unbiased_kl"] else None
    estimator = _estimator(options["kl_loss_type"])
    value = kl_estimate(logprobs, vector(inputs["ref_log_probs"]), estimator, importance_old_M=old)
    return {"kl": value.tolist(), "grad_sum_wrt_log_probs": gradient(value.sum(), logprobs).tolist()}


def _logprob(options: Case, inputs: Case) -> dict[str, Any]:
    logits = leaf(torch.tensor(inputs["logits"], dtype=torch.float64))
    log_softmax = tempered_log_softmax(logits, options["temperature"])
    chosen, spread = token_logprobs(log_softmax, torch.tensor(inputs["tokens"])), entropy(log_softmax)
    return {
        "log_probs": chosen.tolist(),
        "entropy": spread.tolist(),
        "grad_sum_log_probs_wrt_logits": torch.autograd.grad(chosen.sum(), logits, retain_graph=True)[0].tolist(),
        "grad_sum_entropy_wrt_logits": gradient(spread.sum(), logits).tolist(),
    }


def _mismatch(options: Case, inputs: Case) -> dict[str, Any]:
    rows = inputs["loss_masks"]
    trainer, rollout = flat(inputs["train_log_probs"]), flat(inputs["rollout_log_probs"])
    mask, index = flat_mask(rows), index_of(rows)
    found = mismatch(trainer, rollout, mask, index, len(rows))
    ess = effective_sample_size((trainer - rollout).exp(), mask, index, len(rows))
    return {
        "logprob_abs_diff_sample_mean": found.abs_diff_sample_mean,
        "logprob_abs_diff_token_mean": found.abs_diff_token_mean,
        "kl_k3_rollout_to_train_sample_mean": found.k3_sample_mean,
        "kl_k1_token_mean": found.k1_token_mean,
        "kl_k3_token_mean": found.k3_token_mean,
        "ess_ratio_per_sample": ess.tolist(),
        "ess_ratio_mean": float(ess.mean()),
        "train_ppl_mean": found.trainer_perplexity,
        "rollout_ppl_mean": found.rollout_perplexity,
        "log_ppl_diff_mean": found.log_perplexity_diff,
        "log_ppl_abs_diff_mean": found.log_perplexity_abs_diff,
        "ppl_ratio_mean": found.perplexity_ratio,
        "chi2_token": found.chi2_token,
        "chi2_sequence": found.chi2_sequence,
        "ratio_max": found.ratio_max,
        "ratio_min": found.ratio_min,
    }


def _corrections(options: Case, inputs: Case) -> dict[str, Any]:
    if options.get("correction") == "opsm":
        return more_losses.opsm(options, inputs)
    mask, loss = flat_mask(inputs["loss_masks"]), flat(inputs["pg_loss"])
    ratio = importance_ratio(flat(inputs["train_log_probs"]), flat(inputs["rollout_log_probs"]), torch.ones_like(mask))
    bounds = {"low": options["tis_clip_low"], "high": options["tis_clip"]}
    tis, pop = truncated_importance(ratio, **bounds), clip_or_pop(ratio, **bounds)
    return {
        "ratio": ratio.tolist(),
        "tis_weight": tis.weight.tolist(),
        "tis_pg_loss": (tis.weight * loss).tolist(),
        "tis_clip_indicator": tis.bounded.double().tolist(),
        "ratio_abs_minus_one": (ratio - 1).abs().tolist(),
        "icepop_weight": pop.weight.tolist(),
        "icepop_pg_loss": (pop.weight * loss).tolist(),
        "icepop_pop_indicator": pop.bounded.double().tolist(),
    }


def _policy(options: Case, inputs: Case) -> dict[str, Any]:
    if options["loss"] not in POLICIES:
        raise NotBuiltError(f"not built: loss {options['loss']}")
    return POLICIES[options["loss"]](options, inputs)


def _ppo(options: Case, inputs: Case) -> dict[str, Any]:
    logprobs = leaf(vector(inputs["log_probs"]))
    found = clipped_policy_loss(
        log_ratio(logprobs, vector(inputs["old_log_probs"])),
        vector(inputs["advantages"]),
        clip_low=options["eps_clip"],
        clip_high=options["eps_clip_high"],
        dual_clip=options["eps_clip_c"],
    )
    return {
        "loss": found.loss.tolist(),
        "clip_indicator": found.clipped.double().tolist(),
        "ratio": found.ratio.tolist(),
        "grad_sum_wrt_log_probs": gradient(found.loss.sum(), logprobs).tolist(),
    }


def _gspo(options: Case, inputs: Case) -> dict[str, Any]:
    rows = inputs["loss_masks"]
    mask, index = flat_mask(rows), index_of(rows)
    logprobs = leaf(flat(inputs["log_probs"]))
    change = log_ratio(logprobs, flat(inputs["old_log_probs"]), mask)
    change = sequence_log_ratio(change, mask, index, len(rows))
    bounds = {"clip_low": options["eps_clip"], "clip_high": options["eps_clip_high"]}
    found = clipped_policy_loss(change, vector(inputs["sequence_advantages"])[index], **bounds)
    weights = _sample_weights(mask, index, len(rows))
    total = (found.loss * weights).sum()
    starts = [sum(len(row) for row in rows[:i]) for i in range(len(rows))]
    return {
        "sequence_ratio": found.ratio[starts].tolist(),
        "per_token_loss_masked": ragged(torch.where(mask, found.loss, 0.0), rows),
        "clip_indicator_per_sequence": found.clipped[starts].double().tolist(),
        "sum_of_sample_means": float(total.detach()),
        "grad_of_sum_of_sample_means": ragged(gradient(total, logprobs), rows),
    }


def _sample_weights(mask: torch.Tensor, index: torch.Tensor, n_samples: int) -> torch.Tensor:
    found = step_denominators(mask, index, list(range(n_samples)), "sample_mean")
    return token_weights(mask, index, Denominators(found.per_sample, 1.0))


def _full_step(options: Case, inputs: Case) -> dict[str, Any]:
    rows, tokens = inputs["loss_masks"], inputs["tokens"]
    mask, index = flat_mask(rows), index_of(rows)
    logits = leaf(torch.tensor(inputs["logits_packed"], dtype=torch.float64))
    log_softmax = tempered_log_softmax(
        logits[_prediction_rows(tokens, inputs["prompt_lengths"])], options["temperature"]
    )
    targets = torch.tensor([t for s, p in zip(tokens, inputs["prompt_lengths"], strict=True) for t in s[p:]])
    logprobs = token_logprobs(log_softmax, targets)
    terms_options = _term_options(options)
    given = TokenInputs(
        logprobs=logprobs,
        entropy=entropy(log_softmax),
        old=flat(inputs["old_log_probs"]),
        rollout=flat(inputs["rollout_log_probs"]),
        reference=flat(inputs["ref_log_probs"]) if options["kl_loss_coef"] else None,
        advantages=vector(inputs["sequence_advantages"])[index],
        mask=mask,
        sample_index=index,
        n_samples=len(rows),
    )
    terms = token_terms(given, terms_options)
    weights = mask.double() if options["per_token_sum"] else _sample_weights(mask, index, len(rows))
    loss = total_loss(terms, weights, terms_options)
    result = {
        "loss": float(loss.detach()),
        "pg_loss": float((terms.policy * weights).sum().detach()),
        "entropy": float((terms.entropy * weights).sum().detach()),
        "ppo_kl": float((-log_ratio(logprobs.detach(), given.old, mask) * weights).sum()),
        "logits_grad": gradient(loss, logits).tolist(),
        "log_probs": ragged(logprobs, rows),
    }
    return result | ({} if terms.kl is None else {"kl_loss": float((terms.kl * weights).sum().detach())})


def _prediction_rows(tokens: Sequence[Sequence[int]], prompts: Sequence[int]) -> torch.Tensor:
    """Packed positions that predict the response tokens: one before each."""
    starts = [sum(len(row) for row in tokens[:i]) for i in range(len(tokens))]
    spans = zip(starts, tokens, prompts, strict=True)
    return torch.cat([torch.arange(start + prompt - 1, start + len(row) - 1) for start, row, prompt in spans])


def _term_options(options: Case) -> TermOptions:
    return TermOptions(
        clip_low=options["eps_clip"],
        clip_high=options["eps_clip_high"],
        dual_clip=options["eps_clip_c"],
        tis=None if options["tis"] is None else tuple(options["tis"]),
        kl_coef=options["kl_loss_coef"],
        kl_estimator=_estimator(options["kl_loss_type"]),
        kl_unbiased=options["use_unbiased_kl"],
        entropy_coef=options["entropy_coef"],
        sequence_ratio=options["advantage_estimator"] == "gspo",
    )


def _optimizer(options: Case, inputs: Case) -> dict[str, Any]:
    parameter = torch.nn.Parameter(vector(inputs["params"]))
    settings = OptimizerConfig(
        learning_rate=options["lr"],
        beta1=options["beta1"],
        beta2=options["beta2"],
        epsilon=options["eps"],
        weight_decay=options["weight_decay"],
    )
    adamw = build_adamw([parameter], settings)
    values, norms = [], []
    for row in inputs["grads"]:
        parameter.grad = vector(row)
        norms.append(
            clipped_update(adamw, clip_grad_norm=options["clip_grad"], learning_rate=settings.learning_rate).grad_norm
        )
        values.append(parameter.tolist())
    state = adamw.state[parameter]
    return {
        "params_after_each_step": values,
        "exp_avg": state["exp_avg"].tolist(),
        "exp_avg_sq": state["exp_avg_sq"].tolist(),
        "grad_norms": norms,
    }


POLICIES: Mapping[str, Callable[[Case, Case], dict[str, Any]]] = {
    "ppo_clip": _ppo,
    "gspo": _gspo,
    **more_losses.POLICIES,
}

FAMILIES: Mapping[str, Callable[[Case, Case], dict[str, Any]]] = {
    "aggregation": _aggregation,
    "corrections_token": _corrections,
    "full_step": _full_step,
    "group_advantages": _groups,
    "kl_estimators": _kl,
    "logprob_entropy": _logprob,
    "mismatch_metrics": _mismatch,
    "optimizer": _optimizer,
    "policy_loss": _policy,
    "robustness": _full_step,
    **more_losses.FAMILIES,
}
