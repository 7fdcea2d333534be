"""The comparison harness: is it faster, is it right, and why.

Every command prints a table and writes one dated JSON file to `compare/results/`. A speed is written
only by a run whose own correctness gate is green.
"""
