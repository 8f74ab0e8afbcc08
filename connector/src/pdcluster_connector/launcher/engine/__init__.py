"""The launcher's engine: its process, whether it is ready, what it has to do, why it ended.

When it is ready: ``readiness.py``. When it is drained: ``engine_api.py``. Why it ended:
``last_words.py``. How many prompts decode computed itself: ``prompt_window.py``.
"""
