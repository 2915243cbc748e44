"""The machinery that reads the declarations of `refops.scalings`: it knows no scaling by name.

`quantize` walks a `refops.tiles.Source` and fills a `Quantized` (`result`), `dequantize` reads one. `blocks` cuts
tiles, `layout` pads and swizzles, `hadamard` transforms; `delayed` has the scale of later steps.
"""
