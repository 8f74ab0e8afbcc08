"""`pdcluster ui`: a read-only page of PDClusters on localhost.

What it shows: `page.py`, `matrix.py`, `series.py`. What it reads, and how often: `readers.py` and
`board.py`. Who may see it: `server.py`.
"""
