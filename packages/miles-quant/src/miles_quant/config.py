"""Configuration of miles-quant: one frozen root, one section a format."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

WeightVariant = Literal["recip", "div", "te_f32", "te_pow2", "ue8m0"]
ActivationVariant = Literal["recip", "cuda_v2", "cuda_v2_ue8m0", "dsv4_act"]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Fp8BlockConfig(_Section):
    """FP8 E4M3 blocks: which weights, which blocks, which way to compute scales."""

    block: tuple[PositiveInt, PositiveInt] = Field(
        default=(128, 128), description="Rows and columns of a weight block; the engine's weight_block_size."
    )
    variant: WeightVariant = Field(
        default="recip", description="How weight scales are computed: recip for fp32 scales, ue8m0 for powers of two."
    )
    source_dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="Dtype that weights are rounded to before they are quantised, on both sides."
    )
    activation_variant: ActivationVariant | None = Field(
        default=None, description="Fake-quantise activations as this engine backend does; none leaves them alone."
    )
    activation_group: PositiveInt = Field(default=128, description="Columns that share an activation scale.")
    bf16_layers: tuple[int, ...] = Field(default=(), description="Indices of layers that stay in the source dtype.")
    exclude: tuple[str, ...] = Field(
        default=(), description="Further name segments (text between dots) that keep a tensor unquantised."
    )


class QuantConfig(_Section):
    """Root configuration of miles-quant."""

    fp8_block: Fp8BlockConfig = Field(default_factory=Fp8BlockConfig, description="The FP8 block format.")
