"""Command lines over the library; each is run as `python -m experiments.NAME` from the repository root."""
