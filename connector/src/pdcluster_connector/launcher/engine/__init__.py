"""What the launcher knows of its engine: the process, its start, its work, its end."""
