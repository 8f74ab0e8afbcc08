"""The PDCluster API: its words, names, labels and ports."""
