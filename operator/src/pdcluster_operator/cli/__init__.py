"""The commands of `pdcluster`."""
