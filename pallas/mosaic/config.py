"""Choices that do not change results, only how they are computed."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MosaicConfig:
    """How the kernels of this family run.

    Attributes:
        warpgroups: Warpgroups of 128 threads in an output program; the heads of a group are divided
            among them. 1 or 2; an odd group, a wide tile or a long window uses 1.
        register_operands: Whether the left operand of a product goes from registers to the tensor
            cores. The interpreter on the CPU cannot do that: False sends it through shared memory.
        scan_columns: Columns of the state that one program of the scan over chunks carries.
        scan_stages: Chunks whose contributions a scan program has under way.
    """

    warpgroups: int = 2
    register_operands: bool = True
    scan_columns: int = 16
    scan_stages: int = 8

    def __post_init__(self):
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups must be 1 or 2, but is {self.warpgroups}.")
        if self.scan_columns not in (8, 16, 32, 64):
            raise ValueError(f"scan_columns must be 8, 16, 32 or 64, but is {self.scan_columns}.")
        if self.scan_stages < 1:
            raise ValueError(f"scan_stages must be positive, but is {self.scan_stages}.")
