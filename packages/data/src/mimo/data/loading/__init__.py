"""Work that is done ahead of its use, by threads, within bounds; nothing here knows samples or torch."""

from mimo.data.loading.prefetcher import Prefetcher, Ticket
from mimo.data.loading.reading import is_read_failure, retried

__all__ = ["Prefetcher", "Ticket", "is_read_failure", "retried"]
