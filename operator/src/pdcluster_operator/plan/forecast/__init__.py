"""Predicts what a change of the spec would do, with the operator's own plans."""
