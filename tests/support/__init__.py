"""Servers and helpers that several test modules use; no tests."""
