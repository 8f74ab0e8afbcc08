"""What admission checks."""
