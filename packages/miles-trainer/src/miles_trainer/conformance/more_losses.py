"""Loss families whose functions the trainer's options cannot select yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from miles_trainer.conformance.arrays import Case, flat, flat_mask, gradient, index_of, leaf, ragged, vector
from miles_trainer.objective.distillation import (
    chosen_ids,
    distilled_advantages,
    forward_kl,
    jensen_shannon,
    reverse_kl,
    top_k_reverse_kl,
)
from miles_trainer.objective.policy_loss import log_ratio
from miles_trainer.objective.policy_variants import (
    detached_clip_loss,
    geometric_mean_loss,
    soft_gate_loss,
    total_variation_loss,
)
from miles_trainer.objective.rejection import RejectionOptions, off_policy_mask, rejected_importance
from miles_trainer.objective.returns import baseline_advantages, discounted_returns, generalized_advantages
from miles_trainer.objective.value_loss import clipped_value_loss
from miles_trainer.objective.whitening import masked_moments, whiten
from miles_trainer.replay.layout import zigzag_chunk, zigzag_positions


def cispo(options: Case, inputs: Case) -> dict[str, Any]:
    logprobs = leaf(vector(inputs["log_probs"]))
    found = detached_clip_loss(
        logprobs,
        log_ratio(logprobs, vector(inputs["old_log_probs"])),
        vector(inputs["advantages"]),
        clip_low=options["eps_clip"],
        clip_high=options["eps_clip_high"],
    )
    return {
        "loss": found.loss.tolist(),
        "clip_indicator": found.clipped.double().tolist(),
        "grad_sum_wrt_log_probs": gradient(found.loss.sum(), logprobs).tolist(),
    }


def sapo(options: Case, inputs: Case) -> dict[str, Any]:
    logprobs = leaf(vector(inputs["log_probs"]))
    loss = soft_gate_loss(
        log_ratio(logprobs, vector(inputs["old_log_probs"])),
        vector(inputs["advantages"]),
        tau_positive=options["tau_pos"],
        tau_negative=options["tau_neg"],
    )
    return {"loss": loss.tolist(), "grad_sum_wrt_log_probs": gradient(loss.sum(), logprobs).tolist()}


def gmpo(options: Case, inputs: Case) -> dict[str, Any]:
    rows = inputs["loss_masks"]
    mask = flat_mask(rows)
    logprobs = leaf(flat(inputs["log_probs"]))
    loss = geometric_mean_loss(
        log_ratio(logprobs, flat(inputs["old_log_probs"]), mask),
        vector(inputs["sequence_advantages"]),
        mask,
        index_of(rows),
        clip_low=options["clip_low_log"],
        clip_high=options["clip_high_log"],
    )
    mean = loss.mean()
    return {
        "sequence_loss": loss.tolist(),
        "mean_loss": mean.item(),
        "grad_of_mean_loss": ragged(gradient(mean, logprobs), rows),
    }


def dppo(options: Case, inputs: Case) -> dict[str, Any]:
    logprobs = leaf(vector(inputs["log_probs"]))
    found = total_variation_loss(
        logprobs,
        vector(inputs["rollout_log_probs"]),
        vector(inputs["advantages"]),
        vector(inputs["loss_mask"]) > 0,
        bound_high=options["mask_high"],
        bound_low=options["mask_low"],
        advantage_scale=options["adv_tau"],
        kl_scale=options["kl_tau"],
    )
    return {
        "loss": found.loss.tolist(),
        "dropped": found.dropped.double().tolist(),
        "loss_sum": found.loss.sum().item(),
        "grad_sum_wrt_log_probs": gradient(found.loss.sum(), logprobs).tolist(),
    }


def opsm(options: Case, inputs: Case) -> dict[str, Any]:
    rows = inputs["loss_masks"]
    found = off_policy_mask(
        flat(inputs["log_probs"]),
        flat(inputs["old_log_probs"]),
        vector(inputs["sequence_advantages"]),
        flat_mask(rows),
        index_of(rows),
        delta=options["opsm_delta"],
    )
    return {"sequence_kl": found.sequence_kl.tolist(), "keep_mask": ragged(found.keep, rows)}


def rejection(options: Case, inputs: Case) -> dict[str, Any]:
    rows = inputs["loss_masks"]
    reject = (options["rs_level"], options["rs_lower_bound"], options["rs_upper_bound"])
    found = rejected_importance(
        flat(inputs["train_log_probs"]),
        flat(inputs["rollout_log_probs"]),
        flat_mask(rows),
        index_of(rows),
        len(rows),
        RejectionOptions(
            level=options["tis_level"],
            mode=options["tis_mode"],
            low=options["tis_lower_bound"],
            high=options["tis_upper_bound"],
            reject=reject if options["use_rs"] else None,
            veto=options["rs_veto_threshold"],
            normalize=options["tis_batch_normalize"],
        ),
    )
    return {
        "weights": ragged(found.weights, rows),
        "modified_masks": ragged(found.mask, rows),
        "batch_norm_factor": found.mean_weight,
    }


def token_returns(options: Case, inputs: Case) -> dict[str, Any]:
    kls = [np.asarray(kl) for kl in inputs["kl"]]
    masks = [np.asarray(mask) > 0 for mask in inputs["loss_masks"]]
    given = list(zip(inputs["rewards"], kls, masks, strict=True))
    shape = {"gamma": options["gamma"], "kl_coef": options["kl_coef"]}
    if options.get("estimator") == "ppo":
        values = [np.asarray(value) for value in inputs["values"]]
        pairs = [
            generalized_advantages(r, v, kl, m, lambd=options["lambd"], **shape)
            for (r, kl, m), v in zip(given, values, strict=True)
        ]
        return {"advantages": [a.tolist() for a, _ in pairs], "returns": [ret.tolist() for _, ret in pairs]}
    baseline = [baseline_advantages(r, kl, kl_coef=options["kl_coef"]).tolist() for r, kl, _ in given]
    return {
        "returns_trainable_only": [discounted_returns(r, kl, m, **shape).tolist() for r, kl, m in given],
        "returns_all_positions": [discounted_returns(r, kl, m, over="all", **shape).tolist() for r, kl, m in given],
        "baseline_variant_unwhitened": baseline,
    }


def value(options: Case, inputs: Case) -> dict[str, Any]:
    values = leaf(vector(inputs["values"]))
    found = clipped_value_loss(
        values,
        vector(inputs["old_values"]),
        vector(inputs["returns"]),
        clip=options["value_clip"],
        half=options["half_factor"],
    )
    return {
        "loss": found.loss.tolist(),
        "clip_indicator_distance": found.moved.double().tolist(),
        "clip_indicator_loss": found.clipped.double().tolist(),
        "grad_sum_wrt_values": gradient(found.loss.sum(), values).tolist(),
    }


def whitening(options: Case, inputs: Case) -> dict[str, Any]:
    values = vector(inputs["values"])
    moments = masked_moments(values, vector(inputs["mask"]) > 0)
    whitened = whiten(values, moments, shift_mean=options["shift_mean"], epsilon=options["eps"])
    return {"whitened_all_positions": whitened.tolist(), "mean": moments.mean, "var": moments.variance}


def distillation(options: Case, inputs: Case) -> dict[str, Any]:
    if "vocab" in options:
        return _full_vocabulary(inputs)
    if "opd_log_prob_top_k" in options:
        return _top_k(options, inputs)
    rows = inputs["student_log_probs"]
    gap = flat(rows) - flat(inputs["teacher_log_probs"])
    base = vector(inputs["sequence_advantages"])[index_of(rows)]
    advantages = distilled_advantages(base, gap, coef=options["opd_kl_coef"])
    return {"reverse_kl": ragged(gap, rows), "advantages": ragged(advantages, rows)}


def _full_vocabulary(inputs: Case) -> dict[str, Any]:
    logits = leaf(torch.tensor(inputs["student_logits"], dtype=torch.float64))
    teacher = torch.tensor(inputs["teacher_logits"], dtype=torch.float64).log_softmax(-1)
    measures = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jensen_shannon": jensen_shannon}
    found = {name: measure(logits.log_softmax(-1), teacher) for name, measure in measures.items()}
    gradients = {name: gradient(amount.sum(), logits).tolist() for name, amount in found.items()}
    return {name: amount.tolist() for name, amount in found.items()} | {"grads_wrt_student_logits": gradients}


def _top_k(options: Case, inputs: Case) -> dict[str, Any]:
    students = torch.tensor(inputs["student_log_probs_full"], dtype=torch.float64)
    teachers = torch.tensor(inputs["teacher_log_probs_full"], dtype=torch.float64)
    strategy = options["opd_top_k_strategy"]
    ids = [chosen_ids(s, t, options["opd_log_prob_top_k"], strategy) for s, t in zip(students, teachers, strict=True)]
    amounts = [
        top_k_reverse_kl(s, t, chosen, options["opd_reward_weight_mode"], renormalize=strategy != "xor")
        for s, t, chosen in zip(students, teachers, ids, strict=True)
    ]
    return {"selected_ids": ids, "reverse_kl": amounts}


def context_parallel(options: Case, inputs: Case) -> dict[str, Any]:
    total, size = inputs["total_length"], inputs["cp_size"]
    prompt = total - inputs["response_length"]
    chunk = zigzag_chunk(total, size)
    owned = []
    for rank in range(size):
        predicted = zigzag_positions(total, size, rank) + 1 - prompt
        owned.append(predicted[(predicted >= 0) & (predicted < inputs["response_length"])].tolist())
    return {"chunk_size": chunk, "padded_length": 2 * size * chunk, "response_positions_per_rank": owned}


POLICIES: Mapping[str, Callable[[Case, Case], dict[str, Any]]] = {
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo_tv_kl": dppo,
}

FAMILIES: Mapping[str, Callable[[Case, Case], dict[str, Any]]] = {
    "context_parallel": context_parallel,
    "corrections_mis": rejection,
    "on_policy_distillation": distillation,
    "token_returns": token_returns,
    "value_loss": value,
    "whitening": whitening,
}
