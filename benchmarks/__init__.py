"""Measurements; each prints a table and writes a JSON file into build/."""
