"""`NHAConfig`: what it refuses, and that it survives JSON."""

import json

import pytest

from nha_jax.models.config import NHAConfig
from nha_jax.ops.rotary import RotaryScaling

VALID = {
    "vocab_size": 11,
    "num_layers": 4,
    "width": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "key_width": 4,
    "feed_forward_width": 24,
}


@pytest.mark.parametrize(
    ("changes", "found", "valid"),
    [
        ({"vocab_size": 0}, "vocab_size is 0", "from 1"),
        ({"num_layers": 2.0}, "num_layers is 2.0", "whole number"),
        ({"width": True}, "width is True", "whole number"),
        ({"num_heads": 3}, "num_heads is 3", "multiple of num_kv_heads (2)"),
        ({"num_kv_heads": -2}, "num_kv_heads is -2", "from 1"),
        ({"key_width": 5}, "key_width is 5", "even"),
        ({"value_width": 0}, "value_width is 0", "from 1"),
        ({"feed_forward_width": "24"}, "feed_forward_width is '24'", "whole number"),
        ({"num_slots": -1}, "num_slots is -1", "from 0"),
        ({"windows": "64,full@4"}, "'4' is not a layer", "0 to 3"),
        ({"windows": (1, 2)}, "windows lists 2 layers", "4"),
        ({"gate_temperature": 0.0}, "gate_temperature is 0.0", "above 0"),
        ({"gate_temperature": float("nan")}, "gate_temperature is nan", "finite"),
        ({"qk_norm": 1}, "qk_norm is 1", "True or False"),
        ({"tie_embeddings": None}, "tie_embeddings is None", "True or False"),
        ({"conv_width": 1}, "conv_width is 1", "at least 2"),
        ({"feature_map": "elu"}, "feature_map is 'elu'", "'silu', 'relu', 'identity'"),
        ({"value_activation": "relu"}, "value_activation is 'relu'", "'identity', 'silu'"),
        ({"empty_slots": "zero"}, "empty_slots is 'zero'", "'masked', 'sink'"),
        ({"rotary_theta": -1}, "rotary_theta is -1", "above 0"),
        ({"rotary_theta": "1e4"}, "rotary_theta is '1e4'", "number above 0"),
        ({"rotary_scaling": 8.0}, "rotary_scaling is 8.0", "RotaryScaling or None"),
        ({"norm_epsilon": 0}, "norm_epsilon is 0", "above 0"),
        ({"initializer_range": float("inf")}, "initializer_range is inf", "finite"),
        ({"dtype": "int8"}, "dtype is 'int8'", "'bfloat16'"),
        ({"param_dtype": object}, "param_dtype is 'object'", "'float32'"),
        ({"precision": "tf32"}, "precision is 'tf32'", "'default', 'high', 'highest'"),
        ({"remat": "some"}, "remat is 'some'", "'none', 'full', 'dots', 'dots_no_batch'"),
        ({"implementation": "cuda"}, "implementation is 'cuda'", "'xla'"),
    ],
)
def test_a_bad_field_is_one_sentence(changes, found, valid):
    with pytest.raises(ValueError) as error:
        NHAConfig(**{**VALID, **changes})
    message = str(error.value)
    assert found in message
    assert valid in message
    assert message.endswith(".") and "\n" not in message


def test_normal_forms():
    config = NHAConfig(**VALID, windows="8,full@3")
    assert config.windows == (8, 8, 8, None)
    assert config.value_width == config.key_width
    assert config == NHAConfig(**VALID, windows=[8, 8, 8, "full"], value_width=4)


def test_float32_means_float32():
    assert NHAConfig(**VALID, dtype="float32").matmul_precision == "highest"
    assert NHAConfig(**VALID, dtype="bfloat16").matmul_precision == "default"
    assert NHAConfig(**VALID, dtype="float32", precision="default").matmul_precision == "default"


@pytest.mark.parametrize("scaling", [None, RotaryScaling(kind="llama3", factor=32.0)])
def test_json_round_trip(scaling):
    config = NHAConfig(**VALID, windows="8,full@3", rotary_scaling=scaling, qk_norm=True)
    assert NHAConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_dictionaries_with_wrong_fields_are_refused():
    with pytest.raises(ValueError, match=r"model\.widht .* did you mean model\.width"):
        NHAConfig.from_dict({**VALID, "widht": 3})
    missing = {name: value for name, value in VALID.items() if name != "width"}
    with pytest.raises(ValueError, match=r"model\.width is missing"):
        NHAConfig.from_dict(missing)
    with pytest.raises(ValueError, match="rotary_scaling"):
        NHAConfig.from_dict({**VALID, "rotary_scaling": {"kind": "yarn"}})
    with pytest.raises(ValueError, match="rotary_scaling"):
        NHAConfig.from_dict({**VALID, "rotary_scaling": {"kindd": "linear"}})
