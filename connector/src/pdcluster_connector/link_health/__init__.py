"""Links to the peers that the launcher names: made, checked, and noticed when they are lost."""
