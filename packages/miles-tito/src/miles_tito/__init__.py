"""miles-tito."""
