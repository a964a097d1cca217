"""The program of the child process in which chat templates are rendered; it imports nothing of mimo.

It reads lines of JSON from stdin. The first is ``{"source": …, "bytes": …, "seconds": …}``, and its answer ``{}``. Each
other one is ``{"variables": {…}, "firsts": [[count, asks], …]}``: the text, and how much of it the template writes for
the first ``count`` messages alone, with what asks for an answer or without. The answer is
``{"pieces": [[text, is_generation], …], "firsts": [letters or null, …]}``, or ``{"error": …}``.
"""

from __future__ import annotations

import json
import resource
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes, sandbox
from jinja2.parser import Parser

_NONCE = secrets.token_hex(8)
"""Of this process: no template and no text can hold it."""
_BEGIN, _END = f"<{_NONCE}+>", f"<{_NONCE}->"
_MARKED = "mark_generation"
"""The variable that says whether what stands in ``{% generation %}`` is marked."""
_MAX_ERROR = 300


class Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}``: what the model is to write, as transformers' templates mark it."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a call of `_mark` around what stands between."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", [nodes.Name(_MARKED, "load")])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, marked: Any, caller: Any) -> str:
        text: str = caller()
        return f"{_BEGIN}{text}{_END}" if marked is True else text


class Namespace(jinja2.utils.Namespace):
    """Jinja's, without the attributes by which one reaches Python's own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            msg = f"a namespace has no attribute {name!r}"
            raise jinja2.exceptions.SecurityError(msg)
        super().__setitem__(name, value)


def compile_template(source: str) -> jinja2.Template:
    """Return a template in the sandbox that transformers has, but for the clock: text must not depend on the day."""
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["namespace"] = Namespace
    return environment.from_string(source)


def _to_json(value: Any, **options: Any) -> str:
    known: dict[str, Any] = {"ensure_ascii": False, "indent": None, "separators": None, "sort_keys": False}
    return json.dumps(value, **{key: options.get(key, default) for key, default in known.items()})


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return the text in pieces, and of each whether the model is to write it.

    Raises:
        ValueError: the marks change the text, as where a template measures what it generates.
    """
    pieces = [piece for piece in _split(template.render({**variables, _MARKED: True})) if piece[0]]
    if "".join(text for text, _ in pieces) != template.render({**variables, _MARKED: False}):
        msg = "the text of its {% generation %} blocks depends on what stands around them"
        raise ValueError(msg)
    return pieces


def _split(text: str) -> Iterator[tuple[str, bool]]:
    before, *others = text.split(_BEGIN)
    yield before, False
    for other in others:
        written, found, after = other.partition(_END)
        if not found or _END in after:
            msg = "its {% generation %} blocks stand in each other"
            raise ValueError(msg)
        yield written, True
        yield after, False


def _answer(template: jinja2.Template, variables: Mapping[str, Any], firsts: Sequence[tuple[int, bool]]) -> Any:
    try:
        pieces = render(template, variables)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  # a template may raise anything
        return {"error": _shown(error)}
    text = "".join(piece for piece, _ in pieces)
    return {"pieces": pieces, "firsts": [_length(template, variables, text, *first) for first in firsts]}


def _length(template: jinja2.Template, variables: Mapping[str, Any], text: str, count: int, asks: bool) -> int | None:  # noqa: FBT001  # from JSON
    """Return how much of a text is written for its first messages; None where these alone are written otherwise."""
    messages = variables["messages"][:count]
    try:
        first = template.render({**variables, "messages": messages, "add_generation_prompt": asks, _MARKED: False})
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  # as where a template wants to see an answer
        return None
    return len(first) if text.startswith(first) else None


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR].encode("utf-8", "backslashreplace").decode()


def _read() -> Iterator[Any]:
    for line in sys.stdin.buffer:
        yield json.loads(line)


def _write(answer: Any) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def main() -> None:
    """Answer until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one ends it
    questions = _read()
    first = next(questions)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = first["bytes"] if hard == resource.RLIM_INFINITY else min(first["bytes"], hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(first["seconds"])  # it ends by itself where nobody is left to end it
    try:
        template = compile_template(first["source"])
    except Exception as error:  # noqa: BLE001  # whatever is wrong with it
        _write({"error": _shown(error)})
        return
    _write({})
    signal.alarm(0)
    for question in questions:
        signal.alarm(first["seconds"])
        _write(_answer(template, question["variables"], question["firsts"]))
        signal.alarm(0)


if __name__ == "__main__":
    main()
