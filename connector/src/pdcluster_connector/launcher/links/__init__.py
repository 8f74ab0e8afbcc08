"""The links of this engine, and the canaries that prove them.

How reports of workers become one row for each link: ``link_table.py``. When a canary runs, and what
it shows: ``canary.py``.
"""
