"""A config file for tests of the command line; the corpus is given by `--config.data.source`."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = ml_collections.ConfigDict(
        {
            "vocab_size": 259,
            "num_layers": 1,
            "width": 16,
            "num_heads": 2,
            "num_kv_heads": 1,
            "key_width": 8,
            "feed_forward_width": 32,
            "num_slots": 4,
            "windows": "4",
            "dtype": "float32",
        }
    )
    config.data = ml_collections.ConfigDict({"sequence_length": 32, "batch_size": 4})
    config.optimizer = ml_collections.ConfigDict(
        {"peak_learning_rate": 1e-2, "warmup_steps": 5, "decay_steps": 1000}
    )
    config.train = ml_collections.ConfigDict({"steps": 30, "log_every_steps": 1})
    config.evaluation = ml_collections.ConfigDict({"every_steps": 10, "max_batches": 2})
    config.checkpoint = ml_collections.ConfigDict({"every_steps": 5})
    return config
