"""What is looked at before an engine starts."""
