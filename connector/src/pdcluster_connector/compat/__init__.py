"""Whether two engine shapes can exchange KV: the rules that admission and the handshake share.

What refuses a pair: ``pair_rules.py``; what refuses one engine: ``shape_rules.py``. Names of
causes: ``reasons.py``. Which versions, flags, dtypes and backends are supported: ``supported.py``.
"""
