"""TensorBoard's event files: scalars of steps and evaluations."""

from mimo_logger_tensorboard._plugin import TensorBoard

__all__ = ["TensorBoard"]
