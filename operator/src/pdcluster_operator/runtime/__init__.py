"""The loop that turns news into plans and carries them out. It knows no framework."""
