"""Calls to the API server and watches of it."""
