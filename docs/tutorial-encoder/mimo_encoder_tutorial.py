"""The encoder ``tutorial``: a vision transformer of the transformers library, one row for each patch of a picture."""

import attrs
import numpy as np
import torch

from mimo.hooks import hookimpl
from mimo.model import EncoderSpec


@attrs.frozen(kw_only=True)
class TutorialConfig:
    """What users set under ``[modules.<name>.config]``."""

    side: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    patch: int = attrs.field(default=2, validator=attrs.validators.ge(1))
    width: int = attrs.field(default=32, validator=attrs.validators.ge(1))


class Tutorial(torch.nn.Module):
    """Pictures of one size in, a row for each patch out."""

    def __init__(self, config, hidden):
        from transformers import ViTConfig, ViTModel  # here, since planning a layout needs none of it

        super().__init__()
        sizes = {"image_size": config.side, "patch_size": config.patch, "hidden_size": config.width}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 4 * config.width}
        self.model = ViTModel(ViTConfig(**sizes), add_pooling_layer=False)
        self.project = torch.nn.Linear(config.width, hidden)

    def forward(self, items):
        """Return [rows of all items, hidden], in the order of the items. There may be none."""
        if not items:
            return self.project.weight.new_zeros(0, self.project.out_features)
        rows = self.model(torch.stack([item["pixels"] for item in items])).last_hidden_state[:, 1:]
        return self.project(rows.flatten(0, 1))


def prepare(config, picture):
    """Bring a picture to the model's size."""
    pixels = np.asarray(picture.convert("RGB").resize((config.side, config.side)), dtype=np.float32)
    return {"pixels": torch.from_numpy(pixels).permute(2, 0, 1) / 127.5 - 1}


SPEC = EncoderSpec(
    name="tutorial",
    config=TutorialConfig,
    measure=lambda picture: (picture.height, picture.width),
    rows=lambda config, size: (config.side // config.patch) ** 2,
    prepare=prepare,
    build=Tutorial,
    parts={"encoder": ("model",), "projector": ("project",)},
)


@hookimpl
def mimo_register_encoders():
    return [SPEC]
