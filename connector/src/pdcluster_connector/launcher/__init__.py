"""PID 1 of an engine's container: it starts the engine, tells its state and proves its links."""
