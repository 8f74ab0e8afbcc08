"""The spec: its types, its parsing, and its defaults."""
