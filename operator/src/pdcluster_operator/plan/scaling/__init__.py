"""How many engines of each role a PDCluster needs, from what its engines measured."""
