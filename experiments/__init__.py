"""Command lines over the library: `python -m experiments.NAME` from the repository root."""
