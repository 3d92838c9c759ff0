"""1.3B parameters (1.29B counted), 100B tokens: the large model of arXiv 2510.07019.

Text and tokenizer are yours to give; a vocabulary of at most 32000 fits:

    python -m experiments.train --config configs/nha_1_3b.py --workdir DIR \
        --config.data.source=TEXT --config.data.tokenizer=TOKENIZER.json
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    sequence_length = 2048
    # 2**20 tokens a step.
    batch_size = 512
    config = ml_collections.ConfigDict()
    config.model = ml_collections.ConfigDict(
        {
            "vocab_size": 32000,
            "num_layers": 24,
            "width": 2048,
            "num_heads": 16,
            "num_kv_heads": 8,
            "key_width": 128,
            "feed_forward_width": 5632,
            "num_slots": 64,
            # Full attention in every eighth layer.
            "windows": "32,full@7,15,23",
            "tie_embeddings": False,
            "remat": "full",
        }
    )
    config.data = ml_collections.ConfigDict(
        {
            "source": "data/text",
            "tokenizer": "data/tokenizer.json",
            "sequence_length": sequence_length,
            "batch_size": batch_size,
            "validation_fraction": 0.001,
            "num_workers": 4,
        }
    )
    config.optimizer = ml_collections.ConfigDict({"peak_learning_rate": 3e-4, "warmup_steps": 1024})
    config.train = ml_collections.ConfigDict(
        {
            "steps": 100_000_000_000 // (sequence_length * batch_size),
            # 64 rows at a time on all devices together, 8 on each of eight.
            "microbatches": 8,
        }
    )
    config.evaluation = ml_collections.ConfigDict({"every_steps": 1000, "max_batches": 16})
    config.checkpoint = ml_collections.ConfigDict({"every_steps": 1000})
    # Parameters and moments (20 GB in float32 with gradients) split over all devices.
    config.mesh = ml_collections.ConfigDict({"data": 1, "fsdp": -1, "tensor": 1})
    return config
