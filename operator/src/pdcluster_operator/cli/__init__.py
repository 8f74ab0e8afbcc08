"""The commands `pdcluster` and `pdcluster-operator`."""
