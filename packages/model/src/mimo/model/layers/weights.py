"""How weights are drawn."""

from __future__ import annotations


def initial_std(width: int) -> float:
    """Return the standard deviation of weights that read rows of ``width``.

    Variance 1 / (3 width), that of `torch.nn.Linear` (LeCun et al. 1998, section 4.6, for its uniform draw): signals
    neither die in a narrow model nor grow in a wide one. It is GPT-2's 0.02 at a width of 833.
    """
    return float((3 * width) ** -0.5)
