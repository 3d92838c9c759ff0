"""What `python -m experiments.benchmark` measures, one file per subject."""
