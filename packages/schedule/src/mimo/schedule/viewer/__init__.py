"""Timelines as an HTML page and as a Chrome trace."""

from mimo.schedule.viewer.page import write_page
from mimo.schedule.viewer.trace import write_trace

__all__ = ["write_page", "write_trace"]
