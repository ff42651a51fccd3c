"""Numerics: what must be equal between two processes for their results to be equal bit for bit.

Owns the process-wide settings of torch that decide bits. Measured on CPU: the bits depend on the number of threads
(reductions and vectorised loops are split differently) and on the instruction set, and not on where in memory a tensor
lies; `aligned` guards the last on machines where BLAS behaves otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moonrelay.config import default_environment, require_positive

if TYPE_CHECKING:
    import torch

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What decides bits, in this process.

    Attributes:
        threads: Threads of one torch operation.
        cpu: Instruction set that torch chose, e.g. ``AVX512``.
        torch: Version of torch.
        diffusers: Version of diffusers.
    """

    threads: int
    cpu: str
    torch: str
    diffusers: str

    def __post_init__(self) -> None:
        require_positive(self, "threads")


def deterministic_setup(threads: int) -> Numerics:
    """Make this process compute the same bits as every other one that was set up with the same number of threads.

    Call it once, early: after ``import torch`` at the latest before the first use of a GPU. It changes settings of the
    whole process: torch's thread count, deterministic algorithms, cuDNN's autotuning.

    Args:
        threads: Threads of one torch operation; the same number in all stages and in the reference.

    Returns:
        What decides bits here; where two processes' values are equal, so are their results (on a GPU: also its kind).

    Raises:
        ConfigError: ``threads`` is not a number above 0.
    """
    from importlib.metadata import version

    import torch
    from torch.utils import deterministic

    facts = Numerics(
        threads=threads,
        cpu=torch.backends.cpu.get_cpu_capability(),
        torch=torch.__version__,
        diffusers=version("diffusers"),
    )
    default_environment({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Otherwise every torch.empty is filled first, also the registered memory of the data plane.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    return facts


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, contiguous and aligned as torch's own allocator does it; copies only if needed."""
    import torch

    tensor = tensor.contiguous()
    if tensor.data_ptr() % _ALIGNMENT_BYTES:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor
