"""What to do, as pure functions of what was observed."""
