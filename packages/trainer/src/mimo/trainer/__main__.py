"""``python -m mimo.trainer`` is ``mimo``, for launchers that want a module: ``torchrun -m mimo.trainer train FILE``."""

from __future__ import annotations

from mimo.trainer.commands.main import main

if __name__ == "__main__":
    main()
