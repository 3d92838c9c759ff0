"""Text data: sources, tokenizers, packing and the Grain pipeline; start at `pipeline.open_data`."""
