"""Number formats. Each module holds one format: its parameters, how it encodes and how it decodes."""
