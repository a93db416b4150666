"""From a model family to stages of ops, their fusions, and the NumPy interpreter that specifies their values."""
