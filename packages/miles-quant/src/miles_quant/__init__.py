"""miles-quant."""
