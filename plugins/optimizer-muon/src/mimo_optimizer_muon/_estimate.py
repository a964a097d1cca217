"""What Muon's optimizer will hold, from shapes. Free of torch."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from mimo.optimizer.estimates import WEIGHT_BYTES, ParameterShape, StateBytes, SteppedShapes, adamw_state


def state_of(stepped: SteppedShapes, is_given: Callable[[ParameterShape], bool]) -> StateBytes:
    """Return one momentum of each matrix, and AdamW's state of everything else.

    Args:
        stepped: all of them.
        is_given: whether a matrix is given to Muon, by its name.
    """
    matrices = [piece for piece in stepped.pieces if _has_matrices(piece) and is_given(piece)]
    others = attrs.evolve(stepped, pieces=tuple(piece for piece in stepped.pieces if piece not in matrices))
    return StateBytes(device=sum(WEIGHT_BYTES * piece.numbers for piece in matrices) + adamw_state(others).device)


def _has_matrices(piece: ParameterShape) -> bool:
    """Return whether a parameter is a matrix, or a stack of the matrices of experts."""
    return len(piece.shape) == 2 or (len(piece.shape) == 3 and piece.experts)  # noqa: PLR2004 - of dims
