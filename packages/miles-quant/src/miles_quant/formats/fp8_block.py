"""FP8 block format: E4M3 codes with one float32 scale a block (128x128 for weights, 1x128 for activations).

Shapes: E experts (absent for plain matrices), N rows, K columns, P row blocks, Q column blocks, R rows of a block, C
columns of a block. Blocks at the right and lower edge may be partial: they are padded with zeros, which never changes a
maximum, and cut again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from miles_quant.casts import decode_e4m3, encode_e4m3
from miles_quant.errors import MissingTensorError, NonFiniteError, QuantDtypeError, QuantShapeError
from miles_quant.formats.scales import Variant, block_scales
from miles_quant.protocols import NonFinite

WEIGHT_SUFFIX = "weight"
SCALE_SUFFIX = "weight_scale_inv"

_SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Fp8Block:
    """FP8 E4M3 with a float32 decode scale for each block.

    Stored tensors of an input [N, K] (or [E, N, K], each expert by itself): `weight` float8_e4m3fn of the same shape
    and `weight_scale_inv` float32 [ceil(N/R), ceil(K/C)] (or [E, ...]); `number = code x scale`.

    Attributes:
        block: rows R and columns C of a block. (1, 128) is the activation form.
        variant: how the scale is computed (`miles_quant.formats.scales`); bits are comparable only under the same name.

    Raises:
        QuantShapeError: a block side is below 1.
    """

    block: tuple[int, int] = (128, 128)
    variant: Variant = "recip"

    def __post_init__(self) -> None:
        if min(self.block) < 1:
            raise QuantShapeError(f"block {self.block} has a side below 1: use for example (128, 128)")

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Name suffixes of the stored tensors."""
        return (WEIGHT_SUFFIX, SCALE_SUFFIX)

    def encode(
        self, x: torch.Tensor, *, name: str = "tensor", nonfinite: NonFinite = "error"
    ) -> dict[str, torch.Tensor]:
        """Quantise `x` ([N, K] or [E, N, K]; bfloat16, float16 or float32, widened exactly).

        Raises:
            QuantShapeError: `x` has another number of axes, or an empty one.
            QuantDtypeError: `x` has another dtype.
            NonFiniteError: `x` holds NaN or an infinity and `nonfinite` is "error".
        """
        self._check(x, name)
        if nonfinite == "error":
            _require_finite(x, name)
        blocks_PRQC = self._split(x.detach().to(torch.float32))
        amax_P1Q1 = blocks_PRQC.abs().amax(dim=(-3, -1), keepdim=True)
        scales = block_scales(self.variant, amax_P1Q1, x.dtype)
        codes_PRQC = encode_e4m3(scales.apply(blocks_PRQC))
        codes = self._join(codes_PRQC, x.shape).view(torch.float8_e4m3fn)
        return {WEIGHT_SUFFIX: codes, SCALE_SUFFIX: scales.decode.squeeze((-3, -1))}

    def decode(self, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Code times scale in float32, then one rounding to `dtype`. Total: codes and scales are taken as they are.

        Raises:
            MissingTensorError: a stored tensor is absent.
            QuantShapeError: the scale's shape does not fit the codes' and the block's.
        """
        codes, scale_PQ = self._stored(tensors)
        values_PRQC = self._split(decode_e4m3(codes))
        scale_P1Q1 = scale_PQ.to(torch.float32).unsqueeze(-1).unsqueeze(-3)
        return self._join(values_PRQC * scale_P1Q1, codes.shape).to(dtype)

    def scale_shape(self, shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale tensor of a tensor of `shape`."""
        *experts, n, k = shape
        rows, columns = self.block
        return (*experts, -(-n // rows), -(-k // columns))

    def _check(self, x: torch.Tensor, name: str) -> None:
        if x.dtype not in _SOURCE_DTYPES:
            raise QuantDtypeError(f"{name} is {x.dtype}; FP8 blocks are made from bfloat16, float16 or float32")
        if x.dim() not in (2, 3) or x.numel() == 0:
            raise QuantShapeError(
                f"{name} has shape {tuple(x.shape)}; FP8 blocks take a matrix [N, K] or an expert stack [E, N, K] "
                "without empty axes: exclude this tensor from the recipe"
            )

    def _stored(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        missing = [suffix for suffix in self.suffixes if suffix not in tensors]
        if missing:
            raise MissingTensorError(
                f"{', '.join(missing)} absent (found: {', '.join(sorted(tensors)) or 'nothing'}): "
                "codes and scale of an FP8 weight must come together"
            )
        codes, scale = tensors[WEIGHT_SUFFIX], tensors[SCALE_SUFFIX]
        if codes.dim() not in (2, 3) or tuple(scale.shape) != self.scale_shape(codes.shape):
            raise QuantShapeError(
                f"codes {tuple(codes.shape)} and scale {tuple(scale.shape)} do not fit blocks of {self.block}: "
                "check weight_block_size of the checkpoint"
            )
        return codes, scale

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N, K] to [..., P, R, Q, C], padded with zeros."""
        rows, columns = self.block
        *experts, p, q = self.scale_shape(x.shape)
        padding = (0, q * columns - x.shape[-1], 0, p * rows - x.shape[-2])
        if any(padding):
            x = torch.nn.functional.pad(x, padding)
        return x.reshape(*experts, p, rows, q, columns)

    def _join(self, blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """[..., P, R, Q, C] to [..., N, K], padding cut."""
        *experts, p, rows, q, columns = blocks.shape
        padded = blocks.reshape(*experts, p * rows, q * columns)
        return padded[..., : shape[-2], : shape[-1]].contiguous()


def _require_finite(x: torch.Tensor, name: str) -> None:
    finite = torch.isfinite(x)
    if bool(finite.all()):
        return
    index = tuple(torch.nonzero(~finite)[0].tolist())
    raise NonFiniteError(
        f"{name} holds {x[index].item()} at index {index} (shape {tuple(x.shape)}): "
        "find out where it came from; nonfinite='propagate' lets it through for debugging"
    )
