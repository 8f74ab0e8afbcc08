"""Certificates: who signs them, which Secret holds them, and connections that use them."""
