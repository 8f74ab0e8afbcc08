"""Runs an engine as PID 1 of its container, and holds what else pods run beside vLLM."""
