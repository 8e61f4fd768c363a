"""On-policy distillation (spec 3), nats. Not selectable in the trainer's options yet.

Shapes: M tokens, V vocabulary, k chosen ids.
"""

from __future__ import annotations

import math
from typing import Literal

import torch

TokenSet = Literal["only-student", "only-teacher", "intersection", "union", "xor"]
Weighting = Literal["student_p", "teacher_p", "none"]


def distilled_advantages(advantages_M: torch.Tensor, reverse_kl_M: torch.Tensor, *, coef: float) -> torch.Tensor:
    """A - coef·(log student - log teacher) of the sampled token, [M]; no gradient."""
    return advantages_M - coef * reverse_kl_M.detach()


def reverse_kl(student_MV: torch.Tensor, teacher_MV: torch.Tensor) -> torch.Tensor:
    """KL(student ‖ teacher) of each position from log-probabilities, [M], with gradient in the student."""
    return (student_MV.exp() * (student_MV - teacher_MV)).sum(-1)


def forward_kl(student_MV: torch.Tensor, teacher_MV: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student), [M]."""
    return (teacher_MV.exp() * (teacher_MV - student_MV)).sum(-1)


def jensen_shannon(student_MV: torch.Tensor, teacher_MV: torch.Tensor) -> torch.Tensor:
    """Mean of the two divergences from the half-way mixture, [M]."""
    mixture_MV = torch.logaddexp(student_MV, teacher_MV) - math.log(2)
    return (forward_kl(mixture_MV, student_MV) + forward_kl(mixture_MV, teacher_MV)) / 2


def chosen_ids(student_V: torch.Tensor, teacher_V: torch.Tensor, k: int, token_set: TokenSet) -> list[int]:
    """Ids of one position by each side's k most likely: the student's, then the teacher's, by falling probability."""
    student, teacher = student_V.topk(k).indices.tolist(), teacher_V.topk(k).indices.tolist()
    choices: dict[TokenSet, list[int]] = {
        "only-student": student,
        "only-teacher": teacher,
        "intersection": [i for i in student if i in teacher],
        "union": student + [i for i in teacher if i not in student],
        "xor": [i for i in student if i not in teacher] + [i for i in teacher if i not in student],
    }
    return choices[token_set]


def top_k_reverse_kl(
    student_V: torch.Tensor, teacher_V: torch.Tensor, ids: list[int], weighting: Weighting, *, renormalize: bool = True
) -> float:
    """Σ w·(log student - log teacher) over the chosen ids of one position: an estimate, without gradient.

    Weights are the named side's probabilities, over the set when `renormalize`, or 1. No id gives 0.
    """
    if not ids:
        return 0.0
    student_k, teacher_k = student_V.detach()[ids], teacher_V.detach()[ids]
    if weighting == "none":
        return float((student_k - teacher_k).sum())
    log_weights_k = student_k if weighting == "student_p" else teacher_k
    weights_k = log_weights_k.softmax(-1) if renormalize else log_weights_k.exp()
    return float((weights_k * (student_k - teacher_k)).sum())
