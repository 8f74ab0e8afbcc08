"""The launcher's engine: its process, whether it is ready, what it has to do, why it ended."""
