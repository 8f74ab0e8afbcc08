"""The side of the connector that runs in vLLM's scheduler.

Where a ticket is judged, and where a prompt whose KV did not come is explained and counted:
``decode.py``. vLLM itself applies the load failure policy (``kv_load_failure_policy``). When a
lease is renewed and released: ``decode_leases.py``. When a prompt may begin that decode computes
itself: ``local_prompts.py``. When a ticket is made, and when blocks may go: ``prefill.py``.
"""
