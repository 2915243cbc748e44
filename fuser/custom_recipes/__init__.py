"""Quantizers by role, for `CustomRecipe`: TE's factories, and its reference quantizers with the results of `refops`."""
