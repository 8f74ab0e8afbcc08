"""What the launcher puts into vLLM's processes. See also `vllm_shim.py` and `vllm/api_guard.py`."""
