"""The ways in which `python -m experiments.generate` takes prompts, and how it tells its speed."""
