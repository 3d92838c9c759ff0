"""Which tests of the operator a platform has: Triton comes for Linux on x86-64 alone."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["test_triton.py"]
