"""What the launcher answers over HTTP."""
