"""Which PDClusters are looked at first, and which changes of one are looked at together."""
