"""`mimo plugins --check` on what is installed of other kinds than models, and other commands that only print."""

from __future__ import annotations

import pytest
from commands import here

from mimo.trainer.runtime import check_plugin

INSTALLED = {
    "adamw": (),
    "distributed": ("shard=full",),
    "muon": (),
    "digits": (),
    "mock": ("samples=20", "text=8", "height=8", "width=8"),
    "byte": (),
    "word": ('words=["to", "be", "or", "not"]',),
    "1f1b": (),
    "gpipe": (),
    "interleaved": (),
    "zero-bubble": (),
    "ahead": (),
    "metrics": (),
    "console": (),
}


@pytest.mark.parametrize("name", INSTALLED)
def test_our_plugins_keep_what_can_be_checked(name: str) -> None:
    """Nothing is broken, and something has been looked at."""
    verdicts = list(check_plugin(name, INSTALLED[name]))
    assert [str(verdict) for verdict in verdicts if verdict.broken is not None] == []
    assert [verdict for verdict in verdicts if verdict.skipped is None]


def test_an_unknown_plugin_is_refused_with_the_nearest() -> None:
    """Before anything is looked at."""
    ended = here("plugins", "--check", "digit")
    assert ended.code == 2
    assert ended.err == (
        "mimo: --check: expected the name of an installed plugin, got 'digit'. Did you mean 'digits'?\n"
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_command_completes_in_a_shell(shell: str) -> None:
    """What it prints knows the commands and their options."""
    ended = here("completion", shell)
    assert ended.code == 0
    assert all(word in ended.out for word in ("train", "finetune", "checkpoint", "import-hf"))


@pytest.mark.parametrize("words", [("evaluate", "runs/typo"), ("checkpoint", "inspect", "runs/typo")])
def test_a_mistyped_checkpoint_ends_with_2(words: tuple[str, ...]) -> None:
    """As any other wrong word on the command line."""
    ended = here(*words)
    assert ended.code == 2
    assert "Check the path: nothing is there." in ended.err
