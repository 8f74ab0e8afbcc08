"""The connector as vLLM loads it.

What vLLM calls, and what fails if a call raises: ``connector.py``. What is configured or refused:
``config.py``. What both sides send each other in a step: ``step_messages.py``. What the client of a
request is answered whose KV did not come: ``client_errors.py``.
"""
