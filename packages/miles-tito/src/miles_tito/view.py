"""A trajectory for people: one line a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .codec import loads
from .errors import CodecError
from .tokenizer import Tokenizer
from .trajectory import Trajectory, span_values


def view_trajectory(file: Path, tokenizer_folder: Path | None = None) -> Iterator[str]:
    """Lines that show a trajectory file. Raises `CodecError` when it cannot be read."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise CodecError(f"cannot read {file}: {error.strerror}") from error
    tokenizer = None if tokenizer_folder is None else Tokenizer.load(tokenizer_folder)
    yield from trajectory_lines(loads(data), tokenizer)


def trajectory_lines(trajectory: Trajectory, tokenizer: Tokenizer | None = None) -> Iterator[str]:
    """A head, then a line for each token: index, id, loss, log-probability, version, text. Turns begin with a rule."""
    yield f"trajectory {trajectory.trajectory_id}  family {trajectory.family}  status {trajectory.status}"
    sampled = int(trajectory.loss_mask.sum())
    yield (
        f"{trajectory.n_tokens} tokens, {sampled} sampled in {len(trajectory.turns)} turns, reward "
        f"{trajectory.reward}, "
        f"oldest version {trajectory.oldest_version}"
    )
    versions = span_values(trajectory.weight_version_spans, trajectory.n_tokens)
    starts = {turn.prompt_length: index for index, turn in enumerate(trajectory.turns)}
    for at, token in enumerate(trajectory.token_ids.tolist()):
        if at in starts:
            turn = trajectory.turns[starts[at]]
            yield f"── turn {starts[at]}: {turn.completion_length} tokens by {turn.engine_id}, {turn.finish_reason}"
        text = "" if tokenizer is None else repr(tokenizer.token(token))
        if trajectory.loss_mask[at]:
            yield f"{at:>7} {token:>7}  1 {trajectory.logprobs[at]:>9.4f} v{versions[at]:<5} {text}"
        else:
            yield f"{at:>7} {token:>7}  0 {'':>9} {'':<6} {text}"
