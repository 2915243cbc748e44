"""The arithmetic of each scaling mode, one module a mode.

Every mode is the back half of an operation: it takes a `refops.tiles.Source` and fills a `Quantized`.
"""
