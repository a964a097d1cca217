"""Errors in samples and items as plain data, by which a rank says to others why it can't go on with a step."""

from __future__ import annotations

from collections.abc import Mapping

from mimo.hooks import DataError, UserError


def fields_of(fault: UserError) -> Mapping[str, str]:
    """Return an error as JSON data."""
    return {"where": fault.where, "expected": fault.expected, "got": fault.got, "fix": fault.fix}


def fault_of(fields: Mapping[str, str]) -> DataError:
    """Return the error of another rank, of which `fields_of` returned these."""
    return DataError(fields["where"], expected=fields["expected"], got=fields["got"], fix=fields["fix"])
