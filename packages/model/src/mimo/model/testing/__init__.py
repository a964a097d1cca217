"""The conformance kit: whether an encoder keeps the promises that training on any layout rests on.

```python
from mimo.model.testing import assert_conforms

def test_conforms():
    assert_conforms(MY_ENCODER, items=[picture, wider_picture], config=MyConfig(width=16))
```
"""

from mimo.model.testing._kit import CHECKS, assert_conforms, check_encoder
from mimo.model.testing._subject import Verdict

__all__ = ["CHECKS", "Verdict", "assert_conforms", "check_encoder"]
