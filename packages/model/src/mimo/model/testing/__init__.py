"""The conformance kit: whether an encoder keeps the promises that training on any layout rests on.

```python
from mimo.model.testing import assert_conforms

def test_conforms():
    assert_conforms(MY_ENCODER, items=[picture, wider_picture], config=MyConfig(width=16))
```

It splits an encoder in two at most; `assert_layouts` compares any other `ModuleLayout` with the whole module.
A `Subject` builds the module in a layout, for tests of your own on its ranks.
"""

from mimo.model.testing.kit import CHECKS, assert_conforms, check_encoder
from mimo.model.testing.layouts import assert_layouts
from mimo.model.testing.subject import Built, ModuleLayout, Subject, Verdict

__all__ = [
    "CHECKS",
    "Built",
    "ModuleLayout",
    "Subject",
    "Verdict",
    "assert_conforms",
    "assert_layouts",
    "check_encoder",
]
