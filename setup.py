"""Packaging of Native Hybrid Attention: `nha_jax` and `pallas`, and nothing else at top level.

The ranges start at the releases that the test suite runs with; requirements.txt pins all of them.
"""

from pathlib import Path

from setuptools import setup

# Named one by one so that nothing is installed by accident (experiments, configs and tests are
# not) and nothing is left out in silence: tests/test_packaging.py compares a wheel with folders.
PACKAGES = [
    "nha_jax",
    "nha_jax.data",
    "nha_jax.inference",
    "nha_jax.models",
    "nha_jax.modules",
    "nha_jax.ops",
    "nha_jax.training",
    "pallas",
    "pallas.mosaic",
    "pallas.triton",
]

REQUIREMENTS = [
    "absl-py>=2.5.1",
    "array_record>=0.8.6",
    "flax>=0.12.12",
    "grain>=0.2.18",
    "jax>=0.11.2",
    "jaxtyping>=0.3.11",
    # Triton wheels exist for this platform alone, and 1 GB of them serves nobody elsewhere.
    'jax-triton>=0.4.1; sys_platform == "linux" and platform_machine == "x86_64"',
    "matplotlib>=3.11.2",
    "ml_collections>=1.1.0",
    "numpy>=2.5.5",
    "optax>=0.2.8",
    "orbax-checkpoint>=0.12.8",
    "pyarrow>=26.0.1",
    "tensorboardX>=2.6.5",
]

HF = ["tokenizers>=0.23.3"]
TIKTOKEN = ["tiktoken>=0.14.0"]

EXTRAS = {
    "cuda13": ["jax[cuda13]>=0.11.2"],
    "hf": HF,
    "tiktoken": TIKTOKEN,
    "dev": [
        *HF,
        *TIKTOKEN,
        "mypy>=2.4.1",
        "pre_commit>=4.7.0",
        "pytest>=9.2.0",
        "pytest-xdist>=3.8",
        "ruff>=0.17.6",
        "setuptools>=84.2.1",
    ],
}

setup(
    name="nha-jax",
    version="0.1.0",
    description="Native Hybrid Attention in JAX: operator, Flax modules, models and training",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=PACKAGES,
    package_data={"nha_jax": ["py.typed"], "pallas": ["py.typed"]},
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
