"""The HTTP server and clients between the engines of a cluster.

Where a peer's restart, end or silence is noticed: ``peers.py``; how one question to it is asked and
its answer judged: ``handshake.py``. Who may ask this engine for what: ``server.py``. Who holds a
lease of prefill, and until when: ``lease_desk.py``; how decode's renewals get there:
``lease_client.py``. When ticket keys change: ``ticket_key_file.py``.
"""
