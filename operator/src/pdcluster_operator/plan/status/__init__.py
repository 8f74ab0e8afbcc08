"""The status of a PDCluster: its conditions, links, events and when they are written."""
