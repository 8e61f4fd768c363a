"""The engine's HTTP server: SGLang's routes and fields over a `LocalEngine`."""
