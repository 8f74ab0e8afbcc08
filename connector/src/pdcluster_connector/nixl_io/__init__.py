"""Calls to NIXL."""
