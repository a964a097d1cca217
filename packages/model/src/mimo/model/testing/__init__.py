"""The conformance kit: whether the plugin of a module keeps the promises that training on any layout rests on.

```python
from mimo.model.testing import assert_conforms, assert_generator_conforms, assert_language_model_conforms

def test_conforms():
    assert_conforms(MY_ENCODER, items=[picture, wider_picture], config=MyConfig(width=16))
    assert_generator_conforms(MY_GENERATOR, items=[picture, wider_picture], config=MyThirdConfig(width=16))
    assert_language_model_conforms(MY_LANGUAGE_MODEL, config=MyOtherConfig(hidden=16))
```

It splits a module in two at most; `assert_layouts` and `assert_language_layouts` compare any other layout with the
whole module. A `Subject` builds an encoder in a layout, a `GeneratorSubject` a generator, a `LanguageSubject` a
language model, for tests of your own on its ranks; `try_axes` says along which axes a module can be split.
"""

from mimo.model.testing.axes import try_axes
from mimo.model.testing.checks import Verdict
from mimo.model.testing.encoder.kit import CHECKS, assert_conforms, check_encoder
from mimo.model.testing.encoder.layouts import assert_layouts
from mimo.model.testing.encoder.subject import Built, ModuleLayout, Subject
from mimo.model.testing.generator import (
    GENERATOR_CHECKS,
    GeneratorSubject,
    assert_generator_conforms,
    check_generator,
)
from mimo.model.testing.language.kit import LANGUAGE_CHECKS, assert_language_model_conforms, check_language_model
from mimo.model.testing.language.layouts import assert_language_layouts
from mimo.model.testing.language.subject import BuiltLanguage, LanguageLayout, LanguageSubject

__all__ = [
    "CHECKS",
    "GENERATOR_CHECKS",
    "LANGUAGE_CHECKS",
    "Built",
    "BuiltLanguage",
    "GeneratorSubject",
    "LanguageLayout",
    "LanguageSubject",
    "ModuleLayout",
    "Subject",
    "Verdict",
    "assert_conforms",
    "assert_generator_conforms",
    "assert_language_layouts",
    "assert_language_model_conforms",
    "assert_layouts",
    "check_encoder",
    "check_generator",
    "check_language_model",
    "try_axes",
]
