"""The spec of a PDCluster: its types, its parsing, and the settings derived from it."""
