"""What engines, launchers and the operator send each other, and the rules of reading it.

How a ticket is made, signed and read: ``ticket.py``. What side channels send: ``messages.py``; what
launchers send: ``launcher_documents.py``. Who is a peer by its certificate: ``engine_id.py``. What
is wrong in one engine's metadata: ``validation.py``. Which prompts are faults:
``prompt_outcomes.py``.
"""
