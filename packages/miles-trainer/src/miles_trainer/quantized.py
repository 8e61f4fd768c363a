"""Linear layers and experts whose forward sees the rollout's number format, through a `Quantizer`.

Modules are exchanged before sharding; parameters keep their names, so optimizer, export and checkpoints do not change.
The quantiser sees Hugging Face names and decides by them what it leaves alone.

Shapes: N tokens, C input channels, E experts, I expert width, K experts a token.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from miles_trainer.protocols import Quantizer


class QuantizedLinear(torch.nn.Linear):
    """A linear layer over fake-quantised activation and weight; shares the parameters of the layer it replaces."""

    def __init__(self, layer: torch.nn.Linear, name: str, quantizer: Quantizer) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self._name, self._quantizer = name, quantizer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        activation = self._quantizer.fake_quantize_activation(self._name, input)
        weight = self._quantizer.fake_quantize_weight(f"{self._name}.weight", self.weight)
        return functional.linear(activation, weight, self.bias)


class QuantizedExperts(torch.nn.Module):
    """Fused experts, each quantised under its own names; shares the parameters of the module it replaces."""

    def __init__(self, experts: torch.nn.Module, name: str, quantizer: Quantizer) -> None:
        super().__init__()
        self.gate_up_proj: torch.nn.Parameter = experts.gate_up_proj  # type: ignore[assignment]
        self.down_proj: torch.nn.Parameter = experts.down_proj  # type: ignore[assignment]
        self.act_fn = experts.act_fn
        self._name, self._quantizer = name, quantizer

    def forward(
        self, hidden_NC: torch.Tensor, top_k_index_NK: torch.Tensor, top_k_weights_NK: torch.Tensor
    ) -> torch.Tensor:
        """Sum over the chosen experts of weight · down(act(gate) · up), [N, C]."""
        total_NC = torch.zeros_like(hidden_NC)
        for expert in torch.unique(top_k_index_NK).tolist():
            token_n, slot_n = torch.where(top_k_index_NK == expert)
            output_nC = self._expert(expert, hidden_NC[token_n]) * top_k_weights_NK[token_n, slot_n, None]
            total_NC = total_NC.index_add(0, token_n, output_nC.to(total_NC.dtype))
        return total_NC

    def _expert(self, expert: int, hidden_nC: torch.Tensor) -> torch.Tensor:
        gate_weight_IC, up_weight_IC = self.gate_up_proj[expert].chunk(2)
        gate_nI = self._linear(f"{self._name}.{expert}.gate_proj", hidden_nC, gate_weight_IC)
        up_nI = self._linear(f"{self._name}.{expert}.up_proj", hidden_nC, up_weight_IC)
        inner_nI: torch.Tensor = self.act_fn(gate_nI) * up_nI  # type: ignore[operator]
        return self._linear(f"{self._name}.{expert}.down_proj", inner_nI, self.down_proj[expert])

    def _linear(self, name: str, activation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.linear(
            self._quantizer.fake_quantize_activation(name, activation),
            self._quantizer.fake_quantize_weight(f"{name}.weight", weight),
        )


def quantize_linears(model: torch.nn.Module, quantizer: Quantizer) -> None:
    """Exchange every linear layer and every fused expert module of `model`, in place."""
    for name, module in list(model.named_modules()):
        replacement = _replacement(name, module, quantizer)
        if replacement is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)


def _replacement(name: str, module: torch.nn.Module, quantizer: Quantizer) -> torch.nn.Module | None:
    if type(module) is torch.nn.Linear:
        return QuantizedLinear(module, name, quantizer)
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) == {"gate_up_proj", "down_proj"}:
        return QuantizedExperts(module, name, quantizer)
    return None
