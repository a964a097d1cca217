"""What mimo needs of any encoder, and what this one alone promises."""

from PIL import Image

from mimo.model.testing import assert_conforms
from mimo_encoder_tutorial import SPEC, TutorialConfig


def test_the_encoder_keeps_every_promise():
    """Pictures of any size and mode, none at all, several lanes, saving and loading."""
    pictures = [Image.radial_gradient("L").resize(size) for size in ((8, 8), (37, 90), (1, 1))]
    assert_conforms(SPEC, pictures, config=TutorialConfig(width=16))


def test_a_picture_becomes_a_row_for_each_patch():
    """Whatever its own size is."""
    assert SPEC.rows(TutorialConfig(side=8, patch=2), (20, 30)) == 16
