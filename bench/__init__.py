"""The figures of SPEC.md, each measured by one file; `python -m bench --help` from the checkout."""
