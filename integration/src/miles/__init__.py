"""miles."""
