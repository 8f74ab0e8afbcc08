"""When the Secrets with certificates and ticket keys are written."""
