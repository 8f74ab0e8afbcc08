"""The thread that receives KV: it connects, reads, and reports how each receive ended.

What comes next for a receive, and when it has failed: ``receive_machine.py``; who carries that out:
``receive_executor.py``. What is read, and its fence: ``planned_reads.py``; where reads are posted,
polled and judged: ``posting.py``. How many bytes it read in how many seconds: ``measures.py``. When
a link is broken off: ``connections.py``; how it is probed: ``probing.py``. What happens to a
transfer that hangs: ``agent_rebuild.py``. Limits: ``options.py``. What the engine step calls,
the thread and its watchdog: ``receiver.py``.
"""
