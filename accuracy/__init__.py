"""Accuracy of a served model: problems, scoring and comparisons."""
