"""Arrays in files of NumPy's format, written so that a full disk says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray


def save_array(file: Path, array: NDArray[Any]) -> None:
    """As ``numpy.save``, whose error on a full disk has neither a number nor the system's words.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    contiguous = np.ascontiguousarray(array)
    with file.open("wb") as output:
        npy_format.write_array_header_1_0(output, npy_format.header_data_from_array_1_0(contiguous))
        output.write(contiguous.data)
