"""The status of a PDCluster and its events: what they say, and when they are written."""
