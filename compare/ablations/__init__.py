"""Ablations: each mechanism of the engine switched off, one at a time, next to the engine as it is.

The engine knows nothing of this. An alternative takes the place of one or two of its functions while a context
manager is open (`form.replaced`), on the same weights and in the same process.
"""
