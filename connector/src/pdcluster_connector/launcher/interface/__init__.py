"""Serves over HTTP what `engine` and `links` decide."""
