"""Calls to NIXL.

UCX's settings and the meaning of NIXL's errors: ``nixl_agent.py``. What peers can read, and why a
lease word proves that KV was right: ``serving_agent.py``. What is held of each peer that is read:
``reading_agent.py``.
"""
