"""Golden vectors: `python -m miles_diffusion.conformance FILES...` computes and compares each case."""
