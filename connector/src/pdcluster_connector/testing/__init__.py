"""NIXL in memory and engines that fail on request, for tests of this connector and of others."""
