"""Array types of the transfers, and a helper that NumPy lacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]  # addresses and sizes
I64 = npt.NDArray[np.int64]  # block ids and counts


def ranges(counts: I64) -> I64:
    """The ranges from 0 to each count, one behind the other: [2, 3] gives [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
