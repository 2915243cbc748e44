"""The machinery that reads the declarations of `refops.scalings`: it knows no scaling by name.

`quantize` walks a `refops.tiles.Source` and fills a `Quantized` (`result`), `dequantize` reads one. `layout` pads,
cuts tiles into blocks and swizzles, `hadamard` transforms. `delayed` has the scale of later steps, `block_scales`
float32 scales of blocks as another GEMM reads them.
"""
