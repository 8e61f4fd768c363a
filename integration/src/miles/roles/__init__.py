"""The roles as processes: `python -m miles.roles.<kind>`, started by the local runtime."""
