"""Commands whose output nobody reads to the end, as after ``| head -1``."""

from __future__ import annotations

import os
import subprocess

import pytest
from commands import SCRIPT


@pytest.mark.parametrize("word", ["init", "plugins"])
def test_output_that_nobody_reads_on_ends_a_command_without_a_word(word: str) -> None:
    """With the code of other tools, printed plainly or as a table."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        ended = subprocess.run([SCRIPT, word], stdout=writes, stderr=subprocess.PIPE, check=False, timeout=200)
    finally:
        os.close(writes)
    assert (ended.returncode, ended.stderr) == (141, b"")
