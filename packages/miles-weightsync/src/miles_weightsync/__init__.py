"""miles-weightsync."""
