"""Certificates and ticket keys: which engines have them, and when their Secrets are written."""
