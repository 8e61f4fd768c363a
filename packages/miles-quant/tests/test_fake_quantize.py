from __future__ import annotations

import torch

from miles_quant import Fp8Block, dequantize, fake_quantize, quantize


def test_forward_is_what_the_engine_holds_and_backward_is_the_identity():
    format = Fp8Block(block=(4, 8))
    w = torch.randn(6, 10, generator=torch.Generator().manual_seed(3)).requires_grad_()
    y = fake_quantize(w, format, source_dtype=torch.bfloat16)
    assert torch.equal(y, dequantize(quantize(w.detach().bfloat16(), format)))
    upstream = torch.randn_like(y)
    y.backward(upstream)
    assert w.grad is not None
    assert torch.equal(w.grad, upstream)


def test_rounding_to_the_exported_dtype_first_changes_codes():
    format = Fp8Block(block=(128, 128))
    w = torch.randn(128, 128, generator=torch.Generator().manual_seed(3))
    assert not torch.equal(fake_quantize(w, format, source_dtype=torch.bfloat16), fake_quantize(w, format))


def test_result_has_the_dtype_of_the_input():
    w = torch.randn(4, 4).bfloat16()
    assert fake_quantize(w, Fp8Block()).dtype == torch.bfloat16
