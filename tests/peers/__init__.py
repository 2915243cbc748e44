"""Other implementations behind one interface, for conformance (`make conformance`) and speed (`make bench`).

`subjects` says what is compared and what refops gives for it; each module named in `registry.MODULES` says how one peer
is fed, run and read, and how its output is re-derived where it differs.
"""
