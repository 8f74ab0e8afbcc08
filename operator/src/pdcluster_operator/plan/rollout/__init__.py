"""Revisions, and how engines of a new one take the place of old ones."""
