"""Checkpoints: layout and names, atomic commit, retention, snapshots (no torch); training state and writer."""
