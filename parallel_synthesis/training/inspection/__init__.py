"""What a run covered, skipped, and where two runs part: read from its files alone, without torch."""
