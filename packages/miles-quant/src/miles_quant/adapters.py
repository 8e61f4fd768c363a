"""The FP8 block format in the shapes that trainer, weight sync and engine ask for.

All three go through the same functions on the same rounded weights, so the trainer's forward, the bytes on the wire
and the engine's matrix agree bit for bit. None of them imports another package: they fit by shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from miles_quant.config import Fp8BlockConfig
from miles_quant.errors import QuantShapeError
from miles_quant.formats.fp8_block import SCALE_SUFFIX, WEIGHT_SUFFIX, Fp8Block
from miles_quant.protocols import WireTensor
from miles_quant.recipes import Fp8BlockRecipe
from miles_quant.reference import fake_quantize, quantize
from miles_quant.wire import from_wire, to_wire


@dataclass(frozen=True, slots=True)
class Fp8BlockQuantizer:
    """The trainer's side: a straight-through forward on the numbers the engine will have.

    Attributes:
        recipe: which weights, and their format.
        source_dtype: dtype that weights are exported in.
        activation: format of activations (`block` (1, group)); None leaves them alone.
    """

    recipe: Fp8BlockRecipe = field(default_factory=Fp8BlockRecipe)
    source_dtype: torch.dtype = torch.bfloat16
    activation: Fp8Block | None = None

    @classmethod
    def from_config(cls, config: Fp8BlockConfig) -> Fp8BlockQuantizer:
        """The quantiser that `config` describes."""
        activation = None
        if config.activation_variant is not None:
            activation = Fp8Block(block=(1, config.activation_group), variant=config.activation_variant)
        return cls(Fp8BlockRecipe.from_config(config), _torch_dtype(config), activation)

    def fake_quantize_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """`weight` ([N, K] or [E, N, K]) as the engine will hold it; unchanged when the recipe keeps `name`."""
        format = self.recipe.select(name, weight.shape)
        if format is None:
            return weight
        return fake_quantize(weight, format, name=name, source_dtype=self.source_dtype)

    def fake_quantize_activation(self, name: str, activation: torch.Tensor) -> torch.Tensor:
        """The input ([..., K]) of the layer whose weight is `name`, as the engine's GEMM sees it.

        Raises:
            QuantShapeError: `activation` has no axis.
        """
        if self.activation is None or self.recipe.select(name, (1, 1)) is None:
            return activation
        if activation.dim() == 0:
            raise QuantShapeError(f"activation of {name} has no axis to group along")
        rows_TK = activation.reshape(-1, activation.shape[-1])
        return fake_quantize(rows_TK, self.activation, name=f"activation of {name}").reshape(activation.shape)


@dataclass(frozen=True, slots=True)
class Fp8BlockEncoder:
    """The weight sync's side: full-precision wire tensors to the wire tensors the engine stores.

    Attributes:
        recipe: which weights, and their format.
        source_dtype: dtype that weights are rounded to first.
    """

    recipe: Fp8BlockRecipe = field(default_factory=Fp8BlockRecipe)
    source_dtype: torch.dtype = torch.bfloat16

    @classmethod
    def from_config(cls, config: Fp8BlockConfig) -> Fp8BlockEncoder:
        """The encoder that `config` describes."""
        return cls(Fp8BlockRecipe.from_config(config), _torch_dtype(config))

    def encode(self, name: str, tensor: WireTensor) -> Mapping[str, WireTensor]:
        """Full name to wire tensor: codes and scale of a selected weight, else `tensor` itself.

        Raises:
            NonFiniteError: the weight holds NaN or an infinity.
            QuantDtypeError, QuantShapeError: the wire tensor is not what it says, or cannot be quantised.
        """
        format = self.recipe.select(name, tensor.shape)
        if format is None:
            return {name: tensor}
        weight = from_wire(tensor, name=name).to(self.source_dtype)
        stem = name.removesuffix(WEIGHT_SUFFIX)
        stored = quantize(weight, format, name=name).tensors
        return {stem + suffix: to_wire(value) for suffix, value in stored.items()}


@dataclass(frozen=True, slots=True)
class Fp8BlockWeightFormat:
    """The engine's side: stored codes and scale to the matrix a linear layer multiplies by.

    Attributes:
        format: only its `block` matters here.
        dtype: dtype of the matrix; one rounding after code x scale in float32.
    """

    format: Fp8Block = field(default_factory=Fp8Block)
    dtype: torch.dtype = torch.float32

    @classmethod
    def from_config(cls, config: Fp8BlockConfig, *, dtype: torch.dtype = torch.float32) -> Fp8BlockWeightFormat:
        """The weight format that `config` describes."""
        return cls(Fp8Block(block=config.block, variant=config.variant), dtype)

    def suffixes(self) -> tuple[str, ...]:
        """Name suffixes of the wire tensors that make one linear weight."""
        return (WEIGHT_SUFFIX, SCALE_SUFFIX)

    def dequantize(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The [out, in] matrix. `tensors` maps suffix to tensor; codes are float8_e4m3fn or uint8.

        Raises:
            MissingTensorError: codes or scale absent.
            QuantShapeError: their shapes do not fit.
        """
        return self.format.decode(tensors, dtype=self.dtype)


def _torch_dtype(config: Fp8BlockConfig) -> torch.dtype:
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[config.source_dtype]
