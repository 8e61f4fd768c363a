"""Which tensors are quantised. One predicate on Hugging Face names serves exporter, trainer, engine and inspection.

Names are matched by segments (the text between dots), never by substrings of the whole name: `mlp.gate` is a router and
stays as it is, `mlp.gate_up_proj` is a projection and does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from miles_quant.config import Fp8BlockConfig
from miles_quant.formats.fp8_block import Fp8Block

_WEIGHT_SEGMENT = "weight"
_EXCLUDED_SEGMENTS = frozenset(
    {
        "lm_head",
        "head",
        "gate",
        "router",
        "shared_expert_gate",
        "eh_proj",
        "weights_proj",
        "wo_a",
        "compressor",
        "conv1d",
        "visual",
        "vision_tower",
        "vision_model",
        "multi_modal_projector",
        "mm_projector",
    }
)
_EXCLUDED_PARTS = ("norm", "embed")


@dataclass(frozen=True, slots=True)
class Fp8BlockRecipe:
    """FP8 blocks for attention projections, MLPs and experts; everything named in section 9 of the specification stays.

    Attributes:
        format: the format of selected weights.
        bf16_layers: indices of layers that stay as they are.
        exclude: further name segments that keep a tensor as it is.
    """

    format: Fp8Block = field(default_factory=Fp8Block)
    bf16_layers: frozenset[int] = frozenset()
    exclude: frozenset[str] = frozenset()

    @classmethod
    def from_config(cls, config: Fp8BlockConfig) -> Fp8BlockRecipe:
        """The recipe that `config` describes."""
        return cls(
            format=Fp8Block(block=config.block, variant=config.variant),
            bf16_layers=frozenset(config.bf16_layers),
            exclude=frozenset(config.exclude),
        )

    def select(self, name: str, shape: Sequence[int]) -> Fp8Block | None:
        """The format of the tensor `name` of `shape`, or None when it stays as it is."""
        return None if self.reason_to_keep(name, shape) else self.format

    def emitted_names(self, name: str, shape: Sequence[int]) -> tuple[str, ...]:
        """Names of the tensors that are stored for `name`."""
        if self.select(name, shape) is None:
            return (name,)
        stem = name.removesuffix(_WEIGHT_SEGMENT)
        return tuple(stem + suffix for suffix in self.format.suffixes)

    def reason_to_keep(self, name: str, shape: Sequence[int]) -> str | None:
        """Why the tensor is not quantised, in a few words; None when it is."""
        segments = name.split(".")
        if segments[-1] != _WEIGHT_SEGMENT or len(segments) < 2:
            return "not a weight"
        if len(shape) != 2 and not (len(shape) == 3 and "experts" in segments):
            return f"{len(shape)}-D"
        if 0 in shape:
            return "empty"
        return self._excluded_segment(segments)

    def _excluded_segment(self, segments: list[str]) -> str | None:
        for segment in segments:
            if segment in _EXCLUDED_SEGMENTS or segment in self.exclude:
                return f"segment {segment}"
            if any(part in segment for part in _EXCLUDED_PARTS):
                return f"segment {segment}"
        layer = _layer_index(segments)
        return f"layer {layer} stays" if layer in self.bf16_layers else None


def _layer_index(segments: list[str]) -> int | None:
    for before, segment in pairwise(segments):
        if before in ("layers", "h", "blocks") and segment.isdecimal():
            return int(segment)
    return None
