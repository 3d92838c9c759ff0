"""Configurations and language models."""
