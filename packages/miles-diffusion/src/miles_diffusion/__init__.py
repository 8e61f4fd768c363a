"""miles-diffusion."""
