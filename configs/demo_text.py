"""The demo: a small byte-level model of Python's standard library, in minutes on two CPU cores."""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    config = ml_collections.ConfigDict()
    config.model = ml_collections.ConfigDict(
        {
            "vocab_size": 259,
            "num_layers": 4,
            "width": 128,
            "num_heads": 2,
            "num_kv_heads": 1,
            "key_width": 64,
            "feed_forward_width": 384,
            "num_slots": 16,
            "windows": "16,full@3",
            # At this size what the last bytes were is half of what there is to know.
            "conv_width": 4,
            "tie_embeddings": True,
            # On a CPU float32 is faster than bfloat16.
            "dtype": "float32",
        }
    )
    config.data = ml_collections.ConfigDict(
        {
            "source": "stdlib",
            "tokenizer": "bytes",
            "sequence_length": 256,
            "batch_size": 4,
        }
    )
    config.optimizer = ml_collections.ConfigDict(
        {
            "peak_learning_rate": 4e-3,
            "warmup_steps": 50,
            # A number of its own: a run stopped early, or in parts, has the same learning rates.
            "decay_steps": 800,
        }
    )
    config.train = ml_collections.ConfigDict({"steps": 800, "log_every_steps": 20})
    config.evaluation = ml_collections.ConfigDict(
        {
            "every_steps": 200,
            # 32 kB of the validation files; None takes all 900 kB of them.
            "max_batches": 32,
            "sample_prompt": "def ",
            "sample_tokens": 300,
        }
    )
    config.checkpoint = ml_collections.ConfigDict({"every_steps": 200})
    return config
