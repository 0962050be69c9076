"""`scripts/sass`: machine instructions of the Triton kernels, counted without a GPU.

`cases` is the table of kernels, variants and the work of a pass, `launches` records launches and compiles them,
`disassembly` finds loops and registers, `cards` holds the limits of architectures and the figures of cards, `measure`
makes the rows, `report` the tables and the comparison with `tests/data/sass.json`.
"""
