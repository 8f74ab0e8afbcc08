"""Engines whose ranks run in several pods."""
