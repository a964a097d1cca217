"""What a job asks of encoders to lay samples out."""

from __future__ import annotations

from typing import Any

import attrs
from eye import EYE, find, on, table

from mimo.model import ENCODERS
from mimo.trainer.config.toml import make_settings
from mimo.trainer.resolving.resolve import resolve


def test_an_encoder_is_called_once_for_items_of_one_size() -> None:
    """However many samples have one; what it says is what it becomes."""
    sizes: list[tuple[int, ...]] = []

    def rows(config: Any, size: tuple[int, ...]) -> int:
        sizes.append(size)
        return EYE.rows(config, size)

    def counting(kind: Any, name: str, where: str) -> Any:
        found = find(kind, name, where)
        return attrs.evolve(found, rows=rows) if kind is ENCODERS else found

    settings = table({"vision": on(0, 0), "language": on(0, 0)})
    job, usual = resolve(make_settings(settings), find=counting), resolve(make_settings(settings), find=find)
    assert job.train is not None
    sizes.clear()
    layouts = [job.lay_out(job.train, sample) for sample in range(8)]
    assert [layout.tokens.tolist() for layout in layouts] == [
        usual.lay_out(job.train, sample).tokens.tolist() for sample in range(8)
    ]
    assert sum(len(layout.items) for layout in layouts) > 1
    assert len(sizes) == len(set(sizes)) == len({item.info.size for layout in layouts for item in layout.items})
