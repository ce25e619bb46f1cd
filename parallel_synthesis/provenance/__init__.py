"""Bytes and their proofs: hashing, manifests, JSON Schema, environment fingerprint (no torch)."""
