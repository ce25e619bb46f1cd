"""Rows and their validation, the byte-offset index of .jsonl files, the task table, the order of an epoch (no torch)."""
