"""Where rings and packs go on the line of ranks, and how ends are levelled."""
