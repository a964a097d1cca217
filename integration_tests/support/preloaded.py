"""What commands would import first, for the process that they are forked from: see `commands.start`."""

from mimo.trainer import Trainer, generate
from mimo.trainer.runtime import check_source, load_model, measure_job, train_rank

__all__ = ["Trainer", "check_source", "generate", "load_model", "measure_job", "train_rank"]
