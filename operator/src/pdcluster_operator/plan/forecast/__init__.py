"""What a change would do, played forward with the operator's own plans."""
