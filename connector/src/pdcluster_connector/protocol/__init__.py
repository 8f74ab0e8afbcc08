"""What engines, launchers and the operator send each other, and the rules of reading it."""
