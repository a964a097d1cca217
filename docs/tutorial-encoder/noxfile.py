"""``nox`` runs the tests in an environment that holds what pyproject.toml declares; mimo comes from its clone."""

import os
from pathlib import Path

import nox

MIMO = Path(os.environ.get("MIMO", "../mimo"))
NEEDED = ("hooks", "topology", "model")
"""Packages of mimo that the encoder needs: mimo-model, and what that one needs."""


@nox.session
def tests(session):
    """Run the tests; arguments after ``--`` are pytest's."""
    packages = [str(MIMO / "packages" / name) for name in NEEDED]
    session.install("-c", str(MIMO / "constraints.txt"), *packages, ".", "pytest")
    session.run("pytest", *session.posargs)
