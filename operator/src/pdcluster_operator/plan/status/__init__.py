"""The status of a PDCluster and its events: their contents, and when they are written."""
