"""Array types of the transfers, and two helpers that NumPy lacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]  # addresses and sizes
I64 = npt.NDArray[np.int64]  # block ids and counts


def ranges(counts: I64) -> I64:
    """The ranges from 0 to each count, one behind the other: [2, 3] gives [0, 1, 0, 1, 2]."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)


def runs(joined: npt.NDArray[np.bool_]) -> tuple[I64, I64]:
    """The first index and the length of each run, of at least one item.

    ``joined[i]``: items ``i`` and ``i + 1`` are in the same run.
    """
    starts = np.concatenate([[0], np.flatnonzero(~joined) + 1])
    return starts, np.diff(np.concatenate([starts, [len(joined) + 1]]))
