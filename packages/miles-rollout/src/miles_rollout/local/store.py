"""The engine's weights under the names of the checkpoint, as bytes that can be stored and read back.

transformers 5 keeps the experts of a layer fused (`gate_up_proj` [E, 2I, H], `down_proj` [E, H, I]); here each expert
has its checkpoint name and is a view into the fused parameter. A tied head has no name of its own.

Shapes: E experts, I inner size, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from miles_rollout.local.checkpoint import Checkpoint
from miles_rollout.local.errors import EngineSetupError, WeightTensorError
from miles_rollout.protocols import TensorSpec, WeightFormat, WireTensor

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_IGNORED_ENDINGS = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class FormatGroup:
    """The wire tensors (suffix → name) that make one linear weight, and the parameter they are decoded into."""

    names: Mapping[str, str]
    target: torch.Tensor


class WeightStore:
    """Named tensors of one model. Not thread-safe: the engine thread owns it.

    With a `WeightFormat`, linear weights that the checkpoint holds in that format keep their wire bytes here, and the
    model's parameter holds their decoded value.
    """

    def __init__(
        self, model: torch.nn.Module, checkpoint: Checkpoint, weight_format: WeightFormat | None = None
    ) -> None:
        self._tied = _tied_names(model)
        self._tensors = dict(_named_views(model))
        self._format = weight_format
        self._groups: dict[str, FormatGroup] = {}
        if weight_format is not None:
            self._add_groups(weight_format, checkpoint)
        self.specs = {name: TensorSpec(name, DTYPE_NAMES[t.dtype], tuple(t.shape)) for name, t in self._tensors.items()}

    def check_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Raise `EngineSetupError` unless a folder holds exactly these names and shapes (and a tied head's twin)."""
        held = {name for name in checkpoint.specs if not name.endswith(_IGNORED_ENDINGS)}
        missing, extra = sorted(set(self.specs) - held), sorted(held - set(self.specs) - set(self._tied))
        if missing or extra:
            raise EngineSetupError(
                f"{checkpoint.folder} does not fit the model: missing {_some(missing)}, unexpected {_some(extra)}",
                code="checkpoint_names",
            )
        for name, spec in self.specs.items():
            self._check_stored(spec, checkpoint.specs[name], name)
        for name, twin in self._tied.items():
            if name in held and not torch.equal(checkpoint.tensor(name), checkpoint.tensor(twin)):
                raise EngineSetupError(f"{name} is tied to {twin} but differs from it in {checkpoint.folder}")

    def install_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Copy a checked folder in, converting to the engine's dtypes."""
        for name, tensor in self._tensors.items():
            tensor.copy_(checkpoint.tensor(name))
        self._decode(self._groups)

    def load(self, tensors: Mapping[str, WireTensor]) -> None:
        """Store wire tensors. Raises `WeightTensorError` naming the tensor, with nothing stored."""
        for name, wire in tensors.items():
            self._check_wire(name, wire)
        touched = {name: self._groups[name] for name in tensors if name in self._groups}
        self._check_whole(touched, tensors)
        for name, wire in tensors.items():
            tensor_bytes(self._tensors[name])[:] = memoryview(wire.data).cast("B")
        self._decode(touched)

    def read(self, name: str) -> memoryview:
        """Return the stored bytes of one tensor, read-only."""
        if name not in self._tensors:
            raise WeightTensorError(f"there is no tensor {name!r} in this engine: see expected_tensors")
        return tensor_bytes(self._tensors[name]).toreadonly()

    def _add_groups(self, weight_format: WeightFormat, checkpoint: Checkpoint) -> None:
        suffixes = weight_format.suffixes()
        for name, target in list(self._tensors.items()):
            stem, _, last = name.rpartition(".")
            names = {suffix: f"{stem}.{suffix}" for suffix in suffixes}
            if last == suffixes[0] and all(n in checkpoint.specs for n in names.values()):
                self._groups |= dict.fromkeys(names.values(), FormatGroup(names, target))
                self._tensors |= {n: _empty_like_spec(checkpoint.specs[n]) for n in names.values()}

    def _check_stored(self, spec: TensorSpec, found: TensorSpec, name: str) -> None:
        formatted = name in self._groups
        if spec.shape != found.shape or (formatted and spec.dtype != found.dtype) or found.dtype not in TORCH_DTYPES:
            raise EngineSetupError(
                f"{name} is {found.dtype} {list(found.shape)} in the folder; "
                f"the engine holds {spec.dtype} {list(spec.shape)}",
                code="checkpoint_shapes",
            )

    def _check_wire(self, name: str, wire: WireTensor) -> None:
        spec = self.specs.get(name)
        if spec is None:
            raise WeightTensorError(f"there is no tensor {name!r} in this engine; nothing was stored")
        if wire.dtype != spec.dtype or tuple(wire.shape) != spec.shape:
            raise WeightTensorError(
                f"{name} came as {wire.dtype} {list(wire.shape)}; the engine stores {spec.dtype} {list(spec.shape)}; "
                "nothing was stored"
            )
        expected = math.prod(spec.shape) * TORCH_DTYPES[spec.dtype].itemsize
        if memoryview(wire.data).nbytes != expected:
            raise WeightTensorError(
                f"{name} came with {memoryview(wire.data).nbytes} bytes; {expected} were expected; nothing was stored"
            )

    def _check_whole(self, touched: Mapping[str, FormatGroup], tensors: Mapping[str, WireTensor]) -> None:
        for name, group in touched.items():
            absent = [n for n in group.names.values() if n not in tensors]
            if absent:
                raise WeightTensorError(
                    f"{name} came without {_some(absent)}: they make one load unit; nothing was stored"
                )

    def _decode(self, touched: Mapping[str, FormatGroup]) -> None:
        if self._format is None:
            return
        for group in {id(group): group for group in touched.values()}.values():
            parts = {suffix: self._tensors[name] for suffix, name in group.names.items()}
            group.target.copy_(self._format.dequantize(parts))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, writable, row-major."""
    if not tensor.numel():
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _named_views(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        if owner.endswith(".experts") and parameter.dim() == 3:
            yield from _expert_views(model.get_submodule(owner), owner, last, parameter.detach())
        else:
            yield name, _contiguous(name, parameter.detach())
    for name, value in model.state_dict().items():
        if name not in parameters:
            yield name, _contiguous(name, value)


def _expert_views(
    module: torch.nn.Module, owner: str, last: str, fused: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    transposed = getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True)
    if transposed or last not in ("gate_up_proj", "down_proj"):
        raise EngineSetupError(f"{owner}.{last} is laid out in a way this engine cannot name", code="unsupported_model")
    for expert, matrix in enumerate(fused):
        prefix = f"{owner}.{expert}"
        if last == "down_proj":
            yield f"{prefix}.down_proj.weight", _contiguous(prefix, matrix)
            continue
        inner = matrix.shape[0] // 2
        yield f"{prefix}.gate_proj.weight", _contiguous(prefix, matrix[:inner])
        yield f"{prefix}.up_proj.weight", _contiguous(prefix, matrix[inner:])


def _contiguous(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise EngineSetupError(f"{name} is not stored contiguously", code="unsupported_model")
    return tensor


def _tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return duplicate name → the name that stands for it."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _empty_like_spec(spec: TensorSpec) -> torch.Tensor:
    if spec.dtype not in TORCH_DTYPES:
        raise EngineSetupError(f"{spec.name} has dtype {spec.dtype}, which this engine cannot store")
    return torch.zeros(spec.shape, dtype=TORCH_DTYPES[spec.dtype])


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5]) or "none"
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
