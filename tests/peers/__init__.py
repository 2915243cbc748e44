"""Other implementations behind one interface, for conformance (`make conformance`) and speed (`make bench`).

`subjects` says what is compared and what refops gives for it, `inputs` on which tensors; each module named in
`registry.MODULES` says how one peer is fed, run and read, and how its output is re-derived where it differs (`rules`).

To add a peer:

1. A module with `NAME`, `PACKAGES` and `offers()`, which imports the peer and returns an `Offer` for each subject; its
   name in `registry.MODULES`.
2. `PYTHONPATH=.:tests python -m peers.conformance MODULE`: what is unexplained gets a `Divergence`, its rule
   written from the peer's source with the parts of refops; the last divergence of an offer must
   give all that the peer gives.
3. Its package in extra `peers` of setup.cfg and in constraints.txt; `make conformance` writes the table.
"""
