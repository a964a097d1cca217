"""Work that is done ahead of its use, by threads, within bounds; nothing here knows samples or torch."""

from mimo.data.loading.prefetcher import Prefetcher, Ticket

__all__ = ["Prefetcher", "Ticket"]
