"""``mimo plugins --check``: an installed encoder before the conformance kit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mimo.hooks import PluginError
from mimo.model import ENCODERS, EncoderSpec
from mimo.trainer.config.plugin_kinds import find_installed
from mimo.trainer.config.structure import structure
from mimo.trainer.config.toml import override_key

if TYPE_CHECKING:
    from PIL import Image

    from mimo.model.testing import Verdict

_PICTURES = ((64, 64), (37, 90), (120, 45), (16, 16), (200, 3), (1, 1))
"""Width and height of each, in pixels: also such as people's data have where nobody looked."""


def check_plugin(name: str, settings: Iterable[str]) -> Iterator[Verdict]:
    """Yield the kit's verdicts on an installed encoder.

    Args:
        name: of the encoder.
        settings: ``key=value`` words, of its config; small sizes make it quick.

    Raises:
        ConfigError: no encoder has this name, or a setting is unknown or wrong.
        PluginError: it reads something else than pictures, and brings no examples of that.
    """
    from mimo.model.testing import check_encoder

    spec = find_installed(ENCODERS, name, "--check")
    table: Mapping[str, Any] = {}
    for word in settings:
        table = override_key(table, word)
    config: Any = structure(table, spec.config, "config")
    return check_encoder(spec, _examples(spec, config), config=config)


def _examples(spec: EncoderSpec, config: Any) -> Sequence[Any]:
    if spec.examples is not None:
        return spec.examples(config)
    if spec.modality != "image":
        raise PluginError(
            "--check",
            expected=f"an encoder of images, or one with examples of {spec.modality!r}",
            got=f"encoder {spec.name!r} without any",
            fix="Add to its spec: examples=lambda config: [item, larger_item].",
        )
    return [_picture(*size) for size in _PICTURES]


def _picture(width: int, height: int) -> Image.Image:
    """Return a picture in which no two pixels are equal."""
    from PIL import Image

    gradients = (Image.linear_gradient("L"), Image.linear_gradient("L").rotate(90), Image.radial_gradient("L"))
    return Image.merge("RGB", [gradient.resize((width, height)) for gradient in gradients])
