"""From a trained model to text: states of sequences, sampling, generation, the decode engine."""
