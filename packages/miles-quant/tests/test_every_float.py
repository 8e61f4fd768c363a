from __future__ import annotations

import pytest
import torch

from miles_quant import encode_e4m3

CHUNK = 1 << 24


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_every_finite_float32_is_encoded_as_the_clamped_library_cast():
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        x = torch.arange(start, start + CHUNK, dtype=torch.int64).to(torch.int32).view(torch.float32)
        x = x[~torch.isnan(x)]
        expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(encode_e4m3(x), expected), f"chunk from {start}"
