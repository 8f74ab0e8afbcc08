"""The side of the connector that runs in each of vLLM's workers.

Where links are made, checked and reported: ``link_keeper.py``. Which weights count as the same:
``fingerprint.py``. What a rank reports of each receive: ``worker.py``.
"""
