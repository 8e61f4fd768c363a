"""Golden vectors: `python -m miles_quant.conformance FILES...` computes each case and compares it byte for byte."""
